"""One rollout: an agent works on a task in a sandbox, and a copy of its work is graded."""

import importlib
import logging
import math
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Self

import pyarrow as pa

from trajkit.cli.screen import visible
from trajkit.schema import SESSIONS
from trajkit_rollout.grade import grade
from trajkit_rollout.harness import HARNESSES, Harness, Job
from trajkit_rollout.remote import SANDBOXES
from trajkit_rollout.sandbox import LimitError, Sandbox, SandboxError, Spec, remove
from trajkit_rollout.tasks import Task
from trajkit_rollout.workspace import AGENT_ENV, AgentError, StageError, Workspace
from trajkit_shim.client import GatewayClient
from trajkit_shim.errors import GatewayError

NODE = "{node}"
"""In the URL of a gateway: the address of the machine that a rollout runs on."""

_LOG = logging.getLogger(__name__)
# prefixes of the expected errors of a rollout
_STAGES: Mapping[type[Exception], str] = {
    StageError: "",
    SandboxError: "sandbox: ",
    GatewayError: "gateway: ",
    ConnectionError: "gateway: ",
}
_MAX_FINDINGS = 100
# how changes are named, by their verdict (`trajkit_rollout.workspace.choose`)
_FINDINGS = {
    "refused": "not graded",
    "risky": "graded, but it can change how tests run",
}


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
        pairs = [option.partition("=") for option in given["sandbox_option"]]
        for name, equals, _ in pairs:
            if not equals:
                raise ValueError(f"--sandbox-option {name}: NAME=VALUE is expected")
        if given["timeout"] is not None and not 0 < given["timeout"] < math.inf:
            raise ValueError(f"--timeout {given['timeout']:g} is not above 0")
        harness = _find(given["harness"], HARNESSES)
        if not isinstance(harness, Harness):
            raise ValueError(f"--harness {harness!r}, not an instance of Harness")
        sandbox = _find(given["sandbox"], SANDBOXES)
        if not (isinstance(sandbox, type) and issubclass(sandbox, Sandbox)):
            raise ValueError(f"--sandbox {sandbox!r}, not a subclass of Sandbox")
        options = {name: value for name, _, value in pairs}
        own = {"harness": harness, "sandbox": sandbox, "sandbox_option": options}
        return cls(**{each.name: {**given, **own}[each.name] for each in fields(cls)})

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
    task : Task
        See `read_tasks`.
    settings : Settings
        The harness, the sandbox and their options.
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
    if not isinstance(gateway, GatewayClient):
        urls = [gateway] if isinstance(gateway, str) else gateway
        url = urls[sum(rollout.session_id.encode()) % len(urls)]
        if NODE in url:
            ray = importlib.import_module("ray")
            url = url.replace(NODE, ray.util.get_node_ip_address())
        with GatewayClient(url, token) as client:
            return run_task(task, settings, client, out, rollout=rollout)
    scratch = out / "sandboxes" / rollout.session_id.replace("~", "-")
    Attempt(task, settings, rollout, out, scratch).run(gateway)
    with suppress(OSError):
        remove(scratch)
    return rollout


@dataclass(slots=True)
class Attempt:
    """A rollout that runs: fills the fields of a `Rollout`."""

    task: Task
    settings: Settings
    rollout: Rollout
    out: Path
    scratch: Path  # for sandboxes
    # sandboxes that exist, which the end of a run stops; it sets ``stopping`` before
    live: set[Sandbox] = field(default_factory=set)
    stopping: threading.Event = field(default_factory=threading.Event)
    digest: str | None = None  # of the task as the run started (`Task.digest`)

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
        rollout, digest = self.rollout, self.digest or self.task.digest()
        folder = self.out / "sessions" / rollout.session_id
        folder.mkdir(parents=True)
        fault, patch = None, b""
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
        if self.task.digest() != digest:
            raise StageError("grade", "the task's files changed while the agent worked")
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
        job = Job(
            api_key=session.api_key,
            base_url=sandbox.map_url(session.base_url),
            model=gateway.models()[0],
            prompt=task.prompt,
            home=sandbox.map_path("/home"),
            workspace=workspace.path,
            arguments=tuple(self.settings.argument),
        )
        clock = time.monotonic()
        rollout.agent_end = "failed"
        try:
            seconds = self.settings.timeout or task.agent.timeout_s
            done = harness.run(sandbox, job, env=AGENT_ENV, timeout_s=seconds, log=log)
        finally:
            rollout.agent_seconds = time.monotonic() - clock
            ended = gateway.finish(rollout.session_id)
            rollout.turns = turns = int(str(ended["answered"]))
        rollout.exit_code = done.code
        wrong = None if done.code is None else harness.failed(done)
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
        with self.sandbox(f"{self.rollout.session_id}-grade", log_stop=True) as sandbox:
            copy = Workspace(self.task, sandbox)
            copy.prepare()
            changed = bool(patch)
            try:
                if fault is not None:
                    raise AgentError(str(fault))
                verdicts = copy.apply(patch)
                self._list(verdicts)
                changed = any(verdict != "refused" for verdict in verdicts.values())
                finished = self.rollout.agent_end == "finished"
                self.rollout.reward = grade(copy, patch, finished=finished)
                return
            except (StageError, SandboxError) as error:
                caused = changed or isinstance(error, AgentError | LimitError)
                if self.stopping.is_set() or not caused:
                    raise
                reason = error
        # unless no sandbox starts here any more, the agent's changes are the reason
        with self.sandbox(f"{self.rollout.session_id}-again") as sandbox:
            Workspace(self.task, sandbox).prepare()
        self._find(f"cannot be graded: {reason}")
        self.rollout.reward = 0.0

    def _list(self, verdicts: Mapping[str, str]) -> None:
        """Add changes that are not graded, or risky, to the findings."""
        for verdict, text in _FINDINGS.items():
            names = [name for name, given in verdicts.items() if given == verdict]
            more = (
                [f"{len(names):,} files in all"] if len(names) > _MAX_FINDINGS else []
            )
            for name in [*names[:_MAX_FINDINGS], *more]:
                self._find(f"{text}: {name}")

    def solution(self) -> bytes:
        """Return the patch of the task's solution."""
        task = self.task
        if task.solution is None:
            raise StageError("self-test", "the task has no solution")
        with self.sandbox(f"{task.id}.solution") as sandbox:
            workspace = Workspace(task, sandbox)
            workspace.prepare()
            folder = sandbox.map_path("/solution") if task.solve else workspace.path
            sandbox.put(task.solution.archive(), folder)
            if task.solve:
                command = task.solve.replace("{solution}", folder)
                seconds, shell = task.agent.timeout_s, ["sh", "-c", command]
                done = sandbox.exec(shell, timeout_s=seconds, cwd=workspace.path)
                if done.code != 0:
                    raise StageError("self-test", command, done.summary)
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
                scratch=self.scratch,
                image=task.image or settings.image,
                limits=replace(task.limits, **dict.fromkeys(self.unenforced())),
                path=tuple(settings.path),
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

    def _find(self, text: str) -> None:
        # names of files and output of agents may be any bytes
        self.rollout.findings.append(visible(text))


def stop_or_log(sandbox: Sandbox) -> None:
    """Stop a sandbox; a failure is logged."""
    try:
        sandbox.stop()
    except Exception:
        _LOG.exception("sandbox %s", sandbox.spec.name)
