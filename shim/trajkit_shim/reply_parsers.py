"""Parsers of whole replies that are not the gateway's own.

What they make of a reply is what the client sees and what is known again in its echo.
The ids stay those that were sampled. A parser that gives a call's arguments as a value
has lost their spelling: where the reply holds the same value as JSON, the text of that is
taken. No client is told of a reply before it is whole.
"""

import asyncio
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import httpx

from trajkit_shim.attribution import Ids
from trajkit_shim.engine import EngineError
from trajkit_shim.engine_http import EngineServer
from trajkit_shim.parse import THINK, Parsed, parse
from trajkit_shim.parsers import ToolCall, Tools

if TYPE_CHECKING:
    from trajkit_shim.render import ChatRenderer


class ReplyParser(Protocol):
    """Takes a whole reply apart."""

    async def parse(
        self, text: str, tools: Tools | None, prompt_ids: Ids, *, opened: bool
    ) -> Parsed:
        """A reply's reasoning, text and calls.

        Parameters
        ----------
        text : str
            As it was sampled, without the token that ends it.
        tools : sequence of dict or None
            Those on offer.
        prompt_ids : ndarray of int32, shape (n_prompt,)
        opened : bool
            The prompt ends inside of the reasoning.

        Raises
        ------
        EngineError
            The parser cannot be reached.
        """
        ...

    async def close(self) -> None:
        """Close its connections."""
        ...


class SGLangParser:
    """SGLang's own parsers, asked of its server (0.5.23).

    The server names them, as it was started: ``--tool-call-parser`` and
    ``--reasoning-parser``. Without the one or the other that part is not looked for.

    Parameters
    ----------
    base_url : str
    client : httpx.AsyncClient, optional
        Used in place of one made here; closed with this.
    """

    def __init__(self, base_url: str, client: httpx.AsyncClient | None = None) -> None:
        self._server = EngineServer("SGLang", base_url, client)
        self._names: tuple[str | None, str | None] | None = None

    async def names(self) -> tuple[str | None, str | None]:
        """The names of the parsers of calls and of reasoning.

        Raises
        ------
        EngineError
            The server cannot be asked, or has neither.
        """
        if self._names is None:
            told = await self._server.get("/server_info")
            calls, reasoning = (
                str(told[name]) if told.get(name) else None
                for name in ("tool_call_parser", "reasoning_parser")
            )
            if calls is None and reasoning is None:
                raise EngineError(
                    "the SGLang server was started with neither --tool-call-parser nor "
                    "--reasoning-parser"
                )
            self._names = calls, reasoning
        return self._names

    async def parse(
        self, text: str, tools: Tools | None, prompt_ids: Ids, *, opened: bool
    ) -> Parsed:
        """See `ReplyParser`. What the server refuses stays text."""
        calls_parser, reasoning_parser = await self.names()
        reasoning, said, calls = "", text, []
        try:
            if reasoning_parser is not None:
                told = await self._server.post(
                    "/separate_reasoning",
                    {
                        "text": f"{THINK}{text}" if opened else text,
                        "reasoning_parser": reasoning_parser,
                    },
                )
                reasoning = str(told.get("reasoning_text") or "")
                said = str(told.get("text") or "")
            if calls_parser is not None and tools:
                told = await self._server.post(
                    "/parse_function_call",
                    {
                        "text": said,
                        "tools": list(tools),
                        "tool_call_parser": calls_parser,
                    },
                )
                said = str(told.get("normal_text") or "")
                found: Any = told.get("calls") or []
                calls = [(str(one["name"]), str(one["parameters"])) for one in found]
        except EngineError as error:
            if error.status != 400:
                raise
            return _unread(text)
        except (LookupError, TypeError) as error:
            raise EngineError(
                f"the SGLang server's calls cannot be read: {error}"
            ) from error
        return await asyncio.to_thread(_parsed, text, reasoning, said, calls)

    async def close(self) -> None:
        """Close the connections."""
        await self._server.close()


class SchemaParser:
    """The response template of a tokenizer (``parse_response`` of transformers 5).

    Parameters
    ----------
    renderer : ChatRenderer

    Raises
    ------
    ValueError
        The tokenizer has no response template, or none that can be read.
    """

    def __init__(self, renderer: "ChatRenderer") -> None:
        self._tokenizer = renderer.tokenizer
        if getattr(self._tokenizer, "response_template", None) is None:
            raise ValueError("the tokenizer has no response_template")
        # what is wrong with the template is no reply's fault
        self._tokenizer.parse_response("", prefix="")

    async def parse(
        self, text: str, tools: Tools | None, prompt_ids: Ids, *, opened: bool
    ) -> Parsed:
        """See `ReplyParser`. What the template does not read stays text."""
        return await asyncio.to_thread(self._parse, text, tools, prompt_ids, opened)

    def _parse(
        self, text: str, tools: Tools | None, prompt_ids: Ids, opened: bool
    ) -> Parsed:
        try:
            message: Any = self._tokenizer.parse_response(
                text,
                prefix=prompt_ids.tolist(),
                tools=None if tools is None else list(tools),
            )
            thought = message.get("reasoning_content") or message.get("thinking") or ""
            found = [one["function"] for one in message.get("tool_calls") or ()]
            calls = [(str(one["name"]), _as_text(one["arguments"])) for one in found]
            said = str(message.get("content") or "")
        except (AttributeError, LookupError, TypeError, ValueError):
            return _unread(text)
        if tools is None and calls:
            # nobody offered a tool: what looks like a call is text
            return parse(text, tools=None, opened=opened)
        return _parsed(text, str(thought), said, calls)

    async def close(self) -> None:
        """It has none."""


def _as_text(arguments: object) -> str:
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)


def _unread(text: str) -> Parsed:
    return Parsed(parts=(text,) if text else (), sampled=text, ill_formed=True)


def _parsed(
    text: str, reasoning: str, said: str, calls: Iterable[tuple[str, str]]
) -> Parsed:
    """What a parser found in a text, with arguments as they were sampled."""
    parts: list[str | ToolCall] = [said] if said else []
    at = 0
    for name, arguments in calls:
        sampled, at = as_sampled(arguments, text, at)
        parts.append(ToolCall(name, sampled))
    return Parsed(parts=tuple(parts), sampled=text, reasoning=reasoning or None)


def as_sampled(arguments: str, text: str, start: int) -> tuple[str, int]:
    """The JSON in a text, from ``start`` on, that has the value of ``arguments``.

    Returns
    -------
    tuple of str and int
        It and where it ends; ``arguments`` and ``start`` where there is none.
    """
    decoder = json.JSONDecoder()
    try:
        wanted = decoder.decode(arguments)
    except (ValueError, RecursionError):
        return arguments, start
    at = text.find("{", start)
    while at >= 0 and isinstance(wanted, dict):
        try:
            value, stop = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            value, stop = None, at
        if value == wanted:
            return text[at:stop], stop
        at = text.find("{", at + 1)
    return arguments, start
