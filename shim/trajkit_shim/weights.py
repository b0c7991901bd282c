"""New weights in the middle of sessions: pause, update, resume.

A pause is a lease: it ends by itself, so that a trainer that died leaves no engine
standing still. Calls under way wait and go on; a turn's ``weight_versions`` say which of
its tokens came from which weights.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from trajkit_shim import wire
from trajkit_shim.answer import while_there
from trajkit_shim.engine import Engine, EngineError, UpdatableEngine
from trajkit_shim.errors import GatewayError

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

# how long an engine may take to stand still, or to go on
_AT_ONCE_S = 60.0


class Weights:
    """The pauses and the weight updates of one engine.

    Parameters
    ----------
    engine : Engine
    at_once_s : float
        How long the engine may take to pause.
    """

    def __init__(self, engine: Engine, at_once_s: float = _AT_ONCE_S) -> None:
        self._engine = engine
        self._at_once_s = at_once_s
        # one thing at a time, the end of a lease included
        self._turn = asyncio.Lock()
        self._lease: asyncio.Task[None] | None = None
        # pauses that ended by themselves
        self.expired = 0
        self.version: str | None = None

    @property
    def paused(self) -> bool:
        """Whether a pause is under way."""
        return self._lease is not None

    async def pause(self, seconds: float) -> None:
        """Have the engine stand still for so long at the most; again: from now on.

        Raises
        ------
        EngineError
            The engine did not; it was told to go on.
        GatewayError
            501: this engine cannot be paused.
        """
        engine = self._updatable()
        async with self._turn:
            try:
                async with asyncio.timeout(self._at_once_s):
                    await engine.pause()
            except TimeoutError as error:
                await self._go_on(engine)
                raise EngineError(
                    f"the engine did not pause within {self._at_once_s:g} s", 504
                ) from error
            except (asyncio.CancelledError, EngineError):
                # it may have paused, and only its answer got lost
                await asyncio.shield(self._go_on(engine))
                raise
            self._end_lease()
            self._lease = asyncio.create_task(self._expire(engine, seconds))

    async def update(self, path: str, version: str) -> None:
        """Load weights while the engine stands still.

        Raises
        ------
        GatewayError
            409: it does not. 501: this engine cannot be updated.
        EngineError
            The engine did not take them; it is still paused.
        """
        engine = self._updatable()
        async with self._turn:
            if not self.paused:
                raise GatewayError(
                    "the engine is not paused: POST /engine/pause first, and again "
                    "before its time is over",
                    409,
                    code="not_paused",
                )
            await engine.update_weights(path, version)
            self.version = version

    async def resume(self) -> None:
        """Have the engine go on; nothing where it is not paused.

        Raises
        ------
        EngineError
            It did not. It is told again when the pause's time is over.
        GatewayError
            501: this engine cannot be paused.
        """
        engine = self._updatable()
        async with self._turn:
            if self.paused:
                await engine.resume()
                self._end_lease()

    async def close(self) -> None:
        """End a pause that is under way."""
        if self.paused:
            with contextlib.suppress(EngineError):
                await self.resume()
            self._end_lease()

    def describe(self) -> dict[str, object]:
        """The state as ``GET /engine`` shows it."""
        return {
            "paused": self.paused,
            "pauses_expired": self.expired,
            "weight_version": self.version,
        }

    def routes(
        self, read_body: Callable[[Request], Awaitable[bytes]]
    ) -> Iterator[tuple[str, str, Endpoint]]:
        """Path, method and endpoint of what a trainer asks.

        Parameters
        ----------
        read_body : callable
            Gives a request's body; refuses one that is too long.
        """

        async def pause(request: Request) -> Response:
            body = wire.parse_object(await read_body(request) or b"{}")
            wire.only(body, {"timeout_s"}, "")
            seconds = 600.0 if (given := body.get("timeout_s")) is None else given
            lease = wire.as_number(seconds, "timeout_s", least=0.0, most=86_400.0)
            await while_there(request, self.pause(lease))
            return JSONResponse(self.describe())

        async def update(request: Request) -> Response:
            body = wire.parse_object(await read_body(request))
            wire.only(body, {"model_path", "weight_version"}, "")
            await self.update(
                wire.as_name(body.get("model_path"), "model_path"),
                wire.as_name(body.get("weight_version"), "weight_version"),
            )
            return JSONResponse(self.describe())

        async def resume(_: Request) -> Response:
            await self.resume()
            return JSONResponse(self.describe())

        async def show(_: Request) -> Response:
            return JSONResponse(self.describe())

        yield "/engine", "GET", show
        yield "/engine/pause", "POST", pause
        yield "/engine/update", "POST", update
        yield "/engine/resume", "POST", resume

    def _updatable(self) -> UpdatableEngine:
        if not isinstance(self._engine, UpdatableEngine):
            raise GatewayError(
                f"{type(self._engine).__name__} cannot be paused",
                501,
                code="engine_not_updatable",
            )
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
        # whoever calls has an error to tell already, or nobody to tell
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(self._at_once_s):
                await engine.resume()
