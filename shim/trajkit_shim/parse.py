"""Reasoning and tool calls in sampled text, in the form of Hermes and Qwen models.

``<think>...</think>`` at the start is reasoning; where the prompt opened it, the reply
holds only its end. White space around it is its frame.

``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: every such block whose
JSON reads as a call is a call, in order, its arguments being the very text that was
sampled. All other text is content, with its white space; only white space between two
calls is their frame and belongs to neither. A block that does not read as a call stays
in the content as it is, and the reply is ill-formed.
"""

import json
from dataclasses import dataclass, replace

THINK = "<think>"
END_THINK = "</think>"
OPEN = "<tool_call>"
CLOSE = "</tool_call>"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)
_SPACE = " \t\n\r"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call: the tool's name and the argument text as it was sampled."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A reply's text, taken apart."""

    # text and calls in the order in which they were sampled; no empty text
    parts: tuple[str | ToolCall, ...]
    # the text of all parts, as it was sampled
    sampled: str
    ill_formed: bool = False
    # None: the reply has none
    reasoning: str | None = None

    @property
    def content(self) -> str:
        """All text, calls left out."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls, in order."""
        return tuple(part for part in self.parts if isinstance(part, ToolCall))


def parse(text: str, *, tools: bool, opened: bool) -> Parsed:
    """A reply, taken apart.

    Parameters
    ----------
    text : str
        What was sampled, without the token that ends the message.
    tools : bool
        Calls are looked for.
    opened : bool
        The prompt ends inside of the reasoning.
    """
    reasoning, rest = _split_reasoning(text, opened=opened)
    parsed = parse_reply(rest) if tools else parse_text(rest)
    return replace(parsed, reasoning=reasoning)


def _split_reasoning(text: str, *, opened: bool) -> tuple[str | None, str]:
    inside = text if opened else text.lstrip(_SPACE)
    if not opened:
        if not inside.startswith(THINK):
            return None, text
        inside = inside.removeprefix(THINK)
    inside, _, rest = inside.partition(END_THINK)
    return inside.strip(_SPACE) or None, rest.lstrip("\n")


def parse_text(text: str) -> Parsed:
    """A reply in which nothing is looked for."""
    return Parsed(parts=(text,) if text else (), sampled=text)


def parse_reply(text: str) -> Parsed:
    """The calls and the remaining text of one reply.

    Parameters
    ----------
    text : str
        What was sampled, without the token that ends the message.
    """
    parts: list[str | ToolCall] = []
    said: list[str] = []
    ill_formed = False
    at = 0
    after_call = False
    while (start := text.find(OPEN, at)) >= 0:
        inside = start + len(OPEN)
        found = _read_call(text, inside)
        if found is None:
            # the marker is text; what follows it may still hold a call
            ill_formed = True
            said.append(text[at:inside])
            at, after_call = inside, False
            continue
        before = text[at:start]
        if not after_call or before.strip(_SPACE):
            said.append(before)
        parts += filter(None, ["".join(said)])
        said.clear()
        call, at = found
        parts.append(call)
        after_call = True
    parts += filter(None, ["".join([*said, text[at:]])])
    return Parsed(parts=tuple(parts), sampled=text, ill_formed=ill_formed)


def _read_call(text: str, at: int) -> tuple[ToolCall, int] | None:
    """The call whose JSON starts at ``at``, and where its block ends."""
    try:
        fields, end = _slices(text, at)
        name = json.loads(fields["name"])
    except (ValueError, KeyError, RecursionError):
        return None
    arguments = fields.get("arguments", "{}")
    end = _skip(text, end)
    if not text.startswith(CLOSE, end) or not arguments.startswith("{"):
        return None
    if not isinstance(name, str) or not name:
        return None
    return ToolCall(name, arguments), end + len(CLOSE)


def _slices(text: str, at: int) -> tuple[dict[str, str], int]:
    """The source text of each value of the JSON object at ``at``, and where it ends."""
    slices: dict[str, str] = {}
    at = _expect(text, _skip(text, at), "{")
    while True:
        key, at = _decoder.raw_decode(text, _skip(text, at))
        if not isinstance(key, str) or key in slices:
            raise ValueError(f"{key!r} is no new name of a field")
        start = _skip(text, _expect(text, _skip(text, at), ":"))
        _, end = _decoder.raw_decode(text, start)
        slices[key] = text[start:end]
        at = _skip(text, end)
        if not text.startswith(",", at):
            return slices, _expect(text, at, "}")
        at += 1


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _expect(text: str, at: int, mark: str) -> int:
    if text[at : at + 1] != mark:
        raise ValueError(f"no {mark!r} at {at}")
    return at + 1
