"""`check_rows`: what a trainer trains, compared with what was sampled."""

from bisect import bisect_left, bisect_right
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from trajkit.analysis.sampled_tokens import output_spans
from trajkit.analysis.words import count
from trajkit.policies import Policy
from trajkit.policies import policy as named_policy
from trajkit.schema import ROW_CHECKS
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import TableLike
from trajkit.tables.ragged import Array, Bools, Ints, Longs, positions
from trajkit.turns.flat_buffers import TurnTokens, flat_turns, sessions_of
from trajkit.turns.records import as_turns
from trajkit.turns.sessions import Sessions
from trajkit.turns.trainability import aborted_calls
from trajkit.verification.context import consecutive
from trajkit.verification.foreign_rows import TOLERANCE, Sampled
from trajkit.verification.row_forms import plain_rows

# sessions of equal beginning that are tried for a row, among so many turns on either side
_MOST_SESSIONS, _NEAR = 32, 4096
# by how many tokens a mask or logprobs may be shifted
_SHIFTS = (-1, 1, -2, 2)
_SIDES = ("right", "left")


def check_rows(
    rows: object, turns: TableLike, policy: str | Policy | None = None
) -> pa.Table:
    """Say what rows of any trainer train of what was sampled, row by row.

    Rows are found in the turns by their tokens, so they need no ids of sessions.

    Parameters
    ----------
    rows : table, dict of columns, list of dicts or of objects
        Rows of trajkit, or of a trainer, as lists or padded tensors: ``input_ids`` and
        ``loss_mask`` (or ``labels``), or the columns of verl, slime, TRL or OpenRLHF
        (docs/check.md). A mask that is shorter than the row is that of its end. Logprobs
        are optional.
    turns : table
        `trajkit.schema.TURNS` in full or delta form.
    policy : str or Policy, optional
        What this policy loses is not missing, and what it trains in several rows or out of
        context is not wrong. None: every sampled token that may be trained is expected to
        be trained once, after the tokens it was sampled after.

    Returns
    -------
    Table
        `trajkit.schema.ROW_CHECKS`: for each row what it trains of each turn, and what is
        wrong with it; then sampled tokens that no row trains.

    Raises
    ------
    SchemaError
        Rows have no column of ids, or none of a mask.

    Examples
    --------
    >>> import trajkit as tk
    >>> turns = tk.from_records(
    ...     [{"session_id": "a", "prompt_ids": [1, 2], "output_ids": [3, 4]}]
    ... )
    >>> rows = {"input_ids": [[1, 2, 3, 4]], "loss_mask": [[0, 1, 1, 0]]}
    >>> for line in tk.check_rows(rows, turns)["detail"].to_pylist():
    ...     print(line)
    trains 2 of 2 tokens of turn 0, if its mask is shifted right by 1
    the mask is shifted left by 1: it trains the token before each sampled one
    """
    table, plain = as_turns(turns), plain_rows(rows)
    check = _Check(table, None if policy is None else named_policy(policy))
    for row in range(plain.num_rows):
        check.row(row, {name: plain[name][row] for name in plain.column_names})
    check.absent()
    return pa.Table.from_pylist(check.lines, ROW_CHECKS)


class _Check:
    """The turns, and the lines about rows so far."""

    def __init__(self, table: pa.Table, policy: Policy | None) -> None:
        calls = Sessions.of(table)
        self.turns = flat_turns(calls)
        self.outputs, self.owner = self.turns.outputs, self.turns.outputs.owner
        every = range(calls.n_calls)
        self.sessions = {name: k for k, name in enumerate(calls.ids.to_pylist())}
        # the paths as bytes that compare like their tokens, sorted, and their calls
        paths = [_key(np.append(self.turns.prompts[k], self.outputs[k])) for k in every]
        self.order = np.array(sorted(every, key=paths.__getitem__), np.int64)
        self.keys = [paths[k] for k in self.order.tolist()]
        may = calls.calls["trainable"].astype(np.bool_) & ~aborted_calls(calls)
        # By sampled token, and as the last element for a token that nobody sampled:
        # whether it may be trained, and the first row that has it without training it,
        # and where.
        self.may = np.append(may[self.owner] & self.turns.unmasked, True)
        self.left_by, self.left_at = np.full((2, len(self.may)), -1)
        due = self.may[:-1]
        if policy is not None:
            due = due & ~_lost(self.turns, output_spans(table, policy))
        self.sampled = Sampled(self.turns, due)
        self.repeats = policy is not None and policy.train_in == "every"
        self.splices = policy is not None and policy.on_drift == "splice"
        self.lines: list[dict[str, Any]] = []
        # what lines about the current row have; the sessions that have a row
        self.place: dict[str, Any] = {}
        self.seen: set[str] = set()

    def add(self, kind: str, detail: str, **more: Any) -> None:
        """Add a line."""
        self.lines.append({"kind": kind, "detail": detail, **self.place, **more})

    def row(self, row: int, given: dict[str, Any]) -> None:
        """Add the lines of a row of `plain_rows`."""
        ids = given["input_ids"].values.to_numpy()
        mask = given["loss_mask"].values.to_numpy(zero_copy_only=False)
        if not len(ids):
            return
        self.place, name = {"row": row}, given["session_id"].as_py()
        named = name in self.sessions
        sessions, dropped = ([self.sessions[name]], 0) if named else self._like(ids)
        ids, mask, logprobs = ids[dropped:], mask[dropped:], None
        first = given["padding"].as_py() + dropped
        if given["logprobs"].is_valid:
            logprobs = given["logprobs"].values.fill_null(np.nan).to_numpy()[dropped:]
        tries = []
        for k in sessions:
            calls = self.turns.calls_of(k)
            found = self.sampled.find(ids, calls, mask, everywhere=True)
            if found[2]:
                tries.append((int((mask & (found[0] >= 0)).sum()), k, *found[:2]))
        if not tries:
            n, where = int(mask.sum()), f" of session {name!r}" if named else ""
            words = f"{count(n)} trained, and no turn{where} begins like it"
            self.add("not_found", words, tokens=n)
            return
        _, session, source, in_context = max(tries, key=itemgetter(0))
        self.place["session_id"] = name = self.turns.calls.ids[session].as_py()
        self.seen.add(name)
        sampled, may = source >= 0, self.may[source]
        shift = _shift_of(mask, sampled & may)
        moved = _shifted(mask, shift)
        trained = moved & sampled
        self._trains(row, source[trained], in_context[trained], shift)
        if shift:
            which = "before" if shift > 0 else "after"
            words = (
                f"the mask is shifted {_SIDES[shift > 0]} by {abs(shift)}: it trains the "
                f"token {which} each sampled one"
            )
            token, n = first + int(mask.argmax()), int((mask != moved).sum())
            self.add("mask_shifted", words, token=token, tokens=n)
        for kind, words, wrong in (
            ("not_sampled", "that nobody sampled", mask & ~sampled),
            ("untrainable", "of a turn that may not be trained", mask & ~may),
        ):
            at = np.flatnonzero(wrong & (shift == 0))
            for k, n in consecutive(at):
                shown = " ".join(map(str, ids[at[k] :][: min(n, 4)].tolist()))
                detail = f"trains {count(n)} {words}: {shown}{' ...' if n > 4 else ''}"
                self.add(kind, detail, token=first + int(at[k]), tokens=n)
        # `absent` reports those that no other row trains
        at = np.flatnonzero(sampled & ~moved & (self.left_by[source] < 0))
        self.left_by[source[at]], self.left_at[source[at]] = row, first + at
        if logprobs is not None:
            self._logprobs(logprobs, source, np.flatnonzero(trained), first)

    def _like(self, ids: Ints) -> tuple[list[int], int]:
        """The sessions of the paths that share most with a row, and tokens to leave out.

        Equal tokens at its start are padding if paths share more without them.
        """
        run = int(np.argmax(ids != ids[0]))
        tries = [(k, *self._nearest(ids[k:])) for k in (0, run - 1, run) if k >= 0]
        dropped, _, sessions = max(tries, key=lambda one: one[1])
        return sessions, dropped

    def _nearest(self, ids: Ints) -> tuple[int, list[int]]:
        """How many tokens some paths share with a row, and the first of their sessions."""
        key = _key(ids)
        at = bisect_left(self.keys, key)
        next_to = self.order[max(at - 1, 0) : at + 1].tolist()
        most = max((self.turns.shared(ids, k) for k in next_to), default=0)
        if most == 0:
            return 0, []
        n = most * ids.itemsize
        start = bisect_left(self.keys, key[:n], key=lambda path: path[:n])
        stop = bisect_right(self.keys, key[:n], key=lambda path: path[:n])
        near = self.order[max(start, at - _NEAR) : min(stop, at + _NEAR)]
        return most, np.unique(self.turns.calls.session[near])[:_MOST_SESSIONS].tolist()

    def _trains(self, row: int, source: Longs, in_context: Bools, shift: int) -> None:
        """Which turn trains what, and what an earlier row trains too."""
        again, owner, note = self.sampled.train(row, source), self.owner[source], ""
        if shift:
            note = f", if its mask is shifted {_SIDES[shift < 0]} by {abs(shift)}"
        for call in dict.fromkeys(owner.tolist()):
            mine, of = owner == call, count(len(self.outputs[call]))
            turn, n = int(self.turns.calls.turn_index[call]), int(mine.sum())
            words = f"trains {n} of {of} of turn {turn}{note}"
            self.add("trains", words, turn_index=turn, tokens=n)
            twice = again[mine & (again >= 0)]
            if len(twice) and not self.repeats:
                words = (
                    f"{count(len(twice))} of turn {turn} that row {twice[0]} trains too"
                )
                self.add("trained_twice", words, turn_index=turn, tokens=len(twice))
            n = int((mine & ~in_context).sum())
            if n and not self.splices:
                words = f"{count(n)} of turn {turn} after other tokens than it saw"
                self.add("out_of_context", words, turn_index=turn, tokens=n)

    def _logprobs(self, logprobs: Array, source: Longs, at: Longs, first: int) -> None:
        """Logprobs that are not the engine's, or those of a token before or after."""
        at = at[self.turns.given[source[at]]]
        due = self.turns.logprobs[source[at]]

        def right(shift: int) -> Bools:
            there = (at + shift).clip(0, len(logprobs) - 1)
            here = np.where(there == at + shift, logprobs[there], np.nan)
            same: Bools = np.abs(here - due) <= TOLERANCE * np.maximum(1, np.abs(due))
            return same

        good = int(right(0).sum())
        if good == len(at):
            return
        # a shift loses a value at an end of each range
        ranges = 1 + int((np.diff(at) > 1).sum())
        for shift in _SHIFTS if len({*due.tolist()}) > 1 else ():
            n = int(right(shift).sum())
            least = max(len(at) - ranges * abs(shift), len(at) // 2 + 1, good + 1)
            if n >= least:
                words = f"the logprobs are shifted {_SIDES[shift < 0]} by {abs(shift)}"
                self.add("logprobs_shifted", words, token=first + int(at[0]), tokens=n)
                return
        k, n = int(right(0).argmin()), len(at) - good
        words = (
            f"{n} of {count(len(at))} have another logprob than the engine's: the first "
            f"{logprobs[at[k]]:.4g}, expected {due[k]:.4g}"
        )
        self.add("logprobs", words, token=first + int(at[k]), tokens=n)

    def absent(self) -> None:
        """Add the sampled tokens that no row trains."""
        self.place = {}
        calls, owner = self.turns.calls, self.owner
        without = np.array([name not in self.seen for name in self.sessions], np.bool_)
        without_rows = without[calls.session[owner]]
        if without.any():
            words = f"{int(without.sum())} of {len(without)} sessions have no row"
            self.add("session_without_rows", words, tokens=int(without_rows.sum()))
        missing = (self.sampled.due & (self.sampled.trained_by < 0))[:-1]
        at = np.flatnonzero(missing & ~without_rows)
        row, token = self.left_by[at], self.left_at[at]
        for k, n in consecutive(at, owner[at], row >= 0):
            call = int(owner[at[k]])
            turn, of = int(calls.turn_index[call]), count(len(self.outputs[call]))
            name = calls.ids[int(calls.session[call])].as_py()
            place = {"session_id": name, "turn_index": turn, "tokens": n}
            kind, words = "in_no_row", f"{n} of {of} of turn {turn} are in no row"
            if row[k] >= 0:
                kind, words = "masked_out", f"does not train {n} of {of} of turn {turn}"
                place |= {"row": int(row[k]), "token": int(token[k])}
            self.add(kind, words, **place)


def _key(ids: Array) -> bytes:
    return ids.astype(">u4").tobytes()


def _lost(turns: TurnTokens, spans: pa.Table) -> Bools:
    """Sampled tokens that a policy does not train, from its `output_spans`."""
    spans = spans.filter(pc.not_equal(spans["kind"].cast(pa.string()), "trained"))
    turn, start, stop = (
        spans[name].to_numpy() for name in ("turn_index", "output_start", "output_stop")
    )
    calls = turns.calls.named(sessions_of(spans, turns.calls), turn)
    lost = np.zeros(len(turns.outputs.values), np.bool_)
    lost[positions(turns.outputs.offsets[calls] + start, stop - start)] = True
    return lost


def _shifted(mask: Bools, shift: int) -> Bools:
    """The mask moved to the right by ``shift`` tokens."""
    moved = np.roll(mask, shift)
    moved[slice(shift) if shift >= 0 else slice(len(mask) + shift, None)] = False
    return moved


def _shift_of(mask: Bools, due: Bools) -> int:
    """By how many tokens a mask has to move to train sampled tokens only.

    0 if it does so as it is, or if no shift makes it right.
    """
    missed = int((due & ~mask).sum())
    for shift in _SHIFTS if (mask & ~due).any() and due.any() else ():
        moved = _shifted(mask, shift)
        if not (moved & ~due).any() and int((due & ~moved).sum()) < missed:
            return shift
    return 0
