"""OpenAI Responses, driven by the real openai client, and shapes of Codex."""

import json
import re

import openai
import pytest

import trajkit as tk
from tests.shim.clients import FREE, in_process, late_stream, read_log, replaying
from tests.shim.fakes import RENDERER, Held, ScriptedEngine, sampled
from trajkit_shim.errors import EngineError, GatewayError
from trajkit_shim.protocols.openai_responses import OPENAI_RESPONSES

pytestmark = pytest.mark.anyio

BASH = {
    "type": "function",
    "name": "bash",
    "description": "Runs.",
    "strict": False,
    "parameters": {"type": "object"},
}
TEXT = {"type": "input_text", "text": "a"}
SPAWN = {"type": "namespace", "name": "agents", "tools": [{**BASH, "name": "spawn"}]}
CALL = '<tool_call>\n{"name": "bash", "arguments": {"n":  1.50e1}}\n</tool_call>'


async def ask(client, given="hi", **fields):
    return await client.responses.create(model="any", input=given, **fields)


async def streamed(client, given="hi", **fields):
    """The response of a stream, put together by the client library."""
    async with client.responses.stream(model="any", input=given, **fields) as stream:
        return await stream.get_final_response()


def echo(response):
    """As Codex keeps it: without status, and null where there is nothing."""
    return [
        item.model_dump(exclude={"status", "parsed_arguments"})
        for item in response.output
    ]


SENDS = pytest.mark.parametrize("send", [ask, streamed])


@SENDS
async def test_a_reply_of_text(tmp_path, send):
    engine = ScriptedEngine(sampled("hello", cached_tokens=3))
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = await gateway.open(**FREE)
        reply = await send(
            client, temperature=0.5, max_output_tokens=50, instructions="be brief"
        )
        (turn,) = gateway.turns()
    assert reply.output_text == "hello"
    assert reply.status == "completed"
    assert reply.usage.input_tokens == len(engine.prompts[0])
    assert reply.usage.input_tokens_details.cached_tokens == 3
    assert reply.usage.output_tokens == 6
    assert reply.usage.total_tokens == len(engine.prompts[0]) + 6
    assert [m["role"] for m in turn["messages"]] == ["system", "user"]
    sampling = engine.samplings[0]
    assert (sampling.temperature, sampling.max_new_tokens) == (0.5, 50)


@SENDS
async def test_text_and_calls_of_one_turn_stay_one_message(tmp_path, send):
    text = f"<think>\nhm\n</think>\n\nLook.\n{CALL}\n{CALL}"
    async with in_process(ScriptedEngine(text, "done"), RENDERER, tmp_path) as gateway:
        client = await gateway.open()
        first = await send(client, tools=[BASH])
        given = [{"role": "user", "content": "hi"}, *echo(first)]
        given += [
            {"type": "function_call_output", "call_id": item.call_id, "output": "a"}
            for item in first.output
            if item.type == "function_call"
        ]
        last = await send(client, given, tools=[BASH])
        log = read_log(gateway.log.path)
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item.type for item in first.output] == kinds
    assert first.output[0].content[0].text == "hm"
    assert first.output[2].arguments == '{"n":  1.50e1}'
    assert last.output_text == "done"
    one, two = log.to_pylist()
    roles = [m["role"] for m in two["messages"]]
    assert roles == ["user", "assistant", "tool", "tool"]
    assert two["messages"][1]["key"] == one["response"]["key"]
    tk.validate(log)
    assert tk.link(log)["parent"].to_pylist() == [None, 0]


async def test_the_events_of_a_stream_in_order(tmp_path):
    text = f"<think>hm</think>Look.{CALL}"
    async with in_process(ScriptedEngine(text), RENDERER, tmp_path) as gateway:
        client = await gateway.open()
        stream = await ask(client, tools=[BASH], stream=True)
        events = [event async for event in stream]
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(19))
    places = [e.output_index for e in events if e.type.endswith("item.done")]
    assert places == [0, 1, 2]
    assert len({events[0].response.id, events[-1].response.id}) == 1
    assert events[2].item.encrypted_content is None
    assert events[7].item.encrypted_content


async def test_a_reply_cut_by_the_token_limit_is_incomplete(tmp_path):
    cut = sampled("hel", finish_reason="length")
    async with in_process(ScriptedEngine(cut, cut), RENDERER, tmp_path) as gateway:
        client = await gateway.open()
        whole = await ask(client)
        events = [event async for event in await ask(client, stream=True)]
    assert events[-1].type == "response.incomplete"
    for response in (whole, events[-1].response):
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output[0].status == "incomplete"
        assert response.output_text == "hel"


async def test_a_tool_of_a_namespace_is_called_by_the_names_that_the_client_knows(
    tmp_path,
):
    call = CALL.replace("bash", "agents__spawn")
    engine = ScriptedEngine(call)
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = await gateway.open()
        reply = await ask(client, tools=[BASH, SPAWN, {"type": "web_search"}])
        shown = await gateway.session(client)
    (item,) = reply.output
    assert (item.namespace, item.name) == ("agents", "spawn")
    assert shown["tools_left_out"] == {"web_search": 1}
    (message,) = OPENAI_RESPONSES.read(body(echo(reply))).messages
    assert message["tool_calls"][0]["function"]["name"] == "agents__spawn"


def late_client(data):
    http = replaying(openai.DefaultAsyncHttpxClient, data)
    return openai.AsyncOpenAI(api_key="x", http_client=http, max_retries=0)


async def late(tmp_path, reply):
    held = Held(reply)
    async with in_process(
        ScriptedEngine(held), RENDERER, tmp_path, ping_seconds=0.001
    ) as gateway:
        fields = {"session": await gateway.open_key(), "stream": True}
        data = await late_stream(
            gateway, "/v1/responses", {**fields, "input": "hi"}, held
        )
        return data, gateway.turns()


async def test_signs_of_life_until_the_reply_is_there(tmp_path):
    data, turns = await late(tmp_path, "late")
    assert data.count(b"event: response.created") == 1
    assert data.count(b"event: response.in_progress") >= 3
    assert (await streamed(late_client(data))).output_text == "late"
    assert len(turns) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        pytest.param(EngineError("no memory"), "server_error", id="engine"),
        pytest.param(EngineError("bad", 400), "invalid_prompt", id="request"),
    ],
)
async def test_what_goes_wrong_late_is_an_event(tmp_path, error, code):
    data, turns = await late(tmp_path, error)
    assert turns == []
    events = [event async for event in await ask(late_client(data), stream=True)]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == code
    assert events[-1].response.error.message == error.message


async def test_codex_is_told_of_a_full_context_in_the_stream(tmp_path):
    async with in_process(ScriptedEngine(context=20), RENDERER, tmp_path) as gateway:
        client = await gateway.open()
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client)
        events = [event async for event in await ask(client, stream=True)]
        assert gateway.turns() == []
    assert caught.value.code == "context_length_exceeded"
    assert [event.type for event in events][::2] == [
        "response.created",
        "response.failed",
    ]
    assert events[-1].response.error.code == "context_length_exceeded"


async def test_the_tokens_of_a_prompt_are_counted(tmp_path):
    engine = ScriptedEngine("a")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = await gateway.open()
        counted = await client.responses.input_tokens.count(input="hi", tools=[BASH])
        await ask(client, tools=[BASH])
    assert counted.input_tokens == len(engine.prompts[0])


def body(given, **fields):
    return {"input": given, **fields}


def text(said, kind="input_text"):
    return [{"type": kind, "text": said}]


def test_a_request_of_codex():
    """The shape of a recorded request: engines-and-clients 6.2."""
    request = OPENAI_RESPONSES.read(
        body(
            [
                {
                    "type": "message",
                    "id": "msg_ad35246c-f054-5fad-a2f7-f71f3bb6f90b",
                    "role": "developer",
                    "content": [*text("a"), *text("b")],
                },
                {"type": "message", "role": "user", "content": text("do")},
            ],
            model="m",
            stream=True,
            tool_choice="auto",
            parallel_tool_calls=True,
            reasoning={"summary": "auto"},
            store=False,
            include=["reasoning.encrypted_content"],
            prompt_cache_key="k",
            client_metadata={"thread_id": "t"},
            tools=[BASH, {"type": "web_search", "external_web_access": False}],
        )
    )
    assert request.messages == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "do"},
    ]
    assert request.left_out == ("web_search",)
    assert request.tools == [
        {
            "type": "function",
            "function": {
                "name": "bash",
                "description": "Runs.",
                "parameters": {"type": "object"},
            },
        }
    ]


def call(name="f", **fields):
    given = {"type": "function_call", "call_id": "c", "name": name, "arguments": "{"}
    return {**given, **fields}


def said(what, **fields):
    return {"role": "assistant", "content": text(what, "output_text"), **fields}


A, B = "a" * 32, "b" * 32


@pytest.mark.parametrize(
    ("items", "shapes"),
    [
        pytest.param([said("x"), call(), call()], [("x", 2)], id="one turn"),
        pytest.param(
            [said("x", id=f"msg_{A}_0"), said("y", id=f"msg_{B}_0")],
            [("x", 0), ("y", 0)],
            id="two replies side by side",
        ),
        pytest.param(
            [call(id=f"fc_{A}_0"), said("y", id=f"msg_{A}_1")],
            [("y", 1)],
            id="text after a call",
        ),
        pytest.param(
            [said("x"), {"type": "reasoning", "summary": []}, said("y")],
            [("x", 0), ("y", 0)],
            id="reasoning begins a turn",
        ),
        pytest.param(
            [said("x"), {"role": "user", "content": "u"}, said("y")],
            [("x", 0), ("u", 0), ("y", 0)],
            id="a user between",
        ),
    ],
)
def test_items_become_messages(items, shapes):
    messages = OPENAI_RESPONSES.read(body(items)).messages
    got = [(m["content"], len(m.get("tool_calls", []))) for m in messages]
    assert got == shapes


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"content": text("hm", "reasoning_text")}, id="content"),
        pytest.param(
            {"encrypted_content": "trajkit1.aG0=", "content": None}, id="packed"
        ),
        pytest.param({"summary": text("hm", "summary_text")}, id="summary"),
    ],
)
def test_reasoning_is_read_from_what_is_there(fields):
    item = {"type": "reasoning", "id": "rs_1", "summary": [], **fields}
    (message,) = OPENAI_RESPONSES.read(body([item, call()])).messages
    assert message["reasoning_content"] == "hm"


def test_images_by_policy():
    given = body([{"role": "user", "content": [{"type": "input_image"}]}])
    with pytest.raises(GatewayError, match="'input_image' is not supported"):
        OPENAI_RESPONSES.read(given)
    (message,) = OPENAI_RESPONSES.read(given, "omit").messages
    assert message["content"] == "[image omitted]"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        pytest.param({"input": []}, "input", id="nothing"),
        pytest.param({"input": None}, "input", id="null"),
        pytest.param(
            {"previous_response_id": "r"}, "previous_response_id", id="a stored one"
        ),
        pytest.param({"parallel_tool_calls": 1}, "parallel_tool_calls", id="one"),
        pytest.param(
            {"text": {"format": {"type": "json_schema"}}},
            "text.format.schema",
            id="no schema",
        ),
        pytest.param({"include": "logprobs"}, "include", id="include as text"),
        pytest.param(
            {"tools": [{**BASH, "strict": 1}]}, "tools[0].strict", id="strict"
        ),
        pytest.param(
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input[0].content[0].type",
            id="a file",
        ),
        pytest.param(
            {"max_output_tokens": 0}, "max_output_tokens", id="no output tokens"
        ),
    ],
)
def test_what_is_refused(given, param):
    with pytest.raises(GatewayError) as caught:
        OPENAI_RESPONSES.read({"input": "hi", **given})
    assert caught.value.status == 400
    assert caught.value.param == param


IGNORED = [
    pytest.param({"conversation": "c"}, "conversation", id="a conversation"),
    pytest.param({"background": True}, "background", id="in the background"),
    pytest.param({"top_logprobs": 1}, "top_logprobs", id="top logprobs"),
    pytest.param(
        {"tool_choice": {"type": "web_search"}}, "tool_choice", id="a hosted choice"
    ),
    pytest.param(
        {"tools": [{"type": "custom", "name": "apply_patch"}]},
        "tools[0].type",
        id="a custom tool",
    ),
    pytest.param(
        {"tools": [{**SPAWN, "tools": [SPAWN]}]},
        "tools[0].type",
        id="a namespace within one",
    ),
    pytest.param(
        {"input": [{"type": "custom_tool_call"}]}, "input[0].type", id="its call"
    ),
    pytest.param(
        {"input": [{"type": "item_reference", "id": "x"}]},
        "input[0].type",
        id="a reference",
    ),
    pytest.param(
        {"input": [{"role": "tool", "content": ""}]}, "input[0].role", id="a role"
    ),
    pytest.param(
        {"input": [{"type": "reasoning", "encrypted_content": "gAAA"}]},
        "input[0].encrypted_content",
        id="someone else's reasoning",
    ),
    pytest.param(
        {"input": [{"role": "user", "content": "a", "mood": 1}]},
        "input[0].mood",
        id="a field of a message",
    ),
    pytest.param(
        {"input": [{"role": "user", "content": [{**TEXT, "mood": 1}]}]},
        "input[0].content[0].mood",
        id="a field of a part",
    ),
]


@pytest.mark.parametrize(("given", "param"), IGNORED)
def test_what_is_ignored_and_counted(given, param):
    if isinstance(given.get("input"), list):
        given = {**given, "input": [*given["input"], {"role": "user", "content": "a"}]}
    request = OPENAI_RESPONSES.read({"input": "hi", **given})
    counted = {*request.ignored, *(f"tools[].type={one}" for one in request.left_out)}
    where = re.sub(r"\[\d+\]", "[]", param)
    assert any(name.partition("=")[0] == where for name in counted), counted


async def test_errors_have_the_shape_of_the_protocol(tmp_path):
    async with in_process(ScriptedEngine("a"), RENDERER, tmp_path) as gateway:
        with pytest.raises(openai.AuthenticationError) as caught:
            await ask(gateway.client("other"))
        refused = await gateway.http.post(
            "/v1/responses",
            headers={"x-session-key": await gateway.open_key()},
            json={"input": 3},
        )
    assert caught.value.code == "invalid_api_key"
    assert refused.status_code == 400
    assert json.loads(refused.text)["error"]["param"] == "input"
