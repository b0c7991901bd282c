"""The gateway in process, driven by the real openai client."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

import trajkit as tk
from tests.made_tables import linearized
from tests.shim.clients import FREE, in_process, read_log
from tests.shim.fakes import (
    AS_STRING,
    RENDERER,
    Held,
    ScriptedEngine,
    byte_renderer,
    sampled,
)
from trajkit_shim.errors import EngineError

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "hi"}
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command":  "ls"}}\n</tool_call>'


def spelled(ids) -> str:
    return RENDERER.decode(np.array(ids, np.int32), ended=False)


async def ask(client, messages=(USER,), **fields):
    return await client.chat.completions.create(
        model="any", messages=list(messages), **fields
    )


async def streamed(client, messages=(USER,), **fields):
    """The completion of a streamed reply, put together by the client library."""
    state = ChatCompletionStreamState()
    async for chunk in await ask(client, messages, stream=True, **fields):
        state.handle_chunk(chunk)
    return state.get_final_completion()


async def test_a_reply_of_text(tmp_path):
    engine = ScriptedEngine("hello")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = await gateway.open(**FREE)
        reply = await ask(client, temperature=0.5, max_tokens=50, seed=1)
        (turn,) = gateway.turns()
    assert reply.model == "scripted"
    assert reply.choices[0].message.content == "hello"
    assert reply.choices[0].message.tool_calls is None
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.prompt_tokens == len(engine.prompts[0])
    assert reply.usage.completion_tokens == 6
    assert turn["session_id"] == gateway.ids[client.api_key]
    assert turn["turn_index"] == 0
    assert turn["prompt_ids"] == engine.prompts[0].tolist()
    assert spelled(turn["output_ids"]) == "hello<|im_end|>"
    assert turn["output_logprobs"] == pytest.approx([-k / 1000 for k in range(6)])
    assert turn["finish_reason"] == "stop"
    assert turn["trainable"] is True
    assert turn["weight_versions"] == [{"version": "v0", "start": 0, "stop": 6}]
    assert json.loads(turn["response"]["body"]) == {
        "role": "assistant",
        "content": "hello",
    }
    assert json.loads(turn["sampling"])["temperature"] == 0.5
    assert turn["started_at"] <= turn["ended_at"]
    sampling = engine.samplings[0]
    assert (sampling.max_new_tokens, sampling.seed) == (50, 1)
    assert sampling.stop_token_ids == RENDERER.end_ids


async def test_what_looks_like_a_call_is_text_where_no_tool_was_offered(tmp_path):
    async with in_process(ScriptedEngine(CALL), RENDERER, tmp_path) as gateway:
        reply = await ask(await gateway.open())
        (turn,) = gateway.turns()
    assert reply.choices[0].message.content == CALL
    assert (turn["use_tool"], turn["ill_formed"]) == (False, False)


async def test_a_stop_string_is_sampled_and_not_shown(tmp_path):
    sample = sampled("one\ntwo", finish_reason="stop")
    async with in_process(ScriptedEngine(sample), RENDERER, tmp_path) as gateway:
        reply = await ask(await gateway.open(), stop=["two", "\n"])
        (turn,) = gateway.turns()
    assert reply.choices[0].message.content == "one"
    assert spelled(turn["output_ids"]) == "one\ntwo<|im_end|>"


async def test_a_sample_without_logprobs_or_weight_versions(tmp_path):
    sample = sampled("x", output_logprobs=None, weight_versions=(), cached_tokens=None)
    async with in_process(ScriptedEngine(sample), RENDERER, tmp_path) as gateway:
        reply = await ask(await gateway.open())
        (turn,) = gateway.turns()
    assert reply.usage.prompt_tokens_details is None
    assert turn["output_logprobs"] is None
    assert turn["weight_versions"] is None
    assert turn["cached_tokens"] is None


async def test_pins_win_over_wishes(tmp_path):
    engine = ScriptedEngine("a", "b", "c")
    pins = {"temperature": 1.0, "max_tokens": 20, "extra": {"regex": "a|b"}}
    async with in_process(engine, RENDERER, tmp_path, max_new_tokens=30) as gateway:
        client = await gateway.open(sampling=pins)
        await ask(client, temperature=0.1, top_p=0.5, max_tokens=10, seed=3)
        await ask(client, temperature=1.0, max_tokens=1000)
        shown = await gateway.session(client)
        other = await gateway.open(sampling={"seed": 5, "stop": ["z"]})
        await ask(other, seed=3, stop=["y"])
    first, second, third = engine.samplings
    assert (third.seed, third.stop) == (5, ("z",))
    # what shapes the distribution is not the client's, pinned or not
    assert (first.temperature, first.top_p, first.max_new_tokens) == (1.0, None, 20)
    assert first.seed is None
    assert (second.max_new_tokens, second.extra) == (20, {"regex": "a|b"})
    overruled = {"temperature": 1, "top_p": 1, "seed": 1, "max_tokens": 1}
    assert shown["sampling_overruled"] == overruled


async def test_the_context_bounds_the_reply(tmp_path):
    engine = ScriptedEngine("a", context=40)
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        await ask(await gateway.open(), max_tokens=1000)
    assert engine.samplings[0].max_new_tokens == 40 - len(engine.prompts[0])


async def test_parallel_calls_of_one_session(tmp_path):
    slow, fast = Held("slow"), Held("fast")
    engine = ScriptedEngine(slow, fast)
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = await gateway.open()
        first = asyncio.create_task(ask(client))
        await slow.entered.wait()
        second = asyncio.create_task(ask(client))
        await fast.entered.wait()
        assert (await gateway.session(client))["in_flight"] == 2
        fast.release.set()
        await second
        slow.release.set()
        await first
        shown = await gateway.session(client)
        turns = gateway.turns()
    assert (shown["turns"], shown["in_flight"]) == (2, 0)
    assert [spelled(turn["output_ids"]) for turn in turns] == [
        "fast<|im_end|>",
        "slow<|im_end|>",
    ]
    assert [turn["turn_index"] for turn in turns] == [0, 1]
    assert [turn["messages"][0]["body"] is None for turn in turns] == [False, True]


@pytest.mark.parametrize(
    "reason", ["abort", "ABORT", "error", "repetition", "content_filter", None]
)
async def test_an_incomplete_reply_is_context_only(tmp_path, reason):
    sample = sampled("half", finish_reason=reason)
    async with in_process(ScriptedEngine(sample, "b"), RENDERER, tmp_path) as gateway:
        client = await gateway.open(max_turns=1)
        match = f"broke off the call after 4 tokens, with {reason or 'no reason'}"
        with pytest.raises(openai.InternalServerError, match=match) as caught:
            await ask(client)
        await ask(client)
        log = read_log(gateway.log.path)
    assert caught.value.status_code == 503
    aborted, retried = log.to_pylist()
    assert (aborted["trainable"], aborted["response"]) == (False, None)
    assert (aborted["finish_reason"], aborted["turn_index"]) == (reason, 0)
    assert (retried["trainable"], retried["turn_index"]) == (True, 1)
    tk.validate(log)
    rows, report = linearized(log, policy="slime", reward=1.0)
    assert [sum(mask) for mask in rows["loss_mask"].to_pylist() if any(mask)] == [2]
    assert report["lost_untrainable"].to_pylist() == [4]


def out_of_vocabulary():
    return replace(ScriptedEngine().limits, vocab_size=200)


async def test_a_prompt_outside_the_vocabulary(tmp_path):
    engine = ScriptedEngine("a")
    engine.limits = out_of_vocabulary()
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = await gateway.open()
        with pytest.raises(
            openai.BadRequestError, match=r"prompt_ids\[0\] = 256 is outside"
        ) as caught:
            await ask(client)
        assert gateway.turns() == []
    assert caught.value.code == "token_out_of_vocabulary"
    assert engine.prompts == []


async def test_a_log_that_cannot_be_written(tmp_path, monkeypatch):
    async with in_process(ScriptedEngine("a", "b"), RENDERER, tmp_path) as gateway:
        client = await gateway.open()
        with monkeypatch.context() as patch:

            def full(*_):
                raise OSError(28, "No space left on device")

            patch.setattr(gateway.log, "append", full)
            with pytest.raises(openai.InternalServerError, match="No space left"):
                await ask(client)
        assert (await gateway.session(client))["turns"] == 0
        await ask(client)
        assert len(gateway.turns()) == 1


async def test_unknown_and_closed_sessions(tmp_path):
    async with in_process(ScriptedEngine("a"), RENDERER, tmp_path) as gateway:
        client = await gateway.open(session_id="mine", metadata={"task": 3})
        # a session's name is no key
        for wrong in ("other", "mine"):
            with pytest.raises(openai.AuthenticationError) as caught:
                await ask(gateway.client(wrong))
            assert caught.value.code == "invalid_api_key"
        again = await gateway.http.post("/sessions", json={"session_id": "mine"})
        assert again.status_code == 409
        closed = await gateway.http.post("/sessions/mine/close")
        assert closed.json()["status"] == "closed"
        again = await gateway.http.post("/sessions", json={"session_id": "mine"})
        assert again.status_code == 409
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(client)
        assert client.api_key not in caught.value.message
        assert caught.value.status_code == 410
        assert (await gateway.session(client))["metadata"] == {"task": 3}
        assert (await gateway.http.get("/sessions/other")).status_code == 404
        assert gateway.turns() == []


async def test_max_turns_counts_answered_calls(tmp_path):
    held = Held("a")
    engine = ScriptedEngine(EngineError("no", 400), held, "b", "c")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = await gateway.open(max_turns=2)
        with pytest.raises(openai.BadRequestError):
            await ask(client)
        running = asyncio.create_task(ask(client))
        await held.entered.wait()
        # neither the failed nor the running call has an answer yet
        await ask(client)
        await ask(client)
        with pytest.raises(openai.PermissionDeniedError, match="2 turns") as caught:
            await ask(client)
        held.release.set()
        # calls at the same time may exceed the limit
        await running
        assert (await gateway.session(client))["answered"] == 3
    assert caught.value.code == "max_turns_exceeded"


@pytest.mark.parametrize(
    ("param", "value"),
    [
        *(("session_id", name) for name in ("", "a b", "a/b", "..", "a" * 201, 3)),
        *(("max_turns", 0), ("max_output_tokens", 0), ("max_prompt_tokens", 1.5)),
        *(("max_context_tokens", "1"), ("metadata", []), ("replay", 1)),
        *(("sampling.n", 2), ("sampling.top_p", 3), ("sampling.extra", 3)),
        *(("client_sampling", ["n"]), ("client_sampling", True), ("ttl_seconds", -1)),
        *(("reward", "1"), ("reward", 10**400), ("group_id", 1), ("model", "x")),
    ],
)
async def test_sessions_that_are_refused(tmp_path, param, value):
    name, _, inner = param.partition(".")
    body = {name: {inner: value} if inner else value}
    async with in_process(ScriptedEngine(), RENDERER, tmp_path) as gateway:
        reply = await gateway.http.post("/sessions", json=body)
    assert reply.status_code == 400
    place = f"{param}[0]" if value == ["n"] else param
    assert reply.json()["error"]["param"] == place


async def test_the_rest_of_the_api(tmp_path):
    async with in_process(ScriptedEngine("a"), RENDERER, tmp_path) as gateway:
        client = await gateway.open()
        await ask(client)
        models = await client.models.list()
        health = (await gateway.http.get("/healthz")).json()
        missing = await gateway.http.get("/v1/nothing")
        wrong = await gateway.http.get("/v1/chat/completions")
    assert [model.id for model in models.data] == ["scripted"]
    assert health["status"] == "ok"
    assert health["sessions"] == {
        "open": 1,
        "closed": 0,
        "forgotten": 0,
        "in_flight": 0,
        "turns": 1,
    }
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert "error" in missing.json()
    assert "error" in wrong.json()


async def test_reasoning_that_the_prompt_opens(tmp_path):
    opening = AS_STRING.replace(
        "<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif"
    )
    renderer = byte_renderer(opening)
    engine = ScriptedEngine(
        "hm\n</think>\n\nhello", sampled("h", finish_reason="length")
    )
    async with in_process(engine, renderer, tmp_path) as gateway:
        client = await gateway.open()
        reply, cut = await ask(client), await ask(client)
        turn, _ = gateway.turns()
    assert spelled(engine.prompts[0]).endswith("<think>\n")
    assert reply.choices[0].message.content == "hello"
    assert reply.choices[0].message.reasoning_content == "hm"
    assert json.loads(turn["response"]["body"])["reasoning_content"] == "hm"
    # no token of this tokenizer ends reasoning, so only a whole reply can be counted
    assert reply.usage.completion_tokens_details is None
    assert cut.choices[0].message.content == ""
    assert cut.usage.completion_tokens_details.reasoning_tokens == 1


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/v1/messages", 405, {"type", "error"}),
        ("POST", "/v1/messages/batches", 404, {"type", "error"}),
        ("POST", "/s/a/v1beta/models/x:embedContent", 404, {"error"}),
        ("POST", "/v1/responses/r/cancel", 404, {"error"}),
        ("GET", "/v1/models/x", 404, {"error"}),
        ("POST", "/nothing", 404, {"error"}),
    ],
)
async def test_paths_that_nothing_answers(tmp_path, method, path, status, words):
    async with in_process(ScriptedEngine(), RENDERER, tmp_path) as gateway:
        reply = await gateway.http.request(method, path)
    assert reply.status_code == status
    assert set(reply.json()) == words
    assert ("status" in reply.json()["error"]) == ("v1beta" in path)


async def test_too_many_calls_of_a_session_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("trajkit_shim.sessions.sessions.MAX_CALLS", 1)
    held = Held("a")
    async with in_process(ScriptedEngine(held, "b"), RENDERER, tmp_path) as gateway:
        client = await gateway.open()
        first = asyncio.create_task(ask(client))
        await held.entered.wait()
        with pytest.raises(openai.RateLimitError) as caught:
            await ask(client)
        held.release.set()
        await first
        await ask(client)
    assert caught.value.code == "too_many_calls"


async def test_too_many_bytes_at_once(tmp_path):
    held = Held("a")
    options = {"max_body_bytes": 1000, "max_work_bytes": 1100}
    async with in_process(
        ScriptedEngine(held, "b"), RENDERER, tmp_path, **options
    ) as gateway:
        client = await gateway.open()
        long = [{"role": "user", "content": "x" * 800}]
        first = asyncio.create_task(
            client.chat.completions.create(model="m", messages=long)
        )
        await held.entered.wait()
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="m", messages=long)
        held.release.set()
        await first
        await client.chat.completions.create(model="m", messages=long)
    assert (caught.value.status_code, caught.value.code) == (503, "busy")
