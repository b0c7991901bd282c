"""The reward of a piece of work, found in a fresh copy that the agent never saw.

What cannot be graded has no reward: a grader that does not run, or whose time is up,
raises, and the session gets the reason and a null reward.
"""

import json
import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trajkit_shim.rollout.swebench import resolved
from trajkit_shim.rollout.tasks import Grade
from trajkit_shim.rollout.workspace import StageError, Workspace
from trajkit_shim.sandbox import Done, SandboxError

# a shell says so of a command that it cannot run or find
_NOT_RUN = (126, 127)
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# pytest -rA: FAILED tests/test_a.py::test_b - reason; what passed has no reason, and its
# parameters may hold what begins one
_PYTEST = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) ([^\s(].*)$")
# unittest -v: test_b (test_a.Case.test_b) ... ok; a test's docstring comes between the
# two, on a line of its own
_UNITTEST = re.compile(r"^(\w+) \((\S+)\)(?: \.\.\. (.+))?$")
_UNITTEST_END = re.compile(r"^.* \.\.\. (ok|FAIL|ERROR|expected failure|skipped .*)$")

TESTS_PLACE = "/tests"
LOGS_PLACE = "/logs/verifier"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is graded.

    Parameters
    ----------
    workspace : Workspace
        The fresh copy, with the agent's changes made, and without the task's tests.
    patch : bytes
        These changes.
    finished : bool
        The agent ended by itself.
    """

    workspace: Workspace
    patch: bytes
    finished: bool


def grade(work: Work) -> float:
    """The reward of some work, by its task's grader.

    Raises
    ------
    StageError
        It cannot be graded.
    SandboxError
    """
    rules = work.workspace.task.grade
    reward = GRADERS[rules.kind](work, rules)
    if not math.isfinite(reward):
        raise StageError("grade", f"the reward {reward} is not finite")
    return reward


def _by_command(work: Work, rules: Grade) -> float:
    """1 where the command's exit code is 0."""
    work.workspace.add_tests()
    return float(_run(work, rules.command, rules).code == 0)


def _by_tests(work: Work, rules: Grade) -> float:
    """Whether, or how many of, the named tests pass. One that did not run did not."""
    work.workspace.add_tests()
    done = _run(work, rules.command, rules)
    results = test_results(done.stdout + b"\n" + done.stderr)
    if not results:
        raise StageError("grade", f"no test result in the output: {done.how}")
    wanted = rules.fail_to_pass + rules.pass_to_pass
    passed = sum(results.get(name, False) for name in wanted)
    return passed / len(wanted) if rules.partial else float(passed == len(wanted))


def _by_script(work: Work, rules: Grade) -> float:
    """The number on the last line of a program's output."""
    work.workspace.add_tests()
    done = _run(work, f"python {shlex.quote(rules.script)}", rules)
    if done.code != 0:
        raise StageError("grade", f"{rules.script}: {done.how}")
    said = Done(0, done.stdout).last_words
    try:
        return float(said)
    except ValueError as error:
        message = f"{rules.script}: its last line is {said!r}, not a number"
        raise StageError("grade", message) from error


def _by_reward_file(work: Work, rules: Grade) -> float:
    """What a verifier writes: reward.txt, a number, else reward.json.

    That is a number, an object with ``reward``, or one of numbers, whose mean counts.
    References: spec, polar 3 (harbor).
    """
    sandbox, task = work.workspace.sandbox, work.workspace.task
    if task.tests is not None:
        sandbox.put(task.tests.archive(), sandbox.place(TESTS_PLACE))
    logs = sandbox.place(LOGS_PLACE)
    made = sandbox.exec(["mkdir", "-p", logs], timeout_s=60)
    if made.code != 0:
        raise SandboxError(f"mkdir {logs}: {made.how}")
    done = _run(work, rules.command, rules)
    for name in ("reward.txt", "reward.json"):
        try:
            text = sandbox.get(f"{logs}/{name}")
        except SandboxError:
            continue
        try:
            return _number(json.loads(text.decode()))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            said = text.decode(errors="replace").strip()[:80]
            reason = f"{name} is {said!r}: {error}"
            raise StageError("grade", reason) from error
    raise StageError("grade", f"the verifier wrote no reward: {done.how}")


def _by_completed(work: Work, _: Grade) -> float:
    """1 where the agent ended by itself."""
    return float(work.finished)


def _by_swebench(work: Work, rules: Grade) -> float:
    """1 where SWE-bench's own harness calls the instance resolved."""
    return float(resolved(work, rules))


GRADERS: Mapping[str, Callable[[Work, Grade], float]] = {
    "command": _by_command,
    "tests": _by_tests,
    "script": _by_script,
    "reward_file": _by_reward_file,
    "completed": _by_completed,
    "swebench": _by_swebench,
}
"""The graders by their `trajkit_shim.rollout.tasks.Kind`."""


def test_results(output: bytes) -> dict[str, bool]:
    """Which tests passed, from what ``pytest -rA`` or ``unittest -v`` wrote.

    A test of several results passed where all of them say so. That a test was expected
    to fail, and did, is no pass.
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
            # before Python 3.11 the method is not in the brackets
            if not begun.endswith(f".{method}"):
                begun = f"{begun}.{method}"
        elif begun is not None and (match := _UNITTEST_END.match(line)):
            word = match[1]
        if begun is not None and word is not None:
            found[begun] = found.get(begun, True) and word in ("PASSED", "ok")
            begun = None
    return found


def _run(work: Work, command: str, rules: Grade) -> Done:
    """Run a grader's command in the fresh copy."""
    sandbox = work.workspace.sandbox
    tests, logs = sandbox.place(TESTS_PLACE), sandbox.place(LOGS_PLACE)
    command = command.replace("{tests}", tests).replace("{logs}", logs)
    done = sandbox.exec(
        ["sh", "-c", command], timeout_s=rules.timeout_s, cwd=work.workspace.path
    )
    if done.code is None:
        raise StageError("grade", f"{command}: timed out after {rules.timeout_s:g} s")
    if done.code in _NOT_RUN or done.code == -9:
        raise StageError("grade", f"{command}: {done.how}")
    return done


def _number(value: object) -> float:
    """The reward that a verifier's JSON stands for."""
    if isinstance(value, dict):
        if "reward" in value:
            return _number(value["reward"])
        if not value:
            raise ValueError("an empty object")
        return math.fsum(map(_number, value.values())) / len(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("not a number")
    return float(value)
