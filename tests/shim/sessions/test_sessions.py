"""Sessions from their opening to their end, and what a trainer asks of the gateway."""

import asyncio
import gc
import json
import logging
import sys
from dataclasses import replace

import openai
import pytest

import trajkit as tk
from tests.shim.clients import in_process, on_socket
from tests.shim.fakes import RENDERER, Held, ScriptedEngine, sampled
from trajkit_shim.errors import EngineError, GatewayError
from trajkit_shim.sessions import sessions as sessions_module
from trajkit_shim.sessions.sessions import Session, SessionOptions, SessionStore

USER = {"role": "user", "content": "hi"}


class Clock:
    """Time that passes when it is told to."""

    def __init__(self):
        self.now = 0.0
        self.arranged = []

    def time(self):
        return self.now

    def call_later(self, delay, callback):
        handle = Arranged(self.now + delay, callback)
        self.arranged.append(handle)
        return handle

    def advance(self, seconds):
        end = self.now + seconds
        while due := [h for h in self.arranged if not h.cancelled and h.when <= end]:
            handle = min(due, key=lambda h: h.when)
            self.arranged.remove(handle)
            self.now = handle.when
            handle.callback()
        self.now = end
        self.arranged = [h for h in self.arranged if not h.cancelled]


class Arranged:
    def __init__(self, when, callback):
        self.when, self.callback, self.cancelled = when, callback, False

    def cancel(self):
        self.cancelled = True


class Lines:
    """A log, and a store that writes to it."""

    def __init__(self, **options):
        self.sessions = []
        self.write_session = self.sessions.append
        self.clock = Clock()
        self.store = SessionStore(self, clock=self.clock, **options)


async def ask(client, **fields):
    return await client.chat.completions.create(model="any", messages=[USER], **fields)


async def post(gateway, path, **body):
    return await gateway.http.post(path, json=body)


def sessions(gateway):
    return tk.read_sessions(gateway.log.directory).to_pylist()


def trained(gateway):
    turns = tk.read_turns(gateway.log.directory)
    return turns["trainable"].to_pylist()


# What a session may use


@pytest.mark.anyio
async def test_what_is_left_bounds_the_next_reply(tmp_path):
    engine = ScriptedEngine("hello", "wo")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = await gateway.open(max_output_tokens=10)
        await ask(client)
        await ask(client, max_tokens=100)
    assert [sampling.max_new_tokens for sampling in engine.samplings] == [10, 4]


@pytest.mark.anyio
async def test_a_prompt_that_fits_exactly_is_taken(tmp_path):
    # the last two replies are cut at the one token that they have room for
    cut = sampled("c", finish_reason="length")
    engine = ScriptedEngine("a", "b", cut, cut)
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        await ask(await gateway.open())
        n = len(engine.prompts[0])
        await ask(await gateway.open(max_prompt_tokens=n))
        with pytest.raises(
            openai.PermissionDeniedError, match=f"{n} more prompt tokens"
        ):
            await ask(await gateway.open(max_prompt_tokens=n - 1))
        # the context needs room for one token of a reply
        await ask(await gateway.open(max_context_tokens=n + 1))
        with pytest.raises(openai.BadRequestError, match="leave no room"):
            await ask(await gateway.open(max_context_tokens=n))
        engine.limits = replace(engine.limits, max_context_tokens=n + 1)
        await ask(await gateway.open())
        engine.limits = replace(engine.limits, max_context_tokens=n)
        with pytest.raises(openai.BadRequestError, match="leave no room"):
            await ask(await gateway.open())
    assert [len(prompt) for prompt in engine.prompts] == [n] * 4


# How it ends


@pytest.mark.anyio
async def test_finishing_writes_what_the_trainer_says(tmp_path):
    async with in_process(ScriptedEngine("a"), RENDERER, tmp_path) as gateway:
        client = await gateway.open(group_id="g", metadata={"task": 1}, reward=0)
        await ask(client)
        (line,) = sessions(gateway)
        assert (line["reward"], line["ended_by"], line["turns"]) == (0.0, None, 0)
        path = f"{gateway.path_of(client)}/finish"
        reply = await post(gateway, path, reward=0.5, metadata={"tests": [3, 4]})
        summary = reply.json()
        assert (summary["status"], summary["ended_by"]) == ("closed", "finish")
        assert (summary["reward"], summary["turns"]) == (0.5, 1)
        assert summary["metadata"] == {"task": 1, "tests": [3, 4]}
        (line,) = sessions(gateway)
        turns = tk.read_turns(tmp_path)
        rows = tk.linearize(turns, sessions=tk.read_sessions(tmp_path))
        # a reward that comes late is written too
        late = await post(gateway, path, reward=None, error="no grade")
        (last,) = sessions(gateway)
    assert (line["reward"], line["group_id"], line["error"]) == (0.5, "g", None)
    assert (line["turns"], line["output_tokens"], line["ended_by"]) == (1, 2, "finish")
    assert json.loads(line["metadata"]) == summary["metadata"]
    assert rows["reward"].to_pylist() == [0.5]
    assert late.json()["error"] == "no grade"
    assert (last["reward"], last["error"], last["ended_by"]) == (
        None,
        "no grade",
        "finish",
    )


@pytest.mark.anyio
async def test_finishing_waits_for_calls_and_takes_no_more(tmp_path):
    held = Held("late")
    async with in_process(ScriptedEngine(held), RENDERER, tmp_path) as gateway:
        client = await gateway.open()
        call = asyncio.create_task(ask(client))
        await held.entered.wait()
        path = f"{gateway.path_of(client)}/finish"
        finish = asyncio.create_task(post(gateway, path, wait_seconds=60))
        while (await gateway.session(client))["status"] != "closing":
            await asyncio.sleep(0)
        with pytest.raises(openai.APIStatusError, match="is closed"):
            await ask(client)
        assert not finish.done()
        held.release.set()
        assert (await call).choices[0].message.content == "late"
        assert (await finish).json()["turns"] == 1
        assert trained(gateway) == [True]


@pytest.mark.anyio
async def test_a_dropped_session_trains_nothing(tmp_path):
    async with in_process(ScriptedEngine(*"abc"), RENDERER, tmp_path) as gateway:
        client, other = await gateway.open(), await gateway.open()
        for one in (client, client, other):
            await ask(one)
        dropped = (await post(gateway, f"{gateway.path_of(client)}/drop")).json()
        again = (await post(gateway, f"{gateway.path_of(client)}/drop")).json()
        turns = tk.read_turns(tmp_path)
        (line, _) = sessions(gateway)
    assert dropped == again
    assert (dropped["ended_by"], dropped["dropped"]) == ("drop", 2)
    assert turns["trainable"].to_pylist() == [False, False, True]
    assert turns["amended"].to_pylist() == ["dropped", "dropped", None]
    assert line["ended_by"] == "drop"


@pytest.mark.anyio
async def test_a_session_that_was_closed_can_be_dropped_and_reopened(tmp_path):
    engine = ScriptedEngine(*"abcd")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = await gateway.open(max_turns=3, sampling={"temperature": 0.5})
        path = gateway.path_of(client)
        await ask(client)
        await gateway.http.delete(path)
        await post(gateway, f"{path}/drop")
        assert (await post(gateway, f"{path}/reopen")).json()["status"] == "open"
        assert (await post(gateway, f"{path}/reopen")).status_code == 409
        await ask(client)
        await ask(client)
        with pytest.raises(openai.PermissionDeniedError, match="3 turns"):
            await ask(client)
        counts = (await gateway.http.get("/healthz")).json()["sessions"]
        await post(gateway, f"{path}/finish", reward=1)
        turns = tk.read_turns(tmp_path)
        (line,) = sessions(gateway)
        assert (await post(gateway, "/sessions/no/reopen")).status_code == 404
    assert turns["turn_index"].to_pylist() == [0, 1, 2]
    assert turns["trainable"].to_pylist() == [False, True, True]
    assert (counts["open"], counts["closed"], counts["turns"]) == (1, 0, 3)
    assert (line["turns"], line["ended_by"], line["reward"]) == (3, "finish", 1.0)
    assert {sampling.temperature for sampling in engine.samplings} == {0.5}


@pytest.mark.anyio
async def test_an_idle_session_closes_by_itself(tmp_path):
    clock, held = Clock(), Held("late")
    engine = ScriptedEngine("a", held)
    async with in_process(engine, RENDERER, tmp_path, clock=clock) as gateway:
        client = await gateway.open(ttl_seconds=10)
        clock.advance(9)
        await ask(client)
        clock.advance(9)
        call = asyncio.create_task(ask(client))
        await held.entered.wait()
        # a call under way is not idle
        clock.advance(100)
        held.release.set()
        await call
        clock.advance(9.5)
        assert (await gateway.session(client))["status"] == "open"
        clock.advance(0.5)
        shown = await gateway.session(client)
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(client)
        (line,) = sessions(gateway)
    assert (shown["status"], shown["ended_by"]) == ("closed", "idle")
    assert caught.value.status_code == 410
    assert (line["ended_by"], line["reward"], line["turns"]) == ("idle", None, 2)
    assert clock.arranged == []


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["finish", "drop", "idle"])
async def test_an_ended_session_is_released(tmp_path, how):
    """Its connections stay open, and one of its calls failed."""
    clock, engine = Clock(), ScriptedEngine("a", EngineError("no"))
    async with on_socket(engine, RENDERER, tmp_path, clock=clock) as gateway:
        client = await gateway.open(session_id="released", ttl_seconds=10)
        await ask(client)
        with pytest.raises(openai.APIStatusError):
            await ask(client)
        if how == "idle":
            clock.advance(10)
        else:
            await post(gateway, f"/sessions/released/{how}")
        clock.advance(0)  # it forgets cancelled timers
        gc.collect()
        alive = [each for each in gc.get_objects() if isinstance(each, Session)]
        shown = (await gateway.http.get("/prompts")).json()
    assert "released" not in [each.session_id for each in alive]
    assert shown["cache_bytes"] == 0


def test_a_hundred_thousand_sessions_leave_little_behind():
    lines, options = Lines(max_ended=100), SessionOptions(ttl_seconds=60.0)
    keys = []
    for k in range(100_000):
        session = lines.store.open(f"s{k}", options)
        keys.append(session.api_key)
        session.conversation.logged.add(b"key")
        session.counts.turns += 1
        lines.store.end(session, "finish")
        lines.sessions.clear()
        if k % 100 == 0:
            # what was cancelled is swept, as a loop does
            lines.clock.advance(0)
    lines.clock.advance(0)
    store = lines.store
    assert lines.clock.arranged == []
    assert len(store._open) == 0
    assert len(store._ended) == len(store._ids) == 100
    assert store.counts() == {
        "open": 0,
        "closed": 100_000,
        "forgotten": 99_900,
        "in_flight": 0,
        "turns": 100_000,
    }
    assert sum(map(sys.getsizeof, [store._forgotten, *store._forgotten])) < 8 << 20
    # the last ones are known to be closed, older ones are unknown
    with pytest.raises(GatewayError) as caught:
        store.authorise([keys[-1]])
    assert caught.value.status == 410
    with pytest.raises(GatewayError) as caught:
        store.authorise([keys[0]])
    assert caught.value.status == 401
    # but none is opened twice: its turns would run into those in the log
    for known in ("s0", "s99899", "s99999"):
        with pytest.raises(GatewayError, match="opened before"):
            store.open(known)


@pytest.mark.anyio
async def test_a_session_whose_line_cannot_be_written_is_not_opened(
    tmp_path, monkeypatch
):
    async with in_process(ScriptedEngine("a"), RENDERER, tmp_path) as gateway:

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(gateway.log._sessions, "append", full)
            reply = await post(gateway, "/sessions", session_id="a")
            assert reply.status_code == 500
            assert reply.json()["error"]["code"] == "log_failed"
        assert (await post(gateway, "/sessions", session_id="a")).status_code == 200


# Draining and pausing


@pytest.mark.anyio
@pytest.mark.parametrize("wait", [60, 0], ids=["waits", "cancels"])
async def test_draining_ends_every_session(tmp_path, wait):
    held = Held("late")
    async with in_process(ScriptedEngine(held), RENDERER, tmp_path) as gateway:
        client, idle = await gateway.open(), await gateway.open()
        call = asyncio.create_task(ask(client))
        await held.entered.wait()
        drain = asyncio.create_task(post(gateway, "/admin/drain", wait_seconds=wait))
        while (await gateway.http.get("/healthz")).json()["status"] != "draining":
            await asyncio.sleep(0)
        if wait:
            with pytest.raises(openai.InternalServerError, match="shutting down"):
                await ask(idle)
            assert not drain.done()
            held.release.set()
            await call
        else:
            with pytest.raises(openai.APIStatusError, match="is closed"):
                await call
        counts = (await drain).json()
        assert (await post(gateway, "/sessions")).status_code == 503
        lines = sessions(gateway)
    assert (counts["open"], counts["turns"]) == (0, 1 if wait else 0)
    assert [line["ended_by"] for line in lines] == ["shutdown"] * 2


@pytest.mark.anyio
async def test_requests_end_also_if_the_line_of_their_session_cannot_be_written(
    monkeypatch,
):
    monkeypatch.setattr(sessions_module, "_GRACE_SECONDS", 0.0)
    lines = Lines()
    session = lines.store.open("s")

    async def serve():
        with session.request():
            await asyncio.Event().wait()

    def write(_):
        raise OSError(28, "No space left on device")

    request = asyncio.create_task(serve())
    await asyncio.sleep(0)
    lines.write_session = write
    with pytest.raises(GatewayError, match="could not be written"):
        await lines.store.finish("s", "close")
    assert request.cancelling()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert session.requests == {}


@pytest.mark.anyio
async def test_a_pause_lets_calls_end_and_holds_new_ones(tmp_path):
    held = Held("a")
    engine = ScriptedEngine(held, "b")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = await gateway.open()
        first = asyncio.create_task(ask(client))
        await held.entered.wait()
        pause = asyncio.create_task(post(gateway, "/engine/pause", mode="wait"))
        for _ in range(20):
            await asyncio.sleep(0)
        second = asyncio.create_task(ask(client))
        held.release.set()
        assert (await pause).json()["paused"]
        assert (await first).choices[0].message.content == "a"
        assert len(engine.prompts) == 1
        assert not second.done()
        assert not (await post(gateway, "/engine/resume")).json()["paused"]
        assert (await second).choices[0].message.content == "b"


@pytest.mark.anyio
async def test_a_client_that_leaves_while_its_call_was_cut_off(tmp_path):
    held = Held("old weights")
    engine = ScriptedEngine(held, "b")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = await gateway.open()
        call = asyncio.create_task(ask(client))
        await held.entered.wait()
        await post(gateway, "/engine/pause", mode="abort")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await post(gateway, "/engine/resume")
        assert (await gateway.session(client))["in_flight"] == 0
        assert (len(engine.prompts), gateway.turns()) == (1, [])


@pytest.mark.anyio
async def test_a_call_does_not_wait_for_ever(tmp_path):
    async with in_process(
        ScriptedEngine("a"), RENDERER, tmp_path, pause_wait_seconds=0.0
    ) as gateway:
        client = await gateway.open()
        await post(gateway, "/engine/pause", mode="wait")
        with pytest.raises(openai.InternalServerError) as caught:
            await ask(client)
        assert gateway.turns() == []
    assert (caught.value.status_code, caught.value.code) == (503, "paused")
    assert caught.value.response.headers["retry-after"] == "5"
    assert caught.value.response.headers["x-should-retry"] == "true"


# Who may ask


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"x-admin-token": "wrong"}, 401),
        ({"x-admin-token": "s3cret2"}, 401),
        ({"x-admin-token": "s3cret"}, 200),
        ({"authorization": "Bearer s3cret"}, 200),
        ({"authorization": "Basic s3cret"}, 401),
        ({"x-api-key": "s3cret"}, 401),
    ],
)
async def test_the_trainer_s_requests_need_the_admin_token(tmp_path, headers, status):
    options = {"admin_token": "s3cret"}
    async with in_process(
        ScriptedEngine("a"), RENDERER, tmp_path, **options
    ) as gateway:
        asked = await gateway.http.post("/sessions", headers=headers)
        assert asked.status_code == status
        if status == 200:
            client = gateway.client(asked.json()["api_key"])
            await ask(client)
        reached = {
            (route.path, method)
            for route in gateway.app.routes
            for method in route.methods - {"HEAD"}
            if route.path.startswith(("/sessions", "/admin", "/engine", "/metrics"))
        }
        paths = {path for path, _ in reached}
        assert {"/sessions", "/admin/drain", "/engine/pause", "/metrics"} <= paths
        for path, method in reached:
            url = path.format(session_id="x")
            # a session's key is no admin token
            reply = await gateway.http.request(
                method, url, headers={"authorization": "Bearer x"}
            )
            assert (url, reply.status_code) == (url, 401)
            assert reply.json()["error"]["code"] == "invalid_admin_token"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"origin": "https://site.example"}, "browser_refused"),
        ({"origin": "null"}, "browser_refused"),
        ({"host": "site.example"}, "unknown_host"),
        ({"host": "site.example:80"}, "unknown_host"),
        ({"host": "127.0.0.1.site.example"}, "unknown_host"),
        ({"host": "[::1"}, "unknown_host"),
        ({"host": "gateway:1"}, None),
        ({"host": "127.0.0.1:1"}, None),
        ({"host": "[::1]:1"}, None),
        ({"host": "host.docker.internal"}, None),
        ({"host": "mine.example:1"}, None),
    ],
)
async def test_no_route_answers_a_web_page(tmp_path, headers, code):
    async with in_process(
        ScriptedEngine(), RENDERER, tmp_path, hosts=["mine.example"]
    ) as gateway:
        routes = [(r.path, m) for r in gateway.app.routes for m in r.methods]
        assert len(routes) > 40
        for path, method in routes:
            url = path.replace("{model:path}", "m").replace("{", "").replace("}", "")
            reply = await gateway.http.request(method, url, headers=headers)
            refused = reply.status_code == 403
            assert refused == (code is not None), (method, url, reply.text)
            if refused and method != "HEAD" and "/v1/chat" in path:
                assert reply.json()["error"]["code"] == code
        assert gateway.app is not None


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/sessions", "/sessions/a/finish"])
async def test_the_outcome_of_a_session_has_a_limit(tmp_path, path):
    async with in_process(ScriptedEngine("a"), RENDERER, tmp_path) as gateway:
        client = await gateway.open(session_id="a", metadata={"a": "x" * 200_000})
        reply = await gateway.http.post(path, json={"metadata": {"b": "x" * 300_000}})
        assert (reply.status_code, reply.json()["error"]["code"]) == (
            413,
            "metadata_too_long",
        )
        # together with what was known before
        late = {"metadata": {"b": "x" * 100_000}}
        reply = await gateway.http.post("/sessions/a/finish", json=late)
        assert reply.status_code == 413
        # and the session still takes calls
        await ask(client)


@pytest.mark.anyio
async def test_headers_and_messages_have_their_limits(tmp_path):
    options = {"max_messages": 2, "max_header_bytes": 2000}
    async with in_process(
        ScriptedEngine("a"), RENDERER, tmp_path, **options
    ) as gateway:
        client = await gateway.open()
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(model="x", messages=[USER] * 3)
        assert (caught.value.status_code, caught.value.code) == (
            413,
            "too_many_messages",
        )
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(client, extra_headers={"x-much": "y" * 2000})
        assert (caught.value.status_code, caught.value.code) == (
            431,
            "headers_too_long",
        )
        reply = await gateway.http.post("/sessions", headers={"x-much": "y" * 2000})
        assert reply.status_code == 431
        await ask(client)
        assert len(gateway.turns()) == 1


@pytest.mark.anyio
async def test_no_secret_is_logged(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    secret = "admin-s3cret"
    engine = ScriptedEngine(RuntimeError("broken"), EngineError("down"))
    async with in_process(engine, RENDERER, tmp_path, admin_token=secret) as gateway:
        headers = {"x-admin-token": secret}
        opened = await gateway.http.post("/sessions", headers=headers)
        key = opened.json()["api_key"]
        for _ in range(2):
            await gateway.http.post(
                "/v1/chat/completions",
                headers={"authorization": f"Bearer {key}"},
                json={"messages": [USER]},
            )
        path = f"/sessions/{opened.json()['session_id']}"
        await gateway.http.post(f"{path}/finish", headers=headers)
    said = [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith(("trajkit", "uvicorn", "starlette"))
    ]
    assert not any(secret in text or key in text for text in said)


@pytest.mark.anyio
async def test_a_full_log_takes_no_call(tmp_path):
    engine = ScriptedEngine(sampled("a" * 3000), "b", context=10**4)
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = await gateway.open()
        # room for a short turn, not for this one
        gateway.log._turns.max_total_bytes = gateway.log._turns.total_bytes + 5000
        with pytest.raises(openai.InternalServerError, match="the limit is") as caught:
            await ask(client)
        assert (caught.value.status_code, caught.value.code) == (507, "log_full")
        assert caught.value.response.headers["x-should-retry"] == "false"
        gateway.log._turns.max_total_bytes = gateway.log._turns.total_bytes
        with pytest.raises(openai.InternalServerError, match="the log is full"):
            await ask(client)
        assert gateway.turns() == []
        # it ends all the same, and that is written
        await gateway.http.delete(gateway.path_of(client))
        (line,) = sessions(gateway)
    assert len(engine.prompts) == 1
    assert line["ended_by"] == "close"


@pytest.mark.anyio
async def test_sessions_are_listed_by_what_is_known_of_them(tmp_path):
    async with in_process(ScriptedEngine("a"), RENDERER, tmp_path) as gateway:
        for name, group in (("a", "g"), ("b", "h"), ("c", "g")):
            client = await gateway.open(session_id=name, group_id=group)
        await ask(client)
        await gateway.http.post("/sessions/a/finish")

        async def listed(query):
            answer = (await gateway.http.get(f"/sessions?{query}")).json()
            return [session["session_id"] for session in answer["sessions"]]

        assert await listed("") == ["b", "c", "a"]
        assert await listed("limit=2") == ["b", "c"]
        assert await listed("group_id=g&status=open") == ["c"]
        assert await listed("ended_by=finish") == ["a"]
        for query in ("limit=x", "color=red"):
            assert (await gateway.http.get(f"/sessions?{query}")).status_code == 400
        answer = await gateway.http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        values = dict(
            line.rsplit(" ", 1) for line in answer.text.splitlines() if line[0] != "#"
        )
    assert values['trajkit_sessions{state="open"}'] == "2"
    assert values['trajkit_sessions{state="closed"}'] == "1"
    assert values["trajkit_turns_total"] == "1"
