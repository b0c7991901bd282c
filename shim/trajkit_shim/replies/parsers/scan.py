"""Finds tool calls in a growing text."""

from dataclasses import dataclass, field

from trajkit_shim.replies.parsers.form import SPACE, ToolCall, ToolForm, Tools


@dataclass(slots=True)
class Scan:
    """Finds the calls of one format in a text that comes in pieces.

    Everything else is text, including its white space, except that white space between
    two calls is dropped. If a block opens a call but is not a valid one, it stays in the
    text, and the text is ill-formed. Parts that later text could change are not final,
    so the result does not depend on the pieces.
    """

    _form: ToolForm | None  # None: everything is text
    _tools: Tools  # the offered ones
    text: str = ""  # so far
    # the final parts: no two texts are adjacent; the last one may grow
    parts: list[str | ToolCall] = field(default_factory=list)
    ill_formed: bool = False
    _offset: int = 0
    _between: str = ""  # white space after a call, dropped if another call follows
    _closes_from: int = 0  # where to search for the end of the open call

    def feed(self, piece: str) -> None:
        """More text."""
        self.text += piece
        self._advance(ended=False)

    def end(self) -> None:
        """End the text."""
        self._advance(ended=True)
        if self._between:
            self.parts.append(self._between)
            self._between = ""

    def _advance(self, *, ended: bool) -> None:
        form, text = self._form, self.text
        while form is not None:
            start = text.find(form.opens, self._offset)
            if start < 0:
                break
            self._say(text[self._offset : start])
            self._offset = start
            found = self._call(form, ended=ended)
            if found is not None:
                call, self._offset = found
                self._between, self._closes_from = "", self._offset
                self.parts.append(call)
                continue
            if not ended and not form.hopeless(text, start):
                return
            # the marker is text; a call may follow it
            self.ill_formed = True
            self._say(form.opens)
            self._offset += len(form.opens)
            self._closes_from = self._offset
        stop = len(text)
        if form is not None and not ended:
            stop -= overlap(text[self._offset :], form.opens)
        self._say(text[self._offset : stop])
        self._offset = stop

    def _call(self, form: ToolForm, *, ended: bool) -> tuple[ToolCall, int] | None:
        """The call at the current position, if its end may have come."""
        closes_from = max(self._closes_from, self._offset + len(form.opens))
        self._closes_from = max(closes_from, len(self.text) - len(form.closes) + 1)
        if not ended and self.text.find(form.closes, closes_from) < 0:
            return None
        return form.read(self.text, self._offset, self._tools)

    def _say(self, text: str) -> None:
        if not text:
            return
        if self.parts and isinstance(self.parts[-1], str):
            self.parts[-1] += text
        elif self.parts and not (self._between + text).strip(SPACE):
            self._between += text
        else:
            self.parts.append(self._between + text)
            self._between = ""


def overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may start a mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
