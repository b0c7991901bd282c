"""Each kind of fault is found where it is planted, and nothing in rows that have none."""

import copy
from functools import cache
from itertools import product

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trajkit as tk
from tests.fuzz.sessions import generated_runs
from tests.made_tables import linearized, replaced, turns_table
from tests.verification.mutations import (
    CLEAN,
    FAULTS,
    OTHER,
    facts_of,
    missed_in,
    picking,
    planted_in,
    pop_token,
    rich_rows,
    rich_run,
    turn,
)
from trajkit.errors import InvalidTurnsError, SchemaError
from trajkit.policies import PRESETS
from trajkit.schema import (
    CAUSES,
    REGIONS,
    ROWS,
)
from trajkit.turns import content_ids

rich_seeds = st.integers(0, 63)
KEEPS_ALL = ("faithful", "strict", "per_call", "skyrl", "graph")


@pytest.mark.parametrize(
    "fault", [pytest.param(f, id=f.__name__.replace("_", " ")) for f in FAULTS]
)
@settings(max_examples=settings.default.max_examples // 10)
@given(st.data(), rich_seeds)
def test_a_fault_is_found_where_it_is_planted(fault, data, seed):
    turns, rows = rich_run(seed), copy.deepcopy(rich_rows(seed, "faithful"))
    due = fault(rows, picking(lambda n: data.draw(st.integers(0, n - 1))))
    table = pa.Table.from_pylist(rows, ROWS)
    found = tk.verify(table, turns, "faithful", sessions=facts_of(turns)).to_pylist()
    assert any(due.items() <= one.items() for one in found)


@pytest.mark.parametrize("policy", PRESETS)
def test_planted_faults_are_found_under_each_policy(policy):
    rows, turns, planted = planted_in(policy)
    assert len(planted) > 112
    # rewards that are not known, of a session whose only row has any part of one
    assert set(missed_in(rows, turns, planted, policy)) <= {"reward_changed"}
    # without its name, what is the choice of a policy is not found
    assert len(missed_in(rows, turns, planted, None)) < len(planted) / 6


# 245 as a rule, 2,100 in the stage `fuzz` of CI
MANY = 7 * settings.default.max_examples
HARD_LOSSES = ("absorbed", "rewritten", "cut", "untrainable", "unrouted")


@cache
def many_turns():
    return turns_table(generated_runs(MANY))


@pytest.mark.parametrize("limit", [None, 12], ids=["whole rows", "rows of 12 tokens"])
@pytest.mark.parametrize("policy", PRESETS)
def test_nothing_is_found_in_many_sessions(policy, limit):
    turns = many_turns()
    facts = facts_of(turns)
    rows, report = linearized(turns, policy, sessions=facts, max_row_tokens=limit)
    assert report.num_rows == MANY
    assert pc.sum(report["tokens_trained"]).as_py() > 2 * MANY
    for named in (policy, None):
        found = tk.verify(rows, turns, named, sessions=facts, max_row_tokens=limit)
        assert found.slice(0, 5).to_pylist() == []


def test_generated_sessions_are_hard():
    """Pieces of every kind come out, tokens are lost in every way, drift has all causes."""
    turns = many_turns()
    kinds, lost = set(), dict.fromkeys(HARD_LOSSES, 0)
    for policy in ("faithful", "slime", "trl"):
        rows, report = linearized(turns, policy, max_row_tokens=12)
        kinds |= set(rows["spans"].combine_chunks().flatten().field("kind").to_pylist())
        for reason in lost:
            lost[reason] += pc.sum(report[f"lost_{reason}"]).as_py()
    assert kinds == {"trained", "duplicate", "absorbed", "cut", "untrainable"}
    assert all(lost.values())
    drift = tk.classify_drift(turns, tk.link(turns))
    assert set(drift["cause"].to_pylist()) == set(CAUSES)
    assert set(drift["region"].to_pylist()) == set(REGIONS)


@pytest.mark.parametrize(
    "absorb", ["absorb_short_drift", "absorb_short_reply", "absorb_any"]
)
@pytest.mark.parametrize("keep_head", [False, True])
def test_a_lost_reply_may_begin_with_tokens_that_have_no_logprob(absorb, keep_head):
    records = []
    for n_same, *logprobs in product(range(4), *[[None, -0.5]] * 3):
        shared = {"session_id": f"{n_same} {logprobs}"}
        prompt = [*[1, 2, 3, 4, 5][: 2 + n_same], 9]
        first = {
            "prompt_ids": [1, 2],
            "output_ids": [3, 4, 5],
            "output_logprobs": logprobs,
        }
        second = {"prompt_ids": prompt, "output_ids": [7], "output_logprobs": [-0.5]}
        records += [shared | first, shared | second]
    turns = tk.from_records(records)
    policy = tk.policy(
        "trl", on_drift=absorb, keep_prefix=keep_head, missing_logprobs="untrain"
    )
    rows = tk.linearize(turns, policy)
    assert tk.verify(rows, turns, policy).to_pylist() == []


def test_turns_in_delta_form():
    delta = tk.compact(tk.from_records(CLEAN))
    assert delta["suffix_ids"].to_pylist() == [[1, 2], [6]]
    rows = tk.linearize(delta, "strict")
    assert tk.verify(rows, delta, "strict").num_rows == 0
    changed = replaced(rows, "input_ids", [[1, 2, 3, 4, 5, 7, 8, 9]])
    found = tk.verify(changed, delta, "strict", max_row_tokens=6)
    assert {(one["token"], one["rule"]) for one in found.to_pylist()} >= {
        (5, "row_tokens"),
        (6, "length"),
    }


WEIGHTS = {
    "token": [0.6, 0.4],
    "row": [0.5, 0.5],
    "rollout": [0.2, 0.2],
    "constant": [0.01, 0.01],
}


@pytest.mark.parametrize("weigh_by", WEIGHTS)
def test_weights_in_each_sense(weigh_by):
    turns = tk.from_records(CLEAN)
    rows = tk.linearize(turns, "per_call")
    table = replaced(rows, "row_weight", WEIGHTS[weigh_by])
    assert tk.verify(table, turns, "per_call", weigh_by=weigh_by).num_rows == 0
    for other in {"token", "row", "rollout"} - {weigh_by}:
        found = tk.verify(table, turns, "per_call", weigh_by=other)
        assert found["rule"].to_pylist() == ["row_weight"] * 2
    # a constant may be any: the rows need only agree
    found = tk.verify(table, turns, "per_call", weigh_by="constant")
    assert found.num_rows == (weigh_by == "token")


def test_no_turns_and_no_rows():
    turns = tk.from_records([])
    assert tk.verify(tk.linearize(turns), turns).num_rows == 0
    assert tk.verify(ROWS.empty_table(), tk.from_records(CLEAN)).num_rows == 0
    found = tk.verify(ROWS.empty_table(), tk.from_records(CLEAN), "faithful")
    assert found.select(["turn_index", "token", "rule"]).to_pylist() == [
        {"turn_index": 0, "token": 0, "rule": "not_trained"},
        {"turn_index": 1, "token": 0, "rule": "not_trained"},
    ]
    found = tk.verify(tk.linearize(tk.from_records(CLEAN)), turns)
    assert found["rule"].to_pylist() == ["session"]


def test_images_that_are_not_the_session_s():
    image = {"kind": "image", "hash": "ab" * 32, "token_id": 7, "start": 1, "stop": 4}
    prompt = [1, *content_ids("image", image["hash"], 3).tolist(), 2]
    turns = tk.from_records([turn(prompt, [3, 9], mm_items=[image])])
    rows = tk.linearize(turns, "faithful", reward=1.0)
    assert tk.verify(rows, turns, "faithful").num_rows == 0
    plain = tk.from_records([turn([1], [3])])
    for items, token in [
        (None, 1),
        ([image | {"hash": "cd" * 32}], 1),
        ([image | {"token_id": 8}], 1),
        ([image | {"stop": 3}], 1),
        ([image | {"start": 0, "stop": 3}], 0),
        ([image | {"start": 7, "stop": 10}], 1),
        ([image | {"start": 4, "stop": 1}], 1),
        ([image | {"stop": None}], None),
        ([None], None),
    ]:
        found = tk.verify(replaced(rows, "mm_items", [items]), turns)
        first = found.to_pylist()[0]
        assert (first["rule"], first["token"]) == ("mm_items", token)
    # a session that has none
    rows = tk.linearize(plain, "faithful", reward=1.0)
    rows = replaced(rows, "mm_items", [[image | {"start": 0, "stop": 1}]])
    found = tk.verify(rows, plain)
    assert found["rule"].to_pylist() == ["mm_items"]


# Rows of other systems: ids, mask, logprobs, and little else.


def foreign(rows, *names):
    return rows.select(["session_id", "input_ids", "loss_mask", "logprobs", *names])


@pytest.mark.parametrize("policy", [*KEEPS_ALL, "slime", "trl"])
def test_rows_without_pieces(policy):
    """In either order, so that equal replies are told apart by their logprobs."""
    turns = turns_table(generated_runs(200, seed=1))
    rows = foreign(tk.linearize(turns, policy))
    for some in (rows, rows.take(pa.array(range(rows.num_rows)[::-1]))):
        assert tk.verify(some, turns, policy).to_pylist() == []


def response_only(row):
    start = row["prompt_length"]
    for name in ("loss_mask", "logprobs"):
        row[name] = row[name][start:]
    # other systems have no null
    row["logprobs"] = [0.0 if p is None else p for p in row["logprobs"]]
    return row


@settings(max_examples=25)
@given(rich_seeds)
def test_rows_without_pieces_whose_mask_is_of_the_response(seed):
    turns = rich_run(seed)
    rows = [response_only(row) for row in tk.linearize(turns, "per_call").to_pylist()]
    names = ("session_id", "input_ids", "loss_mask", "logprobs", "prompt_length")
    table = pa.table(
        {name: [row[name] for row in rows] for name in names}
        | {"loss_mask": [[int(m) for m in row["loss_mask"]] for row in rows]}
    )
    assert tk.verify(table, turns, "per_call").to_pylist() == []


def trained(row):
    return [k for k, one in enumerate(row["loss_mask"]) if one]


# what is changed, its new value, and the tokens that have a place
FOREIGN_FAULTS = {
    "mask": (
        "loss_mask",
        lambda old: not old,
        lambda row: range(len(row["loss_mask"])),
    ),
    "logprob": ("logprobs", lambda _: -99.0, trained),
    "trained id": ("input_ids", lambda _: OTHER, trained),
    "id before": ("input_ids", lambda _: OTHER, lambda row: range(trained(row)[-1])),
}


@pytest.mark.parametrize("whole", [True, False], ids=["full mask", "response mask"])
@pytest.mark.parametrize("fault", FOREIGN_FAULTS)
@settings(max_examples=10)
@given(st.data(), rich_seeds, st.sampled_from(KEEPS_ALL))
def test_a_fault_is_found_in_rows_without_pieces(fault, whole, data, seed, policy):
    """In its row at or after the token, or as tokens of the session that are lost."""
    turns = rich_run(seed)
    rows = copy.deepcopy(rich_rows(seed, policy))
    pick = picking(lambda n: data.draw(st.integers(0, n - 1)))
    row = pick([r for r in rows if any(r["loss_mask"]) and r["prompt_length"]])
    name, value, places = FOREIGN_FAULTS[fault]
    k = pick(places(row))
    row[name][k] = value(row[name][k])
    if not whole and not any(row["loss_mask"][: row["prompt_length"]]):
        response_only(row)
    known = without_pieces(rich_rows(seed, policy), turns, policy)
    found = without_pieces(rows, turns, policy)
    session, index = row["session_id"], row["row_index"]
    assert [
        one
        for one in found
        if one not in known
        and one["session_id"] == session
        and (one["row_index"] is None or one["row_index"] == index)
        and (one["row_index"] is None or one["token"] >= k)
    ]


def without_pieces(rows, turns, policy):
    names = ("session_id", "row_index", "input_ids", "loss_mask", "logprobs")
    table = pa.table({name: [row[name] for row in rows] for name in names})
    return tk.verify(table, turns, policy).to_pylist()


WHOLE = [1, 2, 3, 4, 5, 6, 8, 9], [0, 0, 1, 1, 1, 0, 1, 1]
FIRST = [1, 2, 3, 4, 5], [0, 0, 1, 1, 1]
SECOND = WHOLE[0], [0, 0, 0, 0, 0, 0, 1, 1]
LONG = [turn([*range(20)], [30, 31])]
CONTEXT = [{**CLEAN[0], "trainable": False}]


@pytest.mark.parametrize(
    ("turns", "rows", "policy", "expected"),
    [
        (CLEAN, [WHOLE], "strict", []),
        (CLEAN, [(WHOLE[0], [0, 1, *WHOLE[1][2:]])], None, [(0, None, 1, "mask")]),
        (CLEAN, [([1, 2, 3, OTHER, 5], FIRST[1])], None, [(0, None, 3, "mask")]),
        (CONTEXT, [FIRST], None, [(0, 0, 2, "untrainable")]),
        # the bytes of 1, 0, 0 are those of 256, 0, 0, 0 from the second on
        (
            [turn([1], [0, 0])],
            [([256, 0, 0, 0], [0, 1, 1, 0])],
            None,
            [(0, None, 1, "mask")],
        ),
        # the prompt's beginning is another, its end and the output stand: a policy that
        # splices trains replies after other tokens
        (
            LONG,
            [([0, OTHER, *range(2, 20), 30, 31], [0] * 20 + [1, 1])],
            "faithful",
            [(0, 0, 20, "context")],
        ),
        (LONG, [([0, OTHER, *range(2, 20), 30, 31], [0] * 20 + [1, 1])], None, []),
        # what a policy that keeps all may not lose or repeat
        (CLEAN, [FIRST, SECOND, FIRST], "faithful", [(2, 0, 2, "trained_twice")]),
        (CLEAN, [FIRST, SECOND, FIRST], None, []),
        (CLEAN, [FIRST], "faithful", [(None, 1, 0, "not_trained")]),
        (CLEAN, [FIRST], None, []),
        (
            CLEAN,
            [(WHOLE[0], [0, 0, 0, 0, 0, 0, 1, 0])],
            "strict",
            [(None, 0, 0, "not_trained"), (None, 1, 1, "not_trained")],
        ),
    ],
)
def test_what_is_wrong_with_rows_without_pieces(turns, rows, policy, expected):
    ids, masks = zip(*rows, strict=True)
    table = pa.table({"input_ids": ids, "loss_mask": masks})
    found = tk.verify(table, tk.from_records(turns), policy).to_pylist()
    names = ("row_index", "turn_index", "token", "rule")
    assert [tuple(one[name] for name in names) for one in found] == expected


@pytest.mark.parametrize(
    ("logprobs", "expected"),
    [
        ([0.0, 0.0], []),
        ([0.0, float("nan")], []),
        ([0.0, None], []),
        ([0.0, -9.0], [(1, "logprob")]),
        ([], []),
    ],
)
def test_logprobs_of_rows_without_pieces(logprobs, expected):
    turns = tk.from_records([turn([1], [2], output_logprobs=None)])
    rows = {"input_ids": [[1, 2]], "loss_mask": [[0, 1]], "logprobs": [logprobs]}
    found = tk.verify(pa.table(rows), turns).to_pylist()
    assert [(one["token"], one["rule"]) for one in found] == expected


def test_a_row_without_logprobs_may_have_an_empty_list():
    rows = {"input_ids": [[1, 2]], "loss_mask": [[0, 1]]}
    for logprobs, n_wrong in (([], 0), ([None, None], 1)):
        table = pa.table(
            {**rows, "logprobs": pa.array([logprobs], pa.list_(pa.float64()))}
        )
        turns = tk.from_records([turn([1], [2])])
        assert tk.verify(table, turns).num_rows == n_wrong


def test_a_complete_reply_counts_before_a_part_of_another():
    """The first row continues the reply 2 3, with which 2 3 4 begins."""
    calls = ([1], [2, 3, 4]), ([1], [2, 3]), ([1, 2, 3, 9], [5])
    turns = tk.from_records([turn(*one, output_logprobs=None) for one in calls])
    rows = foreign(tk.linearize(turns, "strict"))
    assert [*map(len, rows["input_ids"].to_pylist())] == [4, 5]
    for some in (rows, rows.take([1, 0])):
        assert tk.verify(some, turns, "strict").to_pylist() == []


PLAIN = {"input_ids": [[1]], "loss_mask": [[0]]}
NAMED = {"input_ids": [[1], [2]], "loss_mask": [[0], [0]], "session_id": ["c", None]}


@pytest.mark.parametrize(
    ("rows", "options", "error", "said"),
    [
        ({"input_ids": [[1]]}, {}, SchemaError, "loss_mask"),
        (PLAIN | {"loss_mask": [[0, 0]]}, {}, SchemaError, "2 values for 1 token"),
        (PLAIN | {"logprobs": [[0.0, 0.0]]}, {}, SchemaError, "2 values for 1 token"),
        (
            NAMED | {"row_index": [0, None]},
            {},
            SchemaError,
            "row_index is null in some",
        ),
        (NAMED, {}, SchemaError, "all or none"),
        (PLAIN, {"reward": {"d": 1.0}}, InvalidTurnsError, "'c'"),
    ],
)
def test_what_is_refused(rows, options, error, said):
    with pytest.raises(error, match=said):
        tk.verify(pa.table(rows), tk.from_records(CLEAN), **options)


# Rows of another policy


DRIFTED = [
    {"session_id": "s", "prompt_ids": [1, 2], "output_ids": [3, 4]},
    {"session_id": "s", "prompt_ids": [1, 2, 3, 9], "output_ids": [5]},
    {"session_id": "s", "prompt_ids": [1, 2, 3, 9, 5, 7], "output_ids": [6, 8]},
]


def plain(rows, *names):
    """The rows as another system has them."""
    return rows.select([*names, "input_ids", "loss_mask", "logprobs"])


@pytest.mark.parametrize("made", PRESETS)
def test_rows_are_those_of_the_named_policy_or_not(made):
    """Without a policy, rows of every preset are right."""
    turns = tk.from_records(DRIFTED)
    rows = tk.linearize(turns, made)
    names = (
        "spans",
        "prompt_length",
        "use_tool",
        "ill_formed",
        "segment_kind",
        "turns",
    )
    for named in (None, *PRESETS):
        due = tk.linearize(turns, named or made)
        same = plain(rows).equals(plain(due))
        for table in (plain(rows), plain(rows, "session_id")):
            assert (tk.verify(table, turns, named).num_rows == 0) == same, named
        same = plain(rows, *names).equals(plain(due, *names))
        assert (tk.verify(rows, turns, named).num_rows == 0) == same, named


def test_rows_of_another_policy_differ_in_rows_spans_and_tokens():
    turns = tk.from_records(DRIFTED)

    def found(rows, policy):
        lines = tk.verify(rows, turns, policy).to_pylist()
        assert {line["rule"] for line in lines} <= {"policy"}
        names = ("session_id", "row_index", "turn_index", "token", "detail")
        return [tuple(line[name] for name in names) for line in lines]

    faithful, trl = (tk.linearize(turns, one) for one in ("faithful", "trl"))
    assert found(faithful, "trl") == [
        (
            *("s", 0, None, 3),
            "id 4: policy 'trl' has id 9 there (4 tokens, expected 8)",
        ),
        ("s", 1, None, None, "policy 'trl' makes no such row"),
    ]
    assert found(trl, "slime") == [
        ("s", 0, 0, 2, "1 token that policy 'slime' does not train")
    ]
    assert found(plain(trl), "slime") == [
        (None, 0, None, 2, "1 token that policy 'slime' does not train")
    ]
    absent = "policy 'trl' makes a row of 8 tokens, 4 trained, which is not there"
    assert found(faithful.slice(0, 0), "trl") == [("s", 0, None, None, absent)]
    # a mask without the spans of the policy, which trains the same tokens
    slime = tk.linearize(turns, "slime")
    line = slime.to_pylist()[0]
    line["spans"] = [one for one in line["spans"] if one["kind"] != "absorbed"]
    short = pa.Table.from_pylist([line], slime.schema)
    assert [one[-1] for one in found(short, "slime")] == [
        "policy 'slime' has absorbed 2:2 (output 0:2) alone"
    ]


def test_a_row_without_its_last_token_is_no_path():
    turns = tk.from_records([{**CLEAN[0], "trainable": False}])
    row = tk.linearize(turns, tk.policy("strict", keep_untrained=True)).to_pylist()[0]
    row["spans"] = []
    pop_token(row, -1)
    found = tk.verify(pa.Table.from_pylist([row], ROWS), turns).to_pylist()
    assert ("row_tokens", 4) in [(one["rule"], one["token"]) for one in found]


def test_the_turns_of_a_row_end_with_its_last():
    turns = tk.from_records(CLEAN)
    row = tk.linearize(turns, "strict").to_pylist()[0] | {"last_turn": 0}
    found = tk.verify(pa.Table.from_pylist([row], ROWS), turns)
    assert "turns" in found["rule"].to_pylist()


def test_a_spliced_row_begins_with_a_whole_prompt_and_has_its_spans_in_order():
    prompts, outputs = [[1, 2], [1, 2, 5], [1, 2, 5, 6], [4, 4]], [3, 7, 2, 6]
    calls = zip(prompts, outputs, strict=True)
    turns = turns_table([turn(p, [x, 9], finish_reason="stop") for p, x in calls])
    policy = tk.policy("polar", end_of_turn_token_id=9)
    first, second = tk.linearize(turns, policy).to_pylist()
    # both of these spans are empty
    first["spans"][1:] = first["spans"][:0:-1]
    (found,) = tk.verify(
        pa.Table.from_pylist([first, second], ROWS), turns, policy
    ).to_pylist()
    assert "has the spans in another order" in found["detail"]
    for name in ("input_ids", "loss_mask", "logprobs"):
        del second[name][0]
    second["spans"][0] |= {"start": 1, "stop": 3}
    found = tk.verify(pa.Table.from_pylist([first, second], ROWS), turns)
    assert "row_tokens" in found["rule"].to_pylist()


def test_a_request_whose_messages_the_base_has_is_routed():
    reply = {"role": "assistant", "content": "x"}
    calls = ([1, 2], [{"role": "user"}]), ([1, 2, 3, 4], [{"role": "user"}, reply])
    delta = tk.compact(
        tk.from_records(
            {
                "session_id": "s",
                "prompt_ids": prompt,
                "output_ids": [3, 9],
                "prompt_messages": messages,
                "response_message": reply,
            }
            for prompt, messages in calls
        )
    )
    assert delta["suffix_messages"].to_pylist()[1] == []
    policy = tk.policy("faithful", tie_break="first")
    found = tk.verify(ROWS.empty_table(), delta, policy).to_pylist()
    assert {(one["turn_index"], one["rule"]) for one in found} == {
        (0, "not_trained"),
        (1, "not_trained"),
    }
