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
from trajkit.rows.routes.shared import (
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
    messages = grow_messages(classes.keyed(calls))
    of_messages, of_tokens = messages.paths, forest.paths
    prompt_len, path_len = calls.calls["prompt_len"].tolist(), calls.path_len.tolist()
    requests = calls.requests
    listed = (requests["n_keys"] >= 0).tolist()
    n_messages = (requests["n_keys"] + requests["shared"]).tolist()
    dispatches, answers = find_dispatches(classes, policy.dispatch_tools)
    shown = _first_answers(calls, classes, messages, answers)
    parents, orders = links["parent"].tolist(), links["order"].tolist()
    reasons, segments = links["link_reason"].tolist(), links["segment"].tolist()

    def continues(last: int, call: int) -> bool:
        if listed[last] and listed[call]:
            shared = _core.shared_length(of_messages, last, call)
            return bool(shared >= KEY_TOKENS * n_messages[last])
        shared = _core.shared_length(of_tokens, last, call)
        opening = prompt_len[last]
        is_longer = 0 < opening <= shared and opening < prompt_len[call]
        return bool(shared == path_len[last] or is_longer)

    def is_answered(call: int, dispatch: int, start: int) -> bool:
        return any(
            _core.shared_length(of_messages, first, call) >= n_tokens
            for first, n_tokens in shown.get((start, dispatch), ())
            if first <= call
        )

    for session in sessions_of(calls):
        ranked: list[int] = []
        main: list[int] = []
        sub: list[int] = []

        def freeze(chain: list[int], kind: str, ranked: list[int] = ranked) -> None:
            for call in chain:
                orders[call], segments[call] = len(ranked), _SEGMENTS[kind]
                ranked.append(call)
            chain.clear()

        dispatch = None  # the tool call that started the active sub-agent
        for call in session:
            if listed[call] and n_messages[call] == 0:
                reasons[call] = REASONS["unrouted"]
                continue
            if dispatch is not None and is_answered(call, dispatch, session.start):
                freeze(sub, "subagent")
                dispatch = None
            is_main = dispatch is None or (main and continues(main[-1], call))
            chain = main if is_main else sub
            if chain and continues(chain[-1], call):
                by = "messages" if listed[call] and listed[chain[-1]] else "tokens"
                parents[call], reasons[call] = chain[-1], REASONS[by]
            elif chain:
                freeze(chain, "history_replaced")
                reasons[call] = REASONS["history_replaced"]
            chain.append(call)
            if is_main and dispatches[call] >= 0:
                dispatch = dispatches[call]
        freeze(sub, "subagent")
        freeze(main, "final")
    links["parent"], links["order"] = parents, orders
    links["link_reason"], links["segment"] = reasons, segments
    return links


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
    numbers: dict[object, int] = {}
    of_class = np.full(len(classes.bodies) + 1, -1, np.int32)  # [-1]: no reply
    if tools:
        replies = np.unique(classes.replies[classes.replies >= 0])
        bodies = classes.bodies.take(replies)
        # Only replies that may call one of the tools are parsed.
        names = "|".join(re.escape(_quoted(tool)) for tool in tools)
        calling = pc.match_substring_regex(bodies, rf'"name":\s*(?:{names})')
        shown = bodies.filter(calling).to_pylist()
        for k, body in zip(replies[np.asarray(calling)], shown, strict=True):
            called = _tool_calls(parse_json(body))
            ids = [call for name, call in called if name in tools]
            if ids:
                of_class[k] = numbers.setdefault(ids[-1], len(numbers))
    answers: dict[int, list[int]] = {}
    quoted = {_quoted(call) for call in numbers if isinstance(call, str)}
    for k, body in enumerate(classes.bodies.to_pylist() if quoted else ()):
        if not quoted.isdisjoint(_ANSWERS.findall(body)):
            answered = _answered(parse_json(body))
            if known := [numbers[call] for call in answered if call in numbers]:
                answers[k] = known
    return of_class[classes.replies].tolist(), answers


def _quoted(text: str) -> str:
    """A string as message bodies contain it."""
    return message_body({"": text})[len('{"":') : -1]


def _tool_calls(message: object) -> list[tuple[object, object]]:
    """Name and id of a message's tool calls: ``tool_calls``, or blocks ``tool_use``."""
    found = []
    for call in _objects(message, "tool_calls"):
        function = call.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        found.append((name, call.get("id")))
    for block in _objects(message, "content"):
        if block.get("type") == "tool_use":
            found.append((block.get("name"), block.get("id")))
    return [(name, call if isinstance(call, str) else None) for name, call in found]


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
