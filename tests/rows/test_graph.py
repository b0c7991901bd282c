"""prime-rl's message graph as a policy."""

import pytest

import trajkit as tk
from tests.made_tables import turns_table
from tests.oracles import graph as reference_graph
from trajkit.turns import tools_key


def test_a_request_that_offers_other_tools_has_another_root():
    """As verifiers 0.4.0: 7 is what the template put before the reply."""
    turns = [
        {**turn([U], A, [1, 7], [2, 3]), "tools_key": "x"},
        {**turn([U, A, V], B, [1, 7, 2, 3, 4], [5]), "tools_key": "xy"},
    ]
    trained = [
        [k for k, bit in zip(row["input_ids"], row["loss_mask"], strict=True) if bit]
        for row in tk.linearize(turns_table(turns), "graph").to_pylist()
    ]
    assert trained == [[2, 3], [5]]
    for keys in (["x", "x"], [None, None]):
        same = [{**t, "tools_key": k} for t, k in zip(turns, keys, strict=True)]
        assert tk.linearize(turns_table(same), "graph").num_rows == 1
    table = turns_table(turns)
    assert tk.linearize(tk.compact(table), "graph") == tk.linearize(table, "graph")
    assert tk.linearize(table, "faithful").num_rows == 1


def test_the_key_of_tools():
    tools = [{"type": "function", "function": {"name": "f", "strict": None}}]
    same = [{"function": {"name": "f"}, "type": "function"}]
    assert tools_key(tools) == tools_key(same) != tools_key([]) != tools_key([{}])


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


def test_of_equal_paths_the_last_is_continued():
    turns = [turn([U], A, [1], [2]), turn([U], A, [1], [2])]
    turns.append(turn([U, A, V], B, [1, 2, 3], [4]))
    links = tk.link(turns_table(turns), "graph")
    assert links["parent"].to_pylist() == [None, None, 1]
