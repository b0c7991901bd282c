"""Read files of foreign formats as a table of turns and a report."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, TypeAlias, get_args

import numpy as np
import pyarrow as pa

from trajkit._arguments import check_choice
from trajkit.errors import ArgumentError, FormatError, InvalidTurnsError
from trajkit.files.tables import gather
from trajkit.importers.containers import Head, head_of, objects
from trajkit.importers.findings import Finding, Notes, has_items
from trajkit.importers.formats import FORMATS
from trajkit.importers.replies import Replies, find_replies
from trajkit.importers.sources import Folder, Local, Sources, files_of, stem_of
from trajkit.importers.tables import TARGETS, Format, Table, advice
from trajkit.importers.transcripts import ChatTokenizer, Encoder
from trajkit.schema import TURNS
from trajkit.tables import limits
from trajkit.turns.mapping import Map, MapLike, read_map, route
from trajkit.turns.messages import tools_key
from trajkit.turns.records import Record, from_records
from trajkit.turns.validation import Nonfinite

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

_Taken = tuple[str, Finding, Record]

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
        are read through fsspec. "-" is standard input.
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
    options = Options(format, map, tokenizer, contradicted, nonfinite_logprobs)
    pieces, notes = imported(source, options)
    turns = gather(pa.concat_tables(pieces), "turn_index")
    return turns, notes.table()


@dataclass(slots=True)
class Options:
    """The arguments of an import, checked."""

    format: str
    map: MapLike | None
    tokenizer: ChatTokenizer | None
    contradicted: Contradicted
    nonfinite: Nonfinite
    own: Map | None = field(init=False)
    encoder: Encoder | None = field(init=False)

    def __post_init__(self) -> None:
        self.own = None if self.map is None else read_map(self.map, TARGETS)
        named = self.own.format if self.own is not None else None
        if named is not None and self.format == "auto":
            self.format = named
        check_choice("format", self.format, ("auto", *FORMATS))
        check_choice("contradicted", self.contradicted, Contradicted)
        check_choice("nonfinite_logprobs", self.nonfinite, get_args(Nonfinite))
        self.encoder = None if self.tokenizer is None else Encoder(self.tokenizer)


def imported(source: Sources, options: Options) -> tuple[Iterator[pa.Table], Notes]:
    """`import_turns` as an iterator of tables, which fills the report while it is used.

    The first table has no rows. Sessions are not grouped.
    """
    notes = Notes()
    found = _Import(options, notes).taken(_files(files_of(source), options, notes))

    def pieces() -> Iterator[pa.Table]:
        yield TURNS_IMPORTED.empty_table()
        while batch := list(islice(found, limits.IMPORTED_RECORDS)):
            yield _table(batch, notes, options.nonfinite)

    return pieces(), notes


class _Import:
    """Which records become turns."""

    def __init__(self, options: Options, notes: Notes) -> None:
        self._options, self._notes = options, notes
        # the next number of each session, and the places that it was in
        self._numbers: dict[str, int] = {}
        self._origins: dict[str, set[str]] = {}
        self._rewards: dict[str, object] = {}
        # places by session and a turn_index that the source gives
        self._indices: dict[tuple[object, object], str] = {}
        # files by the session that is named after them
        self._stems: dict[str, str] = {}

    def taken(self, files: Iterable[tuple[Local, Head, Format]]) -> Iterator[_Taken]:
        """The records that become turns, numbered; problems are added to the notes."""
        for file, head, format in files:
            yield from self._of_file(file, head, format)

    def _of_file(self, file: Local, head: Head, format: Format) -> Iterator[_Taken]:
        options, notes, name = self._options, self._notes, file.name
        table = Table(format, options.own, options.encoder)
        if not table.has_ids and (options.encoder is None or format.talk is None):
            raise FormatError(f"{name}: {_text_only(format)}")
        unread: dict[str, tuple[Finding, int]] = {}
        seen: set[str] = set()
        session, n_records, named = None, 0, False
        paths: dict[str, np.ndarray] = {}
        replies = Replies()
        if format.needs_reply and options.encoder is None:
            replies = find_replies(_records(file, head, table))
        for found in _records(file, head, table):
            self._reply(found, replies, n_records)
            n_records += 1
            if found.session is None and not found.problem:
                named = self._name(file, found, noted=named)
            session = session or found.session
            call = found.fields.get("request_id")
            if isinstance(call, str):
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
                found.fields["parent_request"] = found.fields.get("parent")
            _follow(found, paths if "delta_ids" in table.routes else None)
            record = self._record(found, number)
            if record is None:
                notes.add(name, found, found.problem, found.detail, kept=False)
                continue
            for problem, detail in found.remarks:
                notes.add(name, found, problem, detail, kept=True)
            yield name, found, record
        if format.beside is not None:
            for found in format.beside(file.path, session, seen):
                n_records += 1
                notes.add(name, found, found.problem, found.detail, kept=False)
        self._end(file, table, n_records, unread)

    def _end(
        self,
        file: Local,
        table: Table,
        n_records: int,
        unread: dict[str, tuple[Finding, int]],
    ) -> None:
        """What is known of a file only at its end."""
        own = self._options.own
        if own is not None and n_records:
            for target in own.fields:
                if target not in table.found:
                    raise FormatError(
                        f"{file.name}: no record has {own.fields[target].text} (map: "
                        f"{target}={own.fields[target].text})"
                    )
        if not n_records:
            self._notes.add(
                file.name, Finding("file"), "empty", "it has no calls", kept=False
            )
        for key, (found, count) in unread.items():
            text = f"{key} of {count} records was not read{advice(key)}"
            self._notes.add(file.name, found, "unread", text, kept=True)

    def _reply(self, found: Finding, replies: Replies, number: int) -> None:
        """Add the reply that a later request repeats, or leave out useless messages."""
        fields = found.fields
        if number in replies.of_call:
            fields["response_message"] = replies.of_call[number]
            found.remarks.append(("reply_of_a_request", "a later request repeats it"))
        elif found.session in replies.without and fields.pop("prompt_messages", None):
            text = (
                "messages without replies, which no later request repeats, are left out, "
                "so that calls are matched by tokens: --map response_message=PATH names "
                "the reply"
            )
            found.remarks.append(("no_reply", text))

    def _name(self, file: Local, found: Finding, *, noted: bool) -> bool:
        """Name a session after its file, unless a key may name it.

        Returns whether the report has a line about it.
        """
        if found.run_keys:
            listed = ", ".join(
                f"{key} ({value!r})" for key, value in found.run_keys.items()
            )
            key = next(iter(found.run_keys))
            found.refuse(
                "no_session_id",
                f"no session_id, but {listed}: say which names the agent run, as in "
                f"--map session_id={key} (a+b: both), or --map session_id=@file for one "
                "run per file",
            )
            return noted
        stem = stem_of(file.path)
        if self._stems.setdefault(stem, file.name) != file.name:
            stem = file.name
        found.session = stem
        if not noted:
            self._notes.add(file.name, found, "no_session_id", "", kept=True)
        return True

    def _origin(self, name: str, found: Finding) -> None:
        """Note a session that continues in another file."""
        origin = f"{name}, {found.origin}" if found.origin else name
        known = self._origins.setdefault(str(found.session), {origin})
        if origin not in known:
            first = next(iter(known))
            known.add(origin)
            found.remarks.append(
                (
                    "session_in_two_files",
                    f"the session is in {first}, too: if these are two runs, "
                    "--map session_id=@file+session_id tells them apart",
                )
            )

    def _record(self, found: Finding, number: int) -> Record | None:
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
        found.detail = ""
        if not has_items(logprobs):
            fields["output_logprobs"] = None
            unaligned = "logprobs_unaligned" in dict(found.remarks)
            if len(output) and not unaligned and fields.get("sampled") is not False:
                found.remarks.append(("no_logprobs", ""))
        elif len(logprobs) != len(output):  # type: ignore[arg-type]
            fields["output_logprobs"] = None
            text = f"{len(logprobs)} logprobs for {len(output)} output ids"  # type: ignore[arg-type]
            found.remarks.append(("logprobs_unaligned", text))
        else:
            if isinstance(logprobs, list) and (n_absent := logprobs.count(None)):
                text = f"for {n_absent} of {len(output)} output ids"
                found.remarks.append(("no_logprobs", text))
            if decimals := rounded(logprobs):
                text = (
                    f"they have at most {decimals} decimals: ratios to them are inexact"
                )
                found.remarks.append(("rounded_logprobs", text))
        if isinstance(found.tools, list):
            try:
                fields["tools_key"] = tools_key(found.tools)
            except (ArgumentError, InvalidTurnsError) as error:
                found.remarks.append(("unread", f"its tools: {str(error)[:200]}"))
        self._check_claims(found)
        self._check_reward(found)
        known = {name: value for name, value in fields.items() if value is not None}
        if "response_message" not in known:
            known["use_tool"] = None
        known = {"turn_index": number, **known}
        self._check_index(found, known["turn_index"])
        return {"sampled": True, **known, "session_id": found.session}

    def _check_index(self, found: Finding, index: object) -> None:
        """Refuse turn numbers that a session has twice."""
        if "turn_index" in found.fields:
            key = found.session, index
            if key in self._indices:
                raise FormatError(
                    f"{found.place}: session {found.session!r} has turn_index {index!r} "
                    f"twice, first in {self._indices[key]}: if each agent counts its own "
                    "steps, leave turn_index out of the map: the order of the records "
                    "counts"
                )
            self._indices[key] = found.place

    def _check_claims(self, found: Finding) -> None:
        """Compare the numbers of tokens that the source states with its ids."""
        for name, target, stated in found.claims:
            n = len(found.fields[target])  # type: ignore[arg-type]
            if stated is not None and (isinstance(stated, bool) or stated != n):
                text = f"{name} is {stated!r}, and the record has {n} {target}"
                found.remarks.append(("usage_contradicts", text))
        contradicts = "usage_contradicts" in dict(found.remarks)
        if contradicts and self._options.contradicted == "untrain":
            found.fields["trainable"] = False

    def _check_reward(self, found: Finding) -> None:
        reward = found.fields.get("reward")
        if reward is not None:
            first = self._rewards.setdefault(str(found.session), reward)
            if first != reward:
                text = f"{reward}, after {first} in the same session"
                found.remarks.append(("reward_varies", text))


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


def _records(file: Local, head: Head, table: Table) -> Iterator[Finding]:
    """The records of a file, and its damaged ones."""
    for text in objects(file.path, head.container, table.shape()):
        if text.bad is not None:
            yield text.bad
        else:
            yield from table.calls(file.path, text.place, text.value)


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
    for one in EXTRAS:
        if one.name not in table.column_names:
            table = table.append_column(one, pa.nulls(len(table), one.type))
    return table.select(TURNS_IMPORTED.names).cast(TURNS_IMPORTED)


def _files(
    entries: Iterable[Local | Folder], options: Options, notes: Notes
) -> Iterator[tuple[Local, Head, Format]]:
    """The files to read, each with its format."""
    for entry in entries:
        if isinstance(entry, Local):
            head = head_of(entry.path)
            yield entry, head, _format_of(entry, head, options)
            continue
        heads = [(file, head_of(file.path)) for file in entry.files]
        fitting = [(file, head, _wanted(head, options)) for file, head in heads]
        names = sorted({one.name for _, _, own in fitting for one in own})
        if not names:
            known = f"the format {options.format}"
            if options.format == "auto":
                known = "a known format"
            raise FormatError(f"{entry.name} contains no file of {known}")
        if len(names) > 1:
            raise FormatError(
                f"{entry.name} contains files of several formats, {', '.join(names)}: "
                "pass one of them as the format"
            )
        for file, head, own in fitting:
            if own:
                yield file, head, own[0]
            else:
                other = Finding("file")
                notes.add(file.name, other, "other_file", head.trouble, kept=False)


def _wanted(head: Head, options: Options) -> list[Format]:
    """The formats of a file in a directory that may be read."""
    own = fitting(head)
    if options.format != "auto":
        named = FORMATS[options.format]
        # an empty capture is known by its name, and a mapping may name any keys
        return [named] if named in own or (named.generic and head.value) else []
    if not own and options.own is not None and head.value is not None:
        return [FORMATS["records"]]
    return own


def _format_of(file: Local, head: Head, options: Options) -> Format:
    """The only format that a file seems to have, or that the caller names."""
    if options.format != "auto":
        return FORMATS[options.format]
    own = fitting(head)
    if len(own) == 1:
        return own[0]
    if head.trouble:
        raise FormatError(head.trouble)
    if options.own is not None and head.value is not None:
        # the mapping says all
        return FORMATS["records"]
    if own:
        names = ", ".join(one.name for one in own)
        raise FormatError(
            f"{file.name} fits several formats, {names}: pass one of them as the format"
        )
    if head.value is None and head.container in ("json", "rows"):
        raise InvalidTurnsError(f"{file.name}: no calls, nothing to do")
    raise FormatError(f"{file.name} {_unknown(head)}")


def fitting(head: Head) -> list[Format]:
    """The formats that a file seems to have; a generic one only if no other fits."""
    values = head.values or (None,)
    for value in values:
        specific = [
            one
            for one in FORMATS.values()
            if not one.generic and _fits(one, head, value)
        ]
        if specific:
            return specific
    generic = (
        one
        for one in FORMATS.values()
        if one.generic and any(_fits(one, head, value) for value in values)
    )
    return [] if _is_turn(head.value) else [*islice(generic, 1)]


def _fits(format: Format, head: Head, value: dict[str, object] | None) -> bool:
    if head.container not in format.containers:
        return False
    if head.container not in ("json", "rows"):
        return True
    if value is None:
        # an empty capture of NeMo Gym
        suffix = format.file_suffix
        return bool(suffix) and not head.trouble and head.file.name.endswith(suffix)
    keys = [names for names in format.keys if value.keys() >= {*names}]
    return bool(keys or not format.keys) and format.test(value)


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
    value = head.value
    if _is_turn(value):
        return "contains turns of trajkit: use read_turns"
    if value is None:
        known = ", ".join(FORMATS)
        return f"has an unknown format, without a JSON object: expected {known}"
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
