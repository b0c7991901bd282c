"""Runs when a Python of a graded copy starts, before anything that an agent wrote.

Modules of the tests and of the workspace are found last, after those of Python. A test
runner is started again under `run_tests.py`, which proves that it came to its end.
"""

from __future__ import annotations

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _begin() -> None:
    with open(os.path.join(_HERE, "places")) as file:
        tests, workspace = file.read().split("\n")
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
        own = os.path.join(_HERE, "run_tests.py")
        os.execv(sys.executable, [sys.executable, *arguments[1:k], own, *runner])
    sys.path += [tests, workspace]
    if runner is None:
        # a program of the workspace
        sys.path.append(os.path.dirname(script))


_begin()
