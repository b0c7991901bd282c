"""Traces of verifiers and prime-rl: graphs of messages.

A node has a message and the ids that it adds. A sampled node is a call, and the ids on the
path to it are its prompt.
"""

from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import numpy as np

from trajkit.files.json_numbers import EACH, IDS, Shape
from trajkit.importers.findings import (
    Refused,
    list_of,
    number_of,
    object_of,
    text_of,
    unless_empty,
)

SHAPE: Final[Shape] = {"nodes": {EACH: {"token_ids": IDS}}}
"""The long arrays of a trace."""

# per sampled token of a node, by the orchestrator and the trainer
_TRAINER = (
    *("advantages", "reference_logprobs", "trainer_logprobs", "entropies"),
    *("loss_weights", "routed_experts", "sampling_mask", "kept_tokens"),
    "multi_modal_data",
)
_NO_IDS = np.empty(0, np.int32)

_Value: TypeAlias = dict[str, Any]


def calls(trace: _Value) -> Iterator[tuple[str, _Value]]:
    """Places and values of the calls of a trace, in order (see `calls.Table`)."""
    if not isinstance(trace.get("nodes"), list):
        refused = "unreadable", "its nodes are not a list"
        yield "", {"session_id": None, "@refused": refused}
    agent, task = object_of(trace.get("agent")), object_of(trace.get("task"))
    reward, remarks = _reward(object_of(trace.get("rewards")))
    common = {
        "session_id": text_of(trace.get("id")),
        "agent_id": text_of(agent.get("name")),
        "group_id": text_of(task.get("key")) or text_of(task.get("hash")),
        "trainable": False if agent.get("trainable") is False else None,
        "reward": reward,
        "@remarks": remarks,
    }
    # once for the trace
    unread = {"trace.errors": True} if trace.get("errors") else {}
    nodes = list(map(object_of, list_of(trace.get("nodes"))))
    recorded = map(object_of, list_of(trace.get("calls")))
    of_node = {call["node"]: call for call in recorded if type(call.get("node")) is int}
    # ids on the path to each node, including it; None if they are unknown
    paths: list[np.ndarray | None] = []
    for k, node in enumerate(nodes):
        above = _above(nodes, k)
        before = paths[above[0]] if above else None
        before = _NO_IDS if node.get("parent") is None else before
        given = unless_empty(node.get("token_ids"))
        ids = _NO_IDS if given is None else given
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
        values = {
            **common,
            "prompt_messages": [nodes[at].get("message") for at in reversed(above)],
            "response_message": node.get("message"),
            "finish_reason": call.get("finish_reason") or node.get("finish_reason"),
            "model": call.get("model"),
            "started_at": time.get("start"),
            "ended_at": time.get("end"),
            "tools": trace.get("tools") if tools is None else tools,
            "usage": _usage(object_of(call.get("usage"))),
            "@unread": unread,
        }
        try:
            values |= _sampled(node, before, ids)
        except Refused as refused:
            values["@refused"] = refused.args
        unread = {}
        yield f", node {k}", values


def _above(nodes: list[_Value], k: int) -> list[int]:
    """The nodes above a node, from its parent to the root."""
    found = []
    at = nodes[k].get("parent")
    while isinstance(at, int) and 0 <= at < k:
        found.append(at)
        k, at = at, nodes[at].get("parent")
    return found


def _sampled(node: _Value, before: np.ndarray | None, ids: object) -> _Value:
    """Prompt, output and logprobs; the node's mask marks sampled ids."""
    if not isinstance(ids, np.ndarray):
        raise Refused("unreadable", "token_ids are not ids")
    if before is None:
        raise Refused("no_prompt_ids", "a message before it has no ids")
    listed = list_of(node.get("mask"))
    if not all(isinstance(flag, int) for flag in listed):
        raise Refused("unreadable", "a mask that is not of booleans")
    if len(listed) != len(ids):
        text = f"a mask of {len(listed)} for {len(ids)} token_ids"
        raise Refused("unreadable", text)
    start = len(ids) - sum(map(bool, listed))
    if not all(listed[start:]):
        text = "its sampled ids are not at the end of its token_ids"
        raise Refused("unreadable", text)
    return {
        "prompt_ids": np.concatenate([before, ids[:start]]),
        "output_ids": ids[start:] if start < len(ids) else None,
        "output_logprobs": node.get("logprobs"),
    }


def _usage(usage: _Value) -> _Value:
    """The usage of a call, whose prompt_tokens lack those that were cached."""
    counts = [usage.get("prompt_tokens"), usage.get("cached_input_tokens") or 0]
    if not all(type(count) is int for count in counts):
        return usage
    return {**usage, "prompt_tokens": sum(counts)}


def _reward(rewards: _Value) -> tuple[float | None, list[tuple[str, str]]]:
    """The sum of a trace's weighted rewards; None, and a remark, if one is missing."""
    total = 0.0
    for name, reward in rewards.items():
        # earlier versions have the weighted number
        parts = reward if isinstance(reward, dict) else {"score": reward}
        score = number_of(parts.get("score"))
        weight = number_of(parts.get("weight", 1.0))
        if score is None or weight is None:
            text = f"rewards.{name} is {reward!r}: expected a score and a weight"
            return None, [("reward_unread", text)]
        total += score * weight
    return total if rewards else None, []
