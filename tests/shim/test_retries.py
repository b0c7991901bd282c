"""A request that comes again: joined, answered again, or sampled and labelled."""

import asyncio

import anthropic
import openai
import pytest

from tests.shim.clients import http_of, in_process
from tests.shim.fakes import RENDERER, Held, ScriptedEngine, sampled
from trajkit_shim.delivery import KEPT
from trajkit_shim.errors import EngineError

pytestmark = pytest.mark.anyio

RETRY = {"x-stainless-retry-count": "1"}


def body(text="hi", **fields):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 50, **fields}


class Gateway:
    """One session of a gateway, asked by hand."""

    def __init__(self, gateway, session):
        self.gateway, self.session = gateway, session

    async def ask(self, given=None, path="/v1/chat/completions", **headers):
        return await self.gateway.http.post(
            path,
            headers={"x-session-key": self.session, **headers},
            json=given or body(),
        )

    async def shown(self):
        return (await self.gateway.http.get(self.gateway.path_of(self.session))).json()


async def joined(session):
    """Return when one request has joined the call of another."""
    async with asyncio.timeout(30):
        while (await session.shown())["replayed"] == 0:
            await asyncio.sleep(0)


async def opened(gateway, **fields):
    return Gateway(gateway, await gateway.open_key(**fields))


@pytest.mark.parametrize(
    "stream", [pytest.param(False, id="whole"), pytest.param(True, id="stream")]
)
async def test_a_declared_retry_gets_the_first_answer(tmp_path, stream):
    async with in_process(ScriptedEngine("a", "b"), RENDERER, tmp_path) as gateway:
        session = await opened(gateway, max_turns=1)
        first = await session.ask(body(stream=stream))
        again = await session.ask(body(stream=stream), **RETRY)
        assert again.text == first.text
        assert (await session.shown())["replayed"] == 1
        (turn,) = gateway.turns()
    assert turn["resend_of"] is None


async def test_an_equal_request_is_sampled_and_names_the_first(tmp_path):
    async with in_process(ScriptedEngine(*"abcd"), RENDERER, tmp_path) as gateway:
        session, other = await opened(gateway), await opened(gateway)
        for _ in range(3):
            await session.ask()
        await other.ask()
        one, two, three, apart = gateway.turns()
    assert one["resend_of"] is None
    assert two["resend_of"] == three["resend_of"] == one["request_id"]
    assert apart["resend_of"] is None


async def test_an_equal_body_for_another_endpoint_is_another_request(tmp_path):
    async with in_process(ScriptedEngine("a", "b"), RENDERER, tmp_path) as gateway:
        session = await opened(gateway)
        await session.ask()
        answer = await session.ask(path="/v1/messages", **RETRY)
        assert answer.json()["content"] == [{"type": "text", "text": "b"}]
        turns = gateway.turns()
    assert [turn["resend_of"] for turn in turns] == [None, None]


async def test_a_session_may_take_every_equal_request_for_a_retry(tmp_path):
    async with in_process(ScriptedEngine(*"ab"), RENDERER, tmp_path) as gateway:
        session = await opened(gateway, replay=True)
        first, again = await session.ask(), await session.ask()
        another = await session.ask(body("another"))
        assert len(gateway.turns()) == 2
    assert first.text == again.text
    assert another.json()["choices"][0]["message"]["content"] == "b"


async def test_a_retry_joins_the_call_that_is_under_way(tmp_path):
    held = Held("a")
    async with in_process(ScriptedEngine(held), RENDERER, tmp_path) as gateway:
        session = await opened(gateway, replay=True)
        first = asyncio.create_task(session.ask())
        await held.entered.wait()
        second = asyncio.create_task(session.ask())
        await joined(session)
        # the first connection breaks, the call goes on
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert (await session.shown())["in_flight"] == 1
        held.release.set()
        assert (await second).json()["choices"][0]["message"]["content"] == "a"
        assert len(gateway.turns()) == 1
        assert (await session.shown())["in_flight"] == 0
    assert not held.cancelled


async def test_a_retry_does_not_join_a_call_that_is_being_cancelled(tmp_path):
    cancelled, release = asyncio.Event(), asyncio.Event()

    async def slow_to_end():
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
            await release.wait()

    engine = ScriptedEngine(slow_to_end, "b")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        session = await opened(gateway)
        first = asyncio.create_task(session.ask())
        while not engine.prompts:
            await asyncio.sleep(0)
        first.cancel()
        await cancelled.wait()
        second = asyncio.create_task(session.ask(**RETRY))
        while len(engine.prompts) == 1 and not (await session.shown())["replayed"]:
            await asyncio.sleep(0)
        release.set()
        assert (await second).json()["choices"][0]["message"]["content"] == "b"
        assert len(gateway.turns()) == 1


async def test_a_retry_joins_the_latest_of_several_calls(tmp_path):
    held = [Held(str(k)) for k in range(8)]
    async with in_process(ScriptedEngine(*held), RENDERER, tmp_path) as gateway:
        session = await opened(gateway)
        calls = []
        for each in held:
            calls.append(asyncio.create_task(session.ask()))
            await each.entered.wait()
        retry = asyncio.create_task(session.ask(**RETRY))
        await joined(session)
        for each in held:
            each.release.set()
        await asyncio.gather(*calls)
        assert (await retry).json()["choices"][0]["message"]["content"] == "7"


@pytest.mark.parametrize(
    ("failed", "turns"),
    [
        pytest.param(EngineError("no memory"), 0, id="engine"),
        pytest.param(sampled("half", finish_reason="abort"), 1, id="cut short"),
    ],
)
async def test_a_failure_is_no_answer_to_give_again(tmp_path, failed, turns):
    held = Held(failed)
    async with in_process(ScriptedEngine(held, "b"), RENDERER, tmp_path) as gateway:
        session = await opened(gateway, replay=True)
        calls = [asyncio.create_task(session.ask()) for _ in range(2)]
        await joined(session)
        held.release.set()
        assert [reply.status_code >= 500 for reply in await asyncio.gather(*calls)] == [
            True,
            True,
        ]
        assert len(gateway.turns()) == turns
        again = await session.ask()
    assert again.json()["choices"][0]["message"]["content"] == "b"


async def test_a_call_is_recorded_once_however_that_fails(tmp_path, monkeypatch):
    """Otherwise each connection would write the turns again."""
    held, recorded = Held("a"), []

    def append(*_):
        recorded.append(1)
        raise OSError("the disk is full")

    async with in_process(ScriptedEngine(held), RENDERER, tmp_path) as gateway:
        session = await opened(gateway, replay=True)
        monkeypatch.setattr(gateway.log, "append", append)
        calls = [asyncio.create_task(session.ask()) for _ in range(2)]
        await joined(session)
        held.release.set()
        replies = await asyncio.gather(*calls)
    assert ["the disk is full" in reply.text for reply in replies] == [True, True]
    assert recorded == [1]


async def test_the_last_replies_are_kept(tmp_path):
    texts = [str(k) for k in range(KEPT + 2)]
    async with in_process(ScriptedEngine(*texts), RENDERER, tmp_path) as gateway:
        session = await opened(gateway)
        for text in texts[:-1]:
            await session.ask(body(text))
        kept = await session.ask(body(texts[-2]), **RETRY)
        lost = await session.ask(body(texts[0]), **RETRY)
        turn = gateway.turns()[-1]
    assert kept.json()["choices"][0]["message"]["content"] == texts[-2]
    assert lost.json()["choices"][0]["message"]["content"] == texts[-1]
    # and its turn says so
    assert turn["resend_of"] is not None


def losing_first(gateway, client_class):
    """An HTTP client that loses the first answer on its way."""
    library = http_of(client_class)
    inner = library.ASGITransport(app=gateway.app, raise_app_exceptions=False)
    lost = []

    class Losing(library.AsyncBaseTransport):
        async def handle_async_request(self, request):
            response = await inner.handle_async_request(request)
            if not lost:
                lost.append(await response.aread())
                raise library.ReadError("the line broke")
            return response

    return library.AsyncClient(transport=Losing(), base_url="http://gateway")


async def test_the_official_clients_say_that_they_retry(tmp_path):
    engine = ScriptedEngine("a", "b", "c")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        one = openai.AsyncOpenAI(
            api_key=await gateway.open_key(),
            base_url="http://gateway/v1",
            http_client=losing_first(gateway, openai.DefaultAsyncHttpxClient),
            max_retries=1,
        )
        reply = await one.chat.completions.create(model="x", **body())
        two = anthropic.AsyncAnthropic(
            api_key=await gateway.open_key(),
            base_url="http://gateway",
            http_client=losing_first(gateway, anthropic.DefaultAsyncHttpxClient),
            max_retries=1,
        )
        message = await two.messages.create(model="x", **body())
        assert len(gateway.turns()) == 2
        await one.close()
        await two.close()
    assert reply.choices[0].message.content == "a"
    assert message.content[0].text == "b"
