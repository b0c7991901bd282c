"""Calls as they come: the online form of a ``turns`` table."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit.calls import Ints, Longs, Records
from trajkit.checks import MAX_LOGPROB, not_logprobs
from trajkit.errors import InvalidTurnsError, UnknownSessionError
from trajkit.layout import CALL, NODE
from trajkit.linearize import linearize
from trajkit.messages import NO_IDS, Ids, MessageBook
from trajkit.policies import Policy
from trajkit.records import message_columns
from trajkit.schema import TURNS_DELTA
from trajkit.unbox import Arena, check_ids, read_ids, write_logprobs


@dataclass(frozen=True, slots=True)
class Recorded:
    """What `Recorder.record` found of a call.

    Attributes
    ----------
    turn_index : int
        Commit order within the session, from 0.
    base_turn : int or None
        An earlier turn whose prompt and output start like this prompt for longest.
        None: no turn shares a token with it.
    shared_length : int
        Tokens that they share at their start.
    clean : bool
        The prompt begins with all of the base's prompt and output, or there is no base.
    """

    turn_index: int
    base_turn: int | None
    shared_length: int
    clean: bool


class Recorder:
    """Sessions under way, each held in compact form: new tokens and new messages only.

    Every method may be called from several threads. Calls of one session are taken one
    after another; `rows` and `turns` see the calls whose `record` had returned when they
    began, and no part of one that is under way.

    Examples
    --------
    >>> recorder = Recorder()
    >>> recorder.record("a", prompt_ids=[1, 2], output_ids=[3]).turn_index
    0
    >>> recorder.record("a", prompt_ids=[1, 2, 3, 4], output_ids=[5]).shared_length
    3
    >>> recorder.rows("a", "strict")["input_ids"].to_pylist()
    [[1, 2, 3, 4, 5]]
    """

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._lock = Lock()

    def record(
        self,
        session_id: str,
        *,
        prompt_ids: object,
        output_ids: object,
        output_logprobs: object = None,
        finish_reason: str | None = None,
        ill_formed: bool | None = None,
        use_tool: bool | None = None,
        trainable: bool | None = None,
        prompt_messages: Sequence[dict[str, object]] | None = None,
        response_message: dict[str, object] | None = None,
    ) -> Recorded:
        """Take one call into its session; a session begins with its first call.

        Parameters
        ----------
        session_id : str
        prompt_ids, output_ids : ints in [0, 2**31)
            A list, or a one-dimensional array or buffer of integers. An int32 array is
            compared where it lies; only what is new of it is copied.
        output_logprobs : floats, one per output id, optional
            None or empty: the engine gave none. An element None: none for that token.
        finish_reason : str, optional
            The engine's own word.
        ill_formed, trainable : bool, optional
        use_tool : bool, optional
            None: whether ``response_message`` has ``tool_calls``.
        prompt_messages : sequence of dict, optional
            The request's chat messages. None: the call is routed by tokens.
        response_message : dict, optional
            The reply as the next request is expected to echo it.

        Returns
        -------
        Recorded

        Raises
        ------
        InvalidTurnsError
            A value breaks a rule of the schema; the session is as it was before.
        UnknownSessionError
            The session was dropped while this call was under way.
        """
        session = self._session(session_id)
        with session.lock:
            if session.dropped:
                raise UnknownSessionError(
                    f"session {session_id!r} was dropped while a call was under way"
                )
            return session.add(
                prompt_ids,
                output_ids,
                output_logprobs,
                prompt_messages,
                response_message,
                finish_reason=finish_reason,
                ill_formed=ill_formed,
                use_tool=use_tool,
                trainable=trainable,
            )

    def turns(self, session_id: str) -> pa.Table:
        """The session's calls so far, as `trajkit.schema.TURNS_DELTA`.

        Raises
        ------
        UnknownSessionError
            Nothing was recorded under that id, or it was dropped.
        """
        session = self._known(session_id)
        with session.lock:
            return session.turns()

    def rows(
        self,
        session_id: str,
        policy: str | Policy,
        *,
        reward: float | None = None,
        max_row_tokens: int | None = None,
    ) -> pa.Table:
        """The session's training rows so far: `trajkit.linearize` of its `turns`.

        Raises
        ------
        UnknownSessionError
            Nothing was recorded under that id, or it was dropped.
        """
        turns = self.turns(session_id)
        return linearize(turns, policy, reward=reward, max_row_tokens=max_row_tokens)

    def drop(self, session_id: str) -> None:
        """Forget a session. What `turns` gave of it stays valid.

        Raises
        ------
        UnknownSessionError
            Nothing was recorded under that id, or it was dropped.
        """
        with self._lock:
            session = self._sessions.pop(session_id, None)
        if session is None:
            raise _unknown(session_id)
        with session.lock:
            session.dropped = True

    @property
    def sessions(self) -> list[str]:
        """Ids of the sessions that have a call, in order of their first."""
        with self._lock:
            return [name for name, one in self._sessions.items() if one.n_calls]

    def _session(self, session_id: str) -> "_Session":
        if not isinstance(session_id, str):
            raise InvalidTurnsError(f"session_id is {session_id!r}: expected a string")
        with self._lock:
            session = self._sessions.get(session_id)
            if session is None:
                session = self._sessions[session_id] = _Session(session_id)
            return session

    def _known(self, session_id: str) -> "_Session":
        with self._lock:
            session = self._sessions.get(session_id)
        if session is None or not session.n_calls:
            raise _unknown(session_id)
        return session


def _unknown(session_id: str) -> UnknownSessionError:
    return UnknownSessionError(f"session {session_id!r}: nothing is recorded of it")


class _Growing:
    """A numpy array that grows at its end; its head never changes under a reader."""

    def __init__(self, dtype: npt.DTypeLike, size: int = 0) -> None:
        self._array = np.empty(max(size, 16), dtype)
        self.used = size

    def head(self, size: int) -> npt.NDArray[np.generic]:
        """The first ``size`` items, room made for them; new ones are undefined."""
        if size > len(self._array):
            # an eighth more than is needed: memory stays near what is held, and each item
            # is moved nine times at most
            grown = np.empty(size + size // 8 + 16, self._array.dtype)
            grown[: self.used] = self._array[: self.used]
            self._array = grown
        return self._array[:size]

    def keep(self, size: int) -> None:
        """Say that the first ``size`` items are in use."""
        self.used = size


@dataclass(slots=True)
class _Messages:
    """The chat messages of one call, as ids of the session's message book."""

    # None: the call has no list of messages
    suffix: Ids | None
    # how many the base supplies before them
    shared: int
    # -1: no response
    response: int


@dataclass(slots=True)
class _Session:
    name: str
    lock: Lock = field(default_factory=Lock)
    dropped: bool = False
    n_calls: int = 0
    # token ids and logprobs that no earlier call had; runs never move once written
    suffixes: Arena = field(default_factory=lambda: Arena(np.int32))
    outputs: Arena = field(default_factory=lambda: Arena(np.int32))
    logprobs: Arena = field(default_factory=lambda: Arena(np.float32))
    # the forest of paths (trajkit.forest), grown call by call
    calls: _Growing = field(default_factory=lambda: _Growing(CALL))
    nodes: _Growing = field(default_factory=lambda: _Growing(NODE))
    ends: _Growing = field(default_factory=lambda: _Growing(np.int32))
    path: _Growing = field(default_factory=lambda: _Growing(np.int32))
    stack: _Growing = field(default_factory=lambda: _Growing(np.int32))
    state: Longs = field(default_factory=lambda: np.zeros(3, np.int64))
    book: MessageBook = field(default_factory=MessageBook)
    messages: list[_Messages] = field(default_factory=list)
    # the last call with a list of messages, and all their ids
    last_messages: tuple[int, Ids] = (-1, NO_IDS)
    finish_reasons: list[str | None] = field(default_factory=list)
    flags: dict[str, list[bool | None]] = field(
        default_factory=lambda: {"use_tool": [], "ill_formed": [], "trainable": []}
    )

    def add(
        self,
        prompt_ids: object,
        output_ids: object,
        output_logprobs: object,
        prompt_messages: Sequence[dict[str, object]] | None,
        response_message: dict[str, object] | None,
        *,
        finish_reason: str | None,
        **flags: bool | None,
    ) -> Recorded:
        # What can be refused is, before anything of the session changes.
        index = self.n_calls
        where = f"session {self.name!r}, turn {index}: "
        prompt = read_ids(prompt_ids, where, "prompt_ids")
        output = read_ids(output_ids, where, "output_ids")
        known = self._known_head(prompt)
        check_ids(prompt[known:], known, where, "prompt_ids")
        check_ids(output, 0, where, "output_ids")
        _check_logprobs(output_logprobs, len(output), where)
        messages, response = self._read_messages(
            prompt_messages, response_message, where
        )
        if flags["use_tool"] is None:
            flags["use_tool"] = bool(response_message and response_message.get("tool_calls"))

        self.outputs.run(len(output))[:] = output
        write_logprobs(self.logprobs, output_logprobs, len(output), where)
        calls = self.calls.head(index + 1)
        call = calls[index : index + 1]
        call["own"] = _address(prompt[known:])
        call["own_start"] = known
        call["prompt_len"] = len(prompt)
        call["out"] = _address(self.outputs.last())
        call["out_len"] = len(output)
        call["base"] = index - 1 if known else -1
        base, shared = self._grow(calls)
        new = prompt[shared:]
        self.suffixes.run(len(new))[:] = new
        call["own"] = _address(self.suffixes.last())
        call["own_start"] = shared
        call["base"] = base
        self._add_messages(index, base, messages, response)
        self.finish_reasons.append(finish_reason)
        for name, value in flags.items():
            self.flags[name].append(value)
        self.calls.keep(index + 1)
        self.n_calls = index + 1
        return Recorded(
            index,
            None if base < 0 else base,
            shared,
            base < 0 or shared == self._held(base),
        )

    def _held(self, index: int) -> int:
        call = self.calls.head(self.n_calls)[index]
        return int(call["prompt_len"] + call["out_len"])

    def _known_head(self, prompt: Ints) -> int:
        """Tokens that the prompt shares with the path of the call before."""
        if not self.n_calls:
            return 0
        return _core.lcp(prompt, self.path.head(self._held(self.n_calls - 1)))

    def _grow(self, calls: Records) -> tuple[int, int]:
        """Insert the last call; a call that its prompt starts like, and how far."""
        n_calls = len(calls)
        held = int(calls[-1]["prompt_len"] + calls[-1]["out_len"])
        shared, shared_with = np.empty(n_calls, np.int64), np.empty(n_calls, np.int32)
        longest = max(held, self.path.used)
        _core.grow_forest(
            calls,
            np.array([0, n_calls]),
            self.path.head(longest),
            self.stack.head(2 * n_calls + 1),
            self.nodes.head(2 * n_calls + 1),
            self.ends.head(n_calls),
            shared,
            shared_with,
            self.state,
            n_calls - 1,
        )
        self.path.keep(longest)
        self.stack.keep(2 * n_calls + 1)
        self.nodes.keep(2 * n_calls + 1)
        self.ends.keep(n_calls)
        length = min(int(shared[-1]), int(calls[-1]["prompt_len"]))
        return (int(shared_with[-1]) if length else -1), length

    def _read_messages(
        self,
        messages: Sequence[dict[str, object]] | None,
        response: dict[str, object] | None,
        where: str,
    ) -> tuple[Ids | None, int]:
        """The ids of a call's messages (None: it has no list) and reply (-1: none)."""
        ids = None
        if messages is not None:
            if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
                raise InvalidTurnsError(
                    f"{where}prompt_messages is of type {type(messages).__name__}: "
                    "expected a list of dicts"
                )
            # Never compared with the objects of an earlier call: the caller may have
            # changed those in place.
            ids = self.book.add_all(messages, (), NO_IDS, f"{where}prompt_messages")
        if response is None:
            return ids, -1
        return ids, self.book.add(response, f"{where}response_message")

    def _add_messages(
        self, index: int, base: int, messages: Ids | None, response: int
    ) -> None:
        shared = 0
        if messages is not None and base >= 0:
            shared = _core.lcp(messages, self._shown(base))
        suffix = None if messages is None else messages[shared:].copy()
        self.messages.append(_Messages(suffix, shared, response))
        if messages is not None:
            self.last_messages = (index, messages)

    def _shown(self, index: int) -> Ids:
        """Ids of a call's messages and its reply: what a next request may repeat."""
        said = self.messages[index]
        if said.suffix is None:
            return NO_IDS
        reply = [said.response] if said.response >= 0 else []
        return np.concatenate([self._full(index), np.array(reply, np.int32)])

    def _full(self, index: int) -> Ids:
        """Ids of all messages of a call."""
        parts: list[Ids] = []
        length = -1
        bases = self.calls.head(self.n_calls)["base"]
        while True:
            known, messages = self.last_messages
            said = self.messages[index]
            own = NO_IDS if said.suffix is None else said.suffix
            if index == known:
                parts.append(messages[: length if length >= 0 else None])
                break
            if said.response >= 0 and length > said.shared + len(own):
                own = np.append(own, np.int32(said.response))
            if length >= 0:
                own = own[: max(length - said.shared, 0)]
            parts.append(own)
            if said.shared == 0:
                break
            length = said.shared if length < 0 else min(length, said.shared)
            index = int(bases[index])
        return np.concatenate(parts[::-1])

    def turns(self) -> pa.Table:
        calls = self.calls.head(self.n_calls)
        base = calls["base"]
        said = self.messages
        suffixes = [one.suffix for one in said]
        silent = np.array([one is None for one in suffixes], np.bool_)
        messages, response = message_columns(
            self.book,
            suffixes,
            np.array([one.response for one in said], np.int32),
            np.zeros(len(said), np.int32),
        )
        shared = np.array([one.shared for one in said], np.int32)
        columns = {
            "session_id": pa.repeat(self.name, len(said)),
            "turn_index": pa.array(np.arange(len(said), dtype=np.int32)),
            "base_turn": pa.array(base.copy(), mask=base < 0),
            "shared_length": pa.array(calls["own_start"].astype(np.int32)),
            "suffix_ids": self.suffixes.lists(),
            "output_ids": self.outputs.lists(),
            "output_logprobs": self.logprobs.lists(),
            "finish_reason": pa.array(self.finish_reasons, pa.string()),
            "shared_messages": pa.array(shared, mask=silent),
            "suffix_messages": messages,
            "response": response,
            **{name: pa.array(flags, pa.bool_()) for name, flags in self.flags.items()},
            "weight_versions": pa.nulls(
                len(said), TURNS_DELTA.field("weight_versions").type
            ),
        }
        return pa.Table.from_arrays(
            [columns[name] for name in TURNS_DELTA.names], schema=TURNS_DELTA
        )


def _check_logprobs(values: object, n_outputs: int, where: str) -> None:
    arena = Arena(np.float32)
    write_logprobs(arena, values, n_outputs, where)
    logprobs = arena.last()
    bad = not_logprobs(logprobs) | (logprobs > MAX_LOGPROB)
    if bad.any():
        at = int(bad.argmax())
        raise InvalidTurnsError(
            f"{where}output_logprobs[{at}] is {logprobs[at]}: a log-probability is finite, "
            "above -9999 and at most 0, give or take 1e-4 for rounding"
        )


def _address(array: npt.NDArray[np.generic]) -> int:
    return int(array.__array_interface__["data"][0])
