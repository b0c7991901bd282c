"""Sub-agents are linked to the tool calls that started them."""

import json

import pytest

import trajkit as tk
from tests.shim.clients import in_process
from tests.shim.fakes import RENDERER, ScriptedEngine, remember
from trajkit_shim.chat.request import assistant_message, tool_call
from trajkit_shim.prompting.conversation import START, Conversation

pytestmark = pytest.mark.anyio

PROMPT = "Find every caller of f."
OTHER = "Find every caller of f. Then list them."
CLAUDE = {"x-claude-code-session-id": "s"}


def dispatch(*prompts, tool="Agent", name="prompt"):
    """A reply that starts sub-agents."""
    calls = [
        {"name": tool, "arguments": {"description": "look", name: prompt}}
        for prompt in prompts
    ]
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


class Agents:
    """The agents of one session, which ask with Anthropic's protocol."""

    def __init__(self, gateway, key):
        self.gateway, self.key = gateway, key

    async def ask(self, *messages, **headers):
        """The blocks of the reply to these messages, and the turn."""
        body = {
            "max_tokens": 100_000,
            "messages": [*messages],
            "tools": [{"name": "Agent", "input_schema": {"type": "object"}}],
        }
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        reply = await self.gateway.http.post(
            "/v1/messages",
            headers={"x-session-key": self.key, **names},
            json=body,
        )
        assert reply.status_code == 200, reply.text
        return reply.json()["content"], self.gateway.turns()[-1]


def user(text):
    return {"role": "user", "content": text}


def started(turn):
    return turn["started_by_turn"], turn["started_by_call"]


NOTHING = (None, None)


async def session_of(gateway):
    return Agents(gateway, await gateway.open_key())


def claude(agent=None, parent=None):
    named = {"x-claude-code-agent-id": agent, "x-claude-code-parent-agent-id": parent}
    return {**CLAUDE, **{name: value for name, value in named.items() if value}}


async def test_a_conversation_with_the_prompt_of_a_call(tmp_path):
    engine = ScriptedEngine("hi", dispatch(f"  {PROMPT}\n"), "a", "b", "c")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        agents = await session_of(gateway)
        hello, first = await agents.ask(user("Do it."))
        said = [user("Do it."), {"role": "assistant", "content": hello}, user("Now.")]
        (call,), second = await agents.ask(*said)
        # the client puts a reminder around the prompt
        reply, root = await agents.ask(user(f"<reminder/>\n{PROMPT}\n"))
        _, later = await agents.ask(
            user(f"<reminder/>\n{PROMPT}\n"),
            {"role": "assistant", "content": reply},
            user("Go on."),
        )
        _, other = await agents.ask(user("Something that no call contains."))
    assert started(first) == started(second) == NOTHING
    assert started(root) == (1, call["id"])
    assert started(later) == started(other) == NOTHING
    lines = tk.analysis.call_tree(tk.read_turns(tmp_path), root["session_id"])
    assert [line for line in lines if "started" in line] == [
        line for line in lines if "turn 2:" in line
    ]
    assert any(line.endswith("sub-agent, started by turn 1") for line in lines)


async def test_a_conversation_that_goes_on_is_started_by_nothing(tmp_path):
    """Also where its user says what a call asks for that started no agent yet."""
    engine = ScriptedEngine("hi", dispatch(PROMPT), "a")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        agents = await session_of(gateway)
        hello, _ = await agents.ask(user("Do it."))
        said = [user("Do it."), {"role": "assistant", "content": hello}]
        await agents.ask(*said, user("Now."))
        _, later = await agents.ask(*said, user(PROMPT))
    assert started(later) == NOTHING


async def test_equal_prompts_get_their_calls_in_order(tmp_path):
    engine = ScriptedEngine(dispatch(PROMPT, OTHER, PROMPT), *"abcde")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        agents = await session_of(gateway)
        calls, _ = await agents.ask(user("Do it."))
        one, two, three = (call["id"] for call in calls)
        found = [
            started((await agents.ask(user(prompt)))[1])[1]
            # the longer prompt contains the shorter one; the last two are resends
            for prompt in (OTHER, PROMPT, PROMPT, PROMPT, OTHER)
        ]
    assert found == [two, one, three, three, two]


async def test_a_named_agent_has_one_start(tmp_path):
    engine = ScriptedEngine(dispatch(PROMPT, PROMPT), *"abcd")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        agents = await session_of(gateway)
        calls, _ = await agents.ask(user("Do it."), **claude())
        one, two = (call["id"] for call in calls)
        _, root = await agents.ask(user(PROMPT), **claude("x"))
        _, again = await agents.ask(user(PROMPT), **claude("x"))
        _, compacted = await agents.ask(user("What was done: much."), **claude("x"))
        _, twin = await agents.ask(user(PROMPT), **claude("y"))
    assert [started(t)[1] for t in (root, again, compacted, twin)] == [one] * 3 + [two]


async def test_only_a_call_of_the_parent_starts_a_named_agent(tmp_path):
    engine = ScriptedEngine(dispatch(PROMPT, PROMPT), dispatch(PROMPT), *"abc")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        agents = await session_of(gateway)
        # the second call starts none
        (outer, _), _ = await agents.ask(user("Do it."), **claude())
        (inner,), child = await agents.ask(user(PROMPT), **claude("x"))
        _, nested = await agents.ask(user(PROMPT), **claude("y", "x"))
        _, stranger = await agents.ask(user(PROMPT), **claude("z", "w"))
        _, main = await agents.ask(user(f"Done: {PROMPT}"), **claude())
    assert started(child) == (0, outer["id"])
    assert started(nested) == (1, inner["id"])
    assert started(stranger) == started(main) == NOTHING


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(dispatch("Look at f."), id="a short prompt"),
        pytest.param(dispatch(PROMPT, name="command"), id="another argument"),
        pytest.param(dispatch(PROMPT + "x" * (1 << 16)), id="long arguments"),
        pytest.param(dispatch(PROMPT.replace("every", "each")), id="changed"),
        pytest.param(
            '<tool_call>\n{"name": "Agent", "arguments": {"prompt": 3}}\n</tool_call>',
            id="no text",
        ),
    ],
)
async def test_what_is_not_linked(tmp_path, reply):
    engine = ScriptedEngine(reply, "a", context=10**6)
    options = {"max_new_tokens": 10**6}
    async with in_process(engine, RENDERER, tmp_path, **options) as gateway:
        agents = await session_of(gateway)
        await agents.ask(user("Do it."))
        _, root = await agents.ask(user(f"Look at f. {PROMPT}"))
    assert started(root) == NOTHING


def started_after(arguments, opening):
    """What started the agent that opens with a content, if a call has the arguments."""
    session, call = Conversation(), tool_call("c", "Agent", arguments)
    remember(session, START, assistant_message("", calls=[call]), turn=3)
    restored = session.restore([{"role": "user", "content": opening}])
    return session.started_by(restored, None, None, named=False)


def test_a_prompt_of_several_lines_next_to_an_image():
    prompt = 'Find "f".\nList every caller.'
    parts = [{"type": "text", "text": prompt}, {"type": "image", "sha256": "0" * 64}]
    assert started_after(json.dumps({"prompt": prompt}), parts) == {
        "started_by_turn": 3,
        "started_by_call": "c",
    }


@pytest.mark.parametrize("arguments", ['["a text that is no prompt"]', "null", "7"])
def test_arguments_that_are_no_object(arguments):
    """The parser of an engine may give such."""
    assert started_after(arguments, arguments) == {}
