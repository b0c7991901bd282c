"""A sampled reply, on its way out to a client of any protocol."""

import itertools
import time
import uuid
from dataclasses import dataclass
from itertools import pairwise

from trajkit_shim.parse import Parsed
from trajkit_shim.wire import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one call."""

    prompt_tokens: int
    output_tokens: int
    # None: the engine does not say
    cached_tokens: int | None
    # of the output, up to the end of its reasoning
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call of a reply."""

    call_id: str
    name: str
    # JSON text, as it was sampled
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One assistant message."""

    # 32 hexadecimal digits; protocols put their prefixes before them
    reply_id: str
    created: int
    model: str
    reasoning: str | None
    # text and calls in the order in which they were sampled
    parts: tuple[str | Call, ...]
    # the text behind the reasoning, as it was sampled
    sampled: str
    # cut short by a token limit
    cut: bool
    # the stop string of the client that ended it
    stop_sequence: str | None
    usage: Usage

    @property
    def text(self) -> str:
        """All text, reasoning and calls left out."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[Call]:
        """The tool calls, in order."""
        return [part for part in self.parts if isinstance(part, Call)]


class Identity:
    """What a reply is known by, while it grows and afterwards.

    Parameters
    ----------
    call_prefix : str
        What the ids of its tool calls start with.
    """

    def __init__(self, call_prefix: str = "call_") -> None:
        self.reply_id = uuid.uuid4().hex
        self.created = int(time.time())
        self._call_prefix = call_prefix
        self._call_ids: list[str] = []

    def call_id(self, number: int) -> str:
        """The id of the call of this number, from 0 on."""
        while len(self._call_ids) <= number:
            self._call_ids.append(self._call_prefix + uuid.uuid4().hex[:24])
        return self._call_ids[number]


def make_reply(
    parsed: Parsed,
    finish: str,
    *,
    model: str,
    usage: Usage,
    identity: Identity | None = None,
    stop_sequence: str | None = None,
) -> Reply:
    """The reply to a client for a parsed sample.

    Parameters
    ----------
    parsed : Parsed
        The sampled text, taken apart.
    finish : str
        The engine's word for how it ended.
    identity : Identity, optional
        None: a new one.
    stop_sequence : str, optional
        The stop string of the client at which the text was cut.
    """
    known = identity or Identity()
    numbers = itertools.count()
    return Reply(
        reply_id=known.reply_id,
        created=known.created,
        model=model,
        reasoning=parsed.reasoning,
        parts=tuple(
            part
            if isinstance(part, str)
            else Call(known.call_id(next(numbers)), part.name, part.arguments)
            for part in parsed.parts
        ),
        sampled=parsed.sampled,
        cut=finish == "length",
        stop_sequence=stop_sequence,
        usage=usage,
    )


def goes_on(reply: Reply, told: Reply) -> bool:
    """Whether a reply begins with all that was told of it."""
    if not (reply.reasoning or "").startswith(told.reasoning or ""):
        return False
    *settled, last = told.parts or ("",)
    parts = reply.parts or ("",)
    if parts[: len(settled)] != tuple(settled) or len(parts) <= len(settled):
        return False
    then = parts[len(settled)]
    if isinstance(last, str) and isinstance(then, str):
        return then.startswith(last)
    return then == last or last == ""


def expected_echo(reply: Reply) -> Json:
    """The reply as a canonical message: what the next request is expected to hold."""
    message: Json = {"role": "assistant", "content": reply.text}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in reply.calls
        ]
        if any(
            isinstance(before, Call) and isinstance(part, str)
            for before, part in pairwise(reply.parts)
        ):
            message["sampled"] = reply.sampled
    return message
