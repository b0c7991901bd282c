"""Whether a prompt's text extends that of an earlier prompt.

The text of each prompt is kept as its length and digest. The next prompt's text must
start with it, followed by the rendered reply, the token that ends it, and the new
messages. Only the last part is taken from the new text. Where the template was proven not
to look back (`TemplateProbe.tail`), it is rendered after a short stand-in for the rest.
"""

from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, TypeAlias

from trajkit_shim.chat.images import texts_of
from trajkit_shim.chat.request import squeezed
from trajkit_shim.json_input import Json

if TYPE_CHECKING:
    from trajkit_shim.prompting.render import ChatRenderer

Departure: TypeAlias = Literal["rewritten", "reasoning", "unended", "hidden"]
"""Why a text does not extend another: an earlier part was rewritten, the reply's
reasoning is missing, no token ends the reply, or a new message is missing after it."""


@dataclass(frozen=True, slots=True)
class RenderedPrefix:
    """The part of a prompt's text that every later prompt must start with."""

    length: int = 0  # in characters
    hasher: blake2b = field(default_factory=partial(blake2b, digest_size=16))
    # its length when it was last compared with the text of a complete rendering
    checked: int = 0
    tools: bytes = b""  # digest of the offered tools
    reasons: bool = False  # a message has reasoning

    def extend(
        self, more: str, leaves: str, *, checked: bool = True, reasons: bool = False
    ) -> "RenderedPrefix":
        """Return the prefix with ``more`` text, rendered completely if ``checked``.

        It ends before ``leaves`` (`TemplateProbe`) at the end of that text.
        """
        more = more.removesuffix(leaves)
        length, hasher = self.length + len(more), _hashed(more, self.hasher.copy())
        n_checked = length if checked else self.checked
        return RenderedPrefix(length, hasher, n_checked, self.tools, reasons)


def end_of_reply(
    renderer: "ChatRenderer", rendered: RenderedPrefix, text: str, after: list[Json]
) -> int | Departure:
    """Return where the reply to a ``rendered`` prompt ends in a later prompt's text.

    ``after`` are the messages after the rendered ones: the reply and new ones.
    """
    if not rendered.length:
        # there is no reply
        return 0
    if _hashed(text[: rendered.length]).digest() != rendered.hasher.digest():
        return "rewritten"
    end = renderer.end_of_message(text, rendered.length)
    if end is None:
        return "unended"
    reasoning = squeezed(after[0].get("reasoning_content") or "")
    shown = renderer.without_mark(text[rendered.length : end[0]])
    if reasoning not in squeezed(shown):
        return "reasoning"
    rest = renderer.without_mark(text[end[1] :])
    # if the reply has no end, this may be the end of a later message
    texts = (text for message in after[1:] for text in texts_of(message["content"]))
    if not all(text.strip() in rest for text in texts):
        return "hidden"
    return end[1]


def _hashed(text: str, hasher: blake2b | None = None) -> blake2b:
    hasher = hasher or blake2b(digest_size=16)
    # a client's JSON may contain half a surrogate pair
    hasher.update(text.encode("utf-8", "surrogatepass"))
    return hasher
