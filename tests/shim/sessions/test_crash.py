"""Gateways killed under load; ``benchmarks.crash`` does it as often as is asked."""

import os

from benchmarks import crash

KILLS = int(os.environ.get("TRAJKIT_KILLS", "5"))


def test_a_killed_gateway_keeps_every_acknowledged_turn(tmp_path):
    *_, outcome = crash.run(KILLS, seed=1, directory=tmp_path)
    assert outcome.wrong == []
    assert outcome.kills == KILLS
    assert outcome.acknowledged > 10 * KILLS
    assert outcome.logged >= outcome.acknowledged
    assert outcome.finished > 0
    assert outcome.resumed > 0
