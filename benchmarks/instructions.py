"""How many instructions each kernel takes on a fixed work, counted by callgrind.

    python -m benchmarks.instructions             prints them beside the stored counts
    python -m benchmarks.instructions --store     stores them

fails where a kernel takes a tenth more than is stored: a regression that no other load on
the machine can hide or feign. Counts depend on compiler and C library: they are stored for
the machine that ``.ci/run`` runs on; valgrind must be installed.
"""

import argparse
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import trajkit as tk
from benchmarks.data import SHAPES, SMALL, rollout
from benchmarks.forks import FORKS, forking

STORED = Path(__file__).with_name("instructions.json")
SLACK = 0.1
KERNEL = re.compile(r"__pyx_pw_7trajkit_5_core_\d+(\w+)")


def work() -> None:
    """What is counted: every stage on small runs of all shapes."""
    gc.disable()  # a collection falls into whichever kernel runs just then
    records = [
        record
        for k, shape in enumerate((*SHAPES, *FORKS))
        for record in (forking if shape in FORKS else rollout)(f"s{k}", SMALL, shape)
    ]
    turns = tk.from_records(records)
    delta = tk.compact(turns)
    tk.expand(delta)
    tk.classify_drift(turns, tk.link(turns))
    for policy in ("faithful", "slime", "segments", "graph", "polar", "nemo", "miles"):
        tk.linearize(turns, policy, threads=1)
        tk.linearize(delta, policy, threads=1)


def counts() -> dict[str, int]:
    """Instructions within each kernel, callees included, by its name.

    Raises
    ------
    RuntimeError
        The work failed under valgrind.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind.out"
        command = [
            "valgrind",
            "--tool=callgrind",
            f"--callgrind-out-file={out}",
            "--collect-atstart=no",
            "--toggle-collect=__pyx_pw_7trajkit_5_core_*",
            "--dump-instr=no",
            sys.executable,
            "-m",
            "benchmarks.instructions",
            "--work",
        ]
        # hashes decide the order of sets, and with it the work
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        return by_kernel(out.read_text())


def by_kernel(profile: str) -> dict[str, int]:
    """Inclusive instructions of the kernels in a callgrind profile.

    A function's own lines are ``line cost``; a call is a line ``calls=`` and, behind it,
    ``line cost`` of all that it did.
    """
    names: dict[str, str] = {}
    total: Counter[str] = Counter()
    inside: str | None = None
    for line in profile.splitlines():
        if line.startswith("fn="):
            number, _, name = line[3:].partition(" ")
            found = KERNEL.fullmatch(names.setdefault(number, name))
            inside = found[1] if found else None
        elif line.startswith("cfn="):
            number, _, name = line[4:].partition(" ")
            if name:
                names[number] = name
        elif inside is not None and re.match(r"[+\-*\d]", line):
            total[inside] += int(line.split()[1])
    return dict(sorted(total.items()))


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.instructions",
        description="Count the instructions of every kernel, beside those stored.",
    )
    parser.add_argument("--store", action="store_true", help="store what is counted")
    parser.add_argument("--work", action="store_true", help="only do what is counted")
    choices = parser.parse_args(words)
    if choices.work:
        work()
        return 0
    if shutil.which("valgrind") is None:
        print("valgrind is not installed: instructions are not counted")
        return 0
    counted = counts()
    if choices.store:
        STORED.write_text(json.dumps(counted, indent=2) + "\n")
    stored: dict[str, int] = json.loads(STORED.read_text())
    print(f"{'kernel':<24}{'instructions':>14}{'stored':>14}")
    slower = []
    for name in sorted({*counted, *stored}):
        now, before = counted.get(name, 0), stored.get(name, 0)
        ratio = f"{now / before:8.3f}" if before else "     new"
        print(f"{name:<24}{now:>14,}{before:>14,}{ratio}")
        if now > before * (1 + SLACK) or not now:
            slower.append(name)
    if slower:
        print(
            f"\nmore than {1 + SLACK:.1f} of what is stored, or gone: {', '.join(slower)}"
        )
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
