"""Convert turns between full and delta form."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit.errors import InvalidTurnsError
from trajkit.schema import MESSAGE, TURNS, TURNS_DELTA
from trajkit.tables import lazy_compute as pc
from trajkit.tables import limits
from trajkit.tables.canonical import TableLike, canonical, place, turns_schema
from trajkit.tables.keys import codes
from trajkit.tables.ragged import (
    Ints,
    Longs,
    Ragged,
    lengths,
    offsets_of,
    pooled,
    positions,
)
from trajkit.tables.reshape import Columns, check_no_clash, replace_columns, with_column
from trajkit.tables.stages import apply, stage
from trajkit.turns.message_equality import current_bodies
from trajkit.turns.records import as_turns
from trajkit.turns.sessions import Forest, Sessions, with_current_keys
from trajkit.turns.structs import CALL


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
        lists = _combined(table.column(name))
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
        changed = type(lists).from_arrays(
            pa.array(offsets, "int32" if isinstance(lists, pa.ListArray) else "int64"),
            values.take(pa.array(source)),
            type=lists.type,
            mask=pa.array(absent) if absent.any() else None,
        )
        table = with_column(table, name, changed)
    return table


def _delta_columns(calls: Sessions) -> Columns:
    """The columns of `TURNS_DELTA` that `TURNS` lacks."""
    forest = calls.forest
    n_prompt = calls.calls["prompt_len"]
    shared = np.minimum(forest.shared, n_prompt)
    bases = np.where(shared > 0, forest.shared_with, -1).astype(np.int32)
    offsets = offsets_of(n_prompt - shared)
    ids = pooled(int(offsets[-1]), np.int32)
    _core.copy_prompts(forest.paths, shared, offsets, ids)

    lists = _combined(calls.table.column("messages"))
    absent = lists.is_null().to_numpy(zero_copy_only=False)
    messages, replies = lists.flatten(), _combined(calls.table.column("response"))
    n_messages = lengths(lists)
    n_shared = _shared_messages(calls, bases, n_messages, messages, replies)
    n_own = n_messages - n_shared
    own = positions(np.cumsum(n_messages) - n_own, n_own)
    return {
        "base_turn": pa.array(calls.turn_index[bases], mask=bases < 0),
        "shared_length": pa.array(shared.astype(np.int32)),
        "suffix_ids": Ragged(ids, offsets).to_arrow(),
        "shared_messages": pa.array(n_shared.astype(np.int32), mask=absent),
        "suffix_messages": Ragged(
            messages.take(pa.array(own)), offsets_of(n_own)
        ).to_arrow(absent, lists.type),
    }


def _shared_messages(
    calls: Sessions,
    bases: Ints,
    n_messages: Longs,
    messages: pa.StructArray,
    replies: pa.StructArray,
) -> Longs:
    """Number of leading messages that each call shares with its base; none has a body."""
    begins = np.cumsum(n_messages) - n_messages
    with_body = np.flatnonzero(pc.struct_field(messages, "body").is_valid())
    with_body = np.append(with_body, len(messages))
    bare = with_body[np.searchsorted(with_body, begins)] - begins
    # a base's list is followed by its reply
    most = np.where(bases < 0, 0, (n_messages + _replied(calls))[bases])
    shared = np.minimum(np.minimum(bare, n_messages), most)
    call = np.repeat(np.arange(len(shared)), shared)
    k, base = positions(np.zeros_like(shared), shared), bases[call]
    own = begins[call] + k
    theirs = np.where(k < n_messages[base], begins[base] + k, len(messages) + base)
    numbers = []
    for name in ("key", "role"):
        both = [pc.struct_field(array, name) for array in (messages, replies)]
        numbers.append(codes(*both))
    if _is_respelled(messages, replies):
        bodies = current_bodies(calls)
        numbers.append(np.concatenate([bodies.places, bodies.replies]))
    for number in numbers:
        differs = number[own] != number[theirs]
        np.minimum.at(shared, call[differs], k[differs])
    return shared


def _is_respelled(messages: pa.StructArray, replies: pa.StructArray) -> bool:
    """Whether a key has several bodies: of messages that differ in 1 and 1.0 alone."""
    names = ("key", "body")
    columns = [
        pa.concat_arrays(
            [pc.struct_field(array, name) for array in (messages, replies)]
        )
        for name in names
    ]
    shown = pa.table(columns, names).filter(columns[1].is_valid())
    n_keys = len(shown.column("key").unique())
    return n_keys < len(shown.group_by([*names]).aggregate([]))


def _replied(calls: Sessions) -> npt.NDArray[np.bool_]:
    """Calls with a list of messages and a reply, shape (n_calls,)."""
    known, reply = calls.requests["n_keys"] >= 0, calls.requests["reply_key"] != 0
    replied: npt.NDArray[np.bool_] = np.logical_and(known, reply)
    return replied


def _full_columns(calls: Sessions) -> Columns:
    """The columns of `TURNS` that `TURNS_DELTA` lacks."""
    offsets = offsets_of(calls.calls["prompt_len"])
    ids = pooled(int(offsets[-1]), np.int32)
    starts = np.zeros(len(calls.calls), np.int64)
    _core.copy_prompts(calls.forest.paths, starts, offsets, ids)
    return {
        "prompt_ids": Ragged(ids, offsets).to_arrow(),
        "messages": _all_messages(calls),
    }


def _all_messages(calls: Sessions) -> pa.LargeListArray:
    lists = _combined(calls.table.column("suffix_messages"))
    absent = lists.is_null().to_numpy(zero_copy_only=False)
    count = calls.table.column("shared_messages")
    odd = np.flatnonzero(absent != count.is_null().to_numpy())
    if len(odd):
        raise InvalidTurnsError(
            f"{place(calls.table, int(odd[0]))}: shared_messages and suffix_messages are "
            "null together"
        )
    messages, replies = lists.flatten(), _combined(calls.table.column("response"))
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
    take = pa.array(places)
    fields = [
        pa.concat_arrays(
            [pc.struct_field(array, name) for array in (messages, replies)]
        ).take(take)
        for name in ("key", "role")
    ]
    bodies = pc.struct_field(messages, "body")
    fields.append(bodies.take(pa.array(places, mask=~given)))
    structs = pa.StructArray.from_arrays(fields, fields=list(MESSAGE))
    return Ragged(structs, offsets).to_arrow(absent, lists.type)


def _combined(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays([pa.array([], column.type), *column.chunks])
