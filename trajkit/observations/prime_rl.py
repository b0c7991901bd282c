"""prime-rl's first rule for training on tool outputs, unchanged."""

import numpy as np

from trajkit.errors import InvalidTurnsError
from trajkit.observations.attribution import Bools, SessionCalls
from trajkit.observations.observed_rows import (
    Observed,
    ObservedRow,
    Selection,
    Weights,
    factor,
)


def prime(
    calls: SessionCalls,
    rows: list[ObservedRow],
    selection: Selection,
    place: str,
    parents: list[int | None],
) -> tuple[list[Weights], Observed]:
    """The weights of each row of a session, given the turn_index of each call's parent.

    Each call of a row attributes the part of its prompt after the previous call's path
    (``_step_sft_mask`` of
    https://github.com/PrimeIntellect-ai/prime-rl/blob/b1c49e530/src/prime_rl/orchestrator/trajectories.py).
    """
    at = {int(turn): call for call, turn in enumerate(calls.turn_index)}
    parent = [None if turn is None else at[turn] for turn in parents]
    count = Observed()
    for call in range(len(calls)):
        fault = prime_fault(calls, call)
        if fault is not None:
            if selection.missing == "raise":
                raise InvalidTurnsError(
                    f"{place}, turn {calls.turn_index[call]}: {fault}"
                )
            count.turns_skipped += 1
    leaves = set(range(len(calls))).difference(p for p in parent if p is not None)
    weights: list[Weights] = []
    for row in rows:
        last = row.last_call(calls, leaves)
        mask = np.zeros(int(calls.path_len[last]), np.bool_)
        here: int | None = last
        while here is not None:
            before = parent[here]
            start = 0 if before is None else int(calls.path_len[before])
            stop = int(calls.n_prompt[here])
            mask[start:stop] = _own_mask(calls, here, selection)[start:]
            here = before
        alpha = selection.roles["tool"] * factor(
            selection.normalization, len(mask), int(mask.sum()), row.trained
        )
        mask = mask[: len(row.ids)]
        weights.append(np.where(mask, np.float32(alpha), np.float32(0)))
        count.tokens_observed += int(mask.sum())
    return weights, count


def prime_fault(calls: SessionCalls, call: int) -> str | None:
    """What a call lacks for this rule, which takes no names from messages."""
    fault, flags = calls.gaps(call)
    rendered = calls.rendered(call)
    if rendered is not None and rendered.names is None:
        return "message_tool_names is null"
    return fault or flags


def _own_mask(calls: SessionCalls, call: int, selection: Selection) -> Bools:
    """The prompt tokens that the call's attribution selects."""
    rendered = calls.rendered(call)
    if rendered is None or not rendered.names:
        return np.zeros(int(calls.n_prompt[call]), np.bool_)
    tools = selection.tools
    taken = np.array(
        [n is not None and (tools is None or n in tools) for n in rendered.names]
    )
    message = rendered.message
    known = (message >= 0) & (message < len(taken)) & rendered.is_content
    mask: Bools = known & taken[np.where(known, message, 0)]
    return mask
