"""Label the turns that open a branch: the ``branches`` table."""

from collections import defaultdict
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit.analysis.drift import codes, turn_lines
from trajkit.rows.links import read_linked
from trajkit.schema import BRANCHES, KEY_BYTES, LABELS, LINK_REASONS
from trajkit.tables.canonical import TableLike
from trajkit.tables.ragged import Ints, Records
from trajkit.tables.stages import Source, apply, stage
from trajkit.turns.attribution import SessionCalls
from trajkit.turns.records import as_turns
from trajkit.turns.sessions import Forest, Sessions

OPENING_TOKENS = 32
"""Leading prompt tokens that identify an agent without an ``agent_id`` or messages."""


@stage
def label_branches(turns: TableLike, links: Source) -> pa.Table:
    """Label the turns that open a branch, with the evidence for each label.

    docs/drift.md defines the labels.

    Parameters
    ----------
    turns, links : table
        As for `trajkit.classify_drift`, and so are the errors. The columns ``agent_id``
        (string), ``started_at`` and ``ended_at`` (timestamps) of turns are optional.

    Returns
    -------
    Table
        `trajkit.schema.BRANCHES`, one row per labelled turn, in the order of ``turns``.

    References
    ----------
    A retry has identical prompt ids, a later sibling has not, as in miles'
    https://github.com/radixark/miles/tree/31f1ca9/miles/rollout/session/v2/picker_hub
    """

    def one(turns: pa.Table, links: pa.Table) -> pa.Table:
        calls, forest, records = read_linked(turns, links)
        sessions = (_Session(calls, forest, records, s) for s in range(len(calls)))
        found = [branch for session in sessions for branch in session.branches()]
        call, label, other, why, messages, tokens = (
            [b[k] for b in found] for k in range(6)
        )
        others = np.array(other, np.int64)
        dropped = calls.path_len[others] - np.array(tokens, np.int64)
        labels = codes([LABELS.index(name) for name in label], LABELS)
        turn = calls.turn_index[others]
        columns = labels, turn, messages, tokens, dropped, why
        return turn_lines(BRANCHES, calls, call, *columns)

    return apply(one, turns, table_of=as_turns, links=links)


label_branches_batches = label_branches.batches

_Label: TypeAlias = tuple[str, int, str]
"""A label, the other call, and the evidence."""
_KEY_INTS = KEY_BYTES // 4


class _Session:
    """The branches of one session. Call numbers are indices into the table."""

    def __init__(self, calls: Sessions, forest: Forest, links: Records, s: int) -> None:
        lo, hi = calls.offsets[s : s + 2].tolist()
        self._calls, self._range = calls, range(lo, hi)
        self._shared_with, self._parents = forest.shared_with, links["parent"].tolist()
        by, reason = links["rewritten_by"].tolist(), links["link_reason"]
        # by call that replaces a reply: the call whose reply it was
        self._rewritten = {
            by[call]: call
            for call in self._range
            if by[call] >= 0 and reason[by[call]] == LINK_REASONS.index("rewrite")
        }
        self._children: dict[int, list[int]] = defaultdict(list)
        for call in self._range:
            self._children[self._parents[call]].append(call)
        own = SessionCalls(calls.part(s, s + 1))
        self._table, replies = own.table, own.table["response"].to_pylist()
        # by call with known messages: their keys, and these and the key of the reply
        self._keys: dict[int, tuple[Ints, Ints]] = {}
        for call, reply in enumerate(replies, lo):
            if (messages := own.messages(call - lo)) is not None:
                state = messages.keys + (reply["key"] if reply else b"")
                request = np.frombuffer(messages.keys, np.int32)
                self._keys[call] = request, np.frombuffer(state, np.int32)
        # by agent: its turns so far
        self._agents: dict[tuple[str, Any], list[int]] = {}

    def branches(self) -> Iterator[tuple[Any, ...]]:
        """The labelled turns: call, label, other, evidence, shared messages and tokens."""
        asked: dict[tuple[object, str, bytes], int] = {}
        for call in self._range:
            name = self._agent(call)
            digest = blake2b(self._calls.prompt(call).tobytes()).digest()
            questions = [(name, "prompt_ids", digest)]
            if call in self._keys:
                questions.append((name, "messages", self._keys[call][0].tobytes()))
            same = next((one for one in questions if one in asked), None)
            label: _Label | None = None
            if same and call not in self._rewritten:
                label = self._asked_again(call, asked[same], same[1])
            elif call > self._range.start:
                label = self._label(call, *name)
            if label is not None:
                known = {call, label[1]} <= self._keys.keys()
                messages = self._shared(call, label[1], "message") if known else None
                yield call, *label, messages, self._shared(call, label[1], "token")
            asked |= dict.fromkeys(questions, call)
            self._agents.setdefault(name, []).append(call)

    def _agent(self, call: int) -> tuple[str, Any]:
        """The agent's key: what it is made of, and its value."""
        if (agent_id := self._value("agent_id", call)) is not None:
            return "agent_id", agent_id
        if call in self._keys:
            return "first message", self._keys[call][0][:_KEY_INTS].tobytes()
        opening = self._calls.prompt(call)[:OPENING_TOKENS]
        for kind, known in self._agents:
            if kind == "opening":
                head = np.frombuffer(known, np.int32)
                if _core.lcp(opening, head) == min(len(opening), len(head)):
                    return kind, known
        return "opening", opening.tobytes()

    def _label(self, call: int, kind: str, value: object) -> _Label | None:
        agent = self._agents.get((kind, value))
        if agent is None:
            which = f" {value!r}" if kind == "agent_id" else ""
            return "sub_agent", call - 1, f"no earlier turn has its {kind}{which}"
        if call in self._rewritten:
            other = self._rewritten[call]
            why = f"links: it replaces the reply of {self._turn(other)}"
            return "rewrite", other, why
        parent = self._parents[call]
        siblings = self._children[parent] if parent >= 0 else []
        if parent in agent and siblings[0] == call:
            unit = "message" if {call, parent} <= self._keys.keys() else "token"
            if self._shared(call, parent, unit) == self._sizes(parent, unit)[1]:
                return None
        known = [other for other in agent if other in self._keys]
        if call in self._keys and known:
            return self._departure(call, known, "message")
        around = {agent[-1], int(self._shared_with[call]), parent, *siblings}
        return self._departure(call, [*around.intersection(agent)], "token")

    def _asked_again(self, call: int, other: int, by: str) -> _Label:
        """The label of a turn whose request is that of an earlier turn."""
        same = f"the same {by} as {self._turn(other)}"
        children, continued = self._children.get(other, []), call in self._children
        if children and children[0] < call:
            next_turn = self._turn(children[0])
            return "rollback", other, f"{same}, which {next_turn} had continued"
        started, ended = self._value("started_at", call), self._value("ended_at", other)
        if started is not None and ended is not None and started < ended:
            return "sibling", other, f"{same}, which was still running"
        if children and continued:
            return "sibling", other, f"{same}, and both are continued"
        which = "only this turn is" if continued else "neither is"
        which = f"only {self._turn(other)} is" if children else which
        return "retry", other, f"{same}; {which} continued"

    def _departure(self, call: int, others: list[int], unit: str) -> _Label | None:
        """The label by the state with most of the first messages (tokens) of a request."""
        shared = {other: self._shared(call, other, unit) for other in others}
        other = max(shared, key=lambda one: (shared[one], one))
        k, turn = shared[other], self._turn(other)
        n, (n_before, n_state) = self._sizes(call, unit)[0], self._sizes(other, unit)
        sizes = f"{n} {unit}s, {turn} has {n_before}"
        if k == n:
            return "rollback", other, f"its {k} {unit}s are the first ones of {turn}"
        if k == n_state:
            return None
        agrees_again = False
        if unit == "message" and k + 1 < n:
            after = slice((k + 1) * _KEY_INTS, (k + 2) * _KEY_INTS)
            request, state = self._keys[call][0], self._keys[other][1]
            agrees_again = np.array_equal(request[after], state[after])
        if n >= n_before or agrees_again:
            return "rewrite", other, f"{unit} {k} differs; {sizes}"
        ends = [self._sizes(one, unit) for one in others if shared[one] == k]
        if any(end == k and (unit == "token" or end > size) for size, end in ends):
            return "rollback", other, f"departs after {unit} {k - 1}; {sizes}"
        return "compaction", other, f"departs at {unit} {k}; {sizes}"

    def _shared(self, call: int, other: int, unit: str) -> int:
        """The first messages or tokens of a request that another turn's state has."""
        if unit == "message":
            return _core.lcp(self._keys[other][1], self._keys[call][0]) // _KEY_INTS
        return _core.lcp(self._calls.path(other), self._calls.prompt(call))

    def _sizes(self, call: int, unit: str) -> list[int]:
        """The number of messages or tokens of a request, and of the turn's state."""
        if unit == "message":
            return [len(keys) // _KEY_INTS for keys in self._keys[call]]
        lengths = self._calls.calls["prompt_len"], self._calls.path_len
        return [int(of[call]) for of in lengths]

    def _value(self, name: str, call: int) -> Any:
        if name not in self._table.column_names:
            return None
        return self._table[name][call - self._range.start].as_py()

    def _turn(self, call: int) -> str:
        return f"turn {self._calls.turn_index[call]}"
