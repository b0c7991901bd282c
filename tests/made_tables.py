"""Turns as `tests.strategies` draws them to trajkit's tables, and tables to dicts."""

import pyarrow as pa

import trajkit as tk
from tests.oracles import rows as reference
from trajkit.schema import TURNS_DELTA


def call(session, prompt, output=(3,), **more):
    """A record of a call."""
    ids = {"prompt_ids": [*prompt], "output_ids": [*output]}
    logprobs = [-0.5] * len(output)
    return {"session_id": session, **ids, "output_logprobs": logprobs, **more}


def by_session(turns):
    """session_id -> its turns, in order of first appearance."""
    sessions = {}
    for turn in turns:
        sessions.setdefault(turn.get("session_id", "s"), []).append(turn)
    return sessions


def linearized(turns, policy="faithful", **options):
    """The rows of turns, and their report."""
    shared = {k: v for k, v in options.items() if k != "payloads"}
    return tk.linearize(turns, policy, **options), tk.report(turns, policy, **shared)


def streamed(batches, policy="faithful", **options):
    """The batches of rows of batches of turns, and those of their report."""
    counts = []
    batches = list(tk.linearize_batches(batches, policy, report=counts, **options))
    return batches, counts


def turns_table(turns):
    """The turns table of one session or of several, interleaved ones gathered."""
    # from_records refuses an empty prompt, the stages after it take one
    records = [
        {"session_id": name, **turn, "prompt_ids": turn["prompt_ids"] or [0]}
        for name, session in by_session(turns).items()
        for turn in session
    ]
    table = tk.from_records(records)
    prompts = [
        turn["prompt_ids"] for session in by_session(turns).values() for turn in session
    ]
    return replaced(table, "prompt_ids", prompts)


def replaced(table, name, values):
    """The table with other values in a column: an array, or a list of the same type."""
    at = table.column_names.index(name)
    field = table.field(at)
    if not isinstance(values, pa.Array):
        values = pa.array(values, field.type)
    return table.set_column(at, field.with_type(values.type), values)


def turn_rewards(*values, session="a"):
    """The rewards of a session's turns 0, 1, ..."""
    return pa.table(
        {
            "session_id": pa.array([session] * len(values), pa.string()),
            "turn_index": pa.array(range(len(values)), pa.int32()),
            "reward": pa.array(values, pa.float64()),
        }
    )


OWN_EQUALITY = {"agents": "text", "generations": "strict"}
"""The message equality of the presets that route this way."""


def link_by(
    turns, parent_by="messages", *, merge_threshold=1024, fork_threshold=1, **choices
):
    """`trajkit.link` under a policy that is given by what links depend on."""
    merges = parent_by == "messages"
    choices.setdefault("message_equality", OWN_EQUALITY.get(parent_by, "values"))
    policy = tk.Policy(
        name="links",
        parent_by=parent_by,
        merge_rewrites=merges,
        fork_threshold=merge_threshold if merges else fork_threshold,
        **choices,
    )
    return tk.link(turns, policy)


def in_delta_form(table, choose):
    """A full turns table, each prompt said as what it shares with an earlier turn.

    ``choose(options)`` picks one of a list: the base of a turn (None: none), and how
    much of what they share is said by it. A base need not be the best, nor used up.
    """
    lines = table.to_pylist()
    current = {}
    for line in lines:
        # a message without a body has the one that its key had last
        line["says"] = []
        for message in [*(line["messages"] or ()), line["response"]]:
            if message is not None:
                at = line["session_id"], message["key"]
                current[at] = message["body"] or current.get(at)
                said = message["key"], message["role"], current[at]
                line["says"].append((said, message["body"] is None))
    for i, line in enumerate(lines):
        earlier = [
            other for other in lines[:i] if other["session_id"] == line["session_id"]
        ]
        base = choose([None, *earlier])
        held, shows = [], []
        if base is not None:
            held = base["prompt_ids"] + base["output_ids"]
            if base["messages"] is not None:
                shows = [(said, True) for said, _ in base["says"]]
        line["base_turn"] = None if base is None else base["turn_index"]
        n = choose(range(reference.lcp(held, line["prompt_ids"]) + 1))
        line["shared_length"] = n
        line["suffix_ids"] = line["prompt_ids"][n:]
        line["shared_messages"] = line["suffix_messages"] = None
        if line["messages"] is not None:
            # what gives a body again is not what was shown
            asked = line["says"][: len(line["messages"])]
            n = choose(range(reference.lcp(shows, asked) + 1))
            line["shared_messages"] = n
            line["suffix_messages"] = line["messages"][n:]
    return pa.Table.from_pylist(
        [{name: line[name] for name in TURNS_DELTA.names} for line in lines],
        TURNS_DELTA,
    )


def dicts(table, like):
    """The rows of a table as dicts of the columns that the first of ``like`` has."""
    names = list(like[0]) if like else []
    return table.select(names).to_pylist()


def policy_of(choice):
    """The policy that `tests.strategies.policies` drew."""
    name, threshold = choice
    if name == "slime":
        return tk.policy(name, fork_threshold=threshold)
    return tk.policy(name)


class Letters:
    """A tokenizer with a token per character."""

    def encode(self, text, add_special_tokens=False):
        return [ord(letter) for letter in text]

    def decode(self, ids, skip_special_tokens=False):
        return "".join(map(chr, ids))
