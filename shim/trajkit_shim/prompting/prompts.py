"""Prompts: rendered, or built by appending to token ids consumed and sampled before.

``append`` keeps prompt and output ids of an earlier turn and appends only what the
template writes for the new messages. It is used only if it provably yields what the
template writes: the request's messages up to its last reply are those of a cached turn,
with the same tools, the reply ended by itself, and the template's text for the request
starts with its text for that turn (`prompting.template_probe`). Other requests are
rendered, for a reason that is counted; of a changed history, the ids of the last turn
before the change are kept.
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from threading import Lock
from typing import Literal, NamedTuple, TypeAlias

from trajkit_shim.chat.images import hashes_of, texts_of
from trajkit_shim.errors import TemplateError
from trajkit_shim.json_input import Json
from trajkit_shim.prompting import attribution
from trajkit_shim.prompting.image_places import ImagePlaces
from trajkit_shim.prompting.render import ChatRenderer
from trajkit_shim.prompting.reply_matching import START, ReplyIndex, RestoredRequest
from trajkit_shim.prompting.template_probe import (
    STAND_IN,
    STAND_IN_TOOL,
    Departure,
    RenderedPrefix,
    TemplateProbe,
    end_of_reply,
    probe_template,
)
from trajkit_shim.prompting.token_cache import Branch, CachedPath, TokenCache
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

    ids: attribution.Ids
    branch: Branch  # that the ids are in
    hasher: blake2b  # BLAKE2b (16 bytes) of the ids as little-endian int32
    reason: Reason | None  # why it does not extend the last reply; None: it does
    base: CachedPath  # that turn; it has no ids if the prompt extends no turn
    n_known: int  # how many of the messages have those tokens
    # of each appended id, the index of its message after the known ones; -1: no message.
    # None: unknown, or not requested
    message_index: attribution.Ids | None
    rendered: RenderedPrefix | None  # None: no later prompt may extend this one

    @property
    def built(self) -> Mode:
        """How."""
        return "append" if self.reason is None else "render"


class _View(NamedTuple):
    """Messages to render, of which the last ones are new."""

    messages: list[Json]
    tools: list[Json] | None
    n_known: int
    before: RenderedPrefix  # of the known messages without the last, a reply


SHORT_TAIL = 4 << 10
"""Characters of messages that take about a millisecond to render and tokenize."""


class CompleteTextError(Exception):
    """More must be rendered than a few new messages, which may take long."""


class Prompts:
    """Builds prompts with one renderer. Safe to use from several threads at once.

    ``check``: render every request completely, also where only its new text is needed.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        mode: Mode = "append",
        places: ImagePlaces | None = None,
        *,
        check: bool = False,
    ) -> None:
        self.renderer = renderer
        self.mode = mode
        self.places = places  # None: no message has an image
        self._check = check
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
                "with_tools": asdict(self.probe(tools=True)),
                "without_tools": asdict(self.probe(tools=False)),
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
        complete: bool = True,
    ) -> Prompt:
        """Return the prompt for a request.

        ``replies`` and ``cache`` are the session's. ``attributed``: also determine which
        message each appended token belongs to. Raises as `ChatRenderer.text`,
        `EngineError` if there are surely more than ``max_tokens``, and without
        ``complete`` a `CompleteTextError` if more must be rendered than the last reply and
        new messages, `SHORT_TAIL` together.
        """
        messages = restored.messages
        probe = self.probe(tools=tools is not None)
        safe = probe.safe and self.mode == "append"
        # not sorted, because a template may render the fields in order
        offered = blake2b(json.dumps(tools).encode(), digest_size=16).digest()
        empty = RenderedPrefix(tools=offered)
        nothing = base = CachedPath(position=START, rendered=empty)
        n_known = 0
        reason: Reason | None = "template" if self.mode == "append" else "chosen"
        if safe:
            n_known, base, reason = _find_base(restored, nothing, replies, cache)
        # the reply that is known, and what is new
        tail = messages[max(0, n_known - 1) :]
        thinks = any(message.get("reasoning_content") for message in tail)
        reasons = base.rendered.reasons or thinks
        tail_only = n_known > 0 and self._tail_only(probe, tail[1:], reasons=reasons)
        if not complete and _n_characters(tail) > SHORT_TAIL:
            raise CompleteTextError

        def render(view: _View) -> tuple[str, int | Departure]:
            text = self.renderer.text(view.messages, view.tools)
            return text, end_of_reply(self.renderer, view.before, text, tail)

        end: int | Departure = "unended"
        # the last complete comparison counts until the text has twice its length
        is_recent = base.rendered.length < 2 * base.rendered.checked
        if tail_only and is_recent and not self._check:
            few = None if tools is None else [STAND_IN_TOOL]
            before = RenderedPrefix().extend(probe.stand_in, "")
            view = _View([*STAND_IN, *tail], few, len(STAND_IN) + 1, before)
            # the template may reject the stand-in
            with suppress(TemplateError):
                text, end = render(view)
        if not isinstance(end, int):
            if not complete:
                raise CompleteTextError
            view = _View(messages, tools, n_known, base.rendered)
            text, end = render(view)
        if not isinstance(end, int):
            if end == "rewritten" and tail_only:
                # what was proven of short conversations is not true of this one
                probe.tail = False
            if end == "rewritten" and probe.drops_reasoning and reasons:
                end = "reasoning"
            reason, base, n_known, end = reason or end, nothing, 0, 0
            view = _View(messages, tools, 0, empty)
        encoded = self.renderer.encode(text[end:], max_tokens)
        if self.places is not None:
            encoded = self.places.expand(encoded, messages[n_known:])
        ids, branch = base.branch.extend(base.ids, encoded.ids)
        more, full = text[view.before.length :], view.before is base.rendered
        rendered = base.rendered.extend(
            more, probe.leaves, checked=full, reasons=reasons
        )
        index = self._attribute(view, text, end, encoded) if attributed else None
        return Prompt(
            ids=ids,
            branch=branch,
            hasher=_hashed(base.hasher, encoded.ids),
            reason=reason,
            base=base,
            n_known=n_known,
            message_index=index,
            rendered=rendered if safe else None,
        )

    def _tail_only(
        self, probe: TemplateProbe, new: list[Json], *, reasons: bool
    ) -> bool:
        """Whether the text of new messages does not depend on the head, nor it on them."""
        roles = {message["role"] for message in new}
        # the probe had these roles, and no images, which a template may number
        known = bool(roles) and roles <= {"user", "tool"} and not hashes_of(new)
        drops = reasons and not roles.isdisjoint(probe.drops_reasoning)
        return probe.tail and known and not drops

    def cacheable_path(
        self, prompt: Prompt, output_ids: attribution.Ids, position: bytes
    ) -> CachedPath | None:
        """Return prompt and output for later prompts to extend, or None if they cannot."""
        if prompt.rendered is None:
            return None
        path = CachedPath(
            position=position,
            base=prompt.base,
            rendered=prompt.rendered,
            hasher=_hashed(prompt.hasher, output_ids),
        )
        # one that is not closed is recognized later, but not extended
        if len(output_ids) and int(output_ids[-1]) in self.renderer.end_ids:
            ids, path.branch = prompt.branch.extend(prompt.ids, output_ids)
            path.n_ids = len(ids)
        return path

    def _attribute(
        self, view: _View, text: str, end: int, encoded: attribution.Encoded
    ) -> attribution.Ids | None:
        """The new message that each token of a text after ``end`` renders."""
        messages, tools, first, _ = view
        plain = self.renderer.without_mark
        whole, tail = plain(text), plain(text[end:])
        # spares a rendering where there are few messages
        spans = attribution.find_verbatim(messages[first:], tail) if first else None
        if spans is None:
            # the template may reject the marks
            with suppress(TemplateError):
                spans = attribution.locate_contents(
                    *(messages, first, whole, len(whole) - len(tail)),
                    lambda marked: plain(self.renderer.text(marked, tools)),
                )
        return None if spans is None else attribution.message_index(encoded, spans)


def _find_base(
    restored: RestoredRequest,
    nothing: CachedPath,
    replies: ReplyIndex,
    cache: TokenCache,
) -> tuple[int, CachedPath, Reason | None]:
    """How many messages are extended, their path, and why not all up to the last reply.

    ``nothing`` is a path without ids.
    """
    positions, indices = restored.positions, restored.replies
    last = next(indices, None)
    if last is None:
        return 0, nothing, "opening"
    reason: Reason | None = None
    path = cache.get(positions[last])
    if path is None:
        if restored.known[last] == "new":
            return 0, nothing, "unknown_reply"
        if replies.has_reply_at(positions[last - 1] if last else START):
            return 0, nothing, "released"
        # messages before it changed: extend the last reply before the change
        reason = "moved"
        last = next((i for i in indices if cache.get(positions[i])), last)
        path = cache.get(positions[last]) or nothing
    if not path.n_ids:
        return 0, nothing, reason or "unclosed"
    if path.rendered.tools != nothing.rendered.tools:
        return 0, nothing, reason or "tools"
    return last + 1, path, reason


def _n_characters(messages: list[Json]) -> int:
    return sum(len(text) for one in messages for text in texts_of(one["content"]))


def _hashed(before: blake2b, ids: attribution.Ids) -> blake2b:
    """The digest of ids, after those that were hashed before."""
    hasher = before.copy()
    hasher.update(ids.astype("<i4", copy=False).tobytes())
    return hasher
