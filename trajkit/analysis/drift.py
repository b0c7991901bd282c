"""How prompts depart from their parents' paths: the ``drift`` and ``findings`` tables.

A stretch is a token range of the path and the range of the prompt in its place: path
start, path stop, prompt start, prompt stop.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit._arguments import chosen_int
from trajkit._kernel_names import members, numbers
from trajkit.analysis.tokenizer import Codec, Ids, Tokenizer
from trajkit.rows.linearize import read_linked
from trajkit.schema import CAUSES, DRIFT, FINDINGS, REGIONS, TEXT_CAUSES
from trajkit.tables.canonical import TableLike
from trajkit.tables.ragged import Array, Longs, Records, offsets_of
from trajkit.turns.attribution import SessionCalls
from trajkit.turns.sessions import Sessions

_Stretch: TypeAlias = tuple[int, int, int, int]
_Cause: TypeAlias = tuple[str | None, _Stretch]

# the columns that the kernel fills, in its order (_native/drift.pxi)
_DESCRIBED = tuple(members("DRIFT_"))
_RESYNC = ("resync_path", "resync_prompt", "resync_length")
numbers("REGION_", REGIONS)
numbers("CAUSE_", CAUSES)
numbers("DIFFERENCE_", ("path_start", "path_stop", "prompt_start", "prompt_stop"))

MIN_RUN = 8
"""Contiguous tokens that path and prompt must have in common to agree again."""

# Shorter common runs that may split an unexplained span, and the most parts it may have.
_CLOSER_RUNS = (4, 2, 1)
_MOST_PIECES = 64
# Causes that may hide others. Dropped text is not split at short runs, which are chance.
_COARSE = {"white_space": _CLOSER_RUNS, "reasoning_dropped": _CLOSER_RUNS[:1]}
# JSON is not searched in messages with more tokens.
_LONG_MESSAGE = 1 << 14
# Tokens read before and after a span: enough for a split word.
_NEIGHBOURS = 4

_REASONING = {"<think>": "</think>", "[THINK]": "[/THINK]", "◁think▷": "◁/think▷"}
_MARKS = re.compile(
    "(" + "|".join(map(re.escape, (*_REASONING, *_REASONING.values()))) + ")"
)
_LITERALS = {"True": "true", "False": "false", "None": "null"}
_LITERAL = re.compile(r"\b(?:True|False|None)\b")
_WORD = re.compile(r"\w*")


def classify_drift(
    turns: TableLike,
    links: TableLike,
    *,
    min_run: int = MIN_RUN,
    tokenizer: Tokenizer | None = None,
) -> pa.Table:
    """Classify how the prompt of each linked turn departs from its parent's path.

    Parameters
    ----------
    turns : table
        `trajkit.schema.TURNS` in full or delta form.
    links : table
        `trajkit.schema.LINKS` of the same turns, from `trajkit.link`.
    min_run : int
        Tokens that prompt and path must have in common to agree again after drift.
    tokenizer : Tokenizer, optional
        The engine's: any object with ``encode(text, add_special_tokens=False)`` and
        ``decode(ids, skip_special_tokens=False)``. ``cause`` is then that of the turn's
        first finding (`trajkit.analysis.explain_drift`), or ``clean``.

    Returns
    -------
    Table
        `trajkit.schema.DRIFT`, one row per turn with a parent. ``resync`` is the longest
        common run of ``min_run`` tokens or more after lcp, or the longest shorter one that
        ends with the message in which drift starts. docs/drift.md defines the causes.

    Raises
    ------
    SchemaError, InvalidTurnsError
        As `trajkit.linearize`.
    ArgumentError
        ``min_run`` is not an integer of 1 or more, or the tokenizer lacks a method.
    """
    min_run = chosen_int("min_run", min_run, 1)
    codec = None if tokenizer is None else Codec(tokenizer)
    calls, forest, linked = read_linked(turns, links)
    described = np.zeros((len(_DESCRIBED), len(linked)), np.int64)
    described[[*map(_DESCRIBED.index, _RESYNC)]] = -1
    _core.describe_drift(forest.paths, linked, min_run, described)
    rows = np.flatnonzero(linked["parent"] >= 0)
    found = dict(zip(_DESCRIBED, described[:, rows], strict=True))
    parent, shared = linked["parent"][rows], linked["lcp"][rows]
    size = calls.path_len[parent] - shared
    cause = codes(found["cause"], CAUSES)
    if codec is not None:
        causes = _causes(calls, linked, codec, min_run)
        first, names = np.zeros(len(rows), np.int8), ("clean", *TEXT_CAUSES)
        first[size > 0] = [names.index(one[2]) for one in causes if one[1] == 0]
        cause = codes(first, names)
    nowhere = found["resync_length"] < 0
    resync = [pa.array(found[name], pa.int32(), mask=nowhere) for name in _RESYNC]
    region = codes(found["region"], REGIONS)
    columns = shared, size, region, *resync, found["tokens_after_drift"], cause
    return turn_lines(DRIFT, calls, rows, calls.turn_index[parent], *columns)


def turn_lines(
    schema: pa.Schema,
    calls: Sessions,
    which: Longs | Sequence[int],
    *columns: Sequence[Any] | Array | pa.Array,
) -> pa.Table:
    """A table of the session and turn of the calls ``which``, and further columns."""
    rows = pa.array(np.asarray(which, np.int64))
    taken = calls.table.select(["session_id", "turn_index"]).take(rows)
    arrays = [
        values if isinstance(values, pa.Array) else pa.array(values, field.type)
        for field, values in zip(list(schema)[2:], columns, strict=True)
    ]
    return pa.Table.from_arrays([*taken.columns, *arrays], schema=schema)


def codes(values: Sequence[int] | Array, names: tuple[str, ...]) -> pa.Array:
    """Names by their number, with all of the names as categories."""
    indices = pa.array(np.asarray(values, np.int8))
    return pa.DictionaryArray.from_arrays(indices, pa.array(names))


def explain_drift(
    turns: TableLike, links: TableLike, tokenizer: Tokenizer, *, min_run: int = MIN_RUN
) -> pa.Table:
    """Explain every span where a prompt departs from its parent's path.

    Parameters
    ----------
    turns, links, tokenizer, min_run
        As for `trajkit.classify_drift`, and so are the errors. A span that no cause
        explains is split at shorter common runs if that explains every part.

    Returns
    -------
    Table
        `trajkit.schema.FINDINGS`: one or more rows per turn whose prompt does not begin
        with its parent's path, with causes of `trajkit.schema.TEXT_CAUSES`. Tokens that
        the prompt adds after the path are not findings. JSON is searched in messages of up
        to 16,384 tokens.
    """
    min_run = chosen_int("min_run", min_run, 1)
    codec = Codec(tokenizer)
    calls, _, linked = read_linked(turns, links)
    found = list(_causes(calls, linked, codec, min_run))
    which, number, cause, *rest = ([one[k] for one in found] for k in range(9))
    parent = calls.turn_index[linked["parent"][which]]
    cause = codes([TEXT_CAUSES.index(one) for one in cause], TEXT_CAUSES)
    return turn_lines(FINDINGS, calls, which, parent, number, cause, *rest)


def _causes(
    calls: Sessions, links: Records, codec: Codec, min_run: int
) -> Iterator[tuple[Any, ...]]:
    """The findings of every call: its index, and the columns from ``finding`` on."""
    for s in range(len(calls)):
        lo, hi = calls.offsets[s : s + 2].tolist()
        session = SessionCalls(calls.part(s, s + 1))
        for call in range(lo, hi):
            parent, shared = links["parent"][call].item(), links["lcp"][call].item()
            if parent < 0 or shared == calls.path_len[parent]:
                continue
            path = _Side(codec, calls.path(parent))
            prompt = _Side(codec, calls.prompt(call))
            other = other_text_cause(session, parent - lo, call - lo)
            causes = _explained(path, prompt, shared, min_run)
            for number, (cause, stretch) in enumerate(causes):
                texts = path.text(*stretch[:2]), prompt.text(*stretch[2:])
                yield call, number, cause or other, *stretch, *texts


def other_text_cause(calls: SessionCalls, parent: int, call: int) -> str:
    """The cause of different text that nothing else explains, from the messages."""
    before, now = calls.messages(parent), calls.messages(call)
    if before is None or now is None:
        return "other_text"
    reply = calls.table.column("response")[parent].as_py()
    shown = before.keys + (reply["key"] if reply else b"")
    if not now.keys.startswith(shown):
        return "rewritten"
    # Without a recorded reply, nothing shows whether it came back unchanged.
    return "template" if reply else "other_text"


class _Side:
    """The tokens of one side, path or prompt, as text."""

    def __init__(self, codec: Codec, ids: Ids) -> None:
        self.ids, self.special = ids, codec.special(ids)
        # number of special tokens before each position, shape (n_ids + 1,)
        self.borders = np.append(0, np.cumsum(self.special)).astype(np.int32)
        self._ends = np.append(np.flatnonzero(self.special), len(ids))
        pieces = [*map(codec.data, ids.tolist())]
        self._bytes, self._at = b"".join(pieces), offsets_of([*map(len, pieces)])
        # the start of a message, and its objects
        self._objects: tuple[int, list[tuple[int, int, str]]] = (-1, [])

    def text(self, start: int, stop: int) -> str:
        """The text of these tokens, with ``\\xe2`` for a byte of a split character."""
        own = self._bytes[self._at[start] : self._at[stop]]
        return own.decode("utf-8", "backslashreplace")

    def plain(self, start: int, stop: int) -> str:
        """The text without special tokens and white space."""
        kept = start + np.flatnonzero(~self.special[start:stop])
        return _squeezed("".join(self.text(at, at + 1) for at in kept.tolist()))

    def specials(self, start: int, stop: int) -> list[int]:
        found: list[int] = self.ids[start:stop][self.special[start:stop]].tolist()
        return found

    def ends_message(self, place: int) -> bool:
        """Whether a message ends before the token at this position."""
        return place == len(self.ids) or bool(self.special[place])

    def whole_words(self, start: int, stop: int, text: str) -> str:
        """A span's text in JSON's notation, with the rest of words that it cuts."""
        tail = self.before(start)[: -_NEIGHBOURS * 16 : -1]
        after = self.text(stop, min(stop + _NEIGHBOURS, len(self.ids)))
        words = [_WORD.match(one) for one in (tail, after)]
        head, rest = (one[0] if one else "" for one in words)
        return _squeezed(_in_json(head[::-1] + text + rest))

    def before(self, place: int) -> str:
        """The text of a message up to a position."""
        return self.text(self._message(place)[0], place)

    def objects(self, place: int) -> list[tuple[int, int, str]]:
        """The `json_objects` in the message of the token at this position."""
        start, stop = self._message(place)
        if self._objects[0] != start:
            short = stop - start <= _LONG_MESSAGE
            self._objects = start, json_objects(self.text(start, stop)) if short else []
        return self._objects[1]

    def _message(self, place: int) -> tuple[int, int]:
        """The tokens between special ones that the token at this position is of."""
        k = int(np.searchsorted(self._ends, place))
        start = int(self._ends[k - 1]) + 1 if k else 0
        return start, max(int(self._ends[min(k, len(self._ends) - 1)]), start)


def _explained(path: _Side, prompt: _Side, lcp: int, min_run: int) -> Iterator[_Cause]:
    """The spans that differ, and the cause of each; None for other text."""
    after_lcp = lcp, len(path.ids), lcp, len(prompt.ids)
    for stretch in _differences(path, prompt, after_lcp, min_run):
        cause = _text_cause(path, prompt, stretch)
        runs = _CLOSER_RUNS if cause is None else _COARSE.get(cause, ())
        pieces = _closer(path, prompt, stretch, [run for run in runs if run < min_run])
        if any(one != cause for one, _ in pieces):
            yield from pieces
        else:
            yield cause, stretch


def _closer(
    path: _Side, prompt: _Side, stretch: _Stretch, runs: list[int]
) -> list[_Cause]:
    """The parts of a span if each has its own cause, else an empty list."""
    start, end, _, prompt_end = stretch
    for run in runs if start < end else ():
        pieces = _differences(path, prompt, stretch, run)
        # Tokens that the prompt has after the end of the path's span differ as well.
        after = pieces[-1][3] + end - pieces[-1][1]
        if after < prompt_end:
            pieces.append((end, end, after, prompt_end))
        if 1 < len(pieces) <= _MOST_PIECES:
            causes = (_text_cause(path, prompt, piece) for piece in pieces)
            explained = list(zip(takewhile(bool, causes), pieces, strict=False))
            if len(explained) == len(pieces):
                return explained
    return []


def _differences(
    path: _Side, prompt: _Side, stretch: _Stretch, run: int
) -> list[_Stretch]:
    start, stop, prompt_start, prompt_stop = stretch
    out = np.empty((stop - start + 1, 4), np.int64)
    n_found = _core.align(
        path.ids[start:stop],
        prompt.ids[prompt_start:prompt_stop],
        path.borders[start : stop + 1],
        prompt.borders[prompt_start : prompt_stop + 1],
        run,
        out,
    )
    found = out[:n_found] + np.array([start, start, prompt_start, prompt_start])
    return [(a, b, c, d) for a, b, c, d in found.tolist()]


def _text_cause(path: _Side, prompt: _Side, stretch: _Stretch) -> str | None:
    """The cause (`trajkit.schema.TEXT_CAUSES`) of a span, or None for other text."""
    old, new = stretch[:2], stretch[2:]
    if new[0] == len(prompt.ids):
        return "truncated"
    was, now = path.text(*old), prompt.text(*new)
    other_specials = path.specials(*old) != prompt.specials(*new)
    ordinary = not path.specials(*old) and not other_specials
    if was == now:
        return "special_tokens" if other_specials else "same_text"
    if other_specials and path.plain(*old) == prompt.plain(*new):
        return "special_tokens"
    same_space = _squeezed(was) == _squeezed(now)
    if not same_space and path.whole_words(*old, was) == prompt.whole_words(*new, now):
        return "boolean"
    if ordinary and _same_object(path, prompt, stretch, was, now):
        return "tool_arguments"
    if same_space:
        return "white_space"
    answer, reasoned = _without_reasoning(was, path.before(old[0]))
    other, still = _without_reasoning(now, prompt.before(new[0]))
    if not still and answer == other:
        return "reasoning_dropped" if reasoned else "template"
    if ordinary and was.startswith(now) and path.ends_message(old[1]):
        end = prompt.text(new[1], min(new[1] + 1, len(prompt.ids)))
        if prompt.ends_message(new[1]):
            # Sampled text may have been read as the end of the message.
            return "special_tokens" if end and end in was else "truncated"
    return None


def _same_object(
    path: _Side, prompt: _Side, stretch: _Stretch, was: str, now: str
) -> bool:
    """Whether the texts are part of equal JSON objects, with the same index."""
    head = _in_common(was, now)
    rest = _in_common(was[head:][::-1], now[head:][::-1])
    found = []
    for side, start, text in ((path, stretch[0], was), (prompt, stretch[2], now)):
        first = len(side.before(start)) + head
        last = first + len(text) - head - rest
        for number, (at, end, value) in enumerate(side.objects(start)):
            if (at < first and last < end) or (at, end) == (first, last):
                found.append((number, value))
    return len(found) == 2 and found[0] == found[1]


def _in_common(a: str, b: str) -> int:
    pairs = zip(a, b, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def json_objects(text: str) -> list[tuple[int, int, str]]:
    """The outermost JSON objects in a text: start, stop, value in canonical form.

    Python literals count as JSON's, whole floats as integers. ``arguments`` in a string
    counts as the object.
    """
    text = _in_json(text)
    found = []
    at = text.find("{")
    while at >= 0:
        try:
            value, stop = _DECODER.raw_decode(text, at)
            found.append((at, stop, json.dumps(value, sort_keys=True)))
        except (ValueError, RecursionError):
            stop = at + 1
        at = text.find("{", stop)
    return found


def _with_arguments(value: dict[str, Any]) -> dict[str, Any]:
    if isinstance(value.get("arguments"), str):
        with suppress(ValueError):
            value["arguments"] = _DECODER.decode(value["arguments"])
    return value


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


_DECODER = json.JSONDecoder(object_hook=_with_arguments, parse_float=_number)


def _in_json(text: str) -> str:
    return _LITERAL.sub(lambda match: _LITERALS[match[0]], text)


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _without_reasoning(text: str, before: str) -> tuple[str, bool]:
    """The text outside reasoning without white space, and whether any is inside."""
    opened, closed = (
        max(map(before.rfind, marks)) for marks in (_REASONING, _REASONING.values())
    )
    inside, kept, reasoned = opened > closed, "", False
    for piece in _MARKS.split(text):
        if _MARKS.fullmatch(piece):
            inside = piece in _REASONING
        elif inside:
            reasoned |= bool(piece.strip())
        else:
            kept += piece
    return _squeezed(kept), reasoned
