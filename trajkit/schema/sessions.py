"""Sessions: their metadata, rewards, and counts per session or policy."""

from collections.abc import Iterator

import pyarrow as pa

from trajkit.schema import engine
from trajkit.schema.engine import TURN, Fault, columns, defined, required, table

_SESSIONS = columns("""
    session_id text (one_row_per_session)
    reward float64? (finite): null: unscorable, never 0
    group_id text?: the task that several rollouts share
    error text?: null: the rollout ended without an error
""")
SESSIONS = table("sessions", *_SESSIONS)
"""Metadata of sessions that the caller knows, one row per session."""

TURN_REWARDS = table(
    "turn_rewards",
    *TURN,
    *columns("    reward float64?: null: unscorable, never 0"),
)
"""A reward per turn, as `trajkit.learn.spread_rewards` takes it."""

LOSSES = defined("""Reasons why no row trains a sampled token.

absorbed: Its row continued after drift with the next prompt's ids in its place.
rewritten: A later request showed another message in its place, and the turn left the
    tree.
cut: It is beyond ``max_row_tokens`` of its row.
untrainable: The turn has ``trainable = false``, or its session ended in an error.
unrouted: The turn has an empty list of messages, which message routing skips (unless
    ``tie_break="tokens"``, as in ``faithful``).
restarted: A later prompt of the row departs inside the prompt that opened the row. The
    row restarts there and loses what it had.
over_max_rows: Its row exceeds the policy's ``max_rows``.
aborted: The turn's finish_reason is ``abort``, and the policy does not train such turns.
masked: The turn's ``output_mask`` is false for it.
no_logprob: It has no logprob, and the policy trains no token without one.
no_splice_point: The prompt of its turn, or of an earlier turn in the chain, has no end of
    turn at which a spliced row could continue; the row ended there.
quarantined: Every chain with its turn contains a quarantined turn (see `LINK_REASONS`).
not_selected: It is only in chains that the policy's ``row_selection`` omits.
refused: Its messages continue a turn whose tokens its prompt does not continue (see
    `LINK_REASONS`).
retried: Nothing continues its turn, and a later turn has the same parent.

A token that may not be trained at all counts as untrainable, aborted, masked or
no_logprob, in this order, before any other reason.
""")


_LOST = [required(f"lost_{reason}", pa.int64()) for reason in LOSSES]


def every_token_counted(table: pa.Table) -> Iterator[Fault]:
    """Every sampled token is trained, or lost for one reason."""
    sampled = table.column("tokens_sampled").to_numpy()
    counted = table.column("tokens_trained").to_numpy().copy()
    for reason in LOSSES:
        counted += table.column(f"lost_{reason}").to_numpy()
    rule = "{} tokens sampled, but {} trained or lost"
    yield engine.broken(sampled != counted, rule, sampled, counted)


REPORT = table(
    "report",
    *_SESSIONS,
    *columns("""
    turns, rows int32
    rows_untrained int32: rows omitted because nothing in them was trained, or they had no
        response
    rows_cut int32: rows omitted because max_row_tokens left no response token
    rows_over_max_rows int32: rows omitted because the policy's max_rows was reached
    tokens_sampled int64: tokens that the model sampled; equals trained plus all lost_*
    tokens_trained int64: sampled tokens under the loss mask of some row, each counted
        once
    tokens_duplicated int64: occurrences of sampled tokens in additional rows, as context
        or trained again
    tokens_forward int64: tokens of all rows, which a forward pass computes
    tokens_forward_shared int64: the same with each shared prefix counted once
    """),
    *_LOST,
    *columns("""
    rows_no_splice_point int32: rows that ended before their chain did (see LOSSES),
        omitted rows included
    turns_no_splice_point int32: turns that are in no row for that reason, also those with
        nothing to train
    turns_by_tokens int32: turns without messages, linked by tokens although the policy
        links by messages
    roots int32: turns without a parent, except unrouted and empty ones (LINK_REASONS)
    turns_quarantined int32: turns that parent_by="prefix" quarantined (see LINK_REASONS)
    turns_unresolved int32: retries of prompts for which no retry was continued, including
        the kept one
    """),
    rules=(every_token_counted,),
)
"""Counts per session, one row per session, also for sessions without rows."""

OBSERVATIONS = table(
    "observations",
    *columns("""
    session_id text
    tokens_observed int64: tokens with a weight, over all rows
    tokens_repeated int64: tokens without a weight because an earlier row has it
    messages_unnamed int32: tool messages skipped because tool_names requires a name and
        none is known
    turns_skipped int32: turns without usable attribution
    """),
)
"""Counts of `trajkit.learn.observation_weights`, one row per session."""

SIMULATION = table(
    "simulation",
    *columns("""
    policy text: the preset's name, and the choices that differ from it
    turns, rows int64
    rows_untrained, rows_cut, rows_over_max_rows int64: as in REPORT, over all sessions
    turns_by_tokens, roots, turns_quarantined, turns_unresolved int64
    tokens_sampled, tokens_trained int64
    tokens_lost int64: the sum of all lost_*
    """),
    *_LOST,
    *columns("""
    tokens_duplicated int64
    tokens_out_of_context int64: trained tokens whose row, up to them, differs from the
        path they were sampled after
    tokens_forward, tokens_forward_shared int64
    tokens_padding int64?: padding of each row to a multiple of the given length. null: no
        length was given
    longest_row int64: tokens of the longest row; 0 without rows
    packs, tokens_packed, pairs_packed int64?: packs of the given size (trees that are
        larger are carried over several), their tokens, and pairs of a token and one that
        it attends. null: no size was given
    """),
)
"""Results of several policies on the same turns, one row per policy."""

IMPORT_REPORT = table(
    "import_report",
    *columns("""
    file text
    place text: position in the file: "line 3", "sample 0"
    session_id text?: null: not in the record
    problem name: docs/import.md lists them
    kept bool: true if the record still became a turn
    detail text
    """),
)
"""Records that an import dropped or changed, one row per record and problem."""
