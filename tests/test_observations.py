"""Observation weights: prime-rl's rule as it is, and the rule that mends it."""

import pytest

import trajkit as tk
from tests.golden_sessions import golden, golden_name

ATTRIBUTION = {
    "message_indices": "prompt_message_index",
    "is_content": "prompt_is_content",
    "message_tool_names": "message_tool_names",
}
"""prime-rl's names of the columns."""


def attributed(session):
    """The turns of a golden session with the attribution that the peer was given."""
    records = []
    for turn in session["turns"]:
        given = turn.get("attribution") or {}
        columns = {ours: given.get(theirs) for theirs, ours in ATTRIBUTION.items()}
        flags = columns["prompt_is_content"]
        if flags is not None:
            columns["prompt_is_content"] = [bool(flag) for flag in flags]
        known = {name: value for name, value in turn.items() if name != "attribution"}
        records.append({"session_id": "s", **known, **columns})
    return tk.from_records(records)


def facts(session):
    return {
        "session_id": ["s"],
        "reward": [1.0],
        "error": [session["knobs"]["error"]],
    }


def prime_sessions():
    return [s for s in golden("interleave") if "error" not in s["expected"]]


def test_prime_sessions_are_there():
    assert len(prime_sessions()) == 149


@pytest.mark.parametrize("session", prime_sessions(), ids=golden_name)
def test_prime_is_the_sft_mask_of_interleave(session):
    import pyarrow as pa

    turns = attributed(session)
    rows = tk.linearize(
        turns,
        "interleave",
        sessions=pa.table(
            facts(session), pa.schema(
                [("session_id", pa.string()), ("reward", pa.float64()), ("error", pa.string())]
            )
        ),
    )
    expected = [row["sft_mask"] for row in session["expected"]["rows"]]
    config = session["knobs"]["sft"]
    if config is None or not config["on_tool_outputs"]:
        assert expected == [None] * rows.num_rows
        return
    rows = tk.observations(
        turns,
        rows,
        rule="prime",
        tool_names=config["tool_names"],
        alpha=0.5,
        missing="skip",
    )
    found = rows["observation_weight"].to_pylist()
    assert found == [
        [0.5 * k for k in mask] if mask else [0.0] * len(ids)
        for mask, ids in zip(expected, rows["input_ids"].to_pylist(), strict=True)
    ]
