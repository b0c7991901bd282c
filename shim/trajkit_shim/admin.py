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

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from trajkit_shim.chat.sampling_params import parse_client_sampling, parse_pins
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import (
    Fields,
    Json,
    Reader,
    as_integer,
    as_list,
    as_name,
    as_number,
    as_object,
    as_text,
    parse_object,
)
from trajkit_shim.pauses import Gate, Weights
from trajkit_shim.responses import cancel_on_disconnect
from trajkit_shim.sessions.quotas import Limits
from trajkit_shim.sessions.sessions import (
    FILTERS,
    EndedBy,
    Outcome,
    SessionStore,
    Terms,
)
from trajkit_shim.timing import Timings

TOKEN_HEADER = "x-admin-token"

_LIMITS = ("max_turns", "max_prompt_tokens", "max_output_tokens", "max_context_tokens")
# the fields of requests' bodies
_TERMS = "sampling client_sampling ttl_seconds group_id reward metadata replay"
_OPEN = f"session_id {' '.join(_LIMITS)} {_TERMS}"
_END = "reward error metadata wait_seconds"
_PAUSE = "wait_seconds abort max_seconds"
# from a directory or from memory
_UPDATE = "weight_version model_path tensors load_format"
# what is measured of a turn
_PARTS = ("gateway", "busy", "engine")

# a duration; no request may make the gateway wait for more than a day
_SECONDS = partial(as_number, minimum=0.0, maximum=24 * 3600.0)
_POSITIVE = partial(as_integer, minimum=1)

# sessions of a list whose request sets no limit
_LISTED = 100

Answer: TypeAlias = Response | Json
Handler: TypeAlias = Callable[[Request, Fields], Answer | Awaitable[Answer]]
ReadBody: TypeAlias = Callable[[Request], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Admin:
    """The routes of the trainer."""

    sessions: SessionStore
    gate: Gate
    weights: Weights
    timings: Timings
    read_body: ReadBody  # returns a request's body; rejects one that is too long
    token: str | None  # required in every request

    def routes(self) -> Iterator[Route]:
        """Yield all routes."""
        session, store, weights = "/sessions/{session_id}", self.sessions, self.weights
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
            ("/admin/pause", "POST", self._pause, _PAUSE),
            ("/admin/resume", "POST", self._resume, ""),
            ("/admin/drain", "POST", self._drain, "wait_seconds"),
            ("/admin/timings", "GET", lambda *_: self.timings.describe(), None),
            ("/metrics", "GET", self._metrics, None),
            ("/engine", "GET", lambda *_: weights.describe(), None),
            ("/engine/pause", "POST", self._pause_engine, "timeout_s"),
            ("/engine/update", "POST", self._update_engine, _UPDATE),
            ("/engine/resume", "POST", self._resume_engine, ""),
        )
        for path, method, handler, fields in table:
            endpoint = partial(self._answer, handler, fields)
            yield Route(path, endpoint, methods=[method])

    async def _answer(
        self, handler: Handler, fields: str | None, request: Request
    ) -> Response:
        """Check token and body of a request. ``fields``: None if it has no body."""
        if self.token is not None:
            check_token(request, self.token)
        body = Fields({})
        if fields is not None:
            body = Fields(parse_object(await self.read_body(request) or b"{}"))
            body.only(fields.split())
        answer = handler(request, body)
        if not isinstance(answer, (Response, dict)):
            answer = await answer
        return answer if isinstance(answer, Response) else JSONResponse(answer)

    def _open(self, _: Request, body: Fields) -> Json:
        terms = Terms(
            pins=parse_pins(body.json.get("sampling")),
            client_sampling=parse_client_sampling(body.json.get("client_sampling")),
            limits=Limits(**{name: body.get(name, _POSITIVE) for name in _LIMITS}),
            ttl_seconds=body.get("ttl_seconds", _SECONDS),
            replay=body.flag("replay"),
            group_id=body.get("group_id", as_text),
        )
        session_id = body.get("session_id", as_text)
        opened = self.sessions.open(session_id, terms, _outcome_fields(body))
        return {"session_id": opened.session_id, "api_key": opened.api_key}

    def _list(self, request: Request, _: Fields) -> Json:
        asked = Fields({**request.query_params})
        asked.only({"limit", *FILTERS})
        # of a query every value is a text
        limit = asked.json.pop("limit", str(_LISTED))
        wanted = {name: asked.text(name) for name in asked.json}
        if not str(limit).isdecimal():
            asked.refuse("limit", f"{limit!r}: not a number of sessions")
        found = self.sessions.matching(wanted)
        return {"sessions": [*islice(found, int(str(limit)))]}

    async def _end(self, how: EndedBy, request: Request, body: Fields) -> Json:
        name, fields = _session_id(request), _outcome_fields(body)
        return await self.sessions.finish(name, how, _wait(body), fields)

    def _reopen(self, request: Request, _: Fields) -> Json:
        return self.sessions.reopen(_session_id(request)).describe()

    async def _pause(self, request: Request, body: Fields) -> Json:
        pause = self.gate.pause(
            wait_seconds=_wait(body, default=60.0),
            abort=body.flag("abort"),
            max_seconds=body.get("max_seconds", _SECONDS),
        )
        await cancel_on_disconnect(request, pause)
        return {"paused": True}

    def _resume(self, _: Request, __: Fields) -> Json:
        self.gate.resume()
        return {"paused": False}

    async def _drain(self, _: Request, body: Fields) -> Json:
        await self.sessions.drain(_wait(body, default=60.0))
        return {**self.sessions.counts()}

    def _metrics(self, _: Request, __: Fields) -> Response:
        counts = self.sessions.counts()
        times = self.timings.describe()
        spans = {part: times.get(f"{part}_ms", {}) for part in _PARTS}
        metrics: dict[str, dict[str, object]] = {
            "sessions gauge": {
                f'{{state="{state}"}}': counts[state] for state in ("open", "closed")
            },
            "calls_in_flight gauge": {"": counts["in_flight"]},
            "turns_total counter": {"": counts["turns"]},
            "paused gauge": {"": int(self.gate.paused)},
            "turn_milliseconds gauge": {
                f'{{part="{part}",statistic="{name}"}}': value
                for part, span in spans.items()
                for name, value in cast("Json", span).items()
            },
        }
        lines = []
        for metric, values in metrics.items():
            name = f"trajkit_{metric.partition(' ')[0]}"
            lines.append(f"# TYPE trajkit_{metric}")
            lines += (f"{name}{labels} {value}" for labels, value in values.items())
        form = "text/plain; version=0.0.4; charset=utf-8"
        return Response("\n".join([*lines, ""]), headers={"content-type": form})

    async def _pause_engine(self, request: Request, body: Fields) -> Json:
        seconds = body.get("timeout_s", _SECONDS)
        lease = self.weights.pause(600.0 if seconds is None else seconds)
        await cancel_on_disconnect(request, lease)
        return self.weights.describe()

    async def _update_engine(self, _: Request, body: Fields) -> Json:
        source = body.get("tensors", _names)
        unused = "load_format" if source is None else "model_path"
        body.only(_UPDATE.replace(unused, "").split())
        await self.weights.update(
            body.name("model_path") if source is None else source,
            body.name("weight_version"),
            body.get_text("load_format"),
        )
        return self.weights.describe()

    async def _resume_engine(self, _: Request, __: Fields) -> Json:
        await self.weights.resume()
        return self.weights.describe()


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


def _session_id(request: Request) -> str:
    return str(request.path_params["session_id"])


def _names(value: object, where: str) -> list[str]:
    return [
        as_name(text, f"{where}[{i}]") for i, text in enumerate(as_list(value, where))
    ]


def _wait(body: Fields, default: float = 0.0) -> float:
    seconds = body.get("wait_seconds", _SECONDS)
    return default if seconds is None else seconds


def _outcome_fields(body: Fields) -> Outcome:
    any_number = partial(as_number, minimum=-math.inf, maximum=math.inf)
    readers: dict[str, Reader[object]]
    readers = {"reward": any_number, "error": as_text, "metadata": as_object}
    fields = {k: body.get(k, read) for k, read in readers.items() if k in body.json}
    if fields.get("metadata", {}) is None:
        del fields["metadata"]
    return cast("Outcome", fields)
