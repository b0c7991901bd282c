"""What the gateway needs from an inference engine: token ids in, token ids out.

An engine sees ids and sampling parameters, but no text and no messages. The gateway
tokenizes and detokenizes.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

T = TypeVar("T")


async def done(large: object, work: Callable[[], T]) -> T:
    """Do some work, in a thread if it is ``large``: it would delay every other call."""
    return await asyncio.to_thread(work) if large else work()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample. ``None``: the engine's own default."""

    max_new_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    # grammar of the reply, as a structural tag of xgrammar; an engine that cannot sample
    # under it raises a 400
    structural_tag: dict[str, object] | None = None
    # engine-specific parameters, passed on unchanged (regex, json_schema, ...)
    extra: dict[str, object] = field(default_factory=dict)

    def values(self) -> dict[str, object]:
        """Return all parameters by name, uncopied."""
        return {name: getattr(self, name) for name in self.__slots__}


class WeightSpan(NamedTuple):
    """Output tokens ``start:stop`` were sampled with the weights ``version``."""

    version: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Result of one engine call. ``None``: the engine does not report it."""

    output_ids: npt.NDArray[np.int32]  # (n_output,), with a sampled stop token
    # (n_output,): log-probabilities under the distribution that was drawn from
    output_logprobs: npt.NDArray[np.float32] | None
    finish_reason: str | None  # the engine's own word: stop, length, abort, ...
    weight_versions: tuple[WeightSpan, ...] = ()
    cached_tokens: int | None = None  # prompt tokens taken from the prefix cache
    prompt_ids: npt.NDArray[np.int32] | None = None  # that the engine consumed
    # (n_prompt + n_output - 1, n_layers, n_experts): of every token but the last
    routed_experts: npt.NDArray[np.int16] | None = None
    # for each output id the ids that could have been drawn in its place, itself included
    sampling_mask: Sequence[Sequence[int]] | None = None

    @property
    def ended(self) -> bool:
        """Whether the model ended the reply, or a stop string did."""
        return self.finish_reason in ("stop", "tool_calls")

    @property
    def complete(self) -> bool:
        """Whether the reply is what was asked for. Others are context only."""
        return self.ended or self.finish_reason == "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What stays the same between calls."""

    model: str
    vocab_size: int  # prompt ids must lie in [0, vocab_size)
    max_context_tokens: int  # prompt and output together


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt: all ids in ``start:stop`` are the model's for an image."""

    start: int
    stop: int
    media_type: str  # image/png, image/jpeg, ...
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineRequest:
    """One call of an engine."""

    # (n_prompt,); the gateway checked that they are in the vocabulary, and that the
    # context has room for them and max_new_tokens
    prompt_ids: npt.NDArray[np.int32]
    sampling: Sampling
    request_id: str
    session_id: str
    # in order; only for engines with a true ``takes_images``
    images: Sequence[PromptImage] = ()


class Engine(Protocol):
    """One inference engine. Implementations are safe for concurrent calls.

    One with a false ``takes_grammars`` gets no ``structural_tag``.
    """

    async def info(self) -> EngineInfo: ...

    async def generate(self, request: EngineRequest) -> Sample:
        """Draw one sample, and return it once it is complete.

        Cancelling the awaiting task aborts the call at the engine. Raises `EngineError`:
        400 if the prompt or a parameter is invalid, 5xx if the engine failed.
        """

    async def close(self) -> None: ...


@runtime_checkable
class UpdatableEngine(Engine, Protocol):
    """An engine whose weights can be changed while calls are running.

    Each method raises `EngineError` if the engine fails.
    """

    async def pause(self) -> None:
        """Stop sampling; running calls wait. Idempotent."""

    async def update_weights(self, path: str, version: str) -> None:
        """Load a model directory's weights, while paused, and name them ``version``."""

    async def resume(self) -> None:
        """Continue sampling. Idempotent."""
