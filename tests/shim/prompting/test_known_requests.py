"""Requests that repeat an earlier one, read from where they differ."""

import asyncio
import itertools
import json
import zlib
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests.shim.clients import in_process
from tests.shim.fakes import RENDERER, TOOL, ScriptedEngine
from trajkit_shim.chat import reply as chat_reply
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import parse_object
from trajkit_shim.prompting import known_requests
from trajkit_shim.prompting.known_requests import find_known, read_request
from trajkit_shim.prompting.reply_matching import ReplyIndex
from trajkit_shim.protocols import PROTOCOLS

LONG = "é" + "x" * 8192
BY_NAME = {protocol.name: protocol for protocol in PROTOCOLS}


def user(text):
    return {"role": "user", "content": text}


def gemini_call(name, **fields):
    call = {"functionCall": {"name": name, "args": {"a": 1}, **fields}}
    return {"role": "model", "parts": [call]}


def gemini_result(name):
    result = {"functionResponse": {"name": name, "response": {"output": "x"}}}
    return {"role": "user", "parts": [result]}


# of each protocol: fields before the conversation, after it, and its steps
CONVERSATIONS = {
    "openai_chat": (
        {"model": "m"},
        {"temperature": 0.5},
        [
            [{"role": "system", "content": LONG}, user("a")],
            [
                {"role": "assistant", "content": "b"},
                user([{"type": "text", "text": "c"}]),
            ],
            [{"role": "assistant", "content": "d"}, user("e")],
        ],
    ),
    "anthropic": (
        {"model": "m", "max_tokens": 9},
        {"system": LONG},
        [
            [user("a")],
            [{"role": "assistant", "content": "b"}, user(LONG), user("c")],
            [{"role": "assistant", "content": "d"}, user("e")],
        ],
    ),
    "openai_responses": (
        {"model": "m", "instructions": LONG},
        {"stream": True},
        [
            [user("a")],
            [
                {"role": "assistant", "content": "b"},
                {
                    "type": "function_call",
                    "call_id": "1",
                    "name": "ls",
                    "arguments": "{}",
                },
                {"type": "function_call_output", "call_id": "1", "output": "c"},
            ],
            [{"role": "assistant", "content": "d"}, user("e")],
        ],
    ),
    "gemini": (
        {"systemInstruction": {"parts": [{"text": LONG}]}},
        {"generationConfig": {"temperature": 0.5}},
        [
            [{"role": "user", "parts": [{"text": "a"}]}],
            [gemini_call("ls"), gemini_result("ls")],
            [gemini_call("cat"), gemini_result("cat")],
            [gemini_call("ls", id="own"), gemini_result("ls")],
        ],
    ),
}


def body_of(protocol, before, history, after):
    return json.dumps(
        {**before, BY_NAME[protocol].history: history, **after}, ensure_ascii=False
    ).encode()


class Reader:
    """Reads the requests of a session, and notes what its protocol gets to read."""

    def __init__(self, name):
        self.protocol = BY_NAME[name]
        self.known = []

    def read(self, body, **options):
        """The request, and how many elements of its conversation were read."""
        history, lengths = self.protocol.history, []

        def read(fields):
            lengths.append(len(fields.get(history) or ()))
            return self.protocol.read(fields)

        name = self.protocol.name
        known = find_known(body, name, self.known)
        options = {"known": known, **options}
        request = read_request(body, name, history, read, **options)
        return request, lengths

    def answer(self, request):
        """Keep a request, as the gateway does once it was answered."""
        new = request.chat.messages[len(request.restored.messages) :]
        restored = ReplyIndex().restore(new, request.restored)
        self.known.insert(0, request.answered(restored))


def read_completely(name, body):
    return BY_NAME[name].read(parse_object(body))


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_only_the_new_part_of_a_conversation_is_read(name):
    before, after, steps = CONVERSATIONS[name]
    reader, history, identities = Reader(name), [], set()
    for number, step in enumerate(steps):
        history += step
        body = body_of(name, before, history, after)
        request, lengths = reader.read(body)
        assert lengths == [len(step)]
        assert request.chat == read_completely(name, body)
        # the same bytes, whatever was known of them
        assert request.identity == Reader(name).read(body)[0].identity
        identities.add(request.identity)
        assert body[request.end - 1 : request.end] == b"}"
        reader.answer(request)
        assert len(reader.known[0].marks) == number + 1
    assert len(identities) == len(steps)
    # sent again, without anything new
    request, lengths = reader.read(body)
    assert lengths == [len(steps[-1])]
    assert request.chat == read_completely(name, body)


def outcome(read):
    """The result, and the text of the error if there is one."""
    try:
        return read(), None
    except GatewayError as error:
        return None, str(error)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_changed_byte_anywhere_is_noticed(name):
    before, after, steps = CONVERSATIONS[name]
    reader = Reader(name)
    for n in range(1, len(steps)):
        body = body_of(name, before, [*itertools.chain(*steps[:n])], after)
        reader.answer(reader.read(body)[0])
    body = body_of(name, before, [*itertools.chain(*steps)], after)
    n_read = set()
    # of the long text only some bytes
    for place in (i for i in range(len(body)) if body[i] != ord("x") or i % 4001 == 0):
        other = b"z" if body[place : place + 1] != b"z" else b"y"
        edited = body[:place] + other + body[place + 1 :]
        expected, error = outcome(partial(read_completely, name, edited))
        found, same_error = outcome(partial(reader.read, edited))
        assert same_error == error
        if found is None:
            continue
        request, lengths = found
        n_read.add(lengths[-1])
        assert request.chat == expected
        assert request.identity == Reader(name).read(edited)[0].identity
    assert {len(steps[-1]), len([*itertools.chain(*steps)])} <= n_read


def test_white_space_between_messages():
    first = b'{"messages" : [ {"role":"system","content":"%s"} ,' % LONG.encode()
    first += b'{"role":"user","content":"a"}\n ]}'
    second = first.replace(b"}\n ]}", b'} , {"role":"user","content":"b"}],"stop":"x"}')
    reader = Reader("openai_chat")
    reader.answer(reader.read(first)[0])
    request, lengths = reader.read(second)
    assert lengths == [1]
    assert request.chat == read_completely("openai_chat", second)


def test_fields_before_the_conversation_stay_and_those_after_it_do_not():
    history = [user(LONG)]
    reader = Reader("openai_chat")
    first = body_of("openai_chat", {"temperature": 1}, history, {"stop": "x"})
    reader.answer(reader.read(first)[0])
    second = body_of(
        "openai_chat", {"temperature": 1}, [*history, user("b")], {"seed": 1}
    )
    request, lengths = reader.read(second)
    assert lengths == [1]
    sampling = request.chat.sampling
    assert (sampling.temperature, sampling.stop, sampling.seed) == (1.0, None, 1)
    # a field after it counts if it is there twice
    third = second.replace(b'"seed": 1', b'"temperature": 0, "messages": [%s, %s]')
    third %= 2 * (json.dumps(user("c")).encode(),)
    request, _ = reader.read(third)
    assert request.chat == read_completely("openai_chat", third)
    assert len(request.chat.messages) == 2


def test_another_field_of_that_name_is_not_the_conversation():
    before = {"metadata": {"messages": [user(LONG)]}}
    reader = Reader("openai_chat")
    request, _ = reader.read(body_of("openai_chat", before, [user("a")], {}))
    assert request.end == -1
    restored = ReplyIndex().restore(request.chat.messages)
    assert request.answered(restored) is None


def test_nothing_is_known_of_a_conversation_that_is_there_twice():
    """The last one counts, and is not what the body begins with."""
    reader = Reader("openai_chat")
    first = body_of("openai_chat", {}, [user(LONG)], {})
    twice = first[:-1] + b', "messages": [%s]}' % json.dumps(user("b")).encode()
    request, _ = reader.read(twice)
    assert [message["content"] for message in request.chat.messages] == ["b"]
    restored = ReplyIndex().restore(request.chat.messages)
    assert request.answered(restored) is None


def test_another_system_prompt_after_the_conversation():
    reader = Reader("anthropic")
    before, after, steps = CONVERSATIONS["anthropic"]
    history = [*steps[0], *steps[1]]
    reader.answer(reader.read(body_of("anthropic", before, history, after))[0])
    history += steps[2]
    for system in ("other", LONG + "s", "", LONG):
        body = body_of("anthropic", before, history, {"system": system})
        request, lengths = reader.read(body)
        assert lengths[-1] == (2 if system == LONG else 6)
        assert request.chat == read_completely("anthropic", body)


def test_nothing_is_cut_inside_the_messages_of_an_assistant():
    """One reply may be split into several messages."""
    reader = Reader("openai_chat")
    history = [user(LONG), {"role": "assistant", "content": "a"}]
    request, _ = reader.read(body_of("openai_chat", {}, history, {}))
    restored = ReplyIndex().restore(request.chat.messages)
    assert request.answered(restored) is None


def test_a_long_part_is_not_read_where_only_a_short_one_may_be():
    name, history = "openai_chat", [user(LONG)]
    reader = Reader(name)
    first = body_of(name, {}, history, {})
    reader.answer(reader.read(first)[0])
    history += [{"role": "assistant", "content": "b"}, user("c")]
    second = body_of(name, {}, history, {})
    assert reader.read(second, most=100)[0].chat == read_completely(name, second)
    wrong = body_of(name, {}, [*history, {"role": "nobody"}], {})
    # sent again, invalid, and begun by nothing that is known
    for body in (first, wrong, second.replace(b"x", b"y")):
        assert reader.read(body, most=100)[0] is None
    reader.answer(reader.read(second)[0])
    assert reader.read(second, most=100)[0].chat == read_completely(name, second)


def test_the_same_bytes_may_mean_something_else_in_another_protocol():
    parts = [{"type": "text", "text": text} for text in "ab"]
    history = [user(LONG), {"role": "assistant", "content": parts}, user("c")]
    before = {"max_tokens": 9}
    reader, other = Reader("openai_chat"), Reader("anthropic")
    reader.answer(reader.read(body_of("openai_chat", before, history, {}))[0])
    other.known = reader.known
    body = body_of("anthropic", before, [*history, user("d")], {})
    assert other.read(body)[0].chat == read_completely("anthropic", body)


def parsed(parse, body):
    """The parsed object, or the error."""
    try:
        return parse(body)
    except GatewayError as error:
        return str(error)


def test_a_request_is_parsed_in_parts_as_at_once():
    body = json.dumps(
        {
            "model": "m",
            "messages": ["a ][ \u00e9", {"x": [1, 1.5, "\U0001f600"]}],
            "nested": {"messages": [1]},
            "tools": [{"a": '"messages":['}],
        }
    ).encode()
    results = []

    def in_parts(body):
        fields, _, end = known_requests._parse(body, "messages")
        assert end < 0 or body[end:].lstrip().startswith(b"]")
        return fields

    changes = [b"", *(bytes([byte]) for byte in b'{}[],:"\\u1 d')]
    for place, new in itertools.product(range(len(body)), changes):
        for after in (body[place:], body[place + 1 :]):
            changed = body[:place] + new + after
            results.append(parsed(parse_object, changed))
            assert parsed(in_parts, changed) == results[-1], changed
    assert {type(result) for result in results} == {dict, str}


def test_an_error_names_the_place_in_the_complete_request():
    reader = Reader("openai_chat")
    reader.answer(reader.read(body_of("openai_chat", {}, [user(LONG)], {}))[0])
    history = [user(LONG), user("a"), {"role": "nobody", "content": "b"}]
    with pytest.raises(GatewayError, match=r"messages\[2\]"):
        reader.read(body_of("openai_chat", {}, history, {}))


# Sessions

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command":  "ls"}}\n</tool_call>'
SAMPLING = [{}, {"temperature": 0.5}, {"max_tokens": 500}]

numbers = st.integers(0, 7)
steps = st.one_of(
    # the branch goes on; its client may strip the reply
    st.tuples(st.just("next"), numbers, st.booleans(), st.booleans()),
    st.tuples(st.just("retry"), numbers),
    # a character of a message, replaced or added
    st.tuples(st.just("edit"), numbers, numbers, st.booleans()),
    st.tuples(st.just("back"), numbers, numbers),
    st.tuples(st.just("agent"), st.booleans()),
    st.tuples(st.just("system"), numbers),
    st.tuples(st.just("tools"), numbers),
    st.tuples(st.just("sampling"), numbers, st.booleans()),
)


class Client:
    """Conversations, and the body of each request."""

    def __init__(self):
        self.talks = []
        self.count = itertools.count()
        self._add(LONG)

    def _add(self, system):
        talk = SimpleNamespace(tools=[TOOL], before={}, after={})
        talk.messages = [{"role": "system", "content": system}, self._said()]
        self.talks.append(talk)

    def _said(self):
        return user(f"question {next(self.count)} <|im_end|> é")

    def step(self, kind, number=0, *more):
        """Change a conversation; the one to send."""
        talk = self.talks[int(number) % len(self.talks)]
        if kind == "agent":
            self._add(f"{LONG} of another agent" if number else f"x{LONG}")
            return self.talks[-1]
        if (
            kind in ("next", "back", "edit")
            and talk.messages[-1]["role"] == "assistant"
        ):
            call = talk.messages[-1].get("tool_calls")
            new = self._said()
            if call:
                new = {"role": "tool", "content": "out", "tool_call_id": call[0]["id"]}
            talk.messages = [*talk.messages, new]
        if kind == "next":
            strip, again = more
            last = talk.messages[-2]
            if strip and last["role"] == "assistant" and last["content"]:
                talk.messages[-2] = {**last, "content": last["content"].strip()}
            talk.messages += [self._said()] if again else []
        elif kind == "edit":
            place, same = more
            place %= len(talk.messages)
            old = talk.messages[place]
            text = old["content"] or "-"
            edited = text[: len(text) // 2] + "#" + text[len(text) // 2 + same :]
            talk.messages = [*talk.messages]
            talk.messages[place] = {**old, "content": edited}
        elif kind == "back":
            users = [i for i, m in enumerate(talk.messages) if m["role"] == "user"]
            stop = users[more[0] % len(users)]
            # the other conversation stays
            copy = SimpleNamespace(**vars(talk))
            copy.messages = [*talk.messages[:stop], self._said()]
            self.talks.append(copy)
            return copy
        elif kind == "system":
            changed = {"role": "system", "content": f"{LONG}, changed"}
            talk.messages = [changed, *talk.messages[1:]]
        elif kind == "tools":
            talk.tools = [*talk.tools, TOOL] if len(talk.tools) < 3 else []
        elif kind == "sampling":
            where = "before" if more[0] else "after"
            setattr(talk, where, SAMPLING[(next(self.count)) % 3])
        return talk

    def body(self, talk):
        tools = {"tools": talk.tools} if talk.tools else {}
        return body_of(
            "openai_chat", talk.before, talk.messages, {**talk.after, **tools}
        )

    def took(self, talk, message):
        kept = {
            k: message[k] for k in ("role", "content", "tool_calls") if k in message
        }
        talk.messages = [*talk.messages, kept]


async def run(directory, script, *, known, form):
    """The table of a session's turns, and what it counted."""
    ids = (SimpleNamespace(hex=f"{i:x}".ljust(32, "-")) for i in itertools.count())
    replies = itertools.cycle(["Yes %d.", " \nNo %d\n", CALL + "%d"])
    engine = ScriptedEngine(
        *(reply % i for i, reply in zip(range(40), replies, strict=False)),
        context=1 << 20,
    )
    client = Client()
    fake = SimpleNamespace(uuid4=lambda: next(ids))
    options = {"form": form, "check_prompts": not known}
    with mock.patch.object(chat_reply, "uuid", fake):
        async with in_process(engine, RENDERER, directory, **options) as gateway:
            key = await gateway.open_key(session_id="a")
            talk = client.talks[0]
            for step in [None, *script]:
                talk = talk if step is None else client.step(*step)
                body = client.body(talk)
                if not known:
                    # equal bodies stay equal, and few begin with the same bytes
                    body = b" " * (zlib.crc32(body) % 4096) + body
                reply = await gateway.http.post(
                    "/v1/chat/completions", content=body, headers={"x-session-key": key}
                )
                assert reply.status_code == 200, reply.text
                if step is None or step[0] != "retry":
                    client.took(talk, reply.json()["choices"][0]["message"])
            counted = (await gateway.http.get("/sessions/a")).json()
    gateway.log.close()
    return tk.read_turns(directory), counted


OWN = {"request_id", "started_at", "ended_at", "resend_of"}


@given(st.lists(steps, max_size=12), st.sampled_from(["full", "delta"]))
def test_what_is_known_changes_nothing_that_is_recorded(tmp_path_factory, script, form):
    tables = []
    for known in (True, False):
        directory = tmp_path_factory.mktemp("log")
        tables.append(asyncio.run(run(directory, script, known=known, form=form)))
    (turns, counted), (expected, expected_counts) = tables
    shared = [name for name in turns.column_names if name not in OWN]
    assert turns.select(shared).equals(expected.select(shared))
    assert counted == expected_counts
    for table in (turns, expected):
        tk.validate(table)
    assert resends(turns) == resends(expected)


def resends(turns):
    """Of each turn, the index of the one that it repeats."""
    ids = turns["request_id"].to_pylist()
    return [None if x is None else ids.index(x) for x in turns["resend_of"].to_pylist()]
