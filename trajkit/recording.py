"""One session under way, in compact form: new tokens and new messages only."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit.calls import Ints, Longs, Records
from trajkit.checks import MAX_LOGPROB, NO_LOGPROB, not_logprobs
from trajkit.errors import InvalidTurnsError
from trajkit.layout import CALL, NODE
from trajkit.messages import NO_IDS, Ids, MessageBook, check_text
from trajkit.records import message_columns
from trajkit.schema import TURNS_DELTA
from trajkit.unbox import (
    Arena,
    check_ids,
    fill_logprobs,
    given_logprobs,
    read_ids,
)

_Item = TypeVar("_Item", bound=np.generic)

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Said:
    """What a call says of itself beside its tokens and logprobs, as it was given."""

    prompt_messages: Sequence[dict[str, object]] | None
    response_message: dict[str, object] | None
    finish_reason: str | None
    use_tool: bool | None
    ill_formed: bool | None
    trainable: bool | None


class Growing(Generic[_Item]):
    """A numpy array that grows at its end."""

    def __init__(self, dtype: np.dtype[_Item]) -> None:
        self.array = np.empty(16, dtype)

    def reserve(self, size: int, used: int) -> npt.NDArray[_Item]:
        """The array, with room for ``size`` items; the first ``used`` stay."""
        if size > len(self.array):
            # an eighth more than is needed: memory stays near what is held, and each
            # item is moved nine times at most
            grown = np.empty(size + size // 8 + 16, self.array.dtype)
            grown[:used] = self.array[:used]
            self.array = grown
        return self.array


class MessageLists:
    """Lists of messages as paths of a tree, so that their common heads are one.

    A node stands for the list that its path spells; node 0 for the empty list.
    """

    def __init__(self) -> None:
        self._parents = [-1]
        self._depths = [0]
        self._children: dict[tuple[int, int], int] = {}

    def add(self, node: int, message: int) -> int:
        """The node of a node's list and one message more."""
        child = self._children.get((node, message))
        if child is None:
            child = self._children[node, message] = len(self._parents)
            self._parents.append(node)
            self._depths.append(self._depths[node] + 1)
        return child

    def shared(self, nodes: list[int], node: int) -> int:
        """How many messages two lists have in common at their start.

        ``nodes[n]`` is the node of the first n messages of one, ``node`` that of the
        other.
        """
        while (depth := self._depths[node]) >= len(nodes) or nodes[depth] != node:
            node = self._parents[node]
        return depth


@dataclass(slots=True)
class Recording:
    """One session under way. Its user takes the lock around every call of a method."""

    name: str
    lock: Lock = field(default_factory=Lock)
    dropped: bool = False
    n_calls: int = 0
    # token ids and logprobs that no earlier call had; runs never move once written
    suffixes: Arena[np.int32] = field(default_factory=lambda: Arena(np.int32))
    outputs: Arena[np.int32] = field(default_factory=lambda: Arena(np.int32))
    logprobs: Arena[np.float32] = field(default_factory=lambda: Arena(np.float32))
    # the forest of paths (trajkit.forest), grown call by call
    calls: Growing[np.void] = field(default_factory=lambda: Growing(CALL))
    nodes: Growing[np.void] = field(default_factory=lambda: Growing(NODE))
    ends: Growing[np.int32] = field(default_factory=lambda: Growing(_INT32))
    shared: Growing[np.int64] = field(default_factory=lambda: Growing(_INT64))
    shared_with: Growing[np.int32] = field(default_factory=lambda: Growing(_INT32))
    path: Growing[np.int32] = field(default_factory=lambda: Growing(_INT32))
    stack: Growing[np.int32] = field(default_factory=lambda: Growing(_INT32))
    state: Longs = field(default_factory=lambda: np.zeros(3, np.int64))
    # tokens of each call's prompt and output
    held: list[int] = field(default_factory=list)
    book: MessageBook = field(default_factory=MessageBook)
    lists: MessageLists = field(default_factory=MessageLists)
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

    def add(
        self,
        prompt_ids: object,
        output_ids: object,
        output_logprobs: object,
        said: Said,
    ) -> tuple[int, int]:
        """Take a call in; the call that its prompt starts like (or -1), and how far.

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
        known = self._known_head(prompt)
        # Copies are checked, so that what is kept is what was checked.
        new = self.suffixes.space(len(prompt) - known)
        new[:] = prompt[known:]
        check_ids(new, known, where, "prompt_ids")
        out = self.outputs.space(len(output))
        out[:] = output
        check_ids(out, 0, where, "output_ids")
        logprobs = given_logprobs(output_logprobs, len(output), where)
        valid = None
        if logprobs is not None:
            numbers = self.logprobs.space(len(output))
            valid = fill_logprobs(logprobs, numbers, where)
            _check_logprobs(numbers, where)
        messages, response = self._read_messages(said, where)
        use_tool = _flag(said.use_tool, "use_tool", where)
        if use_tool is None:
            reply = said.response_message
            use_tool = reply is not None and bool(reply.get("tool_calls"))
        ill_formed = _flag(said.ill_formed, "ill_formed", where)
        trainable = _flag(said.trainable, "trainable", where)
        _check_finish_reason(said.finish_reason, where)
        base, shared = self._grow(len(prompt), known, len(output))

        if shared > known:
            new[: len(prompt) - shared] = new[shared - known :]
        self.suffixes.run(len(prompt) - shared)
        self.outputs.run(len(output))
        if logprobs is None:
            self.logprobs.no_run()
        else:
            self.logprobs.run(len(output))
            if valid is not None:
                self.logprobs.null_values(valid)
        self._add_messages(base, messages, response)
        self.finish_reasons.append(said.finish_reason)
        self.use_tool.append(use_tool)
        self.ill_formed.append(ill_formed)
        self.trainable.append(trainable)
        self.held.append(len(prompt) + len(output))
        self.n_calls = index + 1
        return base, shared

    def _known_head(self, prompt: Ints) -> int:
        """Tokens that the prompt shares with the path of the call before."""
        if not self.held:
            return 0
        return _core.lcp(prompt, self.path.array[: self.held[-1]])

    def _grow(self, prompt_len: int, known: int, out_len: int) -> tuple[int, int]:
        """Insert the call whose new tokens stand in the arenas' space.

        Returns a call that its prompt starts like, or -1, and how far.
        """
        index = self.n_calls
        n_calls = index + 1
        held = prompt_len + out_len
        calls = self.calls.reserve(n_calls, index)[:n_calls]
        own, out = self.suffixes.address(), self.outputs.address()
        base = index - 1 if known else -1
        calls[index] = _call(own, known, prompt_len, out, out_len, base)
        path = self.path.reserve(held, self.held[-1] if self.held else 0)
        nodes = self.nodes.reserve(2 * n_calls + 1, 2 * index + 1)
        _core.grow_forest(
            calls,
            np.array([0, n_calls]),
            path,
            self.stack.reserve(2 * n_calls + 1, 2 * index + 1),
            nodes,
            self.ends.reserve(n_calls, index),
            self.shared.reserve(n_calls, index),
            self.shared_with.reserve(n_calls, index),
            self.state,
            index,
        )
        # The forest may know more of the prompt than the call before had, and that the
        # prompt goes on like an output as far as it goes.
        shared = min(int(self.shared.array[index]), prompt_len)
        base = int(self.shared_with.array[index]) if shared else -1
        calls[index] = _call(own, shared, prompt_len, out, out_len, base)
        return base, shared

    def _read_messages(self, said: Said, where: str) -> tuple[Ids | None, int]:
        """The ids of a call's messages (None: it has no list) and reply (-1: none)."""
        ids = None
        messages, response = said.prompt_messages, said.response_message
        if messages is not None:
            if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
                raise InvalidTurnsError(
                    f"{where}prompt_messages is of type {type(messages).__name__}: "
                    "expected a list of dicts"
                )
            # Never compared with the objects of an earlier call: the caller may have
            # changed those in place.
            what = f"{where}prompt_messages"
            ids = self.book.add_all(list(messages), (), NO_IDS, what)
        if response is None:
            return ids, -1
        return ids, self.book.add(response, f"{where}response_message")

    def _add_messages(self, base: int, messages: Ids | None, response: int) -> None:
        shared, shown = 0, -1
        if messages is not None:
            nodes = [0]
            for message in messages.tolist():
                nodes.append(self.lists.add(nodes[-1], message))
            if base >= 0 and self.shown[base] >= 0:
                shared = self.lists.shared(nodes, self.shown[base])
            shown = nodes[-1]
            if response >= 0:
                shown = self.lists.add(shown, response)
            messages = messages[shared:].copy()
        self.shown.append(shown)
        self.shared_messages.append(shared)
        self.messages.append(messages)
        self.responses.append(response)

    def turns(self) -> pa.Table:
        """The calls so far, as `trajkit.schema.TURNS_DELTA`.

        Later calls do not change it, though it shares memory with the session.
        """
        n_calls = self.n_calls
        calls: Records = self.calls.array[:n_calls]
        base = calls["base"].copy()
        silent = np.array([one is None for one in self.messages], np.bool_)
        messages, response = message_columns(
            self.book,
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
            "suffix_ids": self.suffixes.lists(),
            "output_ids": self.outputs.lists(),
            "output_logprobs": self.logprobs.lists(),
            "finish_reason": pa.array(self.finish_reasons, pa.string()),
            "shared_messages": pa.array(shared, mask=silent),
            "suffix_messages": messages,
            "response": response,
            "use_tool": pa.array(self.use_tool, pa.bool_()),
            "ill_formed": pa.array(self.ill_formed, pa.bool_()),
            "trainable": pa.array(self.trainable, pa.bool_()),
            "weight_versions": pa.nulls(
                n_calls, TURNS_DELTA.field("weight_versions").type
            ),
        }
        return pa.Table.from_arrays(
            [columns[name] for name in TURNS_DELTA.names], schema=TURNS_DELTA
        )


def _call(
    own: int, own_start: int, prompt_len: int, out: int, out_len: int, base: int
) -> tuple[int, ...]:
    """A record of dtype CALL: the call's path, and nothing of its logprobs and flags.

    ``own`` is where the prompt's new ids stand, or those from ``own_start`` on will.
    """
    return own, own_start, prompt_len, out, out_len, 0, 0, 0, base, 0, 0, 0, 0


def _check_logprobs(numbers: npt.NDArray[np.float32], where: str) -> None:
    # false where one of them is NaN
    if numbers.min() > NO_LOGPROB and numbers.max() <= MAX_LOGPROB:
        return
    at = int((not_logprobs(numbers) | (numbers > MAX_LOGPROB)).argmax())
    raise InvalidTurnsError(
        f"{where}output_logprobs[{at}] is {numbers[at]}: a log-probability is finite, "
        "above -9999 and at most 0, give or take 1e-4 for rounding"
    )


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
