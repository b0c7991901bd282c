"""Recorded calls as Python dicts to a table of turns."""

import reprlib
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit._arguments import check_choice, near_miss, plain_array, whole_number
from trajkit.errors import ArgumentError, InvalidTurnsError, LeftOutWarning
from trajkit.schema import TURNS
from trajkit.schema.engine import ID_RULE
from trajkit.tables.canonical import TableLike, as_table
from trajkit.tables.ragged import Bools, Floats, Ints, Ragged, offsets_of
from trajkit.turns.keys import BROKEN, OF_RUN, UNHEEDED, is_name, unheeded, word_of
from trajkit.turns.mapping import MapLike, read_map
from trajkit.turns.messages import (
    MessageBook,
    MessageLog,
    check_text,
    counts_of,
    not_listed,
)
from trajkit.turns.runs import Starts
from trajkit.turns.validation import Nonfinite, check_turns

Record: TypeAlias = Mapping[str, object]
Valid: TypeAlias = npt.NDArray[np.uint8] | None
"""0 where a number is null; None: nowhere."""

METADATA = (
    *("finish_reason", "use_tool", "ill_formed", "trainable"),
    *("output_mask", "weight_versions", "mm_items"),
)
"""Columns of one value per call, in the order of `read_metadata`."""

_TOKENS = ("prompt_ids", "output_ids", "output_logprobs")
_MESSAGES = ("prompt_messages", "response_message")
FIELDS = ("session_id", "turn_index", *_TOKENS, *_MESSAGES, *METADATA)
# as an extra column, logprobs would silently leave the turns without
_SPELLED = {name.replace("_", ""): name for name in FIELDS} | {
    "logprobs": "output_logprobs"
}

MAX_DEPTH = 32
"""Maximum nesting depth of a value in an extra column."""
_NO_IDS = np.empty(0, np.int32)
# the usual reasons, and the one that policies know
_ENDS = {"stop", "length", "tool_calls", "abort"}


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
    records : iterable of dict, or table
        With the keys (or columns) below, of which the first three are required. Others
        become extra columns; an array of several dimensions becomes a nested list. Keys
        that mark part of the output, say that the call failed, state other numbers of
        tokens, or name several runs of a session are errors (docs/data.md).

        - ``session_id``: the agent run; an integer becomes its text
        - ``prompt_ids``, ``output_ids``: a list, tuple, range, or one-dimensional array or
          buffer of integers in [0, 2**31), not bools
        - ``output_logprobs``: one float or None per output id. Missing, None or empty: the
          engine gave none. Values up to 1e-4 (rounding) are accepted and not clipped
        - ``finish_reason``: the engine's own word. One of a failed call, such as
          ``error``, needs ``trainable``; policies know ``abort``
        - ``ill_formed``: whether the reply has a tool call that could not be parsed
        - ``prompt_messages``: the request's chat messages, a list of dicts. Missing or
          None: the turn is routed by tokens
        - ``response_message``: the reply as the next request is expected to contain it
        - ``turn_index``: missing or None: one more than that of the session's previous
          call, from 0
        - ``use_tool``: missing: whether response_message has ``tool_calls``. None: unknown
        - ``trainable``: False: the turn is context only
        - ``output_mask``: a bool (or 0 and 1) per output id. False: the token is context
          only. Missing or None: all may be trained
        - ``weight_versions``: dicts of ``version`` (str), ``start`` and ``stop``
        - ``mm_items``: the images of the prompt, as `trajkit.schema.MM_ITEM` has them;
          their tokens in ``prompt_ids`` are `trajkit.turns.content_ids`
    map : dict, str or path, optional
        Where the records have these keys, if not at their top under these names, as for
        `trajkit.import_turns`: ``{"session_id": "run.id"}``,
        ``"session_id=run.id,prompt_ids=prompt_token_ids"``, or a TOML file. Fields that
        it does not name are found by their usual names, and keys that can be no column
        are left out with a `LeftOutWarning`.
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
    if hasattr(records, "__arrow_c_stream__"):
        records = as_table(records).to_pylist()
    if isinstance(records, str | bytes | Mapping) or not isinstance(records, Iterable):
        raise ArgumentError(
            f"records is of type {type(records).__name__}: expected an iterable of dicts, "
            "one per model call, or a table of these"
        )
    if map is None:
        return collected(records, nonfinite_logprobs)
    own = read_map(map)
    calls = (
        call
        for k, one in enumerate(records)
        for call in own.renamed(one, {"@name": f"record {k}", "/@name": f"record {k}"})
    )
    return collected(calls, nonfinite_logprobs, mapped=True)


def collected(
    records: Iterable[Record],
    nonfinite_logprobs: Nonfinite,
    *,
    mapped: bool = False,
    checked: bool = False,
) -> pa.Table:
    """Turns from calls; ``mapped``: what can be no column is left out with a warning.

    ``checked``: an import has reported what the other keys say of the calls.
    """
    batch = _Batch(mapped, checked)
    for number, record in enumerate(records):
        try:
            batch.add(record, number)
        except RecursionError:
            raise InvalidTurnsError(
                f"record {number}, session {reprlib.repr(record.get('session_id'))}: a "
                "value is nested too deep"
            ) from None
    if not mapped and not checked:
        batch.check_runs()
    table = batch.table()
    if batch.left_out:
        keys = ", ".join(f"{name!r}" for name in batch.left_out)
        text = f"map: left out, as no field reads them and no column can: {keys}"
        warnings.warn(text, LeftOutWarning, stacklevel=3)
    return check_turns(table, nonfinite_logprobs)


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
    name: str
    messages: MessageLog
    # of the previous call
    turn_index: int = -1


class _Call(NamedTuple):
    """A value of each call; or, in a table, the values of all calls."""

    session: Any
    turn_index: Any
    # the bytes of each list, None where it is null
    prompt_ids: Any
    output_ids: Any
    output_logprobs: Any
    valid: Any
    metadata: Any
    # a `CallMessages`
    messages: Any


class _Batch:
    """The calls so far, in order of arrival, and their extra columns."""

    def __init__(self, mapped: bool = False, checked: bool = False) -> None:
        self.checked = checked
        # with a mapping, keys that can be no column are left out, as by an import
        self.mapped = mapped
        self.left_out: dict[object, None] = {}
        self.sessions: dict[str, _Session] = {}
        self.book = MessageBook()
        self.calls: list[_Call] = []
        self.extras: dict[str, list[object]] = {}
        # the names of extra columns by all keys of a record
        self.names: dict[tuple[str, ...], list[str]] = {}

    def add(self, record: Record, number: int) -> None:
        if not isinstance(record, Mapping):
            raise InvalidTurnsError(
                f"record {number} is a {type(record).__name__}: expected a dict with the "
                "keys session_id, prompt_ids and output_ids, one dict per model call"
            )
        extras = self._extras(record, f"record {number} has the key")
        session = self._session(record, number)
        turn_index = _turn_index(record, session)
        try:
            if not self.checked:
                _check_end(record)
            call = _Call(
                session.number, turn_index, *_columns(record, session.messages)
            )
            extras = [
                name
                for name in extras
                if self._takes(name, check_depth, name, record[name])
            ]
        except InvalidTurnsError as error:
            where = f"session {session.name!r}, turn {turn_index}"
            raise InvalidTurnsError(f"{where}: {error}") from None
        for name in extras:
            column = self.extras.setdefault(name, [])
            column.extend([None] * (len(self.calls) - len(column)))
            column.append(record[name])
        self.calls.append(call)
        session.turn_index = turn_index

    def _extras(self, record: Record, what: str) -> list[str]:
        """The keys that become extra columns; names are looked at once per set of keys."""
        keys = tuple(record)
        if keys not in self.names:
            own = [name for name in record if name not in FIELDS]
            self.names[keys] = [
                name
                for name in own
                if self._takes(name, check_extra, name, what, record)
            ]
        if self.checked:
            return self.names[keys]
        return [
            name
            for name in self.names[keys]
            if self._takes(name, _check_heeded, name, what, record)
        ]

    def _takes(self, name: object, check: Callable[..., Any], *given: Any) -> bool:
        """Whether a check of an extra column passes; without a mapping, its error."""
        try:
            check(*given)
        except InvalidTurnsError:
            if not self.mapped:
                raise
            self.left_out[name] = None
            return False
        return True

    def _session(self, record: Record, number: int) -> _Session:
        name = record.get("session_id")
        if isinstance(name, int | np.integer) and not isinstance(name, bool):
            name = str(name)
        if not isinstance(name, str):
            found = f"session_id is {name!r}"
            if "session_id" not in record:
                found = f"no session_id, only {', '.join(map(str, record))}"
            raise InvalidTurnsError(
                f"record {number}: {found}: expected a string or an integer"
            )
        if name not in self.sessions:
            check_text(name, f"record {number}: session_id")
            log = MessageLog(self.book)
            self.sessions[name] = _Session(len(self.sessions), name, log)
        return self.sessions[name]

    def check_runs(self) -> None:
        """Raise if a key names several runs in a session."""
        names, starts = [*self.sessions], Starts()
        own = filter(lambda key: OF_RUN.fullmatch(word_of(key)), self.extras)
        keys = [key for key in own if self._varies(self.extras[key])]
        for k, call in enumerate(self.calls if keys else ()):
            given = {key: self.extras[key][k : k + 1] for key in keys}
            found = {key: one[0] for key, one in given.items() if one and is_name(*one)}
            starts.add(call.session, call.prompt_ids, found, call.turn_index)
        for key, session, turn, before, now in starts.changes():
            raise InvalidTurnsError(
                f"session {names[session]!r}, turn {turn}: {key} is {now!r}, and "
                f"{before!r} in an earlier turn, which its prompt does not continue. If "
                f"{key} names runs, trajkit import FILE -o log.parquet --map "
                f"session_id=session_id+{key} makes a session of each, and "
                "session_id=session_id makes them one"
            )

    def _varies(self, values: list[object]) -> bool:
        """Whether a session has several of these values of its calls."""
        pairs = zip(values, self.calls, strict=False)
        distinct = {(call.session, value) for value, call in pairs if is_name(value)}
        return len(distinct) > len({session for session, _ in distinct})

    def table(self) -> pa.Table:
        n = len(self.calls)
        order = sorted(range(n), key=[call[:2] for call in self.calls].__getitem__)
        in_order = [self.calls[k] for k in order]
        of = _Call(*zip(*in_order, strict=True)) if n else _Call(*[()] * 8)
        numbers = np.array(of.session, np.int32)
        names = pa.array([*self.sessions], pa.string())
        counts, listed = counts_of(of.messages)
        _, lengths, replies = counts.T
        messages, response = self.book.columns(listed, lengths, replies, numbers)
        columns = {
            "session_id": names.take(pa.array(numbers)),
            "turn_index": pa.array(of.turn_index, pa.int32()),
            **metadata_columns(of.metadata),
            "messages": messages,
            "response": response,
        }
        for name in _TOKENS:
            valid = of.valid if name == "output_logprobs" else ()
            columns[name] = lists_of(getattr(of, name), TURNS.field(name).type, valid)
        extras = {}
        for name, values in self.extras.items():
            values.extend([None] * (n - len(values)))
            in_turn = [values[k] for k in order]
            if not self.mapped or self._takes(name, _extra, name, in_turn):
                extras[name] = _extra(name, in_turn)
        more = [pa.field(name, values.type) for name, values in extras.items()]
        schema = pa.schema([*TURNS, *more], metadata=TURNS.metadata)
        arrays = [*(columns[name] for name in TURNS.names), *extras.values()]
        return pa.Table.from_arrays(arrays, schema=schema)


def _check_end(record: Record) -> None:
    """Raise for the finish reason of a failed call, if nothing says whether it trains."""
    reason = record.get("finish_reason")
    if isinstance(reason, str) and reason not in _ENDS and BROKEN.match(reason):
        if record.get("trainable") is None:
            raise InvalidTurnsError(
                f"finish_reason is {reason!r}, which {UNHEEDED['ends']}"
            )


def _columns(record: Record, log: MessageLog) -> tuple[object, ...]:
    """The values of a call in the order of `_Call`."""
    prompt, output = (_required_ids(record, name) for name in _TOKENS[:2])
    logprobs, valid = read_logprobs(record.get("output_logprobs"), len(output))
    messages, response = (record.get(name) for name in _MESSAGES)
    if not isinstance(messages, list | tuple | None):
        raise not_listed(messages)
    n_calls = len(log.calls)
    log.add(log.read(messages, response, -1, n_calls), n_calls)
    of_logprobs = None if logprobs is None else logprobs.tobytes()
    ids = prompt.tobytes(), output.tobytes()
    return *ids, of_logprobs, valid, read_metadata(record), log.calls[-1]


def _extra(name: str, values: list[object]) -> pa.Array:
    """An extra column."""
    try:
        if not any(map(_is_nested, values)):
            return pa.array(values)
        arrays = [one_value(value) for value in values]
        return concat_values(arrays, common_type(array.type for array in arrays))
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InvalidTurnsError(
            f"Arrow cannot store the values of {name!r} in one column: {error}"
        ) from None


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


def concat_values(arrays: Sequence[pa.Array], type_: pa.DataType) -> pa.Array:
    """The values of all arrays in one type."""
    # Arrow's cast of a list of nulls to its own type gives an invalid array
    return pa.concat_arrays(
        [one if one.type == type_ else one.cast(type_) for one in arrays]
    )


def check_extra(name: object, what: str, record: Record | None = None) -> None:
    """Raise unless an extra column of turns, or of a record, may have this name."""
    if not isinstance(name, str):
        raise InvalidTurnsError(f"{what} {name!r}: expected a name")
    if name in TURNS.names:
        made = name in ("messages", "response")
        of = "made from prompt_messages and response_message" if made else "of turns"
        raise InvalidTurnsError(f"{what} {name!r}, which is a column {of}")
    meant = _SPELLED.get(name.replace("_", "").lower())
    if meant is not None:
        raise InvalidTurnsError(f"{what} {name!r}: spell it {meant!r}")
    near = None if record is None else near_miss(name, FIELDS)
    if near is not None and near not in (record or ()):
        raise InvalidTurnsError(
            f"{what} {name!r} and no {near!r}: did you mean {near!r}? An extra column "
            "needs another name"
        )


def _check_heeded(name: str, what: str, record: Record) -> None:
    """Raise if a key says something of its call that turns do not read."""
    path, says = unheeded(record, name)
    if says:
        rule = UNHEEDED[says].format(path=path)
        raise InvalidTurnsError(
            f"{what} {path!r}, which no field reads, and which {rule}"
        )


def is_too_deep(value: object) -> bool:
    """Whether lists and dicts are nested deeper than `MAX_DEPTH` levels.

    Arrow infers types by recursion without a limit, which overflows the stack. It writes at
    most 63 levels to files, and reads fewer from Parquet.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        if not (level := [child for one in level for child in _children(one)]):
            return False
    return True


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


def check_depth(name: str, value: object) -> None:
    """Raise InvalidTurnsError if the value of an extra column is nested too deep."""
    if is_too_deep(value):
        raise InvalidTurnsError(
            f"the value of {name!r} is nested deeper than {MAX_DEPTH} levels: "
            "leave it out, or store it as text"
        )


def _turn_index(record: Record, session: _Session) -> int:
    given = whole_number(record.get("turn_index"))
    turn_index = session.turn_index + 1 if given is None else _integer(given)
    if not 0 <= turn_index < 2**31:
        raise InvalidTurnsError(
            f"session {session.name!r}: turn_index is "
            f"{turn_index if given is None else repr(given)}: expected an integer in "
            "[0, 2**31)"
        )
    return turn_index


def _integer(value: object) -> int:
    """A value of an integer type; -1 for another, and for a bool."""
    try:
        return -1 if isinstance(value, (bool, np.bool_)) else index(value)  # type: ignore[arg-type]
    except TypeError:
        return -1


def _required_ids(record: Record, name: str) -> Ints:
    if record.get(name) is not None:
        return read_ids(record[name], name)
    found = f"the record has the keys {', '.join(map(str, record))}"
    if name in record:
        found = f"{name} is None"
    raise InvalidTurnsError(f"{found}: expected {name}, a list of token ids")


def read_metadata(record: Record) -> tuple[object, ...]:
    """The values of `METADATA` of a call, in the types of their columns."""
    values: list[object] = []
    for name in METADATA:
        value = record.get(name)
        if value is not None:
            value = _read_value(value, name, TURNS.field(name).type)
        elif name == "use_tool" and name not in record:
            response = record.get("response_message")
            value = isinstance(response, dict) and bool(response.get("tool_calls"))
        values.append(value)
    return tuple(values)


def _read_value(value: object, what: str, type_: pa.DataType) -> object:
    """A copy of a value in the type of a column."""
    if pa.types.is_string(type_) and isinstance(value, str):
        check_text(value, what)
        return value
    if pa.types.is_boolean(type_) and isinstance(value, (bool, np.bool_)):
        return bool(value)
    if not pa.types.is_large_list(type_):
        expected = "a string" if pa.types.is_string(type_) else "a bool"
        raise InvalidTurnsError(f"{what} is {value!r}: expected {expected}")
    if pa.types.is_boolean(type_.value_type):
        return _mask(value, what)
    if not isinstance(value, (list, tuple)):
        raise InvalidTurnsError(f"{what} is {value!r}: expected a list of dicts")
    read, names = [], type_.value_type.names
    for i, one in enumerate(value):
        rule = f"expected a dict of {', '.join(names)}"
        if isinstance(one, Mapping) and {*one} == {*names}:
            try:
                read.append(pa.scalar(one, type_.value_type).as_py())
                rule = (
                    "" if read[i] == one else "expected integers"
                )  # a fraction is cut
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                rule = str(error)
        if rule:
            raise InvalidTurnsError(f"{what}[{i}] is {one!r}: {rule}")
    return read


def _mask(value: object, what: str) -> Bools:
    mask = np.asarray(value)
    if mask.ndim != 1 or (mask.dtype.kind not in "biu" and len(mask)):
        raise InvalidTurnsError(f"{what} is {value!r}: expected a list of bools")
    for at in np.flatnonzero((mask != 0) & (mask != 1))[:1].tolist():
        raise InvalidTurnsError(
            f"{what}[{at}] is {mask[at]}: expected a bool, or 0 or 1"
        )
    return mask.astype(np.bool_)


def metadata_columns(metadata: Sequence[tuple[object, ...]]) -> dict[str, pa.Array]:
    """The columns `METADATA` of calls."""
    columns = zip(*metadata, strict=True) if metadata else [()] * len(METADATA)
    return {
        name: pa.nulls(len(values), TURNS.field(name).type)
        if {*map(type, values)} <= {type(None)}  # much faster for lists of structs
        else pa.array(values, TURNS.field(name).type)
        for name, values in zip(METADATA, columns, strict=True)
    }


def lists_of(
    parts: Sequence[bytes | memoryview | None],
    type_: pa.DataType,
    valid: Sequence[Valid] = (),
) -> pa.LargeListArray:
    """A column of lists of four-byte numbers, given their bytes; None is null."""
    null = np.array([part is None for part in parts], np.bool_)
    sizes = [0 if part is None else len(part) // 4 for part in parts]
    dtype = type_.value_type.to_pandas_dtype()
    values, mask = np.frombuffer(b"".join(filter(None, parts)), dtype), None
    if any(one is not None for one in valid):
        pairs = zip(valid, sizes, strict=True)
        flags = [np.ones(n, np.uint8) if one is None else one for one, n in pairs]
        mask = np.concatenate(flags) == 0
    lists = Ragged(pa.array(values, mask=mask), offsets_of(sizes))
    return lists.to_arrow(null, type_)


def _is_flat(values: object, type_: type[np.generic]) -> bool:
    """Whether it is a contiguous array; a subclass may mean more by it, as masks do."""
    return (
        type(values) is np.ndarray
        and values.dtype == type_
        and values.ndim == 1
        and values.flags.c_contiguous
    )


def read_ids(values: object, what: str) -> Ints:
    """Token ids as a contiguous array.

    An int32 array is returned unchecked. ``what`` is their name in errors: ``session 'a',
    turn 7: prompt_ids``. Raises InvalidTurnsError for a value that is no token id.
    """
    if _is_flat(values, np.int32):
        return values  # type: ignore[return-value]  # the usual case, tested first
    array = _as_array(values, what, "integers")
    if not isinstance(array, list):
        if array.dtype.kind not in "iu" and len(array):
            raise InvalidTurnsError(f"{what} is of {array.dtype}: {ID_RULE}")
        for at in np.flatnonzero((array < 0) | (array > 0x7FFFFFFF))[:1].tolist():
            raise InvalidTurnsError(f"{what}[{at}] is {array[at]}: {ID_RULE}")
        return np.ascontiguousarray(array, np.int32)
    ids = np.empty(len(array), np.int32)
    # the kernel stops at a value that is not an int; numpy integers are read here
    for k in range(_core.unbox_ids(array, ids), len(array)):
        plain = _integer(array[k])
        if not 0 <= plain <= 0x7FFFFFFF:
            several = isinstance(array[k], list | tuple | np.ndarray)
            hint = "; this is a batch: pass one record per call" if several else ""
            raise InvalidTurnsError(f"{what}[{k}] is {array[k]!r}: {ID_RULE}{hint}")
        ids[k] = plain
    return ids


def lcp(a: object, b: object) -> int:
    """Length of the longest common prefix of two arrays of token ids.

    Parameters
    ----------
    a, b : int32 array, shape (n_tokens,)
        Contiguous int32 arrays are read in place; do not write to them during the call.
        Other lists, arrays and buffers are converted.

    Returns
    -------
    int
        0 if either is empty.

    Raises
    ------
    ArgumentError
        A value is no token id, or an array has more than one dimension.
    """
    try:
        return _core.lcp(read_ids(a, "a"), read_ids(b, "b"))
    except InvalidTurnsError as error:
        raise ArgumentError(str(error)) from None


def read_logprobs(values: object, n_outputs: int) -> tuple[Floats | None, Valid]:
    """The logprobs of a call, and which are not null.

    None for None and for an empty list. Raises InvalidTurnsError if they are not numbers,
    or not one per output id.
    """
    if values is None:
        return None, None
    if _is_flat(values, np.float32) and len(values) == n_outputs > 0:  # type: ignore[arg-type]
        return values, None  # type: ignore[return-value]
    what = "output_logprobs"
    array = _as_array(values, what, "numbers")
    if len(array) == 0:
        return None, None
    if len(array) != n_outputs:
        raise InvalidTurnsError(f"{len(array)} logprobs for {n_outputs} output ids")
    if isinstance(array, list):
        numbers, valid = np.empty(n_outputs, np.float32), np.empty(n_outputs, np.uint8)
        for k in range(_core.unbox_logprobs(array, numbers, valid), n_outputs):
            numbers[k], valid[k] = _logprob(array[k], f"{what}[{k}]")
        return numbers, None if valid.all() else valid
    if array.dtype.kind not in "fiu":
        raise InvalidTurnsError(f"{what} is of {array.dtype}: logprobs are numbers")
    with np.errstate(over="ignore"):  # becomes infinite, which is refused later
        return np.ascontiguousarray(array, np.float32), None


def _logprob(value: object, what: str) -> tuple[float, bool]:
    """A logprob of any numeric type, and whether it is not None."""
    if value is None:
        return 0.0, False
    is_number = isinstance(value, (int, float, np.integer, np.floating))
    if not is_number or isinstance(value, bool):
        raise InvalidTurnsError(f"{what} is {value!r}: logprobs are numbers")
    with np.errstate(over="ignore"):
        try:
            return float(np.float32(value)), True  # type: ignore[arg-type]
        except OverflowError:  # an int that exceeds every float
            return float("inf" if value > 0 else "-inf"), True  # type: ignore[operator]


def _as_array(values: object, what: str, expected: str) -> list[object] | Any:
    """A list, or an array of numpy with one dimension."""
    if isinstance(values, (tuple, range)):
        return list(values)
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values.to_numpy() if values.null_count == 0 else values.to_pylist()
    try:
        values = plain_array(values)
    except Exception as error:  # any error of the tensor's library
        raise InvalidTurnsError(
            f"{what} is a {type(values).__name__} that cannot be copied: {error}"
        ) from None
    if isinstance(values, list):
        return values
    if isinstance(values, np.ma.MaskedArray):
        return list(values.tolist())  # None where masked
    array = values if isinstance(values, np.ndarray) else _from_buffer(values)
    if array is None:
        raise InvalidTurnsError(
            f"{what} is of type {type(values).__name__}: expected a list or an "
            f"array of {expected}"
        )
    if array.ndim != 1:
        raise InvalidTurnsError(
            f"{what} has the shape {array.shape}: expected one dimension"
        )
    return array


def _from_buffer(values: object) -> npt.NDArray[np.generic] | None:
    """The numbers of a buffer or tensor; None for text, and for bytes.

    Bytes may be wider integers that lost their type.
    """
    try:
        view = memoryview(values)  # type: ignore[arg-type]
    except TypeError:
        return np.asarray(values) if hasattr(values, "__array__") else None
    return None if view.itemsize == 1 else np.asarray(view)
