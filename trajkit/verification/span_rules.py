"""Rules for spans: which sampled tokens rows train, where, and how often.

Each check takes a `Case` and reports violations to it. Checks are vectorised: Python
loops run over spans or violations, never over tokens.
"""

import numpy as np

from trajkit._arrow.ragged import Index, Longs
from trajkit.schema import EMPTY_KINDS, SPAN_KINDS
from trajkit.turns.flat_buffers import Spans
from trajkit.turns.turn_rules import Bools
from trajkit.verification.context import Case, consecutive


def well_formed(case: Case, pieces: Spans) -> Spans:
    """The spans that name a range of their row and a range of an output.

    Reports every other span once, under the first rule that it breaks.
    """
    calls = case.turns.calls.calls
    n_ids = case.rows.ids.lengths[pieces.row]
    call = np.maximum(pieces.call, 0)
    out_len, prompt_len = calls["out_len"][call], calls["prompt_len"][call]
    empty = np.isin(pieces.kind, EMPTY_KINDS)
    before = np.concatenate([[0], pieces.stop[:-1]])[: len(pieces)]
    before = np.where(pieces.index == 0, 0, before)
    policy = case.policy
    size = pieces.stop - pieces.start
    out_size = pieces.out_stop - pieces.out_start
    due = np.minimum(prompt_len + _loss_start(case, pieces), n_ids)
    # All parts of one loss have the position of its first token.
    again = np.zeros(len(pieces), np.bool_)
    again[1:] = empty[1:] & empty[:-1] & (pieces.index[1:] > 0)
    again[1:] &= (pieces.call[1:] == pieces.call[:-1]) & (
        pieces.kind[1:] == pieces.kind[:-1]
    )
    due = due[np.maximum.accumulate(np.where(again, 0, np.arange(len(pieces))))]
    # Under absorb_any, earlier drift may have removed the position.
    earlier = (pieces.kind == "absorbed") & (
        policy is not None and policy.on_drift == "absorb_any"
    )
    if case.splices:
        due = n_ids  # a spliced output may precede its sampled position
    rules: list[tuple[Bools, str, str]] = [
        (pieces.broken, "null", "has a null"),
        (pieces.call < 0, "span_turn", "names a turn that is not in the session"),
        (
            ~np.isin(pieces.kind, SPAN_KINDS),
            "span_kind",
            f"has an unknown kind: expected one of {', '.join(SPAN_KINDS)}",
        ),
        (
            (pieces.start < 0) | (size < 0) | (pieces.stop > n_ids),
            "span_place",
            "reaches outside its row",
        ),
        (pieces.start < before, "span_place", "overlaps the previous span"),
        (
            (pieces.out_start < 0) | (out_size <= 0) | (pieces.out_stop > out_len),
            "span_range",
            "names a range outside its output",
        ),
        (empty & (size != 0), "span_range", "must be empty: its kind has no tokens"),
        (
            ~empty & (size != out_size),
            "span_range",
            "and its output range differ in length",
        ),
        (
            empty & (pieces.start != due) & ~(earlier & (pieces.start < due)),
            "span_place",
            "is not at the position of the tokens that were lost",
        ),
    ]
    if policy is not None and not policy.absorbs:
        absorbed = pieces.kind == "absorbed"
        rules.append((absorbed, "span_kind", "is lost, but the policy never absorbs"))
    if policy is not None and not case.splices:
        dropped = pieces.kind == "no_splice_point"
        rules.append((dropped, "span_kind", "is lost, but the policy never splices"))
    if policy is not None and policy.train_in == "every":
        again = pieces.kind == "duplicate"
        rules.append((again, "span_kind", "is context, but every row must train it"))
    if case.cap is None:
        cut = pieces.kind == "cut"
        rules.append((cut, "span_kind", "is lost, but no row is truncated"))
    good = np.ones(len(pieces), np.bool_)
    for bad, rule, words in rules:
        for k in np.flatnonzero(bad & good):
            detail = f"{_words(pieces, k)} {words}"
            case.report(rule, detail, pieces.row[k], pieces.call[k], pieces.start[k])
        good &= ~bad
    return pieces.take(np.flatnonzero(good))


def _loss_start(case: Case, pieces: Spans) -> Longs:
    """Where each span begins in its output, or where the loss began that it continues.

    Lost tokens that may not train have no span, so an absorbed span may start later
    than the loss.
    """
    outputs = case.turns.outputs
    call = np.maximum(pieces.call, 0)
    start = np.clip(pieces.out_start, 0, outputs.lengths[call])
    named = np.zeros(len(pieces), np.int64)
    named[1:] = np.where(
        (pieces.index[1:] > 0) & (call[1:] == call[:-1]), pieces.out_stop[:-1], 0
    )
    named = np.clip(named, 0, start)
    may = np.concatenate([[0], np.cumsum(case.may_train)])
    first = outputs.offsets[call]
    unnamed = may[first + start] == may[first + named]
    return np.where((pieces.kind == "absorbed") & unnamed, named, pieces.out_start)


def _words(pieces: Spans, k: Index) -> str:
    return (
        f"spans[{pieces.index[k]}] ({pieces.start[k]}:{pieces.stop[k]}, turn "
        f"{pieces.turn_index[k]}, output {pieces.out_start[k]}:{pieces.out_stop[k]}, "
        f"{pieces.kind[k]})"
    )


def span_tokens(case: Case, pieces: Spans) -> None:
    """The tokens of a span are those of its output range."""
    pieces = pieces.take(np.flatnonzero(~np.isin(pieces.kind, EMPTY_KINDS)))
    at, source = pieces.tokens(case.rows.ids), pieces.sampled(case.turns)
    here, sampled = case.rows.ids.values[at], case.turns.outputs.values[source]
    owner = np.repeat(np.arange(len(pieces)), pieces.stop - pieces.start)
    bad = np.flatnonzero(here != sampled)
    for first, n in consecutive(bad, owner[bad]):
        k = bad[first]
        piece = owner[k]
        detail = (
            f"{_count(n)} differ from the output: the first is {here[k]}, the turn "
            f"sampled {sampled[k]}"
        )
        case.report(
            "span_tokens",
            detail,
            pieces.row[piece],
            pieces.call[piece],
            at[k] - case.rows.ids.offsets[pieces.row[piece]],
        )


def untrainable(case: Case, pieces: Spans) -> None:
    """A span is untrainable exactly if none of its tokens may be trained."""
    may = np.concatenate([[0], np.cumsum(case.may_train)])
    start = case.turns.outputs.offsets[pieces.call]
    n_may = may[start + pieces.out_stop] - may[start + pieces.out_start]
    size = pieces.out_stop - pieces.out_start
    out_len = case.turns.outputs.lengths
    called = pieces.kind == "untrainable"
    for k in np.flatnonzero(n_may != np.where(called, 0, size)):
        n, words = n_may[k], "may be trained"
        if not called[k]:
            n, words = size[k] - n, "may not be trained"
        what = "a turn" if n == out_len[pieces.call[k]] else _count(n)
        detail = f"{_words(pieces, k)} covers {what} that {words}"
        case.report(
            "untrainable", detail, pieces.row[k], pieces.call[k], pieces.start[k]
        )


def masks(case: Case, trained: Spans) -> None:
    """The mask is true exactly for the tokens of trained spans."""
    ids = case.rows.ids
    at = trained.tokens(ids)
    expected = np.zeros(len(ids.values), np.bool_)
    expected[at] = True
    owner = np.full(len(ids.values), -1)
    owner[at] = np.repeat(trained.call, trained.stop - trained.start)
    bad = np.flatnonzero((case.rows.mask != expected) & case.rows.has_mask)
    row = ids.owner[bad]
    # one group per row, sign and turn
    group = (row * 2 + expected[bad]) * (len(case.turns.outputs) + 1) + owner[bad]
    for first, n in consecutive(bad, group):
        k, r = bad[first], int(row[first])
        if expected[k]:
            detail = f"loss_mask is false for {_count(n)} of a trained span"
        else:
            detail = f"loss_mask is true for {_count(n)} outside trained spans"
        case.report("mask", detail, r, owner[k], k - ids.offsets[r])


def logprobs(case: Case, trained: Spans) -> None:
    """Logprobs are the engine's for trained tokens and null for all others."""
    rows, ids = case.rows, case.rows.ids
    at, source = trained.tokens(ids), trained.sampled(case.turns)
    expected = np.zeros(len(ids.values), np.float32)
    given = np.zeros(len(ids.values), np.bool_)
    expected[at], given[at] = case.turns.logprobs[source], case.turns.given[source]
    if case.policy is not None and case.policy.missing_logprobs == "null_row":
        partial = np.unique(ids.owner[at[~given[at]]])
        given &= ~np.isin(ids.owner, partial)
    owner = np.full(len(ids.values), -1)
    owner[at] = np.repeat(trained.call, trained.stop - trained.start)
    # `row_rules.lengths` reports lists of another length.
    complete = np.repeat(rows.n_logprobs == ids.lengths, ids.lengths)
    differ = (rows.given != given) | (given & (rows.logprobs != expected))
    bad = np.flatnonzero(complete & differ)
    row = ids.owner[bad]
    group = row * (len(case.turns.outputs) + 1) + owner[bad]
    for first, n in consecutive(bad, group):
        k, r = bad[first], int(row[first])
        here = rows.logprobs[k] if rows.given[k] else "null"
        due = "null, since the token is not trained"
        if owner[k] >= 0:
            due = (
                f"{expected[k]}, the engine's"
                if given[k]
                else "null, as the engine gave"
            )
        detail = f"{_count(n)}: the first has {here}, expected {due}"
        case.report("logprob", detail, r, owner[k], k - ids.offsets[r])


def context(case: Case, trained: Spans) -> None:
    """The tokens before a trained token are those it was sampled after."""
    n_prompt = case.turns.calls.calls["prompt_len"][trained.call]
    in_context = trained.in_context(case.rows.ids, case.turns)
    size = trained.stop - trained.start
    for k in np.flatnonzero(in_context < size):
        row, call = int(trained.row[k]), int(trained.call[k])
        place = int(n_prompt[k] + trained.out_start[k])
        first = int(trained.start[k] + in_context[k])
        if place != trained.start[k]:
            detail = f"trained at {trained.start[k]}, sampled at {place}"
        else:
            departs = case.turns.shared(case.rows.ids[row], call)
            # `span_tokens` reports the differing token itself.
            first += departs >= trained.start[k]
            detail = f"the row differs from the turn's path from token {departs} on"
        if first < trained.stop[k]:
            case.report("context", detail, row, call, first)


def each_once(case: Case, pieces: Spans) -> None:
    """Every sampled token is in at most one trained or lost span.

    Under ``train_in="every"`` the limit is one per row. Tokens that the policy promises
    to train are in a trained span.
    """
    kinds = np.isin(pieces.kind, ("trained", *EMPTY_KINDS))
    pieces = pieces.take(np.flatnonzero(kinds))
    source = pieces.sampled(case.turns)
    owner = np.repeat(np.arange(len(pieces)), pieces.out_stop - pieces.out_start)
    counted = source
    if case.policy is not None and case.policy.train_in == "every":
        counted = source + pieces.row[owner] * len(case.turns.outputs.values)
    order = np.argsort(counted, kind="stable")
    again = np.sort(order[1:][np.diff(counted[order]) == 0])
    for first, n in consecutive(again, owner[again]):
        piece = owner[again[first]]
        into = source[again[first]] - case.turns.outputs.offsets[pieces.call[piece]]
        into -= pieces.out_start[piece]
        lost = pieces.kind[piece] != "trained"
        detail = f"{_count(n)} that an earlier span trains or reports as lost"
        case.report(
            "trained_twice",
            detail,
            pieces.row[piece],
            pieces.call[piece],
            pieces.start[piece] + (0 if lost else into),
        )
    is_trained = np.repeat(pieces.kind == "trained", pieces.out_stop - pieces.out_start)
    not_trained(case, source[is_trained])


def not_trained(case: Case, source: Longs) -> None:
    """Report tokens that must train and are not in ``source``, positions in outputs."""
    spared = np.flatnonzero(~case.must_train)
    not_among(case, np.concatenate([source, spared]), "that no row trains")


def not_among(case: Case, source: Longs, words: str) -> None:
    """Report sampled tokens that are not in ``source``, positions in outputs."""
    outputs = case.turns.outputs
    absent = np.ones(len(outputs.values), np.bool_)
    absent[source] = False
    bad = np.flatnonzero(absent)
    call = outputs.owner[bad]
    for first, n in consecutive(bad, call):
        c = int(call[first])
        detail = f"{_count(n)} of {outputs.lengths[c]} sampled {words}"
        case.report(
            "not_trained", detail, call=c, token=bad[first] - outputs.offsets[c]
        )


def _count(n: int) -> str:
    return f"{n} token" if n == 1 else f"{n} tokens"
