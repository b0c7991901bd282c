"""NeMo Gym's prefix merging in plain Python over lists, every chain of it.

Calls make a forest in whatever order they came: the parent is the call whose prompt and
output are the longest prefix of the prompt. What tokens cannot tell apart is set aside
(NeMo Gym 5). Rows as in `tests.oracles.peers_chains`.
"""

from dataclasses import dataclass, field

from tests.oracles.peers_chains import Row, Turn, extend, opened


@dataclass(eq=False, slots=True)
class Call:
    """A call, what it continues, and what continues it."""

    turn: Turn
    # prompt and output
    held: list[int]
    before: "Call | None" = None
    after: "list[Call]" = field(default_factory=list)
    ambiguous: bool = False
    rejected: bool = False


def linearize(turns: list[Turn]) -> list[Row]:
    """The rows of one session: its chains, those with the shortest last prompt first."""
    calls = [
        Call(turn, turn["prompt_ids"] + turn["output_ids"])
        for turn in turns
        if turn["output_ids"]
    ]
    calls.sort(key=lambda call: (len(_prompt(call)), call.turn.get("request_id") or ""))
    _connect(calls)
    _settle_retries(calls)
    rows = []
    for leaf in calls:
        if leaf.after:
            continue
        chain = []
        call: Call | None = leaf
        while call is not None:
            chain.append(call)
            call = call.before
        if not any(call.rejected for call in chain):
            rows.append(opened(chain.pop().turn))
            for call in reversed(chain):
                extend(rows[-1], call.turn)
    return rows


def _prompt(call: Call) -> list[int]:
    ids: list[int] = call.turn["prompt_ids"]
    return ids


def _connect(calls: list[Call]) -> None:
    """Give every call its parent; of several with the same tokens the first."""
    by_length: dict[int, list[Call]] = {}
    for call in calls:
        by_length.setdefault(len(call.held), []).append(call)
    lengths = sorted(by_length, reverse=True)
    for call in calls:
        prompt = _prompt(call)
        for n in lengths:
            if n > len(prompt):
                continue
            start = prompt[:n]
            parents = [other for other in by_length[n] if other.held == start]
            if parents:
                call.before = parents[0]
                parents[0].after.append(call)
                call.ambiguous = call.rejected = len(parents) > 1
                break


def _settle_retries(calls: list[Call]) -> None:
    """Of calls with one prompt, keep those that were gone on from, or the first."""
    groups: dict[tuple[int, ...], list[Call]] = {}
    for call in calls:
        groups.setdefault(tuple(_prompt(call)), []).append(call)
    for group in groups.values():
        if len(group) == 1:
            continue
        extended = [
            call for call in group if not all(child.ambiguous for child in call.after)
        ]
        for call in group:
            if call not in (extended or group[:1]):
                call.rejected = True
