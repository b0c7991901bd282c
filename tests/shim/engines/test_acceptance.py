"""What a reply must satisfy before it is a turn, the same for SGLang and vLLM."""

import asyncio
import json

import numpy as np
import pytest
from aiohttp import web

from tests.shim.engines.double import (
    ENGINES,
    PREFIX,
    PROMPT,
    Double,
    recorded,
    sample,
    with_id,
)
from trajkit_shim.engines.base import WeightSpan
from trajkit_shim.errors import EngineError

pytestmark = pytest.mark.anyio

KINDS = [*ENGINES]
# where each server has a field: the object in the reply, and the name in it
FIELDS = {
    "sglang": {
        "request_id": (lambda reply: reply["meta_info"], "id"),
        "output_ids": (lambda reply: reply, "output_ids"),
        "logprobs": (lambda reply: reply["meta_info"], "output_token_logprobs"),
        "finish_reason": (lambda reply: reply["meta_info"]["finish_reason"], "type"),
        "prompt_tokens": (lambda reply: reply["meta_info"], "prompt_tokens"),
        "completion_tokens": (lambda reply: reply["meta_info"], "completion_tokens"),
        "cached_tokens": (lambda reply: reply["meta_info"], "cached_tokens"),
        "weight_versions": (lambda reply: reply["meta_info"], "weight_versions"),
    },
    "vllm": {
        "request_id": (lambda reply: reply, "request_id"),
        "output_ids": (lambda reply: reply["choices"][0], "token_ids"),
        "logprobs": (lambda reply: reply["choices"][0]["logprobs"], "content"),
        "finish_reason": (lambda reply: reply["choices"][0], "finish_reason"),
        "prompt_tokens": (lambda reply: reply["usage"], "prompt_tokens"),
        "completion_tokens": (lambda reply: reply["usage"], "completion_tokens"),
        "cached_tokens": (
            lambda reply: reply["usage"]["prompt_tokens_details"],
            "cached_tokens",
        ),
        "weight_versions": (lambda reply: reply["choices"][0], "weight_versions"),
    },
}
MISSING = object()
NAN, INFINITY = float("nan"), float("inf")


def changed(kind, field, value):
    """The recorded reply with another value of a field; a function changes the old one."""
    reply = with_id(kind, recorded(kind), "r1")
    place, name = FIELDS[kind][field]
    found = place(reply)
    if value is MISSING:
        del found[name]
    else:
        found[name] = value(found[name]) if callable(value) else value
    return reply


def first_logprob(value):
    """Change the first token's logprob, in either server's form."""

    def change(scored):
        if isinstance(scored[0], list):
            return [[value, *scored[0][1:]], *scored[1:]]
        return [{**scored[0], "logprob": value}, *scored[1:]]

    return change


def first_label(value):
    def change(scored):
        if isinstance(scored[0], list):
            return [[scored[0][0], value, None], *scored[1:]]
        return [{**scored[0], "token_id": value}, *scored[1:]]

    return change


async def read(kind, reply, **sampling):
    """The sample of a reply, which the engine gets from a server."""
    async with Double(kind, web.json_response(reply)).engine() as engine:
        return await sample(engine, **sampling)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_read(kind):
    sampled = await read(kind, with_id(kind, recorded(kind), "r1"))
    reply = recorded(kind)
    assert sampled.output_ids.dtype == np.int32
    assert sampled.output_logprobs.dtype == np.float32
    place, name = FIELDS[kind]["output_ids"]
    assert sampled.output_ids.tolist() == place(reply)[name]
    place, name = FIELDS[kind]["logprobs"]
    scored = place(reply)[name]
    logprobs = [e[0] if kind == "sglang" else e["logprob"] for e in scored]
    assert sampled.output_logprobs.tolist() == np.float32(logprobs).tolist()
    assert sampled.finish_reason == "length"
    assert (sampled.complete, sampled.ended) == (True, False)
    assert (sampled.cached_tokens, sampled.prompt_tokens) == (0, len(PROMPT))
    (span,) = sampled.weight_versions
    assert (span.start, span.stop) == (0, 6)


REFUSED = [
    ("request_id", "another", "request id is 'another': the request's is 'r1'"),
    ("request_id", PREFIX + "r2", "request id is"),
    ("request_id", None, "request id is None"),
    ("request_id", MISSING, "request id|request_id"),
    ("output_ids", lambda ids: [float(i) for i in ids], "expected a list of integers"),
    ("output_ids", lambda ids: [str(i) for i in ids], "expected a list of integers"),
    ("output_ids", lambda ids: [True, *ids[1:]], "expected a list of integers"),
    ("output_ids", lambda ids: [None, *ids[1:]], "expected a list of integers"),
    ("output_ids", lambda ids: [2**31, *ids[1:]], "expected a list of integers"),
    ("output_ids", lambda ids: [2**70, *ids[1:]], "expected a list of integers"),
    ("output_ids", lambda ids: [NAN, *ids[1:]], "expected a list of integers"),
    ("output_ids", "abcdef", "expected a list of integers"),
    ("output_ids", None, "expected a list of integers|cannot be read"),
    ("output_ids", MISSING, "cannot be read"),
    ("output_ids", lambda ids: ids[:-1], "completion_tokens is 6: 5 were counted"),
    ("output_ids", lambda ids: [*ids, 7], "completion_tokens is 6: 7 were counted"),
    ("output_ids", lambda ids: [ids[1], ids[0], *ids[2:]], "logprob 0 is of token"),
    ("logprobs", lambda scored: scored[:-1], "5 logprobs for 6 output ids"),
    ("logprobs", [], "0 logprobs for 6 output ids"),
    ("logprobs", None, "cannot be read"),
    ("logprobs", first_logprob(None), "logits were not finite"),
    ("logprobs", first_logprob(NAN), "logits were not finite"),
    ("logprobs", first_logprob(-INFINITY), "logits were not finite"),
    ("logprobs", first_logprob("-1.5"), "'-1.5': expected a number"),
    ("logprobs", first_logprob(True), "True: expected a number"),
    ("logprobs", first_logprob(10**400), "cannot be read"),
    ("logprobs", first_logprob(0.5), "is not a log-probability"),
    ("logprobs", first_logprob(-9999.0), "missing or not finite"),
    ("logprobs", first_label(5), "logprob 0 is of token 5, not"),
    ("logprobs", first_label("5"), "logprob 0 is of token '5', not"),
    ("logprobs", first_label(None), "logprob 0 is of token None, not"),
    ("finish_reason", 5, "finish_reason is 5"),
    ("finish_reason", "", "finish_reason is ''"),
    ("finish_reason", {"type": "stop"}, "finish_reason is"),
    ("finish_reason", True, "finish_reason is True"),
    ("prompt_tokens", MISSING, "prompt_tokens is None: 10 were counted"),
    ("prompt_tokens", None, "prompt_tokens is None: 10 were counted"),
    ("prompt_tokens", 9, "prompt_tokens is 9: 10 were counted"),
    ("prompt_tokens", "10", "prompt_tokens is '10'"),
    ("prompt_tokens", 10.0, "prompt_tokens is 10.0"),
    ("completion_tokens", MISSING, "completion_tokens is None: 6 were counted"),
    ("completion_tokens", -6, "completion_tokens is -6"),
    ("completion_tokens", NAN, "completion_tokens is nan"),
    ("weight_versions", [{}], "cannot be read"),
    ("weight_versions", ["v"], "cannot be read"),
    ("weight_versions", [{"version": 3, "start": 0, "end": 6}], "weight version is 3"),
    ("weight_versions", [{"version": "a", "start": 0, "end": 5}], "cover 0:5 of 6"),
    ("weight_versions", [{"version": "a", "start": 1, "end": 6}], "cover 1:6 of 6"),
    ("weight_versions", [{"version": "a", "start": False, "end": 6}], "integers"),
    ("weight_versions", [{"version": "a", "start": 0, "end": 6.0}], "integers"),
    (
        "weight_versions",
        [
            {"version": "a", "start": 0, "end": 4},
            {"version": "b", "start": 3, "end": 6},
        ],
        "cover 0:4, 3:6 of 6",
    ),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("field", "value", "match"),
    REFUSED,
    ids=[f"{number} {field}" for number, (field, *_) in enumerate(REFUSED)],
)
async def test_what_is_refused(kind, field, value, match):
    with pytest.raises(EngineError, match=match) as caught:
        await read(kind, changed(kind, field, value))
    assert caught.value.status == 502


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("request_id", ["r1", PREFIX + "r1"])
async def test_the_form_of_a_request_id(kind, request_id):
    reply = changed(kind, "request_id", request_id)
    if kind == "sglang" and request_id != "r1":
        with pytest.raises(EngineError, match="request id"):
            await read(kind, reply)
    else:
        assert (await read(kind, reply)).complete


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("reason", "complete", "ended"),
    [
        ("stop", True, True),
        ("tool_calls", True, True),
        ("length", True, False),
        *((word, False, False) for word in ("abort", "ABORT", "error", "STOP")),
        *((word, False, False) for word in ("repetition", "content_filter", None)),
    ],
)
async def test_only_known_finish_reasons_are_of_complete_replies(
    kind, reason, complete, ended
):
    sampled = await read(kind, changed(kind, "finish_reason", reason))
    assert sampled.finish_reason == reason
    assert (sampled.complete, sampled.ended) == (complete, ended)


async def test_an_sglang_reply_without_any_finish_reason():
    reply = with_id("sglang", recorded("sglang"), "r1")
    reply["meta_info"]["finish_reason"] = None
    assert (await read("sglang", reply)).finish_reason is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("count", "known"),
    [(0, 0), (10, 10), *((bad, None) for bad in (-5, 11, True, 2.0, "3", None, []))],
)
async def test_an_impossible_count_of_cached_tokens_is_unknown(kind, count, known):
    sampled = await read(kind, changed(kind, "cached_tokens", count))
    assert sampled.cached_tokens == known


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("versions", "known"),
    [
        (
            [
                {"version": "a", "start": 0, "end": 2},
                {"version": "b", "start": 2, "end": 6},
            ],
            (WeightSpan("a", 0, 2), WeightSpan("b", 2, 6)),
        ),
        ([{"version": None, "start": 0, "end": 6}], ()),
        (
            [
                {"version": "a", "start": 0, "end": 2},
                {"version": None, "start": 2, "end": 6},
            ],
            (),
        ),
        (None, ()),
        (MISSING, ()),
    ],
)
async def test_weight_versions_are_known_for_all_ids_or_unknown(kind, versions, known):
    sampled = await read(kind, changed(kind, "weight_versions", versions))
    assert sampled.weight_versions == known


@pytest.mark.parametrize("kind", KINDS)
async def test_no_id_follows_one_that_ends_the_reply(kind):
    reply = with_id(kind, recorded(kind), "r1")
    place, name = FIELDS[kind]["output_ids"]
    third, last = place(reply)[name][2], place(reply)[name][-1]
    with pytest.raises(EngineError, match=f"3 ids after {third}, which ends a reply"):
        await read(kind, reply, stop_token_ids=(third,))
    assert (await read(kind, reply, stop_token_ids=(last,))).complete
    # the session asked for it
    free = {"ignore_eos": True}
    assert (await read(kind, reply, stop_token_ids=(third,), extra=free)).complete


@pytest.mark.parametrize("kind", KINDS)
async def test_more_ids_than_were_asked_for(kind):
    with pytest.raises(EngineError, match="6 output ids, but 5 were asked for"):
        await read(kind, with_id(kind, recorded(kind), "r1"), max_new_tokens=5)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_id_outside_the_vocabulary(kind):
    double = Double(kind, "basic")
    async with double.listening() as url:
        engine = ENGINES[kind](url, vocab_size=1000)
        with pytest.raises(EngineError, match=r"outside the vocabulary .* \[0, 1000\)"):
            await sample(engine)
        await engine.close()


async def test_a_total_that_is_not_the_sum():
    reply = with_id("vllm", recorded("vllm"), "r1")
    reply["usage"]["total_tokens"] = 15
    with pytest.raises(EngineError, match="total_tokens is 15: 16 were counted"):
        await read("vllm", reply)


# What HTTP brings


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("answer", "status", "match"),
    [
        ("too_long", 400, "server answered 400: "),
        (web.Response(text="busy", status=503), 503, "503: busy"),
        (web.Response(text="slow down", status=429), 503, "429: slow down"),
        (web.Response(text="no", status=401), 502, "401: no"),
        (web.Response(status=404), 502, "404"),
        (web.Response(status=307, headers={"location": "/v1/models"}), 502, "307"),
        (web.json_response({"error": "x"}, status=500), 502, "500: x"),
        (web.Response(text="hello"), 502, "generate of the .* server: Expecting"),
        (web.Response(body=b"\xff\xfe"), 502, "generate of the .* server: "),
        (web.json_response([]), 502, "gave no object"),
        (web.json_response({}), 502, "cannot be read"),
    ],
)
async def test_what_the_server_refuses_or_fails(kind, answer, status, match):
    if isinstance(answer, web.Response):
        # a response can be sent once
        head = {k: v for k, v in answer.headers.items() if k == "Location"}
        answer = web.Response(body=answer.body, status=answer.status, headers=head)
    async with Double(kind, answer).engine() as engine:
        with pytest.raises(EngineError, match=match) as caught:
            await sample(engine)
    assert caught.value.status == status


def events(*values):
    body = b"".join(b"data: " + value + b"\n\n" for value in values)
    return web.Response(body=body, content_type="text/event-stream")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_proxy_that_streams_the_reply_in_one_event(kind):
    """Lines end at line feeds only: U+2028 is a character of a text."""
    reply = {**with_id(kind, recorded(kind), "r1"), "text": "a\u2028b\u0085c"}
    text = json.dumps(reply, ensure_ascii=False).encode()
    async with Double(kind, events(text, b"[DONE]")).engine() as engine:
        assert (await sample(engine)).complete


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_events", [0, 2])
async def test_a_reply_in_parts_is_refused(kind, n_events):
    """Nobody asked for a stream, and a part may be lost."""
    text = json.dumps(with_id(kind, recorded(kind), "r1")).encode()
    answer = events(*[text] * n_events, b"[DONE]")
    async with Double(kind, answer).engine() as engine:
        with pytest.raises(EngineError, match="but one reply was asked for"):
            await sample(engine)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_that_leaves_aborts_the_call_at_the_server(kind):
    double = Double(kind, abort_request={}, **{"inference/v1/abort_requests": {}})
    double.go_on.clear()
    async with double.engine() as engine:
        call = asyncio.create_task(sample(engine))
        await double.entered.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        # its connection is closed, and a server behind a proxy is asked
        await double.left.wait()
    aborts = {
        "sglang": ("/abort_request", {"rid": "r1"}),
        "vllm": ("/inference/v1/abort_requests", {"request_ids": [PREFIX + "r1"]}),
    }
    assert double.asked[-1] == aborts[kind]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_refused_call_needs_no_abort(kind):
    double = Double(kind, "too_long")
    async with double.engine() as engine:
        with pytest.raises(EngineError):
            await sample(engine)
    assert not any("abort" in path for path, _ in double.asked)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_an_engine_serves_is_asked_once_by_all_first_calls(kind):
    double = Double(kind, *["basic"] * 24)
    async with double.engine() as engine:
        await asyncio.gather(*(sample(engine) for _ in range(24)))
        info = await engine.info()
    assert (info.model, info.max_context_tokens) == ("tiny", 32768)
    assert set(double.counted().values()) == {1}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_failed_question_is_asked_again_by_the_next_call(kind):
    double = Double(kind, "basic")
    models = double.paths["v1/models"]
    double.paths["v1/models"] = {"data": []}
    async with double.engine() as engine:
        first = await asyncio.gather(
            *(sample(engine) for _ in range(4)), return_exceptions=True
        )
        assert {*map(type, first)} == {EngineError}
        assert "max_model_len" in str(first[0])
        assert double.counted()["/v1/models"] == 1
        double.paths["v1/models"] = models
        # nor does a caller that leaves take the answer with it
        gone = asyncio.create_task(engine.info())
        await asyncio.sleep(0)
        gone.cancel()
        assert (await sample(engine)).complete
    assert double.counted()["/v1/models"] == 2


@pytest.mark.parametrize("kind", KINDS)
async def test_the_prompt_that_the_server_consumed(kind):
    def consumed(ids):
        reply = with_id(kind, recorded(kind), "r1")
        reply["prompt_token_ids"] = ids
        return reply

    other = PROMPT.tolist()
    other[3] = 7
    replies = [PROMPT.tolist(), other, other[:-1], [str(i) for i in other], None]
    double = Double(kind, *map(consumed, replies))
    async with double.engine(check_prompts=True) as engine:
        assert (await sample(engine)).prompt_ids.tolist() == PROMPT.tolist()
        for match in (
            "consumed 7 as token 3 but was given 80",
            "consumed 9 prompt tokens but was given 10",
            "prompt ids is .* expected a list of integers",
            "no prompt_token_ids, which were asked for",
        ):
            with pytest.raises(EngineError, match=match):
                await sample(engine)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_is_not_there(kind):
    engine = ENGINES[kind]("http://127.0.0.1:9", vocab_size=10)
    with pytest.raises(EngineError, match="cannot be reached: ") as caught:
        await engine.info()
    # it may be back soon
    assert (caught.value.status, caught.value.retry_after) == (503, 5)
    await engine.close()
