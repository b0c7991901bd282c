"""Rules for rows: their tokens, order, shared prefixes, sums and metadata.

Each check takes a `Case` and reports violations to it.
"""

import math
from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Literal, TypeAlias

import numpy as np

from trajkit import _core
from trajkit._arrow.canonical import Rows
from trajkit.turns.calls import Ints, Longs
from trajkit.turns.flat_buffers import Index, Ragged, Spans
from trajkit.turns.images import Image, has_items, image_faults, same_image
from trajkit.verification.context import Case

WeighBy: TypeAlias = Literal["token", "row", "rollout"]

_ROUNDING = 1e-9  # row_weight is one division away from the counts


def by_session(session: Rows) -> Iterator[Rows]:
    """The rows of each session, in order."""
    order = np.argsort(session, kind="stable")
    edges = np.flatnonzero(np.diff(session[order])) + 1
    return iter(np.split(order, edges) if len(order) else [])


def row_index(case: Case) -> None:
    """row_index counts the rows of a session from 0."""
    given = case.rows.table.column("row_index").to_numpy()
    for rows in by_session(case.session):
        for rank in np.flatnonzero(given[rows] != np.arange(len(rows))):
            row = int(rows[rank])
            detail = f"{given[row]} is row {rank} of the session"
            case.report("row_index", detail, row)


def lengths(case: Case) -> None:
    """Mask and logprobs have the row's length, and no row exceeds ``max_row_tokens``.

    Also reports null ids and null mask values.
    """
    rows, ids = case.rows, case.rows.ids
    for name, n in (("loss_mask", rows.n_mask), ("logprobs", rows.n_logprobs)):
        for row in np.flatnonzero(n != ids.lengths):
            detail = f"{name} has {n[row]} values, input_ids has {ids.lengths[row]}"
            case.report("length", detail, row, None, min(n[row], ids.lengths[row]))
    if case.cap is not None:
        for row in np.flatnonzero(ids.lengths > case.cap):
            detail = (
                f"the row has {ids.lengths[row]} tokens, max_row_tokens is {case.cap}"
            )
            case.report("length", detail, row, None, case.cap)
    complete = np.repeat(rows.n_mask == ids.lengths, ids.lengths)
    for detail, null in (
        ("input_ids is null or negative", ids.values < 0),
        ("loss_mask is null", complete & ~rows.has_mask),
    ):
        at = np.flatnonzero(null)
        owners = np.searchsorted(ids.offsets, at, side="right") - 1
        for k, row in zip(at, owners, strict=True):
            case.report("null", detail, row, None, k - ids.offsets[row])


def tokens(case: Case, pieces: Spans) -> None:
    """A row is the path of one turn, truncated or trimmed as the policy defines.

    Its finish_reason is that turn's.
    """
    reasons = case.turns.calls.table.column("finish_reason").to_pylist()
    names = case.turns.calls.turn_index
    last = _last_calls(case, pieces)
    for row, reason in enumerate(case.rows.table.column("finish_reason").to_pylist()):
        own = int(last[row])
        named = case.rows.number("last_turn", row)
        by_name = named is None or (own >= 0 and names[own] == named)
        if own >= 0 and by_name and _is_path(case, row, own) and reasons[own] == reason:
            continue
        equal = [
            call
            for call in case.turns.calls_of(int(case.session[row]))
            if _is_path(case, row, call)
        ]
        if not equal:
            detail = "the row is not the prompt and output of any turn"
            case.report("row_tokens", detail, row, own, _departs(case, row, own))
        elif reason not in [reasons[call] for call in equal]:
            detail = (
                f"finish_reason is {reason!r}, the last turn has {reasons[equal[0]]!r}"
            )
            case.report("finish_reason", detail, row, equal[0])
        elif named is not None and named not in names[equal]:
            detail = (
                f"last_turn is {named}, but turn {names[equal[0]]} has the row's tokens"
            )
            case.report("row_tokens", detail, row, equal[0])


def _last_calls(case: Case, pieces: Spans) -> Longs:
    """The call of each row's last span, or -1."""
    last = np.full(len(case.rows.ids), -1)
    last[pieces.row] = pieces.call  # in ascending order: the last assignment wins
    return last


def _is_path(case: Case, row: Index, call: int) -> bool:
    ids = case.rows.ids[row]
    if case.turns.shared(ids, call) != len(ids):
        return False
    n = case.turns.path_len(call)
    return min(n, case.cap or n) == len(ids) or _is_trimmed(case, call, len(ids))


def _is_trimmed(case: Case, call: int, n: int) -> bool:
    """Whether a row may end after n tokens, inside the output of its last call.

    A later call that did not fit into the row may have replaced the rest.
    """
    policy, prompts = case.policy, case.turns.prompts
    trims = policy is not None and policy.truncate_at == "calls" and policy.keep_prefix
    if not trims or case.cap is None or not len(prompts[call]) <= n:
        return False
    path = np.concatenate([prompts[call], case.turns.outputs[call]])
    return any(
        len(prompts[other]) >= case.cap and _core.lcp(path, prompts[other]) == n
        for other in case.turns.calls_of(int(case.turns.calls.session_of()[call]))
    )


def _departs(case: Case, row: Index, own: int) -> int:
    """The first token where a row differs from its last turn, or from every turn."""
    ids = case.rows.ids[row]
    if own >= 0:
        n = case.turns.shared(ids, own)
        if n < min(len(ids), case.turns.path_len(own)):
            return n
    calls = case.turns.calls_of(int(case.session[row]))
    return max((case.turns.shared(ids, call) for call in calls), default=0)


def prompt_length(case: Case, pieces: Spans) -> None:
    """prompt_length is the prompt length of the row's first call.

    That is the call of the first span, or an earlier call without a span: its output
    was empty or absorbed.
    """
    given = case.rows.table.column("prompt_length").to_numpy()
    calls = case.turns.calls.calls
    due = np.full(len(given), np.iinfo(np.int64).min)  # matches no row
    due[pieces.row[::-1]] = calls["prompt_len"][pieces.call[::-1]]
    absorbs = case.policy is None or case.policy.absorbs
    for row in np.flatnonzero(given != due):
        n = int(given[row])
        ids = case.rows.ids[row]
        opened = False
        if n <= len(ids) and (due[row] < 0 or n < due[row]):
            opened = any(
                calls["prompt_len"][call] == n
                and (absorbs or calls["out_len"][call] == 0)
                and _core.lcp(ids, case.turns.prompts[call]) == n
                for call in case.turns.calls_of(int(case.session[row]))
            )
        if not opened:
            found = "no turn's prompt fits"
            if due[row] >= 0:
                found = f"the row's first turn has {due[row]}"
            detail = f"prompt_length is {n}, {found}"
            case.report("prompt_length", detail, row, None, n)


def shared_prefixes(case: Case) -> None:
    """parent_row and shared_length give the longest shared prefix, the first on ties."""
    table = case.rows.table
    names = table.column("row_index").to_numpy()
    parents = table.column("parent_row").to_pylist()
    lengths = table.column("shared_length").to_numpy()
    for rows in by_session(case.session):
        first, shared = longest_shared(case.rows.ids, rows)
        for k, row in enumerate(rows):
            due = names[rows[first[k]]] if shared[k] else None
            n, most = lengths[row], shared[k]
            if n != most:
                detail = f"shared_length is {n}, an earlier row shares {most}"
                case.report("shared_length", detail, row, None, min(n, most))
            if parents[row] != due:
                detail = (
                    f"parent_row is {_null(parents[row])}, the first row that shares "
                    f"most is {_null(due)}"
                )
                case.report("parent_row", detail, row)


def longest_shared(ids: Ragged, rows: Rows) -> tuple[Longs, Longs]:
    """For each of ``rows``, the earlier row with the longest shared prefix, and its
    length.

    The first on ties, as an index into ``rows``; 0 if nothing is shared. Shape
    (n_rows,).
    """
    n = len(rows)
    runs: list[Ints] = [ids[row] for row in rows]
    # In sorted order, two rows share the minimum over the neighbours between them.
    order = np.array(sorted(range(n), key=lambda k: runs[k].tobytes()), np.int64)
    place = np.empty(n, np.int64)
    place[order] = np.arange(n)
    steps = [_core.lcp(runs[a], runs[b]) for a, b in pairwise(order)]
    between = np.array(steps, np.int64)
    first, shared = np.zeros(n, np.int64), np.zeros(n, np.int64)
    for k in range(1, n):
        at = place[k]
        sharing = np.concatenate(
            [
                np.minimum.accumulate(between[:at][::-1])[::-1],
                [0],
                np.minimum.accumulate(between[at:]),
            ]
        )
        earlier = sharing[place[:k]]
        first[k] = np.argmax(earlier)
        shared[k] = earlier[first[k]]
    return np.where(shared > 0, first, 0), shared


def sums(case: Case, trained: Spans, weigh_by: WeighBy) -> None:
    """rollout_mask_sum and row_weight count the tokens that the session's rows train."""
    table = case.rows.table
    mine = np.bincount(
        trained.row, trained.stop - trained.start, len(case.rows.ids)
    ).astype(np.int64)
    of_session = np.bincount(case.session, mine).astype(np.int64)[case.session]
    given = table.column("rollout_mask_sum").to_numpy()
    for row in np.flatnonzero(given != of_session):
        detail = (
            f"rollout_mask_sum is {given[row]}, the session's rows train "
            f"{of_session[row]} tokens"
        )
        case.report("rollout_mask_sum", detail, row)
    share, total = mine, of_session
    if weigh_by != "token":
        share = (mine > 0).astype(np.int64)
    if weigh_by == "row":
        total = np.bincount(case.session, share).astype(np.int64)[case.session]
    for k, weight in enumerate(table.column("row_weight").to_pylist()):
        due = share[k] / total[k] if of_session[k] else None
        if _differ(weight, due):
            detail = (
                f"row_weight is {_null(weight)}, expected {_null(due)} ({share[k]} of "
                f"{total[k]})"
            )
            case.report("row_weight", detail, k)


def facts(case: Case, *, known: tuple[str, ...]) -> None:
    """reward and group_id are the session's if known, else equal in all its rows.

    A value is known if its name is in ``known`` or if it is not null. If the policy
    spreads the reward over the rows, each row has its share.
    """
    spreads = case.policy is not None and case.policy.rewards != "copy"
    for name in ("reward", "group_id"):
        given = case.rows.table.column(name).to_pylist()
        due = case.facts.column(name).to_pylist()
        for rows in by_session(case.session):
            of_session = due[case.session[rows[0]]]
            is_known = name in known or of_session is not None
            if name == "reward" and spreads:
                _shares(case, rows, given, is_known, of_session)
                continue
            if not is_known:
                of_session = given[rows[0]]
            for row in rows:
                if given[row] != of_session:
                    detail = (
                        f"{name} is {_null(given[row])}, the session's is "
                        f"{_null(of_session)}"
                    )
                    case.report(name, detail, row)


def _shares(
    case: Case,
    rows: Rows,
    given: list[float | None],
    known: bool,
    reward: float | None,
) -> None:
    """Check that rows have their shares of the session's reward.

    If the reward is not known, they must be shares of the same reward.
    """
    if case.policy is not None and case.policy.rewards == "final_only":
        kinds = [case.rows.text("segment_kind", row) for row in rows]
        if any(kinds):
            shares = [float(kind == "final") for kind in kinds]
        else:
            shares = [float(row == rows[-1]) for row in rows]
    else:
        shares = [1 / len(rows)] * len(rows)
    if not known:
        at = int(np.argmax(shares))
        first = given[rows[at]]
        # If every share is 0, only null can be told from a number.
        reward = first if first is None or not shares[at] else first / shares[at]
    for row, share in zip(rows, shares, strict=True):
        due = None if reward is None else reward * share
        here = given[row]
        if _differ(here, due):
            detail = (
                f"reward is {_null(here)}, expected {_null(due)}: the row's share of the "
                f"session's {_null(reward)}"
            )
            case.report("reward", detail, row)


def turns(case: Case, pieces: Spans) -> None:
    """A row's turns end with last_turn and contain the turns of its spans, in order."""
    starts = np.searchsorted(pieces.row, np.arange(len(case.rows.ids) + 1))
    for row, listed in enumerate(case.rows.table.column("turns").to_pylist()):
        if listed is None:
            continue
        last = case.rows.number("last_turn", row)
        if last is not None and listed[-1:] != [last]:
            detail = f"turns {listed} do not end with last_turn {last}"
            case.report("turns", detail, row)
        here = slice(starts[row], starts[row + 1])
        named = pieces.turn_index[here][pieces.kind[here] != "no_splice_point"]
        left = iter(listed)
        for turn, _ in groupby(named.tolist()):
            if not any(one == turn for one in left):
                detail = f"turns {listed} lack {turn} or its order"
                case.report("turns", detail, row)
                break
        known = case.turns.calls.turns_of(int(case.session[row]))
        odd = sorted(set(listed) - set(known.tolist()))
        if odd:
            detail = f"turns {odd} are not in the session"
            case.report("turns", detail, row)


def weight_versions(case: Case, pieces: Spans) -> None:
    """weight_versions are those of the row's first and last token with known weights."""
    column = case.rows.table.column("weight_versions")
    if column.null_count == len(column):  # the column is optional
        return
    of_turns = case.turns.calls.table.column("weight_versions")
    due: dict[int, dict[str, str]] = {}
    for k in np.flatnonzero(pieces.stop > pieces.start):
        row = int(pieces.row[k])
        for one in of_turns[int(pieces.call[k])].as_py() or ():
            if max(one["start"], pieces.out_start[k]) < min(
                one["stop"], pieces.out_stop[k]
            ):
                due.setdefault(row, {"first": one["version"]})["last"] = one["version"]
    for row, given in enumerate(column.to_pylist()):
        if given != due.get(row):
            detail = f"weight_versions is {given}, expected {due.get(row)}"
            case.report("weight_versions", detail, row)


def mm_items(case: Case) -> None:
    """The images of a row are the session's, and its content ids are theirs."""
    table, ids = case.rows.table, case.rows.ids
    turns = case.turns.calls.table
    if "mm_items" not in table.column_names:
        return
    if not has_items(turns) and not has_items(table):
        return
    known: list[set[Image]] = [set() for _ in range(case.turns.calls.n_sessions)]
    sessions = case.turns.calls.session_of()
    for session, listed in zip(sessions, turns["mm_items"].to_pylist(), strict=True):
        known[session].update(map(same_image, listed or ()))
    for row, listed in enumerate(table.column("mm_items").to_pylist()):
        own = known[case.session[row]]
        found = image_faults(listed or (), ids[row], may_be_cut=True, known=own)
        for token, detail in found:
            case.report("mm_items", detail, row, None, token)


def flags(case: Case, pieces: Spans) -> None:
    """truncated, use_tool and ill_formed follow from the row's calls."""
    table, calls = case.rows.table, case.turns.calls.calls
    truncated = table.column("truncated").to_pylist()
    reasons = table.column("finish_reason").to_pylist()
    for row, (flag, reason) in enumerate(zip(truncated, reasons, strict=True)):
        if flag is not (reason == "length"):
            detail = f"truncated is {_null(flag)}, finish_reason is {reason!r}"
            case.report("flags", detail, row)
    for name in ("use_tool", "ill_formed"):
        due = np.zeros(len(truncated), np.bool_)
        due[pieces.row[calls[name][pieces.call] == 1]] = True
        for row, flag in enumerate(table.column(name).to_pylist()):
            if flag is bool(due[row]) or (flag and _unseen(case, row, name)):
                continue
            detail = f"{name} is {_null(flag)}, the row's turns give {bool(due[row])}"
            case.report("flags", detail, row)


def _unseen(case: Case, row: Index, name: str) -> bool:
    """Whether a call that may have no span in the row has the flag.

    A row that absorbs a reply says nothing of it where another row trains the reply or
    reports it as lost, and where none of its tokens may train.
    """
    calls, ids = case.turns.calls.calls, case.rows.ids[row]
    policy = case.policy
    absorbs = policy is not None and policy.on_drift != "fork"
    # Under absorb_any, a call of the row may share only the row's first prompt.
    opened = case.rows.number("prompt_length", row) or 0
    least = (
        opened if policy is not None and policy.on_drift == "absorb_any" else len(ids)
    )
    return any(
        calls[name][call]
        and (calls["out_len"][call] == 0 or case.cap is not None or absorbs)
        and _core.lcp(ids, case.turns.prompts[call])
        >= min(len(ids), least, calls["prompt_len"][call])
        and calls["prompt_len"][call] >= min(opened, len(ids))
        for call in case.turns.calls_of(int(case.session[row]))
    )


def _differ(given: float | None, due: float | None) -> bool:
    if given is None or due is None:
        return given is not due
    return not math.isclose(given, due, rel_tol=_ROUNDING, abs_tol=_ROUNDING)


def _null(value: object) -> object:
    return "null" if value is None else value
