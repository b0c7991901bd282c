"""What a reader of a foreign format finds, and what there is to say about it."""

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
"""Why a record gave no turn.

unreadable
    It is not what the format says: no JSON, no object, a field of another type.
torn
    The file ends within it.
truncated
    Its writer cut it short, and marked it so.
no_prompt_ids, no_output_ids
    It does not say which ids the engine consumed, or sampled; of a transcript: there is
    no message before the reply, or no reply.
no_parent
    Its prompt goes on from a record that is not there.
lost
    The source says that there was such a call, and has no record of it.
not_a_prefix
    A reply that the chat template does not put behind the prompt before it.
refused
    The chat template does not take the messages.
other_version
    It is of a version of the format that is not known here.
other_file
    A file of the directory is of no format known here.
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
"""What is missing from a turn that was taken.

no_logprobs
    The record has no logprobs for its output, or not for all of it; the detail counts.
logprobs_unaligned
    It has some, but not one per output id, or of other ids: null instead.
no_session_id
    The records of the file do not name their session: it is called as the file.
cut_output
    The source says that the end of what was sampled was cut off.
versions_unplaced
    It names several weight versions, and not which tokens each one sampled.
not_sampled
    A transcript: no engine sampled these ids, they are its text as a tokenizer has it.
"""


@dataclass(slots=True)
class Found:
    """A record of a foreign format, as far as it goes.

    Parameters
    ----------
    place : str
        Where in its file: ``line 3``.
    session : str or None
        None: the record does not say.
    fields : dict
        Of `trajkit.from_records`, and of `trajkit.importers.reader.EXTRAS`. Absent or None:
        the record does not say.
    problem, detail : str
        Why it gives no turn, one of `LEFT_OUT`; empty: its fields tell.
    remarks : list of tuple of str
        What is missing though it gives one: of `KEPT`, with detail.
    """

    place: str
    session: str | None = None
    fields: dict[str, object] = field(default_factory=dict)
    problem: str = ""
    detail: str = ""
    remarks: list[tuple[str, str]] = field(default_factory=list)


class Notes:
    """The report of an import as it grows."""

    def __init__(self) -> None:
        self._rows: list[dict[str, object]] = []

    def add(
        self, file: Path, found: Found, problem: str, detail: str, *, kept: bool
    ) -> None:
        """Note what is wrong with a record."""
        if problem not in (KEPT if kept else LEFT_OUT):
            raise ValueError(f"{problem!r} is no problem that is told here")
        self._rows.append(
            {
                "file": str(file),
                "place": _told(found.place),
                "session_id": None if found.session is None else _told(found.session),
                "problem": problem,
                "kept": kept,
                "detail": _told(detail),
            }
        )

    def table(self) -> pa.Table:
        """The notes in the order in which they were taken."""
        return pa.Table.from_pylist(self._rows, schema=IMPORT_REPORT)


def _told(text: str) -> str:
    """The text, with what is no Unicode (half of a surrogate pair) spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True)
class Options:
    """What a reader may be told; see `trajkit.import_turns`."""

    # messages, tools, whether a reply is asked for: the text of a prompt
    render: Callable[[list[dict[str, object]], object, bool], str] | None = None
    # the ids of a text
    encode: Callable[[str], object] | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a file, which tells its format."""

    file: Path
    # its first bytes
    magic: bytes
    # its first whole JSON object. None: it has none
    value: dict[str, object] | None
    # why its bytes cannot be had
    trouble: str = ""

    def has(self, *names: str) -> bool:
        """Whether the object has all of these keys."""
        return self.value is not None and self.value.keys() >= set(names)


class Format(Protocol):
    """A module of a foreign format."""

    # what --from calls it
    NAME: str

    def detect(self, head: Head) -> bool:
        """Whether a file is of this format, as far as its beginning tells."""

    def read(self, file: Path, options: Options) -> Iterator[Found]:
        """The records of a file in order."""


def text_of(value: object) -> str | None:
    """A name as text: numbers as they are written, what is no name as None."""
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
    """A time from seconds since 1970 or ISO text that names its zone, or None."""
    try:
        if isinstance(value, str):
            time = datetime.fromisoformat(value)
            return time.astimezone(UTC) if time.tzinfo else None
        seconds = number_of(value)
        return datetime.fromtimestamp(seconds, UTC) if seconds else None
    except (ValueError, OverflowError, OSError):
        return None


def unless_empty(value: object) -> object:
    """The value; None where it is an empty list, which is what a record without has."""
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
    """One weight version for all of an output, as turns have it."""
    name = text_of(value)
    if name is None or n_output == 0:
        return None
    return [{"version": name, "start": 0, "stop": n_output}]
