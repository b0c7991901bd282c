"""Rows for TRL's GRPOTrainer and AsyncGRPOTrainer.

Source: TRL 1.16.0 (``trainer/grpo_trainer.py``, ``experimental/async_grpo``).
"""

from typing import Any

import numpy as np

from trajkit._arguments import chosen_int
from trajkit.errors import ExportError
from trajkit.export._rows import (
    advantages_of,
    checked_rows,
    groups_in_order,
    objects_of,
    one_row_per_rollout,
    rewards_of,
    token_scales,
)
from trajkit.learn._checks import check_number
from trajkit.tables.canonical import TableLike


def rollout_func_fields(
    rows: TableLike, *, num_generations: int | None = None
) -> dict[str, list[Any]]:
    """Rows as the dict that a ``rollout_func`` of GRPOTrainer returns.

    The trainer reads ``logprobs`` with ``use_vllm`` and
    ``vllm_importance_sampling_correction`` alone. Otherwise its ratio is that to its own
    logprobs, and the engine's are ignored.

    Parameters
    ----------
    rows : table
        With one row per rollout, in the order of the prompts that the trainer passed:
        each ``num_generations`` times. The trainer takes runs of rows for groups.
    num_generations : int, optional
        That of the trainer. None: the number of rows of the first group.

    Returns
    -------
    dict of str to list
        ``prompt_ids``, ``completion_ids``, ``logprobs`` and ``env_mask`` (1: sampled);
        and ``reward``, which reward functions receive. A null reward stays None, and TRL
        leaves such a rollout out of the baseline.

    Raises
    ------
    ExportError
        A rollout has several rows; the rows of a group are no neighbours, or not
        ``num_generations``.
    """
    checked = checked_rows(rows, "GRPOTrainer", response=True)
    one_row_per_rollout(checked, "GRPOTrainer")
    groups_in_order(checked, "GRPOTrainer", "num_generations", num_generations)
    return {
        "prompt_ids": [row.prompt for row in checked],
        "completion_ids": [row.response(row.input_ids) for row in checked],
        "logprobs": [row.response(row.logprobs) for row in checked],
        "env_mask": [row.response(row.loss_mask) for row in checked],
        "reward": rewards_of(checked, null=True),
    }


def rollout_sample_fields(
    rows: TableLike,
    *,
    model_version: int = 0,
    first_group_id: int = 0,
    weighted: bool = False,
) -> list[dict[str, Any]]:
    """Rows as the keyword arguments of AsyncGRPOTrainer's ``RolloutSample``.

    Parameters
    ----------
    rows : table
        With a column ``advantage``.
    model_version : int
        The weights that sampled the rows; the trainer drops samples that are too old.
    first_group_id : int
        ``group_id`` of the first group. Groups count up in order of the rows.
    weighted : bool
        Multiply the advantages by what a token of the row counts in its rollout, for a
        trainer of `by_rollout`. AsyncGRPOTrainer itself divides each micro-batch by its
        own number of tokens, so it can't take weights: without `by_rollout` such samples
        train something else. False: each trained token of a micro-batch weighs the same.

    Returns
    -------
    list of dict
        One per row, with int64 and float32 arrays over the complete row.

    Raises
    ------
    ExportError
        An advantage is null or absent; with ``weighted``, a row weight is null.
    """
    chosen_int("model_version", model_version, 0)
    chosen_int("first_group_id", first_group_id, 0)
    checked = checked_rows(rows, "AsyncGRPOTrainer")
    scales = token_scales(checked) if weighted else None
    return [
        {
            "prompt": [],
            "completion": [],
            "input_ids": row.input_ids.astype(np.int64),
            "completion_mask": row.loss_mask.astype(np.int64),
            "old_log_probs": row.logprobs,
            "advantage": gain,
            "model_version": model_version,
            "group_id": first_group_id + row.group,
            "metrics": {} if row.reward is None else {"reward": row.reward},
        }
        for row, gain in zip(checked, advantages_of(checked, scales), strict=True)
    ]


@objects_of(rollout_sample_fields)
def rollout_samples(fields: list[dict[str, Any]]) -> list[Any]:
    """Rows as ``RolloutSample`` objects; see `rollout_sample_fields`."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    return [RolloutSample(**each) for each in fields]


def by_rollout(trainer: type[Any], rollouts: float) -> type[Any]:
    """AsyncGRPOTrainer with a loss that is a sum over rollouts, for weighted samples.

    The trainer divides the loss of each micro-batch by its number of trained tokens and by
    the number of micro-batches. The class that is returned multiplies by both and divides
    by ``rollouts``, so that a step's loss over weighted samples is the ``rl_sum`` of
    `trajkit.learn.reference_loss` divided by ``rollouts``, in any number of
    micro-batches and ranks.

    Parameters
    ----------
    trainer : type
        AsyncGRPOTrainer or a subclass.
    rollouts : float
        What each step divides by, such as the rollouts that a step has on average.
    """
    check_number("rollouts", rollouts, 0, above=True)

    class ByRollout(trainer):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, *args: Any, **kwargs: Any
        ) -> Any:
            if self.aux_loss_enabled:
                raise ExportError(
                    "by_rollout would weigh the router's auxiliary loss as well: set "
                    "router_aux_loss_coef=0"
                )
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            tokens = inputs["global_n_tokens"][0].clamp(
                min=self.accelerator.num_processes
            )
            parts = self.current_gradient_accumulation_steps
            return loss * (tokens.to(loss) * parts / rollouts)

    ByRollout.__name__ = f"{trainer.__name__}ByRollout"
    return ByRollout
