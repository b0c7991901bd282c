"""Token ids and logprobs in the responses of OpenAI-style servers.

Where vLLM and SGLang put them, by endpoint (spec: engines-and-clients 1.4, polar 2.1):

==================  ====================================  =============================
                    prompt                                output, and its logprobs
==================  ====================================  =============================
vLLM chat           response.prompt_token_ids             choice.token_ids,
                                                          choice.logprobs.content
vLLM completions    choice.prompt_token_ids, or the       choice.token_ids,
                    request's ``prompt`` of ids           choice.logprobs.token_logprobs
SGLang chat         choice.prompt_token_ids               choice.response_token_ids,
                                                          choice.meta_info
SGLang /generate    the request's ``input_ids``           output_ids, meta_info
==================  ====================================  =============================
"""

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from trajkit.importers.findings import (
    Finding,
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
_TOKEN_ID = "token_id:"
_MOST_DIGITS = 10


def calls(found: Finding, request: _Object, response: _Object) -> Iterator[Finding]:
    """One call per choice of a response.

    Parameters
    ----------
    found : Finding
        Place, session and known fields of the record; copied for each choice.
    """
    common = {**found.fields, "model": text_of(response.get("model"))}
    common["prompt_messages"] = unless_empty(request.get("messages"))
    choices = response.get("choices")
    listed: list[object] = choices if isinstance(choices, list) else [response]
    for k, choice in enumerate(listed):
        place = found.place if k == 0 else f"{found.place}, choice {k}"
        one = Finding(place, found.session, dict(common), remarks=list(found.remarks))
        if not isinstance(choice, dict):
            one.refuse("unreadable", "a choice is not an object")
        else:
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
    output = _first_list(
        choice.get("token_ids"),
        choice.get("response_token_ids"),
        response.get("token_ids"),
        response.get("output_ids"),
    )
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


def _by_choice(choice: _Object) -> tuple[list[object] | None, list[object]] | None:
    """Ids (None: unknown) and logprobs of ``choice.logprobs``."""
    logprobs = object_of(choice.get("logprobs"))
    entries = [object_of(entry) for entry in list_of(logprobs.get("content"))]
    if entries:
        ids = [
            entry["token_id"] if "token_id" in entry else _spelled(entry.get("token"))
            for entry in entries
        ]
        return _pair(ids, [entry.get("logprob") for entry in entries])
    values, texts = (list_of(logprobs.get(n)) for n in ("token_logprobs", "tokens"))
    if not values:
        return None
    if len(texts) != len(values):
        texts = [None]
    return _pair([_spelled(text) for text in texts], values)


def _by_meta(meta: _Object) -> tuple[list[object] | None, list[object]] | None:
    """Ids and logprobs of SGLang's entries: (logprob, id, text) or objects."""
    pairs = [_of_entry(one) for one in list_of(meta.get("output_token_logprobs"))]
    if not pairs:
        return None
    return _pair([token for token, _ in pairs], [value for _, value in pairs])


def _of_entry(entry: object) -> tuple[object, object]:
    if isinstance(entry, dict):
        return entry.get("token_id"), entry.get("logprob")
    if isinstance(entry, list) and len(entry) > 1:
        return entry[1], entry[0]
    return None, None


def _pair(
    ids: list[object], values: list[object]
) -> tuple[list[object] | None, list[object]]:
    complete = all(type(token) is int for token in ids)
    return (ids if complete else None), values


def _spelled(token: object) -> int | None:
    """The id in a token that vLLM writes as ``token_id:5`` on request."""
    if isinstance(token, str) and token.startswith(_TOKEN_ID):
        digits = token.removeprefix(_TOKEN_ID)
        # Python may refuse to parse more digits
        if digits.isascii() and digits.isdecimal() and len(digits) <= _MOST_DIGITS:
            return int(digits)
    return None


def _fits(ids: list[object] | None, n: int, output: object) -> bool:
    """Whether logprobs belong to an output: the same ids, or as many if unknown."""
    listed = output.tolist() if isinstance(output, np.ndarray) else output
    if not isinstance(listed, list) or len(listed) != n:
        return False
    return ids is None or ids == listed


def _first_list(*values: object) -> list[object] | None:
    return next((v for v in values if isinstance(v, list | np.ndarray)), None)  # type: ignore[return-value]


def _versions(found: Finding, meta: _Object, about: _Object) -> None:
    output = found.fields["output_ids"]
    n = len(output) if isinstance(output, list | np.ndarray) else 0
    for source in (meta, about):
        pieces = list_of(source.get("weight_versions"))
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
    for source in (meta, about):
        version = versions_of(source.get("weight_version"), n)
        if version is not None:
            found.fields["weight_versions"] = version
            return
