"""How a prompt departs from what was held, against the twin and by hand."""

import random

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import trajkit as tk
from tests.made_tables import dicts, link_by, turns_table
from tests.oracles import rows as reference
from tests.strategies import sessions, thresholds


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
    links = link_by(table, route, merge_threshold=threshold)
    drift = tk.classify_drift(table, links, min_run=min_run)
    expected = reference.classify_drift(
        turns, reference.link(turns, route, threshold), min_run
    )
    assert drift.num_rows == len(expected)
    assert dicts(drift, expected) == expected


few_tokens = st.lists(st.integers(0, 2), max_size=24)


@given(few_tokens, few_tokens, few_tokens, st.integers(1, 9))
def test_runs_among_few_tokens_are_the_twins(prompt, output, replay, min_run):
    """Two turns over three token ids: the same short runs stand everywhere."""
    turns = chain((prompt, output), (replay, []))
    table = turns_table(turns)
    links = link_by(table, "previous")
    drift = tk.classify_drift(table, links, min_run=min_run)
    expected = reference.classify_drift(
        turns, reference.link(turns, "previous"), min_run
    )
    assert dicts(drift, expected) == expected


def test_a_long_stretch_is_back_in_step():
    """Thousands of tokens, so that halving looks for runs of many lengths."""
    body = random.Random(0).choices(range(1000), k=4000)
    held, replay = [1001, *body], [1002, *body[:1500], 1003, *body[1500:]]
    table = turns_table(chain((held[:10], held[10:]), (replay, [])))
    line = tk.classify_drift(table, link_by(table, "previous")).to_pylist()[0]
    names = ("resync_path", "resync_prompt", "resync_length", "cause")
    assert [line[n] for n in names] == [1501, 1502, 2500, "middle_edited"]


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
    line = tk.classify_drift(table, link_by(table, "previous")).to_pylist()[-1]
    assert (
        tuple(line[n] for n in ("lcp", "size", "region", "tokens_after_drift"))
        == expected
    )
    twin = reference.classify_drift(turns, reference.link(turns, "previous"))[-1]
    assert (
        tuple(twin[n] for n in ("lcp", "size", "region", "tokens_after_drift"))
        == expected
    )


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
    (line,) = tk.classify_drift(table, link_by(table, "previous")).to_pylist()
    found = tuple(line[f"resync_{name}"] for name in ("path", "prompt", "length"))
    assert line["cause"] == cause
    assert found == (resync or (None, None, None))


REPLY = [20, 21, 22, 23, 24, 25]


@pytest.mark.parametrize(
    ("turns", "cause", "resync"),
    [
        pytest.param(
            chain(([1], REPLY), ([1, 20, 21], [])),
            "truncated",
            None,
            id="truncated in the reply",
        ),
        pytest.param(
            chain(([1, 2], REPLY), ([1], [])),
            "truncated",
            None,
            id="truncated in the prompt",
        ),
        pytest.param(
            chain(([1], REPLY), ([1, 22, 23, 24, 25, 2], [])),
            "head_dropped",
            (3, 1, 4),
            id="head dropped: the end of the reply follows at once",
        ),
        pytest.param(
            chain(([1], REPLY), ([1, 20, 23, 24, 25, 2], [])),
            "head_dropped",
            (4, 2, 3),
            id="head dropped: from the second token on",
        ),
        pytest.param(
            chain(([1], REPLY), ([1, 22, 23, 24, 2, 22, 23, 24, 25], [])),
            "middle_edited",
            (3, 5, 4),
            id="a longer run further on outweighs one at once",
        ),
        pytest.param(
            chain(([1], REPLY), ([1, 20, 9, 22, 23, 24, 25, 2], [])),
            "middle_edited",
            (3, 3, 4),
            id="middle edited: one token is another",
        ),
        pytest.param(
            chain(([1], REPLY), ([1, 9, 8, *REPLY, 2], [])),
            "middle_edited",
            (1, 3, 6),
            id="middle edited: text put before the reply",
        ),
        pytest.param(
            chain(([1, 2, 3, 4, 5], REPLY), ([1, 9, 3, 4, 5, *REPLY], [])),
            "middle_edited",
            (2, 2, 9),
            id="middle edited: in the prompt",
        ),
        pytest.param(
            chain(([1], REPLY), ([1, 20, 21, 22, 23, 9, 25, 2], [])),
            "tail_changed",
            (6, 6, 1),
            id="tail changed: the last token but one",
        ),
        pytest.param(
            chain(([1], REPLY), ([1, 20, 21, 22, 23, 9, 8], [])),
            "tail_changed",
            None,
            id="tail changed: nowhere in step",
        ),
        pytest.param(
            chain(([1], REPLY), ([1, 9, 24, 25, 23, 24, 25], [])),
            "middle_edited",
            (4, 4, 3),
            id="as long a run as is asked for",
        ),
        pytest.param(
            chain(([1], REPLY), ([1, 9, 24, 25, 8, 24, 25], [])),
            "tail_changed",
            (5, 2, 2),
            id="a shorter run ends the message; the first in the prompt",
        ),
        pytest.param(
            chain(([1], REPLY), ([1, 9, 20, 21, 8], [])),
            "tail_changed",
            None,
            id="a shorter run that does not end the message is none",
        ),
        pytest.param(
            chain(([1, 2, 3], REPLY), ([1, 9, 3, 8, 8], [])),
            "diverged",
            (2, 2, 1),
            id="diverged: in the prompt, which ends before the reply",
        ),
        pytest.param(
            chain(([1, 2, 3], REPLY), ([4, 5, 6], [])),
            "diverged",
            None,
            id="diverged: another conversation",
        ),
        pytest.param(
            chain(([1], [20, 21]), ([1, 20, 21, 2], REPLY), ([1, 20, 9, 2, 8], [])),
            "diverged",
            None,
            id="diverged: in the reply before the last, which ends where it does",
        ),
        pytest.param(
            chain(
                ([1], [20, 30, 31]),
                ([1, 20, 30, 31, 2], REPLY),
                ([1, 20, 9, 31, 8, 7], []),
            ),
            "diverged",
            (3, 3, 1),
            id="the message that drifted ends within held",
        ),
        pytest.param(
            chain(
                ([1], [20, 30, 31]),
                ([1, 20, 9, 31, 2], REPLY),
                ([1, 20, 9, 8, 31, 2, 7], []),
            ),
            "diverged",
            (3, 4, 2),
            id="an end that drifted away before is no end",
        ),
        pytest.param(
            chain(
                ([1, 2, 3, 4], [5]),
                ([1, 2, 9, 9, 9, 9, 8], [7]),
                ([1, 6, 9, 8, 5], []),
            ),
            "diverged",
            (5, 2, 2),
            id="nor is the end of a prompt",
        ),
    ],
)
def test_back_in_step_by_hand(turns, cause, resync):
    table = turns_table(turns)
    line = tk.classify_drift(table, link_by(table, "previous"), min_run=3).to_pylist()[
        -1
    ]
    found = tuple(line[f"resync_{name}"] for name in ("path", "prompt", "length"))
    assert line["cause"] == cause
    assert found == (resync or (None, None, None))
    twin = reference.classify_drift(turns, reference.link(turns, "previous"), 3)[-1]
    assert dicts(pa.Table.from_pylist([line]), [twin]) == [twin]


def test_the_default_run_is_eight_tokens():
    runs = {n: list(range(100, 100 + n)) for n in (7, 8)}
    for n, run in runs.items():
        table = turns_table(chain(([1, 2, *run, 3], [4]), ([1, 9, *run, 8], [])))
        line = tk.classify_drift(table, link_by(table, "previous")).to_pylist()[0]
        assert line["cause"] == ("middle_edited" if n == 8 else "diverged")


def test_a_run_of_no_tokens_is_refused():
    table = turns_table(chain(([1], [2])))
    with pytest.raises(tk.errors.ArgumentError, match="min_run=0"):
        tk.classify_drift(table, tk.link(table), min_run=0)


def test_tokens_tell_drift_where_a_turn_has_no_messages():
    """Under every route by messages, as between turns of a run of token ids only."""
    turns = tk.from_records(
        {"session_id": "s", "prompt_ids": prompt, "output_ids": output}
        for prompt, output in [
            ([1], [2, 3]),
            ([1, 2, 9], [4, 5]),
            ([1, 2, 9, 4, 5, 8], [6, 7]),
            ([1, 2, 9, 4, 5, 8], [6]),
            ([1, 2, 9, 4, 5, 8, 6, 1], [7]),
        ]
    )
    for route in ("messages", "agents"):
        links = link_by(turns, route)
        assert links["parent"].to_pylist()[:3] == [None, 0, 1]
        assert links["link_reason"].to_pylist()[1:3] == ["tokens", "tokens"]
        drift = tk.classify_drift(turns, links)
        assert drift["cause"].to_pylist()[:2] == ["tail_changed", "clean"]
        assert drift["tokens_after_drift"].to_pylist()[:2] == [1, 0]
    links = link_by(turns, "messages")
    # a retry continues what the first try did, and a whole path counts before a part
    assert links["parent"].to_pylist() == [None, 0, 1, 1, 3]
    links = link_by(turns, "generations")
    assert links["link_reason"].to_pylist()[1] == "refused_tokens"
