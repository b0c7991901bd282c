"""`trajkit.linearize` inside other engines: as a step over batches, and on Ray.

Engines that distribute work (Spark, Ray Data) or answer queries (DuckDB, polars) take a
picklable function from an iterator of record batches to an iterator of record batches, and
a schema that is known in advance.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from trajkit.errors import ArgumentError, InvalidTurnsError
from trajkit.files.sources import Paths, paths_of
from trajkit.files.tables import gather, index_sessions, scan_turns, turn_files
from trajkit.policies import Policy
from trajkit.rows.linearize import linearize_batches
from trajkit.schema import ROWS
from trajkit.tables import limits
from trajkit.tables.columns import row_lengths
from trajkit.tables.ragged import runs_of
from trajkit.tables.stages import batches_in
from trajkit.turns.session_metadata import Reward

if TYPE_CHECKING:
    from ray.data import Dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearizeStep:
    """Turns to rows in types that every engine knows: no large lists, no dictionaries.

    It contains only its choices, so it can be pickled. It maps an iterator of batches
    of turns, with contiguous sessions, to an iterator of batches of rows, whose ``schema``
    is known in advance. `trajkit.read_rows` restores the types of rows written this way.

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
        return pa.schema([(field.name, _plain(field.type)) for field in ROWS])

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema = self.schema
        options: dict[str, Any] = {"reward": self.reward, "threads": self.threads}
        options["max_row_tokens"] = self.max_row_tokens
        for batch in linearize_batches(iter(batches), self.policy, **options):
            sizes = row_lengths(pa.Table.from_batches([batch]))
            # few enough tokens for offsets of 32 bits, but at least one row
            for lo, hi in runs_of(sizes, limits.PART_TOKENS):
                yield batch.slice(lo, hi - lo).cast(schema)


def _plain(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_large_list(type_):
        return pa.list_(_plain(type_.value_type))
    if pa.types.is_struct(type_):
        return pa.struct([(field.name, _plain(field.type)) for field in type_])
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

    Ray cuts blocks anywhere, so sessions are kept together: one task reads a file and
    makes its rows, or Ray shuffles a dataset by session. A task whose worker or machine
    dies runs again and gives the same rows.

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

        def of_session(turns: pa.Table) -> pa.Table:
            batches = gather(turns, "turn_index").to_batches()
            return pa.Table.from_batches(step(iter(batches)), step.schema)

        groups = turns.groupby("session_id", num_partitions=shuffles)
        return groups.map_groups(of_session, batch_format="pyarrow")
    if (paths := paths_of(turns)) is None:
        kind = type(turns).__name__
        raise ArgumentError(f"turns is of type {kind}: expected paths or a dataset")
    found = [turn_files(path) for path in paths]

    def of_files(batch: pa.Table) -> Iterator[pa.Table]:
        for file in batch.to_pylist():
            own = scan_turns(file["path"])
            if (amendments := found[file["given"]][1]) is not None:
                tables = (pa.Table.from_batches([one]) for one in own)
                own = batches_in(map(amendments.fold_into, tables))
            for rows in step(own):
                yield pa.Table.from_batches([rows])

    files = [(k, path) for k, (paths, _) in enumerate(found) for path in paths]
    _check_one_file_each([path for _, path in files])
    listed = [{"path": str(path), "given": k} for k, path in files]
    tasks = ray.data.from_items(listed, override_num_blocks=max(len(files), 1))
    return tasks.map_batches(of_files, batch_size=1, batch_format="pyarrow")


def _check_one_file_each(files: list[Path]) -> None:
    first: dict[str, Path] = {}
    for file in files if len(files) > 1 else []:
        for name in index_sessions([file], None).turns:
            if name is None:
                continue  # reading the turns reports it
            if name in first:
                raise InvalidTurnsError(
                    f"session {name!r} has turns in {first[name]} and in {file}: a task "
                    "reads one file, so a session must be in one file; `trajkit compact "
                    f"{os.path.commonpath([first[name], file])} -o DIRECTORY/` writes such "
                    "files"
                )
            first[name] = file
