"""Grades an agent's work in a fresh copy that the agent never saw.

Work that cannot be graded has no reward. If a grader does not run or times out, it
raises, and the session gets the reason and a null reward.
"""

import importlib
import json
import math
import re
import shlex
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trajkit_shim.agents.sandbox import CommandResult, SandboxError, pack
from trajkit_shim.rollout.tasks import Grade
from trajkit_shim.rollout.workspace import StageError, Workspace

# exit codes of a shell that cannot run or find a command, or is killed
_NOT_RUN = (126, 127, -9)
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# pytest -rA: FAILED tests/test_a.py::test_b - reason; a passed test has no reason, but
# its parameters may contain a dash
_PYTEST = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) ([^\s(].*)$")
# unittest -v: test_b (test_a.Case.test_b) ... ok; a test's docstring is printed between
# the two, on its own line
_UNITTEST = re.compile(r"^(\w+) \((\S+)\)(?: \.\.\. (.+))?$")
_UNITTEST_END = re.compile(r"^.* \.\.\. (ok|FAIL|ERROR|expected failure|skipped .*)$")

TESTS_PLACE = "/tests"
LOGS_PLACE = "/logs/verifier"
_TESTBED = "/testbed"
_SCRIPT_PLACE = "/trajkit"


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


def _by_tests(work: Work, rules: Grade) -> float:
    """All, or the share, of the named tests pass. A test that did not run failed."""
    done = _run(work, rules.command)
    results = test_results(done.stdout + b"\n" + done.stderr)
    if not results:
        raise StageError("grade", f"no test result in the output: {done.summary}")
    wanted = rules.fail_to_pass + rules.pass_to_pass
    passed = sum(results.get(name, False) for name in wanted)
    return passed / len(wanted) if rules.partial else float(passed == len(wanted))


def _by_script(work: Work, rules: Grade) -> float:
    """The number in the last line of a program's output."""
    done = _run(work, f"python {shlex.quote(rules.script)}")
    if done.code != 0:
        raise StageError("grade", f"{rules.script}: {done.summary}")
    text_shown = CommandResult(0, done.stdout).last_line
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
    done = _run(work, rules.command, sandbox.map_path(TESTS_PLACE))
    for name in ("reward.txt", "reward.json"):
        try:
            text = sandbox.get(f"{logs}/{name}")
        except SandboxError:
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
        _exec(work, ["bash", f"{folder}/eval.sh"], log)
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
    # whether its exit code is 0
    "command": lambda work, rules: float(_run(work, rules.command).code == 0),
    "tests": _by_tests,
    "script": _by_script,
    "reward_file": _by_reward_file,
    "completed": lambda work, _: float(work.finished),
    "swebench": _by_swebench,
}
"""The graders by kind (`trajkit_shim.rollout.tasks.KINDS`)."""


def test_results(output: bytes) -> dict[str, bool]:
    """Return which tests passed, from the output of ``pytest -rA`` or ``unittest -v``.

    A test with several results passed if all of them did. An expected failure is not a
    pass.
    """
    found: dict[str, bool] = {}
    begun: str | None = None
    for raw in output.decode(errors="replace").splitlines():
        line = _ANSI.sub("", raw).strip()
        word: str | None = None
        if match := _PYTEST.match(line):
            word, begun = match.groups()
            if word != "PASSED":
                begun, _, _ = begun.partition(" - ")
        elif match := _UNITTEST.match(line):
            method, begun, word = match.groups()
            # before Python 3.11 the parentheses do not contain the method
            if not begun.endswith(f".{method}"):
                begun = f"{begun}.{method}"
        elif begun is not None and (match := _UNITTEST_END.match(line)):
            word = match[1]
        if begun is not None and word is not None:
            found[begun] = found.get(begun, True) and word in ("PASSED", "ok")
            begun = None
    return found


def _run(work: Work, command: str, tests_path: str | None = None) -> CommandResult:
    """Run a grader's shell command in the fresh copy, by default with the tests in it."""
    workspace, tests = work.workspace, work.workspace.task.tests
    if tests is not None:
        workspace.sandbox.put(tests.archive(), tests_path or workspace.path)
    for name, place in (("{tests}", TESTS_PLACE), ("{logs}", LOGS_PLACE)):
        command = command.replace(name, workspace.sandbox.map_path(place))
    done = _exec(work, ["sh", "-c", command])
    if done.code in _NOT_RUN:
        raise StageError("grade", f"{command}: {done.summary}")
    return done


def _exec(work: Work, command: list[str], log: Path | None = None) -> CommandResult:
    workspace, timeout_s = work.workspace, work.workspace.task.grade.timeout_s
    place = workspace.path
    done = workspace.sandbox.exec(command, timeout_s=timeout_s, cwd=place, log=log)
    if done.code is None:
        raise StageError("grade", f"{command[-1]}: timed out after {timeout_s:g} s")
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
