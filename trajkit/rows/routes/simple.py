"""Routes that a kernel follows, and those that look at no other call."""

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit.policies import TIE_BREAKS, Policy
from trajkit.rows.routes.links import (
    REASONS,
    empty_links,
    first_of_session,
    optional_column,
)
from trajkit.tables.ragged import Ints, Records
from trajkit.turns.message_equality import with_equality
from trajkit.turns.sessions import Forest, Sessions


def by_messages(calls: Sessions, forest: Forest, policy: Policy) -> Records:
    """Each call continues the nearest reply above its messages, as slime routes them.

    Tokens choose among equal replies (``tie_break``), and where a call has no messages.
    """
    links = empty_links(calls)
    keyed = with_equality(calls, policy.message_equality)
    _core.route_messages(
        forest.paths,
        keyed.requests,
        _tools_of(calls) if policy.compare_tools else None,
        policy.merge_threshold,
        TIE_BREAKS[policy.tie_break],
        links,
    )
    return links


def _tools_of(calls: Sessions) -> Ints | None:
    """A number for the tools of each call, the same for equal ``tools_key``; or None.

    Shape (n_calls,); without the column, all calls have the same tools.
    """
    keys = optional_column(calls, "tools_key", pa.string())
    if not keys:
        return None
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int32)


def by_tokens(calls: Sessions, forest: Forest, policy: Policy) -> Records:
    """Each call continues the chain whose last path is the longest prefix of its prompt."""
    return _by_chain_ends(calls, forest, of_prompts=False)


def by_prompts(calls: Sessions, forest: Forest, policy: Policy) -> Records:
    """As `by_tokens`, but a chain ends with its last prompt: outputs are not compared."""
    return _by_chain_ends(calls, forest, of_prompts=True)


def _by_chain_ends(calls: Sessions, forest: Forest, *, of_prompts: bool) -> Records:
    links, n_calls = empty_links(calls), len(calls.calls)
    first = _core.route_chains(forest.paths, of_prompts, links)
    reason = REASONS["prompts" if of_prompts else "tokens"]
    links["link_reason"][links["parent"] >= 0] = reason
    # chain by chain, in order of their first calls, and session by session
    ranked = np.argsort(first, kind="stable")
    links["order"][ranked] = np.arange(n_calls)
    links["order"] -= first_of_session(calls)
    return links


def by_previous(calls: Sessions, forest: Forest, policy: Policy) -> Records:
    """Each call continues the one before it in its session."""
    links = empty_links(calls)
    index = np.arange(len(links), dtype=np.int32)
    first = first_of_session(calls)
    links["order"] = index - first
    later = index > first
    links["parent"][later] = index[later] - 1
    links["link_reason"][later] = REASONS["previous"]
    return links


def by_none(calls: Sessions, forest: Forest, policy: Policy) -> Records:
    """Every call is a root, in the order of turns or from the shortest prompt up."""
    links = empty_links(calls)
    index = np.arange(len(links), dtype=np.int32)
    ranked = calls.by_prompt() if policy.row_order == "prompt" else index
    links["order"][ranked] = index - first_of_session(calls)
    return links
