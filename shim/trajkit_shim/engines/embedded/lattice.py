"""Every way to spell one reply in tokens, as a Markov chain over its bytes.

A spelling is a path over the byte positions of the reply, with a token per edge. An edge
of the canonical spelling has weight 1, any other ``drift``. The probability of a path is
the product of its edges' weights, divided by the sum over all paths. With Z[i] the sum
over all paths from position i to the end, the next token at i is the edge i -> j with
probability weight * Z[j] / Z[i].
"""

import math
from collections.abc import Sequence

from trajkit_shim.engines.embedded.script import Special
from trajkit_shim.engines.embedded.vocabulary import END, Vocabulary

# A position's next tokens: id -> (position after it, probability).
Steps = dict[int, tuple[int, float]]


class Lattice:
    """The spellings of one reply and their probabilities.

    Parameters
    ----------
    vocabulary : Vocabulary
    parts : sequence of str and Special
        The reply, without the ``<|im_end|>`` at its end.
    drift : float
        Weight of a token outside the canonical spelling, above 0.

    Attributes
    ----------
    steps : list of dict
        The possible next tokens at each position; empty at the end.

    Raises
    ------
    KeyError
        A `Special` is not an added token of the vocabulary.
    """

    __slots__ = ("steps",)

    def __init__(
        self, vocabulary: Vocabulary, parts: Sequence[str | Special], drift: float
    ) -> None:
        edges: list[list[tuple[int, int, float]]] = []
        for part in (*parts, Special(END)):
            if isinstance(part, Special):
                edges.append([(vocabulary.added[part.text], len(edges) + 1, 0.0)])
            else:
                edges.extend(_edges(vocabulary, part, len(edges), math.log(drift)))
        self.steps = _steps(edges)


def _edges(
    vocabulary: Vocabulary, text: str, start: int, log_drift: float
) -> list[list[tuple[int, int, float]]]:
    """(token, position after it, log weight) of every edge within one text part."""
    canonical = set()
    offset = 0
    for token in vocabulary.encode_plain(text):
        canonical.add((offset, token))
        offset += len(vocabulary.spelling[token])
    spelled = text.encode()
    edges = []
    for i in range(len(spelled)):
        node_edges = []
        node = vocabulary.trie
        for j in range(i, len(spelled)):
            below = node.below.get(spelled[j])
            if below is None:
                break
            node = below
            if node.token is not None:
                weight = 0.0 if (i, node.token) in canonical else log_drift
                node_edges.append((node.token, start + j + 1, weight))
        edges.append(node_edges)
    return edges


def _steps(edges: list[list[tuple[int, int, float]]]) -> list[Steps]:
    """Turn weights into probabilities, from the end to the start."""
    log_mass = [0.0] * (len(edges) + 1)
    steps: list[Steps] = [{} for _ in range(len(edges) + 1)]
    # every position has an edge, because every byte is a token
    for i in range(len(edges) - 1, -1, -1):
        logs = [weight + log_mass[j] for _, j, weight in edges[i]]
        top = max(logs)
        scaled = [math.exp(log - top) for log in logs]
        total = sum(scaled)
        log_mass[i] = top + math.log(total)
        steps[i] = {
            token: (j, mass / total)
            for (token, j, _), mass in zip(edges[i], scaled, strict=True)
        }
    return steps
