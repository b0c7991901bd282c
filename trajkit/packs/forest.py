"""Rows as a forest: what they share, their order, where trees are cut."""

import itertools
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit._arguments import did_you_mean
from trajkit.errors import InvalidTurnsError, SchemaError
from trajkit.schema.engine import lookup, nulls
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import is_list, place
from trajkit.tables.ragged import Bools, Ints, Longs, Records, offsets_of, positions
from trajkit.tables.take import list_values, take_values, without_views
from trajkit.turns.images import (
    FIRST_CONTENT_ID,
    Item,
    has_items,
    item_ids,
    same_image,
)
from trajkit.turns.structs import PACK_ROW


def pack_items(
    rows: pa.Table, ids: Ints, offsets: Longs
) -> Sequence[list[Item] | None]:
    """The column ``mm_items`` of packs, whose ids are ``ids``, pack after pack.

    Raises `InvalidTurnsError` if a pack has a part of an image.
    """
    found: list[list[Item] | None] = [None] * (len(offsets) - 1)
    if not has_items(rows):
        return found
    items = pc.list_flatten(rows.column("mm_items")).to_pylist()
    known: dict[int, list[Item]] = {}
    for item in items:
        alike = known.setdefault(int(item_ids(item)[0]), [])
        if all(same_image(item) != same_image(other) for other in alike):
            alike.append(item)
    token = 0
    for here in np.flatnonzero(ids >= FIRST_CONTENT_ID).tolist():
        if here < token:
            continue
        pack = int(np.searchsorted(offsets, here, side="right")) - 1
        first, end = int(offsets[pack]), int(offsets[pack + 1])
        for item in known.get(int(ids[here]), ()):
            due = item_ids(item)
            token = here + len(due)
            if token <= end and np.array_equal(ids[here:token], due):
                break
        else:
            raise InvalidTurnsError(
                f"token {here - first} of pack {pack} is of an image of which the pack "
                "has a part: make rows without max_row_tokens or with another one, or "
                "pack with oversize='repeat'"
            )
        at = {"start": here - first, "stop": token - first}
        found[pack] = [*(found[pack] or ()), {**item, **at}]
    return found


@dataclass(frozen=True, slots=True)
class Bins:
    """Parts in packs. A part larger than a pack continues in the packs after it."""

    # shape (n_parts,): the pack in which each part begins ...
    first: Longs
    # ... and ends
    last: Longs
    n_packs: int


def fill_bins(sizes: Longs, max_tokens: int) -> Bins:
    """Best-fit decreasing: each part goes to the fullest pack that has room for it.

    A part of more than ``max_tokens`` fills whole packs; its rest begins another.
    """
    first, last = np.empty((2, len(sizes)), np.int64)
    # room and number of each pack that is not full, by room
    rooms: list[tuple[int, int]] = []
    n_packs = 0
    for part in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[part])
        k = bisect_left(rooms, (size, -1))
        if size > max_tokens or k == len(rooms):
            first[part] = n_packs
            n_packs += -(-size // max_tokens)
            last[part] = n_packs - 1
            room = -size % max_tokens
        else:
            room, pack = rooms.pop(k)
            first[part] = last[part] = pack
            room -= size
        if room:
            insort(rooms, (room, int(last[part])))
    return Bins(first, last, n_packs)


OBSERVED = "observation_weight"


def row_records(table: pa.Table) -> tuple[Records, list[Any]]:
    """Rows, which passed `check_layout`, as PACK_ROW records, and what these point into.

    ``parent`` and ``line`` are lines of the table. Raises `InvalidTurnsError`
    if the parent of a row is not in the table.
    """
    records = np.zeros(table.num_rows, PACK_ROW)
    records["line"] = np.arange(table.num_rows)
    data, _, first, records["length"] = _lists(table.column("input_ids"))
    records["ids"] = data + 4 * first
    mask = table.column("loss_mask")
    records["mask"], _, records["mask_bit"], _ = _lists(mask)
    logprobs = table.column("logprobs")
    data, valid, first, _ = _lists(logprobs)
    records["logprobs"] = data + 4 * first
    records["valid"], records["valid_bit"] = valid, first

    parent, found = lookup(table, "row_index", table.column("parent_row"))
    shared = table.column("shared_length").to_numpy()
    lost = np.flatnonzero(~found & ~nulls(table.column("parent_row")) & (shared > 0))
    if len(lost):
        row = int(lost[0])
        raise InvalidTurnsError(
            f"{place(table, row)}: its parent_row {table.column('parent_row')[row]} is "
            "not in the table. Pass all rows of a session; to leave some out of the "
            "loss, clear their loss_mask"
        )
    shares = found & (shared > 0)
    records["parent"] = np.where(shares, parent, -1)
    records["shared"] = np.where(shares, shared, 0)
    return records, [table, mask, logprobs]


def _lists(column: pa.ChunkedArray) -> tuple[Longs, Longs, Longs, Longs]:
    """Of each list: addresses of values and of their validity, first value, length."""
    parts = [np.empty((4, 0), np.int64)]
    for chunk in column.chunks:
        ends = chunk.offsets.to_numpy()
        valid, data = chunk.values.buffers()
        part = np.empty((4, len(chunk)), np.int64)
        part[0] = 0 if data is None else data.address
        part[1] = 0 if valid is None else valid.address
        part[2] = chunk.values.offset + ends[:-1]
        part[3] = np.diff(ends)
        parts.append(part)
    data, valid, first, n = np.concatenate(parts, axis=1)
    return data, valid, first, n


def column_of(table: pa.Table, name: str, argument: str) -> pa.ChunkedArray:
    """A column of rows that an argument names; `SchemaError` if rows lack it."""
    if name not in table.column_names:
        hint = did_you_mean(name, table.column_names)
        raise SchemaError(f"{argument} has {name!r}: rows have no such column{hint}")
    return table.column(name)


def per_token(table: pa.Table, name: str, n_tokens: Longs) -> bool:
    """Whether a column is a list that has, in each row, a value per token.

    Raises `InvalidTurnsError` if that is so in some rows only.
    """
    column = table.column(name)
    if not is_list(column.type):
        return False
    n = np.asarray(pc.list_value_length(column).fill_null(-1), np.int64)
    wrong = np.flatnonzero((n >= 0) & (n != n_tokens))
    if len(wrong) and (n == n_tokens).any():
        row = int(wrong[0])
        raise InvalidTurnsError(
            f"{place(table, row)}: {name} has {n[row]} values for {n_tokens[row]} "
            "tokens: expected one per token, as in other rows"
        )
    return not len(wrong)


def edge_values(
    table: pa.Table, name: str, n_tokens: Longs, line: Longs, position: Ints | Longs
) -> pa.Array:
    column = column_of(table, name, "columns")
    if not per_token(table, name, n_tokens):
        values, at = column.combine_chunks(), line
        valid = None
    else:
        values = list_values(column)
        n = np.asarray(pc.list_value_length(column).fill_null(0), np.int64)
        at = offsets_of(n)[line] + position
        valid = np.asarray(column.is_valid())[line]
    wanted = pa.array(at, mask=None if valid is None else ~valid)
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks)
    return take_values(values, wanted, name)


def add_observed(table: pa.Table, records: Records) -> tuple[Bools, list[Any]]:
    """Give the records of rows an edge for each observed token, too.

    Return the loss masks of the rows, end to end, and what the records point into.
    Raises `SchemaError` if the column of weights is absent or has no weight per token.
    """
    offsets = offsets_of(records["length"])
    column = column_of(table, OBSERVED, "columns")
    if not per_token(table, OBSERVED, records["length"]):
        raise SchemaError(f"{OBSERVED} is {column.type}: expected a weight per token")
    trained = np.asarray(list_values(table.column("loss_mask")))
    observed = np.zeros(len(trained), np.bool_)
    at = positions(offsets[:-1], pc.list_value_length(column).fill_null(0).to_numpy())
    observed[at] = np.asarray(list_values(column).fill_null(0)) != 0
    bits = np.packbits(trained | observed, bitorder="little")
    records["mask"], records["mask_bit"] = bits.ctypes.data, offsets[:-1]
    return trained, [bits]


def share_nothing(records: Records) -> None:
    """Make every row a tree of its own."""
    records["parent"], records["shared"] = -1, 0


def limit_shared(table: pa.Table, records: Records, names: Sequence[str]) -> None:
    """Let rows share tokens only up to the first at which one of the columns differs.

    A list as long as the row has a value per token. Another column has a value per row:
    rows where it differs share nothing.
    """
    child = np.flatnonzero(records["parent"] >= 0)
    lines = records["line"]
    row, other = lines[child], lines[records["parent"][child]]
    n_tokens = np.empty(table.num_rows, np.int64)
    n_tokens[lines] = records["length"]
    for name in names:
        column = column_of(table, name, "same")
        if per_token(table, name, n_tokens):
            agree = _agree(column, name, n_tokens, row, other)
        else:
            values = value_codes(column, name)
            agree = np.where(values[row] == values[other], records["length"][child], 0)
        records["shared"][child] = np.minimum(records["shared"][child], agree)
    records["parent"][records["shared"] == 0] = -1


def value_codes(column: pa.ChunkedArray, name: str) -> Longs:
    """Equal numbers for equal values; nulls are equal."""
    try:
        if pa.types.is_nested(column.type):
            values = pa.array([repr(value) for value in column.to_pylist()])
            found = values.dictionary_encode().indices
        else:
            plain = column.cast(without_views(column.type)).combine_chunks()
            if pa.types.is_dictionary(plain.type):
                plain = plain.dictionary_decode()
            found = plain.dictionary_encode("encode").indices
    except pa.ArrowNotImplementedError:
        raise SchemaError(
            f"{name!r} has the type {column.type}, whose values cannot be compared"
        ) from None
    return np.asarray(found, np.int64)


def _agree(
    column: pa.ChunkedArray, name: str, n_tokens: Longs, rows: Longs, others: Longs
) -> Longs:
    """At how many tokens from the first on each row has the values of the other one."""
    values = list_values(column)
    width = 1
    while pa.types.is_fixed_size_list(values.type):
        width *= values.type.list_size
        values = values.flatten()
    if pa.types.is_nested(values.type) or len(values) != width * n_tokens.sum():
        raise SchemaError(
            f"same has {name!r}, a column of {column.type}: expected numbers, text, or "
            "lists of one size of these, per token, and none of these lists null"
        )
    numbers = value_codes(pa.chunked_array([values]), name)
    starts = width * offsets_of(n_tokens)[:-1]
    agree = np.minimum(n_tokens[rows], n_tokens[others])
    for k, (row, other) in enumerate(zip(rows, others, strict=True)):
        n = width * int(agree[k])
        a, b = (numbers[starts[r] : starts[r] + n] for r in (row, other))
        differ = a != b
        if differ.any():
            agree[k] = int(np.argmax(differ)) // width
    return agree


def join_groups(table: pa.Table, records: Records, same: Sequence[str]) -> Records:
    """Let the first rows of a group's sessions share what they begin with.

    ``records`` are in the order of the table; in those returned, parents come first.
    Only rows that agree on the columns ``same`` with a value per row are joined.
    """
    root = np.flatnonzero(records["parent"] < 0)
    kinds = [
        value_codes(column_of(table, name, "same"), name)[root].tolist()
        for name in same
        if not per_token(table, name, records["length"])
    ]
    names = table.column("group_id").take(pa.array(root)).to_pylist()
    groups = list(zip(names, *kinds, strict=True))
    values = list_values(table.column("input_ids")).to_numpy()
    ends = offsets_of(records["length"])
    ids = {int(row): values[ends[row] : ends[row + 1]] for row in root}
    # two rows that start alike for longest are neighbours in lexical order
    ranked = sorted(
        (group, ids[int(row)].tobytes(), int(row))
        for group, row in zip(groups, root, strict=True)
        if group[0] is not None
    )
    for (group, _, before), (other, _, row) in itertools.pairwise(ranked):
        shared = _core.lcp(ids[before], ids[row]) if group == other else 0
        if shared:
            records["parent"][row], records["shared"][row] = before, shared
    joined = np.array([row for _, _, row in ranked], np.int64)
    rest = np.ones(len(records), np.bool_)
    rest[joined] = False
    return taken(records, np.concatenate([joined, np.flatnonzero(rest)]))


def taken(records: Records, order: Longs) -> Records:
    """The records in another order, which their parents follow."""
    place = np.full(len(records) + 1, -1, np.int64)
    place[order] = np.arange(len(order))
    out = records[order]
    out["parent"] = place[out["parent"]]
    return out


def in_pre_order(records: Records) -> Records:
    """Rows, parents first, in pre-order: a row's branches follow from the deepest on.

    Branches that leave a row at one token are in the order of the records.
    """
    _core.attach_rows(records)
    index = np.arange(len(records))
    children = np.lexsort((index, -records["shared"], records["parent"]))
    order = np.empty(len(records), np.int64)
    _core.order_rows(records, children, order)
    return taken(records, order)


def trees(records: Records) -> Longs:
    """Where each tree of rows in pre-order begins, and the end; shape (n_trees + 1,)."""
    return np.append(np.flatnonzero(records["parent"] < 0), len(records))


def cut_trees(records: Records, max_tokens: int) -> tuple[Longs, int]:
    """Cut trees into parts of limited size that repeat the fewest tokens.

    Return where the parts begin, as `trees`, and a row that is longer than a part, or -1.
    """
    n = len(records)
    sums, steps = np.empty((2, 2, n + 1), np.int64)
    bad = _core.cut_rows(records, max_tokens, sums, steps)
    starts = [n]
    while starts[-1] and bad < 0:
        starts.append(int(steps[0, starts[-1]]))
    return np.array(starts[::-1], np.int64), bad


def part_sizes(records: Records, starts: Longs) -> Longs:
    """Tokens of each part of rows in pre-order."""
    ends = offsets_of(records["length"] - records["shared"])
    return np.asarray(np.diff(ends[starts]) + records["shared"][starts[:-1]])


def detach_parts(records: Records, starts: Longs) -> None:
    """Make each part a tree of its own: its first row has all its tokens.

    A row whose parent is in an earlier part leaves the first row where it left its
    parent, since pre-order goes from the deepest branch to the shallowest.
    """
    first = np.repeat(starts[:-1], np.diff(starts))
    outside = (records["parent"] < first) & (np.arange(len(records)) != first)
    records["parent"][outside] = first[outside]
    records["parent"][starts[:-1]] = -1
    records["shared"][starts[:-1]] = 0
