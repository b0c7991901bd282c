"""`balance`: which rank computes which pack."""

import heapq
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit._arguments import check_choice, check_flag, chosen_int
from trajkit.errors import ArgumentError, InvalidTurnsError
from trajkit.schema import ASSIGNMENT, PACKS
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import TableLike, as_table, canonical
from trajkit.tables.ragged import offsets_of
from trajkit.tables.take import list_values

Method: TypeAlias = Literal["lpt", "karmarkar_karp"]
Costs: TypeAlias = npt.NDArray[np.float64]
# packs that one rank computes one after another; none: an empty pack
_Item: TypeAlias = tuple[int, ...]
# of one rank: the sum of the costs, and the items
_Load: TypeAlias = tuple[float, list[_Item]]


def balance(
    packs: TableLike | Sequence[TableLike],
    ranks: int,
    *,
    cost: tuple[float, float] = (24576.0, 2.0),
    method: Method = "lpt",
    equal_counts: bool = False,
) -> pa.Table:
    """Assign packs to ranks, so that these finish at about the same time.

    Parameters
    ----------
    packs : table, or sequence of tables
        `trajkit.schema.PACKS`, those of one optimizer step; or a table for each step.
    ranks : int
        Ranks that share the work (data parallel).
    cost : (float, float)
        What a token costs (with padding), and a pair of a token and one that it attends.
        The default is verl's ``24576 * n + n ** 2`` for a sequence of n tokens, which
        has half as many pairs.
    method : {"lpt", "karmarkar_karp"}
        lpt
            The most expensive pack first, each to the rank with the least to do.
        karmarkar_karp
            By largest differences. With ``equal_counts`` each rank has as many packs.
    equal_counts : bool
        Every rank has as many packs in a step: empty ones fill up.

    Returns
    -------
    Table
        `trajkit.schema.ASSIGNMENT`, by step, rank and slot. A rank computes its most
        expensive pack first. The parts of a tree that was carried over packs are on one
        rank, one after another.

    Raises
    ------
    SchemaError
        A column is absent, or has a type that cannot be taken for its own.
    InvalidTurnsError
        Packs of two steps have rows of one session, or a prefix_pack is not in the
        table.
    ArgumentError
        ``ranks`` is not an integer of 1 or more, ``method`` does not exist, or a cost is
        negative.

    References
    ----------
    LPT: Graham 1969. Karmarkar and Karp 1982, for equal counts as in verl
    (seqlen_balancing.py): items are taken in groups of one per rank.

    Examples
    --------
    >>> import trajkit as tk
    >>> turns = tk.from_records(
    ...     [{"session_id": s, "prompt_ids": [1], "output_ids": [2]} for s in "abc"]
    ... )
    >>> packs = tk.pack(tk.linearize(turns), 2)
    >>> tk.balance(packs, 2, equal_counts=True)["pack"].to_pylist()
    [0, 2, 1, None]
    """
    ranks = chosen_int("ranks", ranks, 1)
    check_choice("method", method, Method)
    check_flag("equal_counts", equal_counts)
    known = isinstance(cost, list | tuple) and len(cost) == 2
    if not known or not all(
        isinstance(one, int | float | np.number) and 0 <= one < float("inf")
        for one in cost
    ):
        raise ArgumentError(
            f"cost={cost!r}: expected the cost of a token and of a pair"
        )
    steps = [packs]
    if isinstance(packs, list | tuple) and packs and not isinstance(packs[0], Mapping):
        steps = list(packs)
    tables = [canonical(as_table(step), PACKS) for step in steps]
    _check_sessions(tables)
    lines: list[dict[str, object]] = []
    for step, table in enumerate(tables):
        costs = _costs(table, cost)
        items = _chains(table)
        loads = _spread(items, costs, ranks, method, equal_counts)
        n_slots = max((sum(map(len, items)) for items in loads), default=0)
        for rank, items in enumerate(loads):
            order = [pack for item in items for pack in item]
            filled: list[int | None] = [*order]
            if equal_counts:
                filled += [None] * (n_slots - len(order))
            for slot, pack in enumerate(filled):
                own = 0.0 if pack is None else float(costs[pack])
                line = (step, rank, slot, pack, own)
                lines.append(dict(zip(ASSIGNMENT.names, line, strict=True)))
    return pa.Table.from_pylist(lines, ASSIGNMENT)


def _check_sessions(tables: list[pa.Table]) -> None:
    seen: dict[str, int] = {}
    for step, table in enumerate(tables):
        for name in list_values(table.column("sessions")).unique().to_pylist():
            if seen.setdefault(name, step) != step:
                raise InvalidTurnsError(
                    f"session {name!r} is in packs of steps {seen[name]} and {step}: the "
                    "rows of a session belong in one optimizer step. Divide the sessions "
                    "among the steps, and pack the rows of each step by themselves"
                )


def pack_pairs(packs: pa.Table) -> npt.NDArray[np.int64]:
    """Pairs of a token and one that it attends, itself included, of each pack."""
    column = packs.column("position_ids")
    ends = offsets_of(np.asarray(pc.list_value_length(column), np.int64))
    sums = offsets_of(list_values(column).to_numpy().astype(np.int64) + 1)
    return np.diff(sums[ends])


def _costs(packs: pa.Table, cost: tuple[float, float]) -> Costs:
    n_tokens = pc.list_value_length(packs.column("input_ids")).to_numpy()
    return np.asarray(cost[0] * n_tokens + cost[1] * pack_pairs(packs), np.float64)


def _chains(packs: pa.Table) -> list[_Item]:
    """Packs that one rank must compute one after another."""
    chains: list[list[int]] = []
    chain_of: dict[int, list[int]] = {}
    for pack, before in enumerate(packs.column("prefix_pack").to_pylist()):
        if before is None:
            chains.append([])
        elif before not in chain_of:
            raise InvalidTurnsError(
                f"pack {pack}: its prefix_pack {before} is no earlier line. Pass all "
                "packs that one call of trajkit.pack returned"
            )
        chain_of[pack] = chains[-1] if before is None else chain_of[before]
        chain_of[pack].append(pack)
    return [tuple(chain) for chain in chains]


def _spread(
    items: list[_Item], costs: Costs, ranks: int, method: Method, equal_counts: bool
) -> list[list[_Item]]:
    """The items of each rank, by falling cost."""
    weighed = [(float(sum(costs[pack] for pack in item)), item) for item in items]
    weighed.sort(key=lambda one: -one[0])
    if method == "lpt":
        loads = _longest_first(weighed, ranks)
    else:
        # equal counts are of packs: a chain of several has none
        single = all(len(item) == 1 for item in items)
        loads = _largest_differences(weighed, ranks, equal_counts and single)
    cost_of = {item: one for one, item in weighed}
    return [
        sorted((item for item in load if item), key=lambda item: -cost_of[item])
        for load in loads
    ]


def _longest_first(weighed: list[tuple[float, _Item]], ranks: int) -> list[list[_Item]]:
    loads: list[list[_Item]] = [[] for _ in range(ranks)]
    sums = [(0.0, rank) for rank in range(ranks)]
    for one, item in weighed:
        total, rank = heapq.heappop(sums)
        loads[rank].append(item)
        heapq.heappush(sums, (total + one, rank))
    return loads


def _largest_differences(
    weighed: list[tuple[float, _Item]], ranks: int, equal_counts: bool
) -> list[list[_Item]]:
    """Merge the two partial assignments whose loads differ most, until one is left."""
    nothing: tuple[float, _Item] = (0.0, ())
    size = ranks if equal_counts else 1
    weighed = weighed + [nothing] * (-len(weighed) % size)
    # a number before the loads: of two with equal differences the first is taken
    heap: list[tuple[float, int, list[_Load]]] = []
    for number, first in enumerate(range(0, len(weighed), size)):
        loads: list[_Load] = [
            (one, [item]) for one, item in weighed[first : first + size]
        ]
        loads += [(0.0, []) for _ in range(ranks - size)]
        heap.append((loads[-1][0] - loads[0][0], number, loads))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, high = heapq.heappop(heap)
        _, _, low = heapq.heappop(heap)
        merged = [
            (a + b, items + others)
            for (a, items), (b, others) in zip(high, reversed(low), strict=True)
        ]
        merged.sort(key=lambda load: -load[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
    return [items for _, items in heap[0][2]] if heap else [[] for _ in range(ranks)]
