"""Turns as rLLM's ``Episode`` objects, whose trainer makes rows itself.

Source: https://github.com/rllm-org/rllm/tree/9beb6e0 (``rllm/types.py``). rLLM merges the
steps of a trajectory where each prompt begins with the path of the step before it.
"""

from collections import Counter
from typing import Any

from trajkit.errors import ExportError
from trajkit.export._rows import objects_of
from trajkit.tables.canonical import TableLike, as_table
from trajkit.turns.delta import expand
from trajkit.turns.records import as_turns

_COLUMNS = (
    *("session_id", "turn_index", "prompt_ids", "output_ids", "output_logprobs"),
    *("agent_id", "trainable", "output_mask", "weight_versions", "mm_items"),
)


def episode_fields(turns: TableLike, sessions: TableLike) -> list[dict[str, Any]]:
    """Turns as dicts with the fields of ``Episode``, ``Trajectory`` and ``Step``.

    Parameters
    ----------
    turns : table
        `trajkit.schema.TURNS`, in full or delta form. A turn with images, a null logprob
        or a partial ``output_mask`` is refused.
    sessions : table
        `trajkit.schema.SESSIONS`, with a reward for each session of ``turns``.

    Returns
    -------
    list of dict
        One episode per session, with ``id`` as rLLM splits it: the group (or the session
        without one), a colon, the number of the session in it. It has one trajectory per
        ``agent_id``. A turn with ``trainable`` false is no step: rLLM takes its tokens for
        context where a later prompt has them.
    """
    table = expand(as_turns(turns))
    table = table.select([name for name in _COLUMNS if name in table.column_names])
    by_session: dict[str, list[dict[str, Any]]] = {}
    for turn in table.to_pylist():
        by_session.setdefault(turn["session_id"], []).append(turn)
    facts = as_table(sessions).select(["session_id", "group_id", "reward"])
    known = {fact["session_id"]: fact for fact in facts.to_pylist()}
    numbers = Counter[str]()
    found = []
    for session, own in by_session.items():
        reward = known.get(session, {}).get("reward")
        if reward is None:
            raise ExportError(f"session {session!r} has no reward: give it one")
        task = known[session]["group_id"] or session
        if ":" in task:
            raise ExportError(
                f"session {session!r}: rLLM splits the id of an episode at its first "
                f"colon, and the group {task!r} has one. Rename it"
            )
        steps: dict[str, list[dict[str, Any]]] = {}
        for turn in own:
            if turn.get("trainable") is not False:
                steps.setdefault(turn.get("agent_id") or "agent", []).append(
                    _step(turn)
                )
        paths = []
        for agent, each in steps.items():
            each[-1]["done"] = True
            path = {"name": agent, "task": task, "reward": reward, "steps": each}
            paths.append(path)
        name = f"{task}:{numbers[task]}"
        numbers[task] += 1
        found.append({"id": name, "task": task, "trajectories": paths})
    return found


def _step(turn: dict[str, Any]) -> dict[str, Any]:
    logprobs = turn["output_logprobs"] or []
    faults = {
        "images": turn.get("mm_items"),
        "a null in output_logprobs": None in logprobs,
        "tokens left out by output_mask": False in (turn.get("output_mask") or ()),
    }
    for fault in filter(faults.get, faults):
        raise ExportError(
            f"session {turn['session_id']!r}, turn {turn['turn_index']} has {fault}, for "
            "which a step has no field. Export rows to another trainer, or leave it out"
        )
    versions = {span["version"] for span in turn.get("weight_versions") or ()}
    version = versions.pop() if len(versions) == 1 else None
    return {
        "prompt_ids": turn["prompt_ids"],
        "response_ids": turn["output_ids"],
        "logprobs": logprobs,
        "done": False,
        "weight_version": int(version) if version and version.isdecimal() else None,
    }


episodes = objects_of(episode_fields, "rllm.types:Episode")
