"""The conversations of one session: a map from a position to the replies sampled there.

A position is a digest of all messages before it. There a client's assistant message is
found again, which may differ from what was sampled: numbers in tool arguments respelled,
reasoning removed, white space trimmed, one reply split into two messages, text after a call
moved before it. What was sampled is restored. A message that is not recognized stays as the
client sent it. From the map follow also the turn whose ids a prompt extends
(`prompting.prompts`), and what a turn in delta form shares with an earlier one.

The latest requests of a few conversations are kept, because a request mostly begins with
the messages of one of them. The results of a reply's calls follow it in the order of the
calls, as a template that shows no ids presents them. Others are refused.
"""

import json
import operator
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice, takewhile, zip_longest
from sys import getsizeof
from typing import Any, NoReturn
from weakref import WeakSet

import numpy as np

from trajkit_shim.chat import request as chat
from trajkit_shim.chat.images import texts_of
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import HALF, Elements, Json
from trajkit_shim.prompting.render import Ids

START = b""
"""The position of the first message."""

PROMPTS = ("prompt", "message", "task", "objective", "goal", "instructions")
"""Names of arguments that are the prompt of a sub-agent: in Claude Code, opencode and
qwen-code; in Codex; and in others."""

# the latest calls that may have started a sub-agent, and the length of their arguments
_STARTS, _LONGEST = 256, 1 << 16
# a shorter text is in many messages by chance
_SHORTEST = 12
# bytes of a node or a place besides ids and texts
_OVERHEAD = 1024
# copies of the text of a request that is kept: as it came, as JSON, as rendered with
# stand-ins and without
_COPIES = 4
# messages besides calls, and texts between them, in which a reply may come back
_TEXTS = 4
# requests that are kept: an agent's sub-agents converse at the same time
_KEPT = 4


@dataclass(slots=True, weakref_slot=True, eq=False)
class KeptIds:
    """The ids of a turn, prompt and output, which begin with those that it extends."""

    ids: Ids | None  # None: they were released


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """A sampled reply, and the turn that it is of."""

    message: Json  # canonical; it must not change
    logged: chat.LoggedMessage
    position: bytes  # before it
    after: bytes  # the position after it
    turn: int
    agent_id: str | None
    kept: KeptIds  # its ids are the first ones
    n_ids: int
    # the template's text between the replies before this one; None: unknown
    between: bytes | None
    offered: bytes  # digest of the offered tools and the template's variables
    closed: bool  # the output ends with an end-of-message token

    @property
    def own_ids(self) -> Ids | None:
        """Prompt and output; None: they were released."""
        ids = self.kept.ids
        return None if ids is None else ids[: self.n_ids]


@dataclass(slots=True, eq=False)
class Place:
    """A message in its place: all messages before it are the same."""

    message: Json
    logged: chat.LoggedMessage
    before: bytes
    position: bytes  # after it
    index: int  # of the first message that was sent for it
    node: Node | None = None  # the reply of this session that it is
    # the tool whose output it is; None: not a tool's, or unknown
    tool: str | None = None
    # what `prompting.prompts` makes of it
    forms: dict[bool, Json] = field(default_factory=dict)

    @property
    def is_reply(self) -> bool:
        """Whether it is an assistant's message, maybe not one of this session."""
        return self.logged.role == "assistant"


@dataclass(slots=True, eq=False)
class RestoredRequest:
    """The messages of one request, with the session's replies restored."""

    sent: list[Json] = field(default_factory=list)
    elements: Elements = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)
    # what `prompting.prompts` knows of its text, its tools and its variables, or of those
    # of an earlier request
    rendered: Any = None
    offered: Any = None
    text: tuple[bytes, str] | None = None  # without stand-ins, and its position
    n_bytes: int = 0  # about what it takes, some of it shared with other requests

    @property
    def messages(self) -> list[Json]:
        return [place.message for place in self.places]

    @property
    def logged(self) -> list[chat.LoggedMessage]:
        return [place.logged for place in self.places]

    @property
    def tool_names(self) -> list[str | None]:
        return [place.tool for place in self.places]

    @property
    def position(self) -> bytes:
        """The position of the next reply."""
        return self.places[-1].position if self.places else START

    @property
    def sampled(self) -> list[int]:
        """The indices of the session's replies."""
        return [i for i, place in enumerate(self.places) if place.node]

    def add(self, message: Json, index: int) -> Place:
        """Add a message that is no reply of the session."""
        record = chat.logged_message(message)
        after = next_position(self.position, record.key)
        place = Place(message, record, self.position, after, index)
        self.places.append(place)
        return place

    def add_reply(self, node: Node, index: int) -> Place:
        """Add a reply of the session at its position."""
        where = node.logged, node.position, node.after, index
        place = Place(node.message, *where, node)
        self.places.append(place)
        return place


@dataclass(slots=True, eq=False)
class Conversation:
    """The replies of one session.

    `restore` may run on several threads, during calls of the others.
    """

    # by their ids
    replies: dict[str, chat.Reply] = field(default_factory=dict)
    # keys of the messages whose body is in the log
    logged: set[bytes] = field(default_factory=set)
    # by the position before and after; of one position, in the order of turns
    _nodes: dict[bytes, dict[bytes, Node]] = field(default_factory=dict)
    _ids: WeakSet[KeptIds] = field(default_factory=WeakSet)
    # calls that may start an agent: their prompt, the agent that called, and the columns
    _starts: deque[tuple[str, str | None, Json]] = field(
        default_factory=lambda: deque(maxlen=_STARTS)
    )
    # the columns of what started each agent, by its id, else by the position after its
    # first request
    _started: dict[str | bytes, Json] = field(default_factory=dict)
    _budget: "Budget | None" = None
    _closed: bool = False
    # of different conversations, the latest last
    _requests: list[RestoredRequest] = field(default_factory=list)

    @property
    def elements(self) -> list[Elements]:
        """What the requests that are kept were read from; of the latest one first."""
        return [each.elements for each in reversed(self._requests)]

    def restore(
        self,
        messages: list[Json],
        elements: Elements | None = None,
        *,
        keep: bool = True,
    ) -> RestoredRequest:
        """Replace recognized replies in canonical messages by what was sampled.

        With ``keep`` later requests may begin with this one. Raises `GatewayError` (400) if
        tool results do not answer the calls before them.
        """
        earlier, n_same = RestoredRequest(), 0
        for other in self._requests:
            if (n := _n_same(other.sent, messages)) >= n_same:
                earlier, n_same = other, n
        n_known = _n_known(earlier.places, n_same)
        index = earlier.places[n_known].index if n_known else 0
        restored = RestoredRequest(
            messages,
            elements or {},
            earlier.places[:n_known],
            earlier.rendered,
            earlier.offered,
            earlier.text,
        )
        while index < len(messages):
            message = messages[index]
            if message["role"] == "tool":
                rule = "no reply with a call is right before it"
                _refuse_result(index, message, rule)
            if message["role"] != "assistant":
                restored.add(message, index)
                index += 1
                continue
            node, sent = self._recognized(messages, index, restored.position)
            if node is None:
                place = restored.add(message, index)
            else:
                place = restored.add_reply(node, index)
            index += len(sent)
            results = [*takewhile(_is_result, islice(messages, index, None))]
            for result, tool in _in_order(results, sent, place.message, index):
                name = HALF.sub("\ufffd", str(result.get("name") or tool))
                restored.add(result, index).tool = name
            index += len(results)
        texts = sum(getsizeof(place.logged.body) for place in restored.places)
        restored.n_bytes = _COPIES * texts + _OVERHEAD * len(restored.places)
        restored.n_bytes += sum(map(len, restored.elements))
        if keep:
            # an earlier state of the same conversation is not needed
            goes_on = 2 * n_same >= len(earlier.sent)
            kept = [r for r in self._requests if not (goes_on and r is earlier)]
            self._requests = [*kept[1 - _KEPT :], restored]
        return restored

    def _recognized(
        self, messages: list[Json], index: int, position: bytes
    ) -> tuple[Node | None, list[Json]]:
        """The reply that the messages at an index are, and these messages."""
        # the latest first: an earlier one may have been lost on its way
        nodes = [*self._nodes.get(position, {}).values()][::-1]
        if not nodes:
            return None, messages[index : index + 1]
        # at most as many as a reply has parts; clients may send thousands
        n_calls = max(len(chat.calls_of(node.message)) for node in nodes)
        most = index + 2 * n_calls + _TEXTS
        run = [*takewhile(_is_reply, islice(messages, index, most))]
        for n in range(len(run), 0, -1):
            sent = _joined(run[:n])
            equal = [node for node in nodes if node.message == sent]
            for node in equal or nodes:
                if equal or _is_same(sent, node.message, nodes):
                    return node, run[:n]
        return None, run[:1]

    def add(self, node: Node, base: Node | None, budget: "Budget") -> None:
        """Store a reply that was recorded, and the turn whose ids it extends."""
        # the same reply to the same messages: the latest turn counts, and is the last
        alike = self._nodes.setdefault(node.position, {})
        alike.pop(node.after, None)
        alike[node.after] = node
        # what they know of this position is out of date
        self._requests = [
            request
            for request in self._requests
            if not any(p.is_reply and p.before == node.position for p in request.places)
        ]
        for call in chat.calls_of(node.message):
            prompt = _prompt(call.arguments)
            started: Json = {
                "started_by_turn": node.turn,
                "started_by_call": call.call_id,
            }
            if len(prompt) >= _SHORTEST:
                self._starts.append((prompt, node.agent_id, started))
        if base is not None and (ids := base.kept.ids) is not None:
            # unless another turn extends the base, those are a part of its own
            if len(ids) == base.n_ids:
                base.kept.ids, node.kept = node.kept.ids, base.kept
        self._ids.add(node.kept)
        self.count_kept(budget)

    def count_kept(self, budget: "Budget") -> None:
        """Count what it keeps, on the event loop."""
        if not self._closed:
            self._budget = budget
            budget.count(self)

    def delta(
        self, restored: RestoredRequest, prompt_ids: Ids
    ) -> tuple[int | None, int, int]:
        """Return an earlier turn, and how many ids and messages a prompt shares with it.

        It is the latest turn with the most of the request's messages; None: there is none
        (`trajkit.schema.TURNS_DELTA`).
        """
        after = START
        path = [START, *(place.position for place in restored.places)]
        for n_messages, position in reversed([*enumerate(path)]):
            if nodes := self._nodes.get(position):
                node = nodes.get(after) or [*nodes.values()][-1]
                ids = node.own_ids
                n_ids = 0 if ids is None else _n_common(ids, prompt_ids)
                if n_ids:
                    return node.turn, n_ids, n_messages + (node.after == after)
            after = position
        return None, 0, 0

    def started_by(
        self,
        restored: RestoredRequest,
        agent_id: str | None,
        parent_id: str | None,
        *,
        named: bool,
    ) -> Json:
        """Return the columns of what started the agent of a request; empty: nothing.

        A request without a reply of its session is a sub-agent's if its user messages
        contain the prompt of an earlier tool call: the longest of its arguments among
        `PROMPTS`. The longest such prompt counts, then the earliest call. If the harness
        names its agents (``named``), the call must be one of the parent agent, and the
        main agent has none. A call starts one sub-agent, but a request that is sent again
        and another conversation of the same agent have the call of the first.
        """
        if restored.sampled or (named and agent_id is None):
            return {}
        agent = agent_id or restored.position
        if not (agent_id and agent in self._started):
            users = (m for m in restored.messages if m["role"] == "user")
            text = "\n".join(text for m in users for text in texts_of(m["content"]))
            fitting = [
                start
                for start in self._starts
                if start[0] in text and (not named or start[1] == parent_id)
            ]
            if fitting:
                # the first of the longest
                start = max(fitting, key=lambda one: len(one[0]))
                self._starts.remove(start)
                self._started[agent] = start[2]
        return self._started.get(agent, {})

    @property
    def n_bytes(self) -> int:
        """About how many bytes its ids and the requests that are kept take."""
        n_bytes = sum(each.n_bytes for each in self._requests)
        n_bytes += _OVERHEAD * sum(map(len, self._nodes.values()))
        return n_bytes + sum(k.ids.nbytes for k in self._ids if k.ids is not None)

    def release(self) -> None:
        """Drop the ids and the requests; the replies are still recognized."""
        self._requests = []
        for kept in self._ids:
            kept.ids = None

    def close(self) -> None:
        """Drop the ids and the requests of a session that has ended."""
        self._closed, self.replies = True, {}
        self.release()
        if self._budget is not None:
            self._budget.uncount(self)


class Budget:
    """A limit in bytes on the ids and the requests that all sessions keep.

    Beyond it those of the session that was idle longest are released: its next prompt is
    rendered, and may differ from the ids.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.n_bytes = max_bytes, 0
        self._sessions: OrderedDict[Conversation, int] = OrderedDict()

    def count(self, session: Conversation) -> None:
        """Count a session that has changed; it is the one that was used last."""
        self.uncount(session)
        self._sessions[session] = n_bytes = session.n_bytes
        self.n_bytes += n_bytes
        while self.n_bytes > self.max_bytes:
            oldest = next(iter(self._sessions))
            oldest.release()
            self.uncount(oldest)

    def uncount(self, session: Conversation) -> None:
        """Forget a session, if it was counted."""
        self.n_bytes -= self._sessions.pop(session, 0)


def next_position(position: bytes, key: bytes) -> bytes:
    """Return the position after a message with a key."""
    return blake2b(position + key, digest_size=16).digest()


def _n_known(places: list[Place], n_same: int) -> int:
    """How many places stay where only some first messages come again.

    They end before a reply, because what that is depends on the messages that follow.
    """
    for n in range(len(places) - 1, 0, -1):
        first_reply = places[n].is_reply and not places[n - 1].is_reply
        if first_reply and places[n].index < n_same:
            return n
    return 0


def _n_same(one: Sequence[object], other: Sequence[object]) -> int:
    """How many equal objects two lists begin with."""
    same = map(operator.eq, one, other)
    return next(
        (i for i, each in enumerate(same) if not each), min(len(one), len(other))
    )


def _n_common(one: Ids, other: Ids) -> int:
    """How many ids two prompts begin with alike."""
    n = min(len(one), len(other))
    differs = one[:n] != other[:n]
    return int(np.argmax(differs)) if differs.any() else n


def _joined(messages: list[Json]) -> Json:
    """Join assistant messages into one."""
    if len(messages) == 1:
        return messages[0]
    parts = list[chat.Spoken]()
    for message in messages:
        parts.append(chat.Thought(str(message.get("reasoning_content") or "")))
        parts += [str(message["content"]), *chat.calls_of(message)]
    return chat.assistant_message(parts)


def _is_same(sent: Json, reply: Json, siblings: list[Node]) -> bool:
    """Whether a message has the content of a reply, maybe without its reasoning.

    ``siblings``: the replies that were sampled there, whose calls differ by their ids.
    """
    thought, *texts = (
        [chat.squeezed(message.get(name) or "") for message in (sent, reply)]
        for name in ("reasoning_content", "content")
    )
    if texts[0][0] != texts[0][1] or (thought[0] and thought[0] != thought[1]):
        return False
    taken = {call.call_id for n in siblings for call in chat.calls_of(n.message)}
    pairs = [*zip_longest(chat.calls_of(sent), chat.calls_of(reply))]
    return all(
        one is not None
        and other is not None
        and one.name == other.name
        and (one.call_id == other.call_id or one.call_id not in taken)
        and _same_json(one.arguments, other.arguments)
        for one, other in pairs
    )


def _is_result(message: Json) -> bool:
    return message["role"] == "tool"


def _is_reply(message: Json) -> bool:
    return message["role"] == "assistant"


def _in_order(
    results: list[Json], sent: list[Json], reply: Json, index: int
) -> Iterator[tuple[Json, str]]:
    """Yield results in the order of their calls, with the calls' own ids and tools.

    ``sent``: the client's messages for the ``reply``, whose calls may have other ids.
    ``index``: of the first result. An equal result that is sent again stays: Gemini CLI
    0.61 does that in a session that it resumes.
    """
    sent_ids = (c.call_id for message in sent for c in chat.calls_of(message))
    calls = dict(zip(sent_ids, chat.calls_of(reply), strict=True))
    by_call: dict[str, list[Json]] = {}
    for i, result in enumerate(results, index):
        sent_id = str(result.get("tool_call_id"))
        if sent_id not in calls:
            known = ", ".join(calls) or "none"
            rule = f"no call of the reply before it has this id (its calls: {known})"
            _refuse_result(i, result, rule)
        own = {**result, "tool_call_id": calls[sent_id].call_id}
        same = by_call.setdefault(sent_id, [])
        if same and own != same[0]:
            _refuse_result(i, result, "another result, with other content, has this id")
        same.append(own)
    for sent_id, call in calls.items() if results else ():
        if sent_id not in by_call:
            rule = (
                f"the call {sent_id!r} of the same reply has no result right after it"
            )
            _refuse_result(index, results[0], rule)
        for result in by_call[sent_id]:
            yield result, call.name


def _refuse_result(index: int, result: Json, rule: str) -> NoReturn:
    where = f"messages[{index}].tool_call_id"
    message = f"{where}: {result.get('tool_call_id')!r}: {rule}"
    raise GatewayError(message, code="unanswered_call", param=where)


def _prompt(arguments: str) -> str:
    """The prompt of a sub-agent in the arguments of a call, or an empty text."""
    # as sampled, arguments may be no JSON, or too deep
    with suppress(ValueError, RecursionError):
        values = json.loads(arguments) if len(arguments) <= _LONGEST else None
        if isinstance(values, dict):
            texts = [values[n] for n in PROMPTS if isinstance(values.get(n), str)]
            return max(map(str.strip, texts), key=len, default="")
    return ""


def _same_json(one: str, other: str) -> bool:
    """Whether two JSON texts have equal values, with numbers compared as doubles."""
    if one == other:
        return True
    # a client's text may be invalid JSON, or too deep to compare
    with suppress(ValueError, RecursionError):
        first, second = (json.loads(text, parse_int=float) for text in (one, other))
        return bool(first == second)
    return False
