"""What a scripted policy says: weighted replies, and the messages that it answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Special:
    """An added token, such as ``<tool_call>``, sampled as its one id.

    The same characters within ordinary text of a reply are ordinary bytes.
    """

    text: str


@dataclass(frozen=True, slots=True)
class Reply:
    """One thing the policy may say, up to but without the closing ``<|im_end|>``.

    Parameters
    ----------
    parts : tuple of str and Special
        The text, in order.
    weight : float
        Positive; the reply's probability is its weight over the sum of all weights.
    """

    parts: tuple[str | Special, ...]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the prompt, as its text reads."""

    role: str
    text: str


Policy = Callable[[str], Sequence[Reply]]
"""From the text of a whole prompt to what may be said next."""


def tool_call(name: str, arguments: str) -> tuple[str | Special, ...]:
    """The parts that call one tool.

    Parameters
    ----------
    name : str
        The tool's name.
    arguments : str
        The arguments as JSON text, or whatever the model writes in its place.
    """
    body = f'\n{{"name": "{name}", "arguments": {arguments}}}\n'
    return Special("<tool_call>"), body, Special("</tool_call>")


def messages(prompt: str) -> list[Message]:
    """The messages of a ChatML prompt, without the opened reply at its end."""
    read = []
    for piece in prompt.split("<|im_start|>")[1:]:
        role, _, rest = piece.partition("\n")
        text, closed, _ = rest.partition("<|im_end|>")
        if closed:
            read.append(Message(role, text))
    return read
