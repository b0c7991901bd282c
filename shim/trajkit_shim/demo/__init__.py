"""``trajkit demo``: real coding agents on the gateway, and what trajkit makes of it.

mini-swe-agent works on small tasks, in processes and scratch git repositories of its
own, against the gateway on the embedded engine. What the agents do is what agents do:
they slip and are asked again (a fork), lose a reply and send the request again (a
retry), start a second agent (a sub-agent), and their client and the chat template give
every reply back a bit changed (drift).
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trajkit_shim.demo.run import chosen_tasks, record
from trajkit_shim.demo.summary import summarise

__all__ = ["run_demo"]


def run_demo(
    out: str | Path,
    *,
    sessions: int = 3,
    tasks: Sequence[str] | None = None,
    seed: int | None = None,
    json: bool = False,
) -> int:
    """Record a run of real agents, turn it into rows, and print what came of it.

    Parameters
    ----------
    out : path
        Directory of the run, made if missing: the turn log, the rows of each policy,
        and a folder per agent. It must hold no run yet.
    sessions : int
        Agents at work side by side, at least 1.
    tasks : sequence of str, optional
        Names of the tasks that the sessions take in turn. None: all, in the order
        ``median``, ``slug``, ``roman``. The first shows all there is to see.
    seed : int, optional
        Of the engine. With several sessions the order of their calls matters too.
    json : bool
        Print one JSON object in place of tables.

    Returns
    -------
    int
        0; 1 where an agent failed or left its task unsolved.

    Raises
    ------
    ValueError
        There is no such task, or fewer than one session.
    ModuleNotFoundError
        mini-swe-agent is not installed.
    FileExistsError
        ``out`` holds a run.
    subprocess.CalledProcessError
        git could not set a scratch repository up.
    """
    started = time.monotonic()
    run = record(Path(out), chosen_tasks(tasks, sessions), seed)
    summary = summarise(Path(out), run, started)
    sys.stdout.write((summary.as_json() if json else summary.describe()) + "\n")
    return 0 if all(end.error is None and end.solved for end in run.ends) else 1
