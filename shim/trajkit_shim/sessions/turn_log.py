"""The turn log: Arrow IPC streams that grow by one batch per turn.

A batch is handed to the operating system before the reply of its turn is sent, so a killed
gateway loses no turn that a client has seen. A kill can leave a torn last batch, of a turn
that was never acknowledged. Whether an answer arrived is written to a second stream.
"""

import errno
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import schema
from trajkit_shim.chat.request import LoggedMessage

LogForm: TypeAlias = Literal["full", "delta"]
"""Whether the log holds full prompts, or only what each adds to an earlier turn."""

USED = "a gateway has logged to this folder, and continues no log: choose another one"

EXPERTS = pa.field("routed_experts", pa.large_list(pa.list_(pa.list_(pa.int16()))))
"""For trainers that replay the routing: for each token of prompt and output, a list per
layer of its experts. The last token was sampled but not processed, so it has null. It is
a payload for `trajkit.linearize`, like `MASK`."""

MASK = pa.field("sampling_mask", pa.large_list(pa.list_(pa.int32())))
"""For trainers that normalise over the ids that could have been drawn: those of each output
token, itself included; null for a turn: every id could."""

# which message each prompt token belongs to
_SHOWN = schema.ATTRIBUTION.names[2:]
_TEXT, _TIME = pa.string(), pa.timestamp("us", tz="UTC")

PROVENANCE: dict[str, pa.DataType] = {
    "request_id": _TEXT,  # the id of the engine call
    "model": _TEXT,
    "protocol": _TEXT,  # of the client
    # who called, and what for (client_identity); null: unknown
    "harness": _TEXT,
    "agent_id": _TEXT,
    "parent_agent_id": _TEXT,
    "call_kind": _TEXT,
    "tools_key": _TEXT,  # of the tools that the request offers (trajkit.turns.tools_key)
    # the turn and the id of the tool call that started the agent of a conversation's
    # first turn (`Conversation.started_by`); null: none, or unknown
    "started_by_turn": pa.int32(),
    "started_by_call": _TEXT,
    "sampling": _TEXT,  # parameters of the engine call, as JSON
    # why the prompt was rendered (prompting.prompts.Reason); null: it was extended
    "render_reason": _TEXT,
    "cached_tokens": pa.int32(),  # prompt tokens taken from the engine's prefix cache
    # when the request was read, and when the sample was complete
    "started_at": _TIME,
    "ended_at": _TIME,
}
"""Where a turn comes from: the gateway's columns of the log, in their order."""

_COLUMNS = [*map(schema.ATTRIBUTION.field, _SHOWN), *pa.schema(PROVENANCE)]

# columns that a log may lack, and the option of `TurnLog` that adds them
_OPTIONAL = {
    "mm_items": "images",
    **dict.fromkeys(_SHOWN, "attributed"),
    EXPERTS.name: "routed_experts",
    MASK.name: "sampling_masks",
}

LOG_SCHEMA, DELTA_LOG_SCHEMA = (
    pa.schema([*turns, *_COLUMNS], metadata=turns.metadata)
    for turns in (schema.TURNS, schema.TURNS_DELTA)
)
"""``turns`` in either form, with the gateway's provenance columns."""

SESSION_LINES = pa.schema(
    [
        *schema.SESSIONS,
        # finish, close, drop, idle or shutdown; null: it is open
        pa.field("ended_by", _TEXT),
        # recorded turns, and tokens of their prompts and outputs
        pa.field("turns", pa.int32()),
        pa.field("prompt_tokens", pa.int64()),
        pa.field("output_tokens", pa.int64()),
        # given when it was opened and finished, as JSON
        pa.field("metadata", _TEXT),
        # what of its requests had no effect, and how often, as JSON
        pa.field("ignored", _TEXT),
        pa.field("written_at", _TIME),
    ],
    metadata=schema.SESSIONS.metadata,
)
"""``sessions``, with the gateway's columns. A session has one line for its opening and
one for each end or later update; the last line counts."""


class AppendLog:
    """An Arrow IPC stream in a file that grows by a batch at a time, without an end marker.

    ``fsync``: also write each batch to disk. Raises `FileExistsError`.
    """

    def __init__(self, path: Path, columns: pa.Schema, *, fsync: bool = False) -> None:
        self.path, self._fsync = path, fsync
        self._head = columns.serialize()
        self._file: int | None = None
        self._size = 0  # bytes of the file
        self._closed = False
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            raise FileExistsError(errno.EEXIST, USED, str(path))

    def append(self, batch: pa.RecordBatch) -> None:
        """Write a batch; on return the operating system has it.

        Raises `OSError`: the batch could not be written, and the file is unchanged.
        """
        if self._closed:
            raise OSError(errno.EBADF, "the log is closed", str(self.path))
        self.start()
        self._check_file()
        self._write(batch.serialize())

    def start(self) -> None:
        """Create the file if there is none; done by `append` if needed."""
        if self._file is not None:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self._file = os.open(self.path, flags, 0o644)
        try:
            self._write(self._head)
            if self._fsync:
                # the file's name must survive a crash as well
                folder = os.open(self.path.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
        except OSError:
            os.close(self._file)
            self._file = None
            self.path.unlink()
            raise

    def close(self) -> None:
        self._closed = True
        if self._file is not None:
            file, self._file = self._file, None
            # its batches were written before; some file systems fail here
            with suppress(OSError):
                os.close(file)

    def _check_file(self) -> None:
        """Raise `OSError` if another program removed, replaced or changed the file."""
        assert self._file is not None
        own, reason = os.fstat(self._file), None
        if not self.path.exists():
            reason = "it was removed"
        elif not os.path.samestat(self.path.stat(), own):
            reason = "another file is in its place"
        elif own.st_size != self._size:
            reason = f"it has {own.st_size} bytes, but {self._size} were written"
        if reason is not None:
            message = f"another program changed the log: {reason}"
            raise OSError(errno.EIO, message, str(self.path))

    def _write(self, data: pa.Buffer) -> None:
        """Write at the end of the file, or leave it as it was."""
        assert self._file is not None
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
            if self._fsync:
                os.fsync(self._file)
        except OSError:
            # half a batch would hide all later ones from readers
            os.ftruncate(self._file, self._size)
            os.lseek(self._file, self._size, os.SEEK_SET)
            raise
        self._size += data.size


class TurnLog:
    """The log of one run: its turns, and what becomes known of them later.

    ``turns-*.arrows`` hold one turn per batch, ``amendments-*.arrows`` what became known
    after a turn was written (`trajkit.schema.AMENDMENTS`), ``sessions-*.arrows`` the
    sessions (`SESSION_LINES`). `trajkit.read_turns` and `trajkit.read_sessions` read the
    directory. It must not contain a log before, because session ids and turn numbers of
    two gateways would collide (`FileExistsError`).

    ``form``: ``delta`` stores only what each prompt adds to an earlier turn of its
    session. ``fsync``: also write each turn to disk, so that it survives a crash of the
    machine; all calls wait for it. ``routed_experts``, ``sampling_masks``, ``attributed``
    and ``images`` add columns (`EXPERTS`, `MASK`, `trajkit.schema.ATTRIBUTION`,
    ``mm_items``). ``worker`` is in the names of the files, for several logs in one
    directory.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        form: LogForm = "full",
        fsync: bool = False,
        routed_experts: bool = False,
        sampling_masks: bool = False,
        attributed: bool = False,
        images: bool = False,
        worker: int | None = None,
    ) -> None:
        given = {"routed_experts": routed_experts, "sampling_masks": sampling_masks}
        given |= {"attributed": attributed, "images": images}
        # columns that the log does not have, and the option that left them out
        self._left_out = {k: by for k, by in _OPTIONAL.items() if not given[by]}
        self.directory, self.fsync, self.images = Path(directory), fsync, images
        self.attributed = attributed
        self._form = form
        columns = LOG_SCHEMA if form == "full" else DELTA_LOG_SCHEMA
        kept = [each for each in (*columns, MASK) if each.name not in self._left_out]
        self._columns = pa.struct(kept)
        kept += [EXPERTS] if routed_experts else []
        schemas = pa.schema(kept, columns.metadata), schema.AMENDMENTS, SESSION_LINES
        stems = "turns", "amendments", "sessions"
        end = "00000" if worker is None else f"{worker}-00000"
        self._turns, self._amendments, self._sessions = (
            AppendLog(self.directory / f"{stem}-{end}.arrows", columns, fsync=fsync)
            for stem, columns in zip(stems, schemas, strict=True)
        )
        self._turns.start()
        self.path = self._turns.path

    def append(
        self, turn: Mapping[str, Any], turn_index: int, bodies: set[bytes]
    ) -> None:
        """Write one turn; on return the operating system has it.

        ``turn``: values by column (missing: null), messages as `LoggedMessage`, and as
        ``delta`` an earlier turn (None: none), and how many ids and messages it shares
        with that turn (`trajkit.schema.TURNS_DELTA`). ``prompt_message_index`` may lack
        the prompt's first tokens: turns that it extends have those. ``bodies``: keys of
        the messages of the session whose bodies the log has; those of the turn are
        added. Raises `OSError`: the turn could not be written; the log is unchanged.
        """
        for name, option in self._left_out.items():
            if turn.get(name) is not None:
                raise ValueError(
                    f"the log was opened with {option}=False: it has no {name}"
                )
        new = set[bytes]()

        def fields_of(message: LoggedMessage) -> dict[str, object]:
            known = message.key in bodies or message.key in new
            new.add(message.key)
            body = None if known else message.body
            return {"key": message.key, "role": message.role, "body": body}

        base_turn, n_ids, n_messages = None, 0, 0
        if self._form == "delta":
            base_turn, n_ids, n_messages = turn["delta"]
        ids, response = turn["prompt_ids"][n_ids:], turn["response"]
        index = turn.get("prompt_message_index")
        messages = [*map(fields_of, turn["messages"][n_messages:])]
        # with columns of both forms, of which the log has one
        row = {
            **turn,
            "prompt_is_content": None if index is None else index >= 0,
            "turn_index": turn_index,
            "base_turn": base_turn,
            "shared_length": n_ids,
            "shared_messages": n_messages,
            "prompt_ids": ids,
            "suffix_ids": ids,
            "messages": messages,
            "suffix_messages": messages,
            "response": None if response is None else fields_of(response),
        }
        batch = _batch([row], self._columns)
        if EXPERTS.name not in self._left_out:
            cell = _experts_cell(turn.get(EXPERTS.name))
            batch = batch.append_column(EXPERTS, cell)
        self._turns.append(batch)
        bodies |= new

    def amend(
        self, session_id: str, turns: Sequence[int], reason: str, trainable: bool | None
    ) -> None:
        """Write what became known of turns: `trajkit.schema.AMENDMENTS`."""
        columns = schema.AMENDMENTS
        lines = [(session_id, turn, reason, trainable) for turn in turns]
        rows = [dict(zip(columns.names, line, strict=True)) for line in lines]
        self._amendments.append(_batch(rows, pa.struct(columns)))

    def write_session(self, line: Mapping[str, object]) -> None:
        self._sessions.append(_batch([line], pa.struct(SESSION_LINES)))

    def close(self) -> None:
        for log in (self._turns, self._amendments, self._sessions):
            log.close()


def _batch(rows: Sequence[Mapping[str, Any]], columns: pa.DataType) -> pa.RecordBatch:
    """The batch of the columns of some rows; a value that is missing is null."""
    # unlike `from_pylist` it imports no pandas, and converts all values together
    return pa.RecordBatch.from_struct_array(pa.array(rows, columns))


def _experts_cell(experts: npt.NDArray[np.int16] | None) -> pa.Array:
    if experts is None:
        return pa.nulls(1, EXPERTS.type)
    tokens = pa.array(experts.reshape(-1))
    for length in experts.shape[:0:-1]:
        tokens = pa.FixedSizeListArray.from_arrays(tokens, length)
    tokens = tokens.cast(EXPERTS.type.value_type)
    tokens = pa.concat_arrays([tokens, pa.nulls(1, tokens.type)])
    return pa.LargeListArray.from_arrays(pa.array([0, len(tokens)], pa.int64()), tokens)
