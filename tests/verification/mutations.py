"""Faults that are planted in rows, and a gate: how many of them `verify` finds.

``python -m tests.verification.mutations`` plants each fault in rows of each preset, in two
sessions that have a place for it, and prints what is not found.
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import pyarrow as pa

import trajkit as tk
from tests.fuzz.sessions import generated_runs
from tests.made_tables import by_session, turns_table
from trajkit.policies import PRESETS
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


FAULTS: list[Callable[[list[Row], Pick], Planted]] = []
MORE: list[Callable[[list[Row], Pick], Planted]] = []
"""Faults that are found by one of several rules, or not without the policy."""


def planted(fault):
    FAULTS.append(fault)
    return fault


def planted_more(fault):
    MORE.append(fault)
    return fault


# Each fault changes rows in place, at a place that ``pick`` chooses among all there are.


def of_token(column, value, where, rule):
    """A fault that changes a value of one token: of those ``where(row, k)`` is true."""

    def fault(rows, pick):
        row, k = pick(spots(rows, where))
        row[column][k] = value(row[column][k]) if callable(value) else value
        return Planted(rule, row, k)

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
        return Planted("length", row, len(row[column]))

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
            return not_trained(row, span["output_start"], span["turn_index"])
        turn_index = None if rule == "span_turn" else span["turn_index"]
        return Planted(rule, row, span["start"], turn_index)

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


@planted
def span_past_the_row(rows, pick):
    row, span = pick([(r, r["spans"][-1]) for r in rows if _ends_in_piece(r)])
    span["stop"] += 1
    return Planted("span_place", row, span["start"], span["turn_index"])


@planted
def mask_shifted(rows, pick):
    """Off by one, as where the first token of a label row is dropped."""
    row = pick([r for r in rows if any(r["loss_mask"])])
    first = row["loss_mask"].index(True)
    row["loss_mask"] = [False, *row["loss_mask"][:-1]]
    return Planted("mask", row, first)


@planted
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


@planted
def context_id_changed(rows, pick):
    row, k = pick(
        spots(rows, lambda r, k: is_context(r, k) and any(r["loss_mask"][k:]))
    )
    row["input_ids"][k] = OTHER
    return Planted("context", row, row["loss_mask"].index(True, k))


@planted
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


@planted
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


@planted
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


@planted
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


@planted
def row_cut_short(rows, pick):
    row = pick([r for r, s in spans(rows, "trained") if _ends_in_long_piece(r, s)])
    for name in ("input_ids", "loss_mask", "logprobs"):
        row[name].pop()
    left = row["spans"].pop()["start"]
    # what is left may be all that another turn held: then its mask has no piece
    return Planted(
        "row_tokens", row, len(row["input_ids"]), instead=Planted("mask", row, left)
    )


@planted
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


@planted
def span_twice(rows, pick):
    row, span = pick(spans(rows, "trained", "duplicate", "untrainable"))
    row["spans"].insert(row["spans"].index(span), dict(span))
    return Planted("span_place", row, span["start"], span["turn_index"])


@planted
def spans_swapped(rows, pick):
    row = pick([r for r in rows if len(r["spans"]) > 1])
    row["spans"].reverse()
    return Planted("span_place", row, row["spans"][1]["start"])


@planted
def piece_not_said(rows, pick):
    """The mask trains a reply that no piece names."""
    row, span = pick(spans(rows, "trained"))
    row["spans"].remove(span)
    return Planted("mask", row, span["start"])


@planted
def half_trained(rows, pick):
    row, span = pick(
        [(r, s) for r, s in spans(rows, "trained") if s["stop"] - s["start"] > 1]
    )
    row["loss_mask"][span["stop"] - 1] = False
    row["logprobs"][span["stop"] - 1] = None
    span["stop"] -= 1
    span["output_stop"] -= 1
    return not_trained(row, span["output_stop"], span["turn_index"])


@planted
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


@planted
def row_twice(rows, pick):
    row = pick([r for r in rows if any(r["loss_mask"])])
    same = [r for r in rows if r["session_id"] == row["session_id"]]
    again = {**copy.deepcopy(row), "row_index": len(same)}
    rows.insert(rows.index(same[-1]) + 1, again)
    return Planted("trained_twice", again, row["loss_mask"].index(True))


@planted
def last_row_missing(rows, pick):
    last = {row["session_id"]: row for row in rows}
    row = pick([r for r in last.values() if any(r["loss_mask"])])
    rows.remove(row)
    span = next(s for s in row["spans"] if s["kind"] == "trained")
    return not_trained(row, span["output_start"], span["turn_index"])


@planted
def middle_row_missing(rows, pick):
    group = pick(siblings(rows))
    at = pick(list(range(len(group) - 1)))
    rows.remove(group[at])
    return Planted("row_index", group[at + 1])


@planted
def rows_swapped(rows, pick):
    group = pick(siblings(rows))
    at = pick(list(range(len(group) - 1)))
    a, b = rows.index(group[at]), rows.index(group[at + 1])
    rows[a], rows[b] = rows[b], rows[a]
    return Planted("row_index", group[at])


@planted
def parent_row_other(rows, pick):
    row = pick([r for r in rows if r["row_index"]])
    known = set(range(row["row_index"])) | {None}
    row["parent_row"] = pick(sorted(known - {row["parent_row"]}, key=str))
    return Planted("parent_row", row)


@planted
def weights_of_rows(rows, pick):
    """One for each row, as where a batch is weighed and not a rollout."""
    groups = [[r for r in g if any(r["loss_mask"])] for g in siblings(rows)]
    group = pick([g for g in groups if len(g) > 1])
    for row in group:
        row["row_weight"] = 1.0
    return Planted("row_weight", pick(group))


@planted
def session_of_nobody(rows, pick):
    row = pick(rows)
    row["session_id"] = "nobody"
    return Planted("session", row)


@planted
def session_in_pieces(rows, pick):
    group = pick(siblings(rows))
    if rows[-1] is group[-1]:
        rows.insert(0, rows.pop())
        return Planted("session", group[0])
    rows.remove(group[-1])
    rows.append(group[-1])
    return Planted("session", group[-1])


@planted_more
def lost_span_moved(rows, pick):
    row, span = pick([(r, s) for r, s in spans(rows, "absorbed", "cut") if s["start"]])
    span["start"] -= 1
    span["stop"] -= 1
    return Planted("span_place", row, span["start"])


@planted_more
def lost_span_missing(rows, pick):
    row, span = pick(spans(rows, "absorbed", "cut", "no_splice_point"))
    row["spans"].remove(span)
    return Planted("policy", row)


@planted_more
def lost_range_shorter(rows, pick):
    row, span = pick(
        [
            (r, s)
            for r, s in spans(rows, "absorbed", "cut", "no_splice_point")
            if s["output_stop"] - s["output_start"] > 1
        ]
    )
    span["output_stop"] -= 1
    return Planted("policy", row)


@planted_more
def context_called_trained(rows, pick):
    row, span = pick(spans(rows, "duplicate", "untrainable"))
    span["kind"] = "trained"
    train(row, span, True)
    return Planted("trained_twice", row, span["start"])


@planted_more
def last_token_missing(rows, pick):
    row = pick([r for r in rows if len(r["input_ids"]) > 1 and not r["loss_mask"][-1]])
    for name in ("input_ids", "loss_mask", "logprobs"):
        row[name].pop()
    return Planted("row_tokens", row)


@planted_more
def token_appended(rows, pick):
    row = pick(rows)
    for name, value in (("input_ids", 5), ("loss_mask", False), ("logprobs", None)):
        row[name].append(value)
    return Planted("row_tokens", row)


def of_column(column, value, where, token, rule):
    """A fault that changes one value of a row."""

    def fault(rows, pick):
        row = pick([one for one in rows if where(one)])
        before = row[column]
        row[column] = value(row)
        at = {None: None, "new": row[column], "old": before}[token]
        return Planted(rule or column, row, at)

    return fault


def always(row):
    return True


def has_weight(row):
    return row["row_weight"] is not None


def is_shared(row):
    return row["shared_length"]


# name: column, its new value, the rows that have a place, the token named, the rule
for name, of in {
    "ill_formed_hidden": (
        *("ill_formed", lambda r: False),
        *(lambda r: r["ill_formed"] and is_rich(r), None, "flags"),
    ),
    "use_tool_made_up": ("use_tool", lambda r: True, is_rich, None, "flags"),
    "prompt_longer": (
        *("prompt_length", lambda r: r["spans"][0]["start"] + 1),
        *(lambda r: r["spans"], "new", None),
    ),
    "last_turn_not_listed": ("turns", lambda r: r["turns"][:-1], always, None, None),
    "other_turn_listed": (
        *("turns", lambda r: [10_000, *r["turns"]], always, None, None),
    ),
    "index_skipped": ("row_index", lambda r: r["row_index"] + 100, always, None, None),
    "prompt_negative": ("prompt_length", lambda r: -1, always, "new", None),
    "shared_length_more": (
        *("shared_length", lambda r: r["shared_length"] + 1, always, "old", None),
    ),
    "shared_length_less": (
        *("shared_length", lambda r: r["shared_length"] - 1, is_shared, "new", None),
    ),
    "parent_row_none": ("parent_row", lambda r: None, is_shared, None, None),
    "parent_row_itself": ("parent_row", lambda r: r["row_index"], always, None, None),
    "weight_changed": (
        *("row_weight", lambda r: r["row_weight"] + 1e-6, has_weight, None, None),
    ),
    "weight_null": ("row_weight", lambda r: None, has_weight, None, None),
    "sum_changed": (
        *("rollout_mask_sum", lambda r: r["rollout_mask_sum"] + 1, always, None, None),
    ),
    "reward_changed": ("reward", lambda r: 0.5, always, None, None),
    "reward_null": ("reward", lambda r: None, always, None, None),
    "group_changed": ("group_id", lambda r: "another", always, None, None),
    "finish_reason_changed": ("finish_reason", lambda r: "another", always, None, None),
    "truncated_flipped": (
        *("truncated", lambda r: not r["truncated"], always, None, "flags"),
    ),
    "weights_made_up": (
        *("weight_versions", lambda r: {"first": "none", "last": "none"}),
        *(always, None, None),
    ),
}.items():
    planted(of_column(*of)).__name__ = name
for name, of in {
    "prompt_shorter": (
        *("prompt_length", lambda r: r["prompt_length"] - 1),
        *(lambda r: r["prompt_length"], "new", None),
    ),
    "last_turn_changed": (
        *("last_turn", lambda r: r["last_turn"] + 1, always, None, "turns"),
    ),
    "segment_changed": (
        *("segment_kind", lambda r: None if r["segment_kind"] else "final"),
        *(always, None, "policy"),
    ),
    "flag_null": ("truncated", lambda r: None, always, None, "flags"),
}.items():
    planted_more(of_column(*of)).__name__ = name


def planted_in(policy, n_places=2):
    """Rows with faults, their turns, and the fault of each session."""
    turns = turns_table([*generated_runs(150, seed=3), *RICH, *CLEAN])
    rows = by_session(tk.linearize(turns, policy, sessions=facts_of(turns)).to_pylist())
    lines = by_session(turns.to_pylist())
    faulty, called, sessions = [], [], {}
    for fault in [*FAULTS, *MORE]:
        if fault is session_in_pieces:
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


def missed_in(policy, *, named=True):
    """The number of planted faults, and those that `verify` does not find.

    ``named``: whether `verify` is given the policy.
    """
    rows, turns, sessions = planted_in(policy)
    found = tk.verify(
        rows, turns, policy if named else None, sessions=facts_of(turns)
    ).to_pylist()
    wrong = {one["session_id"] for one in found}
    assert wrong <= {*sessions, "nobody"}, "a session without a fault"
    # their rows are those of a session without turns
    spared = {name for name in sessions if name.startswith("session_of_nobody")}
    missed = [sessions[name] for name in sessions if name not in wrong | spared]
    return len(sessions), missed


def main():
    for named in (True, False):
        total, lost = 0, 0
        for policy in PRESETS:
            n, missed = missed_in(policy, named=named)
            total, lost = total + n, lost + len(missed)
            line = f"{policy:10} {n - len(missed):4} of {n:4}"
            sys.stdout.write(" ".join([line, *missed]) + "\n")
        how = "with the policy" if named else "without a policy"
        sys.stdout.write(f"{how}: {total - lost} of {total}\n")


if __name__ == "__main__":
    main()
