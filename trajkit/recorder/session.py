"""One session in progress, in compact form: new tokens and new messages only."""

from collections.abc import Mapping
from threading import Lock
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit._arrow.export import Column, record_batch
from trajkit._arrow.ragged import Ints, Longs, Records, offsets_of
from trajkit.errors import InvalidTurnsError
from trajkit.recorder.extra_columns import ExtraColumns, Types
from trajkit.recorder.message_lists import MessageLog
from trajkit.schema import TURNS_DELTA
from trajkit.schema.engine import MAX_LOGPROB, NO_LOGPROB, Bools
from trajkit.turns.python_lists import ID_RULE, checked_ids, read_ids, read_logprobs
from trajkit.turns.records import (
    METADATA,
    message_columns,
    metadata_columns,
    read_metadata,
    value_column,
)
from trajkit.turns.session_metadata import OF_TURNS
from trajkit.turns.sessions import Sessions
from trajkit.turns.structs import STOPS

ChatMessage: TypeAlias = dict[str, object] | tuple[bytes, str]
"""A message as a dict, or as its key (`trajkit.turns.message_key`) and its role."""

# the columns of turns that `Recording.as_calls` has
_READ = pa.schema(
    map(TURNS_DELTA.field, ("finish_reason", "weight_versions", "mm_items"))
)
_LOWEST, _HIGHEST = float(NO_LOGPROB), float(MAX_LOGPROB)
# If calls add at most this many tokens each, a contiguous copy of the path costs less
# memory than the records of the calls, and saves comparing them one by one.
_SHORT = 16


class Recording:
    """One session in progress. The caller acquires the lock before it calls a method."""

    def __init__(self, types: Types) -> None:
        self.lock = Lock()
        self.dropped = False
        # by call: the new ids of its prompt, its output and its logprobs, if any, as one
        # block of four-byte values whose address never changes
        self.new_values: list[bytes] = []
        # by call: 0 where a logprob is null, or None
        self.valid: list[npt.NDArray[np.uint8] | None] = []
        # by call: its values of the columns `METADATA`
        self.metadata: list[tuple[object, ...]] = []
        # the forest of paths (turns.sessions.Forest), grown call by call
        self.paths = _core.Growth(_SHORT)
        self.message_log = MessageLog()
        # the session's id as an array
        self.id: pa.Array | None = None
        self.extra = ExtraColumns(types)

    @property
    def n_calls(self) -> int:
        return self.paths.n_calls

    def add(
        self, call: Mapping[str, object], payloads: object
    ) -> tuple[int, int, bool]:
        """Add a call; nothing changes if it raises. Returns the result of
        `_core.Growth.insert`.
        """
        index = self.n_calls
        prompt = read_ids(call["prompt_ids"], "prompt_ids")
        output = read_ids(call["output_ids"], "output_ids")
        logprobs, valid = read_logprobs(call["output_logprobs"], len(output), "")
        # the copy is checked, so that what is kept is what was checked
        taken = self.paths.take(prompt, output, logprobs, _LOWEST, _HIGHEST)
        if self.paths.fault is not None:
            raise _refusal(taken, *self.paths.fault)
        metadata = read_metadata(call, prompt, len(output), "")
        columns = self.extra.read(payloads, index, "")
        messages = self.message_log.read(
            call["prompt_messages"], call["response_message"], self.paths.base, index
        )
        # in the place of a call that was interrupted: one counts once it is inserted
        self.new_values[index:] = [taken]
        self.valid[index:] = [valid]
        self.metadata[index:] = [metadata]
        self.message_log.add(messages, index)
        self.extra.add(columns, index)
        reason, use_tool, ill_formed, trainable = metadata[:4]
        return self.paths.insert(
            trainable is not False,
            use_tool is True,
            ill_formed is True,
            STOPS.get(str(reason), STOPS["other"]),
        )

    def match(
        self, prompt_ids: object, messages: object
    ) -> tuple[int, int | None, int | None]:
        """Turn (-1: none), tokens and messages: see `trajkit.recorder.Match`."""
        turn, n_tokens, n_messages = -1, None, None
        if prompt_ids is not None:
            turn, n_tokens = self.paths.match(checked_ids(prompt_ids, "prompt_ids"))
        if messages is not None:
            found, n_messages = self.message_log.match(messages, turn, self.n_calls)
            if prompt_ids is None:
                turn = found
            elif turn < 0:
                n_messages = 0
        return turn, n_tokens, n_messages

    def as_calls(self, name: str) -> Sessions | None:
        """The calls as a policy reads them that compares messages by their values.

        It costs a fraction of making `turns` and reading them. Returns None if that is
        needed: for output masks, null logprobs, and columns ``reward`` and ``group_id``.
        No call may be recorded while the result is in use.
        """
        extra, n_calls = self.extra.fields(), self.n_calls
        values = zip(*self.metadata[:n_calls], strict=True)
        columns = dict(zip(METADATA, values, strict=True))
        masked = {*map(type, self.valid[:n_calls]), *map(type, columns["output_mask"])}
        if masked != {type(None)} or any(one.name in OF_TURNS for one in extra):
            return None
        if self.id is None:
            self.id = pa.array([name])
        calls: Records = self.paths.calls
        schema, arrays = _READ, [value_column(columns[one.name], one) for one in _READ]
        if extra:
            schema = pa.schema([*_READ, *extra])
            arrays += self.extra.arrays(extra, n_calls)
        table = pa.Table.from_arrays(arrays, schema=schema)
        requests, keys, roles = self.message_log.requests(n_calls)
        turn_index, offsets = np.arange(n_calls, dtype=np.int32), np.array([0, n_calls])
        return Sessions(
            table, self.id, offsets, turn_index, calls, requests, keys, roles
        )

    def turns(self, name: str) -> pa.Table:
        """The calls so far: `trajkit.schema.TURNS_DELTA`, then the extra columns.

        Later calls do not change it.
        """
        n_calls = self.n_calls
        calls: Records = self.paths.calls
        counts, numbers = self.message_log.suffixes(n_calls)
        shared, lengths, replies = counts.T
        sessions = np.zeros(n_calls, np.int32)
        messages, response = message_columns(
            self.message_log.book, numbers, lengths, replies, sessions
        )
        columns = {
            "session_id": pa.repeat(name, n_calls),
            "turn_index": Column(n_calls, (None, np.arange(n_calls, dtype=np.int32))),
            "base_turn": _nullable(calls["base"], calls["base"] >= 0),
            "shared_length": Column(
                n_calls, (None, calls["own_start"].astype(np.int32))
            ),
            **self._token_columns(calls),
            "shared_messages": _nullable(shared, lengths >= 0),
            "suffix_messages": messages,
            "response": response,
            **metadata_columns(self.metadata[:n_calls]),
        }
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

    def _token_columns(self, calls: Records) -> dict[str, Column]:
        """The columns with one value per token."""
        n_calls, n_out = len(calls), calls["out_len"]
        own_ends = calls["prompt_len"] - calls["own_start"]
        ends = own_ends + n_out
        new_values = [np.frombuffer(one, np.int32) for one in self.new_values[:n_calls]]
        sizes = np.array([len(one) for one in new_values])
        given = sizes > ends

        def values_of(starts: Longs, stops: Longs) -> Ints:
            bounds = zip(new_values, starts.tolist(), stops.tolist(), strict=True)
            return np.concatenate([one[start:stop] for one, start, stop in bounds])

        valid = None
        given_valid = self.valid[:n_calls]
        if any(one is not None for one in given_valid):
            parts = zip(given_valid, (sizes - ends).tolist(), strict=True)
            valid = np.concatenate(
                [np.ones(n, np.bool_) if one is None else one != 0 for one, n in parts]
            )
        return {
            "suffix_ids": _lists(own_ends, values_of(np.zeros_like(ends), own_ends)),
            "output_ids": _lists(n_out, values_of(own_ends, ends)),
            "output_logprobs": _lists(
                sizes - ends, values_of(ends, sizes), valid, given
            ),
        }


def _refusal(values: bytes, which: int, at: int, place: int) -> InvalidTurnsError:
    """The error for a value of a call, as `_core.Growth.fault` gives it."""
    if which == 2:
        number = np.frombuffer(values, np.float32)[place]
        return InvalidTurnsError(
            f"output_logprobs[{at}] is {number}: a log-probability is finite, above "
            "-9999 and at most 0 (1e-4 is tolerated for rounding)"
        )
    name = ("prompt_ids", "output_ids")[which]
    value = np.frombuffer(values, np.int32)[place]
    return InvalidTurnsError(f"{name}[{at}] is {value}: {ID_RULE}")


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
