"""Prompts: rendered, or built by appending to token ids consumed and sampled before.

``append`` keeps prompt and output ids of an earlier turn, and adds what the template
writes after that reply. It is used if the request's messages up to a reply are those of
an earlier turn, with the same tools and variables, the reply ended by itself, and the
template's text between the replies is what it was (`prompting.skeleton`). Other requests
are rendered, for a reason that is counted; of a changed history, the ids of the last turn
before the change are kept.

Many templates leave out the reasoning of earlier replies. After tool results it stays as
it was sampled. At a user's message the template decides: if its text of the earlier turn
is no longer the start of its new text, the request is rendered. ``past`` changes both.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from threading import Lock
from typing import Literal, TypeAlias

import numpy as np

from trajkit_shim.chat.request import squeezed
from trajkit_shim.errors import TemplateError
from trajkit_shim.json_input import Json
from trajkit_shim.prompting import attribution
from trajkit_shim.prompting.attribution import Ids
from trajkit_shim.prompting.conversation import Node, RestoredRequest
from trajkit_shim.prompting.image_places import ImagePlaces
from trajkit_shim.prompting.render import ChatRenderer
from trajkit_shim.prompting.skeleton import (
    Between,
    Departure,
    Skeleton,
    probe_template,
    role_of,
)
from trajkit_shim.prompting.tokenize_cache import NO_LIMIT

Mode: TypeAlias = Literal["append", "render"]
"""How prompts are built where possible."""

Past: TypeAlias = Literal["auto", "sampled", "template"]
"""Whether replies stay as sampled where the template would rewrite them: after tool
results, but not at a user's message (``auto``); always; or never."""

Reason: TypeAlias = (
    Literal["chosen", "opening", "unknown_reply", "moved", "released", "tools"]
    | Literal["unclosed", "template", "end_token"]
    | Departure
)
"""Why a prompt does not extend the last reply (docs/serving.md has a table)."""

# sets of variables whose probe is kept; clients choose them
_KEPT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The ids for one request, and how they were built."""

    ids: Ids
    reason: Reason | None  # why it does not extend the last reply; None: it does
    base: Node | None  # the turn whose ids are its first, if any
    n_base: int  # of its first ids, those of that turn
    n_known: int  # how many of the messages have those tokens
    # of each appended id, the index of its message after the known ones; -1: no message.
    # None: unknown, or not requested
    message_index: Ids | None
    # the template's text between the replies; None: no later prompt may extend this one
    between: bytes | None
    offered: bytes  # digest of tools and variables

    @property
    def built(self) -> Mode:
        """How."""
        return "append" if self.reason in (None, "end_token") else "render"

    @property
    def digest(self) -> bytes:
        """BLAKE2b (16 bytes) of the ids as little-endian int32."""
        ids = self.ids.astype("<i4", copy=False).tobytes()
        return blake2b(ids, digest_size=16).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """What a template is given besides messages."""

    tools: list[Json] | None
    variables: Mapping[str, object]
    digest: bytes
    skeleton: Skeleton


class Prompts:
    """Builds prompts with one renderer. Safe to use from several threads at once."""

    def __init__(
        self,
        renderer: ChatRenderer,
        mode: Mode = "append",
        places: ImagePlaces | None = None,
        *,
        past: Past = "auto",
    ) -> None:
        self.renderer = renderer
        self.mode = mode
        self.past = past
        self.places = places  # None: no message has an image
        self._probes: OrderedDict[str, Skeleton] = OrderedDict()
        self._lock = Lock()

    def skeleton(
        self, variables: Mapping[str, object] | None = None, *, tools: bool
    ) -> Skeleton:
        """Return what the template does around replies; tried out once."""
        given = variables or {}
        key = json.dumps([tools, given], sort_keys=True)
        with self._lock:
            if key not in self._probes:
                self._probes[key] = probe_template(self.renderer, given, tools=tools)
            self._probes.move_to_end(key)
            while len(self._probes) > _KEPT:
                self._probes.popitem(last=False)
            return self._probes[key]

    def describe(self) -> Json:
        """Return how prompts are built and what the template does, as JSON."""
        return {
            "mode": self.mode,
            "past_reasoning": self.past,
            "end_tokens": sorted(self.renderer.end_tokens),
            "template_variables": sorted(self.renderer.variables),
            "late_system": "template"
            if self.renderer.takes_late_system
            else self.renderer.late_system,
            "template": {
                "with_tools": self.skeleton(tools=True).describe(),
                "without_tools": self.skeleton(tools=False).describe(),
            },
        }

    def summary(self) -> str:
        """Return the same in one line."""
        if self.mode == "render":
            return "render"
        parts = ["append"]
        for when, tools in (("with", True), ("without", False)):
            extends = self.skeleton(tools=tools).extends
            parts += [
                f"rendered at a {role} message {when} tools: {why}"
                for role, why in extends.items()
                if why and (tools or role == "user")
            ]
        if not self.renderer.takes_late_system:
            late = {"user": "shown as reminders by the user", "refuse": "refused"}
            parts.append(
                f"late system messages are {late[self.renderer.late_system]} "
                "(--late-system)"
            )
        return "; ".join(parts)

    def build(
        self,
        restored: RestoredRequest,
        tools: list[Json] | None,
        variables: Mapping[str, object] | None = None,
        *,
        attributed: bool,
        max_tokens: int = NO_LIMIT,
    ) -> Prompt:
        """Return the prompt for a request.

        ``attributed``: also determine which message each appended token belongs to.
        Raises as `ChatRenderer.text`, and `EngineError` if there are surely more than
        ``max_tokens``.
        """
        given = dict(variables or {})
        # not sorted, because a template may render the fields in order
        digest = blake2b(json.dumps([tools, given]).encode(), digest_size=16).digest()
        skeleton = self.skeleton(given, tools=tools is not None)
        offer = _Offer(tools=tools, variables=given, digest=digest, skeleton=skeleton)
        if self.mode == "render":
            return self._render(restored, offer, "chosen", attributed, max_tokens)
        n_known, base, reason = _find_base(restored, offer.digest)
        if base is not None:
            found = self._appended(restored, offer, n_known, base)
            if isinstance(found, Between):
                return self._append(
                    *(restored, offer, n_known, base, reason),
                    *(found, attributed, max_tokens),
                )
            reason = reason or found
        return self._render(
            restored, offer, reason or "template", attributed, max_tokens
        )

    def _appended(
        self, restored: RestoredRequest, offer: _Offer, n_known: int, base: Node
    ) -> "Between | Reason":
        """What the template writes after the reply of a turn, or why it may not be used."""
        messages, new = restored.messages, restored.messages[n_known:]
        skeleton = offer.skeleton
        roles = {role_of(message) for message in new} or {"user"}
        if base.between is None or any(skeleton.extends[role] for role in roles):
            return "template"
        sampled = restored.sampled
        opaque = [i for i in sampled if i < n_known]
        found = skeleton.between(
            *(messages, offer.tools, offer.variables, opaque, sampled)
        )
        if isinstance(found, str):
            return found
        if found.before != base.between:
            return "rewritten"
        by_template = self.past == "template" or (
            self.past == "auto" and "user" in roles
        )
        if by_template:
            changed = self._rewritten(restored, offer, n_known)
            if changed is not None:
                return changed
        return found

    def _rewritten(
        self, restored: RestoredRequest, offer: _Offer, n_known: int
    ) -> "Departure | None":
        """How the template's own text of an earlier turn changed, if it did."""
        messages, sampled = restored.messages, restored.sampled
        reply = messages[n_known - 1]
        thoughts = [str(m.get("reasoning_content") or "") for m in messages[:n_known]]
        changed: Departure = "reasoning" if any(thoughts) else "rewritten"
        text = self.renderer.text
        before = text(
            messages[: n_known - 1], offer.tools, offer.variables, sampled=sampled
        )
        after = text(messages, offer.tools, offer.variables, sampled=sampled)
        thought = squeezed(reply.get("reasoning_content") or "")
        if thought:
            # the reply shows what the generation prompt opened, in other words maybe
            leaves = offer.skeleton.leaves_after(messages[n_known - 2])
            before = before.removesuffix(leaves)
        if not after.startswith(before):
            return changed
        shown = squeezed(self.renderer.without_mark(after[len(before) :]))
        return None if thought in shown else "reasoning"

    def _append(
        self,
        restored: RestoredRequest,
        offer: _Offer,
        n_known: int,
        base: Node,
        reason: Reason | None,
        found: Between,
        attributed: bool,
        max_tokens: int,
    ) -> Prompt:
        messages, skeleton = restored.messages, offer.skeleton
        start, ids = found.start, base.ids
        kept: Node | None = base
        assert ids is not None
        ended = self.renderer.token_of(int(ids[-1]))
        if skeleton.opens_next and found.end != ended:
            # the reply stopped at the start of a message of another role
            start, ids, kept = found.end_at, ids[:-1], None
            reason = reason or "end_token"
        encoded = self.renderer.encode(found.text[start:], max_tokens)
        if self.places is not None:
            encoded = self.places.expand(encoded, messages[n_known:])
        # replies that were recognized at another position are written out here
        between: bytes | None = found.digest
        if any(i >= n_known for i in restored.sampled):
            between = self._between(restored, offer)
        index = None
        if attributed:
            opaque = [i for i in restored.sampled if i < n_known]

            def marked(changed: list[Json]) -> str:
                found = skeleton.between(
                    *(changed, offer.tools, offer.variables, opaque, restored.sampled)
                )
                return found if isinstance(found, str) else found.text

            index = self._attribute(
                messages, n_known, found.text, start, encoded, marked
            )
        return Prompt(
            ids=np.concatenate([ids, encoded.ids]),
            reason=reason,
            base=kept,
            n_base=len(ids),
            n_known=n_known,
            message_index=index,
            between=between,
            offered=offer.digest,
        )

    def _render(
        self,
        restored: RestoredRequest,
        offer: _Offer,
        reason: Reason,
        attributed: bool,
        max_tokens: int,
    ) -> Prompt:
        messages, sampled = restored.messages, restored.sampled

        def text_of(changed: list[Json]) -> str:
            return self.renderer.text(
                changed, offer.tools, offer.variables, sampled=sampled
            )

        text = text_of(messages)
        encoded = self.renderer.encode(text, max_tokens)
        if self.places is not None:
            encoded = self.places.expand(encoded, messages)
        index = None
        if attributed:
            index = self._attribute(messages, 0, text, 0, encoded, text_of)
        return Prompt(
            ids=encoded.ids,
            reason=reason,
            base=None,
            n_base=0,
            n_known=0,
            message_index=index,
            between=None if self.mode == "render" else self._between(restored, offer),
            offered=offer.digest,
        )

    def _between(self, restored: RestoredRequest, offer: _Offer) -> bytes | None:
        """The digest of the text between all replies, if they can be told apart."""
        replies = restored.sampled
        with suppress(TemplateError):
            found = offer.skeleton.between(
                *(restored.messages, offer.tools, offer.variables, replies, replies)
            )
            return found.digest if isinstance(found, Between) else None
        return None

    def _attribute(
        self,
        messages: list[Json],
        first: int,
        text: str,
        start: int,
        encoded: attribution.Encoded,
        text_of: attribution.TextOf,
    ) -> Ids | None:
        """The new message that each token of a text after ``start`` renders."""
        plain = self.renderer.without_mark
        whole, tail = plain(text), plain(text[start:])
        # spares a rendering where there are few messages
        spans = attribution.find_verbatim(messages[first:], tail) if first else None
        if spans is None:
            # the template may reject the marks
            with suppress(TemplateError):
                spans = attribution.locate_contents(
                    *(messages, first, whole, len(whole) - len(tail)),
                    lambda marked: plain(text_of(marked)),
                )
        return None if spans is None else attribution.message_index(encoded, spans)


def _find_base(
    restored: RestoredRequest, offered: bytes
) -> tuple[int, Node | None, Reason | None]:
    """How many messages are extended, their turn, and why not all up to the last reply."""
    last = next(restored.replies, None)
    if last is None:
        return 0, None, "opening"
    reason: Reason | None = None
    if restored.nodes[last] is None:
        # if messages before it changed, the last reply before the change is extended
        reason = "unknown_reply" if restored.known[last] == "new" else "moved"
        last = next((i for i in restored.replies if restored.nodes[i]), last)
    node = restored.nodes[last]
    if node is None:
        return 0, None, reason
    if not node.closed:
        return 0, None, reason or "unclosed"
    if node.ids is None:
        return 0, None, reason or "released"
    if node.offered != offered:
        return 0, None, reason or "tools"
    return last + 1, node, reason
