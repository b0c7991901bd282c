"""Runs when a Python of a graded copy starts, before anything that an agent wrote.

Modules of the tests and of the workspace are found last, after those of Python. A test
runner is started again by this program, which proves that it came to its end: the secret of
the file ``nonce`` is taken before the first test is read. After the last one it signs the
results, the next secret is made of it, and the process ends. Meanwhile only an audit
hook has it, to which no frame and no module leads. Code in this process can still find it;
see docs/sandboxes.md.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


def _begin() -> None:
    with open(os.path.join(_HERE, "places"), errors="surrogateescape") as file:
        tests, workspace = file.read().split("\n")[:2]
    # sys.orig_argv is newer than some Pythons of images
    with open("/proc/self/cmdline", "rb") as file:
        arguments = [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
    k = 1
    while k < len(arguments) and arguments[k].startswith("-"):
        if arguments[k][-1] in "mc" and not arguments[k].startswith("--"):
            break
        k += 2 if arguments[k] in ("-W", "-X") else 1
    words = arguments[k:]
    if not words:
        return
    script, runner = os.path.realpath(words[0]), None
    if words[0][0] == "-":
        if words[0][-1] == "m" and words[1:2] in (["pytest"], ["unittest"]):
            runner = words[1:]
    elif os.path.basename(script) in ("pytest", "py.test"):
        runner = ["pytest", *words[1:]]
    elif script.startswith(tests + os.sep) or (
        # tests that come with the workspace
        script.startswith(workspace + os.sep)
        and os.path.basename(script).startswith("test_")
    ):
        runner = [script, *words[1:]]
    if runner is not None and os.path.exists(os.path.join(_HERE, "nonce")):
        # -m is one word with options before it, such as -Bm
        own = os.path.join(_HERE, "sitecustomize.py")
        os.execv(sys.executable, [sys.executable, *arguments[1:k], own, *runner])
    sys.path += [tests, workspace]
    if runner is None:
        # a program of the workspace
        sys.path.append(os.path.dirname(script))


# test runners, and what they and tests are made of
_PARTS = ("ast", "contextlib", "functools", "json", "math", "re")
_RUNNERS = ("unittest", "_pytest", "pluggy", "builtins", *_PARTS)
_SKIPS = ("skip", "Skip", "xfail", "expectedFailure")


def _is_runner(module: str) -> bool:
    return module.partition(".")[0] in _RUNNERS


def _is_test(file: str, places: list[str], program: str = "") -> bool:
    """Whether a file is one of the tests: in the workspace, by its name."""
    tests, workspace = (os.path.realpath(place) + os.sep for place in places)
    *folders, name = os.path.realpath(file).split(os.sep)
    if tests != workspace:
        return os.path.realpath(file).startswith(tests)
    named = name.startswith("test_") or name.endswith("_test.py")
    return named or "tests" in folders or name == "conftest.py" or file == program


def _text_of(module: str) -> str:
    return _text(getattr(sys.modules.get(module), "__file__", None) or "")


def _text(file: str) -> str:
    try:
        with open(file, encoding="utf-8", errors="replace") as text:
            return text.read()
    except (OSError, ValueError):
        return ""


def _watched(places: list[str] | None = None) -> dict[tuple[str, ...], Any]:
    """What a module under test must not change: functions and classes, by identity.

    Those of test runners, and with places also of the tests that are loaded.
    """
    import types

    # a test may import them only after what it tests
    for name in ("unittest", *_PARTS):
        __import__(name)

    functions = (types.FunctionType, types.BuiltinFunctionType)
    kinds = (*functions, type, staticmethod, classmethod, property)
    found: dict[tuple[str, ...], Any] = {}

    def add(owner: Any, *key: str) -> None:
        for name, value in list(vars(owner).items()):
            if isinstance(value, kinds):
                inner: Any = getattr(value, "__func__", value)
                codes: list[int] = []
                while inner is not None and len(codes) < 9:
                    codes.append(id(getattr(inner, "__code__", None)))
                    inner = getattr(inner, "__dict__", {}).get("__wrapped__")
                found[(*key, name)] = id(value), *codes
            elif isinstance(value, str) and key[0].startswith("unittest"):
                found[(*key, name)] = (value,)
            if len(key) == 1 and isinstance(value, type) and value.__module__ == key[0]:
                add(value, *key, name)

    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if _is_runner(name) or (places and file and _is_test(file, places)):
            add(module, name)
    return found


def _add_tests(before: dict[Any, Any], places: list[str]) -> None:
    # they are loaded, and so is what they test, which may have changed the rest
    known = {key[0] for key in before}
    watched = _watched(places).items()
    before.update({key: value for key, value in watched if key[0] not in known})
    # what a module of tests has, it names
    for name in {key[0] for key, _ in watched} - known:
        text, made = _text_of(name), ("import *", "globals()", "setattr(", "vars(")
        for each, value in list(vars(sys.modules[name]).items()):
            fine = each.startswith(("__", "@")) or isinstance(value, type(sys))
            if not fine and not any(word in text for word in (each, *made)):
                before[(name, each)] = ("not in the file",)


def _changed(before: dict[Any, Any], after: dict[Any, Any]) -> list[str]:
    from unittest import TestCase

    # also what a class got that it had not; one of the tests may set what is its own
    keys = before.keys() | {
        key
        for key in after
        if key[:-1] in before and (_is_runner(key[0]) or hasattr(TestCase, key[-1]))
    }
    changed = [key for key in keys if after.get(key) != before.get(key)]
    # a module of tests may exchange what it has
    lines = {key[0]: _text_of(key[0]).splitlines() for key in changed}
    return sorted(
        ".".join(key)
        for key in changed
        if _is_runner(key[0])
        or not any(" global " in f" {x}" and key[1] in x for x in lines[key[0]])
    )


def _says(
    error: BaseException | None, words: tuple[str, ...], places: list[str], program: str
) -> bool | None:
    """Whether the line that led to an exception is one of the tests, and names one.

    None: no line outside of test runners did, but a decorator.
    """
    last = None
    while error is not None and last is None:
        trace = error.__traceback__
        while trace is not None:
            names = trace.tb_frame.f_globals
            # python -m unittest has another name than its package
            name = str(names.get("__package__") or names.get("__name__"))
            of_runner = _is_runner(name) or name in ("runpy", "pytest")
            if not of_runner and names is not globals():
                last = trace
            trace = trace.tb_next
        error = error.__context__
    if last is None:
        return None
    file = last.tb_frame.f_code.co_filename
    lines = _text(file).splitlines()[last.tb_lineno - 1 :]
    line = lines[0] if lines else ""
    return _is_test(file, places, program) and any(word in line for word in words)


def _may_skip(error: BaseException | None, file: str, places: list[str]) -> bool:
    named = _says(error, _SKIPS, places, file)
    text = _text(file) + _text(os.path.join(places[0], "conftest.py"))
    return any(word in text for word in _SKIPS) if named is None else named


def _report_ends() -> None:
    """Have unittest report what ended a test, even if what it tests hides that."""
    from contextlib import contextmanager
    from unittest import case

    outcome: Any = case._Outcome  # type: ignore[attr-defined]
    real = outcome.testPartExecutor

    @contextmanager
    def executor(self: Any, test: Any, *given: Any, **named: Any) -> Any:
        with real(self, test, *given, **named):
            try:
                yield
            except BaseException as error:
                kind = type(getattr(test, "test_case", test))
                if "expectedFailure" not in _text_of(kind.__module__):
                    self.expecting_failure = False
                stop = isinstance(error, case._ShouldStop)  # type: ignore[attr-defined]
                if stop and not self.expecting_failure:
                    raise AssertionError("ended by what it tests") from error
                raise

    outcome.testPartExecutor = executor
    sys.audit("trajkit.watch", {"testPartExecutor": real.__wrapped__})


# Each returns the exit code, results by name, and what was changed while tests ran.


def _pytest(arguments: list[str], places: list[str]) -> tuple[Any, ...]:
    import pytest

    results: dict[str, bool] = {}

    class Plugin:
        # some of the plugins that load themselves change pytest, until its end
        before = after = _watched()
        ended = False
        late: Any = None

        @pytest.hookimpl(trylast=True)
        def pytest_configure(self, config: Any) -> None:
            # plugins are loaded, and none of them comes from here
            sys.path += places
            self.root = str(getattr(config, "rootpath", None) or config.rootdir)
            self.before = _watched()
            self.late = []

        def pytest_plugin_registered(self, plugin: Any) -> None:
            # from now on only those of pytest and of the tests
            kind = type(plugin)
            module = sys.modules.get(kind.__module__)
            found: Any = module
            for part in kind.__qualname__.split("."):
                found = getattr(found, part, None)
            known = found is kind
            if kind is type(sys):
                module, known = plugin, True
            file = getattr(module, "__file__", None) or ""
            outside = not os.path.realpath(file).startswith(
                os.path.realpath(places[1]) + os.sep
            )
            known = known and file != "" and (outside or _is_test(file, places))
            if self.late is not None and not known:
                self.late.append(f"plugin {plugin!r:.80}")

        def pytest_collection_finish(self) -> None:
            _add_tests(self.before, places)

        @pytest.hookimpl(tryfirst=True)
        def pytest_unconfigure(self) -> None:
            self.after = _watched(places)

        def pytest_keyboard_interrupt(self) -> None:
            # also by pytest.exit
            self.ended = True

        def judge(self, report: Any, item: Any, raised: Any) -> None:
            if report.outcome != "skipped":
                return
            error, file = raised and raised.value, str(getattr(item, "fspath", ""))
            # of an expected failure, a mark says so, not what was raised
            marked = hasattr(report, "wasxfail")
            if marked and not isinstance(error, pytest.xfail.Exception):
                error = None
            if not _may_skip(error, file, places):
                report.outcome, report.longrepr = "failed", "skipped by what it tests"
                vars(report).pop("wasxfail", None)

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
            raised = call.excinfo  # pytest replaces it by an exception of its own
            report = (yield).get_result()
            self.judge(report, item, raised or call.excinfo)

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_make_collect_report(self, collector: Any) -> Any:
            report = (yield).get_result()
            self.judge(report, collector, report.call.excinfo)

        def add(self, report: Any, passed: bool) -> None:
            # as `pytest -rA` prints it
            file, colons, rest = report.nodeid.partition("::")
            name = os.path.relpath(os.path.join(self.root, file)) + colons + rest
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
    sys.audit("trajkit.watch", vars(Plugin))
    code = int(pytest.main(arguments, plugins=[plugin])) or int(plugin.ended)
    code = code or int(not any(results.values()))
    changed = _changed(plugin.before, plugin.after)
    return code, results, [*changed, *(plugin.late or ())]


def _program(arguments: list[str], places: list[str]) -> tuple[Any, ...]:
    import runpy
    import traceback
    import unittest

    before: dict[Any, Any] = {}
    after: dict[Any, Any] = {}
    results: dict[str, bool] = {}

    class Result(unittest.TextTestResult):
        def startTestRun(self) -> None:
            super().startTestRun()
            _add_tests(before, places)

        def stopTestRun(self) -> None:
            super().stopTestRun()
            after.update(_watched(places))

        def addSkip(self, test: Any, reason: str) -> None:
            kind = type(getattr(test, "test_case", test))  # or that of a subtest
            file = getattr(sys.modules.get(kind.__module__), "__file__", "") or ""
            # a module that was skipped as a whole does not say by whom
            if kind.__name__ == "ModuleSkipped" or not _may_skip(
                sys.exc_info()[1], file, places
            ):
                self.failures.append((test, f"skipped by what it tests: {reason}"))
            super().addSkip(test, reason)

        def addSuccess(self, test: Any) -> None:
            super().addSuccess(test)
            results.setdefault(test.id(), True)

        def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
            super().addSubTest(test, subtest, err)
            if err is not None:
                results[test.id()] = False

        def stopTest(self, test: Any) -> None:
            super().stopTest(test)
            # neither a success nor reported as anything else
            results.setdefault(test.id(), False)

    # also of a program that ends with unittest.main()
    kind: Any = Result
    sys.audit("trajkit.watch", vars(Result))
    unittest.TextTestRunner.resultclass = kind
    sys.argv, code, program = arguments, 0, os.path.realpath(arguments[0])
    sys.path += [os.path.dirname(program)] if sys.flags.isolated else places
    before.update(_watched())
    try:
        if arguments[0] == "unittest":
            runpy.run_module("unittest", run_name="__main__")
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        # the program ended, but was it the program that ended it?
        words = ("exit", "Exit", "main(") if results else ("exit", "Exit")
        named = _says(end, words, places, program)
        if not end.code and not (
            arguments[0] == "unittest" if named is None else named
        ):
            sys.exit("what is tested ended the tests")
        code = int(end.code is not None)
        if isinstance(end.code, int):
            # one of a class of its own may have two values
            code = int.__add__(end.code, 0)
        sys.stderr.write(f"{end.code}\n" if isinstance(end.code, str) else "")
    except Exception:
        traceback.print_exc()
        code = 1
    # before Python 3.12, no test at all is a success
    ran = results or arguments[0] == "unittest"
    code = code or int(bool(ran) and not any(results.values()))
    return code, results, _changed(before, after or _watched())


def _keep(path: str, files: list[str], reward: list[str]) -> None:
    """Take the secret, and have an audit hook sign the results and end the process.

    ``files`` must not be written meanwhile, nor ``reward``: it is told after the tests.
    """
    import hashlib
    import types
    from json.encoder import encode_basestring_ascii as quoted

    with open(path) as file:
        nonce = file.read()
    os.unlink(path)
    own, main, frame_of, opened = globals(), sys._getframe(1), sys._getframe, open
    results_path, sha256, leave = (
        os.path.join(_HERE, "results"),
        hashlib.sha256,
        os._exit,
    )
    stat, plain = os.stat, types.FunctionType
    functions: list[Any] = []

    def state(name: str) -> object:
        try:
            found = stat(name)
        except OSError:
            return None
        # no program can choose the time of a change
        return found.st_ino, found.st_ctime_ns

    def watch(owner: Any) -> None:
        for name, value in list(owner.items()):
            if isinstance(value, plain):
                functions.append((owner, name, value, value.__code__))

    states = [(name, state(name)) for name in [*files, *reward]]

    def hook(event: str, given: tuple[Any, ...]) -> None:
        # calls no code of Python, which a module under test could exchange
        if event == "trajkit.watch":
            watch(given[0])
        if event != "trajkit.ended" or frame_of(1) is not main:
            return
        code, results, changed = given
        for owner, name, function, before in functions:
            if owner.get(name) is not function or function.__code__ is not before:
                changed = [*changed, f"trajkit.{name}"]
        changed = [
            *changed,
            *[name for name, before in states if state(name) != before],
        ]
        passed = [
            f"{quoted(k)}: {'true' if v else 'false'}" for k, v in results.items()
        ]
        text = f'{{"code": {code}, "results": {{{", ".join(passed)}}}'
        text += f', "changed": [{", ".join(map(quoted, changed))}]}}'
        signature = sha256(f"{nonce}{text}{nonce}".encode("ascii")).hexdigest()
        with opened(results_path, "ab", 0) as file:
            file.write(f"{signature} {text}\n".encode("ascii"))
        with opened(path, "wb", 0) as file:
            file.write(sha256(f"next {nonce}".encode("ascii")).hexdigest().encode())
        # no code that a module registered for the end runs
        leave(code)

    watch(own)
    sys.addaudithook(hook)


def _main() -> None:
    with open(os.path.join(_HERE, "places"), errors="surrogateescape") as file:
        tests, workspace, *names = file.read().split("\n")
    places, (_, *given) = [tests, workspace], sys.argv
    files = [os.path.join(tests, name) for name in names]
    files += [os.path.join(_HERE, name) for name in ("sitecustomize.py", "places")]
    logs = os.environ.get("LOGS", "")
    reward = [os.path.join(logs, f"reward.{end}") for end in ("txt", "json")]
    # a plain program may tell the reward itself
    runner = given[0] in ("pytest", "unittest")
    _keep(os.path.join(_HERE, "nonce"), files, reward if runner else [])
    _report_ends()
    pytest = given[0] == "pytest"
    run = _pytest(given[1:], places) if pytest else _program(given, places)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.audit("trajkit.ended", *run)


if __name__ == "__main__":
    _main()
_begin()
