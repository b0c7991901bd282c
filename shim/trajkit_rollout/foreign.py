"""Tasks in the form of other projects, read as they are.

A *Harbor* task is a folder with ``instruction.md``, ``task.toml``,
``environment/Dockerfile``, ``tests/test.sh`` and maybe ``solution/solve.sh``. Its tests are
in ``/tests`` and write a reward to ``/logs/verifier/reward.txt``. An agent may change all
of its working directory. Reference: https://harborframework.com/docs/tasks.

A *SWE-bench* task is a record of its data sets: ``instance_id``, ``problem_statement``,
``patch``, ``FAIL_TO_PASS`` and others. It runs in the image of its instance, and
SWE-bench's own harness grades it.
"""

import hashlib
import json
import posixpath
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from trajkit_rollout.files import Folder, Texts
from trajkit_shim.json_input import as_name, as_number, as_object, as_text, refuse

Foreign: TypeAlias = tuple[dict[str, Any], dict[str, Any]]
"""A record with the keys of a task, and its files by name."""

_number = partial(as_number, minimum=1.0, maximum=1e9)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?", re.IGNORECASE)
_MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}
_PATCH = "solution.patch"
# instructions that change no file
_IDLE = ("FROM", "WORKDIR", "LABEL", "MAINTAINER", "EXPOSE", "CMD", "ENTRYPOINT")


def harbor(record: Mapping[str, object], folder: Path) -> Foreign:
    """Read a folder in Harbor's form. ``record``: its ``task.toml``."""
    if (folder / "steps").is_dir():
        refuse("steps", "tasks of several steps are not supported")
    environment, verifier, agent = (
        as_object(record.get(name, {}), name)
        for name in ("environment", "verifier", "agent")
    )
    build = folder / "environment"
    lines = _instructions(build / "Dockerfile")
    places = [words[-1] for name, words in lines if name == "WORKDIR"]
    workdir = posixpath.join("/app", *places)
    image = None
    if "docker_image" in environment:
        image = as_name(environment["docker_image"], "environment.docker_image")
    if image is None and not lines:
        refuse("environment", "neither docker_image nor a Dockerfile")
    copies = _copies(lines, workdir)
    memory = environment.get("memory_mb", environment.get("memory"))
    limits = {"memory_mb": _mib(memory), "cpus": environment.get("cpus")}
    files: dict[str, Folder] = {"tests": Folder(folder / "tests")}
    if image is None and copies is not None:
        files["workspace"] = Folder(build, copies)
    return {
        "id": re.sub(r"[^A-Za-z0-9_-]", "-", folder.name),
        "prompt": (folder / "instruction.md").read_text(encoding="utf-8"),
        "workdir": workdir,
        "image": image or f"trajkit-task:{_digest(build)}",
        "plain": image is None and copies is not None,
        "places": [workdir, "/tests", "/logs", "/solution"],
        "solve": "bash {solution}/solve.sh",
        "editable": ["**"],
        "agent": {"timeout_s": agent.get("timeout_sec", 1800.0)},
        "grade": {
            "kind": "reward_file",
            "timeout_s": verifier.get("timeout_sec", 600.0),
        },
        "limits": {name: value for name, value in limits.items() if value is not None},
        **({} if image else {"build": str(build)}),
    }, files


def swebench(record: Mapping[str, object]) -> Foreign:
    """Read a record of SWE-bench's data sets."""
    name = as_text(record["instance_id"], "instance_id")
    lists = {}
    for key in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        value = record.get(key, [])
        # some of the data sets have lists as JSON
        lists[key] = json.loads(value) if isinstance(value, str) else value
    image = record.get("image_name") or (
        # as SWE-bench names them: two underscores are reserved
        f"swebench/sweb.eval.x86_64.{name.lower().replace('__', '_1776_')}:latest"
    )
    patch = as_text(record.get("patch", ""), "patch")
    return {
        "id": name,
        "prompt": record.get("problem_statement"),
        "workdir": "/testbed",
        "image": image,
        "solve": f"git apply {{solution}}/{_PATCH}",
        "grade": {"kind": "swebench", "instance": {**record, **lists}},
    }, ({"solution": Texts({_PATCH: patch})} if patch else {})


def _instructions(path: Path) -> list[tuple[str, list[str]]]:
    """The instructions of a Dockerfile, each with its words; none without a file."""
    if not path.is_file():
        return []
    text = re.sub(r"\\\r?\n", " ", path.read_text(encoding="utf-8"))
    lines = [line.split() for line in text.splitlines()]
    return [
        (words[0].upper(), words[1:])
        for words in lines
        if len(words) > 1 and not words[0].startswith("#")
    ]


def _copies(
    lines: list[tuple[str, list[str]]], workdir: str
) -> tuple[tuple[str, str], ...] | None:
    """What a Dockerfile copies into the working directory; None if it does more."""
    copies = []
    for name, words in lines:
        if name in _IDLE:
            continue
        if name != "COPY" or len(words) < 2 or any(w[0] in "-[" for w in words):
            return None
        *sources, target = words
        place = posixpath.normpath(posixpath.join(workdir, target))
        relative = posixpath.relpath(place, workdir)
        if relative.startswith("..") or any(c in "".join(sources) for c in "*?$"):
            return None
        for source in sources:
            inside = target.endswith(("/", ".")) or len(sources) > 1
            # the content of a folder is copied, and a file keeps its name in a folder
            file = posixpath.basename(posixpath.normpath(source))
            whole = inside and "." in file.strip(".")
            path = posixpath.join(relative, file) if whole else relative
            copies.append((source, posixpath.normpath(path)))
    return tuple(copies)


def _mib(value: object) -> int | None:
    """A size, a number of MiB or a text such as ``4G``, in MiB."""
    if isinstance(value, str):
        size = _SIZE.fullmatch(value)
        if size is None:
            refuse("environment.memory", f"{value!r} is not a size such as 4G")
        return round(float(size[1]) * _MIB[size[2].upper()])
    return value if value is None else round(_number(value, "environment.memory_mb"))


def _digest(build: Path) -> str:
    """A name of what an image is made from."""
    return hashlib.sha256(Folder(build).archive()).hexdigest()[:16]
