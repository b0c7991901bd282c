"""Pauses that end by themselves, and weights that change in the middle of a session."""

import asyncio

import pytest

from tests.shim.clients import USER, OnSocket, http
from tests.shim.fakes import (
    Held,
    ScriptedEngine,
    Threaded,
    Updatable,
    cases,
    sampled,
    until,
)
from trajkit_shim.engines.base import UpdatableEngine
from trajkit_shim.errors import EngineError, GatewayError
from trajkit_shim.pauses import Pause

pytestmark = pytest.mark.anyio


@pytest.fixture
def engine():
    return Updatable()


@pytest.fixture
def weights(engine):
    return Pause(engine, wait_seconds=60)


async def test_pause_update_resume(start, engine):
    assert isinstance(engine, UpdatableEngine)
    gateway = await start(engine=engine)
    update = {"model_path": "/new", "weight_version": "step-1"}
    await gateway.post("/engine/update", 409, **update)
    assert (await gateway.post("/engine/pause", timeout_s=60))["paused"]
    shown = {"paused": True, "mode": "keep", "pauses_expired": 0}
    updated = await gateway.post("/engine/update", **update)
    assert updated == {**shown, "weight_version": "step-1"}
    for _ in range(2):
        resumed = await gateway.post("/engine/resume")
        assert resumed["paused"] is False
    assert await gateway.get("/engine") == resumed
    assert engine.told == [("pause",), ("update", "/new", "step-1"), ("resume",)]


@cases(
    "path, body, match",
    {
        "a negative time": ("pause", {"timeout_s": -1}, "timeout_s"),
        "another field": ("pause", {"seconds": 1}, "seconds"),
        "another mode": ("pause", {"mode": "stop"}, "mode"),
        "no version": ("update", {"model_path": "a"}, "weight_version"),
        "no path": ("update", {"weight_version": "a"}, "model_path"),
    },
)
async def test_what_is_refused(start, engine, path, body, match):
    answer = await (await start(engine=engine)).post(f"/engine/{path}", 400, **body)
    assert match in answer["error"]["message"]
    assert engine.told == []


async def test_an_engine_that_cannot_be_paused(start):
    answer = await (await start()).post("/engine/pause", 501)
    assert "ScriptedEngine cannot be paused" in answer["error"]["message"]


async def test_a_call_that_waited_does_not_pass_a_pause_that_began_again(weights):
    held = Held(sampled("a"))
    await weights.pause(60, "wait")
    call = asyncio.create_task(weights.sample(held))
    for _ in range(10):
        await asyncio.sleep(0)
    # no time between the two for the call to begin
    await weights.resume()
    await weights.pause(60, "wait")
    for _ in range(10):
        await asyncio.sleep(0)
    assert not held.entered.is_set()
    await weights.resume()
    held.release.set()
    assert await call == held.reply


async def test_a_pause_ends_by_itself(engine, weights):
    await weights.pause(0.0)
    await until(lambda: weights.expired and ("resume",) in engine.told)
    assert weights.mode is None
    with pytest.raises(GatewayError, match="not paused"):
        await weights.update("/new", "1")


async def test_a_pause_that_fails_does_not_leave_the_engine_paused(engine, weights):
    engine.fails["pause"] = EngineError("broken")
    with pytest.raises(EngineError, match="broken"):
        await weights.pause(60)
    assert weights.mode is None
    assert engine.told == [("pause",), ("resume",)]


async def test_an_update_that_fails_leaves_it_to_the_trainer(engine, weights):
    """The version is unknown then: a part of the servers may have the new weights."""
    await weights.pause(60)
    await weights.update("/new", "0")
    engine.fails["update"] = EngineError("no such directory")
    with pytest.raises(EngineError, match="no such directory"):
        await weights.update("/new", "1")
    assert (weights.mode, weights.version) == ("keep", None)
    engine.fails["resume"] = EngineError("broken")
    with pytest.raises(EngineError, match="broken"):
        await weights.resume()
    # it is repeated when the time is over
    assert weights.mode is not None
    await weights.close()
    assert weights.mode is None


# Calls


async def test_a_pause_lets_calls_end_and_holds_new_ones(start):
    held = Held("a")
    gateway = await start(held, "b")
    session = await gateway.open()
    first = asyncio.create_task(session.ask())
    await held.entered.wait()
    pause = asyncio.create_task(gateway.post("/engine/pause", mode="wait"))
    for _ in range(20):
        await asyncio.sleep(0)
    second = asyncio.create_task(session.ask())
    held.release.set()
    assert (await pause)["paused"]
    assert (await first)["content"] == "a"
    assert len(gateway.engine.requests) == 1
    assert not second.done()
    assert not (await gateway.post("/engine/resume"))["paused"]
    assert (await second)["content"] == "b"


async def test_a_client_that_leaves_while_its_call_was_cut_off(start):
    held = Held("old weights")
    gateway = await start(held, "b")
    session = await gateway.open()
    call = asyncio.create_task(session.ask())
    await held.entered.wait()
    await gateway.post("/engine/pause", mode="abort")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await gateway.post("/engine/resume")
    assert (await session.shown())["in_flight"] == 0
    assert (len(gateway.engine.requests), gateway.turns()) == (1, [])


async def test_a_call_does_not_wait_for_ever(start):
    gateway = await start("a", pause_wait_seconds=0.0)
    session = await gateway.open()
    await gateway.post("/engine/pause", mode="wait")
    answer = await session.post(status=503)
    assert (answer.json()["error"]["code"], gateway.turns()) == ("paused", [])
    heads = (answer.headers["retry-after"], answer.headers["x-should-retry"])
    assert heads == ("5", "true")


@pytest.mark.parametrize("waits", ["for the engine", "for a call"])
async def test_a_trainer_that_hangs_up_while_it_pauses(start, engine, waits):
    held = Threaded("hello")
    if waits == "for the engine":
        engine.fails["pause"] = "hangs"
    else:
        engine = ScriptedEngine(held)
    gateway = await start(engine=engine, place=OnSocket)
    session, calls = await gateway.open(), []
    mode = {"mode": "keep"}
    if waits == "for a call":
        calls.append(asyncio.create_task(session.ask(USER)))
        assert await asyncio.to_thread(held.entered.wait, 60)
        mode = {"mode": "wait"}
    with pytest.raises(http.ReadTimeout):
        await gateway.admin.post("/engine/pause", json=mode, timeout=0.3)
    if calls:
        while (await gateway.get("/healthz"))["status"] != "ok":
            await asyncio.sleep(0.01)
        held.release.set()
        await asyncio.gather(*calls)
    else:
        engine.fails.clear()
        assert [await engine.next() for _ in range(2)] == [("pause",), ("resume",)]
    assert (await gateway.get("/engine"))["paused"] is False
