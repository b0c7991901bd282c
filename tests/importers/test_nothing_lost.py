"""What a source has beside a call is taken, or has a line in the report."""

import gzip
import json
import shlex

import numpy as np
import pytest

import trajkit as tk
from tests import foreign
from tests.importers.test_importers import NODE, PAGE, RECORD, REPLY
from trajkit.cli import BAD_DATA, main
from trajkit.errors import ArgumentError, FormatError, InvalidTurnsError
from trajkit.importers.reader import rounded
from trajkit.turns import tools_key


def imported(tmp_path, lines, *args, **options):
    foreign.write_lines(tmp_path / "log.jsonl", lines)
    turns, report = tk.import_turns(tmp_path / "log.jsonl", *args, **options)
    return turns, report.to_pylist()


def problems(report):
    found = [row["problem"] for row in report]
    assert all(f"`{name}`" in PAGE for name in found)
    return found


def line(**changes):
    """A line of a log of requests and responses."""
    response = foreign.chat_response({**RECORD, **changes.pop("record", {})})
    return {"request": {"messages": []}, "response": response, **changes}


def lines(n, **changes):
    """Lines of different requests."""
    return [line(record={"request_id": f"r{k}"}, **changes) for k in range(n)]


# --- sessions


def test_the_mapping_names_the_run(tmp_path):
    lines = [line(uid=f"u{k % 2}", index=k, run={"id": k // 2}) for k in range(4)]
    for path, names in (
        ("uid", ["u0", "u1"]),
        ("run.id", ["0", "1"]),
        ("uid+index", ["u0/0", "u1/1", "u0/2", "u1/3"]),
        ("absent|uid", ["u0", "u1"]),
        ("@file", ["log"]),
        ("@file+index", ["log/0", "log/1", "log/2", "log/3"]),
    ):
        several = {"agent_id": "uid"} if path in ("run.id", "@file") else {}
        turns, _ = imported(tmp_path, lines, map={"session_id": path, **several})
        assert turns["session_id"].unique().to_pylist() == names


def test_a_log_that_names_nothing_is_one_session_of_its_file(tmp_path):
    turns, report = imported(tmp_path, [*lines(1, latency=3), line()])
    assert turns["session_id"].to_pylist() == ["log", "log"]
    assert problems(report) == ["no_session_id"]


def test_the_prompt_may_be_in_the_request_alone(tmp_path):
    body = {"token_ids": [5, 6], "finish_reason": "stop"}
    lines = [
        {"id": "r", "request": {key: [1, 2]}, "response": {"choices": [body]}}
        for key in ("prompt_token_ids", "prompt", "input_ids", "other")
    ]
    turns, report = imported(tmp_path, lines, map={"session_id": "id"})
    assert turns["prompt_ids"].to_pylist() == [[1, 2]] * 3
    assert turns["output_ids"].to_pylist() == [[5, 6]] * 3
    last = next(one for one in report if one["problem"] == "no_prompt_ids")
    assert "--map prompt_ids=PATH" in last["detail"]


def test_two_files_of_one_name_are_two_sessions(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        foreign.write_lines(tmp_path / name / "log.jsonl", [line()])
    turns, _ = tk.import_turns([tmp_path / "a" / "log.jsonl", tmp_path / "b"])
    assert turns["session_id"].to_pylist() == ["log", str(tmp_path / "b" / "log.jsonl")]


def runs_of(folder, *names, session="0"):
    """Logs of two calls each, of sessions that begin with other prompts."""
    for k, name in enumerate(names):
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True, parents=True)
        calls = [{**RECORD, "prompt_ids": ids} for ids in ([k, 9], [k, 9, 3, 4, 5])]
        foreign.write_lines(path, [line(session_id=session, record=r) for r in calls])


def test_a_session_that_starts_over_in_a_second_file_is_an_error(tmp_path, capsys):
    out, tmp_path = tmp_path / "out.parquet", tmp_path / "log"
    runs_of(tmp_path, "a/log", "b/log", "c")
    a, b = tmp_path / "a", tmp_path / "b"
    words = (
        r"session '0' is in .*a/log\.jsonl and in .*b/log\.jsonl.*--session-prefix file"
    )
    for source in (tmp_path, [a, b], f"{tmp_path}/*/log.jsonl", [a / "log.jsonl", b]):
        with pytest.raises(InvalidTurnsError, match=words):
            tk.import_turns(source)
    assert main(["import", str(tmp_path), "-o", str(out)]) == BAD_DATA
    assert "--session-prefix file" in capsys.readouterr().err
    assert not out.exists()
    names = ["a/log/0", "b/log/0", "c/0"]
    argv = ["import", str(tmp_path), "-o", str(out), "--session-prefix", "file"]
    assert main(argv) == 0
    assert tk.read_turns(out)["session_id"].unique().to_pylist() == names
    for options, expected in (
        ({"session_prefix": "file"}, names),
        ({"session_prefix": "folder"}, ["a/0", "b/0", f"{tmp_path.name}/0"]),
        ({"session_prefix": "no"}, ["0"]),
        (
            {"map": "session_id=@folder+@file+session_id"},
            ["a/log/0", "b/log/0", f"{tmp_path.name}/c/0"],
        ),
    ):
        turns, report = tk.import_turns(tmp_path, **options)
        assert turns["session_id"].unique().to_pylist() == expected
        assert (turns.num_rows, report.num_rows) == (6, 0)


def test_a_copy_of_a_log_starts_over(tmp_path):
    runs_of(tmp_path, "a")
    text = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text, mtime=0))
    # with one prefix for both, their sessions are one, too
    for options in ({}, {"session_prefix": "file"}, {"session_prefix": "folder"}):
        with pytest.raises(InvalidTurnsError, match=r"a\.jsonl and in .*a\.jsonl\.gz"):
            tk.import_turns(tmp_path, **options)
    with pytest.raises(ArgumentError, match="is given twice"):
        tk.import_turns([tmp_path / "a.jsonl"] * 2)
    (tmp_path / "a.jsonl.gz").unlink()
    with pytest.raises(ArgumentError, match="is given twice"):
        tk.import_turns([tmp_path, tmp_path / "a.jsonl"])


def test_a_session_may_go_on_in_a_second_file(tmp_path):
    """A retry of a later call goes on, too; that of the first one may be another run."""
    prompts = [[1, 2], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]
    calls = [
        line(session_id="s", record={"request_id": str(k), "prompt_ids": prompt})
        for k, prompt in enumerate(prompts)
    ]
    foreign.write_lines(tmp_path / "a.jsonl", calls[:2])
    foreign.write_lines(tmp_path / "b.jsonl", calls[2:])
    turns, report = tk.import_turns(tmp_path)
    assert turns["prompt_ids"].to_pylist() == prompts
    assert report.num_rows == 0
    foreign.write_lines(tmp_path / "b.jsonl", calls[:1])
    with pytest.raises(InvalidTurnsError, match="its calls start over there"):
        tk.import_turns(tmp_path)


def test_calls_with_an_index_may_be_in_any_file(tmp_path):
    for k, name in enumerate("ab"):
        calls = [line(run=0, turn=2 * k + i) for i in range(2)]
        foreign.write_lines(tmp_path / f"{name}.jsonl", calls)
    turns, report = tk.import_turns(tmp_path, map="session_id=run,turn_index=turn")
    assert turns["turn_index"].to_pylist() == [0, 1, 2, 3]
    assert report.num_rows == 0


def test_files_of_one_call_are_of_one_run_in_their_folder(tmp_path):
    foreign.write_polar(tmp_path / "one", [RECORD] * 3)
    turns, report = tk.import_turns(tmp_path)
    assert turns["turn_index"].to_pylist() == [0, 1, 2]
    assert report.num_rows == 0
    foreign.write_polar(tmp_path / "two", [RECORD])
    with pytest.raises(InvalidTurnsError, match=r"one/.*two/.*'folder'"):
        tk.import_turns(tmp_path)
    turns, _ = tk.import_turns(tmp_path, session_prefix="folder")
    assert len(turns["session_id"].unique()) == 2


def test_what_several_runs_may_be_about_is_not_advised_as_their_name(tmp_path):
    _, report = imported(tmp_path, [line(uid="u", trajectory_id="t")])
    assert "--map session_id=trajectory_id (" in report[0]["detail"]
    _, report = imported(tmp_path, [line(uid="u", task_id="t")])
    assert "--map session_id=KEY (" in report[0]["detail"]


@pytest.mark.parametrize("session", [17, -1, 2**70])
def test_a_number_names_a_session(tmp_path, session):
    turns, report = imported(tmp_path, [line(session_id=session, group_id=5)])
    assert turns["session_id"].to_pylist() == [str(session)]
    assert turns["group_id"].to_pylist() == ["5"]
    assert report == []
    record = {"session_id": session, "prompt_ids": [1], "output_ids": [2]}
    foreign.write_lines(tmp_path / "turns.jsonl", [record])
    assert tk.read_turns(tmp_path / "turns.jsonl")["session_id"][0].as_py() == str(
        session
    )


@pytest.mark.parametrize("session", [True, 1.5, ["s"], {"a": 1}])
def test_a_session_of_another_type_is_refused(tmp_path, session):
    turns, report = imported(tmp_path, [line(session_id=session)])
    assert (turns.num_rows, problems(report)) == (0, ["unreadable"])
    assert repr(session) in report[0]["detail"]


def test_a_record_without_the_key_of_the_mapping_is_left_out(tmp_path):
    lines = [line(run="a"), line(), line(run=None)]
    turns, report = imported(tmp_path, lines, map="session_id=run")
    assert turns["session_id"].to_pylist() == ["a"]
    assert problems(report) == ["no_session_id"] * 2


# --- rewards and what else is beside a call


@pytest.mark.parametrize(
    ("reward", "detail"),
    [
        ({"accuracy": 1.0, "length": 0.2}, "--map reward=reward.accuracy"),
        (True, "reward is True: expected a finite number"),
        ("1.0", "reward is '1.0'"),
        (float("nan"), "reward is nan"),
        (10**400, "reward is 1000"),
        ([1.0], "reward is [1.0]"),
    ],
)
def test_a_reward_that_is_no_number_has_a_line(tmp_path, reward, detail):
    turns, report = imported(tmp_path, [line(session_id="s", reward=reward)])
    assert turns["reward"].to_pylist() == [None]
    assert problems(report) == ["reward_unread"]
    assert detail in report[0]["detail"]
    if isinstance(reward, dict):
        line_ = [line(session_id="s", reward=reward)]
        turns, _ = imported(tmp_path, line_, map="reward=reward.accuracy")
        assert turns["reward"].to_pylist() == [1.0]


def test_a_reward_that_changes_within_a_session_is_noted(tmp_path):
    calls = lines(3, session_id="s")
    for call, reward in zip(calls, (0.0, 1.0, 0.0), strict=True):
        call["reward"] = reward
    _, report = imported(tmp_path, calls)
    assert problems(report) == ["reward_varies"]


@pytest.mark.parametrize(
    ("key", "value", "advice"),
    [
        *(("score", 0.5, "reward=score"), ("score", "good", None)),
        ("scores", {"x": "t", "a b": 1}, "'reward=scores.a b'"),
        ("metadata", {"reward_model_score": 2}, "reward=metadata.reward_model_score"),
        *(("success", True, None), ("parent_id", "c1", None), ("loss", 1, None)),
        *(("uid", "u", "group_id=uid"), ("agent_name", "a", "agent_id=agent_name")),
        ("response_mask", [1, 1], "output_mask=response_mask"),
        ("is_trainable", 1, "trainable=is_trainable"),
        ("policy_version", 3, "weight_version=policy_version"),
        *(("advantage", -1.5, None), ("routed_experts", [[1]], None)),
    ],
)
def test_a_fact_that_no_field_reads_has_one_line(tmp_path, key, value, advice):
    calls = lines(3, session_id="s", **{key: value})
    _, report = imported(tmp_path, calls)
    (told,) = report
    assert told["problem"] == "unread"
    assert key in told["detail"]
    assert "of 3 records was not read" in told["detail"]
    # only a field that exists is advised, and takes it
    assert ("--map" in told["detail"]) == (advice is not None)
    if advice:
        assert f"--map {advice} takes it" in told["detail"]
        words = shlex.split(told["detail"].partition("--map ")[2])
        _, report = imported(tmp_path, calls, map=words[0])
        assert "unread" not in problems(report) or words[0].startswith("weight_version")


# --- numbers of tokens that the source states


def usage_of(prompt, output):
    return {"prompt_tokens": prompt, "completion_tokens": output}


def contradicting():
    """Logs of several formats whose second number of tokens is wrong."""
    chat = foreign.chat_response(RECORD) | {"usage": usage_of(2, 3)}
    prompt = foreign.chat_response(RECORD) | {"usage": usage_of(3, 2)}
    named = {"input_tokens": 2, "output_tokens": 3}
    responses = foreign.chat_response(RECORD) | {"usage": named}
    native = foreign.native_response(RECORD)
    native["meta_info"] |= usage_of(2, 1)
    within = foreign.sglang_chat_response(RECORD)
    within["choices"][0]["meta_info"] |= usage_of(9, 2)
    text = foreign.chat_response(RECORD) | {"usage": usage_of(2, "2")}
    for name, response in {
        "chat": chat,
        "prompt": prompt,
        "responses": responses,
        "text": text,
        "sglang chat": within,
    }.items():
        value = {"session_id": "s", "request": {"messages": []}, "response": response}
        yield name, "openai", [value]
    asked = {"input_ids": [1, 2]}
    value = {"session_id": "s", "request": asked, "response": native}
    yield "sglang", "openai", [value]
    yield "plain", "records", [foreign.plain_record(RECORD) | {"usage": usage_of(2, 3)}]
    yield "polar", "polar", [foreign.polar_completion(RECORD, 0) | {"response": chat}]


@pytest.mark.parametrize(
    ("format", "lines"),
    [pytest.param(*rest, id=name) for name, *rest in contradicting()],
)
def test_usage_that_contradicts_the_ids_untrains(tmp_path, format, lines):
    turns, report = imported(tmp_path, lines, format)
    assert set(problems(report)) == {"usage_contradicts"}
    assert set(turns["trainable"].to_pylist()) == {False}
    rows = tk.linearize(turns)
    assert not any(any(mask) for mask in rows["loss_mask"].to_pylist())
    turns, report = imported(tmp_path, lines, format, contradicted="train")
    assert set(problems(report)) == {"usage_contradicts"}
    assert turns["trainable"].null_count == len(turns)


def test_usage_of_a_trajectory_and_of_a_trace(tmp_path):
    foreign.write_atif(tmp_path, [RECORD])
    path = tmp_path / "0" / "trajectory.json"
    value = json.loads(path.read_text())
    value["steps"][1]["metrics"]["completion_tokens"] = 7
    path.write_text(json.dumps(value))
    _, report = tk.import_turns(path)
    assert report["problem"].to_pylist() == ["usage_contradicts"]
    assert "metrics.completion_tokens is 7" in report["detail"][0].as_py()
    trace = {"id": "s", "task": {}, "nodes": [NODE, REPLY]}
    trace["calls"] = [{"node": 1, "usage": usage_of(2, 2)}]
    turns, report = imported(tmp_path, [trace])
    assert problems(report) == ["usage_contradicts"]
    assert turns["trainable"].to_pylist() == [False]


def test_of_several_choices_nothing_says_how_often_the_prompt_counts(tmp_path):
    value = line(session_id="s")
    value["response"] |= {"usage": usage_of(2, 6)}
    value["response"]["choices"] *= 3
    assert imported(tmp_path, [value])[1] == []


# --- logprobs


@pytest.mark.parametrize(
    ("values", "decimals"),
    [
        ([-3.1416, -0.0, -12.5001], 4),
        ([-0.1], 4),
        ([-8.02546, -7.31131, -1.20007], 5),
        ([-0.012346] * 8, 6),
        ([None, -0.3], 4),
        # as engines compute them
        ([-8.025457382202148, -0.5], 0),
        ([-0.5, -0.25, -3.0], 0),
        ([float(np.float32(-1.7)), -2.0], 0),
        ([-8.025457, -1.2000551], 0),
        ([], 0),
        ([float("nan"), -9999.0], 0),
    ],
)
def test_rounded_logprobs(values, decimals):
    assert rounded(np.array(values, np.float64)) == decimals


# --- what the source recorded


def test_recorded_parents_are_columns(tmp_path):
    entries = [foreign.nemo_entry(RECORD, k) for k in range(3)]
    recorded = [("root", None), ("resolved", "c0"), (None, "c1")]
    for entry, (resolution, parent) in zip(entries, recorded, strict=True):
        entry |= {"parent_call_id": parent, "parent_resolution": resolution}
    foreign.write_lines(tmp_path / "r.tokens.jsonl", entries)
    turns, report = tk.import_turns(tmp_path)
    assert not report.num_rows
    names = ("parent_resolution", "parent_request")
    assert [tuple(one[n] for n in names) for one in turns.to_pylist()] == recorded


def test_tools_of_requests_have_a_key(tmp_path):
    tool = {"type": "function", "function": {"name": "f", "strict": None}}
    deep = json.loads("[" * 900 + "]" * 900)
    offered = [[tool], [], None, "x", deep]
    lines = [
        line(session_id="s", request={"messages": [], "tools": one}) for one in offered
    ]
    turns, _ = imported(tmp_path, lines)
    keys = [tools_key([tool]), tools_key([]), None, None]
    assert turns["tools_key"].to_pylist()[:4] == keys
    nodes = [dict(NODE), REPLY]
    for changes, key in (({}, tools_key([])), ({"tools": [tool]}, keys[0])):
        nodes[0] |= changes
        trace = {"id": "s", "task": {}, "tools": [], "nodes": nodes}
        (tmp_path / "log.jsonl").unlink()
        turns, _ = imported(tmp_path, [trace])
        assert turns["tools_key"].to_pylist() == [key]


def test_prompts_of_a_capture_may_continue_a_parent(tmp_path):
    first = foreign.nemo_entry(RECORD, 0)
    second = foreign.nemo_entry({**RECORD, "prompt_ids": [7]}, 1)
    second |= {"prompt_is_delta": True, "parent_call_id": "c0", "schema_version": 5}
    lost = {**second, "model_call_id": "c2", "parent_call_id": "c9"}
    foreign.write_lines(tmp_path / "r.tokens.jsonl", [first, second, lost])
    turns, report = tk.import_turns(tmp_path)
    assert turns["prompt_ids"].to_pylist() == [[1, 2], [1, 2, 3, 4, 7]]
    assert report["problem"].to_pylist() == ["no_parent"]


def test_what_a_trainer_wrote_into_a_trace_has_a_line(tmp_path):
    nodes = [NODE, {**REPLY, "advantages": [1.0], "entropies": [0.5]}]
    trace = {"id": "s", "task": {}, "nodes": nodes, "errors": [{"type": "E"}]}
    _, report = imported(tmp_path, [trace])
    assert [row["detail"].split()[0] for row in report] == [
        "/errors",
        "advantages",
        "entropies",
    ]


def test_a_mask_makes_spans_and_is_checked(tmp_path):
    record = {
        "session_id": "s",
        "prompt_ids": [1],
        "response_ids": [2, 3, 4, 5],
        "response_mask": [1, 0, 0, 1],
        "response_logprobs": [-0.5, 0.0, 0.0, -0.25],
    }
    full = {**record, "response_mask": [0, 1, 1, 0, 0]}
    odd = [
        {**record, "response_mask": mask} for mask in ([1], [2, 0, 0, 0], "x", [0] * 4)
    ]
    turns, report = imported(tmp_path, [record, full, *odd])
    assert turns["prompt_ids"].to_pylist() == [[1], [1, 2, 3, 4], [1]]
    assert turns["output_ids"].to_pylist() == [[2], [5], [2, 3]]
    assert turns["output_logprobs"].to_pylist() == [[-0.5], [-0.25], [-0.5, 0.0]]
    assert problems(report) == ["unreadable"] * 3 + ["no_output_ids"]


def test_versions_of_a_span_are_those_of_its_tokens(tmp_path):
    record = {"session_id": "s", "prompt_ids": [1], "response_ids": [2, 3, 4, 5]}
    record |= {"response_mask": [1, 0, 1, 1], "v": [7, 7, 8, 9]}
    turns, _ = imported(tmp_path, [record], map="weight_version=v")
    pieces = [
        [(one["version"], one["start"], one["stop"]) for one in listed]
        for listed in turns["weight_versions"].to_pylist()
    ]
    assert pieces == [[("7", 0, 1)], [("8", 0, 1), ("9", 1, 2)]]
    record["v"] = [{"version": "7", "start": None, "end": 2}]
    _, report = imported(tmp_path, [record], map="weight_versions=v")
    assert problems(report) == ["unreadable"]


# --- arguments


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"tokenizer": "model"}, "tokenizer is of type str"),
        ({"tokenizer": 5}, "tokenizer is of type int"),
        ({"map": 5}, "map is a int"),
        ({"map": "session_id"}, "neither"),
        ({"map": "sesion_id=a"}, "did you mean session_id"),
        ({"map": {"session_id": ""}}, "path ''"),
        ({"map": {"session_id": 4}}, "path 4"),
        ({"map": "reward=a,reward=b"}, "given twice"),
        ({"map": "logprobs=a,output_logprobs=b"}, "given twice"),
        ({"map": {}}, "no fields"),
        ({"contradicted": "ignore"}, "expected one of 'untrain', 'train'"),
        ({"nonfinite_logprobs": "zero"}, "expected one of"),
        ({"format": "yaml"}, "expected one of"),
    ],
)
def test_a_wrong_argument_is_one_error(tmp_path, options, word):
    foreign.write_lines(tmp_path / "log.jsonl", [line(session_id="s")])
    with pytest.raises((ArgumentError, FormatError), match=word):
        tk.import_turns(tmp_path / "log.jsonl", **options)


@pytest.mark.parametrize("source", [None, 5, b"log.jsonl", {"a": 1}, [3]])
def test_a_source_is_paths(source):
    with pytest.raises(ArgumentError, match=r"expected .*path"):
        tk.import_turns(source)
    with pytest.raises(ArgumentError, match=r"expected .*path"):
        tk.importers.import_file(source, "turns.parquet")


def test_a_path_that_no_record_has_is_an_error(tmp_path):
    with pytest.raises(FormatError, match=r"no record has scor .map: reward=scor."):
        imported(tmp_path, [line(session_id="s", score=1)], map="reward=scor")


# --- unknown formats, and nothing


@pytest.mark.parametrize(
    "content", [b"", b"\n\n", b"[]", b"{}", b"7", b"null", gzip.compress(b"", mtime=0)]
)
def test_a_file_of_nothing_is_an_error_or_a_line(tmp_path, content):
    for name in ("x.json", "x.jsonl"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InvalidTurnsError, match=rf"{name}: no calls"):
            tk.import_turns(tmp_path / name)
        turns, report = tk.import_turns(tmp_path / name, "openai")
        assert turns.num_rows == 0
        assert report.num_rows == 1
