"""A stream of record batches, cut where sessions end."""

from collections.abc import Iterable, Iterator

import pyarrow as pa

from trajkit import compute as pc
from trajkit.errors import InvalidTurnsError, SchemaError


def whole_sessions(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Tables of whole sessions, in the order of the stream.

    A session may span batches that follow each other; the last session seen is held
    back until another begins or the stream ends, so memory is bounded by the largest
    session and the batch size.

    Raises
    ------
    SchemaError
        What comes is no record batch, or one without a session_id, or the batches of a
        session differ in their columns.
    InvalidTurnsError
        A session comes back after another began.
    """
    held: list[pa.RecordBatch] = []
    current: str | None = None
    ended: set[str] = set()
    for batch in batches:
        if not isinstance(batch, pa.RecordBatch):
            raise SchemaError(
                f"{type(batch).__name__} is no record batch: expected an iterator of "
                "pyarrow RecordBatch"
            )
        if "session_id" not in batch.schema.names:
            raise SchemaError("column 'session_id' of turns is absent")
        if batch.num_rows == 0:
            continue
        ids = batch.column("session_id").cast(pa.string())
        changes = pc.indices_nonzero(pc.not_equal(ids[1:], ids[:-1]))
        starts = [0, *(1 + row.as_py() for row in changes)]
        began = [ids[row].as_py() for row in starts]
        goes_on = began[0] == current
        for session in began[1:] if goes_on else began:
            if session in ended or session == current:
                raise InvalidTurnsError(
                    f"session {session!r} comes back after another session began: a "
                    "stream must hold each session in one piece. Gather it first, as "
                    "trajkit.read_turns does, or sort it by session_id and turn_index"
                )
            if current is not None:
                ended.add(current)
            current = session
        if goes_on and len(starts) == 1:
            held.append(batch)
            continue
        last = starts[-1]
        whole = [*held, batch.slice(0, last)] if last else held
        if whole:
            yield _table(whole)
        held = [batch.slice(last)]
    if held:
        yield _table(held)


def _table(batches: list[pa.RecordBatch]) -> pa.Table:
    try:
        return pa.Table.from_batches(batches)
    except pa.ArrowInvalid as error:
        raise SchemaError(f"the batches do not make one table: {error}") from None
