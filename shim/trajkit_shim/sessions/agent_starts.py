"""Which tool call started a sub-agent.

A request that contains no reply of its session begins a conversation. It is a sub-agent's
if its user messages contain the prompt of an earlier tool call: the longest text among
the call's arguments with one of `PROMPTS` as name, without outer white space. The longest
such prompt counts, then the earliest call. If the harness names its agents, the call must
be one of the parent agent, and the main agent's conversations have none.

A call starts one sub-agent, so sub-agents with equal prompts get their calls in the order
of their requests. A request that is sent again, and another conversation of the same
agent, have the call of the first. A prompt that the client changes is not found.
"""

import json
from collections import deque

from trajkit_shim.chat.images import texts_of
from trajkit_shim.json_input import Json
from trajkit_shim.prompting.conversation import RestoredRequest
from trajkit_shim.sessions.client_identity import Caller

PROMPTS = ("prompt", "message", "task", "objective", "goal", "instructions")
"""Names of arguments that are the prompt of a sub-agent: in Claude Code, opencode and
qwen-code; in Codex; and in others."""

# calls of a session that are kept, and the length in characters of their arguments
_KEPT = 256
_LONGEST = 1 << 16
# a shorter text is found in many messages by chance
_SHORTEST = 12


class AgentStarts:
    """The tool calls of one session, and the sub-agents that they started."""

    def __init__(self) -> None:
        # calls that started none: the agent that made it, its prompt, what is recorded
        self._calls = deque[tuple[str | None, str, Json]](maxlen=_KEPT)
        # by the agent's id, else by the position after its first request
        self._found: dict[str | bytes, Json] = {}

    def add(self, turn_index: int, agent_id: str | None, reply: Json) -> None:
        """Add the tool calls of a recorded reply, a canonical message."""
        calls = reply.get("tool_calls", [])
        assert isinstance(calls, list)
        for call in calls:
            prompt = _prompt(call["function"]["arguments"])
            if len(prompt) >= _SHORTEST:
                start = {"started_by_turn": turn_index, "started_by_call": call["id"]}
                self._calls.append((agent_id, prompt, start))

    def find(self, restored: RestoredRequest, caller: Caller) -> Json:
        """Return the columns of what started the agent of a request.

        They are empty if it does not begin a conversation of a sub-agent.
        """
        if any(known in ("as_sent", "restored") for known in restored.known):
            return {}
        if caller.harness is not None and caller.agent_id is None:
            return {}
        agent = caller.agent_id or restored.position
        if agent in self._found and caller.agent_id:
            return self._found[agent]
        text = "\n".join(
            text
            for message in restored.messages
            if message["role"] == "user"
            for text in texts_of(message["content"])
        )
        fitting = [
            call
            for call in self._calls
            if call[1] in text
            and (caller.harness is None or call[0] == caller.parent_agent_id)
        ]
        if fitting:
            # the first of the longest
            call = max(fitting, key=lambda one: len(one[1]))
            self._calls.remove(call)
            self._found[agent] = call[2]
        return self._found.get(agent, {})


def _prompt(arguments: str) -> str:
    if len(arguments) > _LONGEST:
        return ""
    try:
        given = json.loads(arguments)
    # as sampled, arguments may be too deep
    except (ValueError, RecursionError):
        return ""
    # an external parser may give another value
    if not isinstance(given, dict):
        return ""
    texts = [given[name] for name in PROMPTS if isinstance(given.get(name), str)]
    return max(map(str.strip, texts), key=len, default="")
