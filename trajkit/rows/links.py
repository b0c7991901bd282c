"""Which call a call continues: the ``links`` table."""

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit._kernel_names import LINK
from trajkit.errors import InvalidTurnsError
from trajkit.policies import ParentBy, Policy
from trajkit.policies import policy as chosen_policy
from trajkit.rows.routes import ROUTES, first_of_session
from trajkit.schema import DRIFT, LINK_REASONS, LINKS, SEGMENT_KINDS
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import TableLike, canonical
from trajkit.tables.ragged import Ints, Longs, Records
from trajkit.tables.stages import apply, stage
from trajkit.turns.records import as_turns
from trajkit.turns.sessions import Forest, Sessions
from trajkit.turns.validation import check_table

BY_MESSAGES: tuple[ParentBy, ...] = ("messages", "agents", "generations")


@stage
def link(turns: TableLike, policy: str | Policy = "faithful") -> pa.Table:
    """The turn that each turn continues under a policy.

    Parameters
    ----------
    turns : table
        `trajkit.schema.TURNS` in full or delta form.
    policy : str or Policy
        As for `trajkit.linearize`. Links depend on ``parent_by``, ``dispatch_tools``,
        ``merge_rewrites``, ``message_equality``, ``compare_tools``, ``tie_break``,
        ``chain_order``, ``row_order`` and, for ``merge_rewrites`` and
        ``"generations"``, on ``fork_threshold``; see `Policy`.

        If turns have no list of messages, tokens decide for policies that compare
        messages: under ``"messages"`` and ``"generations"``, the parent is the turn
        whose prompt the turn's own longer prompt begins with, and whose prompt and
        output it repeats for longest. The same holds for an empty list if ``tie_break``
        is ``"tokens"``; otherwise such a turn is left out. Under ``"agents"``, a turn
        without a list, or after one without, continues the last call of the agent if
        its longer prompt begins with that call's prompt.

    Returns
    -------
    Table
        `trajkit.schema.LINKS`, one row per turn, in the order of ``turns``.

    Raises
    ------
    SchemaError, InvalidTurnsError, PolicyError
        As `trajkit.linearize`.
    """
    chosen = chosen_policy(policy)

    def one(turns: pa.Table) -> pa.Table:
        calls = Sessions.of(turns)
        return links_table(calls, find_links(calls, calls.forest, chosen))

    return apply(one, turns, table_of=as_turns)


link_batches = link.batches


def find_links(calls: Sessions, forest: Forest, policy: Policy) -> Records:
    """The link of every call under a policy, dtype LINK."""
    links = ROUTES[policy.parent_by](calls, forest, policy)
    if policy.chain_order == "recorded":
        placed = links["order"] >= 0
        before = np.concatenate([[0], np.cumsum(placed)])
        rank = before[:-1] - before[first_of_session(calls)]
        links["order"] = np.where(placed, rank, -1)
    _core.measure_links(forest.paths, links)
    return links


def n_by_tokens(calls: Sessions, policy: Policy) -> Longs:
    """Turns without messages that a route by messages routes by tokens, by session."""
    which = calls.requests["n_keys"] < 0
    if policy.parent_by == "messages" and policy.tie_break == "tokens":
        which |= calls.requests["n_keys"] + calls.requests["shared"] == 0
    which &= policy.parent_by in BY_MESSAGES
    return np.bincount(calls.session, which, len(calls)).astype(np.int64)


def links_table(calls: Sessions, links: Records) -> pa.Table:
    """The ``links`` table of the calls' links."""

    def turns(index: Ints) -> pa.Array:
        return pa.array(calls.turn_index[index], mask=index < 0)

    def names(numbers: Ints, known: tuple[str, ...]) -> pa.Array:
        codes = pa.array(numbers.astype(np.int8), mask=numbers < 0)
        return pa.DictionaryArray.from_arrays(codes, pa.array(known))

    columns = [
        calls.table.column("session_id"),
        calls.table.column("turn_index"),
        turns(links["parent"]),
        names(links["link_reason"], LINK_REASONS),
        pa.array(links["order"], mask=links["order"] < 0),
        turns(links["rewritten_by"]),
        names(links["segment"] - 1, SEGMENT_KINDS),
    ]
    return pa.Table.from_arrays(columns, schema=LINKS)


def read_linked(turns: pa.Table, links: pa.Table) -> tuple[Sessions, Forest, Records]:
    """The calls of turns, their forest, and the records of their ``links`` table."""
    calls = Sessions.of(turns)
    return calls, calls.forest, read_links(calls, calls.forest, links)


def read_links(calls: Sessions, forest: Forest, table: pa.Table) -> Records:
    """The records of a ``links`` table, one row per turn in the same order."""
    table = canonical(table, LINKS)
    _check_keys(table, calls.table, "links", "turns", "turn")
    check_table(table, "links")
    links = np.zeros(calls.n_calls, LINK)
    for name in ("parent", "rewritten_by"):
        turns = table.column(name).fill_null(-1).to_numpy()
        links[name] = calls.named(calls.session, turns)
    links["order"] = table.column("order").fill_null(-1).to_numpy()
    beyond = links["order"] >= np.diff(calls.offsets)[calls.session]
    for call in np.flatnonzero(beyond)[:1].tolist():
        raise InvalidTurnsError(
            f"{calls.place(call)}: order {links['order'][call]}: expected ranks from "
            "0, each once in a session"
        )
    for name, column, known, none in (
        ("link_reason", "link_reason", LINK_REASONS, 0),
        ("segment", "segment_kind", SEGMENT_KINDS, -1),
    ):
        words = table.column(column).cast(pa.string())
        links[name] = pc.index_in(words, pa.array(known)).fill_null(none).to_numpy()
    links["segment"] += 1
    _core.measure_links(forest.paths, links)
    return links


def _check_keys(
    given: pa.Table, turns: pa.Table, what: str, of: str, each: str
) -> None:
    """Raise unless a table has a row for each of these turns, in their order."""
    names = ("session_id", "turn_index")
    if not all(given.column(name).equals(turns.column(name)) for name in names):
        raise InvalidTurnsError(
            f"{what} has {given.num_rows} rows for {turns.num_rows} {of}, or in another "
            f"order: expected one row per {each}, in the order of turns"
        )


def read_lcp(calls: Sessions, links: Records, table: TableLike) -> None:
    """Replace the measured ``lcp`` of links by those of a ``drift`` table.

    Raises InvalidTurnsError unless it has one row per linked turn, in order, with the same
    parent and no larger lcp: else a row would train tokens that were never sampled.
    """
    table = canonical(table, DRIFT)
    rows = np.flatnonzero(links["parent"] >= 0)
    keys = calls.table.select(["session_id", "turn_index"]).take(rows)
    _check_keys(table, keys, "drift", "linked turns", "turn that has a parent")
    parents, most = links["parent"][rows], links["lcp"][rows]
    lcp = table.column("lcp").to_numpy()
    other = table.column("parent").to_numpy() != calls.turn_index[parents]
    for row in np.flatnonzero(other | (lcp < 0) | (lcp > most))[:1].tolist():
        raise InvalidTurnsError(
            f"{calls.place(rows[row])}: drift has parent {table.column('parent')[row]} "
            f"and lcp {lcp[row]}; its link has parent {calls.turn_index[parents[row]]}, "
            f"with which it shares {most[row]} tokens"
        )
    links["lcp"][rows] = lcp
