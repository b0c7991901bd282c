"""A reply that is told while it is sampled: nothing of it is taken back."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.shim.fakes import (
    RENDERER,
    TEMPLATE,
    byte_tokenizer,
    sampled,
)
from tests.strategies import call_shards
from trajkit_shim.chat.reply import Identity, Usage, extends, make_reply
from trajkit_shim.chat.request import ChatRequest
from trajkit_shim.chat.sampling_params import SamplingParams
from trajkit_shim.engines.embedded import load_tokenizer
from trajkit_shim.prompting.render import ChatRenderer
from trajkit_shim.protocols import PROTOCOLS
from trajkit_shim.replies.parse import Decoder, IncrementalParser, Parser
from trajkit_shim.replies.parsers import HERMES

CALL = '<tool_call>\n{"name": "f", "arguments": {"n":  1.50e1}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object"}},
}
EMBEDDED = ChatRenderer(load_tokenizer())


def spaced_tokenizer():
    """A tokenizer whose words carry the space before them, but for the first one's."""
    words = [
        "<unk>",
        "</s>",
        "\u2581a",
        "\u2581b",
        "c",
        ".",
        *(f"<0x{n:02X}>" for n in range(256)),
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={word: n for n, word in enumerate(words)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


TOKENIZERS = {
    "bytes": byte_tokenizer(),
    "embedded": load_tokenizer(),
    "spaced": spaced_tokenizer(),
}
RENDERERS = {
    name: ChatRenderer(tokenizer, TEMPLATE) for name, tokenizer in TOKENIZERS.items()
}


def pieces(ids, cuts):
    ends = sorted({min(cut, len(ids)) for cut in cuts} | {len(ids)})
    return [ids[start:stop] for start, stop in pairwise([0, *ends])]


cuts = st.lists(st.integers(0, 60), max_size=20)


@given(st.sampled_from(sorted(RENDERERS)), st.data(), cuts)
def test_pieces_decode_to_the_text(name, data, cuts):
    renderer = RENDERERS[name]
    ids = data.draw(st.lists(st.integers(0, len(renderer.tokenizer) - 1), max_size=40))
    decoder = Decoder(renderer)
    told = "".join(decoder.feed(piece) for piece in pieces(ids, cuts))
    assert renderer.decode(np.array(ids, np.int32), ended=False).startswith(told)
    # a letter ends what was held back
    letter = TOKENIZERS[name].convert_tokens_to_ids("c")
    told += decoder.feed([letter])
    whole = renderer.decode(np.array([*ids, letter], np.int32), ended=False)
    assert told == whole


def test_bytes_are_told_once_their_run_is_over():
    renderer = RENDERERS["spaced"]
    letter, nul, half = (
        TOKENIZERS["spaced"].convert_tokens_to_ids(word)
        for word in ("c", "<0x00>", "<0x80>")
    )
    decoder = Decoder(renderer)
    assert [decoder.feed([one]) for one in (letter, nul, half, letter)] == [
        "c",
        "",
        "",
        "\ufffd\ufffdc",
    ]


def test_a_character_is_told_once_it_is_whole():
    decoder = Decoder(RENDERER)
    ids = sampled("a\U0001f600b").output_ids.tolist()
    assert [decoder.feed([one]) for one in ids] == [
        "a",
        "",
        "",
        "",
        "\U0001f600",
        "b",
        "",
    ]


def increments_of(text, *, stop=(), tools=(TOOL,), opened=False, cuts=()):
    """The replies that are told while a text is sampled, and the whole one."""
    ids = sampled(text).output_ids.tolist()
    names = {"form": HERMES, "tools": tools, "opened": opened}
    increments = IncrementalParser(RENDERER, Parser(**names), stop)
    identity = Identity()

    def reply(parsed, finish=""):
        usage = Usage(prompt_tokens=7, output_tokens=len(ids), cached_tokens=None)
        return make_reply(parsed, finish, model="m", usage=usage, identity=identity)

    told = [increments.feed(piece) for piece in pieces(ids, cuts)]
    parser = Parser(**names)
    found = [at for mark in stop if (at := text.find(mark)) >= 0]
    parser.feed(text[: min(found, default=None)])
    return [reply(one) for one in told if one is not None], reply(parser.end(), "stop")


texts = st.lists(
    call_shards
    | st.sampled_from([CALL, "\u00e9", "END", "\U0001f600", "<think>hm</think>"]),
    max_size=8,
).map("".join)


@given(
    texts,
    st.lists(st.sampled_from(["END", "D\n", "a"]), max_size=2),
    st.booleans(),
    cuts,
)
def test_a_reply_begins_with_what_was_told_of_it(text, stop, opened, cuts):
    told, whole = increments_of(text, stop=stop, opened=opened, cuts=cuts)
    for before, after in pairwise([*told, whole]):
        assert extends(after, before)


def test_the_first_stop_string_of_a_piece_ends_the_reply():
    told, whole = increments_of("b END a, b", stop=("a", "END"))
    assert [reply.text for reply in told] == ["b "]
    assert whole.text == "b "


# The events of a stream, as lists that are equal where a client reads the same.


def events_of(data):
    lines = [line for line in data.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def without(value, *names):
    return {k: v for k, v in value.items() if k not in names}


def joined(items):
    """Neighbours of one kind as one: ``(kind, text)``; a kind of None stands alone."""
    out = []
    for kind, text in items:
        if out and kind is not None and out[-1][0] == kind:
            out[-1] = (kind, out[-1][1] + text)
        else:
            out.append((kind, text))
    return out


def read_anthropic(events):
    for event in events:
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            (field,) = delta.keys() - {"type"}
            yield f"{event['index']} {delta['type']}", delta[field]
        else:
            yield None, event


def read_chat(events):
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            (field,) = delta.keys() & {"content", "reasoning_content"} or [None]
            if field and "role" not in delta:
                yield field, delta[field]
            else:
                yield None, choice


def read_responses(events):
    for event in events:
        if event["type"].endswith("text.delta"):
            yield f"{event['item_id']} {event['type']}", event["delta"]
        else:
            told = without(event, "sequence_number")
            if "response" in told:
                told["response"] = without(told["response"], "id", "created_at")
            yield None, told


def read_gemini(events):
    for event in events:
        (candidate,) = event["candidates"]
        (part,) = candidate["content"]["parts"]
        if part.get("text"):
            yield json.dumps(without(part, "text")), part["text"]
        elif "functionCall" in part:
            yield None, part
    yield None, candidate["finishReason"]


READERS = {
    "anthropic": read_anthropic,
    "openai_chat": read_chat,
    "openai_responses": read_responses,
    "gemini": read_gemini,
}
ASKED = ChatRequest(
    messages=[{"role": "user", "content": "a"}],
    tools=[TOOL],
    sampling=SamplingParams(),
    stream=True,
)


@given(st.sampled_from(PROTOCOLS), texts, cuts, st.booleans())
def test_the_events_of_a_growing_reply_are_those_of_the_whole(
    protocol, text, cuts, cut
):
    """Order and all, once neighbouring deltas are put together."""
    told, whole = increments_of(text, cuts=cuts)
    whole = replace(whole, cut=cut)
    grown = protocol.events(ASKED)
    data = b"".join(grown.partial(reply) for reply in told)
    data += b"".join(grown.reply(whole))
    at_once = b"".join(protocol.events(ASKED).reply(whole))
    read = READERS[protocol.name]
    assert joined(read(events_of(data))) == joined(read(events_of(at_once)))
    assert (b"[DONE]" in data) == (b"[DONE]" in at_once)


def test_calls_are_told_before_the_reply_ends():
    told, _ = increments_of(f"a{CALL}\n{CALL} b", cuts=range(200))
    known = [(reply.text, len(reply.calls)) for reply in told]
    assert ("a", 0) in known
    assert ("a", 1) in known
    assert ("a", 2) in known
