"""Every policy beside plain Python, on runs of every shape, equal answers checked first.

    python -m benchmarks.policies

prints a line per shape and policy. Each side gets what it would have in its own world,
with nothing computed before: trajkit a table that was written to an Arrow file and read
back; plain Python the dicts that ``json.loads`` makes of a log.
"""

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

import trajkit as tk
from benchmarks import (
    peers,
    peers_chains,
    peers_faithful,
    peers_miles,
    peers_nemo,
    peers_polar,
    peers_segments,
)
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

Twin = Callable[[list[Record]], list[Record]]

TWINS: dict[str, Twin] = {
    "faithful": peers_faithful.linearize,
    "slime": peers.linearize,
    "trl": peers_chains.trl,
    "skyrl": peers_chains.skyrl,
    "strict": peers_chains.strict,
    "per_call": peers_chains.per_call,
    "segments": peers_segments.linearize,
    "polar": peers_polar.linearize,
    "nemo": peers_nemo.linearize,
    "miles": peers_miles.linearize,
}
"""The rules in plain Python, by the policy that they are."""

WANTED = 30  # times as fast
SLOW_S = 2.0  # plain Python that takes longer is timed once
COLUMNS = {"tokens": "input_ids", "loss_mask": "loss_mask", "logprobs": "logprobs"}


def calls(shape: str, size: Size) -> list[Record]:
    """The calls of one session, as parsed from a log."""
    make = forking if shape in FORKS else rollout
    return as_parsed(make("s", size, shape))


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


def compare(
    policy: str, table: pa.Table, records: list[Record], repeats: int
) -> tuple[int, Timing, Timing, Timing]:
    """Tokens of all rows, and the times of trajkit, of plain Python and of `as_arrays`.

    Exits with the difference where the two do not give the same rows.
    """
    twin = TWINS[policy]
    rows = tk.linearize(table, policy, threads=1)
    start = time.perf_counter()
    expected = twin(records)
    lists = Timing([time.perf_counter() - start])
    differ = difference(rows, expected)
    if differ is not None:
        sys.exit(f"{policy}: {differ}")
    n_tokens = len(rows["input_ids"].combine_chunks().flatten())
    del rows
    arrays = timed(repeats, partial(as_arrays, expected), 1)
    del expected
    ours = timed(2 * repeats + 1, partial(tk.linearize, table, policy, threads=1), 1)
    if lists.median < SLOW_S:
        lists = timed(repeats, partial(twin, records), 1)
    return n_tokens, ours, lists, arrays


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.policies",
        description="Time every policy beside plain Python, answers checked first.",
    )
    parser.add_argument("--size", choices=SIZES, default="long")
    parser.add_argument("--shape", choices=[*SHAPES, *FORKS], action="append")
    parser.add_argument("--policy", choices=TWINS, action="append")
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
        f"data     a session of {size.n_turns} turns each, {size.context} tokens of "
        "context where it is a line; one thread; medians"
    )
    print("lists    plain Python, rows of lists; arrays: and those made into arrays\n")
    head = f"{'shape':<14}{'policy':<10}{'rows hold':>12}{'trajkit':>11}"
    print(f"{head}{'lists':>13}{'':>9}{'arrays':>13}")
    slower = []
    for shape in shapes:
        records = calls(shape, size)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "turns.arrow"
            write_table(tk.from_records(records), path)
            table = read_table(path)
        for policy in choices.policy or TWINS:
            n_tokens, ours, lists, arrays = compare(
                policy, table, records, choices.repeats
            )
            both = lists.median + arrays.median
            times = lists.median / ours.median, both / ours.median
            if times[0] < WANTED:
                slower.append(f"{shape} {policy}")
            print(
                f"{shape:<14}{policy:<10}{n_tokens:>12,}{ours.median * 1e3:>8.2f} ms"
                f"{lists.median * 1e3:>10.1f} ms{times[0]:>7.1f} x"
                f"{both * 1e3:>10.1f} ms{times[1]:>7.1f} x",
                flush=True,
            )
    if slower:
        print(f"\nbelow {WANTED} times plain lists: {', '.join(slower)}")


if __name__ == "__main__":
    main()
