"""Who calls, and what for: harness, agent, and whether it is a side call.

A signature describes what a harness's requests look like; a new harness needs one here.
The result is recorded with the turn. A side call is not trained unless the gateway is
asked to.
"""

from collections.abc import Mapping
from typing import NamedTuple

from trajkit_shim.chat.request import ChatRequest

AGENT = "agent"
"""The kind of a known harness's call that matches no side call."""


class SideCall(NamedTuple):
    """A call that is recognized by all given marks."""

    kind: str
    system: str = ""  # contained in the first system message
    # contained in the last message, which is the user's: what a tool returned says
    # nothing about who asks
    last: str = ""
    max_tokens: int | None = None  # token limit of the reply

    def describes(self, request: ChatRequest) -> bool:
        def shows(text: str, role: str, at: int) -> bool:
            message = request.messages[at]
            has_role = message["role"] == role
            return not text or (has_role and text in str(message["content"]))

        limits = None, request.sampling.get("max_tokens")
        marks = shows(self.system, "system", 0) and shows(self.last, "user", -1)
        return marks and self.max_tokens in limits


class HarnessSignature(NamedTuple):
    """How to recognize a harness, and how it names its agents."""

    name: str
    # a header, and the start of its value
    header: str
    starts: str
    # headers with the ids of the agent (null: the main one) and of its parent; empty:
    # it does not name them
    agent: str
    parent: str
    side_calls: tuple[SideCall, ...]


# what these versions of the clients send: Claude Code 2.1.197, Codex 0.169.0 (each agent
# is a thread, including the main one), Gemini CLI 0.61.0, opencode 1.18.33 (each agent is
# a session of its own), Qwen Code 0.15.10
HARNESSES = (
    HarnessSignature(
        *("claude-code", "x-claude-code-session-id", ""),
        *("x-claude-code-agent-id", "x-claude-code-parent-agent-id"),
        (
            SideCall("probe", last="quota", max_tokens=1),
            SideCall("title", system="Generate a concise, sentence-case title"),
            SideCall("title", system="succinct title and git branch name"),
            SideCall("compaction", last="Your task is to create a detailed summary of"),
        ),
    ),
    HarnessSignature(
        *("codex", "originator", "codex", "thread-id", "x-codex-parent-thread-id"),
        (SideCall("compaction", last="CONTEXT CHECKPOINT COMPACTION"),),
    ),
    HarnessSignature(
        *("gemini-cli", "user-agent", "GeminiCLI", "", ""),
        (SideCall("compaction", system="distilling chat history into a structured"),),
    ),
    HarnessSignature(
        *("opencode", "user-agent", "opencode/", "x-session-id", "x-parent-session-id"),
        (
            SideCall("title", system="You are a title generator"),
            SideCall("compaction", last="Here is the conversation so far:"),
        ),
    ),
    HarnessSignature(
        *("qwen-code", "user-agent", "QwenCode/", "", ""),
        (
            SideCall("compaction", system="summarizes internal chat history into a"),
            SideCall("memory", system="the managed memory extraction subagent"),
            SideCall("title", system="Generate a concise, sentence-case title"),
        ),
    ),
)


class Caller(NamedTuple):
    """Who calls, as far as the request shows. ``None``: unknown."""

    harness: str | None = None
    agent_id: str | None = None
    parent_agent_id: str | None = None
    call_kind: str | None = None

    @property
    def is_side_call(self) -> bool:
        """Whether the harness made the call for itself, not for the agent's task."""
        return self.call_kind not in (None, AGENT)


def identify(headers: Mapping[str, str], request: ChatRequest) -> Caller:
    """Return who sent a request; header names are in lower case."""
    for harness in HARNESSES:
        value = headers.get(harness.header)
        if value is not None and value.startswith(harness.starts):
            agents = headers.get(harness.agent), headers.get(harness.parent)
            kinds = (s.kind for s in harness.side_calls if s.describes(request))
            return Caller(harness.name, *agents, next(kinds, AGENT))
    return Caller()
