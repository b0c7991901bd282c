"""Formats as the systems themselves write them.

The files below ``recorded`` were written by vLLM 0.32.0 and SGLang 0.5.23 with tiny random
models, by verifiers 0.4.0 (``Trace.to_record``) and by Inspect 0.3.285
(``write_eval_log``, around a response of vLLM).
"""

import json
import struct
import zipfile
from pathlib import Path

import pytest

import trajkit as tk
from tests.importers import foreign

FILES = Path(__file__).parent / "recorded"
ENGINES = {
    name: pair
    for replies in json.loads((FILES / "engines.json").read_text()).values()
    for name, pair in replies.items()
}
# replies without token ids
BARE = ("chat_tokens_as_ids", "chat plain", "anthropic")


def imported(tmp_path, *lines, **options):
    foreign.write_lines(tmp_path / "log.jsonl", lines)
    turns, report = tk.import_turns(tmp_path / "log.jsonl", **options)
    return turns, [(row["problem"], row["kept"]) for row in report.to_pylist()]


@pytest.mark.parametrize("name", ENGINES)
def test_replies_of_engines(tmp_path, name):
    pair = ENGINES[name]
    turns, found = imported(tmp_path, {"session_id": "s", **pair})
    if name in BARE:
        assert turns.num_rows == 0
        missing = "no_output_ids" if name == "anthropic" else "no_prompt_ids"
        assert found in ([(missing, False)], [("no_prompt_ids", False)])
        return
    answers = pair["response"]
    several = answers if isinstance(answers, list) else [answers]
    asked = pair["request"].get("input_ids")
    batch = isinstance(asked[0], list) if asked else False
    assert turns.num_rows == len(several)
    for k, (turn, answer) in enumerate(zip(turns.to_pylist(), several, strict=True)):
        choice = answer.get("choices", [answer])[0]
        output = choice.get("token_ids", choice.get("response_token_ids"))
        assert turn["output_ids"] == (output or answer["output_ids"])
        prompt = (
            choice.get("prompt_token_ids")
            or answer.get("prompt_token_ids")
            or pair["request"].get("token_ids")
            or (asked[k] if batch else asked)
        )
        assert turn["prompt_ids"] == prompt
        assert turn["finish_reason"] == "length"
        if name in ("basic", "return_token_ids"):
            version = {
                "version": "default",
                "start": 0,
                "stop": len(turn["output_ids"]),
            }
            assert turn["weight_versions"] == [version]
        if (turn["output_logprobs"] or [None])[0] is not None:
            assert -12 < turn["output_logprobs"][0] < -6
    silent = turns["output_logprobs"].null_count
    assert found == [("no_logprobs", True)] * silent
    assert silent == (name == "return_token_ids")


@pytest.mark.parametrize("name", ENGINES)
def test_replies_without_their_requests(tmp_path, name):
    response = ENGINES[name]["response"]
    lines = response if isinstance(response, list) else [response]
    options = {"format": "responses", "map": "session_id=@file"}
    turns, found = imported(tmp_path, *lines, **options)
    has_prompt = "prompt_token_ids" in json.dumps(lines) and name not in (
        *BARE,
        "logprobs_1",
    )
    assert turns.num_rows == (len(lines) if has_prompt else 0)
    left = [problem for problem, kept in found if not kept]
    assert left == ([] if has_prompt else ["no_prompt_ids"] * len(lines))


def test_a_trace_of_verifiers():
    turns, report = tk.import_turns(FILES / "verifiers.jsonl")
    assert turns["prompt_ids"].to_pylist() == [
        [1, 46, 86, 7],
        [1, 46, 86, 7, 3723, 1210, 5, 7],
    ]
    assert turns["output_ids"].to_pylist() == [[3723, 1210], [9]]
    assert turns["finish_reason"].to_pylist() == ["stop", "length"]
    assert turns["agent_id"].to_pylist() == ["agent"] * 2
    assert turns["group_id"].to_pylist() == ["k1"] * 2
    # its usage counts cached tokens apart from the prompt's
    assert turns["trainable"].to_pylist() == [True] * 2
    problems = report["problem"].to_pylist()
    assert sorted(problems) == [
        *["reward_unread"] * 2,
        *["rounded_logprobs"] * 2,
        *["unread"] * 3,
    ]
    assert {row["detail"].split()[0] for row in report.to_pylist()} >= {
        "advantages",
        "trainer_logprobs",
        "entropies",
        "/rewards",
    }


def test_a_log_of_inspect():
    turns, report = tk.import_turns(FILES / "inspect.eval")
    (turn,) = turns.to_pylist()
    response = ENGINES["chat_return_token_ids"]["response"]
    assert turn["session_id"] == "task-1/1"
    assert turn["group_id"] == "task-1"
    assert turn["prompt_ids"] == response["prompt_token_ids"]
    assert turn["output_ids"] == response["choices"][0]["token_ids"]
    assert turn["finish_reason"] == "length"
    assert report["problem"].to_pylist() == ["reward_unread"]
    turns, report = tk.import_turns(
        FILES / "inspect.eval", map="reward=/scores.partial.value"
    )
    assert turns["reward"].to_pylist() == [0.5]
    assert report.num_rows == 0


@pytest.mark.parametrize("damaged", ["data", "checksum"])
def test_a_damaged_sample_of_inspect_is_named(tmp_path, damaged):
    name, content = "samples/task-1_epoch_1.json", (FILES / "inspect.eval").read_bytes()
    with zipfile.ZipFile(FILES / "inspect.eval") as archive:
        checksum = archive.getinfo(name).CRC
    at = content.index(name.encode()) + 60
    old = struct.pack("<I", checksum) if damaged == "checksum" else content[at : at + 4]
    new = bytes([old[0] ^ 0xFF]) + old[1:]
    (tmp_path / "log.eval").write_bytes(content.replace(old, new))
    turns, report = tk.import_turns(tmp_path / "log.eval")
    assert turns.num_rows == 0
    assert report["problem"].to_pylist() == ["unreadable"]
    assert report["place"].to_pylist() == [name]
    assert report["detail"][0].as_py().endswith("is damaged") or damaged == "data"


def test_a_trajectory_with_sub_agents(tmp_path):
    """Of ATIF 1.7: https://github.com/harbor-framework/harbor/blob/main/rfcs."""
    record = {"session_id": "run", "output_logprobs": [-0.5]}
    foreign.write_atif(tmp_path, [{**record, "prompt_ids": [1], "output_ids": [2]}])
    path = tmp_path / "0" / "trajectory.json"
    main = json.loads(path.read_text())
    step = main["steps"][1]
    below = {"schema_version": "ATIF-v1.7", "trajectory_id": "helper-1", "agent": {}}
    metrics = {**step["metrics"], "completion_token_ids": [7]}
    main["subagent_trajectories"] = [{**below, "steps": [{**step, "metrics": metrics}]}]
    main["steps"] += [
        {**step, "is_copied_context": True},
        {**step, "llm_call_count": 3},
        {"source": "agent", "message": "no call", "llm_call_count": 0},
        {"source": "system", "message": "x"},
    ]
    path.write_text(json.dumps(main))
    turns, report = tk.import_turns(path)
    assert turns["session_id"].to_pylist() == ["run", "run"]
    assert turns["agent_id"].to_pylist() == ["terminus-2", "helper-1"]
    assert turns["output_ids"].to_pylist() == [[2], [7]]
    assert [(row["problem"], row["place"]) for row in report.to_pylist()] == [
        ("copied", "line 1, item 2"),
        ("unreadable", "line 1, item 3"),
    ]
