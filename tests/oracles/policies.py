"""The twin of any policy: links by its way to find parents, rows by its choices."""

from itertools import pairwise

from tests.oracles import choices, forests, graph, segments, splice
from tests.oracles import rows as reference
from tests.oracles.rows import Link

IDENTITIES = {
    "values": lambda message: message,
    "text": segments.text,
    "content": graph.identity,
    "strict": forests.strict,
    "role_content_only": lambda message: forests.fields_of(
        message, "role_content_only"
    ),
}
"""What counts of a message, by message_equality; messages are equal where it is."""


def twins_of(turns, policy, max_row_tokens=None, reward=1.0):
    """Links, rows and the line of the report of one session, as lists of dicts."""
    links = links_of(turns, policy)
    rows, report = choices.linearize(turns, links, policy, max_row_tokens)
    for k, row in enumerate(rows):
        is_final = row["segment_kind"] == "final"
        if all(one["segment_kind"] is None for one in rows):
            is_final = k == len(rows) - 1
        row["reward"] = {
            "copy": reward,
            "uniform": reward / len(rows),
            "final_only": reward if is_final else 0.0,
        }[policy.rewards]
    return {"links": links, "rows": rows, "report": [report]}


def links_of(turns, policy):
    """One dict per turn, as the columns of ``schema.LINKS`` without session_id."""
    route = policy.parent_by
    if route == "messages":
        links = reference.message_links(
            projected(turns, policy.message_equality),
            policy.merge_threshold,
            policy.tie_break,
            policy.compare_tools,
        )
    elif route == "agents":
        links = agent_links(turns, policy)
    elif route == "prompts":
        links = splice.prompt_links(turns)
    elif route == "prefix":
        links = forests.recorded_links(turns)
    elif route == "generations":
        links = forests.generation_links(
            turns, IDENTITIES[policy.message_equality], policy.fork_threshold
        )
    elif route == "tokens":
        links = reference.token_links(turns)
    elif route == "previous":
        links = reference.previous_links(turns)
    else:
        ranked = list(range(len(turns)))
        if policy.row_order == "prompt":
            ranked = forests.by_prompt(turns)
        links = [Link(order=ranked.index(i)) for i in range(len(turns))]
    if policy.chain_order == "recorded":
        for rank, one in enumerate(one for one in links if one.order is not None):
            one.order = rank
    return reference.as_dicts(turns, links)


def projected(turns, equality):
    """The turns, each message with nothing but its role and what counts of it."""
    identity = IDENTITIES[equality]

    def counted(message):
        return {"role": message.get("role"), "is": identity(message)}

    return [
        {
            **turn,
            "prompt_messages": turn["prompt_messages"]
            and [counted(message) for message in turn["prompt_messages"]],
            "response_message": turn["response_message"]
            and counted(turn["response_message"]),
        }
        for turn in turns
    ]


def agent_links(turns, policy):
    """One `Link` per turn: the turns of a segment, one after another."""
    routed = segments.segments_of(
        turns, policy.dispatch_tools, IDENTITIES[policy.message_equality]
    )
    links = [Link(why="unrouted") for _ in turns]
    for i, route in enumerate(routed.routes):
        if route is not None:
            reasons = {"new": "root", "wipe": "history_replaced", "append": None}
            links[i].why = reasons[route.split("/")[1]]
    rank = 0
    for kind, segment in routed.frozen:
        for i in segment:
            links[i].order, links[i].segment = rank, kind
            rank += 1
        for before, i in pairwise(segment):
            links[i].parent = before
            listed = [turns[k]["prompt_messages"] is not None for k in (before, i)]
            links[i].why = "messages" if all(listed) else "tokens"
    return links
