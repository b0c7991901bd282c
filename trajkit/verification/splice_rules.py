"""Rules for spliced rows: raw outputs joined by text of later prompts.

A spliced row is not the path of one turn. Its trained tokens may follow other tokens
than those they were sampled after (`trajkit.simulate` counts them). Dropped turns leave
empty spans in the row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from trajkit import _core
from trajkit._arrow.ragged import Ints
from trajkit.pipeline.splice import ended
from trajkit.turns.flat_buffers import Spans
from trajkit.turns.turn_rules import Bools
from trajkit.verification import span_rules
from trajkit.verification.context import Case

_ACCOUNTED = ("trained", "cut", "no_splice_point")


def rows(case: Case, pieces: Spans) -> None:
    """A row is the splice of its turns, and it could not continue with dropped turns.

    Its finish_reason is its last turn's. Its flags follow from its turns.
    """
    outputs = case.turns.outputs
    has_ended = ended(case.turns.calls).astype(np.bool_)
    speaks = np.zeros(len(outputs), np.bool_)
    speaks[outputs.owner[case.may_train]] = True
    order = np.argsort(pieces.row, kind="stable")
    bounds = np.searchsorted(pieces.row[order], np.arange(len(case.rows.ids) + 1))
    for row in range(len(case.rows.ids)):
        mine = pieces.take(order[bounds[row] : bounds[row + 1]])
        _check(_Reading(case, row, mine, has_ended, speaks))


def accounted_for(case: Case, pieces: Spans) -> None:
    """Every token that may be trained is trained, or lost in a span of some row.

    Skipped for policies that rewrite or quarantine turns or omit rows, and for turns
    that ``max_row_tokens`` may have left without a row.
    """
    policy, calls = case.policy, case.turns.calls
    if policy is None or not policy.places_all or policy.max_rows is not None:
        return
    if not (policy.keep_untrained and policy.keep_empty):
        return
    due = case.routed
    if case.cap is not None:
        due &= calls.calls["prompt_len"] < case.cap
    named = pieces.take(np.flatnonzero(np.isin(pieces.kind, _ACCOUNTED)))
    spared = np.flatnonzero(~(due[case.turns.outputs.owner] & case.may_train))
    span_rules.not_among(
        case,
        np.concatenate([named.sampled(case.turns), spared]),
        "that no row trains or reports as lost",
    )


@dataclass(frozen=True, slots=True)
class _State:
    """A row read up to ``position``."""

    position: int
    # the call that was read last, or -1
    call: int
    # number of calls with spans that were read
    n_named: int
    use_tool: bool
    ill_formed: bool


class _Reading:
    """One row, parsed into the calls that make it up."""

    def __init__(
        self, case: Case, row: int, pieces: Spans, has_ended: Bools, speaks: Bools
    ) -> None:
        self.case, self.row = case, row
        self._ended = has_ended
        # calls with a token that may be trained: they always leave a span
        self._speaks = speaks
        self.ids: Ints = case.rows.ids[row]
        lost = pieces.kind == "no_splice_point"
        self.dropped = list(dict.fromkeys(int(call) for call in pieces.call[lost]))
        # the position of each call's output; the row's end if none of it is left
        self.places: dict[int, int] = {}
        for call, start in zip(pieces.call[~lost], pieces.start[~lost], strict=True):
            self.places.setdefault(int(call), int(start))
        self.named = list(self.places)
        # the furthest position that any attempt could explain
        self.departs = 0

    @cached_property
    def hidden(self) -> list[int]:
        """Calls of the session that may be in the row without a span."""
        calls = self.case.turns.calls.calls
        return [
            call
            for call in self.case.turns.calls_of(int(self.case.session[self.row]))
            if calls["out_len"][call] == 0
            or (self.case.cap is not None and not self._speaks[call])
        ]

    def ends_of_turn(self) -> list[int | None]:
        """Candidates for the row's end-of-turn token; None if it has none."""
        policy, outputs = self.case.policy, self.case.turns.outputs
        if policy is not None and policy.end_of_turn_token_id is not None:
            return [policy.end_of_turn_token_id]
        for call, place in self.places.items():
            if self._ended[call] and place < len(self.ids):
                return [int(outputs[call][-1])]
        # The end of turn of a truncated or dropped turn, which may have no span.
        session = self.case.turns.calls_of(int(self.case.session[self.row]))
        found = {
            int(outputs[call][-1]): None
            for call in session
            if self._ended[call] and len(outputs[call])
        }
        return [*found, None]

    def readings(self, token: int | None) -> Iterator[_State]:
        """All ways to parse the complete row with this end-of-turn token."""
        waiting = [_State(0, -1, 0, use_tool=False, ill_formed=False)]
        seen = set(waiting)
        while waiting:
            state = waiting.pop()
            if self._is_complete(state):
                yield state
            for call in [*self.named[state.n_named : state.n_named + 1], *self.hidden]:
                after = self._step(state, call, token)
                if after is not None and after not in seen:
                    seen.add(after)
                    waiting.append(after)

    def _is_complete(self, state: _State) -> bool:
        if state.call < 0 or state.n_named < len(self.named):
            return False
        n = len(self.ids)
        return state.position == n or (state.position > n and n == self.case.cap)

    def _step(self, state: _State, call: int, token: int | None) -> _State | None:
        """The state after one more call; None if the row does not continue with it."""
        if call <= state.call:
            return None
        case = self.case
        prompt, output = case.turns.prompts[call], case.turns.outputs[call]
        start = 0 if state.call < 0 else self.splice_start(state.call, call, token)
        if start is None:
            return None
        position = state.position
        for run in (prompt[start:], output):
            inside = self.ids[position : position + len(run)]
            shared = _core.lcp(inside, run)
            self.departs = max(self.departs, min(position + shared, len(self.ids)))
            if shared < len(inside):
                return None
            position += len(run)
        place = min(position - len(output), len(self.ids))
        n_named = state.n_named
        if n_named < len(self.named) and call == self.named[n_named]:
            if self.places[call] != place:
                return None
            n_named += 1
        elif len(output) and place < len(self.ids):
            return None  # it would have a span
        flags = case.turns.calls.calls[call]
        return _State(
            position,
            call,
            n_named,
            use_tool=state.use_tool or bool(flags["use_tool"]),
            ill_formed=state.ill_formed or bool(flags["ill_formed"]),
        )

    def splice_start(self, before: int, call: int, token: int | None) -> int | None:
        """Where the row continues in the call's prompt; None if the row ends."""
        turns = self.case.turns
        known, prompt = turns.prompts[before], turns.prompts[call]
        if token is None or not self.extends(before, call):
            return None
        found = np.flatnonzero(prompt[len(known) :] == token)
        if not len(found):
            return None
        output = turns.outputs[before]
        closed = len(output) > 0 and output[-1] == token
        return int(len(known) + found[0] + closed)

    def extends(self, before: int, call: int) -> bool:
        """Whether the prompt of ``call`` begins with the complete prompt of ``before``."""
        prompts = self.case.turns.prompts
        known = prompts[before]
        return before < call and _core.lcp(known, prompts[call]) == len(known)

    def ends_before(self, state: _State, call: int, token: int | None) -> bool:
        """Whether a row in this state had to end before a call that extends it."""
        if not self.extends(state.call, call):
            return False
        # The first dropped call may have no span.
        return any(
            self.extends(state.call, first)
            and self.splice_start(state.call, first, token) is None
            and (first == call or self.extends(first, call))
            for first in [call, *self._silent]
        )

    @cached_property
    def _silent(self) -> list[int]:
        """Calls of the session that leave no span when they are dropped."""
        session = self.case.turns.calls_of(int(self.case.session[self.row]))
        return [one for one in session if not self._speaks[one]]


def _check(reading: _Reading) -> None:
    case, row = reading.case, reading.row
    ways = [
        (state, token)
        for token in reading.ends_of_turn()
        for state in reading.readings(token)
    ]
    if not ways:
        departs = reading.departs
        after = (one for one in reading.named if reading.places[one] >= departs)
        detail = "the row is not a splice of its turns' outputs"
        case.report("row_tokens", detail, row, next(after, None), departs)
        return
    _check_dropped(reading, ways)
    named = case.rows.number("last_turn", row)
    turns = {int(case.turns.calls.turn_index[state.call]) for state, _ in ways}
    if named is not None and named not in turns:
        shown = ", ".join(map(str, sorted(turns)))
        detail = f"last_turn is {named}, the row ends with turn {shown}"
        case.report("row_tokens", detail, row)
    reasons = case.turns.calls.table.column("finish_reason")
    reason = case.rows.text("finish_reason", row)
    last = [reasons[state.call].as_py() for state, _ in ways]
    if reason not in last:
        detail = f"finish_reason is {reason!r}, the last turn has {last[0]!r}"
        case.report("finish_reason", detail, row, ways[0][0].call)
    if case.policy is not None and case.policy.flag_scope == "row":
        _check_flags(reading, [state for state, _ in ways])


def _check_dropped(reading: _Reading, ways: list[tuple[_State, int | None]]) -> None:
    """Check that dropped turns extend the row and that it had to end before them."""
    case, dropped = reading.case, reading.dropped
    if dropped and not any(
        reading.ends_before(state, dropped[0], token) for state, token in ways
    ):
        detail = "the turn is dropped, but the row could continue with it"
        case.report("span_kind", detail, reading.row, dropped[0], len(reading.ids))
    for before, call in pairwise(dropped):
        if not reading.extends(before, call):
            detail = (
                "the turn is dropped, but does not continue the previous dropped turn"
            )
            case.report("span_kind", detail, reading.row, call, len(reading.ids))


def _check_flags(reading: _Reading, states: list[_State]) -> None:
    case, row = reading.case, reading.row
    reason = case.rows.text("finish_reason", row)
    due: dict[str, set[bool]] = {
        "truncated": {reason == "length"},
        "use_tool": {state.use_tool for state in states},
        "ill_formed": {state.ill_formed for state in states},
    }
    for name, values in due.items():
        flag = case.rows.table.column(name)[row].as_py()
        if flag not in values:
            shown = "null" if flag is None else flag
            due_flag = " or ".join(map(str, sorted(values)))
            detail = f"{name} is {shown}, the row's turns give {due_flag}"
            case.report("flags", detail, row)
