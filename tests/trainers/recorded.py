"""What was given to the trainers that PyPI does not have, for ``recorded.json``.

Their own code ran once on these fields, from a checkout. The file has the commit, the
functions that ran, a digest of the fields, and the result.
"""

import json
from hashlib import sha256
from pathlib import Path

import numpy as np

import trajkit as tk
from tests.trainers.steps import FORKED, rows_of, token_mean
from trajkit.export import areal, nemo_rl, prime_rl, skyrl, slime

RECORDED = Path(__file__).parent / "recorded.json"


def rows():
    return rows_of(FORKED)


def exported():
    """The fields of each trainer."""
    table = rows()
    counts = tk.export.step_counts(table)
    return {
        "areal": areal.trajectory_fields(table, weighted=counts),
        "nemo_rl": nemo_rl.message_log_fields(table),
        "prime_rl": prime_rl.sample_fields(table, env_name="e", weighted=counts),
        "skyrl": skyrl.generator_fields(table),
        "slime": slime.sample_fields(table),
    }


def digest(fields):
    """A digest of all names and values."""
    text = json.dumps(fields, default=lambda array: array.tolist(), sort_keys=True)
    return sha256(text.encode()).hexdigest()[:16]


def now(ids):
    """Logprobs of a model that looks at the token and at the sum of those before it."""
    ids = np.array(ids, np.int64)
    before = np.cumsum(ids) - ids
    found = -3.5 + ((ids * 7 + before * 3) % 101 - 50) / 60
    found[0] = 0.0
    return found.tolist()


def expected(name):
    """The reference loss of the rows on that model."""
    table, reduce = rows(), "mean"
    if name == "skyrl":
        return "valid"
    if name == "nemo_rl":  # which has no weights
        table, reduce = token_mean(table), "sum"
    logprobs = [value for ids in table["input_ids"].to_pylist() for value in now(ids)]
    return float(tk.learn.reference_loss(table, logprobs, reduce=reduce).total)
