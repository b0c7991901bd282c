"""Tasks for agents, and how their work is graded; docs/serving.md describes all keys.

Folders in Harbor's form (https://harborframework.com/docs/tasks) and records of SWE-bench's
data sets are read as they are.
"""

import io
import json
import posixpath
import re
import tarfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from trajkit.errors import FormatError
from trajkit_shim import json_input
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import as_object, as_text, refuse

T = TypeVar("T")

# it becomes part of session ids and container names
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?", re.IGNORECASE)
# instructions of a Dockerfile that change no file
_IDLE = ("FROM", "LABEL", "MAINTAINER", "EXPOSE", "CMD", "ENTRYPOINT")


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
    """How a task is graded; see `trajkit_rollout.grade`."""

    kind: str = "command"  # one of `KINDS`
    # a shell command; it runs in the folder of the task's tests, or in the workspace if
    # there are none; a ``reward_file`` always in the workspace
    command: str = ""
    in_workspace: bool = False  # copy the tests over the workspace, and run there
    plugins: tuple[str, ...] = ()  # of pytest, as its option ``-p`` takes them
    timeout_s: float = 300.0
    # variables; ``${NAME}`` and ``${NAME:-default}`` are those of the process that grades
    env: Mapping[str, str] = field(default_factory=dict)
    fail_to_pass: tuple[str, ...] = ()  # for ``tests``: the tests that must pass
    pass_to_pass: tuple[str, ...] = ()
    partial: bool = False  # for ``tests``: the reward is the share that passes
    script: str = ""  # for ``script``: a Python program among the task's tests
    # for ``swebench``: the instance as in its data set
    instance: Mapping[str, object] = field(default_factory=dict)


KINDS = {
    "command": ("command",),
    "tests": ("command", "fail_to_pass pass_to_pass"),
    "script": ("script",),
    "reward_file": (),
    "completed": (),
    "swebench": ("instance",),
}
"""How a task may be graded, and the keys that each needs, or one of several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resource limits for the processes of one sandbox. ``None``: no limit."""

    memory_mb: int | None = None  # MiB
    cpus: float | None = None  # number of processors, may be fractional
    processes: int | None = None  # processes and threads at once
    file_mb: int | None = None  # MiB per file
    disk_mb: int | None = None  # MiB of all files


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task: the keys of its record. Its files are tar archives in memory."""

    id: str = ""  # unique in its run; the ``group_id`` of its rollouts
    prompt: str = ""
    # the initial files, those added before grading, and those that solve the task
    workspace: bytes | None = None
    tests: bytes | None = None
    solution: bytes | None = None
    # patterns of the files that the agent may change; see `trajkit_rollout.grade`
    editable: tuple[str, ...] | None = None
    # absolute path of the workspace; other paths than ``/work`` may come from an image
    workdir: str = "/work"
    image: str | None = None
    build: str | None = None  # folder with a Dockerfile that makes the image
    # the Dockerfile only copies files: a sandbox without images will do
    plain: bool = False
    # variables of all commands; ``${NAME}`` is a variable of the process that runs the task
    env: Mapping[str, str] = field(default_factory=dict)
    # folders with the same path inside and outside of a local sandbox
    places: tuple[str, ...] = ()
    # A shell command that solves the task in its workspace, with ``{solution}`` for the
    # folder of the solution's files. Default: they are copied over the workspace.
    solve: str = ""
    solve_env: Mapping[str, str] = field(
        default_factory=dict
    )  # as ``env``, for `solve`
    setup: Setup = Setup()
    agent: Agent = Agent()
    grade: Grade = Grade()
    limits: Limits = Limits()

    def digest(self) -> str:
        """Return a hash of everything that the result depends on."""
        place, setup = (self.workdir, self.image), self.setup.command
        values = (self.prompt, *place, setup, self.grade, self.agent.max_turns)
        text = repr((*values, self.editable, self.env)).encode()
        content = b"\0".join([text, self.workspace or b"", self.tests or b""])
        return sha256(content).hexdigest()[:16]


def read_tasks(path: Path) -> list[Task]:
    """Read the tasks of a JSONL file, a task's directory, or a directory of those.

    Raises `FormatError`: there is no task, one is invalid, or two have the same id.
    """
    tasks = []
    for place in task_files(path):
        if place.is_dir():
            with _located(file := place / "task.toml"):
                record = tomllib.loads(file.read_text(encoding="utf-8"))
                tasks.append(_task({"id": place.name, **record}, place))
            continue
        with _located(place):
            # a string may contain what Python, but not JSON, treats as the end of a line
            lines = place.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines, 1):
            with _located(f"{path}:{number}"):
                if line.strip():
                    record = json.loads(line)
                    # half of a surrogate pair cannot be written to a file
                    json.dumps(record, ensure_ascii=False).encode()
                    tasks.append(_task(record))
    if not tasks:
        raise FormatError(f"{path} has no task: no line, or no folder with task.toml")
    name, count = Counter(task.id for task in tasks).most_common(1)[0]
    if count > 1:
        raise FormatError(f"{path}: two tasks have the id {name!r}")
    return tasks


def task_files(path: Path) -> list[Path]:
    """Return the file, or the folders, that tasks are read from."""
    files = [*path.glob("task.toml")] or sorted(path.glob("*/task.toml"))
    return [file.parent for file in files] if path.is_dir() else [path]


@contextmanager
def _located(place: Path | str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, GatewayError) as error:
        raise FormatError(f"{place}: {error}") from error


def _task(given: object, folder: Path | None = None) -> Task:
    record = {**as_object(given, "task")}
    if "instance_id" in record:
        record = _swebench(record)
    elif folder and (folder / "instruction.md").is_file():
        record = _harbor(record, folder)
    for name in ("workspace", "tests", "solution"):
        if folder and name not in record and (folder / name).is_dir():
            record[name] = archive_of(folder / name)
    task: Task = _read(Task, record, "")
    rules, kind, name, workdir = task.grade, task.grade.kind, task.id, task.workdir
    outside = workdir == "/" or not workdir.startswith("/") or "$" in workdir
    needed = [key.split() for key in KINDS.get(kind, ())]
    missing = [keys for keys in needed if not any(getattr(rules, k) for k in keys)]
    faults = {
        f"id: {name!r}: 1 to 100 letters, digits, _ and -": not _ID.fullmatch(name),
        "prompt: an empty string": not task.prompt,
        f"workdir: {workdir!r} is not an absolute path below / (without $)": outside,
        f"grade.kind: {kind!r} is not one of {', '.join(KINDS)}": kind not in KINDS,
        f"grade: kind {kind!r} lacks keys that it needs: {missing}": missing,
        "grade.script: needs the task's tests": kind == "script" and not task.tests,
    }
    for fault in filter(faults.get, faults):
        raise ValueError(fault)
    return task


def _read(kind: type[T], value: object, where: str) -> T:
    """Read an object as a dataclass; each key must be one of its fields, or null."""
    # the fields of a dataclass have the types of `_READERS`, or are dataclasses
    types, values = get_type_hints(kind), {}
    for name, given in as_object(value, where).items():
        path = f"{where}.{name}" if where else name
        if name not in types:
            refuse(path, f"unknown key, not one of {', '.join(types)}")
        read = _READERS.get(types[name]) or partial(_read, types[name])
        if given is not None:
            values[name] = read(given, path)
    return kind(**values)


def _files(value: object, where: str) -> bytes:
    """Texts by path, or the archive of a folder."""
    if isinstance(value, bytes):
        return value
    return pack({name: text.encode() for name, text in _texts(value, where).items()})


def _names(value: object, where: str) -> tuple[str, ...]:
    return tuple(json_input.list_of(as_text)(value, where))


def _texts(value: object, where: str) -> dict[str, str]:
    given = as_object(value, where).items()
    return {name: as_text(text, f"{where}.{name}") for name, text in given}


_positive = partial(json_input.as_number, minimum=1e-3, maximum=1e9)
_READERS: Mapping[Any, Callable[[object, str], object]] = {
    str: as_text,
    str | None: json_input.as_name,
    bool: json_input.as_flag,
    int | None: partial(json_input.as_integer, minimum=1),
    float: _positive,
    float | None: _positive,
    tuple[str, ...]: _names,
    tuple[str, ...] | None: _names,
    Mapping[str, object]: as_object,
    Mapping[str, str]: _texts,
    bytes | None: _files,
}


def pack(files: Mapping[str, bytes]) -> bytes:
    """Return a tar archive of files by relative path."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            # scripts with a shebang line are executable
            entry.mode = 0o755 if content.startswith(b"#!") else 0o644
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def archive_of(
    folder: Path, copies: Iterable[tuple[str, str]] = ((".", "."),)
) -> bytes:
    """A tar archive, always with the same bytes, of paths below a folder.

    ``copies``: each path, and its path in the archive.
    """

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        return None if "__pycache__" in Path(entry.name).parts else entry

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for source, target in copies:
            # tarfile sorts the entries of a directory
            tar.add(folder / source, target, filter=plain)
    return buffer.getvalue()


def _harbor(record: Mapping[str, object], folder: Path) -> dict[str, Any]:
    """The record of a folder in Harbor's form, from its ``task.toml``."""
    environment, verifier, agent, solution = (
        as_object(record.get(name, {}), name)
        for name in ("environment", "verifier", "agent", "solution")
    )
    build, image = folder / "environment", environment.get("docker_image")
    dockerfile = build / "Dockerfile"
    text = dockerfile.read_text(encoding="utf-8") if dockerfile.is_file() else ""
    several = [*build.glob("docker-compose.y*ml")]
    faults = {
        "steps: tasks of several steps are not supported": (folder / "steps").is_dir(),
        f"environment: {several}: several containers are not supported": several,
        "verifier.environment_mode: only a shared environment is supported": (
            verifier.get("environment_mode") == "separate" or "environment" in verifier
        ),
        "environment: neither docker_image nor a Dockerfile": not (image or text),
    }
    for fault in filter(faults.get, faults):
        raise ValueError(fault)
    text += f"\nWORKDIR {environment.get('workdir') or '.'}"
    workdir, copies = _read_dockerfile(text, build)
    memory = environment.get("memory_mb", environment.get("memory"))
    memory_mb = memory and _mib(memory)
    grade = {"kind": "reward_file", "timeout_s": verifier.get("timeout_sec", 600.0)}
    own: dict[str, Any] = {
        "id": _as_id(folder.name),
        "prompt": (folder / "instruction.md").read_text(encoding="utf-8"),
        "tests": archive_of(folder / "tests"),
        "workdir": workdir,
        "env": environment.get("env", {}),
        "places": [workdir, "/tests", "/logs", "/solution"],
        "solve": "bash {solution}/solve.sh",
        "solve_env": solution.get("env", {}),
        "editable": ["**"],
        "agent": {"timeout_s": agent.get("timeout_sec", 1800.0)},
        "grade": {**grade, "env": verifier.get("env", {})},
        "limits": {"memory_mb": memory_mb, "cpus": environment.get("cpus")},
        "image": image,
    }
    if image is None:
        name = f"trajkit-task:{sha256(archive_of(build)).hexdigest()[:16]}"
        own |= {"image": name, "build": str(build), "plain": copies is not None}
        own["workspace"] = None if copies is None else archive_of(build, copies)
    return own


def _as_id(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)


def _read_dockerfile(
    text: str, build: Path
) -> tuple[str, list[tuple[str, str]] | None]:
    """The working directory, and what is copied there; None: something else is done."""
    lines = [line.split() for line in re.sub(r"\\\r?\n", " ", text).splitlines()]
    lines = [words for words in lines if len(words) > 1 and words[0][0] != "#"]
    # of several stages, only Docker knows what the last one has; nor what is ignored
    stages = [words for words in lines if words[0].upper() == "FROM"]
    plain = len(stages) < 2 and not (build / ".dockerignore").exists()
    copied = list[tuple[str, str]]()  # path in the image and source of each copy
    workdir = "/app"
    for name, *words in lines:
        *sources, target = words
        if name.upper() == "WORKDIR":
            workdir = posixpath.normpath(posixpath.join(workdir, target))
        elif name.upper() not in _IDLE:
            odd = any(w[0] in "-[" for w in words) or re.search(
                r"[*?$]", "".join(words)
            )
            plain = plain and name.upper() == "COPY" and bool(sources) and not odd
            place = posixpath.join(workdir, target)
            into = target.endswith(("/", ".")) or len(sources) > 1
            for source in sources:
                # the content of a folder is copied, and a file keeps its name in a folder
                kept = into and not (build / source).is_dir()
                own = posixpath.basename(source) if kept else ""
                copied.append((posixpath.join(place, own), source))
    copies = [(source, posixpath.relpath(path, workdir)) for path, source in copied]
    outside = any(path.startswith("..") for _, path in copies)
    return workdir, copies if plain and not outside else None


def _mib(value: object) -> int:
    """A size, a number of MiB or a text such as ``4G``, in MiB."""
    size = _SIZE.fullmatch(value if isinstance(value, str) else f"{value}M")
    if size is None:
        refuse("environment.memory", f"{value!r} is not a size such as 4G")
    return round(float(size[1]) * 1024.0 ** ("KMGT".index(size[2].upper()) - 1))


def _swebench(record: Mapping[str, object]) -> dict[str, Any]:
    name = as_text(record["instance_id"], "instance_id")
    patch, lists = as_text(record.get("patch") or "", "patch").encode(), {}
    for key in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        value = record.get(key) or []
        # some of the data sets have lists as JSON
        with _located(key):
            lists[key] = json.loads(value) if isinstance(value, str) else value
    # as SWE-bench names them: two underscores are reserved
    image = f"swebench/sweb.eval.x86_64.{name.lower().replace('__', '_1776_')}:latest"
    for key in ("image_name", "docker_image", "image"):
        image = as_text(record.get(key) or image, key)
    return {
        "id": _as_id(name),
        "prompt": record.get("problem_statement"),
        "workdir": "/testbed",
        "image": image,
        "solve": "git apply {solution}/solution.patch",
        "grade": {"kind": "swebench", "instance": {**record, **lists}},
        "solution": pack({"solution.patch": patch}) if patch else None,
    }
