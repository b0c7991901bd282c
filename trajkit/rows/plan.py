"""The rows that a policy makes of linked calls, planned, and then written as columns."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit._kernel_names import CHOICES, numbers
from trajkit.errors import SchemaError
from trajkit.learn.rewards import spread
from trajkit.policies import DRIFT_ACTIONS, TRAINING_ROWS, Policy
from trajkit.rows.payloads import PathRanges, row_items, row_versions
from trajkit.rows.routes import created_ranks
from trajkit.schema import (
    REPORT,
    ROW_VERSIONS,
    ROWS,
    SEGMENT_KINDS,
    SPAN,
    SPAN_KINDS,
)
from trajkit.tables import limits
from trajkit.tables.columns import dictionary_for
from trajkit.tables.ragged import (
    Array,
    Ints,
    Longs,
    Records,
    combined,
    offsets_of,
    pooled,
    runs_of,
)
from trajkit.turns.sessions import Sessions

COUNTS = tuple(REPORT.names[REPORT.names.index("turns") :])
"""The columns of the report that the kernel counts, in its order."""
numbers("ReportCount", COUNTS)
numbers("SpanKind", SPAN_KINDS[:-1])  # the last is of trajkit.rows.splice
numbers("SpanLine", [field.name for field in SPAN][:-1])

NO_LIMIT = np.iinfo(np.int64).max
"""Of a number that a policy does not limit."""
_TYPES = {field.name: field.type for field in ROWS}


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows as runs of calls, and what became of every session and every output."""

    # dtype ROW, shape (n_rows,)
    rows: Records
    # shape (n_sessions, len(COUNTS))
    counts: Longs
    # shape (n_calls,): the chain, or row, that trains each call's output, by its last
    # call; -1: none
    owners: Ints

    def counted(self, name: str) -> Longs:
        """One count of the report, by session."""
        return self.counts[:, COUNTS.index(name)]


@lru_cache(64)
def choices_of(policy: Policy, max_tokens: int) -> Records:
    """A policy as the kernels read it, dtype CHOICES, shape (1,); read-only."""
    choices = np.zeros(1, CHOICES)
    for name, value in {
        "fork_threshold": policy.fork_threshold,
        "max_tokens": max_tokens,
        "max_rows": NO_LIMIT if policy.max_rows is None else policy.max_rows,
        # spliced rows are planned of calls without drift
        "on_drift": DRIFT_ACTIONS.get(policy.on_drift, DRIFT_ACTIONS["fork"]),
        "train_in": TRAINING_ROWS[policy.train_in],
        "keep_prefix": policy.keep_prefix,
        "keep_untrained": policy.keep_untrained,
        "keep_empty": policy.keep_empty,
        "chain_flags": policy.flag_scope == "chain",
        "main_only": policy.row_selection == "main",
        "cut_at_calls": policy.truncate_at == "calls",
        "need_logprob": policy.missing_logprobs == "untrain",
    }.items():
        choices[name] = value
    choices.flags.writeable = False
    return choices


def plan_rows(
    sessions: Sessions, links: Records, policy: Policy, max_tokens: int
) -> Plan:
    """The rows of links whose ``lcp`` is known."""
    created = np.empty(0, np.int32)
    if policy.row_selection == "main" and policy.parent_by == "prefix":
        created = created_ranks(sessions, links)
    elif policy.row_selection == "main":
        created = sessions.by_creation()
    choices = choices_of(policy, max_tokens)
    rows, owners, counts = _core.plan_rows(
        sessions.forest.paths, links, choices, created
    )
    return Plan(rows, counts, owners)


def report_batch(facts: pa.RecordBatch, plan: Plan) -> pa.RecordBatch:
    """`trajkit.schema.REPORT` of the sessions that the facts are of."""
    counts = [
        pa.array(plan.counted(name)).cast(REPORT.field(name).type) for name in COUNTS
    ]
    return pa.RecordBatch.from_arrays([*facts.columns, *counts], schema=REPORT)


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
    runs: Iterable[tuple[int, int]] = [(0, len(rows))]
    if rows["n_tokens"].sum() > limits.BATCH_TOKENS:
        runs = runs_of(rows["n_tokens"], limits.BATCH_TOKENS)
    for lo, hi in runs:
        part, n_rows = rows[lo:hi], hi - lo
        starts, span_starts = (offsets_of(part[n]) for n in ("n_tokens", "n_spans"))
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
        turns = sessions.turn_index[calls]
        mine = scalars
        if n_rows < len(rows):
            mine = {name: column[lo:hi] for name, column in scalars.items()}
        columns = mine | {
            "turns": _lists("turns", offsets_of(part["n_calls"]), None, turns),
            "weight_versions": pa.nulls(n_rows, ROW_VERSIONS),
            "mm_items": pa.nulls(n_rows, _TYPES["mm_items"]),
            "spans": _lists("spans", span_starts, values=_structs(spans, kinds)),
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
        arrays = [columns[name] for name in ROWS.names]
        yield part, pa.RecordBatch.from_arrays(arrays, schema=ROWS)


def _array(
    type_: pa.DataType, length: int, *buffers: Array | None, **options: object
) -> pa.Array:
    """An array in Arrow's columnar format: its validity (or None), then its values.

    Buffers are as long as type and length require, and not written to any more. Of
    ``nulls``, -1 stands for a number that was not counted.
    """
    held = [None if one is None else pa.py_buffer(one) for one in buffers]
    return pa.Array.from_buffers(type_, length, held, **options)


def _lists(
    name: str,
    offsets: Longs,
    *buffers: Array | None,
    nulls: int = 0,
    values: pa.Array | None = None,
) -> pa.Array:
    """A column of lists, from the buffers of their values, or from these."""
    type_ = _TYPES[name]
    if values is None:
        n = int(offsets[-1])
        values = _array(type_.value_type, n, *buffers, null_count=nulls)
    n_lists = len(offsets) - 1
    return _array(type_, n_lists, None, offsets, null_count=0, children=[values])


def _structs(spans: Ints, kinds: Array) -> pa.Array:
    """Spans, from the lines of their fields."""
    n = len(kinds)
    fields = [_array(pa.int32(), n, None, line, null_count=0) for line in spans]
    names = _array(pa.int8(), n, None, kinds, null_count=0)
    fields.append(
        pa.DictionaryArray.from_arrays(names, dictionary_for(SPAN_KINDS), safe=False)
    )
    return _array(SPAN, n, None, null_count=0, children=fields)


def _drop_partial(
    starts: Longs,
    mask: npt.NDArray[np.uint8],
    logprobs: npt.NDArray[np.float32],
    valid: npt.NDArray[np.uint8],
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
    sums = np.bincount(session, n_trained, facts.num_rows).astype(np.int64)[session]
    segment, parent = links["segment"][last] - 1, rows["parent_row"]
    kinds = pa.array(segment.astype(np.int8), mask=segment < 0)
    of_session, of_last = _taker(session), _taker(last)
    reward, group_id, session_id = (
        of_session(facts.column(name)) for name in ("reward", "group_id", "session_id")
    )
    if policy.rewards != "copy" and len(rows):
        whole = reward.fill_null(0.0).to_numpy()
        shares = spread(whole, policy.rewards, session, rows["index"], segment)
        reward = pa.array(shares, mask=np.asarray(reward.is_null()))
    finish_reason = combined(sessions.table.column("finish_reason"))
    return {
        "session_id": session_id,
        "row_index": pa.array(rows["index"]),
        "group_id": group_id,
        "prompt_length": pa.array(rows["prompt_len"].astype(np.int32)),
        "parent_row": pa.array(parent, mask=parent < 0),
        "shared_length": pa.array(rows["shared"].astype(np.int32)),
        "reward": reward,
        "row_weight": pa.array(n_trained / np.maximum(sums, 1), mask=sums == 0),
        "rollout_mask_sum": pa.array(sums),
        "finish_reason": of_last(finish_reason),
        **{
            name: pa.array(rows[name] != 0)
            for name in ("truncated", "use_tool", "ill_formed")
        },
        "segment_kind": pa.DictionaryArray.from_arrays(
            kinds, dictionary_for(SEGMENT_KINDS)
        ),
        "last_turn": pa.array(sessions.turn_index[last]),
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


def _steps(
    sessions: Sessions, n_rows: int, of_last: Callable[[pa.Array], pa.Array]
) -> pa.Array:
    """The training step of each row's last turn."""
    type_ = _TYPES["step"]
    if sessions.table.schema.get_field_index("step") < 0:
        return pa.nulls(n_rows, type_)
    column = combined(sessions.table.column("step"))
    if not pa.types.is_integer(column.type) and not pa.types.is_null(column.type):
        raise SchemaError(f"column 'step' of turns is {column.type}: expected integers")
    return of_last(column).cast(type_)
