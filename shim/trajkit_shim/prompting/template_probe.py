"""Finds out, by trying, what a chat template does to a growing conversation.

A template is a program. It may drop the reasoning of earlier turns, or render the last
turn differently. Appending to a prompt is only possible if the existing text never
changes, so each template renders short conversations that grow message by message.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from os.path import commonprefix
from typing import TYPE_CHECKING, Literal, TypeAlias

from trajkit_shim.chat.request import function_tool, tool_call
from trajkit_shim.errors import TemplateError
from trajkit_shim.json_input import Json
from trajkit_shim.prompting.rendered_prefix import (
    Departure,
    RenderedPrefix,
    end_of_reply,
)

if TYPE_CHECKING:
    from trajkit_shim.prompting.render import ChatRenderer

Role: TypeAlias = Literal["user", "tool"]

_THOUGHT = "pondering"
# words that no template contains
_WORDS = ("alphaword", "betaword", "gammaword")
_TROUBLE: dict[Departure, str] = {
    "rewritten": "a later message changes the text before it",
    "unended": "no token ends a reply",
    "hidden": "the content of a new message is missing after the reply",
}
STAND_IN_TOOL = function_tool("probe", "probe", {"type": "object", "properties": {}})


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
        opening = STAND_IN
        before = self._renderer.text(opening, self._tools, generation_prompt=False)
        opening_text = self._text(opening)
        later = self._text([*opening, _reply(_WORDS[0]), _user()])
        stays = commonprefix([opening_text, later])  # noqa: RUF071
        leaves = opening_text.removeprefix(stays)
        prompt = opening_text.removeprefix(before)
        if not opening_text.startswith(before) or not prompt.endswith(leaves):
            raise _UnsafeError("a later message changes the text before it")
        self._check(_TALK, leaves, "in plain talk")
        with suppress(TemplateError):
            # a template without tool support rejects requests with tools
            self._check(_WORK, leaves, "where tools are called")
        thought: dict[Role, Step] = {
            "user": (_reply(_WORDS[0], thought=True), [_user()]),
            "tool": (_calling(_WORDS[0], thought=True), [_result()]),
        }
        drops: list[Role] = []
        for role, step in thought.items():
            with suppress(TemplateError):
                if not isinstance(self._end(opening, step, leaves)[1], int):
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
        system: list[Json] = [{"role": "system", "content": "system"}]
        head = [_user(), _calling(_WORDS[2]), _result(), _reply(_WORDS[1]), _user()]
        with suppress(TemplateError):
            self._text([*system, *head])
            head = [*system, *head]
        offers = [self._tools]
        if self._tools is not None:
            offers.append([function_tool("other", None, {}), *self._tools])
        both: Step = (_calling(_WORDS[0]), [_result(), _user()])
        for reply, new in (*_TALK, *_WORK, both):
            found: set[str | None] = set()
            for before in (STAND_IN, head):
                for tools in offers:
                    try:
                        text = self._renderer.text([*before, reply, *new], tools)
                        stays = self._renderer.text(before, tools).removesuffix(leaves)
                    except TemplateError:
                        found.add(None)
                        continue
                    if not text.startswith(stays):
                        return False
                    found.add(text.removeprefix(stays))
            if len(found) > 1:
                return False
        return True

    def _text(self, messages: list[Json]) -> str:
        return self._renderer.text(messages, self._tools)

    def _end(
        self, messages: list[Json], step: "Step", leaves: str
    ) -> tuple[str, int | Departure]:
        """The text of a request after one more step, and where its reply ends."""
        reply, new = step
        rendered = RenderedPrefix.of(self._text(messages), leaves)
        text = self._text([*messages, reply, *new])
        return text, end_of_reply(self._renderer, rendered, text, reply, new)

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


def _user() -> Json:
    return {"role": "user", "content": "question"}


def _result(call: int = 0) -> Json:
    return {"role": "tool", "content": "outcome", "tool_call_id": f"call_{call}"}


def _reply(content: str, *, thought: bool = False) -> Json:
    reasoning: Json = {"reasoning_content": _THOUGHT} if thought else {}
    return {"role": "assistant", "content": content, **reasoning}


def _calling(content: str, n_calls: int = 1, *, thought: bool = False) -> Json:
    calls = [
        tool_call(f"call_{i}", "probe", json.dumps({"argument": _WORDS[1 + i]}))
        for i in range(n_calls)
    ]
    return {**_reply(content, thought=thought), "tool_calls": calls}


STAND_IN: list[Json] = [_user()]
"""Stands for the messages before a reply where only the text after it is needed."""

_TALK: list[Step] = [(_reply(_WORDS[0]), [_user()]), (_reply(_WORDS[1]), [_user()])]
_WORK: list[Step] = [
    (_calling(_WORDS[0], 2), [_result(0), _result(1)]),
    (_calling(""), [_result()]),
    (_reply(_WORDS[0]), [_user()]),
    (_calling(_WORDS[0]), [_result()]),
]
