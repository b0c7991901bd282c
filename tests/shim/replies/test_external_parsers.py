"""Replies that the parsers of an SGLang server take apart."""

import json

import pytest
from aiohttp import web

from tests.shim.clients import NAMES, TOOLS
from tests.shim.conformance import DRIVERS
from tests.shim.engines.double import Double
from tests.shim.fakes import (
    EMBEDDED,
    RENDERER,
    ScriptedEngine,
    parse_reply,
    sampled,
    sampled_call,
)
from trajkit_shim.errors import EngineError
from trajkit_shim.replies.parse import SGLangParser, as_sampled

pytestmark = pytest.mark.anyio

# numbers and white space that no JSON library writes so
ARGUMENTS = '{"n":  1.50e1}'
CALL = sampled_call("f", ARGUMENTS)
REPLY = f"<think>\nhm\n</think>\n\nLook.\n{CALL}"
OFFERED = TOOLS["openai_chat"]
BOTH = {"tool_call_parser": "qwen25", "reasoning_parser": "qwen3"}
CALLS_ONLY = {"tool_call_parser": "qwen25"}


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


def server(info=BOTH, **paths):
    """As real ones it drops white space and writes arguments anew (0.5.23)."""
    found = {"separate_reasoning": separated, "parse_function_call": called, **paths}
    return Double("sglang", server_info=info, **found)


async def parsed(double, text, tools=OFFERED, *, opened=False):
    async with double.listening() as url:
        parser = SGLangParser(url)
        try:
            prompt = RENDERER.encode("a").ids
            return await parser.parse(text, tools, prompt, opened=opened)
        finally:
            await parser.close()


async def test_no_form_can_be_required_of_a_server_s_parser(start):
    gateway = await start(reply_parser=SGLangParser("http://127.0.0.1:9"))
    asked = {"tools": OFFERED, "tool_choice": "required"}
    error = await (await gateway.open()).error(400, **asked)
    assert "how calls are written" in error["message"]


@pytest.mark.parametrize("name", NAMES)
async def test_a_conversation_extends_what_was_sampled(start, name):
    driver, size = DRIVERS[name], len(EMBEDDED.tokenizer)
    engine = ScriptedEngine(context=5000, vocab_size=size)
    unknown = {"output_logprobs": None, "weight_versions": (), "cached_tokens": None}
    for text in (REPLY, "Done."):
        ids = EMBEDDED.encode(text + "<|im_end|>").ids
        engine.script.append(sampled("", output_ids=ids, **unknown))
    async with server().listening() as url:
        parser = SGLangParser(url)
        gateway = await start(engine=engine, renderer=EMBEDDED, reply_parser=parser)
        client, sent = driver.client(await gateway.open()), driver.user("hi")
        first = await driver.ask(client, sent, stream=False)
        sent += first.echo + driver.failed(first, "no such file")
        last = await driver.ask(client, sent, stream=False)
        before, turn = gateway.turns()
        await parser.close()
    assert (first.reasoning, first.text.strip(), last.text) == ("hm", "Look.", "Done.")
    ((called_name, arguments),) = first.calls
    assert called_name == "f"
    assert arguments == (ARGUMENTS if isinstance(arguments, str) else {"n": 15})
    assert not before["ill_formed"]
    assert turn["prompt_built"] == "append"
    held = before["prompt_ids"] + before["output_ids"]
    assert turn["prompt_ids"][: len(held)] == held


@pytest.mark.parametrize(
    ("info", "asked"),
    [
        ({"reasoning_parser": "qwen3"}, ["/separate_reasoning"]),
        (CALLS_ONLY, ["/parse_function_call"]),
        (BOTH, ["/separate_reasoning", "/parse_function_call"]),
    ],
)
async def test_a_server_is_asked_for_what_it_has(info, asked):
    double = server(info)
    found = await parsed(double, f"hm</think>{CALL}", opened=True)
    assert [path for path, _ in double.asked] == ["/server_info", *asked]
    assert (found.reasoning == "hm") == ("reasoning_parser" in info)
    assert bool(found.calls) == ("tool_call_parser" in info)
    # no tools: no calls are looked for
    double = server(info)
    assert (await parsed(double, CALL, None)).parts == (CALL,)
    assert "/parse_function_call" not in double.counted()


async def test_a_server_that_does_not_parse():
    with pytest.raises(EngineError, match="neither --tool-call-parser nor"):
        await parsed(server({"tool_call_parser": None}), REPLY)
    refused, failed = (web.json_response({}, status=status) for status in (400, 500))
    found = await parsed(server(separate_reasoning=refused), REPLY)
    assert (found.parts, found.ill_formed) == ((REPLY,), True)
    with pytest.raises(EngineError, match="500"):
        await parsed(server(separate_reasoning=failed), REPLY)


@pytest.mark.parametrize("arguments", ["ls", "", '{"a"', "[1]", '{"a": NaN}', None])
async def test_a_call_without_an_object_as_arguments_is_text(arguments):
    calls = {"normal_text": "", "calls": [{"name": "f", "parameters": arguments}]}
    found = await parsed(server(CALLS_ONLY, parse_function_call=calls), "a call")
    assert (found.parts, found.ill_formed) == (("a call",), True)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('x {"a":1.0} y', '{"a":1.0}'),
        ('{"b": {"a":1}}', '{"a":1}'),
        ('{"a": 2} {"a"', '{"a": 1}'),
    ],
)
def test_arguments_as_they_were_sampled(text, found):
    assert as_sampled('{"a": 1}', text, 0)[0] == found


def test_equal_calls_are_found_one_after_the_other():
    text = '{"a":1} {"a": 1}'
    first, at = as_sampled('{"a": 1}', text, 0)
    assert (first, as_sampled('{"a": 1}', text, at)[0]) == ('{"a":1}', '{"a": 1}')
