"""Validates the prompts sent to an engine, its samples, and the engine at startup."""

import uuid
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from trajkit.schema.engine import MAX_LOGPROB, not_logprobs
from trajkit_shim.engines import base
from trajkit_shim.errors import EngineError


def check_ids(
    ids: Sequence[int] | npt.NDArray[np.int32],
    info: base.EngineInfo,
    name: str = "the engine's output_ids",
    n_checked: int = 0,
    **error: Any,
) -> None:
    """Raise `EngineError` for an id outside the vocabulary; ``n_checked`` are skipped."""
    new = np.asarray(ids[n_checked:])
    wrong = _first((new < 0) | (new >= info.vocab_size))
    if wrong is not None:
        raise EngineError(
            f"{name}[{n_checked + wrong}] = {new[wrong]} is outside the vocabulary of "
            f"{info.model!r}, [0, {info.vocab_size})",
            **error,
        )


def _first(wrong: npt.NDArray[np.bool_]) -> int | None:
    """The index of the first true value."""
    return int(np.argmax(wrong)) if wrong.any() else None


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
    error = {"status": 400, "code": "token_out_of_vocabulary"}
    check_ids(prompt_ids, info, "prompt_ids", n_checked, **error)
    if n_prompt >= info.max_context_tokens:
        raise too_long(n_prompt, info.max_context_tokens)


def check_sampling(
    sampling: base.Sampling, engine: str, takes: Collection[str] = ()
) -> None:
    """Reject parameters that an engine of this process lacks.

    ``takes``: those of top_p, top_k, stop and structural_tag that it has.
    """
    given = {
        "top_p": sampling.top_p not in (None, 1.0),
        "top_k": sampling.top_k not in (None, -1),
        "stop": bool(sampling.stop),
        "structural_tag": sampling.structural_tag is not None,
    }
    lacks = [name for name, used in given.items() if used and name not in takes]
    for name in (*lacks, *sampling.extra):
        raise EngineError(f"the {engine} engine has no parameter {name!r}", 400)


def too_long(n_prompt: int, max_tokens: int, least: str = "") -> EngineError:
    """Return the error of a prompt that leaves no room for a reply."""
    return EngineError(
        f"this model's maximum context length is {max_tokens} tokens; the messages and "
        f"tools are {least}{n_prompt} tokens and leave no room for a reply",
        400,
        code="context_length_exceeded",
        overflow=(n_prompt, max_tokens),
    )


def check_sample(
    sample: base.Sample,
    prompt_ids: npt.NDArray[np.int32],
    sampling: base.Sampling,
    info: base.EngineInfo,
) -> None:
    """Raise `EngineError` for a sample that cannot be of this prompt and parameters.

    A logprob is wrong if it is above 0 by more than rounding, or the -9999 that some
    engines write for one that is missing or not finite. Weight versions must cover each
    id once, and a sampling mask must contain it.
    """
    _check_consumed(prompt_ids, sample)
    ids, logprobs = sample.output_ids, sample.output_logprobs
    if len(ids) > sampling.max_new_tokens:
        asked = f"{sampling.max_new_tokens} were asked for"
        raise EngineError(f"the engine gave {len(ids)} output ids, but {asked}")
    check_ids(ids, info)
    if not sampling.extra.get("ignore_eos"):
        end = _first(np.isin(ids[:-1], sampling.stop_token_ids))
        if end is not None:
            more = f"{len(ids) - end - 1} ids after {ids[end]}, which ends a reply"
            raise EngineError(f"the engine's output_ids have {more}")
    if logprobs is not None:
        if len(logprobs) != len(ids):
            counts = f"{len(logprobs)} logprobs for {len(ids)} output ids"
            raise EngineError(f"the engine gave {counts}")
        wrong = _first(not_logprobs(logprobs) | (logprobs > MAX_LOGPROB))
        if wrong is not None:
            raise EngineError(
                f"the engine's output_logprobs[{wrong}] = {logprobs[wrong]} is not a "
                "log-probability: it is above 0, or what an engine writes for one that is "
                "missing or not finite"
            )
    spans = [(span.start, span.stop) for span in sample.weight_versions]
    ends = [0, *sorted(stop for _, stop in spans)]
    if spans and (spans != [*pairwise(ends)] or ends[-1] != len(ids)):
        shown = ", ".join(f"{start}:{stop}" for start, stop in spans)
        raise EngineError(
            f"the engine's weight versions cover {shown} of {len(ids)} output ids: "
            "they must cover each id once"
        )
    mask = sample.sampling_mask
    if mask is not None:
        if len(mask) != len(ids):
            counts = f"{len(mask)} sampling masks for {len(ids)} output ids"
            raise EngineError(f"the engine gave {counts}")
        for place, (token, allowed) in enumerate(zip(ids.tolist(), mask, strict=True)):
            check_ids(allowed, info, f"the engine's sampling_mask[{place}]")
            if token not in allowed:
                wrong_mask = f"sampling_mask[{place}] lacks {token}, which was drawn"
                raise EngineError(f"the engine's {wrong_mask}")


def _check_consumed(prompt_ids: npt.NDArray[np.int32], sample: base.Sample) -> None:
    """Raise `EngineError` if the engine reports a prompt other than the one sent."""
    ids = sample.prompt_ids
    n_consumed = sample.prompt_tokens if ids is None else len(ids)
    if n_consumed not in (None, len(prompt_ids)):
        counts = f"{n_consumed} prompt tokens but was given {len(prompt_ids)}"
        raise EngineError(f"the engine consumed {counts}")
    wrong = None if ids is None else _first(ids != prompt_ids)
    if ids is not None and wrong is not None:
        consumed = f"{ids[wrong]} as token {wrong} of the prompt"
        given = f"was given {prompt_ids[wrong]}"
        raise EngineError(f"the engine consumed {consumed} but {given}")


async def check_engine(engine: base.Engine) -> base.EngineInfo:
    """Sample two tokens, close the engine, and return what it serves.

    Raises `ConnectionError` if its samples cannot be trained.
    """
    # for a sampling mask a vLLM server asks for a limit
    top_k = 20 if getattr(engine, "sampling_masks", False) else None
    sampling = base.Sampling(max_new_tokens=2, temperature=1.0, top_k=top_k)
    request = base.EngineRequest(
        prompt_ids=np.zeros(1, np.int32),
        sampling=sampling,
        request_id=uuid.uuid4().hex,
        session_id="probe",
    )
    try:
        info = await engine.info()
        sample = await engine.generate(request)
        check_sample(sample, request.prompt_ids, sampling, info)
        if isinstance(engine, base.CheckedEngine):
            await engine.check(request)
    except EngineError as error:
        raise ConnectionError(f"the engine does not work: {error}") from error
    finally:
        await engine.close()
    if not len(sample.output_ids) or sample.output_logprobs is None:
        raise ConnectionError(
            f"the engine returned {len(sample.output_ids)} output ids and "
            f"{'no ' if sample.output_logprobs is None else ''}logprobs for a prompt of "
            "one token: its samples could not be trained"
        )
    return info
