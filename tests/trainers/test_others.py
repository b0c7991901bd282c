"""The code of verl 0.9.1, Tinker 0.38.0 with its cookbook 0.6.1, and OpenRLHF 0.11.2.

What these packages need a GPU or a service for is left out: verl's workers, Tinker's server
(whose losses over tokens are restated here), and OpenRLHF's engines, whose modules are
replaced before the import.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import trajkit as tk
from tests.trainers.models import (
    assert_close,
    gradient,
    reference,
    row_logprobs,
    tiny_model,
)
from tests.trainers.steps import FORKED, REWARDS, calls, missing, rows_of, token_mean
from trajkit.export import openrlhf, tinker, verl

pytestmark = pytest.mark.filterwarnings("ignore")


def response_logprobs(model, ids, width, start):
    """The logprobs of the tokens from ``start``, padded right."""
    own = row_logprobs(model, ids)[start:]
    return torch.cat([own, own.new_zeros(width - len(own))])


def test_verl_takes_the_mean_over_trained_tokens():
    """Its trainer v1 computes advantages over rollouts, its ``agg_loss`` counts tokens."""
    missing("verl", "verl.trainer.ppo.v1.utils")
    from verl.trainer.ppo.core_algos import AdvantageEstimator, agg_loss
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    rows = rows_of(FORKED)
    data = verl.data_proto(rows, 40, 8, 0)
    data.batch["token_level_rewards"] = data.batch["rm_scores"]
    keys = [
        f"{one['extra_fields']['uid']}_{number}_{index}"
        for number, rollout in enumerate(verl.agent_loop_fields(rows))
        for index, one in enumerate(rollout)
    ]
    data = compute_advantage_for_multi_trajectories(
        data, keys, AdvantageEstimator.GRPO, norm_adv_by_std_in_grpo=False
    )
    model, mask = tiny_model(), data.batch["response_mask"]
    new = torch.stack(
        [
            response_logprobs(model, row["input_ids"], 8, row["prompt_length"])
            for row in rows.to_pylist()
        ]
    )
    ratio = torch.exp(new - data.batch["rollout_log_probs"])
    total = agg_loss(
        -data.batch["advantages"] * ratio,
        mask,
        loss_agg_mode="token-mean",
        batch_num_tokens=int(mask.sum()),
    )
    due = reference(model, token_mean(rows), reduce="sum").total
    assert_close(total, due)
    assert_close(gradient(model, total), gradient(model, due))


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_tinker_sums_over_rollouts(reduce):
    """Its importance sampling: the sum over targets of -advantage * ratio."""
    missing("tinker")

    rows = rows_of(FORKED)
    if reduce == "sum":
        rows = tk.add_weights(rows, "rollout")
    model, total = tiny_model(), 0.0
    for datum in tinker.datums(rows, reduce=reduce):
        given = {k: v.to_torch() for k, v in datum.loss_fn_inputs.items()}
        ids = [*datum.model_input.to_ints(), int(given["target_tokens"][-1])]
        ratio = torch.exp(row_logprobs(model, ids)[1:] - given["logprobs"])
        total = total - (given["advantages"] * ratio).sum()
    due = reference(model, rows, reduce=reduce).rl_sum
    assert_close(total, due)
    assert_close(gradient(model, total), gradient(model, due))


def test_tinkers_cookbook_makes_the_same_data_and_advantages():
    """From the same calls, by its own merge and baselines."""
    missing("tinker", "tinker_cookbook.rl.data_processing")
    import tinker as sdk
    from tinker_cookbook.completers import TokensWithLogprobs
    from tinker_cookbook.rl import data_processing
    from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition

    n_rows = {"a": 3, "b": 1, "c": 2, "d": 1}
    groups = []
    for names in ("ab", "cd"):
        trajectories = [
            Trajectory(
                transitions=[
                    Transition(
                        ob=sdk.ModelInput.from_ints(call["prompt_ids"]),
                        ac=TokensWithLogprobs(
                            tokens=call["output_ids"],
                            maybe_logprobs=call["output_logprobs"],
                        ),
                        reward=0.0,
                        episode_done=False,
                    )
                    for call in calls(name, n_rows[name])
                ],
                final_ob=sdk.ModelInput.empty(),
            )
            for name in names
        ]
        rewards = [REWARDS[name] for name in names]
        groups.append(TrajectoryGroup(trajectories, rewards, [{} for _ in names]))
    gains = data_processing.compute_advantages(groups)
    due, _ = data_processing.assemble_training_data(groups, gains, False)
    found = tinker.datums(rows_of(n_rows), weighted=False)
    assert len(found) == len(due) == sum(n_rows.values())
    for one, two in zip(found, due, strict=True):
        assert one.model_input.to_ints() == two.model_input.to_ints()
        assert one.loss_fn_inputs.keys() == two.loss_fn_inputs.keys()
        for name, values in two.loss_fn_inputs.items():
            own = one.loss_fn_inputs[name]
            assert own.dtype == values.dtype
            assert list(own.data) == pytest.approx(list(values.data))


class Absent(ModuleType):
    """A module whose names are there and of no use."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return object


@pytest.fixture
def openrlhf_code(monkeypatch):
    """OpenRLHF's modules, with what they import for engines replaced."""
    # transformers looks for deepspeed while it is imported
    missing("transformers", "ray", "openrlhf")
    for name in (
        "deepspeed",
        "vllm",
        "openrlhf.models.actor",
        "openrlhf.models.model",
        "openrlhf.models.ring_attn_utils",
        "openrlhf.trainer.ray.launcher",
        "openrlhf.trainer.ray.vllm_engine",
    ):
        monkeypatch.setitem(sys.modules, name, Absent(name))
    from openrlhf.models.loss import PolicyLoss
    from openrlhf.trainer.ppo_utils import experience_maker, samples_generator

    monkeypatch.delitem(sys.modules, "deepspeed")
    return samples_generator, experience_maker, PolicyLoss


def test_openrlhf_takes_the_mean_over_trained_tokens(openrlhf_code):

    samples_generator, experience_maker, policy_loss = openrlhf_code
    rows = rows_of(dict.fromkeys(REWARDS, 1))
    model = tiny_model()
    generator = object.__new__(samples_generator.SamplesGenerator)
    experiences = []
    for number, fields in enumerate(openrlhf.execution_fields(rows)):
        one = generator._process_response_into_experience(fields, max_len=2048)
        one.index = [number]
        one.kl = torch.zeros_like(one.rollout_log_probs)
        experiences.append(one)
    maker = object.__new__(experience_maker.RemoteExperienceMaker)
    maker.advantage_estimator = "dr_grpo"
    maker.kl_ctl = SimpleNamespace(value=0.0)
    maker.strategy = SimpleNamespace(
        args=SimpleNamespace(
            rollout=SimpleNamespace(n_samples_per_prompt=2),
            algo=SimpleNamespace(
                advantage=SimpleNamespace(
                    estimator="dr_grpo", gamma=1.0, no_std_norm=True
                )
            ),
            reward=SimpleNamespace(
                clip_range=(-10, 10),
                overlong_buffer_len=None,
                stop_properly_penalty_coef=None,
            ),
        )
    )
    experiences = maker.compute_advantages_and_returns(experiences)
    tokens = float(sum(one.action_mask.sum() for one in experiences))
    loss = policy_loss(clip_eps_low=1.0, clip_eps_high=1e9)
    total = 0.0
    for one in experiences:
        found = loss(
            row_logprobs(model, one.sequences[0].tolist())[None, 1:],
            one.rollout_log_probs,
            one.advantages,
            action_mask=one.action_mask,
            batch_num_tokens=tokens,
        )
        total = total + found[0]
    due = reference(model, token_mean(rows), reduce="sum").total
    assert_close(total, due)
    assert_close(gradient(model, total), gradient(model, due))
