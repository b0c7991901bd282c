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
    answered,
    changed,
    read,
    recorded,
    refused,
    sample,
)
from tests.shim.fakes import ScriptedEngine, cases, sampled
from trajkit_shim.engines.base import EngineInfo, WeightSpan
from trajkit_shim.engines.checks import check_engine, check_prompt
from trajkit_shim.errors import EngineError

pytestmark = pytest.mark.anyio

EACH = pytest.mark.parametrize("kind", ENGINES)
MISSING = object()
NAN, INFINITY = float("nan"), float("inf")


def path(*keys):
    """Where a server has a field: the object that holds it, and its name there."""
    *above, name = keys

    def find(reply):
        for key in above:
            reply = reply[key]
        return reply, name

    return find


FIELDS = {
    "sglang": {
        "request_id": path("meta_info", "id"),
        "output_ids": path("output_ids"),
        "logprobs": path("meta_info", "output_token_logprobs"),
        "finish_reason": path("meta_info", "finish_reason", "type"),
        "prompt_tokens": path("meta_info", "prompt_tokens"),
        "completion_tokens": path("meta_info", "completion_tokens"),
        "cached_tokens": path("meta_info", "cached_tokens"),
        "weight_versions": path("meta_info", "weight_versions"),
    },
    "vllm": {
        "request_id": path("request_id"),
        "output_ids": path("choices", 0, "token_ids"),
        "logprobs": path("choices", 0, "logprobs", "content"),
        "finish_reason": path("choices", 0, "finish_reason"),
        "prompt_tokens": path("usage", "prompt_tokens"),
        "completion_tokens": path("usage", "completion_tokens"),
        "cached_tokens": path("usage", "prompt_tokens_details", "cached_tokens"),
        "weight_versions": path("choices", 0, "weight_versions"),
    },
}


def field(kind, name, reply):
    found, key = FIELDS[kind][name](reply)
    return found[key]


def with_field(kind, name, value):
    """The recorded reply with another value of a field; a function changes the old one."""

    def change(reply):
        found, key = FIELDS[kind][name](reply)
        if value is MISSING:
            del found[key]
        else:
            found[key] = value(found[key]) if callable(value) else value

    return changed(kind, change)


def first(**new):
    """Change the first token's logprob or id, in either server's form."""

    def change(scored):
        if isinstance(scored[0], list):
            logprob, token, _ = scored[0]
            entry = [new.get("logprob", logprob), new.get("token_id", token), None]
        else:
            entry = {**scored[0], **new}
        return [entry, *scored[1:]]

    return change


def ids(change):
    return "output_ids", change, "expected a list of integers"


def scores(logprob, match):
    return "logprobs", first(logprob=logprob), match


def label(token):
    return "logprobs", first(token_id=token), f"logprob 0 is of token {token!r}, not"


def spans(match, *given):
    """Versions a, b, ... of the given ranges."""
    versions = [
        {"version": name, "start": start, "end": end}
        for name, (start, end) in zip("ab", given, strict=False)
    ]
    return "weight_versions", versions, match


@EACH
async def test_what_is_read(kind):
    found = await read(kind, answered(kind))
    reply = recorded(kind)
    assert found.output_ids.dtype == np.int32
    assert found.output_logprobs.dtype == np.float32
    assert found.output_ids.tolist() == field(kind, "output_ids", reply)
    scored = field(kind, "logprobs", reply)
    logprobs = [e[0] if kind == "sglang" else e["logprob"] for e in scored]
    assert found.output_logprobs.tolist() == np.float32(logprobs).tolist()
    assert found.finish_reason == "length"
    assert (found.complete, found.ended) == (True, False)
    assert (found.cached_tokens, found.prompt_tokens) == (0, len(PROMPT))
    (span,) = found.weight_versions
    assert (span.start, span.stop) == (0, 6)


REFUSED = [
    ("request_id", "another", "request id is 'another': the request's is 'r1'"),
    ("request_id", PREFIX + "r2", "request id is"),
    ("request_id", None, "request id is None"),
    ("request_id", MISSING, "request id|request_id"),
    *(
        ids(lambda ids, bad=bad: [bad, *ids[1:]])
        for bad in (1.0, "1", True, None, 2**31, 2**70, NAN)
    ),
    ids("abcdef"),
    ("output_ids", None, "expected a list of integers|cannot be read"),
    ("output_ids", MISSING, "cannot be read"),
    ("output_ids", lambda ids: ids[:-1], "completion_tokens is 6: 5 were counted"),
    ("output_ids", lambda ids: [*ids, 7], "completion_tokens is 6: 7 were counted"),
    ("output_ids", lambda ids: [ids[1], ids[0], *ids[2:]], "logprob 0 is of token"),
    ("logprobs", lambda scored: scored[:-1], "5 logprobs for 6 output ids"),
    ("logprobs", [], "0 logprobs for 6 output ids"),
    ("logprobs", None, "cannot be read"),
    *(scores(bad, "logits were not finite") for bad in (None, NAN, -INFINITY)),
    scores("-1.5", "'-1.5': expected a number"),
    scores(True, "True: expected a number"),
    scores(10**400, "cannot be read"),
    scores(0.5, "is not a log-probability"),
    scores(-9999.0, "missing or not finite"),
    *map(label, (5, "5", None)),
    *(("finish_reason", bad, f"finish_reason is {bad!r}") for bad in (5, "", True)),
    ("finish_reason", {"type": "stop"}, "finish_reason is"),
    ("prompt_tokens", MISSING, "prompt_tokens is None: 10 were counted"),
    *(
        ("prompt_tokens", bad, f"prompt_tokens is {bad!r}")
        for bad in (None, 9, "10", 10.0)
    ),
    ("completion_tokens", MISSING, "completion_tokens is None: 6 were counted"),
    *(("completion_tokens", bad, f"completion_tokens is {bad!r}") for bad in (-6, NAN)),
    ("weight_versions", [{}], "cannot be read"),
    ("weight_versions", ["v"], "cannot be read"),
    ("weight_versions", [{"version": 3, "start": 0, "end": 6}], "weight version is 3"),
    spans("cover 0:5 of 6", (0, 5)),
    spans("cover 1:6 of 6", (1, 6)),
    spans("cover 0:4, 3:6 of 6", (0, 4), (3, 6)),
    spans("integers", (False, 6)),
    spans("integers", (0, 6.0)),
]


@EACH
@pytest.mark.parametrize(
    ("name", "value", "match"),
    REFUSED,
    ids=[f"{number} {name}" for number, (name, *_) in enumerate(REFUSED)],
)
async def test_what_is_refused(kind, name, value, match):
    assert await refused(kind, with_field(kind, name, value), match) == 502


@cases(
    "kind, change, match",
    {
        "a total that is not the sum": (
            "vllm",
            lambda reply: reply["usage"].update(total_tokens=15),
            "total_tokens is 15: 16 were counted",
        ),
        "SGLang with vLLM's prefix": (
            "sglang",
            lambda reply: reply["meta_info"].update(id=PREFIX + "r1"),
            "request id",
        ),
        # vLLM's choices
        **{
            f"choices {indices}": (
                "vllm",
                lambda reply, indices=indices: reply.update(
                    choices=[{**reply["choices"][0], "index": i} for i in indices]
                ),
                "the one with index 0 was asked for",
            )
            for indices in ([], [1], [0, 0], [0, 1])
        },
    },
)
async def test_what_one_server_may_answer_and_is_refused(kind, change, match):
    assert await refused(kind, changed(kind, change), match) == 502


async def test_a_request_id_of_vllm_without_its_prefix():
    assert (await read("vllm", with_field("vllm", "request_id", "r1"))).complete


@EACH
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
    found = await read(kind, with_field(kind, "finish_reason", reason))
    assert found.finish_reason == reason
    assert (found.complete, found.ended) == (complete, ended)
    if reason is None and kind == "sglang":
        bare = changed(
            kind, lambda reply: reply["meta_info"].update(finish_reason=None)
        )
        assert (await read(kind, bare)).finish_reason is None


@EACH
@pytest.mark.parametrize(
    ("name", "value", "known"),
    [
        *(("cached_tokens", count, count) for count in (0, 10)),
        # impossible ones are unknown
        *(("cached_tokens", bad, None) for bad in (-5, 11, True, 2.0, "3", None, [])),
        (
            *spans((), (0, 2), (2, 6))[:2],
            (WeightSpan("a", 0, 2), WeightSpan("b", 2, 6)),
        ),
        # versions are known for all ids, or unknown
        ("weight_versions", [{"version": None, "start": 0, "end": 6}], ()),
        (
            "weight_versions",
            [
                {"version": "a", "start": 0, "end": 2},
                {"version": None, "start": 2, "end": 6},
            ],
            (),
        ),
        ("weight_versions", None, ()),
        ("weight_versions", MISSING, ()),
    ],
)
async def test_what_is_known_or_unknown(kind, name, value, known):
    assert getattr(await read(kind, with_field(kind, name, value)), name) == known


@EACH
async def test_no_id_follows_one_that_ends_the_reply(kind):
    reply = answered(kind)
    _, _, third, *_, last = field(kind, "output_ids", reply)
    match = f"3 ids after {third}, which ends a reply"
    assert await refused(kind, reply, match, stop_token_ids=(third,)) == 502
    assert (await read(kind, reply, stop_token_ids=(last,))).complete
    # the session asked for it
    free = {"ignore_eos": True}
    assert (await read(kind, reply, stop_token_ids=(third,), extra=free)).complete


@EACH
async def test_ids_that_were_not_asked_for_or_cannot_be(kind):
    match = "6 output ids, but 5 were asked for"
    await refused(kind, answered(kind), match, max_new_tokens=5)
    async with Double(kind, "basic").engine(vocab_size=1000) as engine:
        with pytest.raises(EngineError, match=r"outside the vocabulary .* \[0, 1000\)"):
            await sample(engine)


# What HTTP brings


@EACH
@pytest.mark.parametrize(
    ("answer", "status", "match"),
    [
        ("too_long", 400, "server answered 400: "),
        ({"text": "busy", "status": 503}, 503, "503: busy"),
        ({"text": "slow down", "status": 429}, 503, "429: slow down"),
        ({"text": "no", "status": 401}, 502, "401: no"),
        ({"status": 404}, 502, "404"),
        ({"status": 307, "headers": {"location": "/v1/models"}}, 502, "307"),
        ({"text": '{"error": "x"}', "status": 500}, 502, "500: "),
        ({"text": "hello"}, 502, "generate of the .* server: Expecting"),
        ({"body": b"\xff\xfe"}, 502, "generate of the .* server: "),
        ({"text": "[]"}, 502, "gave no object"),
        ({"text": "{}"}, 502, "cannot be read"),
    ],
)
async def test_what_the_server_refuses_or_fails(kind, answer, status, match):
    double = Double(kind, answer if answer == "too_long" else web.Response(**answer))
    async with double.engine() as engine:
        with pytest.raises(EngineError, match=match) as caught:
            await sample(engine)
    assert caught.value.status == status
    # a refused call needs no abort
    assert not any("abort" in path for path, _ in double.asked)


def events(*values):
    body = b"".join(b"data: " + value + b"\n\n" for value in values)
    return web.Response(body=body, content_type="text/event-stream")


@EACH
async def test_a_proxy_that_streams_the_reply(kind):
    """In one event: nobody asked for a stream, and of several a part may be lost."""
    # lines end at line feeds only: U+2028 is a character of a text
    reply = {**answered(kind), "text": "a\u2028b\u0085c"}
    text = json.dumps(reply, ensure_ascii=False).encode()
    for n_events in range(3):
        answer = events(*[text] * n_events, b"[DONE]")
        async with Double(kind, answer).engine() as engine:
            if n_events == 1:
                assert (await sample(engine)).complete
                continue
            with pytest.raises(EngineError, match="but one reply was asked for"):
                await sample(engine)


@EACH
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


@EACH
async def test_what_an_engine_serves_is_asked_once_by_all_first_calls(kind):
    double = Double(kind, *["basic"] * 25)
    models = double.paths["v1/models"]
    double.paths["v1/models"] = {"data": []}
    async with double.engine() as engine:

        async def all_calls():
            calls = (sample(engine) for _ in range(24))
            return await asyncio.gather(*calls, return_exceptions=True)

        failed = await all_calls()
        assert {*map(type, failed)} == {EngineError}
        assert "max_model_len" in str(failed[0])
        assert double.counted()["/v1/models"] == 1
        # a failed question is asked again by the next call
        double.paths["v1/models"] = models
        # nor does a caller that leaves take the answer with it
        gone = asyncio.create_task(engine.info())
        await asyncio.sleep(0)
        gone.cancel()
        assert all(each.complete for each in await all_calls())
        info = await engine.info()
    assert (info.model, info.max_context_tokens) == ("tiny", 32768)
    assert double.counted()["/v1/models"] == 2


@EACH
async def test_the_prompt_that_the_server_consumed(kind):
    other = [*PROMPT[:3].tolist(), 7, *PROMPT[4:].tolist()]
    replies = [PROMPT.tolist(), other, other[:-1], [str(i) for i in other], None]
    replies = [{**answered(kind), "prompt_token_ids": each} for each in replies]
    async with Double(kind, *replies).engine(check_prompts=True) as engine:
        assert (await sample(engine)).prompt_ids.tolist() == PROMPT.tolist()
        for match in (
            "consumed 7 as token 3 but was given 80",
            "consumed 9 prompt tokens but was given 10",
            "prompt ids is .* expected a list of integers",
            "no prompt_token_ids, which were asked for",
        ):
            with pytest.raises(EngineError, match=match):
                await sample(engine)


@EACH
async def test_a_server_that_is_not_there(kind):
    engine = ENGINES[kind]("http://127.0.0.1:9", vocab_size=10)
    with pytest.raises(EngineError, match="cannot be reached: ") as caught:
        await engine.info()
    # it may be back soon
    assert (caught.value.status, caught.value.retry_after) == (503, 5)
    await engine.close()


# Prompts for an engine, and what it must sample before anyone is served


@cases(
    "reply, says",
    {
        "serves": ("a", None),
        "fails": (EngineError("gone"), "does not work: gone"),
        "no logprobs": (sampled("a", output_logprobs=None), "no logprobs"),
        "no ids": (
            sampled("", finish_reason="length", weight_versions=()),
            "no output ids",
        ),
        "too many logprobs": (
            sampled("a", output_logprobs=sampled("abc").output_logprobs),
            "4 logprobs for 2",
        ),
    },
)
async def test_the_check_of_an_engine(reply, says):
    engine = ScriptedEngine(reply)
    if says is None:
        await check_engine(engine)
    else:
        with pytest.raises(ConnectionError, match=says):
            await check_engine(engine)
    assert engine.closed
    assert engine.samplings[0].max_new_tokens == 2


@cases(
    "prompt, says",
    {
        "id past the vocabulary": ([1, 50], r"prompt_ids\[1\] = 50"),
        "negative id": ([-1], r"prompt_ids\[0\] = -1"),
        "empty": ([], "no tokens"),
        "two dimensions": ([[1]], "shape"),
        "no room": ([1] * 10, "maximum context length is 10"),
    },
)
def test_a_prompt_that_no_engine_gets(prompt, says):
    info = EngineInfo(model="m", vocab_size=50, max_context_tokens=10)
    check_prompt(np.array([0, 49], np.int32), info)
    with pytest.raises(EngineError, match=says) as caught:
        check_prompt(np.array(prompt, np.int32), info)
    assert caught.value.status == 400
