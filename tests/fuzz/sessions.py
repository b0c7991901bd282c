"""Random sessions and policies from a seed, for `tests.fuzz` and `tests.strategies`.

Vocabularies are tiny and messages few, so that prefixes collide, replies are equal and
one reply opens another. Turns are dicts as `tests.oracles.rows` reads them.
"""

from collections.abc import Iterable
from random import Random
from typing import Any

import trajkit as tk
from trajkit import policies
from trajkit.errors import PolicyError

Turn = dict[str, Any]

END = 9
_EVENTS = {
    "continue": 50,
    "old": 8,
    "head": 8,
    "retry": 6,
    "again": 3,
    "short": 6,
    "long": 1,
    "sub-agent": 6,
}
# Python calls the first three equal; a trainer's JSON does not
_NUMBERS = ({"a": 1}, {"a": 1.0}, {"a": True}, {"a": "1"}, {})
_CONTENTS = ("x", "y", "x", "", None, [], 1, 1.0, True)
_TOOLS = ("Task", "Agent", "bash")
_REASONS = ("stop", "stop", "tool_calls", "length", "abort", "stop_sequence", None)


def n_calls(draw: Random, longest: int) -> int:
    """Mostly a few calls, one session in a hundred with up to ``longest``."""
    most = draw.choices([3, 8, 30, longest], [65, 29, 5, 1])[0]
    return draw.randint(1, most)


def session(draw: Random, n: int, **style: object) -> list[Turn]:
    """One session of n calls, in the order in which they were recorded.

    ``style``: attributes of `Style` that are not drawn.
    """
    shared = Style(draw, **style)
    turns: list[Turn] = []
    for _ in range(n):
        turns.append(shared.turn(turns))
    return turns


def growing(draw: Random, n: int, **style: object) -> list[Turn]:
    """One session whose prompts grow out of earlier prompts, whatever was sampled.

    Equal prompts (retries), empty ones, tails without an end of turn, or with one of
    several ids that may be one, outputs that are empty or do not end their turn.
    """
    shared = Style(draw, **{"n_ids": 4, **style})
    turns: list[Turn] = []
    for _ in range(n):
        known = draw.choice([None, *turns, *turns[-1:], *turns[-1:]])
        prompt = shared.ids(3)
        if known is not None:
            said = known["output_ids"]
            tail = [*shared.ids(2), *draw.choice([[], [END]]), *shared.ids(2)]
            endings = [[], tail, [*said, *tail], [*said, END, *tail]]
            endings += [[*said[:-1], END, *tail], [*tail, END, 2]]
            prompt = known["prompt_ids"] + draw.choice(endings)
        output = [*shared.ids(3), *draw.choice([[], [END]])]
        turns.append(
            {
                "prompt_messages": None,
                "response_message": None,
                "prompt_ids": prompt,
                "output_ids": output,
                **shared.facts(len(output)),
            }
        )
    return turns


def with_parents(draw: Random, n: int) -> list[Turn]:
    """One session of calls with names of their own, and parents that a source recorded.

    Some parents are wrong or missing, and one call may be scored. Some sources recorded
    none at all.
    """
    turns = session(draw, n, named=1)
    names = [f"r{k}" for k in draw.sample(range(n), n)]
    scored = draw.choice([None, draw.randrange(n)])
    silent = draw.random() < 0.25
    kinds = ["root", "unresolved", "resolved", "resolved", "begun", "begun", None]
    paths = [[*turn["prompt_ids"], *turn["output_ids"]] for turn in turns]
    found = []
    for k, turn in enumerate(turns):
        kind = None if silent else draw.choice(kinds)
        parent = None
        if kind == "begun":  # a call that the prompt begins with, or none
            prompt = turn["prompt_ids"]
            begin = [
                name
                for name, path in zip(names, paths, strict=True)
                if prompt[: len(path)] == path
            ]
            kind = "resolved" if begin else "root"
            parent = draw.choice(begin) if begin else None
        elif kind == "resolved":
            parent = draw.choice([*names, "missing"])
        recorded = {"parent_resolution": kind, "parent_request": parent}
        named = {"request_id": names[k], "scored": k == scored}
        found.append({**turn, **named, **recorded})
    return found


PLAIN = (
    *("prompt_messages", "response_message", "prompt_ids", "output_ids"),
    *("output_logprobs", "finish_reason", "ill_formed", "trainable"),
)


def numbered(
    draw: Random, turns: Iterable[Turn], names: tuple[str, ...] = ()
) -> list[Turn]:
    """The turns with ascending numbers, with gaps, and those of their fields that tests of
    single properties want: `PLAIN` and ``names``."""
    index = draw.choice([0, 0, 3]) - 1
    found = []
    for turn in turns:
        index += draw.choice([1, 1, 1, 2, 5])
        found.append(
            {"turn_index": index} | {name: turn[name] for name in (*PLAIN, *names)}
        )
    return found


def generated_runs(
    n_sessions: int, seed: int = 0, max_turns: int = 6, **style: object
) -> list[Turn]:
    """Turns of sessions ``g0``, ``g1``, ..., of up to so many calls each."""
    draw = Random(seed)
    return [
        {"session_id": f"g{k}", **one}
        for k in range(n_sessions)
        for one in numbered(draw, session(draw, draw.randint(1, max_turns), **style))
    ]


class Style:
    """What the calls of one session have in common."""

    def __init__(self, draw: Random, **given: object) -> None:
        self.draw = draw
        self.n_ids = draw.choice([2, 4, 4, 50])
        self.longest = draw.choice([6, 30, 30, 400])
        self.drifting = draw.choice([12, 40, 80])
        # shares of calls without messages, without logprobs, with a mask, ...
        self.untold = draw.choice([0.0, 0.0, 0.05, 0.5, 1.0])
        self.unknown = draw.choice([0.0, 0.3, 1.0])
        self.masked = draw.choice([0.0, 0.0, 0.5])
        self.versioned = draw.choice([0.0, 0.5])
        self.stepped = draw.choice([0.0, 0.8])
        self.named = draw.choice([0.0, 0.9])
        self.untrainable = draw.choice([0.0, 0.2])
        self.apart = draw.random() < 0.15  # messages and tokens have nothing in common
        self.tools = draw.choice(
            ["", "", "x", "xy"]
        )  # keys of the tools that are offered
        self.answering, self.calling = draw.choice([(0.0, 0.1), (0.0, 0.1), (0.3, 0.3)])
        self.odd = 0.1  # messages with a number of several types, or a mark of a cache
        self.contents = draw.choices(_CONTENTS, k=draw.randint(1, 4))
        vars(self).update(given)

    def ids(self, most: int) -> list[int]:
        draw = self.draw
        return [draw.randrange(self.n_ids) for _ in range(draw.randint(0, most))]

    def message(self, roles: tuple[str, ...]) -> Turn:
        draw = self.draw
        said: Turn = {"role": draw.choice(roles), "content": draw.choice(self.contents)}
        if draw.random() < self.odd:
            said["n"] = draw.choice([1, 1.0, True, {"cache_control": 1}])
        if draw.random() < self.odd / 2:
            said["cache_control"] = {"type": "ephemeral"}
        if draw.random() < self.answering:
            answered = f"c{draw.randrange(2)}"
            if draw.random() < 0.5:
                said |= {"role": "tool", "tool_call_id": answered}
            else:
                block = {"type": "tool_result", "tool_use_id": answered}
                said["content"] = [block]
        return said

    def reply(self) -> Turn | None:
        draw = self.draw
        kind = draw.random()
        if kind < 0.08:
            return None
        if kind < 0.1:
            return self.message(("user",))
        said: Turn = {"role": "assistant", "content": draw.choice(self.contents)}
        if draw.random() < 0.1:
            said["reasoning_content"] = draw.choice(["", "r", None])
        if draw.random() < self.calling:
            name, number = draw.choice(_TOOLS), draw.choice(_NUMBERS)
            call: Turn = {"function": {"name": name, "arguments": number}}
            if draw.random() < 0.8:
                call["id"] = f"c{draw.randrange(2)}"
            if draw.random() < 0.1:
                call["index"] = draw.randrange(2)
            if draw.random() < 0.8:
                said["tool_calls"] = [call]
            else:
                block = {"type": "tool_use", "id": call.get("id"), "name": name}
                said["content"] = [block]
        return said

    def changed(self, ids: list[int], opening: int) -> list[int]:
        """Ids that come back otherwise, mostly beyond the first ``opening`` of them."""
        draw = self.draw
        low = min(opening, len(ids)) if draw.random() < 0.8 else 0
        start = draw.randint(low, len(ids))
        if draw.random() < 0.2:  # a template leaves out the head of a reply
            return [*ids[:low], *ids[start:]]
        stop = draw.choice(
            [start, min(start + 1, len(ids)), draw.randint(start, len(ids))]
        )
        return [*ids[:start], *self.ids(2), *ids[stop:]]

    def turn(self, turns: list[Turn]) -> Turn:
        draw = self.draw
        shares = {**_EVENTS, "drift": self.drifting}
        event = (
            draw.choices(list(shares), list(shares.values()))[0] if turns else "short"
        )
        prompt: list[int] = []
        sent: list[Turn] = []
        if event not in ("short", "long", "sub-agent"):
            known = turns[-1] if event in ("continue", "drift") else draw.choice(turns)
            if event == "again":
                return {**known}
            prompt, sent = known["prompt_ids"], known["prompt_messages"] or []
            if event != "retry":
                opening = len(prompt)
                prompt = [*prompt, *known["output_ids"]]
                reply = known["response_message"]
                if reply is None:
                    reply = {"role": "assistant", "content": "?"}
                elif draw.random() < 0.1:
                    reply = {**reply, "content": draw.choice(self.contents)}
                sent = [*sent, reply]
                if event == "drift":
                    prompt = self.changed(prompt, opening)
            if event == "head" or len(prompt) > 2 * self.longest:
                kept = draw.random()
                prompt = prompt[: round(kept * len(prompt))]
                sent = sent[: round(kept * len(sent))]
        if event != "retry":
            most = self.longest if event == "long" else 3
            prompt = [*prompt, *self.ids(most), *draw.choice([[], [END], [END, 1]])]
            if event == "sub-agent" or not sent:
                sent = [self.message(("system", "user"))]
            for _ in range(draw.choice([0, 1, 1, 1, 2])):
                sent = [*sent, self.message(("user", "tool", "assistant", "user"))]
        if self.apart:
            sent = [
                self.message(("user", "assistant")) for _ in range(draw.randint(1, 3))
            ]
        if draw.random() < 0.02:
            prompt = []
        output = self.ids(draw.choice([0, 1, 2, 4, 4, 12, 30]))
        if output and draw.random() < 0.6:
            output.append(END)
        n = len(output)
        told: list[Turn] | None = sent
        if draw.random() < self.untold:
            told = draw.choice([None, None, None, []])
        return {
            "prompt_messages": told,
            "response_message": self.reply(),
            "prompt_ids": prompt,
            "output_ids": output,
            **self.facts(n),
        }

    def facts(self, n: int) -> Turn:
        """What the engine says of an output of n tokens."""
        draw = self.draw
        known: list[float | None] = [-draw.randrange(64) / 8 for _ in range(n)]
        if draw.random() < self.unknown:
            holes = [draw.choice([p, p, None]) for p in known]
            known = draw.choice([holes, [], [None, *known][:n]])
        mask = [draw.random() < 0.7 for _ in range(n)]
        pieces = None
        if draw.random() < self.versioned:
            cut = draw.randint(0, n)
            bounds = [(0, cut), (cut, n)] if 0 < cut < n else [(0, n)]
            pieces = [
                {"version": draw.choice("ab"), "start": start, "stop": stop}
                for start, stop in bounds
            ]
        return {
            "output_logprobs": known or None,
            "finish_reason": draw.choice(_REASONS),
            "ill_formed": draw.choice([False, False, True, None]),
            "trainable": False
            if draw.random() < self.untrainable
            else draw.choice([None, True]),
            "output_mask": mask if draw.random() < self.masked else None,
            "weight_versions": pieces,
            "tools_key": draw.choice(self.tools) if self.tools else None,
            "step": draw.randrange(3) if draw.random() < self.stepped else None,
            "request_id": draw.choice(["a", "b", "ab", ""])
            if draw.random() < self.named
            else None,
            "started_at": draw.choice([0.0, 1.0, 2.0])
            if draw.random() < self.named
            else None,
        }


_CHOICES: dict[str, tuple[object, ...]] = {
    **policies.NAMED_CHOICES,
    "merge_rewrites": (True, False),
    "compare_tools": (True, False),
    "keep_prefix": (True, False),
    "train_aborted": (True, False),
    "keep_untrained": (True, False),
    "keep_empty": (True, False),
    "fork_threshold": (1024, 5, 3, 3, 2, 2, 1, 1, 0, -1),
    "max_rows": (None, None, 1, 2, 3),
    "end_of_turn_token_id": (None, END, 0, 7),
    "dispatch_tools": (("Task", "Agent"), (), ("bash",)),
}
"""What `random_policy` chooses from."""


def random_policy(
    draw: Random, preset: str | None = None, deviating: float = 0.6
) -> tuple[str, dict[str, object]]:
    """A preset's name, and choices that differ from it, as `trajkit.policy` takes them."""
    while True:
        name = preset or draw.choice(list(policies.PRESETS))
        shares = {"fork_threshold": 0.8, "end_of_turn_token_id": 0.5}
        if draw.random() < deviating:
            shares |= dict.fromkeys(_CHOICES, draw.choice([0.1, 0.3, 1.0]))
        choices: dict[str, object] = {
            choice: draw.choice(_CHOICES[choice])
            for choice, share in shares.items()
            if draw.random() < share
        }
        try:
            tk.policy(name, **choices)
        except PolicyError:
            continue
        return name, choices
