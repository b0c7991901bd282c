"""`output_spans`: what a policy does with every sampled token."""

from dataclasses import replace

import numpy as np
import pyarrow as pa

from trajkit.analysis.drift import codes, turn_lines
from trajkit.policies import Policy
from trajkit.policies import policy as named_policy
from trajkit.rows.linearize import find_links, linearize
from trajkit.rows.plan import NO_LIMIT, plan_rows
from trajkit.schema import LINK_REASONS, OUTPUT_KINDS, OUTPUT_SPANS
from trajkit.tables import limits
from trajkit.tables.canonical import TableLike
from trajkit.tables.ragged import Longs
from trajkit.turns.flat_buffers import aborted_calls, flat_turns, sessions_of, spans_of
from trajkit.turns.records import as_turns
from trajkit.turns.session_metadata import SessionFacts, errored, session_facts
from trajkit.turns.sessions import Sessions
from trajkit.verification.rules import consecutive

_UNKNOWN = -1
_CODES = {kind: code for code, kind in enumerate(OUTPUT_KINDS)}
_TRAINED = _CODES["trained"]
# The loss of a turn in no chain, by its link_reason; any other is quarantined.
_LINK_LOSSES = {
    "unrouted": "unrouted",
    "empty": "unrouted",
    "refused_tokens": "refused",
    "refused_truncated": "refused",
    "retried": "retried",
}
_LOSS_OF_REASON = np.array(
    [_CODES[_LINK_LOSSES.get(name, "quarantined")] for name in LINK_REASONS]
)


def output_spans(
    turns: TableLike,
    policy: str | Policy = "faithful",
    *,
    sessions: TableLike | None = None,
) -> pa.Table:
    """Say for every sampled token whether a policy trains it, where, and why not.

    Parameters
    ----------
    turns, policy, sessions
        As for `trajkit.linearize`; a session with an error trains nothing.

    Returns
    -------
    Table
        `trajkit.schema.OUTPUT_SPANS`. Per session and kind, the tokens are those of
        `trajkit.report`: ``tokens_trained`` and each ``lost_*``. Of a token that several
        rows train, each row has a line.
    """
    chosen, facts = named_policy(policy), session_facts(None, sessions)
    parts = Sessions.of(as_turns(turns)).split(limits.PART_TOKENS)
    tables = [_Outputs(part, chosen, facts).lines() for part in parts]
    return pa.concat_tables([OUTPUT_SPANS.empty_table(), *tables])


class _Outputs:
    """The sampled tokens of some sessions under a policy."""

    def __init__(self, calls: Sessions, policy: Policy, facts: SessionFacts) -> None:
        calls = calls.untrained(errored(facts.of_sessions(calls))[calls.session])
        aborted = aborted_calls(calls) & (calls.calls["trainable"] != 0)
        calls = calls if policy.train_aborted else calls.untrained(aborted)
        self._calls, self._policy, self._sessions = calls, policy, facts.table
        self._links = find_links(calls, calls.forest, policy)
        self._owners = plan_rows(calls, self._links, policy, NO_LIMIT).owners
        self._sampled = flat_turns(calls, prompts=False)
        self._offsets = self._sampled.outputs.offsets
        # one per sampled token: its call, an index in OUTPUT_KINDS, the first row that has
        # or lost it, and the call whose drift lost it
        self._call = self._sampled.outputs.owner
        self._kind = np.full(len(self._call), _UNKNOWN, np.int8)
        self._row, self._by = np.full((2, len(self._call)), -1, np.int32)
        barred = calls.calls["trainable"] == 0
        untrain = policy.missing_logprobs == "untrain"
        self._kind[~self._sampled.has_logprob & untrain] = _CODES["no_logprob"]
        self._kind[~self._sampled.unmasked] = _CODES["masked"]
        self._kind[barred[self._call]] = _CODES["untrainable"]
        self._kind[(barred & aborted)[self._call]] = _CODES["aborted"]
        # each trained token and its row, once for every row that trains it
        self._trained = self._add_rows(policy)
        self._leave_out()
        if (self._kind == _UNKNOWN).any():
            every = replace(policy, max_rows=None, keep_untrained=True, keep_empty=True)
            self._add_rows(every)
        self._add_drift()

    def _add_rows(self, policy: Policy) -> tuple[Longs, Longs]:
        """Mark the unknown tokens that the rows of a policy train or lost.

        If it is not the policy that was asked for, the rows that it has more were dropped.
        """
        rows = linearize(self._calls.table, policy, sessions=self._sessions)
        spans = spans_of(rows, self._sampled, sessions_of(rows, self._calls))
        # in an assignment, the first span is the last and counts
        spans = spans.take(np.flatnonzero(spans.kind != "duplicate")[::-1])
        at = spans.sampled(self._sampled)
        span = np.repeat(np.arange(len(spans)), spans.out_stop - spans.out_start)
        kind = np.array([_CODES[name] for name in spans.kind], np.int8)[span]
        row, trained = rows["row_index"].to_numpy()[spans.row[span]], kind == _TRAINED
        if policy is self._policy:
            self._row[at] = row
        else:
            kind[trained] = _CODES["over_max_rows"]
        unknown = self._kind[at] == _UNKNOWN
        self._kind[at[unknown]] = kind[unknown]
        return at[trained], row[trained]

    def _leave_out(self) -> None:
        """Mark the unknown tokens of calls in no chain, or in none that is selected."""
        reason, by = self._links["link_reason"], self._links["rewritten_by"]
        absent = self._links["order"] < 0
        kind, drift = np.full((2, len(absent)), _UNKNOWN, np.int32)
        if self._policy.row_selection == "main":
            kind[self._owners < 0] = _CODES["not_selected"]
        kind[absent] = _LOSS_OF_REASON[reason[absent]]
        own = np.flatnonzero(absent & (reason == LINK_REASONS.index("refused_tokens")))
        drift[own] = own
        rewritten = absent & (by >= 0)
        kind[rewritten], drift[rewritten] = _CODES["rewritten"], by[rewritten]
        unknown = self._kind == _UNKNOWN
        self._kind[unknown] = kind[self._call[unknown]]
        self._by[unknown] = drift[self._call[unknown]]

    def _add_drift(self) -> None:
        """Name the drift that lost a token; mark the tokens of rows that restarted.

        A token is lost to the first later call of its chain whose prompt departs before
        it or, unless the policy keeps the prefix, before the end of its output.
        """
        lost = (self._kind == _CODES["absorbed"]) | (self._kind == _UNKNOWN)
        parents, lcp = self._links["parent"].tolist(), self._links["lcp"]
        n_prompt = self._calls.calls["prompt_len"]
        for leaf in np.unique(self._owners[self._call[lost]]).tolist():
            chain = [leaf]
            while parents[chain[-1]] >= 0:
                chain.append(parents[chain[-1]])
            chain.reverse()
            opened, restarts = n_prompt[chain[0]], []
            for call in chain:
                restarts.append(lcp[call] < opened)
                opened = n_prompt[call] if restarts[-1] else opened
            for k, call in enumerate(chain):
                at = np.arange(*self._offsets[call : call + 2])
                at = at[lost[at]]
                if not len(at) or self._owners[call] != leaf:
                    continue
                place = n_prompt[call] + at - self._offsets[call]
                if not self._policy.keep_prefix:
                    place[:] = self._calls.path_len[call] - 1
                departs = np.minimum.accumulate(lcp[chain[k + 1 :]])
                later = k + 1 + np.searchsorted(-departs, -place)
                self._by[at] = np.array(chain)[later]
                loss = np.array(restarts)[later] & (self._kind[at] == _UNKNOWN)
                names = np.where(loss, _CODES["restarted"], _CODES["absorbed"])
                self._kind[at] = names

    def lines(self) -> pa.Table:
        rest = np.flatnonzero(self._kind != _TRAINED)
        at = np.concatenate([rest, self._trained[0]])
        row = np.concatenate([self._row[rest], self._trained[1]])
        columns = np.array([at, self._call[at], self._kind[at], row, self._by[at]])
        columns = columns[:, np.lexsort(columns)]
        runs = np.array([*consecutive(columns[0], *columns[1:])], np.int64)
        runs = runs.reshape(-1, 2)
        runs = runs[np.lexsort(columns[[3, 0]][:, runs[:, 0]])]
        at, call, kind, row, by = columns[:, runs[:, 0]]
        start = at - self._offsets[call]
        return turn_lines(
            OUTPUT_SPANS,
            self._calls,
            call,
            start,
            start + runs[:, 1],
            codes(kind, OUTPUT_KINDS),
            pa.array(row.astype(np.int32), mask=row < 0),
            # the last one is of no call
            pa.array(np.append(self._calls.turn_index, -1)[by], mask=by < 0),
        )
