"""Locate turns in rows of other systems, which have no spans.

First, each turn is searched after its complete prompt. Trained tokens that this does not
explain are then searched anywhere in the row, after the last tokens of a prompt.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from trajkit.errors import SchemaError
from trajkit.schema.engine import Bools
from trajkit.tables.canonical import canonical
from trajkit.tables.ragged import Longs
from trajkit.verification.context import Case, consecutive
from trajkit.verification.rules import not_trained

FOREIGN = pa.schema(
    [
        pa.field("session_id", pa.string()),
        pa.field("row_index", pa.int32()),
        pa.field("input_ids", pa.large_list(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.large_list(pa.bool_()), nullable=False),
        pa.field("logprobs", pa.large_list(pa.float32())),
        pa.field("prompt_length", pa.int32()),
    ],
    metadata={"trajkit.table": "rows"},
)
"""Columns read from rows without spans."""

PROMPT_END = 16
"""Tokens of the prompt that must precede an output found out of context."""

_ID_BYTES = 4


def foreign_rows(table: pa.Table, first: int = 0) -> pa.Table:
    """Rows of another system, cast to `FOREIGN`.

    In integer masks, a value other than 0 is trained. Rows without a row_index are
    numbered from ``first``.
    """
    place = table.schema.get_field_index("loss_mask")
    if place >= 0:
        column = table.column(place)
        numbers = getattr(column.type, "value_type", None)
        if numbers is not None and pa.types.is_integer(numbers):
            bits = column.cast(pa.large_list(numbers)).cast(pa.large_list(pa.bool_()))
            table = table.set_column(place, "loss_mask", bits)
    table = canonical(table, FOREIGN).select(FOREIGN.names)
    without = table.column("row_index").null_count
    if 0 < without < table.num_rows:
        raise SchemaError("row_index is null in some rows: expected all or none")
    if without:
        counted = pa.array(first + np.arange(table.num_rows), pa.int32())
        place = table.column_names.index("row_index")
        table = table.set_column(place, FOREIGN.field("row_index"), counted)
    return table


def verify_located(case: Case) -> None:
    """Check rows without spans: every masked token must belong to a turn's output."""
    rows, ids = case.rows, case.rows.ids
    _lengths(case)
    found = _Located(case)
    for row in range(len(ids)):
        bits = rows.mask[ids.offsets[row] : ids.offsets[row + 1]]
        calls = _calls_of(case, int(case.session[row]))
        places = [one for call in calls if (one := _in_context(case, row, call))]
        found.rank(row, places)
        left = found.take(row, bits.copy(), places)
        if left.any():
            known = {one.call for one in places if one.complete}
            moved = [
                one
                for call in calls
                if call not in known
                for one in _elsewhere(case, row, call)
            ]
            left = found.take(row, left, moved)
        at = np.flatnonzero(left)
        for first, n in consecutive(at, np.zeros(len(at), np.int64)):
            detail = f"loss_mask is true for {n} tokens that are no turn's output"
            case.report("mask", detail, row, None, at[first])
    if case.policy is None:  # it may lose or leave out any output
        return
    _look_everywhere(case, found)
    _not_located(case, found)


@dataclass(frozen=True, slots=True)
class _Place:
    """A range of a row that equals a turn's output."""

    call: int
    start: int
    stop: int
    # it ends with the output, or with the row
    complete: bool
    # it follows the complete prompt
    in_context: bool


class _Located:
    """Outputs and output tokens that were located in rows so far."""

    def __init__(self, case: Case) -> None:
        self._case = case
        # shape (n_sampled,): tokens of outputs that a row trains
        self.trained = np.zeros(len(case.turns.outputs.values), np.bool_)
        # calls whose output was found in some row
        self.seen: set[int] = set()
        # shape (n_calls,): calls that may be trained
        self._may = case.trainable
        # shape (n_sampled,): tokens that may be
        self._may_train = case.may_train

    def rank(self, row: int, places: list[_Place]) -> None:
        """Sort places by how likely the row's trained tokens come from them.

        Among equal replies, prefer matching logprobs, then a complete output, then a
        trainable turn, then a longer range.
        """

        def unlikely(place: _Place) -> tuple[int, bool, bool, int]:
            at = np.arange(place.start, place.stop)
            at = at[self._case.rows.mask[self._case.rows.ids.offsets[row] + at]]
            wrong = self._wrong_logprobs(row, place.call, place.start, at)
            may = bool(self._may[place.call])
            return len(wrong), not place.complete, not may, place.start - place.stop

        if len(places) > 1:
            places.sort(key=unlikely)

    def take(self, row: int, left: Bools, places: list[_Place]) -> Bools:
        """Assign trained tokens to the turns at their positions; return the rest.

        If several turns match at a token, the first whose token is not trained yet
        takes it.
        """
        case, outputs = self._case, self._case.turns.outputs
        twice = np.full(len(left), -1)
        for place in places:
            call, start, stop = place.call, place.start, place.stop
            here = self.trained[outputs.offsets[call] :][: stop - start]
            wanted = left[start:stop]
            twice[start:stop][wanted & here] = call
            fresh = wanted & ~here
            if place.complete or fresh.any():
                self.seen.add(call)
            if not fresh.any():
                continue
            here |= fresh
            at = start + np.flatnonzero(fresh)
            left[at] = False
            twice[at] = -1
            self._compare(row, call, start, at)
            if not (place.in_context or case.may_splice):
                n_prompt = len(case.turns.prompts[call])
                detail = (
                    f"trained at token {start}, sampled at token {n_prompt} or after other "
                    "tokens"
                )
                case.report("context", detail, row, call, at[0])
        again = np.flatnonzero((twice >= 0) & (not case.per_row))
        for first, n in consecutive(again, twice[again]):
            detail = f"{n} tokens that an earlier row trains"
            case.report("trained_twice", detail, row, twice[again[first]], again[first])
        left[twice >= 0] = False
        return left

    def _compare(self, row: int, call: int, start: int, at: Longs) -> None:
        """Check the logprobs of trained tokens, and that they may be trained."""
        case, rows = self._case, self._case.rows
        source = case.turns.outputs.offsets[call] + at - start
        barred = at[~self._may_train[source]]
        if len(barred):
            detail = f"{len(barred)} tokens that may not be trained"
            case.report("untrainable", detail, row, call, barred[0])
        bad = self._wrong_logprobs(row, call, start, at)
        for first, n in consecutive(at[bad], np.zeros(len(bad), int)):
            k = bad[first]
            here = rows.logprobs[rows.ids.offsets[row] + at[k]]
            due = case.turns.outputs.offsets[call] + at[k] - start
            given = case.turns.logprobs[due] if case.turns.given[due] else "null"
            detail = f"{n} tokens: the first has {here}, expected {given}, the engine's"
            case.report("logprob", detail, row, call, at[k])

    def _wrong_logprobs(self, row: int, call: int, start: int, at: Longs) -> Longs:
        """Indices into ``at`` of the positions whose logprob is not the turn's."""
        rows, turns = self._case.rows, self._case.turns
        if not rows.n_logprobs[row]:
            return at[:0]
        flat = rows.ids.offsets[row] + at
        source = turns.outputs.offsets[call] + at - start
        here, due, given = (
            rows.logprobs[flat],
            turns.logprobs[source],
            turns.given[source],
        )
        # Other systems write 0.0 or NaN for a missing logprob.
        nothing = ~rows.given[flat] | (here == 0) | np.isnan(here)
        return np.flatnonzero(np.where(given, here != due, ~nothing))


def _calls_of(case: Case, session: int) -> range:
    """The calls that may occur in a row: its session's, or all if it has no session."""
    return (
        range(len(case.turns.outputs)) if session < 0 else case.turns.calls_of(session)
    )


def _in_context(case: Case, row: int, call: int) -> _Place | None:
    """The output's place after the turn's complete prompt, if the row has both."""
    ids = case.rows.ids[row]
    n_prompt = len(case.turns.prompts[call])
    stop = case.turns.shared(ids, call)
    if stop <= n_prompt:
        return None
    complete = stop == min(case.turns.path_len(call), len(ids))
    return _Place(call, n_prompt, stop, complete, in_context=True)


def _elsewhere(case: Case, row: int, call: int) -> Iterator[_Place]:
    """Places in a row of the end of a turn's prompt followed by its output."""
    prompt, output = case.turns.prompts[call], case.turns.outputs[call]
    if len(output) == 0:
        return
    before = prompt[-PROMPT_END:]
    wanted = np.concatenate([before, output]).tobytes()
    row_bytes = case.rows.ids[row].tobytes()
    at = row_bytes.find(wanted)
    while at >= 0:
        if at % _ID_BYTES == 0:
            start = at // _ID_BYTES + len(before)
            stop = start + len(output)
            yield _Place(call, start, stop, complete=True, in_context=False)
        at = row_bytes.find(wanted, at + 1)


def _look_everywhere(case: Case, found: _Located) -> None:
    """Search every row for turns that were not located yet."""
    for row in range(len(case.rows.ids)):
        for call in _calls_of(case, int(case.session[row])):
            if call not in found.seen and next(_elsewhere(case, row, call), None):
                found.seen.add(call)


def _not_located(case: Case, found: _Located) -> None:
    """Report outputs that no row contains, and tokens that no row trains."""
    if case.accounts != ("trained",):
        return
    outputs = case.turns.outputs
    due = np.bincount(outputs.owner, case.due, len(outputs)) > 0
    hidden = [call for call in np.flatnonzero(due) if call not in found.seen]
    for call in hidden:
        detail = (
            f"no row contains the prompt's end followed by the {outputs.lengths[call]} "
            "sampled tokens"
        )
        case.report("not_located", detail, call=call, token=0)
    known = np.flatnonzero(found.trained | np.isin(outputs.owner, hidden))
    not_trained(case, known)


def _lengths(case: Case) -> None:
    """A mask covers the row or its response, and logprobs have the mask's length."""
    rows, ids = case.rows, case.rows.ids
    prompts = rows.table.column("prompt_length").to_pylist()
    for row in range(len(ids)):
        n, n_mask = int(ids.lengths[row]), int(rows.n_mask[row])
        response = None if prompts[row] is None else n - prompts[row]
        if n_mask > n or (response is not None and n_mask not in (n, response)):
            detail = f"loss_mask has {n_mask} values, input_ids has {n}" + (
                "" if response is None else f" ({response} of the response)"
            )
            case.report("length", detail, row, None, min(n, n_mask))
        if rows.n_logprobs[row] not in (0, n, n_mask):
            detail = (
                f"logprobs has {rows.n_logprobs[row]} values, input_ids has {n} and "
                f"loss_mask {n_mask}"
            )
            case.report("length", detail, row, None, min(n, int(rows.n_logprobs[row])))
