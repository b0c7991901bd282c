"""Rows without what they share with another row, and back."""

from importlib import import_module
from unittest import mock

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests.made_tables import linearized, policy_of, turns_table
from tests.strategies import policies, row_limits, runs
from trajkit.errors import ArgumentError, InvalidTurnsError, SchemaError
from trajkit.schema import ROWS, ROWS_SUFFIX
from trajkit.tables import limits

anyone = policies | st.sampled_from(
    sorted(import_module("trajkit.policies").PRESETS)
).map(lambda name: (name, 1024))
"""Every preset, and slime with thresholds that matter."""


def both_layouts(turns, choice, limit=None, threads=1):
    full, suffix = (
        tk.linearize(
            turns_table(turns),
            policy_of(choice),
            max_row_tokens=limit,
            reward=1.0,
            threads=threads,
            layout=layout,
        )
        for layout in ("full", "suffix")
    )
    return full, suffix


@given(runs(), anyone, row_limits, st.integers(1, 3), st.integers(1, 60))
def test_full_rows_gives_the_full_layout_back(turns, choice, limit, threads, size):
    full, suffix = both_layouts(turns, choice, limit, threads)
    suffix.validate(full=True)
    assert suffix.schema.equals(ROWS_SUFFIX, check_metadata=True)
    with mock.patch.object(limits, "PART_TOKENS", size):
        back = tk.full_rows(suffix)
        again = tk.suffix_rows(full)
    back.validate(full=True)
    again.validate(full=True)
    assert back.schema.equals(ROWS, check_metadata=True)
    assert back == full
    assert again == suffix
    assert tk.full_rows(full) == full
    assert tk.suffix_rows(suffix) == suffix


@given(runs(), anyone, row_limits)
def test_a_suffix_begins_where_the_row_is_new_or_trains(turns, choice, limit):
    full, suffix = both_layouts(turns, choice, limit)
    for whole, row in zip(full.to_pylist(), suffix.to_pylist(), strict=True):
        trained = [i for i, on in enumerate(whole["loss_mask"]) if on]
        start = row["suffix_start"]
        assert start == min([whole["shared_length"], *trained])
        assert row["suffix_ids"] == whole["input_ids"][start:]
        assert row["suffix_mask"] == whole["loss_mask"][start:]
        assert row["suffix_logprobs"] == whole["logprobs"][start:]
        assert row["spans"] == whole["spans"]


@given(runs(), anyone, row_limits)
def test_rows_of_either_layout_keep_the_rules(turns, choice, limit):
    _, suffix = both_layouts(turns, choice, limit)
    tk.validate(suffix)
    found = tk.verify(
        suffix, turns_table(turns), policy_of(choice), max_row_tokens=limit
    )
    assert found.num_rows == 0


@given(st.data(), runs(), anyone)
def test_streams_of_rows_change_their_layout_as_tables_do(data, turns, choice):
    full, suffix = both_layouts(turns, choice)
    cut = data.draw(st.integers(0, full.num_rows))
    batches = [*suffix.slice(0, cut).to_batches(), *suffix.slice(cut).to_batches()]
    back = list(tk.full_rows_batches(iter(batches)))
    assert pa.Table.from_batches(back, ROWS) == full
    again = list(tk.suffix_rows_batches(pa.RecordBatchReader.from_batches(ROWS, back)))
    assert pa.Table.from_batches(again, ROWS_SUFFIX) == suffix


@pytest.mark.filterwarnings("ignore::trajkit.errors.NoSignalWarning")
@given(runs(), anyone)
def test_weights_and_rewards_are_those_of_the_full_layout(turns, choice):
    full, suffix = both_layouts(turns, choice)
    names = ["session_id", "reward"]
    facts = pa.Table.from_arrays(
        [
            full["session_id"].unique(),
            pa.array([2.0] * len(full["session_id"].unique())),
        ],
        names,
    )
    scored = tk.learn.advantages(facts)
    for change in (
        *(
            lambda rows, by=by: tk.add_weights(rows, by)
            for by in ("token", "row", "rollout")
        ),
        lambda rows: tk.add_advantages(rows, scored),
        lambda rows: tk.learn.spread_rewards(rows, "uniform"),
    ):
        assert tk.full_rows(change(suffix)) == change(full)


def session(*pairs):
    """Turns of a session without messages: prompts and outputs."""
    return tk.from_records(
        [
            {
                "session_id": "a",
                "prompt_ids": prompt,
                "output_ids": output,
                "output_logprobs": [-0.5] * len(output),
            }
            for prompt, output in pairs
        ]
    )


DRIFTING = session(([1, 2], [3, 4]), ([1, 2, 3, 5], [6]), ([1, 2, 3, 5, 7], [8]))


def test_by_hand():
    rows = tk.linearize(DRIFTING, layout="suffix")
    names = ["parent_row", "shared_length", "suffix_start", "suffix_ids", "suffix_mask"]
    assert rows.select(names).to_pylist() == [
        dict(zip(names, line, strict=True))
        for line in (
            (None, 0, 0, [1, 2, 3, 4], [False, False, True, True]),
            (0, 3, 3, [5, 6], [False, True]),
            (1, 4, 4, [7, 8], [False, True]),
        )
    ]
    assert rows["suffix_logprobs"].to_pylist()[1] == [None, -0.5]


def test_equal_replies_are_stored_as_often_as_they_are_trained():
    rows = tk.linearize(session(([1], [2, 3]), ([1], [2, 3])), layout="suffix")
    assert rows["shared_length"].to_pylist() == [0, 3]
    assert rows["suffix_start"].to_pylist() == [0, 1]
    assert rows["suffix_mask"].to_pylist() == [[False, True, True], [True, True]]


def test_what_drift_repeats_is_written_once():
    prompt, pairs = [1] * 50, []
    for i in range(40):
        pairs.append((prompt, [i, 100 + i, 200]))
        prompt = [*prompt, i, 300 + i, 400]  # every reply comes back changed
    rows, report = linearized(session(*pairs), layout="suffix")
    n = sum(map(len, rows["suffix_ids"].to_pylist()))
    assert n == report["tokens_forward_shared"][0].as_py() == 50 + 3 + 39 * 5
    assert report["tokens_forward"][0].as_py() > 10 * n
    assert tk.verify(rows, session(*pairs), "faithful").num_rows == 0


def test_rows_whose_first_kin_is_left_out_share_with_rows_that_are_there():
    turns = session(([1, 2], [3]), ([1, 2, 4], [5]), ([1, 2, 4, 6], [7]))
    turns = turns.set_column(
        turns.column_names.index("trainable"),
        "trainable",
        pa.array([False, None, None]),
    )
    full, suffix = (tk.linearize(turns, layout=layout) for layout in ("full", "suffix"))
    assert suffix["parent_row"].to_pylist() == [None, 0]
    assert suffix["suffix_ids"].to_pylist() == [[1, 2, 4, 5], [6, 7]]
    assert tk.full_rows(suffix) == full


def test_the_recorder_gives_either_layout():
    recorder = tk.Recorder()
    for line in DRIFTING.to_pylist():
        recorder.record("a", **{n: line[n] for n in ("prompt_ids", "output_ids")})
    suffix = recorder.rows("a", "strict", layout="suffix")
    assert suffix["suffix_ids"].to_pylist() == [[1, 2, 3, 4], [5, 6], [7, 8]]
    assert tk.full_rows(suffix) == recorder.rows("a", "strict")


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "arrows", "jsonl"])
def test_files_keep_the_layout(tmp_path, suffix):
    rows = tk.linearize(DRIFTING, layout="suffix")
    path = tmp_path / f"rows.{suffix}"
    tk.write_rows(rows, path)
    back = tk.read_rows(path)
    assert back.schema == ROWS_SUFFIX
    assert back.to_pylist() == rows.to_pylist()


def test_polars_keeps_the_layout():
    rows = tk.linearize(DRIFTING, layout="suffix", reward=1.0)
    frame = pl.DataFrame(rows)
    whole = tk.linearize(DRIFTING, reward=1.0)
    assert tk.full_rows(frame).to_pylist() == whole.to_pylist()
    assert (
        tk.add_weights(frame, "row").to_pylist()
        == tk.add_weights(rows, "row").to_pylist()
    )
    assert tk.validate(frame).schema == ROWS_SUFFIX


def test_a_layout_that_is_none_is_refused():
    with pytest.raises(
        ArgumentError, match="layout='half': expected one of 'full', 'suf"
    ):
        tk.linearize(DRIFTING, layout="half")


def test_stages_that_need_whole_rows_say_so():
    rows = tk.linearize(DRIFTING, layout="suffix")
    said = (
        "no column 'input_ids' of rows .*: these rows have the layout 'suffix', full_"
    )
    with pytest.raises(SchemaError, match=said):
        tk.learn.observation_weights(rows, DRIFTING)
    with pytest.raises(SchemaError, match=said):
        tk.learn.reference_loss(rows, pa.array([0.0]).to_numpy())


def test_a_name_that_the_other_layout_uses_is_refused():
    rows = tk.linearize(DRIFTING, layout="suffix")
    ids = pa.array([[1]] * rows.num_rows)
    with pytest.raises(SchemaError, match="column 'logprobs' would occur twice"):
        tk.full_rows(rows.append_column("logprobs", ids))
    with pytest.raises(SchemaError, match="column 'suffix_start' would occur twice"):
        tk.suffix_rows(tk.full_rows(rows).append_column("suffix_start", ids))


def changed(name, values):
    """The drifting rows in the layout "suffix", with one column made anew."""
    rows = tk.linearize(DRIFTING, layout="suffix")
    field = ROWS_SUFFIX.field(name)
    at = rows.column_names.index(name)
    return rows.set_column(at, field, pa.array(values, field.type))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        pytest.param(
            changed("suffix_start", [0, 4, 4]),
            "session 'a', row 1: suffix_start is 4: expected 0 to 3, the shared_length",
            id="more than is shared",
        ),
        pytest.param(
            changed("suffix_start", [0, -1, 4]),
            "session 'a', row 1: suffix_start is -1: expected 0 to 3, the shared_length",
            id="below the first token",
        ),
        pytest.param(
            changed("suffix_start", [0, 3, 4]).slice(1),
            "session 'a', row 1: parent_row 0 is missing, which stores the first 3 tokens",
            id="the parent row is filtered away",
        ),
        pytest.param(
            changed("parent_row", [None, 1, 1]),
            "session 'a', row 1: parent_row 1 is not an earlier row_index of the session",
            id="a row that is its own parent",
        ),
        pytest.param(
            changed("shared_length", [0, 5, 4]),
            "session 'a', row 1: shared_length is 5, but the parent row has 4 tokens",
            id="more than the parent has",
        ),
        pytest.param(
            changed("suffix_mask", [[False, False, True, True], [True], [False, True]]),
            "session 'a', row 1: 1 elements of suffix_mask for 2 suffix_ids",
            id="a mask that is short",
        ),
        pytest.param(
            changed("suffix_ids", [[1, 2, 3, 4], [5, None], [7, 8]]),
            "session 'a', row 1: suffix_ids[1] is null",
            id="a null among the ids",
        ),
        pytest.param(
            changed(
                "suffix_mask",
                [[False, False, True, True], [False, None], [False, True]],
            ),
            "session 'a', row 1: suffix_mask[1] is null",
            id="a null in the mask",
        ),
        pytest.param(
            pa.concat_tables([changed("row_index", [0, 1, 2])] * 2),
            "session 'a', row 0: row_index 0 follows 2",
            id="a session twice",
        ),
    ],
)
def test_rows_that_cannot_be_laid_out_are_refused(rows, said):
    for stage in (tk.full_rows, tk.validate):
        with pytest.raises(InvalidTurnsError) as refused:
            stage(rows)
        assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        pytest.param(
            changed("prompt_length", [2, 5, 5]),
            "session 'a', row 1: suffix_mask[1] is true within the prompt of 5 tokens",
            id="trained within the prompt",
        ),
        pytest.param(
            changed(
                "suffix_mask", [[False, False, True, True], [True] * 2, [False, True]]
            ),
            "session 'a', row 1: suffix_mask[0] is true within the prompt",
            id="trained before its piece",
        ),
        pytest.param(
            changed(
                "suffix_mask", [[False, False, True, True], [False] * 2, [False, True]]
            ),
            "session 'a', row 1: suffix_logprobs[1] is not null, but suffix_mask is false",
            id="a logprob off the mask",
        ),
        pytest.param(
            changed(
                "suffix_logprobs", [[None, None, -0.5, 1.0], [None, -0.5], [None, -0.5]]
            ),
            "session 'a', row 0: suffix_logprobs[3] is 1.0",
            id="a logprob above 0",
        ),
    ],
)
def test_suffix_rows_that_break_a_rule_are_named(rows, said):
    with pytest.raises(InvalidTurnsError) as refused:
        tk.validate(rows)
    assert str(refused.value).startswith(said)


def test_payloads_go_with_whole_rows():
    turns = DRIFTING.append_column("scores", DRIFTING["output_logprobs"])
    with pytest.raises(
        ArgumentError, match="payloads need layout='full': layout is 'su"
    ):
        tk.linearize(turns, payloads=["scores"], layout="suffix")
