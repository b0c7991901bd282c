"""The trainer's routes: sessions, pauses, shutdown.

Agents have no access. If there is an admin token, every one of these requests needs it;
a session's key is not enough.
"""

import hmac
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from trajkit_shim import json_input
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import Json, optional
from trajkit_shim.pause import Gate
from trajkit_shim.responses import cancel_on_disconnect
from trajkit_shim.sessions.quotas import Limits
from trajkit_shim.sessions.sampling import parse_client_sampling, parse_pins
from trajkit_shim.sessions.sessions import EndedBy, Outcome, SessionStore, Terms
from trajkit_shim.timing import Timings

TOKEN_HEADER = "x-admin-token"

_LIMITS = ("max_turns", "max_prompt_tokens", "max_output_tokens", "max_context_tokens")
# fields of the body that opens a session
_TERMS = "sampling client_sampling ttl_seconds group_id reward metadata replay"
SESSION_FIELDS = frozenset({"session_id", *_LIMITS, *_TERMS.split()})
# fields of the body that ends one
END_FIELDS = frozenset({"reward", "error", "metadata", "wait_seconds"})
PAUSE_FIELDS = frozenset({"wait_seconds", "abort", "max_seconds"})

# a duration; no request may make the gateway wait for more than a day
_SECONDS = partial(json_input.as_number, minimum=0.0, maximum=24 * 3600.0)
_POSITIVE = partial(json_input.as_integer, minimum=1)

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
ReadBody: TypeAlias = Callable[[Request], Awaitable[bytes]]


class Admin:
    """The routes of the trainer.

    Parameters
    ----------
    sessions : SessionStore
    gate : Gate
    timings : Timings
    read_body : callable
        Returns a request's body; rejects one that is too long.
    token : str, optional
        Required in every request. Default: none.
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

    def routes(self, more: Iterable[tuple[str, str, Endpoint]] = ()) -> Iterator[Route]:
        """Yield all routes.

        ``more`` are further ones for the trainer: (path, method, endpoint).
        """
        session = "/sessions/{session_id}"
        for path, method, endpoint in (
            ("/sessions", "POST", self.open),
            (session, "GET", self.show),
            (session, "DELETE", self._ending("close")),
            (f"{session}/close", "POST", self._ending("close")),
            (f"{session}/finish", "POST", self._ending("finish")),
            (f"{session}/drop", "POST", self.drop),
            (f"{session}/reopen", "POST", self.reopen),
            ("/admin/pause", "POST", self.pause),
            ("/admin/resume", "POST", self.resume),
            ("/admin/drain", "POST", self.drain),
            ("/admin/timings", "GET", self.timings),
            *more,
        ):
            yield Route(path, self._guarded(endpoint), methods=[method])

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        async def guarded(request: Request) -> Response:
            if self._token is not None:
                check_token(request, self._token)
            return await endpoint(request)

        return guarded

    async def open(self, request: Request) -> Response:
        body = await self._object(request, SESSION_FIELDS)
        limits = {name: optional(body, name, _POSITIVE) for name in _LIMITS}
        terms = Terms(
            pins=parse_pins(body.get("sampling")),
            client_sampling=parse_client_sampling(body.get("client_sampling")),
            limits=Limits(**limits),
            ttl_seconds=optional(body, "ttl_seconds", _SECONDS),
            replay=bool(optional(body, "replay", json_input.as_flag)),
            group_id=optional(body, "group_id", json_input.as_text),
        )
        outcome = Outcome()
        outcome.update(_outcome_fields(body))
        session_id = optional(body, "session_id", json_input.as_text)
        session = self._sessions.open(session_id, terms, outcome)
        return JSONResponse(
            {"session_id": session.session_id, "api_key": session.session_id}
        )

    async def show(self, request: Request) -> Response:
        return JSONResponse(self._sessions.describe(_session_id(request)))

    def _ending(self, how: EndedBy) -> Endpoint:
        async def end(request: Request) -> Response:
            body = await self._object(request, END_FIELDS)
            summary = await self._sessions.finish(
                _session_id(request),
                how,
                wait_seconds=_wait(body),
                fields=_outcome_fields(body),
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
        pause = self._gate.pause(
            wait_seconds=_wait(body, default=60.0),
            abort=bool(optional(body, "abort", json_input.as_flag)),
            max_seconds=optional(body, "max_seconds", _SECONDS),
        )
        await cancel_on_disconnect(request, pause)
        return JSONResponse({"paused": True})

    async def resume(self, request: Request) -> Response:
        await self._object(request, frozenset())
        self._gate.resume()
        return JSONResponse({"paused": False})

    async def drain(self, request: Request) -> Response:
        body = await self._object(request, frozenset({"wait_seconds"}))
        await self._sessions.drain(_wait(body, default=60.0))
        return JSONResponse(self._sessions.counts())

    async def timings(self, _: Request) -> Response:
        return JSONResponse(self._timings.describe())

    async def _object(self, request: Request, fields: frozenset[str]) -> Json:
        body = json_input.parse_object(await self._read_body(request) or b"{}")
        json_input.only(body, fields, "")
        return body


def check_token(request: Request, token: str) -> None:
    """Raise a 401 `GatewayError` for a request without the admin token."""
    given = request.headers.get(TOKEN_HEADER)
    if given is None:
        scheme, _, rest = request.headers.get("authorization", "").partition(" ")
        given = rest.strip() if scheme.lower() == "bearer" else ""
    # constant time: the duration does not reveal how much of it is right
    if not hmac.compare_digest(given.encode(), token.encode()):
        raise GatewayError(
            f"the admin token is missing: send it as bearer token or in {TOKEN_HEADER}",
            401,
            code="invalid_admin_token",
        )


def _session_id(request: Request) -> str:
    session_id: str = request.path_params["session_id"]
    return session_id


def _wait(body: Json, default: float = 0.0) -> float:
    seconds = optional(body, "wait_seconds", _SECONDS)
    return default if seconds is None else seconds


def _outcome_fields(body: Json) -> Json:
    """The fields that update a session's outcome (`sessions.sessions.Outcome.update`)."""
    fields: Json = {}
    if "reward" in body:
        any_number = partial(json_input.as_number, minimum=-math.inf, maximum=math.inf)
        fields["reward"] = optional(body, "reward", any_number)
    if "error" in body:
        fields["error"] = optional(body, "error", json_input.as_text)
    if body.get("metadata") is not None:
        fields["metadata"] = json_input.as_object(body["metadata"], "metadata")
    return fields
