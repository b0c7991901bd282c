"""The slow, obvious twin of every choice of a policy at once, token by token.

Turns are as in `tests.oracles.rows`, links as the rows of ``schema.LINKS`` without
session_id; ``policy`` is any object with the choices of `trajkit.Policy`.
"""

from dataclasses import dataclass, field
from itertools import groupby, pairwise
from math import inf

from tests.oracles import splice as reference_splice
from tests.oracles.rows import (
    Link,
    flags,
    held,
    is_trainable,
    lcp,
    logprobs_of,
    row_versions,
    turn_indices,
)
from trajkit.schema import LOSSES

LOST_BY_REASON = {
    **dict.fromkeys(
        (
            *("ambiguous", "superseded", "chain_quarantined"),
            *("unresolved", "unresolved_kept", "unresolved_ambiguous"),
        ),
        "quarantined",
    ),
    **dict.fromkeys(("refused_tokens", "refused_truncated"), "refused"),
    "retried": "retried",
}
QUARANTINED = ("ambiguous", "superseded", "unresolved", "unresolved_ambiguous")
UNRESOLVED = ("unresolved", "unresolved_ambiguous", "unresolved_kept")


@dataclass
class Run:
    """Turns that make a row."""

    turns: list[int]
    tokens: list[int] = field(default_factory=list)
    # where each output is in the row, and how many of its tokens the row keeps
    places: dict[int, int] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)
    # where drift first departed from the row at or before the end of an output
    cuts: dict[int, int] = field(default_factory=dict)
    # a prompt departed from the one that opened the row
    restarted: bool = False
    # turns after which the row could not be continued
    dropped: list[int] = field(default_factory=list)


def chains_of(turns, links):
    """The turns from a root to each leaf, leaves in the order of the links."""
    places = {name: i for i, name in enumerate(turn_indices(turns))}
    parents = [
        None if one["parent"] is None else places[one["parent"]] for one in links
    ]
    placed = [i for i, one in enumerate(links) if one["order"] is not None]
    inner = {parents[i] for i in placed}
    for leaf in sorted(placed, key=lambda i: links[i]["order"]):
        if leaf in inner:
            continue
        chain = []
        while leaf is not None:
            chain.append(leaf)
            leaf = parents[leaf]
        yield chain[::-1]


def runs_of(turns, chain, policy):
    """A chain cut where drift opens a new row."""
    runs = []
    for before, i in pairwise([None, *chain]):
        if before is None:
            runs.append(Run([i]))
            continue
        path, prompt = held(turns[before]), turns[i]["prompt_ids"]
        shared = lcp(path, prompt)
        size, opened = len(path) - shared, len(turns[runs[-1].turns[0]]["prompt_ids"])
        in_reply = shared >= len(turns[before]["prompt_ids"])
        absorbed = {
            "fork": False,
            "absorb_short_reply": in_reply
            and len(turns[i]["output_ids"]) < policy.fork_threshold,
            "absorb_short_drift": in_reply and size < policy.fork_threshold,
            "absorb_any": shared >= opened,
        }[policy.on_drift]
        if size and not absorbed:
            runs[-1].restarted = policy.on_drift == "absorb_any"
            runs.append(Run([i]))
            continue
        for x in runs[-1].turns if size else []:
            if shared < len(held(turns[x])):
                runs[-1].cuts[x] = min(runs[-1].cuts.get(x, shared), shared)
        runs[-1].turns.append(i)
    for run in runs:
        complete(turns, run, policy)
    return runs


def complete(turns, run, policy):
    """The tokens of a run that is no splice, and what it keeps of each output."""
    run.tokens = held(turns[run.turns[-1]])
    for i in run.turns:
        run.places[i] = start = len(turns[i]["prompt_ids"])
        run.kept[i] = len(turns[i]["output_ids"])
        if i in run.cuts:
            run.kept[i] = max(run.cuts[i] - start, 0) if policy.keep_prefix else 0


def cut_to_calls(turns, run, policy, limit):
    """The run, which ends with an earlier turn where the limit is inside a prompt."""
    left, end = list(run.turns), inf
    while (
        len(left) > 1
        and len(turns[left[-1]]["prompt_ids"]) >= limit
        and min(len(held(turns[left[-1]])), end) > limit
    ):
        after = turns[left.pop()]["prompt_ids"]
        shared, end = lcp(held(turns[left[-1]]), after), inf
        # a reply is trimmed before calls are left out
        if policy.keep_prefix and shared >= len(turns[left[-1]]["prompt_ids"]):
            end = shared
    if len(left) == len(run.turns):
        return run
    (cut,) = runs_of(turns, left, policy)
    cut.restarted = run.restarted
    if end < len(cut.tokens):
        cut.tokens = cut.tokens[:end]
        cut.cuts[left[-1]] = end
        cut.kept[left[-1]] = end - cut.places[left[-1]]
    return cut


def spliced_runs(turns, links, policy):
    """One row for each chain, of outputs and what later prompts have between them."""
    names = turn_indices(turns)
    given = [
        Link(
            None if one["parent"] is None else names.index(one["parent"]),
            order=one["order"],
        )
        for one in links
    ]
    for chain in reference_splice.chains_of(turns, given):
        token = policy.end_of_turn_token_id
        if token is None:
            token = reference_splice.end_of_turn(turns, chain)
        tokens, places = reference_splice.spliced(turns, chain, token)
        kept = chain[: len(places)]
        yield Run(
            kept,
            tokens,
            dict(zip(kept, places, strict=True)),
            {i: len(turns[i]["output_ids"]) for i in kept},
            dropped=chain[len(places) :],
        )


def why_not(turn, k, policy):
    """Why the k-th sampled token of a turn may not be trained, or None."""
    if not is_trainable(turn):
        return "untrainable"
    if turn["finish_reason"] == "abort" and not policy.train_aborted:
        return "aborted"
    if turn.get("output_mask") is not None and not turn["output_mask"][k]:
        return "masked"
    if logprobs_of(turn)[k] is None and policy.missing_logprobs == "untrain":
        return "no_logprob"
    return None


def labels(turn, run, i, owned, policy, limit):
    """What a row does with each token of an output, or None."""
    for k in range(len(turn["output_ids"])):
        may = why_not(turn, k, policy) is None
        if i in run.dropped:
            yield "no_splice_point" if may else None
        elif k >= run.kept[i]:
            yield "absorbed" if owned and may else None
        elif run.places[i] + k >= limit:
            yield "cut" if owned and may else None
        elif not may:
            yield "untrainable"
        else:
            yield "trained" if owned else "duplicate"


def spans_of(turns, run, owned, policy, limit):
    """The pieces of a row."""
    names = turn_indices(turns)
    spans = []
    for i in [*run.turns, *run.dropped]:
        labelled = enumerate(labels(turns[i], run, i, i in owned, policy, limit))
        for kind, group in groupby(labelled, key=lambda one: one[1]):
            if kind is None:
                continue
            at = [k for k, _ in group]
            place, length = run.places.get(i, 0) + at[0], len(at)
            if kind == "absorbed":
                place = min(run.places[i] + run.kept[i], run.cuts[i], limit)
                length = 0
            elif kind in ("cut", "no_splice_point"):
                place, length = min(len(run.tokens), limit), 0
            spans.append(
                {
                    "start": place,
                    "stop": place + length,
                    "turn_index": names[i],
                    "output_start": at[0],
                    "output_stop": at[-1] + 1,
                    "kind": kind,
                }
            )
    return spans


def n_of(kind, turns, run, owned, policy, limit):
    """Sampled tokens of a row with this label."""
    return sum(
        label == kind
        for i in [*run.turns, *run.dropped]
        for label in labels(turns[i], run, i, i in owned, policy, limit)
    )


def chosen_chains(turns, links, policy):
    """All chains, or the first one of the root that was created first."""
    chains = list(chains_of(turns, links))
    if policy.row_selection == "all":
        return chains

    def creation(chain):
        start, name = (turns[chain[0]].get(k) for k in ("started_at", "request_id"))
        return start is None, start or 0, name is None, name or "", chain[0]

    scored = [one for one in chains if turns[one[-1]].get("scored")]
    if policy.parent_by == "prefix" and scored:
        return scored
    return [min(chains, key=creation)] if chains else []


def owned_runs(turns, links, policy):
    """Every row that the policy looks at, with the turns that it trains, and its chain.

    None for a row in which nothing is new.
    """
    if policy.on_drift == "splice":
        for run in spliced_runs(turns, links, policy):
            yield run, set(run.turns), [*run.turns, *run.dropped]
        return
    chains = chosen_chains(turns, links, policy)
    by_age = sorted(chains, key=lambda one: one[-1])
    claimed, new = set(), {}
    for chain in by_age if policy.train_in == "earliest" else chains:
        new[chain[-1]] = set(chain) - claimed
        claimed |= set(chain)
    for chain in chains:
        begun = False
        for run in runs_of(turns, chain, policy):
            owned = new[chain[-1]] & set(run.turns)
            begun = begun or bool(owned)
            if begun:
                yield run, owned, chain
            elif not run.restarted:
                yield None


def linearize(turns, links, policy, max_row_tokens=None):
    """The rows of one session and its line of the report (see `tests.oracles.rows`)."""
    limit = inf if max_row_tokens is None else max_row_tokens
    rows = []
    report = {"rows_untrained": 0, "rows_cut": 0, "rows_over_max_rows": 0}
    report |= {"rows_no_splice_point": 0, "turns_no_splice_point": 0}
    lost = dict.fromkeys(LOSSES, 0)
    for one in owned_runs(turns, links, policy):
        if one is None:
            report["rows_untrained"] += 1
            continue
        run, owned, chain = one

        def n(kind, run, owned=owned):
            return n_of(kind, turns, run, owned, policy, limit)

        report["rows_no_splice_point"] += bool(run.dropped)
        report["turns_no_splice_point"] += len(run.dropped)
        lost["no_splice_point"] += n("no_splice_point", run)
        due = n("trained", run) + n("cut", run) + n("absorbed", run)
        if policy.truncate_at == "calls":
            run = cut_to_calls(turns, run, policy, limit)
        trained, absorbed = n("trained", run), n("absorbed", run)
        cut = due - trained - absorbed
        lost["absorbed"] += absorbed
        again = set(run.turns) if policy.train_in == "every" else owned
        opening, length = len(turns[run.turns[0]]["prompt_ids"]), len(run.tokens)
        if run.restarted:
            lost["restarted"] += trained + cut
        elif not policy.keep_empty and length == opening:
            report["rows_untrained"] += 1
            lost["cut"] += cut
        elif not policy.keep_untrained and n("trained", run, again) + cut == 0:
            report["rows_untrained"] += 1
        elif limit < length and limit <= opening:
            report["rows_cut"] += 1
            lost["cut"] += trained + cut
        else:
            lost["cut"] += cut
            rows.append(row_of(turns, links, run, again, chain, policy, limit))
    if policy.max_rows is not None and len(rows) > policy.max_rows:
        left_out = rows[policy.max_rows - 1 : -1]
        rows = [*rows[: policy.max_rows - 1], rows[-1]]
        report["rows_over_max_rows"] = len(left_out)
        lost["over_max_rows"] = sum(sum(row["loss_mask"]) for row in left_out)
    total = sum(sum(row["loss_mask"]) for row in rows)
    for k, row in enumerate(rows):
        shared = [lcp(one["input_ids"], row["input_ids"]) for one in rows[:k]]
        row["row_index"] = k
        row["shared_length"] = max(shared, default=0)
        row["parent_row"] = (
            shared.index(row["shared_length"]) if row["shared_length"] else None
        )
        row["rollout_mask_sum"] = total
        row["row_weight"] = sum(row["loss_mask"]) / total if total else None
    for turn, one in zip(turns, links, strict=True):
        for k in range(len(turn["output_ids"])):
            reason = why_not(turn, k, policy)
            if reason is None and one["order"] is None:
                reason = LOST_BY_REASON.get(one["link_reason"], "unrouted")
                reason = reason if one["rewritten_by"] is None else "rewritten"
            if reason is not None:
                lost[reason] += 1
    if policy.row_selection == "main":
        (chain,) = chosen_chains(turns, links, policy) or [[]]
        lost["not_selected"] = sum(
            why_not(turn, k, policy) is None
            for i, turn in enumerate(turns)
            for k in range(len(turn["output_ids"]))
            if i not in chain and links[i]["order"] is not None
        )
    return rows, {
        "turns": len(turns),
        "rows": len(rows),
        **report,
        **counts_of(rows),
        "tokens_sampled": sum(len(turn["output_ids"]) for turn in turns),
        **{f"lost_{reason}": number for reason, number in lost.items()},
        "turns_by_tokens": sum(is_by_tokens(turn, policy) for turn in turns),
        "roots": sum(
            one["parent"] is None and one["link_reason"] not in ("unrouted", "empty")
            for one in links
        ),
        "turns_quarantined": sum(one["link_reason"] in QUARANTINED for one in links),
        "turns_unresolved": sum(one["link_reason"] in UNRESOLVED for one in links),
    }


def counts_of(rows):
    """Tokens trained, each once, and those that are in further rows."""
    trained, standing = set(), 0
    for span in (span for row in rows for span in row["spans"]):
        if span["kind"] in ("trained", "duplicate"):
            standing += span["stop"] - span["start"]
        if span["kind"] == "trained":
            numbers = range(span["output_start"], span["output_stop"])
            trained |= {(span["turn_index"], k) for k in numbers}
    return {
        "tokens_trained": len(trained),
        "tokens_duplicated": standing - len(trained),
        "tokens_forward": sum(len(row["input_ids"]) for row in rows),
        "tokens_forward_shared": sum(
            len(row["input_ids"]) - row["shared_length"] for row in rows
        ),
    }


def is_by_tokens(turn, policy):
    """Whether a policy that routes by messages routes the turn by tokens."""
    messages = turn.get("prompt_messages")
    if policy.parent_by not in ("messages", "agents", "generations"):
        return False
    by_tokens = policy.parent_by == "messages" and policy.tie_break == "tokens"
    return messages is None or (not messages and by_tokens)


def row_of(turns, links, run, owned, chain, policy, limit):
    """The columns of a row, truncated."""
    names = turn_indices(turns)
    last = run.turns[-1]
    tokens = run.tokens[: min(len(run.tokens), limit)]
    spans = spans_of(turns, run, owned, policy, limit)
    mask, logprobs = [False] * len(tokens), [None] * len(tokens)
    for span in spans:
        if span["kind"] == "trained":
            given = logprobs_of(turns[names.index(span["turn_index"])])
            for k in range(span["stop"] - span["start"]):
                mask[span["start"] + k] = True
                logprobs[span["start"] + k] = given[span["output_start"] + k]
    if policy.missing_logprobs == "null_row" and any(
        trained and given is None for trained, given in zip(mask, logprobs, strict=True)
    ):
        logprobs = [None] * len(tokens)
    return {
        "input_ids": tokens,
        "prompt_length": len(turns[run.turns[0]]["prompt_ids"]),
        "loss_mask": mask,
        "logprobs": logprobs,
        "spans": spans,
        "turns": [names[i] for i in run.turns],
        "last_turn": names[last],
        "weight_versions": row_versions(dict(zip(names, turns, strict=True)), spans),
        "step": turns[last].get("step"),
        "segment_kind": links[last].get("segment_kind"),
        "finish_reason": turns[last].get("finish_reason"),
        **flags(turns, chain if policy.flag_scope == "chain" else run.turns),
    }
