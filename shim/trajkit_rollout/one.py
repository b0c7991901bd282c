"""One rollout: an agent works on a task in a sandbox, and a copy of its work is graded."""

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Self

from trajkit_rollout.agents.harness import HARNESSES, Harness, Job
from trajkit_rollout.agents.sandbox import (
    LimitError,
    Sandbox,
    SandboxError,
    Spec,
    remove,
)
from trajkit_rollout.agents.sandboxes import SANDBOXES
from trajkit_rollout.grade import Work, grade
from trajkit_rollout.run_log import Rollout
from trajkit_rollout.tasks import Task
from trajkit_rollout.workspace import AGENT_ENV, AgentError, StageError, Workspace
from trajkit_shim.client import GatewayClient
from trajkit_shim.errors import GatewayError

_LOG = logging.getLogger(__name__)

_STAGES: Mapping[type[Exception], str] = {
    StageError: "",
    SandboxError: "sandbox: ",
    GatewayError: "gateway: ",
    ConnectionError: "gateway: ",
}
"""Prefixes of the expected errors of a rollout, by type."""

_MAX_FINDINGS = 100
_FINDINGS = {
    "refused": "not graded",
    "risky": "graded, but it can change how tests run",
}
"""How the changes in a list of `Choice` are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a run; names are those of the command's options."""

    harness: Harness
    argument: Sequence[str] = ()  # extra arguments of its command
    install: bool = False  # install it in each sandbox if it is missing
    sandbox: type[Sandbox] = SANDBOXES["local"]
    # See `agents.sandbox.Spec`. A task's own image has precedence.
    sandbox_option: Mapping[str, str] = field(default_factory=dict)
    path: Sequence[str] = ()
    gateway_url: str | None = None
    image: str | None = None
    repeat: int = 1  # rollouts per task, which form a group
    parallel: int = 1  # concurrent rollouts
    # repeat rollouts of an earlier run that ended with an error
    retry_failed: bool = False
    timeout: float | None = None  # seconds of every agent, overriding its task
    untrusted: bool = False  # refuse a sandbox that exposes something

    @classmethod
    def chosen(cls, arguments: SimpleNamespace) -> Self:
        """Return the settings of a command's options; `ValueError` if one is invalid."""
        given = vars(arguments)
        pairs = [option.partition("=") for option in arguments.sandbox_option]
        for name, equals, _ in pairs:
            if not equals:
                raise ValueError(f"--sandbox-option {name}: NAME=VALUE is expected")
        if arguments.timeout is not None and not 0 < arguments.timeout < math.inf:
            raise ValueError(f"--timeout {arguments.timeout:g} is not above 0")
        given["harness"] = harness = _find(arguments.harness, HARNESSES)
        if not isinstance(harness, Harness):
            rule = f"{harness!r}, not an instance of Harness"
            raise ValueError(f"--harness {arguments.harness} is {rule}")
        given["sandbox"] = sandbox = _find(arguments.sandbox, SANDBOXES)
        if not (isinstance(sandbox, type) and issubclass(sandbox, Sandbox)):
            rule = f"{sandbox!r}, not a subclass of Sandbox"
            raise ValueError(f"--sandbox {arguments.sandbox} is {rule}")
        given["sandbox_option"] = {name: value for name, _, value in pairs}
        return cls(**{each.name: given[each.name] for each in fields(cls)})

    @property
    def sandbox_name(self) -> str:
        """The name of its kind of sandbox, or the import path of another one."""
        kind = self.sandbox
        if SANDBOXES.get(kind.kind) is kind:
            return kind.kind
        return f"{kind.__module__}:{kind.__qualname__}"


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
        The gateway that records the calls, or its URL, or several.
    out : Path
        A directory that gets ``sessions/ID`` with the agent's log and patch.
    token : str
        The admin token of the gateways, where URLs are given.
    rollout : Rollout, optional
        The row to fill in. Default: a new one, with a session id of its own.
    """
    if not isinstance(gateway, GatewayClient):
        with GatewayClient(gateway, token) as client:
            return run_task(task, settings, client, out, rollout=rollout)
    rollout = rollout or Rollout(
        session_id=f"{task.id}.0.{secrets.token_hex(8)}",
        group_id=task.id,
        harness=settings.harness.name,
        sandbox=settings.sandbox_name,
    )
    scratch = out / "sandboxes" / rollout.session_id.replace("~", "-")
    Attempt(task, settings, rollout, out, scratch).run(gateway)
    with suppress(OSError):
        remove(scratch)
    return rollout


class Attempt:
    """A rollout that runs: fills the fields of a `Rollout`.

    ``sandboxes``: those that exist, which the end of a run stops; it sets ``stopping``
    before. ``digest``: of the task as the run started (`Task.digest`).
    """

    def __init__(
        self,
        task: Task,
        settings: Settings,
        rollout: Rollout,
        out: Path,
        scratch: Path,
        *,
        sandboxes: set[Sandbox] | None = None,
        stopping: threading.Event | None = None,
        digest: str | None = None,
    ) -> None:
        self.task, self.settings, self.rollout = task, settings, rollout
        self._out, self._scratch = out, scratch
        self._sandboxes = set() if sandboxes is None else sandboxes
        self._stopping = stopping or threading.Event()
        self._digest = digest or task.digest()

    def run(self, gateway: GatewayClient) -> None:
        """Run it to a reward or an error. Raises `Stopped`."""
        clock, rollout = time.monotonic(), self.rollout
        try:
            self._work(gateway)
        except Exception as error:
            stage = next((v for k, v in _STAGES.items() if isinstance(error, k)), None)
            if stage is None and not self._stopping.is_set():
                # other rollouts continue
                _LOG.exception("rollout %s", rollout.session_id)
                stage = f"{type(error).__name__}: "
            rollout.error, rollout.reward = escaped(f"{stage}{error}"), None
        if self._stopping.is_set():
            # its processes were killed, so its result is not valid
            raise Stopped
        rollout.seconds = time.monotonic() - clock

    def _work(self, gateway: GatewayClient) -> None:
        """Run the agent and grade its work."""
        rollout = self.rollout
        folder = self._out / "sessions" / rollout.session_id
        folder.mkdir(parents=True)
        fault, patch = None, b""
        with self.sandbox(f"{rollout.session_id}-agent") as sandbox:
            sandbox.hide([self._out])
            if sandbox.exposes and self.settings.untrusted:
                raise SandboxError(f"--untrusted: {sandbox.exposes}")
            workspace = Workspace(self.task, sandbox)
            workspace.prepare()
            try:
                self._agent(workspace, folder / "agent.log", gateway)
                patch = workspace.diff()
            except (AgentError, SandboxError) as error:
                # without a turn there is nothing to train
                if self._stopping.is_set() or not rollout.turns:
                    raise
                fault = error
        # the agent, its processes and everything that they could write are gone
        (folder / "patch.diff").write_bytes(patch)
        rollout.patch_bytes = len(patch)
        if self.task.digest() != self._digest:
            raise StageError("grade", "the task's files changed while the agent worked")
        self.judge(patch, fault)

    def _agent(self, workspace: Workspace, log: Path, gateway: GatewayClient) -> None:
        """Have the agent work; `StageError` if it failed."""
        task, rollout = self.task, self.rollout
        sandbox, harness = workspace.sandbox, self.settings.harness
        harness.ready(sandbox, install=self.settings.install)
        limit = task.agent.max_turns
        session = gateway.open(
            rollout.session_id,
            max_turns=limit,
            metadata={"task": task.id, "sample": rollout.sample},
        )
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
        name = f"{self.rollout.session_id}-grade"
        with self.sandbox(name, stop=stop_or_log) as sandbox:
            copy = Workspace(self.task, sandbox)
            copy.prepare()
            changed = bool(patch)
            try:
                if fault is not None:
                    raise AgentError(str(fault))
                changed = self._apply(copy, patch)
                finished = self.rollout.agent_end == "finished"
                work = Work(workspace=copy, patch=patch, finished=finished)
                self.rollout.reward = grade(work)
                return
            except (StageError, SandboxError) as error:
                caused = changed or isinstance(error, AgentError | LimitError)
                if self._stopping.is_set() or not caused:
                    raise
                reason = error
        # unless no sandbox starts here any more, the agent's changes are the reason
        with self.sandbox(f"{self.rollout.session_id}-again") as sandbox:
            Workspace(self.task, sandbox).prepare()
        self._find(f"cannot be graded: {reason}")
        self.rollout.reward = 0.0

    def _apply(self, copy: Workspace, patch: bytes) -> bool:
        """Apply what is graded of a patch, list the rest; return whether there is any."""
        choice = copy.apply(patch)
        for name, text in _FINDINGS.items():
            files: Sequence[str] = getattr(choice, name)
            for each in files[:_MAX_FINDINGS]:
                self._find(f"{text}: {each}")
            if len(files) > _MAX_FINDINGS:
                self._find(f"{text}: {len(files):,} files in all")
        return bool(choice.graded)

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
                seconds = task.agent.timeout_s
                shell = ["sh", "-c", command]
                done = sandbox.exec(shell, timeout_s=seconds, cwd=workspace.path)
                if done.code != 0:
                    raise StageError("self-test", command, done.summary)
            return workspace.diff()

    @contextmanager
    def sandbox(
        self, name: str, stop: Callable[[Sandbox], None] = Sandbox.stop
    ) -> Iterator[Sandbox]:
        """Create a sandbox for the ``with`` block."""
        task, settings = self.task, self.settings
        unenforced = dict.fromkeys(self.unenforced())
        sandbox = settings.sandbox(
            Spec(
                # container names must not contain ~
                name=f"trajkit-{name.replace('~', '-')}",
                scratch=self._scratch,
                image=task.image or settings.image,
                limits=replace(task.limits, **unenforced),
                path=tuple(settings.path),
                gateway=settings.gateway_url,
                options=settings.sandbox_option,
                build=task.build,
                plain=task.plain,
                places=task.places,
            )
        )
        # before the check: either the end of the run finds it, or the check finds the end
        self._sandboxes.add(sandbox)
        try:
            if self._stopping.is_set():
                raise Stopped
            sandbox.start()
            yield sandbox
        finally:
            self._sandboxes.discard(sandbox)
            stop(sandbox)

    def unenforced(self) -> list[str]:
        """Return limits of another project's task that this kind of sandbox has not."""
        # in a task of trajkit's own form they are refused
        given = asdict(self.task.limits).items() if self.task.places else ()
        kind = self.settings.sandbox
        return [name for name, value in given if value and name not in kind.limits]

    def _find(self, text: str) -> None:
        self.rollout.findings.append(escaped(text))


def stop_or_log(sandbox: Sandbox) -> None:
    """Stop a sandbox; a failure is logged."""
    try:
        sandbox.stop()
    except Exception:
        _LOG.exception("sandbox %s", sandbox.spec.name)


def escaped(text: str) -> str:
    """Return a text in one line, for a terminal, that UTF-8 can encode.

    Names of files and output of agents may be any bytes.
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
