"""Messages are sorted into classes of equal ones, under each equality."""

import json
import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import trajkit as tk
from tests import reference_segments
from tests.reference_graph import identity
from tests.strategies import (
    body_texts,
    chat_messages,
    delegating_sessions,
    json_messages,
    sessions,
)
from tests.tables import in_delta_form, link_by, turns_table
from trajkit import _core
from trajkit.errors import InvalidTurnsError, LayoutError, PolicyError
from trajkit.schema import TURNS, VALUE_BYTES
from trajkit.turns.message_equality import (
    classify,
    find_plain_bodies,
    identity_of,
    text_of_fields,
    with_equality,
)
from trajkit.turns.sessions import Sessions

EQUAL = {
    "values": lambda a, b: a == b,
    "text": lambda a, b: reference_segments.text(a) == reference_segments.text(b),
}


def shown(turns):
    """Every message of the requests, in order."""
    return [m for turn in turns for m in turn["prompt_messages"] or []]


# Messages that == calls equal, and that differ as JSON.
NUMBERS = [
    {
        "prompt_messages": [{"role": "assistant", "content": number}],
        "response_message": {"role": "assistant", "content": 1.0},
        "prompt_ids": [1],
        "output_ids": [2],
    }
    for number in (1, 1.0)
]


@given(delegating_sessions() | sessions(), st.sampled_from([*EQUAL]))
@example(NUMBERS, "text")
def test_classes_are_those_of_the_equality(turns, equality):
    calls = Sessions.of(turns_table(turns))
    classes = classify(calls, identity_of(equality))
    messages = shown(turns)
    assert len(classes.places) == len(messages)
    for a, left in zip(messages, classes.places, strict=True):
        body = json.loads(classes.bodies[int(left)].as_py())
        assert EQUAL[equality](a, body)
        for b, right in zip(messages, classes.places, strict=True):
            assert (left == right) == EQUAL[equality](a, b)
    for turn, reply in zip(turns, classes.replies, strict=True):
        said = turn["response_message"]
        assert (reply < 0) == (said is None)
        if said is not None:
            body = json.loads(classes.bodies[int(reply)].as_py())
            assert EQUAL[equality](said, body)


@given(st.lists(json_messages, min_size=1, max_size=6))
def test_values_are_the_equality_of_the_first_bytes_of_the_stored_keys(messages):
    turns = tk.from_records(
        [
            {
                "session_id": "s",
                "prompt_ids": [1],
                "output_ids": [2],
                "prompt_messages": messages,
            }
        ]
    )
    places = classify(Sessions.of(turns), identity_of("values")).places
    keys = [tk.turns.message_key(message)[:VALUE_BYTES] for message in messages]
    for a, left in zip(keys, places, strict=True):
        assert [left == right for right in places] == [a == b for b in keys]


@given(st.data(), delegating_sessions(), st.sampled_from([*EQUAL]))
def test_routing_by_new_keys_is_the_same_in_delta_form(data, turns, equality):
    full = turns_table(turns)
    delta = in_delta_form(full, lambda options: data.draw(st.sampled_from(options)))
    links = link_by(full, "messages", message_equality=equality)
    if equality == "values":
        assert links.equals(link_by(full, "messages"))
    assert links.equals(link_by(delta, "messages", message_equality=equality))
    assert link_by(full, "agents", message_equality=equality).equals(
        link_by(delta, "agents", message_equality=equality)
    )
    calls = Sessions.of(delta)
    keyed = with_equality(calls, equality)
    assert keyed.requests["n_keys"].tolist() == calls.requests["n_keys"].tolist()


def test_stored_keys_are_used_where_no_number_has_a_simpler_type():
    calls = [
        {
            "session_id": "s",
            "prompt_ids": [1],
            "output_ids": [2],
            "prompt_messages": [{"role": "user", "content": 1}],
            "response_message": {"role": "assistant", "content": content},
        }
        for content in (2, 2.0)
    ]
    for n, expected in ((1, True), (2, False)):
        read = Sessions.of(tk.from_records(calls[:n]))
        assert (with_equality(read, "values").keys is None) == expected


def test_lists_without_any_message_may_have_a_short_buffer_of_keys():
    turns = tk.from_records([{"session_id": "s", "prompt_ids": [1], "output_ids": [2]}])
    lists = TURNS.field("messages").type
    # Arrow gives empty arrays of nulls a buffer of four bytes
    none = pa.LargeListArray.from_arrays([0, 0], pa.nulls(0, lists.value_type))
    place = turns.column_names.index("messages")
    assert tk.link(turns.set_column(place, "messages", none.cast(lists))).num_rows == 1


def test_cache_control_is_left_out_at_any_depth():
    block = {"type": "text", "text": "a"}
    deep = {"role": "user", "content": [{**block, "cache_control": {"type": "x"}}]}
    for _ in range(3000):
        block, deep = [block], deep
    messages = [
        deep,
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}],
            "cache_control": 1,
        },
        {"role": "user", "content": [{"type": "text", "text": "cache_control"}]},
        {"role": "user", "content": block},
    ]
    turns = tk.from_records(
        [
            {
                "session_id": "s",
                "prompt_ids": [1],
                "output_ids": [2],
                "prompt_messages": messages,
            }
        ]
    )
    places = classify(Sessions.of(turns), identity_of("text")).places
    assert places[0] == places[1]
    assert len({*places.tolist()}) == 3


def chat(*contents):
    return [{"role": "user", "content": content} for content in contents]


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
    silent = two_turns().slice(1)
    at = silent.schema.get_field_index("messages")
    field = silent.schema.field(at)
    silent = silent.set_column(at, field, pa.array([[]], field.type))
    with pytest.raises(InvalidTurnsError, match="turn 1: response has no body"):
        tk.linearize(silent, "segments")


def test_an_equality_that_does_not_exist_is_refused():
    with pytest.raises(PolicyError, match="equality='hash'"):
        link_by(two_turns(), message_equality="hash")
    with pytest.raises(PolicyError, match="equality='hash'"):
        tk.policy("segments", message_equality="hash")


@pytest.mark.parametrize("equality", ["content", "strict", "role_content_only"])
def test_agents_need_an_equality_that_tells_tool_calls_apart(equality):
    """Else which of two equal replies sends out a sub-agent is that of another one."""
    said = f"message_equality='{equality}' does not go with parent_by='agents'"
    with pytest.raises(PolicyError, match=said):
        link_by(two_turns(), parent_by="agents", message_equality=equality)
    with pytest.raises(PolicyError, match=said):
        tk.policy("segments", message_equality=equality)


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


FIELDS = ("role", "content", "tool_calls")


def within(message):
    """All values that a JSON value holds, itself among them, and all keys."""
    values, keys = [message], []
    for value in values:
        if isinstance(value, dict):
            keys += value
            values += value.values()
        elif isinstance(value, list):
            values += value
    return values, keys


@given(st.lists(body_texts, max_size=4))
@example(['{"content":"' + "é" * 40 + '","role":"user"}', "{}"])
@example(['{"content":""}', '{"tool_calls":[]}', '{"content":null}', '{"role":{}}'])
@example(['{"content":{"A":"x","\\n":"y"}}', '{"content":{"\\n":"x","A":"y"}}'])
@example(['{"content":{"é":"x","éa":"x"}}', '{"content":{"éa":"x","é":"x"}}'])
@example(['{"content":{"index":"a"}}', '{"content":[[],null,""]}', '{"\\u0061":"a"}'])
@example(['{"content":' + "[" * 31 + '"a"' + "]" * 31 + "}"])
@example(['{"content":[{"b":"x","a":"x"}]}', '{"content":[{"a":"x","a":"x"}]}'])
def test_a_plain_body_is_what_its_fields_say(texts):
    bodies = pa.array(["", *texts], pa.string())[1:]
    plain = find_plain_bodies(bodies, FIELDS)
    for text, is_plain in zip(texts, plain, strict=True):
        values, keys = within(json.loads(text))
        varies = any(isinstance(value, (int, float)) for value in values)
        escaped = "\\u" in text or "\n" in keys
        looked_at = not (varies or escaped or "index" in keys)
        assert is_plain == (text_of_fields(text, FIELDS) == text and looked_at)
    expected = [text_of_fields(text, FIELDS) for text in texts]
    narrower = identity_of("role_content_only")(bodies).to_pylist()
    assert narrower == [text_of_fields(text, ("role", "content")) for text in texts]
    assert identity_of("strict")(bodies).to_pylist() == expected


@pytest.mark.parametrize(
    "text",
    [
        *('{"content":"a"}'[:n] for n in range(15)),
        '{"content":[["a",{"b":"\\\\"}]]'[:-1],
        '{"content":' + "[" * 32 + '"a"' + "]" * 32 + "}",
        '{"content":"a"}}',
        '{"content":nul',
        '{"content":"a\n"}',
    ],
)
def test_what_is_no_canonical_body_is_not_plain(text):
    assert not find_plain_bodies(pa.array([text]), FIELDS).any()


def test_the_scan_refuses_offsets_beyond_the_text():
    names, roles, plain = (np.zeros(n, np.uint8) for n in (1, 1, 1))
    for offsets, named in (
        ([0, 3], names),
        ([1, 0], names),
        ([-1, 1], names),
        ([0], names),
    ):
        with pytest.raises(LayoutError):
            _core.find_plain(
                np.array(offsets, np.int32),
                np.zeros(2, np.uint8),
                named,
                roles,
                plain,
            )
    bodies = np.array([0, 2], np.int32), np.zeros(2, np.uint8)
    for wrong in ((names + 1, roles), (names, np.ones(1, np.uint8))):
        with pytest.raises(LayoutError, match="zero byte"):
            _core.find_plain(*bodies, *wrong, plain)
    for n_names, n_roles in ((1, 2), (1, 0), (65, 65)):
        counts = np.zeros(n_names, np.uint8), np.zeros(n_roles, np.uint8)
        with pytest.raises(LayoutError, match=f"{n_roles} roles for {n_names} names"):
            _core.find_plain(*bodies, *counts, plain)


def called(call_id, **more):
    function = {"name": "f", "arguments": "{}"}
    return {
        "role": "assistant",
        "tool_calls": [{"id": call_id, "function": function, **more}],
    }


def test_the_index_of_a_tool_call_does_not_count():
    messages = [called("a", index=0), called("a", index=1), called("b", index=0)]
    bodies = pa.array([_core.encode_message(message)[0] for message in messages])
    first, again, other = identity_of("strict")(bodies).to_pylist()
    assert first == again != other


@given(st.lists(chat_messages, min_size=1, max_size=6), st.sampled_from([None, 1]))
@example(
    [{"role": "user", "content": "a"}, {"role": "user", "tool_call_id": "a"}], None
)
@example([{"role": "tool", "tool_call_id": x} for x in ("a", "b")], None)
@example([{"role": "assistant", "reasoning_content": x} for x in ("a", "b")], None)
@example([{"role": "user", "content": "aaaaaaaa" + x} for x in "ab"], None)
@example([called("a"), called("b")], None)
@example([called("a", index=0), called("a", index=1)], None)
def test_the_same_is_said_where_the_graph_says_so(messages, indent):
    texts = {_core.encode_message(m)[0] for m in messages} if indent is None else None
    texts = sorted(texts or {json.dumps(m, indent=indent) for m in messages})
    identities = identity_of("content")(pa.array(texts, pa.string())).to_pylist()
    expected = [identity(json.loads(text)) for text in texts]
    for mine, theirs in zip(identities, expected, strict=True):
        assert [mine == other for other in identities] == [
            theirs == other for other in expected
        ]


@pytest.mark.parametrize(
    ("role", "name", "expected"),
    [
        ("tool", "tool_call_id", True),
        ("user", "tool_call_id", False),
        ("assistant", "reasoning_content", True),
        ("assistants", "reasoning_content", False),
        ("tool", "reasoning_content", False),
        ("user", "content", True),
        (["tool"], "tool_call_id", False),
    ],
)
def test_a_field_of_one_role_is_plain_in_no_other(role, name, expected):
    body = _core.encode_message({"role": role, name: "eight or more bytes"})[0]
    names = ("role", "content", "reasoning_content", "tool_call_id")
    roles = ("", "", "assistant", "tool")
    assert find_plain_bodies(pa.array([body]), names, roles).tolist() == [expected]
    assert find_plain_bodies(pa.array([body]), names).tolist() == [True]


@pytest.mark.parametrize("odd", ["\x1f", "\n", "\\u0041", "\\/", "\\x", '"', '","a'])
def test_what_is_no_canonical_text_is_seen_anywhere_in_a_long_one(odd):
    for at in range(24):
        text = "a" * at + odd + "\x7fé " * 6
        assert not find_plain_bodies(pa.array([f'{{"content":"{text}"}}']), FIELDS)[0]
        plain = text.replace(odd, '\\"\\\\')
        assert find_plain_bodies(pa.array([f'{{"content":"{plain}"}}']), FIELDS)[0]


@pytest.mark.parametrize("body", ["[]", "no", '"x"', "[" * 100_000])
@pytest.mark.parametrize("policy", ["graph", "miles"])
def test_a_body_that_is_no_message_is_named(body, policy):
    record = {
        "session_id": "a",
        "prompt_messages": [{"role": "user", "content": "q"}],
        "prompt_ids": [1],
        "output_ids": [2],
    }
    turns = tk.from_records([record])
    at = turns.column_names.index("messages")
    (messages,) = turns["messages"].to_pylist()
    odd = pa.array([[{**messages[0], "body": body}]], turns.schema.field(at).type)
    said = (
        r"session 'a', turn 0: messages\[0\] has the body .* which is not a JSON object"
    )
    with pytest.raises(InvalidTurnsError, match=said):
        tk.linearize(turns.set_column(at, turns.schema.field(at), odd), policy)


def test_a_reply_that_is_no_message_is_named():
    record = {
        "session_id": "a",
        "prompt_messages": [{"role": "user", "content": "q"}],
        "response_message": {"role": "assistant", "content": "a"},
        "prompt_ids": [1],
        "output_ids": [2],
    }
    turns = tk.from_records([record])
    at = turns.column_names.index("response")
    (reply,) = turns["response"].to_pylist()
    odd = pa.array([{**reply, "body": "1"}], turns.schema.field(at).type)
    with pytest.raises(InvalidTurnsError, match="turn 0: response has the body '1'"):
        tk.linearize(turns.set_column(at, turns.schema.field(at), odd), "graph")
