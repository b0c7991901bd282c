"""What clients require of the form of a reply, in every protocol."""

import json
from dataclasses import asdict

import pytest

from tests.shim.clients import in_process
from tests.shim.conformance import NAMES, PARAMETERS, REQUIRED
from tests.shim.fakes import RENDERER, ScriptedEngine, cases
from trajkit_shim.chat.request import Required
from trajkit_shim.engines.embedded import EmbeddedEngine
from trajkit_shim.prompting.render import embedded_renderer
from trajkit_shim.protocols import PROTOCOLS

pytestmark = pytest.mark.anyio

# a request that offers the tool f, by protocol, and its path
USER = {"role": "user", "content": "hi"}
FUNCTION = {"name": "f", "parameters": PARAMETERS}
BODIES = {
    "openai_chat": {
        "messages": [USER],
        "tools": [{"type": "function", "function": FUNCTION}],
    },
    "anthropic": {
        "messages": [USER],
        "max_tokens": 50,
        "tools": [{"name": "f", "input_schema": PARAMETERS}],
    },
    "openai_responses": {"input": "hi", "tools": [{"type": "function", **FUNCTION}]},
    "gemini": {
        "contents": [{"parts": [{"text": "hi"}]}],
        "tools": [{"functionDeclarations": [FUNCTION]}],
    },
}
PATHS = {
    "openai_chat": "/v1/chat/completions",
    "anthropic": "/v1/messages",
    "openai_responses": "/v1/responses",
    "gemini": "/v1beta/models/m:generateContent",
}
BY_NAME = {protocol.name: protocol for protocol in PROTOCOLS}
EACH = [
    pytest.param(name, what, id=f"{name}, {what}")
    for what, (_, *cells) in REQUIRED.items()
    for name, cell in zip(NAMES, cells, strict=True)
    if cell is not None
]


def body(name, what):
    return {**BODIES[name], **REQUIRED[what][1 + NAMES.index(name)][1]}


@pytest.mark.parametrize(("name", "what"), EACH)
def test_what_is_read(name, what):
    request = BY_NAME[name].read(body(name, what))
    wanted = asdict(Required(**REQUIRED[what][0]))
    if name == "gemini" and "mode" in str(body(name, what)):
        # both of its modes promise arguments of the schema
        wanted["strict"] = ("f",)
    read = asdict(request.required)
    assert {k: tuple(v) if k == "strict" else v for k, v in read.items()} == {
        k: tuple(v) if k == "strict" else v for k, v in wanted.items()
    }
    assert len(request.tools) == 1


@pytest.mark.parametrize(("name", "what"), EACH)
async def test_the_engine_samples_under_a_grammar_and_the_turn_has_it(
    tmp_path, name, what
):
    engine = ScriptedEngine("{}")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        answer = await gateway.http.post(
            PATHS[name],
            headers={"x-session-key": await gateway.open_key()},
            json=body(name, what),
        )
        assert answer.status_code == 200, answer.text
        (turn,) = gateway.turns()
    (sampling,) = engine.samplings
    assert sampling.structural_tag["type"] == "structural_tag"
    assert json.loads(turn["sampling"])["structural_tag"] == sampling.structural_tag


@pytest.mark.parametrize("name", NAMES)
async def test_a_free_request_has_no_grammar(tmp_path, name):
    required = BY_NAME[name].read(BODIES[name]).required
    assert (required.limits_calls, required.schema) == (False, None)
    engine = ScriptedEngine("hi")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        key = {"x-session-key": await gateway.open_key()}
        await gateway.http.post(PATHS[name], headers=key, json=BODIES[name])
        (turn,) = gateway.turns()
    assert engine.samplings[0].structural_tag is None
    assert json.loads(turn["sampling"])["structural_tag"] is None


@cases(
    "sampling, client, overruled",
    {
        "nothing is fixed": ({}, [], []),
        "sampling is fixed": ({"temperature": 1}, [], ["tool_choice"]),
        "but for the tools": ({"temperature": 1}, ["tool_choice"], []),
        "a grammar": ({"extra": {"regex": "a"}}, [], ["tool_choice"]),
    },
)
async def test_a_session_that_fixes_its_sampling(tmp_path, sampling, client, overruled):
    engine = ScriptedEngine("hi")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        key = await gateway.open_key(
            session_id="a", sampling=sampling, client_sampling=client
        )
        answer = await gateway.http.post(
            PATHS["openai_chat"],
            headers={"x-session-key": key},
            json=body("openai_chat", "a call"),
        )
        session = (await gateway.http.get("/sessions/a")).json()
    assert answer.status_code == 200
    assert [*session["sampling_overruled"]] == overruled
    assert (engine.samplings[0].structural_tag is None) == bool(overruled)


async def test_a_const_forces_no_turn_of_fixed_sampling(tmp_path):
    engine = ScriptedEngine("hi")
    form = {"name": "x", "schema": {"const": {"reward": "mine"}}}
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        key = await gateway.open_key(session_id="a", sampling={"top_p": 1.0})
        asked = {
            "model": "m",
            "messages": [{"role": "user", "content": "u"}],
            "response_format": {"type": "json_schema", "json_schema": form},
            "stop": ["i"],
            "seed": 3,
            "max_tokens": 1,
        }
        answer = await gateway.http.post(
            PATHS["openai_chat"], headers={"x-session-key": key}, json=asked
        )
        session = (await gateway.http.get("/sessions/a")).json()
    assert answer.json()["choices"][0]["message"]["content"] == "hi"
    (sampling,) = engine.samplings
    assert (sampling.structural_tag, sampling.stop, sampling.seed) == (None, (), None)
    names = ["max_tokens", "response_format", "seed", "stop"]
    assert sorted(session["sampling_overruled"]) == names


async def test_the_embedded_engine_refuses(tmp_path):
    renderer = embedded_renderer()
    async with in_process(EmbeddedEngine(), renderer, tmp_path) as gateway:
        answer = await gateway.http.post(
            PATHS["anthropic"],
            headers={"x-session-key": await gateway.open_key()},
            json=body("anthropic", "one call at most"),
        )
        assert gateway.turns() == []
    assert answer.status_code == 400
    assert "has no parameter 'structural_tag'" in answer.text
