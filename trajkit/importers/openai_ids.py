"""Token ids and logprobs in the responses of OpenAI-style servers, vLLM's and SGLang's.

docs/import.md lists where each endpoint puts them (spec: engines-and-clients 1.4, polar
2.1).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from trajkit.importers.findings import (
    Finding,
    Refused,
    has_numbers,
    list_of,
    object_of,
    text_of,
    unless_empty,
    versions_of,
)
from trajkit.io.json_numbers import EACH, IDS, ITEMS, Shape

REQUEST: Final[Shape] = {"messages": ITEMS, "input_ids": IDS, "prompt": IDS}
"""The long arrays of a request."""

_OF_CHOICE = ("prompt_token_ids", "input_token_ids", "token_ids", "response_token_ids")
RESPONSE: Final[Shape] = {
    **dict.fromkeys(("prompt_token_ids", "token_ids", "output_ids"), IDS),
    "choices": {EACH: dict.fromkeys(_OF_CHOICE, IDS)},
}
"""The long arrays of a response."""

_Object = Mapping[str, object]
_Source = tuple[list[object] | None, list[object]]
"""Ids (None: unknown) and their logprobs."""

_TOKEN_ID = "token_id:"
_MOST_DIGITS = 10


def calls(found: Finding, request: _Object, response: _Object) -> Iterator[Finding]:
    """One call per choice of a response, with what is known of the record."""
    common = {**found.fields, "model": text_of(response.get("model"))}
    common["prompt_messages"] = unless_empty(request.get("messages"))
    choices = response.get("choices")
    listed: list[object] = choices if isinstance(choices, list) else [response]
    for k, choice in enumerate(listed):
        place = found.place if k == 0 else f"{found.place}, choice {k}"
        one = Finding(place, found.session, dict(common), remarks=list(found.remarks))
        with one:
            if not isinstance(choice, dict):
                raise Refused("unreadable", "a choice is not an object")
            _fill(one, request, response, choice)
        yield one
    if choices == []:
        yield Finding(found.place, found.session, common)


def _fill(found: Finding, request: _Object, response: _Object, choice: _Object) -> None:
    meta = object_of(choice.get("meta_info"))
    prompts = (
        choice.get("input_token_ids"),
        choice.get("prompt_token_ids"),
        response.get("prompt_token_ids"),
        request.get("input_ids"),
        request.get("prompt"),
    )
    fields = found.fields
    fields["prompt_ids"] = next((p for p in prompts if has_numbers(p)), None)
    outputs = (
        choice.get("token_ids"),
        choice.get("response_token_ids"),
        response.get("token_ids"),
        response.get("output_ids"),
    )
    lists = (each for each in outputs if isinstance(each, list | np.ndarray))
    output: Any = next(lists, None)
    sources = [s for s in (_by_choice(choice), _by_meta(meta)) if s is not None]
    logprobs: list[object] | None = None
    if output is None:
        # logprobs that name every id are a source of ids, too
        with_ids = [s for s in sources if s[0] is not None]
        if with_ids:
            output, logprobs = with_ids[0]
    else:
        fitting = [values for ids, values in sources if _fits(ids, len(values), output)]
        if fitting:
            logprobs = fitting[0]
        elif sources:
            text = f"{len(sources[0][1])} logprobs for {len(output)} output ids"
            if sources[0][0] is not None and len(sources[0][1]) == len(output):
                text = "they belong to other ids than the output"
            found.remarks.append(("logprobs_unaligned", text))
    fields["output_ids"], fields["output_logprobs"] = output, logprobs
    reason = choice.get("finish_reason", meta.get("finish_reason"))
    fields["finish_reason"] = text_of(
        reason.get("type") if isinstance(reason, dict) else reason
    )
    message = choice.get("message")
    fields["response_message"] = message if isinstance(message, dict) else None
    _versions(found, meta, object_of(response.get("metadata")))


def _by_choice(choice: _Object) -> _Source | None:
    """Ids and logprobs of ``choice.logprobs``."""
    logprobs = object_of(choice.get("logprobs"))
    entries = [object_of(entry) for entry in list_of(logprobs.get("content"))]
    if entries:
        ids = [entry.get("token_id", _spelled(entry.get("token"))) for entry in entries]
        return _pair(ids, [entry.get("logprob") for entry in entries])
    values, texts = (list_of(logprobs.get(n)) for n in ("token_logprobs", "tokens"))
    if len(texts) != len(values):
        texts = [None]
    return _pair([_spelled(text) for text in texts], values)


def _by_meta(meta: _Object) -> _Source | None:
    """Ids and logprobs of SGLang's entries: (logprob, id, text) or objects."""
    ids: list[object] = []
    values: list[object] = []
    for entry in list_of(meta.get("output_token_logprobs")):
        if isinstance(entry, dict):
            entry = [entry.get("logprob"), entry.get("token_id")]
        known = isinstance(entry, list) and len(entry) > 1
        value, token = entry[:2] if known else (None, None)  # type: ignore[index]
        ids.append(token)
        values.append(value)
    return _pair(ids, values)


def _pair(ids: list[object], values: list[object]) -> _Source | None:
    if not values:
        return None
    return (ids if all(type(token) is int for token in ids) else None), values


def _spelled(token: object) -> int | None:
    """The id in a token that vLLM writes as ``token_id:5`` on request."""
    if isinstance(token, str) and token.startswith(_TOKEN_ID):
        digits = token.removeprefix(_TOKEN_ID)
        # Python may refuse to parse more digits
        if digits.isascii() and digits.isdecimal() and len(digits) <= _MOST_DIGITS:
            return int(digits)
    return None


def _fits(ids: list[object] | None, n: int, output: Any) -> bool:
    """Whether logprobs belong to an output: the same ids, or as many if unknown."""
    listed = output.tolist() if isinstance(output, np.ndarray) else output
    return len(listed) == n and (ids is None or ids == listed)


def _versions(found: Finding, *sources: _Object) -> None:
    output = found.fields["output_ids"]
    n = len(output) if isinstance(output, list | np.ndarray) else 0
    for pieces in (list_of(source.get("weight_versions")) for source in sources):
        if pieces and n:
            found.fields["weight_versions"] = [
                {
                    "version": text_of(piece.get("version")),
                    "start": piece.get("start"),
                    "stop": piece.get("end", piece.get("stop")),
                }
                for piece in pieces
                if isinstance(piece, dict)
            ]
            return
    named = (versions_of(source.get("weight_version"), n) for source in sources)
    found.fields["weight_versions"] = next(filter(None, named), None)
