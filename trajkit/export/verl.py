"""Rows as verl's ``AgentLoopOutput`` objects and padded ``DataProto`` batches.

Source: verl 0.9.1 (``experimental/agent_loop/agent_loop.py``, ``protocol.py``,
``trainer/ppo/v1/utils.py``).
"""

from pathlib import Path
from typing import Any

import numpy as np

from trajkit._arguments import chosen_int
from trajkit.errors import ExportError
from trajkit.export._rows import (
    ExportRow,
    checked_rows,
    objects_of,
    rewards_of,
    routed_experts,
)
from trajkit.tables.canonical import TableLike
from trajkit.turns.images import CONTENT_HASH


def agent_loop_fields(
    rows: TableLike, *, images: str | Path | None = None
) -> list[list[dict[str, Any]]]:
    """Rows as the keyword arguments of ``AgentLoopOutput``, one list per rollout.

    Parameters
    ----------
    rows : table
        A payload ``routed_experts`` is carried along.
    images : path, optional
        The folder ``images`` of the log, for rows with images: ``multi_modal_data`` then
        has them as ``PIL.Image``.

    Returns
    -------
    list of list of dict
        The rows of each rollout in their order, as ``AgentLoopBase.run`` returns them in
        verl's trainer v1. That trainer computes the advantage of a rollout from its last
        row, so every row has the rollout's reward and a trained token.

    Raises
    ------
    ExportError
        A reward is null.
    """
    checked = checked_rows(
        rows,
        "verl",
        response=True,
        images=images is not None,
        carried=("routed_experts",),
    )
    experts = routed_experts(rows, checked)
    rollouts: list[list[dict[str, Any]]] = []
    for k, (row, reward) in enumerate(zip(checked, rewards_of(checked), strict=True)):
        if row.rollout == len(rollouts):
            rollouts.append([])
        mask = row.response(row.loss_mask)
        fields = {
            "prompt_ids": row.prompt,
            "response_ids": row.response(row.input_ids),
            "response_mask": mask,
            "response_logprobs": row.response(row.logprobs),
            "reward_score": reward,
            "num_turns": 1 + sum(a < b for a, b in zip([0, *mask], mask, strict=False)),
            "metrics": {},
            "extra_fields": {
                "session_id": row.session_id,
                "row_index": row.row_index,
                "uid": row.uid,
            },
        }
        if experts is not None:
            # verl expects an entry for every token; that of the last is zero
            last = np.zeros_like(experts[k][:1])
            every = np.concatenate([experts[k], last])
            if every.max() > np.iinfo(np.int16).max:
                raise ExportError(f"{row.place}: expert {every.max()} is no int16")
            fields["routed_experts"] = every.astype(np.int16)
        if images is not None and row.mm_items:
            fields["multi_modal_data"] = {"images": _opened(row, Path(images))}
        rollouts[row.rollout].append(fields)
    return rollouts


def _opened(row: ExportRow, folder: Path) -> list[Any]:
    from PIL import Image

    images = []
    for item in row.mm_items or ():
        if not CONTENT_HASH.fullmatch(item["hash"]):
            raise ExportError(
                f"{row.place}: {item['hash']!r} is not the SHA-256 of an image"
            )
        try:
            with Image.open(folder / item["hash"]) as image:
                images.append(image.convert("RGB"))
        except OSError as error:
            raise ExportError(f"{row.place}: {error}") from error
    return images


@objects_of(agent_loop_fields)
def agent_loop_outputs(rollouts: list[list[dict[str, Any]]]) -> list[list[Any]]:
    """Rows as ``AgentLoopOutput`` objects; see `agent_loop_fields`."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

    return [[AgentLoopOutput(**fields) for fields in rollout] for rollout in rollouts]


def padded_fields(
    rows: TableLike, prompt_length: int, response_length: int, pad_token_id: int
) -> dict[str, Any]:
    """Rows as the arrays of a padded batch: prompts padded left, responses right.

    Parameters
    ----------
    prompt_length, response_length : int
        ``max_prompt_length`` and ``max_response_length`` of verl's configuration.

    Returns
    -------
    dict of str to ndarray
        ``prompts``, ``responses``, ``response_mask``, ``input_ids``, ``attention_mask``,
        ``position_ids`` (int64), ``rollout_log_probs`` and ``rm_scores`` (float32, the
        reward at the last response token), each with one line per row; and ``uid``
        (objects), the group of each row.

    Raises
    ------
    ExportError
        As `agent_loop_fields`; or a prompt or response is too long: nothing is truncated.
    """
    prompt_length = chosen_int("prompt_length", prompt_length, 1)
    response_length = chosen_int("response_length", response_length, 1)
    chosen_int("pad_token_id", pad_token_id, 0)
    checked = checked_rows(rows, "a padded batch of verl", response=True)
    shape = len(checked), prompt_length + response_length
    input_ids = np.full(shape, pad_token_id, np.int64)
    attention, mask = np.zeros((2, *shape), np.int64)
    logprobs, scores = np.zeros((2, *shape), np.float32)
    for line, (row, reward) in enumerate(
        zip(checked, rewards_of(checked), strict=True)
    ):
        n_response = len(row.input_ids) - row.prompt_length
        for name, n, most in (
            ("prompt", row.prompt_length, prompt_length),
            ("response", n_response, response_length),
        ):
            if n > most:
                raise ExportError(
                    f"{row.place}: the {name} has {n} tokens, {name}_length is {most}. "
                    "Raise it, or linearize with max_row_tokens"
                )
        stop = prompt_length + n_response
        tokens = line, slice(prompt_length - row.prompt_length, stop)
        input_ids[tokens], attention[tokens] = row.input_ids, 1
        mask[tokens], logprobs[tokens] = row.loss_mask, row.logprobs
        scores[line, stop - 1] = reward
    responses, response_mask, rollout_log_probs, rm_scores = (
        array[:, prompt_length:].copy() for array in (input_ids, mask, logprobs, scores)
    )
    return {
        "prompts": input_ids[:, :prompt_length].copy(),
        "responses": responses,
        "response_mask": response_mask,
        "rollout_log_probs": rollout_log_probs,
        "rm_scores": rm_scores,
        "input_ids": input_ids,
        "attention_mask": attention,
        "position_ids": np.maximum(np.cumsum(attention, axis=1) - 1, 0),
        "uid": np.array([row.uid for row in checked], object),
    }


@objects_of(padded_fields)
def data_proto(fields: dict[str, Any]) -> Any:
    """Rows as a padded ``verl.DataProto``; see `padded_fields`."""
    import torch
    from verl import DataProto

    uid = fields.pop("uid")
    tensors = {name: torch.from_numpy(array) for name, array in fields.items()}
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": uid})
