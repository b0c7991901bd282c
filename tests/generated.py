"""Many small hard sessions at little cost, from a seed.

`tests.strategies` draws the same kinds of sessions one by one and shrinks what fails;
these are for tests that want thousands of them in one table.
"""

from random import Random

from tests.strategies import DRIFTS, END, EVENTS, STARTS

REPLIES = [
    {"role": "assistant", "content": "x"},
    {"role": "assistant", "content": "y"},
    {"role": "assistant", "content": None},
    {"role": "assistant", "tool_calls": [{"arguments": {"a": 1}}]},
]
LOGPROBS = [-k / 8 for k in range(64)]  # exact in float32


def generated_runs(n_sessions, seed=0, max_turns=6):
    """Turns of sessions ``g0``, ``g1``, ...: dicts as `tests.oracles.rows` reads them."""
    draw = Random(seed)
    turns = []
    for k in range(n_sessions):
        kind = agent_session if draw.random() < 0.7 else wild_session
        for one in kind(draw, draw.randint(1, max_turns)):
            turns.append({"session_id": f"g{k}", **one})
    return turns


def agent_session(draw, n_turns):
    """Agents that send all of their conversation at each call, and what goes wrong."""
    conversations = [[message(draw, "system"), message(draw, "user")]]
    turns = []
    for turn_index in turn_numbers(draw, n_turns):
        which = draw.randrange(len(conversations))
        talk = list(conversations[which])
        event = draw.choice(EVENTS)
        replied = [k for k, (said, _) in enumerate(talk) if said in REPLIES]
        k = draw.randrange(len(talk))
        if event.endswith("the last reply") and replied:
            k = replied[-1]
        if event.endswith("an earlier reply") and replied:
            k = draw.choice(replied)
        said, ids = talk[k]
        if event.startswith("drift"):
            talk[k] = said, drifted(draw, ids)
        elif event.startswith("rewrite"):
            talk[k] = {**said, "content": "*"}, draw.choice([ids, drifted(draw, ids)])
        elif event == "rollback":
            talk = talk[: k + 1]
        elif event == "compaction":
            talk = [talk[0], message(draw, "user"), *talk[k + 1 :]]
        elif event in ("sub-agent", "sibling conversation"):
            if event == "sub-agent":
                talk = [message(draw, "system"), message(draw, "user")]
            conversations.append(talk)
            which = len(conversations) - 1

        prompt = [i for _, ids in talk for i in ids] + [STARTS["assistant"]]
        sent = [said for said, _ in talk]
        one = {
            "turn_index": turn_index,
            "prompt_messages": draw.choice([sent] * 16 + [None, None, []]),
            "prompt_ids": draw.choice([prompt] * 15 + [[]]),
            **reply(draw),
        }
        turns.append(one)
        # a reply that its agent never gets leaves the conversation: a retry comes next
        if draw.random() < 0.8:
            ids = [STARTS["assistant"], *one["output_ids"]]
            said = one["response_message"] or {"role": "assistant", "content": "?"}
            talk = [*talk, (said, ids), message(draw, draw.choice(["tool", "user"]))]
        conversations[which] = talk
    return turns


def wild_session(draw, n_turns):
    """Turns whose messages and tokens start like earlier ones, each for itself."""
    turns = []
    for turn_index in turn_numbers(draw, n_turns):
        prompt, sent = [], []
        if turns:
            known = draw.choice(turns)
            prompt = [*known["prompt_ids"], *known["output_ids"]]
            prompt = prompt[: draw.choice([len(prompt), draw.randint(0, len(prompt))])]
            known = draw.choice([known, draw.choice(turns)])
            sent = [*(known["prompt_messages"] or []), known["response_message"]]
            sent = [one for one in sent if one is not None]
            sent = sent[: draw.choice([len(sent), draw.randint(0, len(sent))])]
        if not sent or draw.random() < 0.5:
            sent = [*sent, message(draw, draw.choice(["user", "tool"]))[0]]
        turns.append(
            {
                "turn_index": turn_index,
                "prompt_messages": draw.choice([sent] * 8 + [None, []]),
                "prompt_ids": [*prompt, *body(draw)],
                **reply(draw),
            }
        )
    return turns


def turn_numbers(draw, n):
    """n ascending values of turn_index, with gaps."""
    first = draw.choice([0, 0, 3])
    return [first := first + draw.choice([1, 1, 1, 2, 5]) for _ in range(n)]


def body(draw):
    return [draw.randint(0, 3) for _ in range(draw.randint(0, 3))]


def message(draw, role):
    """A message and the ids that a template makes of it."""
    ids = body(draw)
    said = {"role": role, "content": " ".join(map(str, ids))}
    return said, [STARTS[role], *ids, END]


def reply(draw):
    """What the engine and the parser say of an output."""
    finish_reason = draw.choice(["stop", "stop", "tool_calls", "length", "abort", None])
    output = body(draw)
    if output and finish_reason != "length":
        output.append(END)
    given = [draw.choice(LOGPROBS) for _ in output]
    holes = [draw.choice([p, None]) for p in given]
    return {
        "response_message": draw.choice([*REPLIES, *REPLIES, None]),
        "output_ids": output,
        "output_logprobs": draw.choice([given, given, given, holes, [], None]),
        "finish_reason": finish_reason,
        "ill_formed": draw.choice([False, False, True, None]),
        "trainable": draw.choice([None] * 6 + [True, False]),
    }


def drifted(draw, ids):
    """The ids of a message as they come back when the template renders it anew."""
    start, rest = ids[:1], ids[1:]
    kind = draw.choice(DRIFTS)
    cut = draw.randint(0, len(rest))
    if kind == "tail changed":
        return [*start, *rest[:-2], *body(draw), END]
    if kind == "head dropped":
        return [*start, *rest[cut:]]
    if kind == "middle edited":
        return [*start, *rest[:cut], draw.randint(0, 3), *rest[cut + 1 :]]
    if kind == "truncated":
        return [*start, *rest[:cut]]
    return [*start, *rest[:cut], *body(draw), *rest[cut:]]
