"""Pausing the engine's calls, for an update of its weights.

While it is paused no call reaches the engine: new ones wait, for so long, and are then
told to come again. Calls under way end, or are cut off and sampled anew once the pause
is over, so that no turn of theirs is recorded half.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from trajkit_shim import timing
from trajkit_shim.clock import Clock, Handle
from trajkit_shim.engine import EngineError, Sample
from trajkit_shim.errors import GatewayError

_RETRY_AFTER = 5


class PausedError(EngineError):
    """A call that waited for the end of a pause in vain."""

    code = "paused"
    retry_after = _RETRY_AFTER


@dataclass(slots=True)
class _UnderWay:
    """Calls at the engine, and those of them that were cut off."""

    calls: set[asyncio.Future[Any]] = field(default_factory=set)
    cut: set[asyncio.Future[Any]] = field(default_factory=set)


class Gate:
    """What every call passes on its way to the engine.

    Parameters
    ----------
    wait_seconds : float
        How long a call waits for the end of a pause.
    clock : Clock, optional
        Of what ends a pause by itself. Default: the event loop.
    """

    def __init__(self, *, wait_seconds: float, clock: Clock | None = None) -> None:
        self._wait_seconds = wait_seconds
        self._clock = clock
        self._under_way = _UnderWay()
        # set while nothing is paused
        self._running = asyncio.Event()
        self._running.set()
        self._timer: Handle | None = None

    @property
    def paused(self) -> bool:
        """No call reaches the engine."""
        return not self._running.is_set()

    async def sample(
        self,
        start: Callable[[], Awaitable[Sample]],
        again: Callable[[], bool] = lambda: True,
    ) -> Sample:
        """What a call of the engine gives, once nothing is paused.

        Parameters
        ----------
        start : callable
            Begins the call, anew where a pause cut it off.
        again : callable
            Whether it may begin anew: not where its client has been told of the first
            sample.

        Raises
        ------
        PausedError
            The pause went on for too long, or cut off what cannot begin anew.
        EngineError
            As the engine.
        """
        while True:
            await self._wait()
            call = asyncio.ensure_future(start())
            self._under_way.calls.add(call)
            try:
                with timing.engine():
                    return await call
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if call not in self._under_way.cut or (task and task.cancelling()):
                    raise
            finally:
                self._under_way.calls.discard(call)
                self._under_way.cut.discard(call)
            if not again():
                raise PausedError("the call was cut off by a pause of the engine", 503)

    async def pause(
        self, *, wait_seconds: float, abort: bool, max_seconds: float | None
    ) -> None:
        """Let no call reach the engine; return once none is there.

        Parameters
        ----------
        wait_seconds : float
            How long calls under way may take. Where one takes longer, nothing is
            paused.
        abort : bool
            Cut the calls under way off. They are sampled anew after the pause.
        max_seconds : float, optional
            The pause ends by itself after so long. None: it does not.

        Raises
        ------
        GatewayError
            504: a call took longer. 409: the pause was ended meanwhile.
        """
        self._running.clear()
        self._stop_timer()
        if abort:
            for call in self._under_way.calls:
                self._under_way.cut.add(call)
                call.cancel()
        waiting = list(self._under_way.calls)
        if waiting:
            try:
                await asyncio.wait(waiting, timeout=wait_seconds)
            except asyncio.CancelledError:
                # whoever asked left, and nobody would end it
                self.resume()
                raise
        late = sum(not call.done() for call in waiting)
        if not self.paused:
            raise GatewayError("the pause was ended meanwhile", 409, code="resumed")
        if late:
            self.resume()
            raise GatewayError(
                f"{late} calls are under way after {wait_seconds:g} seconds; nothing is "
                "paused",
                504,
                code="pause_timed_out",
            )
        if max_seconds is not None:
            clock = self._clock or asyncio.get_running_loop()
            self._timer = clock.call_later(max_seconds, self.resume)

    def resume(self) -> None:
        """Let calls through. Where nothing is paused it changes nothing."""
        self._stop_timer()
        self._running.set()

    async def _wait(self) -> None:
        # several pauses may follow one another while one waits
        deadline = asyncio.get_running_loop().time() + self._wait_seconds
        while self.paused:
            left = deadline - asyncio.get_running_loop().time()
            try:
                await asyncio.wait_for(self._running.wait(), left)
            except TimeoutError:
                raise PausedError(
                    f"the engine is paused, for more than {self._wait_seconds:g} "
                    "seconds",
                    503,
                ) from None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
