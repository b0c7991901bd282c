"""Rollouts in the workers of a real Ray cluster, one of which is killed."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import ray

import trajkit as tk
import trajkit_rollout
from trajkit_rollout.demo import solve
from trajkit_rollout.rollout import Rollouts
from trajkit_rollout.settings import Settings
from trajkit_rollout.tasks import read_tasks
from trajkit_shim.app import create_app
from trajkit_shim.call import Options
from trajkit_shim.engines.embedded import EmbeddedEngine
from trajkit_shim.prompting.render import embedded_renderer
from trajkit_shim.serve import listen, running
from trajkit_shim.sessions.turn_log import TurnLog

AGENT = f"{sys.executable} -S {Path(__file__).parents[1]}/rollout/small_agent.py"
TOKEN = "secret"


pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture
def tasks(tmp_path):
    lines = [
        {
            "id": f"t{k}",
            "prompt": f"Make t{k}.txt say yes.",
            "workspace": {f"t{k}.txt": "no\n"},
            "solution": {f"t{k}.txt": "yes\n"},
            "grade": {"command": f"grep -qx yes t{k}.txt"},
        }
        for k in range(6)
    ]
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return read_tasks(path)


@pytest.fixture
def gateways(tmp_path, tasks):
    """Two gateways: their URLs, and the folder of their logs."""

    def app(name):
        engine = EmbeddedEngine(solve(tasks, 1.0), seed=1)
        log = TurnLog(tmp_path / "turns" / name)
        renderer = embedded_renderer()
        return create_app(engine, renderer, log, Options(admin_token=TOKEN))

    node = ray.util.get_node_ip_address()
    with running(app("0")) as first, running(app("1"), listen(node, 0)) as second:
        yield [first, second.replace(node, "{node}")]


def settings(agent=AGENT, parallel=2):
    return Settings(
        harness="shell",
        argument=(agent,),
        sandbox_option=("namespaces=no",),
        path=(str(Path(__file__).parents[1]),),
        parallel=parallel,
    )


def test_a_killed_worker_s_rollouts_run_again_and_none_counts_twice(
    tmp_path, tasks, gateways
):
    out, marker = tmp_path / "run", tmp_path / "killed"
    # the first agent kills the worker that it runs below: its own parents up to Ray
    agent = tmp_path / "agent.sh"
    agent.write_text(
        f"if mkdir {marker} 2> /dev/null; then echo $PPID > {marker}/pid; "
        f"sleep 600; fi\n{AGENT}\n"
    )

    def kill():
        pid = marker / "pid"
        while not (pid.exists() and pid.read_text().strip()):
            if done.wait(0.05):
                return
        process = int(pid.read_text())
        while b"ray::" not in Path(f"/proc/{process}/cmdline").read_bytes():
            status = Path(f"/proc/{process}/stat").read_text()
            process = int(status.rpartition(")")[2].split()[1])
        os.kill(process, signal.SIGKILL)

    done = threading.Event()
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with Rollouts(tasks, settings(f"sh {agent}"), out) as rollouts:
            ended = rollouts.run(gateways, TOKEN, ray="auto")
    finally:
        done.set()
        killer.join()
    assert marker.exists()
    assert sorted(r.group_id for r in ended) == [task.id for task in tasks]
    assert {r.reward for r in ended} == {1.0}
    table = pq.read_table(out / "sessions.parquet")
    lines = table.to_pylist()
    (lost,) = [line for line in lines if line["error"] is not None]
    assert "sampled again as" in lost["error"]
    assert [r.attempt for r in ended if r.group_id == lost["group_id"]] == [2]
    assert len(lines) == len(tasks) + 1
    # a turn of the killed attempt is not trained, and both gateways were used
    logs = [tk.read_turns(tmp_path / "turns" / name) for name in "01"]
    assert all(log.num_rows for log in logs)
    sessions = tk.read_sessions(out / "sessions.parquet")
    rows = [tk.linearize(log, sessions=sessions) for log in logs]
    trained = {name for each in rows for name in each["session_id"].to_pylist()}
    assert {r.session_id for r in ended} <= trained


@ray.remote
class Worker:
    """An actor of a trainer's own."""

    def work(self, task, settings, urls, out):
        rollout = trajkit_rollout.run_task(task, settings, urls, out, token=TOKEN)
        return trajkit_rollout.sessions_table([rollout])


def test_an_actor_runs_a_task_and_returns_a_table(tmp_path, tasks, gateways):
    worker = Worker.remote()
    table = ray.get(
        worker.work.remote(tasks[0], settings(), gateways[:1], tmp_path / "run")
    )
    (line,) = table.to_pylist()
    assert (line["group_id"], line["reward"], line["error"]) == ("t0", 1.0, None)
