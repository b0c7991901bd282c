"""The embedded engine: token ids in, token ids out, by a scripted policy.

It samples from an exact distribution. A reply can be spelled in many ways: paths over its
byte positions, with a token per edge. An edge of the canonical spelling has weight 1, any
other ``drift``. A path's probability is the product of its weights, divided by the sum
over all paths. With Z[i] the sum over all paths from position i to the end, the next token
at i is the edge i -> j with probability weight * Z[j] / Z[i].

P(tokens) is the sum over the replies of P(reply) * P(tokens are its spelling). The
probability of the next token is a ratio of two such sums, computed from the posterior of
each reply given the tokens so far. All replies that are still possible agree on the text
so far, so they share one position.
"""

import asyncio
import math
import random
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple, TypeAlias

import numpy as np

from trajkit_shim.engines import base
from trajkit_shim.engines.base import Sampling
from trajkit_shim.engines.checks import check_sampling
from trajkit_shim.engines.embedded.script import Policy, Special, converse
from trajkit_shim.engines.embedded.vocabulary import END, Vocabulary, shipped

# After this many tokens other calls may run, and a cancelled call ends.
_TOKENS_AT_ONCE = 8

Lattice: TypeAlias = list[dict[int, tuple[int, float]]]
"""The spellings of one reply: at each position the possible next tokens, with the position
after them and their probability; empty at the end."""


def lattice(
    vocabulary: Vocabulary, parts: Sequence[str | Special], drift: float
) -> Lattice:
    """Return the spellings of a reply, given without its ``<|im_end|>``."""
    steps: Lattice = []
    for part in (*parts, Special(END)):
        start = len(steps)
        if isinstance(part, Special):
            steps.append({vocabulary.added[part.text]: (start + 1, 1.0)})
            continue
        canonical = {0: -1}  # the canonical token at each position
        place = 0
        for token in vocabulary.encode_plain(part):
            canonical[place] = token
            place += len(vocabulary.spelling[token])
        spelled = part.encode()
        for i in range(len(spelled)):
            stops = range(i + 1, min(i + vocabulary.longest, len(spelled)) + 1)
            tokens = ((vocabulary.by_bytes.get(spelled[i:j], -1), j) for j in stops)
            weights = {
                token: (start + j, 1.0 if canonical.get(i) == token else drift)
                for token, j in tokens
                if token >= 0
            }
            steps.append(weights)
    steps.append({})
    # weights become probabilities, from the end to the start
    log_mass = [0.0] * len(steps)
    for i in range(len(steps) - 2, -1, -1):
        # every position has an edge, because every byte is a token
        logs = {t: math.log(w) + log_mass[j] for t, (j, w) in steps[i].items()}
        top = max(logs.values())
        log_mass[i] = top + math.log(sum(math.exp(log - top) for log in logs.values()))
        steps[i] = {
            t: (j, math.exp(logs[t] - log_mass[i])) for t, (j, _) in steps[i].items()
        }
    return steps


class State(NamedTuple):
    """The state after some tokens."""

    position: int  # in the text of every possible reply
    # the possible replies with their posterior probabilities
    alive: tuple[tuple[float, Lattice], ...]

    def next(self) -> dict[int, float]:
        """Return the probability of each next token, summing to 1; empty at the end."""
        chances: dict[int, float] = {}
        for posterior, spelled in self.alive:
            for token, (_, chance) in spelled[self.position].items():
                chances[token] = chances.get(token, 0.0) + posterior * chance
        return chances

    def after(self, token: int) -> "State":
        """Return the state after ``token``; `KeyError` if it cannot follow."""
        steps = [
            (posterior, spelled, *spelled[self.position][token])
            for posterior, spelled in self.alive
            if token in spelled[self.position]
        ]
        if not steps:
            raise KeyError(token)
        total = sum(posterior * chance for posterior, _, _, chance in steps)
        alive = tuple((p * chance / total, spelled) for p, spelled, _, chance in steps)
        return State(steps[-1][2], alive)


def start(replies: Sequence[tuple[float, Lattice]]) -> State:
    """Return the state before the first token, from weighted replies."""
    weights = [weight for weight, _ in replies]
    if not weights or not all(0 < weight < math.inf for weight in weights):
        raise ValueError(f"reply weights {weights}: need one or more, each above 0")
    total = sum(weights)
    return State(0, tuple((weight / total, spelled) for weight, spelled in replies))


def shaped(chances: dict[int, float], sampling: Sampling) -> dict[int, float]:
    """Return next-token probabilities under sampling parameters, summing to 1.

    Probabilities are raised to ``1 / temperature``; 0 leaves only the most probable
    token, of several the lowest id. Then the ``top_k`` most probable tokens are kept,
    and of these the fewest with at least the share ``top_p``.
    """
    temperature = 1.0 if sampling.temperature is None else sampling.temperature
    top_k = None if sampling.top_k == -1 else sampling.top_k
    top_p = 1.0 if sampling.top_p is None else sampling.top_p
    if temperature == 1 and top_k is None and top_p == 1:
        return chances
    ranked = sorted(chances.items(), key=lambda item: (-item[1], item[0]))
    if temperature == 0:
        return {ranked[0][0]: 1.0}
    top = ranked[0][1]
    powers = [(token, (p / top) ** (1 / temperature)) for token, p in ranked[:top_k]]
    share = top_p * sum(power for _, power in powers)
    kept, reached = {}, 0.0
    for token, power in powers:
        if reached >= share:
            break
        kept[token] = power
        reached += power
    return {token: power / reached for token, power in kept.items()}


class EmbeddedEngine:
    """An `Engine` without a model, which samples from an exactly known distribution.

    The policy reads the prompt's text and returns the possible replies. The engine draws
    a reply, and a way to spell it in tokens (see above). Every
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
        state = self._start(prompt_ids.tolist())
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

    def _start(self, prompt_ids: list[int]) -> State:
        """The state after a prompt."""
        replies = self._policy(self.vocabulary.decode(prompt_ids))
        return start([(reply.weight, self._lattice(reply.parts)) for reply in replies])
