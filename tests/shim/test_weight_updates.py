"""Pauses that end by themselves, and weights that change in the middle of a session."""

import asyncio

import pytest

from tests.shim.clients import in_process
from tests.shim.fakes import RENDERER, Held, ScriptedEngine, Updatable, sampled
from trajkit_shim import pauses
from trajkit_shim.engines.base import UpdatableEngine
from trajkit_shim.errors import EngineError, GatewayError
from trajkit_shim.pauses import Pause

pytestmark = pytest.mark.anyio


async def test_pause_update_resume(tmp_path):
    engine = Updatable()
    assert isinstance(engine, UpdatableEngine)
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        update = {"model_path": "/new", "weight_version": "step-1"}
        early = await gateway.http.post("/engine/update", json=update)
        assert early.status_code == 409
        paused = await gateway.http.post("/engine/pause", json={"timeout_s": 60})
        assert paused.json()["paused"]
        assert (await gateway.http.post("/engine/update", json=update)).json() == {
            "paused": True,
            "mode": "keep",
            "pauses_expired": 0,
            "weight_version": "step-1",
        }
        for _ in range(2):
            resumed = await gateway.http.post("/engine/resume")
            assert resumed.json()["paused"] is False
        assert (await gateway.http.get("/engine")).json() == resumed.json()
    assert engine.told == [("pause",), ("update", "/new", "step-1"), ("resume",)]


@pytest.mark.parametrize(
    ("path", "body", "match"),
    [
        pytest.param("pause", {"timeout_s": -1}, "timeout_s", id="a negative time"),
        pytest.param("pause", {"seconds": 1}, "seconds", id="another field"),
        pytest.param("pause", {"mode": "stop"}, "mode", id="another mode"),
        pytest.param("update", {"model_path": "a"}, "weight_version", id="no version"),
        pytest.param("update", {"weight_version": "a"}, "model_path", id="no path"),
    ],
)
async def test_what_is_refused(tmp_path, path, body, match):
    engine = Updatable()
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        reply = await gateway.http.post(f"/engine/{path}", json=body)
    assert reply.status_code == 400
    assert match in reply.text
    assert engine.told == []


async def test_an_engine_that_cannot_be_paused(tmp_path):
    async with in_process(ScriptedEngine(), RENDERER, tmp_path) as gateway:
        reply = await gateway.http.post("/engine/pause")
    assert reply.status_code == 501
    assert "ScriptedEngine cannot be paused" in reply.text


async def test_one_pause_at_a_time():
    engine = Updatable()
    pause = Pause(engine, wait_seconds=60)
    await pause.pause(60, "wait")
    with pytest.raises(GatewayError, match="a pause with mode 'wait'") as caught:
        await pause.pause(60, "keep")
    assert caught.value.status == 409
    # no call is at the engine, which may get weights
    await pause.update("/new", "1")
    await pause.resume()
    assert engine.told == [("update", "/new", "1")]


async def test_a_call_that_waited_does_not_pass_a_pause_that_began_again():
    pause, held = Pause(Updatable(), wait_seconds=60), Held(sampled("a"))
    await pause.pause(60, "wait")
    call = asyncio.create_task(pause.sample(held))
    for _ in range(10):
        await asyncio.sleep(0)
    # no time between the two for the call to begin
    await pause.resume()
    await pause.pause(60, "wait")
    for _ in range(10):
        await asyncio.sleep(0)
    assert not held.entered.is_set()
    await pause.resume()
    held.release.set()
    assert await call == held.reply


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


async def test_a_pause_ends_by_itself():
    engine = Updatable()
    weights = Pause(engine, wait_seconds=60)
    await weights.pause(0.0)
    await until(lambda: weights.expired)
    await until(lambda: ("resume",) in engine.told)
    assert weights.mode is None
    with pytest.raises(GatewayError, match="not paused"):
        await weights.update("/new", "1")


async def test_a_pause_that_is_asked_for_again_starts_anew():
    engine = Updatable()
    weights = Pause(engine, wait_seconds=60)
    await weights.pause(60)
    first = weights._lease
    await weights.pause(60)
    await until(first.cancelled)
    assert weights.mode is not None
    assert engine.told == [("pause",), ("pause",)]
    await weights.close()
    assert engine.told[-1] == ("resume",)
    assert weights.mode is None


@pytest.mark.parametrize(
    ("failure", "status", "match"),
    [
        pytest.param(EngineError("broken"), 502, "broken", id="fails"),
        pytest.param("hangs", 504, "did not pause within 0", id="does not answer"),
    ],
)
async def test_a_pause_that_fails_does_not_leave_the_engine_paused(
    monkeypatch, failure, status, match
):
    engine = Updatable()
    engine.fails["pause"] = failure
    monkeypatch.setattr(pauses, "_AT_ONCE_S", 0.0 if failure == "hangs" else 60.0)
    weights = Pause(engine, wait_seconds=60)
    with pytest.raises(EngineError, match=match) as caught:
        await weights.pause(60)
    assert caught.value.status == status
    assert weights.mode is None
    if failure != "hangs":
        assert engine.told == [("pause",), ("resume",)]


async def test_an_update_that_fails_leaves_it_to_the_trainer():
    """The version is unknown then: a part of the servers may have the new weights."""
    engine = Updatable()
    weights = Pause(engine, wait_seconds=60)
    await weights.pause(60)
    await weights.update("/new", "0")
    engine.fails["update"] = EngineError("no such directory")
    with pytest.raises(EngineError, match="no such directory"):
        await weights.update("/new", "1")
    assert weights.mode is not None
    assert weights.version is None
    engine.fails["resume"] = EngineError("broken")
    with pytest.raises(EngineError, match="broken"):
        await weights.resume()
    # it is repeated when the time is over
    assert weights.mode is not None
    await weights.close()
    assert weights.mode is None
