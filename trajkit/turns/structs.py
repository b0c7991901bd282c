"""The numpy dtypes of the records that the kernels share (_native/structs.pxd)."""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

_Item = TypeVar("_Item", bound=np.generic)

_i8, _i4, _u1 = np.int64, np.int32, np.uint8

STOPS = ("other", "length", "abort")
"""The finish reasons that decide something: ``stop`` of a call is an index in them."""

CALL = np.dtype(
    [
        ("own", _i8),
        ("own_start", _i8),
        ("prompt_len", _i8),
        ("out", _i8),
        ("out_len", _i8),
        ("logprobs", _i8),
        ("valid", _i8),
        ("valid_bit", _i8),
        ("mask", _i8),
        ("mask_bit", _i8),
        ("base", _i4),
        ("trainable", _u1),
        ("stop", _u1),
        ("use_tool", _u1),
        ("ill_formed", _u1),
    ],
    align=True,
)

REQUEST = np.dtype(
    [
        ("keys", _i8),
        ("n_keys", _i8),
        ("role_offsets", _i8),
        ("role_bytes", _i8),
        ("reply_key", _i8),
        ("shared", _i4),
        ("reply_is_assistant", _i4),
    ],
    align=True,
)

NODE = np.dtype(
    [
        ("start", _i8),
        ("stop", _i8),
        ("parent", _i4),
        ("source", _i4),
        ("first", _i4),
        ("child", _i4),
        ("sibling", _i4),
        ("slot", _i4),
    ],
    align=True,
)

PLACE = np.dtype(
    [
        ("message", _i4),
        ("parent", _i4),
        ("depth", _i4),
        ("child", _i4),
        ("sibling", _i4),
    ],
    align=True,
)

HEARD = np.dtype(
    [("shared", _i4), ("end", _i4), ("shown", _i4), ("reply", _i4)], align=True
)

MESSAGE = np.dtype(
    [
        ("key", _i8),
        ("parent", _i4),
        ("call", _i4),
        ("above", _i4),
        ("depth", _i4),
        ("child", _i4),
        ("last_child", _i4),
        ("sibling", _i4),
        ("n_assistants", _i4),
        ("assistant", _i4),
        ("equal", _i4),
    ],
    align=True,
)

LINK = np.dtype(
    [
        ("lcp", _i8),
        ("parent", _i4),
        ("order", _i4),
        ("rewritten_by", _i4),
        ("link_reason", _i4),
        ("segment", _i4),
    ],
    align=True,
)

ROW = np.dtype(
    [
        ("n_tokens", _i8),
        ("prompt_len", _i8),
        ("n_trained", _i8),
        ("shared", _i8),
        ("stored", _i8),
        ("end", _i8),
        ("last", _i4),
        ("n_calls", _i4),
        ("owner", _i4),
        ("parent_row", _i4),
        ("session", _i4),
        ("n_spans", _i4),
        ("truncated", _u1),
        ("use_tool", _u1),
        ("ill_formed", _u1),
        ("reserved", _u1),
        ("index", _i4),
    ],
    align=True,
)

PACK_ROW = np.dtype(
    [
        ("ids", _i8),
        ("stored", _i8),
        ("length", _i8),
        ("mask", _i8),
        ("mask_bit", _i8),
        ("logprobs", _i8),
        ("valid", _i8),
        ("valid_bit", _i8),
        ("line", _i8),
        ("shared", _i8),
        ("start", _i8),
        ("base", _i8),
        ("open", _i8),
        ("parent", _i4),
        ("origin", _i4),
        ("child", _i4),
        ("sibling", _i4),
    ],
    align=True,
)

CHOICES = np.dtype(
    [
        ("fork_threshold", _i8),
        ("max_tokens", _i8),
        ("max_rows", _i8),
        ("end_of_turn", _i8),
        ("on_drift", _i4),
        ("train_in", _i4),
        ("keep_prefix", _u1),
        ("keep_untrained", _u1),
        ("keep_empty", _u1),
        ("chain_flags", _u1),
        ("main_only", _u1),
        ("cut_at_calls", _u1),
        ("need_logprob", _u1),
        ("reserved", _u1),
    ],
    align=True,
)


def longer(array: npt.NDArray[_Item], size: int) -> npt.NDArray[_Item]:
    """A copy with room for more: it begins as the array does, and the rest is undefined."""
    copy = np.empty(size, array.dtype)
    copy[: len(array)] = array
    return copy
