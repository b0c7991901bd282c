"""Prompts: rendered whole, or built behind what the engine consumed and sampled before.

``append`` keeps the ids of the turn before, prompt and output, and puts behind them what
the template writes for the new messages alone. So what was sampled comes back as it was
sampled, and the next prompt begins with all that is held.

It is done where it is provably what the template says: the request's messages up to its
last reply are those of a turn that is held, with the same tools, the reply ended itself,
and the template's text for the new request begins with its text for that turn
(`trajkit_shim.standing`). Any other request is rendered, for a reason that is counted.
"""

import json
import secrets
from dataclasses import dataclass
from hashlib import blake2b
from threading import Lock
from typing import Literal, TypeAlias, get_args

import numpy as np

from trajkit_shim.attribution import (
    Attribution,
    Ids,
    found,
    marked,
    message_index,
    without_marks,
)
from trajkit_shim.echo import START, EchoBook, Heard
from trajkit_shim.errors import TemplateError
from trajkit_shim.held import HeldPath, HeldPaths
from trajkit_shim.render import ChatRenderer
from trajkit_shim.standing import Departure, Standing, end_of_reply
from trajkit_shim.template_probe import TemplateProbe, probe_template
from trajkit_shim.wire import Json

Mode: TypeAlias = Literal["append", "render"]
"""How prompts are built where nothing speaks against it."""

Reason: TypeAlias = (
    Literal[
        "chosen",
        "opening",
        "unknown_reply",
        "moved",
        "released",
        "tools",
        "unclosed",
        "template",
    ]
    | Departure
)
"""Why a prompt was rendered.

chosen
    All are.
opening
    The request holds no reply to go on from.
unknown_reply
    Its last assistant message was not sampled in this session.
moved
    It was, but behind other messages: the history was edited, or another agent's.
released
    Its ids are no longer held.
tools
    Other tools are on offer.
unclosed
    The reply did not end itself: it was cut at a limit or at a stop string.
template
    The template does what no prompt may be built behind (`TemplateProbe.why`).
rewritten
    The template writes earlier messages otherwise than it did.
reasoning
    The template leaves out what the reply, or one before it, thought.
unended
    The template's text has no token that ends the reply.
hidden
    It has one, but not all that the new messages say stands behind that.
"""

MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The ids for one request, and how they came about."""

    ids: Ids
    # None: they were built behind a turn before
    reason: Reason | None
    # that turn, and how many of the ids are its own
    base: HeldPath | None = None
    n_held: int = 0
    # of what stands behind it; None: nobody can tell
    tail_shown: Attribution | None = None
    # None: no later prompt may be built behind this one
    standing: Standing | None = None
    # of the tools on offer
    tools: bytes = b""

    @property
    def built(self) -> Mode:
        """How."""
        return "append" if self.reason is None else "render"

    @property
    def digest(self) -> bytes:
        """16 bytes that stand for the ids, as little-endian int32."""
        return blake2b(self.ids.astype("<i4").tobytes(), digest_size=16).digest()


class Prompts:
    """Builds prompts with one renderer. Safe to call from several threads at once.

    Parameters
    ----------
    renderer : ChatRenderer
    mode : "append" or "render"
    """

    def __init__(self, renderer: ChatRenderer, mode: Mode = "append") -> None:
        self.renderer = renderer
        self.mode = mode
        self._probes: dict[bool, TemplateProbe] = {}
        self._lock = Lock()

    def probe(self, *, tools: bool) -> TemplateProbe:
        """What the template does, with tools on offer or without; found out once."""
        with self._lock:
            if tools not in self._probes:
                self._probes[tools] = probe_template(self.renderer, tools=tools)
            return self._probes[tools]

    def describe(self) -> Json:
        """The mode, and what the template does, as JSON."""
        return {
            "mode": self.mode,
            "template": {
                "with_tools": self.probe(tools=True).describe(),
                "without_tools": self.probe(tools=False).describe(),
            },
        }

    def summary(self) -> str:
        """The same in one line."""
        if self.mode == "render":
            return "render"
        probes = self.probe(tools=True), self.probe(tools=False)
        parts = [
            f"rendered {when} tools: {probe.why}"
            for when, probe in zip(("with", "without"), probes, strict=True)
            if not probe.safe
        ]
        roles = sorted({role for probe in probes for role in probe.drops_reasoning})
        if roles:
            parts.append(
                f"rendered where a {' or '.join(roles)} message drops reasoning"
            )
        return "; ".join(["append", *parts])

    def build(
        self,
        heard: Heard,
        tools: list[Json] | None,
        echo: EchoBook,
        held: HeldPaths,
        *,
        attributed: bool,
    ) -> Prompt:
        """The prompt for a request.

        Parameters
        ----------
        heard : Heard
            The request's messages, with the session's replies put back.
        tools : list of dict or None
        echo, held : EchoBook, HeldPaths
            The session's.
        attributed : bool
            Say what each token shows that is built behind another turn.

        Raises
        ------
        TemplateError, GatewayError
            As `ChatRenderer.render`.
        """
        text = self.renderer.text(heard.messages, tools)
        if self.mode == "render":
            return Prompt(ids=self.renderer.ids_of(text), reason="chosen")
        probe = self.probe(tools=tools is not None)
        if not probe.safe:
            return Prompt(ids=self.renderer.ids_of(text), reason="template")
        offered = _tools_digest(tools)
        last, base, reason = _goes_on_from(heard, offered, echo, held)
        if base is not None and base.standing is not None:
            end = end_of_reply(
                self.renderer,
                base.standing,
                text,
                heard.messages[last],
                heard.messages[last + 1 :],
            )
            if isinstance(end, int):
                tail, shown = self._tail(
                    heard.messages,
                    tools,
                    last,
                    text,
                    end,
                    attributed,
                    literal=not probe.trims_new,
                )
                before = base.ids()
                return Prompt(
                    ids=np.concatenate([before, tail]),
                    reason=None,
                    base=base,
                    n_held=len(before),
                    tail_shown=shown,
                    standing=base.standing.grown(text, probe.leaves),
                    tools=offered,
                )
            reason = end
            if end == "rewritten" and probe.drops_reasoning and _thinks(heard, last):
                reason = "reasoning"
        return Prompt(
            ids=self.renderer.ids_of(text),
            reason=reason,
            standing=Standing.of(text, probe.leaves),
            tools=offered,
        )

    def shown(
        self, prompt: Prompt, messages: list[Json], tools: list[Json] | None
    ) -> Attribution | None:
        """Which message each token of a prompt shows; None: nobody can tell."""
        if prompt.base is None:
            return self.renderer.attribute(messages, tools, prompt.ids)
        if prompt.tail_shown is None:
            return None
        before = prompt.base.shown()
        return Attribution(
            np.concatenate([before.message_index, prompt.tail_shown.message_index]),
            np.concatenate([before.is_content, prompt.tail_shown.is_content]),
        )

    def hold(
        self,
        prompt: Prompt,
        shown: Attribution | None,
        output_ids: Ids,
        *,
        place: bytes,
        message: int,
    ) -> HeldPath | None:
        """The path of a prompt and its output. None: no prompt will be built behind it.

        Parameters
        ----------
        prompt : Prompt
        shown : Attribution or None
            Of the prompt; None: nobody can tell, or nobody asks.
        output_ids : ndarray of int32, shape (n_output,)
        place : bytes
            Behind the reply.
        message : int
            The number of the reply among the messages of later requests.
        """
        if prompt.standing is None:
            return None
        closed = bool(len(output_ids)) and int(output_ids[-1]) in self.renderer.end_ids
        if not closed:
            # known again, and no more
            return HeldPath(
                place=place,
                base=None,
                own_ids=output_ids[:0],
                own_shown=None,
                closed=False,
                standing=prompt.standing,
                tools=prompt.tools,
            )
        own_shown = None
        if shown is not None:
            content = np.ones(len(output_ids), np.bool_)
            # what ends the message is no text of it
            content[-1] = False
            index = np.full(len(output_ids), message, np.int32)
            own_shown = Attribution(
                np.concatenate([shown.message_index[prompt.n_held :], index]),
                np.concatenate([shown.is_content[prompt.n_held :], content]),
            )
        return HeldPath(
            place=place,
            base=prompt.base,
            own_ids=np.concatenate([prompt.ids[prompt.n_held :], output_ids]),
            own_shown=own_shown,
            closed=True,
            standing=prompt.standing,
            tools=prompt.tools,
        )

    def _tail(
        self,
        messages: list[Json],
        tools: list[Json] | None,
        last: int,
        text: str,
        end: int,
        attributed: bool,
        *,
        literal: bool,
    ) -> tuple[Ids, Attribution | None]:
        """The ids of what a text has behind message ``last``, and what they show.

        Where the template leaves white space as it is (``literal``), a content that
        stands there once, to the letter, is told without rendering all once more.
        """
        if not attributed:
            return self.renderer.ids_of(text[end:]), None
        encoded = self.renderer.encode(text[end:])
        # the text of a special token is the template's own: that of a message is marked
        if literal and not self.renderer.spells_special(messages[last + 1 :]):
            spans = found(messages, last + 1, text[end:])
        else:
            spans = None
        if spans is not None:
            index = message_index(encoded, spans)
            return encoded.ids, Attribution(index, index >= 0)
        for inside_space in (False, True):
            name = f"x{secrets.token_hex(12)}"
            named = [
                marked(message, i, name, inside_space) if i > last else message
                for i, message in enumerate(messages)
            ]
            try:
                with_marks = self.renderer.text(named, tools)
            except TemplateError:
                # the marks are what it refuses
                break
            clean, spans = without_marks(with_marks, name)
            if spans is not None and clean == text:
                behind = [(i, start - end, stop - end) for i, start, stop in spans]
                index = message_index(encoded, behind)
                return encoded.ids, Attribution(index, index >= 0)
        return encoded.ids, None


def _goes_on_from(
    heard: Heard, offered: bytes, echo: EchoBook, held: HeldPaths
) -> tuple[int, HeldPath | None, Reason]:
    """The number of a request's last reply, and its path or why there is none."""
    replies = (
        i
        for i in range(len(heard.messages) - 1, -1, -1)
        if heard.messages[i]["role"] == "assistant"
    )
    last = next(replies, None)
    if last is None:
        return -1, None, "opening"
    path = held.get(heard.places[last])
    if path is None:
        _, taken_for = heard.known[-1]
        if taken_for == "new":
            return last, None, "unknown_reply"
        before = heard.places[last - 1] if last else START
        there = echo.sampled_at(before)
        return last, None, "released" if there else "moved"
    if not path.closed:
        return last, None, "unclosed"
    if path.tools != offered:
        return last, None, "tools"
    return last, path, "chosen"


def _thinks(heard: Heard, last: int) -> bool:
    return any(
        message.get("reasoning_content") for message in heard.messages[: last + 1]
    )


def _tools_digest(tools: list[Json] | None) -> bytes:
    # a template may show the order of their fields
    return blake2b(json.dumps(tools).encode(), digest_size=16).digest()
