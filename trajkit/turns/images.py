"""Images in prompts: content ids, and the ids that the engine consumed."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from trajkit._arguments import chosen_int
from trajkit.errors import ArgumentError, InvalidTurnsError, SchemaError
from trajkit.tables.canonical import TableLike, as_table, place
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

    Raises
    ------
    ArgumentError
        ``kind`` is no text, ``content_hash`` no SHA-256 in hexadecimal, or ``n_tokens``
        negative.

    Notes
    -----
    Each id has 30 bits of a SHA-256 digest of the arguments, again and again. So two images
    (or one in two sizes) differ at their first token, except with probability 2**-30.
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
        name = f"mm_items[{i}]"
        if item is None or None in item.values():
            yield None, f"{name} has a null: every field is needed"
            continue
        start, stop = item["start"], item["stop"]
        low, high = (min(max(at, first), end) - first for at in (start, stop))
        inside = start < end if may_be_cut else stop <= end
        fault = None
        if not CONTENT_HASH.fullmatch(item["hash"]):
            fault = f"{name} has the hash {item['hash']!r}: {_HASH_RULE}"
        elif not (last <= start < stop and inside):
            what = "row" if may_be_cut else "prompt"
            fault = (
                f"{name} is {start}:{stop}: expected tokens from {last} to {end}, the "
            )
            fault += f"end of the {what}"
        elif not 0 <= item["token_id"] < FIRST_CONTENT_ID:
            fault = f"{name} has the token_id {item['token_id']}, a content id"
        elif known is not None and same_image(item) not in known:
            fault = f"no source of the tokens has the image {dict(item)}"
        elif (
            ids[low:high] != item_ids(item)[low + first - start :][: high - low]
        ).any():
            fault = (
                f"the tokens {start}:{stop} are not the content ids of {name}: make "
            )
            fault += "them with trajkit.turns.content_ids"
        if fault is not None:
            yield start, fault
            continue
        unclaimed[low:high] = False
        last = stop
    if known is not None:
        for token in np.flatnonzero(unclaimed)[:1].tolist():
            yield token, f"{ids[token]} is a content id of no item"


def item_ids(item: Item) -> Ints:
    """Return the content ids of an item."""
    return _content_ids(item["kind"], item["hash"], item["stop"] - item["start"])


def has_items(table: pa.Table) -> bool:
    """Whether a turn, row or pack has images."""
    column = table.column("mm_items")
    return bool(column.null_count < len(column))


def engine_ids(table: TableLike) -> pa.Table:
    """Replace content ids by the ids that the engine consumed.

    Parameters
    ----------
    table : table
        Turns, rows or packs, with their column ``mm_items``. In delta form,
        ``shared_length`` is the position of the first stored id.

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
    name = next((name for name in _COLUMNS if name in source.column_names), None)
    if name is None:
        raise SchemaError(
            f"a table without {' or '.join(_COLUMNS)}: expected turns, rows or packs"
        )
    lists = Ragged.of(source.column(name))
    ids = lists.values.to_numpy()
    if not (ids >= FIRST_CONTENT_ID).any():
        return source
    ids, first = ids.copy(), [0] * len(lists)
    if name == "suffix_ids" and "shared_length" in source.column_names:
        first = source.column("shared_length").to_pylist()
    items: list[Any] = [None] * len(lists)
    if "mm_items" in source.column_names:
        items = source.column("mm_items").to_pylist()
    for line, (begin, end) in enumerate(pairwise(lists.offsets.tolist())):
        own = ids[begin:end]
        for item in items[line] or ():
            start, stop = (max(item[n] - first[line], 0) for n in ("start", "stop"))
            own[start:stop] = item["token_id"]
        for at in np.flatnonzero(own >= FIRST_CONTENT_ID)[:1]:
            raise InvalidTurnsError(
                f"{place(source, line)}: {name}[{at}] is {own[at]}, a content id, but no "
                "item of mm_items has this token"
            )
    return with_column(source, name, Ragged(ids, lists.offsets).to_arrow())
