"""Damaged files of turns: no crash, no hang, no table that the bytes do not hold.

``python -m tests.fuzz files`` damages files of every format at random (flips,
truncations, numbers overwritten), reads them, and prints the counts of what came out and
each case that failed, with its seed. ``--format arrow --seed 17 --cases 1`` runs one case
again. Cases run in child processes, so that a crash is seen and belongs to a seed.

A case fails where

crash, hang
    the process dies, or one case takes longer than ``--seconds``;
exception
    reading raises something else than a TrajkitError;
invalid
    a table comes without an error, and Arrow's full validation or `trajkit.validate`
    refuses it, or it cannot be linearized;
invented
    a table comes without an error, and has what the bytes do not hold. JSON lines: it is
    not what Python's own ``json`` (and ``gzip``) make of the file. Uncompressed Arrow
    IPC: the ids of a turn are not in the file. A file that was only cut short: the turns
    are not the first ones that were written, or no TornLogWarning says that some are
    left out (a log that was cut right between two entries is a shorter log). Arrow IPC
    and Parquet: turns are missing without a TornLogWarning. Gzip: anything differs.
    Parquet: anything but names and types of columns, which the footer has, differs.

A damaged value that is another legal value (an id in an Arrow IPC file, a letter of JSON)
is counted as "changed": these formats have no checksum that would tell.
"""

import argparse
import faulthandler
import gzip
import json
import random
import resource
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import pyarrow as pa

import trajkit as tk

_SUFFIXES = {
    "arrow": "arrow",
    "arrows": "arrows",
    "parquet": "parquet",
    "jsonl": "jsonl",
    "gz": "jsonl.gz",
    "zst": "jsonl.zst",
}
_BATCH = 500
_MEMORY = 32 << 30
_NUMBERS = (0, 1, -1, 7, 1 << 15, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 62, -(1 << 63))
# every so many cases, the file goes through the functions that read it in pieces
_PIECES = 8
FINE = {"refused", "same", "torn", "changed"}


@dataclass(frozen=True, slots=True)
class Base:
    """A whole file, and the turns that it holds."""

    content: bytes
    turns: pa.Table
    is_compressed: bool = False


@dataclass(frozen=True, slots=True)
class Damage:
    """What became of a file."""

    content: bytes
    is_cut: bool


def records(rng: random.Random, n_sessions: int) -> Iterator[dict[str, object]]:
    """Yield calls of some sessions; each continues the call before it or drifts."""
    for s in range(n_sessions):
        path: list[int] = []
        talk: list[dict[str, object]] = [{"role": "system", "content": f"é {s}"}]
        for _ in range(rng.randrange(1, 6)):
            path = path[: rng.randrange(len(path) + 1)] if rng.random() < 0.2 else path
            prompt = path + [rng.randrange(1 << 20) for _ in range(rng.randrange(1, 9))]
            output = [rng.randrange(1 << 20) for _ in range(rng.randrange(6))]
            talk = [*talk, {"role": "user", "content": "ü" * rng.randrange(9)}]
            reply = {"role": "assistant", "content": str(rng.random())}
            logprobs = [-rng.random() for _ in output] if rng.random() < 0.8 else None
            yield {
                "session_id": f"session {s}",
                "prompt_ids": prompt,
                "output_ids": output,
                "output_logprobs": logprobs,
                "finish_reason": rng.choice(["stop", "length", None]),
                "prompt_messages": talk,
                "response_message": reply,
                "trainable": rng.choice([True, None]),
                "experts": [[1, 2]] * len(output),
                "note": rng.choice(["a", None]),
            }
            path, talk = prompt + output, [*talk, reply]


def bases(name: str) -> list[Base]:
    """Whole files of a format."""
    rng = random.Random(0)
    full = tk.from_records(records(rng, 6))
    at = full.schema.get_field_index("note")
    named = full.set_column(at, "note", full.column(at).dictionary_encode())
    tables = [full, named]
    if name in ("arrow", "arrows", "parquet"):
        tables.append(tk.compact(full))
    made = []
    for table in tables:
        sink = BytesIO()
        tk.write_turns(table, sink, format=_SUFFIXES[name])
        made.append(_base(sink.getvalue(), name))
    if name in ("arrow", "arrows"):
        for codec in ("lz4", "zstd"):
            made.append(_base(_ipc(named, name, codec), name, is_compressed=True))
        made.append(_base(_ipc(full, name, None), name))
    return made


def _base(content: bytes, name: str, *, is_compressed: bool = False) -> Base:
    turns = tk.read_turns(BytesIO(content), format=_SUFFIXES[name])
    return Base(content, turns, is_compressed)


def _ipc(table: pa.Table, name: str, codec: str | None) -> bytes:
    """An Arrow IPC file of several batches, as other programs write them."""
    sink = BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=codec)
    new = pa.ipc.new_file if name == "arrow" else pa.ipc.new_stream
    with new(sink, table.schema, options=options) as writer:
        for batch in table.to_batches(max_chunksize=4):
            writer.write_batch(batch)
    return sink.getvalue()


def damaged(content: bytes, rng: random.Random) -> Damage:
    """The file with a few flips or numbers overwritten, or cut short."""
    how = rng.randrange(10)
    n = len(content)
    if how < 2:
        return Damage(content[: rng.randrange(n)], True)
    changed = bytearray(content)
    for _ in range(1 if how < 6 else rng.randrange(2, 9)):
        at = rng.randrange(n)
        if rng.random() < 0.3:  # most of a header lies at the ends
            at = rng.choice([min(at % 600, n - 1), n - 1 - at % min(600, n)])
        if how == 8:
            number = rng.choice(_NUMBERS).to_bytes(8, "little", signed=True)
            number = number[: rng.choice([1, 2, 4, 8])][: n - at]
            changed[at : at + len(number)] = number
        else:
            changed[at] ^= 1 << rng.randrange(8) if how < 8 else rng.randrange(1, 256)
    return Damage(bytes(changed), False)


def outcome(name: str, base: Base, damage: Damage, folder: Path, pieces: bool) -> str:
    """What comes of reading a damaged file; see the module."""
    path = folder / f"case.{_SUFFIXES[name]}"
    path.write_bytes(damage.content)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            table = tk.read_turns(path)
            if pieces:
                for _ in tk.scan_turns(path):
                    pass
    except tk.TrajkitError as error:
        known = isinstance(error, tk.errors.FormatError) and str(path) not in str(error)
        return "exception: no file name" if known else "refused"
    except Exception as error:
        return f"exception: {type(error).__name__}: {error}"
    try:
        table.validate(full=True)
        tk.validate(table, "turns", bodies=False)
        tk.linearize(table)
    except (pa.ArrowException, tk.TrajkitError) as error:
        if "prompt_ids is empty" not in str(error):
            return f"invalid: {error}"
    torn = any(issubclass(one.category, tk.errors.TornLogWarning) for one in said)
    if table.equals(base.turns):
        return "same"
    if damage.is_cut:
        is_whole = len(damage.content) in _entry_ends(name, base.content)
        first = (torn or is_whole) and _is_start(table, base.turns)
        return "torn" if first else "invented: not the first turns"
    invented = _INVENTED.get(name, _invented_json)
    wrong = invented(name, table, base, damage.content, torn)
    return f"invented: {wrong}" if wrong else "torn" if torn else "changed"


def _entry_ends(name: str, content: bytes) -> set[int]:
    """Where a log may end that was never closed."""
    ends = set()
    if name == "jsonl":
        ends = {at + k for at, sign in enumerate(content) if sign == 10 for k in (0, 1)}
        ends.add(0)
    elif name == "arrows":
        source = pa.BufferReader(content)
        for _ in pa.ipc.open_stream(source):
            ends.add(source.tell())
    return ends


def _is_start(table: pa.Table, whole: pa.Table) -> bool:
    return table.num_rows == 0 or (
        table.schema.equals(whole.schema)
        and table.equals(whole.slice(0, table.num_rows))
    )


def _invented_json(
    name: str, table: pa.Table, base: Base, content: bytes, torn: bool
) -> str | None:
    try:
        if name == "gz":
            content = gzip.decompress(content)
        elif name == "zst":
            source = pa.BufferReader(content)
            with pa.CompressedInputStream(source, "zstd") as stream:
                content = stream.read()
        lines = content.split(b"\n")[: -1 if torn else None]
        twin = tk.from_records(
            json.loads(line.decode()) for line in lines if line.strip()
        )
    except (OSError, EOFError, ValueError, tk.TrajkitError) as error:
        return f"Python reads no turns: {error}"
    if not table.equals(twin):
        return "Python reads other turns"
    return "the turns differ" if name == "gz" else None


def _invented_ipc(
    name: str, table: pa.Table, base: Base, content: bytes, torn: bool
) -> str | None:
    if table.num_rows < base.turns.num_rows and not torn:
        return "turns are missing"
    if base.is_compressed:
        return None
    names = {"prompt_ids", "output_ids"} & set(table.column_names)
    for column in sorted(names):
        for ids in table.column(column):
            if ids.values.to_numpy().astype("<i4").tobytes() not in content:
                return f"{column} {ids} is not in the file"
    return None


def _invented_parquet(
    name: str, table: pa.Table, base: Base, content: bytes, torn: bool
) -> str | None:
    # the names and types of columns are in the footer, which has no checksum
    if table.column_names != base.turns.column_names and table.num_rows:
        return None
    if [field.type for field in table.schema] != [f.type for f in base.turns.schema]:
        return None
    return "the turns differ"


_INVENTED: dict[str, Callable[[str, pa.Table, Base, bytes, bool], str | None]] = {
    "arrow": _invented_ipc,
    "arrows": _invented_ipc,
    "parquet": _invented_parquet,
}


def run_case(name: str, seed: int, made: list[Base], folder: Path) -> str:
    """The outcome of one case, which the format and the seed say."""
    rng = random.Random(f"{name} {seed}")
    base = rng.choice(made)
    damage = damaged(base.content, rng)
    return outcome(name, base, damage, folder, seed % _PIECES == 0)


def _child(name: str, seed: int, cases: int, seconds: float) -> None:
    """Run cases one after another; each is named before it begins."""
    made = bases(name)
    with tempfile.TemporaryDirectory() as folder:
        for one in range(seed, seed + cases):
            print(one, end=" ", flush=True)
            faulthandler.dump_traceback_later(seconds, exit=True)
            print(run_case(name, one, made, Path(folder)).replace("\n", " "))
            faulthandler.cancel_dump_traceback_later()


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))


def run(
    name: str, seed: int, cases: int, seconds: float, limit: bool = True
) -> tuple[Counter[str], list[str]]:
    """Counts of the outcomes of a format's cases, and those that failed."""
    counts: Counter[str] = Counter()
    failed: list[str] = []
    stop = seed + cases
    while seed < stop:
        n = min(_BATCH, stop - seed)
        told = [name, str(seed), str(n), str(seconds)]
        done = subprocess.run(
            [sys.executable, "-m", "tests.fuzz.files", "--child", *told],
            capture_output=True,
            text=True,
            errors="replace",
            preexec_fn=_limit_memory if limit else None,
            check=False,
        )
        for line in done.stdout.splitlines():
            number, _, found = line.partition(" ")
            if not found:
                hung = "Timeout (" in done.stderr
                found = f"hang after {seconds} s" if hung else "crash"
                found = f"{found}, exit code {done.returncode}: {done.stderr[-3000:]}"
            kind = found.partition(":")[0].partition(",")[0]
            counts[kind] += 1
            if kind not in FINE:
                failed.append(f"{name} {number}: {found}")
            seed = int(number) + 1
        if not done.stdout:
            raise SystemExit(f"the cases do not start: {done.stderr}")
    return counts, failed


def main(words: list[str]) -> int:
    """Run the cases of every format; the exit code is 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=1000, help="of each format")
    parser.add_argument("--seed", type=int, help="of the first case")
    parser.add_argument("--format", action="append", choices=_SUFFIXES)
    parser.add_argument("--seconds", type=float, default=60, help="limit of a case")
    parser.add_argument(
        "--no-memory-limit", action="store_true", help="for the sanitizer build"
    )
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.child:
        name, seed, cases, seconds = given.child
        _child(name, int(seed), int(cases), float(seconds))
        return 0
    seed = (
        random.SystemRandom().randrange(1 << 30) if given.seed is None else given.seed
    )
    found = []
    for name in given.format or _SUFFIXES:
        counts, failed = run(
            name, seed, given.cases, given.seconds, not given.no_memory_limit
        )
        told = ", ".join(f"{n} {kind}" for kind, n in counts.most_common())
        print(f"{name}: seeds {seed} to {seed + given.cases - 1}: {told}", flush=True)
        for one in failed:
            print(f"  {one}", flush=True)
        found += failed
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
