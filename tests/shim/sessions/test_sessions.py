"""Sessions from their opening to their end, and what a trainer asks of the gateway."""

import asyncio
import gc
import json
import logging
import sys
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

import trajkit as tk
from tests.shim.clients import USER, OnSocket, Session
from tests.shim.fakes import Held, ScriptedEngine, full_disk, raises, sampled
from trajkit_shim.errors import EngineError, GatewayError
from trajkit_shim.prompting.conversation import Conversation
from trajkit_shim.sessions import sessions as sessions_module
from trajkit_shim.sessions.sessions import SessionOptions, SessionStore

pytestmark = pytest.mark.anyio


class Clock:
    """The loop of timers, and time that passes when it is told to."""

    def __init__(self):
        self.now, self.arranged = 0.0, {}

    def time(self):
        return self.now

    def call_later(self, delay, callback):
        timer = object()
        self.arranged[timer] = self.now + delay, callback
        return SimpleNamespace(cancel=partial(self.arranged.pop, timer, None))

    def advance(self, seconds):
        end = self.now + seconds
        while due := {at: one for one, (at, _) in self.arranged.items() if at <= end}:
            self.now = min(due)
            _, callback = self.arranged.pop(due[self.now])
            callback()
        self.now = end


# What a session may use


async def test_what_is_left_bounds_the_next_reply(start):
    gateway = await start("hello", "wo")
    session = await gateway.open(max_output_tokens=10)
    await session.ask()
    await session.ask(max_tokens=100)
    limits = [sampling.max_new_tokens for sampling in gateway.engine.samplings]
    assert limits == [10, 4]


async def test_a_prompt_that_fits_exactly_is_taken(start):
    # the last two replies are cut at the one token that they have room for
    cut = sampled("c", finish_reason="length")
    gateway = await start("a", "b", cut, cut)

    async def refused(status, says, **limits):
        error = await (await gateway.open(**limits)).error(status)
        assert says in error["message"]

    await (await gateway.open()).ask()
    n, engine = len(gateway.engine.prompts[0]), gateway.engine
    await (await gateway.open(max_prompt_tokens=n)).ask()
    await refused(403, f"{n} more prompt tokens", max_prompt_tokens=n - 1)
    # the context needs room for one token of a reply
    await (await gateway.open(max_context_tokens=n + 1)).ask()
    await refused(400, "leave no room", max_context_tokens=n)
    engine.limits = replace(engine.limits, max_context_tokens=n + 1)
    await (await gateway.open()).ask()
    engine.limits = replace(engine.limits, max_context_tokens=n)
    await refused(400, "leave no room")
    assert [len(prompt) for prompt in engine.prompts] == [n] * 4


# How it ends


async def test_finishing_writes_what_the_trainer_says(start):
    gateway = await start("a")
    session = await gateway.open(group_id="g", metadata={"task": 3**50}, reward=0)
    await session.ask()
    (line,) = gateway.sessions()
    assert (line["reward"], line["ended_by"], line["turns"]) == (0.0, None, 0)
    summary = await session.end(reward=0.5, metadata={"tests": [3, 4]})
    assert (summary["status"], summary["ended_by"]) == ("closed", "finish")
    assert (summary["reward"], summary["turns"]) == (0.5, 1)
    assert summary["metadata"] == {"task": 3**50, "tests": [3, 4]}
    (line,) = gateway.sessions()
    assert (line["reward"], line["group_id"], line["error"]) == (0.5, "g", None)
    assert (line["turns"], line["output_tokens"], line["ended_by"]) == (1, 2, "finish")
    assert json.loads(line["metadata"]) == summary["metadata"]
    sessions = tk.read_sessions(gateway.directory)
    rows = tk.linearize(gateway.table(), sessions=sessions)
    assert rows["reward"].to_pylist() == [0.5]
    # a reward that comes late is written too
    assert (await session.end(reward=None, error="no grade"))["error"] == "no grade"
    (last,) = gateway.sessions()
    told = (last["reward"], last["error"], last["ended_by"])
    assert told == (None, "no grade", "finish")


async def test_finishing_waits_for_calls_and_takes_no_more(start):
    held = Held("late")
    session = await (await start(held)).open()
    call = await held.holds(session.ask())
    finish = asyncio.create_task(session.end(wait_seconds=60))
    while (await session.shown())["status"] != "closing":
        await asyncio.sleep(0)
    assert "is closed" in (await session.error(410))["message"]
    assert not finish.done()
    held.release.set()
    assert (await call)["content"] == "late"
    assert (await finish)["turns"] == 1
    assert session.gateway.table()["trainable"].to_pylist() == [True]


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
async def test_a_dropped_session_trains_nothing(start, closed):
    gateway = await start(*"abc")
    session, other = await gateway.open(), await gateway.open()
    for each in (session, session, other):
        await each.ask()
    if closed:
        await session.end()
    dropped = await session.end("drop")
    assert dropped == await session.end("drop")
    assert (dropped["ended_by"], dropped["dropped"]) == ("drop", 2)
    counts = (await gateway.get("/healthz"))["sessions"]
    assert (counts["open"], counts["closed"], counts["turns"]) == (1, 1, 3)
    turns = gateway.table()
    assert turns["trainable"].to_pylist() == [False, False, True]
    assert turns["amended"].to_pylist() == ["dropped", "dropped", None]
    assert gateway.sessions()[0]["ended_by"] == "drop"


async def test_an_idle_session_closes_by_itself(start):
    clock, held = Clock(), Held("late")
    gateway = await start("a", held, clock=clock)
    session = await gateway.open(ttl_seconds=10)
    clock.advance(9)
    await session.ask()
    clock.advance(9)
    call = await held.holds(session.ask())
    # a call under way is not idle
    clock.advance(100)
    held.release.set()
    await call
    clock.advance(9.5)
    assert (await session.shown())["status"] == "open"
    with full_disk(gateway.log, "write_session"):
        clock.advance(0.5)
        reply = await gateway.post("/sessions", 500, session_id="a")
        assert reply["error"]["code"] == "log_failed"
    shown = await session.shown()
    assert (shown["status"], shown["ended_by"]) == ("closed", "idle")
    await session.error(410)
    # it is written once that is possible
    clock.advance(10)
    (line,) = gateway.sessions()
    assert (line["ended_by"], line["reward"], line["turns"]) == ("idle", None, 2)
    assert clock.arranged == {}
    # nothing was opened where nothing could be written
    await gateway.open(session_id="a")


@pytest.mark.parametrize("how", ["finish", "drop", "idle"])
async def test_an_ended_session_is_released(start, how):
    """Its connections stay open, and one of its calls failed."""
    clock, engine = Clock(), ScriptedEngine("a", EngineError("no"))
    gateway = await start(engine=engine, clock=clock, place=OnSocket)
    session = await gateway.open(ttl_seconds=10)
    await session.ask(f"released by {how}")
    await session.error(502)
    kind = sessions_module.Session
    sessions = (x for x in gc.get_objects() if isinstance(x, kind))
    (opened,) = (each for each in sessions if each.session_id == session.id)
    (answer,), logged = map(weakref.ref, opened.answers), {*opened.conversation.logged}
    assert logged
    if how == "idle":
        clock.advance(10)
    else:
        await session.end(how)
    gc.collect()
    shown = await gateway.get("/prompts")
    alive = (x for x in gc.get_objects() if isinstance(x, Conversation))
    assert logged not in [each.logged for each in alive]
    assert answer() is None
    assert (opened.calls, opened.requests, shown["cache_bytes"]) == ({}, {}, 0)


def test_sessions_that_ended_leave_little_behind(monkeypatch):
    monkeypatch.setattr(sessions_module, "MAX_ENDED", 100)
    clock, options = Clock(), SessionOptions(ttl_seconds=60.0)
    log = SimpleNamespace(write_session=lambda line: None)
    store, keys = SessionStore(log, clock=clock), []
    for k in range(15_000):
        session = store.open(f"s{k}", options)
        keys.append(session.api_key)
        session.conversation.logged.add(b"key")
        session.counts.turns += 1
        store.end(session, "finish")
    assert (clock.arranged, len(store._open)) == ({}, 0)
    assert len(store._ended) == len(store._by_key) == 100
    counts = {"open": 0, "closed": 15_000, "forgotten": 14_900, "in_flight": 0}
    assert store.counts() == {**counts, "turns": 15_000}
    assert sum(map(sys.getsizeof, [store._forgotten, *store._forgotten])) < 80 * 15_000
    # the last ones are known to be closed, older ones are unknown
    for key, status in ((keys[-1], 410), (keys[0], 401)):
        with raises(GatewayError, status=status):
            store.authorise([key])
    # but none is opened twice: its turns would run into those in the log
    for known in ("s0", "s14899", "s14999"):
        with pytest.raises(GatewayError, match="opened before"):
            store.open(known)
    # which another worker has to know
    for name, status in (("s0", 410), ("s15000", 404)):
        with pytest.raises(GatewayError) as caught:
            store.find(name)
        assert caught.value.status == status


@pytest.mark.parametrize("wait", [60, 0], ids=["waits", "cancels"])
async def test_draining_ends_every_session(start, wait):
    held = Held("late")
    gateway = await start(held)
    session, idle = await gateway.open(), await gateway.open()
    call = await held.holds(session.post(status=200 if wait else 410))
    # as a stop signal does
    async with gateway.app.router.lifespan_context(gateway.app) as state:
        drain = asyncio.create_task(state["drain"](wait))
        while (await gateway.get("/healthz"))["status"] != "draining":
            await asyncio.sleep(0)
        if wait:
            assert "shutting down" in (await idle.error(503))["message"]
            assert not drain.done()
            held.release.set()
        await call
        await drain
        await gateway.post("/sessions", 503)
    assert len(gateway.turns()) == (1 if wait else 0)
    assert [line["ended_by"] for line in gateway.sessions()] == ["shutdown"] * 2


# Who may ask


async def test_the_trainer_s_requests_need_the_admin_token(start):
    gateway = await start(*"ab", admin_token="s3cret")
    for headers, status in (
        ({}, 401),
        ({"x-admin-token": "wrong"}, 401),
        ({"x-admin-token": "s3cret2"}, 401),
        ({"x-admin-token": "s3cret"}, 200),
        ({"authorization": "Bearer s3cret"}, 200),
        ({"authorization": "Basic s3cret"}, 401),
        ({"x-api-key": "s3cret"}, 401),
    ):
        asked = await gateway.http.post("/sessions", headers=headers)
        assert (headers, asked.status_code) == (headers, status)
        if status == 200:
            await Session(gateway, asked.json()).ask()
    # a session's key is no admin token
    key, n_asked = {"authorization": "Bearer x"}, 0
    for route in gateway.app.routes:
        for method in route.methods - {"HEAD"}:
            if route.path.startswith(("/sessions", "/engine")):
                url = route.path.format(session_id="x")
                reply = await gateway.http.request(method, url, headers=key)
                assert (url, reply.status_code) == (url, 401)
                assert reply.json()["error"]["code"] == "invalid_admin_token"
                n_asked += 1
    assert n_asked >= 8


FOREIGN = ("site.example", "site.example:80", "127.0.0.1.site.example", "[::1")
OWN = ("gateway:1", "127.0.0.1:1", "[::1]:1", "host.docker.internal", "mine.example:1")


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"origin": "https://site.example"}, "browser_refused"),
        ({"origin": "null"}, "browser_refused"),
        *(({"host": host}, "unknown_host") for host in FOREIGN),
        *(({"host": host}, None) for host in OWN),
    ],
)
async def test_no_route_answers_a_web_page(start, headers, code):
    gateway = await start(hosts=["Mine.example"])
    routes = [(r.path, m) for r in gateway.app.routes for m in r.methods]
    assert len(routes) >= 40
    for path, method in routes:
        url = path.replace("{model:path}", "m").replace("{", "").replace("}", "")
        reply = await gateway.http.request(method, url, headers=headers)
        refused = reply.status_code == 403
        assert refused == (code is not None), (method, url, reply.text)
        if refused and method != "HEAD" and "/v1/chat" in path:
            assert reply.json()["error"]["code"] == code


@pytest.mark.parametrize("path", ["/sessions", "/sessions/a/finish"])
async def test_the_outcome_of_a_session_has_a_limit(start, path):
    gateway = await start("a")
    session = await gateway.open(session_id="a", metadata={"a": "x" * 200_000})
    reply = await gateway.post(path, 413, metadata={"b": "x" * 300_000})
    assert reply["error"]["code"] == "metadata_too_long"
    # together with what was known before
    await session.end(status=413, metadata={"b": "x" * 100_000})
    # and the session still takes calls
    await session.ask()


async def test_messages_have_their_limit(start):
    session = await (await start("a", max_messages=2)).open()
    error = await session.error(413, messages=[USER] * 3)
    assert error["code"] == "too_many_messages"
    await session.error(415, headers={"content-encoding": "zstd"})
    await session.ask()


async def test_no_secret_is_logged(start, caplog):
    caplog.set_level(logging.DEBUG)
    secret = {"x-admin-token": "admin-s3cret"}
    broken = RuntimeError("broken"), EngineError("down")
    gateway = await start(*broken, admin_token="admin-s3cret")
    opened = await gateway.http.post("/sessions", headers=secret)
    session = Session(gateway, opened.json())
    for status in (500, 502):
        given = {"authorization": f"Bearer {session.key}"}
        await session.error(status, headers=given)
    await gateway.http.post(f"{session.path}/finish", headers=secret)
    assert session.key not in (await session.error(410))["message"]
    own = ("trajkit", "uvicorn", "starlette")
    lines = [r.getMessage() for r in caplog.records if r.name.startswith(own)]
    for hidden in ("admin-s3cret", session.key):
        assert not any(hidden in line for line in lines)


async def test_half_a_surrogate_pair_is_shown_to_the_trainer(start):
    gateway = await start("a")
    session = await gateway.open()
    # a field that is ignored, and a tool that is left out
    body = b'{"messages": [{"role": "user", "content": "x"}], "a\\ud800": 1,'
    body += b'"tools": [{"type": "b\\ud800"}]}'
    path = f"/s/{session.key}/v1/chat/completions"
    answer = await gateway.http.post(path, content=body)
    assert answer.status_code == 200, answer.text
    # the trainer may send none
    for path, field in (("/sessions", "group_id"), (f"{session.path}/finish", "error")):
        sent = b'{"%s": "\\ud800"}' % field.encode()
        answer = await gateway.http.post(path, content=sent)
        assert (answer.status_code, "surrogate" in answer.text) == (400, True)
    ended = await session.end(reward=1)
    assert ended["ignored"] == {"a\ud800": 1, "tools[].type=b\ud800": 1}
    (line,) = gateway.sessions()
    assert json.loads(line["ignored"]) == ended["ignored"]
