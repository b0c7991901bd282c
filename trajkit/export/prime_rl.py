"""Rows as prime-rl's ``TrainingSample``.

Source: prime-rl at 559b447 (``transports/rollouts/types.py``, ``trainer/batch.py``); spec,
training formats 5.
"""

from typing import Any

from trajkit._arrow.canonical import TableLike, as_table
from trajkit.errors import ExportError
from trajkit.export._rows import advantages_of, checked_rows, on_mask

FIELDS = (
    "token_ids",
    "mask",
    "logprobs",
    "temperatures",
    "env_name",
    "ref_logprobs",
    "mm_kwargs",
    "routed_experts",
    "mm_token_type_ids",
    "rl_weights",
    "ce_weights",
    "ref_kl_weights",
    "advantages",
)
"""The fields in the order of the wire format."""


def sample_fields(
    rows: TableLike,
    *,
    env_name: str,
    temperature: float = 1.0,
    seq_len: int | None = None,
    weighted: bool = False,
) -> list[dict[str, Any]]:
    """Rows as the fields of ``TrainingSample``, in the order of the wire format.

    Parameters
    ----------
    rows : table
        `trajkit.schema.ROWS` or ``ROWS_SUFFIX`` with a column ``advantage``. A column
        ``observation_weight`` becomes ``ce_weights``.
    env_name : str
        The environment; prime-rl reserves the name "all".
    temperature : float
        The sampling temperature. It is written for every token, since prime-rl divides the
        logits of a token by the temperature of the token before it.
    seq_len : int, optional
        The trainer's ``seq_len``. prime-rl truncates longer rows without a message, so they
        are refused here.
    weighted : bool
        Write row weights to ``rl_weights``, scaled so that the trainer's loss, a sum
        divided by the batch's number of trained tokens, is
        `trajkit.training.reference_loss`.

    Returns
    -------
    list of dict
        One per row. Every list covers the complete row.

    Raises
    ------
    ExportError
        See `trajkit.export`; or an advantage is null or absent, the name is "all", or a
        row is longer than ``seq_len``.
    """
    if env_name == "all":
        raise ExportError("env_name is 'all', which prime-rl reserves: give another")
    checked = checked_rows(rows)
    n_trained = [int(row.loss_mask.sum()) for row in checked]
    scale = sum(n_trained) / max(len({row.rollout for row in checked}), 1)
    table = as_table(rows)
    observed: list[Any] = [None] * len(checked)
    if "observation_weight" in table.column_names:
        observed = table.column("observation_weight").to_pylist()
    samples = []
    for row, gain, n in zip(checked, advantages_of(checked), n_trained, strict=True):
        if seq_len is not None and len(row.input_ids) > seq_len:
            raise ExportError(
                f"{row.place}: {len(row.input_ids)} tokens, seq_len is {seq_len}. Raise "
                "it, or linearize with max_row_tokens"
            )
        samples.append(
            dict.fromkeys(FIELDS)
            | {
                "token_ids": row.input_ids.tolist(),
                "mask": row.loss_mask.tolist(),
                "logprobs": row.logprobs.tolist(),
                "temperatures": [temperature] * len(row.input_ids),
                "env_name": env_name,
                "rl_weights": on_mask(row, row.row_weight * scale / n)
                if weighted
                else None,
                "ce_weights": observed[row.line],
                "advantages": on_mask(row, gain),
            }
        )
    return samples
