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
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from trajkit.cli.progress import Progress
from trajkit.policies import policy as named_policy
from trajkit_shim.train.loop import Settings, train, warm_start
from trajkit_shim.train.report import describe, summarise

__all__ = ["Settings", "run_train"]

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
    """Train a small model under each policy and seed, and print what came out.

    Parameters
    ----------
    out : path
        Directory of the run, created if missing: ``steps.arrow`` with a line per step,
        ``summary.json``, ``reward.svg``, and a folder per seed of the warm start and of
        each policy, with turn log and weights. It must not contain a run.
    settings : Settings
    policies : sequence of str, optional
        Names of presets. Default: ``faithful``, ``slime``, ``trl``, ``polar``.
    seeds : sequence of int
        Each has its own weights, scripted runs and tasks, the same for all policies.
    jobs : int, optional
        Processes. Default: one per core, or one for all if the device is not the CPU.
    json : bool
        Print one JSON object instead of tables.

    Returns
    -------
    int
        0.

    Raises
    ------
    PolicyError
        A policy does not exist.
    FileExistsError
        ``out`` contains a run.
    """
    started = time.monotonic()
    out, policies = Path(out), tuple(policies or POLICIES)
    for name in policies:
        named_policy(name)
    if jobs is None:
        jobs = (os.cpu_count() or 1) if settings.device == "cpu" else 1
    folders = {seed: out / "warm-start" / str(seed) for seed in seeds}
    warm: list[dict[str, Any]] = []
    lines: list[dict[str, Any]] = []
    with (
        Progress("training", "runs") as progress,
        # forked processes would share the state of torch's threads
        ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool,
    ):
        progress.begin(len(seeds) * (1 + len(policies)))
        try:
            first = {
                pool.submit(warm_start, folder, seed, settings): seed
                for seed, folder in folders.items()
            }
            running = []
            for done in as_completed(first):
                warm.append(done.result())
                progress.advance(1)
                seed = first[done]
                model = folders[seed] / "model"
                running += [
                    pool.submit(
                        train, out / name / str(seed), model, seed, name, settings
                    )
                    for name in policies
                ]
            for run in as_completed(running):
                lines += run.result()
                progress.advance(1)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    summary = summarise(out, policies, warm, lines, time.monotonic() - started)
    shown = json_text.dumps(summary) if json else describe(summary)
    sys.stdout.write(shown + "\n")
    return 0
