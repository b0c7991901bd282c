import json
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import trajkit as tk
from tests.strategies import call_lines
from trajkit import _core
from trajkit.errors import FormatError, LayoutError, TrajkitError
from trajkit.files import jsonl
from trajkit.files.jsonl import _CALL, EACH, IDS, ITEMS, Reader
from trajkit.turns.messages import parse_json

PATH = {
    "response": {
        "prompt_token_ids": IDS,
        "choices": {EACH: {"token_ids": IDS}},
    }
}


def plain(value):
    """The value with lists for arrays, written so that 1 and 1.0, 0.0 and -0.0 differ."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return repr(value)


def outcome(function):
    try:
        return function()
    except (TrajkitError, ValueError) as error:
        return type(error), str(error)


@given(st.lists(call_lines(), max_size=6))
@example([b'{"prompt_ids": [1, 2]}', b'{"prompt_ids": [1, 23]}'])
@example([b'{"prompt_messages": [12]}', b'{"prompt_messages": [123]}'])
@example([b'{"prompt_messages": [1, 2]}', b'{"prompt_messages": [1]}'])
@example([b'{"prompt_ids": [1], "prompt_ids": [2.0]}', b'{"prompt_ids": [1]}'])
@example([b'{"prompt_ids": [1], "a": NaN}', b'{"a": NaN, "prompt_ids": [1]}'])
def test_a_reader_reads_what_the_plain_parser_reads(texts):
    reader = Reader(_CALL)
    with mock.patch.multiple(jsonl, _WORTH=0, _KEPT=2):
        for text in texts:
            expected = outcome(lambda text=text: parse_json(text.decode()))
            found = outcome(lambda text=text: reader.read(text))
            assert plain(found) == plain(expected) or repeats_a_key(text, found)


def repeats_a_key(text, found):
    """Whether a reader names a repeated key of a text that has one, or that is no JSON."""
    objects = []
    try:
        json.loads(text, object_pairs_hook=objects.append)
        twice = any(len(dict(pairs)) < len(pairs) for pairs in objects)
    except ValueError:
        twice = True
    return twice and isinstance(found, tuple) and "is there twice" in found[1]


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1), st.sampled_from([",", ", "]))
def test_ids_are_read_whatever_their_width(ids, comma):
    out = np.empty(len(ids), np.int32)
    text = f"[{comma.join(map(str, ids))}]".encode()
    assert _core.json_ids(text, 1, out)
    assert out.tolist() == ids


@pytest.mark.parametrize(
    "text",
    "[3.0] [1e3] [true] [null] [2147483648] [-1] [01] [1,] [1 2] [1,,2] [] [1".split(
        " "
    ),
)
def test_what_is_no_id_is_left_alone(text):
    for n in range(3):
        assert not _core.json_ids(text.encode(), 1, np.empty(n, np.int32))


def test_arrays_are_found_along_the_shape_and_nowhere_else():
    text = (
        b'{"token_ids": [1], "response": {"choices": [{"token_ids": [1, 2], '
        b'"message": {"token_ids": [3]}, "logprobs": [-1.0, -0.5]}, {"token_ids": []}, '
        b'{}, 7], "prompt_token_ids": [4]}}'
    )
    value = Reader(PATH).read(text)
    response = value["response"]
    assert plain(value) == plain(json.loads(text))
    assert isinstance(response["prompt_token_ids"], np.ndarray)
    first, second, *_ = response["choices"]
    assert first["token_ids"].dtype == np.int32
    assert first["logprobs"] == [-1.0, -0.5]
    assert first["message"]["token_ids"] == [3]
    assert second["token_ids"] == []
    assert value["token_ids"] == [1]


def test_what_begins_like_an_earlier_line_is_not_read_again(monkeypatch):
    monkeypatch.setattr(jsonl, "_WORTH", 0)
    reader = Reader({"prompt_messages": ITEMS, "prompt_ids": IDS})
    before = reader.read(
        b'{"prompt_messages": [{"a": 1}, {"b": 2}], "prompt_ids": [1]}'
    )
    reader.read(b'{"prompt_messages": [0], "prompt_ids": [7]}')
    after = reader.read(
        b'{"prompt_messages": [{"a": 1}, {"b": 2}, 3], "prompt_ids": [1, 2]}'
    )
    assert after["prompt_messages"][0] is before["prompt_messages"][0]
    assert after["prompt_messages"][1] is before["prompt_messages"][1]
    assert after["prompt_messages"][2] == 3
    assert before["prompt_ids"].tolist() == [1]
    assert after["prompt_ids"].tolist() == [1, 2]


def test_a_place_outside_of_the_text_is_refused():
    with pytest.raises(LayoutError):
        _core.json_value_end(b"[]", 3)
    with pytest.raises(LayoutError):
        _core.json_shared(b"[]", 0, b"[]", 1, 3)
    with pytest.raises(LayoutError):
        _core.json_ids(b"[]", 3, np.empty(1, np.int32))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"session_id": "a", "session_id": "b", "prompt_ids": [1]}', "session_id"),
        ('{"prompt_ids": [1], "x": 1, "prompt_ids": [2]}', "prompt_ids"),
        ('{"x": [1.5], "x": 3}', "x"),
    ],
)
def test_a_key_that_stands_twice_is_an_error(tmp_path, text, key):
    words = f"the key '{key}' is there twice"
    with pytest.raises(ValueError, match=words):
        Reader(_CALL).read(text.encode())
    path = tmp_path / "log.jsonl"
    path.write_text(
        '{"session_id": "a", "prompt_ids": [1], "output_ids": [2]}\n' + text + "\n"
    )
    with pytest.raises(FormatError, match=f"log.jsonl, line 2: {words}"):
        tk.read_turns(path)
    turns, report = tk.import_turns(path, "records")
    assert turns.num_rows == 1
    assert words in report["detail"].to_pylist()[-1]
