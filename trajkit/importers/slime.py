"""slime's debug dumps of rollouts, ``--save-debug-rollout-data`` (also miles').

A dump is ``torch.save`` of a dict with the samples of one rollout step. A sample is a
training row. Each span under its loss mask becomes a call; its prompt is the row before it.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trajkit.importers.findings import (
    Finding,
    Head,
    Options,
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


def read(file: Path, options: Options) -> Iterator[Finding]:
    """The calls of each sample.

    Raises
    ------
    FormatError
        The file is not a dump.
    """
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
    tokens = _numbers(sample.get("tokens"))
    length = sample.get("response_length")
    if tokens is None or tokens.dtype.kind not in "iu" or tokens.ndim != 1:
        found.refuse("no_prompt_ids", "no tokens")
    elif type(length) is not int or not 0 <= length <= len(tokens):
        detail = f"response_length {length!r} of {len(tokens)} tokens"
        found.refuse("unreadable", detail)
    if found.problem or tokens is None or not isinstance(length, int):
        yield found
        return
    given = sample.get("loss_mask")
    mask = np.ones(length, np.int64) if given is None else _numbers(given)
    if mask is None or mask.shape != (length,):
        detail = f"a loss_mask that does not have {length} tokens"
        yield found.refuse("unreadable", detail)
        return
    logprobs = _listed(sample.get("rollout_log_probs"))
    aligned = logprobs is not None and len(logprobs) == length
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask != 0, [0]])))
    starts, stops = edges[::2].tolist(), edges[1::2].tolist()
    if not starts:
        yield found.refuse("no_output_ids", "its loss mask is empty")
        return
    prompt_length = len(tokens) - length
    for k, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        one = Finding(f"{place}, span {k}" if len(starts) > 1 else place, session)
        last = stop == length
        one.fields = {
            **_common(sample),
            "prompt_ids": tokens[: prompt_length + start],
            "output_ids": tokens[prompt_length + start : prompt_length + stop],
            "finish_reason": _REASONS.get(str(sample.get("status"))) if last else None,
        }
        if aligned and logprobs is not None:
            one.fields["output_logprobs"] = logprobs[start:stop]
        elif logprobs is not None:
            text = f"{len(logprobs)} logprobs for a response of {length}"
            one.remarks.append(("logprobs_unaligned", text))
        _versions(one, sample.get("weight_versions"), stop - start)
        yield one


def _common(sample: dict[str, object]) -> dict[str, object]:
    return {
        "trainable": False if sample.get("remove_sample") is True else None,
        "group_id": text_of(sample.get("group_index")),
        "reward": number_of(sample.get("reward")),
    }


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
