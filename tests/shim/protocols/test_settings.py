"""What every protocol does alike: settings, what has no effect, and what is refused."""

import json

import numpy as np
import pytest

import trajkit as tk
from tests.shim.clients import in_process
from tests.shim.fakes import (
    AS_JSON,
    AS_STRING,
    RENDERER,
    ScriptedEngine,
    byte_renderer,
)
from tests.shim.protocols.test_required import BODIES, BY_NAME, NAMES, PATHS

pytestmark = pytest.mark.anyio

EACH = pytest.mark.parametrize("name", NAMES)
# the template shows each of its variables
VARIABLES = ("enable_thinking", "reasoning_effort", "thinking_budget")
TEMPLATE = (
    "".join(
        f"{{{{ '{name}=%s;' % {name} if {name} is defined }}}}" for name in VARIABLES
    )
    + AS_STRING
)


async def post(gateway, name, key, status=200, **fields):
    answer = await gateway.http.post(
        PATHS[name], headers={"x-session-key": key}, json={**BODIES[name], **fields}
    )
    assert answer.status_code == status, answer.text
    return answer


def config(**thinking):
    return {"generationConfig": {"thinkingConfig": thinking}}


SETTINGS = {
    "an effort": (
        {"reasoning_effort": "low"},
        {"output_config": {"effort": "low"}},
        {"reasoning": {"effort": "low", "summary": "auto"}},
        config(thinkingLevel="LOW", includeThoughts=True),
        {"reasoning_effort": "low"},
    ),
    "no effort": (
        {"reasoning_effort": "none"},
        {"output_config": {"effort": "none"}},
        {"reasoning": {"effort": "none"}},
        config(thinkingLevel="NONE"),
        {"reasoning_effort": "none", "enable_thinking": False},
    ),
    "no thinking": (
        {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "disabled"}},
        None,
        config(thinkingBudget=0),
        {"enable_thinking": False},
    ),
    "thinking with a budget": (
        None,
        {"thinking": {"type": "enabled", "budget_tokens": 99}},
        None,
        config(thinkingBudget=99),
        {"enable_thinking": True, "thinking_budget": 99},
    ),
    "a variable": (
        *[{"chat_template_kwargs": {"thinking_budget": 1}}] * 4,
        {"thinking_budget": 1},
    ),
}


@EACH
@pytest.mark.parametrize("what", SETTINGS)
async def test_a_setting_reaches_the_template(tmp_path, name, what):
    *cells, expected = SETTINGS[what]
    given = cells[NAMES.index(name)]
    if given is None:
        # the protocol has no such setting
        return
    shown = "".join(f"{n}={expected[n]};" for n in VARIABLES if n in expected)
    for template, text in ((TEMPLATE, shown), (AS_STRING, "")):
        engine, renderer = ScriptedEngine("a"), byte_renderer(template)
        async with in_process(engine, renderer, tmp_path / str(len(text))) as gateway:
            key = await gateway.open_key(session_id="s")
            await post(gateway, name, key, **given)
            session = (await gateway.http.get("/sessions/s")).json()
        prompt = renderer.decode(engine.prompts[0], ended=False)
        assert prompt.startswith(f"{text}<|im_start|>")
        # without such a variable it is counted
        counted = sum(session["ignored"].values())
        # no effort and no thinking are one wish
        assert counted == (0 if text else len(expected) - (what == "no effort"))


async def test_variables_of_server_session_and_request(tmp_path):
    engine, renderer = ScriptedEngine("a"), byte_renderer(TEMPLATE)
    options = {"variables": {"enable_thinking": 1, "reasoning_effort": "server"}}
    async with in_process(engine, renderer, tmp_path, **options) as gateway:
        fixed = {"thinking_budget": 5}
        key = await gateway.open_key(session_id="s", chat_template_kwargs=fixed)
        asked = {"reasoning_effort": "request", "thinking_budget": 6, "messages": 1}
        await post(gateway, "openai_chat", key, chat_template_kwargs=asked)
        session = (await gateway.http.get("/sessions/s")).json()
    prompt = renderer.decode(engine.prompts[0], ended=False)
    shown = "enable_thinking=1;reasoning_effort=request;thinking_budget=5;"
    assert prompt.startswith(f"{shown}<|im_start|>")
    names = ["chat_template_kwargs.messages", "chat_template_kwargs.thinking_budget"]
    assert session["ignored"] == dict.fromkeys(names, 1)


@EACH
async def test_unknown_fields_are_counted_in_the_session(tmp_path, name):
    async with in_process(ScriptedEngine("a", "b"), RENDERER, tmp_path) as gateway:
        key = await gateway.open_key(session_id="s")
        for _ in range(2):
            await post(gateway, name, key, surprise={"a": 1}, nothing=None)
        session = (await gateway.http.get("/sessions/s")).json()
        assert session["ignored"] == {"surprise": 2}
        await gateway.http.post("/sessions/s/finish")
        (line,) = tk.read_sessions(gateway.log.directory).to_pylist()
    assert json.loads(line["ignored"]) == {"surprise": 2}


def test_names_of_ignored_fields_are_bounded():
    body = {**BODIES["openai_chat"], **{f"{i}{'x' * 500}": 1 for i in range(1000)}}
    ignored = BY_NAME["openai_chat"].read(body).ignored
    assert len(ignored) == 100
    assert max(map(len, ignored)) == 100


LAST = {
    "openai_chat": {"messages": [{"role": "assistant", "content": "The answer is"}]},
    "anthropic": {"messages": [{"role": "assistant", "content": "The answer is"}]},
    "openai_responses": {"input": [{"role": "assistant", "content": "The answer is"}]},
    "gemini": {"contents": [{"role": "model", "parts": [{"text": "The answer is"}]}]},
}


@EACH
async def test_a_conversation_that_ends_with_the_assistant(tmp_path, name):
    engine = ScriptedEngine("a")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        key = await gateway.open_key(session_id="s")
        await post(gateway, name, key, **LAST[name])
        session = (await gateway.http.get("/sessions/s")).json()
    prompt = RENDERER.decode(engine.prompts[0], ended=False)
    end = "assistant\nThe answer is<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.endswith(end)
    assert session["ignored"] == {"continuation of the last message": 1}


HOSTED = {
    "openai_chat": {"tools": [{"type": "web_search"}]},
    "anthropic": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    "openai_responses": {"tools": [{"type": "web_search"}]},
    "gemini": {"tools": [{"googleSearch": {}}]},
}


@EACH
async def test_a_hosted_tool_is_left_out_and_counted(tmp_path, name):
    engine = ScriptedEngine("a")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        key = await gateway.open_key(session_id="s")
        await post(gateway, name, key, **HOSTED[name])
        session = (await gateway.http.get("/sessions/s")).json()
    assert sum(session["tools_left_out"].values()) == 1
    assert "search" not in RENDERER.decode(engine.prompts[0], ended=False)


@EACH
async def test_half_a_pair_in_a_message_is_replaced(tmp_path, name):
    """A client can spell it in JSON; no tokenizer has it."""
    engine = ScriptedEngine("a")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        key = await gateway.open_key()
        text = json.dumps(BODIES[name]).replace('"hi"', '"h\\ud83di"')
        answer = await gateway.http.post(
            PATHS[name],
            headers={"x-session-key": key, "content-type": "application/json"},
            content=text,
        )
    assert answer.status_code == 200, answer.text
    assert "h\ufffdi" in RENDERER.decode(engine.prompts[0], ended=False)


async def test_sampled_half_a_pair_comes_back(tmp_path):
    """Its reply is recognized, and the conversation is extended."""
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "\\ud83d"}}\n</tool_call>'
    async with in_process(ScriptedEngine(call, "b"), RENDERER, tmp_path) as gateway:
        key, body = await gateway.open_key(), {**BODIES["anthropic"]}
        headers = {"x-session-key": key, "content-type": "application/json"}
        answer = await gateway.http.post(PATHS["anthropic"], headers=headers, json=body)
        content = answer.json()["content"]
        result = {"type": "tool_result", "tool_use_id": content[0]["id"]}
        body["messages"] = [
            *body["messages"],
            {"role": "assistant", "content": content},
            {"role": "user", "content": [result]},
        ]
        text = json.dumps(body)
        assert "\\ud83d" in text
        again = await gateway.http.post(
            PATHS["anthropic"], headers=headers, content=text
        )
        assert again.status_code == 200, again.text
        turns = gateway.turns()
    assert turns[1]["render_reason"] is None


async def test_a_count_obeys_the_session_s_limits(tmp_path):
    async with in_process(ScriptedEngine("a"), RENDERER, tmp_path) as gateway:
        limited = await gateway.open_key(session_id="s", max_prompt_tokens=20)
        free = await gateway.open_key()
        path = "/v1/messages/count_tokens"
        statuses = []
        for key, text in (
            (limited, "h" * 100),
            (limited, "hi"),
            (free, "h" * 100),
            (free, "h" * 9000),
        ):
            body = {"messages": [{"role": "user", "content": text}]}
            answer = await gateway.http.post(
                path, headers={"x-session-key": key}, json=body
            )
            statuses.append(answer.status_code)
        session = (await gateway.http.get("/sessions/s")).json()
    # the last one is more than four contexts
    assert statuses == [403, 403, 200, 400]
    assert session["token_counts"] == 2


async def test_a_template_that_takes_one_system_message(tmp_path):
    loop = "{%- for message in messages -%}"
    refuses = loop + (
        "{%- if message.role == 'system' and not loop.first %}"
        "{{ raise_exception('late') }}{% endif -%}"
    )
    renderer = byte_renderer(AS_JSON.replace(loop, refuses))
    user = {"role": "user", "content": "hi"}
    late = [user, {"role": "system", "content": "late"}]
    async with in_process(ScriptedEngine("a"), renderer, tmp_path) as gateway:
        key = await gateway.open_key()
        await post(gateway, "anthropic", key, messages=late, system="be", tools=[])
        (turn,) = gateway.turns()
    assert renderer.decode(np.array(turn["prompt_ids"]), ended=False) == (
        "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>user\n<system-reminder>\nlate\n</system-reminder><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
