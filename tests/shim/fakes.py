"""A tokenizer of single bytes, a ChatML template, and an engine with a script."""

import asyncio
import errno
import json
import os
import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partialmethod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from trajkit_shim.chat.request import logged_message
from trajkit_shim.engines.base import (
    EngineInfo,
    EngineRequest,
    Sample,
    Sampling,
    WeightSpan,
)
from trajkit_shim.engines.embedded import END, chat_files
from trajkit_shim.json_input import Json
from trajkit_shim.prompting.conversation import (
    Budget,
    Conversation,
    KeptIds,
    Node,
    next_position,
)
from trajkit_shim.prompting.render import (
    ChatRenderer,
    Ids,
    ModelTokenizer,
    embedded_renderer,
)
from trajkit_shim.replies import FORMS, FormParser

TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif -%}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": ARGUMENTS}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
AS_STRING = TEMPLATE.replace("ARGUMENTS", "{{ call.function.arguments }}")
AS_JSON = TEMPLATE.replace("ARGUMENTS", "{{ call.function.arguments | tojson }}")

TOOL = {
    "type": "function",
    "function": {"name": "bash", "parameters": {"type": "object"}},
}


def cases(names: str, table: dict[str, Any]) -> Any:
    """Run a test once for each value of a table, which its names tell apart."""
    return pytest.mark.parametrize(names, table.values(), ids=table)


def user(text: Json) -> dict[str, Json]:
    return {"role": "user", "content": text}


def said(text: Json = "", **fields: Json) -> dict[str, Json]:
    """An assistant's message."""
    return {"role": "assistant", "content": text, **fields}


def tool(call_id: str, text: Json = "", **fields: Json) -> dict[str, Json]:
    """A call's result."""
    return {"role": "tool", "content": text, "tool_call_id": call_id, **fields}


def called(call_id: str, name: str = "f", arguments: Json = "{}") -> dict[str, Json]:
    """A call in an assistant's message."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def sampled_call(name: str = "bash", arguments: str = '{"command":  "ls"}') -> str:
    """A call as models with this template sample it."""
    body = f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'
    return f"<tool_call>\n{body}\n</tool_call>"


@contextmanager
def raises(
    error: type[Exception], match: str | None = None, **fields: object
) -> Iterator[None]:
    """Check that an error is raised in these words, and with these fields."""
    with pytest.raises(error, match=match) as caught:
        yield
    assert {name: getattr(caught.value, name) for name in fields} == fields


def fails(*error: object, raised: type[Exception] = OSError) -> Callable[..., Any]:
    """A function that raises an error, whatever it is given."""

    def failing(*_: object, **__: object) -> None:
        raise raised(*error)

    return failing


FULL = fails(errno.ENOSPC, "No space left on device")


@contextmanager
def full_disk(place: object = os, what: str = "write") -> Iterator[None]:
    """Meanwhile nothing can be written, or nothing of a kind to a log."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, what, FULL)
        yield


async def until(condition: Callable[[], object]) -> None:
    """Let others run until something is true."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


def parse_reply(text, tools=(), form=FORMS["hermes"], *, opened=False):
    """A reply by the gateway's own parser."""
    return FormParser(form).read(text, tools, opened=opened)


def engine_request(prompt_ids: Any, **changes: Any) -> EngineRequest:
    """A call of one session; ``changes`` are of the request or of its sampling."""
    own = {field.name for field in fields(EngineRequest)}
    sampling = {k: changes.pop(k) for k in changes.keys() - own}
    request = EngineRequest(
        prompt_ids=np.asarray(prompt_ids, np.int32),
        sampling=Sampling(**{"max_new_tokens": 1, **sampling}),
        request_id="r1",
        session_id="s1",
    )
    return replace(request, **changes)


def byte_level() -> Tokenizer:
    """Ids 0 to 255 are the bytes, then the added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special, markup = ("<|im_start|>", "<|im_end|>"), ("<tool_call>", "</tool_call>")
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in markup])
    return tokenizer


def byte_tokenizer() -> Any:
    """The same as transformers loads it."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), eos_token="<|im_end|>"
    )


def load_tokenizer() -> Any:
    """The embedded engine's tokenizer for transformers, with its chat template."""
    # otherwise transformers warns about missing PyTorch, which is not needed
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import PreTrainedTokenizerFast

    tokenizer, template = chat_files()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template,
        eos_token=END,
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )


def write_processor(directory: Path) -> None:
    """Write a tokenizer with places for images, and the processor of a Qwen2.5-VL."""
    shown = "<|vision_start|><|image_pad|><|vision_end|>"
    tokenizer, part = load_tokenizer(), "{{- part.text -}}"
    image = f'{{{{- "{shown}" if part.type == "image" else part.text -}}}}'
    tokenizer.add_tokens([*re.findall("<.*?>", shown), "<|video_pad|>"], True)
    assert part in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(part, image)
    tokenizer.save_pretrained(directory)
    settings = {
        "processor_class": "Qwen2_5_VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112},
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    path = Path(directory, "preprocessor_config.json")
    path.write_text(json.dumps(settings), "utf-8")


def byte_renderer(template: str = AS_STRING) -> ChatRenderer:
    """The renderer of that tokenizer."""
    named = {"eos_token": "<|im_end|>"}
    return ChatRenderer(ModelTokenizer(byte_level(), None, named), template)


RENDERER = byte_renderer()
EMBEDDED = embedded_renderer()


def remember(
    session: Conversation,
    position: bytes,
    message: Json,
    budget: Budget | None = None,
    **fields: Any,
) -> Node:
    """Record a reply at a position of a session; ``fields`` are of its node."""
    ids, base = fields.pop("ids", None), fields.pop("base", None)
    node = Node(
        message=message,
        logged=(logged := logged_message(message)),
        position=position,
        after=next_position(position, logged.key),
        turn=0,
        agent_id=None,
        kept=KeptIds(ids),
        n_ids=0 if ids is None else len(ids),
        between=None,
        offered=b"",
        closed=True,
    )
    node = replace(node, **fields)
    session.add(node, base, budget or Budget(1 << 40))
    return node


def rendered(renderer: ChatRenderer, messages: Any, tools: Any = None) -> Ids:
    """The ids of the prompt for the next assistant message."""
    return renderer.encode(renderer.text(messages, tools)).ids


def text_of(ids: Any, renderer: ChatRenderer = RENDERER) -> str:
    """A text with its control tokens."""
    return renderer.decode(np.asarray(ids, np.int32), ended=False)


def sampled(text: str, **changes: Any) -> Sample:
    """The bytes of a text and the end of the message, each of logprob -place / 1000."""
    encoded = RENDERER.encode(text + "<|im_end|>").ids
    ids = encoded if changes.get("finish_reason", "stop") == "stop" else encoded[:-1]
    whole = Sample(
        output_ids=ids,
        output_logprobs=-np.arange(len(ids), dtype=np.float32) / 1000,
        finish_reason="stop",
        weight_versions=(WeightSpan("v0", 0, len(ids)),),
        cached_tokens=0,
    )
    return replace(whole, **changes)


Scripted: TypeAlias = str | Sample | Exception | Callable[[], Any]


class ScriptedEngine:
    """The double of an engine in this process: it gives the scripted replies in order.

    A text is given as `sampled`, an exception is raised, and what a function returns is
    awaited for the reply.
    """

    takes_images = False

    def __init__(
        self, *script: Scripted, context: int = 2000, vocab_size: int = 260
    ) -> None:
        self.script = deque(script)
        self.requests: list[EngineRequest] = []
        self.closed = False
        self.limits = EngineInfo(
            model="scripted", vocab_size=vocab_size, max_context_tokens=context
        )

    @property
    def prompts(self) -> list[Ids]:
        return [request.prompt_ids for request in self.requests]

    @property
    def samplings(self) -> list[Sampling]:
        return [request.sampling for request in self.requests]

    async def info(self) -> EngineInfo:
        return self.limits

    async def generate(self, request: EngineRequest) -> Sample:
        self.requests.append(request)
        reply = self.script.popleft()
        if callable(reply):
            reply = await reply()
        if isinstance(reply, Exception):
            raise reply
        return sampled(reply) if isinstance(reply, str) else reply

    async def close(self) -> None:
        self.closed = True


class Held:
    """A scripted reply that waits until it is let go."""

    events: Any = asyncio

    def __init__(self, reply: "str | Sample | Exception") -> None:
        self.reply = reply
        self.entered = self.events.Event()
        self.release = self.events.Event()
        self.cancelled = self.events.Event()

    async def holds(self, asking: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """The task of a call, once it waits for this reply."""
        call = asyncio.create_task(asking)
        await self.entered.wait()
        return call

    async def released(self) -> None:
        await self.release.wait()

    async def __call__(self) -> "str | Sample | Exception":
        self.entered.set()
        try:
            await self.released()
        except asyncio.CancelledError:
            self.release.set()
            self.cancelled.set()
            raise
        return self.reply


class Threaded(Held):
    """The same, let go or made to fail by another thread."""

    events = threading

    async def released(self) -> None:
        await asyncio.to_thread(self.release.wait)


class Updatable(ScriptedEngine):
    """Notes what it is told to do. ``fails``: by the name of what fails."""

    def __init__(self, *script: Scripted) -> None:
        super().__init__(*script)
        self.told: list[tuple[object, ...]] = []
        self.fails: dict[str, Exception] = {}
        self._noted = queue.SimpleQueue()

    async def _note(self, *what: object) -> None:
        self.told.append(what)
        self._noted.put(what)
        if failure := self.fails.get(what[0]):
            raise failure

    pause = partialmethod(_note, "pause")
    update_weights = partialmethod(_note, "update")
    resume = partialmethod(_note, "resume")

    async def next(self) -> tuple[object, ...]:
        """The next thing that it was told, from another loop."""
        return await asyncio.to_thread(self._noted.get, timeout=60)
