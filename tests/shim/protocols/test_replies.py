"""What single protocols do with a reply; `test_conformance` has what all do alike."""

import re

import openai
import pytest

from tests.shim.clients import in_process
from tests.shim.fakes import RENDERER, ScriptedEngine, parse_reply, sampled
from tests.shim.protocols.test_required import BODIES, BY_NAME, NAMES, PATHS
from trajkit_shim.chat.request import Usage, make_reply

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "hi"}
CALL = '<tool_call>\n{"name": "f", "arguments": {"n":  1.50e1}}\n</tool_call>'
BASH = {"type": "function", "name": "f", "strict": False, "parameters": {}}
SPAWN = {"type": "namespace", "name": "agents", "tools": [{**BASH, "name": "spawn"}]}


async def post(gateway, name, path="", **fields):
    answer = await gateway.http.post(
        path or PATHS[name],
        headers={"x-session-key": await gateway.open_key()},
        json={**BODIES[name], **fields},
    )
    assert answer.status_code == 200, answer.text
    return answer


async def test_the_events_of_a_stream_in_order(tmp_path):
    text = f"<think>hm</think>Look.{CALL}"
    async with in_process(ScriptedEngine(text, text), RENDERER, tmp_path) as gateway:
        client = gateway.anthropic(await gateway.open_key())
        stream = await client.messages.create(
            model="m", **BODIES["anthropic"] | {"max_tokens": 999}, stream=True
        )
        told = [event async for event in stream]
        asked = (await gateway.open()).responses
        stream = await asked.create(
            model="m", **BODIES["openai_responses"], stream=True
        )
        events = [event async for event in stream]
    kinds = [getattr(getattr(e, "delta", e), "type", "end") for e in told]
    block = ["content_block_start", None, "content_block_stop"]
    assert kinds == [
        "message_start",
        *("content_block_start", "thinking_delta", "signature_delta", block[-1]),
        *("content_block_start", "text_delta", "content_block_stop"),
        *("content_block_start", "input_json_delta", "content_block_stop"),
        *("end", "message_stop"),
    ]
    assert [e.index for e in told if e.type == "content_block_start"] == [0, 1, 2]
    assert told[0].message.content == []
    # the arguments as they were sampled
    assert told[9].delta.partial_json == '{"n":  1.50e1}'
    assert told[-2].usage.output_tokens == len(text) - 20
    added, done = ["output_item.added", "content_part.added"], "output_item.done"
    assert [event.type.removeprefix("response.") for event in events] == [
        *("created", "in_progress", *added, "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", done, *added),
        *("output_text.delta", "output_text.done", "content_part.done", done),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", done, "completed"),
    ]
    assert [event.sequence_number for event in events] == list(range(19))
    assert [e.output_index for e in events if e.type.endswith(done)] == [0, 1, 2]
    assert len({events[0].response.id, events[-1].response.id}) == 1
    assert events[2].item.encrypted_content is None
    assert events[7].item.encrypted_content


@pytest.mark.parametrize("space", ["  ", "\n", "\r\n", "\r\r"])
async def test_arguments_go_out_as_they_were_sampled(tmp_path, space):
    text = CALL.replace("  ", space)
    engine = ScriptedEngine(*[text] * 3)
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        whole = await post(
            gateway, "anthropic", "/v1/messages?beta=true", max_tokens=99
        )
        chunks = await post(gateway, "gemini", "/v1beta/models/m:streamGenerateContent")
        reply = await gateway.gemini(
            await gateway.open_key()
        ).aio.models.generate_content(
            model="m", contents="hi", config={"tools": BODIES["gemini"]["tools"]}
        )
    assert re.search(r'"input": ?\{"n": +1.50e1\}', whole.text)
    assert re.search(r'"args": ?\{"n": +1.50e1\}', chunks.text)
    assert reply.function_calls[0].args == {"n": 15.0}


async def test_a_cut_response_is_incomplete(tmp_path):
    cut = sampled("hel", finish_reason="length")
    async with in_process(ScriptedEngine(cut, cut), RENDERER, tmp_path) as gateway:
        ask = (await gateway.open()).responses.create
        whole = await ask(model="m", input="hi")
        events = [e async for e in await ask(model="m", input="hi", stream=True)]
    assert events[-1].type == "response.incomplete"
    for response in (whole, events[-1].response):
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output[0].status == "incomplete"


async def test_a_tool_of_a_namespace_has_the_client_s_names(tmp_path):
    engine = ScriptedEngine(CALL.replace('"f"', '"agents__spawn"'))
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        tools = [BASH, SPAWN, {"type": "web_search"}]
        (item,) = (await post(gateway, "openai_responses", tools=tools)).json()[
            "output"
        ]
    assert (item["namespace"], item["name"]) == ("agents", "spawn")
    (message,) = BY_NAME["openai_responses"].read({"input": [item]}).messages
    assert message["tool_calls"][0]["function"]["name"] == "agents__spawn"


async def test_codex_is_told_of_a_full_context_in_the_stream(tmp_path):
    async with in_process(ScriptedEngine(context=20), RENDERER, tmp_path) as gateway:
        ask = (await gateway.open()).responses.create
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(model="m", input="hi")
        events = [e async for e in await ask(model="m", input="hi", stream=True)]
        assert gateway.turns() == []
    kinds = ["response.created", "response.in_progress", "response.failed"]
    assert [event.type for event in events] == kinds
    for code in (caught.value.code, events[-1].response.error.code):
        assert code == "context_length_exceeded"


COUNTS = {
    "anthropic": ("/v1/messages/count_tokens", "input_tokens"),
    "openai_responses": ("/v1/responses/input_tokens", "input_tokens"),
    "gemini": ("/v1beta/models/m:countTokens", "totalTokens"),
}


@pytest.mark.parametrize("name", COUNTS)
async def test_the_tokens_of_a_prompt_are_counted(tmp_path, name):
    engine, (path, field) = ScriptedEngine("a"), COUNTS[name]
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        counted = (await post(gateway, name, path)).json()
        assert (engine.prompts, gateway.turns()) == ([], [])
        await post(gateway, name)
    assert counted[field] == len(engine.prompts[0])


@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_the_cache_and_of_reasoning_are_told(name):
    usage = Usage(prompt_tokens=5, output_tokens=9, cached_tokens=3, reasoning_tokens=4)
    reply = make_reply(parse_reply("Yes."), "stop", model="m", usage=usage)
    body = BY_NAME[name].write(reply, BY_NAME[name].read(BODIES[name]))
    told = body.get("usage") or body["usageMetadata"]
    expected = {
        "openai_chat": {
            "prompt_tokens": 5,
            "completion_tokens": 9,
            "total_tokens": 14,
            "prompt_tokens_details": {"cached_tokens": 3},
            "completion_tokens_details": {"reasoning_tokens": 4},
        },
        "anthropic": {
            "input_tokens": 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": 9,
        },
        "openai_responses": {
            "input_tokens": 5,
            "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
            "output_tokens": 9,
            "output_tokens_details": {"reasoning_tokens": 4},
            "total_tokens": 14,
        },
        # it does not count reasoning as the answer's
        "gemini": {
            "promptTokenCount": 5,
            "candidatesTokenCount": 5,
            "totalTokenCount": 14,
            "cachedContentTokenCount": 3,
            "thoughtsTokenCount": 4,
        },
    }
    assert told == expected[name]
