"""Where prompts end in a forest of paths (trajkit.turns.sessions.Forest)."""

import numpy as np

from trajkit.tables.ragged import Ints, Longs
from trajkit.turns.sessions import Forest


def prompt_nodes(forest: Forest, prompt_len: Longs) -> Ints:
    """The node in which each call's prompt ends; equal prompts end in the same one."""
    nodes, at = forest.nodes, forest.ends.copy()
    beyond = np.flatnonzero(nodes["start"][at] >= prompt_len)
    while len(beyond):
        at[beyond] = nodes["parent"][at[beyond]]
        beyond = beyond[nodes["start"][at[beyond]] >= prompt_len[beyond]]
    return at


def nodes_within_prompts(forest: Forest, prompt_len: Longs) -> Ints:
    """The last node of each call's path that ends inside its prompt or with it.

    A path that is a prefix of the prompt ends there or above.
    """
    at = prompt_nodes(forest, prompt_len)
    whole = forest.nodes["stop"][at] <= prompt_len
    return np.where(whole, at, forest.nodes["parent"][at])
