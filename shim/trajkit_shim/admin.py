"""What the trainer asks of the gateway: sessions, pauses, the end.

None of it is for the agents. With an admin token each of these requests needs it, and a
session's key is none.
"""

import hmac
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from trajkit_shim import wire
from trajkit_shim.answer import while_there
from trajkit_shim.budget import Limits
from trajkit_shim.errors import GatewayError
from trajkit_shim.pause import Gate
from trajkit_shim.sampling import parse_client_sampling, parse_pins
from trajkit_shim.sessions import EndedBy, Outcome, SessionStore, Terms
from trajkit_shim.timing import Timings
from trajkit_shim.wire import Json

TOKEN_HEADER = "x-admin-token"

_LIMITS = ("max_turns", "max_prompt_tokens", "max_output_tokens", "max_context_tokens")
# of the body that opens a session
SESSION_FIELDS = frozenset(
    {
        *_LIMITS,
        "session_id",
        "sampling",
        "client_sampling",
        "ttl_seconds",
        "group_id",
        "reward",
        "metadata",
        "replay",
    }
)
# of the body that ends one
END_FIELDS = frozenset({"reward", "error", "metadata", "wait_seconds"})
PAUSE_FIELDS = frozenset({"wait_seconds", "abort", "max_seconds"})

# the longest that a request may have the gateway wait
_MOST_SECONDS = 24 * 3600.0

Asked: TypeAlias = Callable[[Request], Awaitable[Response]]
ReadBody: TypeAlias = Callable[[Request], Awaitable[bytes]]


class Admin:
    """The routes of the trainer.

    Parameters
    ----------
    sessions : SessionStore
    gate : Gate
    timings : Timings
    read_body : callable
        Gives a request's body; refuses one that is too long.
    token : str, optional
        What each request must bring. None: nothing.
    """

    def __init__(
        self,
        sessions: SessionStore,
        gate: Gate,
        timings: Timings,
        read_body: ReadBody,
        token: str | None,
    ) -> None:
        self._sessions = sessions
        self._gate = gate
        self._timings = timings
        self._read_body = read_body
        self._token = token

    def routes(self, more: Iterable[tuple[str, str, Asked]] = ()) -> Iterator[Route]:
        """What is asked where.

        Parameters
        ----------
        more : iterable of (path, method, endpoint)
            What else only the trainer may ask.
        """
        one = "/sessions/{session_id}"
        for path, method, endpoint in (
            ("/sessions", "POST", self.open),
            (one, "GET", self.show),
            (one, "DELETE", self._ending("close")),
            (f"{one}/close", "POST", self._ending("close")),
            (f"{one}/finish", "POST", self._ending("finish")),
            (f"{one}/drop", "POST", self.drop),
            (f"{one}/reopen", "POST", self.reopen),
            ("/admin/pause", "POST", self.pause),
            ("/admin/resume", "POST", self.resume),
            ("/admin/drain", "POST", self.drain),
            ("/admin/timings", "GET", self.timings),
            *more,
        ):
            yield Route(path, self._guarded(endpoint), methods=[method])

    def _guarded(self, endpoint: Asked) -> Asked:
        async def guarded(request: Request) -> Response:
            if self._token is not None:
                check_token(request, self._token)
            return await endpoint(request)

        return guarded

    async def open(self, request: Request) -> Response:
        body = await self._object(request, SESSION_FIELDS)
        session_id, group_id = body.get("session_id"), body.get("group_id")
        ttl, replay = body.get("ttl_seconds"), body.get("replay")
        terms = Terms(
            pins=parse_pins(body.get("sampling")),
            client_sampling=parse_client_sampling(body.get("client_sampling")),
            limits=Limits(
                **{
                    name: wire.as_integer(body[name], name, least=1)
                    for name in _LIMITS
                    if body.get(name) is not None
                }
            ),
            ttl_seconds=None if ttl is None else _seconds(ttl, "ttl_seconds"),
            replay=replay is not None and wire.as_flag(replay, "replay"),
            group_id=None if group_id is None else wire.as_text(group_id, "group_id"),
        )
        outcome = Outcome()
        outcome.update(_said(body))
        session = self._sessions.open(
            None if session_id is None else wire.as_text(session_id, "session_id"),
            terms,
            outcome,
        )
        return JSONResponse(
            {"session_id": session.session_id, "api_key": session.session_id}
        )

    async def show(self, request: Request) -> Response:
        return JSONResponse(self._sessions.describe(_session_id(request)))

    def _ending(self, how: EndedBy) -> Asked:
        async def end(request: Request) -> Response:
            body = await self._object(request, END_FIELDS)
            summary = await self._sessions.finish(
                _session_id(request),
                how,
                wait_seconds=_wait(body),
                said=_said(body),
            )
            return JSONResponse(summary)

        return end

    async def drop(self, request: Request) -> Response:
        await self._object(request, frozenset())
        return JSONResponse(await self._sessions.drop(_session_id(request)))

    async def reopen(self, request: Request) -> Response:
        await self._object(request, frozenset())
        return JSONResponse(self._sessions.reopen(_session_id(request)).describe())

    async def pause(self, request: Request) -> Response:
        body = await self._object(request, PAUSE_FIELDS)
        abort, longest = body.get("abort"), body.get("max_seconds")
        pause = self._gate.pause(
            wait_seconds=_wait(body, unsaid=60.0),
            abort=abort is not None and wire.as_flag(abort, "abort"),
            max_seconds=None if longest is None else _seconds(longest, "max_seconds"),
        )
        await while_there(request, pause)
        return JSONResponse({"paused": True})

    async def resume(self, request: Request) -> Response:
        await self._object(request, frozenset())
        self._gate.resume()
        return JSONResponse({"paused": False})

    async def drain(self, request: Request) -> Response:
        body = await self._object(request, frozenset({"wait_seconds"}))
        await self._sessions.drain(_wait(body, unsaid=60.0))
        return JSONResponse(self._sessions.counts())

    async def timings(self, _: Request) -> Response:
        return JSONResponse(self._timings.describe())

    async def _object(self, request: Request, fields: frozenset[str]) -> Json:
        body = wire.parse_object(await self._read_body(request) or b"{}")
        wire.only(body, fields, "")
        return body


def check_token(request: Request, token: str) -> None:
    """Refuse a request that does not bring the admin token.

    Raises
    ------
    GatewayError
        401.
    """
    given = request.headers.get(TOKEN_HEADER)
    if given is None:
        scheme, _, rest = request.headers.get("authorization", "").partition(" ")
        given = rest.strip() if scheme.lower() == "bearer" else ""
    # in a time that does not tell how much of it is right
    if not hmac.compare_digest(given.encode(), token.encode()):
        raise GatewayError(
            f"this needs the admin token, as a bearer token or in {TOKEN_HEADER}",
            401,
            code="invalid_admin_token",
        )


def _session_id(request: Request) -> str:
    session_id: str = request.path_params["session_id"]
    return session_id


def _seconds(value: object, where: str) -> float:
    return wire.as_number(value, where, least=0.0, most=_MOST_SECONDS)


def _wait(body: Json, unsaid: float = 0.0) -> float:
    value = body.get("wait_seconds")
    return unsaid if value is None else _seconds(value, "wait_seconds")


def _said(body: Json) -> Json:
    """What a body says of a session: for `trajkit_shim.sessions.Outcome.update`."""
    said: Json = {}
    if "reward" in body:
        reward = body["reward"]
        said["reward"] = (
            None
            if reward is None
            else wire.as_number(reward, "reward", least=-math.inf, most=math.inf)
        )
    if "error" in body:
        error = body["error"]
        said["error"] = None if error is None else wire.as_text(error, "error")
    if body.get("metadata") is not None:
        said["metadata"] = wire.as_object(body["metadata"], "metadata")
    return said
