"""`run`: a stage from file to file, in bounded memory.

A log is read in tables of complete sessions (`trajkit.files.group`): while one passes the
stage, the next is read and the previous one is written. An output is one file, or a
directory of parts; with ``resume``, an interrupted run continues after the last part.
"""

import errno
import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Semaphore
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from trajkit._arguments import check_choice, check_flag
from trajkit.errors import ArgumentError, FormatError, InvalidTurnsError
from trajkit.files.formats import Format, check_folder, kind_of, naming, replacing
from trajkit.files.group import Log, Piece, SessionIndex
from trajkit.files.guard import Input, check_outputs, is_parts, turns_inputs
from trajkit.files.sources import Paths, SessionPrefix, is_address, paths_of
from trajkit.files.tables import log_files, write_any
from trajkit.tables import lazy_compute as pc
from trajkit.tables import limits
from trajkit.tables.columns import empty_batch
from trajkit.tables.ragged import runs_of
from trajkit.tables.stages import session_ends
from trajkit.tables.threads import prefetch
from trajkit.turns.session_metadata import SessionFacts
from trajkit.turns.validation import REJECTED, Nonfinite

AnyPath: TypeAlias = str | os.PathLike[str]
Made: TypeAlias = pa.Table | Iterable[pa.RecordBatch]
"""What a stage makes for one output."""

Stage: TypeAlias = Callable[[pa.Table], Made | Mapping[str, Made]]
"""A function of the turns of complete sessions: one result, or one by name.

It raises before it makes the first batch, or not at all. Results are read in their order.
"""

Write: TypeAlias = Callable[[Iterator[pa.RecordBatch], Path], None]
Put: TypeAlias = Callable[[pa.RecordBatch], None]
"""Queues a batch for a file."""

MANIFEST = "_manifest.json"
"""The manifest's file name; readers of directories skip names with an underscore."""

_VERSION = 2


@dataclass(frozen=True, slots=True)
class Watch:
    """Functions that `run` calls to report its progress.

    ``begins`` gets the sessions of the source, and how many turns existing parts already
    took; ``advances`` the turns processed since; ``notes`` a message about work that takes
    longer than expected.
    """

    begins: Callable[[SessionIndex, int], None] = lambda index, done: None
    advances: Callable[[int], None] = lambda n_turns: None
    notes: Callable[[str], None] = lambda text: None


def run(
    source: Paths,
    stage: Stage,
    outputs: AnyPath | Mapping[str, AnyPath],
    *,
    resume: Mapping[str, object] | None = None,
    rejected: AnyPath | None = None,
    format: Format | None = None,
    nonfinite_logprobs: Nonfinite = "raise",
    gather: bool = True,
    session_prefix: SessionPrefix | None = None,
    dedup: bool = False,
    inputs: Iterable[Input] = (),
    watch: Watch | None = None,
) -> dict[str, int]:
    """Apply a stage to the turns of files, and write what it makes.

    In memory are a few tables of about 8 million tokens of prompts and outputs (4 million
    in delta form) with their results, or a larger session. Files get their names when all
    are complete.

    Parameters
    ----------
    source : path or list of paths
        Local files or directories, as for `trajkit.read_turns`.
    stage : function of a table
        Gets the turns of complete sessions, in the order of `trajkit.read_turns`; an empty
        table if there are no turns. Returns a table or batches, or a dict of them by name.
        Batches may be made while they are read, as by `trajkit.linearize_batches`, and a
        list may be filled meanwhile, if it comes later in the dict.
    outputs : path, or mapping of name to path
        The file of the only result, or the file of each name; what has no file is only
        counted. Rows and turns are written as by `trajkit.write_rows` and
        `trajkit.write_turns`.
    resume : mapping, optional
        What the outputs depend on besides the source and the options here (policy, rewards
        ...), in JSON's types. If the first output is a directory (it exists, or the path
        ends with a separator), all outputs get parts there, and a run that was interrupted
        continues after its last complete part, with the same bytes. None: no directories.
    rejected : path, optional
        The file of the sessions that break a rule or that the stage refuses, with the
        reasons; the run goes on without them. None: such a session is an error.
    format, nonfinite_logprobs, session_prefix
        As for `trajkit.read_turns`.
    gather : bool
        Whether scattered sessions are grouped in temporary files next to the output; see
        `trajkit.scan_turns`. False: they are an error.
    dedup : bool
        As for `trajkit.write_rows`.
    inputs : iterable of Input, optional
        Other files that the stage reads, which no output may replace.
    watch : Watch, optional
        Functions that report progress.

    Returns
    -------
    dict of str to int
        The rows of each result by its name (that of the only one is the kind of its
        table), and the sums of the integer columns of a result named "report".

    Raises
    ------
    FormatError
        As for `trajkit.read_turns`; a directory has parts of another run.
    ArgumentError
        An output is an input or another output.
    SchemaError, InvalidTurnsError
        As for `trajkit.read_turns`, and whatever the stage raises. No file is created
        then; a directory keeps its complete parts.

    Examples
    --------
    ``run("log", lambda turns: tk.linearize_batches(turns, "slime"), "rows.parquet")``
    """
    targets = _checked(source, stage, outputs, resume, rejected)
    check_flag("gather", gather)
    check_flag("dedup", dedup)
    check_choice("nonfinite_logprobs", nonfinite_logprobs, Nonfinite)
    paths, watch = paths_of(source) or [], watch or Watch()
    first = next(iter(targets.values()), None)
    parts = resume is not None and first is not None and is_parts(first)
    _check_paths(targets, [*turns_inputs(paths), *inputs], parts=parts)
    log = Log(
        *(paths, format, nonfinite_logprobs, rejected is not None, gather),
        folder=None if first is None else folder_of(first),
        session_prefix=session_prefix,
    )
    index = log.index()
    files = {name: Path(path) for name, path in targets.items()}
    manifest = None
    if parts:
        job = {
            **(resume or {}),
            "version": _VERSION,
            "rejected": rejected is not None,
            "nonfinite_logprobs": nonfinite_logprobs,
            "session_prefix": session_prefix,
            "dedup": dedup,
            "outputs": sorted(targets),
            "source": fingerprint(paths, itertools.chain(*log_files(paths, format))),
            "limits": [limits.FILE_TURNS, limits.READ_TOKENS],
        }
        manifest = Manifest([*files.values()], job)
    done = 0 if manifest is None else manifest.done
    watch.begins(index, done)
    with ExitStack() as stack:
        pieces = prefetch(log.pieces(index, done), stack)
        if manifest is None:
            return dict(_write_part(pieces, stage, files, watch, None, dedup)[0])
        while not manifest.ends or manifest.done < index.n_turns:
            for path in files.values():
                path.mkdir(exist_ok=True)
            part = {name: path / manifest.part for name, path in files.items()}
            options = watch, limits.FILE_TURNS, dedup
            totals, n_turns = _write_part(pieces, stage, part, *options)
            manifest.add(n_turns, totals)
    return dict(manifest.totals)


_ONLY = ""
"""The name of the only result."""
_Result: TypeAlias = tuple[str, pa.RecordBatch]


def _checked(
    source: Any, stage: object, outputs: Any, resume: Any, rejected: AnyPath | None
) -> dict[str, AnyPath]:
    """The path of each output; ArgumentError if an argument of `run` is of no use."""
    if any(map(is_address, source if isinstance(source, list | tuple) else [source])):
        raise ArgumentError(
            f"source={source!r} has an address, and run reads local files in several "
            "passes: copy it, or write what a stage makes of scan_turns"
        )
    if paths_of(source) is None:
        raise ArgumentError(
            f"a source of type {type(source).__name__} is no log: expected a path or a "
            "list of paths"
        )
    if not callable(stage):
        raise ArgumentError(f"stage={stage!r}: expected a function of a table")
    try:
        json.dumps({**(resume or {})})
    except (TypeError, ValueError):
        raise ArgumentError(
            f"resume={resume!r}: expected a dict of JSON values"
        ) from None
    targets = {**outputs} if isinstance(outputs, Mapping) else {_ONLY: outputs}
    for name, path in targets.items():
        if not isinstance(name, str) or not isinstance(path, str | os.PathLike):
            raise ArgumentError(
                f"outputs={outputs!r}: expected a path, or a dict of names and paths"
            )
    if not isinstance(rejected, str | os.PathLike | None):
        raise ArgumentError(f"rejected={rejected!r}: expected a path")
    return targets if rejected is None else {**targets, "rejected": rejected}


def folder_of(output: AnyPath) -> Path:
    """The directory that contains the output; FileNotFoundError if it is missing."""
    folder = Path(output).resolve().parent
    check_folder(folder)
    return folder


def facts_digest(facts: SessionFacts) -> object:
    """A value in JSON's types that differs if the metadata of sessions differ."""
    if facts.table is None:
        return facts.reward
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, facts.table.schema) as writer:
        writer.write_table(facts.table.combine_chunks())
    return hashlib.sha256(sink.getvalue()).hexdigest()


def _check_paths(
    targets: Mapping[str, AnyPath], inputs: list[Input], *, parts: bool
) -> None:
    """Raise ArgumentError if a target is an input or another target, or files mix with
    directories.
    """
    named = {name or "output": (path, name) for name, path in targets.items()}
    check_outputs(named, inputs)
    for name, (path, _) in named.items():
        if not parts and os.fspath(path).endswith(os.sep):
            raise ArgumentError(
                f"{name} {path} is a directory: parts need resume={{}} and a directory as "
                "the first output"
            )
        if parts and kind_of(Path(path)):
            raise ArgumentError(
                f"{name} goes to the file {path}, and the first output is a directory of "
                "parts: give a directory"
            )


def _write_part(
    pieces: Iterator[Piece],
    stage: Stage,
    files: Mapping[str, Path],
    watch: Watch,
    max_turns: int | None,
    dedup: bool,
) -> tuple[Counter[str], int]:
    """Write pieces until ``max_turns`` is reached; returns the totals and the turns."""
    totals: Counter[str] = Counter()
    n_turns = 0
    made: set[str] = set()
    with atomic_writers(files, partial(write_any, dedup=dedup)) as puts:
        for piece in pieces:
            counts: Counter[str] = Counter()
            report: Counter[str] = Counter()
            for name, batch in _results(stage, piece, reject="rejected" in files):
                if name == "report":
                    report.update(_sums(batch))
                else:
                    metadata = batch.schema.metadata or {}
                    kind = metadata.get(b"trajkit.table", b"output").decode()
                    counts[name or kind] += batch.num_rows
                made.add(name)
                if name in puts:
                    puts[name](batch)
                del batch
            totals.update({**counts, **report})  # a report counts the rows, too
            n_turns += piece.n_turns
            watch.advances(piece.n_turns)
            if max_turns is not None and n_turns >= max_turns:
                break
        for name in files.keys() - made:
            others = ", ".join(repr(one or "its only result") for one in sorted(made))
            raise ArgumentError(
                f"the stage made no batch for {f'outputs[{name!r}]' if name else 'outputs'}"
                f" ({files[name]}), only for {others or 'no name'}: an empty table is one"
            )
    return totals, n_turns


def _results(stage: Stage, piece: Piece, *, reject: bool) -> Iterator[_Result]:
    """What the stage makes; with ``reject``, of the sessions that it does not refuse."""
    if not reject:
        yield from _made(stage, piece.turns)
        return
    rejected, empty = [piece.rejected], True
    for result in _of_accepted(stage, piece.turns, rejected):
        empty = False
        yield result
    if empty:  # an empty output has columns, too
        yield from _made(stage, piece.turns.slice(0, 0))
    yield from (("rejected", one) for one in whole(pa.concat_tables(rejected)))


def _of_accepted(
    stage: Stage, turns: pa.Table, rejected: list[pa.Table]
) -> Iterator[_Result]:
    """The results for sessions that the stage accepts; others are added to a list."""
    made = _made(stage, turns)
    try:
        first = [*itertools.islice(made, 1)]
    except InvalidTurnsError as error:
        ends = session_ends(turns).tolist()
        if len(ends) > 1:
            for start, end in itertools.pairwise([0, *ends]):
                session = turns.slice(start, end - start)
                yield from _of_accepted(stage, session, rejected)
            return
        name = turns.column("session_id")[0].as_py()
        rejected.append(pa.table([[name], [str(error)]], schema=REJECTED))
    else:
        yield from itertools.chain(first, made)


def _made(stage: Stage, turns: pa.Table) -> Iterator[_Result]:
    result = stage(turns)
    del turns
    named = result if isinstance(result, Mapping) else {_ONLY: result}
    for name, made in named.items():
        batches = whole(made) if isinstance(made, pa.Table) else made
        if not isinstance(batches, Iterable):
            raise ArgumentError(
                f"the stage returned {type(made).__name__}: expected a table, batches, or "
                "a dict of these by name"
            )
        for batch in _recut(batches):
            yield name, batch
            del batch


def whole(table: pa.Table) -> list[pa.RecordBatch]:
    """The rows as one batch, unless they have more text than fits into one."""
    return table.combine_chunks().to_batches() or [empty_batch(table.schema)]


def _recut(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches; rows are cut as `limits.BATCH_TOKENS` cuts all of them together.

    So files do not depend on the number of threads that made the rows.
    """
    kept: pa.Table | None = None
    for batch in batches:
        if not isinstance(batch, pa.RecordBatch):
            raise ArgumentError(
                f"the stage made an object of type {type(batch).__name__}: expected record "
                "batches"
            )
        if "input_ids" not in batch.schema.names or not batch.num_rows:
            yield batch
            continue
        table = pa.Table.from_batches([batch])
        kept = table if kept is None else pa.concat_tables([kept, table])
        del batch, table
        sizes = np.asarray(pc.list_value_length(kept.column("input_ids")), np.int64)
        *runs, last = runs_of(sizes, limits.BATCH_TOKENS)
        for lo, hi in runs:
            yield from whole(kept.slice(lo, hi - lo))
        kept = kept.slice(last[0])
    if kept is not None:
        yield from whole(kept)


def _sums(report: pa.RecordBatch) -> dict[str, int]:
    """The sessions, and the sums of the integer columns."""
    counts = [one.name for one in report.schema if pa.types.is_integer(one.type)]
    sums = {count: pc.sum(report[count]).as_py() or 0 for count in counts}
    return {"sessions": report.num_rows, **sums}


class _Abandoned(Exception):
    """The output is not needed, because the job failed."""


@contextmanager
def write_in_thread(path: Path, write: Write, target: Path) -> Iterator[Put]:
    """Queue batches for a thread that writes a file, completely or not at all.

    The function waits while another batch is queued, and raises the error of an earlier
    batch. ``write`` must leave no file if its iterator raises, as `trajkit.write_rows`
    does. Errors call the file ``target``.
    """
    queue = SimpleQueue[pa.RecordBatch | None]()
    room = Semaphore()
    failed: list[BaseException] = []

    def batches() -> Iterator[pa.RecordBatch]:
        while (batch := queue.get()) is not None:
            if failed:
                raise failed[0]
            room.release()
            yield batch
            del batch

    def work() -> None:
        try:
            with naming(path, target):
                write(batches(), path)
        except BaseException as error:  # raised again in the thread that calls `put`
            failed.append(error)
            room.release()

    def put(batch: pa.RecordBatch) -> None:
        room.acquire()
        if failed:
            raise failed[0]
        queue.put(batch)

    with ThreadPoolExecutor(1, f"trajkit writes {target.name}") as pool:
        pool.submit(work)
        try:
            yield put
        except BaseException:
            failed.append(_Abandoned())
            queue.put(empty_batch(pa.schema([])))
            raise
        queue.put(None)
    if failed:
        raise failed[0]


@contextmanager
def atomic_writers(
    targets: Mapping[str, Path], write: Write
) -> Iterator[dict[str, Put]]:
    """`write_in_thread` per target; files get their names when all are complete.

    If a write fails, none is created and existing files are left untouched.
    """
    for path in targets.values():
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    # readers of directories skip hidden files; the suffix determines the format
    drafts = {
        name: path.with_name(f".{os.getpid()}-{path.name}")
        for name, path in targets.items()
    }
    try:
        with ExitStack() as stack:
            yield {
                name: stack.enter_context(write_in_thread(drafts[name], write, path))
                for name, path in targets.items()
            }
        for name, path in targets.items():
            os.replace(drafts[name], path)
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)


class Manifest:
    """The parts that a run has written to directories, stored in the first of these.

    ``job`` is everything that the parts depend on, in JSON's types. ``ends`` has, for
    each part, the turns of the source that it and the earlier parts took; ``totals`` are
    sums over all parts. A FormatError says that the directory has parts of another job, or
    that there are files that no job wrote.
    """

    def __init__(self, folders: Sequence[Path], job: dict[str, Any]) -> None:
        self._path = folders[0] / MANIFEST
        self._job = json.loads(json.dumps(job))  # tuples become lists, as in the file
        self.ends, self.totals = list[int](), Counter[str]()
        folders[0].mkdir(exist_ok=True)
        if self._path.exists():
            known, ends, totals = self._read()
            if known == self._job:
                self.ends, self.totals = ends, totals
                return
            if ends or os.listdir(folders[0]) != [MANIFEST]:
                raise FormatError(
                    f"{folders[0]} contains parts of another job (other files, or other "
                    "options): pass an empty directory"
                )
            self._path.unlink()  # another job stopped before its first part
        for one in folders:
            if one.is_dir() and any(n[0] != "." for n in os.listdir(one)):
                raise FormatError(
                    f"{one} contains files, but no {MANIFEST} that names their job: pass "
                    "an empty directory"
                )
        # saved first, so that a part without an entry is known to be the job's own
        self._save()

    @property
    def done(self) -> int:
        """Turns of the source that the parts took."""
        return self.ends[-1] if self.ends else 0

    @property
    def part(self) -> str:
        """The name of the next part's files."""
        return f"part-{len(self.ends):05d}.parquet"

    def add(self, n_turns: int, totals: Counter[str]) -> None:
        """Record a part whose files are written."""
        self.ends.append(self.done + n_turns)
        self.totals.update(totals)
        self._save()

    def _read(self) -> tuple[object, list[int], Counter[str]]:
        try:
            found = json.loads(self._path.read_text("utf-8"))
            return found["job"], [*found["ends"]], Counter(found["totals"])
        except (ValueError, TypeError, KeyError) as error:
            raise FormatError(f"{self._path} is not a manifest: {error!r}") from None

    def _save(self) -> None:
        saved = {"job": self._job, "ends": self.ends, "totals": self.totals}
        with replacing(self._path) as draft:
            draft.write_text(json.dumps(saved, indent=1) + "\n", "utf-8")


def fingerprint(paths: Sequence[Path], files: Iterable[Path]) -> list[list[object]]:
    """Path, size and modification time of each file; the path is relative to a directory
    if that is the only one of ``paths``.
    """
    root = paths[0] if len(paths) == 1 else Path()
    return [
        [str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns]
        for path in files
    ]
