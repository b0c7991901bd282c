"""The manager takes what slime's manager takes, and keeps a session that it can't give.

The cases that slime takes were run on slime's own manager at 624b824. Then: the hook for
rewards, whose baselines count each rollout once.
"""

from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from trajkit.errors import ExportError, NoSignalWarning
from trajkit.export.slime import TrajectoryManager, reward_post_process


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"


@dataclass
class Sample:
    """The fields of slime's ``Sample`` that its manager sets."""

    index: int | None = 4
    group_index: int | None = 2
    rollout_id: int | None = None
    prompt: str = "p"
    label: str | None = None
    tokens: list[int] = field(default_factory=list)
    response_length: int = 0
    reward: float | None = None
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    weight_versions: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)


def turn(prompt_ids, output_ids, logprobs=(), finish_reason="stop", ill_formed=False):
    return SimpleNamespace(
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        output_log_probs=logprobs,
        finish_reason=finish_reason,
        ill_formed=ill_formed,
    )


USER = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "yes"}


def recorded(*turns, sid="a", messages=(USER,), reply=REPLY, **options):
    manager = TrajectoryManager(**options)
    for one in turns:
        manager.record_turn(
            sid, turn=one, prompt_messages=list(messages), response_message=reply
        )
    return manager


def test_logprobs_are_the_doubles_of_the_engine():
    exact = [-8.025457382202148, -0.1]
    manager = recorded(turn([1, 2], [3, 4], exact))
    (sample,) = manager.get_trajectory("a", base_sample=Sample(), reward=0.5)
    assert sample.rollout_log_probs == exact
    assert (sample.tokens, sample.loss_mask) == ([1, 2, 3, 4], [1, 1])
    assert (sample.index, sample.group_index, sample.rollout_id) == (4, 2, 4)
    assert (sample.reward, sample.status) == (0.5, Status.COMPLETED)
    assert not manager.has_session("a")
    assert manager.get_trajectory("a", base_sample=Sample()) == []


@pytest.mark.parametrize(
    "message",
    [
        {"role": None, "content": "x"},
        {"content": "x"},
        {"role": "user", "content": b"x"},
        {"role": "user", "content": ("x", 1)},
        {"role": "user", "content": {1: "x"}},
        {"role": "user", "content": "\ud83d"},
        {"role": "user", "content": float("nan")},
        {"role": "user", "content": 10**400},
        {"role": "user", "content": float("inf"), "\udc00": 1},
    ],
)
def test_messages_that_json_cannot_have_are_recorded(message):
    """After a reply, an error would lose what the agent has seen."""
    manager = TrajectoryManager()
    for ids, more in (([1], ()), ([1, 5, 6], (REPLY, USER))):
        manager.record_turn(
            7,
            turn=turn(ids, [5], [-1.0], None),
            prompt_messages=[message, *more],
            response_message=REPLY,
        )
    (sample,) = manager.get_trajectory(7, base_sample=Sample())
    assert sample.tokens == [1, 5, 6, 5]
    assert sample.loss_mask == [1, 0, 1]


def test_messages_are_those_of_the_time_of_the_turn():
    message = {"role": "user", "content": ["a"]}
    manager = recorded(turn([1], [2], [-1.0]), messages=[message])
    message["content"].append("b")
    manager.record_turn(
        "a",
        turn=turn([1, 2, 3], [4], [-1.0]),
        prompt_messages=[{"role": "user", "content": ["a"]}, REPLY, USER],
        response_message=REPLY,
    )
    assert len(manager.get_trajectory("a", base_sample=Sample())) == 1


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), 0.001])
def test_a_turn_whose_logprob_is_none_is_not_trained(value, caplog):
    other = turn([9], [8], (-0.5,))
    manager = recorded(turn([1, 2], [3, 4], [-1.0, value]), other)
    assert "not trained: session '', turn 0: output_logprobs[1]" in caplog.text
    assert manager.turn_count("a") == 2
    samples = manager.get_trajectory("a", base_sample=Sample())
    assert [one.tokens for one in samples] == [[9, 8]]
    assert samples[0].metadata["turns_untrained"] == 1


@pytest.mark.parametrize("ids", [[-1], [2**31], [1.5], ["a"]])
def test_a_turn_without_token_ids_is_left_out_and_counted(ids, caplog):
    manager = recorded(turn(ids, [3], [-1.0]), turn([9], [8], [-0.5]))
    assert "the turn is left out" in caplog.text
    (sample,) = manager.get_trajectory("a", base_sample=Sample())
    assert sample.tokens == [9, 8]
    assert sample.metadata["turns_left_out"] == 1
    assert recorded(turn(ids, [3])).get_trajectory("a", base_sample=Sample()) == []


def test_a_cut_within_a_shared_prefix_gives_a_sample_that_trains_nothing():
    """As slime: its second sample here has the mask [0, 0, 0, 0]."""
    manager = TrajectoryManager(policy="slime", fork_threshold_tokens=0)
    for ids, content in (([1, 2], "a"), ([1, 2, 3, 4, 9, 9, 9], "b")):
        more = [] if content == "a" else [REPLY, {"role": "user", "content": "b"}]
        manager.record_turn(
            "a",
            turn=turn(ids, [3, 4], [-1.0, -1.0]),
            prompt_messages=[USER, *more],
            response_message=REPLY,
        )
    manager.record_turn(
        "a",
        turn=turn([1, 2, 3, 4, 9, 9], [7], [-1.0]),
        prompt_messages=[USER, REPLY, {"role": "user", "content": "c"}],
        response_message=REPLY,
    )
    samples = manager.get_trajectory("a", base_sample=Sample(), max_sample_tokens=6)
    assert [one.loss_mask for one in samples] == [[1, 1, 0, 0], [0, 0, 0, 0]]


def test_a_session_that_makes_no_samples_is_kept():
    """slime trains token 0 here, which nothing predicts."""
    manager = recorded(turn([], [3], [-1.0]))
    for _ in range(2):
        with pytest.raises(ExportError, match="token 0 is trained"):
            manager.get_trajectory("a", base_sample=Sample())
    assert manager.has_session("a")
    manager.drop_session("a")
    manager.drop_session("a")
    assert not manager.has_session("a")


def post_processed(samples, **changed):
    """What the hook gives for samples of (rollout, group, reward)."""
    args = {
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": False,
    }
    given = [
        SimpleNamespace(
            index=index,
            rollout_id=index,
            group_index=group,
            reward=reward,
        )
        for index, group, reward in samples
    ]
    for one in given:
        one.get_reward_value = lambda _, one=one: one.reward
    raw, rewards = reward_post_process(SimpleNamespace(**args | changed), given)
    assert raw == [reward for _, _, reward in samples]
    return rewards


# slime's own code gives 1/3, 1/3, -2/3 for these (samples.json)
SHARED = [(0, 0, 1.0), (0, 0, 1.0), (1, 0, 0.0)]
ALONE = [(0, None, 1.0), (1, None, 0.0), (2, 1, 1.0), (3, 1, 0.0)]
STD = 0.5**0.5 + 1e-6


@pytest.mark.parametrize(
    ("samples", "changed", "due"),
    [
        (SHARED, {}, [0.5, 0.5, -0.5]),
        (SHARED, {"grpo_std_normalization": True}, [0.5 / STD, 0.5 / STD, -0.5 / STD]),
        (SHARED, {"advantage_estimator": "ppo"}, [1.0, 1.0, 0.0]),
        (SHARED, {"rewards_normalization": False}, [1.0, 1.0, 0.0]),
        # rollouts without a group are groups of their own
        (ALONE, {}, [0.0, 0.0, 0.5, -0.5]),
        (ALONE, {"grpo_std_normalization": True}, [0.0, 0.0, 0.5 / STD, -0.5 / STD]),
    ],
)
def test_baselines_count_each_rollout_once(samples, changed, due):
    assert post_processed(samples, **changed) == pytest.approx(due, abs=0)


def test_baselines_that_cannot_be_or_say_nothing():
    with pytest.raises(ExportError, match=r"rollout 0: .* 1\.0 and 0\.5"):
        post_processed([(0, 0, 1.0), (0, 0, 0.5)])
    equal = [(0, 1, 0.1 + 0.2), (1, 1, 0.3)]
    with pytest.warns(NoSignalWarning, match="all 2 advantages are 0"):
        assert post_processed(equal, grpo_std_normalization=True) == [0.0, 0.0]
