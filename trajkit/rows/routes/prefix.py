"""The call, recorded before or after, whose path is the longest prefix of a prompt.

If several calls have that path, the parent is ambiguous. In a session that has recorded
parents (`RecordedParents`), these are the parents instead. If several calls
have one prompt and one parent (retries), only what continues them decides between them.
Rejected and ambiguous calls are quarantined, and with them every chain that contains one
(policy ``nemo``).
"""

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit.errors import InvalidTurnsError
from trajkit.policies import Policy
from trajkit.rows.routes.links import (
    REASONS,
    empty_links,
    nodes_within_prompts,
    optional_column,
    prompt_nodes,
    sessions_of,
)
from trajkit.tables.ragged import Ints, Records
from trajkit.turns.sessions import Forest, Sessions

RESOLUTIONS = ("root", "resolved", "unresolved")
"""What a source can have recorded of a turn's parent."""


def scored_turns(calls: Sessions) -> dict[int, int]:
    """The call whose reply was scored, by the first call of its session.

    Raises InvalidTurnsError if a session has two.
    """
    scored: dict[int, int] = {}
    values = optional_column(calls, "scored", pa.bool_())
    for session in sessions_of(calls) if values else ():
        for call in session:
            if values[call]:
                before = scored.setdefault(session.start, call)
                if before != call:
                    raise InvalidTurnsError(
                        f"{calls.place(call)}: scored is true, as of turn "
                        f"{calls.turn_index[before]}: expected one turn of a session"
                    )
    return scored


def created_ranks(calls: Sessions, links: Records) -> Ints:
    """The rank of each call by its creation; the root of a scored turn's chain is first."""
    ranks = calls.by_creation()
    for call in scored_turns(calls).values():
        if links["order"][call] >= 0:
            while links["parent"][call] >= 0:
                call = links["parent"][call]
            ranks[call] = -1
    return ranks


class RecordedParents:
    """The recorded parents of the calls; ``links`` has those that begin their prompts."""

    def __init__(self, calls: Sessions, forest: Forest, links: Records) -> None:
        self._calls, self._paths = calls, forest.paths
        self._path_len = calls.path_len
        self._resolutions = optional_column(calls, "parent_resolution", pa.string())
        self._parents = optional_column(calls, "parent_request", pa.string())
        self._has_any = bool(self._resolutions or self._parents)
        self._names = (
            optional_column(calls, "request_id", pa.string()) if self._has_any else []
        )
        n_calls = len(calls.calls)
        for values in (self._resolutions, self._parents, self._names):
            values += [None] * (n_calls - len(values))

    def follow(
        self, session: range, ranked: list[int], parents: list[int], reasons: list[int]
    ) -> None:
        """Replace parents and reasons of a session's calls, if it has recorded parents.

        ``ranked`` are the calls with an output, the shortest prompt first. Raises
        InvalidTurnsError for what contradicts itself.
        """
        if not self._has_any or not any(
            self._resolutions[call] is not None or self._parents[call] is not None
            for call in session
        ):
            return
        named = self._by_name(session)
        before: set[int] = set()
        for call in ranked:
            name = self._recorded_name(call)
            parent = -1 if name is None else named.get(name, -1)
            reason = "no_parent"
            if self._resolutions[call] == "root":
                reason = "root"
            elif parent in before:
                shared = _core.shared_length(self._paths, parent, call)
                if shared == self._path_len[parent]:
                    reason = "recorded"
            elif name is not None and reasons[call] == REASONS["tokens"]:
                # the recorded one is missing, and only one path begins the prompt
                parent, reason = parents[call], "tokens"
            parents[call] = parent if reason in ("recorded", "tokens") else -1
            reasons[call] = REASONS[reason]
            before.add(call)

    def _by_name(self, session: range) -> dict[object, int]:
        """The call of each request_id of a session."""
        named: dict[object, int] = {}
        for call in session:
            name = self._names[call]
            if name is not None and named.setdefault(name, call) != call:
                raise InvalidTurnsError(
                    f"{self._calls.place(call)}: request_id {name!r} is that of turn "
                    f"{self._calls.turn_index[named[name]]}, too: a session with "
                    "recorded parents has each once"
                )
        return named

    def _recorded_name(self, call: int) -> object:
        """The request_id of the recorded parent, or None."""
        resolution, name = self._resolutions[call], self._parents[call]
        if resolution is not None and resolution not in RESOLUTIONS:
            rule = f"expected one of {', '.join(RESOLUTIONS)}"
        elif resolution == "resolved" and name is None:
            rule = "parent_request is null: expected the request_id of the parent"
        elif resolution in ("root", "unresolved") and name is not None:
            rule = f"parent_request is {name!r}: expected null"
        else:
            return name
        raise InvalidTurnsError(
            f"{self._calls.place(call)}: parent_resolution is {resolution!r}, {rule}"
        )


def by_prefix(calls: Sessions, forest: Forest, policy: Policy) -> Records:
    """Each call continues its recorded parent, or the longest path that begins its prompt.

    Sessions without output can neither be continued nor trained. Those in a chain are in
    order of prompt length, equals by ``request_id``; the chain of a scored turn is the
    first.
    """
    links = empty_links(calls)
    ranked = calls.by_prompt()
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
