"""Token-exact trajectories for RL post-training: recorded calls in, loss-masked rows out."""

from trajkit.drift import classify_drift
from trajkit.linearize import linearize
from trajkit.link import link
from trajkit.policies import Policy, policy

__all__ = ["Policy", "classify_drift", "linearize", "link", "policy"]
