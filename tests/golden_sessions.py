"""Reads ``tests/golden``: sessions with the rows that the peers' own code gives."""

import gzip
import json
from functools import cache
from pathlib import Path

import pytest

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


STEPS = pytest.mark.parametrize(
    "step", [7, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"]
)


def for_each(read, *names):
    """A test of a session that ``read(*names)`` gives: every seventh, slowly all.

    The traceback of a failure names the session. pytest would take longer to list a
    thousand tests than they take.
    """

    def over_all(test):
        @STEPS
        def run(step):
            sessions = read(*names)
            assert sessions
            for session in sessions[::step]:
                try:
                    test(session)
                except BaseException as error:
                    error.add_note(
                        f"golden session {session['profile']}-{session['seed']}"
                    )
                    raise

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return over_all


def slime_sessions():
    return [*golden("slime"), *golden("slime-order")]


def interleave_sessions():
    """Those without an error: of the rollout (it clears the masks) or of the peer."""
    return [
        session
        for session in golden("interleave")
        if session["knobs"]["error"] is None and "error" not in session["expected"]
    ]


def errored_interleave_sessions():
    """Those whose rollout carries an error, and of which the peer gave rows."""
    return [one for one in delivered("interleave") if one["knobs"]["error"] is not None]


def delivered(name):
    """Those for which the peer gave rows."""
    return [one for one in golden(name) if "error" not in one["expected"]]


def cap(session):
    """max_row_tokens of a slime session: slime's 0 is no cap."""
    return session["knobs"]["max_sample_tokens"] or None


def expected_slime(session):
    """The peer's rows in our form, and how many it gives no response token.

    Those rows (slime cuts them inside or right after the prompt) are ones that trajkit
    leaves out. A logprob that slime fills with 0.0 stays 0.0.
    """
    rows = []
    left_out = 0
    for row in session["expected"]["rows"]:
        if row["response_length"] <= 0:
            left_out += 1
            continue
        start = len(row["tokens"]) - row["response_length"]
        rows.append(
            {
                "input_ids": row["tokens"],
                "prompt_length": start,
                "loss_mask": [False] * start + [bool(m) for m in row["loss_mask"]],
                "logprobs": [0.0] * start + row["logprobs"],
                "truncated": row["truncated"],
                "use_tool": row["use_tool"],
                "ill_formed": row["ill_formed"],
            }
        )
    return rows, left_out


def expected_interleave(session):
    """The peer's rows in our form."""
    return [
        {
            "input_ids": row["tokens"],
            "prompt_length": row["prompt_length"],
            "loss_mask": [False] * row["prompt_length"]
            + [bool(m) for m in row["loss_mask"]],
            "logprobs": [0.0] * row["prompt_length"] + row["logprobs"],
        }
        for row in session["expected"]["rows"]
    ]


def comparable(rows, like):
    """The columns that the expected rows have, with 0.0 for an unknown logprob."""
    names = list(like[0]) if like else []
    return [
        {
            name: [0.0 if p is None else p for p in row[name]]
            if name == "logprobs"
            else row[name]
            for name in names
        }
        for row in rows
    ]


def segment_sessions():
    return [
        *golden("segments"),
        *golden("segments_sub"),
        *golden("segments_directed"),
    ]


def with_call_ids(turns):
    """The turns of a segments session, their messages with the ids of tool calls.

    The peer was fed those ids beside the messages: call k of a message with content c
    is ``toolu_c-k``, and the j-th tool message after it answers call j, or the last.
    """
    told = []
    for turn in turns:
        ids = []
        shown = []
        answered = []
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
        reply = turn["response_message"]
        told.append(
            {
                **{
                    name: value
                    for name, value in turn.items()
                    if name not in ("dispatch_ids", "answered_ids")
                },
                "prompt_messages": shown,
                "response_message": None if reply is None else calls_named(reply),
            }
        )
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


def expected_segments(session):
    """The peer's rows in our form."""
    return [
        {
            "input_ids": row["tokens"],
            "prompt_length": row["prompt_length"],
            "loss_mask": [False] * row["prompt_length"]
            + [bool(m) for m in row["loss_mask"]],
            "logprobs": [0.0] * row["prompt_length"] + row["logprobs"],
            "segment_kind": SEGMENT_KINDS[row["segment_kind"]],
            "finish_reason": row["finish_reason"],
            "reward": row["reward"],
            "row_index": row["segment_idx"],
        }
        for row in session["expected"]["rows"]
    ]
