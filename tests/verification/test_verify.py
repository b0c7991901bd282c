"""Each kind of fault is found where it is planted, and nothing in rows that have none."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trajkit as tk
from tests.generated import generated_runs
from tests.strategies import row_limits, runs, thresholds
from tests.tables import by_session, linearized, turns_table
from trajkit.errors import ArgumentError, InvalidTurnsError, PolicyError, SchemaError
from trajkit.policies import PRESETS
from trajkit.schema import (
    CAUSES,
    REGIONS,
    ROWS,
    RULES,
    VIOLATIONS,
)
from trajkit.turns import content_ids

KEEPS_ALL = ("faithful", "strict", "per_call", "skyrl", "graph")
OTHER = 77  # an id that no strategy draws


def turn(prompt, output, **more):
    return {
        "session_id": "rich",
        "prompt_messages": None,
        "response_message": {"role": "assistant", "content": "x"},
        "prompt_ids": prompt,
        "output_ids": output,
        "output_logprobs": [-0.25 - 0.5 * k for k in range(len(output))],
        "finish_reason": "stop",
        "ill_formed": False,
        **more,
    }


# Something of everything, so that every fault has a place: a reply that two later calls
# continue (in faithful's second row it stands as context), logprobs that the engine did
# not give, a turn that may not be trained, and drift.
RICH = [
    turn([1, 2], [3, 4, 9]),
    turn([1, 2, 3, 4, 9, 5], [6, 7, 9], output_logprobs=[-1.0, None, -2.0]),
    turn([1, 2, 3, 4, 9, 8, 8], [6, 2, 2, 9], finish_reason="length"),
    turn([1, 2, 3, 4, 9, 8, 8, 6, 2, 2, 9, 1], [5, 9], trainable=False),
    turn([1, 2, 3, 0, 9, 1], [3, 3, 9], ill_formed=True),
]


CLEAN = [
    {**turn([1, 2], [3, 4, 5]), "session_id": "c"},
    {**turn([1, 2, 3, 4, 5, 6], [8, 9]), "session_id": "c"},
]


def facts_of(turns):
    names = turns["session_id"].unique()
    return pa.table(
        {"session_id": names, "reward": [1.0] * len(names), "group_id": names}
    )


@cache
def rich_run(seed, prefix=""):
    """Turns of three generated sessions with the rich one and a plain one among them."""
    drawn = by_session(generated_runs(3, seed, max_turns=5)).values()
    groups = [*drawn, RICH, CLEAN]
    Random(seed).shuffle(groups)
    return turns_table(
        [
            {**one, "session_id": prefix + one["session_id"]}
            for group in groups
            for one in group
        ]
    )


@cache
def rich_rows(seed, policy, prefix=""):
    turns = rich_run(seed, prefix)
    return tk.linearize(turns, policy, sessions=facts_of(turns)).to_pylist()


rich_seeds = st.integers(0, 63)


Row = dict[str, Any]
Pick = Callable[[list[Any]], Any]


class NoPlaceError(Exception):
    """The rows have no place for a fault."""


def picking(choose):
    """A `Pick`: ``choose(n)`` gives a number below n."""

    def pick(places):
        if not places:
            raise NoPlaceError
        return places[choose(len(places))]

    return pick


@dataclass(frozen=True)
class Planted:
    """What `verify` must say, among other things."""

    rule: str
    row: Row | None = None
    token: int | None = None
    turn_index: int | None = None
    # where there is no row
    session: str | None = None
    # what it may say in its place
    instead: "Planted | None" = None

    def is_among(self, violations):
        if self.instead is not None and self.instead.is_among(violations):
            return True
        due = {"rule": self.rule, "token": self.token}
        if self.row is None:
            due["row_index"] = None
            due["session_id"] = self.session
        else:
            due["session_id"] = self.row["session_id"]
            due["row_index"] = self.row["row_index"]
        if self.turn_index is not None:
            due["turn_index"] = self.turn_index
        return any(due.items() <= one.items() for one in violations)


def spots(rows, wanted):
    """(row, position) of every token for which ``wanted(row, position)`` holds."""
    return [(r, k) for r in rows for k in range(len(r["input_ids"])) if wanted(r, k)]


def is_rich(row):
    return row["session_id"].endswith("rich")


def spans(rows, *kinds):
    return [(r, s) for r in rows for s in r["spans"] if s["kind"] in kinds]


def is_trained(row, k):
    return row["loss_mask"][k]


def is_context(row, k):
    return not row["loss_mask"][k]


def train(row, span, value):
    """Set the mask and the logprobs of a span."""
    for k in range(span["start"], span["stop"]):
        row["loss_mask"][k] = value
        row["logprobs"][k] = None


def not_trained(row, token, turn_index):
    return Planted("not_trained", None, token, turn_index, row["session_id"])


def siblings(rows):
    """The rows of each session that has more than one."""
    names = {row["session_id"]: None for row in rows}
    groups = [[r for r in rows if r["session_id"] == name] for name in names]
    return [group for group in groups if len(group) > 1]


# Each fault changes rows in place, at a place that ``pick`` chooses among all there are.


def mask_cleared(rows, pick):
    row, k = pick(spots(rows, is_trained))
    row["loss_mask"][k] = False
    return Planted("mask", row, k)


def mask_set(rows, pick):
    row, k = pick(spots(rows, is_context))
    row["loss_mask"][k] = True
    return Planted("mask", row, k)


def mask_shifted(rows, pick):
    """Off by one, as where the first token of a label row is dropped."""
    row = pick([r for r in rows if any(r["loss_mask"])])
    first = row["loss_mask"].index(True)
    row["loss_mask"] = [False, *row["loss_mask"][:-1]]
    return Planted("mask", row, first)


def mask_short(rows, pick):
    row = pick([r for r in rows if r["input_ids"]])
    row["loss_mask"].pop()
    return Planted("length", row, len(row["loss_mask"]))


def mask_null(rows, pick):
    row, k = pick(spots(rows, lambda r, k: True))
    row["loss_mask"][k] = None
    return Planted("null", row, k)


def id_null(rows, pick):
    row, k = pick(spots(rows, lambda r, k: True))
    row["input_ids"][k] = None
    return Planted("null", row, k)


def logprob_shifted(rows, pick):
    row, k = pick(spots(rows, lambda r, k: r["logprobs"][k] is not None))
    row["logprobs"][k] -= 0.0625
    return Planted("logprob", row, k)


def logprob_lost(rows, pick):
    row, k = pick(spots(rows, lambda r, k: r["logprobs"][k] is not None))
    row["logprobs"][k] = None
    return Planted("logprob", row, k)


def logprob_made_up(rows, pick):
    row, k = pick(
        spots(rows, lambda r, k: r["loss_mask"][k] and r["logprobs"][k] is None)
    )
    row["logprobs"][k] = 0.0
    return Planted("logprob", row, k)


def logprob_off_mask(rows, pick):
    row, k = pick(spots(rows, is_context))
    row["logprobs"][k] = 0.0
    return Planted("logprob", row, k)


def logprobs_short(rows, pick):
    row = pick([r for r in rows if r["input_ids"]])
    row["logprobs"].pop()
    return Planted("length", row, len(row["logprobs"]))


def logprobs_of_next_token(rows, pick):
    row, span = pick(
        [
            (r, s)
            for r, s in spans(rows, "trained")
            if len(set(r["logprobs"][s["start"] : s["stop"]])) == s["stop"] - s["start"]
            and s["stop"] - s["start"] > 1
        ]
    )
    here = slice(span["start"], span["stop"])
    row["logprobs"][here] = [*row["logprobs"][here][1:], row["logprobs"][span["start"]]]
    return Planted("logprob", row, span["start"], span["turn_index"])


def sampled_id_changed(rows, pick):
    row, k = pick(spots(rows, is_trained))
    row["input_ids"][k] = OTHER
    return Planted("span_tokens", row, k)


def context_id_changed(rows, pick):
    row, k = pick(
        spots(rows, lambda r, k: is_context(r, k) and any(r["loss_mask"][k:]))
    )
    row["input_ids"][k] = OTHER
    return Planted("context", row, row["loss_mask"].index(True, k))


def reply_before_changed(rows, pick):
    """A trained reply is another, so the reply after it was sampled elsewhere."""
    row, k = pick(
        spots(
            rows,
            lambda r, k: (
                r["loss_mask"][k]
                and False in r["loss_mask"][k:]
                and True in r["loss_mask"][r["loss_mask"].index(False, k) :]
            ),
        )
    )
    row["input_ids"][k] = OTHER
    later = row["loss_mask"].index(True, row["loss_mask"].index(False, k))
    return Planted("context", row, later)


def token_slipped_in(rows, pick):
    """A token more before what is trained, as a template adds one."""
    row = pick([r for r in rows if any(r["loss_mask"])])
    row["input_ids"].insert(0, OTHER)
    row["loss_mask"].insert(0, False)
    row["logprobs"].insert(0, None)
    for span in row["spans"]:
        span["start"] += 1
        span["stop"] += 1
    return Planted("context", row, row["loss_mask"].index(True))


def head_lost(rows, pick):
    """The first token is gone, as where a start token is dropped."""
    row = pick(
        [r for r in rows if any(r["loss_mask"]) and all(s["start"] for s in r["spans"])]
    )
    for name in ("input_ids", "loss_mask", "logprobs"):
        row[name].pop(0)
    for span in row["spans"]:
        span["start"] -= 1
        span["stop"] -= 1
    return Planted("context", row, row["loss_mask"].index(True))


def tail_changed(rows, pick):
    row, k = pick(
        spots(rows, lambda r, k: not any(r["loss_mask"][k:]) and _ends_in_piece(r))
    )
    row["input_ids"][k] = OTHER
    return Planted("row_tokens", row, k)


def _ends_in_piece(row):
    return bool(row["spans"]) and row["spans"][-1]["stop"] == len(row["input_ids"])


def _ends_in_long_piece(row, span):
    return span["stop"] == len(row["input_ids"]) and span["stop"] - span["start"] > 1


def row_cut_short(rows, pick):
    row = pick([r for r, s in spans(rows, "trained") if _ends_in_long_piece(r, s)])
    for name in ("input_ids", "loss_mask", "logprobs"):
        row[name].pop()
    left = row["spans"].pop()["start"]
    # what is left may be all that another turn held: then its mask has no piece
    return Planted(
        "row_tokens", row, len(row["input_ids"]), instead=Planted("mask", row, left)
    )


def turn_of_nobody(rows, pick):
    row, span = pick(spans(rows, "trained", "duplicate", "untrainable"))
    span["turn_index"] = 10_000
    return Planted("span_turn", row, span["start"])


def turns_confused(rows, pick):
    """Two pieces of a session, each said to be the other's turn."""
    row, span, other = pick(
        [
            (r, s, t)
            for r, s in spans(rows, "trained")
            for q, t in spans(rows, "trained")
            if r["session_id"] == q["session_id"]
            and s["stop"] - s["start"] == t["stop"] - t["start"]
            and r["input_ids"][s["start"]] != q["input_ids"][t["start"]]
        ]
    )
    names = span["turn_index"], other["turn_index"]
    other["turn_index"], span["turn_index"] = names
    return Planted("span_tokens", row, span["start"], span["turn_index"])


def kind_of_nobody(rows, pick):
    row, span = pick(spans(rows, "trained", "duplicate", "untrainable"))
    span["kind"] = "lost"
    return Planted("span_kind", row, span["start"], span["turn_index"])


def absorbed_where_nothing_is(rows, pick):
    row, span = pick(spans(rows, "trained"))
    train(row, span, False)
    span.update(kind="absorbed", stop=span["start"])
    return Planted("span_kind", row, span["start"], span["turn_index"])


def cut_where_nothing_is(rows, pick):
    row, span = pick([(r, s) for r, s in spans(rows, "trained")])
    train(row, span, False)
    span.update(kind="cut", stop=span["start"])
    return Planted("span_kind", row, span["start"], span["turn_index"])


def span_past_the_row(rows, pick):
    row, span = pick([(r, r["spans"][-1]) for r in rows if _ends_in_piece(r)])
    span["stop"] += 1
    return Planted("span_place", row, span["start"], span["turn_index"])


def span_twice(rows, pick):
    row, span = pick(spans(rows, "trained", "duplicate", "untrainable"))
    row["spans"].insert(row["spans"].index(span), dict(span))
    return Planted("span_place", row, span["start"], span["turn_index"])


def spans_swapped(rows, pick):
    row = pick([r for r in rows if len(r["spans"]) > 1])
    row["spans"].reverse()
    return Planted("span_place", row, row["spans"][1]["start"])


def span_of_other_range(rows, pick):
    row, span = pick(spans(rows, "trained", "duplicate", "untrainable"))
    span["output_start"] += 1
    span["output_stop"] += 1
    return Planted("span_range", row, span["start"], span["turn_index"])


def span_shorter(rows, pick):
    row, span = pick(spans(rows, "trained", "duplicate", "untrainable"))
    span["stop"] -= 1
    return Planted("span_range", row, span["start"], span["turn_index"])


def span_null(rows, pick):
    row, span = pick(spans(rows, "trained", "duplicate", "untrainable"))
    span["output_start"] = None
    return Planted("null", row, span["start"], span["turn_index"])


def piece_not_said(rows, pick):
    """The mask trains a reply that no piece names."""
    row, span = pick(spans(rows, "trained"))
    row["spans"].remove(span)
    return Planted("mask", row, span["start"])


def called_duplicate(rows, pick):
    """A reply that a row trained is context in all of them."""
    row, span = pick(spans(rows, "trained"))
    span["kind"] = "duplicate"
    train(row, span, False)
    return not_trained(row, span["output_start"], span["turn_index"])


def half_trained(rows, pick):
    row, span = pick(
        [(r, s) for r, s in spans(rows, "trained") if s["stop"] - s["start"] > 1]
    )
    row["loss_mask"][span["stop"] - 1] = False
    row["logprobs"][span["stop"] - 1] = None
    span["stop"] -= 1
    span["output_stop"] -= 1
    return not_trained(row, span["output_stop"], span["turn_index"])


def trained_by_two_rows(rows, pick):
    row, span = pick(spans(rows, "duplicate"))
    span["kind"] = "trained"
    train(row, span, True)
    claims = [
        r
        for r, s in spans(rows, "trained")
        if r["session_id"] == row["session_id"]
        and s["turn_index"] == span["turn_index"]
    ]
    # rows count in order: the later of the two is named
    last = max(claims, key=lambda r: r["row_index"])
    at = next(
        s["start"]
        for s in last["spans"]
        if s["turn_index"] == span["turn_index"] and s["kind"] == "trained"
    )
    return Planted("trained_twice", last, at, span["turn_index"])


def row_twice(rows, pick):
    row = pick([r for r in rows if any(r["loss_mask"])])
    same = [r for r in rows if r["session_id"] == row["session_id"]]
    again = {**copy.deepcopy(row), "row_index": len(same)}
    rows.insert(rows.index(same[-1]) + 1, again)
    return Planted("trained_twice", again, row["loss_mask"].index(True))


def last_row_missing(rows, pick):
    last = {row["session_id"]: row for row in rows}
    row = pick([r for r in last.values() if any(r["loss_mask"])])
    rows.remove(row)
    span = next(s for s in row["spans"] if s["kind"] == "trained")
    return not_trained(row, span["output_start"], span["turn_index"])


def middle_row_missing(rows, pick):
    group = pick(siblings(rows))
    at = pick(list(range(len(group) - 1)))
    rows.remove(group[at])
    return Planted("row_index", group[at + 1])


def rows_swapped(rows, pick):
    group = pick(siblings(rows))
    at = pick(list(range(len(group) - 1)))
    a, b = rows.index(group[at]), rows.index(group[at + 1])
    rows[a], rows[b] = rows[b], rows[a]
    return Planted("row_index", group[at])


def index_skipped(rows, pick):
    row = pick(rows)
    row["row_index"] += 100
    return Planted("row_index", row)


def untrainable_trained(rows, pick):
    row, span = pick(spans(rows, "untrainable"))
    span["kind"] = "trained"
    train(row, span, True)
    return Planted("untrainable", row, span["start"], span["turn_index"])


def called_untrainable(rows, pick):
    row, span = pick(spans(rows, "trained"))
    span["kind"] = "untrainable"
    train(row, span, False)
    return Planted("untrainable", row, span["start"], span["turn_index"])


def prompt_longer(rows, pick):
    row = pick([r for r in rows if r["spans"]])
    row["prompt_length"] = row["spans"][0]["start"] + 1
    return Planted("prompt_length", row, row["prompt_length"])


def prompt_negative(rows, pick):
    row = pick(rows)
    row["prompt_length"] = -1
    return Planted("prompt_length", row, -1)


def shared_length_more(rows, pick):
    row = pick(rows)
    row["shared_length"] += 1
    return Planted("shared_length", row, row["shared_length"] - 1)


def shared_length_less(rows, pick):
    row = pick([r for r in rows if r["shared_length"]])
    row["shared_length"] -= 1
    return Planted("shared_length", row, row["shared_length"])


def parent_row_none(rows, pick):
    row = pick([r for r in rows if r["shared_length"]])
    row["parent_row"] = None
    return Planted("parent_row", row)


def parent_row_other(rows, pick):
    row = pick([r for r in rows if r["row_index"]])
    known = set(range(row["row_index"])) | {None}
    row["parent_row"] = pick(sorted(known - {row["parent_row"]}, key=str))
    return Planted("parent_row", row)


def parent_row_itself(rows, pick):
    row = pick(rows)
    row["parent_row"] = row["row_index"]
    return Planted("parent_row", row)


def weight_changed(rows, pick):
    row = pick([r for r in rows if r["row_weight"] is not None])
    row["row_weight"] += 1e-6
    return Planted("row_weight", row)


def weights_of_rows(rows, pick):
    """One for each row, as where a batch is weighed and not a rollout."""
    groups = [[r for r in g if any(r["loss_mask"])] for g in siblings(rows)]
    group = pick([g for g in groups if len(g) > 1])
    for row in group:
        row["row_weight"] = 1.0
    return Planted("row_weight", pick(group))


def weight_null(rows, pick):
    row = pick([r for r in rows if r["row_weight"] is not None])
    row["row_weight"] = None
    return Planted("row_weight", row)


def sum_changed(rows, pick):
    row = pick(rows)
    row["rollout_mask_sum"] += 1
    return Planted("rollout_mask_sum", row)


def reward_changed(rows, pick):
    row = pick(rows)
    row["reward"] = 0.5
    return Planted("reward", row)


def reward_null(rows, pick):
    row = pick(rows)
    row["reward"] = None
    return Planted("reward", row)


def group_changed(rows, pick):
    row = pick(rows)
    row["group_id"] = "another"
    return Planted("group_id", row)


def finish_reason_changed(rows, pick):
    row = pick(rows)
    row["finish_reason"] = "another"
    return Planted("finish_reason", row)


def truncated_flipped(rows, pick):
    row = pick(rows)
    row["truncated"] = not row["truncated"]
    return Planted("flags", row)


def ill_formed_hidden(rows, pick):
    row = pick([r for r in rows if r["ill_formed"] and is_rich(r)])
    row["ill_formed"] = False
    return Planted("flags", row)


def use_tool_made_up(rows, pick):
    row = pick([r for r in rows if is_rich(r)])
    row["use_tool"] = True
    return Planted("flags", row)


def last_turn_not_listed(rows, pick):
    row = pick(rows)
    row["turns"].pop()
    return Planted("turns", row)


def other_turn_listed(rows, pick):
    row = pick(rows)
    row["turns"].insert(0, 10_000)
    return Planted("turns", row)


def weights_made_up(rows, pick):
    row = pick(rows)
    row["weight_versions"] = {"first": "none", "last": "none"}
    return Planted("weight_versions", row)


def session_of_nobody(rows, pick):
    row = pick(rows)
    row["session_id"] = "nobody"
    return Planted("session", row)


def session_in_pieces(rows, pick):
    group = pick(siblings(rows))
    if rows[-1] is group[-1]:
        rows.insert(0, rows.pop())
        return Planted("session", group[0])
    rows.remove(group[-1])
    rows.append(group[-1])
    return Planted("session", group[-1])


FAULTS = [
    mask_cleared,
    mask_set,
    mask_shifted,
    mask_short,
    mask_null,
    id_null,
    logprob_shifted,
    logprob_lost,
    logprob_made_up,
    logprob_off_mask,
    logprobs_short,
    logprobs_of_next_token,
    sampled_id_changed,
    context_id_changed,
    reply_before_changed,
    token_slipped_in,
    head_lost,
    tail_changed,
    row_cut_short,
    turn_of_nobody,
    turns_confused,
    kind_of_nobody,
    absorbed_where_nothing_is,
    cut_where_nothing_is,
    span_past_the_row,
    span_twice,
    spans_swapped,
    span_of_other_range,
    span_shorter,
    span_null,
    piece_not_said,
    called_duplicate,
    half_trained,
    trained_by_two_rows,
    row_twice,
    last_row_missing,
    middle_row_missing,
    rows_swapped,
    index_skipped,
    untrainable_trained,
    called_untrainable,
    prompt_longer,
    prompt_negative,
    shared_length_more,
    shared_length_less,
    parent_row_none,
    parent_row_other,
    parent_row_itself,
    weight_changed,
    weights_of_rows,
    weight_null,
    sum_changed,
    reward_changed,
    reward_null,
    group_changed,
    finish_reason_changed,
    truncated_flipped,
    ill_formed_hidden,
    use_tool_made_up,
    last_turn_not_listed,
    other_turn_listed,
    weights_made_up,
    session_of_nobody,
    session_in_pieces,
]


def test_there_are_faults_enough():
    assert len(FAULTS) == len(set(FAULTS)) >= 30


@cache
def policies_with_place(fault):
    """Those that keep all, in whose rows of any `rich_run` the fault has a place."""
    found = []
    for policy in KEEPS_ALL:
        rows = copy.deepcopy(rich_rows(0, policy))
        rows = [row for row in rows if row["session_id"] in ("rich", "c")]
        try:
            fault(rows, picking(lambda n: 0))
        except NoPlaceError:
            continue
        found.append(policy)
    assert "faithful" in found
    return found


@pytest.mark.parametrize(
    "fault", [pytest.param(f, id=f.__name__.replace("_", " ")) for f in FAULTS]
)
@settings(max_examples=10)
@given(st.data(), rich_seeds)
def test_a_fault_is_found_where_it_is_planted(fault, data, seed):
    policy = data.draw(st.sampled_from(policies_with_place(fault)))
    turns = rich_run(seed)
    rows = copy.deepcopy(rich_rows(seed, policy))
    pick = picking(lambda n: data.draw(st.integers(0, n - 1)))
    planted = fault(rows, pick)
    table = pa.Table.from_pylist(rows, ROWS)
    found = tk.verify(table, turns, policy, sessions=facts_of(turns))
    assert planted.is_among(found.to_pylist())


@settings(max_examples=5)
@given(st.randoms(use_true_random=False), st.sampled_from(KEEPS_ALL))
def test_all_faults_at_once(draw, policy):
    """All are found, and nothing in the sessions that none was planted in."""
    turns, rows, planted, clean = [], [], [], set()
    for fault in FAULTS:
        if policy not in policies_with_place(fault):
            continue
        run = draw.randrange(64), f"{fault.__name__}: "
        turns.append(rich_run(*run))
        faulty = copy.deepcopy(rich_rows(run[0], policy, run[1]))
        planted.append(fault(faulty, picking(draw.randrange)))
        rows += faulty
        before = by_session(rich_rows(run[0], policy, run[1]))
        after = by_session(faulty)
        clean |= {name for name in before if before[name] == after.get(name)}
    table = pa.concat_tables(turns)
    found = tk.verify(
        pa.Table.from_pylist(rows, ROWS), table, policy, sessions=facts_of(table)
    ).to_pylist()
    assert [one for one in planted if not one.is_among(found)] == []
    assert {one["session_id"] for one in found} & clean <= out_of_order(rows)


def out_of_order(rows):
    """Sessions whose rows do not follow one another."""
    names = [row["session_id"] for row in rows]
    runs_of = [a for a, b in zip(names, [None, *names], strict=False) if a != b]
    return {name for name in runs_of if runs_of.count(name) > 1}


MANY = 3_000
HARD_LOSSES = ("absorbed", "rewritten", "cut", "untrainable", "unrouted")


@cache
def many_turns():
    return turns_table(generated_runs(MANY))


@pytest.mark.parametrize("limit", [None, 12], ids=["whole rows", "rows of 12 tokens"])
@pytest.mark.parametrize("policy", PRESETS)
def test_nothing_is_found_in_thousands_of_sessions(policy, limit):
    turns = many_turns()
    facts = facts_of(turns)
    rows, report = linearized(turns, policy, sessions=facts, max_row_tokens=limit)
    assert report.num_rows == MANY
    assert pc.sum(report["tokens_trained"]).as_py() > 2 * MANY
    found = tk.verify(rows, turns, policy, sessions=facts, max_row_tokens=limit)
    assert found.slice(0, 5).to_pylist() == []


def test_generated_sessions_are_hard():
    """Pieces of every kind come out, tokens are lost in every way, drift has all causes."""
    turns = many_turns()
    kinds, lost = set(), dict.fromkeys(HARD_LOSSES, 0)
    for policy in ("faithful", "slime", "trl"):
        rows, report = linearized(turns, policy, max_row_tokens=12)
        kinds |= set(rows["spans"].combine_chunks().flatten().field("kind").to_pylist())
        for reason in lost:
            lost[reason] += pc.sum(report[f"lost_{reason}"]).as_py()
    assert kinds == {"trained", "duplicate", "absorbed", "cut", "untrainable"}
    assert all(lost.values())
    drift = tk.classify_drift(turns, tk.link(turns))
    assert set(drift["cause"].to_pylist()) == set(CAUSES)
    assert set(drift["region"].to_pylist()) == set(REGIONS)


@settings(max_examples=25)
@given(runs(), st.sampled_from(KEEPS_ALL), row_limits)
def test_nothing_is_found_in_rows_that_keep_all(turns, policy, limit):
    table = turns_table(turns)
    facts = facts_of(table)
    rows = tk.linearize(table, policy, sessions=facts, max_row_tokens=limit)
    found = tk.verify(rows, table, policy, sessions=facts, max_row_tokens=limit)
    assert found.to_pylist() == []
    assert found.schema.equals(VIOLATIONS)
    if policy == "faithful":
        assert tk.verify(rows, table, max_row_tokens=limit).num_rows == 0


@pytest.mark.parametrize(
    "absorb", ["absorb_short_drift", "absorb_short_reply", "absorb_any"]
)
@pytest.mark.parametrize("keep_head", [False, True])
@pytest.mark.parametrize("n_same", range(4))
@pytest.mark.parametrize("given", list(product([None, -0.5], repeat=3)))
def test_a_lost_reply_may_begin_with_tokens_that_have_no_logprob(
    absorb, keep_head, n_same, given
):
    first = {"prompt_ids": [1, 2], "output_ids": [3, 4, 5], "output_logprobs": given}
    prompt = [*[1, 2, 3, 4, 5][: 2 + n_same], 9]
    second = {"prompt_ids": prompt, "output_ids": [7], "output_logprobs": [-0.5]}
    turns = tk.from_records([{"session_id": "a", **one} for one in (first, second)])
    policy = tk.policy(
        "trl", on_drift=absorb, keep_prefix=keep_head, missing_logprobs="untrain"
    )
    rows = tk.linearize(turns, policy)
    assert tk.verify(rows, turns, policy).to_pylist() == []


@settings(max_examples=25)
@given(runs(), st.sampled_from(["slime", "trl"]), thresholds, row_limits)
def test_slime_and_trl_keep_their_own_promise(turns, name, threshold, limit):
    table = turns_table(turns)
    policy = tk.policy(name, fork_threshold=threshold)
    rows, report = linearized(table, policy, max_row_tokens=limit)
    found = tk.verify(rows, table, policy, max_row_tokens=limit)
    assert found.to_pylist() == []
    # what they lose is found under the promise to lose nothing
    losers = {
        line["session_id"]
        for line in report.to_pylist()
        if line["lost_absorbed"] + line["lost_rewritten"] + line["lost_unrouted"]
    }
    found = tk.verify(rows, table, "strict", max_row_tokens=limit).to_pylist()
    if limit is None:
        assert {v["session_id"] for v in found if v["rule"] == "not_trained"} == losers


@settings(max_examples=25)
@given(rich_seeds, st.sampled_from(["faithful", "slime"]))
def test_any_form_of_the_tables_will_do(seed, policy):
    """Rows in another order of sessions, chunks, views; turns as polars has them."""
    turns = rich_run(seed)
    rows = tk.linearize(turns, policy)
    names = rows["session_id"].unique().to_pylist()
    turned = pa.concat_tables(
        rows.filter(pc.equal(rows["session_id"], name)) for name in names[::-1]
    )
    assert tk.verify(turned, pl.from_arrow(turns), policy).num_rows == 0
    assert tk.verify(pl.from_arrow(rows), turns, policy).num_rows == 0


def test_turns_in_delta_form():
    turns = tk.from_records(CLEAN)
    delta = pa.table(
        {
            "session_id": ["c", "c"],
            "turn_index": [0, 1],
            "base_turn": [None, 0],
            "shared_length": [0, 5],
            "suffix_ids": [[1, 2], [6]],
            "output_ids": turns["output_ids"],
            "output_logprobs": turns["output_logprobs"],
            "finish_reason": turns["finish_reason"],
        }
    )
    rows = tk.linearize(turns, "strict")
    assert tk.verify(rows, delta, "strict").num_rows == 0
    ids = pa.array([[1, 2, 3, 4, 5, 7, 8, 9]], ROWS.field("input_ids").type)
    changed = rows.set_column(3, ROWS.field("input_ids"), ids)
    found = tk.verify(changed, delta, "strict").select(["row_index", "token", "rule"])
    assert [tuple(one.values()) for one in found.to_pylist()] == [
        (0, 5, "row_tokens"),
        (0, 6, "context"),
    ]


def test_errored_sessions_train_nothing():
    turns = tk.from_records(CLEAN)
    failed = pa.table({"session_id": ["c"], "error": ["out of memory"]})
    none = tk.linearize(turns, "strict", sessions=failed)
    assert tk.verify(none, turns, "strict", sessions=failed).num_rows == 0
    found = tk.verify(tk.linearize(turns, "strict"), turns, "strict", sessions=failed)
    assert set(found["rule"].to_pylist()) == {"untrainable"}


@pytest.mark.parametrize(
    ("weigh_by", "weights"),
    [
        pytest.param("token", [0.6, 0.4], id="token"),
        pytest.param("row", [0.5, 0.5], id="row"),
        pytest.param("rollout", [0.2, 0.2], id="rollout"),
    ],
)
def test_weights_in_each_sense(weigh_by, weights):
    turns = tk.from_records(CLEAN)
    rows = tk.linearize(turns, "per_call")
    place = rows.column_names.index("row_weight")
    table = rows.set_column(place, ROWS.field("row_weight"), pa.array(weights))
    assert tk.verify(table, turns, "per_call", weigh_by=weigh_by).num_rows == 0
    for other in {"token", "row", "rollout"} - {weigh_by}:
        found = tk.verify(table, turns, "per_call", weigh_by=other)
        assert found["rule"].to_pylist() == ["row_weight"] * 2


def test_a_row_longer_than_rows_may_be():
    turns = tk.from_records(CLEAN)
    rows = tk.linearize(turns, "strict")
    found = tk.verify(rows, turns, "strict", max_row_tokens=6).to_pylist()
    assert ("length", 0, 6) in [(v["rule"], v["row_index"], v["token"]) for v in found]


def test_no_turns_and_no_rows():
    turns = tk.from_records([])
    assert tk.verify(tk.linearize(turns), turns).num_rows == 0
    assert tk.verify(ROWS.empty_table(), tk.from_records(CLEAN)).num_rows == 0
    found = tk.verify(ROWS.empty_table(), tk.from_records(CLEAN), "faithful")
    assert found.select(["turn_index", "token", "rule"]).to_pylist() == [
        {"turn_index": 0, "token": 0, "rule": "not_trained"},
        {"turn_index": 1, "token": 0, "rule": "not_trained"},
    ]
    found = tk.verify(tk.linearize(tk.from_records(CLEAN)), turns)
    assert found["rule"].to_pylist() == ["session"]


def test_images_that_are_not_the_session_s():
    image = {"kind": "image", "hash": "ab" * 32, "token_id": 7, "start": 1, "stop": 4}
    prompt = [1, *content_ids("image", image["hash"], 3).tolist(), 2]
    turns = tk.from_records([turn(prompt, [3, 9], mm_items=[image])])
    rows = tk.linearize(turns, "faithful", reward=1.0)
    assert tk.verify(rows, turns, "faithful").num_rows == 0
    for items, token in [
        (None, 1),
        ([image | {"hash": "cd" * 32}], 1),
        ([image | {"token_id": 8}], 1),
        ([image | {"stop": 3}], 1),
        ([image | {"start": 0, "stop": 3}], 0),
        ([image | {"start": 7, "stop": 10}], 1),
        ([image | {"start": 4, "stop": 1}], 1),
        ([image | {"stop": None}], None),
        ([None], None),
    ]:
        at = rows.column_names.index("mm_items")
        column = pa.array([items], ROWS.field("mm_items").type)
        found = tk.verify(rows.set_column(at, ROWS.field("mm_items"), column), turns)
        first = found.to_pylist()[0]
        assert (first["rule"], first["token"]) == ("mm_items", token)


def test_an_image_of_a_session_without_images():
    image = {"kind": "image", "hash": "ab" * 32, "token_id": 7, "start": 0, "stop": 1}
    turns = tk.from_records([turn([1], [3])])
    rows = tk.linearize(turns, "faithful", reward=1.0)
    at = rows.column_names.index("mm_items")
    column = pa.array([[image]], ROWS.field("mm_items").type)
    found = tk.verify(rows.set_column(at, ROWS.field("mm_items"), column), turns)
    assert found["rule"].to_pylist() == ["mm_items"]


def test_every_rule_has_a_fault():
    """Those of rows without pieces aside, which have a table of their own."""
    source = Path(__file__).read_text()
    assert [rule for rule in RULES if f'"{rule}"' not in source] == []


# Rows of other systems: ids, mask, logprobs, and little else.


def foreign(rows, *names):
    return rows.select(["session_id", "input_ids", "loss_mask", "logprobs", *names])


@pytest.mark.parametrize("policy", [*KEEPS_ALL, "slime", "trl"])
def test_rows_without_pieces(policy):
    """In either order, so that equal replies are told apart by their logprobs."""
    turns = turns_table(generated_runs(500, seed=1))
    rows = foreign(tk.linearize(turns, policy))
    for some in (rows, rows.take(pa.array(range(rows.num_rows)[::-1]))):
        found = tk.verify(some, turns, policy).to_pylist()
        assert [v for v in found if v["rule"] != "not_located"] == []
        # what an absorbing policy dropped stands nowhere, nor does what was not routed
        assert not found or policy not in ("strict", "per_call", "skyrl")


def response_only(row):
    start = row["prompt_length"]
    for name in ("loss_mask", "logprobs"):
        row[name] = row[name][start:]
    # other systems have no null
    row["logprobs"] = [0.0 if p is None else p for p in row["logprobs"]]
    return row


@settings(max_examples=25)
@given(rich_seeds)
def test_rows_without_pieces_whose_mask_is_of_the_response(seed):
    turns = rich_run(seed)
    rows = [response_only(row) for row in tk.linearize(turns, "per_call").to_pylist()]
    names = ("session_id", "input_ids", "loss_mask", "logprobs", "prompt_length")
    table = pa.table(
        {name: [row[name] for row in rows] for name in names}
        | {"loss_mask": [[int(m) for m in row["loss_mask"]] for row in rows]}
    )
    assert tk.verify(table, turns, "per_call").to_pylist() == []


def test_rows_without_session_ids():
    turns = turns_table(RICH)
    rows = tk.linearize(turns, "strict").select(["input_ids", "loss_mask"])
    assert tk.verify(rows, turns).to_pylist() == []


def any_mask_bit(row, pick):
    k = pick(range(len(row["loss_mask"])))
    row["loss_mask"][k] = not row["loss_mask"][k]
    return k


def any_trained_logprob(row, pick):
    k = pick([k for k, trained in enumerate(row["loss_mask"]) if trained])
    row["logprobs"][k] = -99.0
    return k


def any_trained_id(row, pick):
    k = pick([k for k, trained in enumerate(row["loss_mask"]) if trained])
    row["input_ids"][k] = OTHER
    return k


def any_id_before(row, pick):
    last = max((k for k, trained in enumerate(row["loss_mask"]) if trained), default=0)
    k = pick(range(last))
    row["input_ids"][k] = OTHER
    return k


@pytest.mark.parametrize("whole", [True, False], ids=["full mask", "response mask"])
@pytest.mark.parametrize(
    "fault", [any_mask_bit, any_trained_logprob, any_trained_id, any_id_before]
)
@settings(max_examples=10)
@given(st.data(), rich_seeds, st.sampled_from(KEEPS_ALL))
def test_a_fault_is_found_in_rows_without_pieces(fault, whole, data, seed, policy):
    """In its row at or after the token, or as tokens of the session that are lost."""
    turns = rich_run(seed)
    rows = copy.deepcopy(rich_rows(seed, policy))
    pick = picking(lambda n: data.draw(st.integers(0, n - 1)))
    row = pick([r for r in rows if any(r["loss_mask"]) and r["prompt_length"]])
    k = fault(row, pick)
    if not whole and not any(row["loss_mask"][: row["prompt_length"]]):
        response_only(row)
    known = without_pieces(rich_rows(seed, policy), turns, policy)
    found = without_pieces(rows, turns, policy)
    session, index = row["session_id"], row["row_index"]
    assert [
        one
        for one in found
        if one not in known
        and one["session_id"] == session
        and (one["row_index"] is None or one["row_index"] == index)
        and (one["row_index"] is None or one["token"] >= k)
    ]


def without_pieces(rows, turns, policy):
    names = ("session_id", "row_index", "input_ids", "loss_mask", "logprobs")
    table = pa.table({name: [row[name] for row in rows] for name in names})
    return tk.verify(table, turns, policy).to_pylist()


def outside_of_replies(row):
    row["loss_mask"][1] = True
    return ("mask", 1)


def no_turn_s_tokens(row):
    row["input_ids"][3] = OTHER
    return ("mask", 3)


def of_another_logprob(row):
    row["logprobs"][3] = -9.0
    return ("logprob", 3)


def mask_too_long(row):
    row["loss_mask"].append(False)
    return ("length", 8)


def logprobs_of_nothing(row):
    row["logprobs"] = row["logprobs"][:3]
    return ("length", 3)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(f, id=f.__name__.replace("_", " "))
        for f in (
            outside_of_replies,
            no_turn_s_tokens,
            of_another_logprob,
            mask_too_long,
            logprobs_of_nothing,
        )
    ],
)
def test_faults_of_rows_without_pieces(fault):
    turns = tk.from_records(CLEAN)
    row = foreign(tk.linearize(turns, "strict"), "row_index").to_pylist()[0]
    rule, token = fault(row)
    found = tk.verify(pa.Table.from_pylist([row]), turns).to_pylist()
    assert (rule, 0, token) in [(v["rule"], v["row_index"], v["token"]) for v in found]


def test_a_reply_in_another_context_in_rows_without_pieces():
    """The prompt's beginning is another, its end and the output stand."""
    turns = tk.from_records([{**turn([*range(20)], [30, 31]), "session_id": "c"}])
    row = foreign(tk.linearize(turns)).to_pylist()[0]
    row["input_ids"][1] = OTHER
    rows = pa.Table.from_pylist([row])
    found = tk.verify(rows, turns, "faithful").to_pylist()
    assert [
        (v["row_index"], v["turn_index"], v["token"], v["rule"]) for v in found
    ] == [(0, 0, 20, "context")]
    # a policy that splices trains replies after other tokens
    assert tk.verify(rows, turns).num_rows == 0


def test_what_rows_without_pieces_lose():
    turns = tk.from_records(CLEAN)
    rows = foreign(tk.linearize(turns, "per_call"))
    again = pa.concat_tables([rows, rows.slice(0, 1)])
    found = [
        (v["row_index"], v["turn_index"], v["token"], v["rule"])
        for table in (again, rows.slice(0, 1))
        for v in tk.verify(table, turns, "faithful").to_pylist()
    ]
    assert found == [(2, 0, 2, "trained_twice"), (None, 1, 0, "not_located")]
    for table in (again, rows.slice(0, 1)):
        assert tk.verify(table, turns).num_rows == 0
    row = rows.to_pylist()[1]
    row["loss_mask"][7] = False
    found = tk.verify(pa.Table.from_pylist([row]), turns, "strict").to_pylist()
    assert [(v["turn_index"], v["token"], v["rule"]) for v in found] == [
        (0, 0, "not_trained"),
        (1, 1, "not_trained"),
    ]


def test_a_turn_that_may_not_be_trained_in_rows_without_pieces():
    turns = tk.from_records([{**CLEAN[0], "trainable": False}])
    rows = pa.table({"input_ids": [[1, 2, 3, 4, 5]], "loss_mask": [[0, 0, 1, 1, 1]]})
    assert [(v["token"], v["rule"]) for v in tk.verify(rows, turns).to_pylist()] == [
        (2, "untrainable")
    ]


@pytest.mark.parametrize(
    ("rows", "options", "error", "said"),
    [
        pytest.param(
            {"input_ids": [[1]]}, {}, SchemaError, "loss_mask", id="no loss mask"
        ),
        pytest.param(
            {
                "input_ids": [[1], [2]],
                "loss_mask": [[0], [0]],
                "session_id": ["c", None],
            },
            {},
            SchemaError,
            "all or none",
            id="a session here and there",
        ),
        pytest.param(
            {"input_ids": [[1]], "loss_mask": [[0]]},
            {"max_row_tokens": 0},
            ArgumentError,
            "max_row_tokens=0",
            id="rows of no token",
        ),
        pytest.param(
            {"input_ids": [[1]], "loss_mask": [[0]]},
            {"max_row_tokens": True},
            ArgumentError,
            "max_row_tokens=True",
            id="rows of no number",
        ),
        pytest.param(
            {"input_ids": [[1]], "loss_mask": [[0]]},
            {"weigh_by": "turn"},
            ArgumentError,
            "weigh_by='turn'",
            id="weights of no sense",
        ),
        pytest.param(
            {"input_ids": [[1]], "loss_mask": [[0]]},
            {"policy": "slim"},
            PolicyError,
            "'slim'",
            id="no such policy",
        ),
        pytest.param(
            {"input_ids": [[1]], "loss_mask": [[0]]},
            {"reward": {"d": 1.0}},
            InvalidTurnsError,
            "'c'",
            id="no reward for a session",
        ),
    ],
)
def test_what_is_refused(rows, options, error, said):
    with pytest.raises(error, match=said):
        tk.verify(pa.table(rows), tk.from_records(CLEAN), **options)


# Rows of another policy


DRIFTED = [
    {"session_id": "s", "prompt_ids": [1, 2], "output_ids": [3, 4]},
    {"session_id": "s", "prompt_ids": [1, 2, 3, 9], "output_ids": [5]},
    {"session_id": "s", "prompt_ids": [1, 2, 3, 9, 5, 7], "output_ids": [6, 8]},
]


def plain(rows, *names):
    """The rows as another system has them."""
    return rows.select([*names, "input_ids", "loss_mask", "logprobs"])


@pytest.mark.parametrize("made", PRESETS)
@pytest.mark.parametrize("named", [None, *PRESETS])
def test_rows_are_those_of_the_named_policy_or_not(made, named):
    """Without a policy, rows of every preset are right."""
    turns = tk.from_records(DRIFTED)
    rows = tk.linearize(turns, made)
    other = made if named is None else named
    due = tk.linearize(turns, other)
    same = plain(rows).equals(plain(due))
    for table in (plain(rows), plain(rows, "session_id")):
        assert (tk.verify(table, turns, named).num_rows == 0) == same
    same = plain(rows, "spans").equals(plain(due, "spans"))
    assert (tk.verify(rows, turns, named).num_rows == 0) == same


def test_rows_of_another_policy_differ_in_rows_spans_and_tokens():
    turns = tk.from_records(DRIFTED)

    def found(rows, policy):
        lines = tk.verify(rows, turns, policy).to_pylist()
        assert {line["rule"] for line in lines} <= {"policy"}
        names = ("session_id", "row_index", "turn_index", "token", "detail")
        return [tuple(line[name] for name in names) for line in lines]

    faithful, trl = (tk.linearize(turns, one) for one in ("faithful", "trl"))
    assert found(faithful, "trl") == [
        (
            *("s", 0, None, 3),
            "token 4: policy 'trl' has token 9 there (4 tokens, expected 8)",
        ),
        ("s", 1, None, None, "policy 'trl' makes no such row"),
    ]
    assert found(trl, "slime") == [
        ("s", 0, 0, 2, "1 token that policy 'slime' does not train")
    ]
    assert found(plain(trl), "slime") == [
        (None, 0, None, 2, "1 token that policy 'slime' does not train")
    ]
    absent = "policy 'trl' makes a row of 8 tokens, 4 trained, which is not there"
    assert found(faithful.slice(0, 0), "trl") == [("s", 0, None, None, absent)]
    # a mask without the spans of the policy, which trains the same tokens
    slime = tk.linearize(turns, "slime", layout="full")
    line = slime.to_pylist()[0]
    line["spans"] = [one for one in line["spans"] if one["kind"] != "absorbed"]
    short = pa.Table.from_pylist([line], slime.schema)
    assert [one[-1] for one in found(short, "slime")] == [
        "policy 'slime' has absorbed 2:2 (output 0:2) alone"
    ]


def test_a_policy_that_is_no_preset_passes_without_its_name():
    aborted = {**DRIFTED[0], "finish_reason": "abort"}
    turns = tk.from_records([aborted, *DRIFTED[1:]])
    policy = tk.policy("faithful", train_aborted=True, missing_logprobs="null_row")
    rows = tk.linearize(turns, policy)
    assert tk.verify(rows, turns, "faithful").num_rows
    assert tk.verify(rows, turns).num_rows == 0
    assert tk.verify(rows, turns, policy).num_rows == 0


def test_a_wrong_row_is_found_without_a_policy_too():
    turns = tk.from_records(DRIFTED)
    line = tk.linearize(turns, "trl").to_pylist()[0]
    line["loss_mask"][0] = True
    rows = pa.Table.from_pylist([line], ROWS)
    assert {one["rule"] for one in tk.verify(rows, turns).to_pylist()} >= {"mask"}
    found = tk.verify(plain(rows), turns).to_pylist()
    assert [(one["token"], one["rule"]) for one in found] == [(0, "mask")]
