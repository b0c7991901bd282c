"""The agents of a session: one main chain, and at most one chain of a sub-agent.

A call of the main agent to a tool that starts sub-agents begins a sub-agent; a message that
answers that tool call ends it. A chain whose next call has other messages is frozen: its
calls so far are a segment. Segments are ranked in the order of freezing (policy
``segments``).
"""

import re

import numpy as np

from trajkit import _core
from trajkit.policies import Policy
from trajkit.rows.routes.links import (
    KEY_TOKENS,
    REASONS,
    empty_links,
    first_of_session,
    grow_messages,
    sessions_of,
)
from trajkit.schema import SEGMENT_KINDS
from trajkit.tables import lazy_compute as pc
from trajkit.tables.ragged import Records
from trajkit.turns.message_equality import Classes, classify
from trajkit.turns.messages import message_body, parse_json
from trajkit.turns.sessions import Forest, Sessions

# The number of each kind in a record; 0 is no segment.
_SEGMENTS = {kind: number for number, kind in enumerate(SEGMENT_KINDS, 1)}
# The JSON key that names the answered tool call, and the id in quotes.
_ANSWERS = re.compile(r'"tool_(?:call|use)_id":\s*("(?:[^"\\]|\\.)*")')


def by_agents(calls: Sessions, forest: Forest, policy: Policy) -> Records:
    """Each call continues the last call of its agent, if it begins with that one's request.

    Without messages of both, its prompt begins with that call's path, or with that call's
    prompt and is longer. Between a tool call that starts a sub-agent and
    its answer, calls that do not continue the main agent belong to the sub-agent.
    """
    links = empty_links(calls)
    classes = classify(calls, policy.message_equality)
    agents = _Agents(calls, forest, classes, policy.dispatch_tools)
    for session in sessions_of(calls):
        agents.route(session)
    links["parent"], links["order"] = agents.parents, agents.orders
    links["link_reason"], links["segment"] = agents.reasons, agents.segments
    return links


class _Agents:
    """The links of the sessions so far."""

    def __init__(
        self, calls: Sessions, forest: Forest, classes: Classes, tools: tuple[str, ...]
    ) -> None:
        keyed = classes.keyed(calls)
        messages = grow_messages(keyed)
        self._tokens, self._messages = forest.paths, messages.paths
        self._prompt_len = calls.calls["prompt_len"].tolist()
        self._path_len = calls.path_len.tolist()
        requests = calls.requests
        self._listed = (requests["n_keys"] >= 0).tolist()
        self._n_messages = (requests["n_keys"] + requests["shared"]).tolist()
        self._dispatches, answers = find_dispatches(classes, tools)
        self._answers = _first_answers(calls, classes, messages, answers)
        n_calls = len(calls.calls)
        self.parents, self.orders = [-1] * n_calls, [-1] * n_calls
        self.reasons, self.segments = [REASONS["root"]] * n_calls, [0] * n_calls
        self._rank = 0

    def route(self, session: range) -> None:
        """Find the parents of a session's calls, and their segments."""
        self._rank = 0
        main: list[int] = []
        sub: list[int] = []
        dispatch = None  # the tool call that started the active sub-agent
        for call in session:
            if self._listed[call] and self._n_messages[call] == 0:
                self.reasons[call] = REASONS["unrouted"]
                continue
            if dispatch is not None and self._is_answered(call, dispatch, session):
                self._freeze(sub, "subagent")
                dispatch = None
            is_main = dispatch is None or (main and self._continues(main[-1], call))
            chain = main if is_main else sub
            if chain and self._continues(chain[-1], call):
                listed = self._listed[call] and self._listed[chain[-1]]
                self.parents[call] = chain[-1]
                self.reasons[call] = REASONS["messages" if listed else "tokens"]
            elif chain:
                self._freeze(chain, "history_replaced")
                self.reasons[call] = REASONS["history_replaced"]
            chain.append(call)
            if is_main and self._dispatches[call] >= 0:
                dispatch = self._dispatches[call]
        self._freeze(sub, "subagent")
        self._freeze(main, "final")

    def _continues(self, last: int, call: int) -> bool:
        """Whether the call continues a chain's last call."""
        if self._listed[last] and self._listed[call]:
            shared = _core.shared_length(self._messages, last, call)
            return bool(shared >= KEY_TOKENS * self._n_messages[last])
        shared = _core.shared_length(self._tokens, last, call)
        if shared == self._path_len[last]:
            return True
        opening = self._prompt_len[last]
        return bool(0 < opening <= shared and opening < self._prompt_len[call])

    def _is_answered(self, call: int, dispatch: int, session: range) -> bool:
        """Whether a message of the call answers the tool call."""
        return any(
            _core.shared_length(self._messages, shown, call) >= n_tokens
            for shown, n_tokens in self._answers.get((session.start, dispatch), ())
            if shown <= call
        )

    def _freeze(self, chain: list[int], kind: str) -> None:
        """Make the calls of a chain a segment, and the chain empty."""
        for call in chain:
            self.orders[call] = self._rank
            self.segments[call] = _SEGMENTS[kind]
            self._rank += 1
        chain.clear()


def _first_answers(
    calls: Sessions, classes: Classes, messages: Forest, answers: dict[int, list[int]]
) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """The messages that answer a tool call, by the session's first call and the tool call.

    A message is a call that was the first of its session to have the messages up to it,
    and the tokens of these in a path.
    """
    requests = calls.requests
    stored = np.maximum(requests["n_keys"], 0)
    sizes = np.maximum(requests["n_keys"] + requests["shared"], 0)
    index = np.arange(len(stored))
    of_call = np.repeat(index, stored)
    n_before = np.arange(len(of_call)) - np.repeat(np.cumsum(stored) - sizes, stored)
    # the messages that requests store, then the replies
    of_call = np.append(of_call, index)
    n_tokens = KEY_TOKENS * (np.append(n_before, sizes) + 1)
    class_of = np.append(classes.places, classes.replies)
    is_new = np.isin(class_of, [*answers]) & (n_tokens > messages.shared[of_call])
    first = first_of_session(calls)
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for k in np.flatnonzero(is_new).tolist():
        call = int(of_call[k])
        for dispatch in answers[int(class_of[k])]:
            shown = (call, int(n_tokens[k]))
            found.setdefault((int(first[call]), dispatch), []).append(shown)
    return found


def find_dispatches(
    classes: Classes, tools: tuple[str, ...]
) -> tuple[list[int], dict[int, list[int]]]:
    """The tool calls to ``tools`` in the replies, and the messages that answer them.

    Returns the number of the tool call in each call's reply, the last of several, or -1;
    and by class, the numbers of those that its messages answer. Nothing answers a tool
    call without an id (``pending_dispatch_id`` of slime's
    https://github.com/THUDM/slime/blob/b6764131d/examples/coding_agent_rl/middleware.py).
    """
    numbers: dict[str | None, int] = {}
    of_class = np.full(len(classes.bodies) + 1, -1, np.int32)  # [-1]: no reply
    replies = np.unique(classes.replies[classes.replies >= 0])
    if tools:
        bodies = classes.bodies.take(replies)
        # Only replies that may call one of the tools are parsed.
        names = "|".join(re.escape(_quoted(tool)) for tool in tools)
        calling = pc.match_substring_regex(bodies, rf'"name":\s*(?:{names})')
        for k, body in zip(
            replies[np.asarray(calling)],
            bodies.filter(calling).to_pylist(),
            strict=True,
        ):
            ids = [
                call for name, call in _tool_calls(parse_json(body)) if name in tools
            ]
            if ids:
                of_class[k] = numbers.setdefault(ids[-1], len(numbers))
    answers: dict[int, list[int]] = {}
    quoted = {_quoted(call) for call in numbers if call is not None}
    if quoted:
        for k, body in enumerate(classes.bodies.to_pylist()):
            if not quoted.isdisjoint(_ANSWERS.findall(body)):
                answered = [
                    numbers[c] for c in _answered(parse_json(body)) if c in numbers
                ]
                if answered:
                    answers[k] = answered
    return of_class[classes.replies].tolist(), answers


def _quoted(text: str) -> str:
    """A string as message bodies contain it."""
    return message_body({"": text})[len('{"":') : -1]


def _tool_calls(message: object) -> list[tuple[object, str | None]]:
    """Name and id of a message's tool calls: ``tool_calls``, or blocks ``tool_use``."""
    found: list[tuple[object, str | None]] = []
    for call in _objects(message, "tool_calls"):
        function = call.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        found.append((name, _text(call.get("id"))))
    for block in _objects(message, "content"):
        if block.get("type") == "tool_use":
            found.append((block.get("name"), _text(block.get("id"))))
    return found


def _answered(message: object) -> list[str]:
    """Ids of the answered tool calls, from ``tool_call_id`` or ``tool_result`` blocks."""
    ids = [message.get("tool_call_id")] if isinstance(message, dict) else []
    for block in _objects(message, "content"):
        if block.get("type") == "tool_result":
            ids.append(block.get("tool_use_id"))
    return [call for call in ids if isinstance(call, str)]


def _objects(message: object, name: str) -> list[dict[str, object]]:
    """The objects in the list under a key of the message, if there is one."""
    values = message.get(name) if isinstance(message, dict) else None
    if not isinstance(values, list):
        return []
    return [value for value in values if isinstance(value, dict)]


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
