"""The message that each prompt token renders, from the optional columns of turns.

`trajkit.schema.ATTRIBUTION` defines the columns. Calls are read on request, without
Python code per token.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from trajkit.schema import ATTRIBUTION, KEY_BYTES
from trajkit.schema.engine import field_of
from trajkit.tables.canonical import canonical
from trajkit.tables.ragged import Array, Bools, combined
from trajkit.tables.ragged import Ints as Ints
from trajkit.turns.messages import KEY_TOKENS, grow_messages, tool_calls_of
from trajkit.turns.sessions import Sessions


@dataclass(frozen=True, slots=True)
class Messages:
    """The roles of a request's chat messages, and their concatenated keys."""

    keys: bytes
    roles: list[str]

    def __len__(self) -> int:
        return len(self.roles)

    def key(self, i: int) -> bytes:
        return self.keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]

    def continues(self, other: "Messages") -> bool:
        return self.keys.startswith(other.keys)


@dataclass(frozen=True, slots=True)
class Rendered:
    """The messages that the prompt tokens of one call render."""

    # index of the message in the request; negative: none
    message: Ints
    is_content: Bools
    # the message of the request that index 0 of ``message`` is
    first: int
    # tool names of the messages from ``first``; None: take them from the bodies
    names: list[str | None] | None


class SessionCalls:
    """The calls of one session, with their attribution."""

    def __init__(self, calls: Sessions) -> None:
        self.table = canonical(calls.table, ATTRIBUTION).combine_chunks()
        self.turn_index, self.path_len = calls.turn_index, calls.path_len
        self.n_prompt = calls.calls["prompt_len"]
        self.prompt, self.path = calls.prompt, calls.path
        self._stored = combined(calls.stored_messages)
        self._calls, self._forest = calls, grow_messages(calls)
        self._messages: dict[int, Messages | None] = {}
        self._parsed: dict[bytes, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self.turn_index)

    def messages(self, call: int) -> Messages | None:
        """The messages of the request; None if they are unknown or there are none."""
        if call not in self._messages:
            request = self._calls.requests[call]
            n = int(request["shared"]) + int(request["n_keys"])
            keys = self._forest.ids(call, 0, KEY_TOKENS * max(n, 0)).tobytes()
            each = (keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))
            roles = [*map(self._roles.__getitem__, each)]
            self._messages[call] = Messages(keys, roles) if roles else None
        return self._messages[call]

    @cached_property
    def _roles(self) -> dict[bytes, str]:
        """The role of each message of the session, by key."""
        replies = combined(self.table.column("response")).drop_null()
        both = pa.concat_arrays([self._stored.flatten(), replies])
        keys, roles = (field_of(both, one).to_pylist() for one in ("key", "role"))
        return dict(zip(keys, roles, strict=True))

    @cached_property
    def _repliers(self) -> dict[bytes, list[int]]:
        """The calls with each recorded reply, by key."""
        found: dict[bytes, list[int]] = {}
        keys = field_of(combined(self.table.column("response")), "key").to_pylist()
        for call, key in enumerate(keys):
            if key is not None:
                found.setdefault(key, []).append(call)
        return found

    @cached_property
    def replies(self) -> dict[bytes, int]:
        """The first call with each recorded reply, by key."""
        return {key: calls[0] for key, calls in self._repliers.items()}

    @cached_property
    def bodies(self) -> dict[bytes, str]:
        """The body of each message of the session, by key."""
        found: dict[bytes, str] = {}
        replies = combined(self.table.column("response"))
        for messages in (self._stored.flatten(), replies):
            shown = messages.filter(field_of(messages, "body").is_valid())
            for message in shown.to_pylist():
                found.setdefault(message["key"], message["body"])
        return found

    def rendered(self, call: int) -> Rendered:
        """What the prompt tokens of a call without a `gap` render."""
        message = self._per_token("prompt_message_index", call, -1)
        is_content = self._per_token("prompt_is_content", call, False)
        names, messages = self._names(call), self.messages(call) or ()
        first = 0 if names is None else len(messages) - len(names)
        return Rendered(message, is_content, first, names)

    def gap(self, call: int) -> str | None:
        """What the attribution of a call lacks."""
        fault = self._length_fault(call)
        names, messages = self._names(call), self.messages(call)
        if fault is not None or messages is None:
            return fault or "there are no messages"
        n_messages = len(messages)
        n_known = n_messages if names is None else len(names)
        if n_known > n_messages:
            return f"{n_known} message_tool_names for {n_messages} messages"
        index = self._per_token("prompt_message_index", call, -1)
        highest = int(index.max(initial=-1))
        if highest >= n_known:
            what = "messages" if names is None else "message_tool_names"
            return f"prompt_message_index {highest} of {n_known} {what}"
        n_before = n_messages - n_known
        # where the first token has a message, no tokens before are left to other turns
        begins = (index[:1] >= 0).any()
        if n_before and not begins and not self._is_known(messages, n_before):
            return (
                f"the first {n_before} of {n_messages} messages are attributed by a turn "
                "that is not in the table"
            )
        return None

    def _is_known(self, messages: Messages, n: int) -> bool:
        """Whether the first messages are those of another call and its reply.

        If they end with no reply, no call is missing: nobody attributed them.
        """
        if messages.roles[n - 1] != "assistant":
            return True
        head, reply = messages.keys[: (n - 1) * KEY_BYTES], messages.key(n - 1)
        earlier = (self.messages(call) for call in self._repliers.get(reply, ()))
        return any(head == (b"" if one is None else one.keys) for one in earlier)

    def _length_fault(self, call: int) -> str | None:
        names, n = ("prompt_message_index", "prompt_is_content"), self.n_prompt[call]
        lists = {name: self.table.column(name)[call].values for name in names}
        for name, values in lists.items():
            if values is None:
                return f"{name} is null"
            if len(values) > n:
                return f"{len(values)} values of {name} for {n} prompt ids"
        index, content = map(len, lists.values())
        if index != content:
            return f"{content} values of {names[1]} and {index} of {names[0]}"
        return None

    def _per_token(self, name: str, call: int, missing: int) -> Array:
        """The values of a list for all prompt tokens, also the first, which it may lack."""
        values, n = self.table.column(name)[call].values, int(self.n_prompt[call])
        if values is None:
            return np.full(n, missing)
        values = values.fill_null(missing)
        padding = n - len(values)
        return np.pad(np.asarray(values), (padding, 0), constant_values=missing)

    def _names(self, call: int) -> list[str | None] | None:
        names: list[str | None] | None
        names = self.table.column("message_tool_names")[call].as_py()
        return names

    def answered(self, messages: Messages, i: int) -> tuple[str | None, str | None]:
        """The id and the name of the tool call that message i answers, in its body and
        earlier ones; None for what is unknown.

        Its name is the message's own, else that of the nearest earlier call with its id.
        """
        body = self._body(messages.key(i))
        call_id, name = body.get("tool_call_id"), body.get("name")
        if not isinstance(call_id, str):
            call_id = None
        if isinstance(name, str) and name:
            return call_id, name
        for before in range(i - 1, -1, -1):
            if call_id is not None and messages.roles[before] == "assistant":
                for found, one in tool_calls_of(self._body(messages.key(before))):
                    if one == call_id and isinstance(found, str):
                        return call_id, found
        return call_id, None

    def _body(self, key: bytes) -> dict[str, Any]:
        if key not in self._parsed:
            self._parsed[key] = json.loads(self.bodies.get(key, "{}"))
        return self._parsed[key]
