"""`verify_packs`: whether packs have every trained token once, in the context of its row.

Nothing that `trajkit.pack` computes is used: a token's path is read off ``subtree_end`` and
compared with the rows, and the columns that follow from the trees are computed again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit._arguments import check_choice, chosen_int
from trajkit.errors import SchemaError
from trajkit.learn.loss import Reduce
from trajkit.packs.forest import OBSERVED, edge_values, per_token, value_codes
from trajkit.schema import PACK_VIOLATIONS, PACKS
from trajkit.schema.engine import Violation, as_lines
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import (
    TableLike,
    as_table,
    canonical,
    canonical_rows,
    is_list,
)
from trajkit.tables.ragged import Longs, Ragged, offsets_of, positions
from trajkit.tables.take import list_values, take_values
from trajkit.turns.flat_buffers import FlatRows, flat_rows
from trajkit.turns.images import Image, image_faults, same_image

Bools: TypeAlias = npt.NDArray[np.bool_]
Array: TypeAlias = npt.NDArray[Any]

_NEEDED = ("input_ids", "subtree_end", "edge_source", "edge_row", "edge_position")
_ANY_PACKS = pa.schema(
    [one if one.name in _NEEDED else one.with_nullable(True) for one in PACKS],
    metadata=PACKS.metadata,
)
_NOTHING = np.empty(0, np.int64)


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
    table = canonical_rows(as_table(rows))
    source = as_table(packs)
    given = canonical(source, _ANY_PACKS)
    images = None
    if "mm_items" in source.column_names:
        listed = table.column("mm_items").to_pylist()
        images = {same_image(item) for items in listed for item in items or ()}
    check = _Check(given, flat_rows(table), images)
    for line in range(given.num_rows):
        check.pack(line, max_tokens)
    check.edges(reduce)
    last = np.iinfo(np.int64).max  # what is of no pack comes last
    check.found.sort(key=lambda one: last if one.pack is None else one.pack)
    return as_lines(check.found, PACK_VIOLATIONS)


class _FaultError(Exception):
    def __init__(self, rule: str, detail: str, token: int | None = None) -> None:
        super().__init__(rule, detail, token)
        self.fault = rule, detail, token


@dataclass(frozen=True, slots=True)
class _Trees:
    """A pack as runs of tokens, prefix first, that share one subtree_end.

    A run has no branch inside: the first token of the next one leaves it at its last.
    """

    ids: Array
    # tokens of the prefix
    n_prefix: int
    # shape (n_runs,): first token, its position, and the run above; -1: none
    start: Longs
    depth: Longs
    above: Longs

    def path(self, token: int) -> Longs:
        """The tokens that one attends, from the root to itself."""
        parts: list[Longs] = []
        run = int(np.searchsorted(self.start, token, side="right")) - 1
        stop = token + 1
        while run >= 0:
            parts.append(np.arange(self.start[run], stop))
            run = int(self.above[run])
            # the next run leaves this one at its last token
            stop = int(self.start[run + 1])
        return np.concatenate(parts[::-1])

    def derived(self, n_padded: int) -> Iterator[tuple[str, str, Array | None]]:
        """Rule, name and value of each column that follows from the trees."""
        n_prefix, n = self.n_prefix, len(self.ids) - self.n_prefix
        sizes = np.diff(np.append(self.start, len(self.ids)))
        position = positions(self.depth, sizes)[n_prefix:]
        yield "position", "position_ids", np.append(position, np.zeros(n_padded - n))
        own = self.start >= n_prefix
        if n and n_prefix and n_prefix not in self.start:
            # the pack's first token continues the prefix
            own[np.searchsorted(self.start, n_prefix) - 1] = True
        starts = np.maximum(self.start - n_prefix, 0)[own]
        number = np.cumsum(own) - 1
        above = np.where((self.above >= 0) & own[self.above], number[self.above], -1)
        yield "segment", "segment_start", starts
        yield "segment", "segment_parent", above[own]
        roots = np.maximum(self.start - n_prefix, 0)[own & (self.above < 0)]
        if n and n_prefix:
            roots = np.union1d([0], roots)
        yield "tree", "tree_start", roots
        # no branch and no prefix
        plain = not n_prefix and len(roots) == len(starts)
        bounds = np.append(roots, np.unique([n, n_padded])) if plain else None
        yield "cu_seqlens", "cu_seqlens", bounds


class _Edges(NamedTuple):
    """Edges of all packs, by pack; shape (n_edges,)."""

    pack: Longs
    # which edge of its pack it is
    within: Longs
    source: Longs
    row: Longs
    position: Longs
    # the token in ``rows.ids.values``
    at: Longs


class _Check:
    def __init__(
        self, table: pa.Table, rows: FlatRows, images: set[Image] | None
    ) -> None:
        self.table, self.rows = table, rows
        # those of the rows; None: the packs lack the column mm_items
        self.images = images
        # by column: the lists of all packs. Columns of which no pack has one are absent
        self.lists = {
            name: runs
            for name in table.column_names
            if is_list(table.schema.field(name).type)
            if (runs := _runs(table.column(name))) is not None
        }
        self.trees: dict[int, _Trees] = {}
        self.found: list[Violation] = []

    def report(
        self,
        rule: str,
        detail: str,
        pack: int | None,
        token: int | None = None,
        row: int | None = None,
        row_token: int | None = None,
    ) -> None:
        session = row_index = None
        if row is not None:
            session = self.rows.text("session_id", row)
            row_index = self.rows.number("row_index", row)
        self.found.append(
            Violation(
                rule,
                detail,
                session,
                row_index,
                token=token,
                pack=pack,
                row_token=row_token,
            )
        )

    def list(self, name: str, line: int) -> Array | None:
        if name not in self.lists or not self.table.column(name)[line].is_valid:
            return None
        values: npt.NDArray[Any] = self.lists[name][line]
        return values

    def number(self, name: str, line: int, absent: int) -> int:
        value = self.table.column(name)[line].as_py()
        return absent if value is None else int(value)

    def pack(self, line: int, max_tokens: int | None) -> None:
        n_padded = len(self.lists["input_ids"][line])
        if max_tokens is not None and n_padded > max_tokens:
            detail = f"{n_padded} tokens: expected at most {max_tokens}"
            self.report("max_tokens", detail, line)
        try:
            trees = self._trees(line)
        except _FaultError as error:
            rule, detail, token = error.fault
            self.report(rule, detail, line, token)
            return
        self.trees[line] = trees
        for rule, name, expected in trees.derived(n_padded):
            self._compare(line, rule, name, expected)
        starts, whose = self.list("tree_start", line), self.list("tree_session", line)
        if starts is not None and whose is not None and len(whose) != len(starts):
            detail = f"{len(whose)} elements of tree_session for {len(starts)} trees"
            self.report("length", detail, line)
        if self.images is not None:
            items = self.table.column("mm_items")[line].as_py() or ()
            own = trees.ids[trees.n_prefix :]
            found = image_faults(items, own, may_be_cut=True, known=self.images)
            for token, detail in found:
                self.report("mm_items", detail, line, token)

    def _compare(self, line: int, rule: str, name: str, expected: Array | None) -> None:
        given = self.list(name, line)
        if name not in self.lists or (given is None and name != "cu_seqlens"):
            return
        if given is None or expected is None:
            if given is not None:
                detail = f"{name} is given in a pack with a branch or a prefix"
                self.report(rule, detail, line)
            elif expected is not None:
                self.report(rule, f"{name} is null in a pack without a branch", line)
        elif len(given) != len(expected):
            detail = f"{name} has {len(given)} elements: expected {len(expected)}"
            self.report(rule, detail, line)
        elif len(bad := np.flatnonzero(given != expected)):
            k = bad[0]
            detail = f"{name}[{k}] is {given[k]}: expected {int(expected[k])}"
            self.report(rule, f"{detail}{_more(bad)}", line)

    def _trees(self, line: int) -> _Trees:
        own = self.lists["input_ids"][line]
        ends = self.lists["subtree_end"][line].astype(np.int64)
        n = self.number("n_tokens", line, len(own))
        for name in ("subtree_end", "position_ids"):
            given = self.list(name, line)
            if given is not None and len(given) != len(own):
                detail = f"{name} has {len(given)} elements for {len(own)} tokens"
                raise _FaultError("length", detail)
        if not 0 <= n <= len(own):
            raise _FaultError("range", f"n_tokens is {n}, and there are {len(own)} ids")
        for at in np.flatnonzero(own < 0).tolist():
            raise _FaultError("range", f"the id is {own[at]}", at)
        padding = np.arange(n, len(own))
        wrong = padding[ends[n:] != padding + 1]
        if len(wrong):
            detail = f"padding has subtree_end {ends[wrong[0]]}{_more(wrong)}"
            self.report("padding", detail, line, int(wrong[0]))
        wrong = np.flatnonzero(ends[:n] > n)
        if len(wrong):
            rule = "padding" if ends[wrong].max() <= len(own) else "subtree_end"
            detail = f"subtree_end is {ends[wrong[0]]}, with padding from {n} on"
            raise _FaultError(rule, f"{detail}{_more(wrong)}", int(wrong[0]))
        prefix, reach = self._prefix(line, n)
        n_prefix = len(prefix)
        ends = np.concatenate([reach, ends[:n]]) + n_prefix
        wrong = np.flatnonzero(ends <= np.arange(len(ends)))
        if len(wrong):
            detail = f"subtree_end is {ends[wrong[0]] - n_prefix}{_more(wrong)}"
            raise _FaultError("subtree_end", detail, int(wrong[0]) - n_prefix)
        start = np.flatnonzero(np.append([True] * (len(ends) > 0), np.diff(ends) != 0))
        depth, above = np.zeros((2, len(start)), np.int64)
        open_runs: list[int] = []
        for run, token in enumerate(start.tolist()):
            while open_runs and ends[start[open_runs[-1]]] <= token:
                open_runs.pop()
            above[run] = top = open_runs[-1] if open_runs else -1
            if top >= 0:
                if ends[token] > ends[start[top]]:
                    where = start[top + 1] - 1 - n_prefix
                    detail = (
                        f"subtree_end is {ends[token] - n_prefix}, beyond that of token "
                        f"{where} above it"
                    )
                    raise _FaultError("subtree_end", detail, token - n_prefix)
                depth[run] = depth[top] + start[top + 1] - start[top]
            open_runs.append(run)
        ids = np.concatenate([prefix, own[:n]])
        return _Trees(ids, n_prefix, start, depth, above)

    def _prefix(self, line: int, n: int) -> tuple[Array, Longs]:
        """The ids of a pack's prefix, and their subtree_end."""
        reach, source = (
            _NOTHING if (given := self.list(name, line)) is None else given.astype(int)
            for name in ("prefix_end", "prefix_source")
        )
        before = self.number("prefix_pack", line, -1)
        if len(reach) != len(source):
            detail = f"prefix_source has {len(source)} elements, prefix_end"
            raise _FaultError("length", f"{detail} {len(reach)}")
        if before < 0 and not len(source):
            return _NOTHING, _NOTHING
        trees = self.trees.get(before) if before < line else None
        if trees is None:
            detail = f"prefix_pack is {before}: expected an earlier pack"
            raise _FaultError("prefix", f"{detail} without a violation")
        outside = source[(source < 0) | (source >= len(trees.ids))]
        if len(outside):
            detail = f"prefix_source has {outside[0]}, and pack {before} has"
            raise _FaultError(
                "range", f"{detail} {len(trees.ids)} tokens with its prefix"
            )
        if len(source) and not np.array_equal(trees.path(int(source[-1])), source):
            detail = f"prefix_source is not a path from a root in pack {before}"
            raise _FaultError("prefix", detail)
        if (reach < 1).any() or (reach > n).any() or (np.diff(reach) > 0).any():
            detail = "prefix_end does not fall from at most n_tokens to at least 1"
            raise _FaultError("prefix", detail)
        return trees.ids[source], reach

    def edges(self, reduce: Reduce) -> None:
        edges = self._edges()
        self._trained(edges)
        self._contexts(edges)
        self._values(edges, reduce)
        self._sessions(edges)

    def _edges(self) -> _Edges:
        """The edges that name a token, a row and a position that exist."""
        sources = self.lists["edge_source"]
        sound = np.ones(len(sources), np.bool_)
        for name, runs in self.lists.items():
            if not name.startswith("edge_"):
                continue
            for line in np.flatnonzero(sound & (runs.lengths != sources.lengths)):
                detail = f"{name} has {len(runs[line])} elements, edge_source"
                self.report("length", f"{detail} {len(sources[line])}", int(line))
                sound[line] = False
        which = np.flatnonzero(sound[sources.owner])
        pack = sources.owner[which]
        within = which - sources.offsets[pack]
        names = ("edge_source", "edge_row", "edge_position")
        source, row, position = (self._of(pack, within, n).astype(int) for n in names)
        ids = self.rows.ids
        n_tokens = self.table.column("n_tokens").fill_null(2**31 - 1).to_numpy()
        n_tokens = np.minimum(n_tokens, self.lists["input_ids"].lengths)[pack]
        row_ok = (row >= 0) & (row < len(ids))
        n_row = np.append(ids.lengths, 0)[np.where(row_ok, row, -1)]
        position_ok = (position >= 1) & (position < n_row)
        source_ok = (source >= 0) & (source < n_tokens)
        for ok, words in (
            (source_ok, "edge_source is {}: the pack has {} tokens"),
            (row_ok, f"edge_row is {{2}}: there are {len(ids)} rows"),
            (position_ok | ~row_ok, "edge_position is {3} in a row of {4} tokens"),
        ):
            bad = np.flatnonzero(~ok)
            for k in bad[:1]:
                values = (source, n_tokens, row, position, n_row)
                detail = words.format(*(value[k] for value in values))
                self.report("range", f"{detail}{_more(bad)}", int(pack[k]))
        good = row_ok & position_ok & source_ok
        pack, within, source, row, position = (
            column[good] for column in (pack, within, source, row, position)
        )
        return _Edges(pack, within, source, row, position, ids.offsets[row] + position)

    def _of(self, pack: Longs, within: Longs, name: str) -> Array:
        runs = self.lists[name]
        values: Array = runs.values[runs.offsets[pack] + within]
        return values

    def _each(
        self, rule: str, edges: _Edges, bad: Bools, words: str, *values: Any
    ) -> None:
        """Report the first bad edge of each row in each pack, and how many follow."""
        at = np.flatnonzero(bad)
        keys = np.stack([edges.pack[at], edges.row[at]], axis=1)
        _, first, n = np.unique(keys, axis=0, return_index=True, return_counts=True)
        for k, count in zip(at[first].tolist(), n.tolist(), strict=True):
            detail = words.format(*(value[k] for value in values))
            detail += f", and {count - 1} more" if count > 1 else ""
            where = (edges.pack, edges.source, edges.row, edges.position)
            self.report(rule, detail, *(int(column[k]) for column in where))

    def _trained(self, edges: _Edges) -> None:
        offsets = self.rows.ids.offsets
        wanted = may = self.rows.mask
        if OBSERVED in self.rows.table.column_names:
            ids, table = self.rows.ids, self.rows.table
            if per_token(table, OBSERVED, ids.lengths):
                within = np.arange(len(wanted)) - ids.offsets[ids.owner]
                weights = edge_values(table, OBSERVED, ids.lengths, ids.owner, within)
                may = wanted | (np.asarray(weights.fill_null(0)) != 0)
            if f"edge_{OBSERVED}" in self.table.column_names:
                wanted = may
        self._each("not_trained", edges, ~may[edges.at], "the row does not train it")
        counts = np.bincount(edges.at, minlength=len(wanted))
        again = np.ones(len(edges.at), np.bool_)
        again[np.unique(edges.at, return_index=True)[1]] = False
        self._each("packed_twice", edges, again, "it has {} edges", counts[edges.at])
        missing = np.flatnonzero(wanted & (counts == 0))
        rows = np.searchsorted(offsets, missing, side="right") - 1
        for row in np.unique(rows).tolist():
            tokens = missing[rows == row] - offsets[row]
            detail = f"the row trains it, and no pack has its edge{_more(tokens)}"
            self.report("not_packed", detail, None, None, row, int(tokens[0]))

    def _contexts(self, edges: _Edges) -> None:
        """The path to each edge's source is the row, the longest path of a row first."""
        order = np.lexsort((-edges.position, edges.row, edges.pack))
        keys = np.stack([edges.pack[order], edges.row[order]], axis=1)
        _, first = np.unique(keys, axis=0, return_index=True)
        wrong = np.full(len(edges.pack), -1)
        for group in np.split(order, first[1:]):
            trees = self.trees.get(int(edges.pack[group[0]])) if len(group) else None
            while trees is not None and len(group):
                row = self.rows.ids[edges.row[group[0]]]
                source = edges.source[group] + trees.n_prefix
                path = trees.path(int(source[0]))
                before = row[: edges.position[group[0]]]
                n = min(len(path), len(before))
                differ = np.flatnonzero(trees.ids[path[:n]] != before[:n])
                departs = int(differ[0]) if len(differ) else n
                # the edges whose sources are on this path
                at = np.minimum(edges.position[group] - 1, len(path) - 1)
                here = path[at] == source
                here[0] = True
                bad = here & (edges.position[group] > departs)
                bad[0] |= len(path) != len(before)
                wrong[group[bad]] = departs
                group = group[~here]
        words = "its source attends other tokens than the row has, from position {} on"
        self._each("context", edges, wrong >= 0, words, wrong)

    def _values(self, edges: _Edges, reduce: Reduce) -> None:
        rows, table, at = self.rows, self.rows.table, edges.at
        n_trained = np.bincount(rows.ids.owner, rows.mask, len(rows.ids))
        weight = table.column("row_weight").fill_null(0.0).to_numpy()
        if reduce == "mean":
            weight = weight / np.maximum(n_trained, 1)
        weights = np.where(rows.mask[at], weight[edges.row], 0.0)
        if "edge_target" in self.lists:
            given, due = self._of(*edges[:2], "edge_target"), rows.ids.values[at]
            words = "edge_target is {}: the row has {}"
            self._each("target", edges, given != due, words, given, due)
        if "edge_weight" in self.lists:
            given = self._of(*edges[:2], "edge_weight")
            bad = ~np.isclose(given, weights, rtol=1e-9, atol=0.0)
            words = "edge_weight is {}: expected {}"
            self._each("weight", edges, bad, words, given, weights)
        for name in self.table.column_names:
            if not name.startswith("edge_") or name not in self.lists:
                continue
            own = name.removeprefix("edge_")
            if name == "edge_logprob":
                due = pa.array(rows.logprobs[at], mask=~rows.given[at])
                self._column(edges, "logprob", name, due)
            elif name not in PACKS.names:
                if own not in table.column_names:
                    raise SchemaError(
                        f"packs have {name!r}, and rows no column {own!r}"
                    )
                where = rows.ids.lengths, edges.row, edges.position
                due = edge_values(table, own, *where)
                self._column(edges, "column", name, due)

    def _column(self, edges: _Edges, rule: str, name: str, due: Any) -> None:
        which = self.lists[name].offsets[edges.pack] + edges.within
        values = list_values(self.table.column(name))
        given = take_values(values, pa.array(which), name)
        words = f"{name} is {{}}: the row has {{}}"
        both = value_codes(pa.chunked_array([given, due.cast(given.type)]), name)
        bad = both[: len(given)] != both[len(given) :]
        shown = [[None] * len(bad)] * 2
        if bad.any():
            shown = [given.to_pylist(), due.to_pylist()]
        self._each(rule, edges, bad, words, *shown)

    def _sessions(self, edges: _Edges) -> None:
        names = self.rows.table.column("session_id").to_pylist()
        keys = np.unique(np.stack([edges.pack, edges.row], axis=1), axis=0)
        for line, row in keys.tolist():
            given = self.list("sessions", line)
            if given is not None and names[row] not in given:
                self.report("sessions", "its session is not named", line, None, row)
        lines, first = np.unique(edges.pack, return_index=True)
        groups = np.split(np.arange(len(edges.pack)), first[1:])
        for line, mine in zip(lines.tolist(), groups, strict=False):
            starts, whose = (self.list(f"tree_{n}", line) for n in ("start", "session"))
            if starts is None or whose is None:
                continue
            tree = np.searchsorted(starts, edges.source[mine], side="right") - 1
            pairs = np.unique(np.stack([tree, edges.row[mine]], axis=1), axis=0)
            for k, row in pairs.tolist():
                if 0 <= k < len(whose) and whose[k] not in (None, names[row]):
                    detail = f"tree_session[{k}] is {whose[k]!r}"
                    self.report("sessions", detail, line, int(starts[k]), row)


def _runs(column: pa.ChunkedArray) -> Ragged | None:
    """Lists end to end, null numbers as -1; None where no pack has one."""
    if column.null_count == len(column) > 0:
        return None
    n = np.asarray(pc.list_value_length(column).fill_null(0), np.int64)
    values = list_values(column)
    if pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
        values = values.fill_null(-1)
    return Ragged(values.to_numpy(zero_copy_only=False), offsets_of(n))


def _more(bad: Longs) -> str:
    """How many elements are wrong besides the first, in words."""
    return f", and {len(bad) - 1} more" if len(bad) > 1 else ""
