"""Token-exact trajectories for RL: recorded calls in, loss-masked rows out."""

from trajkit.drift import classify_drift
from trajkit.errors import (
    FormatError,
    InvalidTurnsError,
    LayoutError,
    PolicyError,
    SchemaError,
    TornLogWarning,
    TrajkitError,
    UnknownSessionError,
)
from trajkit.io import iter_turns, read_rows, read_turns, write_rows, write_turns
from trajkit.linearize import linearize
from trajkit.link import link
from trajkit.messages import message_body, message_key
from trajkit.policies import Policy, policy
from trajkit.prefix import lcp
from trajkit.recorder import Recorded, Recorder
from trajkit.records import from_records
from trajkit.simulate import simulate
from trajkit.validate import set_aside, validate
from trajkit.verify import verify

__all__ = [
    "FormatError",
    "InvalidTurnsError",
    "LayoutError",
    "Policy",
    "PolicyError",
    "Recorded",
    "Recorder",
    "SchemaError",
    "TornLogWarning",
    "TrajkitError",
    "UnknownSessionError",
    "classify_drift",
    "from_records",
    "iter_turns",
    "lcp",
    "linearize",
    "link",
    "message_body",
    "message_key",
    "policy",
    "read_rows",
    "read_turns",
    "set_aside",
    "simulate",
    "validate",
    "verify",
    "write_rows",
    "write_turns",
]
