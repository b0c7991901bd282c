"""The slow, obvious twin of rows that are spliced (see `tests.reference` for turns).

Polar's rule: chains by prompts alone, rows of raw outputs with canonical text between.
"""

from tests.reference import (
    Link,
    flags,
    is_trainable,
    lcp,
    logprobs_of,
    turn_indices,
)

ENDED = ("stop", "tool_calls", "stop_sequence")


def starts_with(tokens, head):
    return tokens[: len(head)] == head


def prompt_links(turns):
    """The chain whose last prompt is the longest prefix, the oldest of equals."""
    chains = []  # the turns of each chain, chains in order of first appearance
    links = []
    for i, turn in enumerate(turns):
        best = None
        for chain in chains:
            tip = turns[chain[-1]]["prompt_ids"]
            if (
                tip
                and starts_with(turn["prompt_ids"], tip)
                and (best is None or len(tip) > len(turns[best[-1]]["prompt_ids"]))
            ):
                best = chain
        if best is None:
            chains.append([i])
            links.append(Link())
        else:
            links.append(Link(best[-1], "prompts"))
            best.append(i)
    for rank, i in enumerate(i for chain in chains for i in chain):
        links[i].order = rank
    return links


def chains_of(turns, links):
    """Runs of turns, each going on from the one before; runs in the links' order.

    A turn goes on from its parent where its prompt begins with the parent's and no turn
    before it in the order does.
    """
    chains = []
    placed = sorted(
        (i for i, one in enumerate(links) if one.order is not None),
        key=lambda i: links[i].order,
    )
    following = {}
    for i in placed:
        parent = links[i].parent
        if (
            parent is not None
            and parent not in following
            and starts_with(turns[i]["prompt_ids"], turns[parent]["prompt_ids"])
        ):
            following[parent] = i
    for i in placed:
        if i not in following.values():
            chain = [i]
            while chain[-1] in following:
                chain.append(following[chain[-1]])
            chains.append(chain)
    return chains


def end_of_turn(turns, chain):
    """The last token of the first output of the chain that ended its turn, or None."""
    for i in chain:
        if turns[i].get("finish_reason") in ENDED and turns[i]["output_ids"]:
            return turns[i]["output_ids"][-1]
    return None


def spliced(turns, chain, token):
    """Tokens of the chain's row, and where each kept turn's output starts in it."""
    tokens, places = [], []
    for before, i in zip([None, *chain], chain, strict=False):
        context = turns[i]["prompt_ids"]
        if before is not None:
            context = context[len(turns[before]["prompt_ids"]) :]
            if token is None or token not in context:
                break
            context = context[context.index(token) :]
            if turns[before]["output_ids"][-1:] == [token]:
                context = context[1:]
        tokens += context
        places.append(len(tokens))
        tokens += turns[i]["output_ids"]
    return tokens, places


def linearize(turns, links, token=None, limit=None, keep_untrained=True):
    """The rows of one session and its line of the report, as `reference.linearize`.

    ``links`` are `reference.Link` objects; ``token`` is the end of turn, None: that of
    each chain.
    """
    limit = float("inf") if limit is None else limit
    report = {
        "turns": len(turns),
        "rows": 0,
        "rows_untrained": 0,
        "rows_cut": 0,
        "tokens_sampled": sum(len(turn["output_ids"]) for turn in turns),
        "tokens_trained": 0,
        "tokens_duplicated": 0,
        "tokens_forward": 0,
        "tokens_forward_shared": 0,
        "lost_absorbed": 0,
        "lost_rewritten": 0,
        "lost_cut": 0,
        "lost_untrainable": 0,
        "lost_unrouted": 0,
        "lost_no_splice_point": 0,
        "rows_no_splice_point": 0,
        "turns_no_splice_point": 0,
    }
    for turn, one in zip(turns, links, strict=True):
        if not is_trainable(turn):
            report["lost_untrainable"] += len(turn["output_ids"])
        elif one.rewritten_by is not None:
            report["lost_rewritten"] += len(turn["output_ids"])
        elif one.order is None:
            report["lost_unrouted"] += len(turn["output_ids"])
    rows = []
    for chain in chains_of(turns, links):
        known = end_of_turn(turns, chain) if token is None else token
        tokens, places = spliced(turns, chain, known)
        dropped = chain[len(places) :]
        report["rows_no_splice_point"] += bool(dropped)
        report["turns_no_splice_point"] += len(dropped)
        row = row_of(turns, chain, tokens, places, limit)
        lost = {"trained": 0, "cut": 0, "no_splice_point": 0, "untrainable": 0}
        for span in row["spans"]:
            lost[span["kind"]] += span["output_stop"] - span["output_start"]
        report["lost_no_splice_point"] += lost["no_splice_point"]
        if not keep_untrained and not lost["trained"] + lost["cut"]:
            report["rows_untrained"] += 1
        elif limit < len(tokens) and limit <= row["prompt_length"]:
            report["rows_cut"] += 1
            report["lost_cut"] += lost["trained"] + lost["cut"]
        else:
            report["lost_cut"] += lost["cut"]
            rows.append(row)
    total = sum(sum(row["loss_mask"]) for row in rows)
    for k, row in enumerate(rows):
        shared = [lcp(before["input_ids"], row["input_ids"]) for before in rows[:k]]
        row["shared_length"] = max(shared, default=0)
        row["parent_row"] = (
            shared.index(row["shared_length"]) if row["shared_length"] else None
        )
        row["row_index"] = k
        row["rollout_mask_sum"] = total
        row["row_weight"] = sum(row["loss_mask"]) / total if total else None
        report["tokens_forward"] += len(row["input_ids"])
        report["tokens_forward_shared"] += len(row["input_ids"]) - row["shared_length"]
    report["rows"] = len(rows)
    report["tokens_trained"] = total
    return rows, report


def row_of(turns, chain, tokens, places, limit):
    """The row of a chain, cut to its first ``limit`` tokens."""
    tokens = tokens[: min(len(tokens), limit)]
    names = turn_indices(turns)
    kept, dropped = chain[: len(places)], chain[len(places) :]
    mask = [False] * len(tokens)
    logprobs = [None] * len(tokens)
    spans = []

    def add(start, stop, i, output_start, output_stop, kind):
        numbers = start, stop, names[i], output_start, output_stop, kind
        keys = "start", "stop", "turn_index", "output_start", "output_stop", "kind"
        spans.append(dict(zip(keys, numbers, strict=True)))

    for i, place in zip(kept, places, strict=True):
        inside = max(0, min(len(turns[i]["output_ids"]), len(tokens) - place))
        trained = is_trainable(turns[i])
        if inside:
            kind = "trained" if trained else "untrainable"
            add(place, place + inside, i, 0, inside, kind)
        if inside < len(turns[i]["output_ids"]) and trained:
            end = len(tokens)
            add(end, end, i, inside, len(turns[i]["output_ids"]), "cut")
        for k in range(inside if trained else 0):
            mask[place + k] = True
            logprobs[place + k] = logprobs_of(turns[i])[k]
    for i in dropped:
        if turns[i]["output_ids"] and is_trainable(turns[i]):
            end = len(tokens)
            add(end, end, i, 0, len(turns[i]["output_ids"]), "no_splice_point")
    if any(m and p is None for m, p in zip(mask, logprobs, strict=True)):
        logprobs = [None] * len(tokens)
    return {
        "input_ids": tokens,
        "prompt_length": len(turns[chain[0]]["prompt_ids"]),
        "loss_mask": mask,
        "logprobs": logprobs,
        "spans": spans,
        "finish_reason": turns[kept[-1]].get("finish_reason"),
        **flags(turns, kept),
        "last_turn": names[kept[-1]],
        "turns": [names[i] for i in kept],
    }
