"""Every policy beside plain Python, on runs of every shape, equal answers checked first.

    python -m benchmarks.policies

prints a line per shape and policy, with three times for plain Python, each with what
trajkit is faster by:

rule
    Lists in, lists out: the rule alone, over the dicts that ``json.loads`` makes of a log.
arrays
    Lists in, arrays out, as trajkit gives them and a trainer takes them.
table
    The same from the table that trajkit reads, so its ids and logprobs become lists first
    (``to_pylist``). The messages are given, as dicts.

Nothing is computed before: the table was written to an Arrow file and read back.
"""

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import trajkit as tk
from benchmarks.compare import (
    Timing,
    commit,
    machine,
    read_table,
    timed,
    write_table,
)
from benchmarks.data import SHAPES, SIZES, Record, Size, as_parsed, rollout
from benchmarks.forks import FORKS, forking
from tests.oracles import (
    peers_chains,
    peers_faithful,
    peers_graph,
    peers_miles,
    peers_nemo,
    peers_polar,
    peers_segments,
)
from tests.oracles import peers_slime as peers

Twin = Callable[[list[Record]], list[Record]]

TWINS: dict[str, Twin] = {
    "faithful": peers_faithful.linearize,
    "slime": peers.linearize,
    "trl": peers_chains.trl,
    "skyrl": peers_chains.skyrl,
    "graph": peers_graph.linearize,
    "strict": peers_chains.strict,
    "per_call": peers_chains.per_call,
    "segments": peers_segments.linearize,
    "polar": peers_polar.linearize,
    "nemo": peers_nemo.linearize,
    "miles": peers_miles.linearize,
}
"""The rules in plain Python, by the policy that they are."""

WAYS = ("rule", "arrays", "table")
WANTED = 30  # times as fast
SLOW_S = 2.0  # plain Python that takes longer is timed once
COLUMNS = {"tokens": "input_ids", "loss_mask": "loss_mask", "logprobs": "logprobs"}


def calls(shape: str, size: Size, seed: int = 0) -> list[Record]:
    """The calls of one session, as parsed from a log."""
    make = forking if shape in FORKS else rollout
    return as_parsed(make(f"s{seed}", size, shape, seed=seed))


def as_arrays(rows: list[Record]) -> list[Record]:
    """The rows in what a trainer feeds on: int32 ids, a bool mask, float32 logprobs."""
    return [
        {
            "tokens": np.array(row["tokens"], np.int32),
            "loss_mask": np.array(row["loss_mask"], np.bool_),
            "logprobs": np.array(row["logprobs"], np.float32),
            "prompt_length": row["prompt_length"],
        }
        for row in rows
    ]


def difference(rows: pa.Table, expected: list[Record]) -> str | None:
    """Where the two do not give the same rows, or None."""
    if rows.num_rows != len(expected):
        return f"trajkit gives {rows.num_rows} rows, plain Python {len(expected)}"
    lists = {name: rows[column].combine_chunks() for name, column in COLUMNS.items()}
    for k, row in enumerate(as_arrays(expected)):
        for name, column in lists.items():
            values = column[k].values
            if values.null_count:
                values = values.fill_null(0)
            mine = values.to_numpy(zero_copy_only=False)
            if not np.array_equal(mine, row[name]):
                return f"row {k}: {name} differs"
        if rows["prompt_length"][k].as_py() != row["prompt_length"]:
            return f"row {k}: prompt_length differs"
    return None


@dataclass(frozen=True, slots=True)
class Line:
    """What was measured of a policy on a shape, per session."""

    n_tokens: int
    ours: Timing
    rule: Timing
    arrays: Timing


def compare(
    policy: str, table: pa.Table, sessions: list[list[Record]], repeats: int
) -> Line:
    """The times of trajkit on all sessions at once, and of plain Python on the first.

    Exits with the difference where the two do not give the same rows.
    """
    twin = TWINS[policy]
    rows = tk.linearize(table, policy, threads=1)
    n_tokens = len(rows["input_ids"].combine_chunks().flatten())
    rule = None
    for records in reversed(sessions):
        start = time.perf_counter()
        expected = twin(records)
        rule = Timing([time.perf_counter() - start])
        mine = rows.filter(pc.equal(rows["session_id"], records[0]["session_id"]))
        differ = difference(mine, expected)
        if differ is not None:
            sys.exit(f"{policy}: {differ}")
    assert rule is not None
    del rows, mine
    arrays = timed(repeats, partial(as_arrays, expected), 1)
    del expected
    n = len(sessions)
    ours = timed(2 * repeats + 1, partial(tk.linearize, table, policy, threads=1), n)
    if rule.median < SLOW_S:
        rule = timed(repeats, partial(twin, sessions[0]), 1)
    return Line(n_tokens // n, ours, rule, arrays)


def stored(sessions: list[list[Record]]) -> pa.Table:
    """The calls as a table that was written to a file and read back."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "turns.arrow"
        write_table(tk.from_records([call for one in sessions for call in one]), path)
        return read_table(path)


def as_lists(table: pa.Table) -> list[list[object]]:
    """What of a table plain Python reads per token."""
    names = ("prompt_ids", "output_ids", "output_logprobs")
    return [table.column(name).to_pylist() for name in names]


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.policies",
        description="Time every policy beside plain Python, answers checked first.",
    )
    parser.add_argument("--size", choices=SIZES, default="long")
    parser.add_argument("--shape", choices=[*SHAPES, *FORKS], action="append")
    parser.add_argument("--policy", choices=TWINS, action="append")
    parser.add_argument("--sessions", type=int, default=4, help="of the table (4)")
    parser.add_argument("--repeats", type=int, default=3, help="of each timing (3)")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    choices = parse(words)
    size = SIZES[choices.size]
    shapes: Iterable[str] = choices.shape or [*SHAPES, *FORKS]
    print(f"command  python -m benchmarks.policies {shlex.join(words or sys.argv[1:])}")
    print(f"commit   {commit()}")
    print(f"machine  {machine()}")
    print(
        f"data     tables of {choices.sessions} sessions of {size.n_turns} turns and up "
        f"to {size.context} tokens of context; one thread; medians, per session\n"
    )
    head = f"{'shape':<14}{'policy':<10}{'rows hold':>10}{'trajkit':>11}"
    print(head + "".join(f"{name:>20} " for name in WAYS))
    slower: dict[str, list[str]] = {way: [] for way in WAYS}
    for shape in shapes:
        sessions = [calls(shape, size, seed) for seed in range(choices.sessions)]
        table = stored(sessions)
        first = table.slice(0, len(sessions[0]))
        lists = timed(choices.repeats, partial(as_lists, first), 1)
        for policy in choices.policy or TWINS:
            line = compare(policy, table, sessions, choices.repeats)
            ours = line.ours.median
            rule = line.rule.median
            arrays = rule + line.arrays.median
            times = dict(zip(WAYS, (rule, arrays, lists.median + arrays), strict=True))
            print(
                f"{shape:<14}{policy:<10}{line.n_tokens:>10,}{ours * 1e3:>8.2f} ms"
                + "".join(
                    f"{one * 1e3:>9.1f} ms{one / ours:>7.1f} x"
                    for one in times.values()
                ),
                flush=True,
            )
            for way, one in times.items():
                if one < WANTED * ours:
                    slower[way].append(f"{shape} {policy}")
    for way, lines in slower.items():
        print(f"\nbelow {WANTED} times, {way}: {', '.join(lines) or 'none'}")


if __name__ == "__main__":
    main()
