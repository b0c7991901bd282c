"""An inference engine without a model: a scripted policy with exact probabilities.

Every logprob can be checked, and ids drift as a real model's do. It needs numpy and
tokenizers, but no torch and no download.

A reply can be spelled in many ways: paths over its byte positions, with a token per edge.
An edge of the canonical spelling has weight 1, any other ``drift``. A path's probability
is the product of its weights, divided by the sum over all paths. With Z[i] the sum over
all paths from position i to the end, the next token at i is the edge i -> j with
probability weight * Z[j] / Z[i].

P(tokens) is the sum over the replies of P(reply) * P(tokens are its spelling). The
probability of the next token is a ratio of two such sums, computed from the posterior of
each reply given the tokens so far. All replies that are still possible agree on the text
so far, so they share one position.
"""

import asyncio
import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from importlib.resources import files
from typing import NamedTuple, TypeAlias

import numpy as np
from tokenizers import Tokenizer

from trajkit.analysis.tokenizer import entry_bytes
from trajkit_shim.engines import base
from trajkit_shim.engines.checks import check_sampling

END = "<|im_end|>"


class Special(NamedTuple):
    """An added token, such as ``<tool_call>``, sampled as a single id.

    The same characters within ordinary text of a reply are ordinary bytes.
    """

    text: str


class Reply(NamedTuple):
    """A possible reply, without the closing ``<|im_end|>``."""

    parts: tuple[str | Special, ...]
    weight: float = 1.0  # its share of the sum of all weights is the probability


class Message(NamedTuple):
    """One message of the prompt."""

    role: str
    text: str


Policy: TypeAlias = Callable[[str], Sequence[Reply]]
"""Maps the text of a prompt to its possible replies."""


def tool_call(name: str, arguments: str) -> tuple[str | Special, ...]:
    """Return the parts that call a tool; ``arguments`` should be JSON text."""
    body = f'\n{{"name": "{name}", "arguments": {arguments}}}\n'
    return Special("<tool_call>"), body, Special("</tool_call>")


def acts(
    thoughts: Sequence[str],
    commands: Sequence[str],
    shell: tuple[str, str] = ("bash", "command"),
) -> list[Reply]:
    """Return each thought with each command, for a shell tool and its argument."""
    return [
        Reply((thought, *tool_call(shell[0], json.dumps({shell[1]: command}))))
        for thought, command in itertools.product(thoughts, commands)
    ]


def messages(prompt: str) -> list[Message]:
    """Return the messages of a ChatML prompt, without the reply that it opens."""
    pieces = (piece.partition("\n") for piece in prompt.split("<|im_start|>")[1:])
    read = ((role, *rest.partition(END)) for role, _, rest in pieces)
    return [Message(role, text) for role, text, closed, _ in read if closed]


def n_responses(read: Sequence[Message]) -> int:
    """Return the number of messages that are tool responses."""
    return sum(message.text.startswith("<tool_response>") for message in read)


_LOOK = (
    "Let me look at what is there.\n",
    "I will start with the files.\n",
    "First, the folder.\n\n",
)
_DONE = (
    "Done: that is what there is to see.",
    "That is all there is.",
    " That is all there is.",
    "Nothing else to do here.",
)


def converse(prompt: str) -> Sequence[Reply]:
    """Small talk, and one call of ``bash`` after each user message if it is offered."""
    read = messages(prompt)
    offered = any(m.role == "system" and '"name": "bash"' in m.text for m in read)
    if offered and not n_responses(read[-1:]):
        return acts(_LOOK, ["ls -la"])
    return [Reply((text,)) for text in _DONE]


class Vocabulary:
    """The bytes of every token of a byte-level BPE model in which each byte is a token.

    ``spelling`` has the bytes of each id, ``added`` the added tokens by their text, and
    ``by_bytes`` the ordinary tokens, of at most ``longest`` bytes.
    """

    def __init__(self, tokenizer_json: str) -> None:
        content = json.loads(tokenizer_json)
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        # the same merges, without added tokens
        self._plain = Tokenizer.from_str(json.dumps(content | {"added_tokens": []}))
        added, entries = content["added_tokens"], content["model"]["vocab"].items()
        self.added: dict[str, int] = {token["content"]: token["id"] for token in added}
        self.by_bytes = {entry_bytes(entry) or b"": token for entry, token in entries}
        self.longest = max(map(len, self.by_bytes))
        spelled = {token: spelling for spelling, token in self.by_bytes.items()}
        spelled |= {token: text.encode() for text, token in self.added.items()}
        self.spelling = [spelled[token] for token in range(len(spelled))]
        self.size = len(spelled)

    def decode(self, ids: list[int]) -> str:
        """Return the text of some ids, including control tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def encode_plain(self, text: str) -> list[int]:
        """Return the canonical ids of a text, without recognizing added tokens."""
        return list(self._plain.encode(text).ids)


def _shipped_file(name: str) -> str:
    return files("trajkit_shim.engines.embedded").joinpath(name).read_text("utf-8")


@cache
def shipped() -> Vocabulary:
    """Return the vocabulary of the shipped tokenizer."""
    return Vocabulary(_shipped_file("tokenizer.json"))


def chat_files() -> tuple[Tokenizer, str]:
    """Return the shipped tokenizer and its chat template."""
    tokenizer = Tokenizer.from_str(_shipped_file("tokenizer.json"))
    return tokenizer, _shipped_file("chat_template.jinja")


Lattice: TypeAlias = list[dict[int, tuple[int, float]]]
"""The spellings of one reply: at each position the possible next tokens, with the position
after them and their probability; empty at the end."""


def lattice(vocab: Vocabulary, parts: Sequence[str | Special], drift: float) -> Lattice:
    """Return the spellings of a reply, given without its ``<|im_end|>``."""
    steps: Lattice = []
    for part in (*parts, Special(END)):
        start = len(steps)
        if isinstance(part, Special):
            steps.append({vocab.added[part.text]: (start + 1, 1.0)})
            continue
        ids, spelled = vocab.encode_plain(part), part.encode()
        ends = [0, *itertools.accumulate(len(vocab.spelling[token]) for token in ids)]
        canonical = dict(zip(ends, ids, strict=False))
        for i in range(len(spelled)):
            stops = range(i + 1, min(i + vocab.longest, len(spelled)) + 1)
            tokens = {vocab.by_bytes.get(spelled[i:j]): start + j for j in stops}
            steps.append(
                {
                    token: (j, 1.0 if canonical.get(i) == token else drift)
                    for token, j in tokens.items()
                    if token is not None
                }
            )
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
    alive: Sequence[tuple[float, Lattice]]

    def next(self) -> dict[int, float]:
        """Return the probability of each next token, summing to 1; empty at the end."""
        chances: dict[int, float] = {}
        for posterior, spelled in self.alive:
            for token, (_, chance) in spelled[self.position].items():
                chances[token] = chances.get(token, 0.0) + posterior * chance
        return chances

    def after(self, token: int) -> "State":
        """Return the state after a token that `next` has."""
        edges = [(p, s, s[self.position].get(token)) for p, s in self.alive]
        steps = [(edge[0], p * edge[1], s) for p, s, edge in edges if edge is not None]
        total = sum(chance for _, chance, _ in steps)
        return State(steps[0][0], [(chance / total, s) for _, chance, s in steps])


def shaped(chances: dict[int, float], sampling: base.Sampling) -> dict[int, float]:
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
    (likeliest, top), *_ = ranked
    if temperature == 0:
        return {likeliest: 1.0}
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
    a reply, and a way to spell it in tokens (see above). Every logprob is that of the
    token given the prompt and the tokens before it, under the call's temperature,
    ``top_k`` and ``top_p``; with temperature 0 it is 0.0. An output ends with
    ``<|im_end|>``, at a ``stop`` string or a stop token, which stay in it, or is cut short.

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

    takes_grammars = False

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
        sampling, vocabulary = request.sampling, self.vocabulary
        check_sampling(sampling, "embedded", ("top_p", "top_k", "stop"))
        state = self._start(request.prompt_ids.tolist())
        seed = self._random.getrandbits(64) if sampling.seed is None else sampling.seed
        draw, text = random.Random(seed), bytearray()
        ends = {vocabulary.added[END], *sampling.stop_token_ids}
        stops = [stop.encode() for stop in sampling.stop]
        ids, logprobs, finish_reason = list[int](), list[float](), "length"
        while len(ids) < sampling.max_new_tokens:
            chances = shaped(state.next(), sampling)
            (token,) = draw.choices([*chances], [*chances.values()])
            ids.append(token)
            # rounding may leave a probability slightly above 1
            logprobs.append(min(math.log(chances[token]), 0.0))
            text += vocabulary.spelling[token]
            if token in ends or any(stop in text for stop in stops):
                finish_reason = "stop"
                break
            state = state.after(token)
            if len(ids) % 8 == 0:
                # other calls are served, too, and a cancelled call ends
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
        weights = [reply.weight for reply in replies]
        if not weights or not all(0 < weight < math.inf for weight in weights):
            raise ValueError(f"reply weights {weights}: need one or more, each above 0")
        total = sum(weights)
        return State(0, [(r.weight / total, self._lattice(r.parts)) for r in replies])
