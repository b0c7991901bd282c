"""Runs when a Python of a graded copy starts, before anything that an agent wrote.

Modules of the tests and of the workspace are found last, after those of Python. A test
runner is started again by this program, which gives the secret of the file ``nonce`` to an
audit hook before the first test is read. No frame and no module leads to the hook. It is
told each result, which nobody can take back; after the last test it signs them, makes the
next secret, and ends the process. Code in this process can still find it; see
docs/sandboxes.md.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, ClassVar

_HERE = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(_HERE, "places"), errors="surrogateescape") as _file:
    # two folders, and the files of the first one
    _TESTS, _WORKSPACE, *_NAMES = _file.read().split("\n")
_tell = sys.audit  # the hook of `_keep`

# test runners, and what they and tests are made of
_PARTS = ("ast", "contextlib", "functools", "json", "math", "re")
_RUNNERS = ("unittest", "_pytest", "pluggy", "builtins", *_PARTS)
# how a test says that it skips itself, or ends the process
_SKIPS, _EXITS = ("skip", "Skip", "xfail", "expectedFailure"), ("exit", "Exit")


def _begin() -> None:
    # sys.orig_argv is newer than some Pythons of images
    with open("/proc/self/cmdline", "rb") as file:
        arguments = [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
    k = 1
    while k < len(arguments) and arguments[k].startswith("-"):
        if arguments[k][-1] in "mc" and not arguments[k].startswith("--"):
            break
        k += 2 if arguments[k] in ("-W", "-X") else 1
    words, own = arguments[k:], os.path.join(_HERE, "sitecustomize.py")
    if not words or words[0] == own:
        return
    script, runner = os.path.realpath(words[0]), None
    if words[0][0] == "-":
        if words[0][-1] == "m" and words[1:2] in (["pytest"], ["unittest"]):
            runner = words[1:]
    elif os.path.basename(script) in ("pytest", "py.test"):
        runner = ["pytest", *words[1:]]
    elif script.startswith(_TESTS + os.sep) or (
        # tests that come with the workspace
        script.startswith(_WORKSPACE + os.sep)
        and os.path.basename(script).startswith("test_")
    ):
        runner = [script, *words[1:]]
    if runner is not None and os.path.exists(os.path.join(_HERE, "nonce")):
        # -m is one word with options before it, such as -Bm
        os.execv(sys.executable, [sys.executable, *arguments[1:k], own, *runner])
    sys.path += [_TESTS, _WORKSPACE]
    if runner is None:
        # a program of the workspace
        sys.path.append(os.path.dirname(script))


# What is believed of what happens while tests run


def _is_runner(module: str) -> bool:
    return module.partition(".")[0] in _RUNNERS


def _is_inside(file: str, folder: str) -> bool:
    # that of code without a file is <string>
    return file[:1] != "<" and os.path.realpath(file).startswith(
        os.path.realpath(folder) + os.sep
    )


def _is_test(file: str, program: str = "") -> bool:
    """Whether a file is one of the tests: in the workspace, by its name."""
    *folders, name = os.path.realpath(file).split(os.sep)
    named = name.startswith("test_") or name.endswith("_test.py")
    named = named or "tests" in folders or name == "conftest.py" or file == program
    apart = os.path.realpath(_TESTS) != os.path.realpath(_WORKSPACE)
    return _is_inside(file, _TESTS) and (apart or named)


def _file_of(module: object) -> str:
    return getattr(module, "__file__", None) or ""


def _text_of(module: str) -> str:
    return _text(_file_of(sys.modules.get(module)))


def _text(file: str) -> str:
    try:
        with open(file, encoding="utf-8", errors="replace") as text:
            return text.read()
    except (OSError, ValueError):
        return ""


def _watched(*, with_tests: bool = False) -> dict[tuple[str, ...], Any]:
    """What a module under test must not change: functions and classes, by identity.

    Those of test runners, and perhaps of the tests that are loaded.
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
        if _is_runner(name) or (with_tests and _is_test(_file_of(module))):
            add(module, name)
    return found


def _add_tests(before: dict[Any, Any]) -> None:
    # they are loaded, and so is what they test, which may have changed the rest
    known = {key[0] for key in before}
    watched = _watched(with_tests=True).items()
    before.update({key: value for key, value in watched if key[0] not in known})
    # what a module of tests has, it names
    for name in {key[0] for key, _ in watched} - known:
        text, made = _text_of(name), ("import *", "globals()", "setattr(", "vars(")
        for each, value in list(vars(sys.modules[name]).items()):
            fine = each.startswith(("__", "@")) or isinstance(value, type(sys))
            if not fine and not any(word in text for word in (each, *made)):
                before[(name, each)] = ("not in the file",)


def _compare(before: dict[Any, Any], after: dict[Any, Any]) -> None:
    from unittest import TestCase

    # also what a class got that it had not; one of the tests may set what is its own
    keys = before.keys() | {
        key
        for key in after
        if key[:-1] in before and (_is_runner(key[0]) or hasattr(TestCase, key[-1]))
    }
    for key in sorted(key for key in keys if after.get(key) != before.get(key)):
        # a module of tests may exchange what it has
        lines = _text_of(key[0]).splitlines()
        declared = any(" global " in f" {x}" and key[1] in x for x in lines)
        if _is_runner(key[0]) or not declared:
            _tell("trajkit.changed", ".".join(key))


def _says(
    error: BaseException | None, words: tuple[str, ...], program: str
) -> bool | None:
    """Whether the line that led to an exception is one of the tests, and names one.

    None: neither the tests nor what they test led to it, but a decorator.
    """
    file, line = "", 0
    while error is not None and not line:
        trace = error.__traceback__
        while trace is not None:
            name = trace.tb_frame.f_code.co_filename
            if _is_inside(name, _TESTS) or _is_inside(name, _WORKSPACE):
                file, line = name, trace.tb_lineno
            trace = trace.tb_next
        error = error.__context__
    if not line:
        return None
    text = "".join(_text(file).splitlines()[line - 1 : line])
    return _is_test(file, program) and any(word in text for word in words)


def _may_skip(error: BaseException | None, file: str) -> bool:
    named = _says(error, _SKIPS, file)
    text = _text(file) + _text(os.path.join(_TESTS, "conftest.py"))
    return any(word in text for word in _SKIPS) if named is None else named


def _mend_unittest() -> None:
    """Have unittest report what ended a test or module, even if what it tests hides it."""
    from contextlib import contextmanager
    from unittest import case, loader

    parts: Any = case
    outcome, load = parts._Outcome, vars(loader)
    run, skipped = outcome.testPartExecutor, load["_make_skipped_test"]

    @contextmanager
    def executor(self: Any, test: Any, *given: Any, **named: Any) -> Any:
        with run(self, test, *given, **named):
            try:
                yield
            except BaseException as error:
                kind = type(getattr(test, "test_case", test))
                if "expectedFailure" not in _text_of(kind.__module__):
                    self.expecting_failure = False
                if isinstance(error, parts._ShouldStop) and not self.expecting_failure:
                    raise AssertionError("ended by what it tests") from error
                raise

    def make_skipped(name: str, error: BaseException, suite: Any) -> Any:
        if _says(error, _SKIPS, ""):
            return skipped(name, error, suite)
        return load["_make_failed_test"](name, error, suite, f"{name}: skipped")

    # what they call is watched as they are
    vars(executor)["__wrapped__"].__wrapped__ = run
    vars(make_skipped)["__wrapped__"] = skipped
    outcome.testPartExecutor, load["_make_skipped_test"] = executor, make_skipped


# The runners. Each class tells the hook what happens, and each function returns a code.


def _plugin() -> type:
    import pytest

    class Plugin:
        before: ClassVar[dict[Any, Any]] = {}
        root = ""

        @pytest.hookimpl(trylast=True)
        def pytest_configure(self, config: Any) -> None:
            # plugins are loaded, and none of them comes from here; some change pytest
            sys.path += [_TESTS, _WORKSPACE]
            self.root = str(getattr(config, "rootpath", None) or config.rootdir)
            self.before.update(_watched())

        def pytest_plugin_registered(self, plugin: Any) -> None:
            # from then on only those of pytest and of the tests
            module: Any = plugin
            found: Any = type(plugin)
            kind = type(plugin)
            if kind is not type(sys):
                module = found = sys.modules.get(kind.__module__)
                for part in kind.__qualname__.split("."):
                    found = getattr(found, part, None)
            file = _file_of(module)
            outside = _is_test(file) or not _is_inside(file, _WORKSPACE)
            if self.before and not (found is kind and file and outside):
                _tell("trajkit.changed", f"plugin {plugin!r:.80}")

        def pytest_collection_finish(self, session: Any) -> None:
            _add_tests(self.before)
            for item in session.items:
                _tell("trajkit.collected", self.name_of(item))

        @pytest.hookimpl(tryfirst=True)
        def pytest_unconfigure(self) -> None:
            _compare(self.before, _watched(with_tests=True))
            self.before.clear()

        def pytest_keyboard_interrupt(self) -> None:
            # also by pytest.exit
            _tell("trajkit.result", "the end of all tests", False)

        def name_of(self, item: Any) -> str:
            # as `pytest -rA` prints it
            file, colons, rest = str(item.nodeid).partition("::")
            return os.path.relpath(os.path.join(self.root, file)) + colons + rest

        def judge(self, report: Any, item: Any, raised: Any) -> None:
            if report.outcome != "skipped":
                return
            error, file = raised and raised.value, str(getattr(item, "fspath", ""))
            # of an expected failure, a mark says so, not what was raised
            marked = hasattr(report, "wasxfail")
            if marked and not isinstance(error, pytest.xfail.Exception):
                error = None
            if not _may_skip(error, file):
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

        def pytest_runtest_logreport(self, report: Any) -> None:
            passed = {"passed": True, "failed": False}.get(report.outcome)
            if passed and hasattr(report, "wasxfail"):
                passed = None
            if report.when == "call" or not passed:
                _tell("trajkit.result", self.name_of(report), passed)

        def pytest_collectreport(self, report: Any) -> None:
            if report.outcome == "failed":
                self.pytest_runtest_logreport(report)

    return Plugin


def _run_pytest(kind: Any, arguments: list[str]) -> int:
    import pytest

    plugin = kind()
    # plugins may come with the tests, if these are not in the workspace
    sys.path += [_TESTS] * (_TESTS != _WORKSPACE)
    code = int(pytest.main(arguments[1:], plugins=[plugin]))
    if plugin.before:
        _tell("trajkit.changed", "the end of pytest")
    return code


def _result() -> type:
    import unittest

    class Result(unittest.TextTestResult):
        before: ClassVar[dict[Any, Any]] = {}
        after: ClassVar[dict[Any, Any]] = {}

        def startTestRun(self) -> None:
            super().startTestRun()
            _add_tests(self.before)

        def stopTestRun(self) -> None:
            super().stopTestRun()
            self.after.update(_watched(with_tests=True))

        def addSkip(self, test: Any, reason: str) -> None:
            kind = type(getattr(test, "test_case", test))  # or that of a subtest
            file = _file_of(sys.modules.get(kind.__module__))
            fine = _may_skip(sys.exc_info()[1], file)
            if not fine:
                self.failures.append((test, f"skipped by what it tests: {reason}"))
            super().addSkip(test, reason)
            _tell("trajkit.result", test.id(), None if fine else False)

        def addSuccess(self, test: Any) -> None:
            super().addSuccess(test)
            _tell("trajkit.result", test.id(), True)

        def addFailure(self, test: Any, err: Any) -> None:
            super().addFailure(test, err)
            _tell("trajkit.result", test.id(), False)

        def addError(self, test: Any, err: Any) -> None:
            super().addError(test, err)
            _tell("trajkit.result", test.id(), False)

        def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
            super().addSubTest(test, subtest, err)
            if err is not None:
                _tell("trajkit.result", test.id(), False)

    return Result


def _run_program(kind: Any, arguments: list[str]) -> int:
    import runpy
    import traceback
    import unittest

    # also of a program that ends with unittest.main()
    unittest.TextTestRunner.resultclass = kind
    sys.argv, code, program = arguments, 0, os.path.realpath(arguments[0])
    places = [_TESTS, _WORKSPACE]
    sys.path += [os.path.dirname(program)] if sys.flags.isolated else places
    kind.before.update(_watched())
    try:
        if arguments[0] == "unittest":
            runpy.run_module("unittest", run_name="__main__")
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        # the program ended, but was it the program that ended it?
        words = ("main(", *_EXITS) if kind.after else _EXITS
        named = _says(end, words, program)
        if named is None:
            named = arguments[0] == "unittest"
        if not end.code and not named:
            sys.exit("what is tested ended the tests")
        code = int(end.code is not None)
        if isinstance(end.code, int):
            # one of a class of its own may have two values
            code = int.__add__(end.code, 0)
        sys.stderr.write(f"{end.code}\n" if isinstance(end.code, str) else "")
    except Exception:
        traceback.print_exc()
        code = 1
    _compare(kind.before, kind.after or _watched())
    return code


# The end


def _keep(owners: list[Mapping[str, Any]], files: list[str]) -> None:
    """Take the secret, and have an audit hook sign the results and end the process.

    Meanwhile ``files`` must not be written, nor the functions of ``owners`` exchanged.
    """
    import hashlib
    import types
    from json.encoder import encode_basestring_ascii as quoted

    path, results_path = (os.path.join(_HERE, name) for name in ("nonce", "results"))
    with open(path) as file:
        nonce = file.read()
    os.unlink(path)
    main, frame_of, stat, leave = sys._getframe(1), sys._getframe, os.stat, os._exit
    opened, sha256, plain = open, hashlib.sha256, types.FunctionType
    results: dict[str, bool | None] = {}  # None: skipped, or failed as expected
    changed: list[str] = []
    collected: set[str] = set()

    def state(name: str) -> object:
        try:
            found = stat(name)
        except OSError:
            return None
        # no program can choose the time of a change
        return found.st_ino, found.st_ctime_ns

    states = [(name, state(name)) for name in files]
    values = [(owner, *item) for owner in owners for item in owner.items()]
    codes = [(v, name, v.__code__) for _, name, v in values if type(v) is plain]
    own = {id(code) for _, _, code in codes}

    told = ("result", "changed", "collected", "ended")
    events = ("sys._current_frames", *(f"trajkit.{event}" for event in told))
    whole = True

    def hook(event: str, given: tuple[Any, ...]) -> None:
        # It calls no code of Python, which a module under test could exchange, and raises
        # nothing: a traceback, or a look at this frame, would lead to the secret.
        nonlocal whole
        if event not in events:
            return
        before, whole = whole, False
        try:
            if event == "sys._current_frames":
                changed.append(event)
            elif id(frame_of(1).f_code) not in own:
                changed.append("a result that another program told")
            elif event == "trajkit.changed":
                changed.append("".join(given))
            elif event == "trajkit.collected":
                collected.add("".join(given))
            elif event == "trajkit.result":
                name, passed = "".join(given[:1]), given[1]
                if results.get(name) is not False and passed is not None:
                    results[name] = passed is True
                results.setdefault(name, None)
            elif frame_of(1) is main:
                end(before, *given)
            whole = before
        except BaseException:
            return

    def end(whole: bool, code: int, must_run: bool) -> None:
        changed.extend(
            [f"trajkit.{name}" for owner, name, v in values if owner.get(name) is not v]
            + [
                f"trajkit.{name}"
                for v, name, before in codes
                if v.__code__ is not before
            ]
            + [name for name, before in states if state(name) != before]
            + ["trajkit.results"] * (not whole)
        )
        failed = False in results.values() or (must_run and not results)
        # one that was not run is no success
        failed = failed or bool(collected - results.keys())
        code = code or int(failed)
        words = {True: "true", False: "false", None: "null"}
        told = [f"{quoted(name)}: {words[v]}" for name, v in results.items()]
        text = f'{{"code": {code}, "results": {{{", ".join(told)}}}'
        text += f', "changed": [{", ".join(map(quoted, changed))}]}}'
        signature = sha256(f"{nonce}{text}{nonce}".encode("ascii")).hexdigest()
        with opened(results_path, "ab", 0) as file:
            file.write(f"{signature} {text}\n".encode("ascii"))
        with opened(path, "wb", 0) as file:
            file.write(sha256(f"next {nonce}".encode("ascii")).hexdigest().encode())
        # no code that a module registered for the end runs
        leave(code)

    sys.addaudithook(hook)


def _main() -> None:
    given = sys.argv[1:]
    of_pytest, runner = given[0] == "pytest", given[0] in ("pytest", "unittest")
    files = [os.path.join(_TESTS, name) for name in _NAMES]
    files += [os.path.join(_HERE, name) for name in ("sitecustomize.py", "places")]
    if runner:
        # a plain program may tell the reward itself
        logs = os.environ.get("LOGS", "")
        files += [os.path.join(logs, f"reward.{end}") for end in ("txt", "json")]
    _mend_unittest()
    kind = _plugin() if of_pytest else _result()
    _keep([globals(), vars(kind)], files)
    code = _run_pytest(kind, given) if of_pytest else _run_program(kind, given)
    sys.stdout.flush()
    sys.stderr.flush()
    _tell("trajkit.ended", code, runner)


if __name__ == "__main__":
    _main()
_begin()
