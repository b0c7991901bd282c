"""Tasks in the form of other projects, which run as they are."""

import json
import sys

import pytest

from tests.rollout.test_rollout import AGENT, EXAMPLES, command, run, sessions
from tests.rollout.test_sandbox import ISOLATED, PYTEST, unpack
from trajkit.cli import BAD_DATA, DONE
from trajkit.errors import FormatError
from trajkit_rollout.sandbox import LocalSandbox, SandboxError
from trajkit_rollout.tasks import read_tasks

# a folder as `harbor init` makes it (harbor 0.25.0), with the task of its tutorial
HARBOR = {
    "instruction.md": 'Create a file "hello.txt" with the content "Hello, world!".\n',
    "task.toml": """\
schema_version = "1.1"

[task]
name = "someone/hello-world"
authors = [{ name = "Someone", email = "someone@example.org" }]
keywords = ["trivial"]

[metadata]
difficulty_explanation = "Trivial"
category = "programming"

[verifier]
timeout_sec = 120.0

[agent]
timeout_sec = 100.0

[environment]
build_timeout_sec = 600.0
cpus = 1
memory = "2G"
storage_mb = 10240
allow_internet = true
""",
    "environment/Dockerfile": "FROM python:3.13-slim\n\nWORKDIR /app\n\nCOPY seed.txt .\n",
    "environment/seed.txt": "seed\n",
    "tests/test.sh": f"""\
#!/bin/bash
{PYTEST} /tests/test_outputs.py -rA
if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
""",
    "tests/test_outputs.py": """\
from pathlib import Path


def test_hello():
    assert Path("/app/seed.txt").read_text() == "seed\\n"
    assert Path("/app/hello.txt").read_text().strip() == "Hello, world!"
""",
    "solution/solve.sh": '#!/bin/bash\necho "Hello, world!" > /app/hello.txt\n',
}
apart = pytest.mark.skipif(not ISOLATED, reason="bubblewrap does not work here")


def harbor(folder, **changed):
    for name, text in {**HARBOR, **changed}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_harbor_task_is_read(tmp_path):
    (task,) = read_tasks(harbor(tmp_path / "hello world"))
    assert (task.id, task.prompt) == ("hello-world", HARBOR["instruction.md"])
    assert (task.workdir, task.editable) == ("/app", ("**",))
    assert task.image.startswith("trajkit-task:")
    assert task.build == str(tmp_path / "hello world/environment")
    assert (task.agent.timeout_s, task.grade.timeout_s) == (100.0, 120.0)
    assert (task.limits.memory_mb, task.limits.cpus) == (2048, 1.0)
    image = 'docker_image = "someone/image:1"\ncpus = 1\n'
    toml = HARBOR["task.toml"].replace("cpus = 1\n", image)
    toml = f'{toml}[verifier.env]\nJUDGE = "${{JUDGE_KEY:-none}}"\n'
    (task,) = read_tasks(harbor(tmp_path / "other", **{"task.toml": toml}))
    assert task.grade.env == {"JUDGE": "${JUDGE_KEY:-none}"}
    assert (task.image, task.build, task.plain) == ("someone/image:1", None, False)


@apart
def test_a_harbor_task_runs_in_a_local_sandbox(tmp_path, capsys):
    folder = harbor(tmp_path / "hello")
    out = tmp_path / "run"
    solve = f"test $PWD = /app && echo 'Hello, world!' > hello.txt; {AGENT}"
    assert run(command(folder, out, "--untrusted", agent=solve)) == DONE
    assert (
        "cpus = 1.0: a sandbox of kind local cannot enforce it"
        in capsys.readouterr().err
    )
    (line,) = sessions(out).values()
    assert (line["reward"], line["error"], line["findings"]) == (1.0, None, [])


def self_test(tasks, capsys, *options):
    code = run([str(tasks), "--self-test", "--json", *options])
    said = json.loads(capsys.readouterr().out)
    sys.stderr.write(f"{said}\n")  # shown if the test fails
    return code, [(one["change"], one["reward"]) for one in said["self_test"]]


@apart
def test_the_solution_and_no_change_are_graded_before_a_run(tmp_path, capsys):
    folder = harbor(tmp_path / "hello")
    right = [("solution", 1.0), ("no change", 0.0)]
    assert self_test(folder, capsys) == (DONE, right)
    assert self_test(EXAMPLES / "leap", capsys) == (DONE, right)


def test_self_tests_of_one_task_have_sandboxes_of_their_own(monkeypatch, capsys):
    """Two at once would otherwise remove each other's containers."""
    names = []

    def start(box):
        names.append(box.spec.name)
        raise SandboxError("no room")

    monkeypatch.setattr(LocalSandbox, "start", start)
    for _ in range(2):
        refused = [("solution", None), ("no change", None)]
        assert self_test(EXAMPLES / "leap", capsys) == (BAD_DATA, refused)
    assert len({*names}) == len(names) == 4


@apart
def test_a_task_that_grades_wrongly_is_found(tmp_path, capsys):
    lenient = {"tests/test.sh": "echo 1 > /logs/verifier/reward.txt"}
    folder = harbor(tmp_path / "lenient", **lenient)
    both = [("solution", 1.0), ("no change", 1.0)]
    assert self_test(folder, capsys) == (BAD_DATA, both)
    # a solution that adds a module which the task does not let the agent add
    tasks = tmp_path / "tasks.jsonl"
    task = {
        "id": "new",
        "prompt": "p",
        "workspace": {"a.txt": "a"},
        "solution": {"new.py": "x = 1\n"},
        "tests": {"test_new.py": "from new import x\nassert x == 1\n"},
        "grade": {"command": "python -B test_new.py"},
    }
    tasks.write_text(json.dumps(task))
    wrong = [("solution", 0.0), ("no change", 0.0)]
    assert self_test(tasks, capsys) == (BAD_DATA, wrong)
    tasks.write_text(json.dumps({**task, "editable": ["new.py"]}))
    right = [("solution", 1.0), ("no change", 0.0)]
    assert self_test(tasks, capsys) == (DONE, right)
    assert run([str(tasks), "--self-test"]) == DONE
    assert "solution   1.0     1.0" in capsys.readouterr().out


# legal, and less usual
ODD = {
    "task.toml": """\
[environment]
workdir = "src"
env = { WORD = "${TRAJKIT_WORD:-some thing}" }
[verifier.env]
LIMIT = "${TRAJKIT_LIMIT:-3}"
[solution.env]
OWN = "${TRAJKIT_OWN:-word}"
""",
    "environment/Dockerfile": """\
FROM python:3.13-slim
WORKDIR /srv
COPY Makefile my.data ./
WORKDIR app
COPY seed.txt seeds/first.txt
COPY my.data src/my.data/
COPY Makefile my.data/a.txt src/both/
""",
    "environment/Makefile": "all:\n",
    "environment/my.data/a.txt": "a\n",
    "tests/test.sh": f"cd /tests/inner && {PYTEST} test_it.py"
    """
tests=$((!$?))
echo "{\\"tests\\": $tests, \\"limit\\": $((tests * LIMIT / 3))}" > $LOGS/reward.json
""",
    "tests/inner/test_it.py": """\
from pathlib import Path

def test_it():
    assert Path("/srv/app/src/word").read_text() == "some thing\\n"
    assert Path("/srv/app/src/both/Makefile").read_text() == "all:\\n"
""",
    "solution/solve.sh": 'test $PWD = /srv/app/src && bash "$(dirname "$0")/inner/do.sh"\n',
    "solution/inner/do.sh": 'echo "$WORD" > $OWN\n',
}


@apart
def test_what_is_unusual_in_a_harbor_task_is_read_and_runs(tmp_path, capsys):
    dockerfile = ODD["environment/Dockerfile"]
    (task,) = read_tasks(harbor(tmp_path / "a", **ODD))
    # what is copied to a folder around the workspace needs docker
    assert (task.workdir, task.plain) == ("/srv/app/src", False)
    inside = dockerfile.replace("COPY Makefile my.data ./\n", "")
    inside = inside.replace("seeds/", "src/seeds/")
    folder = harbor(tmp_path / "b", **{**ODD, "environment/Dockerfile": inside})
    (task,) = read_tasks(folder)
    assert {name.removeprefix("./") for name in unpack(task.workspace)} == {
        *("my.data/a.txt", "seeds/first.txt", "both/Makefile", "both/a.txt")
    }
    right = [("solution", 1.0), ("no change", 0.0)]
    assert self_test(folder, capsys) == (DONE, right)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"environment/Dockerfile": "", "task.toml": ""}, "neither docker_image nor"),
        ({"steps/one/instruction.md": "x"}, "several steps are not supported"),
        ({"environment/docker-compose.yaml": "x"}, "several containers are not"),
        ({"task.toml": "[verifier]\nenvironment_mode = 'separate'"}, "only a shared"),
        ({"task.toml": "[verifier.environment]\ncpus = 1"}, "only a shared"),
        ({"instruction.md": ""}, "prompt: an empty string"),
        ({"environment/Dockerfile": "FROM a\nWORKDIR $A"}, "'/app/[$]A' is not an"),
        ({"environment/Dockerfile": "FROM a\nCOPY none ."}, "No such file.*none"),
        ({"task.toml": '[environment]\nmemory = "much"'}, "'much' is not a size"),
        ({"task.toml": "[verifier]\ntimeout_sec = -1"}, "grade.timeout_s: -1"),
    ],
)
def test_a_harbor_task_that_cannot_run_is_refused(tmp_path, changed, said):
    with pytest.raises(FormatError, match=said):
        read_tasks(harbor(tmp_path / "t", **changed))


@pytest.mark.parametrize(
    ("dockerfile", "plain"),
    [
        ("FROM a\nWORKDIR /app", True),
        ("# x\nfrom a\nWORKDIR /app\nCOPY seed.txt \\\n  /app/x.txt\nCMD sh", True),
        ("FROM a\nRUN apt-get update", False),
        ("FROM a\nWORKDIR /app\nCOPY --from=b /x .", False),
        ("FROM a\nWORKDIR /app\nCOPY seed.txt /etc/", False),
        ("FROM a\nCOPY seed.txt .\nWORKDIR src", False),
        ("FROM a\nENV A=1", False),
        ("FROM a AS b\nWORKDIR /app\nCOPY seed.txt .\nFROM c\nWORKDIR /app", False),
    ],
)
def test_a_dockerfile_that_does_more_than_copy_needs_docker(
    tmp_path, capsys, dockerfile, plain
):
    folder = harbor(tmp_path / "t", **{"environment/Dockerfile": dockerfile})
    (task,) = read_tasks(folder)
    assert task.plain is plain
    if not plain and ISOLATED:
        assert run([str(folder), "--self-test", "--json"]) == BAD_DATA
        assert "a local sandbox has no image" in capsys.readouterr().out


def test_ignored_files_of_an_image_need_docker(tmp_path):
    folder = harbor(tmp_path / "t", **{"environment/.dockerignore": "seed.txt"})
    assert not read_tasks(folder)[0].plain


# the fields of an instance of princeton-nlp/SWE-bench_Verified, its texts cut short
INSTANCE = {
    "repo": "astropy/astropy",
    "instance_id": "astropy__astropy-12907",
    "base_commit": "d16bfe05a744909de4b27f5875fe0d4ed41ce607",
    "patch": "diff --git a/astropy/modeling/separable.py b/astropy/modeling/separable.py\n",
    "test_patch": "diff --git a/astropy/modeling/tests/test_separable.py b/...\n",
    "problem_statement": "Modeling's `separability_matrix` does not compute ...",
    "hints_text": "",
    "created_at": "2022-03-03T15:14:54Z",
    "version": "4.3",
    "FAIL_TO_PASS": '["astropy/modeling/tests/test_separable.py::test_separable"]',
    "PASS_TO_PASS": '["astropy/modeling/tests/test_separable.py::test_coord_matrix"]',
    "environment_setup_commit": "298ccb478e6bf092953bca67a3d29dc6c35f6752",
    "difficulty": "15 min - 1 hour",
}


def test_an_instance_of_swe_bench_is_read(tmp_path):
    path = tmp_path / "instances.jsonl"
    path.write_text(json.dumps(INSTANCE))
    (task,) = read_tasks(path)
    assert (task.id, task.prompt) == (
        "astropy__astropy-12907",
        INSTANCE["problem_statement"],
    )
    image = "swebench/sweb.eval.x86_64.astropy_1776_astropy-12907:latest"
    assert (task.workdir, task.image) == ("/testbed", image)
    assert task.grade.kind == "swebench"
    assert task.grade.instance["FAIL_TO_PASS"] == [
        "astropy/modeling/tests/test_separable.py::test_separable"
    ]
    assert unpack(task.solution) == {"solution.patch": INSTANCE["patch"].encode()}
    # as in other data sets: lists, another image, no solution, a name with a dot
    lists = {"FAIL_TO_PASS": ["a::b"], "PASS_TO_PASS": None, "patch": None}
    other = {
        **INSTANCE,
        **lists,
        "instance_id": "plotly__plotly.py-1",
        "meta": {"x": 1},
    }
    for key in ("image_name", "docker_image", "image"):
        path.write_text(json.dumps({**other, key: f"someone/{key}:1"}))
        (task,) = read_tasks(path)
        assert (task.id, task.image) == ("plotly__plotly-py-1", f"someone/{key}:1")
        assert task.grade.instance["instance_id"] == "plotly__plotly.py-1"
        assert task.grade.instance["FAIL_TO_PASS"] == ["a::b"]
        assert (task.grade.instance["PASS_TO_PASS"], task.solution) == ([], None)
    path.write_text(json.dumps({**INSTANCE, "FAIL_TO_PASS": "['a']"}))
    with pytest.raises(FormatError, match=r"instances\.jsonl:1: FAIL_TO_PASS: Exp"):
        read_tasks(path)
    path.write_text(json.dumps({**INSTANCE, "problem_statement": None}))
    with pytest.raises(FormatError, match=r"instances\.jsonl:1: prompt"):
        read_tasks(path)
