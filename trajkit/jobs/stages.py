"""Stages from file to file, in bounded memory.

A log goes through in pieces of whole sessions (`group_sessions`): while one is made into
rows, the next is read and the one before is written. An output is one file, or a
directory of parts, of which a run that was stopped goes on where it stood.
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
from trajkit.jobs.atomic_writers import Write, atomic_writers
from trajkit.jobs.group_sessions import Log, Piece
from trajkit.jobs.manifest import Manifest, fingerprint
from trajkit.jobs.session_index import SessionIndex
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
"""Tables and the outputs that they are for."""

Stage: TypeAlias = Callable[[pa.Table], Made]
"""What a piece of turns becomes."""

# What is counted by its rows; of the rest, "report" says how much there is.
_COUNTED = ("turns", "rejected", "violations")


@dataclass(frozen=True, slots=True)
class Target:
    """An output: where, and by what it is written."""

    path: Path
    write: Write


@dataclass(frozen=True, slots=True)
class Watch:
    """What a run tells about itself.

    Attributes
    ----------
    begins : function of a SessionIndex and an int
        What the source holds, and how many of its turns parts on disk took already.
    advances : function of an int
        Turns that went through since.
    notes : function of a str
        What takes longer than expected, in words.
    """

    begins: Callable[[SessionIndex, int], None] = lambda census, done: None
    advances: Callable[[int], None] = lambda n_turns: None
    notes: Callable[[str], None] = lambda text: None


def run(
    log: Log,
    stage: Stage,
    targets: Mapping[str, Target],
    job: Mapping[str, object] | None,
    watch: Watch,
) -> Counter[str]:
    """Put a log through a stage; what is counted comes back.

    Parameters
    ----------
    log : Log
    stage : function of a table
        Every piece goes through it, and an empty table where the log is empty.
    targets : mapping of str to Target
        Where the tables of each name go. Those of other names are counted only. The
        target "rejected" gets the sessions that were set aside.
    job : mapping, optional
        Of directories of parts: all that the parts depend on beside the source, in
        JSON's types. The first target keeps the account. None: the targets are files.
    watch : Watch

    Returns
    -------
    Counter
        Over all pieces: the sums of the integer columns of "report", and rows of turns,
        of what was set aside and of violations.

    Raises
    ------
    PolicyError
        Two targets are one, or some are files and some directories.
    """
    _check_places(targets, parts=job is not None)
    census = log.census()
    if job is None:
        watch.begins(census, 0)
        with ExitStack() as stack:
            found = prefetch(log.pieces(census), stack)
            return _part(found, stage, targets, watch, None)[0]
    files = itertools.chain(*log_files(log.source, log.format))
    source = fingerprint(log.source, files)
    sizes = [limits.FILE_TURNS, limits.READ_TOKENS]
    main = next(iter(targets.values())).path
    beside = [target.path for target in targets.values() if target.path != main]
    job = {**job, "source": source, "limits": sizes}
    manifest = Manifest.open(main, job, beside)
    watch.begins(census, manifest.done)
    with ExitStack() as stack:
        found = prefetch(log.pieces(census, manifest.done), stack)
        if manifest.ends and manifest.done >= census.n_turns:
            manifest.finish()
        while not manifest.finished:
            part = {}
            for name, target in targets.items():
                target.path.mkdir(exist_ok=True)
                part[name] = Target(target.path / manifest.part(), target.write)
            totals, n_turns = _part(found, stage, part, watch, limits.FILE_TURNS)
            manifest.add(n_turns, totals)
            if manifest.done >= census.n_turns or not n_turns:
                manifest.finish()
    return manifest.totals


def _check_places(targets: Mapping[str, Target], *, parts: bool) -> None:
    """Raise PolicyError where two targets are one, or one is a file among directories."""
    places: dict[Path, str] = {}
    for name, target in targets.items():
        other = places.setdefault(target.path.resolve(), name)
        if other != name:
            raise ArgumentError(
                f"{other} and {name} both go to {target.path}: each needs a place of "
                "its own"
            )
        if parts and kind_of(target.path):
            main = next(iter(targets.values())).path
            raise ArgumentError(
                f"{name} goes to the file {target.path}, and {main} is a directory of "
                "parts: give a directory"
            )


def _part(
    found: Iterator[Piece],
    stage: Stage,
    targets: Mapping[str, Target],
    watch: Watch,
    most: int | None,
) -> tuple[Counter[str], int]:
    """Put pieces of so many turns through, or all; what is counted, and the turns."""
    totals: Counter[str] = Counter()
    n_turns = 0
    places = {name: (target.path, target.write) for name, target in targets.items()}
    with atomic_writers(places) as sinks:
        for piece in found:
            for name, table in judged(stage, piece, aside="rejected" in targets):
                totals.update(_counted(name, table))
                if name in sinks:
                    sinks[name].put(table)
            n_turns += piece.n_turns
            watch.advances(piece.n_turns)
            if most is not None and n_turns >= most:
                break
    return totals, n_turns


def judged(stage: Stage, piece: Piece, *, aside: bool) -> Made:
    """What the stage makes of a piece, without the sessions that it refuses.

    A stage refuses turns before it gives its first table. Where no session may be set
    aside, the error is raised.
    """
    bad = [piece.aside]
    made = False
    if not aside:
        yield from stage(piece.turns)
        return
    try:
        yield from _begun(stage(piece.turns))
        made = True
    except _Refused:
        for session in _sessions(piece.turns):
            try:
                yield from _begun(stage(session))
                made = True
            except _Refused as error:
                name = session.column("session_id")[0].as_py()
                bad.append(pa.table([[name], [str(error)]], schema=REJECTED))
    if aside:
        if not made:
            # an output tells its columns, though nothing is in it
            yield from stage(piece.turns.slice(0, 0))
        yield "rejected", pa.concat_tables(bad)


class _Refused(Exception):
    """A stage refused turns, for the reason that it says."""


def _begun(made: Made) -> Made:
    try:
        first = next(made)
    except InvalidTurnsError as error:
        raise _Refused(str(error)) from error
    return itertools.chain([first], made)


def _sessions(turns: pa.Table) -> Iterator[pa.Table]:
    starts = [*run_starts(turns).tolist(), turns.num_rows]
    for start, stop in pairwise(starts):
        yield turns.slice(start, stop - start)


def _counted(name: str, table: pa.Table) -> Mapping[str, int]:
    """What a table adds to the totals of a run."""
    if name != "report":
        return {name: table.num_rows} if name in _COUNTED else {}
    counts = [one.name for one in table.schema if pa.types.is_integer(one.type)]
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

    The rows are those of `trajkit.linearize` of `trajkit.read_turns`. Held are some
    pieces of about 8 million tokens of prompts and outputs, or 4 million in delta form,
    or one session where that has more; of the whole rows of such a session, some at a
    time.

    Parameters
    ----------
    source : path
        A file or a directory, as for `trajkit.read_turns`.
    output : path
        A file, or a directory of parts (one that is there, or a path that ends with a
        separator). Of a directory, a run that was stopped goes on after the last part
        that it finished, and ends with the same bytes.
    policy, reward, sessions, max_row_tokens, layout
        As for `trajkit.linearize`.
    threads : int, optional
        As for `trajkit.linearize`, beside one that reads and one that writes, which
        have more to do. None: 1.
    weigh_by : {"token", "row", "rollout"}
        What ``row_weight`` is, as for `trajkit.add_weights`.
    report : path, optional
        Where the report goes; a directory where ``output`` is one.
    rejected : path, optional
        Where the sessions go that break a rule: `turns.validation.REJECTED`, with the
        reason; a directory where ``output`` is one. None: such a session is an error.
    format, nonfinite_logprobs
        As for `trajkit.read_turns`.
    gather : bool
        Whether to gather sessions that lie scattered, beside ``output``; see
        `trajkit.scan_turns`.
    watch : Watch, optional
        What to tell while it runs.

    Returns
    -------
    dict of str to int
        ``sessions``, the sums of the report's counts, and ``rejected`` where asked.

    Raises
    ------
    FormatError
        As for `trajkit.read_turns`; ``output`` is a directory of another job's parts.
    SchemaError, InvalidTurnsError, PolicyError
        As for `trajkit.linearize` and `trajkit.read_turns`. No file is left then; of a
        directory, the parts before.
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
        if weigh_by != "token":  # which they are already
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
        ``turns``, and ``rejected`` where asked.

    Raises
    ------
    FormatError, SchemaError, InvalidTurnsError
        As for `linearize_file` and `trajkit.compact`.
    """
    return _change(
        {"stage": "compact"},
        compact,
        source,
        output,
        rejected,
        format,
        nonfinite_logprobs,
        gather,
        watch,
    )


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
    """Write files of turns with their whole prompts, in bounded memory.

    Parameters
    ----------
    source, output, rejected, format, nonfinite_logprobs, gather, watch
        As for `linearize_file`.

    Returns
    -------
    dict of str to int
        ``turns``, and ``rejected`` where asked.

    Raises
    ------
    FormatError, SchemaError, InvalidTurnsError
        As for `linearize_file` and `trajkit.expand`.
    """
    return _change(
        {"stage": "expand"},
        expand,
        source,
        output,
        rejected,
        format,
        nonfinite_logprobs,
        gather,
        watch,
    )


def _change(
    job: dict[str, object],
    change: Callable[[pa.Table], pa.Table],
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    rejected: str | os.PathLike[str] | None,
    format: Format | None,
    nonfinite: Nonfinite,
    gather: bool,
    watch: Watch | None,
) -> dict[str, int]:
    def stage(turns: pa.Table) -> Made:
        yield "turns", change(turns)

    log = Log(
        source, format, nonfinite, rejected is not None, gather, folder_of(output)
    )
    targets = {"turns": Target(Path(output), write_turns)}
    return run_job(log, stage, targets, rejected, output, job, watch)


def run_job(
    log: Log,
    stage: Stage,
    targets: dict[str, Target],
    rejected: str | os.PathLike[str] | None,
    output: str | os.PathLike[str],
    job: dict[str, object],
    watch: Watch | None,
) -> dict[str, int]:
    """`run` to the files, or the directories of parts, that a caller named.

    Parameters
    ----------
    log, stage, targets, watch
        As for `run`; the first target goes to ``output``.
    rejected : path, optional
        The target of sessions that are set aside.
    output : path
        Whether it is a directory says whether all targets are.
    job : dict
        As for `run`, of what the stage itself depends on.

    Raises
    ------
    PolicyError
        Two targets are one, or some are files and some directories.
    """
    if rejected is not None:
        targets["rejected"] = Target(Path(rejected), write_tables)
    parts = is_parts(output)
    job = {
        **job,
        "rejected": log.aside,
        "nonfinite_logprobs": log.nonfinite_logprobs,
        "outputs": sorted(targets),
    }
    return dict(run(log, stage, targets, job if parts else None, watch or Watch()))


def is_parts(output: str | os.PathLike[str]) -> bool:
    """Whether the output is a directory of parts."""
    text = os.fspath(output)
    return text.endswith(os.sep) or os.path.isdir(text)


def folder_of(output: str | os.PathLike[str]) -> Path:
    """The directory that the output is written to; FileNotFoundError without one."""
    folder = Path(output).resolve().parent
    check_folder(folder)
    return folder


def facts_digest(facts: SessionFacts) -> object:
    """What tells these facts from others, in JSON's types."""
    if facts.table is None:
        return facts.reward
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, facts.table.schema) as writer:
        writer.write_table(facts.table.combine_chunks())
    return hashlib.sha256(sink.getvalue()).hexdigest()
