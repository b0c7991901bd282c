"""The rules of the sessions, links, drift and rows tables (see `trajkit.checks`)."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trajkit.checks import (
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
from trajkit.schema import (
    CAUSES,
    EMPTY_KINDS,
    LOSSES,
    REGIONS,
    SPAN_KINDS,
    TEXT_CAUSES,
    WHY,
)
from trajkit.tables import Violation, violation


def one_row_per_session(table: pa.Table) -> Iterator[Violation]:
    """No session twice."""
    names = table.column("session_id").combine_chunks()
    codes = names.dictionary_encode().indices.to_numpy()
    first = np.unique(codes, return_index=True)[1]
    again = np.setdiff1d(np.arange(len(codes)), first)
    yield violation(again, "the session has a row already")


def finite(name: str) -> Check:
    """The check that a column of float64 holds no NaN and no infinity."""

    def check(table: pa.Table) -> Iterator[Violation]:
        values = table.column(name).fill_null(0.0).to_numpy()
        rows = np.flatnonzero(~np.isfinite(values))
        yield violation(
            rows, f"{name} is {{}}: null says that there is none", values[rows]
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
    """The check that a column of names holds known ones and null."""

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
            rows, f"{name} {{}} is no earlier {index} of the session", values[rows]
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
                rows, f"{name} {{}} is no turn of the session", values[rows]
            )

    return check


def demoted_later(table: pa.Table) -> Iterator[Violation]:
    """A turn is taken out of training by a later one."""
    column = table.column("demoted_by")
    values = column.fill_null(-1).to_numpy()
    late = values > table.column("turn_index").to_numpy()
    rows = np.flatnonzero(~nulls(column) & ~late)
    yield violation(rows, "demoted_by {} is no later turn of the session", values[rows])


def orders_differ(table: pa.Table) -> Iterator[Violation]:
    """No two turns of a session have one rank."""
    column = table.column("order")
    given = np.flatnonzero(~nulls(column))
    values = column.fill_null(0).to_numpy()
    session = np.searchsorted(run_starts(table), given, side="right") << 32
    first = np.unique(session + values[given], return_index=True)[1]
    again = np.delete(given, first)
    yield violation(again, "order {} is repeated within the session", values[again])


def drift_agrees(table: pa.Table) -> Iterator[Violation]:
    """The columns of a drift table say the same."""
    size = table.column("size").to_numpy()
    at_stake = table.column("at_stake").to_numpy()
    rows = np.flatnonzero(at_stake > size)
    yield violation(rows, "at_stake {} exceeds the size {}", at_stake[rows], size[rows])
    for name, word in (("region", "none"), ("cause", "clean")):
        text = table.column(name).cast(pa.string())
        says = pc.equal(text, word).fill_null(False).to_numpy()
        rows = np.flatnonzero(~nulls(text) & (says != (size == 0)))
        yield violation(
            rows,
            f"{name} is {{!r}} at a size of {{}}: {word!r} and 0 go together",
            text.take(pa.array(rows)).to_pylist(),
            size[rows],
        )
    held, prompt, length = (
        nulls(table.column(f"resync_{name}")) for name in ("held", "prompt", "length")
    )
    rows = np.flatnonzero((held != prompt) | (held != length))
    yield violation(rows, "the three resync columns are null together")


def row_lengths(table: pa.Table) -> Iterator[Violation]:
    """Per-token columns are as long as the row, and no length goes beyond it."""
    n_ids = lengths(table.column("input_ids"))
    for name in ("loss_mask", "logprobs"):
        n_here = lengths(table.column(name))
        rows = np.flatnonzero(n_here != n_ids)
        yield violation(
            rows,
            f"{{}} elements of {name} for {{}} input_ids",
            n_here[rows],
            n_ids[rows],
        )
    for name in ("prompt_length", "shared_length"):
        values = table.column(name).to_numpy()
        rows = np.flatnonzero(values > n_ids)
        yield violation(
            rows, f"{name} is {{}} in a row of {{}} tokens", values[rows], n_ids[rows]
        )
    shared, parent = (
        table.column("shared_length").to_numpy(),
        table.column("parent_row"),
    )
    rows = np.flatnonzero(nulls(parent) & (shared > 0))
    yield violation(rows, "shared_length is {} without a parent_row", shared[rows])
    parent_at, found = lookup(table, "row_index", parent)
    rows = np.flatnonzero(found & (shared > n_ids[parent_at]))
    yield violation(
        rows,
        "shared_length is {} where the parent row has {} tokens",
        shared[rows],
        n_ids[parent_at[rows]],
    )


def mask_not_null(table: pa.Table) -> Iterator[Violation]:
    """Each element of the mask is true or false."""
    for start, ends, values in flat_chunks(table.column("loss_mask")):
        rows, at = owners(np.flatnonzero(np.asarray(values.is_null())), ends)
        yield violation(start + rows, "loss_mask[{}] is null", at)


def masks(table: pa.Table) -> Iterator[Violation]:
    """Nothing is trained in the prompt, and no logprob stands off the mask."""
    mask = np.asarray(_whole(table, "loss_mask"))
    ends = np.cumsum(lengths(table.column("input_ids")))
    owner, offset = owners(np.flatnonzero(mask), ends)
    prompt = table.column("prompt_length").to_numpy()
    inside = np.flatnonzero(offset < prompt[owner])
    yield violation(
        owner[inside],
        "loss_mask[{}] is true within the prompt of {} tokens",
        offset[inside],
        prompt[owner[inside]],
    )
    given = np.asarray(_whole(table, "logprobs").is_valid())
    rows, at = owners(np.flatnonzero(given & ~mask), ends)
    yield violation(rows, "logprobs[{}] is given where loss_mask is false", at)
    n_trained = np.bincount(owner, minlength=len(table))
    sums = table.column("rollout_mask_sum").to_numpy()
    rows = np.flatnonzero(sums < n_trained)
    yield violation(
        rows,
        "rollout_mask_sum is {} in a row that trains {} tokens",
        sums[rows],
        n_trained[rows],
    )


def _whole(table: pa.Table, name: str) -> pa.Array:
    """All values of a list column, end to end."""
    type_ = table.schema.field(name).type.value_type
    chunks = [chunk.flatten() for chunk in table.column(name).chunks]
    return pa.concat_arrays([pa.array([], type_), *chunks])


_SPAN_NUMBERS = ("start", "stop", "turn_index", "output_start", "output_stop")


def spans_not_null(table: pa.Table) -> Iterator[Violation]:
    """Every piece has its place and kind."""
    for first, ends, pieces in flat_chunks(table.column("spans")):
        broken = np.asarray(pieces.is_null())
        for name in (*_SPAN_NUMBERS, "kind"):
            broken = broken | np.asarray(pc.struct_field(pieces, name).is_null())
        rows, at = owners(np.flatnonzero(broken), ends)
        yield violation(first + rows, "spans[{}] has a null", at)


def spans(table: pa.Table) -> Iterator[Violation]:
    """Ascending pieces within the row, which train just what the mask says."""
    n_ids = lengths(table.column("input_ids"))
    kinds, columns = [], []
    for chunk in table.column("spans").chunks:
        pieces = chunk.flatten()
        kinds.append(pc.struct_field(pieces, "kind").cast(pa.string()))
        columns.append([pc.struct_field(pieces, name) for name in _SPAN_NUMBERS])
    kind = np.asarray(pa.concat_arrays([pa.array([], pa.string()), *kinds]))
    start, stop, turn, out_start, out_stop = (
        np.asarray(pa.concat_arrays([pa.array([], pa.int32()), *parts]))
        for parts in (zip(*columns, strict=True) if columns else [[]] * 5)
    )
    row, at = owners(np.arange(len(kind)), np.cumsum(lengths(table.column("spans"))))
    before = np.concatenate([[0], stop[:-1]])[: len(stop)]
    before[at == 0] = 0
    inside = (start >= 0) & (stop >= start) & (stop <= n_ids[row])
    mask = np.asarray(_whole(table, "loss_mask"))
    trues = np.concatenate([[0], np.cumsum(mask)])
    base = np.cumsum(n_ids) - n_ids
    low = np.where(inside, base[row] + start, 0)
    high = np.where(inside, base[row] + stop, 0)
    trained, empty = kind == "trained", np.isin(kind, EMPTY_KINDS)
    for bad, rule in (
        (~np.isin(kind, SPAN_KINDS), f"expected one of {', '.join(SPAN_KINDS)}"),
        (~inside, "it must lie within the row"),
        (start < before, "it must not begin before the piece before it ends"),
        ((out_start < 0) | (out_stop < out_start), "its output range runs backwards"),
        (turn < 0, "its turn_index is negative"),
        (empty & (start != stop), "an absorbed, cut or unspliced piece is empty"),
        (
            ~empty & (stop - start != out_stop - out_start),
            "it must be as long as its output range",
        ),
        (
            trues[high] - trues[low] != np.where(trained, high - low, 0),
            "loss_mask is true where a piece is trained, and only there",
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
    masked = trues[base + n_ids] - trues[base]
    rows = np.flatnonzero(claimed != masked)
    yield violation(
        rows,
        "loss_mask is true for {} tokens, of which the trained spans hold {:.0f}",
        masked[rows],
        claimed[rows],
    )


def weights(table: pa.Table) -> Iterator[Violation]:
    """A row's weight is a share of its rollout."""
    values = table.column("row_weight").fill_null(0.0).to_numpy()
    rows = np.flatnonzero((values < 0) | (values > 1))
    yield violation(
        rows, "row_weight is {}: it is a share of the rollout", values[rows]
    )


def every_token_counted(table: pa.Table) -> Iterator[Violation]:
    """What was sampled is trained, or lost for one reason."""
    sampled = table.column("tokens_sampled").to_numpy()
    counted = table.column("tokens_trained").to_numpy().copy()
    for reason in LOSSES:
        counted += table.column(f"lost_{reason}").to_numpy()
    bad = np.flatnonzero(sampled != counted)
    yield violation(
        bad,
        "{} tokens sampled, but trained and lost are {}",
        sampled[bad],
        counted[bad],
    )


SESSIONS: tuple[Check, ...] = (one_row_per_session, finite("reward"))
REPORT: tuple[Check, ...] = (*SESSIONS, every_token_counted)
LINKS: tuple[Check, ...] = (
    earlier("parent", "turn_index"),
    turns_exist("parent", "demoted_by"),
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
    one_of("cause", (*CAUSES, *TEXT_CAUSES)),
    drift_agrees,
)
ROWS: tuple[Check, ...] = (
    token_ids("input_ids"),
    not_negative("prompt_length", "shared_length", "rollout_mask_sum"),
    earlier("parent_row", "row_index"),
    row_lengths,
    mask_not_null,
    masks,
    logprobs("logprobs", "input_ids"),
    spans_not_null,
    spans,
    finite("reward"),
    finite("row_weight"),
    weights,
)
