"""Where turns stand in rows that do not say it: rows of other systems.

A turn stands in a row where its prompt's end and its output do. In the first place that
is where it was sampled: after its whole prompt. What the mask trains elsewhere is looked
for anywhere, after the last tokens of the prompt.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from trajkit._arrow.canonical import canonical
from trajkit.errors import SchemaError
from trajkit.turns.calls import Longs
from trajkit.turns.turn_rules import Bools
from trajkit.verification import span_rules
from trajkit.verification.context import Case, stretches

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
"""What is read of rows without spans."""

PROMPT_END = 16
"""Tokens of a prompt's end that must precede an output which stands elsewhere."""

_ID_BYTES = 4


def foreign_rows(table: pa.Table, first: int = 0) -> pa.Table:
    """Rows of another system in the types of `FOREIGN`.

    A mask may be of numbers: what is not 0 is trained. Rows are counted, from ``first``
    on, where they have no row_index.

    Raises
    ------
    SchemaError
        A column is absent, or of a type that cannot be taken for its own; some rows
        have a row_index and some have not.
    InvalidTurnsError
        A list is null, or an id out of range.
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
    """The rules of rows that have no pieces: what stands where the mask is true."""
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
            known = {one.call for one in places if one.whole}
            moved = [
                one
                for call in calls
                if call not in known
                for one in _elsewhere(case, row, call)
            ]
            left = found.take(row, left, moved)
        at = np.flatnonzero(left)
        for first, n in zip(*stretches(at, np.zeros(len(at), np.int64)), strict=True):
            case.say(
                "mask",
                f"loss_mask is true for {n} tokens where no turn's output stands",
                row=row,
                token=int(at[first]),
            )
    _look_everywhere(case, found)
    _not_located(case, found)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a turn's output stands in a row."""

    call: int
    start: int
    stop: int
    # to its end, or to the row's
    whole: bool
    # after the whole prompt
    in_context: bool


class _Located:
    """What rows train of which outputs, as it is found."""

    def __init__(self, case: Case) -> None:
        self._case = case
        # shape (n_sampled,): tokens of outputs that a row trains
        self.trained = np.zeros(len(case.turns.outputs.values), np.bool_)
        # calls whose output stands in some row
        self.seen: set[int] = set()
        # shape (n_calls,): calls that may be trained
        self._may = case.trainable
        # shape (n_sampled,): tokens that may be
        self._may_train = case.may_train

    def rank(self, row: int, places: list[_Place]) -> None:
        """Put the turns first that a row's trained tokens are likelier to be of.

        Of equal replies that is the one with the row's logprobs, that stands whole,
        that may be trained, that is longer.
        """

        def unlikely(place: _Place) -> tuple[int, bool, bool, int]:
            at = np.arange(place.start, place.stop)
            at = at[self._case.rows.mask[self._case.rows.ids.offsets[row] + at]]
            wrong = self._wrong_logprobs(row, place.call, place.start, at)
            may = bool(self._may[place.call])
            return len(wrong), not place.whole, not may, place.start - place.stop

        if len(places) > 1:
            places.sort(key=unlikely)

    def take(self, row: int, left: Bools, places: list[_Place]) -> Bools:
        """Give trained tokens to the turns that stand there; the tokens without one.

        Of several turns that stand at a token, the first that no row trains there gets
        it.
        """
        case, outputs = self._case, self._case.turns.outputs
        twice = np.full(len(left), -1)
        for place in places:
            call, start, stop = place.call, place.start, place.stop
            here = self.trained[outputs.offsets[call] :][: stop - start]
            wanted = left[start:stop]
            twice[start:stop][wanted & here] = call
            fresh = wanted & ~here
            if place.whole or fresh.any():
                self.seen.add(call)
            if not fresh.any():
                continue
            here |= fresh
            at = start + np.flatnonzero(fresh)
            left[at] = False
            twice[at] = -1
            self._compare(row, call, start, at)
            if not place.in_context and not case.splices:
                n_prompt = len(case.turns.prompts[call])
                case.say(
                    "context",
                    f"trained at {start}, sampled at {n_prompt} or after other tokens",
                    row=row,
                    call=call,
                    token=int(at[0]),
                )
        again = np.flatnonzero(twice >= 0)
        for first, n in zip(*stretches(again, twice[again]), strict=True):
            case.say(
                "trained_twice",
                f"{n} tokens that an earlier row trains",
                row=row,
                call=int(twice[again[first]]),
                token=int(again[first]),
            )
        left[again] = False
        return left

    def _compare(self, row: int, call: int, start: int, at: Longs) -> None:
        """Logprobs of trained tokens, and whether the turn may be trained."""
        case, rows = self._case, self._case.rows
        source = case.turns.outputs.offsets[call] + at - start
        barred = at[~self._may_train[source]]
        if len(barred):
            case.say(
                "untrainable",
                f"{len(barred)} tokens that may not be trained",
                row=row,
                call=call,
                token=int(barred[0]),
            )
        bad = self._wrong_logprobs(row, call, start, at)
        for first, n in zip(*stretches(at[bad], np.zeros(len(bad), int)), strict=True):
            k = bad[first]
            here = rows.logprobs[rows.ids.offsets[row] + at[k]]
            due = case.turns.outputs.offsets[call] + at[k] - start
            said = case.turns.logprobs[due] if case.turns.given[due] else "none"
            case.say(
                "logprob",
                f"{n} tokens, the first {here}: the engine gave {said}",
                row=row,
                call=call,
                token=int(at[k]),
            )

    def _wrong_logprobs(self, row: int, call: int, start: int, at: Longs) -> Longs:
        """Which of the row's positions ``at`` have another logprob than the turn."""
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
        # other systems write 0.0 or NaN where there is none
        nothing = ~rows.given[flat] | (here == 0) | np.isnan(here)
        return np.flatnonzero(np.where(given, here != due, ~nothing))


def _calls_of(case: Case, session: int) -> range:
    """The calls that may stand in a row: of its session, or all."""
    return (
        range(len(case.turns.outputs)) if session < 0 else case.turns.calls_of(session)
    )


def _in_context(case: Case, row: int, call: int) -> _Place | None:
    """Where the row goes on from the turn's whole prompt as its output does."""
    ids = case.rows.ids[row]
    n_prompt = len(case.turns.prompts[call])
    stop = case.turns.shared(ids, call)
    if stop <= n_prompt:
        return None
    whole = stop == min(case.turns.held(call), len(ids))
    return _Place(call, n_prompt, stop, whole, in_context=True)


def _elsewhere(case: Case, row: int, call: int) -> Iterator[_Place]:
    """Where the end of a turn's prompt and its output stand in a row."""
    prompt, output = case.turns.prompts[call], case.turns.outputs[call]
    if len(output) == 0:
        return
    before = prompt[-PROMPT_END:]
    wanted = np.concatenate([before, output]).tobytes()
    held = case.rows.ids[row].tobytes()
    at = held.find(wanted)
    while at >= 0:
        if at % _ID_BYTES == 0:
            start = at // _ID_BYTES + len(before)
            yield _Place(call, start, start + len(output), whole=True, in_context=False)
        at = held.find(wanted, at + 1)


def _look_everywhere(case: Case, found: _Located) -> None:
    """Turns that stand in no row that was looked at, searched for in every row."""
    for row in range(len(case.rows.ids)):
        for call in _calls_of(case, int(case.session[row])):
            if call not in found.seen and next(_elsewhere(case, row, call), None):
                found.seen.add(call)


def _not_located(case: Case, found: _Located) -> None:
    """Turns with an output that no row holds, and tokens that no row trains."""
    outputs = case.turns.outputs
    hidden = [
        call
        for call in np.flatnonzero((outputs.lengths > 0) & case.trainable)
        if call not in found.seen
    ]
    for call in hidden:
        case.say(
            "not_located",
            f"{outputs.lengths[call]} sampled tokens stand after the prompt's end in no "
            "row",
            call=int(call),
            token=0,
        )
    known = np.flatnonzero(found.trained | np.isin(outputs.owner, hidden))
    span_rules.not_trained(case, known)


def _lengths(case: Case) -> None:
    """A mask is of the whole row or of its response, logprobs are as long as it."""
    rows, ids = case.rows, case.rows.ids
    prompts = rows.table.column("prompt_length").to_pylist()
    for row in range(len(ids)):
        n, n_mask = int(ids.lengths[row]), int(rows.n_mask[row])
        response = None if prompts[row] is None else n - prompts[row]
        if n_mask > n or (response is not None and n_mask not in (n, response)):
            case.say(
                "length",
                f"{n_mask} of loss_mask for {n} ids"
                + ("" if response is None else f", {response} of them response"),
                row=row,
                token=min(n, n_mask),
            )
        if rows.n_logprobs[row] not in (0, n, n_mask):
            case.say(
                "length",
                f"{rows.n_logprobs[row]} of logprobs for {n} ids and {n_mask} of "
                "loss_mask",
                row=row,
                token=min(n, int(rows.n_logprobs[row])),
            )
