"""Prompts: rendered, or built by appending to token ids consumed and sampled before.

``append`` keeps prompt and output ids of an earlier turn and appends only what the
template writes for the new messages. It is used only if it provably yields what the
template writes: the request's messages up to its last reply are those of a cached turn,
with the same tools, the reply ended by itself, and the template's text for the request
starts with its text for that turn (`prompting.rendered_prefix`). Other requests are
rendered, for a reason that is counted; of a changed history, the ids of the last turn
before the change are kept.
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from threading import Lock
from typing import Literal, TypeAlias

from trajkit_shim.chat.images import hashes_of
from trajkit_shim.errors import TemplateError
from trajkit_shim.json_input import Json
from trajkit_shim.prompting.attribution import (
    Encoded,
    Ids,
    find_verbatim,
    locate_contents,
    message_index,
)
from trajkit_shim.prompting.image_places import ImagePlaces
from trajkit_shim.prompting.render import ChatRenderer
from trajkit_shim.prompting.rendered_prefix import (
    Departure,
    RenderedPrefix,
    end_of_reply,
)
from trajkit_shim.prompting.reply_matching import START, ReplyIndex, RestoredRequest
from trajkit_shim.prompting.template_probe import (
    STAND_IN,
    STAND_IN_TOOL,
    TemplateProbe,
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

    ids: Ids
    reason: Reason | None  # why it does not extend the last reply; None: it does
    hasher: blake2b  # BLAKE2b of the ids as little-endian int32
    branch: Branch = field(default_factory=Branch)  # that the ids are in, if any
    base: CachedPath | None = None  # that turn
    n_known: int = 0  # how many of the messages have those tokens
    # of each appended id, the index of its message after the known ones; -1: no message.
    # None: unknown, or not requested
    message_index: Ids | None = None
    rendered: RenderedPrefix | None = None  # None: no later prompt may extend this one

    @property
    def built(self) -> Mode:
        """How."""
        return "append" if self.reason is None else "render"

    @property
    def n_base(self) -> int:
        """How many of the ids are those of the earlier turn."""
        return 0 if self.base is None else self.base.n_ids

    @property
    def digest(self) -> bytes:
        """A 16-byte digest of the ids."""
        return self.hasher.digest()


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
    ) -> Prompt:
        """Return the prompt for a request.

        ``replies`` and ``cache`` are the session's. ``attributed``: also determine which
        message each appended token belongs to. Raises as `ChatRenderer.text`, and
        `TooManyTokensError` if there are surely more than ``max_tokens``.
        """
        messages = restored.messages
        text: str | None = None
        offered = _tools_digest(tools)
        probe = self.probe(tools=tools is not None)
        safe = probe.safe and self.mode == "append"
        base: CachedPath | None = None
        reason: Reason | None = "template" if self.mode == "append" else "chosen"
        if safe:
            last, base, reason = _find_base(restored, offered, replies, cache)
        if base is not None:
            reply, *new = messages[last:]
            reasons = base.rendered.reasons or _reasons(messages[last:])
            failed: Departure | None = None
            tail_only = self._tail_only(probe, new, reasons=reasons)
            views = [(messages[:last], tools, base.rendered)]
            # the last complete comparison counts until the text has twice its length
            is_recent = base.rendered.length < 2 * base.rendered.checked
            if tail_only and is_recent and not self._check:
                few = None if tools is None else [STAND_IN_TOOL]
                views.insert(0, (STAND_IN, few, RenderedPrefix.of(probe.stand_in)))
            for head, shown_tools, before in views:
                shown, text = [*head, reply, *new], None
                # the template may reject the stand-in
                with suppress(TemplateError):
                    text = self.renderer.text(shown, shown_tools)
                if text is None:
                    continue
                end = end_of_reply(self.renderer, before, text, reply, new)
                if not isinstance(end, int):
                    failed = end
                    continue
                encoded = self._encode(text[end:], new, max_tokens)
                ids, branch = base.branch.extend(base.ids, encoded.ids)
                return Prompt(
                    ids=ids,
                    branch=branch,
                    reason=reason,
                    hasher=_hashed(encoded.ids, base.hasher),
                    base=base,
                    n_known=last + 1,
                    message_index=self._attribute(
                        text, shown, shown_tools, encoded, len(head) + 1, end
                    )
                    if attributed
                    else None,
                    rendered=base.rendered.extend(
                        text[before.length :],
                        probe.leaves,
                        checked=before is base.rendered,
                        reasons=reasons,
                    ),
                )
            if failed == "rewritten" and tail_only:
                # what was proven of short conversations is not true of this one
                probe.tail = False
            if failed == "rewritten" and probe.drops_reasoning and reasons:
                failed = "reasoning"
            reason = reason or failed
        if text is None:
            text = self.renderer.text(messages, tools)
        encoded, reasons = self._encode(text, messages, max_tokens), _reasons(messages)
        stays = RenderedPrefix.of(text, probe.leaves, offered, reasons=reasons)
        index = self._attribute(text, messages, tools, encoded) if attributed else None
        return Prompt(
            ids=encoded.ids,
            reason=reason,
            hasher=_hashed(encoded.ids),
            message_index=index,
            rendered=stays if safe else None,
        )

    def _encode(self, text: str, messages: list[Json], max_tokens: int) -> Encoded:
        encoded = self.renderer.encode(text, max_tokens)
        return self.places.expand(encoded, messages) if self.places else encoded

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
        self, prompt: Prompt, output_ids: Ids, position: bytes
    ) -> CachedPath | None:
        """Return prompt and output for later prompts to extend, or None if they cannot."""
        if prompt.rendered is None:
            return None
        # one that is not closed is recognized later, but not extended
        branch, n_ids = Branch(), 0
        if len(output_ids) and int(output_ids[-1]) in self.renderer.end_ids:
            ids, branch = prompt.branch.extend(prompt.ids, output_ids)
            n_ids = len(ids)
        return CachedPath(
            position=position,
            base=prompt.base,
            branch=branch,
            n_ids=n_ids,
            rendered=prompt.rendered,
            hasher=_hashed(output_ids, prompt.hasher),
        )

    def _attribute(
        self,
        text: str,
        messages: list[Json],
        tools: list[Json] | None,
        encoded: Encoded,
        first: int = 0,
        end: int = 0,
    ) -> Ids | None:
        """The message from ``first`` on that each token of a text after ``end`` renders."""
        plain = self.renderer.without_mark
        whole, tail = plain(text), plain(text[end:])
        # spares a rendering where there are few messages
        spans = find_verbatim(messages[first:], tail) if first else None
        if spans is None:
            # the template may reject the marks
            with suppress(TemplateError):
                spans = locate_contents(
                    *(messages, first, whole, len(whole) - len(tail)),
                    lambda named: plain(self.renderer.text(named, tools)),
                )
        return None if spans is None else message_index(encoded, spans)


def _find_base(
    restored: RestoredRequest, offered: bytes, replies: ReplyIndex, cache: TokenCache
) -> tuple[int, CachedPath | None, Reason | None]:
    """The index and path of the reply to extend, and why that is not the last one."""
    positions, indices = restored.positions, restored.replies
    last = next(indices, -1)
    if last < 0:
        return -1, None, "opening"
    reason: Reason | None = None
    path = cache.get(positions[last])
    if path is None:
        if restored.known[last] == "new":
            return last, None, "unknown_reply"
        if replies.has_reply_at(positions[last - 1] if last else START):
            return last, None, "released"
        # messages before it changed: extend the last reply before the change
        reason = "moved"
        last = next((i for i in indices if cache.get(positions[i])), last)
        path = cache.get(positions[last])
        if path is None:
            return last, None, reason
    if not path.n_ids:
        return last, None, reason or "unclosed"
    if path.rendered.tools != offered:
        return last, None, reason or "tools"
    return last, path, reason


def _reasons(messages: list[Json]) -> bool:
    return any(message.get("reasoning_content") for message in messages)


def _tools_digest(tools: list[Json] | None) -> bytes:
    # not sorted, because a template may render the fields in order
    return blake2b(json.dumps(tools).encode(), digest_size=16).digest()


def _hashed(ids: Ids, before: blake2b | None = None) -> blake2b:
    """The digest of ids, after those that were hashed before."""
    hasher = blake2b(digest_size=16) if before is None else before.copy()
    hasher.update(ids.astype("<i4", copy=False).tobytes())
    return hasher
