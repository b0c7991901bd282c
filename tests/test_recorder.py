"""The recorder holds what a table of the same calls holds, call by call."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
from hypothesis import given

import trajkit as tk
from tests import reference
from tests.strategies import policies, row_limits, runs, sessions
from tests.tables import by_session, policy_of, turns_table


def recordable(turns):
    """The turns as a recorder numbers them: from 0, no gaps; and no empty prompt."""
    return [
        {**turn, "turn_index": i, "prompt_ids": turn["prompt_ids"] or [0]}
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


@given(sessions())
def test_turns_expand_to_what_was_recorded(turns):
    turns = recordable(turns)
    recorder = tk.Recorder()
    for turn in turns:
        record(recorder, turn)
    table = recorder.turns("s")
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


def test_a_dropped_session_is_unknown_and_may_begin_anew():
    recorder = tk.Recorder()
    recorder.record("a", **call([1], [2]))
    before = recorder.turns("a")
    recorder.drop("a")
    for asked in (
        lambda: recorder.rows("a", "strict"),
        lambda: recorder.turns("a"),
        lambda: recorder.drop("a"),
    ):
        with pytest.raises(tk.UnknownSessionError, match="'a'"):
            asked()
    assert recorder.sessions == []
    assert recorder.record("a", **call([5], [6])).turn_index == 0
    assert recorder.rows("a", "strict")["input_ids"].to_pylist() == [[5, 6]]
    assert before["suffix_ids"].to_pylist() == [[1]]


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        pytest.param(call([1, -1], [2]), "-1", id="negative id"),
        pytest.param(call([1], [2**31]), str(2**31), id="id beyond int32"),
        pytest.param(call([1, True], [2]), "True", id="a bool"),
        pytest.param(
            call([1], [2], output_logprobs=[-1.0, -1.0]), "2", id="too many logprobs"
        ),
        pytest.param(call([1], [2], output_logprobs=[float("nan")]), "nan", id="a NaN"),
        pytest.param(
            call([1], [2], prompt_messages=[{"content": "x"}]),
            "role",
            id="a message without a role",
        ),
    ],
)
def test_a_refused_call_leaves_the_session_as_it_was(bad, match):
    recorder = tk.Recorder()
    recorder.record("a", **call([1], [2]))
    before = recorder.turns("a")
    with pytest.raises(tk.InvalidTurnsError, match=match):
        recorder.record("a", **bad)
    assert recorder.turns("a") == before
    assert recorder.record("a", **call([1, 2, 3], [4])).turn_index == 1


def test_what_it_was_given_may_change_afterwards():
    prompt = np.array([1, 2, 3], np.int32)
    output = np.array([4], np.int32)
    logprobs = np.array([-0.5], np.float32)
    recorder = tk.Recorder()
    recorder.record("a", prompt_ids=prompt, output_ids=output, output_logprobs=logprobs)
    before = recorder.rows("a", "strict").to_pylist()
    prompt[:] = output[:] = 9
    logprobs[:] = -9
    assert recorder.rows("a", "strict").to_pylist() == before


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
