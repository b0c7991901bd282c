"""What the linear forms take, and how time grows with turns and falls with threads.

    python -m benchmarks.scale

prints the bytes of one rollout in full and in delta form and of its rows in memory and
in a file; the rates of `compact` and `expand` beside a plain copy; and the time of
`linearize` from delta form while turns double and sessions become more, and on one and two
threads. Every answer
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
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import trajkit as tk
from benchmarks.compare import Timing, commit, machine
from benchmarks.data import Record, Size, quoted, rollout

TOKENS_PER_TURN = 1024
SUCCESSION = 3  # times that `in_succession` takes in a row


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


def without_bodies(table: pa.Table, where: str = "messages") -> pa.Table:
    """Turns of which message keys and roles are left; ``where`` they have messages."""

    def bare(messages: pa.StructArray) -> pa.StructArray:
        key, role, body = messages.flatten()
        fields = [key, role, pa.nulls(len(body), body.type)]
        return pa.StructArray.from_arrays(fields, fields=list(messages.type))

    lists = table[where].combine_chunks()
    lists = pa.LargeListArray.from_arrays(lists.offsets, bare(lists.values))
    reply = bare(table["response"].combine_chunks())
    for name, column in ((where, lists), ("response", reply)):
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


def turn_by_turn(table: pa.Table) -> list[pa.RecordBatch]:
    """A batch for each turn, as one that is made of it alone."""
    return [
        pa.RecordBatch.from_arrays(
            # a part of a column keeps the bits of its nulls, though it has none
            [pa.concat_arrays([column]) for column in part.columns],
            schema=part.schema,
        )
        for part in table.combine_chunks().to_batches(max_chunksize=1)
    ]


def logged_bytes(batches: list[pa.RecordBatch]) -> int:
    """What the batches take in a file as the gateway's log writes them in delta form."""
    schema = batches[0].schema
    return schema.serialize().size + sum(batch.serialize().size for batch in batches)


def bytes_a_token(shape: str, most: int) -> dict[int, float]:
    """Bytes of a rollout in delta form for each of its tokens, by number of turns."""
    found = {}
    for n_turns in _doubling(most):
        size = quoted(shape, n_turns, TOKENS_PER_TURN * n_turns)
        turns = without_bodies(recorded("s", size, shape), "suffix_messages")
        n_bytes = file_bytes(turns, "arrow")
        found[n_turns] = n_bytes / (TOKENS_PER_TURN * n_turns)
    return found


def _doubling(most: int) -> list[int]:
    return [64 << k for k in range((most // 64).bit_length())]


def json_bytes(table: pa.Table) -> int:
    """What the turns take as JSON lines, message keys in hexadecimal digits."""
    return sum(
        len(json.dumps(row, default=bytes.hex)) + 1
        for start in range(table.num_rows)
        for row in table.slice(start, 1).to_pylist()
    )


def sizes(size: Size) -> Iterator[tuple[str, int]]:
    """What a rollout takes in bytes, form by form."""
    full = without_bodies(tk.from_records(rollout("s", size)))
    delta = tk.compact(full)
    check(tk.expand(delta) == full, "expand gives back what was compacted")
    yield "JSON lines, full", json_bytes(full)
    for label, table in (("full", full), ("delta form", delta)):
        yield f"Arrow IPC, {label}", file_bytes(table, "arrow")
        yield f"Parquet zstd, {label}", file_bytes(table, "parquet")
    log = turn_by_turn(delta)
    yield (
        "Arrow IPC, delta form, one batch per turn",
        file_bytes(pa.Table.from_batches(log), "arrows"),
    )
    yield "Arrow IPC, delta form, one batch per turn, as logged", logged_bytes(log)


def print_sizes(size: Size) -> None:
    print(f"{size.n_turns} turns, {size.context} tokens, keys and roles, no bodies:")
    for label, n_bytes in sizes(size):
        line(f"  {label}", n_bytes, "bytes")


def row_tokens(size: Size) -> tuple[int, int]:
    """Tokens that the rows of a rollout have in memory, and in a file with dedup."""
    turns = recorded("s", size, "tail_changed")
    rows, file = tk.linearize(turns), io.BytesIO()
    tk.write_rows(rows, file, format="parquet", dedup=True)
    file.seek(0)
    check(
        tk.read_rows(file, format="parquet") == rows, "the rows of the file are these"
    )
    stored = pq.read_table(file, columns=["suffix_ids"])["suffix_ids"]
    n_tokens = tk.report(turns)["tokens_forward"][0].as_py()
    return n_tokens, len(stored.combine_chunks().values)


def print_row_tokens(size: Size) -> None:
    print(f"\nrows of policy faithful, every reply drifts, {size.n_turns} turns:")
    places = ("in memory", "in a file with dedup")
    for place, n in zip(places, row_tokens(size), strict=True):
        line(f"  tokens {place}", n, "tokens")


def rates(size: Size, repeats: int) -> tuple[int, dict[str, Timing]]:
    """Bytes of the full prompts of a rollout, and what is done with them: times."""
    full = without_bodies(tk.from_records(rollout("s", size)))
    delta = tk.compact(full)
    ids = full["prompt_ids"].combine_chunks().flatten().to_numpy()
    room = np.empty_like(ids)
    room.fill(0)
    works: dict[str, Callable[[], object]] = {
        "copy the prompts": partial(np.copyto, room, ids),
        "compact": partial(tk.compact, full),
        "expand": partial(tk.expand, delta),
    }
    return ids.nbytes, {
        label: worked(repeats, work, 1) for label, work in works.items()
    }


def print_rates(size: Size, repeats: int) -> None:
    n_bytes, times = rates(size, repeats)
    print(f"\nper rollout of {size.n_turns} turns, full prompts of {n_bytes} bytes:")
    for label, taken in times.items():
        rate = n_bytes / fastest(taken) / 1e9
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


def in_succession(
    repeats: int,
    works: Sequence[Callable[[], object]],
    shares: Sequence[int],
    clock: Callable[[], float],
) -> list[Timing]:
    """As `by_turns`, but some times in a row, the first of which does not count.

    For several threads: a machine puts a core to sleep that has nothing to do, and takes
    some milliseconds to wake it.
    """
    seconds: list[list[float]] = [[] for _ in works]
    while len(seconds[-1]) < repeats:
        for work, share, into in zip(works, shares, seconds, strict=True):
            for found in by_turns(1 + SUCCESSION, [work], [share], clock):
                into.extend(found.seconds[1:])
    return [Timing(into) for into in seconds]


def growth(shape: str, policy: str, most: int, repeats: int) -> dict[int, Timing]:
    """Times per rollout of `linearize` from delta form, by number of turns."""
    numbers = _doubling(most)
    works, shares = [], []
    for n_turns in numbers:
        # tables of one size in tokens, so that caches hold the same share of each
        n = 2 * most // n_turns
        size = quoted(shape, n_turns, TOKENS_PER_TURN * n_turns)
        turns = copies(recorded("s", size, shape), n)
        work = partial(tk.linearize, turns, policy, threads=1)
        check(work().num_rows % n == 0, "each copy gives as many rows")
        works.append(work)
        shares.append(n)
    times = by_turns(repeats, works, shares, time.process_time)
    return dict(zip(numbers, times, strict=True))


def a_token(n_turns: int, taken: Timing) -> float:
    """Nanoseconds for a token of a rollout of so many turns, at best."""
    return fastest(taken) / (TOKENS_PER_TURN * n_turns) * 1e9


def print_growth(shape: str, policy: str, most: int, repeats: int) -> None:
    print(
        f"\nlinearize from delta form, {shape}, policy {policy}, "
        f"{TOKENS_PER_TURN} tokens a turn, one thread, per rollout:"
    )
    before: Timing | None = None
    for n_turns, taken in growth(shape, policy, most, repeats).items():
        each = a_token(n_turns, taken)
        grown = "" if before is None else f"{fastest(taken) / fastest(before):7.2f}"
        print(f"{f'  {n_turns} turns':<44}{taken}   {each:.2f} ns a token{grown}")
        before = taken


def growth_with_sessions(size: Size, most: int, repeats: int) -> dict[int, Timing]:
    """Times per rollout of slime's rule from delta form, by number of sessions."""
    numbers = [most >> k for k in (4, 2, 0)]
    one = recorded("s", size, "clean")
    works, shares = [], []
    for n in numbers:
        # as many times as it takes to go through one number of rollouts
        table, times = copies(one, n), most // n
        check(tk.linearize(table, "slime").num_rows == n, "each copy gives a row")
        works.append(partial(again, partial(linearize_slime, table), times))
        shares.append(n * times)
    times_of = by_turns(repeats, works, shares, time.process_time)
    return dict(zip(numbers, times_of, strict=True))


def again(work: Callable[[], object], times: int) -> None:
    for _ in range(times):
        work()


def linearize_slime(turns: pa.Table) -> pa.Table:
    return tk.linearize(turns, "slime", threads=1)


def print_bytes_a_token(shape: str, most: int) -> None:
    print(
        f"\nArrow IPC, delta form, {shape}, {TOKENS_PER_TURN} tokens a turn, no bodies:"
    )
    for n_turns, each in bytes_a_token(shape, most).items():
        print(f"{f'  {n_turns} turns':<44}{each:14.2f} bytes a token")


def print_growth_with_sessions(size: Size, most: int, repeats: int) -> None:
    print(
        f"\nlinearize from delta form, clean, slime, {size.n_turns} turns, one thread:"
    )
    for n, taken in growth_with_sessions(size, most, repeats).items():
        each = a_token(size.n_turns, taken)
        print(f"{f'  {n} sessions, per rollout':<44}{taken}   {each:.2f} ns a token")


def threads(size: Size, n: int, repeats: int) -> list[Timing]:
    """Times per rollout, of n, of slime's rule on one thread and on two."""
    turns = copies(recorded("s", size, "clean"), n)
    one = tk.linearize(turns, "slime", threads=1)
    check(one == tk.linearize(turns, "slime", threads=2), "threads give the same rows")
    del one
    works = [partial(tk.linearize, turns, "slime", threads=k) for k in (1, 2)]
    return in_succession(repeats, works, [n, n], time.perf_counter)


def print_threads(size: Size, repeats: int) -> None:
    n = 256
    times = threads(size, n, repeats)
    print(f"\nlinearize from delta form, {n} rollouts of {size.n_turns} turns, slime:")
    for k, taken in enumerate(times, 1):
        ratio = fastest(times[0]) / fastest(taken)
        print(f"{f'  {k} threads':<44}{taken}   {ratio:.2f} times one")


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
    print_row_tokens(drifting)
    print_rates(size, choices.repeats)
    print_growth("clean", "slime", choices.most, choices.repeats)
    print_growth("tail_changed", "slime", choices.most, choices.repeats)
    for shape in ("clean", "tail_changed"):
        print_bytes_a_token(shape, choices.most)
    print_growth_with_sessions(size, 64, choices.repeats)
    print_threads(size, choices.repeats)


if __name__ == "__main__":
    main()
