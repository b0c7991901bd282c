"""The distribution of the tokens after a prompt, a mixture over replies and spellings.

P(tokens) is the sum over the replies of P(reply) * P(tokens are its spelling). The
probability of the next token is a ratio of two such sums. It is computed from the
posterior of each reply given the tokens so far. All replies that are still possible
agree on the text so far, so they share one position.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trajkit_shim.engines.embedded.lattice import Lattice


@dataclass(frozen=True, slots=True)
class State:
    """The state after some tokens.

    Parameters
    ----------
    position : int
        Position in the text of every possible reply.
    alive : tuple of (float, Lattice)
        The possible replies with their posterior probabilities.
    """

    position: int
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
        position = -1
        kept = []
        for posterior, lattice in self.alive:
            step = lattice.steps[self.position].get(token)
            if step is not None:
                position = step[0]
                kept.append((posterior * step[1], lattice))
        if not kept:
            raise KeyError(token)
        total = sum(mass for mass, _ in kept)
        return State(position, tuple((mass / total, lattice) for mass, lattice in kept))


def start(replies: Sequence[tuple[float, Lattice]]) -> State:
    """Return the state before the first token, from weighted replies.

    Raises
    ------
    ValueError
        There is no reply, or a weight is not a positive number.
    """
    total = sum(weight for weight, _ in replies)
    if not replies or not all(0 < weight < math.inf for weight, _ in replies):
        weights = [weight for weight, _ in replies]
        raise ValueError(f"reply weights {weights}: need one or more, each above 0")
    return State(0, tuple((weight / total, lattice) for weight, lattice in replies))


def shaped(
    chances: dict[int, float],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> dict[int, float]:
    """Return next-token probabilities under sampling parameters, summing to 1.

    Parameters
    ----------
    chances : dict of int to float
        Probability of each next token.
    temperature : float
        Probabilities are raised to its inverse. 0: only the most probable token remains,
        of several the lowest id.
    top_k : int, optional
        Number of most probable tokens to keep.
    top_p : float
        Then the fewest most probable tokens with at least this share are kept.
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
