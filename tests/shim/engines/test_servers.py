"""The clients of SGLang and vLLM against what real servers answered, and their payloads.

`test_real` asks real ones.
"""

import asyncio
import base64
import io
import json
import socket
from dataclasses import replace

import aiohttp
import numpy as np
import pytest
from aiohttp import web

import trajkit as tk
from tests.shim.clients import USER
from tests.shim.engines.double import (
    ENGINES,
    PROMPT,
    RECORDED,
    VOCABULARY,
    Double,
    answered,
    changed,
    read,
    recorded,
    refused,
    sample,
    with_id,
)
from tests.shim.fakes import ScriptedEngine, cases, said, user
from trajkit_shim.engines.base import PromptImage, UpdatableEngine, WeightSpan
from trajkit_shim.engines.checks import check_engine
from trajkit_shim.engines.http import Connections, read_experts
from trajkit_shim.engines.model_config import config_number
from trajkit_shim.errors import EngineError

pytestmark = pytest.mark.anyio

SGLANG, VLLM = RECORDED["sglang"], RECORDED["vllm"]
TAG = '{"type": "structural_tag"}'
AS_SAMPLED = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
AS_VLLM = {"n": 1, "logprobs": 0, "include_stop_str_in_output": True, **AS_SAMPLED}
UNSHAPED = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
SHAPED = {"temperature": 0.5, "stop": ["\n"], "stop_token_ids": [2]}
# of each server: a plain request, the parameters of a shaped one, and a header
SENT = {
    "sglang": (
        {
            "rid": "r1",
            "input_ids": PROMPT.tolist(),
            "sampling_params": {
                "max_new_tokens": 40,
                "no_stop_trim": True,
                **AS_SAMPLED,
            },
            "return_logprob": True,
        },
        SHAPED | {"sampling_seed": 7, "structural_tag": TAG, "min_p": 0.0},
        ("x-smg-routing-key", "s1"),
    ),
    "vllm": (
        {
            "request_id": "r1",
            "token_ids": PROMPT.tolist(),
            "sampling_params": {"max_tokens": 40, **UNSHAPED, **AS_VLLM},
            # else a server with a parser of reasoning ignores a grammar until its end
            "reasoning_ended": True,
        },
        SHAPED | {"seed": 7, "structured_outputs": {"structural_tag": TAG}},
        ("x-session-id", "s1"),
    ),
}


@pytest.mark.parametrize("kind", ENGINES)
async def test_what_is_sent(kind):
    plain, shaped, (header, value) = SENT[kind]
    double = Double(kind, "basic", "basic")
    changes = {"temperature": 0.5, "stop": ("\n",), "stop_token_ids": (2,), "seed": 7}
    # what is as sampled is no choice
    extra = {"min_p": 0.0, "skip_special_tokens": True}
    async with double.engine() as engine:
        await sample(engine)
        tag = {"type": "structural_tag"}
        await sample(engine, structural_tag=tag, extra=extra, **changes)
    (first, heads), (second, _) = double.calls
    assert first == plain
    assert second["sampling_params"] == plain["sampling_params"] | shaped
    assert heads[header] == value


async def test_recorded_replies():
    async with Double("sglang", "cached", "aborted").engine() as engine:
        cached, aborted = await sample(engine), await sample(engine)
    assert cached.cached_tokens == 9
    assert (aborted.finish_reason, aborted.complete) == ("abort", False)
    versions = (WeightSpan("default", 0, 8), WeightSpan("v-retract", 8, 12))
    assert aborted.weight_versions == versions
    async with Double("vllm", "spans", "aborted").engine() as engine:
        updated, aborted = await sample(engine), await sample(engine)
    first, second = updated.weight_versions
    assert (first.version, second.version) == ("step-1", "step-2")
    assert (first.start, first.stop) == (0, second.start)
    assert second.stop == len(updated.output_ids) == 40
    assert (aborted.finish_reason, aborted.complete) == ("abort", False)
    assert len(aborted.output_ids) == 3


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
async def test_recorded_refusals_of_vllm(name, status, match):
    async with Double("vllm", name).engine() as engine:
        with pytest.raises(EngineError, match=match) as caught:
            await sample(engine)
    assert caught.value.status == status


# Logprobs


@cases(
    "sampling, preferred, cut",
    {
        "everything can be sampled": ({}, None, False),
        "off": ({"temperature": 0.7, "top_p": 1.0, "top_k": -1}, None, False),
        "top_p": ({"top_p": 0.9}, None, True),
        "top_k": ({"top_k": 50}, None, True),
        "min_p": ({"extra": {"min_p": 0.1}}, None, True),
        "greedy": ({"temperature": 0.0}, None, True),
        "the server's own top_p": ({}, {"top_p": 0.8}, True),
        "overruled": ({"top_p": 1.0}, {"top_p": 0.8}, False),
    },
)
async def test_sglang_s_logprobs_are_those_of_what_was_sampled_from(
    sampling, preferred, cut
):
    info = recorded("sglang", "model_info") | {"preferred_sampling_params": preferred}
    double = Double("sglang", "sampling_mask", model_info=info)
    async with double.engine(sampling_masks=True) as engine:
        result = await sample(engine, **sampling)
    meta = SGLANG["sampling_mask"]["reply"]["meta_info"]
    plain = [item[0] for item in meta["output_token_logprobs"]]
    wanted = meta["output_token_sampling_logprobs"] if cut else plain
    assert double.calls[0][0].get("return_sampling_mask", False) is cut
    # without a cut every id could have been drawn
    assert result.sampling_mask == (meta["output_token_sampling_mask"] if cut else None)
    assert result.output_logprobs.tolist() == np.float32(wanted).tolist()


async def test_logprobs_after_the_cut_that_are_missing():
    def lose(reply):
        reply["meta_info"]["output_token_sampling_logprobs"].pop()

    reply = changed("sglang", lose, "sampling_mask")
    await refused("sglang", reply, "5 of 6 logprobs after the cut", top_p=0.9)
    await refused("sglang", answered("sglang"), "cannot be read", top_p=0.9)


async def test_a_greedy_call_of_vllm_has_the_logprobs_of_its_only_token():
    """vLLM gives those from before a call became greedy."""
    double = Double("vllm", "basic")
    async with double.engine() as engine:
        await sample(engine, temperature=0.0, top_p=0.5)
    params = double.calls[0][0]["sampling_params"]
    assert [params[name] for name in ("temperature", "top_p", "top_k")] == [1.0, 1.0, 1]


async def test_logprobs_whose_ids_are_texts():
    """The form of ``return_tokens_as_token_ids``."""

    def spell(reply):
        scored = reply["choices"][0]["logprobs"]["content"]
        for entry in scored:
            entry["token"] = f"token_id:{entry.pop('token_id')}"
        return scored

    assert len((await read("vllm", changed("vllm", spell))).output_ids) == 6

    def break_one(reply):
        spell(reply)[2]["token"] = "token_id:-1"

    reply = changed("vllm", break_one)
    await refused("vllm", reply, "logprob 2 is of token '-1'")


@pytest.mark.parametrize("logprob", [0.0, -1e-6])
async def test_vllm_with_logprobs_from_before_shaping_is_refused(logprob):
    """The only token that is allowed has a logprob of 0 after shaping."""

    # one id eight times, as the check at the start asks for it
    def repeat(reply):
        (choice,) = reply["choices"]
        choice["token_ids"] *= 8
        choice["logprobs"]["content"] *= 8
        choice["logprobs"]["content"][0]["logprob"] = logprob
        choice["weight_versions"][0]["end"] = 8
        reply["usage"] |= {"prompt_tokens": 1, "completion_tokens": 8}
        reply["usage"]["total_tokens"] = 9

    first = recorded("vllm", "prompt") | {"prompt_token_ids": [0]}
    first["usage"] |= {"prompt_tokens": 1, "total_tokens": 3}
    double = Double("vllm", first, changed("vllm", repeat, "stop_id"))
    double._reply = lambda reply, body: web.json_response(
        with_id("vllm", reply, body["request_id"])
    )
    async with double.engine() as engine:
        if logprob:
            with pytest.raises(ConnectionError, match="--logprobs-mode processed_logp"):
                await check_engine(engine)
        else:
            assert (await check_engine(engine)).model == "tiny"
    probe = double.calls[1][0]["sampling_params"]
    assert probe["allowed_token_ids"] == [0]


# Connections


async def test_an_engine_that_falls_silent_is_given_up(monkeypatch):
    timeout = aiohttp.ClientTimeout(sock_read=0.2)
    monkeypatch.setattr("trajkit_shim.engines.http._TIMEOUT", timeout)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        engine = ENGINES["sglang"](url, vocab_size=VOCABULARY)
        with pytest.raises(EngineError, match="cannot be reached: SocketTimeoutError"):
            await engine.info()
        await engine.close()


async def test_connections_to_an_engine_notice_that_it_is_gone():
    """Its machine sends nothing then, and does not close them either."""
    connections = Connections()
    # the answer has begun, so that its connection is held
    begun = web.Response(headers={"Content-Length": "1"})
    async with Double("sglang", begun).listening() as url:
        async with connections.session().post(f"{url}/generate") as answer:
            own = answer.connection.transport.get_extra_info("socket")
            assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15
            answer.close()
        await connections.close()


# Several servers


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
    asked = ("/model_info", "/v1/models", "/pause_generation")
    assert one.counted() == dict.fromkeys(asked, 1)
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
    answer = web.json_response(workers, status=503 if workers == 503 else 200)
    router = Double("sglang", workers=answer)
    async with router.engine() as engine:
        with pytest.raises(EngineError, match=match):
            await engine.pause()
    assert router.counted() == {"/workers": 1}


async def test_a_session_stays_on_one_of_several_servers():
    """Which has its prefixes in the cache, whatever the ids of its calls."""
    one, two = (Double("sglang", *["basic"] * 30) for _ in range(2))
    async with one.listening() as first, two.listening() as second:
        engine, served = ENGINES["sglang"](first, second, vocab_size=VOCABULARY), {}
        for number in range(30):
            before, session = len(one.calls), str(number % 10)
            await sample(engine, session_id=session, request_id=f"r{number}")
            served.setdefault(session, set()).add(len(one.calls) > before)
        await engine.close()
    assert sorted({*map(tuple, served.values())}) == [(False,), (True,)]


# Weights

BEGIN, TENSOR, END = (
    *("begin_weight_update", "update_weights_from_tensor"),
    "end_weight_update",
)
DISK, PAUSE, RESUME = (
    *("update_weights_from_disk", "pause_generation"),
    "continue_generation",
)
ORDERS = (PAUSE, RESUME, DISK, BEGIN, TENSOR, END)


async def test_pausing_and_updating_sglang():
    async def answer(body):
        bad = "bad" in str(body) or len(orders()) == 10
        return {"success": not bad, "message": "no such directory"}

    double = Double("sglang", **dict.fromkeys(ORDERS, answer))

    def orders():
        asked = ((path[1:], body) for path, body in double.asked)
        return [order for order in asked if order[0] in ORDERS]

    def update(version, **fields):
        return {"weight_version": version, "flush_cache": True, **fields}

    def tensors(given, form, version):
        fields = {"serialized_named_tensors": [given], "load_format": form}
        return TENSOR, update(version, **fields)

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
    assert orders() == [
        (PAUSE, {"mode": "retract"}),
        (DISK, update("step-1", model_path="/new")),
        (DISK, update("step-2", model_path="/bad")),
        # the server takes tensors only between these two
        (BEGIN, {}),
        tensors("aGk=", "flattened_bucket", "step-3"),
        (END, {}),
        (BEGIN, {}),
        tensors("bad", None, "step-4"),
        (END, {}),
        # this one failed
        (BEGIN, {}),
        (END, {}),
        (RESUME, {}),
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


async def test_pausing_and_updating_vllm():
    names = ("pause", "resume", "collective_rpc", "reset_prefix_cache")
    paths = {name: {"status": "ok"} for name in names}
    renamed = VLLM["update_weight_version"]["reply"]
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


async def test_what_vllm_cannot_update():
    async with Double("vllm").engine() as engine:
        with pytest.raises(EngineError, match="start it with VLLM_SERVER_DEV_MODE=1"):
            await engine.pause()
    failed = web.json_response({"error": {"message": "no such folder"}}, status=500)
    double = Double("vllm", collective_rpc=failed)
    async with double.engine() as engine:
        with pytest.raises(EngineError, match="no such folder"):
            await engine.update_weights("/bad", "step-2")
    # weights that cannot be loaded get no name
    assert double.counted() == {"/collective_rpc": 1}


# Images and payloads


async def test_images_are_sent_with_one_id_each_and_the_prompt_is_returned():
    """The real server expands the ids, as `test_real` tests."""
    images = [
        PromptImage(1, 4, "image/png", b"one"),
        PromptImage(5, 7, "image/jpeg", b"two"),
    ]
    reply = answered("sglang") | {"prompt_token_ids": PROMPT.tolist()}
    double = Double("sglang", reply, "basic")
    async with double.engine() as engine:
        seen = await sample(engine, images=images)
        with pytest.raises(EngineError, match="no prompt_token_ids, which were asked"):
            await sample(engine, images=images)
    assert seen.prompt_ids.tolist() == PROMPT.tolist()
    request, _ = double.calls[0]
    assert request["input_ids"] == np.delete(PROMPT, [2, 3, 6]).tolist()
    assert request["return_prompt_token_ids"] is True
    urls = ["data:image/png;base64,b25l", "data:image/jpeg;base64,dHdv"]
    assert request["image_data"] == urls


def prompt_of(name):
    return np.array(VLLM[name]["request"]["token_ids"], np.int32)


# of 10 prompt and 6 output tokens all but the last, in 2 layers, 3 experts each
EXPERTS = np.arange(15 * 2 * 3).reshape(15, 2, 3) % 128


async def test_the_experts_that_tokens_were_routed_to():
    reply = answered("sglang")
    packed = base64.b64encode(EXPERTS.astype("<i4").tobytes()).decode()
    reply["meta_info"]["routed_experts"] = packed
    double = Double("sglang", reply, "basic")
    async with double.engine(experts_per_token=3) as engine:
        told = await sample(engine)
        with pytest.raises(EngineError, match="gave no routed_experts"):
            await sample(engine)
    assert [r["return_routed_experts"] for r, _ in double.calls] == [True, True]
    assert told.routed_experts.tolist() == EXPERTS.tolist()
    async with Double("vllm", "experts", "mask").engine(experts_per_token=2) as engine:
        told = await sample(engine, prompt_of("experts"))
        with pytest.raises(EngineError, match="gave no routed_experts: it needs"):
            await sample(engine, prompt_of("experts"))
    assert told.routed_experts.shape == (17, 2, 2)
    assert told.routed_experts.dtype == np.int16
    # as the recording has it in clear
    assert told.routed_experts[:2].tolist() == [[[5, 4], [2, 1]], [[6, 3], [2, 0]]]


async def test_sampling_masks_of_vllm():
    prompt, double = prompt_of("mask"), Double("vllm", "mask", "experts")
    async with double.engine(sampling_masks=True) as engine:
        told = await sample(engine, prompt, top_k=3)
        with pytest.raises(EngineError, match="gave no sampling mask"):
            await sample(engine, prompt, top_k=3)
        # the server fails without a message
        with pytest.raises(EngineError, match="only for calls with top_k") as caught:
            await sample(engine, prompt)
    assert caught.value.status == 400
    assert told.sampling_mask == VLLM["mask"]["reply"]["choices"][0]["sampling_mask"]
    assert len(double.calls) == 2


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda mask: mask[:-1], "2 sampling masks for 3 output ids"),
        (lambda mask: [[1], *mask[1:]], r"sampling_mask\[0\], which lacks 3803"),
        (lambda mask: [[*mask[0], 4032], *mask[1:]], r"\[0\]\[3\] = 4032 is outside"),
        (lambda mask: [[*mask[0], 1.0], *mask[1:]], "expected a list of"),
        (lambda mask: [None, *mask[1:]], "expected a list of"),
        (lambda mask: "abc", "expected a list of"),
    ],
)
async def test_sampling_masks_that_cannot_be(change, match):
    def mask(reply):
        (choice,) = reply["choices"]
        choice["sampling_mask"] = change(choice["sampling_mask"])

    reply, options = changed("vllm", mask, "mask"), {"sampling_masks": True}
    await refused("vllm", reply, match, prompt_of("mask"), engine=options, top_k=3)


def packed(server, experts):
    """Experts as a server packs them."""
    file = io.BytesIO()
    np.save(file, experts)
    flat = experts.astype("<i4").tobytes() if server == "SGLang" else file.getvalue()
    return base64.b64encode(flat).decode()


@pytest.mark.parametrize("server", ["SGLang", "vLLM"])
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda experts: experts, None),
        (lambda experts: experts[:-1], r"for 15 tokens with 3 a layer"),
        (lambda experts: experts[:, :0], "of shape"),
        (lambda experts: experts - 1, r"in \[-1, 88\]: expected integers"),
        (lambda experts: experts + 2**15, "expected integers in"),
    ],
)
def test_experts_as_servers_pack_them(server, change, match):
    text = packed(server, change(EXPERTS.astype(np.int32)))
    if match is None:
        found = read_experts(server, text, 16, 3)
        assert (found.dtype, found.tolist()) == (np.int16, EXPERTS.tolist())
    else:
        with pytest.raises(EngineError, match=match):
            read_experts(server, text, 16, 3)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (packed("vLLM", np.zeros((15, 6), np.uint8)), r"shape \(15, 6\)"),
        (packed("vLLM", np.zeros((15, 2, 3))), "experts are float64"),
        (packed("vLLM", np.array([[[{}]]], object)), "allow_pickle"),
        ("====", "[Pp]adding|data"),
        ("AAAA", "EOF|pickle|empty"),
        (7, "gave no routed_experts"),
    ],
)
def test_experts_that_cannot_be(text, match):
    with pytest.raises((EngineError, ValueError), match=match):
        read_experts("vLLM", text, 16, 3)


class RoutingEngine(ScriptedEngine):
    """Says which experts it routed tokens to: other ones for each call.

    The ids that could have been drawn are the drawn one and the next.
    """

    async def generate(self, request):
        sample = await super().generate(request)
        n_tokens = len(request.prompt_ids) + len(sample.output_ids)
        numbers = np.arange((n_tokens - 1) * 2 * 3) + 1000 * len(self.prompts)
        mask = [[token, token - 1] for token in sample.output_ids.tolist()]
        experts = numbers.reshape(-1, 2, 3).astype(np.int16)
        return replace(sample, routed_experts=experts, sampling_mask=mask)


@pytest.mark.parametrize("form", ["full", "delta"])
async def test_payloads_go_into_the_log_and_into_rows(start, form):
    payloads = {"routed_experts": True, "sampling_masks": True}
    gateway = await start(engine=RoutingEngine("a", "b"), form=form, **payloads)
    session = await gateway.open()
    await session.ask()
    await session.ask(USER, said("a"), user("v"))
    turns = gateway.table()
    tk.validate(turns)
    lengths = [len(prompt) + 2 for prompt in gateway.engine.prompts]
    logged = turns["routed_experts"].to_pylist()
    for call, n_tokens in enumerate(lengths):
        told = np.arange((n_tokens - 1) * 6).reshape(-1, 2, 3) + 1000 * (call + 1)
        assert logged[call] == [*told.tolist(), None]
    named = ["routed_experts", "sampling_mask"]
    (row,) = tk.linearize(turns, payloads=named, reward=1.0).to_pylist()
    # as the last call read them, but for what the first one sampled and read itself
    expected, sampled_first = logged[1], slice(lengths[0] - 2, lengths[0] - 1)
    expected[sampled_first] = logged[0][sampled_first]
    assert row["routed_experts"] == expected
    # per output token of a turn, and per trained token of the row
    for turn in turns.to_pylist():
        wanted = [[token, token - 1] for token in turn["output_ids"]]
        assert turn["sampling_mask"] == wanted
    assert row["sampling_mask"] == [
        [token, token - 1] if trained else None
        for token, trained in zip(row["input_ids"], row["loss_mask"], strict=True)
    ]


@pytest.mark.parametrize(
    ("config", "number"),
    [({"n": 8}, 8), ({"text_config": {"n": 4}}, 4), ({"n": None}, None), ({}, None)],
)
def test_numbers_of_a_model(tmp_path, config, number):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if number is None:
        with pytest.raises(ValueError, match="has no m or n"):
            config_number(tmp_path, "m", "n")
    else:
        assert config_number(tmp_path, "m", "n") == number
