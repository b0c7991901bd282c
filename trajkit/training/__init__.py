"""Additions for training: weights, advantages, rewards per turn, a reference loss."""

from typing import TYPE_CHECKING

from trajkit._lazy import lazy_names

if TYPE_CHECKING:
    from trajkit.training.baselines import add_advantages as add_advantages
    from trajkit.training.baselines import advantages as advantages
    from trajkit.training.loss import Loss as Loss
    from trajkit.training.loss import reference_loss as reference_loss
    from trajkit.training.rewards import spread_rewards as spread_rewards
    from trajkit.training.row_weights import add_weights as add_weights
    from trajkit.training.steps import step_advantages as step_advantages
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "baselines": "add_advantages advantages",
            "loss": "Loss reference_loss",
            "rewards": "spread_rewards",
            "row_weights": "add_weights",
            "steps": "step_advantages",
        },
    )
