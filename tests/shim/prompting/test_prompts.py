"""Prompts: built behind what was sampled or rendered, and the messages that they show."""

import json
import re

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken

import trajkit as tk
from tests.shim.clients import USER
from tests.shim.fakes import (
    AS_JSON,
    AS_STRING,
    EMBEDDED,
    RENDERER,
    TOOL,
    byte_renderer,
    byte_tokenizer,
    called,
    cases,
    parse_reply,
    remember,
    rendered,
    said,
    sampled_call,
    tool,
    user,
)
from tests.strategies import good_calls, plain_texts, spoken_texts
from trajkit_shim.chat.request import Usage, make_reply
from trajkit_shim.engines.embedded import EmbeddedEngine
from trajkit_shim.errors import TemplateError
from trajkit_shim.prompting.conversation import START, Budget
from trajkit_shim.prompting.conversation import Conversation as Session
from trajkit_shim.prompting.prompts import Prompts
from trajkit_shim.prompting.render import ChatRenderer, encode
from trajkit_shim.replies import opens_reasoning

CALL = sampled_call()
USAGE = Usage(prompt_tokens=1, output_tokens=1, cached_tokens=None)
NEXT = user("next")
OPENING = [USER]
LATER = "{%- for message in messages -%}"
CONTENT = "{{ message.content }}"
OPENS = ("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif")


def shown_as(text, template=AS_STRING):
    """A template that shows contents otherwise."""
    return template.replace(CONTENT, text)


def raises(condition):
    return "{% if " + condition + " %}{{ raise_exception('no') }}{% endif %}"


DROPS_REASONING = shown_as(
    "{% if message.reasoning_content and loop.last %}"
    "<think>{{ message.reasoning_content }}</think>{% endif %}" + CONTENT
)
# the last reply is written otherwise than those before it
REWRITES = shown_as(
    "{% if message.role == 'assistant' and loop.index0 + 2 == messages | length %}"
    "[last]{% endif %}" + CONTENT
)
NO_END = AS_STRING.replace("<|im_end|>", "!").replace("<|im_start|>", "# ")
TWO_ENDS = AS_STRING.replace("\n</tool_call>", "<|im_end|>\n</tool_call>")
NO_RESULTS = raises("messages[-1].role == 'tool'") + AS_STRING
COUNTS = AS_STRING.replace(
    "{%- if add_generation_prompt -%}",
    "{% if messages | length > 2 %}{{ messages[1].content | length }}"
    "{% endif %}{%- if add_generation_prompt -%}",
)
# tools stand before the last message
MOVES_TOOLS = AS_STRING.replace(
    LATER, LATER + "{% if tools and loop.last %}{{ tools | tojson }}{% endif %}"
)
# text beside a call stands behind the call's result
MOVES_TEXT = shown_as(
    "{{ '' if message.tool_calls else message.content }}"
    "{{ messages[loop.index0 - 1].content if message.role == 'tool' }}"
)
EXTENDS = "late_system': 'template', 'shows_tools': True, 'rendered': {}"
LATE = raises("messages[-1].role == 'system'") + AS_STRING.replace(
    LATER, LATER + raises("loop.index0 and message.role == 'system'")
)


@cases(
    "template, says",
    {
        "ChatML": (AS_STRING, EXTENDS),
        "drops reasoning": (DROPS_REASONING, EXTENDS),
        "opens the reasoning": (AS_STRING.replace(*OPENS), EXTENDS),
        "writes the last reply otherwise": (REWRITES, EXTENDS),
        "writes a reply with two ends": (TWO_ENDS, EXTENDS),
        "moves tools on": (MOVES_TOOLS, "user message with tools': .*moves what was"),
        "moves text on": (MOVES_TEXT, "tool message after text .*depends on the reply"),
        "writes no end": (NO_END, "(: 'no token ends a reply'.*){4}"),
        "counts letters": (COUNTS, "a user message .*depends on the reply"),
        "takes no results": (NO_RESULTS, "a tool message .*rejects what follows"),
        "shows no tools": (AS_STRING.replace("if tools", "if 0"), "tools': False"),
        "takes no late system message": (LATE, "late_system': 'user'"),
    },
)
def test_what_is_done_with_the_prompts_of_a_template(template, says):
    prompts = Prompts(byte_renderer(template))
    assert re.search(says, str(prompts.describe()))


def test_late_system_messages():
    renderer = byte_renderer(LATE)
    messages = [user("a"), {"role": "system", "content": "b"}, user("c")]
    assert "<system-reminder>\nb\n" in renderer.text(messages, None)
    renderer.late_system = "refuse"
    with pytest.raises(TemplateError, match="--late-system user"):
        renderer.text(messages, None)
    assert Prompts(renderer).describe()["late_system"] == "refuse"


class Conversation:
    """A session, and what a gateway does with each call."""

    def __init__(
        self, renderer=RENDERER, mode="append", *, cache_bytes=1 << 30, past="auto"
    ):
        self.renderer = renderer
        self.prompts = Prompts(renderer, mode, past=past)
        self.session, self.budget = Session(), Budget(cache_bytes)

    def ask(self, messages, tools=None, **variables):
        self.restored = self.session.restore(messages)
        self.tools = tools
        self.prompt = self.prompts.build(
            self.restored, tools, variables, attributed=True
        )
        return self.prompt

    def reason(self, messages, tools=None):
        """Why a prompt is rendered."""
        prompt = self.ask(messages, tools)
        if prompt.reason not in (None, "end_token"):
            whole = rendered(self.renderer, self.restored.messages, tools)
            assert prompt.ids.tolist() == whole.tolist()
        return prompt.reason

    def reply(self, ids):
        """Sample these ids, or a text's; the message that the client sees."""
        ids = canonical(self.renderer, ids) if isinstance(ids, str) else ids
        ended = bool(len(ids)) and ids[-1] in self.renderer.end_ids
        text = self.renderer.decode(ids, ended=ended)
        opened = opens_reasoning(self.renderer, self.prompt.ids)
        parsed = parse_reply(text, self.tools, opened=opened)
        message = make_reply(parsed, "stop", model="m", usage=USAGE).message
        remember(
            *(self.session, self.restored.position, message, self.budget),
            ids=np.concatenate([self.prompt.ids, ids]),
            between=self.prompt.between,
            offered=self.prompt.offered,
            closed=ended,
            base=self.prompt.base,
        )
        return dict(message)

    def turn(self, messages, ids, tools=None):
        """Ask, and sample a reply; the messages with it."""
        self.ask(messages, tools)
        return [*messages, self.reply(ids)]

    def shown(self):
        return self.renderer.decode(self.prompt.ids, ended=False)


def canonical(renderer, text):
    """A reply in the tokenizer's own spelling, special tokens in it as text."""
    end = np.array(renderer.end_ids, np.int32)
    text = renderer._break(text, renderer.special)
    return np.concatenate([renderer.encode(text).ids, end])


def letters(renderer, text):
    """A reply of one token per byte."""
    pieces = [encode(renderer._plain, letter).ids for letter in text]
    return np.concatenate([*pieces, np.array(renderer.end_ids, np.int32)])


def results(reply, text="done"):
    """A result of each call, in another order than the calls."""
    ids = [call["id"] for call in reply.get("tool_calls") or ()]
    return [tool(each, text) for each in reversed(ids)]


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


def later(new):
    return [{"role": role, "content": text} for role, text in new]


@given(turns, st.booleans())
@example([(CALL, [("user", "")]), ("b", [("user", "c")])], True)
# a content that the template has, too
@example([("a", [("user", "user")]), ("b", [])], False)
def test_where_nothing_drifts_append_is_render_to_the_token(turns, tools):
    """And the messages that its tokens show are the same."""
    tools = [TOOL] if tools else None
    appending, rendering = Conversation(), Conversation(RENDERER, "render")
    messages = [{"role": "system", "content": "Be <|im_end|> brief."}, user("go")]
    for text, new in turns:
        prompt, whole = appending.ask(messages, tools), rendering.ask(messages, tools)
        assert prompt.ids.tolist() == whole.ids.tolist()
        assert prompt.reason == (None if len(messages) > 2 else "opening")
        n_known, shown = prompt.n_known, prompt.message_index
        # what comes after the latest reply
        assert (n_known > 0) == (prompt.n_base > 0)
        assert not n_known or messages[n_known - 1]["role"] == "assistant"
        index = whole.message_index
        index = np.where(index >= n_known, index - n_known, -1)
        if not tools:
            assert shown.tolist() == index[len(index) - len(shown) :].tolist()
            assert (index >= 0).sum() == (shown >= 0).sum()
        # both know it, so its markup is markup
        reply, _ = appending.reply(text), rendering.reply(text)
        messages = [*messages, reply, *results(reply), *later(new)]


@given(turns)
def test_append_says_what_render_says_and_begins_with_what_is_held(turns):
    """In tokens that no tokenizer would choose, and with a template that trims."""
    appending, rendering = Conversation(EMBEDDED), Conversation(EMBEDDED, "render")
    messages, held = [user("go")], np.empty(0, np.int32)
    for text, new in turns:
        text = f"a{text}b"
        prompt = appending.ask(messages)
        rendering.ask(messages)
        assert prompt.ids[: len(held)].tolist() == held.tolist()
        assert appending.shown() == rendering.shown()
        ids = letters(EMBEDDED, text) if text.isascii() else canonical(EMBEDDED, text)
        messages = [*messages, appending.reply(ids), *later(new)]
        held = np.concatenate([prompt.ids, ids])


def test_why_a_request_is_rendered():
    conversation = Conversation()
    system = {"role": "system", "content": "s"}
    messages = conversation.turn([system, user("u")], "Yes.", [TOOL])
    _, asked, reply = messages
    renamed = {"type": "function", "function": {"name": "sh"}}
    other = {"role": "system", "content": "other"}
    for expected, given_messages, tools in (
        (None, [*messages, NEXT], [TOOL]),
        ("opening", [user("u")], [TOOL]),
        ("tools", [*messages, NEXT], None),
        ("tools", [*messages, NEXT], [renamed]),
        ("unknown_reply", [other, asked, reply, NEXT], [TOOL]),
        ("unknown_reply", [system, user("you"), reply, NEXT], [TOOL]),
        ("unknown_reply", [system, asked, said("No."), NEXT], [TOOL]),
        ("unknown_reply", [*messages, NEXT, said("No."), NEXT], [TOOL]),
    ):
        assert conversation.reason(given_messages, tools) == expected
    assert Conversation(RENDERER, "render").reason([asked]) == "chosen"


def test_the_last_turn_before_an_edit_is_extended():
    conversation = Conversation()
    messages = conversation.turn(OPENING, "a <b")
    n_first = len(conversation.prompt.ids)
    messages = conversation.turn([*messages, user("and?"), user("so?")], "later")
    edited = [*messages[:2], user("and then?"), *messages[3:], NEXT]
    assert conversation.reason(edited) == "unknown_reply"
    prompt = conversation.prompt
    assert prompt.n_known == 2
    assert prompt.n_base > n_first


def test_a_reply_that_did_not_end_itself():
    conversation = Conversation()
    messages = conversation.turn(OPENING, canonical(RENDERER, "Yes.")[:-1])
    assert conversation.reason([*messages, NEXT]) == "unclosed"
    # what was rendered for it is gone on from
    messages = [*messages, NEXT, conversation.reply("b")]
    assert conversation.reason([*messages, NEXT]) is None
    messages = conversation.turn(OPENING, np.empty(0, np.int32))
    assert conversation.reason([*messages, NEXT]) == "unclosed"


def test_a_template_that_moves_tools():
    conversation = Conversation(byte_renderer(MOVES_TOOLS))
    messages = conversation.turn(OPENING, "Yes.", [TOOL])
    assert conversation.reason([*messages, NEXT], [TOOL]) == "template"


@pytest.mark.parametrize(("text", "reason"), [("", None), ("Look.\n", "template")])
def test_a_template_that_moves_text_beside_a_call(text, reason):
    conversation = Conversation(byte_renderer(MOVES_TEXT))
    messages = conversation.turn(OPENING, text + CALL, [TOOL])
    assert conversation.reason([*messages, *results(messages[-1])], [TOOL]) == reason


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (LATER, "{% if LAST %}!{% endif %}" + LATER, "rewritten"),
        (
            "{%- endfor %}<|im_end|>",
            "{%- endfor %}{{ '<|im_end|>' if not LAST or loop.index < 2 }}",
            "unended",
        ),
        (
            CONTENT,
            "{{ '-' if LAST and loop.index == 2 else message.content }}",
            "hidden",
        ),
    ],
    ids=["the text before", "an end", "the reply"],
)
def test_a_template_that_shows_its_whims_later(old, new, expected):
    # the digest notices it, whatever the template makes of replies
    new = new.replace("LAST", "(messages[-1].content == 'next')")
    renderer = byte_renderer(AS_STRING.replace(old, new))
    conversation = Conversation(renderer, past="sampled")
    messages = conversation.turn(OPENING, "Yes.")
    assert conversation.prompts.describe()["rendered"] == {}
    assert conversation.reason([*messages, NEXT]) == expected
    assert conversation.reason([*messages, user("other")]) is None


# as Qwen3.5: replies since the last user message have a block for their reasoning
BLOCKS = (
    "{% set at = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set at.last = loop.index0 %}{% endif %}{% endfor %}"
    + shown_as(
        "{% if message.role == 'assistant' and loop.index0 > at.last %}<think>\n"
        "{{ message.reasoning_content or '' }}\n</think>\n\n{% endif %}" + CONTENT
    ).replace(*OPENS)
)


@pytest.mark.parametrize("thought", ["hm", ""])
def test_past_reasoning(thought):
    """Tool results extend; a user message does where ``past`` says so."""
    renderer, reasons = byte_renderer(BLOCKS), {}
    for past in ("auto", "sampled", "template"):
        conversation, messages = Conversation(renderer, past=past), OPENING
        found = reasons[past] = []
        for text in (CALL, CALL, CALL, "Done."):
            found.append(conversation.ask(messages, [TOOL]).reason)
            reply = conversation.reply(f"{thought}\n</think>\n\n{text}")
            messages = [*messages, reply, *results(reply)]
        found.append(conversation.ask([*messages, NEXT], [TOOL]).reason)
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


def test_a_reply_that_ends_with_the_next_message_s_marker():
    tokenizer = byte_tokenizer()
    names = ("<|user|>", "<|assistant|>", "<|tool|>")
    tokenizer.add_tokens([AddedToken(name, special=True) for name in names])
    asked, answered = (tokenizer.convert_tokens_to_ids(names[k]) for k in (0, 2))
    renderer = ChatRenderer(tokenizer, MARKED, end_ids=[asked, answered])
    conversation = Conversation(renderer)
    text = encode(renderer._plain, CALL).ids.tolist()
    messages = conversation.turn(OPENING, np.array([*text, answered], "i4"), [TOOL])
    path = [*conversation.prompt.ids.tolist(), *text, answered]
    # the marker is there once
    prompt = conversation.ask([*messages, *results(messages[-1])], [TOOL])
    assert prompt.reason is None
    assert prompt.ids.tolist()[: len(path)] == path
    assert prompt.ids.tolist().count(answered) == 1
    # another one follows: the sampled one is replaced
    prompt = conversation.ask([*messages, NEXT], [TOOL])
    assert prompt.reason == "end_token"
    assert prompt.ids.tolist()[: len(path)] == [*path[:-1], asked]
    restored = conversation.restored
    whole = renderer.text(restored.messages, [TOOL], sampled=restored.sampled)
    assert conversation.shown() == whole


def test_a_reply_whose_end_the_template_writes_otherwise():
    """As gpt-oss: a reply in history ends with another token than the sampled one."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<|return|>", special=True)])
    ends = [tokenizer.convert_tokens_to_ids("<|return|>")]
    template = AS_STRING.replace("<|im_end|>", "<|im_start|>")
    renderer = ChatRenderer(tokenizer, template, end_ids=ends)
    renderer.end_ids, renderer.end_tokens = (ends[0],), frozenset(["<|return|>"])
    conversation = Conversation(renderer)
    messages = conversation.turn(OPENING, "Yes.")
    assert conversation.ask([*messages, NEXT]).reason is None
    assert "Yes.<|return|>\n<|im_start|>user\nnext" in conversation.shown()


def test_variables_are_part_of_what_is_extended():
    conversation = Conversation(byte_renderer("{{ effort or '' }}" + AS_STRING))
    conversation.ask(OPENING, effort="low")
    messages = [*OPENING, conversation.reply("a"), NEXT]
    assert conversation.ask(messages, effort="low").reason is None
    assert conversation.ask(messages).reason == "tools"
    prompt = conversation.ask(messages, effort="<|im_end|>")
    # a client cannot write control tokens with one either
    assert conversation.shown().startswith("<|im_end|><|im_start|>user")
    assert prompt.ids[0] < 256


def test_reasoning_that_the_template_drops():
    """Its reply comes back without it, too."""
    conversation = Conversation(EMBEDDED)
    messages = conversation.turn(OPENING, "<think>\nhm\n</think>\n\na")
    assert conversation.reason([*messages, NEXT]) == "reasoning"
    assert messages[-1].pop("reasoning_content") == "hm"
    assert conversation.reason([*messages, NEXT]) == "reasoning"


def test_a_fork_goes_on_from_its_own_path():
    conversation = Conversation(EMBEDDED)
    trunk = conversation.turn(OPENING, "a trunk " * 20)
    ways = []
    for text in ("left", "right"):
        ids = letters(EMBEDDED, f"{text} way")
        messages = conversation.turn([*trunk, user(text)], ids)
        ways.append((messages, [*conversation.prompt.ids.tolist(), *ids.tolist()]))
    for messages, path in ways:
        prompt = conversation.ask([*messages, NEXT])
        assert prompt.ids[: prompt.n_base].tolist() == path


def test_a_session_that_grows_needs_memory_for_its_longest_path():
    session, budget, nodes = Session(), Budget(1 << 40), []
    for i in range(300):
        base = nodes[-1] if nodes else None
        ids = np.repeat(np.arange(i + 1, dtype=np.int32), 50)
        place = (session, b"%d" % i, said(), budget)
        nodes.append(remember(*place, ids=ids, base=base))
    assert all(np.may_share_memory(node.own_ids, nodes[-1].own_ids) for node in nodes)
    for i, node in enumerate(nodes):
        assert node.own_ids.tolist() == np.repeat(np.arange(i + 1), 50).tolist()
    assert budget.n_bytes == session.n_bytes
    assert 4 * 50 * 300 < session.n_bytes < 4 * 50 * 300 + 300 * 1100
    session.close()
    assert budget.n_bytes == 0


def test_the_session_that_was_idle_longest_is_released():
    budget, sessions = Budget(30_000), [Session() for _ in range(3)]
    nodes = [
        remember(session, START, said(text), budget, ids=np.zeros(2000, "i4"))
        for session, text in zip((*sessions, sessions[0]), "abcd", strict=True)
    ]
    assert [node.own_ids is not None for node in nodes] == [True, False, True, True]
    assert budget.n_bytes <= 30_000
    # what is released is rendered
    conversation = Conversation(cache_bytes=2000)
    messages = conversation.turn(OPENING, "Yes.")
    conversation.turn([user("another agent")], "Yes.")
    assert conversation.reason([*messages, NEXT]) == "released"


def test_a_request_that_is_kept_counts_also_without_a_reply():
    session, budget = Session(), Budget(1 << 22)
    for number in range(4):
        texts = [user(f"{number} {i} " + "x" * 1000) for i in range(100)]
        session.restore(texts)
        session.count_kept(budget)
        assert budget.n_bytes == session.n_bytes > 100_000 * (number + 1)
    session.restore([user("é" + "y" * (1 << 21))])
    session.count_kept(budget)
    assert budget.n_bytes == session.n_bytes == 0
    session.close()
    session.restore(texts)
    session.count_kept(budget)
    assert budget.n_bytes == 0
    # as does what it was read from
    other = Session()
    other.restore([USER], {b"x" * 5000: None})
    assert other.n_bytes > 5000


# Through the gateway


@pytest.mark.anyio
async def test_fifty_turns_without_drift_are_one_row(tmp_path, start):
    tables = {}
    for mode in ("append", "render"):
        given = {"prompts": mode, "directory": tmp_path / mode, "attributed": True}
        engine = EmbeddedEngine(drift=0.3, seed=1)
        gateway = await start(engine=engine, renderer=EMBEDDED, **given)
        session, messages = await gateway.open(), []
        for i in range(25):
            messages.append(user(f"and {i}?"))
            # it runs the tools that are called
            while calls := (reply := await session.ask(*messages, tools=[TOOL])).get(
                "tool_calls"
            ):
                outputs = [tool(call["id"], f"file{i}.py\n") for call in calls]
                messages += [reply, *outputs]
            messages.append(reply)
        shown, tables[mode] = await session.shown(), gateway.table()
        assert shown["unattributed"] == 0
        built = {"append": {"opening": 1, "append": 49}, "render": {"chosen": 50}}
        assert shown["prompts"] == built[mode]
    turns = tables["append"]
    for policy in ("faithful", "strict", "slime", "trl"):
        rows = tk.linearize(turns, policy)
        assert rows.num_rows == 1
        assert tk.verify(rows, turns).num_rows == 0
    assert tk.linearize(tables["render"], "strict").num_rows > 1


# Which message each token shows

RENDERERS = {
    "as string": RENDERER,
    "as JSON": byte_renderer(AS_JSON),
    "embedded": EMBEDDED,
}


def calling(content, *ids, name="bash"):
    return said(content, tool_calls=[called(each, name) for each in ids])


def shown(renderer, messages, tools=None):
    """The text of each message that has content tokens; None: nothing is told."""
    prompts, replies = Prompts(renderer, "render"), Session()
    built = prompts.build(replies.restore(messages), tools, attributed=True)
    prompt, found = built.ids, built.message_index
    if found is None:
        return None
    assert len(found) == len(prompt)
    return {
        i: renderer.decode(prompt[found == i], ended=False)
        for i in np.unique(found).tolist()
        if i >= 0
    }


TALK = [
    {"role": "system", "content": "You are <b>brief</b>."},
    user("Mend it, naïvely 👍."),
    calling("Let me look.", "call_1", "call_2"),
    tool("call_1", "one"),
    tool("call_2", "two"),
    said("Done."),
    user(""),
    user("one"),
]


@pytest.mark.parametrize("renderer", RENDERERS.values(), ids=RENDERERS)
def test_each_content_is_found_to_the_letter(renderer):
    assert shown(renderer, TALK, [TOOL]) == {
        i: message["content"] for i, message in enumerate(TALK) if message["content"]
    }


def test_white_space_around_a_content_is_its_own_where_the_template_leaves_it():
    trims = byte_renderer(shown_as("{{ message.content | trim }}"))
    assert [shown(each, [user(" a\n")]) for each in (RENDERER, trims)] == [
        {0: " a\n"},
        {0: "a"},
    ]
    # the template's own is structure, also if it is the same
    leads = byte_renderer(shown_as("{{ '\\n' + message.content | trim }}"))
    assert shown(leads, [user("\na")]) == {0: "a"}


def test_a_token_across_the_border_is_structure():
    """The newline before a content that begins with one is one token with it."""
    text = "\n\nthen"
    found = shown(EMBEDDED, [user(text)])
    assert text.endswith(found[0])
    assert found[0] != text


@cases(
    "template",
    {
        "looks into it": "{{ messages[0].content | length }}",
        "refuses it": raises("messages[0].content != 'a|b'")
        + "{{ messages[0].content }}",
        "turns it round": "{{ messages[0].content | reverse }}",
        "shows halves": "{{ messages[0].content.split('|')[0] }}"
        "{{ messages[1].content.split('|')[1] }}",
    },
)
def test_a_template_that_looks_into_what_it_renders_tells_nothing(template):
    assert shown(byte_renderer(template), [user("a|b"), user("c|d")]) in (None, {})


def test_tool_names():
    messages = [
        calling("", "a"),
        tool("a"),
        calling("", "a", "b", name="edit"),
        tool("b", name="mine"),
        tool("a"),
        user("x") | {"name": "u"},
    ]
    names = [None, "bash", None, "edit", "mine", None]
    assert Session().restore(messages).tool_names == names


CUT = "{{ message.content[:4] }}{{ message.content[4:] | upper }}"


@pytest.mark.anyio
@cases(
    "content, attributed, unattributed",
    {
        "attributed": (CONTENT, True, 0),
        "cut": (CUT, True, 2),
        "left out": (CONTENT, False, 0),
    },
)
async def test_the_turns_of_a_session(start, content, attributed, unattributed):
    """Two calls with a tool's output between them; those without places are counted."""
    script, renderer = (f"Look.\n{CALL}", "done"), byte_renderer(shown_as(content))
    gateway = await start(*script, renderer=renderer, attributed=attributed)
    session, asked = await gateway.open(), {"tools": [TOOL]}
    answer = await session.ask(USER, **asked)
    result = tool(answer["tool_calls"][0]["id"], "file.py\n")
    await session.ask(USER, answer, result, **asked)
    turns = gateway.turns()
    assert (await session.shown())["unattributed"] == unattributed
    for name in ("prompt_message_index", "prompt_is_content"):
        missing = [turn.get(name) is None for turn in turns]
        assert missing == [not attributed or bool(unattributed)] * 2
    names = turns[1].get("message_tool_names")
    assert names is None if not attributed else names[-1] == "bash"
    assert json.loads(turns[1]["messages"][2]["body"])["content"] == "file.py\n"


@pytest.mark.anyio
async def test_attribution_where_the_template_counts_messages(start):
    renderer = byte_renderer(shown_as("{{ loop.index }} " + CONTENT))
    gateway = await start(*[CALL] * 3, renderer=renderer, attributed=True)
    session, talk = await gateway.open(), [USER]
    for _ in range(3):
        answer = await session.ask(*talk, tools=[TOOL])
        talk += [answer, tool(answer["tool_calls"][0]["id"], "x")]
    shown = await session.shown()
    assert (shown["unattributed"], shown["prompts"]["append"]) == (0, 2)
