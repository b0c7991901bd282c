"""Images in every protocol: placed in prompts, given to the engine, stored, logged."""

import asyncio
import base64
import io
import json
import threading
from contextlib import AsyncExitStack
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor

import trajkit as tk
from tests.shim.clients import in_process, read_log
from tests.shim.fakes import cases
from tests.shim.sglang_cpu.make_vision_model import write_processor
from trajkit.turns import engine_ids
from trajkit_shim.chat.images import (
    ImageLimits,
    ImageStore,
    load_image_model,
    open_image,
)
from trajkit_shim.engines.base import EngineInfo, Sample
from trajkit_shim.prompting.render import load_renderer

pytestmark = pytest.mark.anyio

VOCAB = 3072


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model's directory: tokenizer, processor, and the ids in its configuration."""
    directory = tmp_path_factory.mktemp("vision")
    write_processor(directory)
    token = load_renderer(directory).tokenizer.backend_tokenizer.token_to_id(
        "<|image_pad|>"
    )
    config = {"image_token_id": token, "vocab_size": VOCAB}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


class SeeingEngine:
    """Gives the scripted ids, and keeps the prompts and images."""

    takes_images = True

    def __init__(self, *script):
        self.script = list(script)
        self.prompts, self.images = [], []

    async def info(self):
        return EngineInfo(model="m", vocab_size=VOCAB, max_context_tokens=10_000)

    async def generate(self, request):
        self.prompts.append(request.prompt_ids.tolist())
        self.images.append(list(request.images))
        ids = np.array(self.script.pop(0), np.int32)
        return Sample(
            output_ids=ids,
            output_logprobs=np.full(len(ids), -0.5, np.float32),
            finish_reason="stop",
        )

    async def close(self):
        pass


def drawn(kind, size, colour):
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind)
    return file.getvalue()


PNG = drawn("PNG", (80, 100), (200, 10, 10))
JPEG = drawn("JPEG", (300, 60), (10, 200, 10))
TYPES = {PNG: "image/png", JPEG: "image/jpeg"}


def encoded(data):
    return base64.b64encode(data).decode()


def url_of(data):
    return f"data:{TYPES[data]};base64,{encoded(data)}"


def chat(data, **fields):
    part = {"type": "image_url", "image_url": {"url": url_of(data), "detail": "high"}}
    content = [{"type": "text", "text": "What is it?"}, part]
    return {"messages": [{"role": "user", "content": content}], **fields}


def responses(data):
    text = {"type": "input_text", "text": "What is it?"}
    part = {"type": "input_image", "image_url": url_of(data), "detail": "auto"}
    return {"input": [{"role": "user", "content": [text, part]}]}


def anthropic(data):
    source = {"type": "base64", "media_type": TYPES[data], "data": encoded(data)}
    text = {"type": "text", "text": "What is it?"}
    content = [text, {"type": "image", "source": source}]
    return {"max_tokens": 9, "messages": [{"role": "user", "content": content}]}


def gemini(data):
    part = {"inlineData": {"mimeType": TYPES[data], "data": encoded(data)}}
    return {"contents": [{"parts": [{"text": "What is it?"}, part]}]}


PROTOCOLS = {
    "/v1/chat/completions": chat,
    "/v1/responses": responses,
    "/v1/messages": anthropic,
    "/v1beta/models/m:generateContent": gemini,
}


class Gateway:
    """A gateway of the model, and one session."""

    def __init__(self, gateway, renderer, engine, key):
        self.gateway, self.renderer, self.engine, self.key = (
            *(gateway, renderer, engine),
            key,
        )

    async def post(self, path, body):
        headers = {"x-session-key": self.key}
        return await self.gateway.http.post(path, json=body, headers=headers)

    def reply(self, text):
        return [*self.renderer.encode(text).ids.tolist(), self.renderer.end_ids[0]]


@pytest.fixture
async def opened(model, tmp_path):
    """Start a gateway with limits, and open a session."""
    async with AsyncExitStack() as stack:

        async def start(limits=None, **options):
            renderer, engine = load_renderer(model), SeeingEngine()
            gateway = await stack.enter_async_context(
                in_process(
                    engine,
                    renderer,
                    tmp_path / "run",
                    images=load_image_model(model),
                    image_limits=limits,
                    **options,
                )
            )
            return Gateway(gateway, renderer, engine, await gateway.open_key())

        yield start


def n_tokens_of(model, data):
    """What the model's own processor makes of the pixels."""
    processor = AutoImageProcessor.from_pretrained(model)
    (grid,) = processor(images=[Image.open(io.BytesIO(data))])["image_grid_thw"]
    return int(np.prod(grid)) // processor.merge_size**2


@pytest.mark.parametrize("data", [PNG, JPEG], ids=["png", "jpeg"])
@pytest.mark.parametrize("path", PROTOCOLS)
async def test_an_image_is_placed_sent_stored_and_logged(opened, model, path, data):
    gateway = await opened()
    gateway.engine.script = [gateway.reply("A colour.")]
    answer = await gateway.post(path, PROTOCOLS[path](data))
    assert answer.status_code == 200, answer.text
    renderer, name = gateway.renderer, sha256(data).hexdigest()
    before = renderer.encode(
        "<|im_start|>user\nWhat is it?<|vision_start|>"
    ).ids.tolist()
    after = renderer.encode(
        "<|vision_end|><|im_end|>\n<|im_start|>assistant\n"
    ).ids.tolist()
    n, token = n_tokens_of(model, data), load_image_model(model).token_id
    consumed = [*before, *[token] * n, *after]
    assert gateway.engine.prompts == [consumed]
    ((image,),) = gateway.engine.images
    span = (len(before), len(before) + n)
    assert (image.start, image.stop) == span
    assert (image.media_type, image.data) == (TYPES[data], data)
    stored = gateway.gateway.log.directory / "images"
    assert [each.name for each in stored.iterdir()] == [name]
    assert (stored / name).read_bytes() == data
    log = read_log(gateway.gateway.log.path)
    tk.validate(log)
    assert engine_ids(log)["prompt_ids"].to_pylist() == [consumed]
    assert log["mm_items"].to_pylist() == [
        [
            {
                "kind": "image",
                "hash": name,
                "token_id": token,
                "start": span[0],
                "stop": span[1],
            }
        ]
    ]
    body = json.loads(log["messages"][0][0]["body"].as_py())
    assert body["content"] == [
        {"type": "text", "text": "What is it?"},
        {"type": "image", "sha256": name},
    ]


@pytest.mark.parametrize("form", ["full", "delta"])
async def test_a_conversation_with_images_is_appended_and_is_one_row(opened, form):
    gateway = await opened(form=form)
    gateway.engine.script = [gateway.reply(text) for text in ("red", "green", "both")]
    body = chat(PNG)
    for text, data in (("red", JPEG), ("green", PNG), ("both", None)):
        answer = await gateway.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        body["messages"].append({"role": "assistant", "content": text})
        if data is not None:
            body["messages"] += chat(data)["messages"]
    engine = gateway.engine
    sent = [[image.data for image in images] for images in engine.images]
    assert sent == [[PNG], [PNG, JPEG], [PNG, JPEG, PNG]]
    turns = tk.read_turns(gateway.gateway.log.directory)
    assert turns["render_reason"].to_pylist() == ["opening", None, None]
    assert engine_ids(tk.expand(turns))["prompt_ids"].to_pylist() == engine.prompts
    if form == "delta":
        assert turns["base_turn"].to_pylist() == [None, 0, 1]
    rows = tk.linearize(turns, "faithful", reward=1.0)
    (items,) = rows["mm_items"].to_pylist()
    names = [sha256(data).hexdigest() for data in (PNG, JPEG, PNG)]
    assert [item["hash"] for item in items] == names
    assert tk.verify(rows, turns, "faithful").num_rows == 0
    # the texts beside the images are attributed, what is in them is not
    shown = tk.expand(turns)["prompt_message_index"].to_pylist()
    assert all(indices is not None for indices in shown)


async def test_the_limit_of_images_is_that_of_the_complete_prompt(opened):
    gateway = await opened(ImageLimits(max_images=1))
    gateway.engine.script = [gateway.reply("red")]
    body = chat(PNG)
    assert (await gateway.post("/v1/chat/completions", body)).status_code == 200
    body["messages"].append({"role": "assistant", "content": "red"})
    body["messages"] += chat(JPEG)["messages"]
    answer = await gateway.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "2 images; the limit is 1"


NUMBERED = r"""
{%- set n = namespace(images=0) -%}
{%- for m in messages -%}
    {{- "<|im_start|>" ~ m.role ~ "\n" -}}
    {%- if m.content is string -%}
        {{- m.content -}}
    {%- else -%}
        {%- for part in m.content -%}
            {%- if part.type == "text" -%}
                {{- part.text -}}
            {%- else -%}
                {%- set n.images = n.images + 1 -%}
                {{- n.images ~ ": <|image_pad|>" -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- "<|im_end|>\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\n" -}}{%- endif -%}
"""


async def test_a_template_that_numbers_the_images(opened):
    gateway = await opened()
    renderer = gateway.renderer
    renderer.__init__(renderer.tokenizer, NUMBERED)
    gateway.engine.script = [gateway.reply("red"), gateway.reply("green")]
    body = chat(PNG)
    await gateway.post("/v1/chat/completions", body)
    body["messages"].append({"role": "assistant", "content": "red"})
    body["messages"] += chat(JPEG)["messages"]
    answer = await gateway.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    turns = tk.read_turns(gateway.gateway.log.directory)
    assert turns["render_reason"].to_pylist() == ["opening", None]
    text = renderer.decode(np.array(gateway.engine.prompts[1]), ended=False)
    assert "What is it?2: <|image_pad|>" in text


async def test_another_image_in_its_place_is_another_prompt(opened):
    gateway = await opened()
    other = drawn("PNG", (80, 100), (10, 10, 200))
    TYPES[other] = "image/png"
    gateway.engine.script = [gateway.reply("red"), gateway.reply("blue")]
    body = chat(PNG)
    await gateway.post("/v1/chat/completions", body)
    changed = chat(other)["messages"]
    changed += [{"role": "assistant", "content": "red"}, *chat(PNG)["messages"]]
    answer = await gateway.post("/v1/chat/completions", {"messages": changed})
    assert answer.status_code == 200
    turns = tk.read_turns(gateway.gateway.log.directory)
    assert turns["render_reason"].to_pylist() == ["opening", "moved"]
    first, second = engine_ids(turns)["prompt_ids"].to_pylist()
    assert second[: len(first)] == first
    start = turns["mm_items"][0][0]["start"].as_py()
    assert tk.compact(turns)["shared_length"].to_pylist() == [0, start]
    assert tk.linearize(turns, "faithful", reward=1.0).num_rows == 2


async def test_a_tool_s_result_may_be_an_image(opened):
    gateway = await opened()
    gateway.engine.script = [gateway.reply("seen")]
    body = anthropic(JPEG)
    result = {"type": "tool_result", "tool_use_id": "t", "content": None}
    (message,) = body["messages"]
    result["content"] = message["content"]
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    body["messages"] = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": "well?"}]},
    ]
    answer = await gateway.post("/v1/messages", body)
    assert answer.status_code == 200, answer.text
    ((image,),) = gateway.engine.images
    assert image.data == JPEG


async def test_the_name_of_the_token_in_a_text_is_no_image(opened):
    gateway = await opened()
    gateway.engine.script = [gateway.reply("hm")]
    body = chat(PNG)
    body["messages"][0]["content"][0]["text"] = "<|image_pad|>"
    answer = await gateway.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    ((image,),) = gateway.engine.images
    text = gateway.renderer.decode(np.array(gateway.engine.prompts[0]), ended=False)
    assert text.count("<|image_pad|>") == 1 + image.stop - image.start


async def test_a_reply_with_the_token_of_an_image_ends_the_use_of_images(opened, model):
    gateway = await opened()
    token = load_image_model(model).token_id
    gateway.engine.script = [[token, gateway.renderer.end_ids[0]], gateway.reply("x")]
    body = chat(PNG)
    answer = await gateway.post("/v1/chat/completions", body)
    body["messages"].append(answer.json()["choices"][0]["message"])
    body["messages"].append({"role": "user", "content": "and?"})
    answer = await gateway.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "image_token_sampled"


@cases(
    "url, limits, code",
    {
        "bytes": (url_of(PNG), {"max_bytes": 99}, "image_too_large"),
        "pixels": (url_of(PNG), {"max_pixels": 99}, "image_too_large"),
        "count": (url_of(PNG), {"max_images": 0}, "too_many_images"),
        "total": (url_of(PNG), {"max_total_bytes": 9}, "log_full"),
        "request": (url_of(PNG), {"max_request_bytes": 9}, "image_too_large"),
        "base64": ("data:image/png;base64,?", {}, "invalid_image"),
        "not-ascii": ("data:image/png;base64,é", {}, "invalid_image"),
        "no-image": ("data:image/png;base64,eA==", {}, "invalid_image"),
        "url": ("http://example.org/", {}, "image_not_fetched"),
        "file": ("file:///etc/passwd", {}, "image_not_fetched"),
    },
)
async def test_what_is_refused(opened, url, limits, code):
    gateway = await opened(ImageLimits(**limits))
    body = chat(PNG)
    body["messages"][0]["content"][1]["image_url"]["url"] = url
    answer = await gateway.post("/v1/chat/completions", body)
    assert answer.status_code == (507 if code == "log_full" else 400)
    assert answer.json()["error"]["code"] == code
    assert gateway.engine.prompts == []
    assert stored_in(gateway) == []


async def test_system_prompts_and_replies_have_no_images(opened):
    gateway = await opened()
    for role in ("system", "assistant"):
        body = chat(PNG)
        body["messages"][0]["role"] = role
        answer = await gateway.post("/v1/chat/completions", body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "unsupported_content"


async def test_a_template_that_leaves_an_image_out(opened):
    gateway = await opened()
    renderer = gateway.renderer
    renderer.__init__(renderer.tokenizer, "{{ messages[0].role }}<|im_end|>")
    answer = await gateway.post("/v1/chat/completions", chat(PNG))
    assert answer.status_code == 400
    assert "0 places for 1 images" in answer.json()["error"]["message"]


def test_a_processor_whose_libraries_are_missing(model, monkeypatch):
    def absent(*_, **__):
        raise ImportError("\nIt requires the PIL library.\nInstall it.\n")

    for processor in (AutoProcessor, AutoImageProcessor):
        monkeypatch.setattr(processor, "from_pretrained", absent)
    rule = r"It requires the PIL library\. Install it\. Or serve with --images refuse"
    with pytest.raises(ValueError, match=rule):
        load_image_model(model)


def stored_in(gateway):
    """The names in the folder of images."""
    directory = gateway.gateway.log.directory / "images"
    return [each.name for each in directory.iterdir()] if directory.exists() else []


async def test_a_count_and_a_call_that_fails_store_no_image(opened):
    gateway = await opened()
    # the script is empty
    assert (await gateway.post("/v1/messages", anthropic(PNG))).status_code == 500
    assert stored_in(gateway) == []
    counted = await gateway.post("/v1/messages/count_tokens", anthropic(PNG))
    gateway.engine.script = [gateway.reply("red")]
    answer = await gateway.post("/v1/messages", anthropic(JPEG))
    assert (counted.status_code, answer.status_code) == (200, 200)
    assert counted.json()["input_tokens"] > 0
    assert stored_in(gateway) == [sha256(JPEG).hexdigest()]


async def test_the_images_of_a_run_have_a_limit_together(opened):
    limit = len(PNG) + len(JPEG) - 1
    gateway = await opened(ImageLimits(max_total_bytes=limit))
    gateway.engine.script = [gateway.reply("red"), gateway.reply("still red")]
    # one that is stored takes no more room
    asked = [await gateway.post("/v1/messages", anthropic(data)) for data in (PNG, PNG)]
    asked.append(await gateway.post("/v1/messages", anthropic(JPEG)))
    assert [answer.status_code for answer in asked] == [200, 200, 507]
    assert f"the limit is {limit}" in asked[2].text
    assert stored_in(gateway) == [sha256(PNG).hexdigest()]


def watch_files(monkeypatch, called):
    """Call a function whenever a file of an image is opened to be written."""
    opened = Path.open

    def watched(path, *arguments, **options):
        if path.parent.name == "images" and arguments == ("wb",):
            called()
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", watched)


async def test_images_are_not_written_on_the_event_loop(opened, monkeypatch):
    threads = []
    watch_files(monkeypatch, lambda: threads.append(threading.current_thread()))
    gateway = await opened()
    gateway.engine.script = [gateway.reply("red"), gateway.reply("still red")]
    for _ in range(2):
        answer = await gateway.post("/v1/messages", anthropic(PNG))
        assert answer.status_code == 200, answer.text
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()
    assert stored_in(gateway) == [sha256(PNG).hexdigest()]


async def test_requests_with_the_same_new_image(tmp_path):
    # a second file, or the same one counted twice, would exceed the limit
    limits = ImageLimits(max_total_bytes=len(PNG))
    store = ImageStore(tmp_path / "images", limits)
    image = open_image(PNG, "here", limits)
    await asyncio.gather(*(store.write([image, image]) for _ in range(2)))
    assert [file.name for file in store.directory.iterdir()] == [image.name]
    assert (store.directory / image.name).read_bytes() == PNG


@pytest.mark.parametrize("broken", ["write", "replace", "log"])
async def test_an_image_whose_turn_is_not_written(opened, monkeypatch, broken):
    def fail(*_):
        raise OSError("no space")

    gateway = await opened()
    gateway.engine.script = [gateway.reply("red")]
    if broken == "write":
        watch_files(monkeypatch, fail)
    elif broken == "replace":
        monkeypatch.setattr(Path, "replace", fail)
    else:
        monkeypatch.setattr(gateway.gateway.log, "append", fail)
    answer = await gateway.post("/v1/messages", anthropic(PNG))
    assert answer.status_code == 500
    assert "no space" in answer.text
    assert read_log(gateway.gateway.log.path).num_rows == 0
    # only a complete file has the name of an image
    name = sha256(PNG).hexdigest()
    left = {"write": [], "replace": [f".{name}"], "log": [name]}
    assert stored_in(gateway) == left[broken]
    monkeypatch.undo()
    gateway.engine.script = [gateway.reply("red")]
    answer = await gateway.post("/v1/messages", anthropic(PNG))
    assert answer.status_code == 200
    assert stored_in(gateway) == [name]


async def test_an_image_is_known_as_long_as_one_of_its_requests(tmp_path):
    store = ImageStore(tmp_path)

    async def take():
        image = open_image(PNG, "here", store.limits)
        return store.take([image])

    first, second = await take(), await take()
    name = first[0].name
    del second
    assert store.requested[name].data == PNG
    del first
    with pytest.raises(KeyError):
        store.requested[name]
