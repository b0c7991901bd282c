"""The earlier name of `trajkit.learn`, which defines all of this."""

from trajkit.learn import Loss as Loss
from trajkit.learn import add_advantages as add_advantages
from trajkit.learn import add_weights as add_weights
from trajkit.learn import advantages as advantages
from trajkit.learn import reference_loss as reference_loss
from trajkit.learn import spread_rewards as spread_rewards
from trajkit.learn import step_advantages as step_advantages
