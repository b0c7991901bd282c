"""Convert turns between full and delta form, and from the keys of an old schema version."""

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit.schema import KEY_BYTES, MESSAGE, SCHEMA_VERSION, TURNS, TURNS_DELTA
from trajkit.schema.engine import field_of, session_numbers
from trajkit.tables import limits
from trajkit.tables.canonical import TableLike, canonical, turns_schema
from trajkit.tables.columns import (
    Columns,
    check_no_clash,
    replace_columns,
    with_column,
)
from trajkit.tables.ragged import (
    Ints,
    Longs,
    Ragged,
    codes,
    combined,
    offsets_of,
    pooled,
    positions,
)
from trajkit.tables.stages import apply, stage
from trajkit.turns.messages import (
    Encoded,
    MessageBook,
    current_bodies,
    encode,
    has_reply,
    parse_json,
)
from trajkit.turns.records import as_turns
from trajkit.turns.sessions import Sessions, refusal, unshared, with_current_keys


@stage
def compact(turns: TableLike) -> pa.Table:
    """Convert turns to delta form: each prompt is stored as its difference to a base.

    The base of a turn is the earlier turn of its session whose path shares the longest
    prefix with its prompt. Between equals, the longest prefix of its output decides, and
    then the first turn. A turn that shares no token has no base. A leading message is
    shared if the base has the same key, role and body there and no body is given again, so
    that `expand` restores the original table.

    Parameters
    ----------
    turns : table
        `trajkit.schema.TURNS`, the rows of each session contiguous. Turns in delta form
        are returned unchanged.

    Returns
    -------
    Table
        `trajkit.schema.TURNS_DELTA`, in the order of ``turns``, then the extra columns
        unchanged.

    Raises
    ------
    SchemaError
        A column is missing or has an unsuitable type, or an extra column has the name of
        a column of the other form.
    InvalidTurnsError
        The rows of a session are not contiguous or not in order, the numbers of logprobs
        and output ids differ, or a message has no key.
    """
    return _convert(turns, TURNS_DELTA, _delta_columns)


compact_batches = compact.batches


@stage
def expand(turns: TableLike) -> pa.Table:
    """Convert turns to full form: each has its complete prompt and all messages.

    The inverse of `compact`. A shared message has no body, because an earlier turn of the
    session has it.

    Parameters
    ----------
    turns : table
        `trajkit.schema.TURNS_DELTA`, as for `compact`.

    Returns
    -------
    Table
        `trajkit.schema.TURNS`, as `compact` returns its table.

    Raises
    ------
    SchemaError
        As for `compact`.
    InvalidTurnsError
        A base is not an earlier turn of its session, or is shorter than what is shared
        with it; or shared and own messages are not null together.
    """
    return _convert(turns, TURNS, _full_columns)


expand_batches = expand.batches


def _convert(
    turns: TableLike, schema: pa.Schema, columns: Callable[[Sessions], Columns]
) -> pa.Table:
    def one(table: pa.Table) -> pa.Table:
        form = turns_schema(table.column_names)
        if form is schema:
            return with_current_keys(canonical(table, schema))
        check_no_clash(table, form, schema, "form of turns")
        calls = Sessions.of(table)
        parts = [columns(part) for part in calls.split(limits.PART_TOKENS)]
        return replace_columns(calls.table, form, schema, parts)

    return apply(one, turns, table_of=as_turns)


def _delta_columns(calls: Sessions) -> Columns:
    """The columns of `TURNS_DELTA` that `TURNS` lacks."""
    shared = np.minimum(calls.forest.shared, calls.calls["prompt_len"])
    bases = np.where(shared > 0, calls.forest.shared_with, -1).astype(np.int32)
    column = calls.table.column("messages")
    absent, lists = np.asarray(column.is_null()), Ragged.of(column)
    n_shared = _shared_messages(calls, bases, lists)
    n_own = lists.lengths - n_shared
    own = lists.take(lists.offsets[1:] - n_own, n_own)
    return {
        "base_turn": pa.array(calls.turn_index[bases], mask=bases < 0),
        "shared_length": pa.array(shared.astype(np.int32)),
        "suffix_ids": _prompts_from(calls, shared),
        "shared_messages": pa.array(n_shared.astype(np.int32), mask=absent),
        "suffix_messages": own.to_arrow(absent, column.type),
    }


def _prompts_from(calls: Sessions, starts: Longs) -> pa.LargeListArray:
    """What each prompt has from a position on."""
    offsets = offsets_of(calls.calls["prompt_len"] - starts)
    ids = pooled(int(offsets[-1]), np.int32)
    each = np.arange(calls.n_calls)
    _core.copy_ranges(calls.forest.paths, each, starts, offsets, ids)
    return Ragged(ids, offsets).to_arrow()


def _shared_messages(calls: Sessions, bases: Ints, lists: Ragged) -> Longs:
    """Number of leading messages that each call shares with its base; none has a body."""
    both = pa.concat_arrays([lists.values, combined(calls.table.column("response"))])
    current, roles = current_bodies(calls), codes(field_of(both, "role"))
    numbers = codes(field_of(both, "key")) * (roles.max(initial=0) + 1) + roles
    numbers *= len(current.bodies) + 1
    numbers += np.append(current.places, current.replies)
    n, shared = len(lists.values), np.zeros(len(bases), np.int64)
    own, replied = Ragged(numbers[:n], lists.offsets), has_reply(calls.requests)
    with_body = np.flatnonzero(field_of(lists.values, "body").is_valid())
    with_body = np.append(with_body, n)
    bare = (
        with_body[np.searchsorted(with_body, lists.offsets[:-1])] - lists.offsets[:-1]
    )
    for call in np.flatnonzero(bases >= 0).tolist():
        base = bases[call]
        path = own[base]
        if replied[base]:
            path = np.append(path, numbers[n + base])
        halves = (one.view(np.int32) for one in (own[call][: bare[call]], path))
        shared[call] = _core.lcp(*halves) // 2
    return shared


def _full_columns(calls: Sessions) -> Columns:
    """The columns of `TURNS` that `TURNS_DELTA` lacks."""
    column, shares = (
        calls.table.column(name) for name in ("suffix_messages", "shared_messages")
    )
    lists, absent = Ragged.of(column), np.asarray(column.is_null())
    for row in np.flatnonzero(absent != np.asarray(shares.is_null()))[:1].tolist():
        raise refusal(calls.table, row)
    both = pa.concat_arrays([lists.values, combined(calls.table.column("response"))])
    # messages are numbered: first those that the turns store, then the replies
    numbers = np.arange(len(both))
    n_stored = len(lists.values)
    replied = has_reply(calls.requests)
    shared = calls.requests["shared"].astype(np.int64)
    whole = unshared(
        Ragged(numbers[:n_stored], lists.offsets),
        Ragged(numbers[n_stored:][replied], offsets_of(replied)),
        calls.calls["base"],
        shared,
    )
    offsets = offsets_of(shared + lists.lengths)
    places = np.concatenate([numbers[:0], *whole])
    given = np.zeros(len(places), np.bool_)
    given[positions(offsets[:-1] + shared, lists.lengths)] = True
    fields = [field_of(both, name).take(pa.array(places)) for name in ("key", "role")]
    fields.append(field_of(both, "body").take(pa.array(places, mask=~given)))
    structs = pa.StructArray.from_arrays(fields, fields=list(MESSAGE))
    return {
        "prompt_ids": _prompts_from(calls, np.zeros(calls.n_calls, np.int64)),
        "messages": Ragged(structs, offsets).to_arrow(absent, column.type),
    }


# Of a key of schema version 2, the first bytes were the same for messages that are ``==``,
# and the others for those of one body.
_EQUAL_BYTES = 12


def renew_keys(turns: pa.Table) -> pa.Table:
    """Turns of complete sessions of schema version 2 with keys of the current version.

    They are computed from the bodies. The key of a message of which no body is known keeps
    the bytes of equal messages.
    """
    stored = "suffix_messages" if "suffix_ids" in turns.column_names else "messages"
    column, replies = turns.column(stored), combined(turns.column("response"))
    lists = Ragged.of(column)
    messages = pa.concat_arrays([lists.values, replies])
    current = {**turns.schema.metadata, b"trajkit.version": b"%d" % SCHEMA_VERSION}
    turns = turns.replace_schema_metadata(current)
    given = messages.drop_null()
    if any(field_of(given, name).null_count for name in ("key", "role")):
        return turns  # refused as such
    book, ids = _numbered(messages)
    if book.respelled and stored == "suffix_messages":
        # the body of a shared message is shown again if its key last had another
        old = {**current, b"trajkit.version": b"2"}
        return compact(renew_keys(expand(turns).replace_schema_metadata(old)))
    n = len(lists.values)
    sizes = np.where(np.asarray(column.is_null()), -1, lists.lengths)
    sessions = session_numbers(turns).astype(np.int32)
    listed, responses = book.columns(ids[:n], sizes, ids[n:], sessions)
    return with_column(with_column(turns, stored, listed), "response", responses)


def _numbered(messages: pa.StructArray) -> tuple[MessageBook, Ints]:
    """The distinct messages with their new keys, and the number of each; -1: null."""
    keys, roles, bodies = (
        field_of(messages, name).to_pylist() for name in ("key", "role", "body")
    )
    known = {k: body for k, body in zip(keys, bodies, strict=True) if body is not None}
    # equal messages have these bytes in common
    equal = {key[:_EQUAL_BYTES]: body for key, body in known.items()}
    book, pairs = MessageBook(), [*zip(keys, roles, strict=True)]
    ids = {(None, None): -1}
    for key, role in dict.fromkeys(pairs):
        if key is None:
            continue
        prefix, body = key[:_EQUAL_BYTES], known.get(key)
        padded = prefix + bytes(KEY_BYTES - _EQUAL_BYTES)
        message = Encoded(padded, role, body, False)
        # `trajkit.validate` reports a body that is no message
        with suppress(ValueError, KeyError):
            renewed = encode(parse_json(equal[prefix]), "")
            message = renewed._replace(role=role, body=body)
        ids[key, role] = book.add(message)
    return book, np.array([ids[pair] for pair in pairs], np.int32)
