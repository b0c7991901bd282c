"""What each token of a rendered prompt is: which message's text, or the template's own.

The request is rendered once more with a mark before and behind the content of each
message. Without the marks that must be the very same prompt; then the marks tell to the
letter where each content stands, and the tokenizer's offsets to which tokens. Where it
is another prompt (a template may look into what it renders), nothing is said.
"""

import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from trajkit_shim.wire import Json

Ids: TypeAlias = npt.NDArray[np.int32]
Bools: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Attribution:
    """The columns ``prompt_message_index`` and ``prompt_is_content`` of one turn.

    A token has an index where it lies wholly within a message's content; all others are
    structure (-1), as are tokens of replies that stand otherwise in the prompt than a
    rendering would have them.
    """

    # int32, shape (n_prompt,)
    message_index: Ids
    # shape (n_prompt,)
    is_content: Bools


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A text's ids, and where in the text each of them stands."""

    ids: Ids
    # shape (n_ids,): characters starts[i]:stops[i]
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]


def attribute(
    messages: list[Json],
    prompt_ids: Ids,
    *,
    text_of: Callable[[list[Json]], str],
    encode: Callable[[str], Encoded],
    special: list[int],
) -> Attribution | None:
    """The attribution of a prompt, None where it cannot be told exactly.

    Parameters
    ----------
    messages : list of dict
        Canonical chat messages.
    prompt_ids : ndarray of int32, shape (n_prompt,)
        What the engine consumed for them.
    text_of : callable
        The template's text for messages.
    encode : callable
        The ids of such a text, with their places.
    special : list of int
        The ids of special tokens.
    """
    for inside_space in (False, True):
        name = f"x{secrets.token_hex(12)}"
        named = [marked(m, i, name, inside_space) for i, m in enumerate(messages)]
        text, spans = without_marks(text_of(named), name)
        if spans is None:
            continue
        encoded = encode(text)
        place = _places(encoded.ids, prompt_ids, special)
        if place is None:
            continue
        of_text = message_index(encoded, spans)
        # all of it stands in the prompt, but for replies
        known = np.zeros(len(of_text), np.bool_)
        known[place[place >= 0]] = True
        whole = {i for i, _, _ in spans} - set(of_text[~known].tolist())
        if known.all() or all(
            i in whole or message["role"] == "assistant" or not _has_text(message)
            for i, message in enumerate(messages)
        ):
            index = np.where(place >= 0, of_text[place], -1).astype(np.int32)
            return Attribution(index, index >= 0)
    return None


def message_index(encoded: Encoded, spans: list[tuple[int, int, int]]) -> Ids:
    """The message whose content each token of a text lies in, -1 for none.

    ``spans`` are (message, start, stop): where in the text each content stands.
    """
    index = np.full(len(encoded.ids), -1, np.int32)
    for i, start, stop in spans:
        # offsets ascend, but tokens of one character share theirs
        first = int(np.searchsorted(encoded.starts, start))
        last = int(np.searchsorted(encoded.stops, stop, side="right"))
        index[first:last] = i
    return index


def tool_names(messages: list[Json]) -> list[str | None]:
    """The tool whose output each message is, None where it is none, or unknown.

    That is the name that the message states, else that of the nearest call of its
    ``tool_call_id`` before it.
    """
    called: dict[object, str] = {}
    names: list[str | None] = []
    for message in messages:
        name = None
        if message["role"] == "tool":
            said = message.get("name")
            known = called.get(message.get("tool_call_id"))
            name = said if isinstance(said, str) and said else known
        names.append(name)
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            called[call["id"]] = str(call["function"]["name"])
    return names


def _has_text(message: Json) -> bool:
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip())


def marked(message: Json, i: int, name: str, inside_space: bool) -> Json:
    """Message ``i`` with marks around its content, ``name`` in each.

    A template that trims the content wants them inside the white space around it.
    """
    if not _has_text(message):
        return message
    content = str(message["content"])
    before = behind = ""
    if inside_space:
        core = content.strip()
        before, _, behind = content.partition(core)
        content = core
    with_marks = f"{before}{name}o{i};{content}{name}c{i};{behind}"
    return {**message, "content": with_marks}


def found(
    messages: list[Json], first: int, text: str
) -> list[tuple[int, int, int]] | None:
    """(message, start, stop) of each content from message ``first`` on in a text.

    None: one of them does not stand there to the letter, or more than once, or not in
    order.
    """
    spans, at = [], 0
    for i, message in enumerate(messages[first:], first):
        if not _has_text(message):
            continue
        content = str(message["content"])
        start = text.find(content)
        if start < at or text.find(content, start + 1) >= 0:
            return None
        at = start + len(content)
        spans.append((i, start, at))
    return spans


def without_marks(
    text: str, name: str
) -> tuple[str, list[tuple[int, int, int]] | None]:
    """The text, and (message, start, stop) of each content; None: marks that are odd."""
    kept, spans, n_kept, at = [], [], 0, 0
    opened: tuple[int, int] | None = None
    for match in re.finditer(name + r"([oc])(\d+);", text):
        kept.append(text[at : match.start()])
        n_kept += match.start() - at
        at = match.end()
        i = int(match[2])
        if match[1] == "o":
            if opened is not None:
                return text, None
            opened = i, n_kept
        else:
            if opened is None or opened[0] != i:
                return text, None
            spans.append((i, opened[1], n_kept))
            opened = None
    kept.append(text[at:])
    clean = "".join(kept)
    if opened is not None or name in clean:
        return text, None
    return clean, spans


def _places(ids: Ids, prompt_ids: Ids, special: list[int]) -> Ids | None:
    """Where each prompt token stands in ``ids``, -1 where that part is another.

    The parts are what lies between special tokens, which must be the same.
    """
    places = np.full(len(prompt_ids), -1, np.int32)
    ours, theirs = np.isin(ids, special), np.isin(prompt_ids, special)
    if not np.array_equal(ids[ours], prompt_ids[theirs]):
        return None
    for (start, stop), (at, end) in zip(_parts(ours), _parts(theirs), strict=True):
        if np.array_equal(ids[start:stop], prompt_ids[at:end]):
            places[at:end] = np.arange(start, stop)
    return places


def _parts(special: Bools) -> Iterator[tuple[int, int]]:
    """What lies between special tokens, each part with the one that ends it."""
    ends = [*(np.flatnonzero(special) + 1).tolist(), len(special)]
    yield from zip([0, *ends[:-1]], ends, strict=True)
