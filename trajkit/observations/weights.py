"""Training on observations: a weight per token in addition to the loss mask."""

from __future__ import annotations  # a signature shows the words below

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Literal, TypeAlias, TypedDict, Unpack, overload

import numpy as np
import pyarrow as pa

from trajkit._arguments import check_choice, check_flag
from trajkit._arrow.canonical import TableLike, as_table, canonical
from trajkit._streams.lockstep import (
    Source,
    Stream,
    is_stream,
    map_session_pairs,
    map_sessions,
)
from trajkit.errors import ArgumentError
from trajkit.observations.attribution import SessionCalls
from trajkit.observations.echo import echo
from trajkit.observations.observed_rows import (
    Missing,
    Normalization,
    Observed,
    Selection,
    observed_rows,
)
from trajkit.observations.prime_rl import prime
from trajkit.pipeline.links import link
from trajkit.schema import OBSERVATIONS, ROWS
from trajkit.turns.calls import read_calls
from trajkit.turns.records import as_turns
from trajkit.turns.session_metadata import SessionFacts, errored, session_facts

Names: TypeAlias = Collection[str] | Mapping[str, float]
"""Names with a common alpha, or a mapping with an alpha for each."""

Rule: TypeAlias = Literal["echo", "prime"]


class _Options(TypedDict, total=False):
    rule: Rule
    roles: Names | None
    tool_names: Names | None
    alpha: float
    normalization: Normalization
    missing: Missing
    sessions: TableLike | None


@overload
def observation_weights(
    rows: Stream | pa.RecordBatchReader,
    turns: Source,
    *,
    report: Literal[False] = ...,
    **options: Unpack[_Options],
) -> Stream: ...
@overload
def observation_weights(
    rows: Stream | pa.RecordBatchReader,
    turns: Source,
    *,
    report: Literal[True],
    **options: Unpack[_Options],
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]: ...
@overload
def observation_weights(
    rows: TableLike,
    turns: TableLike,
    *,
    report: Literal[False] = ...,
    **options: Unpack[_Options],
) -> pa.Table: ...
@overload
def observation_weights(
    rows: TableLike,
    turns: TableLike,
    *,
    report: Literal[True],
    **options: Unpack[_Options],
) -> tuple[pa.Table, pa.Table]: ...
def observation_weights(
    rows: Source,
    turns: Source,
    *,
    rule: Rule = "echo",
    roles: Names | None = None,
    tool_names: Names | None = None,
    alpha: float = 1.0,
    normalization: Normalization = "flat",
    missing: Missing = "raise",
    sessions: TableLike | None = None,
    report: bool = False,
) -> object:
    """Add a weight for every observed token that is learned.

    The loss mask does not change. Under ``rule="echo"`` a token has a weight if

    - it is content of a message of a selected role or tool,
    - an assistant message precedes it, after the request that began its conversation
      (decided by messages or, without messages, by the prompt of that request; drift in
      the reply does not matter),
    - no model sampled it, and
    - no earlier row of the session gives it a weight.

    A message is recognized in other rows by its key, its number among equal messages of
    the request, and its tool_call_id or, without one, the reply that it follows. Without
    messages, it is recognized by tool name, content ids and number.

    Parameters
    ----------
    rows : table, or iterator of record batches
        `trajkit.schema.ROWS`, made of these turns, with all rows of each session that
        occurs. An iterator has the sessions in the order of ``turns``.
    turns : table, or iterator of record batches
        `trajkit.schema.TURNS` in full or delta form, with the columns
        `trajkit.schema.ATTRIBUTION`. Iterators as for `trajkit.linearize`.
    rule : {"echo", "prime"}
        "prime" is prime-rl's first rule, including its quirks: only tool names select (an
        empty list means all; a tool without a name has no weight), in every row again,
        also in the first prompt and in failed rollouts. It finds parents by tokens, so it
        is meant for rows of policy ``strict``.
    roles : names, or mapping of name to alpha, optional
        Roles whose messages get a weight. None: ``("tool",)``. Without messages in
        ``turns``, only tools are known, by their names. Not with "prime".
    tool_names : names, or mapping of name to alpha, optional
        Tools whose messages get a weight. None: all, including those without a name.
    alpha : float, at least 0
        The weight of names without their own in ``tool_names`` or, next, ``roles``.
    normalization : {"flat", "all_tokens", "sft_tokens", "ratio"}
        Multiplies alpha by 1, ``1 / T``, ``1 / S`` or ``R / S``: T is the number of tokens
        of the rollout (shared prefixes counted once), S that of observed and R that of
        trained tokens, all before ``max_row_tokens`` cut the rows. Under "prime", T, S and
        R are those of the row.
    missing : {"raise", "skip", "whole"}
        How to treat turns whose attribution columns are missing or incomplete. "skip":
        the turn attributes nothing and is counted; other turns may attribute its prefix.
        "whole": if only the content flags are missing, a message's template scaffold gets
        a weight as well; otherwise as "skip". Under "prime", "skip" is what prime-rl does.
    sessions : table, optional
        `trajkit.schema.SESSIONS`: under "echo", a rollout with an error gets no weights.
    report : bool
        Return counts of observed, repeated and missing tokens as well.

    Returns
    -------
    rows : Table
        With the column ``observation_weight`` (large_list<float32>), as long as
        ``input_ids``; 0 for tokens that are not learned.
    report : Table, if requested
        `trajkit.schema.OBSERVATIONS`, one row per session of ``turns``.

        For iterators: an iterator of record batches of rows, or of pairs of them.

    Raises
    ------
    ArgumentError
        A choice does not exist, or a list of names is empty (except under "prime").
    InvalidTurnsError
        ``missing="raise"`` and a turn lacks attribution; or a row does not belong to
        these turns.

    References
    ----------
    "prime" is prime-rl's
    https://github.com/PrimeIntellect-ai/prime-rl/blob/b1c49e530/src/prime_rl/orchestrator/trajectories.py,
    "echo" its
    https://github.com/PrimeIntellect-ai/prime-rl/blob/559b44772/src/prime_rl/orchestrator/algo/echo.py
    """
    check_flag("report", report)
    selection = _selection(rule, roles, tool_names, alpha, normalization, missing)
    facts = session_facts(None, sessions)

    def one(turns: pa.Table, rows: pa.Table) -> tuple[pa.Table, pa.Table]:
        return _observed(turns, rows, rule, selection, facts)

    sources = ("turns", turns), ("rows", rows)
    if not report:
        return map_sessions(lambda *tables: one(*tables)[0], *sources)
    if is_stream(turns) or is_stream(rows):
        return map_session_pairs(one, *sources)
    return one(as_turns(turns), as_table(rows))


def _observed(
    turns: pa.Table,
    rows: pa.Table,
    rule: Rule,
    selection: Selection,
    facts: SessionFacts,
) -> tuple[pa.Table, pa.Table]:
    """The rows with their weights, and the report."""
    calls = read_calls(turns)
    failed = errored(facts.of(calls.session_ids))
    table = canonical(rows, ROWS)
    by_session, offsets = observed_rows(table, calls.session_ids)
    weights = np.zeros(int(offsets[-1]), np.float32)
    parents = None
    if rule == "prime":
        parents = link(calls.table, "strict").column("parent")
    counts = []
    for s in range(calls.n_sessions):
        session_rows = by_session.get(s, [])
        if not session_rows or (failed[s] and rule == "echo"):
            counts.append(Observed())
            continue
        session = SessionCalls(calls.sessions(s, s + 1))
        place = f"session {calls.session_ids[s].as_py()!r}"
        if parents is None:
            each, count = echo(session, session_rows, selection, place)
        else:
            lo, hi = calls.session_offsets[s : s + 2]
            own_parents = parents.slice(lo, hi - lo).to_pylist()
            each, count = prime(session, session_rows, selection, place, own_parents)
        counts.append(count)
        for row, values in zip(session_rows, each, strict=True):
            weights[offsets[row.number] : offsets[row.number] + len(values)] = values
    column = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(weights))
    if "observation_weight" in table.column_names:
        table = table.drop_columns("observation_weight")
    table = table.append_column("observation_weight", column)
    lines = [
        calls.session_ids,
        *(
            pa.array([getattr(count, name) for count in counts], type_)
            for name, type_ in zip(
                OBSERVATIONS.names[1:], OBSERVATIONS.types[1:], strict=True
            )
        ),
    ]
    return table, pa.Table.from_arrays(lines, schema=OBSERVATIONS)


def _selection(
    rule: Rule,
    roles: Names | None,
    tool_names: Names | None,
    alpha: float,
    normalization: Normalization,
    missing: Missing,
) -> Selection:
    check_choice("rule", rule, Rule)
    check_choice("normalization", normalization, Normalization)
    check_choice("missing", missing, Missing)
    _check_alpha("alpha", alpha)
    if rule == "prime":
        if roles is not None:
            raise ArgumentError(
                f"roles={roles!r}: rule 'prime' goes by tool name alone"
            )
        if isinstance(tool_names, Mapping):
            raise ArgumentError("tool_names is a mapping: rule 'prime' has one alpha")
        if missing == "whole":
            raise ArgumentError("missing='whole': rule 'prime' knows raise and skip")
    by_role = {"tool": alpha} if roles is None else _alphas("roles", roles, alpha)
    by_tool = None
    if tool_names is not None and not (rule == "prime" and not tool_names):
        if "tool" not in by_role:
            raise ArgumentError(
                f"tool_names={tool_names!r}: roles {sorted(by_role)} select no tool"
            )
        by_tool = _alphas("tool_names", tool_names, by_role["tool"])
    return Selection(by_role, by_tool, normalization, missing)


def _alphas(what: str, names: Names, alpha: float) -> dict[str, float]:
    several = isinstance(names, Iterable) and not isinstance(names, str)
    if not several or not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"{what}={names!r}: expected several names, or a mapping")
    if not names:
        raise ArgumentError(f"{what} is empty: it would select nothing")
    if not isinstance(names, Mapping):
        return dict.fromkeys(names, alpha)
    for name, value in names.items():
        _check_alpha(f"{what}[{name!r}]", value)
    return dict(names)


def _check_alpha(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise ArgumentError(f"{what}={value!r}: expected a number")
    if not (np.isfinite(value) and value >= 0):
        raise ArgumentError(f"{what}={value}: expected a finite number, 0 or more")
