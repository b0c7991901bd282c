"""What a chat template does to a conversation that goes on, found out by asking it.

A template is a program: it may drop the reasoning of earlier turns once the user speaks
again, put the tools before the last message, or write the last turn otherwise than the
others. A prompt can be built behind the one before only where it does not: what stands
must stay. So each template is given short conversations that grow by one message.
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from trajkit_shim.errors import TemplateError
from trajkit_shim.standing import Departure, Standing, end_of_reply
from trajkit_shim.wire import Json

if TYPE_CHECKING:
    from trajkit_shim.render import ChatRenderer

Role: TypeAlias = Literal["user", "tool"]

_THOUGHT = "pondering"
# no template writes these of its own
_WORDS = ("alphaword", "betaword", "gammaword")
_TROUBLE: dict[Departure, str] = {
    "rewritten": "a later message changes what stands before it",
    "unended": "no token ends a reply",
    "hidden": "what follows a reply does not say what the new messages say",
}
_TOOL: Json = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "probe",
        "parameters": {"type": "object", "properties": {}},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateProbe:
    """What one template does, with tools on offer or without.

    Attributes
    ----------
    safe : bool
        Prompts may be built behind one another.
    why : str or None
        Why not.
    close : str
        White space that the template writes behind the token that ends a reply.
    generation_prompt : str
        What it writes to ask for a reply.
    leaves : str
        The end of that which is no longer there once the reply stands in the prompt.
        Behind a prompt that was built so it stays.
    drops_reasoning : tuple of "user" and "tool"
        A message of that role makes it leave out the reasoning of the reply before:
        such a prompt is rendered.
    trims : bool
        It changes white space around what was said: a rendered prompt drifts there.
    trims_new : bool
        It changes white space around what the user or a tool says.
    """

    safe: bool
    why: str | None = None
    close: str = ""
    generation_prompt: str = ""
    leaves: str = ""
    drops_reasoning: tuple[Role, ...] = ()
    trims: bool = False
    trims_new: bool = False

    def describe(self) -> Json:
        """As JSON."""
        return {**asdict(self), "drops_reasoning": [*self.drops_reasoning]}


class _UnsafeError(Exception):
    """The template does what no prompt may be built behind."""


def probe_template(renderer: "ChatRenderer", *, tools: bool) -> TemplateProbe:
    """Find out what the renderer's template does.

    Parameters
    ----------
    renderer : ChatRenderer
    tools : bool
        Tools are on offer.
    """
    if not renderer.keeps_apart:
        return TemplateProbe(
            safe=False, why="the tokenizer does not encode a text piece by piece"
        )
    try:
        return _Probe(renderer, [_TOOL] if tools else None).result()
    except TemplateError as error:
        return TemplateProbe(safe=False, why=str(error))
    except _UnsafeError as error:
        return TemplateProbe(safe=False, why=str(error))


class _Probe:
    """The conversations."""

    def __init__(self, renderer: "ChatRenderer", tools: list[Json] | None) -> None:
        self._renderer = renderer
        self._tools = tools

    def result(self) -> TemplateProbe:
        opening = [_user()]
        before = self._renderer.text(opening, self._tools, generation_prompt=False)
        asked = self._text(opening)
        later = self._text([*opening, _reply(_WORDS[0]), _user()])
        leaves = asked[_n_common(asked, later) :]
        prompt = asked.removeprefix(before)
        if not asked.startswith(before) or not prompt.endswith(leaves):
            raise _UnsafeError("a later message changes what stands before it")
        closes = self._closes(opening, _TALK, leaves, "in plain talk")
        with suppress(TemplateError):
            # one that knows no tools refuses requests that have any
            closes += self._closes(opening, _WORK, leaves, "where tools are called")
        thought: dict[Role, Step] = {
            "user": (_reply(_WORDS[0], thought=True), [_user()]),
            "tool": (_calling(_WORDS[0], thought=True), [_result()]),
        }
        drops: list[Role] = []
        for role, step in thought.items():
            with suppress(TemplateError):
                if not isinstance(self._end(opening, step, leaves)[1], int):
                    drops.append(role)
        spaced = f"\n {_WORDS[0]} \n"
        shown = self._text([*opening, _reply(spaced), _user()])
        return TemplateProbe(
            safe=True,
            close=min(closes, key=len),
            generation_prompt=prompt,
            leaves=leaves,
            drops_reasoning=tuple(drops),
            trims=spaced not in shown,
            trims_new=self._trims_new(opening, spaced),
        )

    def _trims_new(self, opening: list[Json], spaced: str) -> bool:
        """Whether what the user, or one of two tools, says is not there to the letter."""
        new: list[list[Json]] = [
            [_reply(_WORDS[1]), {**_user(), "content": spaced}],
            [
                _calling("", 2),
                {**_result(0), "content": spaced},
                {**_result(1), "content": spaced},
            ],
        ]
        for step in new:
            with suppress(TemplateError):
                # a template that trims may write white space of its own
                for wanted in (spaced, f"{spaced}\n", f"\n{spaced}"):
                    told = [
                        {**message, "content": wanted}
                        if message["content"] == spaced
                        else message
                        for message in step
                    ]
                    shown = self._text([*opening, *told])
                    if shown.count(wanted) != len(step) - 1:
                        return True
        return False

    def _text(self, messages: list[Json]) -> str:
        return self._renderer.text(messages, self._tools)

    def _end(
        self, messages: list[Json], step: "Step", leaves: str
    ) -> tuple[str, int | Departure]:
        """The text of a request that goes on by a step, and where its reply ends."""
        reply, new = step
        standing = Standing.of(self._text(messages), leaves)
        text = self._text([*messages, reply, *new])
        return text, end_of_reply(self._renderer, standing, text, reply, new)

    def _closes(
        self, messages: list[Json], steps: "list[Step]", leaves: str, where: str
    ) -> list[str]:
        """The white space behind each reply of a conversation."""
        closes = []
        for step in steps:
            text, end = self._end(messages, step, leaves)
            if not isinstance(end, int):
                raise _UnsafeError(f"{_TROUBLE[end]}, {where}")
            behind = text[end:]
            if any(word in behind for word in _WORDS):
                raise _UnsafeError(f"a reply has more than one end, {where}")
            closes.append(behind[: len(behind) - len(behind.lstrip())])
            messages = [*messages, step[0], *step[1]]
        return closes


Step: TypeAlias = tuple[Json, list[Json]]
"""A reply, and the messages that come next."""


def _n_common(one: str, other: str) -> int:
    """How many characters two texts have in common at their start."""
    pairs = enumerate(zip(one, other, strict=False))
    shorter = min(len(one), len(other))
    return next((n for n, (a, b) in pairs if a != b), shorter)


def _user() -> Json:
    return {"role": "user", "content": "question"}


def _result(call: int = 0) -> Json:
    return {"role": "tool", "content": "outcome", "tool_call_id": f"call_{call}"}


def _reply(content: str, *, thought: bool = False) -> Json:
    reasoning: Json = {"reasoning_content": _THOUGHT} if thought else {}
    return {"role": "assistant", "content": content, **reasoning}


def _calling(content: str, n_calls: int = 1, *, thought: bool = False) -> Json:
    calls = [
        {
            "id": f"call_{call}",
            "type": "function",
            "function": {
                "name": "probe",
                "arguments": json.dumps({"argument": _WORDS[1 + call]}),
            },
        }
        for call in range(n_calls)
    ]
    return {**_reply(content, thought=thought), "tool_calls": calls}


_TALK: list[Step] = [
    (_reply(_WORDS[0]), [_user()]),
    (_reply(_WORDS[1]), [_user()]),
]
_WORK: list[Step] = [
    (_calling(_WORDS[0], 2), [_result(0), _result(1)]),
    (_calling(""), [_result()]),
    (_reply(_WORDS[0]), [_user()]),
    (_calling(_WORDS[0]), [_result()]),
]
