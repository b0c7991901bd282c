"""prime-rl's message graph in plain Python over lists, for prompts as they were recorded.

A message below the same messages is one node, whatever turn shows it. What a turn sampled
is kept by a later request that shows all of its messages and its reply first and repeats
all of its tokens (prime-rl 2.2); any other opens a branch. A request without messages goes
on from the longest call that its prompt repeats. A reply that several branches hold trains
in the first. Rows as in `tests.oracles.peers_chains`.
"""

from dataclasses import dataclass, field
from typing import Any

from tests.oracles.peers_chains import Row, Turn, row_of


@dataclass(eq=False, slots=True)
class Call:
    """A call: what it holds, what it goes on from, and whether anything goes on from it."""

    turn: Turn
    held: list[int]
    before: "Call | None"
    goes_on: bool = False
    trained: bool = False


@dataclass(eq=False, slots=True)
class Node:
    """A message below a node, and the calls that replied with it."""

    said: tuple[Any, ...]
    above: "Node | None" = None
    below: "list[Node]" = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def child(self, message: dict[str, Any]) -> "Node":
        """The node of a message below this one."""
        said = (
            message["role"],
            message.get("content") or "",
            message.get("reasoning_content"),
            message.get("tool_calls"),
            message.get("tool_call_id"),
        )
        for node in self.below:
            if node.said == said:
                return node
        self.below.append(Node(said, self))
        return self.below[-1]


def linearize(turns: list[Turn]) -> list[Row]:
    """The rows of one session from its calls in order."""
    root = Node(())
    calls = []
    for turn in turns:
        prompt, reply = turn["prompt_ids"], turn["response_message"]
        if turn["prompt_messages"] is None:
            before = _longest(calls, prompt)
        elif turn["prompt_messages"]:
            node = root
            for message in turn["prompt_messages"]:
                node = node.child(message)
            before = _kept(node, prompt)
        else:
            continue
        if before is not None:
            before.goes_on = True
        calls.append(Call(turn, prompt + turn["output_ids"], before))
        if turn["prompt_messages"] and reply and reply["role"] == "assistant":
            node.child(reply).calls.append(calls[-1])
    rows = [row_of(call, "before") for call in calls if not call.goes_on]
    return [row for row in rows if any(row["loss_mask"])]


def _longest(calls: list[Call], prompt: list[int]) -> Call | None:
    """The longest call whose tokens the prompt repeats, the first of equals."""
    best = None
    for call in calls:
        if best is None or len(call.held) > len(best.held):
            if prompt[: len(call.held)] == call.held:
                best = call
    return best


def _kept(node: Node | None, prompt: list[int]) -> Call | None:
    """The deepest call above whose tokens the prompt repeats, the last of equals."""
    while node is not None:
        for call in reversed(node.calls):
            if prompt[: len(call.held)] == call.held:
                return call
        node = node.above
    return None
