"""Exclude sampled tokens that a policy may not train."""

import numpy as np
import numpy.typing as npt

from trajkit.errors import InvalidTurnsError
from trajkit.tables.ragged import Longs
from trajkit.turns.flat_buffers import lacking_logprobs
from trajkit.turns.sessions import Sessions
from trajkit.turns.structs import STOPS

Bools = npt.NDArray[np.bool_]


def aborted_calls(calls: Sessions) -> Bools:
    """Calls whose finish_reason is "abort", shape (n_calls,)."""
    aborted: Bools = calls.calls["stop"] == STOPS["abort"]
    return aborted


def without_aborted(calls: Sessions) -> tuple[Sessions, Longs]:
    """Mark aborted calls as context only.

    Also returns the number of tokens of each session that this excludes from training.
    """
    now = aborted_calls(calls) & (calls.calls["trainable"] != 0)
    n_tokens = np.zeros(len(calls.ids), np.int64)
    np.add.at(n_tokens, calls.session[now], calls.calls["out_len"][now])
    return calls.untrained(now), n_tokens


def check_logprobs(calls: Sessions) -> None:
    """Raise InvalidTurnsError if a token that may be trained lacks a logprob."""
    missing = lacking_logprobs(calls)
    missing[calls.calls["trainable"] == 0] = 0
    bad = np.flatnonzero(missing)
    if len(bad):
        call = int(bad[0])
        more = f" (and {len(bad) - 1} more turns)" if len(bad) > 1 else ""
        raise InvalidTurnsError(
            f"{calls.place(call)}: {missing[call]} of {calls.calls['out_len'][call]} "
            f"sampled tokens have no logprob{more}, which missing_logprobs='raise' "
            "refuses"
        )
