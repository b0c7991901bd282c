"""Which message each token of a rendered prompt shows."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests.shim.clients import in_process
from tests.shim.fakes import (
    AS_JSON,
    AS_STRING,
    RENDERER,
    TOOL,
    ScriptedEngine,
    byte_renderer,
    byte_tokenizer,
    cases,
    load_tokenizer,
)
from tests.strategies import plain_texts, spoken_texts
from trajkit_shim.prompting.conversation import Conversation
from trajkit_shim.prompting.prompts import Prompts, _without_marks
from trajkit_shim.prompting.render import ChatRenderer

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command":  "ls"}}\n</tool_call>'
EMBEDDED = ChatRenderer(load_tokenizer())
RENDERERS = {
    "as string": RENDERER,
    "as JSON": byte_renderer(AS_JSON),
    "embedded": EMBEDDED,
}


def said(role, content, **fields):
    return {"role": role, "content": content, **fields}


def calling(content, *ids, name="bash"):
    calls = [
        {"id": i, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for i in ids
    ]
    return said("assistant", content, tool_calls=calls)


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
    said("system", "You are <b>brief</b>."),
    said("user", "Mend it, naïvely 👍."),
    calling("Let me look.", "call_1", "call_2"),
    said("tool", "one", tool_call_id="call_1"),
    said("tool", "two", tool_call_id="call_2"),
    said("assistant", "Done."),
    said("user", ""),
    said("user", "one"),
]


@pytest.mark.parametrize("renderer", RENDERERS.values(), ids=RENDERERS)
def test_each_content_is_found_to_the_letter(renderer):
    assert shown(renderer, TALK, [TOOL]) == {
        i: message["content"] for i, message in enumerate(TALK) if message["content"]
    }


def test_a_template_that_trims():
    template = AS_STRING.replace(
        "{{ message.content }}", "{{ message.content | trim }}"
    )
    messages = [said("user", " \n a b\n"), said("assistant", "c ")]
    assert shown(byte_renderer(template), messages) == {0: "a b", 1: "c"}
    assert shown(RENDERER, messages) == {0: " \n a b\n", 1: "c "}


def test_a_token_across_the_border_is_structure():
    """The newline before a content that begins with one is one token with it."""
    text = "\n\nthen"
    found = shown(EMBEDDED, [said("user", text)])
    assert found is not None
    assert text.endswith(found[0])
    assert found[0] != text


@given(st.lists(plain_texts | spoken_texts, min_size=1, max_size=4), st.booleans())
def test_any_content_in_any_template(texts, as_string):
    renderer = RENDERERS["as string" if as_string else "as JSON"]
    messages = [said("user", text) for text in texts]
    assert shown(renderer, messages) == {
        i: text for i, text in enumerate(texts) if text.strip()
    }


@cases(
    "template",
    {
        "looks into it": "{{ messages[0].content | length }}",
        "refuses it": "{% if messages[0].content != 'a' %}{{ raise_exception('a only') }}"
        "{% endif %}{{ messages[0].content }}",
        "turns it round": "{{ messages[0].content | reverse }}",
    },
)
def test_a_template_that_looks_into_what_it_renders_tells_nothing(template):
    assert shown(byte_renderer(template), [said("user", "a")]) in (None, {})


def test_tool_names():
    messages = [
        calling("", "a"),
        said("tool", "x", tool_call_id="a"),
        calling("", "a", "b", name="edit"),
        said("tool", "x", tool_call_id="b", name="mine"),
        said("tool", "x", tool_call_id="a"),
        said("user", "x", name="u"),
    ]
    names = [None, "bash", None, "edit", "mine", None]
    assert Conversation().restore(messages).tool_names == names


async def converse(gateway):
    """Two calls with a tool's output between them."""
    client = await gateway.open(session_id="a")
    messages = [said("user", "list it")]
    create = client.chat.completions.create
    reply = await create(model="m", messages=messages, tools=[TOOL])
    answer = reply.choices[0].message
    echo = answer.model_dump(include={"role", "content", "tool_calls"})
    messages.append(echo)
    messages.append(said("tool", "file.py\n", tool_call_id=answer.tool_calls[0].id))
    await create(model="m", messages=messages, tools=[TOOL])
    return await gateway.session(client)


@pytest.mark.anyio
async def test_a_session_s_tool_output_is_learned_by_its_tool_s_name(tmp_path):
    engine = ScriptedEngine(f"Look.\n{CALL}", "done")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        session = await converse(gateway)
    assert session["unattributed"] == 0
    turns = tk.read_turns(tmp_path)
    assert turns["message_tool_names"].to_pylist() == [[None], ["bash"]]
    rows = tk.linearize(turns)
    (row,) = tk.learn.observation_weights(
        rows, turns, tool_names={"bash": 0.5}
    ).to_pylist()
    weights = np.array(row["observation_weight"])
    learned = np.array(row["input_ids"], np.int32)[weights > 0]
    assert RENDERER.decode(learned, ended=False) == "file.py\n"
    assert set(weights.tolist()) == {0.0, 0.5}
    (none,) = tk.learn.observation_weights(rows, turns, tool_names=["edit"]).to_pylist()
    assert not any(none["observation_weight"])


@pytest.mark.anyio
async def test_turns_that_cannot_be_attributed_are_counted(tmp_path):
    template = AS_STRING.replace(
        "{{ message.content }}",
        "{{ message.content[:4] }}{{ message.content[4:] | upper }}",
    )
    renderer = ChatRenderer(byte_tokenizer(), template)
    engine = ScriptedEngine(f"Look.\n{CALL}", "done")
    async with in_process(engine, renderer, tmp_path) as gateway:
        session = await converse(gateway)
        turns = gateway.turns()
    assert session["unattributed"] == 2
    assert [turn["prompt_message_index"] for turn in turns] == [None, None]
    assert [turn["prompt_is_content"] for turn in turns] == [None, None]


@pytest.mark.anyio
async def test_attribution_can_be_left_out(tmp_path):
    engine = ScriptedEngine(f"Look.\n{CALL}", "done")
    async with in_process(engine, RENDERER, tmp_path, attributed=False) as gateway:
        session = await converse(gateway)
        turns = gateway.turns()
    assert session["unattributed"] == 0
    for name in ("prompt_message_index", "prompt_is_content", "message_tool_names"):
        assert [turn[name] for turn in turns] == [None, None]
    assert json.loads(turns[1]["messages"][2]["body"])["content"] == "file.py\n"


def test_marks_that_a_template_breaks_give_no_place():
    assert _without_marks("<m0;ab m0;>", "m") == ("<ab >", [(0, 1, 4)])
    assert _without_marks("<m0;ab m1;>", "m") == ("<m0;ab m1;>", None)
