"""Updates weights in the middle of sessions: pause, update, resume.

A pause is a lease. It ends automatically, so that a trainer that died does not leave the
engine paused. Running calls wait and continue; a turn's ``weight_versions`` state which
of its tokens were sampled with which weights.
"""

import asyncio
import contextlib
from collections.abc import Sequence

from trajkit_shim.engines.base import Engine, TensorEngine, UpdatableEngine
from trajkit_shim.errors import EngineError, GatewayError

# how long an engine may take to pause or resume
_AT_ONCE_S = 60.0


class Weights:
    """The pauses and weight updates of one engine, which must pause in ``at_once_s``."""

    def __init__(self, engine: Engine, at_once_s: float = _AT_ONCE_S) -> None:
        self._engine = engine
        self._at_once_s = at_once_s
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

        Raises `EngineError`: the engine failed to pause, and was asked to resume.
        `GatewayError`: 501: this engine cannot be paused.
        """
        engine = self._updatable()
        async with self._turn:
            try:
                async with asyncio.timeout(self._at_once_s):
                    await engine.pause()
            except (TimeoutError, asyncio.CancelledError, EngineError) as error:
                # it may have paused, with only its answer lost
                await asyncio.shield(self._go_on(engine))
                if isinstance(error, TimeoutError):
                    message = f"the engine did not pause within {self._at_once_s:g} s"
                    raise EngineError(message, 504) from error
                raise
            self._end_lease()
            self._lease = asyncio.create_task(self._expire(engine, seconds))

    async def update(
        self, source: str | Sequence[str], version: str, load_format: str | None = None
    ) -> None:
        """Load weights while the engine is paused.

        ``source``: a model directory, or serialized tensors in ``load_format``. Raises
        `GatewayError`: 409: the engine is not paused. 501: this engine cannot be
        updated. `EngineError`: the engine failed to load them. The engine is still paused
        then, and `version` is None.
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
        """Resume the engine if it is paused.

        Raises `EngineError`: it failed. It is asked again when the pause expires.
        `GatewayError`: 501: this engine cannot be paused.
        """
        engine = self._updatable()
        async with self._turn:
            if self.paused:
                await engine.resume()
                self._end_lease()

    async def close(self) -> None:
        """End a pause, if there is one."""
        if self.paused:
            with contextlib.suppress(EngineError):
                await self.resume()
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

    async def _expire(self, engine: UpdatableEngine, seconds: float) -> None:
        await asyncio.sleep(seconds)
        async with self._turn:
            self.expired += 1
            self._lease = None
            await self._go_on(engine)

    async def _go_on(self, engine: UpdatableEngine) -> None:
        # the caller has an error to report already, or there is no caller
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(self._at_once_s):
                await engine.resume()


def _not_updatable(engine: Engine, what: str) -> GatewayError:
    message = f"{type(engine).__name__} cannot be {what}"
    return GatewayError(message, 501, code="engine_not_updatable")
