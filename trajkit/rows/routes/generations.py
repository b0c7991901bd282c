"""A forest of generations, by messages, checked by tokens (policy ``miles``)."""

import numpy as np

from trajkit import _core
from trajkit._kernel_names import STOPS
from trajkit.policies import Policy
from trajkit.rows.routes.links import (
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
    links = empty_links(calls)
    router = _Generations(calls, forest, policy)
    for session in sessions_of(calls):
        router.route(session)
        router.rank(session)
    links["parent"], links["order"] = router.parents, router.orders
    links["link_reason"] = router.reasons
    return links


class _Generations:
    """The generations of all sessions so far, and the links of their calls."""

    def __init__(self, calls: Sessions, forest: Forest, policy: Policy) -> None:
        n_calls = len(calls.calls)
        self._threshold = policy.fork_threshold
        self._tokens = forest.paths
        self._index = _core.TokenIndex(forest.paths)
        self._prompt_len = calls.calls["prompt_len"].tolist()
        self._path_len = calls.path_len.tolist()
        self._stopped = (calls.calls["stop"] == STOPS["length"]).tolist()

        messages = grow_messages(with_equality(calls, policy.message_equality))
        n_keys, shared = (calls.requests[name] for name in ("n_keys", "shared"))
        listed, replied = n_keys >= 0, calls.requests["reply_key"] != 0
        n_messages = np.where(listed, shared.astype(np.int64) + n_keys, 0)
        within = nodes_within_prompts(messages, KEY_TOKENS * n_messages)
        self._listed, self._n_messages = listed.tolist(), n_messages.tolist()
        self._last_nodes = within.tolist()
        self._ends = np.where(listed & replied, messages.ends, -1).tolist()
        self._above = messages.nodes["parent"].tolist()
        # per node: calls whose messages and reply end there, less the refused ones
        self._n_open = np.bincount(
            messages.ends[listed & replied], minlength=len(messages.nodes)
        ).tolist()
        # by the node where its messages and its reply end, the latest generation
        self._latest: dict[int, int] = {}

        self._depths = [0] * n_calls  # generations from the root on; 0: none
        self.parents = [-1] * n_calls
        self.orders = [-1] * n_calls
        self.reasons = [REASONS["root"]] * n_calls

    def route(self, session: range) -> None:
        """Find the parents of a session's calls."""
        for call in session:
            if self._listed[call] and self._n_messages[call] == 0:
                self.reasons[call] = REASONS["unrouted"]
                continue
            parent = self.parents[call] = self._continued(call)
            refusal = None
            if parent >= 0:
                refusal = self._refusal(parent, call)
                by = "messages" if self._listed[call] else "tokens"
                self.reasons[call] = REASONS[refusal or by]
            end = self._ends[call]
            if refusal:
                if end >= 0:
                    self._n_open[end] -= 1
                continue
            self._depths[call] = 1 + (self._depths[parent] if parent >= 0 else 0)
            self._index.add(call)
            if end >= 0:
                self._latest[end] = call

    def _continued(self, call: int) -> int:
        """The generation that a call continues, or -1."""
        if not self._listed[call]:
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

    def _refusal(self, parent: int, call: int) -> str | None:
        """The reason why a call does not continue the generation, or None."""
        if self._stopped[parent]:
            return "refused_truncated"
        shared = _core.shared_length(self._tokens, parent, call)
        drift = self._path_len[parent] - shared
        in_prompt = shared < self._prompt_len[parent]
        if drift > 0 and (in_prompt or drift >= self._threshold):
            return "refused_tokens"
        return None

    def rank(self, session: range) -> None:
        """Leave out retries; rank the rest: the deepest chain first, then the latest."""
        last_child: dict[int, int] = {}
        for call in session:
            if self._depths[call]:
                last_child[self.parents[call]] = call
        leaves = []
        for call in session:
            if self._depths[call] == 0 or call in last_child:
                continue
            parent = self.parents[call]
            if parent >= 0 and last_child[parent] != call:
                self.reasons[call] = REASONS["retried"]
            else:
                leaves.append(call)
        leaves.sort(key=lambda leaf: (self._depths[leaf], leaf), reverse=True)
        rank = 0
        for leaf in leaves:
            chain, call = [], leaf
            while call >= 0 and self.orders[call] < 0:
                chain.append(call)
                call = self.parents[call]
            for call in reversed(chain):
                self.orders[call] = rank
                rank += 1
