"""``trajkit serve``, from outside and in process."""

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

import trajkit as tk
from tests.shim.fakes import save_tokenizer
from trajkit import cli
from trajkit_rollout import command as rollout

ROOT = Path(__file__).parent.parent.parent
COMMAND = "import sys; from trajkit.cli import main; sys.exit(main())"


def test_serve_records_until_it_is_interrupted(tmp_path):
    run = tmp_path / "run"
    options = ["--out", str(run), "--port", "0", "--json"]
    with (
        httpx.Client(trust_env=False, timeout=60) as client,
        subprocess.Popen(
            [sys.executable, "-c", COMMAND, "serve", *options],
            env=os.environ
            | {
                "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'shim'}",
                # a pipe is buffered, unless the environment says otherwise
                "PYTHONUNBUFFERED": "",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as server,
    ):
        try:
            where = json.loads(server.stdout.readline())
            opened = client.post(f"{where['url']}/sessions").json()
            reply = client.post(
                f"{where['openai_base_url']}/chat/completions",
                headers={"Authorization": f"Bearer {opened['api_key']}"},
                json={"model": "any", "messages": [{"role": "user", "content": "hi"}]},
            )
            assert reply.status_code == 200
        finally:
            server.send_signal(signal.SIGINT)
        rest, said = server.communicate()
    assert (server.returncode, rest, said) == (cli.DONE, "", "")
    assert Path(where["turns"]) == run
    assert where["prompts"]["mode"] == "append"
    assert where["prompts"]["template"]["with_tools"]["extends"]["tool"] is True
    turns = tk.read_turns(run)
    assert turns["session_id"].to_pylist() == [opened["session_id"]]


SLOW = """
import asyncio, sys
from pathlib import Path
from trajkit_shim.engines import embedded
async def stalled(self, *given, **options):
    Path(sys.argv.pop()).touch()
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
    asked = tmp_path / "asked"
    argv = ["serve", "--out", str(tmp_path / "run"), "--port", "0", "--json"]
    argv += ["--drain-seconds", drain_seconds]
    code = f"{SLOW}\nfrom trajkit.cli import main\nmain({argv!r})"
    with (
        httpx.Client(trust_env=False, timeout=60) as client,
        ThreadPoolExecutor(1) as pool,
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code, str(asked)],
            env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'shim'}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as server,
    ):
        try:
            url = json.loads(server.stdout.readline())["url"]
            key = client.post(f"{url}/sessions").json()["api_key"]
            call = pool.submit(
                client.post,
                f"{url}/v1/messages",
                headers={"x-api-key": key},
                json={
                    "max_tokens": 9,
                    "messages": [{"role": "user", "content": "hi"}],
                    "stream": stream,
                },
            )
            while not asked.exists():
                assert server.poll() is None
            server.send_signal(signal.SIGTERM)
            if signals > 1:
                # signals that are pending at once are one
                while _listens(url):
                    assert server.poll() is None
                server.send_signal(signal.SIGTERM)
            answer = call.result()
        finally:
            _, said = server.communicate(timeout=60)
    assert answer.status_code == 410
    assert "is closed" in answer.json()["error"]["message"]
    assert said == ""
    (line,) = tk.read_sessions(tmp_path / "run").to_pylist()
    assert line["ended_by"] == "shutdown"


def _listens(url):
    try:
        socket.create_connection(url.removeprefix("http://").split(":")).close()
    # a server that stops may also reset a connection
    except ConnectionError:
        return False
    return True


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(
            ["--engine", "sglang", "--model", "."],
            "needs --engine-url",
            id="no address",
        ),
        pytest.param(
            ["--engine", "sglang", "--engine-url", "http://127.0.0.1:1"],
            "needs --model",
            id="no model",
        ),
        pytest.param(["--model", "."], "--model does not apply", id="a model too many"),
        pytest.param(["--engine", "vllm"], "vllm needs --engine-url", id="vllm"),
        pytest.param(
            ["--parser", "x"], "--parser x is not one of gpt-oss", id="no such form"
        ),
        pytest.param(
            ["--parser", "engine"],
            "needs --engine sglang",
            id="the parsers of another engine",
        ),
        pytest.param(
            ["--routed-experts"],
            "--routed-experts and --sampling-masks need a server",
            id="the experts of another engine",
        ),
        pytest.param(["--engine", "tgi"], "Choose from", id="no such engine"),
        (["--launch", "m"], "--launch needs --engine sglang"),
        (
            ["--engine", "sglang", "--launch", "m", "--engine-url", "http://a"],
            "leave out --engine-url",
        ),
        (["--", "--tp", "2"], "--tp 2 after -- is for the server of --launch"),
        (["--engine", "sglang", "--launch", "m"], "pip install 'trajkit[sglang]'"),
        pytest.param(["--host", "0.0.0.0"], "give --admin-token", id="open to all"),
    ],
)
def test_serve_refuses_options_that_do_not_fit(tmp_path, capsys, options, said):
    assert (
        cli.main(["serve", "--out", str(tmp_path / "run"), *options]) == cli.BAD_USAGE
    )
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def model_directory(folder, template=None, **files):
    """A model directory with the embedded tokenizer."""
    save_tokenizer(folder, template)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 4032}))
    return folder


def serving(tmp_path, model, *options):
    """What the command prints with an engine that cannot be reached."""
    argv = ["serve", "--out", str(tmp_path / "run"), "--engine", "sglang"]
    argv += ["--engine-url", "http://127.0.0.1:1", "--model", str(model), *options]
    return cli.main(argv)


OFFERS = (
    "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}"
    "<|im_end|>{% endfor %}"
)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        pytest.param([], "no parser knows: give --parser with one of", id="a start"),
        pytest.param(["--parser", "none"], "127.0.0.1:1 cannot be reached", id="text"),
        pytest.param(
            ["--parser", "hermes"], "127.0.0.1:1 cannot be reached", id="a form"
        ),
        pytest.param(
            ["--parser", "engine"], "127.0.0.1:1 cannot be reached", id="the engine's"
        ),
        pytest.param(
            ["--stop-token", "<stop>"], "--stop-token <stop>: no token", id="no token"
        ),
        pytest.param(["--chat-template", "none.jinja"], "none.jinja", id="no file"),
    ],
)
def test_a_model_whose_calls_no_parser_knows(
    tmp_path, capsys, monkeypatch, options, says
):
    monkeypatch.chdir(tmp_path)
    model = model_directory(tmp_path / "model", OFFERS)
    assert serving(tmp_path, model, *options) == cli.BAD_FILE
    said = capsys.readouterr().err
    assert says in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize("given", ["{", "[1]"])
def test_variables_that_are_no_object(tmp_path, capsys, given):
    argv = ["serve", "--out", str(tmp_path / "run"), "--chat-template-kwargs", given]
    assert cli.main(argv) == cli.BAD_USAGE
    assert f"--chat-template-kwargs {given}: not" in capsys.readouterr().err


def test_only_a_model_that_takes_images_needs_the_extra_images(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "transformers", None)
    model = model_directory(tmp_path / "model")
    assert serving(tmp_path, model) == cli.BAD_FILE
    assert "cannot be reached" in capsys.readouterr().err
    (model / "config.json").write_text(
        json.dumps({"vocab_size": 4032, "image_token_id": 7})
    )
    (model / "preprocessor_config.json").write_text("{}")
    assert serving(tmp_path, model) == cli.BAD_USAGE
    assert "pip install 'trajkit[images]'" in capsys.readouterr().err


def test_serve_without_its_extra_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "trajkit_shim.app", raising=False)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    assert cli.main(["serve", "--out", str(tmp_path / "run")]) == cli.BAD_USAGE
    assert "pip install 'trajkit[shim]'" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_serve_asks_the_engine_before_it_serves(tmp_path, capsys, engine):
    model = model_directory(tmp_path / "model")
    argv = ["serve", "--out", str(tmp_path / "run"), "--engine", engine]
    argv += ["--engine-url", "http://127.0.0.1:1", "--model", str(model)]
    assert cli.main(argv) == cli.BAD_FILE
    said = capsys.readouterr().err
    assert "the engine does not work" in said
    assert "127.0.0.1:1 cannot be reached" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["serve", "rollout"])
def test_both_commands_take_the_options_of_a_gateway(tmp_path, monkeypatch, command):
    given = []

    def create_app(*arguments):
        given.append(arguments[-1])
        raise OSError("enough")

    monkeypatch.setattr("trajkit_shim.app.create_app", create_app)
    argv = [command, "--out", str(tmp_path / "run"), "--past-reasoning", "sampled"]
    argv += ["--chat-template-kwargs", '{"enable_thinking": false}']
    if command == "rollout":
        tasks = tmp_path / "tasks.jsonl"
        task = {"id": "t", "prompt": "p", "workspace": {"a": "a"}}
        tasks.write_text(json.dumps({**task, "grade": {"kind": "completed"}}))
        argv += [str(tasks), "--harness", "shell", "--argument", "true"]
        argv += ["--sandbox-option", "namespaces=no"]

        @contextmanager
        def here(arguments):
            """The gateway's process, without a process of its own."""
            pipe = SimpleNamespace(send=answers.append)
            rollout._serve(pipe, arguments, tmp_path / "log")
            raise answers[0]
            yield

        answers = []
        monkeypatch.setattr(rollout, "_gateway", here)
        monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert cli.main(argv) == cli.BAD_FILE
    assert (given[0].past, given[0].variables) == (
        "sampled",
        {"enable_thinking": False},
    )
