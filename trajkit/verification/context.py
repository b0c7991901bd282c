"""Rows together with the turns they came from, and the violations found in them."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit.policies import Policy
from trajkit.schema import RULES, VIOLATIONS
from trajkit.schema.engine import Bools, Violation, as_lines, shown
from trajkit.tables.canonical import Rows
from trajkit.tables.ragged import Index, Longs
from trajkit.turns.flat_buffers import FlatRows, TurnTokens, aborted_calls
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
    session: Rows
    # None: unknown, so that only what is true under every policy is checked
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
        call: Index = -1,
        token: Index | None = None,
    ) -> None:
        """Add a violation; ``row`` and ``call`` (-1: none) are indices into the case's."""
        session = row_index = turn_index = None
        calls = self.turns.calls
        if row is not None:
            session = self.rows.text("session_id", row)
            row_index = self.rows.number("row_index", row)
        if call >= 0:
            turn_index = int(calls.turn_index[call])
            session = session or calls.ids[int(calls.session[call])].as_py()
        place = session, row_index, turn_index, None if token is None else int(token)
        self.found.append(Violation(rule, detail, *place))

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
            tokens &= self.turns.given
        return tokens

    @property
    def never_barred(self) -> Bools:
        """Sampled tokens that every policy, or this one, may train."""
        tokens = self.may_train
        if self.policy is None:
            aborted = aborted_calls(self.turns.calls)[self.turns.outputs.owner]
            tokens &= self.turns.given & ~aborted
        return tokens

    @property
    def may_splice(self) -> bool:
        """Whether rows may join raw outputs by text of later prompts."""
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
        splices = policy.on_drift == "splice" and policy.places_all and keeps
        return ("trained", "cut", "no_splice_point") if splices else ()

    @property
    def due(self) -> Bools:
        """Sampled tokens that some span must name, shape (n_sampled,)."""
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


def consecutive(at: Rows, *groups: npt.NDArray[Any]) -> Iterator[tuple[int, int]]:
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
