"""The SGLang client against what a real server answered; `test_sglang_real` asks one."""

import asyncio
import base64

import numpy as np
import pytest
from aiohttp import web

from tests.shim.engines import double as double_module
from tests.shim.engines.double import PROMPT, Double, recorded, sample, with_id
from trajkit_shim.engines.base import PromptImage, UpdatableEngine, WeightSpan
from trajkit_shim.errors import EngineError

pytestmark = pytest.mark.anyio

RECORDED = double_module.RECORDED["sglang"]
AS_SAMPLED = {
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "no_stop_trim": True,
}
ORDERS = (
    *("pause_generation", "continue_generation", "update_weights_from_disk"),
    *("begin_weight_update", "update_weights_from_tensor", "end_weight_update"),
)


async def test_what_is_sent():
    double = Double("sglang", "basic", "basic")
    async with double.engine() as engine:
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
    (plain, heads), (shaped, _) = double.calls
    assert plain == {
        "rid": "r1",
        "input_ids": PROMPT.tolist(),
        "sampling_params": {"max_new_tokens": 40, **AS_SAMPLED},
        "return_logprob": True,
    }
    assert shaped["sampling_params"] == {
        "max_new_tokens": 40,
        "temperature": 0.5,
        "stop": ["\n"],
        "stop_token_ids": [2],
        "sampling_seed": 7,
        "structural_tag": '{"type": "structural_tag"}',
        "min_p": 0.0,
        **AS_SAMPLED,
    }
    assert heads["x-smg-routing-key"] == "s1"


async def test_recorded_replies():
    async with Double("sglang", "cached", "aborted").engine() as engine:
        cached, aborted = await sample(engine), await sample(engine)
    assert cached.cached_tokens == 9
    assert (aborted.finish_reason, aborted.complete) == ("abort", False)
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
    info = recorded("sglang", "model_info") | {"preferred_sampling_params": preferred}
    double = Double("sglang", "sampling_mask", model_info=info)
    async with double.engine(sampling_masks=True) as engine:
        result = await sample(engine, **sampling)
    meta = RECORDED["sampling_mask"]["reply"]["meta_info"]
    plain = [item[0] for item in meta["output_token_logprobs"]]
    wanted = meta["output_token_sampling_logprobs"] if cut else plain
    assert double.calls[0][0].get("return_sampling_mask", False) is cut
    # without a cut every id could have been drawn
    assert result.sampling_mask == (meta["output_token_sampling_mask"] if cut else None)
    assert result.output_logprobs.tolist() == np.float32(wanted).tolist()


async def test_logprobs_after_the_cut_that_are_missing():
    reply = with_id("sglang", recorded("sglang", "sampling_mask"), "r1")
    reply["meta_info"]["output_token_sampling_logprobs"].pop()
    async with Double("sglang", web.json_response(reply)).engine() as engine:
        with pytest.raises(EngineError, match="5 of 6 logprobs after the cut"):
            await sample(engine, top_p=0.9)
    async with Double("sglang", "basic").engine() as engine:
        with pytest.raises(EngineError, match="cannot be read"):
            await sample(engine, top_p=0.9)


# A router


@pytest.mark.parametrize(
    "listed", [["{one}", "{two}"], ["{one}@0", "{one}@1", "{two}"]]
)
async def test_calls_go_to_the_router_and_pauses_to_its_servers(listed):
    """A router that was started with ``--dp-aware`` lists each rank of a server."""
    one, two = (Double("sglang", pause_generation={}) for _ in range(2))
    async with one.listening() as first, two.listening() as second:
        urls = [url.format(one=first, two=second) for url in listed]
        workers = {"workers": [{"url": url} for url in urls]}
        router = Double("sglang", "basic", workers=workers)
        async with router.engine() as engine:
            await sample(engine)
            await engine.pause()
    assert len(router.calls) == 1
    assert router.counted() == {"/workers": 2}
    assert one.counted() == dict.fromkeys(
        ("/model_info", "/v1/models", "/pause_generation"), 1
    )
    assert two.counted() == {"/pause_generation": 1}


@pytest.mark.parametrize(
    ("workers", "match"),
    [
        ({"workers": []}, "the SGLang router has no server"),
        ({"workers": None}, "/workers cannot be read"),
        ({"workers": ["a"]}, "/workers cannot be read"),
        ({"workers": [{"url": 1}]}, "/workers cannot be read"),
        ({}, "/workers cannot be read"),
        ([], "gave no object"),
        ({"workers": [{"url": "grpc://one:1"}]}, "grpc://one:1 does"),
        (503, "answered 503"),
    ],
)
async def test_a_router_whose_servers_are_unknown(workers, match):
    """It is not taken for a server."""
    if workers == 503:
        workers = web.Response(status=503)
    elif workers == []:
        workers = web.json_response([])
    router = Double("sglang", workers=workers)
    async with router.engine() as engine:
        with pytest.raises(EngineError, match=match):
            await engine.pause()
    assert router.counted() == {"/workers": 1}


# Weights


async def test_pausing_and_updating():
    async def answer(body):
        bad = "bad" in str(body) or len(orders()) == 10
        return {"success": not bad, "message": "no such directory"}

    double = Double("sglang", **dict.fromkeys(ORDERS, answer))

    def orders():
        return [asked for asked in double.asked if asked[0][1:] in ORDERS]

    async with double.engine() as engine:
        assert isinstance(engine, UpdatableEngine)
        await engine.pause()
        await engine.update_weights("/new", "step-1")
        with pytest.raises(EngineError, match="from_disk /bad: no such directory"):
            await engine.update_weights("/bad", "step-2")
        await engine.update_tensors(["aGk="], "flattened_bucket", "step-3")
        with pytest.raises(EngineError, match="from_tensor : no such directory"):
            await engine.update_tensors(["bad"], None, "step-4")
        with pytest.raises(EngineError, match="begin_weight_update : no such"):
            await engine.update_tensors(["aGk="], None, "step-5")
        await engine.resume()
    update = {"model_path": "/new", "weight_version": "step-1", "flush_cache": True}
    assert orders() == [
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
    told, reached, go_on = [], asyncio.Event(), asyncio.Event()

    def order(name):
        async def answer(_):
            told.append(name.partition("_")[0])
            if told[-1] == cancelled:
                reached.set()
                if cancelled == "end":
                    await go_on.wait()
                    told.append("ended")
                else:
                    await asyncio.Event().wait()
            return {"success": True}

        return answer

    double = Double("sglang", **{name: order(name) for name in ORDERS})
    async with double.engine() as engine:
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


# Payloads and images


def with_experts(name, experts):
    """A recorded reply, and experts as a server with such a model packs them."""
    reply = with_id("sglang", recorded("sglang", name), "r1")
    packed = base64.b64encode(np.array(experts, "<i4").tobytes()).decode()
    reply["meta_info"]["routed_experts"] = packed
    return web.json_response(reply)


# of 10 prompt and 6 output tokens all but the last, in 2 layers, 3 experts each
EXPERTS = np.arange(15 * 2 * 3).reshape(15, 2, 3) % 128


async def test_the_experts_that_tokens_were_routed_to():
    double = Double("sglang", with_experts("basic", EXPERTS), "basic")
    async with double.engine(experts_per_token=3) as engine:
        told = await sample(engine)
        with pytest.raises(EngineError, match="gave no routed_experts"):
            await sample(engine)
    assert [r["return_routed_experts"] for r, _ in double.calls] == [True, True]
    assert told.routed_experts.tolist() == EXPERTS.tolist()


async def test_images_are_sent_with_one_id_each_and_the_prompt_is_returned():
    """The real server expands the ids, as `engines.test_sglang_images` tests."""
    images = [
        PromptImage(1, 4, "image/png", b"one"),
        PromptImage(5, 7, "image/jpeg", b"two"),
    ]
    reply = with_id("sglang", recorded("sglang"), "r1")
    reply["prompt_token_ids"] = PROMPT.tolist()
    double = Double("sglang", web.json_response(reply), "basic")
    async with double.engine() as engine:
        seen = await sample(engine, images=images)
        with pytest.raises(EngineError, match="no prompt_token_ids, which were asked"):
            await sample(engine, images=images)
    assert seen.prompt_ids.tolist() == PROMPT.tolist()
    request, _ = double.calls[0]
    assert request["input_ids"] == np.delete(PROMPT, [2, 3, 6]).tolist()
    assert request["return_prompt_token_ids"] is True
    assert request["image_data"] == [
        "data:image/png;base64,b25l",
        "data:image/jpeg;base64,dHdv",
    ]


# The model's size


async def test_a_session_stays_on_one_of_several_servers():
    """Which has its prefixes in the cache, whatever the ids of its calls."""
    doubles = [Double("sglang", *["basic"] * 30) for _ in range(2)]
    async with doubles[0].listening() as one, doubles[1].listening() as other:
        engine = double_module.SGLangEngine(
            one, other, vocab_size=double_module.VOCABULARY
        )
        served = {}
        for number in range(30):
            before = len(doubles[0].calls)
            session = str(number % 10)
            await sample(engine, session_id=session, request_id=f"r{number}")
            served.setdefault(session, set()).add(len(doubles[0].calls) > before)
        await engine.close()
    assert sorted({*map(tuple, served.values())}) == [(False,), (True,)]
