"""One session under way, in compact form: new tokens and new messages only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit.calls import Ints, Longs, Records
from trajkit.checks import MAX_LOGPROB, NO_LOGPROB
from trajkit.errors import InvalidTurnsError
from trajkit.flat import offsets_of
from trajkit.further import Further
from trajkit.layout import CALL, NODE
from trajkit.messages import Ids, check_text
from trajkit.records import message_columns, read_weight_versions
from trajkit.schema import TURNS_DELTA
from trajkit.talk import Heard, Talk
from trajkit.unbox import ID_RULE, fill_logprobs, given_logprobs, read_ids

ChatMessage: TypeAlias = dict[str, object] | tuple[bytes, str]
"""A message as a dict, or as its key (`trajkit.message_key`) and its role."""

Floats: TypeAlias = npt.NDArray[np.float32]
_NO_LOGPROBS: Floats = np.empty(0, np.float32)
_LOGPROBS = float(NO_LOGPROB), float(MAX_LOGPROB)
# Tokens per call: where they bring no more, a copy of the path costs less than the calls'
# own records, and saves looking at one after another.
_SHORT = 16
_NO_FAULT = (-1, -1, -1)

_Item = TypeVar("_Item", bound=np.generic)


class Said(NamedTuple):
    """What a call says of itself beside its tokens and logprobs, as it was given."""

    prompt_messages: Sequence[ChatMessage] | None
    response_message: ChatMessage | None
    finish_reason: str | None
    use_tool: bool | None
    ill_formed: bool | None
    trainable: bool | None
    weight_versions: Sequence[Mapping[str, object]] | None
    payloads: Mapping[str, object] | None


@dataclass(slots=True)
class Recording:
    """One session under way. Its user takes the lock around every call of a method."""

    name: str
    lock: Lock = field(default_factory=Lock)
    dropped: bool = False
    n_calls: int = 0
    # of each call what no earlier one had, in one piece that never moves: ids of its
    # prompt, its output, and the bytes of its logprobs, if it has some
    held: list[Ints] = field(default_factory=list)
    # where logprobs are null, by call: 0
    valid: dict[int, npt.NDArray[np.uint8]] = field(default_factory=dict)
    # the forest of paths (trajkit.forest), grown call by call, and its arrays
    paths: _core.Growth = field(default_factory=_core.Growth)
    calls: Records = field(default_factory=lambda: np.empty(0, CALL))
    nodes: Records = field(default_factory=lambda: np.empty(0, NODE))
    stack: Ints = field(default_factory=lambda: np.empty(0, np.int32))
    ends: Ints = field(default_factory=lambda: np.empty(0, np.int32))
    path: Ints = field(default_factory=lambda: np.empty(0, np.int32))
    talk: Talk = field(default_factory=Talk)
    # per call, the node of its messages and its reply; -1: it has no list of messages
    shown: list[int] = field(default_factory=list)
    # how many of a call's messages the base supplies, and those that follow
    shared_messages: list[int] = field(default_factory=list)
    messages: list[Ids | None] = field(default_factory=list)
    # -1: no response
    responses: list[int] = field(default_factory=list)
    finish_reasons: list[str | None] = field(default_factory=list)
    use_tool: list[bool | None] = field(default_factory=list)
    ill_formed: list[bool | None] = field(default_factory=list)
    trainable: list[bool | None] = field(default_factory=list)
    weight_versions: list[object] = field(default_factory=list)
    further: Further = field(default_factory=Further)

    def add(
        self,
        prompt_ids: object,
        output_ids: object,
        output_logprobs: object,
        said: Said,
    ) -> tuple[int, int, bool]:
        """Take a call in.

        Returns
        -------
        base : int
            The call that its prompt starts like; -1: none.
        shared : int
            How far.
        clean : bool
            As far as the base goes.

        Raises
        ------
        InvalidTurnsError
            A value breaks a rule of the schema; the session is as it was before.
        """
        # What can be refused, or lack memory, is done before anything counts.
        index = self.n_calls
        where = f"session {self.name!r}, turn {index}: "
        prompt = read_ids(prompt_ids, where, "prompt_ids")
        output = read_ids(output_ids, where, "output_ids")
        logprobs, valid = _read_logprobs(output_logprobs, len(output), where)
        shared, base = self.paths.find(prompt)
        new = prompt[shared:]
        held = np.empty(len(new) + len(output) + len(logprobs), np.int32)
        faults = _core.take_call(new, output, logprobs, held, *_LOGPROBS)
        if faults != _NO_FAULT:
            # the copy is checked, so that what is kept is what was checked
            raise _refusal(held, faults, shared, (len(new), len(output)), where)
        use_tool = _flag(said.use_tool, "use_tool", where)
        ill_formed = _flag(said.ill_formed, "ill_formed", where)
        trainable = _flag(said.trainable, "trainable", where)
        _check_finish_reason(said.finish_reason, where)
        versions = read_weight_versions(said.weight_versions, where)
        if versions is not None:
            _check_tiles(versions, len(output), where)
        further = self.further.read(said.payloads, index, where)
        heard = self.talk.read(said.prompt_messages, said.response_message, where)
        if use_tool is None:
            reply = said.response_message
            use_tool = isinstance(reply, dict) and bool(reply.get("tool_calls"))

        if index == self.paths.room:
            self._make_room()
        length = len(prompt) + len(output)
        if len(self.path) and length > len(self.path):
            self._hold_path(length)
        base, n_base = self.paths.insert(held, shared, len(new), len(output), base)
        self.held.append(held)
        if valid is not None:
            self.valid[index] = valid
        self._add_messages(heard, base)
        self.finish_reasons.append(said.finish_reason)
        self.use_tool.append(use_tool)
        self.ill_formed.append(ill_formed)
        self.trainable.append(trainable)
        self.weight_versions.append(versions)
        self.further.add(further)
        self.n_calls = index + 1
        return base, shared, base < 0 or shared == n_base

    def _make_room(self) -> None:
        """Room for an eighth more calls than there are, and some."""
        n = self.n_calls + self.n_calls // 8 + 16
        self.calls = _longer(self.calls, n)
        self.nodes = _longer(self.nodes, 2 * n + 1)
        self.stack = _longer(self.stack, 2 * n + 1)
        self.ends = _longer(self.ends, n)
        self.paths.attach(self.calls, self.nodes, self.stack, self.ends)
        self._hold_path(self.paths.length)

    def _hold_path(self, length: int) -> None:
        """Keep the last call's path of this length in one piece, if calls bring little."""
        kept = length <= _SHORT * self.paths.room
        self.path = np.empty(length + length // 8 + 16 if kept else 0, np.int32)
        self.paths.hold_path(self.path)

    def _add_messages(self, heard: Heard, base: int) -> None:
        shared, shown = self.talk.add(heard, self.shown[base] if base >= 0 else -1)
        self.shown.append(shown)
        self.shared_messages.append(shared)
        self.messages.append(None if heard.ids is None else heard.ids[shared:].copy())
        self.responses.append(heard.reply)

    def turns(self) -> pa.Table:
        """The calls so far: `trajkit.schema.TURNS_DELTA`, and further columns behind.

        Later calls do not change it.
        """
        n_calls = self.n_calls
        calls: Records = self.calls[:n_calls]
        base = calls["base"].copy()
        silent = np.array([one is None for one in self.messages], np.bool_)
        messages, response = message_columns(
            self.talk.book,
            self.messages,
            np.array(self.responses, np.int32),
            np.zeros(n_calls, np.int32),
        )
        shared = np.array(self.shared_messages, np.int32)
        columns = {
            "session_id": pa.repeat(self.name, n_calls),
            "turn_index": pa.array(np.arange(n_calls, dtype=np.int32)),
            "base_turn": pa.array(base, mask=base < 0),
            "shared_length": pa.array(calls["own_start"].astype(np.int32)),
            **self._token_columns(calls),
            "finish_reason": pa.array(self.finish_reasons, pa.string()),
            "shared_messages": pa.array(shared, mask=silent),
            "suffix_messages": messages,
            "response": response,
            "use_tool": pa.array(self.use_tool, pa.bool_()),
            "ill_formed": pa.array(self.ill_formed, pa.bool_()),
            "trainable": pa.array(self.trainable, pa.bool_()),
            "weight_versions": pa.array(
                self.weight_versions, TURNS_DELTA.field("weight_versions").type
            ),
        }
        return pa.Table.from_arrays(
            [
                *(columns[name] for name in TURNS_DELTA.names),
                *self.further.arrays(n_calls),
            ],
            schema=pa.schema(
                [*TURNS_DELTA, *self.further.fields()], metadata=TURNS_DELTA.metadata
            ),
        )

    def _token_columns(self, calls: Records) -> dict[str, pa.Array]:
        """The columns that have a value per token."""
        n_out = calls["out_len"]
        own_ends = calls["prompt_len"] - calls["own_start"]
        ends = own_ends + n_out
        sizes = np.array([len(one) for one in self.held])
        given = sizes > ends
        n_given = np.where(given, n_out, 0)

        def runs(starts: Longs, stops: Longs) -> Ints:
            bounds = zip(self.held, starts.tolist(), stops.tolist(), strict=True)
            return np.concatenate([one[start:stop] for one, start, stop in bounds])

        nulls = None
        if self.valid:
            nulls = np.zeros(int(n_given.sum()), np.bool_)
            begins = np.cumsum(n_given) - n_given
            for call, valid in self.valid.items():
                begin = int(begins[call])
                nulls[begin : begin + len(valid)] = valid == 0
        logprobs = pa.array(runs(ends, sizes).view(np.float32), mask=nulls)
        return {
            "suffix_ids": _lists(own_ends, runs(np.zeros_like(ends), own_ends)),
            "output_ids": _lists(n_out, runs(own_ends, ends)),
            "output_logprobs": pa.LargeListArray.from_arrays(
                pa.array(offsets_of(n_given)), logprobs, mask=pa.array(~given)
            ),
        }


def _lists(lengths: Longs, values: Ints) -> pa.LargeListArray:
    return pa.LargeListArray.from_arrays(pa.array(offsets_of(lengths)), values)


def _longer(array: npt.NDArray[_Item], size: int) -> npt.NDArray[_Item]:
    longer = np.empty(size, array.dtype)
    longer[: len(array)] = array
    return longer


def _read_logprobs(
    values: object, n_output: int, where: str
) -> tuple[Floats, npt.NDArray[np.uint8] | None]:
    """A call's logprobs, not looked at (empty: none), and where there is one."""
    given = given_logprobs(values, n_output, where)
    if given is None:
        return _NO_LOGPROBS, None
    if isinstance(given, np.ndarray) and given.dtype == np.float32:
        return np.ascontiguousarray(given), None
    numbers = np.empty(n_output, np.float32)
    return numbers, fill_logprobs(given, numbers, where)


def _refusal(
    held: Ints,
    faults: tuple[int, int, int],
    shared: int,
    lengths: tuple[int, int],
    where: str,
) -> InvalidTurnsError:
    """The error for what `_core.take_call` found."""
    in_prompt, in_output, in_logprobs = faults
    n_new, n_output = lengths
    if in_prompt >= 0:
        name, at, value = "prompt_ids", shared + in_prompt, held[in_prompt]
    elif in_output >= 0:
        name, at, value = "output_ids", in_output, held[n_new + in_output]
    else:
        number = held[n_new + n_output :].view(np.float32)[in_logprobs]
        return InvalidTurnsError(
            f"{where}output_logprobs[{in_logprobs}] is {number}: a log-probability is "
            "finite, above -9999 and at most 0, give or take 1e-4 for rounding"
        )
    return InvalidTurnsError(f"{where}{name}[{at}] is {value}: {ID_RULE}")


def _check_finish_reason(value: object, where: str) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise InvalidTurnsError(f"{where}finish_reason is {value!r}: expected a string")
    check_text(value, f"{where}finish_reason")


def _flag(value: object, name: str, where: str) -> bool | None:
    if value is None:
        return None
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidTurnsError(f"{where}{name} is {value!r}: expected a bool")
    return bool(value)


def _check_tiles(
    pieces: Sequence[Mapping[str, object]], n_output: int, where: str
) -> None:
    """Raise unless the pieces of an output follow one another from 0 to its end."""
    due: object = 0
    for i, piece in enumerate(pieces):
        if piece["version"] is None:
            raise InvalidTurnsError(
                f"{where}weight_versions[{i}] has a null: version, start and stop are "
                "needed"
            )
        start, stop = piece["start"], piece["stop"]
        if start != due or stop < start:  # type: ignore[operator]
            raise InvalidTurnsError(
                f"{where}weight_versions[{i}] is {start}:{stop} where a piece from "
                f"{due} on is due: the pieces tile the output"
            )
        due = stop
    if due != n_output:
        raise InvalidTurnsError(
            f"{where}weight_versions end at {due} of {n_output} output ids: the pieces "
            "tile the output"
        )
