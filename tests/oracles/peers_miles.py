"""miles' session tree in plain Python over lists, for prompts as they were recorded.

A request goes behind the deepest reply whose messages it repeats; what its tokens do not
repeat is refused (miles 1.2). Each reply is trained in the earliest kept chain that holds
it. Rows as in `tests.oracles.peers_chains`.
"""

from dataclasses import dataclass, field
from typing import Any

from tests.oracles.peers_chains import Row, Turn, row_of

Message = dict[str, Any]

COMPARED = ("role", "content", "reasoning_content", "tool_calls")


@dataclass(eq=False, slots=True)
class Node:
    """A call that was taken in; the root has none."""

    turn: Turn | None = None
    parent: "Node | None" = None
    # the messages that it brought, its reply among them
    brought: list[Message] = field(default_factory=list)
    children: "list[Node]" = field(default_factory=list)
    order: int = -1
    depth: int = 0
    trained: bool = False


def linearize(turns: list[Turn]) -> list[Row]:
    """The rows of one session from its calls in order."""
    root = Node()
    nodes: list[Node] = []
    for turn in turns:
        messages = [_compared(one) for one in turn["prompt_messages"]]
        parent, n = _position(root, messages)
        before = parent.turn
        if before is not None:
            if before["finish_reason"] == "length":
                continue
            held = before["prompt_ids"] + before["output_ids"]
            if turn["prompt_ids"][: len(held)] != held:
                continue
        reply = turn["response_message"] or {"role": "assistant", "content": ""}
        brought = [*messages[n:], _compared(reply)]
        node = Node(turn, parent, brought, [], len(nodes), parent.depth + 1)
        parent.children.append(node)
        nodes.append(node)
    leaves = [node for node in nodes if not node.children]
    kept = [
        leaf
        for leaf in leaves
        if leaf.parent is root
        or leaf.parent is None
        or leaf is leaf.parent.children[-1]
    ]
    rows = {leaf.order: row_of(leaf, "parent") for leaf in kept}
    kept.sort(key=lambda leaf: (-leaf.depth, -leaf.order))
    return [rows[leaf.order] for leaf in kept]


def _compared(message: Message) -> Message:
    """What of a message is looked at; nothing, an empty text and an empty list are one."""
    return {name: message.get(name) or None for name in COMPARED}


def _position(root: Node, messages: list[Message]) -> tuple[Node, int]:
    """The deepest node whose messages begin the request, the latest of equals."""
    best = root, 0
    stack = [best]
    while stack:
        node, n = stack.pop()
        if (n, node.order) > (best[1], best[0].order):
            best = node, n
        for child in node.children:
            end = n + len(child.brought)
            if messages[n:end] == child.brought:
                stack.append((child, end))
    return best
