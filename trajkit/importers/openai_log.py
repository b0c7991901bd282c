"""Logs of requests and responses of an OpenAI-style server, vLLM's and SGLang's."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from trajkit.importers.completions import REQUEST, RESPONSE, calls
from trajkit.importers.found import Found, Head, Options, text_of, time_of
from trajkit.importers.texts import objects
from trajkit.json_arrays import Shape

NAME = "openai"

_PAIRS = (("request", "response"), ("request_body", "response_body"))
_SHAPE: Shape = {
    **{name: {**REQUEST, "body": REQUEST} for name, _ in _PAIRS},
    **{name: {**RESPONSE, "body": RESPONSE} for _, name in _PAIRS},
}


def detect(head: Head) -> bool:
    """A request and its response beside each other, and no more than that."""
    pair = any(head.has(*names) for names in _PAIRS)
    return pair and not head.has("completion_id")


def read(file: Path, options: Options) -> Iterator[Found]:
    """A call per choice of each line's response."""
    for text in objects(file, _SHAPE):
        if text.bad is not None:
            yield text.bad
            continue
        value = text.value
        found = Found(text.place, session_of(value))
        request, response = (
            next((_body(value[name]) for name in names if name in value), None)
            for names in zip(*_PAIRS, strict=True)
        )
        if request is None or response is None:
            found.problem, found.detail = "unreadable", "no request, or no response"
            yield found
            continue
        found.fields = {
            "request_id": text_of(response.get("id")) or text_of(request.get("rid")),
            "started_at": time_of(value.get("started_at", value.get("timestamp"))),
            "ended_at": time_of(value.get("ended_at")),
        }
        found.session = found.session or session_of(request)
        yield from calls(found, request, response)


def session_of(value: Mapping[str, object]) -> str | None:
    """``session_id`` of an object or of its metadata."""
    about = value.get("metadata")
    within = about.get("session_id") if isinstance(about, dict) else None
    return text_of(value.get("session_id")) or text_of(within)


def _body(value: object) -> dict[str, object] | None:
    """The object, or the one in its ``body``."""
    if isinstance(value, dict):
        body = value.get("body")
        return body if isinstance(body, dict) else value
    return None
