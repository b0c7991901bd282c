"""Logs of requests and responses of an OpenAI-style server, vLLM's and SGLang's."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from trajkit.importers.findings import (
    ChatTokenizer,
    Finding,
    Head,
    object_of,
    text_of,
    time_of,
)
from trajkit.importers.json_files import findings
from trajkit.importers.openai_ids import REQUEST, RESPONSE, calls
from trajkit.io.json_numbers import EACH, Shape

NAME = "openai"

_PAIRS = (("request", "response"), ("request_body", "response_body"))
_SHAPE: Shape = {
    **{name: {**REQUEST, "body": REQUEST} for name, _ in _PAIRS},
    **{
        name: {**RESPONSE, EACH: RESPONSE, "body": {**RESPONSE, EACH: RESPONSE}}
        for _, name in _PAIRS
    },
}


def detect(head: Head) -> bool:
    """A request with its response, and not a completion of Polar."""
    pair = any(head.has(*names) for names in _PAIRS)
    return pair and not head.has("completion_id")


def read(file: Path, tokenizer: ChatTokenizer | None) -> Iterator[Finding]:
    """One call per choice of each response of a line."""
    return findings(file, _calls, _SHAPE)


def _calls(place: str, value: dict[str, object]) -> Iterator[Finding]:
    found = Finding(place, session_of(value))
    request, response = (
        next((_body(value[name]) for name in names if name in value), None)
        for names in zip(*_PAIRS, strict=True)
    )
    if not isinstance(request, dict) or response is None:
        yield found.refuse("unreadable", "no request, or no response")
        return
    found.session = found.session or session_of(request)
    found.fields = {
        "started_at": time_of(value.get("started_at", value.get("timestamp"))),
        "ended_at": time_of(value.get("ended_at")),
    }
    answers = response if isinstance(response, list) else [response]
    for k, answer in enumerate(answers):
        place = found.place if k == 0 else f"{found.place}, choice {k}"
        one = Finding(place, found.session, dict(found.fields))
        if not isinstance(answer, dict):
            yield one.refuse("unreadable", "an answer is not an object")
            continue
        name = text_of(answer.get("id")) or text_of(request.get("rid"))
        one.fields["request_id"] = name
        yield from calls(one, _asked(request, k, len(answers)), answer)


def session_of(value: Mapping[str, object]) -> str | None:
    """``session_id`` of an object or of its metadata."""
    within = object_of(value.get("metadata")).get("session_id")
    return text_of(value.get("session_id")) or text_of(within)


def _body(value: object) -> dict[str, object] | list[object] | None:
    """The object or its ``body``; SGLang's own route may have a list."""
    if isinstance(value, dict):
        body = value.get("body")
        return body if isinstance(body, dict | list) else value
    return value if isinstance(value, list) else None


def _asked(request: dict[str, object], k: int, n: int) -> dict[str, object]:
    """The request of the k-th of n answers.

    SGLang takes a list of prompts and answers each. If their numbers differ, it is
    unknown which prompt an answer belongs to.
    """
    ids = request.get("input_ids")
    if isinstance(ids, list) and ids and isinstance(ids[0], list):
        return {**request, "input_ids": ids[k] if len(ids) == n else None}
    return request
