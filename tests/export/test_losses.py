"""Each trainer's loss over exported rows is the reference loss of the rows.

The rule of each trainer is restated here from its source, over the exported fields alone.
Where a trainer is known to go wrong with several rows per rollout, its own way is restated
as well, to show that these rows would reveal it.
"""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

import trajkit as tk
from trajkit.export import (
    areal,
    nemo_rl,
    openrlhf,
    prime_rl,
    sft,
    skyrl,
    slime,
    tinker,
    trl,
    verl,
)

VOCABULARY = 50
TEMPERATURE = 0.7
REWARDS = {"a": 1.0, "b": 0.0, "c": 0.5, "d": -1.0}
GROUPS = {"a": "g", "b": "g", "c": "h", "d": "h"}


def calls(session, n_rows):
    """A session whose replies come back changed, so that each call opens a row."""
    draw = np.random.default_rng(ord(session))
    prompt = [1, 2, ord(GROUPS[session]) - 90]
    for _ in range(n_rows):
        output = draw.integers(20, VOCABULARY, draw.integers(2, 6)).tolist()
        yield {
            "session_id": session,
            "prompt_ids": prompt,
            "output_ids": output,
            "output_logprobs": (-draw.exponential(0.5, len(output))).tolist(),
        }
        prompt = [*prompt, output[0] - 10, *output[1:], 3]


def rows_of(n_rows):
    """Rows of four rollouts, each with the advantage over its group's mean."""
    sessions = pa.table(
        {
            "session_id": list(REWARDS),
            "reward": list(REWARDS.values()),
            "group_id": list(GROUPS.values()),
        }
    )
    turns = [call for name, n in n_rows.items() for call in calls(name, n)]
    rows = tk.linearize(tk.from_records(turns), sessions=sessions)
    assert len(rows) == sum(n_rows.values())
    return tk.add_advantages(rows, tk.learn.advantages(sessions))


@pytest.fixture
def forked():
    return rows_of({"a": 2, "b": 1, "c": 3, "d": 1})


@pytest.fixture
def single():
    return rows_of(dict.fromkeys(REWARDS, 1))


def logits(ids):
    """A model's logits after each token, which depend on all tokens up to it."""
    seeds = np.cumsum(np.array(ids, np.int64) * np.arange(7, 7 + len(ids)))
    return np.stack([np.random.default_rng(seed).normal(size=60) for seed in seeds])


def logprobs(ids, temperatures):
    """Of each token after those before it; each logit divided by its own temperature."""
    scaled = logits(ids) / np.array(temperatures)[:, None]
    chosen = scaled[np.arange(len(ids) - 1), ids[1:]]
    return np.append(0.0, chosen - np.log(np.exp(scaled[:-1]).sum(1)))


def now(ids):
    return logprobs(ids, [TEMPERATURE] * len(ids))


def reference(rows):
    flat = np.concatenate([now(ids) for ids in rows["input_ids"].to_pylist()])
    return float(tk.learn.reference_loss(rows, flat).total)


def token_mean(rows):
    """The reference loss in which every trained token of the batch counts the same."""
    n = sum(map(sum, rows["loss_mask"].to_pylist())) / len(set(rows["session_id"]))
    weighed = tk.add_weights(rows, "constant", constant=n)
    flat = np.concatenate([now(ids) for ids in rows["input_ids"].to_pylist()])
    return float(tk.learn.reference_loss(weighed, flat, reduce="sum").total)


def terms(gain, new, old):
    return -np.asarray(gain) * np.exp(np.asarray(new) - np.asarray(old))


def group_means(groups, rewards):
    """Each reward minus the mean of those of its group."""
    return [
        reward
        - np.mean([r for g, r in zip(groups, rewards, strict=True) if g == group])
        for group, reward in zip(groups, rewards, strict=True)
    ]


def differ(a, b):
    return abs(a - b) > 1e-3 * max(abs(a), abs(b))


def slime_loss(samples, rewards):
    """``get_sum_of_sample_mean``: by the trained tokens of a rollout, per rollout."""
    sums = {}
    for sample in samples:
        key = sample["rollout_id"]
        sums[key] = sums.get(key, 0) + sum(sample["loss_mask"])
    total = 0.0
    for sample, gain in zip(samples, rewards, strict=True):
        new = now(sample["tokens"])[-sample["response_length"] :]
        part = terms(gain, new, sample["rollout_log_probs"])
        masked = part * np.array(sample["loss_mask"])
        total += masked.sum() / sums[sample["rollout_id"]]
    return total / len(sums)


def test_slime(forked):
    samples = slime.sample_fields(forked)
    args = SimpleNamespace(
        advantage_estimator="grpo",
        rewards_normalization=True,
        grpo_std_normalization=False,
    )
    given = [
        SimpleNamespace(**one, get_reward_value=lambda args, one=one: one["reward"])
        for one in samples
    ]
    _, rewards = slime.reward_post_process(args, given)
    assert slime_loss(samples, rewards) == pytest.approx(reference(forked))
    raw = np.array([sample["reward"] for sample in samples])
    assert differ(slime_loss(samples, raw - raw.mean()), reference(forked))


def verl_loss(rollouts):
    """Trainer v1: the advantage of the last output's first trained token, for all."""
    finals = []
    uids = [rollout[-1]["extra_fields"]["uid"] for rollout in rollouts]
    scores = group_means(uids, [rollout[-1]["reward_score"] for rollout in rollouts])
    for rollout, score in zip(rollouts, scores, strict=True):
        mask = np.array(rollout[-1]["response_mask"])
        finals.append((score * mask)[mask.argmax()])
    total, n = 0.0, 0
    for rollout, gain in zip(rollouts, finals, strict=True):
        for one in rollout:
            mask = np.array(one["response_mask"])
            new = now(one["prompt_ids"] + one["response_ids"])[-len(mask) :]
            total += (terms(gain, new, one["response_logprobs"]) * mask).sum()
            n += mask.sum()
    return total / n


def test_verl(forked):
    rollouts = verl.agent_loop_fields(forked)
    assert verl_loss(rollouts) == pytest.approx(token_mean(forked))
    untrained = {**rollouts[0][-1], "response_mask": [0]}
    untrained |= {"response_ids": [5], "response_logprobs": [0.0]}
    rollouts[0].append(untrained)
    assert differ(verl_loss(rollouts), token_mean(forked))


def test_trl(single):
    """``dapo``: the mean over the tokens of the batch; groups are consecutive."""
    fields = trl.rollout_func_fields(single)
    gains = group_means([k // 2 for k in range(4)], fields["reward"])
    total, n = 0.0, 0
    for k, gain in enumerate(gains):
        mask = np.array(fields["env_mask"][k])
        new = now(fields["prompt_ids"][k] + fields["completion_ids"][k])[-len(mask) :]
        total += (terms(gain, new, fields["logprobs"][k]) * mask).sum()
        n += mask.sum()
    assert total / n == pytest.approx(token_mean(single))


@pytest.mark.parametrize("weighted", [False, True])
def test_trl_async(forked, weighted):
    """Weighted samples are for a trainer of `trl.by_rollout`, which divides by rollouts."""
    total, n = 0.0, 0
    for sample in trl.rollout_sample_fields(forked, weighted=weighted):
        mask = sample["completion_mask"]
        new = now(sample["input_ids"].tolist())
        total += (terms(sample["advantage"], new, sample["old_log_probs"]) * mask).sum()
        n += mask.sum()
    due = reference(forked) if weighted else token_mean(forked)
    divisor = len(REWARDS) if weighted else n
    assert total / divisor == pytest.approx(due, rel=1e-5)


def prime_loss(samples):
    """Logits are divided by the temperature of their own token, and then shifted."""
    total, n = 0.0, 0
    for sample in samples:
        mask = np.array(sample["mask"])
        new = logprobs(sample["token_ids"], sample["temperatures"])
        weights = np.array(sample["rl_weights"] or 1.0)
        total += (
            terms(sample["advantages"], new, sample["logprobs"]) * weights * mask
        ).sum()
        n += (mask & (weights > 0)).sum()
    return total / n


@pytest.mark.parametrize("weighted", [False, True])
def test_prime_rl(forked, weighted):
    samples = prime_rl.sample_fields(
        forked,
        env_name="e",
        temperature=TEMPERATURE,
        weighted=weighted and tk.export.step_counts(forked),
    )
    due = reference(forked) if weighted else token_mean(forked)
    assert prime_loss(samples) == pytest.approx(due, rel=1e-5)
    for sample in samples:
        # as if context did not matter
        sample["temperatures"] = [
            TEMPERATURE if trained else 1.0 for trained in sample["mask"]
        ]
    assert differ(prime_loss(samples), due)


@pytest.mark.parametrize("ranks", [1, 2])
def test_prime_rl_micro_batches(forked, ranks):
    """Sequences of a micro-batch attend themselves only."""
    found = prime_rl.micro_batch_fields(
        *(forked, 64),
        env_name="e",
        ranks=ranks,
        temperature=TEMPERATURE,
        pad_to_multiple_of=8,
        weighted=True,
    )
    total, n = 0.0, 0
    for batch in [batch for batches in found for batch in batches]:
        mask = np.array(batch["loss_mask"])
        starts = np.cumsum([0, *batch["seq_lens"]])
        assert starts[-1] == len(mask)
        new = np.concatenate(
            [
                logprobs(batch["input_ids"][a:b], batch["temperatures"][a:b])
                for a, b in pairwise(starts)
            ]
        )
        part = terms(batch["advantages"], new, batch["inference_logprobs"])
        total += (part * np.array(batch["rl_weights"] or 1.0) * mask).sum()
        n += mask.sum()
    assert total / n == pytest.approx(reference(forked), rel=1e-5)


def skyrl_loss(fields, uids):
    """Step-wise: the last step's reward for its trajectory; ``token_mean``."""
    last = [k for k, flag in enumerate(fields["is_last_step"]) if flag is True]
    gains = group_means([uids[k] for k in last], [fields["rewards"][k] for k in last])
    by_trajectory = {
        fields["trajectory_ids"][k]: gain for k, gain in zip(last, gains, strict=True)
    }
    total, n = 0.0, 0
    for k, name in enumerate(fields["trajectory_ids"]):
        mask = np.array(fields["loss_masks"][k])
        ids = fields["prompt_token_ids"][k] + fields["response_ids"][k]
        part = terms(
            by_trajectory[name], now(ids)[-len(mask) :], fields["rollout_logprobs"][k]
        )
        total += (part * mask).sum()
        n += mask.sum()
    return total / n


def test_skyrl(forked):
    fields = skyrl.generator_fields(forked)
    found = skyrl_loss(fields, skyrl.uids(forked))
    assert found == pytest.approx(token_mean(forked))
    fields["is_last_step"] = [np.bool_(flag) for flag in fields["is_last_step"]]
    with pytest.raises(KeyError):
        skyrl_loss(fields, skyrl.uids(forked))


def nemo_loss(logs, gains):
    """Messages are concatenated, and position 0 is cut off all streams."""
    total, n = 0.0, 0
    for log, gain in zip(logs, gains, strict=True):
        ids, old = (
            np.concatenate([message[name] for message in log])
            for name in ("token_ids", "generation_logprobs")
        )
        mask = np.concatenate(
            [
                np.full(len(message["token_ids"]), message["role"] == "assistant")
                for message in log
            ]
        )
        part = terms(gain, now(ids.tolist())[1:], old[1:])
        total += (part * mask[1:]).sum()
        n += mask[1:].sum()
    return total / n


def test_nemo_rl(forked):
    logs = nemo_rl.message_log_fields(forked)
    found = nemo_loss(logs, forked["advantage"].to_pylist())
    assert found == pytest.approx(token_mean(forked))
    # its own groups: rows whose first prompts have equal ids
    prompts = [tuple(log[0]["token_ids"].tolist()) for log in logs]
    own = group_means(prompts, forked["reward"].to_pylist())
    assert len({*prompts}) > len({*GROUPS.values()})
    assert differ(nemo_loss(logs, own), token_mean(forked))


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_tinker(forked, reduce):
    """The sum over targets; an advantage of 0 is the mask."""
    if reduce == "sum":
        forked = tk.add_weights(forked, "rollout")
    flat = np.concatenate([now(ids) for ids in forked["input_ids"].to_pylist()])
    due = float(tk.learn.reference_loss(forked, flat, reduce=reduce).rl_sum)
    total = 0.0
    for datum in tinker.datum_fields(forked, reduce=reduce):
        ids = [*datum["model_input"], int(datum["target_tokens"][-1])]
        total += terms(datum["advantages"], now(ids)[1:], datum["logprobs"]).sum()
    assert total == pytest.approx(due, rel=1e-5)


def areal_loss(trajectories):
    """The reward is at the last token but one and goes back over masked tokens."""
    total, n = 0.0, 0
    names = ("input_ids", "loss_mask", "logprobs", "attention_mask", "rewards")
    for one in trajectories:
        for ids, mask, old, real, reward in zip(*map(one.get, names), strict=True):
            mask, old = np.roll(mask, -1), np.roll(old, -1)
            gain = reward if mask[real.sum() - 2] else 0.0
            new = np.roll(now(ids.tolist()), -1)
            total += (terms(gain, new, old) * mask).sum()
            n += mask.sum()
    return total / n


def test_areal(forked):
    found = areal.trajectory_fields(forked, weighted=tk.export.step_counts(forked))
    assert areal_loss(found) == pytest.approx(reference(forked), rel=1e-5)
    plain = areal.trajectory_fields(forked, reward="advantage")
    assert areal_loss(plain) == pytest.approx(token_mean(forked), rel=1e-5)
    for one in found:
        for name in ("input_ids", "loss_mask", "logprobs", "attention_mask"):
            one[name] = np.pad(
                one[name], ((0, 0), (0, 2)), constant_values=name[0] == "a"
            )
        one["attention_mask"][:] = True
    assert areal_loss(found) == 0.0


def test_areal_rows_that_end_in_context(single):
    """A prompt that follows the last trained token is left out."""
    masks = single["loss_mask"].to_pylist()
    masks[0][-1] = False
    at = single.column_names.index("loss_mask")
    rows = single.set_column(
        at, "loss_mask", pa.array(masks, single.schema.field(at).type)
    )
    rows = tk.add_weights(rows)
    found = areal.trajectory_fields(rows, weighted=tk.export.step_counts(rows))
    assert areal_loss(found) == pytest.approx(reference(rows), rel=1e-5)


def test_openrlhf(single):
    """Token level; groups are consecutive; all streams without position 0."""
    found = openrlhf.execution_fields(single)
    gains = group_means([k // 2 for k in range(4)], [one["reward"] for one in found])
    total, n = 0.0, 0
    for one, gain in zip(found, gains, strict=True):
        ids = one["observation_tokens"]
        mask = np.zeros(len(ids))
        for start, stop in one["action_ranges"]:
            mask[start:stop] = 1
        part = terms(gain, now(ids)[1:], one["rollout_log_probs"][1:])
        total += (part * mask[1:]).sum()
        n += mask[1:].sum()
    assert total / n == pytest.approx(token_mean(single))


def test_sft(forked):
    """The mean negative log-likelihood of labels other than -100."""
    parts = [
        -now(row["input_ids"])[np.array(row["labels"]) != -100]
        for row in sft.labels_table(forked).to_pylist()
    ]
    weights = [
        [float(trained) for trained in mask] for mask in forked["loss_mask"].to_pylist()
    ]
    rows = forked.append_column("observation_weight", pa.array(weights))
    flat = np.concatenate([now(ids) for ids in rows["input_ids"].to_pylist()])
    loss = tk.learn.reference_loss(rows, flat)
    due = loss.observation_sum / loss.observation_count
    assert np.concatenate(parts).mean() == pytest.approx(due)
    masks = sft.mask_table(forked)["loss_mask"].to_pylist()
    assert masks == [list(map(bool, mask)) for mask in weights]
