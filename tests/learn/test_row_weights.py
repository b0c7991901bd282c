"""Weights make the number of rows neutral; baselines count rollouts, not rows."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests.golden_sessions import golden
from tests.libraries import LIBRARIES, joined, tensor
from tests.made_tables import by_session, linearized, turn_rewards, turns_table
from tests.strategies import fewer_examples, runs, seeds
from trajkit.errors import ArgumentError, InvalidTurnsError, SchemaError
from trajkit.schema import REPORT

KEEPS_ALL = ["faithful", "strict", "per_call", "skyrl", "graph"]
"""Policies that train every sampled token once."""

N_STATES = 11
N_VOCABULARY = 50


def with_logprobs(turns):
    """The same turns, each output with logprobs, every turn trainable."""
    return [
        {
            **turn,
            "trainable": None,
            "output_logprobs": [-0.25 * (1 + k % 5) for k in range(n)],
        }
        for turn in turns
        for n in [len(turn["output_ids"])]
    ]


def toy_model(ids, scores):
    """The logprob of each id after those before it: a softmax per state of a hash."""
    places, states = [], []
    state = 0
    for token in ids:
        states.append(state)
        places.append(token)
        state = (state * 7 + token + 1) % N_STATES
    logits = scores[np.array(states, np.int64)]
    chosen = logits[np.arange(len(ids)), np.array(places, np.int64)]
    if isinstance(scores, np.ndarray):
        return chosen - np.log(np.exp(logits).sum(axis=1))
    return chosen - logits.logsumexp(dim=1)


def loss_over_rows(rows, scores, reduce):
    each = [toy_model(ids, scores) for ids in rows["input_ids"].to_pylist()]
    return tk.learn.reference_loss(rows, joined(each, scores), reduce=reduce)


def loss_over_rollouts(turns, rewards, scores):
    """The mean over rollouts of the mean over their sampled tokens, call by call."""
    losses = []
    for name, calls in by_session(turns).items():
        terms = []
        for call in calls:
            prompt = call["prompt_ids"]
            now = toy_model([*prompt, *call["output_ids"]], scores)[len(prompt) :]
            for new, old in zip(now, call["output_logprobs"], strict=True):
                terms.append(-rewards[name] * np.e ** (new - old))
        if terms:
            losses.append(sum(terms) / len(terms))
    return sum(losses) / max(len(losses), 1)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("policy", KEEPS_ALL)
@fewer_examples
@given(runs(max_sessions=2, max_turns=4), seeds)
def test_the_loss_over_rows_is_that_of_the_rollouts(policy, library, turns, seed):
    turns = with_logprobs(turns)
    # a list of no messages is not placed by message routing, and trained by no row
    turns = [{**t, "prompt_messages": t["prompt_messages"] or None} for t in turns]
    random = np.random.default_rng(seed)
    rewards = {name: random.uniform(-2, 2) for name in by_session(turns)}
    scores = tensor(random.uniform(-1, 1, (N_STATES, N_VOCABULARY)), library)
    whole = tk.policy(policy, train_aborted=True)
    rows = tk.linearize(turns_table(turns), whole, reward=rewards)
    expected = pytest.approx(
        float(loss_over_rollouts(turns, rewards, scores)), rel=1e-6, abs=1e-9
    )
    for by, reduce in (("token", "mean"), ("rollout", "sum")):
        loss = loss_over_rows(tk.add_weights(rows, by), scores, reduce)
        assert float(loss.total) == expected


@given(runs(), st.sampled_from([*KEEPS_ALL, "slime", "trl"]))
def test_weights_of_a_rollout_sum_to_one(turns, policy):
    rows = tk.linearize(turns_table(turns), policy)
    assert tk.add_weights(rows).equals(rows)
    for by in ("token", "row", "rollout"):
        weighed = tk.add_weights(rows, by)
        sums = {}
        for row in weighed.to_pylist():
            n = sum(row["loss_mask"])
            share = row["row_weight"]
            if row["rollout_mask_sum"] == 0:
                assert share is None
                continue
            assert (share == 0) == (n == 0)
            sums.setdefault(row["session_id"], []).append(
                share * n if by == "rollout" else share
            )
        assert [sum(shares) for shares in sums.values()] == pytest.approx(
            [1.0] * len(sums)
        )
        assert tk.validate(weighed).equals(weighed)


def forks(**extra):
    """Three calls that have nothing in common, of 2, 1 and 1 sampled tokens."""
    return tk.from_records(
        {"session_id": "a", "prompt_ids": prompt, "output_ids": output, **extra}
        for prompt, output in [([1], [5, 6]), ([2], [7]), ([3], [8])]
    )


def rewards_of(mode, rows, **options):
    return tk.learn.spread_rewards(rows, mode, **options)["reward"].to_pylist()


def with_kinds(rows, kinds):
    place = rows.schema.get_field_index("segment_kind")
    return rows.set_column(place, "segment_kind", pa.array(kinds, pa.string()))


def test_final_only_is_of_no_row_where_no_kind_is_final():
    rows = tk.linearize(forks(), reward=3.0)
    rows = with_kinds(rows, ["history_replaced", None, "subagent"])
    assert rewards_of("final_only", rows) == [0.0] * 3


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in golden("segments_rewards")
        if case.get("mode") in ("uniform", "copy", "final_only")
        and all(s["source"] is not None for s in case["expected"]["samples"])
    ],
    ids=lambda case: str(case["mode"]),
)
def test_reward_modes_are_those_of_segments(case):
    samples = case["expected"]["samples"]
    turns = tk.from_records(
        {"session_id": "a", "prompt_ids": [k], "output_ids": [5]}
        for k in range(len(samples))
    )
    rows = tk.linearize(turns, "per_call", reward=case["reward"])
    rows = with_kinds(rows, [case["kinds"][sample["source"]] for sample in samples])
    assert rewards_of(case["mode"], rows) == [s["reward"] for s in samples]


def test_a_turn_that_rows_train_in_pieces_is_shared_out():
    rows = tk.linearize(forks(), "per_call").slice(0, 1)
    row = rows.to_pylist()[0]
    span = row["spans"][0]
    first = {
        **row,
        "loss_mask": [False, True, False],
        "spans": [{**span, "stop": 2, "output_stop": 1}],
    }
    second = {
        **row,
        "row_index": 1,
        "loss_mask": [False, False, True],
        "spans": [{**span, "start": 2, "output_start": 1}],
    }
    pieces = pa.Table.from_pylist([first, second], rows.schema)
    assert rewards_of("per_turn", pieces, turn_rewards=turn_rewards(3.0)) == [1.5, 1.5]


@given(st.data(), runs(), st.sampled_from(KEEPS_ALL))
def test_turn_rewards_add_up(data, turns, policy):
    turns = with_logprobs(turns)
    table = turns_table(
        [{**t, "prompt_messages": t["prompt_messages"] or None} for t in turns]
    )
    values = data.draw(
        st.lists(st.integers(-4, 4), min_size=len(table), max_size=len(table))
    )
    sampled = [len(ids) > 0 for ids in table["output_ids"].to_pylist()]
    values = [v * s for v, s in zip(values, sampled, strict=True)]
    given = table.select(["session_id", "turn_index"]).append_column(
        "reward", pa.array(values, pa.float64())
    )
    rows = tk.linearize(table, tk.policy(policy, train_aborted=True))
    rows = tk.learn.spread_rewards(rows, "per_turn", turn_rewards=given)
    for name in by_session(turns):
        mine = [r["reward"] for r in rows.to_pylist() if r["session_id"] == name]
        theirs = [r["reward"] for r in given.to_pylist() if r["session_id"] == name]
        assert sum(mine) == pytest.approx(sum(theirs))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        pytest.param(turn_rewards(1.0), "row 1: trains turn 1", id="a turn without"),
        pytest.param(
            turn_rewards(1.0, 1.0, 1.0, 2.0),
            r"turn 3: reward 2\.0, but no row",
            id="a turn that no row trains",
        ),
        pytest.param(turn_rewards(1.0, float("nan"), 1.0), "finite", id="not a number"),
        pytest.param(
            pa.concat_tables([turn_rewards(1.0)] * 2), "turn 0: 2 lines", id="twice"
        ),
    ],
)
def test_turn_rewards_that_are_refused(given, match):
    with pytest.raises(InvalidTurnsError, match=match):
        rewards_of("per_turn", tk.linearize(forks()), turn_rewards=given)


def test_turn_rewards_of_other_sessions_and_zeros_are_no_fault():
    given = pa.concat_tables(
        [
            turn_rewards(1.0, 2.0, 4.0, 0.0),
            turn_rewards(1.0, session="b"),
        ]
    )
    rows = tk.linearize(forks())
    assert rewards_of("per_turn", rows, turn_rewards=given) == [1.0, 2.0, 4.0]


def test_a_rollout_without_a_trained_token_shifts_the_baseline_and_says_so():
    untrained = {"session_id": "b", "prompt_ids": [1], "output_ids": [2]}
    untrained = tk.from_records([{**untrained, "trainable": False}])
    turns = pa.concat_tables([forks(), untrained])
    facts = pa.table(
        {"session_id": ["a", "b"], "reward": [1.0, 0.0], "group_id": ["g", "g"]}
    )
    rows, report = linearized(turns, sessions=facts)
    table = tk.learn.advantages(report)
    assert table["trained"].to_pylist() == [True, False]
    # one rollout against one, although one of them made three rows and one none
    assert table["advantage"].to_pylist() == [0.5, -0.5]
    assert set(REPORT.names) <= set(table.column_names)
    added = tk.add_advantages(rows, table)
    assert added["advantage"].to_pylist() == [0.5] * 3


def test_a_last_turn_needs_a_reward_and_a_name():
    rows = tk.linearize(forks())
    last = max(rows["last_turn"].to_pylist())
    with pytest.raises(InvalidTurnsError, match=f"ends with turn {last}, which has no"):
        rewards_of("last_turn", rows, turn_rewards=turn_rewards(*[1.0] * last))
    unnamed = rows.drop_columns("last_turn")
    with pytest.raises(InvalidTurnsError, match="row 0: last_turn is null"):
        rewards_of("last_turn", unnamed, turn_rewards=turn_rewards(1.0))
    with pytest.raises(ArgumentError, match="mode='last_turn' with turn_rewards not"):
        rewards_of("last_turn", rows)


# --- what is refused


NAMES = {"session_id": ["a"]}


@pytest.mark.parametrize(
    ("sessions", "error", "match"),
    [
        (NAMES, SchemaError, "'advantage' of sessions is absent"),
        ({"advantage": [1.0]}, SchemaError, "'session_id'"),
        ({**NAMES, "advantage": ["1.0"]}, SchemaError, "'advantage' is string"),
        ({**NAMES, "advantage": [True]}, SchemaError, "'advantage' is bool"),
        (
            {**NAMES, "advantage": [float("nan")]},
            InvalidTurnsError,
            "session 'a': advantage nan: expected a finite number or null",
        ),
        (
            {**NAMES, "advantage": [float("-inf")]},
            InvalidTurnsError,
            "session 'a': advantage -inf",
        ),
        (
            {"session_id": ["a", None], "advantage": [1.0, 2.0]},
            InvalidTurnsError,
            "table row 1: session_id is null",
        ),
        (
            {"session_id": ["a", "a"], "advantage": [1.0, 2.0]},
            InvalidTurnsError,
            "session 'a': 2 lines",
        ),
        (
            {"session_id": ["b"], "advantage": [1.0]},
            InvalidTurnsError,
            "session 'a' has rows",
        ),
    ],
)
def test_advantages_that_are_none_are_refused(sessions, error, match):
    with pytest.raises(error, match=match):
        tk.add_advantages(tk.linearize(forks()), pa.table(sessions))


@pytest.mark.parametrize(
    ("names", "reward", "match"),
    [(["a", "a"], 1.0, "session 'a': 2 lines"), (["a"], float("inf"), "reward inf")],
)
def test_rewards_that_give_no_advantages_are_refused(names, reward, match):
    sessions = {"session_id": names, "reward": [reward] * len(names)}
    groups = {"group_id": ["g"] * len(names)}
    with pytest.raises(InvalidTurnsError, match=match):
        tk.learn.advantages(pa.table({**sessions, **groups}))


@pytest.mark.parametrize(
    ("columns", "logprobs", "match"),
    [
        (
            {"row_weight": None},
            [0.0, -1.0, -2.0],
            "row 0: row_weight is null or not finite",
        ),
        (
            {"advantage": float("nan")},
            [0.0, -1.0, -2.0],
            "row 0: advantage of a trained token is nan",
        ),
        ({}, [0.0, -1.0], r"shape \(2,\)"),
        (
            {"logprobs": None},
            [0.0, -1.0, -2.0],
            "row 0: token 1 is trained and has no finite logprob",
        ),
    ],
)
def test_a_loss_that_has_no_value_is_refused(columns, logprobs, match):
    call = {"session_id": "a", "prompt_ids": [1], "output_ids": [2, 3]}
    rows = tk.linearize(tk.from_records([{**call, "output_logprobs": [-1.0, -2.0]}]))
    rows = rows.append_column("advantage", pa.array([1.0]))
    for name, value in columns.items():
        at = rows.column_names.index(name)
        values = [[value] * 3] if name == "logprobs" else [value]
        rows = rows.set_column(at, name, pa.array(values, rows.schema.field(name).type))
    with pytest.raises(InvalidTurnsError, match=match):
        tk.learn.reference_loss(rows, logprobs)
