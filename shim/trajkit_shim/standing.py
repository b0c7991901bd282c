"""Whether a prompt's text goes on from that of an earlier one.

The text of each prompt is remembered by its length and digest. The next prompt's text is
to begin with it; then come the reply as the template writes it, the token that ends it,
and what is new. Only the last of these is taken from the new text: all before it stays
what the engine consumed and sampled.
"""

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, TypeAlias

from trajkit_shim.wire import Json

if TYPE_CHECKING:
    from trajkit_shim.render import ChatRenderer

Departure: TypeAlias = Literal["rewritten", "reasoning", "unended", "hidden"]
"""Why a text does not go on from another: it begins otherwise, it leaves out what the
reply before thought, no token ends that reply, or what is new does not stand behind it
as it was said."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The part of a prompt's text that every later prompt is to begin with."""

    # characters
    length: int
    digest: bytes
    # to go on from
    hasher: blake2b = field(compare=False, repr=False)

    @classmethod
    def of(cls, text: str, leaves: str) -> "Standing":
        """All of a text but ``leaves`` (`TemplateProbe.leaves`) at its end."""
        stays = text.removesuffix(leaves)
        hasher = blake2b(_encoded(stays), digest_size=16)
        return cls(len(stays), hasher.digest(), hasher)

    def begins(self, text: str) -> bool:
        """Whether a text begins with it."""
        hasher = blake2b(_encoded(text[: self.length]), digest_size=16)
        return hasher.digest() == self.digest

    def grown(self, text: str, leaves: str) -> "Standing":
        """`of` a text that begins with this one; only the rest of it is read."""
        stays = text.removesuffix(leaves)
        if len(stays) < self.length:
            return Standing.of(text, leaves)
        hasher = self.hasher.copy()
        hasher.update(_encoded(stays[self.length :]))
        return Standing(len(stays), hasher.digest(), hasher)


def end_of_reply(
    renderer: "ChatRenderer",
    standing: Standing,
    text: str,
    reply: Json,
    new: list[Json],
) -> int | Departure:
    """Where in a prompt's text the reply to an earlier prompt ends.

    Parameters
    ----------
    renderer : ChatRenderer
    standing : Standing
        Of the earlier prompt.
    text : str
        Of the later one (`ChatRenderer.text`).
    reply : dict
        The canonical message that was sampled for the earlier one.
    new : list of dict
        The messages behind it.
    """
    if not standing.begins(text):
        return "rewritten"
    end = renderer.end_of_message(text, standing.length)
    if end is None:
        return "unended"
    thought = _squeezed(str(reply.get("reasoning_content") or ""))
    said = renderer.without_mark(text[standing.length : end[0]])
    if thought not in _squeezed(said):
        return "reasoning"
    behind = renderer.without_mark(text[end[1] :])
    # the end may be that of a later message, where the reply has none
    if not all(str(message["content"]).strip() in behind for message in new):
        return "hidden"
    return end[1]


def _encoded(text: str) -> bytes:
    # a client's JSON may hold half a surrogate pair
    return text.encode("utf-8", "surrogatepass")


def _squeezed(text: str) -> str:
    return "".join(text.split())
