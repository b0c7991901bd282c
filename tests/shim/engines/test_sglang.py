"""The SGLang client against a double that replays a real server's replies."""

import asyncio
import base64
import json
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.shim.fakes import engine_request
from trajkit_shim.engines.base import (
    PromptImage,
    TensorEngine,
    UpdatableEngine,
    WeightSpan,
)
from trajkit_shim.engines.checks import check_consumed, check_sample
from trajkit_shim.engines.model_config import vocab_size
from trajkit_shim.engines.sglang import SGLangEngine, SGLangReply
from trajkit_shim.errors import EngineError

pytestmark = pytest.mark.anyio

RECORDED = json.loads(
    (Path(__file__).parents[1] / "sglang_replies.json").read_text("utf-8")
)["replies"]
PROMPT = np.array(RECORDED["basic"]["request"]["input_ids"], np.int32)


class Double:
    """Answers as the recorded server did; ``/generate`` with the replies given."""

    def __init__(self, *replies: Response | str) -> None:
        self.replies = list(replies)
        self.requests: list[dict[str, object]] = []
        self.headers: list[str | None] = []
        self.aborted: list[str] = []
        self.entered = asyncio.Event()
        self.hold = False
        self.model_info = deepcopy(RECORDED["model_info"]["reply"])
        self.models = RECORDED["models"]["reply"]
        self.server_info = None
        self.server_info_asked = 0

    async def generate(self, request: Request) -> Response:
        self.requests.append(await request.json())
        self.headers.append(request.headers.get("x-smg-routing-key"))
        self.entered.set()
        if self.hold:
            await asyncio.Event().wait()
        reply = self.replies.pop(0)
        if isinstance(reply, Response):
            return reply
        recorded = RECORDED[reply]
        return JSONResponse(recorded["reply"], recorded["status"])

    async def abort(self, request: Request) -> Response:
        self.aborted.append((await request.json())["rid"])
        return Response()

    async def show_model(self, _: Request) -> Response:
        return JSONResponse(self.model_info)

    async def show_models(self, _: Request) -> Response:
        return JSONResponse(self.models)

    async def show_server(self, _: Request) -> Response:
        self.server_info_asked += 1
        if self.server_info is None:
            return Response("Not Found", 404)
        return JSONResponse(self.server_info)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/generate", self.generate, methods=["POST"]),
                Route("/abort_request", self.abort, methods=["POST"]),
                Route("/model_info", self.show_model),
                Route("/server_info", self.show_server),
                Route("/v1/models", self.show_models),
            ]
        )


@asynccontextmanager
async def engine_of(double: Double, **options):
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app=double.app()))
    engine = SGLangEngine("http://sglang/", vocab_size=4032, client=client, **options)
    yield engine
    await engine.close()
    assert client.is_closed


class Router:
    """Answers as SGLang's router: calls are passed on, the other paths are unknown."""

    def __init__(self, *servers: str) -> None:
        self.asked: list[tuple[str, str]] = []
        self.workers = httpx.Response(
            200, json={"workers": [{"url": url} for url in servers]}
        )

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        host, path = request.url.host, request.url.path
        self.asked.append((host, path))
        if (host, path) == ("router", "/workers"):
            return self.workers
        if host == "router":
            replies = {"/generate": RECORDED["basic"]["reply"]}
        else:
            replies = {"/model_info": RECORDED["model_info"]["reply"]}
            replies["/v1/models"] = RECORDED["models"]["reply"]
            replies["/pause_generation"] = {}
        if path not in replies:
            return httpx.Response(404)
        return httpx.Response(200, json=replies[path])

    def engine(self) -> SGLangEngine:
        client = httpx.AsyncClient(transport=httpx.MockTransport(self))
        return SGLangEngine("http://router", vocab_size=4032, client=client)


async def test_calls_go_to_the_router_and_pauses_to_its_servers():
    router = Router("http://one", "http://two")
    engine = router.engine()
    await sample(engine)
    await engine.pause()
    await engine.close()
    known = [asked for asked in router.asked if asked[1] != "/workers"]
    assert known == [
        ("one", "/model_info"),
        ("one", "/server_info"),
        ("one", "/v1/models"),
        ("router", "/generate"),
        ("one", "/pause_generation"),
        ("two", "/pause_generation"),
    ]


async def test_a_router_without_servers():
    engine = Router().engine()
    with pytest.raises(EngineError, match="the SGLang router has no server") as caught:
        await sample(engine)
    await engine.close()
    assert caught.value.status == 503


async def test_a_server_with_several_data_parallel_ranks_is_paused_once():
    """A router started with ``--dp-aware`` lists each rank."""
    router = Router("http://one:30000@0", "http://one:30000@1", "http://two:30000")
    engine = router.engine()
    await engine.pause()
    await engine.close()
    paused = [("one", "/pause_generation"), ("two", "/pause_generation")]
    assert router.asked == [("router", "/workers"), *paused]


@pytest.mark.parametrize(
    ("workers", "status", "match"),
    [
        pytest.param({"workers": None}, 200, "/workers cannot be read", id="null"),
        pytest.param({"workers": ["a"]}, 200, "/workers cannot be read", id="texts"),
        pytest.param({"workers": [{"url": 1}]}, 200, "cannot be read", id="number"),
        pytest.param({}, 200, "/workers cannot be read", id="no servers"),
        pytest.param([], 200, "gave no object", id="a list"),
        pytest.param(
            {"workers": [{"url": "grpc://one:1"}]}, 200, "grpc://one:1 does", id="gRPC"
        ),
        pytest.param({}, 503, "answered 503", id="it fails"),
    ],
)
async def test_a_router_whose_servers_are_unknown(workers, status, match):
    """It is not taken for a server."""
    router = Router()
    router.workers = httpx.Response(status, json=workers)
    engine = router.engine()
    with pytest.raises(EngineError, match=match):
        await engine.pause()
    await engine.close()
    assert router.asked == [("router", "/workers")]


async def sample(engine, prompt=PROMPT, **sampling):
    request = engine_request(prompt, **{"max_new_tokens": 6, **sampling})
    return await engine.generate(request)


async def test_what_is_sent():
    double = Double("basic", "basic")
    async with engine_of(double) as engine:
        await sample(engine)
        await sample(
            engine,
            temperature=0.5,
            stop=("\n",),
            stop_token_ids=(2,),
            seed=7,
            structural_tag={"type": "structural_tag"},
            extra={"min_p": 0.0, "skip_special_tokens": True},
        )
    as_sampled = {
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    assert double.requests[0] == {
        "rid": "r1",
        "input_ids": PROMPT.tolist(),
        "sampling_params": {"max_new_tokens": 6, **as_sampled},
        "return_logprob": True,
    }
    assert double.requests[1]["sampling_params"] == {
        "max_new_tokens": 6,
        "temperature": 0.5,
        "stop": ["\n"],
        "stop_token_ids": [2],
        "sampling_seed": 7,
        "structural_tag": '{"type": "structural_tag"}',
        "min_p": 0.0,
        **as_sampled,
    }
    assert double.headers == ["s1", "s1"]
    assert double.aborted == []


async def test_what_is_read():
    double = Double("basic", "cached", "aborted")
    async with engine_of(double) as engine:
        info = await engine.info()
        first, cached, aborted = [await sample(engine) for _ in range(3)]
        for one in (first, cached, aborted):
            check_sample(one, info, 1000)
    assert (info.model, info.vocab_size, info.max_context_tokens) == (
        "tiny",
        4032,
        32768,
    )
    reply = RECORDED["basic"]["reply"]
    assert first.output_ids.dtype == np.int32
    assert first.output_ids.tolist() == reply["output_ids"]
    assert first.output_logprobs.dtype == np.float32
    assert first.output_logprobs.tolist() == [
        item[0] for item in reply["meta_info"]["output_token_logprobs"]
    ]
    assert first.finish_reason == "length"
    assert first.weight_versions == (WeightSpan("default", 0, 6),)
    assert (first.cached_tokens, cached.cached_tokens) == (0, 9)
    assert aborted.finish_reason == "abort"
    assert aborted.weight_versions == (
        WeightSpan("default", 0, 8),
        WeightSpan("v-retract", 8, 12),
    )


@pytest.mark.parametrize(
    ("sampling", "preferred", "cut"),
    [
        pytest.param({}, None, False, id="everything can be sampled"),
        pytest.param(
            {"temperature": 0.7, "top_p": 1.0, "top_k": -1}, None, False, id="off"
        ),
        pytest.param({"top_p": 0.9}, None, True, id="top_p"),
        pytest.param({"top_k": 50}, None, True, id="top_k"),
        pytest.param({"extra": {"min_p": 0.1}}, None, True, id="min_p"),
        pytest.param({"temperature": 0.0}, None, True, id="greedy"),
        pytest.param({}, {"top_p": 0.8}, True, id="the server's own top_p"),
        pytest.param({"top_p": 1.0}, {"top_p": 0.8}, False, id="overruled"),
    ],
)
async def test_logprobs_are_those_of_what_was_sampled_from(sampling, preferred, cut):
    double = Double("sampling_mask")
    double.model_info["preferred_sampling_params"] = preferred
    async with engine_of(double) as engine:
        result = await sample(engine, **sampling)
    meta = RECORDED["sampling_mask"]["reply"]["meta_info"]
    plain = [item[0] for item in meta["output_token_logprobs"]]
    wanted = meta["output_token_sampling_logprobs"] if cut else plain
    assert double.requests[0].get("return_sampling_mask", False) is cut
    assert result.output_logprobs.tolist() == np.float32(wanted).tolist()


@pytest.mark.parametrize(
    ("reply", "status", "match"),
    [
        pytest.param("too_long", 400, "maximum context length of 32768", id="too long"),
        pytest.param(Response("busy", 503), 503, "503: busy", id="busy"),
        pytest.param(Response("no", 401), 502, "401: no", id="not allowed"),
        pytest.param(JSONResponse({"error": "x"}, 500), 502, "500: ", id="failed"),
        pytest.param(Response("hello"), 502, "/generate", id="no JSON"),
        pytest.param(JSONResponse([]), 502, "gave no object", id="a list"),
        pytest.param(JSONResponse({}), 502, "output_ids|meta_info", id="nothing"),
    ],
)
async def test_what_the_server_refuses_or_fails(reply, status, match):
    async with engine_of(Double(reply)) as engine:
        with pytest.raises(EngineError, match=match) as caught:
            await sample(engine)
    assert caught.value.status == status


def changed(**meta):
    reply = deepcopy(RECORDED["basic"]["reply"])
    reply["meta_info"].update(meta)
    return reply


@pytest.mark.parametrize(
    ("reply", "match"),
    [
        pytest.param(
            changed(output_token_logprobs=[]), "of 0 tokens for 6", id="no logprobs"
        ),
        pytest.param(
            changed(output_token_logprobs=[[-1.0, 5, None]] * 6),
            "logprob 0 is of token 5, not ",
            id="logprobs of other ids",
        ),
        pytest.param(
            changed(output_token_logprobs=[[None, 5, None]] * 6),
            "cannot be read",
            id="null logprobs",
        ),
        pytest.param(changed(finish_reason=None), "cannot be read", id="no end"),
        pytest.param(changed(weight_versions=[{}]), "cannot be read", id="no version"),
    ],
)
async def test_replies_that_make_no_sense(reply, match):
    one = SGLangReply()
    one.add(reply)
    with pytest.raises(EngineError, match=match) as caught:
        one.sample(sampling_logprobs=False)
    assert caught.value.status == 502


async def test_cancelling_aborts_the_call_at_the_server():
    double = Double()
    double.hold = True
    async with engine_of(double) as engine:
        call = asyncio.create_task(sample(engine))
        await double.entered.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert double.aborted == ["r1"]


async def test_a_server_that_is_not_there():
    engine = SGLangEngine("http://127.0.0.1:9", vocab_size=10)
    with pytest.raises(EngineError, match="cannot be reached: ConnectError") as caught:
        await engine.info()
    # it may be back soon
    assert caught.value.status == 503
    assert caught.value.retry_after == 5
    await engine.close()


async def test_a_server_that_does_not_tell_its_context_length():
    double = Double()
    double.models = {"data": []}
    async with engine_of(double) as engine:
        with pytest.raises(EngineError, match="max_model_len"):
            await engine.info()


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"vocab_size": 4032}, id="a language model"),
        pytest.param({"text_config": {"vocab_size": 4032}}, id="several modalities"),
    ],
)
def test_model_vocab_size(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert vocab_size(tmp_path) == 4032


def test_a_model_without_a_vocab_size(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no vocab_size"):
        vocab_size(tmp_path)


def stream_of(name, ends, *, incremental=False):
    """A recorded reply as the events of a stream, which end behind these tokens.

    An event repeats what was told before or, with the server's
    ``--incremental-streaming-output``, does not (spec: engines-and-clients 1.4).
    """
    reply = RECORDED[name]["reply"]
    start, events = 0, []
    for end in [*ends, len(reply["output_ids"])]:
        meta = dict(reply["meta_info"], completion_tokens=end)
        last = end == len(reply["output_ids"])
        if not last:
            meta["finish_reason"] = None
            del meta["weight_versions"]
        for field in ("output_token_logprobs", "output_token_sampling_logprobs"):
            if field in meta:
                meta[field] = meta[field][start:end]
        events.append({"output_ids": reply["output_ids"][start:end], "meta_info": meta})
        start = end if incremental else 0
    return events


def as_response(events, end=b"data: [DONE]\n\n"):
    body = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in events)
    return Response(body + end, media_type="text/event-stream")


async def stream(engine, told, **sampling):
    return await sample(engine, on_tokens=told.append, **sampling)


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("name", ["basic", "sampling_mask", "aborted"])
async def test_a_stream_brings_what_a_reply_brings(name, incremental):
    sampling = {"top_p": 0.9} if name == "sampling_mask" else {}
    double = Double(
        name, as_response(stream_of(name, [1, 4, 4], incremental=incremental))
    )
    told = []
    async with engine_of(double) as engine:
        whole = await sample(engine, **sampling)
        streamed = await stream(engine, told, **sampling)
    assert streamed.output_ids.tolist() == whole.output_ids.tolist()
    assert streamed.output_logprobs.tolist() == whole.output_logprobs.tolist()
    for field in ("finish_reason", "weight_versions", "cached_tokens"):
        assert getattr(streamed, field) == getattr(whole, field)
    ids = whole.output_ids.tolist()
    assert told == [ids[:1], ids[1:4], [], ids[4:]]
    assert double.requests[1].pop("stream") is True
    assert double.requests[1]["sampling_params"].pop("stream_interval") == 8
    assert double.requests[0] == double.requests[1]


TAKEN_BACK = stream_of("basic", [2])
TAKEN_BACK[0] = {**TAKEN_BACK[0], "output_ids": [1, 2]}


@pytest.mark.parametrize(
    ("events", "end", "match"),
    [
        pytest.param(stream_of("basic", [2]), b"", "broke off", id="no end"),
        pytest.param([], b"data: [DONE]\n\n", "cannot be read", id="no events"),
        pytest.param(
            stream_of("basic", [2])[:1],
            b'data: {"error": {"message": "dead"}}\n\n',
            "dead",
            id="an error",
        ),
        pytest.param(
            stream_of("basic", [2])[:1],
            b"data: [DONE]\n\n",
            "cannot be read",
            id="no last one",
        ),
        pytest.param(
            stream_of("basic", [2, 4], incremental=True)[::2],
            b"data: [DONE]\n\n",
            "2 ids after 2, and 6 in all",
            id="a hole",
        ),
        pytest.param(
            TAKEN_BACK,
            b"data: [DONE]\n\n",
            "changed ids it already sent",
            id="other ids",
        ),
    ],
)
async def test_streams_that_fail(events, end, match):
    double = Double(as_response(events, end))
    async with engine_of(double) as engine:
        with pytest.raises(EngineError, match=match):
            await stream(engine, [])


@pytest.mark.parametrize(
    ("told", "most", "interval"),
    [
        pytest.param(
            {"incremental_streaming_output": True}, 32_768, 8, id="what is new"
        ),
        pytest.param({"incremental_streaming_output": False}, 32_768, 256, id="all"),
        pytest.param({"incremental_streaming_output": False}, 100, 8, id="all, short"),
        pytest.param(None, 32_768, 256, id="does not say"),
    ],
)
async def test_events_are_rarer_where_each_repeats_all_before_it(told, most, interval):
    double = Double(*[as_response(stream_of("basic", [2])) for _ in range(2)])
    double.server_info = told
    async with engine_of(double) as engine:
        for _ in range(2):
            await stream(engine, [], max_new_tokens=most)
    for request in double.requests:
        assert request["sampling_params"]["stream_interval"] == interval
    assert double.server_info_asked == 1


async def test_pausing_and_updating():
    double = Double()
    told = []

    async def answer(request: Request) -> Response:
        told.append((request.url.path, await request.json()))
        success = "bad" not in str(told[-1]) and len(told) != 10
        return JSONResponse({"success": success, "message": "no such directory"})

    app = Starlette(routes=[Route("/{path}", answer, methods=["POST"])])
    double.app = lambda: app
    async with engine_of(double) as engine:
        assert isinstance(engine, UpdatableEngine)
        await engine.pause()
        await engine.update_weights("/new", "step-1")
        with pytest.raises(EngineError, match="from_disk /bad: no such directory"):
            await engine.update_weights("/bad", "step-2")
        assert isinstance(engine, TensorEngine)
        await engine.update_tensors(["aGk="], "flattened_bucket", "step-3")
        with pytest.raises(EngineError, match="from_tensor : no such directory"):
            await engine.update_tensors(["bad"], None, "step-4")
        with pytest.raises(EngineError, match="begin_weight_update : no such"):
            await engine.update_tensors(["aGk="], None, "step-5")
        await engine.resume()
    update = {"model_path": "/new", "weight_version": "step-1", "flush_cache": True}
    assert told == [
        ("/pause_generation", {"mode": "retract"}),
        ("/update_weights_from_disk", update),
        (
            "/update_weights_from_disk",
            {**update, "model_path": "/bad", "weight_version": "step-2"},
        ),
        # the server takes tensors only between these two
        ("/begin_weight_update", {}),
        (
            "/update_weights_from_tensor",
            {
                "serialized_named_tensors": ["aGk="],
                "load_format": "flattened_bucket",
                "weight_version": "step-3",
                "flush_cache": True,
            },
        ),
        ("/end_weight_update", {}),
        ("/begin_weight_update", {}),
        (
            "/update_weights_from_tensor",
            {
                "serialized_named_tensors": ["bad"],
                "load_format": None,
                "weight_version": "step-4",
                "flush_cache": True,
            },
        ),
        ("/end_weight_update", {}),
        # this one failed
        ("/begin_weight_update", {}),
        ("/end_weight_update", {}),
        ("/continue_generation", {}),
    ]


@pytest.mark.parametrize("cancelled", ["begin", "update", "end"])
async def test_a_cancelled_update_from_memory_is_ended(cancelled):
    """A server that began and did not end would sample no more."""
    double = Double()
    told, reached, go_on = [], asyncio.Event(), asyncio.Event()

    async def answer(request: Request) -> Response:
        told.append(request.url.path.removeprefix("/").partition("_")[0])
        if told[-1] == cancelled:
            reached.set()
            if cancelled == "end":
                await go_on.wait()
                told.append("ended")
            else:
                await asyncio.Event().wait()
        return JSONResponse({"success": True})

    app = Starlette(routes=[Route("/{path}", answer, methods=["POST"])])
    double.app = lambda: app
    async with engine_of(double) as engine:
        update = asyncio.create_task(engine.update_tensors(["aGk="], None, "step-1"))
        await reached.wait()
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        go_on.set()
        async with asyncio.timeout(20):
            while not told[-1].startswith("end" if cancelled != "end" else "ended"):
                await asyncio.sleep(0)
    orders = ["begin", "end"] if cancelled == "begin" else ["begin", "update", "end"]
    assert told[: len(orders)] == orders


def with_experts(name, experts):
    """A recorded reply, and experts as a server with such a model packs them."""
    reply = deepcopy(RECORDED[name]["reply"])
    packed = base64.b64encode(np.array(experts, "<i4").tobytes()).decode()
    reply["meta_info"]["routed_experts"] = packed
    return JSONResponse(reply)


# of 10 prompt and 6 output tokens all but the last, in 2 layers, 3 experts each
EXPERTS = np.arange(15 * 2 * 3).reshape(15, 2, 3) % 128


async def test_the_experts_that_tokens_were_routed_to():
    double = Double(with_experts("basic", EXPERTS), "basic")
    async with engine_of(double, experts_per_token=3) as engine:
        told = await sample(engine)
        with pytest.raises(EngineError, match="gave no routed_experts"):
            await sample(engine)
    assert [r["return_routed_experts"] for r in double.requests] == [True, True]
    assert told.routed_experts.tolist() == EXPERTS.tolist()


@pytest.mark.parametrize(
    ("packed", "match"),
    [
        pytest.param(EXPERTS[:-1], "84 routed experts for 15 tokens", id="one short"),
        pytest.param(EXPERTS[:0], "0 routed experts", id="none"),
        pytest.param(EXPERTS - 1, r"\[-1, 88\]", id="no expert"),
        pytest.param(EXPERTS + 2**15, "expected numbers in", id="too large"),
    ],
)
async def test_experts_that_cannot_be(packed, match):
    double = Double(with_experts("basic", packed))
    async with engine_of(double, experts_per_token=3) as engine:
        with pytest.raises(EngineError, match=match):
            await sample(engine)


async def test_the_prompt_that_the_server_consumed():
    recorded = deepcopy(RECORDED["basic"]["reply"])
    told = {**recorded, "prompt_token_ids": PROMPT.tolist()}
    double = Double(JSONResponse(told), "basic")
    async with engine_of(double, check_prompts=True) as engine:
        checked = await sample(engine)
        plain = await sample(engine)
    assert [r["return_prompt_token_ids"] for r in double.requests] == [True, True]
    assert checked.prompt_ids.tolist() == PROMPT.tolist()
    assert plain.prompt_ids is None
    assert checked.prompt_tokens == plain.prompt_tokens == len(PROMPT)
    for one in (checked, plain):
        check_consumed(PROMPT, one)
        with pytest.raises(EngineError, match=r"consumed 10 prompt tokens .* given 9"):
            check_consumed(PROMPT[:-1], one)
    other = np.where(np.arange(len(PROMPT)) == 3, 7, PROMPT)
    check_consumed(other, plain)
    with pytest.raises(EngineError, match=r"consumed 80 as token 3 .* was given 7"):
        check_consumed(other, checked)


async def test_images_are_sent_with_one_id_each_and_the_prompt_is_returned():
    """The real server expands the ids, as `engines.test_sglang_images` tests."""
    images = [
        PromptImage(1, 4, "image/png", b"one"),
        PromptImage(5, 7, "image/jpeg", b"two"),
    ]
    recorded = deepcopy(RECORDED["basic"]["reply"])
    told = {**recorded, "prompt_token_ids": PROMPT.tolist()}
    double = Double(JSONResponse(told), "basic")
    async with engine_of(double) as engine:
        seen = await sample(engine, images=images)
        with pytest.raises(EngineError, match="did not return a prompt with images"):
            await sample(engine, images=images)
    assert seen.prompt_ids.tolist() == PROMPT.tolist()
    request = double.requests[0]
    assert request["input_ids"] == np.delete(PROMPT, [2, 3, 6]).tolist()
    assert request["return_prompt_token_ids"] is True
    assert request["image_data"] == [
        "data:image/png;base64,b25l",
        "data:image/jpeg;base64,dHdv",
    ]
