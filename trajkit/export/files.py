"""Files of exported rows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from trajkit.export import (
    areal,
    nemo_rl,
    openrlhf,
    prime_rl,
    sft,
    skyrl,
    slime,
    tinker,
    trl,
    verl,
)


def _fields(make: Callable[[pa.Table], Any]) -> Callable[[pa.Table, Path], Path]:
    """Write the fields as JSON Lines, one line per row, rollout or output."""

    def write(rows: pa.Table, folder: Path) -> Path:
        found = make(rows)
        path = folder / "fields.jsonl"
        lines = found if isinstance(found, list) else [found]
        with path.open("w", encoding="utf-8") as file:
            for line in lines:
                text = json.dumps(line, default=lambda array: array.tolist())
                file.write(text + "\n")
        return path

    return write


def _parquet(make: Callable[[pa.Table], pa.Table]) -> Callable[[pa.Table, Path], Path]:
    def write(rows: pa.Table, folder: Path) -> Path:
        from pyarrow import parquet as pq

        path = folder / "rows.parquet"
        pq.write_table(make(rows), path)
        return path

    return write


def _slime(rows: pa.Table, folder: Path) -> Path:
    path = folder / "rollout_0.pt"
    slime.write_debug_rollout(rows, path)
    return path


TARGETS: dict[str, Callable[[pa.Table, Path], Path]] = {
    "areal": _fields(lambda rows: areal.trajectory_fields(rows, weighted=True)),
    "nemo-rl": _fields(nemo_rl.message_log_fields),
    "openrlhf": _fields(openrlhf.execution_fields),
    "prime-rl": _fields(lambda rows: prime_rl.sample_fields(rows, env_name="trajkit")),
    "sft": _parquet(sft.labels_table),
    "skyrl": _fields(skyrl.generator_fields),
    "skyrl-sft": _parquet(sft.mask_table),
    "slime": _slime,
    "tinker": _fields(tinker.datum_fields),
    "trl": _fields(trl.rollout_func_fields),
    "trl-async": _fields(trl.rollout_sample_fields),
    "verl": _fields(verl.agent_loop_fields),
}
"""How each target's file is written."""
