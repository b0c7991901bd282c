"""A plugin of pytest that runs tests once for each fault, in a process of its own.

The tests are collected once. Each fault then gets a fork of the process, in which it is planted
and its tests run up to the first that fails, whose name goes to the file TRAJKIT_FOUND.
"""

import importlib
import json
import os
import select
import signal
import traceback
import types
from contextlib import contextmanager
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

from tests.faults.planted import Fault, all_faults
from trajkit import _core

_SECONDS = 900  # a fault may keep a kernel from ending
_PLAIN = (int, float, str, bytes, tuple, frozenset)


def plant(fault: Fault, number: int) -> None:
    """Put a fault into this process."""
    if fault.of_kernel:
        _core.select_fault(number)
        return
    name = fault.file.removesuffix(".py").removeprefix("shim/").replace("/", ".")
    module = importlib.import_module(name)
    # its file has the fault already
    code = compile(Path(module.__file__).read_text(), module.__file__, "exec")
    fresh = types.ModuleType(name)
    fresh.__file__, fresh.__package__ = module.__file__, module.__package__
    exec(code, vars(fresh))
    _transplant(vars(module), vars(fresh), name)


@contextmanager
def in_file(fault: Fault, number: int):
    """Have a fault in its file, too, for the processes that tests start."""
    path = Path(fault.file)
    text = path.read_text()
    if not fault.of_kernel:
        assert text.count(fault.old) == 1
        path.write_text(text.replace(fault.old, fault.new))
        # no compiled file is of this time
        os.utime(path, (number, number))
    try:
        yield
    finally:
        if not fault.of_kernel:
            path.write_text(text)


def _transplant(old, new, module):
    """Give the functions of a namespace, and of its classes, the code of their namesakes."""
    for name, value in list(new.items()):
        before = old.get(name)
        if isinstance(value, type):
            if value.__module__ == module and isinstance(before, type):
                _transplant(vars(before), vars(value), module)
        elif isinstance(value, _PLAIN) and before != value and isinstance(old, dict):
            old[name] = value
        else:
            both = zip(_functions(before), _functions(value), strict=False)
            for one, other in both:
                if other.__module__ == module:
                    one.__code__ = other.__code__
                    one.__defaults__ = other.__defaults__
                    one.__kwdefaults__ = other.__kwdefaults__


def _functions(value):
    """The function that a value is or has, and those around which it is made."""
    while value is not None:
        if isinstance(value, types.FunctionType):
            yield value
        names = ("__wrapped__", "__func__", "fget", "func")
        value = next((getattr(value, n) for n in names if hasattr(value, n)), None)


def _in_child(items, fault, number, pipe):
    """Never returns."""
    try:
        plant(fault, number)
    except BaseException:
        # nothing was planted, so nothing was caught
        traceback.print_exc()
        os._exit(0)
    try:
        for item in items:
            reports = runtestprotocol(item, log=False, nextitem=None)
            if any(report.failed for report in reports):
                os.write(pipe, item.nodeid.encode())
                break
    except BaseException as error:
        os.write(pipe, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(0)


def _first_failure(items, fault, number):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _in_child(items, fault, number, write)
    os.close(write)
    ready, _, _ = select.select([read], [], [], _SECONDS)
    if not ready:
        os.kill(child, signal.SIGKILL)
    found = os.read(read, 4096).decode() if ready else "no end"
    os.close(read)
    _, status = os.waitpid(child, 0)
    if ready and not found and status:
        return f"signal {status}"
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    numbers = json.loads(os.environ["TRAJKIT_FAULTS"])
    with open(os.environ["TRAJKIT_FOUND"], "a") as out:
        for number in numbers:
            fault = all_faults()[number]
            items = [
                item
                for path, _, word in (test.partition(":") for test in fault.tests)
                for item in session.items
                if item.nodeid.startswith((f"{path}::", f"{path}/"))
                and word in item.nodeid
            ]
            assert items, fault.tests
            with in_file(fault, number):
                found = _first_failure(items, fault, number)
            print(json.dumps([number, found]), file=out, flush=True)
    return True
