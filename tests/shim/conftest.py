"""Async tests run on asyncio. The tests of real servers and clients need their places."""

import os
import sys

import pytest

_SERVERS = {"TRAJKIT_SGLANG_PYTHON", "TRAJKIT_VLLM_PYTHON"} & {*os.environ}
collect_ignore = [] if _SERVERS else ["engines/test_real.py"]
if not _SERVERS or "TRAJKIT_CLIENTS" not in os.environ:
    collect_ignore.append("engines/test_real_clients.py")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def start(tmp_path):
    """Start gateways in this process; modules that use it import `tests.shim.clients`."""
    from tests.shim.clients import InProcess
    from tests.shim.fakes import RENDERER, ScriptedEngine

    started = []

    async def start(
        *script,
        engine=None,
        renderer=RENDERER,
        directory=tmp_path,
        place=InProcess,
        **options,
    ):
        engine = ScriptedEngine(*script) if engine is None else engine
        started.append(place(engine, renderer, directory, **options))
        return started[-1]

    yield start
    for gateway in reversed(started):
        await gateway.aclose()


@pytest.fixture(autouse=True)
def no_half_closed_connections(monkeypatch):
    """Clients of tests leave right after their requests; to the gateway they have left."""
    serve = sys.modules.get("trajkit_shim.serve")
    if serve is not None:
        monkeypatch.setattr(serve, "_WITH_REQUEST_SECONDS", -1.0)
