"""Pauses: of the gateway's calls, or of the engine itself while it gets new weights.

During a pause of the calls none reaches the engine. New calls wait up to a limit and are
then rejected with a request to retry. Running calls finish, or are cut off and sampled
again after the pause, so no turn is recorded incompletely.

A pause of the engine is a lease. It ends automatically, so that a trainer that died does
not leave the engine paused. Running calls wait and continue; a turn's ``weight_versions``
state which of its tokens were sampled with which weights.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from trajkit_shim import timing
from trajkit_shim.engines.base import Engine, Sample, TensorEngine, UpdatableEngine
from trajkit_shim.errors import EngineError, GatewayError

_RETRY_AFTER = 5
# how long an engine may take to pause or resume
_AT_ONCE_S = 60.0


class Gate:
    """Lets calls through to the engine, except during a pause.

    A call waits up to ``wait_seconds`` for the end of a pause.
    """

    def __init__(self, *, wait_seconds: float) -> None:
        self._wait_seconds = wait_seconds
        # calls at the engine, and whether a pause cut them off
        self._calls: dict[asyncio.Future[Sample], bool] = {}
        self._running = asyncio.Event()  # set unless paused
        self._running.set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def paused(self) -> bool:
        """Whether calls have to wait."""
        return not self._running.is_set()

    async def sample(self, start: Callable[[], Awaitable[Sample]]) -> Sample:
        """Make an engine call outside of pauses, and return its result.

        ``start`` is called again if a pause cut the call off. Raises `EngineError`
        (``paused``) if the pause took too long.
        """
        while True:
            await self._wait()
            call = asyncio.ensure_future(start())
            self._calls[call] = False
            try:
                with timing.engine():
                    return await call
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not self._calls[call] or (task and task.cancelling()):
                    raise
            finally:
                del self._calls[call]

    async def pause(
        self, *, wait_seconds: float, abort: bool, max_seconds: float | None
    ) -> None:
        """Hold back calls; return once none is at the engine.

        ``abort``: cut off running calls. ``max_seconds``: duration of the pause. Raises
        `GatewayError`: 504: a call took longer than ``wait_seconds``, so nothing is
        paused. 409: the pause was ended meanwhile.
        """
        # the timer of an earlier pause is not for this one
        self.resume()
        self._running.clear()
        late = {*self._calls}
        for call in late if abort else ():
            self._calls[call] = True
            call.cancel()
        try:
            if late:
                _, late = await asyncio.wait(late, timeout=wait_seconds)
        except asyncio.CancelledError:
            # the caller left, so nobody would end the pause
            self.resume()
            raise
        if not self.paused:
            raise GatewayError("the pause was ended meanwhile", 409, code="resumed")
        if late:
            self.resume()
            calls = (
                f"{len(late)} calls are still running after {wait_seconds:g} seconds"
            )
            message = f"{calls}, so nothing is paused"
            raise GatewayError(message, 504, code="pause_timed_out")
        if max_seconds is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max_seconds, self.resume)

    def resume(self) -> None:
        """End a pause, if there is one."""
        if self._timer is not None:
            self._timer.cancel()
        self._running.set()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._wait_seconds):
                # several pauses may follow each other
                while self.paused:
                    await self._running.wait()
        except TimeoutError:
            limit = f"{self._wait_seconds:g} seconds"
            message = f"the engine is paused, for more than {limit}"
            raise _paused(message) from None


def _paused(message: str) -> EngineError:
    return EngineError(message, 503, code="paused", retry_after=_RETRY_AFTER)


class Weights:
    """The pauses and weight updates of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # serializes all operations, including the end of a lease
        self._turn = asyncio.Lock()
        self._lease: asyncio.Task[None] | None = None
        self.expired = 0  # pauses that ended automatically
        self.version: str | None = None  # of the last update, if it succeeded

    @property
    def paused(self) -> bool:
        """Whether the engine is paused."""
        return self._lease is not None

    async def pause(self, seconds: float) -> None:
        """Pause the engine for at most ``seconds``; repeated, restart that duration.

        Raises `EngineError` if it failed to pause; it was asked to resume then.
        """
        engine = self._updatable()
        async with self._turn:
            try:
                async with asyncio.timeout(_AT_ONCE_S):
                    await engine.pause()
            except (TimeoutError, asyncio.CancelledError, EngineError) as error:
                # it may have paused, with only its answer lost
                await asyncio.shield(self._go_on())
                if isinstance(error, TimeoutError):
                    message = f"the engine did not pause within {_AT_ONCE_S:g} s"
                    raise EngineError(message, 504) from error
                raise
            self._end_lease()
            self._lease = asyncio.create_task(self._expire(seconds))

    async def update(
        self, source: str | Sequence[str], version: str, load_format: str | None = None
    ) -> None:
        """Load weights of a directory, or of tensors in ``load_format``.

        Raises `GatewayError` (409) if the engine is not paused. `EngineError`: it failed to
        load them, is still paused, and `version` is None.
        """
        engine = self._updatable()
        async with self._turn:
            if not self.paused:
                rule = "POST /engine/pause first, and renew the pause before it expires"
                message = f"the engine is not paused: {rule}"
                raise GatewayError(message, 409, code="not_paused")
            # unknown until the update is complete
            self.version = None
            if isinstance(source, str):
                await engine.update_weights(source, version)
            elif isinstance(engine, TensorEngine):
                await engine.update_tensors(source, load_format, version)
            else:
                raise _not_updatable(engine, "updated from tensors")
            self.version = version

    async def resume(self) -> None:
        """Resume the engine if it is paused; a failed resume is repeated at expiry."""
        engine = self._updatable()
        async with self._turn:
            if self.paused:
                await engine.resume()
                self._end_lease()

    async def close(self) -> None:
        """End a pause, if there is one."""
        async with self._turn:
            if self.paused:
                await self._go_on()
                self._end_lease()

    def describe(self) -> dict[str, object]:
        """Return the state for ``GET /engine``."""
        return {
            "paused": self.paused,
            "pauses_expired": self.expired,
            "weight_version": self.version,
        }

    def _updatable(self) -> UpdatableEngine:
        if not isinstance(self._engine, UpdatableEngine):
            raise _not_updatable(self._engine, "paused")
        return self._engine

    def _end_lease(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None

    async def _expire(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        async with self._turn:
            self.expired += 1
            self._lease = None
            await self._go_on()

    async def _go_on(self) -> None:
        # the caller has an error to report already, or there is no caller
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(_AT_ONCE_S):
                await self._updatable().resume()


def _not_updatable(engine: Engine, what: str) -> GatewayError:
    message = f"{type(engine).__name__} cannot be {what}"
    return GatewayError(message, 501, code="engine_not_updatable")
