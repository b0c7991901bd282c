"""Rows together with the turns they came from, and the violations found in them."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field

import numpy as np
import pyarrow as pa

from trajkit._arrow.canonical import Rows
from trajkit._arrow.ragged import Index, Longs
from trajkit.policies import Policy
from trajkit.schema import RULES, VIOLATIONS
from trajkit.turns.flat_buffers import FlatRows, TurnTokens
from trajkit.turns.session_metadata import errored
from trajkit.turns.trainability import aborted_calls
from trajkit.turns.turn_rules import Bools


@dataclass(frozen=True, slots=True)
class Violation:
    """A row of `trajkit.schema.VIOLATIONS`."""

    session_id: str | None
    row_index: int | None
    turn_index: int | None
    token: int | None
    rule: str
    detail: str


def violations_table(
    found: list[Violation], session_ids: Iterable[str | None] = ()
) -> pa.Table:
    """The violations as a table, sorted by session and row.

    Violations without a session come first, those without a row come last in their
    session. Sessions follow ``session_ids``, then the order in which they were found.
    """
    sessions = {name: k for k, name in enumerate((None, *session_ids))}
    for one in found:
        sessions.setdefault(one.session_id, len(sessions))
    last = np.iinfo(np.int64).max

    def place(one: Violation) -> tuple[int, ...]:
        row = last if one.row_index is None else one.row_index
        turn = -1 if one.turn_index is None else one.turn_index
        token = -1 if one.token is None else one.token
        rest = [token, RULES.index(one.rule)]
        rest.insert(0 if one.row_index is None else 2, turn)
        return sessions[one.session_id], row, *rest

    lines = [asdict(one) for one in sorted(found, key=place)]
    return pa.Table.from_pylist(lines, VIOLATIONS)


@dataclass(frozen=True, slots=True)
class Case:
    """Complete sessions: their rows, their turns, and the options of the check."""

    rows: FlatRows
    turns: TurnTokens
    # the session of each row in ``turns.calls``, shape (n_rows,)
    session: Rows
    # None: unknown
    policy: Policy | None
    # max_row_tokens. None: no row is cut
    cap: int | None
    # SESSIONS of the sessions
    facts: pa.Table
    found: list[Violation] = field(default_factory=list)

    def report(
        self,
        rule: str,
        detail: str,
        row: Index | None = None,
        call: Index | None = None,
        token: Index | None = None,
    ) -> None:
        """Add a violation.

        ``row`` and ``call`` are indices into the case's; a call of -1 is none.
        """
        session = row_index = turn_index = None
        if row is not None:
            session = self.rows.text("session_id", row)
            row_index = self.rows.number("row_index", row)
        if call is not None and call >= 0:
            calls = self.turns.calls
            turn_index = int(calls.turn_index[call])
            if session is None:
                at = np.searchsorted(calls.offsets, call, side="right") - 1
                session = str(calls.ids[int(at)].as_py())
        at_token = None if token is None else int(token)
        self.found.append(
            Violation(session, row_index, turn_index, at_token, rule, detail)
        )

    @property
    def trainable(self) -> Bools:
        """Calls that may be trained, shape (n_calls,)."""
        calls = self.turns.calls
        failed = errored(self.facts)
        flags: Bools = calls.calls["trainable"].astype(np.bool_)
        if self.policy is not None and not self.policy.train_aborted:
            flags &= ~aborted_calls(calls)
        return flags & ~failed[calls.session]

    @property
    def trains_again(self) -> bool:
        """Whether a token may train in several rows."""
        return self.policy is None or self.policy.train_in == "every"

    @property
    def splices(self) -> bool:
        """Whether rows join raw outputs by text of later prompts."""
        return self.policy is not None and self.policy.on_drift == "splice"

    @property
    def routed(self) -> Bools:
        """Calls that the policy can route, shape (n_calls,).

        Routes by messages skip calls with an empty list of messages, unless tokens
        decide between equal replies.
        """
        policy, requests = self.policy, self.turns.calls.requests
        by_messages = policy is None or policy.parent_by in ("messages", "agents")
        by_tokens = (
            policy is not None
            and policy.parent_by == "messages"
            and policy.tie_break == "tokens"
        )
        if not by_messages or by_tokens:
            return np.ones(len(requests), np.bool_)
        found: Bools = (requests["n_keys"] != 0) | (requests["shared"] != 0)
        return found

    @property
    def may_train(self) -> Bools:
        """Sampled tokens that may be trained, shape (n_sampled,)."""
        tokens = self.trainable[self.turns.outputs.owner] & self.turns.unmasked
        if self.policy is not None and self.policy.missing_logprobs == "untrain":
            tokens &= self.turns.given
        return tokens

    @property
    def must_train(self) -> Bools:
        """Sampled tokens that some row must train, shape (n_sampled,).

        All are False if the policy may lose tokens: it absorbs, rewrites, quarantines
        or omits rows. Such a policy only promises how often a token trains. Splicing
        policies are checked by `trajkit.verification.splice_rules.accounted_for`.
        """
        calls, outputs = self.turns.calls, self.turns.outputs
        policy = self.policy
        if policy is None or not policy.keeps_all:
            return np.zeros(len(outputs.values), np.bool_)
        owner = outputs.owner
        tokens = self.routed[owner] & self.may_train
        if self.cap is not None:
            at = np.arange(len(owner)) - outputs.offsets[owner]
            tokens &= calls.calls["prompt_len"][owner] + at < self.cap
        return tokens


def consecutive(at: Rows, group: Longs) -> Iterator[tuple[int, int]]:
    """Ranges of consecutive positions within one group: first index in ``at``, length.

    Examples
    --------
    >>> list(consecutive(np.array([3, 4, 5, 9]), np.array([0, 0, 1, 1])))
    [(0, 2), (2, 1), (3, 1)]
    """
    breaks = (np.diff(at) != 1) | (np.diff(group) != 0)
    first = np.flatnonzero(np.concatenate([[len(at) > 0], breaks]))
    lengths = np.diff(np.append(first, len(at)))
    return zip(first.tolist(), lengths.tolist(), strict=True)
