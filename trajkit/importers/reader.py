"""Read files of foreign formats as a table of turns and a report."""

from collections.abc import Iterable, Iterator
from itertools import islice
from os import PathLike
from pathlib import Path

import numpy as np
import pyarrow as pa

from trajkit._streams import limits
from trajkit.errors import FormatError, InvalidTurnsError
from trajkit.importers import (
    nemo,
    openai_log,
    polar,
    rllm,
    slime,
    transcripts,
    verifiers,
)
from trajkit.importers.findings import (
    ChatTokenizer,
    Finding,
    Format,
    Head,
    Notes,
    Sources,
    has_items,
)
from trajkit.importers.json_files import first_object
from trajkit.io.tables import gather
from trajkit.schema import TURNS
from trajkit.turns.records import Record, from_records
from trajkit.turns.validation import Nonfinite

FORMATS: dict[str, Format] = {
    module.NAME: module
    for module in (openai_log, polar, nemo, rllm, verifiers, slime, transcripts)
}
"""The formats by name."""

EXTRAS = pa.schema(
    [
        # the source's name of the call
        ("request_id", pa.string()),
        ("model", pa.string()),
        ("agent_id", pa.string()),
        # "transcript": text that a tokenizer encoded. null: a call of an engine
        ("call_kind", pa.string()),
        ("started_at", pa.timestamp("us", tz="UTC")),
        ("ended_at", pa.timestamp("us", tz="UTC")),
        # of the rollout, as the source has it
        ("group_id", pa.string()),
        ("reward", pa.float64()),
        # false: no engine sampled the output
        ("sampled", pa.bool_()),
    ]
)
"""Extra columns of imported turns; null if unknown."""

TURNS_IMPORTED = pa.schema([*TURNS, *EXTRAS], metadata=TURNS.metadata)
"""The schema of imported turns."""

_Taken = tuple[Path, Finding, Record]

_JSON = (
    f".{kind}{end}"
    for kind in ("json", "jsonl", "ndjson")
    for end in ("", ".gz", ".zst")
)
SUFFIXES = (*_JSON, ".db", ".sqlite", ".sqlite3", ".pt", ".pkl")
"""Ends of the names of files in a directory that may contain records."""


def import_turns(
    source: Sources,
    format: str = "auto",
    *,
    tokenizer: ChatTokenizer | None = None,
    nonfinite_logprobs: Nonfinite = "raise",
) -> tuple[pa.Table, pa.Table]:
    """Turns from the records of another system, and a report of their problems.

    Nothing is guessed: a record without token ids is left out, and logprobs that do not
    belong to its output become null. The report lists each of them.

    Parameters
    ----------
    source : path, or iterable of paths
        Files, and directories, in which all files with a suffix of JSON or SQLite,
        ``.pt`` or ``.pkl`` are read, except hidden ones.
    format : str
        One of `trajkit.importers.FORMATS`: "openai", "polar", "nemo", "rllm", "verifiers",
        "slime" or "chat". "auto": recognized by the beginning of each file; in a
        directory, unknown files are skipped if others are recognized.
    tokenizer : object, optional
        For "chat": a tokenizer with ``encode`` and ``apply_chat_template``, as in
        transformers.
    nonfinite_logprobs : {"raise", "null"}
        A record with a logprob that is NaN, infinite, or -9999 or less is left out
        ("invalid"), or these logprobs become null.

    Returns
    -------
    turns : Table
        In the schema `trajkit.schema.TURNS` with the columns of `EXTRAS`. Sessions in
        order of first appearance; ``turn_index`` counts a session's records, including
        those left out.
    report : Table
        In the schema `trajkit.schema.IMPORT_REPORT`, in the order of the records.

    Raises
    ------
    FormatError
        The format of a file is unknown or ambiguous, or the file cannot be read as the
        given format.
    """
    pieces, notes = imported(source, format, tokenizer, nonfinite_logprobs)
    turns = gather(pa.concat_tables(pieces), "turn_index")
    return turns, notes.table()


def imported(
    source: Sources,
    format: str,
    tokenizer: ChatTokenizer | None,
    nonfinite_logprobs: Nonfinite,
) -> tuple[Iterator[pa.Table], Notes]:
    """`import_turns` as an iterator of tables, which fills the report while it is used.

    The first table has no rows. Sessions are not grouped.
    """
    if format != "auto" and format not in FORMATS:
        raise FormatError(
            f"format {format!r} is not known: expected auto, {', '.join(FORMATS)}"
        )
    notes = Notes()
    found = _settled(_files(source, format, notes), tokenizer, notes)

    def pieces() -> Iterator[pa.Table]:
        yield TURNS_IMPORTED.empty_table()
        while batch := list(islice(found, limits.IMPORTED_RECORDS)):
            yield _table(batch, notes, nonfinite_logprobs)

    return pieces(), notes


def _settled(
    files: Iterable[tuple[Path, Format]], tokenizer: ChatTokenizer | None, notes: Notes
) -> Iterator[_Taken]:
    """The records that become turns, numbered; problems are added to the notes."""
    numbers: dict[str, int] = {}
    for file, module in files:
        named = True
        for found in module.read(file, tokenizer):
            if found.session is None and not found.problem:
                found.session = file.stem
                if named:
                    notes.add(file, found, "no_session_id", "", kept=True)
                named = False
            # a record that is left out has a number, too, which leaves a gap
            number = 0
            if found.session is not None:
                number = numbers.get(found.session, 0)
                numbers[found.session] = number + 1
            record = _record(found, number)
            if record is None:
                notes.add(file, found, found.problem, found.detail, kept=False)
            else:
                for problem, detail in found.remarks:
                    notes.add(file, found, problem, detail, kept=True)
                yield file, found, record


def _record(found: Finding, number: int) -> Record | None:
    """The record for `from_records`; None, with a problem set, if it is left out."""
    fields = found.fields
    if found.problem:
        return None
    if not has_items(fields.get("prompt_ids")):
        found.problem = "no_prompt_ids"
        return None
    output, logprobs = fields.get("output_ids"), fields.get("output_logprobs")
    if not isinstance(output, list | np.ndarray):
        found.problem = "no_output_ids"
        return None
    if not has_items(logprobs):
        fields["output_logprobs"] = None
        unaligned = "logprobs_unaligned" in dict(found.remarks)
        if len(output) and not unaligned and fields.get("sampled") is not False:
            found.remarks.append(("no_logprobs", ""))
    elif len(logprobs) != len(output):  # type: ignore[arg-type]
        fields["output_logprobs"] = None
        text = f"{len(logprobs)} logprobs for {len(output)} output ids"  # type: ignore[arg-type]
        found.remarks.append(("logprobs_unaligned", text))
    elif isinstance(logprobs, list) and (n_absent := logprobs.count(None)):
        text = f"for {n_absent} of {len(output)} output ids"
        found.remarks.append(("no_logprobs", text))
    known = {name: value for name, value in fields.items() if value is not None}
    if "response_message" not in known:
        known["use_tool"] = None
    return {"sampled": True, **known, "session_id": found.session, "turn_index": number}


def _table(batch: list[_Taken], notes: Notes, nonfinite: Nonfinite) -> pa.Table:
    """The turns of records; records that break a rule are added to the notes instead."""
    try:
        table = from_records(
            (record for _, _, record in batch), nonfinite_logprobs=nonfinite
        )
    except InvalidTurnsError as error:
        if len(batch) == 1:
            ((file, found, _),) = batch
            notes.add(file, found, "invalid", str(error), kept=False)
            return TURNS_IMPORTED.empty_table()
        # one by one, each turn would have a copy of its messages
        good = [one for one in batch if len(_table([one], notes, nonfinite))]
        if len(good) == len(batch):
            # they break a rule together
            raise
        return _table(good, notes, nonfinite)
    for field in EXTRAS:
        if field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(len(table), field.type))
    return table.select(TURNS_IMPORTED.names).cast(TURNS_IMPORTED)


def _files(source: Sources, format: str, notes: Notes) -> Iterator[tuple[Path, Format]]:
    """The files to read, each with the module that reads it."""
    paths = [source] if isinstance(source, str | PathLike) else list(source)
    for path in map(Path, paths):
        if not path.is_dir():
            path.stat()  # the same error in every format if it is missing
            yield path, FORMATS.get(format) or _recognized(_head(path))
            continue
        fitting: dict[Head, list[Format]] = {
            head: [one for one in _fitting(head) if format in ("auto", one.NAME)]
            for head in map(_head, _in_directory(path))
        }
        names = sorted({one.NAME for own in fitting.values() for one in own})
        if not names:
            known = "a known format" if format == "auto" else f"the format {format}"
            raise FormatError(f"{path} contains no file of {known}")
        if len(names) > 1:
            raise FormatError(
                f"{path} contains files of several formats, {', '.join(names)}: pass one "
                "of them as the format"
            )
        for head, own in fitting.items():
            if own:
                yield head.file, own[0]
            else:
                other = Finding("file")
                notes.add(head.file, other, "other_file", head.trouble, kept=False)


def _recognized(head: Head) -> Format:
    """The only module whose format a file seems to have."""
    fitting = _fitting(head)
    if len(fitting) == 1:
        return fitting[0]
    if head.trouble:
        raise FormatError(head.trouble)
    if fitting:
        names = ", ".join(module.NAME for module in fitting)
        raise FormatError(
            f"{head.file} fits several formats, {names}: pass one of them as the format"
        )
    if head.has("session_id", "prompt_ids", "output_ids"):
        raise FormatError(f"{head.file} contains turns of trajkit: use read_turns")
    raise FormatError(
        f"{head.file} has an unknown format: expected {', '.join(FORMATS)}"
    )


def _fitting(head: Head) -> list[Format]:
    return [module for module in FORMATS.values() if module.detect(head)]


def _head(file: Path) -> Head:
    with file.open("rb") as opened:
        magic = opened.read(16)
    if magic.startswith((b"SQLite format 3\0", b"PK\3\4", b"\x80")):
        return Head(file, magic, None)
    try:
        return Head(file, magic, first_object(file))
    except FormatError as error:
        return Head(file, magic, None, str(error))


def _in_directory(path: Path) -> list[Path]:
    return sorted(
        file
        for file in path.rglob("*")
        if file.name.lower().endswith(SUFFIXES)
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
