"""What reading a log costs: JSON lines to token ids, by the libraries there are.

The log is one rollout as a gateway writes it: every line has the whole prompt, as messages
and as ids. Each way must give the same ids, logprobs and messages; libraries that are not
installed are left out. Times are of the processor, the least of some runs.
"""

import argparse
import importlib
import io
import json
import platform
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import trajkit as tk
from benchmarks import data
from trajkit.files.jsonl import calls

IDS = ("prompt_ids", "output_ids")
Answer = tuple[bytes, bytes, Any]
Way = Callable[[Path], Iterator[Answer]]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=data.SIZES, default="long")
    parser.add_argument("--rollouts", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    lines = log_lines(data.SIZES[arguments.size], arguments.rollouts)
    with tempfile.TemporaryDirectory() as folder:
        print(f"Python {platform.python_version()}, {platform.machine()}")
        for order in ("in order", "shuffled"):
            path = Path(folder) / f"{order}.jsonl"
            if order == "shuffled":
                random.Random(0).shuffle(lines)
            path.write_bytes(b"\n".join([*lines, b""]))
            n_bytes = path.stat().st_size
            print(f"\n{order}: {len(lines)} lines, {n_bytes / 1e6:.1f} MB")
            table(path, n_bytes, arguments.runs)


def log_lines(size: data.Size, n_rollouts: int) -> list[bytes]:
    """The log of rollouts, a line per call."""
    return [
        json.dumps(record).encode()
        for k in range(n_rollouts)
        for record in data.as_parsed(data.rollout(f"s{k}", size, seed=k))
    ]


def measured(
    path: Path, runs: int, ways: list[tuple[str, Way, bool]]
) -> Iterator[tuple[str, float | ImportError]]:
    """What each way takes in seconds, after its answers were checked.

    Of a library that is not installed, the error that says so.
    """
    expected = said_by(json_lines, path)
    for name, way, is_whole in ways:
        read = whole(way) if is_whole else way
        try:
            assert said_by(way, path) == expected, name
        except ImportError as error:
            yield name, error
            continue
        yield name, least(lambda read=read: drain(read(path)), runs)


def table(path: Path, n_bytes: int, runs: int) -> None:
    """Print what each way takes."""
    bases: list[float] = []
    print(f"{'':40} {'ms':>8} {'MB/s':>8} {'line by line':>13} {'into lists':>11}")
    for name, took in measured(path, runs, WAYS):
        if isinstance(took, ImportError):
            print(f"{name:40} not installed: {took.name}")
            continue
        # what json.loads takes line by line, and for lists of all lines: the first two
        bases = [*bases, took][:2]
        rate = n_bytes / took / 1e6
        times = " ".join(
            f"{base / took:{width}.1f}"
            for base, width in zip(bases, (13, 11), strict=False)
        )
        print(f"{name:40} {took * 1e3:8.1f} {rate:8.0f} {times}")


def least(work: Callable[[], None], runs: int) -> float:
    """Seconds of processor time, the least of some runs."""
    best = float("inf")
    for _ in range(runs):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def drain(items: Iterator[Any]) -> None:
    for _ in items:
        pass


def whole(way: Way) -> Way:
    """The same, with all lines held together."""
    return lambda path: iter(list(way(path)))


def said_by(way: Way, path: Path) -> list[bytes]:
    """The answers of a way in any order, each as short as they are surely told apart."""
    digests = (blake2b(repr(answer).encode()) for answer in answers_of(way(path)))
    return sorted(digest.digest() for digest in digests)


def answers_of(records: Iterator[Any]) -> Iterator[Answer]:
    """What was read, in one form: prompt and output ids, logprobs, messages."""
    for record in records:
        if isinstance(record, pa.RecordBatch | pa.Table):
            yield from answers_of(iter(rows_of(record)))
            continue
        ids = b"|".join(np.asarray(record[name], np.int32).tobytes() for name in IDS)
        logprobs = np.asarray(record["output_logprobs"], np.float32).tobytes()
        yield ids, logprobs, in_order(record["prompt_messages"])


def in_order(value: Any) -> Any:
    """JSON with the keys of every object sorted, and those left out that are null."""
    if isinstance(value, dict):
        kept = {key: in_order(item) for key, item in value.items() if item is not None}
        return dict(sorted(kept.items()))
    return [in_order(item) for item in value] if isinstance(value, list) else value


def rows_of(table: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """Rows of a table of turns, or of one that has a column for each key."""
    rows = table.to_pylist()
    shown: dict[bytes, str] = {}
    for row in rows:
        if "messages" in row:
            for message in [*row["messages"], row["response"]]:
                if message["body"] is not None:
                    shown[message["key"]] = message["body"]
            row["prompt_messages"] = [
                json.loads(shown[m["key"]]) for m in row["messages"]
            ]
    return rows


def json_lines(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        for line in file:
            yield json.loads(line)


def by_loads(module: str, name: str) -> Way:
    """A library that makes Python values of a text."""

    def way(path: Path) -> Iterator[Any]:
        loads = getattr(importlib.import_module(module), name)
        with path.open("rb") as file:
            for line in file:
                yield loads(line)

    return way


def simdjson(path: Path) -> Iterator[Any]:
    parser = importlib.import_module("simdjson").Parser()
    with path.open("rb") as file:
        for line in file:
            found = parser.parse(line)
            record = {"prompt_messages": found["prompt_messages"].as_list()}
            for name in IDS:
                wide = np.frombuffer(found[name].as_buffer(of_type="i"), np.int64)
                record[name] = wide.astype(np.int32)
            numbers = found["output_logprobs"].as_buffer(of_type="d")
            record["output_logprobs"] = np.frombuffer(numbers).astype(np.float32)
            del found  # the parser has one text at a time
            yield record


def arrow(path: Path) -> Iterator[Any]:
    reader = importlib.import_module("pyarrow.json")
    options = reader.ReadOptions(use_threads=False, block_size=1 << 26)
    yield reader.read_json(path, read_options=options)


def polars(path: Path) -> Iterator[Any]:
    frame = importlib.import_module("polars").read_ndjson(io.BytesIO(path.read_bytes()))
    yield frame.to_arrow()


def trajkit_records(path: Path) -> Iterator[Any]:
    yield from calls(path, "jsonl")


def trajkit_turns(path: Path) -> Iterator[Any]:
    yield tk.read_turns(path)


WAYS: list[tuple[str, Way, bool]] = [
    ("json.loads, line by line", json_lines, False),
    ("json.loads, all lines held", json_lines, True),
    ("orjson", by_loads("orjson", "loads"), False),
    ("msgspec", by_loads("msgspec.json", "decode"), False),
    ("simdjson, ids and logprobs as buffers", simdjson, False),
    ("pyarrow.json, to a table", arrow, False),
    ("polars, to a table", polars, False),
    ("trajkit, line by line", trajkit_records, False),
    ("trajkit.read_turns, to checked turns", trajkit_turns, False),
]


if __name__ == "__main__":
    main()
