"""``trajkit serve``, from outside and in process."""

import json
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import trajkit as tk
from tests.shim.processes import (
    COMMAND,
    chat,
    model_directory,
    post,
    printed,
    serving,
    stop,
)
from trajkit import cli


def test_serve_records_until_it_is_interrupted(tmp_path):
    with serving(tmp_path) as server:
        where = printed(server)
        opened = post(f"{where['url']}/sessions").json()
        chat(where["openai_base_url"].removesuffix("/v1"), opened["api_key"])
        assert stop(server, signal.SIGINT) == (cli.DONE, "", "")
    assert Path(where["turns"]) == tmp_path / "run"
    assert where["prompts"]["mode"] == "append"
    assert where["prompts"]["template"]["with_tools"]["extends"]["tool"] is True
    turns = tk.read_turns(tmp_path / "run")
    assert turns["session_id"].to_pylist() == [opened["session_id"]]


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
    ("drain_seconds", "signals"), [("0.2", 1), ("600", 2)], ids=["in time", "twice"]
)
@pytest.mark.parametrize("stream", [False, True])
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
def serve(tmp_path, capsys):
    """The exit code of the command in this process, and what it says of an error."""

    def serve(*options):
        code = cli.main(["serve", "--out", str(tmp_path / "run"), *options])
        return code, capsys.readouterr().err

    return serve


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--engine sglang --model .", "needs --engine-url"),
        ("--engine sglang --engine-url http://127.0.0.1:1", "needs --model"),
        ("--model .", "--model does not apply"),
        ("--engine vllm", "vllm needs --engine-url"),
        ("--parser x", "--parser x is not one of gpt-oss"),
        ("--parser engine", "needs --engine sglang"),
        ("--routed-experts", "--routed-experts and --sampling-masks need a server"),
        ("--engine tgi", "Choose from"),
        ("--launch m", "--launch needs --engine sglang"),
        (
            "--engine sglang --launch m --engine-url http://a",
            "leave out --engine-url",
        ),
        ("-- --tp 2", "--tp 2 after -- is for the server of --launch"),
        ("--engine sglang --launch m", "pip install 'trajkit[sglang]'"),
        ("--host 0.0.0.0", "give --admin-token"),
        ("--chat-template-kwargs {", "--chat-template-kwargs {: not"),
        ("--chat-template-kwargs [1]", "--chat-template-kwargs [1]: not"),
    ],
)
def test_serve_refuses_options_that_do_not_fit(serve, tmp_path, options, says):
    code, error = serve(*options.split())
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
        ("", "no parser knows: give --parser with one of"),
        ("--parser none", "127.0.0.1:1 cannot be reached"),
        ("--parser hermes", "127.0.0.1:1 cannot be reached"),
        ("--parser engine", "127.0.0.1:1 cannot be reached"),
        ("--stop-token <stop>", "--stop-token <stop>: no token"),
        ("--chat-template none.jinja", "none.jinja"),
    ],
)
def test_a_model_whose_calls_no_parser_knows(
    serve, tmp_path, monkeypatch, options, says
):
    monkeypatch.chdir(tmp_path)
    model = model_directory(tmp_path / "model", OFFERS)
    code, error = serve(*GONE, str(model), *options.split())
    assert code == cli.BAD_FILE
    assert says in error
    assert len(error.strip().splitlines()) == 1


def test_only_a_model_that_takes_images_needs_the_extra_images(
    serve, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "transformers", None)
    model = model_directory(tmp_path / "model")
    code, error = serve(*GONE, str(model))
    assert (code, "cannot be reached" in error) == (cli.BAD_FILE, True)
    config = {"vocab_size": 4032, "image_token_id": 7}
    (model / "config.json").write_text(json.dumps(config))
    (model / "preprocessor_config.json").write_text("{}")
    code, error = serve(*GONE, str(model))
    assert (code, "pip install 'trajkit[images]'" in error) == (cli.BAD_USAGE, True)


def test_serve_without_its_extra_says_what_to_install(serve, monkeypatch):
    monkeypatch.delitem(sys.modules, "trajkit_shim.app", raising=False)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    code, error = serve()
    assert (code, "pip install 'trajkit[shim]'" in error) == (cli.BAD_USAGE, True)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_serve_asks_the_engine_before_it_serves(serve, tmp_path, engine):
    model = model_directory(tmp_path / "model")
    code, error = serve("--engine", engine, *GONE[2:], str(model))
    assert code == cli.BAD_FILE
    assert "the engine does not work" in error
    assert "127.0.0.1:1 cannot be reached" in error
    assert not (tmp_path / "run").exists()


def test_the_options_reach_the_gateway(tmp_path, monkeypatch):
    given = []

    def create_app(*arguments):
        given.append(arguments[-1])
        raise OSError("enough")

    monkeypatch.setattr("trajkit_shim.app.create_app", create_app)
    argv = ["serve", "--out", str(tmp_path / "run"), "--past-reasoning", "sampled"]
    argv += ["--chat-template-kwargs", '{"enable_thinking": false}']
    assert cli.main(argv) == cli.BAD_FILE
    variables = {"enable_thinking": False}
    assert (given[0].past, given[0].variables) == ("sampled", variables)
