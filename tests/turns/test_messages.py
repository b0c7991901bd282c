import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.strategies import NAN, json_messages, message_pairs
from trajkit import _core
from trajkit.errors import InvalidTurnsError, LayoutError
from trajkit.schema import VALUE_BYTES
from trajkit.turns.messages import (
    NO_IDS,
    MessageBook,
    encode,
    message_body,
    message_key,
    message_record,
)


def saying(value):
    return {"role": "user", "content": value}


def nested(levels, bottom):
    value = bottom
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


PAIRS = [
    pytest.param(1, 1.0, True, id="int and float"),
    pytest.param(1, True, True, id="int and true"),
    pytest.param(1.0, True, True, id="float and true"),
    pytest.param(0, False, True, id="zero and false"),
    pytest.param(1, "1", False, id="number and text"),
    pytest.param(True, "true", False, id="true and its text"),
    pytest.param(None, "null", False, id="null and its text"),
    pytest.param(None, 0, False, id="null and zero"),
    pytest.param(None, False, False, id="null and false"),
    pytest.param(2**53 + 1, float(2**53 + 1), False, id="beyond a double"),
    pytest.param(2**53, float(2**53), True, id="at a double's edge"),
    pytest.param(10**30, 1e30, False, id="1e30 is not ten to the thirtieth"),
    pytest.param(int(1e30), 1e30, True, id="a large double's own integer"),
    pytest.param(-0.0, 0, True, id="negative zero"),
    pytest.param(-0.0, 0.0, True, id="negative and positive zero"),
    pytest.param(NAN, NAN, True, id="NaN"),
    pytest.param(NAN, float("nan"), True, id="two NaN objects"),
    pytest.param(NAN, None, False, id="NaN and null"),
    pytest.param(float("inf"), float("inf"), True, id="infinity"),
    pytest.param(float("inf"), float("-inf"), False, id="both infinities"),
    pytest.param(0.1, 0.1, True, id="a fraction"),
    pytest.param(0.1 + 0.2, 0.3, False, id="the last bit of a fraction"),
    pytest.param("", None, False, id="empty text and null"),
    pytest.param({}, [], False, id="empty object and empty list"),
    pytest.param([], None, False, id="empty list and null"),
    pytest.param({"a": 1, "b": 2}, {"b": 2, "a": 1}, True, id="key order"),
    pytest.param({"a": None}, {}, False, id="null and missing key"),
    pytest.param({"a": ""}, {"a": None}, False, id="empty and null value"),
    pytest.param([1, 2], [2, 1], False, id="list order"),
    pytest.param([[1], 2], [1, [2]], False, id="list shape"),
    pytest.param([{"a": [1]}], [{"a": [True]}], True, id="nested numbers"),
    pytest.param([{"a": [1]}], [{"a": ["1"]}], False, id="nested text"),
    pytest.param({"a": {"b": 1}}, {"a": 1, "b": 1}, False, id="flattened"),
    pytest.param('a","b', ["a", "b"], False, id="text that looks like JSON"),
    pytest.param("\ud800", "\ud800", True, id="lone surrogate"),
    pytest.param("\ud800", "\\ud800", False, id="surrogate and its escape"),
    pytest.param("\ud800", "\ud801", False, id="two lone surrogates"),
    pytest.param("\ud83d\ude00", "\U0001f600", False, id="two halves and their whole"),
    pytest.param("é", "e\u0301", False, id="Unicode is not normalised"),
    pytest.param("a ", "a", False, id="white space is kept"),
]


@pytest.mark.parametrize(("a", "b", "equal"), PAIRS)
def test_keys_begin_alike_where_messages_are_equal(a, b, equal):
    first, second = (message_key(saying(value))[:VALUE_BYTES] for value in (a, b))
    assert (first == second) is equal


def test_missing_empty_and_null_content_differ():
    messages = [saying(None), saying(""), {"role": "user"}]
    assert len({message_key(message) for message in messages}) == 3


@given(message_pairs())
@example((saying([1, {"a": -0.0}]), saying([True, {"a": 0}])))
def test_keys_agree_with_python(pair):
    a, b = pair
    first, second = message_key(a), message_key(b)
    assert (first[:VALUE_BYTES] == second[:VALUE_BYTES]) == (a == b)
    assert (first == second) == (message_body(a) == message_body(b))


@pytest.mark.parametrize("simple", [1, 0, 2**53, "1", 0.5, None])
def test_a_key_ends_with_zeros_where_numbers_have_their_simplest_type(simple):
    assert not any(message_key(saying(simple))[VALUE_BYTES:])


@pytest.mark.parametrize("number", [1.0, True, False, -0.0, float(2**53), [True]])
def test_a_key_ends_otherwise_where_a_number_has_a_simpler_type(number):
    assert any(message_key(saying(number))[VALUE_BYTES:])


@given(json_messages)
def test_bodies_are_the_json_that_python_writes(message):
    text = json.dumps(
        message, sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )
    body = message_body(message)
    assert body.encode("utf-8", "surrogatepass").decode("utf-8") == body
    assert body.replace("\\ud800", "\ud800") == text.replace("\\ud800", "\ud800")
    assert json.dumps(json.loads(body), sort_keys=True) == json.dumps(
        message, sort_keys=True
    )


@pytest.mark.parametrize("bottom", [1, "x", {}])
def test_very_deep_messages(bottom):
    deep = saying(nested(100_000, bottom))
    again = saying(nested(100_000, bottom))
    other = saying(nested(100_000, "other"))
    book = MessageBook()
    ids = [book.add(encode(message, "m")) for message in (deep, again, other)]
    assert ids == [0, 0, 1]
    out = np.empty(2, np.int32)
    _core.match_messages([deep, again], [deep], np.zeros(2, np.int32), out)
    assert out.tolist() == [0, -1]  # not looked at that deep
    assert book.keys[0] == message_key(again) != book.keys[1]
    assert len(book.bodies[0]) > 300_000


def test_very_long_messages():
    text = '"\u2028é' * 1_000_000
    assert json.loads(message_body(saying(text)))["content"] == text
    assert message_key(saying(text)) != message_key(saying(text + "x"))


def test_a_message_that_holds_itself_is_refused():
    loop = []
    loop.append({"a": loop})
    with pytest.raises(InvalidTurnsError, match=r"levels .* holds itself"):
        message_key(saying(loop))


def test_what_stands_twice_does_not_hold_itself():
    shared = nested(1500, 1)
    twice = nested(1500, [shared, shared])
    assert message_body(saying(twice)).count("1") == 2


@pytest.mark.parametrize(
    ("message", "match"),
    [
        pytest.param("hello", "is of type str: expected a dict", id="text"),
        pytest.param({"content": "x"}, "has no role", id="no role"),
        pytest.param({"role": None}, "has the role None", id="null role"),
        pytest.param({"role": 1}, "has the role 1", id="numeric role"),
        pytest.param({"role": "\ud800"}, "not valid Unicode", id="surrogate role"),
        pytest.param(saying(b"x"), r"m\['content'\] is of type bytes", id="bytes"),
        pytest.param(saying({1}), r"m\['content'\] is of type set", id="set"),
        pytest.param(saying((1,)), r"m\['content'\] is of type tuple", id="tuple"),
        pytest.param(saying(object()), "is of type object", id="object"),
        pytest.param(saying(np.int64(1)), "is of type int64", id="numpy integer"),
        pytest.param(
            saying([0, {"a": [b""]}]), r"m\['content'\]\[1\]\['a'\]\[0\] is", id="path"
        ),
        pytest.param(
            saying([{1: 2}]), r"m\['content'\]\[0\] has the key 1", id="integer key"
        ),
        pytest.param({**saying(""), None: 1}, "m has the key None", id="null key"),
        pytest.param(saying(10**5000), "too many digits", id="endless integer"),
        pytest.param(
            saying(nested(50, b"")),
            r"\['content'\].* 39 levels .* is of type bytes",
            id="long path",
        ),
    ],
)
def test_what_is_no_chat_message_is_refused(message, match):
    with pytest.raises(InvalidTurnsError, match=match):
        encode(message, "m")


@given(st.lists(json_messages, max_size=4), st.lists(json_messages, max_size=4))
@example([saying(1)], [saying(True)])
@example([saying(0.0)], [saying(-0.0)])
@example([saying([1])], [saying([1, 2])])
def test_only_what_is_written_the_same_keeps_its_id(before, now):
    ids = np.arange(len(before), dtype=np.int32)
    out = np.empty(len(now), np.int32)
    _core.match_messages(now, before, ids, out)
    backwards = np.empty(len(now), np.int32)
    _core.match_messages(now, before[::-1], ids[::-1].copy(), backwards)
    assert backwards.tolist() == [len(before) - 1 - k if k >= 0 else k for k in out]
    assert out.tolist() == [
        k if k < len(before) and message_body(before[k]) == message_body(now[k]) else -1
        for k in range(len(now))
    ]


def test_each_body_has_a_key():
    book = MessageBook()
    ids = [book.add(encode(saying(value), "m")) for value in (1, True, 1, "1")]
    assert ids == [0, 1, 0, 2]
    assert len(set(book.keys)) == 3
    assert book.bodies[1] == '{"content":true,"role":"user"}'


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([1, True, 1.0, "1"])), max_size=12
    )
)
def test_a_body_is_shown_where_its_session_first_has_it(said):
    said = sorted(said, key=lambda pair: pair[0])
    book = MessageBook()
    ids = np.array(
        [book.add(encode(saying(value), "m")) for _, value in said], np.int32
    )
    sessions = np.array([session for session, _ in said], np.int32)
    texts = [(session, message_body(saying(value))) for session, value in said]
    expected = [text not in texts[:k] for k, text in enumerate(texts)]
    assert book.shown(ids, sessions).tolist() == expected


def test_ids_must_fit_their_messages():
    with pytest.raises(LayoutError, match="found has 0 entries, 1 are needed"):
        _core.match_messages([{}], [], NO_IDS, NO_IDS)
    out = np.empty(2, np.int32)
    _core.match_messages([{}, {}], [{}], np.array([-1, 1], np.int32), out)
    assert out.tolist() == [-1, -1]


@given(json_messages)
def test_a_message_read_once(message):
    assert message_record(message) == (message_key(message), message_body(message))


@pytest.mark.parametrize(
    "odd",
    ['"', "\\", "\n", "\t", "\r", "\b", "\f", "\0", "\x1f", "\x7f", "é", "ł", "😀"],
)
def test_a_text_is_spelled_as_python_does_wherever_it_escapes(odd):
    for at in range(20):
        text = "a" * at + odd + "b" * 9 + odd * 2
        spelled = json.dumps(text, ensure_ascii=False)
        body = _core.encode_message({text: text})[0]
        assert body == f"{{{spelled}:{spelled}}}"
        assert body.isascii() == spelled.isascii()
