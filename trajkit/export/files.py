"""Files of exported rows that a trainer loads by itself."""

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet as pq

from trajkit.errors import ArgumentError, LongRowsWarning
from trajkit.export import FILE_FORMATS, prime_rl, sft, slime, tinker
from trajkit.files.formats import replacing


def path_of(target: str, folder: Path) -> Path:
    """The file or folder that `write_export` makes in ``folder``."""
    if folder.suffix and not folder.is_dir():
        raise ArgumentError(
            f"{folder}: expected a directory, in which the file gets its name"
        )
    return folder / _WRITE[target][0]


def write_export(rows: pa.Table, target: str, folder: Path, **options: Any) -> Path:
    """Write the file or folder of a trainer in ``folder``, and return its path.

    ``target`` is a name in `trajkit.export.FILE_FORMATS`, ``options`` are those of the
    trainer's function. The folder is made if it does not exist, and removed again if the
    export fails.
    """
    path = path_of(target, folder)
    existed = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _WRITE[target][1](rows, path, **options)
        return path
    finally:
        if not existed and not any(folder.iterdir()):
            folder.rmdir()


def _parquet(
    make: Callable[..., pa.Table], rows: pa.Table, path: Path, **options: Any
) -> None:
    table = make(rows, **options)
    with replacing(path) as draft:
        pq.write_table(table, draft)


def _llama_factory(rows: pa.Table, path: Path, **options: Any) -> None:
    import datasets

    with warnings.catch_warnings():
        # the limit of TRL's trainer: LLaMA-Factory cuts no rows that are tokenized
        warnings.simplefilter("ignore", LongRowsWarning)
        dataset = sft.dataset(rows, **options)
    bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        with prime_rl.new_folder(path) as draft:
            dataset.save_to_disk(draft)
    finally:
        if bars:
            datasets.enable_progress_bars()


def _tinker(rows: pa.Table, path: Path) -> None:
    """The two arguments of a ``Datum`` per line; tinker knows the types of these lists."""
    lines = []
    for fields in tinker.datum_fields(rows):
        inputs = {name: fields[name].tolist() for name in tinker.INPUTS[:3]}
        line = {"model_input": fields["model_input"], "loss_fn_inputs": inputs}
        lines.append(json.dumps(line) + "\n")
    with replacing(path) as draft:
        draft.write_text("".join(lines), encoding="utf-8")


def _prime_rl(rows: pa.Table, path: Path, **options: Any) -> None:
    options = {"step": 0, "env_name": "trajkit", "seq_len": 2048, **options}
    prime_rl.write_micro_batches(rows, path.parent, **options)


# the name of the file or folder, and what writes it
_WRITE: dict[str, tuple[str, Callable[..., object]]] = {
    "llama-factory": ("tokenized", _llama_factory),
    "prime-rl": ("step_0", _prime_rl),
    "sft": ("rows.parquet", partial(_parquet, sft.labels_table)),
    "skyrl-sft": ("rows.parquet", partial(_parquet, sft.mask_table)),
    "slime": ("rollout_0.pt", slime.write_debug_rollout),
    "tinker": ("datums.jsonl", _tinker),
}
assert set(_WRITE) == set(FILE_FORMATS)
