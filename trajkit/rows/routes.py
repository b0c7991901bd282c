"""Which call each call continues: a function per rule, by the value of ``parent_by``.

Each takes the calls, the forest of their token paths and the policy, and returns a record
of dtype LINK for every call.

Requests are paths of messages, as prompts are paths of tokens
(`trajkit.turns.messages.grow_messages`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit._kernel_names import LINK, STOPS, numbers
from trajkit.errors import InvalidTurnsError, SchemaError
from trajkit.policies import TIE_BREAKS, ParentBy, Policy
from trajkit.schema import LINK_REASONS, SEGMENT_KINDS
from trajkit.tables.canonical import in_type
from trajkit.tables.ragged import Bools, Ints, Longs, Records
from trajkit.turns.messages import (
    KEY_TOKENS,
    Classes,
    classify,
    grow_messages,
    has_reply,
    objects_in,
    parse_json,
    tool_calls_of,
    with_equality,
)
from trajkit.turns.sessions import Forest, Sessions

Route: TypeAlias = Callable[[Sessions, Forest, Policy], Records]

REASONS = numbers("REASON_", LINK_REASONS)
"""The number of each link reason in a record."""


def empty_links(calls: Sessions) -> Records:
    """A link of every call: a root, in no order."""
    links = np.zeros(len(calls.calls), LINK)
    for name in ("parent", "order", "rewritten_by"):
        links[name] = -1
    links["link_reason"] = REASONS["root"]
    return links


def first_of_session(calls: Sessions) -> Longs:
    return calls.offsets[calls.session]


def sessions_of(calls: Sessions) -> Iterator[range]:
    return (range(start, stop) for start, stop in pairwise(calls.offsets.tolist()))


def optional_column(calls: Sessions, name: str, type_: pa.DataType) -> list[object]:
    """The values of an optional column; empty where there is none."""
    if name not in calls.table.column_names:
        return []
    column = calls.table.column(name)
    try:
        values: list[object] = in_type(column, type_).to_pylist()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        found = f"column {name!r} is {column.type}: expected {type_}"
        raise SchemaError(found) from error
    return values


def by_messages(calls: Sessions, forest: Forest, policy: Policy) -> Records:
    """Each call continues the nearest reply above its messages, as slime routes them.

    Tokens choose among equal replies (``tie_break``), and where a call has no messages.
    """
    links, tools = empty_links(calls), None
    if policy.compare_tools:
        keys = optional_column(calls, "tools_key", pa.string())
        known = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        tools = np.array([known[key] for key in keys], np.int32) if keys else None
    # holds the keys of its requests
    keyed = with_equality(calls, policy.message_equality)
    tie_break, threshold = TIE_BREAKS[policy.tie_break], policy.merge_threshold
    _core.route_messages(
        forest.paths, keyed.requests, tools, threshold, tie_break, links
    )
    return links


def by_tokens(calls: Sessions, forest: Forest, policy: Policy) -> Records:
    """Each call continues the chain whose end is the longest prefix of its prompt.

    A chain ends with its last call's path or, by prompts, with that call's prompt: then
    outputs are not compared.
    """
    links, of_prompts = empty_links(calls), policy.parent_by == "prompts"
    first = _core.route_chains(forest.paths, of_prompts, links)
    reason = REASONS["prompts" if of_prompts else "tokens"]
    links["link_reason"][links["parent"] >= 0] = reason
    # chain by chain, in order of their first calls, and session by session
    links["order"][np.argsort(first, kind="stable")] = np.arange(len(links))
    links["order"] -= first_of_session(calls)
    return links


def by_previous(calls: Sessions, forest: Forest, policy: Policy) -> Records:
    links, index = empty_links(calls), np.arange(calls.n_calls)
    links["order"] = index - first_of_session(calls)
    later = links["order"] > 0
    links["parent"][later] = index[later] - 1
    links["link_reason"][later] = REASONS["previous"]
    return links


def by_none(calls: Sessions, forest: Forest, policy: Policy) -> Records:
    """Every call is a root, in the order of turns or from the shortest prompt up."""
    links, index = empty_links(calls), np.arange(calls.n_calls)
    ranked = calls.by_prompt() if policy.row_order == "prompt" else index
    links["order"][ranked] = index - first_of_session(calls)
    return links


# Where requests and prompts lie in forests.


def prompt_nodes(forest: Forest, prompt_len: Longs) -> Ints:
    """The node in which each call's prompt ends; equal prompts end in the same one."""
    nodes, at = forest.nodes, forest.ends.copy()
    beyond = np.flatnonzero(nodes["start"][at] >= prompt_len)
    while len(beyond):
        at[beyond] = nodes["parent"][at[beyond]]
        beyond = beyond[nodes["start"][at[beyond]] >= prompt_len[beyond]]
    return at


def nodes_within_prompts(forest: Forest, prompt_len: Longs) -> Ints:
    """The last node of each call's path that ends inside its prompt or with it."""
    at = prompt_nodes(forest, prompt_len)
    whole = forest.nodes["stop"][at] <= prompt_len
    return np.where(whole, at, forest.nodes["parent"][at])


# The policy ``nemo``: the call, recorded before or after, whose path is the longest prefix
# of a prompt. If several calls have that path, the parent is ambiguous. In a session that
# has recorded parents, these are the parents instead. If several calls have one prompt and
# one parent (retries), only what continues them decides between them. Rejected and
# ambiguous calls are quarantined, and with them every chain that contains one.

RESOLUTIONS = ("root", "resolved", "unresolved")
"""What a source can have recorded of a turn's parent."""
_SOUND = {"root", "tokens", "recorded", "no_parent"}
"""The reasons of calls that are not quarantined themselves."""


def by_prefix(calls: Sessions, forest: Forest, policy: Policy) -> Records:
    """Each call continues its recorded parent, or the longest path that begins its prompt.

    Calls without output can neither be continued nor trained. Those in a chain are in order
    of prompt length, equals by ``request_id``; the chain of a scored turn is the first.
    """
    links, ranked = empty_links(calls), calls.by_prompt()
    n_prompt, empty = calls.calls["prompt_len"], calls.calls["out_len"] == 0
    found, ambiguous = _longest_prefixes(forest, n_prompt, ranked[~empty[ranked]])
    reasons = np.select(
        [empty, ambiguous, found >= 0], ["empty", "ambiguous", "tokens"], "root"
    )
    # calls with one prompt have one node and one length
    nodes = prompt_nodes(forest, n_prompt).tolist()
    prompts = [*zip(nodes, n_prompt.tolist(), strict=True)]
    orders = links["order"].tolist()
    made = _Prefixes(calls, forest, prompts, found.tolist(), reasons.tolist(), orders)
    scored, recorded = scored_turns(calls), _recorded_parents(calls)
    for session in sessions_of(calls):
        within = ranked[session.start : session.stop]
        in_order = within[~empty[within]].tolist()
        if recorded:
            made.follow_recorded(session, in_order, recorded)
        main = scored.get(session.start)
        made.rank(in_order, made.rejected(in_order, main), main)
    links["parent"], links["order"] = made.parents, made.orders
    links["link_reason"] = [REASONS[reason] for reason in made.reasons]
    return links


def _longest_prefixes(
    forest: Forest, n_prompt: Longs, ranked: Ints
) -> tuple[Ints, Bools]:
    """The first of ``ranked`` whose path is the longest prefix of each prompt, or -1, and
    if it is one of several.
    """
    n_nodes = len(forest.nodes)
    first = np.full(n_nodes, -1, np.int32)
    first[forest.ends[ranked[::-1]]] = ranked[::-1]  # the last that is written counts
    several = np.bincount(forest.ends[ranked], minlength=n_nodes) > 1
    # The nearest node at or above each where a path ends; a root without one is its own.
    above = np.where(first >= 0, np.arange(n_nodes), forest.nodes["parent"])
    above = np.where(above < 0, np.arange(n_nodes), above)
    while not np.array_equal(above, higher := above[above]):
        above = higher
    parents = np.full(len(n_prompt), -1, np.int32)
    ambiguous = np.zeros(len(n_prompt), bool)
    node = above[nodes_within_prompts(forest, n_prompt)[ranked]]
    parents[ranked], ambiguous[ranked] = first[node], several[node]
    return parents, ambiguous


def _path_to(call: int | None, parents: list[int]) -> list[int]:
    chain = []
    while call is not None and call >= 0:
        chain.append(call)
        call = parents[call]
    return chain


@dataclass(frozen=True, slots=True)
class _Prefixes:
    """Of each call: the node and length of its prompt, parent, reason and order.

    ``ranked`` are the calls of a session with an output, the shortest prompt first.
    """

    calls: Sessions
    forest: Forest
    prompts: list[tuple[int, int]]
    parents: list[int]
    reasons: list[str]
    orders: list[int]

    def rejected(self, ranked: list[int], scored: int | None) -> set[int]:
        """Those that are ambiguous or a rejected retry; completes reasons."""
        parents, reasons = self.parents, self.reasons
        main = set(_path_to(scored, parents))
        ambiguous = {call for call in ranked if reasons[call] == "ambiguous"}
        extended = {parents[call] for call in ranked if call not in ambiguous}
        families: dict[tuple[int, tuple[int, int]], list[int]] = {}
        for call in ranked:
            families.setdefault((parents[call], self.prompts[call]), []).append(call)
        rejected = set(ambiguous)
        for family in families.values():
            if len(family) == 1:
                continue
            kept = extended if main.isdisjoint(family) else main
            resolved = not kept.isdisjoint(family)
            if scored is not None and not resolved:
                kept, resolved = {family[0]}, True
            for call in family:
                if call in ambiguous:
                    reasons[call] = "ambiguous" if resolved else "unresolved_ambiguous"
                elif call in kept:
                    continue
                elif not resolved and call == family[0]:
                    reasons[call] = "unresolved_kept"
                else:
                    reasons[call] = "superseded" if resolved else "unresolved"
                    rejected.add(call)
        return rejected

    def rank(self, ranked: list[int], rejected: set[int], scored: int | None) -> None:
        """Rank those that are in a chain, and complete the others' reasons.

        Nothing continues the call ``scored``, and its chain is the first.
        """
        parents = self.parents
        sound: set[int] = set()  # no call from the root to these is rejected
        for call in ranked:
            parent = parents[call]
            follows = parent < 0 or (parent in sound and parent != scored)
            if call not in rejected and follows:
                sound.add(call)
        # A chain runs from a root to a call without children, or to the scored one.
        continued = {parents[call] for call in ranked} - {scored}
        chained: set[int] = set()
        for call in reversed(ranked):
            if call in sound and (call not in continued or call in chained):
                chained.update((call, parents[call]))
        main = _path_to(scored, parents) if scored in chained else []
        in_order = sorted(ranked, key=lambda call: call not in main)
        for rank, call in enumerate(call for call in in_order if call in chained):
            self.orders[call] = rank
        for call in ranked:
            if call not in chained and self.reasons[call] in _SOUND:
                self.reasons[call] = "chain_quarantined"

    def follow_recorded(
        self, session: range, ranked: list[int], recorded: list[list[object]]
    ) -> None:
        """Replace parents and reasons, if the session has recorded parents.

        Raises InvalidTurnsError for what contradicts itself.
        """
        resolutions, parent_names, names = recorded
        if all(resolutions[k] is None and parent_names[k] is None for k in session):
            return
        place, numbers = self.calls.place, self.calls.turn_index
        named: dict[object, int] = {}
        for call in session:
            name = names[call]
            if name is not None and named.setdefault(name, call) != call:
                raise InvalidTurnsError(
                    f"{place(call)}: request_id {name!r} is that of turn "
                    f"{numbers[named[name]]}, too: a session with recorded parents has "
                    "each once"
                )
        before: set[int] = set()
        for call in ranked:
            resolution, name = resolutions[call], parent_names[call]
            rule = None
            if resolution is not None and resolution not in RESOLUTIONS:
                rule = f"expected one of {', '.join(RESOLUTIONS)}"
            elif resolution == "resolved" and name is None:
                rule = "parent_request is null: expected the request_id of the parent"
            elif resolution in ("root", "unresolved") and name is not None:
                rule = f"parent_request is {name!r}: expected null"
            if rule is not None:
                raise InvalidTurnsError(
                    f"{place(call)}: parent_resolution is {resolution!r}, {rule}"
                )
            parent, reason = named.get(name, -1), "no_parent"
            if resolution == "root":
                reason = "root"
            elif parent in before:
                shared = _core.shared_length(self.forest.paths, parent, call)
                if shared == self.calls.path_len[parent]:
                    reason = "recorded"
            elif name is not None and self.reasons[call] == "tokens":
                # the recorded one is missing, and only one path begins the prompt
                parent, reason = self.parents[call], "tokens"
            self.parents[call] = parent if reason in ("recorded", "tokens") else -1
            self.reasons[call] = reason
            before.add(call)


def scored_turns(calls: Sessions) -> dict[int, int]:
    """The call whose reply was scored, by the first call of its session."""
    scored: dict[int, int] = {}
    for call, value in enumerate(optional_column(calls, "scored", pa.bool_())):
        first = int(calls.offsets[calls.session[call]])
        if value and scored.setdefault(first, call) != call:
            raise InvalidTurnsError(
                f"{calls.place(call)}: scored is true, as of turn "
                f"{calls.turn_index[scored[first]]}: expected one turn of a session"
            )
    return scored


def created_ranks(calls: Sessions, links: Records) -> Ints:
    """The rank of each call by its creation; the root of a scored turn's chain is first."""
    ranks = calls.by_creation()
    for call in scored_turns(calls).values():
        if links["order"][call] >= 0:
            ranks[_path_to(call, links["parent"].tolist())[-1]] = -1
    return ranks


def _recorded_parents(calls: Sessions) -> list[list[object]]:
    """The recorded resolutions, names of parents and own names; empty if nothing is."""
    names = ("parent_resolution", "parent_request", "request_id")
    columns = [optional_column(calls, name, pa.string()) for name in names[:2]]
    if not any(columns):
        return []
    columns.append(optional_column(calls, names[2], pa.string()))
    return [values or [None] * calls.n_calls for values in columns]


# The policy ``miles``: a forest of generations, by messages, checked by tokens.


def by_generations(calls: Sessions, forest: Forest, policy: Policy) -> Records:
    """Each call continues the deepest generation whose messages its request begins with.

    Of equals it is the latest; without messages, tokens decide (`_core.TokenIndex`). The
    call is refused, and no generation, if that one was stopped for its length, or if
    ``fork_threshold`` or more tokens of its path are not in the prompt. A leaf with a later
    sibling is a retry, and in no chain.
    """
    links, requests = empty_links(calls), calls.requests
    prompt_len, path_len = calls.calls["prompt_len"].tolist(), calls.path_len.tolist()
    stopped = (calls.calls["stop"] == STOPS["length"]).tolist()
    messages = grow_messages(with_equality(calls, policy.message_equality))
    is_listed = requests["n_keys"] >= 0
    n_messages = np.where(
        is_listed, requests["shared"].astype(np.int64) + requests["n_keys"], 0
    )
    listed, unrouted = is_listed.tolist(), (is_listed & (n_messages == 0)).tolist()
    # the nodes where the messages of each call, and then its reply, end
    last_nodes = nodes_within_prompts(messages, KEY_TOKENS * n_messages).tolist()
    replied = has_reply(requests)
    ends = np.where(replied, messages.ends, -1).tolist()
    above = messages.nodes["parent"].tolist()
    # per node: calls whose messages and reply end there, less the refused ones
    n_open = np.bincount(messages.ends[replied], minlength=len(above)).tolist()
    latest: dict[int, int] = {}
    index = _core.TokenIndex(forest.paths)

    def open_node(node: int) -> int:
        """The nearest node at or above where a generation ends or may yet end, or -1."""
        while node >= 0 and not n_open[node]:
            if above[node] >= 0 and not n_open[above[node]]:
                above[node] = above[above[node]]
            node = above[node]
        return node

    def find(call: int) -> int:
        if not listed[call]:
            return index.find(call)
        node = open_node(last_nodes[call])
        while node >= 0 and node not in latest:
            node = open_node(above[node])
        return latest.get(node, -1)

    def refusal(parent: int, call: int) -> str | None:
        if stopped[parent]:
            return "refused_truncated"
        shared = _core.shared_length(forest.paths, parent, call)
        n_missing = path_len[parent] - shared
        in_prompt = shared < prompt_len[parent]
        if n_missing and (in_prompt or n_missing >= policy.fork_threshold):
            return "refused_tokens"
        return None

    parents, reasons = links["parent"].tolist(), links["link_reason"].tolist()
    orders = links["order"].tolist()
    depths = [0] * len(links)  # generations from the root on; 0: none

    def rank(session: range) -> None:
        """Rank the generations: the deepest chain first, then the latest."""
        last_child = {parents[call]: call for call in session if depths[call]}
        leaves = []
        for call in session:
            if depths[call] and call not in last_child:
                if parents[call] >= 0 and last_child[parents[call]] != call:
                    reasons[call] = REASONS["retried"]
                else:
                    leaves.append(call)
        n_ranked = 0
        for leaf in sorted(leaves, key=lambda one: (depths[one], one), reverse=True):
            chain, call = [], leaf
            while call >= 0 and orders[call] < 0:
                chain.append(call)
                call = parents[call]
            for call in reversed(chain):
                orders[call] = n_ranked
                n_ranked += 1

    for session in sessions_of(calls):
        for call in session:
            if unrouted[call]:
                reasons[call] = REASONS["unrouted"]
                continue
            parent = parents[call] = find(call)
            refused = refusal(parent, call) if parent >= 0 else None
            if parent >= 0:
                by = "messages" if listed[call] else "tokens"
                reasons[call] = REASONS[refused or by]
            end = ends[call]
            if refused is None:
                index.add(call)
                depths[call] = 1 + (depths[parent] if parent >= 0 else 0)
                if end >= 0:
                    latest[end] = call
            elif end >= 0:
                n_open[end] -= 1
        rank(session)
    links["parent"], links["order"], links["link_reason"] = parents, orders, reasons
    return links


# The policy ``segments``: one main chain, and at most one chain of a sub-agent. A call of
# the main agent to a tool that starts sub-agents begins a sub-agent; a message that answers
# that tool call ends it. A chain whose next call has other messages is frozen: its calls so
# far are a segment. Segments are ranked in the order of freezing.

# The number of each kind in a record; 0 is no segment.
_SEGMENTS = {kind: number for number, kind in enumerate(SEGMENT_KINDS, 1)}


def by_agents(calls: Sessions, forest: Forest, policy: Policy) -> Records:
    """Each call continues the last call of its agent, if it begins with that one's request.

    Without messages of both, its prompt begins with that call's path, or with that call's
    prompt and is longer. Between a tool call that starts a sub-agent and its answer, calls
    that do not continue the main agent belong to the sub-agent.
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

    A message is a call that was the first of its session to have the messages up to it, and
    the tokens of these in a path.
    """
    requests, index = calls.requests, np.arange(calls.n_calls)
    stored = np.maximum(requests["n_keys"], 0)
    sizes = np.maximum(requests["n_keys"] + requests["shared"], 0)
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
    and by class, the numbers of those that its messages answer. Nothing answers a tool call
    without an id (``pending_dispatch_id`` of slime's
    https://github.com/THUDM/slime/blob/b6764131d/examples/coding_agent_rl/middleware.py).
    """
    numbers: dict[object, int] = {}
    of_class = np.full(len(classes.bodies) + 1, -1, np.int32)  # [-1]: no reply
    answers: dict[int, list[int]] = {}
    if tools:
        # the keys that matter begin so
        bodies = enumerate(classes.bodies.to_pylist())
        messages = {k: parse_json(body) for k, body in bodies if '"tool' in body}
        for k in sorted(messages.keys() & {*classes.replies.tolist()}):
            ids = [call for name, call in tool_calls_of(messages[k]) if name in tools]
            if ids:
                of_class[k] = numbers.setdefault(ids[-1], len(numbers))
        for k, message in messages.items():
            if known := [
                numbers[call] for call in _answered(message) if call in numbers
            ]:
                answers[k] = known
    return of_class[classes.replies].tolist(), answers


def _answered(message: object) -> list[str]:
    ids = [message.get("tool_call_id")] if isinstance(message, dict) else []
    for block in objects_in(message, "content"):
        if block.get("type") == "tool_result":
            ids.append(block.get("tool_use_id"))
    return [call for call in ids if isinstance(call, str)]


ROUTES: Mapping[ParentBy, Route] = {
    "messages": by_messages,
    "agents": by_agents,
    "tokens": by_tokens,
    "previous": by_previous,
    "none": by_none,
    "prompts": by_tokens,
    "prefix": by_prefix,
    "generations": by_generations,
}
