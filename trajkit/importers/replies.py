"""The replies of a log that has only the messages of requests.

A later request of the session repeats the messages of a call, and after them its reply.
If several calls had the same messages, the tokens of the later prompt tell which of them
it continues.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from trajkit.importers.findings import Finding

# the number of a call without a reply, and its path as a length and a digest
_Call = tuple[int, int, bytes]


@dataclass(slots=True)
class Replies:
    """Replies by the number of the call, and sessions of which none was found."""

    of_call: dict[int, dict[str, object]] = field(default_factory=dict)
    without: set[str | None] = field(default_factory=set)

    def add(self, found: Finding, number: int) -> None:
        """Add the reply that a later request repeats, or leave out useless messages."""
        if number in self.of_call:
            found.fields["response_message"] = self.of_call[number]
            found.remarks.append(("reply_of_a_request", "a later request repeats it"))
        elif found.session in self.without and found.fields.pop(
            "prompt_messages", None
        ):
            text = (
                "messages without replies, which no later request repeats, are left out, "
                "so that calls are matched by tokens: --map response_message=PATH names "
                "the reply"
            )
            found.remarks.append(("no_reply", text))


def find_replies(calls: Iterable[Finding]) -> Replies:
    """The replies that later requests of calls repeat."""
    replies = Replies()
    # by session and digest of the messages
    waiting: dict[tuple[str | None, bytes], list[_Call]] = {}
    n_calls: Counter[str | None] = Counter()
    answered: set[str | None] = set()
    for number, found in enumerate(calls):
        messages = found.fields.get("prompt_messages")
        if found.problem or not isinstance(messages, list):
            continue
        session, prompt = found.session, _ids(found.fields.get("prompt_ids"))
        n_calls[session] += 1
        digest = blake2b(digest_size=16)
        for message in messages:
            if isinstance(message, dict) and message.get("role") == "assistant":
                several = waiting.get((session, digest.digest()), [])
                # the only call, or the only one whose path the prompt begins with
                continued = several
                if len(several) > 1:
                    continued = [c for c in several if _digest(prompt[: c[1]]) == c[2]]
                if len(continued) == 1:
                    (call,) = continued
                    several.remove(call)
                    replies.of_call[call[0]] = message
                    answered.add(session)
            digest.update(_text(message))
        if found.fields.get("response_message") is not None:
            answered.add(session)
            continue
        path = np.concatenate([prompt, _ids(found.fields.get("output_ids"))])
        call = number, len(path), _digest(path)
        waiting.setdefault((session, digest.digest()), []).append(call)
    replies.without = {name for name, n in n_calls.items() if n > 1} - answered
    return replies


def _text(message: object) -> bytes:
    """A text of a message; of one that is nested too deep, a text of no other."""
    try:
        return json.dumps(message, sort_keys=True, default=str).encode()
    except (RecursionError, TypeError, ValueError):
        return str(id(message)).encode()


def _ids(value: Any) -> np.ndarray:
    """Ids as an array; none for values that are no ids."""
    try:
        return np.asarray(value, np.int64).reshape(-1)
    except (TypeError, ValueError, OverflowError):
        return np.empty(0, np.int64)


def _digest(ids: np.ndarray) -> bytes:
    return blake2b(ids.tobytes(), digest_size=16).digest()
