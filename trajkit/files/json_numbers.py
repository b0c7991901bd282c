"""JSON to Python values, with long arrays of token ids as numpy arrays.

A `Reader` knows the keys of such arrays in a text (its shape), parses them itself, and
leaves the rest to ``json``. An array that does not fit the shape (an id of
3.0, a null) is left to it, too: the value is the one of ``json.loads``. Prompts of a log
repeat earlier ones, and text that is equal to an earlier array's is not parsed again. Logs
are read at 14 times the speed of ``json.loads`` (docs/benchmarks.md); the kernels are in
``_native/text.pxi``.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Final, Literal, NamedTuple, TypeAlias, Union

import numpy as np
import numpy.typing as npt

from trajkit import _core
from trajkit.turns.messages import parse_json

Leaf: TypeAlias = Literal["ids", "items"]
Shape: TypeAlias = Mapping[str, Union["Shape", Leaf]]
"""The long arrays of an object by key; `EACH` stands for the elements of an array.

`IDS` is an array of integers in [0, 2**31), which becomes one of int32. `ITEMS` is an
array of anything; its elements are the same objects as in an earlier line with the same
text.
"""

IDS: Final[Leaf] = "ids"
ITEMS: Final[Leaf] = "items"
EACH: Final = "*"

_Ids: TypeAlias = npt.NDArray[np.int32]
_Cut: TypeAlias = _Ids | list[object]

_SPACE = re.compile(rb"[ \t\n\r]*")
# a key without an escape, and what follows up to its value
_KEY = re.compile(rb'[ \t\n\r]*"([^"\\]*)"[ \t\n\r]*:[ \t\n\r]*')
# replaces an array in the text; the parser calls a hook for it
_HOLE = b"NaN"
# arrays to compare with, from sessions that were recorded at the same time
_KEPT = 32
# bytes of the shortest array to keep
_WORTH = 1 << 12


class _Seen(NamedTuple):
    """An array that was parsed: its text without brackets, and its values."""

    line: bytes
    start: int
    stop: int
    values: _Cut
    # where each item ends, counted from start; empty for ids
    ends: list[int]


_NOTHING = _Seen(b"", 0, 0, [], [])


class _Slot:
    """A key of the shape, and its latest arrays, the newest last."""

    def __init__(self, leaf: Leaf) -> None:
        self._read = _read_items if leaf == ITEMS else _read_ids
        self._seen: list[_Seen] = []

    def read(self, line: bytes, start: int) -> _Seen | None:
        """The array at ``start``; None if it has anything else than ids."""
        # the earlier array with the longest prefix in common
        before, same = _NOTHING, 0
        for one in reversed(self._seen):
            n = _core.json_shared(line, start, one.line, one.start, one.stop)
            if n > same:
                before, same = one, n
                if n == one.stop - one.start:
                    break
        array = found = self._read(line, start, before, same)
        if array is not None and array.stop - start >= _WORTH:
            # of two that share most of their text, the longer one is kept
            sizes = array.stop - start, before.stop - before.start
            if 2 * same > min(sizes):
                array = array if sizes[0] >= sizes[1] else before
                self._seen = [one for one in self._seen if one is not before]
            self._seen = [*self._seen, array][-_KEPT:]
        return found


_Places: TypeAlias = Mapping[bytes, Union["_Places", _Slot]]


class _OddError(ValueError):
    """The text does not fit the shape: Python's parser takes it."""


class Reader:
    """Parses texts of one shape, one after another."""

    def __init__(self, shape: Shape) -> None:
        self._places = _places(shape)
        self._decoder = json.JSONDecoder(parse_constant=self._take)
        self._pieces: list[bytes] = []
        # the rest of the text begins here
        self._at = 0
        self._arrays: list[_Cut] = []
        self._cut: Iterator[_Cut] = iter([])

    def read(self, line: bytes) -> object:
        """The value of a JSON text, as ``json.loads`` but with numpy arrays."""
        self._pieces, self._at, self._arrays = [], 0, []
        # invalid JSON, a NaN, or nested too deep: parse the text again
        with suppress(ValueError, RecursionError):
            self._value(line, _past_space(line, 0), self._places)
            if self._arrays:
                self._cut = iter(self._arrays)
                rest = b"".join((*self._pieces, line[self._at :])).decode()
                value: object = self._decoder.decode(rest)
                return value
        return parse_json(line.decode())

    def _take(self, _: str) -> _Cut:
        for array in self._cut:
            return array
        raise _OddError

    def _value(self, line: bytes, at: int, within: _Places | _Slot | None) -> int:
        """Cut the shape's arrays out of the value at ``at``; returns its end."""
        opening = line[at : at + 1]
        if isinstance(within, _Slot):
            if opening == b"[" and (array := within.read(line, at + 1)) is not None:
                if len(array.values):
                    self._pieces += (line[self._at : at], _HOLE)
                    self._at = array.stop + 1
                    self._arrays.append(array.values)
                return array.stop + 1
        elif within is not None:
            if opening == b"{":
                return self._children(line, at + 1, b"}", within)
            if opening == b"[" and _EACH in within:
                return self._children(line, at + 1, b"]", within)
        return _end(line, at)

    def _children(self, line: bytes, at: int, closing: bytes, within: _Places) -> int:
        """Cut the arrays out of the members of an object or the elements of an array."""
        at = _past_space(line, at)
        if line[at : at + 1] == closing:
            return at + 1
        more = True
        while more:
            name = _EACH
            if closing == b"}":
                key = _KEY.match(line, at)
                if key is None:
                    raise _OddError
                name, at = key[1], key.end()
            at, more = _next(line, self._value(line, at, within.get(name)), closing)
        return at


def _read_ids(line: bytes, start: int, before: _Seen, same: int) -> _Seen | None:
    stop = line.find(b"]", start + same)
    if stop < 0:
        raise _OddError
    # ids before the last comma of the shared text are known
    known = line.rfind(b",", start, start + same) + 1
    n_known = 0
    if known:
        after = before.start + known - start
        commas = before.line.count(b",", after, before.stop)
        n_known = len(before.values) - commas - 1
    n_new = line.count(b",", known or start, stop) + 1
    ids = np.empty(n_known + n_new, np.int32)
    if not _core.json_ids(line, known or start, ids[n_known:]):
        return None
    ids[:n_known] = np.asarray(before.values[:n_known], np.int32)
    return _Seen(line, start, stop, ids, [])


def _read_items(line: bytes, start: int, before: _Seen, same: int) -> _Seen:
    # an item that continues after the shared text (12, 123) has no comma there
    n_known = bisect_right(before.ends, same)
    items, ends = [*before.values[:n_known]], before.ends[:n_known]
    at = _past_space(line, start + ends[-1] if ends else start)
    more = True
    if ends:
        at, more = _next(line, at, b"]")
    elif line[at : at + 1] == b"]":
        at, more = at + 1, False
    first = at
    while more:
        end = _end(line, at)
        ends.append(end - start)
        at, more = _next(line, end, b"]")
    if len(ends) > n_known:
        items += json.loads(f"[{line[first:at].decode()}")
        if len(items) != len(ends):
            raise _OddError
    return _Seen(line, start, at - 1, items, ends)


def _past_space(line: bytes, at: int) -> int:
    return _SPACE.match(line, at).end()  # type: ignore[union-attr]


def _end(line: bytes, at: int) -> int:
    """The end of the value at ``at``."""
    end: int = _core.json_value_end(line, at)
    if end <= at:
        raise _OddError
    return end


def _next(line: bytes, at: int, closing: bytes) -> tuple[int, bool]:
    """The position after the comma or bracket at ``at``, and whether more follows."""
    at = _past_space(line, at)
    sign = line[at : at + 1]
    if sign == b",":
        return _past_space(line, at + 1), True
    if sign != closing:
        raise _OddError
    return at + 1, False


_EACH = EACH.encode()


def _places(shape: Shape) -> _Places:
    return {
        name.encode(): _Slot(within) if isinstance(within, str) else _places(within)
        for name, within in shape.items()
    }
