"""Check a table against the rules of its schema; errors name the row."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa

from trajkit import schema
from trajkit._arguments import check_choice, check_flag
from trajkit.errors import InvalidTurnsError, SchemaError
from trajkit.schema.columns import Check, Fault, checks_of
from trajkit.schema.engine import not_logprobs, raw_floats
from trajkit.schema.rows import row_lengths
from trajkit.schema.turns import not_empty
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import (
    TableLike,
    as_table,
    cast,
    check_columns,
    misfits,
    place,
    turns_schema,
)
from trajkit.tables.ragged import lengths
from trajkit.tables.session_batches import whole_sessions
from trajkit.tables.stages import (
    Batches,
    Source,
    apply,
    batches_in,
    batches_of,
    stage,
)
from trajkit.tables.take import take_rows
from trajkit.turns import content_rules
from trajkit.turns.content_rules import mm_items

Kind: TypeAlias = Literal["turns", "sessions", "links", "drift", "rows", "report"]
Nonfinite: TypeAlias = Literal["raise", "null"]

REJECTED = pa.schema(
    [
        pa.field("session_id", pa.string(), nullable=False),
        # the first rule that it breaks, with position and value
        pa.field("reason", pa.string(), nullable=False),
    ],
    # so that readers of a directory of turns skip it
    metadata={"trajkit.table": "rejected"},
)
"""The rejected sessions that `reject_sessions` returns: one row per session."""

_SCHEMAS: dict[str, pa.Schema] = {
    "sessions": schema.SESSIONS,
    "links": schema.LINKS,
    "drift": schema.DRIFT,
    "report": schema.REPORT,
}
_LAYOUT = (
    *("session_id", "row_index", "loss_mask"),
    *("prompt_length", "shared_length", "rollout_mask_sum", "parent_row"),
)
"""Columns of rows that packs rely on."""


@stage
def validate(
    table: TableLike,
    kind: Kind | None = None,
    *,
    nonfinite_logprobs: Nonfinite = "raise",
    bodies: bool = True,
) -> pa.Table:
    """Check every rule of a table's schema and return the table in canonical form.

    Parameters
    ----------
    table : Table, RecordBatch, or any Arrow stream
        Turns (in full or delta form), sessions, links, drift, report or rows, in any
        layout that polars, Parquet or pyarrow produce.
    kind : {"turns", "sessions", "links", "drift", "rows", "report"}, optional
        None: taken from the table's metadata or, without metadata, from its columns.
    nonfinite_logprobs : {"raise", "null"}
        How to treat NaN, the infinities, and values of -9999 and below in the logprobs
        of turns, which engines write if they have no logprob.
    bodies : bool
        Whether to check the message bodies of turns. With False, the row with the first
        occurrence of a message may have been filtered out.

    Returns
    -------
    Table
        Columns that are in canonical form already are not copied.

    Raises
    ------
    SchemaError
        A column is missing or has an unsuitable type, or the table is of another kind or
        schema version.
    LayoutError
        The buffers of the table do not fit together.
    InvalidTurnsError
        A value breaks a rule; the text names session, turn, column, value and rule.
    ArgumentError
        ``kind``, ``nonfinite_logprobs`` or ``bodies`` is not allowed.
    """

    _check_options(kind, nonfinite_logprobs, bodies)

    def one(source: pa.Table) -> pa.Table:
        plan, table_checks = _plan(source, kind, bodies)
        check_columns(source, plan)
        _raise_first(source, misfits(source, plan))
        return check_all(_settle(cast(source, plan), nonfinite_logprobs), table_checks)

    return apply(one, table, what=kind or "tables")


validate_batches = validate.batches


def reject_sessions(
    table: TableLike,
    kind: Kind | None = None,
    *,
    nonfinite_logprobs: Nonfinite = "raise",
    bodies: bool = True,
) -> tuple[pa.Table, pa.Table]:
    """Separate the sessions that keep every rule from those that break one.

    Parameters
    ----------
    table, kind, nonfinite_logprobs, bodies
        As for `validate`.

    Returns
    -------
    good : Table
        In canonical form; complete sessions only.
    bad : Table
        Columns session_id and reason, in order of discovery.

    Raises
    ------
    SchemaError
        As for `validate`: the fault affects the complete table.
    InvalidTurnsError
        A session_id is null, so the session to reject is unknown.
    """
    _check_options(kind, nonfinite_logprobs, bodies)
    source = as_table(table)
    return _reject(source, *_plan(source, kind, bodies), nonfinite_logprobs)


def reject_sessions_batches(
    batches: Source,
    kind: Kind | None = None,
    *,
    rejected: list[pa.RecordBatch],
    nonfinite_logprobs: Nonfinite = "raise",
    bodies: bool = True,
) -> Batches:
    """From record batches to an iterator of them; see `reject_sessions`.

    The batches of the good sessions are returned; those of the bad ones are appended to
    ``rejected`` while they are read.
    """
    _check_options(kind, nonfinite_logprobs, bodies)

    def good() -> Iterator[pa.Table]:
        for source in whole_sessions(batches_of(batches), kind or "tables"):
            plan = _plan(source, kind, bodies)
            out, bad = _reject(source, *plan, nonfinite_logprobs)
            rejected.extend(bad.to_batches())
            yield out

    return batches_in(good())


def _check_options(kind: object, nonfinite_logprobs: object, bodies: object) -> None:
    """Raise ArgumentError unless the options of `validate` are allowed."""
    if kind is not None:
        check_choice("kind", kind, Kind)
    check_choice("nonfinite_logprobs", nonfinite_logprobs, Nonfinite)
    check_flag("bodies", bodies)


def _reject(
    source: pa.Table,
    plan: pa.Schema,
    table_checks: tuple[Check, ...],
    nonfinite_logprobs: Nonfinite,
) -> tuple[pa.Table, pa.Table]:
    check_columns(source, plan)
    reasons: dict[str, str] = {}
    source = _without(source, misfits(source, plan), reasons)
    out = _settle(cast(source, plan), nonfinite_logprobs)
    for check in table_checks:
        out = _without(out, check(out), reasons)
    bad = pa.table([list(reasons), list(reasons.values())], schema=REJECTED)
    return out, bad


def check_turns(turns: pa.Table, nonfinite_logprobs: Nonfinite) -> pa.Table:
    """As `validate`, for turns in canonical form, without bodies and empty prompts."""
    return check_all(_settle(turns, nonfinite_logprobs), _stored_checks(turns)[1])


def reject_turns(
    turns: pa.Table, nonfinite: Nonfinite, *, bodies: bool = False
) -> tuple[pa.Table, pa.Table]:
    """As `reject_sessions`, by the rules of `check_turns`, and those on ``bodies``."""
    return _reject(turns, *_stored_checks(turns, bodies=bodies), nonfinite)


def _stored_checks(
    turns: pa.Table, *, bodies: bool = False
) -> tuple[pa.Schema, tuple[Check, ...]]:
    plan, checks = _plan(turns, "turns", bodies)
    return plan, tuple(one for one in checks if one is not not_empty)


def check_table(table: pa.Table, kind: Kind) -> pa.Table:
    """As `validate`, for a table in canonical form."""
    return check_all(table, _plan(table, kind, bodies=False)[1])


def check_layout(rows: pa.Table, *, read_ids: bool = True) -> None:
    """Raise unless rows in canonical form can be packed.

    Without ``read_ids``, token ids are only checked for nulls, so no token is read.
    """
    read_ids |= any(one.values.null_count for one in rows.column("input_ids").chunks)
    names = (*_LAYOUT, "input_ids") if read_ids else _LAYOUT
    check_all(rows, (*checks_of(schema.ROWS, names), row_lengths, mm_items))


def check_all(table: pa.Table, checks: Iterable[Check]) -> pa.Table:
    """The table; raises `InvalidTurnsError` at the first row that breaks a rule."""
    for check in checks:
        _raise_first(table, check(table))
    return table


def _plan(
    table: pa.Table, kind: Kind | None, bodies: bool
) -> tuple[pa.Schema, tuple[Check, ...]]:
    """The schema of a table, and its rules."""
    name = kind or _kind_of(table)
    if name in _SCHEMAS:
        return _SCHEMAS[name], checks_of(_SCHEMAS[name])
    if name == "rows":
        return schema.ROWS, (*checks_of(schema.ROWS), mm_items)
    if name != "turns":
        raise SchemaError(
            f"kind {name!r} does not exist: expected one of "
            f"{', '.join(['turns', *_SCHEMAS, 'rows'])}"
        )
    plan = turns_schema(table.column_names)
    messages = "messages" if plan is schema.TURNS else "suffix_messages"
    of_bodies = (partial(content_rules.bodies, messages),) if bodies else ()
    return plan, (*checks_of(plan), mm_items, content_rules.payloads, *of_bodies)


def _kind_of(table: pa.Table) -> str:
    stated = (table.schema.metadata or {}).get(b"trajkit.table")
    if stated is not None:
        return str(stated.decode(errors="replace"))
    names = set(table.column_names)
    for name, columns in (
        ("rows", {"input_ids", "loss_mask"}),
        ("rows", {"suffix_ids", "suffix_mask"}),
        ("turns", {"output_ids"}),
        ("drift", {"lcp"}),
        ("links", {"parent", "turn_index"}),
        ("report", {"tokens_sampled"}),
        ("sessions", {"session_id"}),
    ):
        if columns <= names:
            return name
    raise SchemaError(
        f"columns {sorted(names)} fit no table: expected session_id at least"
    )


def _raise_first(table: pa.Table, violations: Iterator[Fault]) -> None:
    for rows, explain in violations:
        if len(rows):
            raise InvalidTurnsError(f"{place(table, int(rows[0]))}: {explain(0)}")


def _without(
    table: pa.Table, violations: Iterator[Fault], reasons: dict[str, str]
) -> pa.Table:
    """Remove the sessions that break a rule, and add the first reason of each."""
    before = len(reasons)
    names = table.column("session_id")
    for rows, explain in violations:
        for row, k in zip(*np.unique(rows, return_index=True), strict=True):
            name = names[int(row)].as_py()
            if name is None:
                raise InvalidTurnsError(f"{place(table, int(row))}: session_id is null")
            if name not in reasons:
                reasons[name] = f"{place(table, int(row))}: {explain(int(k))}"
    if len(reasons) == before:
        return table
    bad = pa.array(list(reasons)[before:], pa.string())
    good = pc.invert(pc.is_in(names.cast(pa.string()), value_set=bad))
    return take_rows(table, pa.array(np.flatnonzero(good.to_numpy())))


def _settle(table: pa.Table, nonfinite: Nonfinite) -> pa.Table:
    """Turns with 0.0 under every null logprob, and null for values that are none."""
    if "output_logprobs" not in table.column_names:
        return table
    check_choice("nonfinite_logprobs", nonfinite, Nonfinite)
    at = table.column_names.index("output_logprobs")
    column = table.column(at)
    chunks = [_settle_chunk(chunk, nonfinite == "null") for chunk in column.chunks]
    if all(new is old for new, old in zip(chunks, column.chunks, strict=True)):
        return table
    return table.set_column(at, table.field(at), pa.chunked_array(chunks, column.type))


def _settle_chunk(chunk: pa.LargeListArray, make_null: bool) -> pa.LargeListArray:
    values = chunk.flatten()
    numbers = raw_floats(values)
    absent = values.is_null().to_numpy(zero_copy_only=False)
    if make_null:
        absent = absent | not_logprobs(numbers)
    elif not values.null_count:
        return chunk
    # the schema promises 0.0 in the bytes, not -0.0 or NaN
    if not (make_null and absent.any()) and not numbers[absent].tobytes().strip(b"\0"):
        return chunk
    fresh = pa.array(np.where(absent, np.float32(0), numbers), mask=absent)
    return pa.LargeListArray.from_arrays(
        pa.array(np.append(0, np.cumsum(lengths(chunk)))),
        fresh,
        type=chunk.type,
        mask=chunk.is_null() if chunk.null_count else None,
    )
