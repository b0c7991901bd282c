"""Rows as slime's ``Sample`` objects, and a manager that records turns for slime.

Source: https://github.com/THUDM/slime/tree/624b824 (``slime/utils/types.py``,
``slime/ray/rollout.py``, ``slime/agent/trajectory.py``).
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from trajkit._arguments import chosen_int
from trajkit.errors import ExportError, TrajkitError
from trajkit.export import _rows as shared
from trajkit.files.formats import replacing
from trajkit.learn.baselines import advantages
from trajkit.policies import Policy
from trajkit.policies import policy as named_policy
from trajkit.rows.linearize import linearize
from trajkit.turns.records import from_records

_LOG = logging.getLogger(__name__)
_CARRIED = ("routed_experts", "sampling_mask", "teacher_logprobs")
_TARGET = shared.Target("slime", "reward", _CARRIED, response=True)
_RECORDED = shared.Target("slime", response=True, logprobs=False, untrained=True)
# those of slime that divide by the deviation of a group, and those with baselines
_SCALED = ("grpo", "gspo", "cispo")
_CENTRED = (*_SCALED, "reinforce_plus_plus_baseline")


def sample_fields(
    rows: shared.TableLike, *, first_index: int = 0, first_group_index: int = 0
) -> list[dict[str, Any]]:
    """Rows as the dicts that ``Sample.from_dict`` takes and debug files contain.

    Rows of a group come one after another. Those of a rollout have its full reward and
    ``rollout_id``: slime's loss counts rollouts alike. ``index`` and ``rollout_id`` count
    from ``first_index``, ``group_index`` from ``first_group_index``, in order of the
    samples. ``rollout_routed_experts`` has no entry for the last token.
    """
    return fields_of(rows, _TARGET, first_index, first_group_index)


def fields_of(
    rows: shared.TableLike, target: shared.Target, index: int, group_index: int
) -> list[dict[str, Any]]:
    """`sample_fields` for slime, or for miles with arrays of experts."""
    chosen_int("first_index", index, 0)
    chosen_int("first_group_index", group_index, 0)
    rollouts: dict[int, int] = {}
    samples = []
    checked = shared.checked_rows(rows, target)
    # slime's own function takes runs of samples for groups
    for row in sorted(checked, key=lambda row: row.group):
        number = index + rollouts.setdefault(row.rollout, len(rollouts))
        fields = _fields(row) | {
            "reward": row.reward,
            "status": "truncated" if row.truncated else "completed",
            "group_index": group_index + row.group,
            "index": number,
            "rollout_id": number,
        }
        fields["metadata"] |= {"session_id": row.session_id, "row_index": row.row_index}
        if row.routed_experts is not None:
            experts = row.routed_experts
            as_list = target is _TARGET
            fields["rollout_routed_experts"] = experts.tolist() if as_list else experts
        if row.sampling_mask is not None:
            ids = row.sampling_mask[row.prompt_length :]
            fields["rollout_top_p_token_ids"] = [*chain.from_iterable(ids)]
            fields["rollout_top_p_token_offsets"] = [0, *accumulate(map(len, ids))]
        if row.teacher_logprobs is not None:
            fields["teacher_log_probs"] = row.teacher_logprobs[row.prompt_length :]
        samples.append(fields)
    return samples


def _fields(row: shared.ExportRow) -> dict[str, Any]:
    versions = (row.weight_versions or {}).values()
    return {
        "tokens": row.input_ids.tolist(),
        "response_length": len(row.response_ids),
        "loss_mask": row.response_mask,
        "rollout_log_probs": row.response_logprobs,
        "weight_versions": list(dict.fromkeys(filter(None, versions))),
        "metadata": {name: getattr(row, name) for name in shared.FLAGS},
    }


samples = shared.objects_of(sample_fields, "slime.utils.types:Sample.from_dict")


def write_debug_rollout(
    rows: shared.TableLike, path: str | Path, rollout_id: int = 0
) -> None:
    """Write ``path`` for slime's ``--load-debug-rollout-data`` with ``torch.save``.

    slime replaces ``{rollout_id}`` in its option by the number of the step.
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
    several. This one counts each ``rollout_id`` once within its ``group_index``; a rollout
    without a group is one of its own. With ``grpo_std_normalization`` of slime's ``args``,
    rewards are divided by the sample deviation of the group plus 1e-6, as in slime.

    Returns the raw rewards and the rewards, one per sample. Raises ExportError if a sample
    has no reward or ``rollout_id``, or a rollout two rewards.
    """
    raw, keys = [], []
    rewards: dict[tuple[str, str], float] = {}
    for number, sample in enumerate(samples):
        reward = sample.get_reward_value(args)
        rollout = sample.index if sample.rollout_id is None else sample.rollout_id
        if reward is None or rollout is None:
            raise ExportError(
                f"sample {number} has the reward {reward} and the rollout_id {rollout}: "
                "expected numbers, and one rollout_id for the rows of a rollout"
            )
        alone = sample.group_index is None
        group = f"rollout {rollout}" if alone else f"group {sample.group_index}"
        keys.append((group, f"{group}, rollout {rollout}"))
        raw.append(float(reward))
        first = rewards.setdefault(keys[-1], raw[-1])
        if not math.isclose(first, raw[-1], rel_tol=1e-9, abs_tol=1e-9):
            raise ExportError(
                f"rollout {rollout}: its samples have rewards {first} and {reward}: "
                "expected one finite reward"
            )
    if not args.rewards_normalization or args.advantage_estimator not in _CENTRED:
        return raw, raw
    scaled = args.advantage_estimator in _SCALED and args.grpo_std_normalization
    groups, names = zip(*rewards, strict=True)
    facts = {"session_id": names, "group_id": groups, "reward": [*rewards.values()]}
    found = advantages(facts, scale="group_std" if scaled else "none")
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
        given = {"fork_threshold": fork_threshold_tokens}
        chosen = {name: value for name, value in given.items() if value is not None}
        self._policy = named_policy(policy, **chosen)
        # an empty dict is a turn that was left out
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
        """Record one turn, slime's ``TurnRecord``; one without messages is not recorded.

        ``metadata`` is not read; slime keeps it in its tree only.
        """
        if not prompt_messages:
            _LOG.warning("session %r: a turn without messages is not recorded", sid)
            return
        logprobs, n_output = list(turn.output_log_probs or ()), len(turn.output_ids)
        assert len(logprobs) in (0, n_output), (
            f"session {sid!r}: output_log_probs has {len(logprobs)} values for {n_output} "
            "output ids"
        )
        turns = self._turns.setdefault(sid, [])
        reason, reply = turn.finish_reason, response_message
        record = {
            "session_id": "",
            "turn_index": len(turns),
            "prompt_ids": list(turn.prompt_ids),
            "output_ids": list(turn.output_ids),
            "output_logprobs": logprobs or None,
            "finish_reason": None if reason is None else str(reason),
            "ill_formed": bool(turn.ill_formed),
            "prompt_messages": [*map(_message, prompt_messages)],
            "response_message": None if reply is None else _message(reply),
        }
        turns.append({})
        untrained = record | {"output_logprobs": None, "trainable": False}
        for taken, then in ((record, "not trained"), (untrained, "left out")):
            try:
                from_records([taken])
            except TrajkitError as error:
                _LOG.warning("session %r: the turn is %s: %s", sid, then, error)
            else:
                turns[-1] = taken
                break

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

        As in slime, ``base_sample`` gives their ``index``, ``group_index``, ``rollout_id``,
        ``prompt`` and ``label``, ``max_sample_tokens`` truncates them (0 does not), and
        ``extra_metadata`` is added to their metadata. A session whose turns make no samples
        is kept, and a TrajkitError raised.
        """
        turns = self._turns.get(sid, [])
        counts = {
            "turns_left_out": sum(not turn for turn in turns),
            "turns_untrained": sum("trainable" in turn for turn in turns),
        }
        names = ("index", "group_index", "rollout_id", "prompt", "label")
        base = {name: getattr(base_sample, name) for name in names}
        if base["rollout_id"] is None:
            base["rollout_id"] = base["index"]
        longest = max_sample_tokens or None
        policy = replace(self._policy, keep_untrained=longest is not None)
        table = from_records([*filter(None, turns)])
        rows = linearize(table, policy, max_row_tokens=longest)
        found = []
        for row in shared.checked_rows(rows, _RECORDED):
            own = base | _fields(row)
            own["rollout_log_probs"] = _doubles(row, turns)
            own["metadata"] = {**(extra_metadata or {}), **own["metadata"]}
            own["metadata"] |= {name: n for name, n in counts.items() if n}
            status = type(base_sample.status).COMPLETED
            found.append(type(base_sample)(**own, reward=reward, status=status))
        self.drop_session(sid)
        return found

    def drop_session(self, sid: Any) -> None:
        """Forget a session; an unknown one is ignored, as in slime."""
        self._turns.pop(sid, None)


def _doubles(row: shared.ExportRow, turns: list[dict[str, Any]]) -> list[float]:
    """The logprobs of the response as the engine gave them, not rounded to float32."""
    found = [0.0] * len(row.input_ids)
    for span in row.spans:
        given = turns[span["turn_index"]]["output_logprobs"]
        if given and span["kind"] == "trained":
            own = given[span["output_start"] : span["output_stop"]]
            found[span["start"] : span["stop"]] = map(float, own)
    return found[row.prompt_length :]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a message, or its text if JSON cannot have it; equal ones stay equal."""
    try:
        copied: dict[str, Any] = json.loads(json.dumps(message))
        if copied == message and copied["role"].isprintable():
            return copied
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    return {"role": ascii(message.get("role")), "content": ascii(message)}
