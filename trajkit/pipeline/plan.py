"""The rows that a policy makes of linked calls, before their columns are written."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit._arrow.buffers import pooled
from trajkit.policies import ON_DRIFT, TRAIN_IN, Policy
from trajkit.schema import REPORT
from trajkit.turns.call_order import by_creation
from trajkit.turns.calls import Calls, Ints, Longs, Records
from trajkit.turns.prefix_forest import Forest
from trajkit.turns.structs import ROW

COUNTS = tuple(REPORT.names[REPORT.names.index("turns") :])
"""The columns of the report that the kernel counts, in its order."""

NO_LIMIT = np.iinfo(np.int64).max
"""Of a number that a policy does not limit."""

_BY_ROW = ("longest", "most_trained")  # of TRAIN_IN, those that compare rows


@dataclass(frozen=True, slots=True)
class Planned:
    """Rows before their columns are written, and what became of every session."""

    # dtype ROW, shape (n_rows,)
    rows: Records
    # shape (n_sessions, len(COUNTS))
    counts: Longs

    def counted(self, name: str) -> Longs:
        """One count of the report, by session."""
        return self.counts[:, COUNTS.index(name)]


@dataclass(frozen=True, slots=True)
class Plan(Planned):
    """Rows as runs of calls, and what became of every claim."""

    # shape (n_calls,): how each call met its parent's row
    kinds: npt.NDArray[np.uint8]
    # shape (n_calls,): the chain, or row, that owns each call's claim, by its last call;
    # -1: none
    owners: Ints


def plan_rows(
    calls: Calls, forest: Forest, links: Records, policy: Policy, max_tokens: int
) -> Plan:
    """The rows of links whose ``lcp`` is known."""
    n_calls = len(calls.calls)
    plan = Plan(
        pooled(n_calls, ROW),
        np.zeros((calls.n_sessions, len(COUNTS)), np.int64),
        np.empty(n_calls, np.uint8),
        np.empty(n_calls, np.int32),
    )
    n_rows = _core.plan_rows(
        calls.calls,
        calls.session_offsets,
        forest.nodes,
        forest.ends,
        links,
        ON_DRIFT.index(policy.on_drift),
        policy.fork_threshold,
        policy.keep_prefix,
        not policy.keep_untrained,
        not policy.keep_empty,
        policy.flag_scope == "chain",
        policy.row_selection == "main",
        policy.truncate_at == "calls",
        by_creation(calls) if policy.row_selection == "main" else np.empty(0, np.int32),
        max_tokens,
        NO_LIMIT if policy.max_rows is None else policy.max_rows,
        TRAIN_IN.index(policy.train_in),
        policy.missing_logprobs == "untrain",
        plan.kinds,
        np.empty((5, n_calls), np.int32),
        np.empty((6, n_calls if policy.train_in in _BY_ROW else 0), np.int64),
        plan.owners,
        np.empty(len(forest.nodes), np.int32),
        plan.rows,
        plan.counts,
    )
    return replace(plan, rows=plan.rows[:n_rows])


def report_batch(facts: pa.RecordBatch, plan: Planned) -> pa.RecordBatch:
    """`trajkit.schema.REPORT` of the sessions that the facts are of."""
    counts = [
        pa.array(plan.counted(name)).cast(REPORT.field(name).type) for name in COUNTS
    ]
    return pa.RecordBatch.from_arrays([*facts.columns, *counts], schema=REPORT)
