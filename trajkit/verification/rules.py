"""The rules of rows with spans: what rows and turns show together.

Each rule takes a `Case` and reports violations to it. Of a policy a rule knows only the
choices that `Case` asks for. Loops run over rows, spans or violations, never over tokens.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, get_args

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit.policies import Policy, Rewards
from trajkit.schema import EMPTY_KINDS, RULES, SPAN_KINDS, VIOLATIONS
from trajkit.schema.engine import Bools, Violation, as_lines, shown
from trajkit.tables.ragged import Array, Index, Ints, Longs, Ragged
from trajkit.turns.flat_buffers import (
    FlatRows,
    Spans,
    TurnTokens,
    aborted_calls,
    spans_of,
)
from trajkit.turns.images import Image, has_items, image_faults, same_image
from trajkit.turns.session_metadata import errored

_ROUNDING = 1e-9  # a weight is one division away from the counts


def violations_table(
    found: list[Violation], session_ids: Iterable[str | None] = ()
) -> pa.Table:
    """The violations as a table, sorted by session and row.

    Violations without a session come first, those without a row come last in their
    session. Sessions follow ``session_ids``, then the order in which they were found.
    """
    names = (None, *session_ids, *(one.session_id for one in found))
    ranks = {name: k for k, name in enumerate(dict.fromkeys(names))}

    def rank(one: Violation) -> tuple[float, ...]:
        turn, token = (-1 if n is None else n for n in (one.turn_index, one.token))
        rest = token, RULES.index(one.rule)
        if one.row_index is None:
            return ranks[one.session_id], math.inf, turn, *rest
        return ranks[one.session_id], one.row_index, *rest, turn

    return as_lines(sorted(found, key=rank), VIOLATIONS)


@dataclass(frozen=True, slots=True)
class Case:
    """Complete sessions: their rows, their turns, and the options of the check."""

    rows: FlatRows
    turns: TurnTokens
    # the session of each row in ``turns.calls``, shape (n_rows,)
    session: Longs
    # None: unknown, so that only what is true under every policy is checked
    policy: Policy | None
    # max_row_tokens. None: no row is cut
    cap: int | None
    # SESSIONS of the sessions
    facts: pa.Table
    # whether the rows have spans
    has_spans: bool
    violations: list[Violation] = field(default_factory=list)

    def report(
        self,
        rule: str,
        detail: str,
        row: Index | None = None,
        call: Index = -1,
        token: Index | None = None,
    ) -> None:
        """Add a violation; ``row`` and ``call`` (-1: none) are indices into the case's."""
        session = row_index = turn_index = None
        calls = self.turns.calls
        if row is not None:
            session = self.rows.value("session_id", row)
            row_index = self.rows.value("row_index", row)
        if call >= 0:
            turn_index = int(calls.turn_index[call])
            session = session or calls.ids[int(calls.session[call])].as_py()
        place = session, row_index, turn_index, None if token is None else int(token)
        self.violations.append(Violation(rule, detail, *place))

    def report_tokens(
        self, rule: str, at: Longs, words: Callable[[int, int], str], *groups: Longs
    ) -> None:
        """Add a violation for each run of tokens of one row and one of each group.

        ``at`` are positions in the concatenated rows, and the first group their calls.
        ``words`` are of the index of the run's first token in ``at``, and its length.
        """
        offsets = self.rows.ids.offsets
        row = np.searchsorted(offsets, at, side="right") - 1
        for k, n in consecutive(at, row, *groups):
            token = at[k] - offsets[row[k]]
            self.report(rule, words(k, n), row[k], groups[0][k], token)

    def expect(
        self,
        name: str,
        due: Iterable[object],
        words: str,
        *more: Sequence[Any] | Longs,
        rule: str | None = None,
        token: Longs | None = None,
    ) -> None:
        """Add a violation for each row whose value of a column is not the one of ``due``.

        That of ``due`` and of ``more`` fill the template ``words``. The rule has the
        column's name, if there is no other.
        """
        given = self.rows.table.column(name).to_pylist()
        for k, (own, one) in enumerate(zip(given, due, strict=True)):
            if not same(own, one):
                rest = words.format(shown(one), *(shown(values[k]) for values in more))
                at = None if token is None else token[k]
                self.report(rule or name, f"{name} is {shown(own)}, {rest}", k, -1, at)

    def calls_of(self, row: Index) -> range:
        return self.turns.calls_of(int(self.session[row]))

    def rows_by_session(self) -> list[Longs]:
        order = np.argsort(self.session, kind="stable")
        edges = np.flatnonzero(np.diff(self.session[order])) + 1
        return np.split(order, edges) if len(order) else []

    @property
    def may_train(self) -> Bools:
        """Sampled tokens that some policy, or this one, may train, shape (n_sampled,)."""
        calls = self.turns.calls
        flags: Bools = calls.calls["trainable"].astype(np.bool_)
        if self.policy is not None and not self.policy.train_aborted:
            flags &= ~aborted_calls(calls)
        flags &= ~errored(self.facts)[calls.session]
        tokens = flags[self.turns.outputs.owner] & self.turns.unmasked
        if self.policy is not None and self.policy.missing_logprobs == "untrain":
            tokens &= self.turns.has_logprob
        return tokens

    @property
    def never_barred(self) -> Bools:
        """Sampled tokens that every policy, or this one, may train."""
        tokens = self.may_train
        if self.policy is None:
            aborted = aborted_calls(self.turns.calls)[self.turns.outputs.owner]
            tokens &= self.turns.has_logprob & ~aborted
        return tokens

    @property
    def may_splice(self) -> bool:
        return self.policy is None or self.policy.on_drift == "splice"

    @property
    def accounts(self) -> tuple[str, ...]:
        """The kinds of spans that must name every token of `due`.

        Empty if the policy may lose tokens in silence.
        """
        policy = self.policy
        if policy is None:
            return ()
        if policy.keeps_all:
            return ("trained",)
        keeps = policy.keep_untrained and policy.keep_empty and not policy.max_rows
        splices = self.has_spans and policy.on_drift == "splice" and policy.places_all
        return ("trained", "cut", "no_splice_point") if splices and keeps else ()

    @property
    def due(self) -> Bools:
        calls, outputs, policy = self.turns.calls, self.turns.outputs, self.policy
        owner, tokens = outputs.owner, self.may_train
        if policy is None or not self.accounts:
            return np.zeros(len(owner), np.bool_)
        by_tokens = policy.parent_by == "messages" and policy.tie_break == "tokens"
        if policy.parent_by in ("messages", "agents") and not by_tokens:
            # such routes skip calls with an empty list of messages
            requests = calls.requests
            tokens &= ((requests["n_keys"] != 0) | (requests["shared"] != 0))[owner]
        if self.cap is not None:
            at = np.arange(len(owner)) - outputs.offsets[owner]
            # a row that is cut reports the rest of its last output
            at = np.where("cut" in self.accounts, 0, at)
            tokens &= calls.calls["prompt_len"][owner] + at < self.cap
        return tokens


def consecutive(at: Longs, *groups: Array) -> Iterator[tuple[int, int]]:
    """Ranges of consecutive positions within one group: first index in ``at``, length.

    Examples
    --------
    >>> list(consecutive(np.array([3, 4, 5, 9]), np.array([0, 0, 1, 1])))
    [(0, 2), (2, 1), (3, 1)]
    """
    breaks = np.diff(at) != 1
    for group in groups:
        breaks |= group[1:] != group[:-1]
    first = np.flatnonzero(np.concatenate([[len(at) > 0], breaks]))
    lengths = np.diff(np.append(first, len(at)))
    return zip(first.tolist(), lengths.tolist(), strict=True)


def same(given: object, due: object) -> bool:
    if isinstance(given, float) and isinstance(due, float):
        return math.isclose(given, due, rel_tol=_ROUNDING, abs_tol=_ROUNDING)
    return given == due


def count(n: int) -> str:
    return f"{n} token" if n == 1 else f"{n} tokens"


def check_rows(case: Case, known: tuple[str, ...], weigh_by: str) -> None:
    """Report every violation; ``known`` names the metadata that the caller gave."""
    spans = _well_formed(case, spans_of(case.rows.table, case.turns, case.session))
    trained = spans.take(np.flatnonzero(spans.kind == "trained"))
    _lengths(case)
    _span_tokens(case, spans)
    untrainable(case, spans)
    mask_and_logprobs(case, trained)
    each_once(case, spans)
    _row_tokens(case, spans, trained)
    _turns_of_rows(case, spans)
    _order_and_prefixes(case)
    _sums(case, trained, weigh_by)
    _metadata(case, known)
    _weight_versions(case, spans)
    _mm_items(case)


def _lengths(case: Case) -> None:
    rows, ids = case.rows, case.rows.ids
    n_ids = ids.lengths
    most = n_ids if case.cap is None else np.minimum(n_ids, case.cap)
    for n, text in (
        (rows.n_mask, "loss_mask has {} values, input_ids has {}"),
        (rows.n_logprobs, "logprobs has {} values, input_ids has {}"),
        (most, "max_row_tokens is {}, the row has {}"),
    ):
        for row in np.flatnonzero(n != n_ids):
            detail = text.format(n[row], n_ids[row])
            case.report("length", detail, row, -1, min(n[row], n_ids[row]))
    complete = np.repeat(rows.n_mask == n_ids, n_ids)
    for text, null in (
        ("input_ids is null or negative", ids.values < 0),
        ("loss_mask is null", complete & ~rows.has_mask),
    ):
        for at in np.flatnonzero(null):
            row = ids.owner[at]
            case.report("null", text, row, -1, at - ids.offsets[row])


def _well_formed(case: Case, spans: Spans) -> Spans:
    """The spans that name a range of their row and a range of an output.

    Reports every other span once, under the first rule that it breaks.
    """
    n_ids = case.rows.ids.lengths[spans.row]
    out_len = case.turns.calls.calls["out_len"][np.maximum(spans.call, 0)]
    empty = np.isin(spans.kind, EMPTY_KINDS)
    before = np.where(spans.index == 0, 0, np.append(0, spans.stop)[: len(spans)])
    size, out_size = spans.stop - spans.start, spans.out_stop - spans.out_start
    outside = (spans.start < 0) | (size < 0) | (spans.stop > n_ids)
    no_range = (spans.out_start < 0) | (out_size <= 0) | (spans.out_stop > out_len)
    uneven = size != np.where(empty, 0, out_size)
    cut = (spans.kind == "cut") & (case.cap is None)
    kinds = f"has no kind of {', '.join(SPAN_KINDS)}"
    unlike = "is neither as long as its output range nor empty, as its kind is"
    good = np.ones(len(spans), np.bool_)
    for bad, rule, words in (
        (spans.broken, "null", "has a null"),
        (spans.call < 0, "span_turn", "names a turn that is not in the session"),
        (~np.isin(spans.kind, SPAN_KINDS), "span_kind", kinds),
        (outside, "span_place", "reaches outside its row"),
        (spans.start < before, "span_place", "overlaps the previous span"),
        (no_range, "span_range", "names a range outside its output"),
        (uneven, "span_range", unlike),
        (cut, "span_kind", "is lost, but no row is truncated"),
    ):
        for k in np.flatnonzero(bad & good):
            _report_span(case, spans, k, rule, words)
        good &= ~bad
    return spans.take(np.flatnonzero(good))


def _report_span(case: Case, spans: Spans, k: Index, rule: str, words: str) -> None:
    name = f"spans[{spans.index[k]}]" if case.has_spans else "the range"
    detail = (
        f"{name} ({spans.start[k]}:{spans.stop[k]}, turn "
        f"{spans.turn_index[k]}, output {spans.out_start[k]}:{spans.out_stop[k]}, "
        f"{spans.kind[k]}) {words}"
    )
    case.report(rule, detail, spans.row[k], spans.call[k], spans.start[k])


def _span_tokens(case: Case, spans: Spans) -> None:
    spans = spans.take(np.flatnonzero(~np.isin(spans.kind, EMPTY_KINDS)))
    at = spans.tokens(case.rows.ids)
    owner = np.repeat(np.arange(len(spans)), spans.stop - spans.start)
    here = case.rows.ids.values[at]
    due = case.turns.outputs.values[spans.sampled(case.turns)]
    bad = np.flatnonzero(here != due)
    words = "{} differ from the output: the first is {}, the turn sampled {}"
    case.report_tokens(
        "span_tokens",
        at[bad],
        lambda k, n: words.format(count(n), here[bad[k]], due[bad[k]]),
        spans.call[owner[bad]],
        owner[bad],
    )


def untrainable(case: Case, spans: Spans) -> None:
    outputs = case.turns.outputs
    start = outputs.offsets[spans.call]

    def n_of(tokens: Bools) -> Longs:
        sums = np.append(0, np.cumsum(tokens))
        n: Longs = sums[start + spans.out_stop] - sums[start + spans.out_start]
        return n

    called = spans.kind == "untrainable"
    wrong = np.where(called, n_of(case.never_barred), n_of(~case.may_train))
    for k in np.flatnonzero(wrong):
        whole = wrong[k] == outputs.lengths[spans.call[k]]
        what = "a turn" if whole else count(wrong[k])
        words = "may be trained" if called[k] else "may not be trained"
        _report_span(case, spans, k, "untrainable", f"covers {what} that {words}")


def mask_and_logprobs(case: Case, trained: Spans) -> None:
    """The mask is true exactly for the tokens of trained spans. Logprobs are the engine's
    there, and null for all others.
    """
    rows, ids, turns, policy = case.rows, case.rows.ids, case.turns, case.policy
    at, source = trained.tokens(ids), trained.sampled(turns)
    calls, due = np.full(len(ids.values), -1), np.zeros(len(ids.values), np.float32)
    calls[at] = np.repeat(trained.call, trained.stop - trained.start)
    is_trained, given = calls >= 0, np.zeros(len(ids.values), np.bool_)
    due[at], given[at] = turns.logprobs[source], turns.has_logprob[source]
    bad = np.flatnonzero((rows.mask != is_trained) & rows.has_mask)

    def of_mask(k: int, n: int) -> str:
        if is_trained[bad[k]]:
            return f"loss_mask is false for {count(n)} of a trained span"
        where = "outside trained spans" if case.has_spans else "of no turn's output"
        return f"loss_mask is true for {count(n)} {where}"

    case.report_tokens("mask", bad, of_mask, calls[bad])
    if case.has_spans and (policy is None or policy.missing_logprobs == "null_row"):
        # a row without all of its logprobs may have none
        nulled = np.bincount(ids.owner[at], ~given[at], len(ids)) > 0
        if policy is None:
            nulled &= np.bincount(ids.owner, rows.has_logprob, len(ids)) == 0
        given &= ~nulled[ids.owner]
    # `_lengths` reports lists of another length
    has_list = rows.n_logprobs == ids.lengths if case.has_spans else rows.n_logprobs > 0
    complete, has = np.repeat(has_list, ids.lengths), rows.has_logprob
    if not case.has_spans:
        complete &= is_trained
        # other systems write 0.0 where there is no logprob
        has = np.where(rows.logprobs == 0, given, has)
    differ = (has != given) | (given & (rows.logprobs != due))
    odd = np.flatnonzero(complete & differ)

    def of_logprobs(k: int, n: int) -> str:
        token = odd[k]
        here = rows.logprobs[token] if rows.has_logprob[token] else "null"
        why = "as the engine gave" if is_trained[token] else "since it is not trained"
        right = f"{due[token]}, the engine's" if given[token] else f"null, {why}"
        return f"{count(n)}: the first has {here}, expected {right}"

    case.report_tokens("logprob", odd, of_logprobs, calls[odd])


def each_once(case: Case, spans: Spans) -> None:
    """A sampled token is trained or lost in one span at most, or in one of each row.

    Tokens that the policy promises to train, or to name as lost, are in such a span.
    """
    counted = spans.take(np.flatnonzero(np.isin(spans.kind, ("trained", *EMPTY_KINDS))))
    source = counted.sampled(case.turns)
    owner = np.repeat(np.arange(len(counted)), counted.out_stop - counted.out_start)
    key = source
    if case.policy is None or case.policy.train_in == "every":
        key = source + counted.row[owner] * len(case.turns.outputs.values)
    order = np.argsort(key, kind="stable")
    again = np.sort(order[1:][np.diff(key[order]) == 0])
    for first, n in consecutive(again, owner[again]):
        k = owner[again[first]]
        call, token = counted.call[k], counted.start[k]
        if counted.kind[k] == "trained":
            start = case.turns.outputs.offsets[call] + counted.out_start[k]
            token += source[again[first]] - start
        where = "span trains or reports as lost" if case.has_spans else "row trains"
        detail = f"{count(n)} that an earlier {where}"
        case.report("trained_twice", detail, counted.row[k], call, token)
    not_trained(case, source[np.isin(counted.kind, case.accounts)[owner]])


def not_trained(case: Case, source: Longs) -> None:
    """Report tokens that are due and not in ``source``, positions in outputs."""
    outputs, absent = case.turns.outputs, case.due
    absent[source] = False
    lost = " or reports as lost" if len(case.accounts) > 1 else ""
    bad = np.flatnonzero(absent)
    for first, n in consecutive(bad, outputs.owner[bad]):
        call = outputs.owner[bad[first]]
        sampled = f"{count(n)} of {outputs.lengths[call]} sampled"
        token = bad[first] - outputs.offsets[call]
        case.report(
            "not_trained", f"{sampled} that no row trains{lost}", None, call, token
        )


def _row_tokens(case: Case, spans: Spans, trained: Spans) -> None:
    """A row is the path of its last turn, and its trained tokens are in their context.

    A spliced row is no path: there, each output follows the end of its prompt.
    """
    in_context = trained.in_context(case.rows.ids, case.turns)
    reasons = case.turns.calls.table.column("finish_reason").to_pylist()
    numbers = case.turns.calls.turn_index
    for row in range(len(case.rows.ids)):
        named = case.rows.value("last_turn", row)
        calls = case.calls_of(row)
        own = [
            call
            for call in calls
            if named in (None, numbers[call]) and _is_path(case, row, call)
        ]
        if not own and case.may_splice:
            own = _spliced(case, row, spans)
        else:
            context(case, trained, np.flatnonzero(trained.row == row), in_context)
        if own:
            reason, due = case.rows.value("finish_reason", row), reasons[own[0]]
            if reason not in [reasons[call] for call in own]:
                detail = f"finish_reason is {reason!r}, the last turn has {due!r}"
                case.report("finish_reason", detail, row, own[0])
        elif others := [call for call in calls if _is_path(case, row, call)]:
            turn = numbers[others[0]]
            detail = f"last_turn is {named}, but turn {turn} has the row's tokens"
            case.report("row_tokens", detail, row, others[0])
        else:
            last = np.append(-1, spans.call[spans.row == row])[-1]
            detail = "the row is not the prompt and output of any turn"
            if case.may_splice:
                detail += ", nor outputs joined by their prompts"
            ids = case.rows.ids[row]
            shared = (case.turns.shared(ids, one) for one in calls)
            case.report("row_tokens", detail, row, last, max(shared, default=0))


def _is_path(case: Case, row: Index, call: int) -> bool:
    ids, n, policy = case.rows.ids[row], case.turns.path_len(call), case.policy
    if case.turns.shared(ids, call) != len(ids):
        return False
    if len(ids) == (n if case.cap is None else min(n, case.cap)):
        return True
    # a later call that did not fit may have replaced the rest of the last output
    cuts_calls = policy is None or (
        policy.truncate_at == "calls" and policy.keep_prefix
    )
    return case.cap is not None and cuts_calls


def context(case: Case, trained: Spans, mine: Longs, in_context: Longs) -> None:
    sampled_at = case.turns.calls.calls["prompt_len"][trained.call] + trained.out_start
    for k in mine[in_context[mine] < (trained.stop - trained.start)[mine]]:
        row, call, start = trained.row[k], trained.call[k], trained.start[k]
        first = start + in_context[k]
        if sampled_at[k] != start:
            detail = f"trained at {start}, sampled at {sampled_at[k]}"
        else:
            departs = case.turns.shared(case.rows.ids[row], int(call))
            # `_span_tokens` reports the differing token itself
            first += departs >= start
            detail = f"the row differs from the turn's path from token {departs} on"
        if first < trained.stop[k]:
            case.report("context", detail, row, call, first)


def _spliced(case: Case, row: int, spans: Spans) -> list[int]:
    """The last turn of a row in which each output follows the end of its prompt.

    A turn without a span may be between two outputs; there, nothing is compared.
    """
    ids, calls = case.rows.ids[row], case.turns.calls
    mine = spans.take(np.flatnonzero((spans.row == row) & (spans.stop > spans.start)))
    listed = case.rows.table.column("turns")[row].as_py()
    numbers = calls.turn_index[mine.call].tolist() if listed is None else listed
    order = _named(case, row, numbers).tolist()
    after = dict(zip(order, [-1, *order], strict=False))
    end, before = 0, -1
    for start, stop, call in zip(
        mine.start, mine.stop, mine.call.tolist(), strict=True
    ):
        text, prompt = ids[end:start], case.turns.prompts[call]
        due = prompt if before < 0 else prompt[max(len(prompt) - len(text), 0) :]
        if call == before:
            due = text[:0]
        skips = call != before and after.get(call) != before
        if not skips and not np.array_equal(text, due):
            return []
        end, before = stop, call
    last = case.rows.value("last_turn", row)
    if not order or order[-1] < 0 or last not in (None, numbers[-1]):
        return []
    ends = case.cap is not None or (end == len(ids) and before == order[-1])
    return order[-1:] if ends or not calls.calls["out_len"][order[-1]] else []


def _named(case: Case, row: int, turns: list[int | None]) -> Longs:
    session = np.full(len(turns), case.session[row])
    numbers = [-1 if turn is None else turn for turn in turns]
    return case.turns.calls.named(session, np.array(numbers, np.int64))


def _turns_of_rows(case: Case, spans: Spans) -> None:
    """A row's turns end with last_turn and contain the turns of its spans, in order.

    Its prompt_length is that of the first; its flags are those of its turns. The flags of
    a chain may be those of turns that the row lacks.
    """
    table, calls = case.rows.table, case.turns.calls.calls
    of_row = case.policy is not None and case.policy.flag_scope == "row"
    first: list[object] = []
    names = ("use_tool", "ill_formed")
    given = {name: table.column(name).to_pylist() for name in names}
    flags: dict[str, list[object]] = {name: [] for name in names}
    for row, listed in enumerate(table.column("turns").to_pylist()):
        named = spans.call[(spans.row == row) & (spans.kind != "no_splice_point")]
        order = named
        if listed is not None:
            own = _named(case, row, listed)
            faults = [*_unlisted(case, row, listed, own, named)]
            for fault in faults:
                case.report("turns", f"turns {listed} {fault}", row)
            order = named if faults else own
        first.append(calls["prompt_len"][order[0]] if len(order) else "no turn")
        for name in names:
            flag = bool(calls[name][order].any())
            flags[name].append(flag if flag or of_row else given[name][row])
    n = table.column("prompt_length").to_numpy()
    case.expect("prompt_length", first, "the row's first turn has {}", token=n)
    if of_row:
        reasons = table.column("finish_reason").to_pylist()
        flags["truncated"] = [reason == "length" for reason in reasons]
    for name, due in flags.items():
        case.expect(name, due, "the row's turns give {}", rule="flags")


def _unlisted(
    case: Case, row: int, listed: list[int], order: Longs, named: Longs
) -> Iterator[str]:
    last = case.rows.value("last_turn", row)
    if last is not None and listed[-1:] != [last]:
        yield f"do not end with last_turn {last}"
    rest = iter(order.tolist())
    for call, _ in groupby(named.tolist()):
        if call not in rest:  # which leaves those after it
            yield f"lack {case.turns.calls.turn_index[call]} or its order"
            break
    if (order < 0).any():
        yield "are not all in the session"


def _order_and_prefixes(case: Case) -> None:
    """row_index counts the rows of a session from 0. parent_row and shared_length give
    the longest shared prefix, the first on ties.
    """
    table = case.rows.table
    names, n = (table.column(one).to_numpy() for one in ("row_index", "shared_length"))
    parents: list[int | None] = [None] * len(names)
    rank, most = np.zeros((2, len(names)), np.int64)
    for rows in case.rows_by_session():
        rank[rows] = np.arange(len(rows))
        first, most[rows] = longest_shared(case.rows.ids, rows)
        for k, row in zip(first, rows, strict=True):
            parents[row] = int(names[rows[k]]) if most[row] else None
    case.expect("row_index", rank, "it is row {} of the session")
    end = np.minimum(n, most)
    case.expect("shared_length", most, "an earlier row shares {}", token=end)
    case.expect("parent_row", parents, "the first row that shares most is {}")


def longest_shared(ids: Ragged, rows: Longs) -> tuple[Longs, Longs]:
    """For each of ``rows``, the earlier row with the longest shared prefix, and its
    length.

    The first on ties, as an index into ``rows``; 0 if nothing is shared. Shape
    (n_rows,).
    """
    n = len(rows)
    runs: list[Ints] = [ids[row] for row in rows]
    # In sorted order, two rows share the minimum over the neighbours between them.
    order = np.array(sorted(range(n), key=lambda k: runs[k].tobytes()), np.int64)
    rank = np.argsort(order)
    between = np.array([_core.lcp(runs[a], runs[b]) for a, b in pairwise(order)])
    first, shared = np.zeros((2, n), np.int64)
    for k in range(1, n):
        below = np.minimum.accumulate(between[: rank[k]][::-1])[::-1]
        above = np.minimum.accumulate(between[rank[k] :])
        earlier = np.concatenate([below, [0], above])[rank[:k]]
        first[k] = np.argmax(earlier)
        shared[k] = earlier[first[k]]
    return np.where(shared > 0, first, 0), shared


def _sums(case: Case, trained: Spans, weigh_by: str) -> None:
    """rollout_mask_sum and row_weight count the tokens that the session's rows train.

    Under ``weigh_by="constant"``, every row that trains has one weight.
    """
    session, sizes = case.session, trained.stop - trained.start
    mine = np.bincount(trained.row, sizes, len(session)).astype(np.int64)
    total = np.bincount(session, mine).astype(np.int64)[session]
    case.expect("rollout_mask_sum", total, "the session's rows train {} tokens")
    share = mine if weigh_by == "token" else (mine > 0).astype(np.int64)
    whole = total
    if weigh_by == "row":
        whole = np.bincount(session, share).astype(np.int64)[session]
    due = [float(a / b) if b else None for a, b in zip(share, whole, strict=True)]
    if weigh_by == "constant":
        weights = case.rows.table.column("row_weight").to_pylist()
        own = next((w for w, t in zip(weights, share, strict=True) if t and w), None)
        parts = zip(share, total, strict=True)
        due = [None if not n else own if t else 0.0 for t, n in parts]
    case.expect("row_weight", due, "expected {} ({} of {})", share, whole)


def _metadata(case: Case, known: tuple[str, ...]) -> None:
    """reward and group_id are the session's if known, else equal in all its rows.

    A value is known if its name is in ``known`` or if it is not null. A policy may give
    each row its share of the reward.
    """
    names = "group_id", "reward"
    groups, rewards = (case.rows.table.column(name).to_pylist() for name in names)
    facts = [case.facts.column(name).to_pylist() for name in names]
    schemes: Sequence[str] = get_args(Rewards)
    if case.policy is not None:
        schemes = (case.policy.rewards,)
    due_groups, due_rewards = list(groups), list(rewards)
    for rows in case.rows_by_session():
        group, reward = (values[case.session[rows[0]]] for values in facts)
        if "group_id" not in known and group is None:
            group = groups[rows[0]]
        own = [rewards[row] for row in rows]
        kinds = [case.rows.value("segment_kind", row) for row in rows]
        tried = []
        for scheme in schemes:
            parts, whole = _parts(kinds, scheme), reward
            if "reward" not in known and reward is None:
                # that of the first row with a part; without one, only null can be told
                at = int(np.argmax(parts))
                whole = own[at]
                if whole is not None and parts[at]:
                    whole /= parts[at]
            due = [None if whole is None else whole * part for part in parts]
            n_odd = sum(not same(a, b) for a, b in zip(own, due, strict=True))
            tried.append((n_odd, due))
        _, best = min(tried, key=lambda one: one[0])
        for row, one in zip(rows, best, strict=True):
            due_groups[row], due_rewards[row] = group, one
    case.expect("group_id", due_groups, "the session's is {}")
    case.expect("reward", due_rewards, "expected {}, its part of the session's")


def _parts(kinds: list[str | None], scheme: str) -> list[float]:
    n = len(kinds)
    if scheme == "uniform":
        return [1 / n] * n
    if scheme == "final_only" and any(kinds):
        return [float(kind == "final") for kind in kinds]
    return [0.0] * (n - 1) + [1.0] if scheme == "final_only" else [1.0] * n


def _weight_versions(case: Case, spans: Spans) -> None:
    column = case.rows.table.column("weight_versions")
    if column.null_count == len(column):  # the column is optional
        return
    of_turns = case.turns.calls.table.column("weight_versions")
    due: list[dict[str, str] | None] = [None] * len(column)
    for k in np.flatnonzero(spans.stop > spans.start):
        row = int(spans.row[k])
        for one in of_turns[int(spans.call[k])].as_py() or ():
            start = max(one["start"], spans.out_start[k])
            if start < min(one["stop"], spans.out_stop[k]):
                before = due[row] or {"first": one["version"]}
                due[row] = {**before, "last": one["version"]}
    case.expect("weight_versions", due, "expected {}")


def _mm_items(case: Case) -> None:
    table, turns = case.rows.table, case.turns.calls.table
    if "mm_items" not in table.column_names:
        return
    if not has_items(turns) and not has_items(table):
        return
    images: list[set[Image]] = [set() for _ in range(len(case.turns.calls))]
    sessions = case.turns.calls.session
    for session, listed in zip(sessions, turns["mm_items"].to_pylist(), strict=True):
        images[session].update(map(same_image, listed or ()))
    for row, listed in enumerate(table.column("mm_items").to_pylist()):
        own, ids = images[case.session[row]], case.rows.ids[row]
        for token, detail in image_faults(
            listed or (), ids, may_be_cut=True, known=own
        ):
            case.report("mm_items", detail, row, -1, token)
