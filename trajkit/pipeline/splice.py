"""Rows of raw outputs between stretches of later prompts (_native/plan/splice.pxi)."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit._arrow import lazy_compute as pc
from trajkit.pipeline.fill import RowLists, row_offsets
from trajkit.pipeline.payloads import PathRanges
from trajkit.pipeline.plan import COUNTS, Planned, choices_of
from trajkit.pipeline.row_items import row_items
from trajkit.pipeline.row_scalars import row_scalars
from trajkit.policies import Policy
from trajkit.schema import ROWS
from trajkit.turns.calls import Calls, Ints, Longs, Records
from trajkit.turns.prefix_forest import Forest, grow_paths
from trajkit.turns.structs import CALL, ROW

ENDED = ("stop", "tool_calls", "stop_sequence")
"""Values of finish_reason after which an output ends with its end of turn (spec:
Polar 2.3)."""


@dataclass(frozen=True, slots=True)
class SplicePlan(Planned):
    """Rows as chains of calls. Of a row, ``owner`` is the call that opens it."""

    # shape (n_calls,): the call that goes on from each in its chain, or -1
    next_calls: Ints
    # shape (n_calls,): where in its prompt the stretch begins that the row has
    starts: Longs
    # shape (n_calls,): where its output stands in the row; -1: in no row
    places: Longs


def plan_splices(
    calls: Calls, forest: Forest, links: Records, policy: Policy, max_tokens: int
) -> SplicePlan:
    """The rows of links whose ``lcp`` is known.

    What rows share is not known before `splice_batch` has written their tokens.
    """
    n_calls = len(calls.calls)
    plan = SplicePlan(
        np.empty(n_calls, ROW),
        np.zeros((calls.n_sessions, len(COUNTS)), np.int64),
        np.empty(n_calls, np.int32),
        np.empty(n_calls, np.int64),
        np.empty(n_calls, np.int64),
    )
    n_rows = _core.plan_splices(
        forest.paths,
        links,
        choices_of(policy, max_tokens),
        ended(calls),
        plan.next_calls,
        plan.starts,
        plan.places,
        plan.rows,
        plan.counts,
    )
    return replace(plan, rows=plan.rows[:n_rows])


def ended(calls: Calls) -> npt.NDArray[np.uint8]:
    """Whether the engine said that a call's output ended its turn, shape (n_calls,)."""
    reasons = calls.table.column("finish_reason")
    known = pc.is_in(reasons, value_set=pa.array(ENDED))
    flags: npt.NDArray[np.bool_] = known.to_numpy()
    return flags.astype(np.uint8)


def splice_batch(
    calls: Calls,
    forest: Forest,
    links: Records,
    policy: Policy,
    max_tokens: int,
    plan: SplicePlan,
    facts: pa.RecordBatch,
) -> pa.RecordBatch:
    """`trajkit.schema.ROWS` of a plan, in which what rows share is completed."""
    write = partial(
        _core.fill_splices,
        forest.paths,
        choices_of(policy, max_tokens),
        plan.next_calls,
        plan.starts,
        plan.places,
        calls.turn_index,
    )
    rows = plan.rows
    rows["stored"] = 0
    lists = RowLists.written(rows, row_offsets(rows), write, policy)
    _find_shared(plan, lists.offsets[0], lists.input_ids)
    columns = row_scalars(calls, links, policy, rows, facts).columns(0, len(rows))
    shown = partial(splice_ranges, calls, links, plan)
    columns["mm_items"] = row_items(calls, len(rows), shown)
    return lists.batch(calls, links, rows, columns, ROWS)


def _find_shared(plan: SplicePlan, token_offsets: Longs, input_ids: Ints) -> None:
    """Set parent_row and shared of the rows, and count forward tokens without them.

    The rows are no paths of the calls' forest: they are grown into one of their own,
    whose sources are the first rows that had some tokens.
    """
    rows = plan.rows
    paths = np.zeros(len(rows), CALL)
    paths["own"] = input_ids.ctypes.data + token_offsets[:-1] * input_ids.itemsize
    paths["prompt_len"] = rows["n_tokens"]
    paths["base"] = -1
    first = np.searchsorted(rows["session"], np.arange(len(plan.counts) + 1))
    forest = grow_paths(paths, first)
    alone = forest.shared == 0
    rows["parent_row"] = np.where(alone, -1, rows["index"][forest.shared_with])
    rows["shared"] = forest.shared
    new = np.bincount(
        rows["session"], rows["n_tokens"] - forest.shared, len(plan.counts)
    )
    plan.counted("tokens_forward_shared")[:] = new.astype(np.int64)


def splice_ranges(calls: Calls, links: Records, plan: SplicePlan) -> PathRanges:
    """The stretches of each row that are stretches of its calls' prompts.

    Those of prompts that the row starts with come before the parts that were spliced in.
    Needed only if payloads or images are carried. The loop runs once per call.
    """
    rows, heads, found = plan.rows, [], []
    prompt_len = calls.calls["prompt_len"]
    for row, n_tokens in enumerate(rows["n_tokens"].tolist()):
        call, before = int(rows["owner"][row]), -1
        same = True  # the row starts with the call's prompt
        for _ in range(int(rows["n_calls"][row])):
            length = int(prompt_len[call] - plan.starts[call])
            place = int(plan.places[call]) - length
            inside = max(min(length, n_tokens - place), 0)
            found.append((row, place, call, int(plan.starts[call]), inside))
            if before >= 0:
                same &= (
                    links["lcp"][call] == calls.path_len[before] == plan.starts[call]
                )
                if same:
                    heads.append((row, 0, call, 0, min(place, n_tokens)))
            before, call = call, int(plan.next_calls[call])
    return PathRanges(*np.array(heads + found, np.int64).reshape(-1, 5).T)
