"""Several gateways in processes of their own, which a trainer sees as one.

Agents talk to the worker that owns their session. Every worker passes the trainer's
requests on to the first one, which opens each session at the worker with the fewest, and
holds the lease of a pause: the workers share the engine's servers. A pause that holds
back calls is for all of them.
"""

import asyncio
import json
import multiprocessing
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from trajkit_shim.call import Options
from trajkit_shim.delivery import json_response, unless_left
from trajkit_shim.errors import GatewayError, error_body, retry_header
from trajkit_shim.json_input import read_body
from trajkit_shim.serve import url_of

_SECRET = "x-trajkit-worker"  # header
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


class Worker:
    """The ASGI app of one worker, in front of its gateway's app."""

    def __init__(self, app: ASGIApp, place: Place) -> None:
        self._app, self._place = app, place
        # only of the first worker: the owner of each session
        self._owners: dict[str, int] = {}
        self._opening = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = self._app
        if scope["type"] == "http" and scope["path"].startswith(_TRAINER):
            request = Request(scope, receive, send)
            secret = request.headers.get(_SECRET, "").encode()
            if not secrets.compare_digest(secret, self._place.secret.encode()):
                try:
                    body = await read_body(request.stream(), Options().max_body_bytes)
                    answer = await unless_left(request, self._answer(request, body))
                except ClientDisconnect:
                    answer = Response(status_code=499)
                except GatewayError as error:
                    shown, headers = error_body(error), retry_header(error)
                    answer = json_response(shown, error.status, headers)
        await answer(scope, receive, send)

    async def _answer(self, request: Request, body: bytes) -> Response:
        path, method = request.url.path, request.method
        if self._place.index != 0:
            return await self._ask(0, request, body, inside=False)
        if (method, path) == ("POST", "/sessions"):
            return await self._open(request, body)
        # a pause is the engine's, which the workers share, unless it holds back calls
        keeps = path == "/engine/pause" and _field(body, "mode", "keep") == "keep"
        if path == "/sessions" or (path in _EVERYWHERE and not keeps):
            return await self._everywhere(request, body)
        name = path.removeprefix("/sessions/").partition("/")[0]
        # another path, or an unknown session, is the first worker's to refuse
        return await self._ask(self._owners.get(name, 0), request, body)

    async def _open(self, request: Request, body: bytes) -> Response:
        """Open a session at the worker with the fewest open ones."""
        # one after the other: an id is never opened twice, and counts are exact
        async with self._opening:
            owner = self._owners.get(str(_field(body, "session_id", "")))
            if owner is None:
                states = await self._ask_all(request, b"", "GET", "/healthz")
                loads = [_json(state)["sessions"]["open"] for state in states]
                owner = loads.index(min(loads))
            # if it is known, its owner says that it was opened before
            answer = await self._ask(owner, request, body)
            if answer.status_code == 200:
                self._owners[_json(answer)["session_id"]] = owner
            return answer

    async def _everywhere(self, request: Request, body: bytes) -> Response:
        """Have all workers answer; return the first error, or the answers together."""
        answers = await self._ask_all(request, body)
        failed = next((each for each in answers if each.status_code >= 400), None)
        if failed is not None:
            if request.url.path == "/engine/pause":
                # a worker that has a pause with another mode keeps it
                paused = [
                    i for i, each in enumerate(answers) if each.status_code != 409
                ]
                resume = request, b"{}", "POST", "/engine/resume"
                await asyncio.gather(*(self._ask(index, *resume) for index in paused))
            return failed
        merged: dict[str, Any] = {}
        for answer in answers:
            for name, value in _json(answer).items():
                before = merged.get(name)
                counts = isinstance(before, list) or type(before) is int
                merged[name] = before + value if counts else value
        if isinstance(listed := merged.get("sessions"), list):
            limit = int(request.query_params.get("limit", "100"))
            merged["sessions"] = listed[:limit]
        return json_response(merged)

    async def _ask_all(
        self, request: Request, body: bytes, method: str = "", target: str = ""
    ) -> list[Response]:
        n_workers, given = len(self._place.urls), (request, body, method, target)
        return await asyncio.gather(*(self._ask(i, *given) for i in range(n_workers)))

    async def _ask(
        self,
        index: int,
        request: Request,
        body: bytes,
        method: str = "",
        target: str = "",
        *,
        inside: bool = True,
    ) -> Response:
        """Pass a request on to a worker, as its client would reach it, or send another.

        ``inside``: the worker answers it itself.
        """
        host, url = request.url.hostname or "127.0.0.1", self._place.urls[index]
        kept = ("authorization", "x-admin-token", "content-type")
        heads = {k: v for k, v in request.headers.items() if k in kept}
        host = f"[{host}]" if ":" in host else host
        heads["host"] = f"{host}:{urlsplit(url).port}"
        heads |= {_SECRET: self._place.secret} if inside else {}
        url += target or f"{request.url.path}?{request.url.query}"
        try:
            async with aiohttp.request(
                method or request.method,
                url,
                data=body or None,
                headers=heads,
                timeout=_NO_LIMIT,
            ) as answer:
                text, kind = await answer.read(), "application/json"
                return Response(text, answer.status, media_type=kind)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = f"{type(error).__name__}: {error}"
            message = f"worker {index} cannot be reached: {why}"
            raise GatewayError(message, 503, code="worker_lost") from error


def _json(answer: Response) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(bytes(answer.body))
    return value


def _field(body: bytes, name: str, default: str) -> object:
    """A field of a body, which may be no JSON."""
    with suppress(ValueError, AttributeError):
        return json.loads(body).get(name, default)
    return default


Work = Callable[[socket.socket, Place, Callable[[str], None]], None]
"""Serve on a listener in a worker's place; call the function with a text once ready."""


def run_workers(
    work: Work, listeners: Sequence[socket.socket], on_ready: Callable[[str], None]
) -> None:
    """Run ``work``, a picklable function, in a process for each listener.

    ``on_ready``: called with the first worker's text once all are ready. Returns after an
    interrupt, which the workers get as SIGTERM; a second one is passed on, too. An error
    of a worker is raised. `ConnectionError`: a worker ended; then the others are ended.
    """
    context, secret = multiprocessing.get_context("spawn"), secrets.token_hex(16)
    processes, pipes = list[Any](), list[Connection]()
    urls = [url_of(listener) for listener in listeners]
    try:
        for index, listener in enumerate(listeners):
            ours, theirs = context.Pipe()
            given = work, listener, Place(index, urls, secret), theirs
            process = context.Process(target=_run, args=given)
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
