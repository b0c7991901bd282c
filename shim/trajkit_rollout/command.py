"""``trajkit rollout``."""

import json
import os
import secrets
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
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
from trajkit_rollout.settings import Settings
from trajkit_rollout.tasks import read_tasks, task_files
from trajkit_shim import cli as options

if TYPE_CHECKING:
    from trajkit_rollout.rollout import Rollout

_SETTINGS, _ENGINE = Settings(), options.EngineOptions()


def rollout(
    tasks: Path,
    /,
    *server_arguments: options.ServerArguments,
    out: Annotated[Path | None, Parameter(name=("--out", "-o"))] = None,
    settings: Settings = _SETTINGS,
    gateway: tuple[str, ...] = (),
    admin_token: str | None = None,
    ray: str | None = None,
    resource: tuple[str, ...] = (),
    self_test: bool = False,
    callback: str | None = None,
    host: str = "127.0.0.1",
    seed: int | None = None,
    odds: float = 0.75,
    engine: options.EngineOptions = _ENGINE,
    json: bool = False,
) -> int:
    """Have an agent work on tasks, record it, and grade what it did.

    Run a coding agent on each task in a sandbox of its own, and grade its changes in a
    fresh copy. RUN gets the turns and a sessions table. Run the same command again to
    continue a stopped run. The exit code is 1 if a rollout failed.

    Parameters
    ----------
    tasks
        A JSONL file, a directory with a task.toml, or a directory of those.
    out
        RUN: directory of the run; created if missing, continued otherwise.
    gateway
        URL of a running gateway (trajkit serve) instead of one next to the rollouts, which
        has the options of an engine; needs its token; may be repeated.
    admin_token
        Of the gateway (default: a random one); prefer the variable TRAJKIT_ADMIN_TOKEN.
    ray
        Ray cluster whose workers run the rollouts (auto, or HOST:PORT), with --gateway;
        {node} in a gateway's URL is the address of the worker's machine.
    resource
        NAME=AMOUNT, a further resource of Ray that each rollout takes; may be repeated.
    self_test
        Run no agent: grade each task's solution and no change, expecting 1.0 and 0.0.
    callback
        URL that receives each finished rollout as a JSON object.
    host
        Of the gateway.
    seed
        Of the embedded engine.
    odds
        How often the embedded engine's script solves a task that has a solution.
    json
        Print only one JSON object.
    """
    given = SimpleNamespace(**{**locals(), **vars(settings), **vars(engine)})
    with options.needs_extra("shim"):
        from trajkit_rollout.rollout import Callback, Rollouts
    token = admin_token or os.environ.get(options.ADMIN_TOKEN)
    complete = self_test or (settings.harness and out)
    faults = {
        "--harness and --out are required, but for --self-test": not complete,
        "--gateway has its engine: leave out --launch": gateway and engine.launch,
        f"--gateway {gateway} needs its token: --admin-token": gateway and not token,
        "--ray needs --gateway, which its workers reach": ray and not gateway,
    }
    for fault in filter(faults.get, faults):
        raise ArgumentError(fault)
    try:
        pairs = [text.partition("=") for text in resource]
        resources = {name: float(amount) for name, _, amount in pairs}
    except ValueError as error:
        raise ArgumentError(f"--resource: {error}") from None
    if not gateway:
        options.check(given)
    given.tasks, given.admin_token = read_tasks(tasks), token or secrets.token_hex()
    post = None if callback is None else Callback(callback)
    ended, began = [], time.monotonic()
    with options.terminable(), ExitStack() as stack:
        if self_test:
            settings = replace(settings, harness="shell", repeat=2)
            out = Path(stack.enter_context(TemporaryDirectory()))
        assert out is not None
        run = Rollouts(given.tasks, settings, out, post, task_files(tasks))
        stack.enter_context(run)
        if self_test:
            return _self_test(run.run(None), as_json=json)
        if run.todo:
            if ray is None and (notes := run.try_out()) is not None:
                sys.stderr.write(f"trajkit: warning: {notes}\n")
            urls = gateway or [stack.enter_context(_gateway(given))]
            began = time.monotonic()
            ended = run.run(urls, given.admin_token, ray, resources)
    errors = Counter(r.error for r in ended if r.error is not None)
    rewards = [r.reward for r in ended if r.reward is not None]
    facts = {
        # missing if another gateway has them
        "turns": str(out / "turns") if (out / "turns").exists() else None,
        "sessions": str(out / "sessions.parquet"),
        "over_before": run.before,
        "over": len(ended),
        "graded": len(rewards),
        "mean_reward": fmean(rewards) if rewards else None,
        "failures": dict(errors.most_common()),
        "callbacks_missed": None if post is None else len(run.unsent),
        "seconds": time.monotonic() - began,
        "rollouts": [asdict(rollout) for rollout in ended],
    }
    _print(facts, _described(facts), as_json=json)
    return BAD_DATA if errors else DONE


@contextmanager
def _gateway(arguments: SimpleNamespace) -> Iterator[str]:
    """Run a gateway in a process of its own, which the rollouts cannot slow down."""
    from trajkit_shim.workers import children

    # next to those of earlier calls
    logs = arguments.out / "turns"
    logs.mkdir(exist_ok=True)
    job = logs / f"{len(list(logs.iterdir())):03d}", arguments
    with children("the gateway", _serve, [job]) as (gateway,):
        yield gateway.received()


def _serve(log: Path, say: Callable[[str], None], arguments: SimpleNamespace) -> None:
    from trajkit_rollout.demo import solve
    from trajkit_shim.serve import listen, running

    given = {
        "policy": solve(arguments.tasks, arguments.odds),
        "seed": arguments.seed,
        "admin_token": arguments.admin_token,
        "hosts": [urlsplit(arguments.gateway_url or "").hostname or ""],
    }
    with options.terminable(), ExitStack() as stack:
        app = stack.enter_context(options.engine_app(arguments, log, {}, **given))
        say(stack.enter_context(running(app, listen(arguments.host, 0))))
        # its parent ends it
        signal.pause()


def _self_test(ended: list["Rollout"], *, as_json: bool) -> int:
    records = []
    for rollout in sorted(ended, key=lambda each: (each.group_id, each.sample)):
        change, expected = [("solution", 1.0), ("no change", 0.0)][rollout.sample]
        record = {"task": rollout.group_id, "change": change, "reward": rollout.reward}
        why = rollout.error or "; ".join(rollout.findings)
        records.append({**record, "expected": expected, "why": why})
    wrong = sum(record["reward"] != record["expected"] for record in records)
    shown = [["" if v is None else str(v) for v in r.values()] for r in records]
    text = text_table(list(records[0]), shown)
    _print({"self_test": records, "wrong": wrong}, text, as_json=as_json)
    return BAD_DATA if wrong else DONE


def _print(facts: dict[str, Any], text: str, *, as_json: bool) -> None:
    sys.stdout.write(f"{json.dumps(facts) if as_json else text}\n")


def _described(facts: dict[str, Any]) -> str:
    groups: dict[str, list[dict[str, Any]]] = {}
    whys = Counter(facts["failures"])
    for rollout in facts["rollouts"]:
        groups.setdefault(rollout["group_id"], []).append(rollout)
        whys.update(rollout["findings"])
    lines = []
    for task, ended in sorted(groups.items()):
        rewards = [r["reward"] for r in ended if r["reward"] is not None]
        mean = f"{fmean(rewards):.2f}" if rewards else ""
        turns = sum(r["turns"] or 0 for r in ended)
        lines.append((task, len(ended), len(rewards), mean, turns))
    head = ("task", "rollouts", "graded", "mean reward", "turns")
    counts = (
        f"rollouts {facts['over']:,} ({facts['over_before']:,} finished before), graded "
        f"{facts['graded']:,}, failed callbacks {facts['callbacks_missed'] or 0:,}, "
        f"{facts['seconds']:.0f} s"
    )
    tables = [
        text_table(head, lines) if lines else "",
        text_table(("failure or finding", "rollouts"), [*whys.items()]) if whys else "",
    ]
    end = f"sessions  {shlex.quote(facts['sessions'])}"
    return "\n\n".join(filter(None, [counts, *tables, end]))
