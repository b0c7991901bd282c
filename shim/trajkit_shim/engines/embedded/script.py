"""Weighted replies of a scripted policy, and the messages that it reads."""

import itertools
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Special(NamedTuple):
    """An added token, such as ``<tool_call>``, sampled as a single id.

    The same characters within ordinary text of a reply are ordinary bytes.
    """

    text: str


class Reply(NamedTuple):
    """A possible reply, without the closing ``<|im_end|>``."""

    parts: tuple[str | Special, ...]
    weight: float = 1.0  # its share of the sum of all weights is the probability


class Message(NamedTuple):
    """One message of the prompt."""

    role: str
    text: str


Policy = Callable[[str], Sequence[Reply]]
"""Maps the text of a prompt to its possible replies."""


def tool_call(name: str, arguments: str) -> tuple[str | Special, ...]:
    """Return the parts that call a tool; ``arguments`` should be JSON text."""
    body = f'\n{{"name": "{name}", "arguments": {arguments}}}\n'
    return Special("<tool_call>"), body, Special("</tool_call>")


def acts(
    thoughts: Sequence[str],
    commands: Sequence[str],
    shell: tuple[str, str] = ("bash", "command"),
) -> list[Reply]:
    """Return each thought with each command, for a shell tool and its argument."""
    return [
        Reply((thought, *tool_call(shell[0], json.dumps({shell[1]: command}))))
        for thought, command in itertools.product(thoughts, commands)
    ]


def messages(prompt: str) -> list[Message]:
    """Return the messages of a ChatML prompt, without the reply that it opens."""
    read = []
    for piece in prompt.split("<|im_start|>")[1:]:
        role, _, rest = piece.partition("\n")
        text, closed, _ = rest.partition("<|im_end|>")
        if closed:
            read.append(Message(role, text))
    return read


def n_responses(read: Sequence[Message]) -> int:
    """Return the number of messages that are tool responses."""
    return sum(message.text.startswith("<tool_response>") for message in read)


_LOOK = (
    "Let me look at what is there.\n",
    "I will start with the files.\n",
    "First, the folder.\n\n",
)
_DONE = (
    "Done: that is what there is to see.",
    "That is all there is.",
    " That is all there is.",
    "Nothing else to do here.",
)


def converse(prompt: str) -> Sequence[Reply]:
    """Small talk, and one call of ``bash`` after each user message if it is offered."""
    read = messages(prompt)
    offered = any(m.role == "system" and '"name": "bash"' in m.text for m in read)
    if offered and not n_responses(read[-1:]):
        return acts(_LOOK, ["ls -la"])
    return [Reply((text,)) for text in _DONE]
