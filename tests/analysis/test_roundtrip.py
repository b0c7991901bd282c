"""Whether the text of a reply gives its ids back."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests.analysis.test_drift_findings import TOKENIZER, ids, pieces, turn
from tests.made_tables import in_delta_form, linearized, turns_table
from tests.shim.fakes import byte_tokenizer
from tests.strategies import sessions
from trajkit import schema

FAST = byte_tokenizer()
E_ACUTE = FAST.encode("é", add_special_tokens=False)


@pytest.mark.parametrize(
    ("output", "difference"),
    [
        (ids("Let me look.<|im_end|>"), None),
        (ids("Let me look."), None),
        (pieces("Let me re", "turn."), 3),
        (pieces("a", "<", "|im_end|", ">"), 1),
    ],
)
def test_where_a_reply_differs(output, difference):
    table = tk.from_records([turn([1], output)])
    (line,) = tk.analysis.check_roundtrip(table, TOKENIZER).to_pylist()
    assert line["exact"] is (difference is None)
    assert line["first_difference"] == difference
    again = TOKENIZER.encode(
        TOKENIZER.decode(output, skip_special_tokens=False), add_special_tokens=False
    ).ids
    assert (line["n_output"], line["n_encoded"]) == (len(output), len(again))


def test_ids_that_are_missing_at_the_end_differ_there():
    class Forgets:
        def encode(self, text, *, add_special_tokens):
            return [int(word) for word in text.split()][:2]

        def decode(self, ids, *, skip_special_tokens):
            return " ".join(map(str, ids))

    table = tk.from_records([turn([1], [5, 6, 7]), turn([1], [5, 6])])
    lines = tk.analysis.check_roundtrip(table, Forgets()).to_pylist()
    assert [line["first_difference"] for line in lines] == [2, None]


def test_half_a_character_does_not_come_back():
    table = tk.from_records([turn([1], E_ACUTE), turn([1], E_ACUTE[:1])])
    assert tk.analysis.check_roundtrip(table, FAST)["exact"].to_pylist() == [
        True,
        False,
    ]


def test_white_space_that_the_tokenizer_would_tidy_up_is_kept():
    tokenizer = byte_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    table = tk.from_records([turn([1], tokenizer.encode("a , b"))])
    assert tk.analysis.check_roundtrip(table, tokenizer)["exact"].to_pylist() == [True]


def test_an_empty_output_passes():
    table = tk.from_records([turn([1], [2], finish_reason="abort")])
    empty = pa.array([[]], table.schema.field("output_ids").type)
    at = table.schema.get_field_index("output_ids")
    table = table.set_column(at, table.schema.field(at), empty)
    (line,) = tk.analysis.check_roundtrip(table, TOKENIZER).to_pylist()
    assert line["exact"]
    assert line["first_difference"] is None


def test_trainable_is_the_turn_s_own_and_false_where_it_does_not_come_back():
    drifts = pieces("re", "turn.")
    table = tk.from_records(
        [
            turn([1], output, trainable=trainable)
            for output in (ids("ok"), drifts)
            for trainable in (None, True, False)
        ]
    )
    checked = tk.analysis.check_roundtrip(table, TOKENIZER)
    expected = [True, True, False, False, False, False]
    assert checked["trainable"].to_pylist() == expected
    at = table.schema.get_field_index("trainable")
    table = table.set_column(at, table.field(at), checked["trainable"])
    _, report = linearized(table)
    assert report["tokens_trained"].to_pylist() == [2 * len(ids("ok"))]
    assert report["lost_untrainable"].to_pylist() == [len(ids("ok")) + 3 * len(drifts)]


@given(sessions(), st.data())
def test_one_line_per_turn_in_either_form(turns, data):
    table = turns_table(turns)
    checked = tk.analysis.check_roundtrip(table, TOKENIZER)
    assert checked.schema.equals(schema.ROUNDTRIP, check_metadata=True)
    for line, row in zip(checked.to_pylist(), table.to_pylist(), strict=True):
        assert (line["session_id"], line["turn_index"]) == (
            row["session_id"],
            row["turn_index"],
        )
        output = row["output_ids"]
        text = TOKENIZER.decode(output, skip_special_tokens=False)
        again = TOKENIZER.encode(text, add_special_tokens=False).ids
        assert line["exact"] is (again == output)
        own = row["trainable"] is not False
        assert line["trainable"] is (own and line["exact"])
    delta = in_delta_form(table, lambda options: data.draw(st.sampled_from(options)))
    assert tk.analysis.check_roundtrip(delta, TOKENIZER).equals(checked)
