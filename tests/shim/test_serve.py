"""The gateway on a socket."""

import asyncio
import logging
import os
import resource
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import openai
import pytest
import uvicorn

import trajkit as tk
from tests.shim.clients import http, read_log
from tests.shim.fakes import RENDERER, ScriptedEngine, Threaded
from trajkit_shim import serve
from trajkit_shim.app import create_app
from trajkit_shim.serve import PlainFormatter, running
from trajkit_shim.sessions.turn_log import TurnLog

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command":  "ls"}}\n</tool_call>'


def messages(text="hi"):
    return [{"role": "user", "content": text}]


def client_of(url: str, **fields: object) -> openai.OpenAI:
    key = http.post(f"{url}/sessions", json=fields).json()["api_key"]
    return openai.OpenAI(api_key=key, base_url=f"{url}/v1", max_retries=0)


def test_sessions_side_by_side(tmp_path):
    engine = ScriptedEngine(*(f"reply {k}" for k in range(40)))
    log = TurnLog(tmp_path)

    def converse(url):
        with client_of(url) as client:
            said = messages()
            for _ in range(5):
                reply = client.chat.completions.create(model="x", messages=said)
                said += [reply.choices[0].message.model_dump(), *messages("go on")]

    with (
        running(create_app(engine, RENDERER, log)) as url,
        ThreadPoolExecutor(8) as pool,
    ):
        for done in [pool.submit(converse, url) for _ in range(8)]:
            done.result()
    turns = read_log(log.path).to_pylist()
    by_session: dict[str, list[int]] = {}
    for turn in turns:
        by_session.setdefault(turn["session_id"], []).append(turn["turn_index"])
    assert list(by_session.values()) == [[0, 1, 2, 3, 4]] * 8


def test_a_client_that_ends_its_sending_side_gets_its_answer(tmp_path, monkeypatch):
    """As ``nc -N``: the end comes with the request."""
    monkeypatch.setattr("trajkit_shim.serve._WITH_REQUEST_SECONDS", 60.0)
    app = create_app(ScriptedEngine("answer"), RENDERER, TurnLog(tmp_path))
    with running(app) as url, client_of(url) as client:
        host, port = url.removeprefix("http://").split(":")
        body = b'{"messages": [{"role": "user", "content": "x"}]}'
        with socket.create_connection((host, int(port)), timeout=30) as line:
            line.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\n"
                b"Authorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s"
                % (client.api_key.encode(), len(body), body)
            )
            line.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: line.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"answer" in answer
    (turn,) = tk.read_turns(tmp_path).to_pylist()
    assert turn["trainable"]


def release_once_closed(idle: socket.socket, held: Threaded) -> None:
    """Let a reply go once the gateway closes the connections without a request."""
    with idle:
        assert idle.recv(1) == b""
    held.release.set()


def test_stopping_answers_the_calls_under_way(tmp_path):
    held = Threaded("late")
    log = TurnLog(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        with running(create_app(ScriptedEngine(held), RENDERER, log)) as url:
            host, port = url.removeprefix("http://").split(":")
            # the gateway accepts it before those that come later
            idle = socket.create_connection((host, int(port)))
            client = client_of(url)
            call = pool.submit(
                client.chat.completions.create, model="x", messages=messages()
            )
            assert held.entered.wait(30)
            released = pool.submit(release_once_closed, idle, held)
        assert call.result().choices[0].message.content == "late"
        client.close()
        released.result()
    assert read_log(log.path).num_rows == 1


def test_a_body_that_is_much_too_long_gets_its_answer(tmp_path):
    engine = ScriptedEngine("hello")
    with running(create_app(engine, RENDERER, TurnLog(tmp_path))) as url:
        with client_of(url) as client:
            for _ in range(2):
                with pytest.raises(openai.APIStatusError) as caught:
                    client.chat.completions.create(
                        model="x", messages=messages("a" * (200 << 20))
                    )
                assert caught.value.status_code == 413
            client.chat.completions.create(model="x", messages=messages())


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /healthz HTT",
        b"POST /sessions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{}",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\nGET",
    ],
    ids=["nothing", "half a head", "half a body", "half of a second request"],
)
def test_a_connection_whose_request_does_not_arrive_is_closed(
    tmp_path, monkeypatch, sent
):
    monkeypatch.setattr(serve, "REQUEST_SECONDS", 0.2)
    with running(create_app(ScriptedEngine(), RENDERER, TurnLog(tmp_path))) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 30) as line:
            line.sendall(sent)
            answer = b""
            while data := line.recv(1 << 16):
                answer += data
        assert answer.count(b"HTTP/1.1 200") == sent.count(b"\r\n\r\nGET")
        # a request that arrived has all the time that it needs
        assert http.get(f"{url}/healthz").status_code == 200


def test_small_parts_of_an_answer_are_sent_at_once(tmp_path, monkeypatch):
    """Without TCP_NODELAY the second part waits for the first one's receipt."""
    found, made = [], serve._Connection.connection_made

    def watched(self, transport):
        made(self, transport)
        line = transport.get_extra_info("socket")
        found.append(line.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(serve._Connection, "connection_made", watched)
    with running(create_app(ScriptedEngine(), RENDERER, TurnLog(tmp_path))) as url:
        http.get(f"{url}/healthz")
    assert found == [1]


def test_more_connections_than_the_soft_limit_of_files(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd"))
    app = create_app(ScriptedEngine(), RENDERER, TurnLog(tmp_path))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 50, before[1]))
    try:
        with running(app) as url, ExitStack() as lines:
            host, port = url.removeprefix("http://").split(":")
            for _ in range(100):
                line = socket.create_connection((host, int(port)), 30)
                lines.enter_context(line)
                line.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
                assert line.recv(12) == b"HTTP/1.1 200"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_loop_is_asyncio_also_where_uvloop_is_installed(tmp_path):
    pytest.importorskip("uvloop")
    app, loops = create_app(ScriptedEngine(), RENDERER, TurnLog(tmp_path)), []

    async def seen(scope, receive, send):
        loops.append(asyncio.get_running_loop())
        await app(scope, receive, send)

    with running(seen) as url:
        assert http.get(f"{url}/healthz").status_code == 200
    assert {type(loop).__module__ for loop in loops} == {"asyncio.unix_events"}


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_a_connection_of_any_loop_is_served(tmp_path, monkeypatch, kind):
    """An old uvicorn leaves the choice of the loop to the process."""
    pytest.importorskip("uvloop")
    app = create_app(ScriptedEngine(), RENDERER, TurnLog(tmp_path))
    config = uvicorn.Config
    monkeypatch.setattr(
        serve.uvicorn, "Config", lambda *a, **k: config(*a, **k | {"loop": kind})
    )
    with running(app) as url:
        assert http.get(f"{url}/healthz").status_code == 200


def test_an_address_in_use_is_refused(tmp_path):
    app = create_app(ScriptedEngine(), RENDERER, TurnLog(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"), running(app, port=port):
            pass


def test_no_control_character_is_logged():
    try:
        raise ValueError("\x1b]0;title\x07 \x9b2J\ra")
    except ValueError:
        record = logging.LogRecord(
            "uvicorn", logging.ERROR, "f", 1, "a\x1b[31m", (), sys.exc_info()
        )
    text = PlainFormatter().format(record)
    assert text.startswith("a\\x1b[31m\nTraceback")
    assert text.endswith("ValueError: \\x1b]0;title\\x07 \\x9b2J\\ra")
