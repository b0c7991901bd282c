"""Exclude sampled tokens that a policy may not train."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from trajkit.errors import InvalidTurnsError
from trajkit.policies import Policy
from trajkit.turns.calls import Calls, Longs
from trajkit.turns.flat_buffers import lacking_logprobs
from trajkit.turns.structs import STOPS

Bools = npt.NDArray[np.bool_]


def aborted_calls(calls: Calls) -> Bools:
    """Calls whose finish_reason is "abort", shape (n_calls,)."""
    aborted: Bools = calls.calls["stop"] == STOPS["abort"]
    return aborted


def without_aborted(calls: Calls, policy: Policy) -> tuple[Calls, Longs]:
    """Mark aborted calls as context only if the policy does not train them.

    Also returns the number of tokens of each session that this excludes from training.
    """
    n_tokens = np.zeros(calls.n_sessions, np.int64)
    if policy.train_aborted:
        return calls, n_tokens
    aborted = aborted_calls(calls)
    if not aborted.any():
        return calls, n_tokens
    now = aborted & (calls.calls["trainable"] != 0)
    np.add.at(n_tokens, calls.session_of()[now], calls.calls["out_len"][now])
    records = calls.calls.copy()
    records["trainable"][now] = False
    return replace(calls, calls=records), n_tokens


def check_logprobs(calls: Calls, policy: Policy) -> None:
    """Raise InvalidTurnsError if a token that may be trained lacks a logprob that the
    policy needs.
    """
    if policy.missing_logprobs != "raise":
        return
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
