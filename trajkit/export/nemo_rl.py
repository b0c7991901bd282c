"""Rows as NeMo-RL message logs.

Source: https://github.com/NVIDIA-NeMo/RL/tree/7ea279a (``algorithms/grpo.py``,
``data/llm_message_utils.py``).
"""

from itertools import chain, pairwise
from typing import Any

import numpy as np

from trajkit.export._rows import checked_rows, objects_of, routed_experts
from trajkit.tables.canonical import TableLike


def message_log_fields(rows: TableLike) -> list[list[dict[str, Any]]]:
    """Rows as message logs: one message per range of tokens with the same mask.

    NeMo-RL trains every token of a message with role ``assistant``. All messages have
    ``generation_logprobs``, since NeMo-RL concatenates them without a check of lengths, and
    all arrays have the same type per field.

    Returns
    -------
    list of list of dict
        One list per row. Messages have ``role`` (``user`` first, ``assistant`` if trained,
        else ``tool``), ``content`` (empty), ``token_ids`` and
        ``token_loss_mask`` (int64) and ``generation_logprobs`` (float32), and
        ``routed_experts`` (int32) if the rows have this payload.

        NeMo-RL groups rows by the ids of their first prompt. Rows that a fork opened have
        other prompts, so compute advantages with `trajkit.learn.advantages`.
    """
    logs = []
    checked = checked_rows(rows, "NeMo-RL", carried=("routed_experts",))
    experts = routed_experts(rows, checked)
    for k, row in enumerate(checked):
        edges = [0, *(1 + np.flatnonzero(np.diff(row.loss_mask))), len(row.input_ids)]
        logs.append(
            [
                {
                    "role": "assistant" if row.loss_mask[start] else other,
                    "content": "",
                    "token_ids": row.input_ids[start:stop].astype(np.int64),
                    "token_loss_mask": row.loss_mask[start:stop].astype(np.int64),
                    "generation_logprobs": row.logprobs[start:stop],
                }
                for start, stop in pairwise(edges)
                for other in ["tool" if start else "user"]
            ]
        )
        if experts is not None:
            # an entry for every token: that of the last one is not used
            every = np.concatenate([experts[k], experts[k][-1:]])
            for message, (start, stop) in zip(logs[-1], pairwise(edges), strict=True):
                message["routed_experts"] = every[start:stop]
    return logs


@objects_of(message_log_fields)
def message_logs(logs: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """`message_log_fields` with torch tensors, as NeMo-RL takes them."""
    import torch

    for message in chain.from_iterable(logs):
        for name, value in message.items():
            if isinstance(value, np.ndarray):
                message[name] = torch.from_numpy(value.copy())
    return logs
