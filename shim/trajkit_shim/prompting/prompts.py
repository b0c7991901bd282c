"""Prompts: rendered, or built by appending to token ids consumed and sampled before.

To extend the ids of an earlier turn, the template's text between the replies has to stay
as it was; how the template would spell a reply does not matter, because what was sampled
is kept. So a conversation is rendered with a stand-in for each sampled reply. Whether the
text after a reply depends on the reply is tried out once for each set of template
variables (`Skeleton`). How a prompt is built:

1. The session's conversation restores the request's replies (`prompting.conversation`).
2. The base is the last of them, if it had the same tools and variables, ended by itself
   and its ids are in memory. Of a changed history it is the last turn before the change.
3. The template has to be one that may be extended for the roles of what follows the base.
4. The text between the replies before the base has to be what it was, by its digest.
5. At a user's message the template decides: if its own text of the base's turn is no longer
   the start of its new text, as where it leaves out reasoning, nothing is extended. After
   tool results replies stay as they were sampled. ``past`` changes both.
6. The prompt is the ids of the base's turn, and those of the text after the base. Where one
   of this does not hold, all messages are rendered, for a reason that is counted.
7. The digest of the text between all replies goes with the prompt, for the next one.
8. Each new token gets the message that it shows, if that can be told exactly.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from hashlib import blake2b
from os.path import commonprefix
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from trajkit.turns import tools_key
from trajkit_shim.chat import request as chat
from trajkit_shim.chat.images import ImageModel, Images
from trajkit_shim.errors import TemplateError
from trajkit_shim.json_input import Json, as_json
from trajkit_shim.prompting.conversation import START, Node, Place, RestoredRequest
from trajkit_shim.prompting.render import NO_LIMIT, PROBE, ChatRenderer, Encoded, Ids

Mode: TypeAlias = Literal["append", "render"]
"""How prompts are built where possible."""

Past: TypeAlias = Literal["auto", "sampled", "template"]
"""Whether replies stay as sampled where the template would rewrite them: after tool
results, but not at a user's message (``auto``); always; or never."""

Role: TypeAlias = Literal["user", "tool"]
"""Of the message before or after a reply. System messages count as a user's."""

Follow: TypeAlias = Role | Literal["beside"]
"""What follows a reply; ``beside``: results of calls beside which it has text."""

Reason: TypeAlias = (
    Literal["chosen", "opening", "unknown_reply", "released", "tools"]
    | Literal["unclosed", "template", "end_token"]
    | Literal["rewritten", "reasoning", "unended", "hidden"]
)
"""Why a prompt does not extend the last reply (docs/engines.md has a table)."""

# sets of variables whose probe is kept; clients choose them
_KEPT = 64
_USER: Json = {"role": "user", "content": "questionword"}
_RESULT = chat.tool_message("call00000", ["outcomeword"])
_NEXT: Mapping[Follow, Json] = {"user": _USER, "tool": _RESULT, "beside": _RESULT}
_SHOWN: Mapping[Follow, str] = {
    "user": "a user message",
    "tool": "a tool message",
    "beside": "a tool message after text",
}
_digest = partial(blake2b, digest_size=16)


def _reply(content: str, thought: str = "", *, calls: bool = False) -> Json:
    call = chat.ToolCall("probe", '{"reply": "betaword"}', "call00000")
    return chat.assistant_message([chat.Thought(thought), content, *[call] * calls])


# replies of several kinds and lengths, the last word of each, and what follows them
_STEPS: list[tuple[Json, str, Follow]] = [
    step
    for text, thought in (("alphaword", ""), ("a longer alphaword", "thoughtword"))
    for step in (
        (_reply(text, thought), "alphaword", "user"),
        (_reply("", thought, calls=True), "betaword", "tool"),
        (_reply(text, thought, calls=True), "betaword", "beside"),
    )
]


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


class Between(NamedTuple):
    """What a text has between the replies that it has stand-ins for."""

    head: str  # the text up to the end of the last of them
    end_at: int  # of the control token that ends it, and the head
    positions: list[bytes]  # after each of them
    hasher: Any  # of what the head has between them
    digest: bytes  # of that and what follows


class Offered(NamedTuple):
    """The tools and the template's variables of a request."""

    digest: bytes
    tools: list[Json] | None  # as the template takes them
    variables: Json
    key: str  # `trajkit.turns.tools_key`


class Skeleton:
    """What one template does, with or without tools, under some variables.

    ``extends``: what follows a reply; why prompts may not be extended then, or None. By
    the role of the message before a reply, the end of the generation prompt: ``stays`` is
    still there once there is a reply, ``leaves`` disappears. ``opens_next``: the token that
    ends a reply is the next message's own, so it depends on its role.
    """

    def __init__(
        self, renderer: ChatRenderer, variables: Mapping[str, object], *, tools: bool
    ) -> None:
        self._control = renderer.control
        offered = [PROBE] if tools else None

        def text(*messages: Json) -> str | None:
            with suppress(TemplateError):
                return renderer.text(messages, offered, variables)
            return None

        # after one reply of each kind, and after a reply and a result before it
        one = [(kind, word, text(_USER, r, _NEXT[kind])) for r, word, kind in _STEPS]
        head: list[Json] = [_USER, _reply("", calls=True), _RESULT]
        two = [text(*head, reply, _NEXT[kind]) for reply, _, kind in _STEPS]
        self.stays: dict[Role, str] = {}
        self.leaves: dict[Role, str] = {}
        opening = text(_USER)
        self._compare("user", opening, [later for *_, later in one])
        self._compare("tool", text(*head), two)
        # tokens that end a reply in the template's text
        self._closers, self.opens_next = set(renderer.end_tokens), False
        later = text(_USER, _reply("closingword"), _USER) or ""
        if "closingword" in later:
            gap = later.rpartition("closingword")[2].rpartition("questionword")[0]
            controls = renderer.control.findall(gap)
            if not self._closers.intersection(controls):
                special = [*filter(renderer.special.fullmatch, controls)]
                self._closers.update(special[:1])
            self.opens_next = len(controls) == 1 and controls[0] in renderer.end_tokens
        before = (opening or "").partition("questionword")[0]
        self.extends: dict[Follow, str | None] = {}
        for kind, message in _NEXT.items():
            kinds = (kind, "tool") if kind == "beside" else (kind,)
            laters = [(word, each) for k, word, each in one if each and k in kinds]
            shown = str(message["content"])
            self.extends[kind] = self._differs(shown, before, laters)

    def _compare(
        self, role: Role, opening: str | None, laters: list[str | None]
    ) -> None:
        """Find out what of the text before a reply stays once there is one."""
        if opening is not None:
            # what follows the last message
            word, call_id = str(_NEXT[role]["content"]), str(_RESULT["tool_call_id"])
            begin = opening.rfind(word)
            if role == "tool" and (end := opening.rfind(call_id)) > begin >= 0:
                # some templates write the call's id behind its result
                word = opening[begin : end + len(call_id)]
            rest = opening.rpartition(word)[2]
            kept = [later.partition(word)[2] for later in laters if later]
            self.stays[role] = commonprefix([rest, *kept])  # noqa: RUF071
            self.leaves[role] = rest[len(self.stays[role]) :]

    def _differs(
        self, follows: str, before: str, laters: list[tuple[str, str]]
    ) -> str | None:
        """Why the text around a reply depends on what follows, or None if it does not.

        ``laters``: the last word of each reply, and the text with it.
        """
        tails = set[str]()
        if any(text.partition("questionword")[0] != before for _, text in laters):
            return "a later message moves what was before the reply"
        for word, text in laters:
            at = text.rfind(word)
            found = self.closer(text, at + len(word)) if at >= 0 else None
            if found is None:
                return "no token ends a reply" if at >= 0 else "a reply is not shown"
            tails.add(text[found[1] :])
        if not tails:
            return "the template rejects what follows a reply"
        if len(tails) > 1:
            return "the text after a reply depends on the reply"
        shown = follows in tails.pop()
        return None if shown else "a new message is not shown after it"

    def closer(self, text: str, start: int) -> tuple[int, int] | None:
        """Return where the next token is that ends a reply."""
        tokens = self._control.finditer(text, start)
        return next((t.span() for t in tokens if t[0] in self._closers), None)


class Prompts:
    """Builds prompts with one renderer. Safe to use from several threads at once.

    ``images``: None if no message has an image.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        mode: Mode = "append",
        images: ImageModel | None = None,
        *,
        past: Past = "auto",
    ) -> None:
        self.renderer, self.mode, self.images, self.past = renderer, mode, images, past
        # begin a stand-in, and are around a message's content; unpredictable for clients
        self.word, self.mark = (f"{c}{secrets.token_hex(12)}" for c in ("reply", "x"))
        self.marked = re.compile(rf"{self.mark}(\d+);(.*?){self.mark}\1;", re.DOTALL)
        self._probed = lru_cache(_KEPT)(self._probe)

    def skeleton(
        self, variables: Mapping[str, object] | None = None, *, tools: bool
    ) -> Skeleton:
        """Return what the template does around replies; tried out once."""
        return self._probed(json.dumps([tools, variables or {}], sort_keys=True))

    def _probe(self, key: str) -> Skeleton:
        tools, variables = json.loads(key)
        return Skeleton(self.renderer, variables, tools=tools)

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
            "shows_tools": renderer.shows_tools,
            "rendered": {
                f"{_SHOWN[kind]} {when} tools": why
                for when, tools in (("with", True), ("without", False))
                for kind, why in self.skeleton(tools=tools).extends.items()
                if why and (tools or kind == "user")
            },
        }

    def build(
        self,
        restored: RestoredRequest,
        tools: list[Json] | None,
        variables: Mapping[str, object] | None = None,
        images: Images | None = None,
        *,
        attributed: bool = False,
        max_tokens: int = NO_LIMIT,
    ) -> Prompt:
        """Return the prompt for a request.

        ``attributed``: also determine which message each appended token belongs to.
        Raises as `ChatRenderer.render`, and `EngineError` if there are surely more than
        ``max_tokens``.
        """
        given = dict(variables or {})
        # not sorted, because a template may render the fields in order
        digest = _digest(as_json([tools, given])).digest()
        if restored.offered is None or restored.offered.digest != digest:
            as_text, key = self.renderer.as_text, tools_key(tools or [])
            restored.offered = Offered(digest, as_text(tools), as_text(given), key)
            restored.rendered = restored.text = None
        call = _Call(self, restored, self.skeleton(given, tools=tools is not None))
        return call.build(images or {}, attributed, max_tokens)


class _Call:
    """One request on its way to a prompt."""

    def __init__(
        self, prompts: Prompts, restored: RestoredRequest, skeleton: Skeleton
    ) -> None:
        self.prompts, self.renderer, self.skeleton = prompts, prompts.renderer, skeleton
        self.restored, self.places = restored, restored.places
        self.sampled = restored.sampled
        self.offered: Offered = restored.offered
        shown = {"tools": self.offered.tools, "variables": self.offered.variables}
        self._render: Callable[..., str] = partial(self.renderer.render, **shown)

    def build(self, images: Images, attributed: bool, max_tokens: int) -> Prompt:
        appending, model = self.prompts.mode == "append", self.prompts.images
        base, reason = self._base() if appending else (None, "chosen")
        n_known = 0 if base is None else self.sampled[-1] + 1
        found = self._extension(base, n_known)
        if isinstance(found, str):
            reason, ids = reason or found, np.empty(0, np.int32)
            base, last, text, n_known = None, None, self._text(), 0
        else:
            ids, whole, between = found
            start, last = len(between.head), between.digest
            ended = self.renderer.text_of_id.get(int(ids[-1]))
            if self.skeleton.opens_next and between.head[between.end_at :] != ended:
                # the reply stopped at the start of a message of another role
                ids, start, base = ids[:-1], between.end_at, None
                reason = reason or "end_token"
            text = whole[start:]
        encoded = self.renderer.encode(text, max_tokens, offsets=attributed)
        if model is not None:
            shown = self.restored.messages[n_known:]
            placed = model.expand(encoded.ids, encoded.offsets, shown, images)
            encoded = Encoded(*placed)
        index = self._attribute(n_known, text, encoded) if attributed else None
        return Prompt(
            ids=np.concatenate([ids, encoded.ids]),
            reason=reason,
            base=base,
            n_base=len(ids),
            n_known=n_known,
            message_index=index,
            between=last or (self._digest() if appending else None),
            offered=self.offered.digest,
        )

    def _base(self) -> tuple[Node | None, Reason | None]:
        """The turn that is extended, and why it is not the last reply's."""
        last = next((p for p in reversed(self.places) if p.is_reply), None)
        if last is None:
            return None, "opening"
        # if messages before it changed, the last reply before the change is extended
        reason: Reason | None = None if last.node else "unknown_reply"
        node = self.places[self.sampled[-1]].node if self.sampled else None
        if node is None:
            return None, reason
        faults: dict[Reason, bool] = {
            "unclosed": not node.closed,
            "released": node.own_ids is None,
            "tools": node.offered != self.offered.digest,
        }
        for fault, present in faults.items():
            if present:
                return None, reason or fault
        return node, reason

    def _text(self, stop: int | None = None, *, hidden: bool = False) -> str:
        """The template's text of the first messages.

        ``hidden``: with stand-ins for sampled replies.
        """
        places = self.places[:stop]
        forms = [self._form(place, hidden) for place in places]
        if hidden and self.sampled:
            return self._render(forms)
        position = places[-1].position if places else START
        if self.restored.text is None or self.restored.text[0] != position:
            self.restored.text = position, self._render(forms)
        return self.restored.text[1]

    def _form(self, place: Place, hidden: bool) -> Json:
        """A message as the template takes it, or a stand-in; made once for its place."""
        sampled = place.node is not None
        form = place.forms.get(hidden and sampled)
        if form is None:
            message = place.message
            if hidden and sampled:
                # text beside calls may be shown elsewhere
                bare = not message["content"] and not self.skeleton.extends["tool"]
                message = _stand_in(message, self._word(place), bare=bare)
            form = self.renderer.shape(message, sampled=sampled)
            place.forms[hidden and sampled] = form
        return form

    def _word(self, place: Place) -> str:
        return f"{self.prompts.word}{place.position.hex()};"

    def _between(self, text: str) -> Between | Reason:
        """Find what a text has between the stand-ins of all sampled replies."""
        positions = [self.places[i].position for i in self.sampled]
        known: Between | None = self.restored.rendered
        if known is None or not (
            known.positions == positions[: len(known.positions)]
            and text.startswith(known.head)
        ):
            known = Between("", 0, [], _digest(), b"")
        hasher, end_at, start = known.hasher.copy(), known.end_at, len(known.head)
        unknown = self.sampled[len(known.positions) :]
        new = [(i, self._word(self.places[i])) for i in unknown]
        at, firsts = start, list[int]()
        for _, word in new:
            at = text.find(word, at)
            firsts.append(at)
        bounds = [*firsts[1:], len(text)]
        for (i, word), first, bound in zip(new, firsts, bounds, strict=False):
            if first < start:
                return "hidden"
            stays = self.skeleton.stays.get(self._role(i - 1) if i else "user", "")
            begin = text.rfind(stays, start, first) if stays else -1
            begin = begin + len(stays) if begin >= 0 else first
            hasher.update(text[start:begin].encode())
            closer = self.skeleton.closer(text, text.rfind(word, first, bound))
            if closer is None:
                return "unended"
            end_at, start = closer
        if self.prompts.word in text[start:]:
            # a reply is shown again
            return "hidden"
        whole = hasher.copy()
        leaves = self.skeleton.leaves.get(self._role(-1), "")
        whole.update(text[start:].removesuffix(leaves).encode())
        found = Between(text[:start], end_at, positions, hasher, whole.digest())
        self.restored.rendered = found
        return found

    def _role(self, index: int) -> Role:
        """The role that counts for the text around the message at an index."""
        return "tool" if self.places[index].message["role"] == "tool" else "user"

    def _digest(self) -> bytes | None:
        """The digest of the text between all replies, if they can be told apart."""
        with suppress(TemplateError):
            found = self._between(self._text(hidden=True))
            return found.digest if isinstance(found, Between) else None
        return None

    def _extension(
        self, base: Node | None, n_known: int
    ) -> tuple[Ids, str, Between] | Reason:
        """A base's ids and the text with stand-ins, or why they are not extended."""
        # another session's turn may release them meanwhile
        if base is None or (ids := base.own_ids) is None:
            return "released"
        extends, n = self.skeleton.extends, len(self.places)
        roles: set[Follow] = {self._role(i) for i in range(n_known, n)} or {"user"}
        if "tool" in roles and base.message["content"]:
            roles.add("beside")
        if base.between is None or any(extends[role] for role in roles):
            return "template"
        text = self._text(hidden=True)
        found = self._between(text)
        if isinstance(found, str):
            return found
        if found.hasher.digest() != base.between:
            return "rewritten"
        past, changed = self.prompts.past, None
        if past == "template" or (past == "auto" and "user" in roles):
            changed = self._rewritten(n_known)
        return changed or (ids, text, found)

    def _rewritten(self, n_known: int) -> Reason | None:
        """How the template's own text of a base's turn changed, if it did."""
        known = (place.message for place in self.places[:n_known])
        thoughts = [str(message.get("reasoning_content") or "") for message in known]
        thought = chat.squeezed(thoughts[-1])
        before, after = self._text(n_known - 1), self._text()
        if thought:
            # the reply shows what the generation prompt opened, in other words maybe
            leaves = self.skeleton.leaves.get(self._role(n_known - 2), "")
            before = before.removesuffix(leaves)
        if not after.startswith(before):
            return "reasoning" if any(thoughts) else "rewritten"
        shown = self.renderer.without_mark(after[len(before) :])
        return None if thought in chat.squeezed(shown) else "reasoning"

    def _attribute(self, first: int, text: str, encoded: Encoded) -> Ids | None:
        """The message, from ``first`` on, that each token of a text shows.

        The messages are rendered again, with a mark before and after each content. If
        removing the marks yields the same text, they give the position of each content,
        and the tokenizer's offsets its tokens. -1: a token of no message. None: it cannot
        be told.
        """
        known = self.places[:first]
        roles = [place.message["role"] for place in known]
        n_opening = roles.index("user") + 1 if "user" in roles else 0
        # mostly the same follows the opening and the last reply alone
        for head in ([*known[:n_opening], *known[-1:]], known):
            # a template that trims contents gives other text with a mark around its space
            for inside_space in (False, True):
                spans = self._spans(head, first, text, inside_space)
                if spans is not None:
                    return _owners(spans, encoded)
        return None

    def _spans(
        self, head: list[Place], first: int, text: str, inside_space: bool
    ) -> list[tuple[int, int, int]] | None:
        """(message, start, stop) of each content from ``first`` on in a text.

        What the messages of ``head`` and those have as text ends with it. None: it does
        not.
        """
        forms = [self._form(place, hidden=True) for place in head]
        for i, place in enumerate(self.places[first:]):
            mark = f"{self.prompts.mark}{i};"
            marked = _marked(place.message, mark, inside_space)
            forms.append(self.renderer.shape(marked, sampled=place.node is not None))
        try:
            shown = self.renderer.without_mark(self._render(forms))
        except TemplateError:
            # of the marks
            return None
        clean, *parts = self.prompts.marked.split(shown)
        spans = list[tuple[int, int, int]]()
        for number, core, after in zip(*(parts[i::3] for i in range(3)), strict=True):
            spans.append((int(number), len(clean), len(clean) + len(core)))
            clean += core + after
        text = self.renderer.without_mark(text)
        n = len(clean) - len(text)
        same = clean.endswith(text)
        return [(i, begin - n, end - n) for i, begin, end in spans] if same else None


def _owners(spans: list[tuple[int, int, int]], encoded: Encoded) -> Ids:
    """The message of each token, by its offsets."""
    index = np.full(len(encoded.ids), -1, np.int32)
    owners, begins, ends = np.array(spans, np.int64).reshape(-1, 3).T
    assert encoded.offsets is not None
    # offsets ascend, but the tokens of one character have equal offsets
    firsts = np.searchsorted(encoded.offsets[:, 0], begins)
    lasts = np.searchsorted(encoded.offsets[:, 1], ends, side="right")
    for i, begin, end in zip(owners, firsts, lasts, strict=True):
        index[begin:end] = i
    return index


def _stand_in(message: Json, word: str, *, bare: bool) -> Json:
    """A reply of which only the names and ids of calls are real; ``bare``: without text."""
    arguments = f'{{"reply": "{word}"}}'
    calls = [replace(call, arguments=arguments) for call in chat.calls_of(message)]
    return chat.assistant_message([*[word] * (not (bare and calls)), *calls])


def _marked(message: Json, mark: str, inside_space: bool) -> Json:
    """The message with a mark on both sides of its content, or within white space there."""
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        return message
    before, core, after = content.partition(
        content.strip() if inside_space else content
    )
    return {**message, "content": f"{before}{mark}{core}{mark}{after}"}
