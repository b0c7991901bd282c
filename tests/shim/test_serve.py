"""``trajkit serve``: the command, its workers, the server that it launches, sockets."""

import asyncio
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import ANY, Mock

import pytest

import trajkit as tk
from tests.shim.clients import PATHS, USER
from tests.shim.fakes import RENDERER, ScriptedEngine, Threaded, cases, fails, raises
from tests.shim.processes import (
    COMMAND,
    chat,
    children,
    get,
    launched,
    model,
    model_directory,
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
from trajkit_shim import serve
from trajkit_shim.app import create_app
from trajkit_shim.client import GatewayClient
from trajkit_shim.engines import launch
from trajkit_shim.errors import GatewayError
from trajkit_shim.serve import PlainFormatter, running
from trajkit_shim.sessions.turn_log import TurnLog

# fixtures of the launched server
__all__ = ["model", "python"]


SLOW = """
import asyncio, os
from pathlib import Path
from trajkit_shim.engines import embedded
async def stalled(self, *given, **options):
    Path(os.environ["ASKED"]).touch()
    await asyncio.sleep(600)
embedded.EmbeddedEngine.generate = stalled
"""


@pytest.mark.parametrize(
    ("drain_seconds", "signals", "stream"),
    [("0.2", 1, False), ("600", 2, True)],
    ids=["in time", "twice"],
)
def test_a_stopped_gateway_closes_its_sessions(
    tmp_path, drain_seconds, signals, stream
):
    """Its clients get the error in their protocol, and it prints nothing."""
    asked, options = tmp_path / "asked", ["--drain-seconds", drain_seconds]
    with (
        serving(tmp_path, *options, code=SLOW + COMMAND, ASKED=str(asked)) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        url = printed(server)["url"]
        key = {"x-api-key": post(f"{url}/sessions").json()["api_key"]}
        body = {"max_tokens": 9, "stream": stream}
        body["messages"] = [{"role": "user", "content": "hi"}]
        call = pool.submit(post, f"{url}/v1/messages", body, **key)
        while not asked.exists():
            assert server.poll() is None
        server.send_signal(signal.SIGTERM)
        # signals that are pending at once are one
        while signals > 1 and _listens(url):
            assert server.poll() is None
        if signals > 1:
            server.send_signal(signal.SIGTERM)
        answer = call.result()
        _, errors = server.communicate(timeout=60)
    assert (answer.status_code, errors) == (410, "")
    assert "is closed" in answer.json()["error"]["message"]
    (line,) = tk.read_sessions(tmp_path / "run").to_pylist()
    assert line["ended_by"] == "shutdown"


def _listens(url):
    try:
        socket.create_connection(url.removeprefix("http://").split(":")).close()
    # a server that stops may also reset a connection
    except ConnectionError:
        return False
    return True


@pytest.fixture
def command(tmp_path, capsys):
    """The exit code of the command in this process, and what it says of an error."""

    def command(*options):
        code = cli.main(["serve", "--port=0", f"--out={tmp_path}/run", *options])
        return code, capsys.readouterr().err

    return command


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--engine sglang --model .", "needs --engine-url"),
        ("--engine sglang --engine-url http://127.0.0.1:1", "needs --model"),
        ("--model .", "does not take --model"),
        ("--stop-token x --chat-template .", "take --chat-template --stop-token"),
        ("--engine vllm", "vllm needs --engine-url"),
        ("--parser x", "--parser x is not one of gpt-oss"),
        ("--parser engine", "needs --engine sglang"),
        ("--routed-experts", "--routed-experts and --sampling-masks need a server"),
        ("--engine tgi", "Choose from"),
        ("--launch m", "--launch needs --engine sglang"),
        ("--engine sglang --launch m --engine-url http://a", "leave out --engine-url"),
        ("-- --tp 2", "--tp 2 after -- is for the server of --launch"),
        ("--engine sglang --launch m", "pip install 'trajkit[sglang]'"),
        ("--host 0.0.0.0", "give --admin-token"),
        ("--chat-template-kwargs {", "--chat-template-kwargs {: not"),
        ("--chat-template-kwargs [1]", "--chat-template-kwargs [1]: not"),
        # no escape sequence reaches a terminal
        ("--chat-template-kwargs \x1b[2J", "--chat-template-kwargs \\x1b[2J: not"),
    ],
)
def test_serve_refuses_options_that_do_not_fit(command, tmp_path, options, says):
    code, error = command(*options.split())
    assert code == cli.BAD_USAGE
    assert says in error
    assert "kwargs" in options or not (tmp_path / "run").exists()


OFFERS = (
    "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}"
    "<|im_end|>{% endfor %}"
)
# an engine that cannot be reached
GONE = ["--engine", "sglang", "--engine-url", "http://127.0.0.1:1", "--model"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("", "does not show the calls of a reply; give --chat-template"),
        ("--parser none", "127.0.0.1:1 cannot be reached"),
        ("--parser hermes", "127.0.0.1:1 cannot be reached"),
        ("--parser engine", "127.0.0.1:1 cannot be reached"),
        ("--stop-token <stop>", "--stop-token <stop>: no token"),
        ("--chat-template none.jinja", "none.jinja"),
    ],
)
def test_a_model_whose_calls_no_parser_knows(
    command, tmp_path, monkeypatch, options, says
):
    monkeypatch.chdir(tmp_path)
    model = model_directory(tmp_path / "model", OFFERS)
    code, error = command(*GONE, model, *options.split())
    assert code == cli.BAD_FILE
    assert says in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_only_a_model_that_takes_images_needs_the_extra_images(
    command, tmp_path, model, monkeypatch
):
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, error = command(*GONE, model)
    assert (code, "cannot be reached" in error) == (cli.BAD_FILE, True)
    folder = Path(model)
    config = {"vocab_size": 4032, "image_token_id": 7}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text("{}")
    code, error = command(*GONE, model)
    assert (code, "pip install 'trajkit[images]'" in error) == (cli.BAD_USAGE, True)


def test_serve_without_its_extra_says_what_to_install(command, monkeypatch):
    monkeypatch.delitem(sys.modules, "trajkit_shim.app", raising=False)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    code, error = command()
    assert (code, "pip install 'trajkit[shim]'" in error) == (cli.BAD_USAGE, True)


def test_the_options_reach_the_gateway(command, monkeypatch):
    create_app = Mock(side_effect=OSError("enough"))
    monkeypatch.setattr("trajkit_shim.app.create_app", create_app)
    variables = {"enable_thinking": False}
    given = ["--past-reasoning", "sampled", "--chat-template-kwargs"]
    assert command(*given, json.dumps(variables)) == (cli.BAD_FILE, ANY)
    *_, options = create_app.call_args.args
    assert (options.past, options.variables) == ("sampled", variables)


# Servers that are launched for a gateway, and end with it


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
    assert capfd.readouterr().err == "loading\n\\x1b[31mthere is no GPU\n"
    mute = ["--fake", "mute", "--pids", str(pids)]
    reason = r"never healthy: it did not answer in time"
    never_healthy(reason, python, tmp_path, *mute, start_seconds=1)
    until_ended(read_pids(pids))
    failing = fails("too many processes", raised=BlockingIOError)
    monkeypatch.setattr(subprocess, "Popen", failing)
    never_healthy("server failed: too many processes", python, tmp_path)


def launching(tmp_path, python, model, pids, *server):
    """``trajkit serve --launch`` as a process."""
    options = ["--engine", "sglang", "--launch", model, "--launch-python", python]
    options += ["--past-reasoning", "sampled", "--attribution"]
    after = ["--", "--pids", str(pids), *server]
    return serving(tmp_path, *options, after=after)


def test_serve_launches_and_records_until_it_is_interrupted(
    tmp_path, python, model, pids
):
    with launching(tmp_path, python, model, pids) as gateway:
        where = printed(gateway)
        opened = post(f"{where['url']}/sessions").json()
        chat(where["openai_base_url"].removesuffix("/v1"), opened["api_key"])
        code, output, errors = stop(gateway, signal.SIGINT)
    assert (code, output) == (cli.DONE, "")
    assert f"its log is {tmp_path}/run/engine.log" in errors
    shown = [where["prompts"][name] for name in ("mode", "past_reasoning", "rendered")]
    assert shown == ["append", "sampled", {}]
    until_ended(read_pids(pids))
    (turn,) = tk.read_turns(where["turns"]).to_pylist()
    assert turn["session_id"] == opened["session_id"]
    assert turn["output_ids"] == [104, 105]
    assert max(turn["prompt_message_index"]) == 0
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
    agent = """curl -sf "$OPENAI_BASE_URL/chat/completions" -d '{"messages": [{"role": \
"user", "content": "hi"}]}' -H "authorization: Bearer $OPENAI_API_KEY" """
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "run"
    task = {"id": "t", "prompt": "p", "workspace": {"a": "a"}}
    tasks.write_text(json.dumps({**task, "grade": {"kind": "completed"}}))
    argv = ["rollout", str(tasks), "--harness", "shell", "--argument", agent]
    argv += ["--engine", "sglang", "--launch", model, "--launch-python", python]
    argv += ["--out", str(out), "--json", "--sandbox-option", "namespaces=no"]
    assert cli.main([*argv, "--", "--pids", str(pids)]) == cli.DONE
    (rollout,) = json.loads(capsys.readouterr().out)["rollouts"]
    assert rollout["reward"] == 1.0
    assert tk.read_turns(out / "turns")["output_ids"].to_pylist() == [[104, 105]]
    assert (out / "engine.log").exists()
    assert len(read_pids(pids)) == 2
    until_ended(read_pids(pids))


# Workers: real processes, which a trainer sees as one gateway

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


def call(session):
    chat(session.base_url, session.api_key)


def test_sessions_of_all_workers_are_one_log(tmp_path):
    with workers(tmp_path, "--log", "delta", n=3) as (process, urls, clients):
        # any of them takes the trainer's requests
        sessions = [clients[k % 3].open(f"s{k}") for k in range(6)]
        places = Counter(session.base_url for session in sessions)
        assert places == dict.fromkeys(urls, 2)
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(call, [*sessions, *sessions]))
        for k in range(6):
            assert clients[k % 3].describe(f"s{k}")["turns"] == 2
        with raises(GatewayError, "was opened before", status=409):
            clients[2].open("s0")
        with raises(GatewayError, "no session 'x'", status=404):
            clients[1].finish("x")
        for k in range(5):
            assert clients[(k + 1) % 3].finish(f"s{k}", reward=k)["reward"] == k
        assert clients[2].drop("s5")["ended_by"] == "drop"
        counts = [get(f"{url}/healthz").json()["sessions"] for url in urls]
        assert [(c["open"], c["closed"], c["turns"]) for c in counts] == [(0, 2, 4)] * 3
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
            says = f"POST /sessions of the gateway at {url}: .*admin t"
            with GatewayClient(url, "wrong") as stranger, raises(GatewayError, says):
                stranger.open("a")
            # what a web page may send through the browser of somebody
            for head in ({"origin": "http://evil.example"}, {"host": "evil.org"}):
                answer = post(f"{url}/sessions", {}, **ADMIN, **head)
                assert answer.status_code == 403, answer.text
        # before the body is read
        head = b"POST /sessions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
        answer = exchanged(urls[1], head + b"Content-Length: 9\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 401")
        # the refused ones left no trace
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


def test_new_weights_for_all_workers(tmp_path, python, model):
    """The first worker holds the lease, whichever is asked."""
    with launched(python, tmp_path) as engine:
        options = ["--engine", "sglang", "--engine-url", engine, "--model", model]
        with workers(tmp_path, *options) as (process, urls, (_, client)):
            sessions = [client.open(), client.open()]
            client.pause()
            paused = [get(f"{url}/engine", **ADMIN).json()["paused"] for url in urls]
            client.update_weights("/new", "step-1")
            client.resume()
            for session in sessions:
                call(session)
            stop(process)
        state = get(f"{engine}/state").json()
    assert paused == [True, True]
    assert (state["paused"], len(state["updates"])) == (False, 1)
    turns = tk.read_turns(tmp_path / "run").to_pylist()
    assert [turn["weight_versions"][0]["version"] for turn in turns] == ["step-1"] * 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_process_group_or_its_parent_ends_all(tmp_path, number):
    with workers(tmp_path) as (process, _, clients):
        pids = children(process.pid)
        assert len(pids) >= 2
        call(clients[0].open())
        (os.kill if number == signal.SIGKILL else os.killpg)(process.pid, number)
        _, errors = process.communicate(timeout=60)
        until_ended(pids)
    if number != signal.SIGKILL:
        assert (process.returncode, errors) == (cli.DONE, "")


def test_a_worker_that_ends_ends_the_others(tmp_path):
    with workers(tmp_path) as (process, *_):
        pids = children(process.pid)
        # multiprocessing starts a process of its own before
        *_, last = pids
        os.kill(last, signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == cli.BAD_FILE
    assert errors.endswith("trajkit: worker 1 ended with exit code -9\n")
    until_ended(pids)


@pytest.mark.parametrize("words", ["the engine does not work", "in use"])
def test_an_error_of_all_workers_is_one_error(tmp_path, model, words):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given, port = [*GONE, model], 0
        if words == "in use":
            given, port = [], taken.getsockname()[1]
        with serving(tmp_path, "--workers", "2", *given, port=port) as process:
            _, errors = process.communicate(timeout=60)
    assert process.returncode == cli.BAD_FILE
    assert (errors.count(words), "Traceback" in errors) == (1, False), errors


# Sockets


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


def exchanged(url, sent, *, ends=False):
    """What comes back on a connection, whose sending side may end."""
    with connect(url) as line:
        line.sendall(sent)
        if ends:
            line.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: line.recv(1 << 16), b""))


def test_a_client_that_ends_its_sending_side_gets_its_answer(
    served, tmp_path, monkeypatch
):
    """As ``nc -N``: the end comes with the request."""
    monkeypatch.setattr("trajkit_shim.serve._WITH_REQUEST_SECONDS", 60.0)
    with served("answer") as url:
        key, body = opened(url), b'{"messages": [{"role": "user", "content": "x"}]}'
        asked = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\n"
            b"Authorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s"
            % (key.encode(), len(body), body)
        )
        answer = exchanged(url, asked, ends=True)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"answer" in answer
    (turn,) = tk.read_turns(tmp_path).to_pylist()
    assert turn["trainable"]


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [
        # Java's client offers HTTP/2 with its first request
        ("Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 2", "{}", 200),
        ("Transfer-Encoding: chunked", "2\r\n{}\r\n0\r\nX: 1\r\n\r\n", 200),
        ("Transfer-Encoding: chunked", "2\r\n{}\r\n0\r\nX: " + "1" * 300_000, 400),
    ],
    ids=["an offer", "a trailer", "a long trailer"],
)
def test_what_a_request_has_beside_its_body(served, head, body, status):
    with served() as url:
        asked = f"POST http://a/sessions HTTP/1.1\r\nHost: a\r\n{head}\r\n\r\n{body}"
        answer = exchanged(url, asked.encode(), ends=True)
    assert answer.startswith(f"HTTP/1.1 {status}".encode())
    assert status == 400 or b"session_id" in answer


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
        long = {"messages": [{**USER, "content": "a" * (40 << 20)}]}
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
        answer = exchanged(url, sent)
        assert answer.count(b"HTTP/1.1 200") == sent.count(b"\r\n\r\nGET")
        # a request that arrived has all the time that it needs
        assert get(f"{url}/healthz").status_code == 200


def test_small_parts_of_an_answer_are_sent_at_once():
    """Without TCP_NODELAY the second part waits for the first one's receipt."""
    with (
        serve.listen("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as own,
    ):
        assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


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


@pytest.mark.parametrize("kind", [None, "asyncio", "uvloop"])
def test_the_loop_is_asyncio_and_any_is_served(served, monkeypatch, kind):
    """An old uvicorn leaves the choice of the loop to the process."""
    pytest.importorskip("uvloop")
    config = partial(serve.uvicorn.Config, loop=kind)
    if kind is not None:
        monkeypatch.setattr(
            serve.uvicorn, "Config", lambda *given, loop, **more: config(*given, **more)
        )

    async def loop():
        return type(asyncio.get_running_loop()).__module__

    with served(loop) as url:
        found = chat(url, opened(url))
    assert found == ("uvloop" if kind == "uvloop" else "asyncio.unix_events")


def test_no_control_character_is_logged():
    try:
        raise ValueError("\x1b]0;title\x07 \x9b2J\ra")
    except ValueError:
        info = sys.exc_info()
    given = ("uvicorn", logging.ERROR, "f", 1, "a\x1b[31m", (), info)
    text = PlainFormatter().format(logging.LogRecord(*given))
    assert text.startswith("a\\x1b[31m\nTraceback")
    assert text.endswith("ValueError: \\x1b]0;title\\x07 \\x9b2J\\ra")
