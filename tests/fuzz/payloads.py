"""Payload columns for `tests.fuzz`, and what rows must have of them.

A turn's payloads depend on its own ids and the seed alone, so that a case keeps them
while it is reduced. ``prefix`` has an element for each id from some position on, which
follows from the ids up to it. ``sample`` has an element or a null for each id, if it is not
null. ``copy`` has the ids themselves.
"""

from collections.abc import Iterable
from random import Random
from typing import Any

import pyarrow as pa

import trajkit as tk
from tests.fuzz.sessions import Turn

PAYLOADS = ("prefix", "sample", "copy")
COLUMNS = ("prefix", "prefix_start", "sample", "copy")


def columns(delta: pa.Table, turns: list[Turn], seed: int) -> dict[str, list[Any]]:
    """The payload columns of turns, given their delta form, by name."""
    found: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    samples = []
    for shared, turn in zip(delta["shared_length"].to_pylist(), turns, strict=True):
        path = turn["prompt_ids"] + turn["output_ids"]
        draw = Random(f"{seed} {path}")
        start = draw.choice([shared, max(shared - 1, 0), 0])
        sample = [draw.choice([k, -k, k, None]) for k in range(len(path))]
        found["prefix"].append(
            [element(path[: k + 1]) for k in range(start, len(path))]
        )
        found["prefix_start"].append(start)
        found["copy"].append(path)
        samples.append(sample)
        found["sample"].append(None if draw.random() < 0.2 else sample)
    if turns and not any(found["sample"]):  # a recorder makes no column of nothing
        found["sample"][0] = samples[0]
    return found


def with_payloads(table: pa.Table, columns: dict[str, list[Any]]) -> pa.Table:
    """The turns with payload columns."""
    for name, values in columns.items():
        type_ = pa.int32() if name.endswith("_start") else pa.list_(pa.int64())
        table = table.append_column(name, pa.array(values, type_))
    return table


def element(path: list[int]) -> int:
    """What ``prefix`` has for the last id of a path."""
    return hash(tuple(path)) % 1000


def payload_difference(
    rows: Iterable[Turn], turns: Iterable[Turn], policy: tk.Policy
) -> str | None:
    """The first element of rows that is not the one of their turns, as text, or None.

    Tokens of prompts are not compared in spliced rows, whose prompts are of several turns.
    """
    by_name = {(turn["session_id"], turn["turn_index"]): turn for turn in turns}
    spliced = policy.on_drift == "splice"
    for row in rows:
        session, ids = row["session_id"], row["input_ids"]
        if row["copy"] != ids:
            return f"{session}, row {row['row_index']}: copy is not input_ids"
        last = by_name[session, row["last_turn"]]
        expected = {
            "prefix": [element(ids[: k + 1]) for k in range(len(ids))],
            "sample": [*(last["sample"] or ()), *[None] * len(ids)][: len(ids)],
        }
        known = set() if spliced else set(range(len(ids)))
        for span in row["spans"]:
            turn = by_name[session, span["turn_index"]]
            path = turn["prompt_ids"] + turn["output_ids"]
            for k in range(span["start"], span["stop"]):
                at = len(turn["prompt_ids"]) + span["output_start"] + k - span["start"]
                own = turn["sample"][at] if turn["sample"] else None
                expected["prefix"][k] = element(path[: at + 1])
                if own is not None or spliced:
                    expected["sample"][k : k + 1] = [own]
                if own is None and spliced:  # may come from a later prompt
                    known.discard(k)
                else:
                    known.add(k)
        for name in expected:
            for k in sorted(known):
                if row[name][k] != expected[name][k]:
                    return (
                        f"{session}, row {row['row_index']}: {name}[{k}] is "
                        f"{row[name][k]}, expected {expected[name][k]}"
                    )
    return None
