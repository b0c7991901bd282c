"""The slow, obvious twin of rows that are spliced (see `tests.oracles.rows` for turns).

Polar's rule: chains by prompts alone, rows of raw outputs with canonical text between.
"""

from tests.oracles.rows import Link

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
