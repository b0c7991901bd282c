"""Jobs from file to file, in bounded memory.

A log is read in tables of complete sessions (`group_sessions`): while one becomes rows, the
next is read and the previous one is written. An output is one file, or a directory of
parts; an interrupted job continues after the last complete part of a directory.
"""

import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypedDict, Unpack

import pyarrow as pa

from trajkit._arguments import check_choice
from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.canonical import TableLike
from trajkit._streams import limits
from trajkit._streams.prefetch import prefetch
from trajkit._streams.session_batches import path_tokens, session_ends
from trajkit.errors import ArgumentError, InvalidTurnsError
from trajkit.io.formats import Format, check_folder, kind_of
from trajkit.io.guard import Input, check_outputs, is_parts, turns_inputs
from trajkit.io.sources import Paths, SessionPrefix, paths_of
from trajkit.io.tables import log_files, write_rows, write_tables, write_turns
from trajkit.jobs.group_sessions import Log, Piece, SessionIndex
from trajkit.jobs.outputs import Manifest, Write, atomic_writers, fingerprint
from trajkit.learn.weights import By, add_weights
from trajkit.pipeline.rows import Layout, rows_and_report
from trajkit.pipeline.suffix_layout import full_pieces, row_pieces
from trajkit.policies import Policy
from trajkit.policies import policy as named_policy
from trajkit.turns.delta import compact, expand
from trajkit.turns.session_metadata import Reward, SessionFacts, session_facts
from trajkit.turns.sessions import Sessions
from trajkit.turns.validation import REJECTED, Nonfinite

Made: TypeAlias = Iterator[tuple[str, pa.Table]]
"""Tables, each with the name of its output."""

Stage: TypeAlias = Callable[[pa.Table], Made]
"""Makes tables of complete sessions; it raises before the first table, or not at all."""

# outputs whose rows are counted; the counts of "report" are summed up
_COUNTED = ("turns", "rejected", "violations")


class Target(NamedTuple):
    """An output: its path as the caller spelled it, and the function that writes it."""

    path: str | os.PathLike[str]
    write: Write


@dataclass(frozen=True, slots=True)
class Watch:
    """Functions that a job calls to report its progress.

    Attributes
    ----------
    begins : function of a SessionIndex and an int
        The sessions of the source, and how many turns existing parts already took.
    advances : function of an int
        Turns that were processed since.
    notes : function of a str
        A message about work that takes longer than expected.
    """

    begins: Callable[[SessionIndex, int], None] = lambda index, done: None
    advances: Callable[[int], None] = lambda n_turns: None
    notes: Callable[[str], None] = lambda text: None


class JobOptions(TypedDict, total=False):
    """Options of all jobs.

    Attributes
    ----------
    rejected : path, optional
        The output of sessions that break a rule, with the reason; a directory if the
        job's output is one. None, the default: such a session is an error.
    format, nonfinite_logprobs
        How turns are read, as for `trajkit.read_turns`.
    gather : bool
        Whether scattered sessions are grouped in temporary files next to the output; see
        `trajkit.scan_turns`. False: they are an error.
    session_prefix : {"file", "folder", "no"}, optional
        As for `trajkit.read_turns`.
    watch : Watch, optional
        Functions that report progress.
    """

    rejected: str | os.PathLike[str] | None
    format: Format | None
    nonfinite_logprobs: Nonfinite
    gather: bool
    session_prefix: SessionPrefix | None
    watch: Watch | None


def run_job(
    source: Paths,
    stage: Stage,
    targets: Mapping[str, Target],
    *,
    job: Mapping[str, object] | None = None,
    inputs: Iterable[Input] = (),
    rejected: str | os.PathLike[str] | None = None,
    format: Format | None = None,
    nonfinite_logprobs: Nonfinite = "raise",
    gather: bool = True,
    session_prefix: SessionPrefix | None = None,
    watch: Watch | None = None,
) -> dict[str, int]:
    """Apply a stage to the turns of files, an empty table if there are none.

    The stage's tables go to the targets of their names. Others are only counted: the
    result has the sums of the integer columns of "report", and the numbers of turns,
    rejected sessions and violations. With ``job`` (what the outputs depend on besides
    the options here, in JSON's types), a first target that is a directory gets parts and
    their manifest; then all targets are directories. No target may be one of the source's
    files or of the other ``inputs``.
    """
    watch = watch or Watch()
    paths = paths_of(source) or []
    targets = dict(targets)
    if rejected is not None:
        targets["rejected"] = Target(rejected, write_tables)
    outputs = {
        name: (Path(target.path), target.write) for name, target in targets.items()
    }
    first = next(iter(targets.values()), None)
    folder = None if first is None else folder_of(first.path)
    parts = job is not None and first is not None and is_parts(first.path)
    _check_paths(targets, [*turns_inputs(paths), *inputs], parts=parts)
    log = Log(
        *(paths, format, nonfinite_logprobs, rejected is not None, gather, folder),
        session_prefix,
    )
    index = log.index()
    if not parts:
        watch.begins(index, 0)
        with ExitStack() as stack:
            pieces = prefetch(log.pieces(index), stack)
            return dict(_write_part(pieces, stage, outputs, watch, None)[0])
    job = {
        **(job or {}),
        "rejected": log.reject,
        "nonfinite_logprobs": nonfinite_logprobs,
        "session_prefix": session_prefix,
        "outputs": sorted(targets),
        "source": fingerprint(paths, itertools.chain(*log_files(paths, format))),
        "limits": [limits.FILE_TURNS, limits.READ_TOKENS],
    }
    folders = [path for path, _ in outputs.values()]
    manifest = Manifest.open(folders[0], job, folders[1:])
    watch.begins(index, manifest.done)
    with ExitStack() as stack:
        pieces = prefetch(log.pieces(index, manifest.done), stack)
        if manifest.ends and manifest.done >= index.n_turns:
            manifest.finish()
        while not manifest.finished:
            part = {}
            for name, (path, write) in outputs.items():
                path.mkdir(exist_ok=True)
                part[name] = path / manifest.part(), write
            totals, n = _write_part(pieces, stage, part, watch, limits.FILE_TURNS)
            manifest.add(n, totals)
            if manifest.done >= index.n_turns or not n:
                manifest.finish()
    return dict(manifest.totals)


def folder_of(output: str | os.PathLike[str]) -> Path:
    """The directory that contains the output; FileNotFoundError if it is missing."""
    folder = Path(output).resolve().parent
    check_folder(folder)
    return folder


def _check_paths(
    targets: Mapping[str, Target], inputs: list[Input], *, parts: bool
) -> None:
    """Raise ArgumentError if a target is an input or another target, or files mix with
    directories.
    """
    check_outputs(
        {name: (target.path, name) for name, target in targets.items()}, inputs
    )
    for name, target in targets.items():
        path = Path(target.path)
        if parts and kind_of(path):
            main = Path(next(iter(targets.values())).path)
            raise ArgumentError(
                f"{name} goes to the file {path}, and {main} is a directory of parts: "
                "give a directory"
            )


def _write_part(
    pieces: Iterator[Piece],
    stage: Stage,
    outputs: Mapping[str, tuple[Path, Write]],
    watch: Watch,
    max_turns: int | None,
) -> tuple[Counter[str], int]:
    """Write pieces until ``max_turns`` is reached; returns the totals and the turns."""
    totals: Counter[str] = Counter()
    n_turns = 0
    with atomic_writers(outputs) as puts:
        for piece in pieces:
            for name, table in _tables(stage, piece, reject="rejected" in outputs):
                totals.update(_counts(name, table))
                if name in puts:
                    puts[name](table)
            n_turns += piece.n_turns
            watch.advances(piece.n_turns)
            if max_turns is not None and n_turns >= max_turns:
                break
    return totals, n_turns


def _tables(stage: Stage, piece: Piece, *, reject: bool) -> Made:
    """The tables of a piece; with ``reject``, without the sessions that it refuses."""
    if not reject:
        yield from stage(piece.turns)
        return
    rejected, made = [piece.rejected], False
    for named_table in _of_accepted(stage, piece.turns, rejected):
        made = True
        yield named_table
    if not made:  # an empty output has columns, too
        yield from stage(piece.turns.slice(0, 0))
    yield "rejected", pa.concat_tables(rejected)


def _of_accepted(stage: Stage, turns: pa.Table, rejected: list[pa.Table]) -> Made:
    """The tables of the sessions that the stage accepts; others are added to a list."""
    try:
        made = stage(turns)
        first = next(made)
    except InvalidTurnsError as error:
        ends = session_ends(turns).tolist()
        if len(ends) == 1:
            name = turns.column("session_id")[0].as_py()
            rejected.append(pa.table([[name], [str(error)]], schema=REJECTED))
        else:
            for start, end in itertools.pairwise([0, *ends]):
                session = turns.slice(start, end - start)
                yield from _of_accepted(stage, session, rejected)
        return
    yield first
    yield from made


def _counts(name: str, table: pa.Table) -> Mapping[str, int]:
    """What a table adds to the totals of a job."""
    if name != "report":
        return {name: table.num_rows} if name in _COUNTED else {}
    counts = [field.name for field in table.schema if pa.types.is_integer(field.type)]
    sums = {count: pc.sum(table[count]).as_py() or 0 for count in counts}
    return {"sessions": table.num_rows, **sums}


def linearize_file(
    source: Paths,
    output: str | os.PathLike[str],
    policy: str | Policy = "faithful",
    *,
    reward: Reward = None,
    sessions: TableLike | None = None,
    max_row_tokens: int | None = None,
    threads: int | None = None,
    layout: Layout = "full",
    weigh_by: By = "token",
    report: str | os.PathLike[str] | None = None,
    **options: Unpack[JobOptions],
) -> dict[str, int]:
    """Write the training rows of files of turns, in bounded memory.

    The rows are those of `trajkit.linearize` of `trajkit.read_turns`. In memory are a few
    tables of about 8 million tokens of prompts and outputs (4 million in delta form), or
    a larger session. The full rows of a larger session are written some at a time.

    Parameters
    ----------
    source : path or list of paths
        Files or directories, as for `trajkit.read_turns`.
    output : path
        A file, or a directory of parts (an existing one, or a path that ends with a
        separator). An interrupted run continues after its last complete part of a
        directory, and produces the same bytes.
    policy, reward, sessions, max_row_tokens, layout
        As for `trajkit.linearize`.
    threads : int, optional
        As for `trajkit.linearize`. One thread more reads and one per output writes; they
        have more to do. None: 1.
    weigh_by : {"token", "row", "rollout"}
        The definition of ``row_weight``, as for `trajkit.add_weights`.
    report : path, optional
        The output of the report; a directory if ``output`` is one.
    **options
        Of all jobs; see `trajkit.jobs.stages.JobOptions`.

    Returns
    -------
    dict of str to int
        ``sessions``, the sums of the report's counts, and ``rejected`` if requested.

    Raises
    ------
    FormatError
        As for `trajkit.read_turns`; ``output`` is a directory of another job's parts.
    SchemaError, InvalidTurnsError, ArgumentError
        As for `trajkit.linearize` and `trajkit.read_turns`. No file is created then; a
        directory keeps its complete parts.
    """
    chosen = named_policy(policy)
    check_choice("weigh_by", weigh_by, By)

    def stage(turns: pa.Table) -> Made:
        large = layout == "full" and path_tokens(turns) > limits.PART_TOKENS
        rows, counts = rows_and_report(
            Sessions.of(turns),
            chosen,
            reward=reward,
            sessions=sessions,
            max_row_tokens=max_row_tokens,
            threads=threads or 1,
            layout="suffix" if large else layout,
        )
        if weigh_by != "token":  # the weights that `linearize` sets
            rows = add_weights(rows, weigh_by)
        yield "report", counts
        parts = full_pieces(rows) if large else row_pieces(rows)
        del rows
        for part in parts:
            yield "rows", part
            del part

    targets = {"rows": Target(output, write_rows)}
    if report is not None:
        targets["report"] = Target(report, write_tables)
    job = {
        "stage": "linearize",
        "policy": asdict(chosen),
        "reward": facts_digest(session_facts(reward, sessions)),
        "max_row_tokens": max_row_tokens,
        "layout": layout,
        "weigh_by": weigh_by,
    }
    return run_job(
        source,
        stage,
        targets,
        job=job,
        **options,
    )


def compact_file(
    source: Paths,
    output: str | os.PathLike[str],
    **options: Unpack[JobOptions],
) -> dict[str, int]:
    """Write files of turns in delta form, in bounded memory.

    Parameters
    ----------
    source, output, **options
        As for `linearize_file`.

    Returns
    -------
    dict of str to int
        ``turns``, and ``rejected`` if requested.

    Raises
    ------
    FormatError, SchemaError, InvalidTurnsError
        As for `linearize_file` and `trajkit.compact`.
    """
    return run_job(
        source,
        lambda turns: iter([("turns", compact(turns))]),
        {"turns": Target(output, write_turns)},
        job={"stage": "compact"},
        **options,
    )


def expand_file(
    source: Paths,
    output: str | os.PathLike[str],
    **options: Unpack[JobOptions],
) -> dict[str, int]:
    """Write files of turns with complete prompts; see `compact_file`."""
    return run_job(
        source,
        lambda turns: iter([("turns", expand(turns))]),
        {"turns": Target(output, write_turns)},
        job={"stage": "expand"},
        **options,
    )


def facts_digest(facts: SessionFacts) -> object:
    """A value in JSON's types that differs if the metadata of sessions differ."""
    if facts.table is None:
        return facts.reward
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, facts.table.schema) as writer:
        writer.write_table(facts.table.combine_chunks())
    return hashlib.sha256(sink.getvalue()).hexdigest()
