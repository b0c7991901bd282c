"""Async tests run on asyncio. The tests of a real SGLang server need its address."""

import os

import pytest

collect_ignore = [] if "TRAJKIT_SGLANG_URL" in os.environ else ["test_sglang_real.py"]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
