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
    expected = reference.classify_drift(turns, links.to_pylist(), min_run)
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
    expected = reference.classify_drift(turns, links.to_pylist(), min_run)
    assert dicts(drift, expected) == expected


def test_a_long_stretch_is_back_in_step():
    """Thousands of tokens, so that halving looks for runs of many lengths."""
    body = random.Random(0).choices(range(1000), k=4000)
    held, replay = [1001, *body], [1002, *body[:1500], 1003, *body[1500:]]
    table = turns_table(chain((held[:10], held[10:]), (replay, [])))
    line = tk.classify_drift(table, link_by(table, "previous")).to_pylist()[0]
    names = ("resync_path", "resync_prompt", "resync_length", "cause")
    assert [line[n] for n in names] == [1501, 1502, 2500, "middle_edited"]


def parsed(text):
    """A line: name, turns as ``prompt / output, ...`` (R: a reply), what is expected."""
    name, turns, expected = (part.strip() for part in text.split("|"))
    calls = []
    for call in turns.split(","):
        prompt, output = call.replace("R", "20 21 22 23 24 25").split("/")
        calls.append(([*map(int, prompt.split())], [*map(int, output.split())]))
    return pytest.param(chain(*calls), expected, id=name)


def table(text):
    return [parsed(line) for line in text.strip().splitlines()]


@pytest.mark.parametrize(
    ("turns", "expected"),
    table("""
clean | 1 2 / 5 6, 1 2 5 6 3 / 7 | 4 0 none 0
nothing between | 1 2 / 5 6, 1 2 5 6 / 7 | 4 0 none 0
second token of the reply | 1 2 / 5 6, 1 2 5 9 3 / 7 | 3 1 last_reply 1
first token of the reply | 1 2 / 5 6, 1 2 6 / 7 | 2 2 last_reply 2
the same prompt again | 1 2 / 5 6, 1 2 / 7 | 2 2 last_reply 2
stops before the reply | 1 2 / 5 6, 1 / 7 | 1 3 prompt 2
after an empty reply | 1 2 / , 1 3 / 7 | 1 1 prompt 0
an empty prompt | / 5 6, 5 7 / | 1 1 last_reply 1
in the reply before | 1 / 5 6, 1 5 6 2 / 7, 1 5 9 2 7 / 8 | 2 3 earlier_reply 2
between two replies | 1 / 5 6, 1 5 6 2 / 7, 1 5 6 3 / 8 | 3 2 prompt 1
where a reply drifted | 1 / 5 6, 1 9 6 2 / 7, 1 9 4 / 8 | 2 3 prompt 1
in what drift left of one | 1 / 5 6 4, 1 5 9 2 / 7, 1 8 / 8 | 1 4 earlier_reply 2
"""),
)
def test_drift_by_hand(turns, expected):
    table = turns_table(turns)
    links = link_by(table, "previous")
    line = tk.classify_drift(table, links).to_pylist()[-1]
    twin = reference.classify_drift(turns, links.to_pylist())[-1]
    for found in (line, twin):
        names = ("lcp", "size", "region", "tokens_after_drift")
        assert " ".join(str(found[n]) for n in names) == expected


@pytest.mark.parametrize(
    ("turns", "expected"),
    table("""
truncated in the reply | 1 / R, 1 20 21 / | truncated
truncated in the prompt | 1 2 / R, 1 / | truncated
the end follows at once | 1 / R, 1 22 23 24 25 2 / | head_dropped 3 1 4
from the second token on | 1 / R, 1 20 23 24 25 2 / | head_dropped 4 2 3
a longer run outweighs one | 1 / R, 1 22 23 24 2 22 23 24 25 / | middle_edited 3 5 4
one token is another | 1 / R, 1 20 9 22 23 24 25 2 / | middle_edited 3 3 4
text put before the reply | 1 / R, 1 9 8 R 2 / | middle_edited 1 3 6
edited in a prompt | 1 2 3 4 5 / 20 21 22 23, 1 9 3 4 5 20 21 22 23 / | middle_edited 2 2 7
the last token but one | 1 / R, 1 20 21 22 23 9 25 2 / | tail_changed 6 6 1
nowhere in step | 1 / R, 1 20 21 22 23 9 8 / | tail_changed
as long a run as asked for | 1 / R, 1 9 24 25 23 24 25 / | middle_edited 4 4 3
short run at the end | 1 / R, 1 9 24 25 8 24 25 / | tail_changed 5 2 2
a shorter run before its end | 1 / R, 1 9 20 21 8 / | tail_changed
the prompt ends before | 1 2 3 / R, 1 9 3 8 8 / | diverged 2 2 1
another conversation | 1 2 3 / R, 4 5 6 / | diverged
in the reply before the last | 1 / 20 21, 1 20 21 2 / R, 1 20 9 2 8 / | diverged
ends within held | 1 / 20 30 31, 1 20 30 31 2 / 22 23, 1 20 9 31 8 7 / | diverged 3 3 1
a drifted end | 1 / 20 30 31, 1 20 9 31 2 / 22 23, 1 20 9 8 31 2 7 / | diverged 3 4 2
nor is the end of a prompt | 1 2 3 4 / 5, 1 2 9 9 9 9 8 / 7, 1 6 9 8 5 / | diverged 5 2 2
"""),
)
def test_back_in_step_by_hand(turns, expected):
    table = turns_table(turns)
    links = link_by(table, "previous")
    line = tk.classify_drift(table, links, min_run=3).to_pylist()[-1]
    names = ("cause", "resync_path", "resync_prompt", "resync_length")
    found = [str(line[n]) for n in names if line[n] is not None]
    assert " ".join(found) == expected
    twin = reference.classify_drift(turns, links.to_pylist(), 3)[-1]
    assert dicts(pa.Table.from_pylist([line]), [twin]) == [twin]


def test_the_default_run_is_eight_tokens():
    runs = {n: list(range(100, 100 + n)) for n in (7, 8)}
    for n, run in runs.items():
        table = turns_table(chain(([1, 2, *run, 3], [4]), ([1, 9, *run, 8], [])))
        line = tk.classify_drift(table, link_by(table, "previous")).to_pylist()[0]
        assert line["cause"] == ("middle_edited" if n == 8 else "diverged")
