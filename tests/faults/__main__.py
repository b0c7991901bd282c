"""Plant each fault in a copy of the tree, run the tests that should catch it, and say which.

    python -m tests.faults                  all of them
    python -m tests.faults --only TEXT      those whose file or idea contains the text
    python -m tests.faults --check          only whether every text still occurs once

The result is stored in tests/faults/result.txt, a line for each fault. The exit code is 1 if
a fault was not caught, and 2 if the list does not fit the files.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from tests.faults.planted import ROOT, Fault, all_faults

RESULT = Path(__file__).with_name("result.txt")
_SELECTED = """
cdef int FAULT = -1


def select_fault(int number):
    global FAULT
    FAULT = number
"""
_AFTER = "\nfrom trajkit.errors import InvalidTurnsError, LayoutError\n"  # of core.pyx


def misfits() -> Iterator[str]:
    """What is wrong with the list itself."""
    for fault in all_faults():
        path = ROOT / fault.file
        n = path.read_text().count(fault.old) if path.exists() else 0
        if n != 1:
            yield f"{fault.file}: {fault.old!r} occurs {n} times"
        if fault.within and fault.old.count(fault.within) != 1:
            yield f"{fault.file}: {fault.within!r} is not once in {fault.old!r}"
        for test in fault.tests:
            if not (ROOT / test.partition(":")[0]).exists():
                yield f"{fault.file}: no tests {test}"


def switched(text: str, fault: Fault, number: int) -> str:
    """The text of a kernel with a fault that is selected by its number."""
    if fault.within:
        choice = f"(({fault.new}) if FAULT == {number} else ({fault.within}))"
        return text.replace(fault.old, fault.old.replace(fault.within, choice))
    return text.replace(fault.old, f"if FAULT != {number}: {fault.old}")


def copied(folder: Path) -> None:
    """A copy of the files that git knows, and of the extension."""
    listed = subprocess.check_output(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, text=True
    )
    built = [str(path.relative_to(ROOT)) for path in ROOT.glob("trajkit/_core*.so")]
    for name in [*listed.split("\0"), *built]:
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def build_kernels(folder: Path) -> None:
    """One extension with all faults of kernels."""
    for number, fault in enumerate(all_faults()):
        if fault.of_kernel:
            path = folder / fault.file
            path.write_text(switched(path.read_text(), fault, number))
    core = folder / "_native" / "core.pyx"
    core.write_text(core.read_text().replace(_AFTER, _AFTER + _SELECTED))
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
    subprocess.run(command, cwd=folder, check=True)


def tried(chosen: list[Fault]) -> Iterator[tuple[Fault, str | None]]:
    """Each fault, with the test that caught it."""
    faults = all_faults()
    numbers = [faults.index(one) for one in chosen]
    tests = sorted({test.partition(":")[0] for one in chosen for test in one.tests})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copied(folder)
        if any(fault.of_kernel for fault in chosen):
            build_kernels(folder)
        found = folder / "found.jsonl"
        found.touch()
        roots = (folder, folder / "shim", folder / "examples" / "train")
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, roots)),
            "TRAJKIT_FAULTS": json.dumps(numbers),
            "TRAJKIT_FOUND": str(found),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.faults.forks"]
        options = ["-p", "no:cacheprovider", "-p", "no:xdist", *tests]
        with (
            subprocess.Popen(
                [*command, *options], cwd=folder, env=environment, stdout=sys.stderr
            ) as run,
            found.open() as lines,
        ):
            while True:
                ended = run.poll() is not None
                for text in lines:
                    number, failed = json.loads(text)
                    yield faults[number], failed or None
                if ended:
                    break
                time.sleep(0.5)


def line(fault: Fault, caught: str | None) -> str:
    what = "NOT CAUGHT" if caught is None else f"caught by {caught}"
    return f"{fault.name}: {what}"


def stored() -> dict[str, str]:
    """The lines of the stored result, by the names of their faults."""
    lines = RESULT.read_text().splitlines() if RESULT.exists() else []
    names = [fault.name for fault in all_faults()]
    return {
        name: text for name in names for text in lines if text.startswith(f"{name}: ")
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    wrong = list(misfits())
    print(*wrong, sep="\n", end="\n" * bool(wrong))
    if wrong or options.check:
        return 2 if wrong else 0
    chosen = [
        fault
        for fault in all_faults()
        if options.only in fault.name
        and (fault.needs is None or find_spec(fault.needs))
    ]
    missed = 0
    for fault, caught in tried(chosen):
        missed += caught is None
        print(line(fault, caught), flush=True)
        results = stored() | {fault.name: line(fault, caught)}
        order = [results[one.name] for one in all_faults() if one.name in results]
        RESULT.write_text("".join(f"{text}\n" for text in order))
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
