"""The real openai client, wired to an app in this process or to a URL."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path

import openai
import pyarrow as pa

from trajkit_shim.app import create_app
from trajkit_shim.engine import Engine
from trajkit_shim.log import TurnLog
from trajkit_shim.render import ChatRenderer

# the HTTP library that this version of the client is built on
http = import_module(
    openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0]
)


class InProcess:
    """A gateway in this process, and clients of it."""

    def __init__(
        self, engine: Engine, renderer: ChatRenderer, directory: Path, **options: int
    ) -> None:
        self.log = TurnLog(directory)
        self.app = create_app(engine, renderer, self.log, **options)
        transport = http.ASGITransport(app=self.app, raise_app_exceptions=False)
        self.http = http.AsyncClient(transport=transport, base_url="http://gateway")

    def client(self, key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            api_key=key,
            base_url="http://gateway/v1",
            http_client=self.http,
            max_retries=0,
        )

    async def open(self, **fields: object) -> openai.AsyncOpenAI:
        """A client whose key is a new session."""
        reply = await self.http.post("/sessions", json=fields)
        assert reply.status_code == 200, reply.text
        return self.client(reply.json()["api_key"])

    async def session(self, client: openai.AsyncOpenAI) -> dict[str, object]:
        return (await self.http.get(f"/sessions/{client.api_key}")).json()

    def turns(self) -> list[dict[str, object]]:
        return read_log(self.log.path).to_pylist()


@asynccontextmanager
async def in_process(
    engine: Engine, renderer: ChatRenderer, directory: Path, **options: int
) -> AsyncIterator[InProcess]:
    gateway = InProcess(engine, renderer, directory, **options)
    async with gateway.http:
        yield gateway
    gateway.log.close()


def read_log(path: Path) -> pa.Table:
    with pa.ipc.open_stream(path) as reader:
        return reader.read_all()
