"""The faithful rule in plain Python over lists, as a trainer would write it.

Messages say which reply a request goes on from, tokens decide among equal replies; a
reply that comes back changed opens a row; each reply is trained in the first chain that
holds it. Rows as in `tests.oracles.peers_chains`.
"""

from dataclasses import dataclass, field

from tests.oracles.peers_chains import Row, Turn, extend, opened
from tests.oracles.peers_slime import MessageNode, common_prefix


@dataclass(eq=False, slots=True)
class Call:
    """A call of the session: what it continues, and what continues it."""

    turn: Turn
    before: "Call | None"
    after: "list[Call]" = field(default_factory=list)
    trained: bool = False

    @property
    def size(self) -> int:
        """Tokens of this call's path."""
        return len(self.turn["prompt_ids"]) + len(self.turn["output_ids"])

    def shows(self, turn: Turn) -> int:
        """Tokens of this call's prompt and output that the turn's prompt repeats."""
        prompt, shown = self.turn["prompt_ids"], turn["prompt_ids"]
        shared = common_prefix(prompt, shown)
        if shared < len(prompt):
            return shared
        return shared + common_prefix(self.turn["output_ids"], shown[shared:])


def linearize(turns: list[Turn]) -> list[Row]:
    """The rows of one session from its calls in order."""
    root = MessageNode(None)
    calls: dict[MessageNode, Call] = {}
    for turn in turns:
        if turn["prompt_messages"]:
            _record(root, calls, turn)
    rows = []
    stack = [root]
    while stack:
        node = stack.pop()
        stack.extend(reversed(node.children))
        if node in calls and not calls[node].after:
            rows.extend(_rows_of(calls[node]))
    return rows


def _record(root: MessageNode, calls: dict[MessageNode, Call], turn: Turn) -> None:
    messages = turn["prompt_messages"]
    node, depth = root.mount(messages)
    for message in messages[depth:]:
        node = node.add(message, message.get("role"))
    before = _nearest(node, calls, turn)
    call = Call(turn, before)
    if before is not None:
        before.after.append(call)
    reply = node.add(turn["response_message"], "assistant")
    reply.turn = turn
    calls[reply] = call


def _nearest(
    node: MessageNode | None, calls: dict[MessageNode, Call], turn: Turn
) -> Call | None:
    """The reply nearest above; of equal ones the one that the prompt repeats most.

    Of these the one with the shortest path, then the first.
    """
    while node is not None and node.parent is not None:
        equal = [
            calls[other]
            for other in node.parent.children
            if other in calls
            and (other is node or (other.message and other.message == node.message))
        ]
        if equal:
            return max(equal, key=lambda call: (call.shows(turn), -call.size))
        node = node.parent
    return None


def _rows_of(leaf: Call) -> list[Row]:
    chain = []
    call: Call | None = leaf
    while call is not None:
        chain.append(call)
        call = call.before
    rows: list[Row] = []
    for call in reversed(chain):
        mine, call.trained = not call.trained, True
        held = rows[-1]["tokens"] if rows else None
        if held is not None and call.turn["prompt_ids"][: len(held)] == held:
            extend(rows[-1], call.turn, mine)
        else:
            rows.append(opened(call.turn, mine))
    return [row for row in rows if any(row["loss_mask"])]
