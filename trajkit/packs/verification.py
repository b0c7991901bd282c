"""`verify_packs`: whether packs have every trained token once, in the context of its row.

Nothing that `trajkit.pack` computes is used: a token's path is read off ``subtree_end`` and
compared with the rows, and the columns that follow from the trees are computed again.
"""

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit._arguments import check_choice, chosen_int
from trajkit.learn.loss import Reduce
from trajkit.packs import packing
from trajkit.packs.packing import OBSERVED
from trajkit.packs.segments import Runs
from trajkit.schema import PACK_VIOLATIONS, PACKS
from trajkit.schema.engine import Violation, as_lines, repeated
from trajkit.tables import canonical as tables
from trajkit.tables.canonical import TableLike
from trajkit.tables.ragged import Array, Bools, Longs, Ragged, positions
from trajkit.tables.take import list_values, take_rows, take_values, tuples
from trajkit.turns.flat_buffers import FlatRows, flat_rows
from trajkit.turns.images import image_faults, same_image

_NEEDED = ("input_ids", "subtree_end", "edge_source", "edge_row", "edge_position")
_ANY_PACKS = pa.schema(
    [one if one.name in _NEEDED else one.with_nullable(True) for one in PACKS],
    metadata=PACKS.metadata,
)
# the rule of a column; others of edges are under "column"
_RULES = {
    "position_ids": "position",
    "segment_start": "segment",
    "segment_parent": "segment",
    "tree_start": "tree",
    "cu_seqlens": "cu_seqlens",
    "edge_target": "target",
    "edge_weight": "weight",
    "edge_logprob": "logprob",
}


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
        `trajkit.schema.ROWS`: all rows that were packed.
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
    source = tables.as_table(packs)
    given = tables.canonical(source, _ANY_PACKS)
    table = tables.canonical_rows(tables.as_table(rows))
    check = _Check(given, flat_rows(table))
    scalars = tuples(given, "n_tokens", "prefix_pack", "mm_items")
    listed = table.column("mm_items").drop_null().to_pylist()
    images = {same_image(item) for items in listed for item in items}
    for line, (n_tokens, before, items) in enumerate(scalars):
        n = len(check.lists["input_ids"][line])
        if max_tokens is not None and n > max_tokens:
            detail = f"{n} tokens: expected at most {max_tokens}"
            check.report("max_tokens", detail, line)
        try:
            trees = check.read(line, n if n_tokens is None else n_tokens, before)
        except _FaultError as error:
            rule, detail, *token = error.args
            check.report(rule, detail, line, *token)
            continue
        check.trees[line] = trees
        check.derived(line, trees)
        if "mm_items" in source.column_names:
            own = trees.ids[trees.n_prefix :]
            found = image_faults(items or (), own, may_be_cut=True, known=images)
            for at, detail in found:
                check.report("mm_items", detail, line, at)
    edges = check.edges()
    check.trained(edges)
    check.contexts(edges)
    check.values(edges, reduce)
    last = np.iinfo(np.int64).max  # what is of no pack comes last
    check.found.sort(key=lambda one: last if one.pack is None else one.pack)
    return as_lines(check.found, PACK_VIOLATIONS)


class _FaultError(Exception):
    """A pack that cannot be read as trees: rule, detail and perhaps a token."""


class _Trees(NamedTuple):
    # the ids and runs of the prefix and of the pack's own tokens without padding
    ids: Array
    n_prefix: int
    runs: Runs


class _Edges(NamedTuple):
    """Edges that name a token, a row and a position that exist; shape (n_edges,)."""

    pack: Longs
    source: Longs
    row: Longs
    position: Longs
    # the token in ``rows.ids.values``
    at: Longs
    # their columns of packs
    columns: dict[str, pa.Array]


class _Check:
    def __init__(self, packs: pa.Table, rows: FlatRows) -> None:
        self.packs, self.rows = packs, rows
        self.row_keys = list(tuples(rows.table, "session_id", "row_index"))
        # of all packs; columns of which no pack has a list are absent
        self.lists = {
            field.name: Ragged.of(column, -1 if field.name in _INTEGERS else None)
            for field, column in zip(packs.schema, packs.columns, strict=True)
            if tables.is_list(field.type)
            if column.null_count < max(len(column), 1)
        }
        self.trees: dict[int, _Trees] = {}
        self.found: list[Violation] = []

    def report(
        self, rule: str, detail: str, pack: int | None, *where: int | None
    ) -> None:
        """Add a violation; where: a token of the pack, a row, a position in it."""
        token, row, row_token = (*where, None, None, None)[:3]
        session, index = (None, None) if row is None else self.row_keys[row]
        place = session, index, None, token, pack, row_token
        self.found.append(Violation(rule, detail, *place))

    def list(self, name: str, line: int) -> Any:
        """A list of a pack, or None."""
        if name not in self.lists or not self.packs.column(name)[line].is_valid:
            return None
        return self.lists[name][line]

    def read(self, line: int, n: int, before: int | None) -> _Trees:
        """The trees of a pack of ``n`` tokens, which may continue one before it."""
        own, ends = self.list("input_ids", line), self.list("subtree_end", line)
        for name in ("subtree_end", "position_ids"):
            given = self.list(name, line)
            if given is not None and len(given) != len(own):
                detail = f"{name} has {len(given)} elements for {len(own)} tokens"
                raise _FaultError("length", detail)
        if not 0 <= n <= len(own):
            raise _FaultError("range", f"n_tokens is {n}, and there are {len(own)} ids")
        for at, detail in _first(own < 0, "the id is {}", own):
            raise _FaultError("range", detail, at)
        padding = ends != np.arange(1, 1 + len(ends))
        padding[:n] = False
        for at, detail in _first(padding, "padding has subtree_end {}", ends):
            self.report("padding", detail, line, at)
        rule = "padding" if ends[:n].max(initial=0) <= len(own) else "subtree_end"
        words = f"subtree_end is {{}}, with padding from {n} on"
        for at, detail in _first(ends[:n] > n, words, ends):
            raise _FaultError(rule, detail, at)
        prefix, reach = self._prefix(line, n, before)
        ends = np.concatenate([reach, ends[:n]]).astype(np.int64) + len(prefix)
        runs = Runs.of(ends, len(prefix))
        if runs.fault is not None:
            raise _FaultError("subtree_end", *runs.fault[::-1])
        return _Trees(np.concatenate([prefix, own[:n]]), len(prefix), runs)

    def _prefix(self, line: int, n: int, before: int | None) -> tuple[Array, Array]:
        """The ids of a pack's prefix, and their subtree_end."""
        nothing = np.empty(0, np.int32)
        source, reach = (
            nothing if self.list(name, line) is None else self.list(name, line)
            for name in ("prefix_source", "prefix_end")
        )
        if len(reach) != len(source):
            detail = (
                f"prefix_source has {len(source)} elements, prefix_end {len(reach)}"
            )
            raise _FaultError("length", detail)
        if before is None and not len(source):
            return nothing, nothing
        if before not in self.trees:
            detail = (
                f"prefix_pack is {before}: expected an earlier pack without a fault"
            )
            raise _FaultError("prefix", detail)
        ids, _, runs = self.trees[before]
        outside = (source < 0) | (source >= len(ids))
        words = (
            f"prefix_source has {{}}, and pack {before} has {len(ids)} tokens with its"
        )
        for _, detail in _first(outside, words + " prefix", source):
            raise _FaultError("range", detail)
        run = (
            int(np.searchsorted(runs.start, source[-1], side="right")) - 1
            if len(source)
            else 0
        )
        if len(source) and not np.array_equal(runs.path(run)[: len(source)], source):
            detail = f"prefix_source is not a path from a root in pack {before}"
            raise _FaultError("prefix", detail)
        if (reach < 1).any() or (reach > n).any() or (np.diff(reach) > 0).any():
            detail = "prefix_end does not fall from at most n_tokens to at least 1"
            raise _FaultError("prefix", detail)
        return ids[source], reach

    def derived(self, line: int, trees: _Trees) -> None:
        """The columns that follow from the trees agree with them."""
        for name, expected in _derived(trees, len(self.list("input_ids", line))):
            given = self.list(name, line)
            if given is None and (name != "cu_seqlens" or name not in self.lists):
                continue
            given = () if given is None else given
            if np.array_equal(given, expected):
                continue
            pairs = enumerate(zip_longest(given, expected))
            bad = [(k, own, due) for k, (own, due) in pairs if own != due]
            if bad:
                k, own, due = bad[0]
                detail = f"{name}[{k}] is {own}: expected {due}{_more(len(bad))}"
                self.report(_RULES[name], detail, line)
        starts, whose = self.list("tree_start", line), self.list("tree_session", line)
        if starts is not None and whose is not None and len(whose) != len(starts):
            detail = f"{len(whose)} elements of tree_session for {len(starts)} trees"
            self.report("length", detail, line)

    def edges(self) -> _Edges:
        n_edges = self.lists["edge_source"].lengths
        sound = np.ones(len(n_edges), np.bool_)
        names = [name for name in self.lists if name.startswith("edge_")]
        for name in names:
            n = self.lists[name].lengths
            for line in np.flatnonzero(sound & (n != n_edges)).tolist():
                detail = f"{name} has {n[line]} elements, edge_source {n_edges[line]}"
                self.report("length", detail, line)
            sound &= n == n_edges
        lines = np.flatnonzero(sound)
        pack = np.repeat(lines, n_edges[lines])
        table = take_rows(self.packs.select(names), pa.array(lines))
        source, row, position = (
            list_values(table.column(name)).fill_null(-1).to_numpy().astype(np.int64)
            for name in ("edge_source", "edge_row", "edge_position")
        )
        ids = self.rows.ids
        n_tokens = self.packs.column("n_tokens").fill_null(2**31 - 1).to_numpy()
        n_tokens = np.minimum(n_tokens, self.lists["input_ids"].lengths)[pack]
        no_row = (row < 0) | (row >= len(ids))
        n_row = np.append(ids.lengths, 0)[np.where(no_row, -1, row)]
        no_source = (source < 0) | (source >= n_tokens)
        no_position = ~no_row & ((position < 1) | (position >= n_row))
        for bad, words, *values in (
            (no_source, "edge_source is {}: the pack has {} tokens", source, n_tokens),
            (no_row, f"edge_row is {{}}: there are {len(ids)} rows", row),
            (no_position, "edge_position is {} in a row of {} tokens", position, n_row),
        ):
            for k, detail in _first(bad, words, *values):
                self.report("range", detail, int(pack[k]))
        good = np.flatnonzero(~(no_source | no_row | no_position))
        pack, source, row, position = (x[good] for x in (pack, source, row, position))
        columns = {
            name: take_values(list_values(table.column(name)), pa.array(good), name)
            for name in names
        }
        at = ids.offsets[row] + position
        return _Edges(pack, source, row, position, at, columns)

    def _each(
        self, rule: str, edges: _Edges, bad: Bools, words: str, *values: Any
    ) -> None:
        """Report the first bad edge of each row in each pack, and how many follow."""
        at = np.flatnonzero(bad)
        keys = [edges.pack[at], edges.row[at]]
        _, first, n = np.unique(keys, axis=1, return_index=True, return_counts=True)
        for k, count in zip(at[first].tolist(), n.tolist(), strict=True):
            detail = words.format(*(value[k] for value in values)) + _more(count)
            where = (edges.pack, edges.source, edges.row, edges.position)
            self.report(rule, detail, *(int(column[k]) for column in where))

    def trained(self, edges: _Edges) -> None:
        """Every token that a row trains has one edge, and others have none."""
        ids, table = self.rows.ids, self.rows.table
        wanted = may = self.rows.mask
        if OBSERVED in table.column_names and packing.column_of(table, OBSERVED, "")[1]:
            may = wanted | packing.observed_tokens(table)
        if f"edge_{OBSERVED}" in self.packs.column_names:
            wanted = may
        self._each("not_trained", edges, ~may[edges.at], "the row does not train it")
        counts = np.bincount(edges.at, minlength=len(wanted))
        words, again = "it has {} edges", repeated(edges.at)
        self._each("packed_twice", edges, again, words, counts[edges.at])
        missing = np.flatnonzero(wanted & (counts == 0))
        rows, first, n = np.unique(
            ids.owner[missing], return_index=True, return_counts=True
        )
        tokens = missing[first] - ids.offsets[rows]
        for row, token, count in np.stack([rows, tokens, n], axis=1).tolist():
            detail = "the row trains it, and no pack has its edge" + _more(count)
            self.report("not_packed", detail, None, None, row, token)

    def contexts(self, edges: _Edges) -> None:
        """The path to each edge's source is the row before it, of a session named."""
        agree, n_seen = edges.position.copy(), edges.position.copy()
        lines, first = np.unique(edges.pack, return_index=True)
        groups = np.split(np.arange(len(edges.pack)), first[1:])
        for line, mine in zip(lines.tolist(), groups, strict=False):
            source, row = edges.source[mine], edges.row[mine]
            self._sessions(line, source, row)
            if line not in self.trees:
                continue
            ids, n_prefix, runs = self.trees[line]
            token = source + n_prefix
            run = np.searchsorted(runs.start, token, side="right") - 1
            n_seen[mine] = runs.depth[run] + token - runs.start[run] + 1
            keys, which = np.unique([run, row], axis=1, return_inverse=True)
            common = [
                _core.lcp(ids[runs.path(key)], self.rows.ids[of])
                for key, of in keys.T.tolist()
            ]
            agree[mine] = np.array(common)[which]
        agree = np.minimum(agree, np.minimum(n_seen, edges.position))
        bad = agree < np.maximum(n_seen, edges.position)
        words = "its source attends other tokens than the row has, from position {} on"
        self._each("context", edges, bad, words, agree)

    def _sessions(self, line: int, source: Longs, row: Longs) -> None:
        """The sessions of a pack and of its trees are those of its edges' rows."""
        named, starts, whose = (
            self.list(name, line) for name in ("sessions", "tree_start", "tree_session")
        )
        for k in np.unique(row).tolist() if named is not None else ():
            if self.row_keys[k][0] not in named.to_pylist():
                self.report("sessions", "its session is not named", line, None, k)
        if starts is None or whose is None:
            return
        tree = np.searchsorted(starts, source, side="right") - 1
        of_tree = dict(enumerate(whose.to_pylist()))
        for at, k in np.unique([tree, row], axis=1).T.tolist():
            if of_tree.get(at) not in (None, self.row_keys[k][0]):
                detail = f"tree_session[{at}] is {of_tree[at]!r}"
                self.report("sessions", detail, line, int(starts[at]), k)

    def values(self, edges: _Edges, reduce: Reduce) -> None:
        """The columns of edges are those of the rows."""
        rows, table, at = self.rows, self.rows.table, edges.at
        weight = table.column("row_weight").fill_null(0.0).to_numpy()
        if reduce == "mean":
            n_trained = np.bincount(rows.ids.owner, rows.mask, len(rows.ids))
            weight = weight / np.maximum(n_trained, 1)
        weights = np.where(rows.mask[at], weight[edges.row], 0.0)
        for name, given in edges.columns.items():
            if name in _NEEDED:
                continue
            if name == "edge_target":
                own = pa.array(rows.ids.values[at])
            elif name == "edge_logprob":
                own = pa.array(rows.logprobs[at], mask=~rows.given[at])
            elif name == "edge_weight":
                plain = given.fill_null(np.nan).to_numpy()
                close = np.isclose(plain, weights, rtol=1e-9, atol=0.0)
                own = pa.array(np.where(close, plain, weights))
            else:
                column = name.removeprefix("edge_")
                own = packing.edge_values(table, column, edges.row, edges.position)
            both = [given, own.cast(given.type)]
            codes = packing.value_codes(pa.chunked_array(both), name)
            bad = codes[: len(given)] != codes[len(given) :]
            shown = [column.to_pylist() if bad.any() else () for column in both]
            rule, words = _RULES.get(name, "column"), f"{name} is {{}}: expected {{}}"
            self._each(rule, edges, bad, words, *shown)


_INTEGERS = [
    one.name
    for one in PACKS
    if tables.is_list(one.type) and pa.types.is_integer(one.type.value_type)
]


def _derived(trees: _Trees, n_padded: int) -> Iterator[tuple[str, Any]]:
    """Name and value of each column that follows from the trees."""
    n_prefix, runs = trees.n_prefix, trees.runs
    n = len(trees.ids) - n_prefix
    position = positions(runs.depth, runs.stop - runs.start)[n_prefix:]
    yield "position_ids", np.append(position, np.zeros(n_padded - n, np.int64))
    # the pack's first token may continue the last run of the prefix
    own = runs.stop > n_prefix
    start = np.maximum(runs.start - n_prefix, 0)
    number = np.cumsum(own) - 1
    hangs = (runs.above >= 0) & own[runs.above]
    yield "segment_start", start[own]
    yield "segment_parent", np.where(hangs, number[runs.above], -1)[own]
    roots = start[own & (runs.above < 0)]
    if n and n_prefix:
        roots = np.union1d([0], roots)
    yield "tree_start", roots
    # no branch and no prefix
    plain = not n_prefix and len(roots) == len(runs.start)
    yield "cu_seqlens", np.append(roots, np.unique([n, n_padded])) if plain else ()


def _first(bad: Bools, words: str, *values: Array) -> list[tuple[int, str]]:
    """The first element that is bad, with its values and how many more there are."""
    at = np.flatnonzero(bad)
    return [
        (k, words.format(*(value[k] for value in values)) + _more(len(at)))
        for k in at[:1].tolist()
    ]


def _more(n: int) -> str:
    return f", and {n - 1} more" if n > 1 else ""
