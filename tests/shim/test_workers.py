"""``trajkit serve --workers``: real processes, which a trainer sees as one gateway."""

import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import trajkit as tk
from tests.shim import processes
from tests.shim.processes import (
    children,
    get,
    launched,
    model,
    post,
    printed,
    python,
    serving,
    stop,
    until_ended,
)
from trajkit import cli
from trajkit_shim.client import GatewayClient
from trajkit_shim.errors import GatewayError

# fixtures of the launcher
__all__ = ["model", "python"]
ADMIN = {"x-admin-token": "t"}


@contextmanager
def workers(tmp_path, *options, n=2):
    """The process of ``trajkit serve``, its URLs, and a client of each."""
    options = ["--workers", str(n), *options]
    with (
        serving(tmp_path, *options, TRAJKIT_ADMIN_TOKEN="t") as process,
        ExitStack() as stack,
    ):
        where = printed(process)
        urls = where["workers"].split()
        assert where["url"] == urls[0]
        clients = [stack.enter_context(GatewayClient(url, "t")) for url in urls]
        yield process, urls, clients


def chat(session):
    processes.chat(session.base_url, session.api_key)


def states(urls):
    return [get(f"{url}/healthz").json()["status"] for url in urls]


@pytest.mark.parametrize("log", ["full", "delta"])
def test_sessions_of_all_workers_are_one_log(tmp_path, log):
    with workers(tmp_path, "--log", log, n=3) as (process, urls, clients):
        # any of them takes the trainer's requests
        sessions = [clients[k % 3].open(f"s{k}") for k in range(6)]
        places = Counter(session.base_url for session in sessions)
        assert places == dict.fromkeys(urls, 2)
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(chat, [*sessions, *sessions]))
        for k in range(6):
            assert clients[k % 3].describe(f"s{k}")["turns"] == 2
        with pytest.raises(GatewayError, match="was opened before") as twice:
            clients[2].open("s0")
        with pytest.raises(GatewayError, match="no session 'x'") as unknown:
            clients[1].finish("x")
        assert (twice.value.status, unknown.value.status) == (409, 404)
        for k in range(5):
            assert clients[(k + 1) % 3].finish(f"s{k}", reward=k)["reward"] == k
        assert clients[2].drop("s5")["ended_by"] == "drop"
        # the owner of the first free place
        assert clients[1].open().base_url in urls
        listed = get(f"{urls[1]}/sessions?limit=5", **ADMIN).json()
        assert len(listed["sessions"]) == 5
        assert stop(process) == (cli.DONE, "", "")
    turns = tk.read_turns(tmp_path / "run")
    tk.validate(turns)
    trainable = {}
    for turn in turns.to_pylist():
        trainable.setdefault(turn["session_id"], []).append(turn["trainable"])
    assert trainable == {f"s{k}": [k != 5] * 2 for k in range(6)}
    sessions = tk.read_sessions(tmp_path / "run").to_pylist()
    rewards = {(line["session_id"], line["reward"]) for line in sessions}
    assert {(f"s{k}", float(k)) for k in range(5)} <= rewards
    files = {path.name for path in (tmp_path / "run").glob("turns-*")}
    assert files == {f"turns-{k}-00000.arrows" for k in range(3)}


def test_openings_that_are_refused_and_one_id_at_once(tmp_path):
    with workers(tmp_path) as (_, urls, clients):
        for url in urls:
            with (
                GatewayClient(url, "wrong") as stranger,
                pytest.raises(GatewayError, match="admin token") as caught,
            ):
                stranger.open("a")
            assert caught.value.status == 401
        # the refused one left no trace
        clients[0].open("a")
        with pytest.raises(GatewayError, match="max_turns"):
            clients[0].open("b", max_turns=-1)
        clients[0].open("b")

        def opens(k):
            try:
                clients[k % 2].open("same")
            except GatewayError as error:
                return error.status
            return 200

        with ThreadPoolExecutor(8) as pool:
            answers = Counter(pool.map(opens, range(16)))
    assert answers == {200: 1, 409: 15}


def test_a_pause_of_calls_is_for_all_workers(tmp_path):
    with workers(tmp_path) as (_, urls, clients):

        def order(path, **body):
            answer = post(f"{urls[1]}{path}", body, **ADMIN)
            assert answer.status_code == 200, answer.text
            return answer.json()

        assert order("/engine/pause", mode="wait", wait_seconds=5)["paused"]
        assert states(urls) == ["paused", "paused"]
        assert not order("/engine/resume")["paused"]
        assert states(urls) == ["ok", "ok"]
        for _ in range(4):
            chat(clients[1].open())
        drained = order("/admin/drain", wait_seconds=5)
        assert (drained["open"], drained["closed"], drained["turns"]) == (0, 4, 4)
        assert states(urls) == ["draining", "draining"]


def test_new_weights_for_all_workers(tmp_path, python, model):
    """The first worker holds the lease, whichever is asked."""
    with launched(python, tmp_path) as engine:
        options = ["--engine", "sglang", "--engine-url", engine, "--model", model]
        with workers(tmp_path, *options) as (process, urls, (_, client)):
            sessions = [client.open(), client.open()]
            client.pause()
            # a refused pause leaves the one that there is
            with pytest.raises(GatewayError, match="a pause with mode 'keep'"):
                client.pause(mode="wait")
            client.pause()
            paused = [get(f"{url}/engine", **ADMIN).json()["paused"] for url in urls]
            client.update_weights("/new", "step-1")
            client.resume()
            for session in sessions:
                chat(session)
            stop(process)
        state = get(f"{engine}/state").json()
    assert paused == [True, True]
    assert (state["paused"], len(state["updates"])) == (False, 1)
    turns = tk.read_turns(tmp_path / "run").to_pylist()
    assert [turn["weight_versions"][0]["version"] for turn in turns] == ["step-1"] * 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_process_group_ends_all(tmp_path, number):
    with workers(tmp_path) as (process, _, clients):
        pids = children(process.pid)
        assert len(pids) >= 2
        chat(clients[0].open())
        os.killpg(process.pid, number)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (cli.DONE, "")
    until_ended(pids)


def test_workers_end_with_their_parent(tmp_path):
    with workers(tmp_path) as (process, *_):
        pids = children(process.pid)
        stop(process, signal.SIGKILL)
        until_ended(pids)


def test_a_worker_that_ends_ends_the_others(tmp_path):
    with workers(tmp_path, n=3) as (process, urls, _):
        pids = children(process.pid)
        port = int(urls[1].rpartition(":")[2])
        os.kill(listening_at(pids, port), signal.SIGKILL)
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


def test_an_error_of_all_workers_is_one_error(tmp_path, model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        gone = ["--engine", "sglang", "--engine-url", "http://127.0.0.1:9"]
        for words, options in (
            ("the engine does not work", ["--port", "0", *gone, "--model", model]),
            ("in use", ["--port", port]),
        ):
            argv = ["serve", "--out", str(tmp_path / "run"), "--workers", "2", *options]
            ended = subprocess.run(
                [sys.executable, "-c", processes.COMMAND, *argv],
                env=os.environ | processes.ENVIRONMENT,
                capture_output=True,
                timeout=60,
                text=True,
                check=False,
            )
            assert ended.returncode == cli.BAD_FILE
            assert ended.stderr.count(words) == 1
            assert "Traceback" not in ended.stderr
