"""Small sessions of every shape that a tree of rows takes, as rows with advantages."""

import random

import pyarrow as pa

import trajkit as tk
from trajkit.torch.packs import PackDataset

VOCABULARY = 61


def ids(draw, n):
    return [draw.randrange(1, VOCABULARY) for _ in range(n)]


def call(draw, session, prompt, n_output):
    return {
        "session_id": session,
        "prompt_ids": list(prompt),
        "output_ids": ids(draw, n_output),
        "output_logprobs": [-2 * draw.random() for _ in range(n_output)],
    }


def talk(draw, session, shape="clean", n_turns=5):
    """One conversation; ``shape`` is what becomes of a reply in the next prompt."""
    prompt, calls = ids(draw, 9), []
    for _ in range(n_turns):
        prompt = prompt + ids(draw, 4)
        calls.append(call(draw, session, prompt, 6))
        reply = list(calls[-1]["output_ids"])
        if shape == "tail_changed":
            reply[-2] = (reply[-2] + 1) % VOCABULARY
        elif shape == "head_dropped":
            reply = reply[4:]
        prompt = prompt + reply
    return calls


def retries(draw, session):
    """Every second request is sent twice, and the second reply is continued."""
    calls, prompt = [], ids(draw, 8)
    for turn in range(4):
        calls.append(call(draw, session, prompt, 5))
        if turn % 2:
            calls.append(call(draw, session, prompt, 5))
        prompt = prompt + calls[-1]["output_ids"] + ids(draw, 3)
    return calls


def siblings(draw, session, n=4):
    """Samples of one prompt, two of them equal."""
    prompt = ids(draw, 12)
    calls = [call(draw, session, prompt, 7) for _ in range(n)]
    calls[-1]["output_ids"] = calls[-2]["output_ids"]
    return calls


def sub_agents(draw, session):
    """Three conversations that share nothing, or a system prompt."""
    first, second = talk(draw, session, n_turns=2), talk(draw, session, n_turns=2)
    shared = call(draw, session, first[0]["prompt_ids"][:6] + ids(draw, 5), 4)
    return [first[0], second[0], shared, first[1], second[1]]


def deep(draw, session):
    """Branches of branches: a binary tree of replies."""
    calls, open_prompts = [], [ids(draw, 5)]
    for _ in range(7):
        prompt = open_prompts.pop(0)
        calls.append(call(draw, session, prompt, 3))
        below = prompt + calls[-1]["output_ids"]
        open_prompts += [below + ids(draw, 2), below + ids(draw, 2)]
    return calls


SESSIONS = {
    "clean": lambda d: talk(d, "a"),
    "tail_changed": lambda d: talk(d, "a", "tail_changed"),
    "head_dropped": lambda d: talk(d, "a", "head_dropped"),
    "retries": lambda d: retries(d, "a"),
    "siblings": lambda d: siblings(d, "a"),
    "sub_agents": lambda d: sub_agents(d, "a"),
    "nemo": lambda d: deep(d, "a"),
    "per_call": lambda d: talk(d, "a"),
    "several_sessions": lambda d: [
        *talk(d, "a", "tail_changed", 3),
        *siblings(d, "b", 2),
        *talk(d, "c", n_turns=2),
    ],
}


def rows_of(name):
    """The rows of a case, with an advantage of its own for every row."""
    draw = random.Random(name)
    policy = name if name in ("nemo", "per_call") else "faithful"
    rows = tk.linearize(tk.from_records(SESSIONS[name](draw)), policy)
    values = [draw.uniform(-2, 2) for _ in range(len(rows))]
    return rows.append_column("advantage", pa.array(values))


def packs_of(rows, cut=False, **options):
    """The rows in one pack; or cut into parts, each little more than its longest row."""
    longest = max(map(len, rows["input_ids"].to_pylist()))
    limit = longest + 4 if cut else 10_000
    return tk.pack(rows, limit, columns=["advantage"], **options)


def pack_of(name="siblings"):
    """The one pack of a case."""
    return PackDataset(packs_of(rows_of(name)))[0]
