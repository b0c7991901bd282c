"""`pack`: rows to micro-batches of trees, with an edge for every trained token."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit._arguments import check_choice, chosen_int, chosen_names
from trajkit.errors import ArgumentError, InvalidTurnsError, SchemaError
from trajkit.learn.loss import Reduce
from trajkit.packs import forest
from trajkit.packs.forest import (
    OBSERVED,
    Bins,
    add_observed,
    edge_values,
    fill_bins,
    pack_items,
    row_records,
)
from trajkit.schema import PACKS
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import TableLike, as_table, canonical_rows, place
from trajkit.tables.export import pooled
from trajkit.tables.ragged import (
    Bools,
    Ints,
    Longs,
    Ragged,
    Records,
    offsets_of,
    positions,
)
from trajkit.tables.session_batches import concat, whole_sessions
from trajkit.tables.stages import Batches, Source, batches_in, batches_of
from trajkit.tables.take import row_lengths
from trajkit.turns.validation import check_layout

Layout: TypeAlias = Literal["tree", "rows"]
Share: TypeAlias = Literal["session", "group"]
Oversize: TypeAlias = Literal["repeat", "carry", "error"]

# Sessions of a stream are packed together until they fill about this many packs.
_PACKS_AT_A_TIME = 64


class _Choices(TypedDict, total=False):
    layout: Layout
    share: Share
    oversize: Oversize
    align: int
    same: Sequence[str]
    columns: Sequence[str]
    reduce: Reduce


@dataclass(frozen=True, slots=True)
class _Options:
    max_tokens: int
    layout: Layout = "tree"
    share: Share = "session"
    oversize: Oversize = "repeat"
    align: int = 1
    same: Sequence[str] = ()
    columns: Sequence[str] = ()
    reduce: Reduce = "mean"

    def __post_init__(self) -> None:
        for name in ("max_tokens", "align"):
            chosen = chosen_int(name, getattr(self, name), 1)
            object.__setattr__(self, name, chosen)
        if self.max_tokens >= 2**31:
            words = f"max_tokens={self.max_tokens}: positions are of 32 bits"
            raise ArgumentError(words)
        check_choice("layout", self.layout, Layout)
        check_choice("share", self.share, Share)
        check_choice("oversize", self.oversize, Oversize)
        check_choice("reduce", self.reduce, Reduce)
        if self.max_tokens % self.align:
            raise ArgumentError(
                f"align={self.align} does not divide max_tokens={self.max_tokens}: a full "
                "pack would be padded beyond it"
            )
        for argument in ("same", "columns"):
            chosen_names(argument, getattr(self, argument))
        for name in self.columns:
            if f"edge_{name}" in PACKS.names or list(self.columns).count(name) > 1:
                raise SchemaError(
                    f"columns has {name!r}, but packs have edge_{name} already: name "
                    "each column once, and copy this one under another name"
                )


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
    the loss over rows.

    Parameters
    ----------
    rows : table
        `trajkit.schema.ROWS` with all rows of each session.
    max_tokens : int
        Maximum number of tokens in a pack. With 1.25 to 1.5 times the longest row, few
        tokens are repeated.
    layout : {"tree", "rows"}
        With "rows", rows share nothing: each is a tree of its own.
    share : {"session", "group"}
        With "group", the first rows of all sessions of a ``group_id`` also share their
        common prefix.
    oversize : {"repeat", "carry", "error"}
        How to treat a tree of more than ``max_tokens``.

        repeat
            Cut it between rows; each part repeats the prefix that it needs. The cuts
            repeat the fewest tokens that the order of the tree allows. A row of more
            than ``max_tokens`` is refused.
        carry
            Cut it at any token. The packs of its parts are consecutive, and
            ``prefix_pack``, ``prefix_source`` and ``prefix_end`` name the earlier tokens
            whose keys and values a part attends to.
        error
            Refuse it.
    align : int
        Pad packs to a multiple of this many tokens; it must divide ``max_tokens``.
    same : sequence of str
        Rows share tokens only if these columns agree: lists with a value per token
        (routed experts), or one value per row. Images need no such column, since
        rows with different images differ in their ids.
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
        A column is absent, or has a type that cannot be taken for its own; one of
        ``columns`` has the name of an edge's own.
    InvalidTurnsError
        A tree or a row is too large; a pack has a part of an image, because
        ``max_row_tokens`` or ``carry`` cut it; a row trains its first token, which nothing
        predicts; a row that trains something has no row_weight; a parent_row is not
        there; a session comes back after another began.
    ArgumentError
        A choice does not exist, or ``align`` does not divide ``max_tokens``.

    Examples
    --------
    >>> import trajkit as tk
    >>> turns = tk.from_records(
    ...     [
    ...         {"session_id": "a", "prompt_ids": [1, 2], "output_ids": [3, 4]},
    ...         {"session_id": "a", "prompt_ids": [1, 2, 9], "output_ids": [5]},
    ...     ]
    ... )
    >>> packs = tk.pack(tk.linearize(turns), 8).to_pylist()[0]
    >>> packs["input_ids"], packs["subtree_end"]
    ([1, 2, 3, 4, 9, 5], [6, 6, 4, 4, 6, 6])
    >>> packs["edge_source"], packs["edge_target"], packs["edge_row"]
    ([1, 2, 4], [3, 4, 5], [0, 0, 1])
    """
    options = _Options(
        max_tokens, layout, share, oversize, align, same, columns, reduce
    )
    return _packed(as_table(rows), options)


def pack_batches(rows: Source, max_tokens: int, **options: Unpack[_Choices]) -> Batches:
    """From record batches to an iterator of them, a few sessions at a time; see `pack`.

    The batches of a session are consecutive and, with ``share="group"``, the sessions
    of a group. Lines of rows and packs count from the first row and the first pack.
    """
    chosen = _Options(max_tokens, **options)
    return batches_in(_streamed(batches_of(rows), chosen))


def _streamed(
    batches: Iterable[pa.RecordBatch], options: _Options
) -> Iterator[pa.Table]:
    n_rows = n_packs = 0
    for table in _together(whole_sessions(batches, "rows"), options):
        packs = _packed(table, options, n_rows, n_packs)
        n_rows += table.num_rows
        n_packs += packs.num_rows
        yield packs


def _together(tables: Iterator[pa.Table], options: _Options) -> Iterator[pa.Table]:
    """Tables of as many sessions as are packed together, the groups complete."""
    groups = _Groups() if options.share == "group" else None
    kept: list[pa.Table] = []
    n_tokens = 0
    for table in tables:
        table = canonical_rows(table)
        sizes = row_lengths(table) - table.column("shared_length").to_numpy()
        full = n_tokens >= _PACKS_AT_A_TIME * options.max_tokens
        if groups is not None:
            full &= groups.begins_new(table)
        if full:
            yield concat(kept)
            kept, n_tokens = [], 0
        kept.append(table)
        n_tokens += int(sizes.sum())
    if kept:
        yield concat(kept)


@dataclass
class _Groups:
    """The groups of a stream, which must come one after another."""

    ended: set[str] = field(default_factory=set)
    current: str | None = None

    def begins_new(self, table: pa.Table) -> bool:
        """Whether a table of further sessions begins with another group than the last."""
        first = None
        for k, group in enumerate(table.column("group_id").to_pylist()):
            if k == 0:
                first = group is None or group != self.current
            if group == self.current and group is not None:
                continue
            if group in self.ended:
                raise InvalidTurnsError(
                    f"{place(table, k)}: group {group!r} comes back after another group "
                    "began. Sort the rows by group_id, session_id and row_index, or pack "
                    "with share='session'"
                )
            if self.current is not None:
                self.ended.add(self.current)
            self.current = group
        return first is not False


def _packed(
    rows: pa.Table, options: _Options, first_row: int = 0, first_pack: int = 0
) -> pa.Table:
    table = canonical_rows(rows)
    check_layout(table, read_ids=False)
    records, keep = row_records(table)
    trained = None
    if OBSERVED in options.columns:
        trained, more = add_observed(table, records)
        keep += more
    records = _forest(table, records, options)
    starts = _parts(table, records, options)
    forest.detach_parts(records, starts)
    packs = _Packs(table, records, starts, options, first_pack)
    packs.fill()
    packs.add_edges(trained, first_row)
    del keep
    return packs.table()


def _forest(table: pa.Table, records: Records, options: _Options) -> Records:
    """The rows in pre-order, those without a token left out."""
    if options.layout == "rows":
        forest.share_nothing(records)
    elif options.share == "group":
        records = forest.join_groups(table, records, options.same)
    forest.limit_shared(table, records, options.same)
    records = forest.taken(records, np.flatnonzero(records["length"]))
    return forest.in_pre_order(records)


def _parts(table: pa.Table, records: Records, options: _Options) -> Longs:
    """Where the parts begin that packs are filled with."""
    limit = options.max_tokens
    starts = forest.trees(records)
    sizes = forest.part_sizes(records, starts)
    large = np.flatnonzero(sizes > limit)
    if options.oversize == "carry" or not len(large):
        return starts
    if options.oversize == "error":
        tree = int(large[0])
        first, last = starts[tree], starts[tree + 1] - 1
        where = place(table, int(records["line"][first]))
        raise InvalidTurnsError(
            f"{where}: its tree, with {last - first} more rows, has {sizes[tree]} tokens, "
            f"and max_tokens is {limit}. Raise max_tokens, or cut such trees with "
            "oversize='repeat' or 'carry'"
        )
    starts, bad = forest.cut_trees(records, limit)
    if bad >= 0:
        where = place(table, int(records["line"][bad]))
        raise InvalidTurnsError(
            f"{where}: {records['length'][bad]} tokens, and max_tokens is {limit}. Raise "
            "max_tokens, pack with oversize='carry', or cut rows when they are made "
            "(linearize with max_row_tokens)"
        )
    return starts


class _Packs:
    """The columns of packs, as they are filled.

    ``records`` are rows in pre-order, each part a tree of its own, and ``starts`` where
    the parts begin, with the end. Lines of packs count from ``first_pack``.
    """

    def __init__(
        self,
        table: pa.Table,
        records: Records,
        starts: Longs,
        options: _Options,
        first_pack: int,
    ) -> None:
        self._table, self._options, self._first_pack = table, options, first_pack
        limit = options.max_tokens
        sizes = forest.part_sizes(records, starts)
        bins = fill_bins(sizes, limit)
        # a part that continues the previous pack comes first in its last pack
        self._by_pack = np.lexsort((np.arange(len(sizes)), sizes <= limit, bins.last))
        rows = positions(starts[self._by_pack], np.diff(starts)[self._by_pack])
        self._records = forest.taken(records, rows)
        sizes = sizes[self._by_pack]
        self._bins = Bins(
            bins.first[self._by_pack], bins.last[self._by_pack], bins.n_packs
        )
        self._sizes = sizes
        self._n_rows = np.diff(starts)[self._by_pack]
        # tokens of each pack, and where it begins among those of all, with padding
        first, last = self._bins.first, self._bins.last
        rest = sizes - (last - first) * limit
        used = np.bincount(last, rest, minlength=bins.n_packs).astype(np.int64)
        self._n_tokens = used
        full = positions(first, last - first)
        self._n_tokens[full] = limit
        self._padded = -(-self._n_tokens // options.align) * options.align
        self._offsets = offsets_of(self._padded)
        before = offsets_of(rest)[:-1]
        opens = np.searchsorted(last, np.arange(bins.n_packs))
        within = before - before[opens[last]] if len(last) else before
        # where each part begins among the tokens of all packs
        self._start = self._offsets[last] + within - (last - first) * limit
        own = self._records["length"] - self._records["shared"]
        ends = offsets_of(own)[:-1]
        head = offsets_of(self._n_rows)[:-1]
        self._records["start"] = (
            np.repeat(self._start - ends[head], self._n_rows) + ends
        )
        base = np.where(last > first, self._start, self._offsets[last])
        self._records["base"] = np.repeat(base, self._n_rows)
        self._ids, self._positions, self._ends = (
            pooled(int(self._offsets[-1]), np.int32) for _ in range(3)
        )
        self._prefixes: dict[int, tuple[Longs, Longs]] = {}
        self._edges: dict[str, pa.Array] = {}
        self._edge_offsets = np.zeros(bins.n_packs + 1, np.int64)

    def fill(self) -> None:
        padding = self._padded - self._n_tokens
        at = positions(self._offsets[:-1] + self._n_tokens, padding)
        self._ids[at] = self._positions[at] = 0
        self._ends[at] = 1 + positions(self._n_tokens, padding)
        _core.fill_packs(self._records, self._ids, self._positions, self._ends)
        if len(self._ids) and self._ids.min() < 0:
            check_layout(self._table)
        for part in np.flatnonzero(self._bins.last > self._bins.first):
            self._cut(int(part))

    def _cut(self, part: int) -> None:
        limit, size = self._options.max_tokens, int(self._sizes[part])
        begin = int(self._start[part])
        ends = self._ends[begin : begin + size].astype(np.int64)
        seen = np.empty(0, np.int64)
        for k, start in enumerate(range(0, size, limit)):
            stop = min(start + limit, size)
            if k:
                source = np.flatnonzero(ends[seen] > start)
                seen = seen[source]
                reach = np.minimum(ends[seen], stop) - start
                self._prefixes[int(self._bins.first[part]) + k] = source, reach
            self._ends[begin + start : begin + stop] = (
                np.minimum(ends[start:stop], stop) - start
            )
            seen = np.concatenate([seen, np.arange(start, stop)])

    def add_edges(self, trained: Bools | None, first_row: int) -> None:
        """Write the edges; lines of rows count from ``first_row``.

        ``trained``: the loss masks of the rows, where other tokens have edges as well.
        """
        records, table, options = self._records, self._table, self._options
        counts = np.empty(len(records), np.int64)
        bad = _core.count_edges(records, counts)
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
        row_pack = np.repeat(self._bins.last, self._n_rows)
        packs = np.arange(self._bins.n_packs + 1)
        self._edge_offsets = offsets[np.searchsorted(row_pack, packs)]
        line = np.repeat(records["line"], counts)
        weight = self._weights(trained, line, position, counts)
        if self._prefixes:
            # a source counts from the first pack of its part
            pack = np.repeat(row_pack, counts)
            first = np.repeat(np.repeat(self._bins.first, self._n_rows), counts)
            carried = np.flatnonzero(pack > first)
            on, source[carried] = np.divmod(source[carried], options.max_tokens)
            pack[carried] = first[carried] + on
            order = np.argsort(pack, kind="stable")
            line, weight = line[order], weight[order]
            source, target, position = source[order], target[order], position[order]
            logprob, given = logprob[order], given[order]
            self._edge_offsets = np.searchsorted(pack[order], packs)
        valid = None if given.all() else pa.array(given.view(np.bool_)).buffers()[1]
        self._edges = {
            "edge_source": pa.array(source),
            "edge_target": pa.array(target),
            "edge_row": pa.array(line + first_row),
            "edge_position": pa.array(position),
            "edge_weight": pa.array(weight),
            "edge_logprob": pa.Array.from_buffers(
                pa.float32(), n, [valid, pa.py_buffer(logprob)]
            ),
        }
        for name in options.columns:
            self._edges[f"edge_{name}"] = edge_values(
                table, name, row_lengths(table), line, position
            )

    def _weights(
        self, trained: Bools | None, line: Longs, position: Ints, counts: Longs
    ) -> npt.NDArray[np.float64]:
        """The weight of each edge in the loss, for the edges in the order of records."""
        table, lines = self._table, self._records["line"]
        if trained is not None:
            of_edge = trained[offsets_of(row_lengths(table))[line] + position]
            n_trained = np.bincount(line, of_edge, minlength=table.num_rows)[lines]
        else:
            n_trained = counts
        lacking = np.asarray(table.column("row_weight").is_null())[lines]
        lacking &= n_trained > 0
        if lacking.any():
            raise InvalidTurnsError(
                f"{place(table, int(lines[lacking].min()))}: row_weight is null, though "
                "it trains tokens. trajkit.add_weights makes weights"
            )
        weight = table.column("row_weight").fill_null(0.0).to_numpy()[lines]
        if self._options.reduce == "mean":
            weight = weight / np.maximum(n_trained, 1)
        weights = np.repeat(weight, counts)
        if trained is not None:
            weights[~of_edge] = 0.0
        return weights

    def table(self) -> pa.Table:
        offsets, n_packs = self._offsets, self._bins.n_packs
        columns: dict[str, pa.Array] = {
            "input_ids": _lists(offsets, pa.array(self._ids)),
            "position_ids": _lists(offsets, pa.array(self._positions)),
            "subtree_end": _lists(offsets, pa.array(self._ends)),
            "n_tokens": pa.array(self._n_tokens.astype(np.int32)),
        }
        columns |= self._segments()
        columns |= self._trees()
        starts = columns["tree_start"]
        starts = Ragged(starts.values.to_numpy(), starts.offsets.to_numpy())
        n_segments = columns["segment_start"].value_lengths().to_numpy()
        plain = n_segments == starts.lengths
        plain[list(self._prefixes)] = False
        columns["cu_seqlens"] = self._cu_seqlens(starts, plain)
        for name, values in self._edges.items():
            columns[name] = _lists(self._edge_offsets, values)
        columns["mm_items"] = pa.array(
            pack_items(self._table, self._ids, offsets), PACKS.field("mm_items").type
        )
        lines = np.arange(n_packs)
        continues = np.isin(lines, list(self._prefixes))
        before = self._first_pack + lines - 1
        columns["prefix_pack"] = pa.array(before, mask=~continues)
        for at, name in enumerate(("prefix_source", "prefix_end")):
            lists = [self._prefixes.get(k, ((), ()))[at] for k in range(n_packs)]
            columns[name] = pa.array(lists, pa.large_list(pa.int32()))
        further = [
            pa.field(name, column.type, nullable=False)
            for name, column in columns.items()
            if name not in PACKS.names
        ]
        schema = pa.schema([*PACKS, *further], metadata=PACKS.metadata)
        return pa.Table.from_arrays(
            [columns[name] for name in schema.names], schema=schema
        )

    def _segments(self) -> dict[str, pa.Array]:
        """Runs of tokens whose subtrees end at one token: they have no branch inside."""
        ends, offsets = self._ends, self._offsets
        begins = np.ones(len(ends), np.bool_)
        np.not_equal(ends[1:], ends[:-1], out=begins[1:])
        begins[offsets[:-1]] = True
        begins[
            positions(offsets[:-1] + self._n_tokens, self._padded - self._n_tokens)
        ] = False
        at = np.flatnonzero(begins)
        bounds = np.searchsorted(at, offsets)
        pack = np.repeat(np.arange(self._bins.n_packs), np.diff(bounds))
        starts = (at - offsets[pack]).astype(np.int32)
        parents = np.empty(len(at), np.int32)
        _core.segment_parents(starts, ends[at], bounds, parents)
        return {
            "segment_start": _lists(bounds, pa.array(starts)),
            "segment_parent": _lists(bounds, pa.array(parents)),
        }

    def _trees(self) -> dict[str, pa.Array]:
        """Where trees start, and whose they are; a part is a tree in each of its packs."""
        n_packs = self._bins.n_packs
        spread = 1 + self._bins.last - self._bins.first
        pack = positions(self._bins.first, spread)
        part = np.repeat(np.arange(len(spread)), spread)
        start = np.maximum(self._start[part] - self._offsets[pack], 0)
        order = np.lexsort((start, pack))
        pack, part, start = pack[order], part[order], start[order]
        names = self._table.column("session_id").unique()
        codes = pc.index_in(self._table.column("session_id"), names)
        of_row = np.asarray(codes, np.int64)[self._records["line"]]
        head = offsets_of(self._n_rows)[:-1]
        owner = np.repeat(np.arange(len(head)), self._n_rows)
        mixed = np.bincount(
            owner, of_row != of_row[head[owner]], minlength=len(head)
        ).astype(np.bool_)
        whose = pa.array(of_row[head][part], mask=mixed[part])
        # every session of every part, once for each of its packs
        pairs = np.unique(np.stack([owner, of_row], axis=1), axis=0)
        spread = spread[pairs[:, 0]]
        keys = np.unique(
            np.stack(
                [
                    positions(self._bins.first[pairs[:, 0]], spread),
                    np.repeat(pairs[:, 1], spread),
                ],
                axis=1,
            ),
            axis=0,
        )
        bounds = np.searchsorted(pack, np.arange(n_packs + 1))
        return {
            "tree_start": _lists(bounds, pa.array(start.astype(np.int32))),
            "tree_session": _lists(bounds, names.take(whose)),
            "sessions": _lists(
                np.searchsorted(keys[:, 0], np.arange(n_packs + 1)),
                names.take(pa.array(keys[:, 1])),
            ),
        }

    def _cu_seqlens(self, starts: Ragged, plain: Bools) -> pa.Array:
        """The bounds of the sequences of packs without a branch; null for the others."""
        lists: list[Longs | None] = []
        for k in range(len(starts)):
            stops = np.unique([self._n_tokens[k], self._padded[k]])
            lists.append(np.append(starts[k], stops) if plain[k] else None)
        return pa.array(lists, pa.large_list(pa.int32()))


def _lists(offsets: Longs, values: pa.Array) -> pa.LargeListArray:
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values)
