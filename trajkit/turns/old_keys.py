"""The message keys of schema version 2.

Their first 12 bytes were the same for messages that are ``==``, the other 4 for those of
one body. Turns of that version are read with the keys that `trajkit.turns.messages`
computes from their bodies.
"""

import numpy as np
import pyarrow as pa

from trajkit.schema import KEY_BYTES, SCHEMA_VERSION
from trajkit.tables import lazy_compute as pc
from trajkit.tables.ragged import lengths
from trajkit.turns.messages import Encoded, Ids, MessageBook, encode, parse_json
from trajkit.turns.records import message_columns
from trajkit.turns.sessions import run_starts

_EQUAL_BYTES = 12


def renew_keys(turns: pa.Table) -> pa.Table:
    """Turns of complete sessions with the keys of the current schema version.

    The key of a message of which no body is known keeps the bytes of equal messages.
    """
    stored = "suffix_messages" if "suffix_ids" in turns.column_names else "messages"
    lists = turns.column(stored).combine_chunks()
    replies = turns.column("response").combine_chunks()
    messages = pa.concat_arrays([lists.flatten(), replies])
    version = str(SCHEMA_VERSION).encode()
    current = {**turns.schema.metadata, b"trajkit.version": version}
    turns = turns.replace_schema_metadata(current)
    given = messages.drop_null()
    if any(pc.struct_field(given, name).null_count for name in ("key", "role")):
        return turns  # refused as such
    book, ids = _numbered(messages)
    if book.respelled and stored == "suffix_messages":
        # the body of a shared message is shown again if its key last had another
        from trajkit.turns.delta import compact, expand

        old = {**current, b"trajkit.version": b"2"}
        return compact(renew_keys(expand(turns).replace_schema_metadata(old)))
    starts = np.zeros(len(turns), np.int32)
    starts[run_starts(turns)] = 1
    columns = message_columns(
        book,
        ids[: len(ids) - len(replies)],
        np.where(np.asarray(lists.is_null()), -1, lengths(lists)),
        ids[len(ids) - len(replies) :],
        np.cumsum(starts, dtype=np.int32),
    )
    for name, column in zip((stored, "response"), columns, strict=True):
        at = turns.column_names.index(name)
        turns = turns.set_column(at, turns.schema.field(at), column)
    return turns


def _numbered(messages: pa.StructArray) -> tuple[MessageBook, Ids]:
    """The distinct messages with their new keys, and the number of each; -1: null."""
    keys, roles, bodies = (
        pc.struct_field(messages, name) for name in ("key", "role", "body")
    )
    shown = bodies.is_valid()
    known = dict(
        zip(
            keys.filter(shown).to_pylist(),
            bodies.filter(shown).to_pylist(),
            strict=True,
        )
    )
    # equal messages have these bytes in common
    equal = {key[:_EQUAL_BYTES]: body for key, body in known.items()}
    distinct = pa.table([keys, roles], ["key", "role"]).group_by(["key", "role"])
    book, ids = MessageBook(), {}
    for pair in distinct.aggregate([]).to_pylist():
        key, role = pair["key"], pair["role"]
        if key is not None:
            ids[key, role] = book.add(_renewed(key, role, known.get(key), equal))
    pairs = zip(keys.to_pylist(), roles.to_pylist(), strict=True)
    return book, np.array([ids.get(pair, -1) for pair in pairs], np.int32)


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
