"""`trajkit.linearize` inside other engines: as a step over batches, and on Ray.

Engines that distribute work (Spark, Ray Data) or answer queries (DuckDB, polars) take a
picklable function from an iterator of record batches to an iterator of record batches, and
a schema that is known in advance.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from trajkit.errors import ArgumentError, InvalidTurnsError
from trajkit.files.group import index_sessions, scan_turns, turn_files
from trajkit.files.sources import Paths
from trajkit.files.tables import gather
from trajkit.policies import Policy
from trajkit.rows.linearize import linearize_batches
from trajkit.schema import ROWS
from trajkit.tables import lazy_compute as pc
from trajkit.tables import limits
from trajkit.tables.columns import row_lengths
from trajkit.tables.ragged import runs_of
from trajkit.tables.stages import batches_in
from trajkit.turns.amendments import Amendments
from trajkit.turns.session_metadata import Reward

if TYPE_CHECKING:
    from ray.data import Dataset

_SESSIONS_IN = pa.schema([("path", pa.string()), ("session_id", pa.string())])


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearizeStep:
    """Turns to rows in types that every engine knows: no large lists, no dictionaries.

    It contains only its choices, so it can be pickled. It maps an iterator of batches
    of turns, with contiguous sessions, to an iterator of batches of rows.
    `trajkit.read_rows` restores the types of rows written this way.

    Parameters
    ----------
    policy, reward, max_row_tokens
        As for `trajkit.linearize`.
    threads : int
        1 by default, because engines distribute the work themselves.
    """

    policy: str | Policy = "faithful"
    reward: Reward = None
    max_row_tokens: int | None = None
    threads: int = 1

    @property
    def schema(self) -> pa.Schema:
        """The schema of the batches of rows."""
        return pa.schema([_plain_field(field) for field in ROWS])

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows of the turns; raises as `trajkit.linearize_batches`."""
        schema = self.schema
        rows = linearize_batches(
            iter(batches),
            self.policy,
            reward=self.reward,
            max_row_tokens=self.max_row_tokens,
            threads=self.threads,
        )
        for batch in rows:
            sizes = row_lengths(pa.Table.from_batches([batch]))
            # few enough tokens for offsets of 32 bits, but at least one row
            for lo, hi in runs_of(sizes, limits.PART_TOKENS):
                yield batch.slice(lo, hi - lo).cast(schema)


def _plain_field(field: pa.Field) -> pa.Field:
    return pa.field(field.name, _plain(field.type))


def _plain(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_large_list(type_):
        return pa.list_(_plain(type_.value_type))
    if pa.types.is_struct(type_):
        return pa.struct([_plain_field(field) for field in type_])
    if pa.types.is_dictionary(type_):
        return type_.value_type
    return type_


def linearize_on_ray(
    turns: "Paths | Dataset",
    step: LinearizeStep | None = None,
    *,
    shuffles: int | None = None,
) -> "Dataset":
    """The training rows of turns, as a lazy Ray dataset.

    Ray cuts blocks anywhere, so sessions are kept together in one of two ways: one task
    reads a file and makes its rows, or Ray shuffles a dataset by session. A task whose
    worker or machine dies runs again and gives the same rows.

    Parameters
    ----------
    turns : path, sequence of paths, or ray.data.Dataset
        Files or directories that every machine of the cluster sees, as for
        `trajkit.read_turns`; each file is a task. Sessions may be scattered within a
        file, but each must be in one file, which is checked when this function is
        called; ``trajkit compact LOG -o DIRECTORY/`` makes such files of a gateway's
        rotated log. A dataset has the columns of `trajkit.schema.TURNS` or
        ``TURNS_DELTA``, in any order of rows.
    step : LinearizeStep, optional
        Policy and rewards. None: ``LinearizeStep()``.
    shuffles : int, optional
        The tasks of a dataset's shuffle. None: Ray's choice.

    Returns
    -------
    ray.data.Dataset
        With the columns of ``step.schema``. `trajkit.read_rows` reads what
        ``.write_parquet(path)`` writes; sessions are contiguous.

    Raises
    ------
    ArgumentError
        Ray is not installed.
    FormatError, InvalidTurnsError
        A directory has no files; a session has turns in two files.

    Examples
    --------
    ``linearize_on_ray("turns/", LinearizeStep(policy="slime")).write_parquet("rows")``
    """
    try:
        import ray.data
    except ModuleNotFoundError as error:
        raise ArgumentError(
            "linearize_on_ray needs Ray: pip install 'trajkit[ray]'"
        ) from error
    step = step or LinearizeStep()
    if isinstance(turns, ray.data.Dataset):
        groups = turns.groupby("session_id", num_partitions=shuffles)
        return groups.map_groups(
            _linearize_session, batch_format="pyarrow", fn_kwargs={"step": step}
        )
    given = [turns] if isinstance(turns, str | os.PathLike) else turns
    found = [turn_files(path) for path in given]
    files = [
        {"path": str(file), "given": k}
        for k, (paths, _) in enumerate(found)
        for file in paths
    ]
    listed = ray.data.from_items(files, override_num_blocks=max(len(files), 1))
    if len(files) > 1:
        _check_one_file_each(listed)
    amendments = [amendments for _, amendments in found]
    return listed.map_batches(
        _linearize_files,
        batch_size=1,
        batch_format="pyarrow",
        fn_kwargs={"step": step, "amendments": amendments},
    )


def _check_one_file_each(files: "Dataset") -> None:
    """Raise `InvalidTurnsError` if a session has turns in two files."""
    pairs = files.map_batches(_sessions_in, batch_size=1, batch_format="pyarrow")
    parts = pairs.iter_batches(batch_size=None, batch_format="pyarrow")
    table = pa.concat_tables([_SESSIONS_IN.empty_table(), *parts])
    counts = pc.value_counts(table.column("session_id"))
    twice = counts.filter(pc.greater(counts.field("counts"), 1))
    if len(twice):
        session = twice.field("values")[0]
        lines = table.filter(pc.equal(table.column("session_id"), session))
        first, second, *_ = sorted(lines.column("path").to_pylist())
        raise InvalidTurnsError(
            f"session {session.as_py()!r} has turns in {first} and in {second}: a task "
            "reads one file, so a session must be in one file; `trajkit compact "
            f"{os.path.commonpath([first, second])} -o DIRECTORY/` writes such files"
        )


def _sessions_in(batch: pa.Table) -> pa.Table:
    """The sessions of each file that a batch names."""
    lines = [
        {"path": path, "session_id": name}
        for path in batch.column("path").to_pylist()
        for name in index_sessions([Path(path)], None).turns
        if name is not None  # reading the turns reports a missing name
    ]
    return pa.Table.from_pylist(lines, _SESSIONS_IN)


def _linearize_files(
    batch: pa.Table, step: LinearizeStep, amendments: Sequence[Amendments | None]
) -> Iterator[pa.Table]:
    """The rows of the files that a batch names; each has the amendments of its path."""
    for file in batch.to_pylist():
        turns = scan_turns(file["path"])
        if (known := amendments[file["given"]]) is not None:
            tables = (pa.Table.from_batches([batch]) for batch in turns)
            turns = batches_in(map(known.fold_into, tables))
        for rows in step(turns):
            yield pa.Table.from_batches([rows])


def _linearize_session(turns: pa.Table, step: LinearizeStep) -> pa.Table:
    """The rows of one session, whose turns come in any order."""
    batches = gather(turns, "turn_index").to_batches()
    return pa.Table.from_batches(step(iter(batches)), step.schema)
