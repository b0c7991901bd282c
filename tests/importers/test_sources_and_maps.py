"""Files from anywhere, and records of any shape by a mapping."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trajkit as tk
from tests import foreign
from tests.importers.test_importers import NODE, RECORD, REPLY
from trajkit.cli import main
from trajkit.errors import ArgumentError, FormatError, InvalidTurnsError


def agents():
    """A log as a new user has it: three agents, a retry, a truncated reply."""
    lines = []
    for run in ("run-1", "run-2"):
        user = {"role": "user", "content": f"{run}?"}
        reply = {"role": "assistant", "content": "a"}
        lines += [
            plain(run, "main", 0, [user], [1, 2], [3]),
            # the same request again
            plain(run, "main", 1, [user], [1, 2], [4, 5]),
            plain(run, "helper", 0, [{**user, "content": "h"}], [7], [8]),
            plain(run, "critic", 0, [{**user, "content": "c"}], [9], [6]),
            {
                **plain(run, "main", 2, [user, reply, user], [1, 2, 4, 5, 1], [8, 8]),
                "finish_reason": "length",
            },
        ]
    return lines


def plain(run, agent, step, messages, prompt, output):
    return {
        "trajectory_id": run,
        "agent_id": agent,
        "step": step,
        "messages": messages,
        "prompt_token_ids": prompt,
        "token_ids": output,
        "logprobs": [-0.5] * len(output),
        "uid": f"task of {run}",
        "finish_reason": None,
        "reward": 1.0 if run == "run-1" else 0.0,
    }


def test_a_new_user_s_log_goes_in_by_one_command(tmp_path, capsys):
    foreign.write_lines(tmp_path / "log.jsonl", agents())
    output = tmp_path / "turns.parquet"
    given = ["import", str(tmp_path / "log.jsonl"), "-o", str(output)]
    assert main(given) == 1
    said = capsys.readouterr().err
    assert "--map session_id=trajectory_id" in said
    assert main([*given, "--map", "session_id=trajectory_id,group_id=uid"]) == 0
    turns = tk.read_turns(output)
    assert turns["session_id"].to_pylist() == ["run-1"] * 5 + ["run-2"] * 5
    assert turns["turn_index"].to_pylist() == [*range(5)] * 2
    assert turns["agent_id"].to_pylist()[:4] == ["main", "main", "helper", "critic"]
    assert set(turns["group_id"].to_pylist()) == {"task of run-1", "task of run-2"}
    assert turns["reward"].to_pylist() == [1.0] * 5 + [0.0] * 5
    assert turns["finish_reason"].to_pylist()[4] == "length"
    assert turns["output_logprobs"].null_count == 0
    # later requests repeat the replies, and tell which of two equal requests went on
    assert [one is not None for one in turns["response"].to_pylist()] == [
        *(False, True, False, False, False),
    ] * 2
    rows = tk.linearize(turns)
    # the retried reply trains beside the one that went on
    trained = [
        np.array(row["input_ids"])[np.array(row["loss_mask"]) == 1].tolist()
        for row in rows.to_pylist()
        if row["session_id"] == "run-1"
    ]
    assert sorted(trained) == [[3], [4, 5, 8, 8], [6], [8]]


def test_a_record_may_be_a_run_of_its_own(tmp_path):
    """Outputs of verl's agent loop name a group, and no run."""
    record = {"prompt_ids": [1], "output_ids": [2, 3, 4]}
    line = foreign.agent_loop(record, response_mask=[1, 0, 1], reward_score=0.5)
    path = tmp_path / "log.jsonl"
    foreign.write_lines(path, [{**line, "uid": "g"}] * 2)
    turns, report = tk.import_turns(path)
    assert set(report["problem"].to_pylist()) == {"no_logprobs"}
    assert turns["reward"].to_pylist() == [0.5] * 4
    names = [f"log.jsonl, line {k}" for k in (1, 1, 2, 2)]
    assert turns["session_id"].to_pylist() == names
    assert turns["group_id"].to_pylist() == ["g"] * 4
    # another key may name the run
    foreign.write_lines(path, [{**line, "trajectory_id": "t"}])
    turns, report = tk.import_turns(path)
    assert (turns.num_rows, report["problem"][0].as_py()) == (0, "no_session_id")
    assert "@name: one per record" in report["detail"][0].as_py()


def test_a_counter_of_each_agent_is_no_turn_index(tmp_path):
    foreign.write_lines(tmp_path / "log.jsonl", agents())
    fields = "session_id=trajectory_id,turn_index=step"
    with pytest.raises(
        FormatError, match=r"turn_index 0 twice, first in .*log.jsonl, line 1"
    ):
        tk.import_turns(tmp_path / "log.jsonl", map=fields)
    turns, report = tk.import_turns(
        tmp_path / "log.jsonl", map="session_id=trajectory_id"
    )
    assert turns.num_rows == 10
    lines = [row["detail"] for row in report.to_pylist() if row["problem"] == "unread"]
    assert [text.split()[0] for text in lines] == ["step", "uid"]


def test_a_turn_index_of_the_source_counts(tmp_path):
    lines = [
        {**plain("r", "main", 0, [], [1], [2]), "step": step} for step in (4, 0, 2)
    ]
    foreign.write_lines(tmp_path / "log.jsonl", lines)
    fields = {"session_id": "trajectory_id", "turn_index": "step"}
    turns, _ = tk.import_turns(tmp_path / "log.jsonl", map=fields)
    assert turns["turn_index"].to_pylist() == [0, 2, 4]


TOML = """
format = "records"
each = "steps"
only = "kind=llm"

[fields]
session_id = "/run.id"
prompt_ids = ["tokens.prompt", "tokens.input"]
output_ids = "tokens.output"
logprobs = "tokens.logprobs"
reward = "/run.scores.correct"
group_id = "/task+/seed"
"""


def test_a_toml_file_describes_a_format(tmp_path):
    (tmp_path / "map.toml").write_text(TOML)
    steps = [
        {"kind": "tool", "text": "x"},
        {"kind": "llm", "tokens": {"prompt": [1], "output": [2], "logprobs": [-0.5]}},
        {"kind": "llm", "tokens": {"input": [1, 2], "output": [3]}},
    ]
    run = {"run": {"id": 4, "scores": {"correct": 1}}, "task": "t", "seed": 0}
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([{**run, "steps": steps}], indent=1))
    turns, report = tk.import_turns(path, map=tmp_path / "map.toml")
    assert turns["session_id"].to_pylist() == ["4", "4"]
    assert turns["prompt_ids"].to_pylist() == [[1], [1, 2]]
    assert turns["reward"].to_pylist() == [1.0, 1.0]
    assert turns["group_id"].to_pylist() == ["t/0", "t/0"]
    assert [row["place"] for row in report.to_pylist()] == ["item 0, item 2"]
    output = tmp_path / "turns.parquet"
    assert main(f"import {path} -o {output} --map {tmp_path}/map.toml".split()) == 0
    assert tk.read_turns(output).num_rows == 2
    for damaged in (TOML + "[", "fields = 3", "format = 3\na = 'b'", ""):
        (tmp_path / "map.toml").write_text(damaged)
        with pytest.raises(ArgumentError, match="map"):
            tk.import_turns(path, map=tmp_path / "map.toml")


def test_the_page_s_mapping_of_verifiers_results(tmp_path):
    """As verifiers 0.2.0 saves them with the state's column ``trajectory``."""
    page = Path("docs/import.md").read_text("utf-8")
    text = page.partition('```toml\neach = "trajectory"')[2].partition("```")[0]
    (tmp_path / "map.toml").write_text(f'each = "trajectory"{text}')
    tokens = {"prompt_ids": [1, 2], "prompt_mask": [0, 0], "completion_ids": [3, 4]}
    tokens |= {"completion_mask": [1, 1], "completion_logprobs": [-0.5, -0.25]}
    tokens |= {"overlong_prompt": False, "is_truncated": False, "routed_experts": None}
    user, reply = RECORD["prompt_messages"], RECORD["response_message"]
    step = {"prompt": user, "completion": [reply], "response": {}, "tokens": tokens}
    step |= {"reward": 1.0, "advantage": None, "is_truncated": False, "extras": {}}
    result = {"example_id": 3, "prompt": user, "completion": [reply], "reward": 1.0}
    result["trajectory"] = [{**step, "trajectory_id": "f00d"}]
    foreign.write_lines(tmp_path / "results.jsonl", [result])
    turns, report = tk.import_turns(
        tmp_path / "results.jsonl", map=tmp_path / "map.toml"
    )
    (turn,) = turns.to_pylist()
    assert (turn["session_id"], turn["group_id"], turn["reward"]) == ("f00d", "3", 1.0)
    assert (turn["prompt_ids"], turn["output_ids"]) == ([1, 2], [3, 4])
    assert (turn["output_logprobs"], turn["trainable"]) == ([-0.5, -0.25], None)
    assert report["detail"].to_pylist() == [
        "tokens.prompt_mask of 1 records was not read (the first: [0, 0])"
    ]


def test_a_mapping_names_whole_responses(tmp_path):
    value = {"sid": 3, "q": foreign.request(RECORD, "vllm chat")}
    value["answer"] = {"raw": foreign.chat_response(RECORD)}
    foreign.write_lines(tmp_path / "log.jsonl", [value])
    fields = "session_id=sid,request=q,response=answer.raw"
    turns, report = tk.import_turns(tmp_path / "log.jsonl", map=fields)
    assert turns["output_ids"].to_pylist() == [[3, 4]]
    assert turns["output_logprobs"].to_pylist() == [[-0.5, -0.25]]
    assert turns["finish_reason"].to_pylist() == ["stop"]
    assert report.num_rows == 0


def test_a_mapping_changes_one_field_of_a_format(tmp_path):
    foreign.write_openai(tmp_path, [RECORD])
    value = json.loads((tmp_path / "log.jsonl").read_text())
    value |= {"run": "r", "tokens": [5], "lp": [-1.0]}
    foreign.write_lines(tmp_path / "log.jsonl", [value])
    fields = {"session_id": "run", "output_ids": "tokens", "logprobs": "lp"}
    turns, report = tk.import_turns(tmp_path / "log.jsonl", map=fields)
    assert turns["session_id"].to_pylist() == ["r"]
    assert turns["output_ids"].to_pylist() == [[5]]
    assert turns["output_logprobs"].to_pylist() == [[-1.0]]
    assert report.num_rows == 0


MAP = (
    "session_id=trajectory_id,prompt_ids=prompt_token_ids,output_ids=token_ids,"
    "prompt_messages=messages,logprobs=logprobs,group_id=uid"
)


def test_records_and_turns_take_a_mapping(tmp_path):
    table = tk.from_records(agents(), map=MAP)
    assert table["session_id"].unique().to_pylist() == ["run-1", "run-2"]
    assert table["group_id"].to_pylist()[0] == "task of run-1"
    # a key that no path begins with is an extra column, as ever
    assert table["step"].to_pylist()[:3] == [0, 1, 0]
    path = tmp_path / "log.jsonl"
    foreign.write_lines(path, agents())
    assert tk.read_turns(path, map=MAP).equals(table)
    pq.write_table(pa.Table.from_pylist(agents()), tmp_path / "log.parquet")
    assert tk.read_turns(tmp_path / "log.parquet", map=MAP).equals(table)
    with pytest.raises(InvalidTurnsError, match="no session_id"):
        tk.from_records(agents(), map=MAP.partition(",")[2])


def test_records_of_a_dataset_take_a_mapping():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(agents())
    table = tk.from_records(rows, map=MAP)
    assert table.num_rows == 10
    assert datasets.Dataset(table).num_rows == 10


# --- where files come from


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("name", ["log.json", "log.jsonl", "log.ndjson", "log.txt"])
def test_json_is_lines_or_an_array_under_any_name(tmp_path, name, indent):
    lines = [{**foreign.plain_record(RECORD), "request_id": k} for k in range(2)]
    for text in (
        json.dumps(lines, indent=indent),
        "".join(f"{json.dumps(one)}\n" for one in lines),
    ):
        (tmp_path / name).write_text(text)
        turns, report = tk.import_turns(tmp_path / name)
        assert turns["output_ids"].to_pylist() == [[3, 4]] * 2
        assert report.num_rows == 0


def test_patterns_and_several_sources(tmp_path):
    for name in ("a1.jsonl", "a2.jsonl", "b.jsonl"):
        record = {**foreign.plain_record(RECORD), "session_id": name}
        foreign.write_lines(tmp_path / name, [record])
    turns, _ = tk.import_turns([f"{tmp_path}/a*.jsonl", tmp_path / "b.jsonl"])
    assert turns["session_id"].to_pylist() == ["a1.jsonl", "a2.jsonl", "b.jsonl"]
    with pytest.raises(FileNotFoundError, match="no file has such a name"):
        tk.import_turns(f"{tmp_path}/c*.jsonl")


def test_standard_input(tmp_path, monkeypatch):
    text = json.dumps(foreign.plain_record(RECORD)).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    output = tmp_path / "turns.parquet"
    assert main(["import", "-", "-o", str(output)]) == 0
    assert tk.read_turns(output)["session_id"].to_pylist() == ["s"]


def test_addresses_of_fsspec():
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    text = json.dumps(foreign.plain_record(RECORD))
    for name in ("a.jsonl", "b.jsonl", "notes.md"):
        system.pipe(f"/runs/{name}", text.replace('"s"', f'"{name}"').encode())
    try:
        turns, report = tk.import_turns("memory://runs/a.jsonl")
        assert turns["session_id"].to_pylist() == ["a.jsonl"]
        for many, skipped in (
            ("runs", ["memory:///runs/notes.md"]),
            ("runs/*.jsonl", []),
        ):
            turns, report = tk.import_turns(f"memory://{many}")
            assert turns["session_id"].to_pylist() == ["a.jsonl", "b.jsonl"]
            assert report["file"].to_pylist() == skipped
        system.pipe("/runs/a.jsonl", b'{"request": {}, "response": "x"}\n')
        _, report = tk.import_turns("memory://runs/a.jsonl")
        assert report["file"].to_pylist() == ["memory:///runs/a.jsonl"]
        with pytest.raises(FormatError, match="no such file"):
            tk.import_turns("memory://runs/c.jsonl")
    finally:
        system.rm("/runs", recursive=True)
    with pytest.raises(ArgumentError, match="nothing://x"):
        tk.import_turns("nothing://x")


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_rows_of_parquet_and_arrow(tmp_path, suffix):
    table = pa.Table.from_pylist(agents())
    path = tmp_path / f"log.{suffix}"
    if suffix == "parquet":
        pq.write_table(table, path)
    else:
        with (
            pa.OSFile(str(path), "wb") as file,
            pa.ipc.new_file(file, table.schema) as w,
        ):
            w.write_table(table)
    for source in (path, tmp_path):
        turns, _ = tk.import_turns(source, map="session_id=trajectory_id,group_id=uid")
        assert turns.num_rows == 10
        assert turns["reward"].to_pylist() == [1.0] * 5 + [0.0] * 5


# --- logs as people write them


def answer():
    return foreign.chat_response(RECORD) | {"id": "c"}


ASKED = [{"role": "user", "content": "q"}]
LOGS = {
    # OpenHands' completion logs, and those of LiteLLM
    "messages and response": {"messages": ASKED, "response": answer(), "args": []},
    "input of messages": {"input": ASKED, "output": answer()},
    "input of a request": {"input": {"messages": ASKED}, "output": answer()},
    "texts of JSON": {
        "request": json.dumps({"messages": ASKED}),
        "response": json.dumps(answer()),
    },
    "areal": {
        "input_tokens": [1, 2],
        "output_tokens": [3, 4],
        "output_logprobs": [-0.5, -0.25],
        "messages": ASKED,
        "response_message": RECORD["response_message"],
    },
    "observations": {
        "observations": [
            {"traceId": "t", "type": "GENERATION"}
            | {"input": {"messages": ASKED}, "output": answer()}
        ]
    },
}


@pytest.mark.parametrize("name", LOGS)
def test_logs_as_people_write_them(tmp_path, name):
    key = "sessionId" if name == "observations" else "session_id"
    foreign.write_lines(tmp_path / "log.jsonl", [{key: 3, **LOGS[name]}])
    turns, report = tk.import_turns(tmp_path)
    (turn,) = turns.to_pylist()
    assert turn["session_id"] == "3"
    assert (turn["prompt_ids"], turn["output_ids"]) == ([1, 2], [3, 4])
    assert turn["output_logprobs"] == [-0.5, -0.25]
    assert len(turn["messages"]) == 1
    assert report.num_rows == 0


@pytest.mark.parametrize(
    "response",
    [
        "data: {}\n\n",
        [{"choices": [{"index": 0, "delta": {"content": "a"}, "token_ids": [3]}]}] * 2,
        {"choices": [{"delta": {}, "token_ids": [3]}], "prompt_token_ids": [1]},
        [
            {"output_ids": [3], "meta_info": {"finish_reason": None}},
            {"output_ids": [3, 4]},
        ],
    ],
)
def test_a_part_of_a_stream_is_no_reply(tmp_path, response):
    line = {"session_id": "s", "request": {"input_ids": [1]}, "response": response}
    foreign.write_lines(tmp_path / "log.jsonl", [line])
    turns, report = tk.import_turns(tmp_path / "log.jsonl")
    assert turns.num_rows == 0
    assert report["detail"].to_pylist() == [
        "a part of a stream: log the complete response"
    ]


def test_facts_around_a_list_of_records(tmp_path):
    step = {"prompt_ids": [1], "completion_ids": [2], "logprobs": [-0.5]}
    steps = [step, {**step, "completion_ids": [3]}]
    run = {"trajectory_id": "t", "reward": 1.0, "uid": "u", "steps": steps}
    foreign.write_lines(tmp_path / "log.jsonl", [run])
    with pytest.raises(FormatError, match="each=steps"):
        tk.import_turns(tmp_path / "log.jsonl")
    turns, report = tk.import_turns(tmp_path / "log.jsonl", map="each=steps")
    assert turns.num_rows == 0
    assert "--map session_id=/trajectory_id" in report["detail"][0].as_py()
    fields = "each=steps,session_id=/trajectory_id"
    turns, report = tk.import_turns(tmp_path / "log.jsonl", map=fields)
    assert turns["reward"].to_pylist() == [1.0, 1.0]
    assert report["detail"].to_pylist() == [
        "/uid of 2 records was not read (the first: 'u'): --map group_id=/uid takes it"
    ]


def test_versions_of_each_token(tmp_path):
    line = {"session_id": "s", "prompt_ids": [1], "output_ids": [2, 3, 4]}
    line["v"] = [7, 7, 8]
    foreign.write_lines(tmp_path / "log.jsonl", [line])
    options = {"format": "records", "map": "weight_version=v"}
    turns, _ = tk.import_turns(tmp_path / "log.jsonl", **options)
    pieces = [tuple(one.values()) for one in turns["weight_versions"][0].as_py()]
    assert pieces == [("7", 0, 2), ("8", 2, 3)]


def test_a_mask_that_no_field_reads_untrains(tmp_path):
    line = {"session_id": "s", "prompt_token_ids": [1], "token_ids": [2, 3, 4]}
    for mask, trains in (([1, 0, 1], False), ([1, 1, 1], None)):
        value = {**line, "my_mask": mask, "logprobs": [-0.5] * 3}
        foreign.write_lines(tmp_path / "log.jsonl", [value])
        turns, report = tk.import_turns(tmp_path / "log.jsonl")
        assert turns["trainable"].to_pylist() == [trains]
        problems = report["problem"].to_pylist()
        assert problems == ["mask_unread"] * (trains is False) + ["unread"]
    turns, report = tk.import_turns(tmp_path / "log.jsonl", map="output_mask=my_mask")
    assert report.num_rows == 0


def test_the_closest_format_is_named(tmp_path):
    for line, lacks in (
        ({"session_id": 1, "prompt": "a"}, "records .*lacks prompt_ids .*output_ids"),
        ({"prompt_token_ids": [1]}, r"records .*lacks output_ids \(output_token_ids"),
        ({"schema_version": 1, "steps": []}, "atif .*has values of other kinds"),
        ({"nodes": []}, "verifiers .*lacks task"),
        ({"request": {}, "reply": {}}, "openai .*lacks response"),
    ):
        foreign.write_lines(tmp_path / "log.jsonl", [line])
        with pytest.raises(FormatError, match=f"most like {lacks}") as raised:
            tk.import_turns(tmp_path / "log.jsonl")
        text = str(raised.value)
        assert f"has the keys {', '.join(line)}" in text
        assert "--map session_id=PATH,prompt_ids=PATH" in text
        assert "return_token_ids" in text


# --- replies that only later requests have


def talk(session, prompt, output, *said):
    roles = ("user", "assistant")
    messages = [{"role": roles[k % 2], "content": text} for k, text in enumerate(said)]
    ids = {"prompt_token_ids": prompt, "token_ids": output, "logprobs": None}
    return {"session_id": session, "messages": messages, **ids}


def replies_of(tmp_path, lines):
    foreign.write_lines(tmp_path / "log.jsonl", lines)
    turns, report = tk.import_turns(tmp_path / "log.jsonl")
    bodies = [
        None if one is None else json.loads(one["body"])["content"]
        for one in turns["response"].to_pylist()
    ]
    found = [row["problem"] for row in report.to_pylist()]
    return turns, bodies, [one for one in found if one != "no_logprobs"]


def test_a_later_request_has_the_reply(tmp_path):
    lines = [
        talk("s", [1], [2], "q"),
        talk("t", [1], [2], "q"),
        # with drift: its tokens are not those that were sampled
        talk("s", [1, 9, 3], [4], "q", "a", "more"),
        talk("s", [1, 9, 3, 4, 5], [6], "q", "a", "more", "b", "end"),
        talk("t", [1, 2, 3], [4], "q", "A", "more"),
    ]
    turns, bodies, found = replies_of(tmp_path, lines)
    # in order of the sessions
    assert bodies == ["a", "b", None, "A", None]
    assert found == ["reply_of_a_request"] * 3
    links = tk.link(turns)
    assert links["parent"].to_pylist() == [None, 0, 1, None, 0]


def test_tokens_tell_which_of_equal_requests_went_on(tmp_path):
    first, second = talk("s", [1], [2], "q"), talk("s", [1], [3], "q")
    on = talk("s", [1, 3, 5], [6], "q", "a", "more")
    _, bodies, _ = replies_of(tmp_path, [first, second, on])
    assert bodies == [None, "a", None]
    # with drift nothing tells
    drifted = talk("s", [1, 9, 5], [6], "q", "a", "more")
    turns, bodies, found = replies_of(tmp_path, [first, second, drifted])
    assert bodies == [None] * 3
    assert found == ["no_reply"] * 3
    assert turns["messages"].null_count == 3


def test_messages_that_no_request_repeats_are_left_out(tmp_path):
    lines = [talk("s", [1], [2], "q"), talk("s", [1, 2, 3], [4], "other")]
    turns, _, found = replies_of(tmp_path, lines)
    assert found == ["no_reply"] * 2
    assert tk.link(turns)["parent"].to_pylist() == [None, 0]
    turns, _, found = replies_of(tmp_path, lines[:1])
    assert (turns["messages"].null_count, found) == (0, [])


def test_a_mapping_changes_fields_of_a_graph_of_messages(tmp_path):
    nodes = [NODE, REPLY]
    foreign.write_graphs(tmp_path, [("s", nodes)])
    for path, reward in (
        ("/rewards", 2.0),
        ("/rewards.a", 1.0),
        ("/rewards.a.score", 0.5),
    ):
        turns, report = tk.import_turns(tmp_path, map=f"reward={path}")
        assert turns["reward"].to_pylist() == [reward]
        assert report.num_rows == 0


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *(("@file", "log"), ("@folder", None), ("@name", "log.jsonl, line 1, item 0")),
        *(("/@name", "log.jsonl, line 1"), ("@file+/run", "log/5")),
    ],
)
def test_names_of_files_are_paths_of_every_mapping(tmp_path, path, name):
    step = {"prompt_ids": [1], "output_ids": [2]}
    foreign.write_lines(tmp_path / "log.jsonl", [{"run": 5, "steps": [step]}])
    fields, name = f"each=steps,session_id={path}", name or tmp_path.name
    turns, _ = tk.import_turns(tmp_path, map=fields)
    assert turns["session_id"].to_pylist() == [name]
    assert tk.read_turns(tmp_path, map=fields)["session_id"].to_pylist() == [name]
    (tmp_path / "map.toml").write_text(
        f'each = "steps"\n[fields]\nsession_id = "{path}"\n'
    )
    turns = tk.read_turns(tmp_path / "log.jsonl", map=tmp_path / "map.toml")
    assert turns["session_id"].to_pylist() == [name]


def test_every_file_has_its_name_in_a_mapping(tmp_path):
    call = {"session_id": "0", "prompt_ids": [1], "output_ids": [2]}
    for name in "ab":
        foreign.write_lines(tmp_path / f"{name}.jsonl", [call])
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    turns = tk.read_turns(paths, map="session_id=@file+session_id")
    assert turns["session_id"].to_pylist() == ["a/0", "b/0"]
    with pytest.raises(InvalidTurnsError, match=r"a\.jsonl and in .*b\.jsonl"):
        tk.read_turns(paths, map="session_id=session_id")


def test_records_in_memory_have_a_place_and_no_file():
    call = {"prompt_ids": [1], "output_ids": [2]}
    turns = tk.from_records([call, call], map="session_id=@name")
    assert turns["session_id"].to_pylist() == ["record 0", "record 1"]
    for path in ("@file", "@folder"):
        with pytest.raises(InvalidTurnsError, match="no session_id"):
            tk.from_records([call], map=f"session_id={path}")


@pytest.mark.parametrize("each", ["trajectories.*.steps", "trajectories.*"])
def test_lists_in_lists_are_records_everywhere(tmp_path, each):
    call = {"session_id": "s", "prompt_ids": [1], "output_ids": [2]}
    inner = {"steps": [call]} if "steps" in each else call
    run = {"trajectories": [inner, inner]}
    foreign.write_lines(tmp_path / "log.jsonl", [run])
    for turns in (
        tk.import_turns(tmp_path / "log.jsonl", map=f"each={each}")[0],
        tk.read_turns(tmp_path / "log.jsonl", map=f"each={each}"),
        tk.from_records([run], map=f"each={each}"),
    ):
        assert turns["output_ids"].to_pylist() == [[2], [2]]


def test_a_session_of_an_odd_type_around_odd_records(tmp_path):
    foreign.write_lines(tmp_path / "x.jsonl", [{"session_id": [1], "completions": [7]}])
    _, report = tk.import_turns(tmp_path / "x.jsonl", "polar")
    assert report["problem"].to_pylist() == ["unreadable"]


def test_a_first_record_without_ids_hides_no_format(tmp_path):
    good = foreign.plain_record(RECORD)
    odd = [{**good, "token_ids": ids} for ids in (None, "3")]
    first = [{"event": "start"}, *odd]
    for n in range(1, 4):
        foreign.write_lines(tmp_path / "log.jsonl", [*first[:n], good])
        turns, report = tk.import_turns(tmp_path / "log.jsonl")
        assert turns.num_rows == 1
        assert [row["kept"] for row in report.to_pylist()].count(False) == n
