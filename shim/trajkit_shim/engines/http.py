"""Inference servers reached with JSON over HTTP: requests, answers, errors."""

import asyncio
import contextlib
import json
import socket
import zlib
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, ClassVar, cast

import aiohttp

from trajkit_shim.engines.base import EngineInfo, EngineRequest, Sample, Sampling
from trajkit_shim.engines.checks import accept
from trajkit_shim.engines.payloads import read_experts
from trajkit_shim.errors import EngineError
from trajkit_shim.json_input import Json

# A long reply takes minutes; a running server accepts a connection at once.
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=1800.0)
# The servers close an idle connection after 5 seconds (uvicorn), and a call that is sent
# at that moment is lost.
_IDLE_SECONDS = 3.0
# A machine that is gone is noticed after half a minute, also while its reply is awaited.
# Not every system has every option.
_KEEP_ALIVE = [
    (level, getattr(socket, name), value)
    for level, name, value in (
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 15),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 5),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", 30_000),
    )
    if hasattr(socket, name)
]
_RETRY_AFTER = 5

# raised by a reply with missing, mistyped or too large fields
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def _open_socket(address: tuple[Any, ...]) -> socket.socket:
    opened = socket.socket(*address[:3])
    for option in _KEEP_ALIVE:
        opened.setsockopt(*option)
    return opened


class Connections:
    """The connections of one engine. They belong to the event loop that uses them."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    def session(self) -> aiohttp.ClientSession:
        """Return the session, which the first call opens; `EngineError` once closed."""
        if self._closed:
            raise EngineError("the connections to the engine are closed", 503)
        if self._session is None:
            # sessions bound the number of concurrent calls, so the pool does not
            connector = aiohttp.TCPConnector(
                limit=0, keepalive_timeout=_IDLE_SECONDS, socket_factory=_open_socket
            )
            self._session = aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT)
        return self._session

    async def close(self) -> None:
        """Close the connections."""
        self._closed = True
        if self._session is not None:
            await self._session.close()


class EngineClient:
    """One server or router; ``name`` is its name in error messages.

    ``hints`` say what a server needs that answers 404 at a path. `get` and `post` raise
    `EngineError`: 400 if the server rejects the request, 5xx if it fails, cannot be
    reached, or does not return what is expected.
    """

    def __init__(
        self,
        name: str,
        base_url: str,
        connections: Connections,
        hints: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.name, self.base_url = name, base_url.rstrip("/")
        self._connections, self._hints = connections, hints

    async def get(self, path: str) -> Json:
        """Return the JSON object at a path."""
        return await self.post(path, None)

    async def post(
        self, path: str, body: Json | None, headers: Mapping[str, str] | None = None
    ) -> Json:
        """Send a request and return the JSON object of its answer."""
        try:
            async with self._connections.session().request(
                "GET" if body is None else "POST",
                self.base_url + path,
                data=None if body is None else json.dumps(body).encode(),
                headers={"Content-Type": "application/json", **(headers or {})},
                allow_redirects=False,
            ) as answer:
                text = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = f"cannot be reached: {type(error).__name__}: {error}"
            message = f"the {self.name} server at {self.base_url} {reason}"
            if isinstance(error, aiohttp.ClientConnectorError):
                # a server that restarts is back soon
                raise EngineError(message, 503, retry_after=_RETRY_AFTER) from error
            raise EngineError(message) from error
        if answer.status >= 300:
            raise self._error(answer.status, text, path)
        where = f"{path} of the {self.name} server"
        if answer.content_type == "text/event-stream":
            text = _only_event(text, where)
        try:
            # some paths have no body
            value = json.loads(text or b"{}")
        except ValueError as error:
            raise EngineError(f"{where}: {error}", answered=200) from error
        if not isinstance(value, dict):
            raise EngineError(f"{where} gave no object: {value!r}", answered=200)
        return value

    async def notify(self, path: str, body: Json) -> None:
        """Send a request whose answer does not matter; ignore failures."""
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(5.0):
                await self.post(path, body)

    def _error(self, status: int, body: bytes, path: str) -> EngineError:
        """The error of an answer: its message, or else the beginning of its text."""
        text, message = body.decode("utf-8", "replace"), None
        with contextlib.suppress(ValueError, LookupError, TypeError):
            error = json.loads(text)["error"]
            message = error["message"] if isinstance(error, dict) else error
        if not isinstance(message, str):
            message = text[:400]
        if status == 404 and path in self._hints:
            message += f" for {path}: {self._hints[path]}"
        # only a bad request is the client's fault
        shown = {400: 400, 413: 400, 422: 400, 429: 503, 503: 503}.get(status, 502)
        reason = f"the {self.name} server answered {status}: {message}"
        return EngineError(reason, shown, answered=status)


def _only_event(text: bytes, where: str) -> bytes:
    """The one event of a proxy that streams each reply, also where nobody asked for it."""
    events = [
        event.removeprefix(b"data:").strip()
        for event in text.replace(b"\r\n", b"\n").split(b"\n\n")
        if event.startswith(b"data:")
    ]
    if len(events) != 2 or events[1] != b"[DONE]":
        message = f"{where} streamed {len(events)} events, but one reply was asked for"
        raise EngineError(message, answered=200)
    return events[0]


class HttpEngine(ABC):
    """What the engines on an HTTP server have in common.

    Parameters
    ----------
    *base_urls : str
        Server or router, for example ``http://127.0.0.1:30000``. With several servers
        of one model, each session stays on one of them.
    vocab_size : int
        Of the model (`engines.model_config.vocab_size`). The servers do not report it,
        and an id outside it can crash them.
    check_prompts : bool, optional
        Have the server return each prompt, which must be the one that was sent.
    experts_per_token : int, optional
        Have it return the experts that each token was routed to, this many per layer.
    sampling_masks : bool, optional
        Have it return the ids that could have been drawn for each output id.
    """

    server_name: ClassVar[str]
    generate_path: ClassVar[str]
    hints: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __init__(
        self,
        *base_urls: str,
        vocab_size: int,
        check_prompts: bool = False,
        experts_per_token: int | None = None,
        sampling_masks: bool = False,
    ) -> None:
        self.sampling_masks = sampling_masks
        self._vocab_size = vocab_size
        self._check_prompts = check_prompts
        self._experts_per_token = experts_per_token
        self._connections = Connections()
        self._servers = [self._server(url) for url in base_urls]
        self._asked: asyncio.Task[EngineInfo] | None = None
        self._unfinished = set[asyncio.Task[None]]()

    async def info(self) -> EngineInfo:
        """Model name, vocabulary size and context length; requested once."""
        if self._asked is None:
            self._asked = asyncio.create_task(self._ask_info())
        asked = self._asked
        try:
            # those who wait share the answer, also if the first one leaves
            return await asyncio.shield(asked)
        except EngineError:
            if self._asked is asked:
                self._asked = None
            raise

    async def generate(self, request: EngineRequest) -> Sample:
        """See `Engine.generate`."""
        # its prefix cache has the session's earlier calls
        place = zlib.crc32(request.session_id.encode()) % len(self._servers)
        server = self._servers[place]
        await self.info()
        if request.images:
            # megabytes to encode
            body, headers = await asyncio.to_thread(self._body, request)
        else:
            body, headers = self._body(request)
        try:
            reply = await server.post(self.generate_path, body, headers)
        except (asyncio.CancelledError, EngineError) as error:
            # a server behind a proxy would continue to sample
            if getattr(error, "answered", None) is None:
                await self._finish(server.notify(*self._abort(request.request_id)))
            raise
        if self._experts_per_token is not None:
            # about ten million numbers for a long call
            return await asyncio.to_thread(self._read, reply, request)
        return self._read(reply, request)

    def _read(self, reply: Mapping[str, Any], request: EngineRequest) -> Sample:
        with reading(self.server_name, f"reply to {self.generate_path}"):
            said = self._answer(reply, request)
            if self._check_prompts and said["prompt_ids"] is None:
                raise ValueError("no prompt_token_ids, which were asked for")
            experts, packed = None, said.pop("routed_experts")
            if (per_token := self._experts_per_token) is not None:
                n_tokens = len(request.prompt_ids) + len(said["output_ids"])
                experts = read_experts(self.server_name, packed, n_tokens, per_token)
            return accept(request, self.server_name, **said, routed_experts=experts)

    async def close(self) -> None:
        """Close the connections."""
        if self._asked is not None:
            self._asked.cancel()
            await asyncio.wait([self._asked])
        if self._unfinished:
            await asyncio.wait(self._unfinished)
        await self._connections.close()

    @abstractmethod
    def _body(self, request: EngineRequest) -> tuple[Json, dict[str, str]]:
        """The body and the headers of a call."""

    @abstractmethod
    def _answer(
        self, reply: Mapping[str, Any], request: EngineRequest
    ) -> dict[str, Any]:
        """What a reply says, as arguments of `accept`; experts as the server packs them."""

    @abstractmethod
    def _abort(self, request_id: str) -> tuple[str, Json]:
        """The path and the body that abort a call."""

    async def _ask_info(self) -> EngineInfo:
        return await self._describe((await self._members())[0])

    async def _describe(self, server: EngineClient) -> EngineInfo:
        served = cast(Any, await server.get("/v1/models"))
        with reading(self.server_name, "id and max_model_len of /v1/models"):
            model = served["data"][0]
            return EngineInfo(
                model=str(model["id"]),
                vocab_size=self._vocab_size,
                max_context_tokens=int(model["max_model_len"]),
            )

    async def _members(self) -> Sequence[EngineClient]:
        """The servers of the model; at least one."""
        return self._servers

    async def _finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Do what has to be done also if the caller is cancelled."""
        task = asyncio.create_task(work)
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)
        await asyncio.shield(task)

    def _server(self, url: str) -> EngineClient:
        return EngineClient(self.server_name, url, self._connections, self.hints)

    async def _order(self, path: str, body: Json) -> list[Json]:
        """Send a request to all servers; return once each has answered or failed."""
        orders = [server.post(path, body) for server in await self._members()]
        answers = await asyncio.gather(*orders, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return cast("list[Json]", answers)


@contextlib.contextmanager
def reading(server: str, what: str) -> Iterator[None]:
    """Turn what an invalid reply raises in this context into an `EngineError`."""
    try:
        yield
    except _UNREADABLE as error:
        reason = f"{type(error).__name__}: {error}"
        message = f"the {server} server's {what} cannot be read: {reason}"
        raise EngineError(message) from error


def sampling_fields(sampling: Sampling, names: Mapping[str, str]) -> Json:
    """Return the parameters that are set, under the names of a server's API."""
    values = {**asdict(sampling), "extra": None}
    for name in ("stop", "stop_token_ids"):
        values[name] = list(values[name]) or None
    if sampling.structural_tag is not None:
        # SGLang and vLLM take its JSON as a text
        values["structural_tag"] = json.dumps(sampling.structural_tag)
    return {names.get(k, k): value for k, value in values.items() if value is not None}
