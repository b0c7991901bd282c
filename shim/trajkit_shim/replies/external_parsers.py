"""Parsers of complete replies other than the gateway's own.

Their result is what clients see and send back; the recorded ids stay those that were
sampled. A parser that returns a call's arguments as a value loses their spelling; if the
reply contains JSON with the same value, that text is used.
"""

import asyncio
import json
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from trajkit_shim.chat.reply import Call, Parsed
from trajkit_shim.engines.http import Connections, EngineServer, reading
from trajkit_shim.errors import EngineError
from trajkit_shim.json_input import Json
from trajkit_shim.prompting.attribution import Ids
from trajkit_shim.replies.parse import THINK, CallForm, ReplyParser, Tools, parse
from trajkit_shim.replies.parsers import DECODER

if TYPE_CHECKING:
    from trajkit_shim.prompting.render import ChatRenderer


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


class InstalledParser(SGLangParser):
    """The parsers of an installed SGLang (0.5.23), by name, in this process.

    Importing them takes about five seconds and 0.4 GB. Raises `ValueError`: SGLang has no
    parser of that name. `ModuleNotFoundError`: it is not installed.
    """

    def __init__(self, calls: str | None, reasoning: str | None) -> None:
        self._protocol = import_module("sglang.srt.entrypoints.openai.protocol")
        self._calls = import_module("sglang.srt.function_call.function_call_parser")
        self._reasoning = import_module("sglang.srt.parser.reasoning_parser")
        known = self._calls.FunctionCallParser.ToolCallParserEnum
        modes = self._reasoning.ReasoningParser.DetectorMap
        for name, names in ((calls, known), (reasoning, modes)):
            if name is not None and name not in names:
                raise ValueError(f"{name!r} is not one of {', '.join(sorted(names))}")
        self._names = calls, reasoning
        if calls is not None:
            detector = self._calls.FunctionCallParser([], calls).detector
            # some forms are not described by what precedes and follows the arguments
            with suppress(NotImplementedError):
                if detector.supports_structural_tag():
                    info = detector.structure_info()
                    self.form = CallForm(
                        opens=info("").trigger,
                        begin=lambda name: str(info(name).begin),
                        end=info("").end,
                    )

    async def close(self) -> None:
        """It has no connections."""

    async def _separate(self, parser: str, text: str) -> tuple[Any, Any]:
        parse = self._reasoning.ReasoningParser(parser).parse_non_stream
        separated: tuple[Any, Any] = await asyncio.to_thread(parse, text)
        return separated

    async def _find_calls(
        self, parser: str, text: str, tools: Tools
    ) -> tuple[Any, Any]:
        offered = [self._protocol.Tool.model_validate(tool) for tool in tools]
        parse = self._calls.FunctionCallParser(offered, parser).parse_non_stream
        rest, calls = await asyncio.to_thread(parse, text)
        return rest, [call.model_dump() for call in calls]


class SchemaParser(ReplyParser):
    """The response template of a tokenizer (``parse_response`` of transformers 5).

    Raises `ValueError`: the tokenizer has no response template, or an invalid one.
    """

    def __init__(self, renderer: "ChatRenderer") -> None:
        self._tokenizer = renderer.tokenizer
        if getattr(self._tokenizer, "response_template", None) is None:
            raise ValueError("the tokenizer has no response_template")
        # find errors of the template itself before any reply
        self._tokenizer.parse_response("", prefix="")

    async def parse(
        self, text: str, tools: Tools | None, prompt_ids: Ids, *, opened: bool
    ) -> Parsed:
        offered: Any = None if tools is None else list(tools)
        try:
            message: Any = await asyncio.to_thread(
                self._tokenizer.parse_response,
                text,
                prefix=prompt_ids.tolist(),
                tools=offered,
            )
            reasoning = message.get("reasoning_content") or message.get("thinking")
            found = [call["function"] for call in message.get("tool_calls") or ()]
            calls = [(str(call["name"]), call["arguments"]) for call in found]
            rest = message.get("content")
        except (AttributeError, LookupError, TypeError, ValueError):
            return _unread(text)
        if tools is None and calls:
            # no tool was offered, so what looks like a call is text
            return parse(text, None, None, opened=opened)
        return await asyncio.to_thread(_parsed, text, reasoning, rest, calls)


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
