"""Async tests run on asyncio. The tests of real servers and clients need their places."""

import os

import pytest

_NEEDS = {
    "test_sglang_real.py": "TRAJKIT_SGLANG_URL",
    "test_real_clients.py": "TRAJKIT_CLIENTS",
}
collect_ignore = [name for name, need in _NEEDS.items() if need not in os.environ]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
