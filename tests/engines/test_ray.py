"""Ray with two workers: the same rows, also where one is killed."""

import os
import signal
import sys
from collections.abc import Mapping

import pyarrow as pa
import pytest
import ray
import ray.data
from ray import cloudpickle

import trajkit as tk
from tests.engines.runs import in_order, turns_of, write_files, write_scattered
from trajkit.engines import LinearizeStep

# as the tests do not stand in a package that workers could import
cloudpickle.register_pickle_by_value(sys.modules[__name__])


pytestmark = pytest.mark.usefixtures("cluster")


def written(rows, tmp_path):
    rows.write_parquet(str(tmp_path / "rows"))
    return in_order(tk.read_rows(tmp_path / "rows"))


def test_a_dataset_is_brought_together_by_session(tmp_path):
    turns = turns_of()
    write_scattered(turns, tmp_path / "turns")
    dataset = ray.data.read_parquet(str(tmp_path / "turns"))
    sessions = dataset.groupby("session_id", num_partitions=2)
    rows = sessions.map_groups(LinearizeStep().of_session, batch_format="pyarrow")
    assert written(rows, tmp_path) == in_order(tk.linearize(turns))


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
    step = LinearizeStep(reward=Deadly(str(looks), rewards))

    def rows_of(files):
        for path in files["path"].to_pylist():
            for batch in step(tk.scan_turns(path)):
                yield pa.Table.from_batches([batch])

    files = [{"path": str(path)} for path in (tmp_path / "turns").iterdir()]
    tasks = ray.data.from_items(files, override_num_blocks=len(files))
    rows = tasks.map_batches(rows_of, batch_size=1, batch_format="pyarrow")
    got = written(rows, tmp_path)
    # one more than there are files
    assert len(os.listdir(looks)) > 6
    assert got == in_order(tk.linearize(turns, reward=rewards))
