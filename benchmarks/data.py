"""Seeded rollouts of realistic size and shape, as the records that a gateway keeps.

A rollout is a coding agent at work: a long system prompt, then turns of a few hundred
sampled tokens, each answered by tool output. Every turn sends the whole conversation
again, as messages and as token ids.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

VOCABULARY = 151_936  # ids are drawn below this; the size of Qwen's vocabulary

Record = dict[str, Any]
Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Size:
    """How large a rollout is, in turns and tokens."""

    n_turns: int
    # held after the last turn: its prompt and its output
    context: int
    system: int
    reply_min: int
    reply_max: int


SMALL = Size(n_turns=16, context=8_192, system=1_000, reply_min=100, reply_max=300)
LONG = Size(n_turns=128, context=131_072, system=6_000, reply_min=300, reply_max=700)
SIZES = {"small": SMALL, "long": LONG}


def quoted(
    shape: str, n_turns: int = 128, context: int = 131_072, reply: int = 300
) -> Size:
    """The rollout that the losses of the rules are quoted for, or a smaller one.

    Replies are of equal length, the system prompt is a fortieth of the context, and the
    last call holds ``context`` tokens, whatever the shape drops before it.
    """
    dropped = 2 * reply // 3 * (n_turns - 1) if shape == "head_dropped" else 0
    return Size(n_turns, context + dropped, context // 40, reply, reply)


SHAPES = ("clean", "tail_changed", "head_dropped")
"""What becomes of a reply when the next prompt shows it again.

clean
    The very tokens that were sampled.
tail_changed
    Its last token but one is another.
head_dropped
    The first two thirds are gone, as when a template drops the reasoning.
"""


def rollout(
    session_id: str,
    size: Size,
    shape: str = "clean",
    seed: int = 0,
    *,
    spoken: bool = True,
) -> Iterator[Record]:
    """The calls of one session in order.

    Parameters
    ----------
    session_id : str
    size : Size
    shape : str
        One of `SHAPES`.
    seed : int
        Equal arguments give equal rollouts.
    spoken : bool
        Draw messages as well. False: there are none, and calls go by their tokens.

    Yields
    ------
    dict
        What `trajkit.from_records` takes. ``prompt_ids``, ``output_ids`` (int32) and
        ``output_logprobs`` (float32) are arrays.
    """
    draw = np.random.default_rng(seed)
    replies = draw.integers(size.reply_min, size.reply_max + 1, size.n_turns)
    observations = _shares(
        size.context - size.system - int(replies.sum()), size.n_turns
    )

    def text(n_tokens: int) -> str:
        return draw_text(draw, n_tokens) if spoken else ""

    messages: list[dict[str, Any]] = [{"role": "system", "content": text(size.system)}]
    prompt = draw_tokens(draw, size.system)
    for k in range(size.n_turns):
        role = "tool" if k else "user"
        messages.append({"role": role, "content": text(observations[k])})
        prompt = np.concatenate([prompt, draw_tokens(draw, observations[k])])
        output = draw_tokens(draw, int(replies[k]))
        reply = {
            "role": "assistant",
            "content": text(len(output) // 2),
            "tool_calls": [
                {
                    "type": "function",
                    "function": {
                        "name": "bash",
                        "arguments": {"command": text(len(output) // 2)},
                    },
                }
            ],
        }
        yield {
            "session_id": session_id,
            "prompt_messages": list(messages) if spoken else None,
            "response_message": reply if spoken else None,
            "prompt_ids": prompt,
            "output_ids": output,
            "output_logprobs": -draw.exponential(0.4, len(output)).astype(np.float32),
            "finish_reason": "tool_calls" if k + 1 < size.n_turns else "stop",
            "ill_formed": False,
        }
        messages.append(reply)
        prompt = np.concatenate([prompt, _shown_again(draw, output, shape)])


def mixed(n_rollouts: int, seed: int = 0) -> Iterator[tuple[str, Size, str]]:
    """Names, sizes and shapes of rollouts as a run of a coding agent has them.

    Between 4 and 128 turns, 30 on average, of some 900 tokens each; every shape in turn.
    """
    draw = np.random.default_rng(seed)
    for k in range(n_rollouts):
        n_turns = int(4 * 32 ** draw.beta(2, 2))
        per_turn = int(draw.integers(500, 1300))
        dropped = 200 * n_turns if SHAPES[k % 3] == "head_dropped" else 0
        context = 2_000 + per_turn * n_turns + dropped
        yield f"r{k:07d}", Size(n_turns, context, 1_500, 100, 300), SHAPES[k % 3]


def as_parsed(records: Iterator[Record]) -> list[Record]:
    """The same records as ``json.loads`` makes them of a log.

    Every int, float and message is an object of its own, in each turn again.
    """
    return [
        {
            name: value.tolist()
            if isinstance(value, np.ndarray)
            else json.loads(json.dumps(value))
            for name, value in record.items()
        }
        for record in records
    ]


def _shown_again(draw: np.random.Generator, output: Tokens, shape: str) -> Tokens:
    if shape == "tail_changed":
        output = output.copy()
        output[-2] = (output[-2] + 1) % VOCABULARY
    elif shape == "head_dropped":
        output = output[2 * len(output) // 3 :]
    elif shape != "clean":
        raise ValueError(f"{shape!r} is no shape: expected one of {SHAPES}")
    return output


def _shares(total: int, n: int) -> list[int]:
    return [total // n + (k < total % n) for k in range(n)]


def draw_tokens(draw: np.random.Generator, n: int) -> Tokens:
    """n ids of the vocabulary."""
    return draw.integers(0, VOCABULARY, n, dtype=np.int32)


def draw_text(draw: np.random.Generator, n_tokens: int) -> str:
    """About as much text as n tokens decode to: four characters each."""
    words = draw.integers(0, 16**7, n_tokens // 2)
    return " ".join(f"{word:07x}" for word in words)
