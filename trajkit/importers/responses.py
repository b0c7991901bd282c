"""Token ids and logprobs in the responses of vLLM, SGLang and servers like them.

docs/import.md lists where each endpoint puts them.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, Final, TypeAlias

import numpy as np

from trajkit.files.json_numbers import EACH, IDS, ITEMS, Shape
from trajkit.importers.findings import (
    Refused,
    is_array,
    list_of,
    object_of,
    text_of,
    unless_empty,
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

STREAMED: Final = "a part of a stream: log the complete response"

_Object: TypeAlias = Mapping[str, object]
Source: TypeAlias = tuple[list[object] | None, list[object]]
"""Ids (None: unknown) and their logprobs."""

_TOKEN_ID = "token_id:"
_MOST_DIGITS = 10


def is_answer(value: object) -> bool:
    """Whether a value looks like a response of an engine, or a list of them."""
    if isinstance(value, list):
        value = value[0] if value else None
    return isinstance(value, dict) and not value.keys().isdisjoint(
        ("choices", "output_ids", "meta_info")
    )


def answers(request: _Object, response: object) -> Iterator[tuple[str, dict[str, Any]]]:
    """A suffix of the place, and the values, of each choice of a response.

    SGLang answers several prompts, or ``n`` samples, with a list.
    """
    listed = response if isinstance(response, list) else [response]
    if any(map(_is_chunk, listed)):
        raise Refused("unreadable", STREAMED)
    for k, answer in enumerate(listed):
        place = f", choice {k}" if k else ""
        if not isinstance(answer, dict):
            yield place, _refused("an answer is not an object")
            continue
        asked = _asked(request, k, len(listed))
        choices = answer.get("choices")
        several = (choices or [{}]) if isinstance(choices, list) else [answer]
        made = [_values(asked, answer, one) for one in several]
        _claim(made, answer)
        for j, one in enumerate(made):
            yield f"{place}, choice {j}" if j else place, one


def _refused(text: str) -> dict[str, Any]:
    return {"@refused": Refused("unreadable", text), "claims": [], "remarks": []}


def _is_chunk(answer: object) -> bool:
    """Whether an answer is a part of a stream."""
    value = object_of(answer)
    choices = [object_of(one) for one in list_of(value.get("choices"))]
    meta = object_of(value.get("meta_info"))
    unfinished = "finish_reason" in meta and meta["finish_reason"] is None
    return unfinished or any("delta" in choice for choice in choices)


def _asked(request: _Object, k: int, n: int) -> _Object:
    """The request of the k-th of n answers.

    SGLang takes a list of prompts and answers each. If their numbers differ, it is
    unknown which prompt an answer belongs to.
    """
    ids = request.get("input_ids")
    if isinstance(ids, list) and ids and isinstance(ids[0], list):
        return {**request, "input_ids": ids[k] if len(ids) == n else None}
    return request


def _values(request: _Object, response: _Object, choice: object) -> dict[str, Any]:
    """What is known of a choice, by the fields of a mapping."""
    if not isinstance(choice, dict):
        return _refused("a choice is not an object")
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
    outputs = (
        choice.get("token_ids"),
        choice.get("response_token_ids"),
        response.get("token_ids"),
        response.get("output_ids"),
    )
    sources = logprobs_of(choice.get("logprobs")), _of_entries(meta)
    output, logprobs, remarks = aligned(next(filter(is_array, outputs), None), *sources)
    message = choice.get("message")
    weights = (choice, meta, object_of(response.get("metadata")))
    pieces = next(
        filter(None, (list_of(w.get("weight_versions")) for w in weights)), []
    )
    names = (response.get("id"), response.get("request_id"), request.get("rid"))
    counts = (
        ("prompt_tokens", "prompt_ids"),
        ("completion_tokens", "output_ids"),
        ("output_token_logprobs_length", "output_ids"),
    )
    return {
        "prompt_ids": next(filter(_has_numbers, prompts), None),
        "output_ids": output,
        "source": logprobs and (None, logprobs),
        "remarks": remarks,
        "finish_reason": choice.get("finish_reason", meta.get("finish_reason")),
        "prompt_messages": unless_empty(request.get("messages")),
        "response_message": message if isinstance(message, dict) else None,
        "weight_version": _first_text(one.get("weight_version") for one in weights),
        "weight_versions": [
            {
                "version": text_of(piece.get("version")),
                "start": piece.get("start"),
                "stop": piece.get("end", piece.get("stop")),
            }
            for piece in pieces
            if isinstance(piece, dict)
        ],
        "request_id": _first_text(names),
        "model": text_of(response.get("model")),
        "tools": request.get("tools"),
        "claims": [(f"meta_info.{a}", b, meta[a]) for a, b in counts if a in meta],
    }


def _first_text(values: Any) -> str | None:
    return next(filter(None, map(text_of, values)), None)


def _has_numbers(value: object) -> bool:
    if isinstance(value, np.ndarray):
        return len(value) > 0
    return isinstance(value, list) and bool(value) and isinstance(value[0], int | float)


def _claim(made: list[dict[str, Any]], response: _Object) -> None:
    """Compare the usage of a response with the ids of all of its choices."""
    claims = usage_claims(object_of(response.get("usage")))
    if len(made) == 1:
        made[0]["claims"] += claims
        return
    for name, target, stated in claims:
        lists: list[Any] = [one.get(target) for one in made]
        if not all(map(is_array, lists)):
            continue
        total = sum(map(len, lists))
        # a prompt counts once for all of its samples
        once = sum(len(ids) for ids, _ in groupby(map(list, lists)))
        if stated != total and (target != "prompt_ids" or stated != once):
            text = f"{name} is {stated!r}, and the {len(made)} choices have {total}"
            for one in made:
                one["remarks"].append(("usage_contradicts", text))


def usage_claims(usage: _Object, name: str = "usage") -> list[tuple[str, str, object]]:
    """The numbers of tokens that a usage states, as `Finding.claims`."""
    names = {
        "prompt_tokens": "prompt_ids",
        "completion_tokens": "output_ids",
        "input_tokens": "prompt_ids",
        "output_tokens": "output_ids",
    }
    # Anthropic's input_tokens lack those that were cached
    if any(usage.get(f"cache_{kind}_input_tokens") for kind in ("read", "creation")):
        del names["input_tokens"]
    return [
        (f"{name}.{spelled}", target, usage[spelled])
        for spelled, target in names.items()
        if usage.get(spelled) is not None
    ]


def aligned(
    output: Any, *sources: Source | None
) -> tuple[Any, list[object] | None, list[tuple[str, str]]]:
    """An output, the logprobs that belong to it, and the remark if none does.

    Without an output, logprobs that name every id are a source of ids, too.
    """
    known = [one for one in sources if one is not None]
    if output is None:
        ids, logprobs = next((one for one in known if one[0] is not None), (None, None))
        return ids, logprobs, []
    if not known or not is_array(output):
        return output, None, []
    listed = output.tolist() if isinstance(output, np.ndarray) else output
    for ids, logprobs in known:
        if len(logprobs) == len(listed) and (ids is None or ids == listed):
            return output, logprobs, []
    ids, logprobs = known[0]
    text = f"{len(logprobs)} logprobs for {len(listed)} output ids"
    if ids is not None and len(logprobs) == len(listed):
        text = "they belong to other ids than the output"
    return output, None, [("logprobs_unaligned", text)]


def logprobs_of(value: object) -> Source | None:
    """Ids and logprobs: a list of numbers, or a choice's ``logprobs``."""
    if isinstance(value, list | np.ndarray):
        if len(value) and isinstance(value[0], dict | list):
            return _of_entries({"output_token_logprobs": value})
        return (None, list(value)) if len(value) else None
    logprobs = object_of(value)
    if entries := list_of(logprobs.get("content")):
        return _of_entries({"output_token_logprobs": list(map(object_of, entries))})
    values, texts = (list_of(logprobs.get(n)) for n in ("token_logprobs", "tokens"))
    ids = map(_spelled, texts if len(texts) == len(values) else [None])
    return _source([*ids], values)


def _of_entries(meta: _Object) -> Source | None:
    """Ids and logprobs of entries: (logprob, id, text), or objects."""
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
    return _source(ids, values)


def _source(ids: list[object], values: list[object]) -> Source | None:
    if not values:
        return None
    return (ids if all(type(token) is int for token in ids) else None), values


def _spelled(token: object) -> int | None:
    """The id in a token that vLLM writes as ``token_id:5`` on request."""
    digits = token.removeprefix(_TOKEN_ID) if isinstance(token, str) else ""
    # Python may refuse to parse more digits
    if digits == token or not digits.isascii() or len(digits) > _MOST_DIGITS:
        return None
    return int(digits) if digits.isdecimal() else None
