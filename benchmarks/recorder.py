"""Time and memory of the Recorder, next to the work that it cannot avoid.

    python -m benchmarks.recorder

records a session of 200 turns with up to a million tokens, each prompt in a buffer of its
own. It prints the time of a call next to `turns.lcp` of its prompt and the previous path
and, with message dicts, Python's ``==`` of the request's messages and those of the previous
request; the time of rows of short sessions; and the session's memory next to the bytes of
its new ids and logprobs. The ratio is of recording to these comparisons. A first table is
timed separately. The answers are checked first.
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
from benchmarks.scale import check, without_bodies

Message = dict[str, Any]
Work = Callable[[Record], None]

SYSTEM, REPLY = 25_000, 300
# turns of the sessions whose rows are timed
SHORT = (1, 10, 40)
# sessions of which the memory of a process is taken
SESSIONS = 16


def size_of(n_turns: int, context: int) -> Size:
    return Size(n_turns, context, context // 40, REPLY, REPLY)


def call_of(record: Record) -> Record:
    """What `Recorder.record` takes of a call, without its messages."""
    without = ("session_id", "prompt_messages", "response_message")
    return {name: value for name, value in record.items() if name not in without}


def keyed(message: Message) -> tuple[bytes, str]:
    return tk.turns.message_key(message), str(message["role"])


class Keys:
    """The keys of a rollout's messages, each computed once."""

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[bytes, str]] = {}
        self._messages: list[Message] = []

    def pair(self, message: Message) -> tuple[bytes, str]:
        known = self._pairs.get(id(message))
        if known is None:
            known = self._pairs[id(message)] = keyed(message)
            self._messages.append(message)  # so that its id stays its own
        return known

    def pairs(self, messages: list[Message]) -> list[tuple[bytes, str]]:
        return [self.pair(message) for message in messages]


def with_keys(record: Record, keys: Keys) -> Record:
    """The call with each message as its key and role."""
    return {
        **call_of(record),
        "prompt_messages": keys.pairs(record["prompt_messages"]),
        "response_message": keys.pair(record["response_message"]),
    }


def parsed(value: object) -> Any:
    """The value as a request brings it: every dict and string an object of its own."""
    return json.loads(json.dumps(value))


def check_answers(size: Size) -> None:
    """Exit unless the recorder holds what compacting the same calls gives."""
    records = list(rollout("s", size))
    full = tk.from_records(records)
    by_tokens = tk.from_records({**call_of(one), "session_id": "s"} for one in records)
    keys = Keys()
    recorder = tk.Recorder()
    for record in records:
        said = {name: record[name] for name in ("prompt_messages", "response_message")}
        recorder.record("dicts", **call_of(record), **said)
        recorder.record("parsed", **call_of(record), **parsed(said))
        recorder.record("keys", **with_keys(record, keys), use_tool=True)
        recorder.record("tokens", **call_of(record))
    for name, table in (
        ("dicts", tk.compact(full)),
        ("parsed", tk.compact(full)),
        ("keys", tk.compact(without_bodies(full))),
        ("tokens", tk.compact(by_tokens)),
    ):
        turns = recorder.turns(name)
        named = turns.set_column(0, turns.schema.field(0), [["s"] * turns.num_rows])
        check(named == table, f"{name}: turns are the compacted ones")
    rows = tk.linearize(full, "faithful")
    check(
        recorder.rows("dicts", "faithful").drop_columns("session_id")
        == rows.drop_columns("session_id"),
        "rows are those of the table",
    )


def messages_of(record: Record) -> Record:
    return {name: record[name] for name in ("prompt_messages", "response_message")}


def by_tokens(record: Record, keys: Keys) -> Record:
    return call_of(record)


def parsed_dicts(record: Record, keys: Keys) -> Record:
    return call_of(record) | parsed(messages_of(record))


def shared_dicts(record: Record, keys: Keys) -> Record:
    return call_of(record) | messages_of(record)


INPUTS: dict[str, Callable[[Record, Keys], Record]] = {
    "none": by_tokens,
    "keys": with_keys,
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
    keys = Keys()
    calls = [INPUTS[how](one, keys) for one in rollout("s", size)]
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


def short_session(n_turns: int) -> list[Record]:
    """Calls of a few tokens each, with messages."""
    calls: list[Record] = []
    prompt = [1, 2, 3]
    messages: list[Message] = [{"role": "user", "content": "task"}]
    for turn in range(n_turns):
        reply = {"role": "assistant", "content": f"reply {turn}"}
        output = [10 + turn, 11 + turn]
        calls.append(
            {
                "prompt_ids": np.array(prompt, np.int32),
                "output_ids": np.array(output, np.int32),
                "output_logprobs": np.full(2, -0.5, np.float32),
                "finish_reason": "stop",
                "prompt_messages": list(messages),
                "response_message": reply,
            }
        )
        prompt = [*prompt, *output, 7]
        messages += [reply, {"role": "user", "content": f"result {turn}"}]
    return calls


def print_short(repeats: int) -> None:
    """The fixed cost of rows: sessions so short that their tokens cost nothing."""
    print("\nrows of a short session in milliseconds, fastest and median:")
    for name in ("faithful", "strict"):
        for n_turns in SHORT:
            calls = short_session(n_turns)
            recorder = tk.Recorder()
            record_all(recorder, calls)
            table = tk.from_records({"session_id": "s", **call} for call in calls)
            check(
                recorder.rows("s", name, reward=1.0)
                == tk.linearize(table, name, reward=1.0),
                f"{name}, {n_turns} turns: rows are those of the table",
            )
            taken = []
            for _ in range(100 * repeats):
                start = time.perf_counter()
                recorder.rows("s", name, reward=1.0)
                taken.append(1e3 * (time.perf_counter() - start))
            label = f"  {name}, turns: {n_turns}"
            print(f"{label:<36}{min(taken):10.3f}{np.median(taken):10.3f}")


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
    recorder, keys = tk.Recorder(), Keys()
    recorder.record("empty", prompt_ids=[0], output_ids=[])
    n_ids = n_logprobs = 0
    for record in rollout("s", size):
        call = with_keys(record, keys)
        n_ids += len(record["output_ids"])
        n_logprobs += len(record["output_logprobs"])
        recorder.record("keys", **call)
        found = recorder.record("tokens", **call_of(record))
        n_ids += len(record["prompt_ids"]) - found.shared_length
    needed = 4 * n_ids + 4 * n_logprobs
    print(f"\nmemory of the session: {n_ids:,} new ids, {n_logprobs:,} logprobs:")
    of_bytes("4 per id and logprob", needed, needed)
    held = recorder._sessions
    fixed = bytes_held(held["empty"], set())
    for name in ("tokens", "keys"):
        of_bytes(f"held, by {name}", bytes_held(held[name], set()), needed)
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
    print_short(choices.repeats)
    print_memory(size)


if __name__ == "__main__":
    main()
