"""Rows as verl's ``AgentLoopOutput`` objects and padded ``DataProto`` batches.

Source: verl 0.9.1 (``experimental/agent_loop/agent_loop.py``, ``protocol.py``,
``trainer/ppo/v1/utils.py``).
"""

from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from trajkit._arguments import chosen_int
from trajkit.errors import ExportError
from trajkit.export import _rows as shared
from trajkit.turns.images import CONTENT_HASH

_TARGET = shared.Target("verl", "reward", ("routed_experts",), response=True)
_PADDED = shared.Target("a padded batch of verl", "reward", response=True)


def agent_loop_fields(
    rows: shared.TableLike, *, images: str | Path | None = None
) -> list[list[dict[str, Any]]]:
    """Rows as the keyword arguments of ``AgentLoopOutput``, one list per rollout.

    ``AgentLoopBase.run`` returns such a list. verl's trainer v1 computes the advantage of a
    rollout from its last row. ``images`` is the folder ``images`` of the log, for rows with
    images: ``multi_modal_data`` then has them as ``PIL.Image``.
    """
    checked = shared.checked_rows(rows, _TARGET._replace(images=images is not None))
    return [
        [_output(row, images) for row in rollout]
        for _, rollout in groupby(checked, attrgetter("rollout"))
    ]


def _output(row: shared.ExportRow, images: str | Path | None) -> dict[str, Any]:
    names = ("session_id", "row_index", "uid")
    fields = {
        "prompt_ids": row.prompt_ids,
        "response_ids": row.response_ids,
        "response_mask": row.response_mask,
        "response_logprobs": row.response_logprobs,
        "reward_score": row.reward,
        "num_turns": 1 + int((np.diff(row.response_mask, prepend=0) > 0).sum()),
        "metrics": {},
        "extra_fields": {name: getattr(row, name) for name in names},
    }
    experts = row.routed_experts
    if experts is not None:
        if experts.max() > np.iinfo(np.int16).max:
            raise ExportError(f"{row.place}: expert {experts.max()} is no int16")
        # verl expects an entry for every token; that of the last is zero
        every = np.concatenate([experts, np.zeros_like(experts[:1])])
        fields["routed_experts"] = every.astype(np.int16)
    if images is not None and row.mm_items:
        fields["multi_modal_data"] = {"images": _opened(row, Path(images))}
    return fields


def _opened(row: shared.ExportRow, folder: Path) -> list[Any]:
    from PIL import Image

    images = []
    for name in (item["hash"] for item in row.mm_items):
        if not CONTENT_HASH.fullmatch(name):
            raise ExportError(f"{row.place}: {name!r} is not the SHA-256 of an image")
        try:
            with Image.open(folder / name) as image:
                images.append(image.convert("RGB"))
        except OSError as error:
            raise ExportError(f"{row.place}: {error}") from error
    return images


_OUTPUT = "verl.experimental.agent_loop.agent_loop:AgentLoopOutput"
agent_loop_outputs = shared.objects_of(agent_loop_fields, _OUTPUT)


def padded_fields(
    rows: shared.TableLike, prompt_length: int, response_length: int, pad_token_id: int
) -> dict[str, Any]:
    """Rows as the arrays of a padded batch: prompts padded left, responses right.

    The lengths are ``max_prompt_length`` and ``max_response_length`` of verl's
    configuration, beyond which rows are refused. The arrays have a line per row; ids,
    positions and masks are int64, ``rollout_log_probs`` and ``rm_scores`` (the reward at
    the last response token) float32, ``uid`` (the groups) objects.
    """
    chosen_int("prompt_length", prompt_length, 1)
    chosen_int("response_length", response_length, 1)
    chosen_int("pad_token_id", pad_token_id, 0)
    checked = shared.checked_rows(rows, _PADDED)
    shape = len(checked), prompt_length + response_length
    input_ids = np.full(shape, pad_token_id, np.int64)
    attention, mask = np.zeros((2, *shape), np.int64)
    logprobs, scores = np.zeros((2, *shape), np.float32)
    for line, row in enumerate(checked):
        n_prompt, n_response = row.prompt_length, len(row.response_ids)
        if n_prompt > prompt_length or n_response > response_length:
            raise ExportError(
                f"{row.place}: {n_prompt} and {n_response} tokens, but prompt_length and "
                f"response_length are {prompt_length} and {response_length}. Raise them, "
                "or linearize with max_row_tokens"
            )
        stop = prompt_length + n_response
        tokens = line, slice(prompt_length - n_prompt, stop)
        input_ids[tokens], attention[tokens] = row.input_ids, 1
        mask[tokens], logprobs[tokens] = row.loss_mask, row.logprobs
        scores[line, stop - 1] = row.reward
    responses = slice(None), slice(prompt_length, None)
    return {
        "prompts": input_ids[:, :prompt_length],
        "responses": input_ids[responses],
        "response_mask": mask[responses],
        "rollout_log_probs": logprobs[responses],
        "rm_scores": scores[responses],
        "input_ids": input_ids,
        "attention_mask": attention,
        "position_ids": np.maximum(np.cumsum(attention, axis=1) - 1, 0),
        "uid": np.array([row.uid for row in checked], object),
    }


def _proto(fields: dict[str, Any]) -> Any:
    """a ``verl.DataProto``."""
    from verl import DataProto

    uid = {"uid": fields.pop("uid")}
    return DataProto.from_dict(tensors=shared.tensors(fields), non_tensors=uid)


data_proto = shared.objects_of(padded_fields, _proto)
