"""Rows as prime-rl's ``TrainingSample`` and ``MicroBatch``.

Source: https://github.com/PrimeIntellect-ai/prime-rl/tree/559b44772
(``transports/rollouts/types.py``, ``trainer/batch.py``), with the fields that were
appended since, of which ``mm_refs`` (cb20c6a29) has the place of ``mm_kwargs``. A trainer
of an older commit ignores the appended ones, ``sampling_mask`` included. Fields have the
order of the wire format.
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
from trajkit.tables.take import tuples

_TARGET = shared.Target(
    *("prime-rl", "advantages"),
    carried=(
        *("routed_experts", "sampling_mask", "ref_logprobs", "teacher_logprobs"),
        "observation_weight",
    ),
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
    """Rows as the fields of ``TrainingSample``.

    Every list covers the complete row. ``routed_experts`` and ``sampling_mask`` are dicts
    with the fields of prime-rl's structs of these names.

    Parameters
    ----------
    rows : table
        With advantages, per row or per token. A column ``observation_weight`` becomes
        ``ce_weights``. The payloads ``routed_experts``, ``sampling_mask`` and
        ``ref_logprobs`` (or ``teacher_logprobs``) are carried along.
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
        raise ExportError(
            f"env_name is {env_name!r}: expected a name other than 'all', which prime-rl "
            "reserves"
        )
    check_number("temperature", temperature, 0, above=True)
    samples = []
    for row in shared.checked_rows(rows, _TARGET, cut=seq_len, weighted=weighted):
        references = [row.ref_logprobs, row.teacher_logprobs]
        reference, *others = [each for each in references if each is not None] or [None]
        if others:
            raise ExportError(
                f"{row.place}: the row has ref_logprobs and teacher_logprobs, but prime-rl "
                "has one field, ref_logprobs. Drop one of the columns"
            )
        experts, masks = row.routed_experts, row.sampling_mask
        if experts is not None:
            # the last token was not forwarded: as the one before it
            experts = _experts(np.concatenate([experts, experts[-1:]]))
        if masks is not None:
            ids, counts = [*chain(*masks)], [len(each) for each in masks]
            parts = {"ids": np.array(ids, "<i4"), "counts": np.array(counts, "<i4")}
            masks = {name: part.tobytes() for name, part in parts.items()}
        samples.append(
            {
                "token_ids": row.input_ids.tolist(),
                "mask": row.loss_mask.tolist(),
                "logprobs": row.logprobs.tolist(),
                "temperatures": [temperature] * len(row.input_ids),
                "env_name": env_name,
                "ref_logprobs": reference,
                "mm_refs": None,
                "routed_experts": experts,
                "mm_token_type_ids": None,
                "rl_weights": (row.loss_mask * row.scale).tolist()
                if weighted
                else None,
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
    """Rows of one step as the fields of ``MicroBatch``, a list of these for each rank.

    Parameters
    ----------
    rows : table
        All rows of a step, as for `sample_fields`.
    seq_len : int
        Maximum number of tokens in a micro-batch, a multiple of ``pad_to_multiple_of``.
    ranks : int
        Data-parallel ranks of the trainer. All get as many micro-batches, of similar
        cost (`trajkit.balance`); one of padding alone fills up.
    pad_to_multiple_of : int
        Micro-batches are padded to a multiple of this many tokens.
    weighted : bool
        Take the row weights, with the counts of these rows.
    **options
        ``env_name`` and ``temperature`` of `sample_fields`.
    """
    chosen_int("ranks", ranks, 1)
    counts = weighted and shared.step_counts(rows)
    samples = sample_fields(rows, seq_len=seq_len, weighted=counts, **options)
    packs = pack(as_table(rows), seq_len, layout="rows", align=pad_to_multiple_of)
    found: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
    for rank, number in tuples(
        balance(packs, ranks, equal_counts=True), "rank", "pack"
    ):
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

    def joined(name: str, fill: Any = 0.0, *, needed: bool = False) -> Any:
        """The values of all tokens, ``fill`` for padding and samples that have none."""
        if not needed and all(sample[name] is None for sample in samples):
            return None
        parts = zip(samples, sizes, strict=True)
        filled = [sample[name] or [fill] * size for sample, size in parts]
        return [*chain(*filled), *[fill] * n_padding]

    def present(name: str) -> list[Any]:
        return [sample[name] for sample in samples if sample[name] is not None]

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
        "input_ids": joined("token_ids", 1, needed=True),
        "loss_mask": joined("mask", False, needed=True),
        "advantages": joined("advantages", needed=True),
        "inference_logprobs": joined("logprobs", needed=True),
        "position_ids": [k for size in [*sizes, n_padding] for k in range(size)],
        "sequence_lengths": bounds,
        "temperatures": joined("temperatures", 1.0, needed=True),
        "env_names": np.repeat([*names, ""], [*sizes, n_padding]).tolist(),
        "seq_lens": bounds,
        "ref_logprobs": joined("ref_logprobs"),
        "routed_experts": _experts(np.concatenate(experts)) if experts else None,
        "mm_refs": None,
        "mm_token_type_ids": None,
        "rl_weights": joined("rl_weights"),
        "ce_weights": joined("ce_weights"),
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
    msgspec.

    Parameters
    ----------
    rows, seq_len, **options
        As for `micro_batch_fields`.
    folder : path
        The trainer's batch directory: ``rollouts`` in its output folder at 559b44772.
    step : int
        The step that trains the rows. Its folder must be empty or not exist; the files
        ``step_{step}/rank_{rank}.bin`` appear together.
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


def _on_wire(value: Any) -> Any:
    return [*value.values()] if isinstance(value, dict) else value


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A draft of a folder that becomes the target when the block ends without an error.

    Raises FileExistsError if the target has anything in it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as around:
        draft = Path(around, "draft")
        draft.mkdir()
        yield draft
        if target.exists() and any(target.iterdir()):
            raise FileExistsError(errno.EEXIST, "the folder is not empty", str(target))
        draft.rename(target)  # over an empty folder too
