"""The call, recorded before or after, whose path is the longest prefix of a prompt.

If several calls have that path, the parent is ambiguous. In a session that has recorded
parents (trajkit.rows.routes.recorded), these are the parents instead. If several calls
have one prompt and one parent (retries), only what continues them decides between them.
Rejected and ambiguous calls are quarantined, and with them every chain that contains one
(policy ``nemo``).
"""

import numpy as np

from trajkit.policies import Policy
from trajkit.rows.routes.links import REASONS, empty_links, sessions_of
from trajkit.rows.routes.nodes import nodes_within_prompts, prompt_nodes
from trajkit.rows.routes.recorded import RecordedParents, scored_turns
from trajkit.tables.ragged import Ints, Records
from trajkit.turns.call_order import by_prompt
from trajkit.turns.sessions import Forest, Sessions


def by_prefix(calls: Sessions, forest: Forest, policy: Policy) -> Records:
    """Each call continues its recorded parent, or the longest path that begins its prompt.

    Sessions without output can neither be continued nor trained. Those in a chain are in
    order of prompt length, equals by ``request_id``; the chain of a scored turn is the
    first.
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

    recorded = RecordedParents(calls, forest, links)
    chains = _Chains(calls, forest, links)
    scored = scored_turns(calls)
    for session in sessions_of(calls):
        within = slice(session.start, session.stop)
        in_order = ranked[within][sampled[within]].tolist()
        recorded.follow(session, in_order, chains.parents, chains.reasons)
        chains.arrange(in_order, scored.get(session.start))
    links["parent"], links["order"] = chains.parents, chains.orders
    links["link_reason"] = chains.reasons
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
        self.parents = links["parent"].tolist()
        self.reasons = links["link_reason"].tolist()
        self.orders = [-1] * len(links)
        # Sessions with one prompt have one node and one length.
        nodes = prompt_nodes(forest, calls.calls["prompt_len"])
        self._prompts = list(
            zip(nodes.tolist(), calls.calls["prompt_len"].tolist(), strict=True)
        )

    def arrange(self, ranked: list[int], scored: int | None) -> None:
        """Complete the reasons of a session's calls, and rank those in a chain.

        Nothing continues the call ``scored``, and its chain is the first.
        """
        parents = self.parents
        quarantined = self._quarantined(ranked, scored)
        sound: set[int] = set()  # no call from the root to these is quarantined
        for call in ranked:
            parent = parents[call]
            if call not in quarantined and (
                parent < 0 or (parent in sound and parent != scored)
            ):
                sound.add(call)
        # A chain runs from a root to a call without children, or to the scored one.
        continued = {parents[call] for call in ranked} - {scored}
        chained: set[int] = set()
        for call in reversed(ranked):
            if call in sound and (call not in continued or call in chained):
                chained.update((call, parents[call]))
        main = self._up(scored) if scored in chained else []
        rank = 0
        for call in sorted(ranked, key=lambda call: call not in main):
            if call in chained:
                self.orders[call] = rank
                rank += 1
            elif self.reasons[call] in _SOUND:
                self.reasons[call] = REASONS["chain_quarantined"]

    def _up(self, call: int | None) -> list[int]:
        """A call and those that it continues."""
        chain = []
        while call is not None and call >= 0:
            chain.append(call)
            call = self.parents[call]
        return chain

    def _quarantined(self, ranked: list[int], scored: int | None) -> set[int]:
        """The calls that are ambiguous or a rejected retry.

        A retry in the chain of the scored call is kept before those that are continued.
        """
        main = set(self._up(scored))
        parents, reasons = self.parents, self.reasons
        ambiguous = {call for call in ranked if reasons[call] == REASONS["ambiguous"]}
        extended = {parents[call] for call in ranked if call not in ambiguous}
        families: dict[tuple[int, tuple[int, int]], list[int]] = {}
        for call in ranked:
            key = (parents[call], self._prompts[call])
            families.setdefault(key, []).append(call)
        rejected = set(ambiguous)
        for family in families.values():
            if len(family) == 1:
                continue
            kept = extended if main.isdisjoint(family) else main
            resolved = not kept.isdisjoint(family)
            if scored is not None and not resolved:
                kept, resolved = {family[0]}, True
            for call in family:
                if call in ambiguous:
                    reason = "ambiguous" if resolved else "unresolved_ambiguous"
                elif call in kept:
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


_SOUND = {REASONS[name] for name in ("root", "tokens", "recorded", "no_parent")}
"""The reasons of calls that are not quarantined themselves."""
