"""Files of exported rows that a trainer loads by itself."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from trajkit.errors import ArgumentError
from trajkit.export import FILE_FORMATS, prime_rl, sft, slime, tinker
from trajkit.io.formats import replacing

Write: TypeAlias = Callable[..., Path]


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

    Raises
    ------
    ArgumentError
        A package that the file needs is missing.
    """
    existed = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return _WRITE[target](rows, folder, **options)
    except ModuleNotFoundError as error:
        raise ArgumentError(
            f"--to {target} needs the package {error.name}: pip install {error.name}"
        ) from None
    finally:
        if not existed and not any(folder.iterdir()):
            folder.rmdir()


def _parquet(make: Callable[..., pa.Table]) -> Write:
    def write(rows: pa.Table, folder: Path, **options: Any) -> Path:
        from pyarrow import parquet as pq

        path = folder / "rows.parquet"
        table = make(rows, **options)
        with replacing(path) as draft:
            pq.write_table(table, draft)
        return path

    return write


def _slime(rows: pa.Table, folder: Path) -> Path:
    path = folder / "rollout_0.pt"
    slime.write_debug_rollout(rows, path)
    return path


def _llama_factory(rows: pa.Table, folder: Path, **options: Any) -> Path:
    dataset = sft.dataset(rows, **options)
    with prime_rl.new_folder(folder / "tokenized") as draft:
        dataset.save_to_disk(draft)
    return folder / "tokenized"


def _tinker(rows: pa.Table, folder: Path) -> Path:
    """The two arguments of a ``Datum`` per line; tinker knows the types of these lists."""
    path = folder / "datums.jsonl"
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
    return path


def _prime_rl(rows: pa.Table, folder: Path, *, seq_len: int, **options: Any) -> Path:
    paths = prime_rl.write_micro_batches(
        rows, folder, 0, seq_len, env_name="trajkit", **options
    )
    return paths[0].parent


_WRITE: dict[str, Write] = {
    "llama-factory": _llama_factory,
    "prime-rl": _prime_rl,
    "sft": _parquet(sft.labels_table),
    "skyrl-sft": _parquet(sft.mask_table),
    "slime": _slime,
    "tinker": _tinker,
}
assert set(_WRITE) == set(FILE_FORMATS)
