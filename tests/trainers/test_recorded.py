"""The result of trainers' own code on exported fields, recorded from checkouts."""

import json

import pytest

from tests.trainers.recorded import RECORDED, digest, expected, exported

RESULTS = json.loads(RECORDED.read_text("utf-8"))


@pytest.fixture(scope="module")
def fields():
    return exported()


@pytest.mark.parametrize("name", RESULTS)
def test_the_loss_of_the_trainer_is_the_reference_loss(name, fields):
    """The recorded code ran on these very fields."""
    recorded = RESULTS[name]
    assert digest(fields[name]) == recorded["fields"]
    due = expected(name)
    if due != recorded["result"]:
        assert recorded["result"] == pytest.approx(due, rel=1e-6)


def test_areal_by_turn_is_as_by_token_where_a_row_has_one_reward():
    recorded = RESULTS["areal"]
    assert recorded["by_turn"] == pytest.approx(recorded["result"])


def test_all_trainers_without_a_package_are_there(fields):
    assert fields.keys() == RESULTS.keys()
