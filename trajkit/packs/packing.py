"""`pack`: rows to micro-batches of trees, with an edge for every trained token; and back.

Rows become a forest in pre-order, its trees are cut to size, and the parts fill packs.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from trajkit import _arguments, _core
from trajkit._arguments import check_choice, chosen_int, chosen_names
from trajkit._kernel_names import PACK_ROW
from trajkit.errors import ArgumentError, InvalidTurnsError, LayoutError, SchemaError
from trajkit.learn.loss import Reduce
from trajkit.learn.weights import trained_tokens
from trajkit.schema import PACKS
from trajkit.schema.engine import lookup, nulls
from trajkit.tables import canonical as tables
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import TableLike, place
from trajkit.tables.columns import list_values, row_lengths, take_values, without_views
from trajkit.tables.ragged import (
    Ints,
    Longs,
    Ragged,
    Records,
    codes,
    offsets_of,
    pooled,
    positions,
)
from trajkit.tables.stages import apply, concat, stage
from trajkit.turns import images
from trajkit.turns.validation import check_layout

Layout: TypeAlias = Literal["tree", "rows"]
Share: TypeAlias = Literal["session", "group"]
Oversize: TypeAlias = Literal["repeat", "carry"]

OBSERVED = "observation_weight"
# Sessions of a stream are packed together until they fill about this many packs.
_PACKS_AT_A_TIME = 64


@stage
def pack(
    rows: TableLike,
    max_tokens: int,
    *,
    layout: Layout = "tree",
    share: Share = "session",
    oversize: Oversize = "repeat",
    align: int = 1,
    same: Sequence[str] = (),
    columns: Sequence[str] = (),
    reduce: Reduce = "mean",
) -> pa.Table:
    """Pack rows into micro-batches of trees, with an edge per trained token.

    Each shared prefix is stored once. Token q of a pack attends to token k if
    ``k <= q < subtree_end[k]``, that is, to the tokens before it in its row. So a model
    gives each token the same hidden state as in the row, and a loss over edges equals
    the loss over rows. `pack_batches` packs a few sessions of a stream at a time; lines
    of rows and packs count from its first row and pack.

    Parameters
    ----------
    rows : table
        `trajkit.schema.ROWS` with all rows of each session.
    max_tokens : int
        Of a pack. With 1.25 to 1.5 times the longest row, few tokens are repeated.
    layout : {"tree", "rows"}
        With "rows", rows share nothing: each is a tree of its own.
    share : {"session", "group"}
        With "group", the first rows of all sessions of a ``group_id`` also share their
        common prefix. In a stream, the sessions of a group are consecutive.
    oversize : {"repeat", "carry"}
        A tree of more than ``max_tokens`` is cut between rows, and its parts repeat the
        prefix that they need; or it is cut at any token into consecutive packs, whose
        ``prefix_pack``, ``prefix_source`` and ``prefix_end`` name the earlier tokens
        that they attend to.
    align : int
        Pad packs to a multiple of this many tokens; it must divide ``max_tokens``.
    same : sequence of str
        Rows share tokens only if these columns agree: lists with a value per token
        (routed experts), or one value per row. Images need none: their ids differ.
    columns : sequence of str
        Columns, per token or per row, to copy to edges as ``edge_<name>``, such as
        ``advantage``. With ``observation_weight``, tokens with such a weight also get
        edges; their ``edge_weight`` is 0 unless they are trained.
    reduce : {"mean", "sum"}
        ``edge_weight`` is the row_weight divided by the row's trained tokens, or the
        row_weight, as in `trajkit.learn.reference_loss`.

    Returns
    -------
    Table
        `trajkit.schema.PACKS`.

    Raises
    ------
    SchemaError
        A column is absent, of an unsuitable type, or has the name of an edge's own.
    InvalidTurnsError
        A row is too large; a pack has a part of an image; a row trains its first token,
        which nothing predicts, or has no row_weight though it trains; a parent_row is
        absent; a session or group of a stream comes back after another.
    ArgumentError
        A choice does not exist, or ``align`` does not divide ``max_tokens``.

    Examples
    --------
    >>> import trajkit as tk
    >>> first = {"session_id": "a", "prompt_ids": [1, 2], "output_ids": [3, 4]}
    >>> other = {"session_id": "a", "prompt_ids": [1, 2, 9], "output_ids": [5]}
    >>> rows = tk.linearize(tk.from_records([first, other]))
    >>> packs = tk.pack(rows, 8).to_pylist()[0]
    >>> packs["input_ids"], packs["subtree_end"]
    ([1, 2, 3, 4, 9, 5], [6, 6, 4, 4, 6, 6])
    >>> packs["edge_source"], packs["edge_target"], packs["edge_row"]
    ([1, 2, 4], [3, 4, 5], [0, 0, 1])
    """
    max_tokens = chosen_int("max_tokens", max_tokens, 1)
    align = chosen_int("align", align, 1)
    if max_tokens >= 2**31:
        raise ArgumentError(f"max_tokens={max_tokens}: positions are of 32 bits")
    if max_tokens % align:
        raise ArgumentError(f"align={align} does not divide max_tokens={max_tokens}")
    check_choice("layout", layout, Layout)
    check_choice("share", share, Share)
    check_choice("oversize", oversize, Oversize)
    check_choice("reduce", reduce, Reduce)
    same = chosen_names("same", same)
    columns = chosen_names("columns", columns)
    for name in columns:
        if f"edge_{name}" in PACKS.names or columns.count(name) > 1:
            raise SchemaError(
                f"columns has {name!r}, but packs have edge_{name} already: name each "
                "column once, and copy this one under another name"
            )
    first_row = first_pack = 0

    def one(source: pa.Table) -> pa.Table:
        nonlocal first_row, first_pack
        table = tables.canonical_rows(source)
        check_layout(table, read_ids=False)
        mask = table.column("loss_mask")
        if OBSERVED in columns:
            mask = pa.chunked_array([with_observed(table).to_arrow()])
        # they point into the table and the mask
        records = _records(table, mask)
        if layout == "rows":
            records["parent"], records["shared"] = -1, 0
        elif share == "group":
            records = _join_groups(table, records)
        records = _in_pre_order(table, records, same)
        starts = _cut(table, records, max_tokens, oversize)
        packs = _Packs(table, records, starts, max_tokens, align)
        edges = packs.edges(columns, reduce, first_row)
        made = packs.table(edges, first_pack)
        first_row += table.num_rows
        first_pack += made.num_rows
        return made

    return apply(one, rows, regroup=partial(_together, max_tokens, share))


pack_batches = pack.batches


def _together(
    max_tokens: int, share: Share, parts: Iterator[pa.Table]
) -> Iterator[pa.Table]:
    """Tables of sessions that fill some packs, the groups complete."""
    kept: list[pa.Table] = []
    n_tokens, current, begun = 0, None, set[str]()
    for table in map(tables.canonical_rows, parts):
        groups = table.column("group_id").to_pylist() if share == "group" else []
        goes_on = bool(groups) and groups[0] is not None and groups[0] == current
        for row, group in enumerate(groups):
            if group != current and group in begun:
                raise InvalidTurnsError(
                    f"{place(table, row)}: group {group!r} comes back after another group "
                    "began. Sort the rows by group_id, session_id and row_index, or pack "
                    "with share='session'"
                )
            current = group
            if group is not None:
                begun.add(group)
        if n_tokens >= _PACKS_AT_A_TIME * max_tokens and not goes_on:
            yield concat(kept)
            kept, n_tokens = [], 0
        kept.append(table)
        shared = table.column("shared_length").to_numpy()
        n_tokens += int((row_lengths(table) - shared).sum())
    if kept:
        yield concat(kept)


# ---
# Rows as a forest: records of dtype PACK_ROW.


def _records(table: pa.Table, mask: pa.ChunkedArray) -> Records:
    """Rows, which passed `check_layout`; ``mask`` says which tokens have an edge."""
    records = np.zeros(table.num_rows, PACK_ROW)
    records["line"] = np.arange(table.num_rows)
    data, _, first = _addresses(table.column("input_ids"))
    records["ids"], records["length"] = data + 4 * first, row_lengths(table)
    records["mask"], _, records["mask_bit"] = _addresses(mask)
    data, records["valid"], first = _addresses(table.column("logprobs"))
    records["logprobs"], records["valid_bit"] = data + 4 * first, first
    column = table.column("parent_row")
    parent, found = lookup(table, "row_index", column)
    shared = table.column("shared_length").to_numpy()
    for row in np.flatnonzero((shared > 0) & ~found & ~nulls(column))[:1].tolist():
        raise InvalidTurnsError(
            f"{place(table, row)}: its parent_row {column[row]} is not in the table. Pass "
            "all rows of a session; to leave some out of the loss, clear their loss_mask"
        )
    records["parent"] = np.where(found & (shared > 0), parent, -1)
    records["shared"] = np.where(found, np.maximum(shared, 0), 0)
    return records


def _addresses(column: pa.ChunkedArray) -> Longs:
    """Of each list: addresses of values and of their validity (0: none), first value."""
    parts = [np.empty((3, 0), np.int64)]
    for chunk in column.chunks:
        valid, data = (
            0 if one is None else one.address for one in chunk.values.buffers()
        )
        part = np.empty((3, len(chunk)), np.int64)
        part[:2] = [[data], [valid]]
        part[2] = chunk.values.offset + chunk.offsets.to_numpy()[:-1]
        parts.append(part)
    return np.concatenate(parts, axis=1)


def with_observed(table: pa.Table) -> Ragged:
    """The loss masks of rows, and true at the observed tokens, too."""
    column, each_token = column_of(table, OBSERVED, "columns")
    if not each_token:
        raise SchemaError(f"{OBSERVED} is {column.type}: expected a weight per token")
    edges, weights = Ragged.of(table.column("loss_mask"), False), Ragged.of(column, 0)
    # a null list has no weights
    at = positions(edges.offsets[:-1], weights.lengths)
    edges.values[at] |= weights.values != 0
    return edges


def _join_groups(table: pa.Table, records: Records) -> Records:
    """Let the first rows of a group's sessions share what they begin with.

    ``records`` are in the order of the table; in those returned, parents come first.
    """
    roots = np.flatnonzero(records["parent"] < 0)
    names = table.column("group_id").take(pa.array(roots)).to_pylist()
    ids = Ragged.of(table.column("input_ids"), -1)
    # two rows that start alike for longest are neighbours in lexical order
    ranked = sorted(
        (group, ids[row].tobytes(), row)
        for row, group in zip(roots.tolist(), names, strict=True)
        if group is not None
    )
    for (group, _, before), (other, _, row) in pairwise(ranked):
        shared = _core.lcp(ids[before], ids[row]) if group == other else 0
        if shared:
            records["parent"][row], records["shared"][row] = before, shared
    joined = np.array([row for _, _, row in ranked], np.int64)
    rest = np.setdiff1d(records["line"], joined)
    return _taken(records, np.concatenate([joined, rest]))


def _in_pre_order(table: pa.Table, records: Records, same: Sequence[str]) -> Records:
    """The rows that have a token in pre-order: branches follow from the deepest on.

    They share tokens up to the first at which one of the columns ``same`` differs; rows
    where a column with a value per row differs share nothing. Branches that leave a row
    at one token are in the order of the records.
    """
    child = np.flatnonzero(records["parent"] >= 0)
    rows, others = records["line"][child], records["line"][records["parent"][child]]
    for name in same:
        column, each_token = column_of(table, name, "same")
        if each_token:
            agree = _agree(table, name, rows, others)
        else:
            codes = value_codes(column, name)
            agree = np.where(codes[rows] == codes[others], row_lengths(table)[rows], 0)
        records["shared"][child] = np.minimum(records["shared"][child], agree)
    records["parent"][records["shared"] == 0] = -1
    records = _taken(records, np.flatnonzero(records["length"]))
    _attach(records)
    parents = records["parent"]
    ranked = np.lexsort((-records["shared"], parents))[::-1]
    # the children of row r, last to first, are end[r + 2]:end[r + 1]; the roots come last
    lower = np.searchsorted(parents[ranked[::-1]], np.arange(-1, len(records) + 1))
    end, children = (len(records) - lower).tolist(), ranked.tolist()
    order: list[int] = []
    ahead = children[end[1] :]
    while ahead:
        order.append(row := ahead.pop())
        ahead += children[end[row + 2] : end[row + 1]]
    return _taken(records, np.array(order, np.int64))


def _attach(records: Records) -> None:
    """Make the parent of each row the one that has the last shared token as its own.

    Before, a parent is an earlier row that has all of the shared tokens, and its own parent
    may have supplied them.
    """
    parents, shared, length = (records[n] for n in ("parent", "shared", "length"))
    most = np.minimum(length, np.where(parents >= 0, length[parents], 0))
    bad = (shared > most) | (parents >= np.arange(len(records)))
    for row in np.flatnonzero(bad)[:1].tolist():
        raise LayoutError(
            f"rows[{row}] takes {shared[row]} of {length[row]} tokens from row "
            f"{parents[row]}, which must be an earlier row that has as many"
        )
    while len(up := np.flatnonzero((parents >= 0) & (shared <= shared[parents]))):
        parents[up] = parents[parents[up]]


def _agree(table: pa.Table, name: str, rows: Longs, others: Longs) -> Longs:
    """At how many tokens from the first on each row has the values of the other one."""
    column, n_tokens = table.column(name), row_lengths(table)
    values, width = list_values(column), 1
    while tables.is_list(values.type):
        lists = Ragged.of(values)
        size = max(int(lists.lengths.max(initial=0)), 1)
        if ((lists.lengths != size) & (lists.lengths != 0)).any():
            break
        # a null list, as the last token's, becomes as many nulls
        at = np.full(size * len(lists), -1)
        at[np.repeat(lists.lengths > 0, size)] = np.arange(len(lists.values))
        values = take_values(lists.values, pa.array(at, mask=at < 0), name)
        width *= size
    if pa.types.is_nested(values.type) or len(values) != width * n_tokens.sum():
        raise SchemaError(
            f"same has {name!r}, a column of {column.type}: expected numbers, text, or "
            "lists of one size of these, per token"
        )
    codes = value_codes(pa.chunked_array([values]), name)
    lists = Ragged(codes, width * offsets_of(n_tokens))
    agree = [
        _core.lcp(lists[row], lists[other]) // width
        for row, other in zip(rows, others, strict=True)
    ]
    return np.array(agree, np.int64)


def _taken(records: Records, order: Longs) -> Records:
    """The records in another order, which their parents follow."""
    moved = np.full(len(records) + 1, -1, np.int64)
    moved[order] = np.arange(len(order))
    out = records[order]
    out["parent"] = moved[out["parent"]]
    return out


def _cut(
    table: pa.Table, records: Records, max_tokens: int, oversize: Oversize
) -> Longs:
    """Make each part that packs are filled with a tree of its own: where these begin."""
    starts = np.append(np.flatnonzero(records["parent"] < 0), len(records))
    sizes = np.diff(offsets_of(records["length"] - records["shared"])[starts])
    if oversize == "repeat" and (sizes > max_tokens).any():
        for row in np.flatnonzero(records["length"] > max_tokens)[:1].tolist():
            raise InvalidTurnsError(
                f"{place(table, int(records['line'][row]))}: {records['length'][row]} "
                f"tokens, and max_tokens is {max_tokens}. Raise it, pack with "
                "oversize='carry', or cut rows in linearize (max_row_tokens)"
            )
        starts = _parts(records, max_tokens)
    # A row whose parent is in an earlier part leaves the first row where it left its
    # parent, since pre-order goes from the deepest branch to the shallowest.
    first = np.repeat(starts[:-1], np.diff(starts))
    outside = records["parent"] < first
    records["parent"][outside] = first[outside]
    records["parent"][starts[:-1]] = -1
    records["shared"][starts[:-1]] = 0
    return starts


def _parts(records: Records, limit: int) -> Longs:
    """Where the parts of the trees begin that repeat the fewest tokens, and the end.

    A part of the rows a..k has ``ends[k + 1] - ends[a] + shared[a]`` tokens, at most
    ``limit``. Its size falls as a grows, so the rows at which it may begin are a window
    that only moves on, and the queue has the window's candidates by rising cost.
    """
    shared, roots = records["shared"].tolist(), (records["parent"] < 0).tolist()
    ends = offsets_of(records["length"] - records["shared"]).tolist()
    # of each prefix of the rows: what the best parts repeat, and where the last one begins
    cost, begin = [0], [0]
    first, queue = 0, deque[tuple[int, int]]()
    for row, root in enumerate(roots):
        if root:
            first = row
            queue.clear()
        repeated = cost[row] + shared[row]
        while queue and queue[-1][0] > repeated:
            queue.pop()
        queue.append((repeated, row))
        while ends[row + 1] - ends[first] + shared[first] > limit:
            first += 1
        while queue[0][1] < first:
            queue.popleft()
        cost.append(queue[0][0])
        begin.append(queue[0][1])
    starts = [len(roots)]
    while starts[-1]:
        starts.append(begin[starts[-1]])
    return np.array(starts[::-1], np.int64)


# ---
# Columns of rows, by edge.


def column_of(
    table: pa.Table, name: str, argument: str
) -> tuple[pa.ChunkedArray, bool]:
    """A column that an argument names, and whether rows have a list of a value per token.

    Raises `InvalidTurnsError` if only some rows have that.
    """
    if name not in table.column_names:
        hint = _arguments.did_you_mean(name, table.column_names)
        raise SchemaError(f"{argument} has {name!r}: rows have no such column{hint}")
    column, n_tokens = table.column(name), row_lengths(table)
    if not tables.is_list(column.type):
        return column, False
    n = Ragged.of(column).lengths
    fits = nulls(column) | (n == n_tokens)
    if not fits.all() and (n == n_tokens)[~nulls(column)].any():
        row = int(np.argmin(fits))
        raise InvalidTurnsError(
            f"{place(table, row)}: {name} has {n[row]} values for {n_tokens[row]} "
            "tokens: expected one per token, as in other rows"
        )
    return column, bool(fits.all())


def edge_values(
    table: pa.Table, name: str, line: Longs, position: Ints | Longs
) -> pa.Array:
    """The values of a column at tokens of rows; null where the row has no list."""
    column, each_token = column_of(table, name, "columns")
    if not each_token:
        plain = pa.concat_arrays(column.chunks or [pa.array([], column.type)])
        return take_values(plain, pa.array(line), name)
    lists = Ragged.of(column)
    at = pa.array(lists.offsets[line] + position, mask=nulls(column)[line])
    return take_values(lists.values, at, name)


def value_codes(column: pa.ChunkedArray, name: str) -> Ints:
    """Equal numbers for equal values; nulls are equal."""
    if pa.types.is_nested(column.type):
        column = pa.chunked_array([list(map(repr, column.to_pylist()))], pa.string())
    try:
        plain = column.cast(without_views(column.type)).combine_chunks()
        if pa.types.is_dictionary(plain.type):
            plain = plain.dictionary_decode()
        return np.asarray(plain.dictionary_encode("encode").indices, np.int32)
    except pa.ArrowNotImplementedError:
        raise SchemaError(
            f"{name!r} has the type {column.type}, whose values cannot be compared"
        ) from None


# ---
# Packs.


def _bins(sizes: Longs, max_tokens: int) -> tuple[Longs, Longs]:
    """Best-fit decreasing: each part goes to the fullest pack that has room for it.

    Return the packs in which the parts begin and end. A part of more than ``max_tokens``
    fills whole packs; its rest begins another.
    """
    first, last = np.empty((2, len(sizes)), np.int64)
    # room and number of each pack that is not full, by room
    rooms: list[tuple[int, int]] = []
    n_packs = 0
    for part in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[part])
        k = bisect_left(rooms, (size, -1))
        if k < len(rooms):
            room, pack = rooms.pop(k)
            first[part], room = pack, room - size
        else:
            first[part], room = n_packs, -size % max_tokens
            n_packs += -(-size // max_tokens)
            pack = n_packs - 1
        last[part] = pack
        if room:
            insort(rooms, (room, pack))
    return first, last


class _Packs:
    """Packs with their tokens, of rows in pre-order that `_cut` returned."""

    def __init__(
        self, table: pa.Table, records: Records, starts: Longs, limit: int, align: int
    ) -> None:
        self._table, self._limit = table, limit
        sizes = np.diff(offsets_of(records["length"] - records["shared"])[starts])
        first, last = _bins(sizes, limit)
        # a part that continues the previous pack comes first in its last pack
        by_pack = np.lexsort((sizes <= limit, last))
        sizes, first, last = sizes[by_pack], first[by_pack], last[by_pack]
        n_rows = np.diff(starts)[by_pack]
        records = _taken(records, positions(starts[:-1][by_pack], n_rows))
        # the part of each row, and the packs in which it begins and ends
        of_row = np.repeat(np.arange(len(n_rows)), n_rows)
        self._first, self._last = first[of_row], last[of_row]
        # tokens of each pack, and where it begins among those of all, with padding
        rest = sizes - (last - first) * limit
        used = np.bincount(last, rest).astype(np.int64)
        self._n_tokens = np.where(used > 0, used, limit)
        padded = -(-self._n_tokens // align) * align
        self._offsets = offsets_of(padded)
        # where each part begins among the tokens of all packs
        start = self._offsets[last] - (last - first) * limit
        start += offsets_of(rest)[:-1] - offsets_of(used)[last]
        own = records["length"] - records["shared"]
        self._records = records
        records["start"] = offsets_of(own)[:-1]
        records["start"] += (start - offsets_of(sizes)[:-1])[of_row]
        records["base"] = self._offsets[self._first]
        self._ids, self._positions, self._ends = (
            pooled(int(self._offsets[-1]), np.int32) for _ in range(3)
        )
        n_padding = padded - self._n_tokens
        padding = positions(self._offsets[:-1] + self._n_tokens, n_padding)
        self._ids[padding] = self._positions[padding] = 0
        self._ends[padding] = 1 + positions(self._n_tokens, n_padding)
        _core.fill_packs(records, self._ids, self._positions, self._ends)
        if len(self._ids) and self._ids.min() < 0:
            check_layout(table)
        # prefix_source and prefix_end of the packs that continue a tree
        self._prefixes: dict[int, tuple[Longs, Longs]] = {}
        for part in np.flatnonzero(last > first).tolist():
            self._carry(int(first[part]), int(start[part]), int(sizes[part]))
        self._continues = np.isin(np.arange(len(used)), [*self._prefixes])

    def _carry(self, pack: int, begin: int, size: int) -> None:
        """Cut the tree of a part into packs, each with the prefix that it attends."""
        ends = self._ends[begin : begin + size].astype(np.int64)
        seen = np.empty(0, np.int64)
        for k, start in enumerate(range(0, size, self._limit)):
            stop = min(start + self._limit, size)
            if k:
                source = np.flatnonzero(ends[seen] > start)
                seen = seen[source]
                reach = np.minimum(ends[seen], stop) - start
                self._prefixes[pack + k] = source, reach
            own = np.minimum(ends[start:stop], stop) - start
            self._ends[begin + start : begin + stop] = own
            seen = np.concatenate([seen, np.arange(start, stop)])

    def edges(
        self, columns: Sequence[str], reduce: Reduce, first_row: int
    ) -> dict[str, pa.Array]:
        """The columns of edges; lines of rows count from ``first_row``."""
        records, table = self._records, self._table
        bad, counts = _core.count_edges(records)
        if bad >= 0:
            raise InvalidTurnsError(
                f"{place(table, int(records['line'][bad]))}: its first token is trained, "
                "and nothing predicts it. Clear its loss_mask (and observation_weight)"
            )
        offsets = offsets_of(counts)
        n = int(offsets[-1])
        source, target, position = (pooled(n, np.int32) for _ in range(3))
        logprob, given = pooled(n, np.float32), np.empty(n, np.uint8)
        _core.fill_edges(
            records, self._ids, offsets, source, target, position, logprob, given
        )
        line = np.repeat(records["line"], counts)
        # without other edges, those of a row are its trained tokens
        n_trained = counts
        if OBSERVED in columns:
            n_trained = trained_tokens(table)[records["line"]]
        weight = np.repeat(self._weights(n_trained, reduce), counts)
        if OBSERVED in columns:
            trained = np.asarray(edge_values(table, "loss_mask", line, position))
            weight[~trained] = 0.0
        edges: dict[str, Any] = {
            "source": source,
            "target": target,
            "row": line + first_row,
            "position": position,
            "weight": weight,
            "logprob": pa.array(logprob, mask=given == 0),
            **{name: edge_values(table, name, line, position) for name in columns},
        }
        packs = np.arange(len(self._n_tokens) + 1)
        bounds = offsets[np.searchsorted(self._last, packs)]
        if self._continues.any():
            # a source counts from the first pack of its part
            on, edges["source"] = np.divmod(source, self._limit)
            pack = np.repeat(self._first, counts) + on
            order = np.argsort(pack, kind="stable")
            bounds = np.searchsorted(pack[order], packs)
            edges = {
                name: take_values(pa.array(values), pa.array(order), name)
                for name, values in edges.items()
            }
        return {f"edge_{k}": Ragged(v, bounds).to_arrow() for k, v in edges.items()}

    def _weights(self, n_trained: Longs, reduce: Reduce) -> Any:
        """The weight of each row's edges in the loss."""
        column, lines = self._table.column("row_weight"), self._records["line"]
        lacking = nulls(column)[lines] & (n_trained > 0)
        if lacking.any():
            raise InvalidTurnsError(
                f"{place(self._table, int(lines[lacking].min()))}: row_weight is null, "
                "though it trains tokens. trajkit.add_weights makes weights"
            )
        weight = column.fill_null(0.0).to_numpy()[lines]
        return weight / np.maximum(n_trained, 1) if reduce == "mean" else weight

    def table(self, edges: dict[str, pa.Array], first_pack: int) -> pa.Table:
        """The table of packs; their lines count from ``first_pack``."""
        n_packs = len(self._n_tokens)
        prefixes = [self._prefixes.get(pack, ((), ())) for pack in range(n_packs)]
        before = first_pack + np.arange(n_packs) - 1
        columns = {
            "input_ids": Ragged(self._ids, self._offsets).to_arrow(),
            "position_ids": Ragged(self._positions, self._offsets).to_arrow(),
            "subtree_end": Ragged(self._ends, self._offsets).to_arrow(),
            "n_tokens": pa.array(self._n_tokens, pa.int32()),
            "sessions": self._sessions(),
            **edges,
            "prefix_pack": pa.array(before, mask=~self._continues),
            "prefix_source": [source for source, _ in prefixes],
            "prefix_end": [end for _, end in prefixes],
            "mm_items": self._items(),
        }
        further = [
            pa.field(name, edges[name].type, nullable=False)
            for name in edges
            if name not in PACKS.names
        ]
        schema = pa.schema([*PACKS, *further], metadata=PACKS.metadata)
        return pa.table({name: columns[name] for name in schema.names}, schema)

    def _sessions(self) -> pa.LargeListArray:
        """The sessions of each pack, in the order of the rows."""
        n_packs = 1 + self._last - self._first
        names = self._table.column("session_id")
        session = codes(names)[self._records["line"]].repeat(n_packs)
        pack = positions(self._first, n_packs)
        pack, session = np.unique([pack, session], axis=1)
        bounds = np.searchsorted(pack, np.arange(len(self._n_tokens) + 1))
        return Ragged(pc.unique(names).take(pa.array(session)), bounds).to_arrow()

    def _items(self) -> list[list[images.Item] | None]:
        """The images of each pack; raises InvalidTurnsError if it has a part of one."""
        found: list[list[images.Item] | None] = [None] * len(self._n_tokens)
        if not images.has_items(self._table):
            return found
        items = list_values(self._table.column("mm_items")).to_pylist()
        # by their first content id
        known: dict[int, list[images.Item]] = {}
        for item in {images.same_image(item): item for item in items}.values():
            known.setdefault(int(images.item_ids(item)[0]), []).append(item)
        token = 0
        for here in np.flatnonzero(self._ids >= images.FIRST_CONTENT_ID).tolist():
            if here < token:
                continue
            pack = int(np.searchsorted(self._offsets, here, side="right")) - 1
            first, end = self._offsets[pack : pack + 2].tolist()
            for item in known.get(int(self._ids[here]), ()):
                due = images.item_ids(item)
                token = here + len(due)
                if token <= end and np.array_equal(self._ids[here:token], due):
                    break
            else:
                raise InvalidTurnsError(
                    f"token {here - first} of pack {pack} is of an image of which the "
                    "pack has a part: make rows without max_row_tokens or with another "
                    "one, or pack with oversize='repeat'"
                )
            at = {"start": here - first, "stop": token - first}
            found[pack] = [*(found[pack] or ()), {**item, **at}]
        return found


def unpack(packs: TableLike, values: Any, rows: TableLike) -> pa.LargeListArray:
    """Values of edges as a list per row with a value per token.

    Parameters
    ----------
    packs, rows : table
        `trajkit.schema.PACKS`, and the `trajkit.schema.ROWS` that were packed.
    values : array or torch tensor, or sequence of these
        A number for each edge of all packs (logprobs, entropies), in their order; or
        such an array for each pack.

    Returns
    -------
    LargeListArray
        Of the values' type, as long as the rows. Tokens without an edge are null.

    Raises
    ------
    SchemaError
        A column is absent, or of an unsuitable type.
    InvalidTurnsError
        There is another number of values than of edges; an edge is of no token of the
        rows, or of one that has two.
    """
    given = tables.canonical(tables.as_table(packs), PACKS)
    table = tables.canonical_rows(tables.as_table(rows))
    row, position = (
        list_values(given.column(name)).to_numpy().astype(np.int64)
        for name in ("edge_row", "edge_position")
    )
    values = _arguments.plain_array(values)
    if isinstance(values, Sequence):
        parts = [np.asarray(_arguments.plain_array(part)) for part in values]
        values = np.concatenate(parts) if any(part.ndim for part in parts) else parts
    numbers = np.asarray(values)
    if numbers.shape != row.shape:
        raise InvalidTurnsError(
            f"values are of shape {numbers.shape}: the packs have {len(row)} edges"
        )
    ends = offsets_of(row_lengths(table))
    n_tokens = np.append(np.diff(ends), 0)
    last = len(table)  # a row that is not there has no token
    size = n_tokens[np.where((row < 0) | (row > last), last, row)]
    for edge in np.flatnonzero((position < 0) | (position >= size))[:1]:
        raise InvalidTurnsError(
            f"edge {edge} is token {position[edge]} of row {row[edge]}, which the rows "
            "do not have: pass the rows that were packed"
        )
    at = ends[row] + position
    times = np.bincount(at, minlength=int(ends[-1]))
    for again in np.flatnonzero(times > 1)[:1]:
        line = int(np.searchsorted(ends, again, side="right")) - 1
        raise InvalidTurnsError(
            f"{place(table, line)}: token {again - ends[line]} has two edges"
        )
    out = np.zeros(len(times), numbers.dtype)
    out[at] = numbers
    return Ragged(pa.array(out, mask=times == 0), ends).to_arrow()
