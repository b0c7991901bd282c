"""Which call a call continues: the ``links`` table."""

from collections.abc import Sequence
from typing import overload

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit._arguments import check_choice, chosen_int, tool_names
from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.buffers import pooled
from trajkit._arrow.canonical import TableLike, canonical
from trajkit._streams.lockstep import Stream, over_sessions
from trajkit.errors import InvalidTurnsError
from trajkit.pipeline.subagents import find_dispatches
from trajkit.policies import (
    CHAIN_ORDERS,
    DEFAULT_FORK_THRESHOLD,
    DISPATCH_TOOLS,
    MESSAGE_EQUALITIES,
    PARENT_BY,
    ROW_ORDERS,
    TIE_BREAKS,
    ChainOrder,
    MessageEquality,
    ParentBy,
    Policy,
    RowOrder,
    TieBreak,
    check_route,
)
from trajkit.schema import DRIFT, LINK_REASONS, LINKS, SEGMENT_KINDS
from trajkit.turns.call_order import by_prompt
from trajkit.turns.calls import Calls, Ints, Longs, Records, read_calls
from trajkit.turns.message_equality import (
    classify,
    identity_of,
    with_equality,
)
from trajkit.turns.prefix_forest import Forest, grow
from trajkit.turns.records import as_turns
from trajkit.turns.structs import LINK, MESSAGE

BY_MESSAGES: tuple[ParentBy, ...] = ("messages", "agents", "generations")
_EQUALITY_OF_ROUTE: dict[ParentBy, MessageEquality] = {
    "agents": "text",
    "generations": "strict",
}


@overload
def link(
    turns: Stream | pa.RecordBatchReader,
    parent_by: ParentBy = ...,
    *,
    merge_threshold: int | None = ...,
    tie_break: TieBreak = ...,
    message_equality: MessageEquality | None = ...,
    dispatch_tools: Sequence[str] = ...,
    chain_order: ChainOrder = ...,
    fork_threshold: int = ...,
    row_order: RowOrder = ...,
) -> Stream: ...
@overload
def link(
    turns: TableLike,
    parent_by: ParentBy = ...,
    *,
    merge_threshold: int | None = ...,
    tie_break: TieBreak = ...,
    message_equality: MessageEquality | None = ...,
    dispatch_tools: Sequence[str] = ...,
    chain_order: ChainOrder = ...,
    fork_threshold: int = ...,
    row_order: RowOrder = ...,
) -> pa.Table: ...
def link(
    turns: TableLike | Stream,
    parent_by: ParentBy = "messages",
    *,
    merge_threshold: int | None = None,
    tie_break: TieBreak = "first",
    message_equality: MessageEquality | None = None,
    dispatch_tools: Sequence[str] = DISPATCH_TOOLS,
    chain_order: ChainOrder = "tree",
    fork_threshold: int = 1,
    row_order: RowOrder = "turn",
) -> pa.Table | Stream:
    """The turn that each turn continues.

    Parameters
    ----------
    turns : table, or iterator of record batches
        `trajkit.schema.TURNS` in full or delta form. An iterator (or a
        RecordBatchReader) is read as the result is, and may hold a session in several
        batches that follow each other.
    parent_by : {"messages", "agents", "tokens", "previous", "none", "prompts", "prefix", \
"generations"}
        By the message tree; the last call of the same agent, if that one's messages are
        its first ones (see `Policy`); by the longest row end that is a prefix of the
        prompt (ties to the oldest row); the previous turn of the session; no turn at
        all; by the chain of turns whose last prompt is the longest prefix of the
        prompt, whatever was sampled (a turn with an empty prompt has no parent and no
        children); the turn, recorded before or after, whose path is the longest prefix
        of the prompt, with some quarantined (see `trajkit.schema.LINK_REASONS`); the last
        turn whose messages and reply are the request's first, with some refused.

        Under ``"messages"`` and ``"generations"``, tokens decide for a turn without a
        list of messages: its parent is the turn whose prompt its own longer prompt
        begins with, and whose prompt and output it repeats for longest. The same holds
        of an empty list if ``tie_break`` is ``"tokens"``; else such a turn is left out.
        Under ``"agents"``, a turn without a list, or after one without, continues the
        last call of the agent if its longer prompt begins with that one's prompt.
    merge_threshold : int, optional
        Under ``"messages"``: a reply shorter than this many tokens gives way to the one
        that a later request shows in its place. None: 1024; 0 and below: never.
    tie_break : {"first", "tokens", "full_path"}
        Under ``"messages"``, of equal replies to the same messages: a request that
        shows one of them continues the first, or the one whose path its prompt repeats
        for longest, of equals the one with the shortest path, then the first.
        ``"full_path"``: it continues the nearest message above whose path its prompt
        repeats to the end, the last of equals.
    chain_order : {"tree", "recorded"}
        The rank in the traversal of the message tree (of the rows, of the agents), or
        among the turns as they came.
    message_equality : str, optional
        As for `trajkit.policy`. None: ``"text"`` under ``"agents"``, ``"strict"`` under
        ``"generations"``, else ``"values"``.
    dispatch_tools : sequence of str
        Under ``"agents"``, tools whose calls send out a sub-agent.
    fork_threshold : int
        Under ``"generations"``, a turn whose prompt lacks so many tokens or more of
        what its parent held is refused.
    row_order : {"turn", "prompt"}
        Under ``"none"``: ``chain_order`` is that of turns, or from the shortest prompt up.

    Returns
    -------
    Table
        `trajkit.schema.LINKS`, one row per turn, in the order of ``turns``. For an
        iterator: an iterator of record batches.

    Raises
    ------
    SchemaError, InvalidTurnsError
        As `trajkit.linearize`.
    PolicyError
        ``parent_by`` is none of the eight, or another choice is none, or ``parent_by``
        excludes ``chain_order`` or ``message_equality``.

    References
    ----------
    Message routing and its merge are slime's (spec: slime 2), token routing prime-rl's
    (spec: prime-rl 2.1), routing by prompts is Polar's (spec: Polar 2.3), by prefixes
    NeMo Gym's (spec: NeMo Gym 5), by generations miles' (spec: miles 1.2).
    """
    if merge_threshold is None:
        merge_threshold = DEFAULT_FORK_THRESHOLD
    merge_threshold = chosen_int("merge_threshold", merge_threshold)
    check_choice("tie_break", tie_break, TIE_BREAKS)
    if message_equality is None:
        message_equality = _EQUALITY_OF_ROUTE.get(parent_by, "values")
    check_choice("message_equality", message_equality, MESSAGE_EQUALITIES)
    check_choice("chain_order", chain_order, CHAIN_ORDERS)
    check_choice("row_order", row_order, ROW_ORDERS)
    tools = tool_names("dispatch_tools", dispatch_tools)
    fork_threshold = chosen_int("fork_threshold", fork_threshold)
    check_choice("parent_by", parent_by, PARENT_BY)
    check_route(parent_by, chain_order, message_equality)

    def one(turns: pa.Table) -> pa.Table:
        calls = read_calls(turns)
        links = find_links(
            calls,
            grow(calls),
            parent_by,
            merge_threshold,
            tie_break,
            message_equality=message_equality,
            dispatch_tools=tools,
            chain_order=chain_order,
            fork_threshold=fork_threshold,
            row_order=row_order,
        )
        return links_table(calls, links)

    return over_sessions(one, ("turns", turns), table_of=as_turns)


def find_links(
    calls: Calls,
    forest: Forest,
    parent_by: ParentBy,
    merge_threshold: int,
    tie_break: TieBreak,
    *,
    message_equality: MessageEquality = "values",
    dispatch_tools: tuple[str, ...] = DISPATCH_TOOLS,
    chain_order: ChainOrder = "tree",
    fork_threshold: int = 1,
    row_order: RowOrder = "turn",
) -> Records:
    """The link of every call, dtype LINK, ``lcp`` unset."""
    n_calls = len(calls.calls)
    links = np.zeros(n_calls, LINK)
    if parent_by == "messages":
        calls = with_equality(calls, message_equality)
        n_nodes, n_table = _core.tree_size(calls.requests, calls.session_offsets)
        _core.route_messages(
            calls.calls,
            calls.requests,
            calls.session_offsets,
            forest.nodes,
            forest.ends,
            merge_threshold,
            TIE_BREAKS.index(tie_break),
            pooled(n_nodes, MESSAGE),
            np.empty(n_table, np.int32),
            np.empty(n_calls, np.int32),
            np.empty(len(forest.nodes), np.int32),
            np.empty(len(forest.nodes), np.int32),
            np.empty((3, len(forest.nodes)), np.int32),
            np.empty(n_calls, np.int32),
            links,
        )
    elif parent_by == "agents":
        classes = classify(calls, identity_of(message_equality))
        calls = classes.keyed(calls)
        dispatches = find_dispatches(classes, dispatch_tools)
        n_nodes, n_table = _core.tree_size(calls.requests, calls.session_offsets)
        _core.route_agents(
            calls.calls,
            calls.requests,
            calls.session_offsets,
            forest.nodes,
            forest.ends,
            dispatches.calls,
            dispatches.offsets,
            dispatches.answers,
            pooled(n_nodes, MESSAGE),
            np.empty(n_table, np.int32),
            np.empty(n_calls, np.int32),
            np.empty(n_nodes, np.int32),
            links,
        )
    elif parent_by == "tokens":
        _core.route_tokens(
            calls.calls,
            calls.session_offsets,
            forest.nodes,
            forest.ends,
            np.empty(len(forest.nodes), np.int32),
            np.empty(len(forest.nodes), np.int32),
            np.empty(len(forest.nodes), np.int32),
            np.empty(n_calls, np.int32),
            np.empty(n_calls, np.int32),
            links,
        )
    elif parent_by == "generations":
        calls = with_equality(calls, message_equality)
        n_nodes, n_table = _core.tree_size(calls.requests, calls.session_offsets)
        _core.route_generations(
            calls.calls,
            calls.requests,
            calls.session_offsets,
            forest.nodes,
            forest.ends,
            fork_threshold,
            pooled(n_nodes, MESSAGE),
            np.empty(n_table, np.int32),
            np.empty((5, len(forest.nodes)), np.int32),
            np.empty((7, n_calls), np.int32),
            links,
        )
    elif parent_by == "prefix":
        _core.route_prefix(
            calls.calls,
            calls.session_offsets,
            forest.nodes,
            forest.ends,
            by_prompt(calls),
            np.empty((4, len(forest.nodes)), np.int32),
            np.empty((2, n_calls), np.int32),
            np.empty(n_calls, np.uint8),
            links,
        )
    elif parent_by in ("previous", "none"):
        starts = calls.session_offsets[:-1]
        place = np.arange(n_calls, dtype=np.int32)
        ranked = (
            by_prompt(calls) if parent_by == "none" and row_order == "prompt" else place
        )
        first = np.repeat(starts, np.diff(calls.session_offsets))
        links["order"][ranked] = place - first
        links["rewritten_by"] = -1
        links["parent"] = place - 1 if parent_by == "previous" else -1
        links["link_reason"] = LINK_REASONS.index(
            "previous" if parent_by == "previous" else "root"
        )
        links["parent"][starts] = -1
        links["link_reason"][starts] = LINK_REASONS.index("root")
    else:  # prompts
        inside = np.empty(n_calls, np.int32)
        _core.find_prompt_ends(calls.calls, forest.nodes, forest.ends, inside)
        by_place = np.lexsort((calls.calls["prompt_len"], inside))
        _core.route_prompts(
            calls.calls,
            calls.session_offsets,
            forest.nodes,
            inside,
            by_place.astype(np.int32),
            np.empty((2, len(forest.nodes)), np.int32),
            np.empty((5, n_calls), np.int32),
            links,
        )
    if chain_order == "recorded":
        placed = links["order"] >= 0
        before = np.concatenate([[0], np.cumsum(placed)])
        first = np.repeat(
            before[calls.session_offsets[:-1]], np.diff(calls.session_offsets)
        )
        links["order"] = np.where(placed, before[:-1] - first, -1)
    return links


def policy_links(calls: Calls, forest: Forest, policy: Policy) -> Records:
    """The link of every call under a policy, dtype LINK, ``lcp`` unset."""
    return find_links(
        calls,
        forest,
        policy.parent_by,
        policy.merge_threshold,
        policy.tie_break,
        message_equality=policy.message_equality,
        dispatch_tools=policy.dispatch_tools,
        chain_order=policy.chain_order,
        fork_threshold=policy.fork_threshold,
        row_order=policy.row_order,
    )


def n_by_tokens(calls: Calls, policy: Policy) -> Longs:
    """Turns without messages that a route by messages routes by tokens, by session."""
    if policy.parent_by not in BY_MESSAGES:
        return np.zeros(calls.n_sessions, np.int64)
    which = calls.requests["n_keys"] < 0
    if policy.parent_by == "messages" and policy.tie_break == "tokens":
        which |= calls.requests["n_keys"] + calls.requests["shared"] == 0
    if not which.any():
        return np.zeros(calls.n_sessions, np.int64)
    return np.bincount(calls.session_of(), which, calls.n_sessions).astype(np.int64)


def measure(calls: Calls, forest: Forest, links: Records) -> None:
    """Fill ``lcp`` of every link: tokens that parent's path and prompt share."""
    _core.measure_links(calls.calls, forest.nodes, forest.ends, links)


def links_table(calls: Calls, links: Records) -> pa.Table:
    """The ``links`` table of the calls' links."""
    return pa.Table.from_arrays(
        [
            calls.table.column("session_id"),
            calls.table.column("turn_index"),
            _turns(calls, links["parent"]),
            pa.DictionaryArray.from_arrays(
                pa.array(links["link_reason"].astype(np.int8)), pa.array(LINK_REASONS)
            ),
            pa.array(links["order"], mask=links["order"] < 0),
            _turns(calls, links["rewritten_by"]),
            pa.DictionaryArray.from_arrays(
                pa.array(
                    links["segment"].astype(np.int8) - 1, mask=links["segment"] == 0
                ),
                pa.array(SEGMENT_KINDS),
            ),
        ],
        schema=LINKS,
    )


def _turns(calls: Calls, index: Ints) -> pa.Array:
    """The turn_index of each call, null where the call is -1."""
    none = index < 0
    return pa.array(calls.turn_index[np.where(none, 0, index)], mask=none)


def read_links(calls: Calls, table: pa.Table) -> Records:
    """The records of a ``links`` table that belongs to the calls.

    Raises
    ------
    InvalidTurnsError
        It is not one row per turn in the same order, or a row names a turn that is no
        other turn of its session, or parents do not come first.
    """
    table = canonical(table, LINKS)
    _check_same_turns(calls, table)
    links = np.zeros(len(calls.calls), LINK)
    for name in ("parent", "rewritten_by"):
        links[name] = find_turns(calls, table.column(name), name)
    own = np.flatnonzero(links["parent"] == np.arange(len(links)))
    if len(own):
        call = int(own[0])
        raise InvalidTurnsError(
            f"{calls.place(call)}: parent {table.column('parent')[call].as_py()} is no "
            "other turn"
        )
    links["order"] = table.column("order").fill_null(-1).to_numpy()
    _check_ranks(calls, links)
    why = table.column("link_reason").combine_chunks()
    names = why.dictionary.to_pylist()
    ranks = np.array([LINK_REASONS.index(name) for name in names], np.int32)
    codes = why.indices.fill_null(0).to_numpy()
    links["link_reason"] = ranks[codes] if len(names) else 0
    kinds = table.column("segment_kind").cast(pa.string())
    found = pc.index_in(kinds, pa.array(SEGMENT_KINDS)).fill_null(-1)
    links["segment"] = found.to_numpy() + 1
    return links


def _check_same_turns(calls: Calls, table: pa.Table) -> None:
    same = table.num_rows == len(calls.calls)
    if same:
        same = table.column("turn_index").equals(calls.table.column("turn_index"))
        same &= table.column("session_id").equals(calls.table.column("session_id"))
    if not same:
        raise InvalidTurnsError(
            f"links has {table.num_rows} rows for {len(calls.calls)} turns, or in "
            "another order: expected one row per turn, in the order of turns"
        )


def _check_ranks(calls: Calls, links: Records) -> None:
    """Raise unless ``order`` ranks the turns of each session without a repeat."""
    placed = np.flatnonzero(links["order"] >= 0)
    sizes = np.diff(calls.session_offsets)
    session = calls.session_of()[placed]
    rank = links["order"][placed]
    beyond = rank >= sizes[session]
    ranked = np.lexsort((rank, session))
    again = np.zeros(len(placed), np.bool_)
    repeats = np.diff(session[ranked]) == 0
    repeats &= np.diff(rank[ranked]) == 0
    again[ranked[1:][repeats]] = True
    bad = np.flatnonzero(beyond | again)
    if len(bad):
        call = int(placed[bad[0]])
        raise InvalidTurnsError(
            f"{calls.place(call)}: order {links['order'][call]}: expected ranks from "
            "0, each once in a session"
        )
    followed = (links["parent"] >= 0) & (links["order"] >= 0)
    before = np.where(followed, links["order"][links["parent"]], -1)
    orphans = np.flatnonzero(followed & (before < 0))
    if len(orphans):
        call = int(orphans[0])
        raise InvalidTurnsError(
            f"{calls.place(call)}: its parent has no order, so it is in no row"
        )
    # parents come first in turns, or else, throughout a session, in order
    session = calls.session_of()
    later = np.unique(session[followed & (links["parent"] > np.arange(len(links)))])
    late = np.flatnonzero(
        followed & (before >= links["order"]) & np.isin(session, later)
    )
    if len(late):
        call = int(late[0])
        raise InvalidTurnsError(
            f"{calls.place(call)}: order {links['order'][call]} does not come after "
            f"its parent's, {before[call]}, in a session with a parent that is a later "
            "turn"
        )


def find_turns(calls: Calls, wanted: pa.ChunkedArray, name: str) -> Ints:
    """The call that each row of a column of turn indices names, or -1."""
    given = wanted.is_valid().to_numpy()
    found = calls.named(calls.session_of(), wanted.fill_null(-1).to_numpy())
    absent = np.flatnonzero(given & (found < 0))
    if len(absent):
        call = int(absent[0])
        raise InvalidTurnsError(
            f"{calls.place(call)}: {name} {wanted[call]} is no turn of the session"
        )
    return found.astype(np.int32)


def read_lcp(calls: Calls, links: Records, table: TableLike) -> None:
    """Replace the measured ``lcp`` of links by those of a ``drift`` table.

    Raises
    ------
    InvalidTurnsError
        It is not one row per linked turn in the order of turns, names another parent,
        or an lcp beyond what the two turns share: a row would train tokens that were
        never sampled.
    """
    table = canonical(table, DRIFT)
    rows = np.flatnonzero(links["parent"] >= 0)
    taken = calls.table.select(["session_id", "turn_index"]).take(rows)
    same = table.num_rows == len(rows)
    same = same and all(
        table.column(name).equals(taken.column(name)) for name in taken.column_names
    )
    if not same:
        raise InvalidTurnsError(
            f"drift has {table.num_rows} rows for {len(rows)} linked turns, or in "
            "another order: expected one row per turn that has a parent, in the order "
            "of turns"
        )
    parents, most = links["parent"][rows], links["lcp"][rows]
    lcp = table.column("lcp").to_numpy()
    other = table.column("parent").to_numpy() != calls.turn_index[parents]
    bad = np.flatnonzero(other | (lcp < 0) | (lcp > most))
    if len(bad):
        call, row = int(rows[bad[0]]), int(bad[0])
        raise InvalidTurnsError(
            f"{calls.place(call)}: drift has parent {table.column('parent')[row]} and "
            f"lcp {lcp[row]}; its link has parent {calls.turn_index[parents[row]]}, "
            f"with which it shares {most[row]} tokens"
        )
    links["lcp"][rows] = lcp
