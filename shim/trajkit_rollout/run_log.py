"""A log of a run's rollouts, from which a stopped run is continued.

A line is written before a session opens and after its rollout ends. The sessions of a
killed run that never ended stay in the turn log; the ``sessions`` table marks them as
interrupted, which excludes them from training.
"""

import fcntl
import json
import secrets
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from trajkit.errors import FormatError
from trajkit.schema import SESSIONS

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
    # Unix time; in the table a timestamp
    started_at: float = field(default_factory=time.time)
    reward: float | None = None
    error: str | None = None
    # finished, timed_out, turn_limit or failed; None: it did not run
    agent_end: str | None = None
    exit_code: int | None = None  # None: killed
    turns: int | None = None  # answered turns
    patch_bytes: int | None = None  # None: no patch
    # changes that were not graded, because they could change how tests run
    findings: list[str] = field(default_factory=list)
    # of the agent, and of the entire rollout; the latter is None until it has ended
    agent_seconds: float | None = None
    seconds: float | None = None


_OWN = {
    "sample": pa.int32(),
    "attempt": pa.int32(),
    "harness": pa.string(),
    "sandbox": pa.string(),
    "started_at": pa.timestamp("us", tz="UTC"),
    "agent_end": pa.string(),
    "exit_code": pa.int32(),
    "turns": pa.int32(),
    "patch_bytes": pa.int64(),
    "findings": pa.list_(pa.string()),
    "agent_seconds": pa.float64(),
    "seconds": pa.float64(),
}
ROLLOUTS = pa.schema([*SESSIONS, *_OWN.items()], metadata=SESSIONS.metadata)
"""``sessions``, with the columns of a rollout."""


def sessions_table(rollouts: Iterable[Rollout]) -> pa.Table:
    """Return rollouts as a table of `ROLLOUTS`."""
    rows = [asdict(rollout) for rollout in rollouts]
    for row in rows:
        row["started_at"] = int(row["started_at"] * 1e6)
    return pa.Table.from_pylist(rows, schema=ROLLOUTS)


class RunLog:
    """``rollouts.log`` of a run, locked by one process at a time.

    ``digests``: of the tasks by id (`Task.digest`). Raises `FormatError` if another
    process has locked it, it is invalid, or it was started with another harness or
    sandbox, or with a task or a default that has changed since.
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
        if last is None or last.seconds is None:
            return False
        return not (failed_again and last.error)

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
            row = replace(rollout)
            if rollout.seconds is None:
                row.error = _STOPPED
            last = self._last[rollout.group_id, rollout.sample]
            if last is not rollout:
                row.error = f"{row.error} (sampled again as {last.session_id})"
            rows.append(row)
        return sessions_table(rows)

    def close(self) -> None:
        """Close the file and unlock it."""
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        """Write one line and hand it to the operating system."""
        # several threads may call these methods of a file
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()
        self._read(record)
