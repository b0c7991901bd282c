"""Packs have every trained token once, in the context of its row."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests.libraries import LIBRARIES, tensor
from tests.oracles.packs import (
    check_packed,
    random_choices,
    random_rows,
    rows_table,
)
from trajkit.errors import ArgumentError, InvalidTurnsError, SchemaError
from trajkit.packs import packing
from trajkit.turns import content_ids, engine_ids


def rows(*lists):
    """Rows of one session, of which every token but the first is trained."""
    turns = [
        {"session_id": "a", "prompt_ids": ids[:1], "output_ids": ids[1:]}
        for ids in lists
    ]
    return tk.linearize(tk.from_records(turns), "per_call")


def fork():
    """A prompt of two tokens with two replies."""
    return rows([1, 2, 3, 4], [1, 2, 5, 6, 7])


@given(st.randoms(use_true_random=False), st.integers(0, 6))
def test_the_parts_of_a_tree_repeat_the_fewest_tokens(random, more):
    lines = random_rows(random, max_rows=9)
    longest = max(len(line["input_ids"]) for line in lines)
    choices = {"max_tokens": longest + more, "layout": "tree", "share": "session"}
    packs = tk.pack(rows_table(lines), **choices)
    check_packed(packs, lines, {**choices, "oversize": "repeat"})


@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_packs_of_random_forests_are_those_of_brute_force(random, n):
    lines = random_rows(random, n, group=random.choice([None, "g"]))
    choices = random_choices(random, lines)
    table = rows_table(lines)
    packs = tk.pack(
        table,
        columns=["advantage", "mark"],
        **choices,
    )
    check_packed(packs, lines, choices)
    for pack in packs.to_pylist():
        for row, at, advantage, mark in zip(
            pack["edge_row"],
            pack["edge_position"],
            pack["edge_advantage"],
            pack["edge_mark"],
            strict=True,
        ):
            assert advantage == lines[row]["advantage"]
            assert mark == lines[row]["mark"][at]
    found = tk.verify_packs(packs, table, max_tokens=choices["max_tokens"])
    assert found.to_pylist() == []


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("library", LIBRARIES)
@given(random=st.randoms(use_true_random=False))
def test_the_loss_over_edges_is_the_reference_loss(library, reduce, random):
    lines = random_rows(random, 3)
    for line in lines:
        line["logprobs"] = [-0.5 if trained else None for trained in line["loss_mask"]]
        line["advantage"] = line["advantage"] or 0.0
    weights = [
        [float(k > 0 and random.randint(0, 1)) for k in range(len(line["input_ids"]))]
        for line in lines
    ]
    table = rows_table(lines).append_column("observation_weight", pa.array(weights))
    ends = np.cumsum([0] + [len(line["input_ids"]) for line in lines])
    now = tensor([-random.random() for _ in range(ends[-1])], library)
    expected = tk.learn.reference_loss(table, now, reduce=reduce)

    packs = tk.pack(
        table,
        20,
        oversize="carry",
        columns=["advantage", "observation_weight"],
        reduce=reduce,
    )
    assert tk.verify_packs(packs, table, reduce=reduce).num_rows == 0
    rl_sum = observation_sum = 0.0
    for pack in packs.to_pylist():
        for k, (row, at) in enumerate(
            zip(pack["edge_row"], pack["edge_position"], strict=True)
        ):
            new = now[ends[row] + at]
            if pack["edge_weight"][k]:
                ratio = np.e ** (new - pack["edge_logprob"][k])
                rl_sum -= pack["edge_weight"][k] * pack["edge_advantage"][k] * ratio
            observation_sum -= pack["edge_observation_weight"][k] * new
    assert float(rl_sum) == pytest.approx(float(expected.rl_sum), rel=1e-6, abs=1e-6)
    assert float(observation_sum) == pytest.approx(
        float(expected.observation_sum), rel=1e-6, abs=1e-6
    )


@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_values_of_edges_come_back_to_their_tokens(random, n):
    lines = random_rows(random, n)
    table = rows_table(lines)
    packs = tk.pack(table, 12)
    values = [
        [100.0 * row + at for row, at in zip(*pack, strict=True)]
        for pack in zip(
            packs["edge_row"].to_pylist(),
            packs["edge_position"].to_pylist(),
            strict=True,
        )
    ]
    expected = [
        [
            100.0 * row + at if trained else None
            for at, trained in enumerate(line["loss_mask"])
        ]
        for row, line in enumerate(lines)
    ]
    assert tk.unpack(packs, values, table).to_pylist() == expected
    flat = np.concatenate([np.array(one) for one in values])
    assert tk.unpack(packs, flat, table).to_pylist() == expected


def test_values_that_fit_no_edge_are_refused():
    table = fork()
    packs = tk.pack(table, 8)
    with pytest.raises(
        InvalidTurnsError, match=r"shape \(2,\): the packs have 7 edges"
    ):
        tk.unpack(packs, [0.5, 0.5], table)
    with pytest.raises(InvalidTurnsError, match="of row 1, which the rows do not have"):
        tk.unpack(packs, [0.5] * 7, table.slice(0, 1))
    twice = pa.concat_tables([packs, packs])
    with pytest.raises(InvalidTurnsError, match="row 0: token 1 has two edges"):
        tk.unpack(twice, [0.5] * 14, table)


def in_batches(table, size):
    return iter(table.to_batches(max_chunksize=size))


@given(st.randoms(use_true_random=False), st.sampled_from(["session", "group"]))
def test_a_stream_of_rows_gives_the_packs_of_the_table(random, share):
    lines = random_rows(random, 5, group="g")
    lines.sort(key=lambda line: line["group_id"] or "")
    table = rows_table(lines)
    choices = {"share": share, "oversize": "carry"}
    batches = list(tk.pack_batches(in_batches(table, 2), 8, **choices))
    streamed = pa.Table.from_batches(batches)
    assert streamed.equals(tk.pack(table, 8, **choices))


def test_lines_count_through_a_stream_that_is_packed_in_parts():
    turns = [
        {"session_id": f"{k:03}", "prompt_ids": [1, 2], "output_ids": [3, 4]}
        for k in range(200)
    ]
    table = tk.linearize(tk.from_records(turns))
    batches = list(tk.pack_batches(in_batches(table, 7), 3, oversize="carry"))
    assert len(batches) > 1
    packs = pa.Table.from_batches(batches)
    assert tk.verify_packs(packs, table, max_tokens=3).num_rows == 0
    assert packs["prefix_pack"].drop_null().to_pylist() == [*range(0, 400, 2)]


def test_a_group_that_comes_back_in_a_stream_is_refused():
    table = grouped([[1]] * 3, ["x", "y", "x"])
    tk.pack(table, 4, share="group")
    with pytest.raises(InvalidTurnsError, match="group 'x' comes back after another"):
        list(tk.pack_batches(in_batches(table, 1), 4, share="group"))


def grouped(prompts, groups):
    turns = [
        {"session_id": f"s{k}", "prompt_ids": prompt, "output_ids": [90 + k]}
        for k, prompt in enumerate(prompts)
    ]
    sessions = [
        {"session_id": f"s{k}", "reward": 1.0, "group_id": group}
        for k, group in enumerate(groups)
    ]
    return tk.linearize(tk.from_records(turns), sessions=sessions)


def test_a_group_of_a_stream_is_packed_as_a_whole(monkeypatch):
    monkeypatch.setattr(packing, "_PACKS_AT_A_TIME", 0.01)
    table = grouped([[1, 2, 3]] * 4 + [[1, 2, 3]], ["g", "g", "h", "h", None])
    batches = list(tk.pack_batches(in_batches(table, 1), 99, share="group"))
    packs = pa.Table.from_batches(batches)
    assert packs["sessions"].to_pylist() == [["s0", "s1"], ["s2", "s3"], ["s4"]]
    assert packs["n_tokens"].to_pylist() == [5, 5, 4]
    assert tk.verify_packs(packs, table).num_rows == 0


def test_sessions_of_a_group_share_what_their_first_rows_begin_with():
    prompts = [[1, 2, 3], [1, 2, 4], [7], [1, 2, 3], [7], [1, 2, 3]]
    table = grouped(prompts, ["g", "g", "g", "g", "h", None])
    packs = tk.pack(table, 100, share="group")
    # 1 2 (3 (90, 93), 4 91), 7 92; 7 94; 1 2 3 95
    assert packs["n_tokens"].to_pylist() == [7 + 2 + 2 + 4]
    assert packs["sessions"].to_pylist() == [[f"s{k}" for k in range(6)]]
    assert tk.verify_packs(packs, table).num_rows == 0
    assert tk.pack(table, 100)["n_tokens"].to_pylist() == [20]


SIZED = pa.list_(pa.list_(pa.list_(pa.int16(), 2), 1))


@pytest.mark.parametrize("kind", [SIZED, pa.list_(pa.list_(pa.list_(pa.int16())))])
def test_rows_share_tokens_only_where_the_same_columns_agree(kind):
    """An engine gives no experts of a row's last token."""
    table = rows([1, 2, 3, 4], [1, 2, 3, 9], [1, 2, 3, 4, 8])
    assert tk.pack(table, 99)["n_tokens"].to_pylist() == [6]
    experts = [
        [[[0, 1]], [[2, 3]], [[4, 5]], None],
        [[[0, 1]], [[2, 9]], [[4, 5]], None],
        [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]], None],
    ]
    table = table.append_column("experts", pa.array(experts, kind))
    table = table.append_column("image", pa.array(["x", "x", "y"]))
    for same, n_last in ((["experts"], 2), (["experts", "image"], 5)):
        packs = tk.pack(table, 99, same=same)
        assert packs["n_tokens"].to_pylist() == [4 + 3 + n_last]
        assert tk.verify_packs(packs, table).num_rows == 0
    odd = pa.array([[[0] * k for k in range(n)] for n in (4, 4, 5)])
    with pytest.raises(SchemaError, match="lists of one size"):
        tk.pack(table.append_column("odd", odd), 99, same=["odd"])


def changed(name, first, second):
    """The fork with other values of a column."""
    table = fork()
    place = table.column_names.index(name)
    column = pa.array([first, second], table.schema.field(place).type)
    return table.set_column(place, table.schema.field(place), column)


@pytest.mark.parametrize(
    ("table", "choices", "words"),
    [
        (fork(), {"max_tokens": 4}, "row 1: 5 tokens, and max_tokens is 4"),
        (
            changed("loss_mask", [False, *[True] * 3], [True] * 5),
            {},
            "row 1: its first token is trained",
        ),
        (
            changed("input_ids", [1, 2, 3, 4], [1, 2, -5, 6, 7]),
            {},
            r"row 1: input_ids\[2\] is -5: token ids are integers",
        ),
        (
            changed("input_ids", [1, 2, 3, 4], [1, 2, None, 6, 7]),
            {},
            r"row 1: input_ids\[2\] is null",
        ),
        (fork().drop_columns("row_weight"), {}, "row 0: row_weight is null"),
        (fork().slice(1), {}, "row 1: its parent_row 0 is not in"),
        (
            fork().append_column("marks", pa.array([[1, 2, 3, 4], [3]])),
            {"columns": ["marks"]},
            "row 1: marks has 1 values for 5",
        ),
    ],
)
def test_rows_that_cannot_be_packed_are_refused(table, choices, words):
    with pytest.raises(InvalidTurnsError, match=words):
        tk.pack(table, **{"max_tokens": 9, **choices})


@pytest.mark.parametrize(
    ("error", "words", "choices"),
    [
        (ArgumentError, "align=3 does not divide max_tokens=8", {"align": 3}),
        (ArgumentError, "max_tokens=0", {"max_tokens": 0}),
        (ArgumentError, "positions are of 32 bits", {"max_tokens": 2**31}),
        (SchemaError, "columns has 'weight', but packs have", {"columns": ["weight"]}),
        (SchemaError, "same has 'rewards': rows have no", {"same": ["rewards"]}),
        (SchemaError, "columns has 'x': rows have no", {"columns": ["x"]}),
    ],
)
def test_choices_that_are_wrong_are_refused(error, words, choices):
    with pytest.raises(error, match=words):
        tk.pack(fork(), **{"max_tokens": 8, **choices})


def test_packs_have_each_image_once():
    """Two rows share a prompt with an image; the third has another one in its place."""
    first, other = "ab" * 32, "cd" * 32

    def call(digest, tail, output):
        image = {"kind": "image", "hash": digest, "token_id": 7, "start": 1, "stop": 4}
        ids = [1, *content_ids("image", digest, 3).tolist(), 2, *tail]
        return {
            "session_id": "a",
            "prompt_ids": ids,
            "output_ids": output,
            "output_logprobs": [-1.0],
            "mm_items": [image],
        }

    calls = [call(first, [], [3]), call(first, [5], [4]), call(other, [], [3])]
    rows = tk.linearize(tk.from_records(calls), "per_call", reward=1.0)
    packs = tk.pack(rows, 32)
    (shown,) = packs["mm_items"].to_pylist()
    assert [(one["hash"], one["start"], one["stop"]) for one in shown] == [
        (first, 1, 4),
        (other, 8, 11),
    ]
    assert engine_ids(packs)["input_ids"].to_pylist() == [
        [1, 7, 7, 7, 2, 3, 5, 4, 7, 7, 7, 2, 3]
    ]
    assert tk.verify_packs(packs, rows).num_rows == 0
    (apart,) = tk.pack(rows, 32, layout="rows")["mm_items"].to_pylist()
    assert [one["start"] for one in apart] == [1, 7, 14]
    with pytest.raises(InvalidTurnsError, match="of an image of which the pack"):
        tk.pack(rows, 3, oversize="carry")
