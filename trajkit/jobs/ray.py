"""Rows on a Ray cluster: files of turns, or a dataset, to a dataset of rows.

Ray cuts its blocks where it likes, so sessions are kept whole in one of two ways: a file
of whole sessions is read and made into rows within one task, as its directory amends it;
or the turns of each session are brought together by Ray's own shuffle. A task whose worker
or machine dies is run again by Ray, and gives the same rows.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.take import take_rows
from trajkit.errors import ArgumentError, InvalidTurnsError
from trajkit.io.tables import turn_files
from trajkit.jobs.engine_step import LinearizeStep
from trajkit.jobs.group_sessions import scan_turns
from trajkit.jobs.session_index import index_sessions
from trajkit.turns.amendments import Amendments

if TYPE_CHECKING:
    from ray.data import Dataset

_SESSIONS_IN = pa.schema([("path", pa.string()), ("session_id", pa.string())])

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def linearize(
    turns: "Paths | Dataset",
    step: LinearizeStep | None = None,
    *,
    shuffles: int | None = None,
) -> "Dataset":
    """The training rows of turns, as a Ray dataset that is made when it is used.

    Parameters
    ----------
    turns : path, sequence of paths, or ray.data.Dataset
        Files or directories that every machine of the cluster sees, a task for each
        file. Of a directory, tables of sessions are passed over and amendments are
        folded in, as `trajkit.read_turns` does it. Within a file sessions may lie
        scattered, but no session may have turns in two files: of several files, tasks
        look through the session ids first, when this function is called. The log of a
        gateway whose files were rolled is brought into such files by ``trajkit compact
        LOG -o DIRECTORY/``. Or a dataset with the columns of `trajkit.schema.TURNS` or
        ``TURNS_DELTA``, in any order: it is shuffled by session.
    step : LinearizeStep, optional
        Policy, rewards and layout; None: ``LinearizeStep()``.
    shuffles : int, optional
        Of a dataset: how many tasks take part in the shuffle. None: Ray's choice.

    Returns
    -------
    ray.data.Dataset
        With the columns of ``step.schema``. ``.write_parquet(path)`` writes it where
        `trajkit.read_rows` finds it, each session in one piece.

    Raises
    ------
    PolicyError
        Ray is not installed.
    FormatError
        A directory without files.
    InvalidTurnsError
        A session has turns in two files.

    Examples
    --------
    ``ray.linearize("turns/", LinearizeStep(policy="slime")).write_parquet("rows")``
    """
    try:
        import ray.data
    except ModuleNotFoundError as error:
        raise ArgumentError(
            "trajkit.jobs.ray needs Ray: pip install 'trajkit[ray]'"
        ) from error
    step = step or LinearizeStep()
    if isinstance(turns, ray.data.Dataset):
        groups = turns.groupby("session_id", num_partitions=shuffles)
        return groups.map_groups(_OfSession(step), batch_format="pyarrow")
    given = [turns] if isinstance(turns, str | os.PathLike) else turns
    found = [turn_files(path) for path in given]
    files = [
        {"path": str(file), "given": k}
        for k, (paths, _) in enumerate(found)
        for file in paths
    ]
    listed = ray.data.from_items(files, override_num_blocks=max(len(files), 1))
    if len(files) > 1:
        _check_whole(listed)
    of_files = _OfFiles(step, tuple(amendments for _, amendments in found))
    return listed.map_batches(of_files, batch_size=1, batch_format="pyarrow")


def _check_whole(files: "Dataset") -> None:
    """Raise `InvalidTurnsError` if a session has turns in two files."""
    pairs = files.map_batches(_sessions_in, batch_size=1, batch_format="pyarrow")
    parts = pairs.iter_batches(batch_size=None, batch_format="pyarrow")
    table = pa.concat_tables([_SESSIONS_IN.empty_table(), *parts])
    counts = pc.value_counts(table.column("session_id"))
    twice = counts.filter(pc.greater(counts.field("counts"), 1))
    if len(twice):
        session = twice.field("values")[0]
        one = table.filter(pc.equal(table.column("session_id"), session))
        first, second, *_ = sorted(one.column("path").to_pylist())
        raise InvalidTurnsError(
            f"session {session.as_py()!r} has turns in {first} and in {second}: a task "
            "reads one file, which must hold whole sessions; `trajkit compact "
            f"{os.path.commonpath([first, second])} -o DIRECTORY/` writes such files"
        )


def _sessions_in(batch: pa.Table) -> pa.Table:
    """The sessions of each file that a batch names."""
    lines = [
        {"path": path, "session_id": name}
        for path in batch.column("path").to_pylist()
        for name in index_sessions([Path(path)], None).turns
        # what names no session is refused where the turns are read
        if name is not None
    ]
    return pa.Table.from_pylist(lines, _SESSIONS_IN)


@dataclass(frozen=True, slots=True)
class _OfFiles:
    """The rows of the files that a batch names.

    ``amendments`` has a place for each path that the caller gave.
    """

    step: LinearizeStep
    amendments: tuple[Amendments | None, ...]

    # Ray looks at the name of what it calls
    __name__ = "linearize"

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        for file in batch.to_pylist():
            turns = scan_turns(file["path"])
            amendments = self.amendments[file["given"]]
            if amendments is not None:
                turns = _amended(turns, amendments)
            for rows in self.step(turns):
                yield pa.Table.from_batches([rows])


def _amended(
    turns: Iterator[pa.RecordBatch], amendments: Amendments
) -> Iterator[pa.RecordBatch]:
    for batch in turns:
        table = pa.Table.from_batches([batch])
        yield from amendments.fold_into(table).to_batches()


@dataclass(frozen=True, slots=True)
class _OfSession:
    """The rows of one session, whose turns come in any order."""

    step: LinearizeStep
    __name__ = "linearize"

    def __call__(self, turns: pa.Table) -> pa.Table:
        order = pc.sort_indices(turns.column("turn_index"))
        batches = take_rows(turns, order).to_batches()
        return pa.Table.from_batches(self.step(iter(batches)), self.step.schema)
