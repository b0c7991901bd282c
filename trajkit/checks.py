"""The rules of a turns table, each as a generator of the rows that break it.

A check takes a table in canonical form that has passed the checks before it in its list,
and looks at whole columns. What it yields names the k-th bad row's column, value and rule;
the driver in `trajkit.validate` puts session and turn before it.
"""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trajkit.json_text import parse
from trajkit.tables import Rows, Violation

Check: TypeAlias = Callable[[pa.Table], Iterator[Violation]]
Bools: TypeAlias = npt.NDArray[np.bool_]

MAX_LOGPROB = np.float32(1e-4)
"""Rounding may take a logprob this far above 0."""
NO_LOGPROB = np.float32(-9999.0)
"""vLLM writes this for a token without a logprob; nothing sampled comes near it."""


def sessions_in_one_piece(table: pa.Table) -> Iterator[Violation]:
    names = table.column("session_id").combine_chunks()
    starts = run_starts(table)
    heads = names.take(pa.array(starts))
    codes = heads.dictionary_encode().indices.to_numpy()
    first = np.full(len(heads), -1, np.int64)
    seen, where = np.unique(codes, return_index=True)
    first[seen] = where
    again = np.flatnonzero(first[codes] != np.arange(len(codes)))
    rows = starts[again]
    began = starts[first[codes[again]]]
    yield (
        rows,
        lambda k: (
            f"the session began in table row {began[k]} and comes back in row {rows[k]} "
            "after another: gather it first, for instance by sorting the table by "
            "session_id"
        ),
    )


def ascending(index: str) -> Check:
    """The check that `index` ascends within each session, from 0 or above."""

    def check(table: pa.Table) -> Iterator[Violation]:
        values = table.column(index).to_numpy()
        negative = np.flatnonzero(values < 0)
        yield negative, lambda k: f"{index} is negative: it counts from 0"
        opens = np.zeros(len(values), np.bool_)
        opens[run_starts(table)] = True
        falls = np.diff(values, prepend=-1) <= 0
        rows = np.flatnonzero(falls & ~opens)

        def explain(k: int) -> str:
            here, before = values[rows[k]], values[rows[k] - 1]
            if here == before:
                return f"{index} {here} is repeated within the session"
            return f"{index} {here} follows {before}: it must ascend within a session"

        yield rows, explain

    return check


def token_ids(name: str) -> Check:
    """The check that a column of ids has no null and no negative element."""

    def check(table: pa.Table) -> Iterator[Violation]:
        for start, ends, values in flat_chunks(table.column(name)):
            if values.null_count:
                at = np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))
                rows, offsets = owners(at, ends)
                yield (
                    rows + start,
                    lambda k, offsets=offsets: f"{name}[{offsets[k]}] is null",  # type: ignore[misc]
                )
                continue
            ids = values.to_numpy()
            if len(ids) and ids.min() < 0:
                at = np.flatnonzero(ids < 0)
                rows, offsets = owners(at, ends)
                yield (
                    rows + start,
                    lambda k, offsets=offsets, bad=ids[at]: (  # type: ignore[misc]
                        f"{name}[{offsets[k]}] is {bad[k]}: token ids are not negative"
                    ),
                )

    return check


def prompts_not_empty(table: pa.Table) -> Iterator[Violation]:
    if "prompt_ids" in table.column_names:
        n_prompt = lengths(table.column("prompt_ids"))
    else:
        n_prompt = lengths(table.column("suffix_ids"))
        n_prompt += table.column("shared_length").to_numpy()
    yield (
        np.flatnonzero(n_prompt == 0),
        lambda k: "prompt_ids is empty: an engine samples after some token",
    )


def logprobs(name: str, ids: str) -> Check:
    """The check that a column of logprobs has one per id, and log-probabilities only."""

    def check(table: pa.Table) -> Iterator[Violation]:
        column = table.column(name)
        n_logprobs, n_ids = lengths(column), lengths(table.column(ids))
        odd = np.flatnonzero((n_logprobs != n_ids) & ~nulls(column))
        yield (
            odd,
            lambda k: f"{n_logprobs[odd[k]]} {name} for {n_ids[odd[k]]} {ids}",
        )
        for start, ends, values in flat_chunks(column):
            numbers = raw_floats(values)
            wrong = not_logprobs(numbers) | (numbers > MAX_LOGPROB)
            if values.null_count:
                wrong &= values.is_valid().to_numpy(zero_copy_only=False)
            at = np.flatnonzero(wrong)
            rows, offsets = owners(at, ends)
            yield (
                rows + start,
                lambda k, offsets=offsets, bad=numbers[at]: (  # type: ignore[misc]
                    f"{name}[{offsets[k]}] is {bad[k]}: {_logprob_rule(bad[k])}"
                ),
            )

    return check


def not_logprobs(numbers: npt.NDArray[np.float32]) -> Bools:
    """Where an engine had no logprob to give: NaN, an infinity, -9999 and below."""
    return ~np.isfinite(numbers) | (numbers <= NO_LOGPROB)


def _logprob_rule(value: np.float32) -> str:
    if np.isnan(value):
        return "it is no number (nonfinite_logprobs='null' makes it null)"
    if value <= NO_LOGPROB:
        return (
            "engines write this where they have no logprob for a token "
            "(nonfinite_logprobs='null' makes it null)"
        )
    return "a log-probability is at most 0, give or take 1e-4 for rounding"


def weight_versions(table: pa.Table) -> Iterator[Violation]:
    n_output = lengths(table.column("output_ids"))
    for start, ends, pieces in flat_chunks(table.column("weight_versions")):
        broken = pieces.is_null()
        for field in ("version", "start", "stop"):
            broken = pc.or_(broken, pc.struct_field(pieces, field).is_null())
        rows, offsets = owners(
            np.flatnonzero(broken.to_numpy(zero_copy_only=False)), ends
        )
        yield (
            rows + start,
            lambda k, offsets=offsets: (  # type: ignore[misc]
                f"weight_versions[{offsets[k]}] has a null: version, start and stop are "
                "needed"
            ),
        )
        if len(rows):
            continue
        lows = pc.struct_field(pieces, "start").to_numpy(zero_copy_only=False)
        highs = pc.struct_field(pieces, "stop").to_numpy(zero_copy_only=False)
        begins = np.concatenate([[0], ends[:-1]])
        has = np.flatnonzero(ends > begins)
        # the pieces tile the output: each starts where the one before it stopped
        expected = np.concatenate([[0], highs[:-1]])
        expected[begins[has]] = 0
        rows, offsets = owners(
            np.flatnonzero((lows != expected) | (highs < lows)), ends
        )
        yield (
            rows + start,
            lambda k, rows=rows, offsets=offsets, begins=begins: (  # type: ignore[misc]
                f"weight_versions[{offsets[k]}] is "
                f"{lows[begins[rows[k]] + offsets[k]]}:"
                f"{highs[begins[rows[k]] + offsets[k]]} where a piece from "
                f"{expected[begins[rows[k]] + offsets[k]]} on is due: the pieces tile "
                "the output"
            ),
        )
        last = np.zeros(len(ends), np.int64)
        last[has] = highs[ends[has] - 1]
        given = ~nulls(table.column("weight_versions"))[start : start + len(ends)]
        rows = start + np.flatnonzero(given & (last != n_output[start:][: len(ends)]))
        yield (
            rows,
            lambda k, rows=rows, last=last, start=start: (  # type: ignore[misc]
                f"weight_versions end at {last[rows[k] - start]} of "
                f"{n_output[rows[k]]} output ids: the pieces tile the output"
            ),
        )


def messages(name: str) -> Check:
    """The check that every message of a column has a key and a role."""

    def check(table: pa.Table) -> Iterator[Violation]:
        for start, ends, values in flat_chunks(table.column(name)):
            for field in ("", "key", "role"):
                column = pc.struct_field(values, field) if field else values
                if not column.null_count:
                    continue
                at = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
                rows, offsets = owners(at, ends)
                what = f"has no {field}" if field else "is null"
                yield (
                    rows + start,
                    lambda k, offsets=offsets, what=what: (  # type: ignore[misc]
                        f"{name}[{offsets[k]}] {what}"
                    ),
                )

    return check


def response(table: pa.Table) -> Iterator[Violation]:
    column = table.column("response").combine_chunks()
    for field in ("key", "role"):
        lacks = pc.and_(column.is_valid(), pc.struct_field(column, field).is_null())
        yield (
            np.flatnonzero(lacks.to_numpy(zero_copy_only=False)),
            lambda k, field=field: f"response has no {field}",  # type: ignore[misc]
        )


def bodies(name: str) -> Check:
    """The check of what messages say: a body at each key's first place, and JSON in it."""

    def check(table: pa.Table) -> Iterator[Violation]:
        places, rows = message_places(table, name)
        keys = pc.struct_field(places, "key")
        body = pc.struct_field(places, "body")
        sessions = np.searchsorted(run_starts(table), rows, side="right")
        codes = keys.dictionary_encode().indices.to_numpy().astype(np.int64)
        _, first = np.unique(sessions * (len(codes) + 1) + codes, return_index=True)
        absent = body.is_null().to_numpy(zero_copy_only=False)
        missing = np.sort(first[absent[first]])
        yield (
            rows[missing],
            lambda k: (
                f"the message with the key {keys[missing[k]].as_py().hex()} has no body, "
                "and none came before it in the session (rows filtered away? then "
                "validate with bodies=False)"
            ),
        )
        roles = pc.struct_field(places, "role")
        for at in np.flatnonzero(~absent):
            reason = _body_fault(body[at].as_py(), roles[at].as_py())
            if reason is not None:
                yield rows[at : at + 1], lambda k, reason=reason: reason  # type: ignore[misc]

    return check


def _body_fault(body: str, role: str) -> str | None:
    shown = body if len(body) <= 60 else f"{body[:57]}..."
    try:
        message = parse(body)
    except ValueError as error:
        return f"the message body {shown!r} is no JSON: {error}"
    if not isinstance(message, dict):
        return f"the message body {shown!r} is no JSON object"
    if message.get("role") != role:
        return f"the message body {shown!r} is not of the role {role!r} beside it"
    return None


def message_places(table: pa.Table, name: str) -> tuple[pa.StructArray, Rows]:
    """Every message of a table in session order, prompt before reply, and its row."""
    listed = table.column(name)
    replies = table.column("response").combine_chunks()
    flat = pa.chunked_array([chunk.flatten() for chunk in listed.chunks], replies.type)
    there = np.flatnonzero(replies.is_valid().to_numpy(zero_copy_only=False))
    rows = np.repeat(np.arange(len(listed)), lengths(listed))
    places = pa.concat_arrays([*flat.chunks, replies.take(pa.array(there))])
    both = np.concatenate([rows, there])
    order = np.argsort(both, kind="stable")
    return places.take(pa.array(order)), both[order]


def delta(table: pa.Table) -> Iterator[Violation]:
    """The references of the delta form: an earlier turn, and no more than it holds."""
    bases = table.column("base_turn")
    none = nulls(bases)
    base_row, found = lookup(table, "turn_index", bases)
    here = table.column("turn_index").to_numpy()
    given = bases.fill_null(-1).to_numpy()
    rows = np.flatnonzero(~none & (~found | (given >= here)))
    yield (
        rows,
        lambda k: f"base_turn {given[rows[k]]} is no earlier turn of the session",
    )
    if len(rows):
        return

    shared = table.column("shared_length").to_numpy()
    full = shared.astype(np.int64) + lengths(table.column("suffix_ids"))
    held = np.where(none, 0, (full + lengths(table.column("output_ids")))[base_row])
    far = np.flatnonzero((shared < 0) | (shared > held))
    yield (
        far,
        lambda k: (
            f"shared_length is {shared[far[k]]} where the base turn holds "
            f"{held[far[k]]} tokens"
        ),
    )
    listed, shares = table.column("suffix_messages"), table.column("shared_messages")
    uneven = np.flatnonzero(nulls(listed) != nulls(shares))
    yield (
        uneven,
        lambda k: "shared_messages and suffix_messages must be null together",
    )
    n_shared = shares.fill_null(0).to_numpy()
    total = (
        n_shared.astype(np.int64) + lengths(listed) + ~nulls(table.column("response"))
    )
    there = np.where(none | nulls(listed)[base_row], 0, total[base_row])
    over = np.flatnonzero((n_shared < 0) | (n_shared > there))
    yield (
        over,
        lambda k: (
            f"shared_messages is {n_shared[over[k]]} where the base turn has "
            f"{there[over[k]]} messages"
        ),
    )


def lookup(table: pa.Table, index: str, wanted: pa.ChunkedArray) -> tuple[Rows, Bools]:
    """The row of each wanted index in the row's own session, and whether there is one.

    Sessions lie in one piece and `index` ascends in each. A null finds nothing.
    """
    starts = run_starts(table)
    session = np.searchsorted(starts, np.arange(len(table)), side="right") << 32
    have = session + table.column(index).to_numpy()
    seek = session + wanted.fill_null(-1).to_numpy()
    row = np.minimum(np.searchsorted(have, seek), max(len(table) - 1, 0))
    found = (have[row] == seek) & ~nulls(wanted)
    return np.where(found, row, 0), found


def run_starts(table: pa.Table) -> Rows:
    """The rows at which another session begins than the row before."""
    names = table.column("session_id").combine_chunks()
    if len(names) == 0:
        return np.empty(0, np.int64)
    changes = pc.not_equal(names[1:], names[:-1]).to_numpy(zero_copy_only=False)
    return np.concatenate([[0], 1 + np.flatnonzero(changes)])


def lengths(column: pa.ChunkedArray) -> Rows:
    """Elements of each list, 0 for a null list."""
    return pc.list_value_length(column).fill_null(0).to_numpy().astype(np.int64)


def nulls(column: pa.ChunkedArray) -> Bools:
    return column.is_null().to_numpy()  # type: ignore[no-any-return]


def flat_chunks(column: pa.ChunkedArray) -> Iterator[tuple[int, Rows, pa.Array]]:
    """Of each chunk of lists: its first row, each list's end, and the values between."""
    start = 0
    for chunk in column.chunks:
        n = pc.list_value_length(chunk).fill_null(0).to_numpy(zero_copy_only=False)
        yield start, np.cumsum(n, dtype=np.int64), chunk.flatten()
        start += len(chunk)


def owners(at: Rows, ends: Rows) -> tuple[Rows, Rows]:
    """Which list each value position belongs to, and its index there."""
    rows = np.searchsorted(ends, at, side="right")
    begins = np.concatenate([[0], ends])
    return rows, at - begins[rows]


def raw_floats(values: pa.FloatArray) -> npt.NDArray[np.float32]:
    """The numbers of an array, whatever stands under its nulls included."""
    data = values.buffers()[1]
    if data is None:
        return np.empty(0, np.float32)
    numbers = np.frombuffer(data, np.float32)
    return numbers[values.offset : values.offset + len(values)]
