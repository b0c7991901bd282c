"""Read files of foreign formats as a table of turns and a report."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pyarrow as pa

from trajkit._arguments import check_choice
from trajkit.errors import ArgumentError, FormatError, InvalidTurnsError
from trajkit.files.group import TEMPORARY, index_sessions
from trajkit.files.guard import check_outputs, inputs_of, is_parts
from trajkit.files.run import Watch, folder_of, run
from trajkit.files.tables import gather, write_tables
from trajkit.importers.containers import (
    SUFFIXES,
    Head,
    files_of,
    head_of,
    objects,
    stem_of,
)
from trajkit.importers.findings import KEPT, LEFT_OUT, Finding, has_items, is_array
from trajkit.importers.formats import FORMATS
from trajkit.importers.replies import Replies, find_replies
from trajkit.importers.tables import TARGETS, Format, Table, advice
from trajkit.importers.transcripts import ChatTokenizer, Encoder
from trajkit.schema import IMPORT_REPORT, TURNS
from trajkit.tables import lazy_compute as pc
from trajkit.tables import limits
from trajkit.tables.stages import batches_in
from trajkit.turns.mapping import MapLike, read_map, route
from trajkit.turns.messages import tools_key
from trajkit.turns.records import Record, from_records
from trajkit.turns.validation import Nonfinite

Sources: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""A path, or an iterable of paths."""

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
        # which call continues which, as the source recorded it (schema.ROUTING)
        ("parent_resolution", pa.string()),
        ("parent_request", pa.string()),
        # of the tools that the request offers; of transcripts, those of the conversation
        ("tools_key", pa.string()),
    ]
)
"""Extra columns of imported turns; null if unknown."""

TURNS_IMPORTED = pa.schema([*TURNS, *EXTRAS], metadata=TURNS.metadata)
"""The schema of imported turns."""

Contradicted: TypeAlias = Literal["untrain", "train"]
"""What becomes of a turn whose usage contradicts its ids."""

# decimals of rounded logprobs, the numbers beyond which they say nothing, and how many
# values show it
_ROUNDED = ((4, 100.0, 1), (5, 10.0, 3), (6, 1.0, 8))


def import_turns(
    source: Sources,
    format: str = "auto",
    *,
    map: MapLike | None = None,
    tokenizer: ChatTokenizer | None = None,
    contradicted: Contradicted = "untrain",
    nonfinite_logprobs: Nonfinite = "raise",
) -> tuple[pa.Table, pa.Table]:
    """Turns from the records of another system, and a report of their problems.

    Nothing is guessed: a record without token ids is left out, and logprobs that do not
    belong to its output become null. The report lists each of them.

    Parameters
    ----------
    source : path, or iterable of paths
        Files, patterns such as ``runs/*.jsonl``, and directories, in which all files with
        a suffix of JSON, SQLite, Parquet or Arrow, ``.pt``, ``.pkl``, ``.eval`` or
        ``.traj`` are read, except hidden ones. Addresses such as ``s3://bucket/log.jsonl``
        are read through fsspec.
    format : str
        One of `trajkit.importers.FORMATS`. "auto": recognized by the beginning of each
        file; in a directory, unknown files are skipped if others are recognized.
    map : dict, str or path, optional
        Where the records have the fields of `trajkit.importers.TARGETS`:
        ``{"session_id": "run.id"}``, ``"session_id=run.id,reward=score"``, or a TOML
        file. Other fields are where the format has them.
    tokenizer : object, optional
        For records of text: a tokenizer with ``encode``, ``decode`` and
        ``apply_chat_template``, as in transformers.
    contradicted : {"untrain", "train"}
        A turn whose usage states other numbers of tokens than it has ids is context
        only, or trains.
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
        The format of a file is unknown or ambiguous, the file cannot be read as the
        given format, or it is not known which records belong to one session.
    ArgumentError
        An argument has the wrong type or value.
    """
    found = _Import(format, map, tokenizer, contradicted, nonfinite_logprobs)
    turns = gather(pa.concat_tables(found.tables(source)), "turn_index")
    return turns, found.report()


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
    found = _Import(format, map, tokenizer, contradicted, nonfinite_logprobs)
    if is_parts(output):
        raise FormatError(f"{output} is a directory: pass a file")
    tables = found.tables(source)
    sources = [source] if isinstance(source, str | os.PathLike) else source
    check_outputs({"output": (output, "turns")}, inputs_of(sources, None, SUFFIXES))
    sessions = 0

    def stage(turns: pa.Table) -> pa.Table:
        nonlocal sessions
        sessions += pc.count_distinct(turns["session_id"]).as_py()
        return turns

    folder = folder_of(output)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=folder) as root:
        path = Path(root, "turns.arrows")
        write_tables(batches_in(tables), path)
        totals = {"turns": 0}
        if index_sessions([path], "arrows").turns:
            totals = run(path, stage, output, watch=watch)
    return {"sessions": sessions, "turns": totals["turns"]}, found.report()


class _Import:
    """Which records become turns, and the report of the others."""

    def __init__(
        self,
        format: str,
        map: MapLike | None,
        tokenizer: ChatTokenizer | None,
        contradicted: Contradicted,
        nonfinite: Nonfinite,
    ) -> None:
        self._map = None if map is None else read_map(map, TARGETS)
        if self._map is not None and self._map.format and format == "auto":
            format = self._map.format
        check_choice("format", format, ("auto", *FORMATS))
        check_choice("contradicted", contradicted, Contradicted)
        check_choice("nonfinite_logprobs", nonfinite, get_args(Nonfinite))
        self._encoder = None if tokenizer is None else Encoder(tokenizer)
        self._format, self._contradicted, self._nonfinite = (
            format,
            contradicted,
            nonfinite,
        )
        self._report: list[dict[str, object]] = []
        # the next number of each session, and the places that it was in
        self._numbers: dict[str, int] = {}
        self._origins: dict[str, list[str]] = {}
        self._rewards: dict[str, object] = {}
        # places by session and a turn_index that the source gives
        self._indices: dict[tuple[object, object], str] = {}
        # files by the session that is named after them
        self._stems: dict[str, str] = {}

    def tables(self, source: Sources) -> Iterator[pa.Table]:
        """The turns, of which the first table has none; sessions are not grouped."""
        files = files_of(source)

        def pieces() -> Iterator[pa.Table]:
            yield TURNS_IMPORTED.empty_table()
            taken = (
                one
                for name, is_folder, listed in files
                for head, format in self._recognised(name, is_folder, listed)
                for one in self._of_file(head, format)
            )
            while batch := list(islice(taken, limits.IMPORTED_RECORDS)):
                yield self._table(batch)

        return pieces()

    def report(self) -> pa.Table:
        """The problems in the order of the records."""
        return pa.Table.from_pylist(self._report, schema=IMPORT_REPORT)

    def _note(
        self, file: str, found: Finding, problem: str, detail: str, *, kept: bool
    ) -> None:
        if problem not in (KEPT if kept else LEFT_OUT):
            raise ValueError(f"{problem!r} is not a known problem")
        texts = {
            "place": found.place,
            "session_id": found.session,
            "problem": problem,
            "detail": detail,
        }
        # lone surrogates are escaped
        escaped = {
            name: text and text.encode("utf-8", "backslashreplace").decode()
            for name, text in texts.items()
        }
        self._report.append({"file": file, **escaped, "kept": kept})

    def _of_file(
        self, head: Head, format: Format
    ) -> Iterator[tuple[str, Finding, Record]]:
        """The records that become turns, numbered, with the name of the file."""
        file, name = head.file, head.name
        table = Table(format, self._map, self._encoder)
        if not table.has_ids and (self._encoder is None or format.talk is None):
            raise FormatError(f"{name}: {_text_only(format)}")
        unread: dict[str, tuple[Finding, int]] = {}
        seen: set[str] = set()
        session, n_records, named = None, 0, False
        paths: dict[str, np.ndarray] = {}
        replies = Replies()
        if format.needs_reply and self._encoder is None:
            replies = find_replies(_records(head, table))
        for found in _records(head, table):
            fields = found.fields
            replies.add(found, n_records)
            n_records += 1
            if found.session is None and not found.problem:
                named = self._name(file, name, found, noted=named)
            session = session or found.session
            if isinstance(call := fields.get("request_id"), str):
                seen.add(call)
            for key in found.unread:
                first, count = unread.get(key, (found, 0))
                unread[key] = first, count + 1
            # a record that is left out has a number, too, which leaves a gap
            number = 0
            if found.session is not None:
                number = self._numbers.get(found.session, 0)
                self._numbers[found.session] = number + 1
                self._origin(name, found)
            if "parent_resolution" in table.routes:
                fields["parent_request"] = fields.get("parent")
            _follow(found, paths if "delta_ids" in table.routes else None)
            record = self._record(found, number)
            if record is None:
                self._note(name, found, found.problem, found.detail, kept=False)
                continue
            for problem, detail in found.remarks:
                self._note(name, found, problem, detail, kept=True)
            yield name, found, record
        if format.beside is not None:
            for found in format.beside(file, session, seen):
                n_records += 1
                self._note(name, found, found.problem, found.detail, kept=False)
        for target in table.own if n_records else ():
            if target not in table.found:
                text = table.own[target].text
                raise FormatError(
                    f"{name}: no record has {text} (map: {target}={text})"
                )
        if not n_records:
            self._note(name, Finding("file"), "empty", "it has no calls", kept=False)
        for key, (found, count) in unread.items():
            text = f"{key} of {count} records was not read{advice(key)}"
            self._note(name, found, "unread", text, kept=True)

    def _name(self, file: Path, name: str, found: Finding, *, noted: bool) -> bool:
        """Name a session after its file, unless a key may name it.

        Returns whether the report has a line about it.
        """
        if found.run_keys:
            listed = ", ".join(
                f"{key} ({one!r})" for key, one in found.run_keys.items()
            )
            found.refuse(
                "no_session_id",
                f"no session_id, but {listed}: say which names the agent run, as in --map "
                f"session_id={next(iter(found.run_keys))} (a+b: both), or --map "
                "session_id=@file for one run per file",
            )
            return noted
        stem = stem_of(file)
        found.session = stem if self._stems.setdefault(stem, name) == name else name
        if not noted:
            self._note(name, found, "no_session_id", "", kept=True)
        return True

    def _origin(self, name: str, found: Finding) -> None:
        """Note a session that continues in another file."""
        origin = f"{name}, {found.origin}" if found.origin else name
        known = self._origins.setdefault(str(found.session), [origin])
        if origin not in known:
            text = (
                f"the session is in {known[0]}, too: if these are two runs, "
                "--map session_id=@file+session_id tells them apart"
            )
            found.remarks.append(("session_in_two_files", text))
            known.append(origin)

    def _record(self, found: Finding, number: int) -> Record | None:
        """The record for `from_records`; None, with a problem set, if it is left out."""
        fields, remarks = found.fields, found.remarks
        output: Any = fields.get("output_ids")
        logprobs: Any = fields.get("output_logprobs")
        if not found.problem and not has_items(fields.get("prompt_ids")):
            found.problem = "no_prompt_ids"
        elif not found.problem and not is_array(output):
            found.problem = "no_output_ids"
        if found.problem:
            return None
        found.detail = ""
        if not has_items(logprobs):
            fields["output_logprobs"] = None
            unaligned = "logprobs_unaligned" in dict(remarks)
            if len(output) and not unaligned and fields.get("sampled") is not False:
                remarks.append(("no_logprobs", ""))
        else:
            if isinstance(logprobs, list) and (n_absent := logprobs.count(None)):
                text = f"for {n_absent} of {len(output)} output ids"
                remarks.append(("no_logprobs", text))
            if decimals := rounded(logprobs):
                text = (
                    f"they have at most {decimals} decimals: ratios to them are inexact"
                )
                remarks.append(("rounded_logprobs", text))
        if isinstance(found.tools, list):
            try:
                fields["tools_key"] = tools_key(found.tools)
            except (ArgumentError, InvalidTurnsError) as error:
                remarks.append(("unread", f"its tools: {str(error)[:200]}"))
        # what the source states about numbers of tokens
        for name, target, stated in found.claims:
            n = len(fields[target])  # type: ignore[arg-type]
            if isinstance(stated, bool) or stated not in (None, n):
                text = f"{name} is {stated!r}, and the record has {n} {target}"
                remarks.append(("usage_contradicts", text))
        if "usage_contradicts" in dict(remarks) and self._contradicted == "untrain":
            fields["trainable"] = False
        if (reward := fields.get("reward")) is not None:
            first = self._rewards.setdefault(str(found.session), reward)
            if first != reward:
                text = f"{reward}, after {first} in the same session"
                remarks.append(("reward_varies", text))
        known = {name: value for name, value in fields.items() if value is not None}
        if "response_message" not in known:
            known["use_tool"] = None
        if "turn_index" in known:
            self._check_index(found, known["turn_index"])
        return {
            "turn_index": number,
            "sampled": True,
            **known,
            "session_id": found.session,
        }

    def _check_index(self, found: Finding, index: object) -> None:
        """Refuse turn numbers that a session has twice."""
        key = found.session, index
        if key in self._indices:
            raise FormatError(
                f"{found.place}: session {found.session!r} has turn_index {index!r} "
                f"twice, first in {self._indices[key]}: if each agent counts its own "
                "steps, leave turn_index out of the map: the order of the records counts"
            )
        self._indices[key] = found.place

    def _table(self, batch: list[tuple[str, Finding, Record]]) -> pa.Table:
        """The turns of records; records that break a rule are noted instead."""
        try:
            table = from_records(
                (record for _, _, record in batch), nonfinite_logprobs=self._nonfinite
            )
        except InvalidTurnsError as error:
            if len(batch) == 1:
                ((file, found, _),) = batch
                self._note(file, found, "invalid", str(error), kept=False)
                return TURNS_IMPORTED.empty_table()
            # one by one, each turn would have a copy of its messages
            good = [one for one in batch if len(self._table([one]))]
            if len(good) == len(batch):
                # they break a rule together
                raise
            return self._table(good)
        for one in EXTRAS:
            if one.name not in table.column_names:
                table = table.append_column(one, pa.nulls(len(table), one.type))
        return table.select(TURNS_IMPORTED.names).cast(TURNS_IMPORTED)

    def _recognised(
        self, source: str, is_folder: bool, files: list[tuple[str, Path]]
    ) -> Iterator[tuple[Head, Format]]:
        """The files to read, each with its format."""
        heads = [head_of(file, name) for name, file in files]
        own = [self._fitting(head) for head in heads]
        if not is_folder:
            (head,), (formats,) = heads, own
            if self._format != "auto":
                formats = [FORMATS[self._format]]
            if not formats:
                has_some = bool(head.trouble) or any(head.values)
                if head.container in ("json", "rows") and not has_some:
                    raise InvalidTurnsError(f"{head.name}: no calls, nothing to do")
                raise FormatError(head.trouble or f"{head.name} {_unknown(head)}")
            if len(formats) > 1:
                listed = ", ".join(one.name for one in formats)
                raise FormatError(
                    f"{head.name} fits several formats, {listed}: pass one of them as the "
                    "format"
                )
            yield head, formats[0]
            return
        names = sorted({one.name for formats in own for one in formats})
        if not names:
            known = "a known format"
            if self._format != "auto":
                known = f"the format {self._format}"
            raise FormatError(f"{source} contains no file of {known}")
        if len(names) > 1:
            raise FormatError(
                f"{source} contains files of several formats, {', '.join(names)}: pass "
                "one of them as the format"
            )
        for head, formats in zip(heads, own, strict=True):
            if formats:
                yield head, formats[0]
            else:
                other = Finding("file")
                self._note(head.name, other, "other_file", head.trouble, kept=False)

    def _fitting(self, head: Head) -> list[Format]:
        """The formats by which a file may be read."""
        own = fitting(head)
        if self._format != "auto":
            named = FORMATS[self._format]
            # an empty capture is known by its name, and a mapping may name any keys
            return [named] if named in own or (named.generic and head.values) else []
        if len(own) != 1 and self._map is not None and head.values:
            # the mapping says all
            return [FORMATS["records"]]
        return own


def rounded(logprobs: object) -> int:
    """The decimals to which logprobs were rounded; 0: they were not, as far as is known.

    Engines compute in float32 or less. Values that have few decimals and are not numbers
    of float32 were rounded afterwards.
    """
    try:
        values = np.asarray(logprobs, np.float64)
    except (TypeError, ValueError, OverflowError):
        return 0
    if values.ndim != 1:
        return 0
    values = values[np.isfinite(values) & (np.abs(values) < _ROUNDED[0][1])]
    exact = values.astype(np.float32) == values
    for decimals, below, least in _ROUNDED:
        scale = 10.0**decimals
        if (np.rint(values * scale) / scale == values).all():
            return decimals if (~exact & (np.abs(values) < below)).sum() >= least else 0
    return 0


def _follow(found: Finding, paths: dict[str, np.ndarray] | None) -> None:
    """Put together a prompt that continues an earlier path, and keep the path."""
    fields = found.fields
    delta, parent = fields.pop("delta_ids", None), fields.pop("parent", None)
    if paths is None:
        return
    if delta is not None and not found.problem:
        before = paths.get(str(parent))
        if before is None:
            detail = f"its prompt continues {parent!r}, which has no path"
            found.refuse("no_parent", detail)
        elif isinstance(delta, np.ndarray):
            fields["prompt_ids"] = np.concatenate([before, delta])
        elif isinstance(delta, list):
            # `from_records` reports a value that is not an id
            fields["prompt_ids"] = [*before.tolist(), *delta] if delta else before
        else:
            detail = f"what follows its parent is a {type(delta).__name__}, not a list"
            found.refuse("unreadable", detail)
    name, prompt = fields.get("request_id"), fields.get("prompt_ids")
    output = fields.get("output_ids")
    if isinstance(prompt, np.ndarray) and isinstance(output, np.ndarray):
        paths[str(name)] = np.concatenate([prompt, output])


def _records(head: Head, table: Table) -> Iterator[Finding]:
    """The records of a file, and its damaged ones."""
    for place, value in objects(head.file, head.container, table.shape()):
        if isinstance(value, Finding):
            yield value
        else:
            yield from table.calls(head.file, place, value)


def fitting(head: Head) -> list[Format]:
    """The formats that a file seems to have; a generic one only if no other fits."""
    values = head.values or (None,)
    for value in values:
        if own := [
            one
            for one in FORMATS.values()
            if not one.generic and _fits(one, head, value)
        ]:
            return own
    generic = (
        one
        for one in FORMATS.values()
        if one.generic and any(_fits(one, head, value) for value in values)
    )
    return [] if _is_turn(values[0]) else [*islice(generic, 1)]


def _fits(format: Format, head: Head, value: dict[str, object] | None) -> bool:
    if head.container not in format.containers:
        return False
    if head.container not in ("json", "rows"):
        return True
    if value is None:
        # an empty capture of NeMo Gym
        suffix = format.file_suffix
        return bool(suffix) and not head.trouble and head.file.name.endswith(suffix)
    has_keys = any(value.keys() >= {*names} for names in format.keys or ((),))
    return has_keys and format.test(value)


def _is_turn(value: dict[str, object] | None) -> bool:
    if value is None or not {"session_id", "prompt_ids", "output_ids"} <= value.keys():
        return False
    try:
        from_records([value])
    except InvalidTurnsError:
        return False
    return True


def _unknown(head: Head) -> str:
    """What a file of no known format has, and what would be right."""
    value = head.values[0]
    if _is_turn(value):
        return "contains turns of trajkit: use read_turns"
    text = f"has an unknown format: its first record has the keys {', '.join(value)}"
    near = [
        (len(present), -len(names), one, names)
        for one in FORMATS.values()
        for names in one.keys
        if (present := [n for n in names if n in value and n != "session_id"])
    ]
    records = FORMATS["records"]
    absent = [
        f"{name} ({', '.join(records.fields[name].split('|')[:3])}, ...)"
        for name in ("prompt_ids", "output_ids")
        if route(records.fields[name]).find(value) is None
    ]
    like = records
    if near and len(absent) == 2:
        _, _, like, names = max(near, key=lambda each: each[:2])
        absent = [name for name in names if name not in value]
    lacks = (
        f"it lacks {', '.join(absent)}" if absent else "its values are of other kinds"
    )
    text += f". It is most like {like.name} ({like.title}), but {lacks}"
    return (
        f"{text}. Name its fields, as in --map session_id=PATH,prompt_ids=PATH,"
        "output_ids=PATH, or request=PATH,response=PATH for whole responses of an engine "
        "(and each=PATH if the records are in a list of each object). "
        "Records without token ids allow only the import of text (--from chat with "
        f"--tokenizer): {FORMATS['records'].ids}"
    )


def _text_only(format: Format) -> str:
    """Why a format gives no turns without a tokenizer."""
    text = f"it is {format.title}, without token ids: "
    if format.talk is None:
        return text + format.ids
    text += "pass a tokenizer with a chat template (--tokenizer) to import its text"
    return f"{text}; {format.ids}" if format.ids else text
