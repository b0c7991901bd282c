"""`trajkit.verify` from file to file, in bounded memory.

Rows and turns are read in step, in the order of the turns. The session ids of both are
scanned first. Rows in another order are sorted through temporary files, as scattered turns
are (`trajkit.jobs.group_sessions`).
"""

import os
import shutil
import tempfile
import warnings
from collections.abc import Container, Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.canonical import TableLike, check_session_id
from trajkit._arrow.take import take_rows
from trajkit._streams import limits
from trajkit._streams.lockstep import SessionCursor, one_batch
from trajkit._streams.session_batches import concat
from trajkit.errors import ArgumentError, InvalidTurnsError, SchemaError, TornLogWarning
from trajkit.io import jsonl
from trajkit.io.arrow import key_batches
from trajkit.io.formats import Format, format_of, is_json, open_input, paths_in
from trajkit.io.tables import (
    iter_tables,
    read_any_rows,
    read_turns,
    rows_plan,
    write_table,
    write_tables,
)
from trajkit.jobs.group_sessions import (
    TEMPORARY,
    Log,
    SessionIndex,
    Spill,
    bucket_numbers,
    text_bytes,
)
from trajkit.jobs.outputs import fingerprint
from trajkit.jobs.stages import (
    Made,
    Target,
    Watch,
    facts_digest,
    folder_of,
    is_parts,
    run_job,
)
from trajkit.policies import Policy
from trajkit.schema import ROWS
from trajkit.turns.session_metadata import Reward
from trajkit.turns.validation import Nonfinite
from trajkit.verification.context import violations_table
from trajkit.verification.row_rules import WeighBy
from trajkit.verification.run import (
    Judge,
    any_rows,
    judge_of,
    numbered,
    session_faults,
)

_KEYS = ("session_id", "row_index")


def verify_file(
    rows: str | os.PathLike[str],
    turns: str | os.PathLike[str],
    output: str | os.PathLike[str],
    policy: str | Policy | None = None,
    *,
    reward: Reward = None,
    sessions: TableLike | None = None,
    max_row_tokens: int | None = None,
    weigh_by: WeighBy = "token",
    rejected: str | os.PathLike[str] | None = None,
    format: Format | None = None,
    nonfinite_logprobs: Nonfinite = "raise",
    gather: bool = True,
    watch: Watch | None = None,
) -> dict[str, int]:
    """Write the violations in files of rows, in bounded memory.

    The violations are those of `trajkit.verify` of the tables. In memory are a few tables
    of about 8 million tokens of prompts and outputs with their rows, or a larger session.
    Rows without a session_id are compared with all turns, so these, and all turns, are
    read into memory.

    Parameters
    ----------
    rows : path
        A file or a directory of rows, from `trajkit.linearize` or another system.
    turns : path
        A file or a directory, as for `trajkit.read_turns`.
    output : path
        The file of the violations, or a directory of parts, as for
        `jobs.linearize_file`. Violations of sessions as such (no turns, not contiguous)
        come first.
    policy, reward, sessions, max_row_tokens, weigh_by
        As for `trajkit.verify`.
    rejected : path, optional
        The output of sessions whose turns break a rule of the schema; their rows are
        skipped. None: such a session is an error.
    format, nonfinite_logprobs
        As for `trajkit.read_turns`, of the turns.
    gather : bool
        Whether scattered turns, and rows in another order than the turns, are sorted in
        temporary files next to ``output``.
    watch : Watch, optional
        Functions that report progress.

    Returns
    -------
    dict of str to int
        ``turns``, ``violations``, and ``rejected`` if requested.

    Raises
    ------
    FormatError
        As for `trajkit.read_turns`; ``output`` is a directory of another job's parts.
    SchemaError, InvalidTurnsError
        As for `trajkit.verify` and `trajkit.read_turns`; rows are in another order,
        without ``gather``.
    ArgumentError
        As for `trajkit.verify`; the rows have no session_id, and ``output`` is a
        directory or ``rejected`` is given.
    """
    judge = judge_of(policy, reward, sessions, max_row_tokens, weigh_by)
    watch = watch or Watch()
    files = _RowFiles(Path(rows))
    index = files.index()
    if None in index.turns:
        return _of_no_session(
            files.path, judge, turns, output, rejected, format, nonfinite_logprobs
        )
    folder = folder_of(output)
    log = Log(turns, format, nonfinite_logprobs, rejected is not None, gather, folder)
    run = _Run(files, index, judge, gather=gather, folder=folder, watch=watch)
    job = {
        "stage": "verify",
        "rows": fingerprint(rows, paths_in(Path(rows))),
        "policy": None if judge.policy is None else asdict(judge.policy),
        "reward": facts_digest(judge.facts),
        "max_row_tokens": max_row_tokens,
        "weigh_by": weigh_by,
    }
    targets = {"violations": Target(Path(output), write_tables)}
    watch = replace(watch, begins=run.begins)
    with closing(run):
        return run_job(log, run.stage, targets, rejected, output, job, watch)


def _of_no_session(
    rows: Path,
    judge: Judge,
    turns: str | os.PathLike[str],
    output: str | os.PathLike[str],
    rejected: str | os.PathLike[str] | None,
    format: Format | None,
    nonfinite: Nonfinite,
) -> dict[str, int]:
    """Verify rows that may belong to any session."""
    if is_parts(output) or rejected is not None:
        raise ArgumentError(
            f"the rows of {rows} have no session_id, so they are verified together: pass "
            "a file as output, and no file for rejected sessions"
        )
    table = read_turns(turns, format=format, nonfinite_logprobs=nonfinite)
    found = judge.found(any_rows(read_any_rows(rows)), table)
    write_table(found, Path(output))
    return {"turns": table.num_rows, "violations": found.num_rows}


@dataclass(frozen=True, slots=True)
class _RowFiles:
    """Rows of any system in files."""

    path: Path

    def keys(self) -> Iterator[tuple[pa.RecordBatch, int]]:
        """session_id and row_index of all rows, with their approximate bytes as Arrow."""
        first = 0
        for path in paths_in(self.path):
            kind = format_of(path)
            batches = key_batches(path, kind, _KEYS)
            if is_json(kind):
                batches = _keys_of_lines(path, kind)
            for batch, n_bytes in batches:
                yield _keys(batch, first), n_bytes
                first += batch.num_rows

    def index(self) -> SessionIndex:
        """The number of rows of each session; None stands for rows without a session.

        Raises
        ------
        SchemaError
            Only some rows have a session.
        """
        index = SessionIndex()
        with warnings.catch_warnings():
            # reading the rows repeats the warning
            warnings.simplefilter("ignore", TornLogWarning)
            for batch, n_bytes in self.keys():
                index.n_bytes += n_bytes
                index.add(batch.column("session_id"), None)
        if None in index.turns and len(index.turns) > 1:
            raise SchemaError("session_id is null in some rows: expected all or none")
        return index

    def faults(self, known: Container[str | None]) -> Iterator[pa.Table]:
        """Violations of sessions as such; ``known`` are the sessions that have turns."""
        found = session_faults((batch for batch, _ in self.keys()), known)
        while some := list(islice(found, limits.VIOLATIONS)):
            yield violations_table(some)

    def batches(self, index: SessionIndex) -> Generator[pa.RecordBatch, None, None]:
        """The rows as stored, in the types of `verification.run.any_rows`."""
        tables = iter_tables(self.path, batch_rows=index.batch_rows, plan=rows_plan)
        return numbered(
            batch for table in tables for batch in table.combine_chunks().to_batches()
        )

    def in_rank_order(
        self, index: SessionIndex, ranks: Mapping[str | None, int], folder: Path
    ) -> Generator[pa.RecordBatch, None, None]:
        """The rows of ranked sessions, sorted by rank; within a session as stored."""
        known = pa.array(list(ranks), pa.string())
        ordered = {name: index.turns[name] for name in ranks if name in index.turns}
        with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=folder) as root:
            spill = Spill(
                Path(root), bucket_numbers(SessionIndex(ordered, index.n_bytes))
            )
            for batch in self.batches(index):
                ranked = pc.is_in(batch.column("session_id"), value_set=known)
                spill.add(batch.filter(ranked))
            for bucket in spill.close():
                table = concat(iter_tables(bucket))
                names = table.column("session_id").to_pylist()
                order = np.argsort([ranks[name] for name in names], kind="stable")
                yield one_batch(take_rows(table, pa.array(order)))
                shutil.rmtree(bucket)


def _keys(batch: pa.RecordBatch, first: int) -> pa.RecordBatch:
    """session_id and row_index; rows without a number are counted from ``first``."""
    n, names = batch.num_rows, batch.schema.names
    ids, numbers = pa.nulls(n, pa.string()), pa.array(first + np.arange(n))
    if "session_id" in names:
        check_session_id(batch.schema)
        ids = batch.column("session_id").cast(pa.string())
    if "row_index" in names and not batch.column("row_index").null_count:
        numbers = batch.column("row_index")
    return pa.RecordBatch.from_arrays([ids, numbers], list(_KEYS))


def _keys_of_lines(path: Path, kind: Format) -> Iterator[tuple[pa.RecordBatch, int]]:
    n_bytes = text_bytes(path, kind)
    lines = jsonl.lines(open_input(path, kind), str(path))
    keys = ({name: line.get(name) for name in _KEYS} for line in lines)
    for table in jsonl.tables(keys, str(path)):
        yield one_batch(table), n_bytes
        n_bytes = 0


class _Run:
    """Verifies the rows of files, read in step with the turns.

    Parameters
    ----------
    files : _RowFiles
    index : SessionIndex
        Of the rows.
    judge : Judge
    gather : bool
        Rows in another order than the turns are sorted, in ``folder``.
    folder : Path
    watch : Watch
    """

    def __init__(
        self,
        files: _RowFiles,
        index: SessionIndex,
        judge: Judge,
        *,
        gather: bool,
        folder: Path,
        watch: Watch,
    ) -> None:
        self._files, self._index, self._judge = files, index, judge
        self._gather, self._folder, self._watch = gather, folder, watch
        self._ranks: dict[str | None, int] = {}
        self._faults: Iterator[pa.Table] = iter([])
        # rank of the first current session; the cursor skips rows of earlier ones
        self._rank = 0
        self._names: set[str] = set()
        self._rows = ROWS.empty_table()
        self._stack = ExitStack()

    def begins(self, turns: SessionIndex, done: int) -> None:
        """Start to read rows in the order of these turns.

        Raises
        ------
        InvalidTurnsError
            The rows have another order, without ``gather``.
        """
        self._watch.begins(turns, done)
        self._ranks = {name: rank for rank, name in enumerate(turns.turns)}
        known = [name for name in self._index.turns if name in self._ranks]
        complete = len(known) == len(self._index.turns)
        if not done and (self._index.scattered is not None or not complete):
            # a run that continues has written these
            self._faults = self._files.faults(self._ranks)
        misplaced = self._index.scattered or _first_misplaced(known, self._ranks)
        if misplaced is None:
            batches = self._files.batches(self._index)
        elif self._gather:
            self._watch.notes(
                f"rows of session {misplaced!r} are not in the order of the turns: all "
                "rows are sorted through temporary files first"
            )
            batches = self._files.in_rank_order(self._index, self._ranks, self._folder)
        else:
            raise InvalidTurnsError(
                f"session {misplaced!r}: its rows are not in the order of the turns. Sort "
                "them (sessions must be contiguous), or pass gather=True"
            )
        self._stack.callback(batches.close)
        self._cursor = SessionCursor("rows", batches, "turns", self._is_past)

    def stage(self, turns: pa.Table) -> Made:
        """The violations in the rows of these turns."""
        found = self._judge.found(self._rows_of(turns), turns)
        yield "turns", turns
        for faults in self._faults:
            yield "violations", faults
        yield "violations", found

    def close(self) -> None:
        """Stop reading rows and delete temporary files."""
        self._stack.close()

    def _is_past(self, name: str) -> bool:
        return self._ranks.get(name, -1) < self._rank

    def _rows_of(self, turns: pa.Table) -> pa.Table:
        """The rows of the next sessions, or of some of the current ones."""
        names = pc.unique(turns.column("session_id"))
        wanted = set(names.to_pylist())
        if not wanted <= self._names:
            self._rank, self._names = self._ranks[names[0].as_py()], wanted
            self._rows = ROWS.empty_table()  # frees the rows before the next are read
            self._rows = self._cursor.take(turns)
        if wanted == self._names:
            return self._rows
        wanted_rows = pc.is_in(self._rows.column("session_id"), value_set=names)
        return self._rows.filter(wanted_rows)


def _first_misplaced(
    names: list[str | None], ranks: Mapping[str | None, int]
) -> str | None:
    """The first session that follows one of a higher rank."""
    for before, name in pairwise(names):
        if ranks[name] < ranks[before]:
            return name
    return None
