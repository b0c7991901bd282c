"""The gateway and the real SGLang server, which `.ci/sglang` makes possible."""

import json
import re
import subprocess
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.shim.clients import http, in_process, read_log
from tests.shim.engines.real_engine import CALLS, USER, RealEngine, ask, sample
from tests.shim.fakes import AS_STRING, TOOL
from tests.shim.sglang_cpu import servers
from tests.shim.sglang_cpu.servers import served
from trajkit_shim.engines.http import SGLangEngine
from trajkit_shim.engines.model_config import vocab_size
from trajkit_shim.prompting.render import load_renderer
from trajkit_shim.replies import SGLangParser

pytestmark = [pytest.mark.anyio, pytest.mark.sglang]


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


class TestSGLang(RealEngine):
    name = "SGLang"
    max_context = 65536
    refused = MappingProxyType({"min_new_tokens": -3})

    @staticmethod
    def regex(pattern):
        return {"regex": pattern}

    @staticmethod
    async def n_running(engine):
        loads = (await engine._servers[0].get("/v1/loads"))["loads"]
        return sum(load["num_running_reqs"] for load in loads)

    @staticmethod
    async def abort_all(engine):
        await engine._servers[0].post("/abort_request", {"abort_all": True})

    @pytest.mark.parametrize("form", ["disk", "tensor"])
    async def test_weights_that_change_in_the_middle_of_a_turn(
        self, tmp_path, renderer, engine, tiny_model, form
    ):
        with weights(form, tiny_model) as source:
            changed = await self.change_weights(
                tmp_path, renderer, engine, source, tiny_model
            )
        assert changed is (form == "tensor")

    async def test_sampling_masks(self, url, tiny_model):
        engine = SGLangEngine(
            url, vocab_size=vocab_size(tiny_model), sampling_masks=True
        )
        cut, free = await sample(engine, top_k=4), await sample(engine)
        await engine.close()
        assert {len(mask) for mask in cut.sampling_mask} == {4}
        assert free.sampling_mask is None


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


async def test_the_servers_own_parsers(tmp_path, renderer, engine, url):
    info = http.get(f"{url}/server_info").json()
    names = info["tool_call_parser"], info["reasoning_parser"]
    assert names == ("qwen", "qwen3")
    parser = SGLangParser(url, *names)
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
            given = json.loads(call.function.arguments)
            assert re.fullmatch(r"cat [a-c]\.txt", given.pop("command"))
            assert given == {}
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
