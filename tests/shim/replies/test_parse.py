"""What the parser takes for a call, and that nothing sampled gets lost."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.shim.fakes import parse_reply
from tests.strategies import good_calls, plain_texts
from trajkit_shim.chat.request import ToolCall


def taken(text: str) -> tuple[str, tuple[ToolCall, ...], bool]:
    parsed = parse_reply(text)
    return parsed.text, tuple(parsed.calls), parsed.ill_formed


def block(name: str = "bash", arguments: str = "{}") -> str:
    call = '{"name": ' + json.dumps(name) + ', "arguments": ' + arguments + "}"
    return f"<tool_call>\n{call}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("", ("", (), False), id="nothing"),
        pytest.param(" just text\n", (" just text\n", (), False), id="text"),
        pytest.param(
            block(arguments='{"a":  1.50}'),
            ("", (ToolCall("bash", '{"a":  1.50}'),), False),
            id="arguments as they were sampled",
        ),
        pytest.param(
            f"Look. \n{block()} \ndone ",
            ("Look. \n \ndone ", (ToolCall("bash", "{}"),), False),
            id="text on both sides",
        ),
        pytest.param(
            f"{block('a')}\n{block('b')} \n\t{block('a')}",
            (
                "",
                (ToolCall("a", "{}"), ToolCall("b", "{}"), ToolCall("a", "{}")),
                False,
            ),
            id="white space between calls is their frame",
        ),
        pytest.param(
            f"{block('a')} then {block('b')}",
            (" then ", (ToolCall("a", "{}"), ToolCall("b", "{}")), False),
            id="text between calls",
        ),
        pytest.param(
            f"\n{block()}\n",
            ("\n\n", (ToolCall("bash", "{}"),), False),
            id="white space around calls",
        ),
        pytest.param(
            '<tool_call>{"arguments":{"x":"</tool_call>"},"id":[1],"name":"f"}'
            "</tool_call>",
            ("", (ToolCall("f", '{"x":"</tool_call>"}'),), False),
            id="an end marker inside a string, fields in another order",
        ),
        pytest.param(
            '<tool_call>{"name": "now"}</tool_call>',
            ("", (ToolCall("now", "{}"),), False),
            id="no arguments",
        ),
        pytest.param(
            '<tool_call>{"name": "caf\\u00e9", "arguments": {}}</tool_call>',
            ("", (ToolCall("café", "{}"),), False),
            id="an escaped name",
        ),
        pytest.param(
            f"<tool_call> {block()}",
            ("<tool_call> ", (ToolCall("bash", "{}"),), True),
            id="a call after a marker that opens none",
        ),
        pytest.param(
            f"{block('a')}\n<tool_call>no\n{block('b')}",
            ("\n<tool_call>no\n", (ToolCall("a", "{}"), ToolCall("b", "{}")), True),
            id="white space beside a broken call is kept",
        ),
        pytest.param("a </tool_call> b", ("a </tool_call> b", (), False), id="end"),
    ],
)
def test_parse_reply(text, expected):
    assert taken(text) == expected


@given(st.lists(st.tuples(plain_texts, good_calls)), plain_texts)
def test_every_call_is_found_and_all_other_text_is_kept(pairs, last):
    text = "".join(said + call for said, call in pairs) + last
    kept = [
        said for k, (said, _) in enumerate(pairs) if k == 0 or said.strip(" \t\n\r")
    ]
    parsed = parse_reply(text)
    assert parsed.text == "".join([*kept, last])
    assert not parsed.ill_formed
    rebuilt = [block(call.name, call.arguments) for call in parsed.calls]
    assert rebuilt == [call for _, call in pairs]


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "rest"),
    [
        pytest.param("hello", False, None, "hello", id="none"),
        pytest.param("<think>\nhm \n</think>\n\n a\n", False, "hm", " a\n", id="some"),
        pytest.param(" <think>hm</think>", False, "hm", "", id="nothing else"),
        pytest.param("<think>\n\n</think>\n\na", False, None, "a", id="empty"),
        pytest.param("<think>hm, <tool_call>", False, "hm, <tool_call>", "", id="cut"),
        pytest.param(
            "a <think>b</think>", False, None, "a <think>b</think>", id="late"
        ),
        pytest.param("hm\n</think>\n\na", True, "hm", "a", id="opened by the prompt"),
        pytest.param("hm", True, "hm", "", id="opened and never closed"),
        pytest.param(
            "</think>a</think>b", True, None, "a</think>b", id="closed at once"
        ),
    ],
)
def test_reasoning(text, opened, reasoning, rest):
    for tools in (None, []):
        parsed = parse_reply(text, tools, opened=opened)
        assert (parsed.reasoning, parsed.sampled) == (reasoning, rest)
        assert parsed.text == rest


@pytest.mark.parametrize("tools", [None, []])
def test_calls_are_looked_for_where_tools_were_offered(tools):
    parsed = parse_reply(f"<think>{block()}</think>{block()}", tools)
    assert len(parsed.calls) == (tools is not None)
    assert parsed.reasoning == block()
