"""One session in progress, in compact form: new tokens and new messages only."""

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit._arrow.export import Column, record_batch
from trajkit.errors import InvalidTurnsError
from trajkit.recorder.extra_columns import Column as ExtraColumn
from trajkit.recorder.extra_columns import ExtraColumns, Types
from trajkit.recorder.message_lists import MessageLog, read_messages
from trajkit.schema import TURNS_DELTA
from trajkit.turns.calls import Calls, Ints, Longs, Records
from trajkit.turns.flat_buffers import offsets_of
from trajkit.turns.messages import check_text
from trajkit.turns.mm_items import Item
from trajkit.turns.python_lists import ID_RULE, fill_logprobs, given_logprobs, read_ids
from trajkit.turns.records import (
    message_columns,
    read_mm_items,
    read_output_mask,
    read_weight_versions,
)
from trajkit.turns.session_metadata import OF_TURNS
from trajkit.turns.structs import CALL, NODE, REQUEST, longer
from trajkit.turns.turn_rules import MAX_LOGPROB, NO_LOGPROB, Bools, item_fault

ChatMessage: TypeAlias = dict[str, object] | tuple[bytes, str]
"""A message as a dict, or as its key (`trajkit.turns.message_key`) and its role."""

Floats: TypeAlias = npt.NDArray[np.float32]
# the columns of turns that `Recording.as_calls` has
_READ = pa.schema(
    [
        TURNS_DELTA.field(name)
        for name in ("finish_reason", "weight_versions", "mm_items")
    ]
)
_LOWEST, _HIGHEST = float(NO_LOGPROB), float(MAX_LOGPROB)
# If calls add at most this many tokens each, a contiguous copy of the path costs less
# memory than the records of the calls, and saves comparing them one by one.
_SHORT = 16
# columns whose values `_core.Intake` keeps as they are given
_METADATA = (
    *("finish_reason", "use_tool", "ill_formed", "trainable"),
    *("weight_versions", "output_mask"),
)


class Recording(_core.Intake):
    """One session in progress. The caller acquires the lock before it calls a method."""

    def __init__(self, types: Types) -> None:
        self.lock = Lock()
        self.dropped = False
        # by call: the new ids of its prompt, its output and its logprobs, if any, as one
        # block of four-byte values whose address never changes
        self.new_values: list[bytes] = []
        # by call, if it has a null logprob: 0 where the logprob is null
        self.valid: dict[int, npt.NDArray[np.uint8]] = {}
        # the forest of paths (turns.prefix_forest), grown call by call, and its arrays
        self.paths = _core.Growth()
        self.calls: Records = np.empty(0, CALL)
        self.nodes: Records = np.empty(0, NODE)
        self.stack: Ints = np.empty(0, np.int32)
        self.ends: Ints = np.empty(0, np.int32)
        self.path: Ints = np.empty(0, np.int32)
        self.message_log = MessageLog()
        # by call: its values of the columns `_METADATA`
        self.metadata: list[tuple[object, ...]] = []
        # whether a call may have weight versions, or an output mask
        self.versioned = self.masked = False
        # the session's id as an array
        self.id: pa.Array | None = None
        self.extra = ExtraColumns(types)
        # by call, if its prompt has images
        self.mm_items: dict[int, Sequence[Item]] = {}
        self.begin(
            self.paths,
            self.message_log.lists,
            self.new_values,
            self.metadata,
            _LOWEST,
            _HIGHEST,
        )

    # methods that `_core.Intake` calls for values that it does not read itself

    def read_ids(self, values: object, name: str) -> Ints:
        return read_ids(values, "", name)

    def read_logprobs(
        self, values: object, n_output: int
    ) -> tuple[Floats | None, npt.NDArray[np.uint8] | None]:
        given = given_logprobs(values, n_output, "")
        if given is None:
            return None, None
        numbers = np.empty(n_output, np.float32)
        return numbers, fill_logprobs(given, numbers, "")

    def read_flag(self, value: object, name: str) -> bool:
        if not isinstance(value, (bool, np.bool_)):
            raise InvalidTurnsError(f"{name} is {value!r}: expected a bool")
        return bool(value)

    def read_reason(self, value: object) -> str:
        if not isinstance(value, str):
            raise InvalidTurnsError(f"finish_reason is {value!r}: expected a string")
        check_text(value, "finish_reason")
        return value

    def read_versions(self, value: object, n_output: int) -> object:
        self.versioned = True
        spans = read_weight_versions(value, "")
        if spans is not None:
            _check_tiles(spans, n_output)
        return spans

    def read_mask(self, value: object, n_output: int) -> object:
        self.masked = True
        return read_output_mask(value, n_output, "")

    def read_payloads(self, given: object) -> dict[str, ExtraColumn]:
        return self.extra.read(given, self.n_calls, "")

    def add_payloads(self, read: dict[str, ExtraColumn]) -> None:
        self.extra.add(read)

    def read_messages(self, messages: object) -> list[object]:
        return read_messages(messages)

    def number(self, message: object, place: int) -> int:
        return self.message_log.number(message, place)

    def find(self, message: object, place: int) -> int:
        return self.message_log.find(message, place)

    def index_keys(self) -> None:
        self.message_log.index_keys()

    def refusal(self, values: bytes, fault: tuple[int, int, int]) -> InvalidTurnsError:
        which, at, place = fault
        if which == 2:
            number = np.frombuffer(values, np.float32)[place]
            return InvalidTurnsError(
                f"output_logprobs[{at}] is {number}: a log-probability is finite, above "
                "-9999 and at most 0 (1e-4 is tolerated for rounding)"
            )
        name = ("prompt_ids", "output_ids")[which]
        value = np.frombuffer(values, np.int32)[place]
        return InvalidTurnsError(f"{name}[{at}] is {value}: {ID_RULE}")

    def add_valid(self, valid: npt.NDArray[np.uint8]) -> None:
        self.valid[self.n_calls] = valid

    def make_room(self, n_tokens: int, n_places: int) -> None:
        n = self.n_calls
        if n == len(self.calls):
            n += n // 8 + 16
            self.calls = longer(self.calls, n)
            self.nodes = longer(self.nodes, 2 * n + 1)
            self.stack = longer(self.stack, 2 * n + 1)
            self.ends = longer(self.ends, n)
            self.paths.attach(self.calls, self.nodes, self.stack, self.ends)
            self._hold_path(max(n_tokens, self.paths.length))
        elif len(self.path) < n_tokens and len(self.path):
            self._hold_path(n_tokens)
        self.message_log.make_room(len(self.calls), n_places)

    def _hold_path(self, length: int) -> None:
        """Store the current path contiguously if calls add few tokens."""
        kept = length <= _SHORT * len(self.calls)
        self.path = np.empty(length + length // 8 + 16 if kept else 0, np.int32)
        self.paths.hold_path(self.path)

    def match(
        self, prompt_ids: object, messages: object
    ) -> tuple[int, int | None, int | None]:
        """Turn (-1: none), tokens and messages: see `trajkit.recorder.Match`."""
        turn, n_tokens, n_messages = -1, None, None
        if prompt_ids is not None:
            ids = self.read_ids(prompt_ids, "prompt_ids")
            wrong = np.flatnonzero(ids < 0)
            if len(wrong):
                raise self.refusal(ids.tobytes(), (0, int(wrong[0]), int(wrong[0])))
            turn, n_tokens = self.paths.match(ids)
        if messages is not None:
            listed = read_messages(messages)
            n_messages = 0
            if turn >= 0 or prompt_ids is None:
                turn, n_messages = self.message_log.lists.match(listed, turn, self)
        return turn, n_tokens, n_messages

    def as_calls(self, name: str) -> Calls | None:
        """The calls as a policy reads them that compares messages by their values.

        It costs a fraction of making `turns` and reading them. Returns None if that is
        needed: for output masks, null logprobs, and columns ``reward`` and ``group_id``.
        No call may be recorded while the result is in use.
        """
        extra = self.extra.fields()
        if self.valid or self.masked or any(one.name in OF_TURNS for one in extra):
            return None
        reasons, *_, versions, _ = zip(*self.metadata, strict=True)
        if self.id is None:
            self.id = pa.array([name])
        n_calls = self.n_calls
        requests = np.empty(n_calls, REQUEST)
        keys, *roles = self.message_log.requests(requests)
        schema, columns = _READ, [pa.array(reasons, _READ.field(0).type)]
        if self.versioned:
            columns.append(pa.array(versions, _READ.field(1).type))
        else:
            columns.append(pa.nulls(n_calls, _READ.field(1).type))
        columns.append(self._items())
        if extra:
            schema = pa.schema([*_READ, *extra])
            columns += self.extra.arrays(extra, n_calls)
        return Calls(
            pa.Table.from_arrays(columns, schema=schema),
            self.calls[:n_calls],
            requests,
            np.array([0, n_calls]),
            self.id,
            np.arange(n_calls, dtype=np.int32),
            keys,
            tuple(roles),
        )

    def turns(self, name: str) -> pa.Table:
        """The calls so far: `trajkit.schema.TURNS_DELTA`, then the extra columns.

        Later calls do not change it.
        """
        n_calls = self.n_calls
        calls: Records = self.calls[:n_calls]
        self.message_log.write()
        log: Records = self.message_log.calls[:n_calls]
        messages, response = message_columns(
            self.message_log.book,
            *self.message_log.suffixes(n_calls),
            log["reply"],
            np.zeros(n_calls, np.int32),
        )
        columns = {
            "session_id": pa.repeat(name, n_calls),
            "turn_index": Column(n_calls, (None, np.arange(n_calls, dtype=np.int32))),
            "base_turn": _nullable(calls["base"], calls["base"] >= 0),
            "shared_length": Column(
                n_calls, (None, calls["own_start"].astype(np.int32))
            ),
            **self._token_columns(calls),
            "shared_messages": _nullable(log["shared"], log["end"] >= 0),
            "suffix_messages": messages,
            "response": response,
        }
        for column, values in zip(
            _METADATA, zip(*self.metadata, strict=True), strict=True
        ):
            columns[column] = pa.array(values, TURNS_DELTA.field(column).type)
        columns["mm_items"] = self._items()
        batch = record_batch(
            TURNS_DELTA, n_calls, [columns[name] for name in TURNS_DELTA.names]
        )
        extra = self.extra.fields()
        if not extra:
            return pa.Table.from_batches([batch])
        return pa.Table.from_arrays(
            [*batch.columns, *self.extra.arrays(extra, n_calls)],
            schema=pa.schema([*TURNS_DELTA, *extra], metadata=TURNS_DELTA.metadata),
        )

    def check_items(self, value: object, prompt_ids: object) -> Sequence[Item]:
        """The images of a call's prompt; raises `InvalidTurnsError`."""
        items = read_mm_items(value, "") or []
        fault = item_fault(items, self.read_ids(prompt_ids, "prompt_ids"))
        if fault is not None:
            raise InvalidTurnsError(fault)
        return items

    def _items(self) -> pa.Array:
        """The column ``mm_items``."""
        type_ = TURNS_DELTA.field("mm_items").type
        if not self.mm_items:
            return pa.nulls(self.n_calls, type_)
        return pa.array(map(self.mm_items.get, range(self.n_calls)), type_)

    def _token_columns(self, calls: Records) -> dict[str, Column]:
        """The columns with one value per token."""
        n_out = calls["out_len"]
        own_ends = calls["prompt_len"] - calls["own_start"]
        ends = own_ends + n_out
        new_values = [np.frombuffer(one, np.int32) for one in self.new_values]
        sizes = np.array([len(one) for one in new_values])
        given = sizes > ends
        n_given = np.where(given, n_out, 0)

        def values_of(starts: Longs, stops: Longs) -> Ints:
            bounds = zip(new_values, starts.tolist(), stops.tolist(), strict=True)
            return np.concatenate([one[start:stop] for one, start, stop in bounds])

        valid = None
        if self.valid:
            valid = np.ones(int(n_given.sum()), np.bool_)
            begins = np.cumsum(n_given) - n_given
            for call, those in self.valid.items():
                begin = int(begins[call])
                valid[begin : begin + len(those)] = those != 0
        return {
            "suffix_ids": _lists(own_ends, values_of(np.zeros_like(ends), own_ends)),
            "output_ids": _lists(n_out, values_of(own_ends, ends)),
            "output_logprobs": _lists(n_given, values_of(ends, sizes), valid, given),
        }


def _nullable(values: Ints, valid: Bools) -> Column:
    """A column of integers, null where it is not valid."""
    return Column(len(values), (_bits(valid), np.ascontiguousarray(values)), -1)


def _lists(
    lengths: Longs, values: Ints, valid: Bools | None = None, given: Bools | None = None
) -> Column:
    """A column of lists; ``given`` marks the lists that are not null."""
    child = Column(len(values), (_bits(valid), values), -1)
    buffers = (_bits(given), offsets_of(lengths))
    return Column(len(lengths), buffers, -1, children=(child,))


def _bits(valid: Bools | None) -> npt.NDArray[np.uint8] | None:
    return None if valid is None else np.packbits(valid, bitorder="little")


def _check_tiles(spans: Sequence[Mapping[str, object]], n_output: int) -> None:
    """Raise unless the spans are contiguous from 0 to the end of the output."""
    due: object = 0
    for i, span in enumerate(spans):
        if span["version"] is None:
            raise InvalidTurnsError(
                f"weight_versions[{i}] has a null: version, start and stop are needed"
            )
        start, stop = span["start"], span["stop"]
        if start != due or stop < start:  # type: ignore[operator]
            raise InvalidTurnsError(
                f"weight_versions[{i}] is {start}:{stop}, expected a start of {due}: "
                "the spans tile the output"
            )
        due = stop
    if due != n_output:
        raise InvalidTurnsError(
            f"weight_versions end at {due} of {n_output} output ids: the spans "
            "tile the output"
        )
