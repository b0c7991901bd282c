"""Prompts: rendered, or built by appending to token ids consumed and sampled before.

How a prompt is built:

1. The session's conversation restores the request's replies (`prompting.conversation`).
2. The base is the last reply that was sampled at this very position, with the same tools
   and variables, if it ended by itself and its ids are in memory.
3. The template has to be one that may be extended for the roles of what follows the base
   (`prompting.skeleton` tries it out).
4. The messages are rendered, with a stand-in for each reply up to the base.
5. The text between the replies before the base has to be what it was, by its digest.
6. At a user's message the template decides: if its own text of the base's turn is no longer
   the start of its new text, as where it leaves out reasoning, nothing is extended. After
   tool results replies stay as they were sampled. ``past`` changes both.
7. The prompt is the ids of the base's turn, and those of the text after the base.
8. Without a base, or where one of this does not hold, all messages are rendered, for a
   reason that is counted. Of a changed history the last turn before the change is the base.
9. The digest of the text between all replies goes with the prompt, for the next one.
10. Each new token gets the message that it shows, if that can be told exactly.
"""

import json
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from threading import Lock
from typing import Literal, TypeAlias

import numpy as np

from trajkit_shim.chat.request import squeezed
from trajkit_shim.errors import TemplateError
from trajkit_shim.json_input import Json
from trajkit_shim.prompting.conversation import Node, RestoredRequest
from trajkit_shim.prompting.image_places import ImagePlaces
from trajkit_shim.prompting.render import NO_LIMIT, ChatRenderer, Encoded, Ids
from trajkit_shim.prompting.skeleton import Between, Departure, Skeleton, role_of

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
"""Why a prompt does not extend the last reply (docs/engines.md has a table)."""

_CHOSEN: Reason | None = "chosen"
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


Spans: TypeAlias = list[tuple[int, int, int]]
"""(message, start, stop) of each content in a text."""


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
                self._probes[key] = Skeleton(self.renderer, given, tools=tools)
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
        given, messages = dict(variables or {}), restored.messages
        # not sorted, because a template may render the fields in order
        digest = blake2b(json.dumps([tools, given]).encode(), digest_size=16).digest()
        skeleton = self.skeleton(given, tools=tools is not None)
        call = _Call(restored, tools, skeleton, self.past)
        found: tuple[str, Between] | Reason | None = None
        n_known, base, reason = 0, None, _CHOSEN
        if self.mode == "append":
            n_known, base, reason = _find_base(restored, digest)
        if base is not None:
            found = call.extension(base, n_known)
            reason = reason or (None if isinstance(found, tuple) else found)
        if base is not None and isinstance(found, tuple):
            opaque, (text, between) = call.opaque(n_known), found
            assert base.ids is not None
            ids, start = base.ids, between.start
            ended = self.renderer.text_of_id.get(int(ids[-1]))
            if skeleton.opens_next and between.end != ended:
                # the reply stopped at the start of a message of another role
                ids, start, base = ids[:-1], between.end_at, None
                reason = reason or "end_token"
        else:
            ids, text, start, opaque = np.empty(0, np.int32), call.text(messages), 0, []
            n_known, base = 0, None
        encoded = self.renderer.encode(text[start:], max_tokens)
        if self.places is not None:
            encoded = self.places.expand(encoded, messages[n_known:])
        index = None
        if attributed:
            index = _attribute(
                *(self.renderer.without_mark, messages, n_known, text, start, encoded),
                lambda marked: call.text(marked, opaque),
            )
        last = None
        if self.mode == "append":
            # replies that were recognized at another position are written out here
            same = isinstance(found, tuple) and opaque == restored.sampled
            last = between.digest if same else call.digest()
        return Prompt(
            ids=np.concatenate([ids, encoded.ids]),
            reason=reason,
            base=base,
            n_base=len(ids),
            n_known=n_known,
            message_index=index,
            between=last,
            offered=digest,
        )


@dataclass(frozen=True, slots=True)
class _Call:
    """One request on its way to a prompt."""

    restored: RestoredRequest
    tools: list[Json] | None
    skeleton: Skeleton
    past: Past

    def text(self, messages: Sequence[Json], opaque: Collection[int] = ()) -> str:
        """The template's text, with stand-ins for the replies at some indices."""
        return self.skeleton.text(messages, self.tools, opaque, self.restored.sampled)

    def opaque(self, n_known: int) -> list[int]:
        """The replies among the first messages."""
        return [i for i in self.restored.sampled if i < n_known]

    def digest(self) -> bytes | None:
        """The digest of the text between all replies, if they can be told apart."""
        messages, replies = self.restored.messages, self.restored.sampled
        with suppress(TemplateError):
            text = self.text(messages, replies)
            found = self.skeleton.between(text, messages, replies)
            return found.digest if isinstance(found, Between) else None
        return None

    def extension(self, base: Node, n_known: int) -> tuple[str, Between] | Reason:
        """The text with stand-ins up to a base, or why it may not be extended."""
        messages, extends = self.restored.messages, self.skeleton.extends
        roles = {role_of(message) for message in messages[n_known:]} or {"user"}
        if base.between is None or any(extends[role] for role in roles):
            return "template"
        opaque = self.opaque(n_known)
        text = self.text(messages, opaque)
        found = self.skeleton.between(text, messages, opaque)
        if isinstance(found, str):
            return found
        if found.before != base.between:
            return "rewritten"
        changed = None
        if self.past == "template" or (self.past == "auto" and "user" in roles):
            changed = self._rewritten(n_known)
        return changed or (text, found)

    def _rewritten(self, n_known: int) -> Departure | None:
        """How the template's own text of a base's turn changed, if it did."""
        messages = self.restored.messages
        thoughts = [m.get("reasoning_content") or "" for m in messages[:n_known]]
        changed: Departure = "reasoning" if any(thoughts) else "rewritten"
        before, after = self.text(messages[: n_known - 1]), self.text(messages)
        thought = squeezed(thoughts[-1])
        if thought:
            # the reply shows what the generation prompt opened, in other words maybe
            leaves = self.skeleton.leaves_after(messages[n_known - 2])
            before = before.removesuffix(leaves)
        if not after.startswith(before):
            return changed
        shown = self.skeleton.renderer.without_mark(after[len(before) :])
        return None if thought in squeezed(shown) else "reasoning"


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


def _attribute(
    plain: Callable[[str], str],
    messages: list[Json],
    first: int,
    text: str,
    start: int,
    encoded: Encoded,
    text_of: Callable[[list[Json]], str],
) -> Ids | None:
    """The message, from ``first`` on, that each token of a text after ``start`` shows.

    The messages are rendered again with a mark before and after each content. If removing
    the marks yields the same text, they give the position of each content, and the
    tokenizer's offsets its tokens. -1: a token of no message. None: it cannot be told.
    """
    whole, tail = plain(text), plain(text[start:])
    # spares a rendering where there are few messages
    spans = _find_verbatim(messages[first:], tail) if first else None
    for inside_space in (False, True) if spans is None else ():
        name = f"x{secrets.token_hex(12)}"
        marked = [
            _marked(message, f"{name}{i};", inside_space)
            for i, message in enumerate(messages[first:])
        ]
        # the template may reject the marks
        with suppress(TemplateError):
            shown = plain(text_of([*messages[:first], *marked]))
            clean, found = _without_marks(shown, name)
            if clean == whole and found is not None:
                n = len(whole) - len(tail)
                spans = [(i, begin - n, end - n) for i, begin, end in found]
                break
    if spans is None:
        return None
    index = np.full(len(encoded.ids), -1, np.int32)
    owners, starts, stops = np.array(spans, np.int64).reshape(-1, 3).T
    # offsets ascend, but the tokens of one character have equal offsets
    firsts = np.searchsorted(encoded.offsets[:, 0], starts)
    lasts = np.searchsorted(encoded.offsets[:, 1], stops, side="right")
    for i, begin, end in zip(owners, firsts, lasts, strict=True):
        index[begin:end] = i
    return index


def _has_text(message: Json) -> bool:
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip())


def _marked(message: Json, mark: str, inside_space: bool) -> Json:
    """The message with a mark on both sides of its content, or within white space there."""
    if not _has_text(message):
        return message
    content = str(message["content"])
    before = after = ""
    if inside_space:
        core = content.strip()
        before, _, after = content.partition(core)
        content = core
    return {**message, "content": f"{before}{mark}{content}{mark}{after}"}


def _find_verbatim(messages: list[Json], text: str) -> Spans | None:
    """Return the span of each content in a text that has each once, in order, or None.

    A template may change outer white space, so contents with it are not looked for.
    """
    spans, offset = [], 0
    for i, message in enumerate(messages):
        if not _has_text(message):
            continue
        content = str(message["content"])
        start = text.find(content)
        unsure = content != content.strip() or text.find(content, start + 1) >= 0
        if start < offset or unsure:
            return None
        offset = start + len(content)
        spans.append((i, start, offset))
    return spans


def _without_marks(text: str, name: str) -> tuple[str, Spans | None]:
    """Return the text and the span of each content; None: broken marks."""
    clean, *rest = re.split(name + r"(\d+);", text)
    spans: Spans = []
    if len(rest) % 4:
        return text, None
    fields = (rest[i::4] for i in range(4))
    for opened, content, closed, after in zip(*fields, strict=True):
        if opened != closed:
            return text, None
        spans.append((int(opened), len(clean), len(clean) + len(content)))
        clean += content + after
    return clean, None if name in clean else spans
