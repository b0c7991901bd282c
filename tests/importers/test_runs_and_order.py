"""Which session a call is of, in which order calls come, and which files are read."""

import gzip
import json

import pytest

import trajkit as tk
from tests.importers import foreign
from tests.importers.logs import (
    CALL,
    IDS,
    NODE,
    RECORD,
    REPLY,
    case,
    check,
    imported,
    line,
    lines,
    problems,
)
from trajkit.cli import BAD_DATA, main
from trajkit.errors import (
    ArgumentError,
    FormatError,
    InvalidTurnsError,
    TrajkitError,
)
from trajkit.importers import reader

LONGER = {**IDS, "prompt_token_ids": [1, 2, 3, 4, 5]}
AGAIN = {**IDS, "prompt_token_ids": [7, 8]}


def at(path, value):
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


# --- the name of a run


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("uid", ["u0", "u1"]),
        ("run.id", ["0", "1"]),
        ("uid+index", ["u0/0", "u1/1", "u0/2", "u1/3"]),
        ("absent|uid", ["u0", "u1"]),
    ],
)
def test_the_mapping_names_the_run(tmp_path, path, names):
    lines = [line(uid=f"u{k % 2}", index=k, run={"id": k // 2}) for k in range(4)]
    several = {"agent_id": "uid"} if path == "run.id" else {}
    turns, _ = imported(tmp_path, lines, map={"session_id": path, **several})
    assert turns["session_id"].unique().to_pylist() == names


ODD = (True, 1.5, ["s"], {"a": 1})


@pytest.mark.parametrize(
    "log",
    [
        case(
            "the file's name where nothing names a run",
            [*lines(1, latency=3), line()],
            ["no_session_id"],
            session_id=["log", "log"],
        ),
        case(
            "a number",
            [line(session_id=one, group_id=5) for one in (-1, 2**70)],
            session_id=["-1", str(2**70)],
            group_id=["5", "5"],
        ),
        case(
            "a value of another type",
            [line(session_id=one) for one in ODD],
            ["unreadable"] * 4,
            map(repr, ODD),
        ),
        case(
            "a record without the key of the mapping",
            [line(run="a"), line(), line(run=None)],
            ["no_session_id"] * 2,
            map="session_id=run",
            session_id=["a"],
        ),
        case(
            "advice on a key of one run",
            [line(uid="u", trajectory_id="t")],
            ["no_session_id"],
            "--map session_id=trajectory_id (",
        ),
        case(
            "no advice on a key of several runs",
            [line(uid="u", task_id="t")],
            ["no_session_id"],
            "--map session_id=KEY (",
        ),
        case(
            "a number that starts over in each task",
            [{"uid": a, "rollout_idx": k, **IDS} for a in "tv" for k in range(2)],
            ["no_session_id"] * 4,
            "--map session_id=uid+rollout_idx (",
        ),
        case(
            "a number beside a mapped key",
            [{"uid": "t", "rollout_idx": 0, **IDS}],
            ["unread"],
            "--map session_id=uid+rollout_idx takes it",
            map="session_id=uid",
        ),
        case(
            "what changes with each call of a conversation",
            [{**IDS, "nonce": "a"}, {**LONGER, "nonce": "b"}],
            ["no_session_id"],
            session_id=["log"] * 2,
        ),
        case(
            "names of calls, times and steps",
            [
                {**ids, "request_id": k, "created_at": k, "model_id": k, "step_no": k}
                for k, ids in enumerate((IDS, AGAIN))
            ],
            ["no_session_id", "unread"],
            session_id=["log"] * 2,
        ),
        case(
            "lines that are no calls",
            [IDS, *({"done": one, "prompt_token_ids": []} for one in ("half", "all"))],
            ["no_session_id", *["no_prompt_ids"] * 2],
            session_id=["log"],
        ),
        case(
            "two groups in a session",
            [{**CALL, "uid": "a"}, {**CALL, "uid": "b", "token_ids": [5, 6]}],
            ["group_varies"],
            map="session_id=session_id,group_id=uid",
        ),
    ],
)
def test_what_names_a_session(tmp_path, log):
    check(tmp_path, log)


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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, 7) for key in ("id", "agent_id", "uuid", "worker", "rank")),
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
    with_request = line(**beside)
    with_request["request"] = {"messages": [], **beside.get("request", {})}
    for one in (with_request, {**IDS, **beside}):
        turns, report = imported(tmp_path, [one] * 2)
        assert turns.num_rows == 0
        assert problems(report)[:2] == ["no_session_id"] * 2
        assert f"{key} ({value!r})" in report[0]["detail"]
        assert "--map session_id=" in report[0]["detail"]
        if value not in (None, ""):
            turns, _ = imported(tmp_path, [one], map=f"session_id={key}")
            assert turns["session_id"].to_pylist() == [str(value)]


@pytest.mark.parametrize(
    "lines",
    [
        # a line that ends a run, or the file, is no call that starts over
        [{**IDS, "conv": "a"}, {"done": False}, {**AGAIN, "conv": "b"}, {"done": True}],
        # calls in between that name nothing
        [{**IDS, "conv": "a"}, *[IDS] * 9, {**AGAIN, "conv": "b"}],
        # samples of one prompt
        [{**IDS, "reward": reward} for reward in (0.0, 1.0)],
        # a key that the first records lack
        [IDS, {**AGAIN, "trajectory_id": "r"}],
        [IDS] * 9 + [{**AGAIN, "session_id": "s"}, IDS],
        [IDS, {"trajectory_id": "r", "error": "x"}],
    ],
)
def test_no_session_is_invented_where_records_name_runs(tmp_path, lines):
    turns, report = imported(tmp_path, lines)
    assert "log" not in turns["session_id"].to_pylist()
    assert "no_session_id" in [one["problem"] for one in report if not one["kept"]]


def test_a_name_of_a_run_that_comes_late_stops_the_import(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "_MOST_COMPARED", 9)
    lines = [IDS] * 9 + [{**AGAIN, "trajectory_id": "r"}]
    with pytest.raises(FormatError, match=r"line 10 names its run.*--map session_id"):
        imported(tmp_path, lines)


@pytest.mark.parametrize(
    "key", ["trajectory_id", "run_id", "episode", "worker", "epoch"]
)
def test_a_run_beside_a_session_stops_or_has_a_line(tmp_path, key):
    calls = [{**CALL, "prompt_token_ids": [k, 9], key: f"r{k}"} for k in range(2)]
    option = rf"line 2.*--map session_id={key}\+session_id"
    with pytest.raises(FormatError, match=option):
        imported(tmp_path, calls)
    turns, _ = imported(tmp_path, calls, map=f"session_id={key}+session_id")
    assert turns["session_id"].to_pylist() == ["r0/s", "r1/s"]
    _, report = imported(tmp_path, calls[:1])
    assert problems(report) == ["unread"] * (key not in ("worker", "epoch"))
    # no run changes within a conversation
    after = {**calls[1], "prompt_token_ids": [0, 9, 3, 4]}
    assert len(imported(tmp_path, [calls[0], after, {**calls[1], key: "r2"}])[0]) == 3


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


# --- the order of calls, and calls that come twice


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
    turns, _ = imported(tmp_path, spans)
    assert turns["prompt_ids"].to_pylist() == [[1, 2], [1, 2, 3, 4]]
    assert turns["turn_index"].to_pylist() == [0, 1]
    assert turns["trainable"].to_pylist() == [None, False]


def test_a_request_that_is_there_twice_is_left_out(tmp_path):
    turns, report = imported(tmp_path, [{**CALL, "request_id": "q"}] * 2)
    assert len(turns) == 1
    assert problems(report) == ["copied"]
    assert "line 1" in report[0]["detail"]


@pytest.mark.parametrize("logprobs", [[-0.5, -0.25], None])
def test_a_call_that_comes_twice_without_a_request_id_trains_once(tmp_path, logprobs):
    call = {**CALL, "logprobs": logprobs, "step": 0}
    others = [{**call, "token_ids": [4, 5]}, {**call, "session_id": "t"}]
    lines = [call, *others, {**call, "step": 1}]
    turns, report = imported(tmp_path, lines)
    assert turns["trainable"].to_pylist() == [None, None, False, None]
    (told,) = [one for one in report if one["problem"] == "repeated_call"]
    assert (told["place"], told["kept"]) == ("line 4", True)
    assert "line 1 has the same ids" in told["detail"]
    turns, _ = imported(tmp_path, lines, contradicted="train")
    assert turns["trainable"].null_count == 4
    # numbers of the source say that these are two
    turns, _ = imported(tmp_path, [call, lines[-1]], map="turn_index=step")
    assert turns["trainable"].null_count == 2


# --- sessions of several files


def test_two_files_of_one_name_are_two_sessions(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        foreign.write_lines(tmp_path / name / "log.jsonl", [line()])
    turns, _ = tk.import_turns([tmp_path / "a" / "log.jsonl", tmp_path / "b"])
    assert turns["session_id"].to_pylist() == ["log", str(tmp_path / "b" / "log.jsonl")]


def runs_of(folder, *names):
    """Logs of two calls each, of sessions that begin with other prompts."""
    for k, name in enumerate(names):
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True, parents=True)
        prompts = [k, 9], [k, 9, 3, 4, 5]
        calls = [line({"prompt_ids": ids}, session_id="0") for ids in prompts]
        foreign.write_lines(path, calls)


def test_a_session_that_starts_over_in_a_second_file_is_an_error(tmp_path, capsys):
    out, log = tmp_path / "out.parquet", tmp_path / "log"
    runs_of(log, "a/log", "b/log", "c")
    words = r"session '0' is in .*a/log\.jsonl and in .*b/log\.jsonl"
    with pytest.raises(InvalidTurnsError, match=words):
        tk.import_turns(log)
    argv = ["import", str(log), "-o", str(out)]
    assert main(argv) == BAD_DATA
    assert "--session-prefix file" in capsys.readouterr().err
    assert not out.exists()
    names = ["a/log/0", "b/log/0", "c/0"]
    assert main([*argv, "--session-prefix", "file"]) == 0
    assert tk.read_turns(out)["session_id"].unique().to_pylist() == names
    for options, expected in (
        ({"session_prefix": "folder"}, ["a/0", "b/0", "log/0"]),
        ({"session_prefix": "no"}, ["0"]),
        ({"map": "session_id=@folder+@file+session_id"}, [*names[:2], "log/c/0"]),
    ):
        turns, report = tk.import_turns(log, **options)
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
    (tmp_path / "a.jsonl.gz").unlink()
    with pytest.raises(ArgumentError, match="is given twice"):
        tk.import_turns([tmp_path, tmp_path / "a.jsonl"])


def test_calls_with_an_index_may_be_in_any_file(tmp_path):
    for k, name in enumerate("ab"):
        calls = [line(run=0, turn=6 - 2 * k - i) for i in range(2)]
        foreign.write_lines(tmp_path / f"{name}.jsonl", calls)
    turns, report = tk.import_turns(tmp_path, map="session_id=run,turn_index=turn")
    assert turns["turn_index"].to_pylist() == [3, 4, 5, 6]
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


def test_a_directory_lists_the_files_that_it_skips(tmp_path):
    for name in ("part1.jsonl", "part10.jsonl", "part2.jsonl", "log.jsonl.1", "e.txt"):
        foreign.write_lines(tmp_path / name, [{**CALL, "session_id": name}])
    (tmp_path / "empty.jsonl").touch()
    for source in (tmp_path, str(tmp_path / "*.jsonl")):
        turns, report = tk.import_turns(source)
        names = ["part1.jsonl", "part2.jsonl", "part10.jsonl"]
        assert turns["session_id"].to_pylist() == names
        other = [one for one in report.to_pylist() if one["problem"] == "other_file"]
        skipped = {one["file"].rpartition("/")[2] for one in other}
        whole = {"e.txt", "log.jsonl.1", "empty.jsonl"}
        assert skipped == (whole if source == tmp_path else {"empty.jsonl"})


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


def test_a_log_of_damaged_lines_says_why(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"a": \n[1]\n')
    with pytest.raises(InvalidTurnsError, match=r"no calls.*\(line 1: "):
        tk.import_turns(tmp_path / "log.jsonl")


@pytest.mark.parametrize("order", ["utf-16-le", "utf-16-be"])
def test_a_file_that_is_not_utf_8_is_named_as_that(tmp_path, order):
    path = tmp_path / "log.jsonl"
    path.write_bytes(f"\ufeff{json.dumps(CALL)}\n".encode(order))
    for read in (tk.import_turns, tk.read_turns):
        with pytest.raises(TrajkitError, match="not UTF-8 but UTF-16"):
            read(path)
    foreign.write_lines(tmp_path / "good.jsonl", [CALL])
    _, report = tk.import_turns(tmp_path)
    (other,) = [one for one in report.to_pylist() if one["problem"] == "other_file"]
    assert "not UTF-8 but UTF-16" in other["detail"]
