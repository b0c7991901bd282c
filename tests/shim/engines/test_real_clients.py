"""The real Claude Code and the real Codex on the real server of each engine.

`.ci/sglang` and `.ci/vllm` make it possible. The model's weights are random. The
operator of the gateway says what each turn's reply must match, by a regular expression
that the server's grammar enforces: it replaces a trained policy, in a spelling that is
the model's own. The clients know nothing of it.
"""

import json
import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from tests.rollout.test_real_clients import (
    check,
    line_of,
    roots,
    start,
    without_thoughts,
)
from tests.shim.clients import http
from tests.shim.engines.test_real import client_of, kind, model, url
from trajkit_shim.app import create_app
from trajkit_shim.prompting.render import load_renderer
from trajkit_shim.serve import running
from trajkit_shim.sessions.turn_log import TurnLog

pytestmark = pytest.mark.clients

# fixtures of the servers
__all__ = ["kind", "model", "url"]
# long prompts take a CPU its time
SECONDS = 500


class Constrained:
    """An engine that samples under the rule of each turn.

    ``regex`` makes the engine's parameters of a regular expression.
    """

    def __init__(self, engine, renderer, scripts, regex):
        self._engine = engine
        self._regex = regex
        self.renderer = renderer
        self._scripts = scripts
        # of each call, what its reply had to match, and what was sampled
        self.sampled = []

    async def info(self):
        return await self._engine.info()

    async def generate(self, request):
        prompt = self.renderer.decode(request.prompt_ids, ended=False)
        regex = line_of(self._scripts, prompt) or r"Fine\."
        sampling = replace(request.sampling, extra=self._regex(regex))
        sample = await self._engine.generate(replace(request, sampling=sampling))
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


@contextmanager
def gateway(directory, scripts, kind, url, model):
    """A session of a gateway on the server: its URL, key, log and engine."""
    renderer = load_renderer(model)
    client = client_of(kind, url, model)
    engine = Constrained(client, renderer, scripts, kind.regex)
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
def test_claude_code(tmp_path, thought, kind, url, model):
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
    with gateway(tmp_path, scripts, kind, url, model) as (*at, log, engine):
        tokenizer = engine.renderer.tokenizer.backend_tokenizer
        said = start(tmp_path, "claude-code", at, "MAINTASK", seconds=SECONDS)
    turns, shown, causes = check(log, "claude-code", tmp_path, tokenizer)
    assert "Done: 42." in said
    assert (tmp_path / "work/answer.txt").read_text() == "42\n"
    # the sub-agent's conversation is one of its own
    assert roots(turns) == 2
    if not thought:
        assert shown["prompts"] == {"opening": 2, "append": 4}
    assert {*causes} == without_thoughts(turns)
    agents = [turn["agent_id"] for turn in turns]
    assert agents.count(None) == 4
    assert len({*agents}) == 2
    check_sampled(turns, engine)


@THINKS
def test_codex(tmp_path, thought, kind, url, model):
    write = '{"cmd": "echo 42 >  answer.txt", "yield_time_ms":  1000}'
    look = '{"cmd":"cat answer.txt"}'
    scripts = {
        "MAINTASK": [
            thought + r"Let me [a-z]{3,9} it\. \n\n" + call("exec_command", write),
            call("exec_command", look) + r"\n" + call("exec_command", look),
            r" Done: 42\.",
        ],
        "Sure?": [r" Sure: 42\."],
    }
    with gateway(tmp_path, scripts, kind, url, model) as (*at, log, engine):
        tokenizer = engine.renderer.tokenizer.backend_tokenizer
        said = start(tmp_path, "codex", at, "MAINTASK", seconds=SECONDS)
        again = start(
            tmp_path, "codex", at, "Sure?", "resume", "--last", seconds=SECONDS
        )
    turns, shown, causes = check(log, "codex", tmp_path, tokenizer)
    assert "Done: 42." in said
    assert "Sure: 42." in again
    assert (tmp_path / "work/answer.txt").read_text() == "42\n"
    assert roots(turns) == 1
    # the template omits what was thought before the user spoke
    last = "reasoning" if thought else "append"
    assert Counter(shown["prompts"]) == Counter(["opening", "append", "append", last])
    assert {*causes} == without_thoughts(turns)
    assert len({turn["agent_id"] for turn in turns}) == 1
    check_sampled(turns, engine)
