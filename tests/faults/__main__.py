"""Plant each fault in a copy of the tree, run the tests that should catch it, and say which.

    python -m tests.faults                  all of them
    python -m tests.faults --missed         those that the stored result does not call caught
    python -m tests.faults --untried        those that it does not have
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
from pathlib import Path

from tests.faults.planted import NATIVE, Change, Place, all_faults

ROOT = Path(__file__).parents[2]
RESULT = Path(__file__).with_name("result.txt")
_SELECTED = """
cdef int FAULT = -1


def select_fault(int number):
    global FAULT
    FAULT = number
"""
_AFTER = "\nfrom trajkit.errors import InvalidTurnsError, LayoutError\n"  # of core.pyx

Planted = tuple[Place, Change]


def misfits() -> Iterator[str]:
    """What is wrong with the list itself."""
    for place, change in all_faults():
        path = ROOT / place.file
        n = path.read_text().count(change.old) if path.exists() else 0
        if n != 1:
            yield f"{place.file}: {change.old!r} occurs {n} times"
        if change.within and change.old.count(change.within) != 1:
            yield f"{place.file}: {change.within!r} is not once in {change.old!r}"
        for test in place.tests:
            if not (ROOT / test).exists():
                yield f"{place.file}: no tests {test}"


def switched(text: str, change: Change, number: int) -> str:
    """The text of a kernel with a fault that is selected by its number."""
    if change.within:
        choice = f"(({change.new}) if FAULT == {number} else ({change.within}))"
        return text.replace(change.old, change.old.replace(change.within, choice))
    return text.replace(change.old, f"if FAULT != {number}: {change.old}")


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
    for number, (place, change) in enumerate(all_faults()):
        if place in NATIVE:
            path = folder / place.file
            path.write_text(switched(path.read_text(), change, number))
    core = folder / "_native" / "core.pyx"
    core.write_text(core.read_text().replace(_AFTER, _AFTER + _SELECTED))
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
    subprocess.run(command, cwd=folder, check=True)


def tried(chosen: list[Planted]) -> Iterator[tuple[Planted, str | None]]:
    """Each fault, with the test that caught it."""
    faults = all_faults()
    numbers = [faults.index(one) for one in chosen]
    tests = sorted({test for place, _ in chosen for test in place.tests})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copied(folder)
        if any(place in NATIVE for place, _ in chosen):
            build_kernels(folder)
        found = folder / "found.jsonl"
        found.touch()
        roots = (folder, folder / "shim", folder / "examples" / "train")
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, roots)),
            "TRAJKIT_HYPOTHESIS": "quick",
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


def line(fault: Planted, caught: str | None) -> str:
    place, change = fault
    what = "NOT CAUGHT" if caught is None else f"caught by {caught}"
    return f"{place.file}: {change.idea}: {what}"


def stored() -> dict[str, str]:
    """The lines of the stored result, by what they begin with."""
    lines = RESULT.read_text().splitlines() if RESULT.exists() else []
    names = [line(one, None).removesuffix("NOT CAUGHT") for one in all_faults()]
    return {name: text for name in names for text in lines if text.startswith(name)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--missed", action="store_true")
    parser.add_argument("--untried", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    wrong = list(misfits())
    print(*wrong, sep="\n", end="\n" * bool(wrong))
    if wrong or options.check:
        return 2 if wrong else 0
    chosen = [
        (place, change)
        for place, change in all_faults()
        if options.only in f"{place.file}: {change.idea}"
    ]
    if options.missed:
        known = stored()
        begins = {one: line(one, None).removesuffix("NOT CAUGHT") for one in chosen}
        chosen = [
            one for one in chosen if "caught by" not in known.get(begins[one], "")
        ]
    missed = 0
    for one, caught in tried(chosen):
        missed += caught is None
        print(line(one, caught), flush=True)
        results = stored()
        results[line(one, None).removesuffix("NOT CAUGHT")] = line(one, caught)
        order = [line(each, None).removesuffix("NOT CAUGHT") for each in all_faults()]
        RESULT.write_text("".join(f"{results[n]}\n" for n in order if n in results))
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
