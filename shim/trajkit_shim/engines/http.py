"""Inference servers reached with JSON over HTTP: requests, streams, errors."""

import asyncio
import contextlib
import json
import operator
import socket
import zlib
from collections.abc import (
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import asdict
from typing import Any, ClassVar, cast

import httpx
import numpy as np
import numpy.typing as npt

from trajkit_shim.engines.base import EngineInfo, EngineRequest, Sampling
from trajkit_shim.errors import EngineError
from trajkit_shim.json_input import Json

# A long reply takes minutes; a running server accepts a connection at once.
_TIMEOUT = httpx.Timeout(1800.0, connect=10.0)
# A machine that is gone is noticed after half a minute, also while its reply is awaited.
# Not every system has all of these options.
_KEEP_ALIVE = tuple(
    (level, getattr(socket, name), value)
    for level, name, value in (
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 15),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 5),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", 30_000),
    )
    if hasattr(socket, name)
)
_RETRY_AFTER = 5

# raised by a reply with missing, mistyped or too large fields
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class EngineServer:
    """One server or router; ``name`` is its name in error messages.

    All methods raise `EngineError`: 400 if the server rejects the request, 5xx if it
    fails, cannot be reached, or does not return what is expected.
    """

    def __init__(
        self, name: str, base_url: str, client: httpx.AsyncClient | None = None
    ) -> None:
        self.name = name
        self.base_url = base_url.rstrip("/")
        # sessions bound the number of concurrent calls, so the pool does not
        self.client = client or httpx.AsyncClient(
            timeout=_TIMEOUT,
            transport=httpx.AsyncHTTPTransport(
                limits=httpx.Limits(max_connections=None),
                socket_options=_KEEP_ALIVE,
                trust_env=False,
            ),
            trust_env=False,
        )

    async def get(self, path: str) -> Json:
        """Return the JSON object at a path."""
        async with self._answer("GET", path) as response:
            return self._object(path, await response.aread())

    async def post(
        self, path: str, body: Json, headers: Mapping[str, str] | None = None
    ) -> Json:
        """Send a request and return the JSON object of its answer."""
        async with self._answer("POST", path, body, headers) as response:
            return self._object(path, await response.aread())

    async def events(
        self, path: str, body: Json, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[Json]:
        """Yield the objects of a server-sent event stream, which ends with ``[DONE]``."""
        async with self._answer("POST", path, body, headers) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                value = self._object(path, data)
                if value.get("error") is not None:
                    raise self._error(502, data)
                yield value
        raise EngineError(f"{path} of the {self.name} server broke off its stream")

    async def notify(self, path: str, body: Json) -> None:
        """Send a request whose answer does not matter; ignore connection failures."""
        with contextlib.suppress(httpx.HTTPError):
            await self.client.post(self.base_url + path, json=body, timeout=5.0)

    async def close(self) -> None:
        """Close the connections."""
        await self.client.aclose()

    @contextlib.asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """Yield the answer to a request, to be read in this context."""
        url = self.base_url + path
        try:
            async with self.client.stream(
                method, url, json=body, headers=headers
            ) as response:
                if response.status_code >= 400:
                    await response.aread()
                    raise self._error(response.status_code, response.text)
                yield response
        except httpx.HTTPError as error:
            reason = f"cannot be reached: {type(error).__name__}: {error}"
            text = f"the {self.name} server at {self.base_url} {reason}"
            if isinstance(error, httpx.ConnectError):
                # a server that restarts is back soon
                raise EngineError(text, 503, retry_after=_RETRY_AFTER) from error
            raise EngineError(text) from error

    def _object(self, path: str, text: str | bytes) -> Json:
        where = f"{path} of the {self.name} server"
        try:
            value = json.loads(text)
        except ValueError as error:
            raise EngineError(f"{where}: {error}", answered=200) from error
        if not isinstance(value, dict):
            raise EngineError(f"{where} gave no object: {value!r}", answered=200)
        return value

    def _error(self, status: int, text: str) -> EngineError:
        """The error of an answer: its message, or else the beginning of its text."""
        message: object = None
        with contextlib.suppress(ValueError, LookupError, TypeError):
            error = json.loads(text)["error"]
            message = error["message"] if isinstance(error, dict) else error
        if not isinstance(message, str):
            message = text[:400]
        # only a bad request is the client's fault
        shown = {400: 400, 413: 400, 422: 400, 429: 503, 503: 503}.get(status, 502)
        reason = f"the {self.name} server answered {status}: {message}"
        return EngineError(reason, shown, answered=status)


class HttpEngine:
    """What the engines on an HTTP server have in common.

    Parameters
    ----------
    *base_urls : str
        Server or router, for example ``http://127.0.0.1:30000``. With several servers
        of one model, each session stays on one of them.
    vocab_size : int
        Of the model (`engines.model_config.vocab_size`). The servers do not report it,
        and an id outside it can crash them.
    client : httpx.AsyncClient, optional
        Used instead of a new client; closed with the engine.
    """

    server_name: ClassVar[str]
    generate_path: ClassVar[str]

    def __init__(
        self, *base_urls: str, vocab_size: int, client: httpx.AsyncClient | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self._servers = [
            EngineServer(self.server_name, url, client) for url in base_urls
        ]
        self._info: EngineInfo | None = None

    async def info(self) -> EngineInfo:
        """Model name, vocabulary size and context length; requested once."""
        if self._info is None:
            served = cast(Any, await (await self._members())[0].get("/v1/models"))
            with reading(self.server_name, "id and max_model_len of /v1/models"):
                model = served["data"][0]
                self._info = EngineInfo(
                    model=str(model["id"]),
                    vocab_size=self._vocab_size,
                    max_context_tokens=int(model["max_model_len"]),
                )
        return self._info

    async def close(self) -> None:
        """Close the connections."""
        for server in self._servers:
            await server.close()

    async def _members(self) -> Sequence[EngineServer]:
        """The servers of the model; at least one."""
        return self._servers

    async def _exchange(
        self,
        request: EngineRequest,
        body: Json,
        headers: Mapping[str, str],
        add: Callable[[Json], list[int]],
        abort: tuple[str, Json],
    ) -> None:
        """Send a call to its session's server, and ``add`` the events of its reply.

        A reply that is not streamed is one event. ``add`` returns an event's new output
        ids. If the call fails or is cancelled, ``abort`` (path and body) is sent, because
        the server would continue to sample.
        """
        # its prefix cache has the session's earlier calls
        place = zlib.crc32(request.session_id.encode()) % len(self._servers)
        server, path = self._servers[place], self.generate_path
        try:
            if request.on_tokens is None:
                add(await server.post(path, body, headers))
                return
            async for event in server.events(path, {**body, "stream": True}, headers):
                request.on_tokens(add(event))
        except (asyncio.CancelledError, EngineError):
            await asyncio.shield(server.notify(*abort))
            raise


@contextlib.contextmanager
def reading(server: str, what: str) -> Iterator[None]:
    """Turn what an invalid reply raises in this context into an `EngineError`."""
    try:
        yield
    except _UNREADABLE as error:
        reason = f"{type(error).__name__}: {error}"
        message = f"the {server} server's {what} cannot be read: {reason}"
        raise EngineError(message) from error


def token_ids(values: Iterable[Any]) -> npt.NDArray[np.int32]:
    """Return the ids of a reply; raise unless each is an integer within int32."""
    return np.array(list(map(operator.index, values)), np.int32)


def logprobs_of(
    scored: Sequence[tuple[float, object]], labels: Sequence[object]
) -> npt.NDArray[np.float32]:
    """Return logprobs given with their tokens, which must be ``labels``."""
    if len(scored) != len(labels):
        counts = f"{len(scored)} tokens for {len(labels)} output ids"
        raise ValueError(f"logprobs of {counts}")
    for place, ((_, token), label) in enumerate(zip(scored, labels, strict=True)):
        if token != label:
            raise ValueError(f"logprob {place} is of token {token}, not {label}")
    return np.array([logprob for logprob, _ in scored], np.float32)


def as_count(value: object) -> int | None:
    """Return a number of tokens, or None if the server does not report it."""
    return value if isinstance(value, int) else None


def sampling_fields(sampling: Sampling, names: Mapping[str, str]) -> Json:
    """Return the parameters that are set, under the names of a server's API."""
    values = {**asdict(sampling), "extra": None}
    for name in ("stop", "stop_token_ids"):
        values[name] = list(values[name]) or None
    if sampling.structural_tag is not None:
        # SGLang and vLLM take its JSON as a text
        values["structural_tag"] = json.dumps(sampling.structural_tag)
    return {names.get(k, k): value for k, value in values.items() if value is not None}
