"""Invalid calls are kept with their reason where the recorder does not raise."""

import json
from threading import Lock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests.recorder.test_recorder import USER, call, record, recordable
from tests.strategies import sessions
from trajkit.errors import ArgumentError
from trajkit.recorder import REJECTED_CALLS

INVALID = [
    call([1, -1], [2]),
    call([1], [2], output_logprobs=[float("nan")]),
    call([1], [2], prompt_messages=[USER, {"content": "no role"}]),
    call([1], [2], request_id=3),
    call([1], [2], payloads={"turn_index": 1}),
]


@given(sessions(), st.data())
def test_rejected_calls_change_no_session_and_are_all_there(turns, data):
    recorder, other = tk.Recorder(on_invalid="reject"), tk.Recorder()
    given_calls = []
    for turn in recordable(turns):
        for bad in data.draw(st.lists(st.sampled_from(INVALID), max_size=2)):
            result = recorder.record("s", **bad)
            index = other.n_turns("s")
            assert result[:4] == (index, None, 0, False)
            given_calls.append(("s", index, result.rejected, bad))
        assert record(recorder, turn) == record(other, turn)
    assert recorder.turns("s") == other.turns("s")
    assert [tuple(one) for one in recorder.rejected] == given_calls
    table = recorder.pop_rejected()
    assert table.schema == REJECTED_CALLS
    for line, (name, index, reason, bad) in zip(
        table.to_pylist(), given_calls, strict=True
    ):
        assert (line["session_id"], line["turn_index"]) == (name, index)
        assert line["reason"] == reason
        assert reason.startswith(f"session 's', turn {index}: ")
        expected = json.dumps({"session_id": "s", **bad})
        assert json.dumps(json.loads(line["call"])) == expected
    assert recorder.rejected == []
    assert recorder.pop_rejected().num_rows == 0


def test_the_reason_is_the_error_of_a_recorder_that_raises():
    for bad in INVALID:
        with pytest.raises(tk.errors.InvalidTurnsError) as refused:
            tk.Recorder().record("a", **bad)
        result = tk.Recorder(on_invalid="reject").record("a", **bad)
        assert result.rejected == str(refused.value)


def test_a_rejected_call_does_not_change_with_what_it_was_given():
    recorder = tk.Recorder(on_invalid="reject")
    ids, messages = np.array([1, -1], np.int32), [{"role": "user", "content": ["u"]}]
    recorder.record("a", **call(ids, [2], prompt_messages=messages))
    ids[:], messages[0]["content"][0] = 7, "later"
    kept = recorder.rejected[0].call
    assert kept["prompt_ids"].tolist() == [1, -1]
    assert kept["prompt_messages"] == [{"role": "user", "content": ["u"]}]


@pytest.mark.parametrize(
    ("name", "stored"), [("a", "a"), (7, None), (None, None), ("\ud800", None)]
)
def test_session_ids_of_rejected_calls(name, stored):
    recorder = tk.Recorder(on_invalid="reject")
    recorder.record(name, **call([-1], [2]))
    table = recorder.pop_rejected()
    assert table["session_id"].to_pylist() == [stored]
    assert json.loads(table["call"][0].as_py())["session_id"] == name
    assert recorder.sessions == []


def test_what_json_does_not_know_is_described():
    loop = []
    loop.append(loop)
    deep = []
    for _ in range(100_000):
        deep = [deep]
    lock = Lock()
    recorder = tk.Recorder(on_invalid="reject")
    for value in (lock, loop, {(1, 2): 3}, b"\x01\xff", np.float32([1.5]), deep):
        recorder.record("a", prompt_ids=value, output_ids=[np.int64(1)])
    told = [
        json.loads(line)["prompt_ids"]
        for line in recorder.pop_rejected()["call"].to_pylist()
    ]
    assert told[:5] == [repr(lock), "[[...]]", "{(1, 2): 3}", "01ff", [1.5]]
    assert told[5].startswith("[[[")


def test_rejected_calls_outlive_their_session():
    recorder = tk.Recorder(on_invalid="reject")
    recorder.record("a", **call([1], [2]))
    recorder.record("a", **call([-1], [2]))
    recorder.drop("a")
    assert [one.turn_index for one in recorder.rejected] == [1]


def test_on_invalid_is_one_of_two():
    with pytest.raises(ArgumentError, match="on_invalid='keep'"):
        tk.Recorder(on_invalid="keep")
