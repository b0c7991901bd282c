"""The stages that have no benchmark of their own: recording a call, and writing rows."""

import io
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import trajkit as tk
from benchmarks.compare import Timing
from benchmarks.data import Size, rollout
from benchmarks.scale import by_turns, check, without_text
from benchmarks.stream import PLAIN_ROWS


def record(size: Size, repeats: int) -> tuple[Timing, Timing]:
    """Times per turn: of `Recorder.record`, and of comparing the prompts alone.

    Prompts and outputs are buffers, and calls go by their tokens. What a prompt is compared
    with is the prompt and output before it.
    """
    calls = list(rollout("s", size, spoken=False))
    for call in calls:
        del call["session_id"]
    held = [np.concatenate([c["prompt_ids"], c["output_ids"]]) for c in calls]
    pairs = [
        (before, call["prompt_ids"])
        for before, call in zip(held, calls[1:], strict=False)
    ]

    def recorded() -> tk.Recorder:
        recorder = tk.Recorder()
        for call in calls:
            recorder.record("s", **call)
        return recorder

    def compared() -> list[int]:
        return [tk.turns.lcp(before, prompt) for before, prompt in pairs]

    named = [{"session_id": "s", **call} for call in calls]
    check(
        recorded().turns("s") == tk.compact(tk.from_records(named)),
        "the recorder holds what compact makes of the calls",
    )
    whole = [len(before) for before, _ in pairs]
    check(compared() == whole, "each prompt goes on from what was held before")
    works, shares = (recorded, compared), (len(calls), len(calls))
    mine, alone = by_turns(repeats, works, shares, time.process_time)
    return mine, alone


def export(size: Size, repeats: int) -> tuple[Timing, Timing]:
    """Times of writing a row as Parquet: from trajkit's rows, and from lists.

    The lists are written by pyarrow, in the columns that they have.
    """
    turns = tk.from_records(without_text(call) for call in rollout("s", size))
    rows = tk.linearize(turns, "slime")
    lists = rows.select(PLAIN_ROWS.names).to_pylist()

    def ours() -> io.BytesIO:
        file = io.BytesIO()
        tk.write_rows(rows, file, format="parquet")
        return file

    def plain() -> io.BytesIO:
        file = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(lists, PLAIN_ROWS), file)
        return file

    for write in (ours, plain):
        file = write()
        file.seek(0)
        back = pq.read_table(file, columns=PLAIN_ROWS.names).to_pylist()
        check(back == lists, "what is written is read again")
    shares = (rows.num_rows, rows.num_rows)
    mine, theirs = by_turns(repeats, (ours, plain), shares, time.process_time)
    return mine, theirs
