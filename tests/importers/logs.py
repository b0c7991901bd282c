"""Logs of other systems, and what becomes of them."""

import json
from pathlib import Path

import pytest

import trajkit as tk
from tests.importers import foreign

PAGE = (Path(__file__).parents[2] / "docs/import.md").read_text("utf-8")

RECORD = {
    "session_id": "s",
    "prompt_ids": [1, 2],
    "output_ids": [3, 4],
    "output_logprobs": [-0.5, -0.25],
    "prompt_messages": [{"role": "user", "content": "q"}],
    "response_message": {"role": "assistant", "content": "a"},
    "finish_reason": "stop",
}
USER, ANSWER = RECORD["prompt_messages"][0], RECORD["response_message"]
# a call as most logs have it
IDS = {"prompt_token_ids": [1, 2], "token_ids": [3, 4], "logprobs": [-0.5, -0.25]}
CALL = {"session_id": "s", **IDS}
# nodes of a trace of verifiers
NODE = {"parent": None, "message": {"role": "user", "content": ""}, "token_ids": [1]}
REPLY = {
    "parent": 0,
    "message": ANSWER,
    "sampled": True,
    "token_ids": [2, 3],
    "mask": [False, True],
    "logprobs": [-1.0],
}


def line(record=None, **changes):
    """A line of a log of requests and responses."""
    response = foreign.chat_response({**RECORD, **(record or {})})
    return {"request": {"messages": []}, "response": response, **changes}


def lines(n, **changes):
    """Lines of different requests."""
    return [line({"request_id": f"r{k}"}, **changes) for k in range(n)]


def log_line(record=None, **changes):
    return json.dumps(line(record, **{"session_id": "s", **changes})).encode()


def imported(folder, lines, *args, **options):
    """The turns of a log, and the lines of the report."""
    foreign.write_lines(folder / "log.jsonl", lines)
    turns, report = tk.import_turns(folder / "log.jsonl", *args, **options)
    return turns, report.to_pylist()


def problems(report):
    """The problems of a report, each of which the page explains."""
    found = [row["problem"] for row in report]
    assert all(f"`{name}`" in PAGE for name in found)
    return found


def case(name, lines, found=(), says=(), map=None, **columns):
    """A log, the problems of its report, words of the details, and columns of its turns."""
    says = [says] if isinstance(says, str) else says
    return pytest.param((lines, found, says, map, columns), id=name)


def check(folder, case):
    lines, found, says, map, columns = case
    turns, report = imported(folder, lines, map=map)
    assert problems(report) == list(found)
    details = "\n".join(row["detail"] or "" for row in report)
    assert all(words in details for words in says)
    for name, values in columns.items():
        assert turns[name].to_pylist() == values
