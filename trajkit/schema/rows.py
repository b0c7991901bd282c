"""Rows: training sequences, what they do with outputs, and what is wrong with them."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from trajkit.schema import engine
from trajkit.schema.engine import TURN, Fault, columns, defined, struct, table
from trajkit.schema.sessions import LOSSES
from trajkit.schema.turns import MM_ITEM

SPAN_KINDS = defined("""What a row does with a range of a turn's output.

trained: The row trains it.
duplicate: The row contains it as context; another row trains it.
absorbed: The row lost it to drift; the span is empty.
cut: It is beyond ``max_row_tokens``; the span is empty.
untrainable: The row contains it as context, since it may not be trained (`LOSSES`:
    untrainable, aborted, masked, no_logprob).
no_splice_point: The row ended before it could continue with it; the span is empty.
""")

SPAN = struct("""
    start, stop, turn_index, output_start, output_stop int32?
    kind name?
""")
"""Row tokens ``start:stop`` are ``output_start:output_stop`` of the turn's output.

``trained``, ``duplicate`` and ``untrainable`` spans have ``stop - start == output_stop
- output_start``. ``absorbed``, ``cut`` and ``no_splice_point`` spans are empty (``start ==
stop``): the output range was lost. Their ``start`` is its position in the row, or the
position where the row was replaced or ended if that is smaller.
"""

EMPTY_KINDS = ("absorbed", "cut", "no_splice_point")
"""Kinds of spans whose tokens the row lost."""

ROW_VERSIONS = struct("    first, last text?")
"""The weights that sampled a row's first token and its last."""


def row_lengths(table: pa.Table) -> Iterator[Fault]:
    """Per-token columns have the row's length, and no length exceeds it."""
    n_ids = engine.lengths(table.column("input_ids"))
    for name in ("loss_mask", "logprobs"):
        n_here = engine.lengths(table.column(name))
        rule = f"{{}} elements of {name} for {{}} input_ids"
        yield engine.broken(n_here != n_ids, rule, n_here, n_ids)
    shared = table.column("shared_length").to_numpy()
    for name in ("prompt_length", "shared_length"):
        values = table.column(name).to_numpy()
        rule = f"{name} is {{}} in a row of {{}} tokens"
        yield engine.broken(values > n_ids, rule, values, n_ids)
    parent = table.column("parent_row")
    rule = "shared_length is {} without a parent_row"
    yield engine.broken(engine.nulls(parent) & (shared > 0), rule, shared)
    parent_at, found = engine.lookup(table, "row_index", parent)
    of_parent = np.where(found, n_ids[parent_at], 0)
    rule = "shared_length is {}, but the parent row has {} tokens"
    yield engine.broken(found & (shared > of_parent), rule, shared, of_parent)


def masks(table: pa.Table) -> Iterator[Fault]:
    """Prompt tokens are not trained, and only trained tokens have a logprob."""
    mask = np.asarray(engine.list_values(table.column("loss_mask")))
    ends = np.cumsum(engine.lengths(table.column("input_ids")))
    owner, offset = engine.owners(np.flatnonzero(mask), ends)
    prompt = table.column("prompt_length").to_numpy()[owner]
    bad = np.flatnonzero(offset < prompt)
    rule = "loss_mask[{}] is true within the prompt of {} tokens"
    yield engine.fault(owner[bad], rule, offset[bad], prompt[bad])
    given = np.asarray(engine.list_values(table.column("logprobs")).is_valid())
    rule = "logprobs[{}] is not null, but loss_mask is false"
    yield engine.broken_items(0, ends, given & ~mask, rule)
    n_trained = np.bincount(owner, minlength=len(table))
    sums = table.column("rollout_mask_sum").to_numpy()
    rule = "rollout_mask_sum is {} in a row that trains {} tokens"
    yield engine.broken(sums < n_trained, rule, sums, n_trained)


_SPAN_NUMBERS = ("start", "stop", "turn_index", "output_start", "output_stop")


def no_span_null(name: str, table: pa.Table) -> Iterator[Fault]:
    """Every span has all its fields."""
    for start, ends, spans in engine.flat_chunks(table.column(name)):
        lacking = engine.lacks(spans, *_SPAN_NUMBERS, "kind")
        yield engine.broken_items(start, ends, lacking, f"{name}[{{}}] has a null")


def spans_in_order(table: pa.Table) -> Iterator[Fault]:
    """Spans ascend within the row, and trained spans are where the mask is true."""
    n_ids = engine.lengths(table.column("input_ids"))
    listed = engine.list_values(table.column("spans"))
    kind = np.asarray(engine.field_of(listed, "kind").cast(pa.string()))
    start, stop, turn, out_start, out_stop = (
        np.asarray(engine.field_of(listed, name)) for name in _SPAN_NUMBERS
    )
    ends = np.cumsum(engine.lengths(table.column("spans")))
    row, at = engine.owners(np.arange(len(kind)), ends)
    before = np.append(0, stop)[: len(stop)]
    before[at == 0] = 0
    inside = (start >= 0) & (stop >= start) & (stop <= n_ids[row])
    mask = np.asarray(engine.list_values(table.column("loss_mask")))
    trues = np.append(0, np.cumsum(mask))
    base = np.cumsum(n_ids) - n_ids
    low = np.where(inside, base[row] + start, 0)
    high = np.where(inside, base[row] + stop, 0)
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
        yield engine.broken_items(0, ends, bad, rule, start, stop, kind)
    claimed = np.bincount(row, np.where(trained, stop - start, 0), len(table))
    masked = trues[base + n_ids] - trues[base]
    rule = "loss_mask is true for {} tokens, but the trained spans have {:.0f}"
    yield engine.broken(claimed != masked, rule, masked, claimed)


def is_share(name: str, table: pa.Table) -> Iterator[Fault]:
    """A row's weight is in [0, 1]: its share of the rollout."""
    values = table.column(name).fill_null(0.0).to_numpy()
    rule = f"{name} is {{}}: it is a share of the rollout"
    yield engine.broken((values < 0) | (values > 1), rule, values)


_ROWS = columns(
    """
    session_id text (contiguous)
    row_index int32 (ascending): counts the session's rows from 0, in the policy's order
    group_id text?
    input_ids [int32] (token_ids)
    prompt_length int32 (not_negative): the prompt of the call that opened the row
    loss_mask [bool] (no_null): true where this row trains the token
    logprobs [float32] (one_per_id): null outside the mask, and for tokens without a
        logprob
    spans [span] (no_span_null): ascending, never overlapping
    parent_row int32? (earlier): row_index of the earlier row of the session with the
        longest shared prefix, the first on ties. null: none shares a token
    shared_length int32 (not_negative): tokens shared with it; 0 without one
    reward float64? (finite): the session's reward. null: unscorable
    row_weight float64? (finite, is_share): this row's share of the rollout's trained
        tokens; null if the rollout trains none
    rollout_mask_sum int64 (not_negative): trained tokens of all rows of the session
    finish_reason text?
    truncated, use_tool, ill_formed bool?
    segment_kind name?: of its turns, as in LINKS
    last_turn int32?: the turn whose path the row is, or whose output ends the row. null:
        unknown
    turns [int32]?: the turns in the row, in order, up to last_turn, including turns with
        an empty output and turns lost to drift or truncation. null: unknown
    weight_versions versions?: the weights of the first and the last sampled token with
        known weights. null: none
    step int64?: the training step of the last turn, if turns have this column. null:
        unknown
    mm_items [image]?: its images, in order. An image that max_row_tokens cuts has its
        stop beyond the row. null: none
    """,
    span=SPAN,
    versions=ROW_VERSIONS,
    image=MM_ITEM,
    one_per_id=engine.logprobs("input_ids"),
    no_span_null=no_span_null,
    earlier=engine.refers("row_index", np.less, "an earlier row_index"),
    is_share=is_share,
)
ROWS = table("rows", *_ROWS, rules=(row_lengths, masks, spans_in_order))
"""One row per training sequence."""

OPENED_BY = ("no_parent", "drift", "branch")
"""Why a row begins at its first turn: it has no parent, its prompt drifts from its parent's
path, or another row continues its parent."""

ROW_REASONS = table(
    "row_reasons",
    *columns("""
    session_id text?: null: the rows do not name it
    row_index int32
    first_turn int32?: the turn that opens the row: the first that no earlier row
        contains. null: the rows do not name turns
    parent int32?: its parent. null: none
    opened_by text: one of OPENED_BY
    tokens_trained int64
    tokens_lost int64: tokens of its empty spans (EMPTY_KINDS)
    sentence text
    """),
)
"""Why each row begins where it does, one line per row (see `analysis.why`)."""

OUTPUT_KINDS = ("trained", *LOSSES)
"""What a policy does with a sampled token: it trains it, or loses it for a reason."""

OUTPUT_SPANS = table(
    "output_spans",
    *TURN,
    *columns("""
    output_start int32: tokens output_start:output_stop of the turn's output
    output_stop int32
    kind name: one of OUTPUT_KINDS
    row_index int32?: the row that trains them, lost them, or has them as context. null:
        no row does
    drift_turn int32?: the turn whose prompt caused the loss because it departs from an
        earlier path. null: none did
    """),
)
"""Each range of sampled tokens and what a policy does with it, in order of session, turn
and position (see `analysis.output_spans`). Every sampled token is in one line; a token that
several rows train is in one line per row."""

RULES = defined("""The rules that `trajkit.verify` checks.

session: The row's session has turns, and its rows are contiguous.
row_index: It counts the rows of the session from 0.
length: Mask and logprobs have the row's length, and no row exceeds ``max_row_tokens``.
null: Ids, mask and spans have no null.
span_turn, span_kind, span_place, span_range: A span names a turn of the session and a
    known kind, follows the previous span without overlap, and is as long as its range of
    the turn's output.
span_tokens: A span has the tokens of its output range.
untrainable: Tokens that may not be trained are in untrainable spans, and no others are.
mask: It is true exactly for trained spans. In rows without spans: for outputs that were
    located in the row.
logprob: The engine's value under the mask, null elsewhere.
context: The tokens before a trained token are those it was sampled after. For spliced
    rows see row_tokens.
trained_twice: No sampled token is trained or lost in two spans, or in two of a row if the
    policy trains a token in several.
not_trained: Every token that the policy promises to train is trained.
row_tokens: A row is the path of a turn (of ``last_turn``, if given), truncated at
    ``max_row_tokens``; in a spliced row, each output follows the end of its prompt.
prompt_length: The prompt length of the row's first turn.
parent_row, shared_length: The first earlier row with the longest shared prefix, and the
    prefix's length.
rollout_mask_sum, row_weight, reward, group_id: They follow from the complete rollout.
finish_reason: It follows from the row's calls.
turns: They end with ``last_turn`` and contain the turns of the row's spans in order.
weight_versions: Those of the row's first and last sampled token with known weights.
flags: They follow from the row's turns, or have at least theirs if the policy takes those
    of the chain.
mm_items: Each is an image of the session, its tokens are that image's content ids, and no
    other token is a content id.
policy: The rows are those that the policy makes of the turns: tokens, mask, spans, turns
    and flags. Checked in sessions that break no other rule.
""")

VIOLATIONS = table(
    "violations",
    *columns("""
    session_id text?
    row_index int32?: null: the violation concerns no single row
    turn_index int32?: null: it concerns no single turn
    token int32?: position of the first wrong token in the row or, without row_index, in
        the turn's output. null: the violation concerns the row as such
    rule name
    detail text: the values found and expected, and the number of tokens
    """),
)
"""One row per violation and contiguous range of tokens."""

ROW_CHECK_KINDS = defined("""What `trajkit.check_rows` says of rows.

trains: The row trains these tokens of the turn. Nothing is wrong.
mask_shifted: The mask is that of the tokens before or after the sampled ones.
not_sampled: Trained tokens that are no turn's output.
untrainable: Trained tokens of a turn, or of an output, that may not be trained.
trained_twice: Tokens that an earlier row trains too.
out_of_context: Trained tokens that follow other tokens than they were sampled after.
logprobs_shifted: The logprobs are those of the tokens before or after.
logprobs: Logprobs that are not the engine's.
masked_out: Sampled tokens that rows have and none trains.
in_no_row: Sampled tokens that no row has.
not_found: No turn begins like the row.
session_without_rows: Sessions of the turns that have no row. Nothing is wrong.
""")

ROW_CHECKS = table(
    "row_checks",
    *columns("""
    row int32?: the position of the row, from 0. null: the line is of no row
    session_id text?: null: the row was not found
    turn_index int32?: null: the line concerns no single turn
    token int32?: position in the row, padding included. null: of no token
    kind name: one of ROW_CHECK_KINDS
    tokens int64
    detail text
    """),
)
"""What rows train of what was sampled (see `trajkit.check_rows`)."""
