"""NeMo Gym's token captures, ``<rollout>.tokens.jsonl`` (its ``token_id_capture``)."""

from collections.abc import Iterator
from pathlib import Path

from trajkit.importers.findings import ChatTokenizer, Finding, Head, text_of, time_of
from trajkit.importers.json_files import objects
from trajkit.io.json_numbers import IDS, Shape

NAME = "nemo"

# TOKEN_ENTRY_RECORD_SCHEMA_VERSION; a newer version may have other meanings
_NEWEST = 3
_SHAPE: Shape = {
    "prompt_token_ids": IDS,
    "generation_token_ids": IDS,
}


def detect(head: Head) -> bool:
    """An entry of a capture, or the file name of an empty capture."""
    nameless = head.value is None and not head.trouble
    return head.has("rollout_id", "model_call_id") or (
        nameless and head.file.name.endswith(".tokens.jsonl")
    )


def read(file: Path, tokenizer: ChatTokenizer | None) -> Iterator[Finding]:
    """The entries of a capture, then the calls that it marks as lost."""
    rollout: str | None = None
    seen: set[str | None] = set()
    for text in objects(file, _SHAPE):
        if text.bad is not None:
            yield text.bad
            continue
        entry = text.value
        found = Finding(text.place, text_of(entry.get("rollout_id")))
        rollout = rollout or found.session
        call = text_of(entry.get("model_call_id"))
        seen.add(call)
        version = entry.get("schema_version", _NEWEST)
        if type(version) is not int or version > _NEWEST:
            yield found.refuse(
                "other_version", f"schema_version {version}, above {_NEWEST}"
            )
            continue
        found.fields = {
            "prompt_ids": entry.get("prompt_token_ids"),
            "output_ids": entry.get("generation_token_ids"),
            "output_logprobs": entry.get("generation_log_probs"),
            "request_id": call,
            "model": text_of(entry.get("model")),
            "started_at": time_of(entry.get("created_at")),
        }
        yield found
    lost = sorted(_begun(file, rollout) - {name for name in seen if name})
    if lost:
        detail = f"calls that began and have no entry: {', '.join(lost)}"
        yield Finding("its intents", rollout, problem="lost", detail=detail)


def _begun(file: Path, rollout: str | None) -> set[str]:
    """Calls that the capture began and did not cancel, or marked as lost."""
    begun: set[str] = set()
    stem = file.name.split(".tokens.")[0]
    for suffix in ("intents", "incomplete"):
        listing = file.with_name(f"{stem}.tokens.{suffix}")
        if listing.is_file():
            for line in listing.read_text("utf-8", "backslashreplace").split():
                if line.startswith("-"):
                    begun.discard(line[1:])
                else:
                    begun.add(line)
    return begun
