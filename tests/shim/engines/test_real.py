"""The gateway and the real servers, on a CPU with a random model.

`.ci/sglang` and `.ci/vllm` make them possible; each runs the tests with its mark.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import httpx
import numpy as np
import openai
import pyarrow.compute as pc
import pytest

import trajkit as tk
from tests.made_tables import linearized
from tests.shim.engines.double import ENGINES
from tests.shim.fakes import (
    AS_STRING,
    TOOL,
    engine_request,
    load_tokenizer,
    raises,
    tool,
    write_processor,
)
from tests.shim.processes import (
    chat,
    children,
    get,
    post,
    printed,
    serving,
    stop,
    until_ended,
)
from tests.shim.test_images import JPEG, PNG, asking, drawn
from trajkit import cli
from trajkit.turns import engine_ids
from trajkit_shim.chat.images import load_image_model
from trajkit_shim.engines.base import PromptImage, Sampling
from trajkit_shim.engines.launch import running_server, sglang_server
from trajkit_shim.engines.model_config import config_number
from trajkit_shim.errors import EngineError
from trajkit_shim.prompting.render import load_renderer
from trajkit_shim.replies import FORMS, FormParser, SGLangParser

pytestmark = pytest.mark.anyio

# a grammar makes a random model call tools, in a spelling of its own
CALLS = (
    r"Let me look\.\n<tool_call>\n"
    r'\{"name": "bash", "arguments": \{"command": "cat [a-c]\.txt"\}\}'
    r"\n</tool_call>"
)
USER = {"role": "user", "content": "What is in the file?"}
LETTERS = {"type": "string", "enum": ["a.txt", "b.txt"]}
SCHEMA = {
    "type": "object",
    "properties": {"path": LETTERS},
    "required": ["path"],
    "additionalProperties": False,
}
MOST = {"max_new_tokens": 30_000}
TOKENIZER = load_tokenizer()
HERE = Path(__file__).parents[1]


class Server:
    """What the tests need to know of a server."""

    # a parameter of the engine that it refuses
    refused: Mapping[str, int]
    name = mark = python = ""
    arguments = ("--served-model-name", "tiny")

    @classmethod
    def make_model(cls, directory, *given, prepare=TOKENIZER.save_pretrained):
        """Make a random model; return its directory.

        The environment of a server lacks modules that write a tokenizer.
        """
        path = str(directory / "model")
        prepare(path)
        script = str(HERE / "sglang_cpu" / "make_model.py")
        subprocess.run([cls.python, script, path, *given], check=True, timeout=120)
        return path

    @classmethod
    @contextmanager
    def served(cls, model, directory, *arguments, **variables):
        """The URL of a server of a model; its log is in the directory.

        A server that hangs while it starts (SGLang has done so) is started once more.
        """
        command, own = cls.command(model, [*cls.arguments, *arguments])
        log = directory / "engine.log"
        with ExitStack() as stack:
            for seconds in (100, 150):
                server = running_server(
                    command, own | variables, log, start_seconds=seconds
                )
                try:
                    url = stack.enter_context(server)
                except ConnectionError as error:
                    failure = error
                    continue
                yield url
                return
        raise failure


class SGLang(Server):
    name, mark, max_context = "SGLang", "sglang", 65536
    python = os.environ.get("TRAJKIT_SGLANG_PYTHON", "")
    refused = MappingProxyType({"min_new_tokens": -3})
    # without the second, it takes 15 GB for its cache; with the fourth, it uses no CPU if
    # idle
    arguments = (
        *("--device", "cpu"),
        *("--max-total-tokens", "262144"),
        *("--max-running-requests", "16"),
        "--sleep-on-idle",
        *Server.arguments,
        *("--tool-call-parser", "qwen"),
        *("--reasoning-parser", "qwen3"),
    )

    @classmethod
    def command(cls, model, arguments):
        return sglang_server(cls.python, model, arguments)

    @staticmethod
    def regex(pattern):
        """The engine's parameters for a regular expression."""
        return {"regex": pattern}

    @staticmethod
    async def n_running(engine):
        """How many calls the server has under way."""
        loads = (await engine._servers[0].get("/v1/loads"))["loads"]
        return sum(load["num_running_reqs"] for load in loads)

    # a count that grows once a call is sampled, also where the last one is stale
    n_sampled = n_running

    @staticmethod
    async def abort_all(engine):
        await engine._servers[0].post("/abort_request", {"abort_all": True})


class VLLM(Server):
    name, mark, max_context = "vLLM", "vllm", 32768
    python = os.environ.get("TRAJKIT_VLLM_PYTHON", "")
    refused = MappingProxyType({"min_tokens": -3})
    arguments = (
        *Server.arguments,
        "--enable-scale-out",
        *("--logprobs-mode", "processed_logprobs"),
        "--enable-prompt-tokens-details",
        *("--dtype", "bfloat16"),
        # a prompt that is read in parts ends the engine on a CPU, if its call has a seed
        *("--max-model-len", "32768"),
        *("--max-num-batched-tokens", "65536"),
        *("--max-num-seqs", "8"),
        "--enforce-eager",
        # a grammar waits for the end of reasoning, unless a call says otherwise
        *("--reasoning-parser", "qwen3"),
    )
    # of the second model runner, which has routed experts and sampling masks
    second_runner = MappingProxyType(
        {
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": str(HERE / "vllm_cpu" / "runner2"),
        }
    )

    @classmethod
    def command(cls, model, arguments):
        variables = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
        }
        program = str(Path(cls.python).with_name("vllm"))
        return [program, "serve", model, *arguments], variables

    @staticmethod
    def regex(pattern):
        return {"structured_outputs": {"regex": pattern}}

    @staticmethod
    async def _metric(engine, name):
        async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
            metrics = (await client.get(f"{engine._servers[0].base_url}/metrics")).text
        return int(float(re.search(rf"^vllm:{name}\{{.*\}} (.*)$", metrics, re.M)[1]))

    @staticmethod
    async def n_running(engine):
        return await VLLM._metric(engine, "num_requests_running")

    @staticmethod
    async def n_sampled(engine):
        return await VLLM._metric(engine, "generation_tokens_total")

    @staticmethod
    async def abort_all(engine):
        await engine._servers[0].post("/abort_requests", {"request_ids": []})


def param(kind):
    needs = f"TRAJKIT_{kind.mark.upper()}_PYTHON"
    skip = pytest.mark.skipif(needs not in os.environ, reason=f"needs {needs}")
    return pytest.param(
        kind, id=kind.mark, marks=[getattr(pytest.mark, kind.mark), skip]
    )


def only(kind):
    return pytest.mark.parametrize("kind", [param(kind)], indirect=True)


@pytest.fixture(scope="module", params=[param(SGLang), param(VLLM)])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def model(kind, tmp_path_factory):
    return kind.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def url(kind, model, tmp_path_factory):
    with kind.served(model, tmp_path_factory.mktemp("server")) as url:
        yield url


@pytest.fixture(scope="module")
def renderer(model):
    return load_renderer(model)


@pytest.fixture(scope="module")
def unreasoned(model):
    """With a template without reasoning, which a random model would not end."""
    return load_renderer(model, AS_STRING)


def client_of(kind, url, model, **options):
    return ENGINES[kind.mark](
        url, vocab_size=config_number(model, "vocab_size"), **options
    )


@pytest.fixture
async def engine(kind, url, model):
    engine = client_of(kind, url, model)
    yield engine
    await engine.close()


async def sample(engine, prompt=range(10, 20), **changes):
    asked = {"request_id": uuid.uuid4().hex, "max_new_tokens": 8, **changes}
    return await engine.generate(engine_request(prompt, **asked))


async def greedy(engine):
    return (await sample(engine, temperature=0.0)).output_ids.tolist()


def offered(name):
    function = {"name": name, "strict": True, "parameters": SCHEMA}
    return {"type": "function", "function": function}


def forced(logprobs):
    """A grammar leaves most tokens no choice, and this model little between others."""
    assert max(logprobs) == pytest.approx(0, abs=1e-4)
    assert min(logprobs) < -0.1


async def test_a_conversation_with_tools(start, kind, renderer, engine):
    gateway = await start(engine=engine, renderer=renderer)
    session = await gateway.open(sampling={"extra": kind.regex(CALLS)})
    messages = [{"role": "system", "content": "be brief. " * 100}, USER]
    for _ in range(3):
        reply = await session.post(messages=messages, tools=[TOOL], max_tokens=300)
        (choice,) = reply.json()["choices"]
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls"
        assert message["content"] == "Let me look.\n"
        (call,) = message["tool_calls"]
        command = json.loads(call["function"]["arguments"])["command"]
        assert re.fullmatch(r"cat [a-c]\.txt", command)
        messages += [message, tool(call["id"], "no such file")]
    log = gateway.table()
    turns = log.to_pylist()
    tk.validate(log)
    assert [turn["use_tool"] for turn in turns] == [True] * 3
    for turn in turns:
        assert (turn["model"], turn["finish_reason"]) == ("tiny", "stop")
        assert turn["output_ids"][-1] == renderer.end_ids[0]
        assert len(turn["output_logprobs"]) == len(turn["output_ids"])
        forced(turn["output_logprobs"])
        assert turn["weight_versions"] == [
            {"version": "default", "start": 0, "stop": len(turn["output_ids"])}
        ]
    assert turns[1]["cached_tokens"] > 0
    # every echo is recognised, and every sampled token ends in one row's mask
    links = tk.link(log)
    assert links["parent"].to_pylist() == [None, 0, 1]
    rows, report = linearized(log, policy="strict", reward=1.0)
    sampled = sum(len(turn["output_ids"]) for turn in turns)
    assert report["tokens_trained"].to_pylist() == [sampled]
    assert pc.sum(pc.list_flatten(rows["loss_mask"])).as_py() == sampled


@pytest.mark.parametrize(
    ("sampling", "most"),
    [({"top_k": 4}, 4), ({"temperature": 0.0}, 1)],
    ids=["top_k", "greedy"],
)
async def test_logprobs_are_those_of_what_was_sampled_from(sampling, most, engine):
    """Of a random model's 3,000 tokens each has about the same logprob, of 4 also."""
    sampled = await sample(engine, **sampling)
    assert sampled.output_logprobs == pytest.approx(
        np.full(8, -np.log(most)), abs=0 if most == 1 else 1.0
    )


async def test_what_ends_a_reply(kind, engine):
    """An id, a text, and the limit; the id and the text's tokens are in the ids."""
    only = {"logit_bias": {"301": 100.0}}
    free = await sample(engine, extra=only)
    assert (free.output_ids.tolist(), free.finish_reason) == ([301] * 8, "length")
    by_id = await sample(engine, extra=only, stop_token_ids=(301,))
    assert (by_id.output_ids.tolist(), by_id.finish_reason) == ([301], "stop")
    extra = kind.regex("a cat sat")
    by_text = await sample(engine, stop=("cat",), extra=extra, max_new_tokens=20)
    assert by_text.finish_reason == "stop"


@pytest.mark.parametrize("form", [n for n, form in FORMS.items() if form.begin])
async def test_a_required_call(start, unreasoned, engine, form):
    parser = FormParser(FORMS[form])
    gateway = await start(engine=engine, renderer=unreasoned, reply_parser=parser)
    reply = await (await gateway.open()).post(
        messages=[USER],
        tools=[offered("read"), offered("write")],
        tool_choice={"type": "function", "function": {"name": "write"}},
        parallel_tool_calls=False,
        # a random model writes some hundred tokens of white space between tags
        max_tokens=8000,
    )
    (turn,), (choice,) = gateway.turns(), reply.json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "write"
    # xgrammar allows white space around values between tags
    path = json.loads(call["function"]["arguments"])["path"].strip()
    assert path in LETTERS["enum"]
    assert choice["finish_reason"] == "tool_calls"
    assert turn["output_ids"][-1] == unreasoned.end_ids[0]
    assert json.loads(turn["sampling"])["structural_tag"]
    forced(turn["output_logprobs"])


async def test_a_required_schema(start, unreasoned, engine):
    schema = {"name": "file", "schema": SCHEMA}
    form = {"type": "json_schema", "json_schema": schema}
    gateway = await start(engine=engine, renderer=unreasoned)
    session = await gateway.open()
    reply = await session.ask(USER, response_format=form, max_tokens=8000)
    (turn,) = gateway.turns()
    assert json.loads(reply["content"])["path"] in LETTERS["enum"]
    forced(turn["output_logprobs"])


async def test_the_limits_of_the_server(kind, renderer, engine):
    info = await engine.info()
    assert (info.model, info.max_context_tokens) == ("tiny", kind.max_context)
    assert info.vocab_size >= len(renderer.tokenizer)
    await sample(engine, [info.vocab_size - 1])
    # a prompt that it finds too long, and a parameter that it lacks
    for n_tokens, extra in ((kind.max_context + 10, {}), (4, dict(kind.refused))):
        with raises(EngineError, "answered 400: ", status=400):
            await sample(engine, np.full(n_tokens, 7), extra=extra)


async def test_a_long_call_and_many_at_once(engine):
    """A prompt of 8,000 ids, and a reply of 300."""
    asked = {"max_new_tokens": 300, "extra": {"ignore_eos": True}}
    sampled = await sample(engine, np.arange(8000) % 2000 + 100, **asked)
    assert len(sampled.output_ids) == 300
    assert len(sampled.output_logprobs) == 300
    calls = (sample(engine, session_id=f"s{k}") for k in range(40))
    sampled = await asyncio.gather(*calls)
    assert {len(each.output_ids) for each in sampled} <= {*range(1, 9)}


async def under_way(kind, gateway, engine, renderer, **limit):
    """A call that the server samples without an end, or up to a limit."""
    # vLLM ends a reply at the ids that the gateway names, whatever it ignores
    never = dict.fromkeys(map(str, renderer.end_ids), -100.0)
    endless = {"ignore_eos": True, "logit_bias": never}
    session = await gateway.open(sampling={"extra": endless, **limit})
    before = await kind.n_sampled(engine)
    completions = session.openai.chat.completions
    call = asyncio.create_task(completions.create(model="tiny", messages=[USER]))
    async with asyncio.timeout(120):
        # tokens of earlier calls may be counted late
        while not (call.done() or await kind.n_running(engine)):
            await asyncio.sleep(0)
        while not (call.done() or await kind.n_sampled(engine) > before):
            await asyncio.sleep(0)
    assert limit or not call.done(), (call, gateway.turns())
    return call


async def test_cancelling_ends_the_call_at_the_server(start, kind, renderer, engine):
    gateway = await start(engine=engine, renderer=renderer, **MOST)
    call = await under_way(kind, gateway, engine, renderer)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    async with asyncio.timeout(120):
        while await kind.n_running(engine):
            await asyncio.sleep(0)
    ends = [(t["finish_reason"], len(t["output_ids"])) for t in gateway.turns()]
    assert ends == []


async def test_a_call_that_is_aborted_at_the_server(start, kind, renderer, engine):
    """Its turn is context only, and its client is told to try again."""
    gateway = await start(engine=engine, renderer=renderer, **MOST)
    call = await under_way(kind, gateway, engine, renderer)
    await kind.abort_all(engine)
    with pytest.raises(openai.InternalServerError, match="with abort"):
        await call
    (turn,) = gateway.turns()
    assert (turn["finish_reason"], turn["trainable"]) == ("abort", False)
    assert len(turn["output_logprobs"]) == len(turn["output_ids"])


async def test_weights_that_change_in_the_middle_of_a_turn(
    tmp_path, start, kind, renderer, engine, model
):
    # SGLang gets the same weights from the disk, vLLM others
    other = model if kind is SGLang else kind.make_model(tmp_path / "other", "1")
    old_reply = await greedy(engine)
    files = {"directory": tmp_path / "run"}
    gateway = await start(engine=engine, renderer=renderer, **MOST, **files)
    # so many that the call still runs when a busy server has paused
    for n_tokens in (1000, 4000, 16000):
        call = await under_way(kind, gateway, engine, renderer, max_tokens=n_tokens)
        await gateway.post("/engine/pause", timeout_s=300)
        if not call.done():
            break
        await gateway.post("/engine/resume")
    await gateway.post("/engine/update", model_path=other, weight_version="step-1")
    assert not call.done()
    await gateway.post("/engine/resume")
    await call
    *_, turn = gateway.turns()
    changed = await greedy(engine) != old_reply
    # later tests find the server as it was
    await gateway.post("/engine/pause", timeout_s=300)
    back = {"model_path": model, "weight_version": "default"}
    await gateway.post("/engine/update", **back)
    await gateway.post("/engine/resume")
    assert await greedy(engine) == old_reply
    assert changed is (kind is VLLM)
    spans = turn["weight_versions"]
    assert [span["version"] for span in spans] == ["default", "step-1"]
    assert (spans[0]["start"], spans[0]["stop"]) == (0, spans[1]["start"])
    assert spans[1]["stop"] == len(turn["output_ids"]) == n_tokens


# Only SGLang


@only(SGLang)
async def test_sampling_masks(kind, url, model):
    engine = client_of(kind, url, model, sampling_masks=True)
    cut, free = await sample(engine, top_k=4), await sample(engine)
    await engine.close()
    assert {len(mask) for mask in cut.sampling_mask} == {4}
    assert free.sampling_mask is None


@only(SGLang)
async def test_the_servers_own_parsers(start, kind, renderer, engine, url):
    info = get(f"{url}/server_info").json()
    names = info["tool_call_parser"], info["reasoning_parser"]
    assert names == ("qwen", "qwen3")
    parser = SGLangParser(url, *names)
    pins = {"extra": kind.regex(r"<think>\nhm\n</think>\n\n" + CALLS)}
    gateway = await start(engine=engine, renderer=renderer, reply_parser=parser)
    session, messages = await gateway.open(sampling=pins), [USER]
    for _ in range(2):
        message = await session.ask(*messages, tools=[TOOL], max_tokens=300)
        assert message["reasoning_content"].strip() == "hm"
        assert message["content"].strip() == "Let me look."
        (call,) = message["tool_calls"]
        given = json.loads(call["function"]["arguments"])
        assert re.fullmatch(r"cat [a-c]\.txt", given.pop("command"))
        assert given == {}
        messages += [message, tool(call["id"], "no such file")]
    shown = await session.shown()
    await parser.close()
    assert shown["prompts"] == {"opening": 1, "append": 1}
    assert [turn["ill_formed"] for turn in gateway.turns()] == [False, False]


@only(SGLang)
def test_a_launched_server_ends_with_the_gateway(tmp_path, model):
    options = ["--engine", "sglang", "--launch", model]
    options += ["--launch-python", SGLang.python]
    with serving(tmp_path, *options, after=["--", *SGLang.arguments]) as gateway:
        url = printed(gateway)["url"]
        chat(url, post(f"{url}/sessions").json()["api_key"], max_tokens=4)
        below = children(gateway.pid)
        gateway.send_signal(signal.SIGTERM)
        _, errors = gateway.communicate(timeout=120)
    assert gateway.returncode == cli.DONE, errors
    until_ended(below)
    (turn,) = tk.read_turns(tmp_path / "run").to_pylist()
    assert len(turn["output_ids"]) == 4
    assert "Uvicorn running" in (tmp_path / "run" / "engine.log").read_text()


@only(SGLang)
async def test_a_session_stays_on_a_server_and_all_servers_are_updated(
    kind, model, tmp_path
):
    """Of two servers, whose weights have different names."""
    with ExitStack() as stack:
        urls = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            served = kind.served(model, tmp_path / name, "--weight-version", name)
            urls.append(stack.enter_context(served))
        vocab_size = config_number(model, "vocab_size")
        engine = ENGINES[kind.mark](*urls, vocab_size=vocab_size)

        async def versions():
            """The name of the weights that sampled a call of each of eight sessions."""
            prompt = range(100, 400)
            calls = (sample(engine, prompt, session_id=f"s-{k}") for k in range(8))
            samples = await asyncio.gather(*calls)
            return [each.weight_versions[0].version for each in samples]

        first = await versions()
        assert {*first} == {"one", "two"}
        assert [await versions() for _ in range(3)] == [first] * 3
        await engine.pause()
        await engine.update_weights(model, "step-1")
        await engine.resume()
        assert await versions() == ["step-1"] * 8
        await engine.close()


# Images: a grammar lets a random model end its replies
COLOURS = {"sampling": {"extra": {"regex": r"(red|green|blue)"}}}


@pytest.fixture(scope="module")
def vision(kind, tmp_path_factory):
    """A model that takes images, and the URL of its server."""
    directory = tmp_path_factory.mktemp("vision")
    model = kind.make_model(directory, "0", "vision", prepare=write_processor)
    with pytest.MonkeyPatch.context() as patch:
        # the stand-in for triton compiles nothing
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        arguments = ["--disable-fast-image-processor"]
        with kind.served(model, tmp_path_factory.mktemp("server"), *arguments) as url:
            yield model, url


@pytest.fixture
async def seeing(kind, vision, start):
    model, url = vision
    engine = client_of(kind, url, model)
    images = load_image_model(model)
    yield await start(engine=engine, renderer=load_renderer(model), images=images)
    await engine.close()


async def replies(gateway, *contents):
    """Hold a conversation of user messages; return the turns."""
    session, messages = await gateway.open(**COLOURS), []
    for content in contents:
        messages.append(content)
        messages.append(await session.ask(*messages))
    return gateway.table()


@only(SGLang)
async def test_a_conversation_with_images(seeing, vision):
    """The server returned each prompt, and the gateway compared it."""
    turns = await replies(seeing, asking(PNG), USER, asking(JPEG))
    assert turns["render_reason"].to_pylist() == ["opening", None, None]
    assert [len(items) for items in turns["mm_items"].to_pylist()] == [1, 1, 2]
    token = load_image_model(vision[0]).token_id
    for turn in engine_ids(turns).to_pylist():
        at = np.flatnonzero(np.array(turn["prompt_ids"]) == token).tolist()
        spans = [range(item["start"], item["stop"]) for item in turn["mm_items"]]
        assert at == [place for span in spans for place in span]
    # the server found the first image in its cache, as the table does
    first, second, _ = turns.to_pylist()
    assert second["cached_tokens"] >= first["mm_items"][0]["stop"]
    rows = tk.linearize(turns, "faithful", reward=1.0)
    assert rows.num_rows == 1
    assert tk.verify(rows, turns, "faithful").num_rows == 0


@only(SGLang)
async def test_pixels_reach_the_model(seeing):
    """Logprobs of one reply are those of its image."""
    (turn,) = engine_ids(await replies(seeing, asking(PNG))).to_pylist()
    ids = np.array(turn["prompt_ids"], np.int32)
    (item,) = turn["mm_items"]
    start, stop = item["start"], item["stop"]
    sampling = Sampling(max_new_tokens=4, extra={"regex": "(a|b)"})
    request, found = engine_request(ids, sampling=sampling), {}
    for shade in (250, 90):
        data = drawn("PNG", (80, 100), (shade, 0, 0))
        image = PromptImage(start, stop, "image/png", data)
        for draw in range(8):
            asked = replace(request, request_id=f"{shade}.{draw}", images=[image])
            sample = await seeing.engine.generate(asked)
            assert sample.prompt_ids.tolist() == ids.tolist()
            of_reply = found.setdefault(tuple(sample.output_ids.tolist()), {})
            of_reply[shade] = sample.output_logprobs.tolist()
    broken = PromptImage(start, stop, "image/png", b"\x89PNG no image")
    with pytest.raises(EngineError):
        await seeing.engine.generate(replace(request, images=[broken]))
    both = [of_reply for of_reply in found.values() if len(of_reply) == 2]
    assert both
    assert all(of_reply[250] != of_reply[90] for of_reply in both)


# Only vLLM


@only(VLLM)
def test_the_command(url, model, tmp_path):
    """``trajkit serve --engine vllm``, as a user starts it."""
    options = ["--engine", "vllm", "--engine-url", url, "--model", model]
    with serving(tmp_path, *options, "--check-prompts") as gateway:
        where = printed(gateway)["url"]
        chat(where, post(f"{where}/sessions").json()["api_key"], max_tokens=4)
        stop(gateway)
    (turn,) = tk.read_turns(tmp_path / "run").to_pylist()
    assert (len(turn["output_ids"]), turn["trainable"]) == (4, True)


@only(VLLM)
async def test_routed_experts_and_sampling_masks(kind, tmp_path, start):
    """vLLM's second model runner samples, in Triton's interpreter."""
    model = kind.make_model(tmp_path, "0", "experts")
    arguments = ["--enable-return-routed-experts", "--return-sampling-mask"]
    with kind.served(model, tmp_path, *arguments, **kind.second_runner) as url:
        options = {"experts_per_token": 2, "sampling_masks": True}
        engine = client_of(kind, url, model, **options)
        log = {"routed_experts": True, "sampling_masks": True, "max_new_tokens": 4}
        log |= {"renderer": load_renderer(model), "directory": tmp_path / "run"}
        gateway = await start(engine=engine, **log)
        session = await gateway.open(sampling={"top_k": 3})
        reply = await session.ask(USER)
        await session.ask(USER, reply, USER)
        turns = gateway.table()
        await engine.close()
    tk.validate(turns)
    for turn in turns.to_pylist():
        n_prompt, n_output = len(turn["prompt_ids"]), len(turn["output_ids"])
        *experts, last = turn["routed_experts"]
        assert (len(experts), last) == (n_prompt + n_output - 1, None)
        assert {len(layer) for token in experts for layer in token} == {2}
        assert len(turn["sampling_mask"]) == n_output
        for token, mask in zip(turn["output_ids"], turn["sampling_mask"], strict=True):
            assert token in mask
            assert len(mask) >= 3
    tk.linearize(turns, payloads=["routed_experts", "sampling_mask"], reward=1.0)
