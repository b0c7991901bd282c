"""What a fault is: one piece of text of one file, and what it becomes."""

from dataclasses import dataclass
from typing import NamedTuple


class Change(NamedTuple):
    """What is wrong then, the text that occurs once in the file, and what it becomes."""

    idea: str
    old: str
    new: str
    # of a kernel: the expression within ``old`` that ``new`` takes the place of
    within: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """The faults of one file, and the tests that should catch them."""

    file: str
    tests: tuple[str, ...]
    changes: tuple[Change, ...]


def place(file: str, tests: str, *changes: tuple[str, ...]) -> Place:
    return Place(file, tuple(tests.split()), tuple(Change(*one) for one in changes))
