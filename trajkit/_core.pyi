"""The whole contract between trajkit/*.py and the compiled kernels."""

from collections.abc import Buffer  # type: ignore[attr-defined]

# release, debug or sanitize
BUILD: str

def lcp(a: Buffer, b: Buffer) -> int: ...
def unbox_ids(values: list[object], out: Buffer) -> int: ...
def unbox_logprobs(values: list[object], out: Buffer, valid: Buffer) -> int: ...
def encode_message(message: object) -> tuple[str, str]: ...
def match_messages(
    messages: list[object], before: list[object], before_ids: Buffer, ids: Buffer
) -> None: ...
def mark_shown(
    ids: Buffer,
    sessions: Buffer,
    key_of: Buffer,
    last_session: Buffer,
    last_id: Buffer,
    shown: Buffer,
) -> None: ...
