"""What the linear forms take, and how time grows with turns and falls with threads.

    python -m benchmarks.scale

prints the bytes of one rollout in full and in delta form and of its rows in either
layout; the rates of `compact` and `expand` beside a plain copy; and the time of
`linearize` from delta form while turns double, and on one and two threads. Every answer
is checked before it is timed. Where one thread works, its processor time is taken, which
other programs disturb less than the clock; threads are timed by the clock.
"""

import argparse
import gc
import io
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pyarrow as pa

import trajkit as tk
from benchmarks.compare import Timing, commit, machine
from benchmarks.data import Record, Size, quoted, rollout

TOKENS_PER_TURN = 1024


def without_text(record: Record) -> Record:
    """The call with messages of a few bytes: what is measured is not their text."""
    messages = [
        {"role": said["role"], "content": str(k)}
        for k, said in enumerate(record["prompt_messages"])
    ]
    response = {"role": "assistant", "content": str(len(messages))}
    return {**record, "prompt_messages": messages, "response_message": response}


def recorded(name: str, size: Size, shape: str) -> pa.Table:
    """A rollout in delta form, taken call by call; no two prompts are held at a time."""
    recorder = tk.Recorder()
    for record in rollout(name, size, shape):
        call = without_text(record)
        del call["session_id"]
        recorder.record(name, **call)
    return recorder.turns(name)


def without_bodies(table: pa.Table) -> pa.Table:
    """Full turns of which message keys and roles are left."""

    def bare(messages: pa.StructArray) -> pa.StructArray:
        key, role, body = messages.flatten()
        fields = [key, role, pa.nulls(len(body), body.type)]
        return pa.StructArray.from_arrays(fields, fields=list(messages.type))

    lists = table["messages"].combine_chunks()
    lists = pa.LargeListArray.from_arrays(lists.offsets, bare(lists.values))
    reply = bare(table["response"].combine_chunks())
    for name, column in (("messages", lists), ("response", reply)):
        at = table.column_names.index(name)
        table = table.set_column(at, table.field(at), column)
    return table


def copies(table: pa.Table, n: int) -> pa.Table:
    """The same session n times, under names of their own."""
    parts = []
    for k in range(n):
        names = pa.array([f"s{k}"] * table.num_rows)
        parts.append(table.set_column(0, table.field(0), names))
    return pa.concat_tables(parts).combine_chunks()


def file_bytes(table: pa.Table, format: str) -> int:
    """What a file of the turns takes."""
    file = io.BytesIO()
    tk.write_turns(table, file, format=format)
    return file.tell()


def json_bytes(table: pa.Table) -> int:
    """What the turns take as JSON lines, message keys in hexadecimal digits."""
    return sum(
        len(json.dumps(row, default=bytes.hex)) + 1
        for start in range(table.num_rows)
        for row in table.slice(start, 1).to_pylist()
    )


def print_sizes(size: Size) -> None:
    full = without_bodies(tk.from_records(rollout("s", size)))
    delta = tk.compact(full)
    check(tk.expand(delta) == full, "expand gives back what was compacted")
    print(f"{size.n_turns} turns, {size.context} tokens, keys and roles, no bodies:")
    line("  JSON lines, in full", json_bytes(full), "bytes")
    for label, table in (("in full", full), ("delta form", delta)):
        line(f"  Arrow IPC, {label}", file_bytes(table, "arrow"), "bytes")
        line(f"  Parquet zstd, {label}", file_bytes(table, "parquet"), "bytes")
    log = pa.concat_tables([delta.slice(k, 1) for k in range(len(delta))])
    line("  Arrow IPC, delta form, a batch a turn", file_bytes(log, "arrows"), "bytes")


def print_layouts(size: Size) -> None:
    turns = recorded("s", size, "tail_changed")
    full, report = tk.linearize(turns, report=True)
    suffix = tk.linearize(turns, layout="suffix")
    check(tk.full_rows(suffix) == full, "full_rows gives the full layout back")
    print(f"\nrows of policy faithful, every reply drifts, {size.n_turns} turns:")
    line("  tokens in layout full", report["tokens_forward"][0].as_py(), "tokens")
    n = sum(len(ids) for ids in suffix["suffix_ids"])
    line("  tokens in layout suffix", n, "tokens")


def print_rates(size: Size, repeats: int) -> None:
    full = without_bodies(tk.from_records(rollout("s", size)))
    delta = tk.compact(full)
    ids = full["prompt_ids"].combine_chunks().flatten().to_numpy()
    print(f"\nper rollout of {size.n_turns} turns, full prompts of {ids.nbytes} bytes:")
    room = np.empty_like(ids)
    room.fill(0)
    rates = (
        ("copy the prompts", partial(np.copyto, room, ids)),
        ("compact", partial(tk.compact, full)),
        ("expand", partial(tk.expand, delta)),
    )
    for label, work in rates:
        taken = worked(repeats, work, 1)
        rate = ids.nbytes / fastest(taken) / 1e9
        print(f"{f'  {label}':<44}{taken}   {rate:.2f} GB/s")


def worked(repeats: int, work: Callable[[], object], share: int) -> Timing:
    """Seconds of processor time that ``work`` takes, divided by ``share``."""
    return by_turns(repeats, [work], [share], time.process_time)[0]


def by_turns(
    repeats: int,
    works: Sequence[Callable[[], object]],
    shares: Sequence[int],
    clock: Callable[[], float],
) -> list[Timing]:
    """Seconds that each of several works takes, divided by its share.

    They take turns, so that a machine that is slower for a while is so for all of them.
    """
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for work, share, into in zip(works, shares, seconds, strict=True):
            gc.collect()
            start = clock()
            result = work()
            into.append((clock() - start) / share)
            del result
    return [Timing(into) for into in seconds]


def print_growth(shape: str, policy: str, layout: str, most: int, repeats: int) -> None:
    print(
        f"\nlinearize from delta form, {shape}, policy {policy}, layout {layout}, "
        f"{TOKENS_PER_TURN} tokens a turn, one thread, per rollout:"
    )
    numbers = [64 << k for k in range((most // 64).bit_length())]
    works, shares = [], []
    for n_turns in numbers:
        # tables of one size in tokens, so that caches hold the same share of each
        n = 2 * most // n_turns
        size = quoted(shape, n_turns, TOKENS_PER_TURN * n_turns)
        turns = copies(recorded("s", size, shape), n)
        work = partial(tk.linearize, turns, policy, layout=layout, threads=1)
        check(work().num_rows % n == 0, "each copy gives as many rows")
        works.append(work)
        shares.append(n)
    before: Timing | None = None
    for n_turns, taken in zip(
        numbers, by_turns(repeats, works, shares, time.process_time), strict=True
    ):
        each = fastest(taken) / (TOKENS_PER_TURN * n_turns) * 1e9
        grown = "" if before is None else f"{fastest(taken) / fastest(before):7.2f}"
        print(f"{f'  {n_turns} turns':<44}{taken}   {each:.2f} ns a token{grown}")
        before = taken


def print_threads(size: Size, repeats: int) -> None:
    n = 128
    turns = copies(recorded("s", size, "clean"), n)
    one = tk.linearize(turns, "slime", threads=1)
    check(one == tk.linearize(turns, "slime", threads=2), "threads give the same rows")
    del one
    print(f"\nlinearize from delta form, {n} rollouts of {size.n_turns} turns, slime:")
    works = [partial(tk.linearize, turns, "slime", threads=k) for k in (1, 2)]
    times = by_turns(repeats, works, [n, n], time.perf_counter)
    for threads, taken in zip((1, 2), times, strict=True):
        ratio = fastest(times[0]) / fastest(taken)
        print(f"{f'  {threads} threads':<44}{taken}   {ratio:.2f} times one")


def fastest(taken: Timing) -> float:
    return min(taken.seconds)


def line(label: str, value: int, unit: str) -> None:
    print(f"{label:<44}{value:14,} {unit}")


def check(holds: bool, what: str) -> None:
    if not holds:
        sys.exit(f"this does not hold: {what}")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        description="Print bytes of the linear forms, and times, answers checked first.",
    )
    parser.add_argument("--turns", type=int, default=128, help="of a rollout (128)")
    parser.add_argument("--most", type=int, default=1024, help="turns, growing (1024)")
    parser.add_argument("--repeats", type=int, default=9, help="of each timing (9)")
    choices = parser.parse_args(words)
    size = quoted("clean", choices.turns, TOKENS_PER_TURN * choices.turns)
    drifting = quoted("tail_changed", choices.turns, TOKENS_PER_TURN * choices.turns)
    print(f"command  python -m benchmarks.scale {shlex.join(words or sys.argv[1:])}")
    print(f"commit   {commit()}")
    print(f"machine  {machine()}")
    print(f"python   {platform.python_version()}, pyarrow {pa.__version__}")
    print("times    medians, and the range; ratios are of the fastest\n")
    print_sizes(size)
    print_layouts(drifting)
    print_rates(size, choices.repeats)
    print_growth("clean", "slime", "full", choices.most, choices.repeats)
    print_growth("tail_changed", "faithful", "suffix", choices.most, choices.repeats)
    print_threads(size, choices.repeats)


if __name__ == "__main__":
    main()
