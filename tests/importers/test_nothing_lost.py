"""What a source has beside a call is taken, or has a line in the report."""

import json
import shlex
from contextlib import nullcontext

import numpy as np
import pytest

import trajkit as tk
from tests.importers import foreign
from tests.importers.logs import (
    ANSWER,
    CALL,
    IDS,
    NODE,
    RECORD,
    REPLY,
    USER,
    case,
    check,
    imported,
    line,
    lines,
    problems,
)
from trajkit.cli import main
from trajkit.errors import FormatError, LeftOutWarning
from trajkit.importers.reader import UNTRAINED, rounded
from trajkit.turns import tools_key

LONG = {**CALL, "token_ids": [3, 9, 4], "logprobs": [-0.5, -0.25, -0.125]}

# --- masks, numbers of tokens, and failures


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
        ids = {"output_ids": [3, 9, 4], "output_logprobs": None}
        return line(ids, session_id="s", **beside)
    call = {"traceId": "t", "type": "GENERATION", "input": [], **beside}
    return {**call, "metadata": {**LONG, **beside.get("metadata", {})}}


@pytest.mark.parametrize(
    ("kind", "problem", "beside"),
    [
        *(("records", *case) for case in CASES),
        *((kind, *case) for kind in ("openai", "langfuse") for case in CASES[::9]),
    ],
)
def test_what_stands_beside_a_call(tmp_path, kind, problem, beside):
    call = of_format(kind, beside)
    for option in ("untrain", "train"):
        turns, report = imported(tmp_path, [call], contradicted=option)
        assert UNTRAINED & {*problems(report)} == {problem} - {""}
        context = problem == "mask_unread" or (problem and option == "untrain")
        assert turns["trainable"].to_pylist() == [False if context else None]


def usage_of(prompt, output):
    return {"prompt_tokens": prompt, "completion_tokens": output}


def contradicting():
    """Logs of several formats whose numbers of tokens are wrong."""
    chat = foreign.chat_response(RECORD) | {"usage": usage_of(2, 3)}
    named = {"usage": {"input_tokens": 2, "output_tokens": 3}}
    native = foreign.native_response(RECORD)
    native["meta_info"] |= usage_of(2, 1)
    within = foreign.sglang_chat_response(RECORD)
    within["choices"][0]["meta_info"] |= usage_of(9, 2)
    for name, response in {
        "chat": chat,
        "responses": foreign.chat_response(RECORD) | named,
        "sglang": native,
        "sglang chat": within,
    }.items():
        asked = {"input_ids": [1, 2]} if name == "sglang" else {"messages": []}
        value = {"session_id": "s", "request": asked, "response": response}
        yield name, "openai", value
    yield "polar", "polar", foreign.polar_completion(RECORD, 0) | {"response": chat}
    metrics = {"prompt_token_ids": [1], "completion_token_ids": [2], "logprobs": [-1.5]}
    step = {"source": "agent", "metrics": metrics | {"completion_tokens": 7}}
    facts = {"schema_version": "ATIF-v1.7", "session_id": "s", "agent": {}}
    yield "atif", "atif", {**facts, "steps": [step]}
    trace = {"id": "s", "task": {}, "nodes": [NODE, REPLY]}
    yield "verifiers", "verifiers", trace | {"calls": [{"node": 1, "usage": named}]}


@pytest.mark.parametrize(
    ("format", "value"),
    [pytest.param(*rest, id=name) for name, *rest in contradicting()],
)
def test_usage_that_contradicts_the_ids_untrains(tmp_path, format, value):
    turns, report = imported(tmp_path, [value], format)
    assert problems(report) == ["usage_contradicts"]
    assert turns["trainable"].to_pylist() == [False]
    rows = tk.linearize(turns)
    assert not any(any(mask) for mask in rows["loss_mask"].to_pylist())


def test_a_failed_call_is_shown_as_context(tmp_path, capsys):
    foreign.write_lines(tmp_path / "log.jsonl", [{**CALL, "status_code": 429}])
    argv = ["import", str(tmp_path / "log.jsonl"), "-o", str(tmp_path / "t.parquet")]
    assert main(argv) == 0
    assert "context only" in capsys.readouterr().out


# --- what each thing beside a call becomes


def of_choice(**facts):
    """A line whose one choice has more."""
    value = line(session_id="s")
    value["response"]["choices"][0] |= facts
    return value


MASKED = {
    "session_id": "s",
    "prompt_ids": [1],
    "response_ids": [2, 3, 4, 5],
    "response_mask": [1, 0, 0, 1],
    "response_logprobs": [-0.5, 0.0, 0.0, -0.25],
}
VERSIONED = {
    **{name: MASKED[name] for name in ("session_id", "prompt_ids", "response_ids")},
    "response_mask": [1, 0, 1, 1],
}
META = {
    "finish_reason": {"type": "stop"},
    "weight_version": "5",
    "output_token_logprobs": [[-0.5, 3, None]],
}
SEVERAL = line(session_id="s")
SEVERAL["response"] |= {"usage": usage_of(2, 6)}
SEVERAL["response"]["choices"] *= 3


def pieces(*pieces):
    return [{"version": v, "start": start, "stop": stop} for v, start, stop in pieces]


@pytest.mark.parametrize(
    "log",
    [
        case(
            "a mask of a choice",
            [of_choice(loss_mask=[1, 0])],
            ["mask_unread", "unread"],
            "--map output_mask=response.choices.0.loss_mask takes it",
            trainable=[False],
        ),
        case(
            "a mapped mask of a choice",
            [of_choice(loss_mask=[1, 0])],
            map="output_mask=response.choices.0.loss_mask",
            output_ids=[[3]],
        ),
        case(
            "of several choices nothing says how often the prompt counts",
            [SEVERAL],
            output_ids=[[3, 4]] * 3,
        ),
        case(
            "a mask makes spans, and is checked",
            [
                MASKED,
                {**MASKED, "response_mask": [0, 1, 1, 0, 0]},
                *({**MASKED, "response_mask": one} for one in ([1], [2, 0, 0, 0], "x")),
                {**MASKED, "response_mask": [0] * 4},
            ],
            ["unreadable"] * 3 + ["no_output_ids"],
            prompt_ids=[[1], [1, 2, 3, 4], [1]],
            output_ids=[[2], [5], [2, 3]],
            output_logprobs=[[-0.5], [-0.25], [-0.5, 0.0]],
        ),
        case(
            "versions of a span are those of its tokens",
            [{**VERSIONED, "v": [7, 7, 8, 9]}],
            ["no_logprobs"] * 2,
            map="weight_version=v",
            weight_versions=[pieces(("7", 0, 1)), pieces(("8", 0, 1), ("9", 1, 2))],
        ),
        case(
            "versions that are none",
            [{**VERSIONED, "v": [{"version": "7", "start": None, "end": 2}]}],
            ["unreadable"],
            map="weight_versions=v",
        ),
        case(
            "two names of ids that differ",
            [{**CALL, "output_ids": [3]}],
            ["unreadable"],
            "token_ids and output_ids",
        ),
        case(
            "a response beside its session is read whole",
            [
                {
                    "session_id": "s",
                    "input_ids": [1],
                    "output_ids": [3],
                    "meta_info": META,
                }
            ],
            output_logprobs=[[-0.5]],
            finish_reason=["stop"],
            weight_versions=[pieces(("5", 0, 1))],
        ),
        case(
            "an output that begins with its prompt",
            [{**CALL, "prompt_token_ids": [*range(8)], "token_ids": [*range(9)]}],
            ["logprobs_unaligned", "prompt_in_output"],
            trainable=[False],
        ),
        case(
            "an error of a server",
            [
                line(session_id="s"),
                {
                    "session_id": "s",
                    "request": {"messages": [USER]},
                    "response": {"error": {"message": "no memory"}},
                },
            ],
            ["unreadable"],
            ["the response is an error", "no memory"],
            turn_index=[0],
        ),
        case(
            "a text of an error is no finish reason",
            [{**CALL, "error": "the server closed the connection"}],
            ["unread"],
            "error (expected a word",
            map="finish_reason=error",
            finish_reason=[None],
        ),
        case(
            "rewards that no field reads",
            [
                {**CALL, "metadata": {"eval": {"score": 0.5}}, "is_correct": True},
                {"session_id": "s", "reward": 1.0},
            ],
            ["no_prompt_ids", "unread", "unread"],
            ["metadata.eval.score of", "is_correct of", "its reward 1.0"],
        ),
        case(
            "a reward that changes within a session",
            [
                line({"request_id": str(k)}, session_id="s", reward=float(k % 2))
                for k in range(3)
            ],
            ["reward_varies"],
        ),
        case(
            "a later version of ATIF",
            [{"schema_version": "ATIF-v2.0", "session_id": "s", "steps": []}],
            ["other_version"],
        ),
        case(
            "a response without its prompt",
            [
                {
                    "session_id": "s",
                    "request": {"messages": []},
                    "response": {"choices": [{"response_token_ids": [3]}]},
                }
            ],
            ["no_prompt_ids"],
            ["return_prompt_token_ids", "return_token_ids and logprobs (vLLM)"],
        ),
        case(
            "a batch",
            [{"prompt_token_ids": [[1, 2], [1, 3]], "response_ids": [[1], [2]]}],
            ["invalid"],
            "this is a batch: pass one record per call",
        ),
        case(
            "an empty prompt",
            [{**CALL, "prompt_token_ids": []}],
            ["no_prompt_ids"],
            "its prompt_ids are empty",
        ),
        case(
            "lists in lists, by half of their path",
            [{"trajectories": [{"steps": [CALL]}]}],
            ["empty"],
            "each=trajectories.*.steps",
            map="each=trajectories.steps",
        ),
        case(
            "a call whose messages end with the reply",
            [{**CALL, "messages": [USER, ANSWER]}],
            ["no_reply"],
            "messages.-1",
            messages=[None],
        ),
        case(
            "a reply that is neither a message nor a text",
            [{**CALL, "messages": [USER], "answer": 5}],
            ["unread"],
            map="response_message=answer",
        ),
        case(
            "the prompt in the request alone",
            [
                {
                    "session_id": key,
                    "request": {key: [1, 2]},
                    "response": {"choices": [{"token_ids": [5, 6]}]},
                }
                for key in ("prompt_token_ids", "prompt", "input_ids", "other")
            ],
            ["no_logprobs"] * 3 + ["no_prompt_ids"],
            "--map prompt_ids=PATH",
            prompt_ids=[[1, 2]] * 3,
        ),
    ],
)
def test_what_becomes_of_a_log(tmp_path, log):
    check(tmp_path, log)


def test_what_is_left_out_is_not_counted_as_kept(tmp_path):
    _, report = imported(tmp_path, [{**CALL, "score": 1, "token_ids": [3, -9]}, CALL])
    kept = [(one["place"], one["kept"]) for one in report]
    assert ("line 1", False) in kept
    assert ("line 1", True) not in kept


# a key beside a call, its value, the problem, and what takes it
ADVISED = [
    ("loss_mask", [0, 1], "mask_unread", "output_mask=loss_mask"),
    ("my_mask", [0, 1], "mask_unread", "output_mask=my_mask"),
    ("metadata.loss_mask", [0, 1], "mask_unread", "output_mask=metadata.loss_mask"),
    ("loss_mask", [0, 0, 0, 1], "mask_unread", "output_mask=loss_mask"),
    ("response_mask", [1, 1], "unread", "output_mask=response_mask"),
    # the contrary, or none of the output
    ("ignore_mask", [1, 0], "mask_unread", None),
    ("attention_mask", [0, 1], "mask_unread", None),
    ("loss_mask", [1, 1, 1, 0], "mask_unread", None),
    ("prompt_mask", [0, 0], "unread", None),
    ("reward", {"a": 1.0, "b": 0.2}, "reward_unread", "reward=reward.a"),
    *(("reward", one, "reward_unread", None) for one in (True, "1.0", [1.0], 10**400)),
    ("reward", float("nan"), "reward_unread", None),
    *(("score", 0.5, "unread", "reward=score"), ("score", "good", "unread", None)),
    ("scores", {"x": "t", "a b": 1}, "unread", "reward=scores.a b"),
    ("metadata.reward_model_score", 2, "unread", "reward=metadata.reward_model_score"),
    *((key, 1, "unread", None) for key in ("success", "parent_id", "loss")),
    ("uid", "u", "unread", "group_id=uid"),
    ("agent_name", "a", "unread", "agent_id=agent_name"),
    ("is_trainable", 1, "unread", "trainable=is_trainable"),
    ("policy_version", 3, "unread", "weight_version=policy_version"),
    *((key, [[1]], "unread", None) for key in ("advantage", "routed_experts")),
]


@pytest.mark.parametrize(("key", "value", "problem", "advice"), ADVISED)
def test_a_key_that_no_field_reads_has_a_line(tmp_path, key, value, problem, advice):
    outer, _, inner = key.rpartition(".")
    beside = {outer: {inner: value}} if outer else {key: value}
    calls = lines(3, session_id="s", **beside)
    _, report = imported(tmp_path, calls)
    told = [one["detail"] for one in report if one["problem"] == problem]
    # one for all records, or one for each
    assert len(told) == (1 if problem == "unread" else 3)
    assert key in told[0]
    assert ("of 3 records was not read" in told[0]) == (problem == "unread")
    assert {*problems(report)} <= {problem, "unread"}
    # only a field that exists is advised, and takes it
    assert ("--map" in told[0]) == (advice is not None)
    if advice:
        assert f"--map {shlex.quote(advice)} takes" in told[0]
        _, report = imported(tmp_path, calls, map=advice)
        assert problem not in problems(report) or key == "policy_version"


def test_the_command_shows_few_of_many_keys(tmp_path, capsys):
    keys = {f"score_{k}": k for k in range(14)}
    foreign.write_lines(tmp_path / "log.jsonl", [{**CALL, **keys}])
    argv = ["import", str(tmp_path / "log.jsonl"), "-o", str(tmp_path / "t.parquet")]
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert said.count(" was not read") == 10
    assert "4 more keys" in said
    assert "--report" in said


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


# --- parents, and tools


def test_recorded_parents_are_columns(tmp_path):
    entries = [foreign.nemo_entry(RECORD, k) for k in range(3)]
    recorded = [("root", None), ("resolved", "c0"), (None, "c1")]
    for entry, (resolution, parent) in zip(entries, recorded, strict=True):
        entry |= {"parent_call_id": parent, "parent_resolution": resolution}
    turns, report = imported(tmp_path, entries)
    assert report == []
    names = ("parent_resolution", "parent_request")
    assert [tuple(one[n] for n in names) for one in turns.to_pylist()] == recorded


def test_prompts_of_a_capture_may_continue_a_parent(tmp_path):
    first = foreign.nemo_entry(RECORD, 0)
    second = foreign.nemo_entry({**RECORD, "prompt_ids": [7]}, 1)
    second |= {"prompt_is_delta": True, "parent_call_id": "c0", "schema_version": 5}
    lost = {**second, "model_call_id": "c2", "parent_call_id": "c9"}
    turns, report = imported(tmp_path, [first, second, lost])
    assert turns["prompt_ids"].to_pylist() == [[1, 2], [1, 2, 3, 4, 7]]
    assert problems(report) == ["no_parent"]


def test_tools_of_requests_have_a_key(tmp_path):
    tool = {"type": "function", "function": {"name": "f", "strict": None}}
    deep = json.loads("[" * 900 + "]" * 900)
    calls = [
        line(session_id="s", request={"messages": [], "tools": tools})
        for tools in ([tool], [], None, "x", deep)
    ]
    turns, _ = imported(tmp_path, calls)
    keys = [tools_key([tool]), tools_key([]), None, None]
    assert turns["tools_key"].to_pylist()[:4] == keys
    for changes, key in (({}, keys[1]), ({"tools": [tool]}, keys[0])):
        nodes = [{**NODE, **changes}, REPLY]
        trace = {"id": "s", "task": {}, "tools": [], "nodes": nodes}
        turns, _ = imported(tmp_path, [trace])
        assert turns["tools_key"].to_pylist() == [key]


# --- messages and replies


def test_a_reply_at_the_end_of_the_messages_leaves_the_prompt(tmp_path):
    calls = [
        {**CALL, "messages": [USER, ANSWER]},
        {**CALL, "prompt_token_ids": [1, 2, 3, 4, 5], "messages": [USER, ANSWER] * 2},
    ]
    fields = (
        "session_id=session_id,prompt_messages=messages,response_message=messages.-1"
    )
    turns, _ = imported(tmp_path, calls, map=fields)
    for table in (turns, tk.from_records(calls, map=fields)):
        assert [len(one) for one in table["messages"].to_pylist()] == [1, 3]
        assert table["response"].null_count == 0
        assert tk.link(table)["parent"].to_pylist() == [None, 0]


def test_a_text_is_a_reply(tmp_path):
    call = {**CALL, "messages": [USER], "answer": "a"}
    after = {**CALL, "messages": [USER, ANSWER, USER], "answer": "b"}
    after["prompt_token_ids"] = [1, 2, 3, 4, 5]
    fields = "response_message=answer"
    turns, report = imported(tmp_path, [call, after], map=fields)
    assert "text_reply" in problems(report)
    assert turns["response"].null_count == 0
    for table in (turns, tk.from_records([call, after], map=fields)):
        assert tk.link(table)["parent"].to_pylist() == [None, 0]
    # what the next request repeats is more than its text
    whole = {**ANSWER, "reasoning": "r"}
    turns, _ = imported(
        tmp_path, [call, {**after, "messages": [USER, whole, USER]}], map=fields
    )
    assert json.loads(turns["response"][0].as_py()["body"]) == whole


# --- the same mapping everywhere

FURTHER = {
    "response": {"id": 1},
    "prompt_id": 3,
    "deep": json.loads("[" * 40 + "]" * 40),
    "odd": [1, "x"],
    "step": 4,
}


@pytest.mark.parametrize("key", FURTHER)
def test_further_keys_are_no_error_with_a_mapping(tmp_path, key):
    call = {**IDS, "run": 3, key: FURTHER[key], "response_message": ANSWER}
    turns, _ = imported(tmp_path, [call], map="session_id=run")
    is_odd = key in ("deep", "odd")
    with pytest.warns(LeftOutWarning) if is_odd else nullcontext():
        table = tk.from_records([call], map="session_id=run")
    with pytest.warns(LeftOutWarning) if is_odd else nullcontext():
        read = tk.read_turns(tmp_path / "log.jsonl", map="session_id=run")
    for name in ("session_id", "prompt_ids", "output_ids", "output_logprobs"):
        assert table[name].equals(turns[name])
        assert read[name].to_pylist() == turns[name].to_pylist()
    assert ("step" in table.column_names) == (key == "step")


def test_records_in_lists_are_calls_with_a_mapping_everywhere(tmp_path):
    steps = [{"kind": kind, **IDS} for kind in ("llm", "tool", "llm")]
    run = {"run": {"id": 5}, "steps": steps}
    path = tmp_path / "map.toml"
    path.write_text(
        'each = "steps"\nonly = "kind=llm"\n[fields]\nsession_id = "/run.id"\n'
    )
    turns, _ = imported(tmp_path, [run], map=path)
    for table in (
        turns,
        tk.from_records([run], map=path),
        tk.read_turns(tmp_path / "log.jsonl", map=path),
    ):
        assert table["session_id"].to_pylist() == ["5"] * 2
        assert table["output_ids"].to_pylist() == [[3, 4]] * 2


def test_a_mapped_path_that_records_lack(tmp_path):
    calls = [line(session_id="s", score=1), *lines(1, session_id="s")]
    turns, report = imported(tmp_path, calls, map="reward=score")
    assert turns["reward"].to_pylist() == [1.0, None]
    assert problems(report) == ["map_missing"]
    assert report[0]["detail"] == "records without score: their reward is null"
    with pytest.raises(FormatError, match=r"no record has scor .map: reward=scor."):
        imported(tmp_path, calls, map="reward=scor")
