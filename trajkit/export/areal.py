"""Rows as AReaL's trajectory tensors.

Source: https://github.com/areal-project/AReaL/tree/cbff54d (``utils/data.py``,
``trainer/ppo/actor.py``, ``trainer/ppo/gae.py``).
"""

from itertools import groupby
from operator import attrgetter
from typing import Any, Literal

import numpy as np

from trajkit._arguments import check_choice, chosen_int
from trajkit.errors import ExportError
from trajkit.export import _rows as shared

CONTEXT = -1  # the version, and the turn, of a token that was not sampled
_SINGLE = "Add advantages, and pass reward='advantage'"
_ROWS = shared.Target("AReaL", "advantage", ("weight_version",), by_step=True)
_ROLLOUTS = _ROWS._replace(reads="reward", single=_SINGLE)


def trajectory_fields(
    rows: shared.TableLike,
    *,
    version: int | None = None,
    reward: Literal["reward", "advantage"] = "reward",
    weighted: bool | shared.StepCounts = False,
) -> list[dict[str, Any]]:
    """Rows as dicts of arrays, one for each group: AReaL takes a dict for a group.

    Context after the last trained token is removed: AReaL puts the reward at the end of
    the row and loses it if that token is not trained.

    Parameters
    ----------
    rows : table
        A payload ``weight_version`` of integers in text becomes ``versions``.
    version : int, optional
        The version of sampled tokens that have none there. None: 0 without the payload.
    reward : {"reward", "advantage"}
        The column that becomes ``rewards``. Rollouts with several rows need "advantage",
        with ``reward_norm=None``, ``adv_norm=None``, ``gamma=lambda=1`` and no KL term.
    weighted : StepCounts, optional
        Fold row weights into ``reward="advantage"``; needs ``ppo_n_minibatches=1``.

    Returns
    -------
    list of dict of str to ndarray
        ``input_ids``, ``loss_mask``, ``versions``, ``turn_ids`` (int32), ``logprobs``
        (float32), ``attention_mask`` (bool), each of shape (rows of the group, tokens of
        the longest), padded right; ``rewards`` (float32), one per row. ``turn_ids``
        counts the trained turns of a row from 0; -1 is context.
    """
    check_choice("reward", reward, ("reward", "advantage"))
    if version is not None:
        version = chosen_int("version", version, CONTEXT)
    target = _ROWS if weighted or reward == "advantage" else _ROLLOUTS
    found = []
    checked = shared.checked_rows(rows, target, weighted=weighted)
    checked.sort(key=attrgetter("group"))
    for _, members in groupby(checked, attrgetter("group")):
        own = [*members]
        gains = [getattr(row, target.reads) * row.scale for row in own]
        arrays = [_arrays(row, version) for row in own]
        width = max(len(each["input_ids"]) for each in arrays)
        found.append({"rewards": np.array(gains, np.float32)})
        for name, first in arrays[0].items():
            fill = CONTEXT if name == "turn_ids" else 0
            found[-1][name] = np.full((len(own), width), fill, first.dtype)
            for line, each in zip(found[-1][name], arrays, strict=True):
                line[: len(each[name])] = each[name]
    return found


def _arrays(row: shared.ExportRow, version: int | None) -> dict[str, shared.Array]:
    """The arrays of a row up to its last trained token."""
    trained = np.flatnonzero(row.loss_mask)
    versions, turns = np.full((2, len(row.input_ids)), CONTEXT, np.int32)
    versions[trained] = version or 0
    for k in trained if row.weight_version is not None else ():
        name = row.weight_version[k]
        try:
            if name is not None or version is None:
                versions[k] = int(name)
        except (TypeError, ValueError, OverflowError):
            raise ExportError(
                f"{row.place}: weight version {name!r} of token {k} is not an integer, "
                "which AReaL expects. Drop the payload weight_version and pass version="
            ) from None
    numbers: dict[int, int] = {}
    for span in row.spans:
        part = slice(span["start"], span["stop"])
        if row.loss_mask[part].any():
            number = numbers.setdefault(span["turn_index"], len(numbers))
            turns[part] = np.where(row.loss_mask[part], number, CONTEXT)
    for k in trained[turns[trained] < 0]:
        raise ExportError(f"{row.place}: token {k} is trained, but of no turn in spans")
    arrays = {
        "input_ids": row.input_ids,
        "loss_mask": row.loss_mask.astype(np.int32),
        "logprobs": row.logprobs,
        "versions": versions,
        "turn_ids": turns,
        "attention_mask": np.ones(len(versions), np.bool_),
    }
    return {name: values[: trained[-1] + 1] for name, values in arrays.items()}


trajectories = shared.objects_of(trajectory_fields, shared.tensors)
