"""Recognizes sampled replies in the messages that a client sends back.

The replies in a request may differ from what was sampled: numbers in tool arguments
respelled, reasoning removed, white space trimmed, one reply split into two messages, text
after a call moved before it. A session stores each reply by its position, a digest of all
messages before it, and restores what was sampled. So the next prompt is rendered from what
the model really wrote, and the log has the reply's own message key. A reply that is not
recognized stays as the client sent it, and is counted.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from itertools import islice, takewhile
from typing import Literal, TypeAlias

from trajkit_shim.chat import request as chat
from trajkit_shim.json_input import Json

Known: TypeAlias = Literal["as_sent", "restored", "new"]
"""What an assistant message of a request is: an exact reply (``as_sent``), a reply in
another form (``restored``), or not a reply of this session (``new``)."""

START = b""
"""The position of the first message."""


@dataclass(frozen=True, slots=True)
class RestoredRequest:
    """The messages of one request, with the session's replies restored.

    Each list has an element per message, and does not change once it is complete.
    """

    messages: list[Json] = field(default_factory=list)
    logged: list[chat.LoggedMessage] = field(default_factory=list)
    positions: list[bytes] = field(default_factory=list)  # after each message
    # the tool whose output it is; None: not a tool's, or unknown
    tool_names: list[str | None] = field(default_factory=list)
    known: list[Known | None] = field(default_factory=list)  # None: not an assistant's
    # id and tool of its calls, by the client's id
    calls: list[Mapping[str, tuple[str, str]]] = field(default_factory=list)

    @property
    def position(self) -> bytes:
        """The position of the next reply."""
        return self.positions[-1] if self.positions else START

    @property
    def replies(self) -> Iterator[int]:
        """The indices of its assistant messages, the last first."""
        return (i for i in reversed(range(len(self.known))) if self.known[i])

    def head(self, n: int) -> "RestoredRequest":
        """Return a copy of the first messages, for a later request to start with."""
        return RestoredRequest(*(getattr(self, each.name)[:n] for each in fields(self)))


@dataclass(slots=True)
class ReplyIndex:
    """The replies sampled in one session.

    `restore` only reads, and may run on another thread during calls of the others.
    """

    # by their position, by the ids of their calls, and those without by their text
    _replies: dict[bytes | str, list[Json]] = field(default_factory=dict)
    _counted: set[bytes] = field(default_factory=set)
    counts: Counter[Known] = field(default_factory=Counter)

    def restore(
        self, messages: list[Json], head: RestoredRequest | None = None
    ) -> RestoredRequest:
        """Replace recognized replies in canonical messages by what was sampled.

        ``head``: the start of the request, if it was restored before; it is completed.
        ``messages`` are those after it. Its last message is not an assistant's, because
        a reply may be split into several messages.
        """
        restored = head or RestoredRequest()
        position = restored.position
        index = 0
        while index < len(messages):
            message, step = messages[index], 1
            known: Known | None = None
            called: Mapping[str, tuple[str, str]] = {}
            tool = None
            if message["role"] == "assistant":
                message, step, known = self._known(messages, index, position)
                called = _called(messages[index : index + step], message)
            elif message["role"] == "tool":
                sent_id = str(message.get("tool_call_id"))
                # the latest call with that id, which is near the end
                calls = reversed(restored.calls)
                own = (each[sent_id] for each in calls if sent_id in each)
                call_id, tool = next(own, (sent_id, None))
                tool = str(message.get("name") or "") or tool
                if call_id != sent_id:
                    message = {**message, "tool_call_id": call_id}
            index += step
            record = chat.logged_message(message)
            position = next_position(position, record.key)
            restored.messages.append(message)
            restored.logged.append(record)
            restored.positions.append(position)
            restored.tool_names.append(tool)
            restored.known.append(known)
            restored.calls.append(called)
        return restored

    def has_reply_at(self, position: bytes) -> bool:
        """Return whether a reply was sampled at a position."""
        return position in self._replies

    def remember(self, position: bytes, reply: Json) -> None:
        """Store a canonical reply, which must not change later, at a position."""
        for key in (position, *_keys(reply)):
            alike = self._replies.setdefault(key, [])
            if reply not in alike:
                alike.append(reply)

    def count(self, restored: RestoredRequest) -> None:
        """Count the assistant messages of a request, each position once."""
        for i in restored.replies:
            known, position = restored.known[i], restored.positions[i]
            if known is None or position in self._counted:
                # so are all before it
                break
            self._counted.add(position)
            self.counts[known] += 1

    def _known(
        self, messages: list[Json], index: int, position: bytes
    ) -> tuple[Json, int, Known]:
        """The reply or message at an index, how many messages it takes, and which."""
        roles = (message["role"] for message in islice(messages, index, None))
        n_run = len([*takewhile("assistant".__eq__, roles)])
        stops = range(index + n_run, index, -1)
        # earlier messages may have changed
        anywhere = _keys(messages[index])[0]
        for stop, key in [*((i, position) for i in stops), (index + 1, anywhere)]:
            sent = _joined(messages[index:stop])
            alike = self._alike(sent, key)
            if alike and (key is position or len(alike) == 1):
                as_sent = stop == index + 1 and alike[0] == sent
                return alike[0], stop - index, "as_sent" if as_sent else "restored"
        return messages[index], 1, "new"

    def _alike(self, sent: Json, key: bytes | str) -> list[Json]:
        """The replies with a key that a message may be; only the equal one if there is."""
        replies = self._replies.get(key, [])
        if sent in replies:
            return [replies[replies.index(sent)]]
        return [reply for reply in replies if self._same(sent, reply)]

    def _same(self, sent: Json, reply: Json) -> bool:
        """Whether a message has the content of a reply, maybe without its reasoning."""
        if chat.squeezed(sent["content"]) != chat.squeezed(reply["content"]):
            return False
        thought = chat.squeezed(sent.get("reasoning_content") or "")
        if thought and thought != chat.squeezed(reply.get("reasoning_content") or ""):
            return False
        sent_calls, calls = _calls(sent), _calls(reply)
        return len(sent_calls) == len(calls) and all(
            self._same_call(one, other)
            for one, other in zip(sent_calls, calls, strict=True)
        )

    def _same_call(self, sent: Json, call: Json) -> bool:
        if sent["id"] != call["id"] and str(sent["id"]) in self._replies:
            return False
        one, other = chat.function_of(sent), chat.function_of(call)
        same = _same_json(str(one["arguments"]), str(other["arguments"]))
        return same and one["name"] == other["name"]


def next_position(position: bytes, key: bytes) -> bytes:
    """Return the position after a message with a key."""
    return blake2b(position + key, digest_size=16).digest()


def _joined(messages: list[Json]) -> Json:
    """Join assistant messages into one."""
    if len(messages) == 1:
        return messages[0]
    thoughts = (str(message.get("reasoning_content") or "") for message in messages)
    return chat.assistant_message(
        "".join(str(message["content"]) for message in messages),
        "".join(thoughts),
        [call for message in messages for call in _calls(message)],
    )


def _called(sent: list[Json], message: Json) -> dict[str, tuple[str, str]]:
    """Map the ids of calls in the client's messages to the calls' own ids and tools."""
    ids = (str(call["id"]) for each in sent for call in _calls(each))
    own = (
        (str(call["id"]), str(chat.function_of(call)["name"]))
        for call in _calls(message)
    )
    return dict(zip(ids, own, strict=True))


def _keys(message: Json) -> list[bytes | str]:
    """What finds a reply whose position is unknown."""
    calls = [str(call["id"]) for call in _calls(message)]
    text = chat.squeezed(message["content"]).encode()
    return [*calls] or [blake2b(text, digest_size=16).digest()]


def _calls(message: Json) -> list[Json]:
    calls = message.get("tool_calls", [])
    assert isinstance(calls, list)
    return calls


def _same_json(one: str, other: str) -> bool:
    """Whether two JSON texts have equal values, with numbers compared as doubles."""
    if one == other:
        return True
    # a client's text may be invalid JSON, or too deep to compare
    with suppress(ValueError, RecursionError):
        first, second = (json.loads(text, parse_int=float) for text in (one, other))
        return bool(first == second)
    return False
