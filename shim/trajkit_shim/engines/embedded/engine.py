"""The embedded engine: token ids in, token ids out, by a scripted policy."""

import asyncio
import math
import random
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from trajkit_shim.engines import base
from trajkit_shim.engines.checks import check_sampling
from trajkit_shim.engines.embedded.distribution import State, lattice, shaped, start
from trajkit_shim.engines.embedded.script import Policy, converse
from trajkit_shim.engines.embedded.vocabulary import END, shipped

# After this many tokens a stream gets an event. Other calls may run, and a cancelled
# call ends.
_TOKENS_AT_ONCE = 8


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
        self._lattice = lru_cache(256)(partial(lattice, self.vocabulary, drift=drift))

    async def info(self) -> base.EngineInfo:
        return self._info

    async def generate(self, request: base.EngineRequest) -> base.Sample:
        prompt_ids, sampling = request.prompt_ids, request.sampling
        check_sampling(sampling, "embedded", ("top_p", "top_k", "stop"))
        state = self._start(prompt_ids)
        seed = self._random.getrandbits(64) if sampling.seed is None else sampling.seed
        draw = random.Random(seed)
        ends = {self.vocabulary.added[END], *sampling.stop_token_ids}
        stops = [text.encode() for text in sampling.stop]
        text = bytearray()
        ids, logprobs = list[int](), list[float]()
        finish_reason = "length"
        while len(ids) < sampling.max_new_tokens:
            chances = shaped(state.next(), sampling)
            (token,) = draw.choices([*chances], [*chances.values()])
            ids.append(token)
            # rounding may leave a probability slightly above 1
            logprobs.append(min(math.log(chances[token]), 0.0))
            text += self.vocabulary.spelling[token]
            if token in ends or any(stop in text for stop in stops):
                finish_reason = "stop"
                break
            state = state.after(token)
            if len(ids) % _TOKENS_AT_ONCE == 0:
                # other calls are served, too
                await asyncio.sleep(0)
        return base.Sample(
            output_ids=np.array(ids, np.int32),
            output_logprobs=np.array(logprobs, np.float32),
            finish_reason=finish_reason,
            weight_versions=(base.WeightSpan("scripted", 0, len(ids)),),
        )

    async def close(self) -> None:
        """Nothing to release."""

    def _start(self, prompt_ids: npt.NDArray[np.int32]) -> State:
        """The state after a prompt."""
        replies = self._policy(self.vocabulary.decode(prompt_ids.tolist()))
        return start([(reply.weight, self._lattice(reply.parts)) for reply in replies])
