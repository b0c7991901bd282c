"""Rollouts: an agent works on a task in a sandbox, and a copy of its work is graded.

Many run at once, here or in workers of a Ray cluster. A stopped run is continued from its
log. Sessions that never ended are marked as interrupted by the ``sessions`` table, which
excludes their turns from training.
"""

import fcntl
import importlib
import json
import logging
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeAlias

import httpx
import pyarrow as pa

from trajkit.cli import visible
from trajkit.cli.screen import Progress
from trajkit.errors import ArgumentError, FormatError
from trajkit.files.tables import write_table
from trajkit.schema import SESSIONS
from trajkit_rollout import sandbox as sandboxes
from trajkit_rollout.grade import (
    AGENT_ENV,
    AgentError,
    StageError,
    TaskError,
    Workspace,
    grade,
    variables,
)
from trajkit_rollout.sandbox import LimitError, Sandbox, SandboxError, SandboxSpec
from trajkit_rollout.settings import Settings
from trajkit_rollout.tasks import Task, pack
from trajkit_shim.client import GatewayClient
from trajkit_shim.errors import GatewayError

# in the URL of a gateway: the address of the machine that a rollout runs on
_NODE = "{node}"
_LOG = logging.getLogger(__name__)
_CALLBACK_SECONDS, _PAUSES_SECONDS = 10.0, (0.5, 2.0, 0.0)
# calls to end a session; each waits for a minute if the gateway is busy
_FINISH_CALLS = 20
# workers that may die during one rollout, before that is its error
_MAX_DEATHS, _MAX_FINDINGS, _MAX_NAME = 3, 100, 300
_COMPILED = "/__pycache__/"
# prefixes of the expected errors of a rollout
_STAGES: dict[type[Exception], str] = {StageError: "", SandboxError: "sandbox: "}
_STAGES |= {GatewayError: "gateway: ", ConnectionError: "gateway: "}
_RISKY = "graded, but it can change how tests run"
_FINDINGS = {"refused": "not graded", "risky": _RISKY}
_STOPPED = "interrupted: the run was stopped before it ended"
_CHANGED = (
    "has changed since the run started, or trajkit's default of a key has: "
    "choose another directory for a new run"
)


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


class Stopped(Exception):
    """The run ends, so this rollout has no result."""


def run_task(
    task: Task,
    settings: Settings,
    gateway: str | Sequence[str],
    out: Path,
    *,
    token: str = "",
    rollout: Rollout | None = None,
    stopping: threading.Event | None = None,
) -> Rollout:
    """Have an agent work on a task, and grade what it did, in any process.

    A failure is the ``error`` of the result, a row for `sessions_table`.

    Parameters
    ----------
    task, settings
        What to do (see `read_tasks`), and the harness, the sandbox and their options.
    gateway
        URL of the gateway, or several, of which the name of the session chooses one. In a
        URL, ``{node}`` is the address of Ray's node.
    out
        A directory that gets ``sessions/ID`` with the agent's log and patch.
    token
        The admin token of the gateways.
    rollout
        The row to fill in. Default: a new one, with a session id of its own.
    stopping
        Once it is set, the rollout ends and raises `Stopped`.
    """
    rollout = rollout or _begun(task, settings, secrets.token_hex(8))
    urls = [gateway] if isinstance(gateway, str) else gateway
    url = urls[sum(rollout.session_id.encode()) % len(urls)]
    if _NODE in url:
        ray = importlib.import_module("ray")
        url = url.replace(_NODE, ray.util.get_node_ip_address())
    attempt = Attempt(task, settings, rollout, out, stopping or threading.Event())
    with GatewayClient(url, token) as client:
        attempt.run(partial(attempt.work, client))
    return rollout


def _begun(
    task: Task, settings: Settings, run: str, sample: int = 0, attempt: int = 1
) -> Rollout:
    """The row of a rollout that begins, with the name of its session."""
    name = f"{task.id}.{sample}.{run}" + (f"~{attempt}" if attempt > 1 else "")
    harness = settings.resolve()[0].name
    return Rollout(name, task.id, harness, settings.sandbox, sample, attempt)


@dataclass(slots=True)
class Attempt:
    """A rollout that runs: fills the fields of a `Rollout`."""

    task: Task
    settings: Settings
    rollout: Rollout
    out: Path
    stopping: threading.Event

    def run(self, work: Callable[[], None]) -> None:
        """Run `work` or `test` to a reward or an error. Raises `Stopped`."""
        clock, rollout, stopping = time.monotonic(), self.rollout, self.stopping
        try:
            work()
        except Exception as error:
            stage = next((v for k, v in _STAGES.items() if isinstance(error, k)), None)
            if stage is None and not stopping.is_set():
                # other rollouts continue
                _LOG.exception("rollout %s", rollout.session_id)
                stage = f"{type(error).__name__}: "
            rollout.error, rollout.reward = visible(f"{stage}{error}"), None
        if stopping.is_set():
            # its processes were killed, so its result is not valid
            raise Stopped
        rollout.seconds = time.monotonic() - clock

    def work(self, gateway: GatewayClient) -> None:
        """Have the agent work, and grade what it changed."""
        rollout, fault, patch = self.rollout, None, b""
        folder = self.out / "sessions" / rollout.session_id
        folder.mkdir(parents=True)
        with self.sandbox("agent") as sandbox:
            self.settings.check(sandbox, [self.out])
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

    def _agent(self, workspace: Workspace, log: Path, gateway: GatewayClient) -> None:
        task, rollout, settings = self.task, self.rollout, self.settings
        sandbox, limit = workspace.sandbox, task.agent.max_turns
        harness, _, _ = settings.resolve()
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
        command, env, files, stdin = harness.launch(values, settings.argument)
        sandbox.put(pack(files), values["home"])
        clock, rollout.agent_end = time.monotonic(), "failed"
        try:
            done = sandbox.exec(
                command,
                timeout_s=settings.timeout or task.agent.timeout_s,
                cwd=workspace.path,
                env={**AGENT_ENV, **env},
                stdin=stdin,
                log=log,
            )
        finally:
            rollout.agent_seconds = time.monotonic() - clock
            ended = _finish(gateway, rollout.session_id)
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
            rollout.findings.append(visible(f"the harness failed: {wrong}"))
        if turns == 0:
            raise StageError("harness", "it ended without an answered model call")

    def judge(self, patch: bytes, fault: Exception | None = None) -> None:
        """Grade a patch; 0 if the agent is the reason why that is not possible.

        ``fault``: why there is no patch.
        """
        rollout, caused = self.rollout, False
        try:
            with self.sandbox("grade") as sandbox:
                copy = Workspace(self.task, sandbox)
                copy.prepare()
                caused = fault is not None or bool(patch)
                if fault is not None:
                    raise fault
                verdicts = copy.apply(patch)
                rollout.findings += _findings(verdicts)
                caused = any(verdict != "refused" for verdict in verdicts.values())
                finished = rollout.agent_end == "finished"
                rollout.reward = grade(copy, patch, finished=finished)
            return
        except (StageError, SandboxError) as error:
            if rollout.reward is not None:
                # only the copy cannot be removed
                _LOG.exception("sandbox of %s", rollout.session_id)
                return
            caused = caused or isinstance(error, AgentError | LimitError)
            if self.stopping.is_set() or not caused or isinstance(error, TaskError):
                raise
            reason = error
        if not isinstance(reason, AgentError):
            # unless no sandbox starts here any more, the agent's changes are the reason
            with self.sandbox("again") as sandbox:
                Workspace(self.task, sandbox).prepare()
        rollout.findings.append(visible(f"cannot be graded: {reason}"))
        rollout.reward = 0.0

    def test(self) -> None:
        """Grade the task's solution as sample 0, no change as sample 1."""
        self.rollout.agent_end = "finished"
        self.judge(b"" if self.rollout.sample else self._solution())

    def _solution(self) -> bytes:
        task = self.task
        if task.solution is None:
            raise StageError("self-test", "the task has no solution")
        with self.sandbox("solution") as sandbox:
            workspace = Workspace(task, sandbox)
            workspace.prepare()
            folder = sandbox.map_path("/solution") if task.solve else workspace.path
            sandbox.put(task.solution, folder)
            solve = task.solve.replace("{solution}", folder)
            env = {**AGENT_ENV, **variables(task.solve_env)}
            workspace.shell("self-test", solve, task.agent.timeout_s, env)
            return workspace.diff()

    def sandbox(self, role: str) -> Sandbox:
        """Return a sandbox, in the place of one that an attempt at the sample left."""
        task, settings = self.task, self.settings
        image, (_, kind, options) = task.image or settings.image, settings.resolve()
        spec = SandboxSpec(
            name=f"trajkit-{self.rollout.session_id.partition('~')[0]}-{role}",
            scratch=self.out / "sandboxes",
            task=replace(task, image=image, env=variables(task.env)),
            path=settings.path,
            gateway=settings.gateway_url,
            options=options,
            stopping=self.stopping,
        )
        return kind(spec)


def _findings(verdicts: Mapping[str, str]) -> Iterator[str]:
    """What to say of the changes, by their verdicts (`trajkit_rollout.grade.choose`)."""
    for verdict, text in _FINDINGS.items():
        names = [name for name, v in verdicts.items() if v == verdict]
        shown = [name[:_MAX_NAME] for name in names if _COMPILED not in f"/{name}"]
        # a program that ran leaves many
        if n_compiled := len(names) - len(shown):
            shown.append(f"{n_compiled:,} files in __pycache__")
        if len(shown) > _MAX_FINDINGS:
            shown[_MAX_FINDINGS:] = [f"{len(names):,} files in all"]
        # names and output may be any bytes
        yield from (visible(f"{text}: {name}") for name in shown)


def _finish(gateway: GatewayClient, session_id: str) -> Mapping[str, object]:
    """End a session, at a gateway that its agent may have kept busy for a while."""
    for _ in range(_FINISH_CALLS - 1):
        with suppress(ConnectionError):
            return gateway.finish(session_id)
    return gateway.finish(session_id)


class Callback:
    """Posts a rollout to a URL, at most three times; returns whether it was taken.

    An invalid URL raises `ArgumentError`.
    """

    def __init__(self, url: str) -> None:
        try:
            self._url = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ArgumentError(f"--callback {url!r}: {error}") from error
        if self._url.scheme not in ("http", "https"):
            raise ArgumentError(f"--callback {url!r}: begin with http:// or https://")

    def __call__(self, rollout: Rollout) -> bool:
        for pause in _PAUSES_SECONDS:
            with suppress(httpx.HTTPError):
                options: Any = {"timeout": _CALLBACK_SECONDS, "trust_env": False}
                if httpx.post(self._url, json=asdict(rollout), **options).is_success:
                    return True
            time.sleep(pause)
        return False


_Perform: TypeAlias = Callable[..., Rollout | None]


class Rollouts:
    """The rollouts of one run; a context manager that locks the run's directory.

    ``out``: the run's directory, created if missing, else continued by its
    ``rollouts.log``, which has a line for the run, and one for each rollout as it starts
    and as it ends. Raises `FormatError` if that is not possible: it is locked or invalid,
    or was started with another harness, sandbox, task or default of a key. ``on_end``:
    called with each finished `Rollout`, on its thread; if it returned false or was killed,
    the next run of the directory calls it again. ``hidden``: files that no agent may see,
    besides ``out``. `ArgumentError`: a setting is invalid.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        settings: Settings,
        out: Path,
        on_end: Callable[[Rollout], bool] | None = None,
        hidden: Sequence[Path] = (),
    ) -> None:
        self._settings, self._out, self._on_end = settings, out, on_end
        self._hidden, self._stopping = (out, *hidden), threading.Event()
        harness = settings.resolve()[0].name
        self._run = {"version": 2, "harness": harness, "sandbox": settings.sandbox}
        self._digests = {task.id: task.digest() for task in tasks}
        # the sessions in starting order, and the last one of each sample of a task
        self._sessions: dict[str, Rollout] = {}
        self._last: dict[tuple[str, int], Rollout] = {}
        self.unsent = set[str]()  # sessions that ended, and that `on_end` has not taken
        self._run_id = secrets.token_hex(4)  # part of the names of all sessions
        out.mkdir(parents=True, exist_ok=True)
        self._file = (out / "rollouts.log").open("a+b")
        with ExitStack() as stack:
            stack.callback(self._file.close)
            self._load(out / "rollouts.log")
            sandboxes.clear(out / "sandboxes")  # left by a killed run
            stack.pop_all()
        # group by group, so that the first groups are complete early
        wanted = [(t, sample) for t in tasks for sample in range(settings.repeat)]
        # unfinished and unsent ones, and the number of those that earlier calls finished
        self.todo = [each for each in wanted if not self._is_over(*each)]
        self.before = len(wanted) - len(self.todo)
        self._tasks = {task.id: task for task, _ in self.todo}
        if not self.todo:
            # the last call may have been killed before it did so
            self._write_table()

    def _is_over(self, task: Task, sample: int) -> bool:
        last = self._last.get((task.id, sample))
        if last is None or last.seconds is None:
            return False
        if self._on_end is not None and last.session_id in self.unsent:
            return False
        return last.error is None or not self._settings.retry_failed

    def _load(self, path: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FormatError(f"{path}: another process works on this run") from error
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
            self._append({"run": self._run_id, **self._run})

    def _read(self, record: dict[str, Any]) -> None:
        if "run" in record:
            self._run_id = str(record["run"])
            for name, value in self._run.items():
                if (was := record.get(name)) != value:
                    rule = f"the run was started with {name} {was!r}, not {value!r}"
                    raise ValueError(rule)
            return
        digest, sent = record.pop("task"), record.pop("sent", True)
        rollout = Rollout(**record)
        if self._digests.setdefault(rollout.group_id, digest) != digest:
            raise ValueError(f"task {rollout.group_id!r} {_CHANGED}")
        change = self.unsent.discard if sent else self.unsent.add
        change(rollout.session_id)
        self._sessions[rollout.session_id] = rollout
        self._last[rollout.group_id, rollout.sample] = rollout

    def _append(self, record: dict[str, Any]) -> None:
        # several threads may call the methods of a file
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()
        self._read(record)

    def _write(self, rollout: Rollout, *, sent: bool = True) -> None:
        digest = self._digests[rollout.group_id]
        self._append({"task": digest, "sent": sent, **asdict(rollout)})

    def _write_table(self) -> None:
        rows = []
        for rollout in self._sessions.values():
            error = _STOPPED if rollout.seconds is None else rollout.error
            last = self._last[rollout.group_id, rollout.sample]
            if last is not rollout:
                error = f"{error} (sampled again as {last.session_id})"
            rows.append(replace(rollout, error=error))
        write_table(sessions_table(rows), self._out / "sessions.parquet")

    def try_out(self) -> str | None:
        """Check that a sandbox can be created and has the harness, or raise `SandboxError`.

        Returns what the sandbox exposes, and which limits the kernel does not hold.
        """
        name, tasks = f"try-{self._run_id}", self._tasks.values()
        attempts = [self._attempt(t, _begun(t, self._settings, name)) for t in tasks]
        with attempts[0].sandbox("try") as sandbox:
            self._settings.check(sandbox, self._hidden)
            loose = dict[str, None]()
            for attempt in attempts:
                # one that cannot be made is the error of its rollout
                with suppress(SandboxError):
                    loose |= dict.fromkeys(attempt.sandbox("try").loose)
            notes = sandbox.exposes, *loose
            return "; ".join(filter(None, notes)) or None

    def run(
        self,
        gateways: str | Sequence[str] | None,
        token: str = "",
        ray: str | None = None,
        resources: Mapping[str, float] = {},
    ) -> list[Rollout]:
        """Run all unfinished rollouts, and write the ``sessions`` table.

        What an interrupt ends has no result, and is repeated by the next call on the
        directory. ``gateways``: their URLs; None: no agent runs, sample 0 is the task's
        solution, and each other one no change. ``ray``: the address of a cluster whose
        workers run them; each takes ``resources``. `ConnectionError`: a gateway cannot be
        used.
        """
        ended = []
        pool = ThreadPoolExecutor(self._settings.parallel, "rollout")
        with ExitStack() as stack:
            job: dict[str, Any] = {"settings": self._settings, "out": self._out}
            job |= {"gateway": gateways, "token": token}
            if gateways is None:
                perform: _Perform = self._test
            elif ray is None:
                with GatewayClient(gateways, token) as client:
                    client.models()
                perform = partial(run_task, **job, stopping=self._stopping)
            else:
                cluster = importlib.import_module("ray")
                if not cluster.is_initialized():
                    cluster.init(ray)
                    # it prints what workers print, and if none can have the resources
                    stack.enter_context(redirect_stdout(sys.stderr))
                    stack.callback(cluster.shutdown)
                perform = self._in_cluster(job, resources)
            progress = stack.enter_context(Progress("rollouts", "rollouts"))
            progress.begin(len(self.todo))
            # each of these runs at the end, in reverse order, also if another one fails
            stack.callback(self._write_table)
            stack.callback(pool.shutdown, cancel_futures=True)
            stack.callback(self._stopping.set)
            futures = [pool.submit(self._one, perform, *each) for each in self.todo]
            for future in as_completed(futures):
                ended.append(future.result())
                progress.count(1)
        return ended

    def _test(self, task: Task, rollout: Rollout) -> Rollout:
        attempt = self._attempt(task, rollout)
        attempt.run(attempt.test)
        return rollout

    def _attempt(self, task: Task, rollout: Rollout) -> Attempt:
        return Attempt(task, self._settings, rollout, self._out, self._stopping)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        with suppress(OSError):
            sandboxes.remove(self._out / "sandboxes")

    def _one(self, perform: _Perform, task: Task, sample: int) -> Rollout:
        ended = self._last.get((task.id, sample))
        if ended is None or ended.session_id not in self.unsent:
            ended = self._tried(perform, task, sample)
            self._write(ended, sent=self._on_end is None)
        if self._on_end is not None and self._on_end(ended):
            self._write(ended)
        return ended

    def _tried(self, perform: _Perform, task: Task, sample: int) -> Rollout:
        for _ in range(_MAX_DEATHS):
            if self._stopping.is_set():
                raise Stopped
            last = self._last.get((task.id, sample))
            attempt = 1 if last is None else last.attempt + 1
            started = _begun(task, self._settings, self._run_id, sample, attempt)
            self._write(started)
            if (ended := perform(task, rollout=started)) is not None:
                return ended
        return _failed(started, f"ray: its worker died {_MAX_DEATHS} times")

    def _in_cluster(
        self, job: Mapping[str, Any], resources: Mapping[str, float]
    ) -> _Perform:
        import ray
        from ray.exceptions import RayError, RayTaskError

        remote: Any = ray.remote(max_retries=0)(run_task)
        stored = {name: ray.put(task) for name, task in self._tasks.items()}

        def perform(task: Task, rollout: Rollout) -> Rollout | None:
            cpus, memory_mb = task.limits.cpus or 1, task.limits.memory_mb
            takes = {"num_cpus": cpus, "memory": memory_mb and memory_mb << 20}
            start = remote.options(**takes, resources=resources)
            running = start.remote(stored[task.id], **job, rollout=rollout)
            try:
                while not ray.wait([running], timeout=1.0)[0]:
                    if self._stopping.is_set():
                        ray.cancel(running, force=True)
                        raise Stopped
                ended: Rollout = ray.get(running)
            except RayTaskError as error:
                return _failed(rollout, f"ray: {error.cause}")
            except RayError:
                return None
            return ended

        return perform


def _failed(rollout: Rollout, error: str) -> Rollout:
    seconds = time.time() - rollout.started_at
    return replace(rollout, error=visible(error), seconds=seconds)
