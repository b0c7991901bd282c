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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, get_args

from trajkit.errors import FormatError
from trajkit_shim.agents.sandbox import Limits, pack
from trajkit_shim.rollout.fields import Fields

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

    kind: Kind
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
    protect: tuple[str, ...] = ()
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
                location = f"{path}:{number}"
                with _located(location):
                    record = json.loads(line)
                tasks.append(_task(record, location, path.parent))
    else:
        folders = [path] if (path / "task.toml").exists() else sorted(path.iterdir())
        for file in (folder / "task.toml" for folder in folders):
            if file.is_file():
                with _located(file):
                    record = tomllib.loads(file.read_text(encoding="utf-8"))
                record = {"id": file.parent.name, **record}
                tasks.append(_task(record, str(file), file.parent))
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
    except ValueError as error:
        raise FormatError(f"{place}: {error}") from error


def _task(record: object, location: str, base: Path) -> Task:
    fields = Fields(record, location)
    task_id = fields.text("id")
    if not _ID.fullmatch(task_id):
        raise fields.error(f"id = {task_id!r}: 1 to 100 letters, digits, _ and -")
    setup, agent = fields.section("setup"), fields.section("agent")
    workdir = fields.text("workdir", "/work")
    if not workdir.startswith("/") or workdir == "/":
        raise fields.error(f"workdir = {workdir!r} is not an absolute path below /")
    task = Task(
        task_id=task_id,
        prompt=fields.text("prompt"),
        workspace=_checkout(fields, base) or _files(fields, "workspace", base),
        tests=_files(fields, "tests", base),
        solution=_files(fields, "solution", base),
        workdir=workdir,
        image=fields.text("image", "") or None,
        setup=setup.text("command", ""),
        setup_timeout_s=setup.number("timeout_s", 300.0),
        agent_timeout_s=agent.number("timeout_s", 1800.0),
        max_turns=agent.count("max_turns"),
        grade=_grade(fields.section("grade")),
        limits=_limits(fields.section("limits")),
    )
    for section in (fields, setup, agent):
        section.end()
    if task.grade.kind == "script" and task.tests is None:
        raise fields.error("grade.script needs the task's tests")
    return task


def _checkout(fields: Fields, base: Path) -> Checkout | None:
    repository = fields.text("repository", "")
    revision = fields.text("revision", "HEAD" if repository else "")
    if revision and not repository:
        raise fields.error("revision without a repository")
    return Checkout(base / repository, revision) if repository else None


def _files(fields: Fields, name: str, base: Path) -> Files | None:
    texts = fields.texts(name)
    if texts is not None:
        return Texts(texts)
    # a line of a JSONL file has no folders
    folder = base / name
    if fields.location.endswith("task.toml") and folder.is_dir():
        return Folder(folder)
    return None


def _grade(fields: Fields) -> Grade:
    kind = fields.text("kind", "command")
    if kind not in get_args(Kind):
        known = ", ".join(get_args(Kind))
        raise FormatError(f"{fields.location}.kind = {kind!r} is not one of {known}")
    command = fields.text("command", "bash {tests}/test.sh" * (kind == "reward_file"))
    grade = Grade(
        kind=kind,  # type: ignore[arg-type]
        command=command,
        timeout_s=fields.number("timeout_s", 300.0),
        fail_to_pass=fields.names("fail_to_pass"),
        pass_to_pass=fields.names("pass_to_pass"),
        partial=fields.take("partial", bool, False),
        script=fields.text("script", ""),
        protect=fields.names("protect", () if kind == "swebench" else PROTECTED),
        instance=fields.take("instance", dict, {}),
    )
    fields.end()
    needed = {
        "command": grade.command,
        "tests": grade.command and grade.fail_to_pass + grade.pass_to_pass,
        "script": grade.script,
        "reward_file": grade.command,
        "completed": True,
        "swebench": grade.instance,
    }
    if not needed[kind]:
        raise fields.error(f"kind {kind!r} lacks keys that it needs")
    return grade


def _limits(fields: Fields) -> Limits:
    limits = Limits(
        memory_mb=fields.count("memory_mb"),
        cpus=fields.number("cpus", 0.0) or None,
        processes=fields.count("processes"),
        file_mb=fields.count("file_mb"),
        disk_mb=fields.count("disk_mb"),
    )
    fields.end()
    return limits
