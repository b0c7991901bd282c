"""The pause of a gateway: a lease, during which its engine may get new weights.

The engine stops sampling; running calls wait there and continue, and a turn's
``weight_versions`` state which of its tokens were sampled with which weights. A pause ends
automatically, so that a trainer that died does not leave the engine paused.
"""

import asyncio
from contextlib import suppress

from trajkit_shim.engines.base import Engine, UpdatableEngine
from trajkit_shim.errors import EngineError, GatewayError

# how long an engine may take to resume by itself
_AT_ONCE_S = 60.0


class Pause:
    """The pauses of one engine, one at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # serializes all operations, including the end of a lease
        self._turn = asyncio.Lock()
        self._lease: asyncio.Task[None] | None = None
        self.paused = False
        self._version: str | None = None  # of the last update, if it succeeded

    async def pause(self, seconds: float, *, renew: bool = False) -> None:
        """Pause for at most ``seconds``; repeated, restart that duration.

        Raises `EngineError`: the engine did not pause, and was asked to resume.
        `GatewayError` (409): the pause to ``renew`` has ended.
        """
        engine = self._updatable()
        async with self._turn:
            if renew:
                self._check_paused()
            self.paused = True
            try:
                await engine.pause()
            except BaseException:
                await asyncio.shield(self._go_on())
                raise
            self._end()
            self.paused = True
            self._lease = asyncio.create_task(self._expire(seconds))

    async def update(self, path: str, version: str) -> None:
        """Load weights of a directory.

        Raises `GatewayError` (409) if there is no pause. `EngineError`: the engine failed
        to load them, it is still paused, and the version is unknown.
        """
        engine = self._updatable()
        async with self._turn:
            self._check_paused()
            # unknown until the update is complete
            self._version = None
            await engine.update_weights(path, version)
            self._version = version

    async def resume(self) -> None:
        """End the pause, if there is one; a failed resume is repeated at expiry."""
        async with self._turn:
            if self.paused:
                await self._updatable().resume()
            self._end()

    async def close(self) -> None:
        """End the pause, if there is one, whatever the engine says."""
        async with self._turn:
            await self._go_on()

    def describe(self) -> dict[str, object]:
        """Return the pause for ``GET /engine``."""
        return {"paused": self.paused, "weight_version": self._version}

    def _check_paused(self) -> None:
        if not self.paused:
            rule = "POST /engine/pause first, and renew the pause before it expires"
            message = f"the engine is not paused: {rule}"
            raise GatewayError(message, 409, code="not_paused")

    def _updatable(self) -> UpdatableEngine:
        if not isinstance(self._engine, UpdatableEngine):
            message = f"{type(self._engine).__name__} cannot be paused"
            raise GatewayError(message, 501, code="engine_not_updatable")
        return self._engine

    async def _expire(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        async with self._turn:
            self._lease = None
            await self._go_on()

    async def _go_on(self) -> None:
        """End the pause; nobody is there for an error, or has one to report already."""
        if self.paused:
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(_AT_ONCE_S):
                    await self._updatable().resume()
        self._end()

    def _end(self) -> None:
        self.paused = False
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None
