"""Per-token columns of turns that are carried into rows."""

import numpy as np
import pyarrow as pa
import pytest

import trajkit as tk
from tests.made_tables import replaced
from trajkit.errors import ArgumentError, InvalidTurnsError, SchemaError

STEP = pa.field("step", pa.int64())
EXPERTS = pa.large_list(pa.list_(pa.int16(), 2))


def two_turns(**columns):
    table = tk.from_records(
        [
            {"session_id": "s", "prompt_ids": [1, 2], "output_ids": [3, 4]},
            {"session_id": "s", "prompt_ids": [1, 2, 3, 4, 5], "output_ids": [6]},
        ]
    )
    for name, column in columns.items():
        table = table.append_column(name, column)
    return table


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        # an element per output id
        (
            {"x": pa.array([[[1, 2], [3, 4]], [[5, 6]]], EXPERTS)},
            [None, None, [1, 2], [3, 4], None, [5, 6]],
        ),
        # one per prompt and output id: what the last turn did not sample is of its prompt
        (
            {
                "x": pa.array(
                    [[0.5, 1.5, 2.5, 3.5], [10.0, 11.0, 12.0, 13.0, 14.0, 15.0]]
                )
            },
            [10.0, 11.0, 2.5, 3.5, 14.0, 15.0],
        ),
        # the last turn fills what a turn does not know of its own output
        (
            {"x": pa.array([None, [0, 1, 2, 3, 4, 5]], pa.list_(pa.uint8()))},
            [0, 1, 2, 3, 4, 5],
        ),
        ({"x": pa.array([[7, None], [0, 1, 2, 3, 4, None]])}, [0, 1, 7, 3, 4, None]),
        # engines know all tokens but the last; the next call has the element of that one
        (
            {
                "x": pa.array([[1, 2, 3], [10, 20, 30, 40, 50]]),
                "x_start": pa.array([0, 0]),
            },
            [10, 20, 3, 40, 50, None],
        ),
        # in verl's logs they know nothing of it, either, and write 0
        (
            {"routed_experts": pa.array([[[1], [2], [3], [0]], [*[[4]] * 5, [0]]])},
            [[4], [4], [3], [4], [4], [0]],
        ),
    ],
)
def test_which_element_a_token_has(columns, expected):
    turns, name = two_turns(**columns), next(iter(columns))
    rows = tk.linearize(turns, payloads=[name])
    assert rows[name].to_pylist() == [expected]
    assert rows.schema.field(name).type.value_type == columns[name].type.value_type
    assert tk.linearize(tk.compact(turns), payloads=[name]) == rows


def test_a_list_as_long_as_the_output_is_of_the_output():
    """Also after a prompt of one id, whatever other turns have."""
    turns = tk.from_records(
        {"session_id": "a", "prompt_ids": prompt, "output_ids": [2, 3], "x": values}
        for prompt, values in [([1], [10, 20]), ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6])]
    )
    rows = tk.linearize(turns, "per_call", payloads=["x"])
    assert rows["x"].to_pylist() == [[None, 10, 20], [1, 2, 3, 4, 5, 6]]
    with pytest.raises(InvalidTurnsError, match=r"1 elements.* column x_start: 0"):
        tk.linearize(replaced(turns, "x", [[1], None]), payloads=["x"])


@pytest.mark.parametrize("n_prompt", [1, 2, 3])
def test_experts_of_all_ids_but_the_last_begin_with_the_first(n_prompt):
    """Also where they are as many as the output ids."""
    path = [*range(n_prompt + 2)]
    record = {"prompt_ids": path[:n_prompt], "output_ids": path[n_prompt:]}
    experts = [[[k]] for k in path[:-1]]
    turns = tk.from_records([{"session_id": "a", **record, "routed_experts": experts}])
    for form in (turns, tk.compact(turns)):
        rows = tk.linearize(form, payloads=["routed_experts"])
        assert rows["routed_experts"].to_pylist() == [[*experts, None]]


@pytest.mark.parametrize("policy", ["faithful", "per_call"])
def test_an_earlier_call_has_the_experts_before_those_of_a_call(policy):
    """Also of its last token, for which the later call has none."""
    calls = [
        ([1, 2], [3, 4], [[1], [2], [3], [4]], 0),
        ([1, 2, 3, 4, 5], [6], [[5]], 4),
    ]
    names = ("prompt_ids", "output_ids", "routed_experts", "routed_experts_start")
    turns = tk.from_records(
        {"session_id": "a", **dict(zip(names, call, strict=True))} for call in calls
    )
    rows = tk.linearize(turns, policy, payloads=["routed_experts"])
    assert rows["routed_experts"].to_pylist()[-1] == [[1], [2], [3], [4], [5], None]


def test_the_weights_of_each_token_need_no_column_of_their_own():
    versions = [
        {"version": "a", "start": 0, "stop": 1},
        {"version": "b", "start": 1, "stop": 2},
    ]
    first = two_turns().to_pylist()[0] | {"weight_versions": versions, "step": 4}
    turns = pa.Table.from_pylist([first], two_turns().schema.append(STEP))
    rows = tk.linearize(turns, payloads=["weight_version"])
    assert rows["weight_version"].to_pylist() == [[None, None, "a", "b"]]
    bare = turns.drop_columns(["weight_versions", "step"])
    unknown = tk.linearize(bare, payloads=["weight_version"])
    assert unknown["weight_version"].to_pylist() == [[None] * 4]
    for name in ("weight_versions", "step"):
        assert unknown[name].to_pylist() == [None]
    rows = rows.drop_columns(["turns", "weight_versions", "step"])
    assert tk.verify(rows, turns).num_rows == 0


MASKS = pa.list_(pa.list_(pa.int32()))


def test_known_payloads_are_kept_by_rows_delta_form_and_packs(tmp_path):
    masks = pa.array([[[3, 9], None], [[6, 7, 8]]], MASKS)
    turns = two_turns(
        sampling_mask=masks,
        ref_logprobs=pa.array([[-0.5, -1.5], [-0.25]]),
        teacher_logprobs=pa.array([[-1.0] * 4, [-2.0] * 6]),
    )
    names = ["sampling_mask", "ref_logprobs", "teacher_logprobs"]
    tk.write_turns(tk.compact(turns), tmp_path / "log.parquet")
    rows = tk.linearize(turns, payloads=names)
    read = tk.read_turns(tmp_path / "log.parquet")
    assert tk.linearize(read, payloads=names).equals(rows)
    (row,) = rows.select(names).to_pylist()
    assert row == {
        "sampling_mask": [None, None, [3, 9], None, None, [6, 7, 8]],
        "ref_logprobs": [None, None, -0.5, -1.5, None, -0.25],
        "teacher_logprobs": [-2.0, -2.0, -1.0, -1.0, -2.0, -2.0],
    }
    (pack,) = tk.pack(rows, 8, columns=names).to_pylist()
    assert pack["edge_target"] == [3, 4, 6]
    assert pack["edge_sampling_mask"] == [[3, 9], None, [6, 7, 8]]
    assert pack["edge_ref_logprobs"] == [-0.5, -1.5, -0.25]
    assert tk.validate(turns).select(names).equals(turns.select(names))


@pytest.mark.parametrize(
    ("name", "column", "match"),
    [
        (
            "sampling_mask",
            pa.array([[[3], [3]], [[6]]], MASKS),
            r"turn 0: sampling_mask\[1\] lacks the sampled id 4",
        ),
        (
            "sampling_mask",
            pa.array([None, [[9, 7]]], MASKS),
            r"turn 1: sampling_mask\[0\] lacks the sampled id 6",
        ),
        (
            "sampling_mask",
            pa.array([[[3], [4]], [[6], [6]]], MASKS),
            "turn 1: 2 elements of sampling_mask for 1 output_ids",
        ),
        (
            "sampling_mask",
            pa.array([[[3], [4, None]], None], pa.list_(pa.list_(pa.uint8()))),
            r"turn 0: sampling_mask\[1\] has a null or a negative id",
        ),
        (
            "ref_logprobs",
            pa.array([[-1.0, float("nan")], None]),
            r"turn 0: ref_logprobs\[1\] is nan",
        ),
        (
            "teacher_logprobs",
            pa.array([None, [0.5]]),
            r"turn 1: teacher_logprobs\[0\] is 0.5: .* at most 0",
        ),
    ],
)
def test_values_of_known_payloads_are_checked(name, column, match):
    turns = two_turns(**{name: column})
    chunks = pa.concat_tables([turns.slice(0, 1), turns.slice(1)])
    for table in (turns, chunks, tk.compact(turns), turns.slice(0)):
        with pytest.raises(InvalidTurnsError, match=match):
            tk.validate(table)
    records = [
        {"session_id": "s", "prompt_ids": prompt, "output_ids": output, name: values}
        for prompt, output, values in zip(
            ([1, 2], [1, 2, 3, 4, 5]), ([3, 4], [6]), column.to_pylist(), strict=True
        )
    ]
    with pytest.raises(InvalidTurnsError, match=match):
        tk.from_records(records)


@pytest.mark.parametrize(
    "values",
    [
        {"ref_logprobs": [0, -1]},
        {"ref_logprobs": [None, None]},
        {"sampling_mask": [None, None]},
        {"sampling_mask": [[], []]},
        {"sampling_mask": [[2], [3], [4]], "sampling_mask_start": 1},
    ],
    ids=str,
)
def test_a_known_payload_may_have_integers_a_start_or_nothing(values):
    record = {"session_id": "s", "prompt_ids": [1, 2], "output_ids": [3, 4]}
    turns = tk.from_records([{**record, **values}])
    assert tk.validate(turns) == turns
    recorder = tk.Recorder()
    recorder.record(**record, payloads=values)
    name = next(iter(values))
    rows = tk.linearize(recorder.pop("s"), payloads=[name])
    assert tk.linearize(turns, payloads=[name])[name] == rows[name]


@pytest.mark.parametrize("name", ["sampling_mask", "ref_logprobs"])
def test_a_known_payload_of_another_type_is_refused(name):
    for odd in (["x", "y"], [["x"], ["y"]], [[True], [True]], [[[0.5]], [[0.5]]]):
        with pytest.raises(SchemaError, match=f"'{name}'.* is .*: expected "):
            tk.validate(two_turns(**{name: pa.array(odd)}))


def test_elements_come_from_an_earlier_turn_as_far_as_its_ids_are_the_same():
    turns = tk.from_records(
        {"session_id": "s", "prompt_ids": prompt, "output_ids": output, **payload}
        for prompt, output, payload in [
            ([1, 2], [3, 4], {"x": [10, 20, 30, 40], "x_start": None}),
            ([1, 2, 9, 5], [6], {"x": [50, 60], "x_start": 3}),
        ]
    )
    rows = tk.linearize(turns, "per_call", payloads=["x"])
    assert rows["x"].to_pylist()[1] == [10, 20, None, 50, 60]


@pytest.mark.parametrize(
    ("start", "said"), [(6, "6 and x has 1"), (-1, "-1 and x has 1")]
)
def test_a_start_that_leaves_no_room_is_refused(start, said):
    turns = two_turns(x=pa.array([[1, 2], [3]]), x_start=pa.array([None, start]))
    said = f"session 's', turn 1: x_start is {said} elements"
    with pytest.raises(InvalidTurnsError, match=said):
        tk.linearize(turns, payloads=["x"])
    turns = replaced(turns, "x_start", pa.array(["0", "1"]))
    with pytest.raises(SchemaError, match="x_start is string: expected integers"):
        tk.linearize(turns, payloads=["x"])


LAYOUTS = [
    pa.list_(pa.list_(pa.int16(), 2)),
    EXPERTS,
    pa.list_view(pa.list_(pa.int16(), 2)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_lists_of_any_layout_are_read(layout):
    """Behind a slice, in chunks, as a table or as a stream; `tests.fuzz` has the rest."""
    experts = pa.array([None, [[9, 9]], [[1, 2], None], [[5, 6]]], layout)
    turns = two_turns(experts=pa.chunked_array([experts[2:3], experts[3:]]))
    rows = tk.linearize(turns, payloads=["experts"])
    expected = [[None, None, [1, 2], None, None, [5, 6]]]
    assert rows["experts"].to_pylist() == expected
    batches = iter(turns.to_batches(max_chunksize=1))
    made = pa.Table.from_batches(tk.linearize_batches(batches, payloads=["experts"]))
    assert made["experts"].to_pylist() == expected


def ended(prompt, output, **more):
    turn = {"prompt_ids": prompt, "output_ids": output, "finish_reason": "stop"}
    return {"session_id": "s", **turn, **more}


def test_a_prompt_that_skips_tokens_does_not_begin_the_row():
    """The second call's part begins after an id that its prompt has and the row has not."""
    turns = tk.from_records(
        [
            ended([1], [2]),
            ended([1, 2, 5, 9, 6], [7]),
            ended([1, 2, 5, 9, 6, 7, 9, 8], [9], x=[*range(9)]),
        ]
    )
    policy = tk.policy("polar", end_of_turn_token_id=9)
    (row,) = tk.linearize(turns, policy, payloads=["x"]).to_pylist()
    assert row["input_ids"] == [1, 2, 9, 6, 7, 9, 8, 9]
    assert row["x"] == [None] * 5 + [6, 7, 8]


def test_the_next_call_tells_the_last_token_of_a_reply():
    """Where a row starts with its prompt; a spliced prompt tells only its own part."""
    prompts = [[1], [1, 2, 9, 3], [1, 2, 9, 3, 4, 9, 5], [1, 2, 9, 3, 4, 8, 9, 6]]
    outputs = [[2, 9], [4, 9], [7, 9], [7, 9]]
    turns = tk.from_records(
        ended(
            prompt,
            output,
            x_start=0,
            x=[100 * k + i for i in range(len(prompt) + len(output) - 1)],
        )
        for k, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    )
    whole = tk.linearize(turns.slice(0, 3), "polar", payloads=["x"])
    assert whole["x"].to_pylist() == [[0, 1, 202, 103, 104, 205, 206, 207, None]]
    spliced = tk.linearize(turns.take([0, 1, 3]), "polar", payloads=["x"])
    assert spliced["input_ids"].to_pylist() == [[1, 2, 9, 3, 4, 9, 6, 7, 9]]
    assert spliced["x"].to_pylist() == [[0, 1, 102, 103, 104, None, 307, 308, None]]


@pytest.mark.parametrize(
    ("payloads", "column", "error", "match"),
    [
        (
            ["x"],
            [[1, 2], [3, 4]],
            InvalidTurnsError,
            "session 's', turn 1: payload 'x' has 2 elements: expected 1",
        ),
        (
            ["xs"],
            [1, 2],
            ArgumentError,
            "payloads='xs': the turns have no such column, only 'x'",
        ),
        (["x"], [1, 2], SchemaError, "'x' is int64: expected a list"),
    ],
)
def test_what_is_no_payload_is_refused(payloads, column, error, match):
    with pytest.raises(error, match=match):
        tk.linearize(two_turns(x=pa.array(column)), payloads=payloads)


def test_a_payload_that_no_call_had_gives_null_lists():
    turns = two_turns(experts=pa.nulls(2))
    rows = tk.linearize(turns, "per_call", payloads=["experts"])
    assert rows["experts"].to_pylist() == [None, None]
    assert rows.schema.field("experts").type == pa.large_list(pa.null())
    assert tk.verify(rows, turns, "per_call").num_rows == 0


NUMBERS = np.arange(4 * 3 * 2, dtype=np.int16).reshape(4, 3, 2)


@pytest.mark.parametrize("how", ["records", "recorder"])
def test_arrays_of_several_dimensions(how):
    one = {"session_id": "s", "prompt_ids": [1, 2], "output_ids": [3, 4]}
    if how == "records":
        records = [{**one, "x": NUMBERS}, one, {**one, "x": NUMBERS[:2]}]
        turns = tk.from_records(records)
    else:
        recorder = tk.Recorder()
        for x in (NUMBERS, None, NUMBERS[:2]):
            recorder.record(**one, payloads={} if x is None else {"x": x})
        turns = recorder.turns("s")
    nested = pa.list_(pa.list_(pa.int16()))
    assert turns.schema.field("x").type == pa.list_(nested)
    rows = tk.linearize(turns, "per_call", payloads=["x"])
    assert rows.schema.field("x").type == pa.large_list(nested)
    values = NUMBERS.tolist()
    assert rows["x"].to_pylist() == [
        values,
        [None] * 4,
        [None, None, *values[:2]],
    ]


def test_no_turns_give_a_column_without_rows():
    turns = two_turns(x=pa.array([[1, 2], [3]], pa.list_(pa.int8()))).slice(0, 0)
    rows = tk.linearize(turns, payloads=["x"])
    assert rows.schema.field("x").type == pa.large_list(pa.int8())
    assert rows.num_rows == 0
