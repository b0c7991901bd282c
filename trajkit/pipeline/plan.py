"""The rows that a policy makes of linked calls, before their columns are written."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit._arrow.buffers import pooled
from trajkit._kernel_names import numbers
from trajkit.pipeline.routes.recorded import created_ranks
from trajkit.policies import DRIFT_ACTIONS, TRAINING_ROWS, Policy
from trajkit.schema import REPORT
from trajkit.turns.call_order import by_creation
from trajkit.turns.calls import Calls, Ints, Longs, Records
from trajkit.turns.prefix_forest import Forest
from trajkit.turns.structs import CHOICES, ROW

COUNTS = tuple(REPORT.names[REPORT.names.index("turns") :])
"""The columns of the report that the kernel counts, in its order."""
numbers("ReportCount", COUNTS)

NO_LIMIT = np.iinfo(np.int64).max
"""Of a number that a policy does not limit."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows as runs of calls, and what became of every session and every output."""

    # dtype ROW, shape (n_rows,)
    rows: Records
    # shape (n_sessions, len(COUNTS))
    counts: Longs
    # shape (n_calls,): the chain, or row, that trains each call's output, by its last
    # call; -1: none
    owners: Ints

    def counted(self, name: str) -> Longs:
        """One count of the report, by session."""
        return self.counts[:, COUNTS.index(name)]


@lru_cache(64)
def choices_of(policy: Policy, max_tokens: int) -> Records:
    """A policy as the kernels read it, dtype CHOICES, shape (1,); read-only."""
    choices = np.zeros(1, CHOICES)
    for name, value in {
        "fork_threshold": policy.fork_threshold,
        "max_tokens": max_tokens,
        "max_rows": NO_LIMIT if policy.max_rows is None else policy.max_rows,
        "on_drift": DRIFT_ACTIONS[policy.on_drift],
        "train_in": TRAINING_ROWS[policy.train_in],
        "keep_prefix": policy.keep_prefix,
        "keep_untrained": policy.keep_untrained,
        "keep_empty": policy.keep_empty,
        "chain_flags": policy.flag_scope == "chain",
        "main_only": policy.row_selection == "main",
        "cut_at_calls": policy.truncate_at == "calls",
        "need_logprob": policy.missing_logprobs == "untrain",
    }.items():
        choices[name] = value
    choices.flags.writeable = False
    return choices


def plan_rows(
    calls: Calls, forest: Forest, links: Records, policy: Policy, max_tokens: int
) -> Plan:
    """The rows of links whose ``lcp`` is known."""
    n_calls = len(calls.calls)
    rows, owners = pooled(n_calls, ROW), np.empty(n_calls, np.int32)
    counts = np.zeros((calls.n_sessions, len(COUNTS)), np.int64)
    created = np.empty(0, np.int32)
    if policy.row_selection == "main" and policy.parent_by == "prefix":
        created = created_ranks(calls, links)
    elif policy.row_selection == "main":
        created = by_creation(calls)
    n_rows = _core.plan_rows(
        forest.paths,
        links,
        choices_of(policy, max_tokens),
        created,
        owners,
        rows,
        counts,
    )
    return Plan(rows[:n_rows], counts, owners)


def row_offsets(rows: Records) -> Longs:
    """Offsets of the rows' tokens, spans and turns, shape (3, n_rows + 1)."""
    offsets = np.zeros((3, len(rows) + 1), np.int64)
    np.subtract(rows["n_tokens"], rows["stored"], out=offsets[0, 1:])
    offsets[1, 1:], offsets[2, 1:] = rows["n_spans"], rows["n_calls"]
    return offsets.cumsum(axis=1)


def report_batch(facts: pa.RecordBatch, plan: Plan) -> pa.RecordBatch:
    """`trajkit.schema.REPORT` of the sessions that the facts are of."""
    counts = [
        pa.array(plan.counted(name)).cast(REPORT.field(name).type) for name in COUNTS
    ]
    return pa.RecordBatch.from_arrays([*facts.columns, *counts], schema=REPORT)
