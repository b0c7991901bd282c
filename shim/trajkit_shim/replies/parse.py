"""Splits a model's reply into reasoning, text and tool calls.

Reasoning between two tags comes first; if the prompt opened it, the reply contains only
its end. White space around it is dropped. The rest is text and calls in the model's format
(`replies.parsers`). A block that is not a valid call stays in the text, and the reply is
ill-formed. The result is what clients see and send back; the recorded ids stay those that
were sampled.

`grammar` is of the replies that clients require: a structural tag of xgrammar (0.2).
SGLang and vLLM sample under it, and give the logprobs of the distribution that it leaves.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from trajkit_shim.chat.request import (
    ANY_OBJECT,
    ChatRequest,
    Parsed,
    ToolCall,
    function_of,
)
from trajkit_shim.engines.http import Connections, EngineClient, reading
from trajkit_shim.errors import EngineError, GatewayError
from trajkit_shim.json_input import Json
from trajkit_shim.prompting.render import ChatRenderer, Ids
from trajkit_shim.replies.parsers import DECODER, CallForm, ToolForm, Tools

SPACE = " \t\n\r"
THINK = "<think>"
END_THINK = "</think>"
THOUGHTS = (("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"))
"""Tags of reasoning other than `THINK` and `END_THINK`."""

PINNED = frozenset("ebnf json_schema regex structural_tag structured_outputs".split())
"""Parameters of the engines that hold a grammar."""


class ReplyParser(ABC):
    """Parses replies."""

    form: CallForm | None = None  # how a grammar writes calls; None: it cannot

    @abstractmethod
    async def parse(
        self, text: str, tools: Tools | None, prompt_ids: Ids, *, opened: bool
    ) -> Parsed:
        """Return what a reply contains; one that the parser rejects stays text.

        The text is as sampled, without the end-of-message token. ``opened``: the prompt
        ends within the reasoning. Raises `EngineError`: the parser cannot be reached.
        """

    async def close(self) -> None:  # noqa: B027, most have nothing to close
        """Close its connections, if it has any."""


class FormParser(ReplyParser):
    """The gateway's own parser, for one format of calls; None: calls are text."""

    def __init__(
        self, form: ToolForm | None, tags: tuple[str, str] = (THINK, END_THINK)
    ) -> None:
        self._form, self._tags = form, tags
        self.form = None if form is None else form.grammar

    async def parse(
        self, text: str, tools: Tools | None, prompt_ids: Ids, *, opened: bool
    ) -> Parsed:
        return parse(text, self._form, tools, opened=opened, tags=self._tags)


class SGLangParser(ReplyParser):
    """The parsers that an SGLang server (0.5.23) was started with.

    Without ``--tool-call-parser`` or ``--reasoning-parser`` that part is not parsed. The
    spelling of a call's arguments is lost; if the reply contains JSON with the same
    value, that text is used.
    """

    def __init__(self, base_url: str) -> None:
        self._connections = Connections()
        self._server = EngineClient("SGLang", base_url, self._connections)
        self._names: tuple[str | None, str | None] | None = None

    async def names(self) -> tuple[str | None, str | None]:
        """Return the parsers of calls and of reasoning; raises `EngineError` if none."""
        if self._names is None:
            answer: dict[str, Any] = await self._server.get("/server_info")
            names = answer.get("tool_call_parser"), answer.get("reasoning_parser")
            if not any(names):
                raise EngineError(
                    "the SGLang server was started with neither --tool-call-parser nor "
                    "--reasoning-parser"
                )
            self._names = names
        return self._names

    async def parse(
        self, text: str, tools: Tools | None, prompt_ids: Ids, *, opened: bool
    ) -> Parsed:
        parser, thoughts = await self.names()
        unread = Parsed(parts=(text,) if text else (), sampled=text, ill_formed=True)
        found: list[Any] = []
        answer: Any = {"text": text}
        try:
            if thoughts:
                body: Json = {"text": f"{THINK}{text}" if opened else text}
                body["reasoning_parser"] = thoughts
                answer = await self._server.post("/separate_reasoning", body)
            thought, rest = answer.get("reasoning_text"), answer.get("text") or ""
            if parser and tools:
                body = {"text": rest, "tools": [*tools], "tool_call_parser": parser}
                answer = await self._server.post("/parse_function_call", body)
                rest, found = answer.get("normal_text"), [*(answer.get("calls") or ())]
        except EngineError as error:
            if error.status != 400:
                raise
            return unread
        parts: list[str | ToolCall] = [str(rest)] if rest else []
        offset = 0
        for call in found:
            with reading("SGLang", "tool calls"):
                name, arguments = str(call["name"]), call["parameters"]
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            try:
                # a long text takes a while
                given = arguments, text, offset
                sampled, offset = await asyncio.to_thread(as_sampled, *given)
            except (ValueError, RecursionError):
                # no protocol can send such a call
                return unread
            parts.append(ToolCall(name, sampled))
        reasoning = str(thought) if thought else None
        return Parsed(parts=tuple(parts), sampled=text, reasoning=reasoning)

    async def close(self) -> None:
        await self._connections.close()


def as_sampled(arguments: str, text: str, start: int) -> tuple[str, int]:
    """Return the object in a text, from ``start`` on, with the value of ``arguments``.

    It is returned with its end; ``arguments`` and ``start`` if the text has no such object.
    Raises `ValueError` or `RecursionError`: ``arguments`` are not a JSON object.
    """
    wanted = DECODER.decode(arguments)
    if not isinstance(wanted, dict):
        raise ValueError("arguments that are not an object")
    offset = text.find("{", start)
    while offset >= 0:
        with suppress(ValueError, RecursionError):
            value, stop = DECODER.raw_decode(text, offset)
            if value == wanted:
                return text[offset:stop], stop
        offset = text.find("{", offset + 1)
    return arguments, start


def tags_of(chat_template: str) -> tuple[str, str]:
    """Return the tags of reasoning that a chat template writes."""
    known = (tags for tags in THOUGHTS if tags[1] in chat_template)
    return next(known, (THINK, END_THINK))


def opens_reasoning(renderer: ChatRenderer, prompt_ids: Ids) -> bool:
    """Return whether a prompt ends within the reply's reasoning."""
    # "<think>\n" in single bytes, and a few more
    end = renderer.decode(prompt_ids[-16:], ended=False).rstrip()
    return end.endswith((THINK, *(tags[0] for tags in THOUGHTS)))


def parse(
    text: str,
    form: ToolForm | None,
    tools: Tools | None,
    *,
    opened: bool,
    tags: tuple[str, str] = (THINK, END_THINK),
) -> Parsed:
    """Parse a complete reply.

    Everything but calls is text, including its white space, except that white space
    between two calls is dropped. Without form or tools calls are text too.
    """
    if form is not None and form.split is not None:
        thought, rest = form.split(text)
    else:
        thought, rest = _without_reasoning(text, tags, opened)
    parts, ill_formed, offset = list[str | ToolCall](), False, 0

    def add_text(piece: str) -> None:
        if parts and isinstance(parts[-1], str):
            parts[-1] += piece
        elif piece:
            parts.append(piece)

    calls = form if tools is not None else None
    while calls is not None and (begun := calls.starts.search(rest, offset)):
        add_text(rest[offset : begun.start()])
        found = calls.read(rest, begun.start(), tools or ())
        if found is None:
            # only the marker is text; a call may follow it
            ill_formed, stop = True, max(begun.end(), begun.start() + 1)
            add_text(rest[begun.start() : stop])
            offset = stop
        else:
            parts += found[0]
            offset = found[1]
    add_text(rest[offset:])
    # white space after a call is text only if no other call follows
    kept = {0, len(parts) - 1}
    return Parsed(
        parts=tuple(
            part
            for i, part in enumerate(parts)
            if isinstance(part, ToolCall) or part.strip(SPACE) or i in kept
        ),
        sampled=rest,
        ill_formed=ill_formed,
        reasoning=thought.strip(SPACE) or None,
    )


def _without_reasoning(
    text: str, tags: tuple[str, str], opened: bool
) -> tuple[str, str]:
    begun = text.lstrip(SPACE)
    if not opened and not begun.startswith(tags[0]):
        return "", text
    begun = text if opened else begun.removeprefix(tags[0])
    inside, closed, rest = begun.partition(tags[1])
    return inside, rest.lstrip("\n") if closed else ""


def grammar(
    request: ChatRequest,
    form: CallForm | None,
    pinned: Mapping[str, object],
    *,
    opened: bool,
    reasons: bool,
) -> Json | None:
    """Return the structural tag that a request requires of its reply, or None.

    Arguments match the tool's schema if that is required, else they are any object. A
    reply without a required call may have text before each call, and if only one call
    is allowed none after it. Reasoning may come first: the prompt ``opened`` it, or the
    model may begin with it (``reasons``). ``pinned`` are the session's parameters of the
    engine. Raises `GatewayError` (400): a required tool is not offered, the session has a
    grammar of its own, or the form of calls is unknown.
    """
    required = request.required
    tools = {str(f["name"]): f for f in map(function_of, request.tools or ())}
    wanted = [name for name in required.names if name not in tools]
    if wanted or (required.call and not tools):
        which = f"the tool {wanted[0]!r}" if wanted else "a tool"
        rule = "required" if required.call else "allowed"
        raise GatewayError(f"a call of {which} is {rule}, which is not offered")
    if required.schema is None and not (required.limits_calls and tools):
        return None
    own = PINNED & pinned.keys()
    if own:
        message = f"the session fixes {min(own)}: a request cannot require another form"
        raise GatewayError(message, code="unsupported_value")
    elements: list[Json] = []
    if required.schema is not None and not required.call:
        elements.append({"type": "json_schema", "json_schema": required.schema})
    if tools:
        if form is None:
            message = "the parser of replies does not define how calls are written: "
            message += "no form of a reply can be required"
            raise GatewayError(message, code="unsupported_value")
        tags = []
        for name in dict.fromkeys(required.names) or tools:
            schema = tools[name].get("parameters") if name in required.strict else None
            schema = schema if isinstance(schema, dict) else ANY_OBJECT
            tags.append(form.tag(name, schema))
        found: Json = {"tags": tags, "stop_after_first": not required.parallel}
        if required.call or required.schema is not None:
            found |= {"separator": "\n", "at_least_one": True}
            elements.append({"type": "tags_with_separator", **found})
        else:
            triggers = {"type": "triggered_tags", "triggers": [form.opens]}
            elements.append({**triggers, **found})
    either: Json = {"type": "or", "elements": elements}
    reply = elements[0] if len(elements) == 1 else either
    if opened or reasons:
        # it is optional unless the prompt opened it
        begin = "" if opened else THINK
        inside: Json = {"type": "tag", "content": {"type": "any_text"}}
        inside |= {"begin": begin, "end": END_THINK}
        thought = inside if opened else {"type": "optional", "content": inside}
        gap: Json = {"type": "regex", "pattern": "\\n{0,2}"}
        reply = {"type": "sequence", "elements": [thought, gap, reply]}
    return {"type": "structural_tag", "format": reply}
