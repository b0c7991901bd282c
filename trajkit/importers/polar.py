"""Polar's completions: one per file, or a response of its route (spec: polar 1.1, 1.3)."""

from collections.abc import Iterator
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

NAME = "polar"

_ONE: Shape = {
    "transformed_request": REQUEST,
    "request": REQUEST,
    "response": RESPONSE,
}
_SHAPE: Shape = {**_ONE, "completions": {EACH: _ONE}}
# keys that Polar writes instead of a field larger than a mebibyte
_MARKS = ("__truncated", "_truncated_keys_omitted")


def detect(head: Head) -> bool:
    """A completion, or a session with completions."""
    return head.has("completion_id") or head.has("session_id", "completions")


def read(file: Path, tokenizer: ChatTokenizer | None) -> Iterator[Finding]:
    """The completions of a file, sorted by time and name as in Polar."""
    return findings(file, _completions, _SHAPE)


def _completions(place: str, record: dict[str, object]) -> Iterator[Finding]:
    listed = record.get("completions")
    if not isinstance(listed, list):
        yield from _calls(place, record, None)
        return
    session = text_of(record.get("session_id"))
    named = [
        (f"{place}, completion {k}", object_of(one)) for k, one in enumerate(listed)
    ]
    for name, one in sorted(named, key=lambda pair: order_of(pair[1])):
        yield from _calls(name, one, session)


def order_of(completion: dict[str, object]) -> tuple[str, str]:
    """Polar's sort key: the time of the response as text, then the name."""
    time, name = completion.get("timestamp"), completion.get("completion_id")
    return str(time or ""), str(name or "")


def _calls(
    place: str, one: dict[str, object], session: str | None
) -> Iterator[Finding]:
    name = text_of(one.get("session_id")) or session
    found = Finding(place, name)
    request, response = one.get("transformed_request"), one.get("response")
    if request is None:
        request = one.get("request")
    if not isinstance(request, dict) or not isinstance(response, dict):
        yield found.refuse("unreadable", "no request, or no response")
        return
    if _is_cut(request) or _is_cut(response) or any(mark in one for mark in _MARKS):
        yield found.refuse("truncated", "Polar truncates fields larger than a mebibyte")
        return
    found.fields = {
        "request_id": text_of(one.get("completion_id")),
        # Polar sets it when the response is complete
        "ended_at": time_of(one.get("timestamp")),
    }
    # the agent received only the first choice (spec: polar 2.1)
    yield next(calls(found, request, response))


def _is_cut(value: object) -> bool:
    pending = [value]
    while pending:
        within = pending.pop()
        if isinstance(within, dict):
            if any(mark in within for mark in _MARKS):
                return True
            pending.extend(within.values())
        elif isinstance(within, list):
            pending.extend(within)
    return False
