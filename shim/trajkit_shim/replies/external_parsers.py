"""Parsers of complete replies other than the gateway's own.

Their result is what clients see and send back; the recorded ids stay those that were
sampled. A parser that returns a call's arguments as a value loses their spelling; if the
reply contains JSON with the same value, that text is used.
"""

import asyncio
import json
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from trajkit_shim.chat.reply import Call, Parsed
from trajkit_shim.engines.http import Connections, EngineServer, reading
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
        self._server = EngineServer("SGLang", base_url, self._connections)
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
        calls_parser, reasoning_parser = await self.names()
        reasoning, rest, calls = None, text, []
        try:
            if reasoning_parser:
                opening = f"{THINK}{text}" if opened else text
                reasoning, rest = await self._separate(reasoning_parser, opening)
            if calls_parser and tools:
                rest, found = await self._find_calls(calls_parser, rest or "", tools)
                with reading("SGLang", "tool calls"):
                    calls = [(str(c["name"]), c["parameters"]) for c in found or ()]
        except EngineError as error:
            if error.status != 400:
                raise
            return _unread(text)
        return await asyncio.to_thread(_parsed, text, reasoning, rest, calls)

    async def close(self) -> None:
        await self._connections.close()

    async def _separate(self, parser: str, text: str) -> tuple[Any, Any]:
        """The reasoning of a reply and the rest of its text; None: none."""
        body: Json = {"text": text, "reasoning_parser": parser}
        answer = await self._server.post("/separate_reasoning", body)
        return answer.get("reasoning_text"), answer.get("text")

    async def _find_calls(
        self, parser: str, text: str, tools: Tools
    ) -> tuple[Any, Any]:
        """A text without its calls, and their names and parameters; None: none."""
        body: Json = {"text": text, "tools": list(tools), "tool_call_parser": parser}
        answer = await self._server.post("/parse_function_call", body)
        return answer.get("normal_text"), answer.get("calls")


def _unread(text: str) -> Parsed:
    return Parsed(parts=(text,) if text else (), sampled=text, ill_formed=True)


def _parsed(
    text: str, reasoning: object, rest: object, calls: Iterable[tuple[str, object]]
) -> Parsed:
    """A parser's result, with arguments as they were sampled; they are JSON or values."""
    parts: list[str | Call] = [str(rest)] if rest else []
    offset = 0
    for name, arguments in calls:
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        try:
            sampled, offset = as_sampled(arguments, text, offset)
        except (ValueError, RecursionError):
            # no protocol can send such a call
            return _unread(text)
        parts.append(Call(name, sampled))
    thought = str(reasoning) if reasoning else None
    return Parsed(parts=tuple(parts), sampled=text, reasoning=thought)


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
