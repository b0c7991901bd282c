"""Replies that other parsers than the gateway's take apart."""

import asyncio
import json
from contextlib import ExitStack

import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.shim.clients import in_process
from tests.shim.conformance import DRIVERS, NAMES
from tests.shim.fakes import RENDERER, ScriptedEngine, parse_reply, sampled
from trajkit_shim.engines.base import EngineInfo
from trajkit_shim.errors import EngineError
from trajkit_shim.prompting.render import embedded_renderer
from trajkit_shim.replies.external_parsers import SGLangParser, as_sampled
from trajkit_shim.serve import running

pytestmark = pytest.mark.anyio

# numbers and white space that no JSON library writes so
ARGUMENTS = '{"n":  1.50e1}'
CALL = f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>'
REPLY = f"<think>\nhm\n</think>\n\nLook.\n{CALL}"


class Server:
    """SGLang's endpoints, with the gateway's own parser behind them.

    As the real ones they drop white space and write arguments anew (0.5.23).
    """

    def __init__(self, **info):
        self.info = info
        self.asked = []
        self.status = 200

    async def server_info(self, _: Request):
        return JSONResponse(self.info)

    async def reasoning(self, request: Request):
        body = await request.json()
        self.asked.append(body["reasoning_parser"])
        found = parse_reply(body["text"], None)
        rest = body["text"].rpartition("</think>")[2]
        told = {"reasoning_text": found.reasoning or "", "text": rest.strip()}
        return JSONResponse(told, self.status)

    async def calls(self, request: Request):
        body = await request.json()
        self.asked.append(body["tool_call_parser"])
        found = parse_reply(body["text"], body["tools"])
        calls = [
            {
                "tool_index": i,
                "name": call.name,
                "parameters": json.dumps(json.loads(call.arguments)),
            }
            for i, call in enumerate(found.calls)
        ]
        told = {"normal_text": found.text.strip(), "calls": calls}
        return JSONResponse(told, self.status)

    def parser(self):
        routes = [
            Route("/server_info", self.server_info),
            Route("/separate_reasoning", self.reasoning, methods=["POST"]),
            Route("/parse_function_call", self.calls, methods=["POST"]),
        ]
        return Closing(Starlette(routes=routes))


class Closing(SGLangParser):
    """The parser of a server on a thread, which is closed with it."""

    def __init__(self, app):
        self._stack = ExitStack()
        super().__init__(self._stack.enter_context(running(app)))

    async def close(self):
        await super().close()
        await asyncio.to_thread(self._stack.close)


BOTH = {"tool_call_parser": "qwen25", "reasoning_parser": "qwen3"}


async def test_no_form_can_be_required_of_a_server_s_parser(tmp_path):
    parser = Server(**BOTH).parser()
    async with in_process(
        ScriptedEngine(), RENDERER, tmp_path, reply_parser=parser
    ) as gateway:
        client = await gateway.open()
        with pytest.raises(openai.BadRequestError, match="how calls are written"):
            await client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "hi"}],
                tools=[{"type": "function", "function": {"name": "f"}}],
                tool_choice="required",
            )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", NAMES)
async def test_a_conversation_extends_what_was_sampled(tmp_path, name, stream):
    parser = Server(**BOTH).parser()
    driver = DRIVERS[name]
    renderer = embedded_renderer()
    engine = ScriptedEngine(context=5000)
    for text in (REPLY, "Done."):
        ids = renderer.encode(text + "<|im_end|>").ids
        engine.script.append(reply_of(ids))
    options = {"reply_parser": parser}
    async with in_process(engine, renderer, tmp_path, **options) as gateway:
        engine.limits = limits_of(renderer)
        client = driver.client(gateway, await gateway.open_key())
        said = driver.user("hi")
        first = await driver.ask(client, said, stream=stream)
        said += first.echo + driver.failed(first, "no such file")
        last = await driver.ask(client, said, stream=stream)
        before, turn = gateway.turns()
    await parser.close()
    assert (first.reasoning, first.text.strip()) == ("hm", "Look.")
    ((called, arguments),) = first.calls
    assert called == "f"
    if isinstance(arguments, str):
        assert arguments == ARGUMENTS
    else:
        assert arguments == {"n": 15}
    assert last.text == "Done."
    assert not before["ill_formed"]
    assert turn["prompt_built"] == "append"
    held = before["prompt_ids"] + before["output_ids"]
    assert turn["prompt_ids"][: len(held)] == held


def reply_of(ids):
    return sampled(
        "", output_ids=ids, output_logprobs=None, weight_versions=(), cached_tokens=None
    )


def limits_of(renderer):
    return EngineInfo(
        model="scripted", vocab_size=len(renderer.tokenizer), max_context_tokens=5000
    )


@pytest.mark.parametrize(
    ("info", "asked"),
    [
        pytest.param({"reasoning_parser": "qwen3"}, ["qwen3"], id="reasoning"),
        pytest.param({"tool_call_parser": "qwen25"}, ["qwen25"], id="calls"),
        pytest.param(BOTH, ["qwen3", "qwen25"], id="both"),
    ],
)
async def test_a_server_is_asked_for_what_it_has(info, asked):
    server = Server(**info)
    parser = server.parser()
    prompt = RENDERER.encode("a").ids
    tools = [{"type": "function", "function": {"name": "f"}}]
    found = await parser.parse(f"hm</think>{CALL}", tools, prompt, opened=True)
    assert server.asked == asked
    assert (found.reasoning == "hm") == ("reasoning_parser" in info)
    assert bool(found.calls) == ("tool_call_parser" in info)
    # no tools: no calls are looked for
    server.asked.clear()
    found = await parser.parse(CALL, None, prompt, opened=False)
    assert found.parts == (CALL,)
    assert "qwen25" not in server.asked
    await parser.close()


async def test_a_server_without_parsers():
    parser = Server(tool_call_parser=None).parser()
    with pytest.raises(EngineError, match="neither --tool-call-parser nor"):
        await parser.names()
    await parser.close()


@pytest.mark.parametrize("status", [400, 500])
async def test_a_reply_that_the_server_does_not_take(status):
    server = Server(**BOTH)
    server.status = status
    parser = server.parser()
    asked = parser.parse(REPLY, [], RENDERER.encode("a").ids, opened=False)
    if status == 400:
        found = await asked
        assert (found.parts, found.ill_formed) == ((REPLY,), True)
    else:
        with pytest.raises(EngineError, match="500"):
            await asked
    await parser.close()


@pytest.mark.parametrize(
    ("arguments", "text", "found"),
    [
        pytest.param('{"a": 1}', 'x {"a":1.0} y', '{"a":1.0}', id="a number"),
        pytest.param('{"a": 1}', '{"b": {"a":1}}', '{"a":1}', id="inside"),
        pytest.param('{"a": 1}', '{"a": 2} {"a"', '{"a": 1}', id="another value"),
    ],
)
def test_arguments_as_they_were_sampled(arguments, text, found):
    assert as_sampled(arguments, text, 0)[0] == found


@pytest.mark.parametrize("arguments", ["ls", "", '{"a"', "[1]", '{"a": NaN}', None])
async def test_a_call_without_an_object_as_arguments_is_text(arguments):
    text = "a call"
    call = {"name": "f", "parameters": arguments}
    server = Server(tool_call_parser="qwen25")
    server.calls = lambda _: JSONResponse({"normal_text": "", "calls": [call]})
    parser = server.parser()
    found = await parser.parse(text, [{}], RENDERER.encode("a").ids, opened=False)
    assert (found.parts, found.ill_formed) == ((text,), True)
    await parser.close()


def test_equal_calls_are_found_one_after_the_other():
    text = '{"a":1} {"a": 1}'
    first, at = as_sampled('{"a": 1}', text, 0)
    assert (first, as_sampled('{"a": 1}', text, at)[0]) == ('{"a":1}', '{"a": 1}')
