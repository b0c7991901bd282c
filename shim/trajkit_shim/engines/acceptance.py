"""What a server's reply must satisfy before it is a sample.

A reply that contradicts itself, or the request, is refused whole: part of it may belong
to another call, or be lost.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from trajkit_shim.engines import base, checks
from trajkit_shim.errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a server said of one call, as it said it; None: nothing."""

    request_id: object
    # the sampled ids, and for each the logprob and the id that it is of
    output_ids: object
    logprobs: Sequence[tuple[object, object]]
    finish_reason: object
    # counts of tokens, total_tokens only if the server has such a count
    prompt_tokens: object
    completion_tokens: object
    total_tokens: object = None
    cached_tokens: object = None
    # version, first and last output id (exclusive) of each span
    weight_versions: Sequence[tuple[object, object, object]] = ()
    prompt_ids: object = None
    sampling_mask: object = None
    routed_experts: npt.NDArray[np.int16] | None = None


def accept(
    answer: Answer,
    request: base.EngineRequest,
    info: base.EngineInfo,
    server: str,
    request_ids: Sequence[str] = (),
) -> base.Sample:
    """Return the sample of an answer, or raise `EngineError`.

    - It has the id of the request, or one of ``request_ids``, how a server writes it.
    - Ids are integers in the vocabulary; each has a logprob, a finite number, under its
      own id.
    - The counts of tokens are those of the prompt that was sent and of the ids that came.
      A missing count is refused, too.
    - No id follows one that had to end the reply.
    - A weight version is a text; the versions are unknown if one is null.
    - A finish reason is a text or null. Whether its reply trains: `Sample.complete`.
    - A count of cached tokens that is impossible is unknown.
    """

    def refuse(what: str, value: object, rule: str) -> EngineError:
        shown = repr(value)
        shown = shown if len(shown) <= 100 else f"{shown[:100]}..."
        return EngineError(f"the {server} server's {what} is {shown}: {rule}")

    expected = (request.request_id, *request_ids)
    if answer.request_id not in expected:
        rule = f"the request's is {request.request_id!r}"
        raise refuse("request id", answer.request_id, rule)
    reason = answer.finish_reason
    if not (reason is None or (isinstance(reason, str) and reason)):
        raise refuse("finish_reason", reason, "expected a text or null")
    output_ids = _ids(answer.output_ids)
    if output_ids is None:
        raise refuse("output ids", answer.output_ids, "expected a list of integers")
    n_prompt, n_output = len(request.prompt_ids), len(output_ids)
    counts = {
        "prompt_tokens": (answer.prompt_tokens, n_prompt),
        "completion_tokens": (answer.completion_tokens, n_output),
    }
    if answer.total_tokens is not None:
        counts["total_tokens"] = answer.total_tokens, n_prompt + n_output
    for name, (given, counted) in counts.items():
        if type(given) is not int or given != counted:
            raise refuse(name, given, f"{counted} were counted")
    prompt_ids = None
    if answer.prompt_ids is not None:
        prompt_ids = _ids(answer.prompt_ids)
        if prompt_ids is None:
            raise refuse("prompt ids", answer.prompt_ids, "expected integers")
    spans, known = list[base.WeightSpan](), True
    for version, start, stop in answer.weight_versions:
        if not (version is None or isinstance(version, str)):
            raise refuse("weight version", version, "expected a text or null")
        if not (type(start) is int and type(stop) is int):
            raise refuse("weight version's range", (start, stop), "expected integers")
        known &= version is not None
        spans.append(base.WeightSpan(version or "", start, stop))
    cached = answer.cached_tokens
    if not (type(cached) is int and 0 <= cached <= n_prompt):
        cached = None
    mask: Any = answer.sampling_mask
    if mask is not None and (
        not isinstance(mask, list) or any(_ids(ids) is None for ids in mask)
    ):
        raise refuse("sampling mask", mask, "expected a list of ids per output id")
    sample = base.Sample(
        output_ids=output_ids,
        output_logprobs=_logprobs(answer.logprobs, output_ids, server),
        finish_reason=reason,
        weight_versions=tuple(spans) if known else (),
        cached_tokens=cached,
        prompt_tokens=n_prompt,
        prompt_ids=prompt_ids,
        routed_experts=answer.routed_experts,
        sampling_mask=mask,
    )
    checks.check_sample(sample, request.prompt_ids, request.sampling, info)
    return sample


def _logprobs(
    scored: Sequence[tuple[object, object]],
    output_ids: npt.NDArray[np.int32],
    server: str,
) -> npt.NDArray[np.float32]:
    """The logprobs of the output ids, which are given with their ids."""
    where, ids = f"the {server} server's logprob", output_ids.tolist()
    if len(scored) != len(ids):
        message = f"the {server} server gave {len(scored)} logprobs for {len(ids)}"
        raise EngineError(f"{message} output ids")
    given = [logprob for logprob, _ in scored]
    labels = [label for _, label in scored]
    if not _all_of(labels, int) or labels != ids:
        pairs = zip(labels, ids, strict=True)
        i = next(i for i, (a, b) in enumerate(pairs) if type(a) is not int or a != b)
        raise EngineError(f"{where} {i} is of token {labels[i]!r}, not {ids[i]}")
    for i, logprob in enumerate(given):
        # JSON has null for a number that is not finite
        if logprob is None or (isinstance(logprob, float) and not isfinite(logprob)):
            raise EngineError(
                f"{where} {i}, of token {ids[i]}, is {logprob}: the engine's logits were "
                "not finite"
            )
        if type(logprob) not in (int, float):
            rule = f"{logprob!r}: expected a number"
            raise EngineError(f"{where} {i}, of token {ids[i]}, is {rule}")
    return np.array(given, np.float32)


def _ids(values: object) -> npt.NDArray[np.int32] | None:
    """The ids of a list; None if one is no integer, or beyond every vocabulary."""
    if not (isinstance(values, list) and _all_of(values, int)):
        return None
    with suppress(OverflowError):
        return np.array(values, np.int32)
    return None


def _all_of(values: Iterable[object], kind: type) -> bool:
    """Whether all values are of this very type: True is no integer."""
    return {*map(type, values)} <= {kind}
