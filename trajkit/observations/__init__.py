"""Which context tokens are a tool's output, and the weight that each gets."""

from typing import TYPE_CHECKING

from trajkit._lazy import lazy_names

if TYPE_CHECKING:
    from trajkit.observations.weights import observation_weights as observation_weights
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "weights": "observation_weights",
        },
    )
