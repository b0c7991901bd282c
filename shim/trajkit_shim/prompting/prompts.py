"""Prompts: rendered, or built by appending to token ids consumed and sampled before.

``append`` keeps prompt and output ids of an earlier turn and appends only what the
template writes for the new messages. Sampled ids then come back exactly as they were
sampled, and the next prompt starts with the complete earlier path.

It is used only if it provably yields what the template writes: the request's messages up
to its last reply are those of a cached turn, with the same tools, the reply ended by
itself, and the template's text for the request starts with its text for that turn
(`prompting.rendered_prefix`). Other requests are rendered, for a reason that is counted.
"""

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from threading import Lock
from typing import Literal, TypeAlias

import numpy as np

from trajkit_shim.chat.images import hashes_of
from trajkit_shim.errors import TemplateError
from trajkit_shim.json_input import Json
from trajkit_shim.prompting.attribution import (
    Attribution,
    Encoded,
    Ids,
    Spans,
    attribution_of,
    find_verbatim,
    joined,
    locate_contents,
)
from trajkit_shim.prompting.image_places import ImagePlaces
from trajkit_shim.prompting.render import ChatRenderer
from trajkit_shim.prompting.rendered_prefix import (
    Departure,
    RenderedPrefix,
    end_of_reply,
)
from trajkit_shim.prompting.reply_matching import START, ReplyIndex, RestoredRequest
from trajkit_shim.prompting.template_probe import TemplateProbe, probe_template
from trajkit_shim.prompting.token_cache import CachedPath, TokenCache
from trajkit_shim.prompting.tokenize_cache import NO_LIMIT

Mode: TypeAlias = Literal["append", "render"]
"""How prompts are built where possible."""

Reason: TypeAlias = (
    Literal["chosen", "opening", "unknown_reply", "moved", "released", "tools"]
    | Literal["unclosed", "template"]
    | Departure
)
"""Why a prompt was rendered (docs/serving.md has a table)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The ids for one request, and how they were built."""

    ids: Ids
    reason: Reason | None  # None: appended to an earlier turn
    base: CachedPath | None = None  # that turn, and how many of the ids are its
    n_base: int = 0
    tail_attribution: Attribution | None = None  # of the appended ids; None: unknown
    rendered: RenderedPrefix | None = None  # None: no later prompt may extend this one
    tools: bytes = b""  # digest of the offered tools

    @property
    def built(self) -> Mode:
        """How."""
        return "append" if self.reason is None else "render"

    @property
    def digest(self) -> bytes:
        """A 16-byte digest of the ids as little-endian int32."""
        return blake2b(self.ids.astype("<i4").tobytes(), digest_size=16).digest()


class Prompts:
    """Builds prompts with one renderer. Safe to use from several threads at once."""

    def __init__(
        self,
        renderer: ChatRenderer,
        mode: Mode = "append",
        places: ImagePlaces | None = None,
    ) -> None:
        self.renderer = renderer
        self.mode = mode
        self.places = places  # None: no message has an image
        self._probes: dict[bool, TemplateProbe] = {}
        self._lock = Lock()

    def probe(self, *, tools: bool) -> TemplateProbe:
        """Return what the template does, with or without tools; computed once."""
        with self._lock:
            if tools not in self._probes:
                self._probes[tools] = probe_template(self.renderer, tools=tools)
            return self._probes[tools]

    def describe(self) -> Json:
        """Return the mode and what the template does, as JSON."""
        return {
            "mode": self.mode,
            "template": {
                "with_tools": self.probe(tools=True).describe(),
                "without_tools": self.probe(tools=False).describe(),
            },
        }

    def summary(self) -> str:
        """Return the same in one line."""
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
            named = " or ".join(roles)
            parts.append(f"rendered where a {named} message drops reasoning")
        return "; ".join(["append", *parts])

    def build(
        self,
        restored: RestoredRequest,
        tools: list[Json] | None,
        replies: ReplyIndex,
        cache: TokenCache,
        *,
        attributed: bool,
        max_tokens: int = NO_LIMIT,
    ) -> Prompt:
        """Return the prompt for a request.

        ``restored`` has the session's replies in the request's messages; ``replies`` and
        ``cache`` are the session's. ``attributed``: also determine which message each
        appended token belongs to. Raises as `ChatRenderer.render`, and
        `TooManyTokensError` if there are surely more than ``max_tokens``.
        """
        text = self.renderer.text(restored.messages, tools)
        if self.mode == "render":
            ids = self._ids(text, restored.messages, max_tokens)
            return Prompt(ids=ids, reason="chosen")
        probe = self.probe(tools=tools is not None)
        if not probe.safe:
            ids = self._ids(text, restored.messages, max_tokens)
            return Prompt(ids=ids, reason="template")
        offered = _tools_digest(tools)
        last, base, reason = _find_base(restored, offered, replies, cache)
        if base is not None and base.rendered is not None:
            reply, *new = restored.messages[last:]
            end = end_of_reply(self.renderer, base.rendered, text, reply, new)
            if isinstance(end, int):
                tail = self._encode(text[end:], new, max_tokens)
                shown = None
                if attributed:
                    # a template that trims changes what it renders
                    plain, messages = not probe.trims_new, restored.messages
                    spans = self._find_new(messages, tools, last, text, end, plain)
                    shown = None if spans is None else attribution_of(tail, spans)
                before = base.ids()
                return Prompt(
                    ids=np.concatenate([before, tail.ids]),
                    reason=None,
                    base=base,
                    n_base=len(before),
                    tail_attribution=shown,
                    rendered=base.rendered.extend(text, probe.leaves),
                    tools=offered,
                )
            reason = end
            if end == "rewritten" and probe.drops_reasoning:
                earlier = restored.messages[: last + 1]
                thinks = any(message.get("reasoning_content") for message in earlier)
                reason = "reasoning" if thinks else end
        return Prompt(
            ids=self._ids(text, restored.messages, max_tokens),
            reason=reason,
            rendered=RenderedPrefix.of(text, probe.leaves),
            tools=offered,
        )

    def _ids(self, text: str, messages: list[Json], max_tokens: int) -> Ids:
        """The ids of a text, with the images of its messages."""
        if not hashes_of(messages):
            return self.renderer.ids_of(text, max_tokens)
        return self._encode(text, messages, max_tokens).ids

    def _encode(self, text: str, messages: list[Json], max_tokens: int) -> Encoded:
        encoded = self.renderer.encode(text, max_tokens)
        if self.places is None:
            return encoded
        return self.places.expand(encoded, messages)

    def attribution(
        self, prompt: Prompt, messages: list[Json], tools: list[Json] | None
    ) -> Attribution | None:
        """Return which message each token belongs to, or None if unknown."""
        if prompt.base is None:
            return self.renderer.attribute(
                messages,
                tools,
                prompt.ids,
                lambda text: self._encode(text, messages, NO_LIMIT),
            )
        if prompt.tail_attribution is None:
            return None
        return joined([prompt.base.attribution(), prompt.tail_attribution])

    def cacheable_path(
        self,
        prompt: Prompt,
        shown: Attribution | None,
        output_ids: Ids,
        *,
        position: bytes,
        message: int,
    ) -> CachedPath | None:
        """Return prompt and output for later prompts to extend, or None if they cannot.

        ``shown``: of the prompt, if known. ``output_ids`` (ndarray of int32, shape
        (n_output,)). ``position``: the position after the reply. ``message``: index of
        the reply among the messages of later requests.
        """
        if prompt.rendered is None:
            return None
        path = CachedPath(
            position=position,
            base=None,
            own_ids=output_ids[:0],
            own_attribution=None,
            closed=False,
            rendered=prompt.rendered,
            tools=prompt.tools,
        )
        if not len(output_ids) or int(output_ids[-1]) not in self.renderer.end_ids:
            # recognized later, but not extended
            return path
        own_attribution = None
        if shown is not None:
            content = np.ones(len(output_ids), np.bool_)
            # the end-of-message token is not content
            content[-1] = False
            index = np.full(len(output_ids), message, np.int32)
            new = slice(prompt.n_base, None)
            prompt_part = Attribution(shown.message_index[new], shown.is_content[new])
            own_attribution = joined([prompt_part, Attribution(index, content)])
        return replace(
            path,
            base=prompt.base,
            own_ids=np.concatenate([prompt.ids[prompt.n_base :], output_ids]),
            own_attribution=own_attribution,
            closed=True,
        )

    def _find_new(
        self,
        messages: list[Json],
        tools: list[Json] | None,
        last: int,
        text: str,
        end: int,
        verbatim: bool,
    ) -> Spans | None:
        """The contents of the messages after ``last`` in a text after its ``end``.

        Contents that the template writes as they are (``verbatim``), and that occur
        exactly once, are located without rendering again.
        """
        # text that spells a special token contains a mark, so it does not match
        if verbatim and not self.renderer.spells_special(messages[last + 1 :]):
            spans = find_verbatim(messages, last + 1, text[end:])
            if spans is not None:
                return spans
        # the template may reject the marks
        with suppress(TemplateError):
            for rendered, spans in locate_contents(
                messages, lambda marked: self.renderer.text(marked, tools), last + 1
            ):
                if rendered == text:
                    return [(i, start - end, stop - end) for i, start, stop in spans]
        return None


def _find_base(
    restored: RestoredRequest, offered: bytes, replies: ReplyIndex, cache: TokenCache
) -> tuple[int, CachedPath | None, Reason]:
    """The index of a request's last reply, and its path, or why it has no path."""
    roles = [message["role"] for message in restored.messages]
    if "assistant" not in roles:
        return -1, None, "opening"
    last = len(roles) - 1 - roles[::-1].index("assistant")
    path = cache.get(restored.positions[last])
    if path is None:
        _, taken_for = restored.known[-1]
        if taken_for == "new":
            return last, None, "unknown_reply"
        before = restored.positions[last - 1] if last else START
        replied = replies.has_reply_at(before)
        return last, None, "released" if replied else "moved"
    if not path.closed:
        return last, None, "unclosed"
    if path.tools != offered:
        return last, None, "tools"
    return last, path, "chosen"


def _tools_digest(tools: list[Json] | None) -> bytes:
    # not sorted, because a template may render the fields in order
    return blake2b(json.dumps(tools).encode(), digest_size=16).digest()
