"""The slow, obvious twin of the edges between agents (docs/drift.md), for one session.

Turns are as in `tests.oracles.rows`, with the gateway's columns of agents.
"""

from tests.oracles.rows import held, turn_indices

HISTORY = (None, "agent", "transcript")


def agent_edges(turns, links, compares):
    """A sorted list of (kind, turn) for each turn: the edges that end there.

    ``links`` has a dict per turn, with its parent and order; ``compares`` is whether they
    come from comparing prompts.
    """
    names = turn_indices(turns)
    spoken = [i for i, turn in enumerate(turns) if turn["call_kind"] in HISTORY]
    in_row = [compares and link["order"] is not None for link in links]

    def position(name):
        return None if name is None else names.index(name)

    def parent(i):
        return position(links[i]["parent"]) if in_row[i] else None

    def agent(i):
        turn, before = turns[i], parent(i)
        if turn["agent_id"] is not None:
            return turn["agent_id"]
        if turn["started_by_turn"] is not None:
            tool_call = turn["started_by_call"]
            return turn["started_by_turn"], i if tool_call is None else tool_call
        if before is None or turns[before]["agent_id"] is not None:
            return "main", None
        return agent(before)

    def continues(i, start):
        """Whether the turn has another as parent, or further up."""
        return parent(i) is not None and (
            parent(i) == start or continues(parent(i), start)
        )

    edges = [[] for _ in turns]
    started = {}
    for i in spoken:
        before, by = parent(i), position(turns[i]["started_by_turn"])
        earlier = [j for j in spoken if j < i and agent(j) == agent(i)]
        prompt = turns[i]["prompt_ids"]
        again = any(held(turn)[: len(prompt)] == prompt for turn in turns[:i])
        if by is not None and agent(i) not in started:
            started[agent(i)] = by
            edges[i].append(("call", names[by]))
        elif in_row[i] and before is None and earlier and not again:
            edges[i].append(("compaction", names[earlier[-1]]))
        if before in spoken and agent(before) != agent(i):
            edges[i].append(("continuation", names[before]))
    for name, by in started.items():
        last = max(i for i in spoken if agent(i) == name)
        for i in spoken:
            if i > last and agent(i) == agent(by) and continues(i, by):
                edges[i].append(("return", names[last]))
                break
    return [sorted(one) for one in edges]
