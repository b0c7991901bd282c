"""Logs as people bring them: nothing in them is believed or passed over in silence."""

import json
import pickle

import numpy as np
import pytest

import trajkit as tk
from tests import foreign
from tests.importers.test_importers import RECORD
from tests.importers.test_nothing_lost import imported, line, problems
from trajkit.cli import main
from trajkit.errors import FormatError, InvalidTurnsError, LeftOutWarning
from trajkit.importers.reader import UNTRAINED

IDS = {"prompt_token_ids": [1, 2], "token_ids": [3, 4], "logprobs": [-0.5, -0.25]}
CALL = {"session_id": "s", **IDS}
USER = {"role": "user", "content": "q"}
REPLY = {"role": "assistant", "content": "a"}


# --- masks


@pytest.mark.parametrize(
    "name",
    [
        *("loss_mask", "response_mask", "completion_mask", "action_mask", "env_mask"),
        *("tool_mask", "metadata.loss_mask", "my_mask"),
    ],
)
@pytest.mark.parametrize("mask", [[0, 1], [0, 0, 0, 1], [1, 1, 1, 0]])
def test_only_a_mapping_takes_a_mask(tmp_path, name, mask):
    outer, _, inner = name.rpartition(".")
    value = {outer: {inner: mask}} if outer else {inner: mask}
    turns, report = imported(tmp_path, [{**CALL, **value}])
    assert turns["output_ids"].to_pylist() == [[3, 4]]
    assert turns["trainable"].to_pylist() == [False]
    assert problems(report) == ["mask_unread", "unread"]
    option = f"--map output_mask={name} takes it"
    # one that marks the prompt, too, is none of the output
    assert (option in report[0]["detail"]) == (mask[0] == 0)
    taken, report = imported(tmp_path, [{**CALL, **value}], map=f"output_mask={name}")
    assert "mask_unread" not in problems(report)
    if len(mask) == 2:
        assert taken["output_ids"].to_pylist() == [[4]]


def test_a_mask_of_a_choice_is_not_passed_over(tmp_path):
    value = line(session_id="s")
    value["response"]["choices"][0]["loss_mask"] = [1, 0]
    turns, report = imported(tmp_path, [value])
    assert turns["trainable"].to_pylist() == [False]
    assert problems(report) == ["mask_unread", "unread"]
    path = "response.choices.0.loss_mask"
    assert f"--map output_mask={path} takes it" in report[0]["detail"]
    turns, report = imported(tmp_path, [value], map=f"output_mask={path}")
    assert turns["output_ids"].to_pylist() == [[3]]
    assert problems(report) == []


LONG = {**CALL, "token_ids": [3, 9, 4], "logprobs": [-0.5, -0.25, -0.125]}


def counts(*names):
    return [{name: 9} for name in names]


# what stands beside a call, by the finding that it makes
BESIDE = {
    "mask_unread": [
        *({"is_generated": [1, 0, 1]}, {"is_env": [0, 1, 0]}, {"ignore": [0, 1, 0]}),
        *({"lossMask": [1, 0, 1]}, {"loss_mask": [[1, 0, 1]]}, {"loss_mask": "101"}),
        *({"m": "101"}, {"loss_mask": [1, 0]}, {"loss_mask": [1.0, 0.0, 1.0]}),
        *({"labels": [3, -100, 4]}, {"masks": {"loss": [1, 0, 1]}}),
        *({"loss_weights": [1, 0.5, 0]}, {"extra": {"x": {"loss_mask": [0, 1, 1]}}}),
        *({"trainable_tokens": [True, False, True]}, {"a": {"b": [{"q": [0, 0, 1]}]}}),
    ],
    "aborted": [
        *({"status": "aborted"}, {"stop_reason": "error"}, {"state": "CANCELLED"}),
        *({"status": "timed out"}, {"error": "x"}, {"error": {"a": 1}}),
        *({"truncated": True}, {"overlong": 1}, {"is_valid": False}, {"train": False}),
        *({"metadata": {"status": "failed"}}, {"status_code": 429}),
        {"http_status": 500},
    ],
    "usage_contradicts": [
        {"usage": {"output": 5, "input": 2, "unit": "TOKENS"}},
        *({"usageDetails": {"output": 5, "input": 2}}, {"usage_details": {"input": 9}}),
        *({"usage": {"completionTokens": 5}}, {"usage": '{"completion_tokens": 5}'}),
        *({"usage": {"promptTokenCount": 9}}, {"metadata": {"outputTokens": 5}}),
        *({"metrics": {"completion_tokens": 5}}, {"tokens": {"output": 5}}),
        *({"token_usage": {"completion": 5}}, {"stats": {"output_len": 9}}),
        *({"usage": {"total_tokens": 9}}, {"usage": {"completion_tokens": "3"}}),
        *counts("completion_tokens", "prompt_tokens", "n_output_tokens", "eval_count"),
        *counts("num_prompt_tokens", "completion_len", "responseLength", "PROMPT_LEN"),
        *counts("prompt_eval_count", "numOutputTokens", "completiontokens"),
    ],
    "": [
        *({"attention_mask": [1] * 5}, {"loss_mask": [0, 0, 1, 1, 1]}, {"x": [0, 1]}),
        *({"labels": [-100, -100, 3, 9, 4]}, {"prompt_mask": [0, 0]}),
        *({"image_sizes": [0, 1]}, {"token_level_rewards": [0, 0, 1]}),
        *({"labels": ["a"]}, {"sampling_mask": [[3], [9, 4], []]}),
        *({"status": "completed"}, {"finish_reason": "abort"}, {"error": None}),
        *({"success": False}, {"timeout": 1}, {"is_valid": True}, {"truncated": False}),
        {"error": None, "truncated": False, "mask": [], "labels": {}, "agent": ""},
        *({"usage": {"output": 3, "input": 2}}, {"usage": {"total_tokens": 5}}),
        *({"usage": {"output": 9, "unit": "CHARACTERS"}}, {"usage": None}),
        # what sources count without cached or reasoning tokens
        {"usage": {"input": 1, "input_cached_tokens": 1}},
        {"usage": {"output": 1, "output_reasoning_tokens": 1}},
        {"usage": {"input_tokens": 1, "cache_read_input_tokens": 1}},
        *counts("max_tokens", "max_output_tokens"),
        *({"completion_len": 3}, {"cached_prompt_tokens": 1}, {"total_tokens": 5}),
        *({"completion_tokens": None}, {"completion_tokens": 3.0}),
        {"latency": 5, "usage": {"cost": 3, "prompt_tokens": None}},
    ],
}
CASES = [(problem, one) for problem, several in BESIDE.items() for one in several]


def of_format(kind, beside):
    """A record of a format, with the tokens of `LONG`, and what is beside it."""
    if kind == "records":
        return {**LONG, **beside}
    if kind == "openai":
        ids = {"prompt_ids": [1, 2], "output_ids": [3, 9, 4]}
        return line(session_id="s", record={**ids, "output_logprobs": None}, **beside)
    call = {"traceId": "t", "type": "GENERATION", "input": [], **beside}
    return {**call, "metadata": {**LONG, **beside.get("metadata", {})}}


@pytest.mark.parametrize(
    ("kind", "problem", "beside"),
    [
        *(("records", *case) for case in CASES),
        *((kind, *case) for kind in ("openai", "langfuse") for case in CASES[::3]),
    ],
)
def test_what_stands_beside_a_call(tmp_path, kind, problem, beside):
    call = of_format(kind, beside)
    for option in ("untrain", "train"):
        turns, report = imported(tmp_path, [call], contradicted=option)
        assert UNTRAINED & {*problems(report)} == {problem} - {""}
        context = problem == "mask_unread" or (problem and option == "untrain")
        assert turns["trainable"].to_pylist() == [False if context else None]


# --- names of runs


def at(path, value):
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


@pytest.mark.parametrize(
    "key",
    [
        *(
            "conv",
            "ep",
            "execution",
            "case",
            "sid",
            "cid",
            "ticket",
            "path",
            "key",
            "i",
        ),
        *("a.b.trajectory_id", "request.user", "request.prompt_cache_key"),
    ],
)
def test_a_key_that_changes_where_prompts_start_over_names_runs(tmp_path, key):
    calls = [{**IDS, **at(key, name)} for name in ("r1", "r2")]
    turns, report = imported(tmp_path, calls)
    assert (turns.num_rows, problems(report)) == (0, ["no_session_id"] * 2)
    assert f"{key} ('r1')" in report[0]["detail"]


def test_what_changes_with_each_call_of_a_conversation_names_no_run(tmp_path):
    after = {**IDS, "prompt_token_ids": [1, 2, 3, 4, 5]}
    turns, _ = imported(tmp_path, [{**IDS, "nonce": "a"}, {**after, "nonce": "b"}])
    assert turns["session_id"].to_pylist() == ["log"] * 2
    turns, _ = imported(tmp_path, [{**IDS, "created_at": "a"}, {**IDS, "step_no": 2}])
    assert turns["session_id"].to_pylist() == ["log"] * 2


def test_two_names_of_ids_that_differ_are_refused(tmp_path):
    turns, report = imported(tmp_path, [{**CALL, "output_ids": [3]}])
    assert (turns.num_rows, problems(report)) == (0, ["unreadable"])
    assert "token_ids and output_ids" in report[0]["detail"]


def test_a_response_beside_its_session_is_read_whole(tmp_path):
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "5"}
    meta["output_token_logprobs"] = [[-0.5, 3, None]]
    answer = {"session_id": "s", "input_ids": [1], "output_ids": [3], "meta_info": meta}
    turns, _ = imported(tmp_path, [answer])
    assert turns["output_logprobs"].to_pylist() == [[-0.5]]
    assert turns["finish_reason"].to_pylist() == ["stop"]
    assert turns["weight_versions"].null_count == 0


def test_a_single_call_whose_messages_end_with_the_reply_says_so(tmp_path):
    _, report = imported(tmp_path, [{**CALL, "messages": [USER, REPLY]}])
    assert problems(report) == ["no_reply"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(
            (key, 7)
            for key in ("id", "agent_id", "uuid", "worker", "rank", "worker_id")
        ),
        *((key, "ä-7") for key in ("workerRank", "pid", "sim_uuid", "guid", "env_idx")),
        *((key, 0) for key in ("actor", "seed", "client_id", "host", "name")),
        *((key, "r") for key in ("trajectory_id", "runId", "episode_id", "task_id")),
        *(("conversation_id", "c"), ("metadata.trajectory_id", "r"), ("run.id", 3)),
        *(("extra.sample_index", 4), ("headers.X-Session-ID", "s")),
        *(("request.metadata.thread_id", "x"), ("ids.trajectory_id", "r")),
        *((key, None) for key in ("session_id", "metadata.session_id", "runId")),
        *((key, "") for key in ("session_id", "metadata.session_id", "trajectory_id")),
    ],
)
def test_any_name_beside_a_call_stops_the_import(tmp_path, key, value):
    beside = at(key, value)
    call = line() | beside if "request." not in key else line(**beside)
    for one in (call, {**IDS, **beside}):
        if one is call and "request" in beside:
            one["request"] = {"messages": [], **beside["request"]}
        turns, report = imported(tmp_path, [one] * 2)
        assert turns.num_rows == 0
        assert problems(report)[:2] == ["no_session_id"] * 2
        assert f"{key} ({value!r})" in report[0]["detail"]
        assert "--map session_id=" in report[0]["detail"]
        if value not in (None, ""):
            turns, _ = imported(tmp_path, [one], map=f"session_id={key}")
            assert turns["session_id"].to_pylist() == [str(value)]


@pytest.mark.parametrize("key", ["request_id", "model_id", "step_id", "parent_id"])
def test_names_of_calls_name_no_run(tmp_path, key):
    turns, _ = imported(tmp_path, [{**IDS, key: "x"}])
    assert turns["session_id"].to_pylist() == ["log"]


# --- messages and replies


def test_a_reply_at_the_end_of_the_messages_leaves_the_prompt(tmp_path):
    calls = [
        {**CALL, "messages": [USER, REPLY]},
        {**CALL, "prompt_token_ids": [1, 2, 3, 4, 5], "messages": [USER, REPLY] * 2},
    ]
    fields = (
        "session_id=session_id,prompt_messages=messages,response_message=messages.-1"
    )
    turns, _ = imported(tmp_path, calls, map=fields)
    for table in (turns, tk.from_records(calls, map=fields)):
        assert [len(one) for one in table["messages"].to_pylist()] == [1, 3]
        assert table["response"].null_count == 0
        assert tk.link(table)["parent"].to_pylist() == [None, 0]
    _, report = imported(tmp_path, calls)
    assert problems(report) == ["no_reply"] * 2
    assert "messages.-1" in report[0]["detail"]


def test_a_text_is_a_reply(tmp_path):
    call = {**CALL, "messages": [USER], "answer": "a"}
    after = {**CALL, "messages": [USER, REPLY, USER], "answer": "b"}
    after["prompt_token_ids"] = [1, 2, 3, 4, 5]
    fields = "response_message=answer"
    turns, report = imported(tmp_path, [call, after], map=fields)
    assert "text_reply" in problems(report)
    assert turns["response"].null_count == 0
    assert tk.link(turns)["parent"].to_pylist() == [None, 0]
    table = tk.from_records([call, after], map=fields)
    assert tk.link(table)["parent"].to_pylist() == [None, 0]
    # what the next request repeats is more than its text
    whole = {**REPLY, "reasoning": "r"}
    turns, _ = imported(
        tmp_path, [call, {**after, "messages": [USER, whole, USER]}], map=fields
    )
    assert json.loads(turns["response"][0].as_py()["body"]) == whole
    _, report = imported(tmp_path, [{**call, "answer": 5}], map=fields)
    assert problems(report) == ["unread"]


# --- the same mapping everywhere


FURTHER = {
    "response": {"id": 1},
    "prompt_id": 3,
    "messages": [USER],
    "deep": json.loads("[" * 40 + "]" * 40),
    "odd": [1, "x"],
    "step": 4,
}


@pytest.mark.parametrize("key", FURTHER)
def test_further_keys_are_no_error_with_a_mapping(tmp_path, key):
    call = {**IDS, "run": 3, key: FURTHER[key]}
    call["response_message"] = REPLY
    turns, _ = imported(tmp_path, [call], map="session_id=run")
    left_out = key in ("deep", "odd")
    with pytest.warns(LeftOutWarning) if left_out else _nothing():
        table = tk.from_records([call], map="session_id=run")
    with pytest.warns(LeftOutWarning) if left_out else _nothing():
        read = tk.read_turns(tmp_path / "log.jsonl", map="session_id=run")
    for name in ("session_id", "prompt_ids", "output_ids", "output_logprobs"):
        assert table[name].equals(turns[name])
        assert read[name].to_pylist() == turns[name].to_pylist()
    assert ("step" in table.column_names) == (key == "step")


class _nothing:
    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass


def test_records_in_lists_are_calls_with_a_mapping_everywhere(tmp_path):
    steps = [{"kind": kind, **IDS} for kind in ("llm", "tool", "llm")]
    run = {"run": {"id": 5}, "steps": steps}
    (tmp_path / "map.toml").write_text(
        'each = "steps"\nonly = "kind=llm"\n[fields]\nsession_id = "/run.id"\n'
    )
    path = tmp_path / "map.toml"
    turns, _ = imported(tmp_path, [run], map=path)
    for table in (
        tk.from_records([run], map=path),
        tk.read_turns(tmp_path / "log.jsonl", map=path),
    ):
        assert table["session_id"].to_pylist() == turns["session_id"].to_pylist()
        assert table["output_ids"].to_pylist() == [[3, 4]] * 2
    table = tk.read_turns(tmp_path / "log.jsonl", map="each=steps,session_id=@file")
    assert table["session_id"].to_pylist() == ["log"] * 3


# --- Harbor's trials


def trial(**changes):
    detail = {
        "prompt_token_ids": [[1, 2], [1, 2, 3, 4, 5]],
        "completion_token_ids": [[3, 4], [6]],
        "logprobs": [[-0.5, -0.25], [-1.0]],
    }
    return {
        "task_name": "t",
        "trial_name": "t__1",
        "agent_info": {"name": "terminus-2", "model_info": {"name": "m"}},
        "agent_result": {"n_input_tokens": 7, "rollout_details": [detail]},
        "verifier_result": {"rewards": {"reward": 0.5}},
        "exception_info": None,
        **changes,
    }


def write_trial(tmp_path, steps, **changes):
    (tmp_path / "t__1" / "agent").mkdir(parents=True, exist_ok=True)
    (tmp_path / "t__1" / "result.json").write_text(json.dumps(trial(**changes)))
    if steps is not None:
        foreign.write_atif(tmp_path / "t__1", [RECORD])
        file = tmp_path / "t__1" / "0" / "trajectory.json"
        value = json.loads(file.read_text())
        if not steps:
            del value["steps"][1]["metrics"]
        (tmp_path / "t__1" / "agent" / "trajectory.json").write_text(json.dumps(value))
        file.unlink()


def test_the_result_of_a_trial_has_its_reward(tmp_path):
    write_trial(tmp_path, steps=True)
    path = tmp_path / "t__1" / "agent" / "trajectory.json"
    for source in (path, tmp_path):
        turns, report = tk.import_turns(source)
        assert turns["output_ids"].to_pylist() == [[3, 4]]
        assert turns["reward"].to_pylist() == [0.5]
        assert turns["group_id"].to_pylist() == ["t"]
        # the calls of the result are those of the trajectory
        found = report["problem"].to_pylist()
        assert found == ["copied"] * (source == tmp_path)


@pytest.mark.parametrize("steps", [None, False])
def test_the_details_of_a_rollout_are_calls(tmp_path, steps):
    write_trial(tmp_path, steps)
    turns, _ = tk.import_turns(tmp_path)
    assert turns["session_id"].to_pylist() == ["t__1"] * 2
    assert turns["prompt_ids"].to_pylist() == [[1, 2], [1, 2, 3, 4, 5]]
    assert turns["output_ids"].to_pylist() == [[3, 4], [6]]
    assert turns["output_logprobs"].to_pylist() == [[-0.5, -0.25], [-1.0]]
    assert turns["reward"].to_pylist() == [0.5] * 2
    assert turns["model"].to_pylist() == ["m"] * 2


def test_a_trial_without_ids_says_how_to_record_them(tmp_path):
    write_trial(tmp_path, None, agent_result={"rollout_details": None})
    _, report = tk.import_turns(tmp_path)
    assert report["problem"].to_pylist() == ["no_prompt_ids"]
    assert "collect_rollout_details" in report["detail"][0].as_py()
    detail = trial()["agent_result"]["rollout_details"][0]
    masked = {"rollout_details": [{**detail, "loss_mask": [[1, 0], [1]]}]}
    changes = {"agent_result": None, "step_results": [{"agent_result": masked}]}
    write_trial(tmp_path, None, verifier_result={"reward": 0}, **changes)
    turns, report = tk.import_turns(tmp_path)
    assert turns["reward"].to_pylist() == [0.0] * 2
    assert turns["trainable"].to_pylist() == [False, None]
    write_trial(tmp_path, None, exception_info={"type": "E"})
    assert tk.import_turns(tmp_path)[0]["trainable"].to_pylist() == [False] * 2
    write_trial(tmp_path, None, verifier_result={"rewards": {"a": 1, "b": 0}})
    turns, report = tk.import_turns(tmp_path)
    assert turns["reward"].null_count == 2
    detail = report["detail"][0].as_py()
    assert "--map reward=/verifier_result.rewards.a takes a part of it" in detail


# --- engines without prompt ids


def test_what_lacks_the_prompt_says_how_to_record_it(tmp_path):
    answer = foreign.sglang_chat_response(RECORD)
    del answer["choices"][0]["prompt_token_ids"]
    value = {"session_id": "s", "request": {"messages": []}, "response": answer}
    _, report = imported(tmp_path, [value])
    assert problems(report) == ["no_prompt_ids"]
    assert "return_prompt_token_ids" in report[0]["detail"]


# --- Inspect's scores


@pytest.mark.parametrize(
    ("scores", "reward"),
    [
        ({"match": {"value": "C"}}, 1.0),
        ({"match": {"value": "I"}}, 0.0),
        ({"match": {"value": "P"}}, 0.5),
        ({"match": {"value": "N"}}, 0.0),
        ({"match": {"value": True}}, 1.0),
        ({"match": {"value": "no"}}, 0.0),
        ({"match": {"value": "0.25"}}, 0.25),
        ({"match": {"value": "0"}}, 0.0),
        ({"match": {"value": 0.75}}, 0.75),
        ({"match": {"value": "B"}}, None),
        ({"match": {"value": "nan"}}, None),
        ({"match": {"value": {"a": 1}}}, None),
        ({"a": {"value": "C"}, "b": {"value": "I"}}, None),
    ],
)
def test_letters_of_inspect_are_numbers(tmp_path, scores, reward):
    foreign.write_inspect(tmp_path, [RECORD])
    sample = foreign.inspect_sample("s", [RECORD]) | {"scores": scores}
    (tmp_path / "log.json").write_text(json.dumps({"eval": {}, "samples": [sample]}))
    turns, report = tk.import_turns(tmp_path / "log.json")
    assert turns["reward"].to_pylist() == [reward]
    expected = ["reward_unread"] * (reward is None)
    assert report["problem"].to_pylist() == expected
    if len(scores) == 2:
        turns, _ = tk.import_turns(tmp_path / "log.json", map="reward=/scores.b")
        assert turns["reward"].to_pylist() == [0.0]


# --- what commands say


def test_a_command_on_a_raw_log_says_how_to_import_it(tmp_path, capsys):
    path, output = tmp_path / "log.jsonl", str(tmp_path / "out.parquet")
    foreign.write_lines(path, [{**IDS, "trajectory_id": "r", "messages": []}])
    advice = f"trajkit import {path} --map session_id=trajectory_id -o log.parquet"
    for words in (
        ["linearize", str(path), "-o", output],
        ["simulate", str(path)],
        ["view", str(path), "-o", str(tmp_path / "page.html")],
        ["why", str(path)],
    ):
        assert main(words) in (1, 3)
        assert advice in capsys.readouterr().err
    foreign.write_lines(
        path, [{"session_id": "s", "prompt_ids": [-1], "output_ids": []}]
    )
    assert main(["simulate", str(path)]) == 1
    assert "trajkit import" not in capsys.readouterr().err
    # of two files, the advice is about that of the error
    other = tmp_path / "other.jsonl"
    foreign.write_lines(other, [{**IDS, "run_id": "r"}])
    for logs, n_advised in (((path, other), 0), ((other, path), 1)):
        assert main(["simulate", *map(str, logs)]) == 1
        said = capsys.readouterr().err
        assert said.startswith(f"trajkit: {logs[0]}, line 1: ")
        assert said.count("trajkit import") == n_advised


def test_the_hint_for_a_logprob_is_an_option(tmp_path, capsys):
    path = tmp_path / "log.jsonl"
    call = {**CALL, "logprobs": [float("nan"), -0.25]}
    foreign.write_lines(path, [call])
    assert main(["import", str(path), "-o", str(tmp_path / "t.parquet")]) == 1
    assert "--nonfinite-logprobs null" in capsys.readouterr().err


ROWS = {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]}


@pytest.mark.parametrize(
    "row",
    [
        {**ROWS, "loss_mask": [0] * 4},
        {**ROWS, "input_ids": [1, "x", 2]},
        {"input_ids": [1, 2]},
        {"ids": [1]},
        {"input_ids": [1, 2], "labels": [-100, 7]},
    ],
)
def test_an_error_in_a_row_names_file_and_line(tmp_path, capsys, row):
    rows, log = tmp_path / "rows.jsonl", tmp_path / "log.jsonl"
    rows.write_text(f"\n{json.dumps(row)}\n")
    foreign.write_lines(
        log, [{"session_id": "s", "prompt_ids": [1], "output_ids": [2]}]
    )
    assert main(["check", str(rows), str(log)]) in (1, 3)
    assert f"{rows}, line 2: " in capsys.readouterr().err


# --- what a stranger would ask next


@pytest.mark.parametrize("key", ["trajectory_id", "rollout_id", "run_id", "episode"])
def test_a_run_beside_a_session_stops_or_has_a_line(tmp_path, key):
    lines = [{**CALL, "prompt_token_ids": [k, 9], key: f"r{k}"} for k in range(3)]
    with pytest.raises(FormatError, match=f"--map session_id={key}.session_id"):
        imported(tmp_path, lines)
    _turns, report = imported(tmp_path, lines[:1])
    assert problems(report) == ["unread"]
    assert f"--map session_id={key} takes it" in report[0]["detail"]


def test_integers_and_texts_name_the_same_sessions(tmp_path):
    calls = [
        {**CALL, "session_id": name, "prompt_token_ids": ids}
        for name, ids in ((1, [1, 2]), ("1", [1, 2, 3, 4, 5]))
    ]
    own = [
        {"session_id": c["session_id"], "prompt_ids": [1], "output_ids": [2]}
        for c in calls
    ]
    for turns in (imported(tmp_path, calls)[0], tk.from_records(own)):
        assert turns["session_id"].to_pylist() == ["1", "1"]
        assert turns["turn_index"].to_pylist() == [0, 1]


def test_an_error_of_a_server_is_named(tmp_path):
    failed = {"session_id": "s", "request": {"messages": [USER]}}
    failed["response"] = {"error": {"message": "no memory"}}
    turns, report = imported(tmp_path, [line(session_id="s"), failed])
    assert turns.num_rows == 1
    assert problems(report) == ["unreadable"]
    assert "the response is an error" in report[0]["detail"]
    assert "no memory" in report[0]["detail"]


def test_a_mask_of_the_prompt_is_not_advised_as_that_of_the_output(tmp_path):
    _, report = imported(tmp_path, [{**CALL, "prompt_mask": [0, 0]}])
    assert problems(report) == ["unread"]
    assert "--map" not in report[0]["detail"]


def test_the_list_of_records_is_named(tmp_path):
    run = {"run": {"id": 1}, "calls": [IDS], "score": 0.5}
    foreign.write_lines(tmp_path / "log.jsonl", [run])
    with pytest.raises(FormatError, match="and each=calls if the records"):
        tk.import_turns(tmp_path / "log.jsonl")
    fields = "each=calls,session_id=/run.id,reward=/score"
    turns, _ = tk.import_turns(tmp_path / "log.jsonl", map=fields)
    assert turns["reward"].to_pylist() == [0.5]


def test_a_log_of_damaged_lines_says_why(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"a": \n[1]\n')
    with pytest.raises(InvalidTurnsError, match=r"no calls.*\(line 1: "):
        tk.import_turns(tmp_path / "log.jsonl")


# --- variants of rules


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
        ({**CALL, "solved": True}, "solved of 1 records"),
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
