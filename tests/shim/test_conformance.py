"""Every protocol in every case, streamed and not, read by the official clients."""

import asyncio
import json
from pathlib import Path

import pytest

import trajkit as tk
from tests.shim.clients import NAMES, OnSocket
from tests.shim.conformance import (
    ASKED,
    CUTS,
    DRIVERS,
    ENDS,
    FAILURES,
    MIDDLE,
    SENDING,
    Failure,
    each_of,
    tables,
)
from tests.shim.fakes import ScriptedEngine, Threaded, sampled, sampled_call, text_of
from trajkit_shim.errors import EngineError

pytestmark = pytest.mark.anyio

CALL = sampled_call("f", '{"n":  1.50e1}')
BROKEN = sampled_call("f", '{"n": ').replace(" }", " ")
ROOT = Path(__file__).parent.parent.parent

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


def asked(case, name):
    return dict(zip(NAMES, ASKED.get(case, [{}] * 4), strict=True))[name]


def arguments(given):
    return json.loads(given) if isinstance(given, str) else given


@BOTH
@each_of(ENDS)
async def test_a_call_that_is_answered(start, name, stream, case, cell):
    driver, (reply, text, reasoning, calls) = DRIVERS[name], SAMPLED[case]
    failed = case == "after a tool that failed"
    gateway = await start(*[CALL] * failed, reply, "more")
    client, sent = driver.client(await gateway.open()), driver.user("hi")
    if failed:
        first = await driver.ask(client, sent, stream=stream)
        sent += first.echo + driver.failed(first, "no such file")
    answer = await driver.ask(client, sent, stream=stream, **asked(case, name))
    turn = gateway.turns()[-1]
    # and the conversation goes on from there
    sent += answer.echo + driver.user("and?")
    await driver.ask(client, sent, stream=stream)
    assert gateway.turns()[-1]["messages"][-2]["key"] == turn["response"]["key"]
    assert answer.end == cell
    assert (answer.text, answer.reasoning) == (text, reasoning)
    assert [(n, arguments(a)) for n, a in answer.calls] == [("f", {"n": 15})] * calls
    assert len(set(answer.ids)) == calls
    assert answer.tokens == (len(turn["prompt_ids"]), len(turn["output_ids"]))
    assert turn["protocol"] == name
    broken = case == "a call that does not parse"
    assert (turn["use_tool"], turn["ill_formed"]) == (calls > 0, broken)
    if failed:
        assert turn["messages"][-1]["role"] == "tool"
        assert "no such file" in text_of(gateway.engine.prompts[1])


FAILING = {
    "refused by the engine": EngineError("bad regex", 400),
    "the engine fails": EngineError("out of memory"),
    "the engine cuts the call short": sampled("half", finish_reason="abort"),
    "a fault of the gateway": RuntimeError("bug"),
}
# by a reply of six tokens
USED_UP = {"no turn left": {"max_turns": 1}, "no token left": {"max_output_tokens": 6}}


@BOTH
@each_of({case: words for case, (_, words) in FAILURES.items()})
async def test_a_call_that_fails(start, name, stream, case, cell):
    driver = DRIVERS[name]
    context = 20 if case == "a prompt that is too long" else 2000
    engine = ScriptedEngine(FAILING.get(case, "first"), context=context)
    gateway = await start(engine=engine, max_body_bytes=4000)
    session = await gateway.open(**USED_UP.get(case, {}))
    sent = driver.user("x" * 4000 if case == "a body that is too long" else "hi")
    if case == "an unknown session":
        session.key = "other"
    elif case == "a closed session":
        await session.end()
    elif case == "an image":
        sent = driver.image()
    elif case in USED_UP:
        await driver.ask(driver.client(session), sent, stream=stream)
    before = len(gateway.turns())
    call = driver.ask(driver.client(session), sent, stream=stream, **asked(case, name))
    with pytest.raises(Failure) as caught:
        await call
    recorded = [turn["trainable"] for turn in gateway.turns()[before:]]
    failure = caught.value
    assert (failure.status, failure.word) == (FAILURES[case][0], cell)
    assert failure.message
    if case == "a prompt that is too long":
        # the words that make clients compact
        words = {"anthropic": "prompt is too long: ", "gemini": "exceeds the maximum"}
        assert words.get(name, "maximum context") in failure.message
    # the words that make Claude Code go on without it
    assert (case == "an image") == ("could not process " in failure.message)
    # the one call that the engine began is context only
    assert recorded == ([False] if case == "the engine cuts the call short" else [])


# how a trainer ends a session
ENDING = {"its session is finished": "finish", "its session is dropped": "drop"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("what", "when", "stream"),
    [
        (what, when, stream)
        for what, when in CUTS
        for stream in (False, True)
        if stream or when != MIDDLE
    ],
)
async def test_a_call_that_is_cut_off(tmp_path, start, name, what, when, stream):
    recorded, words = CUTS[what, when]
    driver, heard, sending = DRIVERS[name], asyncio.Event(), when == SENDING
    stalled = Threaded(FAILING.get(what, "hello"))
    script = ["x" * 600_000] if sending else [stalled, "hello"]
    engine = ScriptedEngine("first", *script, context=10**6 if sending else 2000)
    options = {"max_new_tokens": 10**6, "ping_seconds": 0.01 if when == MIDDLE else 60}
    gateway = await start(engine=engine, place=OnSocket, **options)
    session = await gateway.open()
    client = driver.client(session)
    # a turn that was answered before
    await driver.ask(client, driver.user("hi"), stream=stream)

    async def leave():
        asyncio.current_task().cancel()

    async def hear():
        heard.set()

    gateway.at_head = {SENDING: leave, MIDDLE: hear}.get(when)
    asking = driver.ask(client, driver.user("and?"), stream=stream)
    call = asyncio.create_task(asking)
    if when == MIDDLE:
        await heard.wait()
    if not sending:
        assert await asyncio.to_thread(stalled.entered.wait, 60)
    if what in ENDING:
        await gateway.admin.post(f"{session.path}/{ENDING[what]}", json={})
    elif words is not None:
        stalled.release.set()
    elif not sending:
        call.cancel()
    with pytest.raises(asyncio.CancelledError if words is None else Failure) as caught:
        await call
    if not sending and "engine" not in what:
        assert await asyncio.to_thread(stalled.cancelled.wait, 60)
    await gateway.aclose()
    first, *rest = tk.read_turns(tmp_path)["trainable"].to_pylist()
    assert first == (what != "its session is dropped")
    assert rest == [False] * (recorded == "context only")
    if words is not None:
        failure = caught.value
        assert failure.word == dict(zip(NAMES, words, strict=True))[name]
        assert failure.message
        assert when == MIDDLE or failure.status == 410


@pytest.mark.parametrize("name", tables())
def test_the_documented_table_is_the_one_that_is_tested(name):
    assert tables()[name] in (ROOT / "docs/serving.md").read_text("utf-8")
