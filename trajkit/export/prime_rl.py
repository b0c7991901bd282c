"""Rows as prime-rl's ``TrainingSample`` and ``MicroBatch``.

Source: https://github.com/PrimeIntellect-ai/prime-rl/tree/559b44772
(``transports/rollouts/types.py``, ``trainer/batch.py``), in the order of the wire format,
with the fields appended since, which older trainers ignore, ``sampling_mask`` included.
``mm_refs`` (cb20c6a29) has the place of ``mm_kwargs``.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from trajkit._arguments import check_number, chosen_int
from trajkit.errors import ExportError
from trajkit.export import _rows as shared
from trajkit.packs.balancing import balance
from trajkit.packs.packing import pack
from trajkit.tables.canonical import as_table
from trajkit.tables.columns import tuples

_CARRIED = ("routed_experts", "sampling_mask", "ref_logprobs", "teacher_logprobs")
_TARGET = shared.Target(
    *("prime-rl", "advantages", (*_CARRIED, "observation_weight")),
    cut="seq_len",
    by_step=True,
)


def sample_fields(
    rows: shared.TableLike,
    *,
    env_name: str,
    temperature: float = 1.0,
    seq_len: int | None = 2048,
    weighted: bool | shared.StepCounts = False,
) -> list[dict[str, Any]]:
    """Rows as the fields of ``TrainingSample``, lists over the complete row.

    ``routed_experts`` and ``sampling_mask`` are dicts with the fields of the structs.

    Parameters
    ----------
    rows : table
        With advantages, per row or per token. A column ``observation_weight`` becomes
        ``ce_weights``, ``ref_logprobs`` or ``teacher_logprobs`` become ``ref_logprobs``.
    env_name : str
        The environment; prime-rl reserves the name "all".
    temperature : float
        The sampling temperature, written for every token: prime-rl divides the logits of a
        token by the temperature of the token before it.
    seq_len : int or None
        That of the trainer, which truncates longer rows without a message. None: any.
    weighted : StepCounts, optional
        Write row weights to ``rl_weights``, see `trajkit.export`.
    """
    if not isinstance(env_name, str) or env_name == "all":
        raise ExportError(f"env_name is {env_name!r}: expected a name other than 'all'")
    check_number("temperature", temperature, 0, above=True)
    samples = []
    for row in shared.checked_rows(rows, _TARGET, cut=seq_len, weighted=weighted):
        reference, teacher = row.ref_logprobs, row.teacher_logprobs
        if reference is not None and teacher is not None:
            raise ExportError(
                f"{row.place}: the row has ref_logprobs and teacher_logprobs, but prime-rl "
                "has one field, ref_logprobs. Drop one of the columns"
            )
        experts, masks = row.routed_experts, row.sampling_mask
        if experts is not None:
            # the last token was not forwarded: as the one before it
            experts = _experts(np.concatenate([experts, experts[-1:]]))
        if masks is not None:
            parts = {"ids": [*chain(*masks)], "counts": [*map(len, masks)]}
            masks = {name: np.array(parts[name], "<i4").tobytes() for name in parts}
        scales = (row.loss_mask * row.scale).tolist()
        samples.append(
            {
                "token_ids": row.input_ids.tolist(),
                "mask": row.loss_mask.tolist(),
                "logprobs": row.logprobs.tolist(),
                "temperatures": [temperature] * len(row.input_ids),
                "env_name": env_name,
                "ref_logprobs": teacher if reference is None else reference,
                "mm_refs": None,
                "routed_experts": experts,
                "mm_token_type_ids": None,
                "rl_weights": scales if weighted else None,
                "ce_weights": row.observation_weight,
                "ref_kl_weights": None,
                "advantages": row.advantages.tolist(),
                "sampling_mask": masks,
                "trace_id": row.session_id,
                "branch_index": row.row_index,
                "payload": None,
            }
        )
    return samples


def _experts(experts: shared.Array) -> dict[str, Any]:
    small = experts.astype("<u2" if experts.max() > 255 else "u1")
    return {"data": small.tobytes(), "shape": [*small.shape], "dtype": small.dtype.name}


def micro_batch_fields(
    rows: shared.TableLike,
    seq_len: int,
    *,
    ranks: int = 1,
    pad_to_multiple_of: int = 1,
    weighted: bool = False,
    **options: Any,
) -> list[list[dict[str, Any]]]:
    """All rows of a step as the fields of ``MicroBatch``, a list of these for each rank.

    Parameters
    ----------
    rows, **options
        As for `sample_fields`.
    weighted : bool
        Write row weights, with the counts of these rows.
    seq_len, pad_to_multiple_of : int
        Maximum of tokens in a micro-batch, and what they are padded to a multiple of.
    ranks : int
        Data-parallel ranks of the trainer. All get as many micro-batches, of similar
        cost (`trajkit.balance`); one of padding alone fills up.
    """
    chosen_int("ranks", ranks, 1)
    counts = weighted and shared.step_counts(rows)
    samples = sample_fields(rows, seq_len=seq_len, weighted=counts, **options)
    packs = pack(as_table(rows), seq_len, layout="rows", align=pad_to_multiple_of)
    balanced = balance(packs, ranks, equal_counts=True)
    found: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
    for rank, number in tuples(balanced, "rank", "pack"):
        members, length = [], pad_to_multiple_of
        if number is not None:
            length = len(packs["input_ids"][number])
            numbers = dict.fromkeys(packs["edge_row"][number].as_py())
            members = [samples[k] for k in numbers]
        found[rank].append(_micro_batch(members, length))
    return found


def _micro_batch(samples: list[dict[str, Any]], length: int) -> dict[str, Any]:
    """Samples end to end, and padding up to a length."""
    sizes = [len(sample["token_ids"]) for sample in samples]
    n_padding = length - sum(sizes)

    def present(name: str) -> list[Any]:
        return [sample[name] for sample in samples if sample[name] is not None]

    def joined(name: str, fill: Any = 0.0) -> list[Any]:
        """The values of all tokens, ``fill`` for padding and samples that have none."""
        parts = zip(samples, sizes, strict=True)
        filled = [sample[name] or [fill] * size for sample, size in parts]
        return [*chain(*filled), *[fill] * n_padding]

    experts = [
        np.frombuffer(each["data"], each["dtype"]).reshape(each["shape"])
        for each in present("routed_experts")
    ]
    shapes = {each.shape[1:] for each in experts}
    if len(shapes) > 1:
        raise ExportError(
            f"routed_experts of rows in a micro-batch have shapes {sorted(shapes)}: "
            "expected the layers and experts of one model"
        )
    experts += [np.zeros((n_padding, *shape), np.uint8) for shape in shapes]
    masks = present("sampling_mask")
    ids, counts = (b"".join(each[name] for each in masks) for name in ("ids", "counts"))
    support = {"ids": ids, "counts": counts + bytes(4 * n_padding)}
    names = [sample["env_name"] for sample in samples]
    # padding belongs to the last sequence
    bounds = [*sizes[:-1], sum(sizes[-1:]) + n_padding]
    return {
        "input_ids": joined("token_ids", 1),
        "loss_mask": joined("mask", False),
        "advantages": joined("advantages"),
        "inference_logprobs": joined("logprobs"),
        "position_ids": [k for size in [*sizes, n_padding] for k in range(size)],
        "sequence_lengths": bounds,
        "temperatures": joined("temperatures", 1.0),
        "env_names": np.repeat([*names, ""], [*sizes, n_padding]).tolist(),
        "seq_lens": bounds,
        "ref_logprobs": joined("ref_logprobs") if present("ref_logprobs") else None,
        "routed_experts": _experts(np.concatenate(experts)) if experts else None,
        "mm_refs": None,
        "mm_token_type_ids": None,
        "rl_weights": joined("rl_weights") if present("rl_weights") else None,
        "ce_weights": joined("ce_weights") if present("ce_weights") else None,
        "ref_kl_weights": None,
        "sampling_mask": support if masks else None,
        "trace_ids": [sample["trace_id"] for sample in samples] or [""],
        "branch_indices": [sample["branch_index"] for sample in samples] or [-1],
        "payload": None,
    }


def write_micro_batches(
    rows: shared.TableLike, folder: str | Path, step: int, seq_len: int, **options: Any
) -> list[Path]:
    """Write the files of a step for prime-rl's trainer, and return their paths.

    It reads them with ``rollout_transport.type = "filesystem"``, not the default. Needs
    msgspec. The files ``step_{step}/rank_{rank}.bin`` appear together; FileExistsError if
    the folder of the step, which trains the rows, has anything in it.

    ``folder`` is the trainer's batch directory (``rollouts`` in its output folder at
    559b44772); the rest is as for `micro_batch_fields`.
    """
    ranked = micro_batch_fields(rows, seq_len, **options)
    import msgspec

    target = Path(folder) / f"step_{chosen_int('step', step, 0)}"
    with new_folder(target) as draft:
        for rank, batches in enumerate(ranked):
            # prime-rl's structs are arrays on the wire
            content = [
                [[*v.values()] if isinstance(v, dict) else v for v in batch.values()]
                for batch in batches
            ]
            (draft / f"rank_{rank}.bin").write_bytes(msgspec.msgpack.encode(content))
    return [target / f"rank_{rank}.bin" for rank in range(len(ranked))]


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A draft of a folder that becomes the target, which must be empty, at the end."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as around:
        draft = Path(around, "draft")
        draft.mkdir()
        yield draft
        if target.exists() and any(target.iterdir()):
            raise FileExistsError(errno.EEXIST, "the folder is not empty", str(target))
        draft.rename(target)  # over an empty folder too
