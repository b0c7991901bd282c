"""The trainer's routes: sessions, pauses, shutdown.

Agents have no access. If there is an admin token, every one of these requests needs it;
a session's key is not enough.
"""

import hmac
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import (
    Fields,
    as_integer,
    as_number,
    as_object,
    as_text,
    parse_object,
)
from trajkit_shim.pause import Gate
from trajkit_shim.responses import cancel_on_disconnect
from trajkit_shim.sessions.quotas import Limits
from trajkit_shim.sessions.sampling import parse_client_sampling, parse_pins
from trajkit_shim.sessions.sessions import (
    FILTERS,
    EndedBy,
    Outcome,
    OutcomeFields,
    SessionStore,
    Terms,
)
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
_SECONDS = partial(as_number, minimum=0.0, maximum=24 * 3600.0)
_POSITIVE = partial(as_integer, minimum=1)

# sessions of a list whose request sets no limit
_LISTED = 100

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
ReadBody: TypeAlias = Callable[[Request], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Admin:
    """The routes of the trainer."""

    sessions: SessionStore
    gate: Gate
    timings: Timings
    read_body: ReadBody  # returns a request's body; rejects one that is too long
    token: str | None  # required in every request

    def routes(self, more: Iterable[tuple[str, str, Endpoint]] = ()) -> Iterator[Route]:
        """Yield all routes; ``more`` are other (path, method, endpoint) for the trainer."""
        session = "/sessions/{session_id}"
        for path, method, endpoint in (
            ("/sessions", "POST", self.open),
            ("/sessions", "GET", self.list),
            (session, "GET", self.show),
            (session, "DELETE", self._ending("close")),
            (f"{session}/close", "POST", self._ending("close")),
            (f"{session}/finish", "POST", self._ending("finish")),
            (f"{session}/drop", "POST", self.drop),
            (f"{session}/reopen", "POST", self.reopen),
            ("/admin/pause", "POST", self.pause),
            ("/admin/resume", "POST", self.resume),
            ("/admin/drain", "POST", self.drain),
            ("/admin/timings", "GET", self.show_timings),
            ("/metrics", "GET", self.metrics),
            *more,
        ):
            yield Route(path, self._guarded(endpoint), methods=[method])

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        async def guarded(request: Request) -> Response:
            if self.token is not None:
                check_token(request, self.token)
            return await endpoint(request)

        return guarded

    async def open(self, request: Request) -> Response:
        body = await self._fields(request, SESSION_FIELDS)
        terms = Terms(
            pins=parse_pins(body.json.get("sampling")),
            client_sampling=parse_client_sampling(body.json.get("client_sampling")),
            limits=Limits(**{name: body.get(name, _POSITIVE) for name in _LIMITS}),
            ttl_seconds=body.get("ttl_seconds", _SECONDS),
            replay=body.flag("replay"),
            group_id=body.get("group_id", as_text),
        )
        outcome = Outcome().updated(_outcome_fields(body))
        session_id = body.get("session_id", as_text)
        opened = self.sessions.open(session_id, terms, outcome)
        keys = {"session_id": opened.session_id, "api_key": opened.api_key}
        return JSONResponse(keys)

    async def list(self, request: Request) -> Response:
        asked = Fields({**request.query_params})
        asked.only({"limit", *FILTERS})
        # of a query every value is a text
        limit = asked.json.pop("limit", str(_LISTED))
        wanted = {name: asked.text(name) for name in asked.json}
        if not str(limit).isdecimal():
            asked.refuse("limit", f"{limit!r}: not a number of sessions")
        found = self.sessions.matching(wanted)
        return JSONResponse({"sessions": [*islice(found, int(str(limit)))]})

    async def show(self, request: Request) -> Response:
        return JSONResponse(self.sessions.describe(request.path_params["session_id"]))

    def _ending(self, how: EndedBy) -> Endpoint:
        async def end(request: Request) -> Response:
            body = await self._fields(request, END_FIELDS)
            name = request.path_params["session_id"]
            end = self.sessions.finish(name, how, _wait(body), _outcome_fields(body))
            return JSONResponse(await end)

        return end

    async def drop(self, request: Request) -> Response:
        await self._fields(request)
        return JSONResponse(await self.sessions.drop(request.path_params["session_id"]))

    async def reopen(self, request: Request) -> Response:
        await self._fields(request)
        session = self.sessions.reopen(request.path_params["session_id"])
        return JSONResponse(session.describe())

    async def pause(self, request: Request) -> Response:
        body = await self._fields(request, PAUSE_FIELDS)
        pause = self.gate.pause(
            wait_seconds=_wait(body, default=60.0),
            abort=body.flag("abort"),
            max_seconds=body.get("max_seconds", _SECONDS),
        )
        await cancel_on_disconnect(request, pause)
        return JSONResponse({"paused": True})

    async def resume(self, request: Request) -> Response:
        await self._fields(request)
        self.gate.resume()
        return JSONResponse({"paused": False})

    async def drain(self, request: Request) -> Response:
        body = await self._fields(request, {"wait_seconds"})
        await self.sessions.drain(_wait(body, default=60.0))
        return JSONResponse(self.sessions.counts())

    async def metrics(self, _: Request) -> Response:
        counts = self.sessions.counts()
        times = self.timings.describe()
        lines = [
            "# TYPE trajkit_sessions gauge",
            f'trajkit_sessions{{state="open"}} {counts["open"]}',
            f'trajkit_sessions{{state="closed"}} {counts["closed"]}',
            "# TYPE trajkit_calls_in_flight gauge",
            f"trajkit_calls_in_flight {counts['in_flight']}",
            "# TYPE trajkit_turns_total counter",
            f"trajkit_turns_total {counts['turns']}",
            "# TYPE trajkit_paused gauge",
            f"trajkit_paused {int(self.gate.paused)}",
            "# TYPE trajkit_turn_milliseconds gauge",
        ]
        for part in ("gateway", "busy", "engine"):
            measured = times.get(f"{part}_ms", {})
            assert isinstance(measured, dict)
            for name, value in measured.items():
                labels = f'{{part="{part}",statistic="{name}"}}'
                lines.append(f"trajkit_turn_milliseconds{labels} {value}")
        form = "text/plain; version=0.0.4; charset=utf-8"
        return Response("\n".join([*lines, ""]), headers={"content-type": form})

    async def show_timings(self, _: Request) -> Response:
        return JSONResponse(self.timings.describe())

    async def _fields(self, request: Request, known: Set[str] = frozenset()) -> Fields:
        body = Fields(parse_object(await self.read_body(request) or b"{}"))
        body.only(known)
        return body


def check_token(request: Request, token: str) -> None:
    """Raise a 401 `GatewayError` for a request without the admin token."""
    given = request.headers.get(TOKEN_HEADER)
    if given is None:
        scheme, _, rest = request.headers.get("authorization", "").partition(" ")
        given = rest.strip() if scheme.lower() == "bearer" else ""
    # constant time: the duration does not reveal how much of it is right
    if not hmac.compare_digest(given.encode(), token.encode()):
        message = "the admin token is missing: send it as bearer token or in "
        raise GatewayError(message + TOKEN_HEADER, 401, code="invalid_admin_token")


def _wait(body: Fields, default: float = 0.0) -> float:
    seconds = body.get("wait_seconds", _SECONDS)
    return default if seconds is None else seconds


def _outcome_fields(body: Fields) -> OutcomeFields:
    fields: OutcomeFields = {}
    if "reward" in body.json:
        any_number = partial(as_number, minimum=-math.inf, maximum=math.inf)
        fields["reward"] = body.get("reward", any_number)
    if "error" in body.json:
        fields["error"] = body.get("error", as_text)
    if body.json.get("metadata") is not None:
        fields["metadata"] = body.need("metadata", as_object)
    return fields
