"""Records of foreign formats, and the report of an import."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from trajkit.analysis.tokenizer import Tokenizer
from trajkit.schema import IMPORT_REPORT

LEFT_OUT = (
    "unreadable",
    "torn",
    "truncated",
    "no_prompt_ids",
    "no_output_ids",
    "no_parent",
    "lost",
    "not_a_prefix",
    "refused",
    "other_version",
    "other_file",
    "invalid",
)
"""Why a record is left out; docs/import.md explains each."""

KEPT = (
    "no_logprobs",
    "logprobs_unaligned",
    "no_session_id",
    "cut_output",
    "versions_unplaced",
    "not_sampled",
)
"""What a turn that is kept lacks."""


Sources: TypeAlias = str | PathLike[str] | Iterable[str | PathLike[str]]
"""A path, or an iterable of paths."""


class Refused(Exception):
    """A record is left out; the arguments are one of `LEFT_OUT` and the detail."""


@dataclass(slots=True)
class Finding:
    """A record of a foreign format.

    Inside ``with found:``, raising `Refused` marks the record as left out.
    """

    # its position in the file: "line 3"
    place: str
    # None: the record does not name it
    session: str | None = None
    # keys of `trajkit.from_records` and of `reader.EXTRAS`. None: unknown
    fields: dict[str, object] = field(default_factory=dict)
    # why it is left out, one of `LEFT_OUT`; empty: its fields decide
    problem: str = ""
    detail: str = ""
    # what it lacks if it is kept: of `KEPT`, with detail
    remarks: list[tuple[str, str]] = field(default_factory=list)

    def refuse(self, problem: str, detail: str = "") -> "Finding":
        """Mark the record as left out."""
        self.problem, self.detail = problem, detail
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        if isinstance(error, Refused):
            self.refuse(*error.args)
        return isinstance(error, Refused)


class Notes:
    """Collects the report of an import."""

    def __init__(self) -> None:
        self._rows: list[dict[str, object]] = []

    def add(
        self, file: Path, found: Finding, problem: str, detail: str, *, kept: bool
    ) -> None:
        """Add a problem of a record."""
        if problem not in (KEPT if kept else LEFT_OUT):
            raise ValueError(f"{problem!r} is not a known problem")
        self._rows.append(
            {
                "file": str(file),
                "place": _escaped(found.place),
                "session_id": _escaped(found.session),
                "problem": problem,
                "kept": kept,
                "detail": _escaped(detail),
            }
        )

    def table(self) -> pa.Table:
        """The problems in the order of the records."""
        return pa.Table.from_pylist(self._rows, schema=IMPORT_REPORT)


def _escaped(text: str | None) -> str | None:
    """The text, with lone surrogates escaped."""
    return text and text.encode("utf-8", "backslashreplace").decode()


class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer with a chat template, as transformers has them."""

    def apply_chat_template(
        self,
        conversation: list[dict[str, object]],
        *,
        tools: object,
        add_generation_prompt: bool,
        tokenize: bool,
    ) -> object:
        """The text that the template makes of messages."""


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The beginning of a file, which identifies its format."""

    file: Path
    # its first bytes
    magic: bytes
    # its first complete JSON object, if there is one
    value: dict[str, object] | None
    # why it could not be read
    trouble: str = ""

    def has(self, *names: str) -> bool:
        """Whether the object has all of these keys."""
        return self.value is not None and self.value.keys() >= set(names)


class Format(Protocol):
    """A module that reads a foreign format."""

    # its name as a value of --from
    NAME: str

    def detect(self, head: Head) -> bool:
        """Whether a file seems to have this format, given its beginning."""

    def read(self, file: Path, tokenizer: ChatTokenizer | None) -> Iterator[Finding]:
        """The records of a file in order."""


def text_of(value: object) -> str | None:
    """A string or an integer as text; anything else, or an empty string, as None."""
    if isinstance(value, str):
        return value or None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return None


def number_of(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if np.isfinite(number) else None


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


def unless_empty(value: object) -> object:
    """The value, or None for an empty list, which means that a record lacks it."""
    return None if isinstance(value, list) and not value else value


def has_items(value: object) -> bool:
    """Whether a value is a list or an array that is not empty."""
    return isinstance(value, list | tuple | np.ndarray) and len(value) > 0


def has_numbers(value: object) -> bool:
    """Whether a value is a list or an array that begins with a number."""
    if isinstance(value, np.ndarray):
        return len(value) > 0
    return isinstance(value, list) and bool(value) and isinstance(value[0], int | float)


def versions_of(value: object, n_output: int) -> list[dict[str, object]] | None:
    """One weight version for a complete output, in the form of turns."""
    name = text_of(value)
    if name is None or n_output == 0:
        return None
    return [{"version": name, "start": 0, "stop": n_output}]


def list_of(value: object) -> list[object]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def object_of(value: object) -> dict[str, object]:
    """The value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}
