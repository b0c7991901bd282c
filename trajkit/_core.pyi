"""The whole contract between trajkit/*.py and the compiled kernels."""

from collections.abc import Buffer  # type: ignore[attr-defined]

# release, debug or sanitize
BUILD: str

def lcp(a: Buffer, b: Buffer) -> int: ...
