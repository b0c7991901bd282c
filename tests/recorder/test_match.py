"""`Recorder.match` says where `record` would put a call, and changes nothing."""

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests.oracles import rows as reference
from tests.recorder.test_recorder import call, record, recordable
from tests.strategies import many_calls, sessions
from trajkit.errors import ArgumentError, InvalidTurnsError
from trajkit.recorder import Match

USER, REPLY = {"role": "user", "content": "u"}, {"role": "assistant", "content": "r"}

every_session = sessions() | many_calls.map(lambda turns: turns[:60])


def asked(recorder, turn):
    """What the session answers about a turn's request, in each form."""
    ids, said = turn["prompt_ids"], turn["prompt_messages"]
    recorder.match("s", prompt_ids=ids)
    if said is not None:
        recorder.match("s", prompt_messages=said)
        pairs = [(tk.turns.message_key(one), one["role"]) for one in said]
        recorder.match("s", prompt_messages=pairs)
    return recorder.match("s", prompt_ids=ids, prompt_messages=said)


@given(every_session)
def test_match_agrees_with_record(turns):
    turns = recordable(turns)
    recorder = tk.Recorder()
    found = []
    for k, turn in enumerate(turns):
        found.append(asked(recorder, turn))
        recorded = record(recorder, turn)
        assert found[-1].shared_length == recorded.shared_length
        paths = [reference.held(one) for one in turns[:k]]
        complete = any(
            path[: len(turn["prompt_ids"])] == turn["prompt_ids"] for path in paths
        )
        if not complete:  # otherwise the output decides between equals
            assert found[-1].turn_index == recorded.base_turn
    shared = recorder.turns("s")["shared_messages"].to_pylist()
    bases = recorder.turns("s")["base_turn"].to_pylist()
    for one, n_messages, base in zip(found, shared, bases, strict=True):
        if one.turn_index == base:
            assert one.shared_messages == n_messages


@given(every_session)
def test_messages_alone_match_the_first_turn_that_shares_the_most(turns):
    turns = recordable(turns)
    recorder = tk.Recorder()
    shows = []
    for turn in turns:
        said = turn["prompt_messages"]
        if said is not None:
            keys = [tk.turns.message_body(one) for one in said]
            shared = [reference.lcp(one, keys) for one in shows]
            most = max(shared, default=0)
            expected = Match(shared.index(most) if most else None, None, most)
            assert recorder.match("s", prompt_messages=said) == expected
        record(recorder, turn)
        reply = turn["response_message"]
        replied = [] if reply is None else [tk.turns.message_body(reply)]
        shows.append([] if said is None else keys + replied)


@given(every_session, st.randoms(use_true_random=False))
def test_matches_in_between_change_nothing(turns, random):
    turns = recordable(turns)
    recorder, other = tk.Recorder(), tk.Recorder()
    for turn in turns:
        for _ in range(random.randrange(3)):
            asked(recorder, random.choice(turns))
        assert record(recorder, turn) == record(other, turn)
        assert recorder.turns("s") == other.turns("s")


def test_a_match_keeps_nothing_of_its_messages():
    recorder = tk.Recorder()
    recorder.record("a", **call([1], [2], prompt_messages=[USER]))
    log = recorder._sessions["a"].message_log
    before = copy.deepcopy((log.copies, log.book))
    new = {"role": "user", "content": "é"}
    deep = {"role": "tool", "content": {"a": [[[{"b": 2**70}]]]}}
    for messages in ([USER, new], [deep], [USER, deep], [(b"k" * 16, "user")]):
        recorder.match("a", prompt_messages=messages)
    assert (log.copies, log.book) == before


def test_match_of_a_session_without_calls():
    recorder = tk.Recorder()
    assert recorder.match("a", prompt_ids=[1]) == Match(None, 0, None)
    assert recorder.match("a", prompt_messages=[USER]) == Match(None, None, 0)
    assert not recorder.has_session("a")


def test_match_takes_messages_in_any_form():
    recorder = tk.Recorder()
    key = tk.turns.message_key(USER), "user"
    far = {"role": "user", "content": 2**70}
    recorder.record(
        "a", **call([1], [2], prompt_messages=[USER, far], response_message=REPLY)
    )
    for said, n in (
        ([dict(reversed(USER.items())), far, REPLY], 3),
        ([key, far], 2),
        ((USER, REPLY), 1),
        ([far], 0),
        ([], 0),
    ):
        turn = 0 if n else None
        assert recorder.match("a", prompt_messages=said) == Match(turn, None, n)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"prompt_ids": [1, -2]}, "prompt_ids[1] is -2: "),
        ({"prompt_ids": np.array([1.0])}, "prompt_ids is of float64: "),
        ({"prompt_messages": "hello"}, "prompt_messages is of type str: "),
        ({"prompt_messages": [{"content": "x"}]}, "prompt_messages[0] has no role: "),
        ({"prompt_messages": [("k", "user")]}, "prompt_messages[0] is ('k', 'user'): "),
    ],
)
def test_an_invalid_request_is_refused(request_, reason):
    recorder = tk.Recorder()
    recorder.record("a", **call([1], [2], prompt_messages=[USER]))
    with pytest.raises(InvalidTurnsError) as refused:
        recorder.match("a", **request_)
    assert str(refused.value).startswith(f"session 'a': {reason}")


def test_match_needs_a_request():
    with pytest.raises(ArgumentError, match="prompt_ids=None and prompt_messages=None"):
        tk.Recorder().match("a")
