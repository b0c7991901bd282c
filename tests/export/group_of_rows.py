"""One group of two rollouts, and what the code of trainers made of its rows.

``samples.json`` has the results of the trainers' own code, with the versions that ran.
"""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa

import trajkit as tk
from trajkit.export import (
    areal,
    miles,
    nemo_rl,
    openrlhf,
    prime_rl,
    rlinf,
    roll,
    sft,
    skyrl,
    slime,
    tinker,
    trl,
    verl,
)
from trajkit.schema import ROWS

SAMPLES = json.loads((Path(__file__).parent / "samples.json").read_text())
TARGETS = SAMPLES["targets"]

EVERY = {
    "areal": lambda rows: areal.trajectory_fields(rows, reward="advantage"),
    "miles": miles.sample_fields,
    "nemo_rl": nemo_rl.message_log_fields,
    "openrlhf": openrlhf.execution_fields,
    "prime_rl": lambda rows: prime_rl.sample_fields(rows, env_name="demo"),
    "rlinf": lambda rows: rlinf.rollout_fields(rows, group_size=len(rows)),
    "roll": lambda rows: roll.batch_fields(rows, sequence_length=12, pad_token_id=0),
    "sft": sft.labels_table,
    "skyrl": skyrl.generator_fields,
    "slime": slime.sample_fields,
    "tinker": tinker.datum_fields,
    "trl": trl.rollout_func_fields,
    "trl_async": trl.rollout_sample_fields,
    "verl": verl.agent_loop_fields,
}
"""The fields of every format, by its name."""


def spans_of(mask: list[int]) -> list[dict[str, object]]:
    """One trained span, of a turn of its own, per range of trained tokens."""
    edges = np.flatnonzero(np.diff(mask, prepend=0, append=0)).reshape(-1, 2).tolist()
    return [
        {
            "start": start,
            "stop": stop,
            "turn_index": turn,
            "output_start": 0,
            "output_stop": stop - start,
            "kind": "trained",
        }
        for turn, (start, stop) in enumerate(edges)
    ]


def sample_rows() -> pa.Table:
    """The three rows of ``samples.json`` with the advantages of its exporter."""
    rows = [
        {
            **row,
            "loss_mask": [bool(bit) for bit in row["loss_mask"]],
            "spans": spans_of(row["loss_mask"]),
            "truncated": row["finish_reason"] == "length",
            "use_tool": False,
            "ill_formed": False,
        }
        for row in SAMPLES["rows"]
    ]
    table = pa.Table.from_pylist(rows, ROWS)
    gains = {"s0": 0.5, "s1": -0.5}
    sessions = {"session_id": list(gains), "advantage": list(gains.values())}
    return tk.add_advantages(table, pa.table(sessions))


def one_row_each(rows: pa.Table) -> pa.Table:
    """The rows without the second one of the first rollout."""
    kept = [line for line in range(rows.num_rows) if line != 1]
    return rows.take(kept)


def with_column(rows, name, values, type_=None):
    """The rows with a column, which keeps its type if it is there."""
    if name not in rows.column_names:
        return rows.append_column(name, pa.array(values, type_))
    field = rows.schema.field(name)
    if type_ is not None or name == "advantage":
        field = pa.field(name, type_ or pa.array(values).type)
    at = rows.column_names.index(name)
    return rows.set_column(at, field, pa.array(values, field.type))


def changed(name, values):
    """The rows of `one_row_each` with other values in a column, or without it."""
    rows = one_row_each(sample_rows())
    return (
        rows.drop_columns([name]) if values is None else with_column(rows, name, values)
    )


def plain(value):
    """Arrays as lists, all the way down."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value
