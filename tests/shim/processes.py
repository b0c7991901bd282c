"""``trajkit serve`` as a process of its own, the server that it launches, and their end."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from trajkit_shim.engines.embedded import END, chat_files
from trajkit_shim.engines.launch import running_server, sglang_server

ROOT = Path(__file__).parents[2]
COMMAND = "import sys; from trajkit.cli import main; sys.exit(main())"
FAKE = Path(__file__).with_name("engines") / "fake_sglang.py"
# a pipe is buffered, unless the environment says otherwise
ENVIRONMENT = {
    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'shim'}",
    "PYTHONUNBUFFERED": "",
}


@pytest.fixture
def python(tmp_path):
    """A program that takes the arguments of Python, and is the fake server."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I {FAKE} "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def model(tmp_path):
    """The directory of a model with the embedded engine's tokenizer."""
    return model_directory(tmp_path / "model")


def model_directory(folder, template=None):
    tokenizer, own = chat_files()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"eos_token": END, "chat_template": template or own}
    files = {"tokenizer_config": named, "config": {"vocab_size": 4032}}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


@contextmanager
def launched(python, tmp_path, *arguments, **options):
    """The URL of a launched server."""
    log = tmp_path / "logs" / "engine.log"
    command = sglang_server(python, "m", arguments)
    with running_server(*command, log, **options) as url:
        yield url


@contextmanager
def serving(directory, *options, code=COMMAND, after=(), port=0, **environment):
    """The process of ``trajkit serve``, in a group of its own as a shell starts it."""
    argv = ["serve", "--out", str(directory / "run"), f"--port={port}", "--json"]
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, *argv, *options, *after],
        env=os.environ | ENVIRONMENT | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def printed(process):
    """What the process says once it serves."""
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    return json.loads(line)


def stop(process, number=signal.SIGTERM):
    """The exit code, and what else the process printed."""
    process.send_signal(number)
    rest, errors = process.communicate(timeout=60)
    return process.returncode, rest, errors


ASKING = {"trust_env": False, "timeout": 60}


def get(url, **headers):
    return httpx.get(url, headers=headers, **ASKING)


def post(url, body=None, **headers):
    return httpx.post(url, json=body or {}, headers=headers, **ASKING)


def chat(url, key, **fields):
    """A call of an agent."""
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "m", "messages": messages, **fields}
    answer = post(f"{url}/v1/chat/completions", body, authorization=f"Bearer {key}")
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def until(condition):
    """Ask until the answer is true."""
    deadline = time.monotonic() + 60
    while not (answer := condition()):
        assert time.monotonic() < deadline
    return answer


def read_pids(path):
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def children(pid):
    """The ids of the processes that a process started, and that these did."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    found = [int(child) for task in tasks for child in task.read_text().split()]
    return [*found, *(each for child in found for each in children(child))]


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
