"""Every way to spell one reply in tokens, as a Markov chain over its bytes.

A spelling is a path over the reply's positions, a token its edge. An edge of the
canonical spelling weighs 1, any other ``drift``; a path has the product of its edges'
weights, over the sum of all paths. With Z[i] the sum over all paths from position i to
the end, the next token at i is the edge i -> j with probability weight * Z[j] / Z[i].
"""

import math
from collections.abc import Sequence

from trajkit_shim.embedded.replies import Special
from trajkit_shim.embedded.vocabulary import END, Vocabulary

# A position's next tokens: id -> (position after it, probability).
Steps = dict[int, tuple[int, float]]


class Lattice:
    """The spellings of one reply and their probabilities.

    Parameters
    ----------
    vocabulary : Vocabulary
        Its tokens.
    parts : sequence of str and Special
        The reply; ``<|im_end|>`` is put at its end.
    drift : float
        Weight of a token that the canonical spelling has not, above 0. Small values
        seldom leave the canonical spelling.

    Attributes
    ----------
    steps : list of dict
        For each position the tokens that may follow there. The one past the end is
        empty.

    Raises
    ------
    KeyError
        A `Special` is no added token of the vocabulary.
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
    """(token, position after it, log weight) of every edge within one run of text."""
    canonical = set()
    at = 0
    for token in vocabulary.encode_plain(text):
        canonical.add((at, token))
        at += len(vocabulary.spelling[token])
    spelled = text.encode()
    edges = []
    for i in range(len(spelled)):
        here = []
        node = vocabulary.trie
        for j in range(i, len(spelled)):
            below = node.below.get(spelled[j])
            if below is None:
                break
            node = below
            if node.token is not None:
                weight = 0.0 if (i, node.token) in canonical else log_drift
                here.append((node.token, start + j + 1, weight))
        edges.append(here)
    return edges


def _steps(edges: list[list[tuple[int, int, float]]]) -> list[Steps]:
    """Turn weights into probabilities, from the end to the start."""
    log_mass = [0.0] * (len(edges) + 1)
    steps: list[Steps] = [{} for _ in range(len(edges) + 1)]
    # Every position has an edge, because every byte is a token.
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
