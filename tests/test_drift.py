"""How a prompt departs from what was held, against the twin and by hand."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import trajkit as tk
from tests import reference
from tests.strategies import sessions, thresholds
from tests.tables import dicts, turns_table


def chain(*calls):
    """Turns in one line: (prompt_ids, output_ids) each."""
    return [
        {"prompt_ids": prompt, "output_ids": output, "prompt_messages": None}
        for prompt, output in calls
    ]


@given(
    sessions(), st.sampled_from(["messages", "tokens", "previous", "none"]), thresholds
)
def test_drift_is_the_twins(turns, route, threshold):
    table = turns_table(turns)
    links = tk.link(table, route, merge_threshold=threshold)
    drift = tk.classify_drift(table, links)
    expected = reference.classify_drift(turns, reference.link(turns, route, threshold))
    assert drift.num_rows == len(expected)
    assert dicts(drift, expected) == expected


@given(sessions(), st.sampled_from(["messages", "previous"]))
@example(chain(([], []), ([], [])), "previous")
def test_back_in_step_is_where_it_says(turns, route):
    """The run of tokens that resync names stands in held and in the prompt."""
    table = turns_table(turns)
    called = dict(zip(reference.turn_indices(turns), turns, strict=True))
    for line in tk.classify_drift(table, tk.link(table, route)).to_pylist():
        held = reference.held(called[line["parent"]])
        prompt = called[line["turn_index"]]["prompt_ids"]
        n = line["resync_length"]
        if n is None:
            assert line["resync_held"] is None
            assert line["resync_prompt"] is None
            continue
        a, b = line["resync_held"], line["resync_prompt"]
        assert n > 0
        assert min(a, b) >= line["lcp"]
        assert held[a : a + n] == prompt[b : b + n]
        assert len(held[a : a + n]) == n


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        pytest.param(
            chain(([1, 2], [5, 6]), ([1, 2, 5, 6, 3], [7])),
            (4, 0, "none", 0),
            id="clean",
        ),
        pytest.param(
            chain(([1, 2], [5, 6]), ([1, 2, 5, 6], [7])),
            (4, 0, "none", 0),
            id="clean: nothing between",
        ),
        pytest.param(
            chain(([1, 2], [5, 6]), ([1, 2, 5, 9, 3], [7])),
            (3, 1, "last_reply", 1),
            id="second token of the last reply",
        ),
        pytest.param(
            chain(([1, 2], [5, 6]), ([1, 2, 6], [7])),
            (2, 2, "last_reply", 2),
            id="first token of the last reply",
        ),
        pytest.param(
            chain(([1, 2], [5, 6]), ([1, 2], [7])),
            (2, 2, "last_reply", 2),
            id="the same prompt again",
        ),
        pytest.param(
            chain(([1, 2], [5, 6]), ([1], [7])),
            (1, 3, "prompt", 2),
            id="a prompt that stops before the reply",
        ),
        pytest.param(
            chain(([1, 2], []), ([1, 3], [7])),
            (1, 1, "prompt", 0),
            id="after an empty reply",
        ),
        pytest.param(
            chain(([], [5, 6]), ([5, 7], [])),
            (1, 1, "last_reply", 1),
            id="an empty prompt",
        ),
        pytest.param(
            chain(([1], [5, 6]), ([1, 5, 6, 2], [7]), ([1, 5, 9, 2, 7], [8])),
            (2, 3, "earlier_reply", 2),
            id="in the reply before the last",
        ),
        pytest.param(
            chain(([1], [5, 6]), ([1, 5, 6, 2], [7]), ([1, 5, 6, 3], [8])),
            (3, 2, "prompt", 1),
            id="between two replies",
        ),
        pytest.param(
            chain(([1], [5, 6]), ([1, 9, 6, 2], [7]), ([1, 9, 4], [8])),
            (2, 3, "prompt", 1),
            id="where a reply stood until it drifted",
        ),
        pytest.param(
            chain(([1], [5, 6, 4]), ([1, 5, 9, 2], [7]), ([1, 8], [8])),
            (1, 4, "earlier_reply", 2),
            id="in what an earlier drift left of a reply",
        ),
    ],
)
def test_drift_by_hand(turns, expected):
    table = turns_table(turns)
    line = tk.classify_drift(table, tk.link(table, "previous")).to_pylist()[-1]
    assert tuple(line[n] for n in ("lcp", "size", "region", "at_stake")) == expected
    twin = reference.classify_drift(turns, reference.link(turns, "previous"))[-1]
    assert tuple(twin[n] for n in ("lcp", "size", "region", "at_stake")) == expected
