"""`output_spans`: what a policy does with every sampled token."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from trajkit._arguments import chosen_int
from trajkit.analysis import lazy_polars as pl
from trajkit.analysis.drift import codes
from trajkit.policies import Policy
from trajkit.policies import policy as named_policy
from trajkit.rows.linearize import linearize
from trajkit.rows.links import find_links
from trajkit.rows.plan import NO_LIMIT, plan_rows
from trajkit.schema import EMPTY_KINDS, LINK_REASONS, OUTPUT_KINDS, OUTPUT_SPANS
from trajkit.tables import limits
from trajkit.tables.canonical import TableLike, as_table
from trajkit.tables.ragged import Ints, Longs, Ragged
from trajkit.turns.flat_buffers import Spans, flat_turns, sessions_of, spans_of
from trajkit.turns.records import as_turns
from trajkit.turns.session_metadata import SessionFacts, errored, session_facts
from trajkit.turns.sessions import Sessions
from trajkit.turns.trainability import aborted_calls, without_aborted

_CODES = {kind: code for code, kind in enumerate(OUTPUT_KINDS)}
_UNKNOWN = -1

# The loss of a turn in no chain, by its link_reason.
_LINK_LOSSES = {
    "unrouted": "unrouted",
    "ambiguous": "quarantined",
    "superseded": "quarantined",
    "unresolved": "quarantined",
    "unresolved_ambiguous": "quarantined",
    "unresolved_kept": "quarantined",
    "chain_quarantined": "quarantined",
    "refused_tokens": "refused",
    "refused_truncated": "refused",
    "retried": "retried",
}


def output_spans(
    turns: TableLike,
    policy: str | Policy = "faithful",
    *,
    sessions: TableLike | None = None,
    max_row_tokens: int | None = None,
) -> pa.Table:
    """Say for every sampled token whether a policy trains it, where, and why not.

    Parameters
    ----------
    turns : table
        `trajkit.schema.TURNS` in full or delta form.
    policy : str or Policy
        As for `trajkit.linearize`.
    sessions : table, optional
        As for `trajkit.linearize`; a session with an error trains nothing.
    max_row_tokens : int, optional
        As for `trajkit.linearize`.

    Returns
    -------
    Table
        `trajkit.schema.OUTPUT_SPANS`. Per session and kind, the tokens are those of the
        report of `trajkit.linearize`: ``tokens_trained`` and each ``lost_*``. Of a
        token that several rows train, each row has a line.

    Examples
    --------
    >>> import trajkit as tk
    >>> turns = tk.from_records(
    ...     [
    ...         {"session_id": "a", "prompt_ids": [1], "output_ids": [2, 3]},
    ...         {"session_id": "a", "prompt_ids": [1, 2, 9], "output_ids": [4]},
    ...     ]
    ... )
    >>> spans = tk.analysis.output_spans(turns, "trl")
    >>> for line in spans.to_pylist():
    ...     print(*list(line.values())[1:])
    0 0 1 trained 0 None
    0 1 2 absorbed 0 1
    1 0 1 trained 0 None
    """
    chosen = named_policy(policy)
    cap = NO_LIMIT
    if max_row_tokens is not None:
        cap = chosen_int("max_row_tokens", max_row_tokens, 1)
    calls = Sessions.of(as_turns(as_table(turns)))
    facts = session_facts(None, sessions)
    parts = [OUTPUT_SPANS.empty_table()]
    for part in calls.split(limits.PART_TOKENS):
        parts.append(_Outputs(part, chosen, cap, facts).table())
    return pa.concat_tables(parts)


class _Outputs:
    """The sampled tokens of some sessions under a policy."""

    def __init__(
        self, calls: Sessions, policy: Policy, cap: int, facts: SessionFacts
    ) -> None:
        calls = calls.untrained(errored(facts.of_sessions(calls))[calls.session])
        self._policy, self._cap, self._facts = policy, cap, facts
        self._aborted = aborted_calls(calls) & (calls.calls["trainable"] != 0)
        self._calls = calls if policy.train_aborted else without_aborted(calls)[0]
        self._sampled = flat_turns(self._calls, prompts=False)
        self._links = find_links(self._calls, self._calls.forest, policy)
        # one per sampled token: its call, an index in OUTPUT_KINDS, a row, and the call
        # whose drift lost it
        self._call = self._sampled.outputs.owner
        self._kind = np.full(len(self._call), _UNKNOWN, np.int8)
        self._row = np.full(len(self._call), -1, np.int32)
        self._drift = np.full(len(self._call), -1, np.int32)

    def table(self) -> pa.Table:
        """The lines as `trajkit.schema.OUTPUT_SPANS`."""
        rows, pieces = self._rows(self._policy, self._cap)
        at, piece = self._add(rows, pieces)
        self._row[at] = pieces.row[piece]
        self._bar(pieces)
        self._leave_out()
        self._drop_rows()
        return self._lines(rows, pieces)

    def _rows(self, policy: Policy, cap: int) -> tuple[pa.Table, Spans]:
        """The rows under a policy, without their tokens, and their spans."""
        calls = self._calls
        rows = linearize(
            calls.table,
            policy,
            sessions=self._facts.table,
            max_row_tokens=None if cap == NO_LIMIT else cap,
        ).select(["session_id", "row_index", "turns", "spans"])
        return rows, spans_of(rows, self._sampled, sessions_of(rows, calls))

    def _add(self, rows: pa.Table, pieces: Spans) -> tuple[Longs, Longs]:
        """Mark the tokens without a mark that these spans train or lost.

        Returns the tokens and the span of each, shape (n,): the last assignment is the
        first span.
        """
        at, piece = self._tokens(pieces, ("trained", *EMPTY_KINDS))
        unknown = self._kind[at] == _UNKNOWN
        at, piece = at[unknown], piece[unknown]
        codes = np.array([_CODES.get(kind, _UNKNOWN) for kind in pieces.kind], np.int8)
        self._kind[at] = codes[piece]
        self._drift[at] = self._absorbed_by(rows, pieces)[piece]
        return at, piece

    def _tokens(self, pieces: Spans, kinds: Sequence[str]) -> tuple[Longs, Longs]:
        """The sampled tokens of some kinds of spans, last span first, and their spans.

        Values assigned to them in this order are those of a token's first span.
        """
        which = np.flatnonzero(np.isin(pieces.kind, kinds))[::-1]
        at = pieces.take(which).sampled(self._sampled)
        return at, np.repeat(which, (pieces.out_stop - pieces.out_start)[which])

    def _bar(self, pieces: Spans) -> None:
        """Mark the tokens that may not be trained, with the first row that has them."""
        sampled, call = self._sampled, self._calls.calls["trainable"] == 0
        untrain = self._policy.missing_logprobs == "untrain"
        for name, barred in (
            ("no_logprob", ~sampled.given & untrain),
            ("masked", ~sampled.unmasked),
            ("untrainable", call[self._call]),
            ("aborted", (call & self._aborted)[self._call]),
        ):
            self._kind[barred] = _CODES[name]
        at, piece = self._tokens(pieces, ["untrainable"])
        self._row[at] = pieces.row[piece]

    def _leave_out(self) -> None:
        """Mark the tokens of turns in no chain, or in no chain that is selected."""
        links = self._links
        reason, by = links["link_reason"], links["rewritten_by"]
        absent = links["order"] < 0
        kinds, drift = np.full((2, len(links)), _UNKNOWN, np.int32)
        if self._policy.row_selection == "main":
            kinds[self._plan_owners() < 0] = _CODES["not_selected"]
        losses = [_LINK_LOSSES.get(name, "unrouted") for name in LINK_REASONS]
        kinds[absent] = np.array([_CODES[loss] for loss in losses])[reason[absent]]
        own = np.flatnonzero(absent & (reason == LINK_REASONS.index("refused_tokens")))
        drift[own] = own
        rewritten = absent & (by >= 0)
        kinds[rewritten], drift[rewritten] = _CODES["rewritten"], by[rewritten]
        tokens = (self._kind == _UNKNOWN) & (kinds[self._call] != _UNKNOWN)
        self._kind[tokens] = kinds[self._call[tokens]]
        self._drift[tokens] = drift[self._call[tokens]]

    def _plan_owners(self) -> Ints:
        """The last call of the chain that trains each call's output, or -1."""
        return plan_rows(self._calls, self._links, self._policy, self._cap).owners

    def _drop_rows(self) -> None:
        """Mark the tokens of rows that the policy does not return.

        Without its limits, all of them are returned but those that restarted.
        """
        if not (self._kind == _UNKNOWN).any():
            return
        every = replace(
            self._policy, max_rows=None, keep_untrained=True, keep_empty=True
        )
        rows, pieces = self._rows(every, NO_LIMIT)
        at, piece = self._add(rows, pieces)
        into = at - self._sampled.outputs.offsets[pieces.call[piece]]
        place = pieces.start[piece] + into - pieces.out_start[piece]
        dropped = np.where(place >= self._cap, _CODES["cut"], _CODES["over_max_rows"])
        trained = pieces.kind[piece] == "trained"
        self._kind[at[trained]] = dropped[trained]
        lost = np.unique(self._call[self._kind == _UNKNOWN])
        if len(lost):
            self._restart(lost)

    def _restart(self, lost: Longs) -> None:
        """Mark the tokens of rows that restarted, of these calls.

        Only ``absorb_any`` restarts rows. A call is lost to the first prompt after it in
        its chain that departs inside its path.
        """
        lcp, parents = self._links["lcp"].tolist(), self._links["parent"].tolist()
        prompt_len = self._calls.calls["prompt_len"].tolist()
        offsets = self._sampled.outputs.offsets.tolist()
        owners = self._plan_owners()[lost]
        for leaf in np.unique(owners).tolist():
            chain = [leaf]
            while parents[chain[-1]] >= 0:
                chain.append(parents[chain[-1]])
            chain.reverse()
            # where each row of the chain begins
            opened, openers = prompt_len[chain[0]], set()
            for call in chain[1:]:
                if lcp[call] < opened:
                    opened = prompt_len[call]
                    openers.add(call)
            place = {call: k for k, call in enumerate(chain)}
            for call in lost[owners == leaf].tolist():
                k, first, end = place[call], offsets[call], offsets[call + 1]
                while end > first:
                    k += 1
                    by, kept, kind = chain[k], first, "restarted"
                    if by not in openers:
                        kind = "absorbed"
                        shared = first + lcp[by] - prompt_len[call]
                        if shared >= end:
                            continue
                        if self._policy.keep_prefix:
                            kept = max(shared, first)
                    tokens = kept + np.flatnonzero(self._kind[kept:end] == _UNKNOWN)
                    self._kind[tokens] = _CODES[kind]
                    self._drift[tokens] = by
                    end = kept

    def _absorbed_by(self, rows: pa.Table, pieces: Spans) -> Ints:
        """The call that absorbed each span: the first of its row that departs in it."""
        by = np.full(len(pieces), -1, np.int32)
        turns = Ragged.of(rows.column("turns"), -1)
        session, calls = sessions_of(rows, self._calls), self._calls.calls
        # rows that absorb have their calls in the order of turns
        called = self._calls.named(session[turns.owner], turns.values)
        for k in np.flatnonzero(pieces.kind == "absorbed").tolist():
            start, stop = turns.offsets[pieces.row[k] :][:2]
            own, call = called[start:stop], pieces.call[k]
            later = own[np.searchsorted(own, call) + 1 :]
            end = calls["prompt_len"][call] + pieces.out_stop[k]
            departs = self._links["lcp"][later] < end
            by[k] = later[departs.argmax()] if departs.any() else -1
        return by

    def _lines(self, rows: pa.Table, pieces: Spans) -> pa.Table:
        """One line per run of equal tokens, and one per further row that trains it."""
        calls, offsets = self._calls, self._sampled.outputs.offsets
        columns = (self._call, self._kind, self._row, self._drift)
        names = ("call", "kind", "row", "by")
        tokens = pl.DataFrame(dict(zip(names, columns, strict=True)))
        run = pl.struct(pl.all()).rle_id().alias("run")
        lines = (
            tokens.with_columns(run)
            .with_row_index("start")
            .group_by("run")
            .agg(
                pl.col(*names, "start").first(),
                stop=pl.last("start") + 1,
            )
        )
        spans = pieces.take(np.flatnonzero(pieces.kind == "trained"))
        begin = offsets[spans.call] + spans.out_start
        further = pl.DataFrame(
            {
                "call": spans.call,
                "kind": np.full(len(begin), _CODES["trained"]),
                "row": spans.row,
                "by": np.full(len(begin), -1),
                "start": begin,
                "stop": begin + spans.out_stop - spans.out_start,
            }
        ).filter(self._row[begin] != spans.row)
        same = pl.col(further.columns).cast(pl.Int64)
        lines = pl.concat([lines.select(same), further.select(same)])
        call, kind, row, by, start, stop = lines.sort("start", "row").to_numpy().T
        return pa.Table.from_arrays(
            [
                calls.ids.take(pa.array(calls.session[call])),
                pa.array(calls.turn_index[call]),
                pa.array((start - offsets[call]).astype(np.int32)),
                pa.array((stop - offsets[call]).astype(np.int32)),
                codes(kind, OUTPUT_KINDS),
                _named(rows.column("row_index").to_numpy(), row),
                _named(calls.turn_index, by),
            ],
            schema=OUTPUT_SPANS,
        )


def _named(values: Ints, index: Longs) -> pa.Array:
    """The value at each index, null for -1."""
    none = index < 0
    return pa.array(np.append(values, 0)[index].astype(np.int32), mask=none)
