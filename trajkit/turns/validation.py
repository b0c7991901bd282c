"""Check a table against the rules of its schema; errors name the row.

The rules of columns are in `trajkit.schema`, beside them. Those of payloads, images and
bodies, which need more, are here.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Literal, TypeAlias, TypeVar

import numpy as np
import orjson
import pyarrow as pa

from trajkit import schema
from trajkit._arguments import check_choice, check_flag
from trajkit.errors import InvalidTurnsError, SchemaError
from trajkit.schema.engine import (
    ID_RULE,
    MAX_LOGPROB,
    POSITIVE,
    Check,
    Fault,
    broken,
    broken_items,
    checks_of,
    described,
    fault,
    field_of,
    filled,
    not_empty,
    not_logprobs,
    nulls,
    row_lengths,
    session_numbers,
)
from trajkit.tables.canonical import (
    TableLike,
    canonical,
    check_type,
    in_type,
    place,
    turns_schema,
)
from trajkit.tables.columns import with_column
from trajkit.tables.ragged import Ragged, codes, combined
from trajkit.tables.stages import apply, session_ends, stage
from trajkit.turns.images import has_items, image_faults
from trajkit.turns.messages import parse_json

Kind: TypeAlias = Literal["turns", "sessions", "links", "drift", "rows", "report"]
Nonfinite: TypeAlias = Literal["raise", "null"]

REJECTED = described("""rejected
session_id text
reason text: the first rule that it breaks, with position and value
""").with_metadata({"trajkit.table": "rejected"})
"""The rejected sessions of `trajkit.run`: one row per session. By its name,
readers of a directory of turns skip it."""

_SCHEMAS: dict[str, pa.Schema] = {
    name: getattr(schema, name.upper())
    for name in ("sessions", "links", "drift", "report", "rows")
}
# levels of JSON that every parser reads
_SHALLOW = 100
# Columns of rows that packs rely on.
_LAYOUT = (
    *("session_id", "row_index", "loss_mask"),
    *("prompt_length", "shared_length", "rollout_mask_sum", "parent_row"),
)


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
    if kind is not None:
        check_choice("kind", kind, Kind)
    check_choice("nonfinite_logprobs", nonfinite_logprobs, Nonfinite)
    check_flag("bodies", bodies)

    def one(source: pa.Table) -> pa.Table:
        plan, checks = _plan(source, kind, bodies)
        return check_all(_settle(canonical(source, plan), nonfinite_logprobs), checks)

    return apply(one, table, what=kind or "tables")


validate_batches = validate.batches


def check_turns(
    turns: pa.Table, nonfinite_logprobs: Nonfinite, *, bodies: bool = False
) -> pa.Table:
    """As `validate`, for turns in canonical form, whose prompts may be empty."""
    _, checks = _plan(turns, "turns", bodies, empty=True)
    return check_all(_settle(turns, nonfinite_logprobs), checks)


Made = TypeVar("Made")


def accepted(
    work: Callable[[pa.Table], Made], table: pa.Table, rejected: dict[str, str]
) -> Iterator[Made]:
    """What ``work`` makes of the sessions that it does not refuse (InvalidTurnsError).

    It gets all sessions, which are contiguous, and if it refuses, each half of them.
    ``rejected`` gets the error's text for each session that it refuses alone.
    """
    try:
        made = work(table)
    except InvalidTurnsError as error:
        ends, names = session_ends(table), table.column("session_id")
        if names.null_count or not len(ends):  # there is no session to reject
            raise
        if len(ends) == 1:
            rejected[str(names[0])] = str(error)
            return
        middle = ends[len(ends) // 2 - 1]
        for half in (table.slice(0, middle), table.slice(middle)):
            yield from accepted(work, half, rejected)
    else:
        yield made


def check_table(table: pa.Table, kind: Kind) -> pa.Table:
    """As `validate`, for a table in canonical form."""
    return check_all(table, _plan(table, kind, bodies=False)[1])


def check_layout(rows: pa.Table, *, read_ids: bool = True) -> None:
    """Raise unless rows in canonical form can be packed."""
    read_ids |= any(one.values.null_count for one in rows.column("input_ids").chunks)
    names = (*_LAYOUT, "input_ids") if read_ids else _LAYOUT
    check_all(rows, (*checks_of(schema.ROWS, names), row_lengths, mm_items))


def check_all(table: pa.Table, checks: Iterable[Check]) -> pa.Table:
    """The table; raises `InvalidTurnsError` at the first row that breaks a rule."""
    for check in checks:
        for rows, explain in check(table):
            if len(rows):
                where = place(table, int(rows[0]))
                raise InvalidTurnsError(f"{where}: {explain(0)}")
    return table


def _plan(
    table: pa.Table, kind: Kind | None, bodies: bool, *, empty: bool = False
) -> tuple[pa.Schema, tuple[Check, ...]]:
    """The schema of a table, and its rules; ``empty``: a prompt may be."""
    name = kind or _kind_of(table)
    if name in _SCHEMAS:
        plan = _SCHEMAS[name]
        return plan, (*checks_of(plan), *([mm_items] if name == "rows" else []))
    if name != "turns":
        known = ", ".join(["turns", *_SCHEMAS])
        raise SchemaError(f"kind {name!r} does not exist: expected one of {known}")
    plan = turns_schema(table.column_names)
    own = (one for one in checks_of(plan) if not empty or one is not not_empty)
    of_bodies = (message_bodies,) if bodies else ()
    return plan, (*own, mm_items, payloads, *of_bodies)


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


def _settle(table: pa.Table, nonfinite: Nonfinite) -> pa.Table:
    """Turns with 0.0 under every null logprob, and null for values that are none."""
    if "output_logprobs" not in table.column_names:
        return table
    column, make_null = table.column("output_logprobs"), nonfinite == "null"
    if not make_null and not any(c.flatten().null_count for c in column.chunks):
        return table
    lists = Ragged.of(column)
    numbers = lists.values.fill_null(0.0).to_numpy()
    absent = np.asarray(lists.values.is_null())
    if make_null:
        absent = absent | not_logprobs(numbers)
    fresh = pa.array(np.where(absent, np.float32(0), numbers), mask=absent)
    settled = Ragged(fresh, lists.offsets).to_arrow(nulls(column), column.type)
    return with_column(table, "output_logprobs", settled)


def payloads(table: pa.Table) -> Iterator[Fault]:
    """The rules of `trajkit.schema.PAYLOADS` that do not depend on other turns."""
    for name in ("ref_logprobs", "teacher_logprobs"):
        for lists in _payload(table, name, pa.float64()):
            numbers = filled(lists.values, 0.0)
            for bad, rule in (
                (~np.isfinite(numbers), "it is not a number"),
                (numbers > MAX_LOGPROB, POSITIVE),
            ):
                words = f"{name}[{{}}] is {{}}: {rule}"
                yield broken_items(0, lists.offsets[1:], bad, words, numbers)
    if "sampling_mask_start" not in table.column_names:
        yield from _sampling_mask(table)


def _sampling_mask(table: pa.Table) -> Iterator[Fault]:
    """Each output id is among those that it was drawn from."""
    outputs = Ragged.of(table.column("output_ids"), -1)
    for lists in _payload(table, "sampling_mask", pa.large_list(pa.int64())):
        given = ~nulls(table.column("sampling_mask"))
        n_masks, n_ids = lists.lengths, outputs.lengths
        odd = given & (n_masks != n_ids)
        rule = "{} elements of sampling_mask for {} output_ids"
        yield broken(odd, rule, n_masks, n_ids)
        if odd.any():
            return
        sampled = outputs.values[np.repeat(given, n_ids)]
        drawn = Ragged.of(lists.values, -1)
        no_id = np.bincount(drawn.owner, drawn.values < 0, len(drawn)) > 0
        rule = f"sampling_mask[{{}}] has a null or a negative id: {ID_RULE}"
        yield broken_items(0, lists.offsets[1:], no_id, rule)
        same = drawn.values == sampled[drawn.owner]
        held = np.bincount(drawn.owner, same, len(drawn)) > 0
        bad = (drawn.lengths > 0) & ~held
        rule = "sampling_mask[{}] lacks the sampled id {}: it belongs to another token"
        yield broken_items(0, lists.offsets[1:], bad, rule, sampled)


def _payload(table: pa.Table, name: str, element: pa.DataType) -> Iterator[Ragged]:
    """The lists of an extra column, with such elements; nothing if it is absent."""
    if name in table.column_names and not pa.types.is_null(table.column(name).type):
        column, type_ = table.column(name), pa.large_list(element)
        check_type(column.type, type_, f"column {name!r}")
        yield Ragged.of(in_type(column, type_))


def mm_items(table: pa.Table) -> Iterator[Fault]:
    """Images are in the prompt or row, in order; their tokens are their content ids."""
    if not has_items(table):
        return
    of_rows = "row_index" in table.column_names
    name, first = "input_ids" if of_rows else "prompt_ids", np.zeros(len(table))
    if name not in table.column_names:
        name, first = "suffix_ids", table.column("shared_length").to_numpy()
    faults: dict[int, str] = {}
    for row, listed in enumerate(table.column("mm_items").to_pylist()):
        if listed:
            ids = table.column(name)[row].values.to_numpy()
            found = image_faults(listed, ids, int(first[row]), may_be_cut=of_rows)
            for _, words in found:
                faults.setdefault(row, words)
    yield fault(np.array([*faults], np.int64), "{}", [*faults.values()])


def message_bodies(table: pa.Table) -> Iterator[Fault]:
    """Each key has a JSON body, in its first message of the session, and of one message."""
    names = ("messages", "suffix_messages")
    stored = next(name for name in names if name in table.column_names)
    lists, replies = Ragged.of(table.column(stored)), combined(table.column("response"))
    messages = pa.concat_arrays([lists.values, replies])
    keys, roles, texts = (field_of(messages, one) for one in ("key", "role", "body"))
    # every message in session order, those of a turn before its reply
    rows = np.append(lists.owner, np.arange(len(replies)))
    order = np.argsort(rows, kind="stable")
    order = order[np.asarray(messages.is_valid())[order]]
    of_session = session_numbers(table)[rows] * (len(keys) + 1) + codes(keys)
    rows, of_session, bodies = rows[order], of_session[order], codes(texts)[order]
    given = np.flatnonzero(np.asarray(texts.is_valid())[order])
    lacking = np.setdiff1d(np.unique(of_session, return_index=True)[1], given)
    _, first, which = np.unique(
        of_session[given], return_index=True, return_inverse=True
    )
    text_of = dict(
        zip(given.tolist(), texts.take(order[given]).to_pylist(), strict=True)
    )
    changed = np.flatnonzero(bodies[given] != bodies[given[first[which]]])
    differ = [
        at
        for at, other in zip(given[changed], given[first[which]][changed], strict=True)
        if not _is_same(text_of[at], text_of[other])
    ]
    for bad_ones, words in (
        (
            lacking,
            "has no body, here or earlier in the session (rows filtered out? then "
            "validate with bodies=False)",
        ),
        (
            differ,
            "has another body earlier in the session: compute its key with "
            "trajkit.turns.message_key",
        ),
    ):
        at = np.asarray(bad_ones, np.int64)
        shown = [keys[int(k)].as_py().hex() for k in order[at]]
        yield fault(rows[at], f"the message with the key {{}} {words}", shown)
    roles_of = roles.take(order[given]).to_pylist()
    pairs = zip(text_of.items(), roles_of, strict=True)
    found = ((at, _body_fault(text, role)) for (at, text), role in pairs)
    bad = {at: words for at, words in found if words is not None}
    yield fault(rows[np.array([*bad], np.int64)], "{}", [*bad.values()])


def _is_same(body: str, other: str) -> bool:
    try:
        return bool(parse_json(body) == parse_json(other))
    except ValueError:
        return False


def _parsed(body: str) -> object:
    """As `parse_json`, but large integers may become floats."""
    if body.count("{") + body.count("[") < _SHALLOW:
        with suppress(orjson.JSONDecodeError):  # NaN, or lone surrogates
            return orjson.loads(body)
    return parse_json(body)


def _body_fault(body: str, role: str) -> str | None:
    shown = body if len(body) <= 60 else f"{body[:57]}..."
    try:
        message = _parsed(body)
    except ValueError as error:
        return f"the message body {shown!r} is not JSON: {error}"
    if not isinstance(message, dict):
        return f"the message body {shown!r} is not a JSON object"
    if message.get("role") != role:
        return f"the message body {shown!r} states another role than {role!r}"
    return None
