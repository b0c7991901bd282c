"""Which message each token of a rendered prompt belongs to.

The request is rendered again with a mark before and after the content of each message.
If removing the marks yields exactly the same prompt, they give the exact position of
each content, and the tokenizer's offsets give its tokens. Otherwise (a template may
inspect what it renders) the prompt gets no attribution.
"""

import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from trajkit_shim.json_input import Json

Ids: TypeAlias = npt.NDArray[np.int32]
Bools: TypeAlias = npt.NDArray[np.bool_]
Spans: TypeAlias = list[tuple[int, int, int]]
"""(message, start, stop) of each content in a text."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A text's ids, and the characters each of them covers."""

    ids: Ids
    starts: npt.NDArray[np.int64]  # shape (n_ids,): characters starts[i]:stops[i]
    stops: npt.NDArray[np.int64]


def attribute(
    messages: list[Json],
    prompt_ids: Ids,
    *,
    text_of: Callable[[list[Json]], str],
    encode: Callable[[str], Encoded],
    special: list[int],
) -> Ids | None:
    """Return the message whose content each token of a prompt lies in, -1 for none.

    A token has an index if it lies completely within a message's content. Other tokens
    are structure, and so are tokens of replies that appear in the prompt otherwise than
    they would be rendered. None: this cannot be determined exactly.

    ``prompt_ids`` are those that the engine consumed for the messages, ``text_of``
    renders messages, ``encode`` tokenizes such a text, and ``special`` has the ids of
    special tokens.
    """
    for text, spans in locate_contents(messages, text_of):
        encoded = encode(text)
        positions = _align(encoded.ids, prompt_ids, special)
        if positions is None:
            continue
        of_text = message_index(encoded, spans)
        # every content except those of replies must be in the prompt
        known = np.zeros(len(of_text), np.bool_)
        known[positions[positions >= 0]] = True
        complete = {i for i, _, _ in spans} - set(of_text[~known].tolist())
        if known.all() or all(
            i in complete or message["role"] == "assistant" or not _has_text(message)
            for i, message in enumerate(messages)
        ):
            return np.where(positions >= 0, of_text[positions], -1).astype(np.int32)
    return None


def locate_contents(
    messages: list[Json], text_of: Callable[[list[Json]], str], first: int = 0
) -> Iterator[tuple[str, Spans]]:
    """Yield a rendered text with the span of each content from message ``first`` on.

    The caller checks that it is the prompt's; there is one per way to put the marks.
    """
    for inside_space in (False, True):
        name = f"x{secrets.token_hex(12)}"
        named = [
            _marked(message, i, name, inside_space) if i >= first else message
            for i, message in enumerate(messages)
        ]
        text, spans = _without_marks(text_of(named), name)
        if spans is not None:
            yield text, spans


def message_index(encoded: Encoded, spans: Spans) -> Ids:
    """Return the message whose content each token of a text lies in, -1 for none.

    ``spans`` are (message, start, stop): the characters of each content.
    """
    index = np.full(len(encoded.ids), -1, np.int32)
    for i, start, stop in spans:
        # offsets ascend, but the tokens of one character have equal offsets
        first = int(np.searchsorted(encoded.starts, start))
        last = int(np.searchsorted(encoded.stops, stop, side="right"))
        index[first:last] = i
    return index


def tool_names(messages: list[Json], first: int = 0) -> list[str | None]:
    """Return the tool whose output each message from ``first`` on is.

    None: not a tool's, or unknown. It is the message's ``name``, else the name in the
    nearest earlier call with its ``tool_call_id``.
    """
    called: dict[object, str] = {}
    read = first  # of the messages before the first, those from here on are in called
    names: list[str | None] = []
    for message in messages[first:]:
        name = None
        if message["role"] == "tool":
            stated, call_id = message.get("name"), message.get("tool_call_id")
            if isinstance(stated, str) and stated:
                name = stated
            else:
                while call_id not in called and read > 0:
                    read -= 1
                    for earlier, tool in dict(_called(messages[read])).items():
                        called.setdefault(earlier, tool)
                name = called.get(call_id)
        names.append(name)
        called.update(_called(message))
    return names


def _called(message: Json) -> Iterator[tuple[object, str]]:
    """Yield id and tool of each call in a message."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        yield call["id"], str(call["function"]["name"])


def _has_text(message: Json) -> bool:
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip())


def _marked(message: Json, i: int, name: str, inside_space: bool) -> Json:
    """Return message ``i`` with marks that contain ``name`` around its content.

    For a template that trims the content, the marks go inside the outer white space.
    """
    if not _has_text(message):
        return message
    content = str(message["content"])
    before = after = ""
    if inside_space:
        core = content.strip()
        before, _, after = content.partition(core)
        content = core
    with_marks = f"{before}{name}o{i};{content}{name}c{i};{after}"
    return {**message, "content": with_marks}


def find_verbatim(messages: list[Json], first: int, text: str) -> Spans | None:
    """Return (message, start, stop) of each content from message ``first`` on.

    None: a content is missing in the text, occurs more than once, or is out of order.
    """
    spans, offset = [], 0
    for i, message in enumerate(messages[first:], first):
        if not _has_text(message):
            continue
        content = str(message["content"])
        start = text.find(content)
        if start < offset or text.find(content, start + 1) >= 0:
            return None
        offset = start + len(content)
        spans.append((i, start, offset))
    return spans


def _without_marks(text: str, name: str) -> tuple[str, Spans | None]:
    """Return the text and (message, start, stop) of each content; None: broken marks."""
    clean, *rest = re.split(name + r"([oc])(\d+);", text)
    spans = []
    opened: tuple[int, int] | None = None
    for kind, number, piece in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        if kind == "o" and opened is None:
            opened = int(number), len(clean)
        elif kind == "c" and opened is not None and opened[0] == int(number):
            spans.append((*opened, len(clean)))
            opened = None
        else:
            return text, None
        clean += piece
    if opened is not None or name in clean:
        return text, None
    return clean, spans


def _align(ids: Ids, prompt_ids: Ids, special: list[int]) -> Ids | None:
    """Return each prompt token's index in ``ids``, -1 in parts that differ.

    Parts are separated by special tokens, which must be the same in both.
    """
    positions = np.full(len(prompt_ids), -1, np.int32)
    in_text, in_prompt = np.isin(ids, special), np.isin(prompt_ids, special)
    if not np.array_equal(ids[in_text], prompt_ids[in_prompt]):
        return None
    for (start, stop), (offset, end) in zip(
        _parts(in_text), _parts(in_prompt), strict=True
    ):
        if np.array_equal(ids[start:stop], prompt_ids[offset:end]):
            positions[offset:end] = np.arange(start, stop)
    return positions


def _parts(special: Bools) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each part between special tokens, with the one at its end."""
    ends = [*(np.flatnonzero(special) + 1).tolist(), len(special)]
    yield from zip([0, *ends[:-1]], ends, strict=True)
