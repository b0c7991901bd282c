"""Advantages and rewards of turns, over those of rollouts, not of rows."""

import statistics

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests.made_tables import turn_rewards
from trajkit.errors import ArgumentError, InvalidTurnsError

REWARDS = st.none() | st.sampled_from([0.0, 1.0, 0.5, -2.0, 0.1])


def steps_table(lines):
    sessions, indices, rewards = zip(*lines, strict=True) if lines else ((), (), ())
    return pa.table(
        {
            "session_id": pa.array(sessions, pa.string()),
            "turn_index": pa.array(indices, pa.int32()),
            "reward": pa.array(rewards, pa.float64()),
        }
    )


def sessions_table(groups):
    return pa.table(
        {"session_id": list(groups), "group_id": pa.array(groups.values(), pa.string())}
    )


def expected(lines, groups, discount, scale, epsilon):
    """By the formula of the paper, one step at a time."""

    def group_of(session):
        return groups[session] or ("alone", session)

    def relative(session, reward):
        known = [
            r for s, _, r in lines if r is not None and group_of(s) == group_of(session)
        ]
        gain = reward - statistics.fmean(known)
        if len({*known}) == 1:
            gain = 0.0
        if scale == "group_std":
            if len(known) == 1:
                return None
            deviation = statistics.stdev(known) + epsilon
            gain = gain / deviation if deviation else 0.0
        return gain

    found = []
    for session, index, reward in lines:
        if reward is None or relative(session, reward) is None:
            found.append(None)
            continue
        counted = [
            relative(s, r)
            for s, i, r in lines
            if s == session
            and r is not None
            and (i == index or (discount and i > index))
        ]
        found.append(sum(counted))
    return found


@pytest.mark.filterwarnings("ignore::trajkit.errors.NoSignalWarning")
@pytest.mark.parametrize("scale", ["none", "group_std"])
@pytest.mark.parametrize("discount", [1.0, 0.0])
@given(
    st.dictionaries(
        st.tuples(st.sampled_from("abcd"), st.integers(0, 5)), REWARDS, max_size=12
    ),
    st.lists(st.sampled_from(["g", "h", None]), min_size=4, max_size=4),
    st.sampled_from([0.0, 1e-4]),
)
def test_steps_have_the_advantages_of_process_supervision(
    discount, scale, steps, names, epsilon
):
    lines = [(session, k, reward) for (session, k), reward in steps.items()]
    groups = dict(zip("abcd", names, strict=True))
    table = tk.learn.step_advantages(
        steps_table(lines),
        sessions_table(groups),
        discount=discount,
        scale=scale,
        epsilon=epsilon,
    )
    due = expected(lines, groups, discount, scale, epsilon)
    assert table["advantage"].to_pylist() == [
        None if gain is None else pytest.approx(gain, abs=1e-9) for gain in due
    ]


def drifting():
    """A session whose second call keeps the first reply and whose third does not."""
    replies = [[3, 4], [7, 8, 9], [6]]
    prompts = [[1, 2], [1, 2, 3, 4, 5], [1, 2, 3, 5]]
    turns = [
        {
            "session_id": "a",
            "prompt_ids": prompt,
            "output_ids": reply,
            "output_logprobs": [-0.5] * len(reply),
        }
        for prompt, reply in zip(prompts, replies, strict=True)
    ]
    return tk.linearize(tk.from_records(turns), reward=1.0)


GAINS = pa.table(
    {
        "session_id": ["a"] * 3,
        "turn_index": pa.array([2, 0, 1], pa.int32()),
        "advantage": [0.25, 1.0, -2.0],
    }
)


def test_each_trained_token_has_the_advantage_of_its_turn():
    rows = drifting()
    found = tk.add_advantages(rows, GAINS)
    assert found["advantage"].to_pylist() == [
        [0, 0, 1, 1, 0, -2, -2, -2],
        [0, 0, 0, 0, 0.25],
    ]
    batches = tk.add_advantages_batches(iter(rows.to_batches(max_chunksize=1)), GAINS)
    assert pa.Table.from_batches(batches).equals(found)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (GAINS.slice(1), "session 'a', row 1: trains turn 2, which has no line in"),
        (
            GAINS.set_column(2, "advantage", pa.array([None, 1.0, 1.0])),
            "session 'a', turn 2: advantage is null, but row 1 trains the turn",
        ),
        (pa.concat_tables([GAINS, GAINS.slice(2)]), "session 'a', turn 1: 2 lines"),
    ],
)
def test_advantages_of_turns_that_cannot_be_right_are_refused(table, said):
    with pytest.raises(InvalidTurnsError, match=said):
        tk.add_advantages(drifting(), table)


def test_rewards_of_another_session_are_refused():
    with pytest.raises(InvalidTurnsError, match="'a' has rewards, but no line in sess"):
        tk.learn.step_advantages(turn_rewards(1.0), sessions_table({"b": "g"}))
    with pytest.raises(ArgumentError, match="'copy' with turn_rewards given"):
        tk.learn.spread_rewards(drifting(), turn_rewards=turn_rewards(1.0, 1.0))


# --- a discount, along the tree of turns


ONE = pa.table({"session_id": ["a"], "group_id": ["g"], "reward": [1.0]})
PLAIN = {"baseline": "none", "scale": "none"}


def test_turn_level_gae_is_areal_s():
    """AReaL's _compute_turn_level_gae at cbff54d gave these with gamma .9, lambda .5."""
    table = tk.learn.step_advantages(
        turn_rewards(1.0, -2.0, 4.0), ONE, discount=0.9 * 0.5, **PLAIN
    )
    assert table["advantage"].to_pylist() == pytest.approx([0.91, -0.2, 4.0])


def test_a_branch_counts_for_the_turns_that_it_continues():
    """Turns 1 and 2 continue turn 0; turn 3 continues turn 1."""
    calls = [([1], [2]), ([1, 2, 3], [4]), ([1, 2, 5], [6]), ([1, 2, 3, 4, 7], [8])]
    turns = tk.from_records(
        [{"session_id": "a", "prompt_ids": p, "output_ids": o} for p, o in calls]
    )
    links = tk.link(turns)
    assert links["parent"].to_pylist() == [None, 0, 0, 1]
    rewards = turn_rewards(1.0, 2.0, None, 8.0)
    found = tk.learn.step_advantages(
        rewards.take([3, 1, 0, 2]), ONE, discount=0.5, links=links, **PLAIN
    )
    assert found["advantage"].to_pylist() == [8.0, 6.0, 4.0, None]
    chain = tk.learn.step_advantages(rewards, ONE, discount=0.5, **PLAIN)
    assert chain["advantage"].to_pylist() == [1 + 1 + 0 + 1, 2 + 0 + 2, None, 8.0]


def test_links_that_miss_a_turn_are_refused():
    calls = [([1], [2]), ([1, 2, 3], [4])]
    turns = tk.from_records(
        [{"session_id": "a", "prompt_ids": p, "output_ids": o} for p, o in calls]
    )
    links = tk.link(turns)
    with pytest.raises(InvalidTurnsError, match="turn 2: has a reward, but no line"):
        tk.learn.step_advantages(turn_rewards(1.0, 2.0, 3.0), ONE, links=links)
    with pytest.raises(
        InvalidTurnsError, match="turn 1: continues turn 0, which has no"
    ):
        tk.learn.step_advantages(turn_rewards(1.0, 2.0).slice(1), ONE, links=links)
