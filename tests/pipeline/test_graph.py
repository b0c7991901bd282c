"""prime-rl's message graph as a policy."""

import pytest
from hypothesis import given

import trajkit as tk
from tests import reference_choices, reference_graph
from tests.strategies import row_limits, runs, sessions
from tests.tables import dicts, linearized, link_by, turns_table
from trajkit.recorder.recorder import Recorder

GRAPH = tk.policy("graph")


def graph_links(table):
    return link_by(
        table,
        "messages",
        merge_threshold=0,
        tie_break="full_path",
        message_equality="content",
        chain_order="recorded",
    )


@given(sessions())
def test_links_are_the_twin_s(turns):
    expected = reference_graph.links_of(turns)
    found = graph_links(turns_table(turns))
    assert dicts(found, expected) == expected


@given(sessions(), row_limits)
def test_rows_and_report_are_the_twin_s(turns, limit):
    table = turns_table(turns)
    rows, report = linearized(table, GRAPH, max_row_tokens=limit)
    links = reference_graph.links_of(turns)
    expected, counted = reference_choices.linearize(turns, links, GRAPH, limit)
    assert dicts(rows, expected) == expected
    assert rows.num_rows == len(expected)
    assert dicts(report, [counted]) == [counted]


@given(runs(), row_limits)
def test_every_claim_is_trained_once(turns, limit):
    table = turns_table(turns)
    rows = tk.linearize(table, GRAPH, max_row_tokens=limit)
    assert tk.verify(rows, table, GRAPH, max_row_tokens=limit).to_pylist() == []
    (line,) = tk.simulate(table, [GRAPH]).to_pylist()
    assert line["tokens_out_of_context"] == 0
    assert line["tokens_lost"] == line["lost_untrainable"] + line["lost_unrouted"]


@given(sessions())
def test_the_recorder_gives_the_rows_of_the_stored_table(turns):
    turns = [
        {**one, "turn_index": k, "prompt_ids": one["prompt_ids"] or [0]}
        for k, one in enumerate(turns)
    ]
    recorder = Recorder()
    for one in turns:
        recorder.record("s", **{k: v for k, v in one.items() if k != "turn_index"})
    stored = tk.linearize(turns_table(turns), GRAPH)
    assert recorder.rows("s", GRAPH).to_pylist() == stored.to_pylist()


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def turn(messages, reply, prompt, output):
    return {
        "prompt_messages": messages,
        "response_message": reply,
        "prompt_ids": prompt,
        "output_ids": output,
    }


def kinds(rows):
    return [
        [(s["turn_index"], s["kind"]) for s in row["spans"]] for row in rows.to_pylist()
    ]


U, A, V, B = said("user", "u"), said("assistant", "a"), said("user", "v"), None


def test_a_shared_reply_trains_in_the_first_branch():
    """The branch whose last turn was recorded first, whatever the tree's own order."""
    turns = [
        turn([U], A, [1], [2]),
        turn([U, A, V], said("assistant", "b"), [1, 2, 3], [4]),
        turn([U, A, said("user", "w")], said("assistant", "c"), [1, 2, 5], [6]),
        turn([U, A, V, said("assistant", "b"), V], None, [1, 2, 3, 4, 3], [7]),
    ]
    table = turns_table(turns)
    assert kinds(tk.linearize(table, "graph")) == [
        [(0, "trained"), (2, "trained")],
        [(0, "duplicate"), (1, "trained"), (3, "trained")],
    ]


def test_a_request_goes_on_from_the_last_reply_that_it_repeats():
    """Drift in the second reply: the first is kept, and trained in the first branch."""
    b = said("assistant", "b")
    turns = [
        turn([U], A, [1], [2]),
        turn([U, A, V], b, [1, 2, 3], [4, 4]),
        turn([U, A, V, b, V], None, [1, 2, 3, 4, 9, 3], [7]),
    ]
    assert kinds(tk.linearize(turns_table(turns), "graph")) == [
        [(0, "trained"), (1, "trained")],
        [(0, "duplicate"), (2, "trained")],
    ]
    # the default compares with the reply above, so the row knows nothing of the first
    assert kinds(tk.linearize(turns_table(turns), "faithful")) == [
        [(0, "trained"), (1, "trained")],
        [(2, "trained")],
    ]


def test_of_equal_paths_the_last_is_continued():
    turns = [turn([U], A, [1], [2]) for _ in range(3)]
    turns.append(turn([U, A, V], B, [1, 2, 3], [4]))
    assert reference_graph.links_of(turns)[-1]["parent"] == 2
    assert graph_links(turns_table(turns))["parent"].to_pylist()[-1] == 2


def call(name, arguments, **more):
    return {"id": "1", "function": {"name": name, "arguments": arguments}, **more}


@pytest.mark.parametrize(
    ("reply", "shown", "equal"),
    [
        (said("assistant", None), said("assistant", ""), True),
        (said("assistant", "a", name="x"), said("assistant", "a"), True),
        (said("assistant", "a"), said("assistant", "a "), False),
        (said("assistant", "a", reasoning_content="r"), said("assistant", "a"), False),
        (
            said("assistant", "", tool_calls=[call("f", '{"a": 1, "b": 2}')]),
            said("assistant", "", tool_calls=[call("f", {"b": 2, "a": 1}, index=0)]),
            True,
        ),
        (
            said("assistant", "", tool_calls=[call("f", '{"a": 1}')]),
            said("assistant", "", tool_calls=[call("g", '{"a": 1}')]),
            False,
        ),
        (
            said("assistant", "", tool_calls=[call("f", '{"a": ')]),
            said("assistant", "", tool_calls=[call("f", '{"a":')]),
            False,
        ),
    ],
)
def test_what_counts_of_a_message(reply, shown, equal):
    assert (reference_graph.identity(reply) == reference_graph.identity(shown)) is equal
    turns = [turn([U], reply, [1], [2]), turn([U, shown, V], None, [1, 2, 3], [4])]
    assert tk.linearize(turns_table(turns), "graph").num_rows == (1 if equal else 2)


def test_a_tool_s_message_counts_by_its_call_and_not_its_name():
    t = said("tool", "t", tool_call_id="1", name="f")
    cases = [({"name": "g"}, 1), ({"tool_call_id": "2"}, 2), ({"tool_call_id": ""}, 2)]
    for changed, rows in cases:
        turns = [
            turn([U, t], A, [1], [2]),
            turn([U, {**t, **changed}, A, V], None, [1, 2, 3], [4]),
        ]
        assert tk.linearize(turns_table(turns), "graph").num_rows == rows


def test_reasoning_counts_of_the_assistant_alone():
    for role, rows in (("user", 1), ("assistant", 2)):
        first = said(role, "x", reasoning_content="a")
        turns = [
            turn([U, first], A, [1], [2]),
            turn([U, {**first, "reasoning_content": "b"}, A, V], None, [1, 2, 3], [4]),
        ]
        assert tk.linearize(turns_table(turns), "graph").num_rows == rows, role
