"""Links, rows and reports of every policy are the twins', and keep every rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests.against_twins import difference
from tests.made_tables import by_session, in_delta_form, linearized, turns_table
from tests.strategies import (
    DRESS,
    END,
    chosen_policies,
    delegating_sessions,
    ends_of_turn,
    fewer_examples,
    forest_policies,
    growing_prompts,
    named_sessions,
    recorded_sessions,
    row_limits,
    runs,
    sessions,
    thresholds,
)
from trajkit import schema


def policies(name, **choices):
    """Policies of a preset with drawn choices."""
    return st.fixed_dictionaries(choices).map(lambda one: tk.policy(name, **one))


def dressed(drawn, **options):
    """Sessions, some with masks and weight versions."""
    return drawn(**options) | drawn(names=DRESS, **options)


# their requests offer one of two lists of tools, or an unknown one
with_tools = sessions(names=["tools_key"], tools=["x", "y", None])


@st.composite
def some_runs(draw):
    """Several sessions, among them such as grow by prompts alone."""
    turns = draw(runs(3, 5))
    more = draw(st.lists(growing_prompts(), max_size=2))
    return turns + [
        {**one, "session_id": f"g{k}"}
        for k, session in enumerate(more)
        for one in session
    ]


routes = st.sampled_from(["messages", "tokens", "previous", "none"])
equalities = st.sampled_from(["strict", "role_content_only"])
any_policy = chosen_policies().map(lambda chosen: tk.policy(chosen[0], **chosen[1]))
polar = policies(
    "polar",
    parent_by=routes | st.just("prompts"),
    end_of_turn_token_id=ends_of_turn,
    keep_untrained=st.booleans(),
    flag_scope=st.sampled_from(["row", "chain"]),
)
# what may be trimmed, and one more
trims = st.sampled_from([1, 2, 3, 1, 0, 5])

CASES = {
    "routes": (
        dressed(sessions),
        policies("slime", parent_by=routes, fork_threshold=thresholds),
    ),
    "plain": (
        dressed(sessions),
        st.sampled_from(["slime", "strict", "per_call"]).map(tk.policy),
    ),
    "choices": (dressed(sessions) | dressed(runs), any_policy),
    "graph": (sessions() | runs() | with_tools, st.just(tk.policy("graph"))),
    "tools": (
        with_tools,
        st.sampled_from(["graph", "faithful", "slime"]).map(
            lambda name: tk.policy(name, compare_tools=True)
        ),
    ),
    "nemo": (
        dressed(named_sessions) | recorded_sessions(),
        policies("nemo", row_selection=st.sampled_from(["all", "main"])),
    ),
    "forests": (
        named_sessions(),
        forest_policies().map(lambda one: tk.policy("nemo", **one)),
    ),
    "miles": (
        dressed(named_sessions),
        policies("miles", message_equality=equalities, fork_threshold=trims),
    ),
    "segments": (
        dressed(delegating_sessions) | dressed(sessions),
        policies(
            "segments",
            max_rows=st.none() | st.integers(1, 3),
            rewards=st.sampled_from(["uniform", "copy", "final_only"]),
        ),
    ),
    "polar": (dressed(growing_prompts) | dressed(sessions) | some_runs(), polar),
}


def check(turns, policy, limit):
    assert difference(turns, policy, limit) is None
    table = turns_table(turns)
    rows, report = linearized(table, policy, max_row_tokens=limit)
    found = tk.verify(rows, table, policy, max_row_tokens=limit)
    assert found.to_pylist() == []
    assert tk.linearize(tk.compact(table), policy, max_row_tokens=limit) == rows
    for line in report.to_pylist():
        lost = sum(n for reason, n in line.items() if reason.startswith("lost_"))
        assert line["tokens_sampled"] == line["tokens_trained"] + lost


@pytest.mark.parametrize("case", CASES)
@fewer_examples  # and `tests.fuzz twins`
@given(st.data(), row_limits)
def test_links_rows_and_report_are_the_twins(case, data, limit):
    turns, chosen = CASES[case]
    check(data.draw(turns), data.draw(chosen), limit)


# a recorder numbers turns itself, refuses empty prompts and keeps no column of these
LEFT_OUT = {"session_id", "started_at", *schema.ROUTING.names} - {"turn_index"}


@pytest.mark.parametrize("case", CASES)
@fewer_examples  # and `tests.fuzz forms`
@given(data=st.data(), limit=row_limits, threads=st.integers(1, 3))
def test_every_form_gives_the_rows_of_the_table(case, data, limit, threads):
    drawn, policies = CASES[case]
    policy = data.draw(policies)
    turns = [
        {
            **{k: v for k, v in turn.items() if k not in LEFT_OUT},
            "session_id": session,
            "turn_index": k,
            "prompt_ids": turn["prompt_ids"] or [0],
        }
        for session, own in by_session(data.draw(drawn)).items()
        for k, turn in enumerate(own)
    ]
    table = turns_table(turns)
    options = {"max_row_tokens": limit, "reward": 3.0}
    rows, report = linearized(table, policy, threads=threads, **options)
    links = tk.link(table, policy)
    tk.validate(links)
    assert tk.linearize(table, policy, links=links, **options) == rows
    delta = in_delta_form(table, lambda some: data.draw(st.sampled_from([*some])))
    assert tk.link(delta, policy) == links
    assert linearized(delta, policy, **options) == (rows, report)
    recorder, apart = tk.Recorder(), []
    for session, own in by_session(turns).items():
        for turn in own:
            call = {
                k: v for k, v in turn.items() if k not in ("session_id", "turn_index")
            }
            recorder.record(session, **call)
        apart += recorder.rows(session, policy, **options).to_pylist()
    assert apart == rows.to_pylist()
    for reward in (3.0, None):
        found = tk.verify(rows, table, policy, max_row_tokens=limit, reward=reward)
        assert found.to_pylist() == []


def growing(*calls, listed=True):
    """One agent whose list of messages grows by one a turn, with any tokens."""
    return [
        {
            "prompt_messages": [{"role": "user", "content": n} for n in range(k + 1)]
            if listed
            else None,
            "prompt_ids": prompt,
            "output_ids": output,
            "finish_reason": "stop",
        }
        for k, (prompt, output) in enumerate(calls)
    ]


# what the twins look for in a turn
UNSAID = {
    "prompt_messages": None,
    "response_message": None,
    "output_logprobs": None,
    "finish_reason": "stop",
    "ill_formed": False,
}


def said(role, content):
    return {"role": role, "content": content}


def talk(*calls):
    """Calls with what they were asked beyond one message, reply, prompt and output."""
    return [
        {
            "prompt_messages": [said("user", "u"), *more],
            "response_message": said("assistant", reply),
            "prompt_ids": prompt,
            "output_ids": output,
            "output_logprobs": [-1.0] * len(output),
            "finish_reason": "stop",
        }
        for more, reply, prompt, output in calls
    ]


A = said("assistant", "a")
# The answer of turn 0 goes on in turn 1 and, with its last token changed, in turn 3; turn
# 2 goes on from turn 0 as well, and for longer.
SHARED = talk(
    ([], "a", [1], [2, 3]),
    ([A, said("user", "v")], "b", [1, 2, 3, 4], [5, 5, 5]),
    ([A, said("user", "w")], "c", [1, 2, 3, *[6] * 5], [7]),
    ([A, said("user", "x")], "d", [1, 2, 9, 4], [5]),
)
# Turn 1 takes turn 0's reply out of its row, turn 2 keeps it in a shorter one.
ABSORBED = [SHARED[0], {**SHARED[3], "prompt_ids": [1, 2, 9, 4, 4, 4]}, SHARED[1]]
SAME_ANSWER_TWICE = talk(
    ([], "a", [1], [5, 6]),
    ([], "a", [1], [5, 6]),
    ([A, said("user", "v")], "a", [1, 5, 6, 2], [5, 6]),
)
TRL_FOREST = {"train_in": "earliest", "parent_by": "messages", "fork_threshold": 9}
X = said("assistant", "x")
# a prompt without tokens, behind a call that sampled some
EMPTY_PROMPTS = [
    {
        "turn_index": index,
        "prompt_messages": [X] * n_messages,
        "response_message": X,
        "prompt_ids": [],
        "output_ids": output_ids,
        "finish_reason": "stop",
    }
    for index, n_messages, output_ids in [(0, 1, [0, 9]), (1, 2, []), (2, 1, [])]
]
FLAG_ONLY = [
    {"prompt_ids": [], "output_ids": [0, 9], "ill_formed": True},
    {"prompt_ids": [], "output_ids": []},
]
SAME_PROMPT_TWICE = growing(
    ([1, 2], [3, END]), ([1, 2], [4, END]), ([1, 2, 4, END, 5], [6, END]), listed=False
)
NO_END_OF_TURN = growing(
    ([1], [2, END]), ([1, 2, 5], [6]), ([1, 2, 5, END], [7]), listed=False
)
# By messages, both later turns continue the first.
CONTINUED_TWICE = talk(
    ([], "a", [1], [2, END]),
    *(([A, said("user", f"{k}")], "a", [1, 2, END, k], [k, END]) for k in (5, 6)),
)
RETRIED = growing(
    ([1], [2, 9]), ([1], [3, 9]), ([1, 3, 9, 4], [5]), ([1, 3, 9, 4], []), listed=False
)


@pytest.mark.parametrize(
    ("turns", "name", "choices", "limit"),
    [
        (SAME_ANSWER_TWICE, "slime", {}, None),
        (SAME_ANSWER_TWICE, "slime", {}, 2),
        (SAME_ANSWER_TWICE, "strict", {}, None),
        (SHARED, "faithful", {"train_in": "every"}, None),
        (SHARED, "faithful", {"train_in": "earliest"}, 6),
        (ABSORBED, "trl", TRL_FOREST, None),
        # the first reply leaves no piece in the row that absorbed it, only its flag
        (
            FLAG_ONLY,
            "trl",
            {"missing_logprobs": "untrain", "keep_untrained": True},
            None,
        ),
        (RETRIED, "nemo", {}, None),
        (EMPTY_PROMPTS, "miles", {"fork_threshold": 3}, None),
        # The third prompt takes two outputs out of the row, and ends before the second.
        (
            growing(([1], [2, 3]), ([1, 2, 3, 4, 5], [6]), ([1, 9], [7])),
            "segments",
            {},
            None,
        ),
        # A prompt that departs right behind the row's opening prompt, and one inside it.
        (
            growing(([1, 2], [3]), ([1, 2], [4]), ([1], [5]), ([2, 2], [])),
            "segments",
            {},
            None,
        ),
        # Every prompt begins with an empty one, which is no reason to continue it.
        (growing(([], [2]), ([3], [4]), listed=False), "segments", {}, None),
        (SAME_PROMPT_TWICE, "polar", {"end_of_turn_token_id": END}, None),
        (NO_END_OF_TURN, "polar", {}, None),
        (
            CONTINUED_TWICE,
            "polar",
            {"parent_by": "messages", "end_of_turn_token_id": END},
            None,
        ),
    ],
)
def test_these_sessions_have_the_twins_rows(turns, name, choices, limit):
    check([{**UNSAID, **turn} for turn in turns], tk.policy(name, **choices), limit)
