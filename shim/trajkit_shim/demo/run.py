"""Records one run: concurrent agents and the gateway on the embedded engine."""

import importlib.util
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx

from trajkit.cli.progress import Progress
from trajkit_shim.app import create_app
from trajkit_shim.demo.agents import Agent
from trajkit_shim.demo.proxy import LossyProxy
from trajkit_shim.demo.scripted_model import write_code
from trajkit_shim.demo.tasks import TASKS, Task
from trajkit_shim.engines.embedded import EmbeddedEngine, load_tokenizer
from trajkit_shim.prompting.render import ChatRenderer
from trajkit_shim.serve import running
from trajkit_shim.sessions.turn_log import TurnLog

# high enough that every run has turns that are not canonical
_DRIFT = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How one session ended."""

    session_id: str
    task: str
    # the agent's error, if any
    error: str | None
    # the task's test passes in the agent's repository
    solved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A recorded run."""

    turns_path: Path
    ends: list[End]


def chosen_tasks(names: Sequence[str] | None, sessions: int) -> list[Task]:
    """Return the task of each session; `ValueError` for an unknown name or no session."""
    if sessions < 1:
        raise ValueError(f"sessions = {sessions}: at least 1 is needed")
    known = {task.name: task for task in TASKS}
    for name in names or ():
        if name not in known:
            raise ValueError(f"task {name!r} is not one of {', '.join(known)}")
    chosen = [known[name] for name in names or known]
    return [chosen[i % len(chosen)] for i in range(sessions)]


def record(out: Path, tasks: Sequence[Task], seed: int | None) -> Run:
    """Have one agent work on each task concurrently, and log their model calls.

    Raises as `trajkit_shim.demo.run_demo`.
    """
    if importlib.util.find_spec("minisweagent") is None:
        raise ModuleNotFoundError("No module named 'minisweagent'", name="minisweagent")
    log = TurnLog(out)
    engine = EmbeddedEngine(write_code, drift=_DRIFT, seed=seed)
    # rendered prompts drift, which the demo is to show
    gateway = create_app(engine, ChatRenderer(load_tokenizer()), log, prompts="render")
    lost: dict[str, tuple[int, ...]] = {}
    with running(LossyProxy(gateway, lost)) as url:
        agents = []
        for i, task in enumerate(tasks):
            session_id = f"{task.name}-{i}"
            answer = httpx.post(f"{url}/sessions", json={"session_id": session_id})
            answer.raise_for_status()
            key = answer.json()["api_key"]
            lost[key] = task.loses
            folder = out.resolve() / "agents" / session_id
            agents.append(Agent(api_key=key, task=task, folder=folder))
            agents[-1].prepare()
        errors = _at_work(agents, f"{url}/v1")
    ends = [
        End(
            session_id=agent.folder.name,
            task=agent.task.name,
            error=error,
            solved=agent.solved(),
        )
        for agent, error in zip(agents, errors, strict=True)
    ]
    return Run(turns_path=log.path, ends=ends)


def _at_work(agents: list[Agent], base_url: str) -> list[str | None]:
    """Run all agents to their ends; return their errors."""
    errors = []
    with (
        Progress("agents at work", "agents") as progress,
        ThreadPoolExecutor(len(agents)) as pool,
    ):
        progress.begin(len(agents))
        for error in pool.map(lambda agent: _error(agent, base_url), agents):
            errors.append(error)
            progress.advance(1)
    return errors


def _error(agent: Agent, base_url: str) -> str | None:
    try:
        code = agent.work(base_url)
    except subprocess.TimeoutExpired as error:
        return f"timed out after {error.timeout:g} s"
    return f"exit code {code}" if code else None
