"""Edges between agents: calls of sub-agents, their returns, compactions, continuations."""

from bisect import bisect
from collections import defaultdict

import numpy as np
import pyarrow as pa

from trajkit.policies import Policy
from trajkit.schema import AGENT_EDGE, AGENTS
from trajkit.schema.engine import checks_of, nulls
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import canonical
from trajkit.tables.ragged import Bools, Longs, Ragged, Records, codes
from trajkit.turns.sessions import Sessions
from trajkit.turns.validation import check_all

_COLUMN = pa.large_list(AGENT_EDGE)
# kinds of calls that are no side calls
_HISTORY = (None, "agent", "transcript")


def agent_edges(calls: Sessions, links: Records, policy: Policy) -> pa.Array:
    """The column ``agent_edges`` of the calls' links (`trajkit.schema.AGENT_EDGES`)."""
    names = [name for name in AGENTS.names if name in calls.table.column_names]
    if {"agent_id", "started_by_turn"}.isdisjoint(names):
        return pa.nulls(calls.n_calls, _COLUMN)
    table = canonical(calls.table.select(names), AGENTS)
    check_all(table, checks_of(AGENTS))
    turn = table.column("started_by_turn").fill_null(-1).to_numpy()
    starter = calls.named(calls.session, turn)
    is_history = pc.is_in(table.column("call_kind"), pa.array(_HISTORY)).to_numpy()
    # the routes that compare no prompts link no histories
    placed = (links["order"] >= 0) & (policy.parent_by not in ("none", "previous"))
    parents = np.where(placed, links["parent"], -1)
    agents = _agents(calls, table, starter, parents)
    repeats = calls.forest.shared >= calls.calls["prompt_len"]
    anew = (placed & (parents < 0) & ~repeats).tolist()
    continued = np.where(is_history[parents], parents, -1).tolist()
    started_by, parent_of = starter.tolist(), parents.tolist()

    # where each edge ends, its kind, and where it begins
    edges: list[tuple[int, str, int]] = []
    # by agent: the call that started it, and its calls so far
    starters = dict[int, int]()
    spoken = defaultdict[int, list[int]](list)
    for call in np.flatnonzero(is_history).tolist():
        agent, by, parent = agents[call], started_by[call], continued[call]
        if by >= 0 and agent not in starters:
            starters[agent] = by
            edges.append((call, "call", by))
        elif anew[call] and spoken[agent]:
            edges.append((call, "compaction", spoken[agent][-1]))
        if parent >= 0 and agents[parent] != agent:
            edges.append((call, "continuation", parent))
        spoken[agent].append(call)
    for agent, by in starters.items():
        last, of_caller = spoken[agent][-1], spoken[agents[by]]
        # calls that do not continue the calling turn
        apart = {-1}
        for call in of_caller[bisect(of_caller, last) :]:
            above = parent_of[call]
            while above != by and above not in apart:
                apart.add(above)
                above = parent_of[above]
            if above == by:
                edges.append((call, "return", last))
                break
    ends, kinds, begins = ([edge[k] for edge in sorted(edges)] for k in range(3))
    turns = calls.turn_index[np.array(begins, np.int64)]
    fields = [pa.array(kinds, pa.string()), pa.array(turns)]
    structs = pa.StructArray.from_arrays(fields, fields=list(AGENT_EDGE))
    offsets = np.searchsorted(ends, np.arange(calls.n_calls + 1))
    return Ragged(structs, offsets).to_arrow(type=_COLUMN)


def _agents(
    calls: Sessions, table: pa.Table, starter: Longs, parents: Longs
) -> list[int]:
    """A number for the agent of each call, another in each session."""
    unnamed: Bools = nulls(table.column("agent_id"))
    # what continues a call of an agent without a name is of that agent
    follows = unnamed & (starter < 0) & (parents >= 0) & unnamed[parents]
    index = np.arange(calls.n_calls)
    first = np.where(follows, parents, index)
    while not np.array_equal(first, higher := first[first]):
        first = higher
    # an agent without a name is known by the tool call that started it, or if that has
    # no id, by its own first call
    tools = table.column("started_by_call")
    own = np.where(nulls(tools), index, calls.n_calls + codes(tools))
    start = np.where(unnamed & (starter >= 0), own, -1)
    keys = (
        calls.session,
        codes(table.column("agent_id")),
        starter * (start >= 0),
        start,
    )
    numbers = np.unique(np.stack(keys)[:, first], axis=1, return_inverse=True)[1]
    return numbers.ravel().tolist()
