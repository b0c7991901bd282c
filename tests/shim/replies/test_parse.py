"""What the parser takes for a call, and that nothing sampled gets lost."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.shim.fakes import cases, parse_reply
from tests.strategies import good_calls, plain_texts
from trajkit_shim.chat.request import ToolCall


def taken(text: str) -> tuple[str, tuple[ToolCall, ...], bool]:
    parsed = parse_reply(text)
    return parsed.text, tuple(parsed.calls), parsed.ill_formed


def block(name: str = "bash", arguments: str = "{}") -> str:
    call = '{"name": ' + json.dumps(name) + ', "arguments": ' + arguments + "}"
    return f"<tool_call>\n{call}\n</tool_call>"


@cases(
    "text, expected",
    {
        "nothing": ("", ("", (), False)),
        "text": (" just text\n", (" just text\n", (), False)),
        "arguments as they were sampled": (
            block(arguments='{"a":  1.50}'),
            ("", (ToolCall("bash", '{"a":  1.50}'),), False),
        ),
        "text on both sides": (
            f"Look. \n{block()} \ndone ",
            ("Look. \n \ndone ", (ToolCall("bash", "{}"),), False),
        ),
        "white space between calls is their frame": (
            f"{block('a')}\n{block('b')} \n\t{block('a')}",
            (
                "",
                (ToolCall("a", "{}"), ToolCall("b", "{}"), ToolCall("a", "{}")),
                False,
            ),
        ),
        "text between calls": (
            f"{block('a')} then {block('b')}",
            (" then ", (ToolCall("a", "{}"), ToolCall("b", "{}")), False),
        ),
        "white space around calls": (
            f"\n{block()}\n",
            ("\n\n", (ToolCall("bash", "{}"),), False),
        ),
        "an end marker inside a string, fields in another order": (
            '<tool_call>{"arguments":{"x":"</tool_call>"},"id":[1],"name":"f"}'
            "</tool_call>",
            ("", (ToolCall("f", '{"x":"</tool_call>"}'),), False),
        ),
        "no arguments": (
            '<tool_call>{"name": "now"}</tool_call>',
            ("", (ToolCall("now", "{}"),), False),
        ),
        "an escaped name": (
            '<tool_call>{"name": "caf\\u00e9", "arguments": {}}</tool_call>',
            ("", (ToolCall("café", "{}"),), False),
        ),
        "a call after a marker that opens none": (
            f"<tool_call> {block()}",
            ("<tool_call> ", (ToolCall("bash", "{}"),), True),
        ),
        "white space beside a broken call is kept": (
            f"{block('a')}\n<tool_call>no\n{block('b')}",
            ("\n<tool_call>no\n", (ToolCall("a", "{}"), ToolCall("b", "{}")), True),
        ),
        "end": ("a </tool_call> b", ("a </tool_call> b", (), False)),
    },
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


@cases(
    "text, opened, reasoning, rest",
    {
        "none": ("hello", False, None, "hello"),
        "some": ("<think>\nhm \n</think>\n\n a\n", False, "hm", " a\n"),
        "nothing else": (" <think>hm</think>", False, "hm", ""),
        "empty": ("<think>\n\n</think>\n\na", False, None, "a"),
        "cut": ("<think>hm, <tool_call>", False, "hm, <tool_call>", ""),
        "late": ("a <think>b</think>", False, None, "a <think>b</think>"),
        "opened by the prompt": ("hm\n</think>\n\na", True, "hm", "a"),
        "opened and never closed": ("hm", True, "hm", ""),
        "closed at once": ("</think>a</think>b", True, None, "a</think>b"),
    },
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
