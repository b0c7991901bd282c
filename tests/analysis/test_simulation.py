"""The simulation counts what the tables hold, and shows what each rule loses; `metrics`
counts what the other tables count.
"""

from collections import Counter

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trajkit as tk
from benchmarks.data import SMALL, quoted, rollout
from tests.fuzz.sessions import generated_runs
from tests.made_tables import by_session, linearized, turns_table
from tests.oracles.rows import held
from tests.strategies import row_limits, runs
from trajkit.analysis import branches, metrics
from trajkit.analysis.simulation import cheapest_lossless, label
from trajkit.errors import ArgumentError
from trajkit.policies import PRESETS
from trajkit.schema import LOSSES, SIMULATION


def out_of_context(turns, rows):
    """Trained tokens, one by one, whose row is not what they were sampled after."""
    called = {
        (name, one.get("turn_index", k)): one
        for name, session in by_session(turns).items()
        for k, one in enumerate(session)
    }
    n = 0
    for row in rows:
        for span in row["spans"]:
            if span["kind"] != "trained":
                continue
            one = called[row["session_id"], span["turn_index"]]
            path, n_prompt = held(one), len(one["prompt_ids"])
            for k in range(span["stop"] - span["start"]):
                here = row["input_ids"][: span["start"] + k + 1]
                n += here != path[: n_prompt + span["output_start"] + k + 1]
    return n


def trained_once(rows):
    """Sampled tokens that some row trains."""
    return {
        (row["session_id"], span["turn_index"], span["output_start"] + k)
        for row in rows
        for span in row["spans"]
        if span["kind"] == "trained"
        for k in range(span["stop"] - span["start"])
    }


@given(runs(), st.sampled_from([*PRESETS]), row_limits, st.sampled_from([None, 1, 8]))
def test_the_simulation_counts_what_the_tables_hold(turns, name, limit, pad):
    table = turns_table(turns)
    rows, report = linearized(table, name, max_row_tokens=limit)
    rows = rows.to_pylist()
    lengths = [len(row["input_ids"]) for row in rows]
    found = tk.simulate(table, [name], pad_to=pad, max_row_tokens=limit)
    assert found.schema.equals(SIMULATION)
    (line,) = found.to_pylist()
    assert line["policy"] == name
    assert line["rows"] == len(rows)
    assert line["tokens_trained"] == len(trained_once(rows))
    assert line["tokens_forward"] == sum(lengths)
    assert line["tokens_forward_shared"] == sum(lengths) - sum(
        row["shared_length"] for row in rows
    )
    assert line["tokens_sampled"] == line["tokens_trained"] + line["tokens_lost"]
    assert line["tokens_lost"] == sum(line[f"lost_{reason}"] for reason in LOSSES)
    assert line["longest_row"] == max(lengths, default=0)
    assert line["tokens_out_of_context"] == out_of_context(turns, rows)
    if pad is None:
        assert line["tokens_padding"] is None
    else:
        assert line["tokens_padding"] == sum(-n % pad for n in lengths)
    for counted in set(report.column_names) & set(line) - {"policy"}:
        assert line[counted] == sum(report[counted].to_pylist()), counted


@settings(max_examples=4)
@given(st.integers(0, 999), st.sampled_from([5, 100]))
def test_the_simulation_counts_packs(seed, size):
    turns = generated_runs(4, seed, max_turns=5)
    # nothing predicts the first token of a row, so packs refuse rows that train it
    turns = [{**turn, "prompt_ids": turn["prompt_ids"] or [1]} for turn in turns]
    for line in tk.simulate(turns_table(turns), pack_tokens=size).to_pylist():
        rows = tk.linearize(turns_table(turns), line["policy"]).to_pylist()
        prefixes = {
            (row["session_id"], *row["input_ids"][: k + 1])
            for row in rows
            for k in range(len(row["input_ids"]))
        }
        assert line["tokens_packed"] == len(prefixes)
        # a prefix is a session and the tokens that its last one attends
        assert line["pairs_packed"] == sum(map(len, prefixes)) - len(prefixes)
        assert line["packs"] >= -(-len(prefixes) // size)
    without = tk.simulate(turns_table(turns), ["faithful"]).to_pylist()[0]
    assert (
        without["packs"] is without["tokens_packed"] is without["pairs_packed"] is None
    )


@settings(max_examples=2)
@given(st.integers(0, 63))
def test_a_stream_gives_what_its_table_gives(seed):
    table = turns_table(generated_runs(4, seed, max_turns=5))
    whole = tk.simulate(table, pad_to=8)
    assert whole["policy"].to_pylist() == [*PRESETS]
    assert tk.simulate(iter(table.to_batches(max_chunksize=2)), pad_to=8) == whole
    assert tk.simulate(pl.from_arrow(table), pad_to=8) == whole


@settings(max_examples=10)
@given(st.integers(0, 999))
def test_what_keeps_everything_at_least_cost(seed):
    turns = turns_table(generated_runs(4, seed, max_turns=5))
    found = tk.simulate(turns, ["slime", "per_call", "skyrl", "strict"])
    best = cheapest_lossless(found)
    lines = {line["policy"]: line for line in found.to_pylist()}
    for name in ("per_call", "skyrl", "strict"):
        assert lines[best]["tokens_forward"] <= lines[name]["tokens_forward"]
    asked = ("lost_untrainable", "lost_aborted", "lost_no_logprob")
    assert lines[best]["tokens_lost"] == sum(lines[best][name] for name in asked)


DRIFTING = tk.from_records(
    [
        {"session_id": "a", "prompt_ids": [1], "output_ids": [2, 3]},
        {"session_id": "a", "prompt_ids": [1, 2, 9], "output_ids": [4]},
    ]
)


def test_policies_that_all_lose():
    assert cheapest_lossless(tk.simulate(DRIFTING, ["trl"])) is None
    assert cheapest_lossless(tk.simulate(DRIFTING, [])) is None


def test_policies_are_named_by_their_changes_and_one_needs_no_list():
    slime = tk.policy("slime", fork_threshold=7, keep_prefix=True)
    found = tk.simulate(DRIFTING, [slime, "strict"])
    names = ["slime(keep_prefix=True, fork_threshold=7)", "strict"]
    assert found["policy"].to_pylist() == [label(slime), "strict"] == names
    for strict in ("strict", tk.policy("strict")):
        assert tk.simulate(DRIFTING, strict).equals(found.slice(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pack_tokens": 0}, "pack_tokens=0"),
        ({"pad_to": 0}, "pad_to=0"),
        ({"pad_to": 2**70}, "pad_to="),
        ({"pad_to": "x"}, "pad_to='x'"),
        ({"policies": ["slim"]}, "'slim'"),
        ({"policies": 1}, "policies=1: expected policies"),
        ({"max_row_tokens": 0}, "max_row_tokens=0"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        tk.simulate(DRIFTING, **options)


@pytest.mark.parametrize(
    ("shape", "kept_by_trl", "shared"),
    [
        # of each reply but the last, its last two tokens are lost
        ("tail_changed", 38_146, 1.01),
        ("head_dropped", 300, 1.4),
    ],
)
def test_two_rollouts_whose_replies_come_back_changed(shape, kept_by_trl, shared):
    """What ``python -m benchmarks.drift`` prints, and what it says of each rule."""
    n, reply, context = 128, 300, 131_072
    turns = tk.from_records(rollout("s", quoted(shape), shape))
    lines = {line["policy"]: line for line in tk.simulate(turns).to_pylist()}
    assert lines["slime"]["longest_row"] == context
    assert {line["tokens_sampled"] for line in lines.values()} == {n * reply}
    assert lines["slime"]["tokens_trained"] == reply  # 0.8 %
    assert lines["trl"]["tokens_trained"] == kept_by_trl  # 99.3 % and 0.8 %
    assert lines["faithful"]["tokens_trained"] == n * reply
    assert lines["faithful"]["tokens_out_of_context"] == 0
    assert lines["faithful"]["tokens_forward_shared"] <= shared * context
    for name in ("strict", "skyrl", "per_call"):
        # each call's context again: on average half of the last one's
        assert 66 * context < lines[name]["tokens_forward"] < 67 * context
        assert lines[name]["tokens_lost"] == 0


def test_presets_that_need_bodies_are_left_out_where_there_are_none():
    turns = tk.from_records(rollout("s", SMALL))
    whole = tk.simulate(turns)
    later = turns.slice(1)  # what the first request showed has its body in no row
    with pytest.warns(tk.errors.LeftOutWarning) as warned:
        table = tk.simulate(later)
    names = [str(one.message).partition(" ")[0] for one in warned]
    assert "segments" in names
    assert {*table["policy"].to_pylist(), *names} == {*whole["policy"].to_pylist()}
    with pytest.raises(tk.errors.MissingBodyError, match="has no body"):
        tk.simulate(later, ["faithful", "segments"])


# --- metrics

RUN = turns_table(generated_runs(12, 5))
CALL = {"session_id": "a", "prompt_ids": [1, 2], "output_ids": [3, 4]}


@pytest.mark.parametrize("policy", ["faithful", "slime", "nemo", "polar"])
def test_counts_are_those_of_simulate_and_drift(policy):
    _, report = linearized(RUN, policy)
    found = metrics(RUN, report, policy)
    (line,) = tk.simulate(RUN, policy).to_pylist()
    links = tk.link(RUN, policy)
    n_linked = RUN.num_rows - links["parent"].null_count
    # a prompt that is sent again is a retry or a rollback, and no drift
    drifted = branches.drifted(RUN, links).to_pylist()
    causes = Counter(line["cause"] for line in drifted)
    names = ("sampled", "trained", "lost", "forward", "forward_shared")
    names = [*names, *(f"lost_{reason}" for reason in LOSSES)]
    expected = {
        "run/turns": RUN.num_rows,
        "rows/count": line["rows"],
        **{
            f"tokens/{name}": line.get(f"tokens_{name}", line.get(name))
            for name in names
        },
        "tokens/trained_share": line["tokens_trained"] / line["tokens_sampled"],
        "drift/turns": len(drifted),
        "drift/turn_share": len(drifted) / n_linked,
        **{f"drift/{cause}_turns": n for cause, n in causes.items()},
        "drift/tokens_at_stake": sum(one["tokens_after_drift"] for one in drifted),
    }
    assert {name: found[name] for name in expected} == expected
    assert metrics(tk.compact(RUN), report, policy) == found
    bare = RUN.drop_columns(["output_logprobs", "weight_versions"])
    assert metrics(bare, report)["staleness/versions"] == 0


def test_rewards_and_groups():
    turns = tk.from_records([{**CALL, "session_id": name} for name in "abcdefghi"])
    facts = {
        "session_id": list("abcdefghi"),
        "reward": [1.0, 1 + 2**-52, 0.0, 3.0, None, 5.0, 2.0, 2.0, 2.0],
        "group_id": ["g", "g", "h", "h", "h", None, None, None, "one"],
        "error": [None] * 4 + ["it broke"] + [None] * 4,
    }
    _, report = linearized(turns, sessions=pa.table(facts))
    expected = {
        "run/errors": 1,
        "reward/mean": 2,
        "reward/std": pytest.approx(2**0.5),
        "reward/min": 0,
        "reward/max": 5,
        "reward/missing": 1,
        "groups/count": 2,
        "groups/constant": 1,
    }
    assert expected.items() <= metrics(turns, report).items()


def test_lengths_logprobs_and_versions():
    def version(*pieces):
        return [{"version": v, "start": a, "stop": b} for v, a, b in pieces]

    one, two = version(("1", 0, 2)), version(("2", 0, 2))
    turns = tk.from_records(
        [
            {**CALL, "output_logprobs": [-1.0, -2.0], "weight_versions": one},
            {**CALL, "prompt_ids": [1, 2, 3, 4, 5], "weight_versions": two},
            {**CALL, "session_id": "b", "output_logprobs": [-3.0, None]},
            {
                **CALL,
                "session_id": "c",
                "weight_versions": version(*[("2", 0, 1), ("2", 1, 2)]),
            },
        ]
    )
    expected = {
        "length/turns": pytest.approx(4 / 3),
        "length/output": 2,
        "length/output_max": 2,
        "length/context_max": 7,
        "logprob/mean": -2,
        "staleness/versions": 2,
        "staleness/mixed_sessions": 1,
    }
    assert expected.items() <= metrics(turns, tk.report(turns)).items()


def test_means_of_nothing_are_absent():
    empty = RUN.slice(0, 0)
    found = metrics(empty, tk.report(empty))
    assert found["tokens/sampled"] == found["run/sessions"] == found["drift/turns"] == 0
    means = {"tokens/trained_share", "reward/mean", "length/output", "logprob/mean"}
    assert means.isdisjoint(found)
    assert all(type(value) is float for value in found.values())


TURNS = tk.from_records([CALL, {**CALL, "session_id": "b"}])


@pytest.mark.parametrize(
    ("turns", "report", "message"),
    [
        (TURNS.slice(1), tk.report(TURNS), "counts 2 turns, and the table has 1"),
        (TURNS, TURNS, "a table of turns .*: expected report"),
    ],
)
def test_the_report_is_of_the_turns(turns, report, message):
    with pytest.raises(tk.errors.SchemaError, match=message):
        metrics(turns, report)
