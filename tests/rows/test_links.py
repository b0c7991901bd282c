"""Links that are refused, and what a source recorded or a caller names for them."""

from itertools import chain

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import trajkit as tk
from tests.made_tables import by_session, link_by, replaced, turns_table
from tests.oracles.agents import agent_edges
from tests.strategies import chosen_policies, sessions_of_agents
from trajkit import _core
from trajkit._kernel_names import members
from trajkit.errors import InvalidTurnsError, LayoutError, SchemaError
from trajkit.rows.linearize import find_links
from trajkit.turns import tools_key
from trajkit.turns.sessions import Sessions

# a reply that two calls continue, which were recorded before it
FORKED = [
    {"prompt_ids": [1, 2, 3, 5], "output_ids": [6]},
    {"prompt_ids": [1, 2, 3, 4], "output_ids": [5]},
    {"prompt_ids": [1], "output_ids": [2, 3]},
]


def with_links(links, **columns):
    """The links with other values of some columns."""
    lines = [
        {**line, **{name: values[k] for name, values in columns.items()}}
        for k, line in enumerate(links.to_pylist())
    ]
    return pa.Table.from_pylist(lines, tk.schema.LINKS)


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"order": [0, 2, 1]}, "order 0 does not come after its parent's, 1"),
        ({"order": [0, 1, None]}, "its parent has no order"),
        ({"order": [3, 1, 0]}, "order 3: expected ranks from 0"),
        (
            {"order": [0, 1, 2], "parent": [2, 0, 0]},
            "does not come after its parent's",
        ),
    ],
)
def test_links_in_which_a_parent_does_not_come_first_are_refused(columns, match):
    table = turns_table(FORKED)
    links = link_by(table, "prefix")
    assert links["parent"].to_pylist() == [2, 2, None]
    with pytest.raises(InvalidTurnsError, match=match):
        tk.linearize(table, "nemo", links=with_links(links, **columns))


def test_parents_in_a_circle_of_turns_that_are_in_no_row():
    """Drift is measured all the same."""
    table = turns_table(FORKED)
    circle = with_links(
        link_by(table, "prefix"), parent=[2, 0, 0], order=[None, None, None]
    )
    assert tk.classify_drift(table, circle).num_rows == 3
    assert tk.linearize(table, "nemo", links=circle).num_rows == 0


def test_a_spliced_row_s_first_call_may_be_recorded_last():
    """If the given links say so; links of a route name earlier parents."""
    calls = [
        {"prompt_ids": [1], "output_ids": [7, 9], "finish_reason": "stop"},
        {"prompt_ids": [1, 2, 9, 3], "output_ids": [4, 9], "finish_reason": "stop"},
    ]
    expected = tk.linearize(turns_table(calls), "polar")
    turns = turns_table(calls[::-1])
    links = with_links(tk.link(turns, "polar"), parent=[1, None], order=[1, 0])
    rows = tk.linearize(turns, "polar", links=links)
    assert rows["input_ids"].to_pylist() == [[1, 7, 9, 3, 4, 9]]
    assert rows["turns"].to_pylist() == [[1, 0]]
    assert rows["loss_mask"] == expected["loss_mask"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        pytest.param({"parent": 1}, "parent 1 is no other call", id="itself"),
        pytest.param({"parent": 1 << 30}, "is no other call", id="far outside"),
        # their paths have no node in common: a climb to it would not end
        pytest.param({"parent": 2}, "2 is no other call of its session", id="the next"),
        pytest.param({"parent": 0}, "which has the calls 1 to 1", id="the one before"),
        pytest.param({"lcp": 3}, "not within both paths", id="lcp beyond the prompt"),
        pytest.param({"lcp": -1}, "not within both paths", id="lcp below 0"),
    ],
)
def test_kernels_refuse_links_that_lead_outside(change, match):
    session = "second" if change.get("parent") == 0 else "s"
    calls = Sessions.of(
        turns_table(
            [
                {"prompt_ids": [1], "output_ids": [2]},
                {"prompt_ids": [1, 2], "output_ids": [3], "session_id": session},
                {"prompt_ids": [1, 2, 3], "output_ids": [4], "session_id": "later"},
            ]
        )
    )
    forest = calls.forest
    links = find_links(calls, forest, tk.policy("trl"))
    for name, value in change.items():
        links[name][1] = value
    if "parent" in change:
        with pytest.raises(LayoutError, match=match):
            _core.measure_links(forest.paths, links)
    out = np.zeros((len(members("DRIFT_")), len(links)), np.int64)
    with pytest.raises(LayoutError, match=match):
        _core.describe_drift(forest.paths, links, 8, out)


@pytest.mark.parametrize(
    ("call", "other", "match"),
    [
        (-1, 0, "call is -1: expected one of 2"),
        (0, 2, "call is 2: expected one of 2"),
    ],
)
def test_kernels_refuse_calls_that_lead_outside(call, other, match):
    turns = [{"prompt_ids": [1], "output_ids": [2], "session_id": s} for s in "ab"]
    paths = Sessions.of(turns_table(turns)).forest.paths
    assert _core.shared_length(paths, 0, 0) == 1
    assert _core.shared_length(paths, 0, 1) == 0  # of another session
    with pytest.raises(LayoutError, match=match):
        _core.shared_length(paths, call, other)
    for look in (_core.TokenIndex(paths).add, _core.TokenIndex(paths).find):
        with pytest.raises(LayoutError, match=match):
            look(min(call, other) if call < 0 else other)


# --- parents that the source recorded


ROOT = {"request_id": "a", "parent_resolution": "root", "parent_request": None}
LATER = {"request_id": "b", "parent_resolution": "unresolved", "parent_request": None}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"parent_resolution": "maybe"}, "'maybe', expected one of root, resolved"),
        ({"parent_resolution": "resolved"}, "'resolved', parent_request is null"),
        ({"parent_request": "b"}, "'root', parent_request is 'b': expected null"),
        ({"request_id": "b"}, "turn 1: request_id 'b' is that of turn 0, too"),
        ({"scored": True}, "turn 1: scored is true, as of turn 0"),
    ],
)
def test_recorded_parents_that_contradict_themselves_are_refused(changes, match):
    turns = [
        {**line, **ids}
        for line, ids in zip(
            [{**ROOT, **changes}, {**LATER, "scored": True}], FORKED, strict=False
        )
    ]
    with pytest.raises(InvalidTurnsError, match=match):
        tk.link(turns_table(turns), "nemo")


@pytest.mark.parametrize(
    ("name", "values"),
    [("parent_request", [[1]]), ("scored", ["x"])],
)
def test_columns_of_another_type_are_refused(name, values):
    table = turns_table(FORKED[:1]).append_column(name, pa.array(values))
    with pytest.raises(SchemaError, match=f"column '{name}' is .*: expected"):
        tk.link(table, "nemo")


def test_request_ids_of_any_kind_rank():
    """Of retries the one with the first name is kept."""
    table = turns_table([{**FORKED[0], "output_ids": [k]} for k in (2, 3)])
    names = pa.array(["b", "a"])
    named = table.append_column("request_id", names)
    encoded = table.append_column("request_id", names.dictionary_encode())
    for turns in (named, encoded, pl.from_arrow(named)):
        rows = tk.linearize(turns, "nemo")
        assert rows["input_ids"].to_pylist() == [[1, 2, 3, 5, 3]]


# --- edges between agents


def turn(prompt, output, agent=None, by=None, call="c", kind=None):
    """A turn with the gateway's columns of agents."""
    return {
        "prompt_ids": prompt,
        "output_ids": [output],
        "agent_id": agent,
        "call_kind": kind,
        "started_by_turn": by,
        "started_by_call": None if by is None else call,
    }


# main's turns up to a tool call, and those after its answer
MAIN, MAIN_ON = turn([1, 2], 3), turn([1, 2, 3, 4], 5)
SUB, SUB_ON = turn([7], 8, "a", 0), turn([7, 8, 9], 10, "a")
AGAIN = [1, 2, 3, 4, 5, 6]
OTHER = turn([27], 28, "b", 0, "d")


def edges_of(links):
    return [
        [(edge["kind"], edge["turn"]) for edge in edges]
        for edges in links["agent_edges"].to_pylist()
    ]


def nameless(one):
    return {**one, "agent_id": None}


AGAIN_ON = turn(AGAIN, 7)
# the edges that end at each turn, by its place; at others none does
EDGES = {
    "a sub-agent": (
        [MAIN, SUB, SUB_ON, MAIN_ON, AGAIN_ON],
        {1: [("call", 0)], 3: [("return", 2)]},
    ),
    "a sub-agent without a name": (
        [MAIN, nameless(SUB), nameless(SUB_ON), MAIN_ON],
        {1: [("call", 0)], 3: [("return", 2)]},
    ),
    "a sub-agent of a sub-agent": (
        [MAIN, SUB, turn([17], 18, "b", 1), SUB_ON, MAIN_ON],
        {1: [("call", 0)], 2: [("call", 1)], 3: [("return", 2)], 4: [("return", 3)]},
    ),
    "two side by side without names": (
        [MAIN, *map(nameless, (SUB, OTHER, SUB_ON)), MAIN_ON],
        {1: [("call", 0)], 2: [("call", 0)], 4: [("return", 2), ("return", 3)]},
    ),
    "main goes on beside a sub-agent": (
        [MAIN, SUB, MAIN_ON, SUB_ON, AGAIN_ON],
        {1: [("call", 0)], 4: [("return", 3)]},
    ),
    "compaction of main": (
        [MAIN, MAIN_ON, turn([1, 20], 5), turn([1, 20, 5, 6], 7)],
        {2: [("compaction", 1)]},
    ),
    "a prompt sent again": ([MAIN, {**MAIN, "output_ids": [9]}, MAIN_ON], {}),
    "another agent continues main's history": (
        [MAIN, turn([1, 2, 3, 4], 5, "a"), turn(AGAIN, 7, "a")],
        {1: [("continuation", 0)]},
    ),
    "a side call": (
        [MAIN, turn([40], 41, kind="title"), turn([1, 20], 5, kind="agent")],
        {2: [("compaction", 0)]},
    ),
}


@pytest.mark.parametrize("case", EDGES)
@pytest.mark.parametrize("policy", ["faithful", "strict", "nemo", "graph", "polar"])
def test_edges_between_agents(case, policy):
    """The same in each session, for a table and for batches."""
    turns, expected = EDGES[case]
    sessions = [{**one, "session_id": name} for name in "st" for one in turns]
    table = turns_table(sessions)
    links = tk.link(table, policy)
    found = edges_of(links)
    assert found == [expected.get(k, []) for k in range(len(turns))] * 2
    assert {kind for edges in found for kind, _ in edges} <= {*tk.schema.AGENT_EDGES}
    batches = tk.link_batches(iter(table.to_batches(max_chunksize=1)), policy)
    assert pa.Table.from_batches(batches) == links == tk.validate(links)


@given(st.lists(sessions_of_agents(), min_size=1, max_size=20), chosen_policies())
@example([[MAIN, SUB, turn(AGAIN, 7), MAIN_ON]], ("nemo", {}))
def test_edges_are_those_of_the_twin(sessions, choice):
    policy = tk.policy(choice[0], **choice[1])
    turns = [{**one, "session_id": f"{k}"} for k, s in enumerate(sessions) for one in s]
    links = tk.link(turns_table(turns), policy)
    compares = policy.parent_by not in ("none", "previous")
    expected = [
        agent_edges(turns, lines, compares)
        for turns, lines in zip(
            sessions, by_session(links.to_pylist()).values(), strict=True
        )
    ]
    assert edges_of(links) == list(chain(*expected))


def test_edges_are_unknown_without_columns_of_agents():
    bare = turns_table([MAIN, SUB]).drop_columns(["agent_id", "started_by_turn"])
    assert tk.link(bare)["agent_edges"].to_pylist() == [None, None]
    names = turns_table([MAIN, SUB]).drop_columns(["started_by_turn"])
    assert tk.link(names)["agent_edges"].to_pylist() == [[], []]
    numbered = replaced(names, "agent_id", pa.array([None, 7]))
    assert tk.link(numbered)["agent_edges"].to_pylist() == [[], []]


@pytest.mark.parametrize(
    ("by", "match"),
    [
        (5, "turn 1: started_by_turn 5 is not a turn of the session"),
        (1, "turn 1: started_by_turn 1 is not another turn_index"),
    ],
)
def test_a_start_by_no_other_turn_is_refused(by, match):
    with pytest.raises(InvalidTurnsError, match=match):
        tk.link(turns_table([MAIN, turn([7], 8, "a", by)]))


def test_links_need_no_edges():
    table = turns_table([MAIN, SUB, MAIN_ON])
    links = tk.link(table)
    bare = links.drop_columns(["agent_edges"])
    assert tk.linearize(table, links=bare) == tk.linearize(table, links=links)
    assert tk.classify_drift(table, bare) == tk.classify_drift(table, links)


# --- tools


def test_the_key_of_tools():
    tools = [{"type": "function", "function": {"name": "f", "strict": None}}]
    same = [{"function": {"name": "f"}, "type": "function"}]
    assert tools_key(tools) == tools_key(same) != tools_key([]) != tools_key([{}])


def said(content, *calls, role="assistant"):
    message = {"role": role, "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": one, "function": {"name": name}} for name, one in calls
        ]
    return message


def sent_out(tool="search"):
    """Main calls a tool, its agent answers, main goes on: one turn each."""
    opening = [said("s", role="system"), said("u", role="user")]
    asks = said("x", (tool, "c1"))
    answer = {"role": "tool", "content": "y", "tool_call_id": "c1"}
    prompts = [opening, [said("other", role="user")], [*opening, asks, answer]]
    replies = [asks, said("y"), said("z")]
    return tk.from_records(
        {
            "session_id": "s",
            "prompt_ids": ids,
            "output_ids": [k, 9],
            "prompt_messages": prompt,
            "response_message": reply,
        }
        for k, (ids, prompt, reply) in enumerate(
            zip([[1, 2], [5], [1, 2, 0, 9, 3]], prompts, replies, strict=True)
        )
    )


@pytest.mark.parametrize("tool", ['sea"rch', "s\\arch", "s.arch", "\u00e9", "\n"])
def test_a_tool_that_sends_out_an_agent_may_have_any_name(tool):
    """It is looked for in the JSON text of the messages."""
    policy = tk.policy("segments", dispatch_tools=[tool])
    kinds = tk.linearize(sent_out(tool), policy)["segment_kind"].to_pylist()
    assert kinds == ["subagent", "final"]
    kinds = tk.linearize(sent_out("sxarch"), policy)["segment_kind"].to_pylist()
    assert kinds == ["history_replaced", "history_replaced", "final"]


def test_a_shifted_share_of_the_reward_is_found():
    policy = tk.policy("segments", dispatch_tools=["search"])
    turns = sent_out()
    rows = tk.linearize(turns, policy, reward=1.0)
    wrong = replaced(rows, "reward", [0.25, 0.5])
    for reward in (1.0, None):
        found = tk.verify(wrong, turns, policy, reward=reward).to_pylist()
        assert {one["rule"] for one in found} == {"reward"}
    final = tk.policy(policy, rewards="final_only")
    assert tk.verify(rows, turns, final, reward=1.0).num_rows == 2
