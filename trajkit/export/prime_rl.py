"""Rows as prime-rl's ``TrainingSample`` and ``MicroBatch``.

Source: https://github.com/PrimeIntellect-ai/prime-rl/tree/559b44772
(``transports/rollouts/types.py``, ``trainer/batch.py``), with the fields that were
appended since, of which ``mm_refs`` (cb20c6a29) has the place of ``mm_kwargs``. A trainer
of an older commit ignores the appended ones, ``sampling_mask`` included.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, Required, TypedDict, Unpack

import numpy as np

from trajkit._arguments import chosen_int
from trajkit.errors import ExportError
from trajkit.export._rows import (
    StepCounts,
    checked_rows,
    limit,
    routed_experts,
    sampling_masks,
    step_counts,
    step_scales,
    token_advantages,
    token_values,
)
from trajkit.learn._checks import check_number
from trajkit.packs.balancing import balance
from trajkit.packs.packing import pack
from trajkit.tables.canonical import TableLike, as_table
from trajkit.tables.take import tuples

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
    "mm_refs",
    "mm_token_type_ids",
    "rl_weights",
    "ce_weights",
    "ref_kl_weights",
    "sampling_mask",
    "trace_ids",
    "branch_indices",
    "payload",
)
"""The fields of ``MicroBatch`` in the order of the wire format."""

_PAD_ID = 1


def sample_fields(
    rows: TableLike,
    *,
    env_name: str,
    temperature: float = 1.0,
    seq_len: int | None = 2048,
    weighted: bool | StepCounts = False,
) -> list[dict[str, Any]]:
    """Rows as the fields of ``TrainingSample``, in the order of the wire format.

    Parameters
    ----------
    rows : table
        With a column ``advantage``, per row or per token. A column
        ``observation_weight`` becomes ``ce_weights``. The payloads ``routed_experts``,
        ``sampling_mask`` and ``ref_logprobs`` (or ``teacher_logprobs``) are carried along.
    env_name : str
        The environment; prime-rl reserves the name "all".
    temperature : float
        The sampling temperature. It is written for every token, since prime-rl divides the
        logits of a token by the temperature of the token before it.
    seq_len : int or None
        The trainer's ``seq_len``, with its default. prime-rl truncates longer rows without
        a message, so they are refused here. None: no row is.
    weighted : StepCounts, optional
        Write row weights to ``rl_weights``, scaled so that the trainer's loss, a sum
        divided by the step's number of trained tokens, is
        `trajkit.learn.reference_loss` of the step's rows. The counts are those of all
        rows that the trainer takes in one step (`trajkit.export.step_counts`).

    Returns
    -------
    list of dict
        One per row. Every list covers the complete row. ``routed_experts`` and
        ``sampling_mask`` are dicts with the fields of prime-rl's structs of these names.
        ``trace_id`` is the session, ``branch_index`` the row's index.

    Raises
    ------
    ExportError
        An advantage is null or absent, the name is "all", or a row is longer than
        ``seq_len``; ``weighted`` is true without counts.
    """
    if not isinstance(env_name, str) or env_name == "all":
        raise ExportError(
            f"env_name is {env_name!r}: expected a name other than 'all', which prime-rl "
            "reserves"
        )
    check_number("temperature", temperature, 0, above=True)
    checked = checked_rows(
        rows,
        "prime-rl",
        carried=("routed_experts", "sampling_mask", "ref_logprobs", "teacher_logprobs"),
        max_tokens=limit("seq_len", seq_len),
    )
    scales = step_scales(checked, weighted, "prime-rl")
    experts, masks = routed_experts(rows, checked), sampling_masks(rows, checked)
    observed = token_values(rows, checked, "observation_weight", null=False)
    reference, teacher = (
        token_values(rows, checked, name)
        for name in ("ref_logprobs", "teacher_logprobs")
    )
    samples = []
    for k, (row, gain) in enumerate(
        zip(checked, token_advantages(checked), strict=True)
    ):
        if reference[k] is not None and teacher[k] is not None:
            raise ExportError(
                f"{row.place}: the row has ref_logprobs and teacher_logprobs, but prime-rl "
                "has one field, ref_logprobs. Drop one of the columns"
            )
        samples.append(
            {
                "token_ids": row.input_ids.tolist(),
                "mask": row.loss_mask.tolist(),
                "logprobs": row.logprobs.tolist(),
                "temperatures": [temperature] * len(row.input_ids),
                "env_name": env_name,
                "ref_logprobs": reference[k] or teacher[k],
                "mm_refs": None,
                "routed_experts": None if experts is None else _experts(experts[k]),
                "mm_token_type_ids": None,
                "rl_weights": (
                    None
                    if scales is None
                    else np.where(row.loss_mask, scales[k], 0.0).tolist()
                ),
                "ce_weights": observed[k],
                "ref_kl_weights": None,
                "advantages": gain.tolist(),
                "sampling_mask": None if masks is None else _mask(masks[k]),
                "trace_id": row.session_id,
                "branch_index": row.row_index,
                "payload": None,
            }
        )
    return samples


def _experts(experts: Any) -> dict[str, Any]:
    """An entry for every token: the last one, which was not forwarded, as that before."""
    every = np.concatenate([experts, experts[-1:]])
    every = every.astype("<u2" if every.max() > 255 else "u1")
    return {"data": every.tobytes(), "shape": [*every.shape], "dtype": every.dtype.name}


def _mask(supports: list[list[int]]) -> dict[str, bytes]:
    ids = np.array([*chain.from_iterable(supports)], "<i4")
    counts = np.array([len(each) for each in supports], "<i4")
    return {"ids": ids.tobytes(), "counts": counts.tobytes()}


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
    rows : table
        All rows of a step; else as for `sample_fields`, as are ``env_name`` and
        ``temperature``.
    seq_len : int
        Maximum number of tokens in a micro-batch, a multiple of ``pad_to_multiple_of``.
    ranks : int
        Data-parallel ranks of the trainer. All get as many micro-batches, of similar
        cost (`trajkit.balance`); one of padding alone fills up.
    pad_to_multiple_of : int
        Micro-batches are padded to a multiple of this many tokens.
    weighted : bool
        As for `sample_fields`, with the counts of these rows.
    """
    chosen_int("ranks", ranks, 1)
    samples = sample_fields(
        rows,
        env_name=env_name,
        temperature=temperature,
        seq_len=seq_len,
        weighted=weighted and step_counts(rows),
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

    def stream(name: str, fill: float = 0.0) -> list[Any] | None:
        """A stream that some samples have: ``fill`` for the tokens of the others."""
        if all(sample[name] is None for sample in samples):
            return None
        parts = [
            sample[name] or [fill] * size
            for sample, size in zip(samples, sizes, strict=True)
        ]
        return [*chain.from_iterable(parts), *[fill] * n_padding]

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
        "ref_logprobs": stream("ref_logprobs"),
        "routed_experts": _joined_experts(samples, n_padding),
        "rl_weights": stream("rl_weights"),
        "ce_weights": stream("ce_weights"),
        "sampling_mask": _joined_masks(samples, n_padding),
        "trace_ids": [sample["trace_id"] for sample in samples] or [""],
        "branch_indices": [sample["branch_index"] for sample in samples] or [-1],
    }


def _joined_experts(
    samples: list[dict[str, Any]], n_padding: int
) -> dict[str, Any] | None:
    """The experts of all tokens in the widest type; those of padding are 0."""
    parts = [sample["routed_experts"] for sample in samples]
    if not parts or parts[0] is None:
        return None
    arrays = [
        np.frombuffer(part["data"], part["dtype"]).reshape(part["shape"])
        for part in parts
    ]
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) > 1:
        raise ExportError(
            f"routed_experts of rows in a micro-batch have shapes {sorted(shapes)}: "
            "expected the layers and experts of one model"
        )
    padding = np.zeros((n_padding, *shapes.pop()), np.uint8)
    every = np.concatenate([*arrays, padding])
    return {"data": every.tobytes(), "shape": [*every.shape], "dtype": every.dtype.name}


def _joined_masks(
    samples: list[dict[str, Any]], n_padding: int
) -> dict[str, bytes] | None:
    parts = [sample["sampling_mask"] for sample in samples]
    if not parts or parts[0] is None:
        return None
    return {
        "ids": b"".join(part["ids"] for part in parts),
        "counts": b"".join(part["counts"] for part in parts) + bytes(4 * n_padding),
    }


class _Options(TypedDict, total=False):
    env_name: Required[str]
    ranks: int
    temperature: float
    pad_to_multiple_of: int
    weighted: bool


def write_micro_batches(
    rows: TableLike,
    folder: str | Path,
    step: int,
    seq_len: int,
    **options: Unpack[_Options],
) -> list[Path]:
    """Write the files from which prime-rl's trainer reads a step; needs msgspec.

    The trainer reads files with ``rollout_transport.type = "filesystem"``; its default is
    another transport.

    Parameters
    ----------
    rows, seq_len, **options
        As for `micro_batch_fields`.
    folder : path
        The trainer's batch directory: ``rollouts`` in its output folder at 559b44772.
    step : int
        The step that trains the rows: all rows of its rollouts. The folder of the step
        must not exist.

    Returns
    -------
    list of Path
        ``step_{step}/rank_{rank}.bin`` for each rank. They appear together.
    """
    ranked = micro_batch_fields(rows, seq_len, **options)
    import msgspec

    target = Path(folder) / f"step_{chosen_int('step', step, 0)}"
    with new_folder(target) as draft:
        for rank, batches in enumerate(ranked):
            # prime-rl's structs are arrays on the wire
            content = [[*map(_on_wire, batch.values())] for batch in batches]
            (draft / f"rank_{rank}.bin").write_bytes(msgspec.msgpack.encode(content))
    return [target / f"rank_{rank}.bin" for rank in range(len(ranked))]


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A draft of a folder that becomes the target when the block ends without an error.

    Raises FileExistsError if the target has anything in it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        umask = os.umask(0)  # mkdtemp makes private folders
        os.umask(umask)
        draft.chmod(0o777 & ~umask)
        yield draft
        draft.rename(target)  # over an empty folder too
    except BaseException as error:
        rmtree(draft, ignore_errors=True)
        if isinstance(error, OSError) and error.errno == errno.ENOTEMPTY:
            raise FileExistsError(
                errno.EEXIST, "the folder is not empty", str(target)
            ) from None
        raise


def _on_wire(value: Any) -> Any:
    return [*value.values()] if isinstance(value, dict) else value
