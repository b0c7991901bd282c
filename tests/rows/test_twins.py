"""Links, rows and reports of every policy are the twins', in every form of the turns.

Sessions and policies are those of `tests.fuzz`, and small sessions by hand.
"""

import pytest
from hypothesis import settings

import trajkit as tk
from tests import against_twins
from tests.fuzz.rows import difference, drawn_case, reduced
from tests.fuzz.sessions import END
from tests.made_tables import turns_table
from trajkit.policies import PRESETS


def said(role, content):
    return {"role": role, "content": content}


def bare(*calls, **fields):
    """Calls of prompt and output, without messages."""
    unsaid = dict.fromkeys(("prompt_messages", "response_message", "output_logprobs"))
    unsaid |= {"finish_reason": "stop", "ill_formed": False, **fields}
    return [{**unsaid, "prompt_ids": p, "output_ids": o} for p, o in calls]


def growing(*calls):
    """Calls of one agent whose list of messages grows by one each time."""
    messages = [said("user", n) for n in range(len(calls))]
    return [
        {**turn, "prompt_messages": messages[: k + 1]}
        for k, turn in enumerate(bare(*calls))
    ]


def talk(*calls):
    """Calls of what they were asked beyond one message, their reply, prompt and output."""
    return [
        {
            **bare((prompt, output))[0],
            "prompt_messages": [said("user", "u"), *more],
            "response_message": said("assistant", reply),
            "output_logprobs": [-1.0] * len(output),
        }
        for more, reply, prompt, output in calls
    ]


A, B, V = said("assistant", "a"), said("assistant", "b"), said("user", "v")
# The answer of turn 0 goes on in turn 1 and, with its last token changed, in turn 3; turn
# 2 goes on from turn 0 as well, and for longer.
SHARED = talk(
    ([], "a", [1], [2, 3]),
    ([A, V], "b", [1, 2, 3, 4], [5, 5, 5]),
    ([A, said("user", "w")], "c", [1, 2, 3, *[6] * 5], [7]),
    ([A, said("user", "x")], "d", [1, 2, 9, 4], [5]),
)
# Turn 1 takes turn 0's reply out of its row, turn 2 keeps it in a shorter one.
ABSORBED = [SHARED[0], {**SHARED[3], "prompt_ids": [1, 2, 9, 4, 4, 4]}, SHARED[1]]
SAME_ANSWER_TWICE = talk(
    ([], "a", [1], [5, 6]),
    ([], "a", [1], [5, 6]),
    ([A, V], "a", [1, 5, 6, 2], [5, 6]),
)
TRL_FOREST = {"train_in": "earliest", "parent_by": "messages", "fork_threshold": 9}
# prompts without tokens, behind a call that sampled some
EMPTY_PROMPTS = [
    {**turn, "prompt_messages": [A] * n, "response_message": A}
    for turn, n in zip(bare(([], [0, 9]), ([], []), ([], [])), (1, 2, 1), strict=True)
]
FLAGGED = bare(([], [0, 9]), ill_formed=True) + bare(([], []))
# By messages, both later turns continue the first.
CONTINUED_TWICE = talk(
    ([], "a", [1], [2, END]),
    *(([A, said("user", f"{k}")], "a", [1, 2, END, k], [k, END]) for k in (5, 6)),
)
RETRIED = bare(([1], [2, 9]), ([1], [3, 9]), ([1, 3, 9, 4], [5]), ([1, 3, 9, 4], []))
# Turn 1, recorded first, goes on from turn 2, and so does turn 0, for longer.
LATE = bare(([1, 2, 3, 4, 5], [6, 6, 6]), ([1, 2, 3, 4], [7]), ([1], [2, 3]))
# Of replies that are equal, as far as the prompt shows them, the shortest path counts,
# then the first.
EQUAL_REPLIES = talk(
    ([], "a", [1], [6, 7, 8]),
    ([], "a", [1], [6, 7]),
    ([], "a", [1], [6, 7]),
    ([A, V], "b", [1, 6, 7, 9], [7]),
)
# Turn 2 takes the place of turn 0, which turn 3 then does not continue by its tokens.
REWRITTEN = [
    *talk(([], "a", [1], [7])),
    *bare(([5], [7])),
    *talk(([B, V], "c", [3], [7])),
    *bare(([1, 7, 9], [7]), ([5, 7, 9], [7])),
]
# Turn 0 sends out one agent by two calls. Turn 2 shows the result of the first, and the
# agent goes on.
TASKS = [{"id": one, "function": {"name": "Task"}} for one in ("c1", "c2")]
DISPATCHED = talk(
    ([], "a", [1], [2]),
    ([], "b", [5], [6]),
    (
        [A | {"tool_calls": TASKS}, said("tool", "t") | {"tool_call_id": "c1"}],
        "c",
        [1],
        [3],
    ),
    ([], "d", [5, 6], [7]),
)
DISPATCHED[0]["response_message"] = A | {"tool_calls": TASKS}
for turn in DISPATCHED[1::2]:
    turn["prompt_messages"] = [V, *turn["prompt_messages"][1:]]
# turn 2 is refused, and turn 3 goes on from turn 1, whose messages and reply are equal
REFUSED = talk(
    ([], "a", [1], [2, 3]),
    ([A, V], "b", [1, 2, 3, 4], [5]),
    ([A, V], "b", [1, 9], [5]),
    ([A, V, B, V], "c", [1, 2, 3, 4, 5, 6], [7]),
)
PARTS = bare(([1], [2, 3, 4]), ([1, 9], [5]))
PARTS[0]["output_logprobs"] = [-1.0, None, -2.0]


@pytest.mark.parametrize(
    ("turns", "name", "choices", "limit"),
    [
        (SAME_ANSWER_TWICE, "slime", {}, None),
        (SAME_ANSWER_TWICE, "slime", {}, 2),
        (SAME_ANSWER_TWICE, "strict", {}, None),
        (EQUAL_REPLIES, "faithful", {}, None),
        (REWRITTEN, "slime", {}, None),
        # a reply as long as the threshold, and one below it
        (REWRITTEN[:3], "slime", {"fork_threshold": 1}, None),
        (REWRITTEN[:3], "slime", {"fork_threshold": 2}, None),
        (SHARED, "faithful", {"train_in": "every"}, None),
        (SHARED, "faithful", {"train_in": "earliest"}, 6),
        # the row of turn 2, which repeats the reply of turn 0, is removed
        (SHARED, "faithful", {"max_rows": 2}, None),
        (ABSORBED, "trl", TRL_FOREST, None),
        # drift of one token
        (SHARED[::3], "trl", {"fork_threshold": 1}, None),
        (SHARED[::3], "trl", {"fork_threshold": 2}, None),
        # the first reply leaves no piece in the row that absorbed it, only its flag
        (
            FLAGGED,
            "trl",
            {"missing_logprobs": "untrain", "keep_untrained": True},
            None,
        ),
        # a piece for each part of a lost output that might have been trained
        (PARTS, "trl", {"missing_logprobs": "untrain"}, None),
        (RETRIED, "nemo", {}, None),
        (LATE, "nemo", {"train_in": "first"}, None),
        (LATE, "nemo", {"train_in": "earliest"}, None),
        (LATE, "nemo", {"train_in": "earliest", "row_selection": "main"}, None),
        (REFUSED, "miles", {}, None),
        (EMPTY_PROMPTS, "miles", {"fork_threshold": 3}, None),
        # the second prompt takes the place of the reply, or of its end, and does not fit
        (
            bare(([1], [2, 3]), ([1, 9, 9, 9, 9], [4])),
            "miles",
            {"fork_threshold": 9},
            5,
        ),
        (
            bare(([1], [2, 3]), ([1, 2, 9, 9, 9], [4])),
            "miles",
            {"fork_threshold": 9},
            5,
        ),
        (
            bare(([1], []), ([1, 2, 3], [4, 5])),
            "skyrl",
            {"truncate_at": "calls", "keep_empty": False},
            2,
        ),
        (DISPATCHED, "segments", {}, None),
        # The third prompt takes two outputs out of the row, and ends before the second.
        (
            growing(([1], [2, 3]), ([1, 2, 3, 4, 5], [6]), ([1, 9], [7])),
            "segments",
            {},
            None,
        ),
        # A prompt that departs right behind the row's opening prompt, and one inside it.
        (
            growing(([1, 2], [3]), ([1, 2], [4]), ([1], [5]), ([2, 2], [])),
            "segments",
            {},
            None,
        ),
        # Every prompt begins with an empty one, which is no reason to continue it.
        (bare(([], [2]), ([3], [4])), "segments", {}, None),
        # the same prompt twice, and none that has the end of a turn
        (
            bare(([1, 2], [3, END]), ([1, 2], [4, END]), ([1, 2, 4, END, 5], [6, END])),
            "polar",
            {"end_of_turn_token_id": END},
            None,
        ),
        (
            bare(([1], [2, END]), ([1, 2, 5], [6]), ([1, 2, 5, END], [7])),
            "polar",
            {},
            None,
        ),
        (
            CONTINUED_TWICE,
            "polar",
            {"parent_by": "messages", "end_of_turn_token_id": END},
            None,
        ),
    ],
)
def test_these_sessions_have_the_twins_rows(turns, name, choices, limit):
    policy = tk.policy(name, **choices)
    assert against_twins.difference(turns, policy, limit) is None
    table = turns_table(turns)
    rows = tk.linearize(table, policy, max_row_tokens=limit)
    assert tk.verify(rows, table, policy, max_row_tokens=limit).num_rows == 0


N_CASES = {
    "twins": settings().max_examples * 3 // 5,
    "forms": settings().max_examples // 8,
}


@pytest.mark.parametrize("mode", N_CASES)
@pytest.mark.parametrize("preset", PRESETS)
def test_cases_of_the_fuzzer(preset, mode):
    """The preset, or choices that differ from it; CI goes on with other seeds."""
    first = 1000 * [*PRESETS].index(preset)
    for seed in range(first, first + N_CASES[mode]):
        case = drawn_case(mode, seed, preset, n_sessions=12, longest=40)
        found = difference(case)
        if found is not None:
            pytest.fail(f"seed {seed}: {found}\n{reduced(case, seconds=2)}")


@pytest.mark.parametrize("mode", N_CASES)
def test_sessions_of_up_to_300_calls(mode):
    assert difference(drawn_case(mode, 0)) is None
