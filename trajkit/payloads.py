"""Per-token columns of turns that a caller carries into rows, in lockstep with the ids."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from trajkit.calls import Calls, Longs, Records
from trajkit.errors import InvalidTurnsError, SchemaError
from trajkit.picked import picked_column
from trajkit.schema import ROWS
from trajkit.tables import is_list, list_parts


@dataclass(frozen=True, slots=True)
class Stretches:
    """Stretches of rows that are stretches of calls' prompts and outputs; by stretch."""

    row: Longs
    # where it begins in the row
    place: Longs
    call: Longs
    # where it begins in the call's prompt and output
    first: Longs
    length: Longs


def payload_names(payloads: object) -> tuple[str, ...]:
    """The names of columns that a caller wants carried.

    Raises
    ------
    SchemaError
        It is no sequence of names, or a name comes twice or is one of a row's own.
    """
    if isinstance(payloads, str) or not isinstance(payloads, Sequence):
        raise SchemaError(f"payloads={payloads!r}: expected a sequence of column names")
    for name in payloads:
        if not isinstance(name, str):
            raise SchemaError(f"payloads has {name!r}: expected column names")
        if name in ROWS.names:
            raise SchemaError(f"payload {name!r} is the name of a column of rows")
        if list(payloads).count(name) > 1:
            raise SchemaError(f"payload {name!r} is named twice")
    return tuple(payloads)


def rows_schema(turns: pa.Schema, names: tuple[str, ...]) -> pa.Schema:
    """`trajkit.schema.ROWS` and, behind it, a list per payload.

    Raises
    ------
    SchemaError
        ``turns`` has no such column, or one that is no list.
    """
    schema = ROWS
    for name in names:
        at = turns.get_field_index(name)
        if at < 0:
            raise SchemaError(f"payload {name!r} is no column of turns")
        if not is_list(turns.field(at).type):
            raise SchemaError(
                f"payload {name!r} is {turns.field(at).type}: expected a list with an "
                "element per token"
            )
        value = turns.field(at).type.value_type
        schema = schema.append(pa.field(name, pa.large_list(value)))
    return schema


def with_payloads(
    batch: pa.RecordBatch,
    calls: Calls,
    planned: Records,
    names: tuple[str, ...],
    shown: Stretches | None = None,
) -> pa.RecordBatch:
    """Rows with the payloads of their tokens.

    Parameters
    ----------
    batch : RecordBatch
        `trajkit.schema.ROWS`.
    calls : Calls
        What the rows were made of.
    planned : ndarray of dtype ROW
        The rows before they were written.
    names : tuple of str
        As `payload_names` gives them.
    shown : Stretches, optional
        Which call was shown what stands in a row. None: the last call of the row was
        shown all of it.

    Raises
    ------
    SchemaError, InvalidTurnsError
        As `rows_schema`; a list is as long as neither the output nor the prompt and
        the output.
    """
    if not names:
        return batch
    schema = rows_schema(calls.table.schema, names)
    at = [_Lists(calls, name) for name in names]
    if shown is None:
        # A row is its last call's prompt and output; what that call did not sample of
        # them, it was at least shown.
        nowhere = np.zeros(len(planned), np.int64)
        rows, last = np.arange(len(planned)), planned["last"].astype(np.int64)
        shown = Stretches(rows, nowhere, last, nowhere, planned["n_tokens"])
    columns = [one.of_rows(batch, calls, planned, shown) for one in at]
    return pa.RecordBatch.from_arrays([*batch.columns, *columns], schema=schema)


class _Lists:
    """One payload column, flat."""

    def __init__(self, calls: Calls, name: str) -> None:
        column = calls.table.column(name)
        self.name = name
        starts, lengths = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        values = [pa.array([], column.type.value_type)]
        known = 0
        for chunk in column.chunks:
            offsets, flat = list_parts(chunk)
            ends = offsets.to_numpy()
            starts.append(known + ends[:-1])
            lengths.append(np.where(np.asarray(chunk.is_valid()), np.diff(ends), -1))
            values.append(flat)
            known += len(flat)
        self.values = pa.concat_arrays(values)
        self.start = np.concatenate(starts)
        length = np.concatenate(lengths)
        self._check(calls, name, length)
        self.given = length >= 0
        # where the list also has the prompt's tokens, the first of which it starts with
        self.whole = self.given & (length == calls.held)
        self.output = self.start + np.where(self.whole, calls.calls["prompt_len"], 0)

    @staticmethod
    def _check(calls: Calls, name: str, length: Longs) -> None:
        out_len = calls.calls["out_len"]
        fits = (length < 0) | (length == out_len) | (length == calls.held)
        bad = np.flatnonzero(~fits)
        if len(bad):
            call = int(bad[0])
            raise InvalidTurnsError(
                f"{calls.place(call)}: {length[call]} of {name} for {out_len[call]} "
                f"output ids, {calls.held[call]} with the prompt's: expected as many "
                "as either"
            )

    def of_rows(
        self,
        batch: pa.RecordBatch,
        calls: Calls,
        planned: Records,
        shown: Stretches,
    ) -> pa.LargeListArray:
        """The payload of every token of every row, null where none is known."""
        offsets = np.zeros(len(planned) + 1, np.int64)
        np.cumsum(planned["n_tokens"], out=offsets[1:])
        at = np.full(int(offsets[-1]), -1)
        known = np.flatnonzero(self.whole[shown.call])
        _lay(
            at,
            (offsets[shown.row] + shown.place)[known],
            (self.start[shown.call] + shown.first)[known],
            shown.length[known],
        )
        spans = batch.column("spans").flatten()
        start, stop, turn, first = (
            spans.field(name).to_numpy().astype(np.int64)
            for name in ("start", "stop", "turn_index", "output_start")
        )
        lengths = np.asarray(batch.column("spans").value_lengths(), np.int64)
        row = np.repeat(np.arange(len(planned)), lengths)
        ranks = (calls.session_of().astype(np.int64) << 32) + calls.turn_index
        session = planned["session"][row].astype(np.int64)
        call = np.searchsorted(ranks, (session << 32) + turn)
        # what a turn sampled has that turn's own payload, or none
        source = np.where(self.given[call], self.output[call] + first, -1)
        _lay(at, offsets[row] + start, source, stop - start)
        taken = picked_column(self.values, pa.array(at, mask=at < 0), self.name)
        return pa.LargeListArray.from_arrays(pa.array(offsets), taken)


def _lay(at: Longs, places: Longs, sources: Longs, lengths: Longs) -> None:
    """Runs of numbers, written where they belong; a source of -1 writes -1 throughout."""
    ends = np.cumsum(lengths)
    step = np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)
    known = np.repeat(sources >= 0, lengths)
    at[np.repeat(places, lengths) + step] = np.where(
        known, np.repeat(sources, lengths) + step, -1
    )
