"""Rows on a Ray cluster: files of turns, or a dataset, to a dataset of rows.

Ray cuts its blocks where it likes, so sessions are kept whole in one of two ways: a file
of whole sessions is read and made into rows within one task; or the turns of each session
are brought together by Ray's own shuffle. A task whose worker or machine dies is run
again by Ray, and gives the same rows.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from trajkit.errors import PolicyError
from trajkit.gather import stream_turns
from trajkit.io_formats import paths_in
from trajkit.steps import RowsStep

if TYPE_CHECKING:
    from ray.data import Dataset

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def linearize(
    turns: "Paths | Dataset",
    step: RowsStep | None = None,
    *,
    shuffles: int | None = None,
) -> "Dataset":
    """The training rows of turns, as a Ray dataset that is made when it is used.

    Parameters
    ----------
    turns : path, sequence of paths, or ray.data.Dataset
        Files or directories that every machine of the cluster sees, a task for each
        file; every file must hold whole sessions, which is checked for each by itself.
        Or a dataset with the columns of `trajkit.schema.TURNS` or ``TURNS_DELTA``, in
        any order: it is shuffled by session.
    step : RowsStep, optional
        Policy, rewards and layout; None: ``RowsStep()``.
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
        A directory without files of turns.

    Examples
    --------
    ``trajkit.ray.linearize("turns/", RowsStep(policy="slime")).write_parquet("rows")``
    """
    try:
        import ray.data
    except ModuleNotFoundError as error:
        raise PolicyError(
            "trajkit.ray needs Ray: pip install 'trajkit[ray]'"
        ) from error
    step = step or RowsStep()
    if isinstance(turns, ray.data.Dataset):
        groups = turns.groupby("session_id", num_partitions=shuffles)
        return groups.map_groups(_OfSession(step), batch_format="pyarrow")
    given = [turns] if isinstance(turns, str | os.PathLike) else turns
    files = [{"path": str(file)} for path in given for file in paths_in(Path(path))]
    listed = ray.data.from_items(files, override_num_blocks=max(len(files), 1))
    return listed.map_batches(_OfFiles(step), batch_size=1, batch_format="pyarrow")


@dataclass(frozen=True, slots=True)
class _OfFiles:
    """The rows of the files that a batch names."""

    step: RowsStep

    # Ray looks at the name of what it calls
    __name__ = "linearize"

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        for path in batch.column("path").to_pylist():
            turns = stream_turns(path)
            for rows in self.step(turns):
                yield pa.Table.from_batches([rows])


@dataclass(frozen=True, slots=True)
class _OfSession:
    """The rows of one session, whose turns come in any order."""

    step: RowsStep
    __name__ = "linearize"

    def __call__(self, turns: pa.Table) -> pa.Table:
        batches = turns.sort_by("turn_index").to_batches()
        return pa.Table.from_batches(self.step(iter(batches)), self.step.schema)
