"""Images and the real SGLang server, which `.ci/sglang` makes possible."""

from dataclasses import replace

import numpy as np
import pytest

import trajkit as tk
from tests.shim.clients import in_process
from tests.shim.fakes import engine_request
from tests.shim.sglang_cpu.make_vision_model import write_processor
from tests.shim.sglang_cpu.servers import make_model, served
from tests.shim.test_images import JPEG, PNG, TYPES, chat, drawn
from trajkit.turns import engine_ids
from trajkit_shim.chat.images import load_image_model
from trajkit_shim.engines.http import SGLangEngine
from trajkit_shim.engines.model_config import vocab_size
from trajkit_shim.errors import EngineError
from trajkit_shim.prompting.render import load_renderer

pytestmark = [pytest.mark.anyio, pytest.mark.sglang]

# a grammar lets a random model end its replies
COLOURS = r"(red|green|blue)"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("vision")
    return make_model(directory, "make_vision_model.py", write_processor)


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        # the stand-in for triton compiles nothing
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        arguments = ["--disable-fast-image-processor"]
        with served(model, tmp_path_factory.mktemp("server"), *arguments) as url:
            yield url


@pytest.fixture
async def gateway(model, url, tmp_path):
    engine = SGLangEngine(url, vocab_size=vocab_size(model))
    images = load_image_model(model)
    renderer = load_renderer(model)
    async with in_process(engine, renderer, tmp_path, images=images) as gateway:
        yield gateway
    await engine.close()


async def replies(gateway, *contents):
    """Hold a conversation of user messages; return the turns."""
    key = await gateway.open_key(sampling={"extra": {"regex": COLOURS}})
    messages = []
    for content in contents:
        messages += content
        answer = await gateway.http.post(
            CHAT, json={"messages": messages}, headers={"x-session-key": key}
        )
        assert answer.status_code == 200, answer.text
        messages.append(answer.json()["choices"][0]["message"])
    return tk.read_turns(gateway.log.directory)


async def test_a_conversation_with_images(gateway, model):
    """The server returned each prompt, and the gateway compared it."""
    texts = [{"role": "user", "content": "and now?"}]
    images = [chat(data)["messages"] for data in (PNG, JPEG)]
    turns = await replies(gateway, images[0], texts, images[1])
    assert turns["render_reason"].to_pylist() == ["opening", None, None]
    assert [len(items) for items in turns["mm_items"].to_pylist()] == [1, 1, 2]
    token = load_image_model(model).token_id
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


async def test_another_image_is_another_prompt(gateway):
    """The ids that the server consumed are equal, and what it computed is not."""
    images = [drawn("PNG", (112, 112), (shade, 30, 30)) for shade in (250, 90)]
    TYPES.update(dict.fromkeys(images, "image/png"))
    for image in (*images, images[0]):
        await replies(gateway, chat(image)["messages"])
    first, other, again = tk.read_turns(gateway.log.directory).to_pylist()
    start, stop = (first["mm_items"][0][name] for name in ("start", "stop"))
    assert first["prompt_ids"][:start] == other["prompt_ids"][:start]
    assert first["prompt_ids"][start] != other["prompt_ids"][start]
    assert first["prompt_ids"] == again["prompt_ids"]
    assert other["cached_tokens"] <= start
    assert again["cached_tokens"] >= stop


async def test_pixels_reach_the_model(gateway, model, url):
    """Logprobs of one reply are those of its image."""
    from trajkit_shim.engines.base import PromptImage, Sampling

    (turn,) = engine_ids(await replies(gateway, chat(PNG)["messages"])).to_pylist()
    ids = np.array(turn["prompt_ids"], np.int32)
    (item,) = turn["mm_items"]
    start, stop = item["start"], item["stop"]
    engine = SGLangEngine(url, vocab_size=vocab_size(model))
    sampling = Sampling(max_new_tokens=4, extra={"regex": "(a|b)"})
    request = engine_request(ids, sampling=sampling)
    found = {}
    for shade in (250, 90):
        data = drawn("PNG", (80, 100), (shade, 0, 0))
        image = PromptImage(start, stop, "image/png", data)
        for draw in range(8):
            name = f"{shade}.{draw}"
            sample = await engine.generate(
                replace(request, request_id=name, images=[image])
            )
            assert sample.prompt_ids.tolist() == ids.tolist()
            of_reply = found.setdefault(tuple(sample.output_ids.tolist()), {})
            of_reply[shade] = sample.output_logprobs.tolist()
    broken = PromptImage(start, stop, "image/png", b"\x89PNG no image")
    with pytest.raises(EngineError):
        await engine.generate(replace(request, images=[broken]))
    await engine.close()
    both = [of_reply for of_reply in found.values() if len(of_reply) == 2]
    assert both
    assert all(of_reply[250] != of_reply[90] for of_reply in both)
