"""Weighted replies of a scripted policy, and the messages that it reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Special:
    """An added token, such as ``<tool_call>``, sampled as a single id.

    The same characters within ordinary text of a reply are ordinary bytes.
    """

    text: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A possible reply, without the closing ``<|im_end|>``.

    Parameters
    ----------
    parts : tuple of str and Special
        The text, in order.
    weight : float
        Positive; its share of the sum of all weights is the reply's probability.
    """

    parts: tuple[str | Special, ...]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the prompt."""

    role: str
    text: str


Policy = Callable[[str], Sequence[Reply]]
"""Maps the text of a prompt to its possible replies."""


def tool_call(name: str, arguments: str) -> tuple[str | Special, ...]:
    """Return the parts that call a tool; ``arguments`` should be JSON text."""
    body = f'\n{{"name": "{name}", "arguments": {arguments}}}\n'
    return Special("<tool_call>"), body, Special("</tool_call>")


def messages(prompt: str) -> list[Message]:
    """Return the messages of a ChatML prompt, without the reply that it opens."""
    read = []
    for piece in prompt.split("<|im_start|>")[1:]:
        role, _, rest = piece.partition("\n")
        text, closed, _ = rest.partition("<|im_end|>")
        if closed:
            read.append(Message(role, text))
    return read
