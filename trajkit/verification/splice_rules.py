"""The rules of rows that are spliced: raw outputs between stretches of later prompts.

Their promise is another than that of rows that are one turn's prompt and output: a
trained token stands after raw outputs and the canonical text between them, which may be
no context that it was sampled in (`trajkit.simulate` counts such tokens). What a row
dropped stands in it as empty pieces.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from trajkit import _core
from trajkit.pipeline.splice import ended
from trajkit.turns.calls import Ints
from trajkit.turns.flat_buffers import Pieces
from trajkit.turns.turn_rules import Bools
from trajkit.verification import span_rules
from trajkit.verification.context import Case

_TOLD = ("trained", "cut", "no_splice_point")


def rows(case: Case, pieces: Pieces) -> None:
    """A row is what its turns make of it, and dropped turns had no end of turn.

    Its finish_reason is its last turn's, its flags are those of its turns.
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


def told(case: Case, pieces: Pieces) -> None:
    """Every token that may be trained is trained, or some row says that it lost it.

    Not asked of a policy that demotes turns, sets them aside or leaves rows out; nor of
    turns of which ``max_row_tokens`` may have left no row.
    """
    policy, calls = case.policy, case.turns.calls
    if policy is None or not policy.places_all or policy.max_rows is not None:
        return
    if not (policy.keep_untrained and policy.keep_empty):
        return
    due = np.ones(len(calls.calls), np.bool_)
    if policy.parent_by == "messages":
        requests = calls.requests
        due &= (requests["n_keys"] != 0) | (requests["shared"] != 0)
    if case.cap is not None:
        due &= calls.calls["prompt_len"] < case.cap
    said = pieces.take(np.flatnonzero(np.isin(pieces.kind, _TOLD)))
    silent = np.flatnonzero(~(due[case.turns.outputs.owner] & case.may_train))
    span_rules.not_among(
        case, np.concatenate([said.sampled(case.turns), silent]), "that no row tells of"
    )


@dataclass(frozen=True, slots=True)
class _State:
    """A row read up to ``position``."""

    position: int
    # the call that was read last, -1: none
    call: int
    # calls of pieces that were read
    n_said: int
    use_tool: bool
    ill_formed: bool


class _Reading:
    """One row, read as the calls that make it."""

    def __init__(
        self, case: Case, row: int, pieces: Pieces, has_ended: Bools, speaks: Bools
    ) -> None:
        self.case, self.row = case, row
        self._ended = has_ended
        # calls with a token that may be trained: they leave a piece wherever they are
        self._speaks = speaks
        self.ids: Ints = case.rows.ids[row]
        lost = pieces.kind == "no_splice_point"
        self.dropped = list(dict.fromkeys(int(call) for call in pieces.call[lost]))
        # where the output of each call stands; the row's end where nothing is left of it
        self.places: dict[int, int] = {}
        for call, start in zip(pieces.call[~lost], pieces.start[~lost], strict=True):
            self.places.setdefault(int(call), int(start))
        self.said = list(self.places)
        # where the row is no splice, for all that was tried
        self.departs = 0

    @cached_property
    def hidden(self) -> list[int]:
        """Calls of the session that may stand in the row without a piece."""
        calls = self.case.turns.calls.calls
        return [
            call
            for call in self.case.turns.calls_of(int(self.case.session[self.row]))
            if calls["out_len"][call] == 0
            or (self.case.cap is not None and not self._speaks[call])
        ]

    def ends_of_turn(self) -> list[int | None]:
        """What the row's end of turn may be; None: it has none."""
        policy, outputs = self.case.policy, self.case.turns.outputs
        if policy is not None and policy.end_of_turn_token_id is not None:
            return [policy.end_of_turn_token_id]
        for call, place in self.places.items():
            if self._ended[call] and place < len(self.ids):
                return [int(outputs[call][-1])]
        # that of a turn that was cut or dropped, perhaps without a piece
        session = self.case.turns.calls_of(int(self.case.session[self.row]))
        found = {
            int(outputs[call][-1]): None
            for call in session
            if self._ended[call] and len(outputs[call])
        }
        return [*found, None]

    def readings(self, token: int | None) -> Iterator[_State]:
        """Ways to read the whole row with this end of turn."""
        waiting = [_State(0, -1, 0, use_tool=False, ill_formed=False)]
        seen = set(waiting)
        while waiting:
            state = waiting.pop()
            if self._is_whole(state):
                yield state
            for call in [*self.said[state.n_said : state.n_said + 1], *self.hidden]:
                after = self._step(state, call, token)
                if after is not None and after not in seen:
                    seen.add(after)
                    waiting.append(after)

    def _is_whole(self, state: _State) -> bool:
        if state.call < 0 or state.n_said < len(self.said):
            return False
        n = len(self.ids)
        return state.position == n or (state.position > n and n == self.case.cap)

    def _step(self, state: _State, call: int, token: int | None) -> _State | None:
        """The state after one call more; None: the row does not go on with it."""
        if call <= state.call:
            return None
        case = self.case
        prompt, output = case.turns.prompts[call], case.turns.outputs[call]
        start = 0 if state.call < 0 else self.stretch(state.call, call, token)
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
        place = position - len(output)
        place = min(place, len(self.ids))
        n_said = state.n_said
        if n_said < len(self.said) and call == self.said[n_said]:
            if self.places[call] != place:
                return None
            n_said += 1
        elif len(output) and place < len(self.ids):
            return None  # it would have a piece
        flags = case.turns.calls.calls[call]
        return _State(
            position,
            call,
            n_said,
            use_tool=state.use_tool or bool(flags["use_tool"]),
            ill_formed=state.ill_formed or bool(flags["ill_formed"]),
        )

    def stretch(self, before: int, call: int, token: int | None) -> int | None:
        """Where in the call's prompt the row goes on after ``before``; None: it ends."""
        turns = self.case.turns
        known, prompt = turns.prompts[before], turns.prompts[call]
        if token is None or not self.goes_on(before, call):
            return None
        found = np.flatnonzero(prompt[len(known) :] == token)
        if not len(found):
            return None
        output = turns.outputs[before]
        closed = len(output) > 0 and output[-1] == token
        return int(len(known) + found[0] + closed)

    def goes_on(self, before: int, call: int) -> bool:
        """Whether a prompt begins with all of another."""
        prompts = self.case.turns.prompts
        known = prompts[before]
        return before < call and _core.lcp(known, prompts[call]) == len(known)

    def ends_before(self, state: _State, call: int, token: int | None) -> bool:
        """Whether a row that was read so ends before a call that goes on from it."""
        if not self.goes_on(state.call, call):
            return False
        # the first that was dropped may have left no piece
        return any(
            self.goes_on(state.call, first)
            and self.stretch(state.call, first, token) is None
            and (first == call or self.goes_on(first, call))
            for first in [call, *self._silent]
        )

    @cached_property
    def _silent(self) -> list[int]:
        """Calls of the session that leave no piece where they are dropped."""
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
        case.say(
            "row_tokens",
            "the row is not its turns' outputs with the stretches between them",
            row=row,
            call=next(
                (one for one in reading.said if reading.places[one] >= reading.departs),
                None,
            ),
            token=reading.departs,
        )
        return
    _check_dropped(reading, ways)
    named = case.rows.number("last_turn", row)
    turns = {int(case.turns.calls.turn_index[state.call]) for state, _ in ways}
    if named is not None and named not in turns:
        shown = ", ".join(map(str, sorted(turns)))
        case.say(
            "row_tokens", f"last_turn is {named}, the row ends at {shown}", row=row
        )
    reasons = case.turns.calls.table.column("finish_reason")
    said = case.rows.text("finish_reason", row)
    last = [reasons[state.call].as_py() for state, _ in ways]
    if said not in last:
        case.say(
            "finish_reason",
            f"{said!r}, the last turn's is {last[0]!r}",
            row=row,
            call=ways[0][0].call,
        )
    if case.policy is not None and case.policy.flag_scope == "row":
        _check_flags(reading, [state for state, _ in ways])


def _check_dropped(reading: _Reading, ways: list[tuple[_State, int | None]]) -> None:
    """Turns that the row dropped go on from it, from where it had to end."""
    case, dropped = reading.case, reading.dropped
    if dropped and not any(
        reading.ends_before(state, dropped[0], token) for state, token in ways
    ):
        case.say(
            "span_kind",
            "the turn is dropped, though the row could go on with it",
            row=reading.row,
            call=dropped[0],
            token=len(reading.ids),
        )
    for before, call in pairwise(dropped):
        if not reading.goes_on(before, call):
            case.say(
                "span_kind",
                "the turn is dropped, but does not go on from the one before it",
                row=reading.row,
                call=call,
                token=len(reading.ids),
            )


def _check_flags(reading: _Reading, states: list[_State]) -> None:
    case, row = reading.case, reading.row
    reason = case.rows.text("finish_reason", row)
    due: dict[str, set[bool]] = {
        "truncated": {reason == "length"},
        "use_tool": {state.use_tool for state in states},
        "ill_formed": {state.ill_formed for state in states},
    }
    for name, values in due.items():
        said = case.rows.table.column(name)[row].as_py()
        if said not in values:
            shown = "null" if said is None else said
            case.say("flags", f"{name} is {shown}, its turns say otherwise", row=row)
