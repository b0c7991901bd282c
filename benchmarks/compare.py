"""trajkit beside plain Python on the same rollouts, equal answers checked first.

    python -m benchmarks.compare

prints three comparisons: rows from a stored table beside slime's rule over lists; the
same end to end from Python objects; and the prefix kernel beside memcmp.
"""

import argparse
import ctypes
import gc
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import trajkit as tk
from benchmarks.data import SHAPES, SIZES, Record, as_parsed, rollout
from tests.oracles import peers_slime as peers

HERE = Path(__file__).parent
KERNEL_SAMPLE_S = 0.02  # a sample of the kernel runs at least this long


@dataclass(frozen=True)
class Timing:
    """Seconds per piece of work, one value per repetition."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        low, high = min(self.seconds) * 1e3, max(self.seconds) * 1e3
        return f"{self.median * 1e3:10.3f} ms   {low:10.3f} to {high:.3f}"


def timed(repeats: int, work: Callable[[], object], share: int) -> Timing:
    """Seconds that ``work`` takes, divided by ``share``; freeing its result aside."""
    seconds = []
    for _ in range(repeats):
        gc.collect()
        start = time.perf_counter()
        result = work()
        seconds.append((time.perf_counter() - start) / share)
        del result
    return Timing(seconds)


def write_table(table: pa.Table, path: Path) -> None:
    """A plain Arrow file: what any program could have written."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
        out.write_table(table)


def read_table(path: Path) -> pa.Table:
    with pa.OSFile(str(path), "rb") as source:
        return pa.ipc.open_file(source).read_all()


def check_equal(rows: pa.Table, rollouts: list[list[Record]]) -> None:
    """Exit with the difference where the two do not give the same rows."""
    expected = [row for records in rollouts for row in peers.linearize(records)]
    if rows.num_rows != len(expected):
        sys.exit(f"trajkit gives {rows.num_rows} rows, plain Python {len(expected)}")
    for k, row in enumerate(expected):
        mine = {name: rows[name][k].as_py() for name in rows.schema.names}
        found = {
            "tokens": mine["input_ids"],
            "loss_mask": [int(m) for m in mine["loss_mask"]],
            "logprobs": [0.0 if p is None else p for p in mine["logprobs"]],
            "prompt_length": mine["prompt_length"],
        }
        for name, value in row.items():
            if found[name] != value:
                sys.exit(f"row {k}: {name} differs")


def kernel_rates(n_tokens: int, repeats: int) -> tuple[list[float], list[float]]:
    """GB/s of `trajkit.turns.lcp` and of memcmp, taking turns on two equal buffers."""
    a = np.random.default_rng(0).integers(0, 2**31, n_tokens, dtype=np.int32)
    b = a.copy()
    memcmp = ctypes.CDLL(None).memcmp
    memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    at_a, at_b, n_bytes = a.ctypes.data, b.ctypes.data, a.nbytes

    def by_trajkit() -> bool:
        return tk.turns.lcp(a, b) == n_tokens

    def by_memcmp() -> bool:
        return memcmp(at_a, at_b, n_bytes) == 0

    if not (by_trajkit() and by_memcmp()):
        sys.exit("the kernel and memcmp disagree on equal buffers")
    start = time.perf_counter()
    by_memcmp()
    loops = max(1, round(KERNEL_SAMPLE_S / (time.perf_counter() - start)))
    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for work, into in zip((by_trajkit, by_memcmp), rates, strict=True):
            start = time.perf_counter()
            for _ in range(loops):
                work()
            into.append(n_bytes * loops / (time.perf_counter() - start) / 1e9)
    return rates


def machine() -> str:
    """Processor, cores and system in a line."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    return f"{cpu}, {os.cpu_count()} cores, {platform.system()}"


def commit() -> str:
    """The commit of this working tree; says so where files differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=HERE, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    name = git("rev-parse", "--short", "HEAD")
    if not name:
        return "not in a git checkout"
    return f"{name} and changes" if git("status", "--porcelain") else name


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description="Time trajkit beside plain Python, answers checked first.",
    )
    parser.add_argument("--size", choices=SIZES, default="long")
    parser.add_argument("--shape", choices=SHAPES, default="clean")
    parser.add_argument("--rollouts", type=int, default=8, help="per batch (8)")
    parser.add_argument("--repeats", type=int, default=7, help="of each timing (7)")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    choices = parse(words)
    size, n, repeats = SIZES[choices.size], choices.rollouts, choices.repeats
    print(f"command  python -m benchmarks.compare {shlex.join(words or sys.argv[1:])}")
    print(f"commit   {commit()}")
    print(f"machine  {machine()}")
    print(
        f"python   {platform.python_version()}, pyarrow {pa.__version__}, "
        f"numpy {np.__version__}"
    )
    print(
        f"data     {n} {choices.shape} rollouts of {size.n_turns} turns and "
        f"{size.context} tokens of context; times are per rollout, medians of "
        f"{repeats}, and the range"
    )
    rollouts = [
        as_parsed(rollout(f"s{k}", size, choices.shape, seed=k)) for k in range(n)
    ]
    records = [record for one in rollouts for record in one]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "turns.arrow"
        write_table(tk.from_records(records), path)
        rows = tk.linearize(read_table(path), policy="slime")
        check_equal(rows, rollouts)
        print(
            f"checked  {rows.num_rows} rows, {sum_of(rows)} trained tokens: tokens, "
            "mask and logprobs are equal\n"
        )
        plain = timed(
            repeats,
            lambda: [peers.linearize(one) for one in rollouts],
            n,
        )
        print(f"{'rows':<44}{plain}   slime's rule over lists")
        table = read_table(path)
        for label, threads in (("one thread", 1), ("all cores", None)):
            ours = timed(
                repeats,
                partial(tk.linearize, table, policy="slime", threads=threads),
                n,
            )
            show(f"  linearize, table read from file, {label}", ours, plain)
        ours = timed(
            repeats,
            lambda: tk.linearize(read_table(path), policy="slime", threads=1),
            n,
        )
        show("  reading the file included, one thread", ours, plain)

    ours = timed(
        repeats,
        lambda: tk.linearize(tk.from_records(records), policy="slime", threads=1),
        n,
    )
    show("  from_records + linearize, one thread", ours, plain)

    print()
    for n_tokens in (size.context, 16 * 2**20):
        lcp, memcmp = kernel_rates(n_tokens, max(repeats, 15))
        ratio = statistics.median(lcp) / statistics.median(memcmp)
        print(
            f"{f'prefix kernel, {n_tokens} tokens':<44}"
            f"{statistics.median(lcp):10.2f} GB/s   memcmp "
            f"{statistics.median(memcmp):.2f} GB/s   {ratio:.2f} of it"
        )


def sum_of(rows: pa.Table) -> int:
    masks: npt.NDArray[np.bool_] = (
        rows["loss_mask"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    )
    return int(masks.sum())


def show(label: str, ours: Timing, plain: Timing) -> None:
    times = plain.median / ours.median
    print(f"{label:<44}{ours}   {times:.1f} times as fast")


if __name__ == "__main__":
    main()
