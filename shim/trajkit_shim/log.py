"""The turn log: Arrow IPC streams that grow by one batch per turn.

A turn is handed to the operating system before its reply is answered, so a killed
gateway loses no turn that a client has seen. What a kill can leave is a torn last
batch, of a turn that was never acknowledged. Whether the answer arrived is known a
moment later, and is written beside the turns.
"""

import errno
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import schema
from trajkit.messages import message_record
from trajkit.squeezed import Squeezer
from trajkit_shim.deltas import DeltaBook
from trajkit_shim.engine import WeightSpan
from trajkit_shim.experts import COLUMN, experts_cell
from trajkit_shim.journal import Journal
from trajkit_shim.wire import Json

Form: TypeAlias = Literal["full", "delta"]
"""Whether the log holds each prompt whole, or as what it adds to an earlier turn."""

# what each prompt token shows
_SHOWN = list(schema.ATTRIBUTION)[2:]
_PROVENANCE = pa.schema(
    [
        *_SHOWN,
        # the id under which the engine was called
        pa.field("request_id", pa.string()),
        # the request_id of the session's first turn whose request was the same to the
        # byte; null: there is none
        pa.field("resend_of", pa.string()),
        pa.field("model", pa.string()),
        # the protocol that the call came in on
        pa.field("protocol", pa.string()),
        # who called, and what for (trajkit_shim.callers); null: the request does not tell
        pa.field("harness", pa.string()),
        pa.field("agent_id", pa.string()),
        pa.field("parent_agent_id", pa.string()),
        pa.field("call_kind", pa.string()),
        # the parameters of the engine call, as JSON
        pa.field("sampling", pa.string()),
        # how the prompt came about: append or render; and why it was rendered
        # (trajkit_shim.prompts.Reason)
        pa.field("prompt_built", pa.string()),
        pa.field("render_reason", pa.string()),
        # of prompt_ids, as little-endian int32: BLAKE2b of 16 bytes
        pa.field("prompt_digest", pa.binary(16)),
        # prompt tokens that the engine did not compute again
        pa.field("cached_tokens", pa.int32()),
        # the request was read; the sample was complete
        pa.field("started_at", pa.timestamp("us", tz="UTC")),
        pa.field("ended_at", pa.timestamp("us", tz="UTC")),
    ]
)

LOG_SCHEMA, DELTA_LOG_SCHEMA = (
    pa.schema([*turns, *_PROVENANCE], metadata=turns.metadata)
    for turns in (schema.TURNS, schema.TURNS_DELTA)
)
"""``turns`` in either form and the provenance that the gateway knows."""

SESSION_LINES = pa.schema(
    [
        *schema.SESSIONS,
        # what ended it: finish, close, drop, idle, shutdown; null: it is open
        pa.field("ended_by", pa.string()),
        # turns in the log, and tokens of their prompts and outputs
        pa.field("turns", pa.int32()),
        pa.field("prompt_tokens", pa.int64()),
        pa.field("output_tokens", pa.int64()),
        # what whoever opened and finished it says of it, as JSON
        pa.field("metadata", pa.string()),
        pa.field("written_at", pa.timestamp("us", tz="UTC")),
    ],
    metadata=schema.SESSIONS.metadata,
)
"""``sessions``, and what the gateway knows. A session has a line for its opening and one
for each time that it ended or something was said of it; the last one counts."""


@dataclass(frozen=True, slots=True)
class LoggedMessage:
    """One chat message as the log holds it: see `trajkit.schema.MESSAGE`."""

    key: bytes
    role: str
    body: str

    @property
    def digest(self) -> bytes:
        """16 bytes that stand for the body."""
        return blake2b(self.body.encode(), digest_size=16).digest()


def logged_message(message: Json) -> LoggedMessage:
    """A canonical chat message with its key and body."""
    key, body = message_record(message)
    return LoggedMessage(key, str(message["role"]), body)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedTurn:
    """One model call, complete but for its place in the session."""

    session_id: str
    request_id: str
    model: str
    prompt_ids: npt.NDArray[np.int32]
    output_ids: npt.NDArray[np.int32]
    output_logprobs: npt.NDArray[np.float32] | None
    finish_reason: str
    messages: list[LoggedMessage]
    # None: nobody will echo it
    response: LoggedMessage | None
    use_tool: bool
    ill_formed: bool
    trainable: bool
    weight_versions: tuple[WeightSpan, ...]
    sampling: str
    cached_tokens: int | None
    started_at: datetime
    ended_at: datetime
    prompt_built: str | None = None
    render_reason: str | None = None
    prompt_digest: bytes | None = None
    resend_of: str | None = None
    protocol: str | None = None
    harness: str | None = None
    agent_id: str | None = None
    parent_agent_id: str | None = None
    call_kind: str | None = None
    # the columns of schema.ATTRIBUTION. None: it could not be told, or was not asked for
    prompt_message_index: npt.NDArray[np.int32] | None = None
    prompt_is_content: npt.NDArray[np.bool_] | None = None
    message_tool_names: list[str | None] | None = None
    # as `Sample.routed_experts`
    routed_experts: npt.NDArray[np.int16] | None = None


class LogFullError(OSError):
    """The log has as many bytes as it may have."""


class TurnLog:
    """The log of one run: its turns, and beside them what becomes known later.

    ``turns-00000.arrows`` and on hold a turn each batch, ``amendments-*.arrows`` what
    became known of turns after they were written (`trajkit.schema.AMENDMENTS`),
    ``sessions-*.arrows`` what is known of each session (`SESSION_LINES`).
    `trajkit.read_turns` and `trajkit.read_sessions` take the directory.

    Parameters
    ----------
    directory : path
        Made if missing. It must hold no log yet: session ids and turn numbers of two
        gateways in one directory would run into one another.
    fsync : bool
        Also wait until the disk has each turn, so that it outlives the machine and not
        only the process. All calls wait meanwhile.
    form : "full" or "delta"
        ``delta``: each prompt is written as what it adds to an earlier turn of its
        session, compressed, so that the log grows with what is new.
    max_file_bytes, max_file_turns : int, optional
        Where a file of turns ends and the next begins.
    max_total_bytes : int, optional
        Beyond it no turn is written. Amendments and sessions, which are short, are.
    routed_experts : bool
        Also write which experts each token was routed to
        (`trajkit_shim.experts.COLUMN`): for prompt and output of each turn, in either
        form.
    attributed : bool
        Whether there are columns for what each prompt token shows
        (`trajkit.schema.ATTRIBUTION`). Columns of nulls would take 0.4 kB of each turn.

    Raises
    ------
    FileExistsError
        The directory holds a log.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        form: Form = "full",
        fsync: bool = False,
        max_file_bytes: int | None = 1 << 30,
        max_file_turns: int | None = None,
        max_total_bytes: int | None = None,
        routed_experts: bool = False,
        attributed: bool = True,
    ) -> None:
        self.directory = Path(directory)
        self._form = form
        self._schema = LOG_SCHEMA if form == "full" else DELTA_LOG_SCHEMA
        if not attributed:
            left = [field for field in self._schema if field not in _SHOWN]
            self._schema = pa.schema(left, self._schema.metadata)
        self._attributed = attributed
        self._with_experts = routed_experts
        if routed_experts:
            self._schema = self._schema.append(COLUMN)
        self._squeeze = Squeezer(self._schema)
        self._max_total_bytes = max_total_bytes
        self._turns = Journal(
            self.directory,
            "turns",
            self._schema,
            fsync=fsync,
            max_file_bytes=max_file_bytes,
            max_file_rows=max_file_turns,
        )
        self._amendments, self._sessions = (
            Journal(
                self.directory,
                stem,
                lines,
                fsync=fsync,
                max_file_bytes=max_file_bytes,
            )
            for stem, lines in (
                ("amendments", schema.AMENDMENTS),
                ("sessions", SESSION_LINES),
            )
        )
        self._turns.start()
        self.path = self._turns.path_of(0)

    @property
    def full(self) -> bool:
        """No further turn can be written."""
        return (
            self._max_total_bytes is not None
            and self._turns.total_bytes >= self._max_total_bytes
        )

    def append(
        self,
        turn: LoggedTurn,
        turn_index: int,
        shown: Mapping[bytes, bytes],
        deltas: DeltaBook | None = None,
    ) -> dict[bytes, bytes]:
        """Write one turn; on return the operating system has it.

        Parameters
        ----------
        turn : LoggedTurn
        turn_index : int
            Its place in the session.
        shown : mapping of bytes to bytes
            Of the session's log so far: each message key's last body, as its digest. A
            body that is its key's last one is not written again.
        deltas : DeltaBook, optional
            The session's turns in the log, for the delta form. None: there are none.

        Returns
        -------
        dict
            What this turn adds to ``shown``.

        Raises
        ------
        LogFullError
            The log would have more than ``max_total_bytes`` with it.
        OSError
            It could not be written. The log is as it was before.
        """
        added: dict[bytes, bytes] = {}

        def fields(message: LoggedMessage) -> dict[str, object]:
            digest = message.digest
            known = added.get(message.key, shown.get(message.key)) == digest
            added[message.key] = digest
            return {
                "key": message.key,
                "role": message.role,
                "body": None if known else message.body,
            }

        messages = [fields(message) for message in turn.messages]
        response = None if turn.response is None else fields(turn.response)
        made: dict[str, object] = {
            "turn_index": turn_index,
            "messages": messages,
            "response": response,
            "weight_versions": [asdict(span) for span in turn.weight_versions] or None,
        }
        if self._with_experts:
            made[COLUMN.name] = experts_cell(turn.routed_experts)
        elif turn.routed_experts is not None:
            raise ValueError("the log was opened without routed_experts=True")
        if not self._attributed and any(
            getattr(turn, field.name) is not None for field in _SHOWN
        ):
            raise ValueError("the log was opened with attributed=False")
        if self._form == "full":
            self._write(_batch(turn, made, self._schema).serialize())
            return added
        deltas = deltas or DeltaBook()
        made |= _delta_fields(turn, turn_index, messages, deltas)
        try:
            self._write(self._squeeze(_batch(turn, made, self._schema)))
        except (OSError, pa.ArrowException):
            # no later turn may have this one for its base
            deltas.clear()
            raise
        return added

    def _write(self, data: pa.Buffer) -> None:
        total = self._turns.bytes_with(data, 1)
        if self._max_total_bytes is not None and total > self._max_total_bytes:
            raise LogFullError(
                errno.ENOSPC,
                f"the turns would take {total} bytes, and may take "
                f"{self._max_total_bytes}",
            )
        self._turns.append_buffer(data, 1)

    def amend(
        self,
        session_id: str,
        turns: Sequence[int],
        reason: str,
        trainable: bool | None,
    ) -> None:
        """Write what became known of turns: `trajkit.schema.AMENDMENTS`.

        Raises
        ------
        OSError
            It could not be written.
        """
        n = len(turns)
        columns = [
            pa.array([session_id] * n, pa.string()),
            pa.array(turns, pa.int32()),
            pa.array([reason] * n, pa.string()),
            pa.array([trainable] * n, pa.bool_()),
        ]
        self._amendments.append(
            pa.RecordBatch.from_arrays(columns, schema=schema.AMENDMENTS)
        )

    def write_session(self, line: Mapping[str, object]) -> None:
        """Write what is known of a session, the columns of `SESSION_LINES`.

        Raises
        ------
        OSError
            It could not be written.
        """
        columns = [pa.array([line[field.name]], field.type) for field in SESSION_LINES]
        self._sessions.append(pa.RecordBatch.from_arrays(columns, schema=SESSION_LINES))

    def close(self) -> None:
        """End the streams and close the files."""
        for journal in (self._turns, self._amendments, self._sessions):
            journal.close()


def _delta_fields(
    turn: LoggedTurn,
    turn_index: int,
    messages: list[dict[str, object]],
    deltas: DeltaBook,
) -> dict[str, object]:
    """The columns that stand for the prompt's ids and for the messages."""
    with_body = (i for i, message in enumerate(messages) if message["body"] is not None)
    delta = deltas.add(
        turn_index,
        turn.prompt_ids,
        turn.output_ids,
        [(message.key, message.role) for message in turn.messages],
        None if turn.response is None else (turn.response.key, turn.response.role),
        next(with_body, len(messages)),
    )
    return {
        **asdict(delta),
        "suffix_ids": turn.prompt_ids[delta.shared_length :],
        "suffix_messages": messages[delta.shared_messages :],
    }


def _batch(
    turn: LoggedTurn, made: Mapping[str, object], log_schema: pa.Schema
) -> pa.RecordBatch:
    """One turn: the columns of ``made``, and all others as they stand in it."""
    return pa.RecordBatch.from_arrays(
        [
            _cell(made[name] if name in made else getattr(turn, name), type_)
            for name, type_ in zip(log_schema.names, log_schema.types, strict=True)
        ],
        schema=log_schema,
    )


def _cell(value: object, type_: pa.DataType) -> pa.Array:
    """An array of one element."""
    if isinstance(value, pa.Array):
        return value
    if isinstance(value, np.ndarray):
        return pa.LargeListArray.from_arrays(
            pa.array([0, len(value)], pa.int64()), pa.array(value, type_.value_type)
        )
    return pa.array([value], type_)
