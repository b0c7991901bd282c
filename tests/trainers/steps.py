"""Rows of rollouts that differ in their number of rows."""

import numpy as np
import pyarrow as pa
import pytest

import trajkit as tk

VOCABULARY = 64
REWARDS = {"a": 1.0, "b": 0.0, "c": 0.5, "d": -1.0}
GROUPS = {"a": "g", "b": "g", "c": "h", "d": "h"}
FORKED = {"a": 11, "b": 1, "c": 9, "d": 1}
"""22 rows, which make 1, 2 or 11 micro-batches of as many rows."""


def missing(*names):
    """Skip the test unless the modules can be imported."""
    for name in names:
        pytest.importorskip(name, exc_type=ImportError)


def calls(session, n_rows):
    """A session whose replies come back changed, so that each call opens a row."""
    draw = np.random.default_rng(ord(session))
    prompt = [1, 2, ord(GROUPS[session]) - 90]
    for _ in range(n_rows):
        output = draw.integers(20, VOCABULARY, draw.integers(2, 6)).tolist()
        yield {
            "session_id": session,
            "prompt_ids": prompt[:40],
            "output_ids": output,
            "output_logprobs": (-3.5 - draw.exponential(0.5, len(output))).tolist(),
        }
        prompt = [*prompt, output[0] - 10, *output[1:], 3]


def rows_of(n_rows):
    """The rows, each with the advantage of its rollout over the mean of its group."""
    sessions = pa.table(
        {
            "session_id": list(REWARDS),
            "reward": list(REWARDS.values()),
            "group_id": list(GROUPS.values()),
        }
    )
    turns = [call for name, n in n_rows.items() for call in calls(name, n)]
    rows = tk.linearize(tk.from_records(turns), sessions=sessions)
    assert len(rows) == sum(n_rows.values())
    return tk.add_advantages(rows, tk.learn.advantages(sessions))


def token_mean(rows):
    """Rows weighed so that their reference loss counts each trained token the same."""
    counts = tk.export.step_counts(rows)
    return tk.add_weights(rows, "constant", constant=counts.tokens / counts.rollouts)
