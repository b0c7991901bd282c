"""Every protocol in every case, streamed and not, read by the official clients."""

import asyncio
import json
from pathlib import Path

import pytest

import trajkit as tk
from tests.shim.clients import in_process, on_socket
from tests.shim.conformance import (
    CUTS,
    DRIVERS,
    ENDS,
    FAILURES,
    MIDDLE,
    NAMES,
    SENDING,
    Failure,
    cuts,
    requirements,
    table,
)
from tests.shim.fakes import RENDERER, ScriptedEngine, Threaded, sampled
from trajkit_shim.errors import EngineError

pytestmark = pytest.mark.anyio

CALL = '<tool_call>\n{"name": "f", "arguments": {"n":  1.50e1}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "f", "arguments": {"n": \n</tool_call>'
ROOT = Path(__file__).parent.parent.parent

EACH = pytest.mark.parametrize("name", NAMES)
BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])

# what is sampled in a case, and the text, the reasoning and the number of calls it holds
SAMPLED = {
    "text": (" hello\n", " hello\n", None, 0),
    "reasoning, then text": ("<think>\nhm\n</think>\n\nhello", "hello", "hm", 0),
    "text and two calls": (f"Look. {CALL}\n{CALL}", "Look. ", None, 2),
    "text after a call": (f"Look. {CALL}and wait", "Look. and wait", None, 1),
    "a call that does not parse": (BROKEN, BROKEN, None, 0),
    "cut by the token limit": (sampled("hel", finish_reason="length"), "hel", None, 0),
    "a call, then cut": (sampled(CALL + "an", finish_reason="length"), "an", None, 1),
    "a stop string of the client": ("one END two", "one ", None, 0),
    "after a tool that failed": ("I see.", "I see.", None, 0),
    "a call that was required": (CALL, "", None, 1),
}


def arguments(given):
    return json.loads(given) if isinstance(given, str) else given


@EACH
@BOTH
@pytest.mark.parametrize("case", ENDS)
async def test_a_call_that_is_answered(tmp_path, name, stream, case):
    word = dict(zip(NAMES, ENDS[case], strict=True))[name]
    if word is None:
        # the protocol has no such case
        return
    driver = DRIVERS[name]
    reply, text, reasoning, calls = SAMPLED[case]
    failed = case == "after a tool that failed"
    engine = ScriptedEngine(*[CALL] * failed, reply)
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = driver.client(gateway, await gateway.open_key())
        said = driver.user("hi")
        if failed:
            first = await driver.ask(client, said, stream=stream)
            said += first.echo + driver.failed(first, "no such file")
        stop = ["END"] if "stop string" in case else None
        more = driver.asks(case) if "required" in case else {}
        answer = await driver.ask(client, said, stream=stream, stop=stop, **more)
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
    broken = case == "a call that does not parse"
    assert (turn["use_tool"], turn["ill_formed"]) == (calls > 0, broken)
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
        # "first" has six tokens
        session = await gateway.open_key(**{limit: 6 if "tokens" in limit else 1})
        said = driver.user("hi")
        before = 0
        if case == "an unknown session":
            session = "other"
        elif case == "a closed session":
            await gateway.http.delete(gateway.path_of(session))
        elif case == "an image":
            said = driver.image()
        elif case == "a body that is too long":
            said = driver.user("x" * 4000)
        elif case == "a pause that does not end":
            await gateway.http.post("/engine/pause", json={"mode": "wait"})
        elif case in {"no turn left", "no token left"}:
            engine.script.append("first")
            await driver.ask(driver.client(gateway, session), said, stream=stream)
            before = 1
        temperature = 9.0 if case == "a parameter out of range" else None
        more = (
            driver.asks(case) if case == "a required tool that is not offered" else {}
        )
        with pytest.raises(Failure) as caught:
            await driver.ask(
                driver.client(gateway, session),
                said,
                stream=stream,
                temperature=temperature,
                **more,
            )
        recorded = [turn["trainable"] for turn in gateway.turns()[before:]]
    failure = caught.value
    word = dict(zip(NAMES, words, strict=True))[name]
    assert (failure.status, failure.word) == (status, word)
    assert failure.message
    if case == "a prompt that is too long":
        # the words that make clients compact
        words = {"anthropic": "prompt is too long: ", "gemini": "exceeds the maximum"}
        assert words.get(name, "maximum context") in failure.message
    # the one call that the engine began is context only
    assert recorded == ([False] if case == "the engine cuts the call short" else [])


async def until(event):
    assert await asyncio.to_thread(event.wait, 60)


async def cut(gateway, session, what, stalled):
    """What cuts the session's call off, its client apart."""
    if what == "a pause that aborts":
        await gateway.admin.post("/engine/pause", json={"mode": "abort"})
        await gateway.admin.post("/engine/resume")
    elif what == "the gateway is drained":
        await gateway.admin.post("/admin/drain", json={"wait_seconds": 0})
    elif what == "the engine fails":
        stalled.reply = EngineError("out of memory")
        stalled.release.set()
    elif what == "the engine cuts the call short":
        stalled.release.set()
    else:
        how = {"its session is finished": "finish", "its session is dropped": "drop"}
        await gateway.admin.post(f"{gateway.path_of(session)}/{how[what]}")


@EACH
@pytest.mark.parametrize(
    ("what", "when", "stream"),
    [
        (what, when, stream)
        for what, when in CUTS
        for stream in (False, True)
        if stream or when != MIDDLE
    ],
)
async def test_a_call_that_is_cut_off(tmp_path, name, what, when, stream):
    recorded, words = CUTS[what, when]
    driver, stalled, heard = DRIVERS[name], Threaded("hello"), asyncio.Event()
    if what == "the engine cuts the call short":
        stalled.reply = sampled("hello", finish_reason="abort")
    if when == SENDING:
        engine = ScriptedEngine("first", "x" * 600_000, context=10**6)
    else:
        engine = ScriptedEngine("first", stalled, "hello")
    answer, failure = None, None
    options = {"max_new_tokens": 10**6, "ping_seconds": 0.01 if when == MIDDLE else 60}
    async with on_socket(engine, RENDERER, tmp_path, **options) as gateway:
        session = await gateway.open_key()
        client = driver.client(gateway, session)
        # a turn that was answered before
        await driver.ask(client, driver.user("hi"), stream=stream)

        async def leave():
            asyncio.current_task().cancel()

        async def hear():
            heard.set()

        gateway.at_head = {SENDING: leave, MIDDLE: hear}.get(when)
        call = asyncio.create_task(
            driver.ask(client, driver.user("and?"), stream=stream)
        )
        if when == MIDDLE:
            await heard.wait()
        if when != SENDING:
            await until(stalled.entered)
        if words is None:
            if when != SENDING:
                call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        else:
            await cut(gateway, session, what, stalled)
            try:
                answer = await call
            except Failure as error:
                failure = error
        if when != SENDING and "engine" not in what:
            await until(stalled.cancelled)
    log = tk.read_turns(tmp_path)
    first, *rest = log["trainable"].to_pylist()
    assert first == (what != "its session is dropped")
    assert rest == {"nothing": [], "context only": [False]}.get(recorded, [True])
    if words is None:
        return
    word = dict(zip(NAMES, words, strict=True))[name]
    if answer is not None:
        assert (answer.end, answer.text) == (word, "hello")
    else:
        assert failure.word == word
        assert failure.message
        assert when == MIDDLE or failure.status == 410


@pytest.mark.parametrize(
    "shown", [table(), cuts(), requirements()], ids=["cases", "cuts", "required"]
)
def test_the_documented_table_is_the_one_that_is_tested(shown):
    assert shown in (ROOT / "docs/serving.md").read_text("utf-8")
