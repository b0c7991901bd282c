"""``trajkit rollout``."""

import argparse
import json
import multiprocessing
import os
import secrets
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from trajkit.cli import BAD_DATA, BAD_FILE, DONE
from trajkit.cli.options import Commands, add_options
from trajkit.cli.text import text_table
from trajkit_shim import engine_options as options
from trajkit_shim.engine_options import ADMIN_TOKEN

if TYPE_CHECKING:
    from trajkit_rollout.run_log import Rollout
    from trajkit_rollout.tasks import Task

_DESCRIPTION = (
    "Run a coding agent on each task in a sandbox of its own, record its model calls, and "
    "grade its changes in a fresh copy. RUN gets the turns and a sessions table with "
    "reward, group and error. Run the same command again to continue a stopped run. The "
    "exit code is 1 if a rollout failed."
)


def add_rollout(commands: Commands) -> None:
    """Add ``rollout`` to the command line."""
    help = "have an agent work on tasks, record it, and grade what it did"
    _add(commands.add_parser("rollout", help=help, description=_DESCRIPTION))


def _add(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        f"""
tasks TASKS  a JSONL file, a directory with a task.toml, or a directory of those
--harness --agent NAME  the agent, by name or import path (package.module:record); see
    docs/serving.md
-o --out RUN  directory of the run; created if missing, continued otherwise
--sandbox KIND local  local, docker, apptainer, e2b, or an import path (default:
    %(default)s)
--sandbox-option NAME=VALUE...  option of that kind of sandbox; may be repeated
--image IMAGE  for sandboxes that need one, unless the task names one
--path FOLDER...  directory to put first on the sandbox's PATH; may be repeated
--gateway URL...  gateway that records the calls (trajkit serve) instead of one in a process
    next to the rollouts, which has the options of an engine; needs its token; may be
    repeated
--ray ADDRESS  Ray cluster whose workers run the rollouts (auto, or HOST:PORT), with
    --gateway; {{node}} in a gateway's URL is the address of the worker's machine
--resource NAME=AMOUNT...  further resource of Ray that each rollout takes; may be repeated
--gateway-url URL  URL of the gateway as seen from the sandboxes, if it differs
--admin-token TOKEN  admin token of the gateway (default: a random one); prefer the
    environment variable {ADMIN_TOKEN}
--untrusted  refuse a sandbox that exposes files, processes or the network of this machine;
    see docs/sandboxes.md
--install  install the agent in each sandbox if it is missing
--repeat --samples N 1  rollouts of each task, which share its group (default: %(default)s)
--parallel --concurrency N 4  concurrent rollouts (default: %(default)s)
--timeout SECONDS  time limit of each agent, overriding its task
--self-test  run no agent: grade each task's solution and no change at all, which should
    give 1.0 and 0.0
--retry-failed  when continuing a run, also repeat rollouts that failed
--callback URL  URL that receives each finished rollout as a JSON object
--host ADDRESS 127.0.0.1  of the gateway (default: %(default)s)
--seed SEED  of the embedded engine
--odds ODDS 0.75  how often the embedded engine's script solves a task that has a solution
    (default: %(default)s)
--json  print only one JSON object
--argument TEXT...  extra argument for the agent's command, or the command of the shell
    harness; may be repeated; write --argument=--text if it starts with a hyphen
""",
        tasks={"type": Path},
        out={"type": Path},
        odds={"type": float},
    )
    options.add_engine(parser)
    parser.set_defaults(admin_token=os.environ.get(ADMIN_TOKEN))
    parser.set_defaults(run=lambda arguments: _rollout(parser, arguments))


def _rollout(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    if arguments.self_test:
        arguments.harness = arguments.harness or "shell"
    elif arguments.harness is None or arguments.out is None:
        parser.error("--harness and --out are required, but for --self-test")
    with options.needs_extra(parser, "shim"):
        from trajkit_rollout.one import Settings
        from trajkit_rollout.run import Callback, Rollouts
        from trajkit_rollout.tasks import read_tasks, task_files
    try:
        settings = Settings.chosen(arguments)
        callback = None if arguments.callback is None else Callback(arguments.callback)
        resources = {
            name: float(amount)
            for name, _, amount in (r.partition("=") for r in arguments.resource)
        }
    except ValueError as error:
        parser.error(str(error))
    urls = arguments.gateway
    for wrong, message in (
        (urls and arguments.launch, "--gateway has its engine: leave out --launch"),
        (
            urls and not arguments.admin_token,
            f"--gateway {' '.join(urls)} needs its token: --admin-token",
        ),
        (arguments.ray and not urls, "--ray needs --gateway, which its workers reach"),
    ):
        if wrong:
            parser.error(message)
    token = arguments.admin_token or secrets.token_hex(16)
    tasks, hidden = read_tasks(arguments.tasks), task_files(arguments.tasks)
    if arguments.self_test:
        with TemporaryDirectory() as folder:
            with Rollouts(tasks, settings, Path(folder), hidden=hidden) as rollouts:
                return _self_test(rollouts.self_test(), as_json=arguments.json)
    if not urls:
        options.check(parser, arguments)
    with ExitStack() as stack:
        rollouts = stack.enter_context(
            Rollouts(tasks, settings, arguments.out, callback, hidden)
        )
        ended, began = [], time.monotonic()
        if rollouts.todo:
            if arguments.ray is None and (notes := rollouts.try_out()) is not None:
                sys.stderr.write(f"trajkit: warning: {notes}\n")
            stack.enter_context(options.terminable())
            urls = urls or [stack.enter_context(_gateway(arguments, tasks, token))]
            began = time.monotonic()
            ended = rollouts.run(urls, token, arguments.ray, resources)
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


@contextmanager
def _gateway(
    arguments: argparse.Namespace, tasks: "Sequence[Task]", token: str
) -> Iterator[str]:
    """Run a gateway in a process of its own, and yield its URL.

    So neither its memory nor its answers suffer from what the rollouts do.
    """
    # next to those of earlier calls
    logs = arguments.out / "turns"
    logs.mkdir(exist_ok=True)
    log = logs / f"{len(list(logs.iterdir())):03d}"
    given = argparse.Namespace(**{**vars(arguments), "run": None})
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=_serve, args=(far, given, tasks, log, token))
    process.start()
    far.close()
    try:
        try:
            answer = near.recv()
        except EOFError:
            raise SystemExit(BAD_FILE) from None
        if isinstance(answer, BaseException):
            raise answer
        yield answer
    finally:
        # it ends with this end of the pipe
        near.close()
        process.join()


def _serve(
    parent: Connection,
    arguments: argparse.Namespace,
    tasks: "Sequence[Task]",
    log: Path,
    token: str,
) -> None:
    """Run a gateway until the other end of a pipe closes."""
    from trajkit_rollout.solver import solve
    from trajkit_shim.serve import running

    # its parent ends it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ExitStack() as stack:
            app, _ = stack.enter_context(
                options.engine_app(
                    argparse.ArgumentParser(prog="trajkit rollout"),
                    arguments,
                    log,
                    {},
                    policy=solve(tasks, arguments.odds),
                    seed=arguments.seed,
                    admin_token=token,
                    hosts=[urlsplit(arguments.gateway_url or "").hostname or ""],
                )
            )
            parent.send(stack.enter_context(running(app, arguments.host)))
            with suppress(EOFError):
                parent.recv()
    except Exception as error:
        parent.send(error)


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
