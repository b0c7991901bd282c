"""Read files of foreign formats as a table of turns and a report."""

import os
import re
import reprlib
import shlex
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pyarrow as pa

from trajkit._arguments import check_choice, did_you_mean
from trajkit.errors import ArgumentError, FormatError, InvalidTurnsError
from trajkit.files.run import Watch, folder_of, run
from trajkit.files.sources import (
    Continuations,
    Naming,
    SessionPrefix,
    check_distinct,
    check_outputs,
    inputs_of,
    is_parts,
)
from trajkit.files.tables import TEMPORARY, gather, index_sessions, write_table
from trajkit.importers import containers as read
from trajkit.importers import formats
from trajkit.importers.containers import Finding, Head, Refused
from trajkit.importers.formats import FORMATS, Encoder, Format, Table
from trajkit.schema import IMPORT_REPORT, TURNS
from trajkit.tables import limits
from trajkit.tables.columns import with_column
from trajkit.tables.stages import batches_in, session_ends
from trajkit.turns.keys import BROKEN, has_items, is_array, object_of, word_of
from trajkit.turns.mapping import MapLike, hint_for, read_map, stem_of
from trajkit.turns.messages import message_key, tools_key
from trajkit.turns.records import Record, collected
from trajkit.turns.runs import Starts
from trajkit.turns.validation import Nonfinite

_Taken: TypeAlias = tuple[str, Finding, Record]
Sources: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""A path, or an iterable of paths."""

_TEXT, _TIME = pa.string(), pa.timestamp("us", tz="UTC")
EXTRAS = pa.schema(
    dict.fromkeys(("request_id", "model", "agent_id", "call_kind"), _TEXT)
    | dict.fromkeys(("started_at", "ended_at"), _TIME)
    | {"group_id": _TEXT, "reward": pa.float64(), "sampled": pa.bool_()}
    | dict.fromkeys(("parent_resolution", "parent_request", "tools_key"), _TEXT)
)
"""Extra columns of imported turns; null if unknown. docs/import.md explains them."""

TURNS_IMPORTED = pa.schema([*TURNS, *EXTRAS], metadata=TURNS.metadata)
"""The schema of imported turns."""

Contradicted: TypeAlias = Literal["untrain", "train"]

# calls of a file in which keys that may name runs are looked for
_MOST_COMPARED = 1000

# remarks by which a turn is context only, unless it is to train, and in any case
_CONTRADICTED = {"usage_contradicts", "aborted", "prompt_in_output", "repeated_call"}
UNTRAINED = {*_CONTRADICTED, "mask_unread"}
# ids of a prompt that no output repeats by chance
_REPEATED = 8

# decimals of rounded logprobs, the numbers beyond which they say nothing, and how many
# values show it
_ROUNDED = ((4, 100.0, 1), (5, 10.0, 3), (6, 1.0, 8))

# what runs are about, or where they are made: numbers of runs may start over in each
_ABOUT = re.compile(
    r"(uid|worker|actor|rank|task|group|problem|question|prompt|example|instance|sample)"
    r"(_(id|uid|key|name|index|idx|rank))?"
)
# names of one run, and not of what several may be about
_OF_A_RUN = re.compile(
    "(?i)(^|[._/-])(session|traj|rollout|run|episode|conv|thread|trace|trial|attempt|"
    "dialog|chat)"
)


def import_turns(
    source: Sources,
    format: str = "auto",
    *,
    map: MapLike | None = None,
    tokenizer: formats.ChatTokenizer | None = None,
    contradicted: Contradicted = "untrain",
    nonfinite_logprobs: Nonfinite = "raise",
    session_prefix: SessionPrefix | None = None,
) -> tuple[pa.Table, pa.Table]:
    """Turns from the records of another system, and a report of their problems.

    Nothing is guessed: a record without token ids is left out, and logprobs that do not
    belong to its output become null. The report lists each of them.

    Parameters
    ----------
    source : path, or iterable of paths
        Files, patterns (``runs/*.jsonl``), directories (their files with a known suffix),
        and addresses of fsspec (``s3://bucket/log.jsonl``).
    format : str
        One of `trajkit.importers.FORMATS`. "auto": by the beginning of each file; in a
        directory, unknown files are skipped if others are recognized.
    map : dict, str or path, optional
        Where the records have fields of `trajkit.importers.TARGETS`, if not where the
        format has them: ``"session_id=run.id,reward=score"``, a dict, or a TOML file.
    tokenizer : object, optional
        For records of text: with ``encode``, ``decode`` and ``apply_chat_template``.
    contradicted : {"untrain", "train"}
        Whether a turn trains that its record contradicts (docs/import.md, "Report").
    nonfinite_logprobs : {"raise", "null"}
        A record with a logprob that is NaN, infinite, or -9999 or less is left out
        ("invalid"), or these logprobs become null.
    session_prefix : {"file", "folder", "no"}, optional
        What to put before session ids, as for `trajkit.read_turns`. Without it, a session
        whose calls start over in another file is an error.

    Returns
    -------
    turns : Table
        `trajkit.schema.TURNS` with the columns of `EXTRAS`. Sessions in order of first
        appearance; ``turn_index`` counts a session's records, including those left out.
    report : Table
        `trajkit.schema.IMPORT_REPORT`, in the order of the records.

    Raises
    ------
    FormatError
        The format of a file is unknown, ambiguous or another than the given one.
    InvalidTurnsError
        Calls of a session start over in another file.
    ArgumentError
        An argument has the wrong type or value.
    """
    options = tokenizer, contradicted, nonfinite_logprobs, session_prefix
    found = _Import(format, map, *options)
    turns = gather(pa.concat_tables(found.tables(source)), "turn_index")
    return found.in_time(turns), found.report()


def import_file(
    source: Sources,
    output: str | os.PathLike[str],
    format: str = "auto",
    *,
    watch: Watch | None = None,
    **options: Any,
) -> tuple[dict[str, int], pa.Table]:
    """Write the turns of `trajkit.import_turns` to a file, in bounded memory.

    They are grouped by session from a temporary file next to ``output``, which is not
    written if there are no turns. ``watch`` has functions that report the progress of
    grouping; the other parameters and the errors are those of `import_turns`.

    Returns
    -------
    totals : dict of str to int
        ``sessions`` and ``turns``.
    report : Table
        As of `trajkit.import_turns`.
    """
    found = _Import(format, **options)
    if is_parts(output):
        raise FormatError(f"{output} is a directory: pass a file")
    sources = read.listed(source)
    tables = found.tables(sources)
    check_outputs(
        {"output": (output, "turns")}, inputs_of(sources, None, read.SUFFIXES)
    )
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=folder_of(output)) as root:
        path = Path(root, "turns.arrows")
        write_table(batches_in(tables), path)
        index = index_sessions([path], "arrows")
        if index.turns:
            run(path, found.in_time, output, watch=watch)
    return {"sessions": len(index.turns), "turns": index.n_turns}, found.report()


@dataclass
class _Import:
    """Which records become turns, and the report of the others."""

    format: str
    map: Any = None
    tokenizer: formats.ChatTokenizer | None = None
    contradicted: Contradicted = "untrain"
    nonfinite_logprobs: Nonfinite = "raise"
    session_prefix: SessionPrefix | None = None
    lines: list[dict[str, object]] = field(default_factory=list)
    # of each session: its next number, the files that it was in, and by field its first
    # reward and group
    numbers: Counter[str | None] = field(default_factory=Counter)
    files: Continuations = field(default_factory=Continuations)
    # sessions, and objects of a file that begin an earlier one's session again
    reused: set[tuple[str, str]] = field(default_factory=set)
    firsts: dict[tuple[str | None, str], object] = field(default_factory=dict)
    seen: set[Path] = field(default_factory=set)
    # places by session and a turn_index that the source gives
    indices: dict[tuple[str | None, str], str] = field(default_factory=dict)
    # which keys change where prompts of a session start over
    starts: Starts = field(default_factory=Starts)
    # places by digests of calls
    calls: dict[bytes, str] = field(default_factory=dict)
    # the error of the first empty file
    nothing: Exception | None = None
    # by file, the session that is named after it
    names: dict[str, str] = field(default_factory=dict)
    # of the mapping's fields, whether a record had it, or else what is wrong
    mapped: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.map = None if self.map is None else read_map(self.map, formats.TARGETS)
        if self.map is not None and self.map.format and self.format == "auto":
            self.format = self.map.format
        check_choice("format", self.format, ("auto", *FORMATS))
        check_choice("contradicted", self.contradicted, Contradicted)
        check_choice("nonfinite_logprobs", self.nonfinite_logprobs, get_args(Nonfinite))
        self.encoder = None if self.tokenizer is None else Encoder(self.tokenizer)

    def tables(self, source: Sources) -> Iterator[pa.Table]:
        """The turns, of which the first table has none; sessions are not grouped."""
        listed = read.listed(source)
        self.naming = Naming.of(list(map(read.path_of, listed)), self.session_prefix)
        yield TURNS_IMPORTED.empty_table()
        taken = (
            one
            for name, is_folder, own in read.files_of(listed)
            for head, format in self.recognised(name, is_folder, own)
            for one in self.of_file(head, format)
        )
        while batch := list(islice(taken, limits.IMPORTED_RECORDS)):
            yield self.table(batch)
        for error in filter(None, self.mapped.values()):
            raise FormatError(error)
        for key, session, (place, path), before, now in self.starts.changes():
            raise FormatError(
                f"{place}: session {session!r} starts over where {key} changes from "
                f"{before!r} to {now!r}: --map session_id={key}+{path} makes a session of "
                f"each, --map agent_id={key} one of several agents"
            )
        if self.nothing is not None and not self.numbers:
            raise self.nothing

    def report(self) -> pa.Table:
        # a record may have been left out after a line about what it lacks
        left = {(one["file"], one["place"]) for one in self.lines if not one["kept"]}
        lines = []
        for one in self.lines:
            lost = one["kept"] and (one["file"], one["place"]) in left
            if not lost or one["problem"] == "unread":
                lines.append({**one, "kept": one["kept"] and not lost})
        return pa.Table.from_pylist(lines, schema=IMPORT_REPORT)

    def note(
        self, file: str, found: Finding, problem: str = "", text: str = ""
    ) -> None:
        """Add a line about a record that is kept, or is left out for its problem."""
        facts = (problem, text) if problem else (found.problem, found.detail)
        values = [file, found.place, found.session, facts[0], problem != "", facts[1]]
        for k, one in enumerate(values):
            if isinstance(one, str):
                # lone surrogates are escaped
                values[k] = one.encode("utf-8", "backslashreplace").decode()
        self.lines.append(dict(zip(IMPORT_REPORT.names, values, strict=True)))

    def recognised(
        self, source: str, is_folder: bool, files: list[tuple[str, Path]]
    ) -> Iterator[tuple[Head, Format]]:
        """The files to read, each with its format."""
        named = [one for one in files if not is_folder or read.is_listed(one[0])]
        for name, _ in (one for one in files if one not in named):
            self.skip(name, "its name has none of the known ends: name it to read it")
        check_distinct([file for _, file in named], self.seen)
        heads = [read.head_of(file, name) for name, file in named]
        own = [self.fitting(head) for head in heads]
        if self.format != "auto" and not is_folder:
            own = [[FORMATS[self.format]]]
        pairs = zip(heads, own, strict=False)
        names = {one.name: head.name for head, fits in pairs for one in fits}
        if len(names) > 1:
            listed = ", ".join(f"{name} ({names[name]})" for name in sorted(names))
            text = f"fits several formats, {listed}: pass one of them as the format"
            raise FormatError(f"{source} {text} (--from)")
        if not names and is_folder:
            kind = self.format if self.format != "auto" else "known"
            begun = [head for head in heads if head.values]
            first = f": {formats.unknown(begun[0])}" if begun else ""
            raise FormatError(f"{source} contains no file of a {kind} format{first}")
        for head, fits in zip(heads, own, strict=True):
            is_empty = not head.file.stat().st_size
            if fits:
                yield head, fits[0]
                continue
            if not is_folder:
                self.nothing = self.nothing or formats.unknown(head)
                if not is_empty:
                    raise formats.unknown(head)
            self.skip(head.name, head.trouble or "it is empty" * is_empty)

    def skip(self, file: str, why: str) -> None:
        self.note(file, Finding("file", None, "other_file", why))

    def fitting(self, head: Head) -> list[Format]:
        own = formats.fitting(head)
        if self.format != "auto":
            named = FORMATS[self.format]
            # a mapping may name any keys
            return [named] if named in own or (named.generic and head.values) else []
        # the mapping says all
        mapped = len(own) != 1 and self.map is not None and head.values
        return [FORMATS["records"]] if mapped else own

    def of_file(self, head: Head, format: Format) -> Iterator[_Taken]:
        """The records that become turns, numbered, with the name of the file."""
        name, table = head.name, Table(format, self.map, self.encoder, head)
        if not table.has_ids and (self.encoder is None or format.talk is None):
            raise FormatError(f"{name}: {formats.text_only(format)}")
        unread: dict[str, tuple[Finding, int]] = {}
        paths: dict[Any, np.ndarray] = {}
        n_records, replies, silent = 0, dict[int, object](), set[str | None]()
        begins = (one for value in head.values for one in table.calls("", value))
        # a file without sessions is read for names of runs before it is imported
        named = _runs(chain(begins, _records(head, table)))
        way, followed = table.routes["session_id"].text, "session_id" in table.own
        if format is FORMATS["records"] and self.encoder is None:
            replies, silent = _find_replies(_records(head, table))
        each, prefix = table.map.each or "", self.naming.prefix(read.path_of(name))
        for n_records, found in enumerate(_records(head, table), 1):
            fields = found.fields
            if n_records in replies:
                fields["response_message"] = replies[n_records]
                found.remark("reply_of_a_request", "a later request repeats it")
            elif found.session in silent and fields.pop("prompt_messages", None):
                text = (
                    "its messages are left out: name the reply (--map "
                    "response_message=PATH; messages.-1 if they end with it)"
                )
                found.remark("no_reply", text)
            if (found.session is not None or found.run_keys) and name in self.names:
                raise FormatError(
                    f"{name}, {found.place} names its run, and no record before it does: "
                    "--map session_id=PATH names those of all (@file: one per file)"
                )
            if found.session is None and not found.problem:
                self.name(head, found, named)
            if found.session is not None:
                found.session = prefix + found.session
                if (followed or format.generic) and not found.problem:
                    place = f"{name}, {found.place}", way.split("|")[0]
                    prompt = _array(found, "prompt_ids").tobytes()
                    self.starts.add(found.session, prompt, found.names, place)
            for key in found.unread:
                first, count = unread.get(key, (found, 0))
                unread[key] = found if first.problem else first, count + 1
            _follow(found, paths, table)
            record = self.record(name, found, format)
            if record is None:
                self.note(name, found)
                continue
            for problem, detail in found.remarks:
                self.note(name, found, problem, detail)
            yield name, found, record
        for target, path in table.own.items():
            text = f"{name}: no record has {path.text} (map: {target}={path.text})"
            text += did_you_mean(path.text, chain(*map(object_of, head.values)))
            if n_records:
                had = target in table.found
                self.mapped[target] = "" if had else self.mapped.get(target, text)
            if target in table.lacked and target in EXTRAS.names:
                text = f"records without {path.text}: their {target} is null"
                self.note(name, Finding("file"), "map_missing", text)
        if not n_records:
            way = each.replace(".", ".*.")
            at = f" at each={each}, or is it each={way}?" if "." in way else ""
            self.note(name, Finding("file", None, "empty", f"it has no calls{at}"))
        for key, (found, count) in unread.items():
            text = f"{key} of {count} record{'s' * (count > 1)} was not read"
            if not found.problem:
                value = found.unread[key]
                text += f" (the first: {reprlib.repr(value)}){hint_for(key, value)}"
                if followed and isinstance(value, int):
                    text = text.replace("session_id=", f"session_id={way}+")
                self.note(name, found, "unread", text)

    def name(self, head: Head, found: Finding, named: set[str] | None) -> None:
        """Name a session after its file, unless one of the ``named`` keys may name it.

        None: other records of the file have a session, or a key that may name it.
        """
        own = found.names.items()
        found.run_keys |= {key: one for key, one in own if key in (named or ())}
        if keys := found.run_keys:
            listed = ", ".join(f"{key} ({one!r})" for key, one in keys.items())
            found.problem = "no_session_id"
            found.detail = (
                f"no session_id, but {listed}: say which names the agent run, as in "
                f"--map session_id={shlex.quote(_run_key(keys))} (a+b: both; @file: one "
                "per file; @name: one per record)"
            )
        elif named is None or named:
            found.problem = "no_session_id"
            found.detail = "no name of its run, which other records of the file have"
        elif head.name in self.names:
            found.session = self.names[head.name]
        else:
            stem = stem_of(head.file)
            is_taken = stem in self.names.values()
            self.names[head.name] = found.session = head.name if is_taken else stem
            text = "no key of the records names a run: its session has the file's name"
            self.note(head.name, found, "no_session_id", text)

    def record(self, file: str, found: Finding, format: Format) -> Record | None:
        """The record for `from_records`; None, with a problem set, if it is left out."""
        fields, session = found.fields, found.session
        number = self.numbers[session]
        # a record that is left out has a number, too, which leaves a gap
        self.numbers[session] += 1
        for target, is_there in (("prompt_ids", has_items), ("output_ids", is_array)):
            if not found.problem and not is_there(ids := fields.get(target)):
                found.problem = f"no_{target}"
                hint = f"--map {target}=PATH names them, if it has them"
                odd = f"{reprlib.repr(ids)}, not a list; {hint}"
                odd = f"its {target} are {'empty' if is_array(ids) else odd}"
                hint = hint if ids is None else odd
                found.detail = f"{hint}; {found.detail}".removesuffix("; ")
        if found.problem and (lost := fields.get("reward")) is not None:
            found.detail += f"; its reward {reprlib.repr(lost)} is not read"
        origin = str(Path(file).parent) if format.by_folder else file
        compared = session if self.session_prefix != "no" else None
        if compared is not None and not found.problem:
            own = (compared, f"{origin}{found.origin}")
            try:
                if own not in self.reused:
                    self.files.check(*own, fields)
            except InvalidTurnsError:
                self.reused.add(own)
                if not found.origin:
                    raise
            if own in self.reused:
                found.problem = "repeated_session"
                text = "an earlier one has its session, too: --map session_id="
                way = "@name" if fields.get("sampled") is False else "/@name"
                found.detail = f"{text}{way} makes a session of each"
        place = f"{file}, {found.place}"
        self.repeated(found, place)
        if found.problem:
            return None
        found.detail = ""
        _check_logprobs(found)
        if isinstance(found.tools, list):
            try:
                fields["tools_key"] = tools_key(found.tools)
            except (ArgumentError, InvalidTurnsError) as error:
                found.remark("unread", f"its tools: {str(error)[:200]}")
        # sources repeat their counts
        distinct = {(one[1], repr(one[2])): one for one in reversed(found.claims)}
        for name, target, stated in distinct.values():
            both = ("prompt_ids", "output_ids")
            n = sum(len(fields[one]) for one in both if target in (one, "ids"))
            if isinstance(stated, bool) or stated not in (None, n):
                text = f"{name} is {stated!r}, and the record has {n} {target}"
                found.remark("usage_contradicts", text)
        reason = fields.get("finish_reason")
        broken = reason != "abort" and BROKEN.match(reason or "")
        if broken and "aborted" not in dict(found.remarks):
            found.remark("aborted", f"finish_reason is {reason!r}")
        prompt, output = (_array(found, name) for name in ("prompt_ids", "output_ids"))
        if len(prompt) >= _REPEATED and np.array_equal(output[: len(prompt)], prompt):
            text = f"its output begins with its whole prompt of {len(prompt)} ids"
            found.remark("prompt_in_output", text)
        against = _CONTRADICTED & dict(found.remarks).keys()
        if against and self.contradicted == "untrain":
            fields["trainable"] = False
        for name in ("reward", "group_id"):
            if (value := fields.get(name)) is not None:
                first = self.firsts.setdefault((session, name), value)
                if first != value:
                    text = f"{value!r}, after {first!r} in the same session"
                    found.remark(f"{name.removesuffix('_id')}_varies", text)
        if (index := fields.get("turn_index")) is not None:
            first = self.indices.setdefault((session, repr(index)), place)
            if first != place:
                raise FormatError(
                    f"{place}: session {session!r} has turn_index {index!r} twice, "
                    f"first in {first}: if each agent counts its own steps, leave "
                    "turn_index out of the map: the order of the records counts"
                )
        record: dict[str, Any] = {"turn_index": number, "sampled": True}
        record |= {name: value for name, value in fields.items() if value is not None}
        if "response_message" not in record:
            record["use_tool"] = None
        return {**record, "session_id": session}

    def repeated(self, found: Finding, place: str) -> None:
        """Leave out a call that its session has had with the same id, ids and logprobs.

        Without a request_id it may have been sampled twice: it has a line.
        """
        own, output = found.fields.get("request_id"), _array(found, "output_ids")
        if found.problem or (own is None and not len(output)):
            return
        # choices of one response may have the same ids
        choice = found.place.partition("choice ")[2]
        logprobs = _array(found, "output_logprobs", np.float64)
        arrays = (_array(found, "prompt_ids"), output, logprobs)
        index = None if own else found.fields.get("turn_index")
        facts = repr((found.session, own, index, choice, *map(len, arrays))).encode()
        digest = blake2b(facts, digest_size=16)
        for one in arrays:
            digest.update(one.tobytes())
        first = self.calls.setdefault(digest.digest(), place)
        if first != place and own is not None:
            found.problem = "copied"
            found.detail = f"{first} has the same ids, logprobs and request_id {own!r}"
        elif first != place:
            text = f"{first} has the same ids and logprobs, and none has a request_id"
            found.remark("repeated_call", text)

    def in_time(self, turns: pa.Table) -> pa.Table:
        """Sessions by the start times of their calls, if all have one and no turn_index."""
        numbers = turns.column("turn_index").to_numpy().copy()
        times = turns.column("started_at").cast(pa.int64())
        given = {session for session, _ in self.indices}
        names, ends = turns.column("session_id"), session_ends(turns).tolist()
        for start, stop in zip([0, *ends], ends, strict=False):
            own = times.slice(start, stop - start)
            if own.null_count or names[start].as_py() in given:
                continue
            order = np.argsort(own.to_numpy(), kind="stable")
            numbers[start + order] = np.sort(numbers[start:stop])
        ordered = with_column(turns, "turn_index", pa.array(numbers, pa.int32()))
        return gather(ordered, "turn_index")

    def table(self, batch: list[_Taken]) -> pa.Table:
        """The turns of records; records that break a rule are noted instead."""
        records = (record for _, _, record in batch)
        try:
            table = collected(records, self.nonfinite_logprobs, checked=True)
        except InvalidTurnsError as error:
            if len(batch) == 1:
                ((file, found, _),) = batch
                found.problem, found.detail = "invalid", str(error)
                self.note(file, found)
                return TURNS_IMPORTED.empty_table()
            # one by one, each turn would have a copy of its messages
            good = [one for one in batch if len(self.table([one]))]
            if len(good) == len(batch):
                # they break a rule together
                raise
            return self.table(good)
        whole = pa.concat_tables(
            [TURNS_IMPORTED.empty_table(), table], promote_options="permissive"
        )
        return whole.select(TURNS_IMPORTED.names).cast(TURNS_IMPORTED)


def advised(path: str) -> str:
    """How to import a file of records; empty if it has turns, or nothing."""
    try:
        head = read.head_of(Path(path))
        fits = formats.fitting(head)
        keys = {*head.values[0]} if head.values else formats.TURN
        own = keys >= formats.TURN or {"suffix_ids", "input_ids"} & keys
        if own or (not fits and "session_id" in keys):
            return ""
        table = Table([*fits, FORMATS["records"]][0], None, None, head)
        calls = [one for value in head.values for one in table.calls("", value)]
    except (ArgumentError, FormatError, OSError):
        return ""
    named = {key: one for call in calls for key, one in call.run_keys.items()}
    option = "" if fits else " --map FIELD=PATH,..."
    option = f" --map session_id={shlex.quote(_run_key(named))}" if named else option
    return (
        "These are records of another system: trajkit import "
        f"{shlex.quote(path)}{option} -o log.parquet makes turns of them"
    )


def _run_key(keys: Mapping[str, object]) -> str:
    filled = [key for key, one in keys.items() if one not in (None, "")]
    own = next(filter(_OF_A_RUN.search, filled), "KEY")
    around = own.rpartition(".")[0]
    if _OF_A_RUN.search(around):
        # the parts of one name
        return "+".join(key for key in filled if key.startswith(f"{around}."))
    about = [key for key in filled if key != own and _ABOUT.fullmatch(word_of(key))]
    # a number may start over in each task
    is_number = str(keys.get(own)).isdecimal()
    return f"{about[0]}+{own}" if about and is_number else own


def _check_logprobs(found: Finding) -> None:
    """Remark what the logprobs of a call lack."""
    fields, logprobs = found.fields, found.fields.get("output_logprobs")
    n = len(fields["output_ids"])
    if not has_items(logprobs):
        fields["output_logprobs"] = None
        unaligned = "logprobs_unaligned" in dict(found.remarks)
        if n and not unaligned and fields.get("sampled") is not False:
            found.remark("no_logprobs")
    elif isinstance(logprobs, list) and (n_absent := logprobs.count(None)):
        found.remark("no_logprobs", f"for {n_absent} of {n} output ids")
    if decimals := rounded(_array(found, "output_logprobs", np.float64)):
        text = f"they have at most {decimals} decimals: ratios to them are inexact"
        found.remark("rounded_logprobs", text)


def rounded(values: np.ndarray) -> int:
    """The decimals to which logprobs were rounded; 0: they were not, as far as is known.

    Engines compute in float32: values with few decimals that are not numbers of float32
    were rounded afterwards.
    """
    values = values[np.isfinite(values) & (np.abs(values) < _ROUNDED[0][1])]
    exact = values.astype(np.float32) == values
    for decimals, below, least in _ROUNDED:
        if (np.rint(values * 10.0**decimals) / 10.0**decimals == values).all():
            return decimals if (~exact & (np.abs(values) < below)).sum() >= least else 0
    return 0


def _follow(found: Finding, paths: dict[Any, np.ndarray], table: Table) -> None:
    """Put together a prompt that continues an earlier path, and keep the path."""
    fields = found.fields
    delta, parent = fields.pop("delta_ids", None), fields.pop("parent", None)
    if "parent_resolution" in table.routes:
        fields["parent_request"] = parent
    if "delta_ids" not in table.routes:
        return
    if delta is not None and not found.problem:
        with found:
            before, kind = paths.get((found.session, str(parent))), type(delta).__name__
            whole = fields["prompt_ids"]
            if before is None:
                text = f"its prompt continues {parent!r}, which has no path"
                raise Refused(text, "no_parent")
            if not is_array(delta):
                text = f"what follows its parent is a {kind}, not a list"
                raise Refused(text)
            if isinstance(delta, list) and delta:
                # `from_records` reports the value that is not an id
                fields["prompt_ids"] = [*before.tolist(), *delta]
            else:
                fields["prompt_ids"] = np.append(before, delta).astype(np.int32)
            if has_items(whole) and not np.array_equal(whole, fields["prompt_ids"]):
                raise Refused("its prompt is another than its parent's path continues")
    path: list[Any] = [fields.get("prompt_ids"), fields.get("output_ids")]
    if all(isinstance(ids, np.ndarray) for ids in path):
        own = (found.session, str(fields.get("request_id")))
        paths[own] = np.concatenate(path)


def _records(head: Head, table: Table) -> Iterator[Finding]:
    for place, value in read.objects(head.file, head.container, table.shape()):
        if isinstance(value, Finding):
            yield value
        else:
            yield from table.calls(place, value)


def _runs(calls: Iterable[Finding]) -> set[str] | None:
    """Keys that may name the runs of calls; None if one has a session, or a name of it."""
    starts = Starts()
    for found in islice(calls, _MOST_COMPARED):
        if found.session is not None or found.run_keys:
            return None
        if not found.problem:
            starts.add(None, _array(found, "prompt_ids").tobytes(), found.names)
    return {change.key for change in starts.changes()}


def _find_replies(
    calls: Iterable[Finding],
) -> tuple[dict[int, object], set[str | None]]:
    """Replies by the number of the call, and the sessions of which none was found.

    A later request of the session repeats the messages of a call, and after them its
    reply. If several calls had the same messages, the tokens of the later prompt tell
    which of them it continues.
    """
    replies: dict[int, object] = {}
    # calls without a reply by session and digest of the messages: number, and the path as
    # a length and a hash
    waiting: dict[Any, list[tuple[int, int, int]]] = defaultdict(list)
    n_calls, answered = Counter[str | None](), set[str | None]()
    # sessions whose messages end with a reply
    ended = set[str | None]()
    for number, found in enumerate(calls, 1):
        messages = found.fields.get("prompt_messages")
        if found.problem or not isinstance(messages, list):
            continue
        try:
            keys = [*map(message_key, messages)]
        except (ArgumentError, InvalidTurnsError):
            continue  # reading the turns reports it
        session, prompt = found.session, _array(found, "prompt_ids")
        n_calls[session] += 1
        digest = blake2b()
        for message, key in zip(messages, keys, strict=True):
            if message.get("role") == "assistant":
                several = waiting[session, digest.digest()]
                fits = several
                if len(several) > 1:
                    fits = [
                        c for c in several if hash(prompt[: c[1]].tobytes()) == c[2]
                    ]
                if len(fits) == 1:
                    replies[fits[0][0]] = message
                    answered.add(session)
                    several.remove(fits[0])
            digest.update(key)
        own = found.fields.get("response_message") is not None
        if messages and messages[-1].get("role") == "assistant":
            ended.add(session)
        if own:
            answered.add(session)
        # a text lacks what a message may have besides
        if not own or "text_reply" in dict(found.remarks):
            path = np.append(prompt, _array(found, "output_ids"))
            call = number, len(path), hash(path.tobytes())
            waiting[session, digest.digest()].append(call)
    silent = {name for name, n in n_calls.items() if n > 1 or name in ended}
    return replies, silent - answered


def _array(found: Finding, name: str, type: type = np.int64) -> np.ndarray:
    """Numbers of a call; none if its values are something else."""
    try:
        return np.asarray(found.fields.get(name), type).reshape(-1)
    except (TypeError, ValueError, OverflowError):
        return np.empty(0, type)
