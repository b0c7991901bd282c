"""What does not fit the buffers that the kernels write into is refused."""

import mmap
from unittest import mock

import numpy as np
import pytest

import trajkit as tk
from tests.made_tables import turns_table
from trajkit import _core
from trajkit._kernel_names import CALL
from trajkit.errors import InvalidTurnsError, LayoutError
from trajkit.rows.linearize import find_links
from trajkit.rows.plan import NO_LIMIT, choices_of, plan_rows
from trajkit.rows.splice import splice
from trajkit.turns import message_key, message_record
from trajkit.turns.sessions import Sessions

TURNS = [
    {"prompt_ids": [1], "output_ids": [2, 3]},
    {"prompt_ids": [1, 2, 3, 4], "output_ids": [5]},
    {"prompt_ids": [1, 2, 9], "output_ids": [6, 7]},
]


def reserved(n, dtype):
    """n entries of zeros that take no memory, as long as they are not written."""
    size = n * np.dtype(dtype).itemsize
    no_reserve = 0x4000  # of Linux; mmap has the name from Python 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype)


def linked(name):
    calls = Sessions.of(turns_table(TURNS))
    policy = tk.policy(name)
    return calls, find_links(calls, calls.forest, policy), policy


def fill_rows(change, policy="faithful", parent=None):
    """Fill the rows of a plan, after changes to the first and to the second call's link."""
    calls, links, policy = linked(policy)
    if policy.on_drift == "splice":
        spliced = splice(calls, links, policy)
        calls, links = spliced.sessions, spliced.links
    plan = plan_rows(calls, links, policy, NO_LIMIT)
    n_tokens = int(plan.rows["n_tokens"].sum())
    for name, value in change.items():
        plan.rows[name][0] = value
    if parent is not None:
        links["parent"][1] = parent
    bits = np.empty((2, (n_tokens + 7) // 8), np.uint8)
    return _core.fill_rows(
        calls.forest.paths,
        links,
        choices_of(policy, NO_LIMIT),
        plan.owners,
        calls.turn_index,
        plan.rows,
        np.empty(n_tokens, np.int32),
        bits[0],
        np.empty(n_tokens, np.float32),
        bits[1],
        False,
    )


def fill_splices(change):
    return fill_rows(change, "polar")


@pytest.mark.parametrize("fill", [fill_rows, fill_splices])
@pytest.mark.parametrize(
    ("change", "match"),
    [
        pytest.param({"last": -1}, r"rows\[0\] has . calls: links has", id="last"),
        pytest.param({"last": 3}, "calls: links has fewer", id="beyond the calls"),
        pytest.param(
            {"n_calls": 9}, "has 9 calls: links has fewer", id="too many calls"
        ),
        pytest.param({"n_calls": -1}, "has -1 calls", id="calls below 0"),
        pytest.param({"n_calls": 0}, r"rows\[0\] is no row", id="no call"),
        pytest.param({"n_tokens": 99}, "input_ids has", id="too many tokens"),
        pytest.param({"n_tokens": 1}, r"rows\[0\] is no row", id="too few tokens"),
        pytest.param({"n_tokens": -1}, r"rows\[0\] is no row", id="tokens below 0"),
        pytest.param({"n_spans": 9}, r"rows\[0\] is no row", id="too many spans"),
        pytest.param({"n_spans": 0}, r"rows\[0\] is no row", id="too few spans"),
        pytest.param({"n_spans": -1}, r"rows\[0\] is no row", id="spans below 0"),
    ],
)
def test_rows_that_do_not_fit_their_columns_are_refused(fill, change, match):
    with pytest.raises(LayoutError, match=match):
        fill(change)


def test_rows_of_links_that_lead_outside_are_refused():
    fill_rows({}, "slime")
    with pytest.raises(LayoutError, match="has 2 calls: links has fewer"):
        fill_rows({}, "slime", parent=1 << 20)


def plan(policy, links=None, max_tokens=NO_LIMIT, **choices):
    calls, known, policy = linked(policy)
    for i, order in enumerate(links or []):
        known["order"][i] = order
    if links:
        known["parent"] = [
            -1,
            2,
            -1,
        ]  # recorded later: parents are found by their order
    if policy.on_drift == "splice":
        spliced = splice(calls, known, policy)
        calls, known = spliced.sessions, spliced.links
    return plan_rows(calls, known, tk.policy(policy, **choices), max_tokens)


@pytest.mark.parametrize("name", ["faithful", "polar"])
def test_plans_without_room_for_a_row_are_refused(name):
    assert len(plan(name).rows)
    with pytest.raises(LayoutError, match="max_tokens is -1 "):
        plan(name, max_tokens=-1)


def no_rows(policy, max_tokens):
    choices = choices_of(policy, max_tokens).copy()
    choices["max_rows"] = 0
    return choices


@pytest.mark.parametrize("name", ["faithful", "polar"])
def test_plans_of_no_rows_are_refused(name):
    with (
        mock.patch("trajkit.rows.plan.choices_of", no_rows),
        pytest.raises(LayoutError, match="max_rows 0: at least 0 and 1"),
    ):
        plan(name)


@pytest.mark.parametrize("name", ["faithful", "polar"])
def test_two_calls_of_one_order_are_refused(name):
    """The kernels read of each call what they wrote when they came by it in order."""
    with pytest.raises(LayoutError, match=r"links\[2\] is no link.* order 0"):
        plan(name, links=[0, 1, 0])


def test_paths_and_tables_are_as_long_as_int32_can_say():
    """Positions of rows and spans, and numbers of nodes, are int32."""

    def grown(calls):
        paths = _core.CallForest(calls, np.array([0, len(calls)]))
        return len(paths.arrays[2])

    ids = np.zeros(1, np.int32)
    calls = np.zeros(2, CALL)
    calls["own"], calls["out"] = ids.ctypes.data, ids.ctypes.data
    calls["prompt_len"], calls["base"] = 1, [-1, 0]
    calls["own_start"] = [0, 1]  # in delta form, so that only first tokens are read
    for n_prompt, n_output in [(2**31, 0), (2**31 - 1, 1), (1, 2**63 - 1)]:
        calls["prompt_len"][1], calls["out_len"][1] = n_prompt, n_output
        with pytest.raises(LayoutError, match="at most 2147483647 tokens"):
            grown(calls)
    calls["prompt_len"][1], calls["out_len"][1] = 2**31 - 1, 0
    assert grown(calls) == 3
    with pytest.raises(LayoutError, match="1073741824 calls in one table"):
        grown(reserved(2**30, CALL))


def test_a_base_is_an_earlier_call_of_the_session():
    ids = np.zeros(1, np.int32)
    calls = np.zeros(2, CALL)
    calls["own"], calls["out"] = ids.ctypes.data, ids.ctypes.data
    calls["prompt_len"], calls["base"], calls["own_start"] = 1, [-1, 0], [0, 1]
    assert len(_core.CallForest(calls, np.array([0, 2])).arrays[2]) == 2
    with pytest.raises(LayoutError, match=r"calls\[1\] is no path"):
        _core.CallForest(calls, np.array([0, 1, 2]))
    calls["base"][1] = 1
    with pytest.raises(LayoutError, match=r"calls\[1\] is no path"):
        _core.CallForest(calls, np.array([0, 2]))


def test_a_recorded_call_is_as_long_as_int32_can_say():
    recorder = tk.Recorder()
    with pytest.raises(InvalidTurnsError, match="2147483648 prompt ids and 0 output"):
        recorder.record("s", prompt_ids=reserved(2**31, np.int32), output_ids=[])
    assert recorder.sessions == []


class Clearing(dict):
    """A message that empties a list when it is compared or read."""

    def __init__(self, message, values):
        super().__init__(message)
        self._values = values

    __hash__ = None

    def __eq__(self, other):
        self._values.clear()
        return super().__eq__(other)

    def __iter__(self):
        self._values.clear()
        return super().__iter__()

    def items(self):
        self._values.clear()
        return super().items()


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize(
    ("text", "step"), [("same", "compared"), ("new", "compared"), ("new", "read")]
)
def test_a_list_of_messages_may_shrink_while_it_is_read(place, text, step):
    """Code of the caller's may do that; the call has the messages that it was given."""
    given = [{"role": "user", "content": f"same {k}"} for k in range(5)]
    recorder = tk.Recorder()
    if step == "compared":
        recorder.record("s", prompt_ids=[1], output_ids=[2], prompt_messages=[*given])
    given[place] = {"role": "user", "content": f"{text} {place}"}
    messages = [*given]
    messages[place] = Clearing(given[place], messages)
    recorder.record("s", prompt_ids=[1, 2], output_ids=[3], prompt_messages=messages)
    assert messages == []
    stored = tk.expand(recorder.turns("s"))["messages"].to_pylist()[-1]
    assert [one["key"] for one in stored] == [*map(message_key, given)]
    assert stored[place]["body"] in (None, message_record(given[place])[1])
    if step == "compared":
        shared = 5 if text == "same" else place
        assert recorder.turns("s")["shared_messages"].to_pylist() == [0, shared]


class Changing(dict):
    """A message that becomes another one after it was read once."""

    def items(self):
        items = list(super().items())
        self["content"] = "later"
        return items


def test_a_message_that_changes_while_it_is_read_is_stored_as_it_was_first():
    """Its key, its body and the copy that later messages are compared with agree."""
    recorder = tk.Recorder()
    first = {"role": "user", "content": "first"}
    recorder.record(
        "s", prompt_ids=[1], output_ids=[2], prompt_messages=[Changing(first)]
    )
    for k, content in enumerate(["first", "later"]):
        message = {"role": "user", "content": content}
        recorder.record(
            "s", prompt_ids=[1, 2, k], output_ids=[3], prompt_messages=[message]
        )
    turns = tk.expand(recorder.turns("s"))["messages"].to_pylist()
    keys = [messages[0]["key"] for messages in turns]
    later = message_key({"role": "user", "content": "later"})
    assert keys == [message_key(first), message_key(first), later]
    assert turns[0][0]["body"] == message_record(first)[1]
