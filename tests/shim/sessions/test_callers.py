"""Whose call it is: its session, harness, agent and kind, and what started its agent."""

import json

import pytest

import trajkit as tk
from tests.shim.clients import BODIES, NAMES, PATHS
from tests.shim.fakes import (
    ScriptedEngine,
    called,
    cases,
    remember,
    said,
    sampled_call,
    user,
)
from trajkit_shim.prompting.conversation import START, Conversation
from trajkit_shim.protocols.anthropic import ANTHROPIC
from trajkit_shim.sessions.client_identity import Caller, identify

pytestmark = pytest.mark.anyio

CALLS = [*((PATHS[name], BODIES[name]) for name in NAMES)]
CALLS += [("/v1beta/models/any:streamGenerateContent", BODIES["gemini"])]


def places(path, session):
    """Every place where a request may name its session, with the path it then has."""
    yield path, {"authorization": f"Bearer {session}"}
    yield path, {"authorization": f"bearer  {session}"}
    yield path, {"x-api-key": session}
    yield path, {"x-goog-api-key": session}
    yield f"{path}?key={session}", {}
    yield path, {"x-session-key": session}
    yield f"/s/{session}{path}", {}
    yield path, {"authorization": "Bearer sk-other", "x-api-key": session}
    # the nearer place wins
    yield f"/s/{session}{path}", {"x-session-key": "b", "x-api-key": "b"}
    yield path, {"x-session-key": session, "authorization": "Bearer b"}


@pytest.mark.parametrize(("path", "body"), CALLS, ids=str)
async def test_every_place_of_the_session_s_key(start, path, body):
    gateway = await start(*["x"] * 10)
    session = await gateway.open(session_id="a")
    await gateway.open(session_id="b")

    async def status(url, headers):
        return (await gateway.http.post(url, headers=headers, json=body)).status_code

    for url, headers in places(path, session.key):
        assert await status(url, headers) == 200, (url, headers)
    # a wrong name is no reason to take another one, nor is an id a key
    key = {"authorization": f"Bearer {session.key}"}
    assert await status(f"/s/other{path}", key) == 401
    assert await status(path, {**key, "x-session-key": "a"}) == 401
    assert await status(path, {}) == 401
    await session.end()
    reply = await gateway.http.post(path, headers=key, json=body)
    assert (reply.status_code, reply.headers["x-should-retry"]) == (410, "false")
    assert [turn["session_id"] for turn in gateway.turns()] == ["a"] * 10


def asked(*texts, system=None, max_tokens=99):
    messages = [user(text) for text in texts]
    return ANTHROPIC.read(
        {"messages": messages, "system": system, "max_tokens": max_tokens}
    )


CLAUDE = {"x-claude-code-session-id": "s"}
OPENCODE = {"user-agent": "opencode/1.18.33 ai-sdk", "x-session-id": "s1"}
CODEX = {"originator": "codex_exec", "thread-id": "t1"}
FROM_T0, FROM_S0 = {"x-codex-parent-thread-id": "t0"}, {"x-parent-session-id": "s0"}
GEMINI = {"user-agent": "GeminiCLI-tui/0.61.0/m (linux; x64; terminal)"}
QWEN = {"user-agent": "QwenCode/0.15.10 (linux; x64)"}
TITLE = "x\nGenerate a concise, sentence-case title (3-7"
SUMMARY = "Your task is to create a detailed summary of the conversation so far, paying"
PAGE = "\nWeb page content:\n---\na"
STUCK = "whether a conversational AI assistant is stuck in an"
CHECKPOINT = "You are performing a CONTEXT CHECKPOINT COMPACTION."
DISTILL = "distilling chat history into a structured XML"
SO_FAR = "Here is the conversation so far:\n\n<conversation>"
MEMORIES = "acting as the managed memory extraction subagent"
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": SUMMARY}
INTERNAL = "the component that summarizes internal chat history into a given"


def claude(agent=None, parent=None):
    named = {"x-claude-code-agent-id": agent, "x-claude-code-parent-agent-id": parent}
    return {**CLAUDE, **{name: value for name, value in named.items() if value}}


@pytest.mark.parametrize(
    ("headers", "request_", "caller"),
    [
        ({}, asked("quota", max_tokens=1), Caller()),
        ({"originator": "another", "thread-id": "t"}, asked("hi"), Caller()),
        (CLAUDE, asked("hi"), ("claude-code", None, None, "agent")),
        (claude("a1", "a0"), asked("hi"), ("claude-code", "a1", "a0", "agent")),
        (CLAUDE, asked("quota", max_tokens=1), ("claude-code", None, None, "probe")),
        (CLAUDE, asked("what is my quota?"), ("claude-code", None, None, "agent")),
        (CLAUDE, asked("fix", system=TITLE), ("claude-code", None, None, "title")),
        (CLAUDE, asked("hi", SUMMARY), ("claude-code", None, None, "compaction")),
        (CLAUDE, asked(SUMMARY, "and now?"), ("claude-code", None, None, "agent")),
        (CLAUDE, asked(SUMMARY[:-30]), ("claude-code", None, None, "agent")),
        (CLAUDE, asked(PAGE), ("claude-code", None, None, "tool")),
        # what a tool returned says nothing about the call
        (CLAUDE, asked([RESULT]), ("claude-code", None, None, "agent")),
        (CODEX | FROM_T0, asked("hi"), ("codex", "t1", "t0", "agent")),
        (CODEX, asked(CHECKPOINT), ("codex", "t1", None, "compaction")),
        (GEMINI, asked("hi", system=DISTILL), ("gemini-cli", None, None, "compaction")),
        (GEMINI, asked("hi", system=STUCK), ("gemini-cli", None, None, "check")),
        (OPENCODE | FROM_S0, asked(SO_FAR[:32]), ("opencode", "s1", "s0", "agent")),
        (OPENCODE, asked(SO_FAR), ("opencode", "s1", None, "compaction")),
        (QWEN, asked("hi", system=MEMORIES), ("qwen-code", None, None, "memory")),
        (QWEN, asked("hi", system=INTERNAL), ("qwen-code", None, None, "compaction")),
    ],
)
def test_identify(headers, request_, caller):
    assert identify(headers, request_) == caller


@pytest.mark.parametrize("asked_for", [False, True])
async def test_side_calls_train_only_if_asked_for(start, asked_for):
    gateway = await start("x", "y", train_side_calls=asked_for)
    session, path = await gateway.open(), "/v1/messages?beta=true"
    given = {"path": path, "headers": {k.title(): v for k, v in claude("a1").items()}}
    for text in ("hi", SUMMARY):
        await session.post("anthropic", messages=[user(text)], **given)
    turns = gateway.turns()
    callers = [(t["harness"], t["agent_id"], t["parent_agent_id"]) for t in turns]
    assert callers == [("claude-code", "a1", None)] * 2
    assert [turn["call_kind"] for turn in turns] == ["agent", "compaction"]
    assert [turn["trainable"] for turn in turns] == [True, asked_for]


# Sub-agents are linked to the tool calls that started them

PROMPT = "Find every caller of f."
OTHER = "Find every caller of f. Then list them."
NOTHING = (None, None)


def dispatch(*prompts):
    """A reply that starts sub-agents."""
    given = ({"description": "look", "prompt": prompt} for prompt in prompts)
    return "\n".join(sampled_call("Agent", json.dumps(each)) for each in given)


@pytest.fixture
def agents(start):
    """Of a script: the agents of one session, which ask with Anthropic's protocol."""

    async def opened(*script):
        engine = ScriptedEngine(*script, context=10**6)
        gateway = await start(engine=engine, max_new_tokens=10**6)
        session = await gateway.open()

        async def ask(*messages, headers=None):
            """The blocks of the reply, and the turn and call that started the agent."""
            answer = await session.post(
                "anthropic",
                headers=headers,
                messages=[user(m) if isinstance(m, str) else m for m in messages],
                max_tokens=10**6,
                tools=[{"name": "Agent", "input_schema": {"type": "object"}}],
            )
            turn = gateway.turns()[-1]
            found = (turn["started_by_turn"], turn["started_by_call"])
            return answer.json()["content"], found

        ask.gateway = gateway
        return ask

    return opened


async def test_a_conversation_with_the_prompt_of_a_call(agents):
    ask = await agents("hi", dispatch(f"  {PROMPT}\n"), *"abcd")
    hello, first = await ask("Do it.")
    (call,), second = await ask("Do it.", said(hello), "Now.")
    # a conversation that goes on is started by nothing, also if its user says the same
    _, same = await ask("Do it.", said(hello), PROMPT)
    # the client puts a reminder around the prompt
    reply, root = await ask(f"<reminder/>\n{PROMPT}\n")
    _, later = await ask(f"<reminder/>\n{PROMPT}\n", said(reply), "Go on.")
    _, other = await ask("Something that no call contains.")
    assert first == second == same == later == other == NOTHING
    assert root == (1, call["id"])
    turns = ask.gateway.table()
    lines = tk.analysis.call_tree(turns, turns["session_id"][0].as_py())
    assert [line for line in lines if "started" in line] == [
        line for line in lines if "turn 3:" in line
    ]
    assert any(line.endswith("sub-agent, started by turn 1") for line in lines)


async def test_equal_prompts_get_their_calls_in_order(agents):
    ask = await agents(dispatch(PROMPT, OTHER, PROMPT), *"abcde")
    one, two, three = (call["id"] for call in (await ask("Do it."))[0])
    # the longer prompt contains the shorter one; the last two are resends
    prompts = (OTHER, PROMPT, PROMPT, PROMPT, OTHER)
    found = [(await ask(prompt))[1][1] for prompt in prompts]
    assert found == [two, one, three, three, two]


async def test_a_named_agent_has_one_start(agents):
    ask = await agents(dispatch(PROMPT, PROMPT), *"abcd")
    one, two = (call["id"] for call in (await ask("Do it.", headers=claude()))[0])
    for prompt, agent, call in (
        *((PROMPT, "x", one), (PROMPT, "x", one), ("What was done: much.", "x", one)),
        (PROMPT, "y", two),
    ):
        assert (await ask(prompt, headers=claude(agent)))[1] == (0, call)


async def test_only_a_call_of_the_parent_starts_a_named_agent(agents):
    ask = await agents(dispatch(PROMPT, PROMPT), dispatch(PROMPT), *"abc")
    # the second call starts none
    (outer, _), _ = await ask("Do it.", headers=claude())
    (inner,), child = await ask(PROMPT, headers=claude("x"))
    assert child == (0, outer["id"])
    for headers, expected in (
        (claude("y", "x"), (1, inner["id"])),
        (claude("z", "w"), NOTHING),
        (claude(), NOTHING),
    ):
        assert (await ask(f"Done: {PROMPT}", headers=headers))[1] == expected


LINES = 'Find "f".\nList every caller.'
BESIDE = [{"type": "text", "text": LINES}, {"type": "image", "sha256": "0" * 64}]
LONGER = f"Look at f. {PROMPT}"


@cases(
    "arguments, opening, started",
    {
        "its prompt": ({"prompt": PROMPT}, LONGER, True),
        "a text beside an image": ({"prompt": LINES}, BESIDE, True),
        "a short prompt": ({"prompt": "Look at f."}, LONGER, False),
        "another argument": ({"command": PROMPT}, LONGER, False),
        "long arguments": ({"prompt": PROMPT, "x": "x" * (1 << 16)}, LONGER, False),
        "changed": ({"prompt": PROMPT.replace("every", "each")}, LONGER, False),
        "no text": ({"prompt": 3}, LONGER, False),
        # the parser of an engine may give what is no object
        "a list": ([PROMPT], LONGER, False),
        "nothing": (None, LONGER, False),
    },
)
def test_what_starts_an_agent(arguments, opening, started):
    session = Conversation()
    call = called("c", "Agent", json.dumps(arguments))
    remember(session, START, said("", tool_calls=[call]), turn=3)
    asked = session.restore([user(opening)])
    found = session.started_by(asked, None, None, named=False)
    assert found == ({"started_by_turn": 3, "started_by_call": "c"} if started else {})
