"""Rows in a file without what they share with another row, and back."""

import io
from unittest import mock

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests.made_tables import policy_of, replaced, turns_table
from tests.strategies import policies, row_limits, runs
from trajkit.errors import InvalidTurnsError, SchemaError
from trajkit.files.tables import STORED_ROWS, decoded, encoded, write_table
from trajkit.policies import PRESETS
from trajkit.schema import ROWS
from trajkit.tables import limits

anyone = policies | st.sampled_from(sorted(PRESETS)).map(lambda name: (name, 1024))
"""Every preset, and slime with thresholds that matter."""


@given(runs(), anyone, row_limits, st.integers(1, 60))
def test_what_is_stored_gives_the_rows_back(turns, choice, limit, size):
    rows = tk.linearize(
        turns_table(turns), policy_of(choice), max_row_tokens=limit, reward=1.0
    )
    stored = encoded(rows)
    stored.validate(full=True)
    assert stored.schema.equals(STORED_ROWS, check_metadata=True)
    with mock.patch.object(limits, "PART_TOKENS", size):
        back = decoded(stored)
    back.validate(full=True)
    assert back.schema.equals(ROWS, check_metadata=True)
    assert back == rows
    for row, line in zip(rows.to_pylist(), stored.to_pylist(), strict=True):
        trained = [i for i, on in enumerate(row["loss_mask"]) if on]
        start = min([row["shared_length"], *trained])
        assert line["suffix_start"] == start
        assert line["suffix_ids"] == row["input_ids"][start:]
        assert line["suffix_mask"] == row["loss_mask"][start:]
        assert line["suffix_logprobs"] == row["logprobs"][start:]


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
STORED = encoded(tk.linearize(DRIFTING))


@pytest.mark.parametrize(
    ("name", "value", "start"),
    [
        ("shared_length", [0, 4, 4], [0, 3, 4]),
        ("input_ids", [[1, 2, 3, 4], [1, 8, 3, 5, 6], [1, 2, 3, 5, 7, 8]], [0, 1, 1]),
        ("logprobs", [[None] * 4, [None, -1.0, *[None] * 3], [-0.5] * 6], [0, 1, 0]),
    ],
)
def test_rows_that_were_changed_come_back_as_they_are(name, value, start):
    rows = replaced(tk.linearize(DRIFTING), name, value)
    stored = encoded(rows)
    assert stored["suffix_start"].to_pylist() == start
    assert decoded(stored) == rows


def several(first=0, n=6):
    """Sessions with three rows each, and a payload."""
    lines = [
        {**line, "session_id": f"s{k}", "step": k}
        for k in range(first, first + n)
        for line in DRIFTING.to_pylist()
    ]
    turns = pa.Table.from_pylist(lines, DRIFTING.schema)
    turns = turns.append_column("scores", turns["output_logprobs"])
    return tk.linearize(turns, payloads=["scores"], reward=0.5)


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "arrows", "jsonl"])
def test_rows_in_any_order_and_beside_full_ones_are_read(tmp_path, suffix):
    rows = several()
    path, full = (tmp_path / f"{name}.{suffix}" for name in ("rows", "full"))
    stored = encoded(rows)
    write_table(stored.take(pc.sort_indices(stored["shared_length"])), path)
    assert tk.read_rows(path).sort_by("session_id").to_pylist() == rows.to_pylist()
    with pytest.raises(InvalidTurnsError, match="comes back"):
        list(tk.scan_rows(path))
    tk.write_rows(several(6, 1), full)
    assert tk.read_rows([path, full]).num_rows == rows.num_rows + 3


def test_a_row_without_its_parent_is_stored_whole():
    rows = tk.linearize(DRIFTING).slice(1)
    stored = encoded(rows)
    assert stored["suffix_start"].to_pylist() == [0, 4]
    assert decoded(stored) == rows


@pytest.mark.parametrize("read", [tk.validate, tk.verify, tk.add_weights, tk.pack])
def test_stages_name_the_reader_of_stored_rows(read):
    more = {tk.verify: [DRIFTING], tk.pack: [8]}.get(read, [])
    with pytest.raises(SchemaError, match=r"no column 'input_ids' .* read_rows reads"):
        read(STORED, *more)


def test_a_name_that_the_other_form_uses_is_refused():
    ids = pa.array([[1]] * STORED.num_rows)
    with pytest.raises(SchemaError, match="column 'logprobs' would occur twice"):
        decoded(STORED.append_column("logprobs", ids))
    with pytest.raises(SchemaError, match="column 'suffix_start' would occur twice"):
        encoded(decoded(STORED).append_column("suffix_start", ids))


def changed(name, values):
    """The stored rows with one column made anew."""
    return replaced(STORED, name, values)


START = "row 1: suffix_start is {}, but the parent row in the file has {} tokens"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (changed("suffix_start", [0, 5, 4]), START.format(5, 4)),
        (changed("suffix_start", [0, -1, 4]), START.format(-1, 4)),
        (STORED.slice(1), START.format(3, 0)),
        (changed("parent_row", [None, 1, 1]), START.format(3, 0)),
        (
            changed("suffix_mask", [[False, False, True, True], [True], [False, True]]),
            "row 1: 1 elements of suffix_mask for 2 suffix_ids",
        ),
        (
            changed("suffix_ids", [[1, 2, 3, 4], [5, None], [7, 8]]),
            "row 1: suffix_ids[1] is null",
        ),
        (
            changed("suffix_mask", [[False] * 4, [False, None], [False, True]]),
            "row 1: suffix_mask[1] is null",
        ),
    ],
)
def test_files_that_lack_tokens_are_refused(rows, message):
    file = io.BytesIO()
    write_table(rows, file, format="arrow")
    for read in (
        tk.read_rows,
        lambda file, format: list(tk.scan_rows(file, format=format)),
    ):
        file.seek(0)
        with pytest.raises(InvalidTurnsError) as refused:
            read(file, format="arrow")
        assert message in str(refused.value)
