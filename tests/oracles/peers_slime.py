"""slime's rule in plain Python over lists, as a trainer would write it.

An independent restatement: it imports nothing of trajkit and is fast where plain Python
can be (slices compare in C, rows are built by list concatenation). What it must agree
with is ``tests/golden/slime``.
"""

from dataclasses import dataclass, field
from typing import Any

CHUNK = 4096


def common_prefix(a: list[int], b: list[int]) -> int:
    """Tokens that two lists share at their start: slices first, then one by one."""
    n = min(len(a), len(b))
    i = 0
    while i < n and a[i : i + CHUNK] == b[i : i + CHUNK]:
        i += CHUNK
    if i >= n:
        return n
    while i < n and a[i] == b[i]:
        i += 1
    return i


@dataclass(eq=False, slots=True)
class MessageNode:
    """A chat message of the session; ``turn`` where the policy generated it."""

    message: dict[str, Any] | None
    role: str | None = None
    parent: "MessageNode | None" = None
    children: list["MessageNode"] = field(default_factory=list)
    turn: dict[str, Any] | None = None
    trained: bool = False

    def add(self, message: dict[str, Any] | None, role: str | None) -> "MessageNode":
        node = MessageNode(message, role, self)
        self.children.append(node)
        return node

    def mount(self, messages: list[dict[str, Any]]) -> tuple["MessageNode", int]:
        """Where a list of messages leaves the tree below here, and how many it matched."""
        node = self
        for depth, message in enumerate(messages):
            for child in node.children:
                if child.role == message.get("role") and child.message == message:
                    node = child
                    break
            else:
                return node, depth
        return node, len(messages)


class Session:
    """The calls of one session. `record` as they come in, then `rows`."""

    def __init__(self, fork_threshold: int = 1024) -> None:
        self.fork_threshold = fork_threshold
        self.root = MessageNode(None)

    def record(self, turn: dict[str, Any]) -> None:
        """Hang the call below the longest path of messages that it repeats."""
        messages = turn["prompt_messages"]
        if not messages:
            return
        node, depth = self.root.mount(messages)
        if depth < len(messages) and self._rewrites(node, messages[depth]):
            node = next(child for child in node.children if child.role == "assistant")
            node.turn = None
            node.message = messages[depth]
            depth += 1
        for message in messages[depth:]:
            node = node.add(message, message.get("role"))
        node.add(turn["response_message"], "assistant").turn = turn

    def _rewrites(self, node: MessageNode, message: dict[str, Any]) -> bool:
        """Whether the message stands for a short reply that nothing followed yet."""
        if self.fork_threshold <= 0 or message.get("role") != "assistant":
            return False
        replies = [child for child in node.children if child.role == "assistant"]
        return (
            len(replies) == 1
            and not replies[0].children
            and replies[0].turn is not None
            and len(replies[0].turn["output_ids"]) < self.fork_threshold
        )

    def rows(self) -> list[dict[str, Any]]:
        """Every row with something to train: tokens, loss_mask and logprobs (lists).

        ``loss_mask`` and ``logprobs`` are as long as ``tokens``; 0.0 off the mask and
        where the engine gave none.
        """
        rows = []
        stack = [self.root]
        while stack:
            node = stack.pop()
            stack.extend(reversed(node.children))
            if not node.children and node is not self.root:
                rows.extend(self._rows_of(node))
        return rows

    def _rows_of(self, leaf: MessageNode) -> list[dict[str, Any]]:
        chain = []
        node: MessageNode | None = leaf
        while node is not None:
            if node.turn is not None:
                chain.append(node)
            node = node.parent
        chain.reverse()

        rows: list[dict[str, Any]] = []
        tokens: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        prompt_length = response_start = 0
        for k, node in enumerate(chain):
            turn = node.turn
            assert turn is not None
            prompt, output = turn["prompt_ids"], turn["output_ids"]
            mine = not node.trained
            node.trained = True
            shared = common_prefix(tokens, prompt)
            opens = k == 0
            if shared < len(tokens):
                if shared >= response_start and len(output) < self.fork_threshold:
                    # take the last reply as the prompt now has it, untrained
                    del tokens[response_start:]
                    del mask[response_start:]
                    del logprobs[response_start:]
                else:
                    rows.append(_row(tokens, mask, logprobs, prompt_length))
                    tokens, mask, logprobs = [], [], []
                    opens = True
            context = prompt[len(tokens) :]
            tokens += context
            mask += [0] * len(context)
            logprobs += [0.0] * len(context)
            if opens:
                prompt_length = len(prompt)
            response_start = len(tokens)
            tokens += output
            mask += [int(mine)] * len(output)
            given = turn["output_logprobs"]
            logprobs += given if mine and given else [0.0] * len(output)
        rows.append(_row(tokens, mask, logprobs, prompt_length))
        return [row for row in rows if any(row["loss_mask"])]


def _row(
    tokens: list[int], mask: list[int], logprobs: list[float], prompt_length: int
) -> dict[str, Any]:
    return {
        "tokens": tokens,
        "loss_mask": mask,
        "logprobs": logprobs,
        "prompt_length": prompt_length,
    }


def linearize(
    turns: list[dict[str, Any]], fork_threshold: int = 1024
) -> list[dict[str, Any]]:
    """The rows of one session from its calls in order."""
    session = Session(fork_threshold)
    for turn in turns:
        session.record(turn)
    return session.rows()
