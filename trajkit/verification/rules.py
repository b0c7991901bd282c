"""The rules of rows with spans: what rows and turns show together.

Each rule takes a `Case` and reports violations to it. Of a policy a rule knows only the
choices that `Case` asks for. Loops run over rows, spans or violations, never over tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import get_args

import numpy as np

from trajkit import _core
from trajkit.policies import Policy, Rewards
from trajkit.schema import EMPTY_KINDS, SPAN_KINDS
from trajkit.schema.engine import Bools, shown
from trajkit.tables.canonical import Rows
from trajkit.tables.ragged import Index, Ints, Longs, Ragged
from trajkit.turns.flat_buffers import Spans, spans_of
from trajkit.turns.images import Image, has_items, image_faults, same_image
from trajkit.verification.context import Case, consecutive, count

_ROUNDING = 1e-9  # row_weight is one division away from the counts


def check_rows(case: Case, known: tuple[str, ...], weigh_by: str) -> None:
    """Report every violation; ``known`` names the metadata that the caller gave."""
    spans = well_formed(case, spans_of(case.rows.table, case.turns, case.session))
    trained = spans.take(np.flatnonzero(spans.kind == "trained"))
    row_index(case)
    lengths(case)
    span_tokens(case, spans)
    untrainable(case, spans)
    masks(case, trained)
    logprobs(case, trained)
    each_once(case, spans)
    row_tokens(case, spans, trained)
    turns_of_rows(case, spans)
    shared_prefixes(case)
    sums(case, trained, weigh_by)
    metadata(case, known)
    weight_versions(case, spans)
    mm_items(case)


def _rows_by_session(session: Rows) -> Iterator[Rows]:
    """The rows of each session, in order."""
    order = np.argsort(session, kind="stable")
    edges = np.flatnonzero(np.diff(session[order])) + 1
    return iter(np.split(order, edges) if len(order) else [])


def row_index(case: Case) -> None:
    """row_index counts the rows of a session from 0."""
    given = case.rows.table.column("row_index").to_numpy()
    rank = np.zeros(len(given), np.int64)
    for rows in _rows_by_session(case.session):
        rank[rows] = np.arange(len(rows))
    text = "{} is row {} of the session"
    case.report_where("row_index", given != rank, text, given, rank)


def lengths(case: Case) -> None:
    """Mask and logprobs have the row's length, no row exceeds ``max_row_tokens``, and
    ids and mask have no null.
    """
    rows, ids = case.rows, case.rows.ids
    n_ids = ids.lengths
    for name, n in (("loss_mask", rows.n_mask), ("logprobs", rows.n_logprobs)):
        text = f"{name} has {{}} values, input_ids has {{}}"
        end = np.minimum(n, n_ids)
        case.report_where("length", n != n_ids, text, n, n_ids, token=end)
    if case.cap is not None:
        cap = np.full(len(n_ids), case.cap)
        text = "the row has {} tokens, max_row_tokens is {}"
        case.report_where("length", n_ids > cap, text, n_ids, cap, token=cap)
    complete = np.repeat(rows.n_mask == n_ids, n_ids)
    at = np.arange(len(ids.values)) - ids.offsets[ids.owner]
    for text, null in (
        ("input_ids is null or negative", ids.values < 0),
        ("loss_mask is null", complete & ~rows.has_mask),
    ):
        case.report_where("null", null, text, row=ids.owner, token=at)


_KINDS_OF_POLICIES: dict[str, tuple[str, Callable[[Policy], bool]]] = {
    "absorbed": ("is lost, but the policy never absorbs", lambda p: p.absorbs),
    "no_splice_point": (
        "is lost, but the policy never splices",
        lambda p: p.on_drift == "splice",
    ),
    "duplicate": (
        "is context, but every row must train it",
        lambda p: p.train_in != "every",
    ),
}
"""Kinds of spans that only some policies make."""


def well_formed(case: Case, spans: Spans) -> Spans:
    """The spans that name a range of their row and a range of an output.

    Reports every other span once, under the first rule that it breaks.
    """
    n_ids = case.rows.ids.lengths[spans.row]
    out_len = case.turns.calls.calls["out_len"][np.maximum(spans.call, 0)]
    empty = np.isin(spans.kind, EMPTY_KINDS)
    before = np.where(spans.index == 0, 0, np.append(0, spans.stop)[: len(spans)])
    size, out_size = spans.stop - spans.start, spans.out_stop - spans.out_start
    no_range = (spans.out_start < 0) | (out_size <= 0) | (spans.out_stop > out_len)
    rules: list[tuple[Bools, str, str]] = [
        (spans.broken, "null", "has a null"),
        (spans.call < 0, "span_turn", "names a turn that is not in the session"),
        (
            ~np.isin(spans.kind, SPAN_KINDS),
            "span_kind",
            f"has an unknown kind: expected one of {', '.join(SPAN_KINDS)}",
        ),
        (
            (spans.start < 0) | (size < 0) | (spans.stop > n_ids),
            "span_place",
            "reaches outside its row",
        ),
        (spans.start < before, "span_place", "overlaps the previous span"),
        (no_range, "span_range", "names a range outside its output"),
        (empty & (size != 0), "span_range", "must be empty: its kind has no tokens"),
        (
            ~empty & (size != out_size),
            "span_range",
            "and its output range differ in length",
        ),
    ]
    for kind, (words, makes) in _KINDS_OF_POLICIES.items():
        if case.policy is not None and not makes(case.policy):
            rules.append((spans.kind == kind, "span_kind", words))
    if case.cap is None:
        words = "is lost, but no row is truncated"
        rules.append((spans.kind == "cut", "span_kind", words))
    good = np.ones(len(spans), np.bool_)
    for bad, rule, words in rules:
        for k in np.flatnonzero(bad & good):
            detail = f"{_words(spans, k)} {words}"
            case.report(rule, detail, spans.row[k], spans.call[k], spans.start[k])
        good &= ~bad
    return spans.take(np.flatnonzero(good))


def _words(spans: Spans, k: Index) -> str:
    return (
        f"spans[{spans.index[k]}] ({spans.start[k]}:{spans.stop[k]}, turn "
        f"{spans.turn_index[k]}, output {spans.out_start[k]}:{spans.out_stop[k]}, "
        f"{spans.kind[k]})"
    )


def span_tokens(case: Case, spans: Spans) -> None:
    """The tokens of a span are those of its output range."""
    spans = spans.take(np.flatnonzero(~np.isin(spans.kind, EMPTY_KINDS)))
    at, source = spans.tokens(case.rows.ids), spans.sampled(case.turns)
    here, sampled = case.rows.ids.values[at], case.turns.outputs.values[source]
    owner = np.repeat(np.arange(len(spans)), spans.stop - spans.start)
    bad = np.flatnonzero(here != sampled)
    for first, n in consecutive(bad, owner[bad]):
        k = bad[first]
        row = spans.row[owner[k]]
        detail = (
            f"{count(n)} differ from the output: the first is {here[k]}, the turn "
            f"sampled {sampled[k]}"
        )
        token = at[k] - case.rows.ids.offsets[row]
        case.report("span_tokens", detail, row, spans.call[owner[k]], token)


def untrainable(case: Case, spans: Spans) -> None:
    """A span is untrainable exactly if none of its tokens may be trained."""
    start = case.turns.outputs.offsets[spans.call]
    size = spans.out_stop - spans.out_start

    def n_of(tokens: Bools) -> Longs:
        sums = np.append(0, np.cumsum(tokens))
        n: Longs = sums[start + spans.out_stop] - sums[start + spans.out_start]
        return n

    out_len = case.turns.outputs.lengths[spans.call]
    called = spans.kind == "untrainable"
    for n, words in (
        (np.where(called, n_of(case.never_barred), 0), "may be trained"),
        (np.where(called, 0, size - n_of(case.may_train)), "may not be trained"),
    ):
        for k in np.flatnonzero(n):
            what = "a turn" if n[k] == out_len[k] else count(n[k])
            detail = f"{_words(spans, k)} covers {what} that {words}"
            at = spans.row[k], spans.call[k], spans.start[k]
            case.report("untrainable", detail, *at)


def _trained_calls(case: Case, trained: Spans) -> Longs:
    """The call that each token of the rows is trained of, or -1."""
    owner = np.full(len(case.rows.ids.values), -1)
    at = trained.tokens(case.rows.ids)
    owner[at] = np.repeat(trained.call, trained.stop - trained.start)
    return owner


def masks(case: Case, trained: Spans) -> None:
    """The mask is true exactly for the tokens of trained spans."""
    ids, owner = case.rows.ids, _trained_calls(case, trained)
    expected = owner >= 0
    bad = np.flatnonzero((case.rows.mask != expected) & case.rows.has_mask)
    row = ids.owner[bad]
    for first, n in consecutive(bad, row, owner[bad]):
        k, r = bad[first], row[first]
        detail = f"loss_mask is true for {count(n)} outside trained spans"
        if expected[k]:
            detail = f"loss_mask is false for {count(n)} of a trained span"
        case.report("mask", detail, r, owner[k], k - ids.offsets[r])


def logprobs(case: Case, trained: Spans) -> None:
    """Logprobs are the engine's for trained tokens and null for all others."""
    rows, ids, turns = case.rows, case.rows.ids, case.turns
    at, source = trained.tokens(ids), trained.sampled(turns)
    expected = np.zeros(len(ids.values), np.float32)
    given = np.zeros(len(ids.values), np.bool_)
    expected[at], given[at] = turns.logprobs[source], turns.given[source]
    policy = case.policy
    if policy is None or policy.missing_logprobs == "null_row":
        # a row without all of its logprobs may have none
        nulled = np.bincount(ids.owner[at], ~given[at], len(ids)) > 0
        if policy is None:
            nulled &= np.bincount(ids.owner, rows.given, len(ids)) == 0
        given &= ~nulled[ids.owner]
    owner = _trained_calls(case, trained)
    # `lengths` reports lists of another length
    complete = np.repeat(rows.n_logprobs == ids.lengths, ids.lengths)
    differ = (rows.given != given) | (given & (rows.logprobs != expected))
    bad = np.flatnonzero(complete & differ)
    row = ids.owner[bad]
    for first, n in consecutive(bad, row, owner[bad]):
        k, r = bad[first], row[first]
        here = rows.logprobs[k] if rows.given[k] else "null"
        due = "null, since the token is not trained"
        if owner[k] >= 0:
            due = "null, as the engine gave"
            if given[k]:
                due = f"{expected[k]}, the engine's"
        detail = f"{count(n)}: the first has {here}, expected {due}"
        case.report("logprob", detail, r, owner[k], k - ids.offsets[r])


def each_once(case: Case, spans: Spans) -> None:
    """A sampled token is trained or lost in one span at most, or in one of each row.

    Tokens that the policy promises to train, or to name as lost, are in such a span.
    """
    counted = spans.take(np.flatnonzero(np.isin(spans.kind, ("trained", *EMPTY_KINDS))))
    source = counted.sampled(case.turns)
    owner = np.repeat(np.arange(len(counted)), counted.out_stop - counted.out_start)
    key = source
    if case.per_row:
        key = source + counted.row[owner] * len(case.turns.outputs.values)
    order = np.argsort(key, kind="stable")
    again = np.sort(order[1:][np.diff(key[order]) == 0])
    for first, n in consecutive(again, owner[again]):
        k = owner[again[first]]
        into = source[again[first]] - case.turns.outputs.offsets[counted.call[k]]
        into -= counted.out_start[k]
        token = counted.start[k] + (into if counted.kind[k] == "trained" else 0)
        detail = f"{count(n)} that an earlier span trains or reports as lost"
        case.report("trained_twice", detail, counted.row[k], counted.call[k], token)
    named = np.isin(counted.kind, case.accounts)[owner]
    not_trained(case, source[named])


def not_trained(case: Case, source: Longs) -> None:
    """Report tokens that are due and not in ``source``, positions in outputs."""
    outputs = case.turns.outputs
    absent = case.due
    absent[source] = False
    words = "that no row trains"
    if len(case.accounts) > 1:
        words += " or reports as lost"
    bad = np.flatnonzero(absent)
    for first, n in consecutive(bad, outputs.owner[bad]):
        call = outputs.owner[bad[first]]
        detail = f"{count(n)} of {outputs.lengths[call]} sampled {words}"
        token = bad[first] - outputs.offsets[call]
        case.report("not_trained", detail, call=call, token=token)


def row_tokens(case: Case, spans: Spans, trained: Spans) -> None:
    """A row is the path of its last turn, and its trained tokens are in their context.

    A spliced row is no path: there, each output follows the end of its prompt.
    """
    in_context = trained.in_context(case.rows.ids, case.turns)
    reasons = case.turns.calls.table.column("finish_reason").to_pylist()
    numbers = case.turns.calls.turn_index
    for row in range(len(case.rows.ids)):
        named = case.rows.number("last_turn", row)
        fits = [call for call in case.calls_of(row) if _is_path(case, row, call)]
        own = [call for call in fits if named is None or numbers[call] == named]
        mine = np.flatnonzero(trained.row == row)
        if not own and case.may_splice:
            own = _splice(case, row, spans)
        elif len(mine):
            _context(case, trained, mine, in_context)
        if not own and fits:
            turn = numbers[fits[0]]
            detail = f"last_turn is {named}, but turn {turn} has the row's tokens"
            case.report("row_tokens", detail, row, fits[0])
        elif not own:
            last = np.flatnonzero(spans.row == row)[-1:]
            call = int(spans.call[last[0]]) if len(last) else -1
            detail = "the row is not the prompt and output of any turn"
            if case.may_splice:
                detail += ", nor outputs joined by their prompts"
            case.report("row_tokens", detail, row, call, _departs(case, row, call))
        else:
            reason = case.rows.text("finish_reason", row)
            due = [reasons[call] for call in own]
            if reason not in due:
                detail = f"finish_reason is {reason!r}, the last turn has {due[0]!r}"
                case.report("finish_reason", detail, row, own[0])


def _is_path(case: Case, row: Index, call: int) -> bool:
    """Whether a row is the path of a call, which ``max_row_tokens`` may end."""
    ids = case.rows.ids[row]
    if case.turns.shared(ids, call) != len(ids):
        return False
    n = case.turns.path_len(call)
    if case.cap is None or min(n, case.cap) == len(ids):
        return n == len(ids) or case.cap is not None
    # a later call that did not fit may have replaced the rest of the last output
    return case.policy is None or (
        case.policy.truncate_at == "calls" and case.policy.keep_prefix
    )


def _departs(case: Case, row: Index, own: int) -> int:
    """The first token where a row differs from its last turn, or from every turn."""
    ids = case.rows.ids[row]
    if own >= 0:
        n = case.turns.shared(ids, own)
        if n < min(len(ids), case.turns.path_len(own)):
            return n
    return max((case.turns.shared(ids, call) for call in case.calls_of(row)), default=0)


def _context(case: Case, trained: Spans, mine: Longs, in_context: Longs) -> None:
    """The tokens before a trained token are those it was sampled after."""
    sampled_at = case.turns.calls.calls["prompt_len"][trained.call] + trained.out_start
    for k in mine[in_context[mine] < (trained.stop - trained.start)[mine]]:
        row, call, start = trained.row[k], trained.call[k], trained.start[k]
        first = start + in_context[k]
        if sampled_at[k] != start:
            detail = f"trained at {start}, sampled at {sampled_at[k]}"
        else:
            departs = case.turns.shared(case.rows.ids[row], int(call))
            # `span_tokens` reports the differing token itself
            first += departs >= start
            detail = f"the row differs from the turn's path from token {departs} on"
        if first < trained.stop[k]:
            case.report("context", detail, row, call, first)


def _splice(case: Case, row: int, spans: Spans) -> list[int]:
    """The last turn of a row in which each output follows the end of its prompt.

    A turn without a span may be between two outputs; there, nothing is compared.
    """
    ids, calls = case.rows.ids[row], case.turns.calls
    mine = spans.take(np.flatnonzero((spans.row == row) & (spans.stop > spans.start)))
    listed = case.rows.table.column("turns")[row].as_py()
    numbers = (
        [calls.turn_index[call] for call in mine.call] if listed is None else listed
    )
    session = np.full(len(numbers), case.session[row])
    order = calls.named(session, np.array(numbers, np.int64)).tolist()
    after = dict(zip(order, [-1, *order], strict=False))
    end, before = 0, -1
    for start, stop, call in zip(
        mine.start, mine.stop, mine.call.tolist(), strict=True
    ):
        text, prompt = ids[end:start], case.turns.prompts[call]
        tail = prompt[max(len(prompt) - len(text), 0) :]
        if call == before:
            tail = text[:0]
        elif before < 0:
            tail = prompt
        fits = np.array_equal(text, tail)
        fits |= call != before and after.get(call) != before
        if not fits:
            return []
        end, before = stop, call
    last = case.rows.number("last_turn", row)
    own = order[-1:] if last is None or numbers[-1:] == [last] else []
    ends = case.cap is not None or (end == len(ids) and before in own)
    return [
        call
        for call in own
        if call >= 0 and (ends or calls.calls["out_len"][call] == 0)
    ]


def turns_of_rows(case: Case, spans: Spans) -> None:
    """A row's turns end with last_turn and contain the turns of its spans, in order.

    Its prompt_length is that of the first; its flags follow from them.
    """
    table, calls = case.rows.table, case.turns.calls
    bounds = np.searchsorted(spans.row, np.arange(len(case.rows.ids) + 1))
    # the flags of a chain may be those of turns that the row lacks
    of_row = case.policy is not None and case.policy.flag_scope == "row"
    for row, listed in enumerate(table.column("turns").to_pylist()):
        here = slice(bounds[row], bounds[row + 1])
        named = spans.call[here][spans.kind[here] != "no_splice_point"]
        order = named
        if listed is not None:
            session = np.full(len(listed), case.session[row])
            own = calls.named(session, np.array(listed, np.int64))
            if _are_listed(case, row, listed, own, named):
                order = own
        n = case.rows.number("prompt_length", row)
        due = [int(k) for k in calls.calls["prompt_len"][order[:1]]]
        if due != [n]:
            what = (
                f"the row's first turn has {due[0]}" if due else "no turn opens the row"
            )
            detail = f"prompt_length is {n}, {what}"
            case.report("prompt_length", detail, row, None, n)
        _flags(case, row, order, of_row=of_row)


def _flags(case: Case, row: int, order: Longs, *, of_row: bool) -> None:
    """The flags of a row follow from its turns, or have at least theirs."""
    calls = case.turns.calls.calls
    due = {name: bool(calls[name][order].any()) for name in ("use_tool", "ill_formed")}
    if of_row:
        due["truncated"] = case.rows.text("finish_reason", row) == "length"
    for name, flag in due.items():
        given = case.rows.table.column(name)[row].as_py()
        if given is not flag and (of_row or flag):
            detail = f"{name} is {shown(given)}, the row's turns give {flag}"
            case.report("flags", detail, row)


def _are_listed(
    case: Case, row: int, listed: list[int], order: Longs, named: Longs
) -> bool:
    """Whether the turns that a row lists are right; else it is reported."""
    last = case.rows.number("last_turn", row)
    faults = []
    if last is not None and listed[-1:] != [last]:
        faults.append(f"do not end with last_turn {last}")
    rest = iter(order.tolist())
    for call, _ in groupby(named.tolist()):
        if call not in rest:  # which leaves those after it
            faults.append(f"lack {case.turns.calls.turn_index[call]} or its order")
            break
    odd = sorted({turn for turn, call in zip(listed, order, strict=True) if call < 0})
    for fault in faults:
        case.report("turns", f"turns {listed} {fault}", row)
    if odd:
        case.report("turns", f"turns {odd} are not in the session", row)
    return not faults and not odd


def shared_prefixes(case: Case) -> None:
    """parent_row and shared_length give the longest shared prefix, the first on ties."""
    table = case.rows.table
    names, n = (table.column(one).to_numpy() for one in ("row_index", "shared_length"))
    parents = table.column("parent_row").to_pylist()
    due: list[int | None] = [None] * len(names)
    most = np.zeros(len(names), np.int64)
    for rows in _rows_by_session(case.session):
        first, most[rows] = longest_shared(case.rows.ids, rows)
        for k, row in zip(first, rows, strict=True):
            due[row] = int(names[rows[k]]) if most[row] else None
    text = "shared_length is {}, an earlier row shares {}"
    end = np.minimum(n, most)
    case.report_where("shared_length", n != most, text, n, most, token=end)
    odd = np.array([a != b for a, b in zip(parents, due, strict=True)], np.bool_)
    text = "parent_row is {}, the first row that shares most is {}"
    case.report_where("parent_row", odd, text, parents, due)


def longest_shared(ids: Ragged, rows: Rows) -> tuple[Longs, Longs]:
    """For each of ``rows``, the earlier row with the longest shared prefix, and its
    length.

    The first on ties, as an index into ``rows``; 0 if nothing is shared. Shape
    (n_rows,).
    """
    n = len(rows)
    runs: list[Ints] = [ids[row] for row in rows]
    # In sorted order, two rows share the minimum over the neighbours between them.
    order = np.array(sorted(range(n), key=lambda k: runs[k].tobytes()), np.int64)
    rank = np.empty(n, np.int64)
    rank[order] = np.arange(n)
    steps = [_core.lcp(runs[a], runs[b]) for a, b in pairwise(order)]
    between = np.array(steps, np.int64)
    first, shared = np.zeros(n, np.int64), np.zeros(n, np.int64)
    for k in range(1, n):
        at = rank[k]
        sharing = np.concatenate(
            [
                np.minimum.accumulate(between[:at][::-1])[::-1],
                [0],
                np.minimum.accumulate(between[at:]),
            ]
        )
        earlier = sharing[rank[:k]]
        first[k] = np.argmax(earlier)
        shared[k] = earlier[first[k]]
    return np.where(shared > 0, first, 0), shared


def sums(case: Case, trained: Spans, weigh_by: str) -> None:
    """rollout_mask_sum and row_weight count the tokens that the session's rows train.

    Under ``weigh_by="constant"``, every row that trains has one weight.
    """
    table, session = case.rows.table, case.session
    sizes = trained.stop - trained.start
    mine = np.bincount(trained.row, sizes, len(session)).astype(np.int64)
    total = np.bincount(session, mine).astype(np.int64)[session]
    given = table.column("rollout_mask_sum").to_numpy()
    text = "rollout_mask_sum is {}, the session's rows train {} tokens"
    case.report_where("rollout_mask_sum", given != total, text, given, total)
    weights = table.column("row_weight").to_pylist()
    trains = mine > 0
    share, whole = mine, total
    if weigh_by != "token":
        share = trains.astype(np.int64)
    if weigh_by == "row":
        whole = np.bincount(session, share).astype(np.int64)[session]
    due = [a / b if b else None for a, b in zip(share, whole, strict=True)]
    if weigh_by == "constant":
        own = next((w for w, t in zip(weights, trains, strict=True) if t and w), None)
        parts = zip(trains, total, strict=True)
        due = [None if not n else own if t else 0.0 for t, n in parts]
    odd = np.array(list(map(_differ, weights, due)), np.bool_)
    text = "row_weight is {}, expected {} ({} of {})"
    case.report_where("row_weight", odd, text, weights, due, share, whole)


def metadata(case: Case, known: tuple[str, ...]) -> None:
    """reward and group_id are the session's if known, else equal in all its rows.

    A value is known if its name is in ``known`` or if it is not null. A policy may give
    each row its share of the reward.
    """
    columns = {name: case.rows.table.column(name) for name in ("reward", "group_id")}
    rewards, groups = (column.to_pylist() for column in columns.values())
    facts = [case.facts.column(name).to_pylist() for name in columns]
    schemes: Sequence[str] = get_args(Rewards)
    if case.policy is not None:
        schemes = (case.policy.rewards,)
    for rows in _rows_by_session(case.session):
        reward, group = (of_all[case.session[rows[0]]] for of_all in facts)
        if "group_id" not in known and group is None:
            group = groups[rows[0]]
        for row in rows:
            if groups[row] != group:
                detail = f"group_id is {shown(groups[row])}, the session's is "
                case.report("group_id", f"{detail}{shown(group)}", row)
        is_known = "reward" in known or reward is not None
        odd = [
            _odd_rewards(case, rows, rewards, scheme, reward, is_known=is_known)
            for scheme in schemes
        ]
        for row, due, total in min(odd, key=len):
            detail = (
                f"reward is {shown(rewards[row])}, expected {shown(due)}, its part of "
                f"the session's {shown(total)}"
            )
            case.report("reward", detail, row)


_Odd = list[tuple[int, float | None, float | None]]


def _odd_rewards(
    case: Case,
    rows: Rows,
    given: list[float | None],
    scheme: str,
    reward: float | None,
    *,
    is_known: bool,
) -> _Odd:
    """Rows without their part of a session's reward, the part, and the reward.

    If the reward is not known, they must be parts of one reward.
    """
    parts = [1.0] * len(rows)
    if scheme == "uniform":
        parts = [1 / len(rows)] * len(rows)
    elif scheme == "final_only":
        kinds = [case.rows.text("segment_kind", row) for row in rows]
        parts = [float(kind == "final") for kind in kinds]
        if not any(kinds):
            parts = [0.0] * (len(rows) - 1) + [1.0]
    if not is_known:
        at = int(np.argmax(parts))
        first = given[rows[at]]
        # if every part is 0, only null can be told from a number
        reward = first if first is None or not parts[at] else first / parts[at]
    due = [None if reward is None else reward * part for part in parts]
    pairs = zip(rows.tolist(), due, strict=True)
    return [(row, one, reward) for row, one in pairs if _differ(given[row], one)]


def weight_versions(case: Case, spans: Spans) -> None:
    """weight_versions are those of the row's first and last token with known weights."""
    column = case.rows.table.column("weight_versions")
    if column.null_count == len(column):  # the column is optional
        return
    of_turns = case.turns.calls.table.column("weight_versions")
    due: dict[int, dict[str, str]] = {}
    for k in np.flatnonzero(spans.stop > spans.start):
        row = int(spans.row[k])
        for one in of_turns[int(spans.call[k])].as_py() or ():
            if max(one["start"], spans.out_start[k]) < min(
                one["stop"], spans.out_stop[k]
            ):
                due.setdefault(row, {"first": one["version"]})["last"] = one["version"]
    for row, given in enumerate(column.to_pylist()):
        if given != due.get(row):
            detail = f"weight_versions is {given}, expected {due.get(row)}"
            case.report("weight_versions", detail, row)


def mm_items(case: Case) -> None:
    """The images of a row are the session's, and its content ids are theirs."""
    table, ids = case.rows.table, case.rows.ids
    turns = case.turns.calls.table
    if "mm_items" not in table.column_names:
        return
    if not has_items(turns) and not has_items(table):
        return
    images: list[set[Image]] = [set() for _ in range(len(case.turns.calls))]
    sessions = case.turns.calls.session
    for session, listed in zip(sessions, turns["mm_items"].to_pylist(), strict=True):
        images[session].update(map(same_image, listed or ()))
    for row, listed in enumerate(table.column("mm_items").to_pylist()):
        own = images[case.session[row]]
        found = image_faults(listed or (), ids[row], may_be_cut=True, known=own)
        for token, detail in found:
            case.report("mm_items", detail, row, None, token)


def _differ(given: float | None, due: float | None) -> bool:
    if given is None or due is None:
        return given is not due
    return not math.isclose(given, due, rel_tol=_ROUNDING, abs_tol=_ROUNDING)
