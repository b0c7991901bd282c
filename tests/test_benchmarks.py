"""The table of all benchmarks: every line comes, and says what it should."""

import gc
import json
import os
from pathlib import Path

import pytest

from benchmarks import __main__ as table
from benchmarks import installed_peers, memory, roofline
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
    large = "| small | 12,345 bytes | large | 98,765,432 bytes | 8,000 |"
    assert str(Line("small", 12_345, "bytes", "large", 98_765_432)) == large
    assert str(Line("alone", 2**20, "MiB")) == "| alone | 1.00 MiB | | | |"


@pytest.mark.parametrize("stage", memory.STAGES)
def test_a_stage_whose_memory_is_looked_at(tmp_path, capsys, stage):
    memory.written(tmp_path, table.TINY.size, 1)
    memory.work(stage, tmp_path)
    assert json.loads(capsys.readouterr().out).keys() == {"inputs", "above"}


# stands where TRL would: the restated rule under the names of the package
STAND_IN = """
from dataclasses import dataclass
from types import SimpleNamespace
from tests.oracles import peers_chains

@dataclass
class TurnRecord:
    prompt_ids: list
    output_ids: list
    output_logprobs: list

def _chain_to_sequences(turns, rollout_id, fork_threshold):
    rows = peers_chains.trl([vars(turn) for turn in turns], fork_threshold)
    rows[0]["loss_mask"][-1] = LAST
    return [
        SimpleNamespace(
            input_ids=row["tokens"],
            completion_mask=row["loss_mask"],
            old_log_probs=row["logprobs"],
        )
        for row in rows
    ], {}
"""


@pytest.mark.parametrize("last", [1, 0])
def test_an_installed_peer_is_compared(tmp_path, monkeypatch, capsys, last):
    """Its rows are looked at; one that is not there is named."""
    folder = tmp_path / "trl" / "experimental" / "async_grpo"
    folder.mkdir(parents=True)
    module = folder / "async_rollout_worker.py"
    module.write_text(STAND_IN.replace("LAST", str(last)))
    facts = tmp_path / "trl-9.9.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 9.9\n")
    root = Path(table.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{root}")
    monkeypatch.setitem(installed_peers.PEERS, "none", None)
    words = ["--size", "small", "--shape", "siblings", "--repeats", "1"]
    installed_peers.main([*words, "--python", "none=/bin/false"])
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.startswith("siblings      trl     9.9 "))
    said = "rows, equal" if last else "other rows: s0, row 0: loss_mask differs"
    assert said in line
    assert "none: not timed: it does not run" in "\n".join(lines)


def test_a_peer_that_there_is_not(capsys):
    with pytest.raises(SystemExit):
        installed_peers.main(["--python", "slim=python"])
    assert "'slim' is no peer" in capsys.readouterr().err
