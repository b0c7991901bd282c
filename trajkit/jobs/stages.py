"""Jobs from file to file, in bounded memory.

A log is read in tables of complete sessions (`group_sessions`): while one becomes rows, the
next is read and the previous one is written. An output is one file, or a directory of
parts; an interrupted job continues after the last complete part of a directory.
"""

import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa

from trajkit._arguments import check_choice
from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.canonical import TableLike
from trajkit._streams import limits
from trajkit._streams.prefetch import prefetch
from trajkit._streams.session_batches import path_tokens
from trajkit.errors import ArgumentError, InvalidTurnsError
from trajkit.io.formats import Format, check_folder, kind_of
from trajkit.io.tables import log_files, write_rows, write_tables, write_turns
from trajkit.jobs.group_sessions import Log, Piece, SessionIndex
from trajkit.jobs.outputs import Manifest, Write, atomic_writers, fingerprint
from trajkit.pipeline.rows import Layout, linearize
from trajkit.pipeline.suffix_layout import full_pieces, row_pieces
from trajkit.policies import Policy
from trajkit.policies import policy as named_policy
from trajkit.training.row_weights import By, add_weights
from trajkit.turns.delta import compact, expand
from trajkit.turns.session_metadata import Reward, SessionFacts, session_facts
from trajkit.turns.table import locate
from trajkit.turns.turn_rules import run_starts
from trajkit.turns.validation import REJECTED, Nonfinite

Made: TypeAlias = Iterator[tuple[str, pa.Table]]
"""Tables, each with the name of its output."""

Stage: TypeAlias = Callable[[pa.Table], Made]
"""A function from turns of complete sessions to tables."""

# outputs whose rows are counted; the counts of "report" are summed up
_COUNTED = ("turns", "rejected", "violations")


@dataclass(frozen=True, slots=True)
class Target:
    """An output: its path and the function that writes it."""

    path: Path
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


def run(
    log: Log,
    stage: Stage,
    targets: Mapping[str, Target],
    job: Mapping[str, object] | None,
    watch: Watch,
) -> Counter[str]:
    """Apply a stage to a log.

    Parameters
    ----------
    log : Log
    stage : function of a table
        Called for every piece, and for an empty table if the log is empty.
    targets : mapping of str to Target
        The outputs of the stage's tables, by name. Tables of other names are only
        counted. The target "rejected" gets the rejected sessions.
    job : mapping, optional
        For directories of parts: everything that the parts depend on besides the
        source, in JSON's types. The first target has the manifest. None: the targets
        are files.
    watch : Watch

    Returns
    -------
    Counter
        The sums of the integer columns of "report", and the numbers of turns, rejected
        sessions and violations.

    Raises
    ------
    ArgumentError
        Two targets are the same, or some are files and some directories.
    """
    _check_targets(targets, parts=job is not None)
    index = log.index()
    if job is None:
        watch.begins(index, 0)
        with ExitStack() as stack:
            pieces = prefetch(log.pieces(index), stack)
            return _write_part(pieces, stage, targets, watch, None)[0]
    files = itertools.chain(*log_files(log.source, log.format))
    source = fingerprint(log.source, files)
    job = {**job, "source": source, "limits": [limits.FILE_TURNS, limits.READ_TOKENS]}
    main, *others = dict.fromkeys(target.path for target in targets.values())
    manifest = Manifest.open(main, job, others)
    watch.begins(index, manifest.done)
    with ExitStack() as stack:
        pieces = prefetch(log.pieces(index, manifest.done), stack)
        if manifest.ends and manifest.done >= index.n_turns:
            manifest.finish()
        while not manifest.finished:
            part = {}
            for name, target in targets.items():
                target.path.mkdir(exist_ok=True)
                part[name] = Target(target.path / manifest.part(), target.write)
            totals, n = _write_part(pieces, stage, part, watch, limits.FILE_TURNS)
            manifest.add(n, totals)
            if manifest.done >= index.n_turns or not n:
                manifest.finish()
    return manifest.totals


def _check_targets(targets: Mapping[str, Target], *, parts: bool) -> None:
    """Raise ArgumentError if two targets are the same, or files mix with directories."""
    names: dict[Path, str] = {}
    for name, target in targets.items():
        other = names.setdefault(target.path.resolve(), name)
        if other != name:
            raise ArgumentError(
                f"{other} and {name} both go to {target.path}: each needs its own path"
            )
        if parts and kind_of(target.path):
            main = next(iter(targets.values())).path
            raise ArgumentError(
                f"{name} goes to the file {target.path}, and {main} is a directory of "
                "parts: give a directory"
            )


def _write_part(
    pieces: Iterator[Piece],
    stage: Stage,
    targets: Mapping[str, Target],
    watch: Watch,
    max_turns: int | None,
) -> tuple[Counter[str], int]:
    """Write pieces until ``max_turns`` is reached; returns the totals and the turns."""
    totals: Counter[str] = Counter()
    n_turns = 0
    paths = {name: (target.path, target.write) for name, target in targets.items()}
    with atomic_writers(paths) as writers:
        for piece in pieces:
            for name, table in _apply(stage, piece, reject="rejected" in targets):
                totals.update(_counts(name, table))
                if name in writers:
                    writers[name].put(table)
            n_turns += piece.n_turns
            watch.advances(piece.n_turns)
            if max_turns is not None and n_turns >= max_turns:
                break
    return totals, n_turns


def _apply(stage: Stage, piece: Piece, *, reject: bool) -> Made:
    """The tables of a piece; with ``reject``, without the sessions that it refuses.

    A stage raises before it yields its first table.
    """
    if not reject:
        yield from stage(piece.turns)
        return
    rejected = [piece.rejected]
    made = False
    try:
        yield from _first_made(stage(piece.turns))
        made = True
    except _Refused:
        for session in _sessions(piece.turns):
            try:
                yield from _first_made(stage(session))
                made = True
            except _Refused as error:
                name = session.column("session_id")[0].as_py()
                rejected.append(pa.table([[name], [str(error)]], schema=REJECTED))
    if not made:  # an empty output has columns, too
        yield from stage(piece.turns.slice(0, 0))
    yield "rejected", pa.concat_tables(rejected)


class _Refused(Exception):
    """A stage refused turns for the reason in the message."""


def _first_made(made: Made) -> Made:
    """The tables, after the first of them was made."""
    try:
        first = next(made)
    except InvalidTurnsError as error:
        raise _Refused(str(error)) from error
    return itertools.chain([first], made)


def _sessions(turns: pa.Table) -> Iterator[pa.Table]:
    starts = [*run_starts(turns).tolist(), turns.num_rows]
    for start, stop in pairwise(starts):
        yield turns.slice(start, stop - start)


def _counts(name: str, table: pa.Table) -> Mapping[str, int]:
    """What a table adds to the totals of a job."""
    if name != "report":
        return {name: table.num_rows} if name in _COUNTED else {}
    counts = [field.name for field in table.schema if pa.types.is_integer(field.type)]
    sums = {count: pc.sum(table[count]).as_py() or 0 for count in counts}
    return {"sessions": table.num_rows, **sums}


def linearize_file(
    source: str | os.PathLike[str],
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
    rejected: str | os.PathLike[str] | None = None,
    format: Format | None = None,
    nonfinite_logprobs: Nonfinite = "raise",
    gather: bool = True,
    watch: Watch | None = None,
) -> dict[str, int]:
    """Write the training rows of files of turns, in bounded memory.

    The rows are those of `trajkit.linearize` of `trajkit.read_turns`. In memory are a few
    tables of about 8 million tokens of prompts and outputs (4 million in delta form), or
    a larger session. The full rows of a larger session are written some at a time.

    Parameters
    ----------
    source : path
        A file or a directory, as for `trajkit.read_turns`.
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
    rejected : path, optional
        The output of sessions that break a rule, as `turns.validation.REJECTED` with the
        reason; a directory if ``output`` is one. None: such a session is an error.
    format, nonfinite_logprobs
        As for `trajkit.read_turns`.
    gather : bool
        Whether scattered sessions are grouped, in temporary files next to ``output``;
        see `trajkit.scan_turns`.
    watch : Watch, optional
        Functions that report progress.

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
        rows, counts = linearize(
            locate(turns),
            chosen,
            reward=reward,
            sessions=sessions,
            max_row_tokens=max_row_tokens,
            threads=threads or 1,
            layout="suffix" if large else layout,
            report=True,
        )
        if weigh_by != "token":  # the weights that `linearize` sets
            rows = add_weights(rows, weigh_by)
        yield "report", counts
        parts = full_pieces(rows) if large else row_pieces(rows)
        del rows
        for part in parts:
            yield "rows", part
            del part

    targets = {"rows": Target(Path(output), write_rows)}
    if report is not None:
        targets["report"] = Target(Path(report), write_tables)
    job = {
        "stage": "linearize",
        "policy": asdict(chosen),
        "reward": facts_digest(session_facts(reward, sessions)),
        "max_row_tokens": max_row_tokens,
        "layout": layout,
        "weigh_by": weigh_by,
    }
    log = Log(
        source,
        format,
        nonfinite_logprobs,
        rejected is not None,
        gather,
        folder_of(output),
    )
    return run_job(log, stage, targets, rejected, output, job, watch)


def compact_file(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    rejected: str | os.PathLike[str] | None = None,
    format: Format | None = None,
    nonfinite_logprobs: Nonfinite = "raise",
    gather: bool = True,
    watch: Watch | None = None,
) -> dict[str, int]:
    """Write files of turns in delta form, in bounded memory.

    Parameters
    ----------
    source, output, rejected, format, nonfinite_logprobs, gather, watch
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
    folder = folder_of(output)
    log = Log(source, format, nonfinite_logprobs, rejected is not None, gather, folder)
    return _convert_file("compact", compact, log, output, rejected, watch)


def expand_file(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    rejected: str | os.PathLike[str] | None = None,
    format: Format | None = None,
    nonfinite_logprobs: Nonfinite = "raise",
    gather: bool = True,
    watch: Watch | None = None,
) -> dict[str, int]:
    """Write files of turns with complete prompts; see `compact_file`."""
    folder = folder_of(output)
    log = Log(source, format, nonfinite_logprobs, rejected is not None, gather, folder)
    return _convert_file("expand", expand, log, output, rejected, watch)


def _convert_file(
    name: str,
    convert: Callable[[pa.Table], pa.Table],
    log: Log,
    output: str | os.PathLike[str],
    rejected: str | os.PathLike[str] | None,
    watch: Watch | None,
) -> dict[str, int]:
    def stage(turns: pa.Table) -> Made:
        yield "turns", convert(turns)

    targets = {"turns": Target(Path(output), write_turns)}
    return run_job(log, stage, targets, rejected, output, {"stage": name}, watch)


def run_job(
    log: Log,
    stage: Stage,
    targets: dict[str, Target],
    rejected: str | os.PathLike[str] | None,
    output: str | os.PathLike[str],
    job: dict[str, object],
    watch: Watch | None,
) -> dict[str, int]:
    """`run` with files or directories of parts, depending on ``output``.

    Parameters
    ----------
    log, stage, targets, watch
        As for `run`.
    rejected : path, optional
        The target of rejected sessions.
    output : path
        The path of the first target, as the caller spelled it.
    job : dict
        As for `run`: what the stage depends on.

    Raises
    ------
    ArgumentError
        As `run`.
    """
    if rejected is not None:
        targets["rejected"] = Target(Path(rejected), write_tables)
    job = {
        **job,
        "rejected": log.reject,
        "nonfinite_logprobs": log.nonfinite_logprobs,
        "outputs": sorted(targets),
    }
    parts = is_parts(output)
    return dict(run(log, stage, targets, job if parts else None, watch or Watch()))


def is_parts(output: str | os.PathLike[str]) -> bool:
    """Whether the output is a directory of parts."""
    text = os.fspath(output)
    return text.endswith(os.sep) or os.path.isdir(text)


def folder_of(output: str | os.PathLike[str]) -> Path:
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
