"""``trajkit rollout``."""

import json
import multiprocessing
import os
import secrets
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from cyclopts import Parameter
from cyclopts.validators import Number

from trajkit.cli import BAD_DATA, BAD_FILE, DONE
from trajkit.cli.screen import text_table
from trajkit.errors import ArgumentError
from trajkit_shim import cli as options
from trajkit_shim.cli import ADMIN_TOKEN

if TYPE_CHECKING:
    from trajkit_rollout.rollout import Rollouts


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
    gateway: list[str] | None = None,
    ray: str | None = None,
    resource: list[str] | None = None,
    gateway_url: str | None = None,
    admin_token: str | None = None,
    untrusted: bool = False,
    install: bool = False,
    repeat: options.Count = 1,
    parallel: options.Count = 4,
    timeout: Annotated[float | None, Parameter(validator=Number(gt=0))] = None,
    self_test: bool = False,
    retry_failed: bool = False,
    callback: str | None = None,
    argument: Annotated[list[str] | None, Parameter(allow_leading_hyphen=True)] = None,
    host: str = "127.0.0.1",
    seed: int | None = None,
    odds: float = 0.75,
    engine: options.EngineOptions | None = None,
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
        URL of a running gateway (trajkit serve) instead of one next to the rollouts, which
        has the options of an engine; needs its token; may be repeated.
    ray
        Ray cluster whose workers run the rollouts (auto, or HOST:PORT), with --gateway;
        {node} in a gateway's URL is the address of the worker's machine.
    resource
        NAME=AMOUNT, a further resource of Ray that each rollout takes; may be repeated.
    gateway_url
        URL of the gateway as seen from the sandboxes, if it differs.
    admin_token
        Of the gateway (default: a random one); prefer the variable TRAJKIT_ADMIN_TOKEN.
    untrusted
        Refuse a sandbox that exposes something of this machine; see docs/sandboxes.md.
    install
        Install the agent in each sandbox if it is missing.
    repeat
        Rollouts of each task, which share its group.
    parallel
        Concurrent rollouts.
    timeout
        Time limit of each agent in seconds, overriding its task.
    self_test
        Run no agent: grade each task's solution and no change, expecting 1.0 and 0.0.
    retry_failed
        When continuing a run, also repeat rollouts that failed.
    callback
        URL that receives each finished rollout as a JSON object.
    argument
        Extra argument of the agent, or the shell harness's command; may be repeated.
    host
        Of the gateway.
    seed
        Of the embedded engine.
    odds
        How often the embedded engine's script solves a task that has a solution.
    json
        Print only one JSON object.
    """
    given = {**locals(), **vars(engine or options.EngineOptions())}
    given["admin_token"] = admin_token or os.environ.get(ADMIN_TOKEN)
    for name in ("sandbox_option", "path", "argument", "gateway", "resource"):
        given[name] = given[name] or []
    if not self_test and (harness is None or out is None):
        raise ArgumentError("--harness and --out are required, but for --self-test")
    given["harness"] = harness or "shell"
    return _rollout(SimpleNamespace(**given))


def _rollout(arguments: SimpleNamespace) -> int:
    with options.needs_extra("shim"):
        from trajkit_rollout.rollout import Callback, Rollouts, Settings
        from trajkit_rollout.tasks import read_tasks, task_files
    try:
        settings = Settings.chosen(vars(arguments))
        callback = None if arguments.callback is None else Callback(arguments.callback)
        pairs = [text.partition("=") for text in arguments.resource]
        resources = {name: float(amount) for name, _, amount in pairs}
    except ValueError as error:
        raise ArgumentError(str(error)) from None
    urls, token = arguments.gateway, arguments.admin_token
    if urls and arguments.launch:
        raise ArgumentError("--gateway has its engine: leave out --launch")
    if urls and not token:
        raise ArgumentError(f"--gateway {urls[0]} needs its token: --admin-token")
    if arguments.ray and not urls:
        raise ArgumentError("--ray needs --gateway, which its workers reach")
    tasks, hidden = read_tasks(arguments.tasks), task_files(arguments.tasks)
    if arguments.self_test:
        with TemporaryDirectory() as folder:
            with Rollouts(tasks, settings, Path(folder), hidden=hidden) as rollouts:
                return _self_test(rollouts, as_json=arguments.json)
    if not urls:
        options.check(arguments)
    arguments.policy_tasks, arguments.admin_token = tasks, token or secrets.token_hex()
    out, ended, began = arguments.out, [], time.monotonic()
    with ExitStack() as stack:
        rollouts = Rollouts(tasks, settings, out, callback, hidden)
        stack.enter_context(rollouts)
        if rollouts.todo:
            if arguments.ray is None and (notes := rollouts.try_out()) is not None:
                sys.stderr.write(f"trajkit: warning: {notes}\n")
            stack.enter_context(options.terminable())
            urls = urls or [stack.enter_context(_gateway(arguments))]
            began, given = time.monotonic(), (arguments.ray, resources)
            ended = rollouts.run(urls, arguments.admin_token, *given)
    lines = [asdict(rollout) for rollout in ended]
    errors = [line["error"] for line in lines if line["error"] is not None]
    rewards = _rewards(lines)
    facts = {
        # missing if another gateway has them
        "turns": str(out / "turns") if (out / "turns").exists() else None,
        "sessions": str(out / "sessions.parquet"),
        "over_before": rollouts.before,
        "over": len(lines),
        "graded": len(rewards),
        "mean_reward": fmean(rewards) if rewards else None,
        "failures": dict(Counter(errors).most_common()),
        "callbacks_missed": None if callback is None else callback.missed,
        "seconds": time.monotonic() - began,
        "rollouts": lines,
    }
    text = json.dumps(facts) if arguments.json else _described(facts)
    sys.stdout.write(text + "\n")
    return BAD_DATA if errors else DONE


@contextmanager
def _gateway(arguments: SimpleNamespace) -> Iterator[str]:
    """Run a gateway in a process of its own, and yield its URL.

    So neither its memory nor its answers suffer from what the rollouts do.
    """
    # next to those of earlier calls
    logs = arguments.out / "turns"
    logs.mkdir(exist_ok=True)
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    given = (far, arguments, logs / f"{len(list(logs.iterdir())):03d}")
    process = context.Process(target=_serve, args=given)
    process.start()
    far.close()
    try:
        answer = near.recv()
        if isinstance(answer, BaseException):
            raise answer
        yield answer
    except EOFError:
        raise SystemExit(BAD_FILE) from None
    finally:
        # it ends with this end of the pipe
        near.close()
        process.join()


def _serve(parent: Any, arguments: SimpleNamespace, log: Path) -> None:
    from trajkit_rollout.demo import solve
    from trajkit_shim.serve import running

    # its parent ends it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    given = {
        "policy": solve(arguments.policy_tasks, arguments.odds),
        "seed": arguments.seed,
        "admin_token": arguments.admin_token,
        "hosts": [urlsplit(arguments.gateway_url or "").hostname or ""],
    }
    try:
        with ExitStack() as stack:
            made = options.engine_app(arguments, log, {}, **given)
            app, _ = stack.enter_context(made)
            parent.send(stack.enter_context(running(app, arguments.host)))
            with suppress(EOFError):
                parent.recv()
    except Exception as error:
        parent.send(error)


def _self_test(rollouts: "Rollouts", *, as_json: bool) -> int:
    head = ("task", "change", "reward", "expected", "why")
    lines = []
    for rollout in rollouts.self_test():
        change, expected = [("solution", 1.0), ("no change", 0.0)][rollout.sample]
        why = rollout.error or "; ".join(rollout.findings)
        lines.append((rollout.group_id, change, rollout.reward, expected, why))
    wrong = sum(reward != expected for _, _, reward, expected, _ in lines)
    records = [dict(zip(head, line, strict=True)) for line in lines]
    text = json.dumps({"self_test": records, "wrong": wrong})
    if not as_json:
        text = text_table(
            head, [["" if v is None else str(v) for v in x] for x in lines]
        )
    sys.stdout.write(text + "\n")
    return BAD_DATA if wrong else DONE


def _rewards(lines: list[dict[str, Any]]) -> list[float]:
    return [line["reward"] for line in lines if line["reward"] is not None]


def _described(facts: dict[str, Any]) -> str:
    rollouts, seconds, groups = facts["rollouts"], facts["seconds"], []
    for name in sorted({line["group_id"] for line in rollouts}):
        group = [line for line in rollouts if line["group_id"] == name]
        rewards = _rewards(group)
        mean = f"{fmean(rewards):.2f}" if rewards else ""
        turns = sum(line["turns"] or 0 for line in group)
        groups.append((name, len(group), len(rewards), mean, turns))
    findings = Counter(found for line in rollouts for found in line["findings"])
    whys = [*facts["failures"].items(), *findings.most_common()]
    head = ("task", "rollouts", "graded", "mean reward", "turns")
    before, missed = facts["over_before"], facts["callbacks_missed"] or 0
    return "\n\n".join(
        [
            f"rollouts {len(rollouts):,} ({before:,} finished before), graded "
            f"{facts['graded']:,}, failed callbacks {missed:,}, {seconds:.0f} s",
            *([text_table(head, groups)] if groups else []),
            *([text_table(("failure or finding", "rollouts"), whys)] if whys else []),
            f"sessions  {shlex.quote(facts['sessions'])}",
        ]
    )
