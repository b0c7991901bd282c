"""`import_turns` from file to file, in bounded memory."""

import os
import tempfile
from pathlib import Path

import pyarrow as pa

from trajkit.errors import FormatError
from trajkit.files.group import TEMPORARY, index_sessions
from trajkit.files.guard import check_outputs, inputs_of, is_parts
from trajkit.files.run import Watch, folder_of, run
from trajkit.files.tables import write_tables
from trajkit.importers.reader import Contradicted, Options, imported
from trajkit.importers.sources import SUFFIXES, Sources, sources_of
from trajkit.importers.transcripts import ChatTokenizer
from trajkit.tables import lazy_compute as pc
from trajkit.tables.stages import batches_in
from trajkit.turns.mapping import MapLike
from trajkit.turns.validation import Nonfinite


def import_file(
    source: Sources,
    output: str | os.PathLike[str],
    format: str = "auto",
    *,
    map: MapLike | None = None,
    tokenizer: ChatTokenizer | None = None,
    contradicted: Contradicted = "untrain",
    nonfinite_logprobs: Nonfinite = "raise",
    watch: Watch | None = None,
) -> tuple[dict[str, int], pa.Table]:
    """Write the turns that another system recorded, in bounded memory.

    The turns are those of `trajkit.import_turns`. They are written as they are found to a
    temporary file next to ``output``, of about their size as Arrow, and grouped by
    session from there. In memory are some hundred records, the tables that
    `trajkit.run` has, and the report.

    Parameters
    ----------
    source, format, map, tokenizer, contradicted, nonfinite_logprobs
        As for `trajkit.import_turns`.
    output : path
        A file. It is not written if there are no turns.
    watch : Watch, optional
        Functions that report the progress of grouping.

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
    options = Options(format, map, tokenizer, contradicted, nonfinite_logprobs)
    if is_parts(output):
        raise FormatError(f"{output} is a directory: pass a file")
    sources = sources_of(source)
    outputs = {"output": (output, "turns")}
    check_outputs(outputs, inputs_of(sources, None, SUFFIXES))
    sessions = 0

    def stage(turns: pa.Table) -> pa.Table:
        nonlocal sessions
        sessions += pc.count_distinct(turns["session_id"]).as_py()
        return turns

    folder = folder_of(output)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=folder) as root:
        path = Path(root, "turns.arrows")
        tables, notes = imported(sources, options)
        write_tables(batches_in(tables), path)
        if not index_sessions([path], "arrows").turns:
            return {"sessions": 0, "turns": 0}, notes.table()
        totals = run(path, stage, output, watch=watch)
    return {"sessions": sessions, "turns": totals["turns"]}, notes.table()
