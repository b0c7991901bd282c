"""Who calls, and what for: the harness, its agent, and agent calls apart from side calls.

A harness is a record of what its requests look like. A new one is a record here. Nothing
is decided by it: what is found is written beside the turn.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from trajkit_shim.chat import ChatRequest

AGENT = "agent"
"""The kind of a call of a known harness that no rule takes for a side call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideCall:
    """A call that all given marks are found in."""

    kind: str
    # in the first system message
    system: str = ""
    # in the last message
    last: str = ""
    # what the reply is limited to
    max_tokens: int | None = None

    def describes(self, asked: ChatRequest) -> bool:
        """Whether the request has all marks."""
        first, last = asked.messages[0], asked.messages[-1]
        system = str(first["content"]) if first["role"] == "system" else ""
        return (
            self.system in system
            and self.last in str(last["content"])
            and self.max_tokens in (None, asked.asked.max_tokens)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """What tells a harness, and how it names its agents."""

    name: str
    # a header that it sends, and what its value starts with
    header: str
    starts: str = ""
    # headers with the id of the agent (null: the main one) and of the one that began it
    agent: str
    parent: str
    side_calls: tuple[SideCall, ...]


# Spec: engines-and-clients 6.1, and the texts in the client, version 2.1.197.
CLAUDE_CODE = Harness(
    name="claude-code",
    header="x-claude-code-session-id",
    agent="x-claude-code-agent-id",
    parent="x-claude-code-parent-agent-id",
    side_calls=(
        SideCall(kind="probe", last="quota", max_tokens=1),
        SideCall(kind="title", system="Generate a concise, sentence-case title"),
        SideCall(kind="title", system="succinct title and git branch name"),
        SideCall(
            kind="compaction", last="Your task is to create a detailed summary of"
        ),
    ),
)
# Spec: engines-and-clients 6.2, and the texts in the client, version 0.169.0. Each agent
# is a thread, the main one too.
CODEX = Harness(
    name="codex",
    header="originator",
    starts="codex",
    agent="thread-id",
    parent="x-codex-parent-thread-id",
    side_calls=(SideCall(kind="compaction", last="CONTEXT CHECKPOINT COMPACTION"),),
)
HARNESSES = (CLAUDE_CODE, CODEX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who calls, as far as the request tells. ``None``: it does not."""

    harness: str | None = None
    agent_id: str | None = None
    parent_agent_id: str | None = None
    call_kind: str | None = None


def identify(headers: Mapping[str, str], asked: ChatRequest) -> Caller:
    """Who sent a request.

    Parameters
    ----------
    headers : mapping of str to str
        By their names in lower case.
    asked : ChatRequest
    """
    for harness in HARNESSES:
        value = headers.get(harness.header)
        if value is not None and value.startswith(harness.starts):
            return Caller(
                harness=harness.name,
                agent_id=headers.get(harness.agent),
                parent_agent_id=headers.get(harness.parent),
                call_kind=next(
                    (side.kind for side in harness.side_calls if side.describes(asked)),
                    AGENT,
                ),
            )
    return Caller()
