"""Servers that are launched for a gateway, and end with it."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import trajkit as tk
from tests.shim.fakes import save_tokenizer
from trajkit import cli
from trajkit_shim.engines import launch
from trajkit_shim.engines.launch import running_server, sglang_server

ROOT = Path(__file__).parents[3]
FAKE = Path(__file__).with_name("fake_sglang.py")


@pytest.fixture
def python(tmp_path):
    """A program that takes the arguments of Python, and is the fake server."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I {FAKE} "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model"
    save_tokenizer(path)
    (path / "config.json").write_text(json.dumps({"vocab_size": 4032}))
    return str(path)


@contextmanager
def launched(python, tmp_path, *arguments, **options):
    """The URL of a launched server."""
    log = tmp_path / "logs" / "engine.log"
    command = sglang_server(python, "m", arguments)
    with running_server(*command, log, **options) as url:
        yield url


def get(url):
    with httpx.Client(trust_env=False, timeout=60) as client:
        return client.get(url)


def until(condition):
    """Ask until the answer is true."""
    deadline = time.monotonic() + 60
    while not (answer := condition()):
        assert time.monotonic() < deadline
    return answer


def read_pids(path):
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def runs(pid):
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def until_ended(pids):
    """Wait until no process runs: the kernel ends them one after the other."""
    until(lambda: not any(map(runs, pids)))


@pytest.mark.parametrize("manner", ["polite", "stubborn"])
def test_a_server_ends_with_every_process_it_started(
    python, tmp_path, monkeypatch, manner
):
    if manner == "stubborn":
        monkeypatch.setattr(launch, "_STOP_SECONDS", 0.1)
    pids = tmp_path / "pids"
    with launched(python, tmp_path, "--pids", str(pids), "--fake", manner) as url:
        assert get(f"{url}/health").status_code == 200
        server, worker = read_pids(pids)
        assert runs(server)
        assert runs(worker)
    assert not runs(server)
    until_ended([worker])


def test_a_server_that_ends_at_start(python, tmp_path, capfd):
    reason = r"was never healthy: it ended with exit code \d+\. .*logs/engine\.log"
    with (
        pytest.raises(ConnectionError, match=reason),
        launched(python, tmp_path, "--fake", "broken"),
    ):
        pytest.fail("it is not healthy")
    assert capfd.readouterr().err == "loading\nthere is no GPU\n"


def test_a_server_that_never_gets_healthy(python, tmp_path):
    pids = tmp_path / "pids"
    options = ["--fake", "mute", "--pids", str(pids)]
    with (
        pytest.raises(
            ConnectionError, match=r"never healthy: it did not answer in time"
        ),
        launched(python, tmp_path, *options, start_seconds=1),
    ):
        pytest.fail("it is not healthy")
    until_ended(read_pids(pids))


def test_a_system_that_cannot_start_the_server(python, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise BlockingIOError("too many processes")

    monkeypatch.setattr(subprocess, "Popen", fail)
    with (
        pytest.raises(ConnectionError, match="server failed: too many processes"),
        launched(python, tmp_path),
    ):
        pytest.fail("it cannot start")


@contextmanager
def serving(tmp_path, python, model, *options, server=()):
    """``trajkit serve --launch`` as a process, with pipes."""
    argv = ["serve", "--engine", "sglang", "--launch", model, "--json", "--port", "0"]
    argv += ["--launch-python", python, "--out", str(tmp_path / "run"), *options]
    argv += ["--", "--pids", str(tmp_path / "pids"), *server]
    process = subprocess.Popen(
        [sys.executable, "-c", f"from trajkit.cli import main\nexit(main({argv!r}))"],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'shim'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # as a shell starts it
        process_group=0,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def chat(client, url, key):
    return client.post(
        f"{url}/v1/chat/completions",
        headers={"Authorization": f"Bearer {key}"},
        json={"model": "any", "messages": [{"role": "user", "content": "hi"}]},
    )


def test_serve_launches_records_and_ends(tmp_path, python, model):
    with (
        httpx.Client(trust_env=False, timeout=60) as client,
        serving(tmp_path, python, model) as gateway,
    ):
        url = json.loads(gateway.stdout.readline())["url"]
        key = client.post(f"{url}/sessions").json()["api_key"]
        assert chat(client, url, key).status_code == 200
        gateway.send_signal(signal.SIGTERM)
        _, errors = gateway.communicate(timeout=60)
    assert gateway.returncode == cli.DONE
    assert f"its log is {tmp_path}/run/engine.log" in errors
    until_ended(read_pids(tmp_path / "pids"))
    (turn,) = tk.read_turns(tmp_path / "run").to_pylist()
    assert turn["output_ids"] == [104, 105]
    assert turn["weight_versions"] == [{"version": "default", "start": 0, "stop": 2}]


def test_sigterm_while_the_server_starts(tmp_path, python, model):
    pids = tmp_path / "pids"
    with serving(tmp_path, python, model, server=["--fake", "mute"]) as gateway:
        until(lambda: len(read_pids(pids)) == 2)
        gateway.send_signal(signal.SIGTERM)
        output, errors = gateway.communicate(timeout=60)
    assert gateway.returncode == cli.INTERRUPTED
    assert output == ""
    assert errors.endswith("trajkit: interrupted\n")
    until_ended(read_pids(pids))


def test_servers_of_different_models(python, model, tmp_path, capsys):
    with (
        launched(python, tmp_path) as one,
        launched(python, tmp_path, "--served-model-name", "other") as other,
    ):
        argv = ["serve", "--engine", "sglang", "--model", model]
        argv += ["--out", str(tmp_path / "run"), "--port", "0"]
        argv += ["--engine-url", one, "--engine-url", other]
        assert cli.main(argv) == cli.BAD_FILE
    assert "the servers of --engine-url differ" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_rollout_runs_server_gateway_and_agents(python, model, tmp_path, capsys):
    agent = (
        f"{sys.executable} -c 'import json, os, urllib.request as r; "
        'r.urlopen(r.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", '
        'json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]})'
        '.encode(), {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}))\''
    )
    tasks = tmp_path / "tasks.jsonl"
    task = {"id": "t", "prompt": "p", "workspace": {"a": "a"}}
    tasks.write_text(json.dumps({**task, "grade": {"kind": "completed"}}))
    out, pids = tmp_path / "run", tmp_path / "pids"
    argv = ["rollout", str(tasks), "--harness", "shell", "--argument", agent]
    argv += ["--engine", "sglang", "--launch", model]
    argv += ["--out", str(out), "--launch-python", python, "--json"]
    argv += ["--sandbox-option", "namespaces=no", "--", "--pids", str(pids)]
    assert cli.main(argv) == cli.DONE
    (rollout,) = json.loads(capsys.readouterr().out)["rollouts"]
    assert rollout["reward"] == 1.0
    (turn,) = tk.read_turns(out / "turns").to_pylist()
    assert turn["output_ids"] == [104, 105]
    assert (out / "engine.log").exists()
    assert len(read_pids(pids)) == 2
    until_ended(read_pids(pids))
