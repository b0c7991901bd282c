"""What is found in files of other systems: calls, and why some are left out."""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np


class Refused(Exception):
    """A record is left out; the arguments are the problem and the detail."""


@dataclass(slots=True)
class Finding:
    """A record of a foreign format.

    Inside ``with found:``, raising `Refused` marks the record as left out.
    """

    # its position in the file: "line 3"
    place: str
    # None: the record does not name it
    session: str | None = None
    # why it is left out (docs/import.md lists them); empty: its fields decide
    problem: str = ""
    detail: str = ""
    # keys of `trajkit.from_records` and of `reader.EXTRAS`. None: unknown
    fields: dict[str, Any] = field(default_factory=dict)
    # what it lacks if it is kept, with details
    remarks: list[tuple[str, str]] = field(default_factory=list)
    # what the source states about numbers of tokens: its name, "prompt_ids" or
    # "output_ids", and the number
    claims: list[tuple[str, str, object]] = field(default_factory=list)
    # keys that may name the run, and keys that no field reads, with their values
    run_keys: dict[str, object] = field(default_factory=dict)
    unread: dict[str, object] = field(default_factory=dict)
    # of the request
    tools: object = None
    # tells apart the conversations of a file
    origin: str = ""

    def refuse(self, problem: str, detail: str = "") -> None:
        """Mark the record as left out."""
        self.problem, self.detail = problem, detail

    def copy(self, suffix: str, *, first: bool = True) -> "Finding":
        """One of several calls of the record; what is unread counts for the first."""
        return replace(
            self,
            place=self.place + suffix,
            fields=dict(self.fields),
            remarks=list(self.remarks),
            claims=[],
            unread=self.unread if first else {},
        )

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        if isinstance(error, Refused):
            self.refuse(*error.args)
        return isinstance(error, Refused)


def text_of(value: object) -> str | None:
    """A string or an integer as text; anything else, or an empty string, as None."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return (str(value) or None) if isinstance(value, str) or is_integer else None


def number_of(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if np.isfinite(float(value)) else None
    except OverflowError:
        return None


def time_of(value: object) -> datetime | None:
    """A time from seconds since 1970 or ISO text with a time zone, or None."""
    try:
        if isinstance(value, str):
            time = datetime.fromisoformat(value)
            return time.astimezone(UTC) if time.tzinfo else None
        seconds = number_of(value)
        return datetime.fromtimestamp(seconds, UTC) if seconds else None
    except (ValueError, OverflowError, OSError):
        return None


def unless_empty(value: object) -> Any:
    """The value, or None for an empty list, which means that a record lacks it."""
    return None if isinstance(value, list) and not value else value


def is_array(value: object) -> bool:
    """Whether a value is a list or an array."""
    return isinstance(value, list | np.ndarray)


def has_items(value: object) -> bool:
    """Whether a value is a list or an array that is not empty."""
    return isinstance(value, list | tuple | np.ndarray) and len(value) > 0


def list_of(value: object) -> list[Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def object_of(value: object) -> dict[str, Any]:
    """The value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}
