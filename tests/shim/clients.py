"""The official clients, wired to an app in this process or to a URL."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from importlib import import_module
from pathlib import Path

import anthropic
import openai
import pyarrow as pa
from google import genai

from trajkit_shim.app import create_app
from trajkit_shim.call import Options
from trajkit_shim.chat.images import ImageModel
from trajkit_shim.engines.base import Engine
from trajkit_shim.prompting.render import ChatRenderer
from trajkit_shim.serve import running
from trajkit_shim.sessions.turn_log import TurnLog

# the rest of what a gateway is given is the app's
_LOG_OPTIONS = {"form", "routed_experts", "sampling_masks"}

# a session whose client may set what shapes the distribution
FREE = {"client_sampling": ["temperature", "top_p", "top_k"]}


def http_of(client_class):
    """The HTTP library that this version of a client is built on."""
    return import_module(client_class.__mro__[1].__module__.partition(".")[0])


http = http_of(openai.DefaultAsyncHttpxClient)


class InProcess:
    """A gateway in this process, and clients of it."""

    url = "http://gateway"

    def __init__(
        self, engine: Engine, renderer: ChatRenderer, directory: Path, **options: object
    ) -> None:
        logged = {name: options.pop(name) for name in _LOG_OPTIONS & options.keys()}
        images = isinstance(options.get("images"), ImageModel)
        self.log = TurnLog(directory, images=images, **logged)
        self.app = create_app(engine, renderer, self.log, Options(**options))
        self.http = self._http(http)
        self._anthropic_http = self._http(http_of(anthropic.DefaultAsyncHttpxClient))
        # the ids of sessions by their keys
        self.ids: dict[str, str] = {}

    def _http(self, library):
        transport = library.ASGITransport(app=self.app, raise_app_exceptions=False)
        return library.AsyncClient(transport=transport, base_url=self.url)

    def client(self, key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            api_key=key,
            base_url=f"{self.url}/v1",
            http_client=self.http,
            max_retries=0,
        )

    def anthropic(
        self, key: str = "none", *, path: str = "", **options: object
    ) -> anthropic.AsyncAnthropic:
        """A client that puts the session's key in ``x-api-key``."""
        return anthropic.AsyncAnthropic(
            api_key=key,
            base_url=f"{self.url}{path}",
            http_client=self._anthropic_http,
            max_retries=0,
            # without one the client refuses a large max_tokens
            timeout=60,
            **options,
        )

    def gemini(self, key: str = "none", *, path: str = "") -> genai.Client:
        """A client that puts the session's key in ``x-goog-api-key``."""
        return genai.Client(
            api_key=key,
            http_options=genai.types.HttpOptions(
                base_url=f"{self.url}{path}", httpx_async_client=self.http
            ),
        )

    async def open(self, **fields: object) -> openai.AsyncOpenAI:
        """A client whose key is a new session."""
        reply = await self.http.post("/sessions", json=fields)
        assert reply.status_code == 200, reply.text
        opened = reply.json()
        self.ids[opened["api_key"]] = opened["session_id"]
        return self.client(opened["api_key"])

    async def open_key(self, **fields: object) -> str:
        """The key of a new session."""
        return (await self.open(**fields)).api_key

    def path_of(self, key: "str | openai.AsyncOpenAI") -> str:
        """The trainer's path of a session, by its key or its client."""
        return f"/sessions/{self.ids[getattr(key, 'api_key', key)]}"

    async def session(self, client: openai.AsyncOpenAI) -> dict[str, object]:
        return (await self.http.get(self.path_of(client))).json()

    def turns(self) -> list[dict[str, object]]:
        return read_log(self.log.path).to_pylist()


@asynccontextmanager
async def in_process(
    engine: Engine, renderer: ChatRenderer, directory: Path, **options: object
) -> AsyncIterator[InProcess]:
    gateway = InProcess(engine, renderer, directory, **options)
    async with gateway.http:
        yield gateway
    gateway.log.close()


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
        await self.admin.aclose()
        await self.http.aclose()
        await self._anthropic_http.aclose()
        await asyncio.to_thread(self._running.close)
        self._listener.close()


@asynccontextmanager
async def on_socket(
    engine: Engine, renderer: ChatRenderer, directory: Path, **options: object
) -> AsyncIterator[OnSocket]:
    """When the block is left the gateway has ended and its log is closed."""
    gateway = OnSocket(engine, renderer, directory, **options)
    try:
        yield gateway
    finally:
        await gateway.aclose()


def read_log(path: Path) -> pa.Table:
    with pa.ipc.open_stream(path) as reader:
        return reader.read_all()
