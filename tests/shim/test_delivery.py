"""A turn whose answer reached no client is context only."""

import asyncio
import json

import pytest
from hypothesis import example, given

import trajkit as tk
from tests.made_tables import linearized
from tests.shim.clients import in_process
from tests.shim.fakes import RENDERER, Held, ScriptedEngine
from tests.strategies import delivery_steps
from trajkit_shim.delivery import PendingReply

RETRY = (b"x-stainless-retry-count", b"1")
MESSAGES = [{"role": "user", "content": "hi"}]


class Line:
    """One connection to the app.

    It breaks once ``lost_after`` messages were sent, or one with ``lost_with`` in it.
    Where it is not ``noticed``, the send that breaks it returns at once: the server
    learns of it when the loop next looks at its sockets.
    """

    def __init__(
        self,
        session,
        *,
        stream=False,
        lost_after=None,
        lost_with=None,
        raises=None,
        noticed=True,
    ):
        self.body = json.dumps({"messages": MESSAGES, "stream": stream}).encode()
        self.session = session
        self.lost_after = lost_after
        self.lost_with = lost_with
        self.raises = raises
        self.noticed = noticed
        self.gone = asyncio.Event()
        self.sent = []

    async def receive(self):
        if self.body:
            body, self.body = self.body, b""
            return {"type": "http.request", "body": body}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        if self.gone.is_set():
            if self.raises is not None:
                raise self.raises
            return
        self.sent.append(message)
        with_it = self.lost_with and self.lost_with in message.get("body", b"")
        if with_it or len(self.sent) == self.lost_after:
            self.gone.set()
            # the server looks at its sockets
            for _ in range(5 if self.noticed else 0):
                await asyncio.sleep(0)

    async def ask(self, gateway, *headers):
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": [(b"x-session-key", self.session.encode()), *headers],
        }
        await gateway.app(scope, self.receive, self.send)


def logged(gateway):
    """``trainable`` and ``amended`` of each turn."""
    turns = tk.read_turns(gateway.log.directory).to_pylist()
    return [(turn["trainable"], turn.get("amended")) for turn in turns]


@pytest.fixture
async def gateway(tmp_path):
    engine = ScriptedEngine(*"abcd")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        yield gateway


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_answer_that_arrives_is_amended_by_nothing(gateway, stream):
    line = Line(await gateway.open_key(), stream=stream)
    await line.ask(gateway)
    assert logged(gateway) == [(True, None)]
    assert (await gateway.session(gateway.client(line.session)))["undelivered"] == 0


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "how", [{}, {"raises": OSError("closed")}, {"noticed": False}], ids=str
)
async def test_a_client_that_leaves_before_its_answer(gateway, stream, how):
    line = Line(await gateway.open_key(), stream=stream, lost_after=1, **how)
    await line.ask(gateway)
    assert len(line.sent) == 1
    assert logged(gateway) == [(False, "undelivered")]
    assert (await gateway.session(gateway.client(line.session)))["undelivered"] == 1


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("lost_after", "told"),
    [
        pytest.param(1, (False, "undelivered"), id="the head"),
        pytest.param(2, (False, "undelivered"), id="half of it"),
        pytest.param(3, (True, None), id="all of it"),
    ],
)
async def test_a_client_that_leaves_in_the_midst_of_a_long_answer(
    tmp_path, lost_after, told
):
    engine = ScriptedEngine("x" * 100_000, context=10**6)
    options = {"max_new_tokens": 10**6}
    async with in_process(engine, RENDERER, tmp_path, **options) as gateway:
        line = Line(await gateway.open_key(), lost_after=lost_after)
        await line.ask(gateway)
        assert logged(gateway) == [told]


@pytest.mark.anyio
@pytest.mark.parametrize("noticed", [True, False])
@pytest.mark.parametrize(
    ("lost_with", "told"),
    [
        pytest.param(b'"content":"late"', (False, "undelivered"), id="half of it"),
        pytest.param(b"[DONE]", (True, None), id="all of it"),
    ],
)
async def test_a_client_that_leaves_a_stream_that_has_begun(
    tmp_path, lost_with, told, noticed
):
    held = Held("late")
    options = {"ping_seconds": 0.001}
    async with in_process(
        ScriptedEngine(held), RENDERER, tmp_path, **options
    ) as gateway:
        session = await gateway.open_key()
        line = Line(session, stream=True, lost_with=lost_with, noticed=noticed)
        call = asyncio.create_task(line.ask(gateway))
        while len(line.sent) < 3:
            await asyncio.sleep(0)
        held.release.set()
        await call
        assert lost_with in line.sent[-1]["body"]
        assert logged(gateway) == [told]


@pytest.mark.anyio
async def test_a_request_that_is_cancelled_while_its_answer_is_sent(gateway):
    line = Line(await gateway.open_key())
    entered = asyncio.Event()

    async def stuck(message):
        entered.set()
        await asyncio.Event().wait()

    line.send = stuck
    call = asyncio.create_task(line.ask(gateway))
    await entered.wait()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert logged(gateway) == [(False, "undelivered")]


@pytest.mark.anyio
async def test_an_answer_that_cannot_be_written_is_not_delivered(gateway, monkeypatch):
    def fail(*_):
        raise RuntimeError("no words")

    session = await gateway.open_key()
    with monkeypatch.context() as patch:
        patch.setattr("trajkit_shim.delivery.encode", fail)
        with pytest.raises(RuntimeError, match="no words"):
            await Line(session).ask(gateway)
    assert logged(gateway) == [(False, "undelivered")]


@pytest.mark.anyio
async def test_an_answer_that_is_given_again_and_arrives_trains_after_all(gateway):
    session = await gateway.open_key()
    await Line(session, lost_after=1).ask(gateway)
    await Line(session, lost_after=1).ask(gateway, RETRY)
    assert logged(gateway) == [(False, "undelivered")]
    again = Line(session)
    await again.ask(gateway, RETRY)
    assert json.loads(again.sent[1]["body"])["choices"][0]["message"]["content"] == "a"
    assert logged(gateway) == [(True, "delivered")]
    # and is not lost again
    await Line(session, lost_after=1).ask(gateway, RETRY)
    assert logged(gateway) == [(True, "delivered")]
    assert (await gateway.session(gateway.client(session)))["undelivered"] == 0


@pytest.mark.anyio
@pytest.mark.parametrize("lost", [(1, None), (None, 1)], ids=["first", "second"])
async def test_one_of_two_connections_is_enough(tmp_path, lost):
    held = Held("a")
    async with in_process(ScriptedEngine(held), RENDERER, tmp_path) as gateway:
        session = await gateway.open_key(replay=True)
        lines = [Line(session, lost_after=each) for each in lost]
        calls = [asyncio.create_task(line.ask(gateway)) for line in lines]
        while (await gateway.session(gateway.client(session)))["replayed"] == 0:
            await asyncio.sleep(0)
        held.release.set()
        await asyncio.gather(*calls)
        assert logged(gateway) == [(True, None)]


@pytest.mark.anyio
async def test_a_turn_stays_dropped_when_its_answer_is_lost_later(gateway, monkeypatch):
    monkeypatch.setattr("trajkit_shim.sessions.sessions._GRACE_SECONDS", 0.0)
    line, entered = Line(await gateway.open_key()), asyncio.Event()

    async def stuck(message):
        entered.set()
        await asyncio.Event().wait()

    line.send = stuck
    call = asyncio.create_task(line.ask(gateway))
    await entered.wait()
    await gateway.http.post(f"{gateway.path_of(line.session)}/drop")
    await asyncio.gather(call, return_exceptions=True)
    assert logged(gateway) == [(False, "dropped")]


@pytest.mark.anyio
async def test_what_is_lost_is_not_trained_and_counted(gateway):
    session = await gateway.open_key()
    await Line(session, lost_after=1).ask(gateway)
    await Line(session).ask(gateway)
    turns = tk.read_turns(gateway.log.directory)
    rows, report = linearized(turns, reward=1.0)
    assert turns["resend_of"].is_valid().to_pylist() == [False, True]
    assert sum(sum(mask) for mask in rows["loss_mask"].to_pylist()) == 2
    assert report["lost_untrainable"].to_pylist() == [2]
    assert len(tk.verify(rows, turns)) == 0


def shared_call(run, amend=None):
    """A call that is of no session."""
    return PendingReply(run, amend, b"")


@given(delivery_steps)
@example([(0, True), (1, True), (0, False), (1, True)])
def test_a_turn_trains_once_any_connection_was_reached(steps):
    lines = []

    async def record(call):
        call.turn = 0

    async def deliver():
        call = shared_call(record, lambda _, *line: lines.append(line))
        await call.work
        under_way, reached = {}, False
        for name, well in steps:
            if name not in under_way:
                under_way[name] = call.joined()
                await under_way[name].__aenter__()
            else:
                if well:
                    call.reached()
                reached |= well
                n_lines = len(lines)
                await under_way.pop(name).__aexit__(None, None, None)
                # another connection may still deliver it
                assert not under_way or ("undelivered", False) not in lines[n_lines:]
            if not under_way:
                context_only = bool(lines) and lines[-1] == ("undelivered", False)
                assert context_only == (not reached)

    asyncio.run(deliver())
    assert len(lines) <= 2


@pytest.mark.anyio
async def test_a_client_that_leaves_before_it_has_sent_its_request(gateway, caplog):
    line = Line(await gateway.open_key())
    line.body = b""
    line.gone.set()
    line.gone.is_set = lambda: False
    await line.ask(gateway)
    assert line.sent[0]["status"] == 499
    assert caplog.records == []
    assert logged(gateway) == []
    shown = await gateway.session(gateway.client(line.session))
    assert shown["in_flight"] == 0


@pytest.mark.anyio
async def test_a_session_ends_once_its_amendments_are_written(gateway, monkeypatch):
    """Otherwise a turn would train whose answer nobody received."""
    session = await gateway.open_key()
    amend, full = gateway.log.amend, [True]

    def failing(*given):
        if full[0]:
            raise OSError(28, "No space left on device")
        amend(*given)

    monkeypatch.setattr(gateway.log, "amend", failing)
    await Line(session, lost_after=1).ask(gateway)
    assert logged(gateway) == [(True, None)]
    path = gateway.path_of(session)
    refused = await gateway.http.post(f"{path}/finish", json={"reward": 1.0})
    assert refused.status_code == 500
    assert "an amendment could not be written" in refused.text
    shown = (await gateway.http.get(path)).json()
    assert (shown["status"], shown["undelivered"]) == ("open", 1)
    full[0] = False
    assert (await gateway.http.post(f"{path}/finish")).status_code == 200
    assert logged(gateway) == [(False, "undelivered")]


@pytest.mark.anyio
async def test_an_amendment_is_written_before_the_next_turn(gateway, monkeypatch):
    session = await gateway.open_key()
    amend = gateway.log.amend

    def failing(*given):
        monkeypatch.setattr(gateway.log, "amend", amend)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gateway.log, "amend", failing)
    await Line(session, lost_after=1).ask(gateway)
    await Line(session).ask(gateway)
    assert logged(gateway) == [(False, "undelivered"), (True, None)]
