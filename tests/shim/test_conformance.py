"""Every protocol in every case, streamed and not, read by the official clients."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.shim.clients import in_process
from tests.shim.conformance import DRIVERS, ENDS, FAILURES, NAMES, Failure, table
from tests.shim.fakes import RENDERER, Held, PiecewiseEngine, ScriptedEngine, sampled
from trajkit_shim.engine import EngineError

pytestmark = pytest.mark.anyio

CALL = '<tool_call>\n{"name": "f", "arguments": {"n":  1.50e1}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "f", "arguments": {"n": \n</tool_call>'
ROOT = Path(__file__).parent.parent.parent

EACH = pytest.mark.parametrize("name", NAMES)
ALL = pytest.mark.parametrize("stream", ["", "whole", "in pieces"])
BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])

# what is sampled in a case, and the text, the reasoning and the number of calls it holds
SAMPLED = {
    "text": (" hello\n", " hello\n", None, 0),
    "reasoning, then text": ("<think>\nhm\n</think>\n\nhello", "hello", "hm", 0),
    "text beside two calls": (f"Look. {CALL}\n{CALL}", "Look. ", None, 2),
    "text after a call": (f"Look. {CALL}and wait", "Look. and wait", None, 1),
    "a call that does not parse": (BROKEN, BROKEN, None, 0),
    "cut by the token limit": (sampled("hel", finish_reason="length"), "hel", None, 0),
    "a call, then cut": (sampled(CALL + "an", finish_reason="length"), "an", None, 1),
    "a stop string of the client": ("one END two", "one ", None, 0),
    "after a tool that failed": ("I see.", "I see.", None, 0),
}


def arguments(given):
    return json.loads(given) if isinstance(given, str) else given


@EACH
@ALL
@pytest.mark.parametrize("case", ENDS)
async def test_a_call_that_is_answered(tmp_path, name, stream, case):
    word = dict(zip(NAMES, ENDS[case], strict=True))[name]
    if word is None:
        # the protocol has no such case
        return
    driver = DRIVERS[name]
    reply, text, reasoning, calls = SAMPLED[case]
    failed = case == "after a tool that failed"
    kind = PiecewiseEngine if stream == "in pieces" else ScriptedEngine
    engine = kind(*[CALL] * failed, reply)
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = driver.client(gateway, await gateway.open_id())
        said = driver.user("hi")
        if failed:
            first = await driver.ask(client, said, stream=stream)
            said += first.echo + driver.failed(first, "no such file")
        stop = ["END"] if "stop string" in case else None
        answer = await driver.ask(client, said, stream=stream, stop=stop)
        turn = gateway.turns()[-1]
        # and the conversation goes on from there
        engine.script.append("more")
        said += answer.echo + driver.user("and?")
        await driver.ask(client, said, stream=stream)
        assert gateway.turns()[-1]["messages"][-2]["key"] == turn["response"]["key"]
    assert answer.end == word
    assert (answer.text, answer.reasoning) == (text, reasoning)
    assert [(n, arguments(a)) for n, a in answer.calls] == [("f", {"n": 15})] * calls
    assert len(set(answer.ids)) == calls
    assert answer.tokens == (len(turn["prompt_ids"]), len(turn["output_ids"]))
    assert turn["protocol"] == name
    if failed:
        assert turn["messages"][-1]["role"] == "tool"
        assert "no such file" in RENDERER.decode(engine.prompts[1], ended=False)


def engine_of(case):
    script = {
        "refused by the engine": EngineError("bad regex", 400),
        "the engine fails": EngineError("out of memory"),
        "the engine cuts the call short": sampled("half", finish_reason="abort"),
        "a fault of the gateway": RuntimeError("bug"),
    }
    context = 20 if case == "a prompt that is too long" else 2000
    return ScriptedEngine(*filter(None, [script.get(case)]), context=context)


@EACH
@BOTH
@pytest.mark.parametrize("case", FAILURES)
async def test_a_call_that_fails(tmp_path, name, stream, case):
    status, words = FAILURES[case]
    driver = DRIVERS[name]
    engine = engine_of(case)
    options = {"max_body_bytes": 4000, "pause_wait_seconds": 0.0}
    async with in_process(engine, RENDERER, tmp_path, **options) as gateway:
        limit = "max_output_tokens" if case == "no token left" else "max_turns"
        session = await gateway.open_id(**{limit: 1})
        said = driver.user("hi")
        before = 0
        if case == "an unknown session":
            session = "other"
        elif case == "a closed session":
            await gateway.http.delete(f"/sessions/{session}")
        elif case == "a body that is too long":
            said = driver.user("x" * 4000)
        elif case == "a pause that goes on":
            await gateway.http.post("/admin/pause")
        elif case in {"no turn left", "no token left"}:
            engine.script.append("first")
            await driver.ask(driver.client(gateway, session), said, stream=stream)
            before = 1
        temperature = 9.0 if case == "a parameter out of range" else None
        with pytest.raises(Failure) as caught:
            await driver.ask(
                driver.client(gateway, session),
                said,
                stream=stream,
                temperature=temperature,
            )
        recorded = [turn["trainable"] for turn in gateway.turns()[before:]]
    failure = caught.value
    word = dict(zip(NAMES, words, strict=True))[name]
    assert (failure.status, failure.word) == (status, word)
    assert failure.message
    # the one call that the engine began is context only
    assert recorded == ([False] if case == "the engine cuts the call short" else [])


@EACH
@BOTH
async def test_a_client_that_leaves(tmp_path, name, stream):
    driver, held = DRIVERS[name], Held("late")
    async with in_process(ScriptedEngine(held), RENDERER, tmp_path) as gateway:
        client = driver.client(gateway, await gateway.open_id())
        call = asyncio.create_task(driver.ask(client, driver.user("hi"), stream=stream))
        await held.entered.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert gateway.turns() == []
    assert held.cancelled


def test_the_documented_table_is_the_one_that_is_tested():
    assert table() in (ROOT / "docs/serving.md").read_text("utf-8")
