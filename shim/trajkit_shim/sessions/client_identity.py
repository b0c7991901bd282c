"""Who calls, and what for: harness, agent, and whether it is a side call.

`HARNESSES` and `SIDE_CALLS` describe requests. The result is recorded with the turn. A
side call is not trained unless the gateway is asked to.
"""

from collections.abc import Mapping
from typing import NamedTuple

from trajkit_shim.chat.request import ChatRequest

AGENT = "agent"
"""The kind of a known harness's call that matches no side call."""


class Harness(NamedTuple):
    """How to recognize a harness, and how it names its agents."""

    name: str
    # a header, and the start of its value
    header: str
    starts: str
    # headers with the ids of the agent (null: the main one) and its parent; "": none
    agent: str
    parent: str


class SideCall(NamedTuple):
    """A call of a harness that is recognized by all given marks."""

    harness: str
    kind: str
    system: str = ""  # contained in the first system message
    # contained in the last message, which is the user's: what a tool returned says
    # nothing about who asks
    last: str = ""
    max_tokens: int | None = None  # token limit of the reply

    def describes(self, harness: str, request: ChatRequest) -> bool:
        def shows(text: str, role: str, at: int) -> bool:
            message = request.messages[at]
            has_role = message["role"] == role
            return not text or (has_role and text in str(message["content"]))

        limits = None, request.sampling.get("max_tokens")
        marks = shows(self.system, "system", 0) and shows(self.last, "user", -1)
        return marks and self.max_tokens in limits and self.harness == harness


# what these versions of the clients send: Claude Code 2.1.197, Codex 0.169.0 (each agent
# is a thread, including the main one), Gemini CLI 0.61.0, opencode 1.18.33 (each agent is
# a session of its own), Qwen Code 0.15.10
HARNESSES = (
    Harness(
        *("claude-code", "x-claude-code-session-id", ""),
        *("x-claude-code-agent-id", "x-claude-code-parent-agent-id"),
    ),
    Harness("codex", "originator", "codex", "thread-id", "x-codex-parent-thread-id"),
    Harness("gemini-cli", "user-agent", "GeminiCLI", "", ""),
    Harness(
        "opencode", "user-agent", "opencode", "x-session-id", "x-parent-session-id"
    ),
    Harness("qwen-code", "user-agent", "QwenCode/", "", ""),
)
_CLAUDE, _GEMINI = "claude-code", "gemini-cli"
# ``tool``: a tool of the harness asks; ``check``: the harness asks how to go on
SIDE_CALLS = (
    SideCall(_CLAUDE, "probe", last="quota", max_tokens=1),
    SideCall(_CLAUDE, "title", "Generate a concise, sentence-case title"),
    SideCall(_CLAUDE, "title", "succinct title and git branch name"),
    *(
        SideCall(
            _CLAUDE, "compaction", last=f"Your task is to create a detailed {what}"
        )
        for what in (
            "summary of the conversation so far",
            "summary of this conversation. This",
            "summary of the RECENT portion of",
        )
    ),
    SideCall(_CLAUDE, "tool", "performing a web search tool use"),
    SideCall(_CLAUDE, "tool", last="\nWeb page content:\n---\n"),
    SideCall("codex", "compaction", last="CONTEXT CHECKPOINT COMPACTION"),
    SideCall(_GEMINI, "compaction", "distilling chat history into a structured"),
    SideCall(_GEMINI, "check", "whether a conversational AI assistant is stuck in"),
    SideCall(_GEMINI, "check", "Task Routing AI. Your sole"),
    SideCall(_GEMINI, "check", last="Analyze *only* the content and structure of your"),
    SideCall(_GEMINI, "tool", "You are an expert code-editing assistant"),
    SideCall(_GEMINI, "tool", last="using the provided webpage content.\n\n<user_"),
    SideCall("opencode", "title", "You are a title generator"),
    SideCall("opencode", "compaction", last="conversation so far:\n\n<conversation>"),
    SideCall("qwen-code", "compaction", "summarizes internal chat history into a"),
    SideCall("qwen-code", "memory", "the managed memory extraction subagent"),
    SideCall("qwen-code", "title", "Generate a concise, sentence-case title"),
    SideCall("qwen-code", "check", last="Analyze *only* the content and structure of"),
    SideCall("qwen-code", "tool", "requested information from the provided web"),
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
            kinds = (s.kind for s in SIDE_CALLS if s.describes(harness.name, request))
            return Caller(harness.name, *agents, next(kinds, AGENT))
    return Caller()
