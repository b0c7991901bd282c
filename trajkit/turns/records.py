"""Recorded calls as Python dicts to a table of turns."""

import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit._arguments import check_choice, near_miss, whole_number
from trajkit.errors import ArgumentError, InvalidTurnsError
from trajkit.schema import MM_ITEM, TURNS, WEIGHT_VERSION
from trajkit.tables.canonical import TableLike, as_table
from trajkit.tables.ragged import Longs, offsets_of
from trajkit.turns.images import Ints, image_faults
from trajkit.turns.mapping import MapLike, read_map
from trajkit.turns.messages import (
    NO_IDS,
    Ids,
    MessageBook,
    check_text,
    comparable,
    encode,
    unequal_places,
)
from trajkit.turns.python_lists import ListBuilder, checked_ids, read_logprobs
from trajkit.turns.validation import Nonfinite, check_turns

Record: TypeAlias = Mapping[str, object]

METADATA = (
    *("finish_reason", "use_tool", "ill_formed", "trainable"),
    *("output_mask", "weight_versions", "mm_items"),
)
"""Columns of one value per call, in the order of `read_metadata`."""

FIELDS = (
    *("session_id", "turn_index", "prompt_ids", "output_ids", "output_logprobs"),
    *("prompt_messages", "response_message", *METADATA),
)
_SPELLED = {name.replace("_", ""): name for name in FIELDS}
# as an extra column it would silently leave the turns without logprobs
_SPELLED["logprobs"] = "output_logprobs"


def from_records(
    records: Iterable[Record],
    *,
    map: MapLike | None = None,
    nonfinite_logprobs: Nonfinite = "raise",
) -> pa.Table:
    """Make a table of turns from recorded calls, one dict per call.

    Sessions may interleave. In the result they are contiguous, in order of first
    appearance, with turns in order of turn_index.

    Parameters
    ----------
    records : iterable of dict
        The keys ``session_id``, ``prompt_ids`` and ``output_ids`` are required. Keys
        that are not listed become extra columns; an array of several dimensions becomes
        a nested list. Messages must not change while the records are read.

        ``session_id`` : str or int
            The agent run; an integer becomes its text.
        ``prompt_ids``, ``output_ids`` : ints in [0, 2**31)
            A list, tuple, range, or one-dimensional array or buffer of integers, not
            bools.
        ``output_logprobs`` : floats, one per output id
            Missing, None or empty: the engine gave none. An element None: none for that
            token. Values up to 1e-4 (rounding) are accepted and not clipped.
        ``finish_reason`` : str or None
            The engine's own word.
        ``ill_formed`` : bool or None
            Whether the reply has a tool call that could not be parsed.
        ``prompt_messages`` : list of dict
            The request's chat messages. Missing or None: the turn is routed by tokens.
        ``response_message`` : dict or None
            The reply as the next request is expected to contain it.
        ``turn_index`` : int
            Missing or None: one more than that of the session's previous call, from 0.
        ``use_tool`` : bool
            Missing: whether response_message has ``tool_calls``. None: unknown.
        ``trainable`` : bool
            False: the turn is context only.
        ``output_mask`` : bools (or 0 and 1), one per output id
            False: the token is context only. Missing or None: all may be trained.
        ``weight_versions`` : list of dict
            With ``version`` (str), ``start`` and ``stop``.
        ``mm_items`` : list of dict
            The images of the prompt, as `trajkit.schema.MM_ITEM` has them; their tokens
            in ``prompt_ids`` are `trajkit.turns.content_ids`.
    map : dict, str or path, optional
        Where the records have these keys, if not at their top under these names, as for
        `trajkit.import_turns`: ``{"session_id": "run.id"}``,
        ``"session_id=run.id,prompt_ids=prompt_token_ids"``, or a TOML file.
    nonfinite_logprobs : {"raise", "null"}
        How to treat NaN, the infinities, and values of -9999 and below, which engines
        write if they have no logprob.

    Returns
    -------
    Table
        In the schema `trajkit.schema.TURNS`.

    Raises
    ------
    InvalidTurnsError
        A value breaks a rule of the schema; the text names session, turn, field, value
        and rule.
    """
    check_choice("nonfinite_logprobs", nonfinite_logprobs, Nonfinite)
    if isinstance(records, str | bytes | Mapping) or not isinstance(records, Iterable):
        raise ArgumentError(
            f"records is of type {type(records).__name__}: expected an iterable of dicts, "
            "one per model call"
        )
    batch = _Batch()
    own = None if map is None else read_map(map)
    for number, record in enumerate(records):
        try:
            if own is not None and isinstance(record, Mapping):
                record = own.renamed(record)
            batch.add(record, number)
        except RecursionError:
            raise InvalidTurnsError(
                f"record {number}, session {reprlib.repr(record.get('session_id'))}: a "
                "value is nested too deep"
            ) from None
    return check_turns(batch.table(), nonfinite_logprobs)


def as_turns(turns: TableLike | list[Record], unread: Collection[str] = ()) -> pa.Table:
    """A table of turns; a list of records is converted by `from_records`.

    ``unread`` is as in `trajkit.tables.canonical.check_buffers`.
    """
    if isinstance(turns, list) and turns and isinstance(turns[0], Mapping):
        if not {"messages", "suffix_ids"} & {*turns[0]}:
            return from_records(turns)
    return as_table(turns, unread)


@dataclass(slots=True)
class _Session:
    number: int
    # of the previous call: its messages as `comparable`, and their ids
    turn_index: int = -1
    messages: list[object] = field(default_factory=list)
    message_ids: Ids = field(default_factory=lambda: NO_IDS)


_TOKENS = ("prompt_ids", "output_ids", "output_logprobs")


@dataclass(slots=True)
class _Batch:
    """The calls so far, by column, in order of arrival."""

    sessions: dict[str, _Session] = field(default_factory=dict)
    book: MessageBook = field(default_factory=MessageBook)
    session_numbers: list[int] = field(default_factory=list)
    turn_indices: list[int] = field(default_factory=list)
    tokens: dict[str, ListBuilder] = field(
        default_factory=lambda: {n: ListBuilder(TURNS.field(n).type) for n in _TOKENS}
    )
    messages: list[Ids | None] = field(default_factory=list)
    # -1: no response
    responses: list[int] = field(default_factory=list)
    metadata: list[tuple[object, ...]] = field(default_factory=list)
    extras: dict[str, list[object]] = field(default_factory=dict)

    def add(self, record: Record, number: int) -> None:
        if not isinstance(record, Mapping):
            raise InvalidTurnsError(
                f"record {number} is a {type(record).__name__}: expected a dict with the "
                "keys session_id, prompt_ids and output_ids, one dict per model call"
            )
        for name in record:
            if name not in FIELDS:
                check_extra(name, f"record {number} has the key", record)
        session_id = record.get("session_id")
        if isinstance(session_id, int | np.integer) and not isinstance(
            session_id, bool
        ):
            session_id = str(session_id)
        if not isinstance(session_id, str):
            found = f"session_id is {session_id!r}"
            if "session_id" not in record:
                found = f"no session_id, only {', '.join(map(str, record))}"
            raise InvalidTurnsError(
                f"record {number}: {found}: expected a string or an integer"
            )
        session = self.sessions.get(session_id)
        if session is None:
            check_text(session_id, f"record {number}: session_id")
            session = self.sessions[session_id] = _Session(len(self.sessions))
        turn_index = _turn_index(record, session, f"session {session_id!r}")
        where = f"session {session_id!r}, turn {turn_index}: "

        prompt, output = (_required_ids(record, name, where) for name in _TOKENS[:2])
        self.tokens["prompt_ids"].append(prompt)
        self.tokens["output_ids"].append(output)
        self.tokens["output_logprobs"].append(
            *read_logprobs(record.get("output_logprobs"), len(output), where)
        )
        self._add_messages(record, session, where)
        self.metadata.append(read_metadata(record, prompt, len(output), where))
        for name, value in record.items():
            if name not in FIELDS:
                check_depth(name, value, where)
                column = self.extras.setdefault(name, [])
                column.extend([None] * (len(self.turn_indices) - len(column)))
                column.append(value)
        self.session_numbers.append(session.number)
        self.turn_indices.append(turn_index)
        session.turn_index = turn_index

    def _add_messages(self, record: Record, session: _Session, where: str) -> None:
        messages, ids = record.get("prompt_messages"), None
        if messages is not None:
            if not isinstance(messages, (list, tuple)):
                raise InvalidTurnsError(
                    f"{where}prompt_messages is of type {type(messages).__name__}: "
                    "expected a list of dicts"
                )
            # most messages are those of the session's previous call
            n, compared = len(messages), session.messages
            ids = np.full(n, -1, np.int32)
            ids[: len(compared)] = session.message_ids[:n]
            others = unequal_places(messages, compared)
            compared = [*compared[:n], *[None] * (n - len(compared))]
            for i in others:
                message = encode(messages[i], f"{where}prompt_messages[{i}]")
                ids[i] = self.book.add(message)
                compared[i] = comparable(messages[i], message.is_plain)
            session.messages, session.message_ids = compared, ids
        self.messages.append(ids)
        response, reply = record.get("response_message"), -1
        if response is not None:
            reply = self.book.add(encode(response, f"{where}response_message"))
        self.responses.append(reply)

    def table(self) -> pa.Table:
        numbers = np.array(self.session_numbers, np.int32)
        names = pa.array(list(self.sessions), pa.string())
        columns = {
            "session_id": names.take(pa.array(numbers)),
            "turn_index": pa.array(self.turn_indices, pa.int32()),
            **{name: lists.lists() for name, lists in self.tokens.items()},
            **metadata_columns(self.metadata),
            **{name: self._extra(name) for name in self.extras},
        }
        order = np.lexsort((np.array(self.turn_indices, np.int64), numbers))
        table = pa.table(columns)
        messages, responses = self.messages, np.array(self.responses, np.int32)
        if (np.diff(order) < 0).any():
            table = table.take(pa.array(order))
            messages = [messages[k] for k in order]
            responses = responses[order]
            numbers = numbers[order]
        columns = dict(zip(table.column_names, table.columns, strict=True))
        columns["messages"], columns["response"] = message_columns(
            self.book,
            np.concatenate([NO_IDS, *(ids for ids in messages if ids is not None)]),
            np.array([-1 if ids is None else len(ids) for ids in messages], np.int64),
            responses,
            numbers,
        )
        fields = [*TURNS, *(table.schema.field(name) for name in self.extras)]
        return pa.Table.from_arrays(
            [columns[field.name] for field in fields],
            schema=pa.schema(fields, metadata=TURNS.metadata),
        )

    def _extra(self, name: str) -> pa.Array:
        values = self.extras[name]
        values.extend([None] * (len(self.turn_indices) - len(values)))
        try:
            if not any(map(_is_nested, values)):
                return pa.array(values)
            arrays = [one_value(value) for value in values]
            type_ = common_type(array.type for array in arrays)
            return pa.concat_arrays([cast_values(array, type_) for array in arrays])
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise InvalidTurnsError(
                f"Arrow cannot store the values of {name!r} in one column: {error}"
            ) from None


def message_columns(
    book: MessageBook, ids: Ids, lengths: Longs | Ids, responses: Ids, sessions: Ids
) -> tuple[pa.Array, pa.Array]:
    """The columns messages and response of turns that are sorted by session.

    ``ids`` are the messages of all turns, end to end, and ``lengths`` their number in each
    turn (-1: no list); ``responses`` are messages (-1: none), ``sessions`` numbers.
    """
    null = lengths < 0
    offsets = offsets_of(np.where(null, 0, lengths))
    n_turns, n = len(lengths), len(ids)
    # in order of time: the messages of a turn, then its response
    stops = offsets[1:] + np.arange(n_turns)
    at = np.ones(n + n_turns, np.bool_)
    at[stops] = False
    in_time = np.empty(n + n_turns, np.int32)
    in_time[at], in_time[stops] = ids, responses
    owners = np.repeat(sessions, np.diff(stops, prepend=-1))
    known = in_time >= 0
    first = np.zeros(n + n_turns, np.bool_)
    first[known] = book.shown(in_time[known], owners[known])
    structs = book.array(
        np.concatenate([ids, responses]), np.concatenate([first[at], first[stops]])
    )
    prompt = pa.LargeListArray.from_arrays(
        pa.array(offsets),
        structs[:n],
        type=TURNS.field("messages").type,
        mask=pa.array(null) if null.any() else None,
    )
    return prompt, structs[n:]


def _is_nested(value: object) -> bool:
    """Whether a value is an array or tensor of two or more dimensions."""
    ndim = getattr(value, "ndim", 0)
    return isinstance(ndim, int) and ndim > 1


def one_value(value: object) -> pa.Array:
    """An Arrow array of one value; an array of several dimensions is a nested list."""
    if not _is_nested(value):
        return pa.array([value])
    numbers = np.asarray(value)
    nested = pa.array(numbers.reshape(-1))
    for axis in range(numbers.ndim - 1, -1, -1):
        n = int(np.prod(numbers.shape[:axis]))
        ends = np.arange(n + 1) * numbers.shape[axis]
        nested = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), nested)
    return nested


def common_type(types: Iterable[pa.DataType]) -> pa.DataType:
    """A type that can store the values of all types."""
    schemas = [pa.schema([pa.field("value", one)]) for one in types]
    return pa.unify_schemas(schemas, promote_options="permissive").field(0).type


def cast_values(array: pa.Array, type_: pa.DataType) -> pa.Array:
    """The values in another type."""
    # Arrow's cast of a list of nulls to its own type gives an invalid array
    return array if array.type == type_ else array.cast(type_)


def check_extra(name: object, what: str, record: Record | None = None) -> None:
    """Raise unless an extra column of turns may have this name.

    ``what`` begins the error text: ``record 3 has the key``. In a ``record``, a name
    that is similar to a missing field is an error.
    """
    if not isinstance(name, str):
        raise InvalidTurnsError(f"{what} {name!r}: expected a name")
    if name in TURNS.names:
        made = name in ("messages", "response")
        raise InvalidTurnsError(
            f"{what} {name!r}, which is a column"
            f"{' made from prompt_messages and response_message' if made else ' of turns'}"
        )
    meant = _SPELLED.get(name.replace("_", "").lower())
    if meant is not None:
        raise InvalidTurnsError(f"{what} {name!r}: spell it {meant!r}")
    near = None if record is None else near_miss(name, FIELDS)
    if near is not None and near not in (record or ()):
        raise InvalidTurnsError(
            f"{what} {name!r} and no {near!r}: did you mean {near!r}? An extra column "
            "needs another name"
        )


MAX_DEPTH = 32
"""Maximum nesting depth of a value in an extra column."""


def is_too_deep(value: object) -> bool:
    """Whether lists and dicts are nested deeper than `MAX_DEPTH` levels.

    Arrow infers types by recursion without a limit, which overflows the stack. It writes
    at most 63 levels to files, and reads fewer from Parquet.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for one in level for child in _children(one)]
    return bool(level)


def _children(value: object) -> Iterable[object]:
    """The values of a list or dict that contains lists or dicts."""
    values: Iterable[object] = ()
    if isinstance(value, Mapping):
        values = value.values()
    elif isinstance(value, (list, tuple)):
        values = value
    # most lists contain only numbers, which the set of types shows quickly
    nested = any(issubclass(t, (list, tuple, Mapping)) for t in set(map(type, values)))
    return values if nested else ()


def check_depth(name: str, value: object, where: str) -> None:
    """Raise InvalidTurnsError if the value of an extra column is nested too deep."""
    if is_too_deep(value):
        raise InvalidTurnsError(
            f"{where}the value of {name!r} is nested deeper than {MAX_DEPTH} levels: "
            "leave it out, or store it as text"
        )


def _turn_index(record: Record, session: _Session, where: str) -> int:
    given = whole_number(record.get("turn_index"))
    if given is None:
        return session.turn_index + 1
    try:
        turn_index = -1 if isinstance(given, (bool, np.bool_)) else index(given)  # type: ignore[arg-type]
    except TypeError:
        turn_index = -1
    if not 0 <= turn_index < 2**31:
        raise InvalidTurnsError(
            f"{where}: turn_index is {given!r}: expected an integer in [0, 2**31)"
        )
    return turn_index


def _required_ids(record: Record, name: str, where: str) -> Ints:
    value = record.get(name)
    if value is not None:
        return checked_ids(value, f"{where}{name}")
    found = f"the record has the keys {', '.join(map(str, record))}"
    if name in record:
        found = f"{name} is None"
    raise InvalidTurnsError(f"{where}{found}: expected {name}, a list of token ids")


def read_metadata(
    record: Record, prompt: Ints, n_outputs: int, where: str
) -> tuple[object, ...]:
    """The values of `METADATA` of a call; raises `InvalidTurnsError`."""
    values: list[object] = []
    for name, read in _READERS.items():
        value = record.get(name)
        if value is not None:
            value = read(value, f"{where}{name}", prompt, n_outputs)
        elif name == "use_tool" and name not in record:
            response = record.get("response_message")
            value = isinstance(response, dict) and bool(response.get("tool_calls"))
        values.append(value)
    return tuple(values)


def metadata_columns(metadata: list[tuple[object, ...]]) -> dict[str, pa.Array]:
    """The columns `METADATA` of calls."""
    columns = zip(*metadata, strict=True) if metadata else [()] * len(METADATA)
    return {
        name: value_column(values, TURNS.field(name))
        for name, values in zip(METADATA, columns, strict=True)
    }


def value_column(values: Sequence[object], field: pa.Field) -> pa.Array:
    """A column of these values."""
    if {*map(type, values)} <= {type(None)}:  # much faster for lists of structs
        return pa.nulls(len(values), field.type)
    return pa.array(values, field.type)


def _string(value: object, what: str, *_: object) -> str:
    if not isinstance(value, str):
        raise InvalidTurnsError(f"{what} is {value!r}: expected a string")
    check_text(value, what)
    return value


def _flag(value: object, what: str, *_: object) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidTurnsError(f"{what} is {value!r}: expected a bool")
    return bool(value)


def _output_mask(
    value: object, what: str, prompt: Ints, n_outputs: int
) -> npt.NDArray[np.bool_]:
    """Whether each output token of a call may be trained."""
    mask = np.asarray(value)
    if mask.ndim != 1 or (mask.dtype.kind not in "biu" and len(mask)):
        raise InvalidTurnsError(f"{what} is {value!r}: expected a list of bools")
    odd = np.flatnonzero((mask != 0) & (mask != 1))
    if len(odd):
        at = int(odd[0])
        raise InvalidTurnsError(
            f"{what}[{at}] is {mask[at]}: expected a bool, or 0 or 1"
        )
    if len(mask) != n_outputs:
        where = what.removesuffix("output_mask")
        raise InvalidTurnsError(
            f"{where}{len(mask)} elements of output_mask for {n_outputs} output_ids"
        )
    return mask.astype(np.bool_)


def _dicts(value: object, what: str, type_: pa.StructType) -> list[dict[str, Any]]:
    """Copies of dicts that have exactly the fields of a struct."""
    if not isinstance(value, (list, tuple)):
        raise InvalidTurnsError(f"{what} is {value!r}: expected a list of dicts")
    for i, one in enumerate(value):
        if not isinstance(one, Mapping) or set(one) != set(type_.names):
            raise InvalidTurnsError(
                f"{what}[{i}] is {one!r}: expected a dict of {', '.join(type_.names)}"
            )
    return [dict(one) for one in value]


def _weight_versions(
    value: object, what: str, prompt: Ints, n_outputs: int
) -> list[dict[str, Any]]:
    """Spans that tile the output, in order."""
    spans, due = _dicts(value, what, WEIGHT_VERSION), 0
    for i, span in enumerate(spans):
        if span["version"] is None:
            raise InvalidTurnsError(
                f"{what}[{i}] has a null: version, start and stop are needed"
            )
        _string(span["version"], f"{what}[{i}].version")
        for name in ("start", "stop"):
            if type(span[name]) is not int or not 0 <= span[name] < 2**31:
                raise InvalidTurnsError(
                    f"{what}[{i}].{name} is {span[name]!r}: expected an integer in "
                    "[0, 2**31)"
                )
        if span["start"] != due or span["stop"] < due:
            raise InvalidTurnsError(
                f"{what}[{i}] is {span['start']}:{span['stop']}, expected a start of "
                f"{due}: the spans tile the output"
            )
        due = span["stop"]
    if due != n_outputs:
        raise InvalidTurnsError(
            f"{what} end at {due} of {n_outputs} output ids: the spans tile the output"
        )
    return spans


def _mm_items(value: object, what: str, prompt: Ints, _: int) -> list[dict[str, Any]]:
    """The images of the prompt."""
    items: list[dict[str, Any]] = []
    for i, item in enumerate(_dicts(value, what, MM_ITEM)):
        try:
            # with the types of the column
            items.append(pa.scalar(item, MM_ITEM).as_py())
        except (pa.ArrowException, OverflowError) as error:
            raise InvalidTurnsError(f"{what}[{i}] is {item!r}: {error}") from None
    for _token, fault in image_faults(items, prompt):
        raise InvalidTurnsError(f"{what.removesuffix('mm_items')}{fault}")
    return items


_READERS: dict[str, Callable[[object, str, Ints, int], object]] = dict(
    zip(
        METADATA,
        (_string, _flag, _flag, _flag, _output_mask, _weight_versions, _mm_items),
        strict=True,
    )
)
"""For each of `METADATA`, the function that checks a value, given the value, its name in
errors, the prompt, and the number of output ids."""
