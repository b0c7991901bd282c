"""Pauses the engine's calls, for an update of its weights.

During a pause no call reaches the engine. New calls wait up to a limit and are then
rejected with a request to retry. Running calls finish, or are cut off and sampled again
after the pause, so no turn is recorded incompletely.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from trajkit_shim import timing
from trajkit_shim.clock import Clock
from trajkit_shim.engines.base import Sample
from trajkit_shim.errors import EngineError, GatewayError

_RETRY_AFTER = 5


class Gate:
    """Lets calls through to the engine, except during a pause.

    ``wait_seconds``: how long a call waits for the end of a pause. ``clock``: times
    pauses that end automatically. Default: the event loop.
    """

    def __init__(self, *, wait_seconds: float, clock: Clock | None = None) -> None:
        self._wait_seconds = wait_seconds
        self._clock = clock
        # calls at the engine, and those of them that were cut off
        self._calls: set[asyncio.Future[Any]] = set()
        self._cut: set[asyncio.Future[Any]] = set()
        self._running = asyncio.Event()  # set unless paused
        self._running.set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def paused(self) -> bool:
        """Whether calls have to wait."""
        return not self._running.is_set()

    async def sample(
        self,
        start: Callable[[], Awaitable[Sample]],
        again: Callable[[], bool] = lambda: True,
    ) -> Sample:
        """Make an engine call outside of pauses, and return its result.

        ``start``: starts the call; called again if a pause cut it off. ``again``:
        whether it may start again. It may not once its client has seen output. Raises
        `EngineError`: from the engine; ``paused``: the pause took too long, or cut off a
        call that cannot start again.
        """
        while True:
            await self._wait()
            call = asyncio.ensure_future(start())
            self._calls.add(call)
            try:
                with timing.engine():
                    return await call
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if call not in self._cut or (task and task.cancelling()):
                    raise
            finally:
                self._calls.discard(call)
                self._cut.discard(call)
            if not again():
                raise _paused("a pause of the engine cut off the call")

    async def pause(
        self, *, wait_seconds: float, abort: bool, max_seconds: float | None
    ) -> None:
        """Hold back calls; return once none is at the engine.

        ``wait_seconds``: how long running calls may take. If one takes longer, the
        pause is undone. ``abort``: cut off running calls, which are sampled again after
        the pause. ``max_seconds``: duration after which the pause ends automatically.
        Default: unlimited. Raises `GatewayError`: 504: a call took longer. 409: the
        pause was ended meanwhile.
        """
        self._running.clear()
        self._stop_timer()
        if abort:
            for call in self._calls:
                self._cut.add(call)
                call.cancel()
        waiting = list(self._calls)
        if waiting:
            try:
                await asyncio.wait(waiting, timeout=wait_seconds)
            except asyncio.CancelledError:
                # the caller left, so nobody would end the pause
                self.resume()
                raise
        late = sum(not call.done() for call in waiting)
        if not self.paused:
            raise GatewayError("the pause was ended meanwhile", 409, code="resumed")
        if late:
            self.resume()
            calls = f"{late} calls are still running after {wait_seconds:g} seconds"
            message = f"{calls}, so nothing is paused"
            raise GatewayError(message, 504, code="pause_timed_out")
        if max_seconds is not None:
            clock = self._clock or asyncio.get_running_loop()
            self._timer = clock.call_later(max_seconds, self.resume)

    def resume(self) -> None:
        """End a pause, if there is one."""
        self._stop_timer()
        self._running.set()

    async def _wait(self) -> None:
        # several pauses may follow each other while a call waits
        deadline = asyncio.get_running_loop().time() + self._wait_seconds
        while self.paused:
            left = deadline - asyncio.get_running_loop().time()
            try:
                await asyncio.wait_for(self._running.wait(), left)
            except TimeoutError:
                limit = f"{self._wait_seconds:g} seconds"
                message = f"the engine is paused, for more than {limit}"
                raise _paused(message) from None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _paused(message: str) -> EngineError:
    return EngineError(message, 503, code="paused", retry_after=_RETRY_AFTER)
