"""Runs many rollouts of many tasks concurrently, here or in workers of a Ray cluster."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeAlias

import httpx

from trajkit.cli.screen import Progress
from trajkit.files.tables import write_table
from trajkit_rollout.agents.sandbox import Sandbox, SandboxError, remove
from trajkit_rollout.agents.sandboxes.local import clear
from trajkit_rollout.files import Archive
from trajkit_rollout.one import (
    Attempt,
    Settings,
    Stopped,
    escaped,
    run_task,
    stop_or_log,
)
from trajkit_rollout.run_log import Rollout, RunLog
from trajkit_rollout.tasks import Task
from trajkit_rollout.workspace import StageError
from trajkit_shim.client import GatewayClient

_CALLBACK_SECONDS = 10.0
_PAUSES_SECONDS = (0.5, 2.0, 0.0)
# workers that may die during one rollout, before that is its error
_MAX_DEATHS = 3
_Perform: TypeAlias = Callable[[Task, Rollout], Rollout | None]
NODE = "{node}"
"""In the URL of a gateway: the address of the machine that a rollout runs on."""


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
        names = settings.harness.name, settings.sandbox_name
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

        Returns what the sandbox exposes (`Sandbox.exposes`) and which limits the kernel
        does not hold. Raises `SandboxError`.
        """
        attempts = [
            self._attempt(task, self._unlogged(task, "try")) for task, _ in self.todo
        ]
        with attempts[0].sandbox(f"try.{self._journal.run_id}") as sandbox:
            sandbox.hide(self._hidden)
            if sandbox.exposes and self._settings.untrusted:
                raise SandboxError(f"--untrusted: {sandbox.exposes}")
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
        call on the directory. Raises `ConnectionError` if a gateway cannot be used.

        Parameters
        ----------
        gateways : str or sequence of str
            URLs of the gateways.
        token : str
            Their admin token.
        ray : str, optional
            The address of a Ray cluster, whose workers run the rollouts. There ``{node}``
            in a gateway's URL is the address of the worker's machine.
        resources : dict, optional
            Further resources of Ray that each rollout takes, by name.
        """
        ended = []
        pool = ThreadPoolExecutor(self._settings.parallel, "rollout")
        with ExitStack() as stack:
            if ray is None:
                client = stack.enter_context(GatewayClient(gateways, token))
                client.models()
                perform: _Perform = partial(self._here, client)
            else:
                urls = [gateways] if isinstance(gateways, str) else list(gateways)
                perform = self._cluster(stack, ray, urls, token, resources or {})
            progress = stack.enter_context(Progress("rollouts", "rollouts"))
            progress.begin(len(self.todo))
            # each of these runs at the end, in reverse order, also if another one fails
            stack.callback(self._write_table)
            stack.callback(pool.shutdown, cancel_futures=True)
            stack.callback(self._stop)
            futures = [pool.submit(self._one, perform, *one) for one in self.todo]
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
            stop_or_log(sandbox)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()
        with suppress(OSError):
            remove(self._scratch)

    def _one(
        self,
        perform: Callable[[Task, Rollout], Rollout | None],
        task: Task,
        sample: int,
    ) -> Rollout:
        """Run one rollout, from its line in the log to its result."""
        for _ in range(_MAX_DEATHS):
            if self._stopping.is_set():
                raise Stopped
            started = self._journal.begin(task.id, sample)
            ended = perform(task, started)
            if ended is not None:
                break
        else:
            ended = started
            ended.error = f"ray: its worker died {_MAX_DEATHS} times"
            ended.seconds = time.time() - ended.started_at
        self._journal.end(ended)
        if self._on_end is not None:
            self._on_end(ended)
        return ended

    def _here(self, client: GatewayClient, task: Task, rollout: Rollout) -> Rollout:
        """Run a rollout in this process."""
        self._attempt(task, rollout).run(client)
        return rollout

    def _cluster(
        self,
        stack: ExitStack,
        address: str,
        urls: list[str],
        token: str,
        resources: dict[str, float],
    ) -> _Perform:
        """Connect to Ray; return what has it run a rollout, None if its worker died."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        if not ray.is_initialized():
            ray.init(address, log_to_driver=False)
            stack.callback(ray.shutdown)
        remote = ray.remote(max_retries=0)(run_on_node)
        files = {task.id: ray.put(_movable(task)) for task, _ in self.todo}

        def perform(task: Task, rollout: Rollout) -> Rollout | None:
            limits = task.limits
            options: dict[str, Any] = {"resources": resources}
            if limits.memory_mb is not None:
                options["memory"] = limits.memory_mb << 20
            job = remote.options(num_cpus=limits.cpus or 1, **options).remote(
                files[task.id], self._settings, urls, token, self._out, rollout
            )
            try:
                while not ray.wait([job], timeout=1.0)[0]:
                    if self._stopping.is_set():
                        ray.cancel(job, force=True)
                        raise Stopped
                ended: Rollout = ray.get(job)
            except RayTaskError as error:
                rollout.error = escaped(f"ray: {error.cause}")
                rollout.seconds = time.time() - rollout.started_at
                return rollout
            except RayError:
                return None
            return ended

        return perform

    def self_test(self) -> Iterator[Rollout]:
        """Grade each task's solution, and no change at all, without an agent.

        The samples are ``solution`` and ``nothing`` in the session's id.
        """
        for task in {task.id: task for task, _ in self.todo}.values():
            for sample, name in enumerate(("solution", "nothing")):
                rollout = self._unlogged(task, name)
                rollout.sample, rollout.agent_end = sample, "finished"
                attempt = self._attempt(task, rollout)
                try:
                    attempt.judge(b"" if sample else attempt.solution())
                except (StageError, SandboxError) as error:
                    rollout.error = escaped(str(error))
                yield rollout

    def _unlogged(self, task: Task, name: str) -> Rollout:
        """A rollout that is not in the log."""
        names = self._settings.harness.name, self._settings.sandbox_name
        return Rollout(f"{task.id}.{name}", task.id, *names)

    def _attempt(self, task: Task, rollout: Rollout) -> Attempt:
        return Attempt(
            task,
            self._settings,
            rollout,
            self._out,
            self._scratch,
            sandboxes=self._live,
            stopping=self._stopping,
            digest=self._digests[task.id],
        )


def _movable(task: Task) -> Task:
    """The task with its files in memory, for other machines."""
    workspace, tests = (
        None if files is None else Archive(files.archive())
        for files in (task.workspace, task.tests)
    )
    return replace(task, workspace=workspace, tests=tests, solution=None)


def run_on_node(
    task: Task,
    settings: Settings,
    urls: Sequence[str],
    token: str,
    out: Path,
    rollout: Rollout,
) -> Rollout:
    """Run a rollout in a worker of Ray; see `run_task`.

    With several gateways, a session's name chooses one of them.
    """
    import ray

    number = sum(rollout.session_id.encode())
    url = urls[number % len(urls)].replace(NODE, ray.util.get_node_ip_address())
    return run_task(task, settings, url, out, token=token, rollout=rollout)
