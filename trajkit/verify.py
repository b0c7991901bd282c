"""Whether rows keep every promise: violations as a table, all of them."""

from collections.abc import Iterator
from typing import get_args

import numpy as np
import pyarrow as pa

from trajkit import checks_claims, checks_rows, checks_splice
from trajkit.calls import Calls, read_calls
from trajkit.case import Case, Violation, violations_table
from trajkit.checks_rows import WeighBy
from trajkit.errors import PolicyError, SchemaError
from trajkit.flat import flat_rows, flat_turns, pieces_of, sessions_of
from trajkit.locate import foreign_rows, verify_located
from trajkit.picked import picked
from trajkit.policies import Policy, chosen_int
from trajkit.policies import policy as named_policy
from trajkit.sessions import Reward, session_facts
from trajkit.suffix import full_rows
from trajkit.tables import Rows, TableLike, as_table, canonical_rows

# Tokens that the calls of one part hold: bounds what is held per token beside the rows.
_PART_TOKENS = 1 << 24


def verify(
    rows: TableLike,
    turns: TableLike,
    policy: str | Policy | None = None,
    *,
    reward: Reward = None,
    sessions: TableLike | None = None,
    max_row_tokens: int | None = None,
    weigh_by: WeighBy = "token",
) -> pa.Table:
    """Every violation of what rows promise about the turns that they were made of.

    Nothing that `trajkit.linearize` computed is used: rows are compared with the turns
    token by token.

    Parameters
    ----------
    rows : table
        `trajkit.schema.ROWS`, or ``ROWS_SUFFIX``, which is laid out in full part by
        part. Or rows of another system, without ``spans``: input_ids,
        loss_mask (as long as the row, or of its response alone: then it stands at the
        row's end) and, where there are any, logprobs (as the mask), session_id,
        row_index and prompt_length. A turn is located in such a row where its prompt's
        end and its output stand.
    turns : table
        `trajkit.schema.TURNS`, in full or delta form, of all sessions of the rows.
    policy : str or Policy, optional
        Whose promise is to hold. A policy that neither absorbs nor demotes, sets aside
        or leaves rows out trains every token that may be trained exactly once;
        ``slime``, ``trl``, ``segments`` and ``miles`` train no token twice, ``nemo``
        each token of a row's turns once in that row, and no more is asked of them;
        ``polar`` puts raw outputs between stretches of later prompts, whatever they
        were sampled after, and trains each once or says in a row that it cut or dropped
        it. None: exactly once, as ``faithful`` does.
    reward, sessions : optional
        As given to `trajkit.linearize`. Without them, the rewards of a session's rows
        need only be alike, or shares of one as the policy spreads it: other rewards that
        differ from row to row are spread after this.
    max_row_tokens : int, optional
        As given to `trajkit.linearize`; what lies beyond need not be trained. None: no
        row was cut.
    weigh_by : {"token", "row", "rollout"}
        What ``row_weight`` is: the row's trained tokens over the rollout's N, as
        `trajkit.linearize` gives it; 1 over the rollout's rows that train something; or
        1 / N. A row that trains nothing weighs 0.

    Returns
    -------
    Table
        `trajkit.schema.VIOLATIONS`, by session and row; empty where all is well. Its
        rules are those of `trajkit.schema.RULES`.

    Raises
    ------
    SchemaError
        A table lacks a column, or a column has a type that cannot be taken for its own.
    InvalidTurnsError
        The turns are no sequence of sessions, or ``reward`` or ``sessions`` lack one.
    PolicyError
        The policy does not exist, ``max_row_tokens`` is no integer of 1 or more, or
        ``weigh_by`` is none of the three.

    Examples
    --------
    >>> import trajkit as tk
    >>> turns = tk.from_records(
    ...     [{"session_id": "a", "prompt_ids": [1], "output_ids": [2, 3]}]
    ... )
    >>> tk.verify(tk.linearize(turns), turns).num_rows
    0
    >>> rows = {"input_ids": [[1, 2, 3]], "loss_mask": [[0, 1, 0]]}
    >>> found = tk.verify(pa.table(rows), turns)
    >>> found.select(["turn_index", "token", "rule"]).to_pylist()
    [{'turn_index': 0, 'token': 1, 'rule': 'not_trained'}]
    """
    if max_row_tokens is not None:
        max_row_tokens = chosen_int("max_row_tokens", max_row_tokens, 1)
    if weigh_by not in get_args(WeighBy):
        raise PolicyError(
            f"weigh_by={weigh_by!r}: expected one of {', '.join(get_args(WeighBy))}"
        )
    chosen = None if policy is None else named_policy(policy)
    table = as_table(rows)
    own = "spans" in table.column_names
    table = canonical_rows(table) if own else foreign_rows(table)
    calls = read_calls(turns)
    facts = session_facts(reward, sessions)
    known: tuple[str, ...] = ()
    if reward is not None or sessions is not None:
        known = ("reward",) if facts.table is None else ("reward", "group_id")

    found: list[Violation] = []
    session = sessions_of(table, calls)
    if not own and table.column("session_id").null_count:
        if table.column("session_id").null_count < table.num_rows:
            raise SchemaError("session_id is null in some rows: expected all or none")
        parts = iter([(calls, np.arange(table.num_rows))])
    else:
        _check_sessions(table, session, found)
        parts = _parts(calls, session)
    for part, which in parts:
        here = picked(table, pa.array(which))
        if own:
            here = full_rows(here)
        case = Case(
            flat_rows(here, align_right=not own),
            flat_turns(part),
            sessions_of(here, part),
            chosen,
            max_row_tokens,
            facts.of(part.session_ids),
            found,
        )
        if own:
            _verify_own(case, known, weigh_by)
        else:
            verify_located(case)
    return violations_table(found)


def _check_sessions(table: pa.Table, session: Rows, found: list[Violation]) -> None:
    """Rows are of sessions that have turns, and those of one follow one another."""
    names = table.column("session_id")
    codes = names.combine_chunks().dictionary_encode().indices.to_numpy()
    opens = np.flatnonzero(np.diff(codes, prepend=-1))
    again = opens[np.isin(opens, np.unique(codes, return_index=True)[1], invert=True)]
    for rows, detail in (
        (np.flatnonzero(session < 0), "the session has no turns"),
        (again, "the session comes back after another began"),
    ):
        for row in rows:
            index = table.column("row_index")[int(row)].as_py()
            name = names[int(row)].as_py()
            found.append(Violation(name, index, None, None, "session", detail))


def _parts(calls: Calls, session: Rows) -> Iterator[tuple[Calls, Rows]]:
    """The calls in parts of whole sessions, and the rows of each."""
    order = np.argsort(session, kind="stable")
    start = 0
    for part in calls.split(calls.held, _PART_TOKENS):
        stop = start + part.n_sessions
        lo, hi = np.searchsorted(session[order], [start, stop])
        yield part, order[lo:hi]
        start = stop


def _verify_own(case: Case, known: tuple[str, ...], weigh_by: WeighBy) -> None:
    """The rules of rows whose pieces say what they train."""
    pieces = pieces_of(case.rows.table, case.turns, case.session)
    pieces = checks_claims.sound(case, pieces)
    trained = pieces.take(np.flatnonzero(pieces.kind == "trained"))
    checks_rows.row_index(case)
    checks_rows.lengths(case)
    checks_claims.span_tokens(case, pieces)
    checks_claims.untrainable(case, pieces)
    checks_claims.masks(case, trained)
    checks_claims.logprobs(case, trained)
    checks_claims.claims(case, pieces)
    if case.splices:
        checks_splice.rows(case, pieces)
        checks_splice.told(case, pieces)
    else:
        checks_claims.context(case, trained)
        checks_rows.tokens(case, pieces)
    checks_rows.prompt_length(case, pieces)
    checks_rows.shared_prefixes(case)
    checks_rows.sums(case, trained, weigh_by)
    checks_rows.facts(case, known=known)
    if case.policy is not None and case.policy.flags == "row" and not case.splices:
        checks_rows.flags(case, pieces)
