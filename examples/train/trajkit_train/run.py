"""A training run: all seeds under all policies, and the files that it leaves."""

import json as json_text
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather
import torch
from transformers.utils import logging

from trajkit.cli.screen import Progress
from trajkit.policies import policy as named_policy
from trajkit_train.loop import train, warm_start
from trajkit_train.report import compare, described, draw
from trajkit_train.settings import Settings

T = TypeVar("T")


def run_train(
    out: Path,
    settings: Settings,
    *,
    policies: Sequence[str],
    seeds: Sequence[int],
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
    for name in policies:
        named_policy(name)
    if settings.device != "cpu":
        jobs = jobs or 1
    runs = [(seed, name) for name in policies for seed in seeds]
    with (
        Progress("training", "runs") as progress,
        # forked processes would share the state of torch's threads
        ProcessPoolExecutor(
            jobs, multiprocessing.get_context("spawn"), _prepare_process
        ) as pool,
    ):

        def ended(futures: list[Future[T]]) -> list[T]:
            for future in futures:
                future.add_done_callback(lambda _: progress.count(1))
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
    sys.stdout.write((json_text.dumps(summary) if json else described(summary)) + "\n")
    return 0


def _prepare_process() -> None:
    # runs share the cores, and one thread keeps the order of sums
    torch.set_num_threads(1)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
