"""A small run as files, for every engine the same."""

import random

import pyarrow as pa
import pyarrow.parquet as pq

import trajkit as tk

N_FILES = 6


def session(name, n_turns):
    """A session whose every second reply comes back with another last token."""
    prompt = [1, 2]
    for k in range(n_turns):
        output = [10 * k + i for i in range(3)]
        yield {
            "session_id": name,
            "turn_index": k,
            "prompt_ids": prompt,
            "output_ids": output,
            "output_logprobs": [-0.5] * 3,
        }
        prompt = [*prompt, *output[: -(k % 2) or None], 7, 8]


def turns_of(n_sessions=24):
    return tk.compact(
        tk.from_records(
            turn for k in range(n_sessions) for turn in session(f"s{k:02d}", 1 + k % 5)
        )
    )


def write_files(turns, folder):
    """Whole sessions in each file."""
    folder.mkdir()
    names = turns["session_id"].unique().to_pylist()
    for k in range(N_FILES):
        some = pa.array(
            name in names[k::N_FILES] for name in turns["session_id"].to_pylist()
        )
        tk.write_turns(turns.filter(some), folder / f"{k}.parquet")


def write_scattered(turns, folder):
    """Turns in any order, in any file."""
    folder.mkdir()
    rows = list(range(turns.num_rows))
    random.Random(0).shuffle(rows)
    for k in range(N_FILES):
        pq.write_table(turns.take(rows[k::N_FILES]), folder / f"{k}.parquet")


def in_order(rows):
    """Rows as lists of dicts, whatever the order of the sessions."""
    lines = tk.validate(rows, "rows").to_pylist()
    return sorted(lines, key=lambda line: (line["session_id"], line["row_index"]))
