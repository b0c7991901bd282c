"""Which call a call continues: the ``links`` table."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit import compute as pc
from trajkit.agents import find_dispatches
from trajkit.calls import Calls, Ints, Records, named_calls, read_calls
from trajkit.equality import EQUALITIES, Equality, classify, identity_of, rekeyed
from trajkit.errors import InvalidTurnsError, PolicyError
from trajkit.forest import Forest, grow
from trajkit.layout import LINK, MESSAGE
from trajkit.policies import (
    DEFAULT_FORK_THRESHOLD,
    DISPATCH_TOOLS,
    EQUALS,
    ORDERS,
    ROUTES,
    SORTS,
    Equals,
    Order,
    Policy,
    Route,
    Sort,
    check_order,
    chosen_int,
    tool_names,
)
from trajkit.pooled import pooled
from trajkit.ranks import by_prompt
from trajkit.schema import LINKS, SEGMENT_KINDS, WHY
from trajkit.tables import TableLike, canonical

_EQUALITY_OF_ROUTE: dict[Route, Equality] = {"agents": "text", "generations": "strict"}


def link(
    turns: TableLike,
    route: Route = "messages",
    *,
    merge_threshold: int | None = None,
    equals: Equals = "first",
    equality: Equality | None = None,
    dispatch_tools: Sequence[str] = DISPATCH_TOOLS,
    order: Order = "tree",
    fork_threshold: int = 1,
    sort: Sort = "turn",
) -> pa.Table:
    """The turn that each turn continues.

    Parameters
    ----------
    turns : table
        `trajkit.schema.TURNS` in full or delta form.
    route : {"messages", "agents", "tokens", "previous", "none", "prompts", "prefix", \
"generations"}
        By the message tree; the last call of the same agent, if that one's messages are
        its first ones (see `Policy`); by the longest row end that is a prefix of the
        prompt (ties to the oldest row); the previous turn of the session; no turn at
        all; by the chain of turns whose last prompt is the longest prefix of the
        prompt, whatever was sampled (an empty prompt goes on nothing, and nothing on
        it); the turn, recorded before or after, whose prompt and output are the longest
        prefix of the prompt, with some set aside (see `trajkit.schema.WHY`); the last
        turn whose messages and reply are the request's first, with some refused. Under
        ``"messages"`` a turn without a list of messages goes below the turn whose
        prompt and output are the longest prefix of its prompt; so does one with an
        empty list if ``equals`` is ``"tokens"``, else it is left out. It is left out
        under ``"agents"`` as well, where a turn without a list, or after one without,
        goes on where its prompt starts with the other's prompt and output.
    merge_threshold : int, optional
        Under ``"messages"``: a reply shorter than this many tokens gives way to the one
        that a later request shows in its place. None: 1024; 0 and below: never.
    equals : {"first", "tokens", "whole"}
        Under ``"messages"``, of equal replies to the same messages: a request that
        shows one of them continues the first, or the one whose prompt and output its
        own prompt repeats for longest. ``"whole"``: it continues the nearest message
        above whose prompt and output its own prompt repeats to the end, the last of
        equals.
    order : {"tree", "commit"}
        The rank in the traversal of the message tree (of the rows, of the agents), or
        among the turns as they came.
    equality : {"values", "text", "content", "strict", "role_content_only"}, optional
        As for `trajkit.policy`. None: ``"text"`` under ``"agents"``, ``"strict"`` under
        ``"generations"``, else ``"values"``.
    dispatch_tools : sequence of str
        Under ``"agents"``, tools whose calls send out a sub-agent.
    fork_threshold : int
        Under ``"generations"``, a turn whose prompt lacks so many tokens or more of
        what its parent held is refused.
    sort : {"turn", "prompt"}
        Under ``"none"``: ``order`` is that of turns, or from the shortest prompt up.

    Returns
    -------
    Table
        `trajkit.schema.LINKS`, one row per turn, in the order of ``turns``.

    Raises
    ------
    SchemaError, InvalidTurnsError
        As `trajkit.linearize`.
    PolicyError
        ``route`` is none of the eight, or another choice is none, or ``route`` and
        ``order`` exclude each other.

    References
    ----------
    Message routing and its merge are slime's (spec: slime 2), token routing prime-rl's
    (spec: prime-rl 2.1), routing by prompts is Polar's (spec: Polar 2.3), by prefixes
    NeMo Gym's (spec: NeMo Gym 5), by generations miles' (spec: miles 1.2).
    """
    if merge_threshold is None:
        merge_threshold = DEFAULT_FORK_THRESHOLD
    merge_threshold = chosen_int("merge_threshold", merge_threshold)
    if equals not in EQUALS:
        raise PolicyError(f"equals={equals!r}: expected one of {', '.join(EQUALS)}")
    if equality is None:
        equality = _EQUALITY_OF_ROUTE.get(route, "values")
    if equality not in EQUALITIES:
        raise PolicyError(
            f"equality={equality!r}: expected one of {', '.join(EQUALITIES)}"
        )
    if order not in ORDERS:
        raise PolicyError(f"order={order!r}: expected one of {', '.join(ORDERS)}")
    check_order(route, order)
    if sort not in SORTS:
        raise PolicyError(f"sort={sort!r}: expected one of {', '.join(SORTS)}")
    tools = tool_names("dispatch_tools", dispatch_tools)
    fork_threshold = chosen_int("fork_threshold", fork_threshold)
    calls = read_calls(turns)
    links = find_links(
        calls,
        grow(calls),
        route,
        merge_threshold,
        equals,
        equality=equality,
        dispatch_tools=tools,
        order=order,
        fork_threshold=fork_threshold,
        sort=sort,
    )
    return links_table(calls, links)


def find_links(
    calls: Calls,
    forest: Forest,
    route: Route,
    merge_threshold: int,
    equals: Equals,
    *,
    equality: Equality = "values",
    dispatch_tools: tuple[str, ...] = DISPATCH_TOOLS,
    order: Order = "tree",
    fork_threshold: int = 1,
    sort: Sort = "turn",
) -> Records:
    """The link of every call, dtype LINK, ``lcp`` unset."""
    n_calls = len(calls.calls)
    links = np.zeros(n_calls, LINK)
    if route == "messages":
        calls = rekeyed(calls, equality)
        n_nodes, n_table = _core.tree_size(calls.requests, calls.session_offsets)
        _core.route_messages(
            calls.calls,
            calls.requests,
            calls.session_offsets,
            forest.nodes,
            forest.ends,
            merge_threshold,
            EQUALS.index(equals),
            pooled(n_nodes, MESSAGE),
            np.empty(n_table, np.int32),
            np.empty(n_calls, np.int32),
            np.empty(len(forest.nodes), np.int32),
            np.empty(len(forest.nodes), np.int32),
            np.empty(n_calls, np.int32),
            links,
        )
    elif route == "agents":
        classes = classify(calls, identity_of(equality))
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
    elif route == "tokens":
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
    elif route == "generations":
        calls = rekeyed(calls, equality)
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
            np.empty((2, len(forest.nodes)), np.int32),
            np.empty((7, n_calls), np.int32),
            links,
        )
    elif route == "prefix":
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
    elif route in ("previous", "none"):
        starts = calls.session_offsets[:-1]
        place = np.arange(n_calls, dtype=np.int32)
        ranked = by_prompt(calls) if route == "none" and sort == "prompt" else place
        first = np.repeat(starts, np.diff(calls.session_offsets))
        links["order"][ranked] = place - first
        links["demoted_by"] = -1
        links["parent"] = place - 1 if route == "previous" else -1
        links["why"] = WHY.index("previous" if route == "previous" else "root")
        links["parent"][starts] = -1
        links["why"][starts] = WHY.index("root")
    elif route == "prompts":
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
    else:
        raise PolicyError(f"route={route!r}: expected one of {', '.join(ROUTES)}")
    if order == "commit":
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
        policy.route,
        policy.merge_threshold,
        policy.equals,
        equality=policy.equality,
        dispatch_tools=policy.dispatch_tools,
        order=policy.order,
        fork_threshold=policy.fork_threshold,
        sort=policy.sort,
    )


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
                pa.array(links["why"].astype(np.int8)), pa.array(WHY)
            ),
            pa.array(links["order"], mask=links["order"] < 0),
            _turns(calls, links["demoted_by"]),
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


def read_links(calls: Calls, table: TableLike) -> Records:
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
    for name in ("parent", "demoted_by"):
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
    why = table.column("why").combine_chunks()
    names = why.dictionary.to_pylist()
    ranks = np.array([WHY.index(name) for name in names], np.int32)
    codes = why.indices.fill_null(0).to_numpy()
    links["why"] = ranks[codes] if len(names) else 0
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
    index, absent = named_calls(calls.turn_index, calls.session_offsets, wanted)
    if len(absent):
        call = int(absent[0])
        raise InvalidTurnsError(
            f"{calls.place(call)}: {name} {wanted[call]} is no turn of the session"
        )
    return index
