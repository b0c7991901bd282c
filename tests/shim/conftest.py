"""Async tests run on asyncio. The tests of real servers and clients need their places."""

import os
import sys

import pytest

_NEEDS = {
    "engines/test_sglang_real.py": {"TRAJKIT_SGLANG_PYTHON"},
    "engines/test_sglang_launch.py": {"TRAJKIT_SGLANG_PYTHON"},
    "engines/test_sglang_images.py": {"TRAJKIT_SGLANG_PYTHON"},
    "engines/test_sglang_router.py": {"TRAJKIT_SGLANG_PYTHON"},
    "engines/test_vllm_real.py": {"TRAJKIT_VLLM_PYTHON"},
    "agents/test_real_clients.py": {"TRAJKIT_CLIENTS"},
    "engines/test_sglang_clients.py": {"TRAJKIT_CLIENTS", "TRAJKIT_SGLANG_PYTHON"},
    "engines/test_vllm_clients.py": {"TRAJKIT_CLIENTS", "TRAJKIT_VLLM_PYTHON"},
}
collect_ignore = [name for name, needs in _NEEDS.items() if not needs <= {*os.environ}]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def no_half_closed_connections(monkeypatch):
    """Clients of tests leave right after their requests; to the gateway they have left."""
    serve = sys.modules.get("trajkit_shim.serve")
    if serve is not None:
        monkeypatch.setattr(serve, "_WITH_REQUEST_SECONDS", -1.0)
