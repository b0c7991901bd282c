"""Convert turns between full and delta form, and from the keys of an old schema version."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit._kernel_names import CALL
from trajkit.errors import InvalidTurnsError
from trajkit.schema import KEY_BYTES, MESSAGE, SCHEMA_VERSION, TURNS, TURNS_DELTA
from trajkit.schema.engine import field_of, session_numbers
from trajkit.tables import lazy_compute as pc
from trajkit.tables import limits
from trajkit.tables.canonical import TableLike, canonical, place, turns_schema
from trajkit.tables.columns import (
    Columns,
    check_no_clash,
    replace_columns,
    with_column,
)
from trajkit.tables.ragged import (
    Bools,
    Ints,
    Longs,
    Ragged,
    codes,
    combined,
    lengths,
    offsets_of,
    pooled,
    positions,
)
from trajkit.tables.stages import apply, stage
from trajkit.turns.message_equality import current_bodies
from trajkit.turns.messages import Encoded, MessageBook, encode, parse_json
from trajkit.turns.records import as_turns
from trajkit.turns.sessions import Forest, Sessions, with_current_keys


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
        a column of the delta form.
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
        `trajkit.schema.TURNS_DELTA`, the rows of each session contiguous. Turns in full
        form are returned unchanged.

    Returns
    -------
    Table
        `trajkit.schema.TURNS`, in the order of ``turns``, then the extra columns
        unchanged.

    Raises
    ------
    SchemaError
        A column is missing or has an unsuitable type, or an extra column has the name of
        a column of the full form.
    InvalidTurnsError
        A base is not an earlier turn of its session, or is shorter than what is shared
        with it; shared and own messages are not null together; or as for `compact`.
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
        made = replace_columns(calls.table, form, schema, parts)
        delta = made if schema is TURNS_DELTA else calls.table
        shared = delta.column("shared_length").to_numpy().astype(np.int64)
        n_prompt = calls.calls["prompt_len"].astype(np.int64)
        return _attributed(made, shared, n_prompt, cut=delta is made)

    return apply(one, turns, table_of=as_turns)


def _attributed(
    table: pa.Table, shared: Longs, n_prompt: Longs, *, cut: bool
) -> pa.Table:
    """The table with the columns of `ATTRIBUTION` in its own form.

    ``cut``: leave out the elements of shared tokens, where a list has only empty ones.
    Otherwise put them back. Extra columns of these names with values of other types are
    unchanged.
    """
    for name, empty, is_suitable in (
        ("prompt_message_index", -1, pa.types.is_signed_integer),
        ("prompt_is_content", False, pa.types.is_boolean),
    ):
        if name not in table.column_names:
            continue
        lists = combined(table.column(name))
        if not isinstance(lists, (pa.ListArray, pa.LargeListArray)):
            continue
        if not is_suitable(lists.type.value_type):
            continue
        values, n = lists.flatten(), lengths(lists)
        begins, absent = np.cumsum(n) - n, np.asarray(lists.is_null())
        if cut:
            filled = pc.not_equal(values, empty).fill_null(True).to_numpy(False)
            counts = offsets_of(filled)
            clear = counts[begins + np.minimum(shared, n)] == counts[begins]
            change = np.where((n == n_prompt) & clear, -shared, 0)
        else:
            change = np.where((n == n_prompt - shared) & ~absent, shared, 0)
        if not change.any():
            continue
        kept, offsets = n + np.minimum(change, 0), offsets_of(n + change)
        # the last one is empty
        source = np.full(int(offsets[-1]), len(values))
        source[positions(offsets[:-1] + np.maximum(change, 0), kept)] = positions(
            begins + np.maximum(-change, 0), kept
        )
        values = pa.concat_arrays([values, pa.array([empty], values.type)])
        changed = Ragged(values.take(pa.array(source)), offsets).to_arrow(
            absent, pa.large_list(lists.type.value_field)
        )
        table = with_column(table, name, changed.cast(lists.type))
    return table


def _delta_columns(calls: Sessions) -> Columns:
    """The columns of `TURNS_DELTA` that `TURNS` lacks."""
    forest, n_prompt = calls.forest, calls.calls["prompt_len"]
    shared = np.minimum(forest.shared, n_prompt)
    bases = np.where(shared > 0, forest.shared_with, -1).astype(np.int32)

    lists = combined(calls.table.column("messages"))
    absent = np.asarray(lists.is_null())
    messages, replies = lists.flatten(), combined(calls.table.column("response"))
    n_messages = lengths(lists)
    n_shared = _shared_messages(calls, bases, n_messages, messages, replies)
    n_own = n_messages - n_shared
    own = Ragged(messages, offsets_of(n_messages)).take(
        np.cumsum(n_messages) - n_own, n_own
    )
    return {
        "base_turn": pa.array(calls.turn_index[bases], mask=bases < 0),
        "shared_length": pa.array(shared.astype(np.int32)),
        "suffix_ids": _prompts_from(calls, shared),
        "shared_messages": pa.array(n_shared.astype(np.int32), mask=absent),
        "suffix_messages": own.to_arrow(absent, lists.type),
    }


def _prompts_from(calls: Sessions, starts: Longs) -> pa.LargeListArray:
    """What each prompt has from a position on."""
    offsets = offsets_of(calls.calls["prompt_len"] - starts)
    ids = pooled(int(offsets[-1]), np.int32)
    _core.copy_prompts(calls.forest.paths, starts, offsets, ids)
    return Ragged(ids, offsets).to_arrow()


def _shared_messages(
    calls: Sessions,
    bases: Ints,
    n_messages: Longs,
    messages: pa.StructArray,
    replies: pa.StructArray,
) -> Longs:
    """Number of leading messages that each call shares with its base; none has a body."""
    begins = np.cumsum(n_messages) - n_messages
    with_body = np.flatnonzero(field_of(messages, "body").is_valid())
    with_body = np.append(with_body, len(messages))
    bare = with_body[np.searchsorted(with_body, begins)] - begins
    # a base's list is followed by its reply
    most = np.where(bases < 0, 0, (n_messages + _replied(calls))[bases])
    shared = np.minimum(np.minimum(bare, n_messages), most)
    call = np.repeat(np.arange(len(shared)), shared)
    k, base = positions(np.zeros_like(shared), shared), bases[call]
    own = begins[call] + k
    theirs = np.where(k < n_messages[base], begins[base] + k, len(messages) + base)
    keys, roles, bodies = (
        [field_of(array, name) for array in (messages, replies)]
        for name in ("key", "role", "body")
    )
    numbers = [codes(*keys), codes(*roles)]
    # Of messages that differ in 1 and 1.0 alone, a key has several bodies.
    shown = pa.concat_arrays(bodies).is_valid().to_numpy(zero_copy_only=False)
    of_keys, of_bodies = numbers[0][shown], codes(*bodies)[shown]
    n_pairs = len(np.unique(of_keys * len(shown) + of_bodies))
    if len(np.unique(of_keys)) < n_pairs:
        current = current_bodies(calls)
        numbers.append(np.concatenate([current.places, current.replies]))
    for number in numbers:
        differs = number[own] != number[theirs]
        np.minimum.at(shared, call[differs], k[differs])
    return shared


def _replied(calls: Sessions) -> Bools:
    """Calls with a list of messages and a reply, shape (n_calls,)."""
    known, reply = calls.requests["n_keys"] >= 0, calls.requests["reply_key"] != 0
    replied: Bools = np.logical_and(known, reply)
    return replied


def _full_columns(calls: Sessions) -> Columns:
    """The columns of `TURNS` that `TURNS_DELTA` lacks."""
    starts = np.zeros(calls.n_calls, np.int64)
    return {
        "prompt_ids": _prompts_from(calls, starts),
        "messages": _all_messages(calls),
    }


def _all_messages(calls: Sessions) -> pa.LargeListArray:
    lists = combined(calls.table.column("suffix_messages"))
    absent = lists.is_null().to_numpy(zero_copy_only=False)
    count = calls.table.column("shared_messages")
    odd = np.flatnonzero(absent != count.is_null().to_numpy())
    if len(odd):
        raise InvalidTurnsError(
            f"{place(calls.table, int(odd[0]))}: shared_messages and suffix_messages are "
            "null together"
        )
    messages, replies = lists.flatten(), combined(calls.table.column("response"))
    n_own = lengths(lists)
    shared = calls.requests["shared"].astype(np.int64)
    # messages are numbered: first those that the turns store, then the replies
    numbers = np.arange(len(messages) + len(replies), dtype=np.int32)
    # A call without a list of messages has an empty path, without its reply.
    paths = np.zeros(len(n_own), CALL)
    at = numbers.ctypes.data
    paths["own"] = at + 4 * (np.cumsum(n_own) - n_own)
    paths["out"] = at + 4 * (len(messages) + np.arange(len(replies)))
    paths["out_len"] = _replied(calls)
    paths["base"] = calls.calls["base"]
    paths["own_start"] = shared
    paths["prompt_len"] = n_own + shared
    offsets = offsets_of(paths["prompt_len"])
    places = np.empty(int(offsets[-1]), np.int32)
    grown = Forest.of(paths, calls.offsets).paths
    _core.copy_prompts(grown, np.zeros(len(paths), np.int64), offsets, places)
    given = np.zeros(len(places), np.bool_)
    given[positions(offsets[:-1] + shared, n_own)] = True
    fields = [
        pa.concat_arrays([field_of(array, name) for array in (messages, replies)]).take(
            pa.array(places)
        )
        for name in ("key", "role")
    ]
    fields.append(field_of(messages, "body").take(pa.array(places, mask=~given)))
    structs = pa.StructArray.from_arrays(fields, fields=list(MESSAGE))
    return Ragged(structs, offsets).to_arrow(absent, lists.type)


# Of a key of schema version 2, the first bytes were the same for messages that are ``==``,
# and the others for those of one body.
_EQUAL_BYTES = 12


def renew_keys(turns: pa.Table) -> pa.Table:
    """Turns of complete sessions of schema version 2 with keys of the current version.

    They are computed from the bodies. The key of a message of which no body is known keeps
    the bytes of equal messages.
    """
    stored = "suffix_messages" if "suffix_ids" in turns.column_names else "messages"
    lists, replies = combined(turns.column(stored)), combined(turns.column("response"))
    messages = pa.concat_arrays([lists.flatten(), replies])
    version = str(SCHEMA_VERSION).encode()
    current = {**turns.schema.metadata, b"trajkit.version": version}
    turns = turns.replace_schema_metadata(current)
    given = messages.drop_null()
    if any(field_of(given, name).null_count for name in ("key", "role")):
        return turns  # refused as such
    book, ids = _numbered(messages)
    if book.respelled and stored == "suffix_messages":
        # the body of a shared message is shown again if its key last had another
        old = {**current, b"trajkit.version": b"2"}
        return compact(renew_keys(expand(turns).replace_schema_metadata(old)))
    n = len(ids) - len(replies)
    sizes = np.where(np.asarray(lists.is_null()), -1, lengths(lists))
    sessions = session_numbers(turns).astype(np.int32)
    columns = book.columns(ids[:n], sizes, ids[n:], sessions)
    for name, column in zip((stored, "response"), columns, strict=True):
        turns = with_column(turns, name, column)
    return turns


def _numbered(messages: pa.StructArray) -> tuple[MessageBook, Ints]:
    """The distinct messages with their new keys, and the number of each; -1: null."""
    keys, roles, bodies = (
        field_of(messages, name).to_pylist() for name in ("key", "role", "body")
    )
    known = {k: body for k, body in zip(keys, bodies, strict=True) if body is not None}
    # equal messages have these bytes in common
    equal = {key[:_EQUAL_BYTES]: body for key, body in known.items()}
    book = MessageBook()
    ids: dict[tuple[bytes | None, str | None], int] = {(None, None): -1}
    for key, role in dict.fromkeys(zip(keys, roles, strict=True)):
        if key is not None:
            ids[key, role] = book.add(_renewed(key, role, known.get(key), equal))
    pairs = zip(keys, roles, strict=True)
    return book, np.array([ids[pair] for pair in pairs], np.int32)


def _renewed(
    key: bytes, role: str, body: str | None, equal: dict[bytes, str]
) -> Encoded:
    """The message that has an old key."""
    prefix = key[:_EQUAL_BYTES]
    padded = prefix + bytes(KEY_BYTES - _EQUAL_BYTES)
    if prefix not in equal:
        return Encoded(padded, role, body, False)
    try:
        return encode(parse_json(equal[prefix]), "")._replace(role=role, body=body)
    except ValueError:  # `trajkit.validate` reports the body
        return Encoded(padded, role, body, False)
