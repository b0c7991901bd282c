"""Calls that a recorder did not accept."""

import json
import reprlib
from collections.abc import Sequence
from copy import deepcopy
from typing import NamedTuple

import numpy as np
import pyarrow as pa

REJECTED_CALLS = pa.schema(
    [
        # null: it is not a string that UTF-8 can encode
        pa.field("session_id", pa.string()),
        # calls that the session had when this one was rejected
        pa.field("turn_index", pa.int32(), nullable=False),
        # the rule that the call breaks, with place and value
        pa.field("reason", pa.string(), nullable=False),
        # the arguments of `Recorder.record` as JSON; text of what JSON cannot express
        pa.field("call", pa.string(), nullable=False),
    ]
)
"""One row per rejected call."""


class RejectedCall(NamedTuple):
    """A call that `Recorder.record` rejected.

    Attributes
    ----------
    session_id : object
    turn_index : int
        Calls that the session had at that time.
    reason : str
        The rule that the call breaks, with place and value.
    call : dict
        A copy of its other arguments, without those that were None.
    """

    session_id: object
    turn_index: int
    reason: str
    call: dict[str, object]


def copied(value: object) -> object:
    """A copy that the caller's later changes do not reach; the value if it has none."""
    try:
        return deepcopy(value)
    except Exception:  # any object's own, such as a tensor's that has a gradient
        return value


def rejected_table(calls: Sequence[RejectedCall]) -> pa.Table:
    """The calls in the schema `REJECTED_CALLS`."""
    return pa.Table.from_pylist(
        [
            {
                "session_id": _text(one.session_id),
                "turn_index": one.turn_index,
                "reason": one.reason,
                "call": _json({"session_id": one.session_id, **one.call}),
            }
            for one in calls
        ],
        REJECTED_CALLS,
    )


def _text(name: object) -> str | None:
    try:
        return name if isinstance(name, str) and name.encode() else None
    except UnicodeEncodeError:
        return None


def _json(call: dict[str, object]) -> str:
    pairs = (f"{json.dumps(name)}: {_value(value)}" for name, value in call.items())
    return "{" + ", ".join(pairs) + "}"


def _value(value: object) -> str:
    try:
        return json.dumps(value, default=_plain)
    except (TypeError, ValueError, RecursionError):  # keys that are no names, or cycles
        return json.dumps(_described(value))


def _plain(value: object) -> object:
    """What JSON can express of an object that it does not know."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return value.hex() if isinstance(value, bytes) else _described(value)


def _described(value: object) -> str:
    try:
        return repr(value)
    except RecursionError:
        return reprlib.repr(value)
