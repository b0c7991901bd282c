"""The slow, obvious twin of every choice of a policy at once, claim by claim.

Turns are as in `tests.reference`, links as the rows of ``schema.LINKS`` without
session_id; ``policy`` is any object with the choices of `trajkit.Policy`.
"""

from dataclasses import dataclass
from itertools import groupby, pairwise

from tests.reference import flags, held, is_trainable, lcp, logprobs_of, turn_indices

LOSSES = (
    *("absorbed", "rewritten", "cut", "untrainable", "unrouted"),
    *("aborted", "masked", "no_logprob"),
)


@dataclass
class Run:
    """Turns that make a row. ``kept``: how much of each output the row keeps."""

    turns: list[int]
    kept: dict[int, int]


def chains_of(turns, links):
    """The turns from a root to each leaf, leaves in the order of the links."""
    names = turn_indices(turns)
    parents = [
        None if one["parent"] is None else names.index(one["parent"]) for one in links
    ]
    placed = [i for i, one in enumerate(links) if one["order"] is not None]
    inner = {parents[i] for i in placed}
    for leaf in sorted(placed, key=lambda i: links[i]["order"]):
        if leaf in inner:
            continue
        chain = []
        while leaf is not None:
            chain.insert(0, leaf)
            leaf = parents[leaf]
        yield chain


def runs_of(turns, chain, policy):
    """A chain cut where drift opens a new row."""
    runs = []
    for before, i in pairwise([None, *chain]):
        whole = len(turns[i]["output_ids"])
        if before is not None:
            shared = lcp(held(turns[before]), turns[i]["prompt_ids"])
            size = len(held(turns[before])) - shared
            start = len(turns[before]["prompt_ids"])
            small = {
                "fork": False,
                "absorb_short_reply": whole < policy.fork_threshold,
                "absorb_short_drift": size < policy.fork_threshold,
            }[policy.on_drift]
            if size == 0 or (shared >= start and small):
                if size:
                    head = shared - start if policy.keep_prefix else 0
                    runs[-1].kept[before] = head
                runs[-1].turns.append(i)
                runs[-1].kept[i] = whole
                continue
        runs.append(Run([i], {i: whole}))
    return runs


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
    """What a row says of each token of an output; None: nothing."""
    for k in range(len(turn["output_ids"])):
        may = why_not(turn, k, policy) is None
        if k >= run.kept[i]:
            yield "absorbed" if owned and may else None
        elif len(turn["prompt_ids"]) + k >= limit:
            yield "cut" if owned and may else None
        elif not may:
            yield "untrainable"
        else:
            yield "trained" if owned else "duplicate"


def spans_of(turns, run, owned, policy, limit):
    """The pieces of a row."""
    names = turn_indices(turns)
    spans = []
    for i in run.turns:
        start = len(turns[i]["prompt_ids"])
        said = enumerate(labels(turns[i], run, i, i in owned, policy, limit))
        for kind, group in groupby(said, key=lambda one: one[1]):
            if kind is None:
                continue
            at = [k for k, _ in group]
            place, length = start + at[0], len(at)
            if kind == "absorbed":
                place, length = min(start + run.kept[i], limit), 0
            elif kind == "cut":
                place, length = limit, 0
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


def would_train(turns, run, policy, limit):
    """Tokens that a row would train if it trained all that it holds."""
    return sum(
        span["stop"] - span["start"]
        for span in spans_of(turns, run, set(run.turns), policy, limit)
        if span["kind"] == "trained"
    )


def owned_runs(turns, links, policy, limit):
    """Every row that the policy looks at, with the turns whose claims it has.

    Also the chain that the row is taken from.
    """
    chains = list(chains_of(turns, links))
    if policy.train_in == "first":
        claimed = set()
        for chain in chains:
            new = set(chain) - claimed
            claimed |= new
            for run in runs_of(turns, chain, policy):
                yield run, new & set(run.turns), chain
        return
    seen = {}
    for chain in chains:
        for run in runs_of(turns, chain, policy):
            seen.setdefault(tuple(run.turns), (run, chain))
    rows = list(seen.values())

    def rank(run):
        if policy.train_in == "longest":
            return min(len(held(turns[run.turns[-1]])), limit)
        return would_train(turns, run, policy, limit)

    owner = {}
    for i in range(len(turns)):
        holding = [run for run, _ in rows if i in run.turns]
        # max takes the first of equals
        best = max(holding, key=lambda run: (run.kept[i], rank(run)), default=None)
        owner[i] = None if best is None else tuple(best.turns)
    for run, chain in rows:
        yield run, {i for i in run.turns if owner[i] == tuple(run.turns)}, chain


def linearize(turns, links, policy, max_row_tokens=None):
    """The rows of one session and its line of the report (see `tests.reference`)."""
    limit = float("inf") if max_row_tokens is None else max_row_tokens
    rows, n_untrained, n_cut = [], 0, 0
    lost = dict.fromkeys(LOSSES, 0)
    for run, owned, chain in owned_runs(turns, links, policy, limit):
        spans = spans_of(turns, run, owned, policy, limit)
        n = {
            kind: sum(
                span["output_stop"] - span["output_start"]
                for span in spans
                if span["kind"] == kind
            )
            for kind in ("trained", "absorbed", "cut")
        }
        lost["absorbed"] += n["absorbed"]
        if not policy.keep_untrained and n["trained"] + n["cut"] == 0:
            n_untrained += 1
            continue
        opening = len(turns[run.turns[0]]["prompt_ids"])
        tokens = held(turns[run.turns[-1]])
        lost["cut"] += n["cut"]
        if limit < len(tokens) and limit <= opening:
            n_cut += 1
            lost["cut"] += n["trained"]
            continue
        tokens = tokens[: min(len(tokens), limit)]
        mask, logprobs = [False] * len(tokens), [None] * len(tokens)
        for span in spans:
            if span["kind"] == "trained":
                turn = turns[turn_indices(turns).index(span["turn_index"])]
                here = slice(span["start"], span["stop"])
                mask[here] = [True] * (span["stop"] - span["start"])
                out = slice(span["output_start"], span["output_stop"])
                logprobs[here] = logprobs_of(turn)[out]
        rows.append(
            {
                "input_ids": tokens,
                "prompt_length": opening,
                "loss_mask": mask,
                "logprobs": logprobs,
                "spans": spans,
                "turns": [turn_indices(turns)[i] for i in run.turns],
                "finish_reason": turns[run.turns[-1]].get("finish_reason"),
                **flags(turns, chain if policy.flag_scope == "chain" else run.turns),
            }
        )
    for k, row in enumerate(rows):
        shared = [lcp(one["input_ids"], row["input_ids"]) for one in rows[:k]]
        row["row_index"] = k
        row["shared_length"] = max(shared, default=0)
        row["parent_row"] = (
            shared.index(row["shared_length"]) if row["shared_length"] else None
        )
    for turn, one in zip(turns, links, strict=True):
        for k in range(len(turn["output_ids"])):
            reason = why_not(turn, k, policy)
            if reason is None and one["order"] is None:
                reason = "unrouted" if one["rewritten_by"] is None else "rewritten"
            if reason is not None:
                lost[reason] += 1
    report = {
        "rows": len(rows),
        "rows_untrained": n_untrained,
        "rows_cut": n_cut,
        "tokens_sampled": sum(len(turn["output_ids"]) for turn in turns),
        "tokens_trained": sum(sum(row["loss_mask"]) for row in rows),
        **{f"lost_{reason}": n for reason, n in lost.items()},
    }
    return rows, report
