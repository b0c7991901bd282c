"""The embedded engine: token ids in, token ids out, by a scripted policy."""

import asyncio
import math
import random
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from trajkit_shim.embedded.lattice import Lattice
from trajkit_shim.embedded.law import State, shaped, start
from trajkit_shim.embedded.policy import converse
from trajkit_shim.embedded.replies import Policy, Special
from trajkit_shim.embedded.vocabulary import END, shipped
from trajkit_shim.engine import (
    EngineError,
    EngineInfo,
    OnTokens,
    Sample,
    Sampling,
    WeightSpan,
)

# other calls get their turn, and a cancelled call ends, after this many tokens
_TOKENS_PER_SLICE = 64
# a stream is told of its tokens after so many
_TOKENS_PER_PIECE = 8


class EmbeddedEngine:
    """An `Engine` that needs no model: it draws from a law that is known exactly.

    The policy reads the prompt's text and gives the replies that may follow; a reply is
    drawn, and a spelling of it in tokens (`trajkit_shim.embedded.lattice`). Every
    logprob is the probability of that token given the prompt and the tokens before it,
    under the temperature, ``top_k`` and ``top_p`` of the call: with temperature 0 it
    is 0.0.

    Parameters
    ----------
    policy : callable
        From the prompt's text to weighted replies.
    drift : float
        Weight of a token that is not in the canonical spelling, in (0, 1]. At 0.05
        about half of all replies of 170 tokens are not canonical.
    seed : int, optional
        Seeds the calls that bring no seed of their own. None: differently each time.
    model : str
        The name that `info` gives.
    weight_version : str
        The weights that each sample says it was drawn with.
    max_context_tokens : int
        Prompt and output together.
    """

    def __init__(
        self,
        policy: Policy = converse,
        *,
        drift: float = 0.05,
        seed: int | None = None,
        model: str = "trajkit-embedded",
        weight_version: str = "scripted",
        max_context_tokens: int = 65_536,
    ) -> None:
        if not 0 < drift <= 1:
            raise ValueError(f"drift = {drift} is not in (0, 1]")
        self.vocabulary = shipped()
        self._policy = policy
        self._random = random.Random(seed)
        self._weight_version = weight_version
        self._info = EngineInfo(
            model=model,
            vocab_size=self.vocabulary.size,
            max_context_tokens=max_context_tokens,
        )

        @lru_cache(maxsize=256)
        def lattice(parts: tuple[str | Special, ...]) -> Lattice:
            return Lattice(self.vocabulary, parts, drift)

        self._lattice = lattice

    async def info(self) -> EngineInfo:
        """Model name, vocabulary size and context length."""
        return self._info

    async def generate(
        self,
        prompt_ids: npt.NDArray[np.int32],
        sampling: Sampling,
        *,
        request_id: str,
        session_id: str,
    ) -> Sample:
        """One reply to a prompt, in ids, ended by ``<|im_end|>`` unless cut short.

        ``stop`` strings and ``stop_token_ids`` end it too; what matched stays in the
        output. Cancelling the awaiting task ends the call.

        Raises
        ------
        EngineError
            Status 400: an id outside the vocabulary, an empty or over-long prompt, a
            sampling parameter out of range or not known here.
        """
        return await self._draw(prompt_ids, sampling, None)

    async def stream(
        self,
        prompt_ids: npt.NDArray[np.int32],
        sampling: Sampling,
        *,
        request_id: str,
        session_id: str,
        on_tokens: OnTokens,
    ) -> Sample:
        """As `generate`, and tells the output ids as they come."""
        return await self._draw(prompt_ids, sampling, on_tokens)

    async def _draw(
        self,
        prompt_ids: npt.NDArray[np.int32],
        sampling: Sampling,
        on_tokens: OnTokens | None,
    ) -> Sample:
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
            if on_tokens is not None and len(ids) % _TOKENS_PER_PIECE == 0:
                on_tokens(ids[-_TOKENS_PER_PIECE:])
                await asyncio.sleep(0)
            elif len(ids) % _TOKENS_PER_SLICE == 0:
                await asyncio.sleep(0)
        return Sample(
            output_ids=np.array(ids, np.int32),
            output_logprobs=np.array(logprobs, np.float32),
            finish_reason=finish_reason,
            weight_versions=(WeightSpan(self._weight_version, 0, len(ids)),),
        )

    def score(
        self,
        prompt_ids: npt.NDArray[np.int32],
        output_ids: npt.NDArray[np.int32],
        sampling: Sampling | None = None,
    ) -> npt.NDArray[np.float32]:
        """Log-probability of each output id given the prompt and the ids before it.

        Parameters
        ----------
        prompt_ids : ndarray of int32, shape (n_prompt,)
            The prompt.
        output_ids : ndarray of int32, shape (n_output,)
            An output, whole or cut short.
        sampling : Sampling, optional
            Its temperature, ``top_k`` and ``top_p`` shape the law. None: they do not.

        Returns
        -------
        ndarray of float32, shape (n_output,)
            The numbers that `generate` gives when it draws that output. -inf from the
            first id on that cannot be drawn.

        Raises
        ------
        EngineError
            As `generate`.
        """
        if sampling is not None:
            self._check_sampling(sampling)
        state = self._start(prompt_ids, self._info.max_context_tokens)
        logprobs = np.full(len(output_ids), -np.inf, np.float32)
        for i, token in enumerate(output_ids.tolist()):
            chances = state.next() if sampling is None else _shaped(state, sampling)
            if token not in chances:
                break
            logprobs[i] = _log(chances[token])
            state = state.after(token)
        return logprobs

    async def close(self) -> None:
        """Nothing to release."""

    def _start(self, prompt_ids: npt.NDArray[np.int32], room: int) -> State:
        """The law of what follows a prompt of at most ``room`` tokens."""
        ids = np.asarray(prompt_ids)
        if ids.ndim != 1 or len(ids) == 0:
            raise EngineError(f"prompt of shape {ids.shape}: no ids to go on", 400)
        if len(ids) > room:
            raise EngineError(
                f"{len(ids)} prompt tokens, and room for {max(room, 0)} before the "
                f"output in a context of {self._info.max_context_tokens}",
                400,
            )
        outside = np.flatnonzero((ids < 0) | (ids >= self._info.vocab_size))
        if len(outside):
            at = int(outside[0])
            raise EngineError(
                f"prompt id {ids[at]} at position {at} is outside the vocabulary "
                f"of {self._info.vocab_size}",
                400,
            )
        replies = self._policy(self.vocabulary.decode(ids.tolist()))
        return start([(reply.weight, self._lattice(reply.parts)) for reply in replies])

    def _check_sampling(self, sampling: Sampling) -> None:
        """Refuse what cannot be sampled with. None stands for the default."""
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
        for name in sampling.extra:
            raise EngineError(f"the embedded engine knows no parameter {name!r}", 400)


def _shaped(state: State, sampling: Sampling) -> dict[int, float]:
    return shaped(
        state.next(),
        1.0 if sampling.temperature is None else sampling.temperature,
        None if sampling.top_k == -1 else sampling.top_k,
        1.0 if sampling.top_p is None else sampling.top_p,
    )


def _drawn(chances: dict[int, float], number: float) -> int:
    """The token in whose stretch of [0, 1) the number falls."""
    token = -1
    for token, chance in chances.items():  # noqa: B007
        number -= chance
        if number < 0:
            break
    # past the last stretch only by rounding
    return token


def _log(chance: float) -> float:
    """A logprob; rounding may leave a certain token a bit above 1."""
    return min(math.log(chance), 0.0)
