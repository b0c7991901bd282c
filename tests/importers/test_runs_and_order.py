"""Runs of one session, repeated calls, the order of calls, and skipped files."""

import json

import pytest

import trajkit as tk
from tests import foreign
from tests.importers.test_importers import NODE, RECORD, REPLY
from trajkit.cli import main
from trajkit.errors import FormatError
from trajkit.importers import reader

CALL = {"trajectory_id": 0, "prompt_token_ids": [1, 2], "token_ids": [3]}
MAP = "session_id=trajectory_id"


def imported(tmp_path, lines, given=MAP):
    foreign.write_lines(tmp_path / "log.jsonl", lines)
    turns, report = tk.import_turns(tmp_path / "log.jsonl", map=given)
    return turns, report.to_pylist()


@pytest.mark.parametrize("key", ["worker", "epoch", "iteration"])
def test_a_key_that_changes_where_prompts_start_over_stops_the_import(tmp_path, key):
    lines = [{**CALL, key: 0}, {**CALL, key: 1, "prompt_token_ids": [7, 8]}]
    option = rf"line 2.*--map session_id={key}\+trajectory_id"
    with pytest.raises(FormatError, match=option):
        imported(tmp_path, lines)
    turns, _ = imported(tmp_path, lines, f"session_id={key}+trajectory_id")
    assert turns["session_id"].to_pylist() == ["0/0", "1/0"]


def test_a_key_that_changes_within_a_conversation_stops_nothing(tmp_path):
    longer = {"prompt_token_ids": [1, 2, 3, 4], "worker": 1}
    other = {**CALL, "prompt_token_ids": [7, 8], "worker": 2}
    turns, _ = imported(tmp_path, [{**CALL, "worker": 0}, {**CALL, **longer}, other])
    assert len(turns) == 3


def test_lines_that_are_no_calls_name_no_runs(tmp_path):
    ends = [{"done": word, "prompt_token_ids": []} for word in ("half", "all")]
    lines = [{"prompt_token_ids": [1, 2], "token_ids": [3]}, *ends]
    turns, _ = imported(tmp_path, lines, None)
    assert turns["session_id"].to_pylist() == ["log"]


@pytest.mark.parametrize(
    ("about", "index"), [("uid", "rollout_idx"), ("task_id", "attempt")]
)
def test_a_number_of_runs_is_advised_with_its_task(tmp_path, about, index):
    ids = {"prompt_ids": [1, 2], "response_ids": [3]}
    lines = [{about: a, index: k, **ids} for a in "tv" for k in range(2)]
    _, report = imported(tmp_path, lines, None)
    assert f"--map session_id={about}+{index} (" in report[0]["detail"]
    turns, _ = imported(tmp_path, lines, f"session_id={about}+{index}")
    assert len(turns["session_id"].unique()) == 4


def test_a_number_beside_a_mapped_key_is_advised_with_it(tmp_path):
    lines = [{"uid": "t", "rollout_idx": 0, "prompt_ids": [1], "response_ids": [3]}]
    _, report = imported(tmp_path, lines, "session_id=uid")
    assert "--map session_id=uid+rollout_idx takes it" in json.dumps(report)


IDS = {"prompt_token_ids": [1, 2], "token_ids": [3]}
AGAIN = {"prompt_token_ids": [7, 8], "token_ids": [3]}


@pytest.mark.parametrize(
    "lines",
    [
        # a line that ends a run, or the file, is no call that starts over
        [{**IDS, "conv": "a"}, {"done": False}, {**AGAIN, "conv": "b"}, {"done": True}],
        # calls in between that name nothing
        [{**IDS, "conv": "a"}, *[IDS] * 9, {**AGAIN, "conv": "b"}],
        # samples of one prompt
        [{**IDS, "reward": reward} for reward in (0.0, 1.0)],
        [{**IDS, "i": k} for k in range(2)],
        # a key that the first records lack
        [IDS, {**AGAIN, "trajectory_id": "r"}],
        [IDS] * 9 + [{**AGAIN, "session_id": "s"}, IDS],
        [IDS, {"trajectory_id": "r", "error": "x"}],
    ],
)
def test_no_session_is_invented_where_records_name_runs(tmp_path, lines):
    turns, report = imported(tmp_path, lines, None)
    assert "log" not in turns["session_id"].to_pylist()
    assert "no_session_id" in [one["problem"] for one in report if not one["kept"]]


def test_a_name_of_a_run_that_comes_late_stops_the_import(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "_MOST_COMPARED", 9)
    lines = [IDS] * 9 + [{**AGAIN, "trajectory_id": "r"}]
    with pytest.raises(FormatError, match=r"line 10 names its run.*--map session_id"):
        imported(tmp_path, lines, None)


@pytest.mark.parametrize("writer", [foreign.write_graphs, foreign.write_inspect])
def test_a_trace_without_an_id_is_a_run_of_its_own(tmp_path, writer):
    nodes = [NODE, REPLY]
    if writer == foreign.write_graphs:
        writer(tmp_path, [(None, nodes), (None, nodes)])
    else:
        sample = foreign.inspect_sample(None, [RECORD]) | {"uuid": None}
        foreign.write_lines(tmp_path / "log.jsonl", [sample] * 2)
    turns, _ = tk.import_turns(tmp_path)
    assert len(turns["session_id"].unique()) == 2


def test_a_session_of_two_groups_has_a_line(tmp_path):
    lines = [{**CALL, "uid": "a"}, {**CALL, "uid": "b"}]
    _, report = imported(tmp_path, lines, f"{MAP},group_id=uid")
    assert "group_varies" in [one["problem"] for one in report]


def test_a_directory_lists_the_files_that_it_skips(tmp_path):
    for name in ("part1.jsonl", "part10.jsonl", "part2.jsonl", "log.jsonl.1", "e.txt"):
        run = {"trajectory_id": name}
        foreign.write_lines(tmp_path / name, [{**CALL, **run}])
    (tmp_path / "empty.jsonl").touch()
    for source in (tmp_path, str(tmp_path / "*.jsonl")):
        turns, report = tk.import_turns(source, map=MAP)
        names = ["part1.jsonl", "part2.jsonl", "part10.jsonl"]
        assert turns["session_id"].to_pylist() == names
        other = [one for one in report.to_pylist() if one["problem"] == "other_file"]
        skipped = {one["file"].rpartition("/")[2] for one in other}
        whole = {"e.txt", "log.jsonl.1", "empty.jsonl"}
        assert skipped == (whole if source == tmp_path else {"empty.jsonl"})


def test_a_failed_call_is_shown_as_context(tmp_path, capsys):
    foreign.write_lines(tmp_path / "log.jsonl", [{**CALL, "status_code": 429}])
    path = str(tmp_path / "log.jsonl")
    assert main(["import", path, "--map", MAP, "-o", str(tmp_path / "t.parquet")]) == 0
    assert "context only" in capsys.readouterr().out


@pytest.mark.parametrize("code", [2, "STATUS_CODE_ERROR"])
def test_newer_spans_come_last_and_failed_ones_do_not_train(tmp_path, code):
    spans = [
        {
            "traceId": "a",
            "spanId": f"{k}",
            "startTimeUnixNano": f"{k}000000000",
            "attributes": {"prompt_token_ids": ids, "response_token_ids": [3]},
        }
        for k, ids in ((2, [1, 2, 3, 4]), (1, [1, 2]))
    ]
    spans[0]["status"] = {"code": code}
    turns, _ = imported(tmp_path, spans, None)
    assert turns["prompt_ids"].to_pylist() == [[1, 2], [1, 2, 3, 4]]
    assert turns["turn_index"].to_pylist() == [0, 1]
    assert turns["trainable"].to_pylist() == [None, False]


def test_a_request_that_is_there_twice_is_left_out(tmp_path):
    lines = [{**CALL, "request_id": "q", "logprobs": [-0.5]}] * 2
    turns, report = imported(tmp_path, lines)
    assert len(turns) == 1
    assert [one["problem"] for one in report] == ["copied"]
    assert "line 1" in report[0]["detail"]


@pytest.mark.parametrize("logprobs", [[-0.5], None])
def test_a_call_that_comes_twice_without_a_request_id_trains_once(tmp_path, logprobs):
    call = {**CALL, "logprobs": logprobs, "step": 0}
    others = [{**call, "token_ids": [4]}, {**call, "trajectory_id": 1}]
    lines = [call, *others, {**call, "step": 1}]
    turns, report = imported(tmp_path, lines)
    assert turns["trainable"].to_pylist() == [None, None, False, None]
    (told,) = [one for one in report if one["problem"] == "repeated_call"]
    assert (told["place"], told["kept"]) == ("line 4", True)
    assert "line 1 has the same ids" in told["detail"]
    foreign.write_lines(tmp_path / "log.jsonl", lines)
    turns, _ = tk.import_turns(tmp_path, map=MAP, contradicted="train")
    assert turns["trainable"].null_count == 4
    # numbers of the source say that these are two
    turns, _ = imported(tmp_path, [call, lines[-1]], f"{MAP},turn_index=step")
    assert turns["trainable"].null_count == 2


def test_an_output_with_its_prompt_does_not_train(tmp_path):
    ids = [*range(8)]
    turns, report = imported(
        tmp_path, [{**CALL, "prompt_token_ids": ids, "token_ids": [*ids, 9]}]
    )
    assert turns["trainable"].to_pylist() == [False]
    assert "prompt_in_output" in [one["problem"] for one in report]


def test_rewards_that_no_field_reads_are_named(tmp_path):
    facts = {"metadata": {"eval": {"score": 0.5}}, "is_correct": True}
    _, report = imported(
        tmp_path, [{**CALL, **facts}, {"trajectory_id": 0, "reward": 1.0}]
    )
    text = json.dumps(report)
    for words in ("metadata.eval.score of", "is_correct of", "its reward 1.0"):
        assert words in text


@pytest.mark.parametrize(
    "mask", [{"attention_mask": [0, 1, 1]}, {"ignore_mask": [1, 0, 1]}]
)
def test_no_mask_is_advised_that_marks_the_contrary(tmp_path, mask):
    _, report = imported(tmp_path, [{**CALL, "token_ids": [3, 4, 5], **mask}])
    (detail,) = [one["detail"] for one in report if one["problem"] == "mask_unread"]
    assert "--map" not in detail


def test_a_later_version_of_atif_is_left_out(tmp_path):
    trajectory = {"schema_version": "ATIF-v2.0", "session_id": "s", "steps": []}
    turns, report = imported(tmp_path, [trajectory], None)
    assert not len(turns)
    assert [one["problem"] for one in report] == ["other_version"]
