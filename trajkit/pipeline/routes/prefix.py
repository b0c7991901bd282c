"""The call, recorded before or after, whose path is the longest prefix of a prompt.

If several calls have that path, the parent is ambiguous; if several calls have one prompt
(retries), only what continues them decides between them. Such calls are quarantined, and
with them every chain that contains one (policy ``nemo``).
"""

import numpy as np

from trajkit._arrow.ragged import Ints, Records
from trajkit.pipeline.routes.links import REASONS, empty_links, sessions_of
from trajkit.pipeline.routes.nodes import nodes_within_prompts, prompt_nodes
from trajkit.policies import Policy
from trajkit.turns.call_order import by_prompt
from trajkit.turns.sessions import Forest, Sessions


def by_prefix(calls: Sessions, forest: Forest, policy: Policy) -> Records:
    """Each call continues the call whose path is the longest prefix of its prompt.

    Calls without output can neither be continued nor trained. Those in a chain are in
    order of prompt length, equals by ``request_id``.
    """
    links = empty_links(calls)
    ranked = by_prompt(calls)
    sampled = calls.calls["out_len"][ranked] > 0
    links["parent"], ambiguous = _longest_prefixes(calls, forest, ranked[sampled])
    links["link_reason"] = np.where(
        ambiguous,
        REASONS["ambiguous"],
        np.where(links["parent"] >= 0, REASONS["tokens"], REASONS["root"]),
    )
    links["link_reason"][calls.calls["out_len"] == 0] = REASONS["empty"]

    chains = _Chains(calls, forest, links)
    for session in sessions_of(calls):
        within = slice(session.start, session.stop)
        chains.arrange(ranked[within][sampled[within]].tolist())
    links["order"], links["link_reason"] = chains.orders, chains.reasons
    return links


def _longest_prefixes(
    calls: Sessions, forest: Forest, ranked: Ints
) -> tuple[Ints, np.typing.NDArray[np.bool_]]:
    """The first of ``ranked`` whose path is the longest prefix of each one's prompt, or -1.

    And whether several calls have that path.
    """
    n_nodes = len(forest.nodes)
    first = np.full(n_nodes, -1, np.int32)
    first[forest.ends[ranked[::-1]]] = ranked[::-1]  # the last that is written counts
    several = np.bincount(forest.ends[ranked], minlength=n_nodes) > 1
    # The nearest node at or above each where a path ends; a root without one is its own.
    above = np.where(first >= 0, np.arange(n_nodes), forest.nodes["parent"])
    above = np.where(above < 0, np.arange(n_nodes), above)
    while not np.array_equal(above, higher := above[above]):
        above = higher
    parents = np.full(len(calls.calls), -1, np.int32)
    ambiguous = np.zeros(len(calls.calls), np.bool_)
    node = above[nodes_within_prompts(forest, calls.calls["prompt_len"])[ranked]]
    parents[ranked] = first[node]
    ambiguous[ranked] = several[node]
    return parents, ambiguous


class _Chains:
    """Which calls are quarantined, and the order of the others."""

    def __init__(self, calls: Sessions, forest: Forest, links: Records) -> None:
        self._parents = links["parent"].tolist()
        self.reasons = links["link_reason"].tolist()
        self.orders = [-1] * len(links)
        # Calls with one prompt have one node and one length.
        nodes = prompt_nodes(forest, calls.calls["prompt_len"])
        self._prompts = list(
            zip(nodes.tolist(), calls.calls["prompt_len"].tolist(), strict=True)
        )

    def arrange(self, ranked: list[int]) -> None:
        """Complete the reasons of a session's calls, and rank those in a chain."""
        parents = self._parents
        quarantined = self._quarantined(ranked)
        sound: set[int] = set()  # no call from the root to these is quarantined
        for call in ranked:
            if call not in quarantined and (
                parents[call] < 0 or parents[call] in sound
            ):
                sound.add(call)
        # A chain runs from a root to a call without children.
        continued = {parents[call] for call in ranked}
        chained: set[int] = set()
        for call in reversed(ranked):
            if call in sound and (call not in continued or call in chained):
                chained.update((call, parents[call]))
        rank = 0
        for call in ranked:
            if call in chained:
                self.orders[call] = rank
                rank += 1
            elif self.reasons[call] in (REASONS["root"], REASONS["tokens"]):
                self.reasons[call] = REASONS["chain_quarantined"]

    def _quarantined(self, ranked: list[int]) -> set[int]:
        """The calls that are ambiguous or a rejected retry."""
        parents, reasons = self._parents, self.reasons
        ambiguous = {call for call in ranked if reasons[call] == REASONS["ambiguous"]}
        extended = {parents[call] for call in ranked if call not in ambiguous}
        families: dict[tuple[int, int], list[int]] = {}
        for call in ranked:
            families.setdefault(self._prompts[call], []).append(call)
        rejected = set(ambiguous)
        for family in families.values():
            if len(family) == 1:
                continue
            resolved = not extended.isdisjoint(family)
            for call in family:
                if call in ambiguous:
                    reason = "ambiguous" if resolved else "unresolved_ambiguous"
                elif call in extended:
                    continue
                elif resolved:
                    reason = "superseded"
                    rejected.add(call)
                elif call == family[0]:
                    reason = "unresolved_kept"
                else:
                    reason = "unresolved"
                    rejected.add(call)
                reasons[call] = REASONS[reason]
        return rejected
