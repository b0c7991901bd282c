"""Cases that `tests.fuzz` found and made small: none may differ again."""

import pyarrow as pa
import pytest

import trajkit as tk
from tests.fuzz import rows as fuzz


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
