"""The twins give what the peers' own code gives."""

import pytest

from tests.golden_sessions import (
    cap,
    comparable,
    expected_interleave,
    expected_slime,
    golden,
    golden_name,
    interleave_sessions,
    slime_sessions,
)
from tests.oracles import rows as reference


def test_every_session_is_there():
    assert len(golden("slime")) == 150
    assert len(golden("slime-order")) == 20
    assert len(golden("interleave")) == 150
    # 11 rollouts carry an error of their own, and on one of them the peer raises too
    assert len(interleave_sessions()) == 139


@pytest.mark.parametrize("session", slime_sessions(), ids=golden_name)
def test_slime_in_closed_form(session):
    rows, report = reference.linearize(
        session["turns"],
        "slime",
        fork_threshold=session["knobs"]["fork_threshold"],
        max_row_tokens=cap(session),
    )
    expected, left_out = expected_slime(session)
    assert comparable(rows, expected) == expected
    assert len(rows) == len(expected)
    assert report["rows_cut"] == left_out


@pytest.mark.parametrize("session", slime_sessions(), ids=golden_name)
def test_slime_by_state_machine(session):
    rows = reference.slime_by_state_machine(
        session["turns"],
        fork_threshold=session["knobs"]["fork_threshold"],
        max_row_tokens=cap(session),
    )
    kept = [row for row in rows if row["response_length"] > 0]
    expected, left_out = expected_slime(session)
    assert comparable(kept, expected) == expected
    assert len(rows) - len(kept) == left_out
    assert [row["response_length"] for row in rows] == [
        row["response_length"] for row in session["expected"]["rows"]
    ]


@pytest.mark.parametrize("session", interleave_sessions(), ids=golden_name)
def test_strict_is_interleave(session):
    rows, _ = reference.linearize(session["turns"], "strict")
    expected = expected_interleave(session)
    assert comparable(rows, expected) == expected
