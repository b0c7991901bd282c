"""The trainer's routes: sessions, pauses, new weights, shutdown.

Agents have no access. If there is an admin token, every one of these requests needs it;
a session's key is not enough.
"""

import hmac
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeAlias, cast

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trajkit_shim.call import Gateway, read_body
from trajkit_shim.chat.sampling_params import parse_client_sampling, parse_pins
from trajkit_shim.delivery import json_response, unless_left
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import (
    Fields,
    Json,
    Reader,
    as_integer,
    as_name,
    as_number,
    as_object,
    as_text,
    list_of,
    parse_object,
    refuse,
)
from trajkit_shim.pauses import MODES, Mode
from trajkit_shim.sessions.sessions import (
    FILTERS,
    EndedBy,
    Limits,
    Outcome,
    Terms,
)

TOKEN_HEADER = "x-admin-token"

_LIMITS = ("max_turns", "max_prompt_tokens", "max_output_tokens", "max_context_tokens")
# the fields of requests' bodies
_TERMS = "sampling client_sampling chat_template_kwargs ttl_seconds group_id reward"
_TERMS += " metadata replay"
_OPEN = f"session_id {' '.join(_LIMITS)} {_TERMS}"
_END = "reward error metadata wait_seconds"
# from a directory or from memory
_UPDATE = "weight_version model_path tensors load_format"

# in Prometheus' format
_METRICS = """\
# TYPE trajkit_sessions gauge
trajkit_sessions{{state="open"}} {open}
trajkit_sessions{{state="closed"}} {closed}
# TYPE trajkit_calls_in_flight gauge
trajkit_calls_in_flight {in_flight}
# TYPE trajkit_turns_total counter
trajkit_turns_total {turns}
# TYPE trajkit_paused gauge
trajkit_paused {paused}
"""

# a duration; no request may make the gateway wait for more than a day
_SECONDS = partial(as_number, minimum=0.0, maximum=24 * 3600.0)
_POSITIVE = partial(as_integer, minimum=1)

# sessions of a list whose request sets no limit
_LISTED = 100
_LIMIT_DIGITS = 9


def bearer(headers: Headers) -> str:
    """Return the bearer token of a request, or an empty string."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


Answer: TypeAlias = Response | Json
Handler: TypeAlias = Callable[[Request, Fields], Answer | Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class Admin:
    """The routes of the trainer."""

    gateway: Gateway

    def routes(self) -> Iterator[Route]:
        """Yield all routes."""
        session, gateway = "/sessions/{session_id}", self.gateway
        store = gateway.sessions
        close, finish = partial(self._end, "close"), partial(self._end, "finish")
        table: Iterable[tuple[str, str, Handler, str | None]] = (
            ("/sessions", "POST", self._open, _OPEN),
            ("/sessions", "GET", self._list, None),
            (session, "GET", lambda r, _: store.describe(_session_id(r)), None),
            (session, "DELETE", close, _END),
            (f"{session}/close", "POST", close, _END),
            (f"{session}/finish", "POST", finish, _END),
            (f"{session}/drop", "POST", lambda r, _: store.drop(_session_id(r)), ""),
            (f"{session}/reopen", "POST", self._reopen, ""),
            ("/admin/drain", "POST", self._drain, "wait_seconds"),
            ("/metrics", "GET", self._metrics, None),
            ("/engine", "GET", lambda *_: gateway.pause.describe(), None),
            ("/engine/pause", "POST", self._pause, "timeout_s mode wait_seconds"),
            ("/engine/update", "POST", self._update, _UPDATE),
            ("/engine/resume", "POST", self._resume, ""),
        )
        for path, method, handler, fields in table:
            endpoint = partial(self._answer, handler, fields)
            yield Route(path, endpoint, methods=[method])

    async def _answer(
        self, handler: Handler, fields: str | None, request: Request
    ) -> Response:
        """Check token and body of a request. ``fields``: None if it has no body."""
        options, body = self.gateway.options, Fields({})
        if options.admin_token is not None:
            given = request.headers.get(TOKEN_HEADER) or bearer(request.headers)
            # constant time: the duration does not reveal how much of it is right
            if not hmac.compare_digest(given.encode(), options.admin_token.encode()):
                message = "the admin token is missing: send it as bearer token or in "
                message += TOKEN_HEADER
                raise GatewayError(message, 401, code="invalid_admin_token")
        if fields is not None:
            body = Fields(parse_object(await read_body(request, options) or b"{}"))
            body.only(fields.split())
        answer = handler(request, body)
        if not isinstance(answer, (Response, dict)):
            answer = await answer
        return answer if isinstance(answer, Response) else json_response(answer)

    def _open(self, request: Request, body: Fields) -> Json:
        terms = Terms(
            pins=parse_pins(body.json.get("sampling")),
            client_sampling=parse_client_sampling(body.json.get("client_sampling")),
            limits=Limits(**{name: body.get(name, _POSITIVE) for name in _LIMITS}),
            ttl_seconds=body.get("ttl_seconds", _SECONDS),
            variables=body.section("chat_template_kwargs").json,
            replay=body.flag("replay"),
            group_id=body.get("group_id", _logged_text),
        )
        session_id = body.get("session_id", as_text)
        opened = self.gateway.sessions.open(session_id, terms, _outcome_fields(body))
        return {
            "session_id": opened.session_id,
            "api_key": opened.api_key,
            # as this client reaches the gateway
            "base_url": str(request.base_url).rstrip("/"),
        }

    def _list(self, request: Request, _: Fields) -> Json:
        asked = Fields({**request.query_params})
        asked.only({"limit", *FILTERS})
        # of a query every value is a text
        limit = asked.json.pop("limit", str(_LISTED))
        wanted = {name: asked.text(name) for name in asked.json}
        if not str(limit).isdecimal() or len(str(limit)) > _LIMIT_DIGITS:
            asked.refuse("limit", f"{limit!r}: not a number of sessions")
        found = self.gateway.sessions.matching(wanted)
        return {"sessions": [*islice(found, int(str(limit)))]}

    async def _end(self, how: EndedBy, request: Request, body: Fields) -> Json:
        name, fields = _session_id(request), _outcome_fields(body)
        return await self.gateway.sessions.finish(name, how, _wait(body), fields)

    def _reopen(self, request: Request, _: Fields) -> Json:
        return self.gateway.sessions.reopen(_session_id(request)).describe()

    async def _drain(self, _: Request, body: Fields) -> Json:
        await self.gateway.sessions.drain(_wait(body, default=60.0))
        return {**self.gateway.sessions.counts()}

    def _metrics(self, _: Request, __: Fields) -> Response:
        counts = self.gateway.sessions.counts()
        paused = int(self.gateway.pause.mode is not None)
        form = "text/plain; version=0.0.4; charset=utf-8"
        text = _METRICS.format(**counts, paused=paused)
        return Response(text, headers={"content-type": form})

    async def _pause(self, request: Request, body: Fields) -> Json:
        seconds = body.get("timeout_s", _SECONDS)
        mode = cast("Mode", body.one_of("mode", MODES, "keep"))
        work = self.gateway.pause.pause(
            600.0 if seconds is None else seconds,
            mode,
            wait_seconds=_wait(body, default=60.0),
        )
        await unless_left(request, work)
        return self.gateway.pause.describe()

    async def _update(self, _: Request, body: Fields) -> Json:
        source = body.get("tensors", list_of(as_name))
        unused = "load_format" if source is None else "model_path"
        body.only(_UPDATE.replace(unused, "").split())
        await self.gateway.pause.update(
            body.name("model_path") if source is None else source,
            body.name("weight_version"),
            body.get_text("load_format"),
        )
        return self.gateway.pause.describe()

    async def _resume(self, _: Request, __: Fields) -> Json:
        await self.gateway.pause.resume()
        return self.gateway.pause.describe()


def _logged_text(value: object, where: str) -> str:
    """Return a string of a text column, which is UTF-8."""
    text = as_text(value, where)
    try:
        text.encode()
    except UnicodeEncodeError:
        refuse(where, "half of a surrogate pair is no text")
    return text


def _session_id(request: Request) -> str:
    return str(request.path_params["session_id"])


def _wait(body: Fields, default: float = 0.0) -> float:
    seconds = body.get("wait_seconds", _SECONDS)
    return default if seconds is None else seconds


def _outcome_fields(body: Fields) -> Outcome:
    any_number = partial(as_number, minimum=-math.inf, maximum=math.inf)
    readers: dict[str, Reader[object]]
    readers = {"reward": any_number, "error": _logged_text, "metadata": as_object}
    fields = {k: body.get(k, read) for k, read in readers.items() if k in body.json}
    if fields.get("metadata", {}) is None:
        del fields["metadata"]
    return cast("Outcome", fields)
