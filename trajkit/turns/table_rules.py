"""The rules of the sessions, links, drift and rows tables (see `turns.turn_rules`)."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.canonical import Rows, Violation, violation
from trajkit.schema import (
    CAUSES,
    EMPTY_KINDS,
    LINK_REASONS,
    LOSSES,
    REGIONS,
    SPAN_KINDS,
    TEXT_CAUSES,
)
from trajkit.turns.turn_rules import (
    Bools,
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


def one_row_per_session(table: pa.Table) -> Iterator[Violation]:
    """Each session has one row."""
    names = table.column("session_id").combine_chunks()
    codes = names.dictionary_encode().indices.to_numpy()
    first = np.unique(codes, return_index=True)[1]
    again = np.setdiff1d(np.arange(len(codes)), first)
    yield violation(again, "the session has a row already")


def finite(name: str) -> Check:
    """The check that a column of float64 contains no NaN and no infinity."""

    def check(table: pa.Table) -> Iterator[Violation]:
        values = table.column(name).fill_null(0.0).to_numpy()
        rows = np.flatnonzero(~np.isfinite(values))
        yield violation(
            rows, f"{name} is {{}}: expected a finite number or null", values[rows]
        )

    return check


def not_negative(*names: str) -> Check:
    """The check that integer columns are null or at least 0."""

    def check(table: pa.Table) -> Iterator[Violation]:
        for name in names:
            values = table.column(name).fill_null(0).to_numpy()
            rows = np.flatnonzero(values < 0)
            yield violation(
                rows, f"{name} is {{}}: it must not be negative", values[rows]
            )

    return check


def one_of(name: str, known: tuple[str, ...]) -> Check:
    """The check that a column contains only known names and null."""

    def check(table: pa.Table) -> Iterator[Violation]:
        text = table.column(name).cast(pa.string())
        rows = np.flatnonzero(_unknown(text, known))
        yield violation(
            rows,
            f"{name} is {{!r}}: expected one of {', '.join(known)}",
            text.take(pa.array(rows)).to_pylist(),
        )

    return check


def _unknown(text: pa.Array | pa.ChunkedArray, known: tuple[str, ...]) -> Bools:
    unknown = pc.invert(pc.is_in(text, value_set=pa.array(known)))
    return np.asarray(pc.and_(unknown, text.is_valid()))


def earlier(name: str, index: str) -> Check:
    """The check that a reference is to an earlier index, or null."""

    def check(table: pa.Table) -> Iterator[Violation]:
        column = table.column(name)
        values = column.fill_null(-1).to_numpy()
        late = (values < 0) | (values >= table.column(index).to_numpy())
        rows = np.flatnonzero(late & ~nulls(column))
        yield violation(
            rows, f"{name} {{}} is not an earlier {index} of the session", values[rows]
        )

    return check


def another(name: str, index: str) -> Check:
    """The check that a reference is to another index, or null."""

    def check(table: pa.Table) -> Iterator[Violation]:
        column = table.column(name)
        values = column.fill_null(-1).to_numpy()
        same = (values < 0) | (values == table.column(index).to_numpy())
        rows = np.flatnonzero(same & ~nulls(column))
        yield violation(
            rows, f"{name} {{}} is not another {index} of the session", values[rows]
        )

    return check


def turns_exist(*names: str) -> Check:
    """The check that references are to turns of the session, or null."""

    def check(table: pa.Table) -> Iterator[Violation]:
        for name in names:
            column = table.column(name)
            found = lookup(table, "turn_index", column)[1]
            rows = np.flatnonzero(~found & ~nulls(column))
            values = column.fill_null(-1).to_numpy()
            yield violation(
                rows, f"{name} {{}} is not a turn of the session", values[rows]
            )

    return check


def parents_first(table: pa.Table) -> Iterator[Violation]:
    """The parent of a turn with an order has an order as well.

    In each session, parents precede their children, either by turn_index or by order.
    """
    order = table.column("order").fill_null(-1).to_numpy()
    at, found = lookup(table, "turn_index", table.column("parent"))
    followed = found & (order >= 0)
    before = np.where(followed, order[at], -1)
    session = np.searchsorted(run_starts(table), np.arange(len(table)), side="right")
    later = np.unique(session[followed & (at > np.arange(len(table)))])
    unordered = (before >= order) & np.isin(session, later)
    rows = np.flatnonzero(followed & ((before < 0) | unordered))
    yield violation(
        rows,
        "order {} does not come after its parent's, {}",
        order[rows],
        np.where(before[rows] < 0, "null", before[rows].astype(str)),
    )


def rewritten_later(table: pa.Table) -> Iterator[Violation]:
    """A turn is excluded from training by a later turn."""
    column = table.column("rewritten_by")
    values = column.fill_null(-1).to_numpy()
    late = values > table.column("turn_index").to_numpy()
    rows = np.flatnonzero(~nulls(column) & ~late)
    yield violation(
        rows, "rewritten_by {} is not a later turn of the session", values[rows]
    )


def orders_differ(table: pa.Table) -> Iterator[Violation]:
    """Ranks are unique in each session."""
    column = table.column("order")
    given = np.flatnonzero(~nulls(column))
    values = column.fill_null(0).to_numpy()
    session = np.searchsorted(run_starts(table), given, side="right") << 32
    first = np.unique(session + values[given], return_index=True)[1]
    again = np.delete(given, first)
    yield violation(again, "order {} is repeated within the session", values[again])


def drift_agrees(table: pa.Table) -> Iterator[Violation]:
    """The columns of a drift table agree."""
    size = table.column("size").to_numpy()
    tokens_after_drift = table.column("tokens_after_drift").to_numpy()
    rows = np.flatnonzero(tokens_after_drift > size)
    yield violation(
        rows,
        "tokens_after_drift {} exceeds the size {}",
        tokens_after_drift[rows],
        size[rows],
    )
    for name, word in (("region", "none"), ("cause", "clean")):
        text = table.column(name).cast(pa.string())
        equal = pc.equal(text, word).fill_null(False).to_numpy()
        rows = np.flatnonzero(~nulls(text) & (equal != (size == 0)))
        yield violation(
            rows,
            f"{name} is {{!r}} with a size of {{}}: expected {word!r} exactly for size 0",
            text.take(pa.array(rows)).to_pylist(),
            size[rows],
        )
    path, prompt, length = (
        nulls(table.column(f"resync_{name}")) for name in ("path", "prompt", "length")
    )
    rows = np.flatnonzero((path != prompt) | (path != length))
    yield violation(rows, "the three resync columns are null together")


def _per_token(table: pa.Table) -> tuple[str, str, str]:
    """The columns of ids, mask and logprobs, in either layout of rows."""
    if "suffix_ids" in table.column_names:
        return "suffix_ids", "suffix_mask", "suffix_logprobs"
    return "input_ids", "loss_mask", "logprobs"


def _stored(table: pa.Table) -> tuple[Rows, Rows]:
    """The start of each row's stored tokens in the row, and their number."""
    n_stored = lengths(table.column(_per_token(table)[0]))
    if "suffix_ids" not in table.column_names:
        return np.zeros_like(n_stored), n_stored
    return table.column("suffix_start").to_numpy().astype(np.int64), n_stored


def row_lengths(table: pa.Table) -> Iterator[Violation]:
    """Per-token columns have the row's length, and no length exceeds it."""
    first, n_stored = _stored(table)
    ids, *others = _per_token(table)
    for name in others:
        n_here = lengths(table.column(name))
        rows = np.flatnonzero(n_here != n_stored)
        yield violation(
            rows,
            f"{{}} elements of {name} for {{}} {ids}",
            n_here[rows],
            n_stored[rows],
        )
    shared = table.column("shared_length").to_numpy()
    rows = np.flatnonzero((first < 0) | (first > shared))
    yield violation(
        rows,
        "suffix_start is {}: expected 0 to {}, the shared_length",
        first[rows],
        shared[rows],
    )
    n_ids = first + n_stored
    for name in ("prompt_length", "shared_length"):
        values = table.column(name).to_numpy()
        rows = np.flatnonzero(values > n_ids)
        yield violation(
            rows, f"{name} is {{}} in a row of {{}} tokens", values[rows], n_ids[rows]
        )
    parent = table.column("parent_row")
    rows = np.flatnonzero(nulls(parent) & (shared > 0))
    yield violation(rows, "shared_length is {} without a parent_row", shared[rows])
    parent_at, found = lookup(table, "row_index", parent)
    rows = np.flatnonzero(found & (shared > n_ids[parent_at]))
    yield violation(
        rows,
        "shared_length is {}, but the parent row has {} tokens",
        shared[rows],
        n_ids[parent_at[rows]],
    )
    rows = np.flatnonzero((first > 0) & ~found)
    yield violation(
        rows,
        "parent_row {} is missing, which stores the first {} tokens",
        parent.fill_null(-1).to_numpy()[rows],
        first[rows],
    )


def mask_not_null(table: pa.Table) -> Iterator[Violation]:
    """Each element of the mask is true or false."""
    name = _per_token(table)[1]
    for start, ends, values in flat_chunks(table.column(name)):
        if values.null_count:
            rows, at = owners(np.flatnonzero(np.asarray(values.is_null())), ends)
            yield violation(start + rows, f"{name}[{{}}] is null", at)


def masks(table: pa.Table) -> Iterator[Violation]:
    """Prompt tokens are not trained, and only trained tokens have a logprob."""
    _, mask_name, logprobs_name = _per_token(table)
    mask = np.asarray(_values(table, mask_name))
    first, n_stored = _stored(table)
    ends = np.cumsum(n_stored)
    owner, offset = owners(np.flatnonzero(mask), ends)
    prompt = table.column("prompt_length").to_numpy()
    inside = np.flatnonzero(first[owner] + offset < prompt[owner])
    yield violation(
        owner[inside],
        f"{mask_name}[{{}}] is true within the prompt of {{}} tokens",
        offset[inside],
        prompt[owner[inside]],
    )
    given = np.asarray(_values(table, logprobs_name).is_valid())
    rows, at = owners(np.flatnonzero(given & ~mask), ends)
    yield violation(
        rows, f"{logprobs_name}[{{}}] is not null, but {mask_name} is false", at
    )
    n_trained = np.bincount(owner, minlength=len(table))
    sums = table.column("rollout_mask_sum").to_numpy()
    rows = np.flatnonzero(sums < n_trained)
    yield violation(
        rows,
        "rollout_mask_sum is {} in a row that trains {} tokens",
        sums[rows],
        n_trained[rows],
    )


def _values(table: pa.Table, name: str) -> pa.Array:
    """All values of a list column, concatenated."""
    type_ = table.schema.field(name).type.value_type
    chunks = [chunk.flatten() for chunk in table.column(name).chunks]
    return pa.concat_arrays([pa.array([], type_), *chunks])


_SPAN_NUMBERS = ("start", "stop", "turn_index", "output_start", "output_stop")


def spans_not_null(table: pa.Table) -> Iterator[Violation]:
    """Every span has all its fields."""
    for first, ends, spans in flat_chunks(table.column("spans")):
        broken = np.asarray(spans.is_null())
        for name in (*_SPAN_NUMBERS, "kind"):
            broken = broken | np.asarray(pc.struct_field(spans, name).is_null())
        rows, at = owners(np.flatnonzero(broken), ends)
        yield violation(first + rows, "spans[{}] has a null", at)


def spans(table: pa.Table) -> Iterator[Violation]:
    """Spans ascend within the row, and trained spans are where the mask is true."""
    first, n_stored = _stored(table)
    n_ids = first + n_stored
    kinds, columns = [], []
    for chunk in table.column("spans").chunks:
        spans = chunk.flatten()
        kinds.append(pc.struct_field(spans, "kind").cast(pa.string()))
        columns.append([pc.struct_field(spans, name) for name in _SPAN_NUMBERS])
    kind = np.asarray(pa.concat_arrays([pa.array([], pa.string()), *kinds]))
    start, stop, turn, out_start, out_stop = (
        np.asarray(pa.concat_arrays([pa.array([], pa.int32()), *parts]))
        for parts in (zip(*columns, strict=True) if columns else [[]] * 5)
    )
    row, at = owners(np.arange(len(kind)), np.cumsum(lengths(table.column("spans"))))
    before = np.concatenate([[0], stop[:-1]])[: len(stop)]
    before[at == 0] = 0
    inside = (start >= 0) & (stop >= start) & (stop <= n_ids[row])
    mask = np.asarray(_values(table, _per_token(table)[1]))
    trues = np.concatenate([[0], np.cumsum(mask)])
    base = np.cumsum(n_stored) - n_stored
    # tokens that are not stored are not trained
    low = np.where(inside, base[row] + np.maximum(start - first[row], 0), 0)
    high = np.where(inside, base[row] + np.maximum(stop - first[row], 0), 0)
    trained, empty = kind == "trained", np.isin(kind, EMPTY_KINDS)
    for bad, rule in (
        (~np.isin(kind, SPAN_KINDS), f"expected one of {', '.join(SPAN_KINDS)}"),
        (~inside, "it must lie within the row"),
        (start < before, "it must not overlap the previous span"),
        ((out_start < 0) | (out_stop < out_start), "its output range runs backwards"),
        (turn < 0, "its turn_index is negative"),
        (empty & (start != stop), "an absorbed, cut or no_splice_point span is empty"),
        (
            ~empty & (stop - start != out_stop - out_start),
            "it must be as long as its output range",
        ),
        (
            inside & (trues[high] - trues[low] != np.where(trained, stop - start, 0)),
            "loss_mask is true in trained spans, and only there",
        ),
    ):
        wrong = np.flatnonzero(bad)
        yield violation(
            row[wrong],
            f"spans[{{}}] is {{}}:{{}} of kind {{!r}}: {rule}",
            at[wrong],
            start[wrong],
            stop[wrong],
            kind[wrong],
        )
    claimed = np.bincount(row, np.where(trained, stop - start, 0), len(table))
    masked = trues[base + n_stored] - trues[base]
    rows = np.flatnonzero(claimed != masked)
    yield violation(
        rows,
        "loss_mask is true for {} tokens, but the trained spans have {:.0f}",
        masked[rows],
        claimed[rows],
    )


def weights(table: pa.Table) -> Iterator[Violation]:
    """A row's weight is in [0, 1]: its share of the rollout."""
    values = table.column("row_weight").fill_null(0.0).to_numpy()
    rows = np.flatnonzero((values < 0) | (values > 1))
    yield violation(
        rows, "row_weight is {}: it is a share of the rollout", values[rows]
    )


def every_token_counted(table: pa.Table) -> Iterator[Violation]:
    """Every sampled token is trained, or lost for one reason."""
    sampled = table.column("tokens_sampled").to_numpy()
    counted = table.column("tokens_trained").to_numpy().copy()
    for reason in LOSSES:
        counted += table.column(f"lost_{reason}").to_numpy()
    bad = np.flatnonzero(sampled != counted)
    yield violation(
        bad,
        "{} tokens sampled, but {} trained or lost",
        sampled[bad],
        counted[bad],
    )


SESSIONS: tuple[Check, ...] = (one_row_per_session, finite("reward"))
REPORT: tuple[Check, ...] = (*SESSIONS, every_token_counted)
LINKS: tuple[Check, ...] = (
    another("parent", "turn_index"),
    turns_exist("parent", "rewritten_by"),
    rewritten_later,
    one_of("link_reason", LINK_REASONS),
    not_negative("order"),
    orders_differ,
    parents_first,
)
DRIFT: tuple[Check, ...] = (
    another("parent", "turn_index"),
    not_negative(
        "lcp",
        "size",
        "tokens_after_drift",
        "resync_path",
        "resync_prompt",
        "resync_length",
    ),
    one_of("region", REGIONS),
    one_of("cause", (*CAUSES, *TEXT_CAUSES)),
    drift_agrees,
)
LAYOUT: tuple[Check, ...] = (
    not_negative("prompt_length", "shared_length", "rollout_mask_sum"),
    earlier("parent_row", "row_index"),
    row_lengths,
    mask_not_null,
)
"""What `pipeline.suffix_layout` requires of the rows that it converts."""

_ROWS: tuple[Check, ...] = (
    masks,
    spans_not_null,
    spans,
    finite("reward"),
    finite("row_weight"),
    weights,
)
ROWS: tuple[Check, ...] = (
    token_ids("input_ids"),
    *LAYOUT,
    logprobs("logprobs", "input_ids"),
    *_ROWS,
)
ROWS_SUFFIX: tuple[Check, ...] = (
    token_ids("suffix_ids"),
    *LAYOUT,
    logprobs("suffix_logprobs", "suffix_ids"),
    *_ROWS,
)
