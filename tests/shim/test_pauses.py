"""Pauses that end by themselves, and weights that change in the middle of a session."""

import pytest

from tests.shim.clients import USER
from tests.shim.fakes import Updatable, cases, until
from trajkit_shim.engines.base import UpdatableEngine
from trajkit_shim.errors import EngineError, GatewayError
from trajkit_shim.pauses import Pause

pytestmark = pytest.mark.anyio


@pytest.fixture
def engine():
    return Updatable()


@pytest.fixture
def weights(engine):
    return Pause(engine)


async def test_pause_update_resume(start, engine):
    assert isinstance(engine, UpdatableEngine)
    engine.script.append("a")
    gateway = await start(engine=engine)
    session = await gateway.open()
    update = {"model_path": "/new", "weight_version": "step-1"}
    await gateway.post("/engine/update", 409, **update)
    assert (await gateway.post("/engine/pause", timeout_s=60))["paused"]
    # calls reach the engine, which holds them: what it samples with is its own affair
    assert (await session.ask(USER))["content"] == "a"
    assert (await gateway.get("/healthz"))["status"] == "paused"
    updated = await gateway.post("/engine/update", **update)
    assert updated == {"paused": True, "weight_version": "step-1"}
    for _ in range(2):
        resumed = await gateway.post("/engine/resume")
        assert resumed["paused"] is False
    assert await gateway.get("/engine") == resumed
    assert (await gateway.get("/healthz"))["status"] == "ok"
    assert engine.told == [("pause",), ("update", "/new", "step-1"), ("resume",)]


@cases(
    "path, body, match",
    {
        "a negative time": ("pause", {"timeout_s": -1}, "timeout_s"),
        "another field": ("pause", {"seconds": 1}, "seconds"),
        "a mode": ("pause", {"mode": "wait"}, "mode"),
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


async def test_a_pause_ends_by_itself(engine, weights):
    await weights.pause(0.0)
    await until(lambda: ("resume",) in engine.told)
    await until(lambda: not weights.paused)
    with pytest.raises(GatewayError, match="not paused"):
        await weights.update("/new", "1")


async def test_a_pause_that_fails_does_not_leave_the_engine_paused(engine, weights):
    engine.fails["pause"] = EngineError("broken")
    with pytest.raises(EngineError, match="broken"):
        await weights.pause(60)
    assert not weights.paused
    assert engine.told == [("pause",), ("resume",)]


async def test_an_update_that_fails_leaves_it_to_the_trainer(engine, weights):
    """The version is unknown then: a part of the servers may have the new weights."""
    await weights.pause(60)
    await weights.update("/new", "0")
    engine.fails["update"] = EngineError("no such directory")
    with pytest.raises(EngineError, match="no such directory"):
        await weights.update("/new", "1")
    shown = weights.describe()
    assert (shown["paused"], shown["weight_version"]) == (True, None)
    engine.fails["resume"] = EngineError("broken")
    with pytest.raises(EngineError, match="broken"):
        await weights.resume()
    # it is repeated when the time is over
    assert weights.paused
    await weights.close()
    assert not weights.paused
