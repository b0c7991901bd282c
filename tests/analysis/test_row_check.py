"""`check_rows`: rows of every trainer's form, found by their tokens."""

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests.made_tables import turns_table
from tests.strategies import runs
from trajkit.errors import SchemaError
from trajkit.export import sft, slime, trl, verl
from trajkit.policies import PRESETS
from trajkit.schema import ROW_CHECK_KINDS, ROW_CHECKS

CALLS = [
    {
        "session_id": "s",
        "prompt_ids": [10, 11],
        "output_ids": [20, 21, 22],
        "output_logprobs": [-1.0, -2.0, -3.0],
        "reward": 1.0,
        "group_id": "g",
    },
    {
        "session_id": "s",
        "prompt_ids": [10, 11, 20, 21, 22, 30, 31],
        "output_ids": [23, 24],
        "output_logprobs": [-0.5, -0.25],
        "reward": 1.0,
        "group_id": "g",
    },
]
TURNS = tk.from_records(CALLS)
IDS = [10, 11, 20, 21, 22, 30, 31, 23, 24]
MASK = [0, 0, 1, 1, 1, 0, 0, 1, 1]
LOGPROBS = [-1.0, -2.0, -3.0, 0.0, 0.0, -0.5, -0.25]
FINE = ("trains", "unread_mask", "unknown_session", "session_without_rows")
NOTHING = [(0, 0, 2, "masked_out", 3), (0, 1, 7, "masked_out", 2)]


def lines(rows, turns=TURNS, policy=None):
    found = tk.check_rows(rows, turns, policy)
    assert found.schema == ROW_CHECKS
    required = [field.name for field in ROW_CHECKS if not field.nullable]
    assert not any(found[name].null_count for name in required)
    assert {*found["kind"].to_pylist()} <= {*ROW_CHECK_KINDS}
    return found.to_pylist()


def wrong(rows, turns=TURNS, policy=None):
    found = lines(rows, turns, policy)
    return [
        (line["row"], line["turn_index"], line["token"], line["kind"], line["tokens"])
        for line in found
        if line["kind"] not in FINE
    ]


def one(mask=MASK, ids=IDS, **more):
    return {"input_ids": [ids], "loss_mask": [mask], **more}


def test_a_right_mask_says_which_turn_trains_what():
    assert [line["detail"] for line in lines(one())] == [
        "trains 3 of 3 tokens of turn 0",
        "trains 2 of 2 tokens of turn 1",
    ]
    assert {line["session_id"] for line in lines(one())} == {"s"}


LONG = [*range(100, 130)]
OF_LONG = tk.from_records(
    [{"session_id": "a", "prompt_ids": LONG, "output_ids": [1, 2, 3]}]
)
CONTEXT_ONLY = tk.from_records([{**CALLS[0], "trainable": False}, CALLS[1]])
OUT_OF_CONTEXT = [(0, turn, None, "out_of_context", n) for turn, n in ((0, 3), (1, 2))]
LOST = [(None, 1, None, "in_no_row", 2)]


def replaced(at):
    return one(ids=[*IDS[:at], 99, *IDS[at + 1 :]])


@pytest.mark.parametrize(
    ("rows", "expected", "turns"),
    [
        # of the mask, a value is in the wrong place
        (one([*MASK[1:], 0]), [(0, None, 1, "mask_shifted", 4)], TURNS),
        (
            one([0, *MASK[:-1]]),
            [(0, None, 3, "mask_shifted", 4), (0, 1, 8, "masked_out", 1)],
            TURNS,
        ),
        (one([*MASK[2:], 0, 0]), [(0, None, 0, "mask_shifted", 8)], TURNS),
        (one([0, 0, *[1] * 7]), [(0, None, 5, "not_sampled", 2)], TURNS),
        (one([0, 1, *MASK[2:]]), [(0, None, 1, "not_sampled", 1)], TURNS),
        (one([0, 0, 1, 1, 0, *MASK[5:]]), [(0, 0, 4, "masked_out", 1)], TURNS),
        (one([*MASK[:5], *[0] * 4]), [(0, 1, 7, "masked_out", 2)], TURNS),
        (one([0] * 9), NOTHING, TURNS),
        (one([1] * 9), [(0, None, at, "not_sampled", 2) for at in (0, 5)], TURNS),
        # a shift would leave nothing
        (
            one([*[0] * 11, 1], [*IDS, 40, 41, 42]),
            [(0, None, 11, "not_sampled", 1), *NOTHING],
            TURNS,
        ),
        # the row ends early
        (one(MASK[:5], IDS[:5]), LOST, TURNS),
        (one(MASK[:4], IDS[:4]), [(None, 0, None, "in_no_row", 1), *LOST], TURNS),
        (
            {"input_ids": [IDS, IDS], "loss_mask": [MASK, MASK]},
            [(1, 0, None, "trained_twice", 3), (1, 1, None, "trained_twice", 2)],
            TURNS,
        ),
        (one([0, 1], [5, 6]), [(0, None, None, "not_found", 1)], TURNS),
        (one(), [(0, None, None, "not_found", 5)], TURNS.slice(0, 0)),
        # after other tokens than it was sampled after
        (
            one([0] * 30 + [1] * 3, [LONG[0], 999, *LONG[2:], 1, 2, 3]),
            [(0, 0, None, "out_of_context", 3)],
            OF_LONG,
        ),
        # one token of a reply, or of the prompt, was replaced
        (
            replaced(3),
            [
                *((0, 0, None, "out_of_context", 1), (0, 1, None, "out_of_context", 2)),
                *((0, None, 3, "not_sampled", 1), (None, 0, None, "in_no_row", 1)),
            ],
            TURNS,
        ),
        (replaced(1), OUT_OF_CONTEXT, TURNS),
        (one(), [(0, None, 2, "untrainable", 3)], CONTEXT_ONLY),
        (one([0] * 7 + [1, 1]), [], CONTEXT_ONLY),
    ],
)
def test_what_is_wrong_has_a_name_and_a_place(rows, expected, turns):
    assert wrong(rows, turns) == expected


def test_a_row_that_was_not_found_names_its_session():
    assert lines(one([0, 1], [5, 6]))[1]["kind"] == "session_without_rows"
    named = one(session_id=["s"], ids=[5, 6], mask=[0, 1])
    assert "of session 's'" in lines(named)[0]["detail"]


@pytest.mark.parametrize(
    "more",
    [{}, {"attention_mask": [[1] * 10]}],
)
@pytest.mark.parametrize("token", [10, 9])
def test_a_token_before_the_prompt_is_no_padding(token, more):
    """A second BOS, or another token, that no call saw."""
    rows = one([0, *MASK], [token, *IDS], **more)
    assert wrong(rows) == OUT_OF_CONTEXT
    rows = one([1, *MASK], [token, *IDS], **more)
    assert wrong(rows) == [*OUT_OF_CONTEXT, (0, None, 0, "not_sampled", 1)]


def test_padding_is_several_equal_tokens_that_nothing_trains_or_says_are_real():
    ids = [0, 0, *IDS]
    assert wrong(one([0, 0, *MASK], ids)) == []
    found = wrong(one([0, 1, *MASK], ids))
    assert found == [*OUT_OF_CONTEXT, (0, None, 1, "not_sampled", 1)]
    assert wrong(one([0, 0, *MASK], ids, attention_mask=[[1] * 11])) == OUT_OF_CONTEXT
    one_pad = one([0, *MASK], [0, *IDS], attention_mask=[[0] + [1] * 9])
    assert wrong(one_pad) == []


@pytest.mark.parametrize("table", [pa.table, lambda rows: pa.table(rows).to_pylist()])
def test_a_mask_that_was_not_read_is_named(table):
    """Of any form, if its name is that of a mask."""
    rows = table(one(train_mask=[MASK], masked_ids=[MASK], advantage=[[0.5]]))
    assert wrong(rows) == []
    (detail,) = (x["detail"] for x in lines(rows) if x["kind"] == "unread_mask")
    assert detail.startswith("1 row has 'train_mask', which was not read")


# --- sessions that rows name, and packed rows

TWO = tk.from_records(
    [*CALLS, {"session_id": "t", "prompt_ids": [10, 11], "output_ids": [40, 41]}]
)


def test_a_row_that_names_another_session():
    found = lines(one(session_id=["t"]), TWO)
    assert found[0]["kind"] == "other_session"
    assert found[0]["detail"] == "it names session 't', and its tokens are of 's'"
    assert [line["kind"] for line in found[1:]] == [
        *("trains", "trains", "session_without_rows")
    ]


def test_a_row_that_names_no_session_of_the_log_is_found_all_the_same():
    found = lines(one(session_id=["x"]))
    assert [line["kind"] for line in found] == ["trains", "trains", "unknown_session"]
    assert (
        "1 row names a session that the log does not have, such as 'x'"
        in (found[2]["detail"])
    )


def test_a_packed_row_is_named():
    rows = one([*MASK, 0, 0, 1, 1], [*IDS, 10, 11, 40, 41])
    assert wrong(rows, TWO) == [(0, None, 9, "several_sequences", 2)]


# --- logprobs


@pytest.mark.parametrize(
    ("logprobs", "expected"),
    [
        (LOGPROBS, []),
        ([None, None, *LOGPROBS], []),
        ([0.0, *LOGPROBS], []),  # one per predicted token
        ([*LOGPROBS[1:], 0.0], [(0, None, 2, "logprobs_shifted", 4)]),
        ([0.0, *LOGPROBS[:-1]], [(0, None, 2, "logprobs_shifted", 4)]),
        ([-1.0, -2.0, -9.0, 0.0, 0.0, -0.5, -0.25], [(0, None, 4, "logprobs", 1)]),
        ([-1.001, -2.0, -3.0, 0.0, 0.0, -0.5, -0.25], []),
    ],
)
def test_logprobs_are_those_of_the_engine(logprobs, expected):
    assert wrong(one(logprobs=[logprobs])) == expected


# --- the forms of trainers

ROWS = tk.linearize(TURNS)


def response(values):
    return values[2:]


FORMS = {
    "trajkit": ROWS,
    "floats": one([float(bit) for bit in MASK]),
    "response": one(response(MASK)),
    "labels": one()
    | {"labels": [[i if m else -100 for i, m in zip(IDS, MASK, strict=True)]]},
    "labels of the next token": {
        "input_ids": [IDS],
        "labels": [
            [i if m else -100 for i, m in zip(IDS[1:], MASK[1:], strict=True)] + [-100]
        ],
    },
    "sft": sft.labels_table(ROWS),
    "skyrl-sft": sft.mask_table(ROWS),
    "padded labels": {
        "input_ids": np.array([[*IDS, 0, 0]]),
        "labels": np.array(
            [[*(i if m else -100 for i, m in zip(IDS, MASK, strict=True)), -100, -100]]
        ),
        "attention_mask": np.array([[1] * len(IDS) + [0, 0]]),
    },
    "verl": [field for rollout in verl.agent_loop_fields(ROWS) for field in rollout],
    "verl padded": verl.padded_fields(ROWS, 4, 10, 0),
    "verl without attention": {
        "prompts": np.array([[0, 0, 10, 11]]),
        "responses": np.array([[*IDS[2:], 0]]),
        "response_mask": np.array([[*MASK[2:], 0]]),
    },
    "slime": slime.sample_fields(ROWS),
    "slime objects": [SimpleNamespace(**one) for one in slime.sample_fields(ROWS)],
    "slime without a mask": [{"tokens": IDS[:5], "response_length": 3}],
    "trl": trl.rollout_func_fields(ROWS),
    "trl tensors": {
        "prompt_ids": np.array([[0, 10, 11]]),
        "prompt_mask": np.array([[0, 1, 1]]),
        "completion_ids": np.array([[*IDS[2:], 0]]),
        "completion_mask": np.array([[1] * 7 + [0]]),
        "tool_mask": np.array([[*MASK[2:], 0]]),
        "sampling_per_token_logps": np.array([[*LOGPROBS, 0.0]]),
    },
    "openrlhf": {
        "sequences": np.array([[0, *IDS, 0]]),
        "attention_mask": np.array([[0] + [1] * 9 + [0]]),
        "action_mask": np.array([[*MASK, 0]]),
    },
    "polars": pytest.importorskip("polars").DataFrame(one()),
    "pandas": pytest.importorskip("pandas").DataFrame(one()),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_trainer_is_understood(form):
    found = lines(FORMS[form])
    trained = [line["detail"] for line in found if line["kind"] == "trains"]
    assert trained[0] == "trains 3 of 3 tokens of turn 0"
    missing = (
        [(None, 1, None, "in_no_row", 2)] if form == "slime without a mask" else []
    )
    assert wrong(FORMS[form]) == missing


@pytest.mark.parametrize(
    "form", ["verl padded", "trl tensors", "verl without attention"]
)
def test_positions_count_padding(form):
    """A finding names the position in the tensor that was given."""
    name = {"trl tensors": "tool_mask"}.get(form, "response_mask")
    rows = {key: np.array(value) for key, value in FORMS[form].items()}
    rows[name][0][3] = 1  # the tool's first token
    prompt = rows.get("prompts", rows.get("prompt_ids"))
    at = prompt.shape[1] + 3
    assert [(line[2], line[3]) for line in wrong(rows)] == [(at, "not_sampled")]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"text": ["a"]}, "has the columns text: expected ids"),
        ({"input_ids": [[1]]}, "expected a mask, one of loss_mask"),
        (one([0] * 10), "loss_mask has 10 values for 9 tokens"),
        (
            {"input_ids": [[1, 2]], "labels": [[-100, 7]]},
            r"labels\[1\] is 7, which is nei",
        ),
        (one(labels=[[-100] * 9]), "loss_mask and labels contradict .* token 2"),
        (one(response_mask=[[0, 0]]), "loss_mask and response_mask contradict"),
        (one(completion_mask=[[0] * 7]), "loss_mask and completion_mask contradict"),
        (
            one(attention_mask=[[1] * 8 + [0]]),
            "loss_mask and attention_mask contradict each other at token 8",
        ),
        (
            [{"tokens": IDS, "response_length": 5, "loss_mask": MASK[2:]}],
            "loss_mask and response_length contradict",
        ),
        (one(tokens=[[5, 5, 5]]), "input_ids has other ids than tokens"),
        (
            one(position_ids=[[0, 1, 2, 3, 4, 0, 1, 2, 3]]),
            "position_ids start again at token 5: the row has several sequences",
        ),
        (one(attention_mask=[[1] * 5 + [2] * 4]), r"attention_mask\[5\] is 2"),
        ([{"prompts": "a", "responses": "b", "response_mask": [1]}], "prompts is 'a'"),
        ([{"input_ids": "a b", "loss_mask": [1]}], "input_ids is 'a b': expected"),
        ([{"input_ids": [1.5], "loss_mask": [1]}], r"input_ids is \[1.5\]: expected"),
        ([{"input_ids": [2**31], "loss_mask": [1]}], "input_ids is .*of 32 bits"),
        (
            [{"input_ids": IDS, "loss_mask": "000111"}],
            "loss_mask is '000111': expected",
        ),
        ([{"input_ids": IDS, "loss_mask": 1}], "loss_mask is 1: expected a list"),
        ([{"input_ids": [1, 2], "loss_mask": [0, 0.5]}], "loss_mask has 0.5"),
        ([{"input_ids": [1], "loss_mask": ["1"]}], r"loss_mask is \['1'\]: expected"),
        ([{"input_ids": [1], "labels": "x"}], "labels is 'x': expected a list"),
        (
            [{"tokens": [1], "response_length": "x"}],
            "response_length is 'x': expected the number",
        ),
        (
            {
                "prompt_ids": [[1]],
                "completion_ids": [[2]],
                "completion_mask": [[1]],
                "prompt_mask": [[1, 1]],
            },
            "prompt_mask has 2 values for 1 token of its part",
        ),
        (one(row_index=["x"]), "row_index is 'x': expected an integer"),
        (17, "rows of type int"),
        ([], "rows is an empty list"),
    ],
)
def test_other_rows_are_refused(rows, said):
    with pytest.raises(SchemaError, match=said):
        tk.check_rows(rows, TURNS)


@pytest.mark.parametrize(
    "more",
    [
        {"labels": [IDS]},  # every token is a target; the mask says which count
        {"completion_mask": [[1] * 7]},
        {"prompts": ["text"], "responses": ["text"]},
        {"prompts": [IDS[:2]], "responses": [IDS[2:]]},
        {"labels": [3]},
        {"response_length": [7]},
        {"position_ids": [[*range(9)]]},
    ],
)
def test_columns_beside_a_mask_that_do_not_contradict_it(more):
    assert wrong(one(**more)) == []


def test_rows_name_no_session_and_yet_are_found_in_the_right_one():
    """Sessions of a group have one prompt; what was sampled tells them apart."""
    calls = [
        {"session_id": name, "prompt_ids": [1, 2], "output_ids": [3, k, 5, k]}
        for k, name in enumerate("abcdefgh")
    ]
    turns = tk.from_records(calls)
    rows = {"input_ids": [[1, 2, 3, 4, 5, 4]], "loss_mask": [[0, 0, 1, 1, 1, 1]]}
    (first, rest) = lines(rows, turns)
    assert first["session_id"] == "e"
    assert rest["detail"] == "7 of 8 sessions have no row"


@given(runs(), st.sampled_from([*PRESETS]))
def test_rows_of_every_preset_are_right_under_it(records, policy):
    """What `linearize` makes has no finding; equal replies may be taken for another's
    if rows name no session.
    """
    turns = turns_table(records)
    rows = tk.linearize(turns, policy)
    names = ["input_ids", "loss_mask", "logprobs"]
    if rows.num_rows:
        found = tk.check_rows(rows.select(names[:2]), turns, policy)
        assert not {"mask_shifted", "not_found"} & {*found["kind"].to_pylist()}
    # polar splices outputs after a prompt's last 16 tokens, which these prompts lack
    if rows.num_rows and policy != "polar":
        assert not wrong(rows.select(["session_id", *names]), turns, policy)


def test_rows_of_equal_sessions_are_told_apart():
    """Two rollouts that sampled the same: each has a row of its own."""
    call = {"prompt_ids": [1, 2], "output_ids": [3, 4]}
    turns = tk.from_records([{"session_id": name, **call} for name in "ab"])
    rows = {"input_ids": [[1, 2, 3, 4]] * 2, "loss_mask": [[0, 0, 1, 1]] * 2}
    found = tk.check_rows(rows, turns).select(["session_id", "kind"]).to_pylist()
    assert [tuple(line.values()) for line in found] == [
        ("a", "trains"),
        ("b", "trains"),
    ]
    many = tk.from_records([{"session_id": f"{k}", **call} for k in range(40)])
    rows = {"input_ids": [[1, 2, 3, 4]] * 40, "loss_mask": [[0, 0, 1, 1]] * 40}
    assert wrong(rows, many) == []
    rows = {name: values[:2] for name, values in rows.items()}
    shifted = {**rows, "loss_mask": [[0, 1, 1, 0]] * 2}
    kinds = tk.check_rows(shifted, turns)["kind"].to_pylist()
    assert kinds == ["trains", "mask_shifted"] * 2
