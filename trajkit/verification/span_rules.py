"""The rules of claims: what rows train of what was sampled, where and how often.

A check takes a `Case` and says what it finds. It looks at whole columns; what it does
one by one is per piece or per violation, never per token.
"""

import numpy as np

from trajkit.schema import EMPTY_KINDS, SPAN_KINDS
from trajkit.turns.calls import Longs
from trajkit.turns.flat_buffers import Index, Pieces
from trajkit.turns.turn_rules import Bools
from trajkit.verification.context import Case, stretches


def sound(case: Case, pieces: Pieces) -> Pieces:
    """The pieces that name a stretch of the row and of an output; says what others do.

    Each other piece is named once, by the first rule that it breaks.
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
    # parts of one loss all stand where its first would have stood
    again = np.zeros(len(pieces), np.bool_)
    again[1:] = empty[1:] & empty[:-1] & (pieces.index[1:] > 0)
    again[1:] &= (pieces.call[1:] == pieces.call[:-1]) & (
        pieces.kind[1:] == pieces.kind[:-1]
    )
    due = due[np.maximum.accumulate(np.where(again, 0, np.arange(len(pieces))))]
    # What drift before it took out of the row stands where that drift began.
    earlier = (pieces.kind == "absorbed") & (
        policy is not None and policy.on_drift == "absorb_any"
    )
    if case.splices:
        due = n_ids  # an output may stand before where it was sampled
    rules: list[tuple[Bools, str, str]] = [
        (pieces.broken, "null", "has a null"),
        (pieces.call < 0, "span_turn", "names no turn of the session"),
        (
            ~np.isin(pieces.kind, SPAN_KINDS),
            "span_kind",
            f"is of a kind that is none of {', '.join(SPAN_KINDS)}",
        ),
        (
            (pieces.start < 0) | (size < 0) | (pieces.stop > n_ids),
            "span_place",
            "does not lie within the row",
        ),
        (pieces.start < before, "span_place", "begins before the one before it ends"),
        (
            (pieces.out_start < 0) | (out_size <= 0) | (pieces.out_stop > out_len),
            "span_range",
            "is of a range that the output does not have",
        ),
        (empty & (size != 0), "span_range", "is not empty"),
        (~empty & (size != out_size), "span_range", "is not as long as its range"),
        (
            empty & (pieces.start != due) & ~(earlier & (pieces.start < due)),
            "span_place",
            "does not stand where it would have stood",
        ),
    ]
    if policy is not None and not policy.absorbs:
        absorbed = pieces.kind == "absorbed"
        rules.append((absorbed, "span_kind", "is lost, where nothing is absorbed"))
    if policy is not None and not case.splices:
        dropped = pieces.kind == "no_splice_point"
        rules.append((dropped, "span_kind", "is lost, where nothing is spliced"))
    if policy is not None and policy.train_in == "every":
        again = pieces.kind == "duplicate"
        rules.append((again, "span_kind", "is context, where every row trains it"))
    if case.cap is None:
        cut = pieces.kind == "cut"
        rules.append((cut, "span_kind", "is lost, where no row is cut"))
    good = np.ones(len(pieces), np.bool_)
    for bad, rule, words in rules:
        for k in np.flatnonzero(bad & good):
            case.say(
                rule,
                f"{_words(pieces, k)} {words}",
                row=int(pieces.row[k]),
                call=int(pieces.call[k]) if pieces.call[k] >= 0 else None,
                token=int(pieces.start[k]),
            )
        good &= ~bad
    return pieces.take(np.flatnonzero(good))


def _loss_start(case: Case, pieces: Pieces) -> Longs:
    """Where in the output each piece begins, or the loss that it is the rest of.

    No piece names a lost token that may not train, so the row may have been replaced at
    such tokens before an absorbed piece.
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


def _words(pieces: Pieces, k: Index) -> str:
    return (
        f"spans[{pieces.index[k]}] ({pieces.start[k]}:{pieces.stop[k]}, turn "
        f"{pieces.turn_index[k]}, output {pieces.out_start[k]}:{pieces.out_stop[k]}, "
        f"{pieces.kind[k]})"
    )


def span_tokens(case: Case, pieces: Pieces) -> None:
    """Pieces hold the tokens that they say."""
    pieces = pieces.take(np.flatnonzero(~np.isin(pieces.kind, EMPTY_KINDS)))
    at, source = pieces.tokens(case.rows.ids), pieces.sampled(case.turns)
    here, said = case.rows.ids.values[at], case.turns.outputs.values[source]
    owner = np.repeat(np.arange(len(pieces)), pieces.stop - pieces.start)
    bad = np.flatnonzero(here != said)
    for first, n in zip(*stretches(bad, owner[bad]), strict=True):
        k = bad[first]
        piece = owner[k]
        case.say(
            "span_tokens",
            f"{_count(n)} not as sampled: the first is {here[k]}, the turn has {said[k]}",
            row=int(pieces.row[piece]),
            call=int(pieces.call[piece]),
            token=int(at[k] - case.rows.ids.offsets[pieces.row[piece]]),
        )


def untrainable(case: Case, pieces: Pieces) -> None:
    """What may not be trained is called untrainable, and nothing else is."""
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
        case.say(
            "untrainable",
            f"{_words(pieces, k)} is of {what} that {words}",
            row=int(pieces.row[k]),
            call=int(pieces.call[k]),
            token=int(pieces.start[k]),
        )


def masks(case: Case, trained: Pieces) -> None:
    """The mask is true where a piece is trained, and only there."""
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
    for first, n in zip(*stretches(bad, group), strict=True):
        k, r = bad[first], int(row[first])
        if expected[k]:
            detail = f"loss_mask is false for {_count(n)} that a piece trains"
        else:
            detail = f"loss_mask is true for {_count(n)} that no piece trains"
        case.say(
            "mask",
            detail,
            row=r,
            call=int(owner[k]) if owner[k] >= 0 else None,
            token=int(k - ids.offsets[r]),
        )


def logprobs(case: Case, trained: Pieces) -> None:
    """Logprobs are the engine's own where a piece is trained, null elsewhere."""
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
    # a list of another length is named as such
    whole = np.repeat(rows.n_logprobs == ids.lengths, ids.lengths)
    differ = (rows.given != given) | (given & (rows.logprobs != expected))
    bad = np.flatnonzero(whole & differ)
    row = ids.owner[bad]
    group = row * (len(case.turns.outputs) + 1) + owner[bad]
    for first, n in zip(*stretches(bad, group), strict=True):
        k, r = bad[first], int(row[first])
        here = rows.logprobs[k] if rows.given[k] else "null"
        due = f"the engine gave {expected[k] if given[k] else 'none'}"
        case.say(
            "logprob",
            f"{_count(n)} {here}, {due if owner[k] >= 0 else 'nothing is trained'}",
            row=r,
            call=int(owner[k]) if owner[k] >= 0 else None,
            token=int(k - ids.offsets[r]),
        )


def context(case: Case, trained: Pieces) -> None:
    """What precedes a trained token is what it was sampled after."""
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
            # the token where it departs is none that was sampled: span_tokens says so
            first += departs >= trained.start[k]
            detail = f"the row departs from the turn's own at token {departs}"
        if first < trained.stop[k]:
            case.say("context", detail, row=row, call=call, token=first)


def claims(case: Case, pieces: Pieces) -> None:
    """Every sampled token is claimed once at most, and trained where that is promised.

    Under ``train_in="every"``, once in each row. A row also claims what it lost (absorbed
    or cut spans).
    """
    kinds = np.isin(pieces.kind, ("trained", *EMPTY_KINDS))
    pieces = pieces.take(np.flatnonzero(kinds))
    source = pieces.sampled(case.turns)
    owner = np.repeat(np.arange(len(pieces)), pieces.out_stop - pieces.out_start)
    claimed = source
    if case.policy is not None and case.policy.train_in == "every":
        claimed = source + pieces.row[owner] * len(case.turns.outputs.values)
    order = np.argsort(claimed, kind="stable")
    again = np.sort(order[1:][np.diff(claimed[order]) == 0])
    for first, n in zip(*stretches(again, owner[again]), strict=True):
        piece = owner[again[first]]
        into = source[again[first]] - case.turns.outputs.offsets[pieces.call[piece]]
        into -= pieces.out_start[piece]
        lost = pieces.kind[piece] != "trained"
        case.say(
            "trained_twice",
            f"{_count(n)} that an earlier piece has claimed",
            row=int(pieces.row[piece]),
            call=int(pieces.call[piece]),
            token=int(pieces.start[piece] + (0 if lost else into)),
        )
    is_trained = np.repeat(pieces.kind == "trained", pieces.out_stop - pieces.out_start)
    not_trained(case, source[is_trained])


def not_trained(case: Case, source: Longs) -> None:
    """Every token that is owed is among ``source``, flat positions in the outputs."""
    spared = np.flatnonzero(~case.owed)
    not_among(case, np.concatenate([source, spared]), "that no row trains")


def not_among(case: Case, source: Longs, words: str) -> None:
    """Every sampled token is among ``source``, flat positions in the outputs."""
    outputs = case.turns.outputs
    absent = np.ones(len(outputs.values), np.bool_)
    absent[source] = False
    bad = np.flatnonzero(absent)
    call = outputs.owner[bad]
    for first, n in zip(*stretches(bad, call), strict=True):
        c = int(call[first])
        case.say(
            "not_trained",
            f"{_count(n)} of {outputs.lengths[c]} sampled {words}",
            call=c,
            token=int(bad[first] - outputs.offsets[c]),
        )


def _count(n: int) -> str:
    return f"{n} token" if n == 1 else f"{n} tokens"
