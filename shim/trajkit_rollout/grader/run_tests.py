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
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_KINDS = (
    *(types.FunctionType, types.BuiltinFunctionType, type),
    *(staticmethod, classmethod, property),
)


def _watched() -> dict[tuple[str, ...], tuple[int, int]]:
    """What a module under test must not change: identities of functions and classes."""
    found = {}

    def add(key: tuple[str, ...], value: object) -> None:
        if isinstance(value, _KINDS):
            function = getattr(value, "__func__", value)
            found[key] = id(value), id(getattr(function, "__code__", None))

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("unittest", "_pytest", "pluggy", "builtins"):
            for key, value in list(vars(module).items()):
                add((name, key), value)
                if isinstance(value, type) and value.__module__ == name:
                    for inner, method in list(vars(value).items()):
                        add((name, key, inner), method)
    return found


def _changed(before: dict[Any, Any], after: dict[Any, Any] | None = None) -> list[str]:
    after = after or _watched()
    return sorted(".".join(key) for key, was in before.items() if after.get(key) != was)


def _raiser(error: BaseException | None, test: str, places: list[str]) -> str | None:
    """The file of the workspace, no test, whose code raised an exception.

    Or whose exception made a test skip itself.
    """
    tests, workspace = (os.path.realpath(place) + os.sep for place in places)
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            name = trace.tb_frame.f_code.co_filename
            file = os.path.realpath(name)
            is_test = file == test or file.startswith(tests)
            if tests == workspace:
                # an agent may not change helpers of tests
                names = file[len(workspace) :].split(os.sep)
                is_test = file == test or "tests" in names or "conftest.py" in names
            # what exec runs may have any name
            made = name.startswith("<") and not name.startswith("<frozen ")
            if made or (file.startswith(workspace) and not is_test):
                return name
            trace = trace.tb_next
        error = None if isinstance(error, SystemExit) else error.__context__
    return None


# Each returns the exit code, results by name, and what was changed while tests ran.


def _pytest(arguments: list[str], places: list[str]) -> tuple[Any, ...]:
    import pytest

    results: dict[str, bool] = {}

    class Plugin:
        # some of the plugins that load themselves change pytest, until its end
        before = _watched()
        after: dict[Any, Any] | None = None
        own = "PYTEST_DISABLE_PLUGIN_AUTOLOAD" in os.environ
        ended = False

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

        def pytest_keyboard_interrupt(self) -> None:
            # also by pytest.exit
            self.ended = True

        def judge(self, report: Any, path: object, error: BaseException | None) -> None:
            if report.outcome != "skipped":
                return
            raiser = _raiser(error, os.path.realpath(str(path)), places)
            if raiser is not None:
                report.outcome, report.longrepr = "failed", f"skipped by {raiser}"
                vars(report).pop("wasxfail", None)

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
            error = call.excinfo and call.excinfo.value
            self.judge((yield).get_result(), item.fspath, error)

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_make_collect_report(self, collector: Any) -> Any:
            report = (yield).get_result()
            error = report.call.excinfo and report.call.excinfo.value
            self.judge(report, getattr(collector, "fspath", ""), error)

        def add(self, report: Any, passed: bool) -> None:
            # as `pytest -rA` prints it
            file, colons, rest = report.nodeid.partition("::")
            root: object = getattr(self.config, "rootpath", None) or self.config.rootdir
            name = os.path.relpath(os.path.join(str(root), file)) + colons + rest
            results[name] = results.get(name, True) and passed

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                # an expected failure is no pass
                expected = hasattr(report, "wasxfail")
                self.add(report, report.outcome == "passed" and not expected)

        def pytest_collectreport(self, report: Any) -> None:
            if report.outcome == "failed":
                self.add(report, False)

    plugin = Plugin()
    code = int(pytest.main(arguments, plugins=[plugin])) or int(plugin.ended)
    return code, results, _changed(plugin.before, plugin.after)


def _unittest(arguments: list[str], places: list[str]) -> tuple[Any, ...]:
    results: dict[str, bool] = {}

    class Result(unittest.TextTestResult):
        def addSkip(self, test: Any, reason: str) -> None:
            error = sys.exc_info()[1]
            kind = type(getattr(test, "test_case", test))  # or that of a subtest
            file = getattr(sys.modules.get(kind.__module__), "__file__", "")
            raiser = _raiser(error, os.path.realpath(str(file)), places)
            # a module that was skipped as a whole does not say by whom
            if raiser is not None or kind.__name__ == "ModuleSkipped":
                self.failures.append((test, f"skipped by {raiser}: {reason}"))
            super().addSkip(test, reason)

        def addSuccess(self, test: Any) -> None:
            super().addSuccess(test)
            results[test.id()] = results.get(test.id(), True)

        def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
            super().addSubTest(test, subtest, err)
            if err is not None:
                results[test.id()] = False

        def addError(self, test: Any, err: Any) -> None:
            super().addError(test, err)
            results[test.id()] = False

        def stopTest(self, test: Any) -> None:
            super().stopTest(test)
            # neither a success nor reported as anything else
            results.setdefault(test.id(), False)

    sys.path += places
    before = _watched()
    argv = ["python -m unittest", *arguments]
    kind: Any = Result
    runner = unittest.TextTestRunner(resultclass=kind)
    done = unittest.main(module=None, argv=argv, testRunner=runner, exit=False).result
    # before Python 3.12, no test at all is a success
    code = 0 if done.wasSuccessful() and done.testsRun else 1
    return code, results, _changed(before)


def _script(arguments: list[str], places: list[str]) -> tuple[Any, ...]:
    import runpy

    sys.argv = arguments
    script, code = os.path.realpath(arguments[0]), 0
    sys.path += [os.path.dirname(script)] if sys.flags.isolated else places
    before = _watched()
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        # the program ended, but was it the program that ended it?
        raiser = _raiser(end, script, places)
        if raiser is not None and not end.code:
            sys.exit(f"{raiser} ended the tests")
        if isinstance(end.code, int):
            code = end.code
        elif end.code is not None:
            sys.stderr.write(f"{end.code}\n")
            code = 1
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
    given, runners = sys.argv[1:], {"pytest": _pytest, "unittest": _unittest}
    if given[0] in runners:
        code, results, changed = runners[given[0]](given[1:], places)
    else:
        code, results, changed = _script(given, places)
    sys.stdout.flush()
    sys.stderr.flush()
    proof = {"code": code, "results": results, "changed": changed, "nonce": nonce}
    with open(os.path.join(_HERE, "results"), "a") as file:
        file.write(json.dumps(proof) + "\n")
    with open(path, "w") as file:
        file.write(nonce)
    return int(code)


if __name__ == "__main__":
    sys.exit(_main())
