"""`verify_packs`: whether packs have every trained token once, in the context of its row.

Nothing that `trajkit.pack` computes is used: a token's path is read off ``subtree_end`` and
compared with the rows, and positions are counted again.
"""

from typing import Any, NamedTuple, TypeAlias

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
from trajkit.tables.columns import take_values, tuples
from trajkit.tables.ragged import Array, Bools, Longs, Ragged, positions
from trajkit.turns.flat_buffers import flat_rows
from trajkit.turns.images import image_faults, same_image

# a line of packs: an array for lists of integers, None for null
_Pack: TypeAlias = dict[str, Any]

_NEEDED = ("input_ids", "subtree_end", "edge_source", "edge_row", "edge_position")
_PREFIX = ("prefix_pack", "prefix_source", "prefix_end")
_AS_LONG = (
    ("subtree_end", "input_ids"),
    ("position_ids", "input_ids"),
    ("prefix_end", "prefix_source"),
)
_ANY_PACKS = pa.schema(
    [one if one.name in _NEEDED else one.with_nullable(True) for one in PACKS],
    metadata=PACKS.metadata,
)


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
    packs, rows : table
        As for `trajkit.unpack`, which also says what is raised. Packs of another system
        need input_ids, subtree_end, edge_source, edge_row and edge_position alone.
    max_tokens : int, optional
        Tokens that a pack may have, with padding. None: any number.
    reduce : {"mean", "sum"}
        As for `trajkit.pack`.

    Returns
    -------
    Table
        `trajkit.schema.PACK_VIOLATIONS`, by pack; empty where all is well.
    """
    if max_tokens is not None:
        max_tokens = chosen_int("max_tokens", max_tokens, 1)
    check_choice("reduce", reduce, Reduce)
    source = tables.as_table(packs)
    given = tables.canonical(source, _ANY_PACKS)
    table = tables.canonical_rows(tables.as_table(rows))
    check = _Check(given, table, source.column_names)
    for line in range(len(given)):
        check.pack(line, max_tokens)
    check.trained()
    check.contexts()
    check.values(reduce)
    last = np.iinfo(np.int64).max  # what is of no pack comes last
    check.found.sort(key=lambda one: last if one.pack is None else one.pack)
    return as_lines(check.found, PACK_VIOLATIONS)


class _FaultError(Exception):
    """A pack that cannot be read as trees: rule, detail and perhaps a token."""


def _refuse(rule: str, bad: Bools, words: str, value: Array) -> None:
    for at, detail in _first(bad, words, value):
        raise _FaultError(rule, detail, at)


class _Trees(NamedTuple):
    # the ids and runs of the prefix and of the pack's own tokens without padding
    ids: Array
    n_prefix: int
    runs: Runs

    def depths(self, n: int) -> Array:
        """How many tokens each of the pack's own attends; 0 for padding, up to n."""
        every = positions(self.runs.depth, self.runs.stop - self.runs.start)
        depths = np.zeros(n, np.int64)
        depths[: len(every) - self.n_prefix] = every[self.n_prefix :]
        return depths


class _Check:
    def __init__(self, packs: pa.Table, rows: pa.Table, given: list[str]) -> None:
        self.table, self.rows = packs, flat_rows(rows)
        self.row_keys = list(tuples(rows, "session_id", "row_index"))
        plain = [name for name in PACKS.names if not name.startswith("edge_")]
        columns = [_elements(packs.column(name)) for name in plain]
        self.packs: list[_Pack] = [
            dict(zip(plain, values, strict=True))
            for values in zip(*columns, strict=True)
        ]
        items = rows.column("mm_items").drop_null().to_pylist()
        self.images = {same_image(item) for listed in items for item in listed}
        self.given = given
        self.trees: dict[int, _Trees] = {}
        self.found: list[Violation] = []
        self._read_edges()

    def report(
        self, rule: str, detail: str, pack: int | None, *where: int | None
    ) -> None:
        """Add a violation; where: a token of the pack, a row, a position in it."""
        token, row, row_token = (*where, None, None, None)[:3]
        session, index = (None, None) if row is None else self.row_keys[row]
        place = session, index, None, token, pack, row_token
        self.found.append(Violation(rule, detail, *place))

    def _read_edges(self) -> None:
        """Keep the edges that name a token, a row and a position that exist.

        ``at`` is their token in ``rows.ids.values``, ``edges`` their columns of packs.
        """
        columns = {name: self.table.column(name) for name in self.table.column_names}
        lists = {
            name: Ragged.of(column)
            for name, column in columns.items()
            if name.startswith("edge_") and not column.null_count == len(column) > 0
        }
        n_edges = lists["edge_source"].lengths
        sound = np.ones(len(n_edges), np.bool_)
        for name, runs in lists.items():
            n = runs.lengths
            for line in np.flatnonzero(sound & (n != n_edges)).tolist():
                detail = f"{name} has {n[line]} elements, edge_source {n_edges[line]}"
                self.report("length", detail, line)
                sound[line] = False
        lines = np.flatnonzero(sound)
        pack = np.repeat(lines, n_edges[lines])
        where = {
            name: positions(runs.offsets[lines], n_edges[lines])
            for name, runs in lists.items()
        }
        source, row, position = (
            lists[name].values.fill_null(-1).to_numpy()[where[name]].astype(np.int64)
            for name in ("edge_source", "edge_row", "edge_position")
        )
        ids = self.rows.ids
        sizes = [len(one["input_ids"][: one["n_tokens"]]) for one in self.packs]
        n_tokens = np.array(sizes, np.int64)[pack]
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
        self.source, self.row, self.position = source[good], row[good], position[good]
        self.pack_of, self.at = pack[good], ids.offsets[self.row] + self.position
        self.edges = {
            name: take_values(runs.values, pa.array(where[name][good]), name)
            for name, runs in lists.items()
        }

    def pack(self, line: int, max_tokens: int | None) -> None:
        """A pack is a forest, and its columns follow from that."""
        pack = self.packs[line]
        n = len(pack["input_ids"])
        if max_tokens is not None and n > max_tokens:
            detail = f"{n} tokens: expected at most {max_tokens}"
            self.report("max_tokens", detail, line)
        try:
            trees = self.trees[line] = self._read(pack)
        except _FaultError as error:
            rule, detail, *token = error.args
            self.report(rule, detail, line, *token)
            return
        given = pack["position_ids"]
        if given is not None:
            due, words = trees.depths(n), "position_ids is {}: expected {}"
            for k, detail in _first(given != due, words, given, due):
                self.report("position", detail, line, k)
        if "mm_items" in self.given:
            own, items = trees.ids[trees.n_prefix :], pack["mm_items"] or ()
            found = image_faults(items, own, may_be_cut=True, known=self.images)
            for at, detail in found:
                self.report("mm_items", detail, line, at)

    def _read(self, pack: _Pack) -> _Trees:
        for name, other in _AS_LONG:
            own, due = pack[name], pack[other]
            if own is not None and due is not None and len(own) != len(due):
                detail = f"{name} has {len(own)} elements, {other} {len(due)}"
                raise _FaultError("length", detail)
        ids, ends = pack["input_ids"], pack["subtree_end"]
        n = len(ids) if pack["n_tokens"] is None else pack["n_tokens"]
        if not 0 <= n <= len(ids):
            raise _FaultError("range", f"n_tokens is {n}, and there are {len(ids)} ids")
        _refuse("range", ids < 0, "the id is {}", ids)
        token = np.arange(len(ids))
        spans = (ends > n) & (ends <= len(ids))
        wrong = np.where(token < n, spans, ends != token + 1)
        _refuse(
            "padding", wrong, f"subtree_end is {{}}, with padding from {n} on", ends
        )
        prefix, reach = self._prefix(pack, n)
        ends = np.concatenate([reach, ends[:n]]).astype(np.int64) + len(prefix)
        runs = Runs.of(ends, len(prefix))
        if runs.fault is not None:
            raise _FaultError("subtree_end", *runs.fault[::-1])
        return _Trees(np.concatenate([prefix, ids[:n]]), len(prefix), runs)

    def _prefix(self, pack: _Pack, n: int) -> tuple[Array, Array]:
        """The ids of a pack's prefix, and their subtree_end."""
        before, source, reach = map(pack.get, _PREFIX)
        if source is None or reach is None:
            source = reach = np.empty(0, np.int32)
        if before is None and not len(source):
            return source, reach
        if before not in self.trees:
            detail = f"prefix_pack is {before}: expected an earlier one without a fault"
            raise _FaultError("prefix", detail)
        ids, _, runs = self.trees[before]
        words = f"prefix_source has {{}}: pack {before} with its prefix has {len(ids)}"
        for _, detail in _first((source < 0) | (source >= len(ids)), words, source):
            raise _FaultError("range", detail)
        path = runs.path(int(runs.at(source[-1:]).sum())) if len(source) else source
        if not np.array_equal(path[: len(source)], source):
            detail = f"prefix_source is not a path from a root in pack {before}"
            raise _FaultError("prefix", detail)
        if (reach < 1).any() or (reach > n).any() or (np.diff(reach) > 0).any():
            detail = "prefix_end does not fall from at most n_tokens to at least 1"
            raise _FaultError("prefix", detail)
        return ids[source], reach

    def _each(self, rule: str, bad: Bools, words: str, *values: Any) -> None:
        """Report the first bad edge of each row in each pack, and how many follow."""
        at = np.flatnonzero(bad)
        keys = [self.pack_of[at], self.row[at]]
        _, first, n = np.unique(keys, axis=1, return_index=True, return_counts=True)
        where = self.pack_of, self.source, self.row, self.position
        for k, count in zip(at[first].tolist(), n.tolist(), strict=True):
            detail = words.format(*(value[k] for value in values)) + _more(count)
            self.report(rule, detail, *(int(column[k]) for column in where))

    def trained(self) -> None:
        """Every token that a row trains has one edge, and others have none."""
        ids, table = self.rows.ids, self.rows.table
        wanted = may = self.rows.mask
        if OBSERVED in table.column_names and packing.column_of(table, OBSERVED, "")[1]:
            may = packing.with_observed(table).values
        if f"edge_{OBSERVED}" in self.edges:
            wanted = may
        self._each("not_trained", ~may[self.at], "the row does not train it")
        counts = np.bincount(self.at, minlength=len(wanted))
        again = repeated(self.at)
        self._each("packed_twice", again, "it has {} edges", counts[self.at])
        missing = np.flatnonzero(wanted & (counts == 0))
        rows, first, n = np.unique(
            ids.owner[missing], return_index=True, return_counts=True
        )
        tokens = missing[first] - ids.offsets[rows]
        for row, token, count in np.stack([rows, tokens, n], axis=1).tolist():
            detail = "the row trains it, and no pack has its edge" + _more(count)
            self.report("not_packed", detail, None, None, row, token)

    def contexts(self) -> None:
        """The path to each edge's source is the row before it, of a session named."""
        agree, n_seen = self.position.copy(), self.position.copy()
        lines, first = np.unique(self.pack_of, return_index=True)
        groups = np.split(np.arange(len(self.at)), first[1:])
        for line, mine in zip(lines.tolist(), groups, strict=False):
            self._sessions(line, self.row[mine])
            if line not in self.trees:
                continue
            ids, n_prefix, runs = self.trees[line]
            token = self.source[mine] + n_prefix
            run = runs.at(token)
            n_seen[mine] = runs.depth[run] + token - runs.start[run] + 1
            keys = [run, self.row[mine]]
            pairs, which = np.unique(keys, axis=1, return_inverse=True)
            common = [
                _core.lcp(ids[runs.path(own)], self.rows.ids[row])
                for own, row in pairs.T.tolist()
            ]
            agree[mine] = np.array(common)[which]
        agree = np.minimum(agree, np.minimum(n_seen, self.position))
        bad = agree < np.maximum(n_seen, self.position)
        words = "its source attends other tokens than the row has, from position {} on"
        self._each("context", bad, words, agree)

    def _sessions(self, line: int, rows: Longs) -> None:
        """The sessions of a pack are those of its edges' rows."""
        named = self.packs[line]["sessions"]
        for row in np.unique(rows).tolist() if named is not None else ():
            if self.row_keys[row][0] not in named:
                self.report("sessions", "its session is not named", line, None, row)

    def values(self, reduce: Reduce) -> None:
        """The columns of edges are those of the rows."""
        rows, table, at = self.rows, self.rows.table, self.at
        weight = table.column("row_weight").fill_null(0.0).to_numpy()
        if reduce == "mean":
            n_trained = np.bincount(rows.ids.owner, rows.mask, len(rows.ids))
            weight = weight / np.maximum(n_trained, 1)
        weights = np.where(rows.mask[at], weight[self.row], 0.0)
        for name, given in self.edges.items():
            column = name.removeprefix("edge_")
            if name == "edge_target":
                own = pa.array(rows.ids.values[at])
            elif name == "edge_logprob":
                own = pa.array(rows.logprobs[at], mask=~rows.has_logprob[at])
            elif name == "edge_weight":
                plain = given.fill_null(np.nan).to_numpy()
                close = np.isclose(plain, weights, rtol=1e-9, atol=0.0)
                own = pa.array(np.where(close, plain, weights))
            elif name not in _NEEDED:
                own = packing.edge_values(table, column, self.row, self.position)
            else:
                continue
            both = [given, own.cast(given.type)]
            codes = packing.value_codes(pa.chunked_array(both), name)
            bad = codes[: len(given)] != codes[len(given) :]
            shown = [one.to_pylist() if bad.any() else () for one in both]
            rule = column if name in PACKS.names else "column"
            self._each(rule, bad, f"{name} is {{}}: expected {{}}", *shown)


def _elements(column: pa.ChunkedArray) -> list[Any]:
    """The elements of a column; lists of integers as arrays, in which -1 is null."""
    value_type = getattr(column.type, "value_type", None)
    if value_type is None or not pa.types.is_integer(value_type):
        return list(column.to_pylist())
    lists, valid = Ragged.of(column, -1), column.is_valid().to_pylist()
    return [lists[k] if there else None for k, there in enumerate(valid)]


def _first(bad: Bools, words: str, *values: Array) -> list[tuple[int, str]]:
    """The first element that is bad, with its values and how many more there are."""
    at = np.flatnonzero(bad)
    return [
        (k, words.format(*(value[k] for value in values)) + _more(len(at)))
        for k in at[:1].tolist()
    ]


def _more(n: int) -> str:
    return f", and {n - 1} more" if n > 1 else ""
