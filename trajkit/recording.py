"""One session under way, in compact form: new tokens and new messages only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit.calls import Ints, Longs, Records
from trajkit.checks import MAX_LOGPROB, NO_LOGPROB
from trajkit.errors import InvalidTurnsError
from trajkit.flat import offsets_of
from trajkit.further import Further
from trajkit.layout import CALL, NODE, longer
from trajkit.messages import check_text
from trajkit.records import message_columns, read_weight_versions
from trajkit.schema import TURNS_DELTA
from trajkit.talk import Talk
from trajkit.unbox import ID_RULE, fill_logprobs, given_logprobs, read_ids

ChatMessage: TypeAlias = dict[str, object] | tuple[bytes, str]
"""A message as a dict, or as its key (`trajkit.message_key`) and its role."""

Floats: TypeAlias = npt.NDArray[np.float32]
_LOWEST, _HIGHEST = float(NO_LOGPROB), float(MAX_LOGPROB)
# Tokens per call: where they bring no more, a copy of the path costs less than the calls'
# own records, and saves looking at one after another.
_SHORT = 16


@dataclass(slots=True)
class Recording:
    """One session under way. Its user takes the lock around every call of a method."""

    name: str
    lock: Lock = field(default_factory=Lock)
    dropped: bool = False
    n_calls: int = 0
    # of each call what no earlier one had, in one piece that never moves: ids of its
    # prompt, its output, and its logprobs, if it has some, of four bytes each
    held: list[bytes] = field(default_factory=list)
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
    # of each call finish_reason, use_tool, ill_formed, trainable and weight_versions
    facts: list[tuple[object, ...]] = field(default_factory=list)
    further: Further = field(default_factory=Further)

    def add(
        self,
        prompt_ids: object,
        output_ids: object,
        output_logprobs: object,
        finish_reason: object,
        ill_formed: object,
        use_tool: object,
        trainable: object,
        prompt_messages: object,
        response_message: object,
        weight_versions: object,
        payloads: object,
    ) -> tuple[int, int, bool]:
        """Take a call in.

        Parameters
        ----------
        prompt_ids, ...
            As for `trajkit.Recorder.record`.

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
        paths, talk = self.paths, self.talk
        try:
            prompt = read_ids(prompt_ids, "", "prompt_ids")
            output = read_ids(output_ids, "", "output_ids")
            logprobs, valid = _read_logprobs(output_logprobs, len(output))
            held = paths.take(prompt, output, logprobs, _LOWEST, _HIGHEST)
            fault = paths.fault
            if fault is not None:
                # the copy was checked, so that what is kept is what was checked
                raise _refusal(held, fault)
            if use_tool is None:
                reply = response_message
                use_tool = isinstance(reply, dict) and bool(reply.get("tool_calls"))
            else:
                use_tool = _flag(use_tool, "use_tool")
            if ill_formed is not None:
                ill_formed = _flag(ill_formed, "ill_formed")
            if trainable is not None:
                trainable = _flag(trainable, "trainable")
            if finish_reason is not None:
                _check_finish_reason(finish_reason)
            if weight_versions is not None:
                weight_versions = read_weight_versions(weight_versions, "")
                _check_tiles(weight_versions, len(output))
            further = None
            if payloads is not None:
                further = self.further.read(payloads, index, "")
            talk.read(prompt_messages, response_message)
        except InvalidTurnsError as error:
            where = f"session {self.name!r}, turn {index}: "
            raise InvalidTurnsError(f"{where}{error}") from None

        if index == len(self.calls):
            self._make_room()
        if len(self.path):
            length = len(prompt) + len(output)
            if length > len(self.path):
                self._hold_path(length)
        self.held.append(held)
        found = paths.insert()
        if valid is not None:
            self.valid[index] = valid
        talk.add(found[0])
        self.facts.append(
            (finish_reason, use_tool, ill_formed, trainable, weight_versions)
        )
        if further is not None:
            self.further.add(further)
        self.n_calls = index + 1
        return found

    def _make_room(self) -> None:
        """Room for an eighth more calls than there are, and some."""
        n = self.n_calls + self.n_calls // 8 + 16
        self.calls = longer(self.calls, n)
        self.nodes = longer(self.nodes, 2 * n + 1)
        self.stack = longer(self.stack, 2 * n + 1)
        self.ends = longer(self.ends, n)
        self.paths.attach(self.calls, self.nodes, self.stack, self.ends)
        self.talk.make_room(n)
        self._hold_path(self.paths.length)

    def _hold_path(self, length: int) -> None:
        """Keep the last call's path of this length in one piece, if calls bring little."""
        kept = length <= _SHORT * len(self.calls)
        self.path = np.empty(length + length // 8 + 16 if kept else 0, np.int32)
        self.paths.hold_path(self.path)

    def turns(self) -> pa.Table:
        """The calls so far: `trajkit.schema.TURNS_DELTA`, and further columns behind.

        Later calls do not change it.
        """
        n_calls = self.n_calls
        calls: Records = self.calls[:n_calls]
        base = calls["base"].copy()
        self.talk.write()
        heard: Records = self.talk.heard[:n_calls]
        messages, response = message_columns(
            self.talk.book,
            self.talk.suffixes(n_calls),
            heard["reply"],
            np.zeros(n_calls, np.int32),
        )
        shared = pa.array(heard["shared"], mask=heard["end"] < 0)
        names = (
            "finish_reason",
            "use_tool",
            "ill_formed",
            "trainable",
            "weight_versions",
        )
        facts = {
            name: pa.array([one[k] for one in self.facts], TURNS_DELTA.field(name).type)
            for k, name in enumerate(names)
        }
        columns = {
            "session_id": pa.repeat(self.name, n_calls),
            "turn_index": pa.array(np.arange(n_calls, dtype=np.int32)),
            "base_turn": pa.array(base, mask=base < 0),
            "shared_length": pa.array(calls["own_start"].astype(np.int32)),
            **self._token_columns(calls),
            "shared_messages": shared,
            "suffix_messages": messages,
            "response": response,
            **facts,
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
        held = [np.frombuffer(one, np.int32) for one in self.held]
        sizes = np.array([len(one) for one in held])
        given = sizes > ends
        n_given = np.where(given, n_out, 0)

        def runs(starts: Longs, stops: Longs) -> Ints:
            bounds = zip(held, starts.tolist(), stops.tolist(), strict=True)
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


def _read_logprobs(
    values: object, n_output: int
) -> tuple[Floats | None, npt.NDArray[np.uint8] | None]:
    """A call's logprobs, not looked at, and where there is one (None: everywhere)."""
    given = given_logprobs(values, n_output, "")
    if given is None:
        return None, None
    if isinstance(given, np.ndarray) and given.dtype == np.float32:
        return np.ascontiguousarray(given), None
    numbers = np.empty(n_output, np.float32)
    return numbers, fill_logprobs(given, numbers, "")


def _refusal(held: bytes, fault: tuple[int, int, int]) -> InvalidTurnsError:
    """The error for what `_core.Growth.fault` found."""
    which, at, place = fault
    if which == 2:
        number = np.frombuffer(held, np.float32)[place]
        return InvalidTurnsError(
            f"output_logprobs[{at}] is {number}: a log-probability is finite, above "
            "-9999 and at most 0, give or take 1e-4 for rounding"
        )
    name = ("prompt_ids", "output_ids")[which]
    value = np.frombuffer(held, np.int32)[place]
    return InvalidTurnsError(f"{name}[{at}] is {value}: {ID_RULE}")


def _check_finish_reason(value: object) -> None:
    if not isinstance(value, str):
        raise InvalidTurnsError(f"finish_reason is {value!r}: expected a string")
    check_text(value, "finish_reason")


def _flag(value: object, name: str) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidTurnsError(f"{name} is {value!r}: expected a bool")
    return bool(value)


def _check_tiles(pieces: Sequence[Mapping[str, object]], n_output: int) -> None:
    """Raise unless the pieces of an output follow one another from 0 to its end."""
    due: object = 0
    for i, piece in enumerate(pieces):
        if piece["version"] is None:
            raise InvalidTurnsError(
                f"weight_versions[{i}] has a null: version, start and stop are needed"
            )
        start, stop = piece["start"], piece["stop"]
        if start != due or stop < start:  # type: ignore[operator]
            raise InvalidTurnsError(
                f"weight_versions[{i}] is {start}:{stop} where a piece from "
                f"{due} on is due: the pieces tile the output"
            )
        due = stop
    if due != n_output:
        raise InvalidTurnsError(
            f"weight_versions end at {due} of {n_output} output ids: the pieces "
            "tile the output"
        )
