"""Reads ``tests/golden``: sessions with the rows that the peers' own code gives."""

import gzip
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import trajkit as tk

FOLDER = Path(__file__).parent / "golden"

# how the segments rule names the end of a segment, in our words
SEGMENT_KINDS = {
    "wipe": "history_replaced",
    "subagent": "subagent",
    "final": "final",
}


@cache
def golden(name):
    """Every session of a file, as dicts. Shared between tests: do not write to them."""
    with gzip.open(FOLDER / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def delivered(name):
    """Those for which the peer gave rows."""
    return [one for one in golden(name) if "error" not in one["expected"]]


def options(session):
    """What `trajkit.linearize` takes of a session's knobs. A limit of 0 is none."""
    knobs = session["knobs"]
    limit = knobs.get("max_sample_tokens") or knobs.get("max_seq_len") or None
    return {"max_row_tokens": limit, "reward": knobs.get("reward", 1.0)}


def as_recorded(session):
    return session["turns"]


class System(NamedTuple):
    """A peer: its golden sessions, and what they are in trajkit."""

    sessions: Callable[[], list]
    policy: Callable[[dict], tk.Policy]
    # further columns of a session's rows, of one row of the peer's
    columns: Callable[[dict, dict], dict] = lambda session, row: {}
    turns: Callable[[dict], list] = as_recorded
    # whether rows without a response, cut inside or right after the prompt, are left out
    leaves_out: bool = False

    def rows(self, session):
        """The peer's rows in our columns.

        Masks and logprobs may be of the response alone; a logprob is 0.0 off the mask and
        where the engine gave none.
        """
        found = []
        for row in session["expected"]["rows"]:
            n = len(row["tokens"]) - len(row["loss_mask"])
            mask = [bool(bit) for bit in [*[0] * n, *row["loss_mask"]]]
            logprobs = [0.0] * n + (row["logprobs"] or [0.0] * len(row["loss_mask"]))
            if self.leaves_out and row["response_length"] <= 0:
                continue
            line = {"input_ids": row["tokens"], "loss_mask": mask}
            line["logprobs"] = [
                p if bit else 0.0 for p, bit in zip(logprobs, mask, strict=True)
            ]
            if n:  # the peer says which tokens are the response
                line["prompt_length"] = n
            found.append(line | self.columns(session, row))
        return found


def interleave_sessions():
    """Those without an error: of the rollout (it clears the masks) or of the peer."""
    return [one for one in delivered("interleave") if one["knobs"]["error"] is None]


def _skyrl_policy(session):
    """Under ``as_is`` the peer wants logprobs of all turns or of none."""
    given = [bool(turn["output_logprobs"]) for turn in session["turns"]]
    as_is = session["knobs"]["missing_logprobs"] == "as_is"
    missing = "raise" if as_is and any(given) else "keep"
    return tk.policy("skyrl", missing_logprobs=missing)


def _polar_policy(session):
    knobs = session["knobs"]
    return tk.policy(
        "polar",
        parent_by="prompts" if knobs["builder"] == "prefix_merging" else "none",
        end_of_turn_token_id=knobs["end_of_turn_token_id"],
    )


def _nemo_policy(session):
    merging = session["knobs"]["builder"] == "prefix_merging"
    return tk.policy("nemo", parent_by="prefix" if merging else "none")


def _nemo_turns(session):
    """The turns with the names and times that the peer was given."""
    knobs = session["knobs"]
    return [
        {**turn, "request_id": name, "started_at": time}
        for turn, name, time in zip(
            session["turns"], knobs["call_ids"], knobs["created_at"], strict=True
        )
    ]


def _miles_turns(session):
    """The peer takes a reply that is not there for an empty one."""
    empty = {"role": "assistant", "content": ""}
    return [
        {**turn, "response_message": turn["response_message"] or empty}
        for turn in session["turns"]
    ]


def _miles_columns(session, row):
    limit = session["knobs"]["max_seq_len"]
    own = {"reward": row["reward"]}
    # a row that is cut to a call lists fewer turns than the peer does
    return own if limit else own | {"turns": row["turns"]}


SYSTEMS = {
    "slime": System(
        lambda: [*golden("slime"), *golden("slime-order")],
        lambda session: tk.policy(
            "slime", fork_threshold=session["knobs"]["fork_threshold"]
        ),
        lambda session, row: (
            {name: row[name] for name in ("truncated", "use_tool", "ill_formed")}
            | {"reward": session["knobs"]["reward"]}
        ),
        leaves_out=True,
    ),
    "strict": System(interleave_sessions, lambda session: tk.policy("strict")),
    "trl": System(
        lambda: delivered("trl"),
        lambda session: tk.policy(
            "trl", fork_threshold=session["knobs"]["fork_threshold_tokens"]
        ),
    ),
    "skyrl": System(
        lambda: delivered("skyrl"),
        _skyrl_policy,
        lambda session, row: {"finish_reason": row["stop_reason"]},
    ),
    "segments": System(
        lambda: [
            *golden("segments"),
            *golden("segments_sub"),
            *golden("segments_directed"),
        ],
        lambda session: tk.policy(
            "segments", dispatch_tools=tuple(session["knobs"]["dispatch_tools"])
        ),
        lambda session, row: (
            {
                "segment_kind": SEGMENT_KINDS[row["segment_kind"]],
                "row_index": row["segment_idx"],
            }
            | {name: row[name] for name in ("finish_reason", "reward")}
        ),
        lambda session: with_call_ids(session["turns"]),
    ),
    "polar": System(
        lambda: delivered("polar"),
        _polar_policy,
        lambda session, row: {name: row[name] for name in ("finish_reason", "turns")},
    ),
    "nemo": System(
        lambda: delivered("nemo"),
        _nemo_policy,
        lambda session, row: {
            "turns": [session["knobs"]["call_ids"].index(one) for one in row["calls"]]
        },
        _nemo_turns,
    ),
    "miles": System(
        lambda: golden("miles_v2"),
        lambda session: tk.policy(
            "miles",
            fork_threshold=session["knobs"]["max_trim_tokens"] + 1,
            message_equality=session["knobs"]["matcher"],
        ),
        _miles_columns,
        _miles_turns,
    ),
}


def with_call_ids(turns):
    """The turns of a segments session, their messages with the ids of tool calls.

    The peer was fed those ids beside the messages: call k of a message with content c
    is ``toolu_c-k``, and the j-th tool message after it answers call j, or the last.
    """
    told = []
    for turn in turns:
        ids, shown, answered, n = [], [], [], 0
        for message in turn["prompt_messages"]:
            if message["role"] == "assistant":
                message = calls_named(message)
                ids = [call["id"] for call in message.get("tool_calls") or []]
                n = 0
            elif message["role"] == "tool" and ids:
                message = {**message, "tool_call_id": ids[min(n, len(ids) - 1)]}
                answered.append(message["tool_call_id"])
                n += 1
            shown.append(message)
        assert answered == turn["answered_ids"]
        beside = ("dispatch_ids", "answered_ids")
        told.append({k: v for k, v in turn.items() if k not in beside})
        reply = turn["response_message"]
        told[-1]["prompt_messages"] = shown
        told[-1]["response_message"] = reply and calls_named(reply)
    return told


def calls_named(message):
    calls = message.get("tool_calls")
    if not calls:
        return message
    name = message["content"].strip()
    return {
        **message,
        "tool_calls": [
            {**call, "id": f"toolu_{name}-{k}"} for k, call in enumerate(calls)
        ],
    }
