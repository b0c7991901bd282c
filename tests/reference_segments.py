"""slime's segments as a slow, obvious twin: chains, then rows token by token.

Turns are dicts as in `tests.reference`. Messages carry the ids of tool calls:
``tool_calls[i].id`` and ``tool_call_id``, or blocks ``tool_use`` and ``tool_result``.
"""

import json
from dataclasses import dataclass, field

from tests.reference import (
    flags,
    held,
    is_trainable,
    lcp,
    logprobs_of,
    turn_indices,
)


@dataclass
class Chain:
    """One agent's turns since its history was last replaced."""

    turns: list[int] = field(default_factory=list)


@dataclass
class Segments:
    """What became of one session: frozen chains in order, and each turn's route."""

    frozen: list[tuple[str, list[int]]] = field(default_factory=list)
    # None: passed over
    routes: list[str | None] = field(default_factory=list)

    def freeze(self, kind, chain):
        if chain is not None and chain.turns:
            self.frozen.append((kind, chain.turns))


def identity(value):
    """A message's text with sorted keys, without any cache_control."""
    if isinstance(value, list):
        return [identity(one) for one in value]
    if isinstance(value, dict):
        return {k: identity(v) for k, v in value.items() if k != "cache_control"}
    return value


def same(a, b):
    texts = [json.dumps(identity(m), sort_keys=True) for m in (a, b)]
    return texts[0] == texts[1]


def continues(turns, chain, i):
    """Whether turn i goes on where the chain stands, by messages or else by tokens."""
    last = turns[chain.turns[-1]]
    seen, shown = last.get("prompt_messages"), turns[i].get("prompt_messages")
    if seen is None or shown is None:
        path, prompt = held(last), turns[i]["prompt_ids"]
        if prompt[: len(path)] == path:
            return True
        opening = last["prompt_ids"]
        longer = 0 < len(opening) < len(prompt)
        return longer and prompt[: len(opening)] == opening
    return len(shown) >= len(seen) and all(map(same, seen, shown))


def answers(message):
    """Ids of the tool calls that a message answers."""
    found = [message.get("tool_call_id")]
    content = message.get("content")
    for block in content if isinstance(content, list) else []:
        if block.get("type") == "tool_result":
            found.append(block.get("tool_use_id"))
    return [call for call in found if call is not None]


def dispatched(message, tools):
    """Ids of the calls to the tools, in order; None stands for a call without id."""
    message = message or {}
    found = [
        call.get("id")
        for call in message.get("tool_calls") or []
        if call.get("function", {}).get("name") in tools
    ]
    content = message.get("content")
    for block in content if isinstance(content, list) else []:
        if block.get("type") == "tool_use" and block["name"] in tools:
            found.append(block.get("id"))
    return found


def segments_of(turns, tools=("Task", "Agent")):
    """Who speaks, and which runs of turns are frozen when."""
    result = Segments()
    main = Chain()
    sub = None
    watched = None
    for i, turn in enumerate(turns):
        shown = turn.get("prompt_messages")
        if shown == []:
            result.routes.append(None)
            continue
        if sub is not None and any(
            watched == call for message in shown or [] for call in answers(message)
        ):
            result.freeze("subagent", sub)
            sub = watched = None
        goes_to_main = sub is None or (main.turns and continues(turns, main, i))
        chain = main if goes_to_main else sub
        if not chain.turns:
            said = "new"
        elif continues(turns, chain, i):
            said = "append"
        else:
            said = "wipe"
            result.freeze("history_replaced", chain)
            chain.turns = []
        chain.turns.append(i)
        result.routes.append(f"{'main' if goes_to_main else 'sub'}/{said}")
        sent_out = dispatched(turn.get("response_message"), tools)
        if goes_to_main and sent_out:
            watched = sent_out[-1]
            sub = sub or Chain()
    result.freeze("subagent", sub)
    result.freeze("final", main)
    return result


@dataclass
class Output:
    """What a row under construction knows of one turn's output."""

    turn: int
    start: int
    # where it was cut away at the earliest; None: nowhere
    cut_at: int | None = None


@dataclass
class Row:
    """The merge of one segment, up to some turn of it."""

    tokens: list[int]
    prompt_length: int
    turns: list[int]
    outputs: list[Output]


def merged(turns, segment):
    """The row of a segment, and the outputs that it lost by beginning anew."""
    row = None
    restarted = []
    for i in segment:
        prompt, output = turns[i]["prompt_ids"], turns[i]["output_ids"]
        if (
            row is None
            or prompt[: row.prompt_length] != row.tokens[: row.prompt_length]
        ):
            if row is not None:
                restarted += row.outputs
            row = Row([], len(prompt), [], [])
        n = lcp(row.tokens, prompt)
        for one in row.outputs:
            end = one.start + len(turns[one.turn]["output_ids"])
            if n < end and (one.cut_at is None or n < one.cut_at):
                one.cut_at = n
        row.tokens = [*prompt, *output]
        row.turns.append(i)
        row.outputs.append(Output(i, len(prompt)))
    return row, restarted


def linearize(
    turns,
    tools=("Task", "Agent"),
    max_rows=None,
    mode="uniform",
    max_row_tokens=None,
    reward=1.0,
):
    """Rows of one session and its line of the report."""
    routed = segments_of(turns, tools)
    limit = float("inf") if max_row_tokens is None else max_row_tokens
    lost = dict.fromkeys(
        (
            *("absorbed", "rewritten", "cut", "untrainable"),
            *("unrouted", "restarted", "over_max_rows"),
        ),
        0,
    )
    counts = {"rows_untrained": 0, "rows_cut": 0, "rows_over_max_rows": 0}
    for i, turn in enumerate(turns):
        if not is_trainable(turn):
            lost["untrainable"] += len(turn["output_ids"])
        elif routed.routes[i] is None:
            lost["unrouted"] += len(turn["output_ids"])
    rows = []
    for kind, segment in routed.frozen:
        row, restarted = merged(turns, segment)
        for one in [*row.outputs, *restarted]:
            if is_trainable(turns[one.turn]):
                if one.cut_at is not None:
                    lost["absorbed"] += len(turns[one.turn]["output_ids"])
                elif one not in row.outputs:
                    lost["restarted"] += len(turns[one.turn]["output_ids"])
        standing = sum(
            len(turns[one.turn]["output_ids"])
            for one in row.outputs
            if one.cut_at is None and is_trainable(turns[one.turn])
        )
        if len(row.tokens) == row.prompt_length:
            counts["rows_untrained"] += 1
        elif limit < len(row.tokens) and limit <= row.prompt_length:
            counts["rows_cut"] += 1
            lost["cut"] += standing
        else:
            made = finished(turns, row, limit)
            lost["cut"] += standing - sum(made["loss_mask"])
            rows.append({**made, "segment_kind": kind})
    if max_rows is not None and len(rows) > max_rows:
        left_out = rows[max_rows - 1 : -1]
        rows = [*rows[: max_rows - 1], rows[-1]]
        counts["rows_over_max_rows"] = len(left_out)
        lost["over_max_rows"] = sum(sum(row["loss_mask"]) for row in left_out)
    for k, row in enumerate(rows):
        row["row_index"] = k
        row["reward"] = {
            "copy": reward,
            "uniform": reward / len(rows),
            "final_only": reward if row["segment_kind"] == "final" else 0.0,
        }[mode]
        shared = [lcp(before["input_ids"], row["input_ids"]) for before in rows[:k]]
        row["shared_length"] = max(shared, default=0)
        row["parent_row"] = (
            shared.index(row["shared_length"]) if row["shared_length"] else None
        )
    return rows, {
        "turns": len(turns),
        "rows": len(rows),
        **counts,
        "tokens_sampled": sum(len(turn["output_ids"]) for turn in turns),
        "tokens_trained": sum(sum(row["loss_mask"]) for row in rows),
        "tokens_duplicated": 0,
        "tokens_forward": sum(len(row["input_ids"]) for row in rows),
        **{f"lost_{reason}": n for reason, n in lost.items()},
    }


def finished(turns, row, limit):
    """The columns of a merged row, cut to its first ``limit`` tokens."""
    tokens = row.tokens[: min(len(row.tokens), limit)]
    mask = [False] * len(tokens)
    logprobs = [None] * len(tokens)
    names = turn_indices(turns)
    spans = []

    def piece(one, start, length, output_start, output_stop, kind):
        spans.append(
            {
                "start": start,
                "stop": start + length,
                "turn_index": names[one.turn],
                "output_start": output_start,
                "output_stop": output_stop,
                "kind": kind,
            }
        )

    for one in row.outputs:
        n = len(turns[one.turn]["output_ids"])
        may = is_trainable(turns[one.turn])
        if n == 0:
            continue
        if one.cut_at is not None:
            if may:
                at = min(one.start, one.cut_at, limit)
                piece(one, at, 0, 0, n, "absorbed")
            continue
        kept = max(0, min(n, limit - one.start))
        if kept:
            piece(one, one.start, kept, 0, kept, "trained" if may else "untrainable")
        if kept < n and may:
            piece(one, limit, 0, kept, n, "cut")
        if may:
            given = logprobs_of(turns[one.turn])
            for k in range(kept):
                mask[one.start + k] = True
                logprobs[one.start + k] = given[k]
    return {
        "input_ids": tokens,
        "prompt_length": row.prompt_length,
        "loss_mask": mask,
        "logprobs": logprobs,
        "spans": spans,
        "turns": [names[i] for i in row.turns],
        "finish_reason": turns[row.turns[-1]].get("finish_reason"),
        **flags(turns, row.turns),
    }
