"""The gateway and the real vLLM server, which `.ci/vllm` makes possible."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import httpx
import pytest

import trajkit as tk
from tests.shim.clients import http, in_process, read_log
from tests.shim.engines.real_engine import USER, RealEngine, ask
from tests.shim.fakes import AS_STRING
from tests.shim.vllm_cpu.servers import EXPERTS, make_model, served
from trajkit_shim.engines.checks import check_engine
from trajkit_shim.engines.http import VLLMEngine
from trajkit_shim.engines.model_config import vocab_size
from trajkit_shim.prompting.render import load_renderer

pytestmark = [pytest.mark.anyio, pytest.mark.vllm]

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def renderer(model):
    return load_renderer(model)


@pytest.fixture(scope="module")
def unreasoned(model):
    """With a template without reasoning, which a random model would not end."""
    return load_renderer(model, AS_STRING)


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
    # with a parser of reasoning a grammar waits for its end, unless a call says otherwise
    parser = ["--reasoning-parser", "qwen3"]
    with served(model, tmp_path_factory.mktemp("server"), *parser) as url:
        yield url


@pytest.fixture
async def engine(url, model):
    engine = VLLMEngine(url, vocab_size=vocab_size(model))
    yield engine
    await engine.close()


async def metric(engine, name):
    async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
        metrics = (await client.get(f"{engine._servers[0].base_url}/metrics")).text
    return int(float(re.search(rf"^vllm:{name}\{{.*\}} (.*)$", metrics, re.M)[1]))


class TestVLLM(RealEngine):
    name = "vLLM"
    max_context = 32768
    refused = MappingProxyType({"min_tokens": -3})

    @staticmethod
    def regex(pattern):
        return {"structured_outputs": {"regex": pattern}}

    @staticmethod
    async def n_running(engine):
        return await metric(engine, "num_requests_running")

    async def n_sampled(self, engine):
        return await metric(engine, "generation_tokens_total")

    @staticmethod
    async def abort_all(engine):
        await engine._servers[0].post("/abort_requests", {"request_ids": []})

    async def test_weights_that_change_in_the_middle_of_a_turn(
        self, tmp_path, renderer, engine, model
    ):
        other = make_model(tmp_path / "other", seed=1)
        source = {"model_path": other}
        assert await self.change_weights(tmp_path, renderer, engine, source, model)


async def test_the_check_at_the_start(url, model):
    engine = VLLMEngine(url, vocab_size=vocab_size(model), check_prompts=True)
    assert (await check_engine(engine)).model == "tiny"


def test_the_command(url, model, tmp_path):
    """``trajkit serve --engine vllm``, as a user starts it."""
    argv = ["serve", "--engine", "vllm", "--engine-url", url, "--model", model]
    argv += ["--port", "0", "--json", "--check-prompts", "--out", str(tmp_path / "run")]
    code = f"from trajkit.cli import main\nexit(main({argv!r}))"
    path = f"{ROOT}{os.pathsep}{ROOT / 'shim'}"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    ) as gateway:
        try:
            where = json.loads(gateway.stdout.readline())["url"]
            session = http.post(f"{where}/sessions", timeout=60).json()
            answer = http.post(
                f"{where}/v1/chat/completions",
                json={"model": "tiny", "messages": [USER], "max_tokens": 4},
                headers={"authorization": f"Bearer {session['api_key']}"},
                timeout=60,
            )
            assert answer.status_code == 200, answer.text
        finally:
            gateway.terminate()
    (turn,) = tk.read_turns(tmp_path / "run").to_pylist()
    assert len(turn["output_ids"]) == 4
    assert turn["trainable"]


async def test_routed_experts_and_sampling_masks(tmp_path):
    """vLLM's second model runner samples, in Triton's interpreter."""
    model = make_model(tmp_path, EXPERTS)
    arguments = ["--enable-return-routed-experts", "--return-sampling-mask"]
    renderer = load_renderer(model)
    with served(model, tmp_path, *arguments, second_runner=True) as url:
        options = {"experts_per_token": 2, "sampling_masks": True}
        engine = VLLMEngine(url, vocab_size=vocab_size(model), **options)
        log = {"routed_experts": True, "sampling_masks": True, "max_new_tokens": 4}
        async with in_process(engine, renderer, tmp_path / "run", **log) as gateway:
            client = await gateway.open(sampling={"top_k": 3})
            messages = [USER]
            for _ in range(2):
                reply = await ask(client, messages)
                said = reply.choices[0].message.model_dump(exclude_none=True)
                messages += [said, USER]
            turns = read_log(gateway.log.path)
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
