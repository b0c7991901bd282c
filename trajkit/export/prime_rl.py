"""Rows as prime-rl's ``TrainingSample``.

Source: prime-rl at 559b447 (``transports/rollouts/types.py``, ``trainer/batch.py``); spec,
training formats 5.
"""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from trajkit._arrow.canonical import TableLike, as_table
from trajkit._arrow.take import tuples
from trajkit.errors import ExportError
from trajkit.export._rows import (
    checked_rows,
    optional_column,
    token_advantages,
    token_scales,
)
from trajkit.packs.balancing import balance
from trajkit.packs.packing import pack

MICRO_BATCH_FIELDS = (
    "input_ids",
    "loss_mask",
    "advantages",
    "inference_logprobs",
    "position_ids",
    "sequence_lengths",
    "temperatures",
    "env_names",
    "seq_lens",
    "ref_logprobs",
    "routed_experts",
    "mm_kwargs",
    "mm_token_type_ids",
    "rl_weights",
    "ce_weights",
    "ref_kl_weights",
)
"""The fields of ``MicroBatch`` in the order of the wire format."""

_PAD_ID = 1


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
        With a column ``advantage``, per row or per token. A column
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
        An advantage is null or absent, the name is "all", or a row is longer than
        ``seq_len``.
    """
    if env_name == "all":
        raise ExportError("env_name is 'all', which prime-rl reserves: give another")
    checked = checked_rows(rows)
    scales = token_scales(checked)
    observed = optional_column(rows, "observation_weight")
    samples = []
    for row, gain, scale in zip(
        checked, token_advantages(checked), scales, strict=True
    ):
        if seq_len is not None and len(row.input_ids) > seq_len:
            raise ExportError(
                f"{row.place}: {len(row.input_ids)} tokens, seq_len is {seq_len}. Raise "
                "it, or linearize with max_row_tokens"
            )
        samples.append(
            {
                "token_ids": row.input_ids.tolist(),
                "mask": row.loss_mask.tolist(),
                "logprobs": row.logprobs.tolist(),
                "temperatures": [temperature] * len(row.input_ids),
                "env_name": env_name,
                "ref_logprobs": None,
                "mm_kwargs": None,
                "routed_experts": None,
                "mm_token_type_ids": None,
                "rl_weights": (
                    np.where(row.loss_mask, scale, 0.0).tolist() if weighted else None
                ),
                "ce_weights": observed[row.line],
                "ref_kl_weights": None,
                "advantages": gain.tolist(),
            }
        )
    return samples


def micro_batch_fields(
    rows: TableLike,
    seq_len: int,
    *,
    env_name: str,
    ranks: int = 1,
    temperature: float = 1.0,
    pad_to_multiple_of: int = 1,
    weighted: bool = False,
) -> list[list[dict[str, Any]]]:
    """Rows of one step as the fields of ``MicroBatch``, a list of these for each rank.

    Parameters
    ----------
    rows, env_name, temperature, weighted
        As for `sample_fields`.
    seq_len : int
        Maximum number of tokens in a micro-batch, a multiple of ``pad_to_multiple_of``.
    ranks : int
        Data-parallel ranks of the trainer. All get as many micro-batches, of similar
        cost (`trajkit.balance`); one of padding alone fills up.
    pad_to_multiple_of : int
        Micro-batches are padded to a multiple of this many tokens.
    """
    samples = sample_fields(
        rows,
        env_name=env_name,
        temperature=temperature,
        seq_len=seq_len,
        weighted=weighted,
    )
    packs = pack(as_table(rows), seq_len, layout="rows", align=pad_to_multiple_of)
    batches = []
    for numbers, n in zip(
        packs.column("edge_row"), packs.column("input_ids"), strict=True
    ):
        rows_here, first = np.unique(numbers.values.to_numpy(), return_index=True)
        members = [samples[k] for k in rows_here[np.argsort(first)]]
        batches.append(_micro_batch(members, len(n)))
    plan = balance(packs, ranks, equal_counts=True)
    found: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
    for rank, number in tuples(plan, "rank", "pack"):
        padding = _micro_batch([], pad_to_multiple_of)
        found[rank].append(padding if number is None else batches[number])
    return found


def _micro_batch(samples: list[dict[str, Any]], length: int) -> dict[str, Any]:
    """Samples end to end, and padding up to a length."""
    sizes = [len(sample["token_ids"]) for sample in samples]
    n_padding = length - sum(sizes)

    def joined(name: str, padding: Any) -> list[Any]:
        parts = [sample[name] for sample in samples]
        return [*chain.from_iterable(parts), *[padding] * n_padding]

    def stream(name: str) -> list[Any] | None:
        """A stream that some samples have: 0 for the tokens of the others."""
        if all(sample[name] is None for sample in samples):
            return None
        parts = [
            sample[name] or [0.0] * size
            for sample, size in zip(samples, sizes, strict=True)
        ]
        return [*chain.from_iterable(parts), *[0.0] * n_padding]

    # padding belongs to the last sequence
    bounds = [*sizes[:-1], sum(sizes[-1:]) + n_padding]
    return dict.fromkeys(MICRO_BATCH_FIELDS) | {
        "input_ids": joined("token_ids", _PAD_ID),
        "loss_mask": joined("mask", False),
        "advantages": joined("advantages", 0.0),
        "inference_logprobs": joined("logprobs", 0.0),
        "position_ids": [k for size in [*sizes, n_padding] for k in range(size)],
        "sequence_lengths": bounds,
        "temperatures": joined("temperatures", 1.0),
        "env_names": [
            *(sample["env_name"] for sample in samples for _ in sample["token_ids"]),
            *[""] * n_padding,
        ],
        "seq_lens": bounds,
        "rl_weights": stream("rl_weights"),
        "ce_weights": stream("ce_weights"),
    }


def write_micro_batches(
    rows: TableLike,
    folder: str | Path,
    step: int,
    seq_len: int,
    *,
    env_name: str,
    ranks: int = 1,
    temperature: float = 1.0,
    pad_to_multiple_of: int = 1,
    weighted: bool = False,
) -> list[Path]:
    """Write the files from which prime-rl's trainer reads a step; needs msgspec.

    Parameters
    ----------
    rows, seq_len, env_name, ranks, temperature, pad_to_multiple_of, weighted
        As for `micro_batch_fields`.
    folder : path
        ``rollouts`` in the trainer's output folder.
    step : int
        The step that trains the rows: all rows of its rollouts.

    Returns
    -------
    list of Path
        ``step_{step}/rank_{rank}.bin`` for each rank. Each appears complete.
    """
    import msgspec

    ranked = micro_batch_fields(
        rows,
        seq_len,
        env_name=env_name,
        ranks=ranks,
        temperature=temperature,
        pad_to_multiple_of=pad_to_multiple_of,
        weighted=weighted,
    )
    target = Path(folder) / f"step_{step}"
    target.mkdir(parents=True, exist_ok=True)
    paths = []
    for rank, batches in enumerate(ranked):
        path = target / f"rank_{rank}.bin"
        partial = path.with_suffix(".tmp")
        # prime-rl's structs are arrays on the wire
        partial.write_bytes(
            msgspec.msgpack.encode([[*batch.values()] for batch in batches])
        )
        partial.replace(path)
        paths.append(path)
    return paths
