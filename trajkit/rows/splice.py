"""Spliced rows (policy ``polar``), as turns that were never sent.

A chain of calls, each of whose prompts begins with the previous prompt, becomes one row:
the first prompt, the first output, then for each next call what its prompt has after the
first end of turn beyond the previous prompt, and its output. So an output stays as it was
sampled, and later outputs may have been sampled after another rendering of it. Where a
prompt has no end of turn there, the row ends: that call and all that continue it are
dropped.

`splice` makes turns whose prompts are what the row has before their outputs. Rows of these
are made as of any others, without drift. What was dropped is added to them afterwards.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit._kernel_names import STOPS
from trajkit.policies import Policy
from trajkit.rows.plan import PathRanges, Plan
from trajkit.schema import LINK_REASONS, SPAN, SPAN_KINDS, TURNS_DELTA
from trajkit.tables import lazy_compute as pc
from trajkit.tables.columns import dictionary_for
from trajkit.tables.ragged import Bools, Longs, Ragged, Records, offsets_of, positions
from trajkit.turns.flat_buffers import flat_turns
from trajkit.turns.sessions import Sessions

ENDED = ("stop", "tool_calls", "stop_sequence")
"""Values of finish_reason after which an output ends with its end of turn, as in Polar's
https://github.com/NVIDIA-NeMo/ProRL-Agent-Server/blob/93a0f75/src/polar/trajectory/builder/prefix_merging.py."""

_UNROUTED, _EMPTY = (LINK_REASONS.index(name) for name in ("unrouted", "empty"))


@dataclass(frozen=True, slots=True)
class Spliced:
    """Sessions whose prompts are what the row has before their outputs."""

    sessions: Sessions
    # dtype LINK, shape (n_calls,): to the previous call of the row
    links: Records
    # shape (n_calls,): where in its recorded prompt the row's part begins; -1: in no row
    starts: Longs
    # shape (n_calls,): the row begins with the recorded prompt
    whole: Bools
    # those that were dropped, in the order of the rows
    dropped: Longs
    # shape (n_calls,): the last call of the row that each of them would be in
    last: Longs
    # what they might have trained, shape (3, n_runs): call, start and stop in its output
    lost: Longs
    # shape (n_sessions,): the calls that continue none
    roots: Longs

    def ranges(self, rows: Records) -> PathRanges:
        """The ranges of rows that are ranges of recorded prompts."""
        offsets, call = offsets_of(rows["n_calls"]), _core.list_calls(rows, self.links)
        row = np.repeat(np.arange(len(rows)), np.diff(offsets))
        start, n_tokens = self.starts[call], rows["n_tokens"][row]
        parent = self.links["parent"][call]
        calls, before = self.sessions.calls, self.sessions.path_len
        place = np.where(parent < 0, 0, before[parent])
        length = calls["prompt_len"][call] - place
        inside = np.clip(n_tokens - place, 0, length)
        found = np.stack([row, place, call, start, inside])
        # until the first call whose prompt has its row in other tokens
        other = np.cumsum((parent >= 0) & ~self.whole[call])
        heads = (parent >= 0) & (other == other[offsets[:-1]][row])
        zero = np.zeros_like(row)
        shown = np.stack([row, zero, call, zero, np.minimum(place, n_tokens)])
        return PathRanges(*np.hstack([shown[:, heads], found]).astype(np.int64))

    def finish(self, plan: Plan, policy: Policy) -> None:
        """Count in a plan what was dropped, and set the flags of its chains."""
        plan.counted("roots")[:] = self.roots
        calls = self.sessions.calls
        dropped = self.dropped
        of_call = self.sessions.session
        n, (call, start, stop) = len(self.sessions), self.lost
        lost = np.bincount(of_call[call], stop - start, n).astype(np.int64)
        plan.counted("lost_unrouted")[:] -= lost
        plan.counted("lost_no_splice_point")[:] += lost
        ended = np.unique(self.last[dropped])
        for name, which in (("turns", dropped), ("rows", ended)):
            counts = np.bincount(of_call[which], minlength=n)
            plan.counted(f"{name}_no_splice_point")[:] += counts
        if policy.flag_scope == "chain":
            rows = plan.rows
            row = self._row_of(rows)[self.last[dropped]]
            here, row = dropped[row >= 0], row[row >= 0]
            for name in ("use_tool", "ill_formed"):
                flags = rows[name].copy()
                np.maximum.at(flags, row, calls[name][here])
                rows[name] = flags
            # the last call of the chain decides
            rows["truncated"][row] = calls["stop"][here] == STOPS["length"]

    def with_dropped(self, batch: pa.RecordBatch, rows: Records) -> pa.RecordBatch:
        """A batch with spans, at the ends of its rows, of what was dropped after them."""
        row = self._row_of(rows)[self.last[self.lost[0]]]
        (call, start, stop), row = self.lost[:, row >= 0], row[row >= 0]
        end, turn = rows["n_tokens"][row], self.sessions.turn_index[call]
        kinds = np.full(len(row), SPAN_KINDS.index("no_splice_point"), np.int8)
        fields = [
            *(pa.array(n.astype(np.int32)) for n in (end, end, turn, start, stop)),
            pa.DictionaryArray.from_arrays(kinds, dictionary_for(SPAN_KINDS)),
        ]
        more = pa.StructArray.from_arrays(fields, fields=list(SPAN))
        spans = Ragged.of(batch.column("spans"))
        owner = np.concatenate([spans.owner, row])
        values = pa.concat_arrays([spans.values, more])
        values = values.take(pa.array(np.argsort(owner, kind="stable")))
        offsets = offsets_of(np.bincount(owner, minlength=len(rows)))
        index = batch.schema.get_field_index("spans")
        field = batch.schema.field(index)
        column = Ragged(values, offsets).to_arrow(type=field.type)
        return batch.set_column(index, field, column)

    def _row_of(self, rows: Records) -> Longs:
        row_of = np.full(len(self.links), -1)
        row_of[rows["last"]] = np.arange(len(rows))
        return row_of


def splice(sessions: Sessions, links: Records, policy: Policy) -> Spliced:
    """Splice the calls of links whose ``lcp`` is known."""
    calls, session = sessions.calls, sessions.session
    before, placed, first = _chains(sessions, links)
    linked, index = before >= 0, np.arange(len(placed))
    n_prompt = calls["prompt_len"]

    def before_each(values: Longs) -> Longs:
        """For each placed call, the sum of the values of those before it in its chain."""
        sums = offsets_of(values[placed])[:-1]
        return sums - sums[first]

    # what a chain has of each prompt at most: all of the first, and of a later one what is
    # beyond the one before
    low = np.where(linked, n_prompt[before], n_prompt)
    low[placed[~linked[placed]]] = 0
    offsets = offsets_of(n_prompt - low)
    ids = np.empty(int(offsets[-1]), np.int32)
    each = np.arange(len(links))
    _core.copy_ranges(sessions.forest.paths, each, low, offsets, ids)
    prompts, outputs = Ragged(ids, offsets), Ragged.of(sessions.table["output_ids"], -1)
    ends = _ends_of_turn(sessions, before, placed, first, prompts, outputs, policy)
    starts = np.where(linked, np.where(ends >= 0, ends + low, -1), 0)
    missing = (starts < 0).astype(np.int64)
    is_dropped = np.zeros(len(links), np.bool_)
    is_dropped[placed] = before_each(missing) + missing[placed] > 0
    kept = ~is_dropped & np.isin(np.arange(len(links)), placed)
    starts[~kept] = -1
    # positions in the rows
    n_own = np.where(kept, n_prompt - starts, 0)
    place = np.zeros(len(links), np.int64)
    place[placed] = before_each(np.where(kept, n_own + calls["out_len"], 0))

    begin = prompts.offsets[:-1] + np.where(kept, starts - low, 0)
    parent = np.where(kept, before, -1)
    made = _table(sessions, parent, place, prompts.take(begin, n_own), outputs)
    made.calls["trainable"] = calls["trainable"]
    spliced = links.copy()
    spliced["parent"], spliced["lcp"] = parent, np.where(kept & linked, place, 0)
    n_placed = np.bincount(session[placed], minlength=len(sessions))
    spliced["order"][placed] = index - offsets_of(n_placed)[session[placed]]
    for name, value in (
        ("order", -1),
        ("link_reason", _UNROUTED),
        ("rewritten_by", -1),
    ):
        spliced[name][is_dropped] = value
    last_of = np.full(len(links), -1)
    last = np.maximum.accumulate(np.where(kept[placed], index, 0))
    last_of[placed] = placed[last]
    path_end = sessions.path_len[links["parent"]]
    whole = (links["lcp"] == path_end) & (path_end == starts)
    dropped = placed[is_dropped[placed]]
    root = (links["parent"] < 0) & ~np.isin(links["link_reason"], [_UNROUTED, _EMPTY])
    roots = np.bincount(session[root], minlength=len(sessions))
    lost = _lost(sessions, dropped, policy)
    return Spliced(made, spliced, starts, whole, dropped, last_of, lost, roots)


def _lost(sessions: Sessions, dropped: Longs, policy: Policy) -> Longs:
    dropped = dropped[sessions.calls["trainable"][dropped] != 0]
    if not len(dropped):
        return np.zeros((3, 0), np.int64)
    tokens = flat_turns(sessions, prompts=False)
    may = tokens.unmasked
    if policy.missing_logprobs == "untrain":
        may = may & tokens.has_logprob
    starts, sizes = tokens.outputs.offsets[dropped], tokens.outputs.lengths[dropped]
    at = positions(starts, sizes)
    call = np.repeat(dropped, sizes)
    within = at - np.repeat(starts, sizes)
    may = may[at]
    # a run ends with its output
    same = may[1:] & may[:-1] & (within[1:] > 0)
    first = may & ~np.append(False, same)
    final = may & ~np.append(same, False)
    return np.stack([call[first], within[first], within[final] + 1])


def _chains(sessions: Sessions, links: Records) -> tuple[Longs, Longs, Longs]:
    """The chains of links; of several calls that continue one, the first by order does.

    Returns the call before each in its chain, or -1; the calls that are in a chain, in the
    order of the rows; and the index of the first of its chain for each of these.
    """
    parent, order, session = links["parent"], links["order"], sessions.session
    follows = _core.order_calls(sessions.forest.paths, links)
    follows = follows[parent[follows] >= 0]
    n_prompt = sessions.calls["prompt_len"]
    follows = follows[links["lcp"][follows] >= n_prompt[parent[follows]]]
    follows = follows[np.unique(parent[follows], return_index=True)[1]]
    before = np.full(len(links), -1)
    before[follows] = parent[follows]
    # the opener of each call's chain, and how many calls are before it
    opener = np.where(before >= 0, before, np.arange(len(links)))
    depth = (before >= 0).astype(np.int64)
    while (opener[opener] != opener).any():
        depth += depth[opener]
        opener = opener[opener]
    ranked = np.lexsort((depth, order[opener], session))
    ranked = ranked[order[ranked] >= 0]
    opens = np.where(before[ranked] < 0, np.arange(len(ranked)), 0)
    return before, ranked, np.maximum.accumulate(opens)


def _ends_of_turn(
    sessions: Sessions,
    before: Longs,
    placed: Longs,
    first: Longs,
    prompts: Ragged,
    outputs: Ragged,
    policy: Policy,
) -> Longs:
    """Where a row continues in ``prompts`` after the output before; -1: nowhere.

    After the first end of turn, or at it where that output did not end its turn.
    """
    some = sessions.calls["out_len"] > 0
    last_token = np.full(len(before), -1, np.int64)
    last_token[some] = outputs.values[outputs.offsets[1:][some] - 1]
    token = np.full(len(before), policy.end_of_turn_token_id or 0, np.int64)
    if policy.end_of_turn_token_id is None:
        # the last token of the chain's first output that ended its turn
        tells = np.flatnonzero((some & ended(sessions))[placed])
        of_chain = np.full(len(placed), -1)
        chain, at = np.unique(first[tells], return_index=True)
        of_chain[chain] = last_token[placed[tells[at]]]
        token = np.full(len(before), -1)
        token[placed] = of_chain[first]
    wanted = np.repeat(np.where(token >= 0, token, -(1 << 40)), prompts.lengths)
    hits = np.append(np.flatnonzero(prompts.values == wanted), len(prompts.values))
    at = hits[np.searchsorted(hits, prompts.offsets[:-1])]
    found = at < prompts.offsets[1:]
    skipped = last_token[before] == token
    return np.where(found, at - prompts.offsets[:-1] + skipped, -1)


def _table(
    sessions: Sessions, before: Longs, place: Longs, own: Ragged, outputs: Ragged
) -> Sessions:
    has_base = (before >= 0) & (before < np.arange(len(before)))
    late = np.flatnonzero((before >= 0) & ~has_base)
    if len(late):
        # recorded before the call that it continues: it has its prompt itself
        pieces = list(map(own.__getitem__, range(len(own))))
        for call in late.tolist():
            path, up = [own[call]], int(before[call])
            while up >= 0:
                path += [outputs[up], own[up]]
                up = int(before[up])
            pieces[call] = np.concatenate(path[::-1])
        own = Ragged(np.concatenate(pieces), offsets_of(list(map(len, pieces))))
    table = sessions.table
    made = {
        "base_turn": pa.array(sessions.turn_index[before], mask=~has_base),
        "shared_length": pa.array(np.where(has_base, place, 0).astype(np.int32)),
        "suffix_ids": own.to_arrow(),
    }
    messages = ("shared_messages", "suffix_messages")
    names = {"step", *TURNS_DELTA.names}.difference(made, messages)
    carried = {name: table[name] for name in table.column_names if name in names}
    return Sessions.of(pa.table({**carried, **made}))


def ended(sessions: Sessions) -> Bools:
    reasons = sessions.table.column("finish_reason")
    return np.asarray(pc.is_in(reasons, value_set=pa.array(ENDED)))
