"""Token-exact trajectories for RL: recorded calls in, loss-masked rows out."""

from typing import TYPE_CHECKING

from trajkit._lazy import lazy_names

if TYPE_CHECKING:
    from trajkit import analysis as analysis
    from trajkit import errors as errors
    from trajkit import export as export
    from trajkit import importers as importers
    from trajkit import learn as learn
    from trajkit import packs as packs
    from trajkit import plot as plot
    from trajkit import policies as policies
    from trajkit import recorder as recorder
    from trajkit import schema as schema
    from trajkit import training as training
    from trajkit import turns as turns
    from trajkit import view as view
    from trajkit.analysis.drift import classify_drift as classify_drift
    from trajkit.analysis.rows import check_rows as check_rows
    from trajkit.analysis.simulation import simulate as simulate
    from trajkit.errors import TrajkitError as TrajkitError
    from trajkit.files.run import run as run
    from trajkit.files.tables import read_rows as read_rows
    from trajkit.files.tables import read_sessions as read_sessions
    from trajkit.files.tables import read_turns as read_turns
    from trajkit.files.tables import scan_rows as scan_rows
    from trajkit.files.tables import scan_turns as scan_turns
    from trajkit.files.tables import write_rows as write_rows
    from trajkit.files.tables import write_sessions as write_sessions
    from trajkit.files.tables import write_turns as write_turns
    from trajkit.importers.reader import import_turns as import_turns
    from trajkit.learn.baselines import add_advantages as add_advantages
    from trajkit.learn.baselines import add_advantages_batches as add_advantages_batches
    from trajkit.learn.weights import add_weights as add_weights
    from trajkit.learn.weights import add_weights_batches as add_weights_batches
    from trajkit.packs.balancing import balance as balance
    from trajkit.packs.packing import pack as pack
    from trajkit.packs.packing import pack_batches as pack_batches
    from trajkit.packs.packing import unpack as unpack
    from trajkit.packs.verification import verify_packs as verify_packs
    from trajkit.policies import Policy as Policy
    from trajkit.policies import policy as policy
    from trajkit.recorder import Recorder as Recorder
    from trajkit.rows.linearize import linearize as linearize
    from trajkit.rows.linearize import linearize_batches as linearize_batches
    from trajkit.rows.linearize import link as link
    from trajkit.rows.linearize import link_batches as link_batches
    from trajkit.rows.linearize import report as report
    from trajkit.turns.delta import compact as compact
    from trajkit.turns.delta import compact_batches as compact_batches
    from trajkit.turns.delta import expand as expand
    from trajkit.turns.delta import expand_batches as expand_batches
    from trajkit.turns.records import from_records as from_records
    from trajkit.turns.validation import validate as validate
    from trajkit.turns.validation import validate_batches as validate_batches
    from trajkit.verification.run import verify as verify
    from trajkit.verification.run import verify_batches as verify_batches
else:
    __getattr__, __dir__ = lazy_names(__name__)
