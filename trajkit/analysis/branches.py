"""Label the turns that open a branch: the ``branches`` table."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit._arguments import chosen_int
from trajkit.analysis.turn_lines import codes, turn_lines
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
    found: list[Branch] = []
    for s in range(len(calls)):
        session = _Session(calls, forest, records, s, opening_tokens)
        found += session.branches()
    other = np.array([one.other for one in found], np.int64)
    return turn_lines(
        BRANCHES,
        calls,
        [one.call for one in found],
        codes([LABELS.index(one.label) for one in found], LABELS),
        calls.turn_index[other],
        [one.shared_messages for one in found],
        [one.shared_tokens for one in found],
        [calls.path_len[one.other] - one.shared_tokens for one in found],
        [one.evidence for one in found],
    )


@dataclass(frozen=True, slots=True)
class Branch:
    """One labelled turn."""

    call: int
    other: int
    label: str
    shared_messages: int | None
    shared_tokens: int
    evidence: str


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

    def add(self, call: int, state: list[bytes], *, replied: bool) -> None:
        node = 0
        self.latest[0] = call
        for key in state:
            child = self.nodes.setdefault((node, key), len(self.latest))
            if child == len(self.latest):
                self.latest.append(call)
            self.latest[child] = call
            node = child
        if replied:
            self.replies.add(node)


class _Session:
    """The branches of one session. Call numbers are indices into the table."""

    def __init__(
        self, calls: Sessions, forest: Forest, links: Records, s: int, opening: int
    ) -> None:
        lo, hi = calls.offsets[s : s + 2].tolist()
        self._calls = calls
        self._range = range(lo, hi)
        self._shared_with = forest.shared_with
        self._parents: Ints = links["parent"]
        self._is_rewrite: npt.NDArray[np.bool_] = links["link_reason"] == _REWRITE
        self._rewritten = {
            int(links["rewritten_by"][call]): call
            for call in self._range
            if links["rewritten_by"][call] >= 0
        }
        self._children: dict[int, list[int]] = {}
        for call in self._range:
            self._children.setdefault(int(self._parents[call]), []).append(call)
        session = SessionCalls(calls.part(s, s + 1))
        requests, replies = _keys(session)
        # by call: keys of its messages; None: unknown
        self._requests = dict(zip(self._range, requests, strict=True))
        self._replies = dict(zip(self._range, replies, strict=True))
        # by call: its request and reply; None: the request is unknown
        self._states = {
            call: None if request is None else [*request, *([reply] if reply else [])]
            for call, request, reply in zip(self._range, requests, replies, strict=True)
        }
        self._ids, self._started, self._ended = (
            dict(zip(self._range, _column(session, name), strict=True))
            for name in ("agent_id", "started_at", "ended_at")
        )
        self._opening = opening
        self._heads: list[Ints] = []

    def branches(self) -> Iterator[Branch]:
        """The labelled turns, in order."""
        agents: dict[tuple[str, object], _Agent] = {}
        asked: dict[tuple[object, str, bytes], int] = {}
        for call in self._range:
            name = self._agent(call)
            agent = agents.setdefault(name, _Agent())
            request = self._requests[call]
            prompt = self._calls.prompt(call)
            questions = [(name, "prompt_ids", blake2b(prompt.tobytes()).digest())]
            if request is not None:
                questions.append((name, "messages", b"".join(request)))
            same = next((q for q in questions if q in asked), None)
            if call > self._range.start:
                label = self._label(call, agent, request)
                if same and not self._replaces_a_reply(call):
                    label = self._asked_again(call, asked[same], same[1])
                if label is not None:
                    yield self._branch(call, *label)
            asked |= dict.fromkeys(questions, call)
            agent.calls.add(call)
            agent.last = call
            state = self._states[call]
            if state is not None:
                replied = self._replies[call] is not None
                agent.add(call, state, replied=replied)

    def _agent(self, call: int) -> tuple[str, object]:
        agent_id, request = self._ids[call], self._requests[call]
        if agent_id is not None:
            return ("agent_id", agent_id)
        if request:
            return ("first message", request[0])
        head = self._calls.prompt(call)[: self._opening]
        for number, known in enumerate(self._heads):
            if _core.lcp(head, known) == min(len(head), len(known)):
                return ("opening", number)
        self._heads.append(head)
        return ("opening", len(self._heads) - 1)

    def _replaces_a_reply(self, call: int) -> bool:
        return bool(self._is_rewrite[call]) and call in self._rewritten

    def _label(
        self, call: int, agent: _Agent, request: list[bytes] | None
    ) -> tuple[str, int, str] | None:
        """Label, other call and evidence of a turn with a new request."""
        if not agent.calls:
            kind, name = self._agent(call)
            which = f" {name!r}" if kind == "agent_id" else ""
            return "sub_agent", call - 1, f"no earlier turn has its {kind}{which}"
        if self._replaces_a_reply(call):
            other = self._rewritten[call]
            why = f"links: it replaces the reply of {self._turn(other)}"
            return "rewrite", other, why
        parent = int(self._parents[call])
        shown = parent in agent.calls and self._shows_state(call, parent)
        if shown and self._children[parent][0] == call:
            return None
        if request is not None and agent.latest[0] >= 0:
            return self._by_messages(agent, request)
        return self._by_tokens(call, agent)

    def _asked_again(self, call: int, other: int, by: str) -> tuple[str, int, str]:
        same = f"the same {by} as {self._turn(other)}"
        children = self._children.get(other, [])
        if children and children[0] < call:
            next_turn = self._turn(children[0])
            return "rollback", other, f"{same}, which {next_turn} had continued"
        started, ended = self._started[call], self._ended[other]
        if started is not None and ended is not None and started < ended:  # type: ignore[operator]
            return "sibling", other, f"{same}, which was still running"
        if children and call in self._children:
            return "sibling", other, f"{same}, and both are continued"
        if children:
            continued = f"only {self._turn(other)} is"
        else:
            continued = "only this turn is" if call in self._children else "neither is"
        return "retry", other, f"{same}; {continued} continued"

    def _by_messages(
        self, agent: _Agent, request: list[bytes]
    ) -> tuple[str, int, str] | None:
        path = agent.walk(request)
        k, node = len(path) - 1, path[-1]
        other = agent.latest[node]
        before = self._requests[other]
        state = self._states[other]
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

    def _by_tokens(self, call: int, agent: _Agent) -> tuple[str, int, str] | None:
        parent = int(self._parents[call])
        around = {agent.last, int(self._shared_with[call]), parent}
        around |= set(self._children.get(parent, [])) if parent >= 0 else set()
        known = agent.calls & around
        prompt = self._calls.prompt(call)
        shared = {c: _core.lcp(self._calls.path(c), prompt) for c in known}
        other = max(known, key=lambda c: (shared[c], c))
        k, turn = shared[other], self._turn(other)
        if k == self._calls.path_len[other]:
            return None
        if k == len(prompt):
            return "rollback", other, f"its {k} tokens are the first ones of {turn}"
        n_before = int(self._calls.calls["prompt_len"][other])
        sizes = f"a prompt of {len(prompt)} tokens, {turn} has {n_before}"
        if len(prompt) >= n_before:
            return "rewrite", other, f"token {k} differs; {sizes}"
        if any(self._calls.path_len[c] == k == shared[c] for c in known):
            return "rollback", other, f"departs after token {k - 1}; {sizes}"
        return "compaction", other, f"departs at token {k}; {sizes}"

    def _shows_state(self, call: int, parent: int) -> bool:
        """Whether the request begins with the complete state of the parent."""
        request = self._requests[call]
        state = self._states[parent]
        if request is None or state is None:
            path = self._calls.path(parent)
            return _core.lcp(path, self._calls.prompt(call)) == len(path)
        return request[: len(state)] == state

    def _branch(self, call: int, label: str, other: int, evidence: str) -> Branch:
        request = self._requests[call]
        state = self._states[other]
        shared = None
        if request is not None and state is not None:
            pairs = enumerate(zip(request, state, strict=False))
            n = min(len(request), len(state))
            shared = next((i for i, (a, b) in pairs if a != b), n)
        tokens = _core.lcp(self._calls.path(other), self._calls.prompt(call))
        return Branch(call, other, label, shared, tokens, evidence)

    def _turn(self, call: int) -> str:
        return f"turn {self._calls.turn_index[call]}"


def _keys(
    session: SessionCalls,
) -> tuple[list[list[bytes] | None], list[bytes | None]]:
    """The keys of each call's messages (None: unknown), and of its reply."""
    requests = [
        None if messages is None else [messages.key(i) for i in range(len(messages))]
        for messages in map(session.messages, range(len(session)))
    ]
    replies = session.table.column("response").to_pylist()
    return requests, [reply["key"] if reply else None for reply in replies]


def _column(session: SessionCalls, name: str) -> list[object]:
    if name not in session.table.column_names:
        return [None] * len(session)
    values: list[object] = session.table.column(name).to_pylist()
    return values
