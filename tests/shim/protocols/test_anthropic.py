"""Anthropic Messages, driven by the real anthropic client, and shapes of Claude Code."""

import json
import re

import anthropic
import numpy as np
import pytest

import trajkit as tk
from tests.shim.clients import FREE, in_process, late_stream, read_log, replaying
from tests.shim.fakes import (
    AS_JSON,
    RENDERER,
    Held,
    ScriptedEngine,
    byte_renderer,
    sampled,
)
from trajkit_shim.errors import EngineError, GatewayError
from trajkit_shim.protocols.anthropic import ANTHROPIC

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "hi"}
BASH = {"name": "bash", "description": "Runs.", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "bash", "arguments": {"n":  1.50e1}}\n</tool_call>'


async def ask(client, messages=(USER,), **fields):
    return await client.messages.create(
        model="any", max_tokens=200, messages=list(messages), **fields
    )


async def streamed(client, messages=(USER,), **fields):
    """The message of a streamed reply, put together by the client library."""
    async with client.messages.stream(
        model="any", max_tokens=200, messages=list(messages), **fields
    ) as stream:
        return await stream.get_final_message()


async def beta(client, messages=(USER,), **fields):
    """As Claude Code asks: ``/v1/messages?beta=true``."""
    return await client.beta.messages.create(
        model="any", max_tokens=200, messages=list(messages), **fields
    )


def echo(message):
    return {
        "role": "assistant",
        "content": [block.model_dump(exclude_none=True) for block in message.content],
    }


SENDS = pytest.mark.parametrize("send", [ask, streamed, beta])


@SENDS
async def test_a_reply_of_text(tmp_path, send):
    sample = sampled("hello", cached_tokens=3)
    engine = ScriptedEngine(sample)
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = gateway.anthropic(await gateway.open_key(**FREE))
        reply = await send(
            client,
            stop_sequences=["END"],
            # not in every version of the client
            extra_body={"temperature": 0.5, "top_k": 7},
        )
        (turn,) = gateway.turns()
    (block,) = reply.content
    assert (block.type, block.text) == ("text", "hello")
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    assert reply.usage.input_tokens == len(engine.prompts[0]) - 3
    assert reply.usage.cache_read_input_tokens == 3
    assert reply.usage.output_tokens == 6
    assert reply.model == "scripted"
    assert turn["session_id"] == gateway.ids[client.api_key]
    sampling = engine.samplings[0]
    assert (sampling.temperature, sampling.top_k) == (0.5, 7)
    assert (sampling.stop, sampling.max_new_tokens) == (("END",), 200)


@SENDS
async def test_a_conversation_with_tools_and_thinking(tmp_path, send):
    text = f"<think>\nhm  \n</think>\n\nLook. \n{CALL}\n{CALL}"
    async with in_process(ScriptedEngine(text, "done"), RENDERER, tmp_path) as gateway:
        client = gateway.anthropic(await gateway.open_key())
        first = await send(client, system="be brief", tools=[BASH])
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "a.txt"}
            for block in first.content
            if block.type == "tool_use"
        ]
        messages = [USER, echo(first), {"role": "user", "content": results}]
        last = await send(client, messages, system="be brief", tools=[BASH])
        log = read_log(gateway.log.path)
    thinking, said, one, two = first.content
    assert (thinking.thinking, said.text) == ("hm", "Look. \n")
    assert thinking.signature
    assert one.id.startswith("toolu_")
    assert one.id != two.id
    assert (one.name, one.input) == ("bash", {"n": 15.0})
    assert first.stop_reason == "tool_use"
    assert last.content[0].text == "done"
    recorded = json.loads(log["response"][0]["body"].as_py())
    assert recorded["reasoning_content"] == "hm"
    assert recorded["tool_calls"][0]["function"]["arguments"] == '{"n":  1.50e1}'
    roles = [m["role"] for m in log["messages"][1].as_py()]
    assert roles == ["system", "user", "assistant", "tool", "tool"]
    tk.validate(log)


async def test_the_events_of_a_stream_in_order(tmp_path):
    text = f"<think>hm</think>Look.{CALL}"
    async with in_process(ScriptedEngine(text), RENDERER, tmp_path) as gateway:
        client = gateway.anthropic(await gateway.open_key())
        stream = await ask(client, tools=[BASH], stream=True)
        events = [event async for event in stream]
    told = [
        event.type
        if not hasattr(event, "delta")
        else getattr(event.delta, "type", "end")
        for event in events
    ]
    assert told == [
        "message_start",
        "content_block_start",
        "thinking_delta",
        "signature_delta",
        "content_block_stop",
        "content_block_start",
        "text_delta",
        "content_block_stop",
        "content_block_start",
        "input_json_delta",
        "content_block_stop",
        "end",
        "message_stop",
    ]
    assert [e.index for e in events if e.type == "content_block_start"] == [0, 1, 2]
    assert events[0].message.content == []
    # the arguments as they were sampled
    assert events[9].delta.partial_json == '{"n":  1.50e1}'
    assert events[-2].usage.output_tokens == len(text) - 20


async def test_a_call_goes_out_as_it_was_sampled(tmp_path):
    async with in_process(ScriptedEngine(CALL), RENDERER, tmp_path) as gateway:
        session = await gateway.open_key()
        reply = await gateway.http.post(
            "/v1/messages?beta=true",
            headers={"x-api-key": session},
            json={"max_tokens": 99, "messages": [USER], "tools": [BASH]},
        )
    assert '"input": {"n":  1.50e1}' in reply.text


@pytest.mark.parametrize(
    ("reply", "reason", "matched"),
    [
        pytest.param(
            sampled("a", finish_reason="length"), "max_tokens", None, id="cut"
        ),
        pytest.param("one END two", "stop_sequence", "END", id="stop"),
        pytest.param(
            sampled(CALL + "and", finish_reason="length"),
            "max_tokens",
            None,
            id="a call and then cut",
        ),
    ],
)
async def test_stop_reasons(tmp_path, reply, reason, matched):
    async with in_process(ScriptedEngine(reply), RENDERER, tmp_path) as gateway:
        client = gateway.anthropic(await gateway.open_key())
        got = await ask(client, tools=[BASH], stop_sequences=["END"])
    assert (got.stop_reason, got.stop_sequence) == (reason, matched)


async def test_count_tokens_counts(tmp_path):
    engine = ScriptedEngine("a")
    asked = {"system": "be brief", "tools": [BASH]}
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = gateway.anthropic(await gateway.open_key())
        counted = await client.messages.count_tokens(
            model="any", messages=[USER], **asked
        )
        assert (engine.prompts, gateway.turns()) == ([], [])
        await ask(client, **asked)
    assert counted.input_tokens == len(engine.prompts[0])


def late_client(data):
    http = replaying(anthropic.DefaultAsyncHttpxClient, data)
    return anthropic.AsyncAnthropic(api_key="x", http_client=http, max_retries=0)


async def late(tmp_path, reply):
    """What the client reads of a reply that was long in coming, and the turns."""
    held = Held(reply)
    async with in_process(
        ScriptedEngine(held), RENDERER, tmp_path, ping_seconds=0.001
    ) as gateway:
        body = {"session": await gateway.open_key(), "stream": True}
        data = await late_stream(
            gateway, "/v1/messages", {**body, "max_tokens": 9, "messages": [USER]}, held
        )
        health = (await gateway.http.get("/healthz")).json()
        assert health["sessions"]["in_flight"] == 0
        return data, gateway.turns()


async def test_pings_until_the_reply_is_there(tmp_path):
    data, turns = await late(tmp_path, "late")
    names = [line for line in data.decode().splitlines() if line.startswith("event: ")]
    pings = names.count("event: ping")
    assert pings >= 2
    assert names[:pings] == ["event: ping"] * pings
    assert names[pings] == "event: message_start"
    assert names[-1] == "event: message_stop"
    assert (await streamed(late_client(data))).content[0].text == "late"
    assert len(turns) == 1


async def test_what_goes_wrong_late_is_an_event(tmp_path):
    data, turns = await late(tmp_path, EngineError("out of memory"))
    assert turns == []
    with pytest.raises(anthropic.APIStatusError, match="out of memory") as caught:
        await streamed(late_client(data))
    assert caught.value.body["error"]["type"] == "api_error"


async def test_a_bug_that_shows_late_is_an_event_too(tmp_path):
    with pytest.raises(RuntimeError, match="bug"):
        await late(tmp_path, RuntimeError("bug"))


@SENDS
async def test_a_closed_session_is_gone(tmp_path, send):
    async with in_process(ScriptedEngine("a"), RENDERER, tmp_path) as gateway:
        session = await gateway.open_key()
        with pytest.raises(anthropic.AuthenticationError) as unknown:
            await send(gateway.anthropic("other"))
        await gateway.http.delete(gateway.path_of(session))
        with pytest.raises(anthropic.APIStatusError) as closed:
            await send(gateway.anthropic(session))
        assert gateway.turns() == []
    assert unknown.value.body["error"]["type"] == "authentication_error"
    assert closed.value.status_code == 410
    assert closed.value.response.headers["x-should-retry"] == "false"


@SENDS
async def test_a_prompt_that_is_too_long(tmp_path, send):
    engine = ScriptedEngine(context=60)
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = gateway.anthropic(await gateway.open_key())
        with pytest.raises(
            anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 60 "
        ):
            await send(client, [{"role": "user", "content": "x" * 60}])


def taken(**body):
    return ANTHROPIC.read({"max_tokens": 5, "messages": [USER], **body}).messages


def test_a_request_of_claude_code():
    """The shape of a recorded request: engines-and-clients 6.1."""
    messages = taken(
        model="claude-opus-4-8",
        system=[
            {
                "type": "text",
                "text": "x-anthropic-billing-header: cc_version=2.1; x=y;",
            },
            {"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "brief"},
        ],
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "context"},
                    {"type": "text", "text": "do", "cache_control": {"type": "x"}},
                ],
            },
            {"role": "system", "content": [{"type": "text", "text": "late"}]},
        ],
        metadata={"user_id": "{}"},
        thinking={"type": "adaptive"},
        context_management={"edits": []},
        output_config={"effort": "high"},
        stream=True,
    )
    assert messages == [
        {"role": "system", "content": "be\nbrief"},
        {"role": "user", "content": "context\ndo"},
        {"role": "system", "content": "late"},
    ]


def test_results_and_texts_keep_their_order():
    def result(name, **fields):
        return {"type": "tool_result", "tool_use_id": name, **fields}

    text = {"type": "text", "text": "and"}
    assert taken(
        messages=[
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "thinking", "thinking": ", so", "signature": "s"},
                    {"type": "text", "text": ""},
                    {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"é": 1}},
                    {"type": "text", "text": "b"},
                ],
            },
            {
                "role": "user",
                "content": [
                    result("1", content="x", is_error=True),
                    result("2", content=[text, text], is_error=False),
                    result("3"),
                    text,
                ],
            },
        ]
    ) == [
        {
            "role": "assistant",
            "content": "ab",
            "reasoning_content": "hm, so",
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"é": 1}'},
                }
            ],
        },
        {"role": "tool", "content": "x", "tool_call_id": "1", "is_error": True},
        {"role": "tool", "content": "and\nand", "tool_call_id": "2"},
        {"role": "tool", "content": "", "tool_call_id": "3"},
        {"role": "user", "content": "and"},
    ]


def test_where_cache_control_stands_does_not_matter():
    def said(**marks):
        return taken(
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "a", **marks}]}
            ]
        )

    assert said() == said(cache_control={"type": "ephemeral"})
    assert said() == taken(messages=[{"role": "user", "content": "a"}])


IMAGE = {"type": "image", "source": {"type": "base64", "data": "x"}}


def test_images_by_policy():
    body = {
        "max_tokens": 1,
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]},
                    IMAGE,
                ],
            }
        ],
    }
    with pytest.raises(GatewayError, match="'image' is not supported"):
        ANTHROPIC.read(body)
    tool, user = ANTHROPIC.read(body, "omit").messages
    assert tool["content"] == user["content"] == "[image omitted]"


def block(**fields):
    return {"messages": [{"role": "user", "content": [fields]}]}


def said_by_model(**fields):
    return {"messages": [{"role": "assistant", "content": [fields]}, USER]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param({"max_tokens": None}, "max_tokens", id="no limit"),
        pytest.param({"max_tokens": 0}, "max_tokens", id="no tokens"),
        pytest.param({"messages": []}, "messages", id="no messages"),
        pytest.param({"messages": [3]}, "messages[0]", id="a message as a number"),
        pytest.param(block(type="image"), "messages[0].content[0].type", id="an image"),
        pytest.param(
            block(type="document", source={"type": "base64"}),
            "messages[0].content[0].source.type",
            id="a PDF",
        ),
        pytest.param(
            said_by_model(type="tool_use", id="1", name="f", input="{}"),
            "messages[0].content[0].input",
            id="arguments as text",
        ),
        pytest.param({"tools": [{"name": "f"}]}, "tools[0].input_schema", id="a tool"),
        pytest.param(
            {"tools": [{**BASH, "strict": 1}]}, "tools[0].strict", id="strict"
        ),
        pytest.param(
            {"tool_choice": {"type": "tool"}},
            "tool_choice.name",
            id="a nameless choice",
        ),
        pytest.param(
            {"tool_choice": {"type": "required"}}, "tool_choice.type", id="a choice"
        ),
        pytest.param({"stop_sequences": [""]}, "stop_sequences[0]", id="empty stop"),
        pytest.param({"top_p": 2}, "top_p", id="top_p"),
        pytest.param(
            {"output_config": {"format": {}}},
            "output_config.format.type",
            id="no format",
        ),
    ],
)
def test_what_is_refused(body, param):
    with pytest.raises(GatewayError) as caught:
        taken(**body)
    assert caught.value.status == 400
    assert caught.value.param == param


IGNORED = [
    pytest.param(
        {"messages": [{"role": "ctx", "content": "a"}]}, "messages[0].role", id="a role"
    ),
    pytest.param(
        {"messages": [USER, {"role": "assistant", "content": "{"}]},
        "continuation of the last message",
        id="a reply to be continued",
    ),
    pytest.param(
        block(type="tool_use"), "messages[0].content[0].type", id="a user's call"
    ),
    pytest.param(
        block(type="text", text="a", mark=1),
        "messages[0].content[0].mark",
        id="an unknown field",
    ),
    pytest.param(
        said_by_model(type="redacted_thinking", data="x"),
        "messages[0].content[0].type",
        id="what nobody can read",
    ),
    pytest.param(
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools[0].type",
        id="the provider's own tool",
    ),
    pytest.param({"n": 2}, "n", id="an unknown field of the body"),
]


@pytest.mark.parametrize(("body", "param"), IGNORED)
def test_what_is_ignored_and_counted(body, param):
    request = ANTHROPIC.read({"max_tokens": 9, "messages": [USER], **body})
    counted = {*request.ignored, *(f"tools[].type={one}" for one in request.left_out)}
    where = re.sub(r"\[\d+\]", "[]", param)
    assert any(name.partition("=")[0] == where for name in counted), counted


def test_a_count_names_no_limit():
    assert ANTHROPIC.read({"messages": [USER]}, count=True).messages == [USER]


async def test_a_template_that_takes_one_system_message(tmp_path):
    only_first = AS_JSON.replace(
        "{%- for message in messages -%}",
        "{%- for message in messages -%}{%- if message.role == 'system' and "
        "not loop.first %}{{ raise_exception('late') }}{% endif -%}",
    )
    renderer = byte_renderer(only_first)
    async with in_process(ScriptedEngine("a"), renderer, tmp_path) as gateway:
        client = gateway.anthropic(await gateway.open_key())
        await ask(client, [USER, {"role": "system", "content": "late"}], system="be")
        (turn,) = gateway.turns()
    assert renderer.decode(np.array(turn["prompt_ids"]), ended=False) == (
        "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>user\n<system-reminder>\nlate\n</system-reminder><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
