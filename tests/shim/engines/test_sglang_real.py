"""The gateway and the real SGLang server, which `.ci/sglang` makes possible."""

import asyncio
import json
import re
import subprocess
import sys
import uuid
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import openai
import pyarrow.compute as pc
import pytest

import trajkit as tk
from tests.shim.clients import in_process, read_log
from tests.shim.fakes import AS_STRING, TOOL, engine_request
from tests.shim.sglang_cpu import servers
from tests.shim.sglang_cpu.servers import served
from trajkit_shim.engines.model_config import vocab_size
from trajkit_shim.engines.sglang import SGLangEngine
from trajkit_shim.prompting.render import load_renderer
from trajkit_shim.replies.external_parsers import SGLangParser
from trajkit_shim.replies.parse import FormParser
from trajkit_shim.replies.parsers import FORMS

pytestmark = [pytest.mark.anyio, pytest.mark.sglang]

# a grammar makes a random model call tools, in a spelling of its own
CALLS = (
    r"Let me look\.\n<tool_call>\n"
    r'\{"name": "bash", "arguments": \{"command": "cat [a-c]\.txt"\}\}'
    r"\n</tool_call>"
)
USER = {"role": "user", "content": "What is in the file?"}


@pytest.fixture(scope="module")
def renderer(tiny_model):
    return load_renderer(tiny_model)


@pytest.fixture(scope="module")
def unreasoned(tiny_model):
    """With a template without reasoning, which a random model would not end."""
    return load_renderer(tiny_model, AS_STRING)


@pytest.fixture(scope="module")
def url(tiny_model, tmp_path_factory):
    with served(tiny_model, tmp_path_factory.mktemp("server")) as url:
        yield url


@pytest.fixture
async def engine(url, tiny_model):
    engine = SGLangEngine(url, vocab_size=vocab_size(tiny_model))
    yield engine
    await engine.close()


async def ask(client, messages, **fields):
    return await client.chat.completions.create(
        model="tiny", messages=messages, **fields
    )


async def test_a_conversation_with_tools(tmp_path, renderer, engine):
    async with in_process(engine, renderer, tmp_path) as gateway:
        client = await gateway.open(sampling={"extra": {"regex": CALLS}})
        messages = [{"role": "system", "content": "be brief"}, USER]
        for _ in range(3):
            reply = await ask(client, messages, tools=[TOOL], max_tokens=300)
            message = reply.choices[0].message
            assert reply.choices[0].finish_reason == "tool_calls"
            assert message.content == "Let me look.\n"
            (call,) = message.tool_calls
            command = json.loads(call.function.arguments)["command"]
            assert re.fullmatch(r"cat [a-c]\.txt", command)
            messages += [
                message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": call.id, "content": "no such file"},
            ]
        log = read_log(gateway.log.path)
    turns = log.to_pylist()
    tk.validate(log)
    assert [turn["use_tool"] for turn in turns] == [True] * 3
    for turn in turns:
        assert turn["model"] == "tiny"
        assert turn["finish_reason"] == "stop"
        assert turn["output_ids"][-1] == renderer.end_ids[0]
        assert len(turn["output_logprobs"]) == len(turn["output_ids"])
        # what the grammar forces has probability 1, what it leaves open has not
        assert max(turn["output_logprobs"]) <= 1e-4
        assert min(turn["output_logprobs"]) < -0.1
        assert turn["weight_versions"] == [
            {"version": "default", "start": 0, "stop": len(turn["output_ids"])}
        ]
    assert turns[1]["cached_tokens"] > 0

    # every echo is recognised, and every sampled token ends in one row's mask
    links = tk.link(log)
    assert links["parent"].to_pylist() == [None, 0, 1]
    rows, report = tk.linearize(log, policy="strict", reward=1.0, report=True)
    sampled = sum(len(turn["output_ids"]) for turn in turns)
    assert report["tokens_trained"].to_pylist() == [sampled]
    assert pc.sum(pc.list_flatten(rows["loss_mask"])).as_py() == sampled


async def test_a_streamed_reply(tmp_path, renderer, engine):
    async with in_process(engine, renderer, tmp_path) as gateway:
        client = await gateway.open()
        stream = await ask(
            client,
            [USER],
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=8,
            temperature=0.7,
        )
        chunks = [chunk async for chunk in stream]
        (turn,) = gateway.turns()
    assert chunks[-1].usage.completion_tokens == len(turn["output_ids"]) == 8
    assert chunks[-2].choices[0].finish_reason == "length"
    text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
    assert text == renderer.decode(np.array(turn["output_ids"]), ended=False)


@pytest.mark.parametrize(
    ("sampling", "most"),
    [
        pytest.param({"top_k": 4}, 4, id="top_k"),
        pytest.param({"temperature": 0.0}, 1, id="greedy"),
    ],
)
async def test_logprobs_are_those_of_what_was_sampled_from(sampling, most, engine):
    """Of a random model's 3,000 tokens each has about the same logprob, of 4 also."""
    names = {"request_id": f"logprobs-{most}", "max_new_tokens": 8}
    sample = await engine.generate(engine_request(range(10, 20), **names, **sampling))
    assert sample.output_logprobs == pytest.approx(
        np.full(8, -np.log(most)), abs=0 if most == 1 else 1.0
    )


def test_the_installed_parsers():
    """SGLang's parsers by name, in SGLang's own environment."""
    script = Path(__file__).parents[1] / "replies/installed_parsers.py"
    # what only the project has comes last
    code = (
        f"import runpy, sys; sys.path += {sys.path!r}; runpy.run_path({str(script)!r})"
    )
    ran = subprocess.run(
        [servers.PYTHON, "-c", code],
        capture_output=True,
        check=True,
        timeout=300,
        text=True,
    )
    found = json.loads(ran.stdout)
    assert "is not one of apertus2509" in found.pop("unknown")
    for read in found.values():
        assert (read["reasoning"], read["text"]) == ("hm", "Look.")
        ((name, arguments),) = read["calls"]
        assert (name, json.loads(arguments)) == ("f", {"n": 15})
        assert not read["ill_formed"]
    # as they were sampled
    assert found["qwen25"]["calls"][0][1] == '{"n":  1.50e1}'
    opens, tag = found["qwen25"]["tag"]
    assert tag["begin"] == f'{opens}\n{{"name":"f", "arguments":'
    # this form has no JSON arguments between two texts
    assert found["qwen3_coder"]["tag"] is None


LETTERS = {"type": "string", "enum": ["a.txt", "b.txt"]}
SCHEMA = {
    "type": "object",
    "properties": {"path": LETTERS},
    "required": ["path"],
    "additionalProperties": False,
}


def tool(name):
    function = {"name": name, "strict": True, "parameters": SCHEMA}
    return {"type": "function", "function": function}


def forced(logprobs):
    """A grammar leaves most tokens no choice, and this model little between others."""
    assert max(logprobs) == pytest.approx(0, abs=1e-4)
    assert min(logprobs) < -0.1


@pytest.mark.parametrize("form", FORMS)
async def test_a_required_call(tmp_path, unreasoned, engine, form):
    options = {"reply_parser": FormParser(FORMS[form])}
    async with in_process(engine, unreasoned, tmp_path, **options) as gateway:
        client = await gateway.open()
        reply = await ask(
            client,
            [USER],
            tools=[tool("read"), tool("write")],
            tool_choice={"type": "function", "function": {"name": "write"}},
            parallel_tool_calls=False,
            # a random model writes some hundred tokens of white space between tags
            max_tokens=8000,
        )
        (turn,) = gateway.turns()
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.name == "write"
    # xgrammar allows white space around values between tags
    assert json.loads(call.function.arguments)["path"].strip() in LETTERS["enum"]
    assert reply.choices[0].finish_reason == "tool_calls"
    assert turn["output_ids"][-1] == unreasoned.end_ids[0]
    assert json.loads(turn["sampling"])["structural_tag"]
    forced(turn["output_logprobs"])


async def test_a_required_schema(tmp_path, unreasoned, engine):
    schema = {"name": "file", "schema": SCHEMA}
    async with in_process(engine, unreasoned, tmp_path) as gateway:
        client = await gateway.open()
        reply = await ask(
            client,
            [USER],
            response_format={"type": "json_schema", "json_schema": schema},
            max_tokens=8000,
        )
        (turn,) = gateway.turns()
    assert json.loads(reply.choices[0].message.content)["path"] in LETTERS["enum"]
    forced(turn["output_logprobs"])


async def test_the_limits_of_the_server(renderer, engine):
    info = await engine.info()
    assert info.model == "tiny"
    assert info.max_context_tokens == 65536
    assert info.vocab_size >= len(renderer.tokenizer)
    await engine.generate(engine_request([info.vocab_size - 1], request_id="in"))


async def test_a_prompt_that_leaves_no_room(tmp_path, renderer, engine):
    async with in_process(engine, renderer, tmp_path) as gateway:
        client = await gateway.open()
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, [{"role": "user", "content": "\x00" * 66_000}])
        assert gateway.turns() == []
    assert caught.value.code == "context_length_exceeded"


async def test_what_the_server_refuses(tmp_path, renderer, engine):
    async with in_process(engine, renderer, tmp_path) as gateway:
        client = await gateway.open(sampling={"extra": {"min_new_tokens": -3}})
        with pytest.raises(openai.BadRequestError, match="SGLang server answered 400"):
            await ask(client, [USER], max_tokens=4)
        assert gateway.turns() == []


async def test_cancelling_ends_the_call_at_the_server(tmp_path, renderer, engine):
    async with in_process(engine, renderer, tmp_path, max_new_tokens=30_000) as gateway:
        client = await gateway.open(sampling={"extra": {"ignore_eos": True}})
        call = asyncio.create_task(ask(client, [USER]))
        await until_running(engine, 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until_running(engine, 0)
        assert gateway.turns() == []


async def until_running(engine: SGLangEngine, wanted: int) -> None:
    """Ask the server until it has so many calls under way."""
    async with asyncio.timeout(60):
        while True:
            loads = (await engine._servers[0].get("/v1/loads"))["loads"]
            if sum(load["num_running_reqs"] for load in loads) == wanted:
                return


@contextmanager
def weights(form, model):
    """The fields of an update: the model's directory, or other weights in memory."""
    if form == "disk":
        yield {"model_path": model}
        return
    script = str(Path(servers.__file__).with_name("share_weights.py"))
    with subprocess.Popen(
        [servers.PYTHON, script, model], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as sharing:
        yield {"tensors": json.loads(sharing.stdout.readline())}
        sharing.stdin.close()


async def greedy(engine):
    names = {"request_id": uuid.uuid4().hex, "max_new_tokens": 8}
    sample = await engine.generate(
        engine_request(range(10, 20), **names, temperature=0.0)
    )
    return sample.output_ids.tolist()


@pytest.mark.parametrize("form", ["disk", "tensor"])
async def test_weights_that_change_in_the_middle_of_a_turn(
    tmp_path, renderer, engine, tiny_model, form
):
    before = await greedy(engine)
    # so many that it still runs when a busy server says so
    n_tokens = 1000
    async with in_process(
        engine, renderer, tmp_path, max_new_tokens=n_tokens
    ) as gateway:
        client = await gateway.open(sampling={"extra": {"ignore_eos": True}})
        call = asyncio.create_task(ask(client, [USER]))
        await until_running(engine, 1)
        paused = await gateway.http.post("/engine/pause", json={"timeout_s": 300})
        assert paused.status_code == 200, paused.text
        with weights(form, tiny_model) as source:
            updated = await gateway.http.post(
                "/engine/update", json={**source, "weight_version": "step-1"}
            )
        assert updated.status_code == 200, updated.text
        assert not call.done()
        await gateway.http.post("/engine/resume")
        await call
        (turn,) = gateway.turns()
        assert (await greedy(engine) == before) is (form == "disk")
        # later tests find the server as it was
        await gateway.http.post("/engine/pause", json={"timeout_s": 300})
        old = {"model_path": tiny_model, "weight_version": "default"}
        assert (await gateway.http.post("/engine/update", json=old)).status_code == 200
        await gateway.http.post("/engine/resume")
    assert await greedy(engine) == before
    spans = turn["weight_versions"]
    assert [span["version"] for span in spans] == ["default", "step-1"]
    assert spans[0]["start"] == 0
    assert spans[0]["stop"] == spans[1]["start"]
    assert spans[1]["stop"] == len(turn["output_ids"]) == n_tokens


async def test_the_servers_own_parsers(tmp_path, renderer, engine, url):
    parser = SGLangParser(url)
    assert await parser.names() == ("qwen", "qwen3")
    pins = {"extra": {"regex": r"<think>\nhm\n</think>\n\n" + CALLS}}
    options = {"reply_parser": parser}
    async with in_process(engine, renderer, tmp_path, **options) as gateway:
        client = await gateway.open(sampling=pins)
        messages = [USER]
        for _ in range(2):
            reply = await ask(client, messages, tools=[TOOL], max_tokens=300)
            message = reply.choices[0].message
            assert message.model_dump()["reasoning_content"].strip() == "hm"
            assert message.content.strip() == "Let me look."
            (call,) = message.tool_calls
            # as it was sampled, which is not how the server writes it
            assert re.fullmatch(
                r'\{"command": "cat [a-c]\.txt"\}', call.function.arguments
            )
            messages += [
                message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": call.id, "content": "no such file"},
            ]
        session = await gateway.session(client)
        log = read_log(gateway.log.path)
    await parser.close()
    assert session["echo"]["new"] == 0
    assert session["prompts"] == {"opening": 1, "append": 1}
    assert log["ill_formed"].to_pylist() == [False, False]
