"""Whether the rows of files keep their promises, in bounded memory.

Rows and turns go through side by side, in the order of the turns. Rows of files that
have them in another order are brought into it first, as scattered turns are
(`trajkit.jobs.group_sessions`): the session ids of both tell whether that is needed.
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
from trajkit.jobs.group_sessions import GATHERS, Log, Spill, buckets
from trajkit.jobs.manifest import fingerprint
from trajkit.jobs.session_index import INFLATED, SessionIndex
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
    """Write what files of rows break of their promises, in bounded memory.

    The violations are those of `trajkit.verify` of the tables. Held are some pieces of
    about 8 million tokens of prompts and outputs with their rows, or one session where
    that has more. Rows without a session_id are looked for among all turns: these, and
    the turns, are held whole.

    Parameters
    ----------
    rows : path
        A file or a directory of rows, as `trajkit.linearize` makes them or as another
        system does.
    turns : path
        A file or a directory, as for `trajkit.read_turns`.
    output : path
        Where the violations go: a file, or a directory of parts, as for
        `jobs.linearize_file`. What is wrong with sessions as such (no turns, several
        pieces) comes first.
    policy, reward, sessions, max_row_tokens, weigh_by
        As for `trajkit.verify`.
    rejected : path, optional
        Where the sessions go whose turns break a rule of the schema; their rows are
        passed over. None: such a session is an error.
    format, nonfinite_logprobs
        As for `trajkit.read_turns`, of the turns.
    gather : bool
        Whether to gather turns that lie scattered, and rows in another order than the
        turns, beside ``output``.
    watch : Watch, optional
        What to tell while it runs.

    Returns
    -------
    dict of str to int
        ``turns``, ``violations``, and ``rejected`` where asked.

    Raises
    ------
    FormatError
        As for `trajkit.read_turns`; ``output`` is a directory of another job's parts.
    SchemaError, InvalidTurnsError
        As for `trajkit.verify` and `trajkit.read_turns`; rows lie in another order, and
        are not to be gathered.
    PolicyError
        As for `trajkit.verify`; rows without a session_id, and ``output`` is a
        directory, or sessions are to be set aside.
    """
    judge = judge_of(policy, reward, sessions, max_row_tokens, weigh_by)
    watch = watch or Watch()
    files = _RowFiles(Path(rows))
    census = files.census()
    if None in census.turns:
        return _of_no_session(
            files.path, judge, turns, output, rejected, format, nonfinite_logprobs
        )
    folder, aside = folder_of(output), rejected is not None
    log = Log(turns, format, nonfinite_logprobs, aside, gather, folder)
    run = _Run(files, census, judge, gather=gather, folder=folder, watch=watch)
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
    """Rows that may be of any turn."""
    if is_parts(output) or rejected is not None:
        raise ArgumentError(
            f"the rows of {rows} have no session_id: they are verified as one, into one "
            "file, and no session is set aside"
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
        """session_id and row_index of all rows, and about what they take as Arrow."""
        first = 0
        for path in paths_in(self.path):
            kind = format_of(path)
            batches = key_batches(path, kind, _KEYS)
            if is_json(kind):
                batches = _keys_of_lines(path, kind)
            for batch, n_bytes in batches:
                yield _keys(batch, first), n_bytes
                first += batch.num_rows

    def census(self) -> SessionIndex:
        """How many rows each session has; None stands for those without a session.

        Raises
        ------
        SchemaError
            Some rows are of a session and some are of none.
        """
        census = SessionIndex()
        with warnings.catch_warnings():
            # what reads the rows says it
            warnings.simplefilter("ignore", TornLogWarning)
            for batch, n_bytes in self.keys():
                census.n_bytes += n_bytes
                census.add(batch.column("session_id"), None)
        if None in census.turns and len(census.turns) > 1:
            raise SchemaError("session_id is null in some rows: expected all or none")
        return census

    def faults(self, known: Container[str | None]) -> Iterator[pa.Table]:
        """What is wrong with sessions as such; ``known`` are those that have turns."""
        found = session_faults((batch for batch, _ in self.keys()), known)
        while some := list(islice(found, limits.VIOLATIONS)):
            yield violations_table(some)

    def batches(self, census: SessionIndex) -> Generator[pa.RecordBatch, None, None]:
        """The rows as the files hold them, in the types of `verification.run.any_rows`."""
        rows = census.n_turns * limits.READ_BYTES // max(census.n_bytes, 1)
        rows = min(max(rows, limits.MIN_READ_ROWS), limits.MAX_READ_ROWS)
        tables = iter_tables(self.path, batch_rows=rows, plan=rows_plan)
        return numbered(
            batch for table in tables for batch in table.combine_chunks().to_batches()
        )

    def gathered(
        self, census: SessionIndex, ranks: Mapping[str | None, int], folder: Path
    ) -> Generator[pa.RecordBatch, None, None]:
        """The rows of ranked sessions, by rank, each session's as the files hold them."""
        known = pa.array(list(ranks), pa.string())
        ordered = {name: census.turns[name] for name in ranks if name in census.turns}
        with tempfile.TemporaryDirectory(prefix=GATHERS, dir=folder) as root:
            spill = Spill(Path(root), buckets(SessionIndex(ordered, census.n_bytes)))
            for batch in self.batches(census):
                ours = pc.is_in(batch.column("session_id"), value_set=known)
                spill.add(batch.filter(ours))
            for bucket in spill.close():
                table = concat(iter_tables(bucket))
                names = table.column("session_id").to_pylist()
                order = np.argsort([ranks[name] for name in names], kind="stable")
                yield one_batch(take_rows(table, pa.array(order)))
                shutil.rmtree(bucket)


def _keys(batch: pa.RecordBatch, first: int) -> pa.RecordBatch:
    """Names and numbers of rows; those without a number are counted from ``first``."""
    n, names = batch.num_rows, batch.schema.names
    ids, numbers = pa.nulls(n, pa.string()), pa.array(first + np.arange(n))
    if "session_id" in names:
        check_session_id(batch.schema)
        ids = batch.column("session_id").cast(pa.string())
    if "row_index" in names and not batch.column("row_index").null_count:
        numbers = batch.column("row_index")
    return pa.RecordBatch.from_arrays([ids, numbers], list(_KEYS))


def _keys_of_lines(path: Path, kind: Format) -> Iterator[tuple[pa.RecordBatch, int]]:
    n_bytes = path.stat().st_size * (1 if kind == "jsonl" else INFLATED)
    lines = jsonl.lines(open_input(path, kind), str(path))
    keys = ({name: line.get(name) for name in _KEYS} for line in lines)
    for table in jsonl.tables(keys, str(path)):
        yield one_batch(table), n_bytes
        n_bytes = 0


class _Run:
    """The rows of files, beside the pieces of turns as they come.

    Parameters
    ----------
    files : _RowFiles
    census : SessionIndex
        Of the rows.
    judge : Judge
    gather : bool
        Rows in another order than the turns are brought into it, in ``folder``.
    folder : Path
    watch : Watch
    """

    def __init__(
        self,
        files: _RowFiles,
        census: SessionIndex,
        judge: Judge,
        *,
        gather: bool,
        folder: Path,
        watch: Watch,
    ) -> None:
        self._files, self._census, self._judge = files, census, judge
        self._gather, self._folder, self._watch = gather, folder, watch
        self._ranks: dict[str | None, int] = {}
        self._faults: Iterator[pa.Table] = iter([])
        # the rank of the first session at hand; rows of earlier ones are past
        self._at = 0
        self._names: set[str] = set()
        self._here = ROWS.empty_table()
        self._left = ExitStack()

    def begins(self, turns: SessionIndex, done: int) -> None:
        """Rows are read in the order of these turns.

        Raises
        ------
        InvalidTurnsError
            They lie in another one, and are not to be gathered.
        """
        self._watch.begins(turns, done)
        self._ranks = {name: rank for rank, name in enumerate(turns.turns)}
        known = [name for name in self._census.turns if name in self._ranks]
        whole = self._census.scattered is None
        if not done and not (whole and len(known) == len(self._census.turns)):
            # a run that goes on has written these
            self._faults = self._files.faults(self._ranks)
        odd = self._census.scattered or _falls(known, self._ranks)
        if odd is None:
            batches = self._files.batches(self._census)
        elif self._gather:
            self._watch.notes(
                f"rows of session {odd!r} do not lie where its turns do: all rows are "
                "gathered through temporary files first"
            )
            batches = self._files.gathered(self._census, self._ranks, self._folder)
        else:
            raise InvalidTurnsError(
                f"session {odd!r}: its rows do not lie where its turns do. Rows must be "
                "in the order of the turns, each session in one piece, unless they are "
                "gathered"
            )
        self._left.callback(batches.close)
        self._beside = SessionCursor("rows", batches, "turns", self._is_past)

    def stage(self, turns: pa.Table) -> Made:
        """The violations in the rows of these turns."""
        found = self._judge.found(self._rows_of(turns), turns)
        yield "turns", turns
        for faults in self._faults:
            yield "violations", faults
        yield "violations", found

    def close(self) -> None:
        """No more rows are read; temporary files are gone."""
        self._left.close()

    def _is_past(self, name: str) -> bool:
        return self._ranks.get(name, -1) < self._at

    def _rows_of(self, turns: pa.Table) -> pa.Table:
        """The rows of sessions that come next, or of some of those that came last."""
        names = pc.unique(turns.column("session_id"))
        wanted = set(names.to_pylist())
        if not wanted <= self._names:
            self._at, self._names = self._ranks[names[0].as_py()], wanted
            self._here = ROWS.empty_table()  # so that no two pieces are held
            self._here = self._beside.take(turns)
        if wanted == self._names:
            return self._here
        ours = pc.is_in(self._here.column("session_id"), value_set=names)
        return self._here.filter(ours)


def _falls(names: list[str | None], ranks: Mapping[str | None, int]) -> str | None:
    """The first session that comes after one of a higher rank."""
    for before, name in pairwise(names):
        if ranks[name] < ranks[before]:
            return name
    return None
