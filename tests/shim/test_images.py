"""Images in every protocol: placed in prompts, given to the engine, stored, logged."""

import asyncio
import base64
import io
import json
import os
import threading
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor

import trajkit as tk
from tests.shim.clients import FIELDS, NAMES, Session, image_part, saying
from tests.shim.fakes import (
    ScriptedEngine,
    cases,
    fails,
    said,
    sampled,
    write_processor,
)
from trajkit.turns import engine_ids
from trajkit_shim.chat.images import (
    _write,
    load_image_model,
    open_image,
    write_images,
)
from trajkit_shim.prompting.render import load_renderer

pytestmark = pytest.mark.anyio

VOCAB = 3072


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model's directory: tokenizer, processor, and the ids in its configuration."""
    directory = tmp_path_factory.mktemp("vision")
    write_processor(directory)
    backend = load_renderer(directory).tokenizer.backend_tokenizer
    token = backend.token_to_id("<|image_pad|>")
    config = {"image_token_id": token, "vocab_size": VOCAB}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def drawn(kind, size, colour):
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind)
    return file.getvalue()


PNG = drawn("PNG", (80, 100), (200, 10, 10))
JPEG = drawn("JPEG", (300, 60), (10, 200, 10))


def type_of(data):
    return "image/jpeg" if data[:2] == b"\xff\xd8" else "image/png"


def name_of(data):
    return sha256(data).hexdigest()


def asking(data, name="openai_chat", text="What is it?"):
    """A user's message with an image."""
    part = image_part(name, type_of(data), base64.b64encode(data).decode())
    return saying(name, text, part)


class Seeing(Session):
    """A session of a gateway whose engine takes images."""

    def says(self, *replies):
        """Script the engine's replies: texts, or ids."""
        renderer, engine = self.gateway.renderer, self.gateway.engine
        for ids in replies:
            ids = renderer.encode(ids).ids if isinstance(ids, str) else ids
            ids = np.array([*ids, renderer.end_ids[0]], np.int32)
            given = {"output_logprobs": None, "weight_versions": ()}
            engine.script.append(sampled("", output_ids=ids, **given))

    async def look(self, *messages, status=200, name="openai_chat", **fields):
        """Ask with these messages, of which bytes are a user's with an image."""
        sent = [asking(m, name) if isinstance(m, bytes) else m for m in messages]
        return await self.post(name, status, **{FIELDS[name]: sent}, **fields)

    async def refused(self, status, code, *messages, **fields):
        error = (await self.look(*messages, status=status, **fields)).json()["error"]
        assert error["code"] == code
        return error["message"]

    def prompt_text(self):
        prompt = self.gateway.engine.prompts[-1]
        return self.gateway.renderer.decode(prompt, ended=False)

    @property
    def seen(self):
        """The images of each call."""
        return [list(request.images) for request in self.gateway.engine.requests]

    def stored(self):
        """The names in the folder of images."""
        folder = self.gateway.directory / "images"
        return [each.name for each in folder.iterdir()] if folder.exists() else []


@pytest.fixture
def opened(model, tmp_path, start):
    """Start a gateway, and open a session."""

    async def opened(*script, template=None, **options):
        engine = ScriptedEngine(context=10_000, vocab_size=VOCAB)
        engine.takes_images = True
        gateway = await start(
            engine=engine,
            renderer=load_renderer(model, template),
            directory=tmp_path / "run",
            images=load_image_model(model),
            **options,
        )
        session = await gateway.open()
        session.__class__ = Seeing
        session.says(*script)
        return session

    return opened


def n_tokens_of(model, data):
    """What the model's own processor makes of the pixels."""
    processor = AutoImageProcessor.from_pretrained(model)
    (grid,) = processor(images=[Image.open(io.BytesIO(data))])["image_grid_thw"]
    return int(np.prod(grid)) // processor.merge_size**2


@pytest.mark.parametrize("data", [PNG, JPEG], ids=["png", "jpeg"])
@pytest.mark.parametrize("name", NAMES)
async def test_an_image_is_placed_sent_stored_and_logged(opened, model, name, data):
    session = await opened("A colour.")
    await session.look(data, name=name)
    renderer, hashed = session.gateway.renderer, name_of(data)
    begin = "<|im_start|>user\nWhat is it?<|vision_start|>"
    end = "<|vision_end|><|im_end|>\n<|im_start|>assistant\n"
    before, after = (renderer.encode(text).ids.tolist() for text in (begin, end))
    n, token = n_tokens_of(model, data), load_image_model(model).token_id
    consumed = [*before, *[token] * n, *after]
    assert session.gateway.engine.prompts[0].tolist() == consumed
    ((image,),) = session.seen
    span = {"start": len(before), "stop": len(before) + n}
    assert (image.start, image.stop) == (*span.values(),)
    assert (image.media_type, image.data) == (type_of(data), data)
    assert session.stored() == [hashed]
    stored = session.gateway.directory / "images" / hashed
    assert stored.read_bytes() == data
    log = session.gateway.table()
    tk.validate(log)
    assert engine_ids(log)["prompt_ids"].to_pylist() == [consumed]
    item = {"kind": "image", "hash": hashed, "token_id": token, **span}
    assert log["mm_items"].to_pylist() == [[item]]
    body = json.loads(log["messages"][0][0]["body"].as_py())
    text = {"type": "text", "text": "What is it?"}
    assert body["content"] == [text, {"type": "image", "sha256": hashed}]


@pytest.mark.parametrize("form", ["full", "delta"])
async def test_a_conversation_with_images_is_appended_and_is_one_row(opened, form):
    session = await opened("red", "green", "both", form=form, attributed=True)
    messages = []
    for data, text in ((PNG, "red"), (JPEG, "green"), (PNG, "both")):
        messages += [data]
        await session.look(*messages)
        messages += [said(text)]
    sent = [[image.data for image in images] for images in session.seen]
    assert sent == [[PNG], [PNG, JPEG], [PNG, JPEG, PNG]]
    turns = session.gateway.table()
    assert turns["render_reason"].to_pylist() == ["opening", None, None]
    prompts = [prompt.tolist() for prompt in session.gateway.engine.prompts]
    assert engine_ids(tk.expand(turns))["prompt_ids"].to_pylist() == prompts
    if form == "delta":
        assert turns["base_turn"].to_pylist() == [None, 0, 1]
    rows = tk.linearize(turns, "faithful", reward=1.0)
    (items,) = rows["mm_items"].to_pylist()
    assert [item["hash"] for item in items] == [*map(name_of, (PNG, JPEG, PNG))]
    assert tk.verify(rows, turns, "faithful").num_rows == 0
    # the texts beside the images are attributed, what is in them is not
    shown = tk.expand(turns)["prompt_message_index"].to_pylist()
    assert all(indices is not None for indices in shown)


async def test_the_bytes_of_images_do_not_stay_in_memory(opened):
    session = await opened("red")
    await session.look(PNG + bytes(1 << 20))
    shown = await session.gateway.get("/prompts")
    assert shown["cache_bytes"] < 1 << 16


async def test_a_template_that_numbers_the_images(opened, model):
    counted = '{%- set n.images = n.images + (part.type == "image") -%}'
    counted += '{{- n.images ~ ": <|vision_start|>'
    own = load_renderer(model).chat_template
    template = own.replace('{{- "<|vision_start|>', counted)
    template = "{%- set n = namespace(images=0) -%}" + template
    session = await opened("red", "green", template=template)
    await session.look(PNG)
    await session.look(PNG, said("red"), JPEG)
    reasons = session.gateway.table()["render_reason"].to_pylist()
    assert reasons == ["opening", None]
    assert "What is it?2: <|vision_start|>" in session.prompt_text()


async def test_another_image_in_its_place_is_another_prompt(opened):
    session, other = await opened("red", "blue"), drawn("PNG", (80, 100), (10, 10, 200))
    await session.look(PNG)
    await session.look(other, said("red"), PNG)
    turns = session.gateway.table()
    assert turns["render_reason"].to_pylist() == ["opening", "unknown_reply"]
    first, second = engine_ids(turns)["prompt_ids"].to_pylist()
    assert second[: len(first)] == first
    begin = turns["mm_items"][0][0]["start"].as_py()
    assert tk.compact(turns)["shared_length"].to_pylist() == [0, begin]
    assert tk.linearize(turns, "faithful", reward=1.0).num_rows == 2


async def test_a_tool_s_result_may_be_an_image(opened):
    session = await opened("seen")
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    content = asking(JPEG, "anthropic")["content"]
    result = {"type": "tool_result", "tool_use_id": "t", "content": content}
    sent = [saying("anthropic", "look"), said([call]), saying("anthropic", result)]
    await session.look(*sent, name="anthropic")
    ((image,),) = session.seen
    assert image.data == JPEG


async def test_the_token_of_an_image_in_a_text_and_in_a_reply(opened, model):
    session = await opened([load_image_model(model).token_id], "x")
    asked = asking(PNG, text="<|image_pad|>")
    message = (await session.look(asked)).json()["choices"][0]["message"]
    ((image,),) = session.seen
    n_pads = session.prompt_text().count("<|image_pad|>")
    assert n_pads == 1 + image.stop - image.start
    sent = [asked, message, saying("openai_chat", "and?")]
    await session.refused(400, "image_token_sampled", *sent)


@cases(
    "url, code",
    {
        "pixels": (None, "image_too_large"),
        "base64": ("data:image/png;base64,?", "invalid_image"),
        "not-ascii": ("data:image/png;base64,é", "invalid_image"),
        "no-image": ("data:image/png;base64,eA==", "invalid_image"),
        "url": ("http://example.org/", "image_not_fetched"),
        "file": ("file:///etc/passwd", "image_not_fetched"),
    },
)
async def test_what_is_refused(opened, monkeypatch, url, code):
    monkeypatch.setattr("trajkit_shim.chat.images.MAX_PIXELS", 99)
    session, message = await opened(), asking(PNG)
    if url is not None:
        message["content"][1]["image_url"]["url"] = url
    await session.refused(400, code, message)
    assert (session.seen, session.stored()) == ([], [])


async def test_where_no_image_may_be(opened):
    session = await opened()
    for role in ("system", "assistant"):
        await session.refused(400, "unsupported_content", {**asking(PNG), "role": role})
    session.gateway.renderer.__init__(
        session.gateway.renderer.tokenizer, "{{ messages[0].role }}<|im_end|>"
    )
    error = (await session.look(PNG, status=400)).json()["error"]
    assert "0 places for 1 images" in error["message"]


def test_a_processor_whose_libraries_are_missing(model, monkeypatch):
    absent = fails("\nIt requires the PIL library.\nInstall it.\n", raised=ImportError)
    for processor in (AutoProcessor, AutoImageProcessor):
        monkeypatch.setattr(processor, "from_pretrained", absent)
    rule = r"It requires the PIL library\. Install it\. Or serve with --images refuse"
    with pytest.raises(ValueError, match=rule):
        load_image_model(model)


# What is stored


async def test_a_count_and_a_call_that_fails_store_no_image(opened):
    session = await opened()
    # the script is empty
    await session.look(PNG, status=500)
    path = "/v1/messages/count_tokens"
    counted = await session.look(PNG, name="anthropic", path=path)
    assert counted.json()["input_tokens"] > 0
    assert session.stored() == []
    session.says("red")
    await session.look(JPEG)
    assert session.stored() == [name_of(JPEG)]


async def test_requests_with_the_same_new_image(tmp_path, monkeypatch):
    """It is not written on the event loop; another worker may write it, too."""
    image, folder, replace = open_image(PNG, "here"), tmp_path / "images", Path.replace
    threads = []

    def late(path, target):
        threads.append(threading.current_thread())
        if len(threads) == 1:
            with monkeypatch.context() as patch:
                patch.setattr(os, "getpid", lambda: 1)
                _write([image], folder, False)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", late)
    writing = (write_images({image.name: image}, folder) for _ in range(2))
    await asyncio.gather(*writing)
    assert [file.name for file in folder.iterdir()] == [image.name]
    assert (folder / image.name).read_bytes() == PNG
    assert threading.current_thread() not in threads


@pytest.mark.parametrize("broken", ["write", "replace", "log"])
async def test_an_image_whose_turn_is_not_written(opened, monkeypatch, broken):
    session, fail = await opened("red", "red"), fails("no space")
    places = {"write": (Path, "open"), "replace": (Path, "replace")}
    with monkeypatch.context() as patch:
        patch.setattr(*places.get(broken, (session.gateway.log, "append")), fail)
        error = (await session.look(PNG, status=500)).json()["error"]
    assert "no space" in error["message"]
    assert session.gateway.turns() == []
    # only a complete file stays
    name = name_of(PNG)
    assert session.stored() == ([name] if broken == "log" else [])
    await session.look(PNG)
    assert name in session.stored()
    # also if somebody removes it
    (session.gateway.directory / "images" / name).unlink()
    session.says("red")
    await session.look(PNG)
    assert name in session.stored()
