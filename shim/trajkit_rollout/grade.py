"""Grades an agent's work in a fresh copy that the agent never saw.

The graded copy has the changes of the agent that `trajkit_rollout.changes` lets
through. The tests are outside of it, and so is the program that runs them and proves
that they came to their end (`grader`). Work that cannot be graded raises `StageError`.
"""

import importlib
import json
import math
import secrets
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trajkit_rollout.agents.sandbox import CommandResult, Sandbox, pack
from trajkit_rollout.tasks import Grade
from trajkit_rollout.workspace import AgentError, StageError, Workspace

# exit codes of a shell that cannot run or find a command, or is killed
_NOT_RUN = (126, 127, -9)

TESTS_PLACE = "/tests"
LOGS_PLACE = "/logs/verifier"
_TESTBED = "/testbed"
_SCRIPT_PLACE = "/trajkit"
_GRADER = {
    name: files(__package__).joinpath("grader", name).read_bytes()
    for name in ("sitecustomize.py", "run_tests.py")
}
# of a grader's command: nothing is imported from folders that were not named
_SAFE = {
    "PYTHONSAFEPATH": "1",
    "PYTHONNOUSERSITE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PIP_CONFIG_FILE": "/dev/null",
    "UV_NO_CONFIG": "1",
}
_MAX_FILE = 64 << 20
_READ_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is graded."""

    # the fresh copy with the agent's changes, without the task's tests
    workspace: Workspace
    patch: bytes  # the agent's changes
    finished: bool  # the agent ended by itself


def grade(work: Work) -> float:
    """Return the reward by the task's grader; `StageError` if it cannot be graded."""
    rules = work.workspace.task.grade
    reward = GRADERS[rules.kind](work, rules)
    if not math.isfinite(reward):
        raise StageError("grade", f"the reward {reward} is not finite")
    return reward


def _by_command(work: Work, rules: Grade) -> float:
    """Whether a command succeeds, and every test that it runs comes to its end."""
    return float(_run(work, rules.command).passed)


def _by_tests(work: Work, rules: Grade) -> float:
    """All, or the share, of the named tests pass. A test that did not run failed."""
    run = _run(work, rules.command)
    results = run.results
    if not results:
        raise StageError(
            "grade", f"no result of pytest or unittest: {run.done.summary}"
        )
    wanted = rules.fail_to_pass + rules.pass_to_pass
    passed = sum(results.get(name, False) for name in wanted)
    return passed / len(wanted) if rules.partial else float(passed == len(wanted))


def _by_script(work: Work, rules: Grade) -> float:
    """The number in the last line of a program's output."""
    command = 'exec python -I "$GRADER/run_tests.py" "$TESTS/"' + shlex.quote(
        rules.script
    )
    run = _run(work, command, rules.script, cwd=work.workspace.path)
    if run.done.code != 0:
        raise StageError("grade", f"{rules.script}: {run.done.summary}")
    text_shown = CommandResult(0, run.done.stdout).last_line
    try:
        return float(text_shown)
    except ValueError as error:
        message = f"{rules.script}: its last line is {text_shown!r}, not a number"
        raise StageError("grade", message) from error


def _by_reward_file(work: Work, rules: Grade) -> float:
    """The reward in reward.txt, a number, or else reward.json.

    The latter is a number, an object with ``reward``, or one of numbers, whose mean
    counts, as in Polar's
    https://github.com/NVIDIA-NeMo/ProRL-Agent-Server/blob/bac80ae/src/polar/trajectory/evaluator/harbor.py
    """
    sandbox = work.workspace.sandbox
    logs = sandbox.map_path(LOGS_PLACE)
    sandbox.put(pack({}), logs)  # creates the directory
    done = _run(work, rules.command, cwd=work.workspace.path).done
    for name in ("reward.txt", "reward.json"):
        text = _read(sandbox, f"{logs}/{name}")
        if text is None:
            continue
        try:
            return _number(json.loads(text.decode()))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            text_shown = text.decode(errors="replace").strip()[:80]
            reason = f"{name} is {text_shown!r}: {error}"
            raise StageError("grade", reason) from error
    raise StageError("grade", f"the verifier wrote no reward: {done.summary}")


def _by_swebench(work: Work, rules: Grade) -> float:
    """1 if SWE-bench's own harness reports the instance as resolved.

    It runs the script and uses the log parser of swebench 5.0. The sandbox needs the
    instance's image.
    """
    if find_spec("swebench") is None:
        raise StageError("grade", "swebench is not installed: pip install swebench")
    # an optional package without types
    specs: Any = importlib.import_module("swebench.harness.utils")
    grading: Any = importlib.import_module("swebench.harness.grading")
    path, sandbox = work.workspace.path, work.workspace.sandbox
    if path != _TESTBED:
        rule = f"the workspace is {path}, and must be {_TESTBED} of an image"
        raise StageError("grade", rule)
    try:
        spec = specs.make_test_spec(dict(rules.instance))
    except (KeyError, ValueError) as error:
        raise StageError("grade", f"the instance is incomplete: {error!r}") from error
    folder = sandbox.map_path(_SCRIPT_PLACE)
    sandbox.put(pack({"eval.sh": spec.eval_script.encode()}), folder)
    with tempfile.TemporaryDirectory() as logs:
        log = Path(logs) / "test_output.txt"
        _exec(work, ["bash", f"{folder}/eval.sh"], "eval.sh", log)
        report = grading.get_eval_report(
            test_spec=spec,
            prediction={
                "instance_id": spec.instance_id,
                "model_name_or_path": "trajkit",
                "model_patch": work.patch.decode(errors="replace"),
            },
            test_log_path=str(log),
            include_tests_status=False,
        )[spec.instance_id]
    if report.get("infra_failure"):
        raise StageError("grade", f"swebench: {report.get('infra_failure_reason')}")
    return float(report["resolved"])


GRADERS: Mapping[str, Callable[[Work, Grade], float]] = {
    "command": _by_command,
    "tests": _by_tests,
    "script": _by_script,
    "reward_file": _by_reward_file,
    "completed": lambda work, _: float(work.finished),
    "swebench": _by_swebench,
}
"""The graders by kind (`trajkit_rollout.tasks.KINDS`)."""


@dataclass(frozen=True, slots=True)
class _Run:
    """How a grader's command ended, and what test runners proved."""

    done: CommandResult
    proofs: Sequence[Mapping[str, Any]]

    @property
    def passed(self) -> bool:
        return self.done.code == 0 and all(proof["code"] == 0 for proof in self.proofs)

    @property
    def results(self) -> dict[str, bool]:
        """Which tests passed. One with several results passed if all of them did."""
        found: dict[str, bool] = {}
        for proof in self.proofs:
            for name, passed in (proof["results"] or {}).items():
                found[name] = found.get(name, True) and passed
        return found


def _run(
    work: Work, command: str, name: str | None = None, cwd: str | None = None
) -> _Run:
    """Run a grader's shell command. ``cwd``: by default where the tests are.

    ``name``: of the command in errors.

    Raises `StageError`: the command could not be run, or a test runner did not come to
    its end.
    """
    workspace, task = work.workspace, work.workspace.task
    sandbox, rules = workspace.sandbox, task.grade
    places = {
        "tests": sandbox.map_path(TESTS_PLACE),
        "workspace": workspace.path,
        "logs": sandbox.map_path(LOGS_PLACE),
        "grader": sandbox.map_path(_SCRIPT_PLACE),
    }
    tests = workspace.path if rules.in_workspace else places["tests"]
    if task.tests is not None:
        sandbox.put(task.tests.archive(), tests)
        cwd = cwd or tests
    nonce = secrets.token_hex(16)
    texts = {"nonce": nonce, "places": f"{tests}\n{workspace.path}"}
    own = {name: text.encode() for name, text in texts.items()}
    sandbox.put(pack({**_GRADER, **own}), places["grader"])
    env = {
        **_SAFE,
        **{key.upper(): place for key, place in places.items()},
        "PYTHONPATH": places["grader"],
        "PYTEST_ADDOPTS": " ".join(f"-p {plugin}" for plugin in rules.plugins),
    }
    if rules.kind == "reward_file":
        # a verifier chooses its plugins; none of the workspace is found in time
        del env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"]
    for key, place in places.items():
        command = command.replace(f"{{{key}}}", place)
    name = name or command
    done = _exec(work, ["sh", "-c", command], name, cwd=cwd, env=env)
    if done.code in _NOT_RUN:
        raise StageError("grade", name, done.summary)
    left = _read(sandbox, f"{places['grader']}/nonce")
    if left != nonce.encode():
        reason = "a test process ended before its tests did"
        raise StageError("grade", name, reason, done.summary)
    proofs = _proofs(_read(sandbox, f"{places['grader']}/results") or b"", nonce)
    for proof in proofs:
        if proof["changed"]:
            names = ", ".join(map(str, proof["changed"][:3]))
            raise StageError("grade", name, f"changed while tests ran: {names}")
    return _Run(done, proofs)


def _proofs(text: bytes, nonce: str) -> list[Mapping[str, Any]]:
    """What test runners wrote, one line each, if it has the nonce."""
    try:
        proofs = [json.loads(line) for line in text.splitlines()]
        if all(proof["nonce"] == nonce for proof in proofs):
            return proofs
    except (ValueError, TypeError, LookupError, RecursionError):
        pass
    raise StageError("grade", "the file of test results was changed")


def _read(sandbox: Sandbox, path: str) -> bytes | None:
    """A regular file of the graded copy, or None. What is graded may have made it."""
    where = shlex.quote(path)
    script = f"test -f {where} && ! test -L {where} && head -c {_MAX_FILE} {where}"
    done = sandbox.exec(["sh", "-c", script], timeout_s=_READ_SECONDS)
    return done.stdout if done.code == 0 else None


def _exec(
    work: Work,
    command: list[str],
    name: str,
    log: Path | None = None,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
) -> CommandResult:
    workspace, timeout_s = work.workspace, work.workspace.task.grade.timeout_s
    place = cwd or workspace.path
    done = workspace.sandbox.exec(
        command, timeout_s=timeout_s, cwd=place, log=log, env=env
    )
    if done.code is None:
        raise AgentError("grade", name, f"timed out after {timeout_s:g} s")
    return done


def _number(value: object) -> float:
    """The reward in a verifier's JSON."""
    if isinstance(value, dict):
        if "reward" in value:
            return _number(value["reward"])
        if not value:
            raise ValueError("an empty object")
        return math.fsum(map(_number, value.values())) / len(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("not a number")
    return float(value)
