"""Images in prompts: content ids, and the ids that the engine consumed."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from trajkit._arguments import chosen_int
from trajkit.errors import ArgumentError, InvalidTurnsError, SchemaError
from trajkit.schema.engine import described
from trajkit.tables.canonical import TableLike, as_table, canonical, place
from trajkit.tables.columns import with_column
from trajkit.tables.ragged import Ints, Ragged

Item: TypeAlias = Mapping[str, Any]
"""A `trajkit.schema.MM_ITEM` as a dict."""

Image: TypeAlias = tuple[object, ...]
"""What two items have in common if they show one image."""

FIRST_CONTENT_ID = 1 << 30
"""Content ids are at least this, and every engine's ids are below it."""

CONTENT_HASH = re.compile("[0-9a-f]{64}")
"""A SHA-256 in hexadecimal: the hash of an item, and the name of its file."""

_HASH_RULE = "expected a SHA-256, 64 hexadecimal digits in lower case"
_COLUMNS = ("prompt_ids", "suffix_ids", "input_ids")


def content_ids(kind: str, content_hash: str, n_tokens: int) -> Ints:
    """Return the content ids of an image.

    Parameters
    ----------
    kind, content_hash : str
        As in `trajkit.schema.MM_ITEM`.
    n_tokens : int
        Number of its tokens.

    Returns
    -------
    ndarray of int32, shape (n_tokens,), read-only
        Each has 30 bits of a SHA-256 digest of the arguments, again and again. So two
        images (or one in two sizes) differ at their first token, except with probability
        2**-30.

    Raises
    ------
    ArgumentError
        ``kind`` is no text, ``content_hash`` no SHA-256 in hexadecimal, or ``n_tokens``
        negative.
    """
    if not isinstance(kind, str) or not kind:
        raise ArgumentError(f"kind={kind!r}: expected a word, such as 'image'")
    if not isinstance(content_hash, str) or not CONTENT_HASH.fullmatch(content_hash):
        raise ArgumentError(f"content_hash={content_hash!r}: {_HASH_RULE}")
    return _content_ids(kind, content_hash, chosen_int("n_tokens", n_tokens, 0))


@lru_cache(maxsize=4096)
def _content_ids(kind: str, content_hash: str, n_tokens: int) -> Ints:
    digest = sha256(f"{kind}:{content_hash}:{n_tokens}".encode()).digest()
    words = np.frombuffer(digest, "<u4") % FIRST_CONTENT_ID + FIRST_CONTENT_ID
    ids: Ints = np.resize(words.astype(np.int32), n_tokens)
    ids.flags.writeable = False
    return ids


def same_image(item: Item) -> Image:
    """What an item has in common with others that show its image."""
    return item["kind"], item["hash"], item["token_id"], item["stop"] - item["start"]


def image_faults(
    items: Sequence[Item | None],
    ids: Ints,
    first: int = 0,
    *,
    may_be_cut: bool = False,
    known: Collection[Image] | None = None,
) -> Iterator[tuple[int | None, str]]:
    """What is wrong with the images of a prompt, row or pack, each with its token.

    ``ids`` are the ids from the position ``first`` on. ``may_be_cut``: they may end within
    an image. ``known``: the images that they may have; every content id is then of one.
    """
    last, end = 0, first + len(ids)
    unclaimed = ids >= FIRST_CONTENT_ID
    for i, item in enumerate(items):
        if item is None or None in item.values():
            yield None, f"mm_items[{i}] has a null: every field is needed"
            continue
        start, stop, hash_, id_ = (
            item[name] for name in ("start", "stop", "hash", "token_id")
        )
        low, high = (min(max(at, first), end) - first for at in (start, stop))
        inside = start < end if may_be_cut else stop <= end
        fault = ""
        if not CONTENT_HASH.fullmatch(hash_):
            fault = f"has the hash {hash_!r}: {_HASH_RULE}"
        elif not (last <= start < stop and inside):
            whole = "row" if may_be_cut else "prompt"
            fault = (
                f"is {start}:{stop}: expected tokens from {last} to {end}, the end of "
            )
            fault += f"the {whole}"
        elif not 0 <= id_ < FIRST_CONTENT_ID:
            fault = f"has the token_id {id_}, a content id"
        elif known is not None and same_image(item) not in known:
            fault = f"is {dict(item)}, which no source of the tokens has"
        elif (
            ids[low:high] != item_ids(item)[low + first - start :][: high - low]
        ).any():
            fault = (
                f"is {start}:{stop}, whose tokens are not the content ids: make them "
            )
            fault += "with trajkit.turns.content_ids"
        if fault:
            yield start, f"mm_items[{i}] {fault}"
            continue
        unclaimed[low:high] = False
        last = stop
    if known is not None:
        for token in np.flatnonzero(unclaimed)[:1].tolist():
            yield token, f"{ids[token]} is a content id of no item"


def item_ids(item: Item) -> Ints:
    return _content_ids(item["kind"], item["hash"], item["stop"] - item["start"])


def has_items(table: pa.Table) -> bool:
    column = table.column("mm_items")
    return bool(column.null_count < len(column))


def engine_ids(table: TableLike) -> pa.Table:
    """Replace content ids by the ids that the engine consumed.

    Parameters
    ----------
    table : table
        Turns, rows or packs, with their column ``mm_items``.

    Returns
    -------
    Table
        The same columns. Prompts with different images may now have equal ids, so no
        stage of trajkit should read it.

    Raises
    ------
    SchemaError
        It has no column of ids.
    InvalidTurnsError
        A content id is in no item of its list.
    """
    source = as_table(table)
    names = source.column_names
    name = next((name for name in _COLUMNS if name in names), None)
    if name is None:
        raise SchemaError(
            f"a table without {' or '.join(_COLUMNS)}: expected turns, rows or packs"
        )
    form = described(f"ids\n{name} [int32]\n")
    alone = canonical(source.select([name]).replace_schema_metadata(None), form)
    lists = Ragged.of(alone.column(name))
    if lists.values.null_count:
        raise InvalidTurnsError(f"column {name!r} has a null id")
    ids = lists.values.to_numpy()
    if not (ids >= FIRST_CONTENT_ID).any():
        return source
    made = Ragged(ids.copy(), lists.offsets)
    items: list[Any] = [None] * len(lists)
    first = [0] * len(lists)
    if "mm_items" in names:
        items = source.column("mm_items").to_pylist()
    if name == "suffix_ids" and "shared_length" in names:
        first = source.column("shared_length").to_pylist()
    for line, listed in enumerate(items):
        own = made[line]
        for item in listed or ():
            start, stop = (max(item[n] - first[line], 0) for n in ("start", "stop"))
            own[start:stop] = item["token_id"]
        for at in np.flatnonzero(own >= FIRST_CONTENT_ID)[:1]:
            raise InvalidTurnsError(
                f"{place(source, line)}: {name}[{at}] is {own[at]}, a content id, but no "
                "item of mm_items has this token"
            )
    return with_column(source, name, made.to_arrow())
