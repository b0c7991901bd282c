"""`check_rows`: what a trainer trains, compared with what was sampled."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from trajkit.analysis.sampled_tokens import output_spans
from trajkit.analysis.words import count
from trajkit.policies import Policy
from trajkit.policies import policy as named_policy
from trajkit.schema import ROW_CHECKS
from trajkit.schema.engine import Bools
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import TableLike
from trajkit.tables.ragged import positions
from trajkit.turns.flat_buffers import TurnTokens, flat_turns, sessions_of
from trajkit.turns.records import as_turns
from trajkit.turns.sessions import Sessions
from trajkit.turns.trainability import aborted_calls
from trajkit.verification.context import consecutive
from trajkit.verification.row_forms import Array, plain_rows

# tokens of a prompt that must precede an output found elsewhere in a row, and sessions of
# equal beginning that are tried for a row
_PROMPT_END, _MOST_SESSIONS = 16, 32
# Engines and trainers write logprobs with 32 or 16 bits.
_TOLERANCE = 1e-2
# by how many tokens a mask or logprobs may be shifted
_SHIFTS = (-1, 1, -2, 2)


def check_rows(
    rows: object, turns: TableLike, policy: str | Policy | None = None
) -> pa.Table:
    """Say what rows of any trainer train of what was sampled, row by row.

    Rows are found in the turns by their tokens, so they need no ids of sessions.

    Parameters
    ----------
    rows : table, dict of columns, list of dicts or of objects
        Rows of trajkit, or of a trainer: ``input_ids`` and ``loss_mask`` (or ``labels``);
        verl's ``prompts``, ``responses`` and ``response_mask``; slime's ``tokens``,
        ``response_length`` and ``loss_mask``; TRL's ``prompt_ids``, ``completion_ids``
        and ``completion_mask``; OpenRLHF's ``sequences`` and ``action_mask``. Columns are
        lists or padded tensors with an ``attention_mask``. A mask that is shorter than the
        row is that of its end. Logprobs are optional.
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
    table = as_turns(turns)
    plain = plain_rows(rows)
    chosen = None if policy is None else named_policy(policy)
    check = _Check(_Turns.of(table), plain, chosen)
    for row in range(plain.num_rows):
        check.row(row)
    check.absent(None if chosen is None else output_spans(table, chosen))
    return pa.Table.from_pylist(check.lines, ROW_CHECKS)


@dataclass(slots=True)
class _Turns:
    """The turns, and their paths in the order of their tokens."""

    tokens: TurnTokens
    # the paths as bytes that compare like their tokens, sorted, and their calls
    keys: list[bytes]
    order: list[int]
    session_of: Array
    may_train: Bools

    @classmethod
    def of(cls, table: pa.Table) -> "_Turns":
        calls = Sessions.of(table)
        tokens = flat_turns(calls)
        n = len(tokens.outputs)
        keys = [
            _key(np.concatenate([tokens.prompts[k], tokens.outputs[k]]))
            for k in range(n)
        ]
        order = sorted(range(n), key=keys.__getitem__)
        may = calls.calls["trainable"].astype(np.bool_) & ~aborted_calls(calls)
        return cls(
            tokens,
            [keys[k] for k in order],
            order,
            np.repeat(np.arange(len(calls.ids)), np.diff(calls.offsets)),
            may[tokens.outputs.owner] & tokens.unmasked,
        )

    def name(self, session: int) -> str:
        """The id of a session."""
        return str(self.tokens.calls.ids[session].as_py())

    def number(self, call: int) -> int:
        """The ``turn_index`` of a call."""
        return int(self.tokens.calls.turn_index[call])

    def nearest(self, ids: Array) -> list[int]:
        """The sessions of the paths that share most with a row, the earliest first."""
        key = _key(ids)
        at = bisect_left(self.keys, key)
        shared = [
            (self.tokens.shared(ids, self.order[k]), k)
            for k in (at - 1, at)
            if 0 <= k < len(self.keys)
        ]
        most = max((n for n, _ in shared), default=0)
        if most == 0:
            return []
        found: dict[int, bool] = {}
        for step in (-1, 1):
            k = at - 1 if step < 0 else at
            while 0 <= k < len(self.keys) and len(found) < _MOST_SESSIONS:
                if self.tokens.shared(ids, self.order[k]) < most:
                    break
                found[int(self.session_of[self.order[k]])] = True
                k += step
        return sorted(found)


def _key(ids: Array) -> bytes:
    return ids.astype(">u4").tobytes()


class _Sampled(NamedTuple):
    """Which token of a row is which sampled token, or -1; a position in all outputs."""

    source: Array
    # by token: whether it follows the prompt that it was sampled after
    in_context: Bools
    # the complete prompt of some turn begins the row
    found: bool


@dataclass
class _Check:
    """The lines about rows so far."""

    turns: _Turns
    rows: pa.Table
    policy: Policy | None
    lines: list[dict[str, Any]] = field(default_factory=list)
    # by sampled token: the first row that has it without training it, and its position
    left_out: dict[int, tuple[int, int]] = field(default_factory=dict)
    # sessions that have a row
    seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        n = len(self.turns.tokens.outputs.values)
        # by sampled token: the row that trains it first, and the first row that has it
        self.trained_by, self.held_by = np.full((2, n), -1)
        names = self.turns.tokens.calls.ids.to_pylist()
        self.known = {name: k for k, name in enumerate(names)}
        # what lines about the current row have
        self.place: dict[str, Any] = {}

    def add(self, kind: str, detail: str, **more: Any) -> None:
        """Add a line."""
        self.lines.append({"kind": kind, "detail": detail, **self.place, **more})

    def row(self, row: int) -> None:
        """Add the lines of a row."""
        ids = np.asarray(self.rows["input_ids"][row].values)
        mask = self.rows["loss_mask"][row].values.to_numpy(zero_copy_only=False)
        named = self.rows["session_id"][row].as_py()
        self.place, dropped = {"row": row}, 0
        if named in self.known:
            sessions = [self.known[named]]
        else:
            sessions, dropped = self._sessions_of(ids)
        ids, mask = ids[dropped:], mask[dropped:]
        first = self.rows["padding"][row].as_py() + dropped
        tries = [(self._locate(ids, one), one) for one in sessions]
        if not len(ids):
            return
        if not any(one.found for one, _ in tries):
            where = f" of session {named!r}" if named in self.known else ""
            n = int(mask.sum())
            words = f"{count(n)} trained, and no turn{where} begins like it"
            self.add("not_found", words, tokens=n)
            return
        sampled, session = max(
            tries, key=lambda one: int((mask & (one[0].source >= 0)).sum())
        )
        name = self.turns.name(session)
        self.place["session_id"] = name
        self.seen.add(name)
        source = sampled.source
        shift = _shift_of(mask, (source >= 0) & self._may(source))
        moved = _shifted(mask, shift)
        held = source[source >= 0]
        self.held_by[held] = np.where(self.held_by[held] < 0, row, self.held_by[held])
        self._trains(row, sampled, moved, shift)
        if shift:
            side, which = ("left", "before") if shift > 0 else ("right", "after")
            words = (
                f"the mask is shifted {side} by {abs(shift)}: it trains the token {which} "
                "each sampled one"
            )
            at, n = first + int(mask.argmax()), int((mask != moved).sum())
            self.add("mask_shifted", words, token=at, tokens=n)
        else:
            self._not_sampled(ids, mask, source, first)
        # `absent` reports those that no other row trains
        for k in np.flatnonzero((source >= 0) & ~moved).tolist():
            self.left_out.setdefault(int(source[k]), (row, first + k))
        value = self.rows["logprobs"][row]
        if value.is_valid:
            logprobs = value.values.fill_null(float("nan")).to_numpy()[dropped:]
            self._logprobs(logprobs, source, moved, first)

    def _sessions_of(self, ids: Array) -> tuple[list[int], int]:
        """The sessions that a row may be of, and the tokens of padding before it."""
        found = self.turns.nearest(ids)
        run = int(np.argmax(ids != ids[0])) if len(ids) and (ids != ids[0]).any() else 0
        best = self._depth(ids, found)
        dropped = 0
        for left in {run, run - 1} - {0, -1}:
            others = self.turns.nearest(ids[left:])
            depth = self._depth(ids[left:], others)
            if depth > best:
                found, best, dropped = others, depth, left
        return found, dropped

    def _depth(self, ids: Array, sessions: list[int]) -> int:
        tokens = self.turns.tokens
        return max(
            (tokens.shared(ids, k) for one in sessions for k in tokens.calls_of(one)),
            default=0,
        )

    def _locate(self, ids: Array, session: int) -> _Sampled:
        """Where the outputs of a session are in a row."""
        tokens = self.turns.tokens
        source = np.full(len(ids), -1, np.int64)
        in_context = np.zeros(len(ids), np.bool_)
        missing = []
        places: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for call in tokens.calls_of(session):
            n_prompt = len(tokens.prompts[call])
            stop = tokens.shared(ids, call)
            if n_prompt and stop >= min(n_prompt, len(ids)):
                places[n_prompt].append((call, stop))
            else:
                missing.append(call)
        found = bool(places)
        for start in sorted(places):
            # of replies to one prompt: a complete one, that may be trained, that no row
            # trains yet, the longest
            ranked = sorted(places[start], key=lambda one: self._likely(start, *one))
            for k, (call, stop) in enumerate(reversed(ranked)):
                first = int(tokens.outputs.offsets[call])
                here = source[start:stop]
                complete = k == 0 and stop - start == len(tokens.outputs[call])
                free = np.ones(len(here), np.bool_) if complete else here < 0
                here[free] = np.arange(first, first + len(here))[free]
                in_context[start:stop] |= free
        row = ids.tobytes()
        for call in missing:
            for at in _places(row, tokens.prompts[call], tokens.outputs[call]):
                here = source[at : at + len(tokens.outputs[call])]
                if (here < 0).all():
                    start = int(tokens.outputs.offsets[call])
                    here[:] = np.arange(start, start + len(here))
                    in_context[at : at + len(here)] = not len(tokens.prompts[call])
                    found = True
                    break
        return _Sampled(source, in_context, found)

    def _likely(self, start: int, call: int, stop: int) -> tuple[bool, bool, bool, int]:
        """How likely tokens ``start:stop`` of a row are those of a reply."""
        outputs = self.turns.tokens.outputs
        mine = slice(outputs.offsets[call], outputs.offsets[call] + stop - start)
        complete = stop - start == len(outputs[call])
        may = bool(self.turns.may_train[mine].all())
        fresh = bool((self.trained_by[mine] < 0).all())
        return complete, may, fresh, stop - start

    def _may(self, source: Array) -> Bools:
        """Whether sampled tokens may be trained; True where there is none."""
        if not len(self.turns.may_train):
            return np.ones(len(source), np.bool_)
        may: Bools = np.where(source >= 0, self.turns.may_train[source], True)
        return may

    def _trains(self, row: int, sampled: _Sampled, mask: Bools, shift: int) -> None:
        """Which turn trains what, and what an earlier row trains too."""
        outputs, policy = self.turns.tokens.outputs, self.policy
        trained = mask & (sampled.source >= 0)
        source, in_context = sampled.source[trained], sampled.in_context[trained]
        again, owner = self.trained_by[source], outputs.owner[source]
        side = "right" if shift > 0 else "left"
        note = f", if its mask is shifted {side} by {abs(shift)}" if shift else ""
        for call in dict.fromkeys(owner.tolist()):
            mine = owner == call
            n, of = int(mine.sum()), int(outputs.lengths[call])
            turn = self.turns.number(call)
            words = f"trains {n} of {count(of)} of turn {turn}{note}"
            self.add("trains", words, turn_index=turn, tokens=n)
            twice = again[mine & (again >= 0)]
            if len(twice) and not (policy and policy.train_in == "every"):
                n = len(twice)
                words = f"{count(n)} of turn {turn} that row {twice[0]} trains too"
                self.add("trained_twice", words, turn_index=turn, tokens=n)
            n = int((mine & ~in_context).sum())
            if n and not (policy and policy.on_drift == "splice"):
                words = f"{count(n)} of turn {turn} after other tokens than it saw"
                self.add("out_of_context", words, turn_index=turn, tokens=n)
        self.trained_by[source] = np.where(again < 0, row, again)

    def _not_sampled(self, ids: Array, mask: Bools, source: Array, first: int) -> None:
        """Trained tokens that no turn sampled, or that may not be trained."""
        for kind, wrong, words in (
            ("not_sampled", mask & (source < 0), "that nobody sampled"),
            (
                "untrainable",
                mask & ~self._may(source),
                "of a turn that may not be trained",
            ),
        ):
            at = np.flatnonzero(wrong)
            for k, n in consecutive(at, np.zeros(len(at), np.int64)):
                shown = " ".join(map(str, ids[at[k] : at[k] + min(n, 4)].tolist()))
                more = " ..." if n > 4 else ""
                detail = f"trains {count(n)} {words}: {shown}{more}"
                self.add(kind, detail, token=first + int(at[k]), tokens=n)

    def _logprobs(
        self, logprobs: Array, source: Array, mask: Bools, first: int
    ) -> None:
        """Logprobs that are not the engine's, or those of a token before or after."""
        tokens = self.turns.tokens
        at = np.flatnonzero(mask & (source >= 0))
        at = at[tokens.given[source[at]]]
        due = tokens.logprobs[source[at]]

        def right(shift: int) -> Bools:
            there = (at + shift).clip(0, len(logprobs) - 1)
            here = np.where(there == at + shift, logprobs[there], np.nan)
            same: Bools = np.abs(here - due) <= _TOLERANCE * np.maximum(1, np.abs(due))
            return same

        if not len(at) or right(0).all():
            return
        good = int(right(0).sum())
        # a shift loses a value at an end of each range
        ranges = 1 + int((np.diff(at) > 1).sum())
        for shift in _SHIFTS:
            n = int(right(shift).sum())
            least = max(len(at) - ranges * abs(shift), len(at) // 2 + 1, good + 1)
            if n >= least and len({*due.tolist()}) > 1:
                side = "left" if shift < 0 else "right"
                words = f"the logprobs are shifted {side} by {abs(shift)}"
                token = first + int(at[0])
                self.add("logprobs_shifted", words, token=token, tokens=n)
                return
        k, n = int(right(0).argmin()), len(at) - good
        words = (
            f"{n} of {count(len(at))} have another logprob than the engine's: the first "
            f"{logprobs[at[k]]:.4g}, expected {due[k]:.4g}"
        )
        self.add("logprobs", words, token=first + int(at[k]), tokens=n)

    def absent(self, excused: pa.Table | None) -> None:
        """Add the sampled tokens that no row trains."""
        tokens, self.place = self.turns.tokens, {}
        outputs, names = tokens.outputs, tokens.calls.ids.to_pylist()
        session_of = self.turns.session_of[outputs.owner]
        without = np.array([name not in self.seen for name in names], np.bool_)
        if without.any():
            words = f"{int(without.sum())} of {len(names)} sessions have no row"
            n = int(without[session_of].sum())
            self.add("session_without_rows", words, tokens=n)
        missing = (self.trained_by < 0) & self.turns.may_train & ~without[session_of]
        if excused is not None:
            lost = _lost(tokens, excused)
            missing &= ~(lost | self._of_equal(lost & (self.trained_by >= 0)))
        at = np.flatnonzero(missing)
        in_row = self.held_by[at] >= 0
        for k, n in consecutive(at, outputs.owner[at] * 2 + in_row):
            call, source = int(outputs.owner[at[k]]), int(at[k])
            turn, of = self.turns.number(call), count(int(outputs.lengths[call]))
            name = names[self.turns.session_of[call]]
            place = {"session_id": name, "turn_index": turn, "tokens": n}
            if in_row[k] and source in self.left_out:
                row, token = self.left_out[source]
                words = f"does not train {n} of {of} of turn {turn}"
                self.add("masked_out", words, row=row, token=token, **place)
            else:
                self.add(
                    "in_no_row", f"{n} of {of} of turn {turn} are in no row", **place
                )

    def _of_equal(self, chosen: Bools) -> Bools:
        """The tokens of equal calls, such as retries, at the places of chosen ones."""
        tokens = self.turns.tokens
        groups: dict[tuple[int, int, bytes], list[int]] = defaultdict(list)
        for key, call in zip(self.turns.keys, self.turns.order, strict=True):
            session = int(self.turns.session_of[call])
            groups[session, len(tokens.prompts[call]), key].append(call)
        found = np.zeros(len(chosen), np.bool_)
        for calls in groups.values():
            if len(calls) > 1:
                starts = tokens.outputs.offsets[calls]
                n = int(tokens.outputs.lengths[calls[0]])
                at = starts[:, None] + np.arange(n)
                found[at] = chosen[at].any(axis=0)
        return found


def _lost(tokens: TurnTokens, spans: pa.Table) -> Bools:
    """Sampled tokens that a policy does not train, from its `output_spans`."""
    calls, outputs = tokens.calls, tokens.outputs
    spans = spans.filter(pc.not_equal(spans["kind"].cast(pa.string()), "trained"))
    turn, start, stop = (
        spans[name].to_numpy() for name in ("turn_index", "output_start", "output_stop")
    )
    first = outputs.offsets[calls.named(sessions_of(spans, calls), turn)]
    lost = np.zeros(len(outputs.values), np.bool_)
    lost[positions(first + start, stop - start)] = True
    return lost


def _places(row: bytes, prompt: Array, output: Array) -> Iterator[int]:
    """Where a row has the end of a prompt followed by an output."""
    if not len(output):
        return
    before = prompt[-_PROMPT_END:]
    wanted = np.concatenate([before, output]).astype(np.int32).tobytes()
    at = row.find(wanted)
    while at >= 0:
        if at % 4 == 0:
            yield at // 4 + len(before)
        at = row.find(wanted, at + 1)


def _shifted(mask: Bools, shift: int) -> Bools:
    """The mask moved to the right by ``shift`` tokens."""
    moved = np.roll(mask, shift)
    moved[slice(shift) if shift > 0 else slice(len(mask) + shift, None)] = False
    return moved


def _shift_of(mask: Bools, due: Bools) -> int:
    """By how many tokens a mask has to move to train sampled tokens only.

    0 if it does so as it is, or if no shift makes it right.
    """
    if not (mask & ~due).any() or not due.any():
        return 0
    missed = int((due & ~mask).sum())
    for shift in _SHIFTS:
        moved = _shifted(mask, shift)
        if not (moved & ~due).any() and int((due & ~moved).sum()) < missed:
            return shift
    return 0
