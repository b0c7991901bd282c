"""Prompts: rendered, or built by appending to token ids consumed and sampled before.

To extend the ids of an earlier turn, the template's text between the replies has to stay
as it was; how the template would spell a reply does not matter, because what was sampled
is kept. So a conversation is rendered with a stand-in for each sampled reply. Whether the
text after a reply depends on the reply is tried out once for each set of template
variables (`Skeleton`): short conversations with different replies have to give the same
text, for each role of the next message. How a prompt is built:

1. The session's conversation restores the request's replies (`prompting.conversation`).
2. The base is the last reply that was sampled at this very position, with the same tools
   and variables, if it ended by itself and its ids are in memory.
3. The template has to be one that may be extended for the roles of what follows the base.
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from os.path import commonprefix
from threading import Lock
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from trajkit.turns import tools_key
from trajkit_shim.chat import request as chat
from trajkit_shim.chat.images import ImagePlaces
from trajkit_shim.errors import TemplateError
from trajkit_shim.json_input import Json
from trajkit_shim.prompting.conversation import Node, RestoredRequest
from trajkit_shim.prompting.render import NO_LIMIT, ChatRenderer, Encoded, Ids

Mode: TypeAlias = Literal["append", "render"]
"""How prompts are built where possible."""

Past: TypeAlias = Literal["auto", "sampled", "template"]
"""Whether replies stay as sampled where the template would rewrite them: after tool
results, but not at a user's message (``auto``); always; or never."""

Role: TypeAlias = Literal["user", "tool"]
"""Of the message before or after a reply. System messages count as a user's."""

Departure: TypeAlias = Literal["rewritten", "reasoning", "unended", "hidden"]
"""Why a prompt does not extend a turn: earlier text was rewritten, the reasoning of
earlier replies is left out, no token ends a reply, or a reply is not shown."""

Reason: TypeAlias = (
    Literal["chosen", "opening", "unknown_reply", "moved", "released", "tools"]
    | Literal["unclosed", "template", "end_token"]
    | Departure
)
"""Why a prompt does not extend the last reply (docs/engines.md has a table)."""

# sets of variables whose probe is kept; clients choose them
_KEPT = 64
# about what objects of JSON take, for each character that spells them
_BYTES_PER_CHARACTER = 12
_USER: Json = {"role": "user", "content": "questionword"}
_RESULT = chat.tool_message("call00000", ["outcomeword"])
_NEXT: Mapping[Role, Json] = {"user": _USER, "tool": _RESULT}
_TOOL = chat.function_tool("probe", "probe", {"type": "object", "properties": {}})
_digest = partial(blake2b, digest_size=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The ids for one request, and how they were built."""

    ids: Ids
    reason: Reason | None  # why it does not extend the last reply; None: it does
    base: Node | None  # the turn whose ids are its first, if any
    n_base: int  # of its first ids, those of that turn
    n_known: int  # number of messages whose tokens come from `base`
    # of each appended id, the index of its message after the known ones; -1: no message.
    # None: unknown, or not requested
    message_index: Ids | None
    # the template's text between the replies; None: no later prompt may extend this one
    between: bytes | None
    offered: bytes  # digest of tools and variables
    hasher: Any  # BLAKE2b (16 bytes) of the ids as little-endian int32

    @property
    def built(self) -> Mode:
        """How."""
        return "append" if self.reason in (None, "end_token") else "render"


def hashed(ids: Ids, before: Any = None) -> Any:
    """Return the BLAKE2b of ids; ``before``: of those before them."""
    hasher = _digest() if before is None else before.copy()
    hasher.update(ids.astype("<i4", copy=False).tobytes())
    return hasher


class Between(NamedTuple):
    """What a text has between the replies that it has stand-ins for."""

    skeleton: "Skeleton"
    head: str  # the text up to the end of the last of them
    end_at: int  # of the control token that ends it, and the head
    positions: list[str]
    hasher: Any  # of what the head has between them
    digest: bytes  # of that and what follows


class Offered(NamedTuple):
    """The tools and the template's variables of a request."""

    digest: bytes
    tools: list[Json] | None  # as the template takes them
    variables: Json
    key: str  # `trajkit.turns.tools_key`
    n_bytes: int  # about what they take


class Skeleton:
    """What one template does, with or without tools, under some variables.

    ``extends``: the roles of a next message; why prompts may not be extended then, or
    None. ``leaves``, by the role of the message before a reply: the end of the generation
    prompt that disappears once there is a reply. ``opens_next``: the token that ends a
    reply is the next message's own, so it depends on its role.
    """

    def __init__(
        self, renderer: ChatRenderer, variables: Mapping[str, object], *, tools: bool
    ) -> None:
        self._control = renderer.control
        offered = [_TOOL] if tools else None

        def text(*messages: Json) -> str | None:
            with suppress(TemplateError):
                return renderer.text(messages, offered, variables)
            return None

        # the text right before a reply, and what disappears of it
        self.stays: dict[Role, str] = {}
        self.leaves: dict[Role, str] = {}
        moved: set[Role] = set()
        heads: dict[Role, list[Json]] = {"user": [_USER]}
        heads["tool"] = [_USER, _reply("firstword", calls=True), _RESULT]
        for role, head in heads.items():
            opening, word = text(*head), str(_NEXT[role]["content"])
            if opening is None:
                continue
            # what follows the last message, up to the reply
            common = rest = opening[opening.rfind(word) + len(word) :]
            for reply, role_after in _steps():
                later = text(*head, reply, _NEXT[role_after])
                if later is None:
                    continue
                at = later.find(word) + len(word)
                common = commonprefix([common, later[at:]])  # noqa: RUF071
                if role == "user" and later[:at] != opening[:at]:
                    # what was before the reply is elsewhere, such as tools that move on
                    moved.add(role_after)
            self.stays[role], self.leaves[role] = common, rest[len(common) :]
        # tokens that end a reply in the template's text
        self._closers, self.opens_next = set(renderer.end_tokens), False
        later = text(_USER, _reply("closingword"), _USER)
        if later is not None and "closingword" in later:
            after = later.rpartition("closingword")[2].rpartition(str(_USER["content"]))
            controls = renderer.control.findall(after[0])
            if not self._closers.intersection(controls):
                special = [*filter(renderer.special.fullmatch, controls)]
                self._closers.update(special[:1])
            self.opens_next = len(controls) == 1 and controls[0] in renderer.end_tokens
        why = "a later message moves what was before the reply"
        self.extends: dict[Role, str | None] = {
            role: why if role in moved else self._differs(text, role) for role in _NEXT
        }

    def _differs(
        self, text_of: Callable[..., str | None], role_after: Role
    ) -> str | None:
        """Why the text after a reply depends on the reply, or None if it does not."""
        tails = set[str]()
        for reply, role in _steps():
            text = text_of(_USER, reply, _NEXT[role]) if role == role_after else None
            if text is None:
                continue
            # the last word of the reply
            word = "betaword" if "tool_calls" in reply else "alphaword"
            at = text.rfind(word)
            found = self.closer(text, at + len(word)) if at >= 0 else None
            if found is None:
                return "no token ends a reply" if at >= 0 else "a reply is not shown"
            tails.add(text[found[1] :])
        if not tails:
            return "the template rejects what follows a reply"
        if len(tails) > 1:
            return "the text after a reply depends on the reply"
        shown = str(_NEXT[role_after]["content"]) in tails.pop()
        return None if shown else "a new message is not shown after it"

    def closer(self, text: str, start: int) -> tuple[int, int] | None:
        """Return where the next token is that ends a reply."""
        for found in self._control.finditer(text, start):
            if found[0] in self._closers:
                return found.span()
        return None

    def describe(self) -> Json:
        """Return what was found out, as JSON."""
        return {
            "extends": {role: why is None for role, why in self.extends.items()},
            "why_not": {role: why for role, why in self.extends.items() if why},
            "leaves": dict(self.leaves),
        }


def _steps() -> Iterator[tuple[Json, Role]]:
    """Replies of several kinds and lengths, and the role of what follows them."""
    for text, thought in (("alphaword", ""), ("a longer alphaword", "thoughtword")):
        yield _reply(text, thought), "user"
        for content in ("", text):
            yield _reply(content, thought, calls=True), "tool"


def _reply(content: str, thought: str = "", *, calls: bool = False) -> Json:
    call = chat.tool_call("call00000", "probe", '{"reply": "betaword"}')
    return chat.assistant_message(content, thought, [call] if calls else [])


class Prompts:
    """Builds prompts with one renderer. Safe to use from several threads at once.

    ``places``: None if no message has an image.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        mode: Mode = "append",
        places: ImagePlaces | None = None,
        *,
        past: Past = "auto",
    ) -> None:
        self.renderer, self.mode, self.places, self.past = renderer, mode, places, past
        # begins a stand-in; unpredictable for clients
        self.word = f"reply{secrets.token_hex(8)}"
        # likewise, around the content of a message
        self.mark = f"x{secrets.token_hex(12)}"
        self.words_of = re.compile(f"{self.word}([0-9a-f]+);").finditer
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
        renderer = self.renderer
        late = "template" if renderer.takes_late_system else renderer.late_system
        return {
            "mode": self.mode,
            "past_reasoning": self.past,
            "end_tokens": sorted(renderer.end_tokens),
            "template_variables": sorted(renderer.variables),
            "late_system": late,
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
            parts += [
                f"rendered at a {role} message {when} tools: {why}"
                for role, why in self.skeleton(tools=tools).extends.items()
                if why and (tools or role == "user")
            ]
        if not self.renderer.takes_late_system:
            late = {"user": "shown as reminders by the user", "refuse": "refused"}
            how = late[self.renderer.late_system]
            parts.append(f"late system messages are {how} (--late-system)")
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
        Raises as `ChatRenderer.render`, and `EngineError` if there are surely more than
        ``max_tokens``.
        """
        given = dict(variables or {})
        # not sorted, because a template may render the fields in order
        spelled = json.dumps([tools, given]).encode()
        digest = _digest(spelled).digest()
        if restored.offered is None or restored.offered.digest != digest:
            as_text, key = self.renderer.as_text, tools_key(tools or [])
            size = _BYTES_PER_CHARACTER * len(spelled)
            texts = as_text(tools), as_text(given)
            restored.offered = Offered(digest, *texts, key, size)
        call = _Call(self, restored, self.skeleton(given, tools=tools is not None))
        n_known, base, reason = 0, None, _CHOSEN
        found: tuple[str, Between] | Reason | None = None
        if self.mode == "append":
            n_known, base, reason = _find_base(restored, digest)
        # another session's turn may release them meanwhile
        base_ids = None if base is None else base.ids
        if base_ids is None and base is not None:
            n_known, base, reason = 0, None, reason or "released"
        opaque = [i for i in restored.sampled if i < n_known]
        if base is not None:
            found = call.extension(base, n_known, opaque)
            reason = reason or (None if isinstance(found, tuple) else found)
        hasher = None
        if base is not None and isinstance(found, tuple):
            assert base_ids is not None
            text, between = found
            ids, start, hasher = base_ids, len(between.head), base.hasher
            ended = self.renderer.text_of_id.get(int(ids[-1]))
            if call.skeleton.opens_next and between.head[between.end_at :] != ended:
                # the reply stopped at the start of a message of another role
                ids, start, base, hasher = ids[:-1], between.end_at, None, None
                reason = reason or "end_token"
        else:
            ids, text, start, opaque = np.empty(0, np.int32), call.text(), 0, []
            restored.plain = digest, restored.position, text
            n_known, base = 0, None
        encoded = self.renderer.encode(text[start:], max_tokens)
        if self.places is not None:
            shown = restored.messages[n_known:]
            placed = self.places.expand(encoded.ids, encoded.offsets, shown)
            encoded = Encoded(*placed)
        index = last = None
        if attributed:
            index = call.attribute(n_known, text, start, encoded, opaque)
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
            hasher=hashed(encoded.ids, hasher or hashed(ids)),
        )


_CHOSEN: Reason | None = "chosen"


def _find_base(
    restored: RestoredRequest, offered: bytes
) -> tuple[int, Node | None, Reason | None]:
    """How many messages are extended, their turn, and why not all up to the last reply."""
    places, last = restored.places, next(restored.replies, None)
    if last is None:
        return 0, None, "opening"
    reason: Reason | None = None
    if places[last].node is None:
        # if messages before it changed, the last reply before the change is extended
        reason = "unknown_reply" if places[last].known == "new" else "moved"
        last = next((i for i in restored.replies if places[i].node), last)
    node = places[last].node
    if node is None:
        return 0, None, reason
    if not node.closed:
        return 0, None, reason or "unclosed"
    if node.ids is None:
        return 0, None, reason or "released"
    if node.offered != offered:
        return 0, None, reason or "tools"
    return last + 1, node, reason


class _Call:
    """One request on its way to a prompt."""

    def __init__(
        self, prompts: Prompts, restored: RestoredRequest, skeleton: Skeleton
    ) -> None:
        self.prompts, self.renderer = prompts, prompts.renderer
        self.restored, self.places = restored, restored.places
        self.skeleton = skeleton
        _, tools, variables, *_ = restored.offered
        self._render = partial(self.renderer.render, tools=tools, variables=variables)

    def text(self, stop: int | None = None, opaque: Collection[int] = ()) -> str:
        """The template's text of the first messages, with stand-ins for some replies."""
        hidden = {*opaque}
        places = enumerate(self.places[:stop])
        return self._render([self._form(i, hidden=i in hidden) for i, _ in places])

    def _form(self, index: int, *, hidden: bool) -> Json:
        """A message as the template takes it, or a stand-in; made once for its place."""
        place, kind = self.places[index], "hidden" if hidden else "shown"
        form: Json | None = place.forms.get(kind)
        if form is None:
            message, sampled = place.message, place.known not in (None, "new")
            if hidden:
                word = f"{self.prompts.word}{place.position.hex()};"
                message = _stand_in(message, word)
            form = self.renderer.shape(message, sampled=sampled)
            place.forms[kind] = form
        return form

    def between(self, text: str, opaque: Sequence[int]) -> Between | Departure:
        """Find what a text has between the stand-ins, which ascend."""
        skeleton = self.skeleton
        positions = [self.places[i].position.hex() for i in opaque]
        nothing = Between(skeleton, "", 0, [], _digest(), b"")
        known: Between = self.restored.rendered or nothing
        if not (
            known.skeleton is skeleton
            and known.positions == positions[: len(known.positions)]
            and text.startswith(known.head)
        ):
            known = nothing
        words = self._words(text, len(known.head))
        if not words.keys().isdisjoint(known.positions):
            # an earlier reply is shown again
            known, words = nothing, self._words(text)
        hasher, end_at, start = known.hasher.copy(), known.end_at, len(known.head)
        for i in opaque[len(known.positions) :]:
            first, last = words.get(self.places[i].position.hex(), (-1, -1))
            if first < start:
                return "hidden"
            stays = skeleton.stays.get(self._role(i - 1) if i else "user", "")
            begin = text.rfind(stays, start, first) if stays else -1
            begin = begin + len(stays) if begin >= 0 else first
            hasher.update(text[start:begin].encode())
            closer = skeleton.closer(text, last)
            if closer is None:
                return "unended"
            end_at, start = closer
        whole = hasher.copy()
        leaves = skeleton.leaves.get(self._role(-1), "")
        whole.update(text[start:].removesuffix(leaves).encode())
        head, digest = text[:start], whole.digest()
        found = Between(skeleton, head, end_at, positions, hasher, digest)
        self.restored.rendered = found
        return found

    def _words(self, text: str, start: int = 0) -> dict[str, tuple[int, int]]:
        """Where the stand-in of each position begins first, and ends last."""
        words: dict[str, tuple[int, int]] = {}
        for found in self.prompts.words_of(text, start):
            first, _ = words.get(found[1], found.span())
            words[found[1]] = first, found.end()
        return words

    def _role(self, index: int) -> Role:
        """The role that counts for the text around the message at an index."""
        return "tool" if self.places[index].message["role"] == "tool" else "user"

    def digest(self) -> bytes | None:
        """The digest of the text between all replies, if they can be told apart."""
        with suppress(TemplateError):
            sampled = self.restored.sampled
            found = self.between(self.text(opaque=sampled), sampled)
            return found.digest if isinstance(found, Between) else None
        return None

    def extension(
        self, base: Node, n_known: int, opaque: Sequence[int]
    ) -> tuple[str, Between] | Reason:
        """The text with stand-ins up to a base, or why it may not be extended."""
        extends, n = self.skeleton.extends, len(self.places)
        roles = {self._role(i) for i in range(n_known, n)} or {"user"}
        if base.between is None or any(extends[role] for role in roles):
            return "template"
        text = self.text(opaque=opaque)
        found = self.between(text, opaque)
        if isinstance(found, str):
            return found
        if found.hasher.digest() != base.between:
            return "rewritten"
        past, changed = self.prompts.past, None
        if past == "template" or (past == "auto" and "user" in roles):
            changed = self._rewritten(n_known)
        return changed or (text, found)

    def _rewritten(self, n_known: int) -> Departure | None:
        """How the template's own text of a base's turn changed, if it did."""
        known = (place.message for place in self.places[:n_known])
        thoughts = [message.get("reasoning_content") or "" for message in known]
        changed: Departure = "reasoning" if any(thoughts) else "rewritten"
        # the text that an earlier request had, mostly
        offered, restored = self.restored.offered.digest, self.restored
        *same, before = restored.plain
        if same != [offered, self.places[n_known - 1].before]:
            before = self.text(n_known - 1)
        after = self.text()
        restored.plain = offered, restored.position, after
        thought = chat.squeezed(thoughts[-1])
        if thought:
            # the reply shows what the generation prompt opened, in other words maybe
            leaves = self.skeleton.leaves.get(self._role(n_known - 2), "")
            before = before.removesuffix(leaves)
        if not after.startswith(before):
            return changed
        shown = self.renderer.without_mark(after[len(before) :])
        return None if thought in chat.squeezed(shown) else "reasoning"

    def attribute(
        self, first: int, text: str, start: int, encoded: Encoded, opaque: list[int]
    ) -> Ids | None:
        """The message, from ``first`` on, that each token of a text after ``start`` shows.

        The messages are rendered again with a mark before and after each content. If
        removing the marks yields the same text, they give the position of each content,
        and the tokenizer's offsets its tokens. -1: a token of no message. None: it cannot
        be told.
        """
        spans, plain = None, self.renderer.without_mark
        if first:
            # mostly the same follows the first messages and the last reply alone
            roles = [place.message["role"] for place in self.places[:first]]
            n_first = roles.index("user") + 1 if "user" in roles else 0
            head = sorted({*range(n_first), first - 1})
            spans = self._spans(head, first, opaque, plain(text[start:]))
        if spans is None:
            spans = self._spans(range(first), first, opaque, plain(text))
            n = len(plain(text[:start]))
            spans = spans and [(i, begin - n, end - n) for i, begin, end in spans]
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

    def _spans(
        self, head: Sequence[int], first: int, opaque: Collection[int], text: str
    ) -> "Spans | None":
        """The spans of the messages from ``first`` on in a text, found with marks.

        It is what the messages of ``head`` and those have as text, or the end of that.
        None: it is not.
        """
        hidden, name = {*opaque}, self.prompts.mark
        forms = [self._form(i, hidden=i in hidden) for i in head]
        for inside_space in (False, True):
            marked = [*forms]
            for i, place in enumerate(self.places[first:]):
                message = _marked(place.message, f"{name}{i};", inside_space)
                sampled = place.known not in (None, "new")
                marked.append(self.renderer.shape(message, sampled=sampled))
            # the template may reject the marks
            with suppress(TemplateError):
                shown = self.renderer.without_mark(self._render(marked))
                clean, found = _without_marks(shown, name)
                whole = len(head) == first
                if found is not None and (
                    clean == text if whole else clean.endswith(text)
                ):
                    n = len(clean) - len(text)
                    return [(i, begin - n, end - n) for i, begin, end in found]
        return None


def _stand_in(message: Json, word: str) -> Json:
    """A reply of which only the names and ids of calls are real."""
    calls = message.get("tool_calls") or ()
    assert isinstance(calls, (list, tuple))
    shown = [
        chat.tool_call(
            str(call["id"]),
            str(chat.function_of(call)["name"]),
            f'{{"reply": "{word}"}}',
        )
        for call in calls
    ]
    return chat.assistant_message(word, calls=shown)


Spans: TypeAlias = list[tuple[int, int, int]]
"""(message, start, stop) of each content in a text."""


def _marked(message: Json, mark: str, inside_space: bool) -> Json:
    """The message with a mark on both sides of its content, or within white space there."""
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        return message
    before = after = ""
    if inside_space:
        core = content.strip()
        before, _, after = content.partition(core)
        content = core
    return {**message, "content": f"{before}{mark}{content}{mark}{after}"}


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
