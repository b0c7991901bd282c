"""Token-exact trajectories for RL: recorded calls in, loss-masked rows out."""

from trajkit.drift import classify_drift
from trajkit.errors import (
    FormatError,
    InvalidTurnsError,
    LayoutError,
    PolicyError,
    SchemaError,
    TrajkitError,
    UnknownSessionError,
)
from trajkit.io import read_rows, read_turns, write_rows, write_turns
from trajkit.linearize import linearize
from trajkit.link import link
from trajkit.policies import Policy, policy
from trajkit.prefix import lcp
from trajkit.recorder import Recorded, Recorder
from trajkit.records import from_records
from trajkit.validate import validate

__all__ = [
    "FormatError",
    "InvalidTurnsError",
    "LayoutError",
    "Policy",
    "PolicyError",
    "Recorded",
    "Recorder",
    "SchemaError",
    "TrajkitError",
    "UnknownSessionError",
    "classify_drift",
    "from_records",
    "lcp",
    "linearize",
    "link",
    "policy",
    "read_rows",
    "read_turns",
    "validate",
    "write_rows",
    "write_turns",
]
