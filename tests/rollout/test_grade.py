"""Tasks are read to the letter, and graded by what they say."""

import json
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from tests.rollout.test_sandbox import PYTEST, sandbox
from trajkit.errors import FormatError
from trajkit_rollout.grade import AgentError, StageError, Workspace, grade
from trajkit_rollout.sandbox import LocalSandbox
from trajkit_rollout.tasks import Limits, pack, read_tasks


def task_of(tmp_path, **fields):
    """The one task of a JSONL file."""
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"id": "t", "prompt": "Do it.", **fields}))
    (task,) = read_tasks(path)
    return task


def graded(tmp_path, *, patch=b"", finished=True, **fields):
    """The reward of a task whose agent changed nothing, or made a patch."""
    task = task_of(tmp_path, **fields)
    with sandbox("local", tmp_path) as box:
        workspace = Workspace(task, box)
        workspace.prepare()
        workspace.apply(patch)
        return grade(workspace, patch, finished=finished)


def test_a_workspace_begins_with_the_same_commit_in_every_rollout(tmp_path):
    task = task_of(tmp_path, workspace={"a": "x\n"}, grade={"command": "true"})
    commits = []
    for name in ("one", "two"):
        with sandbox("local", tmp_path, name=name) as box:
            workspace = Workspace(task, box)
            workspace.prepare()
            show = ["git", "log", "--format=%H %aI %cI %an %ae %s"]
            done = box.exec(show, timeout_s=60, cwd=workspace.path)
        commits.append(done.stdout.decode())
    began = "2000-01-01T00:00:00"
    assert commits[0].split()[1:3] in ([f"{began}+00:00"] * 2, [f"{began}Z"] * 2)
    assert commits[0].endswith(" agent agent@localhost Start\n")
    assert commits[0] == commits[1]


TESTS = """
import os, pytest

def test_a(): assert "BROKEN" not in os.environ
def test_b(): raise AssertionError
@pytest.mark.parametrize("x", ["x y"])
def test_c(x): pass
print("PASSED test_t.py::gone")
"""


def by_names(fails, passes=(), command=PYTEST, **more):
    """Rules that name tests of ``test_t.py``."""
    fails, passes = ([f"test_t.py::{name}" for name in x] for x in (fails, passes))
    rules = {"kind": "tests", "command": command, "fail_to_pass": fails}
    return {**rules, "pass_to_pass": passes, **more}


def by_program(program, suffix):
    command = f"{program} > {{logs}}/reward.{suffix}; exit 1"
    return {"kind": "reward_file", "command": command}


def by_file(name, text):
    return by_program(f"echo '{text}'", name.partition(".")[2])


@pytest.mark.parametrize(
    ("rules", "reward"),
    [
        ({"command": "true"}, 1.0),
        ({"command": "exit 3"}, 0.0),
        ({"command": "test -e $WORKSPACE/.git && test $PWD = $(pwd)"}, 1.0),
        (by_names(["test_a"], ["test_c[x y]"], f"{PYTEST}; exit 1"), 1.0),
        (by_names(["test_a", "test_b"]), 0.0),
        # one that did not run did not pass
        (by_names(["test_a", "test_b"], ["test_c[x y]", "gone"], partial=True), 0.5),
        # one that fails in one of two runs did not pass
        (by_names(["test_a"], command=f"BROKEN=1 {PYTEST}; {PYTEST}"), 0.0),
        ({"kind": "completed"}, 1.0),
        (by_file("reward.txt", "0.25"), 0.25),
        (by_file("reward.json", "1"), 1.0),
        (by_file("reward.json", '{"reward": 0.5, "x": 9}'), 0.5),
        (by_file("reward.json", '{"a": 1, "b": 0}'), 0.5),
    ],
)
def test_a_reward_by_each_grader(tmp_path, rules, reward):
    assert graded(tmp_path, grade=rules, tests={"test_t.py": TESTS}) == reward


def test_a_verifier_s_full_reward_is_not_believed_if_its_tests_failed(tmp_path):
    command = f"{PYTEST} {{tests}}; echo 1 > {{logs}}/reward.txt"
    rules = {"kind": "reward_file", "command": command}
    assert graded(tmp_path, grade=rules, tests={"test_t.py": "def test(): pass"}) == 1.0
    with pytest.raises(StageError, match=r"reward\.txt is 1, but tests failed"):
        graded(tmp_path, grade=rules, tests={"test_t.py": TESTS})


CONDITIONAL = """
import pytest, it

@pytest.mark.skipif(it.f != 1, reason="f")
def test_f(): assert it.f == 2
"""


@pytest.mark.parametrize("value", [0, 1])
def test_a_test_that_is_skipped_is_skipped_on_the_base_commit_too(tmp_path, value):
    fields = {"tests": {"test_it.py": CONDITIONAL}, "grade": {"command": PYTEST}}
    fields["workspace"] = {"it.py": f"f = {value}\n"}
    patch = HUNK.format("it.py", "it.py").replace("same", f"f = {value}").encode()
    patch = patch.replace(b"+changed", b"+f = 3")
    if value == 0:
        assert graded(tmp_path, patch=patch, **fields) == 1.0
        return
    with pytest.raises(
        AgentError, match=r"not without .* skipped: test_it\.py::test_f"
    ):
        graded(tmp_path, patch=patch, **fields)


WAITS = "import threading as t; x = t.Thread(target=__import__, args=['site']); "
WAITS += "x.start(); x.join()"


# the import of asyncio marks functions as coroutines, which changes their code
@pytest.mark.parametrize("code", ["import asyncio", WAITS])
def test_a_solution_may_import_what_its_tests_do_not(tmp_path, code):
    tests = {"test_it.py": "import it\ndef test_f(): assert it.f == 2\n"}
    fields = {"workspace": {"it.py": "same\n"}, "tests": tests}
    fields["grade"] = {"command": PYTEST, "timeout_s": 60}
    patch = HUNK.format("it.py", "it.py").replace("changed", f"{code}; f = 2")
    assert graded(tmp_path, patch=patch.encode(), **fields) == 1.0


def test_tests_that_a_step_before_them_writes_are_found(tmp_path):
    fields = {"workspace": {"x": "true\n"}, "tests": {"t": "1"}}
    fields["grade"] = {"command": "sh $WORKSPACE/x"}
    patch = (
        HUNK.format("x", "x").replace("same", "true").replace("changed", "> $TESTS/t")
    )
    assert graded(tmp_path, **fields) == 1.0
    with pytest.raises(AgentError, match="changed while tests ran: t"):
        graded(tmp_path, patch=patch.encode(), **fields)


@pytest.mark.parametrize(
    ("command", "believed"),
    [
        ("true; # python -m pytest", False),
        ("true; # python -Bmunittest", False),
        ("true; # pip install pytest", True),
        ("# pytest\ntrue; # ./unittest", True),
        ("sh {tests}/run.sh", False),
    ],
)
def test_a_runner_that_is_named_has_to_tell_results(tmp_path, command, believed):
    fields = {"grade": {"command": command}, "tests": {"run.sh": ": pytest"}}
    if believed:
        del fields["tests"]
        assert graded(tmp_path, **fields) == 1.0
        return
    with pytest.raises(StageError, match="no results: it must run with Python"):
        graded(tmp_path, **fields)


def test_a_task_s_variables_are_those_of_the_process_that_grades(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAJKIT_GIVEN", "a b")
    given = {"A": "${TRAJKIT_GIVEN}", "B": "${TRAJKIT_OTHER:-c}", "C": "x${A}"}
    command = "test \"$A $B $C\" = 'a b c x${A}'"
    assert graded(tmp_path, grade={"command": command, "env": given}) == 1.0
    rules = {"command": "true", "env": {"A": "${TRAJKIT_OTHER}"}}
    with pytest.raises(StageError, match="which is not set here"):
        graded(tmp_path, grade=rules)


def test_a_session_that_was_cut_off_is_not_completed(tmp_path):
    assert graded(tmp_path, grade={"kind": "completed"}, finished=False) == 0.0


def test_a_verifier_finds_the_tests_where_it_is_told(tmp_path):
    script = 'cat "$(dirname "$0")/hidden" > "$1/reward.txt"'
    reward = graded(
        tmp_path,
        tests={"test.sh": script, "hidden": "0.75"},
        grade={
            "kind": "reward_file",
            "command": "test ! -e hidden && bash {tests}/test.sh {logs}",
        },
    )
    assert reward == 0.75


def test_a_script_says_the_reward_on_its_last_line(tmp_path):
    program = "print('thinking')\nprint(len(open('text').read()) / 10)\n"
    fields = {"workspace": {"text": "12345"}, "tests": {"grade it.py": program}}
    rules = {"kind": "script", "script": "grade it.py"}
    assert graded(tmp_path, grade=rules, **fields) == 0.5


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (
            by_names(["a"], command="true"),
            "no result of pytest or unittest: exit code 0",
        ),
        ("print('fine')", "g.py: its last line is 'fine'"),
        ("print('NaN')", "its last line is 'NaN': not a finite number"),
        ("raise SystemExit('broken')", "g.py: exit code 1: broken"),
        (
            {"kind": "reward_file", "command": "echo done"},
            "the verifier wrote no reward: exit code 0: done",
        ),
        (by_file("reward.txt", "x"), "reward.txt is 'x'"),
        (by_file("reward.json", "{}"), "reward.json is '{}'"),
        (by_file("reward.json", "true"), "not a finite number"),
        # bytes, a huge number, a sum that overflows, a deep list
        (by_program(r"printf '\377'", "txt"), "reward.txt is "),
        (by_program("python -c 'print(10**400)'", "txt"), "reward.txt is "),
        (by_file("reward.json", '{"a": 1e308, "b": 1e308}'), "reward.json is "),
        (by_program("python -c 'print(100000 * \"[\")'", "txt"), "reward.txt is "),
    ],
)
def test_what_cannot_be_graded_is_an_error_and_no_zero(tmp_path, rules, said):
    fields = {"grade": rules}
    if isinstance(rules, str):
        own = {"kind": "script", "script": "g.py"}
        fields = {"tests": {"g.py": rules}, "grade": own}
    with pytest.raises(StageError) as raised:
        graded(tmp_path, **fields)
    assert said in str(raised.value)


def test_a_patch_that_does_not_apply_is_the_agent_s_error(tmp_path):
    patch = b"--- a/x\n+++ b/x\n -1 +1 \n-old\n+new\n"
    with pytest.raises(AgentError, match="grade: git: apply: exit code"):
        graded(tmp_path, patch=patch, grade={"command": "true"})


HEAD = "diff --git a/{0} b/{1}\n"
ADDED = b"diff --git a/x.py b/x.py\nnew file mode 100644\n--- /dev/null\n+++ b/x.py\n"
ADDED += b"@@ -0,0 +1 @@\n+x\n"
HUNK = HEAD + "--- a/{0}\n+++ b/{1}\n@@ -1 +1 @@\n-same\n+changed\n"
MOVE = HEAD + "similarity index 100%\nrename {2} {0}\nrename {3} {1}\n"


@pytest.mark.parametrize(
    "patch",
    [
        MOVE.format("conftest.py", "x.py", "from", "to"),
        MOVE.format("conftest.py", "x.py", "old", "new"),
        HUNK.format("conftest.py", "x.py"),
        # both names of each change are those of changed files
        MOVE.format("conftest.py", "a.py", "old", "new")
        + MOVE.format("a.py", "conftest.py", "old", "new"),
    ],
    ids=["rename from", "rename old", "two names", "exchanged"],
)
def test_a_patch_cannot_move_a_protected_file_away(tmp_path, patch):
    files = {"conftest.py": "same\n", "a.py": "other\n"}
    task = task_of(tmp_path, workspace=files, grade={"command": "true"})
    with sandbox("local", tmp_path) as box:
        workspace = Workspace(task, box)
        workspace.prepare()
        assert workspace.apply(patch.encode())["conftest.py"] == "refused"
        assert (Path(workspace.path) / "conftest.py").read_text() == "same\n"


def test_a_patch_of_a_file_that_git_ignores_is_an_error(tmp_path):
    files = {".gitignore": "conftest.py\n", "conftest.py": "same\n"}
    patch = HUNK.format("conftest.py", "x.py").encode()
    with pytest.raises(StageError, match=r"conftest\.py: does not exist in index"):
        graded(tmp_path, patch=patch, workspace=files, grade={"command": "true"})


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("echo no >&2; exit 3", "exit code 3: no"),
        # that of a version manager without a version
        ("exit 127", "exit code 127: no output"),
    ],
)
def test_modules_that_cannot_be_listed_are_an_error(tmp_path, script, error):
    program = tmp_path / "bin/python"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    task = task_of(tmp_path, grade={"command": "true"})
    with sandbox("local", tmp_path, path=(str(program.parent),)) as box:
        copy = Workspace(task, box)
        copy.prepare()
        with pytest.raises(StageError, match=f"git: modules: {error}"):
            copy.apply(ADDED)


def test_changes_are_applied_by_their_exact_names(tmp_path):
    """Whatever git would read in them: patterns, quotes, the end of a line."""
    names = ["[a]*?\\.pth", ":(glob)**", "a.txt", "sub/pytest.ini", "b\n.txt", "\u00e9"]
    task = task_of(
        tmp_path,
        workspace={"sub/pytest.ini": "x", "gone": "x", "kept": "x"},
        editable=["*"],
        grade={"command": "true"},
    )
    workspaces = []
    for name in ("agent", "copy"):
        workspaces.append(Workspace(task, sandbox("local", tmp_path, name=name)))
    agent, copy = workspaces
    with agent.sandbox, copy.sandbox:
        agent.prepare()
        copy.prepare()
        agent.sandbox.put(pack({name: b"changed\n" for name in names}), agent.path)
        (Path(agent.path) / "gone").unlink()
        verdicts = copy.apply(agent.diff())
        refused = ["[a]*?\\.pth", "b\n.txt", "sub/pytest.ini"]
        graded = [name for name in names if name not in refused]
        assert verdicts == {
            **dict.fromkeys(refused, "refused"),
            **dict.fromkeys([*graded, "gone"], "graded"),
        }
        place = Path(copy.path)
        assert {p.name for p in place.iterdir()} == {*graded, "sub", "kept", ".git"}
        assert all((place / name).read_text() == "changed\n" for name in graded)
        assert (place / "sub/pytest.ini").read_text() == "x"


def test_all_that_a_task_says_is_read(tmp_path):
    task = task_of(
        tmp_path,
        workdir="/testbed",
        image="img:1",
        setup={"command": "make", "timeout_s": 7},
        agent={"timeout_s": 8.5, "max_turns": 9},
        grade={"command": "make test", "timeout_s": 10},
        limits={"memory_mb": 1, "cpus": 2, "processes": 3, "file_mb": 4},
    )
    found = (task.workdir, task.image, task.setup.command)
    assert found == ("/testbed", "img:1", "make")
    assert (task.setup.timeout_s, task.agent.timeout_s) == (7.0, 8.5)
    assert (task.agent.max_turns, task.grade.timeout_s) == (9, 10.0)
    assert task.limits == Limits(memory_mb=1, cpus=2.0, processes=3, file_mb=4)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"id": "a.b"}, "id: 'a.b'"),
        ({"prompt": 3}, "prompt: a number, not a string"),
        ({"prompt": None}, "prompt: an empty string"),
        ({"colour": "red"}, "colour: unknown key"),
        ({"workdir": "work"}, "workdir: 'work' is not an absolute path"),
        ({"agent": {"max_turns": 0}}, "agent.max_turns: 0 is not in [1, "),
        ({"agent": {"max_turns": True}}, "agent.max_turns: a boolean"),
        ({"agent": {"timeout_s": -1}}, "agent.timeout_s: -1.0 is not in [0.001, "),
        ({"agent": []}, "agent: a list, not an object"),
        ({"workspace": {"a": 1}}, "workspace.a: a number, not a string"),
        ({"grade": {"kind": "magic"}}, "'magic' is not one of command, tests"),
        ({"grade": {}}, "kind 'command' lacks keys"),
        ({"grade": {"kind": "tests", "command": "x"}}, "lacks keys that it needs"),
        ({"grade": {"kind": "swebench"}}, "lacks keys that it needs"),
        ({"grade": {"kind": "script", "script": "g.py"}}, "needs the task's tests"),
        (
            {"grade": {"command": "x", "fail_to_pass": [1]}},
            "grade.fail_to_pass[0]: a number",
        ),
    ],
)
def test_an_invalid_task_is_rejected_with_its_location(tmp_path, fields, said):
    with pytest.raises(FormatError) as raised:
        task_of(tmp_path, **{"grade": {"command": "true"}, **fields})
    assert said in str(raised.value)
    assert str(raised.value).startswith(f"{tmp_path}/tasks.jsonl:1: ")


def test_files_that_hold_no_tasks_are_refused(tmp_path):
    path = tmp_path / "t.jsonl"
    task = '{"id": "a", "prompt": "p", "grade": {"command": "true"}}\n'
    for text, said in (
        ("", "has no task"),
        ("{", "t.jsonl:1"),
        (task.replace('"p"', '"\\ud800"'), "t.jsonl:1: .*surrogates"),
        (task * 2, "two tasks have the id 'a'"),
    ):
        path.write_text(text)
        with pytest.raises(FormatError, match=said):
            read_tasks(path)
    (tmp_path / "x").mkdir()
    (tmp_path / "x/task.toml").write_text("prompt = ")
    with pytest.raises(FormatError, match=r"x/task\.toml"):
        read_tasks(tmp_path)


# SWE-bench's package, by a double of the two functions of it that are called


def swebench(monkeypatch, report):
    """The package, whose reading of the log is the given report."""
    seen = {}

    def make_test_spec(instance):
        return types.SimpleNamespace(
            instance_id=instance["instance_id"], eval_script=instance["eval_script"]
        )

    def get_eval_report(test_spec, prediction, test_log_path, include_tests_status):
        seen.update(prediction, log=Path(test_log_path).read_text())
        return {test_spec.instance_id: report}

    for name, fields in (
        ("swebench", {"__spec__": ModuleSpec("swebench", None)}),
        ("swebench.harness", {}),
        ("swebench.harness.utils", {"make_test_spec": make_test_spec}),
        ("swebench.harness.grading", {"get_eval_report": get_eval_report}),
    ):
        module = types.ModuleType(name)
        vars(module).update(fields)
        monkeypatch.setitem(sys.modules, name, module)
    return seen


class AtRoot(LocalSandbox):
    """A local sandbox that says that its workspace is that of an image."""

    def map_path(self, path):
        return path if path == "/testbed" else super().map_path(path)

    def exec(self, command, *, cwd=None, **options):
        cwd = super().map_path("/work") if cwd == "/testbed" else cwd
        return super().exec(command, cwd=cwd, **options)


def swebench_graded(tmp_path, instance, timeout_s=60):
    task = task_of(
        tmp_path,
        workdir="/testbed",
        grade={"kind": "swebench", "instance": instance, "timeout_s": timeout_s},
    )
    with AtRoot(sandbox("local", tmp_path).spec) as box:
        workspace = Workspace(task, box)
        return grade(workspace, b"+a", finished=True)


SCRIPT = "echo ran; printf '\\377\\n' >&2; exit 1"
INSTANCE = {"instance_id": "a-1", "eval_script": SCRIPT}


@pytest.mark.parametrize("verdict", [True, False])
def test_swebench_reads_the_log_of_its_own_script(tmp_path, monkeypatch, verdict):
    seen = swebench(monkeypatch, {"resolved": verdict, "infra_failure": False})
    assert swebench_graded(tmp_path, INSTANCE) == float(verdict)
    # any bytes are made text
    assert seen["log"] == "ran\n\ufffd\n"
    assert (seen["instance_id"], seen["model_patch"]) == ("a-1", "+a")


def test_swebench_says_why_it_cannot_grade(tmp_path, monkeypatch):
    with pytest.raises(StageError, match="swebench is not installed"):
        graded(tmp_path, grade={"kind": "swebench", "instance": INSTANCE})
    report = {
        "resolved": False,
        "infra_failure": True,
        "infra_failure_reason": "no space",
    }
    swebench(monkeypatch, report)
    with pytest.raises(StageError, match="swebench: no space"):
        swebench_graded(tmp_path, INSTANCE)
    with pytest.raises(StageError, match="incomplete: KeyError"):
        swebench_graded(tmp_path, {"instance_id": "a-1"})
    with pytest.raises(StageError, match="must be /testbed"):
        graded(tmp_path, grade={"kind": "swebench", "instance": INSTANCE})
    with pytest.raises(StageError, match=r"timed out after 0\.2 s"):
        swebench_graded(tmp_path, {**INSTANCE, "eval_script": "sleep 600"}, 0.2)
