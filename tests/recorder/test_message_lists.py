"""A session numbers its messages and shares their lists as the slow twin does."""

import copy
import json
import os
import subprocess
import sys
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import example, given

import trajkit as tk
from tests.oracles.talk import Numbers
from tests.strategies import NAN, heard_calls
from trajkit.errors import InvalidTurnsError
from trajkit.recorder.session import MessageLog
from trajkit.turns.messages import message_key


def suffixes_of(log):
    """The messages of each call that its base does not supply; None: no list of them."""
    counts, numbers = log.suffixes(len(log.calls))
    lengths = counts[:, 1]
    stops = np.cumsum(np.maximum(lengths, 0))
    ends = zip(lengths, stops, strict=True)
    return [None if n < 0 else numbers[stop - n : stop] for n, stop in ends]


def heard(talk, messages, reply, base, counts):
    """Let a call be read and, if it counts, added."""
    read = talk.read(messages, reply, base, len(talk.calls))
    if counts:
        talk.add(read, len(talk.calls))


def said(*values):
    return [{"role": "user", "c": value} for value in values]


@given(heard_calls())
@example([(said(1, True), None, -1, True), (said(True, 1), None, 0, True)])
@example([(said(1), None, -1, True), (said(1.0), None, 0, True)])
@example([(said(0.0), None, -1, True), (said(-0.0), None, 0, True)])
@example([(said(NAN), None, -1, True), (said(float("nan")), None, 0, True)])
@example([(said([1], []), None, -1, True), (said([[1]]), None, 0, True)])
@example([(said("a", {"a": 1}), None, -1, False), (said("a"), None, -1, True)])
def test_messages_are_numbered_and_shared_as_the_twin_does(calls):
    talk, twin, bases = MessageLog(), Numbers(), []
    for messages, reply, base, counts in calls:
        now = copy.deepcopy((messages, reply))
        heard(talk, *now, base, counts)
        for message in [*(now[0] or ()), *([now[1]] if now[1] else ())]:
            message["role"] = "changed afterwards"
        if counts:
            twin.add(*twin.read(messages, reply))
            bases.append(base)
    shares, _, replies = talk.suffixes(len(bases))[0].T
    replies = [None if reply < 0 else reply for reply in replies.tolist()]
    assert replies == twin.replies
    shared = [twin.shared(k, base) for k, base in enumerate(bases)]
    assert shares.tolist() == shared
    for k, suffix in enumerate(suffixes_of(talk)):
        whole = twin.lists[k]
        assert (suffix is None) == (whole is None)
        assert suffix is None or suffix.tolist() == whole[shared[k] :]
    assert [one.body for one in talk.book.messages] == twin.bodies


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(OrderedDict(role="user", content="a"), id="an ordered dict"),
        pytest.param({"role": Text("user"), "content": "a"}, id="a role"),
        pytest.param({"role": "user", Text("content"): "a"}, id="a key"),
        pytest.param({"role": "user", "content": Text("a")}, id="a text"),
    ],
)
def test_types_that_only_extend_json_s_are_taken_for_them(message):
    recorder = tk.Recorder()
    plain = {"role": "user", "content": "a"}
    for one in (message, plain, message):
        recorder.record("a", prompt_ids=[1], output_ids=[2], prompt_messages=[one])
    turns = recorder.turns("a")
    assert turns["shared_messages"].to_pylist() == [0, 1, 1]
    [first] = turns["suffix_messages"].to_pylist()[0]
    assert first["key"] == message_key(plain)
    assert json.loads(first["body"]) == plain


def test_a_key_is_looked_up_among_dicts_that_were_not_written():
    recorder = tk.Recorder()
    one = {"role": "user", "content": "u"}
    key = message_key(one), "user"
    for k, message in enumerate([one, key, one, key]):
        prompt = np.arange(2 * k + 1, dtype=np.int32)
        output = prompt[-1:] + 1
        recorder.record(
            "a", prompt_ids=prompt, output_ids=output, prompt_messages=[message]
        )
    assert recorder.turns("a")["shared_messages"].to_pylist() == [0, 1, 1, 1]


def numbers(messages, others):
    """The numbers of the messages of two calls, the second of which begins anew."""
    talk = MessageLog()
    for said_now in (messages, others):
        heard(talk, copy.deepcopy(said_now), None, -1, True)
    return [suffix.tolist() for suffix in suffixes_of(talk)]


def fresh(text):
    """The same text as another object."""
    return "".join([text[:1], text[1:]])


@pytest.mark.parametrize("changed", [(0,), (7,), (29,), (3, 4), (5, 20), (0, 15, 29)])
def test_messages_after_one_that_differs_are_still_known(changed):
    texts = [f"{k:05}" * 20 for k in range(30)]
    others = [fresh(text) for text in texts]
    expected, n = list(range(30)), 30
    for k in changed:
        others[k] = others[k][:-1] + chr(ord("A") + k)
        expected[k], n = n, n + 1
    assert numbers(said(*texts), said(*others)) == [list(range(30)), expected]


def test_messages_of_other_shapes_than_the_copy_are_told_apart():
    """A key, a message without a copy, and one with more parts than its copy has."""
    key = message_key({"role": "user", "c": 1}), "user"
    wide = {"role": "user", **{str(k): [k, {"t": str(k)}] for k in range(40)}}
    first = [key, {"role": "user", "c": 2**63}, *said("a", [{"t": "b"}]), wide]
    assert numbers(first, first)[1] == [0, 1, 2, 3, 4]
    others = [*said("a"), wide, *said({"u": 1}, {"t": ["b"]}), first[2]]
    assert numbers(first, others)[1] == [2, 4, 5, 6, 2]
    assert numbers([*said({"t": "b"}), *said("a") * 9], [key, wide])[1] == [2, 3]


def test_an_empty_tuple_is_no_message():
    nested = []
    for _ in range(40):
        nested = [nested]
    recorder, deep = tk.Recorder(), {"role": "user", "content": nested}
    recorder.record("s", prompt_ids=[1], output_ids=[2], prompt_messages=[deep])
    with pytest.raises(InvalidTurnsError, match=r"prompt_messages\[0\] is \(\)"):
        recorder.record("s", prompt_ids=[1], output_ids=[3], prompt_messages=[()])


CHANGES_WHILE_COMPARED = """
import trajkit as tk

class Key(str):
    __hash__ = str.__hash__
    def __eq__(self, other):
        change()
        return str.__eq__(self, other)

names = [f"k{i}" for i in range(20)]

def matched(known, new):
    recorder = tk.Recorder()
    known = [{"role": "user", "content": known}]
    recorder.record("s", prompt_ids=[1], output_ids=[2], prompt_messages=known)
    return recorder.match("s", prompt_messages=[{"role": "user", "content": new}])

inner = [{Key(name): "x" for name in names}]
change = inner.clear
matched([dict.fromkeys(names, "x")], inner)
texts = [{Key("k"): "x"}, *map(str, range(100))]
change = texts.clear
print(matched([{"k": "x"}, *map(str, range(100))], texts).shared_messages)
"""


def test_a_message_that_changes_while_it_is_compared():
    """Freed memory is overwritten here, so that a read of it ends the process."""
    done = subprocess.run(
        [sys.executable, "-c", CHANGES_WHILE_COMPARED],
        env={**os.environ, "PYTHONMALLOC": "debug"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
