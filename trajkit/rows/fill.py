"""The columns of planned rows, and with them the ``rows`` table."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit._kernel_names import numbers
from trajkit.errors import SchemaError
from trajkit.learn.rewards import spread
from trajkit.policies import Policy
from trajkit.rows.payloads import PathRanges, row_items, row_versions
from trajkit.rows.plan import Plan, choices_of
from trajkit.schema import ROW_VERSIONS, ROWS, SEGMENT_KINDS, SPAN, SPAN_KINDS
from trajkit.tables import limits
from trajkit.tables.columns import dictionary_for
from trajkit.tables.ragged import Ints, Longs, Records, offsets_of, pooled, runs_of
from trajkit.turns.sessions import Sessions

numbers("SpanKind", SPAN_KINDS[:-1])  # the last is of trajkit.rows.splice
numbers("SpanLine", [field.name for field in SPAN][:-1])
_Buffer: TypeAlias = npt.NDArray[np.generic]
_Bits: TypeAlias = npt.NDArray[np.uint8]
_TYPES = {field.name: field.type for field in ROWS}


def row_batches(
    sessions: Sessions,
    links: Records,
    policy: Policy,
    max_tokens: int,
    plan: Plan,
    facts: pa.RecordBatch,
    ranges: Callable[[Records], PathRanges],
) -> Iterator[tuple[Records, pa.RecordBatch]]:
    """`trajkit.schema.ROWS` of a plan, each batch when it is asked for.

    Yields (rows of the plan, batch). ``facts`` are of the same sessions; ``ranges`` gives
    the parts of rows that are parts of recorded paths.
    """
    rows, choices = plan.rows, choices_of(policy, max_tokens)
    scalars = _scalars(sessions, links, policy, rows, facts)
    items, versions = (
        sessions.table.column(name) for name in ("mm_items", "weight_versions")
    )

    def batch(part: Records, columns: dict[str, pa.Array]) -> pa.RecordBatch:
        starts, n_rows = offsets_of(part["n_tokens"]), len(part)
        n_tokens = int(starts[-1])
        ids, logprobs = pooled(n_tokens, np.int32), pooled(n_tokens, np.float32)
        mask, valid = (pooled((n_tokens + 7) // 8, np.uint8) for _ in range(2))
        missing, calls, spans, kinds = _core.fill_rows(
            sessions.forest.paths,
            links,
            choices,
            plan.owners,
            sessions.turn_index,
            part,
            ids,
            mask,
            logprobs,
            valid,
            n_tokens >= limits.STREAMING_STORE_TOKENS,
        )
        if missing and policy.missing_logprobs == "null_row":
            _drop_partial(starts, mask, logprobs, valid)
        # where the engine gave every logprob, what is valid is what is trained
        given = valid if missing else mask
        span_starts = offsets_of(part["n_spans"])
        columns |= {
            "turns": _lists(
                "turns", offsets_of(part["n_calls"]), None, sessions.turn_index[calls]
            ),
            "weight_versions": pa.nulls(n_rows, ROW_VERSIONS),
            "mm_items": pa.nulls(n_rows, _TYPES["mm_items"]),
            "spans": _array(
                _TYPES["spans"],
                n_rows,
                None,
                span_starts,
                children=[_structs(spans, kinds)],
            ),
            "input_ids": _lists("input_ids", starts, None, ids),
            "loss_mask": _lists("loss_mask", starts, None, mask),
            "logprobs": _lists("logprobs", starts, given, logprobs, nulls=-1),
        }
        if versions.null_count < len(versions):
            columns["weight_versions"] = row_versions(
                sessions, part, span_starts, spans
            )
        if items.null_count < len(items):
            columns["mm_items"] = row_items(sessions, n_rows, ranges(part))
        return pa.RecordBatch.from_arrays(
            [columns[name] for name in ROWS.names], schema=ROWS
        )

    runs: Iterable[tuple[int, int]] = [(0, len(rows))]
    if rows["n_tokens"].sum() > limits.BATCH_TOKENS:
        runs = runs_of(rows["n_tokens"], limits.BATCH_TOKENS)
    for lo, hi in runs:
        columns = dict(scalars)
        if hi - lo < len(rows):
            columns = {name: each[lo:hi] for name, each in scalars.items()}
        yield rows[lo:hi], batch(rows[lo:hi], columns)


def _array(
    type_: pa.DataType,
    length: int,
    *buffers: _Buffer | None,
    nulls: int = 0,
    children: list[pa.Array] | None = None,
) -> pa.Array:
    """An array in Arrow's columnar format: its validity (or None), then its values.

    Buffers are as long as type and length require, and not written to any more. Of
    ``nulls``, -1 stands for a number that was not counted.
    """
    held = [None if one is None else pa.py_buffer(one) for one in buffers]
    return pa.Array.from_buffers(type_, length, held, nulls, children=children)


def _lists(
    name: str, offsets: Longs, *buffers: _Buffer | None, nulls: int = 0
) -> pa.Array:
    """A column of lists, from the buffers of their values."""
    type_ = _TYPES[name]
    values = _array(type_.value_type, int(offsets[-1]), *buffers, nulls=nulls)
    return _array(type_, len(offsets) - 1, None, offsets, children=[values])


def _structs(spans: Ints, kinds: _Buffer) -> pa.Array:
    """Spans, from the lines of their fields."""
    n = len(kinds)
    parts = [
        *(_array(pa.int32(), n, None, part) for part in spans),
        pa.DictionaryArray.from_arrays(
            _array(pa.int8(), n, None, kinds), dictionary_for(SPAN_KINDS), safe=False
        ),
    ]
    return _array(_TYPES["spans"].value_type, n, None, children=parts)


def _drop_partial(
    starts: Longs, mask: _Bits, logprobs: npt.NDArray[np.float32], valid: _Bits
) -> None:
    """Leave a row no logprob if ``valid`` lacks one that ``mask`` trains."""
    lacking, given = (
        np.unpackbits(bits, count=len(logprobs), bitorder="little")
        for bits in (mask & ~valid, valid)
    )
    n_lacking = np.append(0, np.cumsum(lacking))[starts]
    drops = np.repeat(np.diff(n_lacking) > 0, np.diff(starts))
    logprobs[drops] = 0.0
    given[drops] = 0
    valid[:] = np.packbits(given, bitorder="little")


def _scalars(
    sessions: Sessions,
    links: Records,
    policy: Policy,
    rows: Records,
    facts: pa.RecordBatch,
) -> dict[str, pa.Array]:
    """The columns with one value per row, by name, of all rows of the sessions."""
    session, last, n_trained = rows["session"], rows["last"], rows["n_trained"]
    sums = np.bincount(session, n_trained, len(sessions.ids)).astype(np.int64)[session]
    segment = links["segment"][last] - 1
    parent = rows["parent_row"]
    of_session, of_last = _taker(session), _taker(last)
    reward = of_session(facts.column("reward"))
    kinds = pa.array(np.maximum(segment, 0).astype(np.int8), mask=segment < 0)
    return {
        "row_index": pa.array(rows["index"]),
        "prompt_length": pa.array(rows["prompt_len"].astype(np.int32)),
        "parent_row": pa.array(parent, mask=parent < 0),
        "shared_length": pa.array(rows["shared"].astype(np.int32)),
        "last_turn": pa.array(sessions.turn_index[last]),
        "rollout_mask_sum": pa.array(sums),
        "row_weight": pa.array(n_trained / np.maximum(sums, 1), mask=sums == 0),
        "segment_kind": pa.DictionaryArray.from_arrays(
            kinds, dictionary_for(SEGMENT_KINDS), safe=False
        ),
        **{
            name: pa.array(rows[name] != 0)
            for name in ("truncated", "use_tool", "ill_formed")
        },
        "session_id": of_session(facts.column("session_id")),
        "group_id": of_session(facts.column("group_id")),
        "reward": _rewards(reward, policy, rows, segment),
        "finish_reason": of_last(_chunk(sessions, "finish_reason")),
        "step": _steps(sessions, len(rows), of_last),
    }


def _taker(indices: Ints) -> Callable[[pa.Array], pa.Array]:
    """Takes values at these indices: as a slice, which costs less, if they ascend by 1."""
    n = len(indices)
    if n == 1 or (n and (np.diff(indices) == 1).all()):
        start = int(indices[0])
        return lambda values: values.slice(start, n)
    at = pa.array(indices)
    return lambda values: values.take(at)


def _rewards(given: pa.Array, policy: Policy, rows: Records, segment: Ints) -> pa.Array:
    """Each row's reward: the session's, spread by the policy's ``rewards``."""
    if policy.rewards == "copy" or not len(rows):
        return given
    whole = given.fill_null(0.0).to_numpy()
    shares = spread(whole, policy.rewards, rows["session"], rows["index"], segment)
    return pa.array(shares, mask=given.is_null().to_numpy(zero_copy_only=False))


def _chunk(sessions: Sessions, name: str) -> pa.Array:
    column = sessions.table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _steps(
    sessions: Sessions, n_rows: int, of_last: Callable[[pa.Array], pa.Array]
) -> pa.Array:
    """The training step of each row's last turn."""
    type_ = ROWS.field("step").type
    if sessions.table.schema.get_field_index("step") < 0:
        return pa.nulls(n_rows, type_)
    column = _chunk(sessions, "step")
    if not pa.types.is_integer(column.type) and not pa.types.is_null(column.type):
        raise SchemaError(f"column 'step' of turns is {column.type}: expected integers")
    return of_last(column).cast(type_)
