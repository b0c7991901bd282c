"""Grades with SWE-bench's own harness: runs its script, and uses its log parser.

The sandbox needs the instance's image, so ``workdir`` is ``/testbed``. Written for
swebench 5.0.
"""

import importlib
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trajkit_shim.agents.sandbox import pack
from trajkit_shim.rollout.tasks import Grade
from trajkit_shim.rollout.workspace import StageError

if TYPE_CHECKING:
    from trajkit_shim.rollout.grade import Work

_TESTBED = "/testbed"
_SCRIPT_PLACE = "/trajkit"


def resolved(work: "Work", rules: Grade) -> bool:
    """Return whether some work resolves an instance.

    Raises `StageError`: the package is not installed, the instance is incomplete, the
    sandbox has no image, the time limit is exceeded, or the package reports a broken
    environment.
    """
    if find_spec("swebench") is None:
        raise StageError("grade", "swebench is not installed: pip install swebench")
    # an optional package without types
    specs: Any = importlib.import_module("swebench.harness.utils")
    grading: Any = importlib.import_module("swebench.harness.grading")
    workspace, sandbox = work.workspace, work.workspace.sandbox
    if workspace.path != _TESTBED:
        rule = f"must be {_TESTBED} of an image"
        raise StageError("grade", f"the workspace is {workspace.path}, and {rule}")
    try:
        spec = specs.make_test_spec(dict(rules.instance))
    except (KeyError, ValueError) as error:
        raise StageError("grade", f"the instance is incomplete: {error!r}") from error
    script = pack({"eval.sh": spec.eval_script.encode()})
    folder_path = sandbox.map_path(_SCRIPT_PLACE)
    sandbox.put(script, folder_path)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "test_output.txt"
        command = ["bash", f"{folder_path}/eval.sh"]
        done = sandbox.exec(
            command, timeout_s=rules.timeout_s, cwd=workspace.path, log=log
        )
        if done.code is None:
            raise StageError("grade", f"timed out after {rules.timeout_s:g} s")
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
    return bool(report["resolved"])
