"""A run from Parquet to Parquet: tokens per second, and the memory that it takes.

    python -m benchmarks.stream

writes a run of rollouts of mixed shape in delta form, as a gateway logs it, and puts it
through `trajkit.run` in a process of its own, whose memory is watched. Threads
read, make rows and write, as many at a time as there are cores. The same work in plain
Python over lists is timed on a sample: read a Parquet file with pyarrow, make the rows of
each rollout by the rule, write them with pyarrow. The rows of the sample are compared
first. Tokens are those of the rows that are written. A last line has the run from and to
Arrow IPC streams, which are not compressed.
"""

import argparse
import json
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import trajkit as tk
from benchmarks.compare import commit, machine
from benchmarks.data import mixed, rollout
from tests.file_stages import expand_file, linearize_file
from tests.oracles import peers_chains
from trajkit.files.run import Watch

POLICY = "trl"
MiB = 1 << 20


def recorded(n_rollouts: int) -> Iterator[pa.RecordBatch]:
    """The turns of a run in delta form, rollout by rollout."""
    for k, (name, size, shape) in enumerate(mixed(n_rollouts)):
        recorder = tk.Recorder()
        for record in rollout(name, size, shape, k, spoken=False):
            del record["session_id"]
            recorder.record(name, **record)
        yield from recorder.turns(name).to_batches()


def plain_sessions(path: Path) -> Iterator[list[dict[str, Any]]]:
    """The calls of each session of a file, as lists, prompts in full."""
    turns = (
        turn
        for batch in pq.ParquetFile(path).iter_batches(256)
        for turn in batch.to_pylist()
    )
    for _, calls in groupby(turns, lambda turn: turn["session_id"]):
        session = list(calls)
        if "suffix_ids" in session[0]:
            held: dict[int, list[int]] = {}
            for turn in session:
                base = [] if turn["base_turn"] is None else held[turn["base_turn"]]
                prompt = base[: turn["shared_length"]] + turn["suffix_ids"]
                turn["prompt_ids"] = prompt
                held[turn["turn_index"]] = prompt + turn["output_ids"]
        yield session


def plain_rows(path: Path) -> Iterator[list[dict[str, Any]]]:
    """The rows of each session by the rule over lists."""
    for session in plain_sessions(path):
        yield [
            {
                "session_id": session[0]["session_id"],
                "row_index": k,
                "input_ids": row["tokens"],
                "loss_mask": [bool(trained) for trained in row["loss_mask"]],
                "logprobs": row["logprobs"],
                "prompt_length": row["prompt_length"],
            }
            for k, row in enumerate(peers_chains.trl(session))
        ]


PLAIN_ROWS = pa.schema(
    [
        ("session_id", pa.string()),
        ("row_index", pa.int32()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("prompt_length", pa.int32()),
    ]
)


def plain_run(source: Path, output: Path) -> tuple[float, int]:
    """Seconds and tokens of the plain path from file to file."""
    start = time.perf_counter()
    n_tokens = 0
    with pq.ParquetWriter(output, PLAIN_ROWS) as writer:
        for rows in plain_rows(source):
            n_tokens += sum(len(row["input_ids"]) for row in rows)
            writer.write_table(pa.Table.from_pylist(rows, PLAIN_ROWS))
    return time.perf_counter() - start, n_tokens


def check_answers(source: Path) -> None:
    """End the program unless both ways give the same rows."""
    rows = tk.linearize(tk.read_turns(source), POLICY).to_pylist()
    plain = [row for session in plain_rows(source) for row in session]
    same = len(rows) == len(plain) and all(
        ours[name] == theirs[name]
        and [x or 0.0 for x in ours["logprobs"]] == theirs["logprobs"]
        for ours, theirs in zip(rows, plain, strict=True)
        for name in (
            "session_id",
            "row_index",
            "input_ids",
            "loss_mask",
            "prompt_length",
        )
    )
    if not same:
        sys.exit("this does not hold: plain Python gives the same rows")


def resident(line: str = "VmRSS", *, pid: int | str = "self") -> int:
    """Bytes of a process that are in memory, or were at most (VmHWM)."""
    # getrusage would tell the parent's peak where that is higher
    text = Path(f"/proc/{pid}/status").read_text()
    found = next(words for words in text.splitlines() if words.startswith(line))
    return int(found.split()[1]) * 1024


def warm(suffixes: tuple[str, str]) -> None:
    """The same on a few tokens: what is loaded when it is first used is there."""
    with tempfile.TemporaryDirectory() as name:
        source, output = (
            Path(name) / f"{stem}{suffix}"
            for stem, suffix in zip(("turns", "rows"), suffixes, strict=True)
        )
        call = {"session_id": "s", "prompt_ids": [1], "output_ids": [2]}
        tk.write_turns(tk.from_records([call]), source)
        linearize_file(source, output, POLICY)


def work(source: str, output: str) -> None:
    """What the watched process does: it prints what it took as one JSON object."""
    warm((Path(source).suffix, Path(output).suffix))
    seen: list[int] = []
    start = time.perf_counter()
    totals = linearize_file(
        source,
        output,
        POLICY,
        watch=Watch(advances=lambda n: seen.append(resident())),
    )
    half = len(seen) // 2
    said = {
        "seconds": time.perf_counter() - start,
        "tokens": totals["tokens_forward"],
        "first_half": max(seen[:half], default=0),
        "second_half": max(seen[half:], default=0),
        "peak": resident("VmHWM"),
    }
    print(json.dumps(said))


def watched(source: Path, output: Path) -> dict[str, float]:
    """What a process of its own takes to linearize the file."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.stream"),
            *("--work", str(source), str(output)),
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    said: dict[str, float] = json.loads(done.stdout)
    return said


def sample(source: Path, target: Path, n_rollouts: int) -> None:
    """Write every so manieth session of a file to another."""
    names = pq.read_table(source, columns=["session_id"])["session_id"].unique()
    some = set(names.to_pylist()[:: max(1, len(names) // n_rollouts)][:n_rollouts])
    tables = (
        table
        for batch in tk.scan_turns(source)
        for table in [pa.Table.from_batches([batch])]
        if not some.isdisjoint(table["session_id"].unique().to_pylist())
    )
    kept = pa.concat_tables(tables)
    keep = [name in some for name in kept["session_id"].to_pylist()]
    tk.write_turns(kept.filter(pa.array(keep)), target)


def report(label: str, rate: float, beside: float | None) -> None:
    """Print a line of tokens per second."""
    ratio = "" if beside is None else f"{rate / beside:10.1f} times plain"
    print(f"{label:<44}{rate / 1e6:9.2f} M tokens/s{ratio}")


@dataclass(frozen=True, slots=True)
class Streamed:
    """What putting a run through took: tokens per second, and memory in bytes.

    The plain path and the first rate of trajkit are of the sample.
    """

    run_bytes: int
    plain_full: float
    plain_delta: float
    ours_full: float
    ours_delta: float
    ours_streams: float  # from and to Arrow IPC
    run: dict[str, float]  # as `watched` says it


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stream",
        description="Put a run through from Parquet to Parquet, and watch its memory.",
    )
    parser.add_argument("--rollouts", type=int, default=10_000, help="(10000)")
    parser.add_argument("--sample", type=int, default=60, help="for plain Python (60)")
    parser.add_argument("--folder", help="where files are made (a temporary one)")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    choices = parser.parse_args(words)
    if choices.work:
        work(*choices.work)
        return
    print(f"command  python -m benchmarks.stream {shlex.join(words or sys.argv[1:])}")
    print(f"commit   {commit()}")
    print(f"machine  {machine()}")
    print(f"python   {platform.python_version()}, pyarrow {pa.__version__}\n")
    with tempfile.TemporaryDirectory(dir=choices.folder) as name:
        found = measure(Path(name), choices.rollouts, choices.sample)
    size = found.run_bytes / MiB
    print(f"{choices.rollouts:,} rollouts, delta form, {size:,.0f} MiB")
    print(f"the sample of {choices.sample}: the same rows both ways\n")
    report("plain Python, from full prompts", found.plain_full, None)
    report("plain Python, from delta form", found.plain_delta, None)
    report(
        "trajkit, from full prompts, of the sample", found.ours_full, found.plain_full
    )
    report("trajkit, from delta form", found.ours_delta, found.plain_delta)
    report(
        "  beside plain Python from full prompts", found.ours_delta, found.plain_full
    )
    report("  and from Arrow IPC to Arrow IPC", found.ours_streams, found.plain_full)
    said = found.run
    print(f"\n{said['tokens']:,.0f} tokens in {said['seconds']:.1f} s")
    for label in ("first_half", "second_half", "peak"):
        print(f"memory, {label.replace('_', ' '):<36}{said[label] / MiB:9,.0f} MiB")


def measure(folder: Path, n_rollouts: int, n_sample: int) -> Streamed:
    """Put a run through, and a sample of it by plain Python, rows compared first."""
    run, few, few_full = (folder / f"{n}.parquet" for n in ("run", "few", "few_full"))
    tk.write_turns(recorded(n_rollouts), run)
    sample(run, few, n_sample)
    expand_file(few, few_full)
    check_answers(few)
    rows = folder / "rows.parquet"
    plain = []
    for source in (few_full, few):
        seconds, tokens = plain_run(source, rows)
        plain.append(tokens / seconds)
    arrows = folder / "run.arrows"
    tk.write_turns(tk.scan_turns(run), arrows)
    ours = [
        watched(few_full, rows),
        watched(run, rows),
        watched(arrows, folder / "rows.arrows"),
    ]
    rates = [said["tokens"] / said["seconds"] for said in ours]
    return Streamed(run.stat().st_size, *plain, *rates, ours[1])


if __name__ == "__main__":
    main()
