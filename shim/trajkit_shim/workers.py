"""Several gateways in processes of their own, which a trainer sees as one.

Agents talk to the worker that owns their session. Every worker takes the trainer's
requests: it passes them on to the first one, which opens each session at the worker with
the fewest, passes requests about a session on to its owner, and holds the lease of a
pause. The workers share the engine's servers, so a pause of the engine and new weights
are the first worker's; a pause that holds back calls is for all of them.
"""

import asyncio
import json
import multiprocessing
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trajkit_shim.call import Options, read_body
from trajkit_shim.delivery import json_response, unless_left
from trajkit_shim.engines.http import Connections
from trajkit_shim.errors import GatewayError, error_body, retry_header
from trajkit_shim.json_input import Json

_SECRET_HEADER = "x-trajkit-worker"
# of the trainer's paths, those that one worker answers for all
_TRAINER = ("/sessions", "/engine", "/admin")
_EVERYWHERE = ("/engine/pause", "/engine/resume", "/admin/drain")
# what a request may wait for is in its body; the answer itself comes at once
_NO_LIMIT = aiohttp.ClientTimeout(total=None, sock_connect=10.0)


@dataclass(frozen=True)
class Place:
    """A worker's place among the workers. ``secret``: marks requests between them."""

    index: int
    urls: Sequence[str]
    secret: str


@dataclass
class Worker:
    """The ASGI app of one worker, in front of its gateway's app."""

    app: ASGIApp
    place: Place
    options: Options
    _connections: Connections = field(default_factory=Connections)
    # only of the first worker: the owner of each session
    _owners: dict[str, int] = field(default_factory=dict)
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":

            async def closing(message: Message) -> None:
                if message["type"].startswith("lifespan.shutdown"):
                    await self._connections.close()
                await send(message)

            await self.app(scope, receive, closing)
            return
        request = Request(scope, receive, send)
        path, secret = request.url.path, request.headers.get(_SECRET_HEADER, "")
        inside = secrets.compare_digest(secret.encode(), self.place.secret.encode())
        if inside or not path.startswith(_TRAINER):
            await self.app(scope, receive, send)
            return
        try:
            body = await read_body(request, self.options)
            answer = await unless_left(request, self._answer(request, body))
        except ClientDisconnect:
            answer = Response(status_code=499)
        except GatewayError as error:
            answer = json_response(error_body(error), error.status, retry_header(error))
        await answer(scope, receive, send)

    async def _answer(self, request: Request, body: bytes) -> Response:
        path = request.url.path
        if self.place.index != 0:
            return await self._pass_on(0, request, body, inside=False)
        if path == "/sessions":
            if request.method == "POST":
                return await self._open(request, body)
            return await self._everywhere(request, body)
        # a pause is the engine's, which the workers share, unless it holds back calls
        keeps = path == "/engine/pause" and _field(body, "mode", "keep") == "keep"
        if path in _EVERYWHERE and not keeps:
            return await self._everywhere(request, body)
        name = path.removeprefix("/sessions/").partition("/")[0]
        # another path, or an unknown session, is the first worker's to refuse
        return await self._pass_on(self._owners.get(name, 0), request, body)

    async def _open(self, request: Request, body: bytes) -> Response:
        """Open a session at the worker with the fewest open ones."""
        # one after the other: an id is never opened twice, and counts are exact
        async with self._opening:
            owner = self._owners.get(str(_field(body, "session_id", "")))
            if owner is None:
                indices = range(len(self.place.urls))
                loads = await asyncio.gather(*map(self._n_open, indices))
                owner = loads.index(min(loads))
            # if it is known, its owner says that it was opened before
            answer = await self._pass_on(owner, request, body)
            if answer.status_code == 200:
                self._owners[json.loads(bytes(answer.body))["session_id"]] = owner
            return answer

    async def _n_open(self, index: int) -> int:
        status, body = await self._ask(index, "GET", "/healthz", b"", {})
        if status != 200:
            raise _lost(index, f"it answered {status}")
        n_open: int = json.loads(body)["sessions"]["open"]
        return n_open

    async def _everywhere(self, request: Request, body: bytes) -> Response:
        """Have all workers answer; return the first error, or the answers together."""
        indices = range(len(self.place.urls))
        answers = await asyncio.gather(
            *(self._pass_on(index, request, body) for index in indices)
        )
        failed = next((each for each in answers if each.status_code >= 400), None)
        if failed is not None:
            # a worker that has a pause with another mode keeps it
            paused = [i for i in indices if answers[i].status_code != 409]
            if request.url.path == "/engine/pause":
                resume = "POST", "/engine/resume", b"{}", self._headers(0, request)
                await asyncio.gather(*(self._ask(index, *resume) for index in paused))
            return failed
        merged: Json = {}
        for answer in answers:
            for name, value in json.loads(bytes(answer.body)).items():
                before = merged.get(name)
                if isinstance(before, list) or type(before) is int:
                    merged[name] = before + value
                elif before is None:
                    merged[name] = value
        if isinstance(listed := merged.get("sessions"), list):
            limit = int(request.query_params.get("limit", "100"))
            merged["sessions"] = listed[:limit]
        return json_response(merged)

    async def _pass_on(
        self, index: int, request: Request, body: bytes, *, inside: bool = True
    ) -> Response:
        heads = self._headers(index, request)
        if not inside:
            del heads[_SECRET_HEADER]
        target, query = request.url.path, request.url.query
        target += f"?{query}" if query else ""
        status, text = await self._ask(index, request.method, target, body, heads)
        return Response(text, status, media_type="application/json")

    def _headers(self, index: int, request: Request) -> dict[str, str]:
        """Those of a request to another worker, as its client would reach it."""
        host = request.url.hostname or "127.0.0.1"
        host = f"[{host}]" if ":" in host else host
        kept = ("authorization", "x-admin-token", "content-type")
        heads = {k: v for k, v in request.headers.items() if k in kept}
        heads["host"] = f"{host}:{urlsplit(self.place.urls[index]).port}"
        return {**heads, _SECRET_HEADER: self.place.secret}

    async def _ask(
        self,
        index: int,
        method: str,
        target: str,
        body: bytes,
        heads: Mapping[str, str],
    ) -> tuple[int, bytes]:
        session, url = self._connections.session(), self.place.urls[index] + target
        given: dict[str, Any] = {"data": body or None, "headers": heads}
        try:
            async with session.request(
                method, url, timeout=_NO_LIMIT, **given
            ) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _lost(index, f"{type(error).__name__}: {error}") from error


def _field(body: bytes, name: str, default: str) -> object:
    """A field of a body, which may be no JSON."""
    with suppress(ValueError, AttributeError):
        return json.loads(body).get(name, default)
    return default


def _lost(index: int, why: str) -> GatewayError:
    message = f"worker {index} cannot be reached: {why}"
    return GatewayError(message, 503, code="worker_lost")


Work = Callable[[socket.socket, Place, Callable[[str], None]], None]
"""Serve on a listener in a worker's place; call the function with a text once ready."""


def run_workers(
    work: Work,
    listeners: Sequence[socket.socket],
    urls: Sequence[str],
    on_ready: Callable[[str], None],
) -> None:
    """Run ``work``, a picklable function, in a process for each listener.

    ``on_ready``: called with the first worker's text once all are ready. Returns after an
    interrupt, which the workers get as SIGTERM; a second one is passed on, too. An error
    of a worker is raised. `ConnectionError`: a worker ended; then the others are ended.
    """
    context, secret = multiprocessing.get_context("spawn"), secrets.token_hex(16)
    processes, pipes = list[Any](), list[Connection]()
    try:
        for index, listener in enumerate(listeners):
            place = Place(index, list(urls), secret)
            ours, theirs = context.Pipe()
            process = context.Process(target=_run, args=(work, listener, place, theirs))
            process.start()
            theirs.close()
            listener.close()
            processes.append(process)
            pipes.append(ours)
        ready = [_ready(index, pipe) for index, pipe in enumerate(pipes)]
        on_ready(ready[0])
        sentinels = [process.sentinel for process in processes]
        index = sentinels.index(wait(sentinels)[0])
        processes[index].join()
        with suppress(EOFError):
            raise pipes[index].recv()
        code = processes[index].exitcode
        raise ConnectionError(f"worker {index} ended with exit code {code}")
    except KeyboardInterrupt:
        pass
    finally:
        while any(process.is_alive() for process in processes):
            for process in processes:
                process.terminate()
            # a further interrupt makes them end at once
            with suppress(KeyboardInterrupt):
                for process in processes:
                    process.join()


def _ready(index: int, pipe: Connection) -> str:
    """The text of a worker that is ready; raises its error if it fails instead."""
    try:
        answer = pipe.recv()
    except EOFError:
        raise ConnectionError(f"worker {index} ended before it was ready") from None
    if isinstance(answer, Exception):
        raise answer
    return str(answer)


def _run(work: Work, listener: socket.socket, place: Place, pipe: Connection) -> None:
    """In a worker's process: work until SIGTERM, or until the parent is gone."""
    # an interrupt of the terminal is for the parent
    os.setpgrp()

    def end_with_parent() -> None:
        with suppress(EOFError, OSError):
            pipe.recv()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
    try:
        work(listener, place, pipe.send)
    except KeyboardInterrupt:
        pass
    except Exception as error:
        pipe.send(error)
