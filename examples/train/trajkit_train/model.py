"""The model of the training demo: its tokenizer, its chat template and its weights."""

import re
import string

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import trajkit.torch.attention  # noqa: F401  registers the attention
from trajkit_train.task import NUMBERS, PEOPLE, PLACES

END = "<|im_end|>"
_SPECIAL = ("<|pad|>", "<|im_start|>", END)
_MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_PHRASES = (
    *('{"name": "', '", "arguments": {"name": "', '"}}', "ask", "open", "find "),
    *("error", " is a person", " is a place", " is a number"),
    *("user\n", "assistant\n", "tool\n", "system\n", "tools: "),
)

TEMPLATE = """
{%- if tools -%}
  {{- "<|im_start|>system\ntools: " -}}
  {%- for tool in tools -%}
    {{- tool.function.name -}}{{- " " if not loop.last -}}
  {%- endfor -%}
  {{- "<|im_end|>" -}}
{%- endif -%}
{%- for message in messages -%}
  {{- "<|im_start|>" + message.role + "\n" -}}
  {{- message.content if message.content else "" -}}
  {%- for call in message.tool_calls or [] -%}
    {{- "<tool_call>\n{\\"name\\": " + (call.function.name | tojson) -}}
    {{- ", \\"arguments\\": " + (call.function.arguments | tojson) -}}
    {{- "}\n</tool_call>" -}}
  {%- endfor -%}
  {{- "<|im_end|>" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\n" -}}{%- endif -%}
"""
"""ChatML with tools. It leaves out the reasoning of earlier replies, as templates of
reasoning models do, and writes each tool call in one way."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words: a token for each phrase, name and character."""
    words = sorted((*_PHRASES, *PEOPLE, *PLACES, *NUMBERS), key=len, reverse=True)
    vocabulary = ["<unk>", *words]
    vocabulary += [c for c in string.printable if c not in vocabulary]
    ids = {word: i for i, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, "<unk>"))
    # the longest word first
    pattern = Regex("|".join(map(re.escape, words)) + r"|[\s\S]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in _SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in _MARKUP])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        chat_template=TEMPLATE,
        eos_token=END,
        pad_token=_SPECIAL[0],
        clean_up_tokenization_spaces=False,
    )


def make_model(
    n_vocabulary: int, *, seed: int, width: int, layers: int
) -> LlamaForCausalLM:
    """Return a Llama with random weights that trains on tree packs."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=n_vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        # a name is easily copied if it is read and written alike
        tie_word_embeddings=True,
        initializer_range=0.8 / width**0.5,
    )
    config._attn_implementation = "trajkit"
    return LlamaForCausalLM(config)
