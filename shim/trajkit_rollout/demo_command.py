"""``trajkit demo``, whose dependencies are imported when it runs."""

from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from trajkit_shim import cli as options


def demo(
    *,
    out: Annotated[Path | None, Parameter(name=("--out", "-o"))] = None,
    sessions: options.Count = 4,
    seed: int | None = None,
    json: bool = False,
) -> int:
    """Watch real agents being recorded and turned into training rows.

    Run coding agents on the embedded engine, each in a git repository of its own. Write
    their turns and the rows of every policy, and print what drifted and what each policy
    trains, loses and costs. The exit code is 1 if an agent failed.

    Parameters
    ----------
    out
        Directory of the run (default: the first free one of runs/demo, runs/demo-2, ...).
    sessions
        Number of concurrent agents.
    seed
        Of the engine; random by default.
    json
        Print only one JSON object.
    """
    with options.needs_extra("demo"):
        # the agents are separate processes, which would report it late
        if find_spec("minisweagent") is None:
            raise ModuleNotFoundError(name="minisweagent")
        from trajkit_rollout.demo import run_demo
    places = (Path(f"runs/demo-{n}" if n > 1 else "runs/demo") for n in count(1))
    out = out or next(place for place in places if not place.exists())
    return run_demo(out, sessions=sessions, seed=seed, json=json)
