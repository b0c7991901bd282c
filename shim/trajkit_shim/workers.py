"""Several gateways in processes of their own, which a trainer sees as one.

Agents talk to the worker that owns their session. Every worker passes the trainer's
requests on to the first one, which opens each session at the worker with the fewest, and
holds the lease of a pause: the workers share the engine's servers.
"""

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection, wait
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from trajkit_shim.call import Options
from trajkit_shim.delivery import json_response
from trajkit_shim.errors import GatewayError, error_body, retry_header
from trajkit_shim.json_input import read_body
from trajkit_shim.serve import url_of

# the header of requests from the first worker, which the receiver answers itself
_FROM_FIRST = "x-trajkit-worker"
# of the trainer's paths, those that one worker answers for all
_TRAINER = ("/sessions", "/engine", "/admin")
# what a request may wait for is in its body; the answer itself comes at once
_NO_LIMIT = aiohttp.ClientTimeout(total=None, sock_connect=10.0)


class Worker:
    """The ASGI app of worker number ``index``, in front of its gateway's app."""

    def __init__(self, app: ASGIApp, index: int, urls: Sequence[str]) -> None:
        self._app, self._index, self._urls = app, index, urls
        # only of the first worker: the owner of each session
        self._owners: dict[str, int] = {}
        self._opening = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = self._app
        if scope["type"] == "http" and scope["path"].startswith(_TRAINER):
            request = Request(scope, receive, send)
            try:
                answer = await self._answer(request) or self._app
            except ClientDisconnect:
                answer = Response(status_code=499)
            except GatewayError as error:
                shown, headers = error_body(error), retry_header(error)
                answer = json_response(shown, error.status, headers)
        await answer(scope, receive, send)

    async def _answer(self, request: Request) -> Response | None:
        """The answer of other workers; None if this one answers."""
        asked, path = (request.method, request.url.path), request.url.path
        name = path.removeprefix("/sessions/").partition("/")[0]
        # another path, or an unknown session, is the first worker's to refuse
        owner = 0 if self._index else self._owners.get(name, 0)
        orders = {
            ("POST", "/sessions"): self._open,
            ("POST", "/admin/drain"): self._drain,
        }
        order = None if self._index else orders.get(asked)
        own = order is None and owner == self._index
        if own or _FROM_FIRST in request.headers:
            return None
        body = await read_body(request.stream(), Options().max_body_bytes)
        if order is not None:
            return await order(request, body)
        return await self._ask(owner, request, body)

    async def _open(self, request: Request, body: bytes) -> Response:
        """Open a session at the worker with the fewest open ones."""
        session_id = None
        with suppress(ValueError, AttributeError):
            session_id = json.loads(body).get("session_id")
        # one after the other: an id is never opened twice, and counts are exact
        async with self._opening:
            # if it is known, its owner says that it was opened before
            owner = self._owners.get(str(session_id))
            if owner is None:
                states = await self._ask_all(request, b"", "GET", "/healthz")
                for state in states:
                    if state.status_code >= 400:
                        return state
                loads = [_json(state)["sessions"]["open"] for state in states]
                owner = loads.index(min(loads))
            answer = await self._ask(owner, request, body)
            if answer.status_code == 200:
                self._owners[_json(answer)["session_id"]] = owner
            return answer

    async def _drain(self, request: Request, body: bytes) -> Response:
        """Drain all workers; return the first error, or the sums of their counts."""
        answers = await self._ask_all(request, body)
        for answer in answers:
            if answer.status_code >= 400:
                return answer
        counts = [_json(answer) for answer in answers]
        return json_response({name: sum(c[name] for c in counts) for name in counts[0]})

    async def _ask_all(
        self, request: Request, body: bytes, method: str = "", path: str = ""
    ) -> list[Response]:
        asked = (
            self._ask(i, request, body, method, path) for i in range(len(self._urls))
        )
        return await asyncio.gather(*asked)

    async def _ask(
        self,
        index: int,
        request: Request,
        body: bytes,
        method: str = "",
        path: str = "",
    ) -> Response:
        """Pass a request on to a worker, as its client would reach it, or send another."""
        host, url = request.url.hostname or "127.0.0.1", self._urls[index]
        # with an origin it is a web page's, which the worker refuses
        kept = ("authorization", "x-admin-token", "content-type", "origin")
        heads = {k: v for k, v in request.headers.items() if k in kept}
        host = f"[{host}]" if ":" in host else host
        heads["host"] = f"{host}:{urlsplit(url).port}"
        heads |= {} if self._index else {_FROM_FIRST: "1"}
        try:
            async with aiohttp.request(
                method or request.method,
                url + (path or request.url.path),
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


Work = Callable[[socket.socket, Callable[[str], None], int, Sequence[str]], None]
"""Serve on a listener as the worker of a number, of those with the given URLs; call the
function with a text once ready."""


def run_workers(
    work: Work, listeners: Sequence[socket.socket], on_ready: Callable[[str], None]
) -> None:
    """Run ``work``, a picklable function, in a process for each listener.

    ``on_ready``: called with the first worker's text once all are ready. Returns after an
    interrupt, which the workers get as SIGTERM; a second one is passed on, too. An error
    of a worker is raised. `ConnectionError`: a worker ended; then the others are ended.
    """
    context = multiprocessing.get_context("spawn")
    processes, pipes = list[Any](), list[Connection]()
    urls = [url_of(listener) for listener in listeners]
    try:
        for index, listener in enumerate(listeners):
            ours, theirs = context.Pipe()
            arguments = work, listener, index, urls, theirs
            process = context.Process(target=_run, args=arguments)
            process.start()
            theirs.close()
            listener.close()
            processes.append(process)
            pipes.append(ours)
        texts = [*map(_received, count(), processes, pipes)]
        on_ready(texts[0])
        sentinels = [process.sentinel for process in processes]
        index = sentinels.index(wait(sentinels)[0])
        _received(index, processes[index], pipes[index])
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


def _received(index: int, process: Any, pipe: Connection) -> str:
    """The text that a worker sends; raises its error if it failed or ended instead."""
    try:
        answer = pipe.recv()
    except (EOFError, ConnectionError):
        process.join()
        ended = f"worker {index} ended with exit code {process.exitcode}"
        raise ConnectionError(ended) from None
    if isinstance(answer, Exception):
        raise answer
    return str(answer)


def _run(
    work: Work,
    listener: socket.socket,
    index: int,
    urls: Sequence[str],
    pipe: Connection,
) -> None:
    """In a worker's process: work until SIGTERM, or until the parent is gone."""
    # an interrupt of the terminal is for the parent
    os.setpgrp()

    def end_with_parent() -> None:
        with suppress(EOFError, OSError):
            pipe.recv()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
    try:
        work(listener, pipe.send, index, urls)
    except KeyboardInterrupt:
        pass
    except Exception as error:
        pipe.send(error)
