"""Cases that `benchmarks.fuzz` found and made small: none may differ again."""

import pytest

from benchmarks.fuzz import REGRESSIONS, Case, difference


@pytest.mark.parametrize(
    "path", sorted(REGRESSIONS.iterdir()), ids=lambda one: one.stem
)
def test_nothing_differs(path):
    assert difference(Case.read(path)) is None
