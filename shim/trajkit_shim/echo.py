"""The echo: what was sampled, known again in what a client sends back of it.

A client sends the whole conversation with each request, the model's own replies among
it, in a shape of its own: numbers in tool arguments written otherwise, reasoning left
out, white space trimmed, one reply split into two messages, text that was sampled after
a call put before it. A session remembers each reply under its place, that is under all
messages before it, and puts what was sampled in the place of what was sent. So the next
prompt is rendered from what the model really said, and the message's key in the log is
that of the reply.

What is not known again is a new message: it stays as it was sent, and is counted.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Literal, TypeAlias

from trajkit_shim.log import LoggedMessage, logged_message
from trajkit_shim.wire import Json

Known: TypeAlias = Literal["as_sent", "restored", "new"]
"""An assistant message of a request is a reply to the letter (``as_sent``), a reply in
another shape (``restored``), or no reply of this session (``new``)."""

# characters of a message whose record is kept: the kept ones are bounded together
_REMEMBERED = 8192

START = b""
"""The place of the first message."""


@dataclass(frozen=True, slots=True)
class Heard:
    """The messages of one request, with the session's replies put back."""

    messages: list[Json]
    logged: list[LoggedMessage]
    # of the reply to come
    place: bytes
    # each assistant message: the place behind it, and what it was taken for
    known: list[tuple[bytes, Known]]
    # behind each message
    places: list[bytes]


@dataclass(slots=True)
class EchoBook:
    """What was sampled in one session.

    `hear` only reads, and may run on another thread while the others are called.
    """

    # replies by their place
    _said: dict[bytes, list[Json]] = field(default_factory=dict)
    # the reply that made a tool call, by the call's id
    _by_call: dict[str, Json] = field(default_factory=dict)
    # replies without calls, by their text
    _by_text: dict[bytes, list[Json]] = field(default_factory=dict)
    # the replies' records, by the replies' own ids, which live as long as these
    _records: dict[int, LoggedMessage] = field(default_factory=dict)
    _counted: set[bytes] = field(default_factory=set)
    counts: Counter[Known] = field(default_factory=Counter)

    def hear(self, messages: list[Json]) -> Heard:
        """Put the session's replies in the place of their echoes.

        Parameters
        ----------
        messages : list of dict
            Canonical (`trajkit_shim.chat`), in order.
        """
        heard: list[Json] = []
        logged: list[LoggedMessage] = []
        known: list[tuple[bytes, Known]] = []
        # ids that a client gave to calls of ours
        renamed: dict[str, str] = {}
        places: list[bytes] = []
        place = START
        at = 0
        while at < len(messages):
            message, step = messages[at], 1
            as_what: Known | None = None
            if message["role"] == "assistant":
                message, step, as_what = self._known(messages, at, place)
                if as_what == "restored":
                    renamed |= _renamed(messages[at : at + step], message)
            elif message.get("tool_call_id") in renamed:
                new_id = renamed[str(message["tool_call_id"])]
                message = {**message, "tool_call_id": new_id}
            at += step
            heard.append(message)
            logged.append(self._records.get(id(message)) or _logged(message))
            place = place_behind(place, logged[-1].key)
            places.append(place)
            if as_what is not None:
                known.append((place, as_what))
        return Heard(heard, logged, place, known, places)

    def sampled_at(self, place: bytes) -> bool:
        """Whether a reply was sampled there."""
        return place in self._said

    def remember(self, place: bytes, reply: Json) -> None:
        """Keep a reply that was sampled at a place (`Heard.place`).

        Parameters
        ----------
        place : bytes
        reply : dict
            Canonical. It must not change afterwards.
        """
        self._said.setdefault(place, []).append(reply)
        self._records[id(reply)] = logged_message(reply)
        calls = _calls(reply)
        for call in calls:
            self._by_call[str(call["id"])] = reply
        if not calls:
            alike = self._by_text.setdefault(_text_digest(reply), [])
            if reply not in alike:
                alike.append(reply)

    def count(self, heard: Heard) -> None:
        """Count the assistant messages of a request, each place once."""
        for place, as_what in heard.known:
            if place not in self._counted:
                self._counted.add(place)
                self.counts[as_what] += 1

    def clear(self) -> None:
        """Forget all but the counts."""
        self._said.clear()
        self._by_call.clear()
        self._by_text.clear()
        self._records.clear()
        self._counted.clear()

    def _known(
        self, messages: list[Json], at: int, place: bytes
    ) -> tuple[Json, int, Known]:
        """The message at ``at`` or the reply that it is, and how many messages it took."""
        for stop in _ends_of_run(messages, at):
            sent = _joined(messages[at:stop])
            reply = self._at_place(sent, place)
            if reply is not None:
                as_sent = stop == at + 1 and reply == sent
                return reply, stop - at, "as_sent" if as_sent else "restored"
        sent = messages[at]
        reply = self._elsewhere(sent)
        if reply is None:
            return sent, 1, "new"
        return reply, 1, "as_sent" if reply == sent else "restored"

    def _at_place(self, sent: Json, place: bytes) -> Json | None:
        said = self._said.get(place, [])
        for same in (dict.__eq__, self._same):
            for reply in said:
                if same(sent, reply):
                    return reply
        return None

    def _elsewhere(self, sent: Json) -> Json | None:
        """The reply that it is where the messages before it changed, if one can tell."""
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
        """The message says what the reply says.

        White space and the spelling of JSON aside; reasoning may be missing; ids of
        calls may be the client's own.
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
        one, other = sent["function"], call["function"]
        assert isinstance(one, dict)
        assert isinstance(other, dict)
        return one["name"] == other["name"] and _same_json(
            one["arguments"], other["arguments"]
        )


def _logged(message: Json) -> LoggedMessage:
    """The message's record, which is mostly that of an earlier request."""
    fields = tuple(message.items())
    n_characters = 0
    for _, value in fields:
        # what is equal is written alike only where it is text
        if type(value) is not str:
            return logged_message(message)
        n_characters += len(value)
    if n_characters > _REMEMBERED:
        return logged_message(message)
    return _logged_text(fields)


@lru_cache(maxsize=8192)
def _logged_text(fields: tuple[tuple[str, object], ...]) -> LoggedMessage:
    return logged_message(dict(fields))


def place_behind(place: bytes, key: bytes) -> bytes:
    """The place behind the message of that key at a place."""
    return blake2b(place + key, digest_size=16).digest()


def _ends_of_run(messages: list[Json], at: int) -> Iterator[int]:
    """Where the assistant messages from ``at`` on may end that are one reply."""
    stop = at + 1
    while stop < len(messages) and messages[stop]["role"] == "assistant":
        stop += 1
    yield from range(stop, at, -1)


def _joined(messages: list[Json]) -> Json:
    """Assistant messages as one."""
    if len(messages) == 1:
        return messages[0]
    joined: Json = {
        "role": "assistant",
        "content": "".join(str(message["content"]) for message in messages),
    }
    thoughts = [str(message.get("reasoning_content") or "") for message in messages]
    if any(thoughts):
        joined["reasoning_content"] = "".join(thoughts)
    calls = [call for message in messages for call in _calls(message)]
    if calls:
        joined["tool_calls"] = calls
    return joined


def _renamed(sent: list[Json], message: Json) -> dict[str, str]:
    """From the ids that a client gave to the calls of a reply to the reply's own."""
    ids = [str(call["id"]) for one in sent for call in _calls(one)]
    own = [str(call["id"]) for call in _calls(message)]
    return {one: other for one, other in zip(ids, own, strict=True) if one != other}


def _calls(message: Json) -> list[Json]:
    calls = message.get("tool_calls", [])
    assert isinstance(calls, list)
    return calls


def _squeezed(text: object) -> str:
    """The text without its white space."""
    return "".join(str(text).split())


def _text_digest(message: Json) -> bytes:
    return blake2b(_squeezed(message["content"]).encode(), digest_size=16).digest()


def _same_json(one: object, other: object) -> bool:
    """Two JSON texts are one value; a number is what a double makes of it."""
    if one == other:
        return True
    try:
        return bool(
            json.loads(str(one), parse_int=float)
            == json.loads(str(other), parse_int=float)
        )
    # what a client sends may be no JSON, or too deep to compare
    except (ValueError, RecursionError):
        return False
