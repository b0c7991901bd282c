"""Analyse recorded runs: drift and its causes, branches, comparison of policies.

For turns, policies and sessions that they cannot take, the functions raise what
`trajkit.linearize` raises.
"""

from typing import TYPE_CHECKING

from trajkit._lazy import lazy_names

if TYPE_CHECKING:
    from trajkit.analysis.branches import label_branches as label_branches
    from trajkit.analysis.drift import classify_drift as classify_drift
    from trajkit.analysis.drift import explain_drift as explain_drift
    from trajkit.analysis.rows import call_tree as call_tree
    from trajkit.analysis.rows import why as why
    from trajkit.analysis.sampled_tokens import output_spans as output_spans
    from trajkit.analysis.simulation import metrics as metrics
    from trajkit.analysis.simulation import simulate as simulate
else:
    __getattr__, __dir__ = lazy_names(__name__)
