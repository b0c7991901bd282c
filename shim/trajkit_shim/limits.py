"""What must hold of a prompt that an engine gets, and of a sample that it gives."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trajkit.checks import MAX_LOGPROB, not_logprobs
from trajkit_shim.engine import EngineError, EngineInfo, Sample


class PromptError(EngineError):
    """A prompt that no engine call should be made with.

    Parameters
    ----------
    message : str
    code : str
        A word for machines.
    overflow : tuple of int, optional
        The prompt's tokens, and the context's length, where that is what is wrong.
    """

    def __init__(
        self, message: str, code: str, overflow: tuple[int, int] | None = None
    ) -> None:
        super().__init__(message, 400)
        self.code = code
        self.overflow = overflow


def check_prompt(prompt_ids: npt.NDArray[np.int32], info: EngineInfo) -> None:
    """Refuse a prompt that the engine cannot take.

    An id outside the vocabulary is no error to every engine: some read past their
    embedding table and die, and take every other call with them.

    Raises
    ------
    PromptError
        The prompt is empty, holds an id outside the vocabulary, or leaves no room in
        the context for a reply.
    """
    if not len(prompt_ids):
        raise PromptError("the prompt has no tokens", "empty_prompt")
    wrong = np.flatnonzero((prompt_ids < 0) | (prompt_ids >= info.vocab_size))
    if len(wrong):
        at = int(wrong[0])
        raise PromptError(
            f"prompt_ids[{at}] = {prompt_ids[at]} is outside the vocabulary of "
            f"{info.model!r}, [0, {info.vocab_size})",
            "token_out_of_vocabulary",
        )
    if len(prompt_ids) >= info.max_context_tokens:
        raise PromptError(
            f"this model's maximum context length is {info.max_context_tokens} "
            f"tokens; the messages and tools are {len(prompt_ids)} tokens and leave no "
            "room for a reply",
            "context_length_exceeded",
            (len(prompt_ids), info.max_context_tokens),
        )


def check_consumed(prompt_ids: npt.NDArray[np.int32], sample: Sample) -> None:
    """Refuse a sample of an engine that says it consumed another prompt.

    Raises
    ------
    EngineError
        The number of tokens, or a token, is another than was sent.
    """
    said = sample.prompt_tokens if sample.prompt_ids is None else len(sample.prompt_ids)
    if said is not None and said != len(prompt_ids):
        raise EngineError(
            f"the engine consumed {said} prompt tokens where it was given "
            f"{len(prompt_ids)}"
        )
    if sample.prompt_ids is None:
        return
    wrong = np.flatnonzero(sample.prompt_ids != prompt_ids)
    if len(wrong):
        at = int(wrong[0])
        raise EngineError(
            f"the engine consumed {sample.prompt_ids[at]} as token {at} of the prompt "
            f"where it was given {prompt_ids[at]}"
        )


def check_told(ids: Sequence[int], info: EngineInfo) -> None:
    """Refuse ids that an engine tells of and that no tokenizer can decode.

    Raises
    ------
    EngineError
        One lies outside the vocabulary.
    """
    if ids and not 0 <= min(ids) <= max(ids) < info.vocab_size:
        wrong = next(one for one in ids if not 0 <= one < info.vocab_size)
        raise EngineError(
            f"the engine's streamed id {wrong} is outside its vocabulary, "
            f"[0, {info.vocab_size})"
        )


def check_sample(sample: Sample, info: EngineInfo) -> None:
    """Refuse a sample that cannot be what an engine drew.

    Raises
    ------
    EngineError
        An id lies outside the vocabulary; there is not one logprob per id; a logprob is
        no finite number, lies above 0 by more than rounding, or is the -9999 that some
        engines write for a missing one; or the weight versions given do not tile the
        output.
    """
    ids, logprobs = sample.output_ids, sample.output_logprobs
    wrong = np.flatnonzero((ids < 0) | (ids >= info.vocab_size))
    if len(wrong):
        at = int(wrong[0])
        raise EngineError(
            f"the engine's output_ids[{at}] = {ids[at]} is outside its vocabulary, "
            f"[0, {info.vocab_size})"
        )
    if logprobs is not None:
        if len(logprobs) != len(ids):
            raise EngineError(
                f"the engine gave {len(logprobs)} logprobs for {len(ids)} output ids"
            )
        wrong = np.flatnonzero(not_logprobs(logprobs) | (logprobs > MAX_LOGPROB))
        if len(wrong):
            at = int(wrong[0])
            raise EngineError(
                f"the engine's output_logprobs[{at}] = {logprobs[at]} is no "
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
            "they must tile them"
        )
