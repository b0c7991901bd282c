"""Gateways of tests, and their clients: by hand in any protocol, and the official ones."""

import asyncio
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import anthropic
import openai
import pyarrow as pa
from google import genai

import trajkit as tk
from trajkit_shim.app import create_app
from trajkit_shim.call import Options
from trajkit_shim.chat.images import ImageModel
from trajkit_shim.engines.base import Engine
from trajkit_shim.prompting.render import ChatRenderer
from trajkit_shim.protocols import PROTOCOLS
from trajkit_shim.serve import running
from trajkit_shim.sessions.turn_log import TurnLog

# the rest of what a gateway is given is the app's
_LOG_OPTIONS = {"attributed", "form", "routed_experts", "sampling_masks"}
USER = {"role": "user", "content": "hi"}
# Each protocol by its name in the log: what reads and writes it, its path, the shortest
# body that says "hi", and the field that offers the tool f.
BY_NAME = {protocol.name: protocol for protocol in PROTOCOLS}
NAMES = ("openai_chat", "anthropic", "openai_responses", "gemini")
PARAMETERS = {"type": "object", "properties": {"n": {"type": "number"}}}
FUNCTION = {"name": "f", "parameters": PARAMETERS}
PATHS = {
    "openai_chat": "/v1/chat/completions",
    "anthropic": "/v1/messages",
    "openai_responses": "/v1/responses",
    "gemini": "/v1beta/models/m:generateContent",
}
BODIES = {
    "openai_chat": {"messages": [USER]},
    "anthropic": {"messages": [USER], "max_tokens": 50},
    "openai_responses": {"input": "hi"},
    "gemini": {"contents": [{"parts": [{"text": "hi"}]}]},
}
TOOLS = {
    "openai_chat": [{"type": "function", "function": FUNCTION}],
    "anthropic": [{"name": "f", "input_schema": PARAMETERS}],
    "openai_responses": [{"type": "function", **FUNCTION}],
    "gemini": [{"functionDeclarations": [FUNCTION]}],
}
# the field of a body that has its messages
FIELDS = dict(zip(NAMES, ("messages", "messages", "input", "contents"), strict=True))


def image_part(name: str, media_type: str, data: str) -> dict[str, Any]:
    """A part of a message of a protocol: an image, whose bytes are base64."""
    url = f"data:{media_type};base64,{data}"
    source = {"type": "base64", "media_type": media_type, "data": data}
    return {
        "openai_chat": {"type": "image_url", "image_url": {"url": url}},
        "anthropic": {"type": "image", "source": source},
        "openai_responses": {"type": "input_image", "image_url": url, "detail": "auto"},
        "gemini": {"inlineData": {"mimeType": media_type, "data": data}},
    }[name]


def saying(name: str, *parts: Any) -> dict[str, Any]:
    """A user's message of texts and parts, in a protocol."""
    kind = {} if name == "gemini" else {"type": "text"}
    kind |= {"type": "input_text"} if name == "openai_responses" else {}
    shown = [
        {**kind, "text": part} if isinstance(part, str) else part for part in parts
    ]
    return {"role": "user", "parts" if name == "gemini" else "content": shown}


def http_of(client_class):
    """The HTTP library that this version of a client is built on."""
    return import_module(client_class.__mro__[1].__module__.partition(".")[0])


http = http_of(openai.DefaultAsyncHttpxClient)


class Session:
    """A session of a gateway, and what its clients and its trainer ask."""

    def __init__(self, gateway: "InProcess", opened: Mapping[str, Any]) -> None:
        self.gateway, self.key = gateway, opened["api_key"]
        self.id = opened["session_id"]
        self.path = f"/sessions/{self.id}"

    @property
    def openai(self) -> openai.AsyncOpenAI:
        return self.gateway.client(self.key)

    async def post(
        self, name="openai_chat", status=200, *, path="", headers=None, **fields
    ):
        """The answer to the short body of a protocol, with other fields."""
        answer = await self.gateway.http.post(
            path or PATHS[name],
            headers={"x-session-key": self.key, **(headers or {})},
            json={**BODIES[name], **fields},
        )
        assert answer.status_code == status, answer.text
        return answer

    async def ask(self, *messages, **fields):
        """The message of a chat completion; a text is a user's message."""
        asked = [
            {**USER, "content": each} if isinstance(each, str) else each
            for each in messages
        ]
        answer = await self.post(messages=asked or [USER], **fields)
        return answer.json()["choices"][0]["message"]

    async def error(self, status: int, name="openai_chat", **fields):
        """The error of a call that fails."""
        return (await self.post(name, status, **fields)).json()["error"]

    async def shown(self):
        return (await self.gateway.http.get(self.path)).json()

    async def end(self, how="finish", status=200, **fields):
        """The answer to the trainer, who ends the session, or drops it."""
        answer = await self.gateway.http.post(f"{self.path}/{how}", json=fields)
        assert answer.status_code == status, answer.text
        return answer.json()


class InProcess:
    """A gateway in this process, until `aclose`."""

    url = "http://gateway"

    def __init__(
        self, engine: Engine, renderer: ChatRenderer, directory: Path, **options: object
    ) -> None:
        logged = {name: options.pop(name) for name in _LOG_OPTIONS & options.keys()}
        images = isinstance(options.get("images"), ImageModel)
        self.engine, self.renderer, self.directory = engine, renderer, directory
        self.log = TurnLog(directory, images=images, **logged)
        self.app = create_app(engine, renderer, self.log, Options(**options))
        self.http = self._http(http)
        self._anthropic_http = self._http(http_of(anthropic.DefaultAsyncHttpxClient))

    def _http(self, library):
        transport = library.ASGITransport(app=self.app, raise_app_exceptions=False)
        return library.AsyncClient(transport=transport, base_url=self.url)

    def client(self, key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            api_key=key, base_url=f"{self.url}/v1", http_client=self.http, max_retries=0
        )

    def anthropic(self, key: str) -> anthropic.AsyncAnthropic:
        """A client that puts the session's key in ``x-api-key``."""
        return anthropic.AsyncAnthropic(
            api_key=key,
            base_url=self.url,
            http_client=self._anthropic_http,
            max_retries=0,
            # without one the client refuses a large max_tokens
            timeout=60,
        )

    def gemini(self, key: str) -> genai.Client:
        """A client that puts the session's key in ``x-goog-api-key``."""
        options = genai.types.HttpOptions(
            base_url=self.url, httpx_async_client=self.http
        )
        return genai.Client(api_key=key, http_options=options)

    async def open(self, **fields: object) -> Session:
        reply = await self.http.post("/sessions", json=fields)
        assert reply.status_code == 200, reply.text
        return Session(self, reply.json())

    async def post(self, path: str, status=200, **fields: object):
        """What a trainer is answered."""
        answer = await self.http.post(path, json=fields)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def get(self, path: str):
        return (await self.http.get(path)).json()

    def turns(self) -> list[dict[str, Any]]:
        """The turns as they were written, without what became known of them later."""
        return read_log(self.log.path).to_pylist()

    def table(self) -> pa.Table:
        return tk.read_turns(self.directory)

    async def aclose(self) -> None:
        await self.http.aclose()
        await self._anthropic_http.aclose()
        self.log.close()

    def sessions(self) -> list[dict[str, Any]]:
        return tk.read_sessions(self.directory).to_pylist()


class OnSocket(InProcess):
    """A gateway that listens on a socket, and clients that can hang up.

    A connection holds little of what is on its way. With ``at_head`` a client's
    requests to it can be cut off at the head of their answers.
    """

    def __init__(self, *given: object, **options: object) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.at_head = None
        super().__init__(*given, **options)
        self.admin = http.AsyncClient(base_url=self.url, trust_env=False)
        self._running = ExitStack()
        self._running.enter_context(running(self.app, listener=self._listener))

    def _http(self, library):
        async def head(_):
            if self.at_head is not None:
                await self.at_head()

        return library.AsyncClient(
            base_url=self.url,
            event_hooks={"response": [head]},
            timeout=60,
            trust_env=False,
        )

    async def aclose(self) -> None:
        for client in (self.admin, self.http, self._anthropic_http):
            await client.aclose()
        # the gateway ends, and closes its log
        await asyncio.to_thread(self._running.close)
        self._listener.close()


def read_log(path: Path) -> pa.Table:
    with pa.ipc.open_stream(path) as reader:
        return reader.read_all()
