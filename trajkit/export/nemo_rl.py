"""Rows as NeMo-RL message logs.

Source: https://github.com/NVIDIA-NeMo/RL/tree/7ea279a (``algorithms/grpo.py``,
``data/llm_message_utils.py``).
"""

from itertools import pairwise
from typing import Any

import numpy as np

from trajkit.export import _rows as shared

_TARGET = shared.Target("NeMo-RL", carried=("routed_experts",))


def message_log_fields(rows: shared.TableLike) -> list[list[dict[str, Any]]]:
    """Rows as message logs, each a list with a message per range of the same mask.

    Messages have ``role`` (``user`` first, ``assistant`` if trained, else ``tool``),
    ``content`` (empty), ``token_ids`` and ``token_loss_mask`` (int64) and
    ``generation_logprobs`` (float32); ``routed_experts`` (int32) with this payload.

    NeMo-RL trains every token of a message with role ``assistant``. It groups rows by the
    ids of their first prompt. Rows that a fork opened have other prompts, so compute
    advantages with `trajkit.learn.advantages`.
    """
    logs = []
    for row in shared.checked_rows(rows, _TARGET):
        values = {
            "token_ids": row.input_ids.astype(np.int64),
            "token_loss_mask": row.loss_mask.astype(np.int64),
            "generation_logprobs": row.logprobs,
        }
        if row.routed_experts is not None:
            # an entry for every token: that of the last one is not used
            last = row.routed_experts[-1:]
            values["routed_experts"] = np.concatenate([row.routed_experts, last])
        edges = [0, *(1 + np.flatnonzero(np.diff(row.loss_mask))), len(row.input_ids)]
        log: list[dict[str, Any]] = []
        for start, stop in pairwise(edges):
            other = "tool" if start else "user"
            role = "assistant" if row.loss_mask[start] else other
            own = {name: array[start:stop] for name, array in values.items()}
            log.append({"role": role, "content": "", **own})
        logs.append(log)
    return logs


message_logs = shared.objects_of(message_log_fields, shared.tensors)
