"""What a stranger is told: what is wrong, and a command that works when it is pasted."""

import json
import shlex

import pytest

import trajkit as tk
from tests.importers import foreign
from tests.importers.logs import CALL, IDS, RECORD, imported, line, problems
from trajkit.cli import BAD_DATA, BAD_FILE, main
from trajkit.errors import ArgumentError, FormatError

OWN = {"session_id": "a", "prompt_ids": [1, 2], "output_ids": [3, 9, 4]}


def written(folder, *lines):
    path = folder / "log.jsonl"
    foreign.write_lines(path, lines)
    return path


# --- arguments


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"tokenizer": "model"}, "tokenizer is of type str"),
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
        ({"format": "yaml"}, "expected one of 'auto', 'openai'"),
    ],
)
def test_a_wrong_argument_is_one_error(tmp_path, options, word):
    path = written(tmp_path, line(session_id="s"))
    with pytest.raises((ArgumentError, FormatError), match=word):
        tk.import_turns(path, **options)


@pytest.mark.parametrize("source", [None, 5, b"log.jsonl", {"a": 1}, [3]])
def test_a_source_is_paths(source):
    with pytest.raises(ArgumentError, match=r"expected .*path"):
        tk.import_turns(source)
    with pytest.raises(ArgumentError, match=r"expected .*path"):
        tk.importers.import_file(source, "turns.parquet")


# --- what commands say


def test_a_mask_in_our_own_spelling_needs_an_import(tmp_path, capsys):
    path = str(written(tmp_path, {**OWN, "loss_mask": [1, 0, 1]}))
    out = str(tmp_path / "t.parquet")
    assert main(["linearize", path, "-o", out]) == BAD_DATA
    assert "trajkit import FILE" in capsys.readouterr().err
    assert main(["import", path, "-o", out]) == 0


def test_turns_need_no_import(tmp_path, capsys):
    path = written(tmp_path, OWN)
    assert main(["import", str(path), "-o", str(tmp_path / "t.parquet")]) == BAD_FILE
    said = capsys.readouterr().err
    for command in ("linearize", "simulate", "check"):
        assert command in said


def test_a_command_on_a_raw_log_says_how_to_import_it(tmp_path, capsys):
    path = written(tmp_path, {**IDS, "trajectory_id": "r", "messages": []})
    output = str(tmp_path / "out.parquet")
    advice = f"trajkit import {path} --map session_id=trajectory_id -o log.parquet"
    for words in (["linearize", str(path), "-o", output], ["why", str(path)]):
        assert main(words) in (BAD_DATA, BAD_FILE)
        assert advice in capsys.readouterr().err
    written(tmp_path, {"session_id": "s", "prompt_ids": [-1], "output_ids": []})
    assert main(["simulate", str(path)]) == BAD_DATA
    assert "trajkit import" not in capsys.readouterr().err
    # of two files, the advice is about that of the error
    other = tmp_path / "other.jsonl"
    foreign.write_lines(other, [{**IDS, "run_id": "r"}])
    for logs, n_advised in (((path, other), 0), ((other, path), 1)):
        assert main(["simulate", *map(str, logs)]) == BAD_DATA
        said = capsys.readouterr().err
        assert said.startswith(f"trajkit: {logs[0]}, line 1: ")
        assert said.count("trajkit import") == n_advised


def test_the_hint_for_a_logprob_is_an_option(tmp_path, capsys):
    path = written(tmp_path, {**CALL, "logprobs": [float("nan"), -0.25]})
    argv = ["import", str(path), "-o", str(tmp_path / "t.parquet")]
    assert main(argv) == BAD_DATA
    assert "--nonfinite-logprobs null" in capsys.readouterr().err


# --- records that are nearly known


@pytest.mark.parametrize(
    ("record", "lacks"),
    [
        ({"session_id": 1, "prompt": "a"}, "records .*lacks prompt_ids .*output_ids"),
        ({"prompt_token_ids": [1]}, r"records .*lacks output_ids \(output_token_ids"),
        ({"schema_version": 1, "steps": []}, "atif .*has values of other kinds"),
        ({"nodes": []}, "verifiers .*lacks task"),
        ({"request": {}, "reply": {}}, "openai .*lacks response"),
    ],
)
def test_the_closest_format_is_named(tmp_path, record, lacks):
    with pytest.raises(FormatError, match=f"most like {lacks}") as raised:
        imported(tmp_path, [record])
    text = str(raised.value)
    assert f"has the keys {', '.join(record)}" in text
    assert "--map session_id=PATH,prompt_ids=PATH" in text
    assert "return_token_ids" in text


@pytest.mark.parametrize(
    ("result", "lacks"),
    [
        ({"trajectory": [{"tokens": {"prompt_ids": [1]}}]}, "the mapping"),
        ({}, "which they lack"),
    ],
)
def test_results_of_verifiers_are_known(tmp_path, result, lacks):
    facts = {"example_id": 1, "prompt": [], "completion": [], "task": "t", "reward": 1}
    match = f"results of verifiers: docs/import.md.*{lacks}"
    with pytest.raises(FormatError, match=match):
        imported(tmp_path, [{**facts, **result}])


@pytest.mark.parametrize("name", ["verl", "openhands", "sweagent", "chat"])
def test_a_format_of_text_says_how_ids_get_in(tmp_path, name):
    writers = {
        "verl": foreign.write_verl,
        "openhands": foreign.write_openhands,
        "sweagent": lambda folder: foreign.write_sweagent(folder, [{"role": "user"}]),
        "chat": lambda folder: foreign.write_chats(folder, [[{"role": "user"}]]),
    }
    writers[name](tmp_path)
    how = {"verl": "AgentLoopOutput", "openhands": "log_completions"}
    words = f"without token ids.*{how.get(name, '--tokenizer')}"
    with pytest.raises(FormatError, match=words):
        tk.import_turns(tmp_path)


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
        ({"match": {"value": 0.75}}, 0.75),
        ({"match": {"value": "B"}}, None),
        ({"match": {"value": "nan"}}, None),
        # a part of it is advised
        ({"m": {"value": {"a": 1}}}, "/scores.m.value.a"),
        ({"my scorer/a.b": {"value": {"a": 1}}}, "/scores.my scorer/a.b.value.a"),
        ({"x": {"value": "C"}, "y": {"value": 0.5}}, "/scores.x"),
        ({"x.y": {"answer": "C", "value": {"c d": True}}}, "/scores.x.y.value.c d"),
    ],
)
def test_scores_of_inspect_are_numbers_or_have_parts(tmp_path, scores, reward):
    sample = foreign.inspect_sample("s", [RECORD]) | {"scores": scores}
    path = tmp_path / "log.json"
    path.write_text(json.dumps({"eval": {}, "samples": [sample]}))
    turns, report = tk.import_turns(path)
    advised = isinstance(reward, str)
    assert turns["reward"].to_pylist() == [None if advised else reward]
    unread = advised or reward is None
    assert problems(report.to_pylist()) == ["reward_unread"] * unread
    if advised:
        option = f"--map {shlex.quote(f'reward={reward}')} takes a part of it"
        assert option in report["detail"][0].as_py()
        turns, _ = tk.import_turns(path, map=f"reward={reward}")
        assert turns["reward"].to_pylist() == [1.0]
