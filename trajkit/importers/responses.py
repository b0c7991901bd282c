"""Token ids and logprobs in the responses of vLLM, SGLang and servers like them.

docs/import.md lists where each endpoint puts them.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from trajkit.files.json_numbers import EACH, IDS, ITEMS, Shape
from trajkit.importers.findings import (
    Finding,
    Refused,
    finish_of,
    has_numbers,
    list_of,
    object_of,
    text_of,
    unless_empty,
    versions_of,
)

REQUEST: Final[Shape] = {
    "messages": ITEMS,
    **dict.fromkeys(("input_ids", "prompt", "token_ids"), IDS),
}
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

STREAMED: Final = "a part of a stream: log the complete response"
_TOKEN_ID = "token_id:"
_MOST_DIGITS = 10


def answers(
    found: Finding, request: _Object, response: object, *, first: bool = False
) -> Iterator[Finding]:
    """One call per choice of a response, with what is known of the record.

    SGLang answers several prompts, or ``n`` samples, with a list. ``first``: only the
    first choice is a call.
    """
    listed = response if isinstance(response, list) else [response]
    if any(map(_is_chunk, listed)):
        yield found.refuse("unreadable", STREAMED)
        return
    for k, answer in enumerate(listed):
        place = found.place if k == 0 else f"{found.place}, choice {k}"
        one = _copy(found, place)
        if not isinstance(answer, dict):
            yield one.refuse("unreadable", "an answer is not an object")
            continue
        if one.fields.get("request_id") is None:
            names = (answer.get("id"), answer.get("request_id"), request.get("rid"))
            one.fields["request_id"] = next(filter(None, map(text_of, names)), None)
        calls = list(_calls(one, _asked(request, k, len(listed)), answer))
        yield from calls[:1] if first else calls


def _is_chunk(answer: object) -> bool:
    """Whether an answer is a part of a stream."""
    value = object_of(answer)
    choices = [object_of(one) for one in list_of(value.get("choices"))]
    meta = object_of(value.get("meta_info"))
    unfinished = "finish_reason" in meta and meta["finish_reason"] is None
    return unfinished or any("delta" in choice for choice in choices)


def _copy(found: Finding, place: str) -> Finding:
    return Finding(
        place,
        found.session,
        dict(found.fields),
        remarks=list(found.remarks),
        run_keys=found.run_keys,
        unread=found.unread if place == found.place else {},
        tools=found.tools,
    )


def _calls(found: Finding, request: _Object, response: _Object) -> Iterator[Finding]:
    fields = found.fields
    fields["model"] = fields.get("model") or text_of(response.get("model"))
    if fields.get("prompt_messages") is None:
        fields["prompt_messages"] = unless_empty(request.get("messages"))
    found.tools = request.get("tools")
    choices = response.get("choices")
    listed: list[object] = choices if isinstance(choices, list) else [response]
    made = []
    for k, choice in enumerate(listed):
        place = found.place if k == 0 else f"{found.place}, choice {k}"
        one = _copy(found, place)
        with one:
            if not isinstance(choice, dict):
                raise Refused("unreadable", "a choice is not an object")
            _fill(one, request, response, choice)
        made.append(one)
    if choices == []:
        made = [found]
    _claim(made, response)
    yield from made


def _fill(found: Finding, request: _Object, response: _Object, choice: _Object) -> None:
    meta = object_of(choice.get("meta_info"))
    prompts = (
        choice.get("input_token_ids"),
        choice.get("prompt_token_ids"),
        response.get("prompt_token_ids"),
        request.get("input_ids"),
        request.get("prompt"),
        # vLLM's /inference/v1/generate
        request.get("token_ids"),
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
    sources = [
        source
        for source in (logprobs_of(choice.get("logprobs")), _by_meta(meta))
        if source is not None
    ]
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
    fields["finish_reason"] = finish_of(
        choice.get("finish_reason", meta.get("finish_reason"))
    )
    message = choice.get("message")
    fields["response_message"] = message if isinstance(message, dict) else None
    _versions(found, choice, meta, object_of(response.get("metadata")))
    counts = (
        ("prompt_tokens", "prompt_ids"),
        ("completion_tokens", "output_ids"),
        ("output_token_logprobs_length", "output_ids"),
    )
    for name, target in counts:
        if name in meta:
            found.claims.append((f"meta_info.{name}", target, meta[name]))


def _claim(made: list[Finding], response: _Object) -> None:
    """Compare the usage of a response with the ids of all of its choices."""
    usage = object_of(response.get("usage"))
    if len(made) == 1:
        made[0].claims += usage_claims(usage)
        return
    for name, target, stated in usage_claims(usage):
        lists = [one.fields.get(target) for one in made]
        if not all(isinstance(ids, list | np.ndarray) for ids in lists):
            continue
        lengths = [len(ids) for ids in lists]  # type: ignore[arg-type]
        sums = {sum(lengths)}
        if target == "prompt_ids":
            # a prompt counts once for all of its samples
            sums.add(sum(n for n, ids in _runs(lengths, lists)))
        if stated is not None and stated not in sums:
            text = (
                f"{name} is {stated!r}, and the {len(made)} choices have {sum(lengths)}"
            )
            for one in made:
                one.remarks.append(("usage_contradicts", text))


def _runs(lengths: list[int], lists: list[Any]) -> Iterator[tuple[int, Any]]:
    """Of equal neighbours, the first."""
    for k, ids in enumerate(lists):
        if k == 0 or list(ids) != list(lists[k - 1]):
            yield lengths[k], ids


def usage_claims(usage: _Object, name: str = "usage") -> list[tuple[str, str, object]]:
    """The numbers of tokens that a usage states, as `Finding.claims`.

    Anthropic's input_tokens lack those that were cached.
    """
    claims = []
    for spelled, target in (
        ("prompt_tokens", "prompt_ids"),
        ("completion_tokens", "output_ids"),
        ("input_tokens", "prompt_ids"),
        ("output_tokens", "output_ids"),
    ):
        stated = usage.get(spelled)
        if stated is None:
            continue
        if spelled == "input_tokens":
            cached = [
                usage.get(f"cache_{kind}_input_tokens") for kind in ("read", "creation")
            ]
            if any(cached):
                continue
        claims.append((f"{name}.{spelled}", target, stated))
    return claims


def logprobs_of(value: object) -> _Source | None:
    """Ids and logprobs: a list of numbers, or a choice's ``logprobs``."""
    if isinstance(value, list | np.ndarray):
        if len(value) and isinstance(value[0], dict | list):
            return _by_meta({"output_token_logprobs": value})
        return None if not len(value) else (None, list(value))
    logprobs = object_of(value)
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
            named = entry.get("token_id", _spelled(entry.get("token")))
            entry = [entry.get("logprob"), named]
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


def _asked(request: _Object, k: int, n: int) -> _Object:
    """The request of the k-th of n answers.

    SGLang takes a list of prompts and answers each. If their numbers differ, it is
    unknown which prompt an answer belongs to.
    """
    ids = request.get("input_ids")
    if isinstance(ids, list) and ids and isinstance(ids[0], list):
        return {**request, "input_ids": ids[k] if len(ids) == n else None}
    return request
