"""Token-exact trajectories for RL: recorded calls in, loss-masked rows out."""

from typing import TYPE_CHECKING

from trajkit._lazy import lazy_names

if TYPE_CHECKING:
    from trajkit import analysis as analysis
    from trajkit import errors as errors
    from trajkit import export as export
    from trajkit import importers as importers
    from trajkit import jobs as jobs
    from trajkit import observations as observations
    from trajkit import plot as plot
    from trajkit import policies as policies
    from trajkit import recorder as recorder
    from trajkit import schema as schema
    from trajkit import training as training
    from trajkit import turns as turns
    from trajkit import view as view
    from trajkit.analysis.drift import classify_drift as classify_drift
    from trajkit.analysis.simulation import simulate as simulate
    from trajkit.errors import TrajkitError as TrajkitError
    from trajkit.importers.reader import import_turns as import_turns
    from trajkit.io.tables import read_rows as read_rows
    from trajkit.io.tables import read_sessions as read_sessions
    from trajkit.io.tables import read_turns as read_turns
    from trajkit.io.tables import scan_rows as scan_rows
    from trajkit.io.tables import write_rows as write_rows
    from trajkit.io.tables import write_sessions as write_sessions
    from trajkit.io.tables import write_turns as write_turns
    from trajkit.jobs.group_sessions import scan_turns as scan_turns
    from trajkit.packs.balancing import balance as balance
    from trajkit.packs.packing import pack as pack
    from trajkit.packs.unpacking import unpack as unpack
    from trajkit.packs.verification import verify_packs as verify_packs
    from trajkit.pipeline.links import link as link
    from trajkit.pipeline.rows import linearize as linearize
    from trajkit.pipeline.suffix_layout import full_rows as full_rows
    from trajkit.pipeline.suffix_layout import suffix_rows as suffix_rows
    from trajkit.policies import Policy as Policy
    from trajkit.policies import policy as policy
    from trajkit.recorder.recorder import Recorder as Recorder
    from trajkit.training.baselines import add_advantages as add_advantages
    from trajkit.training.row_weights import add_weights as add_weights
    from trajkit.turns.delta import compact as compact
    from trajkit.turns.delta import expand as expand
    from trajkit.turns.records import from_records as from_records
    from trajkit.turns.validation import validate as validate
    from trajkit.verification.run import verify as verify
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Policy": "policies",
            "Recorder": "recorder.recorder",
            "TrajkitError": "errors",
            "add_advantages": "training.baselines",
            "add_weights": "training.row_weights",
            "balance": "packs.balancing",
            "classify_drift": "analysis.drift",
            "compact": "turns.delta",
            "expand": "turns.delta",
            "from_records": "turns.records",
            "full_rows": "pipeline.suffix_layout",
            "import_turns": "importers.reader",
            "linearize": "pipeline.rows",
            "link": "pipeline.links",
            "pack": "packs.packing",
            "policy": "policies",
            "read_rows": "io.tables",
            "read_sessions": "io.tables",
            "read_turns": "io.tables",
            "scan_rows": "io.tables",
            "scan_turns": "jobs.group_sessions",
            "simulate": "analysis.simulation",
            "suffix_rows": "pipeline.suffix_layout",
            "unpack": "packs.unpacking",
            "validate": "turns.validation",
            "verify": "verification.run",
            "verify_packs": "packs.verification",
            "write_rows": "io.tables",
            "write_sessions": "io.tables",
            "write_turns": "io.tables",
        },
        (
            "analysis",
            "errors",
            "export",
            "importers",
            "jobs",
            "observations",
            "plot",
            "policies",
            "recorder",
            "schema",
            "training",
            "turns",
            "view",
        ),
    )
