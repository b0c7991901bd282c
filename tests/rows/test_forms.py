"""Sessions in every form give the rows of their table, and these keep the rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests.made_tables import by_session, in_delta_form, linearized, turns_table
from tests.strategies import (
    chosen_policies,
    delegating_sessions,
    ends_of_turn,
    growing_prompts,
    named_sessions,
    row_limits,
    runs,
    sessions,
)


def choices(name, **drawn):
    return st.builds(lambda **chosen: tk.policy(name, **chosen), **drawn)


RULES = {
    "nemo": (
        named_sessions(),
        choices("nemo", row_selection=st.sampled_from(["all", "main"])),
    ),
    "miles": (
        named_sessions(),
        choices(
            "miles",
            message_equality=st.sampled_from(["strict", "role_content_only"]),
            fork_threshold=st.sampled_from([1, 2, 3, 1, 0, 5]),
        ),
    ),
    "polar": (
        growing_prompts() | runs(),
        choices("polar", end_of_turn_token_id=ends_of_turn),
    ),
    "graph": (sessions() | runs(), choices("graph")),
    "segments": (
        delegating_sessions() | runs(),
        choices("segments", rewards=st.sampled_from(["uniform", "final_only"])),
    ),
    "any": (runs(), chosen_policies().map(lambda one: tk.policy(one[0], **one[1]))),
}


@pytest.mark.parametrize("name", RULES)
@given(data=st.data(), limit=row_limits, threads=st.integers(1, 3))
def test_every_form_gives_the_rows_of_the_table(name, data, limit, threads):
    drawn, policies = RULES[name]
    policy = data.draw(policies)
    # a recorder numbers turns itself, refuses empty prompts and keeps no request_id
    left_out = ("request_id", "started_at", "session_id")
    turns = [
        {
            **{k: v for k, v in turn.items() if k not in left_out},
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
