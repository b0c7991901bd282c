"""Runs when a Python of a graded copy starts, before anything that an agent wrote.

Modules of the tests and of the workspace are found last, after those of Python. A test
runner runs here, and the program that it was started for does not. An audit hook gets the
secret of the file ``nonce`` before the first test is read; no frame and no module leads to
it. It hears each result, which nobody can take back, and what the functions were that
tests call. At the end it signs that, makes the next secret, and ends the process. Code in
this process can still find it; see docs/sandboxes.md. A program of the tests leaves a
secret of its own, in the file ``inner``, for the test runners that it starts.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(_HERE, "places"), errors="surrogateescape") as _file:
    # two folders, and files by their names in the first one: those of the tests, and after
    # a dot those of the workspace that its agent could not change
    _TESTS, _WORKSPACE, *_NAMES = _file.read().split("\n")
_TESTS, _WORKSPACE = map(os.path.realpath, (_TESTS, _WORKSPACE))
_APART = _TESTS != _WORKSPACE
_GIVEN = {os.path.realpath(os.path.join(_TESTS, name)) for name in _NAMES}
# modules by the names that files of the tests may give them
_OWN = [name[:-3] for name in _NAMES if name[0] != "." and name.endswith(".py")]
_NAMED = {name.replace(os.sep, ".") for name in _OWN}
_NAMED |= {name.rpartition(".")[2] for name in _NAMED}
_tell = sys.audit  # the hook of `_keep`
# watched modules: test runners, and the standard library, which has no list before 3.10
_RUNNERS = ("unittest", "_pytest", "pluggy", "builtins", "doctest")
_PARTS = "asyncio contextlib functools inspect json math posixpath re".split()
_STANDARD = frozenset(getattr(sys, "stdlib_module_names", _PARTS))
# programs of Python that run tests, by `python -m`
_MODULES = ("pytest", "unittest", "doctest")
# what runners look for in a module of tests
_HOOKS = ("pytest", "collect_ignore", "load_tests", "__test__", "setup", "teardown")
# a line that ends a program of tests
_EXIT = r"(?i)\b(exit|SystemExit|quit)\b|^\s*((unittest|pytest)\.)?main\("


def _begin() -> None:
    kind, *given = sys.argv
    # sys.orig_argv is newer than some Pythons of images
    with open("/proc/self/cmdline", "rb") as file:
        words = [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
    word, path = words[-1 - len(given)], os.path.realpath(kind or "-")
    first, inner = (os.path.exists(os.path.join(_HERE, x)) for x in ("nonce", "inner"))
    folder, name = os.path.split(path)
    if kind == "-m":
        # in one word with options before it, such as -Bm
        path = word.partition("m")[2] if word[0] == "-" else word
    elif name in ("pytest", "py.test"):
        path = "pytest"
    runs = path in _MODULES and (first or inner)
    if not runs or path != "pytest":
        sys.path += [_TESTS, _WORKSPACE, folder]
    if kind in ("", "-", "-c"):
        # without a name, a program is the standard input
        runs = first and (kind == "-c" or not os.isatty(0))
        if runs:
            path, text = _program(None if kind != "-c" else os.fsencode(word))
            runs = _names_own(text)
    elif path not in _MODULES:
        # setup.py is no program of tests, nor is each command of Django's
        other = name == "setup.py" or (name == "manage.py" and given[:1] != ["test"])
        runs = first and _is_test(path) and not other
    if runs:
        # their imports never end: threads would wait for that
        for each in ("site", "sitecustomize"):
            vars(sys.modules[each].__spec__)["_initializing"] = False
        _main([path, *given])


def _program(text: bytes | None) -> tuple[str, str]:
    """The path and the text of a program without a file; None: the standard input."""
    import fcntl

    file = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    given = b"".join(iter(lambda: os.read(0, 1 << 16), b"")) if text is None else text
    os.write(file, given)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, 15)
    if text is None:
        # the interpreter reads it again
        os.lseek(file, 0, os.SEEK_SET)
        os.dup2(file, 0)
    return f"/proc/self/fd/{file}", given.decode(errors="replace")


def _names_own(program: str) -> bool:
    """Whether a program names a module of the tests or of the workspace."""
    import re
    from importlib.util import find_spec

    places = []
    for word in set(re.findall(r"\w+", program)) - set(sys.modules):
        if spec := find_spec(word):
            places += [spec.origin or "", *(spec.submodule_search_locations or ())]
    return any(_is_inside(place, _TESTS, _WORKSPACE) for place in places)


def _is_inside(file: str, *folders: str) -> bool:
    # that of code without a file is <string>
    path = os.path.realpath(file) if file[:1] not in ("", "<") else ""
    return path.startswith(tuple(folder + os.sep for folder in folders))


def _is_test(file: str) -> bool:
    """Whether a file is one of the tests."""
    given = file[:1] not in ("", "<") and os.path.realpath(file) in _GIVEN
    return given or (_APART and _is_inside(file, _TESTS))


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
    """Import what the tests import of the standard library, before it can be changed."""
    import re
    from contextlib import suppress

    # the last one changes typing, and what is tested may be the first that imports it
    parts = {"doctest", "json", "math", "typing_extensions"}
    for file in _GIVEN:
        text = _text(file) if file.endswith(".py") else ""
        lines = re.findall(r"(?m)^\s*(?:from|import)\b.*", text)
        words = set(re.findall(r"\w+", " ".join(lines)))
        parts |= words & {*_STANDARD, "pytest"}
        if re.search(r"\b(async|mock)\b", text):
            parts.add("asyncio")
    for name in sorted(parts):
        with suppress(Exception):
            __import__(name)


def _watch(event: str) -> None:
    """Tell the functions and classes by their names; see ``event`` in `_keep`."""
    import types
    from unittest import TestCase

    functions = (types.FunctionType, types.BuiltinFunctionType)
    kinds = (*functions, type, staticmethod, classmethod, property)
    found: dict[str, object] = {}

    def add(owner: Any, module: str, key: str) -> None:
        mine = (*kinds, str) if key.startswith("unittest") else kinds
        names = []
        for name, value in list(vars(owner).items()):
            # pytest keeps warnings during each test
            code = issubclass(type(value), mine) and "showwarn" not in name
            if code or name == "__test__":
                found[f"{key}.{name}"] = value
                names.append(name)
            if key == module and isinstance(value, type) and value.__module__ == module:
                add(value, module, f"{key}.{name}")
        found[f"{key}.__class__"] = type(owner)
        if isinstance(owner, type):
            found[f"{key}.__bases__"] = owner.__mro__
            # a class of tests may get what is its own
            n = sum(runner or hasattr(TestCase, name) for name in names)
            found[f"{key}, which had {n} names"] = True

    for name, module in list(sys.modules.items()):
        file, root = _file_of(module), name.partition(".")[0]
        runner, test = root in _RUNNERS, _is_test(file)
        if runner or test or root in _STANDARD:
            add(module, name, name)
        if test and event == "trajkit.before":
            for each in _strange(name, module, _text(file)):
                _tell("trajkit.changed", f"{name}.{each}")
        elif "load_tests" in vars(module) and _is_inside(file, _WORKSPACE):
            # a package chooses its tests
            _tell("trajkit.changed", f"{name}.load_tests")
        if name in _NAMED and not (test or name in _STANDARD or name[:2] == "__"):
            _tell("trajkit.changed", f"{name}, which is a file of the tests")
    # the programs that tests start
    found[f"PATH={os.environ.get('PATH')}"] = True
    found[f"sys.executable={sys.executable}"] = True
    _tell(event, found)


def _strange(name: str, module: Any, text: str) -> Iterator[str]:
    """The names in a module of tests, or missing there, that its file does not explain."""
    import ast
    import builtins

    space = vars(module)
    if type(module) is not type(sys):
        yield "__class__"
    if space.get("__builtins__") not in (builtins, vars(builtins)):
        yield "__builtins__"
    nodes = _definitions(ast.parse(text))
    made = any(w in text for w in ("import *", "globals()", "setattr(", "vars("))
    for each, value in list(space.items()):
        # what a module of tests has, it defines, names, or makes of what is its own
        if node := nodes.get(each):
            fine = _is_from(module, value, node)
        elif each.lower().startswith(_HOOKS):
            fine = each in text
        else:
            fine = each in text or made or type(value) is not type(_text)
            fine = fine or _is_from(module, value)
        if not fine:
            yield each
    if name != "__main__" and "del " not in text:
        yield from sorted(nodes.keys() - space.keys())


def _definitions(node: Any) -> dict[str, Any]:
    """The functions and classes that a module or a class has, by name."""
    body = getattr(node, "body", ())
    return {x.name: x for x in body if hasattr(x, "decorator_list")}


def _is_tested(value: Any) -> bool:
    """Whether a module, function or class is from the workspace, and not from its tests."""
    name = getattr(value, "__module__", None) or getattr(value, "__name__", None)
    file = _file_of(sys.modules.get(name)) if isinstance(name, str) else ""
    return _is_inside(file, _WORKSPACE) and not _is_test(file)


def _is_from(module: Any, value: Any, node: Any = None) -> bool:
    """Whether a function or class is from a module's file, where ``node`` defines it."""
    import ast
    from inspect import unwrap

    for decorator in getattr(node, "decorator_list", ()):
        used = [getattr(part, "id", None) for part in ast.walk(decorator)]
        if any(_is_tested(vars(module).get(name)) for name in used):
            return True
    value = getattr(value, "fget", getattr(value, "__func__", value))
    if code := getattr(unwrap(value), "__code__", None):
        file = os.path.realpath(_file_of(module))
        return bool(os.path.realpath(code.co_filename) == file)
    if not isinstance(value, type):
        # an object that a decorator made
        return type(value).__module__ != "builtins" and not _is_tested(type(value))
    if any(_is_tested(each) for each in (type(value), *value.__mro__[1:])):
        return True
    had, parts = vars(value), _definitions(node).items()
    inner = [_is_from(module, had[name], part) for name, part in parts if name in had]
    return value.__module__ == module.__name__ and all(inner)


# The runners. What their class tells is believed.


def _plugin() -> type:
    import pytest

    class Plugin:
        ready, root, start = False, "", ""
        ran: set[str]

        def pytest_load_initial_conftests(self) -> None:
            # installed plugins are loaded, and none of them comes from here
            sys.path += [_TESTS, _WORKSPACE]
            self.ready = True
            _watch("trajkit.before")

        @pytest.hookimpl(tryfirst=True)
        def pytest_cmdline_main(self, config: Any) -> None:
            # conftest.py is read; what follows changes pytest
            _watch("trajkit.after")
            # options of pytest-xdist and pytest-forked: tests run in this process
            one: Any = {"numprocesses": None, "distload": False, "dist": "no", "tx": []}
            known, one["forked"] = vars(config.option), False
            known.update((key, one[key]) for key in one if key in known)

        @pytest.hookimpl(trylast=True)
        def pytest_configure(self, config: Any) -> None:
            self.root = str(getattr(config, "rootpath", None) or config.rootdir)
            # a test may change it
            self.start, self.ran = os.getcwd(), set()
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
            path = os.path.relpath(os.path.join(self.root, file), self.start)
            return path + colons + rest

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_call(self, item: Any) -> None:
            self.ran.add(item.nodeid)

        def pytest_runtest_logreport(self, report: Any) -> None:
            passed = {"passed": True, "failed": False}.get(report.outcome)
            if passed and hasattr(report, "wasxfail"):
                passed = None
            if passed and report.when == "call":
                # another process may tell anything
                passed = report.nodeid in self.ran
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


def _run(arguments: list[str], result: Any, plugin: Any = None) -> int:
    import runpy
    import traceback
    import unittest

    # also of a program that ends with unittest.main(), or pytest.main()
    unittest.TextTestRunner.resultclass = result
    sys.argv, name = arguments, arguments[0]
    if plugin is not None:
        parts: list[Any] = [sys.modules[x] for x in ("pytest", "_pytest.config")]
        start = parts[0].main

        def main(args: Any = None, plugins: Any = ()) -> Any:
            return start(args, [*(plugins or ()), plugin()])

        for part in parts:
            part.main = main
        if name == "pytest":
            # plugins may come with the tests, if these are not in the workspace
            sys.path += [_TESTS] * _APART
            return int(main(arguments[1:]))
    if sys.flags.isolated:
        sys.path.append(os.path.dirname(os.path.realpath(name)))
    _watch("trajkit.before")
    try:
        run: Any = runpy.run_module if name in _MODULES else runpy.run_path
        run(name, run_name="__main__")
    except SystemExit as end:
        if not end.code and not _ended_by_tests(end, name):
            os.write(2, b"what is tested ended the tests\n")
            os._exit(1)
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
    """Whether a line of the tests that names an exit ended them, or their runner did."""
    import re
    from traceback import walk_tb

    fine = program in _MODULES
    for frame, number in walk_tb(end.__traceback__):
        file = frame.f_code.co_filename
        if file == program or _is_inside(file, _TESTS, _WORKSPACE):
            line = "".join(_text(file).splitlines()[number - 1 : number])
            fine = re.search(_EXIT, line) is not None
            fine = fine and (file == program or _is_test(file))
        elif file == "<string>":
            fine = False
    return fine


def _keep(owners: list[Mapping[str, Any]], files: list[str], name: str) -> None:
    """Take the secret, and have an audit hook sign the results and end the process.

    Meanwhile ``files`` must not be written, nor the functions of ``owners`` exchanged.
    ``name``: of the program; test runners that it starts get a secret of their own,
    unless it is one.
    """
    from hashlib import sha256
    from types import FunctionType

    names = ("nonce", "inner", "results")
    path, inner_path, results_path = (os.path.join(_HERE, each) for each in names)
    if not os.path.exists(path):
        path = inner_path
    with open(path) as file:
        nonce = file.read()
    os.unlink(path)
    leaves = name not in _MODULES
    if leaves:
        with open(inner_path, "w") as file:
            file.write(sha256(f"inner {nonce}".encode("ascii")).hexdigest())
    main, frame_of = sys._getframe(1), sys._getframe
    stat, leave, unlink, opened = os.stat, os._exit, os.unlink, open
    kind_of, id_of, text_of = type, id, ascii
    inside, n_inside = _WORKSPACE + os.sep, len(_WORKSPACE) + 1
    before: dict[str, object] = {}
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
    # whoever traces can change the variables of a test, and skip its lines; whoever hears
    # events runs whenever it wants to
    traces = ("sys.settrace", "sys.setprofile", "sys.monitoring.register_callback")
    looks = ("sys._current_frames", "sys.addaudithook", *traces)
    events = ("object.__setattr__", *looks)

    def hook(event: str, given: tuple[Any, ...]) -> None:
        # It calls no code of Python, which a module under test could exchange, and raises
        # nothing: a traceback, or a look at this frame, would lead to the secret.
        nonlocal whole, compared
        if event not in events and event[:8] != "trajkit.":
            return
        was_whole, whole = whole, False
        try:
            if event == "object.__setattr__":
                function, what = given[:2]
                if kind_of(function) is FunctionType and kind_of(what) is str:
                    code = function.__code__
                    place = "".join((code.co_filename, ""))
                    theirs = place.startswith(inside) and "test" not in place[n_inside:]
                    # types.coroutine marks a generator, which does what it did
                    marked = code.replace(co_flags=code.co_flags | 0x100)
                    same = code.co_flags & 0x20 and kind_of(given[2]) is kind_of(code)
                    same = same and given[2] == marked
                    if what in codes and place[:1] != "<" and not (theirs or same):
                        changed.append("".join((function.__qualname__, ".", what)))
            elif event in looks:
                changed.append(event)
            elif id_of(frame_of(1).f_code) not in own:
                changed.append("a result that another program told")
            elif event == "trajkit.before":
                for key, value in given[0].items():
                    before.setdefault(key, value)
            elif event == "trajkit.after":
                changed.extend(k for k, v in before.items() if given[0].get(k) is not v)
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

    def end(whole: bool, code: int, must_run: bool, said: str) -> None:
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
        code = code or (1 if failed or idle else 0)
        inner = ""
        if leaves:
            with opened(inner_path) as file:
                inner = file.read(99)
            unlink(inner_path)
        parts = [*passed], [*failed], [*skipped], [*{*changed}]
        # a shell reads the code of a program without a file
        told = 0 if name.startswith("/proc/") else code
        text = text_of((told, *parts, inner, said))
        signature = sha256(f"{nonce}{text}{nonce}".encode("ascii")).hexdigest()
        with opened(results_path, "ab", 0) as file:
            file.write(f"{signature} {text}\n".encode("ascii"))
        with opened(path, "wb", 0) as file:
            file.write(sha256(f"next {nonce}".encode("ascii")).hexdigest().encode())
        # no code that a module registered for the end runs
        leave(code)

    sys.addaudithook(hook)


def _hear() -> list[str]:
    """Return the list of what this process prints from now on, which no other can add to.

    Nor can the programs that a script starts read its memory, or open its files.
    """
    import ctypes
    import io

    texts: list[str] = []

    class Output(io.TextIOWrapper):
        def write(self, text: str) -> int:
            texts.append(text)
            return super().write(text)

    sys.stdout = Output(sys.stdout.buffer, "utf-8", "backslashreplace")
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    return texts


def _main(given: list[str]) -> None:
    name, runner = given[0], given[0] in ("pytest", "unittest")
    # a plain program may tell the reward itself
    ends = ("txt", "json") if runner else ()
    files = [os.path.join(os.environ.get("LOGS", ""), f"reward.{x}") for x in ends]
    _mend_unittest()
    _import_parts()
    kinds = [_result()]
    if name == "pytest" or "pytest" in sys.modules:
        kinds.append(_plugin())
    _keep([globals(), *map(vars, kinds)], files, name)
    # of a script, what it prints is the reward
    texts = _hear() if sys.flags.isolated else []
    code = _run(given, *kinds)
    sys.stdout.flush()
    sys.stderr.flush()
    _tell("trajkit.ended", code, runner, "".join(texts).strip()[-300:])


if __name__ == "__main__":
    _main(sys.argv[1:])
else:
    _begin()
