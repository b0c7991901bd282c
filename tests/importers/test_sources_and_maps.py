"""Files from anywhere, and records of any shape by a mapping."""

import io
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trajkit as tk
from tests.importers import foreign
from tests.importers.logs import IDS, NODE, RECORD, REPLY, USER, imported
from trajkit.cli import main
from trajkit.errors import ArgumentError, FormatError, InvalidTurnsError

MAP = (
    "session_id=trajectory_id,prompt_ids=prompt_token_ids,output_ids=token_ids,"
    "prompt_messages=messages,logprobs=logprobs,group_id=uid"
)
LOG = [
    {
        **IDS,
        "prompt_token_ids": [k, 2],
        "trajectory_id": f"run-{k}",
        "step": 0,
        "messages": [USER],
        "uid": "task",
    }
    for k in (1, 1, 2)
]


def in_file(path, log=LOG):
    """A file of a log, of the kind of its suffix."""
    table = pa.Table.from_pylist(log)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".arrow":
        with (
            pa.OSFile(str(path), "wb") as file,
            pa.ipc.new_file(file, table.schema) as w,
        ):
            w.write_table(table)
    else:
        foreign.write_lines(path, log)
    return path


def in_dataset(folder):
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_list(LOG)


@pytest.mark.parametrize(
    "read",
    [
        lambda folder: tk.from_records(LOG, map=MAP),
        lambda folder: tk.from_records(in_dataset(folder), map=MAP),
        lambda folder: tk.read_turns(in_file(folder / "log.jsonl"), map=MAP),
        lambda folder: tk.read_turns(in_file(folder / "log.parquet"), map=MAP),
        *(
            lambda folder, end=end: tk.import_turns(in_file(folder / end), map=MAP)[0]
            for end in ("log.jsonl", "log.parquet", "log.arrow")
        ),
    ],
)
def test_records_anywhere_take_a_mapping(tmp_path, read):
    table = read(tmp_path)
    assert table["session_id"].to_pylist() == ["run-1"] * 2 + ["run-2"]
    assert table["prompt_ids"].to_pylist() == [[1, 2], [1, 2], [2, 2]]
    assert table["output_logprobs"].to_pylist() == [[-0.5, -0.25]] * 3
    assert table["group_id"].to_pylist() == ["task"] * 3
    # a key that no path begins with is an extra column, as ever, or has a line
    assert ("step" in table.column_names) == ("sampled" not in table.column_names)


def test_records_without_the_session_of_a_mapping_are_refused():
    with pytest.raises(InvalidTurnsError, match="no session_id"):
        tk.from_records(LOG, map=MAP.partition(",")[2])


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
    fields = "session_id=trajectory_id,turn_index=step"
    match = r"turn_index 0 twice, first in .*log.jsonl, line 1"
    with pytest.raises(FormatError, match=match):
        tk.import_turns(in_file(tmp_path / "log.jsonl"), map=fields)


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
        "tokens.prompt_mask of 1 record was not read (the first: [0, 0])"
    ]


@pytest.mark.parametrize(
    "fields",
    [
        "session_id=sid,request=q,response=answer.raw",
        # and one field of it
        "session_id=sid,request=q,response=answer.raw,output_ids=own,logprobs=lp",
    ],
)
def test_a_mapping_names_whole_responses(tmp_path, fields):
    value = {"sid": 3, "q": foreign.request(RECORD, "vllm chat"), "own": [5]}
    value |= {"answer": {"raw": foreign.chat_response(RECORD)}, "lp": [-1.0]}
    turns, _ = imported(tmp_path, [value], map=fields)
    (turn,) = turns.to_pylist()
    assert (turn["session_id"], turn["finish_reason"]) == ("3", "stop")
    found = turn["output_ids"], turn["output_logprobs"]
    assert found == (([5], [-1.0]) if "own" in fields else ([3, 4], [-0.5, -0.25]))


# --- where files come from


@pytest.mark.parametrize(
    "name", ["log.jsonl", "log.JSON", "log.ndjson", "log.txt", "log.json.gz", "log.zst"]
)
@pytest.mark.parametrize("separator", [None, "\n", "\r\n"])
def test_json_is_lines_or_an_array_under_any_name(tmp_path, name, separator):
    calls = [{**foreign.plain_record(RECORD), "request_id": k} for k in range(2)]
    text = json.dumps(calls, indent=1)
    if separator:
        text = separator.join(map(json.dumps, calls))
    codec = {"gz": "gzip", "zst": "zstd"}.get(name.rpartition(".")[2])
    path = tmp_path / name
    with pa.output_stream(path, compression=codec) as file:
        # a mark of the order of bytes is passed over
        file.write(b"\xef\xbb\xbf" + text.encode())
    for source in [path, tmp_path][: 1 + (name not in ("log.txt", "log.zst"))]:
        turns, report = tk.import_turns(source)
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


# --- logs as people write them


def answer():
    return foreign.chat_response(RECORD) | {"id": "c"}


ASKED = [USER]
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


# --- replies that only later requests have


def talk(session, prompt, output, *said):
    roles = ("user", "assistant")
    messages = [{"role": roles[k % 2], "content": text} for k, text in enumerate(said)]
    ids = {"prompt_token_ids": prompt, "token_ids": output, "logprobs": None}
    return {"session_id": session, "messages": messages, **ids}


FIRST, SECOND = talk("s", [1], [2], "q"), talk("s", [1], [3], "q")


@pytest.mark.parametrize(
    ("lines", "replies", "found", "parents"),
    [
        pytest.param(
            [
                FIRST,
                talk("t", [1], [2], "q"),
                # with drift: its tokens are not those that were sampled
                talk("s", [1, 9, 3], [4], "q", "a", "more"),
                talk("s", [1, 9, 3, 4, 5], [6], "q", "a", "more", "b", "end"),
                talk("t", [1, 2, 3], [4], "q", "A", "more"),
            ],
            ["a", "b", None, "A", None],
            ["reply_of_a_request"] * 3,
            [None, 0, 1, None, 0],
            id="a later request has the reply",
        ),
        pytest.param(
            [FIRST, SECOND, talk("s", [1, 3, 5], [6], "q", "a", "more")],
            [None, "a", None],
            ["reply_of_a_request"],
            [None, None, 1],
            id="tokens tell which of equal requests went on",
        ),
        pytest.param(
            [FIRST, SECOND, talk("s", [1, 9, 5], [6], "q", "a", "more")],
            [None] * 3,
            ["no_reply"] * 3,
            [None, None, 0],
            id="with drift nothing tells",
        ),
        pytest.param(
            [FIRST, talk("s", [1, 2, 3], [4], "other")],
            [None] * 2,
            ["no_reply"] * 2,
            [None, 0],
            id="no request repeats the messages",
        ),
        pytest.param([FIRST], [None], [], [None], id="one call"),
    ],
)
def test_replies_that_only_later_requests_have(
    tmp_path, lines, replies, found, parents
):
    turns, report = imported(tmp_path, lines)
    bodies = [one and json.loads(one["body"]) for one in turns["response"].to_pylist()]
    assert [one and one["content"] for one in bodies] == replies
    told = [row["problem"] for row in report if row["problem"] != "no_logprobs"]
    assert told == found
    # messages without a reply are left out, so that tokens find the parents
    assert turns["messages"].null_count == found.count("no_reply")
    assert tk.link(turns)["parent"].to_pylist() == parents


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


def test_a_first_record_without_ids_hides_no_format(tmp_path):
    good = foreign.plain_record(RECORD)
    odd = [{**good, "token_ids": ids} for ids in (None, "3")]
    first = [{"event": "start"}, *odd]
    for n in range(1, 4):
        foreign.write_lines(tmp_path / "log.jsonl", [*first[:n], good])
        turns, report = tk.import_turns(tmp_path / "log.jsonl")
        assert turns.num_rows == 1
        assert [row["kept"] for row in report.to_pylist()].count(False) == n
