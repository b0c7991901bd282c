"""One session's conversations: what was sampled, by its position.

A position is a digest of all messages up to it. At the position after a reply a session
keeps the token ids of its prompt and output, for later prompts to extend.

The replies that a client sends back are recognized by their position.

The replies in a request may differ from what was sampled: numbers in tool arguments
respelled, reasoning removed, white space trimmed, one reply split into two messages, text
after a call moved before it. What was sampled is restored. So the next prompt is rendered
from what the model really wrote, and the log has the reply's own message key. A reply that
is not recognized stays as the client sent it, and is counted.

The results of a reply's calls follow it in the order of the calls, as a template that
shows no ids presents them. Results that belong to no call are refused.
"""

import json
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import islice, takewhile
from threading import Lock
from typing import Literal, NoReturn, TypeAlias

import numpy as np

from trajkit_shim.chat import request as chat
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import Json, without_halves
from trajkit_shim.prompting.attribution import Ids

Known: TypeAlias = Literal["as_sent", "restored", "new"]
"""What an assistant message of a request is: an exact reply (``as_sent``), a reply in
another form (``restored``), or not a reply of this session (``new``)."""

_SAMPLED = ("as_sent", "restored")

START = b""
"""The position of the first message."""

# bytes of a turn besides its tokens: the node, its position and its digests
_OVERHEAD = 1024


@dataclass(frozen=True, slots=True)
class RestoredRequest:
    """The messages of one request, with the session's replies restored.

    Each list has an element per message.
    """

    messages: list[Json] = field(default_factory=list)
    logged: list[chat.LoggedMessage] = field(default_factory=list)
    positions: list[bytes] = field(default_factory=list)  # after each message
    # the tool whose output it is; None: not a tool's, or unknown
    tool_names: list[str | None] = field(default_factory=list)
    known: list[Known | None] = field(default_factory=list)  # None: not an assistant's

    @property
    def position(self) -> bytes:
        """The position of the next reply."""
        return self.positions[-1] if self.positions else START

    @property
    def replies(self) -> Iterator[int]:
        """The indices of its assistant messages, the last first."""
        return (i for i in reversed(range(len(self.known))) if self.known[i])

    @property
    def sampled(self) -> list[int]:
        """The indices of the messages that are replies of this session."""
        return [i for i, known in enumerate(self.known) if known in _SAMPLED]

    def add(
        self,
        message: Json,
        position: bytes,
        known: Known | None,
        tool: str | None = None,
    ) -> bytes:
        """Add the message at a position, and return the position after it."""
        record = chat.logged_message(message)
        if known in (None, "new") and "\\ud" in record.body:
            message = without_halves(message)
            record = chat.logged_message(message)
        position = next_position(position, record.key)
        self.messages.append(message)
        self.logged.append(record)
        self.positions.append(position)
        self.tool_names.append(tool)
        self.known.append(known)
        return position


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """The prompt and output of a recorded turn, for later prompts to extend."""

    # prompt and output, a view of a buffer; None: they were released, or the output has
    # no end-of-message token
    ids: Ids | None = None
    buffer: "Buffer | None" = None
    # BLAKE2b of the ids as little-endian int32
    hasher: blake2b = field(default_factory=partial(blake2b, digest_size=16))
    # the template's text between the replies before this one; None: unknown
    between: bytes | None = None
    # digest of the offered tools and the template's variables
    offered: bytes = b""
    closed: bool = False  # the output has an end-of-message token


class Buffer:
    """The ids of turns that extend each other, with room for more.

    Ids in it do not change, so that a prompt and the ones that extend it are views of
    one array, and each costs only what it adds. A fork is a copy.
    """

    def __init__(self, n_ids: int = 0) -> None:
        room = n_ids // 8 + min(n_ids // 2, 1024)
        self.ids: Ids = np.empty(n_ids + room, np.int32)
        self._n_used = n_ids
        self._lock = Lock()

    def extend(self, ids: Ids, new: Ids) -> "tuple[Ids, Buffer]":
        """Return ``ids``, the first ones here, with new ones after them, and a buffer.

        It is another one if others follow them, or there is no room.
        """
        n_ids, end = len(ids), len(ids) + len(new)
        buffer = self
        with self._lock:
            if n_ids == self._n_used and end <= len(self.ids):
                self._n_used = end
            else:
                buffer = Buffer(end)
                buffer.ids[:n_ids] = ids
        buffer.ids[n_ids:end] = new
        return buffer.ids[:end], buffer


class Budget:
    """A limit in bytes on the token ids of all sessions.

    Beyond it the ids of the session that was idle longest are released: its next prompt
    is rendered, and may differ from them.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.n_bytes = 0
        self._sessions: OrderedDict[Conversation, int] = OrderedDict()

    def count(self, session: "Conversation") -> None:
        """Count a session that has changed; it is the one that was used last."""
        self.uncount(session)
        n_bytes = session.n_bytes
        self._sessions[session] = n_bytes
        self.n_bytes += n_bytes
        while self.n_bytes > self.max_bytes:
            oldest = next(iter(self._sessions))
            oldest.release()
            self.uncount(oldest)

    def uncount(self, session: "Conversation") -> None:
        """Forget a session, if it was counted."""
        self.n_bytes -= self._sessions.pop(session, 0)


@dataclass(slots=True, eq=False)
class Conversation:
    """The messages and token ids of one session, by position.

    `restore` and `node` only read, and may run on another thread during calls of the
    others.
    """

    # by their position, by the ids of their calls, and those without by their text
    _replies: dict[bytes | str, list[Json]] = field(default_factory=dict)
    _nodes: dict[bytes, Node] = field(default_factory=dict)
    _buffers: set[Buffer] = field(default_factory=set)
    _budget: Budget | None = None
    _counted: set[bytes] = field(default_factory=set)
    counts: Counter[Known] = field(default_factory=Counter)

    def restore(self, messages: list[Json]) -> RestoredRequest:
        """Replace recognized replies in canonical messages by what was sampled.

        Raises `GatewayError` (400) if tool results do not answer the calls before them.
        """
        restored = RestoredRequest()
        position = START
        index = 0
        while index < len(messages):
            message, step = messages[index], 1
            known: Known | None = None
            if message["role"] == "assistant":
                message, step, known = self._known(messages, index, position)
                sent = messages[index : index + step]
                index += step
                position = restored.add(message, position, known)
                results = [*takewhile(_is_result, messages[index:])]
                if results:
                    calls = _called(sent, message)
                    for result, tool in _in_order(results, calls, index):
                        name = str(result.get("name") or tool)
                        position = restored.add(result, position, None, name)
                index += len(results)
                continue
            if message["role"] == "tool":
                _refuse_result(
                    index, message, "no reply with a call is right before it"
                )
            index += step
            position = restored.add(message, position, None)
        return restored

    def node(self, position: bytes) -> Node | None:
        """Return the turn whose reply ends at a position."""
        return self._nodes.get(position)

    @property
    def n_bytes(self) -> int:
        """Bytes of the token ids, and of what belongs to them."""
        return sum(b.ids.nbytes for b in self._buffers) + _OVERHEAD * len(self._nodes)

    def release(self) -> None:
        """Drop the token ids; the replies are still recognized."""
        for node in self._nodes.values():
            node.ids = node.buffer = None
        self._buffers.clear()

    def close(self) -> None:
        """Drop the token ids of a session that has ended."""
        self.release()
        if self._budget is not None:
            self._budget.uncount(self)

    def add(
        self, position: bytes, node: Node, base: Node | None, budget: Budget
    ) -> None:
        """Store the turn of a reply, by the position after it; it extends ``base``."""
        self._nodes[position] = node
        old, new = base and base.buffer, node.buffer
        if new is not None:
            self._buffers.add(new)
        if old is not None and new is not None and old is not new:
            nodes = [each for each in self._nodes.values() if each.buffer is old]
            assert base is not None
            assert base.ids is not None
            # it has outgrown its buffer; after a fork both are needed
            if all(n.ids is not None and len(n.ids) <= len(base.ids) for n in nodes):
                for each in nodes:
                    assert each.ids is not None
                    each.ids, each.buffer = new.ids[: len(each.ids)], new
                self._buffers.discard(old)
        self._budget = budget
        budget.count(self)

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


def _is_result(message: Json) -> bool:
    return message["role"] == "tool"


def _in_order(
    results: list[Json], calls: dict[str, tuple[str, str]], index: int
) -> list[tuple[Json, str]]:
    """Return results in the order of their calls, with the calls' own ids and tools.

    ``calls``: own ids and tools by the client's ids. ``index``: of the first result.
    An equal result that is sent again stays: Gemini CLI 0.61 does that in a session
    that it resumes.
    """
    found: dict[str, list[Json]] = {}
    for i, result in enumerate(results, index):
        sent_id = str(result.get("tool_call_id"))
        if sent_id not in calls:
            known = ", ".join(calls) or "none"
            rule = f"no call of the reply before it has this id (its calls: {known})"
            _refuse_result(i, result, rule)
        own = {**result, "tool_call_id": calls[sent_id][0]}
        same = found.setdefault(sent_id, [])
        if same and own != same[0]:
            _refuse_result(i, result, "another result, with other content, has this id")
        same.append(own)
    missing = [sent_id for sent_id in calls if sent_id not in found]
    if missing:
        rule = f"the call {missing[0]!r} of the same reply has no result right after it"
        _refuse_result(index, results[0], rule)
    return [(r, tool) for sent_id, (_, tool) in calls.items() for r in found[sent_id]]


def _refuse_result(index: int, result: Json, rule: str) -> NoReturn:
    where = f"messages[{index}].tool_call_id"
    message = f"{where}: {result.get('tool_call_id')!r}: {rule}"
    raise GatewayError(message, code="unanswered_call", param=where)


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
