"""Rows as verl's ``AgentLoopOutput`` objects and padded ``DataProto`` batches.

Source: verl 0.9.1 (``experimental/agent_loop/agent_loop.py``, ``protocol.py``,
``trainer/ppo/v1/utils.py``); spec, training formats 2.
"""

from pathlib import Path
from typing import Any

import numpy as np

from trajkit._arrow.canonical import TableLike
from trajkit.errors import ExportError
from trajkit.export._rows import (
    ExportRow,
    checked_rows,
    padded,
    rewards_of,
    routed_experts,
)
from trajkit.turns.mm_items import CONTENT_HASH

EXPERTS = "routed_experts"
"""The payload that becomes ``routed_experts``."""


def agent_loop_fields(
    rows: TableLike, *, images: str | Path | None = None
) -> list[list[dict[str, Any]]]:
    """Rows as the keyword arguments of ``AgentLoopOutput``, one list per rollout.

    Parameters
    ----------
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
    checked = checked_rows(rows, response=True, images=images is not None)
    experts = routed_experts(rows, EXPERTS)
    rollouts: list[list[dict[str, Any]]] = []
    for row, reward in zip(checked, rewards_of(checked), strict=True):
        if row.rollout == len(rollouts):
            rollouts.append([])
        mask = row.loss_mask[row.prompt_length :].astype(np.int64).tolist()
        fields = {
            "prompt_ids": row.input_ids[: row.prompt_length].tolist(),
            "response_ids": row.response(row.input_ids),
            "response_mask": mask,
            "response_logprobs": row.response(row.logprobs),
            "reward_score": reward,
            "num_turns": 1 + sum(a < b for a, b in zip([0, *mask], mask, strict=False)),
            "metrics": {},
            "extra_fields": {
                "session_id": row.session_id,
                "row_index": row.row_index,
                "uid": row.group_id if row.group_id is not None else row.session_id,
            },
        }
        if experts is not None:
            # verl expects an entry for every token; that of the last is zero
            known = experts[row.line]
            if known[-1] is None:
                known = [*known[:-1], np.zeros_like(known[0])]
            fields["routed_experts"] = np.array(known, np.int16)
        if images is not None and row.mm_items:
            fields["multi_modal_data"] = {"images": _opened(row, Path(images))}
        rollouts[row.rollout].append(fields)
    return rollouts


def _opened(row: ExportRow, folder: Path) -> list[Any]:
    from PIL import Image

    images = []
    for item in row.mm_items:
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


def agent_loop_outputs(
    rows: TableLike, *, images: str | Path | None = None
) -> list[list[Any]]:
    """Rows as ``AgentLoopOutput`` objects; see `agent_loop_fields`."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

    return [
        [AgentLoopOutput(**fields) for fields in rollout]
        for rollout in agent_loop_fields(rows, images=images)
    ]


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
    checked = checked_rows(rows, response=True)
    prompts, responses, masks, logprobs, scores = [], [], [], [], []
    for row, reward in zip(checked, rewards_of(checked), strict=True):
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
        prompts.append(row.input_ids[: row.prompt_length].tolist())
        responses.append(row.response(row.input_ids))
        masks.append(row.response(row.loss_mask.astype(np.int64)))
        logprobs.append(row.response(row.logprobs))
        scores.append([0.0] * (n_response - 1) + [reward])

    def right(lists: list[list[Any]], value: Any, dtype: type) -> Any:
        return np.array(padded(lists, value, response_length), dtype)

    batch = {
        "prompts": np.array(
            padded(prompts, pad_token_id, prompt_length, left=True), np.int64
        ),
        "responses": right(responses, pad_token_id, np.int64),
        "response_mask": right(masks, 0, np.int64),
        "rollout_log_probs": right(logprobs, 0.0, np.float32),
        "rm_scores": right(scores, 0.0, np.float32),
    }
    batch["input_ids"] = np.concatenate([batch["prompts"], batch["responses"]], axis=1)
    ones = [[1] * len(each) for each in prompts]
    seen = [[1] * len(each) for each in responses]
    attention = np.concatenate(
        [
            np.array(padded(ones, 0, prompt_length, left=True), np.int64),
            right(seen, 0, np.int64),
        ],
        axis=1,
    )
    batch["attention_mask"] = attention
    batch["position_ids"] = np.maximum(np.cumsum(attention, axis=1) - 1, 0)
    groups = [
        row.group_id if row.group_id is not None else row.session_id for row in checked
    ]
    batch["uid"] = np.array(groups, object)
    return batch


def data_proto(
    rows: TableLike, prompt_length: int, response_length: int, pad_token_id: int
) -> Any:
    """Rows as a padded ``verl.DataProto``; see `padded_fields`."""
    import torch
    from verl import DataProto

    fields = padded_fields(rows, prompt_length, response_length, pad_token_id)
    uid = fields.pop("uid")
    tensors = {name: torch.from_numpy(array) for name, array in fields.items()}
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": uid})
