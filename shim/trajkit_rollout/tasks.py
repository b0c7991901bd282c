"""Tasks for agents, and how their work is graded.

A task is a directory with a ``task.toml``, or a line of a JSONL file with the same keys.
Its files are in the folders ``workspace``, ``tests`` and ``solution``, or in the record
under these names, as an object of texts by path.
"""

import hashlib
import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from trajkit.errors import FormatError
from trajkit_rollout.agents.sandbox import Limits
from trajkit_rollout.files import Checkout, Files, Folder, Texts
from trajkit_rollout.foreign import harbor, swebench
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import (
    as_flag,
    as_integer,
    as_name,
    as_number,
    as_object,
    as_text,
    list_of,
    refuse,
)

T = TypeVar("T")

# it becomes part of session ids and container names
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is done with a workspace before the agent starts, and with its copy."""

    command: str = ""  # a shell command, run in the workspace
    timeout_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """Limits of the agent's work."""

    timeout_s: float = 1800.0
    max_turns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """How a task is graded."""

    kind: str = "command"  # one of `KINDS`; see `trajkit_rollout.grade`
    # For ``command``, ``tests`` and ``reward_file``: a shell command. It runs in the
    # folder of the task's tests, or in the workspace if there are none; a
    # ``reward_file`` always in the workspace. ``{tests}``, ``{workspace}`` and ``{logs}``
    # are replaced by the paths of ``/tests``, the workspace and ``/logs/verifier``.
    command: str = ""
    # Copy the tests over the workspace and run there, for tests that need files of the
    # workspace around them.
    in_workspace: bool = False
    plugins: tuple[str, ...] = ()  # of pytest, as its option ``-p`` takes them
    timeout_s: float = 300.0
    fail_to_pass: tuple[str, ...] = ()  # for ``tests``: the tests that must pass
    pass_to_pass: tuple[str, ...] = ()
    # for ``tests``: the reward is the share that passes, not all or nothing
    partial: bool = False
    # for ``script``: a Python program among the task's ``tests``, run in the workspace,
    # whose last line is the reward
    script: str = ""
    # for ``swebench``: the instance as in its data set
    instance: Mapping[str, object] = field(default_factory=dict)


KINDS: Mapping[str, Callable[[Grade], object]] = {
    "command": lambda rules: rules.command,
    "tests": lambda rules: rules.command and rules.fail_to_pass + rules.pass_to_pass,
    "script": lambda rules: rules.script,
    "reward_file": lambda rules: rules.command,
    "completed": lambda _: True,
    "swebench": lambda rules: rules.instance,
}
"""How a task may be graded. The functions return a false value if a key is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task: the keys of its record."""

    id: str  # unique in its run; the ``group_id`` of its rollouts
    prompt: str
    # the initial files; those added before grading; and those that solve the task, for
    # trying it out
    workspace: Files | None = None
    tests: Files | None = None
    solution: Files | None = None
    # Patterns of the files that the agent may change; see
    # `trajkit_rollout.changes`. None: that module's default.
    editable: tuple[str, ...] | None = None
    # a git repository whose commit is the workspace
    repository: str | None = None
    revision: str | None = None
    # Absolute path of the workspace. Other paths than ``/work`` may come from an image.
    workdir: str = "/work"
    image: str | None = None
    # folder with a Dockerfile that makes the image
    build: str | None = None
    # The Dockerfile only copies the files of the workspace: a sandbox without images will
    # do.
    plain: bool = False
    # folders with the same path inside and outside of a local sandbox
    places: tuple[str, ...] = ()
    # For trying it out: a shell command that solves the task in its workspace. Default:
    # the solution's files are copied over it. ``{solution}`` is their folder.
    solve: str = ""
    setup: Setup = Setup()
    agent: Agent = Agent()
    grade: Grade = Grade()
    limits: Limits = field(default_factory=Limits)

    def locations(self) -> Iterator[Path]:
        """Yield the folders of this machine that its files come from."""
        for source in (self.workspace, self.tests, self.solution):
            if isinstance(source, Folder):
                yield source.path.parent
            elif isinstance(source, Checkout):
                yield source.repository

    def digest(self) -> str:
        """Return a hash of everything that the result depends on."""
        place, setup = (self.workdir, self.image), self.setup.command
        values = (self.prompt, *place, setup, self.grade, self.agent.max_turns)
        parts = [repr(value).encode() for value in (*values, self.editable)]
        for files in (self.workspace, self.tests):
            parts.append(b"" if files is None else files.archive())
        return hashlib.sha256(b"\0".join([*parts, b""])).hexdigest()[:16]


def read_tasks(path: Path) -> list[Task]:
    """Read the tasks of a JSONL file, a task's directory, or a directory of those.

    Raises
    ------
    FormatError
        There is no task, one is invalid, or two have the same id.
    OSError
        A file cannot be read.
    """
    tasks = []
    if path.is_file():
        with _located(path):
            # a string may contain what Python, but not JSON, treats as the end of a line
            lines = path.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines, 1):
            if line.strip():
                with _located(f"{path}:{number}"):
                    record = json.loads(line)
                    # half of a surrogate pair cannot be written to a file
                    json.dumps(record, ensure_ascii=False).encode()
                    tasks.append(_task(record, path.parent))
    else:
        for folder in task_files(path):
            with _located(file := folder / "task.toml"):
                record = tomllib.loads(file.read_text(encoding="utf-8"))
                tasks.append(_task({"id": folder.name, **record}, folder, folder))
    if not tasks:
        raise FormatError(f"{path} has no task: no line, or no folder with task.toml")
    for name, count in Counter(task.id for task in tasks).items():
        if count > 1:
            raise FormatError(f"{path}: two tasks have the id {name!r}")
    return tasks


def task_files(path: Path) -> list[Path]:
    """Return the file, or the folders, that tasks are read from."""
    if path.is_file():
        return [path]
    files = [*path.glob("task.toml")] or sorted(path.glob("*/task.toml"))
    return [file.parent for file in files]


@contextmanager
def _located(place: Path | str) -> Iterator[None]:
    """Turn an invalid file or line into a `FormatError` that names it."""
    try:
        yield
    except (ValueError, GatewayError) as error:
        raise FormatError(f"{place}: {error}") from error


def _task(given: object, base: Path, folder: Path | None = None) -> Task:
    """Read a task; a repository's path is relative to ``base``.

    ``folder``: the task's directory, which may have its files.
    """
    record = as_object(given, "task")
    files: dict[str, Any] = {}
    if "instance_id" in record:
        record, files = swebench(record)
    elif folder and (folder / "instruction.md").is_file():
        record, files = harbor(record, folder)
    grade = as_object(record.get("grade", {}), "grade")
    grade = _DEFAULTS.get(str(grade.get("kind")), {}) | grade
    task = _read(Task, record | {"grade": grade}, "")
    for name in ("workspace", "tests", "solution"):
        if folder and name not in record and (folder / name).is_dir():
            files.setdefault(name, Folder(folder / name))
    if task.repository is not None:
        files["workspace"] = Checkout(base / task.repository, task.revision or "HEAD")
    elif task.revision is not None:
        refuse("revision", "needs a repository")
    task = replace(task, **files)
    if not _ID.fullmatch(task.id):
        refuse("id", f"{task.id!r}: 1 to 100 letters, digits, _ and -")
    if not task.prompt:
        refuse("prompt", "an empty string")
    if not task.workdir.startswith("/") or task.workdir == "/":
        refuse("workdir", f"{task.workdir!r} is not an absolute path below /")
    rules = task.grade
    if rules.kind not in KINDS:
        refuse("grade.kind", f"{rules.kind!r} is not one of {', '.join(KINDS)}")
    if not KINDS[rules.kind](rules):
        refuse("grade", f"kind {rules.kind!r} lacks keys that it needs")
    if rules.kind == "script" and task.tests is None:
        refuse("grade.script", "needs the task's tests")
    return task


_DEFAULTS: Mapping[str, dict[str, object]] = {
    "reward_file": {"command": "bash {tests}/test.sh"},
}


def _read(kind: type[T], value: object, where: str) -> T:
    """Read an object as a dataclass; each key must be one of its fields."""
    # the fields of a dataclass have the types of `_READERS`, or are dataclasses
    types = get_type_hints(kind)
    values = {}
    for name, given in as_object(value, where).items():
        path = f"{where}.{name}" if where else name
        if name not in types:
            refuse(path, f"unknown key, not one of {', '.join(types)}")
        read = _READERS.get(types[name]) or partial(_read, types[name])
        values[name] = read(given, path)
    for name in ("id", "prompt"):
        if kind is Task and name not in values:
            refuse(name, "missing")
    return kind(**values)


def _texts(value: object, where: str) -> Texts:
    texts = as_object(value, where).items()
    return Texts({name: as_text(text, f"{where}.{name}") for name, text in texts})


def _names(value: object, where: str) -> tuple[str, ...]:
    return tuple(list_of(as_text)(value, where))


_positive = partial(as_number, minimum=1e-3, maximum=1e9)
_READERS: Mapping[Any, Callable[[object, str], object]] = {
    str: as_text,
    str | None: as_name,
    bool: as_flag,
    int | None: partial(as_integer, minimum=1),
    float: _positive,
    float | None: _positive,
    tuple[str, ...]: _names,
    tuple[str, ...] | None: _names,
    Mapping[str, object]: as_object,
    Files | None: _texts,
}
