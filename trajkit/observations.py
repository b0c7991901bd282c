"""The earlier name of `trajkit.learn`, which defines all of this."""

from trajkit.learn import observation_weights as observation_weights
