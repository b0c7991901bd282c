"""Gemini generateContent, driven by the real google-genai client."""

import re

import pytest
from google.genai import errors, types

import trajkit as tk
from tests.shim.clients import FREE, in_process, late_stream, read_log
from tests.shim.fakes import RENDERER, Held, ScriptedEngine, sampled
from trajkit_shim.errors import EngineError, GatewayError
from trajkit_shim.protocols.gemini import GEMINI

pytestmark = pytest.mark.anyio

CALL = '<tool_call>\n{"name": "bash", "arguments": {"n":  1.50e1}}\n</tool_call>'
BASH = types.Tool(
    function_declarations=[
        types.FunctionDeclaration(
            name="bash",
            description="Runs.",
            parameters=types.Schema(
                type="OBJECT", properties={"n": types.Schema(type="NUMBER")}
            ),
        )
    ]
)


def config(**fields):
    no_afc = types.AutomaticFunctionCallingConfig(disable=True)
    return types.GenerateContentConfig(automatic_function_calling=no_afc, **fields)


async def ask(client, contents="hi", **fields):
    return await client.aio.models.generate_content(
        model="any", contents=contents, config=config(**fields)
    )


async def streamed(client, contents="hi", **fields):
    """The last chunk, holding the parts of all."""
    parts = []
    async for chunk in await client.aio.models.generate_content_stream(
        model="any", contents=contents, config=config(**fields)
    ):
        parts += chunk.candidates[0].content.parts
    chunk.candidates[0].content.parts = parts
    return chunk


SENDS = pytest.mark.parametrize("send", [ask, streamed])


@SENDS
async def test_a_reply_of_text(tmp_path, send):
    engine = ScriptedEngine(sampled("hello", cached_tokens=3))
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        session = await gateway.open_key(**FREE)
        reply = await send(
            gateway.gemini(session),
            system_instruction="be brief",
            temperature=0.5,
            top_k=40,
            max_output_tokens=50,
            stop_sequences=["END"],
            seed=1,
        )
        (turn,) = gateway.turns()
    assert reply.text == "hello"
    assert reply.candidates[0].finish_reason == "STOP"
    usage = reply.usage_metadata
    assert usage.prompt_token_count == len(engine.prompts[0])
    assert usage.cached_content_token_count == 3
    assert (usage.candidates_token_count, usage.thoughts_token_count) == (6, None)
    assert turn["session_id"] == gateway.ids[session]
    assert [m["role"] for m in turn["messages"]] == ["system", "user"]
    sampling = engine.samplings[0]
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 40, 1)
    assert (sampling.max_new_tokens, sampling.stop) == (50, ("END",))


@SENDS
async def test_a_conversation_with_tools_and_thoughts(tmp_path, send):
    text = f"<think>\nhm\n</think>\n\nLook.\n{CALL}\n{CALL}"
    async with in_process(ScriptedEngine(text, "done"), RENDERER, tmp_path) as gateway:
        client = gateway.gemini(await gateway.open_key())
        first = await send(client, tools=[BASH])
        results = [
            types.Part(
                function_response=types.FunctionResponse(
                    id=call.id, name=call.name, response={"output": "a.txt"}
                )
            )
            for call in first.function_calls
        ]
        contents = [
            types.Content(role="user", parts=[types.Part(text="hi")]),
            first.candidates[0].content,
            types.Content(role="user", parts=results),
        ]
        last = await send(client, contents, tools=[BASH])
        log = read_log(gateway.log.path)
    thought, said, one, two = first.candidates[0].content.parts
    assert (thought.text, thought.thought, said.text) == ("hm", True, "Look.\n")
    assert one.function_call.args == {"n": 15.0}
    assert one.function_call.id != two.function_call.id
    assert last.text == "done"
    roles = [m["role"] for m in log["messages"][1].as_py()]
    assert roles == ["user", "assistant", "tool", "tool"]
    tk.validate(log)


@SENDS
@pytest.mark.parametrize("space", ["\n", "\n\n", "\r\n", "\r\r"])
async def test_arguments_with_line_breaks(tmp_path, send, space):
    text = CALL.replace("  ", space)
    async with in_process(ScriptedEngine(text), RENDERER, tmp_path) as gateway:
        reply = await send(gateway.gemini(await gateway.open_key()), tools=[BASH])
    assert reply.function_calls[0].args == {"n": 15.0}


@SENDS
async def test_a_reply_cut_by_the_token_limit(tmp_path, send):
    cut = sampled("hel", finish_reason="length")
    async with in_process(ScriptedEngine(cut), RENDERER, tmp_path) as gateway:
        reply = await send(gateway.gemini(await gateway.open_key()))
    assert reply.candidates[0].finish_reason == "MAX_TOKENS"
    assert reply.text == "hel"


@SENDS
async def test_errors_have_the_shape_of_the_protocol(tmp_path, send):
    async with in_process(ScriptedEngine(), RENDERER, tmp_path) as gateway:
        with pytest.raises(errors.ClientError) as unknown:
            await send(gateway.gemini("other"))
        session = await gateway.open_key()
        await gateway.http.delete(gateway.path_of(session))
        with pytest.raises(errors.ClientError) as closed:
            await send(gateway.gemini(session))
        assert gateway.turns() == []
    assert (unknown.value.code, unknown.value.status) == (401, "UNAUTHENTICATED")
    assert (closed.value.code, closed.value.status) == (410, "FAILED_PRECONDITION")


async def test_a_prompt_that_is_too_long(tmp_path):
    async with in_process(ScriptedEngine(context=20), RENDERER, tmp_path) as gateway:
        with pytest.raises(errors.ClientError, match="exceeds the maximum") as caught:
            await ask(gateway.gemini(await gateway.open_key()))
    assert caught.value.status == "INVALID_ARGUMENT"


async def test_the_tokens_of_a_prompt_are_counted(tmp_path):
    engine = ScriptedEngine("a")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = gateway.gemini(await gateway.open_key())
        counted = await client.aio.models.count_tokens(model="any", contents="hi")
        await ask(client)
    assert counted.total_tokens == len(engine.prompts[0])


async def late(tmp_path, reply):
    held = Held(reply)
    async with in_process(
        ScriptedEngine(held), RENDERER, tmp_path, ping_seconds=0.001
    ) as gateway:
        body = {"session": await gateway.open_key(), "contents": [content("hi")]}
        path = "/v1beta/models/any:streamGenerateContent"
        return await late_stream(gateway, path, body, held)


async def test_empty_lines_until_the_reply_is_there(tmp_path):
    data = await late(tmp_path, "late")
    assert data.startswith(b"\n\n")
    assert data.lstrip(b"\n").startswith(b'data: {"candidates"')


async def test_what_goes_wrong_late_is_an_event(tmp_path):
    data = await late(tmp_path, EngineError("no memory"))
    # what the client knows an error by
    assert data.lstrip(b"\n").startswith(b'data: {"error": {"code": 502')


def content(*parts, role="user"):
    return {
        "role": role,
        "parts": [{"text": p} if isinstance(p, str) else p for p in parts],
    }


def test_calls_without_ids_keep_their_results():
    def call(name):
        return {"functionCall": {"name": name, "args": {}}}

    def result(name, given):
        return {"functionResponse": {"name": name, "response": given}}

    messages = GEMINI.read(
        {
            "contents": [
                content("hi"),
                content(call("f"), call("g"), call("f"), role="model"),
                content(
                    result("g", {"output": "1"}),
                    result("f", {"result": "2"}),
                    result("f", {"error": "3"}),
                    "and",
                ),
                content({"functionCall": {"name": "f"}}, role="model"),
                content(result("f", {"a": 1, "é": []})),
            ]
        }
    ).messages
    ids = [call["id"] for m in messages for call in m.get("tool_calls", [])]
    assert ids == ["f-1", "g-2", "f-3", "f-1"]
    results = [
        (m["tool_call_id"], m["content"]) for m in messages if m["role"] == "tool"
    ]
    assert results == [
        ("g-2", "1"),
        ("f-1", "2"),
        ("f-3", "3"),
        ("f-1", '{"a": 1, "é": []}'),
    ]
    assert messages[4]["is_error"] is True
    assert messages[5] == {"role": "user", "content": "and"}


def test_a_schema_in_google_s_words():
    request = GEMINI.read(
        {
            "contents": [content("hi")],
            "tools": [
                {
                    "functionDeclarations": [
                        {
                            "name": "f",
                            "parameters": {
                                "type": "OBJECT",
                                "properties": {"type": {"type": "STRING"}},
                                "enum": ["STRING"],
                            },
                        }
                    ]
                },
                {"googleSearch": {}},
            ],
        }
    )
    assert request.tools[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {"type": {"type": "string"}},
        "enum": ["STRING"],
    }
    assert request.left_out == ("googleSearch",)


def test_images_by_policy():
    body = {"contents": [content({"inlineData": {"mimeType": "image/png"}})]}
    with pytest.raises(GatewayError, match="'image/png' is not supported"):
        GEMINI.read(body)
    (message,) = GEMINI.read(body, "omit").messages
    assert message["content"] == "[image omitted]"


def test_a_count_of_a_whole_request():
    whole = {"model": "m", "contents": [content("hi")]}
    request = GEMINI.read({"generateContentRequest": whole}, count=True)
    assert request.messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param({"contents": []}, "contents", id="nothing"),
        pytest.param(
            {
                "contents": [
                    content({"functionResponse": {"name": "f", "response": {}}})
                ]
            },
            "contents[0].parts[0].functionResponse",
            id="the result of no call",
        ),
        pytest.param(
            {"generationConfig": {"candidateCount": 0}},
            "generationConfig.candidateCount",
            id="no candidates",
        ),
        pytest.param(
            {"generationConfig": {"responseMimeType": "text/x.enum"}},
            "generationConfig.responseMimeType",
            id="an enumeration",
        ),
        pytest.param(
            {"generationConfig": {"responseSchema": {"type": "OBJECT"}}},
            "generationConfig.responseMimeType",
            id="a schema of plain text",
        ),
        pytest.param(
            {"generationConfig": {"topP": 2}}, "generationConfig.topP", id="topP"
        ),
        pytest.param(
            {"generationConfig": {"topK": 1.5}}, "generationConfig.topK", id="topK"
        ),
        pytest.param(
            {"toolConfig": {"functionCallingConfig": {"mode": "SOME"}}},
            "toolConfig.functionCallingConfig.mode",
            id="a mode",
        ),
    ],
)
def test_what_is_refused(body, param):
    with pytest.raises(GatewayError) as caught:
        GEMINI.read({"contents": [content("hi")], **body})
    assert caught.value.status == 400
    assert caught.value.param == param


IGNORED = [
    pytest.param(
        {"contents": [content("a", role="system")]}, "contents[0].role", id="role"
    ),
    pytest.param(
        {"contents": [content({"executableCode": {}})]},
        "contents[0].parts[0].executableCode",
        id="code",
    ),
    pytest.param({"tools": [{"computerUse": {}}]}, "tools[0].computerUse", id="tool"),
    pytest.param({"cachedContent": "c"}, "cachedContent", id="cached content"),
    pytest.param(
        {"generationConfig": {"responseLogprobs": True, "logprobs": 1}},
        "generationConfig.logprobs",
        id="top logprobs",
    ),
]


@pytest.mark.parametrize(("body", "param"), IGNORED)
def test_what_is_ignored_and_counted(body, param):
    request = GEMINI.read({"contents": [content("hi")], **body})
    where = re.sub(r"\[\d+\]", "[]", param)
    assert any(name.partition("=")[0] == where for name in request.ignored)
