"""Texts are tokenized in pieces between control tokens, which makes no difference."""

import json
import traceback

import openai
import pytest
from hypothesis import given
from tokenizers import Encoding, Tokenizer

from tests.shim.clients import in_process
from tests.shim.fakes import (
    AS_STRING,
    ScriptedEngine,
    byte_renderer,
    byte_tokenizer,
    load_tokenizer,
    rendered,
)
from tests.strategies import spoken_texts
from trajkit_shim.errors import EngineError
from trajkit_shim.prompting import render
from trajkit_shim.prompting.render import (
    NO_LIMIT,
    ChatRenderer,
    _longest_token,
    embedded_renderer,
    encode,
    load_renderer,
)

EMBEDDED = load_tokenizer()
RENDERER = ChatRenderer(EMBEDDED)


def messages_of(texts):
    return [
        {"role": ("user", "assistant")[i % 2], "content": text}
        for i, text in enumerate(texts)
    ]


@given(spoken_texts, spoken_texts)
def test_the_pieces_have_the_ids_of_the_text(one, other):
    text = RENDERER.text(messages_of([one, other]), None)
    if text == RENDERER.without_mark(text):
        whole = EMBEDDED(text, add_special_tokens=False)["input_ids"]
        assert RENDERER.encode(text).ids.tolist() == whole


@pytest.mark.parametrize("config", ["here", "inside", "named"])
def test_a_directory_is_read_without_transformers(tmp_path, monkeypatch, config):
    """Its template may be a file, in the configuration, or one of several there."""
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    EMBEDDED.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = EMBEDDED.chat_template
    fields = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|new|>"}
    if config == "here":
        (tmp_path / "chat_template.jinja").write_text(template)
    else:
        several = [{"name": "default", "template": template}]
        fields["chat_template"] = several if config == "named" else template
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    renderer, own = load_renderer(tmp_path), embedded_renderer()
    messages = messages_of(["hi <|new|>", "there", "and?"])
    assert renderer.text(messages[:1], None) != own.text(messages[:1], None)
    assert renderer.end_ids == own.end_ids == RENDERER.end_ids
    for each in (renderer, own):
        ids = each.encode(each.text(messages[1:], None)).ids.tolist()
        assert ids == rendered(RENDERER, messages[1:]).tolist()
    # a token that the vocabulary lacks is added
    assert len(renderer.tokenizer) == len(own.tokenizer) + 1 == len(EMBEDDED) + 1


def test_a_directory_that_needs_transformers(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ValueError, match="needs transformers: pip install"):
        load_renderer(tmp_path)


def test_a_tokenizer_that_begins_a_text_otherwise_is_given_it_whole():
    from tokenizers import Tokenizer, pre_tokenizers

    tokenizer = byte_tokenizer()
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement="_", prepend_scheme="first"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    from transformers import PreTrainedTokenizerFast

    first = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    renderer = ChatRenderer(first, AS_STRING)
    assert not renderer.keeps_apart
    messages = messages_of(["a", "b"])
    whole = first(renderer.text(messages, None), add_special_tokens=False)["input_ids"]
    assert rendered(renderer, messages, None).tolist() == whole
    assert renderer.encode(renderer.text(messages, None)).ids.tolist() == whole


@pytest.mark.anyio
async def test_a_prompt_that_cannot_fit_is_not_tokenized(tmp_path, monkeypatch):
    """Its length in characters suffices. A shorter one is tokenized, and refused."""
    renderer, encoded = byte_renderer(), []

    def watched(tokenizer, text, max_tokens):
        encoded.append(len(text))
        return encode(tokenizer, text, max_tokens)

    longest = len("</tool_call>")
    async with in_process(ScriptedEngine(), renderer, tmp_path) as gateway:
        client = await gateway.open()
        monkeypatch.setattr(render, "encode", watched)
        for n_chars in (2000 * longest + longest, 2500):
            with pytest.raises(openai.BadRequestError, match="at least") as caught:
                await client.chat.completions.create(
                    model="x", messages=[{"role": "user", "content": "a" * n_chars}]
                )
            assert caught.value.code == "context_length_exceeded"
        assert gateway.turns() == []
    assert max(encoded) < 2600


@pytest.mark.parametrize(
    ("change", "bounded"),
    [
        (lambda parts: None, True),
        (lambda parts: parts.update(normalizer={"type": "NFC"}), True),
        (lambda parts: parts.update(normalizer={"type": "Lowercase"}), False),
        (lambda parts: parts["model"].update(fuse_unk=True), False),
        (lambda parts: parts["added_tokens"][0].update(rstrip=True), False),
    ],
    ids=["bytes", "NFC", "another normalizer", "fused unknown", "stripping"],
)
def test_the_longest_token_bounds_a_text_only_where_it_surely_does(change, bounded):
    parts = json.loads(byte_renderer()._backend.to_str())
    change(parts)
    tokenizer = Tokenizer.from_str(json.dumps(parts))
    longest = _longest_token(tokenizer, parts)
    assert (longest < NO_LIMIT) == bounded
    if bounded:
        for text in ("</tool_call>" * 9, "e\u0301" * 50, "\u1112\u1161\u11ab" * 30):
            n_tokens = len(tokenizer.encode(text).ids)
            assert len(text) // longest <= n_tokens


def test_the_error_of_a_text_that_is_too_long_does_not_keep_its_encoding():
    """Garbage collections would free it, and other threads would wait."""
    with pytest.raises(EngineError, match="at least 6001 tokens") as caught:
        encode(EMBEDDED.backend_tokenizer, "a b c " * 2000, 10)
    kept = [
        value
        for frame, _ in traceback.walk_tb(caught.value.__traceback__)
        for value in frame.f_locals.values()
    ]
    assert not [value for value in kept if isinstance(value, Encoding)]
