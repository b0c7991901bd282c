"""Locate turns in rows of other systems, which have no spans.

First, each turn is searched after its complete prompt. Trained tokens that this does not
explain are then searched anywhere in the row, after the last tokens of a prompt.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from trajkit.errors import SchemaError
from trajkit.schema.engine import Bools
from trajkit.tables.canonical import canonical
from trajkit.tables.ragged import Ints, Longs
from trajkit.turns.flat_buffers import TurnTokens
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
    located = _Located(case)
    for row in range(len(ids)):
        session = int(case.session[row])
        calls = range(len(case.turns.outputs))
        if session >= 0:
            calls = case.turns.calls_of(session)
        left = rows.mask[ids.offsets[row] : ids.offsets[row + 1]].copy()
        places = [one for call in calls if (one := _in_context(case, row, call))]
        located.take(row, left, places)
        if left.any():
            known = {one.call for one in places if one.complete}
            others = (call for call in calls if call not in known)
            moved = [p for k in others for p in elsewhere(case.turns, ids[row], k)]
            located.take(row, left, moved)
        at = np.flatnonzero(left)
        for first, n in consecutive(at):
            detail = f"loss_mask is true for {n} tokens that are no turn's output"
            case.report("mask", detail, row, None, at[first])
    if case.accounts == ("trained",):
        not_trained(case, np.flatnonzero(located.trained))


class Place(NamedTuple):
    """A range of a row that equals a turn's output."""

    call: int
    start: int
    stop: int
    # it ends with the output, or with the row
    complete: bool
    # it follows the complete prompt
    in_context: bool


class _Located:
    """Output tokens that were located in rows so far."""

    def __init__(self, case: Case) -> None:
        self._case = case
        # shape (n_sampled,): tokens of outputs that a row trains
        self.trained = np.zeros(len(case.turns.outputs.values), np.bool_)
        self._may_train = case.may_train
        self._once = case.policy is not None and case.policy.train_in != "every"

    def take(self, row: int, left: Bools, places: list[Place]) -> None:
        """Assign trained tokens to the turns at their positions; ``left`` are the rest.

        If several turns match at a token, the first whose token is not trained yet takes
        it. Among equal replies those come first whose logprobs match, then complete
        outputs, then trainable ones, then the longer ones.
        """
        case, outputs = self._case, self._case.turns.outputs
        if len(places) > 1:
            places.sort(key=lambda place: self._unlikely(row, place))
        twice = np.full(len(left), -1)
        for call, start, stop, _, in_context in places:
            here = self.trained[outputs.offsets[call] :][: stop - start]
            wanted = left[start:stop]
            twice[start:stop][wanted & here] = call
            fresh = wanted & ~here
            if not fresh.any():
                continue
            here |= fresh
            at = start + np.flatnonzero(fresh)
            left[at], twice[at] = False, -1
            self._compare(row, call, start, at)
            if not (in_context or case.may_splice):
                sampled = len(case.turns.prompts[call])
                detail = (
                    f"trained at {start}, sampled at {sampled} or after other tokens"
                )
                case.report("context", detail, row, call, at[0])
        again = np.flatnonzero(twice >= 0)
        left[again] = False
        for first, n in consecutive(again, twice[again]) if self._once else ():
            detail = f"{n} tokens that an earlier row trains"
            case.report("trained_twice", detail, row, twice[again[first]], again[first])

    def _unlikely(self, row: int, place: Place) -> tuple[int, bool, bool, int]:
        at = np.arange(place.start, place.stop)
        at = at[self._case.rows.mask[self._case.rows.ids.offsets[row] + at]]
        wrong = self._wrong_logprobs(row, place.call, place.start, at)
        may = bool(self._case.trainable[place.call])
        return len(wrong), not place.complete, not may, place.start - place.stop

    def _compare(self, row: int, call: int, start: int, at: Longs) -> None:
        """Check the logprobs of trained tokens, and that they may be trained."""
        case, rows, turns = self._case, self._case.rows, self._case.turns
        source = turns.outputs.offsets[call] + at - start
        barred = at[~self._may_train[source]]
        if len(barred):
            detail = f"{len(barred)} tokens that may not be trained"
            case.report("untrainable", detail, row, call, barred[0])
        bad = self._wrong_logprobs(row, call, start, at)
        for first, n in consecutive(at[bad]):
            k = bad[first]
            here = rows.logprobs[rows.ids.offsets[row] + at[k]]
            due = turns.logprobs[source[k]] if turns.given[source[k]] else "null"
            detail = f"{n} tokens: the first has {here}, expected {due}, the engine's"
            case.report("logprob", detail, row, call, at[k])

    def _wrong_logprobs(self, row: int, call: int, start: int, at: Longs) -> Longs:
        """Indices into ``at`` of the positions whose logprob is not the turn's."""
        rows, turns = self._case.rows, self._case.turns
        if not rows.n_logprobs[row]:
            return at[:0]
        flat = rows.ids.offsets[row] + at
        source = turns.outputs.offsets[call] + at - start
        here, due = rows.logprobs[flat], turns.logprobs[source]
        # Other systems write 0.0 or NaN for a missing logprob.
        nothing = ~rows.given[flat] | (here == 0) | np.isnan(here)
        return np.flatnonzero(np.where(turns.given[source], here != due, ~nothing))


def _in_context(case: Case, row: int, call: int) -> Place | None:
    """The output's place after the turn's complete prompt, if the row has both."""
    ids = case.rows.ids[row]
    n_prompt = len(case.turns.prompts[call])
    stop = case.turns.shared(ids, call)
    if stop <= n_prompt:
        return None
    complete = stop == min(case.turns.path_len(call), len(ids))
    return Place(call, n_prompt, stop, complete, in_context=True)


def elsewhere(turns: TurnTokens, ids: Ints, call: int) -> Iterator[Place]:
    """Places in a row of the end of a turn's prompt followed by its output."""
    before, output = turns.prompts[call][-PROMPT_END:], turns.outputs[call]
    if len(output) == 0:
        return
    wanted, row = np.concatenate([before, output]).tobytes(), ids.tobytes()
    at = row.find(wanted)
    while at >= 0:
        if at % _ID_BYTES == 0:
            start = at // _ID_BYTES + len(before)
            stop = start + len(output)
            yield Place(call, start, stop, complete=True, in_context=False)
        at = row.find(wanted, at + 1)


def _lengths(case: Case) -> None:
    """A mask covers the row or its response, and logprobs have the mask's length."""
    rows = case.rows
    prompts = rows.table.column("prompt_length").to_pylist()
    sizes = zip(rows.ids.lengths, rows.n_mask, rows.n_logprobs, prompts, strict=True)
    for row, (n, n_mask, n_logprobs, prompt) in enumerate(sizes):
        whole = f"input_ids has {n}"
        if prompt is not None:
            whole += f" ({n - prompt} of the response)"
        if n_mask > n or (prompt is not None and n_mask not in (n, n - prompt)):
            detail = f"loss_mask has {n_mask} values, {whole}"
            case.report("length", detail, row, None, min(n, n_mask))
        if n_logprobs not in (0, n, n_mask):
            detail = f"logprobs has {n_logprobs} values, {whole} and loss_mask {n_mask}"
            case.report("length", detail, row, None, min(n, n_logprobs))
