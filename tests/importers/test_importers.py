import contextlib
import gzip
import json
import zipfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trajkit as tk
from tests.importers import foreign
from tests.importers.logs import (
    ANSWER,
    NODE,
    PAGE,
    RECORD,
    REPLY,
    USER,
    log_line,
)
from tests.strategies import runs, transcripts
from trajkit.cli import main
from trajkit.errors import ArgumentError, FormatError, InvalidTurnsError
from trajkit.files.run import Watch
from trajkit.importers import FORMATS
from trajkit.importers.containers import head_of
from trajkit.importers.formats import fitting
from trajkit.importers.reader import EXTRAS
from trajkit.schema import IMPORT_REPORT, TURNS
from trajkit.tables import limits

ROOT = Path(__file__).parents[2]

# what every format carries
CORE = ("session_id", "prompt_ids", "output_ids", "output_logprobs")
TALK = ("messages", "response", "use_tool", "finish_reason")

in_files = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    max_examples=25,
    deadline=None,
)


def recorded(records):
    """Records that a foreign format can hold, and the turns that they are.

    A prompt has a token, a list of messages is not empty, and so are no logprobs.
    """
    kept = []
    for record in records:
        kept.append(
            {
                "session_id": record["session_id"] or "s",
                "prompt_ids": list(record["prompt_ids"]) or [1],
                "output_ids": list(record["output_ids"]),
                "output_logprobs": list(record.get("output_logprobs") or ()) or None,
                "prompt_messages": record.get("prompt_messages") or None,
                "response_message": record.get("response_message"),
                "finish_reason": record.get("finish_reason") or None,
            }
        )
    return kept


def whole(records):
    """Of `recorded`, those whose output has tokens and logprobs, without nulls."""
    return [
        {
            **record,
            "output_ids": record["output_ids"] or [2],
            "output_logprobs": [-0.5] * len(record["output_ids"] or [2]),
        }
        for record in recorded(records)
    ]


def same(turns, records, names=CORE + TALK):
    """Whether imported turns are those of records, in what the format carries."""
    # without a reply it is unknown whether it calls a tool
    expected = tk.from_records(
        r if r.get("response_message") else {**r, "use_tool": None} for r in records
    )
    assert turns.schema.names == [*TURNS.names, *EXTRAS.names]
    assert turns.select(list(names)).equals(expected.select(list(names)))


def problems(report):
    assert all(f"`{name}`" in PAGE for name in report["problem"].to_pylist())
    return [
        (row["place"], row["problem"], row["kept"])
        for row in report.to_pylist()
        if row["problem"] != "other_file"
    ]


@pytest.fixture
def fresh(tmp_path_factory):
    """A function that makes an empty folder."""
    return lambda: tmp_path_factory.mktemp("import")


def of_one_session(records):
    return [{**record, "session_id": "s"} for record in recorded(records)]


# a writer, the records that it can hold, and the columns that it carries
TRIPS = {
    **{
        shape: (
            partial(foreign.write_openai, shape=shape),
            whole if "without" in shape else recorded,
            CORE + (TALK if "chat" in shape else ("finish_reason",)),
        )
        for shape in foreign.RESPONSES
    },
    "polar": (foreign.write_polar, recorded, CORE + TALK),
    "nemo": (foreign.write_nemo, whole, CORE),
    "rllm": (foreign.write_rllm, whole, CORE + TALK),
    "chained": (partial(foreign.write_rllm, chained=True), whole, CORE + TALK),
    "atif": (foreign.write_atif, whole, CORE),
    # its samples are sorted by name
    "inspect": (foreign.write_inspect, of_one_session, CORE[1:] + TALK),
    "langfuse": (foreign.write_langfuse, recorded, CORE + TALK),
    "otel": (foreign.write_otel, whole, CORE),
    "records": (foreign.write_plain, recorded, CORE),
    "responses": (foreign.write_responses, recorded, (*CORE, "finish_reason")),
}


@pytest.mark.parametrize("name", TRIPS)
@settings(in_files, max_examples=12)
@given(records=runs())
def test_formats_carry_calls(fresh, name, records):
    write, kind, names = TRIPS[name]
    folder, records = fresh(), kind(records)
    if not records:
        return
    write(folder, records)
    turns, report = tk.import_turns(folder)
    same(turns, records, names)
    silent = [one["output_logprobs"] for one in records if one["output_ids"]]
    lines = [problem for _, problem, _ in problems(report)]
    assert lines.count("no_logprobs") == sum(None in (one or [None]) for one in silent)
    notes = {"reply_of_a_request", "no_reply", "repeated_call"}
    assert set(lines) <= {"no_logprobs", *notes}
    if "sglang" in name:
        assert turns["weight_versions"].to_pylist() == [
            [{"version": "w", "start": 0, "stop": n}] if n else None
            for n in map(len, turns["output_ids"].to_pylist())
        ]


@st.composite
def graphs(draw):
    """Nodes of a trace, and the calls that they are."""
    nodes, paths, calls = [], [], []
    ids = st.lists(st.integers(0, 9), min_size=1, max_size=4)
    for k in range(draw(st.integers(1, 8))):
        parent = draw(st.none() | st.integers(0, k - 1)) if k else None
        messages, path = ([], []) if parent is None else paths[parent]
        sampled = draw(st.booleans()) and parent is not None
        message = {"role": "assistant" if sampled else "user", "content": str(k)}
        scaffold = draw(ids)
        output = draw(ids) if sampled else []
        logprobs = [-0.25] * len(output)
        nodes.append(
            {
                "parent": parent,
                "message": message,
                "sampled": sampled,
                "token_ids": scaffold + output,
                "mask": [False] * len(scaffold) + [True] * len(output),
                "logprobs": logprobs,
                "finish_reason": "stop" if sampled else None,
            }
        )
        paths.append(([*messages, message], path + scaffold + output))
        if sampled:
            calls.append(
                {
                    "session_id": "s",
                    "prompt_ids": path + scaffold,
                    "output_ids": output,
                    "output_logprobs": logprobs,
                    "prompt_messages": messages,
                    "response_message": message,
                    "finish_reason": "stop",
                }
            )
    return nodes, calls


@in_files
@given(graphs())
def test_graphs_of_verifiers(fresh, graph):
    nodes, calls = graph
    folder = fresh()
    foreign.write_graphs(folder, [("s", nodes)])
    turns, report = tk.import_turns(folder)
    same(turns, calls)
    # siblings may be equal
    found = [one for one in problems(report) if one[1] != "repeated_call"]
    assert found == ([] if calls else [("file", "empty", False)])
    assert set(turns["reward"].to_pylist()) <= {2.0}
    assert set(turns["group_id"].to_pylist()) <= {"k"}


@st.composite
def slime_samples(draw):
    """A sample, and the calls that its loss mask trains."""
    index = draw(st.integers(0, 99))
    prompt = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    tokens, mask, logprobs, calls = list(prompt), [], [], []
    for k in range(draw(st.integers(1, 4))):
        gap = draw(st.lists(st.integers(0, 9), min_size=int(k > 0), max_size=3))
        tokens, mask = tokens + gap, mask + [0] * len(gap)
        logprobs += [0.0] * len(gap)
        output = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
        calls.append(
            {
                "session_id": f"3/{index}",
                "prompt_ids": list(tokens),
                "output_ids": output,
                "output_logprobs": [-0.5] * len(output),
            }
        )
        tokens, mask = tokens + output, mask + [1] * len(output)
        logprobs += [-0.5] * len(output)
    calls[-1]["finish_reason"] = "length"
    sample = {
        "index": index,
        "group_index": 4,
        "tokens": tokens,
        "response_length": len(mask),
        "loss_mask": mask,
        "rollout_log_probs": logprobs,
        "status": "truncated",
        "reward": 1.0,
        "weight_versions": ["7", "7"],
        "remove_sample": False,
        "metadata": {},
    }
    return sample, calls


@pytest.mark.parametrize("tensors", [False, True])
@in_files
@given(drawn=st.lists(slime_samples(), max_size=4, unique_by=lambda s: s[0]["index"]))
def test_slime_dumps(fresh, tensors, drawn):
    folder = fresh()
    foreign.write_slime(folder, [sample for sample, _ in drawn], tensors=tensors)
    turns, report = tk.import_turns(folder)
    calls = [call for _, made in drawn for call in made]
    same(turns, calls, (*CORE, "finish_reason"))
    assert problems(report) == ([] if drawn else [("file", "empty", False)])
    assert set(turns["group_id"].to_pylist()) <= {"4"}


class Letters:
    """A tokenizer of code points whose template drops what earlier replies thought."""

    def encode(self, text, *, add_special_tokens):
        return [ord(c) for c in text]

    def decode(self, ids, *, skip_special_tokens):
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages, *, tools, add_generation_prompt, tokenize):
        if any(message["content"] == "refuse" for message in messages):
            raise ValueError("no such message")
        *before, last = messages
        text = "".join(f"<{m['role']}>{m['content'].lower()}" for m in before)
        text += f"<{last['role']}>{last['content']}"
        return text + "<assistant>" * add_generation_prompt


@in_files
@given(transcripts())
def test_every_reply_that_something_precedes_is_a_call(tmp_path, conversations):
    tokenizer = Letters()
    expected = []
    for number, messages in enumerate(conversations, 1):
        for k, message in enumerate(messages):
            if message["role"] != "assistant" or k == 0:
                continue
            prompt, whole = (
                tokenizer.apply_chat_template(
                    said, tools=None, add_generation_prompt=asks, tokenize=False
                )
                for said, asks in ((messages[:k], True), (messages[: k + 1], False))
            )
            if whole.startswith(prompt):
                name = f"sft.jsonl, line {number}"
                reply = whole.removeprefix(prompt)
                expected.append((name, [*map(ord, prompt)], [*map(ord, reply)]))
    foreign.write_chats(tmp_path, conversations)
    file = tmp_path / "sft.jsonl"
    turns, report = tk.import_turns(file, "chat", tokenizer=tokenizer)
    got = turns.select(["session_id", "prompt_ids", "output_ids"]).to_pylist()
    assert [tuple(turn.values()) for turn in got] == expected
    assert turns["sampled"].to_pylist() == [False] * len(expected)
    assert turns["call_kind"].to_pylist() == ["transcript"] * len(expected)
    assert turns["output_logprobs"].null_count == len(expected)
    told = [
        (row["problem"], row["kept"])
        for row in report.to_pylist()
        # its tokens are code points, none of them special
        if row["problem"] not in ("no_end_token", "empty")
    ]
    assert told.count(("not_sampled", True)) == len(expected)
    replies = sum(m["role"] == "assistant" for said in conversations for m in said)
    silent = sum(all(m["role"] != "assistant" for m in said) for said in conversations)
    assert len(told) == replies + silent


def test_transcripts_in_the_form_of_sharegpt(tmp_path):
    spoken = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    foreign.write_lines(tmp_path / "x.jsonl", [{"conversations": spoken, "id": 5}])
    (turn,) = tk.import_turns(tmp_path, tokenizer=Letters())[0].to_pylist()
    assert turn["session_id"] == "5"
    assert turn["messages"][0]["body"] == '{"content":"q","role":"user"}'


def test_a_reply_that_the_template_changes_or_refuses_is_left_out(tmp_path):
    class Stubborn(Letters):
        def apply_chat_template(self, messages, **options):
            text = super().apply_chat_template(messages, **options)
            return text if options["add_generation_prompt"] else f"<s>{text}"

    user, reply = TALK_OF_TWO
    refused = [{**user, "content": "refuse"}, reply]
    foreign.write_chats(tmp_path, [TALK_OF_TWO, refused, [user, 5], []])
    turns, report = tk.import_turns(tmp_path, tokenizer=Stubborn())
    assert len(turns) == 0
    assert problems(report) == [
        ("line 1, message 1", "not_a_prefix", False),
        ("line 2, message 1", "refused", False),
        ("line 3", "unreadable", False),
        ("line 4", "no_output_ids", False),
    ]


SAMPLE = {"index": 0, "tokens": [1, 2, 3], "response_length": 1, "loss_mask": None}
TALK_OF_TWO = [USER, ANSWER]
# what writes a file of each format
WRITERS = {
    **{
        name: lambda folder, write=write: write(folder, [RECORD])
        for name, (write, *_) in TRIPS.items()
    },
    "openai": lambda folder: foreign.write_openai(folder, [RECORD]),
    "verifiers": lambda folder: foreign.write_graphs(folder, [("s", [NODE, REPLY])]),
    "slime": lambda folder: foreign.write_slime(folder, [SAMPLE]),
    "chat": lambda folder: foreign.write_chats(folder, [TALK_OF_TWO]),
    "sweagent": lambda folder: foreign.write_sweagent(folder, TALK_OF_TWO),
    "openhands": foreign.write_openhands,
    "verl": foreign.write_verl,
    "verl-loop": lambda folder: foreign.write_lines(
        folder / "loop.jsonl", [foreign.agent_loop(RECORD)]
    ),
}
# formats of text
TEXT = ("chat", "sweagent", "openhands", "verl")


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_known_by_its_files_alone(tmp_path, name):
    WRITERS[name](tmp_path)
    files = [file for file in sorted(tmp_path.rglob("*")) if file.is_file()]
    known = [[one.name for one in fitting(head_of(file))] for file in files]
    assert [names for names in known if names]
    assert all(names in ([name], []) for names in known)


def places(value, path=()):
    """Every place in a value."""
    yield path
    if isinstance(value, dict):
        for key, within in value.items():
            yield from places(within, (*path, key))
    elif isinstance(value, list):
        for k, within in enumerate(value):
            yield from places(within, (*path, k))


def put(value, path, odd):
    if not path:
        return odd
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = put(copy[path[0]], path[1:], odd)
    return copy


def damaged(tmp_path, name, lines, format="auto"):
    path = tmp_path / name
    path.write_bytes(b"\n".join(lines))
    turns, report = tk.import_turns(path, format)
    assert report.schema.equals(IMPORT_REPORT, check_metadata=True)
    return turns, problems(report)


# problems of records that are kept
KEPT = {"no_logprobs", "logprobs_unaligned", "versions_unplaced"}


def expected(place, pairs):
    """The lines of a report on records, of which each stands before its problem."""
    several = [(k, one.split()) for k, (_, one) in enumerate(pairs, place == "line {}")]
    return [
        (place.format(k), problem, problem in KEPT)
        for k, problems in several
        for problem in problems
    ]


def changed(change):
    """The line of a log whose response was changed."""
    response = foreign.chat_response(RECORD)
    change(response, response["choices"][0])
    return log_line(response=response)


def no_output(response, choice):
    del choice["token_ids"], choice["logprobs"]


def test_damaged_logs_are_counted_with_place_and_reason(tmp_path):
    short = foreign.completion_response({**RECORD, "output_ids": [3, 5]})
    short["choices"][0]["logprobs"]["token_logprobs"] = [-1.0]
    lines = [
        (log_line(), ""),
        (b"{broken", "unreadable"),
        (b"", ""),
        (b"[1]", "unreadable"),
        (changed(no_output), "no_output_ids"),
        (changed(lambda one, _: one.pop("prompt_token_ids")), "no_prompt_ids"),
        (log_line({"prompt_ids": [1, 2**31]}), "invalid"),
        (log_line({"output_logprobs": [0.5, -1.0]}), "invalid"),
        (
            changed(
                lambda _, one: one["logprobs"]["content"][0].update(token="token_id:9")
            ),
            "logprobs_unaligned",
        ),
        (log_line(response=short), "logprobs_unaligned"),
        (log_line(response={"choices": []}), "no_prompt_ids"),
        (log_line(response={"choices": [7]}), "unreadable"),
        (log_line(response="no"), "unreadable"),
        (log_line(session_id=None), "no_session_id"),
        (log_line({"output_ids": [5], "output_logprobs": None}), "no_logprobs"),
        (log_line()[:-3], "torn"),
    ]
    turns, found = damaged(tmp_path, "log.jsonl", [one for one, _ in lines])
    assert sorted(found) == sorted(expected("line {}", lines))
    # what was left out has its number
    assert turns["session_id"].to_pylist() == ["s"] * 4
    assert turns["turn_index"].to_pylist() == [0, 5, 6, 10]


ENTRIES = "response.meta_info.output_token_logprobs"


@pytest.mark.parametrize(
    ("native", "path", "value", "logprobs", "found"),
    [
        (False, "request.messages", "hi", [], ["invalid"]),
        (False, "request.messages", {"role": "user"}, [], ["invalid"]),
        (False, "request.messages", 5, [], ["invalid"]),
        (True, ENTRIES, [[-0.5, 3], [None, 4]], [-0.5, None], ["no_logprobs"]),
        (True, ENTRIES, [[-0.5], ["x"]], [None, None], ["no_logprobs"]),
        (True, ENTRIES, [5, None], [None, None], ["no_logprobs"]),
        (True, ENTRIES, [[-9999.0, 3], [-1.0, 4]], [], ["invalid"]),
        # the form that Polar's normaliser takes beside lists
        (
            True,
            ENTRIES,
            [{"logprob": -0.5, "token_id": 3}, {"logprob": -0.25, "token_id": 4}],
            [-0.5, -0.25],
            [],
        ),
    ],
)
def test_odd_parts_of_a_record(tmp_path, native, path, value, logprobs, found):
    line = json.loads(native_line(foreign.native_response(RECORD)))
    line = put(line if native else json.loads(log_line()), path.split("."), value)
    turns, told = damaged(tmp_path, "log.jsonl", [json.dumps(line).encode()])
    assert turns["output_logprobs"].to_pylist() == ([logprobs] if logprobs else [])
    assert [problem for _, problem, _ in told] == found
    if found == ["invalid"] and native:
        turns, _ = tk.import_turns(tmp_path / "log.jsonl", nonfinite_logprobs="null")
        assert turns["output_logprobs"].to_pylist() == [[None, -1.0]]
    if native and not found:
        line = put(line, ["response", "output_ids"], None)
        turns, _ = damaged(tmp_path, "log.jsonl", [json.dumps(line).encode()])
        assert turns["output_ids"].to_pylist() == [[3, 4]]


def test_where_a_response_says_its_prompt_and_its_weights(tmp_path):
    """A choice's own ids come first, and its own weights."""
    response = foreign.sglang_chat_response(RECORD)
    response["choices"][0]["input_token_ids"] = [7]
    response["prompt_token_ids"] = [8]
    del response["choices"][0]["meta_info"]["weight_version"]
    response["metadata"] = {"weight_version": "c"}
    pieces = [{"version": "a", "start": 0, "end": 2}]
    lines = [log_line(response=response)]
    response["metadata"]["weight_versions"] = pieces
    lines.append(log_line(response=response))
    response["choices"][0]["meta_info"]["weight_version"] = "b"
    del response["choices"][0]["input_token_ids"], response["metadata"]
    lines.append(log_line(response=response))
    turns, _ = damaged(tmp_path, "log.jsonl", lines)
    assert turns["prompt_ids"].to_pylist() == [[7], [7], [1, 2]]
    assert turns["weight_versions"].to_pylist() == [
        [{"version": version, "start": 0, "stop": 2}] for version in "cab"
    ]


def test_what_polar_cut_short_is_left_out(tmp_path):
    whole = foreign.polar_completion(RECORD, 0)
    cut = foreign.polar_completion(RECORD, 1)
    cut["response"] = {"__truncated": True, "_truncated_keys_omitted": ["choices"]}
    listed = foreign.polar_completion(RECORD, 2)
    listed["response"]["choices"][0]["token_ids"] = [1, {"__truncated": True}]
    empty = {"completion_id": "x", "session_id": "s"}
    session = {"session_id": "s", "completions": [listed, cut, whole, empty, 3]}
    turns, found = damaged(tmp_path, "session.json", [json.dumps(session).encode()])
    assert found == [
        ("line 1, item 3", "unreadable", False),
        ("line 1, item 4", "unreadable", False),
        ("line 1, item 1", "truncated", False),
        ("line 1, item 0", "truncated", False),
    ]
    assert turns["turn_index"].to_pylist() == [2]
    assert turns["ended_at"][0].as_py().isoformat() == "2026-01-01T00:00:00+00:00"


def test_newer_entries_of_a_capture_are_named(tmp_path):
    entries = [foreign.nemo_entry(RECORD, k) for k in range(3)]
    entries[1]["schema_version"] = 6
    del entries[2]["generation_token_ids"]
    foreign.write_lines(tmp_path / "s.tokens.jsonl", entries)
    turns, report = tk.import_turns(tmp_path)
    assert problems(report) == [
        ("line 2", "other_version", False),
        ("line 3", "no_output_ids", False),
    ]
    assert turns["request_id"].to_pylist() == ["c0"]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        # no ids are no empty reply
        ({"completion_token_ids": []}, "no_output_ids"),
        ({"parent_trace_id": "t9"}, "no_parent"),
        *(
            ({"prompt_delta_token_ids": odd}, "unreadable")
            for odd in ({"a": 1}, "ids", 5, True)
        ),
    ],
)
def test_damaged_traces(tmp_path, changes, found):
    more = {**RECORD, "prompt_ids": [1, 2, 3, 4, 5]}
    foreign.write_rllm(tmp_path, [RECORD, more, RECORD], chained=True)
    path = tmp_path / "traces.jsonl"
    traces = [*map(json.loads, path.read_text().splitlines())]
    foreign.write_lines(path, [traces[0], traces[1] | changes, traces[2]])
    turns, report = tk.import_turns(tmp_path)
    assert problems(report) == [("line 2", found, False)]
    assert turns["turn_index"].to_pylist() == [0, 2]


def test_damaged_graphs(tmp_path):
    odd = ({"a": 1}, "ids", 5)
    nodes = [
        (NODE, ""),
        (REPLY, ""),
        ({**REPLY, "mask": [True]}, "unreadable"),
        ({**REPLY, "mask": [True, False]}, "unreadable"),
        ({**REPLY, "token_ids": [], "mask": []}, "no_output_ids"),
        ({**REPLY, "token_ids": [2, "x"]}, "unreadable"),
        ({**NODE, "parent": 4}, ""),
        *(({**REPLY, "parent": one}, "no_prompt_ids") for one in (6, 99, -9)),
        ({**REPLY, "logprobs": []}, "no_logprobs"),
        ({**REPLY, "token_ids": [2, 4], "logprobs": [-1, -1]}, "logprobs_unaligned"),
        (7, ""),
        *(({**NODE, "token_ids": one}, "") for one in odd),
        *(({**REPLY, "parent": one}, "no_prompt_ids") for one in (13, 14, 15)),
    ]
    foreign.write_graphs(tmp_path, [("s", [one for one, _ in nodes])])
    turns, report = tk.import_turns(tmp_path)
    assert problems(report) == expected("line 1, node {}", nodes)
    assert turns["output_ids"].to_pylist() == [[3], [3], [4]]


def test_damaged_dumps(tmp_path):
    changes = [
        ({}, "no_logprobs"),
        ({"tokens": None}, "no_prompt_ids"),
        ({"response_length": 4}, "unreadable"),
        ({"loss_mask": [1, 1]}, "unreadable"),
        ({"loss_mask": [0]}, "no_output_ids"),
        ({"rollout_log_probs": [-1.0, -1.0]}, "logprobs_unaligned"),
        ({"weight_versions": ["1", "2"]}, "versions_unplaced no_logprobs"),
        ({"remove_sample": True, "status": "aborted"}, "no_logprobs"),
        (None, "unreadable"),
        ({"response_length": True}, "unreadable"),
        ({"response_length": 2, "rollout_log_probs": [None, -1.0]}, "no_logprobs"),
    ]
    samples = [
        None if one is None else {**SAMPLE, "index": k, **one}
        for k, (one, _) in enumerate(changes)
    ]
    foreign.write_slime(tmp_path, samples)
    turns, report = tk.import_turns(tmp_path)
    assert problems(report) == expected("sample {}", changes)
    assert set(turns["finish_reason"].to_pylist()) == {None, "abort"}
    aborted = turns.filter(pc.is_valid(turns["finish_reason"]))
    assert aborted["trainable"].to_pylist() == [False]
    assert turns["trainable"].null_count == len(turns) - 1
    assert [None, -1.0] in turns["output_logprobs"].to_pylist()


def test_a_pickle_is_data_and_nothing_in_it_is_called(tmp_path):
    called = tmp_path / "called"
    evil = foreign.Call("os", "mkdir", str(called))
    worse = foreign.Call("builtins", "exec", f"open({str(called)!r}, 'w')")
    kept = {
        "metadata": {"a": evil, "b": [worse], "c": foreign.Call("x.y", "Z", state={})}
    }
    foreign.write_slime(tmp_path, [{**SAMPLE, **kept}])
    turns, _ = tk.import_turns(tmp_path)
    assert turns["prompt_ids"].to_pylist() == [[1, 2]]
    assert not called.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02",
        b"\x80\x02]q\x00(",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00}b.",
        b"\x80\x02X\x01\x00\x00\x00aQ.",
        b"PK\3\4 and no more",
        b"PK\5\6" + bytes(18),
        None,
    ],
)
def test_a_damaged_pickle_is_refused(tmp_path, content):
    path = tmp_path / "x.pt"
    if content is None:
        # a tensor beyond its numbers
        stored = np.array([1, 2])
        wide = ("torch._utils", "_rebuild_tensor_v2", stored, 0, (3,), (1,))
        foreign.save(path, {"samples": [{"tokens": foreign.Call(*wide)}]})
    else:
        path.write_bytes(content)
    with pytest.raises(
        FormatError, match=r"readable pickle|beyond its storage|a zip file"
    ):
        tk.import_turns(path)


@pytest.mark.parametrize("suffix", [".pt", ".pkl", ".eval", ".parquet"])
def test_a_damaged_beginning_makes_a_binary_file_no_text(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(b"\0K\3\4\n" + b"\xff\n" * 20)
    with pytest.raises(FormatError, match=r"not a readable|not valid Parquet"):
        tk.import_turns(path)


@pytest.mark.parametrize("name", FORMATS)
@settings(in_files, max_examples=12)
@given(at=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_one_wrong_byte_is_told_and_nothing_worse(fresh, name, at, value):
    folder = fresh()
    WRITERS[name](folder)
    file = min(one for one in folder.rglob("*") if one.is_file())
    content = bytearray(file.read_bytes())
    content[int(at * len(content))] = value
    file.write_bytes(content)
    with contextlib.suppress(FormatError):
        turns, report = tk.import_turns(file, name, tokenizer=Letters())
        assert len(turns) + len(report) < 6


def test_files_of_no_format_or_of_several_are_refused(tmp_path):
    with pytest.raises(FormatError, match="contains no file of a known format"):
        tk.import_turns(tmp_path)
    tk.write_turns(tk.from_records([RECORD]), tmp_path / "turns.jsonl")
    with pytest.raises(FormatError, match="use read_turns"):
        tk.import_turns(tmp_path / "turns.jsonl")
    (tmp_path / "empty.json").write_text("")
    with pytest.raises(InvalidTurnsError, match="no calls, nothing to do"):
        tk.import_turns(tmp_path / "empty.json")
    tar = b"log.jsonl".ljust(257, b"\0") + b"ustar"
    for packed in (b"BZh9", b"\xfd7zXZ\0", tar, gzip.compress(tar)):
        (tmp_path / "packed").write_bytes(packed)
        with pytest.raises(FormatError, match=r"packed by (bzip2|xz|tar): unpack"):
            tk.import_turns(tmp_path / "packed", map="session_id=session_id")
    (tmp_path / "packed").unlink()
    foreign.write_openai(tmp_path, [RECORD])
    turns, report = tk.import_turns(tmp_path)
    assert len(turns) == 1
    assert report["problem"].to_pylist() == ["other_file"] * 2
    foreign.write_nemo(tmp_path, [RECORD])
    with pytest.raises(
        FormatError, match=r"formats, nemo \(.*tokens.jsonl\), openai \("
    ):
        tk.import_turns(tmp_path)
    turns, _ = tk.import_turns(tmp_path, "nemo")
    assert len(turns) == 1
    value = {"session_id": "s", "completions": [], "request": {}, "response": {}}
    foreign.write_lines(tmp_path / "x.jsonl", [value])
    with pytest.raises(FormatError, match=r"fits several formats, openai .*, polar"):
        tk.import_turns(tmp_path / "x.jsonl")


def test_the_command_writes_turns_and_says_what_is_missing(tmp_path, capsys):
    silent = {**RECORD, "output_logprobs": None}
    foreign.write_openai(tmp_path, [RECORD, silent])
    out, listed = tmp_path / "turns.parquet", tmp_path / "report.parquet"
    source = str(tmp_path / "log.jsonl")
    arguments = ["import", source, "-o", str(out), "--report", str(listed)]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "sessions 1, turns 2" in said
    assert "no_logprobs  kept        1" in said
    assert f"{source}, line 2" in said
    assert tk.read_turns(out).equals(tk.import_turns(source)[0])
    assert pq.read_table(listed).num_rows == 1
    assert main([*arguments, "--json", "--from", "openai"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["turns"], told["problems"][0]["count"]) == (2, 1)


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_the_command_takes_a_tokenizer_for_transcripts(tmp_path, capsys):
    model = ROOT / "shim/trajkit_shim/engines/embedded"
    foreign.write_chats(tmp_path, [TALK_OF_TWO])
    out = tmp_path / "turns.parquet"
    arguments = f"import --from chat {tmp_path}/sft.jsonl -o {out}".split()
    template = ["--chat-template", str(model / "chat_template.jinja")]
    tokenizer = ["--tokenizer", str(model / "tokenizer.json")]
    assert main(arguments) == 3
    assert main([*arguments, *template]) == 2
    assert main([*arguments, *tokenizer]) == 2
    assert "no chat template" in capsys.readouterr().err
    assert main([*arguments, *tokenizer, *template]) == 0
    turns = tk.read_turns(out)
    assert turns["sampled"].to_pylist() == [False]
    assert main([*arguments, "--tokenizer", str(tmp_path / "none")]) == 3


def test_the_page_names_every_format_and_column():
    names = [*FORMATS, *EXTRAS.names]
    assert [name for name in names if f"`{name}`" not in PAGE] == []


# --- into a file, without holding the turns


@pytest.fixture
def few_at_a_time(monkeypatch):
    monkeypatch.setattr(limits, "IMPORTED_RECORDS", 2)
    monkeypatch.setattr(limits, "READ_TOKENS", 600)
    monkeypatch.setattr(limits, "BUCKET_BYTES", 400)
    monkeypatch.setattr(limits, "SPILL_BYTES", 200)


@pytest.mark.parametrize("name", FORMATS)
def test_files_are_imported_as_their_turns(tmp_path, few_at_a_time, name):
    source, output = tmp_path / "in", tmp_path / "turns.parquet"
    source.mkdir()
    WRITERS[name](source)
    options = {"tokenizer": Letters()} if name in TEXT else {}
    if name in ("openhands", "verl"):
        with pytest.raises(FormatError, match="without token ids"):
            tk.importers.import_file(source, output, name, **options)
        return
    turns, report = tk.import_turns(source, name, **options)
    begun = []
    watch = Watch(lambda index, done: begun.append(index.n_turns))
    totals, told = tk.importers.import_file(
        source, output, name, watch=watch, **options
    )
    assert told.equals(report)
    assert tk.read_turns(output).equals(turns)
    n_sessions = len(turns["session_id"].unique())
    assert totals == {"sessions": n_sessions, "turns": len(turns)}
    assert begun == [len(turns)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", output.name]


def test_sessions_of_an_import_are_gathered(tmp_path, few_at_a_time):
    lines = [log_line(session_id=f"s{k % 7}") for k in range(40)]
    (tmp_path / "log.jsonl").write_bytes(b"\n".join(lines))
    output = tmp_path / "turns.parquet"
    totals, _ = tk.importers.import_file(tmp_path / "log.jsonl", output)
    assert totals == {"sessions": 7, "turns": 40}
    assert tk.read_turns(output).equals(tk.import_turns(tmp_path / "log.jsonl")[0])
    assert pq.read_table(output)["session_id"].to_pylist() == sorted(
        f"s{k % 7}" for k in range(40)
    )


def test_an_import_that_fails_leaves_nothing(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(log_line())
    with pytest.raises(FormatError, match="is a directory"):
        tk.importers.import_file(tmp_path / "log.jsonl", f"{tmp_path}/turns/")
    with pytest.raises(ArgumentError, match="suffix"):
        tk.importers.import_file(tmp_path / "log.jsonl", tmp_path / "turns.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


# What a record half says


def native_line(response, request=None):
    asked = {"input_ids": [1, 2]} if request is None else request
    line = {"session_id": "s", "request": asked, "response": response}
    return json.dumps(line).encode()


def test_several_answers_to_one_native_request(tmp_path):
    """SGLang answers ``n`` samples, and lists of prompts, with a list."""
    first, second = (
        foreign.native_response({**RECORD, "output_ids": [k, k]}) for k in (3, 4)
    )
    lines = [
        native_line([first, second]),
        native_line([first, second], {"input_ids": [[1, 2], [5]]}),
        native_line([first, second], {"input_ids": [[1, 2], [5], [6]]}),
        native_line([first, 7]),
    ]
    turns, found = damaged(tmp_path, "log.jsonl", lines)
    assert turns["prompt_ids"].to_pylist() == [[1, 2]] * 3 + [[5], [1, 2]]
    assert [ids[0] for ids in turns["output_ids"].to_pylist()] == [3, 4, 3, 4, 3]
    assert [line for line in found if not line[2]] == [
        ("line 3", "no_prompt_ids", False),
        ("line 3, choice 1", "no_prompt_ids", False),
        ("line 4, choice 1", "unreadable", False),
    ]


def test_what_no_field_reads_is_counted_by_records(tmp_path):
    answers = [foreign.native_response(RECORD)] * 2
    line = json.loads(native_line(answers)) | {"label": "good"}
    (tmp_path / "log.jsonl").write_text(json.dumps(line))
    _, report = tk.import_turns(tmp_path / "log.jsonl")
    assert report["detail"].to_pylist() == [
        "label of 1 record was not read (the first: 'good')"
    ]


def test_a_message_that_is_none_is_named(tmp_path):
    spoken = [{"from": "human", "value": "q"}, {"from": "observation", "value": "a"}]
    lines = [
        {"conversations": spoken},
        {"messages": [{"role": "user", "content": "q"}, {"content": "a"}]},
        {"messages": ["hello"]},
        {"messages": {}},
    ]
    foreign.write_lines(tmp_path / "x.jsonl", lines)
    _, report = tk.import_turns(tmp_path / "x.jsonl", "chat", tokenizer=Letters())
    assert report["problem"].to_pylist() == ["unreadable"] * 4
    assert report["detail"].to_pylist() == [
        "message 1 is from 'observation': expected one of system, user, assistant, "
        "tool, human, gpt",
        "message 1 has no role",
        "message 0 is a str, not an object",
        "its messages are a dict, not a list",
    ]


# Files


def test_a_file_that_its_codec_cannot_read_is_named_as_that(tmp_path):
    path = tmp_path / "0.jsonl.gz"
    path.write_bytes(gzip.compress(log_line() * 1000)[:-20])
    with pytest.raises(FormatError, match=r"0\.jsonl\.gz cannot be decompressed"):
        tk.import_turns(path)
    (tmp_path / "1.jsonl").write_bytes(log_line())
    turns, report = tk.import_turns(tmp_path)
    assert turns.num_rows == 1
    assert report["problem"].to_pylist() == ["other_file"]
    assert "cannot be decompressed" in report["detail"][0].as_py()


def test_an_invalid_record_costs_the_others_nothing(tmp_path):
    """A message that several turns share is stored once, with its first turn."""

    def record(turn, sampled):
        messages = [{"role": "user", "content": str(k)} for k in range(turn + 1)]
        choice = {"token_ids": [sampled], "logprobs": {"content": [{"logprob": -0.5}]}}
        choice |= {"message": {"role": "assistant", "content": "y"}}
        response = {"prompt_token_ids": [*range(10 + turn)], "choices": [choice]}
        request = {"messages": messages}
        return {"session_id": "s", "request": request, "response": response}

    log = tmp_path / "log.jsonl"
    records = [record(turn, -5 if turn == 6 else 1) for turn in range(12)]
    log.write_text("".join(f"{json.dumps(one)}\n" for one in records))
    turns, report = tk.import_turns(log, "openai")
    assert problems(report) == [("line 7", "invalid", False)]
    bodies = [one["body"] for list_ in turns["messages"].to_pylist() for one in list_]
    assert len([body for body in bodies if body is not None]) == 12


# --- wrong types, nulls and numbers beyond any range

ODD = (
    *(None, True, -1, 2**31, 2**64, -(10**30), 1e308, float("nan"), "", "x", "\ud800"),
    *([], [None], [[1]], {}, {"a": None}, [{}], [1, "x"], [-5], "[1", "{"),
)
# files of JSON, or with JSON in a zip file
JSON = [name for name in FORMATS if name != "slime"]


def survives(path, name):
    tokenizer = Letters() if name in TEXT else None
    with contextlib.suppress(FormatError):
        turns, report = tk.import_turns(path, name, tokenizer=tokenizer)
        assert all(report["place"].to_pylist())
        for turn in turns.to_pylist():
            assert all(0 <= token < 2**31 for token in turn["prompt_ids"])


@pytest.mark.parametrize("name", JSON)
@in_files
@given(data=st.data())
def test_one_odd_value_never_ends_an_import(fresh, name, data):
    folder = fresh()
    WRITERS[name](folder)
    kinds = (".json", ".jsonl", ".traj", ".eval")
    path = min(one for one in folder.rglob("*") if one.suffix in kinds)
    if name == "inspect":
        with zipfile.ZipFile(path) as archive:
            (inner,) = [one for one in archive.namelist() if one.startswith("samples/")]
            value = json.loads(archive.read(inner))
    else:
        text = path.read_text()
        value = json.loads(text.splitlines()[-1] if path.suffix == ".jsonl" else text)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.sampled_from(sorted(places(value), key=str)))
        value = put(value, at, data.draw(st.sampled_from(ODD)))
    if name == "inspect":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(inner, json.dumps(value))
            archive.writestr("header.json", "{}")
    else:
        path.write_text(json.dumps(value) + "\n")
    survives(path, name)


def test_deep_nesting_never_ends_an_import(tmp_path):
    deep = "[" * 50_000 + "]" * 50_000
    trace = '{"attributes": ' + deep + ', "traceId": "t", "spanId": "s"}'
    for name, text in (
        ("otel", trace),
        ("openai", '{"session_id": "s", "request": {}, "response": ' + deep + "}"),
        ("records", '{"prompt_ids": [1], "output_ids": [2], "metadata": ' + deep + "}"),
        ("records", '{"prompt_ids": [1], "output_ids": [2], "messages": ' + deep + "}"),
    ):
        (tmp_path / "x.jsonl").write_text(text + "\n")
        survives(tmp_path / "x.jsonl", name)
