"""The echo: a reply is known again in whatever shape a client sends it back."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import trajkit as tk
from tests.shim.clients import in_process, read_log
from tests.shim.fakes import (
    AS_STRING,
    RENDERER,
    TOOL,
    ScriptedEngine,
    byte_renderer,
    cases,
    parse_reply,
    remember,
    rendered,
)
from tests.strategies import client_habits, reply_texts
from trajkit_shim.chat.request import Usage, canonical_reply, make_reply
from trajkit_shim.errors import GatewayError
from trajkit_shim.prompting.conversation import Conversation
from trajkit_shim.protocols import PROTOCOLS
from trajkit_shim.protocols.base import encode

USER = {"role": "user", "content": "hi"}
NEXT = {"role": "user", "content": "and?"}
CALL = '<tool_call>\n{"name": "bash", "arguments": {"n":  1.50e1}}\n</tool_call>'
USAGE = Usage(prompt_tokens=5, output_tokens=3, cached_tokens=None)
BY_NAME = {protocol.name: protocol for protocol in PROTOCOLS}


def reply_to(text, prefix="call_"):
    parsed = parse_reply(text, [])
    return make_reply(parsed, "stop", model="m", usage=USAGE, call_prefix=prefix)


def book_with(*replies, messages=(USER,)):
    """A session in which these were sampled after those messages."""
    book = Conversation()
    for reply in replies:
        remember(book, book.restore(list(messages)).position, reply)
    return book


def said(text, **fields):
    return {"role": "assistant", "content": text, **fields}


def calling(text, *arguments, ids="ab", **fields):
    calls = [
        {"id": id_, "type": "function", "function": {"name": "f", "arguments": given}}
        for id_, given in zip(ids, arguments, strict=False)
    ]
    return said(text, tool_calls=calls, **fields)


def restored(book, *messages):
    got = book.restore([*messages, NEXT])
    return got.messages[:-1], [p.known for p in got.places if p.known]


@cases(
    "sent, reply",
    {
        "trimmed": (said("Done"), said(" Done.\n".replace(".", ""))),
        "other white space": (said("a b"), said("a\n\nb")),
        "reasoning left out": (said("a"), said("a", reasoning_content="hm")),
        "reasoning with a space": (
            said("a", reasoning_content="hm "),
            said("a", reasoning_content="hm"),
        ),
        "numbers written otherwise": (
            calling("", '{"a":1000,"b":[1.5],"c":true}'),
            calling("", '{ "b": [1.50], "a": 1.0e3,\n"c": true}'),
        ),
        "a number beyond a double": (
            calling("", '{"n": 12345678901234567000}'),
            calling("", '{"n": 12345678901234567890}'),
        ),
        "text after a call": (
            calling("beforeafter", "{}"),
            calling("before\nafter", "{}", sampled="before\n<tool_call>after"),
        ),
        "ids of the client's own": (
            calling("", "{}", "{}", ids=["x", "y"]),
            calling("", "{}", "{}"),
        ),
        "escapes": (calling("", '{"a": "\\u00e9"}'), calling("", '{"a": "é"}')),
    },
)
def test_what_is_restored(sent, reply):
    book = book_with(reply)
    assert restored(book, USER, sent) == ([USER, reply], ["restored"])
    assert restored(book, USER, reply) == ([USER, reply], ["as_sent"])


@cases(
    "sent, reply",
    {
        "other text": (said("Done!"), said("Done.")),
        "other reasoning": (
            said("a", reasoning_content="x"),
            said("a", reasoning_content="y"),
        ),
        "reasoning of its own": (said("a", reasoning_content="x"), said("a")),
        "arguments": (calling("", '{"a": 2}'), calling("", '{"a": 1}')),
        "a type": (calling("", '{"a": "1"}'), calling("", '{"a": 1}')),
        "arguments of no JSON": (calling("", "{"), calling("", "{}")),
        "arguments too deep": (calling("", "[" * 100_000), calling("", "{}")),
        "one call more": (calling("", "{}", "{}"), calling("", "{}")),
        "a call left out": (said(""), calling("", "{}")),
        "text left out": (calling("", "{}"), calling("Look.", "{}")),
        "calls in another order": (
            calling("", "{}", "{}", ids="ba"),
            calling("", "{}", "{}"),
        ),
    },
)
def test_what_is_new(sent, reply):
    assert restored(book_with(reply), USER, sent) == ([USER, sent], ["new"])


def test_the_exact_sibling_is_preferred():
    book = book_with(said("x"), said(" x"), said("x "))
    for text in ("x", " x", "x "):
        assert restored(book, USER, said(text)) == ([USER, said(text)], ["as_sent"])


def test_the_place_tells_replies_apart():
    book = book_with(said("Done"))
    other = {"role": "user", "content": "another"}
    remember(book, book.restore([other]).position, said("Done\n"))
    assert restored(book, USER, said("Done "))[0][1] == said("Done")
    assert restored(book, other, said("Done "))[0][1] == said("Done\n")
    # elsewhere nobody can tell which one it is
    assert restored(book, NEXT, said("Done ")) == ([NEXT, said("Done ")], ["new"])


def test_where_the_messages_before_changed():
    reply, last = calling("Look. ", "{}"), said(" fine", reasoning_content="hm")
    book = book_with(reply)
    remember(book, book.restore([USER, reply]).position, last)
    sent = [NEXT, calling("Look.", "{}"), said("fine")]
    assert restored(book, *sent) == ([NEXT, reply, last], ["restored", "restored"])


def test_one_reply_split_into_two_messages():
    reply = calling("Look.", '{"a": 1}', "{}", reasoning_content="hm")
    call, other = reply["tool_calls"]
    book = book_with(reply)
    sent = [
        said("Look.", reasoning_content="hm"),
        said("", tool_calls=[call]),
        said("", tool_calls=[other]),
    ]
    assert restored(book, USER, *sent) == ([USER, reply], ["restored"])
    # and two replies stay two
    second = said("Well.")
    remember(book, book.restore([USER, reply]).position, second)
    assert restored(book, USER, *sent, second) == (
        [USER, reply, second],
        ["restored", "as_sent"],
    )


def test_results_follow_the_ids_of_their_calls():
    reply = calling("", "{}")
    result = {"role": "tool", "content": "x", "tool_call_id": "mine"}
    messages, _ = restored(
        book_with(reply), USER, calling("", "{}", ids=["mine"]), result
    )
    assert messages == [USER, reply, {**result, "tool_call_id": "a"}]


def test_a_message_is_counted_where_it_first_appears():
    book = book_with(said("a "))
    for messages in ([USER, said("a")], [USER, said("a"), NEXT, said("b")]):
        book.count(book.restore(messages))
        book.count(book.restore(messages))
    assert dict(book.counts) == {"restored": 1, "new": 1}


# what a client does with a message on its way back, by protocol


def wire_echo(name, reply, habits):
    """The request that continues a conversation, after a client's habits."""
    protocol = BY_NAME[name]
    asked = SimpleNamespace(namespaces={})
    body = json.loads(encode(protocol.write(reply, asked)))
    if "numbers" in habits:
        # as JavaScript writes them
        body = json.loads(json.dumps(body), parse_float=_javascript)
    return ECHOES[name](body, habits)


def _javascript(text):
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 1e21 else number


def chat_echo(body, habits):
    message = body["choices"][0]["message"]
    if "no reasoning" in habits:
        message.pop("reasoning_content", None)
    if "blocks" in habits and message["content"]:
        message["content"] = [{"type": "text", "text": message["content"]}]
    return {"messages": [USER, message, NEXT]}


def anthropic_echo(body, habits):
    blocks = body["content"]
    if "no reasoning" in habits:
        blocks = [block for block in blocks if block["type"] != "thinking"]
    if "blocks" in habits:
        blocks = [{"type": "text", "text": ""}, *blocks]
        blocks[-1]["cache_control"] = {"type": "ephemeral"}
    elif [block["type"] for block in blocks] == ["text"]:
        blocks = blocks[0]["text"]
    message = {"role": "assistant", "content": blocks}
    return {"max_tokens": 1, "messages": [USER, message, NEXT]}


def responses_echo(body, habits):
    items = body["output"]
    for item in items:
        if item["type"] == "reasoning" and "no reasoning" in habits:
            item["content"] = None
        if "blocks" in habits:
            del item["id"]
    return {"input": [USER, *items, NEXT]}


def gemini_echo(body, habits):
    content = body["candidates"][0]["content"]
    if "no reasoning" in habits:
        content["parts"] = [p for p in content["parts"] if not p.get("thought")]
    if "blocks" in habits:
        for part in content["parts"]:
            part.get("functionCall", {}).pop("id", None)
    users = [{"role": "user", "parts": [{"text": m["content"]}]} for m in (USER, NEXT)]
    return {"contents": [users[0], content, users[1]]}


ECHOES = {
    "openai_chat": chat_echo,
    "anthropic": anthropic_echo,
    "openai_responses": responses_echo,
    "gemini": gemini_echo,
}


@pytest.mark.parametrize("name", list(BY_NAME))
@given(text=reply_texts, thought=st.booleans(), habits=client_habits)
@example(text=f" Look.\n{CALL} and\n", thought=True, habits=set())
@example(text=f" {CALL}\n\n{CALL}\n", thought=False, habits={"blocks", "numbers"})
@example(text="\n", thought=False, habits={"blocks"})
@example(text="", thought=True, habits={"no reasoning", "blocks"})
def test_every_reply_is_known_again(name, text, thought, habits):
    text = f"<think>\nhm, {text}\n</think>\n\n{text}" if thought else text
    reply = reply_to(text, BY_NAME[name].call_prefix)
    recorded = canonical_reply(reply)
    request = BY_NAME[name].read(wire_echo(name, reply, habits))
    messages, known = restored(book_with(recorded), *request.messages[:-1])
    assert messages == [USER, recorded]
    assert known in (["as_sent"], ["restored"])


@pytest.mark.anyio
async def test_text_after_a_call_is_rendered_where_it_was_sampled(tmp_path):
    text = f"Look.\n{CALL}\n and wait. "
    engine = ScriptedEngine(text, "done")
    async with in_process(engine, RENDERER, tmp_path) as gateway:
        client = await gateway.open()
        reply = await client.chat.completions.create(
            model="any", messages=[USER], tools=[TOOL]
        )
        message = reply.choices[0].message
        await client.chat.completions.create(
            model="any",
            messages=[
                USER,
                message.model_dump(exclude_none=True),
                {
                    "role": "tool",
                    "tool_call_id": message.tool_calls[0].id,
                    "content": "",
                },
            ],
            tools=[TOOL],
        )
        shown = await gateway.session(client)
        log = read_log(gateway.log.path)
    assert message.content == "Look.\n\n and wait. "
    assert shown["echo"] == {"as_sent": 0, "restored": 1, "new": 0}
    links = tk.link(log)
    assert links["parent"].to_pylist() == [None, 0]
    assert tk.classify_drift(log, links)["size"].to_pylist() == [0]


def test_a_template_that_wants_calls_gets_them():
    """One that refuses a tool's message with no call before it."""
    strict = AS_STRING.replace(
        "{%- for message in messages -%}",
        "{%- for message in messages -%}{%- if message.role == 'tool' and not "
        "loop.previtem.tool_calls %}{{ raise_exception('no call') }}{% endif -%}",
    )
    message = canonical_reply(reply_to(f"{CALL} and"))
    assert "sampled" in message
    result = {"role": "tool", "content": "", "tool_call_id": "x"}
    renderer = byte_renderer(strict)
    text = renderer.decode(rendered(renderer, [message, result], None), ended=False)
    assert '{"n":  1.50e1}' in text


CALLS = calling("", "{}", "{}", ids=["x", "y"])


def result(call_id, text="done"):
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def test_results_come_in_the_order_of_their_calls():
    reply = calling("", "{}", "{}", ids=["a", "b"])
    book = book_with(reply)
    got = book.restore([USER, CALLS, result("y", "second"), result("x", "first")])
    # with the ids that the model's calls have
    assert got.messages[2:] == [result("a", "first"), result("b", "second")]
    # those of an assistant's message that was not sampled, too
    got = Conversation().restore([USER, CALLS, result("y"), result("x")])
    assert [message["tool_call_id"] for message in got.messages[2:]] == ["x", "y"]


def test_a_result_that_is_sent_again_stays():
    """Gemini CLI 0.61 sends each twice once it resumes a session."""
    twice = [result("x"), result("y"), result("x"), result("y")]
    got = Conversation().restore([USER, CALLS, *twice])
    assert got.messages[2:] == [result("x")] * 2 + [result("y")] * 2


@cases(
    "messages, where, rule",
    {
        "another id": ([CALLS, result("z")], 2, "its calls: x, y"),
        "one only": ([CALLS, result("x")], 2, "'y' of the same reply"),
        "two of one": ([CALLS, result("x"), result("x", "no")], 3, "another result"),
        "no call": ([result("x")], 1, "no reply with a call"),
        "too late": (
            [CALLS, result("x"), result("y"), NEXT, result("x")],
            5,
            "no reply with a call",
        ),
        "a reply without calls": ([said("a"), result("x")], 2, "its calls: none"),
    },
)
def test_results_that_belong_to_no_call(messages, where, rule):
    with pytest.raises(GatewayError, match=rule) as caught:
        Conversation().restore([USER, *messages])
    assert caught.value.status == 400
    assert caught.value.param == f"messages[{where}].tool_call_id"


def test_calls_without_any_result_may_stay_so():
    """A user can interrupt them."""
    got = Conversation().restore([USER, CALLS, NEXT])
    assert len(got.messages) == 3


def test_a_call_of_another_tool_is_another_reply():
    book = book_with(calling("", "{}"))
    other = json.loads(json.dumps(calling("", "{}", ids=["z"])))
    assert restored(book, USER, other)[1] == ["restored"]
    other["tool_calls"][0]["function"]["name"] = "g"
    assert restored(book, USER, other)[1] == ["new"]


def test_half_a_character_of_a_client_is_replaced():
    """No tokenizer and no log has one."""
    got = Conversation().restore(
        [{"role": "user", "content": "a\ud83d"}, said("\ude00")]
    )
    assert [message["content"] for message in got.messages] == ["a\ufffd", "\ufffd"]
    assert "\\ud" not in "".join(record.body for record in got.logged)


def test_what_the_latest_request_had_is_kept_where_nothing_changed():
    book, reply = Conversation(), said("Yes.")
    first = book.restore([USER, reply, NEXT])
    again = book.restore([USER, reply, NEXT])
    assert again.places == first.places
    # a reply that is recorded meanwhile is known from then on
    remember(book, first.places[0].position, reply)
    third = book.restore([USER, reply, NEXT])
    assert third.places[0] is first.places[0]
    assert [place.known for place in third.places] == [None, "as_sent", None]
    assert third.messages == first.messages
    book.release()
    assert book.restore([USER]).places[0] is not first.places[0]


@given(st.data())
def test_a_conversation_that_is_known_is_restored_as_if_it_were_not(data):
    """Whatever was recorded between two requests."""
    books, talks = [Conversation(), Conversation()], [[USER]]
    texts = st.sampled_from(("Yes.", "No.", "Yes. "))
    for turn in range(data.draw(st.integers(1, 6))):
        talk = data.draw(st.sampled_from(talks))
        # a client keeps its messages, or writes them anew
        talk = talk if data.draw(st.booleans()) else [dict(one) for one in talk]
        books[1]._requests = []
        found = [book.restore(talk) for book in books]
        assert found[0].messages == found[1].messages
        assert found[0].position == found[1].position
        facts = [
            [(p.known, p.tool, p.node and p.node.turn) for p in one.places]
            for one in found
        ]
        assert facts[0] == facts[1]
        reply = said(data.draw(texts))
        for book in books:
            remember(book, found[0].position, reply, turn=turn)
        others = [[], [said("No.")], [NEXT], [said("Yes."), said("No."), NEXT]]
        talks.append([*talk, reply, *data.draw(st.sampled_from(others))])
        talks.append([*talk, said(data.draw(texts)), NEXT])
