"""Rollouts: an agent works on a task in a sandbox, and a copy of its work is graded.

Many run at once, here or in workers of a Ray cluster. A stopped run is continued from its
log, which has a line before a session opens and one after its rollout ends. The sessions of
a killed run that never ended stay in the turn log; the ``sessions`` table marks them as
interrupted, which excludes them from training.
"""

import fcntl
import importlib
import json
import logging
import re
import secrets
import shlex
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple, Self, TypeAlias

import httpx
import pyarrow as pa

from trajkit.cli.screen import Progress, visible
from trajkit.errors import FormatError
from trajkit.files.tables import write_table
from trajkit.schema import SESSIONS
from trajkit_rollout.grade import AGENT_ENV, AgentError, StageError, Workspace, grade
from trajkit_rollout.sandbox import (
    SANDBOXES,
    CommandResult,
    LimitError,
    Sandbox,
    SandboxError,
    Spec,
    clear,
    pack,
    remove,
)
from trajkit_rollout.tasks import Task
from trajkit_shim.client import GatewayClient
from trajkit_shim.errors import GatewayError

NODE = "{node}"
"""In the URL of a gateway: the address of the machine that a rollout runs on."""

_LOG = logging.getLogger(__name__)
_INSTALL_SECONDS = 900.0
_CHECK_SECONDS = 120.0
_CALLBACK_SECONDS = 10.0
_PAUSES_SECONDS = (0.5, 2.0, 0.0)
_PLACEHOLDER = re.compile(r"\{(base_url|api_key|model|prompt|home|workspace)\}")
# variables of each harness
_ENV = {"OPENAI_API_KEY": "{api_key}", "OPENAI_BASE_URL": "{base_url}/v1"}
_MAX_FINDINGS = 100
# workers that may die during one rollout, before that is its error
_MAX_DEATHS = 3
# prefixes of the expected errors of a rollout
_STAGES: Mapping[type[Exception], str] = {
    StageError: "",
    SandboxError: "sandbox: ",
    GatewayError: "gateway: ",
    ConnectionError: "gateway: ",
}
# how changes are named, by their verdict (`trajkit_rollout.grade.choose`)
_FINDINGS = {
    "refused": "not graded",
    "risky": "graded, but it can change how tests run",
}
_STOPPED = "interrupted: the run was stopped before it ended"
_CHANGED = (
    "has changed since the run started, or trajkit's default of a key has: "
    "choose another directory for a new run"
)


class Launch(NamedTuple):
    command: Sequence[str]
    env: Mapping[str, str]
    files: Mapping[str, bytes]
    stdin: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """One coding agent, which finds its session by the key that it gets.

    ``command``, ``env``, ``files`` and ``stdin`` may contain ``{base_url}`` (of the
    gateway, without a path), ``{api_key}`` (of the session), ``{model}``, ``{prompt}``,
    ``{home}`` and ``{workspace}``, as seen in the sandbox. The argument ``{arguments}`` is
    replaced by extra arguments.
    """

    name: str
    # a shell command that installs the version that the record was written for
    install: str = ""
    # a shell command that exits with 0 if it is installed; empty: PROGRAM --version
    check: str = ""
    # split into arguments as a shell does, before values are filled in
    command: str
    stdin: str = ""
    env: dict[str, str] = field(default_factory=dict)  # added to `_ENV`
    # configuration files by path below the home directory; in these the fields are
    # escaped as in JSON, for a place between quotes
    files: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""  # pattern of the last line of a failure with exit code 0

    def launch(
        self, values: Mapping[str, str], arguments: Sequence[str] = ()
    ) -> Launch:
        """Return its command with the values of the fields."""
        quoted = {k: json.dumps(v, ensure_ascii=False)[1:-1] for k, v in values.items()}
        command: list[str] = []
        for word in shlex.split(self.command):
            command += arguments if word == "{arguments}" else [_fill(word, values)]
        return Launch(
            command,
            {name: _fill(text, values) for name, text in (_ENV | self.env).items()},
            {path: _fill(text, quoted).encode() for path, text in self.files.items()},
            _fill(self.stdin, values).encode(),
        )

    def ready(self, sandbox: Sandbox, *, install: bool) -> None:
        """Check that it is installed, or install it; `SandboxError` if that fails."""
        check = self.check or f"{shlex.split(self.command)[0]} --version"

        def shell(command: str, timeout_s: float) -> CommandResult:
            return sandbox.exec(["sh", "-c", command], timeout_s=timeout_s)

        if shell(check, _CHECK_SECONDS).code == 0:
            return
        if not install or not self.install:
            hint = f": {self.install}" if self.install else ""
            raise SandboxError(f"{self.name} is not installed{hint}")
        done = shell(self.install, _INSTALL_SECONDS)
        if done.code != 0:
            raise SandboxError(f"{self.install}: {done.summary}")
        if shell(check, _CHECK_SECONDS).code != 0:
            raise SandboxError(f"{self.name} is still missing after {self.install}")

    def failed(self, done: CommandResult) -> str | None:
        """Return the error of a command that has ended, else None."""
        failed = self.failure and re.search(self.failure, done.last_line)
        return done.summary if done.code or failed else None


def _fill(text: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda found: values[found[1]], text)


_RECORDS = files("trajkit_rollout").joinpath("harnesses.toml").read_text("utf-8")

HARNESSES: Mapping[str, Harness] = {
    name: Harness(name=name, **record)
    for name, record in tomllib.loads(_RECORDS).items()
}
"""Our harnesses by name."""


@dataclass(slots=True)
class Rollout:
    """One session of a run; a row of the ``sessions`` table."""

    session_id: str
    group_id: str
    harness: str
    sandbox: str
    sample: int = 0  # index among the task's rollouts
    attempt: int = 1
    started_at: float = field(default_factory=time.time)  # in the table a timestamp
    reward: float | None = None
    error: str | None = None
    # finished, timed_out, turn_limit or failed; None: it did not run
    agent_end: str | None = None
    exit_code: int | None = None  # None: killed
    turns: int | None = None  # answered turns
    patch_bytes: int | None = None  # None: no patch
    # changes that were not graded, because they could change how tests run
    findings: list[str] = field(default_factory=list)
    # of the agent, and of the entire rollout: None until that has ended
    agent_seconds: float | None = None
    seconds: float | None = None


_OWN = {
    **dict.fromkeys(("sample", "attempt"), pa.int32()),
    **dict.fromkeys(("harness", "sandbox"), pa.string()),
    "started_at": pa.timestamp("us", tz="UTC"),
    "agent_end": pa.string(),
    **dict.fromkeys(("exit_code", "turns"), pa.int32()),
    "patch_bytes": pa.int64(),
    "findings": pa.list_(pa.string()),
    **dict.fromkeys(("agent_seconds", "seconds"), pa.float64()),
}
ROLLOUTS = pa.schema([*SESSIONS, *_OWN.items()], metadata=SESSIONS.metadata)
"""``sessions``, with the columns of a rollout."""


def sessions_table(rollouts: Iterable[Rollout]) -> pa.Table:
    """Return rollouts as a table of `ROLLOUTS`."""
    rows = [asdict(rollout) for rollout in rollouts]
    for row in rows:
        row["started_at"] = int(row["started_at"] * 1e6)
    return pa.Table.from_pylist(rows, schema=ROLLOUTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a run; names are those of the command's options."""

    harness: Harness
    argument: Sequence[str] = ()  # extra arguments of its command
    install: bool = False  # install it in each sandbox if it is missing
    sandbox: type[Sandbox] = SANDBOXES["local"]
    # See `trajkit_rollout.sandbox.Spec`. A task's own image has precedence.
    sandbox_option: Mapping[str, str] = field(default_factory=dict)
    path: Sequence[str] = ()
    gateway_url: str | None = None
    image: str | None = None
    repeat: int = 1  # rollouts per task, which form a group
    parallel: int = 1  # concurrent rollouts
    retry_failed: bool = False  # repeat an earlier call's that have an error
    timeout: float | None = None  # seconds of every agent, overriding its task
    untrusted: bool = False  # refuse a sandbox that exposes something

    @classmethod
    def chosen(cls, given: Mapping[str, Any]) -> Self:
        """Return the settings of a command's options; `ValueError` if one is invalid."""
        options = {}
        for text in given["sandbox_option"]:
            name, equals, options[name] = text.partition("=")
            if not equals:
                raise ValueError(f"--sandbox-option {name}: NAME=VALUE is expected")
        harness: Any = _find(given["harness"], HARNESSES)
        sandbox: Any = _find(given["sandbox"], SANDBOXES)
        if not isinstance(harness, Harness):
            raise ValueError(f"--harness {harness!r}, not an instance of Harness")
        if not (isinstance(sandbox, type) and issubclass(sandbox, Sandbox)):
            raise ValueError(f"--sandbox {sandbox!r}, not a subclass of Sandbox")
        given = {**given, "sandbox_option": options}
        given |= {"harness": harness, "sandbox": sandbox}
        return cls(**{each.name: given[each.name] for each in fields(cls)})

    @property
    def names(self) -> tuple[str, str]:
        """The names of its harness and its kind of sandbox (or the import path of that)."""
        kind = self.sandbox
        ours = SANDBOXES.get(kind.kind) is kind
        path = f"{kind.__module__}:{kind.__qualname__}"
        return self.harness.name, kind.kind if ours else path


def _find(name: str, known: Mapping[str, object]) -> object:
    """The object of a known name (``_`` for ``-`` is accepted) or import path."""
    if (found := known.get(name.replace("_", "-"))) is not None:
        return found
    if ":" not in name:
        rule = f"is not one of {', '.join(known)}, nor an import path"
        raise ValueError(f"{name!r} {rule} (package.module:name)")
    try:
        return resolve_name(name)
    except (AttributeError, ImportError) as error:
        raise ValueError(f"{name!r}: {error}") from error


class Stopped(Exception):
    """The run ends, so this rollout has no result."""


def run_task(
    task: Task,
    settings: Settings,
    gateway: GatewayClient | str | Sequence[str],
    out: Path,
    *,
    token: str = "",
    rollout: Rollout | None = None,
) -> Rollout:
    """Have an agent work on a task, and grade what it did.

    May be called in any process, for example an actor of Ray. A failure is the ``error``
    of the result, whose `sessions_table` is a row of the ``sessions`` table.

    Parameters
    ----------
    task, settings : Task, Settings
        What to do (see `read_tasks`), and the harness, the sandbox and their options.
    gateway : GatewayClient or str or sequence of str
        The gateway that records the calls, or its URL, or several, of which the name of
        the session chooses one. In a URL, ``{node}`` is the address of Ray's node.
    out : Path
        A directory that gets ``sessions/ID`` with the agent's log and patch.
    token : str
        The admin token of the gateways, where URLs are given.
    rollout : Rollout, optional
        The row to fill in. Default: a new one, with a session id of its own.
    """
    name = f"{task.id}.0.{secrets.token_hex(8)}"
    rollout = rollout or Rollout(name, task.id, *settings.names)
    with ExitStack() as stack:
        if not isinstance(gateway, GatewayClient):
            urls = [gateway] if isinstance(gateway, str) else gateway
            url = urls[sum(rollout.session_id.encode()) % len(urls)]
            if NODE in url:
                ray = importlib.import_module("ray")
                url = url.replace(NODE, ray.util.get_node_ip_address())
            gateway = stack.enter_context(GatewayClient(url, token))
        Attempt(task, settings, rollout, out).run(gateway)
    return rollout


@dataclass(slots=True)
class Attempt:
    """A rollout that runs: fills the fields of a `Rollout`."""

    task: Task
    settings: Settings
    rollout: Rollout
    out: Path
    # sandboxes that exist, which the end of a run stops; it sets ``stopping`` before
    live: set[Sandbox] = field(default_factory=set)
    stopping: threading.Event = field(default_factory=threading.Event)

    def run(self, gateway: GatewayClient) -> None:
        """Run it to a reward or an error. Raises `Stopped`."""
        clock, rollout = time.monotonic(), self.rollout
        try:
            self._work(gateway)
        except Exception as error:
            stage = next((v for k, v in _STAGES.items() if isinstance(error, k)), None)
            if stage is None and not self.stopping.is_set():
                # other rollouts continue
                _LOG.exception("rollout %s", rollout.session_id)
                stage = f"{type(error).__name__}: "
            rollout.error, rollout.reward = visible(f"{stage}{error}"), None
        if self.stopping.is_set():
            # its processes were killed, so its result is not valid
            raise Stopped
        rollout.seconds = time.monotonic() - clock

    def _work(self, gateway: GatewayClient) -> None:
        rollout, fault, patch = self.rollout, None, b""
        folder = self.out / "sessions" / rollout.session_id
        folder.mkdir(parents=True)
        with self.sandbox(f"{rollout.session_id}-agent") as sandbox:
            self.hide(sandbox, [self.out])
            workspace = Workspace(self.task, sandbox)
            workspace.prepare()
            try:
                self._agent(workspace, folder / "agent.log", gateway)
                patch = workspace.diff()
            except (AgentError, SandboxError) as error:
                # without a turn there is nothing to train
                if self.stopping.is_set() or not rollout.turns:
                    raise
                fault = error
        # the agent, its processes and everything that they could write are gone
        (folder / "patch.diff").write_bytes(patch)
        rollout.patch_bytes = len(patch)
        self.judge(patch, fault)

    def hide(self, sandbox: Sandbox, paths: Iterable[Path]) -> None:
        """Raise `SandboxError` if an agent would see or reach more than it may."""
        sandbox.hide(paths)
        if sandbox.exposes and self.settings.untrusted:
            raise SandboxError(f"--untrusted: {sandbox.exposes}")

    def _agent(self, workspace: Workspace, log: Path, gateway: GatewayClient) -> None:
        """Have the agent work; `StageError` if it failed."""
        task, rollout, limit = self.task, self.rollout, self.task.agent.max_turns
        sandbox, harness = workspace.sandbox, self.settings.harness
        harness.ready(sandbox, install=self.settings.install)
        about = {"task": task.id, "sample": rollout.sample}
        session = gateway.open(rollout.session_id, max_turns=limit, metadata=about)
        values = {
            "api_key": session.api_key,
            "base_url": sandbox.map_url(session.base_url),
            "model": gateway.models()[0],
            "prompt": task.prompt,
            "home": sandbox.map_path("/home"),
            "workspace": workspace.path,
        }
        launch = harness.launch(values, self.settings.argument)
        sandbox.put(pack(launch.files), values["home"])
        clock, rollout.agent_end = time.monotonic(), "failed"
        try:
            done = sandbox.exec(
                launch.command,
                timeout_s=self.settings.timeout or task.agent.timeout_s,
                cwd=workspace.path,
                env={**AGENT_ENV, **launch.env},
                stdin=launch.stdin,
                log=log,
            )
        finally:
            rollout.agent_seconds = time.monotonic() - clock
            ended = gateway.finish(rollout.session_id)
            rollout.turns = turns = int(str(ended["answered"]))
        rollout.exit_code, wrong = done.code, harness.failed(done)
        if done.code is None:
            rollout.agent_end = "timed_out"
        elif wrong is None:
            rollout.agent_end = "finished"
        elif limit is not None and turns >= limit:
            # the gateway rejected its call, which harnesses treat as a failure
            rollout.agent_end = "turn_limit"
        elif turns == 0 or ended["failed"]:
            raise StageError("harness", wrong)
        else:
            # the model got all its answers: it may have ended its harness itself
            self._find(f"the harness failed: {wrong}")
        if turns == 0:
            raise StageError("harness", "it ended without an answered model call")

    def judge(self, patch: bytes, fault: Exception | None = None) -> None:
        """Grade a patch; 0 if the agent is the reason why that is not possible.

        ``fault``: why there is no patch.
        """
        rollout, caused = self.rollout, False
        try:
            with self.sandbox(f"{rollout.session_id}-grade", log_stop=True) as sandbox:
                copy = Workspace(self.task, sandbox)
                copy.prepare()
                caused = fault is not None or bool(patch)
                if fault is not None:
                    raise fault
                verdicts = copy.apply(patch)
                self._list(verdicts)
                caused = any(verdict != "refused" for verdict in verdicts.values())
                finished = rollout.agent_end == "finished"
                rollout.reward = grade(copy, patch, finished=finished)
                return
        except (StageError, SandboxError) as error:
            caused = caused or isinstance(error, AgentError | LimitError)
            if self.stopping.is_set() or not caused:
                raise
            reason = error
        # unless no sandbox starts here any more, the agent's changes are the reason
        with self.sandbox(f"{rollout.session_id}-again") as sandbox:
            Workspace(self.task, sandbox).prepare()
        self._find(f"cannot be graded: {reason}")
        rollout.reward = 0.0

    def _list(self, verdicts: Mapping[str, str]) -> None:
        for verdict, text in _FINDINGS.items():
            names = [name for name, given in verdicts.items() if given == verdict]
            if len(names) > _MAX_FINDINGS:
                names[_MAX_FINDINGS:] = [f"{len(names):,} files in all"]
            for name in names:
                self._find(f"{text}: {name}")

    def _find(self, text: str) -> None:
        # names of files and output of agents may be any bytes
        self.rollout.findings.append(visible(text))

    def solution(self) -> bytes:
        """Return the patch of the task's solution."""
        task = self.task
        if task.solution is None:
            raise StageError("self-test", "the task has no solution")
        with self.sandbox(f"{task.id}.solution") as sandbox:
            workspace = Workspace(task, sandbox)
            workspace.prepare()
            folder = sandbox.map_path("/solution") if task.solve else workspace.path
            sandbox.put(task.solution, folder)
            shell = ["sh", "-c", task.solve.replace("{solution}", folder)]
            seconds = task.agent.timeout_s
            done = sandbox.exec(shell, timeout_s=seconds, cwd=workspace.path)
            if done.code != 0:
                raise StageError("self-test", shell[-1], done.summary)
            return workspace.diff()

    @contextmanager
    def sandbox(self, name: str, *, log_stop: bool = False) -> Iterator[Sandbox]:
        """Create a sandbox for the ``with`` block.

        ``log_stop``: if it cannot be stopped, that is logged and not raised.
        """
        task, settings = self.task, self.settings
        sandbox = settings.sandbox(
            Spec(
                # container names must not contain ~
                name=f"trajkit-{name.replace('~', '-')}",
                scratch=self.out / "sandboxes",
                image=task.image or settings.image,
                limits=replace(task.limits, **dict.fromkeys(self.unenforced())),
                path=settings.path,
                gateway=settings.gateway_url,
                options=settings.sandbox_option,
                build=task.build,
                plain=task.plain,
                places=task.places,
            )
        )
        # before the check: either the end of the run finds it, or the check finds the end
        self.live.add(sandbox)
        try:
            if self.stopping.is_set():
                raise Stopped
            sandbox.start()
            yield sandbox
        finally:
            self.live.discard(sandbox)
            (stop_or_log if log_stop else Sandbox.stop)(sandbox)

    def unenforced(self) -> list[str]:
        """Return limits of another project's task that this kind of sandbox has not."""
        # in a task of trajkit's own form they are refused
        given = asdict(self.task.limits).items() if self.task.places else ()
        known = self.settings.sandbox.limits
        return [name for name, value in given if value and name not in known]


def stop_or_log(sandbox: Sandbox) -> None:
    """Stop a sandbox; a failure is logged."""
    try:
        sandbox.stop()
    except Exception:
        _LOG.exception("sandbox %s", sandbox.spec.name)


class Callback:
    """Posts each finished rollout to a trainer's URL, at most three times.

    Failed posts are counted; the ``sessions`` table still has the rollout. An invalid
    URL raises `ValueError`.
    """

    def __init__(self, url: str) -> None:
        try:
            self._url = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ValueError(f"--callback {url!r}: {error}") from error
        self._client = httpx.Client(timeout=_CALLBACK_SECONDS, trust_env=False)
        self.missed = 0

    def __call__(self, rollout: Rollout) -> None:
        for pause in _PAUSES_SECONDS:
            with suppress(httpx.HTTPError):
                if self._client.post(self._url, json=asdict(rollout)).is_success:
                    return
            time.sleep(pause)
        self.missed += 1


class RunLog:
    """``rollouts.log`` of a run, locked by one process at a time.

    ``digests``: of the tasks by id (`Task.digest`). Raises `FormatError` if it is locked
    or invalid, or was started with another harness, sandbox, task or default of a key.
    """

    def __init__(
        self, path: Path, harness: str, sandbox: str, digests: Mapping[str, str]
    ) -> None:
        # by session, in starting order, each as it was last written
        self._rollouts: dict[str, Rollout] = {}
        # the last attempt at each sample of a task
        self._last: dict[tuple[str, int], Rollout] = {}
        self._digests: dict[str, str] = {}
        self.run_id = secrets.token_hex(4)  # part of the names of all sessions
        self._run = {"version": 2, "harness": harness, "sandbox": sandbox}
        with ExitStack() as stack:
            self._file = stack.enter_context(path.open("a+b"))
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                message = f"{path}: another process works on this run"
                raise FormatError(message) from error
            self._file.seek(0)
            *lines, torn = self._file.read().split(b"\n")
            # the write of the last line may have been interrupted
            self._file.truncate(self._file.tell() - len(torn))
            for number, line in enumerate(lines, 1):
                try:
                    self._read(json.loads(line))
                except (AttributeError, KeyError, TypeError, ValueError) as error:
                    raise FormatError(f"{path}:{number}: {error}") from error
            if not lines:
                self._write({"run": self.run_id, **self._run})
            for task_id, digest in digests.items():
                if self._digests.setdefault(task_id, digest) != digest:
                    raise FormatError(f"{path}: task {task_id!r} {_CHANGED}")
            stack.pop_all()

    def _read(self, record: dict[str, Any]) -> None:
        if "run" in record:
            for name, value in self._run.items():
                if (was := record.get(name)) != value:
                    rule = f"the run was started with {name} {was!r}, not {value!r}"
                    raise ValueError(rule)
            self.run_id = str(record["run"])
            return
        self._digests[record["group_id"]] = record.pop("task")
        rollout = Rollout(**record)
        self._rollouts[rollout.session_id] = rollout
        self._last[rollout.group_id, rollout.sample] = rollout

    def _write(self, record: dict[str, Any]) -> None:
        # several threads may call the methods of a file
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()
        self._read(record)

    def write(self, rollout: Rollout) -> None:
        """Log a rollout, as it starts or ends."""
        self._write({"task": self._digests[rollout.group_id], **asdict(rollout)})

    def done(self, task_id: str, sample: int, failed_again: bool) -> bool:
        """Return whether a rollout has ended (with ``failed_again``, without error)."""
        last = self._last.get((task_id, sample))
        ended = last is not None and last.seconds is not None
        return ended and not (failed_again and last and last.error)

    def begin(self, task_id: str, sample: int) -> Rollout:
        """Log the start of a task's rollout, and return it."""
        last = self._last.get((task_id, sample))
        attempt = 1 if last is None else last.attempt + 1
        name = f"{task_id}.{sample}.{self.run_id}"
        name += f"~{attempt}" if attempt > 1 else ""
        names = str(self._run["harness"]), str(self._run["sandbox"])
        rollout = Rollout(name, task_id, *names, sample, attempt)
        self.write(rollout)
        return rollout

    def table(self) -> pa.Table:
        """Return all rollouts as `ROLLOUTS`; repeated and unended ones count as errors."""
        rows = []
        for rollout in self._rollouts.values():
            error = _STOPPED if rollout.seconds is None else rollout.error
            last = self._last[rollout.group_id, rollout.sample]
            if last is not rollout:
                error = f"{error} (sampled again as {last.session_id})"
            rows.append(replace(rollout, error=error))
        return sessions_table(rows)

    def close(self) -> None:
        """Close the file and unlock it."""
        self._file.close()


_Perform: TypeAlias = Callable[[Task, Rollout], Rollout | None]


class Rollouts:
    """The rollouts of one run; a context manager that locks the run's directory.

    ``out``: the run's directory, created if missing. A run of the same harness and
    sandbox is continued; `FormatError` if that is not possible. ``on_end``: called with
    each finished `Rollout`, on its thread. ``hidden``: files of this machine that no agent
    may see, besides ``out``.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        settings: Settings,
        out: Path,
        on_end: Callable[[Rollout], None] | None = None,
        hidden: Sequence[Path] = (),
    ) -> None:
        self._settings, self._out, self._on_end = settings, out, on_end
        self._scratch, self._hidden = out / "sandboxes", (out, *hidden)
        self._stopping, self._live = threading.Event(), set[Sandbox]()
        out.mkdir(parents=True, exist_ok=True)
        digests = {task.id: task.digest() for task in tasks}
        self._log = RunLog(out / "rollouts.log", *settings.names, digests)
        try:
            if self._scratch.exists():  # left by a killed run
                clear(self._scratch)
        except BaseException:
            self._log.close()
            raise
        # group by group, so that the first groups are complete early
        wanted = [(t, sample) for t in tasks for sample in range(settings.repeat)]
        self.todo = [  # unfinished rollouts
            (task, sample)
            for task, sample in wanted
            if not self._log.done(task.id, sample, settings.retry_failed)
        ]
        self.before = len(wanted) - len(self.todo)  # finished in earlier calls
        if not self.todo:
            # the last call may have been killed before it did so
            self._write_table()

    def try_out(self) -> str | None:
        """Check that a sandbox can be created and has the harness.

        Returns what the sandbox exposes (`Sandbox.exposes`) and which limits the kernel
        does not hold. Raises `SandboxError`.
        """
        attempts = [self._unlogged(task, 0, "try") for task, _ in self.todo]
        with attempts[0].sandbox(f"try.{self._log.run_id}") as sandbox:
            attempts[0].hide(sandbox, self._hidden)
            self._settings.harness.ready(sandbox, install=self._settings.install)
            names = {name for attempt in attempts for name in attempt.unenforced()}
            rule = f"limits that a {sandbox.kind} sandbox does not enforce: "
            limits = rule + ", ".join(sorted(names)) if names else None
            notes = (sandbox.exposes, limits, sandbox.loose)
            return "; ".join(filter(None, notes)) or None

    def run(
        self,
        gateways: str | Sequence[str],
        token: str = "",
        ray: str | None = None,
        resources: Mapping[str, float] = {},
    ) -> list[Rollout]:
        """Run all unfinished rollouts, and write the ``sessions`` table.

        If interrupted, running rollouts end without a result and are repeated by the next
        call on the directory. ``gateways``: their URLs. ``ray``: the address of a cluster
        whose workers run them; each takes ``resources``. Raises `ConnectionError` if a
        gateway cannot be used.
        """
        ended = []
        pool = ThreadPoolExecutor(self._settings.parallel, "rollout")
        with ExitStack() as stack:
            if ray is None:
                client = stack.enter_context(GatewayClient(gateways, token))
                client.models()
                perform: _Perform = partial(self._here, client)
            else:
                cluster = importlib.import_module("ray")
                if not cluster.is_initialized():
                    cluster.init(ray, log_to_driver=False)
                    stack.callback(cluster.shutdown)
                given = self._settings, gateways, self._out
                perform = self._in_cluster(given, token, resources)
            progress = stack.enter_context(Progress("rollouts", "rollouts"))
            progress.begin(len(self.todo))
            # each of these runs at the end, in reverse order, also if another one fails
            stack.callback(self._write_table)
            stack.callback(pool.shutdown, cancel_futures=True)
            stack.callback(self._stop)
            futures = [pool.submit(self._one, perform, *each) for each in self.todo]
            for future in as_completed(futures):
                ended.append(future.result())
                progress.advance(1)
        return ended

    def self_test(self) -> Iterator[Rollout]:
        """Grade each task's solution, and no change at all, without an agent.

        The samples are ``solution`` and ``nothing`` in the session's id.
        """
        for task in {task.id: task for task, _ in self.todo}.values():
            for sample, name in enumerate(("solution", "nothing")):
                attempt = self._unlogged(task, sample, name)
                attempt.rollout.agent_end = "finished"
                try:
                    attempt.judge(b"" if sample else attempt.solution())
                except (StageError, SandboxError) as error:
                    attempt.rollout.error = visible(str(error))
                yield attempt.rollout

    def _write_table(self) -> None:
        write_table(self._log.table(), self._out / "sessions.parquet")

    def _stop(self) -> None:
        self._stopping.set()
        for sandbox in list(self._live):
            stop_or_log(sandbox)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._log.close()
        with suppress(OSError):
            remove(self._scratch)

    def _one(self, perform: _Perform, task: Task, sample: int) -> Rollout:
        for _ in range(_MAX_DEATHS):
            if self._stopping.is_set():
                raise Stopped
            started = self._log.begin(task.id, sample)
            ended = perform(task, started)
            if ended is not None:
                break
        else:
            ended = started
            ended.error = f"ray: its worker died {_MAX_DEATHS} times"
            ended.seconds = time.time() - ended.started_at
        self._log.write(ended)
        if self._on_end is not None:
            self._on_end(ended)
        return ended

    def _here(self, client: GatewayClient, task: Task, rollout: Rollout) -> Rollout:
        self._attempt(task, rollout).run(client)
        return rollout

    def _in_cluster(
        self, given: tuple[Any, ...], token: str, resources: Mapping[str, float]
    ) -> _Perform:
        """What has Ray run a rollout; it returns None if its worker died."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        remote = ray.remote(max_retries=0)(run_task)
        files = {task.id: ray.put(task) for task, _ in self.todo}

        def perform(task: Task, rollout: Rollout) -> Rollout | None:
            cpus, memory_mb = task.limits.cpus or 1, task.limits.memory_mb or 0
            options = {"memory": memory_mb << 20} if memory_mb else {}
            start = remote.options(num_cpus=cpus, resources=resources, **options)
            job = start.remote(files[task.id], *given, token=token, rollout=rollout)
            try:
                while not ray.wait([job], timeout=1.0)[0]:
                    if self._stopping.is_set():
                        ray.cancel(job, force=True)
                        raise Stopped
                ended: Rollout = ray.get(job)
            except RayTaskError as error:
                rollout.error = visible(f"ray: {error.cause}")
                rollout.seconds = time.time() - rollout.started_at
                return rollout
            except RayError:
                return None
            return ended

        return perform

    def _unlogged(self, task: Task, sample: int, name: str) -> Attempt:
        names = f"{task.id}.{name}", task.id, *self._settings.names
        return self._attempt(task, Rollout(*names, sample))

    def _attempt(self, task: Task, rollout: Rollout) -> Attempt:
        shared = self._out, self._live, self._stopping
        return Attempt(task, self._settings, rollout, *shared)
