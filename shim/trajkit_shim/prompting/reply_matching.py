"""Recognizes sampled replies in the messages that a client sends back.

A client sends the entire conversation with each request. The model's replies in it may
differ from what was sampled: numbers in tool arguments respelled, reasoning removed,
white space trimmed, one reply split into two messages, text after a call moved before
it. A session stores each reply by its position, a digest of all messages before it, and
restores what was sampled. So the next prompt is rendered from what the model really
wrote, and the log has the reply's own message key.

A reply that is not recognized stays as the client sent it, and is counted.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Literal, NamedTuple, TypeAlias, cast

from trajkit_shim.chat.logged_message import LoggedMessage, logged_message
from trajkit_shim.chat.request import assistant_message
from trajkit_shim.json_input import Json
from trajkit_shim.prompting.attribution import tool_names

Known: TypeAlias = Literal["as_sent", "restored", "new"]
"""What an assistant message of a request is: an exact reply (``as_sent``), a reply in
another form (``restored``), or not a reply of this session (``new``)."""

# maximum length in characters of a message whose record is cached
_REMEMBERED = 8192

START = b""
"""The position of the first message."""


class Lengths(NamedTuple):
    """The length of each list of a `RestoredRequest`."""

    messages: int
    known: int
    renamed: int


_NOTHING = Lengths(0, 0, 0)


@dataclass(frozen=True, slots=True)
class RestoredRequest:
    """The messages of one request, with the session's replies restored.

    The lists do not change once a request is complete.
    """

    messages: list[Json] = field(default_factory=list)
    logged: list[LoggedMessage] = field(default_factory=list)
    positions: list[bytes] = field(default_factory=list)  # after each message
    # the tool whose output each message is (`attribution.tool_names`)
    tool_names: list[str | None] = field(default_factory=list)
    # for each assistant message: the position after it, and what it is
    known: list[tuple[bytes, Known]] = field(default_factory=list)
    # the client's ids of calls, and the calls' own
    renamed: list[tuple[str, str]] = field(default_factory=list)
    # how much of it was restored for an earlier request, which was answered
    seen: Lengths = _NOTHING

    @property
    def position(self) -> bytes:
        """The position of the next reply."""
        return self.positions[-1] if self.positions else START

    @property
    def lengths(self) -> Lengths:
        """The lengths of its lists."""
        return Lengths(len(self.messages), len(self.known), len(self.renamed))

    def head(self, lengths: Lengths) -> "RestoredRequest":
        """Return a copy of the first messages, for a later request to start with."""
        n = lengths.messages
        return RestoredRequest(
            self.messages[:n],
            self.logged[:n],
            self.positions[:n],
            self.tool_names[:n],
            self.known[: lengths.known],
            self.renamed[: lengths.renamed],
            lengths,
        )


@dataclass(slots=True)
class ReplyIndex:
    """The replies sampled in one session.

    `restore` only reads, and may run on another thread during calls of the others.
    """

    # replies by position
    _by_position: dict[bytes, list[Json]] = field(default_factory=dict)
    # the reply that contains a tool call, by the call's id
    _by_call: dict[str, Json] = field(default_factory=dict)
    # replies without calls, by a digest of their text
    _by_text: dict[bytes, list[Json]] = field(default_factory=dict)
    # records of the replies, by the id() of the reply, which lives as long
    _records: dict[int, LoggedMessage] = field(default_factory=dict)
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
        # call ids of the client, by which it refers to our calls
        renamed = dict(restored.renamed)
        position = restored.position
        index = 0
        while index < len(messages):
            message, step = messages[index], 1
            as_what: Known | None = None
            if message["role"] == "assistant":
                message, step, as_what = self._known(messages, index, position)
                if as_what == "restored":
                    new = _renamed(messages[index : index + step], message)
                    restored.renamed.extend(new.items())
                    renamed |= new
            elif message.get("tool_call_id") in renamed:
                new_id = renamed[str(message["tool_call_id"])]
                message = {**message, "tool_call_id": new_id}
            index += step
            record = self._records.get(id(message)) or _logged(message)
            position = next_position(position, record.key)
            restored.messages.append(message)
            restored.logged.append(record)
            restored.positions.append(position)
            if as_what is not None:
                restored.known.append((position, as_what))
        first = len(restored.tool_names)
        restored.tool_names.extend(tool_names(restored.messages, first))
        return restored

    def has_reply_at(self, position: bytes) -> bool:
        """Return whether a reply was sampled at a position."""
        return position in self._by_position

    def remember(self, position: bytes, reply: Json) -> None:
        """Store a canonical reply, which must not change later, at a position."""
        self._by_position.setdefault(position, []).append(reply)
        self._records[id(reply)] = logged_message(reply)
        calls = _calls(reply)
        for call in calls:
            self._by_call[str(call["id"])] = reply
        if not calls:
            alike = self._by_text.setdefault(_text_digest(reply), [])
            if reply not in alike:
                alike.append(reply)

    def count(self, restored: RestoredRequest) -> None:
        """Count the assistant messages of a request, each position once."""
        for position, as_what in restored.known[restored.seen.known :]:
            if position not in self._counted:
                self._counted.add(position)
                self.counts[as_what] += 1

    def clear(self) -> None:
        """Forget everything except the counts."""
        for kept in (self._by_position, self._by_call, self._by_text, self._records):
            cast("dict[object, object]", kept).clear()
        self._counted.clear()

    def _known(
        self, messages: list[Json], index: int, position: bytes
    ) -> tuple[Json, int, Known]:
        """The reply or message at an index, how many messages it takes, and which."""
        for stop in _ends_of_run(messages, index):
            sent = _joined(messages[index:stop])
            reply = self._reply_at(sent, position)
            if reply is not None:
                as_sent = stop == index + 1 and reply == sent
                return reply, stop - index, "as_sent" if as_sent else "restored"
        sent = messages[index]
        reply = self._elsewhere(sent)
        if reply is None:
            return sent, 1, "new"
        return reply, 1, "as_sent" if reply == sent else "restored"

    def _reply_at(self, sent: Json, position: bytes) -> Json | None:
        replies = self._by_position.get(position, [])
        if sent in replies:
            return replies[replies.index(sent)]
        return next((reply for reply in replies if self._same(sent, reply)), None)

    def _elsewhere(self, sent: Json) -> Json | None:
        """The matching reply if earlier messages changed and the match is unique."""
        calls = _calls(sent)
        if calls:
            reply = self._by_call.get(str(calls[0]["id"]))
            same = reply is not None and self._same(sent, reply)
            return reply if same else None
        alike = self._by_text.get(_text_digest(sent), [])
        if sent in alike:
            return alike[alike.index(sent)]
        found = [reply for reply in alike if self._same(sent, reply)]
        return found[0] if len(found) == 1 else None

    def _same(self, sent: Json, reply: Json) -> bool:
        """Whether a message has the content of a reply.

        White space and the spelling of JSON may differ, reasoning may be missing, and
        call ids may be the client's.
        """
        if _squeezed(sent["content"]) != _squeezed(reply["content"]):
            return False
        thought = _squeezed(sent.get("reasoning_content") or "")
        if thought and thought != _squeezed(reply.get("reasoning_content") or ""):
            return False
        sent_calls, calls = _calls(sent), _calls(reply)
        return len(sent_calls) == len(calls) and all(
            self._same_call(one, other)
            for one, other in zip(sent_calls, calls, strict=True)
        )

    def _same_call(self, sent: Json, call: Json) -> bool:
        if sent["id"] != call["id"] and str(sent["id"]) in self._by_call:
            return False
        one, other = cast("Json", sent["function"]), cast("Json", call["function"])
        same = _same_json(one["arguments"], other["arguments"])
        return same and one["name"] == other["name"]


def _logged(message: Json) -> LoggedMessage:
    """The message's record, usually cached from an earlier request."""
    fields = tuple(message.items())
    n_characters = 0
    for _, value in fields:
        # only for strings does equality imply equal JSON
        if type(value) is not str:
            return logged_message(message)
        n_characters += len(value)
    if n_characters > _REMEMBERED:
        return logged_message(message)
    return _logged_text(fields)


@lru_cache(maxsize=8192)
def _logged_text(fields: tuple[tuple[str, object], ...]) -> LoggedMessage:
    return logged_message(dict(fields))


def next_position(position: bytes, key: bytes) -> bytes:
    """Return the position after a message with a key."""
    return blake2b(position + key, digest_size=16).digest()


def _ends_of_run(messages: list[Json], index: int) -> Iterator[int]:
    """Yield possible ends of a reply that was split into messages from ``index`` on."""
    stop = index + 1
    while stop < len(messages) and messages[stop]["role"] == "assistant":
        stop += 1
    yield from range(stop, index, -1)


def _joined(messages: list[Json]) -> Json:
    """Join assistant messages into one."""
    if len(messages) == 1:
        return messages[0]
    thoughts = (str(message.get("reasoning_content") or "") for message in messages)
    return assistant_message(
        "".join(str(message["content"]) for message in messages),
        "".join(thoughts),
        [call for message in messages for call in _calls(message)],
    )


def _renamed(sent: list[Json], message: Json) -> dict[str, str]:
    """Map the client's ids of a reply's calls to the reply's own."""
    ids = [str(call["id"]) for one in sent for call in _calls(one)]
    own = [str(call["id"]) for call in _calls(message)]
    return {one: other for one, other in zip(ids, own, strict=True) if one != other}


def _calls(message: Json) -> list[Json]:
    calls = message.get("tool_calls", [])
    assert isinstance(calls, list)
    return calls


def _squeezed(text: object) -> str:
    """The text without white space."""
    return "".join(str(text).split())


def _text_digest(message: Json) -> bytes:
    return blake2b(_squeezed(message["content"]).encode(), digest_size=16).digest()


def _same_json(one: object, other: object) -> bool:
    """Whether two JSON texts have equal values, with numbers compared as doubles."""
    if one == other:
        return True
    try:
        values = (json.loads(str(text), parse_int=float) for text in (one, other))
        return bool(next(values) == next(values))
    # a client's text may be invalid JSON, or too deep to compare
    except (ValueError, RecursionError):
        return False
