"""Grades an agent's work in a fresh copy that the agent never saw.

The graded copy has the changes of the agent that `trajkit_rollout.workspace` lets
through. The tests are outside of it, and so is the program that runs them and proves
that they came to their end (`grader`). Work that cannot be graded raises `StageError`.
"""

import importlib
import json
import math
import secrets
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from trajkit_rollout.sandbox import CommandResult, pack
from trajkit_rollout.workspace import AgentError, StageError, Workspace

# exit codes of a shell that cannot run or find a command, or is killed
_NOT_RUN = (126, 127, -9)
_TESTBED = "/testbed"
_SCRIPT = 'exec python -I "$GRADER/run_tests.py" "$TESTS/"'
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


def grade(workspace: Workspace, patch: bytes, *, finished: bool) -> float:
    """Return the reward by the task's grader; `StageError` if it cannot be graded.

    ``workspace``: the fresh copy with the agent's changes, without the task's tests.
    ``finished``: the agent ended by itself.
    """
    rules, logs = (
        workspace.task.grade,
        f"{workspace.sandbox.map_path('/logs')}/verifier",
    )
    if rules.kind == "completed":
        return float(finished)
    if rules.kind == "swebench":
        return _by_swebench(workspace, patch)
    workspace.sandbox.put(pack({}), logs)  # creates the directory
    done, proofs = _run(workspace, logs)
    if rules.kind == "command":
        # it succeeded, and so did each test runner
        return float(done.code == 0 and all(proof["code"] == 0 for proof in proofs))
    if rules.kind == "tests":
        return _by_names(workspace, done, proofs)
    if rules.kind == "script":
        if done.code != 0:
            raise StageError("grade", rules.script, done.summary)
        last = CommandResult(0, done.stdout).last_line
        return _reward(f"{rules.script}: its last line", last)
    for name in ("reward.txt", "reward.json"):
        text = workspace.sandbox.get(f"{logs}/{name}")
        if text is not None:
            return _reward(name, text.decode(errors="replace"))
    raise StageError("grade", f"the verifier wrote no reward: {done.summary}")


def _by_names(
    workspace: Workspace, done: CommandResult, proofs: Sequence[Mapping[str, Any]]
) -> float:
    """All, or the share, of the named tests pass. A test that did not run failed."""
    rules, results = workspace.task.grade, dict[str, bool]()
    for proof in proofs:
        # one with several results passed if all of them did
        for name, passed in (proof["results"] or {}).items():
            results[name] = results.get(name, True) and passed
    if not results:
        raise StageError("grade", f"no result of pytest or unittest: {done.summary}")
    wanted = rules.fail_to_pass + rules.pass_to_pass
    passed = sum(results.get(name, False) for name in wanted)
    return passed / len(wanted) if rules.partial else float(passed == len(wanted))


def _by_swebench(workspace: Workspace, patch: bytes) -> float:
    """1 if SWE-bench's own harness reports the instance as resolved.

    It runs the script and uses the log parser of swebench 5.0. The sandbox needs the
    instance's image.
    """
    if find_spec("swebench") is None:
        raise StageError("grade", "swebench is not installed: pip install swebench")
    # an optional package without types
    specs: Any = importlib.import_module("swebench.harness.utils")
    grading: Any = importlib.import_module("swebench.harness.grading")
    if workspace.path != _TESTBED:
        rule = f"the workspace is {workspace.path}, and must be {_TESTBED} of an image"
        raise StageError("grade", rule)
    try:
        spec = specs.make_test_spec(dict(workspace.task.grade.instance))
    except (KeyError, ValueError) as error:
        raise StageError("grade", f"the instance is incomplete: {error!r}") from error
    folder = workspace.sandbox.map_path("/trajkit")
    workspace.sandbox.put(pack({"eval.sh": spec.eval_script.encode()}), folder)
    with tempfile.TemporaryDirectory() as logs:
        log = Path(logs) / "test_output.txt"
        _exec(workspace, ["bash", f"{folder}/eval.sh"], "eval.sh", log=log)
        report = grading.get_eval_report(
            test_spec=spec,
            prediction={
                "instance_id": spec.instance_id,
                "model_name_or_path": "trajkit",
                "model_patch": patch.decode(errors="replace"),
            },
            test_log_path=str(log),
            include_tests_status=False,
        )[spec.instance_id]
    if report.get("infra_failure"):
        raise StageError("grade", f"swebench: {report.get('infra_failure_reason')}")
    return float(report["resolved"])


def _run(
    workspace: Workspace, logs: str
) -> tuple[CommandResult, list[Mapping[str, Any]]]:
    """Run the task's grader; return how it ended, and what test runners proved.

    Raises `StageError`: it could not be run, or a test runner did not come to its end.
    """
    sandbox, task, rules = workspace.sandbox, workspace.task, workspace.task.grade
    names = {"tests": "/tests", "grader": "/trajkit"}
    places = {key: sandbox.map_path(path) for key, path in names.items()}
    places |= {"workspace": workspace.path, "logs": logs}
    tests = places["workspace" if rules.in_workspace else "tests"]
    cwd = workspace.path
    if task.tests is not None:
        sandbox.put(task.tests.archive(), tests)
        cwd = cwd if rules.kind in ("script", "reward_file") else tests
    nonce = secrets.token_hex(16).encode()
    own = {"nonce": nonce, "places": f"{tests}\n{workspace.path}".encode()}
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
    command, name = rules.command, rules.script
    if rules.kind == "script":
        command = _SCRIPT + shlex.quote(name)
    for key, place in places.items():
        command = command.replace(f"{{{key}}}", place)
    name = name or command
    done = _exec(workspace, ["sh", "-c", command], name, cwd=cwd, env=env)
    if done.code in _NOT_RUN:
        raise StageError("grade", name, done.summary)
    if sandbox.get(f"{places['grader']}/nonce") != nonce:
        reason = "a test process ended before its tests did"
        raise StageError("grade", name, reason, done.summary)
    proofs = []
    try:
        for line in (sandbox.get(f"{places['grader']}/results") or b"").splitlines():
            proofs.append(proof := json.loads(line))
            if proof["nonce"] != nonce.decode():
                raise ValueError
    except (ValueError, TypeError, LookupError, RecursionError):
        raise StageError("grade", "the file of test results was changed") from None
    for proof in proofs:
        if proof["changed"]:
            changed = ", ".join(map(str, proof["changed"][:3]))
            raise StageError("grade", name, f"changed while tests ran: {changed}")
    return done, proofs


def _exec(
    workspace: Workspace, command: list[str], name: str, **options: Any
) -> CommandResult:
    seconds = workspace.task.grade.timeout_s
    options = {"cwd": workspace.path, **options}
    done = workspace.sandbox.exec(command, timeout_s=seconds, **options)
    if done.code is None:
        raise AgentError("grade", name, f"timed out after {seconds:g} s")
    return done


def _reward(name: str, text: str) -> float:
    """The reward in a text: a number, an object with ``reward``, or one of numbers.

    Of an object of numbers the mean counts, as in Polar's
    https://github.com/NVIDIA-NeMo/ProRL-Agent-Server/blob/bac80ae/src/polar/trajectory/evaluator/harbor.py
    """
    try:
        value = json.loads(text)
        if isinstance(value, dict):
            value = value["reward"] if "reward" in value else fmean(value.values())
        if isinstance(value, bool) or not math.isfinite(value):
            raise ValueError("not a finite number")
        return float(value)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        reason = f"{name} is {text.strip()[:80]!r}: {error}"
        raise StageError("grade", reason) from error
