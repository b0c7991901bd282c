"""The embedded engine: token ids in, token ids out, by a scripted policy."""

import asyncio
import math
import random
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from trajkit_shim.engines import base
from trajkit_shim.engines.embedded.distribution import Lattice, State, shaped, start
from trajkit_shim.engines.embedded.script import Policy, Special, converse
from trajkit_shim.engines.embedded.vocabulary import END, shipped
from trajkit_shim.errors import EngineError

# After this many tokens a stream gets an event. Other calls may run, and a cancelled
# call ends.
_TOKENS_PER_EVENT = 8


class EmbeddedEngine:
    """An `Engine` without a model, which samples from an exactly known distribution.

    The policy reads the prompt's text and returns the possible replies. The engine draws
    a reply, and a way to spell it in tokens (`engines.embedded.distribution`). Every
    logprob is that of the token given the prompt and the tokens before it, under the
    call's temperature, ``top_k`` and ``top_p``; with temperature 0 it is 0.0.

    An output ends with ``<|im_end|>`` unless it is cut short. ``stop`` strings and
    ``stop_token_ids`` end it too and stay in the output.

    Parameters
    ----------
    policy : callable
        Maps the prompt's text to weighted replies.
    drift : float
        Weight of a token outside the canonical spelling, in (0, 1]. At 0.05 about half
        of all replies of 170 tokens are not canonical.
    seed : int, optional
        For calls without a seed of their own. Default: random.
    max_context_tokens : int
        Prompt and output together.
    """

    def __init__(
        self,
        policy: Policy = converse,
        *,
        drift: float = 0.05,
        seed: int | None = None,
        max_context_tokens: int = 65_536,
    ) -> None:
        if not 0 < drift <= 1:
            raise ValueError(f"drift = {drift} is not in (0, 1]")
        self.vocabulary = shipped()
        self._policy = policy
        self._random = random.Random(seed)
        self._info = base.EngineInfo(
            model="trajkit-embedded",
            vocab_size=self.vocabulary.size,
            max_context_tokens=max_context_tokens,
        )

        @lru_cache(maxsize=256)
        def lattice(parts: tuple[str | Special, ...]) -> Lattice:
            return Lattice(self.vocabulary, parts, drift)

        self._lattice = lattice

    async def info(self) -> base.EngineInfo:
        """Model name, vocabulary size and context length."""
        return self._info

    async def generate(
        self,
        prompt_ids: npt.NDArray[np.int32],
        sampling: base.Sampling,
        *,
        request_id: str,
        session_id: str,
        on_tokens: base.OnTokens | None = None,
    ) -> base.Sample:
        """See `StreamingEngine`."""
        self._check_sampling(sampling)
        room = self._info.max_context_tokens - sampling.max_new_tokens
        state = self._start(prompt_ids, room)
        seed = self._random.getrandbits(64) if sampling.seed is None else sampling.seed
        draw = random.Random(seed)
        ends = {self.vocabulary.added[END], *sampling.stop_token_ids}
        stops = [text.encode() for text in sampling.stop]
        text = bytearray()
        ids: list[int] = []
        logprobs: list[float] = []
        finish_reason = "length"
        while len(ids) < sampling.max_new_tokens:
            chances = _shaped(state, sampling)
            token = _drawn(chances, draw.random())
            ids.append(token)
            logprobs.append(_log(chances[token]))
            text += self.vocabulary.spelling[token]
            if token in ends or any(stop in text for stop in stops):
                finish_reason = "stop"
                break
            state = state.after(token)
            if len(ids) % _TOKENS_PER_EVENT == 0:
                if on_tokens is not None:
                    on_tokens(ids[-_TOKENS_PER_EVENT:])
                await asyncio.sleep(0)
        return base.Sample(
            output_ids=np.array(ids, np.int32),
            output_logprobs=np.array(logprobs, np.float32),
            finish_reason=finish_reason,
            weight_versions=(base.WeightSpan("scripted", 0, len(ids)),),
        )

    stream = generate

    async def close(self) -> None:
        """Nothing to release."""

    def _start(self, prompt_ids: npt.NDArray[np.int32], room: int) -> State:
        """The state after a prompt of at most ``room`` tokens."""
        ids = np.asarray(prompt_ids)
        if ids.ndim != 1 or len(ids) == 0:
            raise EngineError(f"prompt of shape {ids.shape}: there are no ids", 400)
        if len(ids) > room:
            raise EngineError(
                f"{len(ids)} prompt tokens, and room for {max(room, 0)} before the "
                f"output in a context of {self._info.max_context_tokens}",
                400,
            )
        outside = np.flatnonzero((ids < 0) | (ids >= self._info.vocab_size))
        if len(outside):
            index = int(outside[0])
            raise EngineError(
                f"prompt id {ids[index]} at position {index} is outside the vocabulary "
                f"of {self._info.vocab_size}",
                400,
            )
        replies = self._policy(self.vocabulary.decode(ids.tolist()))
        return start([(reply.weight, self._lattice(reply.parts)) for reply in replies])

    def _check_sampling(self, sampling: base.Sampling) -> None:
        """Reject invalid parameters."""
        length, top_k = sampling.max_new_tokens, sampling.top_k
        temperature, top_p = sampling.temperature, sampling.top_p
        if length < 1:
            raise EngineError(f"max_new_tokens = {length} is not at least 1", 400)
        if temperature is not None and not 0 <= temperature < math.inf:
            raise EngineError(f"temperature = {temperature} is not in [0, inf)", 400)
        if top_p is not None and not 0 < top_p <= 1:
            raise EngineError(f"top_p = {top_p} is not in (0, 1]", 400)
        if top_k is not None and top_k < 1 and top_k != -1:
            raise EngineError(f"top_k = {top_k} is neither -1 nor at least 1", 400)
        if "" in sampling.stop:
            raise EngineError("stop = '' matches before any token", 400)
        if sampling.structural_tag is not None:
            raise EngineError("the embedded engine cannot sample under a grammar", 400)
        for name in sampling.extra:
            raise EngineError(f"the embedded engine has no parameter {name!r}", 400)


def _shaped(state: State, sampling: base.Sampling) -> dict[int, float]:
    return shaped(
        state.next(),
        1.0 if sampling.temperature is None else sampling.temperature,
        None if sampling.top_k == -1 else sampling.top_k,
        1.0 if sampling.top_p is None else sampling.top_p,
    )


def _drawn(chances: dict[int, float], number: float) -> int:
    """The token whose part of [0, 1) contains the number."""
    token = -1
    for token, chance in chances.items():  # noqa: B007
        number -= chance
        if number < 0:
            break
    # past the last part only by rounding
    return token


def _log(chance: float) -> float:
    """A logprob; rounding may leave a probability slightly above 1."""
    return min(math.log(chance), 0.0)
