"""Rows as slime's ``Sample`` objects, and a manager that records turns for slime.

Source: https://github.com/THUDM/slime/tree/624b824 (``slime/utils/types.py``,
``slime/ray/rollout.py``, ``slime/agent/trajectory.py``).
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np

from trajkit._arguments import chosen_int
from trajkit.errors import ExportError
from trajkit.export._rows import (
    FLAGS,
    ExportRow,
    checked_rows,
    objects_of,
    rewards_of,
    routed_experts,
    sampling_masks,
    token_values,
)
from trajkit.files.formats import replacing
from trajkit.learn.baselines import advantages
from trajkit.policies import Policy
from trajkit.policies import policy as named_policy
from trajkit.rows.linearize import linearize
from trajkit.tables.canonical import TableLike
from trajkit.turns.records import from_records

_LOG = logging.getLogger(__name__)


def sample_fields(
    rows: TableLike, *, first_index: int = 0, first_group_index: int = 0
) -> list[dict[str, Any]]:
    """Rows as the dicts that ``Sample.from_dict`` takes and debug files contain.

    Parameters
    ----------
    rows : table
        The payloads ``routed_experts`` (without the entry of the last token),
        ``sampling_mask`` and ``teacher_logprobs`` are carried along.
    first_index, first_group_index : int
        ``index`` and ``rollout_id`` of the first rollout, and ``group_index`` of the first
        group. They count up in order of the samples.

    Returns
    -------
    list of dict
        One per row, those of a group one after another. All rows of a rollout have its
        full reward and the same ``rollout_id``, so slime's loss divides by
        ``rollout_mask_sum`` as ``add_weights(rows, "rollout")`` does.

    Raises
    ------
    ExportError
        A reward is null.
    """
    carried = "routed_experts", "sampling_mask", "teacher_logprobs"
    checked = checked_rows(rows, "slime", response=True, carried=carried)
    return fields_of(rows, checked, first_index, first_group_index)


def fields_of(
    rows: TableLike, checked: list[ExportRow], first_index: int, first_group_index: int
) -> list[dict[str, Any]]:
    """`sample_fields` of rows that were checked."""
    chosen_int("first_index", first_index, 0)
    chosen_int("first_group_index", first_group_index, 0)
    experts, masks = routed_experts(rows, checked), sampling_masks(rows, checked)
    teacher = token_values(rows, checked, "teacher_logprobs")
    rollouts: dict[int, int] = {}
    samples = []
    # slime's own function takes runs of samples for groups
    for k, reward in sorted(
        enumerate(rewards_of(checked)), key=lambda each: checked[each[0]].group
    ):
        row = checked[k]
        fields = _fields(row, reward)
        fields["group_index"] = first_group_index + row.group
        number = rollouts.setdefault(row.rollout, len(rollouts))
        fields["index"] = fields["rollout_id"] = first_index + number
        if experts is not None:
            fields["rollout_routed_experts"] = experts[k].tolist()
        if masks is not None:
            ids = masks[k][row.prompt_length :]
            fields["rollout_top_p_token_ids"] = [*chain.from_iterable(ids)]
            fields["rollout_top_p_token_offsets"] = [0, *accumulate(map(len, ids))]
        if teacher[k] is not None:
            fields["teacher_log_probs"] = teacher[k][row.prompt_length :]
        samples.append(fields)
    return samples


def _fields(row: ExportRow, reward: float | None) -> dict[str, Any]:
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
    with replacing(Path(path)) as draft:
        torch.save({"rollout_id": rollout_id, "samples": fields}, draft)


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
    given = [sample.get_reward_value(args) for sample in samples]
    for number, reward in enumerate(given):
        if reward is None:
            raise ExportError(f"sample {number} has no reward: expected a number")
    raw = [*map(float, given)]
    estimators = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
    if not args.rewards_normalization or args.advantage_estimator not in estimators:
        return raw, raw
    rewards: dict[tuple[str, str], float] = {}
    keys = []
    for sample, reward in zip(samples, raw, strict=True):
        rollout = sample.index if sample.rollout_id is None else sample.rollout_id
        if rollout is None:
            raise ExportError(
                "a sample has neither rollout_id nor index: rows of one rollout must "
                "share one"
            )
        # a rollout without a group is one of its own
        group = f"group {sample.group_index}"
        if sample.group_index is None:
            group = f"rollout {rollout}"
        keys.append((group, f"{group}, rollout {rollout}"))
        first = rewards.setdefault(keys[-1], reward)
        if not math.isclose(first, reward, rel_tol=1e-9, abs_tol=1e-9):
            raise ExportError(
                f"rollout {rollout}: its samples have rewards {first} and {reward}: "
                "expected one finite reward"
            )
    of_groups = args.advantage_estimator != "reinforce_plus_plus_baseline"
    found = advantages(
        {
            "session_id": [rollout for _, rollout in rewards],
            "group_id": [group for group, _ in rewards],
            "reward": [*rewards.values()],
        },
        scale="group_std" if of_groups and args.grpo_std_normalization else "none",
    )
    # the deviation of one rollout is 0 in slime, and null here
    gains = found["advantage"].fill_null(0.0).to_pylist()
    return raw, [dict(zip(rewards, gains, strict=True))[key] for key in keys]


class TrajectoryManager:
    """A drop-in for ``slime.agent.trajectory.TrajectoryManager`` with any policy.

    Assign it to an adapter: ``adapter.manager = TrajectoryManager(policy="faithful")``.

    The adapter answers the agent before it records a turn, so `record_turn` takes what
    slime takes. A turn that trajkit cannot train is logged and counted in the metadata of
    the session's samples: ``turns_untrained`` where a logprob is above 0 or not finite, and
    ``turns_left_out`` where ids are no token ids.

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
        self._turns: dict[Any, list[dict[str, Any]]] = {}

    def has_session(self, sid: Any) -> bool:
        """Whether the session has a recorded turn."""
        return sid in self._turns

    def turn_count(self, sid: Any) -> int:
        """Number of recorded turns, 0 for an unknown session."""
        return len(self._turns.get(sid, ()))

    def record_turn(
        self,
        sid: Any,
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
        logprobs, n_output = list(turn.output_log_probs or ()), len(turn.output_ids)
        assert len(logprobs) in (0, n_output), (
            f"session {sid!r}: output_log_probs has {len(logprobs)} values for {n_output} "
            "output ids"
        )
        reason = turn.finish_reason
        record = {
            "prompt_ids": list(turn.prompt_ids),
            "output_ids": list(turn.output_ids),
            "output_logprobs": logprobs or None,
            "finish_reason": None if reason is None else str(reason),
            "ill_formed": bool(turn.ill_formed),
            "prompt_messages": [_message(message) for message in prompt_messages],
            "response_message": (
                None if response_message is None else _message(response_message)
            ),
        }
        turns = self._turns.setdefault(sid, [])
        where = f"session {sid!r}, turn {len(turns)}"
        if not all(
            isinstance(token, int | np.integer) and 0 <= token < 2**31
            for token in chain(turn.prompt_ids, turn.output_ids)
        ):
            _LOG.warning("%s: ids that are no token ids; the turn is left out", where)
            record = {}
        elif not all(-math.inf < value <= _LARGEST for value in logprobs):
            _LOG.warning("%s: a logprob that is none; the turn is not trained", where)
            record |= {"output_logprobs": None, "trainable": False}
        turns.append(record)

    def get_trajectory(
        self,
        sid: Any,
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

        Raises
        ------
        TrajkitError
            The turns make no samples. The session is kept.
        """
        if not self.has_session(sid):
            return []
        turns = self._turns[sid]
        counts = {
            "turns_left_out": sum(not turn for turn in turns),
            "turns_untrained": sum("trainable" in turn for turn in turns),
        }
        known = [
            {"session_id": "", "turn_index": number, **turn}
            for number, turn in enumerate(turns)
            if turn
        ]
        found = []
        for row in self._rows(known, max_sample_tokens or None) if known else ():
            fields = _fields(row, reward)
            fields["rollout_log_probs"] = _doubles(row, turns)
            fields["metadata"] = {
                **(extra_metadata or {}),
                **{name: getattr(row, name) for name in FLAGS},
                **{name: count for name, count in counts.items() if count},
            }
            rollout_id = base_sample.rollout_id
            found.append(
                type(base_sample)(
                    **{**fields, "status": type(base_sample.status).COMPLETED},
                    index=base_sample.index,
                    group_index=base_sample.group_index,
                    rollout_id=base_sample.index if rollout_id is None else rollout_id,
                    prompt=base_sample.prompt,
                    label=base_sample.label,
                )
            )
        self.drop_session(sid)
        return found

    def _rows(
        self, turns: list[dict[str, Any]], max_row_tokens: int | None
    ) -> list[ExportRow]:
        policy = replace(self._policy, keep_untrained=max_row_tokens is not None)
        rows = linearize(from_records(turns), policy, max_row_tokens=max_row_tokens)
        return checked_rows(
            *(rows, "slime"), response=True, logprobs=False, untrained=True
        )

    def drop_session(self, sid: Any) -> None:
        """Forget a session; an unknown one is ignored, as in slime."""
        self._turns.pop(sid, None)


_LARGEST = 1e-4
"""The largest logprob of `trajkit.schema.TURNS`: above 0 it is rounding."""


def _doubles(row: ExportRow, turns: list[dict[str, Any]]) -> list[float]:
    """The logprobs of the response as the engine gave them, not rounded to float32."""
    found = [0.0] * len(row.input_ids)
    for span in row.spans:
        given = turns[span["turn_index"]]["output_logprobs"]
        if given and span["kind"] == "trained":
            own = given[span["output_start"] : span["output_stop"]]
            found[span["start"] : span["stop"]] = map(float, own)
    return found[row.prompt_length :]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a message as JSON can have it; equal messages stay equal."""
    copied: dict[str, Any] = _plain(dict(message))
    if not isinstance(message.get("role"), str):
        copied["role"] = repr(message.get("role"))
    return copied


def _plain(value: Any) -> Any:
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and value.isascii():
        return value
    if isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value):
        return value
    if isinstance(value, int) and abs(value) < 2**63:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    number = hex(value) if isinstance(value, int) else repr(value)
    return f"\0{type(value).__name__} {number}"
