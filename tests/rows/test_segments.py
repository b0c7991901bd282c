"""The policy segments: its rows are the twin's, and those that slime's own code gives."""

import pyarrow as pa
import pytest

import trajkit as tk
from tests.golden_sessions import (
    SEGMENT_KINDS,
    comparable,
    expected_segments,
    for_each,
    golden,
    segment_sessions,
    with_call_ids,
)
from tests.made_tables import linearized, link_by
from tests.oracles import segments as twin
from tests.oracles.policies import twins_of
from tests.rows.test_golden import as_float32

# What the peer's own code gives


def told(session):
    return tk.from_records(
        {"session_id": "s", **turn} for turn in with_call_ids(session["turns"])
    )


def tools_of(session):
    return tuple(session["knobs"]["dispatch_tools"])


@for_each(segment_sessions)
def test_golden_rows(session):
    policy = tk.policy("segments", dispatch_tools=tools_of(session))
    reward = session["knobs"]["reward"]
    table = told(session)
    rows, report = linearized(table, policy, reward=reward)
    expected = as_float32(expected_segments(session))
    assert comparable(rows.to_pylist(), expected) == expected
    peer = session["expected"]
    assert [one["num_segments"] for one in peer["rows"]] == [rows.num_rows] * len(
        peer["rows"]
    )
    assert report["rows_untrained"].to_pylist() == [len(peer["dropped"])]
    assert tk.verify(rows, table, policy, reward=reward).num_rows == 0


@for_each(segment_sessions)
def test_golden_segments(session):
    """Which turns each segment has, those dropped too, and what each turn was taken for."""
    links = link_by(told(session), "agents", dispatch_tools=tools_of(session))
    ranked = sorted(links.to_pylist(), key=lambda line: line["order"])
    segments = []
    for line in ranked:
        if line["parent"] is None:
            segments.append((line["segment_kind"], []))
        segments[-1][1].append(line["turn_index"])
    peer = session["expected"]
    rows, dropped = (
        [(SEGMENT_KINDS[one["segment_kind"]], one["turns"]) for one in peer[name]]
        for name in ("rows", "dropped")
    )
    assert [one for one in segments if one not in dropped] == rows
    assert sorted(segments) == sorted(rows + dropped)
    named = {
        "root": "new",
        "messages": "append",
        "history_replaced": "wipe",
    }
    assert [named[why] for why in links["link_reason"].to_pylist()] == [
        route.split("/")[1] for route in peer["routes"]
    ]


@for_each(segment_sessions)
def test_golden_twin(session):
    turns = with_call_ids(session["turns"])
    reward = session["knobs"]["reward"]
    policy = tk.policy("segments", dispatch_tools=tools_of(session))
    rows = twins_of(turns, policy, reward=reward)["rows"]
    expected = expected_segments(session)
    assert comparable(rows, expected) == expected
    assert (
        twin.segments_of(turns, tools_of(session)).routes
        == session["expected"]["routes"]
    )


def given_segments(case):
    """A session with one turn a segment, and the links that say the segments' kinds."""
    kinds = [
        SEGMENT_KINDS.get(kind.removeprefix("pre_"), kind) for kind in case["kinds"]
    ]
    turns = tk.from_records(
        {"session_id": "a", "prompt_ids": [k], "output_ids": [5] * n}
        for k, n in enumerate(case["response_lengths"])
    )
    places = range(len(kinds))
    links = {
        "session_id": pa.array(["a"] * len(kinds), pa.string()),
        "turn_index": pa.array(places, pa.int32()),
        "order": pa.array(places, pa.int32()),
        "segment_kind": pa.array(kinds, pa.string()),
    }
    return turns, pa.table(links)


@pytest.mark.parametrize(
    "case",
    golden("segments_rewards"),
    ids=lambda case: f"{case.get('mode', case.get('fan_out'))}-{len(case['kinds'])}",
)
def test_golden_rewards(case):
    """Modes and caps. A word that is no mode is copy; an aborted sample is no row."""
    mode = case.get("mode", "uniform")
    policy = tk.policy(
        "segments",
        rewards=mode if mode in ("uniform", "final_only") else "copy",
        max_rows=case.get("max_segments", None if case.get("fan_out") else 1),
    )
    turns, links = given_segments(case)
    # the prompts are of one token, so a cap on rows is one on responses
    limit = case["max_response_tokens"] + 1 if case["max_response_tokens"] else None
    rows = tk.linearize(
        turns, policy, reward=case["reward"], links=links, max_row_tokens=limit
    ).to_pylist()
    samples = [s for s in case["expected"]["samples"] if s["source"] is not None]
    assert [
        {
            "source": row["input_ids"][0],
            "response_length": len(row["input_ids"]) - row["prompt_length"],
            "trained": sum(row["loss_mask"]),
            "reward": row["reward"],
        }
        for row in rows
    ] == [
        {name: s[name] for name in ("source", "response_length", "trained", "reward")}
        for s in samples
    ]
    for row, sample in zip(rows, samples, strict=True):
        for name, value in sample["metadata"].items():
            if name.endswith("segment_idx"):
                assert row["row_index"] == value
            if name.endswith("num_segments"):
                assert len(rows) == value
            if name.endswith("segment_kind"):
                assert row["segment_kind"] == SEGMENT_KINDS[value.removeprefix("pre_")]


# What a caller may choose, and refuse


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


@pytest.mark.parametrize(
    ("tools", "kinds"),
    [
        (["search"], ["subagent", "final"]),
        (("Task", "search"), ["subagent", "final"]),
        ((), ["history_replaced", "history_replaced", "final"]),
        (["Task"], ["history_replaced", "history_replaced", "final"]),
    ],
)
def test_a_tool_that_dispatches_is_the_caller_s_to_name(tools, kinds):
    rows = tk.linearize(sent_out(), tk.policy("segments", dispatch_tools=tools))
    assert rows["segment_kind"].to_pylist() == kinds
    assert tk.linearize(sent_out())["segment_kind"].to_pylist() == [None] * 2


@pytest.mark.parametrize("tool", ['sea"rch', "s\\arch", "s.arch", "\u00e9", "\n"])
def test_a_tool_may_have_any_name(tool):
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
    place = rows.schema.get_field_index("reward")
    wrong = rows.set_column(place, "reward", pa.array([0.25, 0.5]))
    for reward in (1.0, None):
        found = tk.verify(wrong, turns, policy, reward=reward).to_pylist()
        assert {one["rule"] for one in found} == {"reward"}
    final = tk.policy(policy, rewards="final_only")
    assert tk.verify(rows, turns, final, reward=1.0).num_rows == 2
