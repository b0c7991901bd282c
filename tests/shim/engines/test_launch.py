"""Servers that are launched for a gateway, and end with it."""

import io
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import trajkit as tk
from tests.shim.fakes import engine_request
from trajkit import cli
from trajkit_shim.engine_options import terminable
from trajkit_shim.engines import launch
from trajkit_shim.engines.embedded import load_tokenizer
from trajkit_shim.engines.launch import (
    check_arguments,
    reserved_port,
    running_server,
)
from trajkit_shim.engines.sglang import SGLangEngine
from trajkit_shim.errors import EngineError
from trajkit_shim.pauses import Weights

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
    load_tokenizer().save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"vocab_size": 4032}))
    return str(path)


@contextmanager
def launched(python, tmp_path, *arguments, **options):
    """The URL of a launched server, whose loss interrupts the test."""
    log = tmp_path / "logs" / "engine.log"
    with terminable(), running_server(python, "m", arguments, log, **options) as url:
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


def test_the_log_of_an_earlier_server_is_kept_and_not_shown(python, tmp_path, capfd):
    log = tmp_path / "logs" / "engine.log"
    log.parent.mkdir()
    log.write_text("an earlier one\n")
    with pytest.raises(ConnectionError), launched(python, tmp_path, "--fake", "broken"):
        pass
    assert log.read_text() == "an earlier one\nloading\nthere is no GPU"
    assert "earlier" not in capfd.readouterr().err


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


def test_a_program_that_does_not_exist(tmp_path, capfd):
    with (
        pytest.raises(
            ConnectionError, match="never healthy: it ended with exit code 127"
        ),
        launched(str(tmp_path / "absent"), tmp_path),
    ):
        pytest.fail("it cannot start")
    assert "absent: No such file or directory" in capfd.readouterr().err


def test_a_reserved_port_is_for_programs_that_name_it():
    with reserved_port() as port, socket.socket() as server:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        # as servers do
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()


def _answers(url, path="/health"):
    try:
        return get(url + path).status_code == 200
    except httpx.TransportError:
        return False


def await_interrupt():
    """Wait for the signal that a lost server causes."""
    threading.Event().wait(60)
    pytest.fail("there was no signal")


class Unread(io.StringIO):
    """Standard error whose reader is gone."""

    def write(self, _):
        raise BrokenPipeError


@pytest.mark.parametrize("stderr", [io.StringIO, Unread])
def test_a_server_that_ends_ends_the_command(python, tmp_path, monkeypatch, stderr):
    monkeypatch.setattr(sys, "stderr", stderr())
    pids = tmp_path / "pids"

    def run():
        with launched(python, tmp_path, "--pids", str(pids)):
            os.kill(read_pids(pids)[0], signal.SIGKILL)
            await_interrupt()

    with pytest.raises(ConnectionError, match="server ended with exit code -9"):
        run()
    until_ended(read_pids(pids))


def test_an_interrupt_while_the_server_runs_is_an_interrupt(python, tmp_path):
    with pytest.raises(KeyboardInterrupt), launched(python, tmp_path):
        raise KeyboardInterrupt


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_process_group_ends_the_server_after_the_drain(
    tmp_path, python, model, number
):
    with (
        httpx.Client(trust_env=False, timeout=60) as client,
        serving(tmp_path, python, model, server=["--fake", "slow"]) as gateway,
        ThreadPoolExecutor() as pool,
    ):
        url = json.loads(gateway.stdout.readline())["url"]
        key = client.post(f"{url}/sessions").json()["api_key"]
        server = read_pids(tmp_path / "pids")[0]
        arguments = Path(f"/proc/{server}/cmdline").read_text().split("\0")
        engine = f"http://127.0.0.1:{arguments[arguments.index('--port') + 1]}"
        running = pool.submit(chat, client, url, key)
        try:
            # the first call was the check at the start
            until(lambda: get(f"{engine}/state").json()["calls"] == 2)
            os.killpg(gateway.pid, number)
            # it accepts no more connections
            until(lambda: not _answers(url, "/healthz"))
        finally:
            client.post(f"{engine}/release", json={})
        assert running.result().status_code == 200
        gateway.communicate(timeout=60)
    assert gateway.returncode == cli.DONE
    until_ended(read_pids(tmp_path / "pids"))
    assert tk.read_turns(tmp_path / "run").num_rows == 1


def test_a_lost_server_ends_the_gateway(tmp_path, python, model):
    with serving(tmp_path, python, model) as gateway:
        gateway.stdout.readline()
        os.kill(read_pids(tmp_path / "pids")[0], signal.SIGKILL)
        _, errors = gateway.communicate(timeout=60)
    assert gateway.returncode == cli.BAD_FILE
    assert "the engine's server ended with exit code -9" in errors


@pytest.mark.parametrize("kill", [os.kill, os.killpg])
def test_a_gateway_that_is_killed_leaves_no_process(tmp_path, python, model, kill):
    with serving(tmp_path, python, model) as gateway:
        gateway.stdout.readline()
        pids = read_pids(tmp_path / "pids")
        assert len(pids) == 2
        kill(gateway.pid, signal.SIGKILL)
        gateway.communicate(timeout=60)
        until_ended(pids)


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


@pytest.mark.parametrize(
    ("argument", "refused"),
    [
        ("--port=1", "--port"),
        ("--host", "--host"),
        ("--model", "--model-path"),
        ("--skip-tok", "--skip-tokenizer-init"),
        ("--api_key", "--api-key"),
        ("--config", "--config"),
    ],
)
def test_a_server_argument_that_contradicts_the_gateway(argument, refused):
    with pytest.raises(ValueError, match=rf"{argument} \({refused}\) is refused: "):
        check_arguments(["--tp", "2", argument])


def test_other_server_arguments():
    check_arguments(["--tp", "2", "--mem-fraction-static=0.8", "-1", "--", "--context"])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--launch", "m"], "--launch needs --engine sglang"),
        (
            ["--engine", "sglang", "--launch", "m", "--engine-url", "http://a"],
            "leave out --engine-url",
        ),
        (["--", "--tp", "2"], "--tp 2 after -- is for the server of --launch"),
        (
            ["--engine", "sglang", "--launch", "m", "--", "--port", "1"],
            "argument after --: --port",
        ),
        (["--engine", "sglang", "--launch", "m"], "pip install 'trajkit[sglang]'"),
    ],
)
def test_options_that_do_not_fit(tmp_path, capsys, options, error):
    assert (
        cli.main(["serve", "--out", str(tmp_path / "run"), *options]) == cli.BAD_USAGE
    )
    assert error in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_machine_without_setpriv(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (
        cli.main(["serve", "--engine", "sglang", "--launch", "m", "--out", "o"])
        == cli.BAD_USAGE
    )
    assert "--launch needs setpriv (util-linux)" in capsys.readouterr().err


def generate(engine, session):
    return engine.generate(engine_request(range(3), session_id=session))


@pytest.mark.anyio
async def test_several_servers_each_keep_their_sessions(python, tmp_path):
    """Pauses and new weights reach all of them."""
    with (
        launched(python, tmp_path, "--ids", "[1]") as one,
        launched(python, tmp_path, "--ids", "[2]") as other,
    ):
        engine = SGLangEngine(one, other, vocab_size=10)
        served = {}
        for session in map(str, range(20)):
            replies = [await generate(engine, session) for _ in range(2)]
            first, second = (reply.output_ids.tolist() for reply in replies)
            assert first == second
            served[session] = first
        assert {tuple(ids) for ids in served.values()} == {(1,), (2,)}
        weights = Weights(engine)
        await weights.pause(60)
        assert [get(url).json()["paused"] for url in (one, other)] == [True, True]
        await weights.update("/new", "step-1")
        await weights.update(["aGk="], "step-2", "flattened_bucket")
        await weights.resume()
        for url in (one, other):
            state = get(url).json()
            assert state["paused"] is False
            (_, disk), (tensor, memory) = state["updates"]
            assert disk["model_path"] == "/new"
            assert tensor == "/update_weights_from_tensor"
            assert memory["serialized_named_tensors"] == ["aGk="]
            assert memory["load_format"] == "flattened_bucket"
        replies = [await generate(engine, session) for session in served]
        assert {span.version for r in replies for span in r.weight_versions} == {
            "step-2"
        }
        await weights.close()
        await engine.close()


@pytest.mark.anyio
async def test_an_update_that_one_of_several_servers_cannot_take(python, tmp_path):
    """The error has the version of each server, and the pause continues."""
    with launched(python, tmp_path) as one:
        with launched(python, tmp_path) as other:
            engine = SGLangEngine(other, one, vocab_size=10)
            weights = Weights(engine)
            await weights.pause(60)
        has = f"Weight versions: {other}: unknown, {one}: "
        with pytest.raises(EngineError, match=f"{other} cannot be .*{has}step-1"):
            await weights.update("/new", "step-1")
        assert weights.version is None
        # it was complete before the error
        assert len(get(one).json()["updates"]) == 1
        with pytest.raises(EngineError, match=f"{other} cannot be .*{has}step-1"):
            await weights.update(["aGk="], "step-2")
        # the other could not begin
        assert len(get(one).json()["updates"]) == 1
        assert weights.paused
        await weights.close()
        await engine.close()


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
