"""``trajkit train-demo``: a small model that learns from what its agent did.

An agent with two tools (`train.task`, `train.agents`) calls the model through the gateway.
The recorded turns become rows, the rows tree packs, and the packs one update of the
weights, which the gateway gives to the engine (`train.loop`). The same seeds are trained
under several policies. Needs torch.
"""

import json as json_text
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather

from trajkit.cli.progress import Progress
from trajkit.cli.text import text_table
from trajkit.policies import policy as named_policy
from trajkit_shim.train.loop import Settings, train, warm_start
from trajkit_shim.train.report import LAST, compare, draw

__all__ = ["Settings", "run_train"]

T = TypeVar("T")
POLICIES = ("faithful", "slime", "trl", "polar")


def run_train(
    out: str | Path,
    settings: Settings,
    *,
    policies: Sequence[str] | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    jobs: int | None = None,
    json: bool = False,
) -> int:
    """Train a small model under each policy and seed, print a table, and return 0.

    ``out`` gets ``steps.arrow`` with a line per step, ``summary.json``, ``reward.svg``,
    and a folder per seed of the warm start and of each policy, with turn log and weights.
    It must not contain a run. Each seed has its own weights, scripted runs and tasks, the
    same for all policies. ``jobs`` are processes: by default one per core, or one for all
    if the device is not the CPU. ``json`` prints one JSON object instead of a table.
    """
    started = time.monotonic()
    out, policies = Path(out), tuple(policies or POLICIES)
    for name in policies:
        named_policy(name)
    if jobs is None:
        jobs = (os.cpu_count() or 1) if settings.device == "cpu" else 1
    runs = [(seed, name) for name in policies for seed in seeds]
    with (
        Progress("training", "runs") as progress,
        # forked processes would share the state of torch's threads
        ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool,
    ):

        def ended(futures: list[Future[T]]) -> list[T]:
            for future in futures:
                future.add_done_callback(lambda _: progress.advance(1))
            return [future.result() for future in futures]

        progress.begin(len(seeds) + len(runs))
        warm = ended([pool.submit(warm_start, out, seed, settings) for seed in seeds])
        trained = ended([pool.submit(train, out, *run, settings) for run in runs])
    lines = [line for run in trained for line in run]
    steps = pa.Table.from_pylist(lines)
    pyarrow.feather.write_feather(steps, out / "steps.arrow", "uncompressed")
    draw(steps, out / "reward.svg")
    first = steps.filter(pc.equal(steps["step"], 0))
    summary: dict[str, Any] = {
        "seconds": time.monotonic() - started,
        "warm_start": warm,
        # every policy began with the same rollouts
        "same_rollouts": pc.count_distinct(first["digest"]).as_py() == len(seeds),
        "policies": compare(steps),
    }
    text = json_text.dumps(summary, indent=1)
    (out / "summary.json").write_text(text, encoding="utf-8")
    sys.stdout.write((json_text.dumps(summary) if json else _described(summary)) + "\n")
    return 0


def _described(summary: dict[str, Any]) -> str:
    """The summary for people."""
    same = "the same" if summary["same_rollouts"] else "NOT the same"
    warm = [line["scripted_reward"] for line in summary["warm_start"]]
    lines = summary["policies"]
    cells = [[_cell(value) for value in line.values()] for line in lines]
    return (
        f"{summary['seconds']:.0f} s. Reward of the scripted runs: "
        f"{sum(warm) / len(warm):.2f}\nFirst step, on rollouts that are {same} for every "
        "policy: rows, tokens, and mean mismatch\nbetween recorded and recomputed "
        f"logprobs in nats. Reward: first step, middle and last {LAST} steps.\n"
        "Share of replies with reasoning: first and last steps.\n\n"
        + text_table([name.replace("_", " ") for name in lines[0]], cells)
    )


def _cell(value: Any) -> str | int:
    if isinstance(value, list):
        return " ".join(map(str, map(_cell, value)))
    return f"{value:.2g}" if isinstance(value, float) else value
