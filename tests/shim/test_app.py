"""The gateway in process: what a call asks the engine, answers and logs."""

import asyncio
import json
import threading

import pytest

import trajkit as tk
from tests.shim.clients import PATHS, USER
from tests.shim.fakes import (
    AS_STRING,
    RENDERER,
    TOOL,
    Held,
    byte_renderer,
    cases,
    sampled,
    sampled_call,
    text_of,
    tool,
)
from trajkit_shim.call import Call
from trajkit_shim.errors import EngineError
from trajkit_shim.sessions import sessions

pytestmark = pytest.mark.anyio

CALL = sampled_call()
CHUNKED = {"transfer-encoding": "chunked", "content-length": "1"}


async def test_a_reply_of_text(start):
    gateway = await start("one\ntwo")
    session = await gateway.open(client_sampling=["temperature"])
    engine = gateway.engine
    asked = {"temperature": 0.5, "max_tokens": 50, "seed": 1, "stop": ["two", "\n"]}
    reply = (await session.post(**asked)).json()
    (turn,) = gateway.turns()
    assert reply["model"] == "scripted"
    (choice,) = reply["choices"]
    assert choice["message"].get("tool_calls") is None
    assert (turn["session_id"], turn["turn_index"]) == (session.id, 0)
    assert turn["prompt_ids"] == engine.prompts[0].tolist()
    # a stop string is sampled and not shown
    assert text_of(turn["output_ids"]) == "one\ntwo<|im_end|>"
    assert turn["output_logprobs"] == pytest.approx([-k / 1000 for k in range(8)])
    assert (turn["finish_reason"], turn["trainable"]) == ("stop", True)
    assert turn["weight_versions"] == [{"version": "v0", "start": 0, "stop": 8}]
    body = {"role": "assistant", "content": "one"}
    assert json.loads(turn["response"]["body"]) == body
    assert choice["message"]["content"] == "one"
    assert json.loads(turn["sampling"])["temperature"] == 0.5
    assert turn["started_at"] <= turn["ended_at"]
    (sampling,) = engine.samplings
    assert (sampling.max_new_tokens, sampling.seed) == (50, 1)
    assert sampling.stop_token_ids == RENDERER.end_ids


async def test_pins_win_over_wishes(start):
    gateway = await start("a", "b", "c", max_new_tokens=10)
    pins = {"temperature": 1.0, "max_tokens": 20, "extra": {"regex": "a|b"}}
    session = await gateway.open(sampling=pins)
    await session.ask(temperature=0.1, top_p=0.5, max_tokens=15, seed=3)
    await session.ask(temperature=1.0, max_tokens=1000)
    other = await gateway.open(sampling={"seed": 5, "stop": ["z"]})
    await other.ask(seed=3, stop=["y"])
    first, second, third = gateway.engine.samplings
    assert (third.seed, third.stop, third.max_new_tokens) == (5, ("z",), 10)
    # what shapes the distribution is not the client's, pinned or not
    assert (first.temperature, first.top_p, first.max_new_tokens) == (1.0, None, 20)
    assert first.seed is None
    assert (second.max_new_tokens, second.extra) == (20, {"regex": "a|b"})
    overruled = {"temperature": 1, "top_p": 1, "seed": 1, "max_tokens": 1}
    assert (await session.shown())["sampling_overruled"] == overruled


@pytest.mark.parametrize("reason", ["abort", None])
async def test_an_incomplete_reply_is_context_only(start, reason):
    """`test_servers` has the reasons of such replies."""
    gateway = await start(sampled("half", finish_reason=reason), CALL)
    session = await gateway.open(max_turns=1)
    message = (await session.error(503))["message"]
    assert f"broke off the call after 4 tokens, with {reason or 'no reason'}" in message
    # what looks like a call is text where no tool was offered
    assert (await session.ask())["content"] == CALL
    log = gateway.table()
    aborted, retried = log.to_pylist()
    assert (aborted["trainable"], aborted["response"]) == (False, None)
    assert (aborted["finish_reason"], aborted["turn_index"]) == (reason, 0)
    assert (retried["trainable"], retried["turn_index"]) == (True, 1)
    assert (retried["use_tool"], retried["ill_formed"]) == (False, False)
    tk.validate(log)
    # nothing of it is gone on from
    assert (await session.shown())["prompts"] == {"opening": 2}


async def test_max_turns_counts_answered_calls(start):
    held = Held("a")
    gateway = await start(EngineError("no", 400), held, "b", "c")
    session = await gateway.open(max_turns=2)
    await session.error(400)
    running = await held.holds(session.ask())
    # neither the failed nor the running call has an answer yet
    await session.ask()
    await session.ask()
    assert "2 turns" in (await session.error(403))["message"]
    held.release.set()
    # calls at the same time may exceed the limit
    await running
    assert (await session.shown())["answered"] == 3


@pytest.mark.parametrize(
    ("param", "value"),
    [
        *(("session_id", name) for name in ("", "a b", "a/b", "..", "a" * 201, 3)),
        *(("max_turns", 0), ("max_output_tokens", 0), ("max_prompt_tokens", 1.5)),
        *(("max_context_tokens", "1"), ("metadata", []), ("replay", 1)),
        *(("sampling.n", 2), ("sampling.top_p", 3), ("sampling.extra", {"n": 2})),
        *(("client_sampling", ["n"]), ("client_sampling", True), ("ttl_seconds", -1)),
        *(("reward", "1"), ("reward", 10**400), ("group_id", 1), ("model", "x")),
    ],
)
async def test_sessions_that_are_refused(start, param, value):
    name, _, inner = param.partition(".")
    gateway = await start()
    body = {name: {inner: value} if inner else value}
    answer = await gateway.post("/sessions", 400, **body)
    inside = {"['n']": "[0]", "{'n': 2}": ".n"}.get(str(value), "")
    assert answer["error"]["param"] == param + inside


async def test_paths_that_nothing_answers(start):
    gateway = await start()
    for method, path, status in (
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/messages", 405),
        ("POST", "/v1/messages/batches", 404),
        ("POST", "/s/a/v1beta/models/x:embedContent", 404),
        ("POST", "/v1/responses/r/cancel", 404),
        ("POST", "/nothing", 404),
    ):
        reply = await gateway.http.request(method, path)
        words = {"error", *(["type"] if "messages" in path else [])}
        assert (reply.status_code, {*reply.json()}) == (status, words)
        assert ("status" in reply.json()["error"]) == ("v1beta" in path)
    assert (await gateway.http.get("/v1/models/a/b")).json()["id"] == "scripted"


async def test_calls_get_ids_that_the_template_takes(start):
    """Mistral's want nine letters and digits."""
    wants = "{% for call in message.tool_calls or [] if call.id | length != 9 %}"
    wants += "{{ raise_exception('ids') }}{% endfor %}{{ message.content }}"
    template = AS_STRING.replace("{{ message.content }}", wants)
    renderer = byte_renderer(template)
    assert (renderer.short_call_ids, RENDERER.short_call_ids) == (True, False)
    gateway = await start(CALL, "ok", renderer=renderer)
    session, tools = await gateway.open(), {"tools": [TOOL]}
    message = await session.ask(**tools)
    (call,) = message["tool_calls"]
    await session.ask(USER, message, tool(call["id"]), **tools)
    assert gateway.turns()[1]["render_reason"] is None


async def test_reasoning_that_the_prompt_opens(start):
    opening = "<|im_start|>assistant\n{% endif"
    template = AS_STRING.replace(opening, opening.replace("{%", "<think>\n{%"))
    cut = sampled("h", finish_reason="length")
    script, renderer = ("hm\n</think>\n\nhello", cut), byte_renderer(template)
    gateway = await start(*script, renderer=renderer)
    session = await gateway.open()
    reply, cut = [(await session.post()).json() for _ in script]
    turn, _ = gateway.turns()
    assert text_of(gateway.engine.prompts[0]).endswith("<think>\n")
    message = reply["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("hello", "hm")
    assert json.loads(turn["response"]["body"])["reasoning_content"] == "hm"
    # no token of this tokenizer ends reasoning, so only a whole reply can be counted
    assert reply["usage"].get("completion_tokens_details") is None
    assert cut["choices"][0]["message"]["content"] == ""
    assert cut["usage"]["completion_tokens_details"]["reasoning_tokens"] == 1


@cases(
    "most, length, head, status, code",
    {
        "requests": (1, 1, {}, 429, "too_many_requests"),
        "bytes": (9, 800, {}, 503, "busy"),
        # of which the length that is stated says nothing
        "bytes in chunks": (9, 1, CHUNKED, 503, "busy"),
    },
)
async def test_a_session_that_asks_too_much_leaves_room(
    start, monkeypatch, most, length, head, status, code
):
    monkeypatch.setattr(sessions, "MAX_REQUESTS", most)
    limits, held = {"max_body_bytes": 1000, "max_work_bytes": 2500}, Held("a")
    gateway = await start(held, "b", "c", **limits)
    session, other = await gateway.open(), await gateway.open()
    asked = {"messages": [{**USER, "content": "x" * length}], "headers": head}
    first = await held.holds(session.post(**asked))
    refused = await session.post(status=status, **asked)
    assert refused.json()["error"]["code"] == code
    assert refused.headers["x-should-retry"] == "true"
    await other.post(**asked)
    held.release.set()
    await first
    await session.post(**asked)


async def test_calls_and_counts_of_a_session_wait_for_each_other(start, monkeypatch):
    monkeypatch.setattr(sessions, "MAX_SAMPLED", 1)
    held, go_on, make = Held("a"), threading.Event(), Call._make_prompt

    def slow(call, *given, **how):
        is_slow = call._verb == "count" and call._session.session_id == "slow"
        assert not is_slow or go_on.wait(60)
        return make(call, *given, **how)

    monkeypatch.setattr(Call, "_make_prompt", slow)
    gateway = await start(held, "b", "c")
    session, other = await gateway.open(session_id="slow"), await gateway.open()
    count = {"name": "anthropic", "path": f"{PATHS['anthropic']}/count_tokens"}
    first = await held.holds(session.ask())
    asked = [session.ask(), *(session.post(**count) for _ in range(3))]
    waiting, n_asked = [*map(asyncio.create_task, asked)], None
    while n_asked != (2, 3):
        shown = await session.shown()
        n_asked = shown["in_flight"], shown["token_counts"]
        await asyncio.sleep(0)
    assert (await other.ask())["content"] == "b"
    await other.post(**count)
    go_on.set()
    held.release.set()
    replies = await asyncio.gather(first, *waiting)
    assert [reply["content"] for reply in replies[:2]] == ["a", "c"]
