"""Clients, engines, disks and agents that do what nobody should."""

import asyncio
import errno
import json
import os
import socket
import stat
import subprocess
import tempfile
from pathlib import Path

import aiohttp
import httpx
import pytest

import trajkit as tk
from tests.rollout.test_grade import graded
from tests.shim.clients import in_process
from tests.shim.fakes import RENDERER, Held, ScriptedEngine, Updatable
from trajkit.errors import FormatError
from trajkit_rollout.grade import StageError, Workspace
from trajkit_rollout.rollout import Callback
from trajkit_rollout.sandbox import LocalSandbox, Spec, remove
from trajkit_rollout.tasks import Grade, Task, archive_of, read_tasks
from trajkit_shim.app import create_app
from trajkit_shim.delivery import is_retry
from trajkit_shim.engines import http
from trajkit_shim.errors import EngineError
from trajkit_shim.serve import running
from trajkit_shim.sessions.turn_log import AppendLog, TurnLog

USER = {"role": "user", "content": "hi"}

pytestmark = pytest.mark.anyio


# what clients send


@pytest.mark.parametrize(
    ("count", "again"),
    [
        ("0", False),
        ("00", False),
        ("2", True),
        ("9" * 5000, True),
        ("-1", False),
        ("", False),
    ],
)
def test_a_count_of_retries_of_any_length(count, again):
    assert is_retry({"x-stainless-retry-count": count}) is again


async def test_half_a_surrogate_pair_in_a_name_is_shown_to_the_trainer(tmp_path):
    async with in_process(ScriptedEngine("a"), RENDERER, tmp_path) as gateway:
        key = await gateway.open_key(session_id="s")
        # a field that is ignored, and a tool that is left out
        body = b'{"messages": [{"role": "user", "content": "x"}], "a\\ud800": 1,'
        body += b'"tools": [{"type": "b\\ud800"}]}'
        answer = await gateway.http.post(f"/s/{key}/v1/chat/completions", content=body)
        assert answer.status_code == 200, answer.text
        ended = await gateway.http.post("/sessions/s/finish", json={"reward": 1})
        listed = await gateway.http.get("/sessions")
    assert (ended.status_code, listed.status_code) == (200, 200)
    assert ended.json()["ignored"] == {"a\ud800": 1}
    assert ended.json()["tools_left_out"] == {"b\ud800": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/sessions", b'{"group_id": "\\ud800"}'),
        ("/sessions/s/finish", b'{"error": "\\ud800"}'),
    ],
)
async def test_half_a_surrogate_pair_of_the_trainer_is_refused(tmp_path, path, body):
    async with in_process(ScriptedEngine(), RENDERER, tmp_path) as gateway:
        await gateway.open(session_id="s")
        answer = await gateway.http.post(path, content=body)
        assert answer.status_code == 400, answer.text
        assert "surrogate" in answer.json()["error"]["message"]
        ended = await gateway.http.post("/sessions/s/finish", json={"reward": 1})
    assert ended.json()["reward"] == 1


@pytest.mark.parametrize("limit", ["9" * 30, "9" * 5000])
async def test_a_limit_of_any_length(tmp_path, limit):
    async with in_process(ScriptedEngine(), RENDERER, tmp_path) as gateway:
        answer = await gateway.http.get(f"/sessions?limit={limit}")
    assert answer.status_code == 400


# what trainers and disks do


async def test_a_trainer_that_hangs_up_while_it_pauses(tmp_path):
    engine = Updatable()
    engine.fails["pause"] = "hangs"
    app = create_app(engine, RENDERER, TurnLog(tmp_path / "log"))
    with running(app) as url:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            with pytest.raises(httpx.ReadTimeout):
                await http.post("/engine/pause", json={}, timeout=0.3)
            engine.fails.clear()
            for _ in range(200):
                if ("resume",) in engine.told:
                    break
                await asyncio.sleep(0.02)
            assert engine.told == [("pause",), ("resume",)]
            assert (await http.get("/engine")).json()["paused"] is False


@pytest.mark.parametrize("how", ["finish", "drop"])
async def test_an_end_that_could_not_be_written_is_written_when_asked_again(
    tmp_path, monkeypatch, how
):
    async with in_process(ScriptedEngine(), RENDERER, tmp_path) as gateway:
        key = await gateway.open_key()

        def fails(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", fails)
            failed = await gateway.http.post(f"{gateway.path_of(key)}/{how}")
        assert failed.status_code == 500
        again = await gateway.http.post(f"{gateway.path_of(key)}/{how}")
        assert again.status_code == 200
    (line,) = tk.read_sessions(gateway.log.directory).to_pylist()
    assert line["ended_by"] == how


def test_a_full_disk_does_not_keep_a_journal_open(tmp_path, monkeypatch):
    journal = AppendLog(tmp_path, "x", tk.schema.AMENDMENTS)
    journal.start()

    def fails(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fails)
        journal.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1


async def test_a_trainer_that_hangs_up_while_calls_end(tmp_path):
    held = Held("hello")
    app = create_app(ScriptedEngine(held), RENDERER, TurnLog(tmp_path / "log"))
    with running(app) as url:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            key = (await http.post("/sessions", json={})).json()["api_key"]
            path, body = f"/s/{key}/v1/chat/completions", {"messages": [USER]}
            call = asyncio.create_task(http.post(path, json=body))
            while not held.entered.is_set():
                await asyncio.sleep(0.01)
            with pytest.raises(httpx.ReadTimeout):
                await http.post("/engine/pause", json={"mode": "wait"}, timeout=0.3)
            for _ in range(200):
                if (await http.get("/healthz")).json()["status"] == "ok":
                    break
                await asyncio.sleep(0.02)
            assert (await http.get("/healthz")).json()["status"] == "ok"
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)


# what agents, verifiers and tasks do


@pytest.mark.parametrize(
    "command",
    [
        r"printf '\377' > {logs}/reward.txt",
        "python -c 'print(10**400)' > {logs}/reward.txt",
        'echo \'{"a": 1e308, "b": 1e308}\' > {logs}/reward.json',
        "python -c 'print(100000 * \"[\")' > {logs}/reward.txt",
    ],
    ids=["bytes", "huge", "overflow", "deep"],
)
def test_a_reward_that_cannot_be_read_ends_its_own_rollout(tmp_path, command):
    with pytest.raises(StageError, match=r"reward\.(txt|json) is "):
        graded(tmp_path, grade={"kind": "reward_file", "command": command})


def test_a_line_of_tasks_ends_where_json_says_so(tmp_path):
    path = tmp_path / "tasks.jsonl"
    task = {"id": "a", "prompt": "one\u2028two\x85", "grade": {"command": "true"}}
    path.write_text(json.dumps(task, ensure_ascii=False) + "\r\n", newline="")
    (read,) = read_tasks(path)
    assert read.prompt == task["prompt"]
    path.write_bytes(b'{"id": "\xff"}')
    with pytest.raises(FormatError, match=r"tasks\.jsonl: .*utf-8"):
        read_tasks(path)


COMMIT = "git add -A && git -c user.name=a -c user.email=a@localhost commit -qm x"


@pytest.mark.parametrize(
    ("before", "change"),
    [
        ("printf '* text=auto\\n' > .gitattributes", "printf 'a\\r\\nb\\r\\n' > a"),
        (
            "printf '* text=auto\\n' > .gitattributes; printf 'a\\r\\n' > a",
            "printf 'a\\n' > a",
        ),
        (
            "printf '* ident\\n' > .gitattributes; echo '$Id: x $' > a",
            "echo '$Id: y $' > a; echo z >> a",
        ),
        ("true", "git init -q b && echo b > b/a"),
        ("true", f"git init -q b && cd b && echo b > a && {COMMIT}"),
        (f"git init -q b; cd b; echo b > a; {COMMIT}", "echo c > b/a"),
        ("mkdir a d; echo b > a/c; echo e > d/f", "rm -r a; ln -s d a"),
        (
            "true",
            "mkdir 'x y'; printf b > \"x y/q'\\\"\n\"; printf '\\0\\377' > -f; "
            "ln -s nowhere l; mkfifo pipe",
        ),
    ],
    ids=["crlf", "line ends", "ident", "empty", "nested", "within", "link", "odd"],
)
def test_what_an_agent_leaves_is_what_is_graded(tmp_path, before, change):
    source = tmp_path / "source"
    source.mkdir()
    subprocess.run(["sh", "-c", before], cwd=source, check=True)
    rules = Grade(kind="completed")
    task = Task(
        id="t",
        prompt="p",
        workspace=archive_of(source),
        grade=rules,
        editable=("**",),
    )
    # git knows no directories; what a repository's own one holds is not the workspace's
    look = (
        "find . -name .git -prune -o -type l -print -o -type f -print0 | sort -z | "
        "xargs -0 md5sum"
    )

    def box(name):
        options = {"namespaces": "no"}
        return LocalSandbox(Spec(name=name, scratch=tmp_path, options=options))

    with box("agent") as agent, box("copy") as copy:
        work, fresh = Workspace(task, agent), Workspace(task, copy)
        work.prepare()
        fresh.prepare()
        made = agent.exec(["sh", "-c", change], timeout_s=60, cwd=work.path)
        assert made.code == 0, made.stderr
        fresh.apply(work.diff())
        shell = ["sh", "-c", look]
        one = agent.exec(shell, timeout_s=60, cwd=work.path).stdout
        assert copy.exec(shell, timeout_s=60, cwd=fresh.path).stdout == one
        # nothing stays put aside
        assert not agent.exec(["find", "-name", "*~*"], timeout_s=60).stdout


def test_a_callback_that_is_no_url_is_told_before_anything_runs():
    with pytest.raises(ValueError, match="http://"):
        Callback("http://host:port")


def test_directories_that_an_agent_closed_are_removed():
    user = os.geteuid()
    if user == 0:
        # whom modes hold back
        os.seteuid(65534)
    try:
        with tempfile.TemporaryDirectory() as outside:
            root = Path(tempfile.mkdtemp())
            (root / "a/b").mkdir(parents=True)
            (root / "a/b/c").write_text("c")
            (root / "link").symlink_to(outside)
            os.chmod(outside, 0o755)
            os.chmod(root / "a/b", 0)
            os.chmod(root / "a", 0o555)
            remove(root)
            assert not root.exists()
            assert stat.S_IMODE(os.stat(outside).st_mode) == 0o755
    finally:
        os.seteuid(user)


# what engines do


async def test_an_engine_that_falls_silent_is_given_up(monkeypatch):
    monkeypatch.setattr(http, "_TIMEOUT", aiohttp.ClientTimeout(sock_read=0.2))
    connections = http.Connections()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        server = http.EngineClient("SGLang", url, connections)
        with pytest.raises(EngineError, match="cannot be reached: SocketTimeoutError"):
            await server.post("/generate", {})
        await connections.close()


async def test_connections_to_an_engine_notice_that_it_is_gone():
    """Its machine sends nothing then, and does not close them either."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        connections = http.Connections()
        asked = asyncio.create_task(connections.session().get(url))
        loop = asyncio.get_running_loop()
        silent.setblocking(False)
        line, _ = await loop.sock_accept(silent)
        with line:
            await loop.sock_recv(line, 1)
            # the answer has begun, so that its connection is held
            await loop.sock_sendall(
                line, b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n"
            )
            answer = await asked
            own = answer.connection.transport.get_extra_info("socket")
            assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15
            answer.close()
        await connections.close()
