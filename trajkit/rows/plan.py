"""The rows that a policy makes of linked calls, planned, and then written as columns.

What rows carry of their calls per token comes first: images, weights and payloads.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core, schema
from trajkit._arguments import chosen_names
from trajkit._kernel_names import CHOICES, numbers
from trajkit.errors import ArgumentError, InvalidTurnsError, SchemaError
from trajkit.learn.rewards import spread
from trajkit.policies import DRIFT_ACTIONS, TRAINING_ROWS, Policy
from trajkit.rows.routes import created_ranks
from trajkit.schema.engine import SPAN_NUMBERS, field_of, fields_of
from trajkit.tables import limits
from trajkit.tables.canonical import is_list
from trajkit.tables.columns import dictionary_for, take_values
from trajkit.tables.ragged import (
    Array,
    Bools,
    Ints,
    Longs,
    Ragged,
    Records,
    combined,
    offsets_of,
    pooled,
    positions,
    runs_of,
)
from trajkit.turns.sessions import Sessions

WEIGHT_VERSION = "weight_version"
"""The payload with the weights that sampled each token; it does not need a column."""

# Suffix of the column with the position of a payload's first element.
_START = "_start"


@dataclass(frozen=True, slots=True)
class PathRanges:
    """Ranges of rows that equal ranges of calls' paths; shape (n_ranges,)."""

    row: Longs
    # start in the row
    place: Longs
    call: Longs
    # start in the call's path
    first: Longs
    length: Longs

    @classmethod
    def of_paths(cls, planned: Records) -> Self:
        nowhere = np.zeros(len(planned), np.int64)
        rows, last = np.arange(len(planned)), planned["last"].astype(np.int64)
        return cls(rows, nowhere, last, nowhere, planned["n_tokens"])


def _entries(calls: Sessions, name: str) -> tuple[pa.StructArray, Longs, Longs, Longs]:
    """The entries of a column of ranges: with the call, start and stop of each."""
    lists = Ragged.of(calls.table.column(name))
    start, stop = fields_of(lists.values, "start", "stop")
    return lists.values, lists.owner, start, stop


def _version_of(calls: Sessions, call: Longs, token: Longs) -> tuple[pa.Array, Longs]:
    """The versions of all calls, and the one that sampled each token of outputs, or -1."""
    entries, of_call, start, stop = _entries(calls, "weight_versions")
    names = field_of(entries, "version")
    if not len(names):
        return names, np.full(len(call), -1)
    keys = (of_call << 32) + start
    found = np.searchsorted(keys, (call << 32) + token, side="right") - 1
    at = np.maximum(found, 0)
    inside = (of_call[at] == call) & (token < stop[at]) & (found >= 0)
    return names, np.where(inside, at, -1)


def row_versions(
    calls: Sessions, rows: Records, offsets: Longs, spans: Ints
) -> pa.StructArray:
    """The column ``weight_versions`` of rows."""
    n_rows = len(rows)
    start, stop, turn, out_start, out_stop = spans.astype(np.int64)
    row = np.repeat(np.arange(n_rows), np.diff(offsets))
    call = calls.named(rows["session"][row], turn)
    ends = []
    for token, order in ((out_start, 1), (out_stop - 1, -1)):
        names, version = _version_of(calls, call, token)
        known = np.flatnonzero((version >= 0) & (stop > start))[::order]
        found, first = np.unique(row[known], return_index=True)
        source = np.full(n_rows, -1)
        source[found] = version[known[first]]
        ends.append(names.take(pa.array(source, mask=source < 0)))
    null = ends[0].is_null()
    return pa.StructArray.from_arrays(ends, fields=list(schema.ROW_VERSIONS), mask=null)


def row_items(calls: Sessions, n_rows: int, shown: PathRanges) -> pa.Array:
    """The items that start in ranges of the rows, with their positions in the row."""
    items, call, start, stop = _entries(calls, "mm_items")
    keys = (call << 32) + start
    first = (shown.call << 32) + shown.first
    low, high = (np.searchsorted(keys, first + n) for n in (0, shown.length))
    taken = positions(low, high - low)
    of_range = np.repeat(np.arange(len(shown.row)), high - low)
    row = shown.row[of_range]
    moved = (shown.place - shown.first)[of_range]
    # ranges may overlap, where they have the same tokens
    _, one = np.unique((row << 32) + start[taken] + moved, return_index=True)
    taken, row, moved = taken[one], row[one], moved[one]
    fields = items.take(pa.array(taken)).flatten()
    for name, bound in (("start", start), ("stop", stop)):
        at = schema.MM_ITEM.get_field_index(name)
        fields[at] = pa.array((bound[taken] + moved).astype(np.int32))
    counts = np.bincount(row, minlength=n_rows)
    structs = pa.StructArray.from_arrays(fields, fields=list(schema.MM_ITEM))
    return Ragged(structs, offsets_of(counts)).to_arrow(counts == 0, _TYPES["mm_items"])


def payload_names(payloads: object) -> tuple[str, ...]:
    """The payload names that the caller gave: distinct, and no columns of rows."""
    names = chosen_names("payloads", payloads)
    for name in names:
        rule = "is named twice" if names.count(name) > 1 else ""
        if name in schema.ROWS.names:
            rule = "is the name of a column of rows"
        if rule:
            raise ArgumentError(f"payloads={payloads!r}: {name!r} {rule}")
    return names


def rows_schema(turns: pa.Schema, names: tuple[str, ...]) -> pa.Schema:
    """`trajkit.schema.ROWS` followed by one list column per payload."""
    more = [pa.field(name, pa.large_list(_element(turns, name))) for name in names]
    return pa.schema([*schema.ROWS, *more], metadata=schema.ROWS.metadata)


def _element(turns: pa.Schema, name: str) -> pa.DataType:
    """The type of a payload's elements."""
    at = turns.get_field_index(name)
    if at < 0 and name == WEIGHT_VERSION:
        return pa.string()
    if at < 0:
        known = {*schema.TURNS.names, *schema.TURNS_DELTA.names}
        others = [repr(other) for other in turns.names if other not in known]
        raise ArgumentError(
            f"payloads={name!r}: the turns have no such column, only "
            f"{', '.join(others) or 'those of every log'}"
        )
    type_ = turns.field(at).type
    if pa.types.is_null(type_):
        return type_
    if not is_list(type_):
        raise SchemaError(
            f"payload {name!r} is {type_}: expected a list with an element per token"
        )
    return type_.value_type


def _read(calls: Sessions, name: str) -> tuple[Ragged, Longs]:
    """The lists of a payload, and the length of each; -1: null."""
    element = _element(calls.table.schema, name)
    if pa.types.is_null(element):
        nothing = np.zeros(calls.n_calls + 1, np.int64)
        return Ragged(pa.nulls(0), nothing), np.full(calls.n_calls, -1)
    if name not in calls.table.column_names:
        # the weights that sampled each output token
        n = calls.calls["out_len"]
        call = np.repeat(np.arange(len(n)), n)
        names, version = _version_of(calls, call, positions(np.zeros_like(n), n))
        return Ragged(names.take(pa.array(version, mask=version < 0)), offsets_of(n)), n
    column = calls.table.column(name)
    lists = Ragged.of(column)
    return lists, np.where(column.is_valid(), lists.lengths, -1)


def with_payloads(
    batch: pa.RecordBatch,
    calls: Sessions,
    planned: Records,
    names: tuple[str, ...],
    ranges: Callable[[Records], PathRanges],
) -> pa.RecordBatch:
    """Add payload columns to rows; later ``ranges`` of recorded paths take precedence."""
    spans = Ragged.of(batch.column("spans"))
    start, stop, turn, first, _ = fields_of(spans.values, *SPAN_NUMBERS)
    call = calls.named(planned["session"][spans.owner], turn)
    first = calls.calls["prompt_len"][call] + first
    sampled = PathRanges(spans.owner, start, call, first, stop - start)
    known = (sampled, ranges(planned))
    columns = [_payload(calls, planned, name, known) for name in names]
    wanted = rows_schema(calls.table.schema, names)
    return pa.RecordBatch.from_arrays([*batch.columns, *columns], schema=wanted)


def _payload(
    calls: Sessions, planned: Records, name: str, known: tuple[PathRanges, ...]
) -> pa.LargeListArray:
    """The payload of every token of every row, null if unknown."""
    lists, length = _read(calls, name)
    # what each call's list covers of its path, and whether an earlier call has what is
    # before it
    first, partial = _places(calls, name, length)
    whole, forest = first + lists.lengths, calls.forest
    # of its last token, which no engine read, a call may have a placeholder
    covered = np.minimum(whole, calls.path_len - (name == "routed_experts"))
    offsets = offsets_of(planned["n_tokens"])
    at = np.full(int(offsets[-1]), -1)
    valid = np.asarray(lists.values.is_valid())

    def lay(run: PathRanges, covered: Longs) -> None:
        """Assign elements to tokens that have none; the last of several ranges counts."""
        low = np.maximum(run.first, first[run.call])
        high = np.minimum(run.first + run.length, covered[run.call])
        n = np.maximum(high - low, 0)
        places = positions(offsets[run.row] + run.place + low - run.first, n)
        sources = positions(lists.offsets[run.call] + low - first[run.call], n)
        new = valid[sources] & (at[places] < 0)
        at[places[new]] = sources[new]

    def before(run: PathRanges) -> PathRanges:
        """The parts of ranges that a payload leaves to an earlier call, in that call."""
        base = forest.shared_with[run.call].astype(np.int64)
        end = np.minimum(run.first + run.length, first[run.call])
        n = np.minimum(end, forest.shared[run.call]) - run.first
        which = partial[run.call] & (base >= 0) & (n > 0)
        parts = (run.row, run.place, base, run.first, n)
        return PathRanges(*(part[which] for part in parts))

    for reach in (covered, whole):
        for run in known:
            lay(run, reach)
        for run in known:
            while len((run := before(run)).row):
                lay(run, reach)
    taken = take_values(lists.values, pa.array(at, mask=at < 0), name)
    absent = np.full(len(planned), pa.types.is_null(lists.values.type))
    return Ragged(taken, offsets).to_arrow(absent)


def _places(calls: Sessions, name: str, length: Longs) -> tuple[Longs, Bools]:
    """The position of each list's first element, and whether elements come before it.

    A list without a start has an element per output id, or per prompt and output id. That
    of `trajkit.schema.PAYLOADS` with an element for all ids but the last begins with the
    first.
    """
    n_prompt, n_path = calls.calls["prompt_len"], calls.path_len
    n_output = calls.calls["out_len"]
    whole, of_output = length == n_path, length == n_output
    if name == "routed_experts":
        whole |= length == n_path - 1
    first = np.where(whole, 0, np.where(of_output, n_prompt, -1))
    given = np.zeros(len(first), np.bool_)
    column_name = name + _START
    if column_name in calls.table.column_names:
        column = calls.table.column(column_name)
        if not pa.types.is_integer(column.type) and not pa.types.is_null(column.type):
            raise SchemaError(f"{column_name} is {column.type}: expected integers")
        given = np.asarray(column.is_valid())
        starts = column.cast(pa.int64()).fill_null(0).to_numpy()
        bad = given & ((starts < 0) | (starts + length > n_path))
        for call in np.flatnonzero(bad)[:1].tolist():
            raise InvalidTurnsError(
                f"{calls.place(call)}: {column_name} is {starts[call]} and {name} has "
                f"{max(length[call], 0)} elements: they must fit into the "
                f"{n_path[call]} ids of prompt and output"
            )
        first = np.where(given, starts, first)
    for call in np.flatnonzero((length >= 0) & (first < 0))[:1].tolist():
        raise InvalidTurnsError(
            f"{calls.place(call)}: payload {name!r} has {length[call]} elements: "
            f"expected {n_output[call]} (output ids) or {n_path[call]} (prompt and output "
            "ids). For another range, give the position of its first element in the "
            f"column {column_name}: 0 for routed experts of all ids but the last"
        )
    return np.maximum(first, 0), given & (first > 0) & (length >= 0)


COUNTS = tuple(schema.REPORT.names[schema.REPORT.names.index("turns") :])
"""The columns of the report that the kernel counts, in its order."""
numbers("REPORT_", COUNTS)
numbers("SPAN_", schema.SPAN_KINDS[:-1])  # the last is of trajkit.rows.splice
numbers("LINE_", [field.name for field in schema.SPAN][:-1])

NO_LIMIT = np.iinfo(np.int64).max
"""Of a number that a policy does not limit."""
_TYPES = {field.name: field.type for field in schema.ROWS}


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
    counts = [
        pa.array(plan.counted(name)).cast(schema.REPORT.field(name).type)
        for name in COUNTS
    ]
    return pa.RecordBatch.from_arrays([*facts.columns, *counts], schema=schema.REPORT)


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
        kept = [pa.py_buffer(one) for one in (given, logprobs)]
        bits = [None, pa.py_buffer(mask)]
        values = {
            "input_ids": pa.array(ids),
            "loss_mask": pa.Array.from_buffers(
                pa.bool_(), n_tokens, bits, null_count=0
            ),
            "logprobs": pa.Array.from_buffers(pa.float32(), n_tokens, kept),
        }
        turns = pa.array(sessions.turn_index[calls])
        mine = scalars
        if n_rows < len(rows):
            mine = {name: column[lo:hi] for name, column in scalars.items()}
        columns = mine | {
            "turns": _lists("turns", offsets_of(part["n_calls"]), turns),
            "weight_versions": pa.nulls(n_rows, schema.ROW_VERSIONS),
            "mm_items": pa.nulls(n_rows, _TYPES["mm_items"]),
            "spans": _lists("spans", span_starts, _structs(spans, kinds)),
            **{name: _lists(name, starts, one) for name, one in values.items()},
        }
        if versions.null_count < len(versions):
            columns["weight_versions"] = row_versions(
                sessions, part, span_starts, spans
            )
        if items.null_count < len(items):
            columns["mm_items"] = row_items(sessions, n_rows, ranges(part))
        arrays = [columns[name] for name in schema.ROWS.names]
        yield part, pa.RecordBatch.from_arrays(arrays, schema=schema.ROWS)


def _lists(name: str, offsets: Longs, values: pa.Array) -> pa.Array:
    """A column of lists without null. Its buffers are not written to any more."""
    held, n = [None, pa.py_buffer(offsets)], len(offsets) - 1
    type_ = _TYPES[name]
    return pa.Array.from_buffers(type_, n, held, null_count=0, children=[values])


def _structs(spans: Ints, kinds: Array) -> pa.Array:
    names = dictionary_for(schema.SPAN_KINDS)
    fields = [*map(pa.array, spans)]
    fields.append(pa.DictionaryArray.from_arrays(pa.array(kinds), names, safe=False))
    n, none = len(kinds), [None]
    return pa.Array.from_buffers(schema.SPAN, n, none, null_count=0, children=fields)


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
            kinds, dictionary_for(schema.SEGMENT_KINDS)
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
    type_ = _TYPES["step"]
    if sessions.table.schema.get_field_index("step") < 0:
        return pa.nulls(n_rows, type_)
    column = combined(sessions.table.column("step"))
    if not pa.types.is_integer(column.type) and not pa.types.is_null(column.type):
        raise SchemaError(f"column 'step' of turns is {column.type}: expected integers")
    return of_last(column).cast(type_)
