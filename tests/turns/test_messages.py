import json
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import trajkit as tk
from tests.strategies import NAN, json_messages, message_pairs
from trajkit.errors import InvalidTurnsError
from trajkit.turns.messages import (
    MessageBook,
    encode,
    message_key,
    message_record,
    message_texts,
    parse_json,
    unequal_places,
)

FOLDER = Path(__file__).parent


def saying(value):
    return {"role": "user", "content": value}


def nested(levels, bottom):
    value = bottom
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


VALUES = [
    *[0, 1, -0.0, 0.0, 1.0, 0.1, 0.1 + 0.2, 0.3, True, False, None, NAN],
    *[2**53, 2**53 + 1, float(2**53), 10**30, 1e30, int(1e30)],
    *[float("inf"), float("-inf"), "", "1", "null", "true", "a", "a ", "é", "e\u0301"],
    *["\ud800", "\\ud800", "\ud801", "\ud83d\ude00", "\U0001f600", 'a","b'],
    *[{}, [], [1], [True], ["1"], [1, 2], [2, 1], [[1], 2], [1, [2]], ["a", "b"]],
    *[{"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": None}, {"a": ""}, {"a": {"b": 1}}],
    *[[{"a": [1]}], [{"a": [True]}], [{"a": ["1"]}]],
]


def test_the_key_is_one_where_python_says_equal():
    messages = [*map(saying, VALUES), {"role": "user"}]
    keys = [*map(message_key, messages)]
    for (a, key), (b, other) in product(zip(messages, keys, strict=True), repeat=2):
        assert (key == other) == (a == b), (a, b)
    # Python finds a NaN equal to itself alone, and JSON has no two of them
    assert message_key(saying(float("nan"))) == message_key(saying(NAN))


@given(message_pairs())
@example((saying([1, {"a": -0.0}]), saying([True, {"a": 0}])))
@example((saying({"a": 1, "A": 2, "aa": 3, "é": 4}), saying({"é": 4.0, "A": 2})))
def test_keys_agree_with_python(pair):
    a, b = pair
    assert (message_key(a) == message_key(b)) == (a == b)
    assert message_record(a) == (message_key(a), message_record(a)[1])
    # what is equal to a plain message has its body
    if a == b and message_texts(a).is_plain:
        assert message_record(a)[1] == message_record(b)[1]


@given(json_messages)
@example(saying(2**70))
@example(saying(-(2**63)))
@example(saying(nested(300, 1.0)))
def test_bodies_are_the_json_that_python_writes(message):
    text = json.dumps(
        message, sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )
    body = message_record(message)[1]
    assert body.encode("utf-8", "surrogatepass").decode("utf-8") == body
    assert body.replace("\\ud800", "\ud800") == text.replace("\\ud800", "\ud800")
    assert json.dumps(json.loads(body), sort_keys=True) == json.dumps(
        message, sort_keys=True
    )
    # both writers agree, whichever a message needs
    other = {**message, "more": [True, 2**70]}
    assert message_key(json.loads(message_record(other)[1])) == message_key(other)


def test_both_writers_spell_every_character_alike():
    odd = "".join(map(chr, range(0x20))) + '"\\/\x7féł\u2028\uffff😀'
    slow = message_record(saying({odd: odd, "~": 2**70}))[1]
    assert slow.replace(f',"~":{2**70}', "") == message_record(saying({odd: odd}))[1]


def test_what_is_nested_too_deep_or_holds_itself_is_refused():
    loop = []
    loop.append({"a": loop})
    for value in (loop, nested(100_000, 1)):
        with pytest.raises(InvalidTurnsError, match="nested too deep, or holds itself"):
            message_key(saying(value))
    with pytest.raises(ValueError, match="too deep"):
        parse_json("[" * 100_000)
    shared = nested(100, 1)
    twice = nested(100, [shared, shared])
    assert message_record(saying(twice))[1].count("1") == 2


@pytest.mark.parametrize(
    ("message", "match"),
    [
        ("hello", "is of type str: expected a dict"),
        ({"content": "x"}, "has no role"),
        ({"role": None}, "has the role None"),
        ({"role": 1}, "has the role 1"),
        ({"role": "\ud800"}, "not valid Unicode"),
        (saying(b"x"), r"m\['content'\] is of type bytes"),
        (saying({1}), r"m\['content'\] is of type set"),
        (saying((1,)), r"m\['content'\] is of type tuple"),
        (saying(object()), "is of type object"),
        (saying(np.int64(1)), "is of type int64"),
        (saying([0, {"a": [b""]}]), r"m\['content'\]\[1\]\['a'\]\[0\] is"),
        (saying([{1: 2}]), r"m\['content'\]\[0\] has the key 1"),
        ({**saying(""), None: 1}, "m has the key None"),
        (saying(10**5000), "too many digits"),
        (saying(nested(50, b"")), r"\['content'\].* 39 levels .* is of type bytes"),
    ],
)
def test_what_is_no_chat_message_is_refused(message, match):
    with pytest.raises(InvalidTurnsError, match=match):
        encode(message, "m")


SYSTEM = {"role": "system", "content": "You help. é \u2028 \U0001f600"}
ONE, FLOAT, TRUE = ({"role": "user", "content": "one", "n": n} for n in (1, 1.0, True))
TOOL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"index": 0, "id": "c1", "function": {"name": "f", "arguments": '{"x": 1.0}'}}
    ],
}
ODD = {
    **saying("odd \ud800"),
    "big": 10**30,
    "nan": NAN,
    "deep": [[[{"b": -0.0, "a": 0.5}]]],
}


def replying(content, **more):
    return {"role": "assistant", "content": content, **more}


CALLS = [
    {
        "session_id": session,
        "prompt_ids": prompt,
        "output_ids": output,
        "output_logprobs": [-0.5],
        "finish_reason": "stop",
        "prompt_messages": messages,
        "response_message": reply,
    }
    for session, prompt, output, messages, reply in (
        ("a", [1, 2], [3], [SYSTEM, ONE], TOOL),
        ("a", [1, 2, 3, 4], [5], [SYSTEM, FLOAT, TOOL, ODD], replying("x")),
        (
            "a",
            [1, 2, 3, 4, 5, 6],
            [7],
            [SYSTEM, ONE, TOOL, ODD, replying("x"), TRUE],
            replying("y", k=True),
        ),
        ("b", [1, 2], [3], [SYSTEM, TRUE], replying("z")),
        ("b", [1, 2, 3, 8], [9], [SYSTEM, ONE, replying("z"), ODD], replying("w", k=1)),
        ("e", [1, 2], [3], [SYSTEM, ONE], replying("v")),
        ("e", [5, 6], [7], [SYSTEM, FLOAT], replying("v")),
        ("e", [1, 2, 3, 4], [9], [SYSTEM, ONE, replying("v"), FLOAT], replying("v")),
    )
]
CALLS.insert(5, {"session_id": "c", "prompt_ids": [1], "output_ids": [2]})
"""The sessions of the logs version_2.parquet and version_2_delta.parquet."""


def test_messages_are_compared_place_by_place():
    known = [saying("a"), saying(["b"])]
    assert unequal_places([], known) == []
    assert unequal_places([saying("a"), saying("b"), {}], known) == [1, 2]
    assert unequal_places([dict(reversed(known[0].items())), *known[1:], 1], known) == [
        2
    ]
    # arrays whose comparison has no truth value
    odd = np.array(["x", "y"])
    assert unequal_places([odd, saying(odd)], known) == [0, 1]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([1, True, 1.0, "1", 2, 2.0])),
        max_size=12,
    )
)
def test_a_body_is_shown_where_its_key_last_had_another(said):
    said = sorted(said, key=lambda pair: pair[0])
    book = MessageBook()
    ids = [book.add(encode(saying(value), "m")) for _, value in said]
    sessions = np.array([session for session, _ in said], np.int32)
    shown = book.shown(np.array(ids, np.int32), sessions).tolist()
    last = {}
    for (session, value), is_shown in zip(said, shown, strict=True):
        name, body = (
            (session, message_key(saying(value))),
            message_record(saying(value))[1],
        )
        assert is_shown == (last.get(name) != body)
        last[name] = body
    assert [one.body for one in book.messages] == list(
        dict.fromkeys(message_record(saying(value))[1] for _, value in said)
    )


@pytest.mark.parametrize("name", ["version_2", "version_2_delta"])
def test_logs_of_schema_version_2_have_their_keys_computed_again(name, tmp_path):
    """Recorded with that version; session d has keys alone, but for one message."""
    path = FOLDER / f"{name}.parquet"
    old, turns = pq.read_table(path), tk.read_turns(path)
    assert old.schema.metadata[b"trajkit.version"] == b"2"
    assert turns.schema.metadata[b"trajkit.version"] == b"3"
    stored = "messages" if "messages" in turns.column_names else "suffix_messages"
    keys = {}
    for row in turns.filter(pa.compute.field("session_id") != "d").to_pylist():
        for message in [*(row[stored] or []), row["response"]]:
            if message is not None and message["body"] is not None:
                keys[message["key"]] = message_key(json.loads(message["body"]))
    assert len(keys) == 9
    assert all(key == expected for key, expected in keys.items())
    parents = [None, 0, 1, None, 0, None, None, None, 0, None, 0]
    tk.write_turns(old, tmp_path / "again.parquet")
    again = tk.read_turns(tmp_path / "again.parquet")
    for table in (old, turns, again, *[tk.compact(old), tk.expand(old)]):
        assert tk.link(table, "slime")["parent"].to_pylist() == parents
    assert again == turns
    scanned = pa.Table.from_batches(tk.scan_turns(path))
    assert scanned.schema.metadata[b"trajkit.version"] == b"3"
    assert scanned == turns
    for rejected in (None, tmp_path / "rejected.parquet"):
        tk.run(path, lambda turns: turns, tmp_path / "run.parquet", rejected=rejected)
        assert (
            pq.read_schema(tmp_path / "run.parquet").metadata == scanned.schema.metadata
        )
        assert tk.read_turns(tmp_path / "run.parquet") == turns
    # bodies are compared as they were
    some = old.filter(pa.compute.field("session_id") != "d")
    for policy in ("segments", "graph", "miles", "slime"):
        rows = tk.linearize(tk.from_records(CALLS), policy)
        assert tk.linearize(some, policy) == rows
    assert tk.expand(some) == tk.from_records(CALLS)
    # of keys alone
    lines = old.filter(pa.compute.field("session_id") == "d").to_pylist()
    for message in [m for line in lines for m in [*line[stored], line["response"]]]:
        message["body"] = None
    keyed = pa.Table.from_pylist(lines, schema=old.schema)
    assert tk.link(keyed, "slime")["parent"].to_pylist() == [None, 0]
    # in one table with current ones
    tk.write_turns(tk.from_records(CALLS[5:6]), tmp_path / "new.parquet")
    tk.write_turns(
        some if stored == "messages" else tk.expand(some), tmp_path / "old.parquet"
    )
    paths = [tmp_path / "new.parquet", tmp_path / "old.parquet"]
    both = tk.read_turns(paths, session_prefix="file")
    assert both["messages"][1:] == tk.from_records(CALLS)["messages"]
