"""Traces of verifiers and prime-rl: message graphs, and the earlier lists of steps.

A graph has a node per message with the ids that the message adds. A sampled node is a call,
and the ids on the path to it are its prompt. Earlier versions had a
list of steps with complete prompts.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from trajkit.files.json_numbers import EACH, IDS, Shape
from trajkit.importers.findings import (
    Finding,
    Refused,
    list_of,
    number_of,
    object_of,
    reward_of,
    text_of,
    time_of,
    unless_empty,
)
from trajkit.importers.responses import usage_claims

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


def read(file: Path, place: str, record: dict[str, object]) -> Iterator[Finding]:
    """The calls of a trace, in order."""
    if isinstance(record.get("nodes"), list):
        return _graph(place, record)
    if isinstance(record.get("trajectory"), list):
        return _steps(place, record, file)
    detail = "neither nodes nor a trajectory"
    return iter([Finding(place, problem="unreadable", detail=detail)])


def _graph(place: str, trace: dict[str, object]) -> Iterator[Finding]:
    session = text_of(trace.get("id"))
    agent, task = object_of(trace.get("agent")), object_of(trace.get("task"))
    common: dict[str, object] = {
        "agent_id": text_of(agent.get("name")),
        "trainable": False if agent.get("trainable") is False else None,
        "group_id": text_of(task.get("key")) or text_of(task.get("hash")),
    }
    unread = {f"trace.{name}": trace[name] for name in ("errors",) if trace.get(name)}
    nodes = [object_of(node) for node in list_of(trace["nodes"])]
    recorded = [object_of(call) for call in list_of(trace.get("calls"))]
    calls = {call["node"]: call for call in recorded if type(call.get("node")) is int}
    # ids on the path to each node, including it; None if some are unknown
    paths: list[_Ids | None] = []
    for k, node in enumerate(nodes):
        found = Finding(f"{place}, node {k}", session, dict(common), unread=unread)
        own = node.get("token_ids")
        parent = node.get("parent")
        before: _Ids | None = np.empty(0, np.int32)
        if parent is not None:
            earlier = parent in range(k)
            before = paths[parent] if earlier and isinstance(parent, int) else None
        ids = np.empty(0, np.int32) if unless_empty(own) is None else own
        # the ids of a reply without ids cannot be known
        reply = object_of(node.get("message")).get("role") == "assistant"
        known_ids = isinstance(ids, np.ndarray) and (len(ids) or not reply)
        known = before is not None and known_ids
        paths.append(np.concatenate([before, ids]) if known else None)
        if node.get("sampled") is not True:
            continue
        unread = {}
        found.unread |= {
            f"nodes.{name}": node[name] for name in _TRAINER if node.get(name)
        }
        with found:
            found.fields["reward"] = _reward(found, trace.get("rewards"))
            found.fields |= _about(nodes, k, calls.get(k, {}))
            # a root has the tools of its requests, from 0.4.0 on
            tools = nodes[_root(nodes, k)].get("tools")
            found.tools = trace.get("tools") if tools is None else tools
            found.claims += usage_claims(_usage(calls.get(k, {}).get("usage")))
            if not isinstance(ids, np.ndarray):
                raise Refused("unreadable", "token_ids are not ids")
            if before is None:
                raise Refused("no_prompt_ids", "a message before it has no ids")
            found.fields |= _sampled(node, before, ids)
        yield found


def _sampled(node: dict[str, object], before: _Ids, ids: _Ids) -> dict[str, object]:
    """Prompt, output and logprobs; the node's mask marks sampled ids."""
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
        "prompt_ids": np.concatenate([before, ids[:start]]),
        "output_ids": ids[start:] if start < len(ids) else None,
        "output_logprobs": node.get("logprobs"),
    }


def _root(nodes: list[dict[str, object]], k: int) -> int:
    """The node without a parent above a node."""
    at = nodes[k].get("parent")
    while isinstance(at, int) and 0 <= at < k:
        k, at = at, nodes[at].get("parent")
    return k


def _about(
    nodes: list[dict[str, object]], k: int, call: Mapping[str, object]
) -> dict[str, object]:
    """What a node and its call contain besides ids."""
    messages: list[object] = []
    at = nodes[k].get("parent")
    above = k
    while isinstance(at, int) and 0 <= at < above:
        messages.append(nodes[at].get("message"))
        above, at = at, nodes[at].get("parent")
    messages.reverse()
    reason = call.get("finish_reason") or nodes[k].get("finish_reason")
    time = object_of(call.get("time"))
    return {
        "prompt_messages": messages,
        "response_message": nodes[k].get("message"),
        "finish_reason": text_of(reason),
        "model": text_of(call.get("model")),
        "started_at": time_of(time.get("start")),
        "ended_at": time_of(time.get("end")),
    }


def _usage(given: object) -> dict[str, object]:
    """The usage of a call, whose prompt_tokens lack those that were cached."""
    usage = object_of(given)
    counts = [usage.get("prompt_tokens"), usage.get("cached_input_tokens") or 0]
    if all(type(count) is int for count in counts):
        return {**usage, "prompt_tokens": sum(counts)}  # type: ignore[arg-type]
    return usage


def _steps(place: str, rollout: dict[str, object], file: Path) -> Iterator[Finding]:
    example = text_of(rollout.get("example_id"))
    for k, given in enumerate(list_of(rollout["trajectory"])):
        step = object_of(given)
        # only the steps of a rollout have a name
        session = text_of(rollout.get("trajectory_id")) or f"{file.name}, {place}"
        found = Finding(f"{place}, step {k}", session)
        ids = object_of(step.get("tokens"))
        with found:
            _check_tokens(ids)
        if ids.get("is_truncated") is True or step.get("is_truncated") is True:
            found.remarks.append(("cut_output", "is_truncated"))
        replies = list_of(step.get("completion"))
        found.fields = {
            "prompt_ids": ids.get("prompt_ids"),
            "output_ids": ids.get("completion_ids"),
            "output_logprobs": ids.get("completion_logprobs"),
            "prompt_messages": unless_empty(step.get("prompt")),
            "response_message": replies[0] if len(replies) == 1 else None,
            "group_id": example,
            "agent_id": text_of(step.get("trajectory_id")),
            "reward": reward_of(found, rollout.get("reward")),
        }
        if not found.remarks:
            # of a step that was cut, the provider counted more tokens
            usage = object_of(object_of(step.get("response")).get("usage"))
            found.claims += usage_claims(usage)
        found.unread |= {
            f"trajectory.{name}": step[name]
            for name in ("advantage", "reward")
            if step.get(name) is not None
        }
        found.unread |= {
            f"trajectory.tokens.{name}": ids[name]
            for name in ("routed_experts", "multi_modal_data")
            if ids.get(name)
        }
        yield found


def _check_tokens(tokens: dict[str, object]) -> None:
    """Refuse a truncated prompt, and a mask that does not mark all ids as sampled.

    The masks that verifiers writes do.
    """
    if tokens.get("overlong_prompt") is True:
        detail = "its prompt was truncated to the maximum length"
        raise Refused("truncated", detail)
    mask, ids = tokens.get("completion_mask"), tokens.get("completion_ids")
    n = len(ids) if isinstance(ids, list | np.ndarray) else 0
    if mask is None or mask == [1] * n:
        return
    detail = f"a completion_mask of another length than {n} completion_ids"
    if isinstance(mask, list) and len(mask) == n:
        detail = f"a completion_mask that marks {mask.count(1)} of {n} ids as sampled"
    raise Refused("unreadable", detail)


def _reward(found: Finding, rewards: object) -> float | None:
    """The sum of a trace's weighted rewards; None if one is missing."""
    if not isinstance(rewards, dict) or not rewards:
        return None
    total = 0.0
    for name, reward in rewards.items():
        # earlier versions have the weighted number
        parts = reward if isinstance(reward, dict) else {"score": reward}
        score, weight = (
            number_of(parts.get("score")),
            number_of(parts.get("weight", 1.0)),
        )
        if score is None or weight is None:
            text = f"rewards.{name} is {reward!r}: expected a score and a weight"
            found.remarks.append(("reward_unread", text))
            return None
        total += score * weight
    return total
