"""Which turns open a branch, and why."""

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests.made_tables import in_delta_form, link_by, turns_table
from tests.strategies import sessions
from trajkit import schema
from trajkit.analysis import branches

ROLES = {"system": 3, "user": 4, "tool": 5, "assistant": 6}
SYSTEM = {"role": "system", "content": "s"}


def said(role, text):
    return {"role": role, "content": text}


def rendered(messages):
    """Ids of messages: a start, one id per letter, an end; distinct per role."""
    return [
        token
        for m in messages
        for token in [ROLES[m["role"]], *map(ord, m["content"]), 2]
    ]


def call(messages, reply, *, known=True, **fields):
    """A turn that sends the messages and is answered by the text."""
    answer = said("assistant", reply)
    return {
        "session_id": "s",
        "prompt_ids": [*rendered(messages), ROLES["assistant"]],
        "output_ids": [*map(ord, reply), 2],
        "prompt_messages": messages if known else None,
        "response_message": answer,
        "output_logprobs": None,
        "finish_reason": "stop",
        "ill_formed": None,
        **fields,
    }


@pytest.fixture(autouse=True, scope="module")
def short_openings():
    with patch.object(branches, "OPENING_TOKENS", 3):
        yield


def labels(turns, route="messages"):
    table = tk.from_records(turns)
    found = tk.analysis.label_branches(table, link_by(table, route))
    assert found.schema.equals(schema.BRANCHES, check_metadata=True)
    return found.to_pylist()


def told(turns, route="messages"):
    found = labels(turns, route)
    return [(one["turn_index"], one["label"], one["other"]) for one in found]


def line_of(n, known=True):
    """n turns that go on where they were, and the conversation after them."""
    talk = [SYSTEM, said("user", "u")]
    turns = []
    for i in range(n):
        turns.append(call(list(talk), f"a{i}", known=known))
        talk += [said("assistant", f"a{i}"), said("tool", f"t{i}")]
    return turns, talk


LINE, TALK = line_of(3)
AGAIN = call(TALK[:6], "b")
NEXT = [*TALK, said("user", "n")]
AFTER_B = call([*TALK[:6], said("assistant", "b"), said("tool", "t")], "c")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([call([said("system", "x"), said("user", "y")], "b")], [(3, "sub_agent", 2)]),
        ([AGAIN], [(3, "retry", 2)]),
        ([AGAIN, call(TALK, "c")], [(3, "retry", 2)]),
        ([AGAIN, AFTER_B], [(3, "retry", 2)]),
        ([AGAIN, AGAIN], [(3, "retry", 2), (4, "retry", 3)]),
        ([AGAIN, call(TALK, "c"), AFTER_B], [(3, "retry", 2)]),
        ([call(TALK[:4], "b")], [(3, "rollback", 1)]),
        ([call(TALK[:5], "b")], [(3, "rollback", 2)]),
        ([call([*TALK[:3], said("user", "v")], "b")], [(3, "rollback", 2)]),
        ([call(TALK[:1], "b")], [(3, "compaction", 2)]),
        ([call([SYSTEM, said("user", "summary")], "b")], [(3, "compaction", 2)]),
        ([call([*TALK[:2], said("user", "summary")], "b")], [(3, "compaction", 2)]),
        ([call([SYSTEM, said("user", "w"), *NEXT[2:]], "b")], [(3, "rewrite", 2)]),
        # as long as the latest request
        ([call([*TALK[:3], said("tool", "x!"), *TALK[4:6]], "b")], [(3, "rewrite", 2)]),
        (
            [call([*TALK[:6], said("assistant", "z"), NEXT[7]], "b")],
            [(3, "rewrite", 2)],
        ),
        ([call(NEXT, "b")], []),
    ],
)
def test_labels_by_hand(more, expected):
    assert told([*LINE, *more]) == expected


def test_agents_are_told_by_their_ids_first():
    fork = call([*TALK[:3], said("user", "sub")], "b", agent_id="sub")
    inner = [*TALK[:3], said("user", "sub"), said("assistant", "b"), said("tool", "x")]
    turns = [
        *LINE,
        fork,
        call(inner, "c", agent_id="sub"),
        call(TALK, "d"),
        call([SYSTEM, said("user", "v")], "e", agent_id="sub"),
    ]
    assert told(turns) == [(3, "sub_agent", 2), (6, "compaction", 4)]
    (first, _) = labels(turns)
    assert "agent_id 'sub'" in first["evidence"]


def test_a_replaced_reply_is_rewritten():
    """Under slime's merge, the request that shows another reply takes its place."""
    turns = [LINE[0], call([*TALK[:2], said("assistant", "x"), TALK[3]], "b")]
    (found,) = labels(turns)
    assert (found["label"], found["other"]) == ("rewrite", 0)
    assert "replaces the reply" in found["evidence"]


EVENTS = st.sampled_from(["retry", "rollback", "compaction", "rewrite", "sub_agent"])


@given(st.integers(2, 5), EVENTS, st.booleans(), st.data())
def test_the_event_of_a_session_is_its_label(n, event, known, data):
    """A line, one event, and a line on from there: one label, where it happened."""
    turns, talk = line_of(n, known)
    if event == "retry":
        talk = talk[:-2]
    elif event == "rollback":
        talk = talk[: 2 + 2 * data.draw(st.integers(0, n - 2))]
    elif event == "compaction":
        talk = [SYSTEM, said("user", "!")]
    elif event == "rewrite":
        k = data.draw(st.integers(1, len(talk) - 3))
        talk = [*talk[:k], said(talk[k]["role"], "!!!"), *talk[k + 1 :]]
    else:
        talk = [said("system", "other" * 9), said("user", "u")]
    for i in range(data.draw(st.integers(1, 3))):
        turns.append(call(list(talk), f"b{i}", known=known))
        talk += [said("assistant", f"b{i}"), said("tool", f"v{i}")]
    found = told(turns, "messages" if known else "tokens")
    assert [line[:2] for line in found] == [(n, event)]


@given(sessions(), st.sampled_from(["messages", "tokens", "previous"]), st.data())
def test_lines_are_of_earlier_turns_in_either_form(turns, route, data):
    table = turns_table(turns)
    links = link_by(table, route)
    found = tk.analysis.label_branches(table, links)
    of_turn = {line["turn_index"]: line for line in table.to_pylist()}
    first = min(of_turn)
    for line in found.to_pylist():
        assert first != line["turn_index"] > line["other"]
    delta = in_delta_form(table, lambda options: data.draw(st.sampled_from(options)))
    assert tk.analysis.label_branches(delta, links).equals(found)


def test_a_reply_to_no_messages_is_shared_in_delta_form():
    """The messages of the other turns begin with the reply to an empty list."""
    reply = {"role": "assistant", "content": "x"}
    turns = [
        {"prompt_messages": messages, "response_message": reply, "prompt_ids": [1]}
        for messages in ([], [reply], [reply])
    ]
    full = turns_table([{**one, "output_ids": [2]} for one in turns])
    delta = in_delta_form(full, lambda options: options[-1])
    assert delta["shared_messages"].to_pylist()[1] == 1
    labels = tk.analysis.label_branches(full, tk.link(full))
    assert tk.analysis.label_branches(delta, tk.link(full)).equals(labels)


def test_links_of_other_turns_are_refused():
    table = tk.from_records(LINE)
    with pytest.raises(tk.errors.InvalidTurnsError, match="links has 2 rows"):
        tk.analysis.label_branches(table, tk.link(table).slice(1))


def test_a_prompt_that_is_sent_again_does_not_drift():
    calls = [
        ([1, 2, 3], [4, 5]),
        ([1, 2, 3], [6, 7]),  # a retry
        ([1, 2, 3, 6, 7, 8], [9]),
        ([1, 2, 3], [11]),  # a rollback
        ([1, 2, 3, 12], [13]),  # another token in place of the reply
        ([1, 2, 3, 12, 13, 14], [15]),
        ([1, 2, 3, 12, 13], [15]),  # a prompt that is truncated
    ]
    turns = tk.from_records(
        [
            {"session_id": "s", "prompt_ids": ids, "output_ids": out}
            for ids, out in calls
        ]
    )
    found = branches.drifted(turns, tk.link(turns, "trl"))
    assert found["turn_index"].to_pylist() == [4, 6]
