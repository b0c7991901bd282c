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
from urllib.parse import urlsplit

import aiohttp
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from trajkit_shim.app import answer_error, check_token
from trajkit_shim.call import Options
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import parse_object, read_body
from trajkit_shim.serve import url_of

# the header of requests from the first worker, which the receiver answers itself
_FROM_FIRST = "x-trajkit-worker"
# of the trainer's paths, those that one worker answers for all
_TRAINER = ("/sessions", "/engine")
# what a request may wait for is in its body; the answer itself comes at once
_NO_LIMIT = aiohttp.ClientTimeout(total=None, sock_connect=10.0)


class Worker:
    """The ASGI app of worker number ``index``, in front of its gateway's app."""

    def __init__(
        self, app: ASGIApp, index: int, urls: Sequence[str], token: str | None
    ) -> None:
        self._app, self._index, self._urls, self._token = app, index, urls, token
        self._opening = asyncio.Lock()
        # the worker of each session, by the hash of its id; the first worker opens all
        self._owners: dict[int, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = self._app
        if scope["type"] == "http" and scope["path"].startswith(_TRAINER):
            request = Request(scope, receive, send)
            try:
                answer = await self._answer(request) or self._app
            except (ClientDisconnect, GatewayError) as error:
                answer = await answer_error(request, error)
        await answer(scope, receive, send)

    async def _answer(self, request: Request) -> Response | None:
        """The answer of other workers; None if this one answers."""
        path, first = request.url.path, self._index == 0
        if _FROM_FIRST in request.headers or (first and path.startswith("/engine")):
            return None
        check_token(request.headers, self._token)
        body = await read_body(request.stream(), Options().max_body_bytes)
        if not first:
            return await self._ask(0, request, body)
        if (request.method, path) == ("POST", "/sessions"):
            return await self._open(request, body)
        session_id = path.removeprefix("/sessions/").partition("/")[0]
        # any worker knows none of the others
        owner = self._owners.get(hash(session_id), 0)
        return await self._ask(owner, request, body)

    async def _open(self, request: Request, body: bytes) -> Response:
        """Open a session at the worker with the fewest open ones."""
        session_id = str(parse_object(body or b"{}").get("session_id"))
        # one after the other: an id is never opened twice, and counts are exact
        async with self._opening:
            workers, health = range(len(self._urls)), ("GET", "/healthz")
            asked = (self._ask(i, request, b"", *health) for i in workers)
            states = await asyncio.gather(*asked)
            for state in states:
                if state.status_code >= 400:
                    return state
            found = (json.loads(bytes(state.body))["sessions"] for state in states)
            loads = [sessions["open"] for sessions in found]
            # its owner says that an id was used before
            owner = self._owners.get(hash(session_id), loads.index(min(loads)))
            answer = await self._ask(owner, request, body)
            if answer.status_code < 400:
                opened = json.loads(bytes(answer.body))
                self._owners[hash(opened["session_id"])] = owner
            return answer

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


def run_workers(
    work: Callable[..., None],
    listeners: Sequence[socket.socket],
    on_ready: Callable[[str], None],
) -> None:
    """Run ``work``, a picklable function, in a process for each listener.

    It gets the listener, a function to call with a text once it serves, its number, and
    the URLs of all workers. ``on_ready``: called with the first one's text once all serve.
    Returns after an interrupt, which the workers get as SIGTERM; a second one is passed
    on, too. An error of a worker is raised. `ConnectionError`: a worker ended; then the
    others are ended.
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
