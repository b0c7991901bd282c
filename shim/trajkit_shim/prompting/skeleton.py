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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from os.path import commonprefix
from typing import Any, Literal, TypeAlias

from trajkit_shim.chat import request as chat
from trajkit_shim.errors import TemplateError
from trajkit_shim.json_input import Json
from trajkit_shim.prompting.render import ChatRenderer

Role: TypeAlias = Literal["user", "tool"]
"""Of the message before or after a reply. System messages count as a user's."""

Departure: TypeAlias = Literal["rewritten", "reasoning", "unended", "hidden"]
"""Why a prompt does not extend a turn: earlier text was rewritten, the reasoning of
earlier replies is left out, no token ends a reply, or a reply is not shown."""

_USER: Json = {"role": "user", "content": "questionword"}
_RESULT = chat.tool_message("call00000", ["outcomeword"])
_NEXT: Mapping[Role, Json] = {"user": _USER, "tool": _RESULT}
_TOOL = chat.function_tool("probe", "probe", {"type": "object", "properties": {}})


def role_of(message: Json) -> Role:
    """Return the role that counts for the template's text around replies."""
    return "tool" if message["role"] == "tool" else "user"


@dataclass(frozen=True, slots=True)
class Between:
    """What a text has between replies."""

    start: int  # of what follows the last reply
    # the control token that ends the last reply, and its place
    end: str
    end_at: int
    # digests of the text between replies: up to the last reply, and with what follows
    before: bytes
    digest: bytes


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
        self.renderer, self.variables = renderer, variables
        self._word = f"reply{secrets.token_hex(8)}"
        offered = [_TOOL] if tools else None

        def text(*messages: Json) -> str | None:
            with suppress(TemplateError):
                return renderer.text(messages, offered, variables)
            return None

        # the text right before a reply, and what disappears of it
        self._stays: dict[Role, str] = {}
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
            self._stays[role], self.leaves[role] = common, rest[len(common) :]
        # tokens that end a reply in the template's text
        self._closers = set(renderer.end_tokens)
        self.opens_next = False
        later = text(_USER, _reply("closingword"), _USER)
        if later is not None and "closingword" in later:
            start = later.rfind("closingword") + len("closingword")
            stop = later.rfind(str(_USER["content"]))
            controls = [
                found[0] for found in renderer.control.finditer(later, start, stop)
            ]
            if not self._closers.intersection(controls):
                self._closers.update(
                    [*filter(renderer.special.fullmatch, controls)][:1]
                )
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
            found = self._closer(text, at + len(word)) if at >= 0 else None
            if found is None:
                return "no token ends a reply" if at >= 0 else "a reply is not shown"
            tails.add(text[found[1] :])
        if not tails:
            return "the template rejects what follows a reply"
        if len(tails) > 1:
            return "the text after a reply depends on the reply"
        shown = str(_NEXT[role_after]["content"]) in tails.pop()
        return None if shown else "a new message is not shown after it"

    def text(
        self,
        messages: Sequence[Json],
        tools: list[Json] | None,
        opaque: Collection[int] = (),
        sampled: Collection[int] = (),
    ) -> str:
        """Render messages with stand-ins for the replies at some indices.

        ``sampled``: as in `ChatRenderer.text`, which may raise.
        """
        shown = list(messages)
        for i in opaque:
            word: str = f"{self._word}{i};"
            calls: Any = messages[i].get("tool_calls") or ()
            # of calls only names and ids are real
            shown[i] = chat.assistant_message(
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
        return self.renderer.text(shown, tools, self.variables, sampled=sampled)

    def between(
        self, text: str, messages: Sequence[Json], opaque: Sequence[int]
    ) -> Between | Departure:
        """Find what a text of `text` has between the stand-ins, which ascend."""
        hasher, start = partial(blake2b, digest_size=16)(), 0
        before, end, end_at = b"", "", 0
        for i in opaque:
            word = f"{self._word}{i};"
            first, last = text.find(word, start), text.rfind(word, start)
            if first < 0:
                return "hidden"
            role = role_of(messages[i - 1]) if i else "user"
            stays = self._stays.get(role, "")
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
        return Between(start, end, end_at, before, hasher.digest())

    def leaves_after(self, message: Json) -> str:
        """Return what disappears of the generation prompt that follows a message."""
        return self.leaves.get(role_of(message), "")

    def _closer(self, text: str, start: int) -> tuple[int, int] | None:
        for found in self.renderer.control.finditer(text, start):
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


def _bytes(text: str) -> bytes:
    return text.encode()


def _steps() -> Iterator[tuple[Json, Role]]:
    """Replies of several kinds and lengths, and the role of what follows them."""
    for text, thought in (("alphaword", ""), ("a longer alphaword", "thoughtword")):
        yield _reply(text, thought), "user"
        for content in ("", text):
            yield _reply(content, thought, calls=True), "tool"


def _reply(content: str, thought: str = "", *, calls: bool = False) -> Json:
    call = chat.tool_call("call00000", "probe", '{"reply": "betaword"}')
    return chat.assistant_message(content, thought, [call] if calls else [])
