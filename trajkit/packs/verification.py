"""`verify_packs`: whether packs have every trained token once, in the context of its row.

Nothing that `trajkit.pack` computes is used: a token's path is read off ``subtree_end`` and
compared with the rows.
"""

from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit._arguments import check_choice, chosen_int
from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.canonical import TableLike, as_table, canonical, is_list
from trajkit._arrow.take import list_values, take_values
from trajkit.errors import SchemaError
from trajkit.learn.loss import Reduce
from trajkit.pipeline.suffix_layout import full_rows
from trajkit.schema import PACK_VIOLATIONS, PACKS
from trajkit.turns.calls import Longs
from trajkit.turns.flat_buffers import (
    FlatRows,
    Ragged,
    flat_rows,
    offsets_of,
    positions,
)
from trajkit.turns.images import Image, image_faults, same_image

Bools: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.float64]

_NEEDED = ("input_ids", "subtree_end", "edge_source", "edge_row", "edge_position")
_ANY_PACKS = pa.schema(
    [one if one.name in _NEEDED else one.with_nullable(True) for one in PACKS],
    metadata=PACKS.metadata,
)
_OBSERVED = "observation_weight"


def verify_packs(
    packs: TableLike,
    rows: TableLike,
    *,
    max_tokens: int | None = None,
    reduce: Reduce = "mean",
) -> pa.Table:
    """Every violation of what packs promise about the rows that they were made of.

    Parameters
    ----------
    packs : table
        `trajkit.schema.PACKS`. Of packs of another system: input_ids, subtree_end,
        edge_source, edge_row and edge_position; other columns are checked where they are
        there.
    rows : table
        `trajkit.schema.ROWS`, or ``ROWS_SUFFIX``: all rows that were packed.
    max_tokens : int, optional
        Tokens that a pack may have, with padding. None: any number.
    reduce : {"mean", "sum"}
        As for `trajkit.pack`.

    Returns
    -------
    Table
        `trajkit.schema.PACK_VIOLATIONS`, by pack; empty where all is well.

    Raises
    ------
    SchemaError
        A table lacks a column, or a column has a type that cannot be taken for its own.
    ArgumentError
        ``max_tokens`` is not an integer of 1 or more, or ``reduce`` does not exist.

    Examples
    --------
    >>> import trajkit as tk
    >>> turns = tk.from_records(
    ...     [{"session_id": "a", "prompt_ids": [1], "output_ids": [2, 3]}]
    ... )
    >>> rows = tk.linearize(turns)
    >>> packs = tk.pack(rows, 4)
    >>> tk.verify_packs(packs, rows).num_rows
    0
    >>> other = [packs.to_pylist()[0] | {"subtree_end": [3, 2, 3]}]
    >>> tk.verify_packs(other, rows)["rule"].to_pylist()
    ['position', 'segment', 'segment', 'cu_seqlens']
    """
    if max_tokens is not None:
        max_tokens = chosen_int("max_tokens", max_tokens, 1)
    check_choice("reduce", reduce, Reduce)
    # rows in the layout "full" come back as they are
    table = full_rows(as_table(rows))
    source = as_table(packs)
    given = canonical(source, _ANY_PACKS)
    images = None
    if "mm_items" in source.column_names:
        listed = table.column("mm_items").to_pylist()
        images = {same_image(item) for items in listed for item in items or ()}
    judge = _Judge(_Packs.read(given), flat_rows(table), reduce, images)
    for line in range(given.num_rows):
        judge.pack(line, max_tokens)
    judge.edges()
    return judge.table()


@dataclass(frozen=True, slots=True)
class _Packs:
    """The lists of packs, end to end. None: the packs lack the column."""

    table: pa.Table
    lists: dict[str, Ragged | None]
    # where an edge has a logprob
    given: Bools

    @classmethod
    def read(cls, table: pa.Table) -> Self:
        lists = {
            name: _runs(table.column(name))
            for name in table.column_names
            if is_list(table.schema.field(name).type)
        }
        given = np.empty(0, np.bool_)
        if lists["edge_logprob"] is not None:
            given = np.asarray(list_values(table.column("edge_logprob")).is_valid())
        return cls(table, lists, given)

    def list(self, name: str, line: int) -> npt.NDArray[Any] | None:
        """A list of a pack, or None if it is null."""
        runs = self.lists[name]
        if runs is None or not self.table.column(name)[line].is_valid:
            return None
        return runs[line]

    def needed(self, name: str) -> Ragged:
        """The lists of a column that every pack has."""
        runs = self.lists[name]
        assert runs is not None
        return runs


def _runs(column: pa.ChunkedArray) -> Ragged | None:
    """Lists end to end, null numbers as -1; None where no pack has one."""
    if column.null_count == len(column) > 0:
        return None
    n = np.asarray(pc.list_value_length(column).fill_null(0), np.int64)
    values = list_values(column)
    if pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
        values = values.fill_null(-1)
    return Ragged(values.to_numpy(zero_copy_only=False), offsets_of(n))


@dataclass(frozen=True, slots=True)
class _Shape:
    """A pack as runs of tokens, prefix first, that share one subtree_end.

    A run has no branch inside: the first token of the next one leaves it at its last.
    """

    ids: npt.NDArray[np.int32]
    # int64, shape (n_prefix + n_tokens,)
    ends: Longs
    # tokens of the prefix
    n_prefix: int
    # shape (n_runs,): first token, position of it, and the run above; -1: none
    start: Longs
    depth: Longs
    above: Longs

    def run_of(self, token: int) -> int:
        """The run of a token."""
        return int(np.searchsorted(self.start, token, side="right")) - 1

    def position(self) -> Longs:
        """Tokens above each token."""
        lengths = np.diff(np.append(self.start, len(self.ids)))
        return positions(self.depth, lengths)

    def path(self, token: int) -> Longs:
        """The tokens that one attends, from the root to itself."""
        parts: list[Longs] = []
        run, stop = self.run_of(token), token + 1
        while run >= 0:
            parts.append(np.arange(self.start[run], stop))
            run = int(self.above[run])
            # the next run leaves this one at its last token
            stop = int(self.start[run + 1])
        return np.concatenate(parts[::-1])


@dataclass
class _Judge:
    packs: _Packs
    rows: FlatRows
    reduce: Reduce
    # those of the rows; None: the packs lack the column mm_items
    images: set[Image] | None
    # lines of `trajkit.schema.PACK_VIOLATIONS`
    found: list[dict[str, Any]] = field(default_factory=list)
    shapes: dict[int, _Shape] = field(default_factory=dict)

    def say(
        self,
        rule: str,
        detail: str,
        pack: int | None,
        token: int | None = None,
        row: int | None = None,
        row_token: int | None = None,
    ) -> None:
        """Add a violation; ``row`` counts lines of the rows."""
        named = {"session_id": None, "row_index": None}
        if row is not None:
            named = {name: self.rows.table[name][row].as_py() for name in named}
        at = {"pack": pack, "token": token, "row_token": row_token}
        self.found.append({**at, **named, "rule": rule, "detail": detail})

    def differ(
        self, rule: str, name: str, pack: int, expected: npt.NDArray[Any]
    ) -> None:
        """Note where a list of a pack differs from what it should be."""
        given = self.packs.list(name, pack)
        if given is None:
            return
        if len(given) != len(expected):
            detail = f"{name} has {len(given)} elements: expected {len(expected)}"
            self.say(rule, detail, pack)
            return
        bad = np.flatnonzero(given != expected)
        if len(bad):
            k = int(bad[0])
            detail = f"{name}[{k}] is {given[k]}: expected {expected[k]}"
            self.say(rule, f"{detail}{_more(bad)}", pack)

    def pack(self, line: int, max_tokens: int | None) -> None:
        """Judge the tokens of a pack; its edges are judged if these make trees."""
        own = self.packs.needed("input_ids")[line]
        ends = self.packs.needed("subtree_end")[line].astype(np.int64)
        n = self._number("n_tokens", line, len(own))
        if max_tokens is not None and len(own) > max_tokens:
            detail = f"{len(own)} tokens: expected at most {max_tokens}"
            self.say("max_tokens", detail, line)
        position = self.packs.list("position_ids", line)
        for name, given in (("subtree_end", ends), ("position_ids", position)):
            if given is not None and len(given) != len(own):
                detail = f"{name} has {len(given)} elements for {len(own)} tokens"
                self.say("length", detail, line)
                return
        if not 0 <= n <= len(own):
            detail = f"n_tokens is {n}, and there are {len(own)} ids"
            self.say("range", detail, line)
            return
        if (own < 0).any():
            at = int(np.argmax(own < 0))
            self.say("range", f"the id is {own[at]}", line, at)
            return
        padding = np.arange(n, len(own))
        wrong = padding[ends[n:] != padding + 1]
        if len(wrong):
            detail = f"padding has subtree_end {ends[wrong[0]]}{_more(wrong)}"
            self.say("padding", detail, line, int(wrong[0]))
        wrong = np.flatnonzero(ends[:n] > n)
        if len(wrong):
            detail = f"subtree_end is {ends[wrong[0]]}, with padding from {n} on"
            rule = "padding" if ends[wrong].max() <= len(own) else "subtree_end"
            self.say(rule, f"{detail}{_more(wrong)}", line, int(wrong[0]))
            return
        prefix = self._prefix(line, n)
        if prefix is None:
            return
        shape = self._shape(line, own[:n], ends[:n], *prefix)
        if shape is None:
            return
        self.shapes[line] = shape
        expected = np.append(shape.position()[shape.n_prefix :], 0 * padding)
        self.differ("position", "position_ids", line, expected)
        self._segments(line, shape, len(own))
        if self.images is not None:
            items = self.packs.table.column("mm_items")[line].as_py() or ()
            found = image_faults(items, own[:n], may_be_cut=True, known=self.images)
            for token, detail in found:
                self.say("mm_items", detail, line, token)

    def _number(self, name: str, line: int, absent: int) -> int:
        value = self.packs.table.column(name)[line].as_py()
        return absent if value is None else int(value)

    def _prefix(self, line: int, n: int) -> tuple[npt.NDArray[np.int32], Longs] | None:
        """Ids and ends of the prefix; None where it is wrong."""
        reach, source = (
            self.packs.list(name, line) for name in ("prefix_end", "prefix_source")
        )
        before = self._number("prefix_pack", line, -1)
        nothing = np.empty(0, np.int64)
        reach = nothing if reach is None else reach.astype(np.int64)
        source = nothing if source is None else source.astype(np.int64)
        if len(reach) != len(source):
            detail = f"prefix_source has {len(source)} elements, prefix_end"
            self.say("length", f"{detail} {len(reach)}", line)
            return None
        if before < 0 and not len(source):
            return np.empty(0, np.int32), nothing
        shape = self.shapes.get(before)
        if shape is None or before >= line:
            detail = f"prefix_pack is {before}: expected an earlier pack"
            self.say("prefix", f"{detail} without a violation", line)
            return None
        inside = (source >= 0) & (source < len(shape.ids))
        if not inside.all():
            detail = f"prefix_source has {source[~inside][0]}, and pack {before} has"
            self.say("range", f"{detail} {len(shape.ids)} tokens with its prefix", line)
            return None
        path = shape.path(int(source[-1])) if len(source) else source
        if len(path) != len(source) or (path != source).any():
            detail = f"prefix_source is not a path from a root in pack {before}"
            self.say("prefix", detail, line)
            return None
        if (reach < 1).any() or (reach > n).any() or (np.diff(reach) > 0).any():
            detail = "prefix_end does not fall from at most n_tokens to at least 1"
            self.say("prefix", detail, line)
            return None
        return shape.ids[source], reach

    def _shape(
        self,
        line: int,
        own: npt.NDArray[np.int32],
        own_ends: Longs,
        prefix: npt.NDArray[np.int32],
        reach: Longs,
    ) -> _Shape | None:
        """The runs of a pack; None where its subtrees are not nested."""
        n_prefix = len(prefix)
        ends = np.concatenate([reach, own_ends]) + n_prefix
        n = len(ends)
        wrong = np.flatnonzero(ends <= np.arange(n))
        if len(wrong):
            at = int(wrong[0]) - n_prefix
            detail = f"subtree_end is {ends[wrong[0]] - n_prefix}{_more(wrong)}"
            self.say("subtree_end", detail, line, at)
            return None
        start = np.flatnonzero(np.append([True] * (n > 0), ends[1:] != ends[:-1]))
        depth, above = np.zeros((2, len(start)), np.int64)
        open_runs: list[int] = []
        for run, token in enumerate(start.tolist()):
            while open_runs and ends[start[open_runs[-1]]] <= token:
                open_runs.pop()
            above[run] = top = open_runs[-1] if open_runs else -1
            if top >= 0:
                if ends[token] > ends[start[top]]:
                    detail = f"subtree_end is {ends[token] - n_prefix}, beyond that of"
                    where = start[top + 1] - 1 - n_prefix
                    detail = f"{detail} token {where} above it"
                    self.say("subtree_end", detail, line, token - n_prefix)
                    return None
                depth[run] = depth[top] + start[top + 1] - start[top]
            open_runs.append(run)
        return _Shape(
            np.concatenate([prefix, own]), ends, n_prefix, start, depth, above
        )

    def _segments(self, line: int, shape: _Shape, n_padded: int) -> None:
        """Judge segments, trees and sequences."""
        n_prefix, n = shape.n_prefix, len(shape.ids) - shape.n_prefix
        own = shape.start >= n_prefix
        starts = shape.start - n_prefix
        if n and n_prefix and starts[own][:1].tolist() != [0]:
            # the pack's first token continues the prefix
            own[shape.run_of(n_prefix)] = True
            starts = np.maximum(starts, 0)
        number = np.cumsum(own) - 1
        above = np.where((shape.above >= 0) & own[shape.above], number[shape.above], -1)
        self.differ("segment", "segment_start", line, starts[own])
        self.differ("segment", "segment_parent", line, above[own])
        roots = starts[own & (shape.above < 0)]
        if n and n_prefix:
            roots = np.union1d([0], roots)
        trees = self.packs.list("tree_start", line)
        self.differ("tree", "tree_start", line, roots)
        whose = self.packs.list("tree_session", line)
        if whose is not None and trees is not None and len(whose) != len(trees):
            detail = f"{len(whose)} elements of tree_session for {len(trees)} trees"
            self.say("length", detail, line)
        column = self.packs.table.column("cu_seqlens")
        if column.null_count == len(column):
            return
        given = self.packs.list("cu_seqlens", line)
        plain = not n_prefix and len(roots) == int(own.sum())
        if plain != (given is not None):
            detail = "cu_seqlens is null in a pack without a branch"
            if not plain:
                detail = "cu_seqlens is given in a pack with a branch or a prefix"
            self.say("cu_seqlens", detail, line)
        elif given is not None:
            bounds = np.append(roots, np.unique([n, n_padded]))
            self.differ("cu_seqlens", "cu_seqlens", line, bounds)

    def edges(self) -> None:
        """Judge the edges of all packs."""
        sources = self.packs.needed("edge_source")
        sound = np.ones(len(sources), np.bool_)
        for name, runs in self.packs.lists.items():
            if runs is None or not name.startswith("edge_"):
                continue
            for line in np.flatnonzero(sound & (runs.lengths != sources.lengths)):
                detail = f"{name} has {len(runs[line])} elements, edge_source"
                self.say("length", f"{detail} {len(sources[line])}", int(line))
                sound[line] = False
        edges = _Edges.read(self.packs, np.flatnonzero(sound[sources.owner]))
        edges = edges.take(self._in_range(edges))
        self._trained(edges)
        self._contexts(edges)
        self._values(edges)
        self._sessions(edges)

    def _each(
        self, rule: str, edges: "_Edges", bad: Bools, words: str, *values: Any
    ) -> None:
        """Note the first bad edge of each row in each pack, and how many follow."""
        at = np.flatnonzero(bad)
        keys = np.stack([edges.pack[at], edges.row[at]], axis=1)
        _, first, n = np.unique(keys, axis=0, return_index=True, return_counts=True)
        for k, count in zip(at[first].tolist(), n.tolist(), strict=True):
            detail = words.format(*(value[k] for value in values))
            detail += f", and {count - 1} more" if count > 1 else ""
            place = (edges.pack, edges.source, edges.row, edges.position)
            self.say(rule, detail, *(int(column[k]) for column in place))

    def _in_range(self, edges: "_Edges") -> Longs:
        """The edges that name a token, a row and a position that exist."""
        n_rows = len(self.rows.ids)
        n_tokens = self.packs.table.column("n_tokens").fill_null(2**31 - 1).to_numpy()
        n_tokens = np.minimum(n_tokens, self.packs.needed("input_ids").lengths)
        n_tokens = n_tokens[edges.pack]
        row_ok = (edges.row >= 0) & (edges.row < n_rows)
        n_row = np.append(self.rows.ids.lengths, 0)[np.where(row_ok, edges.row, -1)]
        position_ok = (edges.position >= 1) & (edges.position < n_row)
        source_ok = (edges.source >= 0) & (edges.source < n_tokens)
        for ok, words in (
            (source_ok, "edge_source is {}: the pack has {} tokens"),
            (row_ok, f"edge_row is {{2}}: there are {n_rows} rows"),
            (position_ok | ~row_ok, "edge_position is {3} in a row of {4} tokens"),
        ):
            for k in np.flatnonzero(~ok)[:1]:
                values = (edges.source, n_tokens, edges.row, edges.position, n_row)
                detail = words.format(*(value[k] for value in values))
                self.say(
                    "range", f"{detail}{_more(np.flatnonzero(~ok))}", int(edges.pack[k])
                )
        return np.flatnonzero(row_ok & position_ok & source_ok)

    def _trained(self, edges: "_Edges") -> None:
        """Judge that edges are the tokens that rows train, each once."""
        offsets = self.rows.ids.offsets
        wanted = self.rows.mask.copy()
        may = wanted
        observed = self._observed()
        if observed is not None:
            may = wanted | observed
            if f"edge_{_OBSERVED}" in self.packs.table.column_names:
                wanted = may
        at = offsets[edges.row] + edges.position
        self._each("not_trained", edges, ~may[at], "the row does not train it")
        counts = np.bincount(at, minlength=len(wanted))
        again = np.ones(len(at), np.bool_)
        again[np.unique(at, return_index=True)[1]] = False
        self._each("packed_twice", edges, again, "it has {} edges", counts[at])
        missing = np.flatnonzero(wanted & (counts == 0))
        rows = np.searchsorted(offsets, missing, side="right") - 1
        for row in np.unique(rows).tolist():
            tokens = missing[rows == row] - offsets[row]
            detail = f"the row trains it, and no pack has its edge{_more(tokens)}"
            self.say("not_packed", detail, None, None, row, int(tokens[0]))

    def _observed(self) -> Bools | None:
        """Where rows have an observation weight; None: they have no such column."""
        if _OBSERVED not in self.rows.table.column_names:
            return None
        weights = _per_token(self.rows, _OBSERVED)
        return None if weights is None else np.asarray(weights.fill_null(0)) != 0

    def _contexts(self, edges: "_Edges") -> None:
        """Judge the path to each edge's source, the longest of a row in a pack first."""
        order = np.lexsort((-edges.position, edges.row, edges.pack))
        keys = np.stack([edges.pack[order], edges.row[order]], axis=1)
        _, first = np.unique(keys, axis=0, return_index=True)
        wrong = np.full(len(edges.pack), -1)
        for group in np.split(order, first[1:]):
            if not len(group) or int(edges.pack[group[0]]) not in self.shapes:
                continue
            shape = self.shapes[int(edges.pack[group[0]])]
            row = self.rows.ids[edges.row[group[0]]]
            while len(group):
                source = edges.source[group] + shape.n_prefix
                path = shape.path(int(source[0]))
                before = row[: edges.position[group[0]]]
                n = min(len(path), len(before))
                differ = np.append(
                    shape.ids[path[:n]] != before[:n], len(path) != len(before)
                )
                departs = int(np.argmax(differ)) if differ.any() else len(row)
                at = np.minimum(edges.position[group] - 1, len(path) - 1)
                here = path[at] == source
                here[0] = True
                bad = here & (edges.position[group] > departs)
                if departs == n and len(path) != len(before):
                    bad[0] = True
                wrong[group[bad]] = departs
                group = group[~here]
        self._each(
            "context",
            edges,
            wrong >= 0,
            "its source attends other tokens than the row has, from position {} on",
            wrong,
        )
        given = edges.of(self.packs, "edge_target")
        if given is not None:
            at = self.rows.ids.offsets[edges.row] + edges.position
            expected = self.rows.ids.values[at]
            words = "edge_target is {}: the row has {}"
            self._each("target", edges, given != expected, words, given, expected)

    def _values(self, edges: "_Edges") -> None:
        """Judge what edges say of their row."""
        rows, table = self.rows, self.rows.table
        at = rows.ids.offsets[edges.row] + edges.position
        n_trained = np.bincount(rows.ids.owner, rows.mask, len(rows.ids))
        weight = table.column("row_weight").fill_null(0.0).to_numpy()
        if self.reduce == "mean":
            weight = weight / np.maximum(n_trained, 1)
        expected = np.where(rows.mask[at], weight[edges.row], 0.0)
        given = edges.of(self.packs, "edge_weight")
        if given is not None:
            bad = ~np.isclose(given, expected, rtol=1e-9, atol=0.0)
            words = "edge_weight is {}: expected {}"
            self._each("weight", edges, bad, words, given, expected)
        given = edges.of(self.packs, "edge_logprob")
        if given is not None:
            there = self.packs.given[edges.index(self.packs, "edge_logprob")]
            due, known = rows.logprobs[at], rows.given[at]
            bad = (there != known) | (there & (given != due))
            words = "edge_logprob is {}: the row has {}"
            shown = [
                pa.array(values, mask=~valid).to_pylist()
                for values, valid in ((given, there), (due, known))
            ]
            self._each("logprob", edges, bad, words, *shown)
        for name in self.packs.table.column_names:
            if name.startswith("edge_") and name not in PACKS.names:
                self._column(edges, name, at)

    def _column(self, edges: "_Edges", name: str, at: Longs) -> None:
        """Judge what edges say of a column of the rows."""
        source = name.removeprefix("edge_")
        if source not in self.rows.table.column_names:
            raise SchemaError(f"packs have {name!r}, and rows no column {source!r}")
        values = _per_token(self.rows, source)
        if values is None:
            values, at = self.rows.table.column(source), edges.row
        which = pa.array(edges.index(self.packs, name))
        given = take_values(list_values(self.packs.table.column(name)), which, name)
        wanted = take_values(values, pa.array(at), source)
        given, wanted = given.to_pylist(), wanted.to_pylist()
        differ = [repr(a) != repr(b) for a, b in zip(given, wanted, strict=True)]
        bad = np.array(differ, np.bool_)
        words = f"{name} is {{}}: the row has {{}}"
        self._each("column", edges, bad, words, given, wanted)

    def _sessions(self, edges: "_Edges") -> None:
        """Judge the sessions that packs and trees name."""
        names = self.rows.table.column("session_id").to_pylist()
        keys = np.unique(np.stack([edges.pack, edges.row], axis=1), axis=0)
        for line, row in keys.tolist():
            given = self.packs.list("sessions", line)
            if given is not None and names[row] not in given:
                self.say("sessions", "its session is not named", line, None, row)
        trees = self.packs.lists["tree_start"]
        whose = self.packs.lists["tree_session"]
        if trees is None or whose is None:
            return
        lines, first = np.unique(edges.pack, return_index=True)
        for line, mine in zip(
            lines.tolist(),
            np.split(np.arange(len(edges.pack)), first[1:]),
            strict=False,
        ):
            starts, owners = trees[line], whose[line]
            tree = np.searchsorted(starts, edges.source[mine], side="right") - 1
            pairs = np.stack([tree, edges.row[mine]], axis=1)
            for k, row in np.unique(pairs, axis=0).tolist():
                if not 0 <= k < len(owners):
                    continue
                if owners[k] is not None and owners[k] != names[row]:
                    detail = f"tree_session[{k}] is {owners[k]!r}"
                    self.say("sessions", detail, line, int(starts[k]), row)

    def table(self) -> pa.Table:
        """What was found, by pack; what is of no pack comes last."""
        last = np.iinfo(np.int64).max
        ordered = sorted(
            self.found, key=lambda one: last if one["pack"] is None else one["pack"]
        )
        return pa.Table.from_pylist(ordered, PACK_VIOLATIONS)


@dataclass(frozen=True, slots=True)
class _Edges:
    """Edges of all packs, by pack; shape (n_edges,)."""

    pack: Longs
    # which edge of its pack it is
    within: Longs
    source: Longs
    row: Longs
    position: Longs

    @classmethod
    def read(cls, packs: _Packs, which: Longs) -> Self:
        """The edges of these numbers, of packs whose lists are of one length."""
        sources = packs.needed("edge_source")
        pack = sources.owner[which]
        within = which - sources.offsets[pack]
        source, row, position = (
            np.asarray(runs.values[runs.offsets[pack] + within], np.int64)
            for runs in map(packs.needed, ("edge_source", "edge_row", "edge_position"))
        )
        return cls(pack, within, source, row, position)

    def index(self, packs: _Packs, name: str) -> Longs:
        """Where the edges are among the elements of a column's lists."""
        return packs.needed(name).offsets[self.pack] + self.within

    def of(self, packs: _Packs, name: str) -> npt.NDArray[Any] | None:
        """What a column has of the edges; None: the packs lack it."""
        runs = packs.lists[name]
        if runs is None:
            return None
        values: npt.NDArray[Any] = runs.values[self.index(packs, name)]
        return values

    def take(self, which: Longs) -> Self:
        """The edges at these places."""
        names = ("pack", "within", "source", "row", "position")
        return type(self)(*(getattr(self, name)[which] for name in names))


def _per_token(rows: FlatRows, name: str) -> pa.Array | None:
    """The values of a list column with one per token; None: it has one per row."""
    column = rows.table.column(name)
    if not is_list(column.type):
        return None
    n = np.asarray(pc.list_value_length(column).fill_null(-1), np.int64)
    if ((n >= 0) & (n != rows.ids.lengths)).any():
        return None
    values = list_values(column)
    at = np.full(int(rows.ids.offsets[-1]), -1)
    at[np.repeat(n >= 0, rows.ids.lengths)] = np.arange(len(values))
    return take_values(values, pa.array(at, mask=at < 0), name)


def _more(bad: Longs) -> str:
    """How many elements are wrong besides the first, in words."""
    return f", and {len(bad) - 1} more" if len(bad) > 1 else ""
