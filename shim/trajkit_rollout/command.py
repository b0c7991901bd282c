"""``trajkit rollout``."""

import json
import os
import secrets
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from cyclopts import Parameter

from trajkit.cli import BAD_DATA, DONE
from trajkit.cli.screen import text_table
from trajkit.errors import ArgumentError
from trajkit_shim import engine_options as options
from trajkit_shim.engine_options import ADMIN_TOKEN

if TYPE_CHECKING:
    from trajkit_rollout.run_log import Rollout


def rollout(
    tasks: Path,
    /,
    *server_arguments: options.ServerArguments,
    harness: str | None = None,
    out: Annotated[Path | None, Parameter(name=("--out", "-o"))] = None,
    sandbox: str = "local",
    sandbox_option: list[str] | None = None,
    image: str | None = None,
    path: list[str] | None = None,
    gateway: str | None = None,
    gateway_url: str | None = None,
    admin_token: str | None = None,
    untrusted: bool = False,
    install: bool = False,
    repeat: options.Count = 1,
    parallel: options.Count = 4,
    timeout: float | None = None,
    self_test: bool = False,
    retry_failed: bool = False,
    callback: str | None = None,
    argument: Annotated[list[str] | None, Parameter(allow_leading_hyphen=True)] = None,
    host: str = "127.0.0.1",
    seed: int | None = None,
    engine: options.EngineOptions | None = None,
    json: bool = False,
) -> int:
    """Have an agent work on tasks, record it, and grade what it did.

    Run a coding agent on each task in a sandbox of its own, record its model calls, and
    grade its changes in a fresh copy. RUN gets the turns and a sessions table with reward,
    group and error. Run the same command again to continue a stopped run. The exit code is
    1 if a rollout failed.

    Parameters
    ----------
    tasks
        A JSONL file, a directory with a task.toml, or a directory of those.
    harness
        The agent, by name or import path (package.module:record); see docs/serving.md.
    out
        RUN: directory of the run; created if missing, continued otherwise.
    sandbox
        local, docker, apptainer, e2b, or an import path.
    sandbox_option
        NAME=VALUE, an option of that kind of sandbox; may be repeated.
    image
        For sandboxes that need one, unless the task names one.
    path
        Directory to put first on the sandbox's PATH; may be repeated.
    gateway
        URL of a gateway that records the calls (trajkit serve) instead of one that runs
        with the rollouts and has the options of an engine; needs its token.
    gateway_url
        URL of the gateway as seen from the sandboxes, if it differs.
    admin_token
        Admin token of the gateway (default: a random one); prefer the environment variable
        TRAJKIT_ADMIN_TOKEN.
    untrusted
        Refuse a sandbox that exposes files, processes or the network of this machine; see
        docs/sandboxes.md.
    install
        Install the agent in each sandbox if it is missing.
    repeat
        Rollouts of each task, which share its group.
    parallel
        Concurrent rollouts.
    timeout
        Time limit of each agent in seconds, overriding its task.
    self_test
        Run no agent: grade each task's solution and no change at all, which should give 1.0
        and 0.0.
    retry_failed
        When continuing a run, also repeat rollouts that failed.
    callback
        URL that receives each finished rollout as a JSON object.
    argument
        Extra argument for the agent's command, or the command of the shell harness; may be
        repeated.
    host
        Of the gateway.
    seed
        Of the embedded engine.
    json
        Print only one JSON object.
    """
    given = {**locals(), **vars(engine or options.EngineOptions())}
    given["admin_token"] = admin_token or os.environ.get(ADMIN_TOKEN)
    for name in ("sandbox_option", "path", "argument"):
        given[name] = given[name] or []
    return _rollout(SimpleNamespace(**given))


def _rollout(arguments: SimpleNamespace) -> int:
    if arguments.self_test:
        arguments.harness = arguments.harness or "shell"
    elif arguments.harness is None or arguments.out is None:
        raise ArgumentError("--harness and --out are required, but for --self-test")
    with options.needs_extra("shim"):
        from trajkit_rollout.run import Callback, Rollouts, Settings
        from trajkit_rollout.solver import solve
        from trajkit_rollout.tasks import read_tasks, task_files
        from trajkit_shim.serve import running
    try:
        settings = Settings.chosen(arguments)
        callback = None if arguments.callback is None else Callback(arguments.callback)
    except ValueError as error:
        raise ArgumentError(str(error)) from None
    if arguments.gateway is not None and arguments.launch is not None:
        raise ArgumentError(
            "a gateway that runs elsewhere has its engine: leave out --gateway"
        )
    if arguments.gateway is not None and not arguments.admin_token:
        raise ArgumentError(
            f"--gateway {arguments.gateway} needs its token: --admin-token"
        )
    token = arguments.admin_token or secrets.token_hex(16)
    tasks = read_tasks(arguments.tasks)
    if arguments.self_test:
        with TemporaryDirectory() as folder:
            hidden = task_files(arguments.tasks)
            with Rollouts(tasks, settings, Path(folder), hidden=hidden) as rollouts:
                return _self_test(rollouts.self_test(), as_json=arguments.json)
    with ExitStack() as stack:
        rollouts = stack.enter_context(
            Rollouts(
                tasks, settings, arguments.out, callback, task_files(arguments.tasks)
            )
        )
        ended, began = [], time.monotonic()
        if rollouts.todo:
            if (exposes := rollouts.try_out()) is not None:
                sys.stderr.write(f"trajkit: warning: {exposes}\n")
            stack.enter_context(options.terminable())
            url = arguments.gateway
            if url is None:
                # next to those of earlier calls
                logs = arguments.out / "turns"
                logs.mkdir(exist_ok=True)
                log = logs / f"{len(list(logs.iterdir())):03d}"
                gateway = options.engine_app(
                    arguments,
                    log,
                    {},
                    policy=solve(tasks),
                    seed=arguments.seed,
                    admin_token=token,
                    hosts=[urlsplit(arguments.gateway_url or "").hostname or ""],
                )
                app, _ = stack.enter_context(gateway)
                url = stack.enter_context(running(app, arguments.host))
            began = time.monotonic()
            ended = rollouts.run(url, token)
    lines = [asdict(rollout) for rollout in ended]
    rewards, turns = _rewards(lines), arguments.out / "turns"
    failures = Counter(line["error"] for line in lines if line["error"] is not None)
    facts = {
        # missing if another gateway has them
        "turns": str(turns) if turns.exists() else None,
        "sessions": str(arguments.out / "sessions.parquet"),
        "over_before": rollouts.before,
        "over": len(lines),
        "graded": len(rewards),
        "mean_reward": fmean(rewards) if rewards else None,
        "failures": dict(failures.most_common()),
        "callbacks_missed": None if callback is None else callback.missed,
        "seconds": time.monotonic() - began,
        "rollouts": lines,
    }
    text = json.dumps(facts) if arguments.json else _described(facts)
    sys.stdout.write(text + "\n")
    return BAD_DATA if failures else DONE


def _self_test(rollouts: "Iterable[Rollout]", *, as_json: bool) -> int:
    """Print how each task's solution, and no change at all, are graded."""
    lines, wrong = [], 0
    for rollout in rollouts:
        expected = float(rollout.sample == 0)
        fine = rollout.reward == expected
        wrong += not fine
        why = rollout.error or "; ".join(rollout.findings)
        change = "solution" if expected else "no change"
        lines.append((rollout.group_id, change, rollout.reward, expected, why))
    head = ("task", "change", "reward", "expected", "why")
    if as_json:
        records = [dict(zip(head, line, strict=True)) for line in lines]
        sys.stdout.write(json.dumps({"self_test": records, "wrong": wrong}) + "\n")
    else:
        table = [tuple("" if v is None else str(v) for v in line) for line in lines]
        sys.stdout.write(text_table(head, table) + "\n")
    return BAD_DATA if wrong else DONE


def _rewards(lines: list[dict[str, Any]]) -> list[float]:
    return [line["reward"] for line in lines if line["reward"] is not None]


def _described(facts: dict[str, Any]) -> str:
    """The facts for people."""
    rollouts, seconds = facts["rollouts"], facts["seconds"]
    groups = []
    for name in sorted({line["group_id"] for line in rollouts}):
        group = [line for line in rollouts if line["group_id"] == name]
        rewards = _rewards(group)
        mean = f"{fmean(rewards):.2f}" if rewards else ""
        turns = sum(line["turns"] or 0 for line in group)
        groups.append((name, len(group), len(rewards), mean, turns))
    findings = Counter(found for line in rollouts for found in line["findings"])
    tables = (
        (("task", "rollouts", "graded", "mean reward", "turns"), groups),
        (("failure", "rollouts"), [*facts["failures"].items()]),
        (("finding", "rollouts"), findings.most_common()),
    )
    missed = facts["callbacks_missed"]
    places = [(name, facts[name]) for name in ("turns", "sessions") if facts[name]]
    return "\n\n".join(
        [
            f"rollouts {len(rollouts):,} ({facts['over_before']:,} finished before), "
            f"graded {facts['graded']:,}, {seconds:.0f} s, "
            f"{60 * len(rollouts) / max(seconds, 1e-9):.1f} per minute",
            *(text_table(head, lines) for head, lines in tables if lines),
            *([f"failed callbacks: {missed}"] if missed else []),
            "\n".join(f"{name:<10}{shlex.quote(path)}" for name, path in places),
        ]
    )
