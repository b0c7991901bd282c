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
import trajkit.engines
from tests.engines.runs import in_order, turns_of, write_files, write_scattered
from tests.file_stages import compact_file
from trajkit import schema
from trajkit.engines import LinearizeStep
from trajkit.errors import InvalidTurnsError
from trajkit.files.tables import write_table

# as the tests do not stand in a package that workers could import
cloudpickle.register_pickle_by_value(sys.modules[__name__])


pytestmark = pytest.mark.usefixtures("cluster")


def rows_of(tmp_path, *args, **kwargs):
    rows = trajkit.engines.linearize_on_ray(*args, **kwargs)
    rows.write_parquet(str(tmp_path / "rows"))
    return in_order(tk.read_rows(tmp_path / "rows"))


def test_a_dataset_is_brought_together_by_session(tmp_path):
    turns = turns_of()
    write_scattered(turns, tmp_path / "turns")
    dataset = ray.data.read_parquet(str(tmp_path / "turns"))
    got = rows_of(tmp_path, dataset, shuffles=2)
    assert got == in_order(tk.linearize(turns))


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
    got = rows_of(tmp_path, tmp_path / "turns", step)
    # one more than there are files
    assert len(os.listdir(looks)) > 6
    assert got == in_order(tk.linearize(turns, reward=rewards))


def amend(folder, *lines):
    rows = [dict(zip(schema.AMENDMENTS.names, line, strict=True)) for line in lines]
    table = pa.Table.from_pylist(rows, schema.AMENDMENTS)
    write_table(table, folder / "amendments-00000.arrows")


def test_a_run_is_read_with_its_amendments_and_sessions(tmp_path):
    """Each file of it; the files of another run are amended by that one's own."""
    runs = [tmp_path / name for name in ("one", "other")]
    turns = turns_of()
    names = turns["session_id"].unique().to_pylist()
    for k, run in enumerate(runs):
        ours = [
            name in names[12 * k :][:12] for name in turns["session_id"].to_pylist()
        ]
        write_files(turns.filter(pa.array(ours)), run)
    amend(runs[0], ("s04", 1, "undelivered", False), ("s16", 1, "undelivered", False))
    amend(runs[1], ("s19", 0, "undelivered", False), ("s19", 0, "delivered", None))
    known = [{"session_id": name, "reward": 2.0} for name in names]
    write_table(
        pa.Table.from_pylist(known, schema.SESSIONS), runs[0] / "sessions-00000.arrows"
    )
    step = LinearizeStep(policy="slime", reward=tk.read_sessions(runs[0]))
    got = rows_of(tmp_path, runs, step)
    amended = pa.concat_tables([tk.read_turns(run) for run in runs])
    assert amended["trainable"].to_pylist().count(False) == 1
    expected = tk.linearize(amended, "slime", sessions=tk.read_sessions(runs[0]))
    assert got == in_order(expected)
    assert got != in_order(tk.linearize(turns, "slime", reward=2.0))


def test_a_log_whose_sessions_lie_mixed_in_one_file(tmp_path):
    turns = turns_of()
    log = tmp_path / "log"
    log.mkdir()
    mixed = turns.sort_by("turn_index")
    with pa.ipc.new_stream(log / "turns-00000.arrows", mixed.schema) as writer:
        writer.write_table(mixed, max_chunksize=1)
    amend(log, ("s04", 1, "undelivered", False))
    got = rows_of(tmp_path, log)
    assert got == in_order(tk.linearize(tk.read_turns(log)))


@pytest.mark.parametrize("form", ["delta", "full"])
def test_a_session_in_two_files_is_refused_with_the_way_out(tmp_path, form):
    turns = turns_of() if form == "delta" else tk.expand(turns_of())
    log, whole = tmp_path / "log", tmp_path / "whole"
    log.mkdir()
    mixed = turns.sort_by("turn_index")
    half = mixed.num_rows // 2
    for k in range(2):
        part = mixed.slice(k * half, half if not k else None)
        with pa.ipc.new_stream(log / f"turns-{k:05d}.arrows", part.schema) as writer:
            writer.write_table(part)
    amend(log, ("s04", 1, "undelivered", False))
    with pytest.raises(InvalidTurnsError, match=r"in \S+00000.* in \S+00001"):
        trajkit.engines.linearize_on_ray(log)
    with pytest.raises(InvalidTurnsError) as refused:
        trajkit.engines.linearize_on_ray([log])
    assert f"`trajkit compact {log} -o DIRECTORY/`" in str(refused.value)
    compact_file(log, f"{whole}/")
    got = rows_of(tmp_path, whole)
    assert got == in_order(tk.linearize(tk.read_turns(log)))
