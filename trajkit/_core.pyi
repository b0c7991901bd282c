"""The whole contract between trajkit/*.py and the compiled kernels."""

from collections.abc import Buffer  # type: ignore[attr-defined]

def lcp(a: Buffer, b: Buffer) -> int: ...
