"""The rows that a policy makes of linked calls, before their columns are written."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit._kernel_names import CHOICES, numbers
from trajkit.policies import DRIFT_ACTIONS, TRAINING_ROWS, Policy
from trajkit.rows.routes.prefix import created_ranks
from trajkit.schema import REPORT
from trajkit.tables.ragged import Ints, Longs, Records
from trajkit.turns.sessions import Sessions

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
        # spliced rows are planned of calls without drift
        "on_drift": DRIFT_ACTIONS.get(policy.on_drift, DRIFT_ACTIONS["fork"]),
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
    sessions: Sessions, links: Records, policy: Policy, max_tokens: int
) -> Plan:
    """The rows of links whose ``lcp`` is known."""
    created = np.empty(0, np.int32)
    if policy.row_selection == "main" and policy.parent_by == "prefix":
        created = created_ranks(sessions, links)
    elif policy.row_selection == "main":
        created = sessions.by_creation()
    choices = choices_of(policy, max_tokens)
    rows, owners, counts = _core.plan_rows(
        sessions.forest.paths, links, choices, created
    )
    return Plan(rows, counts, owners)


def report_batch(facts: pa.RecordBatch, plan: Plan) -> pa.RecordBatch:
    """`trajkit.schema.REPORT` of the sessions that the facts are of."""
    counts = [
        pa.array(plan.counted(name)).cast(REPORT.field(name).type) for name in COUNTS
    ]
    return pa.RecordBatch.from_arrays([*facts.columns, *counts], schema=REPORT)
