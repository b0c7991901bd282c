"""Seeded runs that are no line: asked again, sampled several times, with sub-agents.

As `benchmarks.data`, whose sizes and records these share. No reply comes back changed.
"""

from collections.abc import Iterator

import numpy as np

from benchmarks.data import Record, Size, draw_text, draw_tokens

FORKS = ("retries", "siblings", "sub_agents")
"""Where the conversation forks.

retries
    Every fourth call is made again, and the conversation goes on from its second reply.
siblings
    After a quarter of the turns, four replies to one prompt; each goes on by itself.
sub_agents
    After every eight turns, an agent of its own has eight, and its answer comes back as a
    tool's.
"""

BRANCHES = 4
STRETCH = 8


class Talk:
    """One conversation as its agent sends it: all of it, with every call."""

    def __init__(self, draw: np.random.Generator, session_id: str, size: Size) -> None:
        self._draw = draw
        self._session_id = session_id
        self._replies = size.reply_min, size.reply_max + 1
        # as much as lets n_turns of a mean reply fill the context
        mean = (size.reply_min + size.reply_max) // 2
        self._shown = (size.context - size.system) // size.n_turns - mean
        self._messages: list[Record] = []
        self._prompt = np.empty(0, np.int32)
        self.hear("system", size.system)

    def hear(self, role: str, n_tokens: int | None = None) -> None:
        """The next message that is not the model's."""
        n = self._shown if n_tokens is None else n_tokens
        self._messages.append({"role": role, "content": draw_text(self._draw, n)})
        self._prompt = np.concatenate([self._prompt, draw_tokens(self._draw, n)])

    def ask(self) -> Record:
        """A call, whose reply is not yet of the conversation."""
        n = int(self._draw.integers(*self._replies))
        return {
            "session_id": self._session_id,
            "prompt_messages": list(self._messages),
            "response_message": {
                "role": "assistant",
                "content": draw_text(self._draw, n),
            },
            "prompt_ids": self._prompt,
            "output_ids": draw_tokens(self._draw, n),
            "output_logprobs": -self._draw.exponential(0.4, n).astype(np.float32),
            "finish_reason": "stop",
            "ill_formed": False,
        }

    def go_on(self, call: Record) -> None:
        """Take the reply of a call into the conversation, and what was answered."""
        self._messages.append(call["response_message"])
        self._prompt = np.concatenate([self._prompt, call["output_ids"]])
        self.hear("tool")

    def branch(self) -> "Talk":
        """The same conversation, to go on by itself."""
        other = object.__new__(Talk)
        other.__dict__.update(self.__dict__)
        other._messages = list(self._messages)
        return other


def forking(session_id: str, size: Size, shape: str, seed: int = 0) -> Iterator[Record]:
    """The calls of one session in order: ``size.n_turns``, retries beside.

    Parameters
    ----------
    session_id : str
    size : Size
        A conversation of ``n_turns`` would end at ``context``; each of several is shorter.
    shape : str
        One of `FORKS`.
    seed : int
        Equal arguments give equal runs.

    Yields
    ------
    dict
        As `benchmarks.data.rollout`.
    """
    draw = np.random.default_rng(seed)
    main = Talk(draw, session_id, size)
    main.hear("user")
    if shape == "retries":
        for k in range(size.n_turns):
            if k % 4 == 3:
                yield main.ask()
            call = main.ask()
            yield call
            main.go_on(call)
    elif shape == "siblings":
        together = size.n_turns // BRANCHES
        for _ in range(together):
            call = main.ask()
            yield call
            main.go_on(call)
        talks = [main.branch() for _ in range(BRANCHES)]
        for k in range(size.n_turns - together):
            talk = talks[k % BRANCHES]
            call = talk.ask()
            yield call
            talk.go_on(call)
    elif shape == "sub_agents":
        talk = main
        for k in range(size.n_turns):
            if k % STRETCH == 0 and k // STRETCH % 2:
                talk = Talk(draw, session_id, size)
                talk.hear("user")
            elif k % STRETCH == 0:
                talk = main
            call = talk.ask()
            yield call
            talk.go_on(call)
    else:
        raise ValueError(f"{shape!r} is no shape: expected one of {FORKS}")
