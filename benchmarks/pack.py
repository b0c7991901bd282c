"""How fast rows become packs, against tries of tokens in Python.

    python -m benchmarks.pack

packs the rows of 48 mixed rollouts, prints tokens a second by step and how even the ranks
are, and times the ways of two trainers on some of the rollouts once all answers are equal.

    python -m benchmarks.pack --fuzz 100000

packs random forests and compares them with brute force (`tests.oracles.packs`).
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import trajkit as tk
from benchmarks.data import mixed, rollout
from tests.oracles.packs import (
    check_packed,
    random_choices,
    random_rows,
    rows_table,
)
from trajkit import _core
from trajkit.packs.balancing import pack_pairs

_SESSIONS = 16
_KERNELS = ("fill_packs", "count_edges", "fill_edges")
_RANKS = 4


def rows_of(n_rollouts: int, policy: str = "faithful") -> pa.Table:
    """The rows of mixed rollouts."""
    records = [
        record
        for k, (name, size, shape) in enumerate(mixed(n_rollouts))
        for record in rollout(name, size, shape, seed=k, spoken=False)
    ]
    return tk.linearize(tk.from_records(records), policy)


@dataclass(slots=True)
class Node:
    """A token of a trie in Python, as AReaL builds one (areal/models/tree_attn/tree.py)."""

    token: int
    children: "dict[int, Node]" = field(default_factory=dict)
    sequences: list[int] = field(default_factory=list)


def areal(rows: list[list[int]], max_tokens: int) -> list[list[tuple[list[int], int]]]:
    """AReaL's way restated: each row goes to the first trie that has room for it.

    Returns
    -------
    list of list of (tokens, depth)
        The runs of tokens of each trie in pre-order.
    """
    tries: list[tuple[Node, list[int]]] = []
    for number, row in enumerate(rows):
        for root, size in tries:
            node, shared = root, 0
            for token in row:
                child = node.children.get(token)
                if child is None:
                    break
                node = child
                shared += 1
            if size[0] + len(row) - shared <= max_tokens:
                break
        else:
            root, size, shared = Node(-1), [0], 0
            tries.append((root, size))
        size[0] += len(row) - shared
        node = root
        for token in row:
            if token not in node.children:
                node.children[token] = Node(token)
            node = node.children[token]
            node.sequences.append(number)
    found = []
    for root, _ in tries:
        runs = []
        stack = [(child, 0) for child in reversed(root.children.values())]
        while stack:
            node, depth = stack.pop()
            tokens = [node.token]
            while len(node.children) == 1:
                (node,) = node.children.values()
                tokens.append(node.token)
            runs.append((tokens, depth))
            depth += len(tokens)
            stack += [(child, depth) for child in reversed(node.children.values())]
        found.append(runs)
    return found


def trl(
    rows: list[list[int]], masks: list[list[bool]]
) -> tuple[list[int], list[int], list[int], list[tuple[int, int, int, int]]]:
    """TRL's way restated (its pull request on packing="tree"): a dict of children a token.

    Returns
    -------
    ids, depth, tout : list of int
        Of each token in pre-order; ``tout`` is the end of its subtree.
    edges : list of (row, position, source, target)
    """
    children: list[dict[int, int]] = [{}]
    tokens, paths = [-1], []
    for row in rows:
        node, path = 0, []
        for token in row:
            child = children[node].get(token)
            if child is None:
                child = len(tokens)
                children[node][token] = child
                children.append({})
                tokens.append(token)
            node = child
            path.append(node)
        paths.append(path)
    tin, tout = [0] * len(tokens), [0] * len(tokens)
    ids, depth, order = [], [], []
    stack = [(node, 0) for node in reversed(children[0].values())]
    while stack:
        node, level = stack.pop()
        if level < 0:
            tout[tin[node]] = len(ids)
            continue
        tin[node] = len(ids)
        ids.append(tokens[node])
        depth.append(level)
        order.append(node)
        stack.append((node, -1))
        stack += [(child, level + 1) for child in reversed(children[node].values())]
    edges = [
        (number, at, tin[path[at - 1]], tokens[path[at]])
        for number, (path, mask) in enumerate(zip(paths, masks, strict=True))
        for at, trained in enumerate(mask)
        if trained
    ]
    return ids, depth, tout[: len(ids)], edges


def prefixes(ids: list[int], tout: list[int]) -> list[int]:
    """A number for each token in pre-order that stands for it and the tokens above it."""
    numbers: list[int] = []
    above: list[int] = []
    for at, token in enumerate(ids):
        while above and tout[above[-1]] <= at:
            above.pop()
        numbers.append(hash((numbers[above[-1]] if above else 0, token)))
        above.append(at)
    return numbers


def check_equal(table: pa.Table) -> None:
    """Raise AssertionError unless all ways give the same tokens, attention and edges."""
    rows = table.column("input_ids").to_pylist()
    n_tokens = sum(map(len, rows))
    (pack,) = tk.pack(table, n_tokens).to_pylist()
    mine = prefixes(pack["input_ids"], pack["subtree_end"])
    ids, depth, tout, edges = trl(rows, table.column("loss_mask").to_pylist())
    theirs = prefixes(ids, tout)
    assert len(mine) == len(theirs)
    assert {*mine} == {*theirs}
    assert sorted(zip(mine, pack["position_ids"], strict=True)) == sorted(
        zip(theirs, depth, strict=True)
    )
    names = ("edge_row", "edge_position", "edge_source", "edge_target")
    own = zip(*(pack[name] for name in names), strict=True)
    assert sorted((r, j, mine[s], t) for r, j, s, t in own) == sorted(
        (r, j, theirs[s], t) for r, j, s, t in edges
    )
    (runs,) = areal(rows, n_tokens)
    flat = [(t, at + k) for tokens, at in runs for k, t in enumerate(tokens)]
    assert sorted(flat) == sorted(zip(ids, depth, strict=True))


def fastest(repeats: int, work: Callable[[], object]) -> float:
    """Processor time of the fastest of some runs, in seconds."""
    best = float("inf")
    for _ in range(repeats):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return best


def in_kernels(rows: pa.Table, limit: int, repeats: int) -> float:
    """Processor time that the kernels take of a fastest run, in seconds."""
    taken = 0.0

    def timed(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: object) -> Any:
            nonlocal taken
            started = time.process_time()
            result = kernel(*arguments)
            taken += time.process_time() - started
            return result

        return call

    best = float("inf")
    with ExitStack() as patches:
        for name in _KERNELS:
            patch = mock.patch.object(_core, name, timed(getattr(_core, name)))
            patches.enter_context(patch)
        for _ in range(repeats):
            taken = 0.0
            tk.pack(rows, limit)
            best = min(best, taken)
    return best


def rates(n_rollouts: int, repeats: int) -> tuple[float, float]:
    """Million tokens that `trajkit.pack` takes a second: distinct ones, and of rows."""
    table = rows_of(n_rollouts)
    limit = 5 * longest(table) // 4
    distinct = pc.sum(tk.pack(table, limit).column("n_tokens")).as_py()
    total = pc.sum(pc.list_value_length(table.column("input_ids"))).as_py()
    seconds = fastest(repeats, lambda: tk.pack(table, limit))
    return distinct / seconds / 1e6, total / seconds / 1e6


def longest(rows: pa.Table) -> int:
    """Tokens of the longest row ."""
    return int(pc.max(pc.list_value_length(rows.column("input_ids"))).as_py())


def against_tries(
    n_rollouts: int, repeats: int
) -> tuple[float, list[tuple[str, float]]]:
    """Seconds of `trajkit.pack`, and of the ways of trainers, answers checked first."""
    table = rows_of(n_rollouts)
    check_equal(table)
    rows = table.column("input_ids").to_pylist()
    masks = table.column("loss_mask").to_pylist()
    limit = 3 * longest(table) // 2
    own = fastest(repeats, lambda: tk.pack(table, limit))
    return own, [
        ("a trie as TRL has it", fastest(1, lambda: trl(rows, masks))),
        ("tries as AReaL has them", fastest(1, lambda: areal(rows, limit))),
    ]


def compare(n_rollouts: int, repeats: int) -> Iterator[str]:
    """Lines on the ways of trainers, on rows that these hold as lists."""
    own, others = against_tries(n_rollouts, repeats)
    lengths = pc.list_value_length(rows_of(n_rollouts).column("input_ids"))
    n_tokens = int(pc.sum(lengths).as_py())
    yield f"{n_rollouts} rollouts, {n_tokens:,} row tokens; the answers are equal"
    yield _rate("trajkit", n_tokens, own)
    for name, taken in others:
        yield f"{_rate(name, n_tokens, taken)}: {taken / own:,.0f} times as long"


def _rate(what: str, n_tokens: int, seconds: float) -> str:
    rate = n_tokens / seconds / 1e6
    return f"{what:<24} {1e3 * seconds:10.1f} ms {rate:10.1f} M row tokens/s"


def packed(n_rollouts: int, repeats: int) -> Iterator[str]:
    """Lines on the packs of all rollouts."""
    table = rows_of(n_rollouts)
    lengths = pc.list_value_length(table.column("input_ids")).to_numpy()
    limit = 5 * longest(table) // 4
    total = int(lengths.sum())
    yield f"{n_rollouts} rollouts, {len(table)} rows, {total:,} row tokens, max {limit:,}"
    started = time.perf_counter()
    packs = tk.pack(table, limit)
    wall = time.perf_counter() - started
    seconds = fastest(repeats, lambda: tk.pack(table, limit))
    kernels = in_kernels(table, limit, repeats)
    distinct = int(packs.column("n_tokens").to_numpy().sum())
    yield (
        f"{1e3 * seconds:7.1f} ms of processor time "
        f"({1e3 * wall:.1f} ms passed), {total / seconds / 1e6:,.0f} M row tokens/s, "
        f"{distinct / seconds / 1e6:,.0f} M distinct tokens/s; in kernels "
        f"{1e3 * kernels:.1f} ms, {distinct / kernels / 1e6:,.0f} M distinct tokens/s"
    )
    plain = tk.pack(table, limit, layout="rows")
    for layout, one in (("rows", plain), ("tree", packs)):
        n = one.column("n_tokens").to_numpy()
        yield (
            f"{layout}: {len(n)} packs, {n.sum():,} tokens, "
            f"{pack_pairs(one).sum():,} attended pairs, {n.sum() / len(n) / limit:.1%} full"
        )
    started = time.perf_counter()
    found = tk.verify_packs(packs, table, max_tokens=limit)
    yield f"verify_packs: {len(found)} violations, {time.perf_counter() - started:.2f} s"
    for equal in (False, True):
        plan = tk.balance(packs, _RANKS, equal_counts=equal)
        loads = np.bincount(
            plan.column("rank").to_numpy(), plan.column("cost").to_numpy()
        )
        yield (
            f"{_RANKS} ranks{', equal counts' if equal else ''}: "
            f"slowest {loads.max() / loads.mean():.3f} of the mean"
        )


def fuzz(n_forests: int, seed: int) -> str:
    """Pack random forests, some sessions at a time, and compare with brute force."""
    started = time.perf_counter()
    for first in range(0, n_forests, _SESSIONS):
        draw = random.Random(f"{seed} {first}")
        n = min(_SESSIONS, n_forests - first)
        rows = random_rows(draw, n, group=draw.choice([None, "g"]))
        choices: dict[str, Any] = random_choices(draw, rows)
        table = rows_table(rows)
        try:
            packs = tk.pack(table, **choices)
            check_packed(packs, rows, choices)
            # brute force looks at every pack; the verifier takes longer than both
            if draw.random() < 0.1:
                found = tk.verify_packs(packs, table)
                assert found.num_rows == 0, found.to_pylist()
        except Exception as error:
            error.add_note(f"seed {seed}, forest {first}, {choices}")
            raise
    return (
        f"{n_forests:,} forests, no difference, {time.perf_counter() - started:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pack")
    parser.add_argument("--rollouts", type=int, default=48, help="(48)")
    parser.add_argument("--tries", type=int, default=24, help="rollouts for tries (24)")
    parser.add_argument("--repeats", type=int, default=9, help="(9)")
    parser.add_argument("--fuzz", type=int, metavar="N", help="random forests")
    parser.add_argument("--seed", type=int, default=0, help="of the forests (0)")
    choices = parser.parse_args()
    if choices.fuzz is not None:
        print(fuzz(choices.fuzz, choices.seed))
        return
    for line in packed(choices.rollouts, choices.repeats):
        print(line)
    print()
    for line in compare(choices.tries, choices.repeats):
        print(line)


if __name__ == "__main__":
    main()
