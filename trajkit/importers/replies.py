"""The replies of a log that has only the messages of requests.

A later request of the session repeats the messages of a call, and after them its reply.
If several calls had the same messages, the tokens of the later prompt tell which of them
it continues.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from trajkit.importers.findings import Finding


@dataclass(slots=True)
class _Call:
    """A call without a reply: its number, and its path as a length and a digest."""

    number: int
    length: int
    path: bytes


@dataclass(slots=True)
class Replies:
    """Replies by the number of the call, and sessions of which none was found."""

    of_call: dict[int, dict[str, object]] = field(default_factory=dict)
    without: set[str] = field(default_factory=set)


def find_replies(calls: Iterable[Finding]) -> Replies:
    """The replies that later requests of calls repeat."""
    replies = Replies()
    # by session and digest of the messages
    waiting: dict[tuple[str | None, bytes], list[_Call]] = {}
    n_calls: dict[str | None, int] = {}
    answered: set[str | None] = set()
    for number, found in enumerate(calls):
        messages = found.fields.get("prompt_messages")
        if found.problem or not isinstance(messages, list):
            continue
        session, prompt = found.session, _ids(found.fields.get("prompt_ids"))
        n_calls[session] = n_calls.get(session, 0) + 1
        digest = blake2b(digest_size=16)
        for message in messages:
            if isinstance(message, dict) and message.get("role") == "assistant":
                several = waiting.get((session, digest.digest()), [])
                call = _continued(several, prompt)
                if call is not None:
                    several.remove(call)
                    replies.of_call[call.number] = message
                    answered.add(session)
            digest.update(_text(message))
        if found.fields.get("response_message") is not None:
            answered.add(session)
            continue
        path = np.concatenate([prompt, _ids(found.fields.get("output_ids"))])
        one = _Call(number, len(path), _digest(path))
        waiting.setdefault((session, digest.digest()), []).append(one)
    replies.without = {
        str(session)
        for session, n in n_calls.items()
        if n > 1 and session not in answered
    }
    return replies


def _continued(several: list[_Call], prompt: np.ndarray) -> _Call | None:
    """The only call, or the only one whose path a prompt begins with."""
    if len(several) > 1:
        several = [
            call for call in several if _digest(prompt[: call.length]) == call.path
        ]
    return several[0] if len(several) == 1 else None


def _text(message: object) -> bytes:
    """A text of a message; of one that is nested too deep, a text of no other."""
    try:
        return json.dumps(message, sort_keys=True, default=str).encode()
    except (RecursionError, TypeError, ValueError):
        return str(id(message)).encode()


def _ids(value: object) -> np.ndarray:
    """Ids as an array; none for values that are no ids."""
    try:
        return np.asarray(value, np.int64).reshape(-1)
    except (TypeError, ValueError, OverflowError):
        return np.empty(0, np.int64)


def _digest(ids: np.ndarray) -> bytes:
    return blake2b(ids.tobytes(), digest_size=16).digest()
