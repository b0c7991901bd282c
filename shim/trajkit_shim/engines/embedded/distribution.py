"""The exact distribution that the embedded engine samples from.

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

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trajkit_shim.engines.embedded.script import Special
from trajkit_shim.engines.embedded.vocabulary import END, Vocabulary

# (token, position after it, log weight)
_Edge = tuple[int, int, float]


class Lattice:
    """The spellings of one reply (without its ``<|im_end|>``) and their probabilities.

    ``steps`` has the possible next tokens at each position, with the position after them
    and their probability; it is empty at the end. `KeyError` if a `Special` is not an
    added token of the vocabulary.
    """

    __slots__ = ("steps",)

    def __init__(
        self, vocabulary: Vocabulary, parts: Sequence[str | Special], drift: float
    ) -> None:
        edges: list[list[_Edge]] = []
        for part in (*parts, Special(END)):
            if isinstance(part, Special):
                edges.append([(vocabulary.added[part.text], len(edges) + 1, 0.0)])
            else:
                edges.extend(_edges(vocabulary, part, len(edges), math.log(drift)))
        self.steps: list[dict[int, tuple[int, float]]] = [{} for _ in [*edges, None]]
        # weights become probabilities, from the end to the start
        log_mass = [0.0] * (len(edges) + 1)
        for i in range(len(edges) - 1, -1, -1):
            # every position has an edge, because every byte is a token
            logs = [weight + log_mass[j] for _, j, weight in edges[i]]
            top = max(logs)
            total = sum(math.exp(log - top) for log in logs)
            log_mass[i] = top + math.log(total)
            for (token, j, _), log in zip(edges[i], logs, strict=True):
                self.steps[i][token] = j, math.exp(log - top) / total


def _edges(
    vocabulary: Vocabulary, text: str, start: int, log_drift: float
) -> list[list[_Edge]]:
    canonical = set()
    offset = 0
    for token in vocabulary.encode_plain(text):
        canonical.add((offset, token))
        offset += len(vocabulary.spelling[token])
    spelled = text.encode()
    edges: list[list[_Edge]] = []
    for i in range(len(spelled)):
        edges.append([])
        for j in range(i + 1, min(i + vocabulary.longest, len(spelled)) + 1):
            token = vocabulary.by_bytes.get(spelled[i:j], -1)
            if token >= 0:
                weight = 0.0 if (i, token) in canonical else log_drift
                edges[i].append((token, start + j, weight))
    return edges


@dataclass(frozen=True, slots=True)
class State:
    """The state after some tokens."""

    position: int  # in the text of every possible reply
    # the possible replies with their posterior probabilities
    alive: tuple[tuple[float, Lattice], ...]

    def next(self) -> dict[int, float]:
        """Return the probability of each next token, summing to 1; empty at the end."""
        chances: dict[int, float] = {}
        for posterior, lattice in self.alive:
            for token, (_, chance) in lattice.steps[self.position].items():
                chances[token] = chances.get(token, 0.0) + posterior * chance
        return chances

    def after(self, token: int) -> "State":
        """Return the state after ``token``; `KeyError` if it cannot follow."""
        steps = [
            (posterior, lattice, lattice.steps[self.position][token])
            for posterior, lattice in self.alive
            if token in lattice.steps[self.position]
        ]
        if not steps:
            raise KeyError(token)
        total = sum(posterior * chance for posterior, _, (_, chance) in steps)
        return State(
            steps[-1][2][0],
            tuple((p * chance / total, lattice) for p, lattice, (_, chance) in steps),
        )


def start(replies: Sequence[tuple[float, Lattice]]) -> State:
    """Return the state before the first token, from weighted replies.

    Raises `ValueError` if there is no reply, or a weight is not a positive number.
    """
    weights = [weight for weight, _ in replies]
    if not weights or not all(0 < weight < math.inf for weight in weights):
        raise ValueError(f"reply weights {weights}: need one or more, each above 0")
    total = sum(weights)
    return State(0, tuple((weight / total, lattice) for weight, lattice in replies))


def shaped(
    chances: dict[int, float],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> dict[int, float]:
    """Return next-token probabilities under sampling parameters, summing to 1.

    Probabilities are raised to ``1 / temperature``; 0 leaves only the most probable
    token, of several the lowest id. Then the ``top_k`` most probable tokens are kept,
    and of these the fewest with at least the share ``top_p``.
    """
    if temperature == 1 and top_k is None and top_p == 1:
        return chances
    ranked = sorted(chances.items(), key=lambda item: (-item[1], item[0]))
    if temperature == 0:
        return {token: 1.0 for token, _ in ranked[:1]}
    top = ranked[0][1]
    powers = [(token, (p / top) ** (1 / temperature)) for token, p in ranked[:top_k]]
    share = top_p * sum(power for _, power in powers)
    kept = {}
    reached = 0.0
    for token, power in powers:
        if reached >= share:
            break
        kept[token] = power
        reached += power
    return {token: power / reached for token, power in kept.items()}
