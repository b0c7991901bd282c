"""Polar's prefix merging in plain Python over lists, as its own authors might write it.

Prompts are compared with prompts, replies are kept as they were sampled, and what stands
between two of them is cut out of the later prompt (Polar 2.3). Rows as in
`tests.oracles.peers_chains`.
"""

from itertools import pairwise

from tests.oracles.peers_chains import Row, Turn

ENDED = ("stop", "tool_calls", "stop_sequence")


def linearize(turns: list[Turn], end_of_turn: int | None = None) -> list[Row]:
    """The rows of one session from its calls in order."""
    chains: list[list[Turn]] = []
    for turn in turns:
        prompt = turn["prompt_ids"]
        best = None
        for chain in chains:
            tip = chain[-1]["prompt_ids"]
            if not tip or (best and len(tip) <= len(best[-1]["prompt_ids"])):
                continue
            if prompt[: len(tip)] == tip:
                best = chain
        if best is None:
            chains.append([turn])
        else:
            best.append(turn)
    return [_spliced(chain, end_of_turn) for chain in chains]


def _spliced(chain: list[Turn], end: int | None) -> Row:
    if end is None:
        last_ids = (
            turn["output_ids"][-1]
            for turn in chain
            if turn["finish_reason"] in ENDED and turn["output_ids"]
        )
        end = next(last_ids, None)
    first = chain[0]
    tokens = first["prompt_ids"] + first["output_ids"]
    mask = [0] * len(first["prompt_ids"]) + [1] * len(first["output_ids"])
    logprobs = [0.0] * len(first["prompt_ids"]) + first["output_logprobs"]
    for before, turn in pairwise(chain):
        tail = turn["prompt_ids"][len(before["prompt_ids"]) :]
        if end is None or end not in tail:
            break
        at = tail.index(end)
        between = tail[at + 1 :] if before["output_ids"][-1:] == [end] else tail[at:]
        tokens += between
        tokens += turn["output_ids"]
        mask += [0] * len(between) + [1] * len(turn["output_ids"])
        logprobs += [0.0] * len(between)
        logprobs += turn["output_logprobs"]
    if len(logprobs) != len(tokens):
        # one reply without logprobs takes those of the whole row
        logprobs = [0.0] * len(tokens)
    return {
        "tokens": tokens,
        "loss_mask": mask,
        "logprobs": logprobs,
        "prompt_length": len(first["prompt_ids"]),
    }
