"""Files about the project agree with one another and with the repository."""

import re
import sys
import tomllib
from pathlib import Path

from tests import conftest
from tests.faults.__main__ import misfits

ROOT = Path(__file__).parents[1]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def test_files_that_contributing_names_exist():
    named = re.findall(r"`([\w.]+/[\w./]*)`", CONTRIBUTING)
    assert named
    for file in named:
        # NAME is what is new: other files of its kind are there
        pattern = file.replace("test_NAME", "test_*").replace("NAME", "[a-z]*")
        assert list(ROOT.glob(pattern)), file


def test_the_table_of_stages_lists_those_of_ci():
    script = (ROOT / ".ci/run").read_text("utf-8")
    steps = re.search(r"^steps=\(\n(.*?)^\)", script, re.M | re.S)
    assert steps
    run = set(re.findall(r"[a-z]+", steps[1]))
    assert run == set(re.findall(r"^stage_(\w+)\(\)", script, re.M))
    assert run == set(re.findall(r"^\| `([a-z]+)` \| ", CONTRIBUTING, re.M))


def test_the_suite_imports_only_what_the_extra_test_installs():
    """A module that needs more is one of the extra `dev`, or its stage is another."""
    installed = {
        *("numpy", "orjson", "pyarrow", "polars", "cyclopts", "rich", "aiohttp"),
        *("httpx", "jinja2", "starlette", "tokenizers", "uvicorn", "hypothesis"),
        *("pytest", "anyio", "trajkit", "trajkit_shim", "trajkit_rollout"),
        *("trajkit_train", "tests", "benchmarks"),
        # tests that skip themselves without them; the stages `torch` and `trainers`
        *("datasets", "fsspec", "msgspec", "torch"),
        *sys.stdlib_module_names,
    }
    others = ("torch/", "trainers/", "engines/test_ray", "engines/test_spark")
    missing = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if not str(path.relative_to(ROOT / "tests")).startswith(others):
            needs = {name.partition(".")[0] for name in conftest.imports(path)}
            if needs - installed and not conftest.needed(path):
                missing[path.name] = needs - installed
    assert missing == {}


def test_wheels_classifiers_and_workflow_name_the_same_pythons():
    prefix = "Programming Language :: Python :: 3."
    classifiers = PYPROJECT["project"]["classifiers"]
    minors = [c.removeprefix(prefix) for c in classifiers if c.startswith(prefix)]
    build = PYPROJECT["tool"]["cibuildwheel"]["build"]
    assert build == "{" + ",".join(f"cp3{m}" for m in [*minors, "14t"]) + "}-*"
    workflow = (ROOT / ".github/workflows/ci.yml").read_text("utf-8")
    listed = ", ".join(f'"3.{m}"' for m in minors)
    assert f"python: [{listed}]" in workflow
    assert PYPROJECT["project"]["requires-python"] == f">=3.{minors[0]}"


def test_planted_faults_have_a_place():
    """`python -m tests.faults` plants them and runs their tests."""
    assert [*misfits()] == []
