"""Rows that are spliced: Polar's rule, against its twin and the rows of its own code."""

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given

import trajkit as tk
from tests.golden_sessions import delivered, for_each, golden
from tests.made_tables import (
    linearized,
    link_by,
    turns_table,
)
from tests.oracles import rows as reference
from tests.oracles import splice as twin
from tests.rows.test_twins import some_runs
from tests.strategies import (
    END,
    ends_of_turn,
    growing_prompts,
    row_limits,
    runs,
    sessions,
)
from trajkit.cli import main
from trajkit.schema import ROWS

any_session = growing_prompts() | sessions()

# what ends a turn (policy ``polar``)
ENDS_A_TURN = ("stop", "tool_calls", "stop_sequence")


def turn(prompt, output, **said):
    return {"prompt_ids": prompt, "output_ids": output, "finish_reason": "stop", **said}


@given(any_session, ends_of_turn)
def test_flags_of_the_chain_are_those_of_what_was_dropped_too(turns, token):
    plain = tk.policy("polar", end_of_turn_token_id=token)
    whole = tk.policy(plain, flag_scope="chain")
    rows, before = (
        tk.linearize(turns_table(turns), one).to_pylist() for one in (whole, plain)
    )
    chains = twin.chains_of(turns, twin.prompt_links(turns))
    assert rows == [
        {**row, **reference.flags(turns, chain)}
        for row, chain in zip(before, chains, strict=True)
    ]


@given(runs(), ends_of_turn, row_limits)
def test_partial_logprobs_are_dropped_from_whole_rows(turns, token, limit):
    """Under any policy that asks for it."""
    table = turns_table(turns)
    for name in ("strict", "slime", "trl"):
        plain = tk.linearize(table, name, max_row_tokens=limit).to_pylist()
        policy = tk.policy(name, missing_logprobs="null_row")
        rows = tk.linearize(table, policy, max_row_tokens=limit).to_pylist()
        for row, before in zip(rows, plain, strict=True):
            both = zip(before["loss_mask"], before["logprobs"], strict=True)
            lacks = any(m and p is None for m, p in both)
            due = [None] * len(before["logprobs"]) if lacks else before["logprobs"]
            assert row == {**before, "logprobs": due}


def test_a_row_s_first_call_may_be_recorded_last():
    """If the given links say so; links of a route name earlier parents."""
    early, late = turn([1], [7, END]), turn([1, 2, END, 3], [4, END])
    expected = tk.linearize(turns_table([early, late]), "polar")
    turns = turns_table([late, early])
    links = tk.link(turns, "polar").to_pylist()
    links[0] |= {"parent": 1, "order": 1, "link_reason": "prompts"}
    links[1] |= {"parent": None, "order": 0, "link_reason": "root"}
    given_links = pa.Table.from_pylist(links, tk.schema.LINKS)
    rows = tk.linearize(turns, "polar", links=given_links)
    assert rows["input_ids"].to_pylist() == [[1, 7, END, 3, 4, END]]
    assert rows["turns"].to_pylist() == [[1, 0]]
    assert rows["loss_mask"] == expected["loss_mask"]


def test_a_long_tail_is_searched_to_its_end():
    """The end of turn may stand anywhere in whole blocks and after them."""
    for n in (1, 15, 16, 17, 40):
        for at in range(n):
            tail = [2] * at + [END] + [3] * (n - at - 1)
            turns = [turn([1], [4]), turn([1, *tail], [5])]
            table = turns_table(turns)
            policy = tk.policy("polar", end_of_turn_token_id=END)
            rows = tk.linearize(table, policy)["input_ids"].to_pylist()
            assert rows == [[1, 4, *tail[at:], 5]]


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        *((reason, [[1, 4, END, 3, 5]]) for reason in ENDS_A_TURN),
        *((reason, [[1, 4, END]]) for reason in ("length", "abort", None)),
    ],
)
def test_an_output_ends_its_turn_for_these_reasons(reason, expected):
    """Its last token is then where the next prompt goes on."""
    turns = [
        turn([1], [4, END], finish_reason=reason),
        turn([1, 8, END, 3], [5], finish_reason="length"),
    ]
    rows = tk.linearize(turns_table(turns), tk.policy("polar", train_aborted=True))
    assert rows["input_ids"].to_pylist() == expected


# --- choices that are made for all policies


@given(some_runs(), ends_of_turn, row_limits)
def test_payloads_follow_their_tokens(turns, token, limit):
    """Where each token has its own id for a payload, rows have theirs twice."""
    table = turns_table(turns)
    paths = [
        prompt + output
        for prompt, output in zip(
            table["prompt_ids"].to_pylist(),
            table["output_ids"].to_pylist(),
            strict=True,
        )
    ]
    table = table.append_column("copy", pa.array(paths, pa.list_(pa.int32())))
    policy = tk.policy("polar", end_of_turn_token_id=token)
    rows = tk.linearize(table, policy, max_row_tokens=limit, payloads=["copy"])
    assert rows["copy"].to_pylist() == rows["input_ids"].to_pylist()


def test_a_prompt_that_skips_tokens_does_not_begin_the_row():
    """The second call's part begins after an id that its prompt has and the row has not."""
    turns = turns_table(
        [
            {**turn([1], [2]), "x": None},
            {**turn([1, 2, 5, END, 6], [7]), "x": None},
            {**turn([1, 2, 5, END, 6, 7, END, 8], [9]), "x": [*range(9)]},
        ]
    )
    policy = tk.policy("polar", end_of_turn_token_id=END)
    (row,) = tk.linearize(turns, policy, payloads=["x"]).to_pylist()
    assert row["input_ids"] == [1, 2, END, 6, 7, END, 8, 9]
    assert row["x"] == [None] * 5 + [6, 7, 8]


def test_the_next_call_tells_the_last_token_of_a_reply():
    """Where a row starts with its prompt; a spliced prompt tells only its own part."""
    prompts = [[1], [1, 2, 9, 3], [1, 2, 9, 3, 4, 9, 5], [1, 2, 9, 3, 4, 8, 9, 6]]
    outputs = [[2, 9], [4, 9], [7, 9], [7, 9]]
    turns = tk.from_records(
        {
            "session_id": "s",
            "prompt_ids": prompt,
            "output_ids": output,
            "finish_reason": "stop",
            "x_start": 0,
            "x": [100 * k + i for i in range(len(prompt) + len(output) - 1)],
        }
        for k, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    )
    whole = tk.linearize(turns.slice(0, 3), "polar", payloads=["x"])
    assert whole["x"].to_pylist() == [[0, 1, 202, 103, 104, 205, 206, 207, None]]
    spliced = tk.linearize(turns.take([0, 1, 3]), "polar", payloads=["x"])
    assert spliced["input_ids"].to_pylist() == [[1, 2, 9, 3, 4, 9, 6, 7, 9]]
    assert spliced["x"].to_pylist() == [[0, 1, 102, 103, 104, None, 307, 308, None]]


# --- the peer's own rows


def knobs(session):
    by_prompts = session["knobs"]["builder"] == "prefix_merging"
    return {
        "parent_by": "prompts" if by_prompts else "none",
        "end_of_turn_token_id": session["knobs"]["end_of_turn_token_id"],
    }


def recorded(session):
    return tk.from_records({"session_id": "s", **turn} for turn in session["turns"])


def peer_row(row):
    """The columns that decide a row, in the peer's form."""
    n = row["prompt_length"]
    logprobs = row["logprobs"][n:]
    given_any = any(value is not None for value in logprobs)
    return {
        "tokens": row["input_ids"],
        "prompt_length": n,
        "loss_mask": [int(bit) for bit in row["loss_mask"][n:]],
        "logprobs": [0.0 if p is None else p for p in logprobs] if given_any else None,
        "finish_reason": row["finish_reason"],
    }


def as_float32(logprobs):
    return None if logprobs is None else np.array(logprobs, np.float32).tolist()


def test_every_golden_session_is_there():
    assert len(golden("polar")) == len(delivered("polar")) == 150


@for_each(golden, "polar")
def test_rows_are_polar_s(session):
    rows, report = linearized(recorded(session), tk.policy("polar", **knobs(session)))
    expected = [
        {
            **{name: row[name] for name in peer_row(rows.to_pylist()[0])},
            "logprobs": as_float32(row["logprobs"]),
        }
        for row in session["expected"]["rows"]
    ]
    assert [peer_row(row) for row in rows.to_pylist()] == expected
    (line,) = report.to_pylist()
    stats = {
        "chains_total": line["rows"],
        "chains_reconstructed_full": line["rows"] - line["rows_no_splice_point"],
        "chains_reconstructed_truncated": line["rows_no_splice_point"],
        "completions_total": line["turns"],
        "completions_merged": line["turns"] - line["turns_no_splice_point"],
    }
    if session["knobs"]["builder"] == "per_request":
        assert session["expected"]["stats"] is None
        assert line["turns_no_splice_point"] == line["rows_no_splice_point"] == 0
    else:
        assert session["expected"]["stats"] == stats
    # a session without a turn has no line, and is the only one that Polar calls ERROR
    assert session["expected"]["status"] == "COMPLETED"


@for_each(golden, "polar")
def test_turns_and_messages_of_rows_are_polar_s(session):
    """Read off links, rows and turns; a turn that sampled nothing leaves no piece."""
    table = recorded(session)
    policy = tk.policy("polar", **knobs(session))
    links = link_by(table, policy.parent_by).to_pylist()
    rows, report = linearized(table, policy)
    following = {one["parent"]: one["turn_index"] for one in links}
    roots = [one["turn_index"] for one in links if one["parent"] is None]
    dropped = 0
    for root, row, peer in zip(
        roots, rows.to_pylist(), session["expected"]["rows"], strict=True
    ):
        chain = [root]
        while chain[-1] in following:
            chain.append(following[chain[-1]])
        pieces = [(span["turn_index"], span["kind"]) for span in row["spans"]]
        kept = [name for name, kind in pieces if kind == "trained"]
        lost = [name for name, kind in pieces if kind == "no_splice_point"]
        assert peer["turns"] == chain[: len(peer["turns"])]
        assert set(kept) <= set(peer["turns"])
        assert set(lost) <= set(chain) - set(peer["turns"])
        for name in chain:
            sampled = bool(session["turns"][name]["output_ids"])
            assert sampled == (name in [*kept, *lost])
        dropped += len(chain) - len(peer["turns"])
        shown, said = messages_of(table, peer["turns"])
        assert shown == peer["prompt_messages"]
        assert said == peer["response_messages"]
    assert report["turns_no_splice_point"].to_pylist() == [dropped]


def messages_of(table, names):
    """The messages before the first reply, and the contents from it on, by position.

    ``names`` are the kept turns; the peer counts messages that it has, not which.
    """
    bodies = {}
    turns = table.to_pylist()
    for one in turns:
        for message in [*one["messages"], one["response"]]:
            if message is not None and message["body"] is not None:
                bodies[message["key"]] = message["body"]
    first = len(turns[names[0]]["messages"])
    said, count = [], first
    for name in names:
        later = turns[name]["messages"][count:]
        reply = [one for one in [turns[name]["response"]] if one is not None]
        said += [json.loads(bodies[one["key"]])["content"] for one in later + reply]
        count = len(turns[name]["messages"]) + len(reply)
    return first, said


# --- verified from outside


def said(**more):
    return {
        "output_logprobs": None,
        "ill_formed": False,
        "response_message": None,
    } | more


# One chain: a reply that comes back changed, one that its engine cut, one of nothing, and
# after a prompt without an end of turn two that are dropped; beside it a row of its own.
RICH = [
    turn([1, 2], [3, 4, END], **said(output_logprobs=[-1.0, -2.0, -3.0])),
    turn([1, 2, 5, END, 6], [7, 7], **said(output_logprobs=[-1.0, None])),
    turn([1, 2, 5, END, 6, 7, 7, END, 8], [], **said(ill_formed=True)),
    turn([1, 2, 5, END, 6, 7, 7, END, 8, 1, END, 1], [2, END], **said()),
    turn([1, 2, 5, END, 6, 7, 7, END, 8, 1, END, 1, 2], [3, END], **said()),
    turn([1, 2, 5, END, 6, 7, 7, END, 8, 1, END, 1, 2, END], [5, END], **said()),
    turn([4, 4], [6, END], **said(output_logprobs=[-4.0, -5.0])),
]


def test_the_rich_session_is_what_it_says():
    rows = tk.linearize(turns_table(RICH), "polar").to_pylist()
    assert [row["input_ids"] for row in rows] == [
        [1, 2, 3, 4, END, 6, 7, 7, END, 8, END, 1, 2, END],
        [4, 4, 6, END],
    ]
    assert [row["finish_reason"] for row in rows] == ["stop", "stop"]
    kinds = [[span["kind"] for span in row["spans"]] for row in rows]
    assert kinds == [["trained"] * 3 + ["no_splice_point"] * 2, ["trained"]]
    assert rows[0]["logprobs"] == [None] * 14
    assert rows[1]["logprobs"] == [None, None, -4.0, -5.0]


def test_a_spliced_row_opens_with_a_whole_prompt_under_any_policy():
    turns = turns_table(RICH)
    rows = tk.linearize(turns, "polar").to_pylist()
    row = rows[1]
    for name in ("input_ids", "loss_mask", "logprobs"):
        del row[name][0]
    row["spans"][0]["start"] -= 1
    row["spans"][0]["stop"] -= 1
    found = tk.verify(pa.Table.from_pylist(rows, ROWS), turns)["rule"].to_pylist()
    assert "row_tokens" in found


def test_a_splice_is_no_promise_of_other_policies():
    turns = turns_table(RICH)
    rows = tk.linearize(turns, "polar")
    rules = set(tk.verify(rows, turns, "strict")["rule"].to_pylist())
    assert {"context", "not_trained", "row_tokens"} <= rules


def test_the_simulation_counts_what_stands_out_of_its_context():
    """All after the first reply, which came back otherwise."""
    (line,) = tk.simulate(turns_table(RICH), ["polar"]).to_pylist()
    assert line["tokens_trained"] == 9
    assert line["tokens_out_of_context"] == 4
    assert line["lost_no_splice_point"] == line["tokens_lost"] == 4


def test_polar_is_listed_and_shown(capsys, tmp_path):
    path = str(tmp_path / "turns.parquet")
    tk.write_turns(turns_table(RICH), path)
    assert main(["simulate", path]) == 0
    assert "polar" in capsys.readouterr().out
    rows = ["-o", str(tmp_path / "rows.parquet"), "--policy", "polar"]
    assert main(["linearize", path, *rows]) == 0
    assert "no splice point" in capsys.readouterr().out
    assert main(["drift", path, "--policy", "polar"]) == 0
    assert main(["verify", rows[1], path, "--policy", "polar"]) == 0
    assert main(["linearize", path, *rows, "--set", "parent_by=prefix"]) == 2
