"""The rules of the sessions, links, drift and rows tables (see `turns.turn_rules`)."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pyarrow as pa

from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.canonical import Rows, Violation, violation
from trajkit._arrow.ragged import lengths
from trajkit._arrow.take import list_values
from trajkit.schema import (
    CAUSES,
    EMPTY_KINDS,
    LINK_REASONS,
    LOSSES,
    REGIONS,
    SPAN_KINDS,
    TEXT_CAUSES,
)
from trajkit.turns.sessions import run_starts
from trajkit.turns.turn_rules import (
    Bools,
    Check,
    broken,
    broken_items,
    flat_chunks,
    lacks,
    logprobs,
    lookup,
    mm_items,
    no_null,
    nulls,
    owners,
    token_ids,
)


def one_row_per_session(table: pa.Table) -> Iterator[Violation]:
    """Each session has one row."""
    names = table.column("session_id").combine_chunks()
    yield broken(
        _repeated(names.dictionary_encode().indices.to_numpy()),
        "the session has a row already",
    )


def _repeated(values: Rows) -> Bools:
    """Where a value occurred before."""
    again = np.ones(len(values), np.bool_)
    again[np.unique(values, return_index=True)[1]] = False
    return again


def finite(name: str, table: pa.Table) -> Iterator[Violation]:
    """A column of float64 contains no NaN and no infinity."""
    values = table.column(name).fill_null(0.0).to_numpy()
    rule = f"{name} is {{}}: expected a finite number or null"
    yield broken(~np.isfinite(values), rule, values)


def not_negative(names: tuple[str, ...], table: pa.Table) -> Iterator[Violation]:
    """Integer columns are null or at least 0."""
    for name in names:
        values = table.column(name).fill_null(0).to_numpy()
        yield broken(values < 0, f"{name} is {{}}: it must not be negative", values)


def one_of(name: str, known: tuple[str, ...], table: pa.Table) -> Iterator[Violation]:
    """A column contains only known names and null."""
    text = table.column(name).cast(pa.string())
    unknown = pc.and_(
        pc.invert(pc.is_in(text, value_set=pa.array(known))), text.is_valid()
    )
    rule = f"{name} is {{!r}}: expected one of {', '.join(known)}"
    yield broken(unknown, rule, text)


def refers(
    name: str,
    index: str,
    fits: Callable[[Rows, Rows], Bools],
    what: str,
    table: pa.Table,
) -> Iterator[Violation]:
    """A reference is null, or an index that fits the row's own."""
    column = table.column(name)
    values = column.fill_null(-1).to_numpy()
    good = (values >= 0) & fits(values, table.column(index).to_numpy())
    rule = f"{name} {{}} is not {what} of the session"
    yield broken(~good & ~nulls(column), rule, values)


def turns_exist(names: tuple[str, ...], table: pa.Table) -> Iterator[Violation]:
    """References are to turns of the session, or null."""
    for name in names:
        column = table.column(name)
        found = lookup(table, "turn_index", column)[1]
        rule = f"{name} {{}} is not a turn of the session"
        yield broken(~found & ~nulls(column), rule, column)


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
    rule = "order {}, but its parent has no order, so it is in no row"
    yield broken(followed & (before < 0), rule, order)
    yield broken(
        followed & (before >= order) & np.isin(session, later),
        "order {} does not come after its parent's, {}, in a session with a parent that "
        "is a later turn",
        order,
        before,
    )


def orders_differ(table: pa.Table) -> Iterator[Violation]:
    """Ranks are unique in each session."""
    column = table.column("order")
    session = np.searchsorted(run_starts(table), np.arange(len(table)), side="right")
    values = (session << 32) + column.fill_null(0).to_numpy()
    again = ~nulls(column)
    again[again] = _repeated(values[again])
    yield broken(again, "order {} is repeated within the session", column)


def drift_agrees(table: pa.Table) -> Iterator[Violation]:
    """The columns of a drift table agree."""
    size = table.column("size").to_numpy()
    after = table.column("tokens_after_drift").to_numpy()
    rule = "tokens_after_drift {} exceeds the size {}"
    yield broken(after > size, rule, after, size)
    for name, word in (("region", "none"), ("cause", "clean")):
        text = table.column(name).cast(pa.string())
        equal = pc.equal(text, word).fill_null(False).to_numpy()
        rule = f"{name} is {{!r}} with a size of {{}}: expected {word!r} exactly for size 0"
        yield broken(~nulls(text) & (equal != (size == 0)), rule, text, size)
    path, prompt, length = (
        nulls(table.column(f"resync_{name}")) for name in ("path", "prompt", "length")
    )
    rule = "the three resync columns are null together"
    yield broken((path != prompt) | (path != length), rule)


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
        rule = f"{{}} elements of {name} for {{}} {ids}"
        yield broken(n_here != n_stored, rule, n_here, n_stored)
    shared = table.column("shared_length").to_numpy()
    rule = "suffix_start is {}: expected 0 to {}, the shared_length"
    yield broken((first < 0) | (first > shared), rule, first, shared)
    n_ids = first + n_stored
    for name in ("prompt_length", "shared_length"):
        values = table.column(name).to_numpy()
        rule = f"{name} is {{}} in a row of {{}} tokens"
        yield broken(values > n_ids, rule, values, n_ids)
    parent = table.column("parent_row")
    rule = "shared_length is {} without a parent_row"
    yield broken(nulls(parent) & (shared > 0), rule, shared)
    parent_at, found = lookup(table, "row_index", parent)
    of_parent = np.where(found, n_ids[parent_at], 0)
    rule = "shared_length is {}, but the parent row has {} tokens"
    yield broken(found & (shared > of_parent), rule, shared, of_parent)
    rule = "parent_row {} is missing, which stores the first {} tokens"
    yield broken((first > 0) & ~found, rule, parent.fill_null(-1).to_numpy(), first)


def mask_not_null(table: pa.Table) -> Iterator[Violation]:
    """Each element of the mask is true or false."""
    return no_null(_per_token(table)[1], table)


def masks(table: pa.Table) -> Iterator[Violation]:
    """Prompt tokens are not trained, and only trained tokens have a logprob."""
    _, mask_name, logprobs_name = _per_token(table)
    mask = np.asarray(list_values(table.column(mask_name)))
    first, n_stored = _stored(table)
    ends = np.cumsum(n_stored)
    owner, offset = owners(np.flatnonzero(mask), ends)
    prompt = table.column("prompt_length").to_numpy()[owner]
    bad = np.flatnonzero(first[owner] + offset < prompt)
    rule = f"{mask_name}[{{}}] is true within the prompt of {{}} tokens"
    yield violation(owner[bad], rule, offset[bad], prompt[bad])
    given = np.asarray(list_values(table.column(logprobs_name)).is_valid())
    rule = f"{logprobs_name}[{{}}] is not null, but {mask_name} is false"
    yield broken_items(0, ends, given & ~mask, rule)
    n_trained = np.bincount(owner, minlength=len(table))
    sums = table.column("rollout_mask_sum").to_numpy()
    rule = "rollout_mask_sum is {} in a row that trains {} tokens"
    yield broken(sums < n_trained, rule, sums, n_trained)


_SPAN_NUMBERS = ("start", "stop", "turn_index", "output_start", "output_stop")


def spans_not_null(table: pa.Table) -> Iterator[Violation]:
    """Every span has all its fields."""
    for start, ends, spans in flat_chunks(table.column("spans")):
        lacking = lacks(spans, *_SPAN_NUMBERS, "kind")
        yield broken_items(start, ends, lacking, "spans[{}] has a null")


def spans(table: pa.Table) -> Iterator[Violation]:
    """Spans ascend within the row, and trained spans are where the mask is true."""
    first, n_stored = _stored(table)
    n_ids = first + n_stored
    listed = list_values(table.column("spans"))
    kind = np.asarray(pc.struct_field(listed, "kind").cast(pa.string()))
    start, stop, turn, out_start, out_stop = (
        np.asarray(pc.struct_field(listed, name)) for name in _SPAN_NUMBERS
    )
    ends = np.cumsum(lengths(table.column("spans")))
    row, at = owners(np.arange(len(kind)), ends)
    before = np.append(0, stop)[: len(stop)]
    before[at == 0] = 0
    inside = (start >= 0) & (stop >= start) & (stop <= n_ids[row])
    mask = np.asarray(list_values(table.column(_per_token(table)[1])))
    trues = np.append(0, np.cumsum(mask))
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
        rule = f"spans[{{}}] is {{}}:{{}} of kind {{!r}}: {rule}"
        yield broken_items(0, ends, bad, rule, start, stop, kind)
    claimed = np.bincount(row, np.where(trained, stop - start, 0), len(table))
    masked = trues[base + n_stored] - trues[base]
    rule = "loss_mask is true for {} tokens, but the trained spans have {:.0f}"
    yield broken(claimed != masked, rule, masked, claimed)


def weights(table: pa.Table) -> Iterator[Violation]:
    """A row's weight is in [0, 1]: its share of the rollout."""
    values = table.column("row_weight").fill_null(0.0).to_numpy()
    rule = "row_weight is {}: it is a share of the rollout"
    yield broken((values < 0) | (values > 1), rule, values)


def every_token_counted(table: pa.Table) -> Iterator[Violation]:
    """Every sampled token is trained, or lost for one reason."""
    sampled = table.column("tokens_sampled").to_numpy()
    counted = table.column("tokens_trained").to_numpy().copy()
    for reason in LOSSES:
        counted += table.column(f"lost_{reason}").to_numpy()
    rule = "{} tokens sampled, but {} trained or lost"
    yield broken(sampled != counted, rule, sampled, counted)


SESSIONS: tuple[Check, ...] = (one_row_per_session, partial(finite, "reward"))
REPORT: tuple[Check, ...] = (*SESSIONS, every_token_counted)
LINKS: tuple[Check, ...] = (
    partial(refers, "parent", "turn_index", np.not_equal, "another turn_index"),
    partial(turns_exist, ("parent", "rewritten_by")),
    partial(refers, "rewritten_by", "turn_index", np.greater, "a later turn"),
    partial(one_of, "link_reason", LINK_REASONS),
    partial(not_negative, ("order",)),
    orders_differ,
    parents_first,
)
DRIFT: tuple[Check, ...] = (
    partial(refers, "parent", "turn_index", np.not_equal, "another turn_index"),
    partial(
        not_negative,
        (
            "lcp",
            "size",
            "tokens_after_drift",
            "resync_path",
            "resync_prompt",
            "resync_length",
        ),
    ),
    partial(one_of, "region", REGIONS),
    partial(one_of, "cause", (*CAUSES, *TEXT_CAUSES)),
    drift_agrees,
)
LAYOUT: tuple[Check, ...] = (
    partial(not_negative, ("prompt_length", "shared_length", "rollout_mask_sum")),
    partial(refers, "parent_row", "row_index", np.less, "an earlier row_index"),
    row_lengths,
    mask_not_null,
    mm_items,
)
"""What conversions of the layout and packs require of rows."""

_ROWS: tuple[Check, ...] = (
    masks,
    spans_not_null,
    spans,
    partial(finite, "reward"),
    partial(finite, "row_weight"),
    weights,
)
ROWS: tuple[Check, ...] = (
    partial(token_ids, "input_ids"),
    *LAYOUT,
    partial(logprobs, "logprobs", "input_ids"),
    *_ROWS,
)
ROWS_SUFFIX: tuple[Check, ...] = (
    partial(token_ids, "suffix_ids"),
    *LAYOUT,
    partial(logprobs, "suffix_logprobs", "suffix_ids"),
    *_ROWS,
)
