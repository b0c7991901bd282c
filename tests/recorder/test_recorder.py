"""The recorder holds what a table of the same calls holds, call by call."""

import copy
import gc
import inspect
import json
import re
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from threading import Barrier

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import trajkit as tk
from tests.made_tables import by_session, link_by, policy_of
from tests.oracles import rows as reference
from tests.strategies import (
    further_columns,
    policies,
    sessions,
)
from tests.turns.test_records import REFUSED
from trajkit import _core
from trajkit.errors import InvalidTurnsError, LayoutError, UnknownSessionError
from trajkit.policies import NAMED_CHOICES, PRESETS


def recordable(turns):
    """The turns as a recorder numbers them: from 0, no gaps."""
    return [
        {**turn, "turn_index": i}
        for session in by_session(turns).values()
        for i, turn in enumerate(session)
    ]


def record(recorder, turn):
    fields = {k: v for k, v in turn.items() if k not in ("session_id", "turn_index")}
    return recorder.record(turn.get("session_id", "s"), **fields)


@given(sessions())
def test_each_call_is_placed_on_arrival(turns):
    turns = recordable(turns)
    recorder = tk.Recorder()
    for k, turn in enumerate(turns):
        found = record(recorder, turn)
        shared = [
            reference.lcp(reference.held(before), turn["prompt_ids"])
            for before in turns[:k]
        ]
        assert found.turn_index == k
        assert found.shared_length == max(shared, default=0)
        if found.base_turn is None:
            assert found.shared_length == 0
            assert found.clean
        else:
            assert shared[found.base_turn] == found.shared_length > 0
            held = reference.held(turns[found.base_turn])
            assert found.clean == (found.shared_length == len(held))


def call(prompt, output, **more):
    return {"prompt_ids": prompt, "output_ids": output, **more}


def asks(recorder, name):
    """Everything that a session can be asked once it has begun."""
    return (
        lambda: recorder.turns(name),
        lambda: recorder.pop(name),
    )


def test_a_session_that_ended_is_unknown_and_may_begin_anew():
    recorder = tk.Recorder()
    recorder.record("a", **call([1], [2]))
    recorder.record("b", **call([3], [4]))
    before = recorder.turns("a")
    assert recorder.pop("a") == before
    for name in ("a", ["a"]):
        for ask in asks(recorder, name):
            with pytest.raises(UnknownSessionError, match="'a'"):
                ask()
    assert recorder.sessions == ["b"]
    assert recorder.record("a", **call([5], [6])).turn_index == 0
    assert recorder.sessions == ["b", "a"]
    assert recorder.turns("a")["output_ids"].to_pylist() == [[6]]
    assert recorder.turns("b")["output_ids"].to_pylist() == [[4]]
    assert before["suffix_ids"].to_pylist() == [[1]]


def test_a_session_whose_only_call_was_refused_is_unknown():
    recorder = tk.Recorder()
    with pytest.raises(InvalidTurnsError):
        recorder.record("a", **call([-1], [2]))
    for ask in asks(recorder, "a"):
        with pytest.raises(UnknownSessionError, match="'a'"):
            ask()
    assert recorder.sessions == []
    assert recorder.record("a", **call([1], [2])).turn_index == 0


USER = {"role": "user", "content": "u"}
LOOP = {"role": "user"}
LOOP["content"] = [LOOP]
WHERE = "session 'a', turn 1: "


ARGUMENTS = inspect.signature(tk.Recorder.record).parameters


def versions(*spans):
    names = ("version", "start", "stop")
    return {"weight_versions": [dict(zip(names, span, strict=True)) for span in spans]}


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        *(
            (bad, f"({'|'.join(sorted({'logprobs', *bad}))})")
            for bad, _ in REFUSED
            if {*bad} <= {*ARGUMENTS} - {"session_id"}
        ),
        ({"prompt_ids": np.array([1, 2, -7], np.int32)}, "prompt_ids"),
        ({"output_ids": np.array([-2, 1], np.int32)}, "output_ids"),
        ({"output_ids": [], "output_logprobs": [-1.0]}, "logprobs"),
        ({"prompt_messages": USER}, "prompt_messages"),
        ({"prompt_messages": [LOOP]}, "prompt_messages"),
        ({"prompt_messages": [USER, ()]}, "prompt_messages"),
        (
            {"response_message": (bytes(16), "user")},
            "response_message is of type tuple",
        ),
        ({"payloads": [1]}, "payloads is of type list: "),
        ({"payloads": {3: 1}}, "payloads has the key 3: "),
        ({"payloads": {"prompt_ids": [1]}}, "'prompt_ids', which is a column of turns"),
        ({"payloads": {"logprobs": []}}, "spell it 'output_logprobs'"),
        ({"payloads": {"messages": []}}, "the key 'messages', which is"),
        ({"payloads": {"suffix_ids": []}}, "a column of the delta form"),
        ({"payloads": {"x": object()}}, "the value of 'x' makes no"),
        ({"payloads": {"x": "text"}}, "the value of 'x' makes no"),
        ({"payloads": {"y": 2**53 + 1}}, "the value of 'y' makes no"),
        ({"weight_versions": "v1"}, "weight_versions is 'v1': "),
        (versions(("v", 0, 1)), "weight_versions end at 1 of 2 output ids"),
        (versions(("v", 1, 2)), r"weight_versions\[0\] is 1:2, expected a start of 0"),
        (versions((None, 0, 2)), r"weight_versions\[0\] has a null"),
        ({"payloads": {"ref_logprobs": [0.5, -1.0]}}, r"ref_logprobs\[0\] is 0.5"),
        ({"payloads": {"sampling_mask": [[3], [9]]}}, r"sampling_mask\[1\] lacks"),
        ({"payloads": {"teacher_logprobs": "x"}}, "'teacher_logprobs' is string"),
    ],
)
def test_a_refused_call_leaves_the_session_as_it_was(bad, said):
    recorder, other = tk.Recorder(), tk.Recorder()
    first = call([1], [2], output_logprobs=[None], prompt_messages=[USER])
    after = call([1, 2, 3], [4], output_logprobs=[-1.0], prompt_messages=[USER] * 2)
    good = call([1, 2], [3, 4], output_logprobs=[-0.5, -1.0])
    for one in (recorder, other):
        one.record("a", **first, payloads={"x": 1, "y": 0.5})
    with pytest.raises(InvalidTurnsError, match=f"^{WHERE}.*{said}"):
        recorder.record("a", **{**good, **bad})
    assert recorder.turns("a") == other.turns("a")
    assert recorder.record("a", **after) == other.record("a", **after)
    assert recorder.turns("a") == other.turns("a")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (7, "session_id is 7: expected a string"),
        (None, "session_id is None: expected a string"),
        ("\ud800", "session_id '\\ud800' is not valid"),
    ],
)
def test_a_session_is_named_by_a_string(name, said):
    recorder = tk.Recorder()
    with pytest.raises(InvalidTurnsError, match=f"^{re.escape(said)}"):
        recorder.record(name, **call([1], [2]))
    assert recorder.sessions == []


def test_what_it_was_given_may_change_afterwards():
    recorder, other = tk.Recorder(), tk.Recorder()
    given = {
        "prompt_ids": np.array([1, 2, 3], np.int32),
        "output_ids": np.array([4], np.int32),
        "output_logprobs": np.array([-0.5], np.float32),
        "prompt_messages": [{"role": "user", "content": [{"text": "u"}]}],
        "payloads": {"scores": np.array([1], np.int16)},
    }
    other.record("a", **copy.deepcopy(given))
    recorder.record("a", **given)
    before = recorder.turns("a")
    for name in ("prompt_ids", "output_ids", "output_logprobs"):
        given[name][:] = -9
    given["prompt_messages"][0]["content"][0]["text"] = "another"
    given["prompt_messages"].append(USER)
    given["payloads"]["scores"][:] = 9
    assert before == recorder.turns("a") == other.turns("a")


def test_tables_taken_out_do_not_see_later_calls():
    recorder = tk.Recorder()
    taken = []
    for k in range(100):
        recorder.record(
            "a",
            **call(range(3 * k + 1), [7000 + k] * 50, output_logprobs=[-k / 100] * 50),
        )
        taken.append((recorder.turns("a"), recorder.turns("a").to_pylist()))
    for table, lines in taken:
        assert table.to_pylist() == lines


def test_threads_share_a_recorder():
    """Each writes its own session and one that all write to, and reads whole calls."""
    n_threads, n_calls = 4, 30
    recorder = tk.Recorder()
    together = Barrier(n_threads)
    replies = [{"role": "assistant", "content": str(k)} for k in range(n_calls)]
    reply_keys = [*map(tk.turns.message_key, replies)]

    def shared(me, k):
        """A call to the shared session, which continues the thread's call before."""
        return call([100 + me, *range(k)], [k], output_logprobs=[-k / 128])

    def is_whole(line):
        me, k = line["prompt_ids"][0] - 100, len(line["prompt_ids"]) - 1
        same = {name: line[name] for name in shared(me, k)} == shared(me, k)
        said = [*line["messages"], line["response"]]
        return same and [one["key"] for one in said] == reply_keys[: k + 1]

    def work(me):
        prompt, n_seen = [me], 0
        together.wait()
        for k in range(n_calls):
            recorder.record(f"own-{me}", **call(prompt, [k]))
            prompt = [*prompt, k, me]
            said = {"prompt_messages": replies[:k], "response_message": replies[k]}
            recorder.record("shared", **shared(me, k), **said)
            lines = tk.expand(recorder.turns("shared")).to_pylist()
            assert all(map(is_whole, lines))
            assert len(lines) > n_seen
            n_seen = len(lines)
            rows = tk.linearize(recorder.turns("shared"), "per_call")
            mine = [ids for ids in rows["input_ids"].to_pylist() if ids[0] == 100 + me]
            assert [ids[-1] for ids in mine] == list(range(k + 1))

    with ThreadPoolExecutor(n_threads) as pool:
        for done in [pool.submit(work, me) for me in range(n_threads)]:
            done.result(timeout=120)
    assert recorder.turns("shared")["turn_index"].to_pylist() == list(
        range(n_threads * n_calls)
    )
    for me in range(n_threads):
        rows = tk.linearize(recorder.pop(f"own-{me}"), "strict")
        assert rows["loss_mask"].to_pylist() == [[False, True] * n_calls]


def test_the_end_of_a_session_waits_for_the_call_under_way():
    """It has the session's lock, once, from before its table until it is forgotten."""
    recorder = tk.Recorder()
    recorder.record("a", **call([1], [2]))
    session = recorder._sessions["a"]
    seen = []

    class Watched:
        def __enter__(self):
            seen.append((session.ended, recorder.sessions))

        def __exit__(self, *error):
            seen.append((session.ended, recorder.sessions))

    session.lock = Watched()
    assert recorder.pop("a").num_rows == 1
    assert seen == [(False, ["a"]), (True, [])]


def test_what_was_waiting_when_its_session_ended(monkeypatch):
    """It found the session, then waited for its lock: as if the end came between."""
    recorder = tk.Recorder()
    recorder.record("a", **call([1], [2]))
    found = recorder._sessions["a"]
    recorder.pop("a")
    recorder.record("a", **call([1], [3]))
    with monkeypatch.context() as patch:
        patch.setattr(recorder, "_sessions", {"a": found})
        with pytest.raises(UnknownSessionError, match="ended during this call"):
            recorder.record("a", **call([1], [2]))
        for ask in asks(recorder, "a"):
            with pytest.raises(UnknownSessionError, match="'a'"):
                ask()
    # the session that began since is spared
    assert recorder.turns("a")["output_ids"].to_pylist() == [[3]]


def test_branches_at_every_depth():
    """A line of calls, then one that departs from each of them, deepest first."""
    n = 2000
    line = np.arange(2 * n, dtype=np.int32)
    recorder = tk.Recorder()
    for k in range(n):
        recorder.record(
            "a", prompt_ids=line[: 2 * k + 1], output_ids=line[2 * k + 1 : 2 * k + 2]
        )
    for k in reversed(range(n - 1)):
        prompt = line[: 2 * k + 3].copy()
        prompt[-1] = -1 - k + 2**31 - 1
        found = recorder.record("a", prompt_ids=prompt, output_ids=[5])
        assert (found.base_turn, found.shared_length) == (k, 2 * k + 2)
        assert found.clean
    rows = tk.linearize(recorder.pop("a"), "strict")
    assert rows.num_rows == n
    assert rows["shared_length"].to_pylist() == [0, *range(2 * n - 2, 0, -2)]


# Further columns


@given(st.data(), sessions(), policies)
def test_further_columns_are_the_tables(data, turns, choice):
    """Equal to what from_records and compact make of the same calls, rows too."""
    recorder, records = tk.Recorder(), []
    for turn in recordable(turns):
        turn = {**turn, "prompt_ids": turn["prompt_ids"] or [0]}
        versions, values = data.draw(further_columns(turn))
        record(recorder, {**turn, "weight_versions": versions, "payloads": values})
        records.append(
            {"session_id": "s", **turn, "weight_versions": versions, **values}
        )
    full, delta = tk.from_records(records), recorder.turns("s")
    assert delta == tk.compact(full)
    if not pa.types.is_null(full["experts"].type):
        options = {"policy": policy_of(choice), "payloads": ["experts"]}
        assert tk.linearize(delta, **options) == tk.linearize(full, **options)


def test_columns_of_a_session_have_a_type_of_their_own():
    recorder, noon = tk.Recorder(), datetime(2026, 1, 2, 12, tzinfo=UTC)
    recorder.record("a", **call([1], [2], payloads={"x": [1], "at": noon}))
    recorder.record("a", **call([1, 2], [3], payloads={"x": [0.5]}))
    recorder.record("b", **call([1], [2], payloads={"x": "text"}))
    assert recorder.turns("a")["x"].to_pylist() == [[1], [0.5]]
    assert recorder.turns("a")["at"].to_pylist() == [noon, None]
    assert recorder.turns("b")["x"].to_pylist() == ["text"]


# Messages seen before


def user(text):
    return {"role": "user", "content": [{"type": "text", "text": text}]}


def assistant(text):
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": {"x": text, "n": 1.5}}}],
    }


def test_a_message_written_otherwise_is_read_again():
    """Changed in place, or equal under == only, it is another; reordered, it is not."""
    recorder, seen = tk.Recorder(), []
    talk = [user("u"), {"role": "user", "n": 1}, assistant("x")]

    def said():
        """The next call's messages that were read, not only compared."""
        prompt = range(2 * len(seen) + 1)
        seen.append(copy.deepcopy(talk))
        book = recorder._session("a").message_log.book
        before = len(book.messages)
        recorder.record("a", **call(prompt, [prompt.stop], prompt_messages=talk))
        return [json.loads(one.body) for one in book.messages[before:]]

    assert said() == talk
    talk[0]["content"][0]["text"] = "v"
    assert said() == talk[:1]
    talk[1]["n"] = True
    assert said() == talk[1:2]
    talk[1]["n"] = 1.0
    assert said() == talk[1:2]
    talk[2] = dict(reversed(talk[2].items()))
    assert said() == []
    assert said() == []
    keys = [
        [tk.turns.message_key(message) for message in messages] for messages in seen
    ]
    turns = recorder.turns("a")
    full = tk.expand(turns)
    assert [[m["key"] for m in row] for row in full["messages"].to_pylist()] == keys
    assert turns["shared_messages"].to_pylist()[-1] == 3


# What a session holds


def test_a_session_holds_what_is_new_once():
    """4 bytes for each new id and logprob, and a little for each call."""
    context = np.arange(200_000, dtype=np.int32)
    logprobs = np.full(100, -0.5, np.float32)
    recorder = tk.Recorder()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for stop in range(2_000, len(context) + 1, 2_000):
            recorder.record(
                "a",
                **call(context[: stop - 100], context[stop - 100 : stop]),
                output_logprobs=logprobs,
            )
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held < 1.2 * (4 * len(context) + 4 * 100 * 100) + 20_000


def test_sessions_that_ended_leave_nothing_behind():
    recorder = tk.Recorder()

    def live(names):
        for name in names:
            for k in range(3):
                said = {"prompt_messages": [user(str(k))], "payloads": {"x": [k]}}
                recorder.record(name, **call(range(50 * k + 1), range(50)), **said)
        for name in names:
            assert recorder.pop(name).num_rows == 3

    def lines():
        """What lines of the package hold: other threads allocate as well."""
        gc.collect()
        own = tracemalloc.Filter(True, f"{Path(tk.__file__).parent}/*")
        return tracemalloc.take_snapshot().filter_traces([own]).statistics("lineno")

    def held():
        return sum(one.size for one in lines())

    live([f"first-{k}" for k in range(10)])
    tracemalloc.start()
    try:
        before = held()
        live([f"s{k}" for k in range(300)])
        most = tracemalloc.get_traced_memory()[1]
        left = held() - before
        largest = [str(line) for line in lines()[:9]]
    finally:
        tracemalloc.stop()
    # what is left is the table of the recorder's own names
    assert left < most / 50, largest


# The forest of paths


def test_a_call_is_taken_before_it_is_inserted():
    paths = _core.Growth()
    for calls, base in (0, (-1, 0, True)), (1, (0, 2, True)):
        with pytest.raises(LayoutError, match="no call was taken"):
            paths.insert(True, False, False, 0)
        prompt, output = np.array([[1], [1, 2]][calls], np.int32), np.int32([2])
        held = paths.take(prompt, output, None, -9999.0, 1e-4)
        assert held == np.append(prompt, output)[2 * calls :].tobytes()
        assert paths.insert(True, False, False, 0) == base
    assert paths.calls["prompt_len"].tolist() == [1, 2]


# Messages that differ in the type of a number


def numbered(number):
    role = "assistant" if number in (0, 3) else "user"
    return {"role": role, "content": "x", "n": number}


numbers = st.sampled_from([1, 1.0, True, 0, False, 0.0, 3])
POLICIES = [
    *(tk.policy(name) for name in PRESETS),
    *(
        tk.policy("faithful", parent_by=route, message_equality=equality)
        for route in ("messages", "agents", "generations")
        for equality in NAMED_CHOICES["message_equality"]
        if route != "agents" or equality in ("values", "text")
    ),
]


@given(
    st.lists(
        st.tuples(
            st.lists(numbers, max_size=4), st.none() | numbers, st.integers(0, 3)
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from(POLICIES),
)
@example([([1], 1.0, 0), ([1], None, 0)], tk.policy("segments"))
@example([([1], 1.0, 0), ([1.0], None, 0)], tk.policy("segments"))
@example([([1], 1.0, 0), ([1], 1, 0), ([1], None, 0)], tk.policy("graph"))
@example([([1], 0, 0), ([1, 0, 1.0], 0.0, 1), ([1.0, 0, 1], 1, 1)], tk.policy("graph"))
def test_types_of_numbers_give_the_same_rows_in_every_form(calls, policy):
    recorder, records, paths = tk.Recorder(), [], [[]]
    for index, (sent, reply, before) in enumerate(calls):
        prompt = [*paths[min(before, len(paths) - 1)], 1]
        one = call(
            prompt,
            [2 + index],
            prompt_messages=[numbered(number) for number in sent],
            response_message=None if reply is None else numbered(reply),
        )
        recorder.record("s", **one)
        records += [{"session_id": name, **one} for name in "st"]
        paths.append([*prompt, 2 + index])
    both = tk.from_records(records)
    full = both.slice(0, len(calls))
    delta = tk.compact(both)
    turns = recorder.turns("s")
    assert turns == delta.slice(0, len(calls))
    assert tk.expand(turns) == full
    rows = tk.linearize(both, policy)
    assert rows == tk.linearize(delta, policy, threads=2)
    for form in (both, delta):
        single = iter(form.to_batches(max_chunksize=1))
        assert rows == pa.Table.from_batches(tk.linearize_batches(single, policy))
    first = rows.filter(pc.equal(rows["session_id"], "s"))
    assert first == tk.linearize(turns, policy)
    links = link_by(full, policy.parent_by, message_equality=policy.message_equality)
    assert links == link_by(
        turns, policy.parent_by, message_equality=policy.message_equality
    )


# what a call brings is compared as pages of 1024 ids, or at once where it is less
BROUGHT = [3, 1023, 1024, 1025, 2047, 2048, 5000, 1, 4096, 9000]


@pytest.fixture(scope="module")
def long_session():
    """A session whose path lies in pieces of many lengths, and its last path."""
    recorder, path = tk.Recorder(), np.arange(sum(BROUGHT), dtype=np.int32)
    stop = 0
    for n in BROUGHT:
        stop += n
        bounds = slice(stop - 1), slice(stop - 1, stop)
        recorder.record("a", prompt_ids=path[bounds[0]], output_ids=path[bounds[1]])
    return recorder, path


def test_every_id_of_every_piece_counts(long_session):
    recorder, path = long_session
    stops = np.cumsum(BROUGHT)
    near = {int(stop) + k for stop in stops for k in (-1025, -1024, -2, -1, 0, 1)}
    for place in sorted({*near, *range(0, len(path), 211)}):
        if not 0 < place < len(path):
            continue
        prompt = path.copy()
        prompt[place] += 1 << 20
        found = recorder.record("a", prompt_ids=prompt, output_ids=[1])
        assert found.shared_length == place
        # back to the long path, whose pieces are other ones by now
        found = recorder.record("a", prompt_ids=path, output_ids=[])
        assert found.shared_length == len(path)


@given(st.integers(0, sum(BROUGHT)))
def test_a_prompt_may_end_in_any_piece(long_session, n):
    recorder, path = long_session
    found = recorder.record("a", prompt_ids=path[:n], output_ids=[])
    assert found.shared_length == n
    found = recorder.record("a", prompt_ids=path, output_ids=[])
    assert found.shared_length == len(path)


# Calls that fail after they were read


class Failing:
    """The paths of a session, without the memory for another call."""

    def __init__(self, paths):
        self._paths = paths

    def __getattr__(self, name):
        return getattr(self._paths, name)

    def insert(self, *flags):
        raise MemoryError


def test_a_call_that_was_interrupted_leaves_nothing(monkeypatch):
    """Until the next call, after it, and in what later calls share."""
    a, b = (user(name) for name in "ab")
    calls = [
        ([1, 2], [3], [a]),
        ([1, 2, 3, 4], [5], None),
        ([1, 2, 3, 4, 5, 6], [7], [a, b]),
    ]
    recorders = tk.Recorder(), tk.Recorder()
    for k, (prompt, output, messages) in enumerate(calls):
        call = {"prompt_ids": prompt, "output_ids": output, "payloads": {"p": k}}
        if k == 1:
            session = recorders[0]._sessions["s"]
            with monkeypatch.context() as patch:
                patch.setattr(session, "paths", Failing(session.paths))
                with pytest.raises(MemoryError):
                    recorders[0].record("s", **call, prompt_messages=[a, b])
            assert recorders[0].turns("s") == recorders[1].turns("s")
        for recorder in recorders:
            recorder.record("s", **call, prompt_messages=messages)
    turns = recorders[0].turns("s")
    assert turns == recorders[1].turns("s")
    assert tk.expand(turns)["p"].to_pylist() == [0, 1, 2]
