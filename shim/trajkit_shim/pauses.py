"""The pause of a gateway: a lease, during which its engine may get new weights.

A pause has a mode. ``keep``: the engine stops sampling; running calls wait and continue,
and a turn's ``weight_versions`` state which of its tokens were sampled with which weights.
``wait``: no call reaches the engine; running calls finish first. ``abort``: likewise, but
running calls are cut off and sampled again after the pause. A pause ends automatically, so
that a trainer that died does not leave the engine paused.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Literal, TypeAlias, get_args

from trajkit_shim.engines.base import Engine, Sample, UpdatableEngine
from trajkit_shim.errors import EngineError, GatewayError

Mode: TypeAlias = Literal["keep", "wait", "abort"]
MODES: tuple[Mode, ...] = get_args(Mode)

# how long an engine may take to resume by itself
_AT_ONCE_S = 60.0


class Pause:
    """Lets calls through to an engine, except during a pause.

    A call waits up to ``wait_seconds`` for the end of a pause.
    """

    def __init__(self, engine: Engine, *, wait_seconds: float) -> None:
        self._engine = engine
        self._wait_seconds = wait_seconds
        # calls at the engine, and whether a pause cut them off
        self._calls: dict[asyncio.Future[Sample], bool] = {}
        self._open = asyncio.Event()  # calls may reach the engine
        self._open.set()
        # serializes all operations, including the end of a lease
        self._turn = asyncio.Lock()
        self._lease: asyncio.Task[None] | None = None
        self.mode: Mode | None = None  # None: not paused
        self.expired = 0  # pauses that ended automatically
        self.version: str | None = None  # of the last update, if it succeeded

    async def sample(self, start: Callable[[], Awaitable[Sample]]) -> Sample:
        """Make an engine call outside of pauses, and return its result.

        ``start`` is called again if a pause cut the call off. Raises `EngineError`
        (``paused``) if the pause took too long.
        """
        while True:
            if not self._open.is_set():
                await self._wait()
            call = asyncio.ensure_future(start())
            self._calls[call] = False
            try:
                return await call
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not self._calls[call] or (task and task.cancelling()):
                    raise
            finally:
                del self._calls[call]

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._wait_seconds):
                # several pauses may follow each other
                while not self._open.is_set():
                    await self._open.wait()
        except TimeoutError:
            message = (
                f"the engine is paused, for more than {self._wait_seconds:g} seconds"
            )
            raise EngineError(message, 503, code="paused", retry_after=5) from None

    async def pause(
        self, seconds: float, mode: Mode = "keep", *, wait_seconds: float = 60.0
    ) -> None:
        """Pause for at most ``seconds``; repeated, restart that duration.

        ``wait_seconds``: how long running calls may take. Nothing is paused if it fails.
        Raises `EngineError`: the engine did not pause, and was asked to resume.
        `GatewayError`: 504: calls took longer. 409: there is a pause of another mode.
        """
        async with self._turn:
            if self.mode not in (None, mode):
                message = f"there is a pause with mode {self.mode!r}: resume first"
                raise GatewayError(message, 409, code="paused")
            try:
                if mode == "keep":
                    await self._updatable().pause()
                else:
                    await self._hold(mode, wait_seconds)
            except BaseException:
                self.mode = mode
                await asyncio.shield(self._go_on())
                raise
            self._end_lease()
            self.mode, self._lease = mode, asyncio.create_task(self._expire(seconds))

    async def update(self, path: str, version: str) -> None:
        """Load weights of a directory.

        Raises `GatewayError` (409) if there is no pause. `EngineError`: the engine failed
        to load them, it is still paused, and `version` is None.
        """
        engine = self._updatable()
        async with self._turn:
            if self.mode is None:
                rule = "POST /engine/pause first, and renew the pause before it expires"
                message = f"the engine is not paused: {rule}"
                raise GatewayError(message, 409, code="not_paused")
            # unknown until the update is complete
            self.version = None
            await engine.update_weights(path, version)
            self.version = version

    async def resume(self) -> None:
        """End the pause, if there is one; a failed resume is repeated at expiry."""
        async with self._turn:
            if self.mode == "keep":
                await self._updatable().resume()
            self._end()

    async def close(self) -> None:
        """End the pause, if there is one, whatever the engine says."""
        async with self._turn:
            await self._go_on()

    def describe(self) -> dict[str, object]:
        return {
            "paused": self.mode is not None,
            "mode": self.mode,
            "pauses_expired": self.expired,
            "weight_version": self.version,
        }

    async def _hold(self, mode: Mode, wait_seconds: float) -> None:
        """Hold back calls; return once none is at the engine."""
        self._open.clear()
        running = {*self._calls}
        for call in running if mode == "abort" else ():
            self._calls[call] = True
            call.cancel()
        if running:
            _, running = await asyncio.wait(running, timeout=wait_seconds)
        if running:
            late = f"{len(running)} calls still run after {wait_seconds:g} seconds"
            message = f"{late}, so nothing is paused"
            raise GatewayError(message, 504, code="pause_timed_out")

    def _updatable(self) -> UpdatableEngine:
        if not isinstance(self._engine, UpdatableEngine):
            message = f"{type(self._engine).__name__} cannot be paused"
            raise GatewayError(message, 501, code="engine_not_updatable")
        return self._engine

    async def _expire(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        async with self._turn:
            self.expired += 1
            self._lease = None
            await self._go_on()

    async def _go_on(self) -> None:
        """End the pause; nobody is there for an error, or has one to report already."""
        if self.mode == "keep" and isinstance(self._engine, UpdatableEngine):
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(_AT_ONCE_S):
                    await self._engine.resume()
        self._end()

    def _end(self) -> None:
        self._end_lease()
        self.mode = None
        self._open.set()

    def _end_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None
