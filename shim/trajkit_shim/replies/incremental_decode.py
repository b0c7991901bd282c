"""Decodes and parses a reply while it is sampled.

Only what later ids cannot change is returned. So half a character, the possible start of
a stop string, of a tool call or of the end of reasoning, and outer white space are
withheld. The result is a prefix of the complete reply, however the ids are grouped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trajkit_shim.chat.reply import Parsed
from trajkit_shim.prompting.render import ChatRenderer
from trajkit_shim.replies.parse import Parser, overlap

# half a character decodes to this
_BROKEN = "\ufffd"


@dataclass(slots=True)
class Decoder:
    """Decodes ids that come in groups."""

    _renderer: ChatRenderer
    ids: list[int] = field(default_factory=list)
    # text up to _done was returned; decoding starts at the group before, because some
    # tokenizers write the space before a word only after another word
    _start: int = 0
    _done: int = 0

    def feed(self, ids: Sequence[int]) -> str:
        """Return the text that these ids add, up to the last complete character."""
        self.ids += ids
        stop = len(self.ids)
        withheld = self._renderer.byte_ids.union(self._renderer.end_ids)
        while stop and self.ids[stop - 1] in withheld:
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
        window = np.array(self.ids[self._start : stop], np.int32)
        return self._renderer.decode(window, ended=False)


class IncrementalParser:
    """Parses a reply while its ids come; its client must not see the ``stop`` strings."""

    def __init__(
        self, renderer: ChatRenderer, parser: Parser, stop: Sequence[str]
    ) -> None:
        self._decoder = Decoder(renderer)
        self.ids = self._decoder.ids
        self._parser = parser
        self._stop = stop
        self._pending = ""  # decoded but not yet parsed
        self._stopped = False
        self._last: tuple[object, object] = ((), None)

    def feed(self, ids: Sequence[int]) -> Parsed | None:
        """Return what is known now, or None if it is the same as before."""
        self._pending += self._decoder.feed(ids)
        certain = 0 if self._stopped else self._certain()
        if not certain:
            return None
        self._parser.feed(self._pending[:certain])
        self._pending = self._pending[certain:]
        known = self._parser.so_far()
        shown = known.parts, known.reasoning
        if shown == self._last:
            return None
        self._last = shown
        return known

    def _certain(self) -> int:
        """The length of the pending text that cannot be part of a stop string."""
        found = [i for mark in self._stop if (i := self._pending.find(mark)) >= 0]
        if found:
            self._stopped = True
            return min(found)
        begun = (overlap(self._pending, mark) for mark in self._stop)
        return len(self._pending) - max(begun, default=0)
