"""Cases that `tests.fuzz` found and made small: none may differ again."""

import pyarrow as pa
import pytest

import trajkit as tk
from tests.fuzz import rows as fuzz
from trajkit.rows import linearize, plan


@pytest.mark.parametrize(
    "path", sorted(fuzz.REGRESSIONS.iterdir()), ids=lambda one: one.stem
)
def test_nothing_differs(path):
    assert fuzz.difference(fuzz.Case.read(path)) is None


def test_a_fault_is_found_made_small_and_stored(tmp_path, monkeypatch, capsys):
    compact = tk.compact

    def faulty(turns):
        """The delta form, in which every turn may train."""
        delta = compact(turns)
        at = delta.column_names.index("trainable")
        return delta.set_column(at, "trainable", pa.nulls(len(delta), pa.bool_()))

    monkeypatch.setattr(fuzz, "REGRESSIONS", tmp_path)
    monkeypatch.setattr(tk, "compact", faulty)
    monkeypatch.setitem(fuzz._AT_ONCE, "forms", 10)
    assert fuzz.run("forms", 3, 30, 600) > 0
    assert "forms seed" in capsys.readouterr().out
    for path in tmp_path.iterdir():
        case = fuzz.Case.read(path)
        assert len(case.turns) == 1
        assert fuzz.difference(case) is not None
    monkeypatch.undo()
    assert fuzz.difference(case) is None


def some_turns(**fields):
    """Two calls of a session, of which the second continues the first."""
    known = fuzz.drawn_case("twins", 0).turns[0]
    first = {**known, "prompt_ids": [1], "output_ids": [2, 3]}
    first |= {"output_mask": None, "weight_versions": None, "trainable": None}
    first |= {"prompt_messages": None, "response_message": None}
    first |= {"finish_reason": "stop", **fields}
    return [first, {**first, "turn_index": 9, "prompt_ids": [1, 2, 3, 4]}]


def test_wrong_payloads_are_found(monkeypatch):
    turns = some_turns(output_logprobs=None)
    case = fuzz.Case("twins", "faithful", {}, None, 0, turns)
    assert fuzz.difference(case) is None
    made = plan.with_payloads

    def shifted(batch, *arguments):
        made_of = made(batch, *arguments)
        lists = made_of["prefix"]
        values = pa.concat_arrays([lists.values[1:], lists.values[:1]])
        index = made_of.schema.get_field_index("prefix")
        moved = pa.LargeListArray.from_arrays(lists.offsets, values)
        return made_of.set_column(index, "prefix", moved)

    monkeypatch.setattr(
        plan,
        "with_payloads",
        lambda *given: shifted(*given) if given[4] else given[0],
    )
    assert "row 0: prefix[0] is " in fuzz.difference(case)


@pytest.mark.parametrize("mode", ["twins", "forms"])
def test_a_missing_logprob_that_is_not_refused_is_found(mode, monkeypatch):
    choices = {"missing_logprobs": "raise"}
    turns = some_turns(output_logprobs=[-1.0, None])
    case = fuzz.Case(mode, "faithful", choices, None, 0, turns)
    assert fuzz.difference(case) is None
    monkeypatch.setattr(linearize, "check_logprobs", lambda *_: None)
    assert "lacks a logprob and is not refused" in fuzz.difference(case)
