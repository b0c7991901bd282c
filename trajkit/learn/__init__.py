"""What training adds to rows: rewards, advantages, weights, and a reference loss."""

from typing import TYPE_CHECKING

from trajkit._lazy import lazy_names

if TYPE_CHECKING:
    from trajkit.learn.baselines import add_advantages as add_advantages
    from trajkit.learn.baselines import advantages as advantages
    from trajkit.learn.baselines import step_advantages as step_advantages
    from trajkit.learn.loss import Loss as Loss
    from trajkit.learn.loss import reference_loss as reference_loss
    from trajkit.learn.observations import observation_report as observation_report
    from trajkit.learn.observations import observation_weights as observation_weights
    from trajkit.learn.rewards import spread_rewards as spread_rewards
    from trajkit.learn.rewards import spread_rewards_batches as spread_rewards_batches
    from trajkit.learn.weights import add_weights as add_weights
else:
    __getattr__, __dir__ = lazy_names(__name__)
