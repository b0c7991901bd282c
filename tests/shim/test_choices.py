"""Several replies to one request, and the logprobs of replies."""

import asyncio
import threading

import numpy as np
import openai
import pytest
from google.genai import types

import trajkit as tk
from tests.shim.clients import in_process
from tests.shim.conformance import DRIVERS
from tests.shim.fakes import RENDERER, Held, ScriptedEngine, sampled
from trajkit_shim import call
from trajkit_shim.errors import EngineError
from trajkit_shim.prompting import prompts
from trajkit_shim.prompting.prompts import Prompts

pytestmark = pytest.mark.anyio

BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
CALL = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'
USER = {"role": "user", "content": "hi"}


async def chat(client, *, stream, **fields):
    """The choices of a reply and its usage."""
    asked = {"model": "m", "messages": [USER], **fields}
    if not stream:
        reply = await client.chat.completions.create(**asked)
        return reply.choices, reply.usage
    state = openai.lib.streaming.chat.ChatCompletionStreamState()
    options = {"stream_options": {"include_usage": True}}
    chunks = await client.chat.completions.create(stream=True, **asked, **options)
    ids = set()
    async for chunk in chunks:
        ids.add(chunk.id)
        state.handle_chunk(chunk)
    assert len(ids) == 1
    whole = state.current_completion_snapshot
    return whole.choices, whole.usage


@BOTH
async def test_choices_are_turns_of_one_prompt(tmp_path, stream):
    engine = ScriptedEngine("one", "three", CALL)
    tool = {"type": "function", "function": {"name": "f"}}
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = await gateway.open(sampling={"seed": 5})
        choices, usage = await chat(client, stream=stream, n=3, tools=[tool])
        turns = gateway.turns()
        # the conversation goes on from one of them
        engine.script.append("more")
        messages = [USER, choices[1].message.model_dump(exclude_none=True), USER]
        await chat(client, stream=False, messages=messages, tools=[tool])
        last = gateway.turns()[-1]
        session = await gateway.session(client)
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert [c.message.content or "" for c in choices] == ["one", "three", ""]
    assert [c.finish_reason for c in choices] == ["stop", "stop", "tool_calls"]
    assert [turn["choice"] for turn in turns] == [0, 1, 2]
    assert [turn["turn_index"] for turn in turns] == [0, 1, 2]
    assert [RENDERER.decode(t["output_ids"], ended=True) for t in _arrays(turns)] == [
        "one",
        "three",
        CALL,
    ]
    assert len({tuple(turn["prompt_ids"]) for turn in turns}) == 1
    assert len({turn["request_id"] for turn in turns}) == 3
    assert {turn["resend_of"] for turn in turns} == {None}
    # equal seeds would give equal replies
    assert [sampling.seed for sampling in engine.samplings] == [5, 6, 7, 5]
    outputs = sum(len(turn["output_ids"]) for turn in turns)
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        len(turns[0]["prompt_ids"]),
        outputs,
    )
    assert last["choice"] is None
    assert last["prompt_built"] == "append"
    assert (session["turns"], session["answered"]) == (4, 4)
    rows = tk.linearize(tk.read_turns(tmp_path), policy="faithful", reward=1.0)
    assert sum(map(sum, rows["loss_mask"].to_pylist())) == outputs + len(
        last["output_ids"]
    )


async def test_only_a_few_new_messages_are_rendered_on_the_event_loop(
    tmp_path, monkeypatch
):
    on_loop, text = [], RENDERER.text

    def watched(*args, **options):
        on_loop.append(threading.current_thread() is threading.main_thread())
        return text(*args, **options)

    for module in (call, prompts):
        monkeypatch.setattr(module, "SHORT_TAIL", 400)
    engine = ScriptedEngine("one", "two", "three", "four")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client, messages = await gateway.open(), [{"role": "user", "content": "u" * 99}]
        monkeypatch.setattr(RENDERER, "text", watched)
        rendered = []
        for said in ("hi", "x" * 400, "bye", "end"):
            on_loop.clear()
            reply = (await chat(client, stream=False, messages=messages))[0][0].message
            rendered.append({*on_loop})
            messages += [{"role": "assistant", "content": reply.content}]
            messages += [{"role": "user", "content": said}]
    # the opening, a short message, a long one, and a comparison with the complete text
    assert rendered == [{False}, {True}, {False}, {False}]


async def test_a_rendered_prompt_is_attributed_once_and_off_the_event_loop(
    tmp_path, monkeypatch
):
    threads, attribute = [], Prompts._attribute

    def watched(prompts, *args):
        threads.append(threading.current_thread())
        return attribute(prompts, *args)

    monkeypatch.setattr(Prompts, "_attribute", watched)
    engine = ScriptedEngine("one", "two", "three")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        await chat(await gateway.open(), stream=False, n=3)
        turns = gateway.turns()
    (thread,) = threads
    assert thread is not threading.current_thread()
    first, *others = [turn["prompt_message_index"] for turn in turns]
    assert 0 in first
    assert others == [first, first]


async def test_the_seed_after_the_largest_one_is_the_smallest(tmp_path):
    engine = ScriptedEngine("one", "two", "three")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = await gateway.open()
        await chat(client, stream=False, n=3, seed=2**63 - 2)
    seeds = [sampling.seed for sampling in engine.samplings]
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63)]


def _arrays(turns):
    return [{**turn, "output_ids": np.array(turn["output_ids"])} for turn in turns]


@BOTH
async def test_candidates_of_gemini(tmp_path, stream):
    engine = ScriptedEngine("one", "two")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        models = gateway.gemini(await gateway.open_key()).aio.models
        config = types.GenerateContentConfig(candidate_count=2)
        asked = {"model": "m", "contents": "hi", "config": config}
        found = {}
        if stream:
            async for part in await models.generate_content_stream(**asked):
                for one in part.candidates:
                    text = one.content.parts[0].text
                    found[one.index] = found.get(one.index, "") + text
                ends, usage = one.finish_reason, part.usage_metadata
        else:
            reply = await models.generate_content(**asked)
            found = {one.index: one.content.parts[0].text for one in reply.candidates}
            ends = reply.candidates[1].finish_reason
            usage = reply.usage_metadata
        assert [turn["choice"] for turn in gateway.turns()] == [0, 1]
    assert {index or 0: text for index, text in found.items()} == {0: "one", 1: "two"}
    assert ends.name == "STOP"
    # of all candidates
    assert usage.candidates_token_count == len("one") + len("two") + 2


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        pytest.param({"max_turns": 1}, "max_turns_exceeded", id="turns"),
        pytest.param(
            {"max_prompt_tokens": 40}, "max_prompt_tokens_exceeded", id="prompt"
        ),
        pytest.param(
            {"max_output_tokens": 1}, "max_output_tokens_exceeded", id="output"
        ),
    ],
)
async def test_every_choice_counts(tmp_path, limits, code):
    engine = ScriptedEngine()
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = await gateway.open(**limits)
        with pytest.raises(openai.PermissionDeniedError) as caught:
            await chat(client, stream=False, n=2)
        assert gateway.turns() == []
        # one reply is within the limits
        engine.script.append(sampled("a", finish_reason="length"))
        await chat(client, stream=False)
    assert caught.value.code == code


async def test_choices_share_the_tokens_that_are_left(tmp_path):
    engine = ScriptedEngine("a", "b", "c")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = await gateway.open(max_output_tokens=11)
        await chat(client, stream=False, n=3)
        session = await gateway.session(client)
    assert {sampling.max_new_tokens for sampling in engine.samplings} == {3}
    assert session["prompt_tokens"] == 3 * len(engine.prompts[0])


async def test_a_reservation_counts_every_choice(tmp_path):
    held = Held("a")
    async with in_process(ScriptedEngine(held, "b"), RENDERER, tmp_path) as gateway:
        client = await gateway.open(max_turns=2)
        first = asyncio.create_task(chat(client, stream=False, n=2))
        await held.entered.wait()
        with pytest.raises(openai.PermissionDeniedError):
            await chat(client, stream=False)
        held.release.set()
        await first


async def test_a_failed_choice_fails_the_request(tmp_path):
    held = Held("never")
    engine = ScriptedEngine(held, EngineError("out of memory"))
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = await gateway.open()
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            await chat(client, stream=False, n=2)
        assert gateway.turns() == []
    assert held.cancelled


async def test_an_aborted_choice_makes_the_others_context(tmp_path):
    engine = ScriptedEngine("a", sampled("b", finish_reason="abort"), "c")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = await gateway.open()
        with pytest.raises(
            openai.InternalServerError,
            match="broke off the call after 1 tokens, with abort",
        ):
            await chat(client, stream=False, n=3)
        session = await gateway.session(client)
    assert session["undelivered"] == 2
    turns = tk.read_turns(tmp_path)
    assert turns["finish_reason"].to_pylist() == ["stop", "abort", "stop"]
    assert turns["trainable"].to_pylist() == [False] * 3


@BOTH
@pytest.mark.parametrize("name", ["openai_chat", "openai_responses", "gemini"])
async def test_logprobs_are_the_recorded_ones(tmp_path, name, stream):
    engine = ScriptedEngine("<think>\nhm</think>h\u00e9y", "h\u00e9y")
    driver = DRIVERS[name]
    fields = {
        "openai_chat": {"logprobs": True},
        "openai_responses": {"include": ["message.output_text.logprobs"]},
        "gemini": {"response_logprobs": True},
    }[name]
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = driver.client(gateway, await gateway.open_key())
        answer = await driver.ask(client, driver.user("hi"), stream=stream, **fields)
        (turn,) = gateway.turns()
    assert answer.text == "h\u00e9y"
    # reasoning that ends in no token of its own is not told apart
    found = answer.logprobs[-4:]
    assert [text for text, _ in found] == ["h", "", "\u00e9", "y"]
    wanted = turn["output_logprobs"][:-1][-4:]
    assert [logprob for _, logprob in found] == pytest.approx(wanted)
    assert "".join(text for text, _ in answer.logprobs) == RENDERER.decode(
        _arrays([turn])[0]["output_ids"], ended=True
    )


async def test_logprobs_end_before_the_stop_string(tmp_path):
    async with in_process(ScriptedEngine("abcd"), RENDERER, tmp_path) as gateway:
        client = await gateway.open()
        choices, _ = await chat(client, stream=False, logprobs=True, stop=["cd"])
        (turn,) = gateway.turns()
    assert choices[0].message.content == "ab"
    assert [token.token for token in choices[0].logprobs.content] == ["a", "b"]
    logprobs = [token.logprob for token in choices[0].logprobs.content]
    assert logprobs == pytest.approx(turn["output_logprobs"][:2])


async def test_no_logprobs_by_default(tmp_path):
    async with in_process(ScriptedEngine("a"), RENDERER, tmp_path) as gateway:
        choices, _ = await chat(await gateway.open(), stream=False)
    assert choices[0].logprobs is None


async def test_an_engine_without_logprobs(tmp_path):
    engine = ScriptedEngine(sampled("a", output_logprobs=None))
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        with pytest.raises(openai.BadRequestError, match="no logprobs"):
            await chat(await gateway.open(), stream=False, logprobs=True)
        assert gateway.turns() == []
