"""Rules that make a forest of whole calls: NeMo Gym's and miles'."""

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import trajkit as tk
from tests.golden_sessions import delivered, for_each, golden
from tests.made_tables import linearized, link_by, turns_table
from tests.oracles import forests as reference_forests
from tests.oracles import rows as reference
from tests.rows.test_twins import RETRIED
from tests.strategies import named_sessions, uniquely_named
from trajkit.errors import InvalidTurnsError, SchemaError

emits = st.sampled_from(["all", "main"])


def nemo_turns(session):
    """A golden session with the names and times that the peer was given."""
    knobs = session["knobs"]
    return [
        {**turn, "request_id": name, "started_at": time}
        for turn, name, time in zip(
            session["turns"], knobs["call_ids"], knobs["created_at"], strict=True
        )
    ]


def nemo_fields(turns, links, rows, main, report):
    """What the peer says of a session, from trajkit's tables."""
    whys = [link["link_reason"] for link in links]
    names = [turn["request_id"] for turn in turns]
    ranked = reference_forests.by_prompt(turns)
    ambiguous = [i for i in ranked if "ambiguous" in whys[i]]
    prompts = [turn["prompt_ids"] for turn in turns]
    # retries stand together, groups in the order of their first
    first = {i: min(k for k in ranked if prompts[k] == prompts[i]) for i in ranked}
    for rank, i in enumerate(ranked):
        first[i] = min(r for r, k in enumerate(ranked) if prompts[k] == prompts[i])
        assert first[i] <= rank
    grouped = sorted(ranked, key=lambda i: (first[i], ranked.index(i)))
    retries = [
        i
        for i in grouped
        if whys[i] in ("superseded", "unresolved") and i not in ambiguous
    ]
    unresolved = [i for i in grouped if whys[i].startswith("unresolved")]
    sampled = sum(len(turn["output_ids"]) for turn in turns)
    delivered = sum(sum(row["loss_mask"]) for row in main)
    roots = sum(
        link["parent"] is None and why != "empty"
        for link, why in zip(links, whys, strict=True)
    )
    return {
        "quarantined": [names[i] for i in ambiguous + retries],
        "unresolved_retries": [names[i] for i in unresolved],
        "empty_generation_calls": [
            name for name, why in zip(names, whys, strict=True) if why == "empty"
        ],
        "roots": roots,
        "chains": len(rows),
        "generated_tokens_captured": report["tokens_sampled"],
        "generated_tokens_delivered": delivered,
        "delivered_fraction": round(delivered / sampled, 4) if sampled else 0.0,
        "mask_sample": roots > 1 or len(rows) > 1 or bool(unresolved),
        "undeliverable": not rows,
    }


def nemo_chains(links, rows):
    """The request_id of every turn of each row's chain."""
    parents = {link["turn_index"]: link["parent"] for link in links}
    for row in rows:
        chain = [row["spans"][-1]["turn_index"]]
        while parents[chain[0]] is not None:
            chain.insert(0, parents[chain[0]])
        yield chain


@for_each(delivered, "nemo")
def test_golden_nemo(session):
    turns, expected = nemo_turns(session), session["expected"]
    merging = session["knobs"]["builder"] == "prefix_merging"
    route = "prefix" if merging else "none"
    policy = tk.policy("nemo", parent_by=route)
    table = turns_table(turns)
    rows, report = linearized(table, policy)
    rows = rows.to_pylist()
    links = link_by(table, route, row_order="prompt").to_pylist()
    names = session["knobs"]["call_ids"]
    chains = [
        [names[i] for i in chain]
        for chain in (
            nemo_chains(links, rows)
            if merging
            else [[k] for k in reference_forests.by_prompt(turns)]
        )
    ]
    assert chains == [row["calls"] for row in expected["rows"]]
    assert len(rows) == len(expected["rows"])
    for row, peer in zip(rows, expected["rows"], strict=True):
        n_prompt = peer["prompt_length"]
        assert row["input_ids"] == peer["tokens"]
        assert row["prompt_length"] == n_prompt
        assert row["loss_mask"][:n_prompt] == [False] * n_prompt
        assert row["loss_mask"][n_prompt:] == [bool(bit) for bit in peer["loss_mask"]]
        given = [0.0 if p is None else p for p in row["logprobs"][n_prompt:]]
        assert given == np.array(peer["logprobs"], np.float32).tolist()
    if not merging:
        assert [row["chain_id"] for row in expected["rows"]] == [
            f"req-{k}" for k in range(len(rows))
        ]
        return
    main = tk.linearize(table, tk.policy("nemo", row_selection="main")).to_pylist()
    # the peer's names: main, and branch-0 on for the others
    labels = [
        "main" if row["input_ids"] == main[0]["input_ids"] else "" for row in rows
    ]
    assert [row["chain_id"] == "main" for row in expected["rows"]] == [
        label == "main" for label in labels
    ]
    assert [one for one in expected["rows"] if one["chain_id"] == "main"] == [
        one
        for one in expected["rows"]
        if main and one["tokens"] == main[0]["input_ids"]
    ]
    found = nemo_fields(turns, links, rows, main, report.to_pylist()[0])
    assert found.pop("undeliverable") == (expected["delivery_error"] is not None)
    assert found == {name: expected[name] for name in found}


def test_the_golden_session_without_logprobs_has_none_here():
    """The peer refuses it; here a logprob that the engine did not give is null."""
    (session,) = [one for one in golden("nemo") if "error" in one["expected"]]
    rows = tk.linearize(turns_table(nemo_turns(session)), "nemo").to_pylist()
    missing = [
        span["turn_index"]
        for row in rows
        for span in row["spans"]
        if row["logprobs"][span["start"]] is None
    ]
    assert missing
    assert all(not session["turns"][i]["output_logprobs"] for i in missing)


@given(st.data(), uniquely_named(), emits)
def test_nemo_does_not_ask_for_the_order_of_calls(data, turns, emit):
    policy = tk.policy("nemo", row_selection=emit)
    shuffled = [
        {**turn, "turn_index": k}
        for k, turn in enumerate(data.draw(st.permutations(turns)))
    ]

    def tokens(calls):
        rows = tk.linearize(turns_table(calls), policy)
        return rows.select(["input_ids", "loss_mask", "logprobs"]).to_pylist()

    assert tokens(shuffled) == tokens(turns)


# A reply that two later calls continue.
FORKED = [
    {"prompt_ids": [1], "output_ids": [2, 3]},
    {"prompt_ids": [1, 2, 3, 4], "output_ids": [5]},
    {"prompt_ids": [1, 2, 3, 6], "output_ids": [7, 8]},
]


@pytest.mark.parametrize(
    ("policy", "rule"),
    [("nemo", "policy"), ("strict", "trained_twice")],
)
def test_verify_holds_each_policy_to_its_own(policy, rule):
    """What one promises is a violation under the other."""
    table = turns_table(FORKED)
    other = "faithful" if policy == "nemo" else "nemo"
    found = tk.verify(tk.linearize(table, other), table, policy)
    assert rule in found["rule"].to_pylist()


def test_verify_finds_a_claim_twice_in_a_row_of_nemo():
    table = turns_table([{"prompt_ids": [1], "output_ids": [2, 2]}])
    rows = tk.linearize(table, "nemo").to_pylist()
    (span,) = rows[0]["spans"]
    rows[0]["spans"] = [
        {**span, "stop": 2, "output_stop": 1},
        {**span, "start": 2, "output_stop": 1},
    ]
    found = tk.verify(pa.Table.from_pylist(rows, tk.schema.ROWS), table, "nemo")
    assert "trained_twice" in found["rule"].to_pylist()


def test_main_is_the_chain_of_the_root_created_first():
    turns = [
        {"prompt_ids": [1], "output_ids": [2], "started_at": 5.0, "request_id": "a"},
        {"prompt_ids": [3, 3], "output_ids": [4], "started_at": 1.0, "request_id": "b"},
        {"prompt_ids": [6], "output_ids": [7], "started_at": None, "request_id": "c"},
    ]
    rows, report = linearized(
        turns_table(turns), tk.policy("nemo", row_selection="main")
    )
    assert rows["input_ids"].to_pylist() == [[3, 3, 4]]
    assert report["lost_not_selected"].to_pylist() == [2]
    rows = tk.linearize(
        turns_table([{**turn, "started_at": None} for turn in turns]),
        tk.policy("nemo", row_selection="main"),
    )
    assert rows["input_ids"].to_pylist() == [[1, 2]]


def test_request_ids_of_any_kind_rank():
    turns = [
        {"prompt_ids": [1], "output_ids": [k], "request_id": name}
        for k, name in ((2, "b"), (3, "a"))
    ]
    table = turns_table(turns)
    kept = tk.linearize(table, "nemo")["input_ids"].to_pylist()
    assert kept == [[1, 3]]
    names = table["request_id"].combine_chunks().dictionary_encode()
    place = table.schema.get_field_index("request_id")
    encoded = table.set_column(place, "request_id", names)
    assert tk.linearize(encoded, "nemo")["input_ids"].to_pylist() == kept
    assert tk.linearize(pl.from_arrow(table), "nemo")["input_ids"].to_pylist() == kept
    lists = table.set_column(place, "request_id", pa.array([[1], [2]]))
    with pytest.raises(SchemaError, match="column 'request_id' is list"):
        tk.linearize(lists, "nemo")


def test_links_in_which_a_parent_does_not_come_first_are_refused():
    table = turns_table(FORKED[::-1])
    links = link_by(table, "prefix").to_pylist()
    assert [link["parent"] for link in links] == [2, 2, None]
    for change, match in (
        ([0, 2, 1], "order 0 does not come after its parent's, 1"),
        ([0, 1, None], "its parent has no order"),
    ):
        changed = pa.Table.from_pylist(
            [{**one, "order": k} for one, k in zip(links, change, strict=True)],
            tk.schema.LINKS,
        )
        with pytest.raises(InvalidTurnsError, match=match):
            tk.linearize(table, "nemo", links=changed)


@example(RETRIED)
@given(named_sessions())
def test_what_is_set_aside_is_counted(turns):
    rows, report = linearized(turns_table(turns), "nemo")
    placed = {s["turn_index"] for row in rows["spans"].to_pylist() for s in row}
    names = reference.turn_indices(turns)
    assert report["lost_quarantined"].to_pylist() == [
        sum(
            len(turn["output_ids"])
            for name, turn in zip(names, turns, strict=True)
            if name not in placed and reference.is_trainable(turn)
        )
    ]


# --- miles


def miles_policy(session):
    knobs = session["knobs"]
    return tk.policy(
        "miles",
        fork_threshold=knobs["max_trim_tokens"] + 1,
        message_equality=knobs["matcher"],
    )


def miles_turns(session):
    """The peer takes a reply that is not there for an empty one."""
    empty = {"role": "assistant", "content": ""}
    return [
        {**turn, "response_message": turn["response_message"] or empty}
        for turn in session["turns"]
    ]


STATUS = {
    "refused_tokens": "TokenizationError",
    "refused_truncated": "TruncatedGenerationError",
}


@for_each(golden, "miles_v2")
def test_golden_miles(session):
    turns, expected = miles_turns(session), session["expected"]
    policy, limit = miles_policy(session), session["knobs"]["max_seq_len"]
    table = turns_table(turns)
    links = link_by(
        table,
        "generations",
        message_equality=policy.message_equality,
        fork_threshold=policy.fork_threshold,
    ).to_pylist()
    assert [STATUS.get(one["link_reason"], "ok") for one in links] == expected[
        "turn_status"
    ]
    ok = [one for one in links if one["link_reason"] not in STATUS]
    assert [one["parent"] for one in ok] == expected["parents"]
    parents = {one["parent"] for one in ok}
    leaves = [one for one in ok if one["turn_index"] not in parents]
    assert len(leaves) == expected["leaves"]

    chains = []
    for one in sorted(
        leaves, key=lambda one: -1 if one["order"] is None else one["order"]
    ):
        if one["order"] is not None:
            chains.append([one["turn_index"]])
            while links[chains[-1][0]]["parent"] is not None:
                chains[-1].insert(0, links[chains[-1][0]]["parent"])
    rows, report = linearized(
        table,
        policy,
        reward=session["knobs"]["reward"],
        max_row_tokens=limit,
    )
    assert rows.num_rows + report["rows_cut"][0].as_py() == len(chains)
    chains = [
        chain
        for chain in chains
        if limit is None or len(turns[chain[0]]["prompt_ids"]) < limit
    ]
    assert chains == [row["turns"] for row in expected["rows"]]
    assert rows.num_rows == len(expected["rows"])
    ends = [reference.held(turn) for turn in turns]
    for row, chain, peer in zip(
        rows.to_pylist(), chains, expected["rows"], strict=True
    ):
        ids, n_prompt = row["input_ids"], row["prompt_length"]
        whole = ids in [ends[i] for i in chain]
        assert ids == peer["tokens"]
        assert len(ids) - n_prompt == peer["response_length"]
        assert row["loss_mask"][n_prompt:] == [bool(bit) for bit in peer["loss_mask"]]
        # the peer keeps the logprobs of what another row trains; here the piece names them
        given = [0.0 if p is None else p for p in row["logprobs"]]
        for span in row["spans"]:
            if span["kind"] == "duplicate":
                logprobs = turns[span["turn_index"]]["output_logprobs"]
                logprobs = logprobs[span["output_start"] : span["output_stop"]]
                given[span["start"] : span["start"] + len(logprobs)] = logprobs
        peers = np.array(peer["logprobs"], np.float32)
        assert np.array(given[n_prompt:], np.float32).tolist() == peers.tolist()
        status = "truncated" if row["truncated"] or not whole else "completed"
        assert status == peer["status"]
        assert row["reward"] == peer["reward"]


TOOL = {"id": "1", "function": {"name": "bash"}}


@pytest.mark.parametrize(
    ("equality", "a", "b", "same"),
    [
        ("strict", {"content": None}, {"content": ""}, True),
        ("strict", {"content": []}, {}, True),
        ("strict", {"content": "x", "name": "y"}, {"content": "x"}, True),
        ("strict", {"content": "x"}, {"content": "x "}, False),
        ("strict", {"reasoning_content": "x"}, {"reasoning_content": None}, False),
        (
            "strict",
            {"tool_calls": [TOOL]},
            {"tool_calls": [{**TOOL, "index": 0}]},
            True,
        ),
        ("strict", {"tool_calls": [TOOL]}, {"tool_calls": []}, False),
        ("role_content_only", {"tool_calls": [TOOL]}, {}, True),
        ("role_content_only", {"content": 1}, {"content": True}, True),
        ("role_content_only", {"content": 0}, {"content": ""}, False),
    ],
)
def test_what_miles_calls_equal(equality, a, b, same):
    user = {"role": "user", "content": "u"}
    said = [{"role": "assistant", **message} for message in (a, b)]
    turns = [
        {
            "prompt_ids": [1],
            "output_ids": [2],
            "prompt_messages": [user],
            "response_message": said[0],
        },
        {
            "prompt_ids": [1, 2, 3],
            "output_ids": [4],
            "prompt_messages": [user, said[1], user],
        },
    ]
    (_, link) = link_by(
        turns_table(turns), "generations", message_equality=equality
    ).to_pylist()
    assert (link["parent"] == 0) == same


def generation(messages, prompt, output, **more):
    return {
        "prompt_messages": messages,
        "response_message": {"role": "assistant", "content": str(output)},
        "prompt_ids": prompt,
        "output_ids": output,
        **more,
    }


USER = {"role": "user", "content": "u"}
SAID = {"role": "assistant", "content": "[2, 3]"}
# a reply, and two calls that go on from it: the first of them is gone on from
GROWN = [
    generation([USER], [1], [2, 3]),
    generation([USER, SAID, USER], [1, 2, 3, 4], [5]),
    generation(
        [USER, SAID, USER, {"role": "assistant", "content": "[5]"}],
        [1, 2, 3, 4, 5, 6],
        [7],
    ),
    generation([USER, SAID, USER, USER], [1, 2, 3, 8], [9]),
]


def test_the_chain_that_ended_first_owns_and_the_deepest_comes_first():
    rows = tk.linearize(turns_table(GROWN), "miles").to_pylist()
    assert [row["input_ids"] for row in rows] == [
        [1, 2, 3, 4, 5, 6, 7],
        [1, 2, 3, 8, 9],
    ]
    assert [sum(row["loss_mask"]) for row in rows] == [4, 1]
    late = [GROWN[0], GROWN[1], GROWN[3], GROWN[2]]
    rows = tk.linearize(turns_table(late), "miles").to_pylist()
    assert [sum(row["loss_mask"]) for row in rows] == [2, 3]


def test_a_cut_inside_a_prompt_ends_with_the_call_before():
    rows, report = linearized(turns_table(GROWN), "miles", max_row_tokens=4)
    assert rows["input_ids"].to_pylist() == [[1, 2, 3], [1, 2, 3]]
    assert rows["loss_mask"].to_pylist()[0] == [False, True, True]
    assert report["lost_cut"].to_pylist() == [3]
    plain = tk.linearize(
        turns_table(GROWN), tk.policy("miles", truncate_at="tokens"), max_row_tokens=4
    )
    assert plain["input_ids"].to_pylist() == [[1, 2, 3, 4], [1, 2, 3, 8]]


def test_a_reply_is_trimmed_though_the_call_after_it_is_left_out():
    turns = [
        generation([USER], [1], [2, 3]),
        generation([USER, SAID, USER], [1, 2, 4, 4, 4], [5]),
    ]
    table, policy = turns_table(turns), tk.policy("miles", fork_threshold=2)
    rows, report = linearized(table, policy, max_row_tokens=5)
    assert rows["input_ids"].to_pylist() == [[1, 2]]
    assert rows["loss_mask"].to_pylist() == [[False, True]]
    assert report["lost_absorbed"].to_pylist() == report["lost_cut"].to_pylist() == [1]
    assert tk.verify(rows, table, policy, max_row_tokens=5).num_rows == 0
    # a row that ends early for no such reason is no turn's path
    found = tk.verify(rows, table, policy, max_row_tokens=6)
    assert "policy" in found["rule"].to_pylist()


def test_a_generation_is_continued_though_an_equal_call_was_refused():
    again = [USER, SAID, USER, {"role": "assistant", "content": "[5]"}]
    turns = [
        generation([USER], [1], [2, 3]),
        generation([USER, SAID, USER], [1, 2, 3, 4], [5]),
        generation([USER, SAID, USER], [1, 9], [5]),
        generation([*again, USER], [1, 2, 3, 4, 5, 6], [7]),
    ]
    links = link_by(turns_table(turns), "generations")
    reasons = ["root", "messages", "refused_tokens", "messages"]
    assert links["link_reason"].to_pylist() == reasons
    assert links["parent"].to_pylist() == [None, 0, 0, 1]


def test_what_is_refused_or_retried_is_counted():
    turns = [
        generation([USER], [1], [2, 3]),
        generation([USER, SAID, USER], [1, 2, 0, 4], [5, 5]),
        generation([USER, SAID, USER], [1, 2, 3, 4], [6, 6, 6]),
        generation([USER, SAID, USER], [1, 2, 3, 4], [7], finish_reason="length"),
        generation(
            [USER, SAID, USER, {"role": "assistant", "content": "[7]"}],
            [1, 2, 3, 4, 7],
            [8],
        ),
    ]
    rows, report = linearized(turns_table(turns), "miles")
    assert rows["input_ids"].to_pylist() == [[1, 2, 3, 4, 7]]
    line = report.to_pylist()[0]
    assert (line["lost_refused"], line["lost_retried"]) == (3, 3)
    assert link_by(turns_table(turns), "generations")["link_reason"].to_pylist() == [
        "root",
        "refused_tokens",
        "retried",
        "messages",
        "refused_truncated",
    ]


def test_parents_in_a_circle_are_refused():
    """Also among turns that are in no row, where drift is measured all the same."""
    table = turns_table(FORKED)
    links = link_by(table, "prefix").to_pylist()
    for one, parent, order in zip(links, [2, 0, 0], [0, 1, 2], strict=True):
        one.update(parent=parent, order=order)
    circle = pa.Table.from_pylist(links, tk.schema.LINKS)
    with pytest.raises(InvalidTurnsError, match="does not come after its parent's"):
        tk.linearize(table, "nemo", links=circle)
    placeless = [{**one, "order": None} for one in links]
    circle = pa.Table.from_pylist(placeless, tk.schema.LINKS)
    assert tk.classify_drift(table, circle).num_rows == 3
    assert tk.linearize(table, "nemo", links=circle).num_rows == 0


# --- beside the choices of other rules


# Turn 1, recorded first, goes on from turn 2, and so does turn 0, for longer.
LATE = [
    {"prompt_ids": [1, 2, 3, 4, 5], "output_ids": [6, 6, 6]},
    {"prompt_ids": [1, 2, 3, 4], "output_ids": [7]},
    {"prompt_ids": [1], "output_ids": [2, 3]},
]


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ({"train_in": "first"}, [[2, 1], [0]]),
        ({"train_in": "earliest"}, [[1], [2, 0]]),
        ({"train_in": "every"}, [[2, 1], [2, 0]]),
        # of one chain alone, every claim is its own
        ({"train_in": "earliest", "row_selection": "main"}, [[2, 1]]),
    ],
)
def test_who_trains_where_a_parent_is_recorded_late(choices, expected):
    turns = [
        {
            **one,
            "turn_index": k,
            "output_logprobs": [-1.0] * len(one["output_ids"]),
            "finish_reason": "stop",
        }
        for k, one in enumerate(LATE)
    ]
    rows = tk.linearize(turns_table(turns), tk.policy("nemo", **choices))
    trained = [
        [span["turn_index"] for span in row["spans"] if span["kind"] == "trained"]
        for row in rows.to_pylist()
    ]
    assert trained == expected


def test_an_empty_row_that_was_cut_to_a_call_has_lost_what_was_cut():
    turns = [
        {**generation([], [1], []), "turn_index": 0},
        {**generation([], [1, 2, 3], [4, 5]), "turn_index": 1},
    ]
    policy = tk.policy("skyrl", truncate_at="calls", keep_empty=False)
    rows, report = linearized(turns_table(turns), policy, max_row_tokens=2)
    assert rows.num_rows == 0
    assert report["lost_cut"].to_pylist() == [2]
