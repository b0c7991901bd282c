"""Tasks for agents, and how their work is graded.

A task is a directory with a ``task.toml``, or a line of a JSONL file with the same keys.
Its files are in the folders ``workspace``, ``tests`` and ``solution``, or in the record
under these names, as an object of texts by path.
"""

import hashlib
import io
import json
import re
import subprocess
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, get_args

from trajkit.errors import FormatError
from trajkit_shim.agents.sandbox import Limits, pack
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import (
    as_flag,
    as_integer,
    as_list,
    as_name,
    as_number,
    as_object,
    as_text,
    refuse,
)

# it becomes part of session ids and container names
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")

PROTECTED = (
    *("conftest.py", "sitecustomize.py", "usercustomize.py", "*.pth"),
    *("pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml"),
)
"""The default of `Grade.protect`, but for ``swebench``: what Python's test runners read.
New top-level modules with names of the standard library or of pytest count too."""

Kind = Literal["command", "tests", "script", "reward_file", "completed", "swebench"]
"""How a task is graded; see `trajkit_shim.rollout.grade`."""


class Files(Protocol):
    """Some files of a task."""

    def archive(self) -> bytes:
        """Return them as a tar archive, always with the same bytes.

        Raises `FormatError` if they cannot be read.
        """
        ...


@dataclass(frozen=True, slots=True)
class Texts:
    """Files given in the record itself, by path."""

    texts: Mapping[str, str]

    def archive(self) -> bytes:
        return pack({name: text.encode() for name, text in self.texts.items()})


@dataclass(frozen=True, slots=True)
class Folder:
    """All files below a directory, with their permissions and links."""

    path: Path

    def archive(self) -> bytes:
        def nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
            if "__pycache__" in Path(entry.name).parts:
                return None
            entry.uid = entry.gid = entry.mtime = 0
            entry.uname = entry.gname = ""
            return entry

        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            # tarfile sorts the entries of a directory
            tar.add(self.path, ".", filter=nobody)
        return buffer.getvalue()


@dataclass(frozen=True, slots=True)
class Checkout:
    """The files of one commit of a git repository on this machine."""

    repository: Path
    revision: str

    def archive(self) -> bytes:
        asked = ("-C", str(self.repository), "rev-parse")
        revision = self._git(*asked, "--verify", self.revision)
        form = self._git(*asked, "--show-object-format")
        path = ("--path-format=absolute", "--git-path", "objects")
        objects = self._git(*asked, *path)
        # A repository's attributes may exclude or change files of an archive. Only those
        # in a repository's own directory override them.
        with tempfile.TemporaryDirectory() as bare:
            self._git("init", "-q", "--bare", f"--object-format={form.decode()}", bare)
            for name, text in (
                ("objects/info/alternates", objects + b"\n"),
                ("info/attributes", b"* -export-ignore -export-subst\n"),
            ):
                (Path(bare) / name).parent.mkdir(exist_ok=True)
                (Path(bare) / name).write_bytes(text)
            where = f"--git-dir={bare}"
            return self._git(where, "archive", "--format=tar", revision.decode())

    def _git(self, *arguments: str) -> bytes:
        done = subprocess.run(["git", *arguments], capture_output=True, check=False)
        if done.returncode:
            message = done.stderr.decode(errors="replace").strip()
            raise FormatError(f"{self.repository} at {self.revision!r}: {message}")
        return done.stdout if "archive" in arguments else done.stdout.strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """How a task is graded."""

    kind: Kind = "command"
    # For ``command``, ``tests`` and ``reward_file``: a shell command, run in the
    # workspace. ``{tests}`` and ``{logs}`` are replaced by the sandbox's paths of
    # ``/tests`` and ``/logs/verifier``.
    command: str = ""
    timeout_s: float = 300.0
    fail_to_pass: tuple[str, ...] = ()  # for ``tests``: the tests that must pass
    pass_to_pass: tuple[str, ...] = ()
    # for ``tests``: the reward is the share that passes, not all or nothing
    partial: bool = False
    # for ``script``: a Python program among the task's ``tests``, run in the workspace,
    # whose last line is the reward
    script: str = ""
    # Changes of files with these names are not graded. In a pattern with a slash it is
    # the path.
    protect: tuple[str, ...] = PROTECTED
    # for ``swebench``: the instance as in its data set
    instance: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task."""

    task_id: str  # unique in its run; the ``group_id`` of its rollouts
    prompt: str
    # the initial files; those added before grading; and those that solve the task, for
    # trying it out
    workspace: Files | None = None
    tests: Files | None = None
    solution: Files | None = None
    # Absolute path of the workspace. Other paths than ``/work`` may come from an image.
    workdir: str = "/work"
    image: str | None = None
    # shell command, run in the workspace before the agent starts and in the copy that
    # is graded
    setup: str = ""
    setup_timeout_s: float = 300.0
    agent_timeout_s: float = 1800.0
    max_turns: int | None = None
    grade: Grade
    limits: Limits = field(default_factory=Limits)

    def digest(self) -> str:
        """Return a hash of everything that the result depends on."""
        found = hashlib.sha256()
        for name in ("prompt", "workdir", "image", "setup", "grade", "max_turns"):
            found.update(repr(getattr(self, name)).encode() + b"\0")
        for files in (self.workspace, self.tests):
            found.update(b"" if files is None else files.archive())
            found.update(b"\0")
        return found.hexdigest()[:16]


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
                    tasks.append(_task(json.loads(line), path.parent))
    else:
        folders = [path] if (path / "task.toml").exists() else sorted(path.iterdir())
        for folder in folders:
            file = folder / "task.toml"
            if file.is_file():
                with _located(file):
                    record = tomllib.loads(file.read_text(encoding="utf-8"))
                    found = {
                        name: Folder(folder / name)
                        for name in ("workspace", "tests", "solution")
                        if (folder / name).is_dir()
                    }
                    tasks.append(_task({"id": folder.name, **record}, folder, found))
    if not tasks:
        raise FormatError(f"{path} has no task: no line, or no folder with task.toml")
    seen: set[str] = set()
    for task in tasks:
        if task.task_id in seen:
            raise FormatError(f"{path}: two tasks have the id {task.task_id!r}")
        seen.add(task.task_id)
    return tasks


@contextmanager
def _located(place: Path | str) -> Iterator[None]:
    """Turn an invalid file or line into a `FormatError` that names it."""
    try:
        yield
    except (ValueError, GatewayError) as error:
        raise FormatError(f"{place}: {error}") from error


def _texts(value: object, where: str) -> Texts:
    texts = as_object(value, where)
    return Texts(
        {name: as_text(text, f"{where}.{name}") for name, text in texts.items()}
    )


def _names(value: object, where: str) -> tuple[str, ...]:
    texts = enumerate(as_list(value, where))
    return tuple(as_text(text, f"{where}[{i}]") for i, text in texts)


def _kind(value: object, where: str) -> str:
    if value not in get_args(Kind):
        refuse(where, f"{value!r} is not one of {', '.join(get_args(Kind))}")
    return str(value)


_count = partial(as_integer, minimum=1)
_positive = partial(as_number, minimum=1e-3, maximum=1e9)
_NO_FILES: Mapping[str, Files] = {}
_Readers: TypeAlias = Mapping[str, Callable[[object, str], object]]
_TASK: _Readers = {
    **dict.fromkeys(("id", "prompt", "workdir", "image", "repository"), as_name),
    **dict.fromkeys(("workspace", "tests", "solution"), _texts),
    **dict.fromkeys(("setup", "agent", "grade", "limits"), as_object),
    "revision": as_name,
}
_SETUP: _Readers = {"command": as_text, "timeout_s": _positive}
_AGENT: _Readers = {"timeout_s": _positive, "max_turns": _count}
_GRADE: _Readers = {
    "kind": _kind,
    "command": as_text,
    "timeout_s": _positive,
    **dict.fromkeys(("fail_to_pass", "pass_to_pass", "protect"), _names),
    "partial": as_flag,
    "script": as_text,
    "instance": as_object,
}
_LIMITS: _Readers = {
    **dict.fromkeys(("memory_mb", "processes", "file_mb", "disk_mb"), _count),
    "cpus": _positive,
}


def _read(value: object, where: str, readers: _Readers) -> dict[str, Any]:
    """The fields of an object; each must have a reader."""
    values = {}
    for name, given in as_object(value, where or "task").items():
        path = f"{where}.{name}" if where else name
        if name not in readers:
            refuse(path, f"unknown key, not one of {', '.join(readers)}")
        values[name] = readers[name](given, path)
    return values


def _task(record: object, base: Path, files: Mapping[str, Files] = _NO_FILES) -> Task:
    """Read a task; ``files`` are those in folders of its directory."""
    given = {"workdir": "/work", **files, **_read(record, "", _TASK)}
    for name in ("id", "prompt"):
        if name not in given:
            refuse(name, "missing")
    if not _ID.fullmatch(given["id"]):
        refuse("id", f"{given['id']!r}: 1 to 100 letters, digits, _ and -")
    if not given["workdir"].startswith("/") or given["workdir"] == "/":
        refuse("workdir", f"{given['workdir']!r} is not an absolute path below /")
    if "revision" in given and "repository" not in given:
        refuse("revision", "needs a repository")
    setup = _read(given.get("setup", {}), "setup", _SETUP)
    agent = _read(given.get("agent", {}), "agent", _AGENT)
    if "repository" in given:
        revision = given.get("revision", "HEAD")
        given["workspace"] = Checkout(base / given["repository"], revision)
    grade = _grade(given.get("grade", {}))
    if grade.kind == "script" and "tests" not in given:
        refuse("grade.script", "needs the task's tests")
    return Task(
        task_id=given["id"],
        prompt=given["prompt"],
        workspace=given.get("workspace"),
        tests=given.get("tests"),
        solution=given.get("solution"),
        workdir=given["workdir"],
        image=given.get("image"),
        setup=setup.get("command", ""),
        setup_timeout_s=setup.get("timeout_s", 300.0),
        agent_timeout_s=agent.get("timeout_s", 1800.0),
        max_turns=agent.get("max_turns"),
        grade=grade,
        limits=Limits(**_read(given.get("limits", {}), "limits", _LIMITS)),
    )


def _grade(record: object) -> Grade:
    given = _read(record, "grade", _GRADE)
    kind = given.get("kind", "command")
    if kind == "reward_file":
        given.setdefault("command", "bash {tests}/test.sh")
    if kind == "swebench":
        given.setdefault("protect", ())
    grade = Grade(**given)
    needed = {
        "command": grade.command,
        "tests": grade.command and grade.fail_to_pass + grade.pass_to_pass,
        "script": grade.script,
        "reward_file": grade.command,
        "completed": True,
        "swebench": grade.instance,
    }
    if not needed[kind]:
        refuse("grade", f"kind {kind!r} lacks keys that it needs")
    return grade
