"""Turns as the fields of rLLM's ``Episode``, whose trainer makes rows itself.

Source: https://github.com/rllm-org/rllm/tree/9beb6e0 (``rllm/types.py``). rLLM merges the
steps of a trajectory where each prompt begins with the path of the step before it.
"""

from collections import Counter
from typing import Any

from trajkit.errors import ExportError
from trajkit.tables.canonical import TableLike, as_table
from trajkit.turns.delta import expand
from trajkit.turns.records import as_turns

_COLUMNS = (
    *("session_id", "turn_index", "prompt_ids", "output_ids", "output_logprobs"),
    *("agent_id", "trainable", "output_mask", "weight_versions", "mm_items"),
)


def episode_fields(turns: TableLike, sessions: TableLike) -> list[dict[str, Any]]:
    """Turns as dicts with the fields of ``Episode``, ``Trajectory`` and ``Step``.

    An episode per session, with ``id`` as rLLM splits it: the group (or the session without
    one), a colon, the number of the session in it. It has a trajectory per ``agent_id``. A
    turn with ``trainable`` false is no step: rLLM takes its tokens for context where a
    later prompt has them.

    Parameters
    ----------
    turns : table
        `trajkit.schema.TURNS`, in full or delta form. A turn with images, a null logprob
        or a partial ``output_mask`` is refused.
    sessions : table
        `trajkit.schema.SESSIONS`, with a reward for each session of ``turns``.
    """
    table = expand(as_turns(turns))
    table = table.select([name for name in _COLUMNS if name in table.column_names])
    known = {fact["session_id"]: fact for fact in as_table(sessions).to_pylist()}
    episodes: dict[str, dict[str, Any]] = {}
    paths: dict[tuple[str, str], dict[str, Any]] = {}
    numbers = Counter[str]()
    for turn in table.to_pylist():
        session, logprobs = turn["session_id"], turn["output_logprobs"] or []
        trained, fact = turn.get("trainable") is not False, known.get(session, {})
        reward, task = fact.get("reward"), fact.get("group_id") or session
        cut = False in (turn.get("output_mask") or ())
        faults = {
            "the session has no reward": reward is None,
            f"the group {task!r} has a colon, at which rLLM splits ids": ":" in task,
            "the prompt has images": trained and turn.get("mm_items"),
            "output_logprobs has a null": trained and None in logprobs,
            "output_mask leaves tokens out": trained and cut,
        }
        for fault in filter(faults.get, faults):
            raise ExportError(
                f"session {session!r}, turn {turn['turn_index']}: {fault}, for which rLLM "
                "has no field. Mend or leave it out, or export rows to another trainer"
            )
        if session not in episodes:
            own = {"id": f"{task}:{numbers[task]}", "task": task, "trajectories": []}
            episodes[session] = own
            numbers[task] += 1
        if not trained:
            continue
        agent = turn.get("agent_id") or "agent"
        if (session, agent) not in paths:
            path = {"name": agent, "task": task, "reward": reward, "steps": []}
            paths[session, agent] = path
            episodes[session]["trajectories"].append(path)
        versions = {span["version"] for span in turn.get("weight_versions") or ()}
        version = versions.pop() if len(versions) == 1 else None
        number = int(version) if version and version.isdecimal() else None
        step = {"prompt_ids": turn["prompt_ids"], "response_ids": turn["output_ids"]}
        step |= {"logprobs": logprobs, "done": False, "weight_version": number}
        paths[session, agent]["steps"].append(step)
    for path in paths.values():
        path["steps"][-1]["done"] = True
    return [*episodes.values()]
