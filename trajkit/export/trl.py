"""Rows for TRL's GRPOTrainer and AsyncGRPOTrainer.

Source: TRL 1.16.0 (``trainer/grpo_trainer.py``, ``experimental/async_grpo``).
"""

from typing import Any

import numpy as np

from trajkit._arguments import check_number, chosen_int
from trajkit.errors import ExportError
from trajkit.export import _rows as shared

_RUNS = "num_generations"
_GRPO = shared.Target("GRPOTrainer", "reward or null", runs=_RUNS, response=True)
_ASYNC = shared.Target("AsyncGRPOTrainer", "advantage")


def rollout_func_fields(
    rows: shared.TableLike, *, num_generations: int | None = None
) -> dict[str, list[Any]]:
    """Rows as the dict that a ``rollout_func`` of GRPOTrainer returns.

    Rollouts have one row each, in the order of the prompts that the trainer passed, each
    ``num_generations`` times (that of the trainer; None: as often as the first).

    The trainer reads ``logprobs`` only with ``use_vllm`` and
    ``vllm_importance_sampling_correction``. Otherwise its ratio is to its own logprobs. It
    leaves rollouts whose ``reward`` is None out of the baseline.
    """
    checked = shared.checked_rows(rows, _GRPO, group_size=num_generations)
    return {
        "prompt_ids": [row.prompt_ids for row in checked],
        "completion_ids": [row.response_ids for row in checked],
        "logprobs": [row.response_logprobs for row in checked],
        "env_mask": [row.response_mask for row in checked],
        "reward": [row.reward for row in checked],
    }


def rollout_sample_fields(
    rows: shared.TableLike,
    *,
    model_version: int = 0,
    first_group_id: int = 0,
    weighted: bool = False,
) -> list[dict[str, Any]]:
    """Rows as the keywords of AsyncGRPOTrainer's ``RolloutSample``, a dict per row.

    ``input_ids`` and ``completion_mask`` are int64, ``old_log_probs`` float32, of shape
    (n_tokens,).

    Parameters
    ----------
    rows : table
        With an advantage per row.
    model_version : int
        The weights that sampled the rows; the trainer drops samples that are too old.
    first_group_id : int
        ``group_id`` of the first group. Groups count up in order of the rows.
    weighted : bool
        Fold row weights into the advantages, for a trainer of `by_rollout` and no other.
        False: each trained token of a micro-batch weighs the same.
    """
    chosen_int("model_version", model_version, 0)
    chosen_int("first_group_id", first_group_id, 0)
    return [
        {
            "prompt": [],
            "completion": [],
            "input_ids": row.input_ids.astype(np.int64),
            "completion_mask": row.loss_mask.astype(np.int64),
            "old_log_probs": row.logprobs,
            "advantage": row.advantage * row.scale,
            "model_version": model_version,
            "group_id": first_group_id + row.group,
            "metrics": {} if row.reward is None else {"reward": row.reward},
        }
        for row in shared.checked_rows(rows, _ASYNC, weighted=weighted)
    ]


_SAMPLE = "trl.experimental.async_grpo.async_rollout_worker:RolloutSample"
rollout_samples = shared.objects_of(rollout_sample_fields, _SAMPLE)


def by_rollout(trainer: type[Any], rollouts: float) -> type[Any]:
    """AsyncGRPOTrainer with a loss that is a sum over rollouts, for weighted samples.

    The trainer divides each micro-batch by its trained tokens and by the number of
    micro-batches. This subclass of ``trainer`` divides by ``rollouts`` instead, such as
    the rollouts that a step has on average: its loss is the ``rl_sum`` of
    `trajkit.learn.reference_loss` over ``rollouts``, in any number of micro-batches.
    """
    check_number("rollouts", rollouts, 0, above=True)

    class ByRollout(trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kw: Any) -> Any:
            if self.aux_loss_enabled:
                raise ExportError(
                    "by_rollout would weigh the router's auxiliary loss as well: set "
                    "router_aux_loss_coef=0"
                )
            loss = super().compute_loss(model, inputs, *args, **kw)
            ranks = self.accelerator.num_processes
            tokens = inputs["global_n_tokens"][0].clamp(min=ranks)
            parts = self.current_gradient_accumulation_steps
            return loss * (tokens.to(loss) * parts / rollouts)

    ByRollout.__name__ = f"{trainer.__name__}ByRollout"
    return ByRollout
