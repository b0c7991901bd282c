"""A log of a run's rollouts, from which a stopped run is continued.

A line is written before a session opens and after its rollout ends. The sessions of a
killed run that never ended stay in the turn log; the ``sessions`` table marks them as
interrupted, which excludes them from training.
"""

import fcntl
import json
import os
import secrets
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pyarrow as pa

from trajkit.errors import FormatError
from trajkit.schema import SESSIONS


@dataclass(slots=True, kw_only=True)
class Rollout:
    """One session of a run; a row of the ``sessions`` table."""

    session_id: str
    group_id: str
    sample: int  # index among the task's rollouts
    attempt: int  # from 1
    harness: str
    sandbox: str
    started_at: float  # Unix time; in the table a timestamp
    reward: float | None = None
    error: str | None = None
    # finished, timed_out, turn_limit or failed; None: it did not run
    agent_end: str | None = None
    exit_code: int | None = None  # None: killed
    turns: int | None = None  # answered turns
    patch_bytes: int | None = None  # None: no patch
    # changes that were not graded, because they could change how tests run
    findings: list[str] = field(default_factory=list)
    # of the agent, and of the entire rollout
    agent_seconds: float | None = None
    seconds: float | None = None


def _column(name: str, kind: object) -> pa.Field:
    types = {str: pa.string(), int: pa.int32(), float: pa.float64()}
    special = {
        "started_at": pa.timestamp("us", tz="UTC"),
        "patch_bytes": pa.int64(),
        "findings": pa.list_(pa.string()),
    }
    return pa.field(name, special.get(name) or types[(*get_args(kind), kind)[0]])


_OWN = {k: v for k, v in get_type_hints(Rollout).items() if k not in SESSIONS.names}
ROLLOUTS = pa.schema(
    [*SESSIONS, *(_column(name, kind) for name, kind in _OWN.items())],
    metadata=SESSIONS.metadata,
)
"""``sessions``, with the columns of a rollout."""


class RunLog:
    """``rollouts.log`` of a run, locked by one process at a time.

    Raises `FormatError` if another process has locked it, it is invalid, or it was
    started with another harness or sandbox.
    """

    def __init__(self, path: Path, harness: str, sandbox: str) -> None:
        self.path = path
        # by session, in starting order; those that ended
        self._began: dict[str, Rollout] = {}
        self._ended: dict[str, Rollout] = {}
        # the sessions of each sample of a task
        self._attempts: dict[tuple[str, int], list[str]] = {}
        self._digests: dict[str, str] = {}
        self._lock = threading.Lock()
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
            for number, line in enumerate(self._file.readlines(), 1):
                if not line.endswith(b"\n"):
                    # torn when its write was interrupted
                    os.ftruncate(self._file.fileno(), self._file.tell() - len(line))
                    break
                try:
                    read = self._read_head if number == 1 else self._read_event
                    read(json.loads(line))
                except (AttributeError, KeyError, TypeError, ValueError) as error:
                    raise FormatError(f"{path}:{number}: {error}") from error
            if os.fstat(self._file.fileno()).st_size == 0:
                self._write({"run": self.run_id, **self._run})
            stack.pop_all()

    def _read_head(self, record: dict[str, Any]) -> None:
        for name, value in self._run.items():
            if (was := record.get(name)) != value:
                rule = f"the run was started with {name} {was!r}, not {value!r}"
                raise ValueError(rule)
        self.run_id = str(record["run"])

    def _read_event(self, record: dict[str, Any]) -> None:
        event, digest = record.pop("event", None), record.pop("task", None)
        rollout = Rollout(**record)
        if event == "began":
            self._note(rollout, str(digest))
        else:
            self._ended[rollout.session_id] = rollout

    def check(self, task_id: str, digest: str) -> None:
        """Raise `FormatError` if a task or a default has changed since the start."""
        if self._digests.get(task_id, digest) != digest:
            rule = (
                "has changed since the run started, or trajkit's default of a key has: "
                "choose another directory for a new run"
            )
            raise FormatError(f"{self.path}: task {task_id!r} {rule}")

    def done(self, task_id: str, sample: int, failed_again: bool) -> bool:
        """Return whether a rollout has ended (with ``failed_again``, without error)."""
        attempts = map(self._ended.get, self._attempts.get((task_id, sample), ()))
        return any(one and not (failed_again and one.error) for one in attempts)

    def begin(self, task_id: str, sample: int, digest: str) -> Rollout:
        """Log the start of a task's rollout, and return it."""
        attempt = len(self._attempts.get((task_id, sample), ())) + 1
        again = "" if attempt == 1 else f"~{attempt}"
        rollout = Rollout(
            session_id=f"{task_id}.{sample}.{self.run_id}{again}",
            group_id=task_id,
            sample=sample,
            attempt=attempt,
            harness=str(self._run["harness"]),
            sandbox=str(self._run["sandbox"]),
            started_at=time.time(),
        )
        self._write({"event": "began", "task": digest, **asdict(rollout)})
        # the caller changes its own
        self._note(replace(rollout), digest)
        return rollout

    def end(self, rollout: Rollout) -> None:
        """Log the end of a rollout."""
        self._write({"event": "ended", **asdict(rollout)})
        with self._lock:
            self._ended[rollout.session_id] = rollout

    def table(self) -> pa.Table:
        """Return all rollouts as `ROLLOUTS`; repeated and unended ones count as errors."""
        stopped = "interrupted: the run was stopped before it ended"
        records = []
        for name, began in self._began.items():
            rollout = self._ended.get(name) or replace(began, error=stopped)
            record = asdict(rollout)
            record["started_at"] = int(rollout.started_at * 1e6)
            last = self._attempts[rollout.group_id, rollout.sample][-1]
            if last != rollout.session_id:
                record["error"] = f"{rollout.error} (sampled again as {last})"
            records.append(record)
        return pa.Table.from_pylist(records, schema=ROLLOUTS)

    def close(self) -> None:
        """Close the file and unlock it."""
        self._file.close()

    def _note(self, rollout: Rollout, digest: str) -> None:
        with self._lock:
            self._began[rollout.session_id] = rollout
            self._digests[rollout.group_id] = digest
            key = (rollout.group_id, rollout.sample)
            self._attempts.setdefault(key, []).append(rollout.session_id)

    def _write(self, record: dict[str, object]) -> None:
        """Write one line and hand it to the operating system."""
        with self._lock:
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()
