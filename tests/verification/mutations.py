"""Faults that are planted in rows, of which `verify` must find 1,095 of 1,122 and more."""

import copy
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import pyarrow as pa

import trajkit as tk
from tests.fuzz.sessions import generated_runs
from tests.made_tables import by_session, turns_table
from trajkit.schema import EMPTY_KINDS, ROWS

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
        "step": 4,
        **more,
    }


# Something of everything, so that every fault has a place: a reply that two later calls
# continue (in faithful's second row it stands as context), logprobs that the engine did
# not give, a turn that may not be trained, weights that sampled nothing, and drift.
UPDATED = [
    {"version": "6", "start": 0, "stop": 0},
    {"version": "7", "start": 0, "stop": 3},
]
RICH = [
    turn([1, 2], [3, 4, 9], weight_versions=UPDATED),
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
def rich_run(seed):
    """Turns of three generated sessions with the rich one and a plain one among them."""
    drawn = by_session(generated_runs(3, seed, max_turns=5)).values()
    groups = [*drawn, RICH, CLEAN]
    Random(seed).shuffle(groups)
    return turns_table([one for group in groups for one in group])


@cache
def rich_rows(seed, policy):
    turns = rich_run(seed)
    return tk.linearize(turns, policy, sessions=facts_of(turns)).to_pylist()


Row = dict[str, Any]
Pick = Callable[[list[Any]], Any]
Fault = Callable[[list[Row], Pick], dict[str, Any] | None]
"""Changes rows in place, at a place that is picked among all there are, and returns fields
of a violation that `verify` must name.
"""


class NoPlaceError(Exception):
    """The rows have no place for a fault."""


def picking(choose):
    """A `Pick`: ``choose(n)`` gives a number below n."""

    def pick(places):
        if not places:
            raise NoPlaceError
        return places[choose(len(places))]

    return pick


def violation(rule, row, token=None, **more):
    """Fields of a violation in a row."""
    place = {"session_id": row["session_id"], "row_index": row["row_index"]}
    return {"rule": rule, **place, "token": token, **more}


def not_trained(row, span, token):
    """A token of an output that no row of the session trains."""
    found = violation("not_trained", row, token, turn_index=span["turn_index"])
    return {**found, "row_index": None}


def in_span(rule, row, span):
    """At the start of a span."""
    return violation(rule, row, span["start"], turn_index=span["turn_index"])


def spots(rows, wanted):
    """(row, position) of every token for which ``wanted(row, position)`` holds."""
    return [(r, k) for r in rows for k in range(len(r["input_ids"])) if wanted(r, k)]


def is_rich(row):
    return row["session_id"] == "rich"


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


def training(rows):
    return [row for row in rows if any(row["loss_mask"])]


def pop_token(row, at):
    for name in ("input_ids", "loss_mask", "logprobs"):
        row[name].pop(at)


def insert_token(row, at, token):
    row["input_ids"].insert(at, token)
    row["loss_mask"].insert(at, False)
    row["logprobs"].insert(at, None)


def move_spans(row, by):
    for span in row["spans"]:
        span["start"] += by
        span["stop"] += by


def siblings(rows):
    """The rows of each session that has more than one."""
    names = {row["session_id"]: None for row in rows}
    groups = [[r for r in rows if r["session_id"] == name] for name in names]
    return [group for group in groups if len(group) > 1]


FAULTS: list[Fault] = []
MORE: list[Fault] = []
"""Faults that are found by one of several rules, or not without the policy: of these only
the session is asked for.
"""


def planted(fault):
    FAULTS.append(fault)
    return fault


def planted_more(fault):
    MORE.append(fault)
    return fault


def of_token(column, value, where, rule):
    """A fault that changes a value of one token: of those ``where(row, k)`` is true."""

    def fault(rows, pick):
        row, k = pick(spots(rows, where))
        row[column][k] = value(row[column][k]) if callable(value) else value
        return violation(rule, row, k)

    return fault


def has_logprob(row, k):
    return row["logprobs"][k] is not None


def anywhere(row, k):
    return True


# name: column, its new value, the tokens that have a place, the rule
for name, of in {
    "mask_cleared": ("loss_mask", False, is_trained, "mask"),
    "mask_set": ("loss_mask", True, is_context, "mask"),
    "mask_null": ("loss_mask", None, anywhere, "null"),
    "id_null": ("input_ids", None, anywhere, "null"),
    "logprob_shifted": ("logprobs", lambda p: p - 0.0625, has_logprob, "logprob"),
    "logprob_lost": ("logprobs", None, has_logprob, "logprob"),
    "logprob_made_up": (
        *("logprobs", 0.0),
        *(lambda row, k: is_trained(row, k) and not has_logprob(row, k), "logprob"),
    ),
    "logprob_off_mask": ("logprobs", 0.0, is_context, "logprob"),
    "sampled_id_changed": ("input_ids", OTHER, is_trained, "span_tokens"),
}.items():
    planted(of_token(*of)).__name__ = name


def list_short(column):
    def fault(rows, pick):
        row = pick([r for r in rows if r["input_ids"]])
        row[column].pop()
        return violation("length", row, len(row[column]))

    return fault


planted(list_short("loss_mask")).__name__ = "mask_short"
planted(list_short("logprobs")).__name__ = "logprobs_short"


def of_span(rule, *kinds, **change):
    """A fault that changes fields of a span of one of the kinds.

    A number is added to a field, anything else replaces it. A token that is no longer
    trained loses its mask.
    """

    def fault(rows, pick):
        row, span = pick(spans(rows, *kinds))
        before = dict(span)
        for name, value in change.items():
            adds = type(value) is int
            span[name] = span[name] + value if adds else value
        if "trained" in (before["kind"], span["kind"]) and "kind" in change:
            train(row, span, span["kind"] == "trained")
        if span["kind"] in EMPTY_KINDS:
            span["stop"] = span["start"]
        if rule == "not_trained":
            return not_trained(row, span, span["output_start"])
        if rule == "span_turn":  # the violation does not name what is no turn
            return violation(rule, row, span["start"])
        return in_span(rule, row, span)

    return fault


SHOWN = ("trained", "duplicate", "untrainable")
# name: the rule, kinds of spans, and what changes
for name, (rule, kinds, change) in {
    "turn_of_nobody": ("span_turn", SHOWN, {"turn_index": 10_000}),
    "kind_of_nobody": ("span_kind", SHOWN, {"kind": "lost"}),
    "span_of_other_range": ("span_range", SHOWN, {"output_start": 1, "output_stop": 1}),
    "span_shorter": ("span_range", SHOWN, {"stop": -1}),
    "span_null": ("null", SHOWN, {"output_start": None}),
    "absorbed_where_nothing_is": ("not_trained", ("trained",), {"kind": "absorbed"}),
    "cut_where_nothing_is": ("span_kind", ("trained",), {"kind": "cut"}),
    "called_duplicate": ("not_trained", ("trained",), {"kind": "duplicate"}),
    "called_untrainable": ("untrainable", ("trained",), {"kind": "untrainable"}),
    "untrainable_trained": ("untrainable", ("untrainable",), {"kind": "trained"}),
}.items():
    planted(of_span(rule, *kinds, **change)).__name__ = name
for name, (kinds, change) in {
    "lost_span_moved": (EMPTY_KINDS, {"start": -1}),
    "lost_range_shorter": (EMPTY_KINDS, {"output_stop": -1}),
    "trained_by_two_rows": (("duplicate",), {"kind": "trained"}),
    "turn_of_another": (SHOWN, {"turn_index": 1}),
}.items():
    planted_more(of_span("policy", *kinds, **change)).__name__ = name


@planted
def span_past_the_row(rows, pick):
    row, span = pick([(r, r["spans"][-1]) for r in rows if ends_in_span(r)])
    span["stop"] += 1
    return in_span("span_place", row, span)


@planted
def mask_shifted(rows, pick):
    """Off by one, as where the first token of a label row is dropped."""
    row = pick(training(rows))
    first = row["loss_mask"].index(True)
    row["loss_mask"] = [False, *row["loss_mask"][:-1]]
    return violation("mask", row, first)


@planted
def logprobs_of_next_token(rows, pick):
    def differ(row, span):
        logprobs = row["logprobs"][span["start"] : span["stop"]]
        return 1 < len(logprobs) == len(set(logprobs))

    row, span = pick([one for one in spans(rows, "trained") if differ(*one)])
    here = slice(span["start"], span["stop"])
    row["logprobs"][here] = [*row["logprobs"][here][1:], row["logprobs"][span["start"]]]
    return in_span("logprob", row, span)


@planted
def context_id_changed(rows, pick):
    row, k = pick(
        spots(rows, lambda r, k: is_context(r, k) and any(r["loss_mask"][k:]))
    )
    row["input_ids"][k] = OTHER
    return violation("context", row, row["loss_mask"].index(True, k))


@planted
def token_slipped_in(rows, pick):
    """A token more before what is trained, as a template adds one."""
    row = pick(training(rows))
    insert_token(row, 0, OTHER)
    move_spans(row, 1)
    return violation("context", row, row["loss_mask"].index(True))


@planted
def head_lost(rows, pick):
    """The first token is gone, as where a start token is dropped."""
    row = pick([r for r in training(rows) if all(s["start"] for s in r["spans"])])
    pop_token(row, 0)
    move_spans(row, -1)
    return violation("context", row, row["loss_mask"].index(True))


@planted
def tail_changed(rows, pick):
    row, k = pick(
        spots(rows, lambda r, k: not any(r["loss_mask"][k:]) and ends_in_span(r))
    )
    row["input_ids"][k] = OTHER
    return violation("row_tokens", row, k)


def ends_in_span(row):
    return bool(row["spans"]) and row["spans"][-1]["stop"] == len(row["input_ids"])


@planted
def span_twice(rows, pick):
    row, span = pick(spans(rows, "trained", "duplicate", "untrainable"))
    row["spans"].insert(row["spans"].index(span), dict(span))
    return in_span("span_place", row, span)


@planted
def span_missing(rows, pick):
    """The mask trains a reply that no span names."""
    row, span = pick(spans(rows, "trained"))
    row["spans"].remove(span)
    return violation("mask", row, span["start"])


@planted
def half_trained(rows, pick):
    row, span = pick(
        [(r, s) for r, s in spans(rows, "trained") if s["stop"] - s["start"] > 1]
    )
    row["loss_mask"][span["stop"] - 1] = False
    row["logprobs"][span["stop"] - 1] = None
    span["stop"] -= 1
    span["output_stop"] -= 1
    return not_trained(row, span, span["output_stop"])


@planted
def row_twice(rows, pick):
    row = pick(training(rows))
    same = [r for r in rows if r["session_id"] == row["session_id"]]
    again = {**copy.deepcopy(row), "row_index": len(same)}
    rows.insert(rows.index(same[-1]) + 1, again)
    return violation("trained_twice", again, row["loss_mask"].index(True))


@planted
def last_row_missing(rows, pick):
    last = {row["session_id"]: row for row in rows}
    row = pick(training(last.values()))
    rows.remove(row)
    span = next(s for s in row["spans"] if s["kind"] == "trained")
    return not_trained(row, span, span["output_start"])


@planted
def rows_swapped(rows, pick):
    group = pick(siblings(rows))
    at = pick(list(range(len(group) - 1)))
    a, b = rows.index(group[at]), rows.index(group[at + 1])
    rows[a], rows[b] = rows[b], rows[a]
    return violation("row_index", group[at])


@planted
def parent_row_other(rows, pick):
    row = pick([r for r in rows if r["row_index"]])
    known = set(range(row["row_index"])) | {None}
    row["parent_row"] = pick(sorted(known - {row["parent_row"]}, key=str))
    return violation("parent_row", row)


@planted
def weights_of_rows(rows, pick):
    """One for each row, as where a batch is weighed and not a rollout."""
    group = pick([one for one in map(training, siblings(rows)) if len(one) > 1])
    for row in group:
        row["row_weight"] = 1.0
    return violation("row_weight", pick(group))


@planted
def session_of_nobody(rows, pick):
    row = pick(rows)
    row["session_id"] = "nobody"
    return violation("session", row)


@planted
def session_apart(rows, pick):
    group = pick(siblings(rows))
    if rows[-1] is group[-1]:
        rows.insert(0, rows.pop())
        return violation("session", group[0])
    rows.remove(group[-1])
    rows.append(group[-1])
    return violation("session", group[-1])


@planted_more
def lost_span_missing(rows, pick):
    row, span = pick(spans(rows, *EMPTY_KINDS))
    row["spans"].remove(span)


@planted_more
def last_token_missing(rows, pick):
    row = pick([r for r in rows if len(r["input_ids"]) > 1 and not r["loss_mask"][-1]])
    pop_token(row, -1)


@planted_more
def token_appended(rows, pick):
    row = pick(rows)
    insert_token(row, len(row["input_ids"]), 5)


def of_column(column, value, where=lambda row: True, token=None):
    """A fault that changes one value of a row; ``token``: the one that is named."""

    def fault(rows, pick):
        row = pick([one for one in rows if where(one)])
        before = row[column]
        row[column] = value(row)
        at = {None: None, "new": row[column], "old": before}[token]
        return violation("flags" if column in FLAGS else column, row, at)

    return fault


FLAGS = ("ill_formed", "use_tool", "truncated")


def is_ill_formed(row):
    return row["ill_formed"] and is_rich(row)


def has_weight(row):
    return row["row_weight"] is not None


def is_shared(row):
    return row["shared_length"]


def has_spans(row):
    return row["spans"]


def has_prompt(row):
    return row["prompt_length"]


# name: column, its new value, the rows that have a place, the token that is named
for name, of in {
    "ill_formed_hidden": ("ill_formed", lambda r: False, is_ill_formed),
    "use_tool_made_up": ("use_tool", lambda r: True, is_rich),
    "truncated_flipped": ("truncated", lambda r: not r["truncated"]),
    "prompt_longer": (
        *("prompt_length", lambda r: r["spans"][0]["start"] + 1, has_spans, "new"),
    ),
    "prompt_negative": ("prompt_length", lambda r: -1, has_prompt, "new"),
    "last_turn_not_listed": ("turns", lambda r: r["turns"][:-1]),
    "other_turn_listed": ("turns", lambda r: [10_000, *r["turns"]]),
    "null_turn_listed": ("turns", lambda r: [None, *r["turns"]]),
    "index_skipped": ("row_index", lambda r: r["row_index"] + 100),
    "sharing_more": (
        *("shared_length", lambda r: r["shared_length"] + 1, has_prompt, "old"),
    ),
    "sharing_less": (
        *("shared_length", lambda r: r["shared_length"] - 1, is_shared, "new"),
    ),
    "parent_row_none": ("parent_row", lambda r: None, is_shared),
    "parent_row_itself": ("parent_row", lambda r: r["row_index"]),
    "weight_changed": ("row_weight", lambda r: r["row_weight"] + 1e-6, has_weight),
    "weight_null": ("row_weight", lambda r: None, has_weight),
    "sum_changed": ("rollout_mask_sum", lambda r: r["rollout_mask_sum"] + 1),
    "reward_changed": ("reward", lambda r: 0.5),
    "reward_null": ("reward", lambda r: None),
    "group_changed": ("group_id", lambda r: "another"),
    "finish_reason_changed": ("finish_reason", lambda r: "another"),
    "weights_made_up": (
        *("weight_versions", lambda r: {"first": "none", "last": "none"}),
    ),
    "weights_null": (
        *("weight_versions", lambda r: None, lambda r: r["weight_versions"]),
    ),
}.items():
    planted(of_column(*of)).__name__ = name
for name, of in {
    "prompt_shorter": ("prompt_length", lambda r: r["prompt_length"] - 1, has_prompt),
    "last_turn_changed": ("last_turn", lambda r: r["last_turn"] + 1),
    "kind_changed": ("segment_kind", lambda r: None if r["segment_kind"] else "final"),
    "flag_null": ("truncated", lambda r: None),
    "step_changed": ("step", lambda r: 5, lambda r: r["step"]),
}.items():
    planted_more(of_column(*of)).__name__ = name


def planted_in(policy, n_places=2):
    """Rows with faults, their turns, and the fault of each session."""
    turns = turns_table([*generated_runs(150, seed=3), *RICH, *CLEAN])
    rows = by_session(tk.linearize(turns, policy, sessions=facts_of(turns)).to_pylist())
    lines = by_session(turns.to_pylist())
    faulty, called, sessions = [], [], {}
    for fault in [*FAULTS, *MORE]:
        if fault is session_apart:
            continue  # one session alone has no place for it
        draw = Random(f"{policy} {fault.__name__}")
        names = sorted(rows)
        draw.shuffle(names)
        n = 0
        for name in names:
            mine = copy.deepcopy(rows[name])
            try:
                fault(mine, picking(draw.randrange))
            except NoPlaceError:
                continue
            new = f"{fault.__name__} {n}"
            sessions[new] = fault.__name__
            for one in mine:
                if one["session_id"] == name:
                    one["session_id"] = new
                if one["group_id"] == name:
                    one["group_id"] = new
            faulty += mine
            called += [{**one, "session_id": new} for one in lines[name]]
            n += 1
            if n == n_places:
                break
    for name in [one for one in rows if one not in sessions]:
        faulty += rows[name]
        called += lines[name]
    return (
        pa.Table.from_pylist(faulty, ROWS),
        pa.Table.from_pylist(called, turns.schema),
        sessions,
    )


def missed_in(rows, turns, sessions, policy):
    """The faults of `planted_in` that `verify` does not find; without a policy: None."""
    found = tk.verify(rows, turns, policy, sessions=facts_of(turns)).to_pylist()
    wrong = {one["session_id"] for one in found}
    assert wrong <= {*sessions, "nobody"}, "a session without a fault"
    # their rows are those of a session without turns
    spared = {name for name in sessions if name.startswith("session_of_nobody")}
    return [sessions[name] for name in sessions if name not in wrong | spared]
