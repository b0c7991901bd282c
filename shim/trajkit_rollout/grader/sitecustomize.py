"""Runs when a Python of a graded copy starts, before anything that an agent wrote.

Modules of the tests and of the workspace are found last, after those of Python. A test
runner is started again by this program, which gives the secret of the file ``nonce`` to an
audit hook before the first test is read. No frame and no module leads to the hook. It is
told each result, which nobody can take back, and what the functions were that tests call.
At the end it signs what it was told, makes the next secret, and ends the process. Code in
this process can still find it; see docs/sandboxes.md.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(_HERE, "places"), errors="surrogateescape") as _file:
    # two folders, and the files of the first one
    _TESTS, _WORKSPACE, *_NAMES = _file.read().split("\n")
_tell = sys.audit  # the hook of `_keep`
# watched modules: test runners, and those of the standard library that tests import
_RUNNERS = ("unittest", "_pytest", "pluggy", "builtins")
_PARTS = {"contextlib", "functools", "json", "math", "re"}
# what runners look for in a module of tests
_HOOKS = ("pytest", "load_tests", "setUpModule", "tearDownModule")
# a line that ends a program of tests
_EXIT = r"(?i)\b(exit|SystemExit|quit)\b|^\s*((unittest|pytest)\.)?main\("


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
    elif _is_inside(script, _TESTS) or (
        # tests that come with the workspace
        _is_inside(script, _WORKSPACE) and _is_named(script)
    ):
        runner = [script, *words[1:]]
    if runner is not None and os.path.exists(os.path.join(_HERE, "nonce")):
        # -m is one word with options before it, such as -Bm
        os.execv(sys.executable, [sys.executable, *arguments[1:k], own, *runner])
    sys.path += [_TESTS, _WORKSPACE]
    if runner is None:
        # a program of the workspace
        sys.path.append(os.path.dirname(script))


def _is_inside(file: str, folder: str) -> bool:
    # that of code without a file is <string>
    folder = os.path.realpath(folder) + os.sep
    return file[:1] != "<" and os.path.realpath(file).startswith(folder)


def _is_test(file: str) -> bool:
    """Whether a file is one of the tests: in the workspace, by its name."""
    apart = os.path.realpath(_TESTS) != os.path.realpath(_WORKSPACE)
    return _is_inside(file, _TESTS) and (apart or _is_named(file))


def _is_named(file: str) -> bool:
    """Whether a file of the workspace has the name of a test."""
    place = os.path.relpath(os.path.realpath(file), os.path.realpath(_WORKSPACE))
    *folders, name = place.split(os.sep)
    named = name.startswith("test_") or name.endswith("_test.py")
    return named or "tests" in folders or name == "conftest.py"


def _file_of(module: object) -> str:
    return getattr(module, "__file__", None) or ""


def _text(file: str) -> str:
    try:
        with open(file, encoding="utf-8", errors="replace") as text:
            return text.read()
    except (OSError, ValueError):
        return ""


# What code under test must not change


def _import_parts() -> None:
    """Import the modules of the standard library that the tests import."""
    import re

    for name in _NAMES:
        lines = re.findall(r"(?m)^\s*(?:from|import)\b.*", _text(f"{_TESTS}/{name}"))
        words = set(re.findall(r"\w+", " ".join(lines)))
        # newer than some Pythons of images
        _PARTS.update(words.intersection(getattr(sys, "stdlib_module_names", ())))
    for name in sorted(_PARTS):
        try:
            __import__(name)
        except Exception:
            _PARTS.discard(name)


def _watch(event: str) -> None:
    """Tell the functions and classes by module and name; see ``event`` in `_keep`."""
    import types
    from unittest import TestCase

    functions = (types.FunctionType, types.BuiltinFunctionType)
    kinds = (*functions, type, staticmethod, classmethod, property)
    modules: dict[str, dict[str, object]] = {}

    def add(found: dict[str, object], owner: Any, module: str, key: str) -> None:
        mine = (*kinds, str) if key.startswith("unittest") else kinds
        names = []
        for name, value in list(vars(owner).items()):
            if isinstance(value, mine):
                found[f"{key}.{name}"] = value
                names.append(name)
            if key == module and isinstance(value, type) and value.__module__ == module:
                add(found, value, module, f"{key}.{name}")
        if isinstance(owner, type):
            # a class of tests may get what is its own
            n = sum(runner or hasattr(TestCase, name) for name in names)
            found[f"{key}, which had {n} functions"] = True

    for name, module in list(sys.modules.items()):
        file = _file_of(module)
        runner, test = name.partition(".")[0] in _RUNNERS, _is_test(file)
        if runner or test or name in _PARTS:
            # an exact string, which has no code of its own
            exact = "".join((name,))
            add(modules.setdefault(exact, {}), module, exact, exact)
        if test and event == "trajkit.before":
            # what a module of tests has, it names
            text = _text(file)
            made = any(
                w in text for w in ("import *", "globals()", "setattr(", "vars(")
            )
            for each, value in list(vars(module).items()):
                fine = each.startswith(("__", "@")) or isinstance(value, type(sys))
                fine = fine or (made and not each.startswith(_HOOKS))
                if not (fine or each in text):
                    _tell("trajkit.changed", f"{name}.{each}")
        elif "load_tests" in vars(module) and _is_inside(file, _WORKSPACE):
            # a package chooses its tests
            _tell("trajkit.changed", f"{name}.load_tests")
    _tell(event, modules)


# The runners. What their class tells is believed.


def _plugin() -> type:
    import pytest

    class Plugin:
        ready = False
        root = ""

        def pytest_load_initial_conftests(self) -> None:
            # installed plugins are loaded, and none of them comes from here
            sys.path += [_TESTS, _WORKSPACE]
            self.ready = True
            _watch("trajkit.before")

        @pytest.hookimpl(tryfirst=True)
        def pytest_cmdline_main(self) -> None:
            # conftest.py is read; what follows changes pytest
            _watch("trajkit.after")

        @pytest.hookimpl(trylast=True)
        def pytest_configure(self, config: Any) -> None:
            self.root = str(getattr(config, "rootpath", None) or config.rootdir)
            _watch("trajkit.before")

        def pytest_plugin_registered(self, plugin: Any) -> None:
            # once ready, only those of pytest and of the tests
            found = module = plugin
            kind, name = type(plugin), getattr(plugin, "__name__", "")
            if kind is not type(sys):
                found = module = sys.modules.get(kind.__module__)
                for part in kind.__qualname__.split("."):
                    found = getattr(found, part, None)
                name = f"{kind.__module__}.{kind.__qualname__}"
            file = _file_of(module)
            theirs = _is_inside(file, _WORKSPACE) and not _is_test(file)
            fine = found in (kind, plugin) and file
            if theirs or (self.ready and not fine):
                hooks = [each for each in dir(plugin) if each.startswith("pytest_")]
                _tell("trajkit.changed", f"plugin {name:.80} {hooks}")

        def pytest_collection_finish(self, session: Any) -> None:
            _watch("trajkit.before")
            for item in session.items:
                _tell("trajkit.collected", self.name_of(item))

        @pytest.hookimpl(tryfirst=True)
        def pytest_unconfigure(self) -> None:
            _watch("trajkit.after")

        def name_of(self, item: Any) -> str:
            # as `pytest -rA` prints it
            file, colons, rest = str(item.nodeid).partition("::")
            return os.path.relpath(os.path.join(self.root, file)) + colons + rest

        def pytest_runtest_logreport(self, report: Any) -> None:
            passed = {"passed": True, "failed": False}.get(report.outcome)
            if passed and hasattr(report, "wasxfail"):
                passed = None
            if report.when == "call" or not passed:
                _tell("trajkit.result", self.name_of(report), passed)

        def pytest_collectreport(self, report: Any) -> None:
            if report.outcome != "passed":
                self.pytest_runtest_logreport(report)

    return Plugin


def _result() -> type:
    import unittest

    class Result(unittest.TextTestResult):
        def startTestRun(self) -> None:
            super().startTestRun()
            _watch("trajkit.before")

        def startTest(self, test: Any) -> None:
            super().startTest(test)
            _tell("trajkit.collected", test.id())

        def stopTestRun(self) -> None:
            super().stopTestRun()
            # before a program that ends takes its tests away
            _watch("trajkit.after")

    def telling(name: str, passed: bool | None) -> Callable[..., None]:
        def method(self: Any, test: Any, *given: Any) -> None:
            getattr(super(Result, self), name)(test, *given)
            # a subtest that passed is no result
            if name != "addSubTest" or given[1] is not None:
                _tell("trajkit.result", getattr(test, "test_case", test).id(), passed)

        return method

    passed = {"addSuccess": True, "addSkip": None, "addExpectedFailure": None}
    for name in (*passed, "addFailure", "addError", "addSubTest"):
        setattr(Result, name, telling(name, passed.get(name, False)))
    return Result


def _mend_unittest() -> None:
    """Have unittest report what ended a test, even if what it tests hides it."""
    from contextlib import contextmanager
    from unittest import case

    parts: Any = case
    run = parts._Outcome.testPartExecutor

    @contextmanager
    def executor(self: Any, *given: Any, **named: Any) -> Any:
        expected = self.expecting_failure
        with run(self, *given, **named):
            try:
                yield
            except BaseException as error:
                self.expecting_failure = expected
                if isinstance(error, parts._ShouldStop):
                    raise AssertionError("ended by what it tests") from error
                raise

    parts._Outcome.testPartExecutor = executor


def _run_pytest(arguments: list[str], plugin: Any) -> int:
    import pytest

    # plugins may come with the tests, if these are not in the workspace
    sys.path += [_TESTS] * (_TESTS != _WORKSPACE)
    return int(pytest.main(arguments[1:], plugins=[plugin()]))


def _run_program(arguments: list[str], result: Any) -> int:
    import runpy
    import traceback
    import unittest

    # also of a program that ends with unittest.main()
    unittest.TextTestRunner.resultclass = result
    sys.argv, name = arguments, arguments[0]
    folder = os.path.dirname(os.path.realpath(name))
    sys.path += [folder] if sys.flags.isolated else [_TESTS, _WORKSPACE]
    _watch("trajkit.before")
    try:
        run: Any = runpy.run_module if name == "unittest" else runpy.run_path
        run(name, run_name="__main__")
    except SystemExit as end:
        if not end.code and not _ended_by_tests(end, name):
            sys.exit("what is tested ended the tests")
        if isinstance(end.code, int):
            # one of a class of its own may have two values
            return int.__add__(end.code, 0)
        sys.stderr.write(f"{end.code}\n" if end.code else "")
        return int(end.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        _watch("trajkit.after")
    return 0


def _ended_by_tests(end: SystemExit, program: str) -> bool:
    """Whether a line of the tests that names an exit ended them, or unittest did."""
    import re

    file, line, trace = "", 0, end.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if _is_inside(name, _TESTS) or _is_inside(name, _WORKSPACE):
            file, line = name, trace.tb_lineno
        trace = trace.tb_next
    if not line:
        return program == "unittest"
    text = "".join(_text(file).splitlines()[line - 1 : line])
    names = re.search(_EXIT, text) is not None
    return names and (_is_test(file) or file == program)


def _keep(owners: list[Mapping[str, Any]], files: list[str]) -> None:
    """Take the secret, and have an audit hook sign the results and end the process.

    Meanwhile ``files`` must not be written, nor the functions of ``owners`` exchanged.
    """
    from hashlib import sha256
    from types import FunctionType

    path, results_path = (os.path.join(_HERE, name) for name in ("nonce", "results"))
    with open(path) as file:
        nonce = file.read()
    os.unlink(path)
    main, frame_of = sys._getframe(1), sys._getframe
    stat, leave, opened = os.stat, os._exit, open
    inside = os.path.realpath(_WORKSPACE) + os.sep
    n_inside = len(inside)
    before: dict[str, dict[str, object]] = {}
    collected: set[str] = set()
    # the tests that passed, those that failed, and those skipped or expected to fail
    results: dict[bool | None, set[str]] = {True: set(), False: set(), None: set()}
    changed: list[str] = []
    whole, compared = True, False

    def state(name: str) -> object:
        try:
            found = stat(name)
        except OSError:
            return None
        # no program can choose the time of a change
        return found.st_ino, found.st_ctime_ns

    states = [(name, state(name)) for name in files]
    values = [(owner, *item) for owner in owners for item in owner.items()]
    own = {id(getattr(value, "__code__", None)) for _, _, value in values}

    codes = ("__code__", "__defaults__", "__kwdefaults__")
    told = ("before", "after", "collected", "result", "changed", "ended")
    own_events = [f"trajkit.{event}" for event in told]
    # whoever traces can change the variables of a test, and skip its lines
    traces = ("sys.settrace", "sys.setprofile", "sys.monitoring.register_callback")
    looks = ("sys._current_frames", *traces)
    events = ("object.__setattr__", *looks, *own_events)

    def hook(event: str, given: tuple[Any, ...]) -> None:
        # It calls no code of Python, which a module under test could exchange, and raises
        # nothing: a traceback, or a look at this frame, would lead to the secret.
        nonlocal whole, compared
        if event not in events:
            return
        was_whole, whole = whole, False
        try:
            if event == "object.__setattr__":
                function, what = given[:2]
                if type(function) is FunctionType and type(what) is str:
                    code = function.__code__
                    place = "".join((code.co_filename, ""))
                    theirs = place.startswith(inside) and "test" not in place[n_inside:]
                    # types.coroutine marks a generator, which does what it did
                    marked = code.replace(co_flags=code.co_flags | 0x100)
                    same = code.co_flags & 0x20 and given[2] == marked
                    if what in codes and place[:1] != "<" and not (theirs or same):
                        changed.append("".join((function.__qualname__, ".", what)))
            elif event in looks:
                changed.append(event)
            elif id(frame_of(1).f_code) not in own:
                changed.append("a result that another program told")
            elif event == "trajkit.before":
                before.update([x for x in given[0].items() if x[0] not in before])
            elif event == "trajkit.after":
                for name, old in before.items():
                    new = given[0].get(name, {})
                    changed.extend(k for k in old if new.get(k) is not old[k])
                before.clear()
                compared = True
            elif event == "trajkit.changed":
                changed.append("".join(given))
            elif event == "trajkit.collected":
                collected.add("".join(given))
                compared = False
            elif event == "trajkit.result":
                results[given[1]].add("".join(given[:1]))
                compared = False
            elif frame_of(1) is main:
                end(was_whole, *given)
            whole = was_whole
        except BaseException:
            return

    def end(whole: bool, code: int, must_run: bool) -> None:
        changed.extend(
            [f"trajkit.{k}" for owner, k, v in values if owner.get(k) is not v]
        )
        changed.extend([name for name, before in states if state(name) != before])
        changed.extend(["trajkit.results"] * (not whole or not compared))
        # one that was not run is no success
        failed = results[False] | (collected - results[True] - results[None])
        passed = results[True] - failed
        skipped = results[None] - failed - passed
        idle = must_run and not (passed or skipped)
        code = code or int(bool(failed) or idle)
        parts = passed, failed, skipped, set(changed)
        text = ascii((code, *map(list, parts)))
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
    _import_parts()
    kind = _plugin() if of_pytest else _result()
    _keep([globals(), vars(kind)], files)
    code = (_run_pytest if of_pytest else _run_program)(given, kind)
    sys.stdout.flush()
    sys.stderr.flush()
    _tell("trajkit.ended", code, runner)


if __name__ == "__main__":
    _main()
_begin()
