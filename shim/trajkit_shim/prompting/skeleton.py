"""What a chat template writes between replies.

To extend the token ids of an earlier turn, the template's text between the replies has to
stay as it was; how the template would spell a reply does not matter, because what was
sampled is kept. So a conversation is rendered with a stand-in for each sampled reply,
and each stand-in is left out of what is compared.

Whether the text after a reply depends on the reply is tried out once for each set of
template variables: short conversations with different stand-ins have to give the same
text, for each role of the next message.
"""

import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from os.path import commonprefix
from typing import Literal, TypeAlias

from trajkit_shim.chat import request as chat
from trajkit_shim.errors import TemplateError
from trajkit_shim.json_input import Json
from trajkit_shim.prompting.render import ChatRenderer

Role: TypeAlias = Literal["user", "tool"]
"""Of the message before or after a reply. System messages count as a user's."""

Departure: TypeAlias = Literal["rewritten", "reasoning", "unended", "hidden"]
"""Why a prompt does not extend a turn: earlier text was rewritten, the reasoning of
earlier replies is left out, no token ends a reply, or a reply is not shown."""

_QUESTION, _OUTCOME = "questionword", "outcomeword"
_USER: Json = {"role": "user", "content": _QUESTION}
_RESULT = chat.tool_message("call00000", [_OUTCOME])
_NEXT: Mapping[Role, list[Json]] = {"user": [_USER], "tool": [_RESULT]}
_STAND_IN_TOOL = chat.function_tool(
    "probe", "probe", {"type": "object", "properties": {}}
)


def role_of(message: Json) -> Role:
    """Return the role that counts for the template's text around replies."""
    return "tool" if message["role"] == "tool" else "user"


@dataclass(frozen=True, slots=True)
class Between:
    """A text, and what it has between replies."""

    text: str
    start: int  # of what follows the last reply
    # the control token that ends the last reply, and its place
    end: str = ""
    end_at: int = 0
    # digests of the text between replies: up to the last reply, and with what follows
    before: bytes = b""
    digest: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """What one template does, with or without tools, under some variables."""

    renderer: ChatRenderer
    # the roles of a next message after which prompts may be extended; why not the others
    extends: Mapping[Role, str | None]
    # by the role of the message before a reply: the text right before a reply, and the
    # end of the generation prompt that disappears once there is a reply
    stays: Mapping[Role, str]
    leaves: Mapping[Role, str]
    # tokens that end a reply in the template's text
    closers: frozenset[str]
    # the token that ends a reply is the next message's own: it depends on its role
    opens_next: bool
    _word: str = field(default_factory=lambda: f"reply{secrets.token_hex(8)}")

    def between(
        self,
        messages: Sequence[Json],
        tools: list[Json] | None,
        variables: Mapping[str, object],
        replies: Collection[int],
        sampled: Collection[int] = (),
    ) -> Between | Departure:
        """Render messages with stand-ins for some replies, given as indices.

        ``sampled``: as in `ChatRenderer.text`, which may raise.
        """
        order = sorted(replies)
        shown = list(messages)
        for i in order:
            shown[i] = _stand_in(messages[i], f"{self._word}{i};")
        text = self.renderer.text(shown, tools, variables, sampled=sampled)
        hasher, start = partial(blake2b, digest_size=16)(), 0
        before, end, end_at = b"", "", 0
        for i in order:
            word = f"{self._word}{i};"
            first, last = text.find(word, start), text.rfind(word, start)
            if first < 0:
                return "hidden"
            role = role_of(messages[i - 1]) if i else "user"
            stays = self.stays.get(role, "")
            begin = text.rfind(stays, start, first) if stays else first
            begin = begin + len(stays) if stays and begin >= 0 else first
            hasher.update(_bytes(text[start:begin]))
            before = hasher.digest()
            found = self._closer(text, last + len(word))
            if found is None:
                return "unended"
            end_at, start = found
            end = text[end_at:start]
        rest = text[start:].removesuffix(self.leaves_after(messages[-1]))
        hasher.update(_bytes(rest))
        return Between(text, start, end, end_at, before, hasher.digest())

    def leaves_after(self, message: Json) -> str:
        """Return what disappears of the generation prompt that follows a message."""
        return self.leaves.get(role_of(message), "")

    def _closer(self, text: str, start: int) -> tuple[int, int] | None:
        for found in self.renderer.controls(text, start):
            if found[0] in self.closers:
                return found.span()
        return None

    def describe(self) -> Json:
        """Return what was found out, as JSON."""
        return {
            "extends": {role: why is None for role, why in self.extends.items()},
            "why_not": {role: why for role, why in self.extends.items() if why},
            "leaves": dict(self.leaves),
        }


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _stand_in(reply: Json, word: str) -> Json:
    """A reply with the same calls, of which only names and ids are real."""
    calls = reply.get("tool_calls") or ()
    assert isinstance(calls, (list, tuple))
    return chat.assistant_message(
        word,
        calls=[
            chat.tool_call(
                str(call["id"]),
                str(chat.function_of(call)["name"]),
                f'{{"reply": "{word}"}}',
            )
            for call in calls
        ],
    )


def probe_template(
    renderer: ChatRenderer, variables: Mapping[str, object], *, tools: bool
) -> Skeleton:
    """Find out by trying what the renderer's template writes around replies."""
    offered = [_STAND_IN_TOOL] if tools else None

    def text(messages: list[Json]) -> str | None:
        with suppress(TemplateError):
            return renderer.text(messages, offered, variables)
        return None

    stays: dict[Role, str] = {}
    leaves: dict[Role, str] = {}
    heads: dict[Role, list[Json]] = {"user": [_USER]}
    heads["tool"] = [_USER, _calling("firstword"), _RESULT]
    moved: set[Role] = set()
    for role, head in heads.items():
        opening, word = text(head), _OUTCOME if role == "tool" else _QUESTION
        if opening is None:
            continue
        # what follows the last message, up to the reply
        common = rest = opening[opening.rfind(word) + len(word) :]
        for reply, role_after in _steps():
            later = text([*head, reply, *_NEXT[role_after]])
            if later is None:
                continue
            at = later.find(word) + len(word)
            common = commonprefix([common, later[at:]])  # noqa: RUF071
            if role == "user" and later[:at] != opening[:at]:
                # what was before the reply is elsewhere, such as tools that move on
                moved.add(role_after)
        stays[role], leaves[role] = common, rest[len(common) :]
    # a text reply and what follows it, for the token that ends a reply
    word = "closingword"
    later = text([_USER, chat.assistant_message(word), _USER])
    closers = set(renderer.end_tokens)
    opens_next = False
    if later is not None and word in later:
        start = later.rfind(word) + len(word)
        stop = later.rfind(_QUESTION)
        controls = [found[0] for found in renderer.controls(later, start, stop)]
        if not closers.intersection(controls):
            closers.update([*filter(renderer.is_special, controls)][:1])
        opens_next = len(controls) == 1 and renderer.is_end(controls[0])
    why: dict[Role, str | None] = {}
    skeleton = Skeleton(
        renderer=renderer,
        extends=why,
        stays=stays,
        leaves=leaves,
        closers=frozenset(closers),
        opens_next=opens_next,
    )
    for role in _NEXT:
        why[role] = _differs(skeleton, offered, variables, role)
        if role in moved:
            why[role] = "a later message moves what was before the reply"
    return skeleton


def _steps() -> Iterator[tuple[Json, Role]]:
    """Replies of several kinds and lengths, and the role of what follows them."""
    for text, thought in (("alphaword", ""), ("a longer alphaword", "thoughtword")):
        yield chat.assistant_message(text, thought), "user"
        for content in ("", text):
            yield _calling(content, thought), "tool"


def _calling(content: str, thought: str = "") -> Json:
    call = chat.tool_call("call00000", "probe", '{"reply": "betaword"}')
    return chat.assistant_message(content, thought, [call])


def _differs(
    skeleton: Skeleton,
    tools: list[Json] | None,
    variables: Mapping[str, object],
    role_after: Role,
) -> str | None:
    """Why the text after a reply depends on the reply, or None if it does not."""
    tails, problem = set[str](), "the template rejects what follows a reply"
    for reply, role in _steps():
        if role != role_after:
            continue
        messages = [_USER, reply, *_NEXT[role]]
        # the last word of the reply
        word = "betaword" if "tool_calls" in reply else "alphaword"
        try:
            text = skeleton.renderer.text(messages, tools, variables)
        except TemplateError:
            continue
        at = text.rfind(word)
        found = skeleton._closer(text, at + len(word)) if at >= 0 else None
        if found is None:
            return "no token ends a reply" if at >= 0 else "a reply is not shown"
        tails.add(text[found[1] :])
    if len(tails) > 1:
        return "the text after a reply depends on the reply"
    word = _OUTCOME if role_after == "tool" else _QUESTION
    if not tails:
        return problem
    return None if word in next(iter(tails)) else "a new message is not shown after it"
