"""What sessions spend their time on."""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from trajkit.errors import InvalidTurnsError, SchemaError
from trajkit.tables.canonical import TableLike, as_table
from trajkit.tables.take import tuples
from trajkit.turns.records import as_turns

_TIMES = ("started_at", "ended_at")


@dataclass(frozen=True, slots=True)
class Slice:
    """A range of time of a session, in seconds since the run began."""

    session_id: str
    # generation, tool or queue
    kind: str
    start: float
    stop: float
    # of a generation: the turn, and its lane: calls that overlap have different lanes
    turn_index: int | None = None
    lane: int = 0


def slices_of(turns: TableLike, sessions: TableLike | None = None) -> list[Slice]:
    """The times of each session in the order of the turns; see `trajkit.plot.swimlanes`."""
    table = as_turns(as_table(turns))
    starts, stops = (_micros(table, name, "turns") for name in _TIMES)
    calls: dict[str, list[tuple[int, int, int]]] = {}
    places = tuples(table, "session_id", "turn_index")
    for (name, turn), start, stop in zip(places, starts, stops, strict=True):
        if start is not None and stop is not None:
            if stop < start:
                raise InvalidTurnsError(
                    f"session {name!r}, turn {turn}: ended_at is {start - stop:,} "
                    "microseconds before started_at"
                )
            calls.setdefault(name, []).append((start, stop, turn))
    if not calls:
        raise SchemaError(
            f"{' and '.join(_TIMES)} are null in all {table.num_rows} turns: there is no "
            "timeline without times, which `trajkit serve` records"
        )
    bounds = {
        name: (min(start for start, *_ in own), max(stop for _, stop, _ in own))
        for name, own in calls.items()
    }
    for name, (start, stop) in _rollouts(sessions):
        if name in bounds:
            known = bounds[name]
            bounds[name] = min(start, known[0]), max(stop, known[1])
    began = min(start for start, _ in bounds.values())
    slices = []
    for name, own in calls.items():
        # until when something is known, and when each lane is free
        busy, end = bounds[name]
        lanes: list[int] = []
        found: list[tuple[str, int, int, int | None, int]] = [
            ("queue", began, busy, None, 0)
        ]
        for start, stop, turn in sorted(own):
            found.append(("tool", busy, start, None, 0))
            free = (k for k, until in enumerate(lanes) if until <= start)
            lane = next(free, len(lanes))
            lanes[lane : lane + 1] = [stop]
            found.append(("generation", start, stop, turn, lane))
            busy = max(busy, stop)
        found.append(("tool", busy, end, None, 0))
        slices += [
            Slice(name, kind, (start - began) / 1e6, (stop - began) / 1e6, turn, lane)
            for kind, start, stop, turn, lane in found
            if turn is not None or start < stop
        ]
    return slices


def _rollouts(sessions: TableLike | None) -> Iterator[tuple[str, tuple[int, int]]]:
    """When each rollout started and ended, if the sessions have these columns."""
    if sessions is None:
        return
    table = as_table(sessions)
    if not {"started_at", "seconds"} <= {*table.column_names}:
        return
    starts = _micros(table, "started_at", "sessions")
    known = tuples(table, "session_id", "seconds")
    for (name, seconds), start in zip(known, starts, strict=True):
        if start is not None and seconds is not None:
            yield name, (start, start + round(seconds * 1e6))


def _micros(table: pa.Table, name: str, what: str) -> list[int | None]:
    """A column of timestamps, in microseconds since 1970."""
    if name not in table.column_names:
        raise SchemaError(
            f"{what}: no column {name!r}. A timeline needs {' and '.join(_TIMES)} "
            "(timestamps), as `trajkit serve` records them"
        )
    column = table[name]
    if pa.types.is_null(column.type):
        return [None] * len(column)
    if not pa.types.is_timestamp(column.type):
        raise SchemaError(
            f"{what}, column {name!r}: expected timestamps, found {column.type}"
        )
    unit = pa.timestamp("us", column.type.tz)
    micros: list[int | None] = (
        column.cast(unit, safe=False).cast(pa.int64()).to_pylist()
    )
    return micros
