"""An engine that adds faults to another engine."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from trajkit_shim.engines.base import Engine, EngineInfo, EngineRequest, Sample
from trajkit_shim.errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of one call.

    Parameters
    ----------
    delay_s : float
        Seconds before the call starts.
    error : EngineError, optional
        Raised instead of a sample.
    abort_after : int, optional
        The sample ends after this many tokens with finish reason ``abort``.
    """

    delay_s: float = 0.0
    error: EngineError | None = None
    abort_after: int | None = None


class FaultyEngine:
    """Passes calls on to another engine, with faults.

    Parameters
    ----------
    engine : Engine
    faults : iterable of Fault or None
        One per call, in order; None, or after the last: no fault.

    Attributes
    ----------
    calls, cancelled : int
        Calls that started, and calls whose awaiting task was cancelled.
    """

    def __init__(self, engine: Engine, faults: Iterable[Fault | None]) -> None:
        self._engine = engine
        self._faults = iter(faults)
        self.calls = 0
        self.cancelled = 0

    async def info(self) -> EngineInfo:
        return await self._engine.info()

    async def generate(self, request: EngineRequest) -> Sample:
        """Sample with the other engine and apply the fault."""
        self.calls += 1
        fault = next(self._faults, None) or Fault()
        try:
            await asyncio.sleep(fault.delay_s)
            if fault.error is not None:
                raise fault.error
            sample = await self._engine.generate(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return sample if fault.abort_after is None else _cut(sample, fault.abort_after)

    async def close(self) -> None:
        await self._engine.close()


def _cut(sample: Sample, length: int) -> Sample:
    logprobs = sample.output_logprobs
    return Sample(
        output_ids=sample.output_ids[:length],
        output_logprobs=None if logprobs is None else logprobs[:length],
        finish_reason="abort",
        weight_versions=tuple(
            type(span)(span.version, span.start, min(span.stop, length))
            for span in sample.weight_versions
            if span.start < length
        ),
        cached_tokens=sample.cached_tokens,
    )
