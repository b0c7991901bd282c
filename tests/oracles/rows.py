"""Slow, obvious twins of what trajkit does. Read these to learn what the rules mean.

A turn is a dict as in ``tests/golden``: ``prompt_messages`` (a list, or None: routed
by tokens), ``response_message``, ``prompt_ids``, ``output_ids``, ``output_logprobs``
(empty or None: the engine gave none), ``finish_reason``, ``ill_formed``; and, where a
test wants them, ``turn_index``, ``trainable`` and ``session_id``. A list of turns is
one session in commit order. Inside this file a turn is named by its position in that
list; what leaves it carries turn_index, as the tables do.
"""

from dataclasses import dataclass, field


def lcp(a, b):
    """Tokens that a and b share at their start."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(k for k in range(n) if a[k] != b[k])


def held(turn):
    """What a row holds once it has taken the turn in: its prompt, then its output."""
    return [*turn["prompt_ids"], *turn["output_ids"]]


def turn_indices(turns):
    """The turn_index of each turn: as recorded, else its position."""
    return [turn.get("turn_index", i) for i, turn in enumerate(turns)]


def is_trainable(turn):
    return turn.get("trainable") is not False


def uses_tool(turn):
    return bool((turn.get("response_message") or {}).get("tool_calls"))


def logprobs_of(turn):
    """One logprob or None for each output token."""
    return list(turn.get("output_logprobs") or [None] * len(turn["output_ids"]))


# --- which turn each turn continues


@dataclass(eq=False)
class Node:
    """One chat message. ``turn`` is the position of the turn that generated it."""

    role: str | None
    message: dict | None
    parent: "Node | None"
    turn: int | None = None
    children: list["Node"] = field(default_factory=list)

    def add(self, role, message, turn=None):
        child = Node(role, message, self, turn)
        self.children.append(child)
        return child

    def generated_ancestor(self):
        """Position of the nearest turn at this node or above it, or None."""
        node = self
        while node is not None and node.turn is None:
            node = node.parent
        return None if node is None else node.turn


@dataclass
class Link:
    """As a row of ``schema.LINKS``, with positions in place of turn_index."""

    parent: int | None = None
    why: str = "root"
    order: int | None = None
    rewritten_by: int | None = None
    segment: str | None = None


def longest_prefix(turns, candidates, prompt):
    """The candidate turn whose held tokens are the longest prefix of the prompt.

    The first of equals; None where none is a prefix.
    """
    best = None
    for i in candidates:
        tokens = held(turns[i])
        if prompt[: len(tokens)] == tokens and (
            best is None or len(tokens) > len(held(turns[best]))
        ):
            best = i
    return best


def most_repeated(turns, candidates, prompt):
    """The candidate turn that a prompt without messages continues; None: none.

    Its prompt is the beginning of the longer prompt, which repeats most of its held tokens;
    of equals, all of them, then those of the shortest prompt, then the first.
    """
    ranked = [
        (lcp(held(turns[i]), prompt), False, -len(turns[i]["prompt_ids"]), -i)
        for i in candidates
        if 0 < len(turns[i]["prompt_ids"]) < len(prompt)
        and prompt[: len(turns[i]["prompt_ids"])] == turns[i]["prompt_ids"]
    ]
    whole = longest_prefix(turns, candidates, prompt)
    if whole is not None:
        ranked.append((len(held(turns[whole])), True, 0, -whole))
    return -max(ranked)[-1] if ranked else None


def message_links(turns, merge_threshold, equals="first", compare_tools=False):
    """One `Link` per turn, by a tree of messages and slime's rule of routing.

    With ``equals="tokens"``, a request that shows one of several equal replies continues
    the one that it shares most tokens with; an empty list of messages routes by tokens.
    With "full_path" it continues the nearest turn above that it repeats entirely. With
    ``compare_tools``, the turns with one ``tools_key`` have a tree of their own.
    """
    root = Node(None, None, None)
    trees = {}
    if compare_tools:
        trees = {turns[0].get("tools_key"): root.add(None, None)}
    links = [Link() for _ in turns]
    nodes = {}  # turn -> its node, for turns that are still generated
    for i, turn in enumerate(turns):
        messages = turn.get("prompt_messages")
        if messages is None or (not messages and equals == "tokens"):
            parent = most_repeated(turns, sorted(nodes), turn["prompt_ids"])
            first = next(iter(trees.values()), root)
            mount = first if parent is None else nodes[parent]
            links[i].parent = parent
            links[i].why = "root" if parent is None else "tokens"
            nodes[i] = mount.add("assistant", None, i)
            continue
        if not messages:
            links[i].why = "unrouted"
            continue
        tools = turn.get("tools_key")
        if compare_tools and tools not in trees:
            trees[tools] = root.add(None, None)
        mount, depth = mount_point(trees.get(tools, root), messages)
        short = rewritten_reply(turns, mount, messages[depth:], merge_threshold)
        if short is not None:
            links[short.turn].rewritten_by = i
            del nodes[short.turn]
            short.turn = None
            short.message = messages[depth]
            mount = short
            depth += 1
        for message in messages[depth:]:
            mount = mount.add(message.get("role"), message)
        if equals == "tokens":
            links[i].parent = nearest_by_tokens(turns, mount, turn["prompt_ids"])
        elif equals == "full_path":
            links[i].parent = nearest_whole(turns, mount, turn["prompt_ids"])
        else:
            links[i].parent = mount.generated_ancestor()
        if short is not None:
            links[i].why = "rewrite"
        elif links[i].parent is not None:
            links[i].why = "messages"
        nodes[i] = mount.add("assistant", turn.get("response_message"), i)
    for rank, node in enumerate(n for n in pre_order(root) if n.turn is not None):
        links[node.turn].order = rank
    return links


def nearest_by_tokens(turns, node, prompt):
    """Of the nearest turn at a node or above and its equals, the one to continue.

    That is the one whose path the prompt repeats for longest; of equals, the one with the
    shortest path, then the first. None where there is no turn.
    """
    while node.parent is not None:
        equal = equal_turns(node)
        if equal:
            return min(
                equal,
                key=lambda i: (-lcp(held(turns[i]), prompt), len(held(turns[i])), i),
            )
        node = node.parent
    return None


def nearest_whole(turns, node, prompt):
    """The nearest turn at a node or above that a prompt repeats entirely, or None.

    The last of those with equal messages.
    """
    while node.parent is not None:
        paths = {i: held(turns[i]) for i in equal_turns(node)}
        repeated = [i for i, path in paths.items() if prompt[: len(path)] == path]
        if repeated:
            return max(repeated)
        node = node.parent
    return None


def equal_turns(node):
    """The turns that generated the message of a node below its parent."""
    return [
        one.turn
        for one in node.parent.children
        if one.turn is not None
        and (one is node or (one.role, one.message) == (node.role, node.message))
    ]


def mount_point(root, messages):
    """Where the path of messages leaves the tree, and how many of them it matched."""
    node = root
    for depth, message in enumerate(messages):
        for child in node.children:
            if child.role == message.get("role") and child.message == message:
                node = child
                break
        else:
            return node, depth
    return node, len(messages)


def rewritten_reply(turns, mount, unmatched, merge_threshold):
    """The node whose place the first unmatched message takes; None: it gets its own."""
    if merge_threshold <= 0 or not unmatched:
        return None
    if unmatched[0].get("role") != "assistant":
        return None
    replies = [child for child in mount.children if child.role == "assistant"]
    if len(replies) != 1:
        return None
    reply = replies[0]
    if reply.children or reply.turn is None:
        return None
    if len(turns[reply.turn]["output_ids"]) >= merge_threshold:
        return None
    return reply


def pre_order(root):
    """Every node, parents before children, children in the order they were added."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(reversed(node.children))


def token_links(turns):
    """prime-rl's rule: the longest row end that is a prefix of the prompt."""
    rows = []  # the turns of each row, rows in order of first appearance
    links = []
    for i, turn in enumerate(turns):
        parent = longest_prefix(turns, [row[-1] for row in rows], turn["prompt_ids"])
        if parent is None:
            rows.append([i])
            links.append(Link())
        else:
            next(row for row in rows if row[-1] == parent).append(i)
            links.append(Link(parent, "tokens"))
    for rank, i in enumerate(i for row in rows for i in row):
        links[i].order = rank
    return links


def previous_links(turns):
    """Each turn continues the one before it."""
    return [
        Link(i - 1, "previous", i) if i else Link(order=0) for i in range(len(turns))
    ]


def as_dicts(turns, links):
    """One dict per turn, as the columns of ``schema.LINKS`` without session_id."""
    names = turn_indices(turns)
    return [
        {
            "turn_index": name,
            "parent": None if one.parent is None else names[one.parent],
            "link_reason": one.why,
            "order": one.order,
            "rewritten_by": None
            if one.rewritten_by is None
            else names[one.rewritten_by],
            "segment_kind": one.segment,
        }
        for name, one in zip(names, links, strict=True)
    ]


# --- how a prompt departs from what was held


def classify_drift(turns, links, min_run=8):
    """One dict per turn with a parent, as the columns of ``schema.DRIFT``.

    ``links`` as `as_dicts` gives them, or rows of ``schema.LINKS``.
    """
    position = {name: i for i, name in enumerate(turn_indices(turns))}
    parent = {
        position[one["turn_index"]]: position[one["parent"]]
        for one in links
        if one["parent"] is not None
    }
    shared = {
        i: lcp(held(turns[before]), turns[i]["prompt_ids"])
        for i, before in parent.items()
    }
    drift = []
    for one in links:
        i = position[one["turn_index"]]
        if i not in parent:
            continue
        before, prompt = held(turns[parent[i]]), turns[i]["prompt_ids"]
        size = len(before) - shared[i]
        # owner[q]: whose output the q-th held token is, still as it was sampled. A
        # token of the ancestor stands in held while every pair on the way kept it.
        owner = {}
        ends = {len(before)}  # where messages are known to end in held
        x = parent[i]
        zip_sessions = len(before)
        while True:
            start, stop = len(turns[x]["prompt_ids"]), len(held(turns[x]))
            owner.update(dict.fromkeys(range(start, min(stop, zip_sessions)), x))
            ends.update(end for end in (start, stop) if end <= zip_sessions)
            if x not in parent:
                break
            zip_sessions = min(zip_sessions, shared[x])
            x = parent[x]
        if size == 0:
            region = "none"
        elif shared[i] not in owner:
            region = "prompt"
        elif owner[shared[i]] == parent[i]:
            region = "last_reply"
        else:
            region = "earlier_reply"
        run = None
        if size:
            end = min(end for end in ends if end > shared[i])
            run = back_in_step(before, prompt, shared[i], end, min_run)
        drift.append(
            {
                "turn_index": one["turn_index"],
                "parent": one["parent"],
                "lcp": shared[i],
                "size": size,
                "region": region,
                "resync_path": None if run is None else run[0],
                "resync_prompt": None if run is None else run[1],
                "resync_length": None if run is None else run[2],
                "tokens_after_drift": sum(q >= shared[i] for q in owner),
                "cause": cause_of(turns[i], shared[i], size, region, run, min_run),
            }
        )
    return drift


def back_in_step(before, prompt, start, end, min_run):
    """Where held and prompt agree again beyond ``start``, and for how many tokens.

    The longest run of min_run or more, the first in the prompt and then in held; else
    the longest shorter one that stops at ``end`` of held; else None.
    """
    for n in range(min(len(before), len(prompt)) - start, min_run - 1, -1):
        for b in range(start, len(prompt) - n + 1):
            for a in range(start, len(before) - n + 1):
                if before[a : a + n] == prompt[b : b + n]:
                    return a, b, n
    for n in range(min(min_run - 1, end - start), 0, -1):
        for b in range(start, len(prompt) - n + 1):
            if before[end - n : end] == prompt[b : b + n]:
                return end - n, b, n
    return None


def cause_of(turn, start, size, region, run, min_run):
    """What drift at ``start`` looks like: one of ``schema.CAUSES``."""
    if size == 0:
        return "clean"
    if start == len(turn["prompt_ids"]):
        return "truncated"
    if run is not None and run[2] >= min_run:
        return "head_dropped" if run[1] == start else "middle_edited"
    return "tail_changed" if region == "last_reply" else "diverged"


# --- which turns make one row


def flags(turns, chain):
    """truncated, use_tool and ill_formed of a run of turns."""
    return {
        "truncated": turns[chain[-1]].get("finish_reason") == "length",
        "use_tool": any(uses_tool(turns[i]) for i in chain),
        "ill_formed": any(bool(turns[i].get("ill_formed")) for i in chain),
    }


# --- rows


def row_versions(turn_of, spans):
    """The first and the last weights that sampled a token of these pieces."""
    known = []
    for span in spans:
        inside = range(span["output_start"], span["output_stop"])
        if span["start"] == span["stop"]:
            continue
        for piece in turn_of[span["turn_index"]].get("weight_versions") or []:
            if any(piece["start"] <= k < piece["stop"] for k in inside):
                known.append(piece["version"])
    return {"first": known[0], "last": known[-1]} if known else None


# --- what a model was shown, and learns


def observed_tokens(turns, rows, roles=("tool",)):
    """The weighed positions of each row, for turns with messages and full attribution.

    A row is a dict with ``input_ids`` and ``spans``. Positions are of messages of these
    roles that come after the first model turn, each message in the first row that shows
    it.
    """
    ends = [held(turn) for turn in turns]
    replies = [turn["response_message"] for turn in turns]
    seen = []
    result = []
    for row in rows:
        calls = [span["turn_index"] for span in row["spans"]]
        first = max(calls, default=0)
        last = next(
            k for k, ids in enumerate(ends) if k >= first and ids == row["input_ids"]
        )
        sampled = {
            p for span in row["spans"] for p in range(span["start"], span["stop"])
        }
        shown = turns[last]["prompt_messages"]
        new = []
        for i, message in enumerate(shown):
            if message["role"] not in roles or i <= first_model_turn(turns, last):
                continue
            identity = observation(shown, i, replies, seen)
            if not any(identity == known for known, _ in seen):
                new.append((identity, i))
        seen += new
        fresh = {i for _, i in new}
        columns = ("prompt_message_index", "prompt_is_content")
        shows = zip(*(turns[last][name] for name in columns), strict=True)
        result.append(
            [
                p
                for p, (i, content) in enumerate(shows)
                if content and i in fresh and p > 0 and p not in sampled
            ]
        )
    return result


def first_model_turn(turns, last):
    """The index of the first message that a model said, or that stands for one."""
    shown = turns[last]["prompt_messages"]
    base = next(
        k
        for k, turn in enumerate(turns)
        if turn["prompt_messages"]
        and turn["prompt_messages"] == shown[: len(turn["prompt_messages"])]
    )
    given = [turn["response_message"] for turn in turns[:base]]
    for i, message in enumerate(shown):
        if message["role"] == "assistant" and (
            i >= len(turns[base]["prompt_messages"]) or message in given
        ):
            return i
    return len(shown)


def observation(shown, i, replies, seen):
    """What message i is, wherever it is shown: itself, its number, the reply before."""
    number = shown[:i].count(shown[i])
    before = [m for m in shown[:i] if m["role"] == "assistant"][-1:]
    if before and before[0] not in replies:
        for (message, known, reply), _ in seen:
            if (message, known) == (shown[i], number):
                return message, known, reply
    return shown[i], number, before


# --- where two runs of tokens differ


def align(a, b, special, run, border=64):
    """Stretches (a_start, a_stop, b_start, b_stop) between common runs.

    From each difference on to the place where passing over least leads to ``run`` common
    tokens, or to the end of ``a`` with fewer; a special token that one side alone passes
    over costs ``border`` more.
    """

    def cost(i, to_i, j, to_j):
        odd = sum(t in special for t in a[i:to_i]) - sum(
            t in special for t in b[j:to_j]
        )
        return to_i - i + to_j - j + border * abs(odd)

    found, i, j = [], 0, 0
    while True:
        same = lcp(a[i:], b[j:])
        i, j = i + same, j + same
        if i == len(a):
            return found
        places = []
        if a[-1] in b[j:]:
            end = b.index(a[-1], j) + 1
            n = lcp(a[i:][::-1], b[j:end][::-1])
            places.append((len(a) - n, end - n))
        for to_j in range(j, len(b) - run + 1):
            for to_i in range(i, len(a) - run + 1):
                if a[to_i : to_i + run] == b[to_j : to_j + run]:
                    places.append((to_i, to_j))
                    break
        to_i, to_j = len(a), j
        if places:
            to_i, to_j = min(places, key=lambda place: cost(i, place[0], j, place[1]))
        else:
            while to_j < len(b) and b[to_j] not in special:
                to_j += 1
        found.append((i, to_i, j, to_j))
        i, j = to_i, to_j
