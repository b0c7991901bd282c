"""Which message each token of a rendered prompt shows."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests.shim.clients import USER
from tests.shim.fakes import (
    AS_JSON,
    AS_STRING,
    EMBEDDED,
    RENDERER,
    TOOL,
    byte_renderer,
    called,
    cases,
    said,
    sampled_call,
    tool,
    user,
)
from tests.strategies import plain_texts, spoken_texts
from trajkit_shim.prompting.conversation import Conversation
from trajkit_shim.prompting.prompts import Prompts

RENDERERS = {
    "as string": RENDERER,
    "as JSON": byte_renderer(AS_JSON),
    "embedded": EMBEDDED,
}


def calling(content, *ids, name="bash"):
    return said(content, tool_calls=[called(each, name) for each in ids])


def shown(renderer, messages, tools=None):
    """The text of each message that has content tokens; None: nothing is told."""
    prompts, replies = Prompts(renderer, "render"), Conversation()
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


def test_a_template_that_trims():
    trims = AS_STRING.replace("message.content }}", "message.content | trim }}")
    messages = [user(" \n a b\n"), said("c ")]
    assert shown(byte_renderer(trims), messages) == {0: "a b", 1: "c"}
    assert shown(RENDERER, messages) == {0: " \n a b\n", 1: "c "}


def test_a_token_across_the_border_is_structure():
    """The newline before a content that begins with one is one token with it."""
    text = "\n\nthen"
    found = shown(EMBEDDED, [user(text)])
    assert text.endswith(found[0])
    assert found[0] != text


@given(st.lists(plain_texts | spoken_texts, min_size=1, max_size=4), st.booleans())
def test_any_content_in_any_template(texts, as_string):
    renderer = RENDERERS["as string" if as_string else "as JSON"]
    expected = {i: text for i, text in enumerate(texts) if text.strip()}
    assert shown(renderer, [*map(user, texts)]) == expected


@cases(
    "template",
    {
        "looks into it": "{{ messages[0].content | length }}",
        "refuses it": "{% if messages[0].content != 'a|b' %}"
        "{{ raise_exception('a only') }}{% endif %}{{ messages[0].content }}",
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
    assert Conversation().restore(messages).tool_names == names


@pytest.fixture
def converse(start):
    """Two calls with a tool's output between them: what is known of the session, turns."""

    async def converse(**options):
        gateway = await start(f"Look.\n{sampled_call()}", "done", **options)
        session, asked = await gateway.open(), {"tools": [TOOL]}
        answer = await session.ask("list it", **asked)
        result = tool(answer["tool_calls"][0]["id"], "file.py\n")
        await session.ask("list it", answer, result, **asked)
        return (await session.shown())["unattributed"], gateway

    return converse


@pytest.mark.anyio
async def test_a_session_s_tool_output_is_learned_by_its_tool_s_name(converse):
    unattributed, gateway = await converse()
    turns = gateway.table()
    assert unattributed == 0
    assert turns["message_tool_names"].to_pylist() == [[None], ["bash"]]
    rows = tk.linearize(turns)
    weigh = tk.learn.observation_weights
    (row,) = weigh(rows, turns, tool_names={"bash": 0.5}).to_pylist()
    weights = np.array(row["observation_weight"])
    learned = np.array(row["input_ids"], np.int32)[weights > 0]
    assert RENDERER.decode(learned, ended=False) == "file.py\n"
    assert set(weights.tolist()) == {0.0, 0.5}
    (none,) = weigh(rows, turns, tool_names=["edit"]).to_pylist()
    assert not any(none["observation_weight"])


@pytest.mark.anyio
@pytest.mark.parametrize("attributed", [True, False])
async def test_turns_that_are_not_attributed(converse, attributed):
    """Those that cannot be are counted."""
    cut = "message.content[:4] }}{{ message.content[4:] | upper }}"
    template = AS_STRING.replace("message.content }}", cut) if attributed else AS_STRING
    options = {"renderer": byte_renderer(template), "attributed": attributed}
    unattributed, gateway = await converse(**options)
    turns = gateway.turns()
    assert unattributed == (2 if attributed else 0)
    names = ["prompt_message_index", "prompt_is_content"]
    for name in names if attributed else [*names, "message_tool_names"]:
        assert [turn[name] for turn in turns] == [None, None]
    assert json.loads(turns[1]["messages"][2]["body"])["content"] == "file.py\n"
    assert turns[0]["messages"][0]["role"] == USER["role"]
