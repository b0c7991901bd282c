"""Exported rows through the trainers' own classes, where these are installed.

``.ci/run trainers`` installs those that are on PyPI. ``TRAJKIT_SLIME`` names a checkout of
slime: its tests of the trajectory manager then run on the drop-in.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import trajkit as tk
from tests.export.group_of_rows import TARGETS, plain, sample_rows
from tests.trainers.steps import missing
from trajkit import export
from trajkit.export import prime_rl, verl

pytestmark = pytest.mark.filterwarnings("ignore")

SLIME = os.environ.get("TRAJKIT_SLIME")


def test_verl_makes_the_same_tensors_of_exported_outputs():
    missing("verl.experimental.agent_loop.agent_loop")
    found = [one for each in verl.agent_loop_outputs(sample_rows()) for one in each]
    for one, due in zip(found, TARGETS["verl"]["as_dict"], strict=True):
        made = one.as_dict()
        assert {name: plain(made[name]) for name in due} == due


def test_prime_rl_files_are_what_its_trainer_decodes(tmp_path):
    missing("msgspec")
    import msgspec

    due = prime_rl.micro_batch_fields(
        *(sample_rows(), 16), env_name="demo", ranks=2, pad_to_multiple_of=8
    )
    paths = prime_rl.write_micro_batches(
        *(sample_rows(), tmp_path, 5, 16),
        env_name="demo",
        ranks=2,
        pad_to_multiple_of=8,
    )
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == [
        "step_5/rank_0.bin",
        "step_5/rank_1.bin",
    ]
    assert len([*tmp_path.rglob("*.*")]) == 2
    names = [*due[0][0]]
    struct = msgspec.defstruct(
        "MicroBatch",
        [
            *((name, list) for name in names[:9]),
            *((name, object, None) for name in names[9:]),
        ],
        array_like=True,
        omit_defaults=True,
    )
    found = [
        msgspec.msgpack.decode(path.read_bytes(), type=list[struct]) for path in paths
    ]
    assert [msgspec.structs.asdict(one) for each in found for one in each] == [
        one for each in due for one in each
    ]


def test_areal_trajectories_are_tensors():
    missing("torch")
    for one in export.areal.trajectories(sample_rows(), reward="advantage"):
        assert one["input_ids"].ndim == 2
        assert str(one["rewards"].dtype) == "torch.float32"


def test_slime_reads_the_debug_file(tmp_path):
    missing("torch")
    import torch

    path = tmp_path / "rollout_0.pt"
    export.slime.write_debug_rollout(sample_rows(), path)
    stored = torch.load(path, weights_only=False)
    assert stored == {
        "rollout_id": 0,
        "samples": export.slime.sample_fields(sample_rows()),
    }


@pytest.mark.skipif(SLIME is None, reason="TRAJKIT_SLIME names no checkout of slime")
def test_slime_s_own_tests_pass_on_the_drop_in(tmp_path):
    """All but those that look into the tree of slime's own manager."""
    missing("torch")
    plugin = tmp_path / "drop_in.py"
    # Another package named tests may be installed: slime's come first.
    plugin.write_text(
        "import sys, types\n"
        "tests = sys.modules['tests'] = types.ModuleType('tests')\n"
        f"tests.__path__ = [{str(Path(SLIME, 'tests'))!r}]\n"
        "import tests.test_agent._dump_helpers as dump\n"
        "dump.dump_tree_txt = lambda *args, **options: ''\n"  # prints the tree
        "import slime.agent.trajectory as trajectory\n"
        "from trajkit.export.slime import TrajectoryManager\n"
        "trajectory.TrajectoryManager = TrajectoryManager\n"
    )
    options = ["-q", "-rf", "--tb=line", "-p", "drop_in"]
    tests = "tests/test_agent/test_trajectory_manager_branching.py"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, tests],
        cwd=SLIME,
        env={
            **os.environ,
            "COLUMNS": "200",
            "PYTHONPATH": f"{tmp_path}:{SLIME}:{Path(tk.__file__).parents[1]}",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    others = [
        line
        for line in re.findall(r"^FAILED .*$", result.stdout, re.MULTILINE)
        if "no attribute '_trees'" not in line
    ]
    assert others == []
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) > 15
