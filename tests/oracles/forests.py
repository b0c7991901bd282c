"""Slow, obvious twins of the rules that make a forest of whole calls: NeMo Gym, miles.

Turns are as in `tests.oracles.rows`; ``request_id`` and ``started_at`` may be there.
"""

from tests.oracles.rows import (
    Link,
    held,
    lcp,
    most_repeated,
)


def by_prompt(turns):
    """Positions, shortest prompt first, then by request_id, those without one last."""

    def key(i):
        name = turns[i].get("request_id")
        return len(turns[i]["prompt_ids"]), name is None, name or "", i

    return sorted(range(len(turns)), key=key)


def recorded_links(turns):
    """NeMo Gym's prefix_merging: one `Link` per turn.

    A turn may have ``parent_resolution`` and ``parent_request``, which were recorded at
    request time, and one of a session ``scored``. Without recorded parents, a scored turn
    counts all the same.
    """
    links = [Link(why="empty") for _ in turns]
    sampled = [i for i in by_prompt(turns) if turns[i]["output_ids"]]
    terminal = next((i for i, turn in enumerate(turns) if turn.get("scored")), None)
    decided = [
        turn.get("parent_resolution") or turn.get("parent_request") for turn in turns
    ]
    ambiguous = set()
    for rank, i in enumerate(sampled):
        turn, prompt, placed = turns[i], turns[i]["prompt_ids"], sampled[:rank]
        begin = [j for j in placed if prompt[: len(held(turns[j]))] == held(turns[j])]
        name = turn.get("parent_request")
        longest = [
            j
            for j in begin
            if len(held(turns[j])) == max(len(held(turns[k])) for k in begin)
        ]
        links[i].parent, links[i].why, links[i].order = None, "no_parent", None
        if not any(decided):
            links[i].why = "root"
            if longest:
                links[i].parent, links[i].why = longest[0], "tokens"
            if len(longest) > 1:
                links[i].why = "ambiguous"
                ambiguous.add(i)
        elif turn.get("parent_resolution") == "root":
            links[i].why = "root"
        elif name is not None:
            named = [j for j in placed if turns[j]["request_id"] == name]
            if set(named) & set(begin):
                links[i].parent, links[i].why = named[0], "recorded"
            elif not named and len(longest) == 1:
                links[i].parent, links[i].why = longest[0], "tokens"

    def path(i):
        while i is not None:
            yield i
            i = links[i].parent

    main = set(path(terminal)) if terminal is not None else set()
    continued = {links[i].parent for i in sampled if i not in ambiguous}
    quarantined = set(ambiguous)
    for i in sampled:
        family = [
            j
            for j in sampled
            if turns[j]["prompt_ids"] == turns[i]["prompt_ids"]
            and links[j].parent == links[i].parent
        ]
        if family[0] != i or len(family) == 1:
            continue
        kept = [j for j in family if j in main] or [j for j in family if j in continued]
        listed = not kept and terminal is None
        kept = kept or family[:1]
        for j in family:
            if j in ambiguous:
                links[j].why = "unresolved_ambiguous" if listed else "ambiguous"
            elif listed:
                links[j].why = "unresolved_kept" if j in kept else "unresolved"
            elif j not in kept:
                links[j].why = "superseded"
            if j not in kept:
                quarantined.add(j)

    parents = {links[i].parent for i in sampled}
    chained = set()
    for leaf in sampled:
        whole = set(path(leaf))
        ends = leaf == terminal or (leaf not in parents and terminal not in whole)
        if ends and not quarantined & whole:
            chained |= whole
    placed = [i for i in sampled if i in chained]
    if terminal in chained:
        placed.sort(key=lambda i: i not in main)
    for rank, i in enumerate(placed):
        links[i].order = rank
    for i in sampled:
        sound = ("root", "tokens", "recorded", "no_parent")
        if i not in chained and links[i].why in sound:
            links[i].why = "chain_quarantined"
    return links


# --- miles


def fields_of(message, equality):
    """What counts of a message; None, "" and [] are one."""
    names = ["role", "content"]
    if equality == "strict":
        names += ["reasoning_content", "tool_calls"]
    said = {}
    for name in names:
        value = message.get(name)
        if name == "tool_calls" and isinstance(value, list):
            value = [
                {k: v for k, v in call.items() if k != "index"}
                if isinstance(call, dict)
                else call
                for call in value
            ]
        if not (value is None or value == "" or value == []):
            said[name] = value
    return said


def strict(message):
    """What counts of a message for miles, if not told otherwise."""
    return fields_of(message, "strict")


def generation_links(turns, identity=strict, threshold=1):
    """miles' tree of generations: one `Link` per turn.

    ``identity`` gives what counts of a message.
    """
    links = []
    paths = {}  # generation -> its messages and its reply
    for i, turn in enumerate(turns):
        sent, reply = turn.get("prompt_messages"), turn.get("response_message")
        if sent is not None and not sent:
            links.append(Link(why="unrouted"))
            continue
        prompt = turn["prompt_ids"]
        if sent is None:
            parent = most_repeated(turns, list(paths), prompt)
            path = [object()]
        else:
            sent = [identity(message) for message in sent]
            parents = [j for j, path in paths.items() if sent[: len(path)] == path]
            parent = max(parents, key=lambda j: (len(paths[j]), j), default=None)
            path = [*sent, object() if reply is None else identity(reply)]
        if parent is None:
            links.append(Link())
        else:
            links.append(Link(parent, "tokens" if sent is None else "messages"))
            before = held(turns[parent])
            shared = lcp(before, prompt)
            if turns[parent].get("finish_reason") == "length":
                links[i].why = "refused_truncated"
                continue
            if shared < len(before) and (
                shared < len(turns[parent]["prompt_ids"])
                or len(before) - shared >= threshold
            ):
                links[i].why = "refused_tokens"
                continue
        paths[i] = path

    children = {i: [j for j in paths if links[j].parent == i] for i in paths}
    chains = []
    for leaf in paths:
        if children[leaf]:
            continue
        if links[leaf].parent is not None and leaf < children[links[leaf].parent][-1]:
            links[leaf].why = "retried"
            continue
        chains.append([leaf])
        while links[chains[-1][0]].parent is not None:
            chains[-1].insert(0, links[chains[-1][0]].parent)
    chains.sort(key=lambda chain: (-len(chain), -chain[-1]))
    rank = 0
    for i in (i for chain in chains for i in chain):
        if links[i].order is None:
            links[i].order = rank
            rank += 1
    return links
