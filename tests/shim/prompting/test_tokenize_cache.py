"""What was tokenized before is not tokenized again, and makes no difference."""

import json
import traceback

import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Encoding, Tokenizer

from tests.shim.clients import in_process
from tests.shim.fakes import (
    AS_STRING,
    ScriptedEngine,
    byte_renderer,
    byte_tokenizer,
    rendered,
)
from tests.strategies import spoken_texts
from trajkit_shim.engines.embedded import load_tokenizer
from trajkit_shim.errors import EngineError
from trajkit_shim.prompting import tokenize_cache
from trajkit_shim.prompting.render import ChatRenderer, _longest_token
from trajkit_shim.prompting.tokenize_cache import NO_LIMIT

EMBEDDED = load_tokenizer()
UNCACHED = ChatRenderer(EMBEDDED, cache_bytes=0)
SMALL = ChatRenderer(EMBEDDED, cache_bytes=4000)
LARGE = ChatRenderer(EMBEDDED)

conversations = st.lists(
    st.lists(
        spoken_texts | st.sampled_from(["return self", " \n", "naïve 👍"]), min_size=1
    ),
    max_size=4,
)


def messages_of(texts):
    return [
        {"role": ("user", "assistant")[i % 2], "content": text}
        for i, text in enumerate(texts)
    ]


def placed(renderer, text):
    """Where each token of a text without marks stands, now and once more."""
    if text != LARGE.without_mark(text):
        return []
    return [renderer.encode(text).offsets for _ in range(2)]


@given(conversations)
def test_a_cached_prompt_is_the_uncached_one(conversations):
    for texts in conversations:
        messages = messages_of(texts)
        expected = rendered(UNCACHED, messages, None)
        text = UNCACHED.text(messages, None)
        spelled = UNCACHED.without_mark(text)
        if spelled == text:
            # as the tokenizer has it, in one piece
            whole = EMBEDDED(text, add_special_tokens=False)["input_ids"]
            assert expected.tolist() == whole
        for renderer in (SMALL, LARGE):
            for _ in range(2):
                assert rendered(renderer, messages, None).tolist() == expected.tolist()
                encoded = renderer.encode(renderer.text(messages, None))
                assert encoded.ids.tolist() == expected.tolist()
        assert UNCACHED.encode(text).ids.tolist() == expected.tolist()
        text = LARGE.text(messages, None)
        for one, other in zip(placed(LARGE, text), placed(SMALL, text), strict=True):
            assert np.array_equal(one, other)
    assert SMALL._piece.n_bytes <= 4000
    assert UNCACHED._piece.n_bytes == 0


def test_only_what_is_new_is_tokenized(monkeypatch):
    renderer, lengths = byte_renderer(AS_STRING), []
    encode = tokenize_cache.encode

    def watched(tokenizer, text, max_tokens):
        lengths.append(len(text))
        return encode(tokenizer, text, max_tokens)

    def tokenized(texts):
        lengths.clear()
        rendered(renderer, messages_of(texts), None)
        return sum(lengths)

    monkeypatch.setattr(tokenize_cache, "encode", watched)
    texts = ["a" * 1000, "b" * 1000, "c" * 1000]
    assert tokenized(texts) > 3000
    assert 500 < tokenized([*texts, "d" * 500]) < 600
    # in the middle of a conversation too
    assert 500 < tokenized([texts[0], "e" * 500, texts[2]]) < 600


def test_one_that_is_larger_than_all_room_drives_nothing_out():
    renderer = ChatRenderer(byte_tokenizer(), AS_STRING, cache_bytes=50_000)
    rendered(renderer, messages_of(["a" * 1000]), None)
    kept = renderer._piece.n_bytes
    renderer.encode("b" * 100_000)
    assert renderer._piece.n_bytes == kept


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
    encode = tokenize_cache.encode

    def watched(tokenizer, text, max_tokens):
        encoded.append(len(text))
        return encode(tokenizer, text, max_tokens)

    longest = len("</tool_call>")
    async with in_process(ScriptedEngine(), renderer, tmp_path) as gateway:
        client = await gateway.open()
        monkeypatch.setattr(tokenize_cache, "encode", watched)
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
        tokenize_cache.encode(EMBEDDED.backend_tokenizer, "a b c " * 2000, 10)
    kept = [
        value
        for frame, _ in traceback.walk_tb(caught.value.__traceback__)
        for value in frame.f_locals.values()
    ]
    assert not [value for value in kept if isinstance(value, Encoding)]
