"""Two real SGLang servers, with SGLang's own router in front of them."""

import asyncio
import socket
import subprocess
import uuid
from contextlib import ExitStack, suppress

import httpx
import pytest

from tests.shim.fakes import engine_request
from tests.shim.sglang_cpu import servers
from tests.shim.sglang_cpu.servers import served
from trajkit_shim.engines.http import SGLangEngine
from trajkit_shim.engines.model_config import vocab_size

pytestmark = [pytest.mark.anyio, pytest.mark.sglang]


@pytest.fixture
def urls(tiny_model, tmp_path):
    """The addresses of two servers, whose weights have different names."""
    with ExitStack() as stack:
        found = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            running = served(tiny_model, tmp_path / name, "--weight-version", name)
            found.append(stack.enter_context(running))
        yield found


@pytest.fixture
def router(urls, tmp_path):
    """The address of a router that gives the servers new sessions in turn."""
    log = tmp_path / "router.log"
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        port, metrics = one.getsockname()[1], other.getsockname()[1]
    command = [servers.PYTHON, "-m", "sglang_router.launch_router"]
    command += ["--worker-urls", *urls, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", "manual", "--assignment-mode", "min_group"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port}"
    try:
        while _n_workers(url) < len(urls):
            assert process.poll() is None, log.read_text()
        yield url
    finally:
        process.kill()
        process.wait()


def _n_workers(url):
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/workers", trust_env=False).json()["total"]
    return 0


async def test_a_router_keeps_sessions_on_a_server_and_all_servers_are_updated(
    router, tiny_model
):
    engine = SGLangEngine(router, vocab_size=vocab_size(tiny_model))

    async def versions():
        """The name of the weights that sampled a call of each of eight sessions."""
        calls = (
            engine.generate(
                engine_request(
                    range(100, 400),
                    max_new_tokens=4,
                    request_id=uuid.uuid4().hex,
                    session_id=f"session-{k}",
                )
            )
            for k in range(8)
        )
        samples = await asyncio.gather(*calls)
        return [sample.weight_versions[0].version for sample in samples]

    first = await versions()
    assert {*first} == {"one", "two"}
    assert [await versions() for _ in range(3)] == [first] * 3
    await engine.pause()
    await engine.update_weights(tiny_model, "step-1")
    await engine.resume()
    assert await versions() == ["step-1"] * 8
    await engine.close()
