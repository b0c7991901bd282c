"""Which call each call continues: a function per rule, by the value of ``parent_by``.

Each takes the calls, the forest of their token paths and the policy, and returns a record
of dtype LINK for every call.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit.policies import TIE_BREAKS, ParentBy, Policy
from trajkit.rows.routes.agents import by_agents
from trajkit.rows.routes.generations import by_generations
from trajkit.rows.routes.prefix import by_prefix
from trajkit.rows.routes.shared import (
    REASONS,
    empty_links,
    first_of_session,
    optional_column,
)
from trajkit.tables.ragged import Records
from trajkit.turns.message_equality import with_equality
from trajkit.turns.sessions import Forest, Sessions

Route: TypeAlias = Callable[[Sessions, Forest, Policy], Records]


def by_messages(calls: Sessions, forest: Forest, policy: Policy) -> Records:
    """Each call continues the nearest reply above its messages, as slime routes them.

    Tokens choose among equal replies (``tie_break``), and where a call has no messages.
    """
    links, tools = empty_links(calls), None
    if policy.compare_tools:
        keys = optional_column(calls, "tools_key", pa.string())
        known = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        tools = np.array([known[key] for key in keys], np.int32) if keys else None
    keyed = with_equality(
        calls, policy.message_equality
    )  # holds the keys of its requests
    _core.route_messages(
        forest.paths,
        keyed.requests,
        tools,
        policy.merge_threshold,
        TIE_BREAKS[policy.tie_break],
        links,
    )
    return links


def by_tokens(calls: Sessions, forest: Forest, policy: Policy) -> Records:
    """Each call continues the chain whose end is the longest prefix of its prompt.

    A chain ends with its last call's path or, by prompts, with that call's prompt: then
    outputs are not compared.
    """
    links, of_prompts = empty_links(calls), policy.parent_by == "prompts"
    first = _core.route_chains(forest.paths, of_prompts, links)
    reason = REASONS["prompts" if of_prompts else "tokens"]
    links["link_reason"][links["parent"] >= 0] = reason
    # chain by chain, in order of their first calls, and session by session
    links["order"][np.argsort(first, kind="stable")] = np.arange(len(links))
    links["order"] -= first_of_session(calls)
    return links


def by_previous(calls: Sessions, forest: Forest, policy: Policy) -> Records:
    """Each call continues the one before it in its session."""
    links, index = empty_links(calls), np.arange(len(calls.calls))
    links["order"] = index - first_of_session(calls)
    later = links["order"] > 0
    links["parent"][later] = index[later] - 1
    links["link_reason"][later] = REASONS["previous"]
    return links


def by_none(calls: Sessions, forest: Forest, policy: Policy) -> Records:
    """Every call is a root, in the order of turns or from the shortest prompt up."""
    links, index = empty_links(calls), np.arange(len(calls.calls))
    ranked = calls.by_prompt() if policy.row_order == "prompt" else index
    links["order"][ranked] = index - first_of_session(calls)
    return links


ROUTES: Mapping[ParentBy, Route] = {
    "messages": by_messages,
    "agents": by_agents,
    "tokens": by_tokens,
    "previous": by_previous,
    "none": by_none,
    "prompts": by_tokens,
    "prefix": by_prefix,
    "generations": by_generations,
}
