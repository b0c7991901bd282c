"""Runs many rollouts of many tasks concurrently, each to a reward or an error."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any, Self

import httpx

from trajkit.cli.screen import Progress
from trajkit.io.tables import write_table
from trajkit_rollout.agents.harness import HARNESSES, Harness, Job
from trajkit_rollout.agents.sandbox import (
    LimitError,
    Sandbox,
    SandboxError,
    Spec,
    remove,
)
from trajkit_rollout.agents.sandboxes import SANDBOXES
from trajkit_rollout.agents.sandboxes.local import clear
from trajkit_rollout.grade import Work, grade
from trajkit_rollout.run_log import Rollout, RunLog
from trajkit_rollout.tasks import Task
from trajkit_rollout.workspace import (
    AGENT_ENV,
    AgentError,
    StageError,
    Workspace,
)
from trajkit_shim.admin import TOKEN_HEADER

_LOG = logging.getLogger(__name__)

_CALLBACK_SECONDS = 10.0
_PAUSES_SECONDS = (0.5, 2.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a run; names are those of the command's options."""

    harness: Harness
    argument: Sequence[str] = ()  # extra arguments of its command
    install: bool = False  # install it in each sandbox if it is missing
    sandbox: type[Sandbox]
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


_STAGES: Mapping[type[Exception], str] = {
    StageError: "",
    SandboxError: "sandbox: ",
    httpx.HTTPError: "gateway: ",
}
"""Prefixes of the expected errors of a rollout, by type."""


class _ChangesFailed(Exception):
    """The agent's changes may be the reason why there is no reward."""


_MAX_FINDINGS = 100
_FINDINGS = {
    "refused": "not graded",
    "risky": "graded, but it can change how tests run",
}
"""What is said of the changes in a list of `Choice`."""


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
        """Send one."""
        for pause in _PAUSES_SECONDS:
            with suppress(httpx.HTTPError):
                if self._client.post(self._url, json=asdict(rollout)).is_success:
                    return
            time.sleep(pause)
        self.missed += 1


class Rollouts:
    """The rollouts of one run; a context manager that locks the run's directory.

    ``out``: the run's directory, created if missing. A run of the same harness and
    sandbox is continued; `FormatError` if that is not possible. ``on_end``: called with
    each finished `Rollout`, on its thread. ``hidden``: files of this machine that no agent
    may see, besides the tasks and ``out``.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        settings: Settings,
        out: Path,
        on_end: Callable[[Rollout], None] | None = None,
        hidden: Sequence[Path] = (),
    ) -> None:
        self._settings = settings
        self._out = out
        self._scratch = out / "sandboxes"
        self._hidden = {out, *hidden, *(p for t in tasks for p in t.locations())}
        self._on_end = on_end
        self._digests = {task.id: task.digest() for task in tasks}
        out.mkdir(parents=True, exist_ok=True)
        names = settings.harness.name, _name(settings.sandbox)
        self._journal = RunLog(out / "rollouts.log", *names, self._digests)
        self._stopping = threading.Event()
        self._live: set[Sandbox] = set()
        try:
            if self._scratch.exists():  # left by a killed run
                clear(self._scratch)
            self._scratch.mkdir()
        except BaseException:
            self._journal.close()
            raise
        # group by group, so that the first groups are complete early
        wanted = [(t, sample) for t in tasks for sample in range(settings.repeat)]
        self.todo = [  # unfinished rollouts
            (task, sample)
            for task, sample in wanted
            if not self._journal.done(task.id, sample, settings.retry_failed)
        ]
        self.before = len(wanted) - len(self.todo)  # finished in earlier calls
        if not self.todo:
            # the last call may have been killed before it did so
            self._write_table()

    def try_out(self) -> str | None:
        """Check that a sandbox can be created and has the harness.

        Returns what the sandbox exposes (`Sandbox.exposes`) and which limits it has not.
        Raises `SandboxError`.
        """
        name = f"try.{self._journal.run_id}"
        with self._sandbox(self.todo[0][0], name) as sandbox:
            sandbox.hide(self._hidden)
            if sandbox.exposes and self._settings.untrusted:
                raise SandboxError(f"--untrusted: {sandbox.exposes}")
            self._settings.harness.ready(sandbox, install=self._settings.install)
            names = {n for task, _ in self.todo for n in self._unenforced(task)}
            rule = f"limits that a {sandbox.kind} sandbox does not enforce: "
            limits = rule + ", ".join(sorted(names)) if names else None
            return "; ".join(filter(None, (sandbox.exposes, limits))) or None

    def run(self, gateway: str, token: str = "") -> list[Rollout]:
        """Run all unfinished rollouts, and write the ``sessions`` table.

        ``gateway``: its URL. ``token``: its admin token. If interrupted, running rollouts
        end without a result and are repeated by the next call on the directory. Raises
        `ConnectionError` if the gateway cannot be used.
        """
        ended = []
        headers = {TOKEN_HEADER: token}
        client = httpx.Client(
            base_url=gateway, headers=headers, timeout=60, trust_env=False
        )
        pool = ThreadPoolExecutor(self._settings.parallel, "rollout")
        with ExitStack() as stack:
            self._gateway = stack.enter_context(client)
            try:
                self._model = self._ask("GET", "/v1/models")["data"][0]["id"]
            except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
                raise ConnectionError(f"{gateway}: {error}") from error
            progress = stack.enter_context(Progress("rollouts", "rollouts"))
            progress.begin(len(self.todo))
            # each of these runs at the end, in reverse order, also if another one fails
            stack.callback(self._write_table)
            stack.callback(pool.shutdown, cancel_futures=True)
            stack.callback(self._stop)
            futures = [pool.submit(self._one, *one) for one in self.todo]
            for future in as_completed(futures):
                ended.append(future.result())
                progress.advance(1)
        return ended

    def _write_table(self) -> None:
        write_table(self._journal.table(), self._out / "sessions.parquet")

    def _stop(self) -> None:
        """End running rollouts."""
        self._stopping.set()
        for sandbox in list(self._live):
            _stop_or_log(sandbox)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()
        with suppress(OSError):
            remove(self._scratch)

    def _one(self, task: Task, sample: int) -> Rollout:
        """Run one rollout, from its line in the log to its result."""
        if self._stopping.is_set():
            raise CancelledError
        clock = time.monotonic()
        rollout = self._journal.begin(task.id, sample)
        try:
            self._work(task, rollout)
        except Exception as error:
            stage = next((v for k, v in _STAGES.items() if isinstance(error, k)), None)
            if stage is None and not self._stopping.is_set():
                # other rollouts continue
                _LOG.exception("rollout %s", rollout.session_id)
                stage = f"{type(error).__name__}: "
            rollout.error, rollout.reward = _escaped(f"{stage}{error}"), None
        if self._stopping.is_set():
            # its processes were killed, so its result is not valid
            raise CancelledError
        rollout.seconds = time.monotonic() - clock
        self._journal.end(rollout)
        if self._on_end is not None:
            self._on_end(rollout)
        return rollout

    def _work(self, task: Task, rollout: Rollout) -> None:
        """Run the agent and grade its work; fills the rollout's fields."""
        name = rollout.session_id
        folder = self._out / "sessions" / name
        folder.mkdir(parents=True)
        fault, patch = None, b""
        with self._sandbox(task, f"{name}-agent") as sandbox:
            workspace = Workspace(task, sandbox)
            workspace.prepare()
            try:
                self._agent(workspace, folder / "agent.log", rollout)
                patch = workspace.diff()
            except (AgentError, SandboxError) as error:
                # without a turn there is nothing to train
                if self._stopping.is_set() or not rollout.turns:
                    raise
                fault = error
        # the agent, its processes and everything that they could write are gone
        (folder / "patch.diff").write_bytes(patch)
        rollout.patch_bytes = len(patch)
        if task.digest() != self._digests[task.id]:
            raise StageError("grade", "the task's files changed while the agent worked")
        rollout.reward = self._judge(task, rollout, patch, fault)

    def self_test(self) -> Iterator[Rollout]:
        """Grade each task's solution, and no change at all, without an agent.

        The samples are ``solution`` and ``nothing`` in the session's id.
        """
        for task in {task.id: task for task, _ in self.todo}.values():
            for sample, name in enumerate(("solution", "nothing")):
                rollout = Rollout(
                    session_id=f"{task.id}.{name}",
                    group_id=task.id,
                    sample=sample,
                    attempt=1,
                    harness="",
                    sandbox=_name(self._settings.sandbox),
                    started_at=time.time(),
                    agent_end="finished",
                )
                try:
                    patch = b"" if sample else self._solution(task)
                    rollout.reward = self._judge(task, rollout, patch, None)
                except (StageError, SandboxError) as error:
                    rollout.error = _escaped(str(error))
                yield rollout

    def _solution(self, task: Task) -> bytes:
        """The patch of a task's solution."""
        if task.solution is None:
            raise StageError("self-test", "the task has no solution")
        with self._sandbox(task, f"{task.id}.solution") as sandbox:
            workspace = Workspace(task, sandbox)
            workspace.prepare()
            place = sandbox.map_path("/solution") if task.solve else workspace.path
            sandbox.put(task.solution.archive(), place)
            if task.solve:
                command = task.solve.replace("{solution}", place)
                seconds = task.agent.timeout_s
                shell = ["sh", "-c", command]
                done = sandbox.exec(shell, timeout_s=seconds, cwd=workspace.path)
                if done.code != 0:
                    raise StageError("self-test", command, done.summary)
            return workspace.diff()

    def _judge(
        self, task: Task, rollout: Rollout, patch: bytes, fault: Exception | None
    ) -> float:
        """Grade a patch; 0 if the agent is the reason why that is not possible."""
        try:
            return self._grade(task, rollout, patch, fault)
        except _ChangesFailed as error:
            # unless no sandbox starts here any more, the agent's changes are the reason
            with self._sandbox(task, f"{rollout.session_id}-again") as sandbox:
                Workspace(task, sandbox).prepare()
            self._find(rollout, f"cannot be graded: {error}")
            return 0.0

    def _grade(
        self, task: Task, rollout: Rollout, patch: bytes, fault: Exception | None
    ) -> float:
        """Grade a patch in a copy that nothing of the agent's sandbox can reach.

        ``fault``: why there is no patch. Raises `_ChangesFailed`: the agent's changes may
        be the reason why there is no reward.
        """
        name = f"{rollout.session_id}-grade"
        with self._sandbox(task, name, stop=_stop_or_log) as sandbox:
            copy = Workspace(task, sandbox)
            copy.prepare()
            changed = bool(patch)
            try:
                if fault is not None:
                    raise AgentError(str(fault))
                choice = copy.apply(patch)
                changed = bool(choice.graded)
                for text, names in _FINDINGS.items():
                    found: Sequence[str] = getattr(choice, text)
                    for each in found[:_MAX_FINDINGS]:
                        self._find(rollout, f"{names}: {each}")
                    if len(found) > _MAX_FINDINGS:
                        self._find(rollout, f"{names}: {len(found):,} files in all")
                finished = rollout.agent_end == "finished"
                return grade(Work(workspace=copy, patch=patch, finished=finished))
            except (StageError, SandboxError) as error:
                if self._stopping.is_set():
                    raise
                if isinstance(error, AgentError | LimitError) or changed:
                    raise _ChangesFailed(str(error)) from error
                raise

    @staticmethod
    def _find(rollout: Rollout, text: str) -> None:
        rollout.findings.append(_escaped(text))

    def _agent(self, workspace: Workspace, log: Path, rollout: Rollout) -> None:
        """Have the agent work; `StageError` if it failed."""
        task, sandbox = workspace.task, workspace.sandbox
        harness, limit = self._settings.harness, self._settings.timeout
        harness.ready(sandbox, install=self._settings.install)
        opening = {
            "session_id": rollout.session_id,
            "max_turns": task.agent.max_turns,
            "metadata": {"task": task.id, "sample": rollout.sample},
        }
        job = Job(
            api_key=self._ask("POST", "/sessions", opening)["api_key"],
            base_url=sandbox.map_url(str(self._gateway.base_url).rstrip("/")),
            model=self._model,
            prompt=task.prompt,
            home=sandbox.map_path("/home"),
            workspace=workspace.path,
            arguments=tuple(self._settings.argument),
        )
        clock = time.monotonic()
        rollout.agent_end = "failed"
        try:
            seconds = task.agent.timeout_s if limit is None else limit
            done = harness.run(sandbox, job, env=AGENT_ENV, timeout_s=seconds, log=log)
        finally:
            rollout.agent_seconds = time.monotonic() - clock
            closed = self._ask("DELETE", f"/sessions/{rollout.session_id}")
            rollout.turns = turns = closed["answered"]
        rollout.exit_code = done.code
        wrong = None if done.code is None else harness.failed(done)
        if done.code is None:
            rollout.agent_end = "timed_out"
        elif wrong is None:
            rollout.agent_end = "finished"
        elif task.agent.max_turns is not None and turns >= task.agent.max_turns:
            # the gateway rejected its call, which harnesses treat as a failure
            rollout.agent_end = "turn_limit"
        elif turns == 0 or closed["failed"]:
            raise StageError("harness", wrong)
        else:
            # the model got all its answers: it may have ended its harness itself
            self._find(rollout, f"the harness failed: {wrong}")
        if turns == 0:
            raise StageError("harness", "it ended without an answered model call")

    @contextmanager
    def _sandbox(
        self,
        task: Task,
        name: str,
        stop: Callable[[Sandbox], None] = lambda sandbox: sandbox.stop(),
    ) -> Iterator[Sandbox]:
        settings, limits = self._settings, task.limits
        for limit in self._unenforced(task):
            limits = replace(limits, **{limit: None})
        sandbox = settings.sandbox(
            Spec(
                # container names must not contain ~
                name=f"trajkit-{name.replace('~', '-')}",
                scratch=self._scratch,
                image=task.image or settings.image,
                limits=limits,
                path=tuple(settings.path),
                gateway=settings.gateway_url,
                options=settings.sandbox_option,
                build=task.build,
                plain=task.plain,
                places=task.places,
            )
        )
        # before the check: either `_stop` finds it, or the check finds that it was called
        self._live.add(sandbox)
        try:
            if self._stopping.is_set():
                raise CancelledError
            sandbox.start()
            yield sandbox
        finally:
            self._live.discard(sandbox)
            stop(sandbox)

    def _unenforced(self, task: Task) -> list[str]:
        """The limits of another project's task that this kind of sandbox has not."""
        # in a task of trajkit's own form they are refused
        given = asdict(task.limits).items() if task.places else ()
        kind = self._settings.sandbox
        return [name for name, value in given if value and name not in kind.limits]

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        answer = self._gateway.request(method, path, json=body)
        answer.raise_for_status()
        return answer.json()


def _name(sandbox: type[Sandbox]) -> str:
    """The name of a kind of sandbox, or its import path if it is not trajkit's."""
    if SANDBOXES.get(sandbox.kind) is sandbox:
        return sandbox.kind
    return f"{sandbox.__module__}:{sandbox.__qualname__}"


def _stop_or_log(sandbox: Sandbox) -> None:
    try:
        sandbox.stop()
    except Exception:
        _LOG.exception("sandbox %s", sandbox.spec.name)


def _escaped(text: str) -> str:
    """Return a text in one line, for a terminal, that UTF-8 can encode.

    Names of files and output of agents may be any bytes.
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
