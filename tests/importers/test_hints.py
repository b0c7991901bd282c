"""What a stranger is told: what is wrong, and a command that works when it is pasted."""

import json
import shlex

import pytest

import trajkit as tk
from tests import foreign
from trajkit.cli import main
from trajkit.errors import FormatError, InvalidTurnsError, TrajkitError

LOG = {"session_id": "a", "prompt_token_ids": [1, 2], "token_ids": [3, 9, 4]}
OWN = {"session_id": "a", "prompt_ids": [1, 2], "output_ids": [3, 9, 4]}


def written(tmp_path, *lines):
    return foreign.write_lines(tmp_path / "log.jsonl", lines) or tmp_path / "log.jsonl"


# --- records in our own spelling


@pytest.mark.parametrize(
    "extra",
    [
        {"loss_mask": [1, 0, 1]},
        {"metadata_mask": [1, 0, 1]},
        {"usage": {"completion_tokens": 9}},
        {"completion_tokens": 9},
        {"n_prompt_tokens": 3},
    ],
)
def test_a_mask_or_a_count_in_our_own_spelling_is_not_passed_over(tmp_path, extra):
    (key,) = extra
    path = written(tmp_path, {**OWN, **extra})
    out = tmp_path / "rows.jsonl"
    for read in (
        lambda: tk.from_records([{**OWN, **extra}]),
        lambda: tk.read_turns(path),
    ):
        with pytest.raises(InvalidTurnsError, match=rf"'{key}'.*trajkit import FILE"):
            read()
    assert main(["linearize", str(path), "-o", str(out)]) == 1
    assert main(["import", str(path), "-o", str(tmp_path / "t.parquet")]) == 0


def test_counts_that_fit_and_other_keys_are_extra_columns():
    usage = {"usage": {"prompt_tokens": 2, "completion_tokens": 3}}
    extra = {**usage, "completion_tokens": 3, "step": 4, "loss_mask": None}
    turns = tk.from_records([{**OWN, **extra}])
    assert {"usage", "completion_tokens", "step"} <= {*turns.column_names}


def test_each_value_of_a_key_counts():
    fine = {**OWN, "prompt_ids": [7], "status": "ok", "completion_tokens": 3}
    for extra in ({"status": "failed"}, {"completion_tokens": 9}):
        (key,) = extra
        with pytest.raises(InvalidTurnsError, match=f"record 1 has the key '{key}'"):
            tk.from_records([fine, {**fine, **extra}])


def test_turns_need_no_import(tmp_path, capsys):
    path = written(tmp_path, OWN)
    assert main(["import", str(path), "-o", str(tmp_path / "t.parquet")]) == 3
    said = capsys.readouterr().err
    for command in ("linearize", "simulate", "check"):
        assert command in said


# --- keys that no field reads


def test_each_key_that_no_field_reads_has_a_line(tmp_path, capsys):
    keys = {f"score_{k}": k for k in range(14)}
    path = written(tmp_path, {**LOG, "labels": 1, "masks": 2, "advantages": 3})
    assert main(["import", str(path), "-o", str(tmp_path / "t.parquet")]) == 0
    said = capsys.readouterr().out
    assert all(
        f"{one} of 1 records" in said for one in ("labels", "masks", "advantages")
    )
    path = written(tmp_path, {**LOG, **keys})
    assert main(["import", str(path), "-o", str(tmp_path / "t.parquet")]) == 0
    said = capsys.readouterr().out
    assert said.count(" was not read") == 10
    assert "4 more keys" in said
    assert "--report" in said


def test_a_text_of_an_error_is_no_finish_reason(tmp_path):
    path = written(tmp_path, {**LOG, "error": "the server closed the connection"})
    turns, report = tk.import_turns(path, map="finish_reason=error")
    assert turns["finish_reason"].to_pylist() == [None]
    assert "error (expected a word" in "".join(report["detail"].to_pylist())


# --- rewards with parts, and mapped paths


@pytest.mark.parametrize(
    ("scores", "path"),
    [
        ({"m": {"value": {"a": 1}}}, "/scores.m.value.a"),
        ({"my scorer/a.b": {"value": {"a": 1}}}, "/scores.my scorer/a.b.value.a"),
        ({"x": {"value": "C"}, "y": {"value": 0.5}}, "/scores.x"),
        ({"x.y": {"answer": "C", "value": {"c d": True}}}, "/scores.x.y.value.c d"),
    ],
)
def test_the_advised_part_of_a_score_is_one(tmp_path, scores, path):
    event = {"event": "model", "output": {"choices": [{"token_ids": [3]}]}}
    event["output"]["prompt_token_ids"] = [1]
    sample = {"id": 1, "epoch": 1, "uuid": "u", "events": [event], "scores": scores}
    (tmp_path / "log.json").write_text(json.dumps({"eval": {}, "samples": [sample]}))
    _, report = tk.import_turns(tmp_path / "log.json")
    advice = f"--map {shlex.quote(f'reward={path}')} takes a part of it"
    (line,) = [one for one in report.to_pylist() if one["problem"] == "reward_unread"]
    assert advice in line["detail"]
    turns, _ = tk.import_turns(tmp_path / "log.json", map=f"reward={path}")
    assert turns["reward"].to_pylist() == [1.0]


def test_a_mapped_path_may_be_missing_in_some_records(tmp_path):
    for name, verdict in (("a", {"rewards": {"a": 1.0, "b": 0.5}}), ("b", None)):
        details = {"prompt_token_ids": [[1]], "completion_token_ids": [[3]]}
        trial = {
            "trial_name": name,
            "verifier_result": verdict,
            "agent_result": {"rollout_details": [details]},
        }
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps(trial))
    turns, report = tk.import_turns(tmp_path, map="reward=/verifier_result.rewards.a")
    assert turns["reward"].to_pylist() == [1.0, None]
    assert [
        one["detail"] for one in report.to_pylist() if one["problem"] == "map_missing"
    ] == ["records without /verifier_result.rewards.a: their reward is null"]
    with pytest.raises(
        FormatError, match=r"no record has /verifier_result\.rewards\.c"
    ):
        tk.import_turns(tmp_path, map="reward=/verifier_result.rewards.c")


# --- what a file is, or lacks


@pytest.mark.parametrize(
    ("line", "options", "words"),
    [
        (
            {"prompt_token_ids": [[1, 2], [1, 3]], "response_ids": [[1], [2]]},
            {},
            "this is a batch: pass one record per call",
        ),
        ({**LOG, "prompt_token_ids": []}, {}, "its prompt_ids are empty"),
        (
            {"trajectories": [{"steps": [LOG]}]},
            {"map": "each=trajectories.steps"},
            "each=trajectories.*.steps",
        ),
    ],
)
def test_what_a_left_out_record_is(tmp_path, line, options, words):
    turns, report = tk.import_turns(written(tmp_path, line), **options)
    assert turns.num_rows == 0
    assert words in report["detail"].to_pylist()[-1]
    assert not any(report["kept"].to_pylist())


def test_steps_of_trajectories_are_read(tmp_path):
    path = written(tmp_path, {"trajectories": [{"steps": [LOG, LOG]}]})
    turns, _ = tk.import_turns(path, map="each=trajectories.*.steps")
    assert turns.num_rows == 2


def test_a_batch_is_named_by_from_records():
    with pytest.raises(InvalidTurnsError, match="a batch: pass one record per call"):
        tk.from_records([{**OWN, "prompt_ids": [[1, 2], [1, 3]]}])


def test_what_is_left_out_is_not_counted_as_kept(tmp_path):
    path = written(tmp_path, {**LOG, "score": 1, "token_ids": [3, -9]}, LOG)
    _, report = tk.import_turns(path)
    kept = [(one["place"], one["kept"]) for one in report.to_pylist()]
    assert {("line 1", False), ("line 2", True)} == {*kept}


@pytest.mark.parametrize(
    ("result", "lacks"),
    [
        ({"trajectory": [{"tokens": {"prompt_ids": [1]}}]}, "the mapping"),
        ({}, "which they lack"),
    ],
)
def test_results_of_verifiers_are_known(tmp_path, result, lacks):
    facts = {
        "example_id": 1,
        "prompt": [],
        "completion": [],
        "task": "t",
        "reward": 1.0,
    }
    with pytest.raises(FormatError, match=f"results of verifiers.*{lacks}") as raised:
        tk.import_turns(written(tmp_path, {**facts, **result}))
    assert "docs/import.md" in str(raised.value)


@pytest.mark.parametrize("order", ["utf-16-le", "utf-16-be"])
def test_a_file_that_is_not_utf_8_is_named_as_that(tmp_path, order):
    path = tmp_path / "log.jsonl"
    path.write_bytes(f"\ufeff{json.dumps(LOG)}\n".encode(order))
    for read in (tk.import_turns, tk.read_turns):
        with pytest.raises(TrajkitError, match="not UTF-8 but UTF-16"):
            read(path)
    written(tmp_path, LOG).rename(tmp_path / "good.jsonl")
    path.write_bytes(f"\ufeff{json.dumps(LOG)}\n".encode(order))
    _, report = tk.import_turns(tmp_path)
    (other,) = [one for one in report.to_pylist() if one["problem"] == "other_file"]
    assert "not UTF-8 but UTF-16" in other["detail"]


# --- rows to check


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"input_ids": [[1, 2]], "loss_mask": [[0, 1]]}, "row 0: input_ids has lists"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0.5]}, "row 0: loss_mask has 0.5"),
    ],
)
def test_odd_rows_are_refused_with_words(tmp_path, capsys, row, words):
    log = written(tmp_path, OWN)
    foreign.write_lines(tmp_path / "rows.jsonl", [row])
    assert main(["check", str(tmp_path / "rows.jsonl"), str(log)]) == 1
    assert words in capsys.readouterr().err.replace(", line 1", "")
