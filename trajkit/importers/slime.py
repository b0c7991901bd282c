"""slime's debug dumps of rollouts, ``--save-debug-rollout-data`` (also miles').

A dump is ``torch.save`` of a dict with the samples of one rollout step. A sample is a
training row. Each span under its loss mask becomes a call; its prompt is the row before it.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trajkit.importers.findings import (
    ChatTokenizer,
    Finding,
    Head,
    Refused,
    has_items,
    number_of,
    text_of,
    versions_of,
)
from trajkit.importers.pickles import load, plain

NAME = "slime"

# finish reason by Sample.Status of slime
_REASONS = {"completed": "stop", "truncated": "length", "aborted": "abort"}

_Ids = npt.NDArray[np.int64]


def detect(head: Head) -> bool:
    """A zip file or a pickle."""
    return head.magic.startswith((b"PK\3\4", b"\x80"))


def read(file: Path, tokenizer: ChatTokenizer | None) -> Iterator[Finding]:
    """The calls of each sample."""
    dump = load(file)
    step = text_of(dump.get("rollout_id")) if isinstance(dump, dict) else None
    samples = dump.get("samples") if isinstance(dump, dict) else dump
    if not isinstance(samples, list):
        yield Finding("file", problem="unreadable", detail="it has no list of samples")
        return
    for k, sample in enumerate(samples):
        place = f"sample {k}"
        if not isinstance(sample, dict):
            yield Finding(place, problem="unreadable", detail="a sample is not a dict")
            continue
        number = text_of(sample.get("index"))
        session = f"{step or file.stem}/{number or k}"
        yield from _calls(place, session, sample)


def _calls(place: str, session: str, sample: dict[str, object]) -> Iterator[Finding]:
    found = Finding(place, session)
    with found:
        tokens, mask = _row(sample)
        edges = np.flatnonzero(np.diff(mask != 0, prepend=False, append=False))
        spans = edges.reshape(-1, 2).tolist()
        if not spans:
            raise Refused("no_output_ids", "its loss mask is empty")
    if found.problem:
        yield found
        return
    response, logprobs = tokens[-len(mask) :], _listed(sample.get("rollout_log_probs"))
    for k, (start, stop) in enumerate(spans):
        one = Finding(f"{place}, span {k}" if len(spans) > 1 else place, session)
        last = stop == len(mask)
        one.fields = {
            "prompt_ids": tokens[: len(tokens) - len(mask) + start],
            "output_ids": response[start:stop],
            "finish_reason": _REASONS.get(str(sample.get("status"))) if last else None,
            "trainable": False if sample.get("remove_sample") is True else None,
            "group_id": text_of(sample.get("group_index")),
            "reward": number_of(sample.get("reward")),
        }
        if logprobs is not None and len(logprobs) == len(mask):
            one.fields["output_logprobs"] = logprobs[start:stop]
        elif logprobs is not None:
            text = f"{len(logprobs)} logprobs for a response of {len(mask)}"
            one.remarks.append(("logprobs_unaligned", text))
        _versions(one, sample.get("weight_versions"), stop - start)
        yield one


def _row(sample: dict[str, object]) -> tuple[_Ids, _Ids]:
    """The ids of a sample, and the mask of its response."""
    tokens, length = _numbers(sample.get("tokens")), sample.get("response_length")
    if tokens is None or tokens.dtype.kind not in "iu" or tokens.ndim != 1:
        raise Refused("no_prompt_ids", "no tokens")
    if type(length) is not int or not 0 <= length <= len(tokens):
        detail = f"response_length {length!r} of {len(tokens)} tokens"
        raise Refused("unreadable", detail)
    given = sample.get("loss_mask")
    mask = np.ones(length, np.int64) if given is None else _numbers(given)
    if mask is None or mask.shape != (length,):
        detail = f"a loss_mask that does not have {length} tokens"
        raise Refused("unreadable", detail)
    return tokens, mask


def _versions(found: Finding, versions: object, n_output: int) -> None:
    """Set the version, unless several requests had different ones: they have no lengths."""
    if not has_items(versions):
        return
    names = {text_of(version) for version in versions}  # type: ignore[attr-defined]
    if len(names) == 1:
        found.fields["weight_versions"] = versions_of(names.pop(), n_output)
    else:
        listed = ", ".join(sorted(str(name) for name in names))
        found.remarks.append(("versions_unplaced", listed))


def _listed(value: object) -> list[object] | _Ids | None:
    """A list, or a tensor or array of one dimension; else None."""
    value = plain(value)
    if isinstance(value, list):
        return value
    return value if isinstance(value, np.ndarray) and value.ndim == 1 else None


def _numbers(value: object) -> _Ids | None:
    """The numbers of a list, tensor or array; None for anything else."""
    value = plain(value)
    if isinstance(value, np.ndarray):
        return value if value.dtype.kind in "biuf" else None
    if not isinstance(value, list):
        return None
    try:
        array = np.array(value) if value else np.empty(0, np.int64)
    except (ValueError, OverflowError):
        return None
    return array if array.dtype.kind in "biuf" else None
