"""Text and calls in a text that grows."""

from trajkit_shim.parsers.form import SPACE, ToolCall, ToolForm, Tools


class Scan:
    """Finds the calls of one form in a text that comes in pieces.

    Every block that reads as a call is a call, in order. All other text is text, with
    its white space; only white space between two calls is their frame and belongs to
    neither. What opens no call stays in the text, and the text is ill-formed.

    Nothing is settled that more text could change: what is found does not depend on
    the pieces.

    Parameters
    ----------
    form : ToolForm or None
        None: all is text.
    tools : sequence of dict
        The tools that were offered.

    Attributes
    ----------
    text : str
        All that came.
    parts : list of str and ToolCall
        What is settled. No two texts stand side by side; the last one may grow.
    ill_formed : bool
        Something opened a call and was none.
    """

    def __init__(self, form: ToolForm | None, tools: Tools) -> None:
        self.text = ""
        self.parts: list[str | ToolCall] = []
        self.ill_formed = False
        self._form = form
        self._tools = tools
        self._at = 0
        # white space behind a call, which may be a frame
        self._between = ""
        # where the end of the call that is open may yet come
        self._closes_from = 0

    def feed(self, piece: str) -> None:
        """More text."""
        self.text += piece
        self._advance(ended=False)

    def end(self) -> None:
        """There is no more."""
        self._advance(ended=True)
        if self._between:
            self.parts.append(self._between)
            self._between = ""

    def _advance(self, *, ended: bool) -> None:
        form, text = self._form, self.text
        while form is not None:
            start = text.find(form.opens, self._at)
            if start < 0:
                break
            self._say(text[self._at : start])
            self._at = start
            found = self._call(form, ended=ended)
            if found is not None:
                call, self._at = found
                self._between, self._closes_from = "", self._at
                self.parts.append(call)
                continue
            if not ended and not form.hopeless(text, start):
                return
            # the marker is text; what follows it may still hold a call
            self.ill_formed = True
            self._say(form.opens)
            self._at += len(form.opens)
            self._closes_from = self._at
        stop = len(text)
        if form is not None and not ended:
            stop -= overlap(text[self._at :], form.opens)
        self._say(text[self._at : stop])
        self._at = stop

    def _call(self, form: ToolForm, *, ended: bool) -> tuple[ToolCall, int] | None:
        """The call at the place that was reached, where its end may have come."""
        closes_from = max(self._closes_from, self._at + len(form.opens))
        self._closes_from = max(closes_from, len(self.text) - len(form.closes) + 1)
        if not ended and self.text.find(form.closes, closes_from) < 0:
            return None
        return form.read(self.text, self._at, self._tools)

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
    """How many characters at the end of a text may be the beginning of a mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
