"""Turns as `tests.strategies` draws them to trajkit's tables, and tables to dicts."""

import pyarrow as pa

import trajkit as tk


def by_session(turns):
    """session_id -> its turns, in order of first appearance."""
    sessions = {}
    for turn in turns:
        sessions.setdefault(turn.get("session_id", "s"), []).append(turn)
    return sessions


def turns_table(turns):
    """The turns table of one session or of several, interleaved ones gathered."""
    # from_records refuses an empty prompt, the stages after it take one
    records = [
        {"session_id": name, **turn, "prompt_ids": turn["prompt_ids"] or [0]}
        for name, session in by_session(turns).items()
        for turn in session
    ]
    table = tk.from_records(records)
    prompts = [
        turn["prompt_ids"] for session in by_session(turns).values() for turn in session
    ]
    place = table.schema.get_field_index("prompt_ids")
    field = table.schema.field(place)
    return table.set_column(place, field, pa.array(prompts, field.type))


def dicts(table, like):
    """The rows of a table as dicts of the columns that the first of ``like`` has."""
    names = list(like[0]) if like else []
    return table.select(names).to_pylist()


def policy_of(choice):
    """The policy that `tests.strategies.policies` drew."""
    name, threshold = choice
    if name == "slime":
        return tk.policy(name, fork_threshold=threshold)
    return tk.policy(name)
