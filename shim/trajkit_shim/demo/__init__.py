"""``trajkit demo``: real coding agents on the gateway, and the resulting rows.

mini-swe-agent works on small tasks, in its own processes and scratch git repositories,
against the gateway with the embedded engine. The agents do what real agents do: they
make an invalid call and are asked again (a fork), lose a reply and repeat the request (a
retry), start a second agent (a sub-agent), and their client and the chat template return
every reply slightly changed (drift).
"""

import json as json_text
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trajkit_shim.demo.agents import record
from trajkit_shim.demo.summary import describe, summarise
from trajkit_shim.demo.tasks import TASKS

__all__ = ["run_demo"]


def run_demo(
    out: str | Path,
    *,
    sessions: int = 3,
    tasks: Sequence[str] | None = None,
    seed: int | None = None,
    json: bool = False,
) -> int:
    """Record a run of real agents, turn it into rows, and print a summary.

    Parameters
    ----------
    out : path
        Directory of the run, created if missing: the turn log, the rows of each policy,
        and a folder per agent. It must not contain a run.
    sessions : int
        Number of concurrent agents, at least 1.
    tasks : sequence of str, optional
        Names of the tasks that the sessions take in turn. Default: ``median``, ``slug``,
        ``roman``. The first one alone shows everything.
    seed : int, optional
        Of the engine. With several sessions the order of their calls matters too.
    json : bool
        Print one JSON object instead of tables.

    Returns
    -------
    int
        0; 1 if an agent failed or did not solve its task.

    Raises
    ------
    ValueError
        There is no such task, or ``sessions`` is below 1.
    ModuleNotFoundError
        mini-swe-agent is not installed.
    FileExistsError
        ``out`` contains a run.
    subprocess.CalledProcessError
        git could not create a scratch repository.
    """
    started = time.monotonic()
    if sessions < 1:
        raise ValueError(f"sessions = {sessions}: at least 1 is needed")
    known = {task.name: task for task in TASKS}
    for name in tasks or ():
        if name not in known:
            raise ValueError(f"task {name!r} is not one of {', '.join(known)}")
    chosen = [known[name] for name in tasks or known]
    turns_path, ends = record(
        Path(out), [chosen[i % len(chosen)] for i in range(sessions)], seed
    )
    summary = summarise(Path(out), turns_path, ends, started)
    shown = json_text.dumps(summary, ensure_ascii=False) if json else describe(summary)
    sys.stdout.write(shown + "\n")
    return 0 if all(end.error is None and end.solved for end in ends) else 1
