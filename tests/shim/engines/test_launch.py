"""Servers that are launched for a gateway, and end with it."""

import json
import signal
import subprocess
import sys

import pytest

import trajkit as tk
from tests.shim.fakes import fails
from tests.shim.processes import (
    chat,
    get,
    launched,
    model,
    post,
    printed,
    python,
    read_pids,
    runs,
    serving,
    stop,
    until,
    until_ended,
)
from trajkit import cli
from trajkit_shim.engines import launch

# fixtures
__all__ = ["model", "python"]


@pytest.fixture
def pids(tmp_path):
    return tmp_path / "pids"


@pytest.mark.parametrize("manner", ["polite", "stubborn"])
def test_a_server_ends_with_every_process_it_started(
    python, tmp_path, monkeypatch, manner, pids
):
    if manner == "stubborn":
        monkeypatch.setattr(launch, "_STOP_SECONDS", 0.1)
    with launched(python, tmp_path, "--pids", str(pids), "--fake", manner) as url:
        assert get(f"{url}/health").status_code == 200
        server, worker = read_pids(pids)
        assert runs(server)
        assert runs(worker)
    assert not runs(server)
    until_ended([worker])


def never_healthy(match, *arguments, **options):
    with pytest.raises(ConnectionError, match=match), launched(*arguments, **options):
        pytest.fail("it is not healthy")


def test_a_server_that_does_not_start(python, tmp_path, capfd, monkeypatch, pids):
    reason = r"was never healthy: it ended with exit code \d+\. .*logs/engine\.log"
    never_healthy(reason, python, tmp_path, "--fake", "broken")
    assert capfd.readouterr().err == "loading\nthere is no GPU\n"
    reason = r"never healthy: it did not answer in time"
    mute = ["--fake", "mute", "--pids", str(pids)]
    never_healthy(reason, python, tmp_path, *mute, start_seconds=1)
    until_ended(read_pids(pids))
    failing = fails("too many processes", raised=BlockingIOError)
    monkeypatch.setattr(subprocess, "Popen", failing)
    never_healthy("server failed: too many processes", python, tmp_path)


def launching(tmp_path, python, model, pids, *server):
    """``trajkit serve --launch`` as a process."""
    options = ["--engine", "sglang", "--launch", model, "--launch-python", python]
    after = ["--", "--pids", str(pids), *server]
    return serving(tmp_path, *options, after=after)


def test_serve_launches_records_and_ends(tmp_path, python, model, pids):
    with launching(tmp_path, python, model, pids) as gateway:
        url = printed(gateway)["url"]
        chat(url, post(f"{url}/sessions").json()["api_key"])
        code, _, errors = stop(gateway)
    assert code == cli.DONE
    assert f"its log is {tmp_path}/run/engine.log" in errors
    until_ended(read_pids(pids))
    (turn,) = tk.read_turns(tmp_path / "run").to_pylist()
    assert turn["output_ids"] == [104, 105]
    assert turn["weight_versions"] == [{"version": "default", "start": 0, "stop": 2}]


def test_sigterm_while_the_server_starts(tmp_path, python, model, pids):
    with launching(tmp_path, python, model, pids, "--fake", "mute") as gateway:
        until(lambda: len(read_pids(pids)) == 2)
        code, output, errors = stop(gateway, signal.SIGTERM)
    assert (code, output) == (cli.INTERRUPTED, "")
    assert errors.endswith("trajkit: interrupted\n")
    until_ended(read_pids(pids))


def test_servers_of_different_models(python, model, tmp_path, capsys):
    with (
        launched(python, tmp_path) as one,
        launched(python, tmp_path, "--served-model-name", "other") as other,
    ):
        argv = ["serve", "--engine", "sglang", "--model", model, "--port", "0"]
        argv += ["--out", str(tmp_path / "run")]
        argv += ["--engine-url", one, "--engine-url", other]
        assert cli.main(argv) == cli.BAD_FILE
    assert "the servers of --engine-url differ" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_rollout_runs_server_gateway_and_agents(python, model, tmp_path, capsys, pids):
    agent = (
        f"{sys.executable} -c 'import json, os, urllib.request as r; "
        'r.urlopen(r.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", '
        'json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]})'
        '.encode(), {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}))\''
    )
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "run"
    task = {"id": "t", "prompt": "p", "workspace": {"a": "a"}}
    tasks.write_text(json.dumps({**task, "grade": {"kind": "completed"}}))
    argv = ["rollout", str(tasks), "--harness", "shell", "--argument", agent]
    argv += ["--engine", "sglang", "--launch", model, "--launch-python", python]
    argv += ["--out", str(out), "--json", "--sandbox-option", "namespaces=no"]
    assert cli.main([*argv, "--", "--pids", str(pids)]) == cli.DONE
    (rollout,) = json.loads(capsys.readouterr().out)["rollouts"]
    assert rollout["reward"] == 1.0
    (turn,) = tk.read_turns(out / "turns").to_pylist()
    assert turn["output_ids"] == [104, 105]
    assert (out / "engine.log").exists()
    assert len(read_pids(pids)) == 2
    until_ended(read_pids(pids))
