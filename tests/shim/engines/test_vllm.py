"""The vLLM client against a double of the server's token-level API.

The shapes of requests, replies, events and errors are those of vLLM's ``GenerateRequest``,
``GenerateResponse`` and ``GenerateStreamResponse``; no server was run.
"""

import asyncio
import itertools
import json
from contextlib import asynccontextmanager

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.shim.fakes import engine_request
from trajkit_shim.engines.base import WeightSpan
from trajkit_shim.engines.checks import check_engine, check_sample
from trajkit_shim.engines.vllm import VLLMEngine, VLLMReply
from trajkit_shim.errors import EngineError

pytestmark = pytest.mark.anyio

PROMPT = np.array([1, 88, 86, 80], np.int32)
IDS = [1680, 2333, 859, 2]


def scored(ids, logprob=-1.5):
    return {
        "content": [
            {
                "token": f"token_id:{token}",
                "logprob": logprob,
                "bytes": None,
                "top_logprobs": [{"token": f"token_id:{token}", "logprob": logprob}],
            }
            for token in ids
        ]
    }


def reply(ids=IDS, logprob=-1.5, **changes):
    choice = {
        "index": 0,
        "logprobs": scored(ids, logprob),
        "finish_reason": "stop",
        "token_ids": ids,
        "routed_experts": None,
    }
    return {
        "request_id": "generate-tokens-r1",
        "choices": [choice | changes],
        "usage": {
            "prompt_tokens": len(PROMPT),
            "completion_tokens": len(ids),
            "total_tokens": len(PROMPT) + len(ids),
            "prompt_tokens_details": {"cached_tokens": 3},
        },
        "prompt_logprobs": None,
        "kv_transfer_params": None,
    }


def streamed(*pieces, last=b"data: [DONE]\n\n"):
    """The events of a stream that brings the ids in these pieces."""
    events = [
        {
            "request_id": "generate-tokens-r1",
            "choices": [
                {
                    "index": 0,
                    "logprobs": scored(ids),
                    "finish_reason": "stop" if k == len(pieces) - 1 else None,
                    "token_ids": ids,
                }
            ],
            "usage": None,
        }
        for k, ids in enumerate(pieces)
    ]
    events.append({"request_id": "r", "choices": [], "usage": reply()["usage"]})
    body = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in events)
    return Response(body + last, media_type="text/event-stream")


class Double:
    """Answers with the replies given, in order."""

    def __init__(self, *replies):
        self.replies = list(replies)
        self.requests = []
        self.headers = []
        self.aborted = []
        self.entered = asyncio.Event()
        self.hold = False
        self.models = {"data": [{"id": "tiny", "max_model_len": 32768}]}

    async def generate(self, request: Request) -> Response:
        self.requests.append(await request.json())
        self.headers.append(request.headers)
        self.entered.set()
        if self.hold:
            await asyncio.Event().wait()
        given_ = self.replies.pop(0)
        return given_ if isinstance(given_, Response) else JSONResponse(given_)

    async def abort(self, request: Request) -> Response:
        self.aborted += (await request.json())["request_ids"]
        return Response()

    async def show_models(self, _: Request) -> Response:
        return JSONResponse(self.models)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/inference/v1/generate", self.generate, methods=["POST"]),
                Route("/abort_requests", self.abort, methods=["POST"]),
                Route("/v1/models", self.show_models),
            ]
        )


@asynccontextmanager
async def engine_of(double, **options):
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app=double.app()))
    engine = VLLMEngine("http://vllm/", vocab_size=4032, client=client, **options)
    yield engine
    await engine.close()
    assert client.is_closed


async def sample(engine, prompt=PROMPT, told=None, **sampling):
    asked = {"max_new_tokens": 6, **sampling}
    on_tokens = None if told is None else told.append
    return await engine.generate(engine_request(prompt, on_tokens=on_tokens, **asked))


async def test_what_is_sent():
    double = Double(reply(), reply())
    async with engine_of(double) as engine:
        await sample(engine)
        await sample(
            engine,
            temperature=0.5,
            stop=("\n",),
            stop_token_ids=(2,),
            seed=7,
            structural_tag={"type": "structural_tag"},
            extra={"min_tokens": 1, "logprobs": 5},
        )
    as_sampled = {
        "n": 1,
        "logprobs": 0,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    unshaped = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    plain, shaped = double.requests
    assert plain == {
        "request_id": "r1",
        "token_ids": PROMPT.tolist(),
        "sampling_params": {"max_tokens": 6, **unshaped, **as_sampled},
    }
    assert shaped["sampling_params"] == {
        "max_tokens": 6,
        **unshaped,
        "temperature": 0.5,
        "stop": ["\n"],
        "stop_token_ids": [2],
        "seed": 7,
        "structured_outputs": {"structural_tag": '{"type": "structural_tag"}'},
        "min_tokens": 1,
        **as_sampled,
    }
    assert [headers["x-session-id"] for headers in double.headers] == ["s1"] * 2
    assert double.aborted == []


async def test_what_is_read():
    double = Double(reply(), {**reply(), "weight_version": "step-3", "usage": None})
    async with engine_of(double) as engine:
        info = await engine.info()
        first, second = await sample(engine), await sample(engine)
        check_sample(first, info, 1000)
        check_sample(second, info, 1000)
    assert (info.model, info.vocab_size, info.max_context_tokens) == (
        "tiny",
        4032,
        32768,
    )
    assert first.output_ids.dtype == np.int32
    assert first.output_ids.tolist() == IDS
    assert first.output_logprobs.dtype == np.float32
    assert first.output_logprobs.tolist() == [-1.5] * 4
    assert first.finish_reason == "stop"
    assert (first.cached_tokens, second.cached_tokens) == (3, None)
    assert (first.prompt_tokens, second.prompt_tokens) == (4, None)
    assert first.weight_versions == ()
    assert second.weight_versions == (WeightSpan("step-3", 0, 4),)


async def test_a_server_with_logprobs_from_before_shaping_is_refused():
    """The only token that can be sampled has a logprob of 0 after shaping."""
    double = Double(reply(IDS[:2]), reply(logprob=0.0))
    async with engine_of(double) as engine:
        assert (await check_engine(engine)).model == "tiny"
    probe = double.requests[1]["sampling_params"]
    assert (probe["top_k"], probe["temperature"]) == (1, 1.0)
    double = Double(reply(IDS[:2]), reply(logprob=-1e-6))
    async with engine_of(double) as engine:
        with pytest.raises(ConnectionError, match="--logprobs-mode processed_logprobs"):
            await check_engine(engine)


async def test_a_greedy_call_has_the_logprobs_of_its_only_token():
    """vLLM gives those from before a call became greedy."""
    double = Double(reply())
    async with engine_of(double) as engine:
        await sample(engine, temperature=0.0, top_p=0.5)
    (sent,) = double.requests
    named = ("temperature", "top_p", "top_k")
    assert [sent["sampling_params"][name] for name in named] == [1.0, 1.0, 1]


async def test_a_stream():
    double = Double(streamed(IDS[:1], IDS[1:3], IDS[3:]))
    told = []
    async with engine_of(double) as engine:
        result = await sample(engine, told=told)
    assert [ids for ids in told if ids] == [IDS[:1], IDS[1:3], IDS[3:]]
    assert result.output_ids.tolist() == IDS
    assert result.output_logprobs.tolist() == [-1.5] * 4
    assert (result.finish_reason, result.cached_tokens) == ("stop", 3)
    assert double.requests[0]["stream"] is True


@given(st.lists(st.lists(st.integers(0, 4031), max_size=4), min_size=1, max_size=6))
def test_the_events_of_a_stream_add_up_to_the_reply(pieces):
    gathered, whole = VLLMReply(), VLLMReply()
    lines = streamed(*pieces).body.decode().split("\n\n")
    events = [line.removeprefix("data: ") for line in lines if line]
    told = [gathered.add(json.loads(event)) for event in events[:-1]]
    assert [ids for ids in told if ids] == [ids for ids in pieces if ids]
    whole.add(reply([*itertools.chain(*pieces)]))
    result, expected = gathered.sample(), whole.sample()
    assert result.output_ids.tolist() == expected.output_ids.tolist()
    assert result.output_logprobs.tolist() == expected.output_logprobs.tolist()
    assert result.finish_reason == expected.finish_reason


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        pytest.param(streamed(IDS, last=b""), "broke off", id="no end"),
        pytest.param(
            streamed(IDS, last=b'data: {"error": {"message": "out of memory"}}\n\n'),
            "out of memory",
            id="an error",
        ),
        pytest.param(
            Response(b'data: {"choices": [{}]}\n\n'), "cannot be read", id="no ids"
        ),
        pytest.param(Response(b"data: {\n\n"), "/generate", id="no JSON"),
        pytest.param(JSONResponse({"error": {"message": "no"}}, 400), "no", id="400"),
    ],
)
async def test_streams_that_fail(answer, match):
    double = Double(answer)
    async with engine_of(double) as engine:
        with pytest.raises(EngineError, match=match):
            await sample(engine, told=[])
    assert double.aborted == ["generate-tokens-r1"]


@pytest.mark.parametrize(
    ("answer", "status", "match"),
    [
        pytest.param(
            JSONResponse({"error": {"message": "too long", "code": 400}}, 400),
            400,
            "400: too long",
            id="too long",
        ),
        pytest.param(Response("busy", 503), 503, "503: busy", id="busy"),
        pytest.param(Response("", 404), 502, "404", id="no such endpoint"),
        pytest.param(JSONResponse({"error": "x"}, 500), 502, "500: x", id="failed"),
        pytest.param(Response("hello"), 502, "/generate", id="no JSON"),
        pytest.param({}, 502, "choices", id="nothing"),
        pytest.param(reply(logprobs=None), 502, "cannot be read", id="no logprobs"),
        pytest.param(reply(logprobs=scored([5])), 502, "of 1 tokens for 4", id="one"),
        pytest.param(
            reply(logprobs=scored([5] * 4)), 502, "logprob 0 is of", id="of other ids"
        ),
        pytest.param(reply(index=1), 502, r"choices \[1\]", id="the second choice"),
        pytest.param(
            {**reply(), "choices": 2 * reply()["choices"]},
            502,
            r"choices \[0, 0\], but one was asked for",
            id="two choices",
        ),
    ],
)
async def test_what_the_server_refuses_or_fails(answer, status, match):
    async with engine_of(Double(answer)) as engine:
        with pytest.raises(EngineError, match=match) as caught:
            await sample(engine)
    assert caught.value.status == status


async def test_a_missing_logprob_is_no_logprob():
    """vLLM writes -9999 for one."""
    async with engine_of(Double(reply(logprob=-9999.0))) as engine:
        result = await sample(engine)
        with pytest.raises(EngineError, match="not a log-probability"):
            check_sample(result, await engine.info(), 1000)


async def test_cancelling_aborts_the_call_at_the_server():
    double = Double()
    double.hold = True
    async with engine_of(double) as engine:
        call = asyncio.create_task(sample(engine))
        await double.entered.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert double.aborted == ["generate-tokens-r1"]


async def test_a_server_that_does_not_tell_its_context_length():
    double = Double()
    double.models = {"data": []}
    async with engine_of(double) as engine:
        with pytest.raises(EngineError, match="max_model_len"):
            await engine.info()
