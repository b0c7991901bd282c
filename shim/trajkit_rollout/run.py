"""Runs many rollouts of many tasks concurrently, here or in workers of a Ray cluster.

A stopped run is continued from its log, which has a line before a session opens and one
after its rollout ends. The sessions of a killed run that never ended stay in the turn log;
the ``sessions`` table marks them as interrupted, which excludes them from training.
"""

import fcntl
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeAlias

import httpx
import pyarrow as pa

from trajkit.cli.screen import Progress, visible
from trajkit.errors import FormatError
from trajkit.files.tables import write_table
from trajkit_rollout.local import clear
from trajkit_rollout.rollout import (
    Attempt,
    Rollout,
    Settings,
    Stopped,
    run_task,
    sessions_table,
    stop_or_log,
)
from trajkit_rollout.sandbox import Sandbox, SandboxError, remove
from trajkit_rollout.tasks import Task
from trajkit_rollout.workspace import StageError
from trajkit_shim.client import GatewayClient

_CALLBACK_SECONDS = 10.0
_PAUSES_SECONDS = (0.5, 2.0, 0.0)
# workers that may die during one rollout, before that is its error
_MAX_DEATHS = 3
_STOPPED = "interrupted: the run was stopped before it ended"
_CHANGED = (
    "has changed since the run started, or trajkit's default of a key has: "
    "choose another directory for a new run"
)
_Perform: TypeAlias = Callable[[Task, Rollout], Rollout | None]


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
        self._run = {"version": 1, "harness": harness, "sandbox": sandbox}
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
        """Take over a line: the first one, or the start or end of a rollout."""
        if "event" not in record:
            for name, value in self._run.items():
                if (was := record.get(name)) != value:
                    rule = f"the run was started with {name} {was!r}, not {value!r}"
                    raise ValueError(rule)
            self.run_id = str(record["run"])
            return
        if record.pop("event") == "began":
            digest = record.pop("task")
            self._digests[record["group_id"]] = digest
        rollout = Rollout(**record)
        self._rollouts[rollout.session_id] = rollout
        self._last[rollout.group_id, rollout.sample] = rollout

    def done(self, task_id: str, sample: int, failed_again: bool) -> bool:
        """Return whether a rollout has ended (with ``failed_again``, without error)."""
        last = self._last.get((task_id, sample))
        ended = last is not None and last.seconds is not None
        return ended and not (failed_again and last and last.error)

    def begin(self, task_id: str, sample: int) -> Rollout:
        """Log the start of a task's rollout, and return it."""
        last = self._last.get((task_id, sample))
        attempt = 1 if last is None else last.attempt + 1
        again = "" if attempt == 1 else f"~{attempt}"
        rollout = Rollout(
            session_id=f"{task_id}.{sample}.{self.run_id}{again}",
            group_id=task_id,
            sample=sample,
            attempt=attempt,
            harness=str(self._run["harness"]),
            sandbox=str(self._run["sandbox"]),
        )
        digest = self._digests[task_id]
        self._write({"event": "began", "task": digest, **asdict(rollout)})
        return rollout

    def end(self, rollout: Rollout) -> None:
        """Log the end of a rollout."""
        self._write({"event": "ended", **asdict(rollout)})

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

    def _write(self, record: dict[str, Any]) -> None:
        # several threads may call these methods of a file
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()
        self._read(record)


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
        self._settings, self._out, self._on_end = settings, out, on_end
        self._scratch = out / "sandboxes"
        self._hidden = {out, *hidden, *(p for t in tasks for p in t.locations())}
        self._digests = {task.id: task.digest() for task in tasks}
        self._stopping, self._live = threading.Event(), set[Sandbox]()
        out.mkdir(parents=True, exist_ok=True)
        self._log = RunLog(out / "rollouts.log", *settings.names, self._digests)
        try:
            if self._scratch.exists():  # left by a killed run
                clear(self._scratch)
            self._scratch.mkdir()
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
        resources: dict[str, float] | None = None,
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
                given = gateways, token, resources or {}
                perform = self._in_cluster(stack, ray, *given)
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
        """Run one rollout, from its line in the log to its result."""
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
        self._log.end(ended)
        if self._on_end is not None:
            self._on_end(ended)
        return ended

    def _here(self, client: GatewayClient, task: Task, rollout: Rollout) -> Rollout:
        self._attempt(task, rollout).run(client)
        return rollout

    def _in_cluster(
        self,
        stack: ExitStack,
        address: str,
        urls: str | Sequence[str],
        token: str,
        resources: dict[str, float],
    ) -> _Perform:
        """Connect to Ray; return what has it run a rollout, None if its worker died."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        if not ray.is_initialized():
            ray.init(address, log_to_driver=False)
            stack.callback(ray.shutdown)
        remote = ray.remote(max_retries=0)(run_task)
        files = {task.id: ray.put(task.movable()) for task, _ in self.todo}

        def perform(task: Task, rollout: Rollout) -> Rollout | None:
            options: dict[str, Any] = {"resources": resources}
            if task.limits.memory_mb is not None:
                options["memory"] = task.limits.memory_mb << 20
            given = files[task.id], self._settings, urls, self._out
            started = remote.options(num_cpus=task.limits.cpus or 1, **options)
            job = started.remote(*given, token=token, rollout=rollout)
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
        """A rollout that is not in the log."""
        names = f"{task.id}.{name}", task.id, *self._settings.names
        return self._attempt(task, Rollout(*names, sample))

    def _attempt(self, task: Task, rollout: Rollout) -> Attempt:
        return Attempt(
            task,
            self._settings,
            rollout,
            self._out,
            self._scratch,
            live=self._live,
            stopping=self._stopping,
            digest=self._digests[task.id],
        )
