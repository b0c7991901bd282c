"""The chain of calls whose end is the longest prefix of a prompt."""

import numpy as np

from trajkit import _core
from trajkit.policies import Policy
from trajkit.rows.routes.links import REASONS, empty_links, first_of_session
from trajkit.tables.ragged import Records
from trajkit.turns.sessions import Forest, Sessions


def by_tokens(calls: Sessions, forest: Forest, policy: Policy) -> Records:
    """Each call continues the chain whose last path is the longest prefix of its prompt."""
    return _by_chain_ends(calls, forest, of_prompts=False)


def by_prompts(calls: Sessions, forest: Forest, policy: Policy) -> Records:
    """As `by_tokens`, but a chain ends with its last prompt: outputs are not compared."""
    return _by_chain_ends(calls, forest, of_prompts=True)


def _by_chain_ends(calls: Sessions, forest: Forest, *, of_prompts: bool) -> Records:
    links, n_calls = empty_links(calls), len(calls.calls)
    first = np.empty(n_calls, np.int32)
    _core.route_chains(forest.paths, of_prompts, first, links)
    reason = REASONS["prompts" if of_prompts else "tokens"]
    links["link_reason"][links["parent"] >= 0] = reason
    # chain by chain, in order of their first calls, and session by session
    ranked = np.argsort(first, kind="stable")
    links["order"][ranked] = np.arange(n_calls)
    links["order"] -= first_of_session(calls)
    return links
