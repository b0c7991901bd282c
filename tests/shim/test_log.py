"""The log: what it holds, and that it survives what can happen to a process."""

import errno
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import openai
import pytest

import trajkit as tk
from tests.shim.clients import http, read_log
from trajkit.errors import TornLogWarning
from trajkit_shim.engine import WeightSpan
from trajkit_shim.journal import END_OF_STREAM
from trajkit_shim.log import (
    LOG_SCHEMA,
    LoggedTurn,
    TurnLog,
    logged_message,
)

ROOT = Path(__file__).parents[2]
WHEN = datetime(2026, 1, 2, tzinfo=UTC)


def turn(**changes) -> LoggedTurn:
    fields = {
        "session_id": "s",
        "request_id": "r",
        "model": "m",
        "prompt_ids": np.array([1, 2], np.int32),
        "output_ids": np.array([3], np.int32),
        "output_logprobs": np.array([-0.5], np.float32),
        "finish_reason": "stop",
        "messages": [logged_message({"role": "user", "content": "x"})],
        "response": logged_message({"role": "assistant", "content": "y"}),
        "use_tool": False,
        "ill_formed": False,
        "trainable": True,
        "weight_versions": (WeightSpan("v", 0, 1),),
        "sampling": "{}",
        "cached_tokens": None,
        "started_at": WHEN,
        "ended_at": WHEN,
    }
    return LoggedTurn(**{**fields, **changes})


def test_what_is_written_is_read_and_valid(tmp_path):
    log = TurnLog(tmp_path / "run", fsync=True)
    shown = log.append(turn(), 0, {})
    log.append(
        turn(
            output_ids=np.array([], np.int32),
            output_logprobs=None,
            response=None,
            weight_versions=(),
            trainable=False,
        ),
        1,
        shown,
    )
    log.close()
    table = read_log(log.path)
    assert table.schema.equals(LOG_SCHEMA, check_metadata=True)
    tk.validate(table)
    first, second = table.to_pylist()
    assert first["messages"][0]["body"] == '{"content":"x","role":"user"}'
    assert first["response"]["role"] == "assistant"
    assert first["weight_versions"] == [{"version": "v", "start": 0, "stop": 1}]
    assert first["started_at"] == WHEN
    assert second["messages"][0]["body"] is None
    assert second["messages"][0]["key"] == first["messages"][0]["key"]
    assert (second["output_ids"], second["output_logprobs"]) == ([], None)
    assert (second["response"], second["weight_versions"]) == (None, None)


def test_a_body_is_written_again_where_its_key_had_another_one_last(tmp_path):
    def saying(number):
        message = {"role": "user", "content": "x", "n": number}
        return turn(messages=[logged_message(message)] * 2, response=None)

    log = TurnLog(tmp_path)
    shown: dict[bytes, bytes] = {}
    for index, number in enumerate([1, 1.0, 1.0, 1]):
        shown |= log.append(saying(number), index, shown)
    table = read_log(log.path)
    bodies = [[m["body"] for m in t["messages"]] for t in table.to_pylist()]
    one, other = (
        '{"content":"x","n":1,"role":"user"}',
        ('{"content":"x","n":1.0,"role":"user"}'),
    )
    assert bodies == [[one, None], [other, None], [None, None], [one, None]]
    log.close()


def test_a_log_is_never_written_over(tmp_path):
    TurnLog(tmp_path).close()
    with pytest.raises(FileExistsError):
        TurnLog(tmp_path)


def test_a_log_without_an_end_is_read(tmp_path):
    log = TurnLog(tmp_path)
    log.append(turn(), 0, {})
    assert read_log(log.path).num_rows == 1
    log.close()


def test_a_write_that_fails_half_way_leaves_the_log_as_it_was(tmp_path, monkeypatch):
    log = TurnLog(tmp_path)
    log.append(turn(), 0, {})
    before = log.path.read_bytes()
    write = os.write
    written = []

    def full(file, data):
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(write(file, data[:100]))
        return written[0]

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            log.append(turn(), 1, {})
    assert written == [100]
    assert log.path.read_bytes() == before
    log.append(turn(), 1, {})
    assert read_log(log.path)["turn_index"].to_pylist() == [0, 1]
    log.close()


def test_a_torn_last_turn_is_left_out_and_said_so(tmp_path):
    log = TurnLog(tmp_path / "whole")
    log.append(turn(), 0, {})
    good = log.path.stat().st_size
    log.append(turn(), 1, {})
    log.close()
    whole = log.path.read_bytes()[: -len(END_OF_STREAM)]
    torn = tmp_path / "turns-00000.arrows"
    for size in (*range(good + 1, len(whole), 301), len(whole) - 1):
        torn.write_bytes(whole[:size])
        with pytest.warns(TornLogWarning, match=f"last {size - good} bytes"):
            assert tk.read_turns(torn)["turn_index"].to_pylist() == [0]


def test_a_short_write_is_finished(tmp_path, monkeypatch):
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: write(file, data[:7]))
        log = TurnLog(tmp_path)
        log.append(turn(), 0, {})
    assert read_log(log.path).num_rows == 1
    log.close()


def test_every_acknowledged_turn_outlives_a_killed_gateway(tmp_path):
    """Four sessions ask without pause; the gateway is killed at the 40th answer."""
    victim = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.shim.victim", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'shim'}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    with victim:
        url = victim.stdout.readline().strip()
        answered: list[tuple[str, str]] = []

        def ask_on():
            key = http.post(f"{url}/sessions").json()["api_key"]
            with openai.OpenAI(
                api_key=key, base_url=f"{url}/v1", max_retries=0
            ) as client:
                messages = [{"role": "user", "content": "go on"}]
                while True:
                    try:
                        reply = client.chat.completions.create(
                            model="x", messages=messages
                        )
                    except openai.APIConnectionError:
                        return
                    answered.append((key, reply.choices[0].message.content))
                    if len(answered) == 40:
                        victim.send_signal(signal.SIGKILL)

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(ask_on) for _ in range(4)]:
                done.result()
    assert victim.returncode == -signal.SIGKILL
    turns = tk.read_turns(tmp_path)
    tk.validate(turns)
    logged = {(row["session_id"], row["response"]["body"]) for row in turns.to_pylist()}
    assert len(answered) >= 40
    for key, text in answered:
        assert (key, f'{{"content":"{text}","role":"assistant"}}') in logged
