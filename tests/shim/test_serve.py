"""The gateway on a socket."""

import logging
import os
import resource
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

import trajkit as tk
from tests.shim.clients import PATHS, USER
from tests.shim.fakes import RENDERER, ScriptedEngine, Threaded, cases
from tests.shim.processes import chat, get, post
from trajkit_shim import serve
from trajkit_shim.app import create_app
from trajkit_shim.serve import PlainFormatter, running
from trajkit_shim.sessions.turn_log import TurnLog


@pytest.fixture
def served(tmp_path):
    """Serve these replies, or by an app; the URL."""

    def served(*script, **options):
        app = create_app(ScriptedEngine(*script), RENDERER, TurnLog(tmp_path))
        return running(app, **options)

    return served


def connect(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), 30)


def opened(url):
    return post(f"{url}/sessions").json()["api_key"]


def received(line):
    return b"".join(iter(lambda: line.recv(1 << 16), b""))


def test_a_client_that_ends_its_sending_side_gets_its_answer(
    served, tmp_path, monkeypatch
):
    """As ``nc -N``: the end comes with the request."""
    monkeypatch.setattr("trajkit_shim.serve._WITH_REQUEST_SECONDS", 60.0)
    with served("answer") as url:
        key, body = opened(url), b'{"messages": [{"role": "user", "content": "x"}]}'
        with connect(url) as line:
            line.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\n"
                b"Authorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s"
                % (key.encode(), len(body), body)
            )
            line.shutdown(socket.SHUT_WR)
            answer = received(line)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"answer" in answer
    (turn,) = tk.read_turns(tmp_path).to_pylist()
    assert turn["trainable"]


def test_stopping_answers_the_calls_under_way(served, tmp_path):
    held = Threaded("late")
    with ThreadPoolExecutor(2) as pool:
        with served(held) as url:
            # the gateway accepts it before those that come later
            idle = connect(url)
            call = pool.submit(chat, url, opened(url))
            assert held.entered.wait(30)

            def release():
                """Once the gateway closes the connections without a request."""
                with idle:
                    assert idle.recv(1) == b""
                held.release.set()

            released = pool.submit(release)
        assert call.result() == "late"
        released.result()
    assert tk.read_turns(tmp_path).num_rows == 1


def test_a_body_that_is_much_too_long_gets_its_answer(served):
    with served("hello") as url:
        key = opened(url)
        long = {"messages": [{**USER, "content": "a" * (200 << 20)}]}
        for _ in range(2):
            answer = post(url + PATHS["openai_chat"], long, **{"x-session-key": key})
            assert answer.status_code == 413
        assert chat(url, key) == "hello"


@cases(
    "sent",
    {
        "nothing": b"",
        "half a head": b"GET /healthz HTT",
        "half a body": b"POST /sessions HTTP/1.1\r\nHost: a\r\n"
        b"Content-Length: 9\r\n\r\n{}",
        "half of a second request": b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\nGET",
    },
)
def test_a_connection_whose_request_does_not_arrive_is_closed(
    served, monkeypatch, sent
):
    monkeypatch.setattr(serve, "REQUEST_SECONDS", 0.2)
    with served() as url:
        with connect(url) as line:
            line.sendall(sent)
            answer = received(line)
        assert answer.count(b"HTTP/1.1 200") == sent.count(b"\r\n\r\nGET")
        # a request that arrived has all the time that it needs
        assert get(f"{url}/healthz").status_code == 200


def test_small_parts_of_an_answer_are_sent_at_once(served, monkeypatch):
    """Without TCP_NODELAY the second part waits for the first one's receipt."""
    found, made = [], serve._Connection.connection_made

    def watched(self, transport):
        made(self, transport)
        line = transport.get_extra_info("socket")
        found.append(line.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(serve._Connection, "connection_made", watched)
    with served() as url:
        get(f"{url}/healthz")
    assert found == [1]


def test_more_connections_than_the_soft_limit_of_files(served):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_open = len(os.listdir("/proc/self/fd"))
    serving = served()
    resource.setrlimit(resource.RLIMIT_NOFILE, (n_open + 50, before[1]))
    try:
        with serving as url, ExitStack() as lines:
            for _ in range(100):
                line = lines.enter_context(connect(url))
                line.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
                assert line.recv(12) == b"HTTP/1.1 200"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_address_in_use_is_refused(served):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"), served(port=port):
            pass


def test_no_control_character_is_logged():
    try:
        raise ValueError("\x1b]0;title\x07 \x9b2J\ra")
    except ValueError:
        info = sys.exc_info()
    given = ("uvicorn", logging.ERROR, "f", 1, "a\x1b[31m", (), info)
    text = PlainFormatter().format(logging.LogRecord(*given))
    assert text.startswith("a\\x1b[31m\nTraceback")
    assert text.endswith("ValueError: \\x1b]0;title\\x07 \\x9b2J\\ra")
