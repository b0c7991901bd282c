"""The blocks of a reply, and which part of a growing reply was streamed."""

import base64
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from trajkit_shim.chat.reply import Call, Reply
from trajkit_shim.chat.request import assistant_message
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import Json


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


def assistant(parts: Iterable[Thought | str | Json]) -> Json:
    """Return the canonical message of an assistant's reasoning, texts and calls."""
    given = list(parts)
    return assistant_message(
        "".join(part for part in given if isinstance(part, str)),
        "".join(part.text for part in given if isinstance(part, Thought)),
        [part for part in given if isinstance(part, dict)],
    )


def signature(reply: Reply) -> str:
    """Return what protocols with signed reasoning get as signature."""
    return base64.b64encode(f"trajkit:{reply.reply_id}".encode()).decode()


@dataclass(frozen=True, slots=True)
class Step:
    """What is new in a stream.

    A reply opens and closes; in it a block begins, gets new text or arguments (never
    empty), and ends. All replies are done.
    """

    what: Literal["open", "begin", "text", "end", "close", "done"]
    reply: Reply
    index: int = 0
    block: Block = ""
    text: str = ""


class Events(ABC):
    """The events of one streamed reply, in order. A protocol writes each `Step`."""

    def __init__(self) -> None:
        self.index = 0  # of the choice
        self._begun = False
        self._block = 0  # the first that has not ended
        # its streamed characters; None: it has not begun
        self._length: int | None = None

    def opening(self) -> bytes:
        """Return what is sent before the reply is known; may be empty."""
        return b""

    @abstractmethod
    def ping(self) -> bytes:
        """Return a keep-alive event. Clients accept any number between other events."""

    def partial(self, reply: Reply) -> bytes:
        """Return what is new in an incomplete reply; may be empty.

        Each such reply is a prefix of the next one, and of the complete one.
        """
        return b"".join(self._new(reply, done=False))

    def reply(self, reply: Reply) -> Iterator[bytes]:
        """Yield the rest of the complete reply, to the end of the stream."""
        for self.index, choice in enumerate(reply.choices):
            yield from self._new(choice, done=True)
        yield from self.write(Step("done", reply))

    @abstractmethod
    def error(self, error: GatewayError) -> bytes:
        """Return the end of a stream that failed."""

    def _new(self, reply: Reply, *, done: bool) -> Iterator[bytes]:
        for step in self.steps(reply, done=done):
            yield from self.write(step)

    def steps(self, reply: Reply, *, done: bool) -> Iterator[Step]:
        """Yield what is new in a choice since the last call.

        The last block may grow, unless the reply is complete (``done``). The next choice
        begins then.
        """
        if not self._begun:
            self._begun = True
            yield Step("open", reply)
        found = self.blocks(reply, done=done)
        for index in range(self._block, len(found)):
            block = found[index]
            if self._length is None:
                self._length = 0
                yield Step("begin", reply, index, block)
            text = _text(block)[self._length :]
            if text:
                self._length += len(text)
                yield Step("text", reply, index, block, text)
            if done or index < len(found) - 1:
                self._block, self._length = index + 1, None
                yield Step("end", reply, index, block)
        if done:
            self._begun, self._block = False, 0
            yield Step("close", reply)

    def blocks(self, reply: Reply, *, done: bool) -> list[Block]:
        """Return the blocks that are streamed."""
        return blocks(reply, done=done)

    @abstractmethod
    def write(self, step: Step) -> Iterator[bytes]:
        """Yield the events of a step."""


def _text(block: Block) -> str:
    if isinstance(block, str):
        return block
    return block.text if isinstance(block, Thought) else block.arguments
