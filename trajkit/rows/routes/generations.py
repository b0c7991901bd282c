"""A forest of generations, by messages, checked by tokens (policy ``miles``)."""

import numpy as np

from trajkit import _core
from trajkit._kernel_names import STOPS
from trajkit.policies import Policy
from trajkit.rows.routes.shared import (
    KEY_TOKENS,
    REASONS,
    empty_links,
    grow_messages,
    nodes_within_prompts,
    sessions_of,
)
from trajkit.tables.ragged import Records
from trajkit.turns.message_equality import with_equality
from trajkit.turns.sessions import Forest, Sessions


def by_generations(calls: Sessions, forest: Forest, policy: Policy) -> Records:
    """Each call continues the deepest generation whose messages its request begins with.

    Of equals it is the latest; without messages, tokens decide (`_core.TokenIndex`). The
    call is refused, and no generation, if that one was stopped for its length, or if
    ``fork_threshold`` or more tokens of its path are not in the prompt. A leaf with a later
    sibling is a retry, and in no chain.
    """
    links, paths = empty_links(calls), forest.paths
    prompt_len, path_len = calls.calls["prompt_len"].tolist(), calls.path_len.tolist()
    stopped = (calls.calls["stop"] == STOPS["length"]).tolist()
    generations = _Generations(calls, forest, policy)
    parents, reasons = links["parent"].tolist(), links["link_reason"].tolist()
    orders = links["order"].tolist()
    depths = [0] * len(links)  # generations from the root on; 0: none

    def refusal(parent: int, call: int) -> str | None:
        if stopped[parent]:
            return "refused_truncated"
        shared = _core.shared_length(paths, parent, call)
        n_missing = path_len[parent] - shared
        in_prompt = shared < prompt_len[parent]
        if n_missing and (in_prompt or n_missing >= policy.fork_threshold):
            return "refused_tokens"
        return None

    for session in sessions_of(calls):
        for call in session:
            if generations.is_empty(call):
                reasons[call] = REASONS["unrouted"]
                continue
            parent = parents[call] = generations.find(call)
            refused = refusal(parent, call) if parent >= 0 else None
            if parent >= 0:
                by = "messages" if generations.listed[call] else "tokens"
                reasons[call] = REASONS[refused or by]
            generations.add(call, refused is not None)
            if refused is None:
                depths[call] = 1 + (depths[parent] if parent >= 0 else 0)
        last_child = {parents[call]: call for call in session if depths[call]}
        leaves = []
        for call in session:
            if depths[call] and call not in last_child:
                if parents[call] >= 0 and last_child[parents[call]] != call:
                    reasons[call] = REASONS["retried"]
                else:
                    leaves.append(call)
        # the deepest chain first, then the latest
        rank = 0
        for leaf in sorted(leaves, key=lambda one: (depths[one], one), reverse=True):
            chain, call = [], leaf
            while call >= 0 and orders[call] < 0:
                chain.append(call)
                call = parents[call]
            for call in reversed(chain):
                orders[call] = rank
                rank += 1
    links["parent"], links["order"], links["link_reason"] = parents, orders, reasons
    return links


class _Generations:
    """The generations so far, by the node where their messages and their reply end."""

    def __init__(self, calls: Sessions, forest: Forest, policy: Policy) -> None:
        self._index = _core.TokenIndex(forest.paths)
        messages = grow_messages(with_equality(calls, policy.message_equality))
        requests = calls.requests
        listed = requests["n_keys"] >= 0
        n_messages = np.where(
            listed, requests["shared"].astype(np.int64) + requests["n_keys"], 0
        )
        self.listed, self._n_messages = listed.tolist(), n_messages.tolist()
        within = nodes_within_prompts(messages, KEY_TOKENS * n_messages)
        self._last_nodes = within.tolist()
        replied = listed & (requests["reply_key"] != 0)
        self._ends = np.where(replied, messages.ends, -1).tolist()
        self._above = messages.nodes["parent"].tolist()
        # per node: calls whose messages and reply end there, less the refused ones
        ends = messages.ends[replied]
        self._n_open = np.bincount(ends, minlength=len(messages.nodes)).tolist()
        self._latest: dict[int, int] = {}

    def is_empty(self, call: int) -> bool:
        return bool(self.listed[call] and self._n_messages[call] == 0)

    def add(self, call: int, refused: bool) -> None:
        """Add a call as a generation, unless it is refused."""
        end = self._ends[call]
        if not refused:
            self._index.add(call)
        if end >= 0 and refused:
            self._n_open[end] -= 1
        elif end >= 0:
            self._latest[end] = call

    def find(self, call: int) -> int:
        """The generation that a call continues, or -1."""
        if not self.listed[call]:
            return self._index.find(call)
        node = self._open_node(self._last_nodes[call])
        while node >= 0 and node not in self._latest:
            node = self._open_node(self._above[node])
        return self._latest.get(node, -1)

    def _open_node(self, node: int) -> int:
        """The nearest node at or above where a generation ends or may yet end, or -1.

        Nodes where none does are left out of the way up.
        """
        above, n_open = self._above, self._n_open
        while node >= 0 and not n_open[node]:
            if above[node] >= 0 and not n_open[above[node]]:
                above[node] = above[above[node]]
            node = above[node]
        return node
