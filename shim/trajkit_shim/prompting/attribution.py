"""Which message each token of a rendered prompt belongs to.

The request is rendered again with a mark before and after the content of each message.
If removing the marks yields the same prompt, they give the position of each content, and
the tokenizer's offsets its tokens. Otherwise the prompt gets no attribution.
"""

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from trajkit_shim.json_input import Json

Ids: TypeAlias = npt.NDArray[np.int32]
Spans: TypeAlias = list[tuple[int, int, int]]
"""(message, start, stop) of each content in a text."""

TextOf: TypeAlias = Callable[[list[Json]], str]
"""Renders messages."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A text's ids, and the characters each of them covers."""

    ids: Ids
    # int32, shape (n_ids, 2): characters offsets[i, 0]:offsets[i, 1]
    offsets: npt.NDArray[np.int32]


def locate_contents(
    messages: list[Json],
    first: int,
    text: str,
    start: int,
    text_of: TextOf,
) -> Spans | None:
    """Return the span of each content in a text after ``start``, from message ``first`` on.

    It is the text of all messages. None: ``text_of``, which renders messages, gives
    another one for contents with marks.
    """
    for inside_space in (False, True):
        name = f"x{secrets.token_hex(12)}"
        marked = [
            _marked(message, i, name, inside_space)
            for i, message in enumerate(messages[first:])
        ]
        clean, spans = _without_marks(text_of([*messages[:first], *marked]), name)
        if clean == text and spans is not None:
            return [(i, begin - start, end - start) for i, begin, end in spans]
    return None


def message_index(encoded: Encoded, spans: Spans) -> Ids:
    """Return the message whose content each token of a text lies in, -1 for none."""
    index = np.full(len(encoded.ids), -1, np.int32)
    messages, starts, stops = np.array(spans, np.int64).reshape(-1, 3).T
    # offsets ascend, but the tokens of one character have equal offsets
    firsts = np.searchsorted(encoded.offsets[:, 0], starts)
    lasts = np.searchsorted(encoded.offsets[:, 1], stops, side="right")
    for i, first, last in zip(messages, firsts, lasts, strict=True):
        index[first:last] = i
    return index


def _has_text(message: Json) -> bool:
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip())


def _marked(message: Json, i: int, name: str, inside_space: bool) -> Json:
    """Return message ``i`` with marks around its content, or within white space there."""
    if not _has_text(message):
        return message
    content = str(message["content"])
    before = after = ""
    if inside_space:
        core = content.strip()
        before, _, after = content.partition(core)
        content = core
    mark = f"{name}{i};"
    return {**message, "content": f"{before}{mark}{content}{mark}{after}"}


def find_verbatim(messages: list[Json], text: str) -> Spans | None:
    """Return the span of each content in a text that has each once, in order, or None.

    A template may change outer white space, so contents with it are not looked for.
    """
    spans, offset = [], 0
    for i, message in enumerate(messages):
        if not _has_text(message):
            continue
        content = str(message["content"])
        start = text.find(content)
        unsure = content != content.strip() or text.find(content, start + 1) >= 0
        if start < offset or unsure:
            return None
        offset = start + len(content)
        spans.append((i, start, offset))
    return spans


def _without_marks(text: str, name: str) -> tuple[str, Spans | None]:
    """Return the text and the span of each content; None: broken marks."""
    clean, *rest = re.split(name + r"(\d+);", text)
    spans: Spans = []
    if len(rest) % 4:
        return text, None
    fields = (rest[i::4] for i in range(4))
    for opened, content, closed, after in zip(*fields, strict=True):
        if opened != closed:
            return text, None
        spans.append((int(opened), len(clean), len(clean) + len(content)))
        clean += content + after
    return clean, None if name in clean else spans
