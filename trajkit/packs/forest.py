"""Rows as a forest: what they share, their order, where trees are cut."""

import itertools
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit.errors import SchemaError
from trajkit.packs.row_buffers import Records, column_of, per_token
from trajkit.tables.ragged import Longs, offsets_of
from trajkit.tables.take import list_values, without_views


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
            codes = _codes(column, name)
            agree = np.where(codes[row] == codes[other], records["length"][child], 0)
        records["shared"][child] = np.minimum(records["shared"][child], agree)
    records["parent"][records["shared"] == 0] = -1


def _codes(column: pa.ChunkedArray, name: str) -> Longs:
    """Equal numbers for equal values; nulls are equal."""
    try:
        if pa.types.is_nested(column.type):
            values = pa.array([repr(value) for value in column.to_pylist()])
            codes = values.dictionary_encode().indices
        else:
            plain = column.cast(without_views(column.type)).combine_chunks()
            if pa.types.is_dictionary(plain.type):
                plain = plain.dictionary_decode()
            codes = plain.dictionary_encode("encode").indices
    except pa.ArrowNotImplementedError:
        raise SchemaError(
            f"same has {name!r}, whose type {column.type} cannot be compared"
        ) from None
    return np.asarray(codes, np.int64)


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
    numbers = _codes(pa.chunked_array([values]), name)
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
        _codes(column_of(table, name, "same"), name)[root].tolist()
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
