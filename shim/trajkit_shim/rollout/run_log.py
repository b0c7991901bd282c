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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Self

import pyarrow as pa

from trajkit.errors import FormatError
from trajkit.schema import SESSIONS

_UNITS = "us"

ROLLOUTS = pa.schema(
    [
        *SESSIONS,
        # index among the task's rollouts, and number of the attempt, from 1
        pa.field("sample", pa.int32()),
        pa.field("attempt", pa.int32()),
        pa.field("harness", pa.string()),
        pa.field("sandbox", pa.string()),
        # finished, timed_out, turn_limit or failed; null: it did not run
        pa.field("agent_end", pa.string()),
        pa.field("exit_code", pa.int32()),  # null: killed
        pa.field("turns", pa.int32()),  # answered turns
        pa.field("patch_bytes", pa.int64()),  # null: no patch
        pa.field("started_at", pa.timestamp(_UNITS, tz="UTC")),
        # changes that were not graded, because they could change how tests run
        pa.field("findings", pa.list_(pa.string())),
        # of the agent, and of the entire rollout
        pa.field("agent_seconds", pa.float64()),
        pa.field("seconds", pa.float64()),
    ],
    metadata=SESSIONS.metadata,
)
"""``sessions``, with the columns of a rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One session of a run; the columns of `ROLLOUTS`."""

    session_id: str
    group_id: str
    sample: int
    attempt: int
    harness: str
    sandbox: str
    started_at: float  # Unix time
    reward: float | None = None
    error: str | None = None
    agent_end: str | None = None
    exit_code: int | None = None
    turns: int | None = None
    patch_bytes: int | None = None
    findings: list[str] = field(default_factory=list)
    agent_seconds: float | None = None
    seconds: float | None = None


class RunLog:
    """``rollouts.log`` of a run, locked by one process at a time.

    Raises `FormatError` if another process has locked it, it is invalid, or it was
    started with another harness or sandbox.
    """

    def __init__(self, path: Path, harness: str, sandbox: str) -> None:
        self.path = path
        self._began: dict[str, Rollout] = {}  # by session, in starting order
        self._ended: dict[str, Rollout] = {}
        # the sessions of each sample of a task
        self._attempts: dict[tuple[str, int], list[str]] = {}
        self._digests: dict[str, str] = {}
        self._lock = threading.Lock()
        self._file = path.open("a+b")
        try:
            self._hold()
            head = {"version": 1, "harness": harness, "sandbox": sandbox}
            lines = list(self._whole_lines())
            if lines:
                self._take_up(lines, head)
            else:
                self.run_id = secrets.token_hex(4)
                self._write({"run": self.run_id, **head})
        except BaseException:
            self._file.close()
            raise

    def _hold(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            message = f"{self.path}: another process works on this run"
            raise FormatError(message) from error

    def _whole_lines(self) -> Iterator[dict[str, object]]:
        """Yield all lines; remove a torn last line of an interrupted write."""
        self._file.seek(0)
        for number, line in enumerate(self._file.readlines(), 1):
            if not line.endswith(b"\n"):
                os.ftruncate(self._file.fileno(), self._file.tell() - len(line))
                return
            try:
                record = json.loads(line)
            except ValueError as error:
                raise FormatError(f"{self.path}:{number}: {error}") from error
            if not isinstance(record, dict):
                raise FormatError(f"{self.path}:{number}: not an object")
            yield record

    def _take_up(self, lines: list[dict[str, object]], head: dict[str, object]) -> None:
        first, *rest = lines
        for name, value in head.items():
            if first.get(name) != value:
                raise FormatError(
                    f"{self.path}: the run was started with {name} {first.get(name)!r}, "
                    f"not {value!r}"
                )
        self.run_id = str(first["run"])
        for number, record in enumerate(rest, 2):
            event, digest = record.pop("event", None), record.pop("task", None)
            try:
                rollout = Rollout(**record)  # type: ignore[arg-type]
            except TypeError as error:
                raise FormatError(f"{self.path}:{number}: {error}") from error
            if event == "began":
                self._note(rollout, str(digest))
            else:
                self._ended[rollout.session_id] = rollout

    def check(self, task_id: str, digest: str) -> None:
        """Raise `FormatError` if a task has changed since the run started."""
        if self._digests.get(task_id, digest) != digest:
            rule = "has changed since the run started"
            raise FormatError(f"{self.path}: task {task_id!r} {rule}")

    def done(self, task_id: str, sample: int, failed_again: bool) -> bool:
        """Return whether a rollout has ended (with ``failed_again``, without error)."""
        attempts = map(self._ended.get, self._attempts.get((task_id, sample), ()))
        return any(one and not (failed_again and one.error) for one in attempts)

    def begin(self, rollout: Rollout, digest: str) -> Rollout:
        """Log the start of a rollout; return it with its attempt and session id."""
        earlier = self._attempts.get((rollout.group_id, rollout.sample), ())
        attempt = len(earlier) + 1
        again = "" if attempt == 1 else f"~{attempt}"
        session_id = f"{rollout.group_id}.{rollout.sample}.{self.run_id}{again}"
        rollout = replace(rollout, session_id=session_id, attempt=attempt)
        self._write({"event": "began", "task": digest, **asdict(rollout)})
        self._note(rollout, digest)
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
