"""Turns as rLLM's ``Episode`` objects, whose trainer makes rows itself.

Source: https://github.com/rllm-org/rllm/tree/9beb6e0 (``rllm/types.py``). rLLM merges the
steps of a trajectory where each prompt begins with the path of the step before it.
"""

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
        `trajkit.schema.TURNS`, in full or delta form.
    sessions : table
        `trajkit.schema.SESSIONS`, with a reward for each session of ``turns``.

    Returns
    -------
    list of dict
        One episode per session, with ``id`` as rLLM splits it: the group (or the session
        without one), a colon, the number of the session in it. It has one trajectory per
        ``agent_id``, named after it; rLLM takes trajectories with one name and task for a
        group. A turn that must not train
        (``trainable`` false) is no step: rLLM takes its tokens for context where a later
        prompt has them. ``weight_version`` is that of a turn with one version, if it is an
        integer.

    Raises
    ------
    ExportError
        A session has no reward, or a group a colon in its name; or a turn trains a part
        of its output, has a null logprob or images, for which a step has no field.
    """
    table = expand(as_turns(turns))
    named = [name for name in _COLUMNS if name in table.column_names]
    columns = [*("session_id", "group_id", "reward")]
    facts = {
        row["session_id"]: row for row in as_table(sessions).select(columns).to_pylist()
    }
    episodes: dict[str, dict[str, Any]] = {}
    agents: dict[tuple[str, str], dict[str, Any]] = {}
    for turn in table.select(named).to_pylist():
        session = turn["session_id"]
        own = facts.get(session, {})
        if own.get("reward") is None:
            raise ExportError(f"session {session!r} has no reward: give it one")
        task = own["group_id"] or session
        if ":" in task:
            raise ExportError(
                f"session {session!r}: rLLM splits the id of an episode at its first "
                f"colon, and the group {task!r} has one. Rename it"
            )
        if session not in episodes:
            number = sum(each["task"] == task for each in episodes.values())
            name = f"{task}:{number}"
            episodes[session] = {"id": name, "task": task, "trajectories": []}
        episode = episodes[session]
        if turn.get("trainable") is False:
            continue
        agent = turn.get("agent_id") or "agent"
        if (session, agent) not in agents:
            steps: list[dict[str, Any]] = []
            path = {
                "name": agent,
                "task": task,
                "reward": own["reward"],
                "steps": steps,
            }
            agents[session, agent] = path
            episode["trajectories"].append(path)
        agents[session, agent]["steps"].append(_step(turn))
    for path in agents.values():
        path["steps"][-1]["done"] = True
    return [*episodes.values()]


def _step(turn: dict[str, Any]) -> dict[str, Any]:
    where = f"session {turn['session_id']!r}, turn {turn['turn_index']}"
    if turn.get("mm_items"):
        raise ExportError(f"{where}: the prompt has images, which a step cannot carry")
    if False in (turn.get("output_mask") or ()):
        raise ExportError(
            f"{where}: output_mask leaves tokens out, and a step trains its whole reply. "
            "Export rows to another trainer, or leave the turn out"
        )
    if None in (logprobs := turn["output_logprobs"] or []):
        k = logprobs.index(None)
        raise ExportError(f"{where}: output_logprobs of token {k} is null")
    versions = {span["version"] for span in turn.get("weight_versions") or ()}
    version = versions.pop() if len(versions) == 1 else None
    return {
        "prompt_ids": turn["prompt_ids"],
        "response_ids": turn["output_ids"],
        "logprobs": logprobs,
        "done": False,
        "weight_version": int(version) if version and version.isdecimal() else None,
    }


@objects_of(episode_fields)
def episodes(fields: list[dict[str, Any]]) -> list[Any]:
    """Turns as ``rllm.types.Episode`` objects; see `episode_fields`."""
    from rllm.types import Episode

    return [Episode(**each) for each in fields]
