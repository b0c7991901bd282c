"""The rules of the sessions, links, drift and rows tables (see `trajkit.checks`)."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trajkit.checks import (
    Check,
    flat_chunks,
    lengths,
    logprobs,
    lookup,
    nulls,
    owners,
    run_starts,
    token_ids,
)
from trajkit.schema import CAUSES, REGIONS, SPAN_KINDS, WHY
from trajkit.tables import Violation


def one_row_per_session(table: pa.Table) -> Iterator[Violation]:
    names = table.column("session_id").combine_chunks()
    codes = names.dictionary_encode().indices.to_numpy()
    _, first = np.unique(codes, return_index=True)
    again = np.setdiff1d(np.arange(len(codes)), first)
    yield again, lambda k: "the session has a row already"


def finite(name: str) -> Check:
    """The check that a column of float64 holds no NaN and no infinity."""

    def check(table: pa.Table) -> Iterator[Violation]:
        values = table.column(name).fill_null(0.0).to_numpy()
        bad = np.flatnonzero(~np.isfinite(values))
        yield (
            bad,
            lambda k: f"{name} is {values[bad[k]]}: null says that there is none",
        )

    return check


def not_negative(*names: str) -> Check:
    """The check that integer columns are null or at least 0."""

    def check(table: pa.Table) -> Iterator[Violation]:
        for name in names:
            values = table.column(name).fill_null(0).to_numpy()
            bad = np.flatnonzero(values < 0)
            yield (
                bad,
                lambda k, name=name, values=values, bad=bad: (  # type: ignore[misc]
                    f"{name} is {values[bad[k]]}: it must not be negative"
                ),
            )

    return check


def one_of(name: str, known: tuple[str, ...]) -> Check:
    """The check that a column of names holds known ones and null."""

    def check(table: pa.Table) -> Iterator[Violation]:
        column = table.column(name)
        rows = np.flatnonzero(_unknown(column, known))
        yield (
            rows,
            lambda k: (
                f"{name} is {column[int(rows[k])].as_py()!r}: expected one of "
                f"{', '.join(known)}"
            ),
        )

    return check


def _unknown(
    column: pa.Array | pa.ChunkedArray, known: tuple[str, ...]
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    text = column.cast(pa.string())
    known_or_null = pc.or_(pc.is_in(text, value_set=pa.array(known)), text.is_null())
    return ~np.asarray(known_or_null)


def earlier(name: str, index: str) -> Check:
    """The check that a reference names an earlier row of the session, or is null."""

    def check(table: pa.Table) -> Iterator[Violation]:
        column = table.column(name)
        values = column.fill_null(-1).to_numpy()
        late = ~nulls(column) & (values >= table.column(index).to_numpy())
        rows = np.flatnonzero(late | (~nulls(column) & (values < 0)))
        yield (
            rows,
            lambda k: f"{name} {values[rows[k]]} is no earlier {index} of the session",
        )

    return check


def parents_exist(table: pa.Table) -> Iterator[Violation]:
    for name in ("parent", "demoted_by"):
        column = table.column(name)
        _, found = lookup(table, "turn_index", column)
        rows = np.flatnonzero(~found & ~nulls(column))
        values = column.fill_null(-1).to_numpy()
        yield (
            rows,
            lambda k, name=name, rows=rows, values=values: (  # type: ignore[misc]
                f"{name} {values[rows[k]]} is no turn of the session"
            ),
        )


def demoted_later(table: pa.Table) -> Iterator[Violation]:
    column = table.column("demoted_by")
    values = column.fill_null(-1).to_numpy()
    late = values > table.column("turn_index").to_numpy()
    rows = np.flatnonzero(~nulls(column) & ~late)
    yield (
        rows,
        lambda k: f"demoted_by {values[rows[k]]} is no later turn of the session",
    )


def orders_differ(table: pa.Table) -> Iterator[Violation]:
    column = table.column("order")
    given = np.flatnonzero(~nulls(column))
    values = column.fill_null(0).to_numpy()
    session = np.searchsorted(run_starts(table), given, side="right") << 32
    _, first = np.unique(session + values[given], return_index=True)
    again = np.delete(given, first)
    yield again, lambda k: f"order {values[again[k]]} is repeated within the session"


def drift_agrees(table: pa.Table) -> Iterator[Violation]:
    size = table.column("size").to_numpy()
    at_stake = table.column("at_stake").to_numpy()
    over = np.flatnonzero(at_stake > size)
    yield (
        over,
        lambda k: f"at_stake {at_stake[over[k]]} exceeds the size {size[over[k]]}",
    )
    for name, word in (("region", "none"), ("cause", "clean")):
        column = table.column(name)
        says = pc.equal(column.cast(pa.string()), word).fill_null(False).to_numpy()
        rows = np.flatnonzero(~nulls(column) & (says != (size == 0)))
        yield (
            rows,
            lambda k, name=name, word=word, rows=rows, column=column: (  # type: ignore[misc]
                f"{name} is {column[int(rows[k])].as_py()!r} at a size of "
                f"{size[rows[k]]}: {word!r} and 0 go together"
            ),
        )
    known = [
        ~nulls(table.column(name))
        for name in ("resync_held", "resync_prompt", "resync_length")
    ]
    torn = (known[0] != known[1]) | (known[0] != known[2])
    yield np.flatnonzero(torn), lambda k: "the three resync columns are null together"


def row_lengths(table: pa.Table) -> Iterator[Violation]:
    n_ids = lengths(table.column("input_ids"))
    for name in ("loss_mask", "logprobs"):
        n_here = lengths(table.column(name))
        rows = np.flatnonzero(n_here != n_ids)
        yield (
            rows,
            lambda k, name=name, n_here=n_here, rows=rows: (  # type: ignore[misc]
                f"{n_here[rows[k]]} elements of {name} for {n_ids[rows[k]]} input_ids"
            ),
        )
    for name in ("prompt_length", "shared_length"):
        values = table.column(name).to_numpy()
        rows = np.flatnonzero((values < 0) | (values > n_ids))
        yield (
            rows,
            lambda k, name=name, values=values, rows=rows: (  # type: ignore[misc]
                f"{name} is {values[rows[k]]} in a row of {n_ids[rows[k]]} tokens"
            ),
        )
    parent = table.column("parent_row")
    shared = table.column("shared_length").to_numpy()
    rows = np.flatnonzero(nulls(parent) & (shared > 0))
    yield rows, lambda k: f"shared_length is {shared[rows[k]]} without a parent_row"
    parent_at, found = lookup(table, "row_index", parent)
    over = np.flatnonzero(found & (shared > n_ids[parent_at]))
    yield (
        over,
        lambda k: (
            f"shared_length is {shared[over[k]]} where the parent row has "
            f"{n_ids[parent_at[over[k]]]} tokens"
        ),
    )


def masks(table: pa.Table) -> Iterator[Violation]:
    """No null in the mask, nothing trained in the prompt, no logprob off the mask."""
    for start, ends, values in flat_chunks(table.column("loss_mask")):
        if values.null_count:
            at = np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))
            rows, offsets = owners(at, ends)
            yield (
                rows + start,
                lambda k, offsets=offsets: f"loss_mask[{offsets[k]}] is null",  # type: ignore[misc]
            )
    if any(chunk.flatten().null_count for chunk in table.column("loss_mask").chunks):
        return
    mask = _whole(table, "loss_mask").to_numpy(zero_copy_only=False)
    ends = np.cumsum(lengths(table.column("input_ids")))
    trained = np.flatnonzero(mask)
    rows, offsets = owners(trained, ends)
    prompt = table.column("prompt_length").to_numpy()
    inside = np.flatnonzero(offsets < prompt[rows])
    yield (
        rows[inside],
        lambda k: (
            f"loss_mask[{offsets[inside[k]]}] is true within the prompt of "
            f"{prompt[rows[inside[k]]]} tokens"
        ),
    )
    given = _whole(table, "logprobs").is_valid().to_numpy(zero_copy_only=False)
    off_rows, off_places = owners(np.flatnonzero(given & ~mask), ends)
    yield (
        off_rows,
        lambda k: f"logprobs[{off_places[k]}] is given where loss_mask is false",
    )
    n_trained = np.bincount(rows, minlength=len(table))
    sums = table.column("rollout_mask_sum").to_numpy()
    few = np.flatnonzero(sums < n_trained)
    yield (
        few,
        lambda k: (
            f"rollout_mask_sum is {sums[few[k]]} in a row that trains "
            f"{n_trained[few[k]]} tokens"
        ),
    )


def _whole(table: pa.Table, name: str) -> pa.Array:
    """All values of a list column, end to end."""
    chunks = [chunk.flatten() for chunk in table.column(name).chunks]
    return pa.concat_arrays(chunks) if chunks else pa.array([], pa.bool_())


def spans(table: pa.Table) -> Iterator[Violation]:
    """Ascending pieces within the row, which train just what the mask says."""
    n_ids = lengths(table.column("input_ids"))
    pieces = _whole(table, "spans") if len(table) else None
    if pieces is None:
        return
    ends = np.cumsum(lengths(table.column("spans")))
    names = ("start", "stop", "turn_index", "output_start", "output_stop")
    broken = pieces.is_null()
    for name in (*names, "kind"):
        broken = pc.or_(broken, pc.struct_field(pieces, name).is_null())
    null_rows, null_places = owners(
        np.flatnonzero(broken.to_numpy(zero_copy_only=False)), ends
    )
    yield null_rows, lambda k: f"spans[{null_places[k]}] has a null"
    if len(null_rows):
        return
    start, stop, turn, out_start, out_stop = (
        pc.struct_field(pieces, name).to_numpy(zero_copy_only=False) for name in names
    )
    kind = np.asarray(pc.struct_field(pieces, "kind").cast(pa.string()))
    row, at = owners(np.arange(len(pieces)), ends)
    empty = np.isin(kind, ["absorbed", "cut"])
    before = np.concatenate([[0], stop[:-1]])
    before[at == 0] = 0
    mask = _whole(table, "loss_mask").to_numpy(zero_copy_only=False)
    base = np.cumsum(n_ids) - n_ids
    inside = (start >= 0) & (stop >= start) & (stop <= n_ids[row])
    trues = np.concatenate([[0], np.cumsum(mask)])
    low = np.where(inside, base[row] + start, 0)
    high = np.where(inside, base[row] + stop, 0)
    trained = kind == "trained"
    for bad, rule in (
        (_unknown(pc.struct_field(pieces, "kind"), SPAN_KINDS), "the kind is unknown"),
        (~inside, "it does not lie within the row"),
        (start < before, "it begins before the piece before it ends"),
        ((out_start < 0) | (out_stop < out_start), "its output range runs backwards"),
        (turn < 0, "its turn_index is negative"),
        (empty & (start != stop), "an absorbed or cut piece is empty"),
        (
            ~empty & (stop - start != out_stop - out_start),
            "it is as long as its output range",
        ),
        (
            trues[high] - trues[low] != np.where(trained, high - low, 0),
            "loss_mask is true just where a piece is trained",
        ),
    ):
        where = np.flatnonzero(bad)
        yield (
            row[where],
            lambda k, where=where, rule=rule: (  # type: ignore[misc]
                f"spans[{at[where[k]]}] is {start[where[k]]}:{stop[where[k]]} of kind "
                f"{kind[where[k]]!r}: {rule}"
            ),
        )
    claimed = np.bincount(row, np.where(trained, stop - start, 0), len(table))
    per_row = trues[base + n_ids] - trues[base]
    loose = np.flatnonzero(claimed != per_row)
    yield (
        loose,
        lambda k: (
            f"loss_mask is true for {per_row[loose[k]]} tokens, of which the trained "
            f"spans hold {int(claimed[loose[k]])}"
        ),
    )


def weights(table: pa.Table) -> Iterator[Violation]:
    values = table.column("row_weight").fill_null(0.0).to_numpy()
    bad = np.flatnonzero((values < 0) | (values > 1))
    yield bad, lambda k: f"row_weight is {values[bad[k]]}: it is a share of the rollout"


SESSIONS: tuple[Check, ...] = (one_row_per_session, finite("reward"))
LINKS: tuple[Check, ...] = (
    earlier("parent", "turn_index"),
    parents_exist,
    demoted_later,
    one_of("why", WHY),
    not_negative("order"),
    orders_differ,
)
DRIFT: tuple[Check, ...] = (
    earlier("parent", "turn_index"),
    not_negative(
        "lcp", "size", "at_stake", "resync_held", "resync_prompt", "resync_length"
    ),
    one_of("region", REGIONS),
    one_of("cause", CAUSES),
    drift_agrees,
)
ROWS: tuple[Check, ...] = (
    token_ids("input_ids"),
    not_negative("prompt_length", "shared_length", "rollout_mask_sum"),
    earlier("parent_row", "row_index"),
    row_lengths,
    masks,
    logprobs("logprobs", "input_ids"),
    spans,
    finite("reward"),
    finite("row_weight"),
    weights,
)
