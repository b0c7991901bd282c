"""Finds out, by trying, what a chat template does to a growing conversation.

A template is a program. It may drop the reasoning of earlier turns, or render the last
turn differently. Appending to a prompt is only possible if the existing text never
changes, so each template renders short conversations that grow message by message.

The text of each prompt is kept as its length and digest. The next prompt's text must
start with it, followed by the rendered reply, the token that ends it, and the new
messages. Only the last part is taken from the new text. Where the template was proven not
to look back (`TemplateProbe.tail`), it is rendered after a short stand-in for the rest.
"""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from os.path import commonprefix
from typing import TYPE_CHECKING, Literal, TypeAlias

from trajkit_shim.chat import request as chat
from trajkit_shim.chat.images import texts_of
from trajkit_shim.errors import TemplateError
from trajkit_shim.json_input import Json

if TYPE_CHECKING:
    from trajkit_shim.prompting.render import ChatRenderer

Role: TypeAlias = Literal["user", "tool"]

Departure: TypeAlias = Literal["rewritten", "reasoning", "unended", "hidden"]
"""Why a text does not extend another: an earlier part was rewritten, the reply's
reasoning is missing, no token ends the reply, or a new message is missing after it."""

_THOUGHT = "pondering"
# words that no template contains
_WORDS = ("alphaword", "betaword", "gammaword")
_TROUBLE: dict[Departure, str] = {
    "rewritten": "a later message changes the text before it",
    "unended": "no token ends a reply",
    "hidden": "the content of a new message is missing after the reply",
}
STAND_IN_TOOL = chat.function_tool(
    "probe", "probe", {"type": "object", "properties": {}}
)


@dataclass(slots=True, kw_only=True)
class TemplateProbe:
    """What one template does, with or without tools."""

    safe: bool  # prompts may be extended
    why: str | None = None  # why not
    # End of the generation prompt that disappears once the reply is rendered. An
    # extended prompt keeps it.
    leaves: str = ""
    # A message of this role makes the template drop the reasoning of the reply before
    # it. Such a prompt is rendered.
    drops_reasoning: tuple[Role, ...] = ()
    # The text of a reply and of the user and tool messages after it does not depend on
    # the messages and tools before it, so a prompt may be extended by it alone.
    tail: bool = False
    # the part of the text of `STAND_IN` that does not disappear
    stand_in: str = ""


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
    reasoning = chat.squeezed(after[0].get("reasoning_content") or "")
    shown = renderer.without_mark(text[rendered.length : end[0]])
    if reasoning not in chat.squeezed(shown):
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


class _UnsafeError(Exception):
    """No prompt of this template may be extended."""


def probe_template(renderer: "ChatRenderer", *, tools: bool) -> TemplateProbe:
    """Find out what the renderer's template does, with or without tools."""
    if not renderer.keeps_apart:
        why = "the tokenizer does not encode a text piece by piece"
        return TemplateProbe(safe=False, why=why)
    try:
        return _Probe(renderer, [STAND_IN_TOOL] if tools else None).result()
    except (TemplateError, _UnsafeError) as error:
        return TemplateProbe(safe=False, why=str(error))


@dataclass(frozen=True, slots=True)
class _Probe:
    """The conversations."""

    _renderer: "ChatRenderer"
    _tools: list[Json] | None

    def result(self) -> TemplateProbe:
        before = self._renderer.text(STAND_IN, self._tools, generation_prompt=False)
        opening = self._text(STAND_IN)
        reply, new = _TALK[0]
        later = self._text([*STAND_IN, reply, *new])
        stays = commonprefix([opening, later])  # noqa: RUF071
        leaves = opening.removeprefix(stays)
        # only the generation prompt may disappear
        if not stays.startswith(before):
            raise _UnsafeError("a later message changes the text before it")
        self._check(_TALK, leaves, "in plain talk")
        with suppress(TemplateError):
            # a template without tool support rejects requests with tools
            self._check(_WORK, leaves, "where tools are called")
        drops: list[Role] = []
        for role, step in _THOUGHTFUL.items():
            with suppress(TemplateError):
                if not isinstance(self._end(STAND_IN, step, leaves)[1], int):
                    drops.append(role)
        return TemplateProbe(
            safe=True,
            leaves=leaves,
            drops_reasoning=tuple(drops),
            tail=self._looks_at_the_tail(leaves),
            stand_in=stays,
        )

    def _looks_at_the_tail(self, leaves: str) -> bool:
        """Whether a step has the same text after a longer head, with other tools."""
        reply, new = _TALK[1]
        heads = [STAND_IN, [_USER, _calling(_WORDS[2]), _RESULT, reply, *new]]
        with suppress(TemplateError):
            head = [*chat.system_message("system"), *heads[1]]
            self._text(head)
            heads[1] = head
        offers = [self._tools]
        if self._tools is not None:
            offers.append([chat.function_tool("other", None, {}), *self._tools])
        both: Step = (_calling(_WORDS[0]), [_RESULT, _USER])

        def tail(
            before: list[Json], tools: list[Json] | None, step: Step
        ) -> str | None:
            with suppress(TemplateError):
                stays = self._renderer.text(before, tools).removesuffix(leaves)
                text = self._renderer.text([*before, step[0], *step[1]], tools)
                return text.removeprefix(stays)
            return None

        return all(
            len({tail(before, tools, step) for before in heads for tools in offers})
            == 1
            for step in (*_TALK, *_WORK, both)
        )

    def _text(self, messages: list[Json]) -> str:
        return self._renderer.text(messages, self._tools)

    def _end(
        self, messages: list[Json], step: "Step", leaves: str
    ) -> tuple[str, int | Departure]:
        """The text of a request after one more step, and where its reply ends."""
        reply, new = step
        rendered = RenderedPrefix().extend(self._text(messages), leaves)
        text = self._text([*messages, reply, *new])
        return text, end_of_reply(self._renderer, rendered, text, [reply, *new])

    def _check(self, steps: "list[Step]", leaves: str, where: str) -> None:
        """Raise if a conversation of these steps has a reply without one clear end."""
        messages = STAND_IN
        for step in steps:
            text, end = self._end(messages, step, leaves)
            if not isinstance(end, int):
                raise _UnsafeError(f"{_TROUBLE[end]}, {where}")
            if any(word in text[end:] for word in _WORDS):
                raise _UnsafeError(f"a reply has more than one end, {where}")
            messages = [*messages, step[0], *step[1]]


Step: TypeAlias = tuple[Json, list[Json]]
"""A reply, and the messages after it."""


def _calling(content: str, n_calls: int = 1, thought: str = "") -> Json:
    calls = [
        chat.tool_call(f"call_{i}", "probe", json.dumps({"argument": _WORDS[1 + i]}))
        for i in range(n_calls)
    ]
    return chat.assistant_message(content, thought, calls)


_USER: Json = {"role": "user", "content": "question"}
_RESULT = chat.tool_message("call_0", ["outcome"])
STAND_IN = [_USER]
"""Stands for the messages before a reply where only the text after it is needed."""

_TALK: list[Step] = [(chat.assistant_message(word), [_USER]) for word in _WORDS[:2]]
_WORK: list[Step] = [
    (_calling(_WORDS[0], 2), [_RESULT, chat.tool_message("call_1", ["outcome"])]),
    (_calling(""), [_RESULT]),
    _TALK[0],
    (_calling(_WORDS[0]), [_RESULT]),
]
_THOUGHTFUL: dict[Role, Step] = {
    "user": (chat.assistant_message(_WORDS[0], _THOUGHT), [_USER]),
    "tool": (_calling(_WORDS[0], thought=_THOUGHT), [_RESULT]),
}
