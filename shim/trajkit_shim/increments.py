"""A reply while it is sampled: ids to text to what can be told of it for certain.

Nothing is told that the ids to come could change: half a character, the beginning of a
stop string, of a tool call or of the end of reasoning, white space that may be a frame.
What is told is the beginning of the whole reply, whatever the pieces were.
"""

from collections.abc import Sequence

import numpy as np

from trajkit_shim.parse import Parsed, Parser
from trajkit_shim.parsers.scan import overlap
from trajkit_shim.render import ChatRenderer

# what half a character decodes to
_BROKEN = "\ufffd"


class Decoder:
    """The text of ids that come in pieces.

    Parameters
    ----------
    renderer : ChatRenderer
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._ids: list[int] = []
        # the text up to _done was given; _start is where the piece before it began,
        # which tokenizers that write a space before a word want to see
        self._start = 0
        self._done = 0

    def feed(self, ids: Sequence[int]) -> str:
        """The text that these ids add, as far as they end a character.

        The id that ends a message is no text as long as nothing follows it.
        """
        self._ids += ids
        stop = len(self._ids)
        while stop and self._ids[stop - 1] in self._renderer.end_ids:
            stop -= 1
        while stop and self._ids[stop - 1] in self._renderer.byte_ids:
            stop -= 1
        if stop <= self._done:
            return ""
        text = self._decoded(stop)
        if text.endswith(_BROKEN):
            return ""
        before = self._decoded(self._done)
        self._start, self._done = self._done, stop
        return text.removeprefix(before)

    def _decoded(self, stop: int) -> str:
        window = np.array(self._ids[self._start : stop], np.int32)
        return self._renderer.decode(window, ended=False)


class Increments:
    """What can be told of a reply while its ids come.

    Parameters
    ----------
    renderer : ChatRenderer
    parser : Parser
        Of this reply.
    stop : sequence of str
        The client's stop strings: it sees none of them.
    """

    def __init__(
        self, renderer: ChatRenderer, parser: Parser, stop: Sequence[str]
    ) -> None:
        self._decoder = Decoder(renderer)
        self._parser = parser
        self._stop = stop
        # decoded and not yet parsed
        self._held = ""
        self._stopped = False
        self._told: Parsed | None = None
        self.ids: list[int] = []

    def feed(self, ids: Sequence[int]) -> Parsed | None:
        """What is known now; None: no more than before."""
        self.ids += ids
        self._held += self._decoder.feed(ids)
        certain = 0 if self._stopped else self._certain()
        if not certain:
            return None
        self._parser.feed(self._held[:certain])
        self._held = self._held[certain:]
        known = self._parser.so_far()
        if known.parts == (self._told.parts if self._told else ()) and (
            known.reasoning == (self._told.reasoning if self._told else None)
        ):
            return None
        self._told = known
        return known

    def _certain(self) -> int:
        """How much of the held text comes before any stop string."""
        found = [at for mark in self._stop if (at := self._held.find(mark)) >= 0]
        if found:
            self._stopped = True
            return min(found)
        begun = (overlap(self._held, mark) for mark in self._stop)
        return len(self._held) - max(begun, default=0)
