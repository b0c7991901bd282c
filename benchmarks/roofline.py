"""How far linearize is ahead of plain Python, and how far behind the machine's memory.

    python -m benchmarks.roofline

takes clean rollouts as a table in full and in delta form, checks that the rows are
those of slime's rule over lists, and prints times per rollout: of plain Python (slime's
rule, and a trie over token ids as NeMo Gym has one), of `trajkit.linearize`, and of copying
as many bytes as must at least be read and written, at the rate that copying reaches in the
same run.
"""

import argparse
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

import trajkit as tk
from benchmarks.compare import (
    Timing,
    commit,
    machine,
    read_table,
    timed,
    write_table,
)
from benchmarks.data import SIZES, Record, Size, as_parsed, rollout
from benchmarks.policies import difference
from benchmarks.scale import fastest, in_succession
from tests.oracles import peers_nemo
from tests.oracles import peers_slime as peers

COPY_BYTES = 1 << 26  # of each thread, when the rate of copying is measured


def copies_per_second(threads: int, repeats: int) -> float:
    """Bytes read and written in a second by so many threads that copy."""
    pairs = [
        (np.ones(COPY_BYTES, np.uint8), np.ones(COPY_BYTES, np.uint8))
        for _ in range(threads)
    ]

    def copy(pair: tuple[np.ndarray, np.ndarray]) -> None:
        np.copyto(*pair)

    with ThreadPoolExecutor(threads) as pool:
        seconds = fastest(timed(repeats, lambda: list(pool.map(copy, pairs)), 1))
    return 2 * COPY_BYTES * threads / seconds


def least_bytes(turns: pa.Table, rows: pa.Table) -> int:
    """Bytes that must be read and written at least: ids, logprobs and masks, each once."""
    own = "suffix_ids" if "suffix_ids" in turns.column_names else "prompt_ids"
    read = sum(
        turns[name].combine_chunks().flatten().nbytes
        for name in (own, "output_ids", "output_logprobs")
    )
    written = sum(
        rows[name].combine_chunks().flatten().nbytes
        for name in ("input_ids", "logprobs", "loss_mask")
    )
    return read + written


def check_rollout(rows: pa.Table, size: Size, k: int) -> None:
    """Exit where row k is not that of the rule, and of the trie, over lists.

    A clean rollout is one row of either. One is looked at at a time: as lists they do not
    fit in memory together.
    """
    parsed = as_parsed(iter(records(size, k)))
    for rule in (peers.linearize, peers_nemo.linearize):
        differ = difference(rows.slice(k, 1), rule(parsed))
        if differ is not None:
            sys.exit(f"rollout {k}: {differ}")


@dataclass(frozen=True, slots=True)
class Against:
    """Times of linearize from one form, per rollout, on one thread and on two."""

    n_bytes: float  # that must be read and written
    times: list[Timing]
    floors: list[float]  # seconds that copying these takes

    @classmethod
    def copying(
        cls, turns: pa.Table, rows: pa.Table, n: int, repeats: int
    ) -> "Against":
        """Time slime's rule over the n rollouts of a table, and copying."""
        works: list[Callable[[], object]] = [
            partial(tk.linearize, turns, "slime", threads=threads) for threads in (1, 2)
        ]
        times = in_succession(repeats, works, [n, n], time.perf_counter)
        n_bytes = least_bytes(turns, rows) / n
        floors = [n_bytes / copies_per_second(threads, repeats) for threads in (1, 2)]
        return cls(n_bytes, times, floors)


def compacted(size: Size, n: int) -> pa.Table:
    """So many clean rollouts in delta form."""
    one = (tk.compact(tk.from_records(records(size, k))) for k in range(n))
    return pa.concat_tables(one).combine_chunks()


def records(size: Size, k: int) -> list[Record]:
    return list(rollout(f"s{k}", size, seed=k))


def plain_times(size: Size) -> tuple[Timing, Timing]:
    """Times of plain Python over the lists of a rollout: slime's rule, and the trie."""
    parsed = as_parsed(iter(records(size, 0)))
    plain = timed(3, partial(peers.linearize, parsed), 1)
    start = time.perf_counter()
    peers_nemo.linearize(parsed)
    return plain, Timing([time.perf_counter() - start])


def forms(compact: pa.Table, rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """The turns in full and in delta form, read from a file each."""
    with tempfile.TemporaryDirectory() as folder:
        for label in ("full prompts", "delta form"):
            path = Path(folder) / "turns.arrow"
            write_table(
                tk.expand(compact) if label == "full prompts" else compact, path
            )
            turns = read_table(path)
            if tk.linearize(turns, "slime") != rows:
                sys.exit(f"{label}: the rows are others")
            yield label, turns
            del turns


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.roofline",
        description="Time linearize beside plain Python and beside copying.",
    )
    parser.add_argument("--size", choices=SIZES, default="long")
    parser.add_argument("--rollouts", type=int, default=64, help="of the table (64)")
    parser.add_argument("--check", type=int, default=8, help="rollouts compared (8)")
    parser.add_argument("--repeats", type=int, default=9, help="of each timing (9)")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    choices = parse(words)
    size, n, repeats = SIZES[choices.size], choices.rollouts, choices.repeats
    print(f"command  python -m benchmarks.roofline {shlex.join(words or sys.argv[1:])}")
    print(f"commit   {commit()}")
    print(f"machine  {machine()}")
    print(f"python   {platform.python_version()}, pyarrow {pa.__version__}")
    print(
        f"data     {n} clean rollouts of {size.n_turns} turns and {size.context} tokens; "
        "times are per rollout, medians and the range, ratios of the fastest"
    )
    compact = compacted(size, n)
    rows = tk.linearize(compact, "slime")
    checked = min(choices.check, n)
    for k in range(checked):
        check_rollout(rows, size, k)
    print(f"checked  {checked} rollouts: tokens, mask and logprobs are equal\n")

    plain, trie = plain_times(size)
    print(f"{'slime, plain Python over lists':<44}{plain}")
    print(f"{'trie, plain Python over lists':<44}{trie}")

    for label, turns in forms(compact, rows):
        print_times(label, Against.copying(turns, rows, n, repeats), plain, trie)


def print_times(label: str, against: Against, plain: Timing, trie: Timing) -> None:
    print(f"\nfrom {label}, {against.n_bytes / 1e6:.2f} MB to be read and written:")
    fast = [fastest(taken) for taken in against.times]
    for threads, floor in zip((1, 2), against.floors, strict=True):
        taken = fast[threads - 1]
        print(
            f"{f'  linearize, {threads} threads':<44}{against.times[threads - 1]}"
            f"{fastest(plain) / taken:8.1f} x slime's rule"
            f"{fastest(trie) / taken:8.0f} x the trie"
            f"{taken / floor:6.2f} times copying ({floor * 1e3:.3f} ms)"
        )
    copying = against.floors[0] / against.floors[1]
    print(
        f"{'  two threads':<44}{fast[0] / fast[1]:.2f} times one; of copying {copying:.2f}"
    )


if __name__ == "__main__":
    main()
