"""``trajkit serve --workers``: real processes, which a trainer sees as one gateway."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import trajkit as tk
from tests.shim.engines.test_launch import launched, model, python, until_ended
from trajkit import cli
from trajkit_shim.client import GatewayClient
from trajkit_shim.errors import GatewayError

ROOT = Path(__file__).parents[2]
COMMAND = "import sys; from trajkit.cli import main; sys.exit(main())"
USER = {"role": "user", "content": "hi"}

# fixtures of the launcher's tests
__all__ = ["model", "python"]


@contextmanager
def workers(tmp_path, *options, n=2, token="t"):
    """The process of ``trajkit serve``, and what it printed."""
    argv = ["serve", "--workers", str(n), "--out", str(tmp_path / "run"), "--json"]
    argv += ["--port", "0", *options]
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, *argv],
        env=os.environ
        | {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'shim'}",
            "TRAJKIT_ADMIN_TOKEN": token,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # as a shell starts it
        process_group=0,
    ) as process:
        try:
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            yield process, json.loads(line)
        finally:
            process.kill()


def chat(session):
    answer = httpx.post(
        f"{session.base_url}/v1/chat/completions",
        json={"model": "m", "messages": [USER]},
        headers={"authorization": f"Bearer {session.api_key}"},
        timeout=60,
        trust_env=False,
    )
    assert answer.status_code == 200, answer.text


def children(pid):
    """The ids of the processes that a process started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def stop(process, number=signal.SIGTERM):
    process.send_signal(number)
    rest, errors = process.communicate(timeout=60)
    return process.returncode, rest, errors


@pytest.mark.parametrize("log", ["full", "delta"])
def test_sessions_of_all_workers_are_one_log(tmp_path, log):
    with workers(tmp_path, "--log", log, n=3) as (process, where):
        urls = where["workers"].split()
        assert where["url"] == urls[0]
        # any of them takes the trainer's requests
        clients = [GatewayClient(url, "t") for url in urls]
        sessions = [clients[k % 3].open(f"s{k}") for k in range(6)]
        places = Counter(session.base_url for session in sessions)
        assert places == dict.fromkeys(urls, 2)
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(chat, [*sessions, *sessions]))
        for k in range(6):
            assert clients[k % 3].describe(f"s{k}")["turns"] == 2
        with pytest.raises(GatewayError, match="was opened before") as twice:
            clients[2].open("s0")
        assert twice.value.status == 409
        with pytest.raises(GatewayError, match="no session 'x'") as unknown:
            clients[1].finish("x")
        assert unknown.value.status == 404
        for k in range(5):
            assert clients[(k + 1) % 3].finish(f"s{k}", reward=k)["reward"] == k
        assert clients[2].drop("s5")["ended_by"] == "drop"
        # the owner of the first free place
        assert clients[1].open().base_url in urls
        listed = httpx.get(
            f"{urls[1]}/sessions?limit=5",
            headers={"x-admin-token": "t"},
            trust_env=False,
        )
        assert len(listed.json()["sessions"]) == 5
        for client in clients:
            client.close()
        assert stop(process) == (cli.DONE, "", "")
    turns = tk.read_turns(tmp_path / "run")
    tk.validate(turns)
    rows = turns.to_pylist()
    assert Counter(turn["session_id"] for turn in rows) == {
        f"s{k}": 2 for k in range(6)
    }
    assert [turn["trainable"] for turn in rows if turn["session_id"] == "s5"] == [
        False
    ] * 2
    ended = {
        line["session_id"]: line["reward"]
        for line in tk.read_sessions(tmp_path / "run").to_pylist()
    }
    assert ended | {f"s{k}": float(k) for k in range(5)} == ended
    files = {path.name for path in (tmp_path / "run").glob("turns-*")}
    assert files == {f"turns-{k}-00000.arrows" for k in range(3)}


def test_an_opening_is_refused_by_every_worker_without_the_token(tmp_path):
    with workers(tmp_path) as (_, where):
        for url in where["workers"].split():
            with (
                GatewayClient(url, "wrong") as client,
                pytest.raises(GatewayError, match="admin token") as caught,
            ):
                client.open("a")
            assert caught.value.status == 401
        with GatewayClient(where["url"], "t") as client:
            # the refused one left no trace
            client.open("a")
            with pytest.raises(GatewayError, match="max_turns"):
                client.open("b", max_turns=-1)
            client.open("b")


def test_many_openings_of_one_id_at_once_open_one_session(tmp_path):
    with workers(tmp_path) as (_, where):
        clients = [GatewayClient(url, "t") for url in where["workers"].split()]

        def opens(k):
            try:
                clients[k % 2].open("same")
            except GatewayError as error:
                return error.status
            return 200

        with ThreadPoolExecutor(8) as pool:
            answers = Counter(pool.map(opens, range(16)))
        for client in clients:
            client.close()
    assert answers == {200: 1, 409: 15}


def test_a_pause_of_calls_is_for_all_workers(tmp_path):
    with workers(tmp_path) as (_, where):
        urls = where["workers"].split()

        def post(path, body=None):
            answer = httpx.post(
                f"{urls[1]}{path}",
                json=body or {},
                headers={"x-admin-token": "t"},
                trust_env=False,
            )
            assert answer.status_code == 200, answer.text
            return answer.json()

        def states():
            asked = (httpx.get(f"{url}/healthz", trust_env=False) for url in urls)
            return [answer.json()["status"] for answer in asked]

        assert post("/engine/pause", {"mode": "wait", "wait_seconds": 5})["paused"]
        assert states() == ["paused", "paused"]
        assert not post("/engine/resume")["paused"]
        assert states() == ["ok", "ok"]
        with GatewayClient(urls[1], "t") as client:
            for _ in range(4):
                chat(client.open())
        drained = post("/admin/drain", {"wait_seconds": 5})
        assert (drained["open"], drained["closed"], drained["turns"]) == (0, 4, 4)
        assert states() == ["draining", "draining"]


def test_a_pause_with_another_mode_is_refused_by_all_workers(tmp_path, python, model):
    """A refused pause leaves the one that there is."""
    with launched(python, tmp_path) as engine:
        options = ["--engine", "sglang", "--engine-url", engine, "--model", model]
        with (
            workers(tmp_path, *options) as (_, where),
            GatewayClient(where["url"], "t") as client,
        ):
            client.pause()
            with pytest.raises(GatewayError, match="a pause with mode 'keep'"):
                client.pause(mode="wait")
            client.update_weights("/new", "step-1")
            client.resume()
            chat(client.open())


def test_new_weights_for_all_workers(tmp_path, python, model):
    """The first worker holds the lease, whichever is asked."""
    with launched(python, tmp_path) as engine:
        options = ["--engine", "sglang", "--engine-url", engine, "--model", model]
        with workers(tmp_path, *options) as (process, where):
            urls = where["workers"].split()
            with GatewayClient(urls[1], "t") as client:
                sessions = [client.open(), client.open()]
                client.pause()
                client.pause()
                states = [
                    httpx.get(
                        f"{url}/engine", headers={"x-admin-token": "t"}, trust_env=False
                    ).json()
                    for url in urls
                ]
                client.update_weights("/new", "step-1")
                client.resume()
            for session in sessions:
                chat(session)
            stop(process)
        state = httpx.get(f"{engine}/state", trust_env=False).json()
    assert [each["paused"] for each in states] == [True, True]
    assert (state["paused"], len(state["updates"])) == (False, 1)
    turns = tk.read_turns(tmp_path / "run").to_pylist()
    assert [turn["weight_versions"][0]["version"] for turn in turns] == ["step-1"] * 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_process_group_ends_all(tmp_path, number):
    with workers(tmp_path) as (process, where):
        pids = children(process.pid)
        assert len(pids) >= 2
        with GatewayClient(where["url"], "t") as client:
            chat(client.open())
        os.killpg(process.pid, number)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (cli.DONE, "")
    until_ended(pids)


def test_workers_end_with_their_parent(tmp_path):
    with workers(tmp_path) as (process, _):
        pids = children(process.pid)
        process.kill()
        process.communicate(timeout=60)
        until_ended(pids)


def test_a_worker_that_ends_ends_the_others(tmp_path):
    with workers(tmp_path, n=3) as (process, where):
        pids = children(process.pid)
        ports = [int(url.rpartition(":")[2]) for url in where["workers"].split()]
        os.kill(listening_at(pids, ports[1]), signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == cli.BAD_FILE
    assert errors.endswith("trajkit: worker 1 ended with exit code -9\n")
    until_ended(pids)


def listening_at(pids, port):
    """Which of the processes has the socket that listens at a port."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *rest = line.split()
        if state == "0A" and int(local.rpartition(":")[2], 16) == port:
            inode = f"socket:[{rest[5]}]"
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(file) == inode:
                return pid
    raise AssertionError(f"no process listens at {port}")


def run(tmp_path, *options):
    argv = ["serve", "--out", str(tmp_path / "run"), *options]
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *argv],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'shim'}"},
        capture_output=True,
        timeout=60,
        text=True,
        check=False,
    )


def test_an_engine_that_does_not_work_is_one_error(tmp_path, model):
    options = ["--engine", "sglang", "--engine-url", "http://127.0.0.1:9"]
    ended = run(tmp_path, "--workers", "2", "--port", "0", *options, "--model", model)
    assert ended.returncode == cli.BAD_FILE
    assert ended.stderr.count("the engine does not work") == 1
    assert "Traceback" not in ended.stderr


def test_a_port_that_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = run(tmp_path, "--workers", "2", "--port", port)
    assert ended.returncode == cli.BAD_FILE
    assert "in use" in ended.stderr
    assert "Traceback" not in ended.stderr
