"""`verify` from file to file, in bounded memory.

Rows and turns are read in step, in the order of the turns. The session ids of both are
scanned first. Rows in another order are sorted through temporary files, as scattered turns
are (`trajkit.files.group`).
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trajkit.errors import ArgumentError, InvalidTurnsError, SchemaError
from trajkit.files.formats import paths_in
from trajkit.files.group import (
    SessionIndex,
    bucket_numbers,
    grouped,
    index_sessions,
    read_turns,
)
from trajkit.files.guard import Input, check_outputs, is_parts, turns_inputs
from trajkit.files.run import (
    Made,
    Watch,
    facts_digest,
    fingerprint,
    folder_of,
    run,
    whole,
)
from trajkit.files.sources import Paths, paths_of
from trajkit.files.tables import (
    full,
    iter_tables,
    read_any_rows,
    rows_plan,
    write_table,
)
from trajkit.policies import Policy
from trajkit.schema import ROWS
from trajkit.tables import lazy_compute as pc
from trajkit.tables import limits
from trajkit.tables.canonical import TableLike
from trajkit.tables.columns import take_rows
from trajkit.tables.stages import concat, one_by_one, whole_sessions
from trajkit.turns.session_metadata import Reward
from trajkit.verification.context import violations_table
from trajkit.verification.run import (
    WeighBy,
    any_rows,
    judge_of,
    numbered,
    session_faults,
)


def verify_file(
    rows: str | os.PathLike[str],
    turns: Paths,
    output: str | os.PathLike[str],
    policy: str | Policy | None = None,
    *,
    reward: Reward = None,
    sessions: TableLike | None = None,
    max_row_tokens: int | None = None,
    weigh_by: WeighBy = "token",
    **options: Any,
) -> dict[str, int]:
    """Write the violations in files of rows, as `trajkit.verify` of the tables finds them.

    In memory are a few tables of about 8 million tokens of prompts and outputs with their
    rows, or a larger session. Rows without a session_id are compared with all turns, so
    these, and all turns, are read into memory.

    Parameters
    ----------
    rows : path
        A file or a directory of rows, of trajkit or another system.
    turns : path
        As for `trajkit.read_turns`.
    output : path
        The file of the violations, or a directory of parts, as for `trajkit.run`.
        Violations of sessions as such (no turns, not contiguous) come first.
    policy, reward, sessions, max_row_tokens, weigh_by
        As for `trajkit.verify`.
    **options
        Of `trajkit.run`, about the turns. Rows of rejected sessions are skipped.

    Returns
    -------
    dict of str to int
        ``turns``, ``violations``, and ``rejected`` if requested.

    Raises
    ------
    FormatError, SchemaError, InvalidTurnsError, ArgumentError
        As for `trajkit.verify` and `trajkit.run`. Without a policy there are no rows;
        without a session_id they need a file as output, and no file of rejected sessions.
    """
    judge = judge_of(policy, reward, sessions, max_row_tokens, weigh_by)
    path, inputs = Path(rows), [Input(Path(rows))]
    index = index_sessions(paths_in(path), None, None)
    if not index.turns and judge.policy is None:
        raise InvalidTurnsError(
            f"{path}: no rows, nothing to do. With a policy, its rows are missing there"
        )
    if None in index.turns:
        if len(index.turns) > 1:
            raise SchemaError(
                "session_id is null or no text in some rows: expected all or none"
            )
        if is_parts(output) or options.get("rejected") is not None:
            raise ArgumentError(
                f"the rows of {path} have no session_id, so they are verified together: "
                "pass a file as output, and no file for rejected sessions"
            )
        given = [*turns_inputs(paths_of(turns) or []), *inputs]
        check_outputs({"violations": (output, "violations")}, given)
        names = {"format", "nonfinite_logprobs", "session_prefix"} & {*options}
        table = read_turns(turns, **{name: options[name] for name in names})
        found = judge.found(any_rows(read_any_rows(path)), table)
        write_table(found, output)
        return {"turns": table.num_rows, "violations": found.num_rows}
    watch = options.get("watch") or Watch()
    folder = folder_of(output)
    with ExitStack() as stack:
        reader = _RowReader(path, index, watch.notes, folder, stack)

        def begins(turns: SessionIndex, done: int) -> None:
            watch.begins(turns, done)
            reader.begin(turns, done)

        def stage(turns: pa.Table) -> Mapping[str, Made]:
            found = judge.found(reader.rows_of(turns), turns)
            return {"turns": turns, "violations": chain(reader.faults, whole(found))}

        job = {
            "stage": "verify",
            "rows": fingerprint([path], paths_in(path)),
            "policy": None if judge.policy is None else asdict(judge.policy),
            "reward": facts_digest(judge.facts),
            "max_row_tokens": max_row_tokens,
            "weigh_by": weigh_by,
        }
        options |= {"watch": replace(watch, begins=begins), "inputs": inputs}
        return run(turns, stage, {"violations": output}, resume=job, **options)


class _RowReader:
    """The rows of files, read in step with the turns.

    ``index`` is of the rows. Rows in another order than the turns are sorted in
    ``folder``. Temporary files are gone when the stack ends.
    """

    def __init__(
        self,
        path: Path,
        index: SessionIndex,
        notes: Callable[[str], None],
        folder: Path,
        stack: ExitStack,
    ) -> None:
        self._path, self._index = path, index
        self._notes, self._folder, self._stack = notes, folder, stack
        self._ranks: dict[str | None, int] = {}
        # violations of sessions as such
        self.faults: Iterator[pa.RecordBatch] = iter([])
        # rows of sessions that were read, by name
        self._held: dict[str | None, pa.Table] = {}

    def begin(self, turns: SessionIndex, done: int) -> None:
        ranks = self._ranks = {name: rank for rank, name in enumerate(turns.turns)}
        known = [name for name in self._index.turns if name in ranks]
        # a run that continues has written these
        if not done and (self._index.scattered or len(known) < len(self._index.turns)):
            found = session_faults(self._batches(), ranks)
            some = iter(lambda: list(islice(found, limits.VIOLATIONS)), [])
            self.faults = (b for v in some for b in violations_table(v).to_batches())
        falls = (b for a, b in pairwise(known) if ranks[b] < ranks[a])
        misplaced = self._index.scattered or next(falls, None)
        rows = self._batches()
        if misplaced is not None:
            self._notes(
                f"rows of session {misplaced!r} are not in the order of the turns: all "
                "rows are sorted through temporary files first"
            )
            rows = self._sorted(known)
        tables = map(full, whole_sessions(rows, "rows"))
        first = next(tables, ROWS.empty_table())
        self._empty = first.slice(0, 0)
        sessions = one_by_one(chain([first], tables))
        self._sessions = ((name, own) for name, own in sessions if name in ranks)
        self._next = next(self._sessions, None)

    def rows_of(self, turns: pa.Table) -> pa.Table:
        """The rows of the next sessions, or of some of the current ones."""
        names, ranks = pc.unique(turns.column("session_id")).to_pylist(), self._ranks
        if not names:
            return self._empty
        while self._next is not None and ranks[self._next[0]] <= ranks[names[-1]]:
            name, rows = self._next
            self._held[name] = rows
            self._next = next(self._sessions, None)
        held = self._held.items()
        self._held = {one: own for one, own in held if ranks[one] >= ranks[names[0]]}
        own = (self._held[name] for name in names if name in self._held)
        return concat([self._empty, *own])

    def _batches(self) -> Iterator[pa.RecordBatch]:
        rows = self._index.batch_rows
        tables = iter_tables(self._path, batch_rows=rows, plan=rows_plan)
        return numbered(batch for table in tables for batch in table.to_batches())

    def _sorted(self, known: list[str | None]) -> Iterator[pa.RecordBatch]:
        """The rows in the order of the turns; within a session as stored."""
        counts, rank = self._index.turns, self._ranks.__getitem__
        known = sorted(known, key=rank)
        ordered = SessionIndex({one: counts[one] for one in known}, self._index.n_bytes)
        names = pa.array(known, pa.string())
        batches = (
            batch.filter(pc.is_in(batch["session_id"].cast(pa.string()), names))
            for batch in self._batches()
        )
        found = grouped(batches, bucket_numbers(ordered), self._folder)
        for tables in self._stack.enter_context(closing(found)):
            table = concat(tables)
            order = np.argsort(
                [*map(rank, table["session_id"].to_pylist())], kind="stable"
            )
            yield from take_rows(table, pa.array(order)).to_batches()
