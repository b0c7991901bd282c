"""Rules that look at token ids alone, in plain Python over lists, as trainers write them.

Each function takes the calls of one session in order and gives its rows: ``tokens``,
``loss_mask``, ``logprobs`` (0.0 off the mask and where the engine gave none), all as long
as each other, and ``prompt_length``. Independent restatements of the rules that import
nothing of trajkit; ``tests/golden`` holds what the systems' own code gives.
"""

from typing import Any

from tests.oracles.peers_slime import common_prefix

Turn = dict[str, Any]
Row = dict[str, Any]


def _opened(turn: Turn) -> Row:
    """A row of one call."""
    prompt, output = turn["prompt_ids"], turn["output_ids"]
    return {
        "tokens": prompt + output,
        "loss_mask": [0] * len(prompt) + [1] * len(output),
        "logprobs": [0.0] * len(prompt) + _logprobs(turn),
        "prompt_length": len(prompt),
    }


def _extended(row: Row, turn: Turn) -> None:
    """Append what the call's prompt has beyond the row, and its output."""
    context = turn["prompt_ids"][len(row["tokens"]) :]
    output = turn["output_ids"]
    row["tokens"] += context
    row["tokens"] += output
    row["loss_mask"] += [0] * len(context) + [1] * len(output)
    row["logprobs"] += [0.0] * len(context) + _logprobs(turn)


def _logprobs(turn: Turn) -> list[float]:
    return turn["output_logprobs"] or [0.0] * len(turn["output_ids"])


def per_call(turns: list[Turn]) -> list[Row]:
    """Every call is a row."""
    return [_opened(turn) for turn in turns]


def strict(turns: list[Turn]) -> list[Row]:
    """A call goes on with the longest row that its prompt starts with (prime-rl 2.1)."""
    rows: list[Row] = []
    for turn in turns:
        prompt = turn["prompt_ids"]
        best = None
        for row in rows:
            held = row["tokens"]
            if best is not None and len(held) <= len(best["tokens"]):
                continue
            if prompt[: len(held)] == held:
                best = row
        if best is None:
            rows.append(_opened(turn))
        else:
            _extended(best, turn)
    return rows


def skyrl(turns: list[Turn]) -> list[Row]:
    """A call goes on with the row of the call before it, or opens one (SkyRL 6)."""
    rows: list[Row] = []
    for turn in turns:
        if rows:
            held = rows[-1]["tokens"]
            if turn["prompt_ids"][: len(held)] == held:
                _extended(rows[-1], turn)
                continue
        rows.append(_opened(turn))
    return rows


def trl(turns: list[Turn], fork_threshold: int = 1024) -> list[Row]:
    """As skyrl, but the row takes small drift in its last reply as context (TRL 4)."""
    rows: list[Row] = []
    reply_start = 0
    for turn in turns:
        prompt = turn["prompt_ids"]
        opens = not rows
        if rows:
            row = rows[-1]
            shared = common_prefix(row["tokens"], prompt)
            drift = len(row["tokens"]) - shared
            if drift == 0:
                _extended(row, turn)
            elif shared >= reply_start and drift < fork_threshold:
                for name in ("tokens", "loss_mask", "logprobs"):
                    del row[name][shared:]
                _extended(row, turn)
            else:
                opens = True
        if opens:
            rows.append(_opened(turn))
        reply_start = len(prompt)
    return [row for row in rows if any(row["loss_mask"])]
