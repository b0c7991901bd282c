"""Hypothesis profiles, warnings of libraries, the build, an end for helper processes."""

import ast
import gc
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from trajkit import _core

_PROFILES = {"quick": 25, "ci": 300, "thorough": 5000}
"""Examples of a property, by the value of TRAJKIT_HYPOTHESIS."""

_profile = os.environ.get("TRAJKIT_HYPOTHESIS", "quick")
for _name, _examples in _PROFILES.items():
    settings.register_profile(
        _name,
        deadline=None,
        # the same examples in each run of the same tests; "thorough" looks for new ones
        derandomize=_name != "thorough",
        max_examples=_examples,
        print_blob=True,
        # a busy machine must not decide
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(_profile)

_PINNED = Path(__file__).with_name("pinned.txt")
_ANNOUNCEMENTS = ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning")

_MARK = "TRAJKIT_TEST_RUN"
# Waits until the run closes its input, or dies, and ends every process that has its mark.
_REAPER = f"""
import os, signal, sys
from pathlib import Path
mark = b"{_MARK}=" + sys.stdin.buffer.read()
for path in Path("/proc").glob("[0-9]*"):
    try:
        if mark in (path / "environ").read_bytes().split(b"\\0"):
            os.kill(int(path.name), signal.SIGKILL)
    except OSError:
        pass
"""


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main() -> Iterator[None]:
    """Helper processes of tests end with the run, however it ends.

    The processes of pytest-xdist are among them.
    """
    if _MARK in os.environ or not os.path.isdir("/proc"):
        return (yield)
    reaper = subprocess.Popen(
        [sys.executable, "-S", "-c", _REAPER],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    os.environ[_MARK] = uuid.uuid4().hex
    reaper.stdin.write(os.environ[_MARK].encode())
    reaper.stdin.flush()
    try:
        return (yield)
    finally:
        del os.environ[_MARK]
        reaper.communicate()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """With ``-n auto``: tests of servers and agents wait for a third of their time."""
    return max(os.cpu_count() or 1, 1) * 3 // 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """A worker gets a run of tests: those of a module share what it makes once."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def other_versions() -> list[str]:
    """The installed packages of tests/pinned.txt that have another version there."""
    found = []
    for line in _PINNED.read_text().splitlines():
        name, _, pinned = line.partition("==")
        try:
            if pinned and version(name).partition("+")[0] != pinned:
                found.append(f"{name} {version(name)}, not {pinned}")
        except PackageNotFoundError:
            pass
    return found


# what the extra `dev` has and `test` has not, by the name that is imported
_DEV = (
    *("PIL", "anthropic", "duckdb", "google.genai", "litellm", "matplotlib"),
    *("minisweagent", "openai", "pandas", "transformers"),
)
# what a module of tests imports whose stage installs more than `dev`
_OTHERS = ("torch",)
# helpers that import transformers when they are called
_OF_TRANSFORMERS = {
    "tests.shim.fakes.byte_tokenizer",
    "tests.shim.fakes.load_tokenizer",
}
_ROOT = Path(__file__).parents[1]


@cache
def imports(path: Path) -> frozenset[str]:
    """What a test module imports at its top, with what its helpers in tests/ import."""
    names: set[str] = set()
    text = path.read_text("utf-8")
    names.update(re.findall(r'importorskip\("([\w.]+)"', text))
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            names.update(each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{each.name}" for each in node.names)
    if names & _OF_TRANSFORMERS:
        names.add("transformers")
    for name in [name for name in names if name.startswith("tests.")]:
        helper = _ROOT / f"{name.replace('.', '/')}.py"
        if helper.is_file() and helper != path:
            names |= imports(helper)
    return frozenset(names)


def needed(path: Path, packages: tuple[str, ...] = _DEV) -> list[str]:
    """Those of the packages, or of the extra `dev`, that a test module needs."""
    return [
        package
        for package in packages
        if any(f"{name}.".startswith(f"{package}.") for name in imports(path))
    ]


def missing(path: Path) -> list[str]:
    """What a test module needs and is not installed."""
    needs = needed(path, (*_DEV, *_OTHERS))
    return [name for name in needs if not find_spec(name.partition(".")[0])]


class _NotRun(pytest.Module):
    def collect(self):
        needs = ", ".join(missing(self.path))
        pytest.skip(f"needs {needs}: see CONTRIBUTING.md", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector):
    """Skip a module that needs a package which is not installed."""
    if missing(module_path):
        return _NotRun.from_parent(parent, path=module_path)
    return None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """With TRAJKIT_TESTS=dev, only modules that need a package of `dev` run."""
    if os.environ.get("TRAJKIT_TESTS") != "dev" or collection_path.suffix != ".py":
        return None
    return None if needed(collection_path) else True


def pytest_configure(config: pytest.Config) -> None:
    """A release that came out today makes no test fail by what it announces."""
    if other_versions():
        for kind in _ANNOUNCEMENTS:
            config.addinivalue_line("filterwarnings", f"default::{kind}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Spare the garbage collector thousands of tests, which it would look at for long."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def pytest_report_header() -> list[str]:
    lines = [f"trajkit: {_core.BUILD} build of {_core.__file__}"]
    if other := other_versions():
        lines.append(f"announcements of libraries are no errors: {'; '.join(other)}")
    return lines
