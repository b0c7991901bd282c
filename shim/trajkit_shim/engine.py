"""What the gateway needs of an inference engine: token ids in, token ids out.

An engine sees ids and sampling parameters and nothing else: no text, no messages. The
gateway owns tokenization in both directions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt


class EngineError(Exception):
    """The engine refused or failed a call.

    Parameters
    ----------
    message : str
        What went wrong, in the engine's words where it gave any.
    status : int
        The HTTP status that says the same to a client: 4xx when the request is at
        fault, 5xx when the engine is.
    """

    # a word for machines
    code = "engine_error"
    # tokens of a prompt that is too long, and the context's length
    overflow: tuple[int, int] | None = None
    # seconds after which it may be different
    retry_after: int | None = None

    def __init__(self, message: str, status: int = 502) -> None:
        super().__init__(message, status)
        self.message = message
        self.status = status

    def __str__(self) -> str:
        return self.message


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
    # engine-specific parameters, passed on as they are (regex, json_schema, ...)
    extra: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Output tokens ``start:stop`` were sampled with the weights ``version``."""

    version: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One engine call's result."""

    # shape (n_output,); a stop token that was sampled is the last of them
    output_ids: npt.NDArray[np.int32]
    # shape (n_output,): log-probability of each output id under the distribution it was
    # drawn from; None: the engine gave none
    output_logprobs: npt.NDArray[np.float32] | None
    # the engine's own word: stop, length, abort, ...
    finish_reason: str
    weight_versions: tuple[WeightSpan, ...] = ()
    # prompt tokens that the engine did not compute again; None: it does not say
    cached_tokens: int | None = None
    # the prompt that it says it consumed: how many tokens, and which; None: it does not
    prompt_tokens: int | None = None
    prompt_ids: npt.NDArray[np.int32] | None = None
    # shape (n_prompt + n_output - 1, n_layers, n_experts), of every token but the last;
    # None: it does not say
    routed_experts: npt.NDArray[np.int16] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What stays the same between calls."""

    model: str
    # prompt ids must lie in [0, vocab_size)
    vocab_size: int
    # prompt and output together
    max_context_tokens: int


class Engine(Protocol):
    """One inference engine. Implementations are safe for concurrent calls."""

    async def info(self) -> EngineInfo: ...

    async def generate(
        self,
        prompt_ids: npt.NDArray[np.int32],
        sampling: Sampling,
        *,
        request_id: str,
        session_id: str,
    ) -> Sample:
        """One sample for one prompt.

        Cancelling the awaiting task aborts the call at the engine.

        Raises
        ------
        EngineError
            The engine refused the request or failed.
        """
        ...

    async def close(self) -> None: ...


OnTokens: TypeAlias = Callable[[Sequence[int]], None]
"""Takes the output ids that are new."""


@runtime_checkable
class StreamingEngine(Engine, Protocol):
    """An engine that tells what it samples while it samples."""

    async def stream(
        self,
        prompt_ids: npt.NDArray[np.int32],
        sampling: Sampling,
        *,
        request_id: str,
        session_id: str,
        on_tokens: OnTokens,
    ) -> Sample:
        """As `generate`, and tells the output ids as they come.

        ``on_tokens`` is called on the event loop, with any number of ids; put together
        they are the beginning of the sample's ``output_ids``, or all of them.
        """
        ...


@runtime_checkable
class UpdatableEngine(Engine, Protocol):
    """An engine whose weights can be changed while calls are under way."""

    async def pause(self) -> None:
        """Sample no more; calls under way wait. Again: nothing changes.

        Raises
        ------
        EngineError
            The engine failed.
        """
        ...

    async def update_weights(self, path: str, version: str) -> None:
        """Load the weights of a model directory, while paused, under a name.

        Raises
        ------
        EngineError
            The engine did not take them.
        """
        ...

    async def resume(self) -> None:
        """Go on. Again: nothing changes.

        Raises
        ------
        EngineError
            The engine failed.
        """
        ...
