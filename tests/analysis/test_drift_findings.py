"""Drift with a tokenizer: where the two sides differ, and why."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

import trajkit as tk
from tests.made_tables import in_delta_form, link_by, turns_table
from tests.oracles import rows as reference
from tests.shim.fakes import byte_tokenizer
from tests.strategies import runs_apart, sessions
from trajkit import _core, schema
from trajkit.analysis.drift import json_objects
from trajkit.analysis.tokenizer import Codec
from trajkit.errors import ArgumentError, LayoutError
from trajkit.turns.sessions import Sessions

ROOT = Path(__file__).parents[2]
TOKENIZER = Tokenizer.from_file(
    str(ROOT / "shim/trajkit_shim/engines/embedded/tokenizer.json")
)
END = "<|im_end|>"
HEAD = (
    "<|im_start|>system\nYou are an agent.<|im_end|>\n"
    "<|im_start|>user\nMend it.<|im_end|>\n<|im_start|>assistant\n"
)
AFTER = (
    "\n<|im_start|>user\n<tool_response>\nok then\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n"
)
CALL = '<tool_call>\n{{"name": "bash", "arguments": {}}}\n</tool_call>'.format


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def pieces(*texts):
    """Each text encoded for itself, as a model might sample it."""
    return [token for text in texts for token in ids(text)]


def turn(prompt, output=(), **fields):
    return {
        "session_id": "s",
        "prompt_ids": list(prompt),
        "output_ids": list(output) or [1],
        "output_logprobs": None,
        "prompt_messages": None,
        "response_message": None,
        "finish_reason": "stop",
        "ill_formed": None,
        **fields,
    }


def previous(*turns):
    table = tk.from_records(list(turns))
    return table, link_by(table, "previous")


def explained(*turns, tokenizer=TOKENIZER):
    return tk.analysis.explain_drift(*previous(*turns), tokenizer).to_pylist()


def texts(findings):
    return [(f["cause"], f["path_text"], f["prompt_text"]) for f in findings]


THOUGHT = "<think>\nThe fault is in the second line, so I mend that.\n</think>\n\n"


STRING = '"{\\"a\\": 1}"'
THOUGHTS = "The fault is in the second line, so I mend that", "A fault"
FRAME = "<think>\n\n</think>\n\n"
I_MEND = "I mend that line."
SPELLED = "<|im_end|>b\nThen I go on to say this."
OLD = ' {"b": 1.50, "a":  "caf\\u00e9 x"}'
NEW = ' {"a": "café x", "b": 1.5}'
NOW = " now and then at the test."


@pytest.mark.parametrize(
    ("said", "shown", "cause", "was", "now"),
    [
        (["Let me re", "turn."], "Let me return.", "same_text", " return", " return"),
        ("It holds. \n", "It holds.", "white_space", " \n", ""),
        (THOUGHT + I_MEND, I_MEND, "reasoning_dropped", THOUGHT, ""),
        (THOUGHT + I_MEND, FRAME + I_MEND, "reasoning_dropped", THOUGHT[7:-10], "\n\n"),
        (THOUGHT + "A", "<think>\nA fault.\n</think>\n\nA", "other_text", *THOUGHTS),
        (I_MEND, FRAME + I_MEND, "template", "", FRAME),
        (CALL(OLD[1:]), CALL(NEW[1:]), "tool_arguments", OLD[3:-1], NEW[3:-1]),
        (CALL('{"a":  1}'), CALL('{"a": 1}'), "tool_arguments", " ", ""),
        (CALL(STRING), CALL('{"a": 1}'), "tool_arguments", " " + STRING, ' {"a": 1}'),
        (CALL('{"a": True}'), CALL('{"a": true}'), "boolean", " True", " true"),
        (["(", "T", "rue", ")"], "(true)", "boolean", "T", "t"),
        (
            "Hm. \n So I stop.",
            "Hm. So I go.",
            "other_text",
            " \n So I stop",
            " So I go",
        ),
        ("all>\nFalse\n", "all>\nfalse\n", "boolean", "False", "false"),
        (CALL('{"a": 2}'), CALL('{"a": 3}'), "other_text", " 2", " 3"),
        ("I look at the code" + NOW, "I look at the code", "truncated", NOW, ""),
        (["a<", "|im_end|", SPELLED[9:]], "a" + SPELLED, "special_tokens", SPELLED, ""),
        ("Let me look.", "No response.", "other_text", "Let me look", "No response"),
    ],
)
def test_causes_by_hand(said, shown, cause, was, now):
    said = pieces(*([said] if isinstance(said, str) else said)) + ids(END)
    turns = turn(ids(HEAD), said), turn(ids(HEAD + shown + END + AFTER))
    assert texts(explained(*turns)) == [(cause, was, now)]


def test_a_prompt_that_ends_is_truncated():
    turns = turn(ids(HEAD), ids("Let me look." + END)), turn(ids(HEAD + "Let me"))
    (found,) = explained(*turns)
    assert found["cause"] == "truncated"
    assert found["path_text"] == " look.<|im_end|>"
    assert found["prompt_start"] == found["prompt_stop"] == len(ids(HEAD + "Let me"))


def test_several_findings_of_one_pair():
    """A first reply without its reasoning, a second one in other tokens."""
    first = THOUGHT + "I mend that line, and then I look at it again." + END
    second = pieces("It holds now, so I re", "turn. \n", END)
    held = ids(HEAD + first + AFTER)
    back = ids(HEAD + first.removeprefix(THOUGHT) + AFTER)
    shown = "It holds now, so I return." + END + AFTER
    found = explained(turn(held, second), turn(back + ids(shown)))
    assert [f["cause"] for f in found] == [
        "reasoning_dropped",
        "same_text",
        "white_space",
    ]
    assert [f["finding"] for f in found] == [0, 1, 2]


KNOWN = [{"role": "user", "content": "u"}]
REPLY = {"role": "assistant", "content": "a"}
OTHER = {"role": "assistant", "content": "b"}
NEXT = {"role": "user", "content": "v"}


@pytest.mark.parametrize(
    ("reply", "messages", "cause"),
    [
        (REPLY, [*KNOWN, REPLY, NEXT], "template"),
        (REPLY, [*KNOWN, OTHER, NEXT], "rewritten"),
        (REPLY, [NEXT], "rewritten"),
        (None, [*KNOWN, OTHER, NEXT], "other_text"),
        (REPLY, None, "other_text"),
    ],
)
def test_messages_tell_who_changed_the_text(reply, messages, cause):
    turns = (
        turn(
            ids(HEAD),
            ids("Let me look at it." + END),
            prompt_messages=KNOWN,
            response_message=reply,
        ),
        turn(ids(HEAD + "It is Tuesday." + END + AFTER), prompt_messages=messages),
    )
    table, links = previous(*turns)
    for form in (table, in_delta_form(table, lambda options: options[-1])):
        (found,) = tk.analysis.explain_drift(form, links, TOKENIZER).to_pylist()
        assert found["cause"] == cause


def test_half_a_character_is_other_text():
    tokenizer = byte_tokenizer()
    e, tail = (tokenizer.encode(text) for text in ("é", "abcdefgh<|im_end|>"))
    prompt = tokenizer.encode("x")
    held = turn(prompt, [*e, *tail])
    assert not explained(held, turn([*prompt, *e, *tail]), tokenizer=tokenizer)
    shown = turn([*prompt, e[0], e[0], *tail])
    (found,) = explained(held, shown, tokenizer=tokenizer)
    assert found["cause"] == "other_text"


class Numbers:
    """A tokenizer whose token is its number; those that 7 divides are special."""

    def encode(self, text, *, add_special_tokens):
        raise AssertionError("drift is found without encoding")

    def decode(self, ids, *, skip_special_tokens):
        return " ".join(str(i) for i in ids if i % 7 or not skip_special_tokens)


@pytest.mark.parametrize(
    ("held", "shown", "expected"),
    [
        ([9, 10, 7], [9, 11, 7], ("other_text", " 10", " 11")),
        ([9, 10], [9, 7, 10], ("special_tokens", "", " 7")),
    ],
)
def test_any_tokenizer_will_do(held, shown, expected):
    found = explained(turn([1], held), turn([1, *shown]), tokenizer=Numbers())
    assert texts(found) == [expected]


@given(
    st.lists(
        st.lists(st.integers(0, 50) | st.sampled_from([2**31 - 1, 7 * 10**8])),
        max_size=4,
    )
)
def test_special_tokens_are_those_that_decoding_leaves_out(runs):
    codec = Codec(Numbers())
    for run in runs:
        found = codec.special(np.array(run, np.int32))
        assert found.tolist() == [token % 7 == 0 for token in run]


@given(sessions(), st.sampled_from(["messages", "tokens", "previous"]))
def test_findings_hold_what_differs_and_nothing_else(turns, route):
    table = turns_table(turns)
    links = link_by(table, route)
    drift = tk.classify_drift(table, links)
    found = tk.analysis.explain_drift(table, links, TOKENIZER, min_run=2)
    assert found.schema.equals(schema.FINDINGS, check_metadata=True)
    found = found.to_pylist()
    of_turn = {t["turn_index"]: t for t in table.to_pylist()}
    for line in drift.to_pylist():
        ours = [f for f in found if f["turn_index"] == line["turn_index"]]
        assert [f["finding"] for f in ours] == list(range(len(ours)))
        assert bool(ours) == (line["size"] > 0)
        parent = of_turn[line["parent"]]
        held = parent["prompt_ids"] + parent["output_ids"]
        prompt = of_turn[line["turn_index"]]["prompt_ids"]
        i = j = 0
        for f in ours:
            assert f["parent"] == line["parent"]
            same = f["path_start"] - i
            assert held[i:][:same] == prompt[j:][:same]
            assert f["prompt_start"] - j == same
            was = held[f["path_start"] : f["path_stop"]]
            now = prompt[f["prompt_start"] : f["prompt_stop"]]
            assert was != now
            i, j = f["path_stop"], f["prompt_stop"]
        if ours:
            assert ours[0]["path_start"] == line["lcp"]
            assert held[i:] == prompt[j:][: len(held) - i]


@given(sessions())
def test_the_cause_of_a_pair_is_that_of_its_first_finding(turns):
    table = turns_table(turns)
    links = link_by(table, "previous")
    plain = tk.classify_drift(table, links)
    refined = tk.classify_drift(table, links, tokenizer=TOKENIZER)
    assert refined.drop_columns("cause").equals(plain.drop_columns("cause"))
    found = tk.analysis.explain_drift(table, links, TOKENIZER).to_pylist()
    first = {f["turn_index"]: f["cause"] for f in found if f["finding"] == 0}
    causes = [first.get(turn, "clean") for turn in refined["turn_index"].to_pylist()]
    assert refined["cause"].to_pylist() == causes
    tk.validate(refined)


@pytest.mark.parametrize("missing", ["encode", "decode"])
@pytest.mark.parametrize("ask", [tk.analysis.explain_drift, tk.classify_drift])
def test_what_is_no_tokenizer_is_refused(missing, ask):
    other = {"encode": "decode", "decode": "encode"}[missing]
    half = type("Half", (), {other: lambda self, given: given})()
    with pytest.raises(ArgumentError, match=f"Half, which has no method {missing}"):
        ask(*previous(turn([1])), tokenizer=half)


@pytest.mark.parametrize(
    "ask", [tk.classify_drift, partial(tk.analysis.explain_drift, tokenizer=TOKENIZER)]
)
def test_a_run_of_no_tokens_is_refused(ask):
    with pytest.raises(ArgumentError, match="min_run=0"):
        ask(*previous(turn([1])), min_run=0)


def test_json_in_text():
    text = 'a {"a": [1, {"b": True}]} {x} {"arguments": "{\\"c\\": 2.0}"} {"open": 1'
    found = [(text[start:stop], value) for start, stop, value in json_objects(text)]
    assert found == [
        ('{"a": [1, {"b": True}]}', '{"a": [1, {"b": true}]}'),
        ('{"arguments": "{\\"c\\": 2.0}"}', '{"arguments": {"c": 2}}'),
    ]
    assert json_objects('{"a":' * 5000) == []


# --- the kernel


def aligned(a, b, special, run):
    out = np.empty((len(a) + 1, 4), np.int64)
    ids = [np.array(side, np.int32) for side in (a, b)]
    borders = [np.append(0, np.cumsum(np.isin(side, special))) for side in ids]
    n = _core.align(*ids, *(one.astype(np.int32) for one in borders), run, out)
    return [tuple(line) for line in out[:n].tolist()]


# a place within the message weighs less than a nearer one beyond its border
FAR = ([1, 2, 3, 6, 6, 6, 7, 8], [4, 7, 8, 0, 2, 3])


@given(runs_apart(), st.integers(1, 4), st.sampled_from([(), (0,), (0, 2)]))
@example(FAR, 2, (0,))
@example(FAR, 2, ())
@example(([0, 1, 2, 3], [0, 1, 7, 7, 2]), 2**63 - 1, ())
def test_differences_are_the_twins(pair, run, special):
    a, b = pair
    assert aligned(a, b, special, run) == reference.align(a, b, special, run)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"run": 0}, "run is 0"),
        ({"out": np.empty((1, 4), np.int64)}, "out has 1"),
        ({"borders_b": np.zeros(1, np.int32)}, "borders_b"),
    ],
)
def test_layouts_that_are_refused(change, match):
    ids, borders = np.array([1, 2], np.int32), np.zeros(3, np.int32)
    given = {"a": ids, "b": ids, "borders_a": borders, "borders_b": borders}
    given |= {"run": 1, "out": np.empty((3, 4), np.int64), **change}
    with pytest.raises(LayoutError, match=match):
        _core.align(**given)


@given(sessions(), st.data())
def test_paths_are_prompt_and_output_in_either_form(turns, data):
    table = turns_table(turns)
    delta = in_delta_form(table, lambda options: data.draw(st.sampled_from(options)))
    for form in (table, delta):
        calls = Sessions.of(form)
        for i, line in enumerate(table.to_pylist()):
            assert calls.prompt(i).tolist() == line["prompt_ids"]
            assert calls.path(i).tolist() == line["prompt_ids"] + line["output_ids"]


@pytest.mark.parametrize(
    ("call", "start", "size", "match"),
    [
        (2, 0, 1, "call is 2"),
        (-1, 0, 1, "call is -1"),
        (0, -1, 1, "1 tokens from -1 on"),
        (0, 2, 2, "2 tokens from 2 on: the path has 3"),
        (0, 2**63 - 1, 1, "the path has 3"),
    ],
)
def test_paths_that_are_refused(call, start, size, match):
    calls = Sessions.of(tk.from_records([turn([1, 2], [3]), turn([1], [3])]))
    forest = calls.forest
    out = np.empty(size, np.int32)
    with pytest.raises(LayoutError, match=match):
        _core.copy_ranges(
            forest.paths,
            np.array([call]),
            np.array([start]),
            np.array([0, size]),
            out,
        )
