"""Traces of rLLM's model gateway, in its SQLite store (its ``TraceRecord``)."""

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trajkit.errors import FormatError
from trajkit.importers.findings import (
    ChatTokenizer,
    Finding,
    Head,
    Refused,
    has_numbers,
    text_of,
    time_of,
    unless_empty,
    versions_of,
)
from trajkit.io.json_numbers import IDS, ITEMS, Reader, Shape

if TYPE_CHECKING:
    from sqlite3 import Connection

NAME = "rllm"

_SHAPE: Shape = {
    "messages": ITEMS,
    "prompt_token_ids": IDS,
    "prompt_delta_token_ids": IDS,
    "completion_token_ids": IDS,
}
_ORDER = """
SELECT s.session_id, {run}, t.trace_id, t.data
FROM trace_sessions s JOIN traces t ON t.trace_id = s.trace_id
ORDER BY s.created_at, s.rowid
"""
_APART = """
SELECT NULL, NULL, trace_id, data FROM traces
WHERE trace_id NOT IN (SELECT trace_id FROM trace_sessions)
ORDER BY rowid
"""
_ORPHANS = """
SELECT session_id, trace_id FROM trace_sessions
WHERE trace_id NOT IN (SELECT trace_id FROM traces)
"""

_Ids = npt.NDArray[np.int32]


def detect(head: Head) -> bool:
    """An SQLite database."""
    return head.magic.startswith(b"SQLite format 3\0")


def read(file: Path, tokenizer: ChatTokenizer | None) -> Iterator[Finding]:
    """The traces of all sessions in order of time, then traces without a session."""
    import sqlite3  # nothing else needs it

    try:
        # read-only: it is neither created nor changed
        base = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)
        try:
            yield from _traces(base)
        finally:
            base.close()
    except sqlite3.Error as error:
        raise FormatError(f"{file}: cannot read traces: {error}") from None


def _traces(base: "Connection") -> Iterator[Finding]:
    columns = {row[1] for row in base.execute("PRAGMA table_info(trace_sessions)")}
    run = "s.run_id" if "run_id" in columns else "''"
    runs: dict[str, set[str]] = {}
    names = f"SELECT DISTINCT session_id, {run} FROM trace_sessions s"
    for session, name in base.execute(names):
        runs.setdefault(session, set()).add(name)
    read = Reader(_SHAPE).read
    # prompt and output of each trace that others may continue
    paths: dict[str, _Ids] = {}
    # traces that trace_sessions does not name come last, without a session
    lines = chain(base.execute(_ORDER.format(run=run)), base.execute(_APART))
    for session, name, trace, data in lines:
        # Several runs of the gateway may use one session id. In a damaged database the
        # index may lack rows of the table.
        once = len(runs.get(session, {name})) == 1
        found = Finding(
            f"trace {trace!r}", text_of(session if once else f"{name}/{session}")
        )
        with found:
            record = _parsed(read, data)
            if session is None:
                found.session = text_of(record.get("session_id"))
            found.fields = _fields(str(trace), record, paths)
        yield found
    for session, trace in base.execute(_ORPHANS):
        detail = "its session refers to it, but it is missing"
        yield Finding(f"trace {trace!r}", session, problem="lost", detail=detail)


def _parsed(read: Callable[[bytes], object], data: object) -> dict[str, object]:
    """The record in a trace's data."""
    try:
        record = read(data if isinstance(data, bytes) else str(data).encode())
    except ValueError as error:
        raise Refused("unreadable", str(error)) from None
    if not isinstance(record, dict):
        raise Refused("unreadable", "not an object")
    return record


def _fields(
    trace: str, record: dict[str, object], paths: dict[str, _Ids]
) -> dict[str, object]:
    prompt = record.get("prompt_token_ids")
    prompt = prompt if has_numbers(prompt) else None
    delta = record.get("prompt_delta_token_ids")
    if delta is not None:
        parent = text_of(record.get("parent_trace_id"))
        before = None if parent is None else paths.get(parent)
        if before is None:
            detail = f"its prompt continues trace {parent!r}, which has no path"
            raise Refused("no_parent", detail)
        if isinstance(delta, np.ndarray):
            prompt = np.concatenate([before, delta])
        elif isinstance(delta, list):
            # `from_records` reports the value that is not an id
            prompt = [*before.tolist(), *delta] if delta else before
        else:
            detail = f"prompt_delta_token_ids is a {type(delta).__name__}, not a list"
            raise Refused("unreadable", detail)
    output = record.get("completion_token_ids")
    # a trace without ids has an empty list
    output = output if has_numbers(output) else None
    if isinstance(prompt, np.ndarray) and isinstance(output, np.ndarray):
        paths[trace] = np.concatenate([prompt, output])
    reply = record.get("response_message")
    n_output = len(output) if isinstance(output, np.ndarray) else 0
    return {
        "prompt_ids": prompt,
        "output_ids": output,
        "output_logprobs": record.get("logprobs"),
        "finish_reason": text_of(record.get("finish_reason")),
        "prompt_messages": unless_empty(record.get("messages")),
        "response_message": reply if isinstance(reply, dict) and reply else None,
        "weight_versions": versions_of(record.get("weight_version"), n_output),
        "request_id": trace,
        "model": text_of(record.get("model")),
        # rLLM sets it when the response is complete
        "ended_at": time_of(record.get("timestamp")),
    }
