"""Replies that the parsers of an SGLang server take apart."""

import asyncio
import json

import openai
import pytest

from tests.shim.clients import in_process
from tests.shim.conformance import DRIVERS, NAMES
from tests.shim.engines.double import Double
from tests.shim.fakes import RENDERER, ScriptedEngine, parse_reply, sampled
from trajkit_shim import cli
from trajkit_shim.engines.base import EngineInfo
from trajkit_shim.errors import EngineError
from trajkit_shim.prompting.render import embedded_renderer
from trajkit_shim.replies import SGLangParser

pytestmark = pytest.mark.anyio

# numbers and white space that no JSON library writes so
ARGUMENTS = '{"n":  1.50e1}'
CALL = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'
REPLY = f"<think>\nhm\n</think>\n\nLook.\n{CALL}"
TOOLS = [{"type": "function", "function": {"name": "f"}}]
BOTH = ("qwen25", "qwen3")


async def separated(body):
    found = parse_reply(body["text"], None)
    rest = body["text"].rpartition("</think>")[2]
    return {"reasoning_text": found.reasoning or "", "text": rest.strip()}


async def called(body):
    found = parse_reply(body["text"], body["tools"])
    calls = [
        {"name": c.name, "parameters": json.dumps(json.loads(c.arguments))}
        for c in found.calls
    ]
    return {"normal_text": found.text.strip(), "calls": calls}


def server(**paths):
    """As real ones it drops white space and writes arguments anew (0.5.23)."""
    found = {"separate_reasoning": separated, "parse_function_call": called, **paths}
    return Double("sglang", **found)


async def parsed(double, text, tools=TOOLS, *, names=BOTH, opened=False):
    async with double.listening() as url:
        parser = SGLangParser(url, *names)
        try:
            return await parser.parse(text, tools, opened=opened)
        finally:
            await parser.close()


async def test_no_form_can_be_required_of_a_server_s_parser(tmp_path):
    parser = SGLangParser("http://127.0.0.1:9", *BOTH)
    async with in_process(
        ScriptedEngine(), RENDERER, tmp_path, reply_parser=parser
    ) as gateway:
        client = await gateway.open()
        with pytest.raises(openai.BadRequestError, match="how calls are written"):
            await client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "hi"}],
                tools=TOOLS,
                tool_choice="required",
            )


@pytest.mark.parametrize("name", NAMES)
async def test_a_conversation_extends_what_was_sampled(tmp_path, name):
    driver, renderer, engine = DRIVERS[name], embedded_renderer(), ScriptedEngine()
    engine.limits = EngineInfo(
        model="m", vocab_size=len(renderer.tokenizer), max_context_tokens=5000
    )
    unknown = {"output_logprobs": None, "weight_versions": (), "cached_tokens": None}
    for text in (REPLY, "Done."):
        ids = renderer.encode(text + "<|im_end|>").ids
        engine.script.append(sampled("", output_ids=ids, **unknown))
    async with server().listening() as url:
        options = {"reply_parser": SGLangParser(url, *BOTH)}
        async with in_process(engine, renderer, tmp_path, **options) as gateway:
            client = driver.client(gateway, await gateway.open_key())
            said = driver.user("hi")
            first = await driver.ask(client, said, stream=False)
            said += first.echo + driver.failed(first, "no such file")
            last = await driver.ask(client, said, stream=False)
            before, turn = gateway.turns()
        await options["reply_parser"].close()
    assert (first.reasoning, first.text.strip(), last.text) == ("hm", "Look.", "Done.")
    ((called_name, arguments),) = first.calls
    assert called_name == "f"
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert given == {"n": 15}
    assert not before["ill_formed"]
    assert turn["prompt_built"] == "append"
    held = before["prompt_ids"] + before["output_ids"]
    assert turn["prompt_ids"][: len(held)] == held


@pytest.mark.parametrize(
    ("names", "asked"),
    [
        ((None, "qwen3"), ["/separate_reasoning"]),
        (("qwen25", None), ["/parse_function_call"]),
        (BOTH, ["/separate_reasoning", "/parse_function_call"]),
    ],
)
async def test_a_server_is_asked_for_what_it_has(names, asked):
    double = server()
    found = await parsed(double, f"hm</think>{CALL}", names=names, opened=True)
    assert [path for path, _ in double.asked] == asked
    assert (found.reasoning == "hm") == (names[1] is not None)
    assert bool(found.calls) == (names[0] is not None)
    # no tools: no calls are looked for
    double = server()
    assert (await parsed(double, CALL, None, names=names)).parts == (CALL,)
    assert "/parse_function_call" not in double.counted()


@pytest.mark.parametrize("parser", [None, "qwen25"])
async def test_the_parsers_that_a_server_was_started_with(parser):
    double = Double("sglang", server_info={"tool_call_parser": parser})
    async with double.listening() as url:
        if parser is None:
            with pytest.raises(ConnectionError, match="neither --tool-call-parser"):
                await asyncio.to_thread(cli._engine_parser, url)
        else:
            made = await asyncio.to_thread(cli._engine_parser, url)
            assert made._names == (parser, None)


async def test_a_reply_that_the_server_does_not_take():
    from aiohttp import web

    refused = web.json_response({}, status=400)
    found = await parsed(server(separate_reasoning=refused), REPLY)
    assert (found.parts, found.ill_formed) == ((REPLY,), True)
    failed = web.json_response({}, status=500)
    with pytest.raises(EngineError, match="500"):
        await parsed(server(separate_reasoning=failed), REPLY)


@pytest.mark.parametrize("arguments", ["ls", "", '{"a"', "[1]", '{"a": NaN}', None])
async def test_a_call_without_an_object_as_arguments_is_text(arguments):
    calls = {"normal_text": "", "calls": [{"name": "f", "parameters": arguments}]}
    double = server(parse_function_call=calls)
    found = await parsed(double, "a call", names=("qwen25", None))
    assert (found.parts, found.ill_formed) == (("a call",), True)
