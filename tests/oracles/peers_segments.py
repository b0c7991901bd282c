"""Segments, slime's rule before its tree, in plain Python over lists.

Two conversations at most are followed: a main agent's, and that of a sub-agent which a
tool call sends out. A request that does not repeat what its agent sent before closes a
segment, and each segment is merged into one row (segments 2 to 7). Rows as in
`tests.oracles.peers_chains`.
"""

from dataclasses import dataclass, field
from typing import Any

from tests.oracles.peers_chains import Row, Turn
from tests.oracles.peers_slime import common_prefix

DISPATCH_TOOLS = ("Task", "Agent")


def dispatched(turn: Turn) -> list[str]:
    """Ids of the calls in a reply that send out a sub-agent."""
    reply = turn["response_message"] or {}
    return [
        call["id"]
        for call in reply.get("tool_calls") or []
        if call.get("function", {}).get("name") in DISPATCH_TOOLS
    ]


def answered(turn: Turn) -> list[str]:
    """Ids of the calls whose results a request shows."""
    return [
        message["tool_call_id"]
        for message in turn["prompt_messages"]
        if message["role"] == "tool" and "tool_call_id" in message
    ]


@dataclass(eq=False, slots=True)
class Agent:
    """A conversation: what was last sent, and its calls since it last closed."""

    seen: list[dict[str, Any]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def continues(self, messages: list[dict[str, Any]]) -> bool:
        return messages[: len(self.seen)] == self.seen


def linearize(turns: list[Turn]) -> list[Row]:
    """The rows of one session from its calls in order."""
    main, sub, watched = Agent(), None, None
    segments: list[list[Turn]] = []
    for turn in turns:
        messages = turn["prompt_messages"]
        if watched is not None and sub is not None and watched in answered(turn):
            segments.append(sub.turns)
            sub = watched = None
        agent = main if sub is None or main.continues(messages) else sub
        if not agent.continues(messages):
            segments.append(agent.turns)
            agent.turns = []
        agent.seen = messages
        agent.turns.append(turn)
        calls = dispatched(turn) if agent is main else []
        if calls:
            watched = calls[-1]
            sub = Agent() if sub is None else sub
    if sub is not None:
        segments.append(sub.turns)
    segments.append(main.turns)
    rows = [_merged(segment) for segment in segments if segment]
    return [row for row in rows if len(row["tokens"]) > row["prompt_length"]]


def _merged(segment: list[Turn]) -> Row:
    """One row of a segment: what drift cuts is lost, wherever it begins."""
    prompt: list[int] = []
    response: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    spans: list[tuple[int, int]] = []
    for k, turn in enumerate(segment):
        sent, output = turn["prompt_ids"], turn["output_ids"]
        if k == 0 or sent[: len(prompt)] != prompt:
            prompt, response, mask, logprobs, spans = sent, [], [], [], []
        shown = sent[len(prompt) :]
        n = common_prefix(response, shown)
        if n < len(response):
            for start, stop in spans:
                if start < n < stop:
                    mask[start:n] = [0] * (n - start)
                    logprobs[start:n] = [0.0] * (n - start)
            spans = [(start, stop) for start, stop in spans if stop <= n]
            del response[n:], mask[n:], logprobs[n:]
        context = shown[n:]
        response += context
        mask += [0] * len(context)
        logprobs += [0.0] * len(context)
        spans.append((len(response), len(response) + len(output)))
        response += output
        mask += [1] * len(output)
        logprobs += turn["output_logprobs"] or [0.0] * len(output)
    return {
        "tokens": prompt + response,
        "loss_mask": [0] * len(prompt) + mask,
        "logprobs": [0.0] * len(prompt) + logprobs,
        "prompt_length": len(prompt),
    }
