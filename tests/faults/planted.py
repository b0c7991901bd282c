"""What a fault is, and all of them: a text that occurs once in a file, and what it becomes.

Each module beside this one has a table. A line with a file has the tests that should catch
the faults below it, without `tests/` and `.py`; a word behind a colon picks those with it in
their name. A fault is what is wrong then, in words, if need be, and `|old| -> |new|`. In a
text, a new line is written as \\n, and a backslash twice.

A fault of a kernel is a statement of one line, which becomes nothing, or an expression, in
«quotes» within the text that occurs once. All of them are built into one extension, and a
variable of the environment selects one.
"""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.faults.core import CORE
from tests.faults.gateway import GATEWAY
from tests.faults.kernels import KERNELS
from tests.faults.rollouts import ROLLOUTS
from tests.faults.training import TRAINING

ROOT = Path(__file__).parents[2]


class Fault(NamedTuple):
    file: str
    tests: tuple[str, ...]
    idea: str
    old: str
    new: str
    # the expression of a kernel within ``old`` that ``new`` takes the place of
    within: str = ""

    @property
    def of_kernel(self) -> bool:
        return self.file.startswith("_native/")

    @property
    def needs(self) -> str | None:
        """The package without which its tests are skipped."""
        return "torch" if self.tests[0].startswith("tests/torch") else None

    @property
    def name(self) -> str:
        return f"{self.file}: {self.idea}"


def _read(table: str) -> list[Fault]:
    """The faults of a table."""
    faults: list[Fault] = []
    file, tests, idea = "", (), ""
    for line in re.sub(r"\n {8}(?!\|)", " ", table).strip().splitlines():
        text = line.strip()
        if text == line:
            file, *names = line.replace(": ", " ", 1).split()
            tests = tuple(_path(name) for name in names)
        elif not text.startswith("|"):
            idea = text
        else:
            old, new = map(_unescaped, text[1:-1].split("| -> |"))
            within = re.search("«(.*)»", old)
            old = re.sub("[«»]", "", old)
            fault = Fault(
                file, tests, idea or text, old, new, within[1] if within else ""
            )
            faults.append(fault)
            idea = ""
    return faults


def _path(name: str) -> str:
    """The path of tests, with the word that picks some of them."""
    name, colon, word = name.partition(":")
    suffix = "" if (ROOT / "tests" / name).is_dir() else ".py"
    return f"tests/{name}{suffix}{colon}{word}"


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], text)


@cache
def all_faults() -> tuple[Fault, ...]:
    """Every fault, in order."""
    tables = (CORE, TRAINING, GATEWAY, ROLLOUTS, KERNELS)
    return tuple(fault for table in tables for fault in _read(table))
