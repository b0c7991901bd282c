"""Chat messages: canonical JSON, 128-bit keys, and storage of distinct messages.

Two messages have the same key exactly when their canonical JSON is the same: key order
does not matter, list order does, a missing key is not a null, and 1, 1.0, true and "1"
differ. NaN equals NaN, as ``json.loads`` makes it. So a key has exactly one body.

The first `VALUE_BYTES` of two keys are the same exactly when Python calls the messages
equal (1 == 1.0 == True). The other bytes are zero unless a number can be written in a
simpler type.
"""

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit.errors import ArgumentError, InvalidTurnsError
from trajkit.schema import KEY_BYTES, MESSAGE, VALUE_BYTES

Ids = npt.NDArray[np.int32]

NO_IDS: Ids = np.empty(0, np.int32)


def message_key(message: dict[str, object]) -> bytes:
    """The 16-byte key of a chat message: the same for messages of the same JSON.

    The first 12 bytes are the same for messages that are ``==``, such as those that
    differ in ``1`` and ``1.0`` alone.

    Parameters
    ----------
    message : dict
        Of JSON values throughout.

    Returns
    -------
    bytes

    Raises
    ------
    InvalidTurnsError
        As for `message_record`.
    """
    return message_record(message)[0]


def tools_key(tools: list[dict[str, object]]) -> str:
    """The key of the tools that a request offers: the same for tools of the same JSON.

    It is that of the columns `trajkit.schema.ROUTING`. A null is the same as a missing
    field, as in verifiers
    (https://github.com/PrimeIntellect-ai/verifiers/blob/v0.4.0/verifiers/v1/graph.py).

    Parameters
    ----------
    tools : list of dict
        Of JSON values throughout; empty for a request without tools.

    Returns
    -------
    str

    Raises
    ------
    InvalidTurnsError
        As for `message_record`.
    """
    try:
        return message_key({"tools": _without_nulls(tools)}).hex()
    except RecursionError:
        raise InvalidTurnsError("tools are nested too deep for a key") from None


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    return value


def message_body(message: dict[str, object]) -> str:
    """Canonical JSON: keys sorted, no white space, numbers as they are, valid UTF-8.

    Two lone surrogates side by side are written as the pair that they look like; their
    key is still their own.

    Parameters
    ----------
    message : dict
        Of JSON values throughout.

    Returns
    -------
    str

    Raises
    ------
    InvalidTurnsError
        As for `message_record`.
    """
    return _encoded(message)[0]


def message_record(message: dict[str, object]) -> tuple[bytes, str]:
    """The key and the body of a chat message, read once.

    Parameters
    ----------
    message : dict
        Of JSON values throughout.

    Returns
    -------
    tuple of bytes and str
        What `message_key` and `message_body` give.

    Raises
    ------
    InvalidTurnsError
        The message contains a value that JSON cannot express; the text names its path.
    """
    body, value_text = _encoded(message)
    return _key(body, value_text), body


def _encoded(message: object) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise ArgumentError(
            f"message is of type {type(message).__name__}: expected a dict"
        )
    return _core.encode_message(message)


def _key(body: str, value_text: str) -> bytes:
    rest = KEY_BYTES - VALUE_BYTES
    spelling = bytes(rest) if body == value_text else _digest(body, rest)
    return _digest(value_text, VALUE_BYTES) + spelling


def _digest(text: str, size: int) -> bytes:
    return blake2b(text.encode(), digest_size=size).digest()


class Encoded(NamedTuple):
    """A message as a table stores it."""

    key: bytes
    role: str
    # None: only the key is known
    body: str | None


@dataclass(slots=True)
class MessageBook:
    """Every distinct message of some calls, under a small id, in order of arrival."""

    keys: list[bytes] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    bodies: list[str | None] = field(default_factory=list)
    _by_name: dict[tuple[bytes, str], int] = field(default_factory=dict)

    def find(self, message: Encoded) -> int:
        """The id of a message; -1 if it, or its body, is new."""
        known = self._by_name.get((message.key, message.role), -1)
        has_body = known >= 0 and self.bodies[known] is not None
        return known if has_body or message.body is None else -1

    def add(self, message: Encoded) -> int:
        """The id of a message; one with a body replaces one without."""
        number = self.find(message)
        if number < 0:
            number = self._by_name[message.key, message.role] = len(self.bodies)
            self.keys.append(message.key)
            self.roles.append(message.role)
            self.bodies.append(message.body)
        return number

    def shown(self, ids: Ids, sessions: Ids) -> npt.NDArray[np.bool_]:
        """Whether each message is the first occurrence in its session, which has the body.

        Messages are in the order of their sessions (prompt, reply, next prompt, ...).
        """
        messages = pa.array(sessions * np.int64(len(self.bodies)) + ids)
        # numbered in order of appearance, so a new one exceeds all before it
        numbers = messages.dictionary_encode().indices.to_numpy()
        new: npt.NDArray[np.bool_] = (
            np.diff(np.maximum.accumulate(numbers), prepend=-1) > 0
        )
        return new

    def array(self, ids: Ids, shown: npt.NDArray[np.bool_]) -> pa.StructArray:
        """The messages as the schema's struct: null for -1, a body only where shown."""
        # an id of -1 takes the last key
        keys = np.frombuffer(b"".join(self.keys) + bytes(KEY_BYTES), f"V{KEY_BYTES}")
        absent = ids < 0
        mask = pa.array(absent) if absent.any() else None
        return pa.StructArray.from_arrays(
            [
                pa.Array.from_buffers(
                    pa.binary(KEY_BYTES), len(ids), [None, pa.py_buffer(keys[ids])]
                ),
                pa.array(self.roles, pa.string()).take(pa.array(ids, mask=absent)),
                pa.array(self.bodies, pa.string()).take(pa.array(ids, mask=~shown)),
            ],
            fields=list(MESSAGE),
            mask=mask,
        )


def encode(message: object, where: str) -> Encoded:
    """A chat message with its key and body; ``where`` is its name in error texts.

    Raises `InvalidTurnsError` if it is no dict with a ``role``, or is not all JSON.
    """
    if not isinstance(message, dict):
        raise InvalidTurnsError(
            f"{where} is of type {type(message).__name__}: expected a dict"
        )
    role = message.get("role")
    if not isinstance(role, str):
        said = f"the role {role!r}" if "role" in message else "no role"
        raise InvalidTurnsError(f"{where} has {said}: expected a string")
    check_text(role, f"{where} role")
    try:
        key, body = message_record(message)
    except InvalidTurnsError as error:
        gap = "" if str(error).startswith("[") else " "
        raise InvalidTurnsError(f"{where}{gap}{error}") from None
    return Encoded(key, role, body)


def check_text(text: str, where: str) -> None:
    """Raise InvalidTurnsError unless UTF-8 can encode the text."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidTurnsError(
                f"{where} {text!r} is not valid Unicode: {error.reason}"
            ) from None
