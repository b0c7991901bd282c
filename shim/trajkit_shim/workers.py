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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

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
        path, first = request.url.path, self._index == 0
        if _FROM_FIRST in request.headers or (first and path.startswith("/engine")):
            return None
        body = await read_body(request.stream(), Options().max_body_bytes)
        if not first:
            return await self._ask(0, request, body)
        if (request.method, path) == ("POST", "/sessions"):
            return await self._open(request, body)
        if path.startswith("/admin"):
            return await self._drain(request, body)
        return await self._owner(request, body)

    async def _open(self, request: Request, body: bytes) -> Response:
        """Open a session at the worker with the fewest open ones."""
        path = ""
        with suppress(AttributeError, TypeError, ValueError):
            path = f"/sessions/{quote(json.loads(body).get('session_id'), safe='')}"
        # one after the other: an id is never opened twice, and counts are exact
        async with self._opening:
            states = await self._ask_all(request, b"", "GET", "/healthz")
            for state in states:
                if state.status_code >= 400:
                    return state
            loads = [
                json.loads(bytes(state.body))["sessions"]["open"] for state in states
            ]
            owners = [loads.index(min(loads))]
            if path:
                found = await self._ask_all(request, b"", "GET", path)
                # it says that the id was used before, or that the token is missing
                known = [i for i, each in enumerate(found) if each.status_code != 404]
                owners = known or owners
            return await self._ask(owners[0], request, body)

    async def _owner(self, request: Request, body: bytes) -> Response:
        """The answer of the worker that knows a session, or that none does."""
        for index in range(len(self._urls)):
            answer = await self._ask(index, request, body)
            if answer.status_code != 404:
                break
        return answer

    async def _drain(self, request: Request, body: bytes) -> Response:
        """Drain all workers; return the first error, or the sums of their counts."""
        answers = await self._ask_all(request, body)
        for answer in answers:
            if answer.status_code >= 400:
                return answer
        counts = [json.loads(bytes(answer.body)) for answer in answers]
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
    urls = [url_of(listener) for listener in listeners]
    jobs = [(listener, index, urls) for index, listener in enumerate(listeners)]
    with suppress(KeyboardInterrupt), children("worker {}", work, jobs) as workers:
        for listener in listeners:
            listener.close()
        texts = [worker.received() for worker in workers]
        on_ready(texts[0])
        sentinels = [worker.process.sentinel for worker in workers]
        workers[sentinels.index(wait(sentinels)[0])].received()


class Child(NamedTuple):
    """A process that works for this one."""

    name: str
    process: Any
    pipe: Connection

    def received(self) -> Any:
        """Return what it says; raises its error, or `ConnectionError` if it ended."""
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            ended = f"{self.name} ended with exit code {self.process.exitcode}"
            raise ConnectionError(ended) from None
        if isinstance(answer, Exception):
            raise answer
        return answer


@contextmanager
def children(
    name: str, work: Callable[..., None], jobs: Iterable[tuple[Any, ...]]
) -> Iterator[list[Child]]:
    """Run ``work``, a picklable function, in a process for each job.

    It gets the first part of its job, a small one, a function that says something to this
    process, and the rest. At the end of the ``with`` block, and if this process is gone,
    the children get SIGTERM, and a further one for each interrupt.
    """
    context, made = multiprocessing.get_context("spawn"), list[Child]()
    try:
        for number, (first, *rest) in enumerate(jobs):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run, args=(theirs, first))
            process.start()
            theirs.close()
            made.append(Child(name.format(number), process, ours))
            # `start` would wait forever if a child ends before it has read a large job
            with suppress(ConnectionError):
                ours.send((work, rest))
        yield made
    finally:
        while any(child.process.is_alive() for child in made):
            for child in made:
                child.process.terminate()
            # a further interrupt makes them end at once
            with suppress(KeyboardInterrupt):
                for child in made:
                    child.process.join()


def _run(pipe: Connection, first: object) -> None:
    """In a child: work until SIGTERM, or until the parent is gone."""
    # an interrupt of the terminal is for the parent
    os.setpgrp()
    work, rest = pipe.recv()

    def end_with_parent() -> None:
        with suppress(EOFError, OSError):
            pipe.recv()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
    try:
        work(first, pipe.send, *rest)
    except KeyboardInterrupt:
        pass
    except Exception as error:
        pipe.send(error)
