"""Runs tests in a graded copy, and proves that they came to their end.

The proof is a secret of the file ``nonce``. It is taken before the first test is read,
and put back with the results after the last one. A process that an agent's code ends
early puts back nothing. Code in this process can still find the secret; see
docs/sandboxes.md.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import types
import unittest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _Watched = dict[tuple[str, ...], tuple[int, int]]
    # exit code, results by name, and what was changed while tests ran
    _Outcome = tuple[int, dict[str, bool] | None, list[str]]

_HERE = os.path.dirname(os.path.abspath(__file__))

_KINDS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    type,
    staticmethod,
    classmethod,
    property,
)


def _watched() -> _Watched:
    """What a module under test must not change: identities of functions and classes."""
    found: _Watched = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("unittest", "_pytest", "pluggy", "builtins"):
            for key, value in list(vars(module).items()):
                if isinstance(value, _KINDS):
                    found[name, key] = _identity(value)
                    if isinstance(value, type) and value.__module__ == name:
                        for inner, method in list(vars(value).items()):
                            if isinstance(method, _KINDS):
                                found[name, key, inner] = _identity(method)
    return found


def _identity(value: object) -> tuple[int, int]:
    function = getattr(value, "__func__", value)
    return id(value), id(getattr(function, "__code__", None))


def _changed(before: _Watched, after: _Watched | None = None) -> list[str]:
    after = after or _watched()
    return sorted(".".join(key) for key, was in before.items() if after.get(key) != was)


class _Tests:
    """Which tests passed. One with several results passed if all of them did."""

    def __init__(self) -> None:
        self.results: dict[str, bool] = {}

    def add(self, name: str, passed: bool) -> None:
        self.results[name] = self.results.get(name, True) and passed


def _pytest(arguments: list[str], places: list[str]) -> _Outcome:
    import pytest

    class Plugin(_Tests):
        # some of the plugins that load themselves change pytest, until its end
        before = _watched()
        after: _Watched | None = None
        own = "PYTEST_DISABLE_PLUGIN_AUTOLOAD" in os.environ

        @pytest.hookimpl(trylast=True)
        def pytest_configure(self, config: Any) -> None:
            # plugins are loaded, and none of them comes from here
            sys.path += places
            self.config = config
            if not self.own:
                self.before = _watched()

        @pytest.hookimpl(tryfirst=True)
        def pytest_unconfigure(self) -> None:
            if not self.own:
                self.after = _watched()

        def name(self, report: Any) -> str:
            # as `pytest -rA` prints it
            nodeid: str = report.nodeid
            file, colons, rest = nodeid.partition("::")
            root: object = getattr(self.config, "rootpath", None) or self.config.rootdir
            return os.path.relpath(os.path.join(str(root), file)) + colons + rest

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                # an expected failure is no pass
                passed = report.outcome == "passed" and not hasattr(report, "wasxfail")
                self.add(self.name(report), passed)

        def pytest_collectreport(self, report: Any) -> None:
            if report.outcome == "failed":
                self.add(self.name(report), False)

    plugin = Plugin()
    code = int(pytest.main(arguments, plugins=[plugin]))
    return code, plugin.results, _changed(plugin.before, plugin.after)


def _unittest(arguments: list[str], places: list[str]) -> _Outcome:
    tests = _Tests()

    class Result(unittest.TextTestResult):
        def addSuccess(self, test: Any) -> None:
            super().addSuccess(test)
            tests.add(test.id(), True)

        def stopTest(self, test: Any) -> None:
            super().stopTest(test)
            # neither a success nor reported as anything else
            tests.results.setdefault(test.id(), False)

        def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
            super().addSubTest(test, subtest, err)
            if err is not None:
                tests.add(test.id(), False)

        def addError(self, test: Any, err: Any) -> None:
            super().addError(test, err)
            tests.add(test.id(), False)

    sys.path += places
    before = _watched()
    argv = ["python -m unittest", *arguments]
    kind: Any = Result
    runner = unittest.TextTestRunner(resultclass=kind)
    done = unittest.main(module=None, argv=argv, testRunner=runner, exit=False).result
    # before Python 3.12, no test at all is a success
    code = 0 if done.wasSuccessful() and done.testsRun else 1
    return code, tests.results, _changed(before)


def _script(arguments: list[str], places: list[str]) -> _Outcome:
    import runpy

    sys.argv = arguments
    script, code = os.path.realpath(arguments[0]), 0
    isolated = sys.flags.isolated
    sys.path += [os.path.dirname(script)] if isolated else places
    before = _watched()
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, int):
            code = end.code
        elif end.code is not None:
            sys.stderr.write(f"{end.code}\n")
            code = 1
        # the program ended, but was it the program that ended it?
        trace, workspace = end.__traceback__, places[-1] + os.sep
        while trace is not None:
            name = trace.tb_frame.f_code.co_filename
            file = os.path.realpath(name)
            if name[0] != "<" and file != script and file.startswith(workspace):
                sys.exit(f"{file} ended the tests")
            trace = trace.tb_next
    except Exception:
        traceback.print_exc()
        code = 1
    return code, None, _changed(before)


def _main() -> int:
    with open(os.path.join(_HERE, "places")) as file:
        places = file.read().split("\n")
    path = os.path.join(_HERE, "nonce")
    with open(path) as file:
        nonce = file.read()
    os.unlink(path)
    del sys.argv[0]
    kinds = {"pytest": _pytest, "unittest": _unittest}
    first = sys.argv[0]
    if first in kinds:
        code, results, changed = kinds[first](sys.argv[1:], places)
    else:
        code, results, changed = _script(list(sys.argv), places)
    sys.stdout.flush()
    sys.stderr.flush()
    proof = {"code": code, "results": results, "changed": changed}
    with open(os.path.join(_HERE, "results"), "a") as file:
        file.write(json.dumps(dict(proof, nonce=nonce)) + "\n")
    with open(path, "w") as file:
        file.write(nonce)
    return code


if __name__ == "__main__":
    sys.exit(_main())
