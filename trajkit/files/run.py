"""`run`: a stage from file to file, in bounded memory.

A log is read in tables of complete sessions (`trajkit.files.tables`): while one passes the
stage, the next is read and the previous one is written. An output is one file, or a
directory of parts; with ``resume``, an interrupted run continues after the last part.
"""

import hashlib
import itertools
import json
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from trajkit._arguments import check_choice, check_flag
from trajkit.errors import ArgumentError, FormatError
from trajkit.files import sources, tables
from trajkit.files.arrow import read_batches
from trajkit.files.formats import Format, check_folder, kind_of, replacing
from trajkit.tables import lazy_compute as pc
from trajkit.tables import limits
from trajkit.tables.columns import empty_batch
from trajkit.tables.ragged import runs_of
from trajkit.tables.threads import prefetch
from trajkit.turns.session_metadata import SessionFacts
from trajkit.turns.validation import REJECTED, Nonfinite, accepted

Made: TypeAlias = pa.Table | Iterable[pa.RecordBatch]
"""What a stage makes for one output."""

Stage: TypeAlias = Callable[[pa.Table], Made | Mapping[str, Made]]
"""A function of the turns of complete sessions: one result, or one by name.

It raises before it makes the first batch, or not at all. Results are read in their order.
"""

MANIFEST = "_manifest.json"
"""The manifest's file name; readers of directories skip names with an underscore."""

_VERSION = 2
_ONLY = ""
"""The name of the only result."""


class Watch(NamedTuple):
    """Functions that `run` calls: one with the sessions of the source and how many turns
    existing parts already took, one with the turns processed since.
    """

    begins: Callable[[tables.SessionIndex, int], None] = lambda index, done: None
    advances: Callable[[int], None] = lambda n_turns: None


def run(
    source: sources.Paths,
    stage: Stage,
    outputs: sources.AnyPath | Mapping[str, sources.AnyPath],
    *,
    resume: Mapping[str, object] | None = None,
    rejected: sources.AnyPath | None = None,
    format: Format | None = None,
    nonfinite_logprobs: Nonfinite = "raise",
    session_prefix: sources.SessionPrefix | None = None,
    dedup: bool = False,
    inputs: Iterable[sources.Input] = (),
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
        The file of the only result, or of each name; what has no file is only counted.
        Rows and turns are written as by `trajkit.write_rows` and `trajkit.write_turns`.
    resume : mapping, optional
        What the outputs depend on besides the source and the options here (policy, rewards
        ...), in JSON's types. If the first output is a directory (it exists, or the path
        ends with a separator), all outputs get parts there, and a run that was interrupted
        continues after its last complete part, with the same bytes. None: no directories.
    rejected : path, optional
        The file of the sessions that break a rule or that the stage refuses, with the
        reasons; the run goes on without them. None: such a session is an error.
    format, nonfinite_logprobs, session_prefix, dedup
        As for `trajkit.scan_turns` and `trajkit.write_rows`.
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
    FormatError, SchemaError, InvalidTurnsError
        As for `trajkit.read_turns`, and whatever the stage raises: no file is created
        then, a directory keeps its complete parts. Or a directory has parts of another run.
    ArgumentError
        An output is an input or another output.

    Examples
    --------
    ``run("log", lambda turns: tk.linearize_batches(turns, "slime"), "rows.parquet")``
    """
    check_flag("dedup", dedup)
    check_choice("nonfinite_logprobs", nonfinite_logprobs, Nonfinite)
    if not callable(stage):
        raise ArgumentError(f"stage={stage!r}: expected a function of a table")
    if not isinstance(watch, Watch | None):
        raise ArgumentError(f"watch={watch!r}: expected a Watch")
    others = [*inputs] if isinstance(inputs, Iterable) else [inputs]
    if not all(isinstance(one, sources.Input) for one in others):
        raise ArgumentError(f"inputs={inputs!r}: expected Inputs")
    try:
        json.dumps(None if resume is None else {**resume})
    except (TypeError, ValueError):
        rule = "expected a dict of JSON values"
        raise ArgumentError(f"resume={resume!r}: {rule}") from None
    paths, files = _checked(source, outputs, rejected)
    watch = watch or Watch()
    first = next(iter(files.values()), None)
    parts = resume is not None and first is not None and sources.is_parts(first)
    _check_paths(files, [*sources.turns_inputs(paths), *others], parts=parts)
    log = tables.Log(
        *(paths, format, nonfinite_logprobs, rejected is not None),
        folder=None if first is None else folder_of(first),
        session_prefix=session_prefix,
    )
    index = log.index()
    whole_files = {name: Path(path) for name, path in files.items()}
    manifest = None
    if parts:
        job = {
            "version": _VERSION,
            "rejected": rejected is not None,
            "nonfinite_logprobs": nonfinite_logprobs,
            "session_prefix": session_prefix,
            "dedup": dedup,
            "outputs": sorted(files),
            "source": fingerprint(
                paths, itertools.chain(*tables.log_files(paths, format))
            ),
            "limits": [limits.FILE_TURNS, limits.READ_TOKENS],
        }
        manifest = Manifest([*whole_files.values()], resume, job)
    done = 0 if manifest is None else manifest.done
    watch.begins(index, done)
    with ExitStack() as stack:
        pieces = prefetch(log.pieces(index, done), stack)
        if manifest is None:
            return dict(_write_part(pieces, stage, whole_files, watch, None, dedup)[0])
        while not manifest.ends or manifest.done < index.n_turns:
            name = manifest.part(len(manifest.ends))
            part = {key: path / name for key, path in whole_files.items()}
            for path in part.values():
                path.parent.mkdir(exist_ok=True)
            options = watch, limits.FILE_TURNS, dedup
            manifest.add(*_write_part(pieces, stage, part, *options))
    return dict(manifest.totals)


def _checked(
    source: Any, outputs: Any, rejected: Any
) -> tuple[list[Path], dict[str, sources.AnyPath]]:
    given = source if isinstance(source, list | tuple) else [source]
    if any(map(sources.is_address, given)):
        raise ArgumentError(
            f"source={source!r} has an address, and run reads local files in several "
            "passes: copy it, or write what a stage makes of scan_turns"
        )
    if (paths := sources.paths_of(source)) is None:
        raise ArgumentError(
            f"a source of type {type(source).__name__} is no log: expected a path or a "
            "list of paths"
        )
    files = {**outputs} if isinstance(outputs, Mapping) else {_ONLY: outputs}
    for name, path in files.items():
        if not isinstance(name, str) or not isinstance(path, str | os.PathLike):
            raise ArgumentError(
                f"outputs={outputs!r}: expected a path, or a dict of names and paths"
            )
    if not isinstance(rejected, str | os.PathLike | None):
        raise ArgumentError(f"rejected={rejected!r}: expected a path")
    return paths, files if rejected is None else {**files, "rejected": rejected}


def folder_of(output: sources.AnyPath) -> Path:
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
    files: Mapping[str, sources.AnyPath], inputs: list[sources.Input], *, parts: bool
) -> None:
    named = {name or "output": (path, name) for name, path in files.items()}
    sources.check_outputs(named, inputs)
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
    pieces: Iterator[tables.Piece],
    stage: Stage,
    files: Mapping[str, Path],
    watch: Watch,
    max_turns: int | None,
    dedup: bool,
) -> tuple[Counter[str], int]:
    """Write pieces until ``max_turns`` is reached; returns the totals and the turns.

    The first file is written while its batches are made, others through temporary files.
    """
    totals, made, n_turns = Counter[str](), set[str](), 0
    first = next(iter(files), None)
    spools: dict[str, tuple[Path, pa.RecordBatchWriter]] = {}

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal n_turns
        for piece in pieces:
            counts, report = Counter[str](), Counter[str]()
            for name, batch in _results(stage, piece, reject="rejected" in files):
                made.add(name)
                (report if name == "report" else counts).update(_counts(name, batch))
                if name == first:
                    yield batch
                elif name in files:
                    if name not in spools:
                        path = Path(folder, str(len(spools)))
                        spools[name] = path, pa.ipc.new_stream(str(path), batch.schema)
                    spools[name][1].write_batch(batch)
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

    with ExitStack() as stack:
        drafts = {n: stack.enter_context(replacing(path)) for n, path in files.items()}
        where = None if first is None else files[first].parent
        folder = stack.enter_context(
            TemporaryDirectory(prefix=tables.TEMPORARY, dir=where)
        )
        # each piece has a few batches, and takes a while before the first
        coming = prefetch(batches(), stack, 4)
        if first is None:
            deque(coming, 0)
        else:
            tables.write_any(coming, drafts[first], dedup=dedup)
        for name, (path, spool) in spools.items():
            spool.close()
            tables.write_any(
                read_batches(path, "arrows", None), drafts[name], dedup=dedup
            )
    return totals, n_turns


def _counts(name: str, batch: pa.RecordBatch) -> dict[str, int]:
    """The rows of a result; of a report its sessions, and the sums of its integers."""
    if name != "report":
        kind = (batch.schema.metadata or {}).get(b"trajkit.table", b"output").decode()
        return {name or kind: batch.num_rows}
    columns = zip(batch.schema, batch.columns, strict=True)
    numbers = {f.name: column for f, column in columns if pa.types.is_integer(f.type)}
    sums = {name: pc.sum(column).as_py() or 0 for name, column in numbers.items()}
    return {"sessions": batch.num_rows, **sums}


_Result: TypeAlias = tuple[str, pa.RecordBatch]


def _results(stage: Stage, piece: tables.Piece, *, reject: bool) -> Iterator[_Result]:
    """What the stage makes; with ``reject``, of the sessions that it does not refuse."""
    if not reject:
        yield from _made(stage, piece.turns)
        return

    def begun(turns: pa.Table) -> Iterator[_Result]:
        made = _made(stage, turns)
        return itertools.chain([*itertools.islice(made, 1)], made)

    rejected, empty = dict(piece.rejected), True
    for results in accepted(begun, piece.turns, rejected):
        for result in results:
            empty = False
            yield result
    if empty:  # an empty output has columns, too
        yield from _made(stage, piece.turns.slice(0, 0))
    lines = pa.table([[*rejected], [*rejected.values()]], schema=REJECTED)
    yield from (("rejected", one) for one in whole(lines))


def _made(stage: Stage, turns: pa.Table) -> Iterator[_Result]:
    result = stage(turns)
    del turns
    for name, made in (
        result if isinstance(result, Mapping) else {_ONLY: result}
    ).items():
        if not isinstance(made, pa.Table | Iterable):
            raise ArgumentError(
                f"the stage returned {type(made).__name__}: expected a table, batches, or "
                "a dict of these by name"
            )
        for batch in _recut(whole(made) if isinstance(made, pa.Table) else made):
            yield name, batch
            del batch


def whole(table: pa.Table) -> list[pa.RecordBatch]:
    return table.combine_chunks().to_batches() or [empty_batch(table.schema)]


def _recut(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches; rows are cut as `limits.BATCH_TOKENS` cuts all of them together.

    So files do not depend on the number of threads that made the rows.
    """
    kept: list[pa.RecordBatch] = []
    for batch in batches:
        if not isinstance(batch, pa.RecordBatch):
            raise ArgumentError(
                f"the stage made an object of type {type(batch).__name__}: expected record "
                "batches"
            )
        if "input_ids" not in batch.schema.names or not batch.num_rows:
            yield batch
            continue
        table = pa.Table.from_batches([*kept, batch])
        del batch
        sizes = np.asarray(pc.list_value_length(table.column("input_ids")), np.int64)
        *runs, last = runs_of(sizes, limits.BATCH_TOKENS)
        for lo, hi in runs:
            yield from whole(table.slice(lo, hi - lo))
        kept = table.slice(last[0]).to_batches()
    if kept:
        yield from whole(pa.Table.from_batches(kept))


class Manifest:
    """The parts that a run has written to directories, stored in the first of these.

    ``resume`` and ``job`` are all that the parts depend on. ``ends`` has, for each part,
    the turns of the source that it and the earlier parts took. A FormatError says that the
    directory has parts of another job, or files that no job wrote.
    """

    def __init__(
        self, folders: Sequence[Path], resume: Any, job: dict[str, Any]
    ) -> None:
        # tuples become lists, as in the file
        self._job = json.loads(json.dumps({**resume, **job}))
        self._path = folders[0] / MANIFEST
        self.ends, self.totals = list[int](), Counter[str]()
        folders[0].mkdir(exist_ok=True)
        if self._path.exists():
            try:
                found = json.loads(self._path.read_text("utf-8"))
                known, ends, totals = found["job"], found["ends"], found["totals"]
            except (ValueError, TypeError, KeyError) as error:
                raise FormatError(
                    f"{self._path} is not a manifest: {error!r}"
                ) from None
            if known == self._job:
                self.ends, self.totals = ends, Counter(totals)
                for folder, k in itertools.product(folders, range(len(ends))):
                    if not (part := folder / self.part(k)).exists():
                        lost = f"{part} is missing, which {self._path} names"
                        raise FormatError(f"{lost}: put it back, or begin anew")
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
        return self.ends[-1] if self.ends else 0

    @staticmethod
    def part(number: int) -> str:
        return f"part-{number:05d}.parquet"

    def add(self, totals: Counter[str], n_turns: int) -> None:
        self.ends.append(self.done + n_turns)
        self.totals.update(totals)
        self._save()

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
