"""Prompts that are built behind what was sampled, and why others are rendered."""

import asyncio
import gc
import json
import weakref
from dataclasses import asdict
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

import trajkit as tk
from tests.shim.clients import in_process
from tests.shim.fakes import (
    AS_STRING,
    RENDERER,
    TOOL,
    ScriptedEngine,
    byte_renderer,
    byte_tokenizer,
    parse_reply,
    rendered,
    sampled,
)
from tests.strategies import good_calls, plain_texts, spoken_texts
from tests.tables import link_by
from trajkit_shim.chat.reply import Usage, canonical_reply, make_reply
from trajkit_shim.chat.request import ChatRequest, logged_message
from trajkit_shim.engines.embedded import EmbeddedEngine, load_tokenizer
from trajkit_shim.errors import EngineError
from trajkit_shim.prompting.known_requests import Mark, ReadRequest
from trajkit_shim.prompting.prompts import SHORT_TAIL, CompleteTextError, Prompts
from trajkit_shim.prompting.render import ChatRenderer
from trajkit_shim.prompting.reply_matching import (
    ReplyIndex,
    next_position,
)
from trajkit_shim.prompting.template_probe import RenderedPrefix
from trajkit_shim.prompting.token_cache import (
    Branch,
    CacheBudget,
    CachedPath,
    TokenCache,
)

EMBEDDED = ChatRenderer(load_tokenizer())
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command":  "ls"}}\n</tool_call>'
USAGE = Usage(prompt_tokens=1, output_tokens=1, cached_tokens=None)
LATER = "{%- for message in messages -%}"

DROPS_REASONING = AS_STRING.replace(
    "{{ message.content }}",
    "{% if message.reasoning_content and loop.last %}<think>"
    "{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}",
)
KEEPS_REASONING = DROPS_REASONING.replace(" and loop.last", "")
TRIMS = AS_STRING.replace("{{ message.content }}", "{{ message.content | trim }}")
# the last reply is written otherwise than those before it
REWRITES = AS_STRING.replace(
    "{{ message.content }}",
    "{% if message.role == 'assistant' and loop.index0 + 2 == messages | length %}"
    "[last]{% endif %}{{ message.content }}",
)
# tools stand before the last message
MOVES_TOOLS = AS_STRING.replace(
    LATER,
    LATER + "{% if tools and loop.last %}{{ tools | tojson }}{% endif %}",
)
OPENS_REASONING = AS_STRING.replace(
    "<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif"
)
NO_END = AS_STRING.replace("<|im_end|>", "<|im_start|>")
TWO_ENDS = AS_STRING.replace("\n</tool_call>", "<|im_end|>\n</tool_call>")
NO_TOOLS = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + AS_STRING


def said(role, content, **fields):
    return {"role": role, "content": content, **fields}


def probed(template, *, tools=True):
    return Prompts(byte_renderer(template)).probe(tools=tools)


@pytest.mark.parametrize(
    ("template", "found"),
    [
        pytest.param(AS_STRING, {}, id="ChatML"),
        pytest.param(KEEPS_REASONING, {"drops_reasoning": ()}, id="keeps reasoning"),
        pytest.param(DROPS_REASONING, {}, id="drops reasoning"),
        pytest.param(TRIMS, {}, id="trims"),
        pytest.param(
            OPENS_REASONING,
            {"leaves": "<think>\n"},
            id="the reply begins inside of its reasoning",
        ),
    ],
)
def test_templates_whose_prompts_may_be_extended(template, found):
    probe = probed(template)
    assert probe.safe, probe.why
    expected = {"leaves": "", "drops_reasoning": ("user", "tool")}
    assert {name: getattr(probe, name) for name in expected} == expected | found


def test_the_embedded_template_drops_reasoning_when_the_user_speaks():
    probe = Prompts(EMBEDDED).probe(tools=True)
    assert (probe.safe, probe.drops_reasoning) == (True, ("user",))


@pytest.mark.parametrize(
    ("template", "says"),
    [
        pytest.param(REWRITES, "a later message changes the text", id="rewrites"),
        pytest.param(MOVES_TOOLS, "a later message changes", id="tools move on"),
        pytest.param(NO_END, "no token ends a reply", id="no end"),
        pytest.param(TWO_ENDS, "more than one end, where tools", id="two ends"),
        pytest.param(
            AS_STRING.replace("{{ message.content }}", "{{ message.content | upper }}"),
            "missing after the reply, in plain talk",
            id="says it otherwise",
        ),
        pytest.param(NO_TOOLS, "rejects the messages", id="takes no tools"),
        pytest.param(
            AS_STRING.replace(
                "{%- if add_gen", "{% if not add_gen %}-{% endif %}{%- if add_gen"
            ),
            "a later message changes",
            id="the end of a conversation is written",
        ),
    ],
)
def test_templates_whose_prompts_are_rendered(template, says):
    probe = probed(template)
    assert not probe.safe
    assert says in probe.why


def test_a_template_may_be_safe_without_tools_alone():
    assert probed(MOVES_TOOLS, tools=False).safe
    assert probed(NO_TOOLS, tools=False).safe


@pytest.mark.parametrize(
    ("template", "mode", "says"),
    [
        pytest.param(AS_STRING, "render", "render", id="render"),
        pytest.param(KEEPS_REASONING, "append", "append", id="append"),
        pytest.param(
            DROPS_REASONING,
            "append",
            "append; rendered where a tool or user message drops reasoning",
            id="drops reasoning",
        ),
        pytest.param(
            MOVES_TOOLS,
            "append",
            "append; rendered with tools: a later message changes the text before it; "
            "rendered where a tool or user message drops reasoning",
            id="unsafe",
        ),
    ],
)
def test_what_is_done_in_one_line(template, mode, says):
    assert Prompts(byte_renderer(template), mode).summary() == says


def test_a_tokenizer_that_does_not_encode_piece_by_piece():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken("<|eat|>", rstrip=True)]}
    )
    probe = Prompts(ChatRenderer(tokenizer, AS_STRING)).probe(tools=False)
    assert not probe.safe
    assert "piece by piece" in probe.why


def test_a_tokenizer_that_cannot_keep_the_words_of_the_probe_apart():
    tokenizer = byte_tokenizer()
    special = AddedToken("probe", special=True), AddedToken("<|eat|>", rstrip=True)
    tokenizer.add_special_tokens({"additional_special_tokens": [*special]})
    assert not ChatRenderer(tokenizer, AS_STRING).keeps_apart


class Conversation:
    """A session's books, and what a gateway does with each call."""

    def __init__(self, renderer, mode="append", *, cache_bytes=1 << 30, check=False):
        self.renderer = renderer
        self.prompts = Prompts(renderer, mode, check=check)
        self.echo, self.held = ReplyIndex(), TokenCache()
        self.budget = CacheBudget(cache_bytes)

    def ask(self, messages, tools=None, *, attributed=True):
        self.restored = self.echo.restore(messages)
        self.tools = tools
        self.prompt = self.prompts.build(
            self.restored, tools, self.echo, self.held, attributed=attributed
        )
        return self.prompt

    def reply(self, ids):
        """Sample these ids; the message that the client sees."""
        ended = bool(len(ids)) and ids[-1] in self.renderer.end_ids
        text = self.renderer.decode(ids, ended=ended)
        opened = self.renderer.opens_reasoning(self.prompt.ids)
        parsed = parse_reply(text, self.tools, opened=opened)
        message = canonical_reply(make_reply(parsed, "stop", model="m", usage=USAGE))
        path = self.prompts.cacheable_path(
            self.prompt,
            ids,
            next_position(self.restored.position, logged_message(message).key),
        )
        self.echo.remember(self.restored.position, message)
        if path is not None:
            self.held.remember(path, self.budget)
        # a client adds nothing of the gateway's own
        return {name: message[name] for name in message if name != "sampled"}


def canonical(renderer, text):
    """A reply in the tokenizer's own spelling, special tokens in it as text."""
    end = np.array(renderer.end_ids, np.int32)
    return np.concatenate([renderer._piece(text).ids, end])


def letters(renderer, text):
    """A reply of one token per byte."""
    pieces = [renderer._piece(letter).ids for letter in text]
    return np.concatenate([*pieces, np.array(renderer.end_ids, np.int32)])


turns = st.lists(
    st.tuples(
        spoken_texts
        | good_calls
        | st.builds("a{}\n{}".format, plain_texts, good_calls),
        st.lists(
            st.tuples(st.sampled_from(["user", "tool", "system"]), spoken_texts),
            min_size=1,
            max_size=3,
        ),
    ),
    max_size=4,
)


@given(turns, st.booleans())
def test_where_nothing_drifts_append_is_render_to_the_token(turns, tools):
    tools = [TOOL] if tools else None
    appending, rendering = Conversation(RENDERER), Conversation(RENDERER, "render")
    messages = [said("system", "Be <|im_end|> brief."), said("user", "go")]
    for text, new in turns:
        prompt = appending.ask(messages, tools)
        assert prompt.ids.tolist() == rendering.ask(messages, tools).ids.tolist()
        assert prompt.built == ("append" if len(messages) > 2 else "render")
        reply = appending.reply(canonical(RENDERER, text))
        calls = reply.get("tool_calls") or [{"id": "call_0"}]
        messages = [*messages, reply]
        messages += [
            said(role, text, tool_call_id=calls[0]["id"])
            if role == "tool"
            else said(role, text)
            for role, text in new
        ]


@given(turns)
def test_append_says_what_render_says_and_begins_with_what_is_held(turns):
    """In tokens that no tokenizer would choose, and with a template that trims."""
    appending, rendering = Conversation(EMBEDDED), Conversation(EMBEDDED, "render")
    messages = [said("user", "go")]
    held = np.empty(0, np.int32)
    for text, new in turns:
        text = f"a{text}b"
        prompt = appending.ask(messages)
        assert prompt.ids[: len(held)].tolist() == held.tolist()
        whole = rendering.ask(messages).ids
        spelled = [EMBEDDED.decode(ids, ended=False) for ids in (prompt.ids, whole)]
        assert spelled[0] == spelled[1]
        ids = letters(EMBEDDED, text) if text.isascii() else canonical(EMBEDDED, text)
        messages = [*messages, appending.reply(ids)]
        messages += [said(role, text) for role, text in new]
        held = np.concatenate([prompt.ids, ids])


@given(turns)
def test_attribution_tells_of_a_built_prompt_what_it_tells_of_a_rendered_one(turns):
    appending, rendering = Conversation(RENDERER), Conversation(RENDERER, "render")
    messages = [said("user", "go")]
    for text, new in turns:
        for each in (appending, rendering):
            each.ask(messages)
        shown, whole = (each.prompt.message_index for each in (appending, rendering))
        n_base, n_known = appending.prompt.base.n_ids, appending.prompt.n_known
        # what comes after the latest reply
        assert (n_known > 0) == (n_base > 0)
        assert not n_known or messages[n_known - 1]["role"] == "assistant"
        index = np.where(whole >= n_known, whole - n_known, -1)
        assert shown.tolist() == index[len(index) - len(shown) :].tolist()
        assert (index >= 0).sum() == (shown >= 0).sum()
        messages = [*messages, appending.reply(canonical(RENDERER, text))]
        messages += [said(role, text) for role, text in new]


@pytest.mark.parametrize(
    ("template", "text", "renderings"),
    [
        pytest.param(AS_STRING, "all is well", 1, id="once"),
        pytest.param(AS_STRING, "all is well\n", 2, id="with outer white space"),
        pytest.param(AS_STRING, "user", 2, id="a word of the template"),
        pytest.param(AS_STRING, "an <|im_end|> too", 1, id="a special token"),
        pytest.param(AS_STRING, "<|im_end|>", 2, id="a special token alone"),
        pytest.param(AS_STRING, " \n", 1, id="white space"),
        pytest.param(TRIMS, "all is well", 1, id="not trimmed"),
        pytest.param(TRIMS, "all is well\n", 3, id="trimmed"),
    ],
)
def test_what_stands_there_once_is_told_without_another_rendering(
    monkeypatch, template, text, renderings
):
    renderer = byte_renderer(template)
    appending, rendering = Conversation(renderer), Conversation(renderer, "render")
    messages = [said("user", "u")]
    appending.ask(messages)
    reply = appending.reply(canonical(renderer, "Yes."))
    messages += [reply, said("tool", text, tool_call_id="call_0"), said("user", "&?")]
    rendering.ask(messages)
    whole, rendered = rendering.prompt.message_index, []
    text_of = renderer.text

    def counted(*given):
        rendered.append(given)
        return text_of(*given)

    monkeypatch.setattr(renderer, "text", counted)
    prompt = appending.ask(messages)
    shown = prompt.message_index
    assert (prompt.built, len(rendered)) == ("append", renderings)
    assert shown.tolist() == np.maximum(whole - 2, -1)[prompt.base.n_ids :].tolist()
    assert (0 in shown) == bool(text.strip())


def test_a_prompt_behind_one_that_nobody_can_tell_of():
    template = AS_STRING.replace(
        "{{ message.content }}",
        "{{ message.content }}{{ '!' if message.content | length > 20 }}",
    )
    conversation = Conversation(byte_renderer(template))
    conversation.ask([said("user", "u")])
    assert conversation.prompt.message_index is None
    reply = conversation.reply(canonical(RENDERER, "Yes, indeed."))
    prompt = conversation.ask([said("user", "u"), reply, said("user", "")])
    # what is new of it holds no content, and what was before is taken for structure
    assert prompt.built == "append"
    assert set(prompt.message_index.tolist()) == {-1}


def start(conversation, text="Yes.", *, tools=None, opening=None):
    """An opening, and the messages behind which the next prompt is built."""
    messages = opening or [said("system", "s"), said("user", "u")]
    conversation.ask(messages, tools)
    return [*messages, conversation.reply(canonical(conversation.renderer, text))]


def reason(conversation, messages, tools=None):
    prompt = conversation.ask(messages, tools)
    if prompt.reason is not None:
        whole = rendered(conversation.renderer, conversation.restored.messages, tools)
        assert prompt.ids.tolist() == whole.tolist()
    return prompt.reason


NEXT = said("user", "next")


def test_why_a_request_is_rendered():
    conversation = Conversation(RENDERER)
    messages = start(conversation, tools=[TOOL])
    system, user, reply = messages
    renamed = {"type": "function", "function": {"name": "sh"}}
    assert reason(conversation, [*messages, NEXT], [TOOL]) is None
    assert reason(conversation, [said("user", "u")], [TOOL]) == "opening"
    assert reason(conversation, [*messages, NEXT]) == "tools"
    assert reason(conversation, [*messages, NEXT], [renamed]) == "tools"
    other = said("system", "other")
    assert reason(conversation, [other, user, reply, NEXT], [TOOL]) == "moved"
    edited = [system, said("user", "you"), reply, NEXT]
    assert reason(conversation, edited, [TOOL]) == "moved"
    unknown = [system, user, said("assistant", "No."), NEXT]
    assert reason(conversation, unknown, [TOOL]) == "unknown_reply"
    beyond = [*messages, NEXT, said("assistant", "No."), NEXT]
    assert reason(conversation, beyond, [TOOL]) == "unknown_reply"
    assert reason(Conversation(RENDERER, "render"), [user]) == "chosen"


def test_the_last_turn_before_an_edit_is_extended():
    conversation = Conversation(RENDERER)
    messages = start(conversation, "a <b")
    n_first = len(conversation.prompt.ids)
    messages += [said("user", "and?"), said("user", "so?")]
    conversation.ask(messages)
    messages = [*messages, conversation.reply(canonical(RENDERER, "later")), NEXT]
    edited = [*messages[:3], said("user", "and then?"), *messages[4:]]
    assert reason(conversation, edited) == "moved"
    prompt = conversation.prompt
    assert prompt.built == "render"
    assert (prompt.base.n_ids > n_first, prompt.n_known) == (True, 3)
    conversation.reply(canonical(RENDERER, "last"))
    branches = {path.branch for path in conversation.held._paths.values()}
    assert len(branches) == 2


def test_a_reply_that_did_not_end_itself():
    conversation = Conversation(RENDERER)
    opening = [said("user", "u")]
    conversation.ask(opening)
    reply = conversation.reply(canonical(RENDERER, "Yes.")[:-1])
    assert reason(conversation, [*opening, reply, NEXT]) == "unclosed"
    # what was rendered for it is gone on from
    messages = [*opening, reply, NEXT, conversation.reply(canonical(RENDERER, "b"))]
    assert reason(conversation, [*messages, NEXT]) is None
    conversation.ask(opening)
    nothing = conversation.reply(np.empty(0, np.int32))
    assert reason(conversation, [*opening, nothing, NEXT]) == "unclosed"


def test_a_turn_is_extended_again_after_a_reply_to_it_was_cut():
    conversation = Conversation(RENDERER)
    opening = [said("user", "u")]
    conversation.ask(opening)
    messages = [*opening, conversation.reply(canonical(RENDERER, "a")), NEXT]
    first = conversation.ask(messages)
    conversation.reply(canonical(RENDERER, "cut")[:-1])
    again = conversation.ask(messages)
    assert again.built == "append"
    assert again.ids.tolist() == first.ids.tolist()


def test_a_template_that_is_not_safe():
    conversation = Conversation(byte_renderer(REWRITES))
    messages = start(conversation)
    assert len(conversation.held._paths) == 0
    assert reason(conversation, [*messages, NEXT]) == "template"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(
            (LATER, "{% if messages[-1].content == 'next' %}!{% endif %}" + LATER),
            "rewritten",
            id="what stands",
        ),
        pytest.param(
            (
                "{%- endfor %}<|im_end|>",
                "{%- endfor %}{% if messages[-1].content != 'next' or loop.index < 3 %}"
                "<|im_end|>{% endif %}",
            ),
            "unended",
            id="the end of a reply and of what follows",
        ),
        pytest.param(
            (
                "{%- endfor %}<|im_end|>",
                "{%- endfor %}{% if messages[-1].content != 'next' or loop.index != 3 %}"
                "<|im_end|>{% endif %}",
            ),
            "hidden",
            id="the end of a reply",
        ),
        pytest.param(
            (
                "{{ message.content }}",
                "{{ '-' if message.content == 'next' else message.content }}",
            ),
            "hidden",
            id="what a message says",
        ),
    ],
)
def test_a_template_that_shows_its_whims_later(change, expected):
    renderer = byte_renderer(AS_STRING.replace(*change))
    conversation = Conversation(renderer, check=True)
    messages = start(conversation)
    assert conversation.prompts.probe(tools=False).safe
    assert reason(conversation, [*messages, NEXT]) == expected
    assert reason(conversation, [*messages, said("user", "other")]) is None


@pytest.mark.parametrize(
    ("template", "tail"),
    [
        pytest.param(AS_STRING, True, id="ChatML"),
        pytest.param(DROPS_REASONING, True, id="drops reasoning"),
        pytest.param(TRIMS, True, id="trims"),
        pytest.param(
            AS_STRING.replace(
                "{{ message.role }}", "{{ message.role }}{{ loop.index }}"
            ),
            False,
            id="numbers messages",
        ),
        pytest.param(
            AS_STRING.replace(
                "{%- if add_gen", "{{ messages[0].content }}{%- if add_gen"
            ),
            False,
            id="repeats the first message",
        ),
        pytest.param(
            AS_STRING.replace(
                "{%- if add_gen",
                "{% if tools %}{{ tools | length }}{% endif %}{%- if add_gen",
            ),
            False,
            id="counts tools",
        ),
    ],
)
def test_templates_whose_tail_does_not_depend_on_the_head(template, tail):
    # without tools none is counted
    assert probed(template).tail == tail


def test_only_the_tail_is_rendered_where_that_was_proven(monkeypatch):
    renderer, lengths = byte_renderer(), []
    conversation, checked = Conversation(renderer), Conversation(renderer, check=True)
    for each in (conversation, checked):
        each.prompts.probe(tools=False)
    text = renderer.text
    monkeypatch.setattr(
        renderer, "text", lambda said, *a: lengths.append(len(said)) or text(said, *a)
    )
    messages = [said("user", "u" * 100)]
    n_whole = 0
    for i in range(40):
        checked.ask(messages, attributed=False)
        lengths.clear()
        prompt = conversation.ask(messages, attributed=False)
        assert lengths in ([3], [len(messages)])
        n_whole += lengths == [len(messages)]
        assert prompt.ids.tolist() == checked.prompt.ids.tolist()
        hashers = prompt.hasher, checked.prompt.hasher
        assert hashers[0].digest() == hashers[1].digest()
        ids = canonical(RENDERER, f"reply {i}")
        replies = [each.reply(ids) for each in (conversation, checked)]
        messages = [*messages, replies[0], said("user", "next")]
    # the opening, the first one (which has three messages), and each doubling
    assert 4 <= n_whole <= 7


def test_without_complete_no_more_than_a_short_tail_is_rendered(monkeypatch):
    renderer, lengths = byte_renderer(), []
    conversation = Conversation(renderer)
    conversation.prompts.probe(tools=False)
    text = renderer.text
    monkeypatch.setattr(
        renderer, "text", lambda said, *a: lengths.append(len(said)) or text(said, *a)
    )
    messages, short = [said("user", "u" * 100)], []
    for i in range(20):
        restored = conversation.echo.restore(messages)
        books = None, conversation.echo, conversation.held
        lengths.clear()
        try:
            ids = conversation.prompts.build(
                restored, *books, attributed=True, complete=False
            ).ids.tolist()
        except CompleteTextError:
            assert lengths == []
            ids = None
        else:
            assert lengths == [3]
            short.append(i)
        assert ids in (None, conversation.ask(messages).ids.tolist())
        reply = conversation.reply(canonical(RENDERER, f"reply {i}"))
        long = "x" * SHORT_TAIL
        messages = [*messages, reply, said("user", long if i == 16 else "next")]
    # not the opening, the turns that compare all, and the long message
    assert not {0, 17} & {*short}
    assert {16, 19} <= {*short}
    assert 12 <= len(short) <= 16
    # a history that changed
    with pytest.raises(CompleteTextError):
        conversation.prompts.build(
            conversation.echo.restore([*messages[:-4], NEXT, *messages[-2:]]),
            *books,
            attributed=False,
            complete=False,
        )


def test_a_template_that_looks_back_late_is_found_and_rendered():
    """It is proven with short contents, and the check of all comes by itself."""
    looks_back = (
        LATER,
        "{% if messages[-1].content == 'x' * 50 %}!{% endif %}" + LATER,
    )
    conversation = Conversation(byte_renderer(AS_STRING.replace(*looks_back)))
    assert conversation.prompts.probe(tools=False).tail
    messages, reasons = [said("user", "u")], []
    for _ in range(6):
        conversation.ask(messages)
        reasons.append(conversation.prompt.reason)
        reply = conversation.reply(canonical(RENDERER, "Yes."))
        messages = [*messages, reply, said("user", "x" * 50)]
    assert reasons[0] == "opening"
    assert "rewritten" in reasons
    assert not conversation.prompts.probe(tools=False).tail


def test_reasoning_stays_until_the_template_drops_it():
    conversation = Conversation(EMBEDDED)
    opening = [said("user", "u")]
    messages = start(
        conversation, f"<think>\nhm\n</think>\n\n{CALL}", tools=[TOOL], opening=opening
    )
    assert messages[-1]["reasoning_content"] == "hm"
    call = messages[-1]["tool_calls"][0]["id"]
    messages.append(said("tool", "file.py", tool_call_id=call))
    assert reason(conversation, messages, [TOOL]) is None
    messages.append(conversation.reply(canonical(EMBEDDED, "Done.")))
    assert reason(conversation, [*messages, NEXT], [TOOL]) == "reasoning"
    # a client may leave the reasoning out: the echo puts it back
    del messages[1]["reasoning_content"]
    assert reason(conversation, messages[:3], [TOOL]) is None
    # of the last reply
    messages = start(conversation, "<think>\nhm\n</think>\n\na", opening=opening)
    assert reason(conversation, [*messages, NEXT]) == "reasoning"


def test_a_prompt_that_opens_the_reasoning_stays_as_it_was():
    template = KEEPS_REASONING.replace(
        "<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif"
    )
    renderer = byte_renderer(template)
    conversation = Conversation(renderer)
    messages = start(conversation, "hm \n</think>\n\nYes.")
    assert messages[-1]["reasoning_content"] == "hm"
    assert reason(conversation, [*messages, NEXT]) is None
    ids = conversation.prompt.ids
    text = renderer.decode(ids, ended=False)
    assert "assistant\n<think>\nhm \n</think>\n\nYes.<|im_end|>\n" in text
    assert text.endswith("next<|im_end|>\n<|im_start|>assistant\n<think>\n")
    # where nothing was thought
    conversation = Conversation(renderer)
    messages = start(conversation, "\n</think>\n\nYes.")
    assert "reasoning_content" not in messages[-1]
    assert reason(conversation, [*messages, NEXT]) is None
    assert conversation.prompt.ids[conversation.prompt.base.n_ids - 1] == 257


def test_a_special_token_that_the_model_wrote_is_kept():
    """Of a control id in a reply a rendering makes text; here it stays what it was."""
    conversation = Conversation(RENDERER)
    opening = [said("user", "u")]
    conversation.ask(opening)
    ids = np.array([ord("a"), 256, ord("b"), *RENDERER.end_ids], np.int32)
    reply = conversation.reply(ids)
    prompt = conversation.ask([*opening, reply, said("user", "<|im_start|>")])
    assert prompt.built == "append"
    assert (
        prompt.ids[prompt.base.n_ids - 4 : prompt.base.n_ids].tolist() == ids.tolist()
    )
    tail = prompt.ids[prompt.base.n_ids :].tolist()
    assert [i for i in tail if i >= 256] == [256, 257, 256]


def test_a_fork_goes_on_from_its_own_path():
    conversation = Conversation(EMBEDDED)
    opening = [said("user", "u")]
    trunk = start(conversation, "a trunk " * 20, opening=opening)
    ways = []
    for text in ("left", "right"):
        prompt = conversation.ask([*trunk, said("user", text)])
        ids = letters(EMBEDDED, f"{text} way")
        reply = conversation.reply(ids)
        ways.append(([*trunk, said("user", text), reply], prompt.ids, ids))
    # and an agent of its own
    other = start(conversation, "other", opening=[said("system", "s"), *opening])
    for messages, ids, output in ways:
        prompt = conversation.ask([*messages, NEXT])
        assert prompt.base.n_ids == len(ids) + len(output)
        held = prompt.ids[: prompt.base.n_ids].tolist()
        assert held == [*ids.tolist(), *output.tolist()]
    assert reason(conversation, [*other, NEXT]) is None
    assert len(conversation.held._paths) == 4
    # one of the ways continues the trunk's branch
    branches = {path.branch for path in conversation.held._paths.values()}
    assert len(branches) == 3


def test_a_prompt_keeps_its_ids_when_another_extends_the_same_turn():
    conversation = Conversation(EMBEDDED)
    messages = start(conversation, "a trunk")
    # the first of them is never answered
    prompts = [
        conversation.ask([*messages, said("user", text)])
        for text in ("the left way", "the right way")
    ]
    texts = [EMBEDDED.decode(prompt.ids, ended=False) for prompt in prompts]
    assert "the left way" in texts[0]
    assert "the right way" in texts[1]
    assert all(prompt.built == "append" for prompt in prompts)


def test_of_equal_replies_the_last_one_is_gone_on_from():
    conversation = Conversation(EMBEDDED)
    opening = [said("user", "u")]
    conversation.ask(opening)
    for spell in (canonical, letters):
        ids = spell(EMBEDDED, "the same")
        reply = conversation.reply(ids)
    prompt = conversation.ask([*opening, reply, NEXT])
    assert (
        prompt.ids[prompt.base.n_ids - len(ids) : prompt.base.n_ids].tolist()
        == ids.tolist()
    )
    assert len(conversation.held._paths) == 1


def path(position, base=None, n=100):
    """A path with that many tokens after its base."""
    new, none = np.arange(n, dtype=np.int32), np.empty(0, np.int32)
    ids, branch = Branch().extend(none, new)
    if base is not None:
        ids, branch = base.branch.extend(base.ids, new + base.n_ids)
    return CachedPath(
        position=position,
        base=base,
        branch=branch,
        n_ids=len(ids),
        rendered=RenderedPrefix(),
        hasher=blake2b(),
    )


def test_what_was_idle_for_longest_is_released_first():
    budget = CacheBudget(1 << 20)
    first, second = TokenCache(), TokenCache()
    one = path(b"one")
    first.remember(one, budget)
    second.remember(path(b"other"), budget)
    # the branch of the first goes on, and another leaves it
    first.remember(path(b"two", one, 1), budget)
    fork = path(b"fork", one)
    first.remember(fork, budget)
    assert [len(first._paths), len(second._paths)] == [3, 1]
    for name in (b"one", b"two", b"fork"):
        found = first.get(name)
        assert found.ids.tolist() == list(range(found.n_ids))
    leaf = path(b"leaf", fork, 1)
    # the other session's branch, then the one that the fork left
    for new, left in ((leaf, [4, 0]), (path(b"end", leaf, 1), [3, 0])):
        budget.max_bytes = budget.n_bytes - 1
        first.remember(new, budget)
        assert [len(first._paths), len(second._paths)] == left
    assert [first.get(name) is None for name in (b"one", b"fork")] == [True, False]
    first.clear()
    second.clear()
    assert budget.n_bytes == 0
    huge = path(b"huge", n=1 << 20)
    first.remember(huge, budget)
    assert (len(first._paths), budget.n_bytes) == (0, 0)


@pytest.mark.parametrize("n", [10, 400, 40_000])
def test_the_room_for_more_ids_counts(n):
    cache, budget = TokenCache(), CacheBudget(1 << 30)
    first = path(b"one", n=n)
    cache.remember(first, budget)
    n_bytes = budget.n_bytes
    array = first.branch.ids
    assert 4 * n <= array.nbytes <= min(n_bytes, 8 * n)
    # it has the room already
    second = path(b"two", first, n // 10)
    cache.remember(second, budget)
    assert second.branch.ids is array
    assert budget.n_bytes - n_bytes == n_bytes - array.nbytes
    cache.clear()
    assert budget.n_bytes == 0


def test_ids_that_were_not_answered_are_dropped_with_the_next_path():
    """Also a count of tokens appends ids that no path has."""
    cache, budget = TokenCache(), CacheBudget(1 << 30)
    last = path(b"0", n=1000)
    cache.remember(last, budget)
    for i in range(1, 50):
        path(b"unanswered", last)
        last = path(b"%d" % i, last)
        cache.remember(last, budget)
    assert len({cache.get(b"%d" % i).branch for i in range(50)}) == 1
    assert last.ids.tolist() == [*range(1000), *[*range(1000, 5900)]]
    assert budget.n_bytes < 2 * last.ids.nbytes + 50 * 1536


def test_a_path_whose_base_was_released_has_all_its_tokens():
    cache, budget = TokenCache(), CacheBudget(1 << 20)
    trunk = path(b"trunk")
    cache.remember(trunk, budget)
    late = path(b"late", trunk)
    cache.clear()
    cache.remember(late, budget)
    assert cache.get(b"late").ids.tolist() == list(range(200))
    assert len(cache._paths) == 1
    cache.clear()
    assert budget.n_bytes == 0


def test_a_released_branch_is_freed_though_another_left_it():
    cache, budget = TokenCache(), CacheBudget(1 << 20)
    trunk = path(b"trunk")
    cache.remember(trunk, budget)
    for name in (b"left", b"right"):
        cache.remember(path(name, trunk), budget)
    freed = weakref.ref(trunk.branch)
    cache.release(trunk.branch)
    del trunk
    gc.collect()
    assert freed() is None
    assert cache.get(b"left") is None
    assert cache.get(b"right").ids.tolist() == list(range(200))


def known(n_bytes):
    """A request with a body of that length."""
    return ReadRequest(
        protocol="p",
        body=bytes(n_bytes),
        chat=ChatRequest(messages=[], tools=None, sampling=None, stream=False),
        end=0,
        fields={},
        marks=[Mark(0, 0, blake2b())],
    )


def test_requests_of_a_session_come_latest_first():
    cache, budget = TokenCache(), CacheBudget(1 << 20)
    for number, name in enumerate([b"one", b"other", b"one"]):
        cache.remember(path(name), budget, known(number))
    cache.remember(path(b"end", cache.get(b"other"), 1), budget, known(3))
    assert [len(request.body) for request in cache.requests()] == [3, 2]
    cache.remember(path(b"one"), budget, known(4))
    assert [len(request.body) for request in cache.requests()] == [4, 3]


def test_requests_are_released_before_tokens():
    sessions = [TokenCache() for _ in range(3)]
    budget = CacheBudget(1 << 20)
    for number, session in enumerate(sessions):
        session.remember(path(b"one"), budget, known(1000 * number))
    n_bytes = budget.n_bytes
    budget.max_bytes = n_bytes + 500
    sessions[0].remember(path(b"two", sessions[0].get(b"one")), budget, known(1000))
    # the two that were idle longest
    assert [len([*session.requests()]) for session in sessions] == [1, 0, 0]
    assert [len(session._paths) for session in sessions] == [2, 1, 1]
    for session in sessions:
        session.clear()
    assert budget.n_bytes == 0


def test_one_position_has_one_path():
    cache, budget = TokenCache(), CacheBudget(1 << 20)
    trunk = path(b"trunk")
    cache.remember(trunk, budget)
    sizes = set()
    for n in (50, 60, 60, 60):
        cache.remember(path(b"again", trunk, n), budget)
        assert len(cache._paths) == 2
        assert cache.get(b"again").n_ids == 100 + n
        sizes.add(budget.n_bytes)
    assert len(sizes) <= 2
    opening = TokenCache()
    for _ in range(3):
        opening.remember(path(b"one"), budget)
        sizes.add(budget.n_bytes)
    assert (len(opening._paths), len(sizes)) == (1, 3)


def test_a_fork_of_a_fork_of_many_forks():
    cache, budget = TokenCache(), CacheBudget(1 << 30)
    last = path(b"0", n=1)
    cache.remember(last, budget)
    for i in range(1, 500):
        cache.remember(path(b"tip", last, 1), budget)
        last = path(str(i).encode(), last, 1)
        cache.remember(last, budget)
    assert last.ids.tolist() == list(range(500))
    cache.clear()
    assert budget.n_bytes == 0


def test_what_is_released_is_rendered():
    conversation = Conversation(RENDERER, cache_bytes=2000)
    messages = start(conversation)
    start(conversation, opening=[said("user", "another agent")])
    assert reason(conversation, [*messages, NEXT]) == "released"


async def work(gateway, client, n_users):
    """Ask for work, run the tools that are called, until that many users spoke."""
    messages = []
    create = client.chat.completions.create
    for i in range(n_users):
        messages.append(said("user", f"and {i}?"))
        while True:
            reply = await create(model="m", messages=messages, tools=[TOOL])
            answer = reply.choices[0].message
            echo = answer.model_dump(include={"role", "content", "tool_calls"})
            messages.append({k: v for k, v in echo.items() if v is not None})
            if not answer.tool_calls:
                break
            for call in answer.tool_calls:
                messages.append(said("tool", f"file{i}.py\n", tool_call_id=call.id))
    return await gateway.session(client)


@pytest.mark.anyio
async def test_fifty_turns_without_drift_are_one_row(tmp_path):
    tables = {}
    for mode in ("append", "render"):
        engine = EmbeddedEngine(drift=0.3, seed=1)
        directory = tmp_path / mode
        async with in_process(engine, EMBEDDED, directory, prompts=mode) as gateway:
            client = await gateway.open(session_id="a")
            session = await work(gateway, client, 25)
            assert session["unattributed"] == 0
            expected = (
                {"opening": 1, "append": 49} if mode == "append" else {"chosen": 50}
            )
            assert session["prompts"] == expected
        tables[mode] = tk.read_turns(directory)
    turns = tables["append"]
    assert turns.num_rows == 50
    drift = {
        mode: tk.classify_drift(table, link_by(table, parent_by="messages"))["size"]
        for mode, table in tables.items()
    }
    assert drift["append"].to_pylist() == [0] * 49
    assert drift["render"].to_numpy().max() > 0
    for policy in ("faithful", "strict", "slime", "trl"):
        rows = tk.linearize(turns, policy)
        assert rows.num_rows == 1
        assert tk.verify(rows, turns).num_rows == 0
    assert tk.linearize(tables["render"], "strict").num_rows > 1
    # the tool's output is learned by its name
    rows = tk.linearize(turns)
    (row,) = tk.learn.observation_weights(rows, turns, tool_names=["bash"]).to_pylist()
    learned = np.array(row["input_ids"], np.int32)[
        np.array(row["observation_weight"]) > 0
    ]
    text = EMBEDDED.decode(learned, ended=False)
    # but for the line break, which is one token with the template's own
    assert text == "".join(f"file{i}.py" for i in range(25))
    for turn in turns.to_pylist():
        ids = np.array(turn["prompt_ids"], "<i4")
        assert turn["prompt_digest"] == blake2b(ids.tobytes(), digest_size=16).digest()
        assert turn["prompt_built"] == ("append" if turn["turn_index"] else "render")
        assert turn["render_reason"] == (None if turn["turn_index"] else "opening")


@pytest.mark.anyio
async def test_agents_side_by_side_go_on_from_their_own_turns(tmp_path):
    engine = EmbeddedEngine(drift=0.9, seed=4)
    async with in_process(engine, EMBEDDED, tmp_path) as gateway:
        client = await gateway.open(session_id="a")

        async def ask(messages):
            reply = await client.chat.completions.create(model="m", messages=messages)
            return [*messages, said("assistant", reply.choices[0].message.content)]

        async def talk(messages):
            for i in range(3):
                messages = await ask([*messages, said("user", f"and {i}?")])

        trunk = await ask([said("user", "u")])
        other = [said("system", "Another agent.")]

        async def way(i):
            await talk(await ask([*trunk, said("user", f"way {i}")]))

        await asyncio.gather(talk(other), *map(way, range(4)))
        session = await gateway.session(client)
    assert session["prompts"] == {"opening": 2, "append": 18}
    turns = tk.read_turns(tmp_path)
    links = tk.link(turns)
    assert links["parent"].null_count == 2
    assert not any(tk.classify_drift(turns, links)["size"].to_pylist())
    rows = tk.linearize(turns)
    assert rows.num_rows == 5
    assert tk.verify(rows, turns).num_rows == 0


@pytest.mark.anyio
async def test_calls_that_fail_leave_nothing_to_go_on_from(tmp_path):
    engine = ScriptedEngine(
        sampled("cut", finish_reason="abort"),
        EngineError("down", 503),
        "Yes.",
        "Yes, again.",
    )
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = await gateway.open(session_id="a")
        create = client.chat.completions.create
        messages = [said("user", "u")]
        for _ in range(2):
            with pytest.raises(Exception, match=r"abort|down"):
                await create(model="m", messages=messages)
        await create(model="m", messages=messages)
        await create(model="m", messages=[*messages, said("assistant", "cut"), NEXT])
        session = await gateway.session(client)
        built = [(t["prompt_built"], t["render_reason"]) for t in gateway.turns()]
    assert session["prompts"] == {"opening": 2, "unknown_reply": 1}
    reasons = ("opening", "opening", "unknown_reply")
    assert built == [("render", reason) for reason in reasons]


@pytest.mark.anyio
@pytest.mark.parametrize(
    "consumed",
    [
        pytest.param({"prompt_tokens": 5}, id="their number"),
        pytest.param({"prompt_ids": np.zeros(19, np.int32)}, id="the ids"),
    ],
)
async def test_a_sample_for_another_prompt_is_no_turn(tmp_path, consumed):
    engine = ScriptedEngine(sampled("Yes.", **consumed))
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = await gateway.open(session_id="a")
        with pytest.raises(Exception, match="the engine consumed"):
            await client.chat.completions.create(model="m", messages=[said("user", "")])
        assert gateway.turns() == []
    assert len(engine.prompts[0]) == 19


@pytest.mark.anyio
async def test_a_count_is_that_of_the_prompt_to_come(tmp_path):
    engine = EmbeddedEngine(drift=0.9, seed=2)
    async with in_process(engine, EMBEDDED, tmp_path) as gateway:
        key = await gateway.open_key()
        client = gateway.anthropic(key)
        messages = [said("user", "u")]
        for _ in range(3):
            asked = {"model": "m", "messages": messages}
            count = await client.messages.count_tokens(**asked)
            reply = await client.messages.create(**asked, max_tokens=100)
            assert count.input_tokens == reply.usage.input_tokens
            messages = [*messages, said("assistant", reply.content[0].text), NEXT]
        session = (await gateway.http.get(gateway.path_of(key))).json()
    assert session["prompts"] == {"opening": 1, "append": 2}


@pytest.mark.anyio
async def test_the_gateway_shows_what_the_template_does(tmp_path):
    async with in_process(ScriptedEngine(), EMBEDDED, tmp_path) as gateway:
        shown = (await gateway.http.get("/prompts")).json()
    assert shown["mode"] == "append"
    assert shown["template"]["with_tools"] == json.loads(
        json.dumps(asdict(Prompts(EMBEDDED).probe(tools=True)))
    )
    assert shown["template"]["without_tools"]["drops_reasoning"] == ["user"]


@pytest.mark.anyio
async def test_a_session_that_closes_gives_its_ids_up(tmp_path):
    async with in_process(ScriptedEngine("a"), RENDERER, tmp_path) as gateway:
        client = await gateway.open(session_id="a")
        await client.chat.completions.create(model="m", messages=[said("user", "u")])

        async def cache_bytes():
            return (await gateway.http.get("/prompts")).json()["cache_bytes"]

        assert await cache_bytes() > 0
        await gateway.http.post("/sessions/a/close")
        assert await cache_bytes() == 0
