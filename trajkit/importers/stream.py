"""From files of a foreign format to a file of turns, in bounded memory."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from trajkit._arrow.take import empty_batch
from trajkit.errors import FormatError
from trajkit.importers.reader import ChatTokenizer, imported
from trajkit.io.arrow import file_rows
from trajkit.io.tables import write_tables, write_turns
from trajkit.jobs.group_sessions import GATHERS, Log
from trajkit.jobs.session_index import SessionIndex
from trajkit.jobs.stages import Made, Target, Watch, folder_of, is_parts, run
from trajkit.turns.validation import Nonfinite


def import_file(
    source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    format: str = "auto",
    *,
    tokenizer: ChatTokenizer | None = None,
    nonfinite_logprobs: Nonfinite = "raise",
    watch: Watch | None = None,
) -> tuple[dict[str, int], pa.Table]:
    """Write the turns of what another system recorded, in bounded memory.

    The turns are those of `trajkit.import_turns`. They are written as they are found,
    to a temporary file beside ``output`` that takes about what the turns take as Arrow,
    and gathered from there. Held are some hundred records, as `trajkit.jobs.linearize_file`
    holds turns, and the report.

    Parameters
    ----------
    source, format, tokenizer, nonfinite_logprobs
        As for `trajkit.import_turns`.
    output : path
        A file. It is not written if there are no turns.
    watch : Watch, optional
        What to tell while the turns are gathered.

    Returns
    -------
    totals : dict of str to int
        ``sessions`` and ``turns``.
    report : Table
        In the schema `trajkit.schema.IMPORT_REPORT`, in the order of the records.

    Raises
    ------
    FormatError
        As for `trajkit.import_turns`; ``output`` is a directory.
    """
    if is_parts(output):
        raise FormatError(f"{output} is a directory: turns are imported into one file")
    watch = watch or Watch()
    sessions = 0

    def begins(census: SessionIndex, done: int) -> None:
        nonlocal sessions
        sessions = len(census.turns)
        watch.begins(census, done)

    def stage(turns: pa.Table) -> Made:
        yield "turns", turns

    folder = folder_of(output)
    with tempfile.TemporaryDirectory(prefix=GATHERS, dir=folder) as root:
        found = Path(root, "turns.arrows")
        pieces, notes = imported(source, format, tokenizer, nonfinite_logprobs)
        write_tables(_batches(pieces), found)
        if not file_rows(found, "arrows"):
            return {"sessions": 0, "turns": 0}, notes.table()
        totals = run(
            Log(found, folder=folder),
            stage,
            {"turns": Target(Path(output), write_turns)},
            None,
            replace(watch, begins=begins),
        )
    return {"sessions": sessions, "turns": totals["turns"]}, notes.table()


def _batches(pieces: Iterator[pa.Table]) -> Iterator[pa.RecordBatch]:
    for piece in pieces:
        yield from piece.to_batches() or [empty_batch(piece.schema)]
