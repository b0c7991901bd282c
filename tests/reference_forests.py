"""Slow, obvious twins of the rules that make a forest of whole calls: NeMo Gym, miles.

Turns are as in `tests.reference`; ``request_id`` and ``started_at`` may be there.
"""

from tests.reference import (
    Link,
    Segment,
    flags,
    held,
    is_trainable,
    lcp,
    most_repeated,
    row_of,
    turn_indices,
)


def by_prompt(turns):
    """Positions, shortest prompt first, then by request_id, those without one last."""

    def key(i):
        name = turns[i].get("request_id")
        return len(turns[i]["prompt_ids"]), name is None, name or "", i

    return sorted(range(len(turns)), key=key)


def born(turns, i):
    """A key that sorts turns by when they were created."""
    start, name = turns[i].get("started_at"), turns[i].get("request_id")
    return start is None, start or 0, name is None, name or "", i


def prefix_links(turns):
    """NeMo Gym's prefix_merging: one `Link` per turn."""
    links = [Link(why="empty") for _ in turns]
    sampled = [i for i in by_prompt(turns) if turns[i]["output_ids"]]
    children = {i: [] for i in sampled}
    ambiguous = set()
    for i in sampled:
        prompt = turns[i]["prompt_ids"]
        prefixes = [
            j for j in sampled if prompt[: len(held(turns[j]))] == held(turns[j])
        ]
        longest = max((len(held(turns[j])) for j in prefixes), default=0)
        parents = [j for j in prefixes if len(held(turns[j])) == longest]
        links[i] = Link(parents[0], "tokens") if parents else Link()
        if parents:
            children[parents[0]].append(i)
        if len(parents) > 1:
            ambiguous.add(i)
            links[i].why = "ambiguous"

    quarantined = set(ambiguous)
    for i in sampled:
        group = [j for j in sampled if turns[j]["prompt_ids"] == turns[i]["prompt_ids"]]
        if group[0] != i or len(group) == 1:
            continue
        extended = [j for j in group if set(children[j]) - ambiguous]
        for j in group:
            if extended:
                if j not in extended and j not in ambiguous:
                    links[j].why = "superseded"
                    quarantined.add(j)
            elif j in ambiguous:
                links[j].why = "unresolved_ambiguous"
            elif j == group[0]:
                links[j].why = "unresolved_kept"
            else:
                links[j].why = "unresolved"
                quarantined.add(j)

    chained = set()
    for leaf in sampled:
        path = []
        i = leaf
        while i is not None:
            path.append(i)
            i = links[i].parent
        if not children[leaf] and not quarantined & set(path):
            chained |= set(path)
    for rank, i in enumerate(i for i in sampled if i in chained):
        links[i].order = rank
    for i in sampled:
        if i not in chained and links[i].why in ("root", "tokens"):
            links[i].why = "chain_quarantined"
    return links


def forest_chains(links):
    """The turns from each root to each leaf, leaves in the order of the links."""
    placed = [i for i, one in enumerate(links) if one.order is not None]
    continued = {links[i].parent for i in placed}
    for leaf in sorted(placed, key=lambda i: links[i].order):
        if leaf not in continued:
            path = [leaf]
            while links[path[0]].parent is not None:
                path.insert(0, links[path[0]].parent)
            yield path


def nemo(turns, emit="all", max_row_tokens=None):
    """The rows of one session and its line of the report (see `reference.linearize`)."""
    links = prefix_links(turns)
    chains = list(forest_chains(links))
    if emit == "main":
        chains = sorted(chains, key=lambda chain: born(turns, chain[0]))[:1]
    limit = float("inf") if max_row_tokens is None else max_row_tokens
    rows = []
    cut = 0
    for chain in chains:
        length = len(held(turns[chain[-1]]))
        if limit < length and limit <= len(turns[chain[0]]["prompt_ids"]):
            cut += 1
            continue
        segment = Segment(chain, set(chain), set(), **flags(turns, chain))
        rows.append(row_of(turns, segment, limit))
    delivered = {i for chain in chains for i in chain}

    def why_lost(i):
        if not is_trainable(turns[i]):
            return "untrainable"
        if links[i].order is None:
            return "quarantined"
        return "cut" if i in delivered else "not_selected"

    named = [one.why for one in links]
    return summed(
        turns,
        rows,
        why_lost,
        rows_cut=cut,
        roots=sum(one.parent is None and one.why != "empty" for one in links),
        turns_quarantined=sum(
            why in ("ambiguous", "superseded", "unresolved", "unresolved_ambiguous")
            for why in named
        ),
        turns_unresolved=sum(why.startswith("unresolved") for why in named),
        turns_by_tokens=0,
    )


def summed(turns, rows, why_lost, **counts):
    """The rows, completed, and the session's line of the report."""
    mask_sum = sum(sum(row["loss_mask"]) for row in rows)
    for k, row in enumerate(rows):
        row["row_index"] = k
        row["rollout_mask_sum"] = mask_sum
        row["row_weight"] = sum(row["loss_mask"]) / mask_sum if mask_sum else None
        shared = [lcp(before["input_ids"], row["input_ids"]) for before in rows[:k]]
        row["shared_length"] = max(shared, default=0)
        row["parent_row"] = (
            shared.index(row["shared_length"]) if row["shared_length"] else None
        )
    kinds = {"trained": set(), "context": []}
    for row in rows:
        for span in row["spans"]:
            place = [
                (span["turn_index"], k)
                for k in range(span["output_start"], span["output_stop"])
            ]
            if span["kind"] == "trained":
                kinds["context"] += [p for p in place if p in kinds["trained"]]
                kinds["trained"] |= set(place)
            elif span["kind"] == "duplicate":
                kinds["context"] += place
    report = {
        "turns": len(turns),
        "rows": len(rows),
        "tokens_sampled": sum(len(turn["output_ids"]) for turn in turns),
        "tokens_trained": len(kinds["trained"]),
        "tokens_duplicated": len(kinds["context"]),
        "tokens_forward": sum(len(row["input_ids"]) for row in rows),
        "tokens_forward_shared": sum(
            len(row["input_ids"]) - row["shared_length"] for row in rows
        ),
        **{
            f"lost_{reason}": 0
            for reason in (
                "absorbed",
                "untrainable",
                "unrouted",
                "cut",
                "quarantined",
                "not_selected",
                "refused",
                "retried",
            )
        },
        **counts,
    }
    absorbed = dict.fromkeys(turn_indices(turns), 0)
    for span in (s for row in rows for s in row["spans"] if s["kind"] == "absorbed"):
        absorbed[span["turn_index"]] += span["output_stop"] - span["output_start"]
    report["lost_absorbed"] = sum(absorbed.values())
    for i, name in enumerate(turn_indices(turns)):
        trained = sum(turn == name for turn, _ in kinds["trained"])
        lost = len(turns[i]["output_ids"]) - trained - absorbed[name]
        if lost:
            report[f"lost_{why_lost(i)}"] += lost
    return rows, report


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


def generation_links(turns, equality="strict", threshold=1):
    """miles' tree of generations: one `Link` per turn."""
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
            sent = [fields_of(message, equality) for message in sent]
            parents = [j for j, path in paths.items() if sent[: len(path)] == path]
            parent = max(parents, key=lambda j: (len(paths[j]), j), default=None)
            path = [*sent, object() if reply is None else fields_of(reply, equality)]
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


def miles(turns, equality="strict", threshold=1, max_row_tokens=None):
    """The rows of one session and its line of the report (see `reference.linearize`)."""
    links = generation_links(turns, equality, threshold)
    limit = float("inf") if max_row_tokens is None else max_row_tokens
    chains = list(forest_chains(links))
    owners = {}
    for chain in sorted(chains, key=lambda chain: chain[-1]):
        for i in chain:
            owners.setdefault(i, chain[-1])
    rows = []
    cut = 0
    for chain in chains:
        leaf, end = chain[-1], float("inf")
        while chain and not (
            len(turns[chain[-1]]["prompt_ids"]) < limit
            or min(len(held(turns[chain[-1]])), end) <= limit
        ):
            dropped, chain = turns[chain[-1]], chain[:-1]
            if chain:  # its reply was trimmed before calls were left out
                end = lcp(held(turns[chain[-1]]), dropped["prompt_ids"])
        if not chain:
            cut += 1
            continue
        owned = {i for i in chain if owners[i] == leaf}
        segment = Segment(chain, owned, set(), **flags(turns, chain))
        spans = trimmed_spans(turns, chain, owned, limit, end)
        rows.append(row_of(turns, segment, min(limit, end), spans))

    def why_lost(i):
        if not is_trainable(turns[i]):
            return "untrainable"
        if links[i].order is not None:
            return "cut"
        return links[i].why.split("_")[0]

    return summed(turns, rows, why_lost, rows_cut=cut)


def trimmed_spans(turns, chain, owned, limit, end):
    """The pieces of a row whose replies may have lost their last tokens.

    The last of them ends at ``end`` at the latest.
    """
    names = turn_indices(turns)
    spans = []
    for i, below in zip(chain, [*chain[1:], None], strict=True):
        n, place = len(turns[i]["output_ids"]), len(turns[i]["prompt_ids"])
        stop = end
        if below is not None:
            stop = lcp(held(turns[i]), turns[below]["prompt_ids"])
        kept = min(n, stop - place)
        inside = max(0, min(kept, limit - place))
        kind = "trained" if i in owned else "duplicate"
        kind = kind if is_trainable(turns[i]) else "untrainable"
        pieces = [(place, place + inside, 0, inside, kind)]
        if kind == "trained":
            at = min(place + kept, limit)
            pieces.append((limit, limit, inside, kept, "cut"))
            pieces.append((at, at, kept, n, "absorbed"))
        spans += [
            {
                "start": start,
                "stop": stop,
                "turn_index": names[i],
                "output_start": output_start,
                "output_stop": output_stop,
                "kind": kind,
            }
            for start, stop, output_start, output_stop, kind in pieces
            if output_stop > output_start
        ]
    return spans
