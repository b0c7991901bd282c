"""Ray with two workers: the same rows, also where one is killed."""

import os
import signal
import sys
import warnings
from collections.abc import Mapping

import pytest
import ray
import ray.data
from ray import cloudpickle
from ray.data import DataContext

import trajkit as tk
import trajkit.ray
from tests.engines.runs import in_order, turns_of, write_files, write_scattered
from trajkit.errors import FormatError
from trajkit.steps import RowsStep

# as the tests do not stand in a package that workers could import
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module", autouse=True)
def cluster():
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    with warnings.catch_warnings():
        # of what Ray itself says of itself as it makes its context
        warnings.simplefilter("ignore", DeprecationWarning)
        DataContext.get_current()
    yield
    ray.shutdown()


def test_files_of_whole_sessions(tmp_path):
    turns = turns_of()
    write_files(turns, tmp_path / "turns")
    step = RowsStep(policy="slime", layout="suffix")
    trajkit.ray.linearize(tmp_path / "turns", step).write_parquet(
        str(tmp_path / "rows")
    )
    expected = tk.linearize(turns, "slime", layout="suffix")
    got = tk.read_rows(tmp_path / "rows")
    assert in_order(got) == in_order(expected)
    assert in_order(tk.full_rows(got)) == in_order(tk.linearize(turns, "slime"))


def test_a_dataset_is_brought_together_by_session(tmp_path):
    turns = turns_of()
    write_scattered(turns, tmp_path / "turns")
    dataset = ray.data.read_parquet(str(tmp_path / "turns"))
    rows = trajkit.ray.linearize(dataset, shuffles=2)
    rows.write_parquet(str(tmp_path / "rows"))
    assert in_order(tk.read_rows(tmp_path / "rows")) == in_order(tk.linearize(turns))


class Deadly(Mapping):
    """Rewards; the worker that is the third to look at them dies of it."""

    def __init__(self, folder, rewards):
        self.folder, self.rewards = folder, rewards

    def __getitem__(self, name):
        return self.rewards[name]

    def __iter__(self):
        return iter(self.rewards)

    def __len__(self):
        for k in range(100):
            try:
                os.close(os.open(f"{self.folder}/{k}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            if k == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            break
        return len(self.rewards)


def test_the_rows_are_the_same_where_a_worker_is_killed(tmp_path):
    turns = turns_of()
    write_files(turns, tmp_path / "turns")
    rewards = {name: float(k) for k, name in enumerate(turns["session_id"].to_pylist())}
    looks = tmp_path / "looks"
    looks.mkdir()
    step = RowsStep(reward=Deadly(str(looks), rewards))
    trajkit.ray.linearize(tmp_path / "turns", step).write_parquet(
        str(tmp_path / "rows")
    )
    # one more than there are files
    assert len(os.listdir(looks)) > 6
    expected = tk.linearize(turns, reward=rewards)
    assert in_order(tk.read_rows(tmp_path / "rows")) == in_order(expected)


def test_a_directory_without_turns_is_refused(tmp_path):
    with pytest.raises(FormatError, match="holds no file"):
        trajkit.ray.linearize(tmp_path)
