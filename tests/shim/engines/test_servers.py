"""What the clients of SGLang and vLLM send, and what a reply must satisfy to be a turn."""

import asyncio
import base64
import io
import json
import socket

import numpy as np
import pytest
from aiohttp import web

import trajkit as tk
from tests.shim.clients import USER
from tests.shim.engines.double import (
    ENGINES,
    PREFIX,
    PROMPT,
    RECORDED,
    VOCABULARY,
    Double,
    answered,
    recorded,
    sample,
)
from tests.shim.fakes import RENDERER, ScriptedEngine, cases, raises, rendered, sampled
from trajkit_shim.engines.base import (
    EngineInfo,
    PromptImage,
    UpdatableEngine,
    WeightSpan,
)
from trajkit_shim.engines.checks import check_engine, check_prompt
from trajkit_shim.engines.http import EngineClient, VLLMEngine, read_experts
from trajkit_shim.errors import EngineError

pytestmark = pytest.mark.anyio

EACH = pytest.mark.parametrize("kind", ENGINES)
MISSING = object()
DETAILS = "usage.prompt_tokens_details."
# where SGLang and vLLM have a field
PLACES = {
    "request_id": ("meta_info.id", "request_id"),
    "output_ids": ("output_ids", "choices.0.token_ids"),
    "logprobs": ("meta_info.output_token_logprobs", "choices.0.logprobs.content"),
    "finish_reason": ("meta_info.finish_reason.type", "choices.0.finish_reason"),
    "prompt_tokens": ("meta_info.prompt_tokens", "usage.prompt_tokens"),
    "completion_tokens": ("meta_info.completion_tokens", "usage.completion_tokens"),
    "cached_tokens": ("meta_info.cached_tokens", DETAILS + "cached_tokens"),
    "weight_versions": ("meta_info.weight_versions", "choices.0.weight_versions"),
}


def place_of(kind, name, reply):
    """The object that holds a field, and the field's key there."""
    places = dict(zip(ENGINES, PLACES.get(name, (name, name)), strict=True))
    *above, last = places[kind].split(".")
    for key in above:
        reply = reply[int(key) if key.isdecimal() else key]
    return reply, last


def field(kind, name, reply="basic"):
    """A field of a recorded reply, by the name that both servers share, or its place."""
    found, key = place_of(kind, name, recorded(kind, reply))
    return found[key]


def with_field(kind, name, value, reply="basic"):
    """A recorded reply with another value of a field; a function changes the old one."""
    changed = answered(kind, reply)
    found, key = place_of(kind, name, changed)
    if value is MISSING:
        del found[key]
    else:
        found[key] = value(found[key]) if callable(value) else value
    return changed


def prompt_of(name):
    """The prompt of a reply that was recorded of vLLM."""
    return np.array(RECORDED["vllm"][name]["request"]["token_ids"], np.int32)


async def read(kind, reply, prompt=PROMPT, *, engine=None, **sampling):
    """The sample of a reply, which an engine with these options gets from a server."""
    answer = web.json_response(reply)
    async with Double(kind, answer).engine(**engine or {}) as client:
        return await sample(client, prompt, **sampling)


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


def first_id(bad):
    return "output_ids", lambda ids: [bad, *ids[1:]], "expected a list of integers"


def score(logprob, match):
    return "logprobs", first(logprob=logprob), match


def label(token):
    return "logprobs", first(token_id=token), f"logprob 0 is of token {token!r}, not"


def spans(*ranges, names="ab"):
    """The versions of the given ranges."""
    return [
        {"version": name, "start": start, "end": end}
        for name, (start, end) in zip(names, ranges, strict=False)
    ]


def choices(*indices):
    """As many choices of vLLM, with these indices."""
    return (
        *("choices", lambda given: [{**given[0], "index": i} for i in indices]),
        *("the one with index 0 was asked for", {"only": "vllm"}),
    )


def masks(change, match):
    """Other sampling masks of vLLM."""
    how = {"only": "vllm", "reply": "mask", "prompt": prompt_of("mask"), "top_k": 3}
    how["engine"] = {"sampling_masks": True}
    return "choices.0.sampling_mask", change, match, how


def consumed(ids, match):
    """A prompt that the server says it consumed."""
    return "prompt_token_ids", ids, match, {"engine": {"check_prompts": True}}


def as_it_is(value):
    return value


def unchanged(match, **how):
    """The recorded reply, which is wrong for what was asked."""
    return "finish_reason", as_it_is, match, how


OTHER = [*PROMPT[:3].tolist(), 7, *PROMPT[4:].tolist()]
CUT = {"only": "sglang", "reply": "sampling_mask", "top_p": 0.9}
# a field, its value, the error, and the server and the request that it is tried with
REFUSED = [
    ("request_id", "another", "request id is 'another': the request's is 'r1'"),
    ("request_id", PREFIX + "r2", "request id is"),
    # the prefix of ids is vLLM's
    ("request_id", PREFIX + "r1", "request id", {"only": "sglang"}),
    ("request_id", None, "request id is None"),
    ("request_id", MISSING, "request id|request_id"),
    *map(first_id, (1.0, "1", True, None, 2**31, 2**70)),
    ("output_ids", "abcdef", "expected a list of integers"),
    ("output_ids", None, "expected a list of integers|cannot be read"),
    ("output_ids", MISSING, "cannot be read"),
    ("output_ids", lambda ids: ids[:-1], "completion_tokens is 6: 5 were counted"),
    ("output_ids", lambda ids: [*ids, 7], "completion_tokens is 6: 7 were counted"),
    ("output_ids", lambda ids: [ids[1], ids[0], *ids[2:]], "logprob 0 is of token"),
    ("logprobs", lambda scored: scored[:-1], "5 logprobs for 6 output ids"),
    ("logprobs", [], "0 logprobs for 6 output ids"),
    ("logprobs", None, "cannot be read"),
    score(None, "logits were not finite"),
    score("-1.5", "'-1.5': expected a number"),
    score(True, "True: expected a number"),
    score(10**400, "cannot be read"),
    score(-1e39, "logits were not finite"),
    score(0.5, "is not a log-probability"),
    score(-9999.0, "missing or not finite"),
    *map(label, (5, "5", None)),
    *(("finish_reason", bad, f"finish_reason is {bad!r}") for bad in (5, "", True)),
    ("finish_reason", {"type": "stop"}, "finish_reason is"),
    ("finish_reason", "\ud800", "cannot be read"),
    ("prompt_tokens", MISSING, "prompt_tokens is None: 10 were counted"),
    *(
        ("prompt_tokens", bad, f"prompt_tokens is {bad!r}")
        for bad in (None, 9, "10", 10.0)
    ),
    ("completion_tokens", MISSING, "completion_tokens is None: 6 were counted"),
    ("completion_tokens", -6, "completion_tokens is -6"),
    ("usage.total_tokens", 15, "is 15: 16 were counted", {"only": "vllm"}),
    ("weight_versions", [{}], "cannot be read"),
    ("weight_versions", ["v"], "cannot be read"),
    ("weight_versions", spans((0, 6), names=[3]), "weight version is 3"),
    ("weight_versions", spans((0, 6), names=["\ud800"]), "cannot be read"),
    ("weight_versions", spans((0, 5)), "cover 0:5 of 6"),
    ("weight_versions", spans((1, 6)), "cover 1:6 of 6"),
    ("weight_versions", spans((0, 4), (3, 6)), "cover 0:4, 3:6 of 6"),
    ("weight_versions", spans((False, 6)), "integers"),
    ("weight_versions", spans((0, 6.0)), "integers"),
    *(choices(), choices(1), choices(0, 0), choices(0, 1)),
    consumed(OTHER, "consumed 7 as token 3 but was given 80"),
    consumed(OTHER[:-1], "consumed 9 prompt tokens but was given 10"),
    consumed([*map(str, OTHER)], "prompt ids is .* expected a list of integers"),
    consumed(None, "no prompt_token_ids, which were asked for"),
    unchanged("6 output ids, but 5 were asked for", max_new_tokens=5),
    unchanged(r"the vocabulary .* \[0, 1000\)", engine={"vocab_size": 1000}),
    unchanged("cannot be read", only="sglang", top_p=0.9),
    (
        *("meta_info.output_token_sampling_logprobs", lambda logprobs: logprobs[1:]),
        *("5 of 6 logprobs after the cut", CUT),
    ),
    masks(lambda mask: mask[:-1], "2 sampling masks for 3 output ids"),
    masks(lambda mask: [[1], *mask[1:]], r"sampling_mask\[0\], which lacks 3803"),
    masks(lambda mask: [[*mask[0], 4032], *mask[1:]], r"\[0\]\[3\] = 4032 is outside"),
    masks(lambda mask: [[*mask[0], 1.0], *mask[1:]], "expected a list of"),
    masks(lambda mask: [None, *mask[1:]], "expected a list of"),
    masks("abc", "expected a list of"),
    masks(lambda mask: [mask[0] * 2, *mask[1:]], r"\[0\], which has an id twice"),
    (
        *("meta_info.output_token_sampling_mask", None, "cannot be read"),
        CUT | {"engine": {"sampling_masks": True}},
    ),
]


def each_of(table):
    """Run a test for each row and server; a row may end with how it is tried."""
    given = []
    for number, (name, value, expected, *how) in enumerate(table):
        how = {"only": None, "reply": "basic", **(how[0] if how else {})}
        only, reply = how.pop("only"), how.pop("reply")
        for kind in [only] if only else ENGINES:
            row = kind, (name, value, reply), expected, how
            given.append(pytest.param(*row, id=f"{kind} {number} {name}"))
    return pytest.mark.parametrize(("kind", "change", "expected", "how"), given)


@each_of(REFUSED)
async def test_what_is_refused(kind, change, expected, how):
    with raises(EngineError, expected, status=502):
        await read(kind, with_field(kind, *change), **how)


@EACH
async def test_what_is_read(kind):
    found = await read(kind, answered(kind))
    assert found.output_ids.dtype == np.int32
    assert found.output_logprobs.dtype == np.float32
    assert found.output_ids.tolist() == field(kind, "output_ids")
    scored = field(kind, "logprobs")
    logprobs = [e[0] if kind == "sglang" else e["logprob"] for e in scored]
    assert found.output_logprobs.tolist() == np.float32(logprobs).tolist()
    assert found.finish_reason == "length"
    (span,) = found.weight_versions
    assert (span.start, span.stop) == (0, 6)


def of_versions(first, change, second, stop):
    spans = WeightSpan(first, 0, change), WeightSpan(second, change, stop)
    return {"weight_versions": spans}


SGLANG, FINISH = {"only": "sglang"}, "meta_info.finish_reason"
NAN = {"type": "stop", "matched": "NaN happened"}
ABORTED, RETRACT = {"reply": "aborted"}, {"only": "sglang", "reply": "aborted"}
UPDATED = {"only": "vllm", "reply": "spans"}
CACHED = {"only": "sglang", "reply": "cached"}
WHOLE = {"complete": True, "ended": True}
BROKEN = {"complete": False, "ended": False}
# a field, its value, and what the sample then says
TAKEN = [
    *(("finish_reason", word, WHOLE) for word in ("stop", "tool_calls")),
    ("finish_reason", "length", {"complete": True, "ended": False}),
    *(
        ("finish_reason", word, {"finish_reason": word, **BROKEN})
        for word in (*"abort ABORT error STOP repetition content_filter".split(), None)
    ),
    (FINISH, None, {"finish_reason": None}, SGLANG),
    (FINISH, NAN, {"finish_reason": "NaN happened", **BROKEN}, SGLANG),
    # the prefix of ids may be missing
    ("request_id", "r1", {"complete": True}, {"only": "vllm"}),
    *(("cached_tokens", count, {"cached_tokens": count}) for count in (0, 10)),
    # impossible ones are unknown
    *(
        ("cached_tokens", bad, {"cached_tokens": None})
        for bad in (-5, 11, True, 2.0, "3", None, [])
    ),
    ("weight_versions", spans((0, 2), (2, 6)), of_versions("a", 2, "b", 6)),
    # versions are known for all ids, or unknown
    *(
        ("weight_versions", unknown, {"weight_versions": ()})
        for unknown in (spans((0, 2), (2, 6), names=["a", None]), None, MISSING)
    ),
    # what servers did in the midst of other things
    ("finish_reason", as_it_is, {"finish_reason": "abort", **BROKEN}, ABORTED),
    ("weight_versions", as_it_is, of_versions("default", 8, "v-retract", 12), RETRACT),
    ("weight_versions", as_it_is, of_versions("step-1", 37, "step-2", 40), UPDATED),
    ("cached_tokens", as_it_is, {"cached_tokens": 9}, CACHED),
]


@each_of(TAKEN)
async def test_what_is_known_or_unknown(kind, change, expected, how):
    found = await read(kind, with_field(kind, *change), **how)
    assert {name: getattr(found, name) for name in expected} == expected


@EACH
async def test_no_id_follows_one_that_ends_the_reply(kind):
    reply = answered(kind)
    _, _, third, *_, last = field(kind, "output_ids")
    with raises(EngineError, f"3 ids after {third}, which ends a reply"):
        await read(kind, reply, stop_token_ids=(third,))
    assert (await read(kind, reply, stop_token_ids=(last,))).complete
    # the session asked for it
    free = {"ignore_eos": True}
    assert (await read(kind, reply, stop_token_ids=(third,), extra=free)).complete


# What HTTP brings


# recorded answers by their names, and others
@pytest.mark.parametrize(
    ("kind", "answer", "status", "match"),
    [
        ("sglang", "too_long", 400, "server answered 400: Requested token count"),
        ("vllm", "too_long", 400, "longer than the maximum model length of 32768"),
        ("vllm", "bad_top_p", 400, r"top_p must be in \(0, 1\], got 0.0"),
        ("vllm", "queue_full", 503, "vLLM server answered 503"),
        ("vllm", "mask_refused", 502, "vLLM server answered 500"),
        ("vllm", "no_key", 502, "401: Unauthorized"),
        ("vllm", "no_route", 502, "inference/v1/generate: start it with --enable-scal"),
        ("sglang", {"text": "busy", "status": 503}, 503, "503: busy"),
        ("sglang", {"text": "slow down", "status": 429}, 503, "429: slow down"),
        ("sglang", {"text": "no", "status": 401}, 502, "401: no"),
        ("sglang", {"status": 404}, 502, "404"),
        ("sglang", {"status": 504}, 502, "504"),
        ("sglang", {"status": 307, "headers": {"location": "/v1/models"}}, 502, "307"),
        ("sglang", {"text": '{"error": "x"}', "status": 500}, 502, "500: "),
        ("sglang", {"text": "hello"}, 502, "answer .*generate cannot be read: .*exp"),
        ("sglang", {"body": b"\xff\xfe"}, 502, "answer to .*generate cannot be read"),
        ("sglang", {"text": "[]"}, 502, "is no object"),
        ("sglang", {"text": "{}"}, 502, "cannot be read"),
        ("sglang", {"text": "[" * 10**5}, 502, "JSONDecodeError"),
        ("sglang", {"text": '{"logprob": NaN}'}, 502, "cannot be read: JSONDecodeErr"),
        ("vllm", {"text": '{"error": {"message": "no"}}'}, 502, "answered 200: no"),
    ],
)
async def test_what_the_server_refuses_or_fails(kind, answer, status, match):
    double = Double(kind, answer if isinstance(answer, str) else web.Response(**answer))
    async with double.engine() as engine:
        with raises(EngineError, match, status=status):
            await sample(engine)
    # the server may still be working on a call that a proxy gave up
    aborted = any("abort" in path for path, _ in double.asked)
    assert aborted == (status == 502 and match != "cannot be read")


@EACH
@pytest.mark.parametrize("n_events", range(3))
async def test_a_proxy_that_streams_the_reply(kind, n_events):
    """In one event: nobody asked for a stream, and of several a part may be lost."""
    # lines end at line feeds only: U+2028 is a character of a text
    reply = {**answered(kind), "text": "a\u2028b\u0085c"}
    events = [json.dumps(reply, ensure_ascii=False)] * n_events
    body = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
    answer = web.Response(body=body.encode(), content_type="text/event-stream")
    async with Double(kind, answer).engine() as engine:
        if n_events == 1:
            assert (await sample(engine)).complete
        else:
            with raises(EngineError, "but one reply was asked for"):
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
async def test_a_server_that_is_not_there(kind):
    engine = ENGINES[kind]("http://127.0.0.1:9", vocab_size=10)
    # it may be back soon
    with raises(EngineError, "cannot be reached: ", status=503, retry_after=5):
        await engine.info()
    await engine.close()


# Prompts for an engine, and what it must sample before anyone is served


NOTHING = {"finish_reason": "length", "weight_versions": ()}
SCORED = {"output_logprobs": sampled("abc").output_logprobs}
ENDED = dict.fromkeys(["output_ids", "output_logprobs"], np.array([], np.int32))


@cases(
    "reply, says",
    {
        "serves": ("a", None),
        "fails": (EngineError("gone"), "does not work: gone"),
        "no logprobs": (sampled("a", output_logprobs=None), "no logprobs"),
        "no ids": (sampled("", **NOTHING), "no output ids"),
        "an end": (sampled("", **ENDED, weight_versions=()), "but the finish reason"),
        "too many logprobs": (sampled("a", **SCORED), "4 logprobs for 2"),
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


@EACH
async def test_an_engine_that_was_left_paused_is_named(kind, monkeypatch, capsys):
    monkeypatch.setattr("trajkit_shim.engines.checks._SLOW_SECONDS", 0.0)
    double = Double(kind, "too_long")
    double.go_on.clear()
    async with double.engine() as engine:
        checked = asyncio.create_task(check_engine(engine))
        await double.entered.wait()
        double.go_on.set()
        with pytest.raises(ConnectionError):
            await checked
    path = {"sglang": "continue_generation", "vllm": "resume"}[kind]
    url = engine._servers[0].base_url
    says = f"it may be paused. To resume it: POST {{}} to {url}/{path}\n"
    assert says in capsys.readouterr().err


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
    with raises(EngineError, says, status=400):
        check_prompt(np.array(prompt, np.int32), info)


# What is sent, against what real servers answered

SGLANG, VLLM = RECORDED["sglang"], RECORDED["vllm"]
TAG = '{"type": "structural_tag"}'
AS_SAMPLED = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
AS_SGLANG = {"no_stop_trim": True, **AS_SAMPLED}
AS_VLLM = {"n": 1, "logprobs": 0, "include_stop_str_in_output": True, **AS_SAMPLED}
UNSHAPED = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
SHAPED = {"temperature": 0.5, "stop": ["\n"], "stop_token_ids": [2]}
# of each server: a plain request, and the parameters of a shaped one
SENT = {
    "sglang": (
        {
            "rid": "r1",
            "input_ids": PROMPT.tolist(),
            "sampling_params": {"max_new_tokens": 40, **AS_SGLANG},
            "return_logprob": True,
        },
        SHAPED | {"sampling_seed": 7, "structural_tag": TAG, "min_p": 0.0},
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
    ),
}


@EACH
async def test_what_is_sent(kind):
    plain, shaped = SENT[kind]
    double = Double(kind, "basic", "basic")
    changes = {"temperature": 0.5, "stop": ("\n",), "stop_token_ids": (2,), "seed": 7}
    # what is as sampled is no choice
    extra = {"min_p": 0.0, "skip_special_tokens": True}
    async with double.engine() as engine:
        await sample(engine)
        tag = {"type": "structural_tag"}
        await sample(engine, structural_tag=tag, extra=extra, **changes)
    (first, _), (second, _) = double.calls
    assert first == plain
    assert second["sampling_params"] == plain["sampling_params"] | shaped


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


async def test_a_greedy_call_of_vllm_has_the_logprobs_of_its_only_token():
    """vLLM gives those from before a call became greedy."""
    double = Double("vllm", "basic")
    async with double.engine() as engine:
        await sample(engine, temperature=0.0, top_p=0.5)
    params = double.calls[0][0]["sampling_params"]
    assert [params[name] for name in ("temperature", "top_p", "top_k")] == [1.0, 1.0, 1]


async def test_logprobs_whose_ids_are_texts():
    """The form of ``return_tokens_as_token_ids``."""
    reply = answered("vllm")
    found, key = place_of("vllm", "logprobs", reply)
    for entry in found[key]:
        entry["token"] = f"token_id:{entry.pop('token_id')}"
    assert len((await read("vllm", reply)).output_ids) == 6
    found[key][2]["token"] = "token_id:-1"
    with raises(EngineError, "logprob 2 is of token '-1'"):
        await read("vllm", reply)


@pytest.mark.parametrize("logprob", [0.0, -1e-6])
async def test_vllm_with_logprobs_from_before_shaping_is_refused(logprob):
    """The only token that is allowed has a logprob of 0 after shaping."""

    class Probed(ScriptedEngine):
        check = VLLMEngine.check

    scores = np.array([0.0, logprob], np.float32)
    engine = Probed("a", sampled("a", output_logprobs=scores))
    if logprob:
        with pytest.raises(ConnectionError, match="--logprobs-mode processed_logp"):
            await check_engine(engine)
    else:
        assert (await check_engine(engine)).model == "scripted"
    assert engine.samplings[1].extra["allowed_token_ids"] == [0]


# Connections


async def test_connections_to_an_engine_notice_that_it_is_gone():
    """Its machine sends nothing then, and does not close them either."""
    # the answer has begun, so that its connection is held
    begun = web.Response(headers={"Content-Length": "1"})
    async with Double("sglang", begun).listening() as url:
        server = EngineClient("SGLang", url)
        async with server.session().post(f"{url}/generate") as answer:
            own = answer.connection.transport.get_extra_info("socket")
            assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15
            answer.close()
        await server.close()


# Several servers


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


LOAD = {"weight_version": "step-1", "model_path": "/new", "flush_cache": True}
RELOAD = {"method": "reload_weights", "kwargs": {"weights_path": "/new"}}
# what each server is asked at a pause, an update and the end of the pause
PAUSING = {
    "sglang": [
        ("/pause_generation", {"mode": "retract"}),
        ("/update_weights_from_disk", LOAD),
        ("/continue_generation", {}),
    ],
    "vllm": [
        ("/pause?mode=keep", {}),
        ("/collective_rpc", RELOAD),
        ("/reset_prefix_cache", {}),
        ("/update_weight_version", {"new_version": "step-1"}),
        ("/resume", {}),
    ],
}


@EACH
async def test_pausing_and_updating(kind):
    names = [path[1:].partition("?")[0] for path, _ in PAUSING[kind]]
    paths = {name: {"success": True} for name in names}
    if kind == "vllm":
        paths["update_weight_version"] = VLLM["update_weight_version"]["reply"]
    double = Double(kind, **paths)
    async with double.engine() as engine:
        assert isinstance(engine, UpdatableEngine)
        await engine.pause()
        await engine.update_weights("/new", "step-1")
        await engine.resume()
    assert double.asked == PAUSING[kind]


@cases(
    "kind, path, status, says",
    {
        "SGLang": ("sglang", "update_weights_from_disk", 200, "no such folder"),
        "vLLM": ("vllm", "collective_rpc", 500, "no such folder"),
        "no developer": ("vllm", "collective_rpc", 404, "with VLLM_SERVER_DEV_MODE=1"),
    },
)
async def test_weights_that_cannot_be_loaded_get_no_name(kind, path, status, says):
    body = {"message": "no such folder", "success": False}
    double = Double(kind, **{path: web.json_response(body, status=status)})
    async with double.engine() as engine:
        with pytest.raises(EngineError, match=says):
            await engine.update_weights("/bad", "step-2")
    assert double.counted() == {f"/{path}": 1}


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


# of 10 prompt and 6 output tokens all but the last, in 2 layers, 3 experts each
EXPERTS = np.arange(15 * 2 * 3).reshape(15, 2, 3) % 128


async def test_sampling_masks_of_vllm():
    prompt, double = prompt_of("mask"), Double("vllm", "mask", "experts")
    async with double.engine(sampling_masks=True) as engine:
        told = await sample(engine, prompt, top_k=3)
        with pytest.raises(EngineError, match="gave no sampling mask"):
            await sample(engine, prompt, top_k=3)
        # the server fails without a message
        with raises(EngineError, "only for calls with top_k", status=400):
            await sample(engine, prompt)
    assert told.sampling_mask == VLLM["mask"]["reply"]["choices"][0]["sampling_mask"]
    assert len(double.calls) == 2


def packed(server, experts):
    """Experts as a server packs them."""
    file = io.BytesIO()
    np.save(file, experts)
    flat = experts.astype("<i4").tobytes() if server == "SGLang" else file.getvalue()
    return base64.b64encode(flat).decode()


async def test_the_experts_that_tokens_were_routed_to():
    reply = answered("sglang")
    reply["meta_info"]["routed_experts"] = packed("SGLang", EXPERTS)
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


@pytest.mark.parametrize(
    ("server", "text", "match"),
    [
        *(
            (server, packed(server, experts), match)
            for server in ("SGLang", "vLLM")
            for experts, match in (
                (EXPERTS[:-1], r"for 15 tokens with 3 a layer"),
                (EXPERTS[:, :0], "of shape"),
                (EXPERTS - 1, r"in \[-1, 88\]: expected integers"),
                (EXPERTS + 2**15, "expected integers in"),
            )
        ),
        ("vLLM", packed("vLLM", np.zeros((15, 6), np.uint8)), r"shape \(15, 6\)"),
        ("vLLM", packed("vLLM", np.zeros((15, 2, 3))), "experts that are float64"),
        ("vLLM", packed("vLLM", np.array([[[{}]]], object)), "allow_pickle|Object"),
        ("vLLM", "====", "[Pp]adding|data"),
        ("vLLM", "AAAA", "EOF"),
        ("vLLM", "", "EOF"),
        ("vLLM", base64.b64encode(b"PK\3\4").decode(), "magic|EOF"),
        ("vLLM", 7, "gave no routed_experts"),
    ],
)
def test_experts_that_cannot_be(server, text, match):
    with pytest.raises((EngineError, ValueError), match=match):
        read_experts(server, text, 16, 3)


@pytest.mark.parametrize("form", ["full", "delta"])
async def test_payloads_go_into_the_log(start, form):
    n_known = len(rendered(RENDERER, [USER])) + 1
    experts = np.arange(n_known * 6, dtype=np.int16).reshape(-1, 2, 3)
    mask = [[token, 7] for token in sampled("a").output_ids.tolist()]
    reply = sampled("a", routed_experts=experts, sampling_mask=mask)
    gateway = await start(reply, form=form, routed_experts=True, sampling_masks=True)
    await (await gateway.open()).ask()
    turns = gateway.table()
    tk.validate(turns)
    assert turns["routed_experts"].to_pylist() == [[*experts.tolist(), None]]
    assert turns["sampling_mask"].to_pylist() == [mask]
