"""Validates the prompts sent to an engine, its samples, and at startup itself."""

import uuid
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trajkit.turns.turn_rules import MAX_LOGPROB, not_logprobs
from trajkit_shim.engines.base import (
    Engine,
    EngineInfo,
    EngineRequest,
    Sample,
    Sampling,
)
from trajkit_shim.errors import EngineError


def _first(wrong: npt.NDArray[np.bool_]) -> int | None:
    """The index of the first true value."""
    return int(np.argmax(wrong)) if wrong.any() else None


def check_prompt(
    prompt_ids: npt.NDArray[np.int32], info: EngineInfo, n_checked: int = 0
) -> None:
    """Reject a prompt that the engine cannot take.

    ``n_checked``: how many of its ids were checked before.

    Some engines do not check ids: an id outside the vocabulary makes them read past
    their embedding table and crash, with every other call. Raises `EngineError` if the
    prompt is empty, contains such an id, or leaves no room in the context for a reply.
    """
    if prompt_ids.ndim != 1 or not len(prompt_ids):
        message = f"the prompt has no tokens: its shape is {prompt_ids.shape}"
        raise EngineError(message, 400, code="empty_prompt")
    new_ids = prompt_ids[n_checked:]
    wrong = _first((new_ids < 0) | (new_ids >= info.vocab_size))
    if wrong is not None:
        wrong += n_checked
        raise EngineError(
            f"prompt_ids[{wrong}] = {prompt_ids[wrong]} is outside the vocabulary of "
            f"{info.model!r}, [0, {info.vocab_size})",
            400,
            code="token_out_of_vocabulary",
        )
    n_prompt = len(prompt_ids)
    if n_prompt >= info.max_context_tokens:
        raise too_long(str(n_prompt), n_prompt, info.max_context_tokens)


def too_long(length: str, n_prompt: int, max_tokens: int) -> EngineError:
    """Return the error of a prompt that leaves no room for a reply."""
    return EngineError(
        f"this model's maximum context length is {max_tokens} tokens; the messages and "
        f"tools are {length} tokens and leave no room for a reply",
        400,
        code="context_length_exceeded",
        overflow=(n_prompt, max_tokens),
    )


def check_consumed(prompt_ids: npt.NDArray[np.int32], sample: Sample) -> None:
    """Raise `EngineError` if the engine reports a prompt other than the one sent."""
    ids = sample.prompt_ids
    n_consumed = sample.prompt_tokens if ids is None else len(ids)
    if n_consumed not in (None, len(prompt_ids)):
        counts = f"{n_consumed} prompt tokens but was given {len(prompt_ids)}"
        raise EngineError(f"the engine consumed {counts}")
    wrong = None if ids is None else _first(ids != prompt_ids)
    if ids is not None and wrong is not None:
        raise EngineError(
            f"the engine consumed {ids[wrong]} as token {wrong} of the "
            f"prompt but was given {prompt_ids[wrong]}"
        )


def check_streamed(ids: Sequence[int], info: EngineInfo) -> None:
    """Raise `EngineError` for a streamed id outside the vocabulary."""
    for token in ids:
        if not 0 <= token < info.vocab_size:
            raise EngineError(
                f"the engine's streamed id {token} is outside its vocabulary, "
                f"[0, {info.vocab_size})"
            )


def check_sample(sample: Sample, info: EngineInfo, max_new_tokens: int) -> None:
    """Raise `EngineError` for a sample that cannot be correct.

    It is longer than ``max_new_tokens``; an id is outside the vocabulary; the number of
    logprobs differs from that of ids; a logprob is not finite, is above 0 by more than
    rounding, or is the -9999 that some engines write for a missing one; or the weight
    versions do not exactly cover the output.
    """
    ids, logprobs = sample.output_ids, sample.output_logprobs
    if len(ids) > max_new_tokens:
        asked = f"{max_new_tokens} were asked for"
        raise EngineError(f"the engine gave {len(ids)} output ids, but {asked}")
    wrong = _first((ids < 0) | (ids >= info.vocab_size))
    if wrong is not None:
        raise EngineError(
            f"the engine's output_ids[{wrong}] = {ids[wrong]} is outside its vocabulary, "
            f"[0, {info.vocab_size})"
        )
    if logprobs is not None:
        if len(logprobs) != len(ids):
            counts = f"{len(logprobs)} logprobs for {len(ids)} output ids"
            raise EngineError(f"the engine gave {counts}")
        wrong = _first(not_logprobs(logprobs) | (logprobs > MAX_LOGPROB))
        if wrong is not None:
            raise EngineError(
                f"the engine's output_logprobs[{wrong}] = {logprobs[wrong]} is not a "
                "log-probability"
            )
    covered = 0
    for span in sample.weight_versions:
        if span.start != covered or span.stop < span.start:
            break
        covered = span.stop
    if sample.weight_versions and covered != len(ids):
        spans = ", ".join(f"{s.start}:{s.stop}" for s in sample.weight_versions)
        raise EngineError(
            f"the engine's weight versions cover {spans} of {len(ids)} output ids: "
            "they must cover each id once"
        )


async def check_engine(engine: Engine) -> EngineInfo:
    """Sample two tokens, close the engine, and return what it serves.

    Raises `ConnectionError` if it cannot be reached, samples nothing, or returns no
    logprobs.
    """
    n_tokens = 2
    try:
        info = await engine.info()
        request = EngineRequest(
            prompt_ids=np.zeros(1, np.int32),
            sampling=Sampling(max_new_tokens=n_tokens, temperature=1.0),
            request_id=uuid.uuid4().hex,
            session_id="probe",
        )
        sample = await engine.generate(request)
        check_sample(sample, info, n_tokens)
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
