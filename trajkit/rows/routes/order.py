"""The call before, or none."""

import numpy as np

from trajkit.policies import Policy
from trajkit.rows.routes.links import REASONS, empty_links, first_of_session
from trajkit.tables.ragged import Records
from trajkit.turns.call_order import by_prompt
from trajkit.turns.sessions import Forest, Sessions


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
    ranked = by_prompt(calls) if policy.row_order == "prompt" else index
    links["order"][ranked] = index - first_of_session(calls)
    return links
