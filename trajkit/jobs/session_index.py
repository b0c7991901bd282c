"""What a log holds, by session, without its turns."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from trajkit._arrow.canonical import check_session_id
from trajkit.errors import TornLogWarning
from trajkit.io import jsonl
from trajkit.io.arrow import key_batches
from trajkit.io.formats import Format, format_of, is_json, open_input
from trajkit.turns.calls import Longs

# Bytes of text for a byte of a compressed file.
INFLATED = 8


@dataclass(slots=True)
class SessionIndex:
    """What the files hold, by session.

    Attributes
    ----------
    turns : dict of str to int
        How many turns each session has, in order of first appearance.
    n_bytes : int
        About what the turns take as Arrow.
    scattered : str or None
        The first session found that is not in one piece with its turns ascending.
    """

    turns: dict[str | None, int] = field(default_factory=dict)
    n_bytes: int = 0
    scattered: str | None = None
    _current: str | None = None
    _last: int = -1

    @property
    def n_turns(self) -> int:
        return sum(self.turns.values())

    def add(self, ids: pa.Array, index: Longs | None) -> None:
        """Count turns, which follow those that were counted before.

        Parameters
        ----------
        ids : array of string
        index : ndarray of int64, optional
            Their numbers. None: unknown, or counted by the reader.
        """
        if not len(ids):
            return
        # a null is a name of its own here; what reads the turns refuses it
        codes = ids.dictionary_encode("encode").indices.to_numpy()
        starts = np.concatenate([[0], 1 + np.flatnonzero(np.diff(codes)), [len(ids)]])
        for start, stop in pairwise(starts.tolist()):
            name = ids[start].as_py()
            before = self.turns.get(name, 0)
            goes_on = before > 0 and name == self._current
            own = None if index is None else index[start:stop]
            falls = own is not None and (
                (goes_on and own[0] < self._last) or bool((np.diff(own) < 0).any())
            )
            if (before and not goes_on) or falls:
                self.scattered = self.scattered or name
            self.turns[name] = before + stop - start
            self._current = name
            self._last = -1 if own is None else int(own[-1])


def index_sessions(paths: Iterable[Path], format: Format | None) -> SessionIndex:
    """Look through files for session ids and turn numbers.

    Of Parquet and of the file form of Arrow IPC no more is read than these.

    Raises
    ------
    FormatError
        As `trajkit.read_turns`.
    """
    census = SessionIndex()
    with warnings.catch_warnings():
        # what reads the turns says it
        warnings.simplefilter("ignore", TornLogWarning)
        for path in paths:
            kind = format or format_of(path)
            if is_json(kind):
                _count_lines(census, path, kind)
            else:
                _count_batches(census, path, kind)
    return census


def _count_lines(census: SessionIndex, path: Path, kind: Format) -> None:
    census.n_bytes += path.stat().st_size * (1 if kind == "jsonl" else INFLATED)
    for value in jsonl.lines(open_input(path, kind), str(path)):
        index = value.get("turn_index")
        census.add(
            pa.array([session_in(value)], pa.string()),
            np.array([index]) if type(index) is int else None,
        )


def session_in(record: dict[str, object]) -> str | None:
    """The session of a line; what has none is refused by what reads the turns."""
    name = record.get("session_id")
    if not isinstance(name, str):
        return None
    try:
        name.encode()
    except UnicodeEncodeError:
        return None
    return name


def _count_batches(census: SessionIndex, path: Path, kind: Format) -> None:
    for keys, n_bytes in key_batches(path, kind, ("session_id", "turn_index")):
        census.n_bytes += n_bytes
        if "session_id" in keys.schema.names:
            check_session_id(keys.schema)
            ids = keys.column("session_id").cast(pa.string())
            census.add(ids, turn_numbers(keys))


def turn_numbers(turns: pa.RecordBatch | pa.Table) -> Longs | None:
    """The column turn_index, where it is one of numbers."""
    if "turn_index" not in turns.schema.names:
        return None
    column = turns.column("turn_index")
    if not pa.types.is_integer(column.type) or column.null_count:
        return None
    return np.asarray(column.cast(pa.int64(), safe=False).to_numpy())
