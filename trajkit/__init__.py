"""Token-exact trajectories for RL: recorded calls in, loss-masked rows out."""

from trajkit.branches import label_branches
from trajkit.delta import compact, expand
from trajkit.drift import classify_drift
from trajkit.errors import (
    FormatError,
    InvalidTurnsError,
    LayoutError,
    LeftOutWarning,
    MissingBodyError,
    PolicyError,
    SchemaError,
    TornLogWarning,
    TrajkitError,
    UnknownSessionError,
)
from trajkit.explain import explain_drift
from trajkit.files import compact_file, expand_file, linearize_file
from trajkit.gather import stream_turns
from trajkit.importers import import_file, import_turns
from trajkit.io import (
    iter_rows,
    iter_turns,
    read_rows,
    read_sessions,
    read_turns,
    write_rows,
    write_turns,
)
from trajkit.linearize import linearize
from trajkit.link import link
from trajkit.loss import Loss, reference_loss
from trajkit.messages import message_body, message_key, message_record
from trajkit.observations import observations
from trajkit.policies import Policy, policy
from trajkit.prefix import lcp
from trajkit.recorder import Recorded, Recorder
from trajkit.records import from_records
from trajkit.rewards import spread_rewards
from trajkit.roundtrip import check_roundtrip
from trajkit.simulate import simulate
from trajkit.suffix import full_rows, suffix_rows
from trajkit.validate import set_aside, validate
from trajkit.verify import verify
from trajkit.verify_files import verify_file
from trajkit.weights import add_advantages, advantages, weigh

__all__ = [
    "FormatError",
    "InvalidTurnsError",
    "LayoutError",
    "LeftOutWarning",
    "Loss",
    "MissingBodyError",
    "Policy",
    "PolicyError",
    "Recorded",
    "Recorder",
    "SchemaError",
    "TornLogWarning",
    "TrajkitError",
    "UnknownSessionError",
    "add_advantages",
    "advantages",
    "check_roundtrip",
    "classify_drift",
    "compact",
    "compact_file",
    "expand",
    "expand_file",
    "explain_drift",
    "from_records",
    "full_rows",
    "import_file",
    "import_turns",
    "iter_rows",
    "iter_turns",
    "label_branches",
    "lcp",
    "linearize",
    "linearize_file",
    "link",
    "message_body",
    "message_key",
    "message_record",
    "observations",
    "policy",
    "read_rows",
    "read_sessions",
    "read_turns",
    "reference_loss",
    "set_aside",
    "simulate",
    "spread_rewards",
    "stream_turns",
    "suffix_rows",
    "validate",
    "verify",
    "verify_file",
    "weigh",
    "write_rows",
    "write_turns",
]
