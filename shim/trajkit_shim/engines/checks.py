"""What a prompt, an engine's reply and an engine must satisfy.

`check_prompt` is for prompts on their way to an engine, `accept` for what a server wrote
as JSON, `check_sample` for every sample before it is a turn, `check_engine` for an engine
before anyone is served. A reply that contradicts itself, or the request, is refused whole:
part of it may belong to another call, or be lost.
"""

import asyncio
import secrets
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from trajkit.schema.engine import MAX_LOGPROB, not_logprobs
from trajkit_shim.engines import base
from trajkit_shim.errors import EngineError

# how long two tokens may take when a gateway starts, before it warns
_SLOW_SECONDS = 20.0


def check_prompt(
    prompt_ids: npt.NDArray[np.int32], info: base.EngineInfo, n_checked: int = 0
) -> None:
    """Reject a prompt that the engine cannot take; its first ids were checked before.

    Some engines do not check ids: an id outside the vocabulary makes them read past
    their embedding table and crash, with every other call.
    """
    n_prompt = len(prompt_ids)
    if prompt_ids.ndim != 1 or not n_prompt:
        message = f"the prompt has no tokens: its shape is {prompt_ids.shape}"
        raise EngineError(message, 400, code="empty_prompt")
    for fault in _outside(prompt_ids[n_checked:], info, "prompt_ids", n_checked):
        raise EngineError(fault, 400, code="token_out_of_vocabulary")
    if n_prompt >= info.max_context_tokens:
        raise too_long(n_prompt, info.max_context_tokens)


def too_long(n_prompt: int, max_tokens: int, least: str = "") -> EngineError:
    """Return the error of a prompt that leaves no room for a reply."""
    return EngineError(
        f"this model's maximum context length is {max_tokens} tokens; the messages and "
        f"tools are {least}{n_prompt} tokens and leave no room for a reply",
        400,
        code="context_length_exceeded",
        overflow=(n_prompt, max_tokens),
    )


def check_sampling(
    sampling: base.Sampling, engine: str, takes: Collection[str] = ()
) -> None:
    """Reject parameters that an engine of this process lacks.

    ``takes``: those of top_p, top_k, stop and structural_tag that it has.
    """
    unused = {"top_p": (None, 1.0), "top_k": (None, -1), "stop": ((),)}
    unused["structural_tag"] = (None,)
    lacks = [name for name in unused if getattr(sampling, name) not in unused[name]]
    for name in (*lacks, *sampling.extra):
        if name not in takes:
            raise EngineError(f"the {engine} engine has no parameter {name!r}", 400)


def accept(
    request: base.EngineRequest,
    server: str,
    *,
    request_id: object,
    output_ids: object,
    scored: Sequence[tuple[Any, object]],
    finish_reason: Any,
    counts: Mapping[str, Any],
    mask: Any,
    prompt_ids: object,
    spans: Any,
    experts: npt.NDArray[np.int16] | None,
) -> base.Sample:
    """Return the sample of a server's answer, or raise `EngineError`.

    ``scored`` has each logprob with its id. ``counts`` of tokens must be those that were
    sent and came (``total_tokens`` may be missing); an impossible number of cached tokens
    is unknown. Weight versions (``spans``) are unknown if one is null.
    """

    def need(fits: bool, what: str, value: object, rule: str) -> None:
        if not fits:
            shown = repr(value)
            shown = shown if len(shown) <= 100 else f"{shown[:100]}..."
            raise EngineError(f"the {server} server's {what} is {shown}: {rule}")

    def as_ids(what: str, values: Any) -> npt.NDArray[np.int32]:
        fits = isinstance(values, list) and {*map(type, values)} <= {int}
        fits = fits and all(-(2**31) <= value < 2**31 for value in values)
        need(fits, what, values, "expected a list of integers")
        return np.array(values, np.int32)

    own = request.request_id
    need(request_id == own, "request id", request_id, f"the request's is {own!r}")
    worded = finish_reason is None or (isinstance(finish_reason, str) and finish_reason)
    need(bool(worded), "finish_reason", finish_reason, "expected a text or null")
    ids = as_ids("output ids", output_ids)
    n_prompt, n_output = len(request.prompt_ids), len(ids)
    expected = {"prompt_tokens": n_prompt, "completion_tokens": n_output}
    if counts.get("total_tokens") is not None:
        expected["total_tokens"] = n_prompt + n_output
    for name, number in expected.items():
        count = counts.get(name)
        same = type(count) is int and count == number
        need(same, name, count, f"{number} were counted")
    if len(scored) != n_output:
        pairs = f"{len(scored)} logprobs for {n_output} output ids"
        raise EngineError(f"the {server} server gave {pairs}")
    for i, ((logprob, label), token) in enumerate(
        zip(scored, ids.tolist(), strict=True)
    ):
        # True is no number; JSON has null for a number that is not finite, and a float32
        # has no larger one
        finite = type(logprob) is not float or abs(logprob) < 1e38
        finite = finite and logprob is not None
        where = f"logprob {i}"
        if type(label) is not int or label != token:
            message = f"{where} is of token {label!r}, not {token}"
            raise EngineError(f"the {server} server's {message}")
        need(finite, where, logprob, "the engine's logits were not finite")
        need(type(logprob) in (int, float), where, logprob, "expected a number")
    versions = list[base.WeightSpan]()
    for span in spans or ():
        version, ends = span["version"], [span["start"], span["end"]]
        is_text = version is None or isinstance(version, str)
        need(is_text, "weight version", version, "expected a text or null")
        numbers = as_ids("weight version's range", ends).tolist()
        versions.append(base.WeightSpan(version, *numbers))
    known = all(span.version is not None for span in versions)
    # half a surrogate pair is an error, which the log cannot have
    "".join(str(span.version) for span in versions).encode()
    str(finish_reason).encode()
    cached = counts.get("cached_tokens")
    possible = type(cached) is int and 0 <= cached <= n_prompt
    listed = mask is None or isinstance(mask, list)
    need(listed, "sampling mask", mask, "expected a list of lists of integers")
    for allowed in mask or ():
        as_ids("sampling mask", allowed)
    return base.Sample(
        output_ids=ids,
        output_logprobs=np.array([logprob for logprob, _ in scored], np.float32),
        finish_reason=finish_reason,
        weight_versions=tuple(versions) if known else (),
        cached_tokens=cached if possible else None,
        prompt_ids=None if prompt_ids is None else as_ids("prompt ids", prompt_ids),
        routed_experts=experts,
        sampling_mask=mask,
    )


def check_sample(
    sample: base.Sample,
    prompt_ids: npt.NDArray[np.int32],
    sampling: base.Sampling,
    info: base.EngineInfo,
) -> None:
    """Raise `EngineError` for a sample that cannot be of this prompt and parameters.

    No id follows one that had to end the reply. A logprob is wrong if it is above 0 by
    more than rounding, or the -9999 that some engines write for one that is missing or
    not finite. Weight versions must cover each id once, and a sampling mask must contain
    it, and each id once.
    """
    for fault in _faults(sample, prompt_ids, sampling, info):
        raise EngineError(f"the engine gave {fault}")


def _faults(
    sample: base.Sample,
    prompt_ids: npt.NDArray[np.int32],
    sampling: base.Sampling,
    info: base.EngineInfo,
) -> Iterator[str]:
    ids, consumed, mask = sample.output_ids, sample.prompt_ids, sample.sampling_mask
    if consumed is not None and len(consumed) != len(prompt_ids):
        wrong = f"{len(consumed)} prompt tokens but was given {len(prompt_ids)}"
        yield f"another prompt's reply: it consumed {wrong}"
    if consumed is not None and (i := _first(consumed != prompt_ids)) is not None:
        wrong = f"{consumed[i]} as token {i} but was given {prompt_ids[i]}"
        yield f"another prompt's reply: it consumed {wrong}"
    if len(ids) > sampling.max_new_tokens:
        yield f"{len(ids)} output ids, but {sampling.max_new_tokens} were asked for"
    if sample.ended and not len(ids):
        yield f"no output ids, but the finish reason {sample.finish_reason!r}"
    yield from _outside(ids, info, "output_ids")
    end = _first((ids[:-1, None] == sampling.stop_token_ids).any(axis=1))
    if end is not None and not sampling.extra.get("ignore_eos"):
        yield f"{len(ids) - end - 1} ids after {ids[end]}, which ends a reply"
    logprobs = sample.output_logprobs
    for name, values in (("logprobs", logprobs), ("sampling masks", mask)):
        if values is not None and len(values) != len(ids):
            yield f"{len(values)} {name} for {len(ids)} output ids"
    if logprobs is not None:
        i = _first(not_logprobs(logprobs) | (logprobs > MAX_LOGPROB))
        if i is not None:
            wrong = f"{logprobs[i]}, which is not a log-probability"
            rule = "it is above 0, or says that one is missing or not finite"
            yield f"output_logprobs[{i}] = {wrong}: {rule}"
    spans = [(span.start, span.stop) for span in sample.weight_versions]
    ends = [0, *sorted(stop for _, stop in spans)]
    if spans and (spans != [*pairwise(ends)] or ends[-1] != len(ids)):
        shown = ", ".join(f"{start}:{stop}" for start, stop in spans)
        rule = "they must cover each id once"
        yield f"weight versions that cover {shown} of {len(ids)} output ids: {rule}"
    for i, allowed in enumerate(mask or ()):
        yield from _outside(np.asarray(allowed), info, f"sampling_mask[{i}]")
        if ids[i] not in allowed:
            yield f"sampling_mask[{i}], which lacks {ids[i]}, which was drawn"
        if len({*allowed}) < len(allowed):
            yield f"sampling_mask[{i}], which has an id twice"


def _outside(
    ids: npt.NDArray[Any], info: base.EngineInfo, name: str, start: int = 0
) -> Iterator[str]:
    """An id outside the vocabulary; ``start``: the index of the first one."""
    if (i := _first((ids < 0) | (ids >= info.vocab_size))) is not None:
        vocabulary = f"the vocabulary of {info.model!r}, [0, {info.vocab_size})"
        yield f"{name}[{start + i}] = {ids[i]} is outside {vocabulary}"


def _first(wrong: npt.NDArray[np.bool_]) -> int | None:
    """The index of the first true value."""
    return int(np.argmax(wrong)) if wrong.any() else None


async def check_engine(engine: base.Engine) -> base.EngineInfo:
    """Sample two tokens, close the engine, and return what it serves.

    Raises `ConnectionError` if its samples cannot be trained. Warns if it does not answer:
    a gateway that was killed in a pause leaves its servers paused.
    """
    resume = " and ".join(getattr(engine, "resume_urls", ()))
    warning = (
        f"trajkit: warning: the engine has not sampled a token for {_SLOW_SECONDS:g} s; "
        f"it may be paused. To resume it: POST {{}} to {resume or 'its server'}\n"
    )
    # for a sampling mask a vLLM server asks for a limit
    top_k = 20 if getattr(engine, "sampling_masks", False) else None
    sampling = base.Sampling(max_new_tokens=2, temperature=1.0, top_k=top_k)
    prompt, request_id = np.zeros(1, np.int32), secrets.token_hex(16)
    request = base.EngineRequest(
        prompt_ids=prompt, sampling=sampling, request_id=request_id, session_id="probe"
    )
    loop = asyncio.get_running_loop()
    slow = loop.call_later(_SLOW_SECONDS, sys.stderr.write, warning)
    try:
        info = await engine.info()
        sample = await engine.generate(request)
        check_sample(sample, prompt, sampling, info)
        # an engine whose server may have been started with unsuitable settings
        if check := getattr(engine, "check", None):
            await check(request)
        lacks = "logprobs" if sample.output_logprobs is None else "output ids"
        if lacks == "logprobs" or not len(sample.output_ids):
            raise EngineError(f"its samples could not be trained: it gave no {lacks}")
    except EngineError as error:
        raise ConnectionError(f"the engine does not work: {error}") from error
    finally:
        slow.cancel()
        await engine.close()
    return info
