"""What each stage holds at most, beyond its inputs.

    python -m benchmarks.memory

runs every stage once in a process of its own, which first goes through all of them with a
few tokens (so that what is imported late is there) and reads what the stage takes. It
prints, in MiB, what the inputs hold, and how far the peak of resident memory rises above
that while the stage works. Where the system lets a process set its peak back (Linux,
/proc/self/clear_refs), reading the inputs does not count.
"""

import argparse
import io
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

import trajkit as tk
from benchmarks.compare import commit, machine, read_table, write_table
from benchmarks.data import SIZES, Size, as_parsed, rollout
from benchmarks.json_in import log_lines
from benchmarks.stream import MiB, resident
from tests.oracles import peers_slime as peers

POLICY = "slime"

Stage = tuple[Callable[[Path], Any], Callable[[Any, Path], object]]
"""What reads the inputs from a folder, and what works on them."""


def turns_in(name: str) -> Callable[[Path], pa.Table]:
    return lambda folder: read_table(folder / f"{name}.arrow")


def lists_in(folder: Path) -> list[Any]:
    with (folder / "turns.jsonl").open("rb") as file:
        return [json.loads(line) for line in file]


def plain_rows(records: list[Any]) -> list[Any]:
    sessions: dict[str, list[Any]] = {}
    for record in records:
        sessions.setdefault(record["session_id"], []).append(record)
    return [row for calls in sessions.values() for row in peers.linearize(calls)]


STAGES: dict[str, Stage] = {
    "import, JSON lines": (
        lambda folder: None,
        lambda _, folder: tk.read_turns(folder / "turns.jsonl"),
    ),
    "import, json.loads into lists": (
        lambda folder: None,
        lambda _, folder: lists_in(folder),
    ),
    "compact": (turns_in("full"), lambda turns, _: tk.compact(turns)),
    "expand": (turns_in("delta"), lambda turns, _: tk.expand(turns)),
    "linearize, full prompts": (
        turns_in("full"),
        lambda turns, _: tk.linearize(turns, POLICY),
    ),
    "linearize, delta form": (
        turns_in("delta"),
        lambda turns, _: tk.linearize(turns, POLICY),
    ),
    "linearize, plain Python over lists": (
        lists_in,
        lambda records, _: plain_rows(records),
    ),
    "export to Parquet": (
        turns_in("rows"),
        lambda rows, folder: tk.write_rows(rows, folder / "written.parquet"),
    ),
    "verify": (
        lambda folder: (turns_in("rows")(folder), turns_in("delta")(folder)),
        lambda tables, _: tk.verify(*tables, POLICY),
    ),
}


@dataclass(frozen=True, slots=True)
class Held:
    """Resident bytes of a stage's process: of the inputs, and at most above them."""

    inputs: int
    above: int

    @property
    def whole(self) -> int:
        return self.inputs + self.above


def written(folder: Path, size: Size, n: int) -> None:
    """The inputs of every stage, for so many clean rollouts."""
    log = b"\n".join([*log_lines(size, n), b""])
    (folder / "turns.jsonl").write_bytes(log)
    records = (call for k in range(n) for call in rollout(f"s{k}", size, seed=k))
    full = tk.from_records(as_parsed(records))
    write_table(full, folder / "full.arrow")
    write_table(tk.compact(full), folder / "delta.arrow")
    write_table(tk.linearize(full, POLICY), folder / "rows.arrow")


def warm() -> None:
    """Everything once, on a few tokens: what is loaded when it is first used is there."""
    turns = tk.from_records(rollout("s", Size(2, 64, 8, 8, 8)))
    tk.expand(tk.compact(turns))
    rows = tk.linearize(turns, POLICY)
    tk.verify(rows, turns, POLICY)
    tk.write_rows(rows, io.BytesIO(), format="parquet")


def work(stage: str, folder: Path) -> None:
    """What the process of a stage does: it prints what it held as one JSON object."""
    read, does = STAGES[stage]
    warm()
    at_first = resident()
    inputs = read(folder)
    before = resident()
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")  # the peak is what is resident now
    result = does(inputs, folder)
    said = {"inputs": before - at_first, "above": resident("VmHWM") - before}
    del result, inputs
    print(json.dumps(said))


def measured(folder: Path) -> Iterator[tuple[str, Held]]:
    """Every stage, and what it held."""
    for stage in STAGES:
        words = [sys.executable, "-m", "benchmarks.memory", "--work", stage, folder]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        yield stage, Held(**json.loads(done.stdout))


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory",
        description="Print what each stage holds at most, beyond its inputs.",
    )
    parser.add_argument("--size", choices=SIZES, default="long")
    parser.add_argument("--rollouts", type=int, default=2, help="of the inputs (2)")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    choices = parser.parse_args(words)
    if choices.work:
        work(choices.work[0], Path(choices.work[1]))
        return
    print(f"command  python -m benchmarks.memory {shlex.join(words or sys.argv[1:])}")
    print(f"commit   {commit()}")
    print(f"machine  {machine()}\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written(folder, SIZES[choices.size], choices.rollouts)
        print(f"{'MiB':<44}{'inputs':>10}{'above':>10}")
        for stage, held in measured(folder):
            print(f"{stage:<44}{held.inputs / MiB:10.1f}{held.above / MiB:10.1f}")


if __name__ == "__main__":
    main()
