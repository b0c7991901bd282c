"""The plain-Python rules that the benchmarks time give what the systems' own code gives."""

from functools import cache
from operator import itemgetter
from unittest import mock

import pytest

import trajkit as tk
from benchmarks.data import SHAPES, SMALL, as_parsed, rollout
from benchmarks.forks import FORKS, forking
from benchmarks.policies import TWINS, difference
from tests.fuzz.sessions import generated_runs
from tests.golden_sessions import (
    STEPS,
    delivered,
    golden,
    interleave_sessions,
    segment_sessions,
)
from tests.made_tables import by_session, turns_table
from tests.oracles import (
    peers_chains,
    peers_miles,
    peers_nemo,
    peers_polar,
    peers_segments,
)
from tests.oracles import peers_slime as peers


def segments(session):
    with (
        mock.patch.object(peers_segments, "dispatched", itemgetter("dispatch_ids")),
        mock.patch.object(peers_segments, "answered", itemgetter("answered_ids")),
    ):
        return peers_segments.linearize(session["turns"])


def polar(session):
    turns, knobs = session["turns"], session["knobs"]
    if knobs["builder"] == "prefix_merging":
        return peers_polar.linearize(turns, knobs["end_of_turn_token_id"])
    return peers_chains.per_call(turns)


def nemo(session):
    names = session["knobs"]["call_ids"]
    turns = zip(session["turns"], names, strict=True)
    return peers_nemo.linearize([{**turn, "request_id": name} for turn, name in turns])


# The golden sessions of each system, and its rule in plain Python.
SYSTEMS = {
    "slime": (
        lambda: [
            one for one in golden("slime") if not one["knobs"]["max_sample_tokens"]
        ],
        lambda one: peers.linearize(one["turns"], one["knobs"]["fork_threshold"]),
    ),
    "trl": (
        lambda: delivered("trl"),
        lambda one: peers_chains.trl(
            one["turns"], one["knobs"]["fork_threshold_tokens"]
        ),
    ),
    "strict": (interleave_sessions, lambda one: peers_chains.strict(one["turns"])),
    "skyrl": (
        lambda: delivered("skyrl"),
        lambda one: peers_chains.skyrl(one["turns"]),
    ),
    "segments": (
        segment_sessions,
        segments,
    ),
    "polar": (lambda: golden("polar"), polar),
    "nemo": (
        lambda: [
            one
            for one in delivered("nemo")
            if one["knobs"]["builder"] == "prefix_merging"
        ],
        nemo,
    ),
    "miles": (
        lambda: [
            one
            for one in golden("miles_v2")
            if one["knobs"]["matcher"] == "strict"
            and one["knobs"]["max_seq_len"] is None
            and not one["knobs"]["max_trim_tokens"]
        ],
        lambda one: peers_miles.linearize(one["turns"]),
    ),
}


def at_full_length(row):
    """A golden row, whose mask and logprobs may be of its response alone, or null."""
    n = len(row["tokens"]) - len(row["loss_mask"])
    logprobs = row["logprobs"] or [0.0] * len(row["loss_mask"])
    return {
        "tokens": row["tokens"],
        "prompt_length": row.get("prompt_length", n),
        "loss_mask": [0] * n + row["loss_mask"],
        "logprobs": [0.0] * n + logprobs,
    }


@STEPS
@pytest.mark.parametrize("name", SYSTEMS)
def test_the_rows_of_golden_sessions(name, step):
    read, rule = SYSTEMS[name]
    names = ["tokens", "loss_mask", "logprobs", "prompt_length"]
    if name == "miles":  # the peer keeps the logprobs of what another row trains
        names.remove("logprobs")
    if name in ("trl", "slime", "strict", "segments", "nemo"):
        names.remove("prompt_length")

    for session in read()[::step]:
        expected = [at_full_length(row) for row in session["expected"]["rows"]]
        found, due = (
            [{key: row[key] for key in names} for row in some]
            for some in (rule(session), expected)
        )
        if name == "nemo":
            found, due = sorted(found, key=str), sorted(due, key=str)
        assert found == due, f"{session['profile']}-{session['seed']}"


# neither numbers of several types nor calls without an id, which their rules do not expect
SAID_PLAINLY = {"contents": ["x", "y", ""], "odd": 0, "calling": 0, "answering": 0}


@cache
def calls_of_systems():
    """Calls as the systems know them: messages, all logprobs or none, none aborted."""
    return [
        {
            **one,
            "response_message": reply if reply and reply["role"] != "user" else None,
            "trainable": None,
            "finish_reason": one["finish_reason"]
            if one["finish_reason"] != "abort"
            else None,
            "output_logprobs": []
            if None in (one["output_logprobs"] or [None])
            else one["output_logprobs"],
        }
        for one in generated_runs(400, seed=2, **SAID_PLAINLY)
        for reply in [one["response_message"]]
        if one["prompt_messages"]
    ]


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
    records = as_parsed(make("s", SMALL, shape))
    assert len(records) >= SMALL.n_turns
    faithful = tk.simulate(tk.from_records(records), ["faithful"]).to_pylist()[0]
    assert faithful["tokens_lost"] == 0
    lost = tk.simulate(tk.from_records(records), ["trl"])["tokens_lost"][0].as_py()
    assert (lost > 0) == (shape not in ("clean", "sub_agents"))


def test_a_difference_is_said():
    records = as_parsed(rollout("s", SMALL))
    rows = tk.linearize(tk.from_records(records))
    expected = peers.linearize(records)
    assert difference(rows, expected) is None
    expected[0]["loss_mask"][-1] = 0
    assert difference(rows, expected) == "row 0: loss_mask differs"
    expected[0]["prompt_length"] = 0
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
    """
    rows = []
    for prompt, output in calls:
        if not rows or prompt[: len(rows[-1][0])] != rows[-1][0]:
            rows.append(([], []))
        tokens, mask = rows[-1]
        mask += [0] * (len(prompt) - len(tokens)) + [1] * len(output)
        tokens[:] = prompt + output
    return rows


def verl(calls):
    """One list of ids that only grows; where a request does not extend it, another one.

    https://github.com/verl-project/verl/blob/1dda039b9c/verl/experimental/agent_loop
    """
    rows, response_mask = [], []
    held = None
    for prompt, output in calls:
        extends = held is not None and prompt[: len(held)] == held
        if not extends:
            held, response_mask = [], []
            rows.append((held, response_mask))
        response_mask.extend([0] * (len(prompt) - len(held)))
        held.extend(prompt[len(held) :])
        held.extend(output)
        response_mask.extend([1] * len(output))
    return rows


@pytest.mark.parametrize(
    ("name", "rule"), [("areal", areal), ("rllm", rllm), ("verl", verl)]
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
    lost = {"absorbed", "shadowed"}
    kinds = {span["kind"] for spans in art["spans"].to_pylist() for span in spans}
    assert kinds.isdisjoint(lost)
    assert tk.verify(art, turns, "art").num_rows == 0
    prefix_of_its_row = by_session(turns)
    for row in art.to_pylist():
        (last,) = (
            turn
            for turn in prefix_of_its_row[row["session_id"]]
            if turn["turn_index"] == row["last_turn"]
        )
        assert row["input_ids"] == last["prompt_ids"] + last["output_ids"]
