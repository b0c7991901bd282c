"""Records of foreign formats, and the report of an import."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

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
"""Why a record is left out.

unreadable
    It does not fit the format: invalid JSON, no object, a field of another type.
torn
    The file ends within it.
truncated
    Its writer shortened it, and marked that.
no_prompt_ids, no_output_ids
    It lacks the ids that the engine consumed, or sampled. For a transcript: there is no
    message before the reply, or no reply.
no_parent
    Its prompt continues a record that is missing.
lost
    The source mentions the call, but has no record of it.
not_a_prefix
    The chat template does not render the reply after the same prompt.
refused
    The chat template does not accept the messages.
other_version
    It has an unknown version of the format.
other_file
    A file of the directory has an unknown format.
invalid
    A value breaks a rule of turns; the detail names it.
"""

KEPT = (
    "no_logprobs",
    "logprobs_unaligned",
    "no_session_id",
    "cut_output",
    "versions_unplaced",
    "not_sampled",
)
"""What a turn that is kept lacks.

no_logprobs
    The record has no logprobs for its output or for a part of it; the detail counts them.
logprobs_unaligned
    Its logprobs are not one per output id, or are of other ids; they become null.
no_session_id
    The records of the file do not name their session: it gets the file's name.
cut_output
    The source says that the end of the sampled output was removed.
versions_unplaced
    It names several weight versions, but not which tokens each one sampled.
not_sampled
    A transcript: no engine sampled these ids; a tokenizer encoded its text.
"""


@dataclass(slots=True)
class Finding:
    """A record of a foreign format.

    Parameters
    ----------
    place : str
        Its position in the file: ``line 3``.
    session : str or None
        None: the record does not name it.
    fields : dict
        Keys of `trajkit.from_records` and `trajkit.importers.reader.EXTRAS`. A missing
        key or None: unknown.
    problem, detail : str
        Why it is left out, one of `LEFT_OUT`; empty: its fields decide.
    remarks : list of tuple of str
        What it lacks if it is kept: of `KEPT`, with detail.
    """

    place: str
    session: str | None = None
    fields: dict[str, object] = field(default_factory=dict)
    problem: str = ""
    detail: str = ""
    remarks: list[tuple[str, str]] = field(default_factory=list)

    def refuse(self, problem: str, detail: str = "") -> "Finding":
        """Mark the record as left out."""
        self.problem = problem
        self.detail = detail
        return self


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
                "session_id": None
                if found.session is None
                else _escaped(found.session),
                "problem": problem,
                "kept": kept,
                "detail": _escaped(detail),
            }
        )

    def table(self) -> pa.Table:
        """The problems in the order of the records."""
        return pa.Table.from_pylist(self._rows, schema=IMPORT_REPORT)


def _escaped(text: str) -> str:
    """The text, with lone surrogates escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True)
class Options:
    """Functions that readers use; see `trajkit.import_turns`."""

    # from messages, tools, and whether a reply follows, to the text of a prompt
    render: Callable[[list[dict[str, object]], object, bool], str] | None = None
    # the ids of a text
    encode: Callable[[str], object] | None = None


@dataclass(frozen=True, slots=True)
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

    def read(self, file: Path, options: Options) -> Iterator[Finding]:
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
