"""The blocks of a reply, and how far those of a growing reply have been told."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from trajkit_shim.reply import Call, Reply


@dataclass(frozen=True, slots=True)
class Thought:
    """The reasoning of a reply."""

    text: str


Block: TypeAlias = Thought | str | Call


def blocks(reply: Reply, *, done: bool) -> list[Block]:
    """Reasoning, texts and calls, in order.

    White space alone is no block, since clients take it for an error; but a whole reply
    has at least one block.
    """
    found: list[Block] = []
    if reply.reasoning is not None:
        found.append(Thought(reply.reasoning))
    found += [part for part in reply.parts if isinstance(part, Call) or part.strip()]
    return found or ([reply.text] if done else [])


@dataclass(frozen=True, slots=True)
class Step:
    """A block begins, goes on, or ends.

    ``text`` is what goes on: new text, or arguments. It is never empty.
    """

    what: Literal["begins", "goes on", "ends"]
    index: int
    block: Block
    text: str = ""


class Told:
    """How far the blocks of one reply have been told."""

    def __init__(self) -> None:
        self._index = 0
        # characters of the block at the index; None: it has not begun
        self._length: int | None = None

    def steps(self, blocks: Sequence[Block], *, done: bool) -> Iterator[Step]:
        """What is new since the last time.

        Parameters
        ----------
        blocks : sequence of Block
            Of the reply so far; the last one may grow.
        done : bool
            There is no more: the last one ends too.
        """
        for index in range(self._index, len(blocks)):
            block = blocks[index]
            if self._length is None:
                self._length = 0
                yield Step("begins", index, block)
            text = _text(block)[self._length :]
            if text:
                self._length += len(text)
                yield Step("goes on", index, block, text)
            if done or index < len(blocks) - 1:
                self._index, self._length = index + 1, None
                yield Step("ends", index, block)


def _text(block: Block) -> str:
    if isinstance(block, str):
        return block
    return block.text if isinstance(block, Thought) else block.arguments
