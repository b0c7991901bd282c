"""What a training run can be set to."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trajkit_shim.prompting.prompts import Mode

POLICIES = ("faithful", "slime", "trl", "polar")
"""The policies that are trained under unless others are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to train; the same for all seeds and policies of a run."""

    warm_runs: int = 600  # scripted runs of the warm start, and its optimizer steps
    warm_steps: int = 300
    row_policy: str = POLICIES[0]
    steps: int = 25
    tasks: int = 8  # per step
    samples: int = 8  # rollouts per task, which form a group
    epochs: int = 2  # passes over the packs of a step, an update of the weights each
    width: int = 64
    layers: int = 2
    learning_rate: float = 1e-3
    clip: tuple[float, float] = (0.2, 0.2)
    # a mask on the CPU costs the square of a pack's tokens
    pack_tokens: int = 256
    prompts: "Mode" = "render"
    device: str = "cpu"
