"""Whose call it is: the session that a request names, its harness, agent and kind."""

import json

import pytest

from tests.shim.clients import in_process
from tests.shim.fakes import RENDERER, ScriptedEngine
from trajkit_shim.protocols.anthropic import ANTHROPIC
from trajkit_shim.sessions.client_identity import Caller, identify

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "hi"}
CALLS = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/messages": {"messages": [USER], "max_tokens": 9},
    "/v1/responses": {"input": "hi"},
    "/v1/models/a/b:generateContent": {"contents": [{"parts": [{"text": "hi"}]}]},
    "/v1beta/models/any:streamGenerateContent": {
        "contents": [{"parts": [{"text": "hi"}]}]
    },
}
EACH_CALL = pytest.mark.parametrize(("path", "body"), CALLS.items(), ids=str)


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


@EACH_CALL
async def test_every_place_of_the_session_s_key(tmp_path, path, body):
    engine = ScriptedEngine(*["x"] * len(list(places(path, "a"))))
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        asked = list(places(path, await gateway.open_key(session_id="a")))
        await gateway.open(session_id="b")
        for url, headers in asked:
            reply = await gateway.http.post(url, headers=headers, json=body)
            assert reply.status_code == 200, (url, headers)
        # a wrong name is no reason to take another one
        key = {"authorization": asked[0][1]["authorization"]}
        for url, name in ((f"/s/other{path}", {}), (path, {"x-session-key": "other"})):
            reply = await gateway.http.post(url, headers=key | name, json=body)
            assert reply.status_code == 401
        turns = gateway.turns()
    assert {turn["session_id"] for turn in turns} == {"a"}
    assert len(turns) == len(asked)
    assert {turn["protocol"] for turn in turns} <= {
        "openai_chat",
        "anthropic",
        "openai_responses",
        "gemini",
    }


@EACH_CALL
async def test_an_unknown_session_and_a_closed_one(tmp_path, path, body):
    engine = ScriptedEngine()
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        key = await gateway.open_key(session_id="a")
        await gateway.http.delete("/sessions/a")
        for session, status in ((key, 410), ("a", 401), ("never", 401)):
            for url, headers in places(path, session):
                if "b" in headers.values():
                    continue
                reply = await gateway.http.post(url, headers=headers, json=body)
                assert reply.status_code == status, (url, headers)
                assert reply.headers["x-should-retry"] == "false"
                error = json.loads(reply.text)["error"]
                assert error["message"]
                assert ("status" in error) == ("models" in path)
                assert ("param" in error) == (
                    path.split("/")[2] in ("chat", "responses")
                )
        unnamed = await gateway.http.post(path, json=body)
        assert unnamed.status_code == 401
        assert gateway.turns() == []
    assert engine.prompts == []


def asked(*texts, system=None, max_tokens=99):
    messages = [{"role": "user", "content": text} for text in texts]
    body = {"messages": messages, "system": system, "max_tokens": max_tokens}
    return ANTHROPIC.read(body)


CLAUDE = {"x-claude-code-session-id": "s"}
OPENCODE = {"user-agent": "opencode/1.18.33 ai-sdk", "x-session-id": "s1"}
CODEX = {"originator": "codex_exec", "thread-id": "t1"}


CODEX_PARENT = {**CODEX, "x-codex-parent-thread-id": "t0"}
CLAUDE_AGENT = {"x-claude-code-agent-id": "a1", "x-claude-code-parent-agent-id": "a0"}
GEMINI = {"user-agent": "GeminiCLI-tui/0.61.0/m (linux; x64; terminal)"}
QWEN = {"user-agent": "QwenCode/0.15.10 (linux; x64)"}
TITLE = "x\nGenerate a concise, sentence-case title (3-7"
SUMMARY = "Your task is to create a detailed summary of the"
CHECKPOINT = "You are performing a CONTEXT CHECKPOINT COMPACTION."
DISTILL = "distilling chat history into a structured XML"
SO_FAR = "Here is the conversation so far:\n\n<conversation>"
MEMORIES = "acting as the managed memory extraction subagent"
INTERNAL = "the component that summarizes internal chat history into a given"


@pytest.mark.parametrize(
    ("headers", "request_", "harness", "agent", "parent", "kind"),
    [
        ({}, asked("quota", max_tokens=1), None, None, None, None),
        ({"originator": "another", "thread-id": "t"}, asked("hi"), *[None] * 4),
        (CLAUDE, asked("hi"), "claude-code", None, None, "agent"),
        (CLAUDE | CLAUDE_AGENT, asked("hi"), "claude-code", "a1", "a0", "agent"),
        (CLAUDE, asked("quota", max_tokens=1), "claude-code", None, None, "probe"),
        (CLAUDE, asked("what is my quota?"), "claude-code", None, None, "agent"),
        (CLAUDE, asked("fix", system=TITLE), "claude-code", None, None, "title"),
        (CLAUDE, asked("hi", SUMMARY), "claude-code", None, None, "compaction"),
        (CLAUDE, asked(SUMMARY, "and now?"), "claude-code", None, None, "agent"),
        (CODEX_PARENT, asked("hi"), "codex", "t1", "t0", "agent"),
        (CODEX, asked(CHECKPOINT), "codex", "t1", None, "compaction"),
        (GEMINI, asked("hi", system=DISTILL), "gemini-cli", None, None, "compaction"),
        (
            OPENCODE | {"x-parent-session-id": "s0"},
            asked("hi"),
            *("opencode", "s1", "s0", "agent"),
        ),
        (OPENCODE, asked(SO_FAR), "opencode", "s1", None, "compaction"),
        (QWEN, asked("hi", system=MEMORIES), "qwen-code", None, None, "memory"),
        (QWEN, asked("hi", system=INTERNAL), "qwen-code", None, None, "compaction"),
    ],
)
def test_identify(headers, request_, harness, agent, parent, kind):
    assert identify(headers, request_) == Caller(
        harness=harness, agent_id=agent, parent_agent_id=parent, call_kind=kind
    )


async def test_the_caller_is_written_beside_the_turn(tmp_path):
    async with in_process(ScriptedEngine("x"), RENDERER, tmp_path) as gateway:
        key = await gateway.open_key(session_id="a")
        await gateway.http.post(
            f"/s/{key}/v1/messages?beta=true",
            headers={"X-Claude-Code-Session-Id": "s", "X-Claude-Code-Agent-Id": "a1"},
            json=CALLS["/v1/messages"],
        )
        (turn,) = gateway.turns()
    assert turn["harness"] == "claude-code"
    assert (turn["agent_id"], turn["parent_agent_id"]) == ("a1", None)
    assert (turn["call_kind"], turn["protocol"]) == ("agent", "anthropic")


@pytest.mark.parametrize("asked_for", [False, True])
async def test_side_calls_train_only_if_asked_for(tmp_path, asked_for):
    engine = ScriptedEngine("x", "y")
    options = {"train_side_calls": asked_for}
    async with in_process(engine, RENDERER, tmp_path, **options) as gateway:
        key = await gateway.open_key()
        for text in ("hi", "Your task is to create a detailed summary of it"):
            body = {**CALLS["/v1/messages"]}
            body["messages"] = [{"role": "user", "content": text}]
            await gateway.http.post(f"/s/{key}/v1/messages", headers=CLAUDE, json=body)
        turns = gateway.turns()
    assert [turn["call_kind"] for turn in turns] == ["agent", "compaction"]
    assert [turn["trainable"] for turn in turns] == [True, asked_for]


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        pytest.param(
            [{"type": "tool_result", "tool_use_id": "c", "content": "PHRASE"}],
            "agent",
            id="a tool's result",
        ),
        pytest.param([{"type": "text", "text": "PHRASE"}], "compaction", id="the user"),
    ],
)
def test_what_a_tool_returned_says_nothing_about_the_call(content, kind):
    phrase = "Your task is to create a detailed summary of the conversation"
    text = json.dumps(content).replace("PHRASE", phrase)
    call = {"type": "tool_use", "id": "c", "name": "cat", "input": {}}
    request = ANTHROPIC.read(
        {
            "max_tokens": 9,
            "messages": [
                USER,
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": json.loads(text)},
            ],
        }
    )
    caller = identify({"x-claude-code-session-id": "a"}, request)
    assert caller.call_kind == kind
