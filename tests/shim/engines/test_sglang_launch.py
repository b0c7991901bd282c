"""``trajkit serve --launch`` with the real SGLang server on a CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

import trajkit as tk
from tests.shim.clients import http
from tests.shim.engines.test_launch import runs
from tests.shim.sglang_cpu.servers import ARGUMENTS, PYTHON
from trajkit import cli

pytestmark = pytest.mark.sglang

ROOT = Path(__file__).parents[3]


def descendants(pid):
    """Command lines, by their ids, of the processes below a process."""
    found = {}
    for task in Path(f"/proc/{pid}/task").glob("*"):
        for child in (task / "children").read_text().split():
            command = Path(f"/proc/{child}/cmdline").read_bytes().decode()
            found[int(child)] = command.strip("\0").split("\0")
            found |= descendants(child)
    return found


def until_ended(pids):
    """Wait until no process runs: the kernel ends them one after the other."""
    deadline = time.monotonic() + 60
    while any(map(runs, pids)):
        assert time.monotonic() < deadline


def ask(client, text):
    message = {"role": "user", "content": text}
    client.chat.completions.create(model="tiny", messages=[message], max_tokens=4)


@contextmanager
def serving(tmp_path, model):
    """``trajkit serve --launch`` as a process, and its URL."""
    argv = ["serve", "--engine", "sglang", "--launch", model, "--json"]
    argv += ["--launch-python", PYTHON, "--launch-seconds", "300", "--port", "0"]
    argv += ["--out", str(tmp_path / "run"), "--", *ARGUMENTS]
    path = f"{ROOT}{os.pathsep}{ROOT / 'shim'}"
    with subprocess.Popen(
        [sys.executable, "-c", f"from trajkit.cli import main\nexit(main({argv!r}))"],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as gateway:
        try:
            yield gateway, json.loads(gateway.stdout.readline())["url"]
        finally:
            gateway.kill()


def test_a_launched_server_ends_with_the_gateway(tmp_path, tiny_model):
    with serving(tmp_path, tiny_model) as (gateway, url):
        key = http.post(f"{url}/sessions", timeout=60).json()["api_key"]
        client = openai.OpenAI(api_key=key, base_url=f"{url}/v1")
        ask(client, "hello")
        client.close()
        below = descendants(gateway.pid)
        gateway.send_signal(signal.SIGTERM)
        _, errors = gateway.communicate(timeout=120)
    assert gateway.returncode == cli.DONE, errors
    until_ended(below)
    (turn,) = tk.read_turns(tmp_path / "run").to_pylist()
    assert len(turn["output_ids"]) == 4
    assert "Uvicorn running" in (tmp_path / "run" / "engine.log").read_text()
