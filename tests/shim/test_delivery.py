"""Answers on their way: what reached no client is context only, and what comes again."""

import asyncio
import json
from dataclasses import dataclass
from functools import partial
from unittest.mock import Mock

import anthropic
import pytest
from hypothesis import example, given

from tests.shim.clients import BODIES, USER, OnSocket, Session, http, http_of
from tests.shim.fakes import Held, cases, fails, full_disk, sampled, until
from tests.strategies import delivery_steps
from trajkit_shim.delivery import KEPT, PendingReply, is_retry
from trajkit_shim.errors import EngineError

pytestmark = pytest.mark.anyio

RETRY = {"x-stainless-retry-count": "1"}
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
LOST, DELIVERED = (False, "undelivered"), (True, None)


@dataclass
class Line:
    """One connection to the app.

    It breaks once ``lost_after`` messages were sent, or one with ``lost_with`` in it.
    Where it is not ``noticed``, the send that breaks it returns at once: the server
    learns of it when the loop next looks at its sockets.
    """

    session: Session
    stream: bool = False
    lost_after: int | None = None
    lost_with: bytes | None = None
    raises: Exception | None = None
    noticed: bool = True

    def __post_init__(self):
        asked = {"messages": [USER], "stream": self.stream}
        self.body = json.dumps(asked).encode()
        self.gone, self.sent = asyncio.Event(), []

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

    async def ask(self, **headers):
        given = {"x-session-key": self.session.key, **headers}
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": [(k.encode(), v.encode()) for k, v in given.items()],
        }
        await self.session.gateway.app(scope, self.receive, self.send)


async def stuck(session):
    """The task of a call, once its answer is sent, which does not end."""
    line, entered = Line(session), asyncio.Event()

    async def send(_):
        entered.set()
        await asyncio.Event().wait()

    line.send = send
    call = asyncio.create_task(line.ask())
    await entered.wait()
    return call


def logged(session):
    """``trainable`` and ``amended`` of each turn."""
    turns = session.gateway.table().to_pylist()
    return [(turn["trainable"], turn.get("amended")) for turn in turns]


@pytest.fixture
async def session(start):
    return await (await start(*"abcd")).open()


@STREAM
@cases(
    "how, told",
    {
        "arrives": ({}, DELIVERED),
        "is lost": ({"lost_after": 1}, LOST),
        "raises": ({"lost_after": 1, "raises": OSError("closed")}, LOST),
        "is lost unnoticed": ({"lost_after": 1, "noticed": False}, LOST),
    },
)
async def test_an_answer(session, stream, how, told):
    line = Line(session, stream=stream, **how)
    await line.ask()
    assert told == DELIVERED or len(line.sent) == 1
    assert logged(session) == [told]
    assert (await session.shown())["undelivered"] == (told == LOST)


@pytest.mark.parametrize("noticed", [True, False])
@cases(
    "lost_with, told",
    {"half of it": (b'"content":"late"', LOST), "all of it": (b"[DONE]", DELIVERED)},
)
async def test_a_client_that_leaves_a_stream_that_has_begun(
    start, lost_with, told, noticed
):
    held = Held("late")
    session = await (await start(held, ping_seconds=0.001)).open()
    line = Line(session, stream=True, lost_with=lost_with, noticed=noticed)
    call = asyncio.create_task(line.ask())
    await until(lambda: len(line.sent) >= 3)
    held.release.set()
    await call
    assert lost_with in line.sent[-1]["body"]
    assert logged(session) == [told]


async def test_a_dropped_turn_whose_answer_is_lost_stays_dropped(session, monkeypatch):
    monkeypatch.setattr("trajkit_shim.sessions.sessions._GRACE_SECONDS", 0.0)
    call = await stuck(session)
    await session.end("drop")
    await asyncio.gather(call, return_exceptions=True)
    assert logged(session) == [(False, "dropped")]


async def test_an_answer_that_cannot_be_written_is_not_delivered(session, monkeypatch):
    with monkeypatch.context() as patch:
        failing = fails("no words", raised=RuntimeError)
        patch.setattr("trajkit_shim.delivery.encode", failing)
        with pytest.raises(RuntimeError, match="no words"):
            await Line(session).ask()
    assert logged(session) == [LOST]


async def test_an_answer_that_is_given_again_and_arrives_trains_after_all(session):
    await Line(session, lost_after=1).ask()
    await Line(session, lost_after=1).ask(**RETRY)
    assert logged(session) == [LOST]
    again = Line(session)
    await again.ask(**RETRY)
    assert json.loads(again.sent[1]["body"])["choices"][0]["message"]["content"] == "a"
    assert logged(session) == [(True, "delivered")]
    # and is not lost again
    await Line(session, lost_after=1).ask(**RETRY)
    assert logged(session) == [(True, "delivered")]
    assert (await session.shown())["undelivered"] == 0


@given(delivery_steps)
@example([(0, True), (1, True), (0, False), (1, True)])
def test_a_turn_trains_once_any_connection_was_reached(steps):
    lines = []

    async def record(call):
        call.turn = 0

    async def deliver():
        # a call that is of no session
        call = PendingReply(record, lambda _, *line: lines.append(line), b"")
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


async def test_a_client_that_leaves_before_it_has_sent_its_request(session, caplog):
    line = Line(session)
    line.body = b""
    line.gone.set()
    line.gone.is_set = lambda: False
    await line.ask()
    assert line.sent[0]["status"] == 499
    assert (caplog.records, logged(session)) == ([], [])
    assert (await session.shown())["in_flight"] == 0


async def test_a_session_ends_once_its_amendments_are_written(session):
    """Otherwise a turn would train whose answer nobody received."""
    with full_disk(session.gateway.log, "amend"):
        await Line(session, lost_after=1).ask()
        assert logged(session) == [DELIVERED]
        error = (await session.end(status=500, reward=1.0))["error"]
        assert "an amendment could not be written" in error["message"]
        shown = await session.shown()
        assert (shown["status"], shown["undelivered"]) == ("open", 1)
    await session.end()
    assert logged(session) == [LOST]


@pytest.mark.parametrize("how", ["finish", "drop"])
@pytest.mark.parametrize("what", ["amend", "write_session"])
async def test_an_answer_that_is_lost_at_the_end(session, monkeypatch, how, what):
    """Its request ends whatever cannot be written."""
    monkeypatch.setattr("trajkit_shim.sessions.sessions._GRACE_SECONDS", 0.01)
    call = await stuck(session)
    with full_disk(session.gateway.log, what):
        error = (await session.end(how, 500))["error"]
        assert "could not be written" in error["message"]
    await asyncio.gather(call, return_exceptions=True)
    await session.end(how)
    assert logged(session) == [LOST if how == "finish" else (False, "dropped")]
    assert [line["ended_by"] for line in session.gateway.sessions()] == [how]


async def test_no_amendment_that_could_not_be_written_is_forgotten(session):
    calls = [await stuck(session) for _ in range(2)]
    with full_disk(session.gateway.log, "amend"):
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    # they are written before the next turn
    await Line(session).ask()
    assert logged(session) == [LOST, LOST, DELIVERED]


# A request that comes again: joined, answered again, or sampled


async def joined(session):
    """Return when one request has joined the call of another."""
    async with asyncio.timeout(60):
        while (await session.shown())["replayed"] == 0:
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("count", "again"),
    [("2", True), ("9" * 5000, True)] + [(n, False) for n in ("0", "00", "-1", "")],
)
def test_a_count_of_retries_of_any_length(count, again):
    assert is_retry({"x-stainless-retry-count": count}) is again


@STREAM
async def test_a_declared_retry_gets_the_first_answer(start, stream):
    session = await (await start("a", "b")).open(max_turns=2)
    body = {"stream": stream, **BODIES["anthropic"]}
    first = await session.post(**body)
    assert (await session.post(headers=RETRY, **body)).text == first.text
    # at another endpoint it is another request
    await session.post(path="/v1/messages", headers=RETRY, **body)
    assert (await session.shown())["replayed"] == 1
    assert len(session.gateway.turns()) == 2


@pytest.mark.parametrize("replay", [False, True])
async def test_an_equal_request_is_sampled_or_taken_for_a_retry(start, replay):
    session = await (await start(*"abc")).open(replay=replay)
    answers = [(await session.post()).json() for _ in range(2)]
    assert (answers[0] == answers[1]) == replay
    assert (await session.ask("another"))["content"] == ("b" if replay else "c")
    assert len(session.gateway.turns()) == 3 - replay


async def test_a_retry_joins_the_latest_call_that_is_under_way(start):
    older, held = Held("b"), Held("a")
    session = await (await start(older, held)).open()
    other = await older.holds(session.ask())
    first = await held.holds(session.ask())
    second = asyncio.create_task(session.ask(headers=RETRY))
    await joined(session)
    # the first connection breaks, the call goes on
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert (await session.shown())["in_flight"] == 2
    older.release.set()
    held.release.set()
    assert [(await each)["content"] for each in (other, second)] == ["b", "a"]
    assert len(session.gateway.turns()) == 2
    assert (await session.shown())["in_flight"] == 0
    assert not held.cancelled.is_set()


async def test_a_retry_does_not_join_a_call_that_is_being_cancelled(start):
    cancelled, release = asyncio.Event(), asyncio.Event()

    async def slow_to_end():
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
            await release.wait()

    gateway = await start(slow_to_end, "b")
    session = await gateway.open()
    first = asyncio.create_task(session.ask())
    await until(lambda: gateway.engine.requests)
    first.cancel()
    await cancelled.wait()
    second = asyncio.create_task(session.ask(headers=RETRY))
    while len(gateway.engine.requests) == 1 and not (await session.shown())["replayed"]:
        await asyncio.sleep(0)
    release.set()
    assert (await second)["content"] == "b"
    assert len(gateway.turns()) == 1


@cases(
    "failed, status, turns",
    {
        "engine": (EngineError("no memory"), 502, 0),
        "cut short": (sampled("half", finish_reason="abort"), 503, 1),
    },
)
async def test_a_failure_is_no_answer_to_give_again(start, failed, status, turns):
    held = Held(failed)
    session = await (await start(held, "b")).open(replay=True)
    calls = [asyncio.create_task(session.post(status=status)) for _ in range(2)]
    await joined(session)
    held.release.set()
    await asyncio.gather(*calls)
    assert len(session.gateway.turns()) == turns
    assert (await session.ask())["content"] == "b"


async def test_a_call_is_recorded_once_however_that_fails(start, monkeypatch):
    """Otherwise each connection would write the turns again."""
    held, append = Held("a"), Mock(side_effect=OSError("the disk is full"))
    session = await (await start(held)).open(replay=True)
    with monkeypatch.context() as patch:
        patch.setattr(session.gateway.log, "append", append)
        calls = [asyncio.create_task(session.error(500)) for _ in range(2)]
        await joined(session)
        held.release.set()
        for error in await asyncio.gather(*calls):
            assert "the disk is full" in error["message"]
    append.assert_called_once()


async def test_the_last_replies_are_kept(start):
    texts = [str(k) for k in range(KEPT + 2)]
    session = await (await start(*texts)).open()
    for text in texts[:-1]:
        await session.ask(text)
    assert (await session.ask(texts[-2], headers=RETRY))["content"] == texts[-2]
    assert (await session.ask(texts[0], headers=RETRY))["content"] == texts[-1]


async def test_the_official_clients_say_that_they_retry(start):
    """Each loses the first answer on its way."""
    gateway = await start("a", "b", "c", place=OnSocket)

    async def lose(library):
        gateway.at_head = None
        raise library.ReadError("the line broke")

    own, other = [(await gateway.open()).key for _ in range(2)]
    first = gateway.client(own).with_options(max_retries=1).chat.completions
    second = gateway.anthropic(other).with_options(max_retries=1).messages
    gateway.at_head = partial(lose, http)
    reply = await first.create(model="x", messages=[USER])
    gateway.at_head = partial(lose, http_of(anthropic.DefaultAsyncHttpxClient))
    message = await second.create(model="x", messages=[USER], max_tokens=50)
    assert len(gateway.turns()) == 2
    assert reply.choices[0].message.content == "a"
    assert message.content[0].text == "b"
