"""Traces of verifiers and prime-rl: message graphs, and the earlier lists of steps.

A graph has a node per message with the ids that the message adds. A sampled node is a call,
and the ids on the path to it are its prompt. Earlier versions had a
list of steps with complete prompts.
"""

from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from trajkit.files.json_numbers import EACH, IDS, Shape
from trajkit.importers.findings import (
    Refused,
    is_array,
    list_of,
    number_of,
    object_of,
    text_of,
    unless_empty,
)

SHAPE: Final[Shape] = {
    "nodes": {EACH: {"token_ids": IDS}},
    "trajectory": {EACH: {"tokens": {"prompt_ids": IDS, "completion_ids": IDS}}},
}
"""The long arrays of a trace."""

# per sampled token of a node, by the orchestrator and the trainer
_TRAINER = (
    *("advantages", "reference_logprobs", "trainer_logprobs", "entropies"),
    *("loss_weights", "routed_experts", "sampling_mask", "kept_tokens"),
    "multi_modal_data",
)

_Ids = npt.NDArray[np.int32]
_Value: TypeAlias = dict[str, Any]


def calls(trace: _Value, named: str) -> Iterator[tuple[str, _Value]]:
    """The calls of a trace in order, by the fields of the format's table.

    ``@refused`` is why a call is left out, and keys with a dot are what no field reads.
    """
    if isinstance(trace.get("nodes"), list):
        yield from _graph(trace)
    elif isinstance(trace.get("trajectory"), list):
        yield from _steps(trace, named)
    else:
        refused = Refused("unreadable", "neither nodes nor a trajectory")
        yield "", {"@refused": refused}


def _graph(trace: _Value) -> Iterator[tuple[str, _Value]]:
    agent, task = object_of(trace.get("agent")), object_of(trace.get("task"))
    reward, remarks = _reward(trace.get("rewards"))
    common: _Value = {
        "@session": text_of(trace.get("id")),
        "@agent": text_of(agent.get("name")),
        "@group": text_of(task.get("key")) or text_of(task.get("hash")),
        "trainable": False if agent.get("trainable") is False else None,
        "reward": reward,
        "@remarks": remarks,
    }
    # once for the trace
    unread = {"trace.errors": True} if trace.get("errors") else {}
    nodes = [object_of(node) for node in trace["nodes"]]
    recorded = [object_of(call) for call in list_of(trace.get("calls"))]
    of_node = {call["node"]: call for call in recorded if type(call.get("node")) is int}
    # ids and messages on the path to each node, including it; None if ids are unknown
    paths: list[_Ids | None] = []
    for k, node in enumerate(nodes):
        above = _above(nodes, k)
        before = paths[above[0]] if above else None
        if node.get("parent") is None:
            before = np.empty(0, np.int32)
        ids: Any = unless_empty(node.get("token_ids"))
        ids = np.empty(0, np.int32) if ids is None else ids
        # the ids of a reply without ids cannot be known
        reply = object_of(node.get("message")).get("role") == "assistant"
        known = before is not None and isinstance(ids, np.ndarray)
        known = known and (len(ids) > 0 or not reply)
        paths.append(np.concatenate([before, ids]) if known else None)
        if node.get("sampled") is not True:
            continue
        unread |= {f"nodes.{name}": True for name in _TRAINER if node.get(name)}
        call = of_node.get(k, {})
        time = object_of(call.get("time"))
        # a root has the tools of its requests, from 0.4.0 on
        tools = nodes[above[-1] if above else k].get("tools")
        value = {
            **common,
            "messages": [nodes[at].get("message") for at in reversed(above)],
            "response": node.get("message"),
            "finish": call.get("finish_reason") or node.get("finish_reason"),
            "model": call.get("model"),
            "started": time.get("start"),
            "ended": time.get("end"),
            "tools": trace.get("tools") if tools is None else tools,
            "usage": _usage(call.get("usage")),
            **unread,
        }
        try:
            value |= _sampled(node, before, ids)
        except Refused as refused:
            value["@refused"] = refused
        unread = {}
        yield f", node {k}", value


def _above(nodes: list[_Value], k: int) -> list[int]:
    """The nodes above a node, from its parent to the root."""
    found = []
    at = nodes[k].get("parent")
    while isinstance(at, int) and 0 <= at < k:
        found.append(at)
        k, at = at, nodes[at].get("parent")
    return found


def _sampled(node: _Value, before: _Ids | None, ids: object) -> _Value:
    """Prompt, output and logprobs; the node's mask marks sampled ids."""
    if not isinstance(ids, np.ndarray):
        raise Refused("unreadable", "token_ids are not ids")
    if before is None:
        raise Refused("no_prompt_ids", "a message before it has no ids")
    listed = list_of(node.get("mask"))
    if not all(isinstance(flag, int) for flag in listed):
        raise Refused("unreadable", "a mask that is not of booleans")
    flags = np.array(listed, np.bool_)
    if len(flags) != len(ids):
        detail = f"a mask of {len(flags)} for {len(ids)} token_ids"
        raise Refused("unreadable", detail)
    start = len(ids) - int(flags.sum())
    if not flags[start:].all():
        detail = "its sampled ids are not at the end of its token_ids"
        raise Refused("unreadable", detail)
    return {
        "prompt": np.concatenate([before, ids[:start]]),
        "output": ids[start:] if start < len(ids) else None,
        "logprobs": node.get("logprobs"),
    }


def _usage(given: object) -> _Value:
    """The usage of a call, whose prompt_tokens lack those that were cached."""
    usage = object_of(given)
    counts: list[Any] = [
        usage.get("prompt_tokens"),
        usage.get("cached_input_tokens") or 0,
    ]
    if all(type(count) is int for count in counts):
        return {**usage, "prompt_tokens": sum(counts)}
    return usage


def _reward(rewards: object) -> tuple[float | None, list[tuple[str, str]]]:
    """The sum of a trace's weighted rewards; None, and a remark, if one is missing."""
    total = 0.0
    for name, reward in object_of(rewards).items():
        # earlier versions have the weighted number
        parts = reward if isinstance(reward, dict) else {"score": reward}
        score = number_of(parts.get("score"))
        weight = number_of(parts.get("weight", 1.0))
        if score is None or weight is None:
            text = f"rewards.{name} is {reward!r}: expected a score and a weight"
            return None, [("reward_unread", text)]
        total += score * weight
    return (total if object_of(rewards) else None), []


def _steps(rollout: _Value, named: str) -> Iterator[tuple[str, _Value]]:
    # only the steps of a rollout have a name
    session = text_of(rollout.get("trajectory_id")) or named
    for k, step in enumerate(map(object_of, rollout["trajectory"])):
        ids = object_of(step.get("tokens"))
        replies = list_of(step.get("completion"))
        cut = ids.get("is_truncated") is True or step.get("is_truncated") is True
        value = {
            "@session": session,
            "@agent": text_of(step.get("trajectory_id")),
            "@group": text_of(rollout.get("example_id")),
            "prompt": ids.get("prompt_ids"),
            "output": ids.get("completion_ids"),
            "logprobs": ids.get("completion_logprobs"),
            "messages": unless_empty(step.get("prompt")),
            "response": replies[0] if len(replies) == 1 else None,
            "reward": rollout.get("reward"),
            # of a step that was cut, the provider counted more tokens
            "usage": None if cut else object_of(step.get("response")).get("usage"),
            "@remarks": [("cut_output", "is_truncated")] if cut else [],
        }
        unread = [
            name for name in ("advantage", "reward") if step.get(name) is not None
        ]
        unread += [
            f"tokens.{name}"
            for name in ("routed_experts", "multi_modal_data")
            if ids.get(name)
        ]
        value |= {f"trajectory.{name}": True for name in unread}
        if refused := _refused(ids):
            value["@refused"] = refused
        yield f", step {k}", value


def _refused(tokens: _Value) -> Refused | None:
    """Why a step is refused: a truncated prompt, or a mask that leaves ids out.

    The masks that verifiers writes mark all ids as sampled.
    """
    if tokens.get("overlong_prompt") is True:
        return Refused("truncated", "its prompt was truncated to the maximum length")
    mask, ids = tokens.get("completion_mask"), tokens.get("completion_ids")
    n = len(ids) if is_array(ids) else 0  # type: ignore[arg-type]
    if mask is None or mask == [1] * n:
        return None
    detail = f"a completion_mask of another length than {n} completion_ids"
    if isinstance(mask, list) and len(mask) == n:
        detail = f"a completion_mask that marks {mask.count(1)} of {n} ids as sampled"
    return Refused("unreadable", detail)
