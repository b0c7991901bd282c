"""Every hypothesis strategy the suite uses.

Vocabularies are tiny and messages few, so that prefixes collide, siblings are equal and
one reply opens another. Turns are dicts as `tests.oracles.rows` reads them.
"""

from collections import OrderedDict
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import pairwise

import numpy as np
import pyarrow as pa
from hypothesis import Phase, settings
from hypothesis import strategies as st

fewer_examples = settings(max_examples=max(settings().max_examples // 3, 8))
"""For a property that runs under many parameters, or goes over every policy."""


def pick(draw, options):
    """One of the options, each as likely as the others.

    ``st.sampled_from`` made for one draw costs more than all that it draws.
    """
    return options[draw(_indices(len(options)))]


@cache
def _indices(n):
    return st.integers(0, n - 1)


# What a chat template puts around a body of small ids.
END = 9
STARTS = {"system": 10, "user": 11, "tool": 12, "assistant": 13}

tokens = st.integers(0, 3)
bodies = st.lists(tokens, max_size=3)
token_lists = st.lists(tokens, max_size=12)
logprobs = st.integers(-64, 0).map(lambda eighths: eighths / 8)  # exact in float32
finish_reasons = st.sampled_from(
    ["stop", "stop", "tool_calls", "length", "abort", None]
)

# Arguments that Python calls equal (1, 1.0, True) and one that it does not.
arguments = st.sampled_from([{"a": 1}, {"a": 1.0}, {"a": True}, {"a": "1"}, {}])

thresholds = st.sampled_from([1024, 3, 2, 1, 0, -1])
"""fork_threshold: small enough to matter for outputs of a few tokens."""

policies = (
    st.tuples(st.just("slime"), thresholds)
    | st.just(("strict", 0))
    | st.just(("per_call", 0))
)
"""The name of a policy and its fork_threshold."""

row_limits = st.none() | st.integers(1, 40)
"""max_row_tokens."""


@st.composite
def prefix_pairs(draw):
    """Two token lists that share a prefix of any length: ``([1, 2, 3], [1, 2, 0])``."""
    a = draw(token_lists)
    b = a[: draw(st.integers(0, len(a)))] + draw(token_lists)
    return a, b


@cache
def _logprob_lists(n):
    return (
        st.none()
        | st.just([])
        | st.lists(logprobs, min_size=n, max_size=n)
        | st.lists(logprobs | st.none(), min_size=n, max_size=n)
    )


@cache
@st.composite
def replies(draw):
    """An engine's output: ids, logprobs, finish_reason and the flags."""
    finish_reason = draw(finish_reasons)
    output = draw(bodies)
    if output and finish_reason != "length":
        output = [*output, END]
    return {
        "output_ids": output,
        "output_logprobs": draw(_logprob_lists(len(output))),
        "finish_reason": finish_reason,
        "ill_formed": pick(draw, [False, False, True, None]),
        "trainable": pick(draw, [None] * 6 + [True, False]),
    }


@st.composite
def masked(draw, drawn):
    """Turns of a strategy, some with an output_mask."""
    turns = draw(drawn)
    for turn in turns:
        n = len(turn["output_ids"])
        mask = st.lists(st.booleans(), min_size=n, max_size=n)
        turn["output_mask"] = draw(st.none() | mask)
    return turns


@st.composite
def turn_numbers(draw, n):
    """n ascending values of turn_index, with gaps: ``[0, 1, 4]``."""
    steps = [pick(draw, [1, 1, 1, 2, 5]) for _ in range(n)]
    first = pick(draw, [0, 0, 3])
    return [first + sum(steps[:i]) for i in range(n)]


def rendered(role, body):
    return [STARTS[role], *body, END]


def text_of(body):
    return " ".join(map(str, body))


@cache
@st.composite
def messages(draw, role):
    """A message and the ids that a template makes of it."""
    body = draw(bodies)
    return {"role": role, "content": text_of(body)}, rendered(role, body)


def echo_of(draw, reply):
    """The reply as a message, None where the gateway could not tell."""
    message = {"role": "assistant", "content": text_of(reply["output_ids"])}
    kind = pick(draw, ["text"] * 4 + ["call"] * 3 + ["none"])
    if kind == "call":
        call = {"function": {"name": "bash", "arguments": draw(arguments)}}
        message["tool_calls"] = [call]
    return None if kind == "none" else message


DRIFTS = ("tail changed", "head dropped", "middle edited", "truncated", "grown")


def drifted(draw, ids):
    """The ids of a message as they come back when the template renders it anew."""
    start, body = ids[:1], ids[1:]
    kind = pick(draw, DRIFTS)
    cut = draw(st.integers(0, len(body)))
    if kind == "tail changed":
        return [*start, *body[:-2], *draw(bodies), END]
    if kind == "head dropped":
        return [*start, *body[cut:]]
    if kind == "middle edited":
        return [*start, *body[:cut], draw(tokens), *body[cut + 1 :]]
    if kind == "truncated":
        return [*start, *body[:cut]]
    return [*start, *body[:cut], *draw(bodies), *body[cut:]]


EVENTS = (
    *["go on"] * 8,
    *["drift of the last reply"] * 4,
    *["drift of an earlier reply"] * 2,
    "drift",
    "rewrite of the last reply",
    "rewrite",
    "rollback",
    "compaction",
    "sub-agent",
    "sibling conversation",
)


@st.composite
def agent_sessions(draw, max_turns=8):
    """Agents that send their whole conversation at each call, and what goes wrong.

    A conversation is a list of (message, ids). Each turn one of them speaks, after an
    event; a reply that its agent never gets leaves the conversation as it was, so that
    its next call is a retry.
    """
    opening = [draw(messages("system")), draw(messages("user"))]
    conversations = [opening]
    turns = []
    for turn_index in draw(turn_numbers(draw(st.integers(1, max_turns)))):
        which = draw(st.integers(0, len(conversations) - 1))
        talk = list(conversations[which])
        event = pick(draw, EVENTS)
        ours = [k for k, (said, _) in enumerate(talk) if said["role"] == "assistant"]
        k = draw(st.integers(0, len(talk) - 1))
        if event.endswith("the last reply") and ours:
            k = ours[-1]
        if event.endswith("an earlier reply") and ours:
            k = pick(draw, ours)
        message, ids = talk[k]
        if event.startswith("drift"):
            talk[k] = message, drifted(draw, ids)
        elif event.startswith("rewrite"):
            ids = drifted(draw, ids) if draw(st.booleans()) else ids
            talk[k] = {**message, "content": "*"}, ids
        elif event == "rollback":
            talk = talk[: k + 1]
        elif event == "compaction":
            talk = [talk[0], draw(messages("user")), *talk[k + 1 :]]
        elif event == "sub-agent":
            talk = [draw(messages("system")), draw(messages("user"))]
            conversations.append(talk)
            which = len(conversations) - 1
        elif event == "sibling conversation":
            conversations.append(talk)

        reply = draw(replies())
        echo = echo_of(draw, reply)
        prompt = [i for _, ids in talk for i in ids] + [STARTS["assistant"]]
        sent = [message for message, _ in talk]
        turns.append(
            {
                "turn_index": turn_index,
                "prompt_messages": draw(
                    st.sampled_from([sent] * 16 + [None, None, []])
                ),
                "response_message": echo,
                "prompt_ids": pick(draw, [prompt] * 15 + [[]]),
                **reply,
            }
        )
        if pick(draw, [True] * 5 + [False]):
            said = echo or {"role": "assistant", "content": "?"}
            ids = [STARTS["assistant"], *reply["output_ids"]]
            if ids[-1] != END:
                ids = [*ids, *pick(draw, [[], [END]])]
            role = pick(draw, ["tool", "user"])
            talk = [*talk, (said, ids), draw(messages(role))]
        conversations[which] = talk
    return turns


# A handful of messages, so that paths through the tree meet again and again.
few_replies = st.sampled_from(
    [
        {"role": "assistant", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "tool_calls": [{"arguments": {"a": 1}}]},
        {"role": "assistant", "tool_calls": [{"arguments": {"a": True}}]},
    ]
)
few_messages = few_replies | st.sampled_from(
    [
        {"role": "user", "content": "u"},
        {"role": "user", "content": "v"},
        {"role": "tool", "content": "x"},
    ]
)


@st.composite
def wild_sessions(draw, max_turns=8):
    """Turns whose messages and tokens start like earlier ones, each for itself.

    Nothing keeps the two in step, so this reaches what no agent does: a generated
    ancestor whose tokens are another conversation's, prompts that shrink, outputs that
    stand elsewhere.
    """
    turns = []
    for turn_index in draw(turn_numbers(draw(st.integers(1, max_turns)))):
        reply = draw(replies())
        prompt = []
        sent = []
        if turns:
            known = pick(draw, turns)
            prompt = [*known["prompt_ids"], *known["output_ids"]]
            prompt = prompt[: draw(st.integers(0, len(prompt)) | st.just(len(prompt)))]
            known = pick(draw, [known, pick(draw, turns)])
            sent = list(known["prompt_messages"] or [])
            if known["response_message"] is not None:
                sent.append(known["response_message"])
            sent = sent[: draw(st.integers(0, len(sent)) | st.just(len(sent)))]
        sent = [*sent, *draw(st.lists(few_messages, min_size=not sent, max_size=2))]
        turns.append(
            {
                "turn_index": turn_index,
                "prompt_messages": pick(draw, [sent] * 8 + [None, []]),
                "response_message": draw(few_replies | st.none()),
                "prompt_ids": [*prompt, *draw(bodies)],
                **reply,
            }
        )
    return turns


def sessions(max_turns=8):
    """One session: a list of turns in commit order."""
    return agent_sessions(max_turns) | wild_sessions(max_turns)


few = settings(
    max_examples=max(5, settings.default.max_examples // 12),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
"""For properties of `many_calls`: each example is large, and a seed does not shrink."""

many_calls = st.integers(0, 2**32 - 1).map(lambda seed: many_calls_of(seed))
"""One session of 40 to 300 calls."""


def many_calls_of(seed):
    """A session of 40 to 300 calls, with paths of 1 to about 700 tokens.

    Most calls continue the call before. The others continue an old call, share only the
    head of one (a rollback), or begin anew with a short or a long prompt. Messages and
    tokens of a call share about as much of the same earlier call.
    """
    rng = np.random.default_rng(seed)
    turns = []
    longest = int(rng.choice([30, 700]))
    for index in range(int(rng.integers(40, 301))):
        prompt, sent = [], []
        event = rng.choice(["continue", "old", "head", "short", "long"], p=EVENT_SHARES)
        if turns and event in ("continue", "old", "head"):
            known = turns[-1] if event == "continue" else turns[rng.integers(index)]
            prompt = [*known["prompt_ids"], *known["output_ids"]]
            sent = [*known["prompt_messages"], known["response_message"]]
            kept = rng.random() if event == "head" or len(prompt) > longest else 1
            prompt = prompt[: round(kept * len(prompt))]
            sent = sent[: round(kept * len(sent))]
        n_new = longest if event == "long" else 3
        prompt += rng.integers(0, 4, rng.integers(prompt == [], n_new + 1)).tolist()
        sent.append({"role": "user", "content": "abc"[rng.integers(3)]})
        output = rng.integers(0, 4, rng.integers(5)).tolist()
        numbers = (-rng.integers(0, 64, len(output)) / 8).tolist()
        logprobs = [None, numbers, numbers, [None, *numbers][: len(output)]]
        turns.append(
            {
                "turn_index": index,
                "prompt_messages": sent,
                "response_message": {
                    "role": "assistant",
                    "content": "xy"[rng.integers(2)],
                },
                "prompt_ids": prompt,
                "output_ids": output,
                "output_logprobs": logprobs[rng.integers(4)],
                "finish_reason": ["stop", "length", "abort"][rng.integers(3)],
                "ill_formed": bool(rng.integers(2)),
                "trainable": [None, None, True, False][rng.integers(4)],
            }
        )
    return turns


EVENT_SHARES = [0.6, 0.12, 0.12, 0.13, 0.03]
"""How often a call of `many_calls` continues the last one, and so on."""


@st.composite
def runs(draw, max_sessions=4, max_turns=5):
    """Several sessions whose calls came in interleaved: turns that name their session.

    The turns of each session are in commit order.
    """
    waiting = [
        [{"session_id": f"s{k}", **turn} for turn in session]
        for k, session in enumerate(
            draw(st.lists(sessions(max_turns), min_size=1, max_size=max_sessions))
        )
    ]
    order = [k for k, session in enumerate(waiting) for _ in session]
    waiting = [iter(session) for session in waiting]
    return [next(waiting[k]) for k in draw(st.permutations(order))]


# Messages and records

# one object, as json.loads makes of every NaN: containers find it equal to itself
NAN = float("nan")

json_leaves = st.sampled_from(
    [
        *[None, True, False, 0, 1, -1, 1.0, 0.0, -0.0, 0.5, NAN, float("inf")],
        *[2**53, 2**53 + 1, float(2**53), 10**30, 1e30],
        *["", "1", "a", '"\\\n\x00', "é", "\u2028", "\U0001f600", "\ud800", "\\ud800"],
    ]
)
"""Values of which many pairs are equal, or nearly so."""

json_values = st.recursive(
    json_leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "é"]), inner, max_size=3)
    ),
    max_leaves=6,
)

json_messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "tool"])},
    optional={"content": json_values, "tool_calls": json_values},
)
"""Chat messages of any JSON value."""


@st.composite
def message_pairs(draw):
    """Two messages, alike but for one field or for the order of their keys."""
    a = draw(json_messages)
    b = dict(reversed(a.items()))
    if draw(st.booleans()):
        b["content"] = draw(json_values)
    return a, b


# What passes through the gateway as text (tests/shim): markers, halves of markers,
# white space, and tool calls that read well or badly.
plain_texts = st.text(st.sampled_from("a \né>|"), max_size=4)
_markers = st.sampled_from(["<", "<|im_end|>", "<|im_start|>", "</tool_call>"])
_good_arguments = st.sampled_from(["{}", '{"a":  1.50}', '{"b": "</tool_call>"}'])
_call = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'.format
good_calls = st.builds(_call, st.sampled_from(["bash", "edit"]), _good_arguments)
_bad_calls = st.builds(_call, st.just(""), _good_arguments) | st.builds(
    _call, st.just("bash"), st.just('{"a": ')
)
spoken_texts = st.lists(plain_texts | _markers, max_size=8).map("".join)
reply_texts = st.lists(
    plain_texts | _markers | good_calls | _bad_calls, max_size=6
).map("".join)


# Choices of a policy


@st.composite
def chosen_policies(draw):
    """A preset's name and choices made otherwise, as `trajkit.policy` takes them."""
    name = draw(st.sampled_from(["faithful"] * 3 + ["slime", "trl"]))
    choices = {"train_in": pick(draw, ["first", "earliest"])}
    choices["chain_order"] = pick(draw, ["tree", "tree", "recorded"])
    if name != "faithful":
        choices["fork_threshold"] = draw(thresholds)
        choices["keep_prefix"] = draw(st.booleans())
        choices["flag_scope"] = pick(draw, ["chain", "row"])
    choices["train_aborted"] = draw(st.booleans())
    choices["missing_logprobs"] = pick(draw, ["keep", "untrain"])
    if choices["train_in"] != "first":
        choices["keep_untrained"] = draw(st.booleans())
    if name == "trl":
        # a forest, so that several rows hold a claim
        choices["parent_by"] = pick(draw, ["messages", "previous"])
    return name, choices


# Agents that send out sub-agents (tests/oracles/segments.py)

DISPATCHING = ("Task", "Agent")
tool_names = st.sampled_from(["Task", "Task", "Agent", "bash"])
ASKED = (
    *["go on"] * 8,
    *["drift"] * 3,
    "rewrite",
    "rollback",
    "compaction",
    "unsaid",
    "by tokens",
    "nothing",
)


@st.composite
def asked(draw, reply, number):
    """The reply as a message that may call tools, in either form, and the calls' ids."""
    text = text_of(reply["output_ids"])
    names = draw(st.lists(tool_names, max_size=2))
    # few ids, so that old results answer new calls
    ids = [
        pick(draw, [f"c{number}-{k}", f"c{number}-{k}", "c"]) for k in range(len(names))
    ]
    given = list(zip(names, ids, strict=True))
    if not names:
        return pick(draw, [{"role": "assistant", "content": text}, None]), []
    if draw(st.booleans()):
        calls = [
            {
                "id": one,
                "function": {"name": name, "arguments": draw(arguments)},
            }
            for name, one in given
        ]
        if pick(draw, [False] * 7 + [True]):
            del calls[-1]["id"]
        return {"role": "assistant", "content": text, "tool_calls": calls}, given
    blocks = [
        {"type": "tool_use", "id": one, "name": name, "input": {}}
        for name, one in given
    ]
    said = [{"type": "text", "text": text}, *blocks]
    return {"role": "assistant", "content": said}, given


@st.composite
def results(draw, ids):
    """Messages that answer some tool calls, with their tokens: in either form."""
    if not ids or pick(draw, [False] * 4 + [True]):
        return [draw(messages("user"))]
    if draw(st.booleans()):
        told = []
        for one in ids:
            message, shown = draw(messages("tool"))
            told.append(({**message, "tool_call_id": one}, shown))
        return told
    _, shown = draw(messages("user"))
    blocks = [{"type": "tool_result", "tool_use_id": one} for one in ids]
    if draw(st.booleans()):
        blocks[-1]["cache_control"] = {"type": "ephemeral"}
    return [({"role": "user", "content": blocks}, shown)]


@st.composite
def delegating_sessions(draw, max_turns=10):
    """A main agent and those that it sends out, nested and side by side.

    Each agent has its conversation, as in `agent_sessions`, and the tool calls that it
    waits for. A sub-agent starts with messages of its own, or with those of its sender.
    """
    agents = [[[draw(messages("system")), draw(messages("user"))], []]]
    turns = []
    for number in range(draw(st.integers(1, max_turns))):
        which = draw(st.integers(0, len(agents) - 1) | st.sampled_from([0, -1]))
        talk, waiting = agents[which]
        talk = list(talk)
        if waiting and pick(draw, [True, True, False]):
            talk += draw(results(draw(st.permutations(waiting))))
            waiting = []
        event = pick(draw, ASKED)
        k = draw(st.integers(0, len(talk) - 1) | st.just(len(talk) - 1))
        message, ids = talk[k]
        if event == "drift":
            talk[k] = message, drifted(draw, ids)
        elif event == "rewrite":
            # the same but for what the equality leaves out, or a number's type
            told = draw(
                st.sampled_from(
                    [
                        {**message, "content": "*"},
                        {**message, "cache_control": {}},
                        {**message, "n": 1},
                        {**message, "n": 1.0},
                    ]
                )
            )
            talk[k] = told, ids
        elif event == "rollback":
            talk = talk[: k + 1]
        elif event == "compaction":
            talk = [talk[0], draw(messages("user"))]
        reply = draw(replies())
        said, calls = draw(asked(reply, number))
        sent = [message for message, _ in talk]
        turns.append(
            {
                "prompt_messages": {"by tokens": None, "nothing": []}.get(event, sent),
                "response_message": said,
                "prompt_ids": [i for _, ids in talk for i in ids]
                + [STARTS["assistant"]],
                **reply,
            }
        )
        if event != "unsaid" and said is not None:
            talk = [*talk, (said, [STARTS["assistant"], *reply["output_ids"]])]
            waiting = [one for _, one in calls]
            for name, _ in calls:
                if name in DISPATCHING and len(agents) < 4:
                    opening = [draw(messages("system")), draw(messages("user"))]
                    opening = pick(draw, [opening] * 4 + [list(talk)])
                    agents.append([opening, []])
        agents[which] = [talk, waiting]
    return turns


# Payloads


@st.composite
def payload_lists(draw, turn):
    """Pairs of small numbers: per output id, per id, or none."""
    n_output = len(turn["output_ids"])
    n = pick(draw, [n_output, len(turn["prompt_ids"]) + n_output, None])
    pairs = st.none() | st.lists(st.integers(0, 99), min_size=2, max_size=2)
    return None if n is None else draw(st.lists(pairs, min_size=n, max_size=n))


# What comes back of a run of tokens: pieces of it, among others.
few_ids = st.lists(st.integers(0, 3), max_size=12)


@st.composite
def runs_apart(draw):
    """Two token lists, the second with stretches of the first left out or replaced."""
    a = draw(few_ids)
    b, at = [], 0
    while at < len(a):
        kept = draw(st.integers(0, len(a) - at))
        b += a[at : at + kept] + draw(st.lists(st.integers(0, 3), max_size=3))
        at += kept + draw(st.integers(1, 4))
    return a, b + draw(few_ids)


# Rows that are spliced


@st.composite
def growing_prompts(draw, max_turns=8):
    """One session whose prompts grow out of earlier prompts, whatever was sampled.

    Equal prompts (retries), empty ones, tails without an end of turn, or with one of
    several ids that may be one, outputs that are empty or do not end their turn.
    """
    ids = tokens | st.just(END)
    turns = []
    for turn_index in draw(turn_numbers(draw(st.integers(1, max_turns)))):
        reply = draw(replies())
        known = pick(draw, [None, *turns, *turns[-1:], *turns[-1:]])
        prompt = []
        if known is not None:
            prompt = list(known["prompt_ids"])
            said = list(known["output_ids"])
            tail = draw(st.lists(ids, max_size=4))
            prompt += draw(
                st.sampled_from(
                    [
                        [],
                        tail,
                        [*said, *tail],
                        [*said, END, *tail],
                        [*said[:-1], END, *tail],
                        [*tail, END, 2],
                    ]
                )
            )
        turns.append(
            {
                "turn_index": turn_index,
                "prompt_messages": None,
                "response_message": None,
                "prompt_ids": prompt or draw(bodies),
                **reply,
                "output_ids": [
                    *reply["output_ids"][:-1],
                    *(draw(ids) for _ in reply["output_ids"][-1:]),
                ],
            }
        )
    return turns


ends_of_turn = st.sampled_from([END, END, None, None, 0, 7])
"""end_of_turn_token_id: that of the template, each chain's own, others."""


client_habits = st.sets(st.sampled_from(["no reasoning", "blocks", "numbers"]))
"""What a client does to a reply that it sends back: `prompting.test_conversation`."""


# Calls whose order does not count


@st.composite
def named_sessions(draw, max_turns=8, *, unique=False):
    """A session whose calls have a request_id and a started_at, or None.

    ``unique``: every call has its own. Small vocabularies make many calls equal, and
    some retries and copies are added.
    """
    turns = draw(sessions(max_turns))
    for k in draw(st.lists(st.integers(0, len(turns) - 1), max_size=3)):
        again = dict(turns[k])
        if draw(st.booleans()):
            again.update(draw(replies()))
        turns.insert(draw(st.integers(0, len(turns))), again)
    n = len(turns)
    if unique:
        names = draw(st.permutations([f"r{k}" for k in range(n)]))
    else:
        some = st.sampled_from(["a", "b", "ab", "", None])
        names = draw(st.lists(some, min_size=n, max_size=n))
    times = st.sampled_from([0.0, 1.0, 2.0, *([] if unique else [None])])
    return [
        {**turn, "turn_index": index, "request_id": name, "started_at": draw(times)}
        for turn, index, name in zip(turns, draw(turn_numbers(n)), names, strict=True)
    ]


@st.composite
def recorded_sessions(draw, max_turns=7):
    """Named calls with recorded parents, of which some are wrong or missing."""
    turns = draw(named_sessions(max_turns, unique=True))
    names = st.sampled_from([*(turn["request_id"] for turn in turns), "missing"])
    scored = draw(st.none() | st.integers(0, len(turns) - 1))
    kinds = ["root", "unresolved", "resolved", "resolved", "begun", "begun", None]
    kinds = draw(st.sampled_from([kinds, kinds, kinds, [None]]))
    recorded = []
    for index, turn in enumerate(turns):
        kind = draw(st.sampled_from(kinds))
        name = draw(names) if kind == "resolved" or draw(st.booleans()) else None
        if kind == "begun":  # one that its prompt begins with, or none
            prompt = turn["prompt_ids"]
            paths = {
                one["request_id"]: [*one["prompt_ids"], *one["output_ids"]]
                for one in turns
            }
            begin = [k for k, path in paths.items() if prompt[: len(path)] == path]
            name = draw(st.sampled_from(begin)) if begin else None
            kind = "resolved" if begin else "root"
        elif kind in ("root", "unresolved") or kinds == [None]:
            name = None
        parent = {"parent_resolution": kind, "parent_request": name}
        recorded.append({**turn, **parent, "scored": index == scored})
    return recorded


@st.composite
def forest_policies(draw):
    """Choices of the rules of forests beside those of other rules, as they may be made."""
    route = pick(draw, ["prefix", "prefix", "generations", "messages"])
    absorbs = ["fork", "absorb_short_drift", *(["splice"] if route != "prefix" else [])]
    absorb = pick(draw, absorbs)
    spliced = absorb == "splice"
    max_rows = pick(draw, [None, None, 1, 2])
    owns = ["first", "earliest"]
    if absorb == "fork" and max_rows is None:
        owns += ["every", "every"]
    return {
        "parent_by": route,
        "on_drift": absorb,
        "keep_prefix": draw(st.booleans()),
        "fork_threshold": draw(thresholds),
        "train_in": pick(draw, owns),
        "row_selection": "all" if spliced else pick(draw, ["all", "main"]),
        "truncate_at": "tokens" if spliced else pick(draw, ["tokens", "calls"]),
        "chain_order": "tree"
        if route == "prefix"
        else pick(draw, ["tree", "recorded"]),
        "max_rows": max_rows,
        "missing_logprobs": pick(draw, ["keep", "untrain", "null_row"]),
        "train_aborted": draw(st.booleans()),
        "keep_untrained": draw(st.booleans()),
        "keep_empty": draw(st.booleans()),
        "flag_scope": pick(draw, ["chain", "row"]),
    }


# Tool calls in the forms of models

_json_kinds = {
    "string": st.text(st.sampled_from("a 1\n\t<>/=\"'{}:é\\"), max_size=8),
    "integer": st.integers(-(10**12), 10**12),
    "number": st.floats(allow_nan=False, allow_infinity=False) | st.integers(0, 9),
    "boolean": st.booleans(),
    "null": st.none(),
    "array": st.lists(st.integers() | st.text(st.sampled_from('a<\n"'), max_size=3)),
    "object": st.dictionaries(st.sampled_from("ab"), st.text(max_size=3), max_size=2),
}
_tool_names = st.sampled_from(["bash", "edit_file", "mcp__a__b"])


@st.composite
def typed_calls(draw):
    """A tool in OpenAI's form, and a call of it: its name and arguments."""
    name = draw(_tool_names)
    keys = draw(st.lists(st.sampled_from(["path", "b", "old text"]), unique=True))
    kinds = {key: pick(draw, sorted(_json_kinds)) for key in keys}
    tool = {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in kinds.items()},
            },
        },
    }
    return tool, name, {key: draw(_json_kinds[kind]) for key, kind in kinds.items()}


call_shards = st.text(st.sampled_from('a \n\t{}:,"=<>/'), max_size=4) | st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<function=bash>",
        "</function>",
        "<parameter=path>",
        "</parameter>",
        "<arg_key>path</arg_key>",
        "<arg_value>",
        "</arg_value>",
        '{"name": "bash"',
        ', "arguments": {}',
        ', "parameters": {}',
        "}",
        "<think>",
        "</think>",
        "bash\n",
    ]
)
"""Pieces of which something like calls, and calls, are made."""


# What becomes known of turns after they were recorded

amendment_lists = st.lists(
    st.fixed_dictionaries(
        {
            "session_id": st.sampled_from(["s0", "s1", "s2", "unknown"]),
            "turn_index": st.integers(0, 9),
            "reason": st.sampled_from(["undelivered", "delivered", "dropped"]),
            "trainable": st.sampled_from([False, None]),
        }
    ),
    max_size=8,
)

delivery_steps = st.lists(
    st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=8
)
"""Connections that begin to send an answer (the first time that they are named) and end
(the second time), with or without success."""


_saids = st.sampled_from([None, "", "a", "b", [], ["a"], {}, 1, 1.0, True])
_called = st.builds(
    lambda arguments, index: [
        {"id": "c", "function": {"name": "f", "arguments": arguments}, **index}
    ],
    st.sampled_from([None, '{"a":1}', '{ "a": 1 }', {"a": 1}, {"a": 1.0}, "{", '"{"']),
    st.sampled_from([{}, {"index": 0}]),
)
chat_messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "assistant", "tool"])},
    optional={
        "content": _saids,
        "reasoning_content": _saids,
        "provider_state": _saids,
        "tool_call_id": _saids,
        "name": _saids,
        "tool_calls": _called | st.sampled_from([None, []]),
    },
)
"""Messages with fields that count only where another role has them."""


# Texts of JSON lines


json_spaces = st.sampled_from(["", "", "", " ", "\t", " \r "])
_odd_numbers = st.sampled_from(
    "3.0 1e3 true false null 2147483647 2147483648 99999999999 -0 -1 00 01 0 - 1. .5 1e "
    "[] [1] {} NaN -Infinity 1_0 +1 '' \"1\" 123456789012345678901 ".split(" ")
)
_odd_floats = st.sampled_from(
    '-0.0 0 -0 -1 1e-5 -1E-300 -1e400 1e999 -0.4012345671653748 0.1e1 null true "1" '
    "-9007199254740993 -0.12345678901234567890123 -1.7976931348623157e308 4.9e-324 -1e5 "
    "-00.1 -.1 -1.e1 -12345678901234567.5 -9007199254740993.5 1e22 1e23".split(" ")
)
json_floats = st.floats(-64, 0).map(repr) | st.floats(width=32).map(repr) | _odd_floats


@st.composite
def json_arrays(draw, elements, odd, size=6):
    """The text of an array, mostly of ``elements``."""
    texts = draw(st.lists(elements, max_size=size))
    if draw(st.integers(0, 3)) == 0:
        texts.insert(draw(st.integers(0, len(texts))), draw(odd))
    comma = pick(draw, [",", ", ", " ,\t"])
    return f"[{draw(json_spaces)}{comma.join(texts)}{draw(json_spaces)}]"


_small_ids = st.integers(0, 12).map(str)
_json_texts = st.sampled_from(
    ['"a"', '"\\"]"', '"[1, 2\\\\"', '"é\\ud800"', "{}", "1.0"]
)
_json_messages = st.sampled_from(
    [
        '{"role": "user", "content": "a"}',
        '{"role":"user","content":"a]\\"\\\\"}',
        '{"role": "user", "content": [{"prompt_ids": [1, 2]}, NaN]}',
        '{"role": "assistant", "content": null, "tool_calls": [{"a": 1.0, "b": [[]]}]}',
        '{"role": "tool", "content": "\\u2028é"}',
        '{"content": "no role"}',
        "12",
        "123",
    ]
)


@st.composite
def call_lines(draw):
    """The text of one line of a log of calls, mostly well formed."""
    n = draw(st.integers(0, 4))
    members = [
        ("session_id", pick(draw, ['"a"', '"a"', '"b"', "null", "NaN"])),
        ("prompt_ids", draw(json_arrays(_small_ids, _odd_numbers, 12))),
        (
            "output_ids",
            draw(
                st.lists(_small_ids, min_size=n, max_size=n).map(
                    lambda ids: f"[{', '.join(ids)}]"
                )
                | json_arrays(_small_ids, _odd_numbers)
            ),
        ),
        (
            "output_logprobs",
            draw(
                st.lists(json_floats, min_size=n, max_size=n).map(
                    lambda values: f"[{', '.join(values)}]"
                )
                | json_arrays(json_floats, _odd_floats, 3)
            ),
        ),
        (
            "prompt_messages",
            draw(st.just("null") | json_arrays(_json_messages, _json_texts, 4)),
        ),
    ]
    extra = ["prompt_ids", "output_ids", "prompt_messages", "note", "use_tool"]
    for _ in range(pick(draw, [0, 0, 0, 1, 2])):
        value = _json_texts | json_arrays(_small_ids, _odd_numbers)
        members.append((pick(draw, extra), draw(value)))
    if draw(st.integers(0, 3)) == 0:
        members = draw(st.permutations(members))
    names = {name: f'"{name}"' for name, _ in members}
    if draw(st.integers(0, 7)) == 0:
        names["prompt_ids"] = '"prompt\\u005fids"'
    colon, comma = pick(draw, [(":", ","), (": ", ", "), (" :\t", " , ")])
    inner = comma.join(f"{names[name]}{colon}{value}" for name, value in members)
    text = f"{{{draw(json_spaces)}{inner}{draw(json_spaces)}}}"
    if draw(st.integers(0, 7)) == 0:
        at = draw(st.integers(0, len(text)))
        text = text[:at] + pick(draw, ["", "]", '"', ",", "x"]) + text[at + 1 :]
    return text.encode("utf-8")


# Further columns of turns

_further_values = {
    "numbers": st.none() | st.integers(-3, 3) | st.sampled_from([0.5, 2.0]),
    "text": st.none() | st.sampled_from(["", "a", "é"]),
    "lists": st.none() | st.lists(st.none() | st.integers(0, 9), max_size=3),
    "dicts": st.none() | st.fixed_dictionaries({"a": st.integers(0, 3)}),
}


@st.composite
def weight_versions(draw, turn):
    """Which weights sampled a turn's output, or None."""
    n = len(turn["output_ids"])
    cuts = sorted(draw(st.lists(st.integers(0, n), max_size=2)))
    pieces = [
        {"version": str(start), "start": start, "stop": stop}
        for start, stop in pairwise([0, *cuts, n])
    ]
    return draw(st.sampled_from([None, pieces]))


@st.composite
def versioned(draw, drawn):
    """Turns of a strategy, some with weight_versions."""
    turns = draw(drawn)
    return [{**turn, "weight_versions": draw(weight_versions(turn))} for turn in turns]


@st.composite
def further_columns(draw, turn):
    """What a call may say in columns of its own, and which weights sampled its output."""
    names = draw(st.lists(st.sampled_from(sorted(_further_values)), unique=True))
    values = {name: draw(_further_values[name]) for name in names}
    values["experts"] = draw(payload_lists(turn))
    return draw(weight_versions(turn)), values


# Messages as a session hears them again and again


class _Text(str):
    __slots__ = ()


class _Whole(int):
    pass


def _in_lists(levels, bottom):
    for _ in range(levels):
        bottom = [bottom]
    return bottom


# Alike but for what a comparison may miss; some in types that are not JSON's own.
_heard_leaves = st.one_of(
    st.sampled_from([None, True, False, 1, 1.0, 0, 0.0, -0.0, NAN, float("nan")]),
    st.sampled_from([2**63 - 1, 2**63, -(2**63), 10**30, float("inf"), {}, []]),
    st.sampled_from(["", "a", "é", "ł", "\U0001f600", "\ud800", "\ud83d\ude00"]),
    st.sampled_from(["x" * 16, "x" * 17, "x" * 33 + "y", "x" * 33 + "z", "y" * 3000]),
    st.sampled_from(["y" * 2999 + "z", _in_lists(31, 1), _in_lists(40, 1)]),
    st.sampled_from([_Text("a"), _Whole(1), np.float64(1.0)]),
)
_heard_values = st.recursive(
    _heard_leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", _Text("a")]), inner, max_size=2)
        | st.builds(
            OrderedDict, st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
        )
    ),
    max_leaves=6,
)


@st.composite
def heard_calls(draw):
    """What some calls say: (messages or None, reply or None, base, whether it counts).

    Most go on from an earlier one; messages come again in other objects, with their keys in
    another order, and written otherwise.
    """
    roles = st.sampled_from(["user", "tool", "é"])
    message = st.fixed_dictionaries(
        {"role": roles}, optional={"c": _heard_values, "d": _heard_values}
    )
    pool = draw(st.lists(message, min_size=1, max_size=6))
    shown = st.sampled_from(pool).map(lambda one: dict(reversed(one.items())))
    shown = st.sampled_from(pool) | shown | shown.map(OrderedDict)
    calls, lists = [], [[]]
    for _ in range(draw(st.integers(1, 8))):
        base = pick(draw, lists)
        kept = base[: draw(st.integers(max(0, len(base) - 2), len(base)))]
        messages = kept + draw(st.lists(shown, max_size=3))
        reply = draw(st.none() | shown)
        lists.append(messages if reply is None else [*messages, reply])
        said = pick(draw, [messages, messages, messages, None])
        n_counted = sum(counts for *_, counts in calls)
        place = draw(st.integers(-1, n_counted - 1))
        calls.append((said, reply, place, pick(draw, [True, True, False])))
    return calls


# Rows of several cache lines


@st.composite
def long_runs(draw):
    """Sessions whose calls bring and sample up to three lines of a cache each.

    Some calls go on with an earlier one; some have no logprobs, or lack the first.
    """
    turns = []
    sizes = st.integers(0, 50)
    for name in "abc"[: draw(st.integers(1, 3))]:
        paths = [[]]
        for k in range(draw(st.integers(1, 5))):
            prompt = [*pick(draw, paths), *range(draw(sizes) + 1)]
            output = [*range(100, 100 + draw(sizes))]
            logprobs = [-0.5 * i for i in range(len(output))]
            turns.append(
                {
                    "session_id": name,
                    "turn_index": k,
                    "prompt_ids": prompt,
                    "output_ids": output,
                    "output_logprobs": draw(
                        st.sampled_from([logprobs, [None, *logprobs][:-1], None])
                    )
                    if output
                    else None,
                }
            )
            paths.append([*prompt, *output])
    return turns


# Columns that trajkit does not know, of any type

_LONG = "longer than what a view holds in itself"
_numbers = st.integers(0, 9)
_texts = st.sampled_from(["", "a", "é", _LONG])
_bytes = _texts.map(str.encode)
_times = st.datetimes(datetime(1970, 1, 1), datetime(2100, 1, 1))

# values of each type; None is added to all
_OF_TYPE = {
    pa.null(): st.none(),
    pa.bool_(): st.booleans(),
    pa.uint64(): st.sampled_from([0, 2**64 - 1]),
    pa.float16(): st.sampled_from([0.0, -0.5]),
    pa.float64(): st.sampled_from([0.0, -0.1]),
    pa.decimal128(5, 2): st.decimals(0, 9, places=2),
    pa.date32(): _times.map(datetime.date),
    pa.timestamp("us", "UTC"): _times.map(lambda time: time.replace(tzinfo=UTC)),
    pa.duration("us"): st.timedeltas(timedelta(0), timedelta(9)),
    pa.string(): _texts,
    pa.string_view(): _texts,
    pa.large_binary(): _bytes,
    pa.binary_view(): _bytes,
    pa.binary(3): st.binary(min_size=3, max_size=3),
    pa.list_(pa.string_view()): st.lists(st.none() | _texts, max_size=3),
    pa.large_list(pa.string_view()): st.lists(st.none() | _texts, max_size=3),
    pa.large_list(pa.large_list(pa.int8())): st.lists(st.lists(_numbers), max_size=3),
    pa.list_view(pa.int64()): st.lists(_numbers, max_size=3),
    pa.list_(pa.int8(), 2): st.lists(_numbers, min_size=2, max_size=2),
    pa.struct({"a": pa.string_view(), "b": pa.struct({"c": pa.int8()})}): (
        st.fixed_dictionaries(
            {
                "a": st.none() | _texts,
                "b": st.none() | st.fixed_dictionaries({"c": _numbers}),
            }
        )
    ),
    pa.map_(pa.string(), pa.string_view()): st.lists(st.tuples(_texts, _texts)),
    pa.dictionary(pa.int8(), pa.string()): _texts,
}


@st.composite
def _arrays_of(draw, type_, n):
    given_in = type_.value_type if pa.types.is_dictionary(type_) else type_
    values = st.lists(st.none() | _OF_TYPE[type_], min_size=n, max_size=n)
    array = pa.array(draw(values), given_in)
    return array.dictionary_encode().cast(type_) if given_in != type_ else array


@st.composite
def columns_of_any_type(draw, n, types=tuple(_OF_TYPE)):
    """A table of n rows with columns of several of these types, in one chunk or two."""
    chosen = draw(st.lists(st.sampled_from(types), unique=True, min_size=1, max_size=5))
    names = [f"further {k}" for k in range(len(chosen))]
    columns = [draw(_arrays_of(type_, n)) for type_ in chosen]
    cut = pick(draw, [0, n // 2])
    table = pa.table(columns, names)
    return pa.concat_tables([table[:cut], table[cut:]]) if cut else table


# Tables beside the turns


@st.composite
def session_lines(draw):
    """What is known of sessions: some said again, and a column of the caller's own."""
    known = {
        "reward": st.none() | st.sampled_from([0.0, -0.5, 2.0]),
        "group_id": st.none() | _texts,
        "error": st.none() | _texts,
        "note": st.none() | _texts,
    }
    names = draw(st.lists(st.sampled_from(["", "a", "b", "é"]), max_size=6))
    return [
        {"session_id": name} | {k: draw(values) for k, values in known.items()}
        for name in names
    ]


@st.composite
def transcripts(draw):
    """Messages of conversations, as people write them down."""
    said = st.sampled_from(["", "q", "é", "A b"])
    roles = st.sampled_from(["system", "user", "assistant", "assistant", "tool"])
    message = st.fixed_dictionaries({"role": roles, "content": said})
    return draw(st.lists(st.lists(message, max_size=5), max_size=4))
