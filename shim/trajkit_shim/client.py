"""A client of the trainer's routes: sessions, pauses and new weights.

`AsyncGatewayClient` is for an event loop, `GatewayClient` for threads. Both take one
gateway or several, for example one per node, and treat them as one.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, Self, TypeVar

import httpx

from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import Json

# how long an answer may take, apart from what the request itself waits for
_ANSWER_SECONDS = 60.0
# a server reads weights from a disk or over a network
_UPDATE_SECONDS = 3600.0
# A lease is renewed this often before it would end. One failed renewal ends no pause.
_RENEWALS = 4

_P = ParamSpec("_P")
_T = TypeVar("_T")


class OpenSession(NamedTuple):
    """What an agent needs: the gateway's base URL, and the session's key."""

    session_id: str
    api_key: str
    base_url: str


class AsyncGatewayClient:
    """A client of one or more gateways.

    Every method raises `GatewayError` with the status and the message of a gateway's
    error, and `ConnectionError` if a gateway cannot be reached or its answer cannot be
    read.

    Parameters
    ----------
    urls : str or sequence of str
        Base URLs, for example ``http://127.0.0.1:8765``. A session is opened at the
        gateway with the fewest open sessions of this client; pauses and weights are for
        all gateways.
    token : str
        The admin token, if the gateways have one.
    """

    def __init__(self, urls: str | Sequence[str], token: str = "") -> None:
        given = [urls] if isinstance(urls, str) else urls
        self.urls = [url.rstrip("/") for url in given]
        if not self.urls:
            raise ValueError("urls is empty: at least one gateway is needed")
        headers = {"x-admin-token": token} if token else {}
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(trust_env=False, limits=limits, headers=headers)
        # the gateway of each session that this client has opened and not ended
        self._owners: dict[object, str] = {}
        self._renewing = list[asyncio.Task[None]]()  # a task per gateway
        self._lost: GatewayError | None = None  # why a pause could not be renewed

    async def models(self) -> list[str]:
        """Return the names of the models that are served."""
        data = (await self._ask(self.urls[0], "GET", "/v1/models"))["data"]
        return [str(model["id"]) for model in data]

    async def open(
        self, /, session_id: str | None = None, **options: object
    ) -> OpenSession:
        """Open a session. ``options``: further fields of ``POST /sessions``.

        Examples are ``max_turns``, ``sampling``, ``group_id`` and ``metadata``.
        """
        url = min(self.urls, key=Counter(self._owners.values()).__getitem__)
        body = options if session_id is None else {**options, "session_id": session_id}
        # counted before the answer, or calls at the same time would all go to one
        begun = object()
        self._owners[begun] = url
        try:
            opened = await self._ask(url, "POST", "/sessions", body)
        finally:
            del self._owners[begun]
        session = OpenSession(*(opened[name] for name in OpenSession._fields))
        self._owners[session.session_id] = url
        return session

    async def finish(self, /, session_id: str, **outcome: object) -> Json:
        """End a session, and return what ``GET /sessions/{id}`` shows of it.

        ``outcome``: ``reward``, ``error``, ``metadata``; ``wait_seconds`` that running
        calls may take. A later reward is sent the same way.
        """
        return await self._of_session("POST", session_id, "/finish", outcome)

    async def drop(self, session_id: str) -> Json:
        """End a session, and take its turns out of training."""
        return await self._of_session("POST", session_id, "/drop", {})

    async def describe(self, session_id: str) -> Json:
        """Return what a gateway knows of a session."""
        return await self._of_session("GET", session_id)

    async def pause(self, seconds: float = 600.0) -> None:
        """Pause the engines until `resume`; running calls wait there and continue.

        The pause is a lease of ``seconds``, which this client renews. It ends by itself
        if the client's process dies. If a gateway fails, none stays paused.
        """
        body: Json = {"timeout_s": seconds}
        try:
            await self._ask_all("/engine/pause", body)
        except BaseException:
            with suppress(Exception):
                await asyncio.shield(self.resume())
            raise
        await self._stop_renewing()
        self._lost = None
        wait, lease = seconds / _RENEWALS, {**body, "renew": True}
        renewals = (self._renew(url, lease, wait) for url in self.urls)
        self._renewing = [*map(asyncio.create_task, renewals)]

    async def update_weights(self, path: str, version: str) -> None:
        """Load weights while paused, and name them ``version``.

        ``path``: a model directory that the servers can read. Raises also if the pause
        ended meanwhile: then some tokens may be from other weights.
        """
        if self._lost is None:
            body: Json = {"model_path": path, "weight_version": version}
            await self._ask_all("/engine/update", body, _UPDATE_SECONDS)
        # before the update, or meanwhile
        if self._lost is not None:
            raise self._lost

    async def resume(self) -> None:
        """End the pause. A gateway that fails to resume does so when its lease ends."""
        await self._stop_renewing()
        await self._ask_all("/engine/resume", {})

    async def close(self) -> None:
        """Close the connections; a pause then ends with its lease."""
        await self._stop_renewing()
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _of_session(
        self, method: str, session_id: str, what: str = "", body: Json | None = None
    ) -> Json:
        """Send a request about a session to its gateway; one with a body ends it."""
        path, wait = f"/sessions/{session_id}{what}", (body or {}).get("wait_seconds")
        seconds = _ANSWER_SECONDS + (wait if isinstance(wait, (int, float)) else 0.0)
        owner = self._owners.get(session_id)
        # one that has ended, or that another client opened, may be at any of them
        *others, last = self.urls if owner is None else [owner]
        for url in (*others, last):
            try:
                answer: Json = await self._ask(url, method, path, body, seconds)
                break
            except GatewayError as error:
                if error.status != 404 or url == last:
                    raise
        if body is not None:
            self._owners.pop(session_id, None)
        return answer

    async def _renew(self, url: str, lease: Json, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                # one that updates its weights answers later, if the pause has ended too
                with suppress(ConnectionError):
                    await self._ask(url, "POST", "/engine/pause", lease)
            except GatewayError as error:
                self._lost = error

    async def _stop_renewing(self) -> None:
        renewing, self._renewing = self._renewing, []
        for renewal in renewing:
            renewal.cancel()
        await asyncio.gather(*renewing, return_exceptions=True)

    async def _ask_all(
        self, path: str, body: Json, seconds: float = _ANSWER_SECONDS
    ) -> None:
        """Send a request to all gateways; raise the first error once all answered."""
        asked = [self._ask(url, "POST", path, body, seconds) for url in self.urls]
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer

    async def _ask(
        self,
        url: str,
        method: str,
        path: str,
        body: Json | None = None,
        seconds: float = _ANSWER_SECONDS,
    ) -> Any:
        where = f"{method} {path} of the gateway at {url}"
        timeout = httpx.Timeout(seconds, connect=10.0)
        request = self._http.build_request(
            method, url + path, json=body, timeout=timeout
        )
        try:
            answer = await self._http.send(request)
        except httpx.HTTPError as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConnectionError(f"{where}: {reason}") from error
        try:
            value = answer.json()
            if not answer.is_error:
                return value
            message, code = (value["error"][name] for name in ("message", "code"))
        except (LookupError, TypeError, ValueError) as error:
            shown = f"{answer.status_code} {answer.text[:400]}"
            raise ConnectionError(f"{where}: it answered {shown}") from error
        raise GatewayError(f"{where}: {message}", answer.status_code, code=code)


def _blocking(
    method: Callable[Concatenate[AsyncGatewayClient, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate["GatewayClient", _P], _T]:
    """The method of `GatewayClient` that waits for one of `AsyncGatewayClient`."""

    @wraps(method)
    def wait(self: "GatewayClient", /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        work = method(self._client, *args, **kwargs)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            # after an interrupt nobody waits for it
            future.cancel()

    return wait


class GatewayClient:
    """`AsyncGatewayClient` for threads; its methods wait for the answer.

    They may be called from several threads at the same time. A thread of its own sends
    the requests, and renews the lease of a pause.
    """

    def __init__(self, urls: str | Sequence[str], token: str = "") -> None:
        self._client = AsyncGatewayClient(urls, token)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="trajkit-client", daemon=True
        )
        self._thread.start()
        self.urls = self._client.urls

    models = _blocking(AsyncGatewayClient.models)
    open = _blocking(AsyncGatewayClient.open)
    finish = _blocking(AsyncGatewayClient.finish)
    drop = _blocking(AsyncGatewayClient.drop)
    describe = _blocking(AsyncGatewayClient.describe)
    pause = _blocking(AsyncGatewayClient.pause)
    update_weights = _blocking(AsyncGatewayClient.update_weights)
    resume = _blocking(AsyncGatewayClient.resume)
    _end = _blocking(AsyncGatewayClient.close)

    def close(self) -> None:
        """Close the connections; a pause then ends with its lease."""
        if not self._loop.is_closed():
            self._end()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
