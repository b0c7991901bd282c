"""Questions about rows: `check_rows` (what do they train?), `why` and `call_tree`."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import takewhile
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit.analysis.branches import SENT_AGAIN, drifted, label_branches, named_drift
from trajkit.analysis.sampled_tokens import output_spans
from trajkit.analysis.tokenizer import Tokenizer
from trajkit.analysis.words import LOSS_GROUPS, LOSS_WORDS, count
from trajkit.policies import Policy
from trajkit.policies import policy as named_policy
from trajkit.rows.linearize import find_links, linearize, link
from trajkit.schema import EMPTY_KINDS, ROW_CHECKS, ROW_REASONS
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import TableLike, as_table
from trajkit.tables.columns import take_session, tuples
from trajkit.tables.ragged import Array, Bools, Ints, Longs, positions
from trajkit.turns.delta import expand
from trajkit.turns.flat_buffers import aborted_calls, flat_rows, flat_turns, sessions_of
from trajkit.turns.records import as_turns
from trajkit.turns.sessions import Sessions
from trajkit.verification.foreign_rows import TOLERANCE, Sampled
from trajkit.verification.row_forms import is_rows, plain_rows
from trajkit.verification.rules import consecutive, longest_shared

# sessions of equal beginning that are tried for a row, among so many paths on either side
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
        self.sessions = {name: k for k, name in enumerate(calls.ids.to_pylist())}
        # paths that no later prompt of the session begins with, as bytes that compare
        # like their tokens, and their sessions
        links = find_links(calls, calls.forest, named_policy("strict"))
        parent = links["parent"][links["parent"] >= 0]
        ends = np.setdiff1d(np.arange(calls.n_calls), parent)
        self.paths = sorted(
            (_key(self.turns.path(k)), int(calls.session[k])) for k in ends
        )
        may = calls.calls["trainable"].astype(np.bool_)
        if policy is None or not policy.train_aborted:
            may &= ~aborted_calls(calls)
        # By sampled token, and as the last element for a token that nobody sampled:
        # whether it may be trained, and the first row that has it without training it,
        # and where.
        self.may = np.append(may[self.owner] & self.turns.unmasked, True)
        self.left_by, self.left_at = np.full((2, len(self.may)), -1)
        due = self.may[:-1].copy()
        if policy is not None:
            spans = output_spans(table, policy)
            kinds = spans["kind"].cast(pa.string())
            spans = spans.filter(pc.not_equal(kinds, "trained"))
            names = ("turn_index", "output_start", "output_stop")
            turn, start, stop = (spans[name].to_numpy() for name in names)
            lost = calls.named(sessions_of(spans, calls), turn)
            due[positions(self.outputs.offsets[lost] + start, stop - start)] = False
        self.sampled = Sampled(self.turns, due)
        self.repeats = policy is not None and policy.train_in == "every"
        self.splices = policy is not None and policy.on_drift == "splice"
        self.lines: list[dict[str, Any]] = []
        # what lines about the current row have; the sessions that have a row
        self.place: dict[str, Any] = {}
        self.seen: set[int] = set()
        # by row: the sessions that rows name and the log does not have; the masks that
        # were not read
        self.unknown: list[str] = []
        self.unread = Counter[str]()

    def add(self, kind: str, detail: str, **more: Any) -> None:
        line = {"kind": kind, "detail": detail, "tokens": 0}
        self.lines.append({**line, **self.place, **more})

    def row(self, row: int, given: dict[str, Any]) -> None:
        ids = given["input_ids"].values.to_numpy()
        mask = given["loss_mask"].values.to_numpy(zero_copy_only=False)
        if not len(ids):
            return
        self.place, name = {"row": row}, given["session_id"].as_py()
        self.unread.update(given["unread"].as_py())
        own = self.sessions.get(name)
        self.unknown += [name] * (own is None and name is not None)
        sessions, dropped = self._like(ids)
        if given["padding_known"].as_py() or dropped < 2 or mask[:dropped].any():
            dropped = 0  # these are no padding, and calls did not see them
        ids, mask = ids[dropped:], mask[dropped:]
        first = given["padding"].as_py() + dropped
        best = self._best(ids, mask, sessions, own)
        if best is None:
            n, where = int(mask.sum()), f" of session {name!r}" * (own is not None)
            words = f"{count(n)} trained, and no turn{where} begins like it"
            self.add("not_found", words, tokens=n)
            return
        (n, _, _), session, source, in_context = best
        theirs = self.turns.calls.ids[session].as_py()
        if own not in (None, session):
            words = f"it names session {name!r}, and its tokens are of {theirs!r}"
            self.add("other_session", words, tokens=n)
        self.place["session_id"] = theirs
        self.seen.add(session)
        if (stop := self._packed(ids, mask & (source < 0))) is not None:
            words = (
                f"another sequence begins at token {first + stop}: split packed rows"
            )
            n = int(mask[stop:].sum())
            self.add("several_sequences", words, token=first + stop, tokens=n)
            ids, mask = ids[:stop], mask[:stop]
            source, in_context = source[:stop], in_context[:stop]
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
        if given["logprobs"].is_valid:
            logprobs = given["logprobs"].values.fill_null(np.nan).to_numpy()[dropped:]
            self._logprobs(logprobs, source, np.flatnonzero(trained), first)

    def _best(
        self, ids: Ints, mask: Bools, sessions: list[int], own: int | None
    ) -> tuple[tuple[int, bool, int], int, Longs, Bools] | None:
        """Of sessions and the one that a row names, what sampled most of what it trains.

        It comes after its rank, whose first number that is, and with what `Sampled.find`
        says of the row.
        """
        found: list[Any] = []
        for session in dict.fromkeys([*sessions, *([] if own is None else [own])]):
            calls = self.turns.calls_of(session)
            source, in_context, begins = self.sampled.find(
                ids, calls, mask, everywhere=True
            )
            if (mask & (source < 0)).any():
                source = np.where(source < 0, self._in_place(ids, calls), source)
            there = source >= 0
            # of equal sessions, one that no earlier row trains
            again = self.sampled.trained_by[source[there]] >= 0
            rank = int((mask & there).sum()), session == own, -int(again.sum())
            if begins or there.any():
                found.append((rank, session, source, in_context))
        return max(found, key=itemgetter(0), default=None)

    def _in_place(self, ids: Ints, calls: range) -> Longs:
        """The sampled tokens at the same places of a path, of which a few were replaced."""
        for call in calls:
            if self.turns.path_len(call) == len(ids):
                path = self.turns.path(call)
                same = path == ids
                if 2 * same.sum() > len(ids):
                    source = self.sampled.find(path, calls, np.zeros_like(same))[0]
                    return np.where(same, source, -1)
        return np.full(len(ids), -1)

    def _packed(self, ids: Ints, unknown: Bools) -> int | None:
        """Where a path begins inside a row that has the next trained, unknown token."""
        at = np.flatnonzero(unknown)
        for begin in np.flatnonzero(ids[1:] == ids[0])[:_MOST_SESSIONS] + 1:
            later = at[at > begin]
            if len(later) and self._nearest(ids[begin:])[0] > later[0] - begin:
                return int(begin)
        return None

    def _like(self, ids: Ints) -> tuple[list[int], int]:
        """The sessions of the paths that share most with a row, and tokens before those.

        Equal tokens at its start may be padding if paths share more without them.
        """
        run = int(np.argmax(ids != ids[0]))
        starts = dict.fromkeys((0, max(run - 1, 0), run))
        tries = [(k, *self._nearest(ids[k:])) for k in starts]
        dropped, _, sessions = max(tries, key=itemgetter(1))
        return sessions, dropped

    def _nearest(self, ids: Ints) -> tuple[int, list[int]]:
        """How many tokens some paths share with a row, and their first sessions, those
        without a row before others.
        """
        key = _key(ids)
        at = bisect_left(self.paths, key, key=itemgetter(0))
        before, after = self.paths[max(at - _NEAR, 0) : at], self.paths[at : at + _NEAR]
        beside = (np.frombuffer(p, np.int32) for p, _ in before[-1:] + after[:1])
        shared = [_core.lcp(np.frombuffer(key, np.int32), path) for path in beside]
        if not (most := max(shared, default=0)):
            return 0, []
        head = key[: most * ids.itemsize]
        found = {
            session
            for paths in (reversed(before), after)
            for _, session in takewhile(lambda path: path[0].startswith(head), paths)
        }
        tried = sorted(found, key=lambda session: (session in self.seen, session))
        return most, tried[:_MOST_SESSIONS]

    def _trains(self, row: int, source: Longs, in_context: Bools, shift: int) -> None:
        """Which turn trains what, and what an earlier row trains too."""
        again, owner, note = self.sampled.train(row, source), self.owner[source], ""
        if shift:
            note = f", if its mask is shifted {_SIDES[shift < 0]} by {abs(shift)}"
        for call in dict.fromkeys(owner.tolist()):
            mine, of = owner == call, count(len(self.outputs[call]))
            turn, n = int(self.turns.calls.turn_index[call]), int(mine.sum())
            twice = again[mine & (again >= 0)]
            beyond = int((mine & ~in_context).sum())
            lines = [("trains", n, f"trains {n} of {of} of turn {turn}{note}")]
            if len(twice) and not self.repeats:
                both = count(len(twice))
                words = f"{both} of turn {turn} that row {twice[0]} trains too"
                lines.append(("trained_twice", len(twice), words))
            if beyond and not self.splices:
                words = f"{count(beyond)} of turn {turn} after other tokens than it saw"
                lines.append(("out_of_context", beyond, words))
            for kind, n, words in lines:
                self.add(kind, words, turn_index=turn, tokens=n)

    def _logprobs(self, logprobs: Array, source: Longs, at: Longs, first: int) -> None:
        """Logprobs that are not the engine's, or those of a token before or after."""
        at = at[self.turns.has_logprob[source[at]]]
        due = self.turns.logprobs[source[at]]
        # a place that is not in the row has no logprob
        padded = np.pad(logprobs, 2, constant_values=np.nan)
        most = TOLERANCE * np.maximum(1, np.abs(due))
        right = {k: np.abs(padded[at + k + 2] - due) <= most for k in (0, *_SHIFTS)}
        good = int(right[0].sum())
        if good == len(at):
            return
        # a shift loses a value at an end of each range
        ranges = 1 + int((np.diff(at) > 1).sum())
        for shift in _SHIFTS if len({*due.tolist()}) > 1 else ():
            n = int(right[shift].sum())
            least = max(len(at) - ranges * abs(shift), len(at) // 2 + 1, good + 1)
            if n >= least:
                words = f"the logprobs are shifted {_SIDES[shift < 0]} by {abs(shift)}"
                self.add("logprobs_shifted", words, token=first + int(at[0]), tokens=n)
                return
        k, n = int(right[0].argmin()), len(at) - good
        words = (
            f"{n} of {count(len(at))} have another logprob than the engine's: the first "
            f"{logprobs[at[k]]:.4g}, expected {due[k]:.4g}"
        )
        self.add("logprobs", words, token=first + int(at[k]), tokens=n)

    def absent(self) -> None:
        """What rows have that was not read, and what no row trains."""
        self.place = {}
        calls, owner = self.turns.calls, self.owner
        for name, n in self.unread.items():
            words = (
                f"{count(n, 'row')} ha{'s' if n == 1 else 've'} {name!r}, which was not "
                "read: if the trainer reads it, name it loss_mask"
            )
            self.add("unread_mask", words)
        if self.unknown:
            n, name = len(self.unknown), self.unknown[0]
            words = (
                f"{count(n, 'row')} name{'s' * (n == 1)} a session that the log does not "
                f"have, such as {name!r}: found by tokens alone"
            )
            self.add("unknown_session", words)
        without = ~np.isin(np.arange(len(calls)), [*self.seen])
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
            verb = "is" if n == 1 else "are"
            kind, words = "in_no_row", f"{n} of {of} of turn {turn} {verb} in no row"
            if row[k] >= 0:
                kind, words = "masked_out", f"does not train {n} of {of} of turn {turn}"
                place |= {"row": int(row[k]), "token": int(token[k])}
            self.add(kind, words, **place)


def _key(ids: Array) -> bytes:
    return ids.astype(">u4").tobytes()


def _shifted(mask: Bools, shift: int) -> Bools:
    """The mask moved to the right by ``shift`` tokens."""
    room = abs(shift)
    return np.pad(mask, room)[room - shift :][: len(mask)]


def _shift_of(mask: Bools, due: Bools) -> int:
    """By how many tokens a mask has to move to train sampled tokens only, or 0."""
    missed = int((due & ~mask).sum())
    for shift in _SHIFTS if (mask & ~due).any() and due.any() else ():
        moved = _shifted(mask, shift)
        if not (moved & ~due).any() and int((due & ~moved).sum()) < missed:
            return shift
    return 0


_NO_PARENT = {
    "history_replaced": "its request does not extend its agent's history",
    "root": "no earlier turn matches its request",
}


def why(
    turns: TableLike,
    policy: str | Policy = "faithful",
    *,
    tokenizer: Tokenizer | None = None,
    sessions: TableLike | None = None,
) -> pa.Table:
    """Explain each row of a policy: the turn that opens it, and the reason.

    A row is opened by its first turn that no earlier row of the session contains.

    Parameters
    ----------
    turns : table
        `trajkit.schema.TURNS` in full or delta form. Or rows, as `trajkit.check_rows` takes
        them, each of which is compared with the earlier row (of its session, if it names
        one) that shares most.
    policy : str or Policy
        As for `trajkit.linearize`; of turns.
    tokenizer : Tokenizer, optional
        As for `trajkit.classify_drift`: causes are then found by comparing texts.
    sessions : table, optional
        As for `trajkit.linearize`.

    Returns
    -------
    Table
        `trajkit.schema.ROW_REASONS`, one line per row, in the order of the rows.

    Raises
    ------
    SchemaError, InvalidTurnsError, PolicyError
        As `trajkit.linearize`.
    """
    table = as_table(turns)
    if is_rows(table.column_names):
        lines = _reasons_of_rows(plain_rows(table))
    else:
        chosen = named_policy(policy)
        lines = _reasons_of_turns(as_turns(table), chosen, tokenizer, sessions)
    found = (dict(zip(ROW_REASONS.names, line, strict=True)) for line in lines)
    return pa.Table.from_pylist([*found], ROW_REASONS)


def _reasons_of_rows(rows: pa.Table) -> Iterator[tuple[Any, ...]]:
    """Where each row leaves the earlier row that shares most, from tokens alone."""
    flat, places = flat_rows(rows), [*tuples(rows, "session_id", "row_index")]
    by_session = defaultdict(list)
    for k, (name, _) in enumerate(places):
        by_session[name].append(k)
    other, shared = np.zeros((2, rows.num_rows), np.int64)
    for own in map(np.array, by_session.values()):
        first, shared[own] = longest_shared(flat.ids, own)
        other[own] = own[first]
    for k, (place, n) in enumerate(zip(places, shared.tolist(), strict=True)):
        mask = flat.mask[flat.ids.offsets[k] : flat.ids.offsets[k + 1]]
        runs = int(np.diff(mask.astype(np.int8), prepend=0).clip(0).sum())
        words, trained = "it shares no token with an earlier row", int(mask.sum())
        if n:
            words = f"it shares its first {count(n)} with row {places[other[k]][1]}"
        trains = count(trained) + (f" in {runs} ranges" if runs > 1 else "")
        sentence = f"row {place[1]}: {words}. It trains {trains} of {len(mask)}."
        opened_by = "branch" if n else "no_parent"
        yield *place, None, None, opened_by, trained, None, sentence


def _reasons_of_turns(
    table: pa.Table,
    policy: Policy,
    tokenizer: Tokenizer | None,
    sessions: TableLike | None,
) -> Iterator[tuple[Any, ...]]:
    """Why turns open rows, from the links and the drift of their prompts."""
    links = link(table, policy)
    keys = [*tuples(links, "session_id", "turn_index")]
    firsts = {name: turn for name, turn in reversed(keys)}
    known = dict(zip(keys, tuples(links, "parent", "link_reason"), strict=True))
    outputs = pc.list_value_length(table["output_ids"]).to_pylist()
    n_outputs = dict(zip(keys, outputs, strict=True))
    found = named_drift(table, links, tokenizer).to_pylist()
    drift = {(line["session_id"], line["turn_index"]): line for line in found}
    columns = "session_id", "turn_index", "label", "evidence"
    labelled = tuples(label_branches(table, links), *columns)
    branches = {(name, turn): words for name, turn, *words in labelled}
    seen: set[tuple[str, int]] = set()
    rows = linearize(table, policy, sessions=sessions)
    made = tuples(rows, "session_id", "row_index", "turns", "spans")
    for name, index, turns, spans in made:
        # the first turn that no earlier row of the session has, or the last
        turn = next((one for one in turns if (name, one) not in seen), turns[-1])
        seen.update((name, one) for one in turns)
        parent, kind = known[name, turn]
        label, evidence = branches.get((name, turn), ("", ""))
        if parent is None and turn == firsts[name]:
            opened_by, reason = "no_parent", "it is the session's first turn"
        elif label in SENT_AGAIN and (
            parent is None or drift[name, turn]["cause"] == label
        ):
            opened_by = "no_parent" if parent is None else "branch"
            reason = f"it is a {label}: {evidence}"
        elif parent is None:
            words = _NO_PARENT.get(kind, f"it has no parent ({kind})")
            opened_by, reason = "no_parent", words
        elif drift[name, turn]["size"]:
            words = _drift_text(drift[name, turn], n_outputs[name, parent])
            opened_by, reason = "drift", words
        else:
            words = f"it branches off turn {parent}, which another row continues"
            opened_by, reason = "branch", words
        n = Counter[str]()
        for span in spans:
            n[span["kind"]] += span["output_stop"] - span["output_start"]
        lost = [kind for kind in EMPTY_KINDS if n[kind]]
        losses = (f"{count(n[x])} {LOSS_GROUPS[LOSS_WORDS[x][0]]}" for x in lost)
        sentence = (
            f"row {index} opens at turn {turn}: {reason}. It trains "
            f"{'; '.join([count(n['trained']), *losses])}."
        )
        numbers = n["trained"], sum(n[kind] for kind in lost)
        yield name, index, turn, parent, opened_by, *numbers, sentence


def _drift_text(drift: dict[str, Any], n_output: int) -> str:
    where = {
        "last_reply": f"reply at token {n_output - drift['size']} of {n_output}",
        "earlier_reply": f"path at token {drift['lcp']}, inside an earlier reply",
        "prompt": f"prompt at token {drift['lcp']}, before any reply",
    }
    return (
        f"its prompt differs from turn {drift['parent']}'s {where[drift['region']]} "
        f"({drift['cause'].replace('_', ' ')}; {count(drift['tokens_after_drift'])} "
        "sampled after that)"
    )


def call_tree(
    turns: TableLike, session_id: str, policy: str | Policy = "faithful"
) -> list[str]:
    """Draw a session's calls with box characters, one line per call.

    Branches are indented. A line has the turn, its prompt and output tokens, its branch
    label, the turn that started it (the gateway's ``started_by_turn``), and its drift.

    Parameters
    ----------
    turns : table
        `trajkit.schema.TURNS` in full or delta form.
    session_id : str
        The session to draw; UnknownSessionError if there is none.
    policy : str or Policy
        The policy that defines parents; see `trajkit.link`, also for errors.
    """
    table = expand(take_session(as_turns(turns), session_id))
    links = link(table, policy)
    texts = _texts(table, links)
    children: dict[int | None, list[int]] = defaultdict(list)
    for turn, parent in tuples(links, "turn_index", "parent"):
        children[parent].append(turn)
    lines: list[str] = []
    # Turns to draw, with the text before them and before what continues them.
    waiting = [(turn, "", "") for turn in reversed(children[None])]
    while waiting:
        turn, lead, indent = waiting.pop()
        lines.append(lead + texts[turn])
        below = children[turn]
        corners = [("└─ ", "   "), *[("├─ ", "│  ")] * (len(below) - 1)]
        if len(below) == 1:
            corners = [("", "")]
        for child, (corner, line) in zip(reversed(below), corners, strict=False):
            waiting.append((child, indent + corner, indent + line))
    return lines


def _texts(table: pa.Table, links: pa.Table) -> dict[int, str]:
    names = ("turn_index", "prompt_ids", "output_ids")
    texts = {
        turn: f"turn {turn}: prompt {len(prompt):,}, output {len(output):,}"
        for turn, prompt, output in tuples(table, *names)
    }
    for turn, label in tuples(label_branches(table, links), "turn_index", "label"):
        texts[turn] += f", {label.replace('_', '-')}"
    if "started_by_turn" in table.column_names:
        for turn, starter in tuples(table, "turn_index", "started_by_turn"):
            texts[turn] += f", started by turn {starter}" * (starter is not None)
    drift = "turn_index", "lcp", "cause", "tokens_after_drift"
    for turn, lcp, cause, after in tuples(drifted(table, links), *drift):
        words = f"{cause.replace('_', ' ')}, {count(after, 'sampled token')} after it"
        texts[turn] += f", drift at token {lcp:,} ({words})"
    return texts
