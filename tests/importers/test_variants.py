"""The same rules for other fields, formats and places."""

import json
import pickle

import numpy as np
import pytest

import trajkit as tk
from tests.importers import foreign
from tests.importers.logs import CALL, IDS, USER, imported, line, problems
from trajkit.errors import FormatError


def response(**changes):
    value = line(session_id="s")
    value["response"] |= changes
    return value


def slime(**changes):
    sample = {
        "index": 0,
        "tokens": [1, 2, 3],
        "response_length": 2,
        "loss_mask": [1] * 2,
    }
    sample |= {"rollout_log_probs": None, "status": "completed", "reward": 1.0}
    return {"rollout_id": 0, "samples": [sample | changes]}


IMAGE = [{"type": "image_url", "image_url": {"url": "u"}}]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        # rewards, wherever they are
        ({**CALL, "result": {"reward": 0.5}}, "result.reward of 1"),
        (response(reward=0.5), "--map reward=response.reward takes it"),
        (response(metadata={"score": 1}), "reward=response.metadata.score takes"),
        (
            line(session_id="s", request={"metadata": {"reward": 1}}),
            "request.metadata.r",
        ),
        ({**CALL, "solved": True}, "solved of 1 record"),
        # pictures and sounds
        ({**CALL, "messages": [{**USER, "content": IMAGE}]}, "messages.image_url of 1"),
        ({**CALL, "pixel_values": [[0.5]]}, "pixel_values of 1"),
        (slime(multimodal_inputs={"images": [1]}), "multimodal_inputs of 1"),
        # values of other kinds
        (
            {**CALL, "started_at": "2026-01-01T00:00:00"},
            "(expected ISO text with a zone",
        ),
        ({**CALL, "trainable": "false"}, "(the first: 'false')"),
        (
            {**CALL, "logprobs": [{"3": -0.5}, {"4": -0.5}]},
            "their form is unknown: [{'3'",
        ),
        ({**CALL, "token_ids": "3 4"}, "(str, list, str, list)"),
        (response(prompt_token_ids="1 2"), "its prompt_ids are '1 2', not a list"),
        # what is left out has a reward
        (
            {"session_id": "s", "reward": 1.0, "request": None, "response": None},
            "its reward 1.0 is not read",
        ),
    ],
)
def test_what_is_left_behind_has_a_line(tmp_path, record, words):
    try:
        _, report = _imported_as(tmp_path, record)
    except FormatError as error:
        report = str(error)
    assert words in json.dumps(report).replace("\\\\", "\\")


def _imported_as(tmp_path, value):
    """Import a record of JSON lines, or slime's dump."""
    if "samples" not in value:
        return imported(tmp_path, [value])
    foreign.save(tmp_path / "rollout_0.pt", value)
    turns, report = tk.import_turns(tmp_path)
    return turns, report.to_pylist()


@pytest.mark.parametrize(
    "record",
    [
        {**CALL, "trainable": "false"},
        # padding is in its prompt
        {**CALL, "attention_mask": [0, 1, 1, 1]},
        *(
            slime(status="failed"),
            slime(status="Status.ABORTED"),
            slime(remove_sample=1),
        ),
        {"traceId": "t", "spanId": "a", "attributes": {**IDS, "error.type": "timeout"}},
    ],
)
def test_what_may_not_train_is_context(tmp_path, record):
    turns, report = _imported_as(tmp_path, record)
    assert turns["trainable"].to_pylist() == [False]
    assert "takes it" not in json.dumps(report)


def test_a_trajectory_that_begins_a_session_again_is_left_out(tmp_path):
    trace = {"id": "t", "task": {}, "rewards": {"a": float("nan")}}
    nodes = [[(None, "user", [k]), (0, "assistant", [3])] for k in range(2)]
    nodes[1] += [(1, "user", [5]), (2, "assistant", [6])]
    traces = [
        trace
        | {
            "nodes": [
                {"parent": parent, "message": {"role": role}, "token_ids": ids}
                | {"sampled": role == "assistant", "mask": [role == "assistant"]}
                for parent, role, ids in own
            ]
        }
        for own in nodes
    ]
    turns, report = imported(tmp_path, traces)
    assert turns["prompt_ids"].to_pylist() == [[0]]
    left = [(one["place"], one["problem"]) for one in report if not one["kept"]]
    place = "line 2, node {}"
    assert left == [(place.format(k), "repeated_session") for k in (1, 3)]
    turns, _ = imported(tmp_path, traces, map="session_id=/@name")
    assert turns["session_id"].unique().to_pylist() == [
        f"log.jsonl, line {k}" for k in (1, 2)
    ]


@pytest.mark.parametrize("number", [np.float64(0.5), np.float32(0.5), np.float16(0.5)])
def test_numbers_of_numpy_in_a_dump_are_numbers(tmp_path, number):
    dump = slime(reward=number, response_length=np.int64(2), index=np.int32(7))
    (tmp_path / "rollout_0.pkl").write_bytes(pickle.dumps(dump))
    turns, report = tk.import_turns(tmp_path)
    assert turns["reward"].to_pylist() == [0.5]
    assert turns["session_id"].to_pylist() == ["0/7"]
    assert problems(report.to_pylist()) == ["no_logprobs"]
    (tmp_path / "rollout_0.pkl").write_bytes(pickle.dumps(slime(tokens=np.arange(3))))
    _, report = tk.import_turns(tmp_path)
    assert "its tokens are an object of unknown class" in report["detail"][0].as_py()


def test_a_parent_is_of_the_same_session(tmp_path):
    """Rollouts may number their calls alike."""
    calls = [
        {"rollout_id": run, "model_call_id": "c0", "prompt_token_ids": [k]}
        | {"generation_token_ids": [3]}
        for k, run in enumerate("ab")
    ]
    more = {"model_call_id": "c1", "prompt_token_ids": [5], "prompt_is_delta": 1}
    calls.append(calls[0] | more | {"parent_call_id": "c0"})
    turns, _ = imported(tmp_path, calls)
    assert turns["prompt_ids"].to_pylist() == [[0], [0, 3, 5], [1]]
    trace = {"trace_id": "1", "session_id": "s", "completion_token_ids": [3]}
    first = trace | {"prompt_token_ids": [1]}
    other = {"parent_trace_id": "1", "prompt_delta_token_ids": [5]}
    second = trace | other | {"trace_id": "2", "prompt_token_ids": [1, 3, 6]}
    turns, report = imported(tmp_path, [first, second])
    assert turns.num_rows == 1
    assert "unreadable" in problems(report)


def test_the_parts_of_a_name_are_advised_together(tmp_path):
    run = {"trajectory_id": {"instance_id": "i", "repetition_id": 0}}
    _, report = imported(tmp_path, [{**IDS, **run}])
    option = "session_id=trajectory_id.instance_id+trajectory_id.repetition_id"
    assert f"--map {option} " in report[0]["detail"]


def test_an_error_in_a_mapped_response_is_named(tmp_path):
    answers = [{"body": one} for one in (line()["response"], {"error": {"code": 5}})]
    lines = [{"custom_id": k, "response": one} for k, one in enumerate(answers)]
    turns, report = imported(
        tmp_path, lines, map="session_id=custom_id,response=response.body"
    )
    assert turns["session_id"].to_pylist() == ["0"]
    (detail,) = [one["detail"] for one in report if not one["kept"]]
    assert detail.startswith("the response is an error: {'code': 5}")
