"""The blocks of a reply, and which part of a growing reply was streamed."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from trajkit_shim.chat.reply import Call, Reply


@dataclass(frozen=True, slots=True)
class Thought:
    """The reasoning of a reply."""

    text: str


Block: TypeAlias = Thought | str | Call


def blocks(reply: Reply, *, done: bool) -> list[Block]:
    """Return reasoning, texts and calls, in order.

    White space alone is not a block, because clients reject it. A complete reply
    (``done``) has at least one block.
    """
    found: list[Block] = []
    if reply.reasoning is not None:
        found.append(Thought(reply.reasoning))
    found += [part for part in reply.parts if isinstance(part, Call) or part.strip()]
    return found or ([reply.text] if done else [])


@dataclass(frozen=True, slots=True)
class Step:
    """A block begins, gets new text or arguments (never empty), or ends."""

    what: Literal["begin", "text", "end"]
    index: int
    block: Block
    text: str = ""


class Progress:
    """Which part of a reply's blocks was streamed."""

    def __init__(self) -> None:
        self._index = 0
        # streamed characters of the block at the index; None: it has not begun
        self._length: int | None = None

    def steps(self, blocks: Sequence[Block], *, done: bool) -> Iterator[Step]:
        """Yield what is new since the last call.

        The last block may grow, unless ``done`` says that the reply is complete.
        """
        for index in range(self._index, len(blocks)):
            block = blocks[index]
            if self._length is None:
                self._length = 0
                yield Step("begin", index, block)
            text = _text(block)[self._length :]
            if text:
                self._length += len(text)
                yield Step("text", index, block, text)
            if done or index < len(blocks) - 1:
                self._index, self._length = index + 1, None
                yield Step("end", index, block)


class BlockStream(ABC):
    """What the event streams of the protocols have in common (`protocols.base.Events`)."""

    def __init__(self) -> None:
        self._progress = Progress()

    def opening(self) -> bytes:
        """Return nothing: the first event needs the reply."""
        return b""

    def partial(self, reply: Reply) -> bytes:
        """Return the events of what is new."""
        return b"".join(self._new(reply, done=False))

    @abstractmethod
    def _new(self, reply: Reply, *, done: bool) -> Iterator[bytes]:
        """Yield the events of what is new."""


def _text(block: Block) -> str:
    if isinstance(block, str):
        return block
    return block.text if isinstance(block, Thought) else block.arguments
