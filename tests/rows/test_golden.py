"""trajkit, the twins, and each peer's rule in plain Python give what its own code gives."""

from functools import cache
from operator import itemgetter
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

import trajkit as tk
from benchmarks.data import SHAPES, SMALL, as_parsed, rollout
from benchmarks.forks import FORKS, forking
from benchmarks.policies import TWINS, difference
from tests.fuzz.sessions import generated_runs
from tests.golden_sessions import SEGMENT_KINDS, SYSTEMS, delivered, golden, options
from tests.made_tables import by_session, linearized, turns_table
from tests.oracles import (
    peers_chains,
    peers_miles,
    peers_nemo,
    peers_polar,
    peers_segments,
    peers_slime,
)
from tests.oracles.choices import QUARANTINED, UNRESOLVED
from tests.oracles.policies import twins_of
from tests.oracles.segments import segments_of
from trajkit.errors import InvalidTurnsError

STEPS = pytest.mark.parametrize(
    "step", [7, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"]
)


def test_every_session_is_there():
    counts = {name: len(system.sessions()) for name, system in SYSTEMS.items()}
    # 11 rollouts of strict carry an error of their own, and on one the peer raises, too
    assert counts == {
        "slime": 170,
        "strict": 139,
        "trl": 150,
        "skyrl": 144,
        "segments": 286,
        "polar": 150,
        "nemo": 149,
        "miles": 150,
    }


def named(session):
    return f"golden session {session['profile']}-{session['seed']}"


def compare(rows, expected, session):
    """Assert that rows have what the peer says of them."""
    assert len(rows) == len(expected), named(session)
    for row, peer in zip(rows, expected, strict=True):
        found = {name: row[name] for name in peer}
        for one in (found, peer):
            given = [0.0 if p is None else p for p in one["logprobs"]]
            one["logprobs"] = np.array(given, np.float32).tolist()
        assert found == peer, named(session)


@STEPS
@pytest.mark.parametrize("name", SYSTEMS)
def test_rows_are_the_peer_s(name, step):
    system = SYSTEMS[name]
    for session in system.sessions()[::step]:
        policy, given = system.policy(session), options(session)
        turns = system.turns(session)
        table = turns_table(turns)
        rows, report = linearized(table, policy, **given)
        found, line = rows.to_pylist(), report.to_pylist()[0]
        compare(found, system.rows(session), session)
        compare(twins_of(turns, policy, **given)["rows"], system.rows(session), session)
        if name in COUNTED:
            links = tk.link(table, policy).to_pylist()
            COUNTED[name](session, links, found, line)
        assert tk.verify(rows, table, policy, **given).num_rows == 0, named(session)


# --- what the peers say of a session, beside its rows


def of_slime(session, links, rows, line):
    left_out = len(session["expected"]["rows"]) - len(rows)
    assert line["rows_cut"] == left_out


def of_segments(session, links, rows, line):
    """Which turns each segment has, those dropped too, and what each turn was taken for."""
    peer = session["expected"]
    assert {one["num_segments"] for one in peer["rows"]} <= {len(rows)}
    assert line["rows_untrained"] == len(peer["dropped"])
    named = {"root": "new", "messages": "append", "history_replaced": "wipe"}
    assert [named[link["link_reason"]] for link in links] == [
        route.split("/")[1] for route in peer["routes"]
    ]
    segments = []
    for link in sorted(links, key=itemgetter("order")):
        if link["parent"] is None:
            segments.append((link["segment_kind"], []))
        segments[-1][1].append(link["turn_index"])
    due = [
        (SEGMENT_KINDS[one["segment_kind"]], one["turns"])
        for one in [*peer["rows"], *peer["dropped"]]
    ]
    assert sorted(segments) == sorted(due)
    turns = SYSTEMS["segments"].turns(session)
    tools = session["knobs"]["dispatch_tools"]
    assert segments_of(turns, tools).routes == peer["routes"]


def of_polar(session, links, rows, line):
    stats = {
        "chains_total": line["rows"],
        "chains_reconstructed_full": line["rows"] - line["rows_no_splice_point"],
        "chains_reconstructed_truncated": line["rows_no_splice_point"],
        "completions_total": line["turns"],
        "completions_merged": line["turns"] - line["turns_no_splice_point"],
    }
    if session["knobs"]["builder"] == "per_request":
        stats = None
    assert session["expected"]["stats"] == stats


def of_nemo(session, links, rows, line):
    peer, names = session["expected"], session["knobs"]["call_ids"]
    if session["knobs"]["builder"] != "prefix_merging":
        return

    def of(*reasons):
        return {
            name
            for name, link in zip(names, links, strict=True)
            if link["link_reason"] in reasons
        }

    assert of(*QUARANTINED) == set(peer["quarantined"])
    assert of(*UNRESOLVED) == set(peer["unresolved_retries"])
    assert of("empty") == set(peer["empty_generation_calls"])
    assert line["roots"] == peer["roots"]
    assert line["tokens_sampled"] == peer["generated_tokens_captured"]
    table = turns_table(SYSTEMS["nemo"].turns(session))
    main = tk.linearize(table, tk.policy("nemo", row_selection="main")).to_pylist()
    due = [one["tokens"] for one in peer["rows"] if one["chain_id"] == "main"]
    assert [row["input_ids"] for row in main] == due
    delivered_tokens = sum(sum(row["loss_mask"]) for row in main)
    assert delivered_tokens == peer["generated_tokens_delivered"]


def of_miles(session, links, rows, line):
    status = {
        "refused_tokens": "TokenizationError",
        "refused_truncated": "TruncatedGenerationError",
    }
    peer = session["expected"]
    told = [status.get(link["link_reason"], "ok") for link in links]
    assert told == peer["turn_status"]
    taken = [link["parent"] for link in links if link["link_reason"] not in status]
    assert taken == peer["parents"]
    turns = SYSTEMS["miles"].turns(session)
    for row, other in zip(rows, peer["rows"], strict=True):
        assert row["turns"] == other["turns"][: len(row["turns"])]
        paths = [
            turns[k]["prompt_ids"] + turns[k]["output_ids"] for k in other["turns"]
        ]
        whole = row["input_ids"] in paths and not row["truncated"]
        assert other["status"] == ("completed" if whole else "truncated")


COUNTED = {
    "slime": of_slime,
    "segments": of_segments,
    "polar": of_polar,
    "nemo": of_nemo,
    "miles": of_miles,
}


@pytest.mark.parametrize("name", ["skyrl", "nemo"])
def test_a_logprob_that_a_peer_misses(name):
    """SkyRL refuses it here, too; NeMo Gym does, and here it is null."""
    system = SYSTEMS[name]
    refused = [one for one in golden(name) if "error" in one["expected"]]
    assert refused
    for session in refused:
        table = turns_table(system.turns(session))
        if name == "nemo":
            rows = tk.linearize(table, "nemo").to_pylist()
            missing = [
                span["turn_index"]
                for row in rows
                for span in row["spans"]
                if row["logprobs"][span["start"]] is None
            ]
            assert missing
            assert not any(session["turns"][i]["output_logprobs"] for i in missing)
            continue
        with pytest.raises(InvalidTurnsError, match="sampled tokens have no logprob"):
            tk.linearize(table, system.policy(session))


@STEPS
def test_rewards_of_skyrl_s_turns_are_those_of_the_last_turns(step):
    for session in delivered("skyrl")[::step]:
        if session["knobs"]["rewards"] != "scalar":
            continue
        table = turns_table(session["turns"])
        given = table.select(["session_id", "turn_index"]).append_column(
            "reward", pa.array(session["knobs"]["turn_rewards"])
        )
        rows = tk.linearize(table, "skyrl")
        rows = tk.learn.spread_rewards(rows, "last_turn", turn_rewards=given)
        peer = session["expected"]["rows"]
        assert rows["reward"].to_pylist() == [row["reward"] for row in peer]
        last = [turn == len(table) - 1 for turn in rows["last_turn"].to_pylist()]
        assert last == [row["is_last_step"] for row in peer]


def test_strict_on_rollouts_that_failed():
    """The peer clears its masks, and keeps logprobs that trajkit has no place for."""
    system = SYSTEMS["strict"]
    failed = [one for one in delivered("interleave") if one["knobs"]["error"]]
    assert failed
    for session in failed:
        facts = pa.table({"session_id": ["s"], "error": [session["knobs"]["error"]]})
        table = turns_table(session["turns"])
        rows, report = linearized(table, "strict", sessions=facts)
        compare(rows.to_pylist(), system.rows(session), session)
        assert not any(map(any, rows["loss_mask"].to_pylist()))
        assert report["error"].to_pylist() == [session["knobs"]["error"]]


@pytest.mark.parametrize(
    "case",
    golden("segments_rewards"),
    ids=lambda case: f"{case.get('mode', case.get('fan_out'))}-{len(case['kinds'])}",
)
def test_rewards_of_segments(case):
    """Modes and caps. A word that is no mode is copy; an aborted sample is no row."""
    mode = case.get("mode", "uniform")
    policy = tk.policy(
        "segments",
        rewards=mode if mode in ("uniform", "final_only") else "copy",
        max_rows=case.get("max_segments", None if case.get("fan_out") else 1),
    )
    # one turn a segment, and the links that say the segments' kinds
    turns = tk.from_records(
        {"session_id": "a", "prompt_ids": [k], "output_ids": [5] * n}
        for k, n in enumerate(case["response_lengths"])
    )
    kinds = [kind.removeprefix("pre_") for kind in case["kinds"]]
    places = pa.array(range(len(kinds)), pa.int32())
    links = {
        "session_id": pa.array(["a"] * len(kinds), pa.string()),
        "turn_index": places,
        "order": places,
        "segment_kind": pa.array(SEGMENT_KINDS.get(kind, kind) for kind in kinds),
    }
    # the prompts are of one token, so a cap on rows is one on responses
    limit = case["max_response_tokens"] + 1 if case["max_response_tokens"] else None
    rows = tk.linearize(
        turns,
        policy,
        reward=case["reward"],
        links=pa.table(links),
        max_row_tokens=limit,
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


# --- the plain-Python rules that the benchmarks time


def slime(turns, knobs):
    if not knobs["max_sample_tokens"]:
        return peers_slime.linearize(turns, knobs["fork_threshold"])
    return None


def segments(turns, knobs):
    with (
        mock.patch.object(peers_segments, "dispatched", itemgetter("dispatch_ids")),
        mock.patch.object(peers_segments, "answered", itemgetter("answered_ids")),
    ):
        return peers_segments.linearize(turns)


def polar(turns, knobs):
    if knobs["builder"] == "prefix_merging":
        return peers_polar.linearize(turns, knobs["end_of_turn_token_id"])
    return peers_chains.per_call(turns)


def nemo(turns, knobs):
    if knobs["builder"] != "prefix_merging":
        return None
    names = knobs["call_ids"]
    return peers_nemo.linearize(
        [{**turn, "request_id": name} for turn, name in zip(turns, names, strict=True)]
    )


def miles(turns, knobs):
    plain = knobs["matcher"] == "strict" and not knobs["max_trim_tokens"]
    if plain and knobs["max_seq_len"] is None:
        return peers_miles.linearize(turns)
    return None


RULES = {
    "slime": slime,
    "strict": lambda turns, knobs: peers_chains.strict(turns),
    "trl": lambda turns, knobs: peers_chains.trl(turns, knobs["fork_threshold_tokens"]),
    "skyrl": lambda turns, knobs: peers_chains.skyrl(turns),
    "segments": segments,
    "polar": polar,
    "nemo": nemo,
    "miles": miles,
}
"""Rows of a session by the peer's rule; None where that does not know the knobs."""


@STEPS
@pytest.mark.parametrize("name", RULES)
def test_the_peer_s_rule_in_plain_python(name, step):
    compared = 0
    for session in SYSTEMS[name].sessions()[::step]:
        rows = RULES[name](session["turns"], session["knobs"])
        if rows is None:
            continue
        names = ["input_ids", "loss_mask", "logprobs"]
        found = [{**row, "input_ids": row["tokens"]} for row in rows]
        due = SYSTEMS[name].rows(session)
        if name == "nemo":
            found, due = (
                sorted(one, key=itemgetter("input_ids")) for one in (found, due)
            )
        compare(found, [{key: row[key] for key in names} for row in due], session)
        compared += 1
    assert compared


# neither numbers of several types nor calls without an id, which their rules do not expect
SAID_PLAINLY = {"contents": ["x", "y", ""], "odd": 0, "calling": 0, "answering": 0}


@cache
def calls_of_systems():
    """Calls as the systems know them: messages, all logprobs or none, none aborted."""
    calls = []
    for one in generated_runs(400, seed=2, **SAID_PLAINLY):
        reply, logprobs = one["response_message"], one["output_logprobs"] or [None]
        reason = one["finish_reason"]
        changed = {
            "response_message": reply if reply and reply["role"] != "user" else None,
            "trainable": None,
            "finish_reason": None if reason == "abort" else reason,
            "output_logprobs": [] if None in logprobs else logprobs,
        }
        if one["prompt_messages"]:
            calls.append(one | changed)
    return calls


@pytest.mark.parametrize("policy", TWINS)
def test_generated_sessions(policy):
    turns = calls_of_systems()
    expected = [
        row for session in by_session(turns).values() for row in TWINS[policy](session)
    ]
    assert difference(tk.linearize(turns_table(turns), policy), expected) is None


@pytest.mark.parametrize("shape", [*SHAPES, *FORKS])
def test_shapes(shape):
    make = forking if shape in FORKS else rollout
    turns = tk.from_records(as_parsed(make("s", SMALL, shape)))
    assert len(turns) >= SMALL.n_turns
    lost = tk.simulate(turns, ["faithful", "trl"])["tokens_lost"].to_pylist()
    assert lost[0] == 0
    assert (lost[1] > 0) == (shape not in ("clean", "sub_agents"))


def test_a_difference_is_said():
    records = as_parsed(rollout("s", SMALL))
    rows = tk.linearize(tk.from_records(records))
    expected = peers_slime.linearize(records)
    assert difference(rows, expected) is None
    expected[0]["loss_mask"][-1] = 0
    assert difference(rows, expected) == "row 0: loss_mask differs"
    assert difference(rows, []) == "trajkit gives 1 rows, plain Python 0"


# --- systems whose rule is that of choices of a preset


def areal(calls):
    """Every interaction is a row (``export_style="individual"``).

    https://github.com/areal-project/AReaL/blob/4aef98d8d8/areal/experimental/openai/types.py
    """
    return [(p + o, [0] * len(p) + [1] * len(o)) for p, o in calls]


def rllm(calls):
    """Steps extend the segment while their prompt begins with all of its tokens.

    https://github.com/rllm-org/rllm/blob/9beb6e0f/rllm/trainer/verl/transform.py
    and verl's agent loop: one list of ids that only grows
    https://github.com/verl-project/verl/blob/1dda039b9c/verl/experimental/agent_loop
    """
    rows = []
    for prompt, output in calls:
        if not rows or prompt[: len(rows[-1][0])] != rows[-1][0]:
            rows.append(([], []))
        tokens, mask = rows[-1]
        mask += [0] * (len(prompt) - len(tokens)) + [1] * len(output)
        tokens[:] = prompt + output
    return rows


@pytest.mark.parametrize(
    ("name", "rule"), [("areal", areal), ("rllm", rllm), ("verl", rllm)]
)
def test_rules_that_have_another_name_here(name, rule):
    """On tokens alone."""
    differ = 0
    for session in by_session(generated_runs(100)).values():
        names = ("session_id", "prompt_ids", "output_ids")
        turns = tk.from_records([{key: turn[key] for key in names} for turn in session])
        found = tk.linearize(turns, name)
        columns = (found["input_ids"].to_pylist(), found["loss_mask"].to_pylist())
        expected = rule([(turn["prompt_ids"], turn["output_ids"]) for turn in session])
        assert list(zip(*columns, strict=True)) == expected
        differ += len(expected) != tk.linearize(turns, "strict").num_rows
    assert differ


def test_art_is_the_tree_of_slime_whose_rows_end_at_drift():
    """https://github.com/awslabs/agentcore-rl-toolkit/pull/149"""
    turns = generated_runs(200)
    art, slime = (tk.linearize(turns, name) for name in ("art", "slime"))
    assert art.num_rows > slime.num_rows
    kinds = {span["kind"] for spans in art["spans"].to_pylist() for span in spans}
    assert kinds.isdisjoint({"absorbed", "shadowed"})
    assert tk.verify(art, turns, "art").num_rows == 0
    paths = {
        (turn["session_id"], turn["turn_index"]): turn["prompt_ids"]
        + turn["output_ids"]
        for turn in turns
    }
    for row in art.to_pylist():
        assert row["input_ids"] == paths[row["session_id"], row["last_turn"]]
