"""Builds replies for clients of any protocol."""

import itertools
import time
import uuid
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

from trajkit_shim.chat.reply import Call, Parsed, Reply, Token, Usage
from trajkit_shim.chat.request import assistant_message, tool_call
from trajkit_shim.json_input import Json


class Identity:
    """The ids of a reply and its calls, the same for partial and complete replies."""

    def __init__(self, call_prefix: str = "call_") -> None:
        self.reply_id = uuid.uuid4().hex
        self.created = int(time.time())
        self._call_ids: defaultdict[int, str]
        self._call_ids = defaultdict(lambda: call_prefix + uuid.uuid4().hex[:24])

    def call_id(self, number: int) -> str:
        """Return the id of a call by its index."""
        return self._call_ids[number]


def make_reply(
    parsed: Parsed,
    finish: str,
    *,
    model: str,
    usage: Usage,
    identity: Identity | None = None,
    stop_sequence: str | None = None,
    tokens: tuple[Token, ...] | None = None,
) -> Reply:
    """Build the reply to a client; ``finish`` is the engine's finish reason."""
    known, numbers = identity or Identity(), itertools.count()
    return Reply(
        reply_id=known.reply_id,
        created=known.created,
        model=model,
        reasoning=parsed.reasoning,
        parts=tuple(
            part
            if isinstance(part, str)
            else replace(part, call_id=known.call_id(next(numbers)))
            for part in parsed.parts
        ),
        sampled=parsed.sampled,
        ill_formed=parsed.ill_formed,
        cut=finish == "length",
        stop_sequence=stop_sequence,
        usage=usage,
        tokens=tokens,
    )


def extends(reply: Reply, earlier: Reply) -> bool:
    """Return whether a reply starts with an earlier partial reply."""
    if not (reply.reasoning or "").startswith(earlier.reasoning or ""):
        return False
    *settled, last = earlier.parts or ("",)
    parts = reply.parts or ("",)
    if parts[: len(settled)] != tuple(settled) or len(parts) <= len(settled):
        return False
    then = parts[len(settled)]
    if isinstance(last, str) and isinstance(then, str):
        return then.startswith(last)
    return then == last or last == ""


def canonical_reply(reply: Reply) -> Json:
    """Return the reply as the canonical message that the next request should contain."""
    calls = [tool_call(call.call_id, call.name, call.arguments) for call in reply.calls]
    message = assistant_message(reply.text, reply.reasoning or "", calls)
    if any(
        isinstance(before, Call) and isinstance(part, str)
        for before, part in pairwise(reply.parts)
    ):
        message["sampled"] = reply.sampled
    return message
