"""Every sampled token has a line, and lines of a kind add up to the report's counts."""

from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests.fuzz.sessions import generated_runs
from tests.made_tables import linearized, turns_table
from tests.strategies import (
    chosen_policies,
    delegating_sessions,
    few,
    forest_policies,
    many_calls,
    runs,
    sessions,
)
from trajkit.policies import PRESETS
from trajkit.schema import LOSSES, OUTPUT_SPANS
from trajkit.tables import limits


def check(turns, policy, sessions=None):
    """Compare the lines with turns, rows and report, token by token."""
    rows, report = linearized(turns, policy, sessions=sessions)
    table = tk.analysis.output_spans(turns, policy, sessions=sessions)
    assert table.schema.equals(OUTPUT_SPANS, check_metadata=True)
    lines = table.to_pylist()
    places, counts, lengths = {}, Counter(), {}
    for turn in turns.select(["session_id", "turn_index", "output_ids"]).to_pylist():
        place = turn["session_id"], turn["turn_index"]
        places[place] = len(places)
        lengths[place] = len(turn["output_ids"])
    seen, order = {}, []
    for line in lines:
        place = line["session_id"], line["turn_index"]
        start, stop = line["output_start"], line["output_stop"]
        assert 0 <= start < stop <= lengths[place]
        order.append(
            (places[place], start, -1 if (n := line["row_index"]) is None else n)
        )
        for k in range(start, stop):
            kinds = seen.setdefault((*place, k), [])
            counts[place[0], line["kind"]] += not kinds
            kinds.append(line["kind"])
    assert order == sorted(order)
    assert len(seen) == sum(lengths.values())
    assert all(len(kinds) == 1 or set(kinds) == {"trained"} for kinds in seen.values())
    for line in report.to_pylist():
        name = line["session_id"]
        assert counts[name, "trained"] == line["tokens_trained"]
        for loss in LOSSES:
            assert counts[name, loss] == line[f"lost_{loss}"], loss
    check_rows(rows, lines)


def check_rows(rows, lines):
    """The lines of a row are its spans, and a row that has a token is named."""
    theirs, ours = set(), set()
    for row in rows.to_pylist():
        for span in row["spans"]:
            for k in range(span["output_start"], span["output_stop"]):
                token = row["session_id"], span["turn_index"], k
                theirs.add((*token, row["row_index"], span["kind"]))
    for line in lines:
        for k in range(line["output_start"], line["output_stop"]):
            kind = line["kind"]
            if kind in ("aborted", "masked", "no_logprob"):
                kind = "untrainable"
            if line["row_index"] is not None:
                token = line["session_id"], line["turn_index"], k
                ours.add((*token, line["row_index"], kind))
    assert ours <= theirs
    kinds = ("trained", "absorbed", "no_splice_point")
    assert {one for one in theirs if one[-1] in kinds} <= ours


PRESET = st.sampled_from([*PRESETS])
RESTARTING = st.fixed_dictionaries(
    {
        "parent_by": st.sampled_from(["agents", "messages", "previous"]),
        "keep_prefix": st.booleans(),
        "row_selection": st.sampled_from(["all", "main"]),
        "max_rows": st.none() | st.integers(1, 2),
        "keep_untrained": st.booleans(),
    }
).map(lambda choices: tk.policy("segments", **choices))
CHANGED = chosen_policies().map(lambda chosen: tk.policy(chosen[0], **chosen[1]))
ANY_CHOICE = forest_policies().map(lambda choices: tk.Policy(name="some", **choices))


@pytest.mark.parametrize(
    ("turns", "policies"),
    [
        pytest.param(sessions() | delegating_sessions(), PRESET, id="sub-agents"),
        pytest.param(runs(), CHANGED, id="changed presets"),
        pytest.param(sessions(), ANY_CHOICE, id="any choice"),
        pytest.param(sessions() | delegating_sessions(), RESTARTING, id="restarts"),
    ],
)
@given(st.data())
def test_lines_add_up_to_the_report(turns, policies, data):
    check(turns_table(data.draw(turns)), data.draw(policies))


@few
@given(many_calls(), PRESET)
def test_long_sessions(turns, name):
    check(turns_table(turns), name)


@given(st.integers(0, 999), st.data())
def test_neither_form_nor_parts_matter(seed, data):
    full = turns_table(generated_runs(4, seed, max_turns=5))
    name = data.draw(PRESET)
    found = tk.analysis.output_spans(full, name)
    assert tk.analysis.output_spans(tk.compact(full), name).equals(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "PART_TOKENS", 1)
        assert tk.analysis.output_spans(full, name).equals(found)


def test_sessions_with_an_error_are_untrainable():
    turns = tk.from_records([{"session_id": "a", "prompt_ids": [1], "output_ids": [2]}])
    sessions = pa.table({"session_id": ["a", "b"], "error": ["killed", None]})
    check(turns, "faithful", sessions=sessions)
    lines = tk.analysis.output_spans(turns, sessions=sessions).to_pylist()
    assert [line["kind"] for line in lines] == ["untrainable"]


def kinds(records, policy, **choices):
    """Turn, range, kind, row and drift of each line of one session."""
    turns = tk.from_records({"session_id": "a", **one} for one in records)
    policy = tk.policy(policy, **choices)
    check(turns, policy)
    lines = tk.analysis.output_spans(turns, policy).to_pylist()
    return [tuple(line.values())[1:] for line in lines]


def calls(*pairs, **more):
    return [{"prompt_ids": ids, "output_ids": out, **more} for ids, out in pairs]


DRIFTING = calls(
    ([1, 2], [3, 4, 5]),
    ([1, 2, 3, 4, 5, 6], [7, 8, 9, 10]),
    ([1, 2, 3, 4, 5, 6, 7, 11], [12]),
    ([1, 13], [14]),
)
RESTARTED = calls(([1, 2], [3, 4, 5]), ([1, 2, 3, 9], [7]), ([1, 8], [9]))
AFTER_PROMPT = calls(([1, 2], [3, 4, 5]), ([1, 2, 9], [7]), ([1, 8], [9]))
SEGMENTS = {"policy": "segments", "parent_by": "previous"}
BRANCHED = calls(([9], [8]), ([1], [2, 3]), ([1, 2, 3, 4], [5]), ([1, 2, 3, 6], [7]))
ABSORBED = [*calls(([1], [2, 3])), *calls(([1, 2, 9], [4]), trainable=False)]
QUESTION, ANSWER, OTHER = (
    {"role": role, "content": text}
    for role, text in (("user", "a"), ("assistant", "a"), ("assistant", "b"))
)
REWRITTEN = [
    *calls(([1], [2]), prompt_messages=[QUESTION], response_message=ANSWER),
    *calls(
        ([1, 3, 1], [4]),
        prompt_messages=[QUESTION, OTHER, QUESTION],
        response_message=ANSWER,
    ),
]


@pytest.mark.parametrize(
    ("records", "choices", "expected"),
    [
        pytest.param(
            DRIFTING,
            {"policy": "trl"},
            [
                (0, 0, 3, "trained", 0, None),
                (1, 0, 1, "trained", 0, None),
                (1, 1, 4, "absorbed", 0, 2),
                (2, 0, 1, "trained", 0, None),
                (3, 0, 1, "trained", 1, None),
            ],
            id="the turn that drifted",
        ),
        pytest.param(
            DRIFTING,
            SEGMENTS,
            [
                (0, 0, 3, "restarted", None, 3),
                (1, 0, 4, "absorbed", None, 2),
                (2, 0, 1, "restarted", None, 3),
                (3, 0, 1, "trained", 0, None),
            ],
            id="the turn that restarted the row",
        ),
        pytest.param(
            DRIFTING[:3],
            {"policy": "miles"},
            [
                (0, 0, 3, "trained", 0, None),
                (1, 0, 4, "trained", 0, None),
                (2, 0, 1, "refused", None, 2),
            ],
            id="a refused turn itself",
        ),
        pytest.param(
            calls(([1, 2], [3, 4, 5]), ([1, 2, 3, 4, 5, 6], [7]), ([1, 2, 3, 9], [10])),
            SEGMENTS,
            [
                (0, 0, 3, "absorbed", 0, 2),
                (1, 0, 1, "absorbed", 0, 2),
                (2, 0, 1, "trained", 0, None),
            ],
            id="the first turn that departs before the end of the output",
        ),
        pytest.param(
            calls(([1, 2], [3, 4, 5]), ([1, 2, 3, 4, 9], [6]), ([1, 2, 3, 8], [7])),
            {**SEGMENTS, "keep_prefix": True},
            [
                (0, 0, 1, "trained", 0, None),
                (0, 1, 2, "absorbed", 0, 2),
                (0, 2, 3, "absorbed", 0, 1),
                (1, 0, 1, "absorbed", 0, 2),
                (2, 0, 1, "trained", 0, None),
            ],
            id="each token its own turn where prefixes are kept",
        ),
        pytest.param(
            RESTARTED,
            {**SEGMENTS, "keep_prefix": True},
            [
                (0, 0, 1, "restarted", None, 2),
                (0, 1, 3, "absorbed", None, 1),
                (1, 0, 1, "restarted", None, 2),
                (2, 0, 1, "trained", 0, None),
            ],
            id="a restarted row lost some tokens before",
        ),
        pytest.param(
            AFTER_PROMPT,
            SEGMENTS,
            [
                (0, 0, 3, "absorbed", None, 1),
                (1, 0, 1, "restarted", None, 2),
                (2, 0, 1, "trained", 0, None),
            ],
            id="drift right after the row's first prompt does not restart it",
        ),
        pytest.param(
            calls(([1], [2]), ([1], [3]), ([1, 2, 4], [5])),
            {"policy": "nemo"},
            [
                (0, 0, 1, "trained", 0, None),
                (1, 0, 1, "quarantined", None, None),
                (2, 0, 1, "trained", 0, None),
            ],
            id="retries that nothing continues",
        ),
        pytest.param(
            BRANCHED,
            {"policy": "nemo"},
            [
                (0, 0, 1, "trained", 0, None),
                (1, 0, 2, "trained", 1, None),
                (1, 0, 2, "trained", 2, None),
                (2, 0, 1, "trained", 1, None),
                (3, 0, 1, "trained", 2, None),
            ],
            id="every row that trains a token",
        ),
        pytest.param(
            [{"prompt_ids": [1], "output_ids": [2, 3], "output_mask": [True, False]}],
            {"policy": "faithful"},
            [(0, 0, 1, "trained", 0, None), (0, 1, 2, "masked", 0, None)],
            id="a masked token names its row",
        ),
        pytest.param(
            calls(([1], [2]), finish_reason="abort") + calls(([1, 2, 3], [4])),
            {"policy": "faithful"},
            [(0, 0, 1, "aborted", 0, None), (1, 0, 1, "trained", 0, None)],
            id="an aborted token names its row",
        ),
        pytest.param(
            ABSORBED,
            {"policy": "slime"},
            [(0, 0, 2, "absorbed", None, 1), (1, 0, 1, "untrainable", None, None)],
            id="a row that trains nothing is no row",
        ),
        pytest.param(
            ABSORBED,
            {"policy": "slime", "keep_untrained": True},
            [(0, 0, 2, "absorbed", 0, 1), (1, 0, 1, "untrainable", 0, None)],
            id="unless it is kept",
        ),
        pytest.param(
            calls(([1], [2]), trainable=False) + calls(([1, 5], [6])),
            {"policy": "polar", "keep_untrained": False},
            [
                (0, 0, 1, "untrainable", None, None),
                (1, 0, 1, "no_splice_point", None, None),
            ],
            id="nor a row without a splice point",
        ),
        pytest.param(
            REWRITTEN,
            {"policy": "slime"},
            [(0, 0, 1, "rewritten", None, 1), (1, 0, 1, "trained", 0, None)],
            id="the turn that shows another reply",
        ),
    ],
)
def test_a_loss_names_the_turn_that_caused_it(records, choices, expected):
    assert kinds(records, **choices) == expected
