"""Label the turns that open a branch: the ``branches`` table."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit._arguments import chosen_int
from trajkit.analysis.drift import codes, turn_lines
from trajkit.rows.links import read_linked
from trajkit.schema import BRANCHES, LABELS, LINK_REASONS
from trajkit.tables.canonical import TableLike
from trajkit.tables.ragged import Ints, Records
from trajkit.tables.stages import Source, apply, stage
from trajkit.turns.attribution import SessionCalls
from trajkit.turns.records import as_turns
from trajkit.turns.sessions import Forest, Sessions

_REWRITE = LINK_REASONS.index("rewrite")

OPENING_TOKENS = 32
"""Leading prompt tokens that identify an agent without an ``agent_id`` or messages."""


@stage
def label_branches(
    turns: TableLike, links: Source, *, opening_tokens: int = OPENING_TOKENS
) -> pa.Table:
    """Label the turns that open a branch, with the evidence for each label.

    A turn's *state* is its request followed by its reply; a call that continues the
    turn repeats it. Requests are compared by messages if both turns have them, else by
    tokens. By tokens, a reply that comes back in other tokens looks like a rewrite. Two
    turns belong to one agent if they have the same ``agent_id``. Without an
    ``agent_id``, the first message decides, and without messages the first
    ``opening_tokens`` tokens.

    Every turn but the session's first gets the first label that applies, or none:

    sub_agent
        No earlier turn belongs to its agent. Compared with the previous turn.
    rewrite
        In ``links``, the request replaced another turn's reply.
    sibling, retry, rollback
        An earlier turn of its agent has the same prompt ids or the same messages. It is
        a rollback if that turn was already continued. Otherwise it is a sibling (best
        of n) if both ran at the same time (``started_at``, ``ended_at``) or if both are
        continued later, else a retry.
    rollback
        The request is the beginning of an earlier state. Or it departs from one at the
        end of a reply, and is shorter than that state's request.
    rewrite
        It departs from an earlier state, and it is at least as long as that state's
        request or has the same message after the first that differs.
    compaction
        It departs from an earlier state otherwise: the history became shorter.

    The earlier state is the agent's state with the longest common beginning, the latest
    on ties. A turn has no label if it repeats the complete state of its parent, a turn
    of its agent that was not continued yet.

    Parameters
    ----------
    turns : table
        As for `trajkit.classify_drift`. The columns ``agent_id`` (string),
        ``started_at`` and ``ended_at`` (timestamps) are optional.
    links : table
        As for `trajkit.classify_drift`.
    opening_tokens : int
        Prompt tokens that identify an agent without an ``agent_id`` and messages.

    Returns
    -------
    Table
        `trajkit.schema.BRANCHES`, one row per labelled turn, in the order of ``turns``.

    Raises
    ------
    SchemaError, InvalidTurnsError
        As `trajkit.linearize`.
    ArgumentError
        ``opening_tokens`` is no integer of 1 or more.

    References
    ----------
    A retry has identical prompt ids, a later sibling has not, as in miles'
    https://github.com/radixark/miles/tree/31f1ca9/miles/rollout/session/v2/picker_hub
    """
    opening_tokens = chosen_int("opening_tokens", opening_tokens, 1)

    def one(turns: pa.Table, links: pa.Table) -> pa.Table:
        return _branches(turns, links, opening_tokens)

    return apply(one, turns, table_of=as_turns, links=links)


label_branches_batches = label_branches.batches


def _branches(turns: pa.Table, links: pa.Table, opening_tokens: int) -> pa.Table:
    calls, forest, records = read_linked(turns, links)
    found = [
        branch
        for s in range(len(calls))
        for branch in _Session(calls, forest, records, s, opening_tokens).branches()
    ]
    columns = zip(*found, strict=True) if found else [()] * 6
    call, other, label, messages, tokens, evidence = columns
    others = np.array(other, np.int64)
    return turn_lines(
        BRANCHES,
        calls,
        call,
        codes([LABELS.index(one) for one in label], LABELS),
        calls.turn_index[others],
        messages,
        tokens,
        calls.path_len[others] - np.array(tokens, np.int64),
        evidence,
    )


_Label: TypeAlias = tuple[str, int, str]
"""A label, the other call, and the evidence."""


@dataclass(slots=True)
class _Agent:
    """The turns of one agent so far, with their states as a tree of message keys."""

    calls: set[int] = field(default_factory=set)
    last: int = -1
    # (node, key of the next message) -> node; node 0 is the empty state
    nodes: dict[tuple[int, bytes], int] = field(default_factory=dict)
    # per node: the latest call whose state contains it
    latest: list[int] = field(default_factory=lambda: [-1])
    # nodes at the end of a reply
    replies: set[int] = field(default_factory=set)

    def walk(self, keys: list[bytes]) -> list[int]:
        """The nodes, from the root, that these messages share with known states."""
        path = [0]
        for key in keys:
            node = self.nodes.get((path[-1], key))
            if node is None:
                break
            path.append(node)
        return path

    def add(self, call: int, state: list[bytes] | None, *, replied: bool) -> None:
        """Add a call and its state; None: unknown."""
        self.calls.add(call)
        self.last = call
        if state is None:
            return
        node = 0
        self.latest[0] = call
        for key in state:
            node = self.nodes.setdefault((node, key), len(self.latest))
            if node == len(self.latest):
                self.latest.append(call)
            self.latest[node] = call
        if replied:
            self.replies.add(node)


class _Session:
    """The branches of one session. Call numbers are indices into the table."""

    def __init__(
        self, calls: Sessions, forest: Forest, links: Records, s: int, opening: int
    ) -> None:
        lo, hi = calls.offsets[s : s + 2].tolist()
        self._calls, self._range, self._opening = calls, range(lo, hi), opening
        self._n_prompt: list[int] = calls.calls["prompt_len"].tolist()
        self._shared_with = forest.shared_with
        self._parents: Ints = links["parent"]
        by: list[int] = links["rewritten_by"][lo:hi].tolist()
        # by call that replaces a reply: the call whose reply it was
        self._rewritten = {
            other: call
            for call, other in zip(self._range, by, strict=True)
            if other >= 0 and links["link_reason"][other] == _REWRITE
        }
        self._children: dict[int, list[int]] = defaultdict(list)
        for call in self._range:
            self._children[int(self._parents[call])].append(call)
        session = SessionCalls(calls.part(s, s + 1))
        columns = [session.table["response"].to_pylist()]
        for name in ("agent_id", "started_at", "ended_at"):
            there = name in session.table.column_names
            columns.append(
                session.table[name].to_pylist() if there else [None] * (hi - lo)
            )
        # by call: the key of its reply, if it is known, and columns
        self._facts = dict(zip(self._range, zip(*columns, strict=True), strict=True))
        # by call: keys of its messages, and of these and its reply; None: unknown
        self._requests: dict[int, list[bytes] | None] = {}
        self._states: dict[int, list[bytes] | None] = {}
        for call in self._range:
            messages = session.messages(call - lo)
            self._requests[call] = self._states[call] = None
            if messages is not None:
                request = [messages.key(i) for i in range(len(messages))]
                reply = self._facts[call][0]
                self._requests[call] = request
                self._states[call] = [*request, *([reply["key"]] if reply else [])]
        self._heads: list[Ints] = []

    def branches(self) -> Iterator[tuple[Any, ...]]:
        """The labelled turns: call, other, label, shared messages and tokens, evidence."""
        agents: dict[tuple[str, object], _Agent] = defaultdict(_Agent)
        asked: dict[tuple[object, str, bytes], int] = {}
        for call in self._range:
            name = self._agent(call)
            request = self._requests[call]
            prompt = self._calls.prompt(call)
            questions = [(name, "prompt_ids", blake2b(prompt.tobytes()).digest())]
            if request is not None:
                questions.append((name, "messages", b"".join(request)))
            same = next((q for q in questions if q in asked), None)
            if call > self._range.start:
                if same and call not in self._rewritten:
                    label: _Label | None = self._asked_again(call, asked[same], same[1])
                else:
                    label = self._label(call, name, agents[name])
                if label is not None:
                    yield self._branch(call, *label)
            asked |= dict.fromkeys(questions, call)
            replied = self._facts[call][0] is not None
            agents[name].add(call, self._states[call], replied=replied)

    def _agent(self, call: int) -> tuple[str, object]:
        agent_id, request = self._facts[call][1], self._requests[call]
        if agent_id is not None:
            return "agent_id", agent_id
        if request:
            return "first message", request[0]
        head = self._calls.prompt(call)[: self._opening]
        for number, known in enumerate(self._heads):
            if _core.lcp(head, known) == min(len(head), len(known)):
                return "opening", number
        self._heads.append(head)
        return "opening", len(self._heads) - 1

    def _label(
        self, call: int, name: tuple[str, object], agent: _Agent
    ) -> _Label | None:
        """The label of a turn with a new request."""
        kind, agent_id = name
        if not agent.calls:
            which = f" {agent_id!r}" if kind == "agent_id" else ""
            return "sub_agent", call - 1, f"no earlier turn has its {kind}{which}"
        if call in self._rewritten:
            other = self._rewritten[call]
            why = f"links: it replaces the reply of {self._turn(other)}"
            return "rewrite", other, why
        parent = int(self._parents[call])
        continues = parent in agent.calls and self._children[parent][0] == call
        if continues and self._shows_state(call, parent):
            return None
        request = self._requests[call]
        if request is not None and agent.latest[0] >= 0:
            return self._by_messages(agent, request)
        return self._by_tokens(call, agent)

    def _asked_again(self, call: int, other: int, by: str) -> _Label:
        same = f"the same {by} as {self._turn(other)}"
        children, continued = self._children.get(other, []), call in self._children
        if children and children[0] < call:
            next_turn = self._turn(children[0])
            return "rollback", other, f"{same}, which {next_turn} had continued"
        started, ended = self._facts[call][2], self._facts[other][3]
        if started is not None and ended is not None and started < ended:
            return "sibling", other, f"{same}, which was still running"
        if children and continued:
            return "sibling", other, f"{same}, and both are continued"
        which = "only this turn is" if continued else "neither is"
        which = f"only {self._turn(other)} is" if children else which
        return "retry", other, f"{same}; {which} continued"

    def _by_messages(self, agent: _Agent, request: list[bytes]) -> _Label | None:
        path = agent.walk(request)
        k, node = len(path) - 1, path[-1]
        other = agent.latest[node]
        before, state = self._requests[other], self._states[other]
        assert before is not None
        assert state is not None
        turn = self._turn(other)
        if k == len(request):
            return "rollback", other, f"its {k} messages are the first ones of {turn}"
        if k == len(state):
            return None
        sizes = f"{len(request)} messages, {turn} has {len(before)}"
        agrees_again = request[k + 1 : k + 2] == state[k + 1 : k + 2] != []
        if agrees_again or len(request) >= len(before):
            return "rewrite", other, f"message {k} differs; {sizes}"
        if node in agent.replies:
            return "rollback", other, f"departs after message {k - 1}; {sizes}"
        return "compaction", other, f"departs at message {k}; {sizes}"

    def _by_tokens(self, call: int, agent: _Agent) -> _Label | None:
        parent = int(self._parents[call])
        around = {agent.last, int(self._shared_with[call]), parent}
        around |= {*self._children[parent]} if parent >= 0 else set()
        prompt, paths = self._calls.prompt(call), self._calls.path_len
        shared = {
            c: _core.lcp(self._calls.path(c), prompt) for c in agent.calls & around
        }
        other = max(shared, key=lambda c: (shared[c], c))
        k, turn = shared[other], self._turn(other)
        if k == paths[other]:
            return None
        if k == len(prompt):
            return "rollback", other, f"its {k} tokens are the first ones of {turn}"
        n_before = self._n_prompt[other]
        sizes = f"a prompt of {len(prompt)} tokens, {turn} has {n_before}"
        if len(prompt) >= n_before:
            return "rewrite", other, f"token {k} differs; {sizes}"
        if any(paths[c] == k == n for c, n in shared.items()):
            return "rollback", other, f"departs after token {k - 1}; {sizes}"
        return "compaction", other, f"departs at token {k}; {sizes}"

    def _shows_state(self, call: int, parent: int) -> bool:
        """Whether the request begins with the complete state of the parent."""
        request, state = self._requests[call], self._states[parent]
        if request is None or state is None:
            return self._shared(call, parent) == int(self._calls.path_len[parent])
        return request[: len(state)] == state

    def _shared(self, call: int, other: int) -> int:
        return _core.lcp(self._calls.path(other), self._calls.prompt(call))

    def _branch(self, call: int, label: str, other: int, why: str) -> tuple[Any, ...]:
        request, state = self._requests[call], self._states[other]
        messages = None
        if request is not None and state is not None:
            pairs = enumerate(zip(request, state, strict=False))
            n = min(len(request), len(state))
            messages = next((i for i, (a, b) in pairs if a != b), n)
        return call, other, label, messages, self._shared(call, other), why

    def _turn(self, call: int) -> str:
        return f"turn {self._calls.turn_index[call]}"
