"""A tokenizer of single bytes, a ChatML template, and an engine with a script."""

import asyncio
from collections import deque
from dataclasses import replace

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trajkit_shim.engine import EngineError, EngineInfo, Sample, WeightSpan
from trajkit_shim.render import ChatRenderer

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


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are the bytes, then the added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")]
    )
    tokenizer.add_tokens(
        [
            AddedToken(text, special=False, normalized=False)
            for text in ("<tool_call>", "</tool_call>")
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


def byte_renderer(template: str = AS_STRING) -> ChatRenderer:
    return ChatRenderer(byte_tokenizer(), template)


class ScriptedEngine:
    """Gives the scripted replies in order; a reply that is an exception is raised.

    A text is sampled as its bytes' ids and the end-of-message id, each with the logprob
    -(its place) / 1000.
    """

    def __init__(self, *script: str | Sample | Exception) -> None:
        self.script = deque(script)
        self.renderer = byte_renderer()
        self.prompts: list[np.ndarray] = []
        self.samplings = []
        self.cancelled = 0
        self.closed = False
        # set: calls wait until it is cleared by being set
        self.gate: asyncio.Event | None = None
        self.entered = asyncio.Event()
        self.limits = EngineInfo(
            model="scripted", vocab_size=260, max_context_tokens=2000
        )

    async def info(self) -> EngineInfo:
        return self.limits

    def sample(self, text: str, **changes: object) -> Sample:
        ids = self.renderer._encode(text + "<|im_end|>")
        whole = Sample(
            output_ids=ids,
            output_logprobs=-np.arange(len(ids), dtype=np.float32) / 1000,
            finish_reason="stop",
            weight_versions=(WeightSpan("v0", 0, len(ids)),),
            cached_tokens=0,
        )
        return replace(whole, **changes)

    async def generate(self, prompt_ids, sampling, *, request_id, session_id):
        self.prompts.append(prompt_ids)
        self.samplings.append(sampling)
        reply = self.script.popleft()
        self.entered.set()
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(reply, Exception):
            raise reply
        return self.sample(reply) if isinstance(reply, str) else reply

    async def close(self) -> None:
        self.closed = True


__all__ = ["AS_JSON", "AS_STRING", "EngineError", "ScriptedEngine", "byte_renderer"]
