"""Label the turns that open a branch: the ``branches`` table."""

from collections.abc import Iterator
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import pyarrow as pa

from trajkit import _core
from trajkit.analysis.drift import classify_drift, codes, turn_lines
from trajkit.analysis.tokenizer import Tokenizer
from trajkit.analysis.words import count
from trajkit.rows.linearize import read_linked
from trajkit.schema import BRANCHES, LABELS, LINK_REASONS
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import TableLike
from trajkit.tables.columns import tuples, with_column
from trajkit.tables.ragged import Records
from trajkit.turns.attribution import SessionCalls
from trajkit.turns.sessions import Sessions

OPENING_TOKENS = 32
"""Leading tokens that the prompts of one agent have in common."""

SENT_AGAIN = ("retry", "rollback")
"""Labels of prompts that end on an earlier path."""

_TURN = ("session_id", "turn_index")


def label_branches(turns: TableLike, links: TableLike) -> pa.Table:
    """Label the turns that open a branch, with the evidence for each label.

    docs/drift.md defines the labels.

    Parameters
    ----------
    turns, links : table
        As for `trajkit.classify_drift`, and so are the errors. The column ``agent_id`` of
        turns is optional.

    Returns
    -------
    Table
        `trajkit.schema.BRANCHES`, one row per labelled turn, in the order of ``turns``.

    References
    ----------
    A retry has identical prompt ids, as in miles'
    https://github.com/radixark/miles/tree/31f1ca9/miles/rollout/session/v2/picker_hub
    """

    calls, _, linked = read_linked(turns, links)
    found = list(_branches(calls, linked))
    call, label, other, evidence = ([line[k] for line in found] for k in range(4))
    labels = codes([*map(LABELS.index, label)], LABELS)
    others = calls.turn_index[other]
    return turn_lines(BRANCHES, calls, call, labels, others, evidence)


def named_drift(
    turns: pa.Table, links: pa.Table, tokenizer: Tokenizer | None = None
) -> pa.Table:
    """`trajkit.classify_drift`, with the label of a prompt that is sent again as its cause.

    Such a prompt, a retry or a rollback, ends on the path of its parent: it is no drift.
    """
    drift = plain = classify_drift(turns, links)
    if tokenizer is not None:
        drift = classify_drift(turns, links, tokenizer=tokenizer)
    labels = {
        (name, turn): label
        for name, turn, label in tuples(label_branches(turns, links), *_TURN, "label")
        if label in SENT_AGAIN
    }
    causes = drift["cause"].to_pylist()
    for k, (name, turn, cause) in enumerate(tuples(plain, *_TURN, "cause")):
        if cause == "truncated":
            causes[k] = labels.get((name, turn), causes[k])
    return with_column(drift, "cause", pa.array(causes).dictionary_encode())


def drifted(turns: pa.Table, links: pa.Table) -> pa.Table:
    """The lines of `named_drift` of prompts that drift."""
    drift = named_drift(turns, links)
    clean = pa.array(["clean", *SENT_AGAIN])
    return drift.filter(pc.invert(pc.is_in(drift["cause"].cast(pa.string()), clean)))


def _branches(calls: Sessions, links: Records) -> Iterator[tuple[Any, ...]]:
    """The labelled calls: call, label, the other call, evidence."""
    turn, n_prompt = calls.turn_index, calls.calls["prompt_len"]
    rewrite, reasons = LINK_REASONS.index("rewrite"), links["link_reason"]
    # by call that replaces a reply: the call whose reply it was
    replaced = {by: call for call, by in enumerate(links["rewritten_by"].tolist())}
    # the last call so far of an agent and with a prompt, and the first one of a parent
    latest, asked = dict[Any, int](), dict[Any, int]()
    children = dict[int, int]()
    agents = zip(calls.session.tolist(), _agents(calls), strict=True)
    for call, (agent, parent) in enumerate(
        zip(agents, links["parent"].tolist(), strict=True)
    ):
        ids, other = calls.prompt(call), latest.get(agent, call - 1)
        prompt, label, evidence = (agent[0], blake2b(ids.tobytes()).digest()), "", ""
        shared = int(calls.forest.shared[call])
        if call == calls.offsets[agent[0]]:
            pass
        elif agent[1] and agent not in latest:
            label, evidence = "sub_agent", f"no earlier turn has its {agent[1][0]}"
        elif call in replaced and reasons[call] == rewrite:
            label, other = "rewrite", replaced[call]
            evidence = f"links: it replaces the reply of turn {turn[other]}"
        elif prompt in asked:
            label, other = "retry", asked[prompt]
            evidence = f"the prompt of turn {turn[other]} again"
            if other in children:
                label = "rollback"
                evidence += f", which turn {turn[children[other]]} had continued"
        elif parent < 0 and not agent[1] and shared < min(OPENING_TOKENS, len(ids)):
            label = "sub_agent"
            evidence = f"it shares {count(shared)} with an earlier turn"
        elif parent < 0 or parent in children:
            label = "compaction" if parent < 0 else "rollback"
            label = "rewrite" if len(ids) >= n_prompt[other] else label
            n = _core.lcp(calls.path(other), ids)
            evidence = f"it departs from turn {turn[other]} after {count(n)}"
        if label:
            yield call, label, other, evidence
        latest[agent] = asked[prompt] = call
        if parent >= 0:
            children.setdefault(parent, call)


def _agents(calls: Sessions) -> Iterator[tuple[str, Any] | None]:
    """What is known of each call's agent: its id, or else the first message."""
    ids = [None] * calls.n_calls
    if "agent_id" in calls.table.column_names:
        ids = calls.table["agent_id"].to_pylist()
    for s, (start, stop) in enumerate(pairwise(calls.offsets.tolist())):
        own = SessionCalls(calls.part(s, s + 1))
        for k, agent_id in enumerate(ids[start:stop]):
            messages = own.messages(k)
            if agent_id is not None:
                yield f"agent_id {agent_id!r}", agent_id
            else:
                yield None if messages is None else ("first message", messages.key(0))
