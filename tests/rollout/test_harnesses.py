"""Every harness is told its session, its model and its task, and nothing is left out."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from tests.rollout.test_sandbox import sandbox
from trajkit_rollout.sandbox import CommandResult, SandboxError
from trajkit_rollout.settings import HARNESSES, Harness
from trajkit_shim.protocols import PROTOCOLS

DOCS = Path(__file__).parents[2] / "docs/serving.md"
JOB = {
    "base_url": "http://127.0.0.1:4321",
    "api_key": "the-session",
    "model": "the-model",
    "prompt": '-v the task\'s "text"\n$HOME',
    "home": "/home",
    "workspace": "/work",
}


@pytest.mark.parametrize("name", HARNESSES)
def test_a_harness_is_told_where_it_is_and_what_to_do(name):
    record = HARNESSES[name]
    assert record.name == name
    told = str(record.launch(JOB, ("--extra=1",)))
    command, _, files, stdin = record.launch(JOB, ("--extra=1",))
    assert all(JOB[name] in told for name in ("base_url", "api_key", "model"))
    assert "--extra=1" in command or name == "shell"
    # no shell reads it
    assert stdin.decode() == JOB["prompt"] or command[-1].endswith(JOB["prompt"])
    assert all(not path.startswith("/") for path in files)


def test_the_documentation_has_each_harness_with_the_version_that_it_installs():
    protocols = {*(protocol.name for protocol in PROTOCOLS), "any"}
    page = DOCS.read_text(encoding="utf-8")
    table = page.partition("\n## Harnesses\n\n")[2].partition("\n\n")[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()]
    listed = {name.strip("`"): cells for name, *cells in lines[2:]}
    assert listed.keys() == HARNESSES.keys()
    for name, record in HARNESSES.items():
        protocol, version, tried = listed[name]
        assert protocol in protocols
        assert tried in ("complete tasks", "its start", "no")
        found = {*re.findall(r"[@=](\d+(?:\.\d+)+)(?= |$)", record.install)}
        assert found == ({version} if record.install else set()), name
        assert bool(record.install) == (version != "any")


@pytest.mark.parametrize(
    ("name", "done", "wrong"),
    [
        ("codex", CommandResult(0, b"x"), None),
        ("codex", CommandResult(1, b"a\nb\n\n"), "exit code 1: b"),
        ("codex", CommandResult(-9), "exit code -9: no output"),
        ("claude-code", CommandResult(0, b'{"is_error": false}\n'), None),
        (
            "claude-code",
            CommandResult(0, b'{"is_error": true, "result": "410"}'),
            'exit code 0: {"is_error": true, "result": "410"}',
        ),
        ("claude-code", CommandResult(1, b"no JSON"), "exit code 1: no JSON"),
    ],
)
def test_how_a_harness_ended_is_read(name, done, wrong):
    assert HARNESSES[name].failed(done) == wrong


def test_a_harness_is_installed_where_that_is_asked_for(tmp_path):
    def record(install):
        return Harness(
            name="own",
            check='test -e "$HOME/own"',
            install=install,
            command="true",
        )

    touch = 'touch "$HOME/own"'
    with sandbox("local", tmp_path) as box:
        for command, install, said in (
            (touch, False, "is not installed: touch"),
            ("", True, r"is not installed: $"),
            ("echo no; exit 2", True, "echo no; exit 2: exit code 2: no"),
            ("true", True, r"is not installed: true: exit code 1"),
        ):
            with pytest.raises(SandboxError, match=said):
                record(command).ready(box, install=install)
        record(touch).ready(box, install=True)
        record(touch).ready(box, install=False)


def test_the_shell_harness_needs_its_command(tmp_path):
    shell = HARNESSES["shell"]

    def run(*arguments):
        command, env, _, stdin = shell.launch(JOB, arguments)
        with sandbox("local", tmp_path) as box:
            return box.exec(command, timeout_s=60, env=env, stdin=stdin)

    error = shell.failed(run())
    assert error == ("exit code 2: the shell harness needs a command: give --argument")
    done = run("cat;", 'echo "$MODEL" a  b; exit 3')
    assert (done.code, done.stdout.decode()) == (3, f"{JOB['prompt']}the-model a b\n")


def test_values_are_escaped_in_configuration_files():
    job = {**JOB, "model": 'a"b\\c{prompt}é😀', "home": "/h{model}"}
    _, env, files, _ = HARNESSES["codex"].launch(job)
    config = tomllib.loads(files[".codex/config.toml"].decode())
    assert config["model"] == job["model"]
    assert env["CODEX_HOME"] == "/h{model}/.codex"
    _, _, files, _ = HARNESSES["pi"].launch(job)
    (model,) = json.loads(files[".pi/agent/models.json"])["providers"]["gateway"][
        "models"
    ]
    assert model["id"] == job["model"]
