"""The real Claude Code and the real Codex on the real SGLang server.

The model's weights are random. The operator of the gateway says what each turn's reply
must match, by a regular expression that the server's grammar enforces: it stands in for
a trained policy, in a spelling that is the model's own. The clients know nothing of it.
"""

import json
import re
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from tests.shim.agents.test_real_clients import (
    CLAUDE,
    CLAUDE_OPTIONS,
    CODEX,
    CODEX_OPTIONS,
    check,
    claude_environment,
    run,
    write_codex_config,
)
from tests.shim.clients import http
from tests.shim.sglang_cpu.servers import served
from trajkit_shim.app import create_app
from trajkit_shim.engines.embedded.script import messages
from trajkit_shim.engines.model_config import vocab_size
from trajkit_shim.engines.sglang import SGLangEngine
from trajkit_shim.prompting.render import load_renderer
from trajkit_shim.serve import running
from trajkit_shim.sessions.turn_log import TurnLog

pytestmark = [pytest.mark.clients, pytest.mark.sglang]

# long prompts take a CPU its time
SECONDS = 500


def rule(scripts, prompt):
    """The expression of a reply: the k-th line of the script whose key the user wrote."""
    read = messages(prompt)
    asked = " ".join(message.text for message in read if message.role == "user")
    said = sum(message.role == "assistant" for message in read)
    for key, lines in scripts.items():
        if key in asked:
            return lines[min(said, len(lines) - 1)]
    return r"Fine\."


class Constrained:
    """An engine that samples under the rule of each turn."""

    def __init__(self, engine, renderer, scripts):
        self._engine = engine
        self.renderer = renderer
        self._scripts = scripts
        # of each call, what its reply had to match, and what was sampled
        self.sampled = []

    async def info(self):
        return await self._engine.info()

    async def generate(self, prompt_ids, sampling, **names):
        regex = rule(self._scripts, self.renderer.decode(prompt_ids, ended=False))
        sample = await self._engine.generate(
            prompt_ids, replace(sampling, extra={"regex": regex}), **names
        )
        self.sampled.append(
            (regex, self.renderer.decode(sample.output_ids, ended=True))
        )
        return sample

    async def close(self):
        await self._engine.close()


def literally(text):
    """The expression of one text. Of what Python escapes, the server takes less."""
    return re.sub(r"[\\.^$*+?{}()\[\]|]", lambda mark: "\\" + mark[0], text)


def call(name, arguments):
    """The expression of a tool call."""
    body = f'{{"name": "{name}", "arguments": {arguments}}}'
    return r"<tool_call>\n" + literally(body) + r"\n</tool_call>"


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    """The URL of the server, and its model."""
    with served(tiny_model, tmp_path_factory.mktemp("server")) as url:
        yield url, tiny_model


@contextmanager
def gateway(directory, scripts, server):
    """A session of a gateway on the server: its URL, key, log and engine."""
    url, model = server
    renderer = load_renderer(model)
    sglang = SGLangEngine(url, vocab_size=vocab_size(model))
    engine = Constrained(sglang, renderer, scripts)
    log = TurnLog(directory / "run")
    with running(create_app(engine, renderer, log)) as url:
        opened = http.post(f"{url}/sessions", json={}).json()
        yield url, opened["api_key"], log, engine
        shown = http.get(f"{url}/sessions/{opened['session_id']}").json()
        (directory / "session.json").write_text(json.dumps(shown))


def check_sampled(turns, engine):
    """Each turn was sampled under its rule, by the server's weights, with logprobs."""
    assert len(turns) == len(engine.sampled)
    sampled = {text: regex for regex, text in engine.sampled}
    for turn in turns:
        text = engine.renderer.decode(
            np.array(turn["output_ids"], np.int32), ended=True
        )
        assert re.fullmatch(sampled[text], text), text
        assert len(turn["output_logprobs"]) == len(turn["output_ids"])
        assert {span["version"] for span in turn["weight_versions"]} == {"default"}
        assert turn["finish_reason"] == "stop"


# where nothing is thought, nothing drifts
THINKS = pytest.mark.parametrize(
    "thought",
    [r"<think>\n[a-z]{3,9} [a-z]{3,9}\n</think>\n\n", ""],
    ids=["thinks", "plain"],
)


@THINKS
@pytest.mark.skipif(not CLAUDE.exists(), reason="Claude Code is not installed")
def test_claude_code(tmp_path, thought, server):
    write = '{"command": "echo 42 >  answer.txt", "timeout": 1.0e4}'
    look = '{"command":"cat answer.txt",  "description": "caf\\u00e9"}'
    agent = '{"description": "check", "prompt": "SUBTASK", "subagent_type": "claude"}'
    scripts = {
        "SUBTASK": [call("Bash", look), r"It says 42\."],
        "MAINTASK": [
            thought + r"Let me [a-z]{3,9} it\. \n\n" + call("Bash", write),
            call("Agent", agent),
            call("Bash", look) + r"\n" + call("Bash", look),
            r" Done: 42\.",
        ],
    }
    with gateway(tmp_path, scripts, server) as (url, session, log, engine):
        environment = claude_environment(url, session)
        said, work = run(
            tmp_path,
            [CLAUDE, "-p", "MAINTASK", *CLAUDE_OPTIONS],
            environment,
            seconds=SECONDS,
        )
    # the sub-agent's conversation is one of its own
    turns, shown = check(log, tmp_path, roots=2)
    if not thought:
        assert shown["prompts"] == {"opening": 2, "append": 4}
    assert json.loads(said)["result"].strip() == "Done: 42."
    assert (work / "answer.txt").read_text() == "42\n"
    assert {turn["harness"] for turn in turns} == {"claude-code"}
    assert len({turn["session_id"] for turn in turns}) == 1
    agents = [turn["agent_id"] for turn in turns]
    assert agents.count(None) == 4
    assert len(agents) == 6
    assert len({*agents}) == 2
    check_sampled(turns, engine)


@THINKS
@pytest.mark.skipif(CODEX is None, reason="Codex is not installed")
def test_codex(tmp_path, thought, server):
    write = '{"cmd": "echo 42 >  answer.txt", "yield_time_ms":  1000}'
    look = '{"cmd":"cat answer.txt"}'
    scripts = {
        "MAINTASK": [
            thought + r"Let me [a-z]{3,9} it\. \n\n" + call("exec_command", write),
            call("exec_command", look) + r"\n" + call("exec_command", look),
            r" Done: 42\.",
        ],
    }
    with gateway(tmp_path, scripts, server) as (url, session, log, engine):
        write_codex_config(tmp_path, url)
        said, work = run(
            tmp_path,
            [CODEX, "exec", *CODEX_OPTIONS, "MAINTASK"],
            {"OPENAI_API_KEY": session},
            seconds=SECONDS,
        )
    turns, shown = check(log, tmp_path, roots=1)
    if not thought:
        assert shown["prompts"] == {"opening": 1, "append": 2}
    last = json.loads(said.splitlines()[-2])
    assert last["item"]["text"].strip() == "Done: 42."
    assert (work / "answer.txt").read_text() == "42\n"
    assert len(turns) == 3
    assert {turn["harness"] for turn in turns} == {"codex"}
    assert len({turn["agent_id"] for turn in turns}) == 1
    check_sampled(turns, engine)
