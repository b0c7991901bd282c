"""`GatewayClient` against gateways that listen on sockets."""

import asyncio
import threading
from collections import Counter
from contextlib import ExitStack, contextmanager

import pytest
from aiohttp import web

from tests.shim import processes
from tests.shim.engines.double import Double
from tests.shim.fakes import RENDERER, ScriptedEngine, Updatable, raises, until
from trajkit import read_sessions
from trajkit_shim.app import create_app
from trajkit_shim.call import Options
from trajkit_shim.client import AsyncGatewayClient, GatewayClient
from trajkit_shim.errors import EngineError, GatewayError
from trajkit_shim.serve import running
from trajkit_shim.sessions.turn_log import TurnLog


@contextmanager
def gateways(directory, *engines, **options):
    """Yield the URLs of gateways with these engines, each with a log of its own."""

    def app(number, engine):
        log = TurnLog(directory / str(number))
        return create_app(engine, RENDERER, log, Options(**options))

    with ExitStack() as stack:
        yield [stack.enter_context(running(app(*each))) for each in enumerate(engines)]


def test_a_session_from_its_opening_to_its_reward(tmp_path):
    with (
        gateways(tmp_path, ScriptedEngine("hello"), admin_token="t") as urls,
        GatewayClient(urls[0] + "/", "t") as client,
    ):
        assert client.models() == ["scripted"]
        session = client.open("a", max_turns=1, metadata={"task": 7})
        assert (session.session_id, session.base_url) == ("a", urls[0])
        assert processes.chat(session.base_url, session.api_key) == "hello"
        assert client.describe("a")["turns"] == 1
        assert client.finish("a", reward=0.5, wait_seconds=1)["status"] == "closed"
        assert client.finish("a", reward=0.75)["reward"] == 0.75
        dropped = client.open().session_id
        assert client.drop(dropped)["ended_by"] == "drop"
    rewards = read_sessions(tmp_path / "0").select(["session_id", "reward"])
    assert rewards.to_pylist()[0] == {"session_id": "a", "reward": 0.75}


def test_a_gateway_that_is_gone(tmp_path):
    with gateways(tmp_path, ScriptedEngine()) as urls:
        pass
    with GatewayClient(urls) as client, pytest.raises(ConnectionError, match=urls[0]):
        client.open()
    with pytest.raises(ValueError, match="at least one"):
        GatewayClient([])


@pytest.mark.anyio
async def test_another_server_is_no_gateway():
    other = Double("sglang", **{"v1/models": web.Response(text="hi")})
    async with other.listening() as url, AsyncGatewayClient(url) as client:
        with pytest.raises(ConnectionError, match="it answered 200 hi"):
            await client.models()


def test_sessions_are_spread_over_gateways_and_found_again(tmp_path):
    with gateways(tmp_path, *(ScriptedEngine() for _ in range(3))) as urls:
        with GatewayClient(urls) as client:
            opened = [client.open(str(number)) for number in range(6)]
            assert sorted(session.base_url for session in opened) == sorted(2 * urls)
            # a free place is used next
            client.finish(opened[4].session_id)
            assert client.open().base_url == opened[4].base_url
        with GatewayClient(urls) as other:
            for number in range(6):
                assert other.finish(str(number), reward=1.0)["reward"] == 1.0
            with raises(GatewayError, "no session", status=404):
                other.finish("unknown")


UPDATE = ("update", "/new", "step-1")


@pytest.mark.anyio
async def test_sessions_that_are_opened_at_once_and_new_weights(tmp_path):
    engines = [Updatable(), Updatable()]
    with gateways(tmp_path, *engines) as urls:
        async with AsyncGatewayClient(urls) as client:
            opened = await asyncio.gather(*(client.open() for _ in range(6)))
            with pytest.raises(GatewayError, match="not paused"):
                await client.update_weights("/new", "step-1")
            await client.pause(60)
            await client.update_weights("/new", "step-1")
            await client.resume()
    places = Counter(session.base_url for session in opened)
    assert places == dict.fromkeys(urls, 3)
    for engine in engines:
        assert engine.told == [("pause",), UPDATE, ("resume",)]


@pytest.mark.anyio
async def test_the_lease_is_renewed_until_the_client_resumes_or_is_gone(tmp_path):
    engine, other = engines = [Updatable(), Updatable()]
    loaded = threading.Event()
    other.update_weights = lambda *_: asyncio.to_thread(loaded.wait)
    with gateways(tmp_path, *engines) as urls:
        async with AsyncGatewayClient(urls) as client:
            await client.pause(0.4)
            update = asyncio.create_task(client.update_weights("/new", "step-1"))
            try:
                # it lasts twice its duration, though another gateway takes longer
                assert {await engine.next() for _ in range(9)} == {("pause",), UPDATE}
            finally:
                loaded.set()
            await update
            await client.resume()
            while await engine.next() != ("resume",):
                pass
            await client.pause(0.4)
        while await engine.next() != ("resume",):
            pass


@pytest.mark.anyio
async def test_one_gateway_that_cannot_pause_leaves_none_paused(tmp_path):
    one, other = engines = [Updatable(), Updatable()]
    other.fails["pause"] = EngineError("no GPU", 502)
    with gateways(tmp_path, *engines) as urls:
        async with AsyncGatewayClient(urls) as client:
            with pytest.raises(GatewayError, match="no GPU"):
                await client.pause()
            assert one.told == [("pause",), ("resume",)]
            del other.fails["pause"]
            await client.pause(0.1)
            async with AsyncGatewayClient(urls[1]) as trainer:
                await trainer.resume()
            await until(lambda: client._lost)
            # tokens may be from either weights now
            with pytest.raises(GatewayError, match="not paused"):
                await client.update_weights("/new", "step-1")
            assert UPDATE not in one.told
