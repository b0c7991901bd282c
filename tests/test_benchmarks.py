"""The table of all benchmarks: every line comes, and says what it should."""

import gc
import json

import pytest

from benchmarks import __main__ as table
from benchmarks import memory, roofline
from benchmarks.lines import Line


@pytest.fixture(autouse=True)
def nothing_is_collected(monkeypatch):
    """Before each timed call, which takes longer than what the tests time."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


# those that start no process, and do not go over every policy twice
@pytest.mark.parametrize(
    "part", ["roofline", "record", "import", "export", "growth", "pack"]
)
def test_a_part_of_the_table(monkeypatch, capsys, part):
    monkeypatch.setattr(roofline, "COPY_BYTES", 1 << 16)
    table.main(["--only", part], table.TINY)
    head, _, *lines = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("|")
    ]
    assert lines
    for line in lines:
        cells = line.split("|")
        assert len(cells) == len(head.split("|"))
        assert float(cells[5].replace(",", "")) > 0


def test_every_policy_has_a_line():
    lines = list(table.linearized(table.TINY))
    assert [line.what for line in lines] == [
        f"linearize, {policy}, clean" for policy in table.policies.TWINS
    ]


def test_a_line():
    faster = Line("work", 0.002, "ms", "others", 0.25)
    assert str(faster) == "| work | 2.00 ms | others | 250 ms | 125 |"
    assert str(Line("rate", 3e9, "GB/s", "others", 2e9, more=True)).endswith("| 1.50 |")
    assert str(Line("alone", 2**20, "MiB")) == "| alone | 1.00 MiB | | | |"


@pytest.mark.parametrize("stage", memory.STAGES)
def test_a_stage_whose_memory_is_looked_at(tmp_path, capsys, stage):
    memory.written(tmp_path, table.TINY.size, 1)
    memory.work(stage, tmp_path)
    assert json.loads(capsys.readouterr().out).keys() == {"inputs", "above"}
