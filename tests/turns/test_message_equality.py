"""Messages are sorted into classes of equal ones, under each equality."""

import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import trajkit as tk
from tests.made_tables import replaced
from tests.oracles import segments as reference_segments
from tests.oracles.forests import fields_of, strict
from tests.oracles.graph import identity
from tests.strategies import chat_messages
from trajkit import _core
from trajkit.errors import InvalidTurnsError, LayoutError
from trajkit.schema import TURNS
from trajkit.turns.messages import classify, message_key
from trajkit.turns.sessions import Sessions


def test_lists_without_any_message_may_have_a_short_buffer_of_keys():
    turns = tk.from_records([{"session_id": "s", "prompt_ids": [1], "output_ids": [2]}])
    lists = TURNS.field("messages").type
    # Arrow gives empty arrays of nulls a buffer of four bytes
    none = pa.LargeListArray.from_arrays([0, 0], pa.nulls(0, lists.value_type))
    assert tk.link(replaced(turns, "messages", none.cast(lists))).num_rows == 1


def chat(*contents):
    return [{"role": "user", "content": content} for content in contents]


def classes_of(messages, equality):
    """The class of each message of one request, by number."""
    call = {"session_id": "s", "prompt_ids": [1], "output_ids": [2]}
    turns = tk.from_records([{**call, "prompt_messages": messages}])
    return classify(Sessions.of(turns), equality).places.tolist()


def test_cache_control_is_left_out_at_any_depth():
    block = {"type": "text", "text": "a"}
    shown = [block]
    messages = [
        *chat([{**block, "cache_control": {"type": "x"}}]),
        {**chat(shown)[0], "cache_control": 1},
        *chat([{**block, "text": "cache_control"}], [shown]),
    ]
    places = classes_of(messages, "text")
    assert places[0] == places[1]
    assert len({*places}) == 3


def two_turns():
    return tk.from_records(
        {
            "session_id": "s",
            "prompt_ids": [1],
            "output_ids": [2],
            "prompt_messages": messages,
            "response_message": {"role": "assistant", "content": "r"},
        }
        for messages in (chat("a"), chat("b", "a"))
    )


def test_a_body_that_was_filtered_away_is_named():
    table = two_turns().slice(1)
    with pytest.raises(
        InvalidTurnsError, match=re.escape("turn 1: messages[1] has no")
    ):
        tk.linearize(table, "segments")
    assert tk.linearize(table, "faithful").num_rows == 1
    silent = replaced(two_turns().slice(1), "messages", [[]])
    with pytest.raises(InvalidTurnsError, match="turn 1: response has no body"):
        tk.linearize(silent, "segments")


def test_the_kernel_refuses_arrays_of_other_lengths():
    calls = Sessions.of(two_turns())
    has_body = np.ones(3, np.uint8)
    good = {
        "requests": calls.requests,
        "session_offsets": calls.offsets,
        "has_body": has_body,
        "reply_has_body": np.ones(2, np.uint8),
        "places": np.empty(3, np.int64),
        "replies": np.empty(2, np.int64),
    }
    _core.find_bodies(*good.values())
    for name in ("has_body", "reply_has_body", "places", "replies"):
        short = {**good, name: good[name][:-1]}
        with pytest.raises(LayoutError, match=name):
            _core.find_bodies(*short.values())


def alike(values):
    return [[a == b for b in values] for a in values]


TWINS = {
    "values": message_key,
    "text": reference_segments.text,
    "content": identity,
    "strict": strict,
    "role_content_only": lambda m: fields_of(m, "role_content_only"),
}


def called(call_id, **more):
    function = {"name": "f", "arguments": "{}"}
    return {
        "role": "assistant",
        "tool_calls": [{"id": call_id, "function": function, **more}],
    }


@given(st.lists(chat_messages, min_size=1, max_size=6))
@example([{"role": "user", "content": "a"}, {"role": "user", "tool_call_id": "a"}])
@example([{"role": "tool", "tool_call_id": x} for x in ("a", "b")])
@example([{"role": "assistant", "reasoning_content": x} for x in ("a", "b")])
@example([called("a"), called("b")])
@example([{"role": "user", "content": x} for x in ([], None, "", {})])
@example([{"role": "assistant", "tool_calls": [{"name": x}]} for x in ("f", "g")])
@example([called("a", index=0), called("a", index=1)])
@example([{"role": "assistant", "content": x} for x in (1, 1.0, True, "1")])
def test_a_projection_says_equal_where_its_twin_does(messages):
    for equality, twin in TWINS.items():
        found = classes_of(messages, equality)
        assert alike(found) == alike([twin(one) for one in messages]), equality


@pytest.mark.parametrize("body", ["[]", "no", '"x"', "1", "[" * 100_000])
@pytest.mark.parametrize("policy", ["graph", "miles"])
@pytest.mark.parametrize(
    ("name", "said"), [("messages", r"messages\[0\]"), ("response", "response")]
)
def test_a_body_that_is_no_message_is_named(body, policy, name, said):
    turns = two_turns().slice(0, 1)
    (value,) = turns[name].to_pylist()
    odd = {**(value[0] if name == "messages" else value), "body": body}
    turns = replaced(turns, name, [[odd] if name == "messages" else odd])
    said = f"session 's', turn 0: {said} has the body .* which is not a JSON object"
    with pytest.raises(InvalidTurnsError, match=said):
        tk.linearize(turns, policy)
