"""Calls in every protocol: what they require and set, and what single protocols answer.

`test_conformance` has what all answer alike.
"""

import json
import re
from collections import Counter
from dataclasses import asdict
from itertools import chain

import anthropic
import pytest

from tests.shim.clients import BODIES, BY_NAME, NAMES, TOOLS, USER
from tests.shim.conformance import REQUIRED, each_of
from tests.shim.fakes import (
    AS_STRING,
    byte_renderer,
    cases,
    parse_reply,
    said,
    sampled_call,
    text_of,
    user,
)
from trajkit_shim.chat.request import Required, Usage, make_reply
from trajkit_shim.replies import FORMS, FormParser

pytestmark = pytest.mark.anyio

EACH = pytest.mark.parametrize("name", NAMES)
CALL = sampled_call("f", '{"n":  1.50e1}')


def shown(gateway):
    """The text of the latest prompt."""
    return text_of(gateway.engine.prompts[-1], gateway.renderer)


# What a client requires of the form of a reply


CELLS = {what: cells for what, (_, *cells) in REQUIRED.items()}


@each_of(CELLS)
async def test_what_is_required_is_read_sampled_under_a_grammar_and_logged(
    start, case, name, cell
):
    fields = {"tools": TOOLS[name], **cell[1]}
    request = BY_NAME[name].read({**BODIES[name], **fields})
    wanted = asdict(Required(**REQUIRED[case][0]))
    if name == "gemini" and "mode" in str(fields):
        # both of its modes promise arguments of the schema
        wanted["strict"] = ("f",)
    assert json.dumps(asdict(request.required)) == json.dumps(wanted)
    gateway = await start("{}")
    await (await gateway.open()).post(name, **fields)
    (sampling,), (turn,) = gateway.engine.samplings, gateway.turns()
    assert sampling.structural_tag["type"] == "structural_tag"
    assert json.loads(turn["sampling"])["structural_tag"] == sampling.structural_tag


WISHES = {"one call at most": "parallel", "arguments of the tool's schema": "strict"}


@pytest.mark.parametrize("lacks", ["engine", "parser"])
@each_of(CELLS)
async def test_without_grammars_wishes_are_counted_and_the_rest_is_refused(
    start, case, name, cell, lacks
):
    parser = FormParser(FORMS["kimi" if lacks == "parser" else "hermes"])
    gateway = await start("{}", reply_parser=parser)
    gateway.engine.takes_grammars = lacks == "parser"
    session, wish = await gateway.open(), WISHES.get(case)
    status = 200 if wish else 400
    await session.post(name, status, **{"tools": TOOLS[name], **cell[1]})
    assert (await session.shown())["ignored"] == ({wish: 1} if wish else {})
    assert not any(one.structural_tag for one in gateway.engine.samplings)


A_CALL = {"tools": TOOLS["openai_chat"], "tool_choice": "required"}
SCHEMA = {"name": "x", "schema": {"const": {"reward": "mine"}}}
# forces any text as a turn
A_CONST = {"response_format": {"type": "json_schema", "json_schema": SCHEMA}}
A_CONST |= {"stop": ["i"], "seed": 3, "max_tokens": 1}


@cases(
    "asked, sampling, client, overruled",
    {
        "nothing is fixed": (A_CALL, {}, [], []),
        "sampling is fixed": (A_CALL, {"temperature": 1}, [], ["tool_choice"]),
        "but for the tools": (A_CALL, {"temperature": 1}, ["tool_choice"], []),
        "a grammar": (A_CALL, {"extra": {"regex": "a"}}, [], ["tool_choice"]),
        "and a const is asked for": (A_CONST, {"top_p": 1.0}, [], sorted(A_CONST)),
    },
)
async def test_a_session_that_fixes_its_sampling(
    start, asked, sampling, client, overruled
):
    gateway = await start("hi")
    session = await gateway.open(sampling=sampling, client_sampling=client)
    assert (await session.ask(**asked))["content"] == "hi"
    assert sorted((await session.shown())["sampling_overruled"]) == overruled
    (given,) = gateway.engine.samplings
    assert (given.structural_tag is None) == bool(overruled)
    assert (given.stop, given.seed) == ((), None)


# Settings, and what has no effect

# the template shows each of its variables
VARIABLES = ("enable_thinking", "reasoning_effort", "thinking_budget")
SHOWS = (f"{{{{ '{name}=%s;' % {name} if {name} is defined }}}}" for name in VARIABLES)
TEMPLATE = "".join(SHOWS) + AS_STRING


def config(**thinking):
    return {"generationConfig": {"thinkingConfig": thinking}}


# as in `REQUIRED`: a cell for each protocol, and the variables
SETTINGS = {
    "an effort": (
        {"reasoning_effort": "low"},
        {"output_config": {"effort": "low"}},
        {"reasoning": {"effort": "low", "summary": "auto"}},
        config(thinkingLevel="LOW", includeThoughts=True),
        {"reasoning_effort": "low"},
    ),
    "no effort": (
        {"reasoning_effort": "none"},
        {"output_config": {"effort": "none"}},
        {"reasoning": {"effort": "none"}},
        config(thinkingLevel="NONE"),
        {"reasoning_effort": "none", "enable_thinking": False},
    ),
    "no thinking": (
        {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "disabled"}},
        None,
        config(thinkingBudget=0),
        {"enable_thinking": False},
    ),
    "thinking with a budget": (
        None,
        {"thinking": {"type": "enabled", "budget_tokens": 99}},
        None,
        config(thinkingBudget=99),
        {"enable_thinking": True, "thinking_budget": 99},
    ),
    "a variable": (
        *[{"chat_template_kwargs": {"thinking_budget": 1}}] * 4,
        {"thinking_budget": 1},
    ),
}


@each_of({what: cells[:4] for what, cells in SETTINGS.items()})
def test_a_setting_is_a_variable_of_the_template(case, name, cell):
    body, expected = {**BODIES[name], **cell}, SETTINGS[case][-1]
    thinking, ignored = BY_NAME[name].read(body).thinking, Counter()
    found = thinking.resolve(lambda name, _: name in VARIABLES, ignored)
    assert (found, ignored) == (expected, {})
    # a template without it: counted; no effort and no thinking are one wish
    assert thinking.resolve(lambda *_: False, ignored) == {}
    assert ignored.total() == len(expected) - (case == "no effort")


async def test_variables_of_server_session_and_request(start):
    server = {"enable_thinking": 1, "reasoning_effort": "server"}
    refuses = "{% if reasoning_effort == 'max' %}{{ raise_exception('no') }}{% endif %}"
    renderer = byte_renderer(refuses + TEMPLATE)
    gateway = await start("a", "b", renderer=renderer, variables=server)
    own = {"thinking_budget": 5, "unknown": 1}
    session = await gateway.open(chat_template_kwargs=own)
    asked = {"reasoning_effort": "request", "thinking_budget": 6, "messages": 1}
    await session.ask(chat_template_kwargs=asked)
    expected = "enable_thinking=1;reasoning_effort=request;thinking_budget=5;"
    assert shown(gateway).startswith(f"{expected}<|im_start|>")
    names = (f"chat_template_kwargs.{k}" for k in ("messages", *own))
    assert (await session.shown())["ignored"] == dict.fromkeys(names, 1)
    # a value that the template refuses is counted, too
    await session.ask(reasoning_effort="max")
    assert (await session.shown())["ignored"]["reasoning effort"] == 1


async def test_names_of_ignored_fields_are_bounded(start):
    session = await (await start("a", "b")).open()
    for letter in "ab":
        await session.post(**{f"{i}{letter * 500}": 1 for i in range(1000)})
    ignored = (await session.shown())["ignored"]
    assert (len(ignored), max(map(len, ignored))) == (100, 100)


async def test_the_assistant_s_last_message_is_not_continued(start):
    gateway = await start("a")
    await (await gateway.open()).ask(said("The answer is"))
    ends = "assistant\nThe answer is<|im_end|>\n<|im_start|>assistant\n"
    assert shown(gateway).endswith(ends)


@pytest.mark.parametrize("name", ["f", "f\ud83d"])
async def test_half_a_pair_comes_back(start, name):
    """A client's text and a sampled call have one: no token has, but the log."""
    call = sampled_call(name, '{"a": "\\ud83d"}')
    gateway = await start(call, "b", attributed=True)
    path = f"/s/{(await gateway.open()).key}/v1/messages"
    body = {**BODIES["anthropic"], "tools": TOOLS["anthropic"], "max_tokens": 99}
    body["messages"] = [user("x\ud83d")]
    first = await gateway.http.post(path, content=json.dumps(body))
    assert first.status_code == 200, first.text
    (use,) = first.json()["content"]
    result = {"type": "tool_result", "tool_use_id": use["id"]}
    body["messages"] += [said([use]), user([result])]
    second = await gateway.http.post(path, content=json.dumps(body))
    assert second.status_code == 200, second.text
    asked, answered = gateway.turns()
    assert answered["render_reason"] is None
    assert "x\ufffd<" in shown(gateway)
    assert json.loads(asked["messages"][0]["body"])["content"] == "x\ud83d"


async def test_a_count_obeys_the_session_s_limits(start):
    gateway = await start("a")
    limited, free = await gateway.open(max_prompt_tokens=20), await gateway.open()
    # the last one is more than four contexts
    for session, status, n in (
        (limited, 403, 100),
        (limited, 403, 2),
        (free, 200, 100),
        (free, 400, 9000),
    ):
        path, messages = "/v1/messages/count_tokens", [user("h" * n)]
        await session.post("anthropic", status, path=path, messages=messages)
    assert (await limited.shown())["token_counts"] == 2


# What single protocols answer


async def test_the_events_of_a_stream_in_order(start):
    text = f"<think>hm</think>Look.{CALL}"
    gateway = await start(text, text)
    session = await gateway.open()
    client = gateway.anthropic(session.key).messages
    body = {**BODIES["anthropic"], "max_tokens": 999, "tools": TOOLS["anthropic"]}
    told = [e async for e in await client.create(model="m", stream=True, **body)]
    kinds = [getattr(getattr(e, "delta", e), "type", "end") for e in told]
    begun, ended = "content_block_start", "content_block_stop"
    deltas = [("thinking", "signature"), ("text",), ("input_json",)]
    blocks = [[begun, *(f"{d}_delta" for d in each), ended] for each in deltas]
    assert kinds == ["message_start", *chain(*blocks), "end", "message_stop"]
    # the arguments as they were sampled
    assert told[9].delta.partial_json == '{"n":  1.50e1}'
    body = {"model": "m", "input": "hi", "tools": TOOLS["openai_responses"]}
    create = session.openai.responses.create
    events = [e async for e in await create(stream=True, **body)]
    added, done = ["output_item.added", "content_part.added"], "output_item.done"
    assert [event.type.removeprefix("response.") for event in events] == [
        *("created", "in_progress", *added, "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", done, *added),
        *("output_text.delta", "output_text.done", "content_part.done", done),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", done, "completed"),
    ]
    assert [event.sequence_number for event in events] == list(range(19))
    assert [e.output_index for e in events if e.type.endswith(done)] == [0, 1, 2]
    assert len({events[0].response.id, events[-1].response.id}) == 1
    assert events[2].item.encrypted_content is None
    assert events[7].item.encrypted_content


async def test_a_stream_has_its_usage_if_that_was_asked_for(start):
    gateway = await start("a", "b")
    session = await gateway.open()
    for options in ({}, {"stream_options": {"include_usage": True}}):
        lines = (await session.post(stream=True, **options)).text.splitlines()
        chunks = [json.loads(each[6:]) for each in lines if each.startswith("data: {")]
        told = [len(chunk["choices"]) for chunk in chunks if chunk.get("usage")]
        assert told == [0] * len(options)


@pytest.mark.parametrize("space", ["  ", "\n", "\r\n", "\r\r"])
async def test_arguments_go_out_as_they_were_sampled(start, space):
    gateway = await start(*[CALL.replace("  ", space)] * 3)
    session, tools = await gateway.open(), TOOLS["gemini"]
    whole = await session.post("anthropic", tools=TOOLS["anthropic"])
    assert re.search(r'"input": ?\{"n": +1.50e1\}', whole.text)
    stream = "/v1beta/models/m:streamGenerateContent"
    chunks = await session.post("gemini", path=stream, tools=tools)
    assert re.search(r'"args": ?\{"n": +1.50e1\}', chunks.text)
    models = gateway.gemini(session.key).aio.models
    asked = {"model": "m", "contents": "hi", "config": {"tools": tools}}
    reply = await models.generate_content(**asked)
    assert reply.function_calls[0].args == {"n": 15.0}


async def test_a_tool_of_a_namespace_has_the_client_s_names(start):
    (bash,) = TOOLS["openai_responses"]
    spawn = {**bash, "name": "spawn"}
    agents = {"type": "namespace", "name": "agents", "tools": [spawn]}
    tools = [bash, agents, {"type": "web_search"}]
    session = await (await start(CALL.replace('"f"', '"agents__spawn"'))).open()
    reply = (await session.post("openai_responses", tools=tools)).json()
    (item,) = reply["output"]
    assert (item["namespace"], item["name"]) == ("agents", "spawn")
    (message,) = BY_NAME["openai_responses"].read({"input": [item]}).messages
    assert message["tool_calls"][0]["function"]["name"] == "agents__spawn"


async def test_items_of_replies_may_be_named_by_their_ids(start):
    # as npm's ai 6 does with calls beside them, unless it is told not to store
    gateway = await start(f"<think>Hm.</think>Look.{CALL}", "more", "more")
    name, tools = "openai_responses", TOOLS["openai_responses"]
    session = await gateway.open()
    items = (await session.post(name, tools=tools)).json()["output"]
    named = [{"type": "item_reference", "id": item["id"]} for item in items]
    call_id = items[-1]["call_id"]
    result = {"type": "function_call_output", "output": "x", "call_id": call_id}
    for sent in ([*named, result], [*named[:-1], items[-1], result]):
        await session.post(name, tools=tools, input=[USER, *sent])
    first, *turns = gateway.turns()
    assert {t["messages"][1]["key"] for t in turns} == {first["response"]["key"]}
    for unknown in ("msg_x_0", "x", f"{items[0]['id']}9"):
        error = await session.error(400, name, input=[{**named[0], "id": unknown}])
        assert f"input[0].id: {unknown!r} is of no reply" in error["message"]


async def test_the_official_runner_of_tools_sends_whole_conversations(start):
    """By default the server holds them in a thread, and the runner sends what is new."""

    @anthropic.beta_async_tool
    async def f(n: float) -> str:
        """F."""
        return str(n)

    gateway = await start(CALL, "done")
    client = gateway.anthropic((await gateway.open()).key)
    asked = {"model": "any", "max_tokens": 99, "messages": [USER], "tools": [f]}
    reply = await client.beta.messages.tool_runner(**asked).until_done()
    assert (reply.content[0].text, len(gateway.turns()[1]["messages"])) == ("done", 3)


@cases(
    "name, path, field",
    {
        "anthropic": ("anthropic", "/v1/messages/count_tokens", "input_tokens"),
        "gemini": ("gemini", "/v1beta/models/m:countTokens", "totalTokens"),
    },
)
async def test_the_tokens_of_a_prompt_are_counted(start, name, path, field):
    gateway = await start("a")
    session, tools = await gateway.open(), {"tools": TOOLS[name]}
    counted = (await session.post(name, path=path, **tools)).json()
    assert (gateway.engine.requests, gateway.turns()) == ([], [])
    await session.post(name, **tools)
    assert counted[field] == len(gateway.engine.prompts[0])


# besides the prompt's and the output's, which `test_conformance` has
USAGES = {
    "openai_chat": {
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 4},
    },
    "anthropic": {"input_tokens": 2, "cache_read_input_tokens": 3},
    "openai_responses": {
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 4},
    },
    # it does not count reasoning as the answer's
    "gemini": {
        "candidatesTokenCount": 5,
        "cachedContentTokenCount": 3,
        "thoughtsTokenCount": 4,
    },
}


@EACH
def test_tokens_of_the_cache_and_of_reasoning_are_told(name):
    usage = Usage(prompt_tokens=5, output_tokens=9, cached_tokens=3, reasoning_tokens=4)
    reply = make_reply(parse_reply("Yes."), "stop", model="m", usage=usage)
    body = BY_NAME[name].write(reply, BY_NAME[name].read(BODIES[name]))
    told = body.get("usage") or body["usageMetadata"]
    assert told | USAGES[name] == told
