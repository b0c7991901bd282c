"""Time and memory of the Recorder, next to the work that it cannot avoid.

    python -m benchmarks.recorder

records a session of 200 turns with up to a million tokens, each prompt in a buffer of its
own. It prints the time of a call next to `turns.lcp` of its prompt and the previous path
and, with messages, Python's ``==`` of the request's messages and those of the previous
request; and the session's memory next to the bytes of its new ids and logprobs. The ratio
is of recording to these comparisons. A first table is timed separately. The answers are
checked first.
"""

import argparse
import gc
import itertools
import json
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import trajkit as tk
from benchmarks.compare import commit, machine
from benchmarks.data import Record, Size, Tokens, rollout
from benchmarks.scale import check

Message = dict[str, Any]

SYSTEM, REPLY = 25_000, 300
# sessions of which the memory of a process is taken
SESSIONS = 16


def size_of(n_turns: int, context: int) -> Size:
    return Size(n_turns, context, context // 40, REPLY, REPLY)


def call_of(record: Record) -> Record:
    """What `Recorder.record` takes of a call, without its messages."""
    without = ("session_id", "prompt_messages", "response_message")
    return {name: value for name, value in record.items() if name not in without}


def parsed(value: object) -> Any:
    """The value as a request brings it: every dict and string an object of its own."""
    return json.loads(json.dumps(value))


def check_answers(size: Size) -> None:
    """Exit unless the recorder holds what compacting the same calls gives."""
    records = list(rollout("s", size))
    full = tk.from_records(records)
    by_tokens = tk.from_records({**call_of(one), "session_id": "s"} for one in records)
    recorder = tk.Recorder()
    for record in records:
        said = {name: record[name] for name in ("prompt_messages", "response_message")}
        recorder.record("dicts", **call_of(record), **said)
        recorder.record("parsed", **call_of(record), **parsed(said))
        recorder.record("tokens", **call_of(record))
    for name, table in (
        ("dicts", tk.compact(full)),
        ("parsed", tk.compact(full)),
        ("tokens", tk.compact(by_tokens)),
    ):
        turns = recorder.turns(name)
        named = turns.set_column(0, turns.schema.field(0), [["s"] * turns.num_rows])
        check(named == table, f"{name}: turns are the compacted ones")


def messages_of(record: Record) -> Record:
    return {name: record[name] for name in ("prompt_messages", "response_message")}


def parsed_dicts(record: Record) -> Record:
    return call_of(record) | parsed(messages_of(record))


def shared_dicts(record: Record) -> Record:
    return call_of(record) | messages_of(record)


INPUTS: dict[str, Callable[[Record], Record]] = {
    "none": call_of,
    "dicts, parsed anew for each call": parsed_dicts,
    "dicts, the same objects each time": shared_dicts,
}
"""How messages come."""


def compare(calls: list[Record], context: Tokens, dicts: bool) -> None:
    """What each call has in common with the one before it, and nothing else."""
    held = 0
    before: list[Message] = []
    for call in calls:
        prompt = call["prompt_ids"]
        tk.turns.lcp(prompt, context[:held])
        held = len(prompt) + len(call["output_ids"])
        if not dicts:
            continue
        messages = call["prompt_messages"]
        for now, known in zip(messages, before, strict=False):
            if now != known:
                break
        before = messages


def record_all(recorder: tk.Recorder, calls: list[Record]) -> None:
    for call in calls:
        recorder.record("s", **call)


def seconds(size: Size, repeats: int, how: str) -> dict[str, float]:
    """Seconds of a session for each work, the fastest of the repeats.

    ``turns`` is the first table of the session; ``again`` records every call a second
    time, as a retry: nothing in it is new.
    """
    calls = [INPUTS[how](one) for one in rollout("s", size)]
    last = calls[-1]
    context = np.concatenate([last["prompt_ids"], last["output_ids"]])
    best: dict[str, float] = {}
    for _ in range(repeats):
        recorder = tk.Recorder()
        for name, work in (
            ("compares", partial(compare, calls, context, how.startswith("dicts"))),
            ("record", partial(record_all, recorder, calls)),
            ("turns", partial(recorder.turns, "s")),
            ("again", partial(record_all, recorder, calls)),
        ):
            gc.collect()
            start = time.process_time()
            work()
            taken = time.process_time() - start
            best[name] = min(best.get(name, taken), taken)
    return best


def print_times(size: Size, repeats: int) -> None:
    print(f"a turn of {size.n_turns}, up to {size.context:,} tokens, in microseconds,")
    print("and the ratio to the compares (prefixes, and dicts where there are some):")
    heads = ("compares", "record", "ratio", "turns", "again", "ratio")
    print(f"{'  messages':<36}{''.join(f'{head:>10}' for head in heads)}")
    for how in INPUTS:
        taken = seconds(size, repeats, how)
        line = f"{f'  {how}':<36}"
        for name, each in taken.items():
            line += f"{each / size.n_turns * 1e6:10.1f}"
            if name in ("record", "again"):
                line += f"{each / taken['compares']:10.2f}"
        print(line)


def bytes_held(value: object, seen: set[int]) -> int:
    """Bytes of an object and of what it holds alone, arrays and their buffers included."""
    if id(value) in seen or isinstance(value, type) or callable(value):
        return 0
    seen.add(id(value))
    n = sys.getsizeof(value)
    if isinstance(value, np.ndarray):
        return n if value.base is None else n + bytes_held(value.base, seen)
    if isinstance(value, dict):
        parts = itertools.chain(value.keys(), value.values())
        return n + sum(bytes_held(part, seen) for part in parts)
    if isinstance(value, (list, tuple)):
        return n + sum(bytes_held(part, seen) for part in value)
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
        return n + sum(bytes_held(getattr(value, name), seen) for name in names)
    if hasattr(value, "__dict__"):
        return n + bytes_held(vars(value), seen)
    return n


def print_memory(size: Size) -> None:
    recorder = tk.Recorder()
    recorder.record("empty", prompt_ids=[0], output_ids=[])
    n_ids = n_logprobs = 0
    for record in rollout("s", size):
        n_ids += len(record["output_ids"])
        n_logprobs += len(record["output_logprobs"])
        found = recorder.record("tokens", **call_of(record))
        n_ids += len(record["prompt_ids"]) - found.shared_length
    needed = 4 * n_ids + 4 * n_logprobs
    print(f"\nmemory of the session: {n_ids:,} new ids, {n_logprobs:,} logprobs:")
    of_bytes("4 per id and logprob", needed, needed)
    held = recorder._sessions
    fixed = bytes_held(held["empty"], set())
    of_bytes("held, by tokens", bytes_held(held["tokens"], set()), needed)
    of_bytes("of which of an empty session", fixed, needed)
    words = [sys.executable, "-m", "benchmarks.recorder", "--resident"]
    words += ["--turns", str(size.n_turns), "--context", str(size.context)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    resident, peak = map(int, done.stdout.split())
    of_bytes(f"resident, by tokens, of {SESSIONS} sessions each", resident, needed)
    of_bytes("peak, of the same", peak, needed)


def of_bytes(label: str, value: int, needed: int) -> None:
    print(f"{f'  {label}':<46}{value:14,} bytes   {value / needed:.3f}")


def resident() -> tuple[int, int]:
    """Bytes of the process in memory: now, and at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    said = dict(line.split(":", 1) for line in lines)
    now, most = (int(said[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))
    return now, most


def print_resident(size: Size) -> None:
    """What a session adds to the memory of this process, now and at the most."""
    draw = np.random.default_rng(0)
    recorder = tk.Recorder()
    contexts = draw.integers(0, 1 << 17, (2, size.context), dtype=np.int32)
    logprobs = np.full(REPLY, -0.5, np.float32)

    def record(name: str, context: Tokens) -> None:
        new = (size.context - size.system) // size.n_turns
        for turn in range(size.n_turns):
            stop = size.system + new * (turn + 1)
            recorder.record(
                name,
                prompt_ids=context[: stop - REPLY],
                output_ids=context[stop - REPLY : stop],
                output_logprobs=logprobs,
            )

    record("first", contexts[0])  # what is loaded and allocated once
    gc.collect()
    before = resident()[0]
    for k in range(SESSIONS):
        record(f"s{k}", contexts[k % 2])
    now, most = resident()
    print((now - before) // SESSIONS, (most - before) // SESSIONS)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recorder",
        description="Print what the recorder takes of time and memory, answers checked.",
    )
    parser.add_argument("--turns", type=int, default=200, help="of the session (200)")
    parser.add_argument(
        "--context", type=int, default=1_000_000, help="tokens (1000000)"
    )
    parser.add_argument("--repeats", type=int, default=9, help="of each timing (9)")
    parser.add_argument("--resident", action="store_true", help="only print memory")
    choices = parser.parse_args(words)
    size = size_of(choices.turns, choices.context)
    if choices.resident:
        print_resident(size)
        return
    print(f"command  python -m benchmarks.recorder {shlex.join(words or sys.argv[1:])}")
    print(f"commit   {commit()}")
    print(f"machine  {machine()}")
    print(f"python   {platform.python_version()}, pyarrow {pa.__version__}")
    print("times    processor time of a session, the fastest of the repeats\n")
    check_answers(size_of(choices.turns, choices.context // 8))
    print_times(size, choices.repeats)
    print_memory(size)


if __name__ == "__main__":
    main()
