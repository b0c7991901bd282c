"""A session numbers its messages and shares their lists as the slow twin does."""

import copy

import numpy as np
from hypothesis import example, given

from tests.oracles.talk import Numbers
from tests.strategies import NAN, heard_calls
from trajkit.turns.messages import MessageLog, counts_of


def suffixes_of(log):
    """The messages of each call that its base does not supply; None: no list of them."""
    counts, numbers = counts_of(log.calls)
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
    shares, _, replies = counts_of(talk.calls[: len(bases)])[0].T
    replies = [None if reply < 0 else reply for reply in replies.tolist()]
    assert replies == twin.replies
    shared = [twin.shared(k, base) for k, base in enumerate(bases)]
    assert shares.tolist() == shared
    for k, suffix in enumerate(suffixes_of(talk)):
        whole = twin.lists[k]
        assert (suffix is None) == (whole is None)
        assert suffix is None or suffix.tolist() == whole[shared[k] :]
    assert [one.body for one in talk.book.messages] == twin.bodies
