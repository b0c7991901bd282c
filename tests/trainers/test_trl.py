"""A step of TRL's own trainers (1.16.0) over exported rows."""

import queue
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from torch.nn.utils import parameters_to_vector

import trajkit as tk
from benchmarks import installed_peers
from tests.torch.test_varlen import flash_attn_varlen_func
from tests.trainers.models import (
    assert_close,
    gradient,
    reference,
    row_logprobs,
    tiny_model,
    tokenizer,
)
from tests.trainers.steps import FORKED, REWARDS, missing, rows_of, token_mean
from trajkit.export import sft, trl

pytestmark = pytest.mark.filterwarnings("ignore")


def config(kind, folder, **options):
    """One step of gradient descent with rate 1: the weights move by the gradient."""
    return kind(
        output_dir=str(folder),
        max_steps=1,
        learning_rate=1.0,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        weight_decay=0.0,
        warmup_steps=0,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        **options,
    )


def logged_loss(trainer):
    return next(line["loss"] for line in trainer.state.log_history if "loss" in line)


@pytest.fixture
def async_trainer(monkeypatch, tmp_path):
    """Makes an AsyncGRPOTrainer that trains the samples in a step."""
    missing("trl.experimental.async_grpo")
    from trl.experimental.async_grpo import (
        AsyncGRPOConfig,
        AsyncGRPOTrainer,
        async_grpo_trainer,
        packing,
    )

    kernels = Mock(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setattr(packing, "_flash_attn", lambda: kernels)
    # asked of the GPU's name
    monkeypatch.setattr(
        async_grpo_trainer, "get_peak_flops_per_device", lambda device, dtype: None
    )
    tiny_model(tmp_path)

    def make(samples, micro_batches, wrapped=None):
        from datasets import Dataset

        buffer = queue.Queue()
        for sample in [*samples, *samples]:  # the loader reads a batch ahead
            buffer.put(sample)
        worker = Mock(rollout_buffer=buffer, metrics_queue=queue.Queue())
        worker.check_health.side_effect = AssertionError("the queue is empty")
        kind = AsyncGRPOTrainer if wrapped is None else wrapped(AsyncGRPOTrainer)
        arguments = config(
            AsyncGRPOConfig,
            tmp_path / "out",
            per_device_train_batch_size=len(samples) // micro_batches,
            gradient_accumulation_steps=micro_batches,
            token_budget=0,
            epsilon=1e9,
            epsilon_high=1e9,
            dtype="float32",
        )
        return kind(
            model=str(tmp_path),
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": ["t1"] * 4}),
            reward_funcs=[lambda **_: []],
            processing_class=tokenizer(),
            rollout_worker=worker,
            weight_transfer=Mock(),
        )

    return make


def trained(trainer):
    """The loss of the step, and by how much it moved the weights."""
    before = parameters_to_vector(trainer.model.parameters())
    trainer.train()
    after = parameters_to_vector(trainer.model.parameters())
    return logged_loss(trainer), (before - after).detach()


@pytest.mark.parametrize("micro_batches", [1, 2, 11])
def test_async_grpo_trains_rollouts_alike_in_any_number_of_micro_batches(
    async_trainer, micro_batches
):
    rows = rows_of(FORKED)
    # Rollouts one by one, as a worker exports them.
    samples = [
        sample
        for name in REWARDS
        for sample in trl.rollout_samples(
            rows.filter(pc.equal(rows["session_id"], name)),
            weighted=True,
        )
    ]
    trainer = async_trainer(
        samples, micro_batches, lambda kind: trl.by_rollout(kind, len(REWARDS))
    )
    loss, moved = trained(trainer)
    model = tiny_model()
    due = reference(model, rows)
    assert due.rl_count == len(REWARDS)
    assert_close(loss, due.total)
    assert_close(moved, gradient(model, due.total))


def test_async_grpo_without_weights_counts_tokens_of_a_micro_batch_alike(async_trainer):
    rows = rows_of(FORKED)
    loss, moved = trained(async_trainer(trl.rollout_samples(rows), 1))
    model = tiny_model()
    due = reference(model, token_mean(rows), reduce="sum").total
    assert_close(loss, due)
    assert_close(moved, gradient(model, due))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_grpo_takes_recorded_rollouts(tmp_path, micro_batches):
    """Its ratio is to its own logprobs: without vLLM it does not read the recorded ones."""
    missing("trl")
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rows = rows_of(dict.fromkeys(REWARDS, 1))
    fields = trl.rollout_func_fields(rows, num_generations=2)
    model = tiny_model()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[lambda reward, **_: reward],
        args=config(
            GRPOConfig,
            tmp_path,
            per_device_train_batch_size=4 // micro_batches,
            gradient_accumulation_steps=micro_batches,
            num_generations=2,
            scale_rewards="none",
            beta=0.0,
            loss_type="dapo",
            shuffle_dataset=False,
            max_completion_length=64,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["t1", "t2"]}),
        processing_class=tokenizer(),
        rollout_func=lambda prompts, trainer: fields,
    )
    loss, moved = trained(trainer)
    model = tiny_model()
    current = rows_of_model(rows, model)
    due = reference(model, token_mean(current), reduce="sum").total
    assert_close(moved, gradient(model, due))
    assert loss == pytest.approx(float(due), abs=1e-4)
    assert torch.isfinite(moved).all()


def rows_of_model(rows, model):
    """The rows as if the model itself had sampled them."""
    values = [
        [
            float(value) if trained else None
            for value, trained in zip(row_logprobs(model, ids), mask, strict=True)
        ]
        for ids, mask in zip(
            rows["input_ids"].to_pylist(), rows["loss_mask"].to_pylist(), strict=True
        )
    ]
    at = rows.column_names.index("logprobs")
    field = rows.schema.field(at)
    return rows.set_column(at, field, pa.array(values, field.type))


@pytest.mark.parametrize("packing", [False, True])
def test_sft_takes_the_mean_over_trained_tokens(tmp_path, packing):
    missing("trl")
    from trl import SFTConfig, SFTTrainer

    rows = rows_of(FORKED)
    longest = max(map(len, rows["input_ids"].to_pylist()))
    trainer = SFTTrainer(
        model=tiny_model(),
        args=config(
            SFTConfig,
            tmp_path,
            per_device_train_batch_size=22,
            max_length=4 * longest if packing else longest,
            packing=packing,
            padding_free=False,
        ),
        train_dataset=sft.dataset(rows, max_length=longest),
        processing_class=tokenizer(),
    )
    if packing:
        assert len(trainer.train_dataset) < 22
    loss, moved = trained(trainer)
    model = tiny_model()
    weights = [list(map(float, mask)) for mask in rows["loss_mask"].to_pylist()]
    learned = reference(
        model, rows.append_column("observation_weight", pa.array(weights))
    )
    due = learned.observation_sum / learned.observation_count
    assert_close(loss, due, 1e-3)
    assert_close(moved, gradient(model, due), 1e-3)


def test_sft_drops_rows_beyond_its_default_length(tmp_path):
    """What the export warns of: rows are cut at 1024, and those without a label vanish."""
    missing("trl")
    from trl import SFTConfig, SFTTrainer

    turns = tk.from_records(
        [{"session_id": "a", "prompt_ids": [1] * 1100, "output_ids": [2, 3]}]
    )
    with pytest.warns(tk.errors.LongRowsWarning, match="1102 tokens"):
        dataset = sft.dataset(tk.linearize(turns))
    for length, kept in ((None, 1), (1024, 0)):
        options = {} if length == SFTConfig.max_length else {"max_length": length}
        trainer = SFTTrainer(
            model=tiny_model(),
            args=config(SFTConfig, tmp_path, **options),
            train_dataset=dataset,
            processing_class=tokenizer(),
        )
        assert len(trainer.train_dataset) == kept


@pytest.mark.parametrize("ours", [0, 1])
def test_the_benchmark_compares_the_rows_that_it_times(ours, monkeypatch, capsys):
    """TRL's function gets the calls of seed 0, trajkit those of another, or the same."""
    missing("trl.experimental.async_grpo.async_rollout_worker")
    seeds = iter([0, ours])
    monkeypatch.setattr(
        installed_peers,
        "drawn",
        lambda shape, size, n: [installed_peers.calls(shape, size, next(seeds))],
    )
    words = ["--size", "small", "--shape", "siblings", "--repeats", "1"]
    installed_peers.main([*words, "--python", "skyrl=/bin/false"])
    out = capsys.readouterr().out
    assert "skyrl: not timed: it does not run" in out
    (line,) = (line for line in out.splitlines() if line.startswith("siblings"))
    assert ("other rows: s1, row 0" if ours else "rows, equal") in line
