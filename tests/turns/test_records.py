from array import array

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given

import trajkit as tk
from tests.strategies import runs
from trajkit import _core
from trajkit.errors import InvalidTurnsError, LayoutError
from trajkit.schema import TURNS
from trajkit.turns.messages import message_key, message_record

CALL = {
    "session_id": "a",
    "prompt_ids": [1, 2],
    "output_ids": [3, 4],
    "output_logprobs": [-0.5, -1.0],
}
USER = {"role": "user", "content": "u"}
REPLY = {"role": "assistant", "content": "r"}


def one(**changes):
    """The only row of a call that departs from CALL."""
    (row,) = tk.from_records([{**CALL, **changes}]).to_pylist()
    return row


def told_messages(table):
    """Each row's messages as they were given, bodies looked up where they are null."""
    said, rows = {}, []
    for row in table.to_pylist():
        told = [*(row["messages"] or []), *filter(None, [row["response"]])]
        for message in told:
            place = row["session_id"], message["key"]
            if message["body"] is not None:
                said[place] = message["body"]
            message["body"] = said[place]
        rows.append((row["messages"], row["response"]))
    return rows


@given(runs())
def test_every_value_arrives_and_sessions_are_gathered(records):
    table = tk.from_records(records)
    table.validate(full=True)
    assert table.schema.equals(TURNS, check_metadata=True)
    names = list(dict.fromkeys(record["session_id"] for record in records))
    gathered = sorted(records, key=lambda record: names.index(record["session_id"]))
    rows = table.to_pylist()
    for row, record in zip(rows, gathered, strict=True):
        for name in ("session_id", "turn_index", "prompt_ids", "output_ids"):
            assert row[name] == record[name]
        assert row["output_logprobs"] == (record["output_logprobs"] or None)
        for name in ("finish_reason", "ill_formed", "trainable"):
            assert row[name] == record[name]
        reply = record["response_message"]
        assert row["use_tool"] == bool(reply and reply.get("tool_calls"))
    for (messages, reply), record in zip(told_messages(table), gathered, strict=True):
        for message, given_message in zip(
            [*(messages or []), reply],
            [*(record["prompt_messages"] or []), record["response_message"]],
            strict=True,
        ):
            if given_message is None:
                assert message is None
                continue
            assert message["body"] == message_record(given_message)[1]
            assert message["key"] == message_key(given_message)
            assert message["role"] == given_message["role"]
        assert (messages is None) == (record["prompt_messages"] is None)


def test_turns_are_counted_by_session():
    records = [
        {**CALL, "session_id": "a"},
        {**CALL, "session_id": "b"},
        {**CALL, "session_id": "a"},
        {**CALL, "session_id": "a", "turn_index": 7},
        {**CALL, "session_id": "a", "turn_index": None},
    ]
    table = tk.from_records(records)
    assert table["session_id"].to_pylist() == ["a", "a", "a", "a", "b"]
    assert table["turn_index"].to_pylist() == [0, 1, 7, 8, 0]


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        lambda ids: range(ids[0], ids[-1] + 1),
        lambda ids: [np.int64(i) for i in ids],
        *(
            lambda ids, t=t: np.array(ids, t)
            for t in "int8 int16 int32 int64 uint8 uint32 uint64 >i4".split()
        ),
        lambda ids: np.repeat(ids, 2)[::2],
        *(lambda ids, t=t: array(t, ids) for t in "hilqHILQ"),
        lambda ids: memoryview(array("i", ids)),
        lambda ids: pa.array(ids, pa.int32()),
        lambda ids: pa.chunked_array([ids, []]),
    ],
)
def test_ids_are_taken_from(make):
    row = one(prompt_ids=make([3, 4]), output_ids=make([5, 6]))
    assert (row["prompt_ids"], row["output_ids"]) == ([3, 4], [5, 6])


@pytest.mark.parametrize(
    ("given_logprobs", "expected"),
    [
        (None, None),
        ([], None),
        (np.array([]), None),
        ([-0.5, None], [-0.5, None]),
        ([None, None], [None, None]),
        ((-0.5, 0), [-0.5, 0.0]),
        ([np.float32(-0.5), -1.0], [-0.5, -1.0]),
        (np.array([-0.5, -1], "f2"), [-0.5, -1.0]),
        (array("d", [-0.5, -1]), [-0.5, -1.0]),
        (np.ma.array([-0.5, -1], mask=[True, False]), [None, -1.0]),
        (pa.array([None, -1.0]), [None, -1.0]),
        ([0.0001, -9998.0], [np.float32(1e-4), -9998.0]),
    ],
)
def test_logprobs_are_taken_from(given_logprobs, expected):
    assert one(output_logprobs=given_logprobs)["output_logprobs"] == expected


def test_null_logprobs_have_zero_bytes():
    table = tk.from_records([{**CALL, "output_logprobs": [None, -1.0]}])
    values = table["output_logprobs"].chunk(0).values
    assert np.frombuffer(values.buffers()[1], np.float32)[:2].tolist() == [0.0, -1.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), -9999.0])
def test_what_engines_give_for_no_logprob_can_be_made_null(bad):
    record = {**CALL, "output_logprobs": [bad, -1.0]}
    with pytest.raises(InvalidTurnsError, match=r"nonfinite_logprobs|at most 0"):
        tk.from_records([record])
    table = tk.from_records([record], nonfinite_logprobs="null")
    assert table["output_logprobs"].to_pylist() == [[None, -1.0]]


REFUSED = [
    ({"session_id": None}, "record 0: session_id is None"),
    ({"session_id": 5.5}, "record 0: session_id is 5.5"),
    ({"session_id": "\ud800"}, "not valid Unicode"),
    ({"turn_index": -1}, "turn_index is -1"),
    ({"turn_index": 2**31}, "turn_index is 2147483648"),
    ({"turn_index": True}, "turn_index is True"),
    ({"turn_index": np.True_}, "turn_index is .*True"),
    ({"output_mask": [2, 0]}, r"output_mask\[0\] is 2: expected a bool, or 0 or 1"),
    ({"output_mask": [True, -1]}, r"output_mask\[1\] is -1"),
    ({"turn_index": "3"}, "turn_index is '3'"),
    ({"prompt_ids": None}, "turn 0: prompt_ids is None"),
    ({"output_ids": None}, "turn 0: output_ids is None"),
    ({"prompt_ids": [1, -1]}, r"prompt_ids\[1\] is -1: token ids"),
    ({"prompt_ids": [2**31]}, r"prompt_ids\[0\] is 2147483648"),
    ({"prompt_ids": [2**80]}, r"prompt_ids\[0\] is 1208925819614629174706176"),
    ({"prompt_ids": [-(2**80)]}, r"prompt_ids\[0\] is -1208925819614629174706176"),
    ({"prompt_ids": [1, True]}, r"prompt_ids\[1\] is True"),
    ({"prompt_ids": [np.True_]}, r"prompt_ids\[0\] is np.True_"),
    ({"prompt_ids": [1.0]}, r"prompt_ids\[0\] is 1.0"),
    ({"prompt_ids": [None]}, r"prompt_ids\[0\] is None"),
    ({"prompt_ids": ["1"]}, r"prompt_ids\[0\] is '1'"),
    ({"prompt_ids": [[1]]}, r"prompt_ids\[0\] is \[1\]"),
    ({"prompt_ids": [np.int64(-3)]}, r"prompt_ids\[0\] is np.int64\(-3\)"),
    ({"prompt_ids": 5}, "prompt_ids is of type int"),
    ({"prompt_ids": "12"}, "prompt_ids is of type str"),
    ({"prompt_ids": b"12"}, "prompt_ids is of type bytes"),
    ({"prompt_ids": memoryview(b"12")}, "prompt_ids is of type memoryview"),
    ({"prompt_ids": pa.py_buffer(b"12")}, "prompt_ids is of type Buffer"),
    ({"prompt_ids": {1: 2}}, "prompt_ids is of type dict"),
    ({"prompt_ids": np.array([1.0])}, "prompt_ids is of float64"),
    ({"prompt_ids": np.array([True])}, "prompt_ids is of bool"),
    ({"prompt_ids": np.array([[1]])}, r"prompt_ids has the shape \(1, 1\)"),
    ({"prompt_ids": np.array([5, -7])}, r"prompt_ids\[1\] is -7"),
    ({"prompt_ids": np.array([2**31])}, r"prompt_ids\[0\] is 2147483648"),
    ({"prompt_ids": np.array([2**63], "u8")}, r"prompt_ids\[0\] is 922337203685477"),
    ({"output_ids": [1, -1, 2]}, r"output_ids\[1\] is -1"),
    ({"output_logprobs": [-1.0] * 3}, "^session 'a', turn 0: 3 logprobs for 2 output"),
    ({"output_logprobs": [-1.0]}, "turn 0: 1 logprobs for 2 output ids"),
    ({"output_logprobs": np.zeros(3)}, "3 logprobs for 2 output ids"),
    ({"output_logprobs": ["x", 0.0]}, r"output_logprobs\[0\] is 'x'"),
    ({"output_logprobs": [True, 0.0]}, r"output_logprobs\[0\] is True"),
    ({"output_logprobs": [0.0, 1.1e-4]}, r"output_logprobs\[1\] is 0.00011.*at most 0"),
    ({"output_logprobs": [float("nan"), 0.0]}, r"\[0\] is nan: it is not a number"),
    ({"output_logprobs": [0.0, float("inf")]}, r"\[1\] is inf: .* at most 0"),
    ({"output_logprobs": [float("-inf"), 0.0]}, r"\[0\] is -inf: engines write"),
    ({"output_logprobs": [-9999.0, 0.0]}, r"\[0\] is -9999.0: engines write"),
    ({"output_logprobs": [1e300, 0.0]}, r"\[0\] is inf"),
    ({"output_logprobs": [-(10**400), 0.0]}, r"\[0\] is -inf"),
    ({"output_logprobs": 0.0}, "output_logprobs is of type float"),
    ({"output_logprobs": np.array(["a", "b"])}, "output_logprobs is of <U1"),
    ({"finish_reason": 3}, "turn 0: finish_reason is 3"),
    ({"finish_reason": "\udfff"}, "finish_reason .* is not valid Unicode"),
    ({"ill_formed": 1}, "turn 0: ill_formed is 1: expected a bool"),
    ({"use_tool": "no"}, "use_tool is 'no'"),
    ({"trainable": 0}, "trainable is 0"),
    ({"prompt_messages": "hello"}, "prompt_messages is of type str"),
    ({"prompt_messages": [USER, "x"]}, r"prompt_messages\[1\] is of type str"),
    ({"prompt_messages": [{"content": ""}]}, r"prompt_messages\[0\] has no role"),
    (
        {"prompt_messages": [{**USER, "content": [b""]}]},
        r"session 'a', turn 0: prompt_messages\[0\]\['content'\]\[0\] is of type bytes",
    ),
    ({"response_message": []}, "response_message is of type list"),
    ({"response_message": {}}, "response_message has no role"),
    ({"response_message": {**REPLY, 1: 2}}, "response_message has the key 1"),
    ({"weight_versions": "3"}, "weight_versions is '3'"),
    ({"weight_versions": ["3"]}, r"weight_versions\[0\] is '3'"),
    ({"weight_versions": [{"version": "3"}]}, r"weight_versions\[0\] is {'version'"),
    (
        {"weight_versions": [{"version": 3, "start": 0, "stop": 2}]},
        r"weight_versions\[0\] is {'version': 3",
    ),
    (
        {"weight_versions": [{"version": "3", "start": 0, "stop": 2.5}]},
        r"weight_versions\[0\] is .*'stop': 2.5",
    ),
    (
        {"weight_versions": [{"version": "3", "start": 0, "stop": 1}]},
        "weight_versions end at 1 of 2 output ids",
    ),
    ({"output_log_probs": []}, "'output_log_probs': spell it 'output_logprobs'"),
    ({"promptIds": []}, "'promptIds': spell it 'prompt_ids'"),
    ({"logprobs": [-1.0]}, "'logprobs': spell it 'output_logprobs'"),
    ({"messages": []}, "'messages', which is a column made from prompt_messages"),
    ({3: 4}, "record 0 has the key 3"),
    ({"extra": object()}, "Arrow cannot store the values of 'extra'"),
    ({"output_mask": [True]}, "turn 0: 1 elements of output_mask for 2 output"),
    ({"output_mask": []}, "turn 0: 0 elements of output_mask for 2 output"),
    ({"output_mask": [True, None]}, r"output_mask is \[True, None\]: .* list of bools"),
    ({"output_mask": [0.5, 1.0]}, "output_mask is .* expected a list of bools"),
    ({"output_mask": "tt"}, "output_mask is 'tt': expected a list of bools"),
]


@pytest.mark.parametrize(("changes", "match"), REFUSED)
def test_malformed_records_are_refused(changes, match):
    with pytest.raises(InvalidTurnsError, match=match):
        tk.from_records([{**CALL, **changes}])


@pytest.mark.parametrize(
    ("second", "match"),
    [
        ([], "record 1 is a list: expected a dict"),
        ({**CALL, "turn_index": 0}, "session 'a', turn 0: .* repeated"),
    ],
)
def test_a_record_that_does_not_follow_is_refused(second, match):
    with pytest.raises(InvalidTurnsError, match=match):
        tk.from_records([CALL, second])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"response_message": REPLY}, False),
        ({"response_message": {**REPLY, "tool_calls": []}}, False),
        ({"response_message": {**REPLY, "tool_calls": [{}]}}, True),
        ({"use_tool": True}, True),
        ({"use_tool": np.False_}, False),
        ({"use_tool": None}, None),
    ],
)
def test_use_tool(changes, expected):
    assert one(**changes)["use_tool"] is expected


def test_further_keys_become_columns():
    table = tk.from_records([CALL, {**CALL, "agent_id": "x", "n": 1}, {**CALL, "n": 2}])
    assert table.column_names[-2:] == ["agent_id", "n"]
    assert table["agent_id"].to_pylist() == [None, "x", None]
    assert table["n"].to_pylist() == [None, 1, 2]


def test_a_buffer_may_be_used_again():
    ids = np.array([1, 2])

    def calls():
        for start in (0, 10):
            ids[:] = start, start + 1
            yield {**CALL, "prompt_ids": ids}

    prompts = tk.from_records(calls())["prompt_ids"].to_pylist()
    assert prompts == [[0, 1], [10, 11]]


def test_unboxing_needs_as_many_places_as_values():
    with pytest.raises(LayoutError, match="2 places for 1 values"):
        _core.unbox_ids([1], np.empty(2, np.int32))
    with pytest.raises(LayoutError, match="need 1 places"):
        _core.unbox_logprobs([0.0], np.empty(1, np.float32), np.empty(2, np.uint8))


def test_no_logprobs_of_no_output_are_null():
    for none in ([], (), np.array([], np.float32), np.array([], np.float64), None):
        assert one(output_ids=[], output_logprobs=none)["output_logprobs"] is None


def test_extra_columns_follow_their_turns_into_order():
    turns = tk.from_records({**CALL, "turn_index": k, "x": k} for k in (2, 0, 1))
    assert turns["turn_index"].to_pylist() == turns["x"].to_pylist() == [0, 1, 2]


# --- keys that turns do not read

MARKS = {"output_ids": [3, 4, 5], "output_logprobs": None}


@pytest.mark.parametrize(
    "beside",
    [
        *({"is_model_token": [1, 0, 1]}, {"generated": [True, False, True]}),
        *({"labels": [-100, -100, 3, -100, 5]}, {"loss_weights": [1.0, 0.0, 0.5]}),
        *({"train_on": (1, 0, 1)}, {"sampled": np.array([True, False, True])}),
        *({"loss_mask": [1, 1, 1]}, {"info": {"train_on": [1, 0, 1]}}),
    ],
)
def test_a_key_that_marks_part_of_an_output_is_refused(beside):
    with pytest.raises(
        InvalidTurnsError, match=r"record 0 .* marks part .*output_mask"
    ):
        one(**MARKS, **beside)
    if "loss_mask" not in beside:
        assert one(**MARKS, **beside, trainable=False)["trainable"] is False
        one(**MARKS, **beside, output_mask=[1, 0, 1])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("status", "aborted"), ("error", {"message": "boom"}), ("truncated", True)),
        *(("finish_reason", "error"), ("stop_reason", "timeout"), ("valid", False)),
        ("metadata", {"status": "failed"}),
    ],
)
def test_a_call_without_a_proper_end_is_refused_unless_it_says_if_it_trains(key, value):
    with pytest.raises(InvalidTurnsError, match=f"{key}.* aborted, .*trainable"):
        one(**{key: value})
    for trains in (True, False):
        assert one(**{key: value}, trainable=trains)["trainable"] is trains


@pytest.mark.parametrize(
    "beside",
    [
        *({"status": "done"}, {"error": None}, {"error": 0.0}, {"truncated": False}),
        *({"finish_reason": "abort"}, {"finish_reason": "repetition"}),
        *({"rewards": [0, 1]}, {"sizes": [7, 9]}, {"labels": [-100, -100, 3, 4]}),
        *({"tools": {"status": "failed"}}, {"usage": {"completion_tokens": 2}}),
    ],
)
def test_other_keys_are_extra_columns(beside):
    assert one(**beside)["trainable"] is None


def test_counts_in_an_object_are_compared():
    with pytest.raises(InvalidTurnsError, match=r"'metadata.usage'.*other numbers"):
        one(metadata={"usage": {"completion_tokens": 3}})


@pytest.mark.parametrize("key", ["run_id", "trajectory_id", "worker", "rollout"])
def test_a_key_that_names_several_runs_of_a_session_is_refused(key):
    first, second = {**CALL, key: "r"}, {**CALL, key: "q"}
    match = f"'a', turn 1: {key} is 'q', and 'r' in an .*session_id=session_id.{key}"
    with pytest.raises(InvalidTurnsError, match=match):
        tk.from_records([first, second])
    # a mapping says what the sessions are
    assert tk.from_records([first, second], map="session_id=session_id").num_rows == 2
    assert tk.from_records([first, {**second, "session_id": "b"}]).num_rows == 2
    assert tk.from_records([first, {**CALL, key: "r"}, CALL]).num_rows == 3


def test_a_key_that_changes_within_a_conversation_names_no_run():
    after = {**CALL, "prompt_ids": [1, 2, 3, 4, 5], "run_id": "q"}
    calls = [{**CALL, "run_id": "r"}, after, {**CALL, "run_id": "s"}]
    assert tk.from_records(calls).num_rows == 3
    calls = [{**CALL, "agent_id": "r"}, {**CALL, "agent_id": "q"}]
    assert tk.from_records(calls).num_rows == 2
