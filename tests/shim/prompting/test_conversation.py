"""Replies that come back: restored as they were sampled, or new."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.shim.clients import BODIES, BY_NAME, FIELDS, USER, saying
from tests.shim.fakes import (
    called,
    cases,
    parse_reply,
    raises,
    remember,
    said,
    sampled_call,
    tool,
    user,
)
from tests.strategies import client_habits, reply_texts
from trajkit_shim.chat.request import Parsed, ToolCall, Usage, make_reply
from trajkit_shim.errors import GatewayError
from trajkit_shim.prompting.conversation import Conversation
from trajkit_shim.protocols.base import encode

NEXT = user("and?")
CALL = sampled_call(arguments='{"n":  1.50e1}')
GIVEN = {
    "model": "m",
    "usage": Usage(prompt_tokens=5, output_tokens=3, cached_tokens=0),
}


def book_with(*replies, messages=(USER,)):
    """A session in which these were sampled after those messages."""
    book = Conversation()
    for reply in replies:
        remember(book, book.restore(list(messages)).position, reply)
    return book


def calling(text, *arguments, ids="ab", **fields):
    given = zip(ids, arguments, strict=False)
    calls = [called(id_, arguments=each) for id_, each in given]
    return said(text, tool_calls=calls, **fields)


def thinking(text, thought):
    return said(text, reasoning_content=thought)


def restored(book, *messages):
    got = book.restore([*messages, NEXT])
    return got.messages[:-1], [p.node is not None for p in got.places if p.is_reply]


BIG = '{"n": 12345678901234567%s}'
calls = partial(calling, "")
NUMBERS = '{"a":1000,"b":[1.5],"c":true}', '{ "b": [1.50], "a": 1.0e3,\n"c": true}'


@cases(
    "sent, reply",
    {
        "trimmed": (said("Done"), said(" Done\n")),
        "other white space": (said("a b"), said("a\n\nb")),
        "reasoning left out": (said("a"), thinking("a", "hm")),
        "reasoning with a space": (thinking("a", "hm "), thinking("a", "hm")),
        "numbers written otherwise": (*map(calls, NUMBERS),),
        "a number beyond a double": (calls(BIG % "000"), calls(BIG % 890)),
        "text after a call": (calling("ab", "{}"), calling("a\nb", "{}")),
        "ids of the client's own": (calls("{}", "{}", ids="xy"), calls("{}", "{}")),
        "escapes": (calls('{"a": "\\u00e9"}'), calls('{"a": "é"}')),
    },
)
def test_what_is_restored(sent, reply):
    book = book_with(reply)
    assert restored(book, USER, sent) == ([USER, reply], [True])
    assert restored(book, USER, reply) == ([USER, reply], [True])


@cases(
    "sent, reply",
    {
        "other text": (said("Done!"), said("Done.")),
        "other reasoning": (thinking("a", "x"), thinking("a", "y")),
        "reasoning of its own": (thinking("a", "x"), said("a")),
        "arguments": (calls('{"a": 2}'), calls('{"a": 1}')),
        "a type": (calls('{"a": "1"}'), calls('{"a": 1}')),
        "arguments of no JSON": (calls("{"), calls("{}")),
        "arguments too deep": (calls("[" * 100_000), calls("{}")),
        "one call more": (calls("{}", "{}"), calls("{}")),
        "a call left out": (said(""), calls("{}")),
        "a call of another tool": (said(tool_calls=[called("a", "g")]), calls("{}")),
        "text left out": (calls("{}"), calling("Look.", "{}")),
        "calls in another order": (calls("{}", "{}", ids="ba"), calls("{}", "{}")),
    },
)
def test_what_is_new(sent, reply):
    assert restored(book_with(reply), USER, sent) == ([USER, sent], [False])


def test_of_replies_that_look_alike_it_is_the_latest():
    """The client may never have got the first one, and asked again."""
    replies = first, second = thinking("a", "x"), thinking("a", "y")
    for latest in (second, first):
        # one that is sampled again is the latest, too
        book = book_with(*replies, latest)
        assert restored(book, USER, said("a")) == ([USER, latest], [True])
        assert restored(book, USER, first) == ([USER, first], [True])


def test_the_place_tells_replies_apart():
    book, other = book_with(said("Done")), user("another")
    remember(book, book.restore([other]).position, said("Done\n"))
    assert restored(book, USER, said("Done "))[0][1] == said("Done")
    assert restored(book, other, said("Done "))[0][1] == said("Done\n")
    # elsewhere nobody can tell which one it is
    assert restored(book, NEXT, said("Done ")) == ([NEXT, said("Done ")], [False])


def test_one_reply_split_into_two_messages():
    reply = calling("Look.", '{"a": 1}', "{}", reasoning_content="hm")
    book = book_with(reply)
    sent = [thinking("Look.", "hm")]
    sent += [said(tool_calls=[call]) for call in reply["tool_calls"]]
    assert restored(book, USER, *sent) == ([USER, reply], [True])
    # and two replies stay two
    second = said("Well.")
    remember(book, book.restore([USER, reply]).position, second)
    both = ([USER, reply, second], [True, True])
    assert restored(book, USER, *sent, second) == both


# What a client does with a message on its way back, by protocol, after its habits


def chat_echo(message, habits):
    if "no reasoning" in habits:
        message.pop("reasoning_content", None)
    if "blocks" in habits and message["content"]:
        message["content"] = [{"type": "text", "text": message["content"]}]
    return [message]


def anthropic_echo(blocks, habits):
    if "no reasoning" in habits:
        blocks = [block for block in blocks if block["type"] != "thinking"]
    if "blocks" in habits:
        blocks = [{"type": "text", "text": ""}, *blocks]
        blocks[-1]["cache_control"] = {"type": "ephemeral"}
    elif [block["type"] for block in blocks] == ["text"]:
        blocks = blocks[0]["text"]
    return [said(blocks)]


def responses_echo(items, habits):
    for item in items:
        if item["type"] == "reasoning" and "no reasoning" in habits:
            item["content"] = None
        if "blocks" in habits:
            del item["id"]
    return items


def gemini_echo(parts, habits):
    if "no reasoning" in habits:
        parts = [part for part in parts if not part.get("thought")]
    if "blocks" in habits:
        for part in parts:
            part.get("functionCall", {}).pop("id", None)
    return [{"role": "model", "parts": parts}]


# by protocol, too: what of an answer is sent back
ECHOES = {
    "openai_chat": (lambda body: body["choices"][0]["message"], chat_echo),
    "anthropic": (lambda body: body["content"], anthropic_echo),
    "openai_responses": (lambda body: body["output"], responses_echo),
    "gemini": (lambda body: body["candidates"][0]["content"]["parts"], gemini_echo),
}


def javascript(text):
    """A number as JavaScript writes it."""
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 1e21 else number


@pytest.mark.parametrize("name", ECHOES)
@given(text=reply_texts, thought=st.booleans(), habits=client_habits)
@example(text=f" Look.\n{CALL} and\n", thought=True, habits=set())
@example(text=f" {CALL}\n\n{CALL}\n", thought=False, habits={"blocks", "numbers"})
@example(text="\n", thought=False, habits={"blocks"})
@example(text="", thought=True, habits={"no reasoning", "blocks"})
def test_every_reply_is_known_again(name, text, thought, habits):
    text = f"<think>\nhm, {text}\n</think>\n\n{text}" if thought else text
    protocol = BY_NAME[name]
    given = {**GIVEN, "call_prefix": protocol.call_prefix}
    reply = make_reply(parse_reply(text, []), "stop", **given)
    body = json.loads(encode(protocol.write(reply, SimpleNamespace(namespaces={}))))
    if "numbers" in habits:
        body = json.loads(json.dumps(body), parse_float=javascript)
    recorded, (answer, echo) = reply.message, ECHOES[name]
    talk = [saying(name, "hi"), *echo(answer(body), habits), saying(name, "and?")]
    request = protocol.read({**BODIES[name], FIELDS[name]: talk})
    messages, known = restored(book_with(recorded), *request.messages[:-1])
    assert messages == [USER, recorded]
    assert known == [True]


# Results

CALLS = calling("", "{}", "{}", ids=["x", "y"])


def test_results_of_calls_with_one_sampled_id_are_told_apart():
    parts = (ToolCall("f", "{}", "x"), ToolCall("f", "{}", "x"), ToolCall("f", "{}"))
    reply = make_reply(Parsed(parts=parts), "stop", **GIVEN)
    ids = [call.call_id for call in reply.calls]
    assert ids[0] == "x"
    results = [tool(call_id, f"{n}") for n, call_id in enumerate(ids)]
    sent = [USER, reply.message, *results]
    assert book_with(reply.message).restore(sent).messages == sent


def test_results_come_in_the_order_of_their_calls():
    reply = calling("", "{}", "{}", ids=["a", "b"])
    sent = [USER, CALLS, tool("y", "second"), tool("x", "first")]
    # with the ids that the model's calls have
    got = book_with(reply).restore(sent)
    assert got.messages[1:] == [reply, tool("a", "first"), tool("b", "second")]
    for sent, expected in (
        # those of an assistant's message that was not sampled, too
        ([tool("y"), tool("x")], [tool("x"), tool("y")]),
        # Gemini CLI 0.61 sends each twice once it resumes a session
        ([tool("x"), tool("y")] * 2, [tool("x")] * 2 + [tool("y")] * 2),
        # a user can interrupt calls
        ([NEXT], [NEXT]),
    ):
        assert Conversation().restore([USER, CALLS, *sent]).messages[2:] == expected


@cases(
    "messages, where, rule",
    {
        "another id": ([CALLS, tool("z")], 2, "its calls: x, y"),
        "one only": ([CALLS, tool("x")], 2, "'y' of the same reply"),
        "two of one": ([CALLS, tool("x"), tool("x", "no")], 3, "another result"),
        "no call": ([tool("x")], 1, "no reply with a call"),
        "too late": ([CALLS, tool("x"), tool("y"), NEXT, tool("x")], 5, "no reply"),
        "a reply without calls": ([said("a"), tool("x")], 2, "its calls: none"),
    },
)
def test_results_that_belong_to_no_call(messages, where, rule):
    param = f"messages[{where}].tool_call_id"
    with raises(GatewayError, rule, status=400, param=param):
        Conversation().restore([USER, *messages])


def test_what_the_latest_request_had_is_kept_where_nothing_changed():
    book, reply = Conversation(), said("Yes.")
    first = book.restore([USER, reply, NEXT])
    again = book.restore([USER, reply, NEXT])
    assert again.places[0] is first.places[0]
    # a reply that is recorded meanwhile is known from then on
    remember(book, first.places[0].position, reply)
    third = book.restore([USER, reply, NEXT])
    assert [place.node is not None for place in third.places] == [False, True, False]
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
            [(p.tool, p.node and p.node.turn) for p in one.places] for one in found
        ]
        assert facts[0] == facts[1]
        reply = said(data.draw(texts))
        for book in books:
            remember(book, found[0].position, reply, turn=turn)
        others = [[], [said("No.")], [NEXT], [said("Yes."), said("No."), NEXT]]
        talks.append([*talk, reply, *data.draw(st.sampled_from(others))])
        talks.append([*talk, said(data.draw(texts)), NEXT])


def test_a_reply_that_is_sampled_again_is_of_its_latest_turn():
    book, replies, talk = Conversation(), [said("Yes."), said("No.")], [USER]
    for turn, reply in enumerate(replies):
        remember(book, book.restore(talk).position, reply, turn=turn)
        talk = [*talk, reply, NEXT]
    book.restore(talk)
    remember(book, book.restore([USER]).position, replies[0], turn=2)
    turns = [place.node.turn for place in book.restore(talk).places if place.node]
    assert turns == [2, 1]
