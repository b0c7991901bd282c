"""Find the cause of a difference between two token spans from their texts."""

import json
import re
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trajkit._kernel_names import numbers
from trajkit.analysis.tokenizer import Codec, Ids

REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"))
"""Marks with which chat templates open and close reasoning."""

# JSON is not searched in messages with more tokens.
_LONG_MESSAGE = 1 << 14
# Tokens read before and after a span: enough for a split character or word.
_NEIGHBOURS = 4
_TAIL_CHARS = 64

_OPENS = {opens for opens, _ in REASONING}
_MARKS = re.compile(
    "(" + "|".join(re.escape(mark) for pair in REASONING for mark in pair) + ")"
)
_LITERALS = {"True": "true", "False": "false", "None": "null"}
_LITERAL = re.compile(r"\b(?:True|False|None)\b")
_WORD_END = re.compile(r"\w*\Z")
_WORD_START = re.compile(r"\w*")
_DECODER = json.JSONDecoder()


class Stretch(NamedTuple):
    """A token range of the path, and the range of the prompt in its place."""

    path_start: int
    path_stop: int
    prompt_start: int
    prompt_stop: int


numbers("Difference", Stretch._fields)


class Side:
    """The tokens of one side, path or prompt, as text."""

    def __init__(self, codec: Codec, ids: Ids) -> None:
        self.ids = ids
        self.special = codec.special(ids)
        # number of special tokens before each position, shape (n_ids + 1,)
        self.borders = np.zeros(len(ids) + 1, np.int32)
        np.cumsum(self.special, out=self.borders[1:])
        self._places: npt.NDArray[np.int64] = np.flatnonzero(self.special)
        self._codec = codec
        self._reader = _Reader(0, 0, 0, "", False)
        self._message: tuple[int, list[tuple[int, int, str]]] = (-1, [])

    def text(self, start: int, stop: int) -> str:
        """The text that these tokens add to the tokens before them."""
        lead = self.ids[max(start - _NEIGHBOURS, 0) : start]
        head = self._codec.text(lead)
        with_lead = self._codec.text(np.concatenate([lead, self.ids[start:stop]]))
        # A character may be split between lead and span.
        if with_lead.startswith(head):
            return with_lead[len(head) :]
        return self._codec.text(self.ids[start:stop])

    def wide_text(self, start: int, stop: int) -> str:
        """The text including neighbours, which may complete a split character."""
        return self._codec.text(
            self.ids[max(start - _NEIGHBOURS, 0) : stop + _NEIGHBOURS]
        )

    def plain(self, start: int, stop: int) -> str:
        """The text without special tokens."""
        return self._codec.plain(self.ids[start:stop])

    def specials(self, start: int, stop: int) -> list[int]:
        """The special tokens among these."""
        ids = self.ids[start:stop]
        found: list[int] = ids[self.special[start:stop]].tolist()
        return found

    def ends_message(self, place: int) -> bool:
        """Whether a message ends before the token at this position."""
        return place == len(self.ids) or bool(self.special[place])

    def word_after(self, place: int) -> str:
        """The rest of a word that continues at this position."""
        match = _WORD_START.match(self.text(place, place + _NEIGHBOURS))
        return match[0] if match else ""

    def read_to(self, place: int) -> "_Reader":
        """Read the message of the token at this position, up to the token.

        Each message is decoded once if positions ascend.
        """
        start = self._message_start(place)
        reader = self._reader
        if reader.start != start or reader.place > place:
            reader = _Reader(start, start, 0, "", False)
        self._reader = reader = reader.go_on(self.text(reader.place, place), place)
        return reader

    def objects(self, place: int) -> list[tuple[int, int, str]]:
        """The JSON objects in the message of the token at this position.

        Each has the start and stop of its text, and its value in canonical form.
        """
        start = self._message_start(place)
        if self._message[0] != start:
            after = int(np.searchsorted(self._places, start))
            stop = len(self.ids)
            if after < len(self._places):
                stop = int(self._places[after])
            found = []
            if stop - start <= _LONG_MESSAGE:
                found = json_objects(self.text(start, stop))
            self._message = start, found
        return self._message[1]

    def _message_start(self, place: int) -> int:
        before = int(np.searchsorted(self._places, place))
        return int(self._places[before - 1]) + 1 if before else 0


class _Reader(NamedTuple):
    """The state after reading a message up to ``place``."""

    start: int
    place: int
    n_chars: int
    tail: str
    # a reasoning block is open
    reasons: bool

    def go_on(self, text: str, place: int) -> "_Reader":
        seen = self.tail + text
        marks = _MARKS.findall(seen)
        reasons = marks[-1] in _OPENS if marks else self.reasons
        tail = seen[-_TAIL_CHARS:]
        return _Reader(self.start, place, self.n_chars + len(text), tail, reasons)


def text_cause(held: Side, prompt: Side, stretch: Stretch) -> str | None:
    """The cause (`trajkit.schema.TEXT_CAUSES`) of a span, or None for other text."""
    start, stop, prompt_start, prompt_stop = stretch
    if prompt_start == len(prompt.ids):
        return "truncated"
    was, now = held.text(start, stop), prompt.text(prompt_start, prompt_stop)
    specials = held.specials(start, stop)
    other_specials = specials != prompt.specials(prompt_start, prompt_stop)
    ordinary = not specials and not other_specials
    if "\ufffd" in was + now:
        # The neighbours have the rest of a split character.
        was = held.wide_text(start, stop)
        now = prompt.wide_text(prompt_start, prompt_stop)
        ordinary = False
    if was == now:
        return "special_tokens" if other_specials else "same_text"
    if other_specials and (
        _squeezed(held.plain(start, stop))
        == _squeezed(prompt.plain(prompt_start, prompt_stop))
    ):
        return "special_tokens"
    before, now_before = held.read_to(start), prompt.read_to(prompt_start)
    word = _word_end(before.tail)
    words = [
        _squeezed(_in_json(word + text + side.word_after(end)))
        for text, side, end in ((was, held, stop), (now, prompt, prompt_stop))
    ]
    same_space = _squeezed(was) == _squeezed(now)
    if not same_space and words[0] == words[1]:
        return "boolean"
    if ordinary and _same_object(held, prompt, stretch, was, now):
        return "tool_arguments"
    if same_space:
        return "white_space"
    answer, reasoned = _without_reasoning(was, before.reasons)
    other_answer, still = _without_reasoning(now, now_before.reasons)
    if not still and _squeezed(answer) == _squeezed(other_answer):
        return "reasoning_dropped" if reasoned else "template"
    if ordinary and was.startswith(now) and held.ends_message(stop):
        end = prompt.text(prompt_stop, prompt_stop + 1)
        if prompt.ends_message(prompt_stop):
            # Sampled text may have been read as the end of the message.
            return "special_tokens" if end and end in was else "truncated"
    return None


def _same_object(
    held: Side, prompt: Side, stretch: Stretch, was: str, now: str
) -> bool:
    """Whether the texts are part of equal JSON objects, with the same index."""
    head = _in_common(was, now)
    rest = _in_common(was[head:][::-1], now[head:][::-1])
    numbers = []
    for side, start, text in (
        (held, stretch.path_start, was),
        (prompt, stretch.prompt_start, now),
    ):
        first = side.read_to(start).n_chars + head
        last = first + len(text) - head - rest
        objects = side.objects(start)
        for number, (at, end, value) in enumerate(objects):
            if (at < first and last < end) or (at, end) == (first, last):
                numbers.append((number, value))
    return len(numbers) == 2 and numbers[0] == numbers[1]


def json_objects(text: str) -> list[tuple[int, int, str]]:
    """The outermost JSON objects in a text: start, stop, value in canonical form.

    Python literals count as JSON's. ``arguments`` in a string counts as the object.
    """
    text = _in_json(text)
    found = []
    at = text.find("{")
    while at >= 0:
        try:
            value, stop = _DECODER.raw_decode(text, at)
            canonical = json.dumps(_unwrapped(value), sort_keys=True)
        except (ValueError, RecursionError):
            stop = at + 1
        else:
            found.append((at, stop, canonical))
        at = text.find("{", stop)
    return found


def _unwrapped(value: object) -> object:
    """The value with whole floats as integers and parsed arguments."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_unwrapped(item) for item in value]
    if not isinstance(value, dict):
        return value
    out = {name: _unwrapped(item) for name, item in value.items()}
    arguments = out.get("arguments")
    if isinstance(arguments, str):
        try:
            out["arguments"] = _unwrapped(json.loads(arguments))
        except ValueError:
            pass
    return out


def _in_json(text: str) -> str:
    """The text with Python literals replaced by JSON's."""
    return _LITERAL.sub(lambda match: _LITERALS[match[0]], text)


def _in_common(a: str, b: str) -> int:
    """The length of the common prefix of two texts."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    )


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _word_end(text: str) -> str:
    match = _WORD_END.search(text)
    return match[0] if match else ""


def _without_reasoning(text: str, inside: bool) -> tuple[str, bool]:
    """The text outside reasoning blocks, and whether a block has any text."""
    kept, reasoned = [], False
    for piece in _MARKS.split(text):
        if _MARKS.fullmatch(piece):
            inside = piece in _OPENS
        elif inside:
            reasoned |= not piece.isspace() and bool(piece)
        else:
            kept.append(piece)
    return "".join(kept), reasoned
