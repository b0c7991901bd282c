"""Rows as slime's ``Sample`` objects, and a manager that records turns for slime.

Source: slime at 624b824 (``slime/utils/types.py``, ``slime/ray/rollout.py``,
``slime/agent/trajectory.py``); spec, training formats 1.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trajkit._arrow.canonical import TableLike
from trajkit.errors import ExportError
from trajkit.export._rows import (
    FLAGS,
    ExportRow,
    checked_rows,
    objects_of,
    rewards_of,
    routed_experts,
)
from trajkit.policies import Policy
from trajkit.policies import policy as named_policy
from trajkit.recorder import Recorder

_LOG = logging.getLogger(__name__)


def sample_fields(
    rows: TableLike, *, first_index: int = 0, first_group_index: int = 0
) -> list[dict[str, Any]]:
    """Rows as the dicts that ``Sample.from_dict`` takes and debug files contain.

    Parameters
    ----------
    rows : table
        A payload ``routed_experts`` is carried along, without the entry of the last
        token.
    first_index, first_group_index : int
        ``index`` and ``rollout_id`` of the first rollout, and ``group_index`` of the first
        group. They count up in order of the rows.

    Returns
    -------
    list of dict
        One per row. All rows of a rollout have its full reward and the same
        ``rollout_id``, so slime's loss divides by ``rollout_mask_sum`` as
        ``add_weights(rows, "rollout")`` does.

    Raises
    ------
    ExportError
        A reward is null.
    """
    checked = checked_rows(rows, response=True)
    rewards = rewards_of(checked)
    experts = routed_experts(rows)
    samples = []
    for row, reward in zip(checked, rewards, strict=True):
        fields = _fields(row, reward)
        fields["group_index"] = first_group_index + row.group
        fields["index"] = fields["rollout_id"] = first_index + row.rollout
        if experts is not None:
            fields["rollout_routed_experts"] = experts[row.line][:-1]
        samples.append(fields)
    return samples


def _fields(row: ExportRow, reward: float) -> dict[str, Any]:
    versions = row.weight_versions or {}
    return {
        "tokens": row.input_ids.tolist(),
        "response_length": len(row.input_ids) - row.prompt_length,
        "reward": reward,
        "loss_mask": row.response(row.loss_mask),
        "rollout_log_probs": row.response(row.logprobs),
        "status": "truncated" if row.truncated else "completed",
        "weight_versions": list(dict.fromkeys(filter(None, versions.values()))),
        "metadata": {
            "session_id": row.session_id,
            "row_index": row.row_index,
            **{name: getattr(row, name) for name in FLAGS},
        },
    }


@objects_of(sample_fields)
def samples(fields: list[dict[str, Any]]) -> list[Any]:
    """Rows as ``slime.utils.types.Sample`` objects; see `sample_fields`."""
    from slime.utils.types import Sample

    return [Sample.from_dict(each) for each in fields]


def write_debug_rollout(rows: TableLike, path: str | Path, rollout_id: int = 0) -> None:
    """Write a file for slime's ``--load-debug-rollout-data`` with ``torch.save``.

    Parameters
    ----------
    path : str or Path
        The file. slime replaces ``{rollout_id}`` in its option by the number of the step.
    rollout_id : int
        The number of the step.
    """
    import torch

    fields = sample_fields(rows)
    torch.save({"rollout_id": rollout_id, "samples": fields}, path)


def reward_post_process(
    args: Any, samples: Sequence[Any]
) -> tuple[list[float], list[float]]:
    """Baselines over rollouts, for slime's ``--custom-reward-post-process-path``.

    slime's own function centres over the rows of the batch as soon as a rollout has
    several. This one counts each ``rollout_id`` once within its ``group_index``. With
    ``args.grpo_std_normalization`` it divides by the group's sample standard deviation
    plus 1e-6, as slime does.

    Parameters
    ----------
    args : namespace
        slime's arguments: ``advantage_estimator``, ``rewards_normalization``,
        ``grpo_std_normalization`` and ``reward_key`` are read.
    samples : sequence of Sample

    Returns
    -------
    raw_rewards, rewards : list of float
        One per sample.

    Raises
    ------
    ExportError
        A sample has no ``rollout_id``, or the samples of a rollout differ in reward.
    """
    raw = [float(sample.get_reward_value(args)) for sample in samples]
    estimators = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
    if not args.rewards_normalization or args.advantage_estimator not in estimators:
        return raw, raw
    groups: dict[object, dict[object, float]] = {}
    for sample, reward in zip(samples, raw, strict=True):
        rollout = sample.index if sample.rollout_id is None else sample.rollout_id
        if rollout is None:
            raise ExportError(
                "a sample has neither rollout_id nor index: rows of one rollout must "
                "share one"
            )
        known = groups.setdefault(sample.group_index, {}).setdefault(rollout, reward)
        if known != reward:
            raise ExportError(
                f"rollout {rollout}: its samples have rewards {known} and {reward}: "
                "expected one reward"
            )
    rewards = []
    for sample, reward in zip(samples, raw, strict=True):
        rollouts = list(groups[sample.group_index].values())
        gain = reward - sum(rollouts) / len(rollouts)
        scales = args.advantage_estimator != "reinforce_plus_plus_baseline"
        if scales and args.grpo_std_normalization:
            std = float(np.std(rollouts, ddof=1)) if len(rollouts) > 1 else 0.0
            gain /= std + 1e-6
        rewards.append(gain)
    return raw, rewards


class TrajectoryManager:
    """A drop-in for ``slime.agent.trajectory.TrajectoryManager`` with any policy.

    Assign it to an adapter: ``adapter.manager = TrajectoryManager(policy="faithful")``.

    Parameters
    ----------
    policy : str or Policy
        How turns become samples. ``"slime"`` gives the samples of slime's own manager.
    fork_threshold_tokens : int, optional
        ``fork_threshold`` of the policy, under slime's name.
    """

    def __init__(
        self,
        policy: str | Policy = "slime",
        *,
        fork_threshold_tokens: int | None = None,
    ) -> None:
        choices = {}
        if fork_threshold_tokens is not None:
            choices["fork_threshold"] = fork_threshold_tokens
        self._policy = named_policy(policy, **choices)
        self._recorder = Recorder()

    def has_session(self, sid: str) -> bool:
        """Whether the session has a recorded turn."""
        return self._recorder.has_session(sid)

    def turn_count(self, sid: str) -> int:
        """Number of recorded turns, 0 for an unknown session."""
        return self._recorder.n_turns(sid) if self.has_session(sid) else 0

    def record_turn(
        self,
        sid: str,
        *,
        turn: Any,
        prompt_messages: Sequence[dict[str, Any]],
        response_message: dict[str, Any] | None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Record one turn.

        Parameters
        ----------
        turn : TurnRecord
            slime's record: ``prompt_ids``, ``output_ids``, ``finish_reason``,
            ``output_log_probs`` and ``ill_formed`` are read.
        prompt_messages : sequence of dict
            Without messages the turn is not recorded, as in slime.
        metadata : mapping, optional
            Not read; slime keeps it in its tree only.
        """
        if not prompt_messages:
            _LOG.warning("session %r: a turn without messages is not recorded", sid)
            return
        n_logprobs, n_output = len(turn.output_log_probs), len(turn.output_ids)
        assert n_logprobs in (0, n_output), (
            f"session {sid!r}: output_log_probs has {n_logprobs} values for {n_output} "
            "output ids"
        )
        self._recorder.record(
            sid,
            prompt_ids=turn.prompt_ids,
            output_ids=turn.output_ids,
            output_logprobs=turn.output_log_probs or None,
            finish_reason=turn.finish_reason,
            ill_formed=turn.ill_formed,
            prompt_messages=list(prompt_messages),
            response_message=response_message,
        )

    def get_trajectory(
        self,
        sid: str,
        *,
        base_sample: Any,
        reward: float = 0.0,
        extra_metadata: Mapping[str, Any] | None = None,
        max_sample_tokens: int = 0,
    ) -> list[Any]:
        """The samples of a session, which is then forgotten; [] for an unknown one.

        Parameters
        ----------
        base_sample : Sample
            ``index``, ``group_index``, ``rollout_id``, ``prompt`` and ``label`` are copied.
        reward : float
            The reward of every sample.
        extra_metadata : mapping, optional
            Added to the metadata of every sample.
        max_sample_tokens : int
            Truncate samples to this many tokens; 0 does not.
        """
        if not self.has_session(sid):
            return []
        popped = self._recorder.pop(
            sid, self._policy, max_row_tokens=max_sample_tokens or None
        )
        rollout_id = base_sample.rollout_id
        found = []
        for row in checked_rows(popped.rows, response=True, logprobs=False):
            fields = _fields(row, reward)
            # The shortest decimals of the same float32, as slime's own manager keeps them.
            fields["rollout_log_probs"] = [
                float(str(each)) for each in row.logprobs[row.prompt_length :]
            ]
            fields["metadata"] = {
                **(extra_metadata or {}),
                **{name: getattr(row, name) for name in FLAGS},
            }
            status = type(base_sample.status)
            found.append(
                type(base_sample)(
                    **{**fields, "status": status.COMPLETED},
                    index=base_sample.index,
                    group_index=base_sample.group_index,
                    rollout_id=base_sample.index if rollout_id is None else rollout_id,
                    prompt=base_sample.prompt,
                    label=base_sample.label,
                )
            )
        return found

    def drop_session(self, sid: str) -> None:
        """Forget a session; an unknown one is ignored, as in slime."""
        if self.has_session(sid):
            self._recorder.drop(sid)
