"""Parsers of complete replies other than the gateway's own.

Their result is what clients see and send back; the recorded ids stay those that were
sampled. A parser that returns a call's arguments as a value loses their spelling; if the
reply contains JSON with the same value, that text is used.
"""

import asyncio
import json
from contextlib import suppress
from typing import Any, cast

from trajkit_shim.chat.reply import Parsed, ToolCall
from trajkit_shim.engines.http import Connections, EngineClient, reading
from trajkit_shim.errors import EngineError
from trajkit_shim.json_input import Json
from trajkit_shim.prompting.render import Ids
from trajkit_shim.replies.parse import THINK, ReplyParser, Tools
from trajkit_shim.replies.parsers import DECODER


class SGLangParser(ReplyParser):
    """The parsers that an SGLang server (0.5.23) was started with.

    Without ``--tool-call-parser`` or ``--reasoning-parser`` that part is not parsed.
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
        found: list[Any] = []
        reasoning: Any
        rest: Any
        reasoning, rest = None, text
        unread = Parsed(parts=(text,) if text else (), sampled=text, ill_formed=True)
        answer: dict[str, Any]
        try:
            if thoughts:
                body: Json = {"text": f"{THINK}{text}" if opened else text}
                body["reasoning_parser"] = thoughts
                answer = await self._server.post("/separate_reasoning", body)
                reasoning, rest = answer.get("reasoning_text"), answer.get("text")
            if parser and tools:
                body = {"text": rest or "", "tools": list(tools)}
                body["tool_call_parser"] = parser
                answer = await self._server.post("/parse_function_call", body)
                rest = answer.get("normal_text")
                found = [*cast(Any, answer.get("calls") or ())]
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
        thought = str(reasoning) if reasoning else None
        return Parsed(parts=tuple(parts), sampled=text, reasoning=thought)

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
