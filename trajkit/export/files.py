"""Files of exported rows that a trainer loads by itself."""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from trajkit.errors import ArgumentError, LongRowsWarning
from trajkit.export import FILE_FORMATS, prime_rl, sft, slime, tinker
from trajkit.files.formats import replacing

Write: TypeAlias = Callable[..., object]


_NAMES = {
    "llama-factory": "tokenized",
    "prime-rl": "step_0",
    "sft": "rows.parquet",
    "skyrl-sft": "rows.parquet",
    "slime": "rollout_0.pt",
    "tinker": "datums.jsonl",
}


def path_of(target: str, folder: Path) -> Path:
    """The file or folder that `write_export` makes in ``folder``."""
    if folder.suffix and not folder.is_dir():
        raise ArgumentError(
            f"{folder}: expected a directory, in which the file gets its name"
        )
    return folder / _NAMES[target]


def write_export(rows: pa.Table, target: str, folder: Path, **options: Any) -> Path:
    """Write the file or folder of a trainer, and return its path.

    Parameters
    ----------
    rows : table
        As for the function of the trainer.
    target : str
        A name in `trajkit.export.FILE_FORMATS`.
    folder : Path
        The folder for it; it is made if it does not exist, and removed again if the export
        fails.
    **options
        Of the trainer's function.
    """
    path = path_of(target, folder)
    existed = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _WRITE[target](rows, path, **options)
        return path
    finally:
        if not existed and not any(folder.iterdir()):
            folder.rmdir()


def _parquet(make: Callable[..., pa.Table]) -> Write:
    def write(rows: pa.Table, path: Path, **options: Any) -> None:
        from pyarrow import parquet as pq

        table = make(rows, **options)
        with replacing(path) as draft:
            pq.write_table(table, draft)

    return write


def _llama_factory(rows: pa.Table, path: Path, **options: Any) -> None:
    import datasets

    with warnings.catch_warnings():
        # the limit of TRL's trainer: LLaMA-Factory cuts no rows that are tokenized
        warnings.simplefilter("ignore", LongRowsWarning)
        dataset = sft.dataset(rows, **options)
    silent = sys.stderr.isatty() or datasets.are_progress_bars_disabled()
    with prime_rl.new_folder(path) as draft:
        if not silent:
            datasets.disable_progress_bars()
        try:
            dataset.save_to_disk(draft)
        finally:
            if not silent:
                datasets.enable_progress_bars()


def _tinker(rows: pa.Table, path: Path) -> None:
    """The two arguments of a ``Datum`` per line; tinker knows the types of these lists."""
    datums = [
        {
            "model_input": fields["model_input"],
            "loss_fn_inputs": {
                name: fields[name].tolist()
                for name in ("target_tokens", "logprobs", "advantages")
            },
        }
        for fields in tinker.datum_fields(rows)
    ]
    text = "".join(json.dumps(datum) + "\n" for datum in datums)
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def _prime_rl(rows: pa.Table, path: Path, *, seq_len: int, **options: Any) -> None:
    prime_rl.write_micro_batches(
        rows, path.parent, 0, seq_len, env_name="trajkit", **options
    )


_WRITE: dict[str, Write] = {
    "llama-factory": _llama_factory,
    "prime-rl": _prime_rl,
    "sft": _parquet(sft.labels_table),
    "skyrl-sft": _parquet(sft.mask_table),
    "slime": slime.write_debug_rollout,
    "tinker": _tinker,
}
assert set(_WRITE) == set(_NAMES) == set(FILE_FORMATS)
