"""Chat messages: canonical JSON, 128-bit keys, and storage of distinct messages.

Two messages have the same key exactly when their canonical JSON is the same: key order
does not matter, list order does, a missing key is not a null, and 1, 1.0, true and "1"
differ. NaN equals NaN, as ``json.loads`` makes it. So a key has exactly one body.

The first `VALUE_BYTES` of two keys are the same exactly when Python calls the messages
equal (1 == 1.0 == True). The other bytes are zero unless a number can be written in a
simpler type.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit.errors import InvalidTurnsError
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
    return _core.encode_message(message)[0]


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
    body, value_text = _core.encode_message(message)
    return _key(body, value_text), body


def _key(body: str, value_text: str) -> bytes:
    rest = KEY_BYTES - VALUE_BYTES
    spelling = bytes(rest) if body == value_text else _digest(body, rest)
    return _digest(value_text, VALUE_BYTES) + spelling


def _digest(text: str, size: int) -> bytes:
    return blake2b(text.encode(), digest_size=size).digest()


@dataclass(slots=True)
class MessageBook:
    """Every distinct message of some calls, under a small id, in order of arrival."""

    keys: list[bytes] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    # None: only the key is known
    bodies: list[str | None] = field(default_factory=list)
    _by_body: dict[str, int] = field(default_factory=dict)
    _by_name: dict[tuple[bytes, str], int] = field(default_factory=dict)

    def add(self, message: object, where: str) -> int:
        """The id of a message, which must not change afterwards.

        Parameters
        ----------
        message : dict
            With a ``role``, and of JSON values throughout.
        where : str
            Its name in error texts: ``session 'a', turn 7: response_message``.

        Raises
        ------
        InvalidTurnsError
            It is not a dict, has no role, or contains what JSON cannot express.
        """
        role, body, value_text = _encoded(message, where)
        known = self._by_body.get(body)
        if known is not None:
            return known
        check_text(role, f"{where} role")
        number = self._by_body[body] = len(self.bodies)
        self._append(_key(body, value_text), role, body)
        return number

    def find(self, message: object, where: str) -> int:
        """The id of a message, or -1 if it is new; raises as `add` does."""
        return self._by_body.get(_encoded(message, where)[1], -1)

    def add_key(self, key: bytes, role: str) -> int:
        """The id of a message that is given by key and role, without a body."""
        number = self._by_name.get((key, role))
        if number is None:
            number = self._by_name[key, role] = len(self.bodies)
            self._append(key, role, None)
        return number

    def _append(self, key: bytes, role: str, body: str | None) -> None:
        self.keys.append(key)
        self.roles.append(role)
        self.bodies.append(body)

    def add_all(
        self,
        messages: Sequence[object],
        before: Sequence[object],
        before_ids: Ids,
        where: str,
    ) -> Ids:
        """The ids of a call's messages.

        A message that equals, by type and value, the one at the same index of an earlier
        call is not encoded again.

        Parameters
        ----------
        messages, before : sequence of dict
            This call's messages and those of the earlier call.
        before_ids : ndarray of int32, shape (len(before),)
            What this method returned for them.
        where : str
            As in `add`; the index is appended.

        Returns
        -------
        ndarray of int32, shape (len(messages),)
        """
        ids = np.empty(len(messages), np.int32)
        _core.match_messages(list(messages), list(before), before_ids, ids)
        for i in np.flatnonzero(ids < 0).tolist():
            ids[i] = self.add(messages[i], f"{where}[{i}]")
        return ids

    def shown(self, ids: Ids, sessions: Ids) -> npt.NDArray[np.bool_]:
        """Whether each message is the first occurrence in its session, which has the body.

        Parameters
        ----------
        ids, sessions : ndarray of int32, shape (n_messages,)
            Messages in the order of their sessions (prompt, reply, next prompt, ...),
            and the session of each.
        """
        messages = pa.array(sessions * np.int64(len(self.bodies)) + ids)
        # numbered in order of appearance, so a new one exceeds all before it
        numbers = messages.dictionary_encode().indices.to_numpy()
        new: npt.NDArray[np.bool_] = (
            np.diff(np.maximum.accumulate(numbers), prepend=-1) > 0
        )
        return new

    def array(self, ids: Ids, shown: npt.NDArray[np.bool_]) -> pa.StructArray:
        """The messages as the schema's struct.

        Parameters
        ----------
        ids : ndarray of int32, shape (n_messages,)
            -1: null.
        shown : ndarray of bool, shape (n_messages,)
            Where the body is stored; it is null elsewhere.
        """
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


def _encoded(message: object, where: str) -> tuple[str, str, str]:
    """A message's role, its body, and the text of its values."""
    if not isinstance(message, dict):
        raise InvalidTurnsError(
            f"{where} is of type {type(message).__name__}: expected a dict"
        )
    role = message.get("role")
    if not isinstance(role, str):
        said = f"the role {role!r}" if "role" in message else "no role"
        raise InvalidTurnsError(f"{where} has {said}: expected a string")
    try:
        body, value_text = _core.encode_message(message)
    except InvalidTurnsError as error:
        gap = "" if str(error).startswith("[") else " "
        raise InvalidTurnsError(f"{where}{gap}{error}") from None
    return role, body, value_text


def check_text(text: str, where: str) -> None:
    """Raise InvalidTurnsError unless UTF-8 can encode the text."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidTurnsError(
                f"{where} {text!r} is not valid Unicode: {error.reason}"
            ) from None
