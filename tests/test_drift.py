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
    sessions(),
    st.sampled_from(["messages", "tokens", "previous", "none"]),
    thresholds,
    st.integers(1, 4),
)
@example(chain(([], []), ([], [])), "previous", 1024, 1)
def test_drift_is_the_twins(turns, route, threshold, min_run):
    table = turns_table(turns)
    links = tk.link(table, route, merge_threshold=threshold)
    drift = tk.classify_drift(table, links, min_run=min_run)
    expected = reference.classify_drift(
        turns, reference.link(turns, route, threshold), min_run
    )
    assert drift.num_rows == len(expected)
    assert dicts(drift, expected) == expected


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


HELD = [1, 2, *range(100, 130)]  # a prompt of two tokens and a reply of thirty


@pytest.mark.parametrize(
    ("prompt", "cause", "resync"),
    [
        pytest.param([*HELD, 3], "clean", None, id="clean"),
        pytest.param(HELD[:20], "truncated", None, id="truncated"),
        pytest.param(
            [1, 2, *range(110, 130), 3],
            "head_dropped",
            (12, 2, 20),
            id="the first third of the reply dropped",
        ),
        pytest.param(
            [1, 2, *range(100, 110), 99, 98, *range(111, 130), 3],
            "middle_edited",
            (13, 14, 19),
            id="one token become two",
        ),
        pytest.param(
            [*HELD[:-2], 99, 129, 3],
            "tail_changed",
            (31, 31, 1),
            id="the last token but one, and the last as it was",
        ),
        pytest.param([*HELD[:-2], 99, 98, 3], "tail_changed", None, id="the last two"),
        pytest.param([1, 9, 9, 9], "diverged", None, id="another conversation"),
    ],
)
def test_causes_by_hand(prompt, cause, resync):
    turns = chain((HELD[:2], HELD[2:]), (prompt, [7]))
    table = turns_table(turns)
    (line,) = tk.classify_drift(table, tk.link(table, "previous")).to_pylist()
    found = tuple(line[f"resync_{name}"] for name in ("held", "prompt", "length"))
    assert line["cause"] == cause
    assert found == (resync or (None, None, None))


def test_a_run_of_no_tokens_is_refused():
    table = turns_table(chain(([1], [2])))
    with pytest.raises(tk.PolicyError, match="min_run=0"):
        tk.classify_drift(table, tk.link(table), min_run=0)
