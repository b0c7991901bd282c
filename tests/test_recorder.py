"""The recorder holds what a table of the same calls holds, call by call."""

import array
import copy
import json
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests import reference
from tests.strategies import policies, row_limits, runs, sessions, thresholds
from tests.tables import by_session, policy_of, turns_table
from trajkit.errors import InvalidTurnsError, UnknownSessionError


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


@given(sessions(), policies, row_limits)
def test_rows_are_the_tables_after_every_call(turns, choice, limit):
    turns = recordable(turns)
    recorder = tk.Recorder()
    for k, turn in enumerate(turns):
        record(recorder, turn)
        rows = recorder.rows("s", policy_of(choice), max_row_tokens=limit, reward=0.5)
        assert rows == tk.linearize(
            turns_table(turns[: k + 1]),
            policy_of(choice),
            max_row_tokens=limit,
            reward=0.5,
        )


@given(
    sessions(),
    st.sampled_from(["messages", "tokens", "previous", "none"]),
    thresholds,
)
def test_links_and_drift_are_the_tables(turns, route, threshold):
    turns = recordable(turns)
    recorder = tk.Recorder()
    for turn in turns:
        record(recorder, turn)
    delta, table = recorder.turns("s"), turns_table(turns)
    links = tk.link(delta, route, merge_threshold=threshold)
    assert links == tk.link(table, route, merge_threshold=threshold)
    assert tk.classify_drift(delta, links) == tk.classify_drift(table, links)


@given(sessions())
def test_turns_expand_to_what_was_recorded(turns):
    turns = recordable(turns)
    recorder = tk.Recorder()
    for turn in turns:
        record(recorder, turn)
    table = recorder.turns("s")
    if all(turn["prompt_ids"] for turn in turns):
        tk.validate(table)
    else:
        with pytest.raises(InvalidTurnsError, match="prompt_ids is empty"):
            tk.validate(table)
    assert table["turn_index"].to_pylist() == list(range(len(turns)))
    for turn, line in zip(turns, table.to_pylist(), strict=True):
        base = (
            []
            if line["base_turn"] is None
            else reference.held(turns[line["base_turn"]])
        )
        prompt = base[: line["shared_length"]] + line["suffix_ids"]
        assert prompt == turn["prompt_ids"]
        assert line["output_ids"] == turn["output_ids"]
        logprobs = line["output_logprobs"] or [None] * len(turn["output_ids"])
        assert logprobs == reference.logprobs_of(turn)
        for name in ("finish_reason", "ill_formed", "trainable"):
            assert line[name] == turn[name]
        assert line["use_tool"] == reference.uses_tool(turn)


def text_of(message):
    return json.dumps(message, sort_keys=True)


@given(sessions())
def test_messages_expand_and_are_held_once(turns):
    turns = recordable(turns)
    recorder = tk.Recorder()
    for turn in turns:
        record(recorder, turn)
    shows = []  # of each turn, in text: what a next request may repeat
    bodies = {}  # what each key last stood for
    for turn, line in zip(turns, recorder.turns("s").to_pylist(), strict=True):
        sent, reply = turn["prompt_messages"], turn["response_message"]
        new = []
        if sent is None:
            assert line["suffix_messages"] is line["shared_messages"] is None
            shows.append([])
        else:
            base = line["base_turn"]
            texts = [text_of(message) for message in sent]
            shared = 0 if base is None else reference.lcp(shows[base], texts)
            assert line["shared_messages"] == shared
            new = list(zip(line["suffix_messages"], sent[shared:], strict=True))
            shows.append([*texts, *([] if reply is None else [text_of(reply)])])
        if reply is None:
            assert line["response"] is None
        else:
            new.append((line["response"], reply))
        for message, said in new:
            if message["body"] is not None:
                bodies[message["key"]] = json.loads(message["body"])
            assert text_of(bodies[message["key"]]) == text_of(said)
            assert message["role"] == said["role"]
            assert message["key"] == tk.message_key(said)


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


@given(runs(), policies)
def test_sessions_do_not_see_each_other(turns, choice):
    alone = {name: recordable(session) for name, session in by_session(turns).items()}
    waiting = {name: iter(session) for name, session in alone.items()}
    recorder = tk.Recorder()
    for turn in turns:
        record(recorder, next(waiting[turn["session_id"]]))
    assert recorder.sessions == list(alone)
    for name, session in alone.items():
        rows = recorder.rows(name, policy_of(choice))
        assert rows == tk.linearize(turns_table(session), policy_of(choice))


def call(prompt, output, **more):
    return {"prompt_ids": prompt, "output_ids": output, **more}


def asks(recorder, name):
    """Everything that a session can be asked once it has begun."""
    return (
        lambda: recorder.rows(name, "strict"),
        lambda: recorder.turns(name),
        lambda: recorder.drop(name),
    )


def test_a_dropped_session_is_unknown_and_may_begin_anew():
    recorder = tk.Recorder()
    recorder.record("a", **call([1], [2]))
    recorder.record("b", **call([3], [4]))
    before = recorder.turns("a")
    recorder.drop("a")
    for ask in asks(recorder, "a"):
        with pytest.raises(UnknownSessionError, match="'a'"):
            ask()
    assert recorder.sessions == ["b"]
    assert recorder.record("a", **call([5], [6])).turn_index == 0
    assert recorder.sessions == ["b", "a"]
    assert recorder.rows("a", "strict")["input_ids"].to_pylist() == [[5, 6]]
    assert recorder.rows("b", "strict")["input_ids"].to_pylist() == [[3, 4]]
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


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        pytest.param(
            call([1, -1], [2]), "prompt_ids[1] is -1: token ids", id="negative id"
        ),
        pytest.param(
            call([1], [2**31]), "output_ids[0] is 2147483648: ", id="id beyond int32"
        ),
        pytest.param(call([1, True], [2]), "prompt_ids[1] is True: ", id="a bool"),
        pytest.param(call([1, 2.0], [2]), "prompt_ids[1] is 2.0: ", id="a float"),
        pytest.param(call("12", [2]), "prompt_ids is of type str: ", id="text"),
        pytest.param(call(None, [2]), "prompt_ids is of type NoneType: ", id="none"),
        pytest.param(
            call(np.array([1, 2, -7], np.int32), [2]),
            "prompt_ids[2] is -7: ",
            id="negative id in an array, beyond what is known",
        ),
        pytest.param(
            call([1], np.array([-2], np.int32)), "output_ids[0] is -2: ", id="output"
        ),
        pytest.param(
            call(np.array([1, 2**31]), [2]), "prompt_ids[1] is 2147483648: ", id="wide"
        ),
        pytest.param(
            call(np.array([1.0]), [2]), "prompt_ids is of float64: ", id="floats"
        ),
        pytest.param(
            call(np.array([[1]], np.int32), [2]), "has the shape (1, 1)", id="a matrix"
        ),
        pytest.param(
            call([1], [2], output_logprobs=[-1.0, -1.0]),
            "2 logprobs for 1 output ids",
            id="too many logprobs",
        ),
        pytest.param(
            call([1], [], output_logprobs=[-1.0]),
            "1 logprobs for 0 output ids",
            id="logprobs of nothing",
        ),
        pytest.param(
            call([1], [2, 3], output_logprobs=[-1.0, float("nan")]),
            "output_logprobs[1] is nan: ",
            id="a NaN",
        ),
        pytest.param(
            call([1], [2], output_logprobs=[float("-inf")]),
            "output_logprobs[0] is -inf: ",
            id="an infinity",
        ),
        pytest.param(
            call([1], [2], output_logprobs=np.array([-9999.0])),
            "output_logprobs[0] is -9999.0: ",
            id="what engines write for none",
        ),
        pytest.param(
            call([1], [2], output_logprobs=[0.001]),
            "output_logprobs[0] is 0.001",
            id="positive",
        ),
        pytest.param(
            call([1], [2], output_logprobs=["x"]),
            "output_logprobs[0] is 'x': ",
            id="no number",
        ),
        pytest.param(
            call([1], [2], prompt_messages=USER),
            "prompt_messages is of type dict: ",
            id="one message for a list",
        ),
        pytest.param(
            call([1], [2], prompt_messages="hello"),
            "prompt_messages is of type str: ",
            id="text for messages",
        ),
        pytest.param(
            call([1], [2], prompt_messages=[USER, {"content": "x"}]),
            "prompt_messages[1] has no role: ",
            id="a message without a role",
        ),
        pytest.param(
            call([1], [2], prompt_messages=[USER, "u"]),
            "prompt_messages[1] is of type str: ",
            id="a message that is none",
        ),
        pytest.param(
            call([1], [2], prompt_messages=[LOOP]), "holds itself", id="a loop"
        ),
        pytest.param(
            call([1], [2], prompt_messages=[USER], response_message={"role": 1}),
            "response_message has the role 1: ",
            id="a reply without a role",
        ),
        pytest.param(
            call([1], [2], response_message=["x"]),
            "response_message is of type list: ",
            id="a reply that is none",
        ),
        pytest.param(
            call([1], [2], finish_reason=3), "finish_reason is 3: ", id="a reason"
        ),
        pytest.param(
            call([1], [2], finish_reason="\ud800"),
            "finish_reason '\\ud800' is not valid Unicode",
            id="a reason that no table can hold",
        ),
        pytest.param(call([1], [2], ill_formed=1), "ill_formed is 1: ", id="a flag"),
        pytest.param(
            call([1], [2], trainable="no"), "trainable is 'no': ", id="trainable"
        ),
        pytest.param(call([1], [2], use_tool=0), "use_tool is 0: ", id="use_tool"),
    ],
)
def test_a_refused_call_leaves_the_session_as_it_was(bad, said):
    recorder, other = tk.Recorder(), tk.Recorder()
    first = call([1], [2], output_logprobs=[None], prompt_messages=[USER])
    after = call([1, 2, 3], [4], output_logprobs=[-1.0], prompt_messages=[USER] * 2)
    for one in (recorder, other):
        one.record("a", **first)
    with pytest.raises(InvalidTurnsError) as refused:
        recorder.record("a", **bad)
    assert str(refused.value).startswith(WHERE)
    assert said in str(refused.value)
    assert recorder.turns("a") == other.turns("a")
    assert recorder.record("a", **after) == other.record("a", **after)
    assert recorder.turns("a") == other.turns("a")
    assert recorder.rows("a", "slime") == other.rows("a", "slime")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param(7, "session_id is 7: expected a string", id="no string"),
        pytest.param(None, "session_id is None: expected a string", id="none"),
        pytest.param("\ud800", "session_id '\\ud800' is not valid", id="no text"),
    ],
)
def test_a_session_is_named_by_a_string(name, said):
    recorder = tk.Recorder()
    with pytest.raises(InvalidTurnsError) as refused:
        recorder.record(name, **call([1], [2]))
    assert str(refused.value).startswith(said)
    assert recorder.sessions == []


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param(tuple, id="tuple"),
        pytest.param(lambda ids: range(ids[0], ids[-1] + 1), id="range"),
        pytest.param(lambda ids: array.array("q", ids), id="array.array"),
        pytest.param(lambda ids: memoryview(array.array("i", ids)), id="buffer"),
        pytest.param(lambda ids: np.array(ids, np.uint16), id="narrow"),
        pytest.param(lambda ids: np.array(ids, ">i4"), id="other byte order"),
        pytest.param(lambda ids: np.array(ids, np.int32), id="int32"),
        pytest.param(lambda ids: np.repeat(np.int32(ids), 2)[::2], id="with gaps"),
        pytest.param(
            lambda ids: np.frombuffer(np.int32(ids).tobytes(), np.int32), id="read-only"
        ),
    ],
)
def test_ids_come_in_many_types(ids):
    recorder = tk.Recorder()
    recorder.record("a", **call(ids([1, 2]), ids([3])))
    found = recorder.record("a", **call(ids([1, 2, 3, 4]), ids([5, 6])))
    assert (found.base_turn, found.shared_length, found.clean) == (0, 3, True)
    rows = recorder.rows("a", "strict")
    assert rows["input_ids"].to_pylist() == [[1, 2, 3, 4, 5, 6]]


def test_what_it_was_given_may_change_afterwards():
    ids = [np.array([1, 2, 3], np.int32), np.array([4], np.int32)]
    logprobs = np.array([-0.5], np.float32)
    tool = {"role": "assistant", "tool_calls": [{"arguments": {"a": [1]}}]}
    talk = [{"role": "user", "content": [{"text": "u"}]}]
    recorder, other = tk.Recorder(), tk.Recorder()

    def record_in(one, ids, logprobs, talk, tool):
        one.record(
            "a",
            prompt_ids=ids[0],
            output_ids=ids[1],
            output_logprobs=logprobs,
            prompt_messages=talk,
            response_message=tool,
        )

    record_in(other, *copy.deepcopy((ids, logprobs, talk, tool)))
    record_in(recorder, ids, logprobs, talk, tool)
    before = recorder.turns("a")
    for run in ids:
        run[:] = 9
    logprobs[:] = -9
    talk[0]["content"][0]["text"] = "another"
    talk.append(USER)
    tool["tool_calls"][0]["arguments"]["a"].append(2)
    tool["role"] = "user"
    assert before == recorder.turns("a") == other.turns("a")
    # the same objects, said anew, are what they are now
    ids[0][:] = [1, 2, 3]
    record_in(recorder, ids, logprobs, talk, tool)
    record_in(other, *copy.deepcopy((ids, logprobs, talk, tool)))
    assert recorder.turns("a") == other.turns("a")
    assert before == recorder.turns("a").slice(0, 1)


def test_tables_taken_out_do_not_see_later_calls():
    recorder = tk.Recorder()
    taken = []
    for k in range(200):
        recorder.record(
            "a",
            **call(range(3 * k + 1), [7000 + k] * 50, output_logprobs=[-k / 100] * 50),
        )
        taken.append((recorder.turns("a"), recorder.turns("a").to_pylist()))
    for table, lines in taken:
        assert table.to_pylist() == lines


def test_threads_share_a_recorder():
    """Each writes its own session and one that all write to, while others read."""
    n_threads, n_calls = 4, 60
    recorder = tk.Recorder()
    together = Barrier(n_threads)

    def work(me):
        prompt = [me]
        together.wait()
        for k in range(n_calls):
            recorder.record(f"own-{me}", **call(prompt, [k]))
            prompt = [*prompt, k, me]
            recorder.record("shared", **call([100 + me, k], [k]))
            rows = recorder.rows("shared", "per_call")
            mine = [ids for ids in rows["input_ids"].to_pylist() if ids[0] == 100 + me]
            assert [ids[2] for ids in mine] == list(range(k + 1))

    with ThreadPoolExecutor(n_threads) as pool:
        for done in [pool.submit(work, me) for me in range(n_threads)]:
            done.result()
    assert recorder.turns("shared")["turn_index"].to_pylist() == list(
        range(n_threads * n_calls)
    )
    for me in range(n_threads):
        rows = recorder.rows(f"own-{me}", "strict")
        assert rows["loss_mask"].to_pylist() == [[False, True] * n_calls]


def test_readers_see_whole_calls_from_the_first_on():
    """A reader's table is that of the calls up to one of them, messages and all."""
    n_readers, n_calls = 3, 80
    talk, prompt, calls = [USER], [1], []
    for k in range(n_calls):
        reply = {"role": "assistant", "content": str(k)}
        said = {"prompt_messages": list(talk), "response_message": reply}
        logprobs = [-k / 100] * 3
        calls.append(call(list(prompt), [k] * 3, output_logprobs=logprobs, **said))
        talk += [reply, USER]
        prompt += [k] * (3 if k % 7 else 2)  # now and then a reply comes back changed
    alone = tk.Recorder()
    for one in calls:
        alone.record("a", **one)
    whole = alone.turns("a").to_pylist()

    recorder = tk.Recorder()
    recorder.record("a", **calls[0])
    together = Barrier(n_readers + 1)

    def write():
        together.wait()
        for one in calls[1:]:
            recorder.record("a", **one)

    def read():
        together.wait()
        n_seen = 0
        while n_seen < n_calls:
            table = recorder.turns("a")
            assert table.num_rows >= n_seen
            n_seen = table.num_rows
            assert table.to_pylist() == whole[:n_seen]

    with ThreadPoolExecutor(n_readers + 1) as pool:
        for done in [
            pool.submit(write),
            *(pool.submit(read) for _ in range(n_readers)),
        ]:
            done.result(timeout=120)


def test_sessions_dropped_while_others_record():
    """A call of a dropped session is refused or begins it anew; none is lost halfway."""
    n_writers, n_calls = 3, 150
    recorder = tk.Recorder()
    together = Barrier(n_writers + 1)

    def write():
        together.wait()
        refused = 0
        for k in range(n_calls):
            try:
                recorder.record("a", **call([1, 2], [k]))
            except UnknownSessionError:
                refused += 1
        return refused

    def drop():
        together.wait()
        dropped = 0
        for _ in range(n_calls):
            try:
                recorder.drop("a")
            except UnknownSessionError:
                continue
            dropped += 1
        return dropped

    with ThreadPoolExecutor(n_writers + 1) as pool:
        writers = [pool.submit(write) for _ in range(n_writers)]
        dropped = pool.submit(drop).result(timeout=120)
        refused = sum(writer.result(timeout=120) for writer in writers)
    assert refused <= dropped * n_writers
    recorder.record("a", **call([1, 2], [0]))
    rows = recorder.rows("a", "per_call")
    assert rows["row_index"].to_pylist() == list(range(rows.num_rows))


def test_a_call_that_was_waiting_when_its_session_was_dropped(monkeypatch):
    """It found the session, then waited for its lock: as if the drop came between."""
    recorder = tk.Recorder()
    recorder.record("a", **call([1], [2]))
    found = recorder._known("a")
    recorder.drop("a")
    monkeypatch.setattr(recorder, "_session", lambda name: found)
    monkeypatch.setattr(recorder, "_known", lambda name: found)
    with pytest.raises(UnknownSessionError, match="dropped while a call was under way"):
        recorder.record("a", **call([1], [2]))
    for ask in asks(recorder, "a"):
        with pytest.raises(UnknownSessionError, match="'a'"):
            ask()


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
    rows = recorder.rows("a", "strict")
    assert rows.num_rows == n
    assert rows["shared_length"].to_pylist() == [0, *range(2 * n - 2, 0, -2)]


def test_a_list_of_messages_as_long_as_any():
    talk = [
        {"role": "assistant" if k % 2 else "user", "content": str(k)}
        for k in range(30_000)
    ]
    reply = {"role": "assistant", "content": "reply"}
    recorder = tk.Recorder()
    for messages, prompt in (
        (talk, [1]),
        ([*talk, reply, USER], [1, 7, 2]),
        (talk[:500], [1]),
        ([*talk[:500], USER], [1, 7]),
    ):
        recorder.record(
            "a",
            **call(prompt, [7], prompt_messages=messages, response_message=reply),
        )
    turns = recorder.turns("a")
    assert turns["base_turn"].to_pylist() == [None, 0, 0, 0]
    assert turns["shared_messages"].to_pylist() == [0, 30_001, 500, 500]
