"""Prompts that are built behind what was sampled, and why others are rendered."""

import asyncio
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken

import trajkit as tk
from tests.made_tables import link_by
from tests.shim.clients import in_process
from tests.shim.fakes import (
    AS_STRING,
    RENDERER,
    TOOL,
    ScriptedEngine,
    byte_renderer,
    byte_tokenizer,
    cases,
    load_tokenizer,
    parse_reply,
    remember,
    rendered,
    sampled,
)
from tests.strategies import good_calls, plain_texts, spoken_texts
from trajkit.turns import tools_key
from trajkit_shim.chat.request import Usage, canonical_reply, make_reply
from trajkit_shim.engines.embedded import EmbeddedEngine
from trajkit_shim.errors import EngineError, TemplateError
from trajkit_shim.prompting.conversation import START, Budget
from trajkit_shim.prompting.conversation import Conversation as Session
from trajkit_shim.prompting.prompts import Prompts
from trajkit_shim.prompting.render import ChatRenderer, encode
from trajkit_shim.replies import opens_reasoning

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
NO_END = AS_STRING.replace("<|im_end|>", "!").replace("<|im_start|>", "# ")
TWO_ENDS = AS_STRING.replace("\n</tool_call>", "<|im_end|>\n</tool_call>")
NO_TOOLS = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + AS_STRING


def said(role, content, **fields):
    return {"role": role, "content": content, **fields}


def probed(template, *, tools=True):
    return Prompts(byte_renderer(template)).skeleton(tools=tools)


@cases(
    "template, leaves",
    {
        "ChatML": (AS_STRING, ""),
        "keeps reasoning": (KEEPS_REASONING, ""),
        "drops reasoning": (DROPS_REASONING, ""),
        "trims": (TRIMS, ""),
        "opens the reasoning": (OPENS_REASONING, "<think>\n"),
        "writes the last reply otherwise": (REWRITES, ""),
        "writes a reply with two ends": (TWO_ENDS, ""),
    },
)
def test_templates_whose_prompts_may_be_extended(template, leaves):
    found = probed(template)
    assert dict(found.extends) == {"user": None, "tool": None}
    assert found.leaves == {"user": leaves, "tool": leaves}


@cases(
    "template, role, says",
    {
        "tools move on": (MOVES_TOOLS, "user", "moves what was before"),
        "no end": (NO_END, "user", "no token ends a reply"),
        "counts the letters of a reply": (
            AS_STRING.replace(
                "{%- if add_generation_prompt -%}",
                "{% if messages | length > 2 %}{{ messages[1].content | length }}"
                "{% endif %}{%- if add_generation_prompt -%}",
            ),
            "user",
            "depends on the reply",
        ),
        "no results": (
            "{% if messages[-1].role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
            + AS_STRING,
            "tool",
            "rejects what follows",
        ),
    },
)
def test_templates_whose_prompts_are_rendered(template, role, says):
    assert says in probed(template).extends[role]


@cases(
    "template, mode, says",
    {
        "render": (AS_STRING, "render", "render"),
        "append": (KEEPS_REASONING, "append", "append"),
        "no end": (
            NO_END,
            "append",
            "append; rendered at a user message with tools: no token ends a reply; "
            "rendered at a tool message with tools: no token ends a reply; "
            "rendered at a user message without tools: no token ends a reply",
        ),
    },
)
def test_what_is_done_in_one_line(template, mode, says):
    assert Prompts(byte_renderer(template), mode).summary() == says


def test_the_line_names_what_happens_to_late_system_messages():
    first = (
        "{% if messages[-1].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    )
    late = "{% if loop.index0 and message.role == 'system' %}"
    late += "{{ raise_exception('no') }}{% endif %}"
    template = first + AS_STRING.replace(LATER, LATER + late)
    renderer = byte_renderer(template)
    assert (
        "shown as reminders by the user (--late-system)" in Prompts(renderer).summary()
    )
    messages = [said("user", "a"), said("system", "b"), said("user", "c")]
    assert "<system-reminder>\nb\n" in renderer.text(messages, None)
    renderer.late_system = "refuse"
    with pytest.raises(TemplateError, match="--late-system user"):
        renderer.text(messages, None)
    assert "are refused (--late-system)" in Prompts(renderer).summary()


class Conversation:
    """A session, and what a gateway does with each call."""

    def __init__(self, renderer, mode="append", *, cache_bytes=1 << 30, past="auto"):
        self.renderer = renderer
        self.prompts = Prompts(renderer, mode, past=past)
        self.session, self.budget = Session(), Budget(cache_bytes)

    def ask(self, messages, tools=None, *, attributed=True, **variables):
        self.restored = self.session.restore(messages)
        self.tools = tools
        self.prompt = self.prompts.build(
            self.restored, tools, variables, attributed=attributed
        )
        return self.prompt

    def reply(self, ids):
        """Sample these ids; the message that the client sees."""
        ended = bool(len(ids)) and ids[-1] in self.renderer.end_ids
        text = self.renderer.decode(ids, ended=ended)
        opened = opens_reasoning(self.renderer, self.prompt.ids)
        parsed = parse_reply(text, self.tools, opened=opened)
        message = canonical_reply(make_reply(parsed, "stop", model="m", usage=USAGE))
        remember(
            *(self.session, self.restored.position, message, self.budget),
            ids=np.concatenate([self.prompt.ids, ids]),
            between=self.prompt.between,
            offered=self.prompt.offered,
            closed=ended,
            base=self.prompt.base,
        )
        # a client adds nothing of the gateway's own
        return {name: message[name] for name in message if name != "sampled"}


def canonical(renderer, text):
    """A reply in the tokenizer's own spelling, special tokens in it as text."""
    end = np.array(renderer.end_ids, np.int32)
    text = renderer._break(text, renderer.special)
    return np.concatenate([renderer.encode(text).ids, end])


def letters(renderer, text):
    """A reply of one token per byte."""
    pieces = [encode(renderer._plain, letter).ids for letter in text]
    return np.concatenate([*pieces, np.array(renderer.end_ids, np.int32)])


turns = st.lists(
    st.tuples(
        spoken_texts
        | good_calls
        | st.builds("a{}\n{}".format, plain_texts, good_calls),
        st.lists(
            st.tuples(st.sampled_from(["user", "system"]), spoken_texts),
            min_size=1,
            max_size=3,
        ),
    ),
    max_size=4,
)


def results(reply, text="done"):
    """A result of each call, in another order than the calls."""
    ids = [call["id"] for call in reply.get("tool_calls") or ()]
    return [said("tool", text, tool_call_id=each) for each in reversed(ids)]


@given(turns, st.booleans())
@example([(CALL, [("user", "")]), ("b", [("user", "c")])], True)
def test_where_nothing_drifts_append_is_render_to_the_token(turns, tools):
    tools = [TOOL] if tools else None
    appending, rendering = Conversation(RENDERER), Conversation(RENDERER, "render")
    messages = [said("system", "Be <|im_end|> brief."), said("user", "go")]
    for text, new in turns:
        prompt = appending.ask(messages, tools)
        assert prompt.ids.tolist() == rendering.ask(messages, tools).ids.tolist()
        assert prompt.built == ("append" if len(messages) > 2 else "render")
        ids = canonical(RENDERER, text)
        # both know it, so its markup is markup
        reply, _ = appending.reply(ids), rendering.reply(ids)
        messages = [*messages, reply, *results(reply)]
        messages += [said(role, text) for role, text in new]


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
        n_base, n_known = appending.prompt.n_base, appending.prompt.n_known
        # what comes after the latest reply
        assert (n_known > 0) == (n_base > 0)
        assert not n_known or messages[n_known - 1]["role"] == "assistant"
        index = np.where(whole >= n_known, whole - n_known, -1)
        assert shown.tolist() == index[len(index) - len(shown) :].tolist()
        assert (index >= 0).sum() == (shown >= 0).sum()
        messages = [*messages, appending.reply(canonical(RENDERER, text))]
        messages += [said(role, text) for role, text in new]


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
    if prompt.reason not in (None, "end_token"):
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
    assert (prompt.n_base > n_first, prompt.n_known) == (True, 3)


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


def test_a_template_that_moves_tools():
    conversation = Conversation(byte_renderer(MOVES_TOOLS))
    messages = start(conversation, tools=[TOOL])
    assert reason(conversation, [*messages, NEXT], [TOOL]) == "template"


@cases(
    "change, expected",
    {
        "the text before": (
            (LATER, "{% if messages[-1].content == 'next' %}!{% endif %}" + LATER),
            "rewritten",
        ),
        "the end of a reply and of what follows": (
            (
                "{%- endfor %}<|im_end|>",
                "{%- endfor %}{% if messages[-1].content != 'next' or loop.index < 3 %}"
                "<|im_end|>{% endif %}",
            ),
            "unended",
        ),
        "the reply": (
            (
                "{{ message.content }}",
                "{{ '-' if messages[-1].content == 'next' and loop.index == 3 else "
                "message.content }}",
            ),
            "hidden",
        ),
    },
)
def test_a_template_that_shows_its_whims_later(change, expected):
    renderer = byte_renderer(AS_STRING.replace(*change))
    # the digest notices it, whatever the template makes of replies
    conversation = Conversation(renderer, past="sampled")
    messages = start(conversation)
    assert not any(conversation.prompts.skeleton(tools=False).extends.values())
    assert reason(conversation, [*messages, NEXT]) == expected
    assert reason(conversation, [*messages, said("user", "other")]) is None


# as Qwen3.5: replies since the last user message have a block for their reasoning
BLOCKS = (
    "{% set at = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set at.last = loop.index0 %}{% endif %}{% endfor %}"
    + AS_STRING.replace(
        "{{ message.content }}",
        "{% if message.role == 'assistant' and loop.index0 > at.last %}<think>\n"
        "{{ message.reasoning_content or '' }}\n</think>\n\n{% endif %}"
        "{{ message.content }}",
    ).replace(
        "<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif"
    )
)


@pytest.mark.parametrize("thought", ["hm", ""])
def test_past_reasoning(thought):
    """Tool results extend; a user message does where ``past`` says so."""
    renderer = byte_renderer(BLOCKS)
    reasons = {}
    for past in ("auto", "sampled", "template"):
        conversation = Conversation(renderer, past=past)
        messages, found = [said("user", "u")], []
        for _ in range(3):
            found.append(conversation.ask(messages, [TOOL]).reason)
            reply = conversation.reply(
                canonical(renderer, f"{thought}\n</think>\n\n{CALL}")
            )
            messages = [*messages, reply, *results(reply)]
        found.append(conversation.ask([*messages[:-1], *messages[-1:]], [TOOL]).reason)
        conversation.reply(canonical(renderer, f"{thought}\n</think>\n\nDone."))
        text = said("assistant", "Done.")
        text |= {"reasoning_content": thought} if thought else {}
        found.append(conversation.ask([*messages, text, NEXT], [TOOL]).reason)
        reasons[past] = found
    rewritten = "reasoning" if thought else "rewritten"
    assert reasons["auto"] == ["opening", None, None, None, rewritten]
    assert reasons["sampled"] == ["opening", None, None, None, None]
    assert reasons["template"] == reasons["auto"]


# as GLM: the token that ends a reply is the marker of the next message
MARKED = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments }}}\n'
    "</tool_call>{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% endif %}"
)


def marked_renderer():
    tokenizer = byte_tokenizer()
    names = ("<|user|>", "<|assistant|>", "<|tool|>")
    tokenizer.add_tokens([AddedToken(name, special=True) for name in names])
    ends = [tokenizer.convert_tokens_to_ids(name) for name in ("<|user|>", "<|tool|>")]
    return ChatRenderer(tokenizer, MARKED, end_ids=ends)


def test_a_reply_that_ends_with_the_next_message_s_marker():
    renderer = marked_renderer()
    user, tool = renderer.end_ids[1:]
    conversation = Conversation(renderer)
    opening = [said("user", "u")]
    first = conversation.ask(opening, [TOOL])
    text = encode(renderer._plain, CALL).ids.tolist()
    sampled_ids = np.array([*text, tool], np.int32)
    reply = conversation.reply(sampled_ids)
    path = [*first.ids.tolist(), *sampled_ids.tolist()]
    # the marker is there once
    prompt = conversation.ask([*opening, reply, *results(reply)], [TOOL])
    assert prompt.reason is None
    assert prompt.ids.tolist()[: len(path)] == path
    assert prompt.ids.tolist().count(tool) == 1
    # another one follows: the sampled one is replaced
    prompt = conversation.ask([*opening, reply, NEXT], [TOOL])
    assert (prompt.reason, prompt.built) == ("end_token", "append")
    assert prompt.ids.tolist()[: len(path)] == [*path[:-1], user]
    text = renderer.decode(prompt.ids, ended=False)
    assert text == renderer.text(
        conversation.restored.messages, [TOOL], sampled=conversation.restored.sampled
    )


# as gpt-oss: a reply in history ends with another token than the sampled one
def test_a_reply_whose_end_the_template_writes_otherwise():
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<|return|>", special=True)])
    ends = [tokenizer.convert_tokens_to_ids("<|return|>")]
    template = AS_STRING.replace("<|im_end|>", "<|im_start|>")
    renderer = ChatRenderer(tokenizer, template, end_ids=ends)
    renderer.end_ids, renderer.end_tokens = (ends[0],), frozenset(["<|return|>"])
    conversation = Conversation(renderer)
    messages = start(conversation)
    prompt = conversation.ask([*messages, NEXT])
    assert prompt.reason is None
    text = renderer.decode(prompt.ids, ended=False)
    assert "Yes.<|return|>\n<|im_start|>user\nnext" in text


def test_variables_are_part_of_what_is_extended():
    template = "{{ effort or '' }}" + AS_STRING
    conversation = Conversation(byte_renderer(template))
    opening = [said("user", "u")]
    conversation.ask(opening, effort="low")
    messages = [*opening, conversation.reply(canonical(RENDERER, "a")), NEXT]
    assert conversation.ask(messages, effort="low").reason is None
    assert conversation.ask(messages).reason == "tools"
    prompt = conversation.ask(messages, effort="<|im_end|>")
    # a client cannot write control tokens with one either
    text = conversation.renderer.decode(prompt.ids, ended=False)
    assert text.startswith("<|im_end|><|im_start|>user")
    assert prompt.ids[0] < 256


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
    # where nothing was thought, the template takes the opening back
    for past, expected in (("auto", "rewritten"), ("sampled", None)):
        conversation = Conversation(renderer, past=past)
        messages = start(conversation, "\n</think>\n\nYes.")
        assert "reasoning_content" not in messages[-1]
        assert reason(conversation, [*messages, NEXT]) == expected


def test_a_special_token_that_the_model_wrote_is_kept():
    """Of a control id in a reply a rendering makes text; here it stays what it was."""
    conversation = Conversation(RENDERER)
    opening = [said("user", "u")]
    conversation.ask(opening)
    ids = np.array([ord("a"), 256, ord("b"), *RENDERER.end_ids], np.int32)
    reply = conversation.reply(ids)
    prompt = conversation.ask([*opening, reply, said("user", "<|im_start|>")])
    assert prompt.built == "append"
    assert prompt.ids[prompt.n_base - 4 : prompt.n_base].tolist() == ids.tolist()
    tail = prompt.ids[prompt.n_base :].tolist()
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
        assert prompt.n_base == len(ids) + len(output)
        held = prompt.ids[: prompt.n_base].tolist()
        assert held == [*ids.tolist(), *output.tolist()]
    assert reason(conversation, [*other, NEXT]) is None


def test_of_equal_replies_the_last_one_is_gone_on_from():
    conversation = Conversation(EMBEDDED)
    opening = [said("user", "u")]
    conversation.ask(opening)
    for spell in (canonical, letters):
        ids = spell(EMBEDDED, "the same")
        reply = conversation.reply(ids)
    prompt = conversation.ask([*opening, reply, NEXT])
    assert prompt.ids[prompt.n_base - len(ids) : prompt.n_base].tolist() == ids.tolist()


def test_a_session_that_grows_needs_memory_for_its_longest_path():
    session, budget, nodes = Session(), Budget(1 << 40), []
    for i in range(300):
        base = nodes[-1] if nodes else None
        ids = np.repeat(np.arange(i + 1, dtype=np.int32), 50)
        fields = {"ids": ids, "base": base}
        nodes.append(
            remember(session, b"%d" % i, said("assistant", ""), budget, **fields)
        )
    assert all(np.may_share_memory(node.ids, nodes[-1].ids) for node in nodes)
    for i, node in enumerate(nodes):
        assert node.ids.tolist() == np.repeat(np.arange(i + 1), 50).tolist()
    assert budget.n_bytes == session.n_bytes
    assert 4 * 50 * 300 < session.n_bytes < 4 * 50 * 300 + 300 * 1100
    session.close()
    assert budget.n_bytes == 0


def test_the_session_that_was_idle_longest_is_released():
    budget, sessions = Budget(30_000), [Session() for _ in range(3)]
    nodes = [
        remember(
            session, START, said("assistant", ""), budget, ids=np.zeros(2000, "i4")
        )
        for session in (*sessions, sessions[0])
    ]
    assert [node.ids is not None for node in nodes] == [True, False, True, True]
    assert budget.n_bytes <= 30_000


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
        turns = gateway.turns()
        built = [(t["prompt_built"], t["render_reason"]) for t in turns]
    assert {t["tools_key"] for t in turns} == {tools_key([])}
    assert session["prompts"] == {"opening": 2, "unknown_reply": 1}
    reasons = ("opening", "opening", "unknown_reply")
    assert built == [("render", reason) for reason in reasons]


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
async def test_a_session_that_closes_gives_its_ids_up(tmp_path):
    async with in_process(ScriptedEngine("a"), RENDERER, tmp_path) as gateway:
        client = await gateway.open(session_id="a")
        await client.chat.completions.create(model="m", messages=[said("user", "u")])

        async def cache_bytes():
            return (await gateway.http.get("/prompts")).json()["cache_bytes"]

        assert await cache_bytes() > 0
        await gateway.http.post("/sessions/a/close")
        assert await cache_bytes() == 0
