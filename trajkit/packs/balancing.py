"""`balance`: which rank computes which pack."""

import heapq
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from trajkit._arguments import check_flag, check_number, chosen_int
from trajkit.errors import ArgumentError, InvalidTurnsError
from trajkit.schema import ASSIGNMENT, PACKS
from trajkit.tables.canonical import TableLike, as_table, canonical
from trajkit.tables.columns import list_values
from trajkit.tables.ragged import Longs, Ragged, lengths, offsets_of

# what packs cost that one rank computes one after another, and these; none: an empty pack
_Item: TypeAlias = tuple[float, list[int]]


def balance(
    packs: TableLike | Sequence[TableLike],
    ranks: int,
    *,
    cost: tuple[float, float] = (24576.0, 2.0),
    equal_counts: bool = False,
) -> pa.Table:
    """Assign packs to ranks, so that these finish at about the same time.

    The most expensive pack comes first, on the rank with the least to do (Graham 1969).

    Parameters
    ----------
    packs : table, or sequence of tables
        `trajkit.schema.PACKS`, those of one optimizer step; or a table for each step.
    ranks : int
        Ranks that share the work (data parallel).
    cost : (float, float)
        What a token costs (with padding), and a pair of a token and one that it attends.
        The default is verl's ``24576 * n + n ** 2`` for n tokens with half as many pairs.
    equal_counts : bool
        Every rank has as many packs in a step: empty ones fill up. Groups of one pack per
        rank are then merged by largest differences (Karmarkar and Karp 1982), as in verl
        (seqlen_balancing.py), unless a tree was carried over packs.

    Returns
    -------
    Table
        `trajkit.schema.ASSIGNMENT`, by step, rank and slot. A rank computes its most
        expensive pack first. The parts of a tree that was carried over packs are on one
        rank, one after another.

    Raises
    ------
    SchemaError
        A column is absent, or of an unsuitable type.
    InvalidTurnsError
        Packs of two steps have rows of one session, or a prefix_pack is not there.
    ArgumentError
        ``ranks`` is less than 1, or a cost is negative.
    """
    ranks = chosen_int("ranks", ranks, 1)
    check_flag("equal_counts", equal_counts)
    if not isinstance(cost, list | tuple) or len(cost) != 2:
        raise ArgumentError(f"cost={cost!r}: expected that of a token and of a pair")
    for one in cost:
        check_number("cost", one, 0)
    steps = [packs]
    if isinstance(packs, list | tuple) and packs and not isinstance(packs[0], Mapping):
        steps = list(packs)
    step_of: dict[str, int] = {}
    lines: list[tuple[int, int, int, int | None, float]] = []
    for step, given in enumerate(steps):
        table = canonical(as_table(given), PACKS)
        for name in list_values(table.column("sessions")).unique().to_pylist():
            if step_of.setdefault(name, step) != step:
                raise InvalidTurnsError(
                    f"session {name!r} is in packs of steps {step_of[name]} and {step}: "
                    "the rows of a session belong in one optimizer step. Divide the "
                    "sessions among the steps, and pack the rows of each step by themselves"
                )
        n_tokens = lengths(table.column("input_ids")).astype(np.float64)
        costs = cost[0] * n_tokens + cost[1] * pack_pairs(table)
        items = [(float(sum(costs[k] for k in one)), one) for one in _chains(table)]
        items.sort(key=lambda item: -item[0])
        if equal_counts and all(len(chain) == 1 for _, chain in items):
            loads = _largest_differences(items, ranks)
        else:
            loads = _longest_first(items, ranks)
        for load in loads:
            load.sort(key=lambda item: -item[0])
        slots = [[pack for _, chain in load for pack in chain] for load in loads]
        n_slots = max(map(len, slots))
        for rank, own in enumerate(slots):
            lines += [(step, rank, k, pack, costs[pack]) for k, pack in enumerate(own)]
            if equal_counts:
                empty = range(len(own), n_slots)
                lines += [(step, rank, slot, None, 0.0) for slot in empty]
    named = [dict(zip(ASSIGNMENT.names, line, strict=True)) for line in lines]
    return pa.Table.from_pylist(named, ASSIGNMENT)


def pack_pairs(packs: pa.Table) -> Longs:
    """Pairs of a token and one that it attends, itself included, of each pack."""
    positions = Ragged.of(packs.column("position_ids"), 0)
    return np.diff(offsets_of(positions.values.astype(np.int64) + 1)[positions.offsets])


def _chains(packs: pa.Table) -> list[list[int]]:
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
    return chains


def _longest_first(items: list[_Item], ranks: int) -> list[list[_Item]]:
    loads: list[list[_Item]] = [[] for _ in range(ranks)]
    sums = np.zeros(ranks)
    for item in items:
        rank = int(sums.argmin())
        loads[rank].append(item)
        sums[rank] += item[0]
    return loads


def _largest_differences(items: list[_Item], ranks: int) -> list[list[_Item]]:
    """Merge the two partial assignments whose loads differ most, until one is left.

    They begin with an item for each rank.
    """
    items = items + [(0.0, [])] * (-len(items) % ranks)
    # a number before the loads: of two with equal differences the first is taken
    # each load with the sum of its costs
    heap: list[tuple[float, int, list[tuple[float, list[_Item]]]]] = []
    for number, first in enumerate(range(0, len(items), ranks)):
        loads = [(item[0], [item]) for item in items[first : first + ranks]]
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
