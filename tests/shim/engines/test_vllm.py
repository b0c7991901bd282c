"""The vLLM client against what a real server answered; `test_vllm_real` asks one."""

import numpy as np
import pytest
from aiohttp import web

from tests.shim.engines.double import (
    PROMPT,
    RECORDED,
    Double,
    recorded,
    sample,
    with_id,
)
from trajkit_shim.engines.base import UpdatableEngine
from trajkit_shim.engines.checks import check_engine
from trajkit_shim.errors import EngineError

pytestmark = pytest.mark.anyio

AS_SAMPLED = {
    "n": 1,
    "logprobs": 0,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
}
UNSHAPED = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}


async def test_what_is_sent():
    double = Double("vllm", "basic", "basic")
    async with double.engine() as engine:
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
    (plain, heads), (shaped, _) = double.calls
    assert plain == {
        "request_id": "r1",
        "token_ids": PROMPT.tolist(),
        "sampling_params": {"max_tokens": 40, **UNSHAPED, **AS_SAMPLED},
        # else a server with a parser of reasoning ignores a grammar until its end
        "reasoning_ended": True,
    }
    assert shaped["sampling_params"] == {
        **UNSHAPED,
        "max_tokens": 40,
        "temperature": 0.5,
        "stop": ["\n"],
        "stop_token_ids": [2],
        "seed": 7,
        "structured_outputs": {"structural_tag": '{"type": "structural_tag"}'},
        "min_tokens": 1,
        **AS_SAMPLED,
    }
    assert (heads["x-session-id"], heads["x-request-id"]) == ("s1", "r1")


async def test_a_greedy_call_has_the_logprobs_of_its_only_token():
    """vLLM gives those from before a call became greedy."""
    double = Double("vllm", "basic")
    async with double.engine() as engine:
        await sample(engine, temperature=0.0, top_p=0.5)
    (sent, _), named = double.calls[0], ("temperature", "top_p", "top_k")
    assert [sent["sampling_params"][name] for name in named] == [1.0, 1.0, 1]


async def test_a_reply_while_the_weights_changed_and_one_that_was_aborted():
    async with Double("vllm", "spans", "aborted").engine() as engine:
        changed, aborted = await sample(engine), await sample(engine)
    first, second = changed.weight_versions
    assert (first.version, second.version) == ("step-1", "step-2")
    assert (first.start, first.stop) == (0, second.start)
    assert second.stop == len(changed.output_ids) == 40
    assert (aborted.finish_reason, aborted.complete) == ("abort", False)
    assert len(aborted.output_ids) == 3


async def test_logprobs_whose_ids_are_texts():
    """The form of ``return_tokens_as_token_ids``."""
    reply = with_id("vllm", recorded("vllm"), "r1")
    scored = reply["choices"][0]["logprobs"]
    scored["content"] = [
        {"token": f"token_id:{entry['token_id']}", "logprob": entry["logprob"]}
        for entry in scored["content"]
    ]
    double = Double("vllm", web.json_response(reply))
    async with double.engine() as engine:
        assert len((await sample(engine)).output_ids) == 6
    scored["content"][2]["token"] = "token_id:-1"
    async with Double("vllm", web.json_response(reply)).engine() as engine:
        with pytest.raises(EngineError, match="logprob 2 is of token '-1'"):
            await sample(engine)


@pytest.mark.parametrize("indices", [[], [1], [0, 0], [0, 1]])
async def test_another_number_of_choices(indices):
    reply = with_id("vllm", recorded("vllm"), "r1")
    (choice,) = reply["choices"]
    reply["choices"] = [{**choice, "index": index} for index in indices]
    async with Double("vllm", web.json_response(reply)).engine() as engine:
        with pytest.raises(EngineError, match="the one with index 0 was asked for"):
            await sample(engine)


@pytest.mark.parametrize(
    ("name", "status", "match"),
    [
        ("too_long", 400, "longer than the maximum model length of 32768"),
        ("bad_top_p", 400, r"top_p must be in \(0, 1\], got 0.0"),
        ("queue_full", 503, "vLLM server answered 503"),
        ("mask_refused", 502, "vLLM server answered 500"),
        ("no_key", 502, "401: Unauthorized"),
        ("no_route", 502, "for /inference/v1/generate: start it with --enable-scale"),
    ],
)
async def test_recorded_refusals(name, status, match):
    async with Double("vllm", name).engine() as engine:
        with pytest.raises(EngineError, match=match) as caught:
            await sample(engine)
    assert caught.value.status == status


def with_logprobs(value):
    """A reply of one id eight times, as the check at the start asks for it."""
    reply = with_id("vllm", recorded("vllm", "stop_id"), "r1")
    (choice,) = reply["choices"]
    choice["token_ids"] *= 8
    choice["logprobs"]["content"] *= 8
    choice["logprobs"]["content"][0]["logprob"] = value
    choice["weight_versions"][0]["end"] = 8
    reply["usage"] |= {"prompt_tokens": 1, "completion_tokens": 8, "total_tokens": 9}
    return reply


@pytest.mark.parametrize("logprob", [0.0, -1e-6])
async def test_a_server_with_logprobs_from_before_shaping_is_refused(logprob):
    """The only token that is allowed has a logprob of 0 after shaping."""
    double = Double("vllm", "prompt", with_logprobs(logprob))
    first = recorded("vllm", "prompt")
    first["usage"] |= {"prompt_tokens": 1, "total_tokens": 3}

    def reply(kept, body):
        return web.json_response(
            with_id("vllm", first if kept == "prompt" else kept, body["request_id"])
        )

    first["prompt_token_ids"] = [0]
    double._reply = reply
    async with double.engine() as engine:
        if logprob:
            with pytest.raises(ConnectionError, match="--logprobs-mode processed_logp"):
                await check_engine(engine)
        else:
            assert (await check_engine(engine)).model == "tiny"
    probe = double.calls[1][0]["sampling_params"]
    assert probe["allowed_token_ids"] == [0]


# Payloads


async def test_the_experts_that_tokens_were_routed_to():
    prompt = np.array(RECORDED["vllm"]["experts"]["request"]["token_ids"], np.int32)
    double = Double("vllm", "experts", "mask")
    async with double.engine(experts_per_token=2) as engine:
        sampled = await sample(engine, prompt)
        with pytest.raises(EngineError, match="gave no routed_experts: it needs"):
            await sample(engine, prompt)
    assert sampled.routed_experts.shape == (17, 2, 2)
    assert sampled.routed_experts.dtype == np.int16
    # as the recording has it in clear
    assert sampled.routed_experts[:2].tolist() == [[[5, 4], [2, 1]], [[6, 3], [2, 0]]]


async def test_sampling_masks():
    prompt = np.array(RECORDED["vllm"]["mask"]["request"]["token_ids"], np.int32)
    double = Double("vllm", "mask", "experts")
    async with double.engine(sampling_masks=True) as engine:
        sampled = await sample(engine, prompt, top_k=3)
        with pytest.raises(EngineError, match="gave no sampling mask"):
            await sample(engine, prompt, top_k=3)
        # the server fails without a message
        with pytest.raises(EngineError, match="only for calls with top_k") as caught:
            await sample(engine, prompt)
    assert caught.value.status == 400
    (choice,) = RECORDED["vllm"]["mask"]["reply"]["choices"]
    assert sampled.sampling_mask == choice["sampling_mask"]
    assert len(double.calls) == 2


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda mask: mask[:-1], "2 sampling masks for 3 output ids"),
        (lambda mask: [[1], *mask[1:]], r"sampling_mask\[0\], which lacks 3803"),
        (
            lambda mask: [[*mask[0], 4032], *mask[1:]],
            r"mask\[0\]\[3\] = 4032 is outside",
        ),
        (lambda mask: [[*mask[0], 1.0], *mask[1:]], "expected a list of"),
        (lambda mask: [None, *mask[1:]], "expected a list of"),
        (lambda mask: "abc", "expected a list of"),
    ],
)
async def test_sampling_masks_that_cannot_be(change, match):
    prompt = np.array(RECORDED["vllm"]["mask"]["request"]["token_ids"], np.int32)
    reply = with_id("vllm", recorded("vllm", "mask"), "r1")
    (choice,) = reply["choices"]
    choice["sampling_mask"] = change(choice["sampling_mask"])
    double = Double("vllm", web.json_response(reply))
    async with double.engine(sampling_masks=True) as engine:
        with pytest.raises(EngineError, match=match):
            await sample(engine, prompt, top_k=3)


# Weights


async def test_pausing_and_updating():
    names = ("pause", "resume", "collective_rpc", "reset_prefix_cache")
    paths = {name: {"status": "ok"} for name in names}
    renamed = RECORDED["vllm"]["update_weight_version"]["reply"]
    double = Double("vllm", **paths, update_weight_version=renamed)
    async with double.engine() as engine:
        assert isinstance(engine, UpdatableEngine)
        assert not hasattr(engine, "update_tensors")
        await engine.pause()
        await engine.update_weights("/new", "step-1")
        await engine.resume()
    load = {"method": "reload_weights", "kwargs": {"weights_path": "/new"}}
    assert double.asked == [
        ("/pause?mode=keep", {}),
        ("/collective_rpc", load),
        ("/reset_prefix_cache", {}),
        ("/update_weight_version", {"new_version": "step-1"}),
        ("/resume", {}),
    ]


async def test_a_server_without_its_developer_mode():
    async with Double("vllm").engine() as engine:
        with pytest.raises(EngineError, match="start it with VLLM_SERVER_DEV_MODE=1"):
            await engine.pause()


async def test_weights_that_cannot_be_loaded_get_no_name():
    failed = web.json_response({"error": {"message": "no such folder"}}, status=500)
    double = Double("vllm", collective_rpc=failed)
    async with double.engine() as engine:
        with pytest.raises(EngineError, match="no such folder"):
            await engine.update_weights("/bad", "step-2")
    assert double.counted() == {"/collective_rpc": 1}
